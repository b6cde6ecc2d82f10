"""
What reproduces: the paper's claims, each with the rule of its verdict. analysis.report prints them.

    holds                           the whole 95 % interval over two or more paired seeds has the paper's sign
    holds partly                    not so, but the mean has it, further from 0 than the noise between seeds reaches
    not seen                        the whole interval or, as far from 0, the mean has the other sign
    not testable at this budget     within that noise, or it is not known; or the runs, or by nature the tokens, are missing

The noise is that of paired differences, pooled over the systems with the most seeds of the same table; where all have one, of
other runs of as many tokens in as many iterations, or of tokens/'s runs with fewer, or of family/'s at as many: 95 % of
Student's t, over the root of the number of pairs. What analyses of checkpoints found takes no noise from other runs. A claim
of several parts holds when all do, is not seen when fewer than half of those that could be tested are, and is not testable
when fewer than half could be tested. A claim of layers takes two seeds and no noise: it holds when more than half of
them show it with every seed (partly, when the paper says every layer and some do not), and is not seen when fewer than half do
with every seed. A saving takes three budgets or sizes: two points lie on any curve.
"""
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from analysis import scaling
from analysis.records import (
    PAPER,
    PAPER_SAVING,
    amount,
    bracket,
    described,
    difference,
    extrapolated,
    noise,
    reach,
    reached,
    saving_interval,
    seeded,
    spread,
)

LENGTHS = 512, 2048, 8192, 32000, 64000  # the paper's (Table 3)
VERDICTS = HOLDS, PARTLY, NOT_SEEN, NOT_TESTABLE = "holds", "holds partly", "not seen", "not testable at this budget"


def verdict(d, sign, sd=None):
    """Of a difference whose sign in the paper is known; sd: records.noise of such differences."""
    if d is None:
        return NOT_TESTABLE
    for v, way in ((HOLDS, sign), (NOT_SEEN, -sign)):
        if d["interval_95"] and min(way * end for end in d["interval_95"]) > 0:
            return v
    if abs(d["mean"]) <= reach(sd, len(d["seeds"])):
        return NOT_TESTABLE
    return PARTLY if sign * d["mean"] > 0 else NOT_SEEN


def together(verdicts):
    """Of several: fewer than half could be tested, or of these were seen; all hold; or partly, as when some are missing."""
    known = [v for v in verdicts if v != NOT_TESTABLE]
    if not known or len(known) * 2 < len(verdicts):
        return NOT_TESTABLE
    if sum(v != NOT_SEEN for v in known) * 2 < len(known):
        return NOT_SEEN
    return HOLDS if set(verdicts) == {HOLDS} else PARTLY


@dataclass
class Claim:
    """
    check(records, {section: numbers}) returns (what was found, with interval, budget and seeds, "" if nothing was measured; the
    verdict). folder: of records.ARMS, without which there is no such claim.
    """
    text: str
    paper: str
    check: Callable
    folder: str = ""


def below(*pairs, pool=lambda records: records):
    """Loss of a below that of b, for pairs (a, b) of systems, at the budget of a pool: the family's."""
    def check(records, _):
        if (of := pool(records)) is None or not of.points:
            return "", NOT_TESTABLE
        found, sd = {f"{a} - {b}": of.difference(a, b, of.tokens) for a, b in pairs}, records.noise_for(of)
        plain = len(pairs) == 1 and pairs[0][1] == "vanilla"  # the claim names it
        known = {name: d for name, d in found.items() if d}
        seeds = {len(d["seeds"]) for d in known.values()}
        cells = [f"{name}: " * (not plain) + spread(d) + f", {seeded(len(d['seeds']))}" * (len(seeds) > 1)
                 for name, d in known.items()]
        if cells:
            cells[-1] += f", {of.said()}" + f", {seeded(min(seeds))}" * (len(seeds) == 1)
        cells += ["no paired runs of " + ", ".join(name for name, d in found.items() if not d)] * (0 < len(known) < len(found))
        return "; ".join(cells), together([verdict(d, -1, sd) for d in found.values()])
    return check


