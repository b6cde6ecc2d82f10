"""
How well the value residual stands in for cross-layer attention, on a trained baseline.

    python -m analysis.mapping out/quickstart

At each layer n >= 2, the cosine between the output of cross-layer attention to the previous layer m = n - 1,
    Eq 2     softmax(Q_n [K_n; K_m]ᵀ / √hd) [V_n; V_m],
and of
    Eq 4     A_n (V_n + V_m) / 2                             the approximation: Eq 2 with K_n in place of K_m
    Eq 6     A_n V_n + (V_1 + ... + V_{n-1}) / (n - 1)       identity mapping: earlier values bypass attention
    Eq 6'    A_n V_n + V_m                                   the same with the previous layer only, as Eq 2 has it
of a token's output before W^O, heads concatenated; then the mean over tokens and windows. The outputs are computed beside
the model, which itself goes on with A_n V_n. Only models whose layers all have their own, unmixed keys and values can be
asked: vanilla ones, with or without GQA.
"""
import dataclasses
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from analysis import attention, common, plot
from configurator import command
from model import GPTConfig, causal

SHAPE = ("block_size", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "n_ffn", "dropout", "rope_theta",
         "scaled_init")
NAMES = {"approximation": "Eq 4: half A (V_n + V_m)", "identity": "Eq 6: A V_n + mean of earlier V",
         "identity_previous": "Eq 6': A V_n + V_m"}


@dataclass
class Config(common.ModelOptions):
    pass


def why_not(shape):
    """Why mapping can't be asked of such a model, or nothing."""
    plain = GPTConfig(**{name: getattr(shape, name) for name in SHAPE})
    changed = [f"{f.name}={getattr(shape, f.name)}" for f in dataclasses.fields(shape)
               if getattr(shape, f.name) != getattr(plain, f.name)]
    if changed:
        return f"it needs a baseline with each layer's own keys and values, and this has {', '.join(changed)}"
    return "" if shape.n_layer > 1 else "it has one layer, and there is no previous one"


def attend(q, k, v, mask=None):
    """softmax(QKᵀ/√hd) V with equal numbers of heads: (B, heads, T, hd); causal unless mask says otherwise."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def cross_layer(q, k, v, k_m, v_m):
    """Eq 2: one causal softmax over both layers' keys. All (B, heads, T, hd)."""
    mask = causal(q.size(2), k.size(2), q.device)
    return attend(q, torch.cat((k, k_m), 2), torch.cat((v, v_m), 2), torch.cat((mask, mask), 1))


def cosine(a, b):
    """Of outputs (B, heads, T, hd), over concatenated heads, the mean over tokens: (B,)."""
    a, b = (x.transpose(1, 2).flatten(2) for x in (a, b))
    return F.cosine_similarity(a, b, dim=-1).mean(-1)


def measure(walk):
    """(sequences, {name: {layer: cosine with Eq 2}})"""
    means, past = attention.Means(), {}

    def visit(n, t):
        if n == 0:
            past.clear()
            return
        q = t.q.float()
        k, v = (x.float().repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (t.k, t.v))  # GQA
        if n > 1:
            k_m, v_m = past["k"], past["v"]
            cross, own = cross_layer(q, k, v, k_m, v_m), attend(q, k, v)
            means.add(("approximation", n), cosine(cross, attend(q, k, (v + v_m) / 2)))
            means.add(("identity", n), cosine(cross, own + past["sum"] / (n - 1)))
            means.add(("identity_previous", n), cosine(cross, own + v_m))
        past.update(k=k, v=v, sum=past.get("sum", 0) + v)

    walk(visit)
    layers = sorted({n for _, n in means.sums})
    return means.counts["identity", 2], {name: {n: attention.rounded(means[name, n]) for n in layers} for name in NAMES}


def main():
    config, runs = attention.arguments(Config, sys.argv[1:], lambda config, shape: why_not(shape))
    results = {}
    for subject in attention.subjects(config, runs):
        count, found = measure(subject.walk)
        results[subject.name] = {"system": subject.system, "sequences": count, "layers": list(found["identity"]),
                                 **{name: list(by_layer.values()) for name, by_layer in found.items()}}
    rows = [[name if i == 0 else "", n, *(f"{r[key][i]:.4f}" for key in NAMES)]
            for name, r in results.items() for i, n in enumerate(r["layers"])]
    lines = {}
    for key, label in NAMES.items():
        found = attention.series(results, lambda r, key=key: (r["layers"], r[key]))
        lines.update({label if len(found) == 1 else f"{system}, {label}": seeds for system, seeds in found.items()})
    common.write(
        config, runs, "mapping", ["run", "layer", "Eq 4", "Eq 6", "Eq 6'"], rows,
        {"length": config.length, "bin": config.bin, "compared": NAMES, "models": results},
        lambda path: plot.draw(path, [dict(
            series=lines, x="layer n", y="cosine with cross-layer attention (Eq 2)", marks=True, whole=True)],
            f"Stand-ins for cross-layer attention to layer m = n - 1, over {config.length} tokens",
            "Look for: in the paper, Eq 4 (one set of attention weights) stays close to Eq 2;\n"
            "identity mapping, where earlier values bypass attention, is far from it."))


if __name__ == "__main__":
    command(main)
