"""What the analyses share: finding runs, windows, output. Each analysis has its own test file."""
import json
import shutil

import numpy as np
import pytest
from matplotlib.figure import Figure

from analysis import (
    common,
    concentration,
    evaluate,
    kv_cache,
    lambdas,
    plot,
    relative_loss,
    scaling,
    similarity,
    spectrum,
)
from configurator import UserError, command


def test_find_runs_in_order_of_their_list_with_names_and_systems(trained):
    runs = common.find_runs([str(trained / "runs")])
    assert [r.name for r in runs] == [f"{s}/seed{n}" for s in ("vanilla", "resformer", "svformer", "learnable", "gqa")
                                      for n in (1, 2)]
    assert [r.system for r in runs][:3] == ["vanilla", "vanilla", "resformer"]
    assert runs[4].shape.shared_value and runs[4].model().config == runs[4].shape
    single = common.find_runs([str(trained / "runs/gqa/seed1")])
    assert [r.name for r in single] == ["gqa/seed1"]  # also alone it is not without its system
    twice = common.find_runs([str(trained / "runs/gqa"), str(trained / "runs/gqa/seed1")])
    assert [r.name for r in twice] == ["gqa/seed1", "gqa/seed2"]


def test_a_run_repeated_as_one_of_several_seeds_counts_once(trained, tmp_path, capsys):
    """As when a list of runs was trained, and then again with --seeds."""
    for seed in (1, 2):
        shutil.copytree(trained / f"runs/vanilla/seed{seed}", tmp_path / f"vanilla/seed{seed}")
    shutil.copytree(trained / "runs/vanilla/seed1", tmp_path / "vanilla", dirs_exist_ok=True)
    assert [r.path for r in common.find_runs([str(tmp_path)])] == [str(tmp_path / f"vanilla/seed{n}") for n in (1, 2)]
    assert "vanilla" in (err := capsys.readouterr().err) and "its seed1 below is the same system with the same seed" in err


@pytest.mark.parametrize("path, words", [("nowhere", "no such folder"), ("", "config.json is missing")])
def test_a_folder_without_runs_is_refused(tmp_path, path, words):
    with pytest.raises(UserError, match=words):
        common.find_runs([str(tmp_path / path)])


def test_a_run_without_config_json(trained, tmp_path):
    """One short line, as of a missing log.jsonl."""
    shutil.copytree(trained / "runs/vanilla/seed1", tmp_path / "run")
    (tmp_path / "run/config.json").unlink()
    with pytest.raises(UserError, match="config.json is missing") as e:
        common.needed(common.Run(str(tmp_path / "run"), str(tmp_path)), seed=int)
    assert str(e.value).count(str(tmp_path)) == 1


def test_windows_are_spread_over_the_bin(trained):
    config, runs = common.arguments(common.ModelOptions, [
        str(trained / "runs"), "--sequences=5", "--batch_size=2", "--length=16", "--bin=Book", "--device=cpu"])
    data = common.open_data(config, runs[0])
    ids = [b for b in common.windows(config, data)]
    assert [tuple(b.shape) for b in ids] == [(2, 16), (2, 16), (1, 16)]
    last = data.val["Book"].windows(16) - 1
    assert ids[0][0].tolist() == data.val["Book"].read([0], 16)[0, :-1].tolist()
    assert ids[-1][-1].tolist() == data.val["Book"].read([last], 16)[0, :-1].tolist()
    for option, words in (("--length=33", "block_size is 32"), ("--sequences=0", "at least 1"), ("--device=tpu", "device")):
        with pytest.raises(UserError, match=words):
            common.arguments(common.ModelOptions, [str(trained / "runs"), option])


def test_a_run_spelled_twice_counts_once(trained):
    path = str(trained / "runs/gqa/seed1")
    assert len(common.find_runs([path, path + "/", str(trained / "runs/../runs/gqa/seed1")])) == 1


@pytest.mark.parametrize("change, words", [
    ({"n_layer": 3}, "different n_layer"), ({"tokenizer": None}, "has no tokenizer"),
    *(({k: 1}, "not written by train.py") for k in ("value_layers", "value_source", "value_anchors"))])