def later(v):
    """That verdict, of what comes after more training than ours: the other sign now says nothing of it."""
    return NOT_TESTABLE if v == NOT_SEEN else v


def wikipedia(records, numbers):
    """The difference at Wikipedia against the most negative one of the other sources, seed by seed."""
    def over(line, pick):
        return {s: x for s, x in line["val"].items() if (s == "Wikipedia") == pick}
    runs = {seed: (p.end, records.at("vanilla", records.tokens)[seed].end)
            for seed, p in records.at("identity", records.tokens).items() if seed in records.at("vanilla", records.tokens)}
    gains = {seed: [[x - base["val"][s] for s, x in over(own, pick).items() if None not in (x, base["val"].get(s))]
                    for pick in (True, False)] for seed, (own, base) in runs.items()}
    gains = {seed: g for seed, g in gains.items() if all(g)}
    d = difference({s: g[0][0] for s, g in gains.items()}, {s: min(g[1]) for s, g in gains.items()})
    by_source = numbers.get("family", {}).get("systems", {}).get("identity", {}).get("difference_by_source", {})
    known = {s: x["mean"] for s, x in by_source.items() if x}
    if d is None or not known:
        return "", NOT_TESTABLE
    return (f"largest is {min(known, key=known.get)}; Wikipedia's minus the largest of the others: "
            f"{described(d, records.said())}", verdict(d, -1, noise([d])))


def overtaken(records, _):
    """
    SVFormer above vanilla at the end of its longest run, of equals that with the most seeds; if not, nothing is known of what
    comes later.
    """
    found = [(t, len(d["seeds"]), pool) for pool in (records, records.curve) for t in pool.budgets("svformer")
             if (d := pool.difference("svformer", "vanilla", t))]
    if not found:
        return "", NOT_TESTABLE
    tokens, _, pool = max(found, key=lambda x: x[:2])
    d, (point, _) = pool.difference("svformer", "vanilla", tokens), pool.critical("svformer", tokens)
    last = pool.relative("svformer", tokens)[1].mean(0)[-1:]
    here = (f"final difference {described(d, pool.said(tokens))}; training curves: {reached(point)}"
            + "".join(f", {x:+.4f} at their end" for x in last))
    return here, later(verdict(d, +1, records.noise_at(tokens)))


def gain_lasts(system):
    """Below vanilla at every budget; the exponent of |difference| = a D^-b beside it."""
    def check(records, numbers):
        facts = numbers.get("tokens", {}).get(system)
        if not facts:
            return "", NOT_TESTABLE
        here = "; ".join(described(d, records.curve.said(t)) for t, d in zip(facts["tokens"], facts["differences"]))
        if any(len(d["seeds"]) < len(records.curve.difference(system, "vanilla", t)["seeds"])
               for t, d in zip(facts["tokens"], facts["differences"])):
            here = f"of the seeds that all budgets have: {here}"
        if fit := facts["fit"]:
            here += f"; changes as D^{-fit['b']:.2f}" + bracket([-x for x in reversed(fit["b_interval_95"])], "{:+.2f}".format)
        return here, together([
            verdict(d, -1, records.noise_at(t)) for t, d in zip(facts["tokens"], facts["differences"])])
    return check


def far_away(system):
    """A number at the paper's budget can't be tested at ours: the extrapolation is shown, and decides nothing."""
    def check(_, numbers):
        far = numbers.get("tokens", {}).get(system, {}).get("at_20B")
        if not far:
            return "", NOT_TESTABLE
        return f"{extrapolated(far)}, by extrapolation, if it is a D^-b", NOT_TESTABLE
    return check


def saved(found, n, points):
    """(cell, verdict) of a saving as report.horizontal has it, from n seeds at so many budgets or sizes."""
    low, high = found["interval_95"] or (-math.inf, math.inf)
    here = scaling.percent(found["saving"]) + saving_interval(found)
    return here, NOT_TESTABLE if points < 3 else (HOLDS if n > 1 else PARTLY) if low > 0 else \
        NOT_SEEN if high < 0 else NOT_TESTABLE


