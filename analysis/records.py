"""
The records of the reproduction for analysis.report and analysis.claims: finished runs by system, budget and seed, in pools that
are never mixed, their paired differences, how both are shown, and the paper's numbers. Imports nothing of those two.
"""
import contextlib
import io
import json
import math
import os
import statistics
from dataclasses import dataclass

import prepare
import train
from analysis import common, relative_loss, scaling
from analysis.relative_loss import t_95, t_interval
from configurator import UserError

PAPER_TOKENS = 20e9  # the paper's differences below are at 20B tokens; all but identity's are from summaries of its v5
PAPER = {"vanilla": 0.0, "identity": -0.027, "constant": -0.039, "learnable": -0.034, "sparse": -0.052, "plus": -0.058,
         "svformer": None, "neutreno": None, "denseformer": None}  # in the order of the tables
PAPER_SAVING = 0.203
PAPER_PARAMETERS = 0.104, 0.133, 0.1611  # saved, by v3, v4 and v5 of the paper; v3's is a line's in ln N
PAPER_ABLATIONS = {**PAPER, "query_residual": 0.003, "key_residual": 0.007, "hidden_residual": 0.042,
                   "attention_residual": 0.018}  # v5, second-hand
ARMS = "sizes", "ablations", "kv", "lengths", "rates"  # folders whose subfolders are pools of their own


@dataclass
class Point:
    """A finished run: its record as train.read_log returns it, and the last evaluation's line."""
    run: common.Run
    log: tuple
    end: dict


def checked(run):
    """The run's log. Raises UserError when it or config.json lacks a number that the report needs."""
    common.needed(run, kv_bytes_per_token=int, eval_iters=int, warmup_iters=int, **scaling.NEEDED)
    wrong = [k for k in ("n_params", "kv_bytes_per_token", "tokens_per_iter") if run.config[k] <= 0]
    if not isinstance(run.config["comparable"].get("data"), str):
        wrong.append("data's fingerprint")
    if wrong:
        raise UserError(f"{run.path}/config.json: damaged, its {' and '.join(wrong)}; copy it again")
    return run.log


# what is no part of a system, beside train.comparable, which is of the data and the schedule
STRONGER = "qk_norm", "scaled_init"  # options of a stronger baseline
MODEL = *scaling.SHAPE, "dropout", "rope_theta", *STRONGER
OPTIMIZER = "weight_decay", "beta1", "beta2", "grad_clip", "dtype"


def alike(run):
    """What must be equal for a difference of two runs' losses to be the system's alone."""
    return {**run.config["comparable"], **{k: getattr(run.shape, k) for k in MODEL},
            **{k: run.config.get(k) for k in OPTIMIZER}}


