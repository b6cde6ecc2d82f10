"""analysis.bench: its tables at tiny size, its record, and what it refuses. test_told.py has the figures."""
import copy
import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
import torch
from test_curve_analyses import run_command

import prepare
import train
from analysis import bench
from configurator import configure

TINY = ("--n_layer=2 --n_head=2 --n_embd=16 --block_size=8 --batch_size=2 --vocab_size=64 --steps=1 --warm_steps=1 "
        "--device=cpu").split()
NANOGPT = '''
import dataclasses, torch
from torch import nn
@dataclasses.dataclass
class GPTConfig:
    block_size: int; vocab_size: int; n_layer: int; n_head: int; n_embd: int; dropout: float; bias: bool
class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.vocab_size == 64
        self.transformer = nn.ModuleDict(dict(wte=nn.Embedding(config.vocab_size, config.n_embd),
                                              wpe=nn.Embedding(config.block_size, config.n_embd)))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
    def forward(self, ids, targets):
        logits = self.lm_head(self.transformer.wte(ids))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    def configure_optimizers(self, decay, rate, betas, device):
        return torch.optim.AdamW(self.parameters(), rate, betas, weight_decay=decay)
'''


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench.torch, "set_float32_matmul_precision", lambda how: None)


def record():
    return json.loads(open("b/cpu.json", encoding="utf-8").read())


def test_training_beside_the_plain_path_and_a_peer(tmp_path, capsys, monkeypatch):
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer/model.py").write_text(NANOGPT)
    (tmp_path / "two.py").write_text("runs = {'a': {}, 'b': {'value_residual': True}}\n")
    args = ["two.py", *TINY, "--plain=True", "--nanogpt=peer", "--batch_sizes=1,2", "--out_dir=b"]
    for _ in range(2):  # the second time into the same record
        code, out, err = run_command(bench, capsys, monkeypatch, *args)
        assert code == 0, err
    (key, table), = record().items()
    assert table["peers"] == {"nanogpt": hashlib.sha256(NANOGPT.encode()).hexdigest()[:12]}
    assert "--nanogpt=PATH" in key and "b/" not in key and table["torch"] and table["device"] == "cpu"
    assert list(table["rows"]) == ["a", "a, plain", "b", "b, plain", "nanoGPT", "a, again"]
    for name, r in table["rows"].items():
        assert r["tokens_per_s"] > 0 and r["batch_size"] in (1, 2) and bench.line(name, r) in out


def resolved(**options):
    return dataclasses.replace(train.resolve(configure(bench.Config, TINY), train.World()), **options)


@pytest.fixture
def clock(monkeypatch):
    """clock(seconds) passes that time; there is no other."""
    now = [0.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_a_rows_speed_is_that_of_the_timed_steps(clock):
    model, took = torch.nn.Linear(3, 5), iter([9, 8, 1, 2, 5])  # two steps of warm-up
    config = resolved(warm_steps=2, steps=3, micro_steps=4)
    row = bench.measure(lambda config: (lambda ids: clock(next(took)), model, 7), config)
    tokens = 4 * 2 * 8
    assert row["tokens_per_s"] == tokens / 2 and row["step_s"] == 2 and row["step_s_range"] == [1, 5] and row["warm_up_s"] == 17
    assert row["n_params"] == 20 and (row["batch_size"], row["micro_steps"], row["block_size"]) == (2, 4, 8)


def test_a_step_is_a_training_step():
    """micro_steps passes of which each counts its share, clipping, and the optimizer."""
    config = resolved(micro_steps=3, grad_clip=0.1)
    step, model, flops = bench.our_step(config)
    twin, passes, ids = copy.deepcopy(model), [], torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))
    model.register_forward_hook(lambda *_: passes.append(1))
    optimizer = twin.configure_optimizers(config.weight_decay, config.learning_rate, (config.beta1, config.beta2))
    for _ in range(2):
        step(ids)
        twin(ids[:, :-1], ids[:, 1:])[1].backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert len(passes) == 6 and flops == model.flops_per_token()
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)


