"""
What reproduces: the paper's claims, each with the rule of its verdict. analysis.report prints them.

    holds                           the whole 95 % interval over paired seeds has the paper's sign
    holds partly                    the mean has it, but the interval includes 0, or there is one seed
    not seen                        otherwise
    not testable at this budget     the runs, or by nature the tokens, are missing
"""
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from analysis import relative_loss, scaling
from analysis.records import PAPER, PAPER_SAVING, billions, described, difference

HOLDS, PARTLY, NOT_SEEN, NOT_TESTABLE = "holds", "holds partly", "not seen", "not testable at this budget"


def verdict(d, sign):
    """Of a difference whose sign in the paper is known: by its mean, and by its whole interval over paired seeds."""
    if d is None:
        return NOT_TESTABLE
    if sign * d["mean"] <= 0:
        return NOT_SEEN
    return HOLDS if d["interval_95"] and min(sign * end for end in d["interval_95"]) > 0 else PARTLY


def together(verdicts):
    """Of several: all hold; fewer than half of those that could be tested were seen; or partly, as when some are missing."""
    known = [v for v in verdicts if v != NOT_TESTABLE]
    if not known:
        return NOT_TESTABLE
    if sum(v != NOT_SEEN for v in known) * 2 < len(known):
        return NOT_SEEN
    return HOLDS if set(verdicts) == {HOLDS} else PARTLY


@dataclass
class Claim:
    """check(records, {section: numbers}) returns (what was found, with interval, budget and seeds; the verdict)."""
    text: str
    paper: str
    check: Callable


def below(*pairs):
    """Loss of a below that of b, for pairs (a, b) of systems, at the family's budget."""
    def check(records, _):
        found = {f"{a} - {b}": records.difference(a, b, records.tokens) for a, b in pairs}
        cells = [(f"{name}: " if len(pairs) > 1 else "") + described(d, records.tokens) for name, d in found.items() if d]
        cells += ["no paired runs of " + ", ".join(name for name, d in found.items() if not d)] * (None in found.values())
        return "; ".join(cells), together([verdict(d, -1) for d in found.values()])
    return check


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
    if d is None:
        return "no paired runs with that source and others", NOT_TESTABLE
    by_source = numbers["family"]["systems"]["identity"]["difference_by_source"]
    best = min((s for s, x in by_source.items() if x), key=lambda s: by_source[s]["mean"])
    return (f"largest is {best}; Wikipedia's minus the largest of the others: {described(d, records.tokens)}", verdict(d, -1))


def overtaken(records, _):
    """SVFormer above vanilla at the end of its longest run; if not, nothing is known of what comes later."""
    tokens = max((t for t in records.budgets("svformer") if records.difference("svformer", "vanilla", t)), default=None)
    if tokens is None:
        return "no paired runs", NOT_TESTABLE
    d, own, base = (records.difference("svformer", "vanilla", tokens), records.at("svformer", tokens),
                    records.at("vanilla", tokens))
    x, y = relative_loss.over_seeds([relative_loss.compare(own[s].log, base[s].log)["train"] for s in d["seeds"]],
                                    own[next(iter(d["seeds"]))].run.config["rel_window"])
    point = relative_loss.critical_point(x, y.mean(0)) if len(x) else {"kind": "not reached", "iteration": None}
    per_iter = own[next(iter(d["seeds"]))].run.config["tokens_per_iter"]
    here = f"final difference {described(d, tokens)}; training curves: {point['kind']}" + (
        f" at {billions(point['iteration'] * per_iter)} tokens" if point["iteration"] is not None else "")
    v = verdict(d, +1)
    return here, NOT_TESTABLE if v == NOT_SEEN else v


def gain_lasts(system):
    """|difference| = a D^-b: below vanilla at every budget, with b >= 0."""
    def check(_, numbers):
        facts = numbers.get("tokens", {}).get(system)
        if not facts:
            return "no two budgets", NOT_TESTABLE
        here = ", ".join(f"{d['mean']:+.4f} at {billions(t)}" for t, d in zip(facts["tokens"], facts["differences"]))
        fit = facts["fit"]
        if not fit or facts["differences"][0]["mean"] > 0:
            return here, NOT_SEEN
        interval = fit["b_interval_95"]
        here += f"; falls as D^-{fit['b']:.2f}" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")
        return here, verdict({"mean": fit["b"], "interval_95": interval}, +1)
    return check


def far_away(system):
    """A number at the paper's budget can't be tested at ours: the extrapolation is shown, and decides nothing."""
    def check(_, numbers):
        far = numbers.get("tokens", {}).get(system, {}).get("at_20B")
        if not far:
            return "nothing to extrapolate from", NOT_TESTABLE
        return f"{far['mean']:+.4f}" + (f" [{far['low']:+.4f}, {far['high']:+.4f}]" if far["low"] is not None else "") + \
            " by extrapolation", NOT_TESTABLE
    return check


