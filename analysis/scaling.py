"""
Scaling: loss against parameters and tokens, and how much of either a system saves at equal loss.

    python -m analysis.scaling                      # the paper's Table 5, worked as an example
    python -m analysis.scaling out/table4           # every system there against vanilla
    python -m analysis.scaling out/mine --systems=vanilla,resformer --loss=val_loss

Runs at several sizes and one number of tokens give a saving of parameters, runs at several numbers of tokens and one size a
saving of data. With L_B and L_S fitted to the baseline's and the system's points (x, loss), x = N or D,

    saving = 1 - x* / x_end,    L_S(x*) = L_B(x_end)    (x_end: the baseline's last point; the paper's section 4.2)

so 10 % means: the baseline's final loss is reached with 10 % less; below zero the system needs more. The answer depends on
the form that is fitted, on whether N counts embeddings, and on the loss, so every form is shown:

    line        loss = a + b ln x
    loglog      ln loss = a + b ln x
    piecewise   loss linear in ln x between the points, and beyond them as between the last two
    offset      loss = a x^-b + c, needs 3 points

A 95 % interval is given for --form: over seeds (Student's t; each seed is fitted on its own, system and baseline paired), or
else from the residuals of the fit (first-order propagation; at least two more points than the form has numbers; it knows
nothing of a wrong form, as the range does). With three points and one seed, as in Table 5, the range is all that can be said:
a line leaves one degree of freedom for each system, and there the residuals of both (+0.011, -0.020, +0.009 and +0.013, -0.024,
+0.011) have the signs and nearly the size of each other, as a bend that they share has and independent noise seldom. An
interval that takes them for noise would be none.

Points are means over the same seeds of both systems; others are named and left out. Only final losses of runs whose learning
rate has decayed to its end count: before that, the loss is still on its way down.
"""
import dataclasses
import math
import os
import statistics
import sys
from dataclasses import dataclass
from typing import Literal

import numpy as np

import train
from analysis import common, plot
from analysis.relative_loss import t_95, t_interval
from configurator import UserError, command
from model import GPTConfig

# The paper's Table 5 (ICLR numbering): validation loss by source after 20B tokens, length 2,048; T: vanilla, R: ResFormer
SOURCES = {"CommonCrawl": 0.5, "C4": 0.2, "GitHub": 0.1, "StackExchange": 0.05, "Wikipedia": 0.05, "Book": 0.05, "ArXiv": 0.05}
TABLE_5 = {
    ("T", "82M"): (3.3595, 3.5388, 1.4247, 2.3872, 2.9047, 3.3797, 2.1779),
    ("R", "82M"): (3.3362, 3.5191, 1.3941, 2.3592, 2.8646, 3.3572, 2.1518),
    ("T", "180M"): (3.0961, 3.2834, 1.2451, 2.1651, 2.5897, 3.1309, 2.0001),
    ("R", "180M"): (3.0631, 3.2504, 1.2200, 2.1350, 2.5435, 3.0994, 1.9732),
    ("T", "468M"): (2.8514, 3.0430, 1.0908, 1.9628, 2.2821, 2.8979, 1.8362),
    ("R", "468M"): (2.8214, 3.0115, 1.0730, 1.9388, 2.2477, 2.8696, 1.8142),
}
SIZES = {"82M": (81_901_056, 30_417_408), "180M": (179_874_048, 102_648_576), "468M": (467_921_920, 364_954_624)}
AXES = {"n_params": "parameters", "n_params_non_embedding": "non-embedding parameters", "tokens": "tokens"}
SHAPE = "block_size", "vocab_size", "n_layer", "n_head", "n_embd", "n_ffn"  # a size's options; the others are a system's


@dataclass
class Config(common.Options):
    loss: str = "val_mean"  # val_mean (mean over sources, as the paper), val_loss (the whole bin), or the name of a source
    systems: str = ""  # beginnings of runs' names, as vanilla,resformer; empty: systems are told apart by their options
    baseline: str = ""  # the system to compare with; empty: vanilla, or else the first of --systems
    form: Literal["line", "loglog", "piecewise", "offset"] = "line"  # of the interval and the picture's lines


# ---------------------------------------------------------------------------------------------------------------------
# Fits: each takes x and loss (arrays) and returns (loss at x, x at a loss: nan where there is none, what to report)


