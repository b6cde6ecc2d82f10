"""
The reproduction's report: all tables and pictures from the records in results/, and README's table of what reproduces.

    python -m analysis.report results/

Reads config.json and log.jsonl of runs, as train.py wrote them, and the JSON of other analyses; no checkpoints:

    family/SYSTEM/seedSEED/                      all systems at one number of tokens (a budget)
    tokens/BUDGET/SYSTEM/seedSEED/               several budgets, each with a schedule of its own that is fully decayed;
                                                 where the batch is the same, family/'s beside them
    mechanism/NAME.json                          concentration, similarity, spectrum, lambdas, mapping and lastword of family/'s
                                                 runs, also in mechanism/seedSEED/; in mechanism/BUDGET/ and
                                                 mechanism/BUDGET/seedSEED/ of tokens/BUDGET's
    sizes/SIZE/SYSTEM/seedSEED/                  and so kv/, lengths/, rates/, ablations/, as their configs in config/ say

and writes report.md, report.json and a picture per section. Systems that family/ lacks, and what is unfinished, damaged or not
comparable, are named and left out. The loss is the mean over sources (nats per token), as in the paper; a difference pairs runs
of one seed, budget and data; intervals are 95 %, Student's t over such pairs.

To add a section, write a function that takes a Records and returns a Section, and name it in SECTIONS; a claim is a line of
CLAIMS in analysis/claims.py.
"""
import math
import os
import re
import statistics
import sys
import tempfile
from dataclasses import dataclass, field

import numpy as np

import train
from analysis import plot, scaling
from analysis.attention import rounded
from analysis.claims import CLAIMS, VERDICTS
from analysis.records import (
    PAPER,
    PAPER_ABLATIONS,
    PAPER_PARAMETERS,
    PAPER_SAVING,
    PAPER_TOKENS,
    STRONGER,
    Records,
    alike,
    amount,
    difference,
    extrapolated,
    hearing,
    noise,
    number,
    place,
    reach,
    reached,
    saving_interval,
    spread,
)
from analysis.relative_loss import t_95
from configurator import REPO, UserError, command, configure

LEGEND = ("Losses in nats per token; a difference below 0 is a lower loss than the other's. Brackets: 95 % intervals, "
          "of the noise between seeds unless the cell names another; *: an end of it lies beyond what was run. holds: "
          "the interval over two or more seeds has the paper's sign, which says nothing of its size or of 20B tokens; "
          "holds partly: only the mean has it, but beyond the noise between seeds, or only a part of the claim does; "
          "not seen: the other sign; not testable: within that noise, or not run, or it takes more tokens. What is of "
          "layers holds with more than half of them in every seed, and is not seen with fewer. by construction: a "
          "property of the code. Where several folders of runs are named, the verdict is of the first: the one with the "
          "most seeds or, of equals, the lowest loss. Systems: README's table of every system.")
START, END = "<!-- what reproduces: python -m analysis.report results/ -->", "<!-- end -->"
UNIT = "loss - vanilla's (nats per token)"
OVERTAKEN = "svformer",  # by vanilla, in the paper: what keeps its sign, as a D^-b, is no form for its difference


@dataclass
class Config:
    out_dir: str = ""  # where report.md, report.json and the pictures go; empty: the results folder
    readme: str = "auto"  # the file with the two marker comments; auto: this repository's, of its own results/; empty: none


@dataclass
class Section:
    """A part of the report. numbers: for report.json and the claims; rows: cells below their head; panels: as plot.draw's."""
    title: str
    made_from: str
    numbers: dict
    head: list
    rows: list
    notes: list = field(default_factory=list)
    panels: list = field(default_factory=list)
    caption: str = ""


def origin(where, runs):
    """The line above a table: what it is made from."""
    def all_of(key):
        return ", ".join(sorted({str(r.config.get(key, "unknown")) for r in runs}))
    return (f"Made from {where}: {len(runs)} run{'s' * (len(runs) != 1)}, seeds {all_of('seed')}; device {all_of('device')}, "
            f"{all_of('dtype')}, torch {all_of('torch')}, code {all_of('code')}.") if runs else f"Made from {where}."


def folders(runs):
    """Those of the results, in words: tokens/ and family/."""
    return " and ".join(sorted({re.split(r"[/\\]", r.name)[0] + "/" for r in runs}, reverse=True))


def noise_said(sd, where="family/"):
    if not sd:
        return "No system has two paired seeds: the noise between seeds is not known."
    return (f"From seed to seed a difference to vanilla in {where} has a standard deviation of {sd['std']:.4f} (pooled over "
            f"the systems with the most seeds, {freedom(sd)}, as those of a seed move together).")


def freedom(sd):
    return f"{sd['df']} degree{'s' * (sd['df'] > 1)} of freedom"


def markdown(head, rows):
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in (head, ["---"] * len(head), *rows))


# ---------------------------------------------------------------------------------------------------------------------
# Sections: each takes Records and returns a Section, or None when nothing is there


