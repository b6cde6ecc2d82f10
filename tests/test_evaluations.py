"""kv_cache, evaluate, zeroshot and export: against arithmetic by hand, brute force and direct log-likelihoods."""
import json
import math
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from test_curve_analyses import run_command
from torch.nn import functional as F

import sample
import train
from analysis import common, evaluate, export, kv_cache, zeroshot
from configurator import UserError
from model import GPT, GPTConfig, KVCache, load_checkpoint
from prepare import Bytes, Data

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TINY = dict(n_layer=2, n_head=4, n_embd=32, block_size=12, vocab_size=320)
pytestmark = pytest.mark.xdist_group("transformers")  # one process imports it, and lm_eval: each takes many seconds


@pytest.fixture(scope="module")
def runs(trained, tmp_path_factory):
    """A copy of a few of the trained runs, to write beside."""
    folder = tmp_path_factory.mktemp("evaluations") / "runs"
    for name in ("vanilla", "svformer", "gqa"):
        shutil.copytree(trained / "runs" / name / "seed1", folder / name / "seed1")
    shutil.copy(trained / "runs" / "summary.json", folder)
    return folder


def call(module, *words, capsys=None, monkeypatch=None):
    """A command's main() in this process; returns what it printed."""
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, words)])
    module.main()
    return capsys.readouterr()


def content(path):
    """A JSON file's content; NaN and infinities are refused, as by other readers."""
    def refuse(x):
        raise AssertionError(f"{x} in {path}")
    return json.loads(path.read_text(), parse_constant=refuse)


def is_picture(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


# ---------------------------------------------------------------------------------------------------------------------
# kv_cache


@pytest.mark.parametrize("options, fraction", [
    ({}, lambda L: 1), ({"value_residual": True}, lambda L: 1), ({"neutreno": 0.4}, lambda L: 1),
    ({"denseformer": True}, lambda L: 1),
    ({"shared_value": True}, lambda L: (L + 1) / (2 * L)),
    ({"n_kv_head": 4}, lambda L: 1 / 2), ({"cla": 2}, lambda L: 1 / 2), ({"n_kv_head": 1}, lambda L: 1 / 8),
    ({"shared_value": True, "n_kv_head": 4}, lambda L: (L + 1) / (4 * L)),
    ({"shared_value": True, "share_k_every": 2}, lambda L: (L / 2 + 1) / (2 * L)),
    ({"cla": 2, "n_kv_head": 2}, lambda L: 1 / 8),
    ({"shared_value": True, "n_kv_head": 2}, lambda L: (L + 1) / (8 * L)),
    ({"shared_value": True, "value_anchors": "1,4,8"}, lambda L: (L + 3) / (2 * L))],
    ids=lambda x: str(x) if isinstance(x, dict) else "fraction")
def test_cache_fractions_of_the_paper(options, fraction):
    """The paper's fractions at the depths of Table 4, from a cache that is allocated."""
    for L in (8, 12, 24):
        shape = GPTConfig(n_layer=L, n_head=8, n_embd=128, block_size=64, vocab_size=64, **options)
        found = kv_cache.row(shape, kv_cache.Config(device="cpu"))
        assert found["of_vanilla"] == pytest.approx(fraction(L), abs=1e-12)
        assert found["kv_bytes_per_token"] == 2 * L * 128 * 2 * fraction(L)
        assert KVCache(shape, 3, 7, "meta", torch.bfloat16).nbytes == 21 * found["kv_bytes_per_token"]


def test_bytes_per_token_of_every_system_and_size(tmp_path, capsys, monkeypatch):
    said = call(kv_cache, f"--out_dir={tmp_path}", "--device=cpu", capsys=capsys, monkeypatch=monkeypatch)
    found = content(tmp_path / "kv_cache.json")["systems"]
    for size, vanilla, svformer in (("82M", 16384, 9216), ("180M", 36864, 19968), ("468M", 98304, 51200)):
        assert found[f"{size}/vanilla"]["kv_bytes_per_token"] == vanilla
        assert found[f"{size}/svformer"]["kv_bytes_per_token"] == svformer
        for name, of_vanilla in (("gqa2", 1 / 2), ("cla2", 1 / 2), ("cla2_gqa4", 1 / 8), ("identity", 1)):
            assert found[f"{size}/{name}"]["of_vanilla"] == of_vanilla
    assert "180M/gqa8: left out: 12 heads" in said.err and "2M/sparse: left out" in said.err
    assert len([n for n in found if n.startswith("82M/")]) == 34 and is_picture(tmp_path / "kv_cache.png")
    r = found["468M/vanilla"]
    assert r["weight_bytes"] == 2 * (467_921_920 + 2 * 27 * 1024)  # the paper's 50,277 rows, rounded up to 50,304
    free = 80e9 - r["weight_bytes"]
    assert r["longest_context"] * 98304 <= free < (r["longest_context"] + 1) * 98304
    assert r["largest_batch"] * 98304 * 2048 <= free < (r["largest_batch"] + 1) * 98304 * 2048


def test_kv_cache_of_given_runs(runs, tmp_path, capsys, monkeypatch):
    call(kv_cache, runs, f"--out_dir={tmp_path}", "--memory_gb=0.001", "--dtype=float32", "--length=20", "--device=cpu",
         capsys=capsys, monkeypatch=monkeypatch)
    found = content(tmp_path / "kv_cache.json")["systems"]
    assert {n: r["kv_bytes_per_token"] for n, r in found.items()} == {
        "vanilla/seed1": 1024, "svformer/seed1": 640, "gqa/seed1": 512}
    params = sum(p.numel() for p in common.find_runs([str(runs / "vanilla")])[0].model().parameters())
    assert found["vanilla/seed1"]["largest_batch"] == int((1e6 - 4 * params) / (1024 * 20)) > 0
    call(kv_cache, runs, f"--out_dir={tmp_path}", "--memory_gb=0.0001", "--device=cpu", capsys=capsys, monkeypatch=monkeypatch)
    assert content(tmp_path / "kv_cache.json")["systems"]["gqa/seed1"]["longest_context"] == 0  # the weights don't fit


# ---------------------------------------------------------------------------------------------------------------------
# evaluate


def token_losses(model, ids):
    """Cross-entropy of each target of one row of ids, from whole logits in float64."""
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]]))[0][0].double()
    return F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").tolist()