def saves_data(system):
    """At the largest budget."""
    def check(records, numbers):
        facts = numbers.get("saving", {}).get(system, {})
        if not facts:
            return "", NOT_TESTABLE
        last = facts["budgets"][-1]
        if last["saving"] is None or last["extrapolated"]:
            return "vanilla's loss at the largest budget lies outside of the system's", NOT_TESTABLE
        here, v = saved(last, n := len(facts["seeds"]), len(facts["budgets"]))
        here += f"; {len(facts['budgets'])} budgets up to {records.curve.said(last['tokens'])}, {seeded(n)}"
        return (f"{here}; the shorter runs' schedule is too short", NOT_TESTABLE) if last["hurried"] else (here, v)
    return check


def half_cache(records, numbers):
    """An identity of the code, not a measurement: no interval, no seeds."""
    cache = {s: of["kv_bytes_per_token"] for s, of in numbers.get("family", {}).get("systems", {}).items()}
    if not {"vanilla", "svformer"} <= set(cache):
        return "", NOT_TESTABLE
    ratio = cache["svformer"] / cache["vanilla"]
    here = f"{cache['svformer']:,} of {cache['vanilla']:,} bytes per token: {ratio:.4f}, by construction"
    return here, HOLDS if ratio < 0.6 else NOT_SEEN


def analysed(numbers, name, systems, one):
    """
    (what was found, verdict) of one(facts, {system: {seed: value}}), which returns both for a folder of runs in
    report.mechanism where these systems have the number of that name for a common seed. The verdict is that of the folder with
    the most such seeds, of equals the one whose vanilla ended lower. Beside it are shown the others with as many, and the one
    whose vanilla ended lowest of all.
    """
    found = []
    for home, x in numbers.get("mechanism", {}).get("of_runs", {}).items():
        of = x["systems"][name]
        if seeds := set.intersection(*(set(of.get(s, ())) for s in systems)):
            loss = math.inf if x["vanilla_loss"] is None else x["vanilla_loss"]
            here, v = one(x, of)
            found.append((-len(seeds), loss, f"{here}, {home}/", v))
    if not found:
        return "", NOT_TESTABLE
    first, *others = sorted(found, key=lambda x: x[:2])
    shown = [x for i, x in enumerate(sorted(others, key=lambda x: x[1])) if i == 0 or x[0] == first[0]]
    return "; also ".join(here for _, _, here, _ in (first, *shown)), first[3]


def mechanism_differs(name, sign, unit, shown=lambda vanilla: 2, effect="", interval=""):
    """
    A system's number against vanilla's, over seeds, in that unit. shown: whether vanilla has the effect that is to be weaker:
    0 no, then there is nothing to test; 1 less than in the paper, then the claim holds partly at best; 2 yes. interval: the
    name of identity's interval over other things than seeds.
    """
    def check(_, numbers):
        def one(facts, of):
            whole = facts["uniform_first_importance"] if name == "first_importance" else 1
            of = {s: {seed: x / whole for seed, x in values.items()} for s, values in of.items()}
            own, vanilla = of["identity"], of["vanilla"]
            d = difference(own, vanilla)
            means = [statistics.fmean(x[seed] for seed in d["seeds"]) for x in (own, vanilla)]
            level = shown(means[1])
            over = facts["systems"][interval].get("identity", {}) if interval else {}
            over = next(iter(over.values())) if len(over) == 1 else None
            here = (f"{means[0]:.4g} against vanilla's {means[1]:.4g} {unit}"
                    + f" ({'hardly a' if level else 'no'} {effect})" * (level < 2) + f"; {described(d, facts['budget'])}"
                    + (f", over its passages{bracket(over, '{:+.4f}'.format)}" if over else ""))
            v = verdict(d, sign, noise(difference(values, vanilla) for s, values in of.items() if s != "vanilla"))
            return here, NOT_TESTABLE if level == 0 else PARTLY if v == HOLDS and level == 1 else v
        return analysed(numbers, name, ("identity", "vanilla"), one)
    return check


