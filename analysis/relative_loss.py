"""
Relative loss: a run's loss minus its baseline's on the same batches, and where it crosses zero.

    python -m analysis.relative_loss out/fig14
    python -m analysis.relative_loss out/mine out/vanilla --baseline=vanilla --window=10

Training: centred moving average of the difference at each iteration. Validation: the difference at each evaluation, over the
whole validation bin, averaged over sources, and for each source. Runs that differ by their seed alone are one system: the
picture shows their mean with a band from the lowest to the highest seed, the table its last value, with the 95 % interval of
Student's t over seeds, each paired with the baseline of its own seed. The critical point is the first crossing of the
smoothed training difference from negative to >= 0 (Fig 14), or where a straight line through its last points gets there.
"""
import math
import os
import statistics
import sys
from dataclasses import dataclass

import numpy as np

import train
from analysis import common, plot
from configurator import UserError, at_least, command


@dataclass
class Config(common.Options):
    baseline: str = ""  # a run or system among the given ones, or a run's folder; empty: the one each run was trained with
    window: int = 0  # iterations of the moving average; 0: the run's rel_window
    fit_last: int = 1000  # points of the smoothed curve that an extrapolation uses; at most half of the curve


def difference(lines, base, value):
    """
    {iteration: value(line) - value(the baseline's line)}, where both have the iteration and a finite value, at the same
    learning rate and tokens (one of them may have been resumed with another schedule).
    """
    same = [i for i in sorted(lines) if i in base and all(lines[i].get(k) == base[i].get(k) for k in ("lr", "tokens"))]
    pairs = {i: (value(lines[i]), value(base[i])) for i in same}
    return {i: a - b for i, (a, b) in pairs.items() if a is not None and b is not None}


def compare(log, base):
    """{"train", "val", "val_mean", "val/SOURCE"...: {iteration: difference}} of two logs as read_log returns them."""
    (steps, evals), (base_steps, base_evals) = log, base
    sources = dict.fromkeys(s for line in evals.values() for s in line["val"])
    return {"train": difference(steps, base_steps, lambda line: line["loss"]),
            "val": difference(evals, base_evals, lambda line: line["val_loss"]),
            "val_mean": difference(evals, base_evals, lambda line: line["val_mean"]),
            **{f"val/{s}": difference(evals, base_evals, lambda line, s=s: line["val"].get(s)) for s in sources}}


def t_95(df):
    """The 97.5 % quantile of Student's t with df degrees of freedom."""
    table = 12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814
    return table[df - 1] if df <= len(table) else 1.95996 + 2.3722 / df + 2.8225 / df ** 2  # to 0.002