def whole(bin_):
    return np.fromfile(bin_.path, bin_.dtype).astype(int).tolist()


def test_fixed_windows_equal_direct_cross_entropy_and_the_training_log(runs, trained, tmp_path, capsys, monkeypatch):
    call(evaluate, runs, f"--out_dir={tmp_path}", "--batch_size=5", "--device=cpu", capsys=capsys, monkeypatch=monkeypatch)
    found, data = content(tmp_path / "evaluate.json")["runs"], Data(str(trained / "bins"))
    assert list(found) == ["vanilla/seed1", "svformer/seed1", "gqa/seed1"] and is_picture(tmp_path / "evaluate.png")
    model = common.find_runs([str(runs / "svformer")])[0].model()
    for name, bin_ in data.val.items():
        ids = whole(bin_)
        direct = [x for w in range((len(ids) - 1) // 32) for x in token_losses(model, ids[w * 32:w * 32 + 33])]
        r = found["svformer/seed1"]["bins"][name]
        assert r["tokens"] == len(direct) and r["loss"] == pytest.approx(sum(direct) / len(direct), abs=1e-5)
        assert r["perplexity"] == pytest.approx(math.exp(r["loss"]))
    call(evaluate, runs / "vanilla", f"--out_dir={tmp_path}", "--sequences=8", "--device=cpu", capsys=capsys,
         monkeypatch=monkeypatch)
    (found,), last = content(tmp_path / "evaluate.json")["runs"].values(), train.read_log(runs / "vanilla/seed1")[1][30]
    assert found["bins"]["val"]["loss"] == pytest.approx(last["val_loss"], abs=1e-5)
    assert {s: found["bins"][s]["loss"] for s in last["val"]} == pytest.approx(last["val"], abs=1e-5)
    assert found["mean"]["loss"] == pytest.approx(last["val_mean"], abs=1e-5)


def test_bits_per_byte_and_means_by_hand(runs, trained, tmp_path, capsys, monkeypatch):
    call(evaluate, runs / "gqa", f"--out_dir={tmp_path}", "--device=cpu", capsys=capsys, monkeypatch=monkeypatch)
    (found,), meta = content(tmp_path / "evaluate.json")["runs"].values(), content(trained / "bins" / "meta.json")["sources"]
    lines = [json.loads(line) for line in open(trained / "val.jsonl")]
    for source in ("C4", "Book"):
        texts = [x["text"].encode() for x in lines if x["meta"]["redpajama_set_name"] == f"RedPajama{source}"]
        n_bytes = sum(map(len, texts))
        r = found["bins"][source]
        assert r["bits_per_byte"] == pytest.approx(r["loss"] / math.log(2) * (n_bytes + len(texts)) / n_bytes, rel=1e-9)
    n_bytes = sum(len(x["text"].encode()) for x in lines)
    assert found["bins"]["val"]["bits_per_byte"] == pytest.approx(
        found["bins"]["val"]["loss"] / math.log(2) * (n_bytes + len(lines)) / n_bytes, rel=1e-9)
    c4, book = (found["bins"][s]["loss"] for s in ("C4", "Book"))
    a, b = (meta[s]["train"]["tokens"] for s in ("C4", "Book"))
    assert found["mean"]["loss"] == pytest.approx((c4 + book) / 2)
    assert found["mean"]["perplexity"] == pytest.approx(math.exp((c4 + book) / 2))
    assert found["weighted"]["loss"] == pytest.approx((a * c4 + b * book) / (a + b)) and a != b
    call(evaluate, runs / "gqa", f"--out_dir={tmp_path}", "--device=cpu", "--weights=C4:3,RedPajamaBook:1", capsys=capsys,
         monkeypatch=monkeypatch)
    (found,) = content(tmp_path / "evaluate.json")["runs"].values()
    assert found["weighted"]["loss"] == pytest.approx((3 * c4 + book) / 4) and found["weights"] == {"C4": 0.75, "Book": 0.25}


def test_means_of_the_papers_table_5():
    sources = ("CommonCrawl", "C4", "Github", "StackExchange", "Wikipedia", "Book", "ArXiv")
    weights = dict(zip(sources, (50, 20, 10, 5, 5, 5, 5)))  # Table 2
    for losses, mean, weighted in [
        ((3.3595, 3.5388, 1.4247, 2.3872, 2.9047, 3.3797, 2.1779), 2.7389, 3.0725),
        ((2.8214, 3.0115, 1.0730, 1.9388, 2.2477, 2.8696, 1.8142), 2.2537, 2.5638),
    ]:
        bins = {s: dict(loss=x, bits_per_byte=None) for s, x in zip(sources, losses)}
        found = evaluate.means({"val": dict(loss=9.0, bits_per_byte=None), **bins}, weights)
        assert found["mean"]["loss"] == pytest.approx(mean, abs=6e-5)
        assert found["weighted"]["loss"] == pytest.approx(weighted, abs=6e-5) and found["weighted"]["bits_per_byte"] is None
    assert evaluate.means({"val": bins["C4"]}, {}) == {"mean": None, "weighted": None}


@pytest.mark.parametrize("tokens", [13, 14, 40, 41, 60])
@pytest.mark.parametrize("stride", [1, 4, 5, 12])
def test_sliding_windows_score_every_token_once_with_enough_context(tokens, stride):
    length, times = 12, np.zeros(60, int)
    for start, n in evaluate.sliding(tokens, length, stride):
        assert 0 <= start and start + length < tokens
        for target in range(start + length + 1 - n, start + length + 1):
            times[target] += 1
            assert start == 0 or target - start >= length - stride + 1  # inputs it sees: itself excluded, length - stride + 1
    assert times[0] == 0 and (times[1:tokens] == 1).all() and (times[tokens:] == 0).all()
    assert evaluate.sliding(12, 12, stride) == []


def test_sliding_windows_equal_brute_force(runs, trained, tmp_path, capsys, monkeypatch):
    call(evaluate, runs / "svformer", f"--out_dir={tmp_path}", "--stride=7", "--length=24", "--bin=C4", "--device=cpu",
         capsys=capsys, monkeypatch=monkeypatch)
    (found,) = content(tmp_path / "evaluate.json")["runs"].values()
    model, ids = common.find_runs([str(runs / "svformer")])[0].model(), whole(Data(str(trained / "bins")).val["C4"])
    direct = token_losses(model, ids[:25])
    for target in range(25, len(ids)):  # window k ends with target 24 + 7k; the last one is moved back to the end
        start = min(math.ceil((target - 24) / 7) * 7, len(ids) - 25)
        direct.append(token_losses(model, ids[start:target + 1])[-1])
    assert found["bins"]["C4"]["tokens"] == len(ids) - 1 == len(direct)
    assert found["bins"]["C4"]["loss"] == pytest.approx(sum(direct) / len(direct), abs=1e-5)
    assert found["mean"] is None and list(found["bins"]) == ["C4"]


def test_two_processes_equal_one(runs, tmp_path, capsys, monkeypatch):
    words = [str(runs / "vanilla"), "--device=cpu", "--batch_size=3"]
    both = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m",
                           "analysis.evaluate", *words, f"--out_dir={tmp_path}/two"], cwd=REPO, capture_output=True, text=True)
    assert both.returncode == 0 and both.stdout.count("perplexity") == 1, both.stderr
    call(evaluate, *words, f"--out_dir={tmp_path}/one", capsys=capsys, monkeypatch=monkeypatch)
    (two,), (one,) = (content(tmp_path / n / "evaluate.json")["runs"].values() for n in ("two", "one"))
    assert list(one["bins"]) == ["val", "C4", "Book"]
    for name in one["bins"]:
        assert two["bins"][name] == pytest.approx(one["bins"][name], rel=1e-9)


