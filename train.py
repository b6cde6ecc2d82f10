"""
Train one model, or a list of runs against a baseline.

    python train.py config/quickstart.py                                     # vanilla, ResFormer, SVFormer on a CPU
    python train.py config/82M.py --data=slimpajama --value_residual=True --out_dir=out/resformer
    torchrun --standalone --nproc_per_node=8 train.py config/82M.py --data=slimpajama --out_dir=out/vanilla

The same command again continues where it stopped. A run writes to out_dir: config.json, log.jsonl (one line per iteration
and per evaluation) and ckpt.pt. A config file that defines runs = {name: {option: value}} trains each of them into
out_dir/name on the same batches, the first (or the one a run names as `baseline`) being the baseline, and ends with a
table, summary.json and relative_loss.png.
"""
import contextlib
import dataclasses
import datetime
import hashlib
import importlib
import itertools
import json
import math
import os
import re
import signal
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import kernels
import prepare
from analysis import plot
from configurator import REPO, UserError, at_least, command, configure, out_of_memory, override
from model import CHECKPOINT_VERSION, GPT, GPTConfig, KVCache, from_checkpoint, load_checkpoint, usable_device


@dataclass
class Config(GPTConfig):
    vocab_size: int = 0  # rows of the embedding and of the head; 0: the data's vocabulary rounded up to 64
    # data and run
    data: str = "builtin"  # a folder of bins, or its name in data/; builtin is prepared when it is missing
    out_dir: str = "out"  # where the run goes; with runs: the folder of their folders
    init_from: Literal["auto", "scratch", "resume"] = "auto"  # auto: resume when out_dir has a checkpoint
    runs: dict = field(default_factory=dict)  # a config file's {name: {option: value}}; --runs=a,b picks some of them
    seeds: str = ""  # with runs: repeat them with each of these, as 1337,1338,1339
    baseline: str = ""  # a run folder to subtract the loss of; inside runs: the name of another run
    rel_window: int = 100  # iterations of the centred moving average of the relative loss
    # batch and schedule
    batch_size: int = 32  # windows per process and micro-step
    tokens_per_iter: int = 0  # tokens of the whole batch; micro-steps are derived from it; 0: batch_size windows
    max_tokens_per_iter: int = 0  # halve each run's tokens_per_iter while it is larger and windows stay whole; 0: leave it
    max_iters: int = 10000  # iterations in all
    learning_rate: float = 6e-4  # the schedule's peak
    min_lr: float = 6e-5  # where the cosine ends
    warmup_iters: int = 120  # linear, from 1e-7 (Table 4 and the authors' scripts; the paper's text says 1,200)
    lr_decay_iters: int = 0  # iteration at which min_lr is reached; 0: max_iters
    decay_lr: bool = True  # False: learning_rate throughout
    weight_decay: float = 0.1  # on matrices, embedding and head too; not on norms and mixing weights
    beta1: float = 0.9  # AdamW's average of gradients
    beta2: float = 0.95  # AdamW's average of squared gradients
    grad_clip: float = 1.0  # largest norm of the gradient; 0: no clipping
    value_lr_scale: float = 1.0  # learning rate of the values' mixing weights, relative to the others
    seed: int = 1337  # of the initial weights, the data order and dropout
    max_bad_steps: int = 10  # stop after this many steps in a row without a finite loss and gradient (each is skipped)
    # evaluation and record
    eval_interval: int = 1000  # iterations between evaluations; each also saves ckpt.pt
    eval_iters: int = 20  # batches of batch_size fixed windows per validation bin
    eval_only: bool = False  # evaluate the checkpoint and leave
    log_interval: int = 10  # iterations between console lines; losses stay on the device in between
    sample_tokens: int = 0  # with runs: print a text of so many tokens from each at the end
    wandb_log: bool = False  # send the log's lines to Weights & Biases too (pip install wandb)
    tensorboard_log: bool = False  # write the log's lines for TensorBoard too, to out_dir (pip install tensorboard)
    # machine
    device: str = "auto"  # cuda, cuda:1, mps, cpu; auto: the first of these that is there
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: on CUDA bfloat16 or, without it, float16
    compile: bool | Literal["auto"] = "auto"  # torch.compile; auto: on CUDA only
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # of torch.distributed; auto: nccl on CUDA, gloo on a CPU
    fast: bool = True  # on CUDA: kernels.py, cuDNN's attention, with bfloat16 a residual stream of it; False: the plain paths
    activation_checkpointing: bool = False  # recompute each block in the backward pass: less memory, 13 % less speed at 82M


# Dense bf16 peak in FLOP/s by the device's whole name, for MFU = flops_per_token x tokens/s / peak. A device that is not
# here (a laptop's, a slice of a card) prints tokens/s only.
PEAKS = {r"H100 80GB HBM3|H100 SXM5?|H200|GH200 .*": 989e12, r"H100 NVL|H200 NVL": 835e12, r"H100 PCIe": 756e12,
         r"A100-(SXM4|PCIE)-\d+GB|A100 80GB PCIe": 312e12, r"L40S": 362e12, r"GeForce RTX 4090": 165e12,
         r"GeForce RTX 3090": 71e12}


def peak_flops(device_name):
    """The peak of this device, or None when it is not in the table."""
    name = device_name.removeprefix("NVIDIA ")
    return next((peak for pattern, peak in PEAKS.items() if re.fullmatch(pattern, name)), None)


# ---------------------------------------------------------------------------------------------------------------------
# Pure functions of (seed, iteration): the learning rate, the data order


def learning_rate(it, config):
    """Linear warmup from 1e-7 (reached: the peak, once, at warmup_iters), then cosine to min_lr (paper, 4.1)."""
    peak, low, warmup = config.learning_rate, config.min_lr, config.warmup_iters
    end = config.lr_decay_iters or config.max_iters
    if not config.decay_lr or it == warmup:
        return peak
    if it < warmup:
        first = min(1e-7, peak)
        return first + (peak - first) * it / warmup
    if it >= end:
        return low
    return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * (it - warmup) / (end - warmup)))


