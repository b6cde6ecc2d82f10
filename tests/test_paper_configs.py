"""
config/paper: every list of runs is allowed, comparable and trainable, and says the truth about what it costs. The overlays of
the reproduction in config/: the commands of their docstrings are.
"""
import ast
import dataclasses
import json
import math
import os
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import prepare
import train
from configurator import configure
from model import GPT, GPTConfig, KVCache, ValueMix

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("table3 table4 fig5 fig7 fig8 fig9 fig10 fig11 fig13 fig14 fig15 fig16 fig17 fig22 v5_value_family v5_sparse").split()
SMALL = "config/small.py"
SHAPE = ("n_layer", "n_head", "n_embd", "n_ffn", "block_size", "vocab_size")  # a system's options are GPTConfig's others
SYSTEM = [f.name for f in dataclasses.fields(GPTConfig) if f.name not in SHAPE]
OVERLAYS = ("family tokens sizes ablations kv lengths rates").split()
every = pytest.mark.parametrize("name", NAMES)
at_both_sizes = pytest.mark.parametrize("overlay", [[], [SMALL]], ids=["paper", "small"])


def configured(name, *args):
    return configure(train.Config, [f"config/paper/{name}.py", *args])


def planned(name, *args):
    """{run: its own config}, in order"""
    return {run: config for run, _, config in train.plan(configured(name, *args))}


def baselines(runs):
    """[(run, its baseline)] as configs, for the runs that have one"""
    places = {c.out_dir: c for c in runs.values()}
    return [(c, places[c.baseline]) for c in runs.values() if c.baseline]


def differing(a, b, names):
    return {n for n in names if getattr(a, n) != getattr(b, n)}


def docstring(name, folder="config/paper"):
    return ast.get_docstring(ast.parse((ROOT / folder / f"{name}.py").read_text(encoding="utf-8")))


def flops(config):
    """Of a whole run, with the vocabulary of gpt2."""
    with torch.device("meta"):
        model = GPT(train.checked_model_config(config, 50304))
    return model.flops_per_token() * config.tokens_per_iter * config.max_iters


def test_every_file_is_known_here():
    assert sorted(p.stem for p in (ROOT / "config/paper").glob("*.py")) == sorted(NAMES)


# ---------------------------------------------------------------------------------------------------------------------
# What the files say


@every
def test_docstring_names_the_figure_or_table(name):
    kind, number = re.fullmatch(r"(fig|table|v5)_?(\w+)", name).groups()
    title = {"fig": f"Figure {number} (ICLR", "table": f"Table {number} (ICLR", "v5": "v5 (ACL 2025), the table of"}[kind]
    doc = docstring(name)
    assert doc.startswith(title)
    assert all(re.search(rf"^{part}[:,] ", doc, re.M) for part in ("Paper", "Our reading", "Cost"))


@every
def test_commands_of_the_docstring_are_understood(name):
    doc = docstring(name)
    commands = [shlex.split(line) for line in doc.splitlines() if line.startswith("    ")]
    assert [c[c.index("train.py") + 1:] for c in commands] == [
        [f"config/paper/{name}.py", "--data=slimpajama"], [f"config/paper/{name}.py", SMALL, "--data=slimpajama"]]
    # options that the text says to add, as they stand in a row
    for more in re.findall(r"--\w+=\S+(?:\s+--\w+=\S+)*", doc.split("\nPaper")[1]):
        config = configured(name, SMALL, *more.rstrip(".;:").replace(";", "").split())
        for _, _, run in train.plan(config):
            train.micro_batches(train.resolve(run, train.World()), train.World())


@every
def test_cost_is_that_of_the_runs(name):
    runs, small = planned(name), {n: train.resolve(c, train.World()) for n, c in planned(name, SMALL, "--device=cpu").items()}
    found = re.search(r"Cost: (\d+) runs x 20\.97B tokens( \(20\.48B at .*\))? = (\S+) FLOPs, (\d+) H100-hours at 36 % MFU; "
                      r"small: (\S+) FLOPs, (\S+) hours", " ".join(docstring(name).split()))
    n, shorter, whole, hours, part, part_hours = found.groups()
    tokens = {round(c.tokens_per_iter * c.max_iters / 1e9, 2) for c in runs.values()}
    assert int(n) == len(runs) and tokens == ({20.97, 20.48} if shorter else {20.97})
    for told, told_hours, configs in ((whole, hours, runs), (part, part_hours, small)):
        count = sum(flops(c) for c in configs.values())
        assert float(told) == pytest.approx(count, rel=0.05)
        assert float(told_hours) == pytest.approx(count / (0.36 * 989e12) / 3600, rel=0.05, abs=0.06)


