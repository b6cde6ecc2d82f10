"""What README.md and docs/ tell of results/ is what was measured: numbers, words around them, and copies of runs."""
import functools
import glob
import json
import math
import os
import re
import statistics
import subprocess

import numpy as np
import pytest
import torch

import train
from analysis import bench, claims, records, scaling
from configurator import configure
from model import GPT, GPTConfig, KVCache

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
README, RESULTS, PERFORMANCE = (open(os.path.join(REPO, name), encoding="utf-8").read()
                                for name in ("README.md", "docs/results.md", "docs/performance.md"))


def flat(text):
    """On one line, so that words are found wherever its lines break."""
    return " ".join(text.split())


def section(document, title):
    """What follows that heading, up to the next of its level."""
    return document.partition(title)[2].partition("\n## ")[0]


def reported(folder="results"):
    """The numbers of that folder's report."""
    with open(os.path.join(REPO, folder, "report.json"), encoding="utf-8") as f:
        return json.load(f)


@functools.cache  # reads a whole log
def end(run, iteration=2000):
    """The loss, mean over sources, of a run in results/ at that iteration."""
    return train.read_log(os.path.join(REPO, "results", run))[1][iteration]["val_mean"]


@functools.cache  # reads every log
def of_results():
    return records.Records(os.path.join(REPO, "results"))


def test_quickstart_table_is_the_measured_one():
    """README's numbers are those of the committed summary, as train.py prints it."""
    with open(os.path.join(REPO, "results", "quickstart", "summary.json"), encoding="utf-8") as f:
        assert train.table(summary := json.load(f)) in README
    rates = reported("results/quickstart")["rates"]
    text = flat(section(README, "## What the quickstart shows"))
    best, strong = ([rates[key][s] for s in ("vanilla", "resformer", "svformer")] for key in ("best_plain", "best_stronger"))
    assert [x["rate"] for x in best] == ["1e-3", "2e-3", "2e-3"]
    assert [x["rate"] for x in strong] == ["1e-3_strong", "2e-3_strong", "2e-3_strong"]
    assert list(rates["arms"]) == "5e-4 5e-4_strong 1e-3 1e-3_strong 2e-3 2e-3_strong 4e-3 4e-3_strong".split()
    gains = [a["val_mean"] - b["val_mean"] for a, b in zip(best, strong)]
    assert max(gains) == gains[0] and min(gains) > 0  # "vanilla gains most"
    assert all(a["difference"]["mean"] / b["difference"]["mean"] > 0.5 for a, b in zip(strong[1:], best[1:]))  # "over half"
    assert all(x["difference"]["interval_95"][1] < 0 for x in strong[1:])  # "beyond"
    assert not any(x["at_an_end"] for x in best + strong)

    def ahead(x):
        mean, (low, high) = x["difference"]["mean"], x["difference"]["interval_95"]
        assert len(x["difference"]["seeds"]) == 3
        return f"by {-mean:.3f} [{-high:.3f}, {-low:.3f}]"
    seeds, same = [], []
    for system in ("resformer", "svformer"):
        mine = rates["arms"]["1e-3"]["systems"][system]["difference"]
        assert mine["seeds"] == pytest.approx({
            seed: x["rel_val_loss"] for seed, x in summary[system]["seeds"].items()}, abs=1e-5)  # the table's runs again
        seeds.append(", ".join(f"−{-x:.2f}" for x in mine["seeds"].values()))
        x = rates["arms"]["2e-3"]["systems"][system]["difference"]
        same.append("−{:.2f} [{:+.2f}, {:+.2f}]".format(-x["mean"], *x["interval_95"]).replace("[-", "[−").replace(" -", " −"))
    assert "ResFormer is ahead {} and SVFormer {} (three".format(*map(ahead, best[1:])) in text
    assert round(rates["arms"]["1e-3"]["systems"]["resformer"]["difference"]["mean"] / -0.027) == 3  # "three times the paper's"
    assert "ahead {} and SVFormer {} (vanilla at 1e-3, the others at 2e-3)".format(*map(ahead, strong[1:])) in text
    assert "(ResFormer {}; SVFormer {})".format(*seeds) in text
    at = [train.read_log(os.path.join(REPO, f"results/quickstart/rates/{rate}/vanilla/seed{seed}"))[1][300]["val_loss"]
          for rate in ("2e-3", "1e-3") for seed in (1337, 1338, 1339)]
    assert at[3:] == [x["val_loss"] for x in summary["vanilla"]["seeds"].values()]  # to the bit
    worse = [a - b for a, b in zip(at[:3], at[3:])]
    assert ("as in the table, {} and {}: there vanilla ends {:.2f} and {:.2f} higher with two of the seeds, and {:.2f} "
            "lower").format(*same, worse[0], worse[2], -worse[1]) in text
    config = configure(train.Config, [os.path.join(REPO, "config", "quickstart.py")])
    assert (config.learning_rate, config.min_lr) == (1e-3, 1e-4) and "the learning rate, 1e-3, has vanilla's lowest" in text
    assert "ResFormer's is three times the paper's −0.027" in text and "the other two's is at 2e-3" in text
    speeds = [[x["tokens_per_s"] for x in of["seeds"].values()] for of in summary.values()]
    apart = max(max(x) / statistics.fmean(x) - 1 for x in speeds), max(1 - min(x) / statistics.fmean(x) for x in speeds)
    assert f"Speeds differ by {max(apart):.0%} from run to run".replace("%", " %") in text


