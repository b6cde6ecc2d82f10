"""
Speed and memory, side by side on one machine: training steps, with --decode=N the making of N tokens, or with --shards=FOLDER
the preparing of text.

    python -m analysis.bench config/82M.py config/systems.py                             # every system, against the first
    python -m analysis.bench config/82M.py --plain=True --nanogpt=path/to/nanoGPT --micro_steps=4
    python -m analysis.bench config/82M.py --decode=1000 --gpt_fast=path/to/gpt-fast     # one prompt; 64 prompts; the cache
    python -m analysis.bench --shards=SlimPajama/train --num_proc=2                      # prepare.py, and bare processes

A training step is micro_steps forward and backward passes of batch_size windows of random tokens, clipping and the optimizer,
as in train.py. --plain adds each run without the fast paths (fast=False), --nanogpt a GPT of nanoGPT's model.py with the same
depth, width, length and vocabulary. Each is measured with every batch size of --batch_sizes that fits, and its best counts; the
first is measured again at the end, since cards drift; so is prepare.py, which meets processes that only read and encode.
Prints a table and adds it to out_dir/CARD.json under its command, also after Ctrl-C or SIGTERM, with the rows that were
measured. Compare numbers of one table only: cards and loads differ.
"""
import contextlib
import dataclasses
import gc
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import torch

import kernels
import prepare
import train
from analysis import common
from configurator import UserError, at_least, command, configure, out_of_memory
from model import GPT, KVCache


@dataclasses.dataclass
class Config(train.Config):
    out_dir: str = "results/bench"  # where CARD.json goes; a config file's is where its runs go, and does not count
    vocab_size: int = 50304  # rows of the embedding and of the head; gpt2's 50,257 rounded up to 64
    steps: int = 20  # timed steps; their median counts
    warm_steps: int = 3  # steps before, which compile and settle
    micro_steps: int = 1  # passes per step
    batch_sizes: str = ""  # windows per pass to try, as 16,32,48; empty: batch_size
    plain: bool = False  # also measure each run without the fast paths
    nanogpt: str = ""  # a checkout of nanoGPT to compare with
    decode: int = 0  # measure decoding so many tokens instead
    gpt_fast: str = ""  # with decode: a checkout of gpt-fast to compare with
    kv_length: int = 0  # with decode: also how many sequences of this length fit beside their cache, and their speed
    shards: str = ""  # a file or folder of shards: measure prepare.py on them instead
    num_proc: int = 2  # with shards: processes that tokenize
    tokenizer: str = "auto"  # with shards: as prepare.py's


def resolved_runs(config):
    """[(name, resolved config)] of the config's runs, or of itself. Raises UserError for several seeds."""
    if config.seeds:
        raise UserError(f"--seeds={config.seeds}: the speed of one is measured: leave it out, or give a --seed")
    runs = [(name, run) for name, _, run in train.plan(config)] if config.runs else [("ours", config)]
    return [(name, train.resolve(run, train.World())) for name, run in runs]


def clean():
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def stepper(config, model, optimizer, forward):
    """step(ids): micro_steps passes, clipping and the optimizer."""
    def step(ids):
        for _ in range(config.micro_steps):
            with train.precision(config):
                loss = forward(ids[:, :-1], ids[:, 1:])[1] / config.micro_steps
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step


def our_step(config):
    """(step(ids), model, FLOPs per token) of a resolved train.Config."""
    model = train.build(config, train.checked_model_config(config, config.vocab_size))
    optimizer = model.configure_optimizers(config.weight_decay, config.learning_rate, (config.beta1, config.beta2))
    step = stepper(config, model, optimizer, torch.compile(model) if config.compile else model)
    return step, model, model.flops_per_token()


