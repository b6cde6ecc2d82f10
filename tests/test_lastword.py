"""lastword: which passages it takes, and their scores against stubs and one-by-one log-likelihoods."""
import json
import math
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_curve_analyses import run_command

import prepare
from analysis import common, lastword
from configurator import UserError
from model import GPT, GPTConfig

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WORDS = "river stone doesn't well-known été Größe cat under bridge light café x1 snake_case window".split()
CONTEXT = 32  # the block_size of the trained runs


def documents(source):
    """Texts of random words with punctuation: some last words occur before, some don't, some are no words of a-z."""
    rng = np.random.default_rng(len(source))
    for i in range(12):
        yield " ".join(WORDS[k] + rng.choice(["", "", ".", ",", "\n"]) for k in rng.integers(len(WORDS), size=40 + 10 * i))


def make_bins(folder, tokenizer):
    for split in ("train", "val"):
        with open(folder / f"{split}.jsonl", "w") as f:
            for source in ("C4", "Book"):
                for text in documents(source):
                    f.write(json.dumps({"text": text, "meta": {"redpajama_set_name": f"RedPajama{source}"}}) + "\n")
    prepare.prepare(prepare.Config(source=str(folder / "train.jsonl"), val_source=str(folder / "val.jsonl"),
                                   out_dir=str(folder / "bins"), tokenizer=tokenizer, num_proc=1))
    return prepare.Data(str(folder / "bins"))


@pytest.fixture(scope="module")
def bins(tmp_path_factory):
    return make_bins(tmp_path_factory.mktemp("words"), "bytes")