# ---------------------------------------------------------------------------------------------------------------------
# What the runs are


@every
@at_both_sizes
@pytest.mark.parametrize("processes", [1, 8])
def test_every_run_is_allowed_at_its_real_size(name, overlay, processes):
    world = train.World(size=min(processes, 4) if overlay else processes)  # small batches have 4 windows of 64,000
    for run in planned(name, *overlay, "--device=cpu").values():
        run = train.resolve(run, world)
        train.checked_model_config(run, 50304).check()
        windows, steps = train.micro_batches(run, world)
        assert windows * steps * world.size * run.block_size == run.tokens_per_iter
        assert windows * run.block_size <= 65536  # what fits one GPU (468M: a quarter of it)


@every
@at_both_sizes
def test_a_run_and_its_baseline_differ_in_the_system_alone(name, overlay):
    runs = planned(name, *overlay, "--device=cpu")
    pairs = baselines(runs)
    assert len(pairs) + len({b.out_dir for _, b in pairs}) == len(runs)  # every run has a baseline or is one
    data = SimpleNamespace(fingerprint="the same")
    for run, base in pairs:
        run, base = (train.resolve(c, train.World()) for c in (run, base))
        assert train.comparable(run, data) == train.comparable(base, data)
        everything = [f.name for f in dataclasses.fields(train.Config)]
        assert differing(run, base, everything) - {"out_dir", "baseline"} == differing(run, base, SYSTEM) != set()
        assert not base.baseline


@every
def test_no_two_runs_are_the_same(name):
    runs = [{**dataclasses.asdict(c), "out_dir": "", "baseline": ""} for c in planned(name).values()]
    assert all(a != b for i, a in enumerate(runs) for b in runs[:i])


@every
def test_a_baseline_is_vanilla(name):
    """The one exception is said in the paper: V_2 as a source is compared with a vanilla model changed in the same way."""
    for _, base in baselines(planned(name)):
        changed = differing(base, train.Config(), SYSTEM)
        assert changed == ({"no_first_skip"} if base.out_dir.endswith("_no_skip") else set())


@every
def test_settings_are_those_of_82M(name):
    here, there = configured(name), configure(train.Config, ["config/82M.py"])
    names = [f.name for f in dataclasses.fields(train.Config) if f.name not in ("out_dir", "runs")]
    allowed = {"fig9": {"batch_size", "eval_iters"}, "table4": {"n_ffn"}}  # 0 is 3.5 x n_embd; its runs give theirs
    assert differing(here, there, names) == allowed.get(name, set())
    assert here.out_dir == f"out/{name}"
    assert here.batch_size * here.eval_iters == there.batch_size * there.eval_iters
    # plain files: everything but the runs and private names is an option, and none of a system is set for all runs
    assert not differing(here, train.Config(), SYSTEM)


def test_sizes_are_those_of_their_own_files():
    runs = planned("table4")
    for size in ("2M", "82M", "180M", "468M"):
        one = configure(train.Config, [f"config/{size}.py"])
        for run in (runs[f"vanilla_{size}"], runs[f"resformer_{size}"]):
            names = [f.name for f in dataclasses.fields(train.Config) if f.name not in ("out_dir", "runs", "baseline")]
            assert differing(run, one, names) <= {"value_residual"}
        assert runs[f"resformer_{size}"].baseline == runs[f"vanilla_{size}"].out_dir


