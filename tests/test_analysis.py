"""What the analyses share: finding runs, windows, output. Each analysis has its own test file."""
import pytest

from analysis import common
from configurator import UserError


def test_find_runs_in_order_of_their_list_with_names_and_systems(trained):
    runs = common.find_runs([str(trained / "runs")])
    assert [r.name for r in runs] == [f"{s}/seed{n}" for s in ("vanilla", "resformer", "svformer", "learnable", "gqa")
                                      for n in (1, 2)]
    assert [r.system for r in runs][:3] == ["vanilla", "vanilla", "resformer"]
    assert runs[4].shape.shared_value and runs[4].model().config == runs[4].shape
    single = common.find_runs([str(trained / "runs/gqa/seed1")])
    assert [r.name for r in single] == ["seed1"]
    twice = common.find_runs([str(trained / "runs/gqa"), str(trained / "runs/gqa/seed1")])
    assert len(twice) == 2


@pytest.mark.parametrize("path, words", [("nowhere", "no such folder"), ("", "config.json is missing")])
def test_a_folder_without_runs_is_refused(tmp_path, path, words):
    with pytest.raises(UserError, match=words):
        common.find_runs([str(tmp_path / path)])


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