def shuffled(index, n, seed):
    """
    Elements index (int array) of a random permutation of 0..n-1, without a table of n entries: a Feistel network over
    the next even power of two, walked again while it leaves 0..n-1. Any corpus starts and resumes at once.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    low = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.SeedSequence(seed).generate_state(6, np.uint64)
    x = np.asarray(index, np.uint64).copy()
    todo = np.ones(x.shape, bool)
    while todo.any():
        left, right = x[todo] >> half, x[todo] & low
        for key in keys:
            mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)  # an odd constant spreads every bit upwards
            left, right = right, left ^ ((mixed ^ mixed >> np.uint64(29)) * key >> np.uint64(33) & low)
        x[todo] = left << half | right
        todo = x >= n
    return x.astype(np.int64)


def batch_windows(it, batch, n, seed):
    """The windows of iteration it: batch indices into n windows. Each epoch is a permutation of all n."""
    at = np.arange(it * batch, (it + 1) * batch)
    epochs = at // n
    return np.concatenate([shuffled(at[epochs == e] % n, n, [seed, int(e)]) for e in np.unique(epochs)])


class Loader:
    """Batches of one process, read ahead by one thread and copied to the device once: (micro_batch, block_size + 1)."""

    def __init__(self, train_bin, config, world, micro_batch, micro_steps, device):
        self.bin, self.config, self.world, self.device = train_bin, config, world, device
        self.micro_batch, self.micro_steps = micro_batch, micro_steps
        self.pool, self.ahead, self.waited = ThreadPoolExecutor(1), {}, 0.0

    def fetch(self, it, step):
        c, world = self.config, self.world
        batch = self.micro_batch * self.micro_steps * world.size
        windows = batch_windows(it, batch, self.bin.windows(c.block_size), c.seed)
        first = (step * world.size + world.rank) * self.micro_batch
        ids = torch.from_numpy(self.bin.read(windows[first:first + self.micro_batch], c.block_size))
        return ids.pin_memory() if self.device.type == "cuda" else ids

    def __call__(self, it, step):
        """The ids of micro-step `step` of iteration it, on the device; starts reading the next ones."""
        began = time.perf_counter()
        ready = self.ahead.pop((it, step), None)
        ids = ready.result() if ready else self.fetch(it, step)
        self.waited += time.perf_counter() - began
        after = (it, step + 1) if step + 1 < self.micro_steps else (it + 1, 0)
        self.ahead = {after: self.pool.submit(self.fetch, *after)}
        return ids.to(self.device, non_blocking=True)


# ---------------------------------------------------------------------------------------------------------------------
# The machine: processes, device, precision


@dataclass
class World:
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    group: bool = False  # torch.distributed is initialized

    def sum(self, tensor):
        if self.group:
            torch.distributed.all_reduce(tensor)
        return tensor

    def first(self, x):
        """Process 0's x, in all of them."""
        box = [x]
        if self.group:
            torch.distributed.broadcast_object_list(box)
        return box[0]

    def barrier(self):
        if self.group:
            torch.distributed.barrier()


def checked_device(config):
    """The device that config.device stands for on this machine. Raises UserError."""
    try:
        return usable_device(config.device)
    except ValueError as e:
        raise UserError(f"--device={config.device}: {e}") from None


def resolve(config, world):
    """The config with device, dtype, compile, tokens_per_iter and lr_decay_iters replaced by what their auto and 0 stand for
    on this machine. Raises UserError for values out of range."""
    at_least(config, 1, "block_size", "batch_size", "max_iters", "eval_interval", "eval_iters", "log_interval", "max_bad_steps",
             "rel_window")
    at_least(config, 0, "learning_rate", "min_lr", "warmup_iters", "lr_decay_iters", "weight_decay", "grad_clip",
             "tokens_per_iter", "max_tokens_per_iter", "value_lr_scale", "vocab_size", "sample_tokens")
    at_least(config, 0, "seed", below=1 << 63)
    if not config.out_dir:
        raise UserError("--out_dir= is empty: expected a folder")
    at_least(config, 0, "beta1", "beta2", "dropout", below=1)
    if config.min_lr > config.learning_rate and config.decay_lr:
        raise UserError(f"--learning_rate={config.learning_rate} --min_lr={config.min_lr}: the learning rate falls to min_lr, "
                        f"expected at most learning_rate; give a lower one, as --min_lr={config.learning_rate / 10:g}, or "
                        "--decay_lr=False")
    name = checked_device(config)
    device = torch.device(name)
    if device.type == "cuda" and world.group and device.index is None:
        name = f"cuda:{world.local_rank}"
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if device.type != "cuda" else "bfloat16" if torch.cuda.is_bf16_supported(False) else "float16"
    for option, module in (("tensorboard_log", "torch.utils.tensorboard"), ("wandb_log", "wandb")):
        try:
            if getattr(config, option):
                importlib.import_module(module)
        except ImportError:
            package = module.split(".")[-1]
            raise UserError(f"--{option}=True needs the package {package}: pip install {package}") from None
    if dtype == "float16" and device.type != "cuda":
        raise UserError("--dtype=float16: needs a CUDA device (its small range needs a gradient scaler); use bfloat16")
    tokens = config.tokens_per_iter or config.batch_size * config.block_size
    while tokens > config.max_tokens_per_iter > 0 and tokens % (2 * config.block_size) == 0:  # whole windows stay whole
        tokens //= 2
    return dataclasses.replace(
        config, device=name, dtype=dtype, compile=device.type == "cuda" if config.compile == "auto" else config.compile,
        tokens_per_iter=tokens,
        lr_decay_iters=config.lr_decay_iters or config.max_iters)


def check_value_lr_scale(*runs):
    """Raises UserError when it is set and none of these runs has weights for it; in a list, those without may share it."""
    scaled = [run for run in runs if run.value_lr_scale != 1]
    if scaled and not any(run.value_residual and run.value_mix not in ("identity", "constant") for run in scaled):
        raise UserError(f"--value_lr_scale={scaled[0].value_lr_scale}: is for learned weights of values, and there are none; "
                        "leave it out, or set value_residual=True and value_mix to learnable, plus or dense")


def micro_batches(config, world):
    """(windows per micro-step and process, micro-steps) of tokens_per_iter. Raises UserError that lists what divides."""
    windows, rest = divmod(config.tokens_per_iter, config.block_size)
    if rest or not windows:
        near = max(1, round(config.tokens_per_iter / config.block_size)) * config.block_size
        raise UserError(f"--tokens_per_iter={config.tokens_per_iter}: no multiple of block_size={config.block_size}; "
                        f"the nearest is {near}")
    each, rest = divmod(windows, world.size)
    if rest:
        fit = [n for n in range(1, windows + 1) if windows % n == 0]
        raise UserError(f"a batch of {windows} windows does not divide among {world.size} processes: start "
                        f"{', '.join(map(str, fit[:12]))} of them, or choose another --tokens_per_iter")
    micro = min(config.batch_size, each)
    if each % micro:
        fit = [n for n in range(1, each + 1) if each % n == 0]
        raise UserError(f"--batch_size={config.batch_size} does not divide the {each} windows of each process and iteration: "
                        f"choose one of {', '.join(map(str, fit))}")
    return micro, each // micro


@contextlib.contextmanager
def precision(config):
    """
    How forward passes are computed: autocast to config.dtype, and with config.fast on CUDA the fastest attention that fits,
    cuDNN's where it is there.
    """
    device_type = torch.device(config.device).type
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with contextlib.ExitStack() as stack:
        if config.dtype != "float32":
            stack.enter_context(torch.autocast(device_type, getattr(torch, config.dtype)))
        if device_type == "cuda" and config.fast:
            stack.enter_context(sdpa_kernel(order, set_priority=True))
        yield


