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

from analysis import scaling
from analysis.records import PAPER, PAPER_PARAMETERS, PAPER_SAVING, billions, bracket, described, difference, reached, spread

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
    """
    check(records, {section: numbers}) returns (what was found, with interval, budget and seeds; the verdict). folder: of
    records.ARMS, without which there is no such claim.
    """
    text: str
    paper: str
    check: Callable
    folder: str = ""


def below(*pairs, pool=lambda records: records):
    """Loss of a below that of b, for pairs (a, b) of systems, at the budget of a pool: the family's."""
    def check(records, _):
        if (of := pool(records)) is None:
            return "no runs", NOT_TESTABLE
        found = {f"{a} - {b}": of.difference(a, b, of.tokens) for a, b in pairs}
        plain = len(pairs) == 1 and pairs[0][1] == "vanilla"  # the claim names it
        known = {name: d for name, d in found.items() if d}
        alike = len({len(d["seeds"]) for d in known.values()}) == 1  # then budget and seeds are said once, at the last
        cells = [f"{name}: " * (not plain) + (spread(d) if alike and name != list(known)[-1] else described(d, of.tokens))
                 for name, d in known.items()]
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
    d, (point, _) = records.difference("svformer", "vanilla", tokens), records.critical("svformer", tokens)
    here = f"final difference {described(d, tokens)}; training curves: {reached(point)}"
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
        here += f"; falls as D^-{fit['b']:.2f}" + bracket(interval, "{:.2f}".format)
        return here, verdict({"mean": fit["b"], "interval_95": interval}, +1)
    return check


def far_away(system):
    """A number at the paper's budget can't be tested at ours: the extrapolation is shown, and decides nothing."""
    def check(_, numbers):
        far = numbers.get("tokens", {}).get(system, {}).get("at_20B")
        if not far:
            return "nothing to extrapolate from", NOT_TESTABLE
        ends = (far["low"], far["high"]) if far["low"] is not None else None
        return f"{far['mean']:+.4f}{bracket(ends, '{:+.4f}'.format)} by extrapolation", NOT_TESTABLE
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
        here = scaling.percent(b["saving"]) + bracket(b["interval_95"], scaling.percent) + \
            f", {billions(b['tokens'])} tokens, {n} seed{'s' * (n > 1)}"
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


def ablated(*pairs):
    """below, in the pool of ablations with the most tokens."""
    return below(*pairs, pool=lambda records: max(records.pools["ablations"].values(), key=lambda p: p.tokens, default=None))


def at_length(folder, length):
    """The pool of that length."""
    return lambda records: next((p for p in records.pools[folder].values() if p.runs()[0].config["block_size"] == length), None)


def of_lengths(records):
    """(learning rate, warmup) of most pools of lengths, and {arm: Pool} of these."""
    setting = {arm: tuple(pool.runs()[0].config[k] for k in ("learning_rate", "warmup_iters"))
               for arm, pool in records.pools["lengths"].items()}
    usual = statistics.mode(setting.values()) if setting else None
    return usual, {arm: pool for arm, pool in records.pools["lengths"].items() if setting[arm] == usual}


def at_every_length(system):
    def check(records, _):
        found = {arm: (pool.difference(system, "vanilla", pool.tokens), pool.tokens)
                 for arm, pool in of_lengths(records)[1].items()}
        cells = [f"{arm}: {described(d, tokens) if d else 'no paired runs'}" for arm, (d, tokens) in found.items()]
        return "; ".join(cells) or "no runs", together([verdict(d, -1) for d, _ in found.values()])
    return check


def overtaken_later(records, _):
    """Critical points in tokens, each length's minus the next shorter one's, by seed; extrapolated ones hold partly at best."""
    found = {arm: point for arm, pool in of_lengths(records)[1].items()
             if (point := pool.critical("svformer", pool.tokens))}
    verdicts = []
    for (_, shorter), (_, longer) in zip(list(found.values())[:-1], list(found.values())[1:]):
        d = difference(*({seed: p["tokens"] for seed, p in of.items()} for of in (longer, shorter)))
        sure = {p["kind"] for of in (longer, shorter) for p in of.values()} == {"crossed"}
        v = verdict(d, +1)
        verdicts.append(PARTLY if v == HOLDS and not sure else v)
    return "; ".join(f"{arm}: {reached(mean)}" for arm, (mean, _) in found.items()) or "no paired runs", together(verdicts)


def better_if_slower(records, _):
    """SVFormer's difference to vanilla at a lower learning rate, minus that at the usual one and the same length and warmup."""
    usual, pools = of_lengths(records)
    of = {}
    for arm, pool in records.pools["lengths"].items():
        config = pool.runs()[0].config
        same = [p for p in pools.values() if p.runs()[0].config["block_size"] == config["block_size"] and p.tokens == pool.tokens]
        if same and config["learning_rate"] < usual[0] and config["warmup_iters"] == usual[1]:
            pair = [p.difference("svformer", "vanilla", p.tokens) for p in (pool, same[0])]
            if all(pair) and (d := difference(*(p["seeds"] for p in pair))):
                of[arm] = d, pool.tokens
    return ("; ".join(f"{arm}: {described(d, tokens)}" for arm, (d, tokens) in of.items()) or "no paired runs at a lower rate",
            together([verdict(d, -1) for d, _ in of.values()]))


def at_best_rates(*systems):
    """Each system's best over learning rates against vanilla's best."""
    def check(records, numbers):
        best = numbers.get("rates", {}).get("best", {})
        found = {s: best[s]["difference"] if s in best else None for s in systems}
        tokens = next((pool.tokens for pool in records.pools["rates"].values()), None)
        cells = [f"{s}: {described(d, tokens)}, {best[s]['rate']} against vanilla's {best['vanilla']['rate']}" if d else
                 f"{s}: no paired runs" for s, d in found.items()]
        return "; ".join(cells), together([verdict(d, -1) for d in found.values()])
    return check


def saves_parameters(system):
    """Of all parameters, by a line in ln N: holds when the interval lies above 0 and meets the paper's range."""
    def check(records, numbers):
        r = numbers.get("sizes", {}).get("saving", {}).get(system, {}).get("n_params")
        part = r and r["forms"]["line"]
        if part is None:
            return "no two sizes", NOT_TESTABLE
        low, high = r["interval_95"] or (None, None)
        tokens = next(iter(records.pools["sizes"].values())).tokens
        here = scaling.percent(part) + bracket(r["interval_95"], scaling.percent) + \
            f" ({r['interval_from']})" * bool(r["interval_95"]) + \
            f", {len(r['points'][1]['x'])} sizes, {billions(tokens)} tokens"
        meets = low is not None and 0 < low <= max(PAPER_PARAMETERS) and high >= min(PAPER_PARAMETERS)
        return here, HOLDS if meets else PARTLY if part > 0 else NOT_SEEN
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
    Claim("SVFormer is worse than GQA2 at 2,048 tokens", "training curves", below(
        ("gqa2", "svformer"), pool=at_length("kv", 2048)), "kv"),
    Claim("ResFormer gains at every length", "512 to 64,000", at_every_length("identity"), "lengths"),
    Claim("vanilla overtakes SVFormer later if windows are longer", "5,000 to 30,000 iterations", overtaken_later, "lengths"),
    Claim("a lower learning rate makes SVFormer's loss better beside vanilla's", "1e-4, 3e-4 against 6e-4", better_if_slower,
          "lengths"),
    Claim("the gain is there at each one's best learning rate", "yes", at_best_rates("identity", "sparse"), "rates"),
]