def fit_line(x, y):
    b, a = np.polyfit(np.log(x), y, 1)
    return lambda q: a + b * np.log(q), lambda loss: np.exp((loss - a) / b) if b < 0 else math.nan, {"a": a, "b": b}


def fit_loglog(x, y):
    at, x_at, numbers = fit_line(x, np.log(y))
    return lambda q: np.exp(at(q)), lambda loss: x_at(np.log(loss)), numbers


def fit_piecewise(x, y):
    """Linear interpolation in ln x; outside of the points, the first or last piece goes on."""
    u = np.log(x)

    def piece(k, q):
        return y[k] + (y[k + 1] - y[k]) * (q - u[k]) / (u[k + 1] - u[k])

    def at(q):
        k = np.clip(np.searchsorted(u, np.log(q)) - 1, 0, len(u) - 2)
        return piece(k, np.log(q))

    def x_at(loss):
        if (np.diff(y) >= 0).any():  # a loss that rises somewhere has several x, or none
            return math.nan
        k = np.clip(np.searchsorted(-y, -loss) - 1, 0, len(u) - 2)
        return np.exp(u[k] + (u[k + 1] - u[k]) * (loss - y[k]) / (y[k + 1] - y[k]))

    return at, x_at, {}


def fit_offset(x, y):
    """
    Least squares by variable projection: for each exponent b the other two numbers are a linear fit, of z = (1 - u^-b) / b with
    u = x / geometric mean, which becomes ln u for b -> 0, so that the search is well-conditioned down to the straight line.
    """
    middle = np.exp(np.log(x).mean())
    u = x / middle
    low, high = 1e-4, 5.0
    for _ in range(9):
        grid = np.geomspace(low, high, 33)
        z = (1 - u[None] ** -grid[:, None]) / grid[:, None]
        dz, dy = z - z.mean(1, keepdims=True), y - y.mean()
        slopes = (dz @ dy) / (dz ** 2).sum(1)
        best = int(np.argmin(((dy - slopes[:, None] * dz) ** 2).sum(1)))
        b, slope, start = grid[best], slopes[best], y.mean() - slopes[best] * z[best].mean()
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, 32)]

    def x_at(loss):
        inner = 1 - b * (loss - start) / slope if slope < 0 else -1.0
        return middle * inner ** (-1 / b) if inner > 0 else math.nan

    return (lambda q: start + slope * (1 - (q / middle) ** -b) / b, x_at,
            {"a": -slope / b * middle ** b, "b": b, "c": start + slope / b})


FORMS = {"line": (fit_line, 2), "loglog": (fit_loglog, 2), "piecewise": (fit_piecewise, 2), "offset": (fit_offset, 3)}


def saving(form, base, system):
    """1 - x* / x_end for (x, loss) of the baseline and of the system, x ascending; nan where it isn't defined."""
    fit, needs = FORMS[form]
    if min(len(base[0]), len(system[0])) < needs:
        return math.nan
    with np.errstate(over="ignore"):  # a fit that is all but flat puts x* anywhere
        return float(1 - fit(*system)[1](fit(*base)[0](base[0][-1])) / base[0][-1])


def residual_interval(form, base, system):
    """
    (low, high): the 95 % interval from the fits' residuals, pooled over both, by first-order propagation of each point's
    error to the saving; None when a fit has fewer than two points to spare.
    """
    fit, numbers = FORMS[form]
    if form == "piecewise" or min(len(base[0]), len(system[0])) < numbers + 2:
        return None
    squares = sum(((y - fit(x, y)[0](x)) ** 2).sum() for x, y in (base, system))
    df = len(base[0]) + len(system[0]) - 2 * numbers
    sigma, step, gradient = math.sqrt(squares / df), 1e-5, []
    for which in (0, 1):
        for i in range(len((base, system)[which][1])):
            ends = []
            for sign in (1, -1):
                points = [(x, y.copy()) for x, y in (base, system)]
                points[which][1][i] += sign * step
                ends.append(saving(form, *points))
            gradient.append((ends[0] - ends[1]) / (2 * step))
    middle, half = saving(form, base, system), t_95(df) * sigma * math.hypot(*gradient)
    return (middle - half, middle + half) if math.isfinite(half) else None