def nanogpt_step(config):
    """The same of nanoGPT's GPT: tied, GELU, learned positions, no biases; trained as its train.py does."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", os.path.join(config.nanogpt, "model.py"))
    module = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(spec)
    with contextlib.redirect_stdout(None):
        spec.loader.exec_module(module)
        model = module.GPT(module.GPTConfig(
            block_size=config.block_size, vocab_size=config.vocab_size, n_layer=config.n_layer,
            n_head=config.n_head, n_embd=config.n_embd, dropout=0.0, bias=False))
        model.to(config.device)
        optimizer = model.configure_optimizers(config.weight_decay, config.learning_rate, (config.beta1, config.beta2),
                                               config.device.split(":")[0])
    forward = torch.compile(model) if config.compile else model
    step = stepper(dataclasses.replace(config, fast=False), model, optimizer,
                   lambda ids, targets: forward(ids.contiguous(), targets.contiguous()))
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2) - model.transformer.wpe.weight.numel()
    return step, model, 6 * weights + 6 * config.n_layer * config.n_embd * config.block_size


def check_nanogpt(config):
    """Raises UserError unless a tiny nanoGPT makes a step: before anything is measured."""
    tiny = dict(n_layer=1, n_head=1, n_embd=8, device="cpu", dtype="float32", compile=False)
    try:
        nanogpt_step(dataclasses.replace(config, **tiny))[0](torch.zeros(1, 3, dtype=torch.int64))
    except (Exception, SystemExit) as e:  # another's code: of any kind
        raise UserError(f"--nanogpt={config.nanogpt}: expected a checkout of nanoGPT with its model.py "
                        f"({type(e).__name__}: {e})") from None


def measure(make, config):
    """A row of the table for make(config), one of the functions above."""
    clean()
    device, began = torch.device(config.device), time.perf_counter()
    step, model, flops = make(config)
    g, times, vocab = torch.Generator().manual_seed(config.seed), [], min(50257, config.vocab_size)
    for i in range(config.warm_steps + config.steps):
        ids = torch.randint(vocab, (config.batch_size, config.block_size + 1), generator=g).to(device)
        wait(device)
        start = time.perf_counter()
        step(ids)
        wait(device)
        times.append(time.perf_counter() - start)
        if i + 1 == config.warm_steps:
            warm = time.perf_counter() - began
    times, cuda = times[config.warm_steps:], device.type == "cuda"
    speed = config.micro_steps * config.batch_size * config.block_size / statistics.median(times)
    peak = train.peak_flops(torch.cuda.get_device_name()) if cuda else None
    row = dict(tokens_per_s=speed, mfu=flops * speed / peak if peak else None, step_s=statistics.median(times),
               step_s_range=[min(times), max(times)], batch_size=config.batch_size, micro_steps=config.micro_steps,
               block_size=config.block_size, memory_bytes=torch.cuda.max_memory_allocated() if cuda else None, warm_up_s=warm,
               n_params=sum(p.numel() for p in model.parameters()))
    if hasattr(model, "kv_cache"):
        row["kv_bytes_per_token"] = KVCache(model.config, 1, 1, "meta", torch.bfloat16).nbytes
    return row


def fits(config):
    """
    Whether a pass may fit in this machine's memory, for a CPU: there a process that takes too much is killed without a word.
    As measured, a token takes at least 12 bytes for each logit and 120 for each layer and channel, unless recomputed.
    """
    if config.device != "cpu" or not hasattr(os, "sysconf"):  # Windows has none
        return True
    channels = 0 if config.activation_checkpointing else config.n_layer * config.n_embd
    least = config.batch_size * config.block_size * (12 * config.vocab_size + 120 * channels)
    return least < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def best(make, config):
    """The fastest row over --batch_sizes; a size that does not fit in memory is left out."""
    rows = []
    try:
        sizes = [int(size) for size in config.batch_sizes.split(",")] if config.batch_sizes else [config.batch_size]
        if min(sizes) < 1:
            raise ValueError
    except ValueError:
        raise UserError(f"--batch_sizes={config.batch_sizes}: expected whole numbers above 0, as 16,32") from None
    for size in sizes:
        try:
            if not fits(run := dataclasses.replace(config, batch_size=size)):
                raise MemoryError
            rows.append(measure(make, run))
        except (MemoryError, RuntimeError) as e:
            if not out_of_memory(e):
                raise
            print(f"{size} windows do not fit in memory", flush=True)
    return max(rows, key=lambda r: r["tokens_per_s"], default=None)


def training(config, table):
    """Fills table, {name: row}, with all that is asked for, printed as they come."""
    jobs, runs = [], resolved_runs(config)
    for name, run in runs:
        jobs += [(name, our_step, run)] + ([(f"{name}, plain", our_step, dataclasses.replace(run, fast=False))] if run.plain
                                           else [])
    if config.nanogpt:
        check_nanogpt(runs[0][1])
        jobs.append(("nanoGPT", nanogpt_step, runs[0][1]))
    if len(jobs) > 1:
        jobs.append((f"{jobs[0][0]}, again", *jobs[0][1:]))  # how far the card itself drifted meanwhile
    for name, make, run in jobs:
        r = best(make, run)
        if r is None:
            print(f"{name}: no --batch_size or --batch_sizes fits in memory; left out", flush=True)
            continue
        r["step_ratio"] = next(iter(table.values()), r)["tokens_per_s"] / r["tokens_per_s"]
        add(table, name, r)
    if not table:
        raise UserError("nothing fits in memory: give a smaller --batch_size (and as many more --micro_steps), or a smaller "
                        "model, as config/quickstart.py --vocab_size=320")


# ---------------------------------------------------------------------------------------------------------------------
# Decoding


def generation(model, config, B, compile, use_cache):
    """
    Tokens/s of B prompts' continuations by config.decode tokens, prompts included, after a warm-up: compiled the best of two,
    else of one.
    """
    device = torch.device(config.device)
    n_vocab = min(50257, model.config.vocab_size)
    ids = torch.randint(n_vocab, (B, 16), generator=torch.Generator().manual_seed(1)).to(device)
    lengths = None if B == 1 else [1 + i % 16 for i in range(B)]
    seconds = []
    for _ in range(3 if compile else 2):
        wait(device)
        start = time.perf_counter()
        with train.precision(config):
            for _ in model.stream(ids, config.decode, 0.8, 200, lengths=lengths, n_vocab=n_vocab, seed=1, compile=compile,
                                  use_cache=use_cache):
                pass
        wait(device)
        seconds.append(time.perf_counter() - start)
    return B * config.decode / min(seconds[1:])


GPT_FAST = """
import sys, time, torch
sys.path.insert(0, sys.argv[1])
import generate, model
layers, heads, kv_heads, width, ffn, block, vocab, n = map(int, sys.argv[2:])
with torch.device("cuda"):
    net = model.Transformer(model.ModelArgs(
        block_size=block, vocab_size=vocab, n_layer=layers, n_head=heads, n_local_heads=kv_heads, dim=width,
        intermediate_size=ffn)).to(torch.bfloat16).eval()