@pytest.fixture(scope="module")
def runs(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lastword") / "runs"
    for name in ("vanilla", "svformer"):
        shutil.copytree(trained / "runs" / name / "seed1", folder / name / "seed1")
    shutil.copy(trained / "runs" / "summary.json", folder)
    return folder


@pytest.fixture
def call(runs, bins, tmp_path, monkeypatch, capsys):
    """main() on these runs and bins; returns what it printed, and lastword.json's content."""
    def run(*words, paths=(runs,), data=bins.path):
        options = [f"--data={data}", f"--out_dir={tmp_path}", "--device=cpu", f"--context={CONTEXT}"]
        monkeypatch.setattr(sys, "argv", ["lastword", *map(str, paths), *options, *words])
        lastword.main()
        return capsys.readouterr(), json.loads((tmp_path / "lastword.json").read_text())
    return run


def all_items(data, **options):
    return lastword.all_items(data, prepare.get_tokenizer(data.tokenizer), lastword.Config(**{"context": CONTEXT, **options}))


def check_items(data, items, context, repeated=True):
    """Every item of a bin: one document's, ends in a whole word, which occurs earlier; its tokens are its text's."""
    tokenizer = prepare.get_tokenizer(data.tokenizer)
    for name, found in items.items():
        ids = np.fromfile(data.val[name].path, data.val[name].dtype).tolist()
        text = tokenizer.decode_bytes(ids)
        assert found
        for passage, n in found:
            assert len(passage) == context + 1 and 1 <= n <= context and data.eot not in passage
            before, word = (tokenizer.decode_bytes(p) for p in (passage[:-n], passage[-n:]))
            assert re.fullmatch(rb" [A-Za-z]{4,}", word)
            places = [i for i in range(len(ids)) if ids[i:i + len(passage)] == passage]
            ends = [len(tokenizer.decode_bytes(ids[:i + len(passage)])) for i in places]
            assert any(re.match(rb'[\s.,;:!?")\]]', text[end:end + 1]) for end in ends)  # not cut: the text goes on after it
            if repeated:
                starts = [len(tokenizer.decode_bytes(ids[:i])) for i in places]
                letters = rb"(?<![\w\x80-\xff])" + word[1:] + rb"(?![\w\x80-\xff])"
                assert any(re.compile(letters).search(text, at, at + len(before) + 1) for at in starts)


@pytest.mark.parametrize("repeated", [True, False])
def test_items_end_in_whole_words(bins, repeated):
    items = all_items(bins, repeated=repeated)
    assert list(items) == ["C4", "Book"]
    check_items(bins, items, CONTEXT, repeated)
    words = {bytes(ids[-n:]).strip() for found in items.values() for ids, n in found}
    assert words == {b"river", b"stone", b"under", b"bridge", b"light", b"window"}
    if not repeated:
        assert any(bytes(ids[:-n]).find(bytes(ids[-n:]).strip()) < 0 for found in items.values() for ids, n in found)


def test_items_are_a_function_of_bin_seed_and_options(bins):
    some = all_items(bins, sequences=9)
    assert some == all_items(bins, sequences=9, batch_size=1, length=500) and [len(v) for v in some.values()] == [9, 9]
    assert some != all_items(bins, sequences=9, seed=2)
    every = all_items(bins)
    assert all(item in every[name] for name in some for item in some[name])
    assert all_items(bins, sequences=9, bin="Book") == {"Book": some["Book"]}
    check_items(bins, all_items(bins, bin="val"), CONTEXT)


@pytest.mark.parametrize("pieces, found", [
    ("stone and| stone|.", (1, 2)), ("stone and| stone", None), ("stone and| stone|s", None), ("stone and| stone|'s", None),
    ("stones and| stone|.", None), ("hailstone and| stone|.", None), ("stone and |stone|.", None),
    ("stone and| sto|ne|.", (1, 3)), ("stone and| stone.|", None),
    ("cat and| cat|.", None), ("Stone and| stone|.", None), ("stone and-|stone|.", None), ("stone| and| stone|.", None),
    ("é stone,| stone|\n", (1, 2)), ("éstone,| stone|\n", None)])
def test_which_words_end_a_passage(pieces, found):
    """Tokens are between bars; the context is as many tokens as the word's last one has before it, or 1."""
    tokens = [p.encode() for p in pieces.split("|")]
    context = found[1] - 1 if found else 1
    assert lastword.last_word(tokens, 0, context, True) == found


def test_a_passage_has_its_whole_context_and_the_earlier_word():
    tokens = [b"stone", b" and", b" the", b" stone", b" stone", b"."]
    assert lastword.last_word(tokens, 0, 3, True) == (3, 4)
    assert lastword.last_word(tokens, 1, 3, True) == (4, 5)  # the first one's passage would begin too early
    assert lastword.last_word(tokens, 2, 3, True) is None
    tokens = [b"stone", b" and", b" the", b" old", b" stone", b"."]
    assert lastword.last_word(tokens, 0, 4, True) == (4, 5) and lastword.last_word(tokens, 0, 3, True) is None
    assert lastword.last_word(tokens, 0, 3, False) == (4, 5)


class Stub(torch.nn.Module):
    """Logits of 10 at the next token of known passages (or at another token, one further on), 0 elsewhere."""

    def __init__(self, items, shift, size=320):
        super().__init__()
        self.config = SimpleNamespace(block_size=CONTEXT, vocab_size=size)
        self.lm_head = torch.nn.Linear(size, size, bias=False)
        self.lm_head.weight.data = torch.eye(size)
        self.next = {tuple(ids[:-1]): [(i + shift) % 257 for i in ids[1:]] for found in items.values() for ids, _ in found}

    def features(self, x):
        return 10 * torch.nn.functional.one_hot(torch.tensor([self.next[tuple(r)] for r in x.tolist()]), 320).float()


def test_a_model_that_knows_the_word_and_one_that_does_not(bins, call, monkeypatch):
    items = all_items(bins)
    monkeypatch.setattr(common.Run, "model", lambda run, device: Stub(items, "svformer" in run.name))
    said, found = call()
    n_all = sum(map(len, items.values()))
    for run, right in (("vanilla/seed1", 1), ("svformer/seed1", 0)):
        nats = 10 * right - math.log(math.exp(10) + 256)  # of a token
        r = found["runs"][run]
        assert list(r["bins"]) == ["C4", "Book", "all sources"] and r["against"] == "vanilla/seed1"
        for name, b in r["bins"].items():
            lengths = [n for k in ([name] if name in items else items) for _, n in items[k]]
            assert b["items"] == len(lengths) and b["accuracy"] == right
            assert b["log_likelihood"] == pytest.approx(nats * np.mean(lengths), rel=1e-4)
            assert b["perplexity"] == pytest.approx(math.exp(-b["log_likelihood"]))
            low, high = b["accuracy_interval_95"]
            assert (low, high) == pytest.approx(lastword.wilson(right * len(lengths), len(lengths))) and 0 <= low < high <= 1
    d = found["runs"]["svformer/seed1"]["bins"]["all sources"]["difference"]
    assert d["accuracy"] == -1 and (d["won"], d["lost"]) == (0, n_all) and d["accuracy_interval_95"] is None
    assert "all sources" in said.out and "won : lost" in said.out and found["options"]["seed"] == 1337


def test_log_likelihoods_equal_direct_ones_and_pairs_are_paired(bins, runs, call):
    items, scores = all_items(bins, sequences=7), {}
    said, found = call("--sequences=7", "--batch_size=3")
    for run in common.find_runs([str(runs)]):
        model, rows = run.model(), []
        for ids, n in (item for name in items for item in items[name]):
            total, greedy = 0.0, True
            for at in range(len(ids) - n, len(ids)):  # one token after the other, alone and without padding
                with torch.no_grad():
                    p = model(torch.tensor([ids[:at]]))[0][0, -1, :257].double().log_softmax(-1)
                total, greedy = total + p[ids[at]].item(), greedy and int(p.argmax()) == ids[at]
            rows.append((total, greedy))
        scores[run.name] = np.array(rows, float)
        for name, part in (("C4", slice(0, 7)), ("Book", slice(7, 14)), ("all sources", slice(0, 14))):
            b = found["runs"][run.name]["bins"][name]
            assert b["log_likelihood"] == pytest.approx(scores[run.name][part, 0].mean(), abs=1e-4)
            assert b["accuracy"] == scores[run.name][part, 1].mean()
    own, other = (found["runs"][name]["bins"]["all sources"]["difference"] for name in ("vanilla/seed1", "svformer/seed1"))
    assert own == dict(won=0, lost=0, accuracy=0, accuracy_interval_95=None, log_likelihood=0, log_likelihood_interval_95=None)
    x = scores["svformer/seed1"][:, 0] - scores["vanilla/seed1"][:, 0]
    assert other["log_likelihood"] == pytest.approx(x.mean(), abs=1e-4)
    low, high = other["log_likelihood_interval_95"]
    half = 1.96 * x.std() / math.sqrt(len(x))
    assert (low, high) == pytest.approx((x.mean() - half, x.mean() + half), abs=0.3 * half)
    assert call("--sequences=7", "--batch_size=16")[1]["runs"]["svformer/seed1"]["bins"]["C4"]["difference"]["won"] \
        == found["runs"]["svformer/seed1"]["bins"]["C4"]["difference"]["won"]


def test_intervals_by_hand():
    assert lastword.wilson(0, 10) == pytest.approx((0, 0.2775), abs=1e-4)
    assert lastword.wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert lastword.wilson(10, 10) == pytest.approx((0.7225, 1), abs=1e-4)
    right = np.array([[-1.0, 1.0]] * 30 + [[-2.0, 0.0]] * 70)
    wrong = np.array([[-1.0, 0.0]] * 30 + [[-2.0, 0.0]] * 60 + [[-2.0, 1.0]] * 10)
    d = lastword.difference(right, wrong)
    assert (d["won"], d["lost"]) == (30, 10) and d["accuracy"] == pytest.approx(0.2) and d == lastword.difference(right, wrong)
    assert d["accuracy_interval_95"] == pytest.approx((0.2 - 1.96 * 0.06, 0.2 + 1.96 * 0.06), abs=0.02)  # √(0.4 - 0.04) = 0.6
    assert d["log_likelihood"] == 0 and d["log_likelihood_interval_95"] is None
    lost = lastword.difference(right * [math.nan, 1], wrong)  # a diverged run
    assert lost["log_likelihood"] is None and lost["log_likelihood_interval_95"] is None
    assert lastword.summary(right * [math.nan, 1])["perplexity"] is None and lastword.cell(lost, "log_likelihood", ".3f") == "-"


def test_gpt2s_words_begin_at_the_token_with_the_space(tmp_path):
    if not os.environ.get("TIKTOKEN_CACHE_DIR"):
        pytest.skip("TIKTOKEN_CACHE_DIR is not set")
    try:
        tokenizer = prepare.get_tokenizer("gpt2")
    except UserError as e:
        pytest.skip(f"gpt2 is not in TIKTOKEN_CACHE_DIR: {e}")
    data = make_bins(tmp_path, "gpt2")
    items = all_items(data, context=24)
    check_items(data, items, 24)
    for ids, n in (item for found in items.values() for item in found):
        assert tokenizer.encode(tokenizer.decode_bytes(ids[-n:]).decode()).tolist() == ids[-n:]  # as BPE splits the word alone
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=24, vocab_size=50304), seed=1).eval()
    scores = lastword.score(model, tokenizer, items, lastword.Config(device="cpu"))
    assert scores["all sources"][:, 0].mean() == pytest.approx(-math.log(50257) * np.mean(
        [n for found in items.values() for _, n in found]), rel=0.02)  # a new model knows nothing


