"""docs/walk.md is held to the code: its commands run, its quotes are model.py's lines, its tables are walk.json's."""
import dataclasses
import importlib
import json
import os
import re
import shlex
import signal
import sys

import pytest

import train
from analysis import walk
from configurator import REPO, UserError, command, configure

DOCS = os.path.join(REPO, "docs")
TEXT = open(walk.WALK, encoding="utf-8").read()
WORDS = " ".join(TEXT.split())
README = open(os.path.join(REPO, "README.md"), encoding="utf-8").read()
SECTION = README.split("## See the mechanism\n")[1].split("\n## ")[0]
FOUND = json.load(open(os.path.join(DOCS, "walk.json"), encoding="utf-8"))
COMMANDS = walk.commands(TEXT)
# the options that make a model of the walk as small as the fixture's; 4 layers, since anchors=1,4
TINY = dict(n_layer=4, n_head=4, n_embd=32, block_size=16, batch_size=2, max_iters=1, warmup_iters=1, eval_iters=1,
            sample_tokens=0)


def analyse(words, monkeypatch, trained, out):
    """Run an analysis' command in this process on the fixture's runs, whose names are the walk's; it writes to out."""
    module = importlib.import_module(words[2])
    for word in words[3:]:
        assert word.startswith(("--", "out/")), word
    assert any(w.startswith("--out_dir=out/") for w in words)  # the fixture's folder must not change
    args = [re.sub(r"^out/\w+", str(trained / "runs"), w) for w in words[3:] if not w.startswith("--out_dir=")]
    monkeypatch.setattr(sys, "argv", [words[2], *args, f"--out_dir={out}"])
    command(module.main)


def test_the_lessons_commands_write_all_pictures_and_tables(trained, tmp_path, monkeypatch):
    lesson = [words for words in walk.commands(TEXT.partition("## 6")[0]) if words[1] == "-m"]
    for words in lesson:
        analyse(words, monkeypatch, trained, tmp_path)
        assert words[-1] == f"--out_dir={walk.OUT}"
    found = walk.tables(str(trained / "runs"), str(tmp_path))
    assert found.keys() == FOUND["tables"].keys()
    for name, rows in found.items():
        assert rows[0] == FOUND["tables"][name][0] or name == "similarity"  # its head is layers, of which the fixture has fewer
        assert len({len(row) for row in rows}) == 1 and len(rows) > 2
    for name in walk.pictures(TEXT):
        assert (tmp_path / f"{name}.png").exists()
    again = walk.renewed(TEXT, found)
    assert again != TEXT and walk.renewed(again, FOUND["tables"]) == TEXT  # only tables change
    with pytest.raises(UserError, match="no table 'concentration'"):
        walk.renewed(TEXT, {})


@pytest.mark.parametrize("words", [w for w in walk.commands(TEXT.partition("## 6")[2]) if w[1] == "-m"], ids=lambda w: w[2])
def test_the_exercises_analyses_run(words, trained, tmp_path, monkeypatch):
    analyse(words, monkeypatch, trained, tmp_path)
    assert (tmp_path / f"{words[2].removeprefix('analysis.')}.png").exists()


@pytest.mark.parametrize("words", [w for w in COMMANDS if w[1] == "train.py"], ids=lambda w: w[-1])
def test_training_commands_train(words, trained, tmp_path):
    config = configure(train.Config, words[2:])
    assert config.out_dir.startswith("out/") and config.baseline == ""
    config = dataclasses.replace(config, data=str(trained / "bins"), out_dir=str(tmp_path / "runs"), **TINY)
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    train.train_list(config, train.World(), train.Signals())
    for s, handler in handlers.items():
        signal.signal(s, handler)
    picked = getattr(config.runs, "picked", ()) or list(config.runs)
    assert list(json.load(open(tmp_path / "runs/summary.json"))) == [name for name in config.runs if name in picked]


def test_every_command_is_tested():
    assert all(words[0] == "python" and (words[1] == "train.py" or words[1] == "-m" and words[2].startswith("analysis."))
               for words in COMMANDS) and len(COMMANDS) > 12


