"""analysis.report on synthetic records with known differences, and on the committed results."""
import json
import math
import os
import re
import shutil
import statistics

import numpy as np
import pytest
from test_curve_analyses import run_command

from analysis import claims, records, report
from configurator import REPO, UserError

COMMITTED = os.path.join(REPO, "results")
CONFIG = json.load(open(os.path.join(COMMITTED, "family/vanilla/seed1337/config.json"), encoding="utf-8"))
PER_ITER = 1000
SOURCES = "C4", "Github", "Wikipedia"
NOISE = {1337: 0.0, 1338: 0.002, 1339: -0.001}  # of a variant's difference, by seed


def write_run(folder, seed, iters, final, cache=16384, wikipedia=0.0, training=lambda i: 0.0, **settings):
    """
    A run's record that ends at the loss `final`, and at Wikipedia beside it; its training loss comes down to that plus
    training(iteration).
    """
    config = {**CONFIG, "seed": seed, "max_iters": iters, "lr_decay_iters": iters, "tokens_per_iter": PER_ITER, "rel_window": 3,
              "kv_bytes_per_token": cache, "out_dir": str(folder), "baseline": "", **settings}
    config["comparable"] = {k: v if k == "data" else config.get(k, v) for k, v in CONFIG["comparable"].items()}
    lines = [{"iter": i, "loss": final + 5 / (i + 1) + training(i), "lr": 1e-3, "tokens": PER_ITER * (i + 1)}
             for i in range(iters)]
    val = {s: final + wikipedia * (s == "Wikipedia") for s in SOURCES}
    lines.append({"iter": iters, "val_loss": final + 0.5, "val": val, "val_mean": statistics.fmean(val.values())})
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "log.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))


def vanilla_loss(tokens):
    return 4 - 0.3 * math.log(tokens / 1e4)


def write_family(root, deltas, seeds=(1337, 1338, 1339), iters=20):
    for seed in seeds:
        base = vanilla_loss(iters * PER_ITER) + 0.01 * (seed - 1337)  # shared by a pair, so it cancels
        for system, delta in {"vanilla": 0.0, **deltas}.items():
            noise = NOISE[seed] if system != "vanilla" else 0.0
            write_run(root / "family" / system / f"seed{seed}", seed, iters, base + delta + noise,
                      cache=9216 if system == "svformer" else 16384, wikipedia=-0.03 if system == "identity" else 0.0)


def write_tokens(root, law, budgets=(10, 40, 66)):
    """tokens/ runs of vanilla and, for each system, of a difference law(tokens)."""
    for iters in budgets:
        for system, at in {"vanilla": lambda t: 0.0, **law}.items():
            tokens = iters * PER_ITER
            write_run(root / "tokens" / str(iters) / system / "seed1337", 1337, iters, vanilla_loss(tokens) + at(tokens))


@pytest.fixture
def make(tmp_path, capsys, monkeypatch):
    """
    make(root) runs the report: (report.json's content, report.md, README's text, stderr). Pictures are stubs, as drawing takes
    most of its time; make.draw draws.
    """
    readme = tmp_path / "README.md"

    def run(root=tmp_path / "results", *options):
        readme.write_text(f"before\n{report.START}\nearlier words\n{report.END}\nafter\n")
        code, _, err = run_command(report, capsys, monkeypatch, root, f"--readme={readme}", *options)
        assert code == 0, err
        return json.loads((root / "report.json").read_text()), (root / "report.md").read_text(), readme.read_text(), err
    run.root, run.draw = tmp_path / "results", report.plot.draw
    monkeypatch.setattr(report.plot, "draw", lambda path, *_: open(path, "wb").close())
    return run


def verdicts(content):
    return {c["claim"]: c["verdict"] for c in content["claims"]}


def test_family_table_and_intervals(make, monkeypatch):
    monkeypatch.setattr(report.plot, "draw", make.draw)
    write_family(make.root, {"identity": -0.03, "sparse": -0.001, "svformer": 0.02})
    content, text, readme, _ = make()
    family = content["family"]["systems"]
    assert content["family"]["tokens"] == 20 * PER_ITER and list(family) == ["vanilla", "identity", "sparse", "svformer"]
    pairs = [-0.04 + n for n in NOISE.values()]  # -0.03 everywhere and 0.03 more at one of three sources
    d = family["identity"]["difference"]
    mean, half = np.mean(pairs), 4.3027 * np.std(pairs, ddof=1) / math.sqrt(3)  # Student's t, two degrees of freedom
    assert d["mean"] == pytest.approx(mean, abs=1e-6) and list(d["seeds"]) == ["1337", "1338", "1339"]
    assert d["interval_95"] == pytest.approx([mean - half, mean + half], abs=1e-6)
    base = vanilla_loss(20 * PER_ITER)
    assert family["vanilla"]["val_mean"] == pytest.approx(base + 0.01, abs=1e-5)
    assert family["vanilla"]["val_loss"] == pytest.approx(base + 0.51, abs=1e-5)
    assert family["identity"]["difference_by_source"]["Wikipedia"]["mean"] == pytest.approx(np.mean(pairs) - 0.02, abs=1e-6)
    noise = content["family"]["noise"]
    assert noise == {"std": pytest.approx(np.std(list(NOISE.values()), ddof=1), abs=1e-6), "df": 2}
    assert f"| {mean:+.4f} [{mean - half:+.4f}, {mean + half:+.4f}] | 3 | -0.027 |" in text
    assert "device cuda, bfloat16, torch 2.11.0+cu130" in text and "![Every system at one budget](report_family.png)" in text
    assert (make.root / "report_family.png").read_bytes().startswith(b"\x89PNG")
    got = verdicts(content)
    assert got["identity is below vanilla"] == "holds"
    assert got["sparse is below vanilla"] == "not testable at this budget"  # -0.001 is within the noise
    assert got["plus is below vanilla"] == "not testable at this budget"
    assert got["vanilla overtakes SVFormer later on"] == "holds"
    assert got["identity's gain is largest at Wikipedia"] == "holds" == got["SVFormer nearly halves the KV cache"]
    interval = f"[{mean - half:+.4f}, {mean + half:+.4f}]"
    assert f"| {mean:+.4f} {interval}, 0.02M tokens in 20 iterations, 3 seeds | holds |" in readme
    counts = [sum(v == word for v in got.values()) for word in claims.VERDICTS]
    assert "{} claims: holds {}, holds partly {}, not seen {}, not testable at this budget {}.\n".format(
        sum(counts), *counts) in readme and sum(counts) == len(got)
    assert readme.startswith("before\n") and readme.endswith(report.END + "\nafter\n") and "earlier" not in readme
    assert text.count("| identity is below vanilla |") == readme.count("| identity is below vanilla |") == 1
    assert make()[:3] == (content, text, readme)  # again, to the byte


def test_one_seed_and_the_wrong_sign(make):
    write_family(make.root, {"identity": -0.03, "constant": 0.01, "svformer": -0.02}, seeds=(1337,))
    content, text, _, _ = make()
    got = verdicts(content)
    assert content["family"]["systems"]["identity"]["difference"]["interval_95"] is None and content["family"]["noise"] is None
    assert got["identity is below vanilla"] == got["constant is below vanilla"] == "not testable at this budget"
    assert got["vanilla overtakes SVFormer later on"] == "not testable at this budget"  # it may come later
    assert "noise between seeds is not known" in text


def test_systems_of_fewer_seeds_do_not_narrow_the_noise():
    """They repeat one contrast, the baseline's own: pooled with the others they halve the noise that decides every verdict."""
    three = {"mean": 0.0, "seeds": {"1337": -0.02, "1338": 0.0, "1339": 0.02}}
    two = [{"mean": 0.0, "seeds": {"1337": x, "1338": x + 0.001}} for x in (-0.1, -0.2, -0.3)]
    alone = records.noise([three])
    assert alone == {"std": pytest.approx(0.02), "df": 2} and records.noise([*two, three, None]) == alone
    assert records.noise(two) == {"std": pytest.approx(0.001 / math.sqrt(2)), "df": 1}


def test_order_of_variants(make):
    write_family(make.root, {"identity": -0.01, "learnable": -0.03, "constant": -0.04, "sparse": -0.06, "plus": -0.08,
                             "neutreno": 0.01, "denseformer": -0.05})
    content, text, _, _ = make()
    got = verdicts(content)
    # every pair of one seed has the same noise, so the differences between variants are exact
    assert got["the order: plus < sparse < constant, learnable < identity"] == "holds"
    assert got["identity is below DenseFormer and NeuTRENO"] == "holds partly"
    assert re.search(r"\| identity - denseformer: \S+ \[\S+ \S+\]; identity - neutreno: \S+ \[\S+ \S+\], "
                     r"0.02M tokens in 20 iterations, 3 seeds \|", text)
    for seed in (1338, 1339):
        shutil.rmtree(make.root / f"family/neutreno/seed{seed}")
    assert re.search(r"\| identity - denseformer: \S+ \[\S+ \S+\], 3 seeds; identity - neutreno: \S+, 1 seed, "
                     r"0.02M tokens in 20 iterations \|", make()[1])