def analyse(form, base, system):
    """
    Savings of a system whose points are {x: {seed: loss}}, against a baseline's: by form, their range, the interval of the
    given form and what it rests on, and the fits of both.
    """
    def points(losses, seed=None):
        xs = sorted(losses)
        return np.array(xs, float), np.array([statistics.fmean(losses[x].values()) if seed is None else losses[x][seed]
                                              for x in xs])

    both = points(base), points(system)
    forms = {name: train.finite(saving(name, *both)) for name in FORMS}
    known = [s for s in forms.values() if s is not None]
    seeds = set.intersection(*(set(losses) for p in (base, system) for losses in p.values()))
    of_seeds = [train.finite(saving(form, points(base, s), points(system, s))) for s in sorted(seeds)] if len(seeds) > 1 else []
    interval, rests_on = None, "range over fits only"
    if of_seeds and None not in of_seeds:
        interval, rests_on = t_interval(of_seeds), f"{len(of_seeds)} seeds"
    else:
        spread = residual_interval(form, *both)
        if spread:
            interval, rests_on = spread, "residuals"
    fits = [{name: {k: float(v) for k, v in fit(*p)[2].items()} for name, (fit, needs) in FORMS.items() if len(p[0]) >= needs}
            for p in both]
    return {"x_end": both[0][0][-1], "forms": forms, "range": [min(known), max(known)] if known else None, "form": form,
            "interval_95": interval, "interval_from": rests_on, "seeds": of_seeds,
            "points": [{"x": p[0].tolist(), "loss": p[1].tolist()} for p in both], "fits": fits}


# ---------------------------------------------------------------------------------------------------------------------
# Points


def system_name(run, names):
    """
    Of --systems the run's own folder's or else the longest that a part of its name begins with (or None); without them the
    method's options.
    """
    if (own := os.path.basename(run.system)) in names:
        return own
    if names:
        return max((n for n in names for part in run.name.split(os.sep) if part.startswith(n)), key=len, default=None)
    own = []
    for f in dataclasses.fields(GPTConfig):
        value = getattr(run.shape, f.name)
        if f.name == "n_kv_head":  # as a share of the heads, which is what stays when the size changes
            own += [f"GQA{run.shape.n_head // run.shape.kv_heads}"] if run.shape.kv_heads < run.shape.n_head else []
        elif f.name not in SHAPE and value != f.default:
            own.append(f.name if value is True else f"{f.name}={value}")
    return " ".join(own) or "vanilla"


NEEDED = dict(n_params=int, n_params_non_embedding=int, lr_decay_iters=int, decay_lr=bool, learning_rate=float)


def usable(config, runs, most=""):
    """
    [(run, system, loss)] of the runs that count; says which do not, and why. What most runs have is usual: most of those whose
    name begins with `most`, if there are any.
    """
    names, found, seen = [n.strip() for n in config.systems.split(",") if n.strip()], [], {}
    runs = [run for run, _ in common.usable(common.logged(runs), lambda run: common.needed(run, **NEEDED),
                                            "none of these runs has a whole config.json: give others")]
    same = ("data", "block_size", "learning_rate", "eval_iters x batch_size")
    settings = [tuple({**r.config, **{k: r.config["comparable"].get(k) for k in (same[0], same[3])}}[k] for k in same)
                for r in runs]
    voters = [mine for run, mine in zip(runs, settings) if run.name.startswith(most)] or settings
    usual = max(voters, key=voters.count)
    for run, mine in zip(runs, settings):
        c, (_, evals), system = run.config, run.log, system_name(run, names)
        key = system, c["n_params"], c["tokens_per_iter"] * c["max_iters"], c["seed"]
        if system is None:
            common.skip(run, f"its name begins with none of --systems={config.systems}")
        elif c["max_iters"] not in evals:
            common.skip(run, f"not finished: no evaluation at iteration {c['max_iters']}")
        elif not c["decay_lr"] or c["lr_decay_iters"] > c["max_iters"]:
            common.skip(run, f"its learning rate had not decayed at its end (decay_lr={c['decay_lr']}, lr_decay_iters="
                        f"{c['lr_decay_iters']}, max_iters={c['max_iters']})")
        elif mine != usual:
            folders = {s[0]: f"{r.config['data']} ({s[0]})" for s, r in zip(settings, runs)}  # of fingerprints
            common.skip(run, ", ".join(f"its {what} is {folders.get(own, own)} and most runs' {folders.get(other, other)}"
                                       + " (other tokens)" * (what == "data")
                                       for what, own, other in zip(same, mine, usual) if own != other))
        elif key in seen:
            common.skip(run, f"{seen[key]} is of the same system, size, tokens and seed")
        else:
            line = evals[c["max_iters"]]
            if config.loss not in ("val_mean", "val_loss", *line["val"]):
                raise UserError(f"--loss={config.loss}: {run.name} has val_mean, val_loss"
                                + "".join(f", {s}" for s in line["val"]))
            loss = line["val"].get(config.loss, line.get(config.loss))
            if loss is None or loss <= 0:
                common.skip(run, f"its final {config.loss} is {loss}")
                continue
            seen[key] = run.name
            found.append((run, system, loss))
    return found


