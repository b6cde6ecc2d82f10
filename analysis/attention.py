"""
What the analyses of attention share: a model passes over windows of text, and a function sees one layer's tensors at a time.

Nothing of size heads x T x T is ever held whole, and a layer's tensors are freed before the next layer's are computed, so
468M at length 2,048 fits in a few GB. Models are runs of train.py, or a transformers model (--hf).
"""
import contextlib
import dataclasses
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

import train
from analysis import common
from configurator import UserError
from model import GPTConfig, causal


@dataclass
class Options(common.ModelOptions):
    random: bool = False  # the runs' models before their first step, too
    hf: str = ""  # the folder of a Llama-like transformers model to measure, too; needs --text
    text: str = ""  # with --hf: a text file; windows of that model's tokens, each after its BOS token, are read from it


@dataclass
class Subject:
    name: str  # as tables show it
    system: str  # name without its seed
    shape: GPTConfig | None  # None: a transformers model
    walk: Callable  # walk(visit) as walk_gpt or walk_hf


def arguments(Config, argv, why_not=lambda config, shape: ""):
    """common.arguments, where --hf needs no run. Raises UserError, also for windows of one token."""
    hf = [a for a in argv if a.startswith("--hf=")]
    config, runs = common.arguments(Config, argv, not hf or hf[-1] == "--hf=", why_not)
    if getattr(config, "hf", ""):
        limit = getattr(load_hf(config, "AutoConfig"), "max_position_embeddings", 2048)
        if config.length > limit:
            raise UserError(f"--length={config.length}: {config.hf} has max_position_embeddings={limit}; give at most that")
        config = dataclasses.replace(config, length=config.length or min(limit, 2048))
        if not config.text:
            raise UserError("--hf needs --text=FILE, a text file to tokenize with that model's tokenizer")
    elif getattr(config, "text", ""):
        raise UserError(f"--text={config.text}: only a model given by --hf reads it; runs read the bins of --data")
    if config.length < 2:
        raise UserError(f"--length={config.length}: expected at least 2, since tokens are compared with each other")
    return config, runs


def subjects(config, runs):
    """
    Yields a Subject for each run (and for its random weights and for --hf, where config asks for them), one at a time.
    A run whose checkpoint is not its config's, or whose data lack the windows, is left out. Raises UserError when nothing is
    left.
    """
    def data_of(run):
        data = common.open_data(config, run)
        common.pick(config, data)
        return data
    found = bool(getattr(config, "hf", ""))
    for run, data in common.usable(runs, data_of, "none of these runs has data to measure on: give some with --data"):
        for random in (False, True) if getattr(config, "random", False) else (False,):
            try:
                model = run.model(config.device, random)
            except UserError as e:
                common.skip(run, e)
                break
            found, label = True, " (random)" if random else ""
            yield Subject(run.name + label, run.system + label, run.shape,
                          lambda visit, m=model, d=data, n=run.name + label: walk_gpt(config, m, d, visit, n))
    if not found:
        raise UserError("none of these runs can be used: train first, or give other folders")
    if getattr(config, "hf", ""):
        name = os.path.basename(os.path.abspath(config.hf))
        data, model = hf_data(config), load_hf(config, "AutoModelForCausalLM")
        yield Subject(name, name, None, lambda visit: walk_hf(config, model, data, visit, name))