def build(config, shape):
    """The GPT of a resolved config on its device, with the fast paths that it allows there."""
    model = GPT(shape, config.seed).to(config.device)
    model.activation_checkpointing = config.activation_checkpointing
    if config.fast and config.device.startswith("cuda") and config.dtype != "float16" and kernels.triton:
        use_kernels(model)  # float16 needs its scaled gradients rounded late, as the plain loss does
        model.stream_dtype = torch.bfloat16 if config.dtype == "bfloat16" else None
    return model


def use_kernels(model):
    """Replace the seams of model.py by kernels.py's equal paths."""
    model.head_loss = kernels.head_loss
    for block in model.transformer.h:
        block.attn.split_heads, block.mlp.swiglu = kernels.split_heads, kernels.swiglu


def checked_model_config(config, vocab_size):
    """GPTConfig of the options. Raises UserError with the reason when they make no sense."""
    options = {f.name: getattr(config, f.name) for f in dataclasses.fields(GPTConfig)}
    shape = GPTConfig(**{**options, "vocab_size": vocab_size})
    try:
        shape.check()
    except ValueError as e:
        raise UserError(f"model options: {e}") from None
    return shape


def open_data(config, world):
    """prepare.Data of config.data; the built-in corpus is made when it is missing. Raises UserError."""
    if config.data == "builtin" and not os.path.exists("builtin"):
        if world.rank == 0 and not os.path.exists("data/builtin/meta.json"):
            with prepare.locked("data", wait=True):  # another run may be making it
                if not os.path.exists("data/builtin/meta.json"):
                    prepare.prepare(prepare.Config(num_proc=1, out_dir="data/builtin"))
        world.barrier()
    data = prepare.Data(config.data)
    for name, b in (("train", data.train), ("val", data.val["val"])):
        if not b.windows(config.block_size):
            raise UserError(f"{b.path}: {b.tokens} tokens, but one window needs block_size + 1 = {config.block_size + 1}; "
                            f"lower --block_size or prepare more {name} text")
    if 0 < config.vocab_size < data.vocab_size:
        raise UserError(f"--vocab_size={config.vocab_size}: {data.path} was tokenized with {data.tokenizer}, whose ids go up "
                        f"to {data.vocab_size - 1}; use 0, or at least {data.vocab_size}")
    return data


# ---------------------------------------------------------------------------------------------------------------------
# The record: log.jsonl, ckpt.pt, and what is read back from them


def read_log(folder):
    """(training lines, evaluation lines), each {iteration: line}. A torn last line, of a killed run, is left out."""
    steps, evals = {}, {}
    with contextlib.suppress(FileNotFoundError), \
            open(os.path.join(folder, "log.jsonl"), encoding="utf-8", errors="replace") as f:
        for text in f:
            if text.endswith("\n"):
                try:
                    line = json.loads(text)
                    losses = [line["loss"]] if "loss" in line else [line["val_loss"], line["val_mean"], *line["val"].values()]
                    of = steps if "loss" in line else evals
                    if not all(x is None or type(x) in (int, float) for x in losses) or type(line["iter"]) is not int \
                            or line["iter"] <= next(reversed(of), -1):
                        raise ValueError("a loss is a number, or null where it is not finite; iterations go up")
                    of[line["iter"]] = line
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise UserError(f"{f.name}: holds a line that train.py did not write: {text[:60]!r}") from None
    return steps, evals


def write_whole(path, save):
    """save(file) to a temporary name, then rename: the file is either the old one or the new one, whole."""
    for attempt in itertools.count():
        try:
            with open(path + ".tmp", "wb") as f:
                save(f)
                f.flush()
                os.fsync(f.fileno())
            os.replace(path + ".tmp", path)
            return
        except (OSError, RuntimeError) as e:  # torch.save wraps a full disk in a RuntimeError
            with contextlib.suppress(OSError):
                os.remove(path + ".tmp")
            if attempt == 2:
                raise UserError(f"{path}: could not be written ({e}); is the disk full, or the file protected? One from before "
                                "is as it was. Mend it, then run the same command again to continue") from None
            time.sleep(1)  # a network disk's hiccup must not end a long run


def fingerprint(folder, names):
    """Of the folder's files of these names: records may be from different versions of them."""
    digest = hashlib.sha256()
    for name in names:
        with open(os.path.join(folder, name), "rb") as f:
            digest.update(f.read())
    return digest.hexdigest()[:12]


def code():
    """The fingerprint of the files that decide what a run computes."""
    return fingerprint(REPO, ("model.py", "kernels.py", "prepare.py", "train.py"))


def write_json(path, content):
    write_whole(path, lambda f: f.write((json.dumps(content, indent=1) + "\n").encode()))


def write_log(folder, steps, evals):
    """A whole log.jsonl, in order: an evaluation at iteration i comes before the training line i."""
    lines = sorted([*evals.values(), *steps.values()], key=lambda line: (line["iter"], "loss" in line))
    write_whole(os.path.join(folder, "log.jsonl"), lambda f: f.write("".join(json.dumps(x) + "\n" for x in lines).encode()))


def finite(x):
    """x, or None where it is no number, which JSON can't spell."""
    return x if x is not None and math.isfinite(x) else None


def show(x):
    return "not finite" if x is None else f"{x:.4f}"


def relative(line, base, before=None):
    """
    The line with rel_loss or rel_val_loss, its loss minus the baseline's at that iteration, where both are finite and had the
    same learning rate and tokens (one of them may have been resumed with another schedule), or without it. base: the baseline's
    (training lines, evaluation lines); before: of an evaluation, the training line before it.
    """
    i, key = line["iter"], "loss" if "loss" in line else "val_loss"
    own, there = (line, base[0].get(i, {})) if key == "loss" else (before or {}, base[0].get(i - 1, {}))
    other = base[key == "val_loss"].get(i, {}).get(key)
    line = {k: v for k, v in line.items() if k not in ("rel_loss", "rel_val_loss")}
    if None not in (other, line[key]) and all(own.get(k) == there.get(k) for k in ("lr", "tokens")):
        line[f"rel_{key}"] = line[key] - other
    return line


def all_relative(log, base):
    """
    relative of every line of a log, as read_log returns it. Differences to lines that the baseline lacks (it may have begun
    again, or be gone) stay as they are, where no other one says that they were to another baseline.
    """
    def difference(line):
        return {k: line[k] for k in ("rel_loss", "rel_val_loss") if k in line}
    new = tuple({i: relative(x, base, log[0].get(i - 1)) for i, x in of.items()} for of in log)
    if all(difference(x) in ({}, difference(new[j][i])) for j, of in enumerate(log) for i, x in of.items() if i in base[j]):
        new = tuple({i: new[j][i] if i in base[j] else x for i, x in of.items()} for j, of in enumerate(log))
    return new


def fill_relative(folder, baseline):
    """Makes the logged differences those to this baseline, which may not have been finished while the run went on."""
    log = read_log(folder)
    if (filled := all_relative(log, read_log(baseline))) != log:
        write_log(folder, *filled)