def matched(losses, said):
    """
    Two systems' {x: {seed: loss}} with the same seeds in both, so that a difference of systems is none of seeds: those that all
    points have, if these are two or more (the interval then rests on the same), or else at each x those that both have there.
    losses: {system: {x: {seed: loss}}}. Says what is left out, if said (what x is) isn't empty.
    """
    one, other = losses.values()
    shared = set.intersection(*(set(seeds) for of in (one, other) for seeds in of.values()))
    out = []
    for system, of in losses.items():
        kept = {}
        for x, seeds in of.items():
            alone = shared or set(seeds)  # at an x of one system alone
            both = set(seeds) & set(one.get(x, alone)) & set(other.get(x, alone))
            keep = shared if len(shared) > 1 else both
            left = ", ".join(str(seed) for seed in sorted(set(seeds) - keep))
            if left and said:
                where = "at every point of" if len(shared) > 1 else "there of"
                print(f"{system} at {x:,} {said}: left out: seed {left}: not {where} {' and '.join(losses)}", file=sys.stderr)
            if keep:
                kept[x] = {seed: seeds[seed] for seed in seeds if seed in keep}
        out.append(kept)
    return out


def from_runs(config, runs):
    """[(system, baseline, axis, what is fixed, base points, system points)], a comparison each, of {x: {seed: loss}}."""
    found = usable(config, runs)
    systems = list(dict.fromkeys(system for _, system, _ in found))
    first = config.systems.split(",")[0].strip()
    baseline = config.baseline or ("vanilla" if "vanilla" in systems or not config.systems else first)
    if found and baseline not in systems:
        raise UserError((f"--baseline={baseline}: no usable run of that system" if config.baseline else
                         f"no usable run of {baseline} to compare with: give one too, or name another system with --baseline")
                        + f"; there are {', '.join(systems)}")
    groups = {}  # {(axis, what is fixed): {system: {x: {seed: loss}}}}
    for run, system, loss in found:
        c, s = run.config, run.shape
        tokens = c["tokens_per_iter"] * c["max_iters"]
        size = f"{s.n_layer} layers of {s.n_embd}, n_ffn {s.ffn}"
        for axis, fixed, x in (("n_params", f"{tokens:,} tokens", c["n_params"]),
                               ("n_params_non_embedding", f"{tokens:,} tokens", c["n_params_non_embedding"]),
                               ("tokens", size, tokens)):
            groups.setdefault((axis, fixed), {}).setdefault(system, {}).setdefault(x, {})[c["seed"]] = loss
    out = []
    for (axis, fixed), of in groups.items():
        for system in of:
            if system != baseline and baseline in of and min(len(of[baseline]), len(of[system])) > 1:
                said = "" if axis == "n_params_non_embedding" else AXES[axis]  # the same runs as n_params, said there
                base, own = matched({baseline: of[baseline], system: of[system]}, said)
                if min(len(base), len(own)) > 1:
                    out.append((system, baseline, axis, fixed, base, own))
    for system in systems:
        if system != baseline and system not in [row[0] for row in out]:
            print(f"{system}: left out: it and {baseline} need two sizes at one number of tokens, or two numbers of tokens at "
                  "one size", file=sys.stderr)
    return out