class Pool:
    """
    Runs that may be paired. points: {(system, tokens): {seed: Point}}, finished, decayed and alike; tokens: the budget of most
    of those whose name begins with `most` (None: there is none), which also say what data, length, learning rate and evaluation
    are the usual ones. skip(name, reason) hears what is not used.
    """

    def __init__(self, runs, skip, most=""):
        self.points = {}
        with hearing(skip):  # scaling has the rules for what counts
            systems = ",".join(sorted({os.path.basename(r.system) for r in runs}))
            found = scaling.usable(scaling.Config(systems=systems), runs, most) if runs else []
        for run, system, _ in found:
            self.points.setdefault((system, run.config["tokens_per_iter"] * run.config["max_iters"]), {})[
                run.config["seed"]] = Point(run, run.log, run.log[1][run.config["max_iters"]])
        budgets = [t for (_, t), of in self.points.items() for p in of.values() if p.run.name.startswith(most)]
        self.tokens = statistics.mode(budgets) if budgets else None
        for tokens, seed in sorted({(t, seed) for (_, t), of in self.points.items() for seed in of}):
            beside = {s: of[seed] for (s, t), of in self.points.items() if t == tokens and seed in of}
            all_of = [alike(p.run) for p in beside.values()]
            base = beside.get("vanilla") or max(beside.values(), key=lambda p: all_of.count(alike(p.run)))
            for system, p in beside.items():
                try:
                    train.same(alike(base.run), alike(p.run), base.run.name)
                except UserError as e:
                    skip(p.run.name, e)
                    del self.points[system, tokens][seed]
                else:
                    if "vanilla" not in beside:
                        some = "that seed" if self.at("vanilla", tokens) else "as many tokens"
                        skip(p.run.name, f"in no difference: there is no vanilla of {some}")

    def at(self, system, tokens):
        return self.points.get((system, tokens), {})

    def budgets(self, system):
        return sorted(t for (s, t), of in self.points.items() if s == system and of)

    def systems(self, tokens):
        """Names of those with a run at that budget (None: at any), in the order of place."""
        return sorted({s for (s, t), of in self.points.items() if tokens in (t, None) and of}, key=place)

    def said(self, tokens=None):
        """That budget (None: the pool's), in words."""
        tokens = tokens or self.tokens
        iters = {p.run.config["max_iters"] for (_, t), of in self.points.items() if t == tokens for p in of.values()}
        return f"{amount(tokens)} tokens" + (f" in {iters.pop():,} iterations" if len(iters) == 1 else "")

    def runs(self):
        """Those of its budget."""
        return [p.run for s in self.systems(self.tokens) for p in self.at(s, self.tokens).values()]

    def difference(self, system, base, tokens, value=lambda line: line["val_mean"]):
        return difference(*(self.losses(s, tokens, value) for s in (system, base)))

    def losses(self, system, tokens, value=lambda line: line["val_mean"]):
        """{seed: loss, mean over sources (or another value of the last evaluation)} of the runs of that budget."""
        return {seed: value(p.end) for seed, p in self.at(system, tokens).items()}

    def on_the_way(self, system, tokens, budget=None):
        """The same of runs of a larger budget (None: the pool's) when they had seen so many tokens, if evaluated then."""
        found = {}
        for seed, p in self.at(system, budget or self.tokens).items():
            i, rest = divmod(tokens, p.run.config["tokens_per_iter"])
            if not rest and i in p.log[1]:
                found[seed] = p.log[1][i]["val_mean"]
        return found

    def deviations(self, losses, tokens, base="vanilla"):
        """Every system's losses(system, tokens) minus base's (None: minus 0), as differences for noise."""
        of = {s: losses(s, tokens) for s in self.systems(None)}
        return [difference(x, of.get(base, {}) if base else dict.fromkeys(x, 0.0)) for s, x in of.items() if s != base]

    def noise(self, tokens=None, base="vanilla"):
        """
        noise of the differences to base (None: of losses) at that budget (None: the pool's), or where no system has two seeds
        of the pool's runs on their way at as many tokens; of a larger budget that of the pool's, as if it grew no more, unless
        its own is of as many seeds.
        """
        tokens = tokens or self.tokens
        found = noise(self.deviations(self.losses, tokens, base)) or noise(self.deviations(self.on_the_way, tokens, base))
        usual = self.noise(base=base) if self.tokens and tokens > self.tokens else None
        return max((sd for sd in (found, usual) if sd), key=lambda sd: sd["df"], default=None)

    def hurried(self, system, tokens):
        """
        How much a budget's final loss lies above that of its longest runs when they had seen as many tokens, before their
        decay, as a difference over seeds: above 0, the schedule was too short to show what these tokens can do. None: unknown.
        """
        longer = [self.on_the_way(system, tokens, t) for t in self.budgets(system) if t > tokens]
        found = [d for way in longer if (d := difference(self.losses(system, tokens), way))]
        return found[-1] if found else None

    def relative(self, system, tokens):
        """(iterations (T,), training loss - vanilla's (seeds, T)), smoothed over rel_window; None without a pair of runs."""
        own, base = self.at(system, tokens), self.at("vanilla", tokens)
        seeds = sorted(own.keys() & base.keys())
        return relative_loss.over_seeds([relative_loss.compare(own[s].log, base[s].log)["train"] for s in seeds],
                                        own[seeds[0]].run.config["rel_window"]) if seeds else None

    def critical(self, system, tokens):
        """
        (the critical point of the mean over seeds, {seed: its own}), each as relative_loss.critical_point's, with "tokens";
        None without a pair of runs.
        """
        if (curve := self.relative(system, tokens)) is None:
            return None
        seeds = sorted(self.at(system, tokens).keys() & self.at("vanilla", tokens).keys())
        per_iter = self.at(system, tokens)[seeds[0]].run.config["tokens_per_iter"]
        x, y = curve
        found = [relative_loss.critical_point(x, one) if len(x) else {"kind": "not reached", "iteration": None}
                 for one in (y.mean(0), *y)]
        for point in found:
            point["tokens"] = None if point["iteration"] is None else point["iteration"] * per_iter
        return found[0], dict(zip(seeds, found[1:]))


