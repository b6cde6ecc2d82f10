"""
Step time, memory and model size of systems side by side, in one process on one device.

    python -m analysis.bench config/82M.py config/systems.py --runs=vanilla,identity,svformer

Each run of the config files is built, compiled (as train.py would) and timed on random tokens: forward, backward, clipping
and optimizer, one micro-step of batch_size windows a step. Prints a table with ratios to the first run, and writes
out_dir/bench.json with the device, versions and batch. Compare numbers of one file only: cards and loads differ.
"""
import dataclasses
import gc
import os
import statistics
import sys
import time

import torch

import train
from configurator import UserError, command, configure
from model import KVCache


@dataclasses.dataclass
class Config(train.Config):
    steps: int = 20  # timed steps; their median counts
    warm_steps: int = 5  # steps before, which compile and settle


def step_times(config):
    """(model, seconds of each timed step, seconds of compiling and warming up, peak bytes) of a resolved train.Config."""
    device = torch.device(config.device)
    model = train.build(config, train.checked_model_config(config, config.vocab_size or 50304))
    optimizer = model.configure_optimizers(config.weight_decay, config.learning_rate, (config.beta1, config.beta2))
    forward = torch.compile(model) if config.compile else model
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times, began = [], time.perf_counter()
    g = torch.Generator().manual_seed(config.seed)
    for i in range(config.warm_steps + config.steps):
        ids = torch.randint(model.config.vocab_size, (config.batch_size, config.block_size + 1), generator=g).to(device)
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        with train.precision(config):
            _, loss = forward(ids[:, :-1], ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        if i + 1 == config.warm_steps:
            warm = time.perf_counter() - began
    return model, times[config.warm_steps:], warm, torch.cuda.max_memory_allocated() if cuda else 0


def main():
    config = configure(Config, sys.argv[1:])
    if not config.runs:
        raise UserError("give a config file that defines runs, such as config/systems.py")
    torch.set_float32_matmul_precision("high")
    rows = {}
    for name, _, run in train.plan(config):
        run = train.resolve(run, train.World())
        torch._dynamo.reset()
        model, times, warm, memory = step_times(run)
        step, tokens = statistics.median(times), run.batch_size * run.block_size
        peak = train.peak_flops(torch.cuda.get_device_name()) if run.device.startswith("cuda") else None
        rows[name] = dict(
            tokens_per_s=tokens / step, step_s=step, step_s_spread=[min(times), max(times)], batch_size=run.batch_size,
            block_size=run.block_size, mfu=model.flops_per_token() * tokens / step / peak if peak else None,
            memory_bytes=memory, warm_up_s=warm, n_params=model.num_params(),
            kv_bytes_per_token=KVCache(model.config, 1, 1, "meta", torch.bfloat16).nbytes)
        first = next(iter(rows.values()))
        rows[name]["step_ratio"] = first["tokens_per_s"] / rows[name]["tokens_per_s"]
        r = rows[name]
        print(f"{name:24} {r['tokens_per_s']:>12,.0f} tokens/s  step x {r['step_ratio']:.3f}"
              + (f"  mfu {r['mfu']:.1%}" if peak else "") + f"  {memory / 2 ** 30:5.1f} GiB  {r['n_params']:,} parameters"
              + f"  {r['kv_bytes_per_token']:,} KV bytes/token  (warm-up {warm:.0f} s)", flush=True)
        del model
        gc.collect()
        if run.device.startswith("cuda"):
            torch.cuda.empty_cache()
    os.makedirs(config.out_dir, exist_ok=True)
    card = torch.cuda.get_device_name() if run.device.startswith("cuda") else run.device
    train.write_json(os.path.join(config.out_dir, "bench.json"), dict(
        device=card, torch=torch.__version__, dtype=run.dtype, compile=run.compile, command=" ".join(sys.argv[1:]), runs=rows))
    print(f"{card}, torch {torch.__version__}, {run.dtype}; wrote {config.out_dir}/bench.json")


if __name__ == "__main__":
    command(main)