def test_learning_rates_told_are_the_measured_ones():
    """docs/results.md's answer to whether the gain at 82M is the rate's or a weak baseline's: results/rates/'s seed 1337."""
    report = reported()["rates"]
    part = RESULTS.partition("## More tokens")[2].partition("## What the paper varies")[0]
    text, systems = flat(part), ("identity", "sparse", "svformer")
    curve = of_results().curve
    losses = {arm: {s: end(f"rates/{arm}/{s}/seed1337") for s in ("vanilla", *systems) if s in of["systems"]}
              for arm, of in report["arms"].items()}
    lead = {arm: {s: of["vanilla"] - of[s] for s in systems if s in of} for arm, of in losses.items()}
    assert list(losses) == [f"{rate}{strong}" for rate in ("3e-4", "6e-4", "1.2e-3", "2.4e-3") for strong in ("", "_strong")]
    for arm, of in losses.items():
        cells = [f"{-lead[arm][s]:+.4f}" if s in of else "-" for s in systems]
        assert f"| {arm} | {of['vanilla']:.4f} | {' | '.join(cells)} |" in part
    assert {s: x["rate"] for s, x in report["best_plain"].items()} == {**dict.fromkeys(systems, "2.4e-3"), "vanilla": "1.2e-3"}
    more = sorted(lead["2.4e-3"][s] - lead["6e-4"][s] for s in systems)
    assert all(lead["2.4e-3"][s] > lead["1.2e-3"][s] > lead["6e-4"][s] for s in systems)  # "no lead is smaller"
    changes = {s: [losses[f"{rate}_strong"][s] - losses[rate][s] for rate in ("3e-4", "6e-4", "1.2e-3", "2.4e-3")]
               for s in losses["6e-4"]}
    assert max(*changes["sparse"], *changes["vanilla"]) < 0 < min(changes["identity"][1:] + changes["svformer"])
    assert all(min(changes[s]) == changes[s][0] for s in ("vanilla", "sparse"))  # "most at the lowest rate"
    reach = records.reach(report["noise"], 1)
    assert {a: of["systems"]["vanilla"]["seeds"] for a, of in report["arms"].items() if any(
        x["seeds"] != [1337] for x in of["systems"].values())} == {"6e-4": [1337, 1338, 1339]}
    assert all(lead[f"{arm}_strong"][s] < of[s] for arm, of in lead.items() if "strong" not in arm for s in systems)  # "less"
    for said in ("Over the stronger baseline less is left.", "All of it is one seed and a schedule", "vanilla's most, so that",
                 "there with three seeds at 6e-4)", "for two the bests are at an end of the rates: vanilla's without the",
                 "with the options where they help, is ahead of vanilla's best, which is with them (2.4e-3_strong)"):
        assert said in text
    assert "At four times the paper's learning rate, one seed, no lead is smaller than at the paper's." in flat(README)
    assert more[-1] < math.sqrt(2) * reach  # "within the noise of such a change"
    assert [(s, arm) for s in systems for arm in losses if s in losses[arm] and lead[arm][s] <= reach] == [
        ("identity", "3e-4"), ("identity", "3e-4_strong"), ("identity", "6e-4"), ("identity", "6e-4_strong"),
        ("identity", "1.2e-3_strong"), ("identity", "2.4e-3_strong"), ("svformer", "3e-4_strong"), ("svformer", "6e-4_strong"),
        ("svformer", "1.2e-3_strong")]
    beyond = {s: [a for a in losses if a.endswith("_strong") and lead[a][s] > reach] for s in systems}
    assert [len(of) for of in beyond.values()] == [0, 4, 1] and beyond["svformer"] == ["2.4e-3_strong"]
    assert "at all four rates, SVFormer's at the highest only and identity's at none (at 3e-4 and 6e-4, with this" in text
    assert ("stays beyond the noise at half, once, twice and four times the paper's rate, SVFormer's only at four times, "
            "identity's at none: at two of them it is behind, and each at its best it leads by {:.2f}, within "
            "the noise.").format(-report["best_stronger"]["identity"]["difference"]["mean"]) in flat(README)
    strong = {s: -report["best_stronger"][s]["difference"]["mean"] for s in ("sparse", "svformer", "identity")}
    assert [s for s, x in strong.items() if x <= reach] == ["identity"] and -reach < lead["3e-4_strong"]["svformer"] < 0
    best, plain = ([-report[key][s]["difference"]["mean"] for s in systems] for key in ("best", "best_plain"))
    worse = {s: [mine > -base for mine, base in zip(changes[s], changes["vanilla"])] for s in ("identity", "svformer")}
    assert worse == {"identity": [False, False, True, True], "svformer": [False, True, True, True]}
    assert sum(lead[a]["identity"] < 0 for a in losses if a.endswith("_strong")) == 2  # "at two of them it is behind"
    assert ("At 1.2e-3 and 2.4e-3 the hurt is the larger part, at 6e-4 for SVFormer only, at 3e-4 for neither (there identity "
            "gains, too, but less than vanilla).") in text and changes["vanilla"][0] < changes["identity"][0] < 0
    assert {s: x["rate"] for s, x in report["best"].items()} == {
        "vanilla": "2.4e-3_strong", "identity": "2.4e-3", "sparse": "2.4e-3_strong", "svformer": "2.4e-3"}
    inside = [(key, s) for key in ("best", "best_plain", "best_stronger") for s, x in report[key].items() if not x["at_an_end"]]
    assert inside == [("best_plain", "vanilla"), ("best_stronger", "identity")]
    hurried = [[curve.hurried(s, tokens)["mean"] for s in losses["6e-4"]] for tokens in (131072000, 262144000)]
    assert all(max(of) == of[0] for of in hurried)  # "vanilla's most"
    early = {s: end(f"tokens/8000/{s}/seed1337") for s in losses["6e-4"]}
    for words, numbers in (
            ("identity is ahead by {:.3f}, sparse by {:.3f} and SVFormer by {:.3f}, and no lead", plain),
            ("(2.4e-3_strong): identity by {:.3f}, sparse by {:.3f} and SVFormer by {:.3f}.", best),
            ("(that they are larger, by {:.2f} to {:.2f}, is within the noise of such a change, {:.2f})", [
                more[0], more[-1], math.sqrt(2) * reach]),
            ("lower vanilla's loss by {:.3f} to {:.3f} and sparse's by {:.3f} to {:.3f}, most at the lowest rate, where they "
             "lower identity's, too, by {:.3f};", [
                *(-pick(changes[s]) for s in ("vanilla", "sparse") for pick in (max, min)), -changes["identity"][0]]),
            ("{:.3f} below its loss at 2.4e-3, nor is identity's with them (", [
                losses["2.4e-3"]["vanilla"] - losses["1.2e-3"]["vanilla"]]),
            ("from there on they raise it by {:.3f} to {:.3f}, and SVFormer's at every rate, by {:.3f} to {:.3f}.", [
                pick(of) for of in (changes["identity"][1:], changes["svformer"]) for pick in (min, max)]),
            ("beyond the noise ({:.2f} for one seed, measured at 6e-4)", [reach]),
            ("at 3e-4 SVFormer ends {:.3f} behind vanilla, within the noise.", [-lead["3e-4_strong"]["svformer"]]),
            ("Each at its best with the options, sparse is ahead by {:.3f}, SVFormer by {:.3f} and identity by {:.3f}, within "
             "the noise.", strong.values()),
            ("each system's run of 8,000 iterations, its learning rate still high, was lower by {:.3f} to {:.3f} after 0.131B "
             "tokens and by {:.3f} to {:.3f} after 0.262B", [pick(of) for of in hurried for pick in (min, max)]),
            ("sparse led it by {:.3f} and SVFormer by {:.3f} after 0.131B", [
                early["vanilla"] - early[s] for s in ("sparse", "svformer")])):
        assert words.format(*numbers) in text, words


ABLATED = {  # rows of README's table: {what: {said: system}}
    "the residual is on": {"values": "identity", "keys": "key_residual", "hidden states": "hidden_residual",
                           "queries": "query_residual", "attention": "attention_residual"},
    "its source": {"V_1": "identity", "mean of V_1 to V_n": "source_all", "V_{n-1}": "source_previous"},
    "λ1 of V_1 (λ2 = 1)": {"5:": "lambda_5", "3:": "lambda_3", "2:": "constant", "1:": "lambda_1", "0.5:": "lambda_0.5"},
    "layers that mix (λ1 = 5)": {"2-8:": "lambda_5", "6-8:": "sparse", "5-8:": "layers_5-8", "4-5:": "layers_4-5",
                                 "7-8:": "layers_7-8", "2-4:": "layers_2-4"},
    "instead of it": {"identity mapping (Eq 6)": "identity_mapping", "cross-layer attention (Eq 2)": "cross_layer"},
    "shared by pairs of layers": {"V": "share_v_every_2", "K and V": "cla2", "K": "share_k_every_2"},
    "layer 1's for all layers": {"V": "svformer", "V of layers 1 and 5": "svformer_anchors", "K": "shared_key",
                                 "Q": "shared_query"},
    "larger values alone, a control": {"2 V_n": "values_x2", "6 V_n": "values_x6"}}