def test_nanogpts_flops_are_without_its_positions(tmp_path):
    (tmp_path / "model.py").write_text(NANOGPT)
    assert bench.nanogpt_step(resolved(nanogpt=str(tmp_path)))[2] == 6 * 2 * 64 * 16 + 6 * 2 * 16 * 8


def test_what_is_measured_for_a_table(tmp_path, capsys, monkeypatch):
    """The best of the batch sizes counts; the plain variant is the plain one; ratios are times of a step over the first's."""
    (tmp_path / "model.py").write_text(NANOGPT)
    measured, speeds = [], {1: 10, 2: 80, 4: 20}

    def measure(make, config):
        measured.append((make.__name__, config.fast, config.value_residual))
        return dict(tokens_per_s=speeds[config.batch_size] / (1 if config.fast else 4), mfu=None, memory_bytes=None,
                    warm_up_s=1, micro_steps=1, batch_size=config.batch_size, block_size=8)
    monkeypatch.setattr(bench, "measure", measure)
    (tmp_path / "two.py").write_text("runs = {'a': {}, 'b': {'value_residual': True}}\n")
    assert run_command(bench, capsys, monkeypatch, "two.py", *TINY, "--plain=True", f"--nanogpt={tmp_path}",
                       "--batch_sizes=1,2,4", "--out_dir=b")[0] == 0
    assert measured[::3] == [("our_step", True, False), ("our_step", False, False), ("our_step", True, True),
                             ("our_step", False, True), ("nanogpt_step", True, False), ("our_step", True, False)]
    (rows,) = (t["rows"] for t in record().values())
    assert {name: r["step_ratio"] for name, r in rows.items()} == {
        "a": 1, "a, plain": 4, "b": 1, "b, plain": 4, "nanoGPT": 1, "a, again": 1}
    assert {r["batch_size"] for r in rows.values()} == {2}


@pytest.mark.parametrize("B, compile, use_cache", [(1, True, True), (64, True, True), (1, False, False)])
def test_decodings_speed_is_that_of_all_prompts(clock, B, compile, use_cache):
    took, asked = iter([9, 4, 5]), []

    def stream(ids, n, temperature, top_k, **how):
        asked.append((tuple(ids.shape), n, how))
        clock(next(took))
        yield
    model = types.SimpleNamespace(stream=stream, config=types.SimpleNamespace(vocab_size=64))
    assert bench.generation(model, resolved(decode=10), B, compile, use_cache) == B * 10 / 4
    for shape, n, how in asked:
        assert shape == (B, 16) and n == 10 and (how["compile"], how["use_cache"]) == (compile, use_cache)
        assert how["n_vocab"] == 64 and (how["lengths"] is None if B == 1 else sorted(set(how["lengths"])) == [*range(1, 17)])


def test_rows_of_decoding(capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "generation", lambda model, config, *how: asked.append(how) or 1.0)
    assert run_command(bench, capsys, monkeypatch, *TINY, "--decode=3", "--compile=True", "--out_dir=b")[0] == 0
    (rows,) = (t["rows"] for t in record().values())
    assert dict(zip(rows, asked)) == {
        "ours: one prompt, compiled": (1, True, True), "ours: 64 prompts of unequal length, compiled": (64, True, True),
        "ours: one prompt": (1, False, True), "ours: one prompt, no cache": (1, False, False)}


def test_sequences_fill_the_free_memory(monkeypatch):
    model = train.build(config := resolved(kv_length=6, dtype="bfloat16"), train.checked_model_config(resolved(), 64))
    one = 2 * 2 * 16 * 6 * 2  # keys and values of two layers
    taken = iter([100, 100 + one])
    monkeypatch.setattr(bench.torch.cuda, "memory_allocated", lambda: next(taken))
    monkeypatch.setattr(bench.torch.cuda, "mem_get_info", lambda: (10 * one, 0))
    made, make = [], bench.KVCache
    monkeypatch.setattr(bench, "KVCache", lambda *args: made.append(make(*args)) or made[-1])
    found = bench.full_cache(model, config)
    assert found["bytes_of_one"] == one and found["sequences"] == 9 and [c.nbytes for c in made] == [one, 9 * one]
    assert made[1].length == 6


