"""
train.py in one process: the schedule, the data order, log.jsonl, resume, refusals, and lists of runs against a baseline.
"""
import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import model
import prepare
import train
from configurator import UserError, command, configure

ROOT = Path(__file__).resolve().parent.parent
TINY = ("--device=cpu --compile=False --n_layer=2 --n_head=2 --n_embd=32 --block_size=16 --batch_size=2 --max_iters=4 "
        "--eval_interval=2 --eval_iters=1").split()
# a schedule under which six iterations really move the weights, whatever max_iters is
MOVES = ["--learning_rate=1e-2", "--min_lr=1e-3", "--warmup_iters=2", "--lr_decay_iters=6"]
T = 16  # TINY's block_size
CLOCKS = ("tokens_per_s", "data_wait", "mfu", "eval_s")  # the fields of a line that may differ between two equal runs


def write_docs(path, counts, words):
    with open(path, "w") as f:
        for source, n in counts.items():
            for i in range(n):
                text = " ".join(f"{source}{(i * 7 + j * j) % 89}" for j in range(words))
                f.write(json.dumps({"text": text, "meta": {"redpajama_set_name": f"RedPajama{source}"}}) + "\n")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Bins of bytes. Validation text: Book and C4; Arxiv has none (an empty bin), Wiki less than one window."""
    folder = tmp_path_factory.mktemp("data")
    write_docs(folder / "train.jsonl", {"C4": 12, "Book": 9, "Arxiv": 3, "Wiki": 2}, 12)
    write_docs(folder / "val.jsonl", {"C4": 5, "Book": 2}, 11)
    with open(folder / "val.jsonl", "a") as f:
        f.write(json.dumps({"text": "short", "meta": {"redpajama_set_name": "RedPajamaWiki"}}) + "\n")
    prepare.prepare(prepare.Config(source=str(folder / "train.jsonl"), val_source=str(folder / "val.jsonl"),
                                   out_dir=str(folder / "bins"), tokenizer="bytes", num_proc=1))
    return str(folder / "bins")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Equal bits need equal thread counts, and tiny matrices are fastest with one."""
    before, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.set_float32_matmul_precision(precision)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Each test in its own working directory, with the signal handlers put back."""
    monkeypatch.chdir(tmp_path)
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    yield
    for s, handler in handlers.items():
        signal.signal(s, handler)


def go(*args, tiny=True):
    """`python train.py TINY args` in this process. Returns the exit code."""
    before, sys.argv = sys.argv, ["train.py", *(TINY if tiny else []), *map(str, args)]
    try:
        command(train.main)
    except SystemExit as e:
        return e.code
    finally:
        sys.argv = before
    return 0


def refused(capsys, *args):
    """The one line on stderr of a command that must end with exit code 2."""
    capsys.readouterr()
    code, err = go(*args), capsys.readouterr().err
    assert code == 2, f"exit code {code}"
    assert err.startswith("error: ") and len(err.strip().splitlines()) == 1, err
    return err


def log(folder):
    """(training lines, evaluation lines) of log.jsonl in the order of the file; every line strict JSON."""
    def never(word):
        raise AssertionError(f"{word} is no JSON")
    lines = [json.loads(text, parse_constant=never) for text in Path(folder, "log.jsonl").read_text().splitlines()]
    return [x for x in lines if "loss" in x], [x for x in lines if "loss" not in x]


def losses(folder):
    return [x["loss"] for x in log(folder)[0]]


def timeless(folder):
    """All lines of log.jsonl, without what depends on the clock."""
    lines = [json.loads(text) for text in Path(folder, "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in x.items() if k not in CLOCKS} for x in lines]


def checkpoint(folder):
    return torch.load(Path(folder, "ckpt.pt"), map_location="cpu", weights_only=True)


def equal(a, b):
    """Bit for bit, through dicts and lists."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def assert_same_run(a, b):
    """Equal logs (but for the clock), weights and optimizer state."""
    assert timeless(a) == timeless(b)
    assert_same_state(a, b)


def assert_same_state(a, b):
    a, b = checkpoint(a), checkpoint(b)
    for key in ("model", "optimizer", "iter", "val_loss"):
        assert equal(a[key], b[key]), key


def snapshot(folder):
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def at_iteration(monkeypatch, it, do):
    """Call do() once while iteration `it` is under way."""
    true, done = train.learning_rate, []

    def hooked(i, config):
        if i == it and not done:
            done.append(True)
            do()
        return true(i, config)
    monkeypatch.setattr(train, "learning_rate", hooked)