def test_ablations_told_are_the_measured_ones():
    report = reported()
    part = section(RESULTS, "## What the paper varies")
    text = flat(part)
    large, small = ({s: x["difference"] for s, x in numbers["ablations"]["arms"][""]["systems"].items() if s != "vanilla"}
                    for numbers in (report, reported("results/quickstart")))
    d, small = {s: x["seeds"]["1337"] for s, x in large.items()}, {s: x["mean"] for s, x in small.items()}
    assert set(d) == {s for of in ABLATED.values() for s in of.values()} == set(small)
    for what, of in ABLATED.items():  # "best first"
        cells = [", ".join(f"{said} {x[s]:+.3f}" for said, s in sorted(of.items(), key=lambda item, x=x: x[item[1]]))
                 for x in (d, small)]
        assert f"| {what} | {cells[0]} | {cells[1]} |" in part
    reach = records.reach(report["ablations"]["noise"], 1)
    assert f"At 82M, with one seed, a difference counts from {reach:.3f} on." in text
    identity = records.spread(report["ablations"]["arms"][""]["systems"]["identity"]["difference"], "+.3f")
    assert sorted(s for s, x in large.items() if len(x["seeds"]) == 3) == ["identity", "sparse", "svformer"]
    assert f"by three seeds identity ({identity})" in text and "+0.000" not in identity.partition("[")[2]
    residuals, _, lambdas, layers, instead, _, shared, _ = ABLATED.values()
    short = flat(README)
    ahead = {s for s, x in d.items() if x < -reach}
    assert ahead == {*list(lambdas.values())[:4], *layers.values(), "svformer"}
    assert "λ1 of 1 and more in all layers, λ1 = 5 in every set of layers, SVFormer, and by three seeds identity" in text
    behind = {s for s, x in d.items() if x > reach}
    assert "layer 1's K or Q for all layers, cross-layer attention, 6 V_n and a residual on queries" in text
    assert "attention or, barely, hidden states." in text and "6 V_n alone is behind vanilla, 2 V_n undecided." in short
    assert ("After 0.13B, one seed, a residual on values is ahead of one on keys, queries, hidden states or attention, "
            "ResFormer is far ahead of cross-layer attention, and SVFormer of layer 1's keys or queries for all") in short
    assert d["cross_layer"] - d["identity"] > 2 * reach  # "far"
    assert behind == {"shared_key", "shared_query", "cross_layer", "values_x6", *list(residuals.values())[2:]}
    within = {(a, b) for of in ABLATED.values() for a in of.values() for b in of.values() if d[b] - d[a] > reach}
    assert within == {
        *(("identity", s) for s in list(residuals.values())[1:]),
        *((s, "lambda_0.5") for s in ("lambda_3", "lambda_5")), tuple(instead.values()),
        *((s, f"shared_{x}") for s in ("svformer", "svformer_anchors") for x in ("key", "query"))}
    margins = {s: abs(d[s]) for s in ahead | behind} | {(a, b): d[b] - d[a] for a, b in within}
    assert {x for x, margin in margins.items() if margin < 1.1 * reach} == {
        "hidden_residual", ("lambda_3", "lambda_0.5"), ("lambda_5", "lambda_0.5")}  # "barely"
    assert ("Within a row values are ahead of every other residual, λ1 = 3 and 5 are, barely, of 0.5, identity mapping of "
            "cross-layer attention, and layer 1's V, also with anchors, of its K and Q. All else is undecided.") in text
    assert [min(of.values(), key=d.get) for of in list(ABLATED.values())[:7]] == [
        "identity", "identity", "lambda_5", "lambda_5", "identity_mapping", "share_v_every_2", "svformer"]
    assert ("The best of a row is the paper's but for λ1, where it is the largest, the layers, where it is all of them, and "
            "anchors; and V in pairs and identity mapping end below vanilla rather than above, within the noise.") in text
    assert -reach < d["share_v_every_2"] < 0 and -reach < d["identity_mapping"] < 0  # "end below vanilla, within the noise"
    again = {s: x["seeds"]["1338"] for s, x in large.items() if "1338" in x["seeds"]}  # "a second seed"
    best = list(lambdas.values())[:3], sorted(layers.values(), key=again.get)
    assert ("λ1 = 5, 3 and 2 ({:.3f}, {:.3f} and {:.3f} with it) and layers 2-8, 5-8, 4-5, 7-8, 6-8 and 2-4 "
            "({:.3f}, {:.3f}, {:.3f}, {:.3f}, {:.3f} and {:.3f}) stay ahead, though the sets of layers change places.").format(
                *(again[s] for of in best for s in of)) in text
    assert best[1] == [layers[f"{x}:"] for x in ("2-8", "5-8", "4-5", "7-8", "6-8", "2-4")]
    both = {s: statistics.fmean((d[s], again[s])) for of in best for s in of}
    assert max(abs(both[a] - both[b]) for of in best for a in of for b in of) < reach / math.sqrt(2)  # "change places"
    assert max(both.values()) < -reach / math.sqrt(2)  # "stay ahead"
    assert sorted(best[0], key=d.get) == sorted(best[0], key=again.get) and best[1] != sorted(best[1], key=d.get)  # "order"
    two = "query_residual", "hidden_residual"
    assert ("queries and hidden states ({:.3f} and {:.3f} with it) stay behind: their means of {:.3f} and {:.3f} are beyond "
            "what counts for two seeds, {:.3f}, though these two alone would not show it.").format(
                *(again[s] for s in two), *(large[s]["mean"] for s in two), reach / math.sqrt(2)) in text
    assert all(large[s]["interval_95"][0] < 0 < large[s]["interval_95"][1] for s in two)
    near = {s for of in ABLATED.values() for a in of.values() for b in of.values() if a != b and abs(d[a] - d[b]) < 0.01
            for s in (a, b)}
    assert near == again.keys() - {"identity", "svformer"}  # "within 0.01 of another in its row"
    assert {s for s, x in d.items() if abs(x) < 0.01} == {"source_previous", "cla2"}  # "as near to vanilla"
    assert ("A second seed was run of what is within 0.01 of another in its row; not of V_{n-1} and of K and V in pairs, which "
            "are as near to vanilla.") in text
    assert all(large[s]["mean"] > reach / math.sqrt(2) for s in two)
    assert again.keys() == {*both, "identity", "svformer", "query_residual", "hidden_residual"}
    assert "λ1 = 1 is ahead of 2 V_n by {:.3f}, λ1 = 5 of 6 V_n by {:.3f}, though".format(
        d["values_x2"] - d["lambda_1"], d["values_x6"] - d["lambda_5"]) in text
    assert "(λ1 = 2, layers 6-8, V_1 as the source, identity mapping, V in pairs) is undecided. The gain is V_1's" in short
    undecided = ("λ1 = 2", "layers 6-8", "V_1 is", "identity mapping is", "of pairs of layers")
    mine = {c["claim"]: c["verdict"] for c in report["claims"]}
    texts = [c.text for c in claims.CLAIMS if c.folder == "ablations"]
    assert {mine["SVFormer nearly halves the KV cache"], mine["learned λ1 grows with depth"]} == {"holds"}
    assert "The cache's arithmetic and the growth of λ1 with depth hold." in short
    assert [t for t in texts if mine[t] == "not testable at this budget"] == [t for t in texts if t.startswith(undecided)]


def test_caches_told_are_the_measured_ones():
    report = reported()
    part = section(RESULTS, "## A smaller KV cache")
    text, arms = flat(part), {n: of["systems"] for n, of in report["kv"]["arms"].items()}
    assert list(arms) == ["2048", "8192"] and all(x["seeds"] == [1337] for of in arms.values() for x in of.values())
    short, long = ({s: end(f"kv/{length}/{s}/seed1337") for s in of} for length, of in arms.items())
    size, wide = ({s: x["kv_bytes_per_token"] for s, x in of.items()} for of in arms.values())
    assert size == wide and short.keys() == long.keys()
    rows = [f"| {s} | {size[s]:,} | {size[s] / size['vanilla']:.4f} | " + " | ".join(
        f"{of[s]:.4f} | " + ("-" if s == "vanilla" else f"{of[s] - of['vanilla']:+.4f}") for of in (short, long)) + " |"
        for s in sorted(size, key=lambda s: (-size[s], short[s]))]
    assert "| --- |\n" + "\n".join(rows) + "\n\nAt both" in part
    reach = records.reach(report["ablations"]["noise"], 1)
    for of, times in ((short, 1), (long, 2)):  # "ahead ... by more than the noise", "twice of it", "within the noise"
        with_it, without = ([x for s, x in of.items() if s.startswith("svformer") == pick] for pick in (True, False))
        assert len(with_it) == 3 and max(with_it) + times * reach < min(without)
        assert of["svformer_gqa4"] - of["svformer"] < reach
    assert set(os.listdir(os.path.join(REPO, "results/tokens/13100"))) & set(size) == {"vanilla", "svformer"}
    for said in ("At both lengths SVFormer and what is built on it are ahead of vanilla and of every GQA and CLA: at 2,048 by "
                 "more than the noise", "higher, within the noise.", "and only these two of the table were run for so long."):
        assert said in text
    for said in ("After 0.13B, one seed, SVFormer, alone, with shared keys or with grouped keys and values (a seventh of",
                 "is ahead of vanilla, GQA and CLA at 2,048 tokens and far more at 8,192.", "is gone after 0.86B, as told."):
        assert said in flat(README)
    leads = [min(of["vanilla"] - x for s, x in of.items() if s.startswith("svformer")) for of in (long, short)]
    assert leads[0] > 3 * leads[1]  # "far more"
    of = [end(f"lengths/8192/vanilla/{seed}") - end(f"lengths/8192/svformer/{seed}") for seed in ("seed1337", "seed1338")]
    assert ("by more than twice of that noise, which is 2,048's (SVFormer's two leads over vanilla there, {:.3f} and {:.3f}, "
            "are {:.2f} apart).").format(*of, of[0] - of[1]) in text
    assert round(size["vanilla"] / size["svformer_gqa4"]) == 7
    pools = of_results().pools["kv"]
    assert pools["2048"].runs()[0].config["rel_window"] == 100
    (xs, near), (_, far), (_, gqa2) = [(x, y[0]) for x, y in (
        pools[n].relative(s, 131072000) for n, s in (("2048", "svformer"), ("8192", "svformer"), ("8192", "gqa2")))]
    widest, settled = far.argmin(), xs > 200
    assert near[xs > 1050].max() < 0 and abs(xs[widest] - 1050) < 1
    assert gqa2[settled & (xs < 850)].min() > 0 > gqa2[xs > 900].max() and abs(xs[gqa2 > 0][-1] - 880) < 5
    for words, numbers in (
            ("({:.3f} for one seed)", [reach]),
            ("SVFormer ends {:.3f} and {:.3f} higher", [of["svformer_gqa4"] - of["svformer"] for of in (short, long)]),
            ("iterations 400 to 500 SVFormer is ahead by {:.2f} at 2,048 and by {:.2f} at 8,192.", [
                -y[abs(xs - 450) < 1][0] for y in (near, far)]),
            ("vanilla makes up most of it, to {:.2f} over the last 100.", [-near[-1]]),
            ("the lead grows to {:.2f} around iteration 1,050, and {:.2f} is left", [-far[widest], -far[-1]])):
        assert words.format(*numbers) in text, words
    assert "(a seventh of the cache)" in text and "there it is behind until about iteration 880" in text
    short_of = flat(README.partition("In short:\n")[2].partition("\n<!--")[0])
    assert "(a seventh of vanilla's KV cache), is ahead of vanilla, GQA and CLA at 2,048 tokens and far more at" in short_of