def most(shares):
    """Of shares, one of each seed: whether all are more than half, or all less; one seed, or a half, can't tell."""
    sides = [(share > 0.5) - (share < 0.5) for share in shares]
    if len(sides) < 2 or len(set(sides)) > 1:
        return NOT_TESTABLE
    return {1: HOLDS, 0: NOT_TESTABLE, -1: NOT_SEEN}[sides[0]]


def larger_spectrum(_, numbers):
    """The largest eigenvalue per layer; the paper doesn't say of which values, so of own and mixed ones."""
    def one(facts, of):
        larger = {name: [[layers[n] > of["vanilla"][seed][n] for n in both] for seed, layers in of.get(name, {}).items()
                         if (both := layers.keys() & of["vanilla"].get(seed, {}).keys())]
                  for name in ("identity", "identity mixed")}
        here = ", ".join(" and ".join(f"{sum(x)} of {len(x)}" for x in seeds) + " layers of "
                         + ("mixed" if "mixed" in name else "own") + " values" for name, seeds in larger.items() if seeds)
        verdicts = [most(map(statistics.fmean, seeds)) for seeds in larger.values()]
        return (f"larger in {here}, {facts['budget']}, {seeded(len(larger['identity']))}",
                NOT_TESTABLE if set(verdicts) == {NOT_SEEN, NOT_TESTABLE} else together(verdicts))  # the open one may be meant
    return analysed(numbers, "eigenvalues", ("identity", "vanilla"), one)


def less_alike(_, numbers):
    """Vanilla's mean similarity of tokens (Eq 13) over the layers, trained against before the first step."""
    def one(facts, of):
        trained, untrained = facts["systems"]["similarity"].get("vanilla", {}), of["vanilla"]
        if (d := difference(trained, untrained)) is None:
            return "not analysed after training", NOT_TESTABLE
        means = [statistics.fmean(x[seed] for seed in d["seeds"]) for x in (trained, untrained)]
        return (f"{means[0]:.2f}, before training {means[1]:.2f}; {described(d, facts['budget'])}", verdict(d, -1, noise([d])))
    return analysed(numbers, "untrained", ("vanilla",), one)


def grows(weight):
    """
    Whether weight(λ1, λ2) of learnable's layers, as their logs end, changes with depth: a line's slope, seed by seed. Beside it
    the layer where it is highest, in the mean.
    """
    def check(records, _):
        found = {seed: {int(n): weight(sum(w for i, w in of.items() if i != n), of[n])
                        for n, of in mix.items() if of[n]}  # λ2 = 0 has no ratio
                 for seed, p in records.at("learnable", records.tokens).items() if (mix := p.end.get("value_mix"))}
        found = {seed: of for seed, of in found.items() if len(of) > 1}
        slopes = {seed: statistics.linear_regression(list(of), list(of.values())).slope for seed, of in found.items()}
        if (d := difference(slopes, dict.fromkeys(slopes, 0.0))) is None:
            return "", NOT_TESTABLE
        layers = set.intersection(*map(set, found.values()))
        top = max(layers, key=lambda n: statistics.fmean(of[n] for of in found.values()))
        return (f"a line's change per layer {described(d, records.said())}; highest in layer {top} of {max(layers)}",
                verdict(d, +1, noise([d])))
    return check


def maps_like_cross_layer(_, numbers):
    """In every layer of every run; beside it the same against A V_n + V_{n-1}, which like Eq 4 takes one earlier layer."""
    def one(facts, of):
        runs, previous = ([[gap > 0 for gap in gaps] for gaps in x["vanilla"].values()]
                          for x in (of, facts["systems"]["mapping_previous"]))
        v = most(map(statistics.fmean, runs))
        return (f"in {sum(map(sum, runs))} of {sum(map(len, runs))} layers (of V_(n-1) alone: in {sum(map(sum, previous))}), "
                f"{facts['budget']}, {seeded(len(runs))}", PARTLY if v == HOLDS and not all(map(all, runs)) else v)
    return analysed(numbers, "mapping_layers", ("vanilla",), one)