def comparable(config, data):
    """What must be equal for losses at the same iteration to be of the same text at the same point of a schedule."""
    names = ("block_size", "tokens_per_iter", "seed", "learning_rate", "min_lr", "warmup_iters", "lr_decay_iters", "decay_lr")
    return {**{n: getattr(config, n) for n in names}, "data": data.fingerprint,
            "eval_iters x batch_size": config.eval_iters * config.batch_size}


def same(theirs, mine, folder):
    """Raises UserError with the names of what differs between two comparable() dicts."""
    differs = [f"{k} ({theirs.get(k)} there, {v} here)" for k, v in mine.items() if theirs.get(k) != v]
    if differs:
        follows = " (max_iters unless given: continue the baseline first)" if differs[0].startswith("lr_decay_iters") else ""
        raise UserError(f"baseline {folder} is not comparable: {', '.join(differs)}{follows}; make them equal, or train "
                        "a baseline")


def check_baseline(config, data, folder):
    """Raises UserError when this run can't be compared with the one in folder."""
    path = os.path.join(folder, "config.json")
    try:
        with open(path, encoding="utf-8") as f:
            theirs = json.load(f)["comparable"]
        os.stat(path := os.path.join(folder, "log.jsonl"))
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"--baseline={folder}: {path} is missing or not written by train.py; give the folder of one run, with "
                        "its config.json and log.jsonl") from None
    same(theirs, comparable(config, data), folder)


def smooth(x, y, window):
    """Centred moving average: the window's mean x and mean y, len(y) - window + 1 points (fewer than window: one)."""
    window = max(1, min(window, len(y)))
    return [np.convolve(np.asarray(a, float), np.full(window, 1 / window), mode="valid") if len(y) else np.empty(0)
            for a in (x, y)]


# ---------------------------------------------------------------------------------------------------------------------
# One run


def open_boards(config, first):
    """Functions that each take a line of the log, for the boards asked for. log.jsonl stays the record."""
    boards = []
    if config.tensorboard_log:
        from torch.utils.tensorboard import SummaryWriter
        writer = SummaryWriter(config.out_dir, purge_step=first)  # a killed run may have written beyond its checkpoint

        def to_tensorboard(line):
            for key, value in line.items():
                if key != "iter" and isinstance(value, (int, float)):
                    writer.add_scalar(key, value, line["iter"])
            if "val_loss" in line:
                writer.flush()
        boards.append(to_tensorboard)
    if config.wandb_log:
        import wandb
        run = wandb.init(project="nanoResFormer", name=config.out_dir, dir=config.out_dir, reinit="create_new",
                         config={k: v for k, v in dataclasses.asdict(config).items() if k != "runs"})
        boards.append(lambda line: run.log({k: v for k, v in line.items() if k != "iter"}, step=line["iter"]))
    return boards