def family(records):
    """Every system at the family's budget."""
    tokens, systems, rows, curves, bands = records.tokens, {}, [], {}, {}
    everything = [p for s in records.systems(tokens) for p in records.at(s, tokens).values()]
    if not everything:
        return None
    sources = list(everything[0].end["val"])
    for system in records.systems(tokens):
        of = records.at(system, tokens)

        def mean(value, of=of):
            known = [value(p.end) for p in of.values()]
            return None if None in known else statistics.fmean(known)
        d = records.difference(system, "vanilla", tokens)
        facts = systems[system] = {
            "seeds": sorted(of), "val": {s: mean(lambda line, s=s: line["val"].get(s)) for s in sources},
            "val_mean": mean(lambda line: line["val_mean"]), "val_loss": mean(lambda line: line["val_loss"]),
            "kv_bytes_per_token": next(iter(of.values())).run.config["kv_bytes_per_token"], "difference": None, "paper": None}
        if system != "vanilla":
            facts |= {"difference": d, "paper": PAPER.get(system), "difference_halfway": difference(
                *(records.on_the_way(s, tokens // 2) for s in (system, "vanilla"))), "difference_val_loss": records.difference(
                    system, "vanilla", tokens, lambda line: line["val_loss"]), "difference_by_source": {
                s: records.difference(system, "vanilla", tokens, lambda line, s=s: line["val"].get(s)) for s in sources}}
        rows.append([system, *(number(facts["val"][s]) for s in sources), number(facts["val_mean"]), number(facts["val_loss"]),
                     spread(facts.get("difference_halfway")), spread(facts["difference"]), pairs(of, facts["difference"]),
                     number(facts["paper"], "+.3f")])
        if system != "vanilla" and (curve := records.relative(system, tokens)):
            x, y = curve
            curves[system], bands[system] = [(x, y.mean(0))], (x, y.min(0), y.max(0))
    known = {s: f["difference"] for s, f in systems.items() if f["difference"]}
    sd = records.noise()
    notes = [f"Losses in nats per token, means over seeds, {amount(tokens)} tokens. Differences: of the mean over sources, "
             "paired by seed, with the 95 % interval of Student's t over pairs where there are two or more; halfway: of the "
             f"same runs at {amount(tokens // 2)} tokens, before most of the learning rate's decay. The paper's are at 20B "
             "tokens, all but identity's from summaries of its v5.", noise_said(sd)]
    notes += ["Differences to vanilla by source, as above:\n\n" + markdown(["system", *sources], [
        [s, *(spread(x) for x in systems[s]["difference_by_source"].values())] for s in known])] if known else \
        ["No system is paired with vanilla."]
    panels = [dict(series=curves, bands=bands, x="iteration", y=UNIT, zero=True, title="training, moving average"),
              whiskers(known, "validation, mean over sources")] if known else []
    head = ["system", *sources, "mean over sources", "whole bin", "halfway", "difference [95 %]", "seeds", "paper"]
    return Section("Every system at one budget", origin("family/", [p.run for p in everything]),
                   {"tokens": tokens, "noise": sd, "systems": systems}, head, rows, notes, panels,
                   "Below zero: ahead of vanilla on the same batches. Lines: mean over seeds; bands: lowest to highest")


def pairs(of, difference):
    """For the column of seeds: those that a difference rests on, or else the system's own."""
    return len(difference["seeds"]) if difference else len(of)


def whiskers(differences, title):
    """The panel of {system: difference}: filled points with their 95 % interval, hollow ones of one seed without."""
    kinds = {"mean and 95 % interval": [], "one seed": []}
    for s, d in differences.items():
        kinds["mean and 95 % interval" if d["interval_95"] else "one seed"].append((s, d))
    some = {kind: of for kind, of in kinds.items() if of}
    return dict(series={kind: [(d["interval_95"], [s, s]) for s, d in of if d["interval_95"]] for kind, of in some.items()},
                points={kind: ([d["mean"] for _, d in of], [s for s, _ in of]) for kind, of in some.items()},
                order=list(reversed(differences)), hollow={"one seed"}, zero_x=True, x=UNIT, y="", title=title)


def power_law(tokens, differences, reaches=None):
    """
    (numbers, at) of |difference| = a D^-b, a straight line in logarithms; numbers: {"b", "b_interval_95"}; at(D) returns
    (difference, low, high). Both intervals are 95 % ones, the wider of two: Student's t from the residuals (for at, of
    prediction), and what the noise between seeds makes of the line, where reaches says how far it takes each difference, by
    itself. None for fewer than three points, whose line has no residuals, or when the sign changes.
    """
    x, y = np.array(tokens, float), np.array(differences, float)
    if len(x) < 3 or not ((y < 0).all() or (y > 0).all()):
        return None
    line, _, fit = scaling.fit_loglog(x, abs(y))
    df, u = len(x) - 2, np.log(x) - np.log(x).mean()
    squares = float((u ** 2).sum())
    sigma = math.sqrt(float((np.log(abs(y) / line(x)) ** 2).sum()) / df)
    noisy = np.zeros_like(y) if reaches is None else np.array(reaches) / abs(y)

    def half(weights, more=0.0):  # of a sum of the points' logarithms with these weights
        return max(t_95(df) * sigma * math.sqrt(float((weights ** 2).sum()) + more),
                   math.sqrt(float(((weights * noisy) ** 2).sum())))

    def at(q):
        middle = float(np.sign(y[0]) * line(q))
        wide = half(1 / len(x) + (math.log(q) - np.log(x).mean()) * u / squares, 1.0)
        return middle, *sorted(middle * math.exp(min(way * wide, 700)) for way in (-1, 1))
    b, wide = -float(fit["b"]), half(u / squares)
    return {"b": b, "b_interval_95": [b - wide, b + wide]}, at


def paired_throughout(records, system):
    """
    {budget: {seed: (the system's Point, vanilla's)}} of the seeds that both have at every budget that both have: with others a
    curve would bend where another seed begins.
    """
    found = {}
    for t in records.curve.budgets(system) if system != "vanilla" else ():
        own, base = (records.curve.at(s, t) for s in (system, "vanilla"))
        if both := own.keys() & base.keys():
            found[t] = {seed: (own[seed], base[seed]) for seed in both}
    seeds = set.intersection(*map(set, found.values())) if found else ()
    if found and not seeds:
        records.skip(f"tokens/*/{system}", f"in no curve: no seed with vanilla's at each of {', '.join(map(amount, found))}")
    return {t: {seed: of[seed] for seed in sorted(seeds)} for t, of in found.items()} if seeds else {}


def hurried(pool, system, tokens):
    """{vanilla and the system: how far they end above longer runs, as Pool.hurried}, of those that do."""
    return {s: d["mean"] for s in ("vanilla", system) if (d := pool.hurried(s, tokens)) and d["mean"] > 0}


def against_tokens(records):
    """The difference to vanilla at every budget of the systems that have several."""
    pool, numbers, rows, bands, points, same, used = records.curve, {}, [], {}, {}, {}, []
    series = {"vanilla": [([], [])]}  # no line, but its colour: the others' are those of the picture of savings
    for system in pool.systems(None):
        if len(paired := paired_throughout(records, system)) < 2:
            continue
        found = {t: difference(*({seed: pair[i].end["val_mean"] for seed, pair in of.items()} for i in (0, 1)))
                 for t, of in paired.items()}
        used += [p.run for of in paired.values() for pair in of.values() for p in pair if p.run not in used]
        means = [d["mean"] for d in found.values()]
        reaches = [reach(records.noise_at(t), len(d["seeds"])) for t, d in found.items()]
        law = None if system in OVERTAKEN else power_law(list(found), means, reaches if max(reaches) < math.inf else None)
        xs = np.geomspace(min(found), PAPER_TOKENS, 40)
        ends = [law[1](q) for q in xs] if law else []
        vague = max((abs(x) for e in ends for x in e), default=0) >= 3 * max(map(abs, means))
        far = dict(zip(("mean", "low", "high"), ends[-1]), vague=vague) if law else None
        numbers[system] = {"tokens": list(found), "differences": list(found.values()), "fit": law and law[0], "at_20B": far}
        rows += [[system, amount(t), spread(d) + "†" * bool(hurried(pool, system, t)), len(d["seeds"]), ""]
                 for t, d in found.items()]
        said = far and extrapolated(far)
        why = ("no D^-b: in the paper vanilla overtakes it" if system in OVERTAKEN else
               "two budgets" if len(found) == 2 else "the sign changes")
        rows.append([system, "20B, extrapolated", said or f"-: {why}", "-",
                     number(PAPER.get(system), "+.3f")])
        points[system], series[system] = (list(found), means), [(list(found), means)]
        if law and not vague:
            series[system] = [(xs, [e[0] for e in ends])]
            bands[system] = xs, [e[1] for e in ends], [e[2] for e in ends]
        if PAPER.get(system):
            paper = f"{system}, paper"
            series[paper], points[paper], same[paper] = [([], [])], ([PAPER_TOKENS], [PAPER[system]]), system
    if not rows:
        return None
    largest = [max(f["tokens"]) for f in numbers.values()]
    times = " to ".join(dict.fromkeys(f"{PAPER_TOKENS / t:.0f}" for t in sorted(largest, reverse=True)))
    one_seed = all(len(d["seeds"]) == 1 for f in numbers.values() for d in f["differences"])
    by_noise = reach(records.noise_at(max(largest)), 1)
    said_of_noise = noise_said(sd, folders(used)) if (sd := pool.noise()) else noise_said(records.noise())
    if sd:
        said_of_noise += (f" It is that at {amount(pool.tokens)} tokens, which larger budgets without several seeds borrow. "
                          "The curve has only the seeds that all its budgets have.")
    return Section(
        "Difference against tokens", origin(folders(used), used), numbers,
        ["system", "tokens", "difference [95 %]", "seeds", "paper"], rows,
        [f"The last row of a system is an extrapolation far outside of the data: {times} times its "
         "largest budget. It is a straight line fitted to ln |difference| against ln tokens, |difference| = a D^-b, every "
         "budget counting alike; its interval is the wider of the 95 % prediction interval by Student's t from the residuals "
         "and, where it is known, what the noise between seeds makes of the line. Neither knows of a wrong form, or of a text "
         "that is read again where the tokens are more than it has."
         + " It is of no use where it would reach further than three times the largest difference measured."
         * any(f["at_20B"] and f["at_20B"]["vague"] for f in numbers.values()), said_of_noise,
         *["†: this budget's runs end above longer ones of the same system when these had seen as many tokens (Data saving, "
           "below, says by how much): a part of the difference is the short schedule's."] * any("†" in r[2] for r in rows)],
        [dict(series=series, bands=bands, points=points, like=same, hollow=set(same), x="tokens", y=UNIT, log="x", zero=True,
              title="lines join the points" + ", or are fits extrapolated to 20B tokens" * bool(bands))],
        "Does the gain last?" + f" Of one seed, a difference counts from {by_noise:.2f} on."
        * (one_seed and by_noise < math.inf))


def horizontal(xs, own, x, loss, half):
    """
    How much smaller than x a system's x* is, where its losses `own` at xs (linear in ln x between them) reach vanilla's loss
    at x: {"saving", "extrapolated", "interval_95", "interval_outside"}; the interval moves vanilla's loss by half, and is None
    where that is not known. Where an end lies outside of xs, interval_95 is None and interval_outside has the ends.
    """
    x_at = scaling.fit_piecewise(np.array(xs, float), np.array(own))[1]
    ends = [(train.finite(1 - float(x_at(at)) / x), not min(own) <= at <= max(own))
            for at in (loss, *([] if half is None else [loss - half, loss + half]))]  # a lower loss to reach: less is saved
    outside, interval = any(e[1] for e in ends), [e[0] for e in ends[1:]]
    known = interval if interval and None not in (ends[0][0], *interval) else None
    return {"saving": ends[0][0], "extrapolated": ends[0][1], "interval_95": None if outside else known,
            "interval_outside": known if outside else None}


def unpaired(sd, n):
    """
    95 % reach of the difference of two different runs' losses, means over n seeds, by the noise of a loss from seed to seed;
    None where that is not known. A pair shares some of it; runs of two budgets or sizes may not.
    """
    return sd and math.sqrt(2) * reach(sd, n)


def data_saving(records):
    """Tokens that a system needs for vanilla's final loss at each budget."""
    pool, numbers, rows, series, used, above, noises = records.curve, {}, [], {}, [], {}, []
    for system in pool.systems(None):
        if len(paired := paired_throughout(records, system)) < 2:
            continue
        used += [p.run for of in paired.values() for pair in of.values() for p in pair if p.run not in used]
        sds = [records.noise_at(t, None) for t in paired]
        noises += [f"{sd['std']:.4f} ({freedom(sd)})" for sd in sds if sd]
        own, base = ([statistics.fmean(pair[i].end["val_mean"] for pair in of.values()) for of in paired.values()]
                     for i in (0, 1))
        budgets, seeds = list(paired), list(next(iter(paired.values())))
        series["vanilla"], series[system] = [(budgets, base)], [(budgets, own)]
        above.update({(t, s): x for t in budgets for s, x in hurried(pool, system, t).items()})
        numbers[system] = {"seeds": seeds, "budgets": [
            {"tokens": t, "loss": loss, **horizontal(budgets, own, t, loss, unpaired(sd, len(seeds)))}
            for t, loss, sd in zip(budgets, base, sds)]}
        for b in numbers[system]["budgets"]:  # its own, and those whose losses it is read off between
            at = b["tokens"] * (1 - (b["saving"] or 0))
            beside = (b["tokens"], max((t for t in budgets if t <= at), default=budgets[0]),
                      min((t for t in budgets if t >= at), default=budgets[-1]))
            b["hurried"] = any(hurried(pool, system, t) for t in beside)
        rows += [[system, amount(b["tokens"]), number(b["loss"]),
                  scaling.percent(b["saving"]) + "*" * b["extrapolated"] + "†" * b["hurried"],
                  saving_interval(b).strip() or "-", len(seeds)] for b in numbers[system]["budgets"]]
    if not rows:
        return None
    late = ", ".join(f"{s} at {amount(t)}: {x:+.3f}" for (t, s), x in sorted(above.items()))
    return Section(
        "Data saving", origin(folders(used), used), numbers,
        ["system", "budget", "vanilla's loss", "saving", "95 % interval", "seeds"], rows,
        ["Saving: 1 - D* / D, where the system's loss at D* is vanilla's final loss at the budget D (mean over sources; only "
         "runs that are fully decayed; linear in ln tokens between budgets; none where the loss rises with tokens). A * marks "
         "what lies outside of the system's budgets and continues the first or last piece. The paper has "
         f"{scaling.percent(PAPER_SAVING)} (v5, second-hand; 468M, 20B tokens).",
         NOISE_OF_SAVINGS + f" Here {' or '.join(dict.fromkeys(noises))}." * bool(noises),
         *["†: read off beside a budget that ends above longer runs of the same system when these had seen as many "
           f"tokens, before their learning rate decayed ({late}). There the schedule sets the loss, not the tokens alone."]
         * bool(late)],
        [dict(series=series, x="tokens", y="loss, mean over sources (nats per token)", log="x", marks=True,
              title="every point is a run with its own schedule")], "The horizontal gap between lines is the saving of data")


NOISE_OF_SAVINGS = ("Interval: the savings if vanilla's loss were higher or lower by what two runs of other seeds may differ "
                    "by: Student's t at 95 % times √2 times the deviation of a loss from seed to seed, which is that of "
                    "runs of as many tokens where several seeds were run, or else of fewer, or of family/'s when they had seen "
                    "as many.")


def mean_of(key):
    return lambda result: statistics.fmean(x[key] for x in result["layers"])


def ratio_of(pick, first, others):
    return lambda result: pick(x[first] / x[others] for x in result["layers"])


def of_all(result):
    return result["bins"].get("all sources") or next(iter(result["bins"].values()))


def slope_of_ratio(result):
    """λ1 / λ2 of the learned weights: change per layer, by least squares; None where fewer than two layers have it."""
    known = [(int(n), x["ratio"]) for n, x in result["layers"].items() if x["ratio"] is not None]
    return float(np.polyfit(*zip(*known), 1)[0]) if len(known) > 1 else None


def mean_similarity(result):
    """Of the layers' outputs; the first number is the embedding's."""
    return statistics.fmean(result["similarity"][1:])


MECHANISM = {  # {number: (analysis, column, number of one run's result, format)}; without a column: for claims only
    "first_importance": ("concentration", "importance of token 1, largest of layers",
                         lambda r: max(x["first_importance"] for x in r["layers"]), ".4f"),
    "entropy_ratio": ("concentration", "entropy / uniform, mean of layers", mean_of("entropy_ratio"), ".3f"),
    "value_drain": ("concentration", "value norm, token 1 / others, smallest",
                    ratio_of(min, "first_value_norm", "others_value_norm"), ".3f"),
    "hidden_peak": ("concentration", "hidden norm, token 1 / mean, largest",
                    ratio_of(max, "first_hidden_norm", "mean_hidden_norm"), ".3f"),
    "similarity": ("similarity", "token similarity, mean of layers", mean_similarity, ".3f"),
    "untrained": ("similarity", "before training", mean_similarity, ".3f"),
    "effective_rank": ("spectrum", "effective rank of values, mean", mean_of("effective_rank"), ".1f"),
    "largest": ("spectrum", "largest eigenvalue, mean", mean_of("largest"), ".2f"),
    "mapping": ("mapping", "Eq 4's cosine to cross-layer attention minus Eq 6's, mean of layers",
                lambda r: statistics.fmean(r["approximation"]) - statistics.fmean(r["identity"]), "+.3f"),
    "mapping_layers": ("mapping", "", lambda r: [a - b for a, b in zip(r["approximation"], r["identity"])], ""),
    "mapping_previous": ("mapping", "", lambda r: [a - b for a, b in zip(r["approximation"], r["identity_previous"])], ""),
    "lastword": ("lastword", "last words right", lambda r: of_all(r)["accuracy"], ".3f"),
    "lastword_interval": ("lastword", "", lambda r: of_all(r)["difference"]["accuracy_interval_95"] if "vanilla" in re.split(
        r"[/\\]", r["against"]) else None, ""),
    "ratio_slope": ("lambdas", "λ1/λ2, change per layer", slope_of_ratio, "+.3f"),
    "eigenvalues": ("spectrum", "", lambda r: {x["layer"]: x["largest"] for x in r["layers"]}, ""),
}


def beside(records, file):
    """Paths of mechanism/FILE, mechanism/*/FILE and mechanism/*/*/FILE, those that are there."""
    paths = [os.path.relpath(os.path.join(path, file), records.root).replace(os.sep, "/")
             for path, files in records.walk("mechanism") if file in files]
    return [path for path in paths if path.count("/") < 4]


def finite(value):
    """value, when all numbers in it are. Raises ValueError for one that is not, TypeError for what is no number."""
    for x in value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]:
        if x is not None and not math.isfinite(x):
            raise ValueError(f"{x} is not finite")
    return value


FOREIGN = KeyError, TypeError, AttributeError, ValueError, ArithmeticError, StopIteration  # of JSON of another form


def mechanism(records):
    """
    A few numbers per system of what the analyses of checkpoints wrote: of family/'s in mechanism/ and mechanism/seedSEED/, of
    tokens/N's in mechanism/N and mechanism/N/seedSEED. Only of runs that are compared in the sections above.
    """
    compared = {p.run.name.replace(os.sep, "/"): p for pool in (records.curve, records) for of in pool.points.values()
                for p in of.values()}
    of_runs, uniform = {}, {}  # {folder of runs: ({number: {system: {seed: value}}}, {run: Point})}, {folder: importance}
    analyses = list(dict.fromkeys(of for of, *_ in MECHANISM.values()))
    expected = any(os.path.isdir(os.path.join(records.root, name)) for name in ("family", "tokens", "mechanism"))
    for analysis, name in ((a, name) for a in analyses
                           for name in beside(records, f"{a}.json") or [f"mechanism/{a}.json"] * expected):
        if (content := records.json(name)) is None:
            continue
        folder = name.split("/")[1]
        home = "family" if folder == f"{analysis}.json" or re.fullmatch(r"seed\d+", folder) else f"tokens/{folder}"
        try:
            if analysis == "concentration":
                uniform[home] = finite(content["uniform_first_importance"])
            results = content.get("models", content.get("runs", content)).items()
        except FOREIGN as e:
            records.skip(name, f"not of the form that analysis.{analysis} writes ({e!r})")
            continue
        for run, result in results:
            untrained, mixed = run.endswith(" (random)"), run.endswith(" mixed")
            if (p := compared.get(f"{home}/{run.removesuffix(' (random)').removesuffix(' mixed')}")) is None:
                records.skip(name, f"{run}: {home}/ has no such run that is compared")
                continue
            try:
                found = {column: finite(value(result)) for column, (of, _, value, _) in MECHANISM.items()
                         if of == analysis and (column == "untrained") == untrained}
            except FOREIGN as e:
                records.skip(name, f"{run}: not of the form that analysis.{analysis} writes ({e!r})")
                continue
            values, points = of_runs.setdefault(home, ({name: {} for name in MECHANISM}, {}))
            for column, value in ((c, x) for c, x in found.items() if x is not None):  # all or none
                values[column].setdefault(os.path.basename(p.run.system) + " mixed" * mixed, {})[p.run.config["seed"]] = value
            points[p.run.name] = p
    shown, rows, numbers = [name for name, (_, column, _, _) in MECHANISM.items() if column], [], {}
    for home, (values, points) in sorted(of_runs.items(), key=lambda x: (len(x[0]), x[0])):  # family's first
        ends = [p.end["val_mean"] for p in points.values() if os.path.basename(p.run.system) == "vanilla"]
        pool = records if home == "family" else records.curve
        budget = {p.run.config["tokens_per_iter"] * p.run.config["max_iters"] for p in points.values()}
        numbers[home] = {"budget": " and ".join(map(pool.said, sorted(budget))), "systems": values,
                         "vanilla_loss": statistics.fmean(ends) if ends else None,
                         "uniform_first_importance": uniform.get(home)}
        for s in sorted({s for name in shown for s in values[name]}, key=place):
            seeds = sorted({len(values[name][s]) for name in shown if s in values[name]})
            rows.append([f"{home}/", s, "-".join(map(str, seeds[:1] + seeds[1:][-1:])), *(
                number(statistics.fmean(of.values()), MECHANISM[n][3]) if (of := values[n].get(s)) else "-" for n in shown)])
    if not rows:
        return None
    level = " or ".join(dict.fromkeys(f"{x:.4f}" for x in uniform.values()))
    return Section(
        "Mechanism", origin("mechanism/", [p.run for _, points in of_runs.values() for p in points.values()]),
        {"of_runs": numbers},
        ["runs", "system", "seeds", *(MECHANISM[n][1] for n in shown)], rows,
        ["Means over seeds (a-b: some numbers are of a, some of b): "
         + "; ".join(f"{home}/ after {x['budget']}" for home, x in numbers.items()) + ". An entropy ratio "
         "above 1 is flatter than uniform causal attention's. Windows begin anywhere in a text, so token 1 is another in each. "
         "Value norms are of what is attended to (mixed values in ResFormer); the spectrum is of a layer's own values, and of "
         "the mixed ones in rows named so."
         + f" Under uniform attention token 1 has importance {level}: no sink at or below it." * bool(uniform),
         "Pictures: " + ", ".join(f"[{path.removeprefix('mechanism/').removesuffix('.png')}]({path})" for a in analyses
                                  for path in beside(records, f"{a}.png")) + "."])


# ---------------------------------------------------------------------------------------------------------------------
# Sections of folders whose subfolders are pools of their own (records.ARMS): none without that folder


def facts(pool):
    """A pool's budget, length, learning rate, and systems, the lowest first: means over seeds, differences to vanilla."""
    systems, of = {}, pool.runs()[0].config
    for system in pool.systems(pool.tokens):
        points = pool.at(system, pool.tokens)
        config = next(iter(points.values())).run.config
        systems[system] = {
            "seeds": sorted(points), "val_mean": statistics.fmean(p.end["val_mean"] for p in points.values()),
            "difference": pool.difference(system, "vanilla", pool.tokens) if system != "vanilla" else None,
            **{k: config[k] for k in ("kv_bytes_per_token", "n_params", "n_params_non_embedding")}}

    def rank(s):  # by the paired difference: means are over other seeds where systems have different ones
        d = systems[s]["difference"]
        return d["mean"] if d else 0.0 if s == "vanilla" else math.inf, systems[s]["val_mean"]
    lowest = sorted(systems, key=rank)
    return {"tokens": pool.tokens, "block_size": of["block_size"], "learning_rate": of["learning_rate"],
            "systems": {s: systems[s] for s in lowest}}


def short_schedules(records, pools):
    """A note for every budget of tokens/ among the pools', where the runs end above longer ones on their way."""
    late = {}  # {budget: {system: how far}}
    for pool in pools.values():
        if (budget := pool.said()) == records.curve.said(pool.tokens):
            for system in pool.systems(pool.tokens):
                late.setdefault(budget, {}).update(hurried(records.curve, system, pool.tokens))
    return [f"In tokens/ the runs of {budget} end above the longer ones when those had seen as many, before their decay ("
            + ", ".join(f"{s} {x:+.3f}" for s, x in of.items()) + "): a part of the differences is the short schedule's."
            for budget, of in late.items() if of]


def compared(records, folder, title, arm="", more=None, notes=(), panels=(), caption="", extra=None):
    """
    The Section of a folder of pools: a table of every system's loss and difference to vanilla, pool by pool. arm: the name of
    the column for what tells pools apart, their folder's; more: {column: cell(pool's name, system, its facts)}; extra: more
    numbers beside {"arms": {pool's name: facts}}.
    """
    pools, rows = records.pools[folder], []
    arms = {name: facts(pool) for name, pool in pools.items()}
    for name, of in arms.items():
        rows += [[*[name] * bool(arm), system, amount(of["tokens"]), number(x["val_mean"]), spread(x["difference"]),
                  pairs(x["seeds"], x["difference"]), *(cell(name, system, x) for cell in (more or {}).values())]
                 for system, x in of["systems"].items()]
    sd = noise(x["difference"] for of in arms.values() for x in of["systems"].values())
    several = [name for name, of in arms.items()  # pooled are the systems with the most seeds
               if (own := noise(x["difference"] for x in of["systems"].values())) and own["df"] == sd["df"]]
    where = f"{folder}/" if len(several) == len(arms) else ", ".join(f"{folder}/{name}".rstrip("/") + "/" for name in several)
    borrowed = {} if sd else {str(x): x for pool in pools.values() if (x := records.noise_for(pool))}  # by the claims
    said = "No system here has two paired seeds. " + " ".join(
        noise_said(x, "other folders, with as many tokens at any length and size,") for x in borrowed.values()
        ) if borrowed else noise_said(sd, where)
    return Section(
        title, origin(f"{folder}/", [run for pool in pools.values() for run in pool.runs()]),
        {"arms": arms, "noise": sd, **(extra or {})},
        [*[arm] * bool(arm), "system", "tokens", "mean over sources", "difference [95 %]", "seeds", *(more or {})], rows,
        [*notes, *short_schedules(records, pools),
         "A mean is over a system's own seeds, a difference over those of its pairs. " + said],
        list(panels), caption)


def sizes(records):
    """Loss against parameters, and how many a system saves."""
    if not (pools := records.pools.get("sizes")):
        return None
    runs, comparisons = [run for pool in pools.values() for run in pool.runs()], []
    usual = statistics.mode(pool.tokens for pool in pools.values())
    for arm, pool in pools.items():
        if pool.tokens != usual:
            records.skip(f"sizes/{arm}", f"in no saving: {amount(pool.tokens)} tokens, most sizes {amount(usual)}")
    counted = {arm: pool for arm, pool in pools.items() if pool.tokens == usual}
    sd = records.noise_for(max(counted.values(), key=lambda p: len(p.points)), None)

    def name(run):
        return re.sub(r"_\d+$", "", os.path.basename(run.system))  # sparse_12 is sparse, at 12 layers
    try:
        with hearing(lambda what, reason: records.skip(f"sizes/{what.removeprefix('sizes/')}", reason)):
            names = ",".join({name(run) for run in runs})
            comparisons = scaling.from_runs(scaling.Config(systems=names, baseline="vanilla"), runs)
    except UserError as e:
        records.skip("sizes", e)
    forms, largest, panels, notes = {}, {"n_params": {}, "n_params_non_embedding": {}}, [], []
    for system, base, axis, fixed, of_base, own in comparisons:
        if axis == "tokens" or fixed != f"{usual:,} tokens":
            continue
        # only sizes that both have: a fit through others would differ where the curve bends
        both = {arm: ns for arm, pool in counted.items() if all(ns := [
            {run.config[axis] for run in pool.runs() if name(run) == one} & set(losses)
            for one, losses in ((base, of_base), (system, own))])}
        of_base, own = ({n: losses for n, losses in of.items() if any(n in ns[i] for ns in both.values())}
                        for i, of in enumerate((of_base, own)))
        if min(len(of_base), len(own)) < 2:
            records.skip(f"sizes/{system}", f"it and {base} need two sizes in common")
            continue
        r = forms.setdefault(system, {})[axis] = scaling.analyse("piecewise", of_base, own)
        notes.append(f"{system} saves of {scaling.AXES[axis]}, by the form of both fits over {', '.join(both)}: " + ", ".join(
            f"{form} {scaling.percent(x)}" for form, x in r["forms"].items()) + ".")
        panels.append({**scaling.panel("piecewise", system, base, axis, fixed, r), "title": f"{system}, {fixed}"})
        x, at = max(of_base), {n: statistics.fmean(losses.values()) for n, losses in own.items()}
        # of seeds that not all points have each counts for one
        seeds = len(set.intersection(*(set(losses) for of in (of_base, own) for losses in of.values()))) or 1
        arm = next(arm for arm, ns in both.items() if x in ns[0])
        found = largest[axis][system] = {"seeds": seeds, "sizes": len(at), "at": arm, **horizontal(
            sorted(at), [at[n] for n in sorted(at)], x, statistics.fmean(of_base[x].values()), unpaired(sd, seeds))}
        notes.append(f"{system} saves {scaling.percent(found['saving'])}{saving_interval(found)} of "
                     f"{'all ' * (axis == 'n_params')}{scaling.AXES[axis]} at vanilla's {arm}, by its own losses, linear in ln "
                     "N between sizes.")
    return compared(
        records, "sizes", "Parameters", "size", {
            "parameters": lambda arm, s, x: f"{x['n_params']:,}",
            "without embeddings": lambda arm, s, x: f"{x['n_params_non_embedding']:,}"},
        [f"A saving is 1 - N* / N, where the system's loss at N* is vanilla's at N, the largest size that both have. "
         f"The paper has {', '.join(map(scaling.percent, PAPER_PARAMETERS))} (v3, v4, v5; 20B tokens, total N); v3's is what a "
         "line in ln N gives. Learning rate and schedule are the same at all sizes. " + NOISE_OF_SAVINGS, *notes], panels,
        "The horizontal gap between the lines at the largest size is the saving",
        {"saving": forms, "at_largest": largest["n_params"], "at_largest_non_embedding": largest["n_params_non_embedding"],
         "tokens": usual})


def ablations(records):
    """Differences to vanilla of everything that the paper varies."""
    if not (pools := records.pools.get("ablations")):
        return None
    panels = []
    for arm, pool in pools.items():
        known = {s: x["difference"] for s, x in facts(pool)["systems"].items() if x["difference"]}
        panels += [whiskers(known, arm)] if known else []
    several = "budget" if set(pools) != {""} else ""
    return compared(
        records, "ablations", "Ablations", several, {"paper": lambda arm, s, x: number(PAPER_ABLATIONS.get(s) or None, "+.3f")},
        ["The paper's differences are at 20B tokens, all but identity's from summaries of its v5. lambda_X is λ1 = X and "
         "constant λ1 = 2, in all layers; layers_A-B is λ1 = 5 in these and sparse in 6-8; values_xN is N V_n, without V_1. "
         "Differences of one seed and of several stand in one order: by the seed that both have, neighbours may be the other "
         "way round."], panels, "Below zero: ahead of vanilla")


def kv(records):
    """Loss against the bytes of the KV cache."""
    if not (pools := records.pools.get("kv")):
        return None
    arms = {arm: facts(pool) for arm, pool in pools.items()}
    full = {arm: of["systems"]["vanilla"]["kv_bytes_per_token"] for arm, of in arms.items() if "vanilla" in of["systems"]}
    panels = [dict(series={s: [([(x := of["systems"][s])["kv_bytes_per_token"]], [x["val_mean"]])]
                           for s in sorted(of["systems"], key=place)},
                   log="x", apart=True, x="KV cache, bytes per token (bfloat16)",
                   y="loss, mean over sources (nats per token)", title=f"length {of['block_size']:,}")
              for of in arms.values()]
    return compared(
        records, "kv", "Loss against KV cache", "length", {
            "KV bytes/token": lambda arm, s, x: f"{x['kv_bytes_per_token']:,}",
            "of vanilla's": lambda arm, s, x: f"{x['kv_bytes_per_token'] / full[arm]:.4f}" if arm in full else "-"},
        ["Bytes are those of the buffers that generation fills."], panels, "Lower left is better")


def lengths(records):
    """Differences by length, and when vanilla overtakes SVFormer."""
    if not (pools := records.pools.get("lengths")):
        return None
    points = {arm: pool.critical("svformer", pool.tokens) for arm, pool in pools.items()}
    points = {arm: {**point[0], "seeds": point[1]} for arm, point in points.items() if point}

    def crossing(arm, system, _):
        point = points.get(arm) if system == "svformer" else None
        if point is None:
            return "-"
        each = [f"seed {seed}: {reached(p)}" for seed, p in point["seeds"].items()]
        return reached(point) + f" ({'; '.join(each)})" * (len(each) > 1)
    panels = []
    for system in ("identity", "svformer"):
        curves = {arm: curve for arm, pool in pools.items() if (curve := pool.relative(system, pool.tokens))}
        panels += [dict(series={arm: [(x, y.mean(0))] for arm, (x, y) in curves.items()},
                        bands={arm: (x, y.min(0), y.max(0)) for arm, (x, y) in curves.items()},
                        x="iteration", y=UNIT, zero=True, title=f"{system} by length, moving average")] if curves else []
    return compared(
        records, "lengths", "Lengths", "length", {"training curve reaches vanilla's": crossing},
        ["Where SVFormer's smoothed training difference first comes up through zero (paper: always, later if longer)."], panels,
        "Below zero: ahead of vanilla on the same batches. Lines: mean over seeds; bands: lowest to highest",
        {"critical": points})


def rates(records):
    """Each system's best over learning rates, and over options that make the baseline stronger, against vanilla's best."""
    if not (pools := records.pools.get("rates")):
        return None
    other = "learning_rate", "min_lr", "seed", *STRONGER
    settings = {arm: {k: v for k, v in alike(pool.runs()[0]).items() if k not in other} | {"tokens": pool.tokens}
                for arm, pool in pools.items()}
    usual = statistics.mode(map(str, settings.values()))
    for arm in [arm for arm in pools if str(settings[arm]) != usual]:
        records.skip(f"rates/{arm}", "compared with no other rate: its data, length, budget or schedule are not those of most")
    arms = {arm: pool for arm, pool in pools.items() if str(settings[arm]) == usual and pool.at("vanilla", pool.tokens)}
    stronger = {arm: "".join(f", {k}" for k in STRONGER if getattr(pool.runs()[0].shape, k)) for arm, pool in arms.items()}
    losses, series, broken = {}, {}, {}  # {system: {arm: {seed: loss}}}; broken: lines of a stronger baseline, in its colour
    for system in dict.fromkeys(s for pool in arms.values() for s in pool.systems(pool.tokens)):
        of = {arm: known for arm, pool in arms.items() if (known := pool.losses(system, pool.tokens))}
        every = [*of.values(), *losses.get("vanilla", of).values()]  # vanilla comes first
        seeds = set.intersection(*map(set, every))
        if not seeds:
            records.skip(f"rates/*/{system}", f"no best: at no seed a run in each of {', '.join(of)}, and "
                         f"vanilla's in each of {', '.join(arms)}")
            continue
        for arm in [arm for arm in arms if arm not in of]:
            records.skip(f"rates/{arm}/{system}", "no usable run where vanilla has one: its best is that of its other rates")
        losses[system] = {arm: {seed: of[arm][seed] for seed in seeds} for arm in of}
        for arm in of:
            (xs, ys), = series.setdefault(name := system + stronger[arm], [([], [])])
            if stronger[arm]:
                broken[name] = system
            xs.append(f"{arms[arm].runs()[0].config['learning_rate']:g}")
            ys.append(statistics.fmean(losses[system][arm].values()))

    def lowest(of, some, seeds):
        """{"rate", "val_mean", "at_an_end"} of the arm of some with the lowest mean over seeds; None without one."""
        mean = {arm: statistics.fmean(of[arm][seed] for seed in seeds) for arm in some if arm in of}
        if not mean:
            return None
        arm = min(mean, key=mean.get)
        like = [a for a in mean if stronger[a] == stronger[arm]]
        return {"rate": arm, "val_mean": mean[arm], "at_an_end": arm in (like[0], like[-1])}

    def best_of(some):
        """
        {system: its lowest of these arms, and of others than vanilla: vanilla's over the same seeds, the difference to it, and
        the arms that the system lacks}.
        """
        best, vanilla = {}, losses.get("vanilla", {})
        for system, of in losses.items():
            seeds = next(iter(of.values())).keys()
            if (own := lowest(of, some, seeds)) and (base := lowest(vanilla, some, seeds)):
                best[system] = own if system == "vanilla" else {
                    **own, "vanilla": base, "lacks": [arm for arm in some if arm not in of],
                    "difference": difference(of[own["rate"]], vanilla[base["rate"]])}
        return best
    strong, plain = ([arm for arm in arms if bool(stronger[arm]) == pick] for pick in (True, False))
    best, best_stronger, best_plain = (best_of(some) if some else {} for some in (arms, strong, plain if strong else ()))
    return compared(
        records, "rates", "Learning rates", "peak", {"best": lambda arm, s, x: "best" * (best.get(s, {}).get("rate") == arm)},
        [*(f"The best of each against vanilla's best{where}: " + "; ".join(
            f"{s} {spread(b['difference'])} (at {b['rate']}, vanilla at {b['vanilla']['rate']}"
            + f"; not run at {', '.join(b['lacks'])}" * bool(b["lacks"]) + ")"
            for s, b in of.items() if s != "vanilla") + "." if len(of) > 1 else
           f"No best{where} is paired with vanilla's." for of, where in (
            (best, ""), (best_plain, ", of those without options that make it stronger"),
            (best_stronger, f", over a stronger baseline ({', '.join(STRONGER)})")) if of or not where),
         *["At an end of its rates, so that the true best may lie outside: " + ", ".join(
             s for s, b in best.items() if b["at_an_end"]) + "."] * any(b["at_an_end"] for b in best.values()),
         "The best and the picture have only the seeds that vanilla has at all rates and the system at all of its own."],
        [dict(series=series, like=broken, dashed=set(broken), marks=True, x="peak learning rate",
              y="loss, mean over sources (nats per token)")],
        "Does a system's lowest point lie below vanilla's?",
        {"best": best, "best_plain": best_plain, "best_stronger": best_stronger})


SECTIONS = {"family": family, "tokens": against_tokens, "saving": data_saving, "mechanism": mechanism, "sizes": sizes,
            "ablations": ablations, "kv": kv, "lengths": lengths, "rates": rates}


def main():
    config = configure(Config, [a for a in sys.argv[1:] if a.startswith("-")])
    paths = [a for a in sys.argv[1:] if not a.startswith("-")]
    if len(paths) != 1:
        raise UserError(f"expected one folder of results, such as results/; found {' '.join(paths) or 'none'}")
    readme = None
    if config.readme == "auto":
        config.readme = os.path.join(REPO, "README.md") if os.path.realpath(paths[0]) == os.path.join(REPO, "results") else ""
    if config.readme:
        with open(config.readme, encoding="utf-8") as f:
            readme = f.read()
        if readme.count(START) != 1 or END not in readme.partition(START)[2]:
            raise UserError(f"{config.readme}: expected the line {START} once, and {END} after it; add them, or give --readme=")
    records = Records(paths[0])
    sections = {name: section for name, make in SECTIONS.items() if (section := make(records))}
    numbers = {name: section.numbers for name, section in sections.items()}
    verdicts = [[c.text, c.paper, *c.check(records, numbers)] for c in CLAIMS if not c.folder or c.folder in records.pools]
    head = ["claim", "paper", "here", "verdict"]
    counted = [(v, sum(row[3] == v for row in verdicts)) for v in VERDICTS]
    claimed = f"{len(verdicts)} claims: " + ", ".join(f"{v} {n}" for v, n in counted) + ".\n\n"
    claimed += markdown(head, rows) if (rows := [row for row in verdicts if row[2]]) else "None of them was measured here."
    if (missing := [row[0] for row in verdicts if not row[2]]) and rows:
        claimed += "\n\nNot measured here: " + "; ".join(missing) + "."
    folder, real = config.out_dir or paths[0], os.path.realpath(paths[0])
    called = os.path.relpath(real, REPO) if real.startswith(REPO + os.sep) else os.path.basename(real)
    os.makedirs(folder, exist_ok=True)
    parts = ["# Report", f"Written by `python -m analysis.report {called}/` from the records beside it.",
             "## What reproduces", "Made from the tables below. The rule of each verdict: analysis/claims.py.", claimed, LEGEND]
    with tempfile.TemporaryDirectory(prefix=".report", dir=folder) as made:  # all of it is made before any of it is replaced
        for name, s in sections.items():
            parts += [f"## {s.title}", s.made_from, markdown(s.head, s.rows), *s.notes]
            if s.panels:
                parts.append(f"![{s.title}](report_{name}.png)")
                plot.draw(os.path.join(made, f"report_{name}.png"), s.panels, s.title, s.caption)
        parts += ["## Left out", "\n".join(f"* {line}" for line in records.left_out) or "Nothing."]
        text, table = "\n\n".join(parts) + "\n", f"{START}\n\n{claimed}\n\n{LEGEND}\n\n{END}"
        train.write_whole(os.path.join(made, "report.md"), lambda f: f.write(text.encode()))
        train.write_json(os.path.join(made, "report.json"), plain({**numbers, "claims": [
            dict(zip(head, row)) for row in verdicts], "left_out": records.left_out}))
        for name in os.listdir(made):
            os.replace(os.path.join(made, name), os.path.join(folder, name))
    if readme is not None:
        before, _, after = readme.partition(START)
        train.write_whole(config.readme, lambda f: f.write((before + table + after.partition(END)[2]).encode()))
    for line in records.left_out:
        print(f"left out: {line}", file=sys.stderr)
    print(train.aligned(["claim", "verdict"], [[row[0], row[3]] for row in verdicts]))
    print(f"\nwrote {os.path.join(folder, 'report.md')} and report.json" + f", and the table in {config.readme}" * bool(readme))


def plain(x):
    """For JSON: numbers with 6 significant digits, which every machine agrees on."""
    if isinstance(x, dict):
        return {str(k): plain(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(v) for v in x]
    return rounded(x) if isinstance(x, float) else x


if __name__ == "__main__":
    command(main)