@pytest.mark.parametrize("name", ["table3", "fig14", "fig13"])
def test_lengths_have_the_papers_batches(name):
    """Table 3: windows per iteration, and per GPU and micro-step."""
    table = {512: (4096, 128), 2048: (1024, 32), 8192: (256, 8), 32000: (64, 2), 64000: (32, 1)}
    lengths = set()
    for run, c in planned(name).items():
        assert (c.tokens_per_iter // c.block_size, c.batch_size) == table[c.block_size]
        assert run.endswith(f"_{c.block_size}") or c.block_size == 2048
        lengths.add(c.block_size)
    assert lengths == ({2048, 64000} if name == "fig13" else set(table))


@every
def test_small_is_small_for_every_run(name):
    """131M tokens at most, in whole windows, also where the list sets a batch of its own."""
    for run, c in planned(name, SMALL, "--device=cpu").items():
        c = train.resolve(c, train.World())
        assert (c.tokens_per_iter, c.max_iters) == (256_000 if c.block_size in (32000, 64000) else 262_144, 500), run


def test_kv_cache_fractions():
    """At 8 layers."""
    def kv_bytes(config):
        return KVCache(train.checked_model_config(config, 320), 1, 1, "meta", torch.bfloat16).nbytes

    runs = planned("fig13")
    expected = {"vanilla": 1, "svformer": 0.5625, "gqa2": 0.5, "cla2": 0.5, "gqa8": 0.125, "cla2_gqa4": 0.125,
                "svformer_gqa4": 9 / 64}
    for system, fraction in expected.items():
        for run in (system, f"{system}_64000"):
            assert kv_bytes(runs[run]) == fraction * kv_bytes(runs["vanilla"]) == fraction * 16384
    assert len(runs) == 2 * len(expected)
    anchors = planned("fig17")
    assert [kv_bytes(c) / 16384 for c in anchors.values()] == [1, 0.5625, 0.625, 0.6875, 0.75]


def weights(config):
    """{layer: {source: λ}} at the start"""
    mix = ValueMix(train.checked_model_config(config, 64))
    with torch.no_grad():
        mix.init_weights()
        return {n: {i: float(w) for i, w in row.items()} for n, row in mix().items()}


def test_weights_are_the_papers():
    """Which layers mix what, and how much of it."""
    runs = planned("fig8")
    for value in (0.2, 0.5, 0.8, 1, 2, 5):
        assert weights(runs[f"lambda_{value}"]) == {n: {1: value, n: 1} for n in range(2, 9)}
    runs = planned("v5_sparse")
    for n in range(2, 9):
        assert weights(runs[f"layer_{n}"]) == {n: {1: 5, n: 1}}
        if n < 8:
            assert weights(runs[f"layers_{n}-8"]) == {m: {1: 5, m: 1} for m in range(n, 9)}
    runs, layers = planned("v5_value_family"), range(2, 9)
    assert weights(runs["identity"]) == weights(runs["learnable"]) == {n: {1: 0.5, n: 0.5} for n in layers}
    assert weights(runs["constant"]) == {n: {1: 2, n: 1} for n in layers}
    assert weights(runs["dense"]) == {n: {i: float(i == n) for i in range(1, n + 1)} for n in layers}
    for run in ("plus_zeros", "plus_depth"):
        first = [row[1] for row in weights(runs[run]).values()]
        assert sum(first) == pytest.approx(8) and (first == sorted(set(first))) == (run == "plus_depth")
    runs = planned("fig11")
    assert weights(runs["first"]) == {n: {1: 0.5, n: 0.5} for n in layers}
    assert weights(runs["previous"]) == {n: {n - 1: 0.5, n: 0.5} for n in layers}
    for n, row in weights(runs["all"]).items():
        assert row == pytest.approx({i: 1 / n for i in range(1, n + 1)})
    assert weights(runs["second"]) == weights(runs["second_no_skip"]) == {n: {2: 0.5, n: 0.5} for n in range(3, 9)}
    assert weights(runs["third"]) == {n: {3: 0.5, n: 0.5} for n in range(4, 9)}


# ---------------------------------------------------------------------------------------------------------------------
# Every run trains


@pytest.fixture(scope="module")
def one_thread():
    """Models this small run ten times faster on one thread than on two that wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def bins(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bins")
    with open(folder / "docs.jsonl", "w") as f:
        for i in range(30):
            f.write(json.dumps({"text": " ".join(str((i * 7 + j * j) % 89) for j in range(20))}) + "\n")
    prepare.prepare(prepare.Config(source=str(folder / "docs.jsonl"), out_dir=str(folder / "bins"), tokenizer="bytes",
                                   num_proc=1, val_fraction=0.2))
    return str(folder / "bins")


def tiny(run, data):
    """The run's system (its layers, and its key/value heads of 8) in a size that trains in no time."""
    return dataclasses.replace(
        run, n_head=8, n_embd=32, n_ffn=32, block_size=16, batch_size=2, tokens_per_iter=32, max_iters=2, eval_iters=1,
        device="cpu", compile=False, data=data)


@every
def test_every_run_trains(name, bins, one_thread, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = {n: tiny(c, bins) for n, c in planned(name).items()}
    monkeypatch.setattr(train.signal, "signal", lambda *args: None)  # leave pytest's own handlers alone
    for config in runs.values():
        train.train_one(config, train.World(), train.Signals())
    for n, config in runs.items():
        steps, evals = train.read_log(config.out_dir)
        assert list(steps) == [0, 1] and list(evals) == [0, 2], n
        assert all(math.isfinite(x["loss"]) and math.isfinite(x["grad_norm"]) for x in steps.values()), n
        assert all(("rel_loss" in x) == bool(config.baseline) for x in steps.values()), n
        with open(os.path.join(config.out_dir, "config.json")) as f:
            assert json.load(f)["n_layer"] == config.n_layer


# ---------------------------------------------------------------------------------------------------------------------
# The overlays


def commands(name):
    """[(words behind train.py, {run: its config of the last seed})] of an overlay's docstring, as bash expands its commands."""
    script = "".join(line + "\n" for line in docstring(name, "config").splitlines() if line.startswith("    "))
    said = subprocess.run(["bash", "-euc", "python() { printf '%s\n' \"$*\"; }\n" + script], capture_output=True, text=True,
                          check=True)
    found = [line.split()[1:] for line in said.stdout.splitlines()]
    return [(words, {run: train.resolve(c, train.World()) for run, _, c in train.plan(configure(train.Config, [
        *(str(ROOT / w) if w.endswith(".py") else w for w in words), "--device=cpu"]))}) for words in found]


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_command_of_an_overlay_trains(name, bins, one_thread, tmp_path, monkeypatch):
    """Each run is allowed at its real size, beside a baseline that it may be compared with, and trains in a tiny one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.signal, "signal", lambda *args: None)
    places, trained, data = [], set(), SimpleNamespace(fingerprint="the same")
    for words, runs in commands(name):
        assert words[1:3] == [f"config/{name}.py", "--data=slimpajama"]
        where = {c.out_dir: c for c in runs.values()}
        for run, c in runs.items():
            train.checked_model_config(c, 50304)
            windows, steps = train.micro_batches(c, train.World())
            assert windows * steps * c.block_size == c.tokens_per_iter == (262144 if name == "family" else 65536)
            assert windows * c.block_size <= 131072
            assert c.eval_iters * c.batch_size * c.block_size == 1280 * 2048  # the same text in all, at every size and length
            assert c.min_lr == pytest.approx(c.learning_rate / 10)
            base = where[c.baseline] if c.baseline else c
            assert (run == "vanilla") == (base is c) and train.comparable(c, data) == train.comparable(base, data)
            small = dataclasses.replace(tiny(c, bins), baseline="")
            if (same := repr(dataclasses.replace(small, out_dir=""))) not in trained:
                trained.add(same)
                train.train_one(small, train.World(), train.Signals())
                assert list(train.read_log(c.out_dir)[1]) == [0, 2], run
        places += [c.out_dir for c in runs.values()]
    assert len(set(places)) == len(places) or name == "family"  # its second command picks some of the first's


def test_overlays_name_systems_as_systems_py_does():
    """The same name has the same options there, but for the length of an evaluation."""
    known = configure(train.Config, [str(ROOT / "config/systems.py")]).runs
    for name in OVERLAYS:
        for run, options in configure(train.Config, [str(ROOT / f"config/{name}.py")]).runs.items():
            for of in (options, known.get(run, {})):
                of.pop("eval_iters", None)
            assert run not in known or known[run] == options, (name, run)


@pytest.mark.parametrize("size, run, layers", [("20M", "sparse", 8), ("82M", "sparse", 8), ("180M", "sparse_12", 12),
                                               ("468M", "sparse_24", 24)])
def test_sparse_mixes_behind_five_eighths_of_the_layers(size, run, layers):
    runs = next(runs for words, runs in commands("sizes") if words[0] == f"config/{size}.py")
    assert list(runs) == ["vanilla", "identity", run] and runs[run].n_layer == layers
    assert runs[run].layers("value_layers") == [n for n in range(1, layers + 1) if n > 5 / 8 * layers]


def test_20M_is_as_its_docstring_says():
    config = configure(train.Config, [str(ROOT / "config/20M.py")])
    with torch.device("meta"):
        model = GPT(train.checked_model_config(config, 50304))
    assert [f"{n / 1e6:.1f}M" for n in (model.num_params(), model.num_params(True))] == ["23.6M", "4.3M"]
    assert "23.6M parameters" in docstring("20M", "config") and "4.3M without" in docstring("20M", "config")
    assert config.head_dim == 64 and config.n_ffn == 3.5 * config.n_embd
