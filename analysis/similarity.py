"""
How alike the tokens' hidden states (or keys) are: their mean cosine by layer.

    python -m analysis.similarity out/quickstart --random=True
    python -m analysis.similarity --hf=models/llama --text=book.txt --length=512

Eq 13: s = 1 / (l (l-1)) Σ_i Σ_{j≠i} cos(h_i, h_j), over the l tokens of a window, then the mean over windows. Computed as
(‖Σ_i h_i / ‖h_i‖‖² - l) / (l (l-1)), without the l x l matrix. h is the hidden state after each layer, before any norm; layer
0 is the token embeddings. With --of=keys it is the key that attention uses, after RoPE: s of each key head, then the mean
over heads. High at random weights; the paper's Llama and Mistral draw an M over the layers.
"""
import sys
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F

from analysis import attention, common, plot
from configurator import UserError, command


@dataclass
class Config(attention.Options):
    of: Literal["hidden", "keys"] = "hidden"  # hidden states after each layer, or keys (mean over heads of their cosines)


def similarity(x):
    """Eq 13 of the vectors x (..., l, d): their off-diagonal mean cosine, float64 on the CPU (...)."""
    tokens = x.size(-2)
    total = F.normalize(x.float(), dim=-1).sum(-2).cpu().double()
    return (total.square().sum(-1) - tokens) / (tokens * (tokens - 1))


def measure(walk, of):
    """(sequences, {layer: similarity})"""
    means = attention.Means()

    def visit(n, t):
        if of == "hidden":
            means.add(n, similarity(t.hidden))
        elif n:
            means.add(n, similarity(t.k[:, :, :t.hidden.size(1)]).mean(1))  # Eq 2 adds another layer's keys behind

    walk(visit)
    return next(iter(means.counts.values())), {n: attention.rounded(means[n]) for n in means.sums}


def main():
    config, runs = attention.arguments(Config, sys.argv[1:])
    if config.hf and config.of == "keys":
        raise UserError(f"--of=keys: the keys of {config.hf} after RoPE are not at hand; leave --hf out, or use --of=hidden")
    results = {}
    for subject in attention.subjects(config, runs):
        count, layers = measure(subject.walk, config.of)
        results[subject.name] = {"system": subject.system, "sequences": count, "layers": list(layers),
                                 "similarity": list(layers.values())}
    columns = sorted({n for r in results.values() for n in r["layers"]})
    rows = [[name, *(f"{dict(zip(r['layers'], r['similarity']))[n]:.3f}" if n in r["layers"] else "-" for n in columns)]
            for name, r in results.items()]
    what = "hidden states after each layer (0: embeddings)" if config.of == "hidden" else "keys after RoPE (mean over heads)"
    common.write(
        config, runs, "similarity", ["run \\ layer", *map(str, columns)], rows,
        {"length": config.length, "bin": config.bin, "of": config.of, "models": results},
        lambda path: plot.draw(path, [dict(
            series=attention.series(results, lambda r: (r["layers"], r["similarity"])), x="layer",
            y="mean cosine between different tokens", zero=True, marks=True, whole=True)],
            f"Token similarity (Eq 13) over {config.length} tokens: {what}",
            "Look for: how alike tokens get with depth; with --random=True, what of it training undoes.\n"
            "In the paper large trained models draw an M over the layers."))


if __name__ == "__main__":
    command(main)
