"""
How many directions the values use: eigenvalues of their second moment.

    python -m analysis.spectrum out/quickstart
    python -m analysis.spectrum out/quickstart --layer=4

Eq 12: (1/l) Σ_i v_i v_iᵀ = Σ_j λ_j w_j w_jᵀ over the l tokens of a window, uncentred, v with all key/value heads
concatenated. Eigenvalues are sorted in descending order, then averaged over windows. For the raw V_n = H_{n-1} W_n^V and for
V'_n, the mixed one that attention uses, where they differ (ResFormer). Where layers share values (SVFormer, CLA) they share a
spectrum: column "V of" names the layer that computes them.

Σ_j λ_j = mean ‖v‖², so eigenvalues show scale and shape together, and mixing or a larger W^V changes the scale. Beside them,
shape alone: λ_j / Σ λ, and the effective rank exp(-Σ p_j ln p_j) with p = λ / Σ λ, each of a window, then averaged.
"""
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from analysis import attention, common, plot
from configurator import UserError, at_least, command


@dataclass
class Config(common.ModelOptions):
    layer: int = 1  # the layer whose whole spectrum is kept and drawn; the others keep their largest, sum and rank


def spectrum(v):
    """Eigenvalues (B, d) of the second moment of v (B, l, d), descending, float64 on the CPU. Rounding noise is 0."""
    v = v.float()
    if v.device.type != "cuda":
        v = v.cpu()  # MPS has neither float64 nor eigvalsh
    v = v.double()
    # v vᵀ has the same nonzero eigenvalues as vᵀ v, and is smaller when the window is shorter than the values are wide
    moment = (v @ v.mT if v.size(1) < v.size(2) else v.mT @ v) / v.size(1)
    found = torch.linalg.eigvalsh(moment).flip(-1).cpu()
    found = found.masked_fill(found < 1e-12 * found[:, :1], 0)  # v is float32, and equal tokens have equal V_1
    return F.pad(found, (0, v.size(2) - found.size(1)))


def effective_rank(eigenvalues):
    """exp of the entropy of the normalised spectrum: (..., d) to (...). n equal eigenvalues give n."""
    return torch.special.entr(eigenvalues / eigenvalues.sum(-1, keepdim=True)).sum(-1).exp()


def measure(subject):
    """(sequences, {"raw": {layer: {...}}, "mixed": {...}}); mixed holds the layers that mix."""
    means, shape = attention.Means(), subject.shape

    def visit(n, t):
        for kind, measured in (("raw", n and shape.take("v", n) == n), ("mixed", n and shape.sources("v", n))):
            if measured:  # shared values are once, by the layer that computes them, and mixed ones where they differ from raw
                found = spectrum(t.raw_values if kind == "raw" else t.values)
                means.add((kind, n, "eigenvalues"), found)
                means.add((kind, n, "normalised"), found / found.sum(-1, keepdim=True))
                means.add((kind, n, "effective_rank"), effective_rank(found))

    subject.walk(visit)
    out = {"raw": {}, "mixed": {}}
    for kind, n in [("raw", n) for n in range(1, shape.n_layer + 1)] + [("mixed", n) for n in range(1, shape.n_layer + 1)]:
        of = shape.take("v", n) if kind == "raw" else n
        if (kind, of, "eigenvalues") in means:
            out[kind][n] = {"values_of": of, **{name: means[kind, of, name]
                                                for name in ("eigenvalues", "normalised", "effective_rank")}}
    return means.counts["raw", 1, "eigenvalues"], out


def main():
    def enough_layers(config, shape):
        if config.layer > shape.n_layer:
            raise UserError(f"it has {shape.n_layer} layers, and --layer={config.layer}; lower it")
    config, runs = attention.arguments(Config, sys.argv[1:], enough_layers)
    at_least(config, 1, "layer")
    results, rows = {}, []
    for subject in attention.subjects(config, runs):
        count, found = measure(subject)
        for kind in ("raw", "mixed"):
            if not found[kind]:
                continue
            name = subject.name + (" mixed" if kind == "mixed" else "")
            results[name] = result = {
                "system": subject.system + (" mixed" if kind == "mixed" else ""), "sequences": count,
                "layers": [{"layer": n, "values_of": x["values_of"], "largest": attention.rounded(x["eigenvalues"][0]),
                            "sum": attention.rounded(x["eigenvalues"].sum()),
                            "largest_share": attention.rounded(x["normalised"][0]),
                            "effective_rank": attention.rounded(x["effective_rank"])} for n, x in found[kind].items()]}
            if config.layer in found[kind]:
                result["spectrum"] = {key: attention.rounded(found[kind][config.layer][key].tolist())
                                      for key in ("eigenvalues", "normalised")}
            rows += [[name if i == 0 else "", x["layer"], x["values_of"] if kind == "raw" else "-", f"{x['largest']:.4g}",
                      f"{x['sum']:.4g}", f"{x['largest_share']:.4f}", f"{x['effective_rank']:.1f}"]
                     for i, x in enumerate(result["layers"])]

    def whole(key):  # a logarithmic axis has no place for zeros
        return attention.series(results, lambda r: None if "spectrum" not in r else list(zip(
            *((j, x) for j, x in enumerate(r["spectrum"][key], 1) if x > 0))))

    def by_layer(key):
        return attention.series(results, lambda r: ([x["layer"] for x in r["layers"]], [x[key] for x in r["layers"]]))

    common.write(
        config, runs, "spectrum", ["run", "layer", "V of", "largest λ", "Σ λ", "largest / Σ", "effective rank"], rows,
        {"length": config.length, "bin": config.bin, "layer": config.layer, "models": results},
        lambda path: plot.draw(path, [
            dict(series=whole("eigenvalues"), x="index j", y="eigenvalue λ_j (squared value units)", log="xy",
                 title=f"Spectrum of layer {config.layer}: scale and shape"),
            dict(series=whole("normalised"), x="index j", y="λ_j / Σ λ", log="xy",
                 title=f"Spectrum of layer {config.layer}: shape alone"),
            dict(series=by_layer("largest"), x="layer", y="largest eigenvalue (squared value units)", log="y",
                 marks=True, whole=True, title="Largest by layer: scale and shape"),
            dict(series=by_layer("effective_rank"), x="layer", y="effective rank (directions)", marks=True, whole=True,
                 title="Effective rank by layer: shape alone")],
            f"Second moment of the values (Eq 12) over {config.length} tokens",
            "Look for: larger eigenvalues at equal shape mean only longer values; a flatter spectrum and a higher effective "
            "rank mean that values use more directions."))


if __name__ == "__main__":
    command(main)