def test_a_bare_process_encodes_all_texts(tmp_path):
    (tmp_path / "prepare.py").write_text('''
def get_tokenizer(name):
    class Tokenizer:
        def encode(self, text):
            print(name, text)
    return Tokenizer()
def read_items(path, bar):
    yield "json", b'{"text": "one"}', path, True
    yield "C4", b"two", path, True
''')
    done = subprocess.run([sys.executable, "-c", bench.BARE, "some", "a", "b"], env={**os.environ, "PYTHONPATH": str(tmp_path)},
                          capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:-1] == ["some one", "some two"] * 2


def test_decoding(capsys, monkeypatch):
    code, out, err = run_command(bench, capsys, monkeypatch, *TINY, "--decode=3", "--out_dir=b", "--block_size=32")
    assert code == 0, err
    assert [n for t in record().values() for n in t["rows"]] == ["ours: one prompt", "ours: one prompt, no cache"]


def test_preparing(tmp_path, capsys, monkeypatch):
    (tmp_path / "shards").mkdir()
    for i in range(3):
        lines = [json.dumps({"text": f"text {i} {j} " * 50, "meta": {"redpajama_set_name": "RedPajamaC4"}}) for j in range(200)]
        (tmp_path / f"shards/{i}.jsonl").write_text("\n".join(lines) + "\n")
    code, out, err = run_command(bench, capsys, monkeypatch, *TINY, "--shards=shards", "--tokenizer=bytes", "--out_dir=b")
    assert code == 0, err
    (key, table), = record().items()
    assert "--shards=PATH" in key
    assert list(table["rows"]) == [f"{n}, round {i}" for i in (1, 2, 3)
                                   for n in ("prepare.py, 2 processes", "2 bare processes")]
    size = sum(len(f"text {i} {j} " * 50) for i in range(3) for j in range(200))
    for r in table["rows"].values():
        assert r["bytes_per_s"] * r["seconds"] == pytest.approx(size) and r["cpu_seconds"] > 0


def test_shards_that_prepare_refuses(tmp_path, capsys, monkeypatch):
    """Its line is ours, whether prepare.py or a bare process finds it."""
    sound = json.dumps({"text": "sound"}) + "\n"
    for name, text, options, words in [
            ("cut", sound + '{"text": "cu', (), "cut.jsonl: line 2, the last, is cut"),
            ("broken", sound + sound.replace("sound", "second") + "{broken\n", (),
             "--shards=broken.jsonl: prepare.py skipped or mended {'not JSON': 1}"),
            ("sound", sound * 9, ("--tokenizer=nosuch",), "error: tokenizer 'nosuch'"),
            ("sound", sound * 9, ("--num_proc=2",), "--shards=sound.jsonl: 1 files for 2 processes")]:
        (tmp_path / f"{name}.jsonl").write_text(text)
        options = f"--shards={name}.jsonl", "--tokenizer=bytes", "--num_proc=1", "--out_dir=b", *options
        code, _, err = run_command(bench, capsys, monkeypatch, *TINY, *options)
        assert code == 2 and words in err and err.count("error:") == 1 and "Traceback" not in err
        assert not os.path.exists("b/cpu.json")