def t_interval(values):
    """(low, high): the 95 % interval of the mean by Student's t; None for a single value."""
    if len(values) < 2:
        return None
    mean, half = statistics.fmean(values), t_95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def critical_point(x, y, fit_last=1000):
    """
    Where the curve y(x) first crosses from negative to >= 0, between two points on a straight line: {"kind": "crossed",
    "iteration", "crossings": how often it does}. When it doesn't: where the line fitted to its last points reaches 0
    ("extrapolated"), or "not reached" (iteration None) when that line doesn't rise, or the curve never was negative.
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    up = np.flatnonzero((y[:-1] < 0) & (y[1:] >= 0))
    if len(up):
        i = up[0]
        at = x[i] + (x[i + 1] - x[i]) * y[i] / (y[i] - y[i + 1])
        return {"kind": "crossed", "iteration": float(at), "crossings": len(up)}
    last = min(fit_last, len(y) // 2)
    if last >= 2 and y[-1] < 0:
        x0, y0 = x[-last:].mean(), y[-last:].mean()
        dx = x[-last:] - x0
        slope = dx @ (y[-last:] - y0) / (dx @ dx)
        at = x0 - y0 / slope if slope > 0 else math.inf
        if math.isfinite(at):
            return {"kind": "extrapolated", "iteration": float(max(at, x[-1])), "crossings": 0}
    return {"kind": "not reached", "iteration": None, "crossings": 0}


def find_baseline(run, runs, wanted):
    """
    The Run whose loss is subtracted from this one's; None when it has none or its folder is gone. A folder that was moved
    together with its baseline's is looked for beside it. Raises UserError when --baseline names nothing.
    """
    if wanted:
        named = [r for r in runs if wanted in (r.name, r.system, os.path.basename(r.system))]
        if not named and not os.path.exists(wanted):
            raise UserError(f"--baseline={wanted}: no such folder, and no given run or system of that name: there are "
                            f"{', '.join(dict.fromkeys(r.system for r in runs))}")
        named = named or common.find_runs([wanted])
        return next((r for r in named if r.config["comparable"] == run.config["comparable"]), named[0])
    given = run.config["baseline"]
    if not given:
        return None
    beside = os.path.normpath(os.path.join(run.path, os.path.relpath(given, run.config["out_dir"])))
    for path in (beside, given):
        if os.path.exists(os.path.join(path, "config.json")):
            return next((r for r in runs if os.path.abspath(r.path) == os.path.abspath(path)),
                        common.Run(path, os.path.dirname(os.path.dirname(os.path.abspath(path)))))
    return None


def paired(config, runs):
    """{system: [(run, baseline, compare()'s dict) of each seed]}; says which runs are left out, and why."""
    systems, damaged = {}, False
    for run in runs:
        base = find_baseline(run, runs, config.baseline)
        if base is None:
            given = run.config["baseline"]
            common.skip(run, f"its baseline {given} is not there; name another with --baseline" if given else
                        "it was trained without a baseline (--baseline names one)")
            continue
        if os.path.abspath(base.path) == os.path.abspath(run.path) or config.baseline and base.system == run.system:
            common.skip(run, "it is the baseline")
            continue
        try:
            log, theirs = run.log, base.config and base.log
        except UserError as e:
            damaged = True
            common.skip(run, f"its baseline: {e}")
            continue
        try:
            train.same(base.config["comparable"], run.config["comparable"], base.path)
        except UserError as e:
            common.skip(run, str(e))
            continue
        curves = compare(log, theirs)
        if not curves["train"]:
            common.skip(run, f"no training iteration in common with its baseline {base.path}")
            continue
        if max(curves["train"]) + 1 < run.config["max_iters"]:
            whose = base if max(theirs[0]) < max(log[0]) else run
            print(f"{run.name}: compared up to iteration {max(curves['train'])} of {run.config['max_iters']}: {whose.path} "
                  "ends there", file=sys.stderr)
        systems.setdefault(run.system, []).append((run, base, curves))
    if damaged and not systems:
        raise UserError("no run is left whose baseline can be read: restore it, or name another with --baseline")
    for system, pairs in systems.items():
        end = max(max(curves["train"]) for _, _, curves in pairs)
        for run, _, curves in pairs:
            if max(curves["train"]) < end:
                common.skip(run, f"it ends at iteration {max(curves['train'])}, another seed at {end}")
        systems[system] = [p for p in pairs if max(p[2]["train"]) == end]
    return systems


def over_seeds(curves, window=1):
    """
    Of {iteration: difference} dicts, one per seed, at the iterations that all have: (iterations (T,), differences
    (seeds, T)), each smoothed.
    """
    its = [i for i in curves[0] if all(i in c for c in curves)]
    smoothed = [train.smooth(its, [c[i] for i in its], window) for c in curves]
    return smoothed[0][0], np.stack([y for _, y in smoothed])


def main():
    config, runs = common.arguments(Config, sys.argv[1:])
    runs = common.logged(runs)
    at_least(config, 0, "window")
    at_least(config, 2, "fit_last")
    rows, content = [], {}
    curves = {"train": ({}, {}), "val": ({}, {})}  # {key: (series, bands)}
    turns = {}  # {system: iteration} of the critical points that the training curves reach
    last = {}  # {system: {source: final difference}}
    for system, pairs in paired(config, runs).items():
        run, base, _ = pairs[0]
        window, per_iter = config.window or run.config["rel_window"], run.config["tokens_per_iter"]
        length = sum(all(i in p[2]["train"] for p in pairs) for i in pairs[0][2]["train"])
        if window > length:
            print(f"{system}: a moving average over {window} iterations is longer than its curve: {length} were used, lower "
                  "--window", file=sys.stderr)
            window = length
        facts = content[system] = {"baseline": base.system, "seeds": [p[0].config["seed"] for p in pairs], "window": window,
                                   "tokens_per_iter": per_iter, "curves": {}, "final": {}}
        for key in pairs[0][2]:
            x, y = over_seeds([p[2].get(key, {}) for p in pairs], window if key == "train" else 1)
            if not len(x):
                continue
            facts["curves"][key] = {"iteration": x.tolist(), "mean": y.mean(0).tolist(), "low": y.min(0).tolist(),
                                    "high": y.max(0).tolist()}
            facts["final"][key] = {"iteration": float(x[-1]), "mean": float(y[:, -1].mean()), "seeds": y[:, -1].tolist(),
                                   "interval_95": t_interval(y[:, -1].tolist())}
            if key in curves:
                curves[key][0][system] = [(x, y.mean(0))]
                if len(pairs) > 1:
                    curves[key][1][system] = x, y.min(0), y.max(0)
            if key == "train":
                points = [critical_point(x, curve, config.fit_last) for curve in (y.mean(0), *y)]
                for point in points:
                    point["tokens"] = None if point["iteration"] is None else point["iteration"] * per_iter
                facts["critical_point"], facts["critical_points_of_seeds"] = points[0], points[1:]
        last[system] = {key[4:]: f["mean"] for key, f in facts["final"].items() if key.startswith("val/")}
        point = facts["critical_point"]
        if point["kind"] == "crossed":
            turns[system] = point["iteration"]
        cells = []
        for key in ("train", "val", "val_mean"):
            f = facts["final"].get(key)
            interval = "" if not f or f["interval_95"] is None else " [{:+.4f}, {:+.4f}]".format(*f["interval_95"])
            cells.append(f"{f['mean']:+.4f}{interval}" if f else "-")
        rows.append([system, base.system, len(pairs), *cells, point["kind"] if point["iteration"] is None else
                     f"{point['kind']}: {point['iteration']:,.0f} ({point['tokens']:,.0f} tokens)", point["crossings"]])
    if not rows:
        print("no run with a baseline to compare it with: nothing to show")
        return
    names = list(dict.fromkeys(s for finals in last.values() for s in finals))
    if names:
        print("loss - baseline's at the last evaluation, by source (nats per token)")
        print(train.aligned(["system", *names], [
            [system, *(f"{finals[s]:+.4f}" if s in finals else "-" for s in names)] for system, finals in last.items()]) + "\n")
    unit = "loss - baseline's (nats per token)"
    windows = " or ".join(str(w) for w in dict.fromkeys(facts["window"] for facts in content.values()))
    panels = [dict(series=curves["train"][0], bands=curves["train"][1], x="iteration", y=unit, zero=True, at=turns,
                   title=f"training, moving average over {windows} iterations"),
              dict(series=curves["val"][0], bands=curves["val"][1], x="iteration", y=unit, zero=True, marks=True,
                   title="validation")]
    if len(names) > 1:
        panels.append(dict(series={s: [(list(f.values()), list(f))] for s, f in last.items() if f}, x=unit, y="source",
                           apart=True, title="validation by source, last evaluation"))
    common.write(
        config, runs, "relative_loss",
        ["system", "baseline", "seeds", "train [95 %]", "val [95 %]", "mean over sources [95 %]", "critical point (iteration)",
         "crossings"], rows, content, lambda path: plot.draw(
            path, panels, "Relative loss", "Below zero: ahead of the baseline on the same batches. A curve that comes up "
            "through zero has its critical point there (vertical line).\nLines: mean over seeds; bands: lowest to highest."))


if __name__ == "__main__":
    command(main)