def windows_of(data, name):
    """All windows of a bin, read without the repository's reader: (n, block_size + 1)."""
    ids = np.fromfile(Path(data, name + ".bin"), "<u2").astype(np.int64)
    return np.stack([ids[w * T:w * T + T + 1] for w in range((len(ids) - 1) // T)])


def mean_loss(net, ids):
    """Mean cross-entropy of all targets of windows ids, in float64."""
    ids = torch.as_tensor(ids)
    with torch.no_grad():
        logits = net(ids[:, :-1])[0].double()
    return -logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).mean().item()


# ---------------------------------------------------------------------------------------------------------------------
# The schedule


def schedule(n=None, **options):
    config = train.Config(**{"learning_rate": 6e-4, "min_lr": 6e-5, "max_iters": 10, **options})
    return [train.learning_rate(i, config) for i in range(n or 2 * config.max_iters)]


@pytest.mark.parametrize("warmup,decay", [(0, 10), (1, 10), (5, 10), (9, 10), (10, 10), (10, 5), (20, 10), (120, 500)])
def test_schedule_corners(warmup, decay):
    lr = schedule(2 * max(warmup, decay) + 2, warmup_iters=warmup, lr_decay_iters=decay)
    assert all(0 < x <= 6e-4 for x in lr)  # never 0, no division by zero
    assert lr[0] == (pytest.approx(1e-7) if warmup else 6e-4)
    assert lr.count(6e-4) == 1 and lr[warmup] == 6e-4
    assert all(a < b for a, b in zip(lr[:warmup], lr[1:warmup + 1]))
    assert all(a >= b for a, b in zip(lr[warmup:], lr[warmup + 1:]))
    assert all(x == 6e-5 for x in lr[max(decay, warmup + 1):])
    if warmup < decay:
        assert lr[decay] == 6e-5 and all(x > 6e-5 for x in lr[warmup:decay])
        assert lr[decay - 1] - lr[decay] <= 6e-4 / (decay - warmup) * 2 or warmup == decay - 1  # no jump at the end


def test_schedule_decay_iters_0_is_max_iters():
    assert schedule(warmup_iters=2, max_iters=30) == schedule(warmup_iters=2, max_iters=30, lr_decay_iters=30)


def test_schedule_constant():
    assert set(schedule(decay_lr=False, warmup_iters=4)) == {6e-4}


def test_schedule_closed_form_of_the_paper():
    """The paper's schedule: from 1e-7 to 6e-4 at iteration 120, cosine to 6e-5 at iteration 10,000."""
    lr = schedule(10001, warmup_iters=120, max_iters=10000)
    for t in (0, 1, 60, 119, 120, 121, 1000, 5060, 9999, 10000):
        want = 1e-7 + (6e-4 - 1e-7) * t / 120 if t < 120 else \
            6e-5 + (6e-4 - 6e-5) * (1 + math.cos(math.pi * (t - 120) / 9880)) / 2
        assert lr[t] == pytest.approx(want, rel=1e-12)
    assert lr[5060] == pytest.approx(3.3e-4, rel=1e-9)  # half way


@pytest.mark.parametrize("warmup,noted", [(2, False), (4, True), (9, True)])
def test_warmup_that_reaches_the_decay_is_told(data, capsys, warmup, noted):
    assert go(f"--data={data}", f"--warmup_iters={warmup}", "--lr_decay_iters=4", "--max_iters=1") == 0
    assert any("warmup_iters" in x and "lr_decay_iters" in x and "=" not in x.split()[0] for x in
               capsys.readouterr().out.splitlines()) == noted


def test_logged_learning_rate_is_the_schedule(data):
    assert go(f"--data={data}", "--out_dir=o", *MOVES) == 0
    want = schedule(4, learning_rate=1e-2, min_lr=1e-3, warmup_iters=2, lr_decay_iters=6)
    assert [x["lr"] for x in log("o")[0]] == pytest.approx(want, rel=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# The data order


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025, 4095, 4096,
                               4097, 100_000])
def test_shuffled_is_a_bijection(n):
    for seed in ([1337, 0], [7, 3]):
        order = train.shuffled(np.arange(n), n, seed)
        assert np.array_equal(np.sort(order), np.arange(n))
        some = np.random.default_rng(0).integers(0, n, 20)
        assert np.array_equal(train.shuffled(some, n, seed), order[some])  # elementwise, in any order, with repeats
        assert train.shuffled(some[:1], n, seed)[0] == order[some[0]]
    assert len(train.shuffled(np.arange(0), n, [1337, 0])) == 0


def test_shuffled_of_a_huge_corpus_is_instant():
    n = 3 * 10 ** 9 + 1  # a table of this would not fit
    order = train.shuffled(np.arange(1000), n, [1, 0])
    assert len(set(order.tolist())) == 1000 and 0 <= order.min() and n // 2 < order.max() < n


@pytest.mark.parametrize("n", [1000, 4096, 4097, 65536])
def test_shuffled_looks_random(n):
    i, orders = np.arange(n), [train.shuffled(np.arange(n), n, [seed, e]) for seed in (1337, 1338, 5) for e in (0, 1)]
    for k, p in enumerate(orders):
        assert abs(np.corrcoef(i, p)[0, 1]) < 5 / math.sqrt(n)
        assert abs(np.corrcoef(p[:-1], p[1:])[0, 1]) < 5 / math.sqrt(n)
        assert (p == i).sum() < 12  # Poisson of mean 1
        steps = (p[1:] - p[:-1]) % n
        assert np.unique(steps).size > 0.6 * n  # 0.63 n for a random order, 1 for a linear one
        for bit in range((n - 1).bit_length() - 1):
            for other in (0, 1, 5):  # no low or high bit follows another
                agree = ((p >> bit & 1) == (i >> other & 1))[:n // 64 * 64].mean()
                assert abs(agree - 0.5) < 6 * 0.5 / math.sqrt(n) + 0.02 * (n & (n - 1) != 0)
        head = np.bincount(p[:n // 10] * 10 // n, minlength=10)  # the first tenth comes from everywhere
        assert ((head - n / 100) ** 2 / (n / 100)).sum() < 45
        for q in orders[:k]:
            assert (p == q).sum() < 12 and abs(np.corrcoef(p, q)[0, 1]) < 5 / math.sqrt(n)


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_shuffled_of_few_reaches_every_order_alike(n):
    orders = np.array([train.shuffled(np.arange(n), n, [seed, 0]) for seed in range(1200)])
    for place in range(n):
        counts = np.bincount(orders[:, place], minlength=n)
        assert ((counts - 1200 / n) ** 2 / (1200 / n)).sum() < 20 + 3 * n
    if n <= 5:
        assert len({tuple(o) for o in orders.tolist()}) == math.factorial(n)


@pytest.mark.parametrize("n,batch", [(1, 3), (5, 2), (7, 7), (10, 4), (3, 8), (64, 10)])
def test_no_window_twice_before_all_were_seen(n, batch):
    """Also when a batch straddles two epochs, or is larger than one."""
    iters = 6 * n // batch + 3
    seen = np.concatenate([train.batch_windows(i, batch, n, 1337) for i in range(iters)])
    assert seen.size == iters * batch
    epochs = seen[:seen.size // n * n].reshape(-1, n)
    assert (np.sort(epochs) == np.arange(n)).all()
    if n >= 10:
        assert len({tuple(e) for e in epochs.tolist()}) == len(epochs)  # a new order each time


def test_batch_is_a_pure_function_of_seed_and_iteration():
    late = train.batch_windows(123, 8, 100, 5)
    np.random.seed(0)
    torch.manual_seed(0)
    train.batch_windows(3, 8, 100, 5)
    assert np.array_equal(train.batch_windows(123, 8, 100, 5), late)
    assert not np.array_equal(train.batch_windows(123, 8, 100, 6), late)
    assert not np.array_equal(train.batch_windows(122, 8, 100, 5), late)


@pytest.mark.parametrize("processes,steps", [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)])
def test_loader_gives_one_global_batch_for_any_split(data, processes, steps):
    """eight windows per iteration, whoever reads them; their content is the bin's."""
    train_bin, config = prepare.Data(data).train, train.Config(block_size=T, seed=3)
    every, micro = windows_of(data, "train"), 8 // processes // steps
    assert len(every) == train_bin.windows(T)
    loaders = [train.Loader(train_bin, config, train.World(rank, processes), micro, steps, torch.device("cpu"))
               for rank in range(processes)]
    for it in (0, 1, 50, 2):  # in a row, a jump ahead and back
        parts = [load(it, step) for load in loaders for step in range(steps)]
        assert all(p.shape == (micro, T + 1) and p.dtype == torch.int64 for p in parts)
        want = every[train.batch_windows(it, 8, len(every), 3)]
        assert sorted(torch.cat(parts).tolist()) == sorted(want.tolist())
    for load in loaders:
        load.pool.shutdown()


def test_one_window_more_than_nothing(data):
    """block_size + 1 tokens are one window, and the last token is a target."""
    b = prepare.Data(data).train
    b.tokens = T + 1
    assert b.windows(T) == 1
    assert b.read([0], T).tolist() == [np.fromfile(Path(data, "train.bin"), "<u2")[:T + 1].tolist()]
    b.tokens = T
    assert b.windows(T) == 0


# ---------------------------------------------------------------------------------------------------------------------
# The batch


def split(processes=1, **options):
    return train.micro_batches(train.Config(**{"block_size": 16, **options}), train.World(0, processes))


@pytest.mark.parametrize("processes,batch_size,windows,want", [
    (1, 2, 8, (2, 4)), (1, 8, 8, (8, 1)), (2, 2, 8, (2, 2)), (4, 2, 8, (2, 1)), (8, 1, 8, (1, 1)), (3, 4, 12, (4, 1)),
    (1, 100, 8, (8, 1)), (2, 100, 8, (4, 1)), (8, 32, 8, (1, 1))])  # a batch_size above the batch is lowered
def test_accumulation_is_derived(processes, batch_size, windows, want):
    micro, steps = split(processes, batch_size=batch_size, tokens_per_iter=windows * 16)
    assert (micro, steps) == want and micro * steps * processes == windows


def test_message_lists_the_numbers_of_processes_that_divide():
    with pytest.raises(UserError, match=r"\b3 processes.*\b1, 2, 4\b"):
        split(3, batch_size=2, tokens_per_iter=4 * 16)


@pytest.mark.parametrize("processes,listed", [(1, "1, 2, 4, 8"), (2, "1, 2, 4")])
def test_message_lists_the_batch_sizes_that_divide(processes, listed):
    with pytest.raises(UserError, match=rf"--batch_size=3\b.*\b{listed}"):
        split(processes, batch_size=3, tokens_per_iter=8 * 16)


@pytest.mark.parametrize("tokens,nearest", [(1, 16), (15, 16), (36, 32), (44, 48), (1000, 992), (1001, 1008)])
def test_tokens_that_are_no_whole_windows(tokens, nearest):
    with pytest.raises(UserError, match=rf"--tokens_per_iter={tokens}\b.*\b{nearest}\b"):
        split(batch_size=1, tokens_per_iter=tokens)


def test_batch_is_printed(data, capsys):
    """tokens per iteration and the micro-steps they make are told."""
    assert go(f"--data={data}", "--tokens_per_iter=128", "--max_iters=1") == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if "micro-steps" in x)
    assert "128 tokens" in line and "4 micro-steps" in line and "2 windows" in line


@pytest.mark.parametrize("wrong", ["--batch_size=3", "--tokens_per_iter=100", "--batch_size=0", "--block_size=0",
                                   "--max_iters=0", "--eval_interval=0", "--learning_rate=-1", "--dropout=1", "--n_head=3",
                                   "--device=cuda:99", "--device=nonsense", "--dtype=float16", "--seeds=1,2",
                                   "--value_residual=True --shared_value=True", "--value_mix=learnable", "--n_layer=0"])
def test_nonsense_is_refused_in_one_line_and_nothing_is_written(data, capsys, wrong):
    args = [f"--data={data}", "--tokens_per_iter=128", "--out_dir=o", *wrong.split()]
    assert wrong.split()[0].strip("-").partition("=")[0] in refused(capsys, *args)
    assert not os.path.exists("o/log.jsonl") and not os.path.exists("o/ckpt.pt") and not os.path.exists("o/config.json")


@pytest.mark.parametrize("option, both, hint", [
    ("--learning_rate=1e-5", "--learning_rate=1e-05 --min_lr=6e-05", "--min_lr=1e-06"),
    ("--min_lr=1", "--learning_rate=0.0006 --min_lr=1.0", "--min_lr=6e-05")])
def test_a_schedule_that_would_rise_is_refused(data, capsys, option, both, hint):
    err = refused(capsys, f"--data={data}", "--out_dir=o", option)
    assert both in err and hint in err and not os.path.exists("o")


def test_accumulation_changes_nothing(data):
    """8 windows at once and as 4 micro-steps of 2: the same losses and gradient norms."""
    args = [f"--data={data}", "--tokens_per_iter=128", "--max_iters=6", *MOVES]
    assert go(*args, "--batch_size=8", "--out_dir=whole") == go(*args, "--batch_size=2", "--out_dir=parts") == 0
    assert losses("parts") == pytest.approx(losses("whole"), abs=1e-5)
    norms = [[x["grad_norm"] for x in log(f)[0]] for f in ("parts", "whole")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert max(losses("whole")) - min(losses("whole")) > 0.05  # the weights did move


# ---------------------------------------------------------------------------------------------------------------------
# log.jsonl, config.json, ckpt.pt


def test_record_of_a_run(data):
    assert go(f"--data={data}", "--out_dir=o", "--max_iters=5", "--tokens_per_iter=64", "--log_interval=3") == 0
    steps, evals = log("o")
    assert [x["iter"] for x in steps] == [0, 1, 2, 3, 4]
    assert [x["iter"] for x in evals] == [0, 2, 4, 5]  # at 0, every eval_interval, and the end
    for x in steps:
        assert {"iter", "loss", "lr", "grad_norm", "tokens", "tokens_per_s"} <= set(x)
        assert not {"mfu", "rel_loss", "val_loss", "skipped"} & set(x)  # a CPU has no known peak; no baseline; no bad step
        assert 5 < x["loss"] < 7 and x["grad_norm"] > 0 and x["tokens"] == (x["iter"] + 1) * 64 and x["tokens_per_s"] > 0
    for x in evals:
        assert {"iter", "val_loss", "val", "val_mean"} <= set(x) and not {"rel_val_loss", "loss", "value_mix"} & set(x)
        assert set(x["val"]) == {"Book", "C4"}  # Arxiv's bin is empty, Wiki's shorter than one window
        assert x["val_mean"] == pytest.approx((x["val"]["Book"] + x["val"]["C4"]) / 2, rel=1e-12)  # unweighted
    iters = [x["iter"] for x in timeless("o")]
    assert iters == sorted(iters)


def test_config_json_holds_resolved_values(data):
    assert go(f"--data={data}", "--out_dir=o", "--dtype=auto", "--device=cpu", "--value_residual=true") == 0
    facts = json.loads(Path("o/config.json").read_text())
    want = dict(data=data, out_dir="o", device="cpu", dtype="float32", compile=False, n_layer=2, n_head=2, n_embd=32,
                block_size=16, batch_size=2, tokens_per_iter=32, max_iters=4, lr_decay_iters=4, learning_rate=6e-4,
                vocab_size=320, seed=1337, value_residual=True, shared_value=False, eval_interval=2, eval_iters=1)
    assert {k: facts.get(k) for k in want} == want  # vocab_size: 257 rounded up to 64


@pytest.mark.parametrize("name", (
    "n_layer n_head n_kv_head n_embd n_ffn block_size vocab_size dropout rope_theta "
    "value_residual shared_value value_mix value_lambda1 value_lambda2 value_layers value_source value_anchors value_lr_scale "
    "plus_init neutreno denseformer share_k_every share_v_every cla query_residual key_residual hidden_residual "
    "attention_residual shared_query shared_key identity_mapping cross_layer no_first_skip qk_norm scaled_init "
    "data out_dir batch_size tokens_per_iter max_iters learning_rate min_lr warmup_iters lr_decay_iters decay_lr weight_decay "
    "beta1 beta2 grad_clip seed eval_interval eval_iters eval_only log_interval init_from baseline device dtype compile "
    "backend wandb_log tensorboard_log max_bad_steps runs seeds").split())
def test_promised_option_exists(name):
    assert name in {f.name for f in dataclasses.fields(train.Config)}


@pytest.mark.parametrize("batch_size", [4, 1])
def test_logged_loss_is_the_batch_mean(data, batch_size):
    """the mean over all micro-steps. With learning rate 0 the checkpoint still holds the initial weights."""
    assert go(f"--data={data}", "--out_dir=o", "--learning_rate=0", "--min_lr=0", "--tokens_per_iter=64",
              f"--batch_size={batch_size}") == 0
    net = model.from_checkpoint(model.load_checkpoint("o/ckpt.pt"))
    fresh = model.GPT(net.config, seed=1337)
    assert equal(dict(net.state_dict()), dict(fresh.state_dict()))  # a function of the seed; weight decay scales with lr
    every = windows_of(data, "train")
    for it, loss in enumerate(losses("o")):
        assert loss == pytest.approx(mean_loss(net, every[train.batch_windows(it, 4, len(every), 1337)]), abs=1e-5)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_evaluation_is_the_mean_over_all_windows(data, batch_size):
    """Enough eval_iters for the whole bin: val losses are the plain means, also when the last batch is not full."""
    assert go(f"--data={data}", "--out_dir=o", "--learning_rate=0", "--min_lr=0", "--eval_iters=1000",
              f"--batch_size={batch_size}") == 0
    net = model.from_checkpoint(model.load_checkpoint("o/ckpt.pt"))
    for x in log("o")[1]:
        assert x["val_loss"] == pytest.approx(mean_loss(net, windows_of(data, "val")), abs=1e-5)
        for source in ("Book", "C4"):
            assert x["val"][source] == pytest.approx(mean_loss(net, windows_of(data, f"val_{source}")), abs=1e-5)


def test_evaluation_windows_are_fixed(data, monkeypatch):
    """eval_iters x batch_size windows in all per bin, the same at every evaluation, from all over the bin."""
    true, reads = prepare.Bin.read, {}

    def spy(self, windows, block_size):
        reads.setdefault(os.path.basename(self.path), []).extend(int(w) for w in windows)
        return true(self, windows, block_size)
    monkeypatch.setattr(prepare.Bin, "read", spy)
    found = {}
    for batch_size, eval_iters in ((1, 6), (2, 3), (6, 1)):
        reads.clear()
        assert go(f"--data={data}", f"--out_dir=o{batch_size}", "--learning_rate=0", "--min_lr=0", f"--batch_size={batch_size}",
                  f"--eval_iters={eval_iters}") == 0
        for name in ("val.bin", "val_Book.bin", "val_C4.bin"):
            picked, n = set(reads[name]), len(windows_of(data, name[:-4]))
            assert len(picked) == 6 and len(reads[name]) == 3 * 6 and max(picked) >= n / 2
            assert found.setdefault(name, picked) == picked
        values = [(x["val_loss"], x["val"], x["val_mean"]) for x in log(f"o{batch_size}")[1]]
        assert values[0] == values[1] == values[2]  # the same weights, the same numbers
    assert log("o1")[1][0]["val_loss"] == pytest.approx(log("o6")[1][0]["val_loss"], abs=1e-6)


def test_evaluation_does_not_touch_training(data):
    """with dropout, so that a random number drawn by an evaluation would show."""
    for interval in (1, 1000):
        assert go(f"--data={data}", f"--out_dir=o{interval}", f"--eval_interval={interval}", "--dropout=0.2", *MOVES) == 0
    assert losses("o1") == losses("o1000")
    assert [x["iter"] for x in log("o1")[1]] == [0, 1, 2, 3, 4] and [x["iter"] for x in log("o1000")[1]] == [0, 4]
    assert log("o1")[1][-1]["val_loss"] == log("o1000")[1][-1]["val_loss"]
    assert equal(checkpoint("o1")["model"], checkpoint("o1000")["model"])


def test_log_interval_changes_only_the_console(data):
    for interval in (1, 3, 100):
        assert go(f"--data={data}", f"--out_dir=o{interval}", f"--log_interval={interval}", "--max_iters=5", *MOVES) == 0
    assert timeless("o1") == timeless("o3") == timeless("o100")


def test_one_shape_for_training_and_evaluation(data, monkeypatch):
    """another shape would compile again. 6 windows of a bin in batches of 4 leave a partial one."""
    true, shapes = model.GPT.forward, set()

    def spy(self, idx, targets=None):
        shapes.add((tuple(idx.shape), tuple(targets.shape)))
        return true(self, idx, targets)
    monkeypatch.setattr(model.GPT, "forward", spy)
    assert go(f"--data={data}", "--tokens_per_iter=128", "--batch_size=4", "--eval_iters=1000") == 0
    assert shapes == {((4, T), (4, T))}


def test_checkpoint_is_plain(data):
    """Loads with weights_only=True, has the documented keys, and the raw module's names."""
    assert go(f"--data={data}", "--out_dir=o") == 0
    ckpt = checkpoint("o")
    assert {"model", "optimizer", "scaler", "iter", "model_config", "config", "data", "val_loss"} <= set(ckpt)
    assert ckpt["iter"] == 4 and ckpt["val_loss"] == log("o")[1][-1]["val_loss"]
    assert ckpt["model_config"]["n_layer"] == 2 and ckpt["model_config"]["vocab_size"] == 320
    assert ckpt["config"]["seed"] == 1337 and ckpt["config"]["data"] == data
    assert ckpt["data"]["tokenizer"] == "bytes" and ckpt["data"]["vocab_size"] == 257 and ckpt["data"]["fingerprint"]
    assert set(ckpt["model"]) == set(model.GPT(model.GPTConfig(**ckpt["model_config"])).state_dict())
    assert sorted(os.listdir("o")) == [".lock", "ckpt.pt", "config.json", "log.jsonl"]  # no temporary file is left


def test_log_is_on_disk_before_each_checkpoint(data, monkeypatch):
    """A machine that dies right after a save must not leave a checkpoint that is ahead of its log."""
    true, saves = os.replace, []

    def spy(a, b):
        if str(b).endswith("ckpt.pt"):
            steps, evals = log("o")
            saves.append((torch.load(a, weights_only=True)["iter"], len(steps), [x["iter"] for x in evals]))
        true(a, b)
    monkeypatch.setattr(os, "replace", spy)
    assert go(f"--data={data}", "--out_dir=o", "--log_interval=3") == 0
    assert saves == [(0, 0, [0]), (2, 2, [0, 2]), (4, 4, [0, 2, 4])]


BOARDS = {"wandb_log": "wandb", "tensorboard_log": "torch.utils.tensorboard"}


@pytest.mark.parametrize("option", BOARDS)
def test_a_board_that_is_not_installed(data, capsys, monkeypatch, option):
    """One line with the package's name, before anything is written; also not over a finished run that was to start over."""
    monkeypatch.setitem(sys.modules, BOARDS[option], None)
    args = [f"--data={data}", "--out_dir=o", f"--{option}=True"]
    assert "pip install" in refused(capsys, *args) and not os.path.exists("o/log.jsonl")
    assert go(f"--data={data}", "--out_dir=o") == 0
    before = snapshot("o")
    assert "pip install" in refused(capsys, *args, "--init_from=scratch") and snapshot("o") == before


def test_a_board_gets_the_log(data, monkeypatch):
    lines = []
    board = types.SimpleNamespace(log=lambda line, step: lines.append({**line, "iter": step}), finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **options: board))
    assert go(f"--data={data}", "--out_dir=o", "--wandb_log=True") == 0
    assert [(x["iter"], x.get("loss"), x.get("val_loss")) for x in lines] == [
        (x["iter"], x.get("loss"), x.get("val_loss")) for x in timeless("o")]


def test_learned_weights_are_logged(data):
    assert go(f"--data={data}", "--out_dir=o", "--value_residual=True", "--value_mix=learnable", *MOVES) == 0
    rows = [x["value_mix"] for x in log("o")[1]]
    assert rows[0] == {"2": {"1": 0.5, "2": 0.5}}  # the start
    assert rows[-1]["2"]["1"] != 0.5 and rows[-1]["2"]["2"] != 0.5  # they move


def test_bfloat16_and_checkpointing_run(data):
    assert go(f"--data={data}", "--out_dir=plain", *MOVES) == 0
    assert go(f"--data={data}", "--out_dir=bf16", "--dtype=bfloat16", *MOVES) == 0
    assert go(f"--data={data}", "--out_dir=recomputed", "--activation_checkpointing=True", *MOVES) == 0
    assert losses("bf16") == pytest.approx(losses("plain"), abs=0.05)
    assert losses("recomputed") == pytest.approx(losses("plain"), abs=1e-5)


def test_one_process_needs_no_torch_distributed(data, monkeypatch):
    """No torch.distributed is needed."""
    def boom(*args, **kwargs):
        raise AssertionError("torch.distributed was used")
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    for name in ("init_process_group", "barrier", "all_reduce", "destroy_process_group"):
        monkeypatch.setattr(torch.distributed, name, boom, raising=False)
    assert go(f"--data={data}") == 0


@pytest.mark.parametrize("options", [[], ["--grad_clip=0", "--weight_decay=0.5"], ["--grad_clip=0.1", "--beta2=0.5"],
                                     ["--value_residual=True", "--value_mix=learnable", "--value_lr_scale=3"]], ids=" ".join)
def test_training_equals_a_plain_loop(data, options):
    """
    The paper's recipe from its description: AdamW with decay on matrices only, clipping by the norm, the schedule, the mean
    over 4 windows in 2 micro-steps; the mixing weights learn value_lr_scale times as fast.
    """
    args = [f"--data={data}", "--out_dir=o", "--tokens_per_iter=64", "--max_iters=6", *MOVES, *options]
    assert go(*args) == 0
    config = configure(train.Config, [*TINY, *args])
    net = model.GPT(train.checked_model_config(config, 320), config.seed)
    named = dict(net.named_parameters())
    optimizer = torch.optim.AdamW([
        {"params": [p for n, p in named.items() if p.dim() >= 2], "weight_decay": config.weight_decay, "scale": 1.0},
        {"params": [p for n, p in named.items() if p.dim() < 2 and "value_mix" not in n], "weight_decay": 0.0, "scale": 1.0},
        {"params": [p for n, p in named.items() if "value_mix" in n], "weight_decay": 0.0, "scale": config.value_lr_scale},
    ], betas=(0.9, config.beta2), eps=1e-8, foreach=False)
    rates = schedule(6, learning_rate=1e-2, min_lr=1e-3, warmup_iters=2, lr_decay_iters=6)
    every, want, norms = windows_of(data, "train"), [], []
    for it, lr in enumerate(rates):
        ids = torch.as_tensor(every[train.batch_windows(it, 4, len(every), config.seed)])
        loss = torch.nn.functional.cross_entropy(net(ids[:, :-1])[0].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        norms.append(sum(p.grad.square().sum() for p in net.parameters()).sqrt().item())
        for p in net.parameters():
            p.grad *= min(1.0, config.grad_clip / norms[-1]) if config.grad_clip else 1.0
        for group in optimizer.param_groups:
            group["lr"] = lr * group["scale"]
        optimizer.step()
        optimizer.zero_grad()
        want.append(loss.item())
    assert losses("o") == pytest.approx(want, abs=1e-4)
    assert [x["grad_norm"] for x in log("o")[0]] == pytest.approx(norms, rel=1e-2)
    trained = checkpoint("o")["model"]
    for name, p in named.items():
        assert torch.allclose(trained[name], p, atol=2e-3), name
    assert max(want) - min(want) > 0.05


# ---------------------------------------------------------------------------------------------------------------------
# Resume

KINDS = [[], ["--dropout=0.2"], ["--value_residual=True", "--value_mix=learnable"],
         ["--tokens_per_iter=64", "--dropout=0.1", "--shared_value=True"]]


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_then_the_same_command(data, monkeypatch, kind, sign):
    """stopped in the third of six iterations; the rest is as if nothing had happened, bit for bit."""
    args = [f"--data={data}", "--max_iters=6", *MOVES, *kind]
    assert go(*args, "--out_dir=straight") == 0
    with monkeypatch.context() as m:
        at_iteration(m, 2, lambda: os.kill(os.getpid(), sign))
        assert go(*args, "--out_dir=o") == 128 + sign
    assert checkpoint("o")["iter"] == 3 and [x["iter"] for x in log("o")[0]] == [0, 1, 2]
    assert go(*args, "--out_dir=o") == 0
    assert_same_run("o", "straight")
    assert max(losses("o")) - min(losses("o")) > 0.01


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_more_iterations(data, kind):
    """A finished run continues with a larger max_iters; with the same schedule as if it had been one run."""
    args = [f"--data={data}", "--eval_interval=3", *MOVES, *kind]
    assert go(*args, "--max_iters=6", "--out_dir=straight") == 0
    assert go(*args, "--max_iters=3", "--out_dir=o") == 0
    assert checkpoint("o")["iter"] == 3
    assert go(*args, "--max_iters=6", "--out_dir=o") == 0
    assert_same_run("o", "straight")


def test_more_iterations_off_the_interval_and_with_a_longer_schedule(data, capsys):
    args = [f"--data={data}", "--out_dir=o"]
    assert go(*args, "--max_iters=3") == 0
    capsys.readouterr()
    assert go(*args, "--max_iters=7") == 0
    assert "max_iters" in capsys.readouterr().out
    steps, evals = log("o")
    assert [x["iter"] for x in steps] == list(range(7)) and {0, 2, 4, 6, 7} <= {x["iter"] for x in evals}
    assert len(evals) == len({x["iter"] for x in evals}) and checkpoint("o")["iter"] == 7


@pytest.mark.parametrize("more", [[], ["--max_iters=2"], ["--init_from=resume"]])
def test_a_finished_run_is_left_alone(data, capsys, more):
    assert go(f"--data={data}", "--out_dir=o") == 0
    before = snapshot("o")
    capsys.readouterr()
    assert go(f"--data={data}", "--out_dir=o", *more) == 0
    assert "finished" in capsys.readouterr().out and snapshot("o") == before


def test_eval_only_changes_nothing(data, capsys):
    assert go(f"--data={data}", "--out_dir=o", *MOVES) == 0
    before, val = snapshot("o"), log("o")[1][-1]["val_loss"]
    capsys.readouterr()
    assert go(f"--data={data}", "--out_dir=o", "--eval_only=True", *MOVES) == 0
    assert f"{val:.4f}" in capsys.readouterr().out and snapshot("o") == before


def interrupted(data, monkeypatch, *args, out="o", at=3):
    """A run that a signal stopped after `at` of six iterations."""
    with monkeypatch.context() as m:
        at_iteration(m, at - 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert go(f"--data={data}", "--max_iters=6", f"--out_dir={out}", *MOVES, *args) == 143


def test_torn_and_surplus_log_lines_are_cut(data, monkeypatch):
    """What a killed run leaves after its last checkpoint: whole lines, half a line, a temporary file."""
    args = [f"--data={data}", "--max_iters=6", *MOVES]
    assert go(*args, "--out_dir=straight") == 0
    interrupted(data, monkeypatch)
    whole = '{"iter": 3, "loss": 1.0, "lr": 1.0}\n{"iter": 4, "val_loss": 1.0, "val": {}, "val_mean": 1.0}\n'
    with open("o/log.jsonl", "a") as f:
        f.write(whole + '{"iter": 4, "lo')
    Path("o/ckpt.pt.tmp").write_bytes(b"half a checkpoint")
    assert go(*args, "--out_dir=o") == 0
    assert_same_run("o", "straight")


@pytest.mark.parametrize("line", [
    "text", "7", "[1]", '{"loss": 1.0}', '{"iter": [1], "loss": 1.0}', '{"iter": 1, "loss": "low"}',
    '{"iter": "a", "loss": 1.0}', '{"iter": null, "loss": 1.0}', '{"iter": 2.5, "loss": 1.0}', '{"iter": 1e400, "loss": 1.0}',
    '{"iter": true, "loss": 1.0}', '{"iter": 0, "loss": 1.0}', '{"iter": -1, "loss": 1.0}', '{"iter": 99, "loss": true}',
    '{"iter": 1, "val_loss": 1.0}', '{"iter": 0, "val_loss": 1.0, "val": {}, "val_mean": 1.0}',
    '{"iter": 1, "val_loss": 1.0, "val": 3, "val_mean": 1.0}', '{"iter": 1, "val_loss": 1, "val": {"C4": "x"}, "val_mean": 1}'])
def test_a_log_with_foreign_lines_is_refused(data, capsys, line):
    """In a list that is complete, which would read it for the table."""
    Path("runs.py").write_text("runs = {'vanilla': {}, 'svformer': {'shared_value': True}}\n")
    args = ["runs.py", f"--data={data}", "--out_dir=o", "--sample_tokens=0"]
    assert go(*args) == 0
    with open("o/svformer/log.jsonl", "a") as f:
        f.write(line + "\n")
    before = Path("o/svformer/log.jsonl").read_bytes()
    err = refused(capsys, *args)
    assert "o/svformer/log.jsonl: holds a line that train.py did not write" in err and line[:40] in err
    assert Path("o/svformer/log.jsonl").read_bytes() == before
    err = refused(capsys, f"--data={data}", "--shared_value=True", "--out_dir=o/svformer", "--max_iters=9")
    assert "o/svformer/log.jsonl" in err
    assert Path("o/svformer/log.jsonl").read_bytes() == before


def test_leftover_temporary_checkpoint_alone_is_harmless(data):
    os.makedirs("o")
    Path("o/ckpt.pt.tmp").write_bytes(b"half")
    Path("o/log.jsonl").write_text('{"iter": 0, "loss": 1.0}\n{"it')
    assert go(f"--data={data}", "--out_dir=o") == go(f"--data={data}", "--out_dir=straight") == 0
    assert_same_run("o", "straight")


def damage(kind, whole):
    keep = {"empty": 0, "one byte": 1, "cut at 100": 100, "half": len(whole) // 2, "cut by 1": len(whole) - 1}
    if kind in keep:
        return whole[:keep[kind]]
    if kind == "garbage":
        return bytes(range(256)) * 8
    torch.save({"list": [1, 2, 3], "foreign": {"model": {}, "iter_num": 3}, "tensor": torch.zeros(2)}[kind], "other.pt")
    return Path("other.pt").read_bytes()


@pytest.mark.parametrize("kind", ["empty", "one byte", "cut at 100", "half", "cut by 1", "garbage", "list", "foreign",
                                  "tensor"])
def test_damaged_checkpoint(data, capsys, kind):
    """one line that names the file, which stays as it was; only init_from=scratch replaces it."""
    args = [f"--data={data}", "--out_dir=o", "--max_iters=2"]
    assert go(*args) == 0
    Path("o/ckpt.pt").write_bytes(damage(kind, Path("o/ckpt.pt").read_bytes()))
    before = snapshot("o")
    assert "o/ckpt.pt" in refused(capsys, *args)
    assert snapshot("o") == before
    assert go(*args, "--init_from=scratch") == 0 and checkpoint("o")["iter"] == 2


@pytest.mark.parametrize("option", ["--init_from=resume", "--eval_only=True"])
def test_resume_without_checkpoint(data, capsys, option):
    """Nothing is made, neither out_dir nor the built-in corpus."""
    for where in ([f"--data={data}"], []):
        err = refused(capsys, *where, "--out_dir=o", option)
        assert "o/ckpt.pt" in err and os.listdir() == []


def test_evaluating_from_scratch_is_refused(data, capsys):
    args = [f"--data={data}", "--out_dir=o"]
    assert go(*args) == 0
    before = snapshot("o")
    err = refused(capsys, *args, "--eval_only=True", "--init_from=scratch")
    assert "--eval_only" in err and "--init_from=scratch" in err and snapshot("o") == before


def test_scratch_starts_over(data):
    args = [f"--data={data}", "--out_dir=o"]
    assert go(*args, "--seed=1") == 0
    assert go(*args, "--init_from=scratch") == 0  # another seed is no matter
    assert go(f"--data={data}", "--out_dir=fresh") == 0
    assert_same_run("o", "fresh")


@pytest.mark.parametrize("change,names", [
    ("--n_layer=3", ["n_layer"]), ("--block_size=8", ["block_size"]), ("--n_embd=16", ["n_embd"]), ("--seed=2", ["seed"]),
    ("--value_residual=True", ["value_residual"]), ("--shared_value=True", ["shared_value"]),
    ("--n_layer=3 --n_head=4", ["n_layer", "n_head"]), ("--vocab_size=512", ["vocab_size"])])
def test_resume_of_another_model_is_refused(data, capsys, monkeypatch, change, names):
    """What may not change."""
    interrupted(data, monkeypatch)
    before = snapshot("o")
    err = refused(capsys, f"--data={data}", "--out_dir=o", "--max_iters=6", *MOVES, *change.split())
    assert all(name in err for name in names) and "n_ffn" not in err
    assert snapshot("o") == before


def test_resume_with_other_data_is_refused(data, capsys, monkeypatch):
    """a longer bin in the same place."""
    shutil.copytree(data, "bins")
    interrupted("bins", monkeypatch)
    before = snapshot("o")
    write_docs("more.jsonl", {"C4": 20}, 30)
    prepare.prepare(prepare.Config(source="more.jsonl", out_dir="bins", tokenizer="bytes", num_proc=1, val_fraction=0.3))
    err = refused(capsys, "--data=bins", "--out_dir=o", "--max_iters=6", *MOVES)
    assert "data" in err and "bins" in err and snapshot("o") == before


def test_resume_with_the_same_data_elsewhere_is_allowed(data, monkeypatch):
    interrupted(data, monkeypatch)
    shutil.copytree(data, "moved")
    assert go("--data=moved", "--out_dir=o", "--max_iters=6", *MOVES) == 0 and checkpoint("o")["iter"] == 6


@pytest.mark.parametrize("change", ["--learning_rate=0.02", "--eval_iters=2", "--weight_decay=0.01", "--beta2=0.99",
                                    "--grad_clip=0.5", "--eval_interval=3", "--batch_size=1 --tokens_per_iter=32"])
def test_resume_with_other_training_options_is_allowed_and_printed(data, capsys, monkeypatch, change):
    """of the options of this command, which count."""
    interrupted(data, monkeypatch)
    capsys.readouterr()
    assert go(f"--data={data}", "--out_dir=o", "--max_iters=6", *MOVES, *change.split()) == 0
    name, value = change.split()[0].strip("-").split("=")
    told = [x for x in capsys.readouterr().out.splitlines() if name in x and value in x and not x.startswith(f"{name} = ")]
    assert told and "n_layer" not in told[0] and "out_dir" not in told[0]
    groups = checkpoint("o")["optimizer"]["param_groups"]
    if name == "beta2":
        assert all(g["betas"][1] == 0.99 for g in groups)
    if name == "weight_decay":
        assert {g["weight_decay"] for g in groups} == {0.01, 0.0}
    if name == "learning_rate":
        want = schedule(6, learning_rate=0.02, min_lr=1e-3, warmup_iters=2, lr_decay_iters=6)
        assert [x["lr"] for x in log("o")[0]][3:] == pytest.approx(want[3:])


def test_prefixed_names_are_accepted(data, monkeypatch):
    """what torch.compile and DDP leave in names."""
    assert go(f"--data={data}", "--max_iters=6", "--out_dir=straight", *MOVES) == 0
    interrupted(data, monkeypatch)
    ckpt = checkpoint("o")
    torch.save({**ckpt, "model": {f"module._orig_mod.{k}": v for k, v in ckpt["model"].items()}}, "o/ckpt.pt")
    assert go(f"--data={data}", "--max_iters=6", "--out_dir=o", *MOVES) == 0
    assert_same_run("o", "straight")


# Forks, from a process that has imported everything, children that train and die by SIGKILL: at a moment of the clock, half
# way through the bytes of a checkpoint, or beside a rename. After each death the checkpoint must load and not be older.
KILLER = """
import io, json, os, random, signal, sys, time
import torch
torch.set_num_threads(1)
import train
args, rng, last, killed = sys.argv[1:], random.Random(5), 0, 0
save, replace = torch.save, os.replace

def child(out, where=None, count=0):
    # a process that trains into out, and dies when it is at `where` for the count-th time
    pid = os.fork()
    if pid:
        return pid
    code, seen = 1, {}
    def here(name):
        seen[name] = seen.get(name, 0) + 1
        return name == where and seen[name] == count
    def die():
        with open("deaths", "a") as f:
            f.write(where + "\\n")
        os.kill(os.getpid(), signal.SIGKILL)
    def half_save(content, f):
        if here("half a save"):
            whole = io.BytesIO()
            save(content, whole)
            f.write(whole.getvalue()[:len(whole.getvalue()) // 2])
            f.flush()
            die()
        save(content, f)
    def unsure_replace(a, b):
        here("before " + os.path.basename(b)) and die()
        replace(a, b)
        here("after " + os.path.basename(b)) and die()
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        torch.save, os.replace = half_save, unsure_replace
        sys.argv = ["train.py", *args, "--out_dir=" + out]
        train.main()
        code = 0
    except SystemExit as e:
        code = e.code
    finally:
        os._exit(code)

def wait(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def check():
    global last
    if os.path.exists("o/ckpt.pt"):
        at = torch.load("o/ckpt.pt", weights_only=True)["iter"]
        assert at >= last, (at, last)
        last = at

sys.argv = ["train.py", *args, "--out_dir=straight"]
train.main()  # here, so that the children find every module loaded
for where in ("before log.jsonl", "half a save", "before ckpt.pt", "after ckpt.pt", "after log.jsonl", "before config.json"):
    for count in ((1, 2) if "ckpt" in where or "save" in where else (1,)):
        assert wait(child("o", where, count)) == -signal.SIGKILL, (where, count, last)
        check()
for n in range(5):
    pid = child("o")
    time.sleep(rng.uniform(0.01, 0.08))
    os.kill(pid, signal.SIGKILL)
    killed += wait(pid) < 0
    check()
assert wait(child("o")) == 0
args += ["--max_iters=1000000", "--eval_interval=1000000"]
pid = child("stopped")
while not os.path.exists("stopped/ckpt.pt"):
    time.sleep(0.01)
time.sleep(0.2)
os.kill(pid, signal.SIGTERM)
print("\\n" + json.dumps({"killed": killed, "stopped": wait(pid)}))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kill_9_again_and_again(data):
    """the run that was killed many times equals the undisturbed one; a SIGTERM from outside saves and leaves."""
    Path("killer.py").write_text(KILLER)
    args = [*TINY, f"--data={data}", *MOVES, "--dropout=0.1", "--eval_interval=1", "--max_iters=20"]
    done = subprocess.run([sys.executable, "killer.py", *args], capture_output=True, text=True, timeout=80,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(Path("deaths").read_text().split("\n")) == 9 + 1 and result["killed"] >= 1
    assert_same_run("o", "straight")
    assert [x["iter"] for x in log("o")[0]] == list(range(20)) and [x["iter"] for x in log("o")[1]] == list(range(21))
    assert result["stopped"] == 143
    at = checkpoint("stopped")["iter"]
    assert at > 0 and [x["iter"] for x in log("stopped")[0]] == list(range(at))


SLOW = """
import os, signal, sys, threading, time
import train

class Signals(train.Signals):  # as among several processes, which leave when one of them is gone; less patient
    def __init__(self, patience):
        super().__init__(0.3)

def interrupted(run):
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
    return work(run)

where = sys.argv.pop(1)
work, read = getattr(train.Run, where), train.prepare.Bin.read
train.Signals = Signals
setattr(train.Run, where, interrupted)
train.prepare.Bin.read = lambda *args: time.sleep(0.1) or read(*args)  # a pass of 0.1 s
train.main()
"""


@pytest.mark.parametrize("where, options", [
    ("step", ["--batch_size=1", "--tokens_per_iter=320", "--eval_interval=100"]), ("evaluate", ["--eval_iters=20"])])
def test_a_signal_in_a_long_iteration_or_evaluation_saves(data, where, options):
    """Of two seconds, in passes of a tenth: longer than a process waits for others, but it does not wait."""
    Path("slow.py").write_text(SLOW)
    args = [*TINY, f"--data={data}", "--out_dir=o", "--max_iters=1000", *options]
    done = subprocess.run([sys.executable, "slow.py", where, *args], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 143 and "saved. The same command continues" in done.stdout, done.stdout + done.stderr
    assert checkpoint("o")["iter"] == 1


# ---------------------------------------------------------------------------------------------------------------------
# Steps that are not finite


def poison(monkeypatch, bad, how="nan"):
    """Make the loss of the training steps for which bad(number) is true NaN, infinite, or only its gradient NaN."""
    true, calls = model.GPT.forward, []

    def forward(self, idx, targets=None):
        logits, loss = true(self, idx, targets)
        if self.training:
            calls.append(0)
            if bad(len(calls) - 1):
                loss = {"nan": lambda: loss * math.nan, "inf": lambda: loss * math.inf,
                        "gradient": lambda: loss + (self.lm_head.weight.sum() * 0).sqrt()}[how]()
        return logits, loss
    monkeypatch.setattr(model.GPT, "forward", forward)


@pytest.mark.parametrize("how", ["nan", "inf", "gradient"])
@pytest.mark.parametrize("clip", ["1", "0"])
def test_a_bad_step_is_skipped(data, monkeypatch, how, clip):
    args = [f"--data={data}", "--eval_interval=10", f"--grad_clip={clip}", *MOVES]
    assert go(*args, "--max_iters=2", "--out_dir=before") == 0
    with monkeypatch.context() as m:
        poison(m, lambda n: n == 2, how)
        assert go(*args, "--max_iters=3", "--out_dir=o") == 0
        assert go(*args, "--max_iters=5", "--out_dir=on") == 0
    for key in ("model", "optimizer"):  # weights, moments and their step count as they were
        a, b = checkpoint("before")[key], checkpoint("o")[key]
        if key == "optimizer":
            a, b = a["state"], b["state"]
        assert equal(a, b), key
    steps = log("o")[0]
    assert [bool(x.get("skipped")) for x in steps] == [False, False, True]
    assert steps[2]["grad_norm"] is None and (how == "gradient" or steps[2]["loss"] is None)
    poison(monkeypatch, lambda n: n == 2, how)
    assert go(*args, "--max_iters=6", "--out_dir=on") == 0  # a resumed run, for which step 2 is iteration 7
    steps = log("on")[0]
    assert [x["iter"] for x in steps] == list(range(6)) and all(math.isfinite(x["loss"]) for x in steps[3:])


@pytest.mark.parametrize("log_interval,eval_interval", [(1, 100), (10, 100), (10, 1), (2, 3)])
def test_too_many_bad_steps_stop_the_run(data, capsys, monkeypatch, log_interval, eval_interval):
    args = [f"--data={data}", "--out_dir=o", "--max_iters=40", "--max_bad_steps=3", f"--log_interval={log_interval}",
            f"--eval_interval={eval_interval}", *MOVES]
    poison(monkeypatch, lambda n: n >= 4, "nan")
    err = refused(capsys, *args)
    assert "o/ckpt.pt" in err and "learning_rate" in err
    assert len(log("o")[0]) <= 4 + 3 + log_interval  # found at the next console line
    assert model.load_checkpoint("o/ckpt.pt")["iter"] <= 4 + 3 + log_interval
    assert all(torch.isfinite(v).all() for v in checkpoint("o")["model"].values())


def test_bad_steps_count_only_in_a_row(data, monkeypatch):
    poison(monkeypatch, lambda n: n % 3 != 2)
    assert go(f"--data={data}", "--out_dir=o", "--max_iters=9", "--max_bad_steps=3", "--log_interval=1") == 0
    assert [bool(x.get("skipped")) for x in log("o")[0]] == [True, True, False] * 3


def test_bad_steps_are_counted_across_a_resume(data, capsys, monkeypatch):
    """Saved at an interruption in the middle of a streak."""
    args = [f"--data={data}", "--out_dir=o", "--max_bad_steps=4", "--log_interval=1", "--eval_interval=100", "--max_iters=9"]
    with monkeypatch.context() as m:
        poison(m, lambda n: n >= 1)
        at_iteration(m, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert go(*args) == 143
    poison(monkeypatch, lambda n: True)
    refused(capsys, *args)
    assert [x["iter"] for x in log("o")[0]] == [0, 1, 2, 3, 4]


def test_a_validation_loss_that_is_no_number_leaves_a_readable_log(data, capsys, monkeypatch):
    """A diverged model: NaN is no JSON, and other tools read log.jsonl and summary.json."""
    assert go(f"--data={data}", "--out_dir=base", *MOVES) == 0
    true = model.GPT.forward

    def forward(self, idx, targets=None):
        logits, loss = true(self, idx, targets)
        return logits, loss if self.training else loss * math.nan
    monkeypatch.setattr(model.GPT, "forward", forward)
    assert go(f"--data={data}", "--out_dir=o", "--baseline=base", *MOVES) == 0
    steps, evals = log("o")  # strict JSON
    assert all(x["rel_loss"] == 0 for x in steps) and [x["iter"] for x in evals] == [0, 2, 4]
    assert all(x["val_loss"] is None and x.get("rel_val_loss") is None for x in evals)
    assert go(f"--data={data}", "--out_dir=o", "--baseline=base", "--max_iters=6", *MOVES) == 0  # and can be read back
    checkpoint("o")


def test_a_diverging_run_leaves_a_readable_log(data, capsys):
    assert go(f"--data={data}", "--out_dir=o", "--learning_rate=1e30", "--warmup_iters=0", "--max_iters=20") in (0, 2)
    assert all(log("o"))


# ---------------------------------------------------------------------------------------------------------------------
# Data that does not fit, nanoGPT's bins


def cut(data, name, size):
    shutil.copytree(data, "bins")
    with open(f"bins/{name}.bin", "r+b") as f:
        f.truncate(size)


def test_vocab_smaller_than_the_data(data, capsys):
    err = refused(capsys, f"--data={data}", "--vocab_size=100", "--out_dir=o")
    assert "--vocab_size=100" in err and "257" in err and not os.path.exists("o")


@pytest.mark.parametrize("name,size", [("train", 101), ("train", 100), ("val", 0), ("val_C4", 10), ("val", 33)])
def test_cut_bin(data, capsys, name, size):
    cut(data, name, size)
    assert f"bins/{name}.bin" in refused(capsys, "--data=bins", "--out_dir=o") and not os.path.exists("o")


def test_missing_bin_and_missing_folder(data, capsys):
    shutil.copytree(data, "bins")
    os.remove("bins/val_Book.bin")
    assert "val_Book.bin" in refused(capsys, "--data=bins", "--out_dir=o")
    err = refused(capsys, "--data=nowhere", "--out_dir=o")
    assert "nowhere" in err and "prepare.py" in err and not os.path.exists("o")


def test_a_corpus_of_any_size_starts_and_resumes_at_once(data):
    """Bins with a hole of a tebibyte after their text: the first evaluation, a step and a resume take no longer."""
    shutil.copytree(data, "bins")
    meta = json.load(open("bins/meta.json"))
    for name in ("train", "val"):
        try:
            os.truncate(f"bins/{name}.bin", 1 << 40)
        except OSError as e:
            pytest.skip(f"no such files here: {e}")
        meta["bins"][name] = (1 << 40) // np.dtype(meta["dtype"]).itemsize
    json.dump(meta, open("bins/meta.json", "w"))
    for iters in (1, 2):
        began = time.perf_counter()
        assert go("--data=bins", "--out_dir=o", f"--max_iters={iters}") == 0
        assert time.perf_counter() - began < 5
    assert len(losses("o")) == 2


@pytest.mark.parametrize("name", ["train", "val"])
def test_bin_shorter_than_a_window(data, capsys, name):
    nano_bins("bins")
    with open(f"bins/{name}.bin", "r+b") as f:
        f.truncate(2 * T)
    err = refused(capsys, "--data=bins", "--out_dir=o")
    assert f"{name}.bin" in err and f"{T + 1}" in err and "block_size" in err and not os.path.exists("o")
    with open(f"bins/{name}.bin", "ab") as f:
        f.write(b"\1\0")
    assert go("--data=bins", "--out_dir=o", "--max_iters=1") == 0  # one token more is one window


def test_damaged_meta(data, capsys):
    shutil.copytree(data, "bins")
    Path("bins/meta.json").write_text('{"tokenizer": "byt')
    assert "bins/meta.json" in refused(capsys, "--data=bins", "--out_dir=o") and not os.path.exists("o")


def nano_bins(folder):
    os.makedirs(folder)
    for seed, name in enumerate(("train", "val")):
        np.random.default_rng(seed).integers(0, 50257, 2000).astype("<u2").tofile(f"{folder}/{name}.bin")


def test_nanogpt_bins_train_unchanged(capsys, monkeypatch):
    """As GPT-2 tokens, without a meta.json and without a tokenizer."""
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    nano_bins("data/owt")
    before = snapshot("data")
    assert go("--data=owt", "--out_dir=o", "--max_iters=2") == 0  # a bare name is data/NAME
    assert snapshot("data") == before
    ckpt = checkpoint("o")
    assert ckpt["model_config"]["vocab_size"] == 50304 and ckpt["data"]["tokenizer"] == "gpt2"
    x = log("o")[1][0]
    assert x["val"] == {} and x["val_mean"] == x["val_loss"]
    assert losses("o")[0] == pytest.approx(math.log(50304), abs=0.1)


def test_nanogpt_folders_that_are_refused(capsys):
    nano_bins("chars")
    Path("chars/meta.pkl").write_bytes(b"x")
    assert "meta.pkl" in refused(capsys, "--data=chars", "--out_dir=o")
    nano_bins("foreign")  # ids of another tokenizer
    np.full(2000, 60000, "<u2").tofile("foreign/train.bin")
    err = refused(capsys, "--data=foreign", "--out_dir=o")
    assert "60000" in err and not os.path.exists("o")


def test_builtin_corpus_is_made_when_missing(capsys):
    assert go("--out_dir=o", "--max_iters=1") == 0
    assert os.path.exists("data/builtin/meta.json") and set(log("o")[1][0]["val"]) == {"python"}


# ---------------------------------------------------------------------------------------------------------------------
# Lists of runs, baselines, seeds


@pytest.fixture
def runs(data):
    """Writes runs.py and returns the command that trains it into sweep."""
    def write(text, name="runs.py"):
        Path(name).write_text(f"runs = {text}\n")
        return [name, f"--data={data}", "--out_dir=sweep", "--rel_window=2", *MOVES]
    return write


THREE = '{"vanilla": {}, "same": {}, "res": {"value_residual": True}}'


def assert_relative(own, base, complete=True):
    """rel_loss and rel_val_loss are the difference to the baseline's numbers at the same iteration."""
    for mine, theirs, key in zip(log(own), log(base), ("loss", "val_loss")):
        theirs = {x["iter"]: x for x in theirs}
        for x in mine:
            if complete or x["iter"] in theirs:
                assert x[f"rel_{key}"] == x[key] - theirs[x["iter"]][key]
            else:
                assert f"rel_{key}" not in x


def test_list_of_runs(runs, capsys):
    assert go(*runs(THREE)) == 0
    out = capsys.readouterr().out
    assert_relative("sweep/res", "sweep/vanilla")
    assert all(x["rel_loss"] == 0 for x in log("sweep/same")[0]) and all(x["rel_val_loss"] == 0 for x in log("sweep/same")[1])
    assert not any("rel_loss" in x or "rel_val_loss" in x for part in log("sweep/vanilla") for x in part)
    assert any(x["rel_loss"] for x in log("sweep/res")[0])
    table = out[out.rindex("tokens/s\n"):]
    summary = json.loads(Path("sweep/summary.json").read_text())
    assert set(summary) == {"vanilla", "same", "res"}
    for name in summary:
        assert any(line.split()[:1] == [name] for line in table.splitlines())
        steps, evals = log(f"sweep/{name}")
        assert f"{evals[-1]['val_loss']:.4f}" in table
        assert summary[name]["val_loss"]["mean"] == pytest.approx(evals[-1]["val_loss"])
        assert summary[name]["train_loss"]["mean"] == pytest.approx((steps[-1]["loss"] + steps[-2]["loss"]) / 2)  # window 2
    assert summary["res"]["rel_val_loss"]["mean"] == pytest.approx(log("sweep/res")[1][-1]["rel_val_loss"])
    assert summary["res"]["baseline"] == "vanilla" and summary["vanilla"]["baseline"] is None
    assert Path("sweep/relative_loss.png").read_bytes().startswith(b"\x89PNG")


def test_runs_see_identical_batches(runs, monkeypatch):
    true, reads = prepare.Bin.read, []

    def spy(self, windows, block_size):
        if self.path.endswith("train.bin"):
            reads.append([int(w) for w in windows])
        return true(self, windows, block_size)
    monkeypatch.setattr(prepare.Bin, "read", spy)
    monkeypatch.setattr(train, "ThreadPoolExecutor", lambda n: Now())
    assert go(*runs('{"vanilla": {}, "res": {"value_residual": True}}')) == 0
    assert reads[:len(reads) // 2] == reads[len(reads) // 2:] and len(reads) >= 8


class Now:
    """A pool that works at once, so that reads come in order."""

    def submit(self, f, *args):
        result = f(*args)
        return type("Done", (), {"result": lambda self: result})()

    def shutdown(self):
        pass


@pytest.mark.parametrize("options", [dict(value_residual=True), dict(shared_value=True),
                                     dict(value_residual=True, value_mix="learnable"), dict(n_layer=3), dict(denseformer=True)])
def test_shared_weights_start_equal(options):
    """A function of (seed, name): the difference at iteration 0 is the system's."""
    shape = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=320)
    a = model.GPT(model.GPTConfig(**shape), 1337).state_dict()
    b = model.GPT(model.GPTConfig(**{**shape, **options}), 1337).state_dict()
    other = model.GPT(model.GPTConfig(**shape), 1338).state_dict()
    for name in set(a) & set(b):
        rows = min(len(a[name]), len(b[name]))  # SVFormer's c_attn lacks the rows of v
        assert torch.equal(a[name][:rows], b[name][:rows]), name
        assert a[name].dim() < 2 or not torch.equal(a[name], other[name])
    assert len(set(a) & set(b)) >= len(a)


def test_vanilla_by_another_name_is_exactly_zero(runs):
    """Weights (0, 1) are the vanilla model to the bit, so every difference is exactly 0."""
    assert go(*runs('{"vanilla": {}, "res01": {"value_residual": True, "value_lambda1": 0.0, "value_lambda2": 1.0}}')) == 0
    assert {x["rel_loss"] for x in log("sweep/res01")[0]} == {x["rel_val_loss"] for x in log("sweep/res01")[1]} == {0.0}


def test_a_run_names_its_own_baseline(runs):
    text = '{"vanilla": {}, "res": {"value_residual": True}, "sv": {"shared_value": True, "baseline": "res"}, "sv2": ' \
           '{"shared_value": True}}'
    assert go(*runs(text)) == 0
    assert_relative("sweep/sv", "sweep/res")
    assert_relative("sweep/sv2", "sweep/vanilla")
    summary = json.loads(Path("sweep/summary.json").read_text())
    assert summary["sv"]["baseline"] == "res" and summary["sv2"]["baseline"] == "vanilla"


def test_a_baseline_may_come_later_in_the_list(runs):
    text = '{"sv": {"shared_value": True, "baseline": "res"}, "res": {"value_residual": True}}'
    assert go(*runs(text)) == 0
    assert_relative("sweep/sv", "sweep/res")


def test_differences_are_to_the_present_baseline(runs, data):
    """Where a list names another one later, or another run comes first, or one run is continued with another."""
    text = '{{"vanilla": {{}}, "res": {{"value_residual": True}}, "sv": {{"shared_value": True{}}}}}'
    assert go(*runs(text.format(""))) == 0
    assert_relative("sweep/sv", "sweep/vanilla")
    assert go(*runs(text.format(', "baseline": "res"'))) == 0
    assert_relative("sweep/sv", "sweep/res")
    ends = {name: log(f"sweep/{name}")[1][-1]["val_loss"] for name in ("vanilla", "res", "sv")}
    summary = json.loads(Path("sweep/summary.json").read_text())
    assert summary["sv"]["rel_val_loss"]["mean"] == pytest.approx(ends["sv"] - ends["res"])
    assert go(*runs('{"res": {"value_residual": True}, "vanilla": {}, "sv": {"shared_value": True}}')) == 0
    summary = json.loads(Path("sweep/summary.json").read_text())
    assert "rel_val_loss" not in summary["res"] and "rel_loss" not in summary["res"]
    assert summary["vanilla"]["rel_val_loss"]["mean"] == pytest.approx(ends["vanilla"] - ends["res"])
    args = [f"--data={data}", *MOVES, "--rel_window=2", "--out_dir=o"]
    assert go(*args, "--baseline=sweep/vanilla", "--max_iters=2") == 0
    assert go(*args, "--baseline=sweep/res") == 0
    assert_relative("o", "sweep/res")
    shutil.rmtree("sweep/res")  # gone: what was measured against it stays
    before = Path("sweep/sv/log.jsonl").read_text()
    two = runs('{"res": {"value_residual": True}, "sv": {"shared_value": True}}')
    assert go(*two, "--runs=sv") == 0
    assert Path("sweep/sv/log.jsonl").read_text() == before
    assert go(*two, "--runs=sv", "--max_iters=6") == 0  # nor does more training take it away
    assert [x["iter"] for x in log("sweep/sv")[0] if "rel_loss" in x] == list(range(4))


def test_a_baseline_that_begins_again_takes_no_difference_away(runs):
    args = runs('{"vanilla": {}, "res": {"value_residual": True}}')
    assert go(*args) == 0
    before = Path("sweep/res/log.jsonl").read_text()
    file = Path("sweep/vanilla/log.jsonl")
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:2]))
    assert go(*args, "--runs=res") == 0
    assert Path("sweep/res/log.jsonl").read_text() == before
    assert json.loads(Path("sweep/summary.json").read_text())["res"]["rel_val_loss"]["n"] == 1


def test_a_table_changes_no_log_that_another_process_writes(runs, monkeypatch):
    """The summary has the differences all the same."""
    args = runs('{"vanilla": {}, "res": {"value_residual": True}}')
    assert go(*args, "--runs=res") == go(*args, "--runs=vanilla") == 0
    file = Path("sweep/res/log.jsonl")
    file.write_text(re.sub(r', "rel_\w+": [-.e0-9]+', "", file.read_text()))
    before = file.read_text()
    with prepare.locked("sweep/res"):
        summary, _ = train.summarize(train.configure(train.Config, [*TINY, *args]))
    assert file.read_text() == before and "rel_val_loss" in summary["res"]


def test_a_run_that_was_not_picked_costs_no_table(runs, capsys):
    """It was trained to the end of another schedule, which its baseline has left."""
    args = [a for a in runs(THREE) if "lr_decay_iters" not in a]
    assert go(*args, "--max_iters=2") == 0
    capsys.readouterr()
    assert go(*args, "--runs=vanilla,res", "--max_iters=4") == 0
    assert "not in the table: sweep/same: baseline" in capsys.readouterr().err
    assert set(json.loads(Path("sweep/summary.json").read_text())) == {"vanilla", "res"}


def test_an_evaluation_has_no_difference_to_another_schedules(data):
    """As a training line: the baseline was continued from a shorter cosine, so that iterations 1 to 3 had other rates."""
    args = [f"--data={data}", *[a for a in MOVES if "lr_decay_iters" not in a], "--eval_interval=2"]
    assert go(*args, "--out_dir=base", "--max_iters=4") == go(*args, "--out_dir=base", "--max_iters=8") == 0
    assert go(*args, "--out_dir=o", "--max_iters=8", "--baseline=base") == 0
    steps, evals = log("o")
    alike = [i for i, (x, y) in enumerate(zip(steps, log("base")[0])) if x["lr"] == y["lr"]]
    assert [x["iter"] for x in steps if "rel_loss" in x] == alike and 3 not in alike
    assert [x["iter"] for x in evals if "rel_val_loss" in x] == [0, *(i for i in (2, 4, 6, 8) if i - 1 in alike)]


def test_a_list_is_evaluated_with_other_windows_and_beside_a_writer(runs):
    """Nothing is compared or written then."""
    args = runs('{"vanilla": {}, "res": {"value_residual": True}}')
    assert go(*args) == 0
    with prepare.locked("sweep/res"):
        assert go(*args, "--eval_only=True", "--eval_iters=5") == 0


def test_a_resumed_run_lets_go_of_its_checkpoint(data, monkeypatch):
    """The moments are no part of the file, which the next save replaces."""
    interrupted(data, monkeypatch)
    true, maps = train.Run.train, []

    def spy(self):
        maps.append(Path("/proc/self/maps").read_text())
        return true(self)
    monkeypatch.setattr(train.Run, "train", spy)
    if not os.path.exists("/proc/self/maps"):
        pytest.skip("needs Linux")
    assert go(f"--data={data}", "--max_iters=6", "--out_dir=o", *MOVES) == 0
    assert len(maps) == 1 and "ckpt.pt" not in maps[0]


def test_a_limit_that_changes_no_batch_changes_no_order(data, monkeypatch, capsys):
    interrupted(data, monkeypatch)
    assert go(f"--data={data}", "--max_iters=6", "--out_dir=o", *MOVES, "--max_tokens_per_iter=1000000") == 0
    out = capsys.readouterr().out
    assert "max_tokens_per_iter 0 -> 1000000" in out and "the data order" not in out


def test_a_numbered_device_is_for_one_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(train.UserError, match="--device=cuda:0: under torchrun"):
        train.join_group(train.Config(device="cuda:0"))


def test_seeds_repeat_the_runs_in_pairs(runs, capsys):
    assert go(*runs('{"vanilla": {}, "res": {"value_residual": True}}'), "--seeds=1337,7") == 0
    for seed in (1337, 7):
        assert json.loads(Path(f"sweep/res/seed{seed}/config.json").read_text())["seed"] == seed
        assert_relative(f"sweep/res/seed{seed}", f"sweep/vanilla/seed{seed}")
    assert losses("sweep/vanilla/seed7") != losses("sweep/vanilla/seed1337")
    row = json.loads(Path("sweep/summary.json").read_text())["res"]
    own = [log(f"sweep/res/seed{s}")[1][-1]["rel_val_loss"] for s in (1337, 7)]
    assert row["rel_val_loss"]["mean"] == pytest.approx(np.mean(own)) and row["rel_val_loss"]["n"] == 2
    assert row["rel_val_loss"]["std"] == pytest.approx(np.std(own, ddof=1))
    assert "±" in capsys.readouterr().out and "res" in json.loads(Path("sweep/summary.json").read_text())


@pytest.mark.parametrize("seeds", ["a,b", "1,,2", "1.5"])
def test_seeds_that_are_none(runs, capsys, seeds):
    assert "seeds" in refused(capsys, *runs(THREE), f"--seeds={seeds}") and not os.path.exists("sweep")


def test_some_runs_then_all(runs, capsys):
    """--runs picks; what the baseline was missing for is filled in when it is there, without training again."""
    args = runs(THREE)
    assert "vanilla" in refused(capsys, *args, "--runs=resformer")  # names those that exist
    assert go(*args, "--runs=res,same") == 0
    assert not os.path.exists("sweep/vanilla")
    assert not any("rel_loss" in x for name in ("res", "same") for x in log(f"sweep/{name}")[0])
    before = snapshot("sweep/res")["sweep/res/ckpt.pt"]
    assert go(*args) == 0
    assert snapshot("sweep/res")["sweep/res/ckpt.pt"] == before
    assert_relative("sweep/res", "sweep/vanilla")
    assert_relative("sweep/same", "sweep/vanilla")
    assert set(json.loads(Path("sweep/summary.json").read_text())["res"]) >= {"rel_loss", "rel_val_loss"}


def test_value_lr_scale_in_a_list(runs, capsys):
    """It is refused where no run of the list learns weights of its values, and else shared by all, picked by --runs or not."""
    fixed = runs('{"vanilla": {}, "identity": {"value_residual": True}}')
    assert "--value_lr_scale=3.0" in refused(capsys, *fixed, "--value_lr_scale=3") and not os.path.exists("sweep")
    args = [*runs('{"vanilla": {}, "learned": {"value_residual": True, "value_mix": "plus"}}'), "--value_lr_scale=3"]
    assert go(*args, "--runs=vanilla") == 0 and not os.path.exists("sweep/learned")
    assert go(*args) == 0 and os.path.exists("sweep/learned/ckpt.pt")


def test_finished_runs_are_skipped(runs, capsys):
    args = runs(THREE)
    assert go(*args) == 0
    before = snapshot("sweep")
    capsys.readouterr()
    assert go(*args) == 0
    assert "tokens/s" in capsys.readouterr().out
    after = snapshot("sweep")
    for path in before:
        if not path.endswith(("summary.json", "relative_loss.png")):
            assert after[path] == before[path], path
    assert after["sweep/summary.json"][0] == before["sweep/summary.json"][0]


def test_an_interrupted_list_continues(runs, monkeypatch):
    args = runs('{"vanilla": {}, "res": {"value_residual": True}, "sv": {"shared_value": True}}')
    assert go(*args, "--out_dir=straight") == 0
    true, calls = train.learning_rate, []

    def hooked(i, config):
        calls.append(i)
        if len(calls) == 4 + 2:  # the second iteration of the second run
            os.kill(os.getpid(), signal.SIGTERM)
        return true(i, config)
    with monkeypatch.context() as m:
        m.setattr(train, "learning_rate", hooked)
        assert go(*args) == 143
    assert not os.path.exists("sweep/sv")
    before = snapshot("sweep/vanilla")
    assert go(*args) == 0
    assert snapshot("sweep/vanilla") == before
    for name in ("vanilla", "res", "sv"):
        assert_same_run(f"sweep/{name}", f"straight/{name}")


@pytest.mark.parametrize("text,told", [
    ('{"vanilla": {}, "res": {"value_residul": True}}', "value_residual"),  # the nearest match
    ('{"vanilla": {}, "res": {"value_residual": "yes"}}', "value_residual"),
    ('{"vanilla": {}, "res": {"value_residual": True, "shared_value": True}}', "value_residual"),
    ('{"vanilla": {}, "res": {"batch_size": 3, "tokens_per_iter": 128}}', "batch_size"),
    ('{"vanilla": {}, "res": {"n_head": 3}}', "n_head"),
    ('{"vanilla": {}, "res": {"baseline": "vanila"}}', "vanila"),
    ('{"vanilla": {}, "res": {"baseline": "res"}}', "res"),
    ('{"vanilla": {}, "a/b": {}}', "a/b"),
    ('{"vanilla": {}, "..": {}}', ".."),
    ('{"vanilla": {}, "res": 3}', "res")])
def test_a_bad_list_is_refused_before_any_training(runs, capsys, text, told):
    assert told in refused(capsys, *runs(text)) and not os.path.exists("sweep")


@pytest.mark.parametrize("options,name", [('{"block_size": 8, "tokens_per_iter": 32}', "block_size"), ('{"seed": 3}', "seed"),
                                          ('{"learning_rate": 0.02}', "learning_rate")])
def test_a_list_that_cannot_be_compared_is_refused_before_any_training(runs, capsys, options, name):
    """All that is needed to know is in the list."""
    assert name in refused(capsys, *runs(f'{{"vanilla": {{}}, "other": {options}}}'))
    assert not os.path.exists("sweep/vanilla/log.jsonl")


def test_baseline_of_another_folder(data):
    args = [f"--data={data}", *MOVES]
    assert go(*args, "--out_dir=base") == 0
    assert go(*args, "--out_dir=o", "--baseline=base", "--value_residual=True") == 0
    assert_relative("o", "base")
    assert go(*args, "--out_dir=again", "--baseline=base", "--tokens_per_iter=32", "--batch_size=2", "--log_interval=1") == 0
    assert all(x["rel_loss"] == 0 for x in log("again")[0])


@pytest.mark.parametrize("change,name", [
    ("--seed=1", "seed"), ("--learning_rate=0.02", "learning_rate"), ("--min_lr=0.002", "min_lr"),
    ("--warmup_iters=1", "warmup_iters"), ("--lr_decay_iters=9", "lr_decay_iters"), ("--decay_lr=False", "decay_lr"),
    ("--block_size=8 --tokens_per_iter=32", "block_size"), ("--tokens_per_iter=64", "tokens_per_iter"),
    ("--batch_size=4", "tokens_per_iter"), ("--eval_iters=2", "eval"), ("--seed=1 --min_lr=0.002", "min_lr"),
    ("--data=bins", "data")])
def test_a_baseline_that_differs_is_refused(data, capsys, change, name):
    args = [f"--data={data}", *MOVES]
    assert go(*args, "--out_dir=base") == 0
    shutil.copytree(data, "bins")
    with open("bins/train.bin", "r+b") as f:
        f.write(b"\1\0\2\0")
    before = snapshot("base")
    err = refused(capsys, *args, "--baseline=base", "--out_dir=o", *change.split())
    assert name in err and "base" in err and ("beta" not in err) and snapshot("base") == before
    assert not os.path.exists("o")


def test_a_missing_baseline_is_refused(data, capsys):
    assert "nowhere" in refused(capsys, f"--data={data}", "--out_dir=o", "--baseline=nowhere") and not os.path.exists("o")


def test_a_baseline_that_finishes_meanwhile(data, monkeypatch):
    """The differences that were not known while the run went on are filled in at its end."""
    args = [f"--data={data}", "--max_iters=6", *MOVES]
    assert go(*args, "--out_dir=base") == 0
    whole = Path("base/log.jsonl").read_text()
    early = [x for x in whole.splitlines(keepends=True) if json.loads(x)["iter"] < 2]
    Path("base/log.jsonl").write_text("".join(early))
    at_iteration(monkeypatch, 3, lambda: Path("base/log.jsonl").write_text(whole))
    assert go(*args, "--out_dir=o", "--baseline=base", "--value_residual=True", "--log_interval=1") == 0
    assert_relative("o", "base")
    assert [x["iter"] for x in log("o")[0]] == list(range(6)) and [x["iter"] for x in log("o")[1]] == [0, 2, 4, 6]


def test_a_baseline_that_never_finished(data):
    args = [f"--data={data}", "--max_iters=6", *MOVES]
    assert go(*args, "--out_dir=base") == 0
    early = [x for x in Path("base/log.jsonl").read_text().splitlines(keepends=True) if json.loads(x)["iter"] < 3]
    Path("base/log.jsonl").write_text("".join(early) + '{"iter": 3, "lo')
    assert go(*args, "--out_dir=o", "--baseline=base", "--value_residual=True") == 0
    Path("base/log.jsonl").write_text("".join(early))
    assert_relative("o", "base", complete=False)


def test_differences_survive_a_resume(data, monkeypatch):
    args = [f"--data={data}", "--max_iters=6", *MOVES]
    assert go(*args, "--out_dir=base") == 0
    interrupted(data, monkeypatch, "--baseline=base", "--shared_value=True")
    assert go(*args, "--out_dir=o", "--baseline=base", "--shared_value=True") == 0
    assert_relative("o", "base")


def test_a_skipped_step_has_no_difference(data, monkeypatch):
    args = [f"--data={data}", *MOVES]
    assert go(*args, "--out_dir=base") == 0
    poison(monkeypatch, lambda n: n == 1, "nan")
    assert go(*args, "--out_dir=o", "--baseline=base") == 0
    steps = log("o")[0]
    assert steps[1]["loss"] is None and steps[1].get("rel_loss") is None and steps[0]["rel_loss"] == 0


@pytest.mark.parametrize("n,window", [(20, 1), (20, 4), (20, 5), (20, 20), (10000, 100)])
def test_smooth_is_centred(n, window):
    """The moving average of a ramp is the ramp, at the middle of the window: n - window + 1 points."""
    x = np.arange(n) * 3.0 + 5
    at, y = train.smooth(x, 2 * x + 1, window)
    assert len(at) == len(y) == n - window + 1  # 9,901 for the paper's 10,000 and 100
    assert at[0] == pytest.approx(5 + 3 * (window - 1) / 2) and y == pytest.approx(2 * at + 1)


def test_smooth_of_less_than_a_window():
    at, y = train.smooth([0, 1, 2], [3.0, 4.0, 8.0], 100)
    assert at == pytest.approx([1]) and y == pytest.approx([5])
    assert [len(part) for part in train.smooth([], [], 100)] == [0, 0]


# ---------------------------------------------------------------------------------------------------------------------
# The machine


@pytest.mark.parametrize("when", ["compiling", "calling"])
def test_training_goes_on_when_compiling_fails(data, capsys, monkeypatch, when):
    args = [f"--data={data}", "--dropout=0.1", *MOVES]
    assert go(*args, "--out_dir=plain") == 0

    def boom(*args, **kwargs):
        raise RuntimeError("no C++ compiler\nand a long story")
    monkeypatch.setattr(torch, "compile", boom if when == "compiling" else lambda *a, **k: boom)
    capsys.readouterr()
    assert go(*args, "--compile=True", "--out_dir=o") == 0
    out, err = capsys.readouterr()
    told = [x for x in out.splitlines() if "no C++ compiler" in x]
    assert len(told) == 1 and "compile" in told[0] and "long story" not in out and "Traceback" not in out + err
    assert_same_run("o", "plain")


@pytest.mark.parametrize("name,peak", [
    ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H200", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12),
    ("NVIDIA A100-PCIE-40GB", 312e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA GH200 480GB", 989e12),
    ("NVIDIA GeForce RTX 4090", 165e12), ("cpu", None), ("mps", None), ("Apple M2", None), ("NVIDIA GeForce RTX 2060", None),
    ("NVIDIA A10", None), ("NVIDIA H20", None), ("", None)])
def test_peak_by_device_name(name, peak):
    """the dense bf16 peak of this very device; none for an unknown one."""
    assert train.peak_flops(name) == peak


@pytest.mark.parametrize("name", ["NVIDIA RTX A1000 Laptop GPU", "NVIDIA GeForce RTX 4090 Laptop GPU",
                                  "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 3090 Ti",
                                  "NVIDIA H100 80GB HBM3 MIG 1g.10gb"])
def test_a_name_that_only_contains_a_known_one_has_no_peak(name):
    """other, slower or faster devices whose peak is not in the table."""
    assert train.peak_flops(name) is None


def test_two_processes_in_one_folder(data, capsys):
    with prepare.locked("o"):
        assert "o: another process" in refused(capsys, f"--data={data}", "--out_dir=o")
    assert os.listdir("o") == [".lock"]
    assert go(f"--data={data}", "--out_dir=o") == 0


FULL = {"save": OSError(28, "No space left on device"), "torch": RuntimeError("PytorchStreamWriter failed writing file"),
        "rename": OSError(5, "Input/output error")}


def failing(monkeypatch, how, times):
    """Saving ckpt.pt fails so many times, in torch.save or at the rename. Returns the list of failures."""
    save, replace, failures = torch.save, os.replace, []

    def maybe(*args, real):
        if len(failures) < times and (how != "rename" or str(args[1]).endswith("ckpt.pt")):
            failures.append(how)
            raise FULL[how]
        return real(*args)
    monkeypatch.setattr(train.time, "sleep", lambda seconds: None)
    if how == "rename":
        monkeypatch.setattr(os, "replace", lambda *args: maybe(*args, real=replace))
    else:
        monkeypatch.setattr(torch, "save", lambda *args: maybe(*args, real=save))
    return failures


@pytest.mark.parametrize("how", FULL)
def test_one_write_error_does_not_end_a_run(data, monkeypatch, how):
    """A hiccup of the disk."""
    assert go(f"--data={data}", "--out_dir=straight") == 0
    failures = failing(monkeypatch, how, 1)
    assert go(f"--data={data}", "--out_dir=o") == 0
    assert failures == [how]
    assert_same_run("o", "straight")


@pytest.mark.parametrize("how", FULL)
def test_a_full_disk_leaves_the_previous_checkpoint(data, capsys, monkeypatch, how):
    args = [f"--data={data}", "--out_dir=o", *MOVES]
    assert go(*args, "--max_iters=6", "--out_dir=straight") == 0
    assert go(*args, "--max_iters=3") == 0
    before = snapshot("o")["o/ckpt.pt"]
    with monkeypatch.context() as m:
        failing(m, how, 10 ** 9)
        assert "o/ckpt.pt" in refused(capsys, *args, "--max_iters=6")
    assert snapshot("o")["o/ckpt.pt"] == before
    assert go(*args, "--max_iters=6") == 0  # once there is room
    assert losses("o") == losses("straight")
    assert_same_state("o", "straight")


# ---------------------------------------------------------------------------------------------------------------------
# The files in config/

CONFIGS = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "config").rglob("*.py"))


@pytest.mark.parametrize("path", CONFIGS)
def test_config_file_loads(path):
    """Known options of the right type that make sense together, with every run it lists."""
    config = configure(train.Config, [path, *["--n_layer=24"] * (path == "config/sizes.py")])  # it names layers by size
    for run in [r for _, _, r in train.plan(config)] if config.runs else [config]:
        resolved = train.resolve(dataclasses.replace(run, device="cpu"), train.World())
        train.checked_model_config(resolved, run.vocab_size or 320)
        train.micro_batches(resolved, train.World())


@pytest.mark.parametrize("size,parameters", [("2M", 1_623_856), ("82M", 81_901_056), ("180M", 179_874_048),
                                             ("468M", 467_921_920)])
def test_sizes_of_the_paper(size, parameters):
    config = configure(train.Config, [f"config/{size}.py", "--vocab_size=50277"])
    with torch.device("meta"):
        assert model.GPT(train.checked_model_config(config, 50277)).num_params() == parameters
    assert config.tokens_per_iter == 1024 * 2048 and config.max_iters == 10000 and config.block_size == 2048
    assert (config.learning_rate, config.min_lr, config.warmup_iters) == (6e-4, 6e-5, 120)


def test_quickstart_runs(data, capsys):
    small = "--n_layer=2 --n_head=2 --n_embd=32 --block_size=16 --batch_size=2 --max_iters=2 --eval_interval=1 --eval_iters=1"
    assert go("config/quickstart.py", f"--data={data}", "--out_dir=q", *small.split(), "--sample_tokens=8", tiny=False) == 0
    summary, out = json.loads(Path("q/summary.json").read_text()), capsys.readouterr().out
    assert len(summary) == 3 and all(f"{name} writes" in out and os.path.exists(f"q/{name}/ckpt.pt") for name in summary)
    assert os.path.exists("q/relative_loss.png")


def test_overlay_runs(data):
    small = "--n_layer=2 --n_head=2 --n_embd=32 --block_size=16 --batch_size=2 --max_iters=2 --tokens_per_iter=64"
    assert go("config/82M.py", "config/small.py", f"--data={data}", "--out_dir=o", "--device=cpu", "--compile=False",
              *small.split(), tiny=False) == 0
    facts = json.loads(Path("o/config.json").read_text())
    assert facts["eval_interval"] == 250 and facts["warmup_iters"] == 120 and [x["iter"] for x in log("o")[1]] == [0, 2]


# ---- what hostile users found


def test_weights_gone_bad_are_never_saved(data, capsys):
    """A finite gradient under an absurd rate leaves weights that are no numbers: the checkpoint from before stays."""
    args = [f"--data={data}", "--out_dir=o", "--warmup_iters=0"]
    assert go(*args) == 0
    before = Path("o/ckpt.pt").read_bytes()
    assert "o/ckpt.pt" in refused(capsys, *args, "--max_iters=40", "--learning_rate=3e38", "--weight_decay=0.5")
    assert Path("o/ckpt.pt").read_bytes() == before


def test_a_streak_of_bad_steps_within_one_log_interval_stops(data, capsys, monkeypatch):
    """The longest streak counts, also when a good step follows before the log is written."""
    norm = torch.nn.utils.get_total_norm
    calls = iter(range(1000))
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda g: norm(g) * (math.nan if 2 <= next(calls) < 6 else 1))
    args = [f"--data={data}", "--out_dir=o", "--max_iters=12", "--log_interval=12", "--eval_interval=100"]
    assert "4 steps in a row" in refused(capsys, *args, "--max_bad_steps=4")


def test_errors_of_a_list_name_the_run_and_a_later_baseline_what_to_do(data, tmp_path, capsys):
    (tmp_path / "list.py").write_text("out_dir = 'o'\nruns = {'a': {}, 'b': {'value_residual': True, 'value_layers': '2-9'}}\n")
    assert "run b: model options: value_layers='2-9'" in refused(capsys, "list.py", f"--data={data}")
    assert "--out_dir= is empty" in refused(capsys, f"--data={data}", "--out_dir=")
    assert go(f"--data={data}", "--out_dir=base", "--warmup_iters=0") == 0
    err = refused(capsys, f"--data={data}", "--out_dir=o", "--warmup_iters=0", "--max_iters=8", "--baseline=base")
    assert "lr_decay_iters" in err and "continue the baseline first" in err
    assert not (tmp_path / "o").exists()


def test_no_difference_where_the_rates_differed(data):
    """A baseline that was resumed with another schedule: what is not comparable gets no rel_loss."""
    base = [f"--data={data}", "--out_dir=base", "--warmup_iters=0"]
    assert go(*base) == 0 and go(*base, "--max_iters=8") == 0
    assert go(f"--data={data}", "--out_dir=o", "--warmup_iters=0", "--max_iters=8", "--baseline=base") == 0
    steps, there = log("o")[0], log("base")[0]
    assert {x["iter"] for x in steps if "rel_loss" in x} == {x["iter"] for x, y in zip(steps, there) if x["lr"] == y["lr"]}
    assert 0 < sum("rel_loss" in x for x in steps) < 8


def test_tokens_go_on_from_the_batch_before(data):
    args = [f"--data={data}", "--out_dir=o"]
    assert go(*args) == 0 and go(*args, "--max_iters=6", "--tokens_per_iter=64") == 0
    assert [x["tokens"] for x in log("o")[0]] == [32, 64, 96, 128, 192, 256]


@pytest.mark.parametrize("keep, change", [("o", lambda b: b[:400]), ("o", lambda b: b + b)])
def test_data_that_changes_while_it_is_read(data, capsys, monkeypatch, keep, change):
    """One line, and the same command continues once the file is back."""
    shutil.copytree(data, "bins")
    whole = Path("bins/train.bin").read_bytes()
    args = ["--data=bins", "--out_dir=o", "--max_iters=6"]
    with monkeypatch.context() as m:
        at_iteration(m, 2, lambda: Path("bins/train.bin").write_bytes(change(whole)))
        assert "train.bin" in refused(capsys, *args)
    Path("bins/train.bin").write_bytes(whole)
    assert go(*args) == 0 and len(losses("o")) == 6


def test_an_id_beyond_the_vocabulary_deep_in_a_large_bin(data, capsys):
    """Between the pages that Data looks at when it opens: named when it is read, before any device sees it."""
    os.mkdir("bins")
    ids = np.full(64 * 2048 * 4, 65, "<u2")
    ids[3000:8000] = 60000
    ids.tofile("bins/train.bin")
    ids[:5000].clip(max=65).tofile("bins/val.bin")
    prepare.Data("bins")  # opens
    assert "60000" in refused(capsys, "--data=bins", "--out_dir=o", "--max_iters=4000", "--log_interval=500")


@pytest.mark.parametrize("change", [
    lambda c: c.pop("optimizer"), lambda c: c.pop("data"), lambda c: c.update(optimizer={}), lambda c: c.update(config={}),
    lambda c: c["optimizer"]["param_groups"].pop(), lambda c: c.update(iter="abc"), lambda c: c.update(data={}),
    lambda c: c["optimizer"]["state"][0].update(exp_avg=torch.zeros(1)), lambda c: c["model_config"].update(n_layer="two")])
def test_a_checkpoint_with_a_part_that_is_foreign(data, capsys, change):
    args = [f"--data={data}", "--out_dir=o"]
    assert go(*args) == 0
    ckpt = torch.load("o/ckpt.pt", weights_only=True)
    change(ckpt)
    torch.save(ckpt, "o/ckpt.pt")
    before = Path("o/ckpt.pt").read_bytes()
    assert "o/ckpt.pt" in refused(capsys, *args, "--max_iters=8")
    assert Path("o/ckpt.pt").read_bytes() == before


@pytest.mark.parametrize("args, word", [
    (["--eval_only=True"], "eval_only"), (["--baseline=o"], "itself"), (["--value_lr_scale=2"], "value_residual"),
    (["--value_residual=True", "--value_lr_scale=2"], "value_mix"),
    (["--value_residual=True", "--value_mix=constant", "--value_lr_scale=2"], "--value_lr_scale=2.0"),
    (["--seed=99999999999999999999"], "seed"), (["--device=meta"], "device"), (["--batch_size=100000000000"], "batch_size"),
    (["--value_residual=True", "--value_lambda1=1e400"], "value_lambda1"), (["--plus_init=depth"], "value_mix=plus")])
def test_options_that_would_do_nothing_or_harm(data, capsys, args, word):
    assert word in refused(capsys, f"--data={data}", "--out_dir=o", *args)


def test_a_list_that_never_had_a_finite_loss_still_ends_in_a_line(data, capsys, monkeypatch):
    Path("runs.py").write_text("runs = {'a': {}, 'b': {'value_residual': True}}\n")
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda g: torch.tensor(math.nan))
    assert "in a row" in refused(capsys, "runs.py", f"--data={data}", "--out_dir=s", "--max_bad_steps=3")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs CUDA"))])
