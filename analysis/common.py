"""
What the analyses share: run folders in; a table, NAME.json and NAME.png out.

    python -m analysis.NAME out/quickstart                      # every run below that folder
    python -m analysis.NAME out/vanilla out/resformer --out_dir=results/mine

A run that an analysis can't use is named with the reason and left out; the others go on.
"""
import contextlib
import dataclasses
import json
import math
import os
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from tqdm import tqdm

import prepare
import train
from configurator import UserError, at_least, configure
from model import GPT, GPTConfig, from_checkpoint, load_checkpoint


@dataclass
class Options:
    fast = True  # for train.precision (no annotation: not an option)
    out_dir: str = ""  # where the table's JSON and the picture go; empty: beside the runs, in their common folder


@dataclass
class ModelOptions(Options):
    fewest_sequences = 1  # no option either: an analysis for which --sequences=0 means all sets 0
    data: str = ""  # the folder of bins to read; empty: the one that each run was trained on
    bin: str = "val"  # the validation bin: val, or the name of a source
    sequences: int = 64  # windows, spread evenly over the bin
    length: int = 0  # tokens of each window; 0: the shortest block_size among the runs
    batch_size: int = 4  # windows at once
    device: str = "auto"  # cuda, mps or cpu; auto: the first of these that is there
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the matrix products


def shape_of(config):
    return GPTConfig(**{f.name: config[f.name] for f in dataclasses.fields(GPTConfig) if f.name in config})