def test_evaluate_names_what_it_leaves_out_and_what_is_wrong(runs, trained, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "runs"
    shutil.copytree(runs / "vanilla/seed1", folder / "a")
    shutil.copytree(runs / "vanilla/seed1", folder / "b", ignore=lambda *_: ["ckpt.pt"])
    said = call(evaluate, folder, "--sequences=2", "--device=cpu", capsys=capsys, monkeypatch=monkeypatch)
    assert "/b/ckpt.pt: no such checkpoint" in said.err and len(content(folder / "evaluate.json")["runs"]) == 1
    for words, problem in [
        ([folder / "b"], "no such checkpoint"), (["--weights=Foo:1"], "no source Foo, only C4, Book"),
        (["--weights=C4"], "source:weight"), (["--weights=C4:0"], "source:weight"),
        (["--weights=C4:1,RedPajamaC4:2"], "each source once"), (["--bin=X"], "has val, C4, Book"),
        (["--stride=33"], "at least 0 and below 33"), (["--stride=4", "--sequences=3"], "leave --sequences out"),
        (["--sequences=-1"], "at least 0"), (["--data=nowhere"], "no such folder"),
    ]:
        with pytest.raises(UserError, match=problem):
            call(evaluate, *(words if words[0] == folder / "b" else [folder / "a", "--device=cpu", *words]), capsys=capsys,
                 monkeypatch=monkeypatch)


def test_sources_are_not_joined_by_lines(monkeypatch, runs, tmp_path, capsys):
    panels = []
    monkeypatch.setattr("analysis.plot.draw", lambda path, found, *_: panels.extend(found) or open(path, "w").close())
    call(evaluate, runs, "--sequences=1", "--device=cpu", f"--out_dir={tmp_path}", capsys=capsys, monkeypatch=monkeypatch)
    found = common.find_runs([str(runs / "gqa")])
    zeroshot.picture(str(tmp_path / "z"), found, {run.name: {"piqa": {"acc": 0.5}} for run in found})
    assert len(panels) == 3 and all(p["apart"] for p in panels)


def test_a_bin_without_a_window_and_one_without_counts(runs, trained, tmp_path, capsys, monkeypatch):
    bins = tmp_path / "bins"
    shutil.copytree(trained / "bins", bins)
    meta = content(bins / "meta.json")
    short = np.fromfile(bins / "val_Book.bin", meta["dtype"])[:20]
    short.tofile(bins / "val_Book.bin")
    meta["bins"]["val_Book"] = 20
    del meta["sources"]["C4"]
    (bins / "meta.json").write_text(json.dumps(meta))
    said = call(evaluate, runs / "gqa", f"--data={bins}", f"--out_dir={tmp_path}", "--device=cpu", capsys=capsys,
                monkeypatch=monkeypatch)
    (found,) = content(tmp_path / "evaluate.json")["runs"].values()
    assert "val_Book.bin: left out: 20 tokens" in said.err and list(found["bins"]) == ["val", "C4"]
    assert found["bins"]["C4"]["bits_per_byte"] is None and found["mean"]["loss"] == found["bins"]["C4"]["loss"]
    assert found["weighted"] is None
    damaged = np.fromfile(bins / "val_C4.bin", meta["dtype"])
    damaged[40] = 300
    damaged.tofile(bins / "val_C4.bin")
    monkeypatch.setattr("prepare.Bin.sample", lambda self, *_: np.empty(0, int))  # not among the pages that opening looks at
    with pytest.raises(UserError, match="holds the id 300"):
        call(evaluate, runs / "gqa", f"--data={bins}", f"--out_dir={tmp_path}", "--device=cpu", capsys=capsys,
             monkeypatch=monkeypatch)


# ---------------------------------------------------------------------------------------------------------------------
# zeroshot


class Pairs(Bytes):
    """A tokenizer that merges, as BPE does: bytes, and a token for ' b', 'ab' and two spaces. Ids below 260."""
    name, n_vocab, eot = "pairs", 260, 256
    merged = {" b": 257, "ab": 258, "  ": 259}

    def encode(self, text):
        ids, i = [], 0
        while i < len(text):
            two = self.merged.get(text[i:i + 2])
            ids += [two] if two else text[i].encode()
            i += 2 if two else 1
        return ids


@pytest.fixture(scope="module")
def loud():
    """A random model whose padded columns (260 to 319) would win most argmaxes and the softmax, were they not dropped."""
    model = GPT(GPTConfig(**TINY, value_residual=True), seed=3).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8 if p.dim() == 2 else 1)
        model.lm_head.weight[260:] = model.lm_head.weight[:60] * 3
    return model