def ablated(*pairs):
    """below, in the pool of ablations with the most tokens."""
    return below(*pairs, pool=lambda records: max(records.pools["ablations"].values(), key=lambda p: p.tokens, default=None))


def while_ahead(check):
    """Of SVFormer after the paper's long training, where its lead is gone: short runs that say otherwise decide nothing."""
    def of_then(records, numbers):
        here, v = check(records, numbers)
        return here + "; in the paper SVFormer's leads go with training" * bool(here), later(v)
    return of_then


def at_length(folder, length):
    """The pool of that length."""
    return lambda records: next((p for p in records.pools[folder].values() if p.runs()[0].config["block_size"] == length), None)


def longest(folder):
    """The pool of the longest windows, where there are several lengths."""
    def pool(records):
        pools = sorted(records.pools[folder].values(), key=lambda p: p.runs()[0].config["block_size"])
        lengths = {p.runs()[0].config["block_size"] for p in pools}
        return pools[-1] if len(lengths) > 1 else None
    return pool


def of_lengths(records):
    """(learning rate, warmup) of most pools of lengths, and {arm: Pool} of these."""
    setting = {arm: tuple(pool.runs()[0].config[k] for k in ("learning_rate", "warmup_iters"))
               for arm, pool in records.pools["lengths"].items()}
    usual = statistics.mode(setting.values()) if setting else None
    return usual, {arm: pool for arm, pool in records.pools["lengths"].items() if setting[arm] == usual}


def at_every_length(system):
    def check(records, _):
        pools = of_lengths(records)[1]
        found = {arm: pool.difference(system, "vanilla", pool.tokens) for arm, pool in pools.items()}
        cells = [f"{arm}: {described(d, pools[arm].said()) if d else 'no paired runs'}" for arm, d in found.items()]
        v = together([verdict(d, -1, records.noise_for(pools[arm])) for arm, d in found.items()])
        lacks = sorted({*LENGTHS} - {pool.runs()[0].config["block_size"] for pool in pools.values()})
        cells += [f"not run at {', '.join(f'{n:,}' for n in lacks)}"] * bool(lacks)
        return "; ".join(cells) if any(found.values()) else "", PARTLY if v == HOLDS and lacks else v
    return check


def overtaken_later(records, _):
    """Critical points in tokens, each length's minus the next shorter one's, by seed; only those that were reached."""
    found = {arm: point for arm, pool in of_lengths(records)[1].items()
             if (point := pool.critical("svformer", pool.tokens))}
    of = [{seed: p["tokens"] for seed, p in seeds.items() if p["kind"] == "crossed"} for _, seeds in found.values()]
    pairs = [difference(longer, shorter) for shorter, longer in zip(of, of[1:])]
    return ("; ".join(f"{arm}: {reached(mean)}" for arm, (mean, _) in found.items()),
            together([verdict(d, +1, noise(pairs)) for d in pairs]))


def better_if_slower(records, _):
    """SVFormer's difference to vanilla at a lower learning rate, minus that at the usual one and the same length and warmup."""
    usual, pools = of_lengths(records)
    cells, verdicts = [], []
    for arm, pool in records.pools["lengths"].items():
        config = pool.runs()[0].config
        same = [p for p in pools.values()
                if (p.runs()[0].config["block_size"], p.tokens) == (config["block_size"], pool.tokens)]
        if same and config["learning_rate"] < usual[0] and config["warmup_iters"] == usual[1]:
            pair = [p.difference("svformer", "vanilla", p.tokens) for p in (pool, same[0])]
            if all(pair) and (d := difference(*(p["seeds"] for p in pair))):
                cells.append(f"{arm}: {described(d, pool.said())}")
                sd = records.noise_for(pool)  # of one difference; d is made of two
                verdicts.append(verdict(d, -1, sd and {**sd, "std": sd["std"] * math.sqrt(2)}))
    return "; ".join(cells), together(verdicts)


