"""
Where attention goes: the entropy of token importance, attention sinks, value-state drains and residual-state peaks.

    python -m analysis.concentration out/quickstart
    python -m analysis.concentration --hf=models/llama --text=book.txt --length=512

Token importance a'_i is the attention that token i receives: the mean over heads and the sum over queries, divided by the
length l. Its entropy is Eq 11, e = -Σ a'_i ln a'_i in nats; low: attention concentrates on few tokens. Causal attention that
is uniform already favours early tokens (2.623, 4.194, 5.794, 7.2025 nats at l = 20, 100, 500, 2048), so compare models at one
length, or by e divided by that. top i is the ith largest importance, top 1 % the (l / 100)th, rounded up.

The first token, by layer: its importance (a sink is large), the norm of its value over the mean norm of the others' (a drain
is small; for raw V_n and for V'_n, which is mixed; all heads concatenated) and the norm of its hidden state after the layer
over the mean norm of all (a peak is large). The paper's sequences share their first token. Windows of a bin begin anywhere.
All are means over sequences of each sequence's number (norms: of each position's). The JSON holds the first 100 positions.
"""
import math
import sys
from dataclasses import dataclass

import torch

from analysis import attention, common, plot
from configurator import command

POSITIONS = 100  # in the JSON


@dataclass
class Config(attention.Options):
    pass


def entropy(importance):
    """Eq 11 in nats, of importance (..., l) that sums to anything; float64 (...)."""
    share = importance.double()
    share = share / share.sum(-1, keepdim=True)
    return torch.special.entr(share).sum(-1)


def uniform(length):
    """Importance (l,) under uniform causal attention: a_i = Σ_{q >= i} 1/q; that of token 1 is the harmonic number."""
    return (1 / torch.arange(1, length + 1, dtype=torch.float64)).flip(0).cumsum(0).flip(0)


def ranks(length):
    """{name: i} of the top i that fit the length."""
    return {name: i for name, i in {"1": 1, "2": 2, "3": 3, "10": 10, "1%": math.ceil(length / 100)}.items() if i <= length}


def measure(walk, length):
    """One dict per layer, of numbers and of lists by position."""
    means, layers = attention.Means(), []

    def visit(n, t):
        if n:
            share = t.importance().cpu() / length
            means.add((n, "entropy"), entropy(share))
            means.add((n, "importance"), share)
            means.add((n, "sorted"), share.sort(-1, descending=True).values)
            for name, x in (("raw_value_norm", t.raw_values), ("value_norm", t.values), ("hidden_norm", t.hidden)):
                means.add((n, name), x.float().norm(dim=-1))

    walk(visit)
    while (len(layers) + 1, "entropy") in means:
        n = len(layers) + 1
        layer = {"layer": n, "entropy": means[n, "entropy"],
                 "entropy_ratio": means[n, "entropy"] / entropy(uniform(length)),
                 "first_importance": means[n, "importance"][0]}
        for name in ("raw_value_norm", "value_norm", "hidden_norm"):
            norms = means[n, name]
            layer[f"first_{name}"] = norms[0]
            layer[f"{'mean' if name == 'hidden_norm' else 'others'}_{name}"] = \
                norms.mean() if name == "hidden_norm" else norms[1:].mean()
        layer = {name: x if name == "layer" else attention.rounded(x) for name, x in layer.items()}
        layer["top"] = {name: attention.rounded(means[n, "sorted"][i - 1]) for name, i in ranks(length).items()}
        layer["positions"] = {name: attention.rounded(means[n, name][:POSITIONS].tolist())
                              for name in ("importance", "raw_value_norm", "value_norm", "hidden_norm")}
        layers.append(layer)
    return means.counts[1, "entropy"], layers


def main():
    config, runs = attention.arguments(Config, sys.argv[1:])
    results, length = {}, config.length
    for subject in attention.subjects(config, runs):
        count, layers = measure(subject.walk, length)
        results[subject.name] = {"system": subject.system, "sequences": count, "layers": layers}
    level, first = float(entropy(uniform(length))), float(uniform(length)[0] / length)
    head = ["run", "layer", "entropy", "/ uniform", *(f"top {i}" for i in ranks(length)), "a'_1",
            "drain V", "drain V'", "peak H"]
    rows = [[name if i == 0 else "", x["layer"], f"{x['entropy']:.3f}", f"{x['entropy_ratio']:.3f}",
             *(f"{top:.4f}" for top in x["top"].values()), f"{x['first_importance']:.4f}",
             *(f"{x[f'first_{k}_norm'] / x[f'{other}_{k}_norm']:.3f}" for k, other in
               (("raw_value", "others"), ("value", "others"), ("hidden", "mean")))]
            for name, result in results.items() for i, x in enumerate(result["layers"])]

    def lines(value):
        return attention.series(results, lambda r: ([x["layer"] for x in r["layers"]], [value(x) for x in r["layers"]]))

    deepest = max(len(r["layers"]) for r in results.values())

    def positions(value):
        """Over the first positions, of the layer where a sink would be: that whose token 1 gets the most attention."""
        def line(result):
            ys = value(max(result["layers"], key=lambda x: x["first_importance"])["positions"])
            return list(range(1, len(ys) + 1)), ys
        return attention.series(results, line)

    by_layer = dict(x="layer", marks=True, whole=True)
    by_position = dict(x="position, in the layer where token 1 gets most", log="x")

    def draw(path):
        plot.draw(path, [
            dict(series={**lines(lambda x: x["entropy"]), "uniform causal": [([1, deepest], [level, level])]},
                 y="entropy of token importance (nats)", title="Concentration: low", **by_layer),
            dict(series={**lines(lambda x: x["first_importance"]), "uniform causal": [([1, deepest], [first, first])]},
                 y="importance of token 1 (share of all attention)", title="Attention sink: high", **by_layer),
            dict(series=lines(lambda x: x["first_value_norm"] / x["others_value_norm"]),
                 y="value norm: token 1 / mean of the others", title="Value-state drain: below 1", **by_layer),
            dict(series=lines(lambda x: x["first_hidden_norm"] / x["mean_hidden_norm"]),
                 y="hidden norm: token 1 / mean of all", title="Residual-state peak: far above 1", **by_layer),
            dict(series=positions(lambda x: x["importance"]), y="importance (share of all attention)",
                 title="Sink by position: token 1 alone is high", **by_position),
            dict(series=positions(lambda x: x["value_norm"]), y="value norm", title="Drain by position: token 1 alone is low",
                 **by_position),
        ], f"Attention concentration over {length} tokens",
            "Look for: in the paper, vanilla's middle layers drop in entropy, give token 1 a large share and shrink its value; "
            "ResFormer's stay closer to uniform. Values are V', as attended to.")

    content = {"length": length, "bin": config.bin, "uniform_entropy": attention.rounded(level),
               "uniform_first_importance": attention.rounded(first), "ranks": ranks(length), "models": results}
    common.write(config, runs, "concentration", head, rows, content, draw)


if __name__ == "__main__":
    command(main)
