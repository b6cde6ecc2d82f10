"""
Rebuild docs/walk.md: run its commands as a reader would, then renew its pictures, its tables and docs/walk.json.

    python -m analysis.walk

About six minutes on two CPU cores; runs that are finished are left alone. The commands are those of the text itself, up to its
exercises. Each table is the one that follows a line <!-- table: NAME -->, and holds the numbers that the commands wrote to
out/. They depend a little on the machine and on Python's version, whose library is the corpus; the words around are not
rewritten, so read them again beside new numbers.
"""
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass

import torch
from PIL import Image  # matplotlib brings it

import train
from configurator import REPO, UserError, command, configure

WALK = os.path.join(REPO, "docs", "walk.md")
LESSON, OUT = "out/quickstart", "out/walk"  # where the text's commands train, and where its analyses write


@dataclass
class Config:
    pass


def commands(text):
    """The command lines of the text's bash blocks, each as words."""
    return [shlex.split(line) for block in re.findall(r"```bash\n(.*?)```", text, flags=re.S) for line in block.splitlines()]


def pictures(text):
    """Names of the pictures that the text shows, without .png."""
    return re.findall(r"!\[[^]]*\]\((\w+)\.png\)", text)


def tables(lesson, out):
    """{name: rows of cells, the head first} of every table, from what train.py wrote to lesson and the analyses to out."""
    def read(name, folder=out):
        with open(os.path.join(folder, name + ".json"), encoding="utf-8") as f:
            return json.load(f)

    def models(name):  # {system: result} of the first seed of each
        return {r["system"]: r for r in reversed(read(name)["models"].values())}

    def by_layer(name, columns):  # (title, system, format, key of a layer's numbers)
        found = models(name)
        layers = max((r["layers"] for r in found.values()), key=len)
        cells = {title: {x["layer"]: format(x[key], form) for x in found[system]["layers"]}
                 for title, system, form, key in columns}
        return [["layer n", *cells], *([str(x["layer"]), *(c.get(x["layer"], "") for c in cells.values())] for x in layers)]

    def columns(title, systems, form, key):
        return [(f"{title}, {s}", s, form, key) for s in systems]

    three, four = ("vanilla", "resformer", "svformer"), ("vanilla", "resformer", "resformer mixed", "svformer")
    level, similarity, mapping = read("concentration"), models("similarity"), models("mapping")["vanilla"]
    learned = next(iter(read("lambdas").values()))["layers"]
    found = {
        "concentration": by_layer("concentration", [*columns("entropy", three, ".3f", "entropy"),
                                                    *columns("share of token 1", three, ".4f", "first_importance")]),
        "mapping": [["layer n", "Eq 4", "Eq 6", "Eq 6'"]],
        "loss": [["run", "validation loss", "minus vanilla's"]],
        "similarity": [["after layer", *map(str, similarity["vanilla"]["layers"])]],
        "spectrum": by_layer("spectrum", [*columns("effective rank", four, ".1f", "effective_rank"),
                                          *columns("largest λ", four, ".1f", "largest")]),
        "kv_cache": [["run", "bytes per token", "of vanilla's", "tokens in 1 GB"]],
        "turn": [["run", "lowest difference", "at iteration", "last difference", "reaches 0 at iteration"]],
        "lambdas": [["layer n", "λ1, of V_1", "λ2, of V_n", "λ1 / λ2"]],
    }
    found["concentration"].append(
        ["uniform", *[f"{level['uniform_entropy']:.3f}"] * 3, *[f"{level['uniform_first_importance']:.4f}"] * 3])
    for i, n in enumerate(mapping["layers"]):
        found["mapping"].append([str(n), *(f"{mapping[k][i]:.3f}" for k in ("approximation", "identity", "identity_previous"))])
    for name, r in read("summary", lesson).items():
        found["loss"].append([name, f"{r['val_loss']['mean']:.4f}",
                              f"{r['rel_val_loss']['mean']:+.4f}" if r.get("rel_val_loss") else ""])
    for system, r in sorted(similarity.items()):
        found["similarity"].append([system, *(f"{x:.2f}" for x in r["similarity"])])
    for name, r in read("kv_cache")["systems"].items():
        found["kv_cache"].append(
            [name, f"{r['kv_bytes_per_token']:,.0f}", f"{r['of_vanilla']:.4f}", f"{r['longest_context']:,}"])
    for system, r in read("relative_loss").items():
        curve, point = r["curves"]["train"], r["critical_point"]
        low, at = min(zip(curve["mean"], curve["iteration"]))
        found["turn"].append([system, f"{low:+.3f}", f"{at:.0f}", f"{curve['mean'][-1]:+.3f}",
                              "-" if point["iteration"] is None else f"{point['iteration']:,.0f} ({point['kind']})"])
    for n, x in learned.items():
        found["lambdas"].append([n, *(f"{x[k]:.3f}" for k in ("lambda1", "lambda2", "ratio"))])
    return found


def markdown(rows):
    """A table of rows of cells, the head first, as Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]])


def renewed(text, found):
    """The text with the table after each <!-- table: NAME --> replaced. Raises UserError for a name that is not in found."""
    def table(match):
        if match[1] not in found:
            raise UserError(f"{WALK}: there is no table {match[1]!r}; there are {', '.join(found)}")
        return f"<!-- table: {match[1]} -->\n\n{markdown(found[match[1]])}\n\n"
    return re.sub(r"<!-- table: (\w+) -->\n\n(?:(?:\|.*\n)+\n)?", table, text)


def main():
    configure(Config, sys.argv[1:])
    os.chdir(REPO)
    with open(WALK, encoding="utf-8") as f:
        text = f.read()
    for words in commands(text.partition("## 6")[0]):
        print("\n$ " + shlex.join(words), flush=True)
        done = subprocess.run([sys.executable, *words[1:]])
        if done.returncode:
            raise UserError(f"{shlex.join(words)}: ended with code {done.returncode}")
    for name in pictures(text):
        with Image.open(os.path.join(OUT, name + ".png")) as image:
            image.convert("RGB").quantize(64).save(os.path.join("docs", name + ".png"), optimize=True)  # a third of the bytes
    found = tables(LESSON, OUT)
    train.write_json(os.path.join("docs", "walk.json"), dict(
        python=platform.python_version(), torch=torch.__version__, machine=platform.machine(), tables=found))
    train.write_whole(WALK, lambda f: f.write(renewed(text, found).encode()))
    print(f"\nwrote {WALK}, walk.json and {len(pictures(text))} pictures beside it")


if __name__ == "__main__":
    command(main)