class Records(Pool):
    """
    What the results folder holds. As a Pool: family/, with the budget of most runs. curve: Pool of tokens/, and of family/'s
    where their batch is the same. pools: {folder: {arm: Pool}} of the folders of ARMS that are there, by length, learning rate
    and size. left_out: lines that name what was not used, and why.
    """

    def __init__(self, root):
        known = "family", "tokens", "mechanism", *ARMS
        if not any(os.path.isdir(os.path.join(root, name)) for name in known):
            found = f"holds none of {'/, '.join(known)}/" if os.path.isdir(root) else "no such folder"
            raise UserError(f"{root}: {found}; expected the folder of results, such as results/")
        self.root, self.left_out = root, []
        family, others = self.below("family"), self.below("tokens")
        super().__init__(family, self.skip)
        batch = statistics.mode(r.config["tokens_per_iter"] for r in others or family) if others or family else None
        for run in others:
            if run.config["tokens_per_iter"] != batch:
                self.skip(run.name, f"{run.config['tokens_per_iter']:,} tokens_per_iter, most runs of tokens/ have {batch:,}")
        self.curve = Pool([r for r in family + others if r.config["tokens_per_iter"] == batch], self.skip,
                          "family" if any(r.config["tokens_per_iter"] == batch for r in family) else "")
        for (_, tokens), of in self.points.items():
            for p in of.values() if tokens != self.tokens else ():
                self.skip(p.run.name, f"{amount(tokens)} tokens, most runs of family/ have {amount(self.tokens)}")
        for system in PAPER if os.path.isdir(os.path.join(root, "family")) else ():
            if not self.points.get((system, self.tokens)):
                self.skip(f"family/{system}", "no finished run")
        self.pools = {folder: self.arms(folder) for folder in ARMS if os.path.isdir(os.path.join(root, folder))}

    def walk(self, folder):
        """prepare.walk of that folder, sorted by path; what can't be read is named."""
        return sorted(prepare.walk(os.path.join(self.root, folder), lambda e: self.skip(
            os.path.relpath(e.filename, self.root), f"can't be read ({e.strerror})")))

    def below(self, folder):
        """The runs in that folder of the results whose record can be read."""
        runs = []
        for path, files in self.walk(folder):
            if {"config.json", "log.jsonl"} & set(files):
                try:
                    checked(run := common.Run(path, self.root))
                    runs.append(run)
                except (UserError, TypeError, ValueError, OSError) as e:
                    self.skip(os.path.relpath(path, self.root), str(e).replace(self.root.rstrip("/") + "/", ""))
        return runs

    def arms(self, folder):
        """{ARM ("": there is none): Pool} of folder/ARM/SYSTEM/seedSEED/, each at the budget of most of its runs."""
        runs, pools = {}, {}
        for run in self.below(folder):
            runs.setdefault(os.path.dirname(run.system)[len(folder) + 1:], []).append(run)
        for arm, of in runs.items():
            pool = Pool(of, self.skip)
            for (system, tokens), points in list(pool.points.items()):
                if tokens != pool.tokens or not points:
                    for p in points.values():
                        self.skip(p.run.name, f"{amount(tokens)} tokens, most runs beside it {amount(pool.tokens)}")
                    del pool.points[system, tokens]
            if pool.points:
                pools[arm] = pool
        return dict(sorted(pools.items(), key=lambda item: [
            item[1].runs()[0].config[k] for k in ("block_size", "learning_rate", "n_params")]))

    def noise_for(self, pool, base="vanilla"):
        """
        noise(base) of a pool's systems, or else of all pools that have as many tokens in as many iterations, or of family/.
        """
        def budget(p):
            return p.tokens, p.runs()[0].config["max_iters"]
        like = [p for of in self.pools.values() for p in of.values() if budget(p) == budget(pool)]
        return pool.noise(base=base) or noise(
            d for p in like for d in p.deviations(p.losses, p.tokens, base)) or self.noise(pool.tokens, base)

    def noise_at(self, tokens, base="vanilla"):
        """noise(tokens, base) of curve, or of family/."""
        return self.curve.noise(tokens, base) or self.noise(tokens, base)

    def skip(self, name, reason):
        if (line := f"{name}: {reason}") not in self.left_out:  # a run of family/ is in two pools
            self.left_out.append(line)

    def json(self, name):
        """The object in that file of the results folder, or None."""
        try:
            with open(os.path.join(self.root, name), encoding="utf-8") as f:
                if isinstance(content := json.load(f), dict):
                    return content
            self.skip(name, f"holds {type(content).__name__}, not an object of names")
        except FileNotFoundError:
            self.skip(name, "not there")
        except OSError as e:
            self.skip(name, f"can't be read ({e.strerror})")
        except ValueError as e:
            self.skip(name, f"no JSON ({e})")