def at_best_rates(key, *systems):
    """
    Each system's best over the arms of report.rates' key against vanilla's; partly where vanilla's may be better yet, or where
    the system was not run at all of them.
    """
    def check(records, numbers):
        best = numbers.get("rates", {}).get(key, {})
        known = {s: best[s] for s in systems if s in best}
        found = {s: known[s]["difference"] if s in known else None for s in systems}
        if not known:
            return "", NOT_TESTABLE
        pool = records.pools["rates"][next(iter(known.values()))["rate"]]
        budget, sd = pool.said(), records.noise_for(pool)
        each = {s: verdict(d, -1, sd) for s, d in found.items()}
        cells = [f"{s}: {described(d, budget)}, {best[s]['rate']} against vanilla's {best[s]['vanilla']['rate']}"
                 + f", not run at {', '.join(best[s]['lacks'])}" * bool(best[s]["lacks"])
                 + ", within the noise" * (sd is not None and each[s] == NOT_TESTABLE) if d else f"{s}: no paired runs"
                 for s, d in found.items()]
        v = together(list(each.values()))
        at_an_end = any(b["vanilla"]["at_an_end"] for b in known.values())
        cells += ["vanilla's best is at an end of its rates"] * at_an_end
        return "; ".join(cells), PARTLY if v == HOLDS and (at_an_end or any(b["lacks"] for b in known.values())) else v
    return check


def saves_parameters(system):
    """Of all parameters, at vanilla's largest size that the system has, too."""
    def check(_, numbers):
        sizes = numbers.get("sizes", {})
        found = sizes.get("at_largest", {}).get(system)
        if not found or found["saving"] is None or found["extrapolated"]:
            return "vanilla's loss lies between the system's at no two sizes" * bool(found), NOT_TESTABLE
        here, v = saved(found, found["seeds"], found["sizes"])
        return f"{here} at {found['at']}; {found['sizes']} sizes, {amount(sizes['tokens'])} tokens, {seeded(found['seeds'])}", v
    return check


