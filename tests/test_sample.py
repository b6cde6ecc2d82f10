"""
sample.py on tiny checkpoints: prompts, sampling options, refusals, and the cached text against the plain forward pass.
Bxx: the fault of that number in the list of faults that users of such repositories reported.
"""
import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import kernels
import model
import prepare
import sample
import train
from configurator import command

ROOT = Path(__file__).resolve().parent.parent
TINY = ("--device=cpu --compile=False --n_layer=2 --n_head=2 --n_embd=32 --block_size=16 --batch_size=2 --max_iters=4 "
        "--eval_interval=2 --eval_iters=1 --learning_rate=1e-2 --warmup_iters=1").split()
SYSTEMS = {"vanilla": [], "resformer": ["--value_residual=True"], "svformer": ["--shared_value=True"]}
T = 16  # TINY's block_size
END = "\n---------------\n"  # after each sample when there are several


def call(main, *args):
    """A script's main in this process; returns the exit code."""
    before, sys.argv = sys.argv, ["script.py", *map(str, args)]
    try:
        command(main)
    except SystemExit as e:
        return e.code
    finally:
        sys.argv = before
    return 0


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A folder with a run folder for each of SYSTEMS, trained for a few iterations on bytes."""
    folder = tmp_path_factory.mktemp("out")
    with open(folder / "docs.jsonl", "w") as f:
        for i in range(30):
            meta = {"redpajama_set_name": ["RedPajamaC4", "RedPajamaBook"][i % 2]}
            f.write(json.dumps({"text": f"document {i}: the quick brown fox {i * i} times", "meta": meta}) + "\n")
    prepare.prepare(prepare.Config(source=str(folder / "docs.jsonl"), out_dir=str(folder / "bins"), tokenizer="bytes",
                                   num_proc=1, val_fraction=0.3))
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    torch.set_num_threads(1)
    for name, options in SYSTEMS.items():
        assert call(train.main, *TINY, f"--data={folder}/bins", f"--out_dir={folder}/{name}", *options) == 0
    for s, handler in handlers.items():
        signal.signal(s, handler)
    torch.set_float32_matmul_precision(precision)
    yield folder
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def text(out, capsys):
    """text(options): what sample.py writes to stdout, the vanilla checkpoint unless --out_dir says otherwise."""
    def run(*options, max_new_tokens=12):
        capsys.readouterr()
        assert call(sample.main, f"--out_dir={out}/vanilla", "--device=cpu", f"--max_new_tokens={max_new_tokens}",
                    *options) == 0
        written = capsys.readouterr()
        run.err = written.err
        return written.out
    return run


@pytest.fixture
def refused(out, capsys):
    """refused(options): the one line on stderr of a command that must end with exit code 2 and no text."""
    def run(*options):
        capsys.readouterr()
        code = call(sample.main, f"--out_dir={out}/vanilla", "--device=cpu", *options)
        written = capsys.readouterr()
        assert code == 2 and written.out == "", (code, written)
        assert written.err.startswith("error: ") and len(written.err.strip().splitlines()) == 1, written.err
        return written.err
    return run


@pytest.fixture
def prompts(monkeypatch):
    """rows: the prompts that reach the model, as lists of ids without padding; ids: those that it gave back."""
    true, rows, given = model.GPT.stream, [], []

    def spy(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, lengths=None, **kwargs):
        own = lengths or [idx.size(1)] * idx.size(0)
        rows.extend(row[-n:] for row, n in zip(idx.tolist(), own))
        for ids in true(self, idx, max_new_tokens, temperature, top_k, top_p, lengths, **kwargs):
            given.extend(ids.tolist())
            yield ids
    monkeypatch.setattr(model.GPT, "stream", spy)
    return SimpleNamespace(rows=rows, ids=given)


def plain_greedy(net, ids, n):
    """Greedy continuation without a cache. When the context is full, it goes on with its last block_size // 2 tokens."""
    ids, context = list(ids), list(ids[-T:])
    for _ in range(n):
        if len(context) > T:
            context = context[-(T // 2):]
        with torch.no_grad():
            new = int(net(torch.tensor([context]))[0][0, -1, :257].argmax())
        ids.append(new)
        context.append(new)
    return ids


def shown(ids):
    """Ids of the bytes tokenizer as text."""
    return b"".join(b"<|endoftext|>" if i == 256 else bytes([i]) for i in ids).decode(errors="replace")


# ---------------------------------------------------------------------------------------------------------------------
# Prompts


@pytest.mark.filterwarnings("ignore:the prompt has")
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("length", [1, 2, T - 1, T, T + 1, 40])
def test_greedy_text_is_that_of_the_plain_forward_pass(out, text, system, length):
    """with the cache, for prompts below, at and beyond block_size, and far beyond it in new tokens."""
    prompt = ("def f(x): return x + 1 # and so on and on " * 2)[:length]
    net = model.from_checkpoint(model.load_checkpoint(f"{out}/{system}/ckpt.pt"))
    got = text(f"--out_dir={out}/{system}", f"--start={prompt}", "--temperature=0", max_new_tokens=40)
    assert got == shown(plain_greedy(net, prompt.encode(), 40)) + "\n"


@pytest.mark.filterwarnings("ignore:the prompt has")
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("lines,n", [
    (["a", "def f", "brown", "é", "the"], T - 5),  # until the context is full
    (["x" * 40, "abc"], 8), (["x" * T, "y", "ab"], 8)])  # one row is full at once, the others keep all they have
def test_rows_of_unequal_length_equal_single_runs(out, text, system, lines, n):
    Path("prompts.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = [f"--out_dir={out}/{system}", "--temperature=0"]
    rows = text("--start=LINES:prompts.txt", *options, max_new_tokens=n).split(END)
    assert rows[len(lines):] == [""]
    for line, row in zip(lines, rows):
        assert row + "\n" == text(f"--start={line}", *options, max_new_tokens=n)


@pytest.mark.parametrize("system", SYSTEMS)
def test_rows_go_on_beyond_the_context(out, text, prompts, system):
    Path("prompts.txt").write_text("a\ndef main():\n")
    rows = text("--start=LINES:prompts.txt", f"--out_dir={out}/{system}", max_new_tokens=3 * T).split(END)
    assert len(rows) == 3 and rows[0].startswith("a") and rows[1].startswith("def main():") and len(prompts.ids) == 6 * T


def test_start_from_a_file(text, prompts):
    Path("prompt.txt").write_text("two\nlines\n")
    assert text("--start=FILE:prompt.txt").startswith("two\nlines\n")
    assert prompts.rows == [list(b"two\nlines\n")]


@pytest.mark.parametrize("content,lines", [("a\nbb", ["a", "bb"]), ("a\r\nbb\r\n", ["a", "bb"]), ("a\n\nbb\n", ["a", "", "bb"]),
                                           ("one", ["one"]), ("\ufeffa\nbb", ["a", "bb"]),
                                           ("a\x0cb\u2028c\nd\n", ["a\x0cb\u2028c", "d"])])
def test_one_prompt_per_line(text, prompts, content, lines):
    Path("prompts.txt").write_bytes(content.encode())
    text("--start=LINES:prompts.txt")
    assert prompts.rows == [list(line.encode()) or [256] for line in lines]


@pytest.mark.parametrize("start,ids", [
    ("", [256]),  # empty: one end of text
    ("\n", [10]), (" ", [32]), ("abc", [97, 98, 99]), ("é", [0xC3, 0xA9]),
    ("<|endoftext|>", [256]),  # one id
    ("a<|endoftext|>b", [97, 256, 98]), ("<|endoftext|><|endoftext|>", [256, 256]), ("<|endoftext|>\n", [256, 10]),
    ("FILE", list(b"FILE")), ("FILES:x", list(b"FILES:x")), ("key=value", list(b"key=value")), ("--x", list(b"--x"))])
def test_what_a_prompt_means(text, prompts, start, ids):
    assert text(f"--start={start}").startswith(start)
    assert prompts.rows == [ids] and len(prompts.ids) == 12


@pytest.mark.parametrize("content,ids", [("", [256]), ("\n", [10])])
def test_nearly_empty_files(text, prompts, refused, content, ids):
    """Nothing, or a line end alone."""
    Path("p.txt").write_text(content)
    text("--start=FILE:p.txt")
    assert prompts.rows == [ids]
    assert "p.txt" in refused("--start=LINES:p.txt")


def test_files_that_cannot_be_read(refused):
    Path("latin.txt").write_bytes(b"caf\xe9")
    os.mkdir("folder")
    for kind in ("FILE", "LINES"):
        for path in ("missing.txt", "latin.txt", "folder", ""):
            assert f"{kind}:{path}" in refused(f"--start={kind}:{path}")


def test_long_prompt_warns_and_works(text):
    prompt = "x" * (2 * T + 3)
    with pytest.warns(UserWarning, match=f"block_size={T}"):
        got = text(f"--start={prompt}", "--temperature=0")
    assert got.startswith(prompt) and len(got) > len(prompt)


# ---------------------------------------------------------------------------------------------------------------------
# Sampling


def test_greedy_repeats_itself_and_top_k_1_equals_it(text):
    greedy = text("--start=the ", "--temperature=0")
    assert text("--start=the ", "--temperature=0", "--seed=7") == greedy
    assert text("--start=the ", "--top_k=1", "--temperature=1") == greedy
    assert text("--start=the ", "--top_p=1e-9", "--temperature=1") == greedy
    assert text("--start=the ", "--temperature=1e-9", "--top_k=0") == greedy  # no overflow


@pytest.mark.parametrize("options", [["--top_k=1000000000"], ["--top_k=0"], ["--top_p=1"], ["--top_p=0.5"],
                                     ["--top_p=1e-30"], ["--temperature=100"], ["--dtype=bfloat16"]])
def test_extreme_values_work(text, prompts, options):
    text("--start=a", *options)
    assert len(prompts.ids) == 12 and all(0 <= i < 257 for i in prompts.ids)


def test_a_single_new_token(text, prompts):
    text("--start=a", max_new_tokens=1)
    text("--start=a", "--num_samples=2", max_new_tokens=1)
    assert len(prompts.ids) == 3


@pytest.mark.parametrize("fast", [True, False])
def test_compiled_text_is_the_plain_one(out, monkeypatch, capsys, fast):
    """Compiled only on CUDA, where --fast=True lets kernels.py attend."""
    cuda, calls = torch.cuda.is_available(), []
    monkeypatch.setattr(kernels, "use_for_decoding", lambda m, do=kernels.use_for_decoding: calls.append("kernel") or do(m))
    if not cuda:
        monkeypatch.setattr(torch, "compile", lambda f, **_: calls.append("compile") or f)
    options = f"--out_dir={out}/svformer", "--max_new_tokens=20", "--temperature=0", "--start=the", "--dtype=float32"
    assert call(sample.main, *options) == 0
    plain = capsys.readouterr().out
    assert call(sample.main, *options, "--compile=True", f"--fast={fast}") == 0
    assert capsys.readouterr().out == plain
    if not cuda:
        def fails(*args, **kwargs):
            raise RuntimeError("no compiler\nand more")
        monkeypatch.setattr(torch, "compile", lambda f, **_: fails)
        assert call(sample.main, *options, "--compile=True") == 2
        assert capsys.readouterr().err.startswith("error: --compile=True does not work here (RuntimeError: no compiler); leave")
    assert calls == (["compile"] if not cuda else ["kernel"] if fast and kernels.triton else [])


def test_top_k_beyond_the_vocabulary_is_no_limit(text):
    assert text("--start=a", "--top_k=1000000000") == text("--start=a", "--top_k=0")


@pytest.mark.parametrize("option", ["--top_k=-1", "--top_p=0", "--top_p=1.5", "--top_p=-0.1", "--temperature=-1",
                                    "--temperature=nan", "--num_samples=0", "--max_new_tokens=0", "--seed=-1", "--top_k=1.5",
                                    "--device=cuda:99", "--device=nonsense", "--dtype=float8"])
def test_values_out_of_range_are_refused(refused, option):
    assert option.strip("-").partition("=")[0] in refused(option)


def test_a_seed_is_a_text(text):
    options = ["--start=a", "--temperature=1", "--top_k=0"]
    first = text(*options, "--seed=1", max_new_tokens=30)
    assert text(*options, "--seed=1", max_new_tokens=30) == first
    assert text(*options, "--seed=2", max_new_tokens=30) != first
    assert text(*options, "--seed=1", max_new_tokens=10)[:5] == first[:5]  # token by token, whatever the length


def test_num_samples(text):
    Path("prompts.txt").write_text("ab\ncde\n")
    rows = text("--start=LINES:prompts.txt", "--num_samples=3", "--temperature=1", "--top_k=0", max_new_tokens=30).split(END)
    assert len(rows) == 6 + 1 and rows[-1] == ""
    assert all(row.startswith("ab") for row in rows[:3]) and all(row.startswith("cde") for row in rows[3:6])
    assert len(set(rows[:6])) == 6
    greedy = text("--start=LINES:prompts.txt", "--num_samples=2", "--temperature=0").split(END)
    single = [text(f"--start={line}", "--temperature=0")[:-1] for line in ("ab", "cde")]
    assert greedy == [single[0], single[0], single[1], single[1], ""]


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_ids_beyond_the_vocabulary_are_never_sampled(out, text, prompts, temperature):
    """The head has 320 rows, of which 257 are ids; the others are made by far the likeliest."""
    shutil.copytree(out / "vanilla", "padded")
    ckpt = torch.load("padded/ckpt.pt", weights_only=True)
    head = ckpt["model"]["lm_head.weight"]
    assert len(head) == 320
    head[257:] = 100 * torch.randn(63, 32, generator=torch.Generator().manual_seed(0))
    torch.save(ckpt, "padded/ckpt.pt")
    options = ["--start=a", f"--temperature={temperature}", "--top_k=5"]
    changed = text("--out_dir=padded", *options, max_new_tokens=40)
    assert len(prompts.ids) == 40 and max(prompts.ids) < 257
    assert changed == text(*options, max_new_tokens=40)


# ---------------------------------------------------------------------------------------------------------------------
# What is printed


@pytest.mark.parametrize("options", [[], ["--num_samples=2"]])
@pytest.mark.parametrize("ids", [b"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80!", b"ab\xe2\x82", b"\x80\xff\xc3(", b"x\0\n"])
def test_characters_of_several_tokens(text, monkeypatch, ids, options):
    """Whole characters come out whole, a cut or invalid one as a replacement, and nothing crashes."""
    def stream(self, idx, *args, **kwargs):
        yield from (torch.full((len(idx),), i) for i in ids)
    monkeypatch.setattr(model.GPT, "stream", stream)
    got = text("--start=>", *options)
    want = ">" + ids.decode(errors="replace")
    assert got == (want + END) * 2 if options else got == want + "\n"


def test_end_of_text_is_shown_not_a_crash(text, monkeypatch):
    monkeypatch.setattr(model.GPT, "stream", lambda self, idx, *a, **k: iter([torch.tensor([97]), torch.tensor([256])]))
    assert text("--start=>") == ">a<|endoftext|>\n"


def numbers(err):
    """(tokens/s, bytes of the cache) in the last line of stderr."""
    speed, cache = re.search(r"([\d,.]+) tokens/s.*?([\d,]+) bytes", err.strip().splitlines()[-1]).groups()
    return float(speed.replace(",", "")), int(cache.replace(",", ""))


def test_speed_and_cache_are_told_at_the_end(out, text):
    sizes = {}
    for system in SYSTEMS:
        text(f"--out_dir={out}/{system}", "--start=abc", max_new_tokens=5)
        speed, sizes[system] = numbers(text.err)
        assert speed > 0 and "cpu" in text.err and "float32" in text.err
    assert 2 * 2 * 32 * 4 * 7 <= sizes["vanilla"] <= 2 * 2 * 32 * 4 * 8  # k and v, 2 layers, 32 floats, 3 + 5 tokens
    assert sizes["resformer"] == sizes["vanilla"]  # mixed values are stored
    assert sizes["svformer"] * 4 == sizes["vanilla"] * 3  # (L + 1) / 2L
    text("--start=abc", "--num_samples=3", max_new_tokens=5)
    assert numbers(text.err)[1] == 3 * sizes["vanilla"]
    text("--start=abc", max_new_tokens=100)
    assert numbers(text.err)[1] == 2 * 2 * 32 * 4 * T  # never more than block_size tokens


def test_compiling_is_not_decoding_speed(text, monkeypatch):
    waits = [0.5]
    monkeypatch.setattr(torch, "compile", lambda f, **_: lambda *args: (time.sleep(waits.pop() if waits else 0), f(*args))[1])
    text("--start=abc", "--compile=True", max_new_tokens=8)
    assert numbers(text.err)[0] > 20  # 8 tokens in 0.5 s are 16
    text("--start=abc", "--compile=True", max_new_tokens=2)
    assert "too short to be timed" in text.err


# ---------------------------------------------------------------------------------------------------------------------
# The checkpoint


def test_missing_checkpoint(refused):
    assert "nowhere" in refused("--out_dir=nowhere")
    os.mkdir("empty")
    assert "empty/ckpt.pt" in refused("--out_dir=empty")


def test_a_folder_of_runs_names_them(out, refused):
    err = refused(f"--out_dir={out}")
    assert all(f"{out}/{name}" in err for name in SYSTEMS)


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.99])
def test_truncated_checkpoint(out, refused, keep):
    """A cut file."""
    os.mkdir("cut")
    whole = (out / "vanilla" / "ckpt.pt").read_bytes()
    Path("cut/ckpt.pt").write_bytes(whole[:int(keep * len(whole)) if 0 < keep < 1 else keep])
    assert "cut/ckpt.pt" in refused("--out_dir=cut")


@pytest.mark.parametrize("change", [
    {"version": 999}, {"model": {}}, {"model_config": {"unknown_option": 1}}, {"model_config": {"n_layer": 3}},
    {"model_config": {"n_head": 3}}, {"model_config": {"value_residual": True, "shared_value": True}}])
def test_checkpoint_of_something_else(out, refused, change):
    os.mkdir("other")
    ckpt = torch.load(out / "vanilla" / "ckpt.pt", weights_only=True)
    for key, value in change.items():
        ckpt[key] = {**ckpt[key], **value} if isinstance(value, dict) and value else value
    torch.save(ckpt, "other/ckpt.pt")
    assert "other" in refused("--out_dir=other")


@pytest.mark.parametrize("have", ["no file", "no package"])
def test_a_tokenizer_that_cannot_be_loaded(out, refused, monkeypatch, have):
    """The line offers no other tokenizer, since it would read the run's ids as other text."""
    tiktoken = pytest.importorskip("tiktoken")
    if have == "no package":
        monkeypatch.setitem(sys.modules, "tiktoken", None)
    monkeypatch.setattr(tiktoken, "get_encoding", Mock(side_effect=OSError))
    os.mkdir("other")
    ckpt = torch.load(out / "vanilla" / "ckpt.pt", weights_only=True)
    torch.save({**ckpt, "data": {**ckpt["data"], "tokenizer": "gpt2"}}, "other/ckpt.pt")
    err = refused("--out_dir=other")
    assert "gpt2" in err and {"no file": "TIKTOKEN_CACHE_DIR", "no package": "pip install tiktoken"}[have] in err
    assert "--tokenizer" not in err


def test_prefixed_names_are_accepted(out, text):
    """Prefixes of torch.compile and DDP."""
    os.mkdir("prefixed")
    ckpt = torch.load(out / "resformer" / "ckpt.pt", weights_only=True)
    torch.save({**ckpt, "model": {f"_orig_mod.{k}": v for k, v in ckpt["model"].items()}}, "prefixed/ckpt.pt")
    options = ["--start=a", "--temperature=0"]
    assert text("--out_dir=prefixed", *options) == text(f"--out_dir={out}/resformer", *options)


def test_sampling_leaves_the_run_alone(out, text):
    before = {p: p.read_bytes() for p in (out / "vanilla").iterdir()}
    text("--start=a")
    assert {p: p.read_bytes() for p in (out / "vanilla").iterdir()} == before


# ---------------------------------------------------------------------------------------------------------------------
# The command line


@pytest.mark.parametrize("data", [None, {}, {"tokenizer": None}, {"tokenizer": 5}], ids=str)
def test_a_checkpoint_without_a_tokenizer(out, refused, data):
    os.mkdir("other")
    torch.save({**torch.load(out / "vanilla" / "ckpt.pt", weights_only=True), "data": data}, "other/ckpt.pt")
    assert "does not name its tokenizer" in refused("--out_dir=other")


@pytest.mark.parametrize("kind", [".json", ".tiktoken"])
def test_a_tokenizer_that_moved(out, text, refused, kind):
    """Its new path gives the text that the old one gave; one of another size, or a second wrong path, is refused."""
    os.mkdir("other")
    ckpt = torch.load(out / "vanilla" / "ckpt.pt", weights_only=True)
    torch.save({**ckpt, "data": {**ckpt["data"], "tokenizer": f"gone/own{kind}"}}, "other/ckpt.pt")
    err = refused("--out_dir=other")
    assert f"gone/own{kind}: no such file" in err and "--tokenizer" in err
    assert text("--out_dir=other", "--tokenizer=bytes", "--start=do") == text("--start=do")
    err = refused("--out_dir=other", f"--tokenizer=also{kind}")
    assert f"--tokenizer=also{kind}: no such file" in err and "moved" not in err
    ranks = [*(bytes([i]) for i in range(256)), b"ab"]
    Path("few.tiktoken").write_text("".join(f"{base64.b64encode(t).decode()} {i}\n" for i, t in enumerate(ranks)))
    err = refused("--out_dir=other", "--tokenizer=few.tiktoken")
    assert "few.tiktoken: has 258 ids" in err and f"257 of gone/own{kind}" in err


def python(*args, **env):
    return subprocess.run([sys.executable, str(ROOT / "sample.py"), *args], capture_output=True, timeout=60,
                          env={**os.environ, **env})


def test_an_argument_of_another_form():
    """names the argument and the accepted form."""
    done = python("--out_dir", "out")
    err = done.stderr.decode()
    assert done.returncode == 2 and "--out_dir" in err and "--name=value" in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("arg", ["-out_dir=out", "--start", "--temperature = 0", "--tokeniser=bytes", "--temprature=0"])
def test_other_wrong_arguments(refused, arg):
    assert arg.strip("-").split("=")[0].strip() in refused(arg)


def test_the_command_from_another_folder(out):
    """Only the text on stdout, without a tokenizer option; also where the terminal knows only ASCII."""
    args = [f"--out_dir={out}/svformer", "--start=hé", "--device=cpu", "--max_new_tokens=30", "--temperature=0"]
    net = model.from_checkpoint(model.load_checkpoint(out / "svformer" / "ckpt.pt"))
    done = python(*args, OMP_NUM_THREADS="1", PYTHONIOENCODING="utf-8")
    assert done.returncode == 0 and done.stdout.decode() == shown(plain_greedy(net, "hé".encode(), 30)) + "\n"
    assert numbers(done.stderr.decode())


def test_a_terminal_that_knows_only_ascii(out):
    """As a Windows console or a bare LANG=C: a character it lacks must not end the text with a traceback."""
    done = python(f"--out_dir={out}/vanilla", "--start=hé", "--device=cpu", "--max_new_tokens=3", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and b"Traceback" not in done.stderr and done.stdout.startswith(b"h")