def test_extrapolation_over_tokens(make):
    a, b = 0.5, 0.25
    wobble = {10: 1.02, 20: 0.99, 40: 0.98, 66: 1.01}

    def law(tokens):
        return -a * tokens ** -b * wobble[tokens // PER_ITER]
    write_family(make.root, {"identity": law(20 * PER_ITER) + 0.01}, seeds=(1337,))  # Wikipedia's -0.03 is -0.01 of the mean
    write_tokens(make.root, {"identity": law, "sparse": lambda t: -0.1 if t < 50_000 else 0.1, "svformer": law})
    content, text, _, _ = make()
    facts = content["tokens"]["identity"]
    assert facts["tokens"] == [10_000, 20_000, 40_000, 66_000]
    x, y = np.log(facts["tokens"]), np.log([-law(t) for t in facts["tokens"]])
    design = np.stack([np.ones(4), x], 1)  # by the textbook's matrices
    theta = np.linalg.solve(design.T @ design, design.T @ y)
    s2 = ((y - design @ theta) ** 2).sum() / 2
    row = np.array([1, math.log(20e9)])
    half = 4.3027 * math.sqrt(s2 * (1 + row @ np.linalg.inv(design.T @ design) @ row))
    assert facts["at_20B"]["mean"] == pytest.approx(-math.exp(row @ theta), rel=1e-4)
    assert facts["at_20B"]["low"] == pytest.approx(-math.exp(row @ theta + half), rel=1e-3)
    assert facts["at_20B"]["high"] == pytest.approx(-math.exp(row @ theta - half), rel=1e-3)
    assert facts["fit"]["b"] == pytest.approx(-theta[1], rel=1e-4)
    half_b = 4.3027 * math.sqrt(s2 * np.linalg.inv(design.T @ design)[1, 1])
    assert facts["fit"]["b_interval_95"] == pytest.approx([-theta[1] - half_b, -theta[1] + half_b], rel=1e-3)
    assert content["tokens"]["sparse"]["fit"] is None and "the sign changes" in text
    assert content["tokens"]["svformer"]["fit"] is None and "| -: no D^-b: in the paper vanilla overtakes it |" in text
    assert "extrapolation far outside of the data" in text
    got = verdicts(content)
    assert got["identity is below vanilla at every number of tokens"] == "not testable at this budget"  # one seed
    assert f"changes as D^{theta[1]:.2f} [{theta[1] - half_b:.2f}, {theta[1] + half_b:.2f}]" in text
    assert got["identity's difference at 20B tokens"] == "not testable at this budget"


def test_an_interval_wider_than_all_that_was_measured_is_not_shown(make):
    """Four budgets near one line give an interval that says something; far from one, it is named and the fit is not drawn."""
    write_family(make.root, {}, seeds=(1337,))
    for wobble, useful in ((0.001, True), (0.3, False)):
        write_tokens(make.root, {"identity": lambda t, w=wobble: -0.5 * t ** -0.25 * (1 + w * (-1) ** (t // PER_ITER // 10))},
                     budgets=(10, 20, 30, 60))
        content, text, _, _ = make()
        far = content["tokens"]["identity"]["at_20B"]
        row = re.search(r"\| identity \| 20B, extrapolated \| (.*?) \|", text)[1]
        claim = re.search(r"\| identity's difference at 20B tokens \| -0.027 \| (.*?) \|", text)[1]
        assert far["vague"] != useful and row.startswith(f"{far['mean']:+.4f}") and claim.startswith(row)
        assert ("[" in row) == useful == ("no useful interval" not in row) == ("of no use" not in text)
        shutil.rmtree(make.root / "tokens")


def test_a_budget_without_vanilla_is_named(make):
    """Its finished runs are in no difference; so they are where vanilla's run is cut off."""
    write_family(make.root, {"identity": -0.03}, seeds=(1337,))
    write_tokens(make.root, {"identity": lambda t: -0.05, "svformer": lambda t: -0.05})
    log = make.root / "tokens/66/vanilla/seed1337/log.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    named = {line.split(": ")[0]: line for line in make()[0]["left_out"]}
    assert "not finished" in named["tokens/66/vanilla/seed1337"]
    for system in ("identity", "svformer"):
        assert "in no difference: there is no vanilla of as many tokens" in named[f"tokens/66/{system}/seed1337"]


def test_a_second_seed_of_a_large_budget_makes_no_interval_wider(make):
    """Three seeds of the usual budget know more of the noise than two of another, whose own counts from three on."""
    write_tokens(make.root, {"identity": lambda t: -0.05})
    for seed in (1338, 1339):
        for system, loss in (("vanilla", 0.0), ("identity", -0.05 + NOISE[seed])):
            write_run(make.root / f"tokens/10/{system}/seed{seed}", seed, 10, vanilla_loss(10 * PER_ITER) + loss)
    pool = records.Records(str(make.root)).curve
    usual = pool.noise(10 * PER_ITER)
    assert usual["df"] == 2 and pool.noise(66 * PER_ITER) == usual
    for n, seed in enumerate((1338, 1339), 1):
        for system, loss in (("vanilla", 0.0), ("identity", -0.05 + 3 * NOISE[seed])):
            write_run(make.root / f"tokens/66/{system}/seed{seed}", seed, 66, vanilla_loss(66 * PER_ITER) + loss)
        found = records.Records(str(make.root)).curve.noise(66 * PER_ITER)
        assert found["df"] == 2 and found["std"] == pytest.approx(usual["std"] * (3 if n == 2 else 1))


def test_power_law_of_few_points():
    three = [1e8, 1e9, 1e10]
    fit, at = report.power_law(three, [0.02, 0.01, 0.005])
    assert [fit["b"], *fit["b_interval_95"]] == pytest.approx([math.log10(2)] * 3)
    assert at(1e11) == pytest.approx((0.0025,) * 3)
    b = 0.1  # the noise between seeds takes the first point and the last a tenth up or down
    noisy, far = report.power_law(three, [0.02, 0.01, 0.005], [0.02 * b, 0.0, 0.005 * b])
    slope = b * math.sqrt(2) / (2 * math.log(10))  # of (1, 0, -1) / (2 ln 10) times b at both ends
    assert noisy["b_interval_95"] == pytest.approx([math.log10(2) - slope, math.log10(2) + slope])
    wide = b * math.hypot(1 / 3 - 1, 1 / 3 + 1)  # at 1e11 the ends weigh 1/3 -+ 1
    assert far(1e11) == pytest.approx((0.0025, 0.0025 * math.exp(-wide), 0.0025 * math.exp(wide)))
    assert report.power_law(three[:2], [0.02, 0.01]) is None  # any two points lie on such a curve
    assert report.power_law(three, [-0.02, -0.01, 0.02]) is None and report.power_law(three, [-0.02, -0.01, 0.0]) is None


def test_two_budgets_are_not_extrapolated(make):
    write_family(make.root, {"identity": -0.03})
    write_tokens(make.root, {"identity": lambda tokens: -0.05}, budgets=(10,))
    content, text, readme, _ = make()
    facts = content["tokens"]["identity"]
    assert facts["fit"] is facts["at_20B"] is None and [d["mean"] < 0 for d in facts["differences"]] == [True, True]
    assert "| identity | 20B, extrapolated | -: two budgets | - | -0.027 |" in text
    for where in (text, readme):  # claims that nothing was measured for have no row
        assert "by extrapolation" not in where and "| plus is below vanilla |" not in where
        missing = re.search("Not measured here: (.*)\\.\n", where)[1].split("; ")
        assert {"plus is below vanilla", "identity's difference at 20B tokens"} <= set(missing) <= set(verdicts(content))


def test_budgets_of_another_batch_than_familys_are_a_curve_of_their_own(make):
    """Else a curve would bend where the batch changes. A run of yet another batch is named."""
    less = 0.3 * math.log(0.8)
    write_family(make.root, {"identity": -1.0, "svformer": -1.0})
    for iters in (20, 40, 80):
        loss = vanilla_loss(iters * PER_ITER / 2)
        for system, delta in (("vanilla", 0.0), ("identity", less), ("svformer", 0.01 * iters)):
            write_run(make.root / "tokens" / str(iters) / system / "seed1337", 1337, iters, loss + delta,
                      tokens_per_iter=PER_ITER // 2)
    write_run(make.root / "tokens/5/identity/seed1337", 1337, 5, 9.0, tokens_per_iter=4 * PER_ITER)
    content, text, _, err = make()
    assert content["family"]["systems"]["identity"]["difference"]["mean"] == pytest.approx(-1.01, abs=1e-3)
    facts = content["tokens"]["identity"]
    assert facts["tokens"] == [10_000, 20_000, 40_000]
    assert [d["mean"] for d in facts["differences"]] == pytest.approx([less] * 3)
    assert [b["saving"] for b in content["saving"]["identity"]["budgets"]] == pytest.approx([0.2] * 3, abs=1e-4)
    assert text.count("Made from tokens/: 9 runs") == text.count("Made from tokens/: 9 runs, seeds 1337;") == 2
    assert err.count("left out: tokens/5/identity/seed1337: 4,000 tokens_per_iter, most runs of tokens/ have 500") == 1
    claim = next(c for c in content["claims"] if c["claim"] == "vanilla overtakes SVFormer later on")
    # the longest run, not family's
    assert claim["here"].startswith("final difference +0.8000, 0.04M tokens in 80 iterations, 1 seed")
    assert claim["verdict"] == "holds partly"  # by family's noise


def test_data_saving(make):
    """identity(D) = vanilla(D / 0.8): 20 % less data, wherever that lies between budgets (vanilla is a line in ln D)."""
    less = 0.3 * math.log(0.8)
    write_family(make.root, {"identity": less + 0.01, "sparse": 0.0})
    write_tokens(make.root, {"identity": lambda t: less})
    content, text, _, _ = make()
    facts = content["saving"]["identity"]
    assert facts["seeds"] == [1337] and [b["tokens"] for b in facts["budgets"]] == [10_000, 20_000, 40_000, 66_000]
    assert [b["saving"] for b in facts["budgets"]] == pytest.approx([0.2] * 4, abs=1e-4)
    assert [b["extrapolated"] for b in facts["budgets"]] == [True, False, False, False] and "20.0%*" in text
    own = np.array([0.01 * (seed - 1337) for seed in NOISE]), np.array([0.01 * (seed - 1337) + NOISE[seed] for seed in NOISE])
    sd = math.sqrt((np.var(own[0], ddof=1) + 2 * np.var(own[1], ddof=1)) / 3)  # of losses of vanilla, identity and sparse
    half = 4.30265 * sd * math.sqrt(2)  # of two runs; Student's t, the two degrees of freedom of one system
    assert facts["budgets"][-1]["interval_95"] == pytest.approx(
        [1 - 0.8 * math.exp(half / 0.3), 1 - 0.8 * math.exp(-half / 0.3)], abs=1e-3)
    assert facts["budgets"][0]["interval_95"] is None
    got = verdicts(content)
    claim = "ResFormer (identity) reaches vanilla's loss with less data"
    assert got[claim] == "holds partly" and "; 4 budgets up to 0.066M tokens in 66 iterations, 1 seed |" in text
    for at in ("family", "tokens/40", "tokens/66", "tokens/10"):  # with a second seed
        for system in ("vanilla", "identity"):
            if at != "family":
                shutil.copytree(make.root / at / system / "seed1337", make.root / at / system / "seed1338")
                file = make.root / at / system / "seed1338/config.json"
                file.write_text(file.read_text().replace("1337", "1338"))
    content, text, _, _ = make()
    assert content["saving"]["identity"]["seeds"] == [1337, 1338] and verdicts(content)[claim] == "holds"
    assert got["ResFormer (sparse) reaches vanilla's loss with less data"] == "not testable at this budget"


def test_a_saving_beyond_the_budgets_is_marked():
    """Losses fall by 1 with every doubling; vanilla's at 4 is 1.5, within a half or within 0.6 of them."""
    inside, outside = (report.horizontal([1, 2, 4], [3.0, 2.0, 1.0], 4, 1.5, half) for half in (0.5, 0.6))
    assert inside["saving"] == outside["saving"] == pytest.approx(1 - 2 ** -0.5)
    assert inside["interval_95"] == pytest.approx([0.0, 0.5]) and inside["interval_outside"] is None
    assert outside["interval_95"] is None and outside["interval_outside"] == pytest.approx([1 - 2 ** 0.1, 1 - 2 ** -1.1])
    assert [records.saving_interval(x) for x in (inside, outside)] == [" [0.0%, 50.0%]", " [-7.2%, 53.3%]*"]
    assert records.saving_interval(report.horizontal([1, 2, 4], [3.0, 2.0, 1.0], 4, 1.5, None)) == ""


def test_what_cannot_be_used_is_named(make):
    write_family(make.root, {"identity": -0.03, "sparse": -0.05, "plus": -0.06, "learnable": -0.04, "constant": -0.04})
    family = make.root / "family"
    log = family / "sparse/seed1337/log.jsonl"
    log.write_text("\n".join(log.read_text().splitlines()[:12]) + "\n")  # no evaluation at the end
    (family / "plus/seed1338/log.jsonl").write_text("{damaged\n")
    (family / "plus/seed1339/config.json").write_text("{")
    for name, change in (("identity/seed1339", {"kv_bytes_per_token": None}), ("learnable/seed1337", {"lr_decay_iters": 40}),
                         ("constant/seed1337", {"comparable": {**CONFIG["comparable"], "seed": 1337, "min_lr": 0.5}})):
        file = family / name / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    (family / "learnable/seed1338/log.jsonl").unlink()
    (family / "constant/seed1338/config.json").unlink()
    text = (family / "constant/seed1339/log.jsonl").read_text()
    (family / "constant/seed1339/log.jsonl").write_text(text.replace('"val_mean": ', '"val_mean": NaN, "was": '))
    content, report_md, _, err = make()
    named = {line.split(": ")[0]: line for line in content["left_out"]}
    for run, words in (("sparse/seed1337", "not finished"), ("plus/seed1338", "holds a line"), ("plus/seed1339", "damaged"),
                       ("identity/seed1339", "no usable kv_bytes_per_token"), ("learnable/seed1337", "had not decayed"),
                       ("learnable/seed1338", "missing"), ("constant/seed1337", "min_lr"), ("constant/seed1338", "config.json"),
                       ("constant/seed1339", "is no number")):
        assert words in named[f"family/{run}"] and named[f"family/{run}"] in report_md and named[f"family/{run}"] in err
    for system in ("constant", "svformer", "neutreno", "denseformer"):
        assert named[f"family/{system}"].endswith("no finished run")
    assert str(make.root) not in report_md
    family = content["family"]["systems"]
    assert {s: len(f["seeds"]) for s, f in family.items()} == {
        "vanilla": 3, "identity": 2, "sparse": 2, "plus": 1, "learnable": 1}


@pytest.mark.parametrize("setting", [
    {"n_layer": 12}, {"n_embd": 768, "n_ffn": 2688}, {"qk_norm": True}, {"scaled_init": True}, {"dtype": "float32"},
    {"beta2": 0.9}, {"weight_decay": 0.0}, {"rope_theta": 500_000.0}], ids=str)
def test_only_the_system_may_differ_in_a_pair(make, setting):
    write_family(make.root, {"identity": -0.03, "sparse": -0.05})
    before = make()[0]["family"]["systems"]
    file = make.root / "family/identity/seed1338/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **setting}))
    content, _, _, err = make()
    named, = [line for line in content["left_out"] if line.startswith("family/identity/seed1338: ")]
    assert next(iter(setting)) in named and named in err
    of = content["family"]["systems"]
    assert list(of["identity"]["difference"]["seeds"]) == ["1337", "1339"] and of["sparse"] == before["sparse"]


def test_without_vanilla_a_seed_has_no_difference_but_still_compares_variants(make):
    write_family(make.root, {"identity": -0.03, "learnable": -0.04, "sparse": -0.06})
    shutil.rmtree(make.root / "family/vanilla/seed1338")
    file = make.root / "family/learnable/seed1338/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "n_head": 4}))
    content, text, _, _ = make()
    left = {line.split(": ")[0]: line for line in content["left_out"]}
    assert "n_head" in left["family/learnable/seed1338"]  # the other two are alike
    assert left["family/identity/seed1338"].endswith("there is no vanilla of that seed")
    d = content["family"]["systems"]["identity"]["difference"]
    assert list(d["seeds"]) == ["1337", "1339"] and f"{d['interval_95'][1]:+.4f}] | 2 | -0.027 |" in text  # not 3 seeds


def test_the_familys_evaluation_is_the_usual_one(make):
    """However many runs of tokens/ were evaluated on other windows, family/ stays."""
    write_family(make.root, {"identity": -0.03}, seeds=(1337,))
    for iters in (10, 40, 66):
        write_pool(make.root / f"tokens/{iters}", {"identity": -0.03, "sparse": -0.05}, iters=iters, eval_iters=7)
    for file in (make.root / "tokens").rglob("config.json"):
        config = json.loads(file.read_text())
        config["comparable"]["eval_iters x batch_size"] = 7
        file.write_text(json.dumps(config))
    content, _, _, _ = make()
    assert set(content["family"]["systems"]) == {"vanilla", "identity"} and "tokens" not in content
    assert sum(line.startswith("tokens/") and "eval_iters" in line for line in content["left_out"]) == 18


@pytest.mark.parametrize("change, words", [
    ({"n_params": 0}, "damaged"), ({"comparable": {**CONFIG["comparable"], "data": ["a"]}}, "damaged"),
    ({"warmup_iters": None}, "no usable warmup_iters")], ids=["n_params", "data", "warmup"])
def test_damaged_numbers_are_named(make, change, words):
    write_family(make.root, {"identity": -0.03}, seeds=(1337,))
    file = make.root / "family/identity/seed1337/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    (make.root / "family/sparse/seed1337/log.jsonl").mkdir(parents=True)  # a folder of that name
    (make.root / "family/sparse/seed1337/config.json").write_text(file.read_text())
    left = make()[0]["left_out"]
    assert any(line.startswith("family/identity/seed1337: ") and words in line for line in left)
    assert any(line.startswith("family/sparse/seed1337: ") for line in left)


def test_other_folders_leave_the_repositorys_readme_alone(make, monkeypatch):
    write_family(make.root, {"identity": -0.03}, seeds=(1337,))
    (make.root.parent / "home").mkdir()
    monkeypatch.setattr(report, "REPO", str(make.root.parent / "home"))  # has no README.md: to read it would be an error
    make(make.root, "--readme=auto")
    (make.root.parent / "home/results").symlink_to(make.root)
    monkeypatch.setattr(report, "REPO", str(make.root.parent))
    assert "| identity is below vanilla |" in make(make.root, "--readme=auto")[2]


def test_mechanism_of_the_wrong_form_is_named(make):
    """What can't be used is named and takes nothing else with it: no file of the others, nothing that isn't finite."""
    shutil.copytree(os.path.join(COMMITTED, "family"), make.root / "family",
                    ignore=shutil.ignore_patterns("seed1338", "n*", "d*"))
    folder = shutil.copytree(os.path.join(COMMITTED, "mechanism"), make.root / "mechanism",
                             ignore=shutil.ignore_patterns("seed*", "[0-9]*", "*.png"))
    whole = json.loads((folder / "concentration.json").read_text())
    layers = json.loads((folder / "similarity.json").read_text())["models"]["vanilla/seed1337"]
    (folder / "similarity.json").write_text(json.dumps({"models": {
        "vanilla/seed1337": {**layers, "similarity": [math.nan] * 9}}}))
    (folder / "mapping.json").write_text('{"models": {"vanilla/seed1337": {"approximation": [0.9], "identity": [0.8]}}}')
    (folder / "lambdas.json").write_text("{")
    (folder / "spectrum.json").unlink()
    (folder / "spectrum.json").mkdir()  # as unreadable as can be
    (folder / "lastword.json").write_text("null")
    (folder / "77").mkdir()  # of tokens/77, which is not there
    for name, models in (("concentration.json", {**whole["models"], "ghost/seed1337": whole["models"]["vanilla/seed1337"]}),
                         ("77/concentration.json", whole["models"])):
        (folder / name).write_text(json.dumps({**whole, "models": models}))
    content, text, _, _ = make()
    for name, words in (("similarity", "nan is not finite"), ("lambdas", "no JSON"), ("spectrum", "can't be read"),
                        ("mapping", "not of the form"), ("lastword", "holds NoneType"), ("concentration", "ghost/seed1337: "),
                        ("77/concentration", "vanilla/seed1337: tokens/77/ has no such run")):
        assert any(line.startswith(f"mechanism/{name}.json: ") and words in line for line in content["left_out"]), name
    of = content["mechanism"]["of_runs"]
    assert list(of) == ["family"] and set(of["family"]["systems"]["first_importance"]) == {"vanilla", "identity", "learnable",
                                                                                           "sparse", "svformer"}
    assert not of["family"]["systems"]["mapping_layers"] and not of["family"]["systems"]["similarity"]
    assert "## Mechanism" in text and "NaN" not in (make.root / "report.json").read_text()


def test_mechanism_of_another_budget_has_rows_of_its_own(make):
    write_family(make.root, {"identity": -0.03}, seeds=(1337, 1338))
    write_tokens(make.root, {"identity": lambda tokens: -0.05}, budgets=(100, 40))
    for folder, rank in (("mechanism", 9.0), ("mechanism/40/seed1337", 10.0), ("mechanism/100", 11.0)):
        (make.root / folder).mkdir(parents=True)
        models = {f"{system}/seed1337": {"layers": [{"layer": 1, "effective_rank": rank + (system != "vanilla"), "largest": 1}]}
                  for system in ("vanilla", "identity")}
        (make.root / folder / "spectrum.json").write_text(json.dumps({"models": models}))
    for folder, seeds, more in ((".", (1337, 1338), 0.0), ("40", (1337,), 0.1), ("100", (1337,), 0.2)):
        (make.root / "mechanism" / folder / "lastword.json").write_text(json.dumps({"runs": {
            f"{system}/seed{seed}": {"against": f"vanilla/seed{seed}", "bins": {"C4": {
                "accuracy": right + more + 0.001 * (seed - 1337) * (right > 0.2), "difference": {
                    "accuracy_interval_95": [0.07, 0.12] if right > 0.2 else None}}}}
            for seed in seeds for system, right in (("vanilla", 0.2), ("identity", 0.3))}}))
    content, text, _, _ = make()
    claimed, _, text = text.partition("## Mechanism")
    tables = re.findall(r"^\| (\S+)/ \| (\w+) \| ([12-]+) \|(?: - \|)* ([\d.]+) \|(?: \S+ \|)*$", text, re.M)
    assert tables == [(home, s, n, r) for home, n, ranks in (
        ("family", "1-2", ("9.0", "10.0")), ("tokens/40", "1", ("10.0", "11.0")), ("tokens/100", "1", ("11.0", "12.0")))
        for s, r in zip(("vanilla", "identity"), ranks)]
    assert "tokens/40/ after 0.04M tokens in 40 iterations; tokens/100/ after 0.1M tokens in 100 iterations." in text
    m = content["mechanism"]["of_runs"]
    assert m["family"]["vanilla_loss"] > m["tokens/40"]["vanilla_loss"] > m["tokens/100"]["vanilla_loss"]

    def cell(vanilla, iters, home, seeds="1 seed, over its passages [+0.0700, +0.1200]"):
        return f"{vanilla + 0.1:.4g} against vanilla's {vanilla:.4g} of the questions; +0.1000, {iters / 1e3:.3g}M tokens in " \
            f"{iters} iterations, {seeds}, {home}/"
    assert "| 0.3005 against vanilla's 0.2 of the questions; +0.1005 [+0.0941, +0.1069], 0.02M tokens in 20 iterations, " \
        f"2 seeds, family/; also {cell(0.4, 100, 'tokens/100')} | holds |" in claimed  # the lowest of the others
    (make.root / "mechanism/lastword.json").unlink()  # one seed has no noise of its own, and takes none from others
    assert f"| {cell(0.4, 100, 'tokens/100')}; also {cell(0.3, 40, 'tokens/40')} | not testable at this budget |" in make()[1]


def test_mechanism_of_seeds_is_paired(make):
    """Names as analyses give them below a family's folder: SYSTEM/seedSEED, and mixed values beside."""
    write_family(make.root, {"identity": -0.03, "learnable": -0.03}, seeds=(1337, 1338))
    layers = [{"layer": n, "values_of": n, "effective_rank": 9.0} for n in (1, 2, 3)]
    models = {}
    for seed in (1337, 1338):
        for system, largest in (("vanilla/seed{}", 2.0), ("identity/seed{}", 3.0), ("identity/seed{} mixed", 2.5)):
            models[system.format(seed)] = {"layers": [{**x, "largest": largest + 0.1 * (seed - 1337)} for x in layers]}
    (make.root / "mechanism").mkdir()
    (make.root / "mechanism/spectrum.json").write_text(json.dumps({"models": models}))
    slopes = {1337: 0.1, 1338: 0.11}
    (make.root / "mechanism/lambdas.json").write_text(json.dumps({f"learnable/seed{seed}": {"kind": "learnable", "layers": {
        str(n): {"ratio": 1 + slope * n} for n in (2, 3, 4)}} for seed, slope in slopes.items()}))
    (make.root / "mechanism/seed1338").mkdir()  # as another session's checkpoints leave it
    for folder, seed, identity in (("mechanism", 1337, 0.6), ("mechanism/seed1338", 1338, 0.602)):
        (make.root / folder / "mapping.json").write_text(json.dumps({"models": {
            f"vanilla/seed{seed}": {"approximation": [0.9, 0.7], "identity": [0.5, identity],
                                    "identity_previous": [0.95, identity]}}}))
    (make.root / "mechanism/lastword.json").write_text(json.dumps({"runs": {
        f"{system}/seed{seed}": {"against": f"vanilla/seed{seed}", "bins": {"C4": {"accuracy": 0.9}, "all sources": {
            "accuracy": right, "difference": {"accuracy_interval_95": None}}}}
        for system, seed, right in (("vanilla", 1337, 0.2), ("vanilla", 1338, 0.21), ("identity", 1337, 0.3),
                                    ("identity", 1338, 0.309))}}))
    (make.root / "mechanism/similarity.json").write_text(json.dumps({"models": {
        f"vanilla/seed{seed}{kind}": {"similarity": [0.9, x + 0.01 * (seed - 1337), x]}
        for seed in (1337, 1338) for kind, x in (("", 0.2), (" (random)", 0.7))}}))
    content, text, _, _ = make()
    for claim, words in (("½ A (V_n + V_{n-1}) is nearer to cross-layer attention than identity mapping",
                          "in 4 of 4 layers (of V_(n-1) alone: in 2), 0.02M tokens in 20 iterations, 2 seeds, family/"),
                         ("ResFormer (identity) gets more questions right",
                          "0.3045 against vanilla's 0.205 of the questions; +0.0995"),
                         ("tokens are alike before training, less so after it (vanilla)",
                          "0.20, before training 0.70; -0.5000 [-0.5000, -0.5000], 0.02M tokens in 20 iterations, 2 seeds")):
        assert verdicts(content)[claim] == "holds" and words in text
    of = content["mechanism"]["of_runs"]["family"]["systems"]
    assert of["largest"]["identity mixed"] == {"1337": 2.5, "1338": 2.6}
    assert of["ratio_slope"]["learnable"] == pytest.approx({"1337": 0.1, "1338": 0.11})
    got = verdicts(content)
    assert got["eigenvalues of values are larger in ResFormer (identity)"] == "holds"
    assert got["value-state drains are weaker in ResFormer (identity)"] == "not testable at this budget"
    assert "| identity mixed |" in text and "(random)" not in text.partition("## Mechanism")[2].partition("\n\nMeans")[0]
    assert content["mechanism"]["of_runs"]["family"]["systems"]["untrained"] == {"vanilla": {"1337": 0.7, "1338": 0.705}}


@pytest.mark.parametrize("shares, expected", [
    ([0.6, 0.7], "holds"), ([0.4, 0.3], "not seen"), ([0.6, 0.4], "not testable at this budget"),
    ([0.5, 0.4], "not testable at this budget"), ([0.5, 0.6], "not testable at this budget"),
    ([0.5, 0.5], "not testable at this budget"), ([0.4], "not testable at this budget"),
    ([1.0], "not testable at this budget")])
def test_layers_decide_where_every_seed_agrees(shares, expected):
    """Half of the layers is on neither side."""
    assert claims.most(shares) == claims.most(iter(shares)) == expected


def test_a_run_of_another_form_costs_only_itself(make):
    write_family(make.root, {"identity": -0.03}, seeds=(1337,))
    (make.root / "mechanism").mkdir()
    good = {"similarity": [0.9, 0.2, 0.2]}
    (make.root / "mechanism/similarity.json").write_text(json.dumps({"models": {
        "vanilla/seed1337": good, "vanilla/seed1337 (random)": {"similarity": [math.nan] * 3}, "of\ntwo lines": good,
        "identity/seed1337 (random)": {"similarity": [0.5]}, "identity/seed1337": good}}))
    (make.root / "mechanism/spectrum.json").write_text(json.dumps({"models": {  # no layer in common
        f"{system}/seed1337": {"layers": [{"layer": n, "effective_rank": 9.0, "largest": 2.0} for n in layers]}
        for system, layers in (("vanilla", (1, 2)), ("identity", (3, 4)))}}))
    write_tokens(make.root, {"identity": lambda tokens: -0.05}, budgets=(40,))
    (make.root / "mechanism/40").mkdir()  # with nothing else
    (make.root / "mechanism/40/similarity.json").write_text(json.dumps({"models": {"vanilla/seed1337": {"similarity": 1}}}))
    content, text, _, _ = make()
    assert list(content["mechanism"]["of_runs"]) == ["family"]
    systems = content["mechanism"]["of_runs"]["family"]["systems"]
    assert systems["similarity"] == {"vanilla": {"1337": 0.2}, "identity": {"1337": 0.2}} and systems["untrained"] == {}
    for run in ("vanilla/seed1337 (random)", "identity/seed1337 (random)", "of\ntwo lines"):
        assert any(line.startswith(f"mechanism/similarity.json: {run}: ") for line in content["left_out"]), run
    assert verdicts(content)["eigenvalues of values are larger in ResFormer (identity)"] == "not testable at this budget"


def test_folders_with_as_many_seeds_are_shown_beside_one_another():
    """The first decides; beside it the others with as many seeds, and the one that ended lowest."""
    def folder(loss, *seeds):
        return {"systems": {"number": {"vanilla": dict.fromkeys(seeds, loss)}}, "vanilla_loss": loss}
    homes = {"a": folder(3.2, 1, 2), "b": folder(3.0, 1, 2), "c": folder(2.9, 1), "d": folder(2.8, 1)}
    told = claims.analysed({"mechanism": {"of_runs": homes}}, "number", ("vanilla",), lambda facts, of: (
        f"{facts['vanilla_loss']}", claims.HOLDS if facts["vanilla_loss"] == 3.0 else claims.NOT_SEEN))
    assert told == ("3.0, b/; also 2.8, d/; also 3.2, a/", "holds")


@pytest.mark.parametrize("own, mixed, expected", [
    ((3, 3), (3, 3), "holds"), ((3, 3), (0, 0), "holds partly"), ((1, 1), (0, 0), "not seen"),
    ((3, 1), (0, 0), "not testable at this budget"), ((3, 1), (3, 3), "holds partly"),
    ((1, 1), (), "not testable at this budget"), ((3, 3), (), "holds partly"), ((1, 1), (0,), "not testable at this budget")])
def test_eigenvalues_of_own_or_of_mixed_values(own, mixed, expected, make):
    """Of 4 layers so many are larger, with each of two seeds. While one reading is open, none that is not seen decides."""
    write_family(make.root, {"identity": -0.03}, seeds=(1337, 1338))
    (make.root / "mechanism").mkdir()
    (make.root / "mechanism/spectrum.json").write_text(json.dumps({"models": {
        name: {"layers": [{"layer": n, "effective_rank": 9.0, "largest": 2 if larger is None else 3 if n <= larger else 1}
                          for n in (1, 2, 3, 4)]}
        for i, seed in enumerate((1337, 1338)) for name, larger in (
            (f"vanilla/seed{seed}", None), (f"identity/seed{seed}", own[i]),
            *((f"identity/seed{seed} mixed", x) for x in mixed[i:i + 1]))}}))
    content, text, _, _ = make()
    assert verdicts(content)["eigenvalues of values are larger in ResFormer (identity)"] == expected
    assert f"larger in {own[0]} of 4 and {own[1]} of 4 layers of own values" in text


@pytest.mark.parametrize("source", ["first", "previous"])
def test_learned_weights_are_those_of_the_logs(source, make):
    """λ1 = 0.5 + 0.1 n and λ2 = 0.5, but for a seed's share; layer 2's λ2 of 0, which has no ratio, changes no slope."""
    assert report.slope_of_ratio({"layers": {"2": {"ratio": 0.5}, "3": {"ratio": None}}}) is None  # of one layer there is none
    write_family(make.root, {"learnable": -0.03})
    for seed in NOISE:
        log = make.root / f"family/learnable/seed{seed}/log.jsonl"
        config = json.loads((log.parent / "config.json").read_text())
        (log.parent / "config.json").write_text(json.dumps({
            **config, "value_residual": True, "value_mix": "learnable", "value_source": source}))
        *steps, end = log.read_text().splitlines()
        mix = {str(n): {str(1 if source == "first" else n - 1): 0.5 + (0.1 + NOISE[seed]) * n, str(n): 0.5 * (n > 2)}
               for n in range(2, config["n_layer"] + 1)}
        log.write_text("\n".join([*steps, json.dumps({**json.loads(end), "value_mix": mix})]) + "\n")
    content, text, _, _ = make()
    got, mean = verdicts(content), 0.1 + np.mean(list(NOISE.values()))
    assert got["learned λ1 grows with depth"] == "holds" == got["learned λ1/λ2 grows with depth"]
    for change in (mean, 2 * mean):
        assert f"| a line's change per layer {change:+.4f} [" in text
    assert text.count("3 seeds; highest in layer 8 of 8 | holds |") == 2


def test_a_saving_is_that_of_the_largest_budget(make):
    """Where vanilla overtakes at last, no earlier budget's saving stands for it."""
    write_family(make.root, {"identity": -0.1})
    write_tokens(make.root, {"identity": lambda tokens: 0.05 if tokens == 66 * PER_ITER else -0.1})
    content, text, _, _ = make()
    last = content["saving"]["identity"]["budgets"][-1]
    assert last["tokens"] == 66 * PER_ITER and last["extrapolated"]
    assert verdicts(content)["ResFormer (identity) reaches vanilla's loss with less data"] == "not testable at this budget"
    assert "vanilla's loss at the largest budget lies outside of the system's" in text


def test_a_budget_of_other_seeds_is_named(make):
    write_family(make.root, {"identity": -0.1}, seeds=(1337,))
    write_tokens(make.root, {"identity": lambda tokens: -0.1})
    assert len(make()[0]["tokens"]["identity"]["tokens"]) == 4
    for system in ("vanilla", "identity"):
        write_run(make.root / f"tokens/100/{system}/seed1338", 1338, 100, 3.0)
    content, _, _, err = make()
    assert "tokens" not in content and "tokens/*/identity: in no curve: no seed with vanilla's at each of 0.01M, 0.02M" in err


def test_mechanism_reads_each_folder_by_its_own_length_and_pairs(make):
    """A sink is measured against its own windows' uniform attention; means are of the seeds that the difference has."""
    write_family(make.root, {"identity": -0.1}, seeds=(1337, 1338))
    write_tokens(make.root, {"identity": lambda tokens: -0.1}, budgets=(40,))
    layer = {"entropy_ratio": 1.0, "first_value_norm": 1.0, "others_value_norm": 1.0, "first_hidden_norm": 1.0,
             "mean_hidden_norm": 1.0}
    for folder, uniform, runs in (("mechanism", 0.004, {"vanilla/seed1337": 0.012, "vanilla/seed1338": 0.1,
                                                        "identity/seed1337": 0.004}),
                                  ("mechanism/40", 0.04, {"vanilla/seed1337": 0.12, "identity/seed1337": 0.04})):
        (make.root / folder).mkdir(parents=True, exist_ok=True)
        (make.root / folder / "concentration.json").write_text(json.dumps({"uniform_first_importance": uniform, "models": {
            run: {"layers": [{**layer, "first_importance": x}]} for run, x in runs.items()}}))
        cell = {"C4": {"accuracy": 0.5, "difference": {"accuracy_interval_95": [0.1, 0.2]}}}
        (make.root / folder / "lastword.json").write_text(json.dumps({"runs": {
            f"{system}/seed1337": {"against": "identity/seed1337", "bins": cell} for system in ("identity", "vanilla")}}))
    content, text, _, _ = make()
    assert "1 against vanilla's 3 times uniform attention's; -2.0000, 0.02M tokens in 20 iterations, 1 seed, family/" in text
    assert "also 1 against vanilla's 3 times" in text and "has importance 0.0040 or 0.0400: no sink" in text
    assert "over its passages" not in text  # identity's interval is not against vanilla


def test_hurried_schedules_say_nothing_of_tokens(make):
    """Runs of 20 iterations end above what those of 40 and 66 had after 20: a saving read off beside them is not of tokens."""
    write_family(make.root, {"identity": -0.1})
    write_tokens(make.root, {"identity": lambda tokens: -0.1})
    claim = "ResFormer (identity) reaches vanilla's loss with less data"
    assert verdicts(make()[0])[claim] == "holds partly"
    for iters, at in ((66, 40), (66, 20), (40, 20)):
        for system in ("vanilla", "identity"):
            log = make.root / f"tokens/{iters}/{system}/seed1337/log.jsonl"
            early = vanilla_loss(at * PER_ITER) + (0.1 if at == 40 else -0.1)
            line = {"iter": at, "val_loss": early, "val": dict.fromkeys(SOURCES, early), "val_mean": early}
            log.write_text(json.dumps(line) + "\n" + log.read_text())
    content, text, _, _ = make()
    facts = content["saving"]["identity"]["budgets"]
    assert [b["hurried"] for b in facts] == [False, True, True, False] and "vanilla at 0.02M: +0.1" in text
    assert verdicts(content)[claim] == "holds partly"  # read off between 40 and 66, which are not
    marked = re.findall(r"^\| identity \| (\S+)M \| -0\.\d+(†?) \|", text, re.M)
    assert marked == [("0.01", ""), ("0.02", "†"), ("0.04", ""), ("0.066", "")]
    shutil.rmtree(make.root / "tokens/66")
    content, text, _, _ = make()
    assert "; the shorter runs' schedule is too short" in text and verdicts(content)[claim] == "not testable at this budget"


def test_short_schedules_are_told_beside_what_has_them(make):
    write_family(make.root, {"identity": -0.1})
    write_tokens(make.root, {"identity": lambda tokens: -0.1}, budgets=(20, 40))
    for system, early in (("vanilla", vanilla_loss(20 * PER_ITER) - 0.25), ("identity", vanilla_loss(20 * PER_ITER) + 9)):
        log = make.root / f"tokens/40/{system}/seed1337/log.jsonl"
        line = {"iter": 20, "val_loss": early, "val": dict.fromkeys(SOURCES, early), "val_mean": early}
        log.write_text(json.dumps(line) + "\n" + log.read_text())
    write_pool(make.root / "kv/2048", {"svformer": 0.0, "identity": 0.0}, block_size=2048)
    write_pool(make.root / "kv/8192", {"svformer": 0.0}, block_size=8192, iters=30)  # a budget that tokens/ lacks
    write_pool(make.root / "sizes/20M", {"identity": 0.0}, iters=30)
    text = make()[1]
    note = ("In tokens/ the runs of 0.02M tokens in 20 iterations end above the longer ones when those had seen as many, "
            "before their decay (vanilla +0.250): a part")
    assert text.count(note) == 1 == text.count("a part of the differences is the short")
    assert note in text.partition("## Loss against KV cache")[2].partition("\n## ")[0]


def write_pool(folder, deltas, seeds=(1337, 1338), base=4.0, iters=20, of=lambda system: {}, **settings):
    """SYSTEM/seedSEED/ of vanilla at the loss `base` and of systems at their distance to it; of(system): more for write_run."""
    for seed in seeds:
        for system, delta in {"vanilla": 0.0, **deltas}.items():
            noise = NOISE[seed] if system != "vanilla" else 0.0
            write_run(folder / system / f"seed{seed}", seed, iters, base + delta + noise, **settings, **of(system))


def test_runs_that_no_table_has_are_named(make):
    """Of another budget, with a batch of no tokens, or in a folder that can't be read; what is made is made whole."""
    write_family(make.root, {"identity": -0.03, "sparse": -0.05}, seeds=(1337, 1338))
    for system, settings in (("identity", {"iters": 40}), ("sparse", {"iters": 20, "tokens_per_iter": 0})):
        shutil.rmtree(make.root / "family" / system / "seed1338")
        write_run(make.root / "family" / system / "seed1338", 1338, final=3.0, **settings)
    content, _, _, _ = make()
    assert any(line.startswith("family/identity/seed1338: 0.04M tokens, most runs of family/ have 0.02M")
               for line in content["left_out"])
    assert any(line.startswith("family/sparse/seed1338") and "tokens_per_iter" in line for line in content["left_out"])
    assert not [name for name in os.listdir(make.root) if name.startswith(".report")]


def test_a_folder_that_cannot_be_read_is_named(make, monkeypatch):
    write_family(make.root, {"identity": -0.03}, seeds=(1337,))
    walk = os.walk

    def refused(top, onerror=None, **options):
        if top.endswith("tokens"):
            onerror(PermissionError(13, "Permission denied", top))
        return walk(top, onerror=onerror, **options)
    monkeypatch.setattr(os, "walk", refused)
    assert "tokens: can't be read (Permission denied)" in make()[0]["left_out"]


def test_a_report_that_fails_replaces_nothing(make, monkeypatch):
    write_family(make.root, {"identity": -0.03}, seeds=(1337,))
    before = make()[:2]
    write_family(make.root, {"sparse": -0.03}, seeds=(1338,))
    monkeypatch.setattr(report, "plain", lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make()
    assert (json.loads((make.root / "report.json").read_text()), (make.root / "report.md").read_text()) == before
    assert not [name for name in os.listdir(make.root) if name.startswith(".report")]


def test_folders_that_are_not_there_go_without_a_word(make):
    write_family(make.root, {"identity": -0.03})
    content, text, readme, _ = make()
    assert not set(records.ARMS) & set(content) and not any(f"{arm}/" in text for arm in records.ARMS)
    mine = [c.text for c in claims.CLAIMS if c.folder]
    assert len(mine) == 17 and not set(mine) & set(verdicts(content)) and not any(claim in readme for claim in mine)


def test_an_empty_folder_has_claims_and_no_table(make):
    for arm in records.ARMS:
        (make.root / arm).mkdir(parents=True)
    content = make()[0]
    assert not set(records.ARMS) & set(content) and len(content["claims"]) == len(claims.CLAIMS)
    assert set(verdicts(content).values()) == {"not testable at this budget"}


def test_ablations(make):
    write_pool(make.root / "ablations", {
        "identity": -0.03, "query_residual": 0.02, "key_residual": 0.02, "hidden_residual": 0.04, "attention_residual": 0.02,
        "source_previous": -0.01, "source_all": -0.02, "identity_mapping": 0.5, "cross_layer": -0.06, "lambda_0.5": -0.04,
        "lambda_1": -0.06, "constant": -0.05, "lambda_5": -0.045, "sparse": -0.08, "layers_2-4": -0.01, "layers_4-5": -0.07,
        "layers_5-8": -0.07, "share_k_every_2": 0.02, "share_v_every_2": 0.01, "cla2": 0.03, "svformer": 0.08,
        "shared_query": 0.04, "shared_key": 0.04})
    write_pool(make.root / "ablations/less", {"sparse": 9.0}, iters=10)  # another pool, which the claims do not take
    content, text, _, err = make()
    assert list(content["ablations"]["arms"]) == ["", "less"] and "left out: ablations" not in err
    rows = content["ablations"]["arms"][""]["systems"]
    assert list(rows)[:2] == ["sparse", "layers_4-5"] and list(rows)[-1] == "identity_mapping"
    mean = rows["identity"]["difference"]["mean"]
    assert mean == pytest.approx(-0.03 + 0.001) and rows["identity"]["difference"]["interval_95"] == pytest.approx(
        [mean - 12.706 * 0.001, mean + 12.706 * 0.001], abs=1e-6)
    assert content["ablations"]["noise"]["std"] == pytest.approx(0.002 / math.sqrt(2), rel=1e-4)
    assert re.search(r"\| hidden_residual \| 0.02M \| 4\.04\d+ \| \+0\.0410 \[.*\] \| 2 \| \+0\.042 \|", text)
    got = verdicts(content)
    assert got["a residual helps on values only"] == "holds" == got["identity mapping is worse than vanilla"]
    assert got["λ1 = 2 is best of 0.5, 1, 2, 5"] == "holds partly"  # 1 is better
    assert got["layers 6-8 are the best to mix in"] == "holds partly"  # one set is missing
    assert got["V_1 is the best source"] == "holds" == got["of pairs of layers that share K, V or both, V hurts least"]
    assert got["ResFormer ends below cross-layer attention"] == got[
        "of layer 1's Q, K or V for all layers, V hurts least"] == "not seen"
    assert "![Ablations](report_ablations.png)" in text


def test_pools_are_never_mixed(make):
    """Vanilla of one length or rate is no baseline of another's; a run of another budget is named."""
    write_run(make.root / "lengths/512/vanilla/seed1337", 1337, 20, 4.0, block_size=512)
    write_run(make.root / "lengths/2048/identity/seed1337", 1337, 20, 3.9)
    write_run(make.root / "rates/6e-4/vanilla/seed1337", 1337, 20, 4.0)
    write_run(make.root / "rates/6e-4/identity/seed1337", 1337, 20, 3.9)
    write_run(make.root / "rates/6e-4/sparse/seed1337", 1337, 10, 3.9)
    write_run(make.root / "rates/3e-4/sparse/seed1337", 1337, 20, 3.9, learning_rate=6e-4, min_lr=6e-5)
    write_run(make.root / "rates/other/sparse/seed1337", 1337, 20, 3.0, block_size=512)
    content, _, _, err = make()
    assert all(x["difference"] is None for of in content["lengths"]["arms"].values() for x in of["systems"].values())
    assert content["rates"]["arms"]["6e-4"]["systems"]["identity"]["difference"]["mean"] == pytest.approx(-0.1)
    assert content["rates"]["arms"]["3e-4"]["systems"]["sparse"]["difference"] is None
    assert "rates/6e-4/sparse/seed1337: 0.01M tokens, most runs beside it 0.02M" in err
    assert "rates/other: compared with no other rate" in err and list(content["rates"]["best"]) == ["vanilla", "identity"]
    assert verdicts(content)["ResFormer gains at every length"] == "not testable at this budget"


def test_kv(make):
    caches = {"vanilla": 16384, "svformer": 9216, "gqa2": 8192, "gqa8": 2048}
    for length, gqa2 in ((8192, 0.05), (2048, 0.01)):
        write_pool(make.root / "kv" / str(length), {"svformer": 0.03, "gqa2": gqa2, "gqa8": 0.1}, block_size=length,
                   of=lambda system: {"cache": caches[system]})
    content, text, _, _ = make()
    assert list(content["kv"]["arms"]) == ["2048", "8192"]  # by number
    systems = content["kv"]["arms"]["2048"]["systems"]
    assert {s: x["kv_bytes_per_token"] for s, x in systems.items()} == caches and list(systems)[:2] == ["vanilla", "gqa2"]
    assert re.search(r"\| 2048 \| svformer \|.*\| 9,216 \| 0\.5625 \|", text) and "(report_kv.png)" in text
    claim = "SVFormer is worse than GQA2 at 2,048 tokens"
    assert verdicts(content)[claim] == "holds"
    shutil.rmtree(make.root / "kv")
    for length in (2048, 8192):
        write_pool(make.root / "kv" / str(length), {"svformer": -0.03, "gqa2": 0.0, "cla2": 0.0}, block_size=length)
    content, text, _, _ = make()
    assert verdicts(content)[claim] == "not testable at this budget" and "; in the paper SVFormer's leads go with" in text
    assert verdicts(content)["SVFormer is better than GQA2 and CLA2 at longer windows"] == "holds"


def test_noise_is_that_of_like_runs(make):
    """One seed alone decides nothing; three of other lists' runs with the same batches do, those of other batches do not."""
    for length in (2048, 8192):
        one = dict(seeds=(1337,), block_size=length)
        write_pool(make.root / "kv" / str(length), {"svformer": -0.05, "gqa2": 0.0, "cla2": 0.0}, **one)
        write_pool(make.root / "lengths" / str(length), {"identity": -0.05, "svformer": -0.05}, **one)
    for i, rate in enumerate((3e-4, 6e-4, 1.2e-3)):
        write_pool(make.root / "rates" / str(i), {"identity": -0.05, "sparse": -0.05}, seeds=(1337,), base=4 + 0.1 * (i != 1),
                   learning_rate=rate, min_lr=rate / 10)
    slower = dict(learning_rate=CONFIG["learning_rate"] / 3, min_lr=1e-5)
    write_pool(make.root / "lengths/slower", {"svformer": -0.065}, seeds=(1337,), block_size=2048, **slower)
    mine = [
        "SVFormer is better than GQA2 and CLA2 at longer windows",
        "a lower learning rate makes SVFormer's loss better beside vanilla's",
        "ResFormer gains at every length", "the gain is there at each one's best learning rate"]

    def got():
        found = verdicts(make()[0])
        return [found[claim] for claim in mine]
    assert got() == ["not testable at this budget"] * 4
    write_pool(make.root / "ablations", {"identity": -0.03}, seeds=tuple(NOISE), iters=10, tokens_per_iter=2 * PER_ITER)
    assert got() == ["not testable at this budget"] * 4
    shutil.rmtree(make.root / "ablations")
    write_pool(make.root / "ablations", {"identity": -0.03}, seeds=tuple(NOISE))
    # noise takes one difference 4.30 x 0.0015 = 0.0066 from 0, the difference of two 0.0093
    assert got() == ["holds partly"] * 4
    part = (make.root / "report.md").read_text().partition("## Loss against KV cache")[2].partition("\n## ")[0]
    assert "two paired seeds. From seed to seed a difference to vanilla in other folders, with as many tokens" in part
    assert f"deviation of {np.std(list(NOISE.values()), ddof=1):.4f} (" in part
    shutil.rmtree(make.root / "lengths/slower")
    write_pool(make.root / "lengths/slower", {"svformer": -0.058}, seeds=(1337,), block_size=2048, **slower)
    assert got() == ["holds partly", "not testable at this budget", "holds partly", "holds partly"]


def test_copies_count_once_in_the_noise():
    one, other = ({"seeds": dict(zip((1337, 1338, 1339), of))} for of in ([0.0, 0.1, 0.2], [0.0, 0.0, 0.3]))
    assert records.noise([one, dict(one), other]) == records.noise([one, other]) != records.noise([one])


def test_lengths(make):
    """SVFormer's training loss comes up through vanilla's at iteration 6, 12 and 18."""
    for length, turn in ((512, 6), (2048, 12), (8192, 18)):
        write_pool(make.root / "lengths" / str(length), {"identity": -0.03, "svformer": 0.0}, block_size=length, iters=24,
                   seeds=(1337, 1339), of=lambda system, turn=turn: {
                       "training": lambda i: 0.1 * (i - turn) * (system == "svformer")})
    content, text, _, _ = make()
    found = content["lengths"]["critical"]
    assert {arm: p["kind"] for arm, p in found.items()} == dict.fromkeys(("512", "2048", "8192"), "crossed")
    for arm, turn in (("512", 6), ("2048", 12), ("8192", 18)):  # half a seed's -0.001 moves it by 0.005 iterations
        assert found[arm]["tokens"] == pytest.approx((turn + 0.005) * PER_ITER, rel=1e-4)
        assert found[arm]["seeds"]["1337"]["iteration"] == pytest.approx(turn, rel=1e-4)
    assert "| 2048 | svformer |" in text and "crossed at 0.012M tokens" in text
    got = verdicts(content)
    assert got["vanilla overtakes SVFormer later if windows are longer"] == "holds"
    assert got["ResFormer gains at every length"] == "holds partly" and "; not run at 32,000, 64,000 | holds partly |" in text
    for length in (32000, 64000):
        write_pool(make.root / "lengths" / str(length), {"identity": -0.03}, block_size=length, iters=24, seeds=(1337, 1339))
    content, text, _, _ = make()
    assert verdicts(content)["ResFormer gains at every length"] == "holds" and "not run at" not in text
    shutil.rmtree(make.root / "lengths/512")
    write_pool(make.root / "lengths/512", {"identity": 0.03}, block_size=512)
    got = verdicts(make()[0])
    assert got["ResFormer gains at every length"] == "holds partly"
    shutil.rmtree(make.root / "lengths/2048")
    assert verdicts(make()[0])["vanilla overtakes SVFormer later if windows are longer"] == "not testable at this budget"


def test_a_lower_rate_and_another_warmup_are_no_lengths(make):
    """SVFormer: -0.1 at every length, -0.12 at a lower rate (NOISE cancels), +0.5 after another warmup, which says nothing."""
    for length in (512, 2048):
        write_pool(make.root / f"lengths/{length}", {"identity": -0.03, "svformer": -0.1}, block_size=length)
    before = verdicts(make()[0])
    slower = dict(learning_rate=CONFIG["learning_rate"] / 3, min_lr=1e-5)
    write_pool(make.root / "lengths/2048_slow", {"identity": 0.03, "svformer": -0.12}, block_size=2048, **slower)
    write_pool(make.root / "lengths/2048_warm", {"svformer": 0.5}, block_size=2048, warmup_iters=3)
    write_pool(make.root / "lengths/2048_both", {"svformer": 0.5}, block_size=2048, warmup_iters=3, **slower)
    content, text, _, _ = make()
    claim = "a lower learning rate makes SVFormer's loss better beside vanilla's"
    assert before[claim] == "not testable at this budget" and verdicts(content) == {**before, claim: "holds"}
    assert "2048_slow: -0.0200 [-0.0200, -0.0200], 0.02M tokens in 20 iterations, 2 seeds" in text
    assert "| 2048_warm | svformer |" in text


def test_an_extrapolated_crossing_says_nothing(make):
    for length, turn in ((512, 6), (2048, 30)):
        write_pool(make.root / "lengths" / str(length), {"svformer": 0.0}, block_size=length, iters=24,
                   of=lambda system, turn=turn: {"training": lambda i: 0.1 * (i - turn) * (system == "svformer")})
    content, text, _, _ = make()
    assert re.search("^Not measured here: .*ResFormer gains at every length", text, re.M)  # no identity there
    assert content["lengths"]["critical"]["2048"]["kind"] == "extrapolated"
    assert content["lengths"]["critical"]["2048"]["iteration"] == pytest.approx(30, abs=0.1)
    assert verdicts(content)["vanilla overtakes SVFormer later if windows are longer"] == "not testable at this budget"


def test_rates(make):
    """Vanilla's best is at 1.2e-3, identity's at 6e-4: -0.02 apart there, though -0.05 at 6e-4."""
    for rate, base, identity, sparse in ((3e-4, 4.10, -0.05, 0.0), (6e-4, 4.03, -0.05, 0.02), (1.2e-3, 4.0, 0.02, 0.1)):
        write_pool(make.root / "rates" / f"{rate:g}", {"identity": identity, "sparse": sparse}, base=base,
                   learning_rate=rate, min_lr=rate / 10)
    content, text, _, _ = make()
    best = content["rates"]["best"]
    assert {s: b["rate"] for s, b in best.items()} == {"vanilla": "0.0012", "identity": "0.0006", "sparse": "0.0006"}
    assert best["identity"]["difference"]["seeds"] == pytest.approx({"1337": -0.02, "1338": -0.018})
    assert {s: b["at_an_end"] for s, b in best.items()} == {"vanilla": True, "identity": False, "sparse": False}
    assert "may lie outside: vanilla." in text and list(content["rates"]["arms"]) == ["0.0003", "0.0006", "0.0012"]
    assert verdicts(content)["the gain is there at each one's best learning rate"] == "holds partly"  # not sparse's
    assert "vanilla's best is at an end of its rates" in text  # whatever the verdict
    assert "difference to vanilla in rates/ has" in text and ", within the noise" not in text
    write_pool(make.root / "rates/0.0006_other", {"identity": 0.1}, seeds=(1337,), base=5, learning_rate=6e-4, min_lr=6e-5)
    _, text, _, _ = make()  # the noise is that of the arms with several seeds
    assert "difference to vanilla in rates/0.0003/, rates/0.0006/, rates/0.0012/ has" in text


def test_a_best_above_vanillas_is_not_seen_also_at_an_end(make):
    for rate, base in ((3e-4, 4.2), (6e-4, 4.1), (1.2e-3, 4.0)):
        write_pool(make.root / "rates" / f"{rate:g}", {"identity": 0.05, "sparse": 0.001}, base=base,
                   learning_rate=rate, min_lr=rate / 10)
    content, text, _, _ = make()
    claim = "the gain is there at each one's best learning rate"
    assert verdicts(content)[claim] == "not seen" and "vanilla's best is at an end of its rates" in text
    assert re.search(r"sparse: [^;]*, within the noise;", text) and not re.search(r"identity: [^;]*, within the noise", text)


def test_a_systems_rates_have_one_colour(make, monkeypatch):
    """Those over a stronger baseline are broken lines in the system's own."""
    panels = {}
    monkeypatch.setattr(report.plot, "draw", lambda path, found, *_: panels.update({os.path.basename(path): found}))
    for rate in (3e-4, 6e-4):
        for name, options in (("", {}), ("_strong", dict(qk_norm=True, scaled_init=True))):
            write_pool(make.root / f"rates/{rate:g}{name}", {"identity": -0.1}, learning_rate=rate, min_lr=rate / 10, **options)
    make()
    panel, = panels["report_rates.png"]
    strong = {f"{system}, qk_norm, scaled_init": system for system in ("vanilla", "identity")}
    assert panel["like"] == strong and panel["dashed"] == set(strong) and len(panel["series"]) == 4


def test_a_best_needs_vanillas_rates_and_no_end(make):
    for rate, base, identity in ((3e-4, 4.2, -0.1), (6e-4, 4.0, -0.05), (1.2e-3, 3.9, -0.1)):
        write_pool(make.root / "rates" / f"{rate:g}", {"identity": identity, "sparse": -0.1}, base=base,
                   learning_rate=rate, min_lr=rate / 10)
    claim = "the gain is there at each one's best learning rate"
    content, text, _, _ = make()
    assert verdicts(content)[claim] == "holds partly" and "vanilla's best is at an end of its rates" in text
    shutil.rmtree(make.root / "rates/0.0003/sparse")
    before = content["rates"]["best"]["sparse"]
    content, _, _, err = make()
    assert content["rates"]["best"]["sparse"] == {**before, "lacks": ["0.0003"]}
    assert "rates/0.0003/sparse: no usable run where vanilla has one" in err
    shutil.rmtree(make.root / "rates/0.0012/sparse")
    content, text, _, err = make()
    best = content["rates"]["best"]["sparse"]
    assert (best["rate"], best["at_an_end"]) == ("0.0006", True) and best["difference"]["seeds"]["1337"] == pytest.approx(
        4.0 - 0.1 + NOISE[1337] - 3.9) and "at 0.0006, vanilla at 0.0012; not run at 0.0003, 0.0012)" in text
    write_pool(make.root / "rates/0.0003", {"sparse": -0.1}, seeds=(1339,), base=4.2, learning_rate=3e-4, min_lr=3e-5)
    shutil.rmtree(make.root / "rates/0.0003/vanilla/seed1339")
    content, _, _, err = make()
    assert "rates/*/sparse: no best: at no seed a run in each of 0.0003, 0.0006, and vanilla's in each of 0.0003, 0" in err
    assert set(content["rates"]["best"]) == {"vanilla", "identity"}
    for seed in (1337, 1338):
        shutil.rmtree(make.root / f"rates/0.0012/vanilla/seed{seed}")
    content, _, _, _ = make()  # a rate that vanilla has not is none of anyone's
    assert {s: b["rate"] for s, b in content["rates"]["best"].items()} == {"vanilla": "0.0006", "identity": "0.0006"}


def test_bests_take_budget_and_noise_of_their_own_rates(make):
    for rate, base in ((3e-4, 4.2), (6e-4, 4.0), (1.2e-3, 4.1)):
        write_pool(make.root / f"rates/{rate:g}", {"identity": -0.1, "sparse": -0.1}, seeds=(1337,), base=base,
                   learning_rate=rate, min_lr=rate / 10)
    write_pool(make.root / "rates/0.0001", {"identity": -0.1}, iters=40, base=4.0, learning_rate=1e-4, min_lr=1e-5)
    content, text, _, err = make()  # its seeds' noise is not theirs, nor its budget
    assert "rates/0.0001: compared with no other rate" in err and "identity: -0.1000, 0.02M tokens in 20 iterations" in text
    assert verdicts(content)["the gain is there at each one's best learning rate"] == "not testable at this budget"


def test_a_rate_that_a_system_lacks_never_makes_its_claim_hold(make):
    """Without its poor run of one seed it would have two, and an interval."""
    for rate, base in ((3e-4, 4.2), (6e-4, 4.0), (1.2e-3, 4.1)):
        write_pool(make.root / f"rates/{rate:g}", {"identity": -0.1, "sparse": -0.1}, base=base, learning_rate=rate,
                   min_lr=rate / 10)
    claim = "the gain is there at each one's best learning rate"
    assert verdicts(make()[0])[claim] == "holds"
    shutil.rmtree(make.root / "rates/0.0012/sparse")
    content, text, _, _ = make()
    assert verdicts(content)[claim] == "holds partly" and content["rates"]["best"]["sparse"]["difference"]["interval_95"][1] < 0
    assert "0.0006 against vanilla's 0.0006, not run at 0.0012" in text


def test_vanillas_best_is_that_of_the_systems_seeds(make):
    for rate, first, second in ((6e-4, 4.0, 4.2), (1.2e-3, 4.15, 4.0)):
        for seed, base in ((1337, first), (1338, second)):
            systems = {"identity": 0.05} if (rate, seed) == (6e-4, 1337) else {}
            write_pool(make.root / f"rates/{rate:g}", systems, seeds=(seed,), base=base, learning_rate=rate, min_lr=rate / 10)
    best = make()[0]["rates"]["best"]
    assert best["vanilla"]["rate"] == "0.0012" and best["identity"]["vanilla"]["rate"] == "0.0006"  # of both seeds, of 1337
    assert best["identity"]["difference"]["seeds"] == pytest.approx({"1337": 0.05})


def test_a_stronger_baseline_is_among_the_best(make):
    """Vanilla's best is the stronger one at 1e-3, identity's the plain one there: +0.01 apart. Each has its own rates' ends."""
    for rate, base, identity in ((5e-4, 4.2, -0.1), (1e-3, 4.0, -0.04), (2e-3, 4.1, -0.1)):
        for name, options, less in (("", {}, 0.0), ("_strong", dict(qk_norm=True, scaled_init=True), 0.05)):
            write_pool(make.root / f"rates/{rate:g}{name}", {"identity": identity + less * 1.5}, seeds=(1337,),
                       base=base - less, learning_rate=rate, min_lr=rate / 10, **options)
    content, text, _, _ = make()
    best = content["rates"]["best"]
    assert {s: (b["rate"], b["at_an_end"]) for s, b in best.items()} == {
        "vanilla": ("0.001_strong", False), "identity": ("0.001", False)}
    assert best["identity"]["difference"]["mean"] == pytest.approx(3.96 + NOISE[1337] - 3.95)
    assert list(content["rates"]["arms"])[:2] == ["0.0005", "0.0005_strong"] and "at 0.001, vanilla at 0.001_strong" in text
    plain = content["rates"]["best_plain"]
    assert {s: (b["rate"], b["at_an_end"]) for s, b in plain.items()} == dict.fromkeys(plain, ("0.001", False))
    assert plain["identity"]["difference"]["mean"] == pytest.approx(-0.04 + NOISE[1337])
    strong = content["rates"]["best_stronger"]
    assert {s: b["rate"] for s, b in strong.items()} == {"vanilla": "0.001_strong", "identity": "0.001_strong"}
    assert strong["identity"]["difference"]["mean"] == pytest.approx(-0.04 + 0.075 + NOISE[1337])
    assert verdicts(content)["the gain is there over a stronger baseline"] == "not testable at this budget"  # one seed


def test_sizes(make):
    """identity(N) = vanilla(N / 0.75): a quarter of the parameters less, whatever is fitted to a line in ln N."""
    less = 0.3 * math.log(0.75)
    for size, n in (("20M", 20_000_000), ("82M", 82_000_000), ("180M", 180_000_000), ("468M", 468_000_000)):
        sparse = {"180M": "sparse_12", "468M": "sparse_24"}.get(size, "sparse")
        write_pool(make.root / "sizes" / size, {"identity": less, sparse: 0.1}, seeds=(1337,), base=9 - 0.3 * math.log(n),
                   n_params=n, n_params_non_embedding=n // 2)
    content, text, _, err = make()
    saving = content["sizes"]["saving"]
    for axis in ("n_params", "n_params_non_embedding"):
        r = saving["identity"][axis]
        assert r["forms"]["line"] == pytest.approx(0.25, abs=1e-4) == r["forms"]["piecewise"]
    assert saving["sparse"]["n_params"]["forms"]["line"] < 0 and len(saving["sparse"]["n_params"]["points"][1]["x"]) == 4
    assert list(content["sizes"]["arms"]) == ["20M", "82M", "180M", "468M"] and "left out: sizes" not in err
    assert "| 180M | sparse_12 |" in text and "10.4%, 13.3%, 16.1%" in text and "line 25.0%, loglog" in text
    got, claim = verdicts(content), "ResFormer (identity) reaches vanilla's loss with fewer parameters"
    assert got[claim] == "not testable at this budget"  # the noise is not known
    assert got[claim.replace("identity", "sparse")] == "not testable at this budget"  # 0.1 more is beyond its losses
    write_family(make.root, {"identity": -0.03})
    content, text, _, _ = make()
    seeds = content["family"]["systems"]["vanilla"]["seeds"]
    own = [0.01 * (s - 1337) for s in seeds], [0.01 * (s - 1337) + NOISE[s] for s in seeds]
    half = 4.30265 * math.sqrt(2) * math.sqrt(np.mean([np.var(x, ddof=1) for x in own]))
    found = content["sizes"]["at_largest"]["identity"]
    for axis in (found, content["sizes"]["at_largest_non_embedding"]["identity"]):
        assert axis["saving"] == pytest.approx(0.25, abs=1e-4)
        assert axis["interval_95"] == pytest.approx([1 - 0.75 * math.exp(s * half / 0.3) for s in (1, -1)], abs=1e-3)
    assert "of non-embedding parameters at vanilla's 468M, by its own losses" in text
    assert verdicts(content)[claim] == "holds partly"
    assert "; 4 sizes, 0.02M tokens, 1 seed |" in text
    shutil.rmtree(make.root / "sizes/20M")
    shutil.rmtree(make.root / "sizes/180M")
    content, text, _, _ = make()
    assert "; 2 sizes, 0.02M" in text and verdicts(content)[claim] == "not testable at this budget"
    found = content["sizes"]["at_largest"]["identity"]
    write_pool(make.root / "sizes/1G", {"identity": less}, seeds=(1337,), iters=40, n_params=10 ** 9)
    content, _, _, err = make()
    assert "sizes/1G: in no saving: 0.04M tokens, most sizes 0.02M" in err
    assert content["sizes"]["at_largest"]["identity"] == found


def test_a_system_is_compared_over_the_sizes_that_it_has(make):
    """Losses on a line in ln N up to 180M and off it at 468M, where the system was not run."""
    less = 0.3 * math.log(0.75)
    for size, n, bend in (("20M", 20_000_000, 0), ("82M", 82_000_000, 0), ("180M", 180_000_000, 0), ("468M", 468_000_000, 0.2)):
        write_pool(make.root / "sizes" / size, dict.fromkeys(["identity"] + ["sparse"] * (size != "468M"), less), seeds=(1337,),
                   base=9 - 0.3 * math.log(n) + bend, n_params=n, n_params_non_embedding=n // 2)
    content, text, _, _ = make()
    saving, largest = content["sizes"]["saving"], content["sizes"]["at_largest"]
    assert (largest["identity"]["at"], largest["sparse"]["at"]) == ("468M", "180M")
    assert (largest["identity"]["sizes"], largest["sparse"]["sizes"]) == (4, 3)
    for axis in ("n_params", "n_params_non_embedding"):
        assert saving["sparse"][axis]["forms"]["line"] == pytest.approx(0.25, abs=1e-4)
        assert [len(p["x"]) for p in saving["sparse"][axis]["points"]] == [3, 3]
    assert largest["sparse"]["saving"] == pytest.approx(0.25, abs=1e-4) and largest["identity"]["saving"] > 0.5
    assert "by the form of both fits over 20M, 82M, 180M: " in text and "of all parameters at vanilla's 180M, by" in text
    alone = saving["sparse"], largest["sparse"]
    write_pool(make.root / "sizes/468M_long", {"identity": less, "sparse": less}, seeds=(1337,), iters=40, n_params=468_000_000,
               n_params_non_embedding=234_000_000)
    content, text, _, err = make()
    assert (content["sizes"]["saving"]["sparse"], content["sizes"]["at_largest"]["sparse"]) == alone
    assert "sizes/468M_long: in no saving: 0.04M tokens" in err and "20M, 82M, 180M, 468M: " in text
    os.rename(make.root / "sizes/468M/identity/seed1337", make.root / "sizes/468M/identity/seed1338")
    for name in ("config.json", "log.jsonl"):
        path = make.root / "sizes/468M/identity/seed1338" / name
        path.write_text(path.read_text().replace('"seed": 1337', '"seed": 1338'))
    content, text, _, _ = make()
    assert content["sizes"]["at_largest"]["identity"]["at"] == "180M" and "20M, 82M, 180M, 468M: " not in text
    shutil.rmtree(make.root / "sizes/180M/sparse")
    shutil.rmtree(make.root / "sizes/20M/vanilla")
    content, _, _, err = make()
    assert "sparse" not in content["sizes"]["at_largest"] and "sizes/sparse: it and vanilla need two sizes in common" in err
    assert content["sizes"]["at_largest"]["identity"]["sizes"] == 2


def test_a_size_is_its_folders_own(make):
    """A system as large in one folder as vanilla in another, where the system was not run."""
    for size, n, own in (("20M", 20, 15), ("82M", 82, 60), ("180M", 180, 468), ("468M", 468, None)):
        write_pool(make.root / "sizes" / size, {"svformer": 0.0} if own else {}, seeds=(1337,), base=9 - 0.3 * math.log(n),
                   of=lambda s, n={"vanilla": n, "svformer": own}: dict.fromkeys(("n_params", "n_params_non_embedding"), n[s]))
    assert make()[0]["sizes"]["at_largest"]["svformer"]["at"] == "180M"


def test_seeds_of_sizes_are_those_of_every_point(make):
    """With two seeds at the largest size alone, its saving is one seed's."""
    sizes = (("20M", 20_000_000), ("82M", 82_000_000), ("180M", 180_000_000))
    write_family(make.root, {"identity": -0.03})
    for size, n in sizes:
        write_pool(make.root / "sizes" / size, {"identity": 0.3 * math.log(0.75)}, seeds=(1337, 1338)[:1 + (size == "180M")],
                   base=9 - 0.3 * math.log(n), n_params=n, n_params_non_embedding=n // 2)
    content, text, _, _ = make()
    assert content["sizes"]["at_largest"]["identity"]["seeds"] == 1
    assert "; 3 sizes, 0.02M tokens, 1 seed | holds partly |" in text
    for size, n in sizes[:2]:
        write_pool(make.root / "sizes" / size, {"identity": 0.3 * math.log(0.75)}, seeds=(1338,), base=9 - 0.3 * math.log(n),
                   n_params=n, n_params_non_embedding=n // 2)
    content, text, _, _ = make()
    assert content["sizes"]["at_largest"]["identity"]["seeds"] == 2
    assert "; 3 sizes, 0.02M tokens, 2 seeds | holds |" in text


def test_systems_of_like_names_have_sizes_of_their_own(make):
    for size, n in (("20M", 20_000_000), ("82M", 82_000_000)):
        write_pool(make.root / "sizes" / size, {"svformer": 0.1, "svformer_gqa2": 0.2}, seeds=(1337,),
                   base=9 - 0.3 * math.log(n), n_params=n, n_params_non_embedding=n // 2)
    saving = make()[0]["sizes"]["saving"]
    assert {s: len(x["n_params"]["points"][1]["x"]) for s, x in saving.items()} == {"svformer": 2, "svformer_gqa2": 2}


def test_sizes_without_vanilla_or_a_second_size(make):
    write_pool(make.root / "sizes/82M", {"identity": -0.03})
    content, _, _, err = make()
    assert content["sizes"]["saving"] == {} and "sizes/identity: it and vanilla need two sizes" in err
    shutil.rmtree(make.root / "sizes/82M/vanilla")
    content, _, _, err = make()
    assert "left out: sizes: --baseline=vanilla" in err
    assert verdicts(content)["ResFormer (identity) reaches vanilla's loss with fewer parameters"].startswith("not testable")


def test_verdicts():
    def d(*values):
        return records.difference(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0))
    holds, partly, unseen, untestable = claims.HOLDS, claims.PARTLY, claims.NOT_SEEN, claims.NOT_TESTABLE
    assert [claims.verdict(x, -1) for x in (d(-1, -1.1, -0.9), d(-1, -3, 0.5), d(-1), d(1), d(0.0), None)] == \
        [holds, *[untestable] * 5]  # the noise is not known
    sd = {"std": 0.5, "df": 4}  # 2.7764 times it for one pair, over the root of their number
    for values, v in (((-1.4,), partly), ((-1.3,), untestable), ((1.3,), untestable), ((1.4,), unseen),
                      ((-1, -3, 0.5), partly), ((-0.6, -0.58), holds), ((0.6, 0.58), unseen), ((1.2, -2.8), untestable),
                      ((-2.0, 0.01), partly)):
        assert claims.verdict(d(*values), -1, sd) == v, values
    assert claims.verdict(d(0.6, 0.58), -1) == unseen
    for several, one in (((holds, holds), holds), ((holds, untestable), partly), ((holds, unseen), partly),
                         ((holds, unseen, unseen), unseen), ((untestable,), untestable), ((unseen, untestable), unseen),
                         ((holds, untestable, untestable), untestable), ((holds, holds, untestable, untestable), partly)):
        assert claims.together(several) == one


@pytest.mark.parametrize("args, words", [
    (["nowhere"], "nowhere: no such folder"), ([], "found none"), (["a", "b"], "found a b"),
    (["."], "holds none of family/"), (["results", "--readme=no.md"], "no.md"),
    (["results", "--readme=bare.md"], "what reproduces"),
    (["results", "--redme="], "did you mean readme")])
def test_bad_paths_end_with_one_line(args, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results/family").mkdir(parents=True)
    (tmp_path / "bare.md").write_text("no markers\n")
    (tmp_path / "good.md").write_text(f"{report.START}\n{report.END}\n")
    args = args if any("--re" in a for a in args) else [*args, "--readme=good.md"]
    code, _, err = run_command(report, capsys, monkeypatch, *args)
    assert code == 2 and err.startswith("error: ") and len(err.splitlines()) == 1 and words in err and "Traceback" not in err
    assert not (tmp_path / "results/report.md").exists()


def test_nothing_but_a_folder_is_enough(make):
    (make.root / "family").mkdir(parents=True)
    content, text, readme, _ = make()
    assert set(verdicts(content).values()) == {"not testable at this budget"} and "family/vanilla: no finished run" in text
    with pytest.raises(UserError, match="no such folder"):
        records.Records("nowhere")


def test_a_list_alone_has_its_section_and_misses_nothing(make):
    """Somebody's own runs at several learning rates, of systems with names of their own."""
    for rate in (1e-3, 2e-3):
        write_pool(make.root / "rates" / f"{rate:g}", {"mine": -0.1 * (rate == 2e-3)}, learning_rate=rate, min_lr=rate / 10)
    content, text, _, _ = make()
    assert content["left_out"] == [] and "| 0.002 | mine |" in text and "None of them was measured here." in text
    assert content["rates"]["best_plain"] == content["rates"]["best_stronger"] == {}  # they would say the same
    assert content["rates"]["best"]["mine"]["rate"] == "0.002" and "\n| --- |" not in text.partition("## Learning rates")[0]


@pytest.mark.parametrize("folder", ["results", "results/quickstart"])
def test_committed_report_is_what_the_records_give(folder, tmp_path, capsys, monkeypatch):
    readme = shutil.copy(os.path.join(REPO, "README.md"), tmp_path / "README.md")
    monkeypatch.chdir(REPO)
    code, _, err = run_command(report, capsys, monkeypatch, folder, f"--out_dir={tmp_path}",
                               f"--readme={readme if folder == 'results' else ''}")
    assert code == 0, err
    for name in ("report.json", "report.md"):
        with open(os.path.join(REPO, folder, name), encoding="utf-8") as f:
            assert (tmp_path / name).read_text(encoding="utf-8") == f.read(), f"run python -m analysis.report {folder} ({name})"
    with open(os.path.join(REPO, "README.md"), encoding="utf-8") as f:
        assert readme.read_text(encoding="utf-8") == f.read()
    for picture in re.findall(r"!\[[^]]*\]\((\w+\.png)\)", (tmp_path / "report.md").read_text(encoding="utf-8")):
        assert os.path.exists(os.path.join(REPO, folder, picture))