def test_sizes_told_are_the_measured_ones():
    report, short = reported(), flat(README)
    part = section(RESULTS, "## Model sizes")
    text, arms, found = flat(part), report["sizes"]["arms"], report["sizes"]["at_largest"]
    assert list(arms) == ["20M", "82M", "180M", "468M"]
    assert all(x["seeds"] == [1337] for of in arms.values() for x in of["systems"].values())
    lead = {}
    for arm, of in arms.items():
        x, own = of["systems"]["vanilla"], [s for s in of["systems"] if s.startswith("sparse")]
        lead[arm] = [-of["systems"][s]["difference"]["mean"] for s in ("identity", *own)]
        assert (f"| {arm} | {x['n_params'] / 1e6:.1f}M | {x['n_params_non_embedding'] / 1e6:.1f}M | {x['val_mean']:.4f} | "
                + " | ".join(f"{-y:+.4f}" for y in lead[arm]) + " |") in part
        assert of["learning_rate"] == 6e-4
    losses = {arm: of["systems"]["vanilla"]["val_mean"] for arm, of in arms.items()}
    assert [(found[s]["at"], found[s]["sizes"]) for s in ("identity", "sparse")] == [("468M", 4)] * 2
    cells = ["{:.0%}{} [{:.0%}, {:.0%}]".format(found[s]["saving"], more, *found[s]["interval_95"]).replace("%", " %")
             for s, more in (("identity", " fewer parameters"), ("sparse", ""))]
    forms = [[report["sizes"]["saving"][s][axis]["forms"] for s in ("identity", "sparse")]
             for axis in ("n_params", "n_params_non_embedding")]
    lines, most = ([100 * pick(of) for of in forms[0]] for pick in (lambda of: of["line"], lambda of: max(of.values())))
    assert all(min(of.values()) == of["line"] for axis in forms for of in axis) and all(len(of) == 4 for of in forms[0])
    low, high = (records.PAPER_PARAMETERS[i] for i in (0, -1))
    assert (f"* After 0.13B, one seed, identity reaches the loss of vanilla's 468M with {cells[0]} and sparse with "
            f"{cells[1]}, or with {lines[0]:.0f} and {lines[1]:.0f} % by one line through all sizes.") in short
    assert f"The paper has {low * 100:.0f} to {high * 100:.0f} % after 20B. Our leads are larger," in short
    gone = losses["180M"] - losses["468M"]
    paper = {size: [statistics.fmean(scaling.TABLE_5[which, size]) for which in "TR"] for size in ("82M", "180M", "468M")}
    theirs = paper["180M"][0] - paper["468M"][0]
    assert f"and our vanilla's 468M is only {gone:.2f} ahead of its 180M (the paper's: {theirs:.2f})." in short
    assert f"The paper has {low:.1%} to {high:.2%} after 20B".replace("%", " %").replace(" % to", " to") in text
    assert ("0.131B tokens as above, seed 1337, at four sizes and one rate, 6e-4 (`config/sizes.py`; sparse mixes in layers "
            "6-8 of 8, 8-12 of 12 and 16-24 of 24; 20M is not one of the paper's sizes)") in text
    assert "| size | parameters | without embeddings | vanilla's loss | identity | sparse |" in part
    bare = report["sizes"]["at_largest_non_embedding"]
    logs = {s: os.path.join(REPO, f"results/sizes/468M/{s}/seed1337") for s in ("vanilla", "identity", "sparse_24")}
    assert [json.load(open(os.path.join(of, "config.json")))["processes"] for of in logs.values()] == [1, 1, 2]
    assert ("{:,.0f} tokens/s at its end, identity's {:,.0f} on one.").format(*(
        train.read_log(logs[s])[0][1999]["tokens_per_s"] for s in ("sparse_24", "identity"))) in flat(
            open(os.path.join(REPO, "results/README.md"), encoding="utf-8").read())
    assert "At 468M vanilla and identity ran on one GPU, sparse by DDP on two of another host" in flat(RESULTS)
    n = {arm: of["systems"]["vanilla"]["n_params"] for arm, of in arms.items()}

    def saved(system, arm, it=2000, moved=0):  # by straight lines in ln N, if vanilla's loss moves
        own = [-end(f"sizes/{a}/{next(s for s in arms[a]['systems'] if s.startswith(system))}/seed1337", it) for a in n]
        need = np.interp(-end(f"sizes/{arm}/vanilla/seed1337", it) - moved, own, [math.log(x) for x in n.values()])
        return 100 * (1 - math.exp(need) / n[arm])
    for system in found:
        assert saved(system, "468M") == pytest.approx(100 * found[system]["saving"], abs=0.01)
    reach = math.sqrt(2) * records.reach(report["ablations"]["noise"], 1)
    change = [lead["468M"][0] - lead["20M"][0], lead["180M"][1] - lead["20M"][1]]  # "in all", "at most"
    assert lead["20M"][0] < lead["82M"][0] < lead["180M"][0] < lead["468M"][0]
    assert lead["20M"][1] > lead["82M"][1] > lead["468M"][1] > lead["180M"][1]
    assert max(map(abs, change)) < reach and "identity's lead grows" in text
    assert gone < min(*lead["180M"], *lead["468M"])  # "less than each lead at either"
    assert max(forms[0][0].values()) == forms[0][0]["piecewise"]
    half = math.sqrt(2) * records.reach(of_results().noise_for(of_results().pools["sizes"]["180M"], None), 1)
    early = {s: end(f"tokens/8000/{s}/seed1337") for s in ("vanilla", "identity", "sparse")}
    short_by = [lead["82M"][i] - (early["vanilla"] - early[s]) for i, s in ((1, "sparse"), (0, "identity"))]
    twice = losses["82M"] - end("rates/1.2e-3/vanilla/seed1337")
    kept = []
    for pool in of_results().pools["sizes"].values():
        for system in set(pool.systems(pool.tokens)) - {"vanilla"}:
            x, (y,) = pool.relative(system, pool.tokens)
            kept.append(y[-1] / y[abs(x - 1000).argmin()])
    assert len(kept) == 8
    for words, numbers in (
            ("with {} and sparse with {}, that of its 180M with {:.0f} % [{:.0f} %, {:.0f} %] and {:.0f} % [{:.0f} %, "
             "{:.0f} %]: by", [*cells, *(saved(s, "180M", moved=x) for s in found for x in (0, -half, half))]),
            ("because the leads are, and because vanilla's curve is flat: our 468M is only {:.3f} ahead of our 180M, less than "
             "each lead at either, the paper's by {:.3f}.", [gone, theirs]),
            ("the rate is tuned for no size (at 82M twice of it lowers vanilla by {:.3f}, below).", [twice]),
            ("makes up {:.3f} of sparse's lead at 82M and {:.3f} of identity's ([results/report.md]", short_by),
            ("need the savings stay: after 1,000 of the 2,000 iterations identity's and sparse's were {:.0f} and {:.0f} % at", [
                saved(s, "468M", 1000) for s in found]),
            ("leads by {:.3f}, {:.3f} and {:.3f} at 82M, 180M and 468M.", [t - r for t, r in paper.values()]),
            ("One line through all sizes, the form that gives the paper's lowest number, gives {:.0f} and {:.0f} %; of "
             "four forms that of the {:.0f} % is the highest for identity, and sparse's highest gives {:.0f} %.", lines + most),
            ("Without embeddings it is {:.0f} % [{:.0f} %, {:.0f} %] and {:.0f} % [{:.0f} %, {:.0f} %], by the four forms "
             "{:.0f} to {:.0f} % and {:.0f} to {:.0f} %.", [100 * x for x in (
                 *(x for s in found for x in (bare[s]["saving"], *bare[s]["interval_95"])),
                 *(pick(of.values()) for of in forms[1] for pick in (min, max)))]),
            ("our 468M has seen {:.1f} tokens per parameter", [131072000 / n["468M"]]),
            ("on the training batches shrank to {:.2f} to {:.2f} of itself.", [min(kept), max(kept)]),
            ("by {:.3f} in all, and sparse's is smaller at the two larger sizes than at the two smaller ones, by {:.3f} at "
             "most, is within the noise of such a change ({:.3f}, that of 82M).", [change[0], -change[1], reach])):
        assert words.format(*numbers) in text, words


