"""The analyses that read logs: learned weights, relative loss with its critical point, scaling fits."""
import json
import math
import os
import shutil
import statistics
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import train
from analysis import common, kv_cache, lambdas, relative_loss, scaling
from configurator import UserError, command


def run_command(module, capsys, monkeypatch, *args):
    """(exit code, stdout, stderr) of python -m analysis.MODULE args"""
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, args)])
    code = 0
    try:
        command(module.main)
    except SystemExit as e:
        code = e.code
    out = capsys.readouterr()
    return code, out.out, out.err


def written(folder, name):
    """name.json's content, which must hold finite numbers only, beside a picture."""
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")

    def refuse(word):
        raise AssertionError(f"{word} in {name}.json")
    return json.loads((folder / f"{name}.json").read_text(), parse_constant=refuse)


def rewrite_log(folder, change, end=None):
    """A run's log.jsonl with every line passed through change (None: the line goes), up to iteration end."""
    lines = [json.loads(x) for x in (folder / "log.jsonl").read_text().splitlines()]
    lines = [y for x in lines if (end is None or x["iter"] <= end) and (y := change(x)) is not None]
    (folder / "log.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))


@pytest.fixture
def runs(trained, tmp_path):
    """A copy of the trained runs, to change."""
    return shutil.copytree(trained / "runs", tmp_path / "runs")


# ---------------------------------------------------------------------------------------------------------------------
# relative loss


def test_moving_average_of_a_ramp_is_the_ramp():
    x = np.arange(50)
    for w in (1, 4, 7):
        mean_x, mean_y = train.smooth(x, 3 * x - 5, w)
        assert len(mean_y) == 50 - w + 1
        np.testing.assert_allclose(mean_y, 3 * mean_x - 5)
        np.testing.assert_allclose(mean_x[0], (w - 1) / 2)


def test_critical_point_of_a_known_crossing():
    x = np.arange(0, 1000, 10)
    point = relative_loss.critical_point(x, 1e-3 * (x - 333))
    assert point["kind"] == "crossed" and point["iteration"] == pytest.approx(333) and point["crossings"] == 1
    # at a point that is exactly zero; the first of several; the start above zero is no crossing
    assert relative_loss.critical_point([0, 1, 2], [-1, 0, 1])["iteration"] == 1
    wave = relative_loss.critical_point(x, -np.sin(2 * np.pi * (x - 5) / 400))  # down at 5, up at 205, 605
    assert wave["iteration"] == pytest.approx(205, abs=0.01) and wave["crossings"] == 2


def test_critical_point_is_extrapolated_from_the_last_points():
    x = np.arange(2000.0)
    curve = np.where(x < 1500, -1 - x / 1000, -0.5 + 1e-4 * (x - 1500))  # falls, then rises to 0 at 6500
    point = relative_loss.critical_point(x, curve, fit_last=500)
    assert point["kind"] == "extrapolated" and point["iteration"] == pytest.approx(6500)
    assert relative_loss.critical_point(x, curve, fit_last=100)["iteration"] == pytest.approx(6500)
    # at most half of the curve: 5 of 10 points, on a line to 30
    assert relative_loss.critical_point(np.arange(10), [-9] * 5 + [-2.5, -2.4, -2.3, -2.2, -2.1])["iteration"] == \
        pytest.approx(30)


@pytest.mark.parametrize("y", [[-1.0] * 40, -np.arange(1, 41) / 40, np.arange(1, 41) / 40, [1.0] * 20 + [-0.5] * 20, [-1.0],
                               []])
def test_critical_point_not_reached(y):
    point = relative_loss.critical_point(np.arange(len(y)), y)
    assert point == {"kind": "not reached", "iteration": None, "crossings": 0}


def test_a_run_is_exactly_as_good_as_itself(trained):
    for run in common.find_runs([str(trained / "runs/svformer"), str(trained / "runs/vanilla")]):
        curves = relative_loss.compare(run.log, run.log)
        assert {"train", "val", "val_mean", "val/C4", "val/Book"} <= set(curves)
        for curve in curves.values():
            assert len(curve) > 1 and set(curve.values()) == {0.0}


def test_t_intervals():
    # values of the printed tables of Student's t
    for df, t in ((1, 12.7062), (2, 4.30265), (9, 2.262), (11, 2.201), (30, 2.042), (1000, 1.962)):
        assert relative_loss.t_95(df) == pytest.approx(t, abs=0.003)
    assert relative_loss.t_interval([1.0]) is None
    assert relative_loss.t_interval([1.0, 3.0]) == pytest.approx((2 - 12.7062, 2 + 12.7062))  # s / sqrt(2) = 1
    rng = np.random.default_rng(0)
    held = [low <= 5 <= high for low, high in (relative_loss.t_interval(list(rng.normal(5, 2, 3))) for _ in range(2000))]
    assert 0.935 < statistics.fmean(held) < 0.965


def test_relative_loss_pairs_seeds(runs, capsys, monkeypatch):
    code, out, err = run_command(relative_loss, capsys, monkeypatch, runs, "--window=7")
    assert code == 0 and err.count("left out: it was trained without a baseline") == 2
    content = written(runs, "relative_loss")
    assert list(content) == ["resformer", "svformer", "learnable", "gqa"] and "svformer" in out and "Book" in out
    facts = content["svformer"]
    assert facts["seeds"] == [1, 2] and facts["baseline"] == "vanilla" and facts["window"] == 7
    differences = []
    for seed in (1, 2):
        (steps, evals), (base_steps, base_evals) = (train.read_log(runs / s / f"seed{seed}") for s in ("svformer", "vanilla"))
        differences.append([steps[i]["loss"] - base_steps[i]["loss"] for i in range(30)])
        end = evals[30]["val"]["C4"] - base_evals[30]["val"]["C4"]
        assert facts["final"]["val/C4"]["seeds"][seed - 1] == pytest.approx(end)
    means = [np.mean(differences, axis=0)[i:i + 7].mean() for i in range(24)]
    curve = facts["curves"]["train"]
    np.testing.assert_allclose(curve["iteration"], range(3, 27))
    np.testing.assert_allclose(curve["mean"], means, atol=1e-12)
    each = [[np.mean(d[i:i + 7]) for i in range(24)] for d in differences]
    np.testing.assert_allclose([curve["low"], curve["high"]], [np.min(each, axis=0), np.max(each, axis=0)], atol=1e-12)
    assert curve["low"] != curve["high"]
    finals = [np.mean(d[-7:]) for d in differences]
    low, high = facts["final"]["train"]["interval_95"]
    assert (high - low) / 2 == pytest.approx(12.7062 * abs(finals[0] - finals[1]) / 2)
    point = facts["critical_point"]
    assert point["iteration"] is None or point["tokens"] == pytest.approx(point["iteration"] * 4 * 32)


def test_iterations_of_another_schedule_are_not_compared():
    """One of the two was resumed with another learning rate or batch from iteration 2 on."""
    base = {i: {"loss": 2.0, "lr": 0.1, "tokens": 10 * i} for i in range(4)}
    for key in ("lr", "tokens"):
        lines = {i: {**line, "loss": 1.5, key: line[key] + (1 if i > 1 else 0)} for i, line in base.items()}
        assert relative_loss.difference(lines, base, lambda line: line["loss"]) == {0: -0.5, 1: -0.5}


def test_it_says_which_window_and_how_much_of_a_torn_log_were_used(runs, capsys, monkeypatch):
    code, _, err = run_command(relative_loss, capsys, monkeypatch, runs / "gqa", runs / "svformer", "--window=50",
                               f"--out_dir={runs}")
    assert code == 0 and sorted(line.split(":")[0] for line in err.splitlines()) == ["gqa", "svformer"]
    assert err.count("over 50 iterations is longer than its curve: 30 were used") == 2
    content = written(runs, "relative_loss")
    assert content["gqa"]["window"] == 30 and content["gqa"]["curves"]["train"]["iteration"] == pytest.approx([14.5])
    code, _, err = run_command(relative_loss, capsys, monkeypatch, runs / "gqa", "--window=30", f"--out_dir={runs}")
    assert code == 0 and not err
    rewrite_log(runs / "learnable/seed1", lambda x: x, end=20)
    with open(runs / "learnable/seed1/log.jsonl", "a") as f:
        f.write('{"iter": 21, "lo')
    for module in (relative_loss, lambdas, scaling):
        code, _, err = run_command(module, capsys, monkeypatch, runs, f"--out_dir={runs}")
        line, = (x for x in err.splitlines() if "torn" in x)
        assert code == 0 and "learnable/seed1/log.jsonl: its last line is torn" in line and "up to iteration 20" in line


def test_the_picture_marks_where_a_curve_crosses_zero(runs, capsys, monkeypatch):
    """resformer crosses at 12, svformer would after the end, gqa is behind all along."""
    for name, difference in (("resformer", lambda i: i - 12), ("svformer", lambda i: i / 10 - 12), ("gqa", lambda i: 1)):
        for seed in (1, 2):
            base = train.read_log(runs / f"vanilla/seed{seed}")[0]
            rewrite_log(runs / name / f"seed{seed}", lambda x, base=base, difference=difference: {
                **x, "loss": base[x["iter"]]["loss"] + difference(x["iter"])} if "loss" in x else x)
    panels = []
    monkeypatch.setattr("analysis.plot.draw", lambda path, found, *_: panels.extend(found) or open(path, "w").close())
    code, _, _ = run_command(relative_loss, capsys, monkeypatch, *(runs / s for s in ("resformer", "svformer", "gqa")),
                             "--window=1", f"--out_dir={runs}")
    assert code == 0 and panels[0]["at"] == {"resformer": pytest.approx(12)}
    assert "at" not in panels[1] and panels[2]["apart"]  # sources have no order


def test_relative_loss_of_a_moved_sweep_and_of_a_named_baseline(runs, capsys, monkeypatch, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.move(runs, moved)
    for file in moved.glob("*/*/config.json"):  # where they were trained, nothing is left
        config = json.loads(file.read_text())
        there = {k: config[k] and "gone/" + "/".join(config[k].split("/")[-2:]) for k in ("out_dir", "baseline")}
        file.write_text(json.dumps({**config, **there}))
    code, _, err = run_command(relative_loss, capsys, monkeypatch, moved / "svformer", f"--out_dir={tmp_path / 'a'}")
    own = written(tmp_path / "a", "relative_loss")
    assert code == 0 and not err and own["svformer"]["baseline"] == "vanilla" and len(own["svformer"]["seeds"]) == 2
    code, _, err = run_command(relative_loss, capsys, monkeypatch, moved, "--baseline=gqa", f"--out_dir={tmp_path / 'b'}")
    assert code == 0 and err.count("it is the baseline") == 2
    named = written(tmp_path / "b", "relative_loss")
    assert list(named) == ["vanilla", "resformer", "svformer", "learnable"]
    code, _, err = run_command(relative_loss, capsys, monkeypatch, moved / "svformer", f"--out_dir={tmp_path / 'c'}",
                               f"--baseline={moved / 'gqa/seed1'}")  # of another seed than the second run
    assert code == 0 and "seed2: left out" in err and "seed (1 there, 2 here)" in err
    assert written(tmp_path / "c", "relative_loss")["svformer"]["seeds"] == [1]
    shutil.rmtree(moved / "vanilla")
    code, out, err = run_command(relative_loss, capsys, monkeypatch, moved / "resformer")
    assert code == 0 and err.count("its baseline") == 2 and "is not there" in err and "nothing to show" in out


def test_relative_loss_with_an_unfinished_baseline_or_seed(runs, capsys, monkeypatch):
    for seed in (1, 2):
        rewrite_log(runs / "vanilla" / f"seed{seed}", lambda x: x, end=19)
    code, _, err = run_command(relative_loss, capsys, monkeypatch, runs / "gqa")
    assert code == 0 and err.count("compared up to iteration 19 of 30: ") == 2 and "vanilla/seed2 ends there" in err
    facts = written(runs / "gqa", "relative_loss")["gqa"]
    assert facts["curves"]["train"]["iteration"][-1] == 17 and facts["final"]["val"]["iteration"] == 10  # window 5
    rewrite_log(runs / "gqa/seed2", lambda x: x, end=12)
    code, _, err = run_command(relative_loss, capsys, monkeypatch, runs / "gqa")
    assert code == 0 and "seed2: left out: it ends at iteration 12, another seed at 19" in err
    assert written(runs / "gqa", "relative_loss")["gqa"]["seeds"] == [1]


def test_relative_loss_leaves_other_settings_and_bad_steps_out(runs, capsys, monkeypatch):
    file = runs / "resformer/seed1/config.json"
    config = json.loads(file.read_text())
    config["comparable"]["warmup_iters"] = 4
    file.write_text(json.dumps(config))
    rewrite_log(runs / "svformer/seed1", lambda x: {**x, "loss": None} if x["iter"] == 8 and "loss" in x else x)
    code, _, err = run_command(relative_loss, capsys, monkeypatch, runs, "--window=1")
    assert code == 0 and "resformer/seed1: left out" in err and "warmup_iters (3 there, 4 here)" in err
    content = written(runs, "relative_loss")
    assert content["resformer"]["seeds"] == [2]
    assert content["svformer"]["curves"]["train"]["iteration"] == [i for i in range(30) if i != 8]


# ---------------------------------------------------------------------------------------------------------------------
# learned weights


def test_lambdas(runs, capsys, monkeypatch):
    weights = {"2": {"1": 1.0, "2": 0.5}, "3": {"1": 1.5, "3": 0.5}, "4": {"1": 2.0, "4": 0.0}}  # λ2 = 0: no ratio
    rewrite_log(runs / "learnable/seed2", lambda x: {**x, "value_mix": weights} if x["iter"] == 30 and "val" in x else x)
    code, out, err = run_command(lambdas, capsys, monkeypatch, runs)
    assert code == 0 and "resformer/seed1: left out: its mixing weights are fixed (value_mix=identity)" in err
    assert "svformer/seed2: left out: it has no mixing weights" in err and "1.5000" in out
    content = written(runs, "lambdas")
    assert list(content) == ["learnable/seed1", "learnable/seed2"]
    layers = content["learnable/seed2"]["layers"]
    assert list(layers) == ["2", "3", "4"] and content["learnable/seed2"]["iterations"] == [0, 10, 20, 30]
    assert [layers[n]["ratio"] for n in layers] == [2.0, 3.0, None] and layers["3"]["weights"] == {"1": 1.5, "3": 0.5}
    assert layers["3"]["training"]["ratio"][0] == 1.0 and layers["3"]["training"]["lambda1"][-1] == 1.5
    assert content["learnable/seed1"]["layers"]["2"]["lambda1"] == \
        train.read_log(runs / "learnable/seed1")[1][30]["value_mix"]["2"]["1"] != 0.5  # learned something
    code, out, err = run_command(lambdas, capsys, monkeypatch, runs / "vanilla")
    assert code == 0 and "nothing to show" in out


def test_lambdas_of_triangles(runs, capsys, monkeypatch):
    """Dense's rows are summed up to V_1's weight and the own one, and DenseFormer's flat weights come in rows of n + 1."""
    dense = {str(n): {str(i): 10.0 * n + i for i in range(1, n + 1)} for n in (2, 3, 4)}
    alpha = [10.0 * n + i for n in (1, 2, 3, 4) for i in range(n + 1)]
    for name, options, line in (("dense", {"value_residual": True, "value_mix": "dense"}, {"value_mix": dense}),
                                ("denseformer", {"denseformer": True}, {"alpha": alpha})):
        shutil.copytree(runs / "vanilla/seed1", runs / name / "seed1")
        file = runs / name / "seed1/config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **options}))
        rewrite_log(runs / name / "seed1", lambda x, line=line: {**x, **line} if "val" in x else x)
    code, out, err = run_command(lambdas, capsys, monkeypatch, runs / "dense", runs / "denseformer", f"--out_dir={runs}")
    assert code == 0 and not err and "+31.000 +32.000 +33.000" in out and "+40.000 +41.000" in out
    content = written(runs, "lambdas")
    layer = content["dense/seed1"]["layers"]["3"]
    assert (layer["lambda1"], layer["lambda2"], list(layer["weights"].values())) == (31, 33, [31, 32, 33])
    layers = content["denseformer/seed1"]["layers"]
    assert list(layers["2"]["weights"].items()) == [("0", 20), ("1", 21), ("2", 22)]
    assert (layers["4"]["lambda1"], layers["4"]["lambda2"]) == (40, 44)


def test_a_source_of_several_layers_counts_as_one():
    assert lambdas.reduced("learnable", 4, {1: 0.25, 2: 0.25, 3: 0.25, 4: 0.5}) == (0.75, 0.5, 1.5)


# ---------------------------------------------------------------------------------------------------------------------
# scaling


def test_table_5(capsys, monkeypatch, tmp_path):
    code, out, err = run_command(scaling, capsys, monkeypatch, f"--out_dir={tmp_path}")
    assert code == 0 and not err
    lines = {tuple(line.split()[:2]): line.split()[-2:] for line in out.splitlines() if line.startswith(("T ", "R "))}
    assert [lines[m, s][0] for s in ("82M", "180M", "468M") for m in "TR"] == \
        ["2.7389", "2.7117", "2.5015", "2.4692", "2.2806", "2.2537"]
    assert [lines[m, s][1] for s in ("82M", "180M", "468M") for m in "TR"] == \
        ["3.0725", "3.0480", "2.8235", "2.7912", "2.5923", "2.5638"]
    total, other, *_ = written(tmp_path, "scaling")
    for result, published in ((total, (0.103, 0.112, 0.113, 0.130)), (other, (0.144, 0.155, 0.146, 0.156))):
        for form, value in zip(("line", "loglog", "piecewise", "offset"), published):
            assert result["forms"][form] == pytest.approx(value, abs=0.001)
        assert result["interval_95"] is None and result["interval_from"] == "range over fits only"
    assert "10.3%" in out and "range over fits only" in out and out.splitlines()[-1].startswith("no 95 % interval where")
    assert total["range"] == pytest.approx([0.103, 0.130], abs=0.001)


@pytest.mark.parametrize("module", [scaling, kv_cache], ids=["scaling", "kv_cache"])
def test_without_runs_nothing_is_left_beside_the_code(module, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    name = module.__name__.split(".")[1]
    assert run_command(module, capsys, monkeypatch)[0] == 0
    found = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.*"))
    assert found == [f"out/{name}/{name}.{ending}" for ending in ("json", "png")]


def points(x, y):
    return np.array(x, float), np.array(y, float)


SIZES = np.array([2e6, 1e7, 5e7, 8.2e7, 1.8e8, 4.68e8])


@pytest.mark.parametrize("truth", [0.161, 0.0, -0.122])
@pytest.mark.parametrize("x", [SIZES, SIZES[-3:], 20 * SIZES], ids=["6 sizes", "3 sizes", "tokens"])
def test_known_savings_are_recovered(x, truth):
    """System(x) = baseline(x / (1 - saving)): the same loss with that much less."""
    laws = {"line": lambda x: 7 - 0.25 * np.log(x), "loglog": lambda x: 20 * x ** -0.11,
            "offset": lambda x: 400 * x ** -0.3 + 1.7, "piecewise": lambda x: 7 - 0.25 * np.log(x)}
    for form, law in laws.items():
        base, system = points(x, law(x)), points(x, law(x / (1 - truth)))
        assert scaling.saving(form, base, system) == pytest.approx(truth, abs=1e-5), form
    numbers = scaling.fit_offset(x, laws["offset"](x))[2]
    assert numbers["b"] == pytest.approx(0.3, rel=1e-4) and numbers["c"] == pytest.approx(1.7, rel=1e-3)
    assert numbers["a"] == pytest.approx(400, rel=1e-2)


def test_savings_do_not_depend_on_units():
    """A factor on x changes nothing; a constant on both losses nothing but for the logarithm of the loss."""
    rng = np.random.default_rng(1)
    base, system = (points(SIZES, 400 * SIZES ** -0.3 + low + rng.normal(0, 0.003, 6)) for low in (1.7, 1.67))
    for form in scaling.FORMS:
        plain = scaling.saving(form, base, system)
        times = scaling.saving(form, points(7 * SIZES, base[1]), points(7 * SIZES, system[1]))
        moved = scaling.saving(form, points(SIZES, base[1] + 1), points(SIZES, system[1] + 1))
        assert times == pytest.approx(plain, abs=1e-6)
        assert (moved == pytest.approx(plain, abs=1e-6)) == (form != "loglog")
        assert scaling.saving(form, base, base) == pytest.approx(0, abs=1e-9)


def test_savings_that_are_not_defined():
    rising, falling = points([1e6, 1e7, 1e8], [2, 2.1, 2.2]), points([1e6, 1e7, 1e8], [4, 3, 2.5])
    for form in scaling.FORMS:
        assert math.isnan(scaling.saving(form, falling, rising))
        assert math.isfinite(scaling.saving(form, falling, falling))
    assert math.isnan(scaling.saving("offset", points([1, 2], [4, 3]), points([1, 2], [4, 3])))  # two points, three numbers
    floor = points(SIZES, 400 * SIZES ** -0.3 + 2.8)  # its limit is above the baseline's final loss
    assert math.isnan(scaling.saving("offset", points(SIZES, 400 * SIZES ** -0.3 + 1.7), floor))


@pytest.mark.parametrize("form, law", [("line", lambda x: 7 - 0.25 * np.log(x)), ("offset", lambda x: 400 * x ** -0.3 + 1.7)])
def test_residual_intervals_hold_the_truth(form, law):
    rng, truth, held = np.random.default_rng(0), 0.15, []
    for _ in range(150 if form == "line" else 60):
        base, system = (points(SIZES, law(SIZES / (1 - s)) + rng.normal(0, 0.003, 6)) for s in (0, truth))
        low, high = scaling.residual_interval(form, base, system)
        held.append(low <= truth <= high)
    assert 0.9 <= statistics.fmean(held)
    if form == "line":
        assert statistics.fmean(held) <= 0.99  # and it is no wider than it has to be
    assert scaling.residual_interval(form, *[points(SIZES[:3], law(SIZES[:3]))] * 2) is None


def test_seed_intervals_hold_the_truth_and_pair_seeds():
    """A part of the noise is the seed's, the same in both systems: it cancels, since each seed is fitted on its own."""
    rng, truth, held, width = np.random.default_rng(0), 0.15, [], []
    for _ in range(200):
        base, system = {x: {} for x in SIZES[-3:]}, {x: {} for x in SIZES[-3:]}
        for seed in range(3):
            for x in base:
                shared = rng.normal(0, 0.02)
                base[x][seed] = 7 - 0.25 * np.log(x) + shared + rng.normal(0, 0.002)
                system[x][seed] = 7 - 0.25 * np.log(x / (1 - truth)) + shared + rng.normal(0, 0.002)
        result = scaling.analyse("line", base, system)
        assert result["interval_from"] == "3 seeds"
        low, high = result["interval_95"]
        held.append(low <= truth <= high)
        width.append(high - low)
    assert 0.9 <= statistics.fmean(held) <= 0.99 and statistics.median(width) < 0.06


@pytest.fixture
def sizes(runs, tmp_path):
    """vanilla and resformer at three sizes and three numbers of tokens; resformer's losses are those of 1.25 x its size."""
    root = tmp_path / "sizes"
    for system, less in (("vanilla", 0), ("resformer", 0.2)):
        for width, iters in ((32, 30), (64, 30), (128, 30), (32, 60), (32, 120)):
            folder = root / f"{system}_{width}_{iters}"
            shutil.copytree(runs / system / "seed1", folder)
            config = json.loads((folder / "config.json").read_text())
            config.update(n_embd=width, n_params=1000 * width, n_params_non_embedding=600 * width, max_iters=iters,
                          lr_decay_iters=iters)
            (folder / "config.json").write_text(json.dumps(config))
            loss = 5 - 0.3 * math.log(width / (1 - less)) - 0.2 * math.log(iters / 30)
            rewrite_log(folder, lambda x, loss=loss, iters=iters: {**x, "iter": iters, "val_mean": loss}
                        if x["iter"] == 30 else x)
    return root


def test_seeds_are_matched_where_systems_differ_in_size():
    """learnable has a few parameters more than vanilla: no x is both's, and yet the seeds are to be the same."""
    vanilla, learnable = {10: {1: 4.0, 2: 5.0}, 20: {1: 3.0, 2: 4.0}}, {11: {1: 3.9}, 21: {1: 2.9}}
    assert scaling.matched({"vanilla": vanilla, "learnable": learnable}, "") == [{10: {1: 4.0}, 20: {1: 3.0}}, learnable]


def test_a_folder_of_a_systems_name_is_that_system():
    run = SimpleNamespace(name=os.path.join("ablations", "x", "seed1"), system=os.path.join("ablations", "x"))
    assert scaling.system_name(run, ["ab", "x"]) == "x" and scaling.system_name(run, ["ab"]) == "ab"


def test_scaling_of_runs(sizes, capsys, monkeypatch):
    code, out, err = run_command(scaling, capsys, monkeypatch, sizes, "--form=offset")
    assert code == 0 and not err
    by_axis = {r["axis"]: r for r in written(sizes, "scaling")}
    assert set(by_axis) == {"n_params", "n_params_non_embedding", "tokens"} and "20.0%" in out
    assert all(r["system"] == "value_residual" and r["baseline"] == "vanilla" for r in by_axis.values())
    for axis in ("n_params", "n_params_non_embedding"):
        assert by_axis[axis]["forms"]["line"] == pytest.approx(0.2) and len(by_axis[axis]["points"][0]["x"]) == 3
    # the whole data curve lies lower by 0.3 ln(1 / 0.8), which 0.2 ln(1 / (1 - s)) makes up for
    assert by_axis["tokens"]["forms"]["line"] == pytest.approx(1 - 0.8 ** 1.5)
    assert by_axis["tokens"]["points"][0]["x"] == [30 * 128, 60 * 128, 120 * 128]
    code, _, err = run_command(scaling, capsys, monkeypatch, sizes, "--systems=vanilla,res", f"--out_dir={sizes / 'named'}")
    assert code == 0 and {r["system"] for r in written(sizes / "named", "scaling")} == {"res"}
    code, _, err = run_command(scaling, capsys, monkeypatch, sizes, "--loss=nonsense")
    assert code == 2 and "--loss=nonsense" in err and "val_mean, val_loss, C4, Book" in err
    code, _, err = run_command(scaling, capsys, monkeypatch, sizes, "--baseline=resformer")
    assert code == 2 and "there are vanilla, value_residual" in err


def test_scaling_leaves_out_what_does_not_count(sizes, capsys, monkeypatch):
    for name, change in (("vanilla_64_30", {"lr_decay_iters": 60}), ("vanilla_32_60", {"max_iters": 61, "lr_decay_iters": 61}),
                         ("resformer_128_30", {"block_size": 16})):
        file = sizes / name / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    shutil.copytree(sizes / "vanilla_128_30", sizes / "vanilla_twice")
    code, _, err = run_command(scaling, capsys, monkeypatch, sizes)
    assert code == 0
    for words in ("vanilla_64_30: left out: its learning rate had not decayed", "vanilla_32_60: left out: not finished",
                  "resformer_128_30: left out: its block_size is 16 and most runs' 32",
                  "vanilla_twice: left out: vanilla_128_30 is of the same"):
        assert words in err
    by_axis = {r["axis"]: r for r in written(sizes, "scaling")}
    assert by_axis["n_params"]["forms"]["line"] == pytest.approx(0.2)  # two sizes each: 32 and 128, 32 and 64
    assert by_axis["n_params"]["forms"]["offset"] is None


def more_seeds(sizes, name, **losses):
    """Copies of a run with other seeds and final losses: seed7=2.5."""
    for seed, loss in losses.items():
        shutil.copytree(sizes / name, sizes / f"{name}_{seed}")
        file = sizes / f"{name}_{seed}" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "seed": int(seed[4:])}))
        rewrite_log(file.parent, lambda x, loss=loss: {**x, "val_mean": loss} if "val" in x and x["iter"] == 30 else x)