def test_the_walk_at_twice_the_rate_is_the_recorded_one():
    """results/quickstart/walk/: exercise 6's models, asked what chapter 3 asks those of the quickstart."""
    rows = dict(row[:2] for row in FOUND["tables"]["loss"])
    mapping, spectrum, runs = (json.load(open(os.path.join(REPO, f"results/quickstart/walk/{name}.json"), encoding="utf-8"))
                               for name in ("mapping", "spectrum", "summary"))
    ends = runs["vanilla"]["val_loss"]["mean"], float(rows["vanilla"])
    assert "At twice the learning rate (exercise 6), where vanilla ends at {:.2f} instead of {:.2f},".format(*ends) in WORDS
    assert "Eq 4 stays closer than Eq 6', though by 0.01 only in layer 5, and Eq 6 is closer than Eq 4 in layers 4, 5" in WORDS
    assert "and 6, in two of them barely." in WORDS
    at = mapping["models"]["vanilla"]
    assert [n for n, four, six in zip(at["layers"], at["approximation"], at["identity"]) if six > four] == [4, 5, 6]
    closer = [four - alone for four, alone in zip(at["approximation"], at["identity_previous"])]
    assert [n for n, gap in zip(at["layers"], closer) if gap < 0.06] == [5] and round(min(closer), 2) == 0.01
    barely = [six - four for four, six in zip(at["approximation"], at["identity"]) if six > four]
    assert sum(gap < 0.02 for gap in barely) == 2
    vanilla, own, mixed = (spectrum["models"][s]["layers"] for s in ("vanilla", "resformer", "resformer mixed"))
    first, above = own[0], list(zip(vanilla[1:], own[1:], mixed, strict=True))
    assert [o["layer"] for v, o in zip(vanilla, own) if o["largest"] > v["largest"]] == [3]
    assert "At twice the learning rate ResFormer's own largest eigenvalue is above vanilla's in layer 3 only." in WORDS
    assert "V'_n is wider than V_n and than vanilla's values there, too, and its largest eigenvalue below both;" in WORDS
    assert all(m["effective_rank"] > max(v["effective_rank"], o["effective_rank"]) for v, o, m in above)
    assert all(m["largest"] < min(v["largest"], o["largest"]) for v, o, m in above)
    assert "but it is below V_1's in layer 2 only, and V_1 has more directions.)" in WORDS
    assert [m["layer"] for m in mixed if m["largest"] < first["largest"]] == [2]
    assert all(m["effective_rank"] < first["effective_rank"] - 1 for m in mixed)


def test_what_the_walk_says_of_its_tables_is_in_them():
    _, *rows = FOUND["tables"]["mapping"]
    four, six, previous = zip(*([float(x) for x in row[1:]] for row in rows))
    assert [row[0] for row, a, b in zip(rows, four, six) if a > b] == ["2", "3", "4", "6"]
    assert "Eq 4 is closer than Eq 6 in layers 2, 3, 4 and 6, and than Eq 6', which uses the same V_m, in all five." in WORDS
    assert all(a > b for a, b in zip(four, previous)) and len(four) == 5
    head, *rows = FOUND["tables"]["spectrum"]
    at = {name: [float(row[i]) for row in rows if row[i]] for i, name in enumerate(head) if i}
    vanilla, own, mixed = (at[f"largest λ, {s}"] for s in ("vanilla", "resformer", "resformer mixed"))
    assert [i + 1 for i, (a, b) in enumerate(zip(own, vanilla)) if a > b] == [1, 2, 3, 5]
    assert all(c < min(a, b) for a, b, c in zip(own[1:], vanilla[1:], mixed, strict=True))
    assert "larger than vanilla's in layers 1, 2, 3 and 5; of what it attends with, V'_n, it is the smallest" in WORDS
    vanilla, own, mixed = (at[f"effective rank, {s}"] for s in ("vanilla", "resformer", "resformer mixed"))
    within = [f"{round(min(ranks))} to {round(max(ranks))}" for ranks in ([*vanilla[1:], *own[1:]], mixed)]
    assert "vanilla's values and ResFormer's own use {} of 128 directions, V'_n uses {}:".format(*within) in WORDS


def test_quoted_lines_are_those_of_the_model():
    with open(os.path.join(REPO, "model.py"), encoding="utf-8") as f:
        lines = f.read().splitlines()
    quoted = [line for block in re.findall(r"```python\n(.*?)```", TEXT, flags=re.S) for line in block.splitlines()]
    assert len(quoted) > 15
    for line in quoted:
        assert line in lines
    inline = TEXT.partition("**4.")[2].partition("**5.")[0]  # the exercise that changes a line names what it replaces
    assert 'seen["v"].items()' in inline and any('{**seen["v"], self.layer: v}' in line for line in lines)


def test_tables_are_those_of_the_json():
    assert walk.renewed(TEXT, FOUND["tables"]) == TEXT
    assert sorted(re.findall(r"<!-- table: (\w+) -->", TEXT)) == sorted(FOUND["tables"])
    rows = sum(len(rows) + 1 for rows in FOUND["tables"].values())
    assert len([line for line in TEXT.splitlines() if line.startswith("|")]) == rows  # no table without a name


def test_pictures_are_there_small_and_all_shown():
    there = {name for name in os.listdir(DOCS) if name.endswith(".png")}
    assert there == {f"{name}.png" for name in walk.pictures(TEXT)}
    assert sum(os.path.getsize(os.path.join(DOCS, name)) for name in there) < 1_000_000


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXT):
        assert os.path.exists(os.path.join(DOCS, target)), target
    assert "(docs/walk.md)" in SECTION


def test_the_readme_lists_every_analysis_with_a_command_that_parses():
    rows = re.findall(r"^\| `python -m analysis\.(\w+)(.*?)` \| (.+) \|$", SECTION, flags=re.M)
    commands = {name[:-3] for name in os.listdir(os.path.join(REPO, "analysis")) if name.endswith(".py")}
    assert sorted(name for name, _, _ in rows) == sorted(commands - {
        "__init__", "common", "attention", "plot", "walk", "records", "claims"})
    for name, words, _ in rows:
        words = shlex.split(words)
        files = [w for w in words if w.endswith(".py")]
        assert all(w in files or w.startswith(("--", "out/quickstart", "results/")) for w in words)
        configure(importlib.import_module(f"analysis.{name}").Config, [*files, *(w for w in words if w.startswith("--"))])
