"""The README is held to the code: its commands parse, its options are the scripts', its example of an own system works."""
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

import prepare
import sample
import train
from configurator import configure, describe

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
with open(os.path.join(REPO, "README.md"), encoding="utf-8") as f:
    README = f.read()
SCRIPTS = {"train.py": train.Config, "prepare.py": prepare.Config, "sample.py": sample.Config}


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", README, flags=re.S)


LOOP = "#", "i=0", "for ", "    i=", "done"  # lines around a command
COMMANDS = [line.removesuffix(" &").replace("$name", "vanilla,identity,learnable,sparse").strip().removeprefix(
            "CUDA_VISIBLE_DEVICES=$i ")
            for block in blocks("bash") for line in block.splitlines() if not line.startswith(LOOP)]


@pytest.fixture
def in_checkout(tmp_path, monkeypatch):
    """A copy of the code, with the config files that the README spells out."""
    for name in ("model.py", "kernels.py", "train.py", "prepare.py", "sample.py", "configurator.py", "analysis", "config"):
        source = os.path.join(REPO, name)
        (shutil.copytree if os.path.isdir(source) else shutil.copy)(source, tmp_path / name)
    for block in blocks("python"):
        if name := re.match(r"# (\S+\.py):", block):
            (tmp_path / name[1]).write_text(block)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", [c.split("&&")[-1].strip() for c in COMMANDS])
def test_every_command_is_understood(command, in_checkout):
    words = shlex.split(command)
    script = next((w for w in words if w in SCRIPTS), None)
    if script:
        configure(SCRIPTS[script], words[words.index(script) + 1:])
    else:
        assert words == ["pytest"]


def test_commands_in_comments_are_understood(in_checkout):
    found = re.findall(r"# \S+\.py:  python (\S+) (.*)", README)
    assert len(found) == 2
    for script, words in found:
        configure(SCRIPTS[script], shlex.split(words))


@pytest.mark.parametrize("script", SCRIPTS)
def test_options_are_those_of_the_script(script):
    block = re.search(rf"<b>{script}</b></summary>\n\n```\n(.*?)\n```", README, flags=re.S)
    assert block[1] == describe(SCRIPTS[script])


def test_every_option_says_what_it_is():
    for Config in SCRIPTS.values():
        for line in describe(Config).splitlines():
            assert len(line[36:].strip()) > 5, line


def test_ci_runs_the_readmes_test_command():
    with open(os.path.join(REPO, ".ci", "run"), encoding="utf-8") as f:
        ci = f.read()
    command = next(c for c in COMMANDS if c.endswith("&& pytest"))
    assert command.partition(".venv/bin/activate && ")[2] in ci


def test_no_package_is_listed_twice():
    table = README.partition("## What each dependency is for")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (?!package|---)([^|]+?) \|", table, flags=re.M)
    packages = [name.strip() for cell in cells for name in re.sub(r"\(.*?\)", "", cell).split(",")]
    assert len(packages) > 10 and len(packages) == len(set(packages))


def test_own_system_of_the_readme_trains(in_checkout):
    """The worked example, applied as it is described: a word in value_mix, a branch before ValueMix.forward's last else."""
    branch = next(b for b in blocks("python") if "decay" in b and "elif" in b)
    assert len(branch.strip().splitlines()) < 15
    source = (in_checkout / "model.py").read_text()
    source = source.replace('"dense"] = ', '"dense", "decay"] = ', 1)
    head, tail = source.split("class ValueMix", 1)[0], source.split("class ValueMix", 1)[1]
    forward, rest = tail.split("class Attention", 1)
    at = forward.rindex("            else:\n")
    (in_checkout / "model.py").write_text(f"{head}class ValueMix{forward[:at]}{branch}{forward[at:]}class Attention{rest}")
    tiny = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=16", "--batch_size=2", "--max_iters=2", "--eval_iters=1",
            "--sample_tokens=0", "--warmup_iters=1"]
    done = subprocess.run([sys.executable, "train.py", "config/quickstart.py", "config/decay.py", *tiny],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.load(open("out/decay/summary.json"))["decay"]["rel_val_loss"]["n"] == 1