def direct(model, context, continuation, n_vocab=260):
    """One pair, token by token: each from its own forward pass over at most block_size ids."""
    ids, total, greedy = context + continuation, 0.0, True
    first = max(0, len(ids) - 1 - model.config.block_size)
    for at in range(len(context), len(ids)):
        with torch.no_grad():
            p = model(torch.tensor([ids[first:at]]))[0][0, -1, :n_vocab].double().log_softmax(-1)
        total, greedy = total + p[ids[at]].item(), greedy and int(p.argmax()) == ids[at]
    return total, greedy


PAIRS = [("a", " b"), ("the cat", " sat"), ("the cat ", "sat"), ("x  ", "b"), ("a longer context than fits", " abab"),
         ("a", "b"), ("", "start"), ("   ", "b"), ("line\n", "next"), ("é", " ü"), ("q", "z" * 12)]


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_scores_equal_direct_log_likelihoods(loud, batch_size):
    scorer = zeroshot.Scorer(loud, Pairs(), batch_size)
    found = scorer.score(PAIRS)
    for pair, (p, greedy) in zip(PAIRS, found):
        want, want_greedy = direct(loud, *scorer.pair(*pair))
        assert p == pytest.approx(want, abs=1e-4) and greedy == want_greedy, pair
    backwards = scorer.score(PAIRS[::-1])[::-1]
    assert [p for p, _ in backwards] == pytest.approx([p for p, _ in found], abs=1e-4)


