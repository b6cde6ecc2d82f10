"""configurator.py: what is accepted, what is refused, and that a refusal says where, what was found and what to do."""
import dataclasses
import importlib
import os
import re
import subprocess
import sys
from typing import Literal

import pytest
import torch

import configurator
from configurator import UserError, command, configure

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclasses.dataclass
class Options:
    out_dir: str = "out"  # where the run goes
    start: str = "#1"  # a text; the default holds a hash
    batch_size: int = 12  # windows per step
    seed: int = 1337  # of everything
    max_iters: int = 600  # steps
    learning_rate: float = 6e-4  # at its highest
    dropout: float = 0.0  # share of zeros
    decay_lr: bool = True  # cosine
    eval_only: bool = False  # stop after the first evaluation
    compile: bool | Literal["auto"] = "auto"  # auto: only on CUDA
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the activations
    value_lambda1: float | None = None  # None: the mix's own
    value_source: Literal["first", "previous"] | int = "first"  # or a layer's number
    top_k: int | None = 200  # None: off
    runs: dict = dataclasses.field(default_factory=dict)  # name -> options


def get(*argv):
    return configure(Options, list(argv))


def refused(*argv):
    """The message of the UserError that these arguments raise; every message must be of use to a reader."""
    with pytest.raises(UserError) as e:
        get(*argv)
    assert str(e.value).strip()
    return str(e.value)