def test_lengths_told_are_the_measured_ones():
    report, short = reported(), flat(README)
    part = section(RESULTS, "## Window lengths")
    text, arms = flat(part), report["lengths"]["arms"]
    slow, brief, middle = "2048_2e-4", "2048_warmup12", "2048"
    assert set(arms) == {"512", middle, slow, brief, "8192"}
    seeds = {arm: len(of["systems"]["vanilla"]["seeds"]) for arm, of in arms.items()}
    assert seeds == {"512": 2, middle: 3, slow: 1, brief: 1, "8192": 2}
    found = {arm: {s: x["difference"] for s, x in of["systems"].items() if s != "vanilla"} for arm, of in arms.items()}
    means = {arm: {s: x["val_mean"] for s, x in of["systems"].items()} for arm, of in arms.items()}
    for arm, of in found.items():
        cells = [records.spread(of[s]) if s in of else "-" for s in ("identity", "svformer")]
        assert f"| {arm} | {seeds[arm]} | {means[arm]['vanilla']:.4f} | {' | '.join(cells)} |" in part
    reach, each, both = records.reach(report["ablations"]["noise"], 1), ("512", middle, "8192"), ("1337", "1338")
    assert "Identity and SVFormer are ahead at every length with every seed, as identity is in the paper." in text
    assert all(x < 0 for arm in each for d in found[arm].values() for x in d["seeds"].values())
    assert [(arm, s) for arm in each for s in found[arm] if found[arm][s]["interval_95"][1] > 0] == [("8192", "svformer")]
    wide = [found["8192"]["svformer"]["seeds"][seed] for seed in both]
    assert "with each of two or three seeds, identity is ahead at 512, 2,048 and 8,192 tokens, and vanilla's training" in short
    assert "curve overtakes SVFormer's at none of them; at the quickstart's size and a constant rate it" in short
    grown = {s: records.difference(found["512"][s]["seeds"], found["8192"][s]["seeds"]) for s in ("identity", "svformer")}
    for s in grown:
        assert tuple(grown[s]["seeds"]) == both
        assert all(found["512"][s]["seeds"][x] > found[middle][s]["seeds"][x] > found["8192"][s]["seeds"][x] for x in both)
    beyond = {arm: [-found[arm][s]["mean"] * math.sqrt(seeds[arm]) / reach for s in ("identity", "svformer")] for arm in each}
    assert 0.95 < min(beyond["512"]) < max(beyond["512"]) < 1 < min(beyond[middle] + beyond["8192"])  # "just within it"
    assert grown["identity"]["interval_95"][0] > 0 > grown["svformer"]["interval_95"][0]
    shared = {arm: {s: statistics.fmean(end(f"lengths/{arm}/{s}/seed{x}") for x in both) for s in ("vanilla", "svformer")}
              for arm in (middle, "8192")}
    assert -grown["svformer"]["mean"] < -reach < -grown["identity"]["mean"]  # "for SVFormer only"
    assert means["512"]["vanilla"] < means[middle]["vanilla"] < means["8192"]["vanilla"]
    assert "overtakes SVFormer at no length and with no seed so far" in text and "sooner the shorter the windows are" in text
    assert "Both changes are within the noise." in text and "has not crossed after 13,100." in text
    pools = of_results().pools["lengths"]
    xs, curves = None, {}
    for arm in found:
        for s in found[arm]:
            xs, curves[arm, s] = pools[arm].relative(s, 131072000)
            assert len(curves[arm, s]) == seeds[arm]
        c = pools[arm].runs()[0].config
        assert (c["tokens_per_iter"], c["rel_window"], c["learning_rate"], c["warmup_iters"]) == (
            65536, 100, 2e-4 if arm == slow else 6e-4, 12 if arm == brief else 120)
    assert all(y.max() < 0 for y in curves.values())  # "at no length and with no seed"
    of = [curves[arm, "svformer"].mean(0) for arm in each]
    points = report["lengths"]["critical"]
    assert {p["kind"] for arm in each for p in (points[arm], *points[arm]["seeds"].values())} == {"extrapolated"}
    for seed in both:  # "with both seeds in this order"
        at = [points[arm]["seeds"][seed]["iteration"] for arm in each]
        assert at == sorted(at)
    assert of_results().curve.relative("svformer", 13100 * 65536)[1].max() < 0  # "has not crossed after 13,100"
    for arm in ("512", middle):  # "shrinks"
        late, mid, early = (abs(curves[arm, "identity"][:, k]) for k in (-1, abs(xs - 1000).argmin(), abs(xs - 200).argmin()))
        assert (late < mid).all() and (mid < 0.85 * early).all() and late[0] < 0.7 * mid[0] < 0.49 * early[0]
    assert "Identity's lead shrinks at 512 and 2,048;" in text and "0.131B in all as above, two or three seeds, and at" in text
    again = []
    for y, start in zip(curves["8192", "identity"], (900, 1400)):
        assert abs(xs[xs > 200][y[xs > 200].argmax()] - start) < 20 and y[-1] < 1.09 * y[xs > 200].max()
        again += -y[xs > 200].max(), -y[-1]
    one = {arm: {s: end(f"lengths/{arm}/{s}/seed1337") for s in ("vanilla", "svformer")} for arm in (middle, slow, brief)}
    costs = [one[arm][s] - one[middle][s] for arm in (slow, brief) for s in ("vanilla", "svformer")]
    assert max(abs(costs[1] - costs[0]), abs(costs[3] - costs[2])) < math.sqrt(2) * reach  # "within the noise"
    for words, numbers in (
            ("The spread of a number's own seeds: every lead is beyond it but SVFormer's at 8,192, whose two seeds, {:.3f} and "
             "{:.3f}, are further apart; of the growths identity's is, SVFormer's is not.", wide),
            ("(a lead counts from {:.3f} on with one seed, from {:.3f} with two, a growth with two from {:.3f}): every lead is "
             "beyond it but the two at 512, just; of the growths SVFormer's is, identity's just not.", [
                 reach, reach / math.sqrt(2), reach]),
            ("Vanilla's loss at 8,192 is {:.2f} above that at 2,048, SVFormer's {:.2f} (of the same two seeds),", [
                shared["8192"][s] - shared[middle][s] for s in ("vanilla", "svformer")]),
            ("run at every length both leads grow from 512 to 8,192, identity's by {:.3f} and {:.3f}, SVFormer's by {:.3f} and "
             "{:.3f}.", [x for s in grown for x in grown[s]["seeds"].values()]),
            ("it grows again, from {:.2f} at iteration 900 to {:.2f} with one seed, hardly, from {:.2f} at 1,400 to {:.2f}, "
             "with the other.", again),
            ("mean lead is {:.2f} at 512, {:.2f} at 2,048 and {:.2f} at 8,192, after a largest one of {:.2f} to {:.2f}.", [
                *(-y[-1] for y in of), -max(y.min() for y in of), -min(y.min() for y in of)]),
            ("reach zero at iteration {:,}, {:,} and {:,} (by seed {:,} to {:,}, {:,} to {:,} and {:,} to {:,}), with both "
             "seeds in this order, the paper's,", [int(round(x, -2)) for x in (*(points[arm]["iteration"] for arm in each), *(
                 pick(p["iteration"] for p in points[arm]["seeds"].values()) for arm in each for pick in (min, max)))]),
            ("seed 1337, vanilla ends {:.3f} higher and SVFormer {:.3f}: its lead shrinks by {:.3f},", [
                *costs[:2], costs[1] - costs[0]]),
            ("vanilla ends {:.3f} higher and SVFormer {:.3f}, so that its lead grows by {:.3f};", [
                *costs[2:], costs[2] - costs[3]])):
        assert words.format(*numbers) in text, words


def test_overtaking_told_is_the_measured_one():
    """At the quickstart's size, at a constant rate, by length of the windows."""
    text, short = map(flat, (RESULTS, README))
    report = reported("results/quickstart")["lengths"]
    small = records.Records(os.path.join(REPO, "results/quickstart")).pools["lengths"]
    slow, brief = "128_3e-4", "128_warmup3"
    for arm, rate, warmup in (("32", 1e-3, 30), ("128", 1e-3, 30), ("512", 1e-3, 30), (slow, 3e-4, 30), (brief, 1e-3, 3)):
        for run in small[arm].runs():
            c = run.config
            assert c["learning_rate"] == c["min_lr"] == rate and c["warmup_iters"] == warmup
            assert (c["rel_window"], c["max_iters"], c["block_size"]) == (200, 3000, int(arm.split("_")[0]))
    assert len(small) == 5
    points = {arm: [p["seeds"][seed] for seed in sorted(p["seeds"])] for arm, p in report["critical"].items()}
    at = {arm: [p["iteration"] for p in of] for arm, of in points.items()}
    crossed = {arm: [p["kind"] == "crossed" for p in of] for arm, of in points.items()}
    neither, both = [False, False], [True, True]
    assert crossed == {"32": [False, True], "128": both, "512": neither, slow: both, brief: neither}
    curves = {arm: pool.relative("svformer", pool.tokens)[1][:, -1] for arm, pool in small.items()}
    ends = {arm: [d for _, d in sorted(of["systems"]["svformer"]["difference"]["seeds"].items())]
            for arm, of in report["arms"].items()}
    first, second = (p["tokens"] / 1e6 for p in points["128"])
    usual = curves["128"]
    spread = max(abs(y[0] - y[1]) for y in curves.values())
    for words, numbers in (
            ("first cross at iteration {:,.0f} and {:,.0f} of 3,000 (two seeds; {:.2f}M and {:.2f}M tokens), and vanilla ends "
             "{:.3f} and {:.3f} ahead.", [*at["128"], first, second, *usual]),
            ("At 512 SVFormer still leads by {:.3f} and {:.3f} at the end, so that it would be later, as in the paper, if at", [
                *-curves["512"]]),
            ("the curves only touch: one seed's stays below zero, the other's first crosses at {:,.0f}, and SVFormer ends "
             "ahead by less than {:.3f} with both.", [at["32"][1], math.ceil(1000 * max(-curves["32"])) / 1000]),
            ("a third of the rate they first cross at {:,.0f} and {:,.0f}, and vanilla ends {:.3f} and {:.3f} ahead;", [
                *at[slow], *curves[slow]]),
            ("a tenth of the warmup, 3 iterations, with neither seed, and SVFormer ends {:.3f} and {:.3f} ahead.", [
                *-curves[brief]]),
            ("So the lower rate favours SVFormer by {:.3f} and {:.3f} (as in the paper, not as at 82M), the short warmup by "
             "{:.3f} and {:.3f} (as at 82M); but two seeds of one setting differ by up to {:.3f},", [
                 *(usual - curves[slow]), *(usual - curves[brief]), spread]),
            ("There vanilla ends ahead by {:.3f} and {:.3f} at 32, by {:.3f} and {:.3f} at 128", [*ends["32"], *ends["128"]]),
            ("and by {:.3f} and {:.3f} with the lower rate, SVFormer by {:.3f} and {:.3f} at 512 and, with the short warmup, "
             "by {:.3f} with one seed, vanilla by {:.3f} with the other", [
                 *ends[slow], *(-x for x in ends["512"]), -ends[brief][0], ends[brief][1]])):
        assert words.format(*numbers) in text, words
    assert max(curves["32"]) < 0 < min(*(usual - curves[slow]), *(usual - curves[brief]))
    bounds = [of["systems"]["svformer"]["difference"]["interval_95"] for of in report["arms"].values()]
    assert all(low < 0 < high for low, high in filter(None, bounds)) and sum(map(bool, bounds)) == 5
    assert "all 95 % intervals of two seeds' differences on the validation text contain zero." in text
    told = f"with windows of 128, after {first:.2f}M and {second:.2f}M tokens of two seeds, barely or not with 32,"
    assert told + " and not with 512 or a tenth of the warmup." in short


