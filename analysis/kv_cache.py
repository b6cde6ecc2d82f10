"""
Bytes of the key/value cache per token, and what fits a given memory.

    python -m analysis.kv_cache                                 # every system (config/systems.py) at every size of Table 4
    python -m analysis.kv_cache out/vanilla out/svformer --memory_gb=24

The bytes are those of a KVCache that was allocated, not of a formula: distinct storages on a CPU, the allocator's count on
CUDA. Decoding also needs the weights, which are subtracted from the memory, and some activations, which are not. The longest
context is what the memory holds: a model itself takes block_size tokens at most.
"""
import sys
from dataclasses import dataclass
from typing import Literal

import torch
from tqdm import tqdm

import train
from analysis import common, plot
from configurator import UserError, command, configure, override
from model import GPT, GPTConfig, KVCache

TOKENS = 512  # length of the cache that is measured: whole blocks of CUDA's allocator for every shape
SIZES = ("2M", "82M", "180M", "468M")


@dataclass
class Config(common.Options):
    memory_gb: float = 80.0  # memory of the device, in GB of 10^9 bytes
    length: int = 0  # context of the largest batch, in tokens; 0: each model's block_size
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"  # of the cache and of the weights
    device: str = "auto"  # where the cache is allocated: cuda, mps or cpu; auto: the first of these that is there


@dataclass
class System:
    name: str
    shape: GPTConfig


def systems():
    """
    config/systems.py's runs at the sizes of Table 4. The file is written for 82M's 8 heads: elsewhere its n_kv_head is taken
    in proportion, so that GQA2 stays two query heads per key/value head. What a size can't have is named and left out.
    """
    found = []
    for size in SIZES:
        base = configure(train.Config, [f"config/{size}.py", "config/systems.py"])
        for name, options in base.runs.items():
            system = System(f"{size}/{name}", None)
            heads = options.get("n_kv_head", 0) * base.n_head
            if heads % 8:
                common.skip(system, f"{base.n_head} heads can't share keys and values among {8 // options['n_kv_head']}")
                continue
            try:
                config = override(base, {**options, "n_kv_head": heads // 8}, name)
                system.shape = train.checked_model_config(config, 50304)
            except UserError as e:
                common.skip(system, str(e))
                continue
            found.append(system)
    return found


def measured(shape, device, dtype):
    """Bytes per token of a cache that is really allocated, batch 1."""
    if torch.device(device).type == "cuda":
        before = torch.cuda.memory_allocated(device)
        cache = KVCache(shape, 1, TOKENS, device, dtype)
        return (torch.cuda.memory_allocated(device) - before, cache)[0] / TOKENS
    storages = [b.untyped_storage() for b in KVCache(shape, 1, TOKENS, device, dtype).buffers.values()]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values()) / TOKENS  # buffers that share a storage count once


def row(shape, config):
    """The numbers of one system. Bytes; lengths in tokens; longest_context and largest_batch are 0 where nothing fits."""
    dtype = getattr(torch, config.dtype)
    mha = GPTConfig(n_layer=shape.n_layer, n_head=shape.n_head, n_embd=shape.n_embd)
    with torch.device("meta"):
        weights = GPT(shape).num_params() * dtype.itemsize
    per_token, length = measured(shape, config.device, dtype), config.length or shape.block_size
    free = max(0, config.memory_gb * 1e9 - weights)
    return dict(kv_bytes_per_token=per_token, of_vanilla=per_token / KVCache(mha, 1, 1, "meta", dtype).nbytes,
                weight_bytes=weights, longest_context=int(free / per_token), batch_length=length,
                largest_batch=int(free / (per_token * length)))


def main():
    config, runs = common.arguments(Config, sys.argv[1:], needs_runs=False)
    if not 0 < config.memory_gb < 1e9 or config.length < 0:
        raise UserError(f"--memory_gb={config.memory_gb}, --length={config.length}: expected more than 0 and less than 1e9 GB, "
                        "and at least 0 tokens")
    config.device = train.checked_device(config)
    found = runs or systems()
    rows = {s.name: row(s.shape, config) for s in tqdm(found, desc="systems", leave=False, disable=None)}
    longest = max(r["longest_context"] for r in rows.values())
    drawn, lengths = {}, [2 ** i for i in range(9, max(12, longest.bit_length()) + 1)]
    for name, r in rows.items():
        if runs or name.startswith("82M/"):
            drawn.setdefault(r["kv_bytes_per_token"], []).append(name.removeprefix("82M/") if not runs else name)
    series = {f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}":
              [(lengths, [b * n / 1e9 for n in lengths])] for b, names in sorted(drawn.items(), reverse=True)}
    series[f"memory: {config.memory_gb:g} GB"] = [(lengths, [config.memory_gb] * len(lengths))]
    common.write(
        config, runs, "kv_cache",
        ["system", f"KV bytes/token ({config.dtype})", "of vanilla", "weights (GB)",
         f"longest context in {config.memory_gb:g} GB", "largest batch", "at length"],
        [[name, f"{r['kv_bytes_per_token']:,.0f}", f"{r['of_vanilla']:.4f}", f"{r['weight_bytes'] / 1e9:.3f}",
          f"{r['longest_context']:,}", f"{r['largest_batch']:,}", f"{r['batch_length']:,}"] for name, r in rows.items()],
        dict(memory_gb=config.memory_gb, dtype=config.dtype, device=config.device, systems=rows),
        lambda path: plot.draw(path, [dict(series=series, x="context (tokens, batch 1)", y="KV cache (GB)", log="xy")],
                               "Memory of the KV cache" + ("" if runs else ", 82M"),
                               "Lower is better: the distance between two lines is the factor by which the cache shrinks.\n"
                               "A line meets the memory's where the cache alone fills it. Equal caches share a line."))


if __name__ == "__main__":
    command(main)
