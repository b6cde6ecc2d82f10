"""
The learned mixing weights: by layer at the last evaluation, and over training.

    python -m analysis.lambdas out/v5_value_family

    learnable, plus   V'_n = λ_{n,1} V_1 + λ_{n,2} V_n          λ1, λ2 and their ratio
    dense             V'_n = Σ_{i<=n} λ_{n,i} V_i               the triangle; λ1 is the weight of V_1, λ2 that of V_n
    DenseFormer       H_n = Σ_{i<=n} α_{n,i} X_i                the triangle; λ1 is the weight of X_0, λ2 that of X_n

X_0 is the embedding, X_i the output of block i. Read from log.jsonl alone. Runs whose weights are fixed are left out.
"""
import math
import sys
from dataclasses import dataclass

import train
from analysis import common, plot
from configurator import command

KEYS = "lambda1", "lambda2", "ratio"


@dataclass
class Config(common.Options):
    pass


def triangle(alpha):
    """DenseFormer's flat weights as {layer n: {i: α_{n,i}}}, with i from 0 (the embedding) to n."""
    rows, at, n = {}, 0, 1
    while at < len(alpha):
        rows[n] = dict(enumerate(alpha[at:at + n + 1]))
        at, n = at + n + 1, n + 1
    return rows


def histories(run):
    """{kind: {iteration: {layer n: {i: weight}}}} of the weights that this run learns, from its evaluations."""
    c, found = run.shape, {}
    evals = sorted(run.log[1].items())
    if c.value_residual and c.value_mix in ("learnable", "plus", "dense"):
        found[c.value_mix] = {i: {int(n): {int(j): w for j, w in row.items()} for n, row in line["value_mix"].items()}
                              for i, line in evals if "value_mix" in line}
    if c.denseformer:
        found["denseformer"] = {i: triangle(line["alpha"]) for i, line in evals if "alpha" in line}
    return found


def reduced(kind, n, row):
    """
    (λ1, λ2, λ1/λ2) of layer n from {i: weight}. λ2: of its own V_n (X_n). λ1: of the first in a triangle, else of the source
    (of several, value_source=all: of all together). None for what is not finite.
    """
    first = row[min(row)] if kind in ("dense", "denseformer") else math.fsum(w for i, w in row.items() if i != n)
    return train.finite(first), train.finite(row[n]), train.finite(first / row[n]) if row[n] else None


def gaps(values):
    """The same for a picture, which leaves out what is nan."""
    return [math.nan if v is None else v for v in values]


def main():
    config, runs = common.arguments(Config, sys.argv[1:])
    rows, content = [], {}
    layers_of = {key: {} for key in KEYS}  # {key: {label: [(layers, values) of each seed]}}, at the last evaluation
    training = {}  # {label: (kind, seed, {layer: [(iterations, values)]})} of each system's first seed
    for run in common.logged(runs):
        found = histories(run)
        if not found:
            c = run.shape
            common.skip(run, f"its mixing weights are fixed (value_mix={c.value_mix})" if c.value_residual else
                        "it has no mixing weights (value_residual=False, denseformer=False)")
        for kind, history in found.items():
            if not history:
                common.skip(run, "its log has no evaluation yet")
                continue
            both = f" ({kind})" if len(found) > 1 else ""
            small = {i: {n: reduced(kind, n, row) for n, row in table.items()} for i, table in history.items()}
            last, its = max(history), list(history)
            layers = sorted(history[last])
            drawn = {} if run.system + both in training else training.setdefault(
                run.system + both, (kind, run.config["seed"], {}))[2]
            facts = content[run.name + both] = {"kind": kind, "iteration": last, "iterations": its, "layers": {}}
            for n in layers:
                row = sorted(history[last][n].items())
                whole = " ".join(f"{w:+.3f}" for _, w in row) if len(row) > 2 else ""
                cells = ["-" if x is None else f"{x:.4f}" for x in small[last][n]]
                rows.append([run.name + both, kind, last, n, *cells, whole])
                facts["layers"][n] = {
                    **dict(zip(KEYS, small[last][n])),
                    "weights": {i: train.finite(w) for i, w in row},
                    "training": {key: [small[i][n][k] for i in its] for k, key in enumerate(KEYS)}}
                key = "ratio" if kind in ("learnable", "plus") else "lambda1"
                drawn[f"layer {n}"] = [(its, gaps(facts["layers"][n]["training"][key]))]
            for k, key in enumerate(KEYS):
                if key != "ratio" or kind in ("learnable", "plus"):  # in a triangle, the own weight is one of many
                    layers_of[key].setdefault(run.system + both, []).append((layers, gaps(small[last][n][k] for n in layers)))
    if not rows:
        print("no run with learned weights: nothing to show")
        return
    panels = [dict(series=series, x="layer n", y=y, title="at the last evaluation", marks=True, whole=True) for series, y in (
        (layers_of["lambda1"], "λ1: of earlier V (DenseFormer: X_0)"), (layers_of["lambda2"], "λ2: weight of the own V_n"),
        (layers_of["ratio"], "λ1 / λ2")) if series]
    panels += [dict(series=series, x="iteration", title=f"{label}, seed {seed}", y={
        "dense": "weight of V_1", "denseformer": "weight of X_0, the embedding"}.get(kind, "λ1 / λ2"))
        for label, (kind, seed, series) in training.items()]
    common.write(
        config, runs, "lambdas", ["run", "kind", "iteration", "layer", "λ1", "λ2", "λ1/λ2", "weights, the first to the own"],
        rows, content, lambda path: plot.draw(
            path, panels, "Learned mixing weights (no unit)", "Look for: do deeper layers take more of V_1 (λ1 and λ1/λ2 that "
            "rise with n), and have the weights settled by the end of training?"))


if __name__ == "__main__":
    command(main)