def test_what_is_left_out_and_what_is_wrong(bins, runs, trained, call, tmp_path):
    folder = tmp_path / "runs"
    shutil.copytree(runs, folder)
    config = json.loads((folder / "svformer/seed1/config.json").read_text())
    (folder / "svformer/seed1/config.json").write_text(json.dumps({**config, "tokenizer": "gpt2"}))
    said, found = call("--sequences=2", paths=[folder])
    assert "svformer/seed1: left out" in said.err and "with gpt2" in said.err and list(found["runs"]) == ["vanilla/seed1"]
    for words, problem in [
        (["--context=33"], "window is 32"), (["--context=0"], "at least 1"), (["--length=16"], "window is 16"),
        (["--sequences=0"], "at least 1"), (["--batch_size=0"], "at least 1"), (["--seed=-1"], "at least 0"),
        (["--bin=X"], "has val, C4, Book"), (["--repeated=maybe"], "true or false"), (["--context=many"], "whole number"),
    ]:
        with pytest.raises(UserError, match=problem):
            call(*words, paths=[runs / "vanilla"])
    with pytest.raises(UserError, match="no passage of 32 .* lower --context, or give --repeated=False"):
        call(data=trained / "bins", paths=[runs / "vanilla"])  # words with digits alone


def test_a_source_without_items_is_named(bins, call, tmp_path):
    shutil.copytree(bins.path, tmp_path / "bins")
    meta = json.loads((tmp_path / "bins/meta.json").read_text())
    np.full(100, 97, meta["dtype"]).tofile(tmp_path / "bins/val_Book.bin")
    (tmp_path / "bins/meta.json").write_text(json.dumps({**meta, "bins": {**meta["bins"], "val_Book": 100}}))
    said, found = call("--sequences=2", data=tmp_path / "bins")
    assert "val_Book.bin: left out: no passage" in said.err and list(found["runs"]["vanilla/seed1"]["bins"]) == ["C4"]
    assert (tmp_path / "lastword.png").read_bytes().startswith(b"\x89PNG")


def test_bad_input_is_one_line_and_exit_code_2(runs, bins, trained, tmp_path, capsys, monkeypatch):
    for words in ([tmp_path], [runs / "vanilla", f"--data={trained}/bins", "--context=8"],
                  [runs / "vanilla", f"--data={bins.path}"]):
        code, _, err = run_command(lastword, capsys, monkeypatch, *words)
        assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    done = subprocess.run([sys.executable, "-m", "analysis.lastword", tmp_path], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