generate.decode_one_token = torch.compile(generate.decode_one_token, mode="reduce-overhead", fullgraph=True)
prompt = torch.randint(min(50257, vocab), (16,), device="cuda")
for i in range(3):
    torch.cuda.synchronize()
    start = time.time()
    generate.generate(net, prompt, n, batch_size=1, interactive=False, draft_model=None, temperature=0.8, top_k=200)
    torch.cuda.synchronize()
    print(n / (time.time() - start), flush=True)
"""


def gpt_fast(config):
    """gpt-fast's tokens/s for the same shapes, in a process of its own, since its modules have our names."""
    c = train.checked_model_config(config, config.vocab_size)
    shape = [c.n_layer, c.n_head, c.kv_heads, c.n_embd, c.ffn, c.block_size, c.vocab_size, config.decode]
    done = subprocess.run([sys.executable, "-c", GPT_FAST, os.path.abspath(config.gpt_fast), *map(str, shape)],
                          capture_output=True, text=True)
    speeds = done.stdout.split()[1:]
    if done.returncode or not speeds:
        raise UserError(f"--gpt_fast={config.gpt_fast}: {(done.stderr.strip() or 'no output').splitlines()[-1]}; expected a "
                        "checkout of gpt-fast, and a GPU")
    return max(map(float, speeds))


