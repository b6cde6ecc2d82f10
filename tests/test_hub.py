"""
Hub sets, without a network: the same code on local folders in the hub's layout, and on streams that break.
"""
import gzip
import json

import numpy as np
import pytest

import prepare
from configurator import UserError

datasets = pytest.importorskip("datasets")
N = 3000  # more than two marks of read_hub, which come every 1,024 records


class Bar:
    """tqdm's part that read_hub uses."""

    def __init__(self):
        self.said = []

    def write(self, text, file=None):
        self.said.append(text)

    def update(self, n):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder in the hub's layout: two training shards, one of validation."""
    for split, first, last in (("train", 0, 2000), ("train", 2000, N), ("validation", N, N + 40)):
        path = tmp_path / "set" / split / f"shard{first}.jsonl.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wt") as f:
            for i in range(first, last):
                meta = {"redpajama_set_name": ["RedPajamaC4", "RedPajamaBook"][i % 2]}
                f.write(json.dumps({"text": f"text {i}", "meta": meta}) + "\n")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(prepare.time, "sleep", lambda s: None)
    return str(tmp_path / "set")


def texts(items):
    return [json.loads(raw)["text"] for _, raw, _, _ in items]


@pytest.mark.parametrize("split, want", [("", range(N)), (":train", range(N)), (":validation", range(N, N + 40))])
def test_a_split_is_read_in_order_with_its_sources(hub, split, want):
    items = list(prepare.read_hub(hub + split, "", Bar()))
    assert texts(items) == [f"text {i}" for i in want]
    pieces = prepare.encode_batch(items, tokenizer=prepare.Bytes())[1]
    assert [p[0] for p in pieces[:2]] == (["C4", "Book"])


def test_data_files_pick_shards(hub):
    assert len(texts(prepare.read_hub(hub, "train/shard2000*", Bar()))) == N - 2000


class Breaking:
    """A streamed set that breaks before the given records, once each (or always)."""

    def __init__(self, stream, breaks, always=False):
        self.stream, self.breaks, self.always = stream, set(breaks), always

    def __iter__(self):
        for record in self.stream:
            i = int(record["text"].split()[1])
            if i in self.breaks:
                if not self.always:
                    self.breaks.remove(i)
                raise ConnectionError("the line is dead")
            yield record

    def state_dict(self):
        return self.stream.state_dict()

    def load_state_dict(self, state):
        self.stream.load_state_dict(state)


@pytest.mark.parametrize("breaks", [[0], [5, 6], [1023], [1024], [1025, 2047, 2048, 2500], [N - 1]])
def test_a_broken_connection_is_taken_up_where_it_broke(hub, monkeypatch, breaks):
    """Every record once and in order, wherever the stream breaks; each break is said."""
    whole, bar = prepare.open_hub, Bar()
    monkeypatch.setattr(prepare, "open_hub", lambda *a: Breaking(whole(*a), breaks))
    assert texts(prepare.read_hub(hub, "", bar)) == [f"text {i}" for i in range(N)]
    assert len(bar.said) == len(breaks) and "trying again" in bar.said[0]


def test_a_connection_that_stays_broken_ends_cleanly(hub, monkeypatch, tmp_path):
    whole = prepare.open_hub
    monkeypatch.setattr(prepare, "open_hub", lambda *a: Breaking(whole(*a), [1500], always=True))
    monkeypatch.setattr(prepare, "is_hub", lambda source: source == hub)
    config = prepare.Config(source=hub, out_dir=str(tmp_path / "out"), tokenizer="bytes", num_proc=1, val_fraction=0.1)
    monkeypatch.setattr(prepare, "has_validation", lambda source: None)
    with pytest.raises(UserError, match="record 1500.*nothing was written"):
        prepare.prepare(config)
    assert not list((tmp_path / "out").glob("*.bin*"))


def test_bins_of_a_hub_set_are_those_of_its_shards(hub, monkeypatch, tmp_path):
    """max_tokens bounds a stream as it bounds files; the hub's validation split becomes val.bin."""
    out = {}
    for kind in ("folder", "hub"):
        if kind == "hub":
            monkeypatch.setattr(prepare, "is_hub", lambda source: source.startswith(hub))
            monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name: ["train", "validation", "test"])
        prepare.prepare(prepare.Config(source=hub, out_dir=str(tmp_path / kind), tokenizer="bytes", num_proc=1,
                                       max_tokens=20_000))
        out[kind] = [(tmp_path / kind / f"{n}.bin").read_bytes() for n in ("train", "val", "val_C4", "val_Book")]
    assert out["folder"] == out["hub"]
    assert 19_900 < len(out["hub"][0]) / 2 <= 20_000
    assert np.frombuffer(out["hub"][1], "<u2").tolist().count(256) == 40


def test_a_set_that_is_not_there_says_what_else_to_use(monkeypatch):
    def missing(*args, **kwargs):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'cerebras/SlimPajama-627B' doesn't exist on the Hub")
    monkeypatch.setattr(datasets, "load_dataset", missing)
    with pytest.raises(UserError, match="cerebras/SlimPajama-627B.*DKYoon/SlimPajama-6B"):
        prepare.open_hub("cerebras/SlimPajama-627B")


@pytest.mark.parametrize("source, hub_set", [("owner/name", True), ("owner/name:validation", True), ("a/b/c", False),
                                             ("./name", False), ("builtin", False), ("shards/missing", False)])
def test_what_counts_as_a_hub_set(tmp_path, monkeypatch, source, hub_set):
    """A path that exists, or that is mistyped inside a folder that exists, is local."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shards").mkdir()
    assert prepare.is_hub(source) is hub_set