def test_ablations_of_three_seeds_told_are_the_measured_ones():
    """By whole intervals: against vanilla, and within a row of the table."""
    text, short = map(flat, (RESULTS, README))
    systems = reported("results/quickstart")["ablations"]["arms"][""]["systems"]
    d = {s: x["difference"] for s, x in systems.items() if s != "vanilla"}
    assert all(len(x["seeds"]) == 3 for x in systems.values())

    def below(a, b):
        return records.difference(d[a]["seeds"], d[b]["seeds"])["interval_95"][1] < 0
    def vanilla(end, way):
        return {s for s, x in d.items() if way * x["interval_95"][end] > 0}
    rows = residuals, _, lambdas, layers, _, _, shared, values = [{*of.values()} for of in ABLATED.values()]
    assert vanilla(1, -1) == {"identity", "source_all", "share_v_every_2", "svformer", "svformer_anchors", *lambdas, *(
        layers - {"layers_7-8"})}
    assert vanilla(0, 1) == {"key_residual", "query_residual", "shared_key", "shared_query", *values}
    apart = {(a, b) for row in rows for a in row for b in row if below(a, b)}
    late, anchored = {"sparse", "layers_7-8"}, {"svformer", "svformer_anchors"}
    assert apart == {
        *(("identity", s) for s in residuals - {"identity"}), *((s, "source_previous") for s in (
            "identity", "source_all")),
        ("constant", "lambda_0.5"), ("constant", "lambda_5"), ("lambda_1", "lambda_0.5"), ("lambda_3", "lambda_5"),
        ("sparse", "layers_7-8"), *((s, other) for s in layers - late for other in late), ("identity_mapping", "cross_layer"),
        ("share_v_every_2", "share_k_every_2"), ("share_v_every_2", "cla2"), ("cla2", "share_k_every_2"),
        ("svformer", "svformer_anchors"), *((s, other) for s in anchored for other in shared - anchored),
        ("values_x2", "values_x6")}
    assert f"of {len(d) + sum(math.comb(len(row), 2) for row in rows)} comparisons" in text
    for said in ("Ahead of vanilla are values, the mean of V_1 to V_n, every λ1, every set of layers but 7-8, V in pairs and "
                 "SVFormer, with anchors or without;", "(undecided against 1 and 3) and V in pairs are best, as in the paper.",
                 "Layers 6-8, its best, are not, and anchors cost SVFormer a part of its lead",
                 "behind it keys, queries, layer 1's K or Q and larger",
                 "λ1 = 2 of 0.5 and 5, 1 of 0.5 and 3 of 5; every set of layers of 7-8, and every other one of 6-8, too",
                 "V in pairs of K and of both, and both of K; and SVFormer of anchors"):
        assert said in text
    assert ("With the quickstart's model at 8 layers, three seeds, values are ahead of vanilla and keys and queries behind, λ1 "
            "= 2 is ahead of 0.5 and 5, of what pairs of layers share V hurts least, and 2 V_n is behind, too;") in short
    assert "layers 6-8 are not the best: every set but 7-8 is ahead of them" in short


