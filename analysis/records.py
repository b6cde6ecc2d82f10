"""
The records of the reproduction for analysis.report and analysis.claims: finished runs by system, budget and seed, their paired
differences, how both are shown, and the paper's numbers. Imports nothing of those two.
"""
import contextlib
import io
import json
import math
import os
import statistics
from dataclasses import dataclass

import train
from analysis import common, scaling
from analysis.relative_loss import t_interval
from configurator import UserError

PAPER_TOKENS = 20e9  # the paper's differences below are at 20B tokens; all but identity's are from summaries of its v5
PAPER = {"vanilla": 0.0, "identity": -0.027, "constant": -0.039, "learnable": -0.034, "sparse": -0.052, "plus": -0.058,
         "svformer": None, "neutreno": None, "denseformer": None}  # in the order of the tables
PAPER_SAVING = 0.203


@dataclass
class Point:
    """A finished run: its record as train.read_log returns it, and the last evaluation's line."""
    run: common.Run
    log: tuple
    end: dict


def checked(run):
    """The run's log. Raises UserError when it or config.json lacks a number that the report needs."""
    whole = ("n_params", "kv_bytes_per_token", "tokens_per_iter", "max_iters", "lr_decay_iters", "seed", "rel_window",
             "eval_iters")
    missing = [k for k in whole if type(run.config.get(k)) is not int] + [
        k for k, kind in (("decay_lr", bool), ("learning_rate", float), ("comparable", dict))
        if not isinstance(run.config.get(k), kind)]
    if missing:
        raise UserError(f"config.json has no usable {', '.join(missing)}")
    steps, evals = log = run.log
    for line in (*steps.values(), *evals.values()):
        values = [line["loss"]] if "loss" in line else [line["val_loss"], line["val_mean"], *dict(line["val"]).values()]
        if any(x is not None and not (type(x) in (int, float) and math.isfinite(x)) for x in values):
            raise UserError(f"log.jsonl: a loss at iteration {line['iter']} is no number")
    return log


class Records:
    """
    What the results folder holds. points: {(system, tokens): {seed: Point}}, finished, decayed and comparable; tokens: the
    budget of most runs in family/ (None: there is none); left_out: lines that name what was not used, and why.
    """

    def __init__(self, root):
        if not any(os.path.isdir(os.path.join(root, name)) for name in ("family", "tokens", "mechanism")):
            found = "holds none of family/, tokens/, mechanism/" if os.path.isdir(root) else "no such folder"
            raise UserError(f"{root}: {found}; expected the folder of results, such as results/")
        self.root, self.points, self.left_out, runs = root, {}, [], []
        for folder in ("family", "tokens"):
            for path, _, files in sorted(os.walk(os.path.join(root, folder))):
                if {"config.json", "log.jsonl"} & set(files):
                    try:
                        checked(run := common.Run(path, root))
                        runs.append(run)
                    except (UserError, TypeError, ValueError) as e:
                        self.skip(os.path.relpath(path, root), str(e).replace(root.rstrip("/") + "/", ""))
        with contextlib.redirect_stderr(io.StringIO()) as said:  # scaling's rules for what counts print what they leave out
            systems = ",".join(sorted({os.path.basename(r.system) for r in runs}))
            found = scaling.usable(scaling.Config(systems=systems), runs) if runs else []
        for line in said.getvalue().splitlines():
            self.skip(*line.split(": left out: "))
        for run, system, _ in found:
            self.points.setdefault((system, run.config["tokens_per_iter"] * run.config["max_iters"]), {})[
                run.config["seed"]] = Point(run, run.log, run.log[1][run.config["max_iters"]])
        budgets = [t for (_, t), of in self.points.items() for p in of.values() if p.run.name.startswith("family")]
        self.tokens = statistics.mode(budgets) if budgets else None
        for (_, tokens), of in self.points.items():
            for seed, p in list(of.items()):
                base = self.points.get(("vanilla", tokens), {}).get(seed)
                try:
                    train.same((base or p).run.config["comparable"], p.run.config["comparable"], (base or p).run.name)
                except UserError as e:
                    self.skip(p.run.name, e)
                    del of[seed]
        for system in PAPER:
            if not self.points.get((system, self.tokens)):
                self.skip(f"family/{system}", "no finished run")

    def skip(self, name, reason):
        self.left_out.append(f"{name}: {reason}")

    def at(self, system, tokens):
        return self.points.get((system, tokens), {})

    def budgets(self, system):
        return sorted(t for (s, t), of in self.points.items() if s == system and of)

    def systems(self, tokens):
        """Names of those with a run at that budget (None: at any), in the order of place."""
        return sorted({s for (s, t), of in self.points.items() if tokens in (t, None) and of}, key=place)

    def difference(self, system, base, tokens, value=lambda line: line["val_mean"]):
        return difference(*({seed: value(p.end) for seed, p in self.at(s, tokens).items()} for s in (system, base)))

    def json(self, name):
        """The content of that file of the results folder, or None."""
        try:
            with open(os.path.join(self.root, name), encoding="utf-8") as f:
                return json.load(f)
        except FileNotFoundError:
            self.skip(name, "not there")
        except ValueError as e:
            self.skip(name, f"no JSON ({e})")


def place(system):
    """Where a system stands in a table: the paper's first, in the order of PAPER."""
    return list(PAPER).index(system.split()[0]) if system.split()[0] in PAPER else len(PAPER), system


def difference(values, base):
    """
    {"mean", "interval_95" (None for one pair), "seeds": {seed: value - base's}} of {seed: value} and the base's, over the
    seeds that both have; None without any.
    """
    pairs = {s: values[s] - base[s] for s in sorted(values.keys() & base.keys()) if None not in (values[s], base[s])}
    return {"mean": statistics.fmean(pairs.values()), "interval_95": t_interval(list(pairs.values())),
            "seeds": pairs} if pairs else None


def noise(differences):
    """{"std", "df"} of a paired difference from seed to seed, pooled over systems; None without a system of two pairs."""
    several = [list(d["seeds"].values()) for d in differences if d and len(d["seeds"]) > 1]
    df = sum(len(v) - 1 for v in several)
    return {"std": math.sqrt(sum((len(v) - 1) * statistics.variance(v) for v in several) / df), "df": df} if df else None


# ---------------------------------------------------------------------------------------------------------------------
# How numbers are shown


def number(x, form=".4f"):
    return "-" if x is None else format(x, form)


def billions(tokens):
    return f"{tokens / 1e9:.3g}B"


def spread(d, form="+.4f"):
    """A difference with its interval."""
    return "-" if d is None else f"{d['mean']:{form}}" + (
        f" [{d['interval_95'][0]:{form}}, {d['interval_95'][1]:{form}}]" if d["interval_95"] else "")


def described(d, tokens, form="+.4f"):
    """The same with the budget and the number of seeds."""
    n = len(d["seeds"])
    return f"{spread(d, form)}, " + (f"{billions(tokens)} tokens, " if tokens else "") + f"{n} seed{'s' * (n > 1)}"