class Run:
    """Everything of one run that is alive: model, optimizer, scaler, log. Made from scratch or from out_dir's checkpoint."""

    def __init__(self, config, data, world, signals):
        self.config, self.data, self.world, self.signals = config, data, world, signals
        self.device = torch.device(config.device)
        self.folder, self.path = config.out_dir, os.path.join(config.out_dir, "ckpt.pt")
        self.shape = checked_model_config(config, config.vocab_size or -(-data.vocab_size // 64) * 64)
        self.micro_batch, self.micro_steps = micro_batches(config, world)
        self.iter, self.val_loss, self.bad, self.last = 0, None, 0, None  # last: the training line before this iteration
        ckpt = self.load()
        self.model = build(config, self.shape)
        if ckpt:
            try:
                self.model.restore(ckpt["model"])
            except ValueError as e:
                raise UserError(f"{self.path}: {e}") from None
        self.optimizer = self.model.configure_optimizers(config.weight_decay, config.learning_rate,
                                                         (config.beta1, config.beta2), config.value_lr_scale)
        self.scaler = torch.amp.GradScaler("cuda") if config.dtype == "float16" else None
        if ckpt:
            self.check_optimizer(ckpt["optimizer"])
            own = self.optimizer.state_dict()["param_groups"]  # this command's options count, not the checkpoint's
            state = ckpt["optimizer"]["state"]
            if self.device.type == "cpu":  # where it would stay in the mapped file, which the next save replaces
                state = {i: {k: v.clone() for k, v in moments.items()} for i, moments in state.items()}
            self.optimizer.load_state_dict({"state": state, "param_groups": own})
            if self.scaler and ckpt["scaler"]:
                self.scaler.load_state_dict(ckpt["scaler"])
            self.iter, self.bad = ckpt["iter"], ckpt["bad_steps"]
        there = world.first(self.iter)
        if there != self.iter:
            raise UserError(f"{self.path}: process {world.rank} would begin at iteration {self.iter} and process 0 at {there}: "
                            "all machines need the same --out_dir, on a disk that all of them see")
        self.forward = self.model
        self.pending = []

    def check_optimizer(self, state):
        """Raises UserError when a checkpoint's optimizer state is not this model's."""
        groups = self.optimizer.param_groups
        params = [p for group in groups for p in group["params"]]
        try:
            whole = [len(g["params"]) for g in state["param_groups"]] == [len(g["params"]) for g in groups] and all(
                moments[k].shape == params[i].shape for i, moments in state["state"].items() for k in ("exp_avg", "exp_avg_sq"))
        except (KeyError, TypeError, IndexError, AttributeError):
            whole = False
        if not whole:
            raise UserError(f"{self.path}: its optimizer state is damaged or of another model; restore the file, or "
                            "--init_from=scratch to start over")

    def load(self):
        """out_dir's checkpoint as a dict, or None. Refuses one of another model, data or seed; prints what else differs."""
        config = self.config
        if config.init_from == "scratch" or not os.path.exists(self.path):
            return None
        try:
            ckpt = load_checkpoint(self.path)
        except ValueError as e:
            raise UserError(f"{e}") from None
        way_out = "choose another --out_dir, or --init_from=scratch to start over"
        mine, theirs = dataclasses.asdict(self.shape), {**dataclasses.asdict(GPTConfig()), **ckpt["model_config"]}
        differs = [f"{k} ({theirs[k]} there, {v} here)" for k, v in mine.items() if theirs[k] != v]
        if differs:
            raise UserError(f"{self.path} is of another model: {', '.join(differs)}; {way_out}")
        kinds = dict(optimizer=dict, scaler=dict, iter=int, config=dict, data=dict, bad_steps=int)
        wrong = [k for k, kind in kinds.items() if not isinstance(ckpt.get(k), kind)]
        if wrong or "seed" not in ckpt["config"] or "fingerprint" not in ckpt["data"]:
            raise UserError(f"{self.path}: lacks {', '.join(wrong) or 'its seed or data'}; damaged, or not written by "
                            "train.py: restore it, or --init_from=scratch to start over")
        if ckpt["data"]["fingerprint"] != self.data.fingerprint:
            raise UserError(f"{self.path} was trained on other data than {self.data.path}: {way_out}")
        if ckpt["config"]["seed"] != config.seed:
            raise UserError(f"{self.path} has seed={ckpt['config']['seed']}, not {config.seed}: {way_out}")
        changed = [f"{k} {ckpt['config'][k]} -> {v}" for k, v in self.plain_config().items()
                   if k in ckpt["config"] and ckpt["config"][k] != v and k not in ("out_dir", "init_from", "eval_only")]
        if changed:
            self.say(f"options that are not the checkpoint's: {', '.join(changed)}")
        if any(x.startswith("tokens_per_iter ") for x in changed):
            self.say("the data order from here on is that of the new batch; some windows may come again before the epoch ends")
        return ckpt

    def plain_config(self):
        return {k: v for k, v in dataclasses.asdict(self.config).items() if k != "runs"}

    def say(self, text):
        if self.world.rank == 0:
            print(text, flush=True)

    def save(self):
        """ckpt.pt, whole or not at all, after the log it belongs to is on disk. Raises UserError for weights gone bad."""
        self.flush()
        if not torch.stack([p.isfinite().all() for p in self.model.parameters()]).all():
            raise UserError(f"iteration {self.iter}: weights are not finite any more; nothing was saved, so that a checkpoint "
                            f"from before ({self.path}) stays. Lower --learning_rate, or look at the data")
        if self.world.rank:
            return
        self.signals.saving = True
        self.log.flush()
        os.fsync(self.log.fileno())
        began = time.perf_counter()
        content = dict(
            version=CHECKPOINT_VERSION, model=self.model.state_dict(), optimizer=self.optimizer.state_dict(),
            scaler=self.scaler.state_dict() if self.scaler else {}, iter=self.iter, model_config=dataclasses.asdict(self.shape),
            config=self.plain_config(), val_loss=self.val_loss, bad_steps=self.bad,
            data=dict(fingerprint=self.data.fingerprint, tokenizer=self.data.tokenizer, vocab_size=self.data.vocab_size,
                      eot=self.data.eot))
        write_whole(self.path, lambda f: torch.save(content, f))
        self.signals.saving = False
        self.say(f"saved {self.path}, {os.path.getsize(self.path) / 2 ** 20:,.0f} MiB ({time.perf_counter() - began:.1f} s)")

    def start_log(self):
        """config.json, and log.jsonl cut back to the checkpoint. Returns the evaluation already logged at this iteration."""
        config, steps, evals = self.config, {}, {}
        if self.iter:
            steps, evals = read_log(self.folder)
            if set(range(self.iter)) - set(steps):
                raise UserError(f"{self.folder}/log.jsonl: lacks training lines before iteration {self.iter}, where ckpt.pt "
                                "continues; restore it, or --init_from=scratch to start over")
        self.base = read_log(config.baseline) if config.baseline else ({}, {})
        self.last = steps.get(self.iter - 1)
        self.first, self.tokens = self.iter, steps[self.iter - 1]["tokens"] if self.iter else 0
        done = evals.get(self.iter)
        self.val_loss = done["val_loss"] if done else None
        if self.world.rank:
            return done
        write_log(self.folder, *all_relative(({i: x for i, x in steps.items() if i < self.iter},
                                              {i: x for i, x in evals.items() if i <= self.iter}), self.base))
        self.log = open(os.path.join(self.folder, "log.jsonl"), "a", encoding="utf-8")
        self.boards = open_boards(config, self.iter)
        write_json(os.path.join(self.folder, "config.json"), {
            **self.plain_config(), "vocab_size": self.shape.vocab_size, "comparable": comparable(config, self.data),
            "tokenizer": self.data.tokenizer, "n_params": self.model.num_params(),
            "n_params_non_embedding": self.model.num_params(non_embedding=True),
            "kv_bytes_per_token": KVCache(self.shape, 1, 1, "meta", torch.bfloat16).nbytes,
            "flops_per_token": self.model.flops_per_token(), "micro_batch": self.micro_batch, "micro_steps": self.micro_steps,
            "processes": self.world.size, "torch": torch.__version__, "code": code()})
        return done

    def flush(self):
        """
        Bring the losses kept on the device to log.jsonl, a line per iteration. Raises UserError after max_bad_steps in a row
        without a finite loss and gradient.
        """
        if not self.pending:
            return
        its, rates, values = zip(*self.pending)
        self.pending = []
        rows = torch.stack(values).tolist()  # the one wait for the device between two console lines
        seconds, self.clock = time.perf_counter() - self.clock, time.perf_counter()
        speed = len(its) * self.config.tokens_per_iter / seconds
        peak = peak_flops(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None
        longest = 0
        for it, lr, (loss, norm, bad, _) in zip(its, rates, rows):
            line = {"iter": it, "loss": finite(loss), "lr": lr, "grad_norm": finite(norm),
                    "tokens": self.tokens + (it + 1 - self.first) * self.config.tokens_per_iter,
                    "tokens_per_s": speed, "data_wait": self.loader.waited / seconds}
            if peak:
                line["mfu"] = self.model.flops_per_token() * speed / (peak * self.world.size)
            self.bad = self.bad + 1 if bad else 0
            longest = max(longest, self.bad)
            if bad:
                line["skipped"] = True
            self.last = line = relative(line, self.base)
            self.record(line)
        if self.world.rank == 0:
            self.log.flush()
            left = (self.config.max_iters - its[-1] - 1) * seconds / len(its)
            self.say(f"iter {line['iter']}: loss {show(line['loss'])}"
                     + (f", rel {line['rel_loss']:+.4f}" if "rel_loss" in line else "")
                     + f", lr {line['lr']:.2e}, {speed:,.0f} tokens/s" + (f", mfu {line['mfu']:.1%}" if peak else "")
                     + f", {int(left // 60)}m{int(left % 60):02d}s left" + (", step skipped" if bad else ""))
        self.loader.waited, self.asked_to_stop = 0.0, any(row[3] for row in rows)
        if longest >= self.config.max_bad_steps:
            raise UserError(f"iteration {its[-1]}: {longest} steps in a row without a finite loss and gradient; the last "
                            f"checkpoint ({self.path}) is intact. Lower --learning_rate, or look at the data")

    def record(self, line):
        if self.world.rank == 0:
            self.log.write(json.dumps(line) + "\n")
            for board in self.boards:
                board(line)

    def evaluate(self):
        """
        Mean loss over fixed, evenly spaced windows of every validation bin that has any: {bin: nats per token}.
        Processes share the batches; a last, partial batch is filled up with ignored targets, so one shape serves all.
        """
        config, losses, size = self.config, {}, self.micro_batch
        self.model.eval()
        for name, b in self.data.val.items():
            windows = prepare.spread(b.windows(config.block_size), config.eval_iters * config.batch_size)
            total = torch.zeros(2, dtype=torch.float64)
            for i in range(self.world.rank * size, len(windows), self.world.size * size):
                part = windows[i:i + size]
                ids = torch.from_numpy(b.read(np.resize(part, size), config.block_size)).to(self.device)
                targets = ids[:, 1:].clone()
                targets[len(part):] = -100
                with precision(config):
                    _, loss = self.forward(ids[:, :-1], targets)
                total += torch.tensor([loss.item() * len(part), len(part)], dtype=torch.float64)
                self.signals.beats += 1
            total = self.world.sum(total.to(self.device if self.device.type == "cuda" else "cpu"))
            if len(windows):
                losses[name] = (total[0] / total[1]).item()
        self.model.train()
        return losses

    @torch.no_grad()
    def log_evaluation(self):
        began = time.perf_counter()
        losses = {name: finite(loss) for name, loss in self.evaluate().items()}
        val, seconds = losses.pop("val"), time.perf_counter() - began
        line = {"iter": self.iter, "val_loss": val, "val": losses,
                "val_mean": None if None in losses.values() else statistics.fmean(losses.values()) if losses else val}
        if self.model.value_mix is not None:
            line["value_mix"] = {n: {i: float(w) for i, w in row.items()} for n, row in self.model.value_mix().items()}
        if self.model.alpha is not None:
            line["alpha"] = self.model.alpha.tolist()
        line = relative(line, self.base, self.last)
        self.val_loss, line["eval_s"] = val, seconds
        self.say(f"iter {self.iter}: val loss {show(val)}, mean over sources {show(line['val_mean'])}"
                 + (f", rel {line['rel_val_loss']:+.4f}" if "rel_val_loss" in line else "") + f" ({seconds:.1f} s)")
        if not self.config.eval_only:
            self.record(line)

    def prepare_step(self):
        """torch.compile and DDP around the model; where compiling cannot work, says so and goes on without."""
        config = self.config
        if config.compile:
            self.say("compiling the model (a minute or so) ...")
            try:
                compiled = torch.compile(self.model)
                with precision(config):
                    ids = torch.zeros(self.micro_batch, config.block_size + 1, dtype=torch.int64, device=self.device)
                    compiled(ids[:, :-1], ids[:, 1:])[1].backward()
                self.forward = compiled
            except Exception as e:  # no C++ compiler, an old GPU, a platform without Triton: all kinds of errors
                self.say(f"torch.compile does not work here ({type(e).__name__}: {str(e).strip().splitlines()[0][:120]}); "
                         "training goes on uncompiled (--compile=False says so at once)")
                torch._dynamo.reset()
            self.model.zero_grad(set_to_none=True)
        self.step_model = self.forward
        if self.world.group:
            from torch.nn.parallel import DistributedDataParallel
            ids = [self.device.index] if self.device.type == "cuda" else None
            self.step_model = DistributedDataParallel(self.forward, device_ids=ids, gradient_as_bucket_view=True,
                                                      broadcast_buffers=False)  # RoPE's tables, equal everywhere
        self.loader = Loader(self.data.train, config, self.world, self.micro_batch, self.micro_steps, self.device)
        self.clock = time.perf_counter()

    def step(self):
        """One iteration. Nothing here waits for the device: loss, norm and whether the step was skipped stay there."""
        config, world, it = self.config, self.world, self.iter
        # dropout is a function of (seed, iteration, process), so that a resumed run draws what the first would have
        torch.manual_seed(int(np.random.SeedSequence([config.seed, it, world.rank]).generate_state(1, np.uint64)[0] >> 1))
        lr = learning_rate(it, config)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        loss_sum = torch.zeros((), device=self.device)
        for micro in range(self.micro_steps):
            ids = self.loader(it, micro)
            last = micro == self.micro_steps - 1
            with contextlib.nullcontext() if last or not world.group else self.step_model.no_sync():
                with precision(config):
                    _, loss = self.step_model(ids[:, :-1], ids[:, 1:])
                loss = loss / self.micro_steps
                (self.scaler.scale(loss) if self.scaler else loss).backward()
            loss_sum += loss.detach()
            self.signals.beats += 1
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        params = [p for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        if config.grad_clip:
            torch.nn.utils.clip_grads_with_norm_(params, config.grad_clip, norm)
        shared = world.sum(torch.stack([loss_sum / world.size, torch.full((), float(self.signals.came), device=self.device)]))
        bad = (~torch.isfinite(norm + shared[0])).float()
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.found_inf = bad  # the fused kernel leaves weights and moments alone where this is 1
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.pending.append((it, lr, torch.stack([shared[0], norm, bad, shared[1]])))
        self.iter += 1

    def train(self):
        """From self.iter to max_iters. Leaves by SystemExit(128 + signal) after saving, when one came."""
        config, signals, done = self.config, self.signals, self.start_log()
        self.asked_to_stop = False
        self.prepare_step()
        while True:
            if self.iter % config.eval_interval == 0 or self.iter == config.max_iters:
                if not done or done["iter"] != self.iter:  # a resumed run may have this evaluation already
                    self.flush()
                    self.log_evaluation()
                    self.save()
                self.clock = time.perf_counter()
            if self.iter >= config.max_iters:
                break
            self.step()
            if self.iter % config.log_interval == 0 or self.iter == config.max_iters or (signals.came and not self.world.group):
                self.flush()
                if self.asked_to_stop or (signals.came and not self.world.group):
                    self.save()
                    self.say(f"stopped by a signal at iteration {self.iter}; saved. The same command continues")
                    raise SystemExit(128 + (signals.came or signal.SIGTERM))
        self.loader.pool.shutdown()
        if self.world.rank == 0:
            self.log.close()
            if config.baseline:
                fill_relative(self.folder, config.baseline)


class Signals:
    """SIGTERM and SIGINT set `came`; the run saves and leaves at the end of its iteration. A second one kills."""

    def __init__(self, patience=None):
        self.came, self.beats, self.saving = 0, 0, False
        for s in (signal.SIGTERM, signal.SIGINT):
            signal.signal(s, self.note)
        if patience:  # among several processes: leave even when this one waits, deep in C, for one that is gone
            read, write = os.pipe()
            os.set_blocking(write, False)
            signal.set_wakeup_fd(write)
            threading.Thread(target=self.watch, args=(read, patience), daemon=True).start()

    def note(self, number, frame):
        self.came = number
        signal.signal(number, signal.SIG_DFL)

    def watch(self, pipe, patience):
        number, seen = os.read(pipe, 1)[0], None
        while self.saving or seen != self.beats:  # goes on as long as passes end or a checkpoint is written
            seen = self.beats
            time.sleep(patience)
        os._exit(128 + number)


def train_one(config, world, signals):
    """Train, resume or skip one run in config.out_dir. Raises UserError when it cannot start, before a file is changed."""
    config = resolve(config, world)
    path = os.path.join(config.out_dir, "ckpt.pt")
    if (config.init_from == "resume" or config.eval_only) and not os.path.exists(path):
        raise UserError(f"{path} does not exist, and --init_from=resume and --eval_only=True need it: train first, or "
                        "give another --out_dir")
    if config.eval_only and config.init_from == "scratch":
        raise UserError("--init_from=scratch: --eval_only=True evaluates out_dir's checkpoint; leave one of them out")
    data = open_data(config, world)
    if config.baseline and os.path.abspath(config.baseline) == os.path.abspath(config.out_dir):
        raise UserError(f"--baseline={config.baseline}: a run is no baseline of itself; give another run's folder")
    there = config.baseline and os.path.exists(os.path.join(config.baseline, "config.json"))
    if config.baseline and not config.eval_only and (there or not config.runs):
        check_baseline(config, data, config.baseline)
    checked_model_config(config, config.vocab_size or data.vocab_size)
    micro_batches(config, world)
    with contextlib.nullcontext() if world.rank or config.eval_only else prepare.locked(config.out_dir):
        run = Run(config, data, world, signals)
        windows = data.train.windows(config.block_size)
        batch = config.tokens_per_iter // config.block_size
        run.say(f"{config.out_dir}: {run.model.num_params():,} parameters, {config.device}, {config.dtype}; a batch is "
                f"{config.tokens_per_iter:,} tokens = {world.size} processes x {run.micro_steps} micro-steps x "
                f"{run.micro_batch} windows x {config.block_size}; {config.max_iters * batch / windows:.2f} epochs of "
                f"{windows:,} windows")
        if not data.meta:
            run.say(f"note: {data.path} has no meta.json: read as gpt2's tokens, as nanoGPT writes them")
        if config.warmup_iters >= config.lr_decay_iters and config.decay_lr:
            run.say(f"note: warmup_iters={config.warmup_iters} is not below lr_decay_iters={config.lr_decay_iters}: the "
                    "learning rate falls to min_lr right after its warmup, or never reaches its peak")
        if config.eval_only:
            run.base = ({}, {})
            run.log_evaluation()
        elif run.iter > config.max_iters or (run.iter == config.max_iters and run.iter in read_log(run.folder)[1]):
            run.say(f"finished at iteration {run.iter} already; a larger --max_iters continues it")
            if config.baseline and world.rank == 0:
                fill_relative(run.folder, config.baseline)
        else:
            if run.iter:
                run.say(f"resuming at iteration {run.iter}")
            try:
                run.train()
            except OSError as e:  # the log's line did not fit on the disk, say
                raise UserError(f"{e.filename or run.folder}: {e.strerror or e}; {run.path} is whole: mend it, then run the "
                                "same command again to continue") from None
    world.barrier()
    if config.compile:
        torch._dynamo.reset()


# ---------------------------------------------------------------------------------------------------------------------
# A list of runs


def plan(config, everything=False):
    """
    [(name, seed or None, the run's own config)] of config.runs x config.seeds, in order; everything: also of those that --runs
    did not pick. Raises UserError.
    """
    try:
        seeds = [int(s) for s in config.seeds.split(",")] if config.seeds else [None]
    except ValueError:
        raise UserError(f"--seeds={config.seeds}: expected whole numbers, as 1337,1338,1339") from None
    runs = {}
    for name, options in config.runs.items():
        if not (isinstance(name, str) and name and name == os.path.basename(name) and not name.startswith(".")
                and isinstance(options, dict) and all(isinstance(k, str) for k in options)):
            raise UserError(f"runs[{name!r}]: expected a name that can be a folder, and a dict of options")
        if {"out_dir", "runs", "seeds"} & set(options):
            raise UserError(f"runs[{name!r}]: out_dir, runs and seeds belong to the list, not to one run")
        runs[name] = override(config, options, f"runs[{name!r}]")
    named = {o["baseline"] for o in config.runs.values() if o.get("baseline")}
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds={config.seeds}: a seed comes twice")
    if config.baseline:
        raise UserError("--baseline is for one run; in a list of runs, a run names another one as its baseline")
    planned, first, picked = [], next(iter(config.runs)), not everything and getattr(config.runs, "picked", ()) or config.runs
    for seed, (name, options) in itertools.product(seeds, config.runs.items()):
        if name not in picked:
            continue
        run = runs[name]
        base = options.get("baseline") or ("" if name == first or name in named else first)
        if base and (base not in config.runs or base == name):
            raise UserError(f"runs[{name!r}]: baseline {base!r} is no other run; they are {', '.join(config.runs)}")
        place = [] if seed is None else [f"seed{seed}"]
        planned.append((name, seed, dataclasses.replace(
            run, seed=run.seed if seed is None else seed, out_dir=os.path.join(config.out_dir, name, *place),
            baseline=os.path.join(config.out_dir, base, *place) if base else "")))
    return planned


def summarize(config):
    """
    summary.json's content, from the folders of all finished runs: per run the final training loss (mean of the last
    rel_window iterations), validation loss, paired differences to the baseline, size, cache and speed.
    """
    summary, curves = {}, {}
    for name, _, run in plan(config, everything=True):
        steps, evals = read_log(run.out_dir)
        path = os.path.join(run.out_dir, "config.json")
        if not steps:
            continue
        try:
            with open(path, encoding="utf-8") as f:
                facts = json.load(f)
            if facts["max_iters"] not in evals:
                continue
        except (OSError, ValueError, KeyError, TypeError):
            print(f"not in the table: {path} is missing or not written by train.py", file=sys.stderr)
            continue
        if run.baseline:
            try:
                with contextlib.suppress(OSError, KeyError, ValueError), \
                        open(os.path.join(run.baseline, "config.json"), encoding="utf-8") as f:
                    same(json.load(f)["comparable"], facts["comparable"], run.baseline)
            except UserError as e:  # of a run that --runs did not pick, say
                print(f"not in the table: {run.out_dir}: {e}", file=sys.stderr)
                continue
            if (filled := all_relative((steps, evals), read_log(run.baseline))) != (steps, evals):
                with contextlib.suppress(UserError), prepare.locked(run.out_dir):  # not while another process writes there
                    fill_relative(run.out_dir, run.baseline)
            steps, evals = filled
        end, last = evals[facts["max_iters"]], sorted(steps)[-facts["rel_window"]:]
        row = summary.setdefault(name, {
            "baseline": os.path.relpath(run.baseline, config.out_dir).split(os.sep)[0] if run.baseline else None,
            "n_params": facts["n_params"], "kv_bytes_per_token": facts["kv_bytes_per_token"], "seeds": {}})
        known = [x for i in last if (x := steps[i]["loss"]) is not None]
        row["seeds"][str(facts["seed"])] = one = {
            "train_loss": statistics.fmean(known) if known else None,
            "val_loss": end["val_loss"], "val_mean": end["val_mean"], "val": end["val"],
            "tokens_per_s": statistics.median(s.get("tokens_per_s", 0) for s in steps.values())}
        relative_steps = [i for i in sorted(steps) if run.baseline and "rel_loss" in steps[i]]
        if relative_steps:
            x, y = smooth(relative_steps, [steps[i]["rel_loss"] for i in relative_steps], facts["rel_window"])
            one["rel_loss"], one["rel_val_loss"] = float(y[-1]), end.get("rel_val_loss")
            curves.setdefault(name, []).append((x.tolist(), y.tolist()))
    for row in summary.values():
        for key in ("train_loss", "val_loss", "val_mean", "rel_loss", "rel_val_loss", "tokens_per_s"):
            values = [s[key] for s in row["seeds"].values() if s.get(key) is not None]
            if values:
                row[key] = {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else None,
                            "n": len(values)}  # std is a sample's
    return summary, curves


def aligned(head, rows):
    """Rows of text below their head, the first column to the left and the others to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = ("  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:]))])
             for row in [head, *rows])
    return "\n".join(line.rstrip() for line in lines)


def table(summary):
    """The summary as text; differences are mean ± standard deviation over seeds."""
    def number(cell, form):
        if not isinstance(cell, dict):
            return "-"
        return format(cell["mean"], form) + (f" ± {cell['std']:.4f}" if cell["std"] is not None else "")

    head = ["run", "train loss", "val loss", "val loss - baseline", "parameters", "KV bytes/token (bf16)", "tokens/s"]
    rows = [[name, number(r.get("train_loss"), ".4f"), number(r.get("val_loss"), ".4f"), number(r.get("rel_val_loss"), "+.4f"),
             f"{r['n_params']:,}", f"{r['kv_bytes_per_token']:,}", f"{r['tokens_per_s']['mean']:,.0f}"]
            for name, r in summary.items()]
    return aligned(head, rows)


def sample_text(config):
    """A continuation of end-of-text by the checkpoint of a run."""
    ckpt = load_checkpoint(os.path.join(config.out_dir, "ckpt.pt"))
    tokenizer = prepare.get_tokenizer(ckpt["data"]["tokenizer"])
    ids = from_checkpoint(ckpt).generate(torch.tensor([[tokenizer.eot]]), config.sample_tokens, temperature=0.8, top_k=200,
                                         n_vocab=tokenizer.n_vocab, seed=config.seed)
    return tokenizer.decode_bytes(ids[0, 1:].tolist()).decode(errors="replace")


def train_list(config, world, signals):
    planned = plan(config)
    check_value_lr_scale(*(run for *_, run in plan(config, everything=True)))
    facts = {}
    for name, _, run in planned:  # refuse everything that can be refused before the first hour of training
        try:
            resolved = resolve(run, world)
            checked_model_config(resolved, run.vocab_size or 64)
            micro_batches(resolved, world)
            facts[run.out_dir] = comparable(resolved, open_data(resolved, world))
        except UserError as e:
            raise UserError(f"run {name}: {e}") from None
    for name, _, run in planned:
        if run.baseline in facts:
            same(facts[run.baseline], facts[run.out_dir], f"{run.baseline} of run {name}")
    for name, _, run in planned:
        if world.rank == 0:
            own = ", ".join(f"{k}={v}" for k, v in config.runs[name].items())
            print(f"\n== {name}, seed {run.seed}" + (f": {own}" if own else ""), flush=True)
        train_one(run, world, signals)
    if world.rank or config.eval_only:
        return
    with prepare.locked(config.out_dir, wait=True):  # others may have just trained the rest of the list
        summary, curves = summarize(config)
        write_json(os.path.join(config.out_dir, "summary.json"), summary)
        picture = os.path.join(config.out_dir, "relative_loss.png")
        plot.curves(picture, curves, x="iteration", y="loss - baseline's loss (nats per token)",
                    title=f"Relative training loss, moving average over {config.rel_window} iterations",
                    caption="Below zero: the system is ahead of its baseline on the same batches.")
    if config.sample_tokens:
        for name, seed, run in planned:
            if seed is None or run.seed == int(config.seeds.split(",")[0]):
                try:
                    text = sample_text(run)
                except UserError as e:  # its tokenizer may be gone: no reason to keep the table back
                    text = f"no text: {e}"
                print(f"\n-- {name} writes:\n{text}")
    print("\n" + table(summary) + f"\n\nwrote {config.out_dir}/summary.json and {picture}")


def join_group(config):
    """This process's World; under torchrun, joins the others."""
    if "RANK" not in os.environ:
        return World()
    import torch.distributed as dist
    if config.device.partition(":")[2]:
        raise UserError(f"--device={config.device}: under torchrun every process has a device of its own; give --device="
                        f"{config.device.partition(':')[0]}, and choose cards with CUDA_VISIBLE_DEVICES")
    world = World(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]), True)
    cuda = torch.cuda.is_available() and config.device in ("auto", "cuda")
    if cuda and world.local_rank >= torch.cuda.device_count():
        raise UserError(f"process {world.local_rank} of this machine has no GPU of its own: there are "
                        f"{torch.cuda.device_count()}; lower --nproc_per_node, or --device=cpu")
    if cuda:
        torch.cuda.set_device(world.local_rank)
    # torchrun ends the others when one process dies, so the group's own clock need only outlast a slow disk or evaluation
    dist.init_process_group(config.backend if config.backend != "auto" else "nccl" if cuda else "gloo",
                            timeout=datetime.timedelta(hours=2))
    return world


@contextlib.contextmanager
def one_voice(world, signals):
    """Of several processes with the same complaint one is heard, and one that died is heard before those that lost it."""
    try:
        yield
    except (UserError, OSError, RuntimeError, MemoryError) as e:
        if out_of_memory(e):
            raise UserError(f"out of memory ({(str(e).strip() or 'no more').splitlines()[0][:160]}): lower --batch_size (with "
                            "--tokens_per_iter the batch stays the same), set --activation_checkpointing=True, or take a "
                            "smaller model") from None
        lost = isinstance(e, RuntimeError) and any(w in str(e) for w in ("gloo", "NCCL", "Connection", "connection"))
        if world.group and (lost or (world.rank and isinstance(e, UserError))):
            for _ in range(50):  # torchrun signals the survivors as soon as the first one has left
                time.sleep(0.1)
                if signals.came:
                    os._exit(128 + signals.came)
            if lost:
                raise UserError(f"process {world.rank} lost another one, whose own message says why") from None
        raise


def main():
    config = configure(Config, sys.argv[1:])
    world = join_group(config)
    signals = Signals(patience=8 if world.group else None)
    with one_voice(world, signals):
        if world.rank == 0:
            print("\n".join(f"{k} = {v!r}" for k, v in dataclasses.asdict(resolve(config, world)).items()))
        torch.set_float32_matmul_precision("high")
        if config.runs:
            train_list(config, world, signals)
        elif config.seeds:
            raise UserError("--seeds needs a config file that defines runs; for one run use --seed")
        else:
            check_value_lr_scale(config)
            if config.sample_tokens:
                raise UserError(f"--sample_tokens={config.sample_tokens}: is for a list of runs; sample.py writes texts")
            train_one(config, world, signals)
    if world.group:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    command(main)