def test_a_config_that_is_not_the_checkpoints_is_refused(trained, tmp_path, change, words):
    run = shutil.copytree(trained / "runs/vanilla/seed1", tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({k: v for k, v in {**config, **change}.items() if v is not None}))
    with pytest.raises(UserError, match=words):
        common.find_runs([str(run)])[0].model()


@pytest.mark.parametrize("line", [b'{"iter": 3}\n', b"\xff\xfe\x00\n", b'"loss"\n'])
def test_a_line_that_train_did_not_write_is_refused(trained, tmp_path, line):
    run = shutil.copytree(trained / "runs/vanilla/seed1", tmp_path / "run")
    with open(run / "log.jsonl", "ab") as f:
        f.write(line)
    with pytest.raises(UserError, match=r"log\.jsonl: holds a line"):
        assert common.find_runs([str(run)])[0].log


def test_export_never_replaces_a_run(trained, tmp_path, monkeypatch, capsys):
    from analysis import export
    run = shutil.copytree(trained / "runs/vanilla/seed1", tmp_path / "run")
    before = (run / "config.json").read_bytes()
    monkeypatch.setattr("sys.argv", ["export", str(run), f"--out_dir={run}"])
    with pytest.raises(SystemExit) as end:
        command(export.main)
    assert end.value.code == 2 and "holds a run" in capsys.readouterr().err and (run / "config.json").read_bytes() == before