def test_scaling_compares_the_same_seeds(sizes, capsys, monkeypatch):
    """A seed that one system alone has changes no estimate: losses far off would."""
    code, out, err = run_command(scaling, capsys, monkeypatch, sizes)
    before = written(sizes, "scaling")
    assert code == 0 and not err
    more_seeds(sizes, "vanilla_64_30", seed2=9.0, seed3=9.0)
    more_seeds(sizes, "resformer_128_30", seed2=9.0)
    code, _, err = run_command(scaling, capsys, monkeypatch, sizes)
    assert code == 0 and written(sizes, "scaling") == before
    assert sorted(err.splitlines()) == [
        "value_residual at 128,000 parameters: left out: seed 2: not there of vanilla and value_residual",
        "vanilla at 64,000 parameters: left out: seed 2, 3: not there of vanilla and value_residual"]


def test_scaling_of_seeds_of_which_some_are_everywhere(sizes, capsys, monkeypatch):
    """Seeds 1 and 2 are at every point, 3 at one: estimate and interval rest on 1 and 2."""
    for width, loss in ((32, 4.0), (64, 3.8), (128, 3.6)):
        more_seeds(sizes, f"vanilla_{width}_30", seed2=loss)
        more_seeds(sizes, f"resformer_{width}_30", seed2=loss - 0.05)
    code, _, err = run_command(scaling, capsys, monkeypatch, sizes)
    before = [r for r in written(sizes, "scaling") if r["axis"] != "tokens"]
    assert code == 0 and before[0]["interval_from"] == "2 seeds" and not err
    for name in ("vanilla", "resformer"):
        more_seeds(sizes, f"{name}_64_30", seed3=9.0)
    code, _, err = run_command(scaling, capsys, monkeypatch, sizes)
    assert code == 0 and [r for r in written(sizes, "scaling") if r["axis"] != "tokens"] == before
    for name in ("vanilla", "value_residual"):
        assert f"{name} at 64,000 parameters: left out: seed 3: not at every point of vanilla and value_residual" in err