def test_the_boundary_between_context_and_continuation():
    pair = zeroshot.Scorer(GPT(GPTConfig(**TINY)), Pairs()).pair
    assert pair("x", " b") == ([120], [257])
    assert pair("x ", "b") == ([120], [257])  # the space moves: the continuation is the same token
    assert pair("x  ", "b") == ([120], [259, 98])
    assert pair("x\n", "b") == ([120], [10, 98])
    assert pair("", " b") == ([256], [257]) and pair("  ", "b") == ([256], [259, 98])
    assert pair("xa", "bc") == ([120, 97], [99])  # 'ab' is one token of the whole text
    assert pair("x", "") == ([120], [])


def test_left_truncation_keeps_the_continuation(loud):
    scorer = zeroshot.Scorer(loud, Pairs())
    context, continuation = [97 + i % 20 for i in range(40)], [100, 101, 102]
    (found,) = scorer.score_tokens([(context, continuation)])
    assert found[0] == pytest.approx(direct(loud, context[-10:], continuation)[0], abs=1e-4)  # 10 + 3 ids are 12 inputs
    assert abs(found[0] - direct(loud, context[-9:], continuation)[0]) > 1e-3


def test_rolling_log_likelihood_scores_each_token_once(loud):
    """Windows as the harness makes them: full ones that follow each other, the last moved back to have a whole context."""
    scorer, text = zeroshot.Scorer(loud, Pairs(), 2), "qwertzuiopsdfghjklyxcvnm,.-12345"
    ids = [256, *scorer.encode(text)]
    want = direct(loud, ids[:1], ids[1:13])[0] + direct(loud, ids[12:13], ids[13:25])[0] + direct(loud, ids[20:25], ids[25:])[0]
    assert len(ids) == 33 and scorer.score_text([text, "ab", ""]) == pytest.approx(
        [want, direct(loud, [256], [258])[0], 0.0], abs=1e-4)