def test_an_out_dir_that_is_a_file_is_refused_first(trained, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--out_dir=.*is a file"):
        common.arguments(common.Options, [str(trained / "runs"), f"--out_dir={tmp_path}/file"])


def test_a_picture_that_fails_leaves_the_json_before_as_it_was(tmp_path):
    def write(content, draw):
        common.write(common.Options(out_dir=str(tmp_path)), [], "x", ["a"], [[1]], content, draw)

    def fail(path):
        open(path, "w").write("half")
        raise ValueError("no picture")
    write({"a": 1}, lambda path: plot.curves(path, {"a": [([0, 1], [0, 1])]}, "x", "y", ""))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert sorted(before) == ["x.json", "x.png"]
    with pytest.raises(ValueError, match="no picture"):
        write({"a": 2}, fail)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def no_picture(path, *_, **options):
    """Instead of plot.draw, which takes most of an analysis's time, where the picture is not what is tested."""
    open(path, "wb").close()


LOGS = {lambdas: "lambdas", relative_loss: "relative_loss", scaling: "scaling"}
CHECKPOINTS = {concentration: "concentration", evaluate: "evaluate"}
DAMAGES = [("config.json", b"{"), ("config.json", b"[]"), ("config.json", b"\xff"), ("config.json", b"{}"),
           ("log.jsonl", b"{damaged\n"), ("log.jsonl", None), ("ckpt.pt", b"PK cut"), ("ckpt.pt", None)]
READS = {"config.json": [*LOGS, *CHECKPOINTS, kv_cache], "log.jsonl": list(LOGS), "ckpt.pt": list(CHECKPOINTS)}


@pytest.mark.parametrize("file, content, module", [
    pytest.param(file, content, module, id=f"{file} {content} {module.__name__.split('.')[1]}")
    for file, content in DAMAGES for module in READS[file]])
def test_a_damaged_run_is_named_and_the_others_go_on(trained, tmp_path, monkeypatch, capsys, file, content, module):
    """An exit code 2 with one reason when none is left: the run's own where it is alone."""
    monkeypatch.setattr(plot, "draw", no_picture)

    def run_on(*paths):
        options = ["--device=cpu"] if module in (*CHECKPOINTS, kv_cache) else []
        options += ["--sequences=1"] if module in CHECKPOINTS else []
        monkeypatch.setattr("sys.argv", [module.__name__, *map(str, paths), *options, f"--out_dir={tmp_path}"])
        code = 0
        try:
            command(module.main)
        except SystemExit as e:
            code = e.code
        return code, capsys.readouterr().err

    runs = tmp_path / "runs"
    for name in ("vanilla/seed1", "learnable/seed1", "learnable/seed2"):
        shutil.copytree(trained / "runs" / name, runs / name)
    (runs / "learnable/seed2/config.json").write_bytes((runs / "learnable/seed1/config.json").read_bytes())  # vanilla/seed1's

    def damage(folder):
        (folder / file).unlink() if content is None else (folder / file).write_bytes(content)

    damage(runs / "learnable/seed2")
    code, err = run_on(runs)
    line = next(x for x in err.splitlines() if x.startswith("learnable/seed2: left out: "))
    assert code == 0 and file in line and "error" not in err
    code, err = run_on(runs / "learnable/seed2")
    assert code == 2 and file in err and err.startswith("error: ") and err.count("\n") == 1
    damage(runs / "learnable/seed1")
    code, err = run_on(runs / "learnable")
    assert code == 2 and err.count("left out: ") == 2 and err.splitlines()[-1].startswith("error: none of these ")


def change(path, line, key, value):
    """Put value at key (outer.inner) of a JSON file, or of the last line of log.jsonl that has it."""
    texts = path.read_text().splitlines() if line else [path.read_text()]
    outer, _, inner = key.partition(".")
    at = max(i for i, text in enumerate(texts) if outer in json.loads(text))
    content = json.loads(texts[at])
    (content[outer] if inner else content)[inner or outer] = value
    texts[at] = json.dumps(content)
    path.write_text("\n".join(texts) + "\n")


@pytest.mark.parametrize("file, key, value", [
    *(("config.json", key, value) for key, value in (
        ("rel_window", "x"), ("tokens_per_iter", "x"), ("max_iters", "x"), ("comparable", 7), ("baseline", 7), ("out_dir", 7),
        ("data", 7), ("seed", [1]), ("tokenizer", 7))),
    *(("log.jsonl", key, value) for key, value in (
        ("loss", "x"), ("loss", float("nan")), ("val_loss", "x"), ("val_mean", float("inf")), ("val", [1]), ("val.C4", "x"),
        ("value_mix", 7), ("value_mix", [1]), ("value_mix", {"2": {}}), ("value_mix.3", {"1": None, "3": None}),
        ("value_mix.2", {"1": 0.5}), ("value_mix", {"a": {"1": 0.5}}), ("alpha", 7), ("alpha", [0.1] * 5),
        ("alpha", "x")))], ids=str)
def test_a_value_that_train_does_not_write_is_damage(trained, tmp_path, monkeypatch, capsys, file, key, value):
    """In any file, of any type: one line that names the file, exit code 2, nothing written."""
    run = shutil.copytree(trained / "runs/learnable/seed1", tmp_path / "run")
    if key == "alpha":
        for name, more in (("config.json", ("denseformer", True)), ("log.jsonl", None)):
            texts = (run / name).read_text().splitlines() if more is None else [(run / name).read_text()]
            found = [json.loads(text) for text in texts]
            for x in found:
                if more or "val" in x:
                    x[more[0] if more else "alpha"] = more[1] if more else [0.1] * 14
            (run / name).write_text("\n".join(map(json.dumps, found)) + "\n")
    change(run / file, file == "log.jsonl", key, value)
    for module in LOGS if file == "log.jsonl" else [*LOGS, *CHECKPOINTS]:
        monkeypatch.setattr("sys.argv", [module.__name__, str(run), f"--out_dir={tmp_path}/out"])
        with pytest.raises(SystemExit) as end:
            command(module.main)
        err = capsys.readouterr().err
        assert end.value.code == 2 and file in err and err.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["learning_rate", "lr_decay_iters", "n_params", "n_params_non_embedding", "decay_lr"])
def test_scaling_names_what_a_config_lacks(trained, tmp_path, monkeypatch, capsys, key):
    runs = shutil.copytree(trained / "runs/vanilla", tmp_path / "runs")
    change(runs / "seed1/config.json", False, key, None)
    monkeypatch.setattr("sys.argv", ["scaling", str(runs), f"--out_dir={tmp_path}"])
    command(scaling.main)
    assert f"seed1: left out: config.json has no usable {key}" in capsys.readouterr().err


@pytest.mark.parametrize("module, options", [(lambdas, []), (concentration, ["--sequences=1", "--device=cpu"])])
def test_an_out_dir_that_cannot_be_written_is_refused_before_the_work(trained, tmp_path, monkeypatch, capsys, module, options):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("sys.argv", ["x", str(trained / "runs/learnable"), f"--out_dir={tmp_path}/file/out", *options])
    monkeypatch.setattr(common, "write", lambda *args: pytest.fail("measured first"))
    with pytest.raises(SystemExit) as end:
        command(module.main)
    assert end.value.code == 2 and f"--out_dir={tmp_path}/file/out" in capsys.readouterr().err
    common.check_writable(str(tmp_path / "a/b"))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("module", [concentration, similarity, spectrum])