def test_scaling_without_a_seed_in_common(sizes, capsys, monkeypatch):
    for file in sizes.glob("resformer*/config.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "seed": 5}))
    code, out, err = run_command(scaling, capsys, monkeypatch, sizes)
    assert code == 0 and "nothing to fit" in out and err.count("left out: seed 5: not there of") == 6


def test_scaling_of_one_size(trained, capsys, monkeypatch):
    code, out, err = run_command(scaling, capsys, monkeypatch, trained / "runs")
    assert code == 0 and "nothing to fit" in out and "GQA2: left out" in err and "shared_value: left out" in err


# ---------------------------------------------------------------------------------------------------------------------
# bad input


@pytest.mark.parametrize("module", [lambdas, relative_loss, scaling])
def test_bad_input_ends_with_one_line(module, runs, capsys, monkeypatch):
    def error(*args):
        code, _, err = run_command(module, capsys, monkeypatch, *args)
        assert code == 2 and err.splitlines()[-1].startswith("error: ") and "Traceback" not in err
        return err
    assert "no such folder" in error(runs / "nowhere")
    if module is not lambdas:
        assert "--baseline=vanila" in error(runs, "--baseline=vanila")
    if module is relative_loss:
        assert "--window=-1" in error(runs, "--window=-1") and "--fit_last=1" in error(runs, "--fit_last=1")
    with open(runs / "learnable/seed1/log.jsonl", "a") as f:
        f.write("{damaged\n")
    assert "learnable/seed1/log.jsonl: holds a line" in error(runs / "learnable/seed1")
    (runs / "learnable/seed1/log.jsonl").unlink()
    assert "learnable/seed1/log.jsonl: missing" in error(runs / "learnable/seed1")
    (runs / "learnable/seed1/config.json").write_text("{}")
    assert "learnable/seed1/config.json: not written by train.py" in error(runs / "learnable/seed1")


def test_a_baseline_that_is_damaged_takes_its_runs_along(runs, capsys, monkeypatch):
    for file in ("log.jsonl", "config.json"):
        (runs / "vanilla/seed1" / file).write_text("[]\n")
        code, _, err = run_command(relative_loss, capsys, monkeypatch, runs / "gqa")
        assert code == 0 and "seed1: left out: its baseline: " in err and file in err
        assert written(runs / "gqa", "relative_loss")["gqa"]["seeds"] == [2]
        code, _, err = run_command(relative_loss, capsys, monkeypatch, runs / "gqa/seed1")
        assert code == 2 and "error: no run is left whose baseline can be read" in err


def test_systems_of_seeds_alone(trained):
    assert {r.system for r in common.find_runs([str(trained / "runs/gqa")])} == {"gqa"}
    with pytest.raises(UserError, match="no such folder"):
        relative_loss.find_baseline(None, [], "nowhere")