def test_nothing_is_compiled_again_within_a_run(data, monkeypatch, device):
    """One graph for training and one for evaluation, also for partial batches (6 windows in 4s), whatever is sampled."""
    real = torch.compile
    if device == "cpu":  # on CUDA the real backend, with the fast paths
        monkeypatch.setattr(torch, "compile", lambda module: real(module, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    Path("runs.py").write_text("runs = {'a': {}}\n")
    assert not go("runs.py", f"--data={data}", "--compile=True", "--out_dir=run", "--eval_iters=1000", "--max_iters=6",
                  "--tokens_per_iter=128", "--batch_size=4", "--eval_interval=2", "--sample_tokens=5", f"--device={device}")
    stats = torch._dynamo.utils.counters
    assert stats["stats"]["unique_graphs"] == 2 and not stats["graph_break"], dict(stats)


def test_a_record_tells_the_version_of_the_code(data, monkeypatch, tmp_path):
    """config.json's code changes with any of the files that decide what is computed, and with them only."""
    names = ("model.py", "kernels.py", "prepare.py", "train.py", "sample.py")
    for name in names:
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    assert go(f"--data={data}", "--out_dir=o", "--max_iters=1") == 0
    found = [json.loads(Path("o/config.json").read_text())["code"]]
    monkeypatch.setattr(train, "REPO", str(tmp_path))
    for name in names:
        (tmp_path / name).write_bytes(b"# changed\n" + (tmp_path / name).read_bytes())
        found.append(train.code())
    assert len(set(found)) == len(names) and found[-1] == found[-2]


@pytest.mark.parametrize("runs, words", [
    ({1: {}, "b": {}}, "runs[1]: expected a name"), ({"a": {}, "b": {1: 2}}, "runs['b']: expected a name that can be a folder"),
    ({"a": {}, "b": {"baseline": ["a"]}}, "runs['b']: baseline: found ['a'], expected text"), ({"a": {}, "b": 3}, "runs['b']")])
def test_a_list_of_another_form_is_refused(data, capsys, runs, words):
    Path("list.py").write_text(f"runs = {runs!r}\n")
    assert words in refused(capsys, "list.py", f"--data={data}", "--out_dir=o") and not os.path.exists("o")


def test_a_list_that_was_moved_or_damaged_has_its_table(data, capsys, monkeypatch):
    """Its baselines are those beside the runs, wherever they lie; what can't be read is named; no text takes the table away."""
    Path("list.py").write_text("runs = {'a': {}, 'b': {'value_residual': True}, 'c': {'shared_value': True}}\n")
    words = "list.py", f"--data={data}", "--max_iters=2"
    assert go(*words, "--out_dir=o") == 0
    os.rename("o", "moved")
    Path("moved/c/config.json").write_text("{")
    monkeypatch.setattr(train, "train_one", lambda *a: None)

    def gone(name):
        raise UserError("tokenizer gone.json: no such file")
    monkeypatch.setattr(prepare, "get_tokenizer", gone)
    capsys.readouterr()
    assert go(*words, "--out_dir=moved", "--sample_tokens=5") == 0
    said, summary = capsys.readouterr(), json.loads(Path("moved/summary.json").read_text())
    assert {name: row["baseline"] for name, row in summary.items()} == {"a": None, "b": "a"}
    assert "not in the table: moved/c/config.json is missing or not written by train.py" in said.err
    assert said.out.count("no text: tokenizer gone.json") == 3 and "val loss - baseline" in said.out


def test_a_baseline_without_its_log_is_refused(data, capsys):
    assert go(f"--data={data}", "--out_dir=base", "--max_iters=2") == 0
    os.remove("base/log.jsonl")
    err = refused(capsys, f"--data={data}", "--out_dir=o", "--max_iters=2", "--baseline=base")
    assert "--baseline=base: base/log.jsonl is missing" in err and "config.json and log.jsonl" in err
    assert "is for a list of runs" in refused(capsys, f"--data={data}", "--out_dir=o", "--sample_tokens=5")


def test_a_protected_checkpoint_is_not_called_damaged(monkeypatch):
    def load(*args, **options):
        raise PermissionError(13, "Permission denied", "o/ckpt.pt")
    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(ValueError, match="o/ckpt.pt: can't be read .Permission denied.; it may be whole"):
        model.load_checkpoint("o/ckpt.pt")


def test_two_first_runs_share_the_builtin_corpus(monkeypatch):
    """The second waits for the first, and finds the corpus made."""
    made = []

    @contextlib.contextmanager
    def locked(folder, wait):
        assert (folder, wait) == ("data", True)
        os.makedirs("data/builtin")
        Path("data/builtin/meta.json").write_text("{}")  # another run made it meanwhile
        yield
    monkeypatch.setattr(prepare, "locked", locked)
    monkeypatch.setattr(prepare, "prepare", made.append)
    with pytest.raises(UserError):  # of the empty meta.json
        train.open_data(train.Config(), train.World())
    assert not made