def test_family_table_is_the_measured_one():
    report = reported()
    table = section(README, "## On real text")
    budgets = {t: {s: d["mean"] for s, x in report["tokens"].items() for t_, d in zip(x["tokens"], x["differences"]) if t_ == t}
               for t in report["tokens"]["identity"]["tokens"]}
    assert table.count("\n| ") == 2 + len(report["family"]["systems"])
    assert RESULTS.count("\n| ") == sum(2 + len(of) for of in (
        budgets, report["sizes"]["arms"], report["rates"]["arms"], ABLATED, report["kv"]["arms"]["2048"]["systems"],
        report["lengths"]["arms"]))
    more = section(RESULTS, "## More tokens")
    for system, x in report["family"]["systems"].items():
        d, paper = x["difference"], f"{x['paper']:+.3f}" if x["paper"] else "-"
        cells = f"{records.spread(x.get('difference_halfway'))} | {records.spread(d)}"
        assert f"| {system} | {x['val_mean']:.4f} | {cells} | {len(x['seeds'])} | {paper} |" in table
        assert d is None or (1.5 < x["difference_halfway"]["mean"] / d["mean"] < 2.4) == (system != "denseformer")  # "halve"
    assert report["family"]["tokens"] == 262144000
    ends = [end(f"{where}/vanilla/seed1337", i) for where, i in (("tokens/4000", 4000), ("family", 1000))]
    small = list(budgets[262144000].values())
    assert list(report["tokens"]) == ["identity", "sparse", "svformer"]
    assert all(len(d["seeds"]) == 1 for x in report["tokens"].values() for d in x["differences"])
    for tokens, of in budgets.items():
        loss = end(f"tokens/{tokens // 65536}/vanilla/seed1337", tokens // 65536)
        cells = [f"{of[s]:+.4f}" if s in of else "-" for s in report["tokens"]]
        assert f"| {tokens / 1e9:.3f}B | {tokens / 214305319:.2f} | {loss:.4f} | {' | '.join(cells)} |" in more
    ratios = [x["difference"]["mean"] / x["paper"] for x in report["family"]["systems"].values() if x["paper"]]
    assert f"they still are {min(ratios):.1f} to {max(ratios):.1f} times the paper's" in flat(table)
    large = [report["family"]["systems"][s]["difference"]["seeds"]["1337"] for s in report["tokens"]]
    curve = of_results().curve
    trained = [curve.relative(s, 524288000)[1][0, -1] for s in report["tokens"]]
    trained_most = [curve.relative(s, 858521600)[1][0, -1] for s in report["tokens"]]
    assert report["tokens"]["svformer"]["tokens"][-1] == 858521600 and trained_most[-1] < 0  # "has not happened yet"
    second = [end(f"tokens/{i}/identity/seed1338", i) - end(f"tokens/{i}/vanilla/seed1338", i) for i in (2000, 4000)]
    sd, said = curve.noise(131072000), flat(more)
    for words, numbers in (
            ("take it from {1:.3f} to {0:.3f}", ends),
            ("from {:.3f} to {:.3f} (identity), from {:.3f} to {:.3f} (sparse) and from {:.3f} to {:.3f} (SVFormer)",
             [x for pair in zip(large, small) for x in pair]),
            ("identity, sparse and SVFormer end at {:.3f}, {:.3f} and {:.3f} after 0.524B,", trained),
            ("at {:.3f}, {:.3f} and {:.3f} after 0.859B", trained_most),
            ("Identity's second seed falls from {:.3f} to {:.3f} between the first two rows.", second),
            ("has a standard deviation of {:.3f} (after 0.131B), so that one of one seed counts from {:.2f} on",
             [sd["std"], records.reach(sd, 1)])):
        assert words.format(*numbers) in said, words
    assert all(abs(x) < records.reach(sd, 1) for t, of in budgets.items() if t > 131072000 for x in of.values())
    assert "what the later rows show is a trend, not who is ahead." in said and "SVFormer, which has not happened yet." in said
    short = README.partition("In short:\n")[2].partition("\n<!--")[0]
    ahead = {s: x for s, x in report["family"]["systems"].items() if s not in ("vanilla", "denseformer")}
    assert len(ahead) == 7 and all(x["difference"]["mean"] < (x["paper"] or 0) for x in ahead.values()) and "all seven" in short
    assert [s for s, x in ahead.items() if len(x["seeds"]) == 1] == ["constant", "neutreno"]
    assert sum(x["paper"] is not None for x in ahead.values()) == 5
    means = {s: [d["mean"] for d in x["differences"]] for s, x in report["tokens"].items()}
    assert all(m == sorted(m) and max(m[:3]) < 0 for m in means.values())  # "shrinks"
    assert [s for s, m in means.items() if m[-1] > 0] == ["svformer"]  # "gone"
    assert max(means, key=lambda s: means[s][-1] - means[s][0]) == "svformer"  # "most"


def test_speeds_of_the_first_runs_are_the_logged_ones():
    with open(os.path.join(REPO, "results", "README.md"), encoding="utf-8") as f:
        text = flat(f.read())
    steps = [train.read_log(os.path.join(REPO, "results", "first-run", name))[0]
             for name in ("resformer", "ddp2", "ddp4", "fp16")]
    speeds = [f"{statistics.median(s['tokens_per_s'] for s in of.values()):,.0f}" for of in steps]
    assert "{} tokens/s of ResFormer on one GPU, {} on two, {} on four, and {} in float16".format(*speeds) in text


def measured(name):
    with open(os.path.join(REPO, "results", "bench", name), encoding="utf-8") as f:
        return json.load(f)


MEASURED = measured("nvidia-h100-80gb-hbm3.json")
SYSTEMS = re.search(r"`python -m analysis.bench (config/82M.py config/systems.py[^`]*)`", README)[1]


def test_performance_blocks_are_the_measured_ones():
    """docs/performance.md holds every table of results/bench but README's and the earlier ones, a block for each card."""
    ours = subprocess.run(["git", "ls-files", "results/bench/nvidia*.json"], cwd=REPO, capture_output=True, text=True).stdout
    cards = [os.path.basename(path) for path in ours.split()]  # a user's own are not in the repository
    cards = cards or [name for name in os.listdir(os.path.join(REPO, "results", "bench")) if name.startswith("nvidia")]
    want = {"\n\n".join("\n".join([f"$ python -m analysis.bench {k}", *(bench.line(n, r) for n, r in v["rows"].items())])
                        for k, v in measured(name).items() if k != SYSTEMS) for name in cards}
    assert len(want) == len(cards) and want == {block.strip() for block in PERFORMANCE.split("```")[1::2]}
    for size in ("82M", "468M"):
        ratios = []
        for name in ("nvidia-h200", "earlier/nvidia-h200-decoding-second", "earlier/nvidia-h200-decoding"):
            table = next(t for k, t in measured(f"{name}.json").items() if k.startswith(f"config/{size}.py --decode"))
            peer, ours = [row["tokens_per_s"] for row in table["rows"].values()][:2]
            ratios.append(f"{ours / peer:.2f}")
        assert "{}, {} and {} × ".format(*ratios) in flat(PERFORMANCE)
    decoding = measured("cpu.json")["config/82M.py --decode=1000 --device=cpu"]["rows"]
    cached, uncached = (r["tokens_per_s"] for r in decoding.values())
    assert f"{cached:.1f} against {uncached:.2f} tokens/s" in PERFORMANCE and f"{cached / uncached:.0f} times" in PERFORMANCE


def test_ratios_are_those_of_the_blocks():
    """A column for each card, from the table of its kind: the plain variant and nanoGPT at both sizes, and the mixing."""
    cards = [measured(f"{name}.json") for name in ("nvidia-h200", "earlier/nvidia-h200", "earlier/nvidia-h200-second",
                                                   "earlier/nvidia-h200-third", "nvidia-h100-80gb-hbm3")]

    def rows(card, start, word):
        return next((t["rows"] for command, t in card.items() if command.startswith(start) and word in command), {})

    def ratio(t, key, other):
        return f"{t['ours'][key] / t[other][key]:.2f} ×" if other in t else "-"
    for size in ("82M", "468M"):
        tables = [rows(card, f"config/{size}.py --", "--nanogpt") for card in cards]
        for what, key, other in (("tokens/s of the plain variant's", "tokens_per_s", "ours, plain"),
                                 ("MFU of nanoGPT's", "mfu", "nanoGPT")):
            assert f"| {size}: {what} | " + " | ".join(ratio(t, key, other) for t in tables) + " |" in PERFORMANCE
    tables = [rows(card, "config/82M.py config/systems.py", "") for card in cards]
    for system in ("identity", "learnable", "plus", "svformer"):
        assert f"| {system}: step time over vanilla's | " + " | ".join(
            f"{(t[system]['step_ratio'] - 1) * 100:+.1f} %" if t else "-" for t in tables) in PERFORMANCE
    best = [next(iter(rows(cards[0], f"config/{size}.py --plain", "").values())) for size in ("82M", "468M")]
    assert f"({best[0]['tokens_per_s'] / 1e6:.2f}M and {best[1]['mfu'] * 100:.1f} %)" in PERFORMANCE
    full = rows(cards[-1], "config/82M.py --plain", "")["ours"]["mfu"]
    kept = [rows(cards[-1], f"config/82M.py --block_size={n} ", "")["ours"]["mfu"] / full for n in (8192, 32000, 64000)]
    assert "82M keeps {:.0f}, {:.0f} and {:.0f} % of the H100's MFU".format(*(x * 100 for x in kept)) in PERFORMANCE


def test_fast_and_plain_losses_are_the_logged_ones():
    names = "fast", "earlier_fast", "plain", "earlier_plain", "plain16"
    logs = {name: train.read_log(os.path.join(REPO, "results", "fast", name))[0] for name in names}
    losses = {name: [steps[i]["loss"] for i in range(200)] for name, steps in logs.items()}
    ends = {name: statistics.fmean(x[-50:]) for name, x in losses.items()}
    text = flat(PERFORMANCE)
    assert "the last 50 is {fast:.3f} and {earlier_fast:.3f} in two runs of the fast paths".format(**ends) in text
    assert "{plain:.3f} and {earlier_plain:.3f} in two of the plain ones, and {plain16:.3f} in one".format(**ends) in text
    plain = statistics.fmean([ends["plain"], ends["earlier_plain"]])
    assert [round(ends[name] - plain, 3) for name in names[:2]] == [-0.016, 0.012]  # "0.015 on either side"

    def most(a, b):
        return max(abs(x - y) for x, y in zip(losses[a], losses[b]))
    assert "within {:.3f} and {:.3f} of its plain one, and the two plain ones within {:.3f}.".format(
        most("fast", "plain"), most("earlier_fast", "earlier_plain"), most("plain", "earlier_plain")) in text


def test_preparing_is_the_measured_one():
    rows = list(measured("cpu.json")["--shards=PATH --num_proc=2"]["rows"].values())
    whole, bare = ([r["seconds"] for r in rows[i::2]] for i in (0, 1))
    text = flat(PERFORMANCE)
    assert "{:.1f}, {:.1f} and {:.1f} s against {:.1f}, {:.1f} and {:.1f}.".format(*whole, *bare) in text
    assert "has {:.0f}, {:.0f} and {:.0f} % of their speed, {:.0f} % in all".format(
        *(b / w * 100 for w, b in zip(whole, bare)), sum(bare) / sum(whole) * 100) in text
    more = [(w["cpu_seconds"] / b["cpu_seconds"] - 1) * 100 for w, b in zip(rows[::2], rows[1::2])]
    assert f"{min(more):.0f} to {max(more):.0f} % more CPU time" in text


@pytest.mark.parametrize("size, batch, words, first", [
    ("82M", "paper", "the paper's batch", 10), ("82M", "one", "one micro-step", 10),
    ("468M", "quarter", "a quarter of the paper's batch", 4), ("468M", "one", "one micro-step", 4)])
def test_speed_on_several_gpus_is_the_measured_one(size, batch, words, first):
    """Medians of the logs' tokens/s, after the iterations with the warm-up: 82M logged every tenth, 468M every one."""
    row = next(line for line in PERFORMANCE.splitlines() if line.startswith(f"| {size}, {words}"))
    speeds = []
    for n in (1, 2, 4) if size == "82M" else (1, 2):
        steps, _ = train.read_log(os.path.join(REPO, "results", "ddp", f"{size}_{n}_{batch}"))
        speeds.append(statistics.median(s["tokens_per_s"] for i, s in steps.items() if i >= first))
        share = "" if n == 1 else f" ({speeds[-1] / speeds[0] / n:.1%})".replace("%", " %")
        assert f"| {speeds[-1]:,.0f}{share} |" in row


def test_speed_and_waiting_of_whole_runs_are_the_logged_ones():
    line = re.search(r"^\* Whole training runs(.|\n  )*", PERFORMANCE, flags=re.M)[0]
    speeds = []
    for system in ("vanilla", "identity", "svformer"):
        steps, _ = train.read_log(os.path.join(REPO, "results", "family", system, "seed1339"))
        speeds.append(statistics.median(s["tokens_per_s"] for s in steps.values()))
    assert [int(x.replace(",", "")) for x in re.findall(r"\d,\d{3},\d{3}", line)] == [round(s) for s in speeds]
    logs = [log for folder in ("family", "tokens", "ablations", "rates")
            for log in glob.glob(os.path.join(REPO, "results", folder, "**", "log.jsonl"), recursive=True)]
    waits = [s["data_wait"] for log in logs for i, s in train.read_log(os.path.dirname(log))[0].items() if i >= 10]
    *_, most, once, twice = sorted(set(waits))
    assert waits.count(once) == waits.count(twice) == 10
    words = (f"waited for {most:.2%} of the time at most,", f"but twice: {once:.2%} of ten iterations",
             f"and {twice:.2%} of ten of")
    assert all(w.replace("%", " %") in flat(line) for w in words)


def test_systems_table_is_the_measured_one():
    """Parameters, cache and step time of every system of config/systems.py, as analysis.bench wrote them."""
    measured = {n: r for n, r in MEASURED[SYSTEMS]["rows"].items() if not n.endswith(", again")}
    config = configure(train.Config, [os.path.join(REPO, "config", "systems.py")])
    assert set(measured) == set(config.runs)

    def extra(r):
        more = r["n_params"] - measured["vanilla"]["n_params"]
        return f"| {more:+,} |" if more else "| 0 |"
    for name, r in measured.items():
        row = re.search(rf"^\| {name} \|.*$", README.split("## Every system")[1], flags=re.M)[0]
        shape = {**config.runs[name], "vocab_size": 50304}
        shape = {k: v for k, v in shape.items() if k not in ("batch_size", "eval_iters")}
        with torch.device("meta"):
            model = GPT(GPTConfig(**shape))
        assert model.num_params() == r["n_params"] and extra(r) in row
        assert f"| {KVCache(GPTConfig(**shape), 1, 1, 'meta', torch.bfloat16).nbytes:,} |" in row
        options = {k: v for k, v in config.runs[name].items() if k not in ("batch_size", "eval_iters")}
        told = " ".join(k if v is True else f"{k}={v}" for k, v in options.items())
        assert row.split("|")[2].strip().strip("`") == told
        assert name == "vanilla" or f"| {(r['step_ratio'] - 1) * 100:+.1f} % |" in row


def test_sinks_and_drains_are_the_measured_ones():
    words, short = flat(section(README, "## See the mechanism")), flat(README)

    def analysed(folder, name):
        with open(os.path.join(REPO, "results/mechanism", folder, f"{name}.json"), encoding="utf-8") as f:
            return json.load(f)

    def by_system(models):
        return {run.split("/")[0] + run.partition(" ")[2]: of for run, of in models.items()}
    extremes = {}  # {folder: {system: (sink, drain, peak)}}
    for folder in ("8000", "4000", "4000/seed1338", ".", "seed1339"):
        content = analysed(folder, "concentration")
        assert all(of["sequences"] == 32 for of in content["models"].values())
        extremes[folder] = {s: tuple(
            pick(x[key] / (x[whole] if whole in x else content[whole]) for x in of["layers"]) for pick, key, whole in (
                (max, "first_importance", "uniform_first_importance"), (min, "first_value_norm", "others_value_norm"),
                (max, "first_hidden_norm", "mean_hidden_norm"))) for s, of in by_system(content["models"]).items()}
    long, *few, first, second = (of["vanilla"] for of in extremes.values())
    assert ("{:.1f} times as much attention as if it were uniform, keeps {:.2f} of the others' value norm and swells the "
            "residual stream to {:.1f} times the mean, each in the layer where it is most extreme (after 0.26B in 4,000, two "
            "seeds: {:.1f} and {:.1f}, {:.2f} and {:.2f}, {:.1f} and {:.1f}): all three grow with training, and are weak after "
            "the same 0.26B in 1,000 ({:.1f} and {:.1f}, {:.2f} and {:.2f}, {:.1f} and {:.1f}).").format(
                *long, *(x for of in (few, (first, second)) for pair in zip(*of) for x in pair)) in words
    for less in (first, second):
        for more in few:
            assert less[0] < more[0] < long[0] and less[1] > more[1] > long[1] and less[2] < more[2] < long[2]  # "grow"
    rest = [{s: x for s, x in extremes[folder].items() if s != "vanilla"} for folder in ("8000", "4000", "4000/seed1338")]
    assert [len(of) for of in rest] == [3, 3, 1] and all(x[0] < 1.05 for of in rest[:2] for x in of.values())
    assert all(x[1] > 0.9 for of in rest for x in of.values())
    sinks, drains, peaks = zip(*(x for of in rest for x in of.values()))
    assert (f"no such sink or drain (at most {max(sinks):.1f}, at least {min(drains):.2f}), and its peak is {min(peaks):.1f} "
            f"to {max(peaks):.1f}.") in words
    assert min(long[0], *(x[0] for x in few)) > 3 and max(long[1], *(x[1] for x in few)) < 0.5
    assert sorted(round(x[2]) for x in (long, *few)) == [4, 4, 6]
    assert ("* After 0.26B in 4,000 iterations, two seeds, and after 0.52B, one seed, vanilla's token 1 draws over three times "
            "the attention of a uniform one, keeps under half of the others' value norm and peaks at four to six times the "
            f"mean. Identity's, sparse's and SVFormer's (the last two by one seed) do not: {max(sinks):.1f} times at most, "
            f"over 0.9, peaks of {min(peaks):.1f} to {max(peaks):.1f}.") in short
    assert all(extremes[folder]["sparse"][2] > extremes[folder]["vanilla"][2] for folder in (".", "seed1339"))
    assert "and after 1,000 iterations sparse's peak was higher than vanilla's." in words
    entropy = {s: statistics.fmean(x["entropy_ratio"] for x in of["layers"])
               for s, of in by_system(analysed("8000", "concentration")["models"]).items()}
    assert len(entropy) == 4 and max(entropy.values()) - entropy["vanilla"] < 0.006
    low, high = min(entropy.values()), max(entropy.values())
    assert (f"Attention as a whole is hardly flatter for it: its entropy is {low:.2f} to {high:.2f} times that of uniform "
            "attention in all four.") in words
    alike = {s: statistics.fmean(of["similarity"][1:]) for s, of in by_system(analysed("8000", "similarity")["models"]).items()}
    three = "identity", "sparse", "svformer"
    assert "cosine of {:.2f} to {:.2f} against {:.2f} (before training {:.2f}, {:.2f} and {:.2f} against {:.2f}, so".format(
        min(alike[s] for s in three), max(alike[s] for s in three), alike["vanilla"],
        *(alike[f"{s}(random)"] for s in (*three, "vanilla"))) in words
    assert [s for s in (*three, "vanilla") if alike[s] > alike[f"{s}(random)"]] == ["svformer"]  # "have become more alike"
    mapped = [sum(a > b for a, b in zip(of["approximation"], of["identity"]))
              for folder in ("8000", "4000", "4000/seed1338", "seed1339")
              for of in analysed(folder, "mapping")["models"].values()]
    assert len(mapped) == 4 and {*mapped} == {3, 4}
    assert "identity mapping in every layer: it is in 3 or 4 of 7, of each of four vanillas." in short


def test_copied_runs_are_equal():
    """Where the options of two lists are equal, one folder's runs are the other's."""
    four = ["identity", "sparse", "svformer", "vanilla"]
    for copies, of, systems, seeds in (("tokens/2000", "ablations", four, 3), ("rates/6e-4", "ablations", four, 3),
                                       ("kv/2048", "ablations", ["cla2", "svformer", "vanilla"], 1),
                                       ("sizes/82M", "ablations", ["identity", "sparse", "vanilla"], 1),
                                       ("lengths/2048", "ablations", ["identity", "svformer", "vanilla"], 3),
                                       ("kv/8192", "lengths/8192", ["svformer", "vanilla"], 1)):
        copies, originals = (os.path.join(REPO, "results", folder) for folder in (copies, of))
        for path in (path for s in systems for path in glob.glob(os.path.join(copies, s, "*/*"))):
            with open(path, "rb") as one, open(os.path.join(originals, os.path.relpath(path, copies)), "rb") as other:
                assert one.read() == other.read(), path
        assert sorted(s for s in os.listdir(copies) if os.path.exists(os.path.join(originals, s))) == systems
        for mine, theirs in ([sorted(os.listdir(os.path.join(of, s))) for of in (copies, originals)] for s in systems):
            assert mine == theirs[:seeds]