@pytest.mark.parametrize("fault", ["no data", "another tokenizer", "no such bin", "prepared anew"])
def test_a_run_whose_data_cannot_be_used_is_left_out(trained, tmp_path, monkeypatch, capsys, module, fault):
    monkeypatch.setattr(plot, "draw", no_picture)
    runs = tmp_path / "runs"
    for name in ("vanilla/seed1", "resformer/seed1"):
        shutil.copytree(trained / "runs" / name, runs / name)
    options = ["--sequences=1", "--device=cpu", f"--out_dir={tmp_path}"]
    if fault == "no such bin":
        bins = shutil.copytree(trained / "bins", tmp_path / "bins")
        (bins / "val_Book.bin").unlink()
        meta = json.loads((bins / "meta.json").read_text())
        del meta["bins"]["val_Book"], meta["sources"]["Book"]
        (bins / "meta.json").write_text(json.dumps(meta))
        options += ["--bin=Book"]
    if fault == "prepared anew":
        ids = np.fromfile((bins := shutil.copytree(trained / "bins", tmp_path / "bins")) / "train.bin", np.uint16)
        ids[::7] = ids[::-7]
        ids.tofile(bins / "train.bin")
    change(runs / "vanilla/seed1/config.json", False, "tokenizer" if fault == "another tokenizer" else "data",
           {"no data": "nowhere", "another tokenizer": "gpt2"}.get(fault, str(tmp_path / "bins")))
    monkeypatch.setattr("sys.argv", ["x", str(runs), *options])
    command(module.main)
    assert "vanilla/seed1: left out: " in capsys.readouterr().err
    found = json.loads((tmp_path / f"{module.__name__.split('.')[1]}.json").read_text())["models"]
    assert {name.split(" ")[0] for name in found} == {"resformer/seed1"}


def test_a_name_has_one_colour_in_all_panels(tmp_path, monkeypatch):
    line = [([0, 1], [0, 1])]
    panels = drawn(tmp_path, monkeypatch, *[dict(series=dict.fromkeys(names, line)) for names in (
        ["a", "b", "c"], ["a", "c"], ["c", "d"], ["layer 1", "layer 2"], ["layer 2"])])
    looks = [{x.get_label(): (x.get_color(), x.get_linestyle()) for x in axes.lines} for axes in panels]
    for names in looks:
        assert len(set(names.values())) == len(names)
        for other in looks:
            assert all(other.get(name, look) == look for name, look in names.items())
    assert looks[3]["layer 1"] == looks[0]["a"]  # other names start again


@pytest.mark.parametrize("content", ["{", "7", "null", "[[1]]"])
def test_a_damaged_summary_costs_the_order_only(trained, tmp_path, content):
    runs = shutil.copytree(trained / "runs", tmp_path / "runs")
    (runs / "summary.json").write_text(content)
    assert len(common.find_runs([str(runs)])) == 10


@pytest.mark.parametrize("content", [None, b"PK cut"])
def test_the_length_is_that_of_the_runs_in_use(trained, tmp_path, content):
    short = shutil.copytree(trained / "runs/gqa/seed1", tmp_path / "runs/short")
    shutil.copytree(trained / "runs/vanilla/seed1", tmp_path / "runs/vanilla")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "block_size": 8}))

    def arguments(*options, **more):
        return common.arguments(common.ModelOptions, [str(tmp_path / "runs"), "--device=cpu", *options], **more)
    assert arguments()[0].length == 8
    config, runs = arguments(why_not=lambda config, shape: "it is short" if shape.block_size == 8 else "")
    assert config.length == 32 and [r.name for r in runs] == ["vanilla"]
    (short / "ckpt.pt").unlink() if content is None else (short / "ckpt.pt").write_bytes(content)
    config, runs = arguments()
    assert config.length == 32 and [r.name for r in runs] == ["vanilla"] and arguments("--length=32")[0].length == 32