CLAIMS = [
    *(Claim(f"{s} is below vanilla", f"{PAPER[s]:+.3f} at 20B tokens", below((s, "vanilla")))
      for s in PAPER if PAPER[s]),
    Claim("the order: plus < sparse < constant, learnable < identity", "-0.058, -0.052, -0.039, -0.034, -0.027", below(
        ("plus", "sparse"), ("sparse", "constant"), ("sparse", "learnable"), ("constant", "identity"),
        ("learnable", "identity"))),
    Claim("identity is below DenseFormer and NeuTRENO", "training curves at 82M",
          below(("identity", "denseformer"), ("identity", "neutreno"))),
    Claim("identity's gain is largest at Wikipedia", "-0.040 of a mean of -0.027", wikipedia),
    Claim("vanilla overtakes SVFormer later on", "always, later if windows are longer", overtaken),
    Claim("identity is below vanilla at every number of tokens", "up to 20B tokens", gain_lasts("identity")),
    *(Claim(f"{s}'s difference at 20B tokens", f"{PAPER[s]:+.3f}", far_away(s)) for s in ("identity", "sparse")),
    *(Claim(f"ResFormer ({s}) reaches vanilla's loss with less data", f"{PAPER_SAVING:.1%} (468M, 20B tokens)", saves_data(s))
      for s in ("identity", "sparse")),
    Claim("SVFormer nearly halves the KV cache", "(L+1)/2L of it", half_cache),
    Claim("attention concentrates on token 1 less in ResFormer (identity)", "a sink in vanilla only", mechanism_differs(
        "first_importance", -1, "times uniform attention's", lambda x: (x > 1) + (x > 2), "sink")),
    Claim("token importance is nearer to uniform in ResFormer (identity)", "higher entropy",
          mechanism_differs("entropy_ratio", +1, "times uniform attention's")),
    Claim("value-state drains are weaker in ResFormer (identity)", "token 1 keeps over half of the others' norm",
          mechanism_differs("value_drain", +1, "of the others' norm", lambda x: (x < 1) + (x < 0.5), "drain")),
    Claim("hidden-state peaks are smaller in ResFormer (identity)", "under 3 times the mean",
          mechanism_differs("hidden_peak", -1, "times the mean norm", lambda x: (x > 1) + (x > 3), "peak")),
    Claim("tokens are alike before training, less so after it (vanilla)", "cosine 0.50 to 0.75, 0.05 to 0.30 in 8B models",
          less_alike),
    Claim("eigenvalues of values are larger in ResFormer (identity)", "in most layers", larger_spectrum),
    Claim("learned λ1 grows with depth", "yes (v5)", grows(lambda l1, l2: l1)),
    Claim("learned λ1/λ2 grows with depth", "yes", grows(lambda l1, l2: l1 / l2)),
    Claim("½ A (V_n + V_{n-1}) is nearer to cross-layer attention than identity mapping", "in every layer, on vanilla",
          maps_like_cross_layer),
    Claim("ResFormer (identity) gets more questions right", "zero-shot tasks, +2.2 points; here the last words of passages",
          mechanism_differs("lastword", +1, "of the questions", interval="lastword_interval")),
    *(Claim(f"ResFormer ({s}) reaches vanilla's loss with fewer parameters", "10.4%, 13.3%, 16.11% (v3, v4, v5; 20B tokens)",
            saves_parameters(s), "sizes") for s in ("identity", "sparse")),
    Claim("a residual helps on values only", "value -0.027; query +0.003, key +0.007, attention +0.018, hidden +0.042", ablated(
        ("identity", "vanilla"), ("vanilla", "query_residual"), ("vanilla", "key_residual"), ("vanilla", "attention_residual"),
        ("vanilla", "hidden_residual")), "ablations"),
    Claim("λ1 = 2 is best of 0.5, 1, 2, 5", "training curves", ablated(
        ("constant", "lambda_0.5"), ("constant", "lambda_1"), ("constant", "lambda_5")), "ablations"),
    Claim("layers 6-8 are the best to mix in", "-0.052; fewer or more gain less", ablated(
        ("sparse", "layers_2-4"), ("sparse", "layers_4-5"), ("sparse", "layers_5-8"), ("sparse", "layers_7-8"),
        ("sparse", "lambda_5")), "ablations"),
    Claim("V_1 is the best source", "training curves", ablated(
        ("identity", "source_previous"), ("identity", "source_all")), "ablations"),
    Claim("identity mapping is worse than vanilla", "training curves", ablated(("vanilla", "identity_mapping")), "ablations"),
    Claim("ResFormer ends below cross-layer attention", "training curves", ablated(("identity", "cross_layer")), "ablations"),
    Claim("of pairs of layers that share K, V or both, V hurts least", "training curves", ablated(
        ("share_v_every_2", "share_k_every_2"), ("share_v_every_2", "cla2")), "ablations"),
    Claim("of layer 1's Q, K or V for all layers, V hurts least", "training curves", ablated(
        ("svformer", "shared_query"), ("svformer", "shared_key")), "ablations"),
    Claim("SVFormer is worse than GQA2 at 2,048 tokens", "training curves", while_ahead(below(
        ("gqa2", "svformer"), pool=at_length("kv", 2048))), "kv"),
    Claim("SVFormer is better than GQA2 and CLA2 at longer windows", "at 64,000 tokens", while_ahead(below(
        ("svformer", "gqa2"), ("svformer", "cla2"), pool=longest("kv"))), "kv"),
    Claim("ResFormer gains at every length", "512 to 64,000", at_every_length("identity"), "lengths"),
    Claim("vanilla overtakes SVFormer later if windows are longer", "5,000 to 30,000 iterations", overtaken_later, "lengths"),
    Claim("a lower learning rate makes SVFormer's loss better beside vanilla's", "1e-4, 3e-4 against 6e-4", better_if_slower,
          "lengths"),
    Claim("the gain is there at each one's best learning rate", "v5: it is not only faster training", at_best_rates(
        "best", "identity", "sparse"), "rates"),
    Claim("the gain is there over a stronger baseline", "not tried", at_best_rates("best_stronger", "identity", "sparse"),
          "rates"),
]