@torch.inference_mode()
def walk_gpt(config, model, data, visit, desc=""):
    """
    Runs GPT model over the windows of data. For each batch, and in it for n = 0..L, calls visit(n, t) with
        t.hidden      (B, T, C)           H_n, the input of block n + 1 (for n = L: of the final norm); H_0: the embeddings
    and for n >= 1, all as this layer's attention used them: after RoPE, mixing and sharing,
        t.q           (B, n_head, T, hd)
        t.k, t.v      (B, kv_heads, S, hd)  S = T; 2T in Eq 2, whose second half is the other layer's
        t.values      (B, T, kv width)    V'_n, heads concatenated
        t.raw_values  (B, T, kv width)    V_n before mixing; where values are shared, the shared ones
        t.y           (B, T, C)           the attention's output before W^O
        t.importance  a function without arguments: (B, T), received's sum over queries
    visit must not keep what it does not need: tensors it drops are freed before the next layer.
    """
    c, held, first = model.config, {}, {}

    def probe(n, tensors):
        held.update(tensors)

    def seen(n, hidden):
        t = SimpleNamespace(hidden=hidden)
        if n:
            t.q, t.k, t.v, t.y, t.raw_values = (held.pop(name) for name in ("q", "k", "v", "y", "raw_v"))
            t.values = t.v[:, :, :hidden.size(1)].transpose(1, 2).flatten(2) if c.sources("v", n) else t.raw_values
            own = t.importance = partial(received, t.q, t.k)  # a closure over t would keep it until garbage is collected
            if c.attention_residual and n == 1:
                first["importance"] = own()
            elif c.attention_residual:  # the weights are (A_n + A_1) / 2, and importance is linear in them
                t.importance = lambda: (own() + first["importance"]) / 2
        visit(n, t)

    modules = [*model.transformer.h, model.transformer.ln_f]
    with hooks(config, modules, seen):
        for block in model.transformer.h:
            block.attn.probe = probe
        try:
            for ids in common.windows(config, data, desc):
                with train.precision(config):
                    model.features(ids)
        finally:
            for block in model.transformer.h:
                block.attn.probe = None