def test_greedy_flag_is_exact(loud):
    scorer = zeroshot.Scorer(loud, Pairs())
    written = loud.generate(torch.tensor([[97, 98]]), 6, temperature=0, n_vocab=260)[0, 2:].tolist()
    other = [(written[-1] + 1) % 256]
    found = scorer.score_tokens([([97, 98], written), ([97, 98], written[:-1] + other), ([97, 98], written[:1])])
    assert [g for _, g in found] == [True, False, True] and max(written) < 260


def test_generation_stops_where_asked_and_is_that_of_one_alone(loud):
    scorer = zeroshot.Scorer(loud, Pairs())
    contexts = ["a", "some more words than fit", "xy"]
    alone = [scorer.generate([c], max_new_tokens=5, temperature=0)[0] for c in contexts]
    assert scorer.generate(contexts, max_new_tokens=5, temperature=0) == alone and all(alone)
    stop = alone[0][2:3]
    assert scorer.generate(["a"], until=[stop, "\0\0"], max_new_tokens=5, temperature=0) == [alone[0][:alone[0].index(stop)]]


TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
""", "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
  - {metric: byte_perplexity}
""", "writing": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{written}}"
generation_kwargs: {until: ["é"], max_gen_toks: 6}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""}


def test_the_harness_runs_tasks_of_its_own_and_agrees_with_the_scorer(runs, tmp_path):
    pytest.importorskip("lm_eval")
    run = common.find_runs([str(runs / "vanilla")])[0]
    scorer = zeroshot.Scorer(run.model(), Bytes())
    docs = [{"question": f"{('C4', 'Book')[i % 2]}{i} é {('C4', 'Book')[i % 2]}", "answer": i % 3 % 2,
             "choices": [f"{i * 7}", f"{i} é Book{i} and more"]} for i in range(20)]
    for d in docs:
        d["written"] = scorer.generate([d["question"]], until=["é"], max_new_tokens=6, temperature=0)[0]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(d) + "\n" for d in docs))
    (tmp_path / "tasks").mkdir()
    for name, text in TASKS.items():
        (tmp_path / "tasks" / f"{name}.yaml").write_text(
            f"task: nano_{name}\ndataset_path: json\ntest_split: test\n"
            f"dataset_kwargs: {{data_files: {{test: {tmp_path}/docs.jsonl}}}}\n{text}")
    done = subprocess.run(
        [sys.executable, "-m", "analysis.zeroshot", str(runs / "vanilla"), str(runs / "svformer"), "--device=cpu",
         "--tasks=nano_choice,nano_rolling,nano_writing", f"--include_path={tmp_path}/tasks", f"--out_dir={tmp_path}",
         "--batch_size=3"], cwd=REPO, capture_output=True, text=True,
        env={**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    found = content(tmp_path / "zeroshot.json")["runs"]
    assert list(found) == ["vanilla/seed1", "svformer/seed1"] and is_picture(tmp_path / "zeroshot.png")
    found = found["vanilla/seed1"]
    scores = [[scorer.score([(d["question"], " " + c)])[0][0] for c in d["choices"]] for d in docs]  # its target_delimiter
    right = [int(np.argmax(s)) == d["answer"] for s, d in zip(scores, docs)]
    normed = [int(np.argmax([p / len(c) for p, c in zip(s, d["choices"])])) == d["answer"] for s, d in zip(scores, docs)]
    assert found["nano_choice"]["acc"] == pytest.approx(np.mean(right)) and found["nano_choice"]["n"] == 20
    assert found["nano_choice"]["acc_norm"] == pytest.approx(np.mean(normed))
    total = sum(scorer.score_text([d["question"] for d in docs]))
    n_bytes = sum(len(d["question"].encode()) for d in docs)
    assert found["nano_rolling"]["byte_perplexity"] == pytest.approx(math.exp(-total / n_bytes), rel=1e-5)
    assert found["nano_writing"]["exact_match"] == 1.0


def test_zeroshot_says_what_is_missing(runs, tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as m:
        m.setitem(sys.modules, "lm_eval", None)
        with pytest.raises(UserError, match="pip install lm-eval"):
            call(zeroshot, runs / "vanilla", "--device=cpu", capsys=capsys, monkeypatch=m)
    pytest.importorskip("lm_eval")
    for words, problem in [(["--tasks=piqaa"], "did you mean piqa"), (["--tasks="], "--tasks is empty"),
                           (["--include_path=nowhere"], "no such folder"), (["--limit=-1"], "at least 0")]:
        with pytest.raises(UserError, match=problem):
            call(zeroshot, runs / "vanilla", "--device=cpu", *words, capsys=capsys, monkeypatch=monkeypatch)
    run = common.find_runs([str(runs / "vanilla")])[0]

    class Offline:
        @staticmethod
        def simple_evaluate(**options):
            raise ConnectionError("Couldn't reach the hub")

    with pytest.raises(UserError, match="could not be loaded .*HF_HOME"):
        zeroshot.evaluate(run, zeroshot.Config(device="cpu"), Offline, None, ["piqa"])


# ---------------------------------------------------------------------------------------------------------------------
# export


@pytest.mark.parametrize("name", ["vanilla", "gqa"])
def test_export_and_back_give_equal_logits(name, runs, tmp_path, capsys, monkeypatch):
    from transformers import AutoModelForCausalLM
    if name == "gqa":  # and another base of RoPE than both libraries' default
        run = runs = shutil.copytree(runs / "gqa/seed1", tmp_path / "gqa")
        name, ckpt = "", torch.load(run / "ckpt.pt", weights_only=True)
        ckpt["model_config"]["rope_theta"] = 500.0
        torch.save(ckpt, run / "ckpt.pt")
        (run / "config.json").write_text(json.dumps({**json.loads((run / "config.json").read_text()), "rope_theta": 500.0}))
    said = call(export, runs / name, f"--out_dir={tmp_path}/hf", capsys=capsys, monkeypatch=monkeypatch)
    assert "UTF-8 bytes" in said.out and "256 is end-of-text" in (tmp_path / "hf/README.md").read_text()
    assert (tmp_path / "hf/model.safetensors").exists()
    ours, ids = common.find_runs([str(runs / name)])[0].model(), torch.randint(257, (2, 32), generator=torch.Generator())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert theirs.config.num_key_value_heads == ours.config.kv_heads and theirs.config.model_type == "llama"
    with torch.no_grad():
        assert (ours(ids)[0] - theirs(ids).logits).abs().max() < 1e-5
    call(export, f"--from_hf={tmp_path}/hf", f"--out_dir={tmp_path}/back", capsys=capsys, monkeypatch=monkeypatch)
    back = load_checkpoint(tmp_path / "back/ckpt.pt")
    assert all(torch.equal(back["model"][k], v) for k, v in ours.state_dict().items())
    texts = [call(sample, f"--out_dir={folder}", "--start=C4", "--max_new_tokens=10", "--temperature=0", "--device=cpu",
                  capsys=capsys, monkeypatch=monkeypatch).out
             for folder in (tmp_path / "back", runs / name / "seed1" if name else runs)]
    assert texts[0] == texts[1] and len(texts[0]) > 5
    with pytest.raises(UserError, match="without a ckpt.pt"):
        call(export, f"--from_hf={tmp_path}/hf", f"--out_dir={tmp_path}/back", capsys=capsys, monkeypatch=monkeypatch)
    call(evaluate, tmp_path / "back", f"--data={common.find_runs([str(runs)])[0].config['data']}", "--sequences=2",
         "--device=cpu", capsys=capsys, monkeypatch=monkeypatch)  # the imported run is one that the analyses take


def test_a_random_llama_comes_in(tmp_path, capsys, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM
    config = dict(vocab_size=320, hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=2, max_position_embeddings=24, rms_norm_eps=1e-5, rope_theta=500.0)
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig(**config, tie_word_embeddings=True, initializer_range=0.3)).eval()
    theirs.save_pretrained(tmp_path / "hf")
    with pytest.raises(UserError, match="name its tokenizer with --tokenizer"):
        call(export, f"--from_hf={tmp_path}/hf", f"--out_dir={tmp_path}/in", capsys=capsys, monkeypatch=monkeypatch)
    call(export, f"--from_hf={tmp_path}/hf", f"--out_dir={tmp_path}/in", "--tokenizer=bytes", capsys=capsys,
         monkeypatch=monkeypatch)
    ours, ids = common.find_runs([str(tmp_path / "in")])[0].model(), torch.arange(24)[None] * 13
    with torch.no_grad():
        mine, logits = ours(ids)[0], theirs(ids).logits
    assert (mine - logits).abs().max() < 1e-5 * logits.abs().max().clamp(min=1) and ours.config.rope_theta == 500
    for options, problem in [(dict(rms_norm_eps=1e-6), "rms_norm_eps=1e-06"),
                             (dict(attention_bias=True), "attention_bias=True"), (dict(hidden_act="gelu"), "hidden_act=gelu"),
                             (dict(head_dim=16), "head_dim=16")]:
        LlamaForCausalLM(LlamaConfig(**{**config, **options})).save_pretrained(tmp_path / "other")
        with pytest.raises(UserError, match=problem):
            call(export, f"--from_hf={tmp_path}/other", f"--out_dir={tmp_path}/x", "--tokenizer=bytes", capsys=capsys,
                 monkeypatch=monkeypatch)
    assert not (tmp_path / "x").exists()


def test_export_refuses_other_systems_with_the_option(runs, tmp_path, capsys, monkeypatch):
    with pytest.raises(UserError, match="no counterpart of shared_value=True"):
        call(export, runs / "svformer", capsys=capsys, monkeypatch=monkeypatch)
    said = call(export, runs, capsys=capsys, monkeypatch=monkeypatch)
    assert "svformer/seed1: left out: Llama has no counterpart of shared_value=True" in said.err
    assert (runs / "gqa/seed1/hf/model.safetensors").exists() and not (runs / "svformer/seed1/hf").exists()
    assert len(common.find_runs([str(runs)])) == 3  # an exported Llama's config.json is not taken for a run's
    for words, problem in [([], "give run folders"), ([runs, "--from_hf=x"], "give run folders"),
                           (["--from_hf=nowhere", f"--out_dir={tmp_path}/y"], "no folder with a config.json")]:
        with pytest.raises(UserError, match=problem):
            call(export, *words, capsys=capsys, monkeypatch=monkeypatch)
    for name, options in {"neutreno": {"neutreno": 0.4}, "denseformer": {"denseformer": True}, "cla": {"cla": 2},
                          "no_first_skip": {"no_first_skip": True}, "qk_norm": {"qk_norm": True}, "dropout": {}}.items():
        assert (name in export.not_vanilla(GPTConfig(**TINY, dropout=0.1, scaled_init=True, **options))) == bool(options)


@pytest.mark.parametrize("module", [kv_cache, evaluate, zeroshot, export])
def test_bad_input_is_one_line_and_exit_code_2(module, tmp_path, capsys, monkeypatch):
    code, _, err = run_command(module, capsys, monkeypatch, tmp_path)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