def saves_data(system):
    """At the largest budget: holds when the interval lies above 0 and has the paper's number in it."""
    def check(_, numbers):
        known = [b for b in numbers.get("saving", {}).get(system, {}).get("budgets", ())
                 if b["saving"] is not None and not b["extrapolated"]]
        if not known:
            return "no saving between budgets", NOT_TESTABLE
        b, n = known[-1], len(numbers["saving"][system]["seeds"])
        low, high = b["interval_95"] or (None, None)
        interval = f" [{scaling.percent(low)}, {scaling.percent(high)}]" if b["interval_95"] else ""
        here = scaling.percent(b["saving"]) + interval + f", {billions(b['tokens'])} tokens, {n} seed{'s' * (n > 1)}"
        inside = None not in (low, high) and 0 < low <= PAPER_SAVING <= high
        return here, HOLDS if inside else PARTLY if b["saving"] > 0 else NOT_SEEN
    return check


def half_cache(records, numbers):
    """An identity of the code, not a measurement: no interval, no seeds."""
    cache = {s: of["kv_bytes_per_token"] for s, of in numbers.get("family", {}).get("systems", {}).items()}
    cache = {**numbers.get("mechanism", {}).get("kv_bytes_per_token", {}), **cache}
    if not {"vanilla", "svformer"} <= set(cache):
        return "no runs of both", NOT_TESTABLE
    ratio = cache["svformer"] / cache["vanilla"]
    here = f"{cache['svformer']:,} of {cache['vanilla']:,} bytes per token: {ratio:.4f}, exact"
    return here, HOLDS if ratio < 0.6 else NOT_SEEN


def mechanism_differs(name, sign, present=lambda vanilla, numbers: True, absent=""):
    """identity's number against vanilla's, over seeds; not seen where vanilla itself does not show the effect."""
    def check(_, numbers):
        m = numbers.get("mechanism", {})
        of = m.get("systems", {}).get(name, {})
        d, vanilla = difference(of.get("identity", {}), of.get("vanilla", {})), of.get("vanilla")
        if d is None:
            return "not measured on both", NOT_TESTABLE
        here = f"{statistics.fmean(of['identity'].values()):.4g} against vanilla's {statistics.fmean(vanilla.values()):.4g}; " \
            f"{described(d, m['tokens'])}"
        seen = present(statistics.fmean(vanilla.values()), m)
        return (here, verdict(d, sign)) if seen else (f"{absent}: {here}", NOT_SEEN)
    return check


def larger_spectrum(_, numbers):
    """The largest eigenvalue per layer; the paper doesn't say of which values, so of own and mixed ones; one seed: partly."""
    m = numbers.get("mechanism", {})
    of = m.get("systems", {}).get("eigenvalues", {})
    cells, verdicts = [], []
    for name in ("identity", "identity mixed"):
        shares = {seed: statistics.fmean(layers[n] > of["vanilla"][seed][n] for n in layers if n in of["vanilla"][seed])
                  for seed, layers in of.get(name, {}).items() if seed in of.get("vanilla", {})}
        if shares:
            share = statistics.fmean(shares.values())
            cells.append(f"{'mixed' if 'mixed' in name else 'own'} values: larger in {share:.0%} of layers")
            verdicts.append(NOT_SEEN if share <= 0.5 else HOLDS if min(shares.values()) > 0.5 and len(shares) > 1 else PARTLY)
    if cells and m["tokens"]:
        cells.append(f"{billions(m['tokens'])} tokens")
    return "; ".join(cells) or "not measured on both", together(verdicts)


def lambdas_grow(_, numbers):
    m = numbers.get("mechanism", {})
    slopes = m.get("systems", {}).get("ratio_slope", {}).get("learnable")
    d = slopes and difference(slopes, dict.fromkeys(slopes, 0.0))
    return (f"change per layer {described(d, m['tokens'])}", verdict(d, +1)) if d else ("not measured", NOT_TESTABLE)


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
    Claim("identity's gain shrinks slowly with tokens and stays", "below 0 up to 20B tokens", gain_lasts("identity")),
    *(Claim(f"{s}'s difference at 20B tokens", f"{PAPER[s]:+.3f}", far_away(s)) for s in ("identity", "sparse")),
    *(Claim(f"ResFormer ({s}) reaches vanilla's loss with less data", f"{PAPER_SAVING:.1%} (468M, 20B tokens)", saves_data(s))
      for s in ("identity", "sparse")),
    Claim("SVFormer nearly halves the KV cache", "(L+1)/2L of it", half_cache),
    Claim("attention concentrates on token 1 less in ResFormer", "a sink in vanilla only", mechanism_differs(
        "first_importance", -1, lambda x, m: x > (m["uniform_first_importance"] or 0), "vanilla has no sink")),
    Claim("token importance is nearer to uniform in ResFormer", "higher entropy", mechanism_differs("entropy_ratio", +1)),
    Claim("value-state drains are weaker in ResFormer", "token 1 keeps over half of the others' norm", mechanism_differs(
        "value_drain", +1, lambda x, m: x < 1, "vanilla has no drain")),
    Claim("hidden-state peaks are smaller in ResFormer", "under 3 times the mean", mechanism_differs(
        "hidden_peak", -1, lambda x, m: x > 1, "vanilla has no peak")),
    Claim("eigenvalues of values are larger in ResFormer", "in most layers", larger_spectrum),
    Claim("learned λ1/λ2 grows with depth", "yes", lambdas_grow),
]