def table_5():
    """The same comparisons from the paper's Table 5, for the mean over sources and for the mean weighted by the mixture."""
    print("Table 5: validation loss by source (vanilla T, ResFormer R; 20B tokens)")
    weigh = {"mean": lambda row: statistics.fmean(row),
             "mixture-weighted": lambda row: sum(w * loss for w, loss in zip(SOURCES.values(), row))}
    print(train.aligned(["model", *SOURCES, *weigh], [
        [f"{system} {size}", *(f"{v:.4f}" for v in row), *(f"{f(row):.4f}" for f in weigh.values())]
        for (system, size), row in TABLE_5.items()]) + "\n")
    losses = [{(system, size): f(row) for (system, size), row in TABLE_5.items()} for f in weigh.values()]
    return [("ResFormer", "vanilla", axis, f"{name} loss, 20B tokens", *(
        {SIZES[size][i]: {42: loss[system, size]} for size in SIZES} for system in "TR"))
        for name, loss in zip(weigh, losses) for i, axis in enumerate(list(AXES)[:2])]


def panel(form, system, baseline, axis, fixed, result):
    """The points, the fitted lines, and the gap between them at the baseline's final loss."""
    one = dict(series={}, points={}, log="x", x=AXES[axis], y="loss (nats per token)", title=fixed)
    for name, p in zip((baseline, system), result["points"]):
        x, y = np.array(p["x"]), np.array(p["loss"])
        one["points"][name] = x, y
        one["title"] = fixed if len(x) >= FORMS[form][1] else f"{fixed}: too few points for a line"
        if len(x) >= FORMS[form][1]:
            xs = np.geomspace(x[0], x[-1], 60)
            one["series"][name] = [(xs, FORMS[form][0](x, y)[0](xs))]
        else:
            one["series"][name] = [([], [])]
    part = result["forms"][form]
    if part is not None:
        x, y = np.array(result["points"][0]["x"]), np.array(result["points"][0]["loss"])
        height = float(FORMS[form][0](x, y)[0](x[-1]))
        one["series"][f"saving {part:.1%}"] = [([x[-1] * (1 - part), x[-1]], [height, height])]
    return one


NO_INTERVAL = ("no 95 % interval where the last column says so: that takes two seeds at every point, or two more points than "
               "the form has numbers; fewer residuals show the form's error, not the noise")


def percent(x):
    return "-" if x is None else f"{x:.1%}"


def main():
    config, runs = common.arguments(Config, sys.argv[1:], needs_runs=False)
    changed = [f.name for f in dataclasses.fields(Config) if getattr(config, f.name) != f.default
               and f.name not in ("out_dir", "form")]
    if changed and not runs:
        raise UserError(f"--{changed[0]}={getattr(config, changed[0])}: is about runs; without any, the paper's Table 5 is "
                        "worked through")
    comparisons = from_runs(config, runs) if runs else table_5()
    if not comparisons:
        print("nothing to fit: it takes a baseline and another system, both at two sizes or more, or at two numbers of tokens")
        return
    rows, content, panels = [], [], []
    for system, baseline, axis, fixed, base, own in comparisons:
        r = analyse(config.form, base, own)
        content.append({"system": system, "baseline": baseline, "axis": axis, "fixed": fixed,
                        "loss": config.loss if runs else fixed.split(" loss")[0], **r})
        interval = f"{percent(r['interval_95'][0])} .. {percent(r['interval_95'][1])} ({r['interval_from']})" \
            if r["interval_95"] else r["interval_from"]
        rows.append([system, AXES[axis], fixed, f"{len(own)}", *(percent(r["forms"][f]) for f in FORMS),
                     " .. ".join(percent(x) for x in r["range"]) if r["range"] else "-", interval])
        panels.append(panel(config.form, system, baseline, axis, fixed, r))
    head = ["system", "saving of", "at", "points", *FORMS, "range over fits", f"95 % interval ({config.form})"]
    common.write(config, runs, "scaling", head, rows, content, lambda path: plot.draw(
        path, panels, f"Scaling, fitted form: {config.form}", "Look for: the horizontal gap between the lines at the "
        "baseline's final loss. It is the saving; below zero, the system needs more."))
    if any(r["interval_95"] is None for r in content):
        print(NO_INTERVAL)


if __name__ == "__main__":
    command(main)