def check_line(line, shape):
    """Raises some error where a line of log.jsonl has values that train.py does not write for a model of that shape."""
    losses = [line["loss"]] if "loss" in line else [line["val_loss"], line["val_mean"], *line["val"].values()]
    weights = [w for row in line.get("value_mix", {}).values() for w in row.values()] + (line.get("alpha") or [])
    for x in losses + weights:
        if x is not None and not (type(x) in (int, float) and math.isfinite(x)):
            raise ValueError(f"a loss or weight, {x!r}, is no number")
    for n, row in line.get("value_mix", {}).items():
        if None in row.values() or set(map(int, row)) != {*shape.sources("v", int(n)), int(n)}:
            raise ValueError(f"the mixing weights of layer {n} are not its model's")
    if "alpha" in line and (None in line["alpha"] or len(line["alpha"]) != shape.n_layer * (shape.n_layer + 3) // 2):
        raise ValueError(f"alpha has {len(line['alpha'])} weights, not one for each block and its inputs")


def needed(run, **kinds):
    """Raises UserError where config.json lacks one of these names, or has it of another type: learning_rate=float."""
    if wrong := [k for k, kind in kinds.items() if type(run.config.get(k)) is not kind]:
        raise UserError(f"{run.name}: config.json has no usable {', '.join(wrong)}")


class Run:
    """
    A run's folder. name: as tables show it; system: name without its seed; config: config.json's content;
    shape: its GPTConfig; log: (training lines, evaluation lines), each {iteration: line}. Files are read when they are first
    asked for, which raises UserError for a damaged one.
    """

    def __init__(self, path, root):
        self.path = path
        self.name = os.path.relpath(path, root) if os.path.abspath(path) != os.path.abspath(root) else \
            os.path.basename(os.path.abspath(path))
        if re.fullmatch(r"seed\d+", self.name):  # its system's folder, or itself, was named
            self.name = os.path.join(os.path.basename(os.path.dirname(os.path.abspath(path))), self.name)
        self.system = re.sub(r"[/\\]seed\d+$", "", self.name)

    @cached_property
    def config(self):
        file = os.path.join(self.path, "config.json")
        try:
            with open(file, encoding="utf-8") as f:
                config = json.load(f)
            # an imported model was not trained here, and has no data, baseline or batch
            config = {"comparable": {}, "baseline": "", "data": "", "out_dir": self.path, "rel_window": 1,
                      "tokens_per_iter": 0, "max_iters": 0, **config}
            if missing := sorted({"n_layer", "tokenizer", "vocab_size", "block_size", "seed"} - set(config)):
                raise ValueError(f"it has no {', '.join(missing)}")
            for kind, names in {int: "seed rel_window tokens_per_iter max_iters", dict: "comparable",
                                str: "tokenizer baseline data out_dir"}.items():
                if wrong := [f"{k}={config[k]!r}" for k in names.split() if type(config[k]) is not kind]:
                    raise ValueError(f"{', '.join(wrong)}: expected {kind.__name__}")
            shape_of(config).check()
        except FileNotFoundError:
            raise UserError(f"{file} is missing; a run's folder has it beside log.jsonl: copy it, too") from None
        except (OSError, ValueError, TypeError, AttributeError) as e:
            raise UserError(f"{file}: not written by train.py, or damaged ({e})") from None
        return config

    @cached_property
    def shape(self):
        return shape_of(self.config)

    @cached_property
    def log(self):
        if not os.path.exists(os.path.join(self.path, "log.jsonl")):
            raise UserError(f"{self.path}/log.jsonl: missing; expected train.py's record beside config.json: restore it, or "
                            "leave this run out")
        steps, evals = train.read_log(self.path)
        for line in (*steps.values(), *evals.values()):
            try:
                check_line(line, self.shape)
            except (TypeError, ValueError, KeyError, AttributeError) as e:
                raise UserError(f"{self.path}/log.jsonl: damaged at iteration {line['iter']} ({e}); restore it, or leave this "
                                "run out") from None
        with open(os.path.join(self.path, "log.jsonl"), "rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - 1))
            end = f.read()
        if end not in (b"", b"\n"):
            print(f"{f.name}: its last line is torn, as a killed run leaves it: used up to iteration "
                  f"{max([*steps, *evals], default='none')}", file=sys.stderr, flush=True)
        return steps, evals

    def checkpoint(self):
        """load_checkpoint's dict of ckpt.pt. Raises UserError."""
        try:
            return load_checkpoint(os.path.join(self.path, "ckpt.pt"))
        except ValueError as e:
            raise UserError(str(e)) from None

    def model(self, device="cpu", random=False):
        """The trained GPT in eval mode; random: the same model before its first step."""
        if random:
            return GPT(self.shape, self.config["seed"]).to(device).eval()
        ckpt = self.checkpoint()
        differs = [k for k, v in ckpt["model_config"].items() if getattr(self.shape, k) != v]
        if differs:
            raise UserError(f"{self.path}: config.json and ckpt.pt have different {', '.join(differs)}; restore one of them")
        try:
            return from_checkpoint(ckpt).to(device)
        except ValueError as e:
            raise UserError(f"{self.path}/ckpt.pt: {e}") from None


def find_runs(paths):
    """The runs in these folders, or below them, in order. Raises UserError for a path that holds none."""
    found, listed = [], False
    for path in paths:
        below = [folder for folder, files in sorted(prepare.walk(path))
                 if "config.json" in files and "generation_config.json" not in files]  # that would be an exported Llama
        if not below:
            problem = "no such folder" if not os.path.exists(path) else "no run in it: config.json is missing"
            raise UserError(f"{path}: {problem}; expected a folder that train.py wrote to")
        order = {}
        if os.path.exists(os.path.join(path, "summary.json")):  # a list of runs: in its order, the baseline first
            with contextlib.suppress(ValueError, TypeError), open(os.path.join(path, "summary.json"), encoding="utf-8") as f:
                order = {name: i for i, name in enumerate(json.load(f))}
            listed = True
        below.sort(key=lambda folder: order.get(os.path.relpath(folder, path).split(os.sep)[0], len(order)))
        found += [folder for folder in below if os.path.realpath(folder) not in map(os.path.realpath, found)]
    runs = [run for run, _ in usable([Run(path, common_folder(found)) for path in found], lambda run: run.config,
                                     "none of these folders has a config.json that can be read: give others")]
    folders = {os.path.realpath(run.path) for run in runs}
    for run in list(runs):
        if os.path.join(os.path.realpath(run.path), seed := f"seed{run.config['seed']}") in folders:
            skip(run, f"its {seed} below is the same system with the same seed")
            runs.remove(run)
    return runs if listed else sorted(runs, key=lambda r: bool(r.config["baseline"]))  # baselines first


def usable(runs, use, none):
    """
    [(run, use(run))] of the runs for which use raises no UserError; the others are named with the reason and left out. Raises
    UserError when none is left: a single run's own reason, or `none`.
    """
    found = []
    for run in runs:
        try:
            found.append((run, use(run)))
        except UserError as e:
            if len(runs) == 1:
                raise
            skip(run, e)
    if runs and not found:
        raise UserError(none)
    return found


def logged(runs):
    """The runs whose log.jsonl can be read."""
    return [run for run, _ in usable(runs, lambda run: run.log, "none of these runs has a log.jsonl that can be read: give a "
                                     "run that train.py wrote")]


def trained(runs, why_not=lambda shape: ""):
    """
    The runs whose ckpt.pt can be read (mapped, so that it costs little), and for whose shape why_not gives no reason. Where it
    gives one for all of them, there is nothing to do: leaves with exit code 0. Raises UserError when none can be read.
    """
    none, fit = "none of these runs can be used: train first, or give other folders", []
    for run, reason in usable(runs, lambda run: why_not(run.shape), none):
        if reason:
            skip(run, reason)
        else:
            fit.append(run)
    if runs and not fit:
        print("nothing to show")
        sys.exit(0)
    return [run for run, _ in usable(fit, Run.checkpoint, none)]


def partner(run, runs):
    """What to compare a run with: the first system's run of the same seed, or else the first run."""
    first = [r for r in runs if r.system == runs[0].system]
    return next((r for r in first if r.config["seed"] == run.config["seed"]), first[0])


def common_folder(paths):
    """The folder that all of these run folders lie in; of a single one, itself."""
    return os.path.relpath(os.path.commonpath([os.path.abspath(p) for p in paths]))


def check_writable(folder):
    """Raises UserError where nothing could be written to folder: now, not after hours of measuring. Makes nothing."""
    path = os.path.abspath(folder)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    if not os.path.isdir(path) or not os.access(path, os.W_OK):
        raise UserError(f"--out_dir={folder}: can't be written ({path} is a file, or protected); give another folder")


def arguments(Config, argv, needs_runs=True, why_not=lambda config, shape: ""):
    """
    (an instance of Config, runs) from argv: run folders, and options as --name=value. For ModelOptions, the runs that have a
    checkpoint, and for whose shape why_not gives no reason to leave them out. Raises UserError.
    """
    config = configure(Config, [a for a in argv if a.startswith("-")])
    paths = [a for a in argv if not a.startswith("-")]
    if needs_runs and not paths:
        raise UserError("give at least one run folder, such as out/quickstart; --help lists the options")
    runs = find_runs(paths)
    if config.out_dir:
        check_writable(config.out_dir)
    if isinstance(config, ModelOptions):
        at_least(config, config.fewest_sequences, "sequences")
        at_least(config, 1, "batch_size")
        at_least(config, 0, "length")
        device = train.checked_device(config)
        if runs and not config.out_dir:  # of those given, also where some are left out
            config.out_dir = common_folder([r.path for r in runs])
        runs = trained(runs, lambda shape: why_not(config, shape))  # before the length, which is that of the runs in use
        blocks = [r.shape.block_size for r in runs]
        if runs and config.length > min(blocks):
            raise UserError(f"--length={config.length}: the runs' shortest block_size is {min(blocks)}; give at most that")
        config = dataclasses.replace(config, device=device, length=config.length or min(blocks, default=0))
    return config, runs


def pick(config, data):
    """(bin, indices of its windows) of config. Raises UserError when the bin is unknown or shorter than one window."""
    if config.bin not in data.val:
        raise UserError(f"--bin={config.bin}: {data.path} has {', '.join(data.val)}")
    bin_ = data.val[config.bin]
    picked = prepare.spread(bin_.windows(config.length), config.sequences)
    if not len(picked):
        raise UserError(f"{bin_.path}: {bin_.tokens} tokens are no window of {config.length} + 1; lower --length")
    return bin_, picked


def windows(config, data, desc=""):
    """
    Batches of token ids (B, length) on the device, from windows spread evenly over a validation bin, with a progress bar.
    Raises UserError as pick does.
    """
    bin_, picked = pick(config, data)
    for i in tqdm(range(0, len(picked), config.batch_size), desc=desc, leave=False, disable=None):
        yield torch.from_numpy(bin_.read(picked[i:i + config.batch_size], config.length)[:, :-1]).to(config.device)


def open_data(config, run):
    """prepare.Data of --data, or of what the run was trained on. Raises UserError, also for another vocabulary."""
    name = config.data or run.config["data"]
    if not name:
        raise UserError(f"{run.name} was not trained on bins here: give some with --data")
    if name == "builtin" and not os.path.exists("builtin"):
        data = train.open_data(train.Config(block_size=1), train.World())  # as training makes it, where it is missing
    else:
        data = prepare.Data(name)
    if data.tokenizer != run.config["tokenizer"]:
        raise UserError(f"{data.path} was tokenized with {data.tokenizer}, and {run.name} with {run.config['tokenizer']}: "
                        "give bins of the same tokenizer")
    if not config.data and run.config["comparable"].get("data", data.fingerprint) != data.fingerprint:
        raise UserError(f"{data.path} is not what {run.name} was trained on (prepared anew since?): give --data={name} to "
                        "measure on it all the same")
    return data


def skip(run, reason):
    """Say that an analysis leaves this run out, and why."""
    print(f"{run.name}: left out: {str(reason).removeprefix(run.name + ': ')}", file=sys.stderr, flush=True)


def write(config, runs, name, head, rows, content, draw):
    """
    Print the table (a list of columns' names, and rows of cells), and write name.json with content and name.png with
    draw(path) to out_dir, or beside the runs, or without any to out/name.
    """
    if isinstance(config, ModelOptions):  # what was measured on
        options = {k: v for k, v in dataclasses.asdict(config).items() if k not in ("out_dir", "device")}
        content = {**content, "options": options}
    print(train.aligned(head, [[str(cell) for cell in row] for row in rows]))
    folder = config.out_dir or (common_folder([r.path for r in runs]) if runs else os.path.join("out", name))
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, name)
    try:  # drawn before either is replaced, so that a failure leaves the old JSON beside the old picture
        draw(path + ".tmp.png")
        train.write_json(path + ".json", content)
        os.replace(path + ".tmp.png", path + ".png")
    finally:
        with contextlib.suppress(OSError):
            os.remove(path + ".tmp.png")
    print(f"\nwrote {path}.json and {path}.png")