@contextlib.contextmanager
def hearing(skip):
    """Lines that analysis.scaling prints of what it leaves out go to skip(name, reason)."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        yield
    for line in said.getvalue().splitlines():
        skip(*line.split(": left out: "))


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


def reach(sd, n):
    """How far from 0 noise alone takes a mean of n paired differences, at 95 %; inf where the noise is not known."""
    return t_95(sd["df"]) * sd["std"] / math.sqrt(n) if sd else math.inf


def noise(differences):
    """
    {"std", "df"} of a paired difference from seed to seed; None without a system of two pairs. The std is pooled over the
    systems with the most seeds, the degrees of freedom are those of one: differences to the same runs of a baseline go up
    and down together, so that any number of systems of two seeds says little more than one of them.
    """
    several = dict.fromkeys(  # the copies of a run in two folders count once
        tuple(d["seeds"].values()) for d in differences if d and len(d["seeds"]) > 1)
    most = max(map(len, several), default=0)
    of = [statistics.variance(v) for v in several if len(v) == most]
    return {"std": math.sqrt(statistics.fmean(of)), "df": most - 1} if of else None


# ---------------------------------------------------------------------------------------------------------------------
# How numbers are shown


def number(x, form=".4f"):
    return "-" if x is None else format(x, form)


def amount(tokens):
    return f"{tokens / 1e9:.3g}B" if tokens >= 1e7 else f"{tokens / 1e6:.3g}M"


def bracket(interval, show):
    """An interval (low, high), each end as show(end) has it; nothing without one."""
    return f" [{show(interval[0])}, {show(interval[1])}]" if interval else ""


def extrapolated(far):
    """A number at PAPER_TOKENS, as report.against_tokens has it."""
    ends = ", no useful interval" if far["vague"] else bracket((far["low"], far["high"]), "{:+.2g}".format)
    return f"{far['mean']:+.4f}{ends}"


def saving_interval(found):
    """That of report.horizontal; * where an end continues the first or last piece beyond the system's budgets or sizes."""
    return (bracket(found["interval_95"] or found["interval_outside"], scaling.percent)
            + "*" * (found["interval_outside"] is not None))


def spread(d, form="+.4f"):
    """A difference with its interval."""
    return "-" if d is None else number(d["mean"], form) + bracket(d["interval_95"], lambda end: number(end, form))


def described(d, budget, form="+.4f"):
    """The same with the budget, in words, and the number of seeds."""
    return f"{spread(d, form)}, {budget}, {seeded(len(d['seeds']))}"


def seeded(n):
    return f"{n} seed{'s' * (n > 1)}"


def reached(point):
    """
    A critical point, as Pool.critical has it. An extrapolated one counts for nothing here: near the end of a decayed schedule
    every system's curve bends towards zero.
    """
    return f"crossed at {amount(point['tokens'])} tokens" if point["kind"] == "crossed" else "not reached"
