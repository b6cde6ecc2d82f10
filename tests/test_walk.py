"""docs/walk.md: its commands run, the code it quotes is model.py's, its tables are those of the files beside its pictures."""
import importlib
import json
import os
import re
import shutil
import sys

import pytest

import train
from analysis import walk
from configurator import REPO, configure

DOCS = os.path.join(REPO, "docs")
with open(walk.WALK, encoding="utf-8") as f:
    TEXT = f.read()
STEPS = walk.steps(TEXT)
ANALYSES = [words for words in STEPS if words[0] == "-m"]


def test_every_command_is_found():
    assert len(STEPS) == TEXT.count("```bash") and len(ANALYSES) == len(STEPS) - 1


def test_the_runs_can_be_trained():
    script, *words = STEPS[0]
    config = configure(train.Config, [os.path.join(REPO, w) for w in words])
    assert script == "train.py" and config.out_dir == "out/walk" and len(train.plan(config)) == 4


@pytest.mark.parametrize("words", ANALYSES, ids=lambda words: words[1])
def test_every_analysis_runs_on_tiny_runs(words, trained, tmp_path, monkeypatch, capsys):
    """The same systems as the walk's, in the tests' size."""
    place = {"docs/walk": str(tmp_path / "docs")}
    runs = str(tmp_path / "runs")
    shutil.copytree(trained / "runs", runs)
    args = [w.replace("docs/walk", place["docs/walk"]).replace("out/walk", runs) for w in words[2:]]
    monkeypatch.setattr(sys, "argv", [words[1], *args])
    importlib.import_module(words[1]).main()
    assert walk.table(capsys.readouterr().out).count("\n") >= 2
    name = words[1].removeprefix("analysis.")
    assert sorted(os.listdir(tmp_path / "docs")) == [f"{name}.json", f"{name}.png"]


def test_quoted_code_is_in_the_model():
    with open(os.path.join(REPO, "model.py"), encoding="utf-8") as f:
        model = f.read()
    quotes = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)
    assert len(quotes) >= 3 and all(quote in model for quote in quotes)


def test_pictures_are_there_and_none_is_left_over():
    shown = set(re.findall(r"!\[[^]]+\]\(walk/(\w+\.png)\)", TEXT))
    assert shown == {name for name in os.listdir(os.path.join(DOCS, "walk")) if name.endswith(".png")}
    assert sum(os.path.getsize(os.path.join(DOCS, "walk", name)) for name in shown) < 1.5e6


def told(words):
    """The table below a command."""
    return TEXT.split("python " + " ".join(words) + "\n```\n\n```\n")[1].split("\n```")[0]


def content(name):
    with open(os.path.join(DOCS, "walk", f"{name}.json"), encoding="utf-8") as f:
        return json.load(f)


def numbers(x):
    """All numbers anywhere in a JSON file."""
    if isinstance(x, dict):
        x = list(x.values())
    if isinstance(x, list):
        return {n for item in x for n in numbers(item)}
    return {x} if isinstance(x, (int, float)) and not isinstance(x, bool) else set()


@pytest.mark.parametrize("words", [w for w in ANALYSES if w[1] != "analysis.kv_cache"], ids=lambda words: words[1])
def test_tables_are_those_of_the_files(words):
    """Every number with decimals in a table is one of the file's, rounded as the table has it."""
    known, checked = numbers(content(words[1].removeprefix("analysis."))), 0
    head, *rows = told(words).splitlines()
    end = head.find("drain") if "drain" in head else None  # from there on ratios of two of the file's numbers
    for row in (row[:end] for row in rows):
        for cell in re.split(r"[\s,\[\]]+", row):
            if re.fullmatch(r"[+-]?\d+\.\d+", cell):
                step = 10.0 ** -len(cell.split(".")[1])
                assert any(abs(n - float(cell)) <= 0.501 * step for n in known), (row, cell)
                checked += 1
    assert checked >= 4


def test_rebuilding_puts_each_table_below_its_command_and_changes_nothing_else():
    tables = {" ".join(words): f"a  b\n{i}  {i}" for i, words in enumerate(STEPS)}
    once = walk.rebuild(TEXT, lambda words: "noise\n\n" + tables[" ".join(words)] + "\n\nwrote x")
    assert walk.steps(once) == STEPS
    assert all(f"python {command}\n```\n\n```\n{table}\n```\n" in once for command, table in tables.items())
    assert walk.rebuild(once, told) == TEXT