@contextlib.contextmanager
def hooks(config, modules, seen):
    """While open, seen(n, input) runs before the nth of modules (from 0) does, outside of autocast."""
    def hook(n):
        def before(module, args):
            with torch.autocast(torch.device(config.device).type, enabled=False):
                seen(n, args[0])
        return before
    handles = [m.register_forward_pre_hook(hook(n)) for n, m in enumerate(modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def received(q, k, budget=2**25):
    """
    Token importance before normalising (Eq 11's a): what each token receives of softmax(QKᵀ/√hd), causal; the mean over
    heads and the sum over queries, (B, T), which sums to T. q (B, n_head, T, hd), k (B, kv_heads, S, hd) with S = T, or 2T
    for the keys of two layers under one softmax (Eq 2), where a token's two shares are added.
    Float32, in blocks of queries of at most budget scores; the result does not depend on the blocks.
    """
    B, H, T, hd = q.shape
    k = k.float().unflatten(2, (-1, T)).unsqueeze(2)  # (B, kv_heads, 1, parts, T, hd)
    q = q.float().unflatten(1, (k.size(1), -1)).unsqueeze(3)  # (B, kv_heads, group, 1, T, hd)
    parts, total = k.size(3), torch.zeros(B, T, device=q.device)
    step = max(1, budget // (B * H * parts * T))
    for start in range(0, T, step):
        end = min(T, start + step)
        scores = q[..., start:end, :] @ k[..., :end, :].mT / math.sqrt(hd)  # (B, kv_heads, group, parts, end - start, end)
        scores = scores.masked_fill(~causal(end - start, end, q.device), -math.inf).transpose(3, 4)
        weights = scores.flatten(4).softmax(-1).unflatten(-1, (parts, end))
        total[:, :end] += weights.sum((1, 2, 3, 4)) / H
    return total


# ---- transformers models


def load_hf(config, kind):
    """The model or the config in --hf's folder; kind: the transformers class that loads it. Raises UserError."""
    try:
        import transformers
    except ImportError:
        raise UserError(f"--hf={config.hf} needs the package transformers: pip install transformers") from None
    if not os.path.isfile(os.path.join(config.hf, "config.json")):
        raise UserError(f"--hf={config.hf}: no folder with a config.json; give one that save_pretrained wrote")
    # only explicit attention returns its weights; the layers compute it one at a time
    options = {"attn_implementation": "eager"} if kind == "AutoModelForCausalLM" else {}
    try:
        loaded = getattr(transformers, kind).from_pretrained(config.hf, local_files_only=True, **options)
    except Exception as e:  # transformers raises whatever its parts raise
        reason = (str(e).strip().splitlines() or [""])[0]
        raise UserError(f"--hf={config.hf}: {kind} can't load it ({type(e).__name__}: {reason})") from None
    if kind != "AutoModelForCausalLM":
        return loaded
    decoder = getattr(loaded, "model", None)
    layers = getattr(decoder, "layers", [None])
    if not hasattr(decoder, "norm") or not all(hasattr(getattr(b, "self_attn", None), "v_proj") for b in layers):
        raise UserError(f"--hf={config.hf}: {type(loaded).__name__} is not built like Llama (model.layers[n].self_attn.v_proj "
                        "and model.norm); such models can't be measured")
    return loaded.to(config.device, getattr(torch, config.dtype)).eval()


class Text:
    """A text file as ids of a transformers tokenizer, in windows as prepare.Bin, each after the BOS token if there is one."""

    def __init__(self, path, tokenizer, vocab_size):
        try:
            with open(path, encoding="utf-8") as f:
                ids = tokenizer(f.read(), add_special_tokens=False, verbose=False)["input_ids"]
        except UnicodeDecodeError as e:
            raise UserError(f"--text={path}: not UTF-8 text ({e})") from None
        bos = tokenizer.bos_token_id
        self.path, self.ids, self.bos, self.tokens = path, np.array(ids, np.int64), [] if bos is None else [bos], len(ids)
        if max(ids + self.bos, default=0) >= vocab_size:
            raise UserError(f"--text={path}: the tokenizer gives the id {max(ids + self.bos)}, but the model has {vocab_size} "
                            "embeddings; they do not belong together")

    def windows(self, length):
        return max(0, (self.tokens - 1) // (length - len(self.bos)))

    def read(self, windows, length):
        step = length - len(self.bos)
        return np.stack([np.concatenate([self.bos, self.ids[w * step:(w + 1) * step + 1]]) for w in windows]).astype(np.int64)


def hf_data(config):
    """What common.windows reads for --hf. Raises UserError."""
    tokenizer, vocab_size = load_hf(config, "AutoTokenizer"), load_hf(config, "AutoConfig").vocab_size
    return SimpleNamespace(path=config.text, val={config.bin: Text(config.text, tokenizer, vocab_size)})


@torch.inference_mode()
def walk_hf(config, model, data, visit, desc=""):
    """
    As walk_gpt, for a Llama-like transformers model with attention "eager": t has hidden, importance, and values and
    raw_values, which are the same.
    """
    held = {}

    def attended(module, args, output):
        if not isinstance(output, tuple) or len(output) < 2 or output[1] is None:
            raise UserError(f"--hf={config.hf}: {type(module).__name__} does not return its attention weights")
        held["importance"] = output[1].float().mean(1).sum(1)  # (B, heads, T, T) of this layer only

    def projected(module, args, output):
        held["values"] = output

    def seen(n, hidden):
        t = SimpleNamespace(hidden=hidden.float())
        if n:
            importance, t.values = held.pop("importance"), held.pop("values")
            t.raw_values, t.importance = t.values, lambda: importance
        visit(n, t)

    layers = model.model.layers
    handles = [b.self_attn.register_forward_hook(attended) for b in layers]
    handles += [b.self_attn.v_proj.register_forward_hook(projected) for b in layers]
    try:
        with hooks(config, [*layers, model.model.norm], seen):
            for ids in common.windows(config, data, desc):
                model.model(ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()


# ---- output


class Means:
    """Means over sequences: add(key, x (B, ...)), then means[key], float64 (...)."""

    def __init__(self):
        self.sums, self.counts = {}, {}

    def add(self, key, x):
        self.sums[key] = self.sums.get(key, 0) + x.sum(0).cpu().double()
        self.counts[key] = self.counts.get(key, 0) + len(x)

    def __getitem__(self, key):
        return self.sums[key] / self.counts[key]

    def __contains__(self, key):
        return key in self.sums


def rounded(x):
    """A float, or a list of them, with 6 significant digits: for JSON."""
    return [rounded(y) for y in x] if isinstance(x, list) else float(f"{float(x):.6g}")


def series(results, line):
    """plot's series {system: [(xs, ys) per seed]} of results {name: {"system": ..., ...}}; line(result): (xs, ys) or None."""
    out = {}
    for result in results.values():
        if line(result) is not None:
            out.setdefault(result["system"], []).append(line(result))
    return out