@torch.no_grad()
def full_cache(model, config):
    """Bytes of a cache of kv_length tokens by the allocator's count, the sequences that fit, and their tokens/s at the end."""
    device, length = torch.device(config.device), config.kv_length
    dtype = getattr(torch, config.dtype)
    clean()
    before = torch.cuda.memory_allocated()
    cache = KVCache(model.config, 1, length, device, dtype)
    one = torch.cuda.memory_allocated() - before
    del cache
    B = int((torch.cuda.mem_get_info()[0] * 0.95) // one)
    cache = KVCache(model.config, B, length, device, dtype)
    ids, times = torch.zeros(B, 1, dtype=torch.int64, device=device), []
    with train.precision(config):
        for _ in range(13):
            cache.length = length - 1
            wait(device)
            start = time.perf_counter()
            model.step(ids, cache, None, None, None, 0, None, None)
            wait(device)
            times.append(time.perf_counter() - start)
    return dict(bytes_of_one=one, sequences=B, tokens_per_s=B / statistics.median(times[3:]))


def decoding(config, table):
    if config.gpt_fast:  # first, so that its failure costs nothing and the row it is compared with comes next
        add(table, "gpt-fast: one prompt, compiled", dict(tokens_per_s=gpt_fast(config)))
    for name, run in resolved_runs(config):
        shape = train.checked_model_config(run, run.vocab_size)
        model = GPT(dataclasses.replace(shape, block_size=max(shape.block_size, run.kv_length)), run.seed)
        model.to(run.device).eval().cast_matrices(getattr(torch, run.dtype))
        if run.fast and run.device.startswith("cuda") and kernels.triton:
            kernels.use_for_decoding(model)
        rows = {"one prompt, compiled": (1, True, True), "64 prompts of unequal length, compiled": (64, True, True),
                "one prompt": (1, False, True), "one prompt, no cache": (1, False, False)}
        if not run.compile:
            rows = {k: v for k, v in rows.items() if "compiled" not in k}
        for what, args in rows.items():
            clean()
            add(table, f"{name}: {what}", dict(tokens_per_s=generation(model, run, *args)))
        if run.kv_length:
            add(table, f"{name}: cache of {run.kv_length} tokens", full_cache(model, run))
        del model
        clean()


# ---------------------------------------------------------------------------------------------------------------------
# Preparing


ROUNDS = 3
BARE = """
import json, sys
import prepare
from tqdm import tqdm
tokenizer = prepare.get_tokenizer(sys.argv[1])
for path in sys.argv[2:]:
    for kind, raw, *_ in prepare.read_items(path, tqdm(disable=True)):
        tokenizer.encode(json.loads(raw)["text"] if kind == "json" else raw.decode(errors="replace"))
"""


def preparing(config, table):
    """Seconds of prepare.py, and of as many bare processes, each with its share of the shards; starting them included."""
    if not os.path.exists(config.shards):
        raise UserError(f"--shards={config.shards}: no such file or folder; expected local shards, at least --num_proc")
    n, parts = config.num_proc, prepare.with_parts(prepare.Config(source=config.shards))
    paths = prepare.find_files(parts.source, besides=parts.val_source)
    paths += prepare.find_files(parts.val_source) if parts.val_source else []
    paths.sort(key=os.path.getsize)
    if len(paths) < n:
        raise UserError(f"--shards={config.shards}: {len(paths)} files for {n} processes: give more, or a smaller --num_proc")

    def measure(name, *commands):
        """All at the same time; returns prepare.py's meta. Raises UserError with the last line of one that fails."""
        env, began, cpu = {**os.environ, "PYTHONPATH": os.path.dirname(prepare.__file__)}, time.perf_counter(), os.times()
        running = [subprocess.Popen([sys.executable, *c], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                   for c in commands]
        try:
            for process, said in [(process, process.communicate()[1].split("\n")) for process in running]:
                if process.returncode:
                    line = " ".join(said[-2:]).strip()
                    raise UserError(line.removeprefix("error: ") or f"--shards={config.shards}: a process died")
        finally:  # also after Ctrl-C or SIGTERM none goes on alone
            for process in running:
                process.terminate()
        seconds = time.perf_counter() - began
        with open(os.path.join(folder, "meta.json"), encoding="utf-8") as f:
            meta = json.load(f)
        if meta["skipped"]:
            raise UserError(f"--shards={config.shards}: prepare.py skipped or mended {meta['skipped']}, which a bare process "
                            "can't: give shards without such")
        size = sum(c["bytes"] for splits in meta["sources"].values() for c in splits.values())
        cpu = sum(b - a for a, b in zip(cpu[2:4], os.times()[2:4]))  # of the children and of theirs
        add(table, name, dict(seconds=seconds, cpu_seconds=cpu, bytes_per_s=size / seconds))
        return meta

    with tempfile.TemporaryDirectory() as folder:
        for i in range(1, ROUNDS + 1):  # by turns, since such times differ by several percent
            meta = measure(f"prepare.py, {n} processes, round {i}",
                           [prepare.__file__, f"--source={config.shards}", f"--out_dir={folder}", f"--num_proc={n}",
                            f"--tokenizer={config.tokenizer}"])
            measure(f"{n} bare processes, round {i}",
                    *(["-c", BARE, meta["tokenizer"], *paths[j::n]] for j in range(n)))


def add(table, name, row):
    table[name] = row
    print(line(name, row), flush=True)


def line(name, r):
    """A row of the table as text."""
    if "seconds" in r:
        return (f"{name:36} {r['seconds']:>8.1f} s  {r['bytes_per_s'] / 1e6:.1f} MB/s of text"
                f"  {r['cpu_seconds']:.1f} s of CPU time")
    if "step_ratio" not in r:
        return f"{name:48} {r['tokens_per_s']:>10,.0f} tokens/s" + (
            f"  {r['bytes_of_one']:,} bytes a sequence, {r['sequences']} fit" if "sequences" in r else "")
    return (f"{name:24} {r['tokens_per_s']:>12,.0f} tokens/s  step x {r['step_ratio']:.3f}"
            + (f"  mfu {r['mfu']:.1%}" if r["mfu"] else "")
            + (f"  {r['memory_bytes'] / 2 ** 30:5.1f} GiB" if r["memory_bytes"] else "")
            + f"  {r['micro_steps']} x {r['batch_size']} x {r['block_size']}  warm-up {r['warm_up_s']:.0f} s")


PEERS = {"nanogpt": ["model.py"], "gpt_fast": ["generate.py", "model.py"]}  # the files of each that are used


def read_tables(path):
    if not os.path.exists(path):
        return {}
    try:
        with open(path, encoding="utf-8") as f:
            return dict(json.load(f))
    except (ValueError, TypeError):
        raise UserError(f"{path}: not written by analysis.bench, or damaged; move it away") from None


def record(path, key, table):
    """Adds the table under its key, and says whether: half a one replaces none that is finished or has more rows."""
    with prepare.locked(os.path.dirname(path), wait=True):  # another bench may add to the file, now or meanwhile
        tables = read_tables(path)
        before = tables.get(key, {"finished": False, "rows": {}})
        if kept := table["finished"] or not before.get("finished", True) and len(table["rows"]) >= len(before["rows"]):
            train.write_json(path, {**tables, key: table})
    return kept


def main():
    config = configure(Config, sys.argv[1:])
    if not any(word.startswith("--out_dir=") for word in sys.argv):
        config.out_dir = Config.out_dir
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError(f"WORLD_SIZE={os.environ['WORLD_SIZE']}: one process measures one device: start it without torchrun; "
                        "train.py logs the speed of several")
    for option, why in (("data", "tokens are random"), ("tokens_per_iter", "--micro_steps says how many passes a step has")):
        if any(word.startswith(f"--{option}=") for word in sys.argv):
            raise UserError(f"--{option}={getattr(config, option)}: changes nothing here, {why}: leave it out")
    at_least(config, 1, "steps", "warm_steps", "micro_steps", "num_proc", "vocab_size")
    at_least(config, 0, "decode", "kv_length")
    if config.shards and config.decode:
        raise UserError(f"--shards={config.shards}: is for preparing: leave --decode out")
    kind = "preparing" if config.shards else "decoding" if config.decode else "training"
    for option, of in dict(nanogpt="training", plain="training", batch_sizes="training", gpt_fast="decoding",
                           kv_length="decoding").items():
        value = getattr(config, option)
        if value and of != kind:
            raise UserError(f"--{option}={value}: is for {of}, and these options ask for {kind}")
        for file in PEERS.get(option, ()) if value else ():
            if not os.path.isfile(os.path.join(value, file)):
                raise UserError(f"--{option}={value}: expected a checkout with its {file}")
    torch.set_float32_matmul_precision("high")
    resolved = train.resolve(config, train.World())
    if config.kv_length and not resolved.device.startswith("cuda"):
        raise UserError(f"--kv_length={config.kv_length}: fills a GPU's memory, and there is none: leave it out")
    card = torch.cuda.get_device_name() if resolved.device.startswith("cuda") else "cpu"
    path = os.path.join(config.out_dir, re.sub(r"[^a-z0-9]+", "-", card.lower()) + ".json")
    common.check_writable(config.out_dir)
    os.makedirs(config.out_dir, exist_ok=True)
    read_tables(path)  # a damaged one is told before anything is measured
    peers = {name: train.fingerprint(folder, files) for name, files in PEERS.items() if (folder := getattr(config, name))}
    rows, done = {}, False
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's end is a Ctrl-C
    try:
        {"training": training, "decoding": decoding, "preparing": preparing}[kind](config, rows)
        done = True
    finally:  # also what was measured before an end or an error
        words = [w for w in sys.argv[1:] if not w.startswith("--out_dir")]
        key = " ".join(re.sub(r"^(--(?:nanogpt|gpt_fast|shards))=.*", r"\1=PATH", w) for w in words)
        if rows and record(path, key, dict(
                finished=done, device=card, torch=torch.__version__, cuda=torch.version.cuda,
                cudnn=torch.backends.cudnn.version(), triton=kernels.triton and kernels.triton.__version__,
                dtype=resolved.dtype, compile=resolved.compile, cores=os.cpu_count(), peers=peers, rows=rows)):
            print(f"{card}, torch {torch.__version__}, {resolved.dtype}; wrote {path}")


if __name__ == "__main__":
    command(main)