def drawn(tmp_path, monkeypatch, *panels):
    """The axes of plot.draw's picture, laid out."""
    made = []
    monkeypatch.setattr(plot, "Figure", lambda **kwargs: made.append(Figure(**kwargs)) or made[-1])
    monkeypatch.setattr(Figure, "savefig", lambda self, path: None)  # drawing twice takes twice as long
    plot.draw(str(tmp_path / "x.png"), [dict(x="x", y="y", **panel) for panel in panels], "title", "caption " * 30)
    made[0].draw_without_rendering()
    return made[0].axes


@pytest.mark.parametrize("xs", [[0, 1, 2], ["CommonCrawl", "StackExchange", "Book"]], ids=["numbers", "words"])
@pytest.mark.parametrize("panels", [1, 4])
def test_a_long_legend_covers_nothing(tmp_path, monkeypatch, xs, panels):
    """Beyond LEGEND entries it is outside of the axes and their labels, inside of the picture; a short one stays inside."""
    for count in (plot.LEGEND, 12, 40):
        series = {f"system number {i}": [(xs, [i, i, i])] for i in range(count)}
        found = drawn(tmp_path, monkeypatch, *[dict(series=series)] * panels)
        for axes in found:
            legend = axes.get_legend().get_window_extent()
            assert legend.overlaps(axes.get_window_extent()) == (count <= plot.LEGEND)
            assert axes.get_window_extent().height > 230  # of about 400 with one row, of 300 with two
            if count > plot.LEGEND:
                assert not legend.overlaps(axes.xaxis.get_tightbbox())
                assert legend.y0 >= 0 and legend.x0 >= 0 and legend.x1 <= axes.figure.bbox.x1
                assert not any(legend.overlaps(other.get_tightbbox()) for other in found if other is not axes)


def test_a_name_like_another_has_its_colour_and_may_be_broken(tmp_path, monkeypatch):
    line = [([0, 1], [0, 1])]
    axes, = drawn(tmp_path, monkeypatch, dict(
        series={"a": line, "b": line, "b, too": line}, like={"b, too": "b"}, dashed={"b, too"}))
    a, b, too = axes.get_lines()
    assert a.get_color() != b.get_color() == too.get_color() and [x.get_linestyle() for x in (a, b, too)] == ["-", "-", "--"]


def test_points_apart_have_no_line_and_a_crossing_has_one(tmp_path, monkeypatch):
    apart, joined, lone = drawn(
        tmp_path, monkeypatch, dict(series={"a": [(["C4", "Book"], [1, 2])]}, apart=True),
        dict(series={"a": [([0, 1234], [-1, 1])], "b": [([0, 1], [1, 1])]}, at={"a": 617.2}),
        dict(series={"a": [([0, 1], [1, 1])] * 2, "b": []}, points={"a": ([0], [1]), "b": ([0], [2])}, hollow={"b"}))
    assert [(x.get_linestyle(), x.get_marker()) for x in lone.get_legend().get_lines()] == [("-", "None"), ("None", "o")]
    assert [(x.get_linestyle(), x.get_marker()) for x in apart.lines] == [("None", "o")]
    assert list(joined.lines[1].get_xdata()) == [617.2, 617.2]  # the vertical line
    assert [t.get_text() for t in joined.get_legend().get_texts()] == ["a (0 at 617)", "b"]


def test_a_name_like_another_has_its_colour_and_takes_none(tmp_path, monkeypatch):
    line = [([0, 1], [1, 2])]
    axes, = drawn(tmp_path, monkeypatch, dict(series={"none": [([], [])], "a": line, "a, paper": [([], [])], "b": line},
                                              points={"a, paper": ([0], [1])}, like={"a, paper": "a"}, hollow={"a, paper"}))
    assert [(x.get_label(), x.get_color()) for x in axes.lines] == [("a", "C1"), ("a, paper", "C1"), ("b", "C2")]
    assert [x.get_markerfacecolor() for x in axes.lines] == ["C1", "none", "C2"]


def test_labels_of_a_long_logarithmic_axis_do_not_overlap(tmp_path, monkeypatch):
    for end in (3e4, 1e9):
        axes, = drawn(tmp_path, monkeypatch, dict(series={"a": [([500, end], [1, 2])]}, log="x"))
        boxes = [t.get_window_extent() for t in axes.get_xticklabels() if t.get_text() and 500 <= t.get_position()[0] <= end]
        assert len(boxes) > 3 and not any(a.overlaps(b) for a, b in zip(boxes, boxes[1:]))
