"""
Validation loss of checkpoints: nats per token, perplexity and bits per byte, of every source and their means.

    python -m analysis.evaluate out/vanilla out/resformer                                       # every window of every bin
    python -m analysis.evaluate out/resformer --stride=512                                      # more context per token
    torchrun --standalone --nproc_per_node=8 -m analysis.evaluate out/vanilla out/resformer
    python -m analysis.evaluate out/vanilla --weights=CommonCrawl:50,C4:20,Github:10,Book:5,ArXiv:5,Wikipedia:5,StackExchange:5

The paper's headline is the unweighted mean over its seven sources; the last command weighs them as its training mixture does
(Table 2). Both are means of losses: their perplexity is exp(mean). bits per byte = loss / ln 2 x tokens / bytes, where an
end-of-text token counts as a token and has no byte; it compares models of different tokenizers.
"""
import contextlib
import io
import math
import sys
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch.nn import functional as F
from tqdm import tqdm

import train
from analysis import common, plot
from configurator import UserError, at_least, command, configure
from prepare import spread


@dataclass
class Config(common.ModelOptions):
    fewest_sequences = 0
    bin: str = ""  # only this validation bin: val, or the name of a source; empty: all of them
    sequences: int = 0  # fixed windows per bin, spread evenly as in training; 0: all of them
    stride: int = 0  # sliding windows: each scores this many new tokens, with length - stride before them; 0: fixed windows
    weights: str = ""  # of the sources in the weighted mean, as CommonCrawl:50,C4:20; empty: their shares of the training data
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # of torch.distributed; auto: nccl on CUDA, gloo on a CPU


def sliding(tokens, length, stride):
    """
    [(first input token, how many of its last targets count)] of windows that move by stride and score each token but the
    first once: all targets of the first window, the new ones of the others. The last one ends with the bin, as long as they.
    """
    last = tokens - 1 - length
    starts = [*range(0, last, stride), last] if last >= 0 else []
    return [(s, length if not i else s - starts[i - 1]) for i, s in enumerate(starts)]


@torch.no_grad()
def bin_loss(model, bin_, config, world, desc=""):
    """(mean loss in nats, tokens scored) of a bin, or None when it is shorter than a window. Processes share the batches."""
    size = config.batch_size
    windows = sliding(bin_.tokens, config.length, config.stride) if config.stride else \
        [(w * config.length, config.length) for w in spread(bin_.windows(config.length), config.sequences or bin_.tokens)]
    total = torch.zeros(2, dtype=torch.float64)
    for i in tqdm(range(world.rank * size, len(windows), world.size * size), desc=desc, leave=False,
                  disable=True if world.rank else None):
        starts, counts = zip(*windows[i:i + size])
        ids = torch.from_numpy(bin_.read_at(starts, config.length)).to(config.device)
        with train.precision(config):
            logits = model.lm_head(model.features(ids[:, :-1]))
        nll = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none").view(len(starts), -1)
        new = torch.arange(config.length) >= config.length - torch.tensor(counts)[:, None]
        total += torch.tensor([nll.cpu().double()[new].sum().item(), sum(counts)], dtype=torch.float64)
    total = world.sum(total.to(config.device if config.device.startswith("cuda") else "cpu"))
    return ((total[0] / total[1]).item(), int(total[1])) if total[1] else None


def bytes_per_token(data, name):
    """Of a validation bin, from meta.json's counts; None for a folder without them, such as nanoGPT's."""
    sources = data.meta.get("sources", {})
    n_bytes = sum(c["val"]["bytes"] for s, c in sources.items() if name in (s, "val"))
    return n_bytes / data.val[name].tokens if n_bytes else None


def parse_weights(config, data):
    """{source: weight} of --weights, or the sources' training tokens. Raises UserError."""
    if not config.weights:
        return {s: c["train"]["tokens"] for s, c in data.meta.get("sources", {}).items()}
    try:
        weights = {n.strip().removeprefix("RedPajama"): float(w) for n, w in (p.split(":") for p in config.weights.split(","))}
        twice = len(weights) < config.weights.count(",") + 1
        if twice or not all(0 <= w < math.inf for w in weights.values()) or not sum(weights.values()):
            raise ValueError
    except ValueError:
        raise UserError(f"--weights={config.weights}: expected source:weight,source:weight, each source once, as "
                        "CommonCrawl:50,C4:20") from None
    if unknown := [s for s in weights if s not in data.val or s == "val"]:
        raise UserError(f"--weights: {data.path} has no source {', '.join(unknown)}, only "
                        f"{', '.join(s for s in data.val if s != 'val') or 'val'}")
    return weights


def means(bins, weights):
    """
    {"mean": numbers, "weighted": numbers} of bins = {name: {"loss": nats/token, "bits_per_byte": ...}} over its sources, all
    but val, equally and by weights (of any sum). None where there is nothing to average.
    """
    out = {}
    for kind, w in (("mean", dict.fromkeys(bins, 1)), ("weighted", weights)):
        w = {s: w[s] for s in bins if s != "val" and w.get(s)}
        columns = [[bins[s][key] for s in w] for key in ("loss", "bits_per_byte")]
        out[kind] = numbers(*(None if None in c else np.average(c, weights=list(w.values())) for c in columns)) if w else None
    return out