def config_file(folder, text, name="conf.py"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def same(a, b):
    return type(a) is type(b) and a == b


# ---------------------------------------------------------------------------------------------------------------------
# Accepted


def test_no_arguments_give_the_defaults():
    assert get() == Options()


def test_a_configuration_does_not_leak_into_the_next(tmp_path):
    get("--batch_size=3", config_file(tmp_path, "runs = dict(a={}, b={})"), "--runs=a")
    assert get() == Options()


@pytest.mark.parametrize("argument, value", [
    ("--batch_size=4", 4), ("--batch_size=-4", -4), ("--max_iters=1_000", 1000), ("--seed=0", 0),
    # an int widens to float and becomes one
    ("--learning_rate=1", 1.0), ("--dropout=0", 0.0), ("--learning_rate=6e-5", 6e-5), ("--learning_rate=-1", -1.0),
    ("--learning_rate=.5", 0.5), ("--learning_rate=1_0.5", 10.5),
    ("--out_dir=a=b=c", "a=b=c"), ("--out_dir=", ""), ("--out_dir=with space", "with space"), ("--out_dir=8", "8"),
    ("--out_dir=None", "None"), ("--out_dir=ä/ß", "ä/ß"), ("--start=--help=1", "--help=1"), ("--start= x\n", " x\n"),
    ("--dtype=bfloat16", "bfloat16"), ("--dtype=auto", "auto"),
    ("--compile=auto", "auto"), ("--compile=True", True), ("--compile=0", False),
    ("--value_lambda1=None", None), ("--value_lambda1=2", 2.0), ("--value_lambda1=-0.5", -0.5),
    ("--value_source=previous", "previous"), ("--value_source=3", 3),
    ("--top_k=None", None), ("--top_k=5", 5),
])
def test_value_from_the_command_line(argument, value):
    name = argument[2:].split("=")[0]
    config = get(argument)
    assert same(getattr(config, name), value)
    assert dataclasses.replace(config, **{name: getattr(Options(), name)}) == Options()  # and nothing else changed


@pytest.mark.parametrize("words, value", [(("true", "True", "TRUE", "tRuE", "1"), True),
                                          (("false", "False", "FALSE", "fAlSe", "0"), False)])
def test_bool_in_any_case(words, value):
    for word in words:
        assert get(f"--decay_lr={word}").decay_lr is value
        assert get(f"--eval_only={word}").eval_only is value


@pytest.mark.parametrize("text, name, value", [
    ("batch_size = 4", "batch_size", 4), ("learning_rate = 1", "learning_rate", 1.0), ("\ufeffseed = 4", "seed", 4),
    ("value_lambda1 = None", "value_lambda1", None), ("value_lambda1 = 1", "value_lambda1", 1.0),
    ("decay_lr = False", "decay_lr", False), ("compile = True", "compile", True), ("compile = 'auto'", "compile", "auto"),
    ("dtype = 'float32'", "dtype", "float32"), ("value_source = 2", "value_source", 2), ("out_dir = 'é'", "out_dir", "é"),
    ("batch_size = 2 * 3 + 1", "batch_size", 7),
    ("import math\nlearning_rate = math.sqrt(4) / 2", "learning_rate", 1.0),
    ("from pathlib import Path\nout_dir = str(Path('a') / 'b')", "out_dir", os.path.join("a", "b")),
    ("_n = 3\nbatch_size = _n * 2", "batch_size", 6),
    ("def twice(n):\n    return 2 * n\nbatch_size = twice(5)", "batch_size", 10),
    ("_base = 2\ndef f(n):\n    return _base * n\nbatch_size = sum(f(i) for i in range(3))", "batch_size", 6),
    ("import os\nout_dir = os.path.basename(__file__)", "out_dir", "conf.py"),
    ("# only a comment\n", "batch_size", 12),
])
def test_value_from_a_config_file(tmp_path, text, name, value):
    config = get(config_file(tmp_path, text))
    assert same(getattr(config, name), value)
    assert dataclasses.replace(config, **{name: getattr(Options(), name)}) == Options()


def test_of_a_repeated_key_the_last_counts():
    assert get("--batch_size=1", "--seed=3", "--batch_size=2").batch_size == 2
    assert get("--batch_size=2", "--batch_size=1").batch_size == 1


def test_files_stack_from_left_to_right(tmp_path):
    a = config_file(tmp_path, "batch_size = 1\nseed = 1", "a.py")
    b = config_file(tmp_path, "batch_size = 2\nmax_iters = 2", "b.py")
    config = get(a, b)
    assert (config.batch_size, config.seed, config.max_iters) == (2, 1, 2)
    config = get(b, a)
    assert (config.batch_size, config.seed, config.max_iters) == (1, 1, 2)


def test_the_command_line_wins_wherever_it_stands(tmp_path):
    a, b = config_file(tmp_path, "batch_size = 1\nseed = 1", "a.py"), config_file(tmp_path, "batch_size = 2", "b.py")
    for argv in ([a, b, "--batch_size=9"], [a, "--batch_size=9", b], ["--batch_size=9", a, b]):
        config = get(*argv)
        assert (config.batch_size, config.seed) == (9, 1)


def test_files_are_found_here_and_in_the_repository(tmp_path, monkeypatch):
    here, repo = tmp_path / "here", tmp_path / "repo"
    config_file(repo, "batch_size = 1", "config/both.py")
    config_file(repo, "batch_size = 2", "config/only_repo.py")
    config_file(here, "batch_size = 3", "config/both.py")
    monkeypatch.setattr(configurator, "REPO", str(repo))
    monkeypatch.chdir(here)
    assert get("config/only_repo.py").batch_size == 2
    assert get("config/both.py").batch_size == 3  # the working directory comes first
    assert get(str(repo / "config/both.py")).batch_size == 1


def test_the_repository_is_the_folder_of_configurator():
    assert os.path.samefile(configurator.REPO, REPO)


def test_runs_from_a_file_and_picked(tmp_path):
    path = config_file(tmp_path, "runs = {'vanilla': {}, 'resformer': dict(value_residual=True), 'svformer': dict(n=2)}")
    assert list(get(path).runs) == ["vanilla", "resformer", "svformer"]
    runs = get("--runs=resformer", path).runs  # all stay: the first is the baseline also when it is not trained here
    assert runs == {"vanilla": {}, "resformer": dict(value_residual=True), "svformer": dict(n=2)}
    assert runs.picked == ["resformer"]
    assert get(path, "--runs=vanilla, resformer").runs.picked == ["vanilla", "resformer"]


# ---------------------------------------------------------------------------------------------------------------------
# Refused: values. The message names the option and what was found, and says what is expected.


@pytest.mark.parametrize("argument", [
    "--batch_size=True", "--batch_size=1.5", "--batch_size=4.0", "--batch_size=", "--batch_size=four", "--batch_size=None",
    "--seed=1e3", "--seed=0x10", "--seed=1__0", "--seed=1 2", "--seed=nan", "--seed=inf",
    "--learning_rate=fast", "--learning_rate=True", "--learning_rate=nan", "--learning_rate=inf", "--learning_rate=-inf",
    "--learning_rate=1e400", "--learning_rate=None", "--learning_rate=", "--learning_rate=1,5",
    "--decay_lr=no", "--decay_lr=2", "--decay_lr=", "--decay_lr=None", "--decay_lr=1.0", "--compile=Auto", "--compile=maybe",
    "--dtype=float16", "--dtype=", "--value_lambda1=half", "--value_lambda1=True", "--value_source=last", "--top_k=2.5",
])
def test_refused_value_on_the_command_line(argument):
    name, value = argument[2:].split("=", 1)
    message = refused(argument)
    assert re.search(rf"\b{name}\b", message) and repr(value) in message
    expected = {"batch_size": "whole number", "seed": "whole number", "learning_rate": "number", "decay_lr": "true or false",
                "compile": "auto", "dtype": "bfloat16", "value_lambda1": "None", "value_source": "previous", "top_k": "None"}
    assert expected[name] in message


@pytest.mark.parametrize("text", [
    "batch_size = True", "batch_size = 4.0", "batch_size = 'four'", "batch_size = [4]", "batch_size = None", "seed = 1e3",
    "learning_rate = True", "learning_rate = 'fast'", "learning_rate = float('nan')", "learning_rate = float('inf')",
    "learning_rate = None", "learning_rate = (1, 5)", "decay_lr = 2", "decay_lr = None", "decay_lr = 'yes'",
    "out_dir = 3", "out_dir = None", "out_dir = True", "out_dir = b'x'", "dtype = 'float16'", "dtype = 32",
    "compile = 'on'", "value_lambda1 = []", "top_k = 2.5", "runs = ['a']",
])
def test_refused_value_in_a_file(tmp_path, text):
    path = config_file(tmp_path, "seed = 1\n" + text, "wrong.py")
    message = refused(path)
    name, value = text.split(" = ")
    assert re.search(rf"\b{name}\b", message) and "wrong.py" in message
    assert repr(eval(value)) in message and "expected" in message


@pytest.mark.parametrize("text", ["batch_size = '8'", "learning_rate = '1e-3'"])
def test_text_in_a_file_is_no_number(tmp_path, text):
    """not str -> number. On the command line everything is text; in a file quotes are a mistake."""
    assert text.split(" = ")[0] in refused(config_file(tmp_path, text))


@pytest.mark.parametrize("name", ["seed", "learning_rate"])
def test_a_huge_whole_number_is_taken_or_refused(tmp_path, name):
    """10^400 is no float: it must not end in an OverflowError."""
    for argv in ([f"--{name}=1{'0' * 400}"], [config_file(tmp_path, f"{name} = 10 ** 400")]):
        try:
            assert getattr(get(*argv), name) == 10 ** 400
        except UserError as e:
            assert name in str(e)


# ---------------------------------------------------------------------------------------------------------------------
# Refused: names


@pytest.mark.parametrize("wrong, near", [("learning_rat", "learning_rate"), ("batchsize", "batch_size"), ("dropuot", "dropout"),
                                         ("max_iter", "max_iters"), ("Seed", "seed")])
def test_misspelt_name_on_the_command_line_and_in_a_file(tmp_path, wrong, near):
    """a file's misspelt name is refused like the command line's, with the nearest name."""
    message = refused(f"--{wrong}=1")
    assert wrong in message and re.search(rf"\b{near}\b", message)
    message = refused(config_file(tmp_path, f"{wrong} = 1", "misspelt.py"))
    assert wrong in message and re.search(rf"\b{near}\b", message) and "misspelt.py" in message


def test_a_name_like_no_other_is_refused_with_the_way_to_the_list():
    message = refused("--zzz=1")
    assert "zzz" in message and "--help" in message


def test_of_a_stack_the_guilty_file_is_named(tmp_path):
    good, bad = config_file(tmp_path, "seed = 1", "good.py"), config_file(tmp_path, "sede = 1", "bad.py")
    for argv in ([good, bad], [bad, good]):
        message = refused(*argv)
        assert "bad.py" in message and "good.py" not in message


def test_unknown_run(tmp_path):
    path = config_file(tmp_path, "runs = {'vanilla': {}, 'resformer': {}}")
    message = refused(path, "--runs=vanilla,resfomer")
    assert "runs" in message and "resfomer" in message and "resformer" in message
    message = refused("--runs=vanilla")  # no file that defines any
    assert "runs" in message and "vanilla" in message and "file" in message


# ---------------------------------------------------------------------------------------------------------------------
# Refused: forms


@pytest.mark.parametrize("argv, form", [
    (["--compile"], "--compile="), (["-batch_size=4"], "--batch_size=4"), (["--batch_size = 4"], "--batch_size=4"),
    (["--out_dir", "out"], "--out_dir="), (["--"], "=value"), (["-"], "=value"),
    (["-x"], "--x="), (["--batch_size =4"], "--batch_size=4"),
])
def test_an_argument_of_another_form_is_shown_in_the_right_one(argv, form):
    message = refused(*argv)
    assert repr(argv[0]) in message and form in message


@pytest.mark.parametrize("argument", ["--=1", "--=", "-=1", "---seed=1", "--seed.x=1"])
def test_no_name_of_an_option(argument):
    refused(argument)


def test_dashes_forgotten():
    message = refused("batch_size=4")
    assert "'batch_size=4'" in message and "--batch_size=4" in message


def test_missing_config_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refused("config/nothing_here.py")
    assert "'config/nothing_here.py'" in message and "not found" in message


@pytest.mark.parametrize("path", ["out", ".", "my.jsonl", "notes.txt", ""])
def test_what_is_no_config_file_is_not_run(path, tmp_path, monkeypatch):
    """A line of .jsonl is Python, too, and would do nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.jsonl").write_text('{"text": "words"}\n')
    (tmp_path / "notes.txt").write_text("seed = 3\n")
    message = refused(path)
    assert repr(path) in message and ".py" in message and "--name=value" in message


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")])
def test_out_of_memory_is_one_line(error, capsys):
    def main():
        raise error
    with pytest.raises(SystemExit) as e:
        command(main)
    assert e.value.code == 2 and capsys.readouterr().err.startswith("error: out of memory: give less at a time")
    error = RuntimeError("another")
    with pytest.raises(RuntimeError, match="another"):
        command(main)


@pytest.mark.parametrize("text, line, what", [
    ("seed = 1\nbatch_size = = 4\n", 2, "SyntaxError"),
    ("seed = 1\n\nbatch_size = 1 / 0\n", 3, "ZeroDivisionError"),
    ("def f():\n    return nothing\nseed = f()\n", 2, "nothing"),
    ("import json\nseed = 1\nseed = json.loads('[')\n", 3, "JSONDecodeError"),  # raised elsewhere, caused in line 3
    ("seed = 1\nimport not_a_module_of_anyone\n", 2, "not_a_module_of_anyone"),
    ("if True:\nseed = 1\n", 2, "Error"),
])
def test_broken_config_file_names_file_and_line(tmp_path, text, line, what):
    message = refused(config_file(tmp_path, text, "broken.py"))
    assert "broken.py" in message and re.search(rf"line {line}\b", message) and what in message


@pytest.mark.parametrize("content", [b"out_dir = '\xff\xfe'", b"seed = 1\0"])
def test_a_config_file_that_is_no_text(tmp_path, content):
    (tmp_path / "binary.py").write_bytes(content)
    assert "binary.py" in refused(str(tmp_path / "binary.py"))


# ---------------------------------------------------------------------------------------------------------------------
# Ranges


@pytest.mark.parametrize("value, low, below, good", [
    (0, 0, None, True), (-1, 0, None, False), (0.0, 0, 1, True), (1.0, 0, 1, False), (0.999, 0, 1, True), (-1e-9, 0, 1, False)])
def test_at_least(value, low, below, good):
    config = Options(dropout=value)
    if good:
        configurator.at_least(config, low, "dropout", below=below)
        return
    with pytest.raises(UserError, match=rf"dropout.*{re.escape(str(value))}.*{low}"):
        configurator.at_least(config, low, "dropout", below=below)


# ---------------------------------------------------------------------------------------------------------------------
# --help


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--batch_size=3", "--help"], ["--help", "no_such_file.py"]])
def test_help_shows_every_option_with_default_and_comment(argv, capsys):
    with pytest.raises(SystemExit) as e:
        configure(Options, argv)
    assert e.value.code in (0, None)
    text = capsys.readouterr().out
    assert __doc__.strip() in text
    lines = [line.strip() for line in text.splitlines()]
    for start, comment in {"--out_dir=out": "where the run goes", "--start=#1": "a text; the default holds a hash",
                           "--learning_rate=0.0006": "at its highest", "--value_lambda1=None": "None: the mix's own",
                           "--compile=auto": "auto: only on CUDA", "--runs={}": "name -> options",
                           "--decay_lr=True": "cosine"}.items():
        assert [line for line in lines if line.split(" ")[0] == start and line.endswith(" " + comment)], start
    positions = [text.index(f"--{f.name}=", text.index("--out_dir=out")) for f in dataclasses.fields(Options)]
    assert positions == sorted(positions)


@dataclasses.dataclass
class Derived(Options):
    extra: int = 3  # of the derived class alone


def test_help_of_an_inherited_class(capsys):
    with pytest.raises(SystemExit):
        configure(Derived, ["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert any("--extra=3" in line and "of the derived class alone" in line for line in lines)
    assert any("--seed=1337" in line and "of everything" in line for line in lines)


@pytest.mark.parametrize("script", ["prepare", "train", "sample"])
def test_help_of_the_scripts(script, capsys):
    """Every field of a script's Config appears with its default and the comment that stands behind it in the source."""
    if not os.path.exists(os.path.join(REPO, script + ".py")):
        pytest.skip(f"no {script}.py")
    module = importlib.import_module(script)
    if not hasattr(module, "Config"):
        pytest.skip(f"{script}.py has no Config")
    with pytest.raises(SystemExit) as e:
        configure(module.Config, ["--help"])
    assert e.value.code in (0, None)
    lines = capsys.readouterr().out.splitlines()
    with open(os.path.join(REPO, script + ".py"), encoding="utf-8") as f:
        source = f.read()
    body = re.search(r"^class Config\b.*?\n(?=\S)", source, re.M | re.S).group()
    own = [name for name in module.Config.__dict__["__annotations__"]]
    for name in own:
        comment = re.search(rf"^    {name}: .*?  # (.+)$", body, re.M)
        assert comment, f"{script}.Config.{name} has no trailing comment"
        default = getattr(module.Config(), name)
        assert [line for line in lines if f"--{name}={default}" in line and comment.group(1).strip() in line], name
    for field in dataclasses.fields(module.Config):
        assert sum(line.strip().startswith(f"--{field.name}=") for line in lines) == 1


def test_help_on_the_command_line_exits_with_0():
    done = subprocess.run([sys.executable, os.path.join(REPO, "prepare.py"), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert "--val_fraction=auto" in done.stdout and "--out_dir=" in done.stdout


# ---------------------------------------------------------------------------------------------------------------------
# command(): one line on stderr, exit code 2


def run_main(body):
    script = f"import sys; sys.path.insert(0, {REPO!r})\nfrom configurator import UserError, command\n" \
             f"class Special(UserError): pass\ndef main():\n    print('begin', flush=True)\n    {body}\ncommand(main)\n"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


@pytest.mark.parametrize("body, words", [
    ("raise UserError('--seed: found 1.5')", "--seed: found 1.5"),
    ("raise Special('a special one')", "a special one"),
    ("raise UserError('first line\\n  second line\\r\\n\\tthird')", "first line second line third"),
    ("raise UserError('ümlaut')", "mlaut"),
    ("open('/no/such/folder/file')", "/no/such/folder/file"),
    ("open('/no/such\\nfolder/file')", "folder/file"),
    ("raise OSError('disk trouble')", "disk trouble"),
    ("import os; os.mkdir(os.getcwd())", "exists"),
])
def test_command_ends_bad_input_with_one_line_and_2(body, words):
    done = run_main(body)
    assert done.returncode == 2
    assert done.stdout == "begin\n"
    assert done.stderr.count("\n") == 1 and done.stderr.endswith("\n") and words in done.stderr
    assert "Traceback" not in done.stderr


def test_command_leaves_good_runs_and_real_bugs_alone():
    done = run_main("pass")
    assert (done.returncode, done.stderr) == (0, "")
    done = run_main("raise SystemExit(3)")
    assert (done.returncode, done.stderr) == (3, "")
    done = run_main("{}['a bug of ours']")  # must stay visible, with its place
    assert done.returncode == 1 and "Traceback" in done.stderr and "a bug of ours" in done.stderr


@pytest.mark.parametrize("argv", [["--compile"], ["-source=x"], ["--source = x"], ["--source", "x"], ["source=x"], ["no.py"],
                                  ["--sorce=x"], ["--num_proc=True"], ["--num_proc=-1"], ["--val_fraction=1"]])
def test_a_script_called_wrongly(argv, tmp_path):
    """no bare AssertionError, no traceback; nothing is begun."""
    script = os.path.join(REPO, "prepare.py")
    done = subprocess.run([sys.executable, script, *argv], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert argv[0].strip("-").split("=")[0].strip() in done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error, is_one", [
    (MemoryError(), True), (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    (RuntimeError("out of resource: shared memory, Required: 300000"), False),
    (RuntimeError("Expected contiguous memory format"), False), (UserError("no more memory"), False)])
def test_what_is_out_of_memory(error, is_one):
    assert configurator.out_of_memory(error) == is_one


def test_nanogpts_names_lead_to_ours(tmp_path):
    """By meaning, not by likeness; a name that is like none has no such hint, and a config file's own names are explained."""
    import train
    for name, words in (("gradient_accumulation_steps", "did you mean tokens_per_iter?"), ("lr", "did you mean learning_rate?"),
                        ("bias", "--help lists all options"), ("always_save_checkpoint", "--help lists all options"),
                        ("dataset", "did you mean data?"), ("n_layers", "did you mean n_layer?")):
        with pytest.raises(UserError, match=re.escape(words)):
            configure(train.Config, [f"--{name}=1"])
    (tmp_path / "own.py").write_text("for i in range(3):\n    pass\n")
    with pytest.raises(UserError, match="unknown option 'i'; .* own begins with _"):
        configure(Options, [str(tmp_path / "own.py")])
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(UserError, match="exits.py, line 2: SystemExit: 3"):
        configure(Options, [str(tmp_path / "exits.py")])