def test_both_read_the_same_parts(tmp_path, capsys, monkeypatch):
    """Shards of other splits are nobody's."""
    for name in ("train-0", "train-1", "validation-0", "test-0"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{name} {i}"}) + "\n" for i in range(9)))
    taken = []
    monkeypatch.setattr(bench.subprocess, "Popen", lambda c, do=bench.subprocess.Popen, **how: taken.append(c) or do(c, **how))
    code, _, err = run_command(bench, capsys, monkeypatch, *TINY, f"--shards={tmp_path}", "--tokenizer=bytes", "--out_dir=b")
    assert code == 0, err
    bare = [os.path.basename(word) for c in taken[1:3] for word in c if word.endswith(".jsonl")]
    assert sorted(bare) == ["train-0.jsonl", "train-1.jsonl", "validation-0.jsonl"]


@pytest.mark.parametrize("args, words", [
    (["--gpt_fast=x"], "--gpt_fast=x: is for decoding"), (["--kv_length=9"], "--kv_length=9: is for decoding"),
    (["--decode=2", "--plain=True"], "--plain=True: is for training"), (["--decode=2", "--nanogpt=x"], "is for training"),
    (["--shards=x", "--decode=2"], "leave --decode out"), (["--shards=nowhere"], "nowhere"),
    (["--shards=x", "--batch_sizes=2"], "is for training"), (["--nanogpt=nowhere"], "expected a checkout with its model.py"),
    (["--decode=2", "--gpt_fast=nowhere"], "expected a checkout with its generate.py"),
    (["--nanogpt=bad"], "--nanogpt=bad: expected a checkout of nanoGPT"), (["--seeds=1,2"], "--seeds=1,2"),
    (["--nanogpt=exits"], "--nanogpt=exits: expected a checkout of nanoGPT"),
    (["--data=builtin"], "--data=builtin: changes nothing"), (["--tokens_per_iter=64"], "--micro_steps says"),
    (["--out_dir=exits/model.py"], "can't be written"),
    (["--nanogpt=odd"], "--nanogpt=odd: expected a checkout of nanoGPT"), (["--decode=2", "--kv_length=9"], "--kv_length=9"),
    (["--batch_sizes=0"], "--batch_sizes=0"), (["--vocab_size=0"], "--vocab_size=0"),
    (["--batch_sizes=2,a"], "--batch_sizes=2,a"), (["--steps=0"], "--steps=0"), (["--out_dir=broken"], "broken/cpu.json: not"),
    (["--out_dir=list"], "list/cpu.json: not")])
def test_refused_with_one_line_before_anything_is_measured(args, words, tmp_path, capsys, monkeypatch):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/model.py").write_text("import no_such_module\n")
    (tmp_path / "exits").mkdir()
    (tmp_path / "exits/model.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/model.py").write_text(NANOGPT.replace("nn.Linear(config.n_embd", "nn.Linear(3"))
    for name, text in (("broken", "{"), ("list", "[1]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpu.json").write_text(text)
    monkeypatch.setattr(bench, "measure", lambda *a: pytest.fail("measured first"))
    out_dir = [] if "out_dir" in args[0] else ["--out_dir=b"]
    code, _, err = run_command(bench, capsys, monkeypatch, *TINY, *out_dir, *args)
    assert code == 2 and words in err and "Traceback" not in err
    assert (tmp_path / "broken/cpu.json").read_text() == "{"


def two_runs(capsys, monkeypatch, fails, error):
    """A list of a and b (with a value residual), of which the one that fails(config) raises error when it is measured."""
    def measure(make, config, real=bench.measure):
        if fails(config):
            raise error
        return real(make, config)
    monkeypatch.setattr(bench, "measure", measure)
    with open("two.py", "w") as f:
        f.write("runs = {'a': {}, 'b': {'value_residual': True}}\n")
    return run_command(bench, capsys, monkeypatch, "two.py", *TINY, "--out_dir=b")


def test_rows_that_do_not_fit_are_left_out(capsys, monkeypatch):
    code, out, _ = two_runs(capsys, monkeypatch, lambda c: not c.value_residual, bench.torch.cuda.OutOfMemoryError)
    assert code == 0 and "a: no --batch_size or --batch_sizes fits in memory; left out" in out
    assert [n for t in record().values() for n in t["rows"]] == ["b"]


def test_too_large_for_a_cpu_is_refused_in_one_line(capsys, monkeypatch):
    """The default model and batch in 64 GB, where the system would kill the process without a word; one window fits."""
    monkeypatch.setattr(bench.os, "sysconf", {"SC_PHYS_PAGES": 1 << 24, "SC_PAGE_SIZE": 4096}.get)
    monkeypatch.setattr(bench, "measure", lambda *a: pytest.fail("measured"))
    code, out, err = run_command(bench, capsys, monkeypatch, "--device=cpu", "--out_dir=b")
    assert code == 2 and "32 windows do not fit" in out and err.startswith("error: nothing fits") and err.count("\n") == 1
    assert not os.path.exists("b/cpu.json") and bench.fits(bench.Config(device="cpu", batch_size=1))


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_keeps_what_was_measured(capsys, monkeypatch, stop):
    with monkeypatch.context() as m:
        code, _, err = two_runs(capsys, m, lambda c: c.value_residual and os.kill(os.getpid(), stop), None)
    assert code == 130 and err.endswith("stopped\n") and "Traceback" not in err
    assert [n for t in record().values() for n in t["rows"]] == ["a"]
    assert two_runs(capsys, monkeypatch, lambda c: False, None)[0] == 0  # an unfinished one gives way
    (table,) = record().values()
    assert table["finished"] and list(table["rows"]) == ["a", "b", "a, again"]


def test_a_finished_table_is_not_replaced_by_half_a_one(capsys, monkeypatch):
    assert two_runs(capsys, monkeypatch, lambda c: False, None)[0] == 0
    finished = record()
    assert [n for t in finished.values() for n in t["rows"]] == ["a", "b", "a, again"]
    assert two_runs(capsys, monkeypatch, lambda c: c.value_residual, KeyboardInterrupt)[0] == 130
    assert record() == finished


def test_half_a_table_does_not_give_way_to_less(capsys, monkeypatch):
    for rows in (2, 1):
        measured = []
        with monkeypatch.context() as m:
            done = two_runs(capsys, m, lambda c, n=rows, of=measured: of.append(c) or len(of) > n, KeyboardInterrupt)
        assert done[0] == 130
        assert [n for t in record().values() for n in t["rows"]] == ["a", "b"]


def test_tables_go_where_the_command_line_says(capsys, monkeypatch):
    """A config file's out_dir is where its runs go, and a bench of them must not land there."""
    with open("runs.py", "w") as f:
        f.write("out_dir = 'out/elsewhere'\n")
    code, out, _ = run_command(bench, capsys, monkeypatch, "runs.py", *TINY)
    assert code == 0 and os.path.exists("results/bench/cpu.json") and not os.path.exists("out")
    assert "wrote results/bench/cpu.json" in out


def test_under_torchrun_it_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = run_command(bench, capsys, monkeypatch, *TINY, "--out_dir=b")
    assert code == 2 and err.startswith("error: WORLD_SIZE=2") and err.count("\n") == 1 and not os.path.exists("b")


def test_an_end_leaves_no_process_behind(tmp_path, capsys, monkeypatch):
    for i in (1, 2):
        (tmp_path / f"train-{i}.jsonl").write_text(json.dumps({"text": "words"}) + "\n")
    started = []

    class Slow(bench.subprocess.Popen):
        def __init__(self, command, **how):
            super().__init__([bench.sys.executable, "-c", "import time; time.sleep(60)"], **how)
            started.append(self)

        def communicate(self):
            raise KeyboardInterrupt
    monkeypatch.setattr(bench.subprocess, "Popen", Slow)
    assert run_command(bench, capsys, monkeypatch, *TINY, f"--shards={tmp_path}", "--tokenizer=bytes", "--out_dir=b")[0] == 130
    assert started and all(p.wait(10) for p in started)


def test_it_waits_for_another_that_writes(capsys, monkeypatch):
    other, holding = {"another": {"finished": True, "rows": {}}}, threading.Event()

    def hold():
        with prepare.locked("b"):
            holding.set()
            time.sleep(0.5)
            with open("b/cpu.json", "w") as f:
                json.dump(other, f)
    thread = threading.Thread(target=hold)

    def meanwhile(config):
        if not thread.ident:
            thread.start()
            holding.wait()
    assert two_runs(capsys, monkeypatch, meanwhile, None)[0] == 0
    assert len(record()) == 2 and record()["another"] == other["another"]


def test_a_table_that_another_bench_wrote_meanwhile_stays(capsys, monkeypatch):
    other = {"another": {"finished": True, "rows": {}}}

    def meanwhile(config):
        os.makedirs("b", exist_ok=True)
        with open("b/cpu.json", "w") as f:
            json.dump(other, f)
    assert two_runs(capsys, monkeypatch, meanwhile, None)[0] == 0
    assert len(record()) == 2 and record()["another"] == other["another"]