def numbers(loss, bits):
    """A loss (nats/token) beside its perplexity and bits per byte; None for what is unknown or JSON can't spell."""
    return dict(loss=train.finite(loss), perplexity=math.exp(loss) if loss is not None and loss < 700 else None,
                bits_per_byte=train.finite(bits))


def evaluate(run, config, world):
    """One run's {"bins": {name: numbers}, "mean": numbers, "weighted": numbers, ...}. Raises UserError."""
    data = common.open_data(config, run)
    if config.bin and config.bin not in data.val:
        raise UserError(f"--bin={config.bin}: {data.path} has {', '.join(data.val)}")
    weights, model, bins = parse_weights(config, data), run.model(config.device), {}
    for name in [config.bin] if config.bin else data.val:
        try:
            found = bin_loss(model, data.val[name], config, world, f"{run.name}: {name}")
        except torch.OutOfMemoryError:
            raise UserError(f"out of memory: lower --batch_size={config.batch_size} or --length={config.length}") from None
        if not found and not world.rank:
            print(f"{data.val[name].path}: left out: {data.val[name].tokens} tokens are no window of {config.length} + 1; "
                  "lower --length", file=sys.stderr)
        if found:
            per = bytes_per_token(data, name)
            bins[name] = dict(numbers(found[0], found[0] / math.log(2) / per if per else None), tokens=found[1],
                              bytes_per_token=per)
    if not bins:
        raise UserError(f"{data.path}: no validation bin has a window of {config.length} + 1 tokens; lower --length")
    weights = {s: w for s, w in weights.items() if w and s in bins}
    return dict(bins=bins, **means({} if config.bin else bins, weights), data=data.path, fingerprint=data.fingerprint,
                weights={s: w / sum(weights.values()) for s, w in weights.items()})


def picture(path, runs, results):
    """Loss by source, and the difference to the first system's run of the same seed (or else to the first run)."""
    series, differences, first = {}, {}, runs[0]
    for run in runs:
        mine, base = results[run.name], results[common.partner(run, runs).name]
        names = list(mine["bins"])
        series.setdefault(run.system, []).append((names, [mine["bins"][b]["loss"] for b in names]))
        if mine["fingerprint"] == base["fingerprint"]:
            differences.setdefault(run.system, []).append(
                (names, [mine["bins"][b]["loss"] - base["bins"][b]["loss"] for b in names]))
    panels = [dict(series=series, x="validation bin", y="loss (nats per token)", apart=True)]
    if len(differences) > 1:
        panels.append(dict(series=differences, x="validation bin", y=f"loss - {first.system}'s (nats per token)", apart=True,
                           zero=True))
    plot.draw(path, panels, "Validation loss by source",
              "Lower is better; compare systems on the same source, not sources with each other." + (
                  "\nThe runs have several tokenizers: only bits per byte, in the table, compare those."
                  if len({run.config["tokenizer"] for run in runs}) > 1 else "") + (
                  f"\nRight: below zero, a system is ahead of {first.system} on that source; a point per seed."
                  if len(differences) > 1 else ""))


def main():
    config = configure(Config, [a for a in sys.argv[1:] if a.startswith("-")])
    world = train.join_group(config)
    with train.one_voice(world, train.Signals(patience=5) if world.group else None):  # alone, Ctrl-C just ends it
        with contextlib.redirect_stderr(io.StringIO()) if world.rank else contextlib.nullcontext():  # said once is enough
            config, runs = common.arguments(Config, sys.argv[1:])
            at_least(config, 0, "stride", below=config.length + 1)
            if config.stride and config.sequences:
                raise UserError("--stride scores every token of a bin: leave --sequences out")
            found = common.usable(runs, lambda run: evaluate(run, config, world), "none of these runs could be evaluated")
        runs, results = [run for run, _ in found], {run.name: result for run, result in found}
        if world.rank == 0:
            rows = [[run.name, name, f"{n['tokens']:,}" if "tokens" in n else "",
                     *("-" if n[k] is None else f"{n[k]:.4f}" for k in ("loss", "perplexity", "bits_per_byte"))]
                    for run in runs for r in [results[run.name]]
                    for name, n in [*r["bins"].items(), ("mean of sources", r["mean"]), ("weighted mean", r["weighted"])] if n]
            common.write(config, runs, "evaluate", ["run", "bin", "tokens", "loss (nats/token)", "perplexity", "bits/byte"],
                         rows, dict(length=config.length, stride=config.stride, sequences=config.sequences, dtype=config.dtype,
                                    runs=results),
                         lambda path: picture(path, runs, results))
        world.barrier()  # a process that ends right after a sum can abort: gloo's thread may still hold its tensor
    if world.group:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    command(main)
