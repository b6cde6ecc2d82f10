"""
prepare.py: what goes in comes out again, whatever the source, the tokenizer and the number of processes; what is damaged
is named and changes nothing; the reader refuses what the writer did not write. Bins are decoded here by independent code.
"""
import base64
import collections
import contextlib
import gzip
import io
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import time

import numpy as np
import pytest
import zstandard

import prepare
from configurator import UserError

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPT = os.path.join(REPO, "prepare.py")
linux = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads /proc")


# ---------------------------------------------------------------------------------------------------------------------
# Helpers


def record(text, source="C4", **options):
    return (json.dumps({"text": text, "meta": {"redpajama_set_name": "RedPajama" + source}}, **options) + "\n").encode()


def some_docs(n=30, sources=("C4", "Wikipedia", "StackExchange"), words=40, seed=0):
    """[(text, source)], all different, with everything that may get lost on the way."""
    rng = random.Random(seed)
    pool = ["the", "then", "in", "naïve", "日本語", "🙂", "a\tb", 'quote"', "back\\slash", "\r\n", "\u2028", "\0", "  ", "\n\n",
            "<|endoftext|>", "x" * 30, "don't", "3.14", "ﬁn"]
    return [(f"{seed}/{i} " + " ".join(rng.choices(pool, k=rng.randint(1, words))), sources[i % len(sources)])
            for i in range(n)]


def compress(data, suffix):
    return {".zst": zstandard.ZstdCompressor(write_checksum=True).compress, ".gz": gzip.compress}.get(suffix, bytes)(data)


def shard(path, docs):
    """A shard of (text, source) pairs; the name's end decides the compression."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(compress(b"".join(record(*doc) for doc in docs), path.suffix))
    return str(path)


def prep(source, out_dir, **options):
    options = {"tokenizer": "bytes", "num_proc": 1, "val_fraction": 0.2, **options}
    return prepare.prepare(prepare.Config(source=str(source), out_dir=str(out_dir), **options))


def cli(*argv, **options):
    options = {"capture_output": True, "text": True, "timeout": 60, **options}
    return subprocess.run([sys.executable, SCRIPT, *map(str, argv)], **options)


def one_line(done):
    """The message of a run that failed as it should: exit code 2, one line of error, no traceback."""
    errors = [line for line in done.stderr.split("\n") if line.startswith("error: ")]
    assert done.returncode == 2 and len(errors) == 1, done.stderr[-3000:]
    assert done.stderr.endswith(errors[0] + "\n") and "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    return errors[0]


def snapshot(folder):
    """name -> bytes; the lock's file is no output."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != ".lock"} if folder.exists() else {}


TOKENS = [bytes([i]) for i in range(256)] + [b"th", b"he", b"the", b" th", b" the", b"in", b" in", b"xx", b"xxxx", b"  "]


def ranks_file(path, tokens=TOKENS):
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens)))
    return str(path)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    return ranks_file(tmp_path_factory.mktemp("ranks") / "small.tiktoken")


def in_bin(path, tokens=TOKENS[:256], dtype="<u2"):
    """The documents of a bin as bytes; every document must end with an end-of-text id."""
    ids, eot = np.fromfile(path, dtype).tolist(), len(tokens)
    assert not ids or ids[-1] == eot
    docs, doc = [], []
    for i in ids:
        if i == eot:
            docs.append(b"".join(doc))
            doc = []
        else:
            doc.append(tokens[i])
    return docs


def bag(docs):
    return collections.Counter(doc[0] if isinstance(doc, tuple) else doc.decode() for doc in docs)


def check_bins(folder, docs, tokens=TOKENS[:256]):
    """The bins hold exactly these (text, source) pairs, once each, and meta.json tells the truth. Returns meta."""
    meta = json.loads((folder / "meta.json").read_text())
    train, val = (in_bin(folder / f"{name}.bin", tokens) for name in ("train", "val"))
    assert bag(train) + bag(val) == bag(docs)
    assert meta["vocab_size"] == len(tokens) + 1 and meta["eot"] == len(tokens) and meta["dtype"] == "uint16"
    by_source, held_out = collections.defaultdict(list), collections.Counter()
    for text, source in docs:
        by_source[source].append(text)
    assert set(meta["sources"]) == set(by_source)
    for source, texts in by_source.items():
        val_texts = bag(in_bin(folder / f"val_{source}.bin", tokens))
        assert not val_texts - collections.Counter(texts)  # only this source's
        held_out += val_texts
        counts = meta["sources"][source]
        assert counts["val"]["documents"] == val_texts.total()
        assert counts["val"]["bytes"] == sum(len(text.encode()) for text in val_texts.elements())
        assert counts["val"]["tokens"] == (folder / f"val_{source}.bin").stat().st_size // 2
        assert counts["train"]["documents"] + counts["val"]["documents"] == len(texts)
        assert counts["train"]["bytes"] + counts["val"]["bytes"] == sum(len(text.encode()) for text in texts)
    assert held_out == bag(val)
    for split in ("train", "val"):
        ids = np.fromfile(folder / f"{split}.bin", "<u2")
        assert sum(c[split]["tokens"] for c in meta["sources"].values()) == len(ids)
        assert sum(c[split]["documents"] for c in meta["sources"].values()) == np.count_nonzero(ids == meta["eot"])
    assert not [name for name in os.listdir(folder) if name.endswith(".tmp")]
    return meta


@pytest.fixture
def offline(monkeypatch):
    """No way out: a test that tries the network fails at once instead of using it."""
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def gpt2(offline):
    tiktoken = pytest.importorskip("tiktoken")
    if not os.environ.get("TIKTOKEN_CACHE_DIR"):
        pytest.skip("TIKTOKEN_CACHE_DIR is not set")
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as e:
        pytest.skip(f"gpt2 is not in TIKTOKEN_CACHE_DIR: {type(e).__name__}")


# ---------------------------------------------------------------------------------------------------------------------
# Round trips


def make_source(folder, kind, docs):
    if kind == "folder":
        shard(folder / "a.jsonl", docs[:7])
        shard(folder / "b" / "c.jsonl.zst", docs[7:15])
        shard(folder / "b" / "a.jsonl.gz", docs[15:])
        (folder / "README.md").write_text("no shard")
        (folder / ".hidden.jsonl").write_text("no shard either")
        return folder
    if kind in ("frames.zst", "frames.gz"):  # several frames, cut anywhere, and an empty one
        data, suffix = b"".join(record(*doc) for doc in docs), kind[6:]
        cuts = [0, 5, 5, 300, 1000, len(data)]
        path = folder / ("many.jsonl" + suffix)
        frames = [compress(data[a:b], suffix) for a, b in zip(cuts, cuts[1:])]
        if suffix == ".zst":  # pzstd and seekable files hold skippable frames
            frames.insert(2, struct.pack("<II", 0x184D2A50, 4) + b"skip")
        path.write_bytes(b"".join(frames) + (b"\0" * 5000 if suffix == ".gz" else b""))  # as tape and block devices pad it
        return path
    path = folder / ("one" + kind.split()[0])
    shard(path, docs)
    if kind == ".jsonl crlf":
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n\r\n"))
    if kind == ".jsonl open":  # no line end at the end
        path.write_bytes(path.read_bytes().rstrip(b"\n"))
    if kind == ".jsonl utf8":  # not \u escapes
        path.write_bytes(b"".join(record(*doc, ensure_ascii=False) for doc in docs))
    return path


@pytest.mark.parametrize("kind", [".jsonl", ".jsonl crlf", ".jsonl open", ".jsonl utf8", ".jsonl.gz", ".jsonl.zst",
                                  "frames.zst", "frames.gz", "folder"])
@pytest.mark.parametrize("tokenizer", ["bytes", "tiktoken"])
def test_round_trip(tmp_path, ranks, kind, tokenizer):
    (tmp_path / "in").mkdir()
    docs = some_docs()
    source = make_source(tmp_path / "in", kind, docs)
    meta = prep(source, tmp_path / "out", tokenizer="bytes" if tokenizer == "bytes" else ranks)
    assert check_bins(tmp_path / "out", docs, TOKENS[:256] if tokenizer == "bytes" else TOKENS) == meta
    data = prepare.Data(str(tmp_path / "out"))
    assert set(data.val) == {"val", "C4", "Wikipedia", "StackExchange"} and data.vocab_size == meta["vocab_size"]
    assert data.tokenizer == meta["tokenizer"] and data.eot == meta["eot"]


def test_the_ranks_are_used(tmp_path, ranks):
    """Merges happen, within the words of gpt2's pattern only."""
    path = shard(tmp_path / "a.jsonl", [("the then xxxx", "C4"), ("other", "C4")])
    prep(path, tmp_path / "out", tokenizer=ranks, val_fraction=1e-9)
    ids = {tuple(np.fromfile(tmp_path / "out" / f"{name}.bin", "<u2").tolist()) for name in ("train", "val")}
    rank = {token: i for i, token in enumerate(TOKENS)}
    words = [b"the", b" the", b"n", b" ", b"xxxx"], [b"o", b"the", b"r"]
    assert ids == {tuple(rank[word] for word in doc) + (len(TOKENS),) for doc in words}


def test_txt(tmp_path):
    """Each text file is one document; its bytes are kept as they are."""
    texts = ["one\r\ntwo\n", "no line end", "<|endoftext|>\n", "日本\n\n\n", "\ufeffbom\n"] + [f"text {i}\n" for i in range(9)]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_bytes(text.encode())
    meta = prep(tmp_path, tmp_path / "out")
    (source,) = meta["sources"]
    check_bins(tmp_path / "out", [(text, source) for text in texts])


@pytest.mark.parametrize("text", [
    "".join(f"line {i} naïve 日本語\n" for i in range(12000)),
    "日本語" * 60000,  # no line end anywhere, and no cut inside a character
    "a" + "é" * 150000,
    "".join(f"word{i} " * (i % 50) + "\n\n" for i in range(1500)),
], ids=["lines", "cjk", "odd", "paragraphs"])
def test_a_large_txt_is_split_and_nothing_is_lost(tmp_path, ranks, text):
    path = tmp_path / "large.txt"
    path.write_text(text, newline="")
    for tokenizer, tokens in (("bytes", TOKENS[:256]), (ranks, TOKENS)):
        meta = prep(path, tmp_path / "out", tokenizer=tokenizer)
        eot = len(tokens)
        halves = [np.fromfile(tmp_path / "out" / f"{name}.bin", "<u2").tolist() for name in ("train", "val")]
        assert all(halves) and sum(half.count(eot) for half in halves) == 1
        parts = [b"".join(tokens[i] for i in half if i != eot).decode() for half in halves]  # whole characters in each
        assert collections.Counter(parts[0]) + collections.Counter(parts[1]) == collections.Counter(text)
        if "\n" in text:  # in pieces of whole lines
            lines = [collections.Counter(part.splitlines()) for part in parts]
            assert lines[0] + lines[1] == collections.Counter(text.splitlines())
        (counts,) = meta["sources"].values()
        for split, half in zip(("train", "val"), halves):
            assert counts[split]["tokens"] == len(half) and counts[split]["documents"] == half.count(eot)
            assert counts[split]["bytes"] == sum(len(tokens[i]) for i in half if i != eot)


@pytest.mark.parametrize("fraction", [1e-9, 0.2])
def test_a_txt_stays_in_order(tmp_path, fraction):
    """What is held out is whole pieces, the last one where no hash picks any; nothing stands between the others."""
    path, rng = tmp_path / "a.txt", random.Random(3)
    path.write_text("".join(f"{rng.random()} {rng.random()}\n" for _ in range(30_000)))
    prep(path, tmp_path / "out", val_fraction=fraction)
    train, val = (np.fromfile(tmp_path / "out" / f"{name}.bin", "<u2").tolist() for name in ("train", "val"))
    assert 256 not in train[:-1] and [*train, *val].count(256) == 1
    train, val = (bytes(i for i in ids if i < 256) for ids in (train, val))
    with open(path, "rb") as f:
        pieces = [raw for _, raw, *_ in prepare.read_text(f, path, prepare.tqdm(disable=True))]
    held = [piece for piece in pieces if piece in val]
    assert len(pieces) > 15 and b"".join(held) == val and train == b"".join(piece for piece in pieces if piece not in held)
    assert held == pieces[-1:] if fraction == 1e-9 else 1 < len(held) < 9


def test_builtin(tmp_path):
    """The documents are the .py files of the standard library, split as train.py splits them where they are missing."""
    done = cli("--num_proc=2", cwd=tmp_path, env={**os.environ, "TIKTOKEN_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "data").iterdir()
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["tokenizer"] == "bytes" and folder.name == "builtin" and meta["val_fraction"] == 0.05
    docs = collections.Counter(in_bin(folder / "train.bin") + in_bin(folder / "val.bin"))
    root = sysconfig.get_paths()["stdlib"]
    for name in ("os.py", "json/__init__.py", "argparse.py", "asyncio/base_events.py"):
        with open(os.path.join(root, name), "rb") as f:
            assert docs[f.read()] == 1
    assert docs.total() == sum(c[s]["documents"] for c in meta["sources"].values() for s in ("train", "val")) > 300
    assert not any(b"site-packages" in name.encode() for name in meta["sources"])


def test_gpt2_ids_are_tiktokens(tmp_path, gpt2):
    docs = some_docs(60)
    meta = prep(shard(tmp_path / "a.jsonl.zst", docs), tmp_path / "out", tokenizer="gpt2")
    assert (meta["vocab_size"], meta["eot"], meta["dtype"]) == (50257, 50256, "uint16")
    want = collections.Counter(tuple(gpt2.encode_ordinary(text)) for text, _ in docs)
    got = collections.Counter()
    for name in ("train", "val"):
        ids = np.fromfile(tmp_path / "out" / f"{name}.bin", "<u2")
        ends = np.flatnonzero(ids == 50256)
        assert ends[-1] == len(ids) - 1
        got.update(tuple(ids[a:b].tolist()) for a, b in zip([0, *ends[:-1] + 1], ends))
    assert got == want


def test_gpt2_as_a_ranks_file_gives_the_same_ids(tmp_path, gpt2):
    tokens = sorted(gpt2._mergeable_ranks, key=gpt2._mergeable_ranks.get)
    tokenizer = prepare.get_tokenizer(ranks_file(tmp_path / "gpt2.tiktoken", tokens))
    assert (tokenizer.n_vocab, tokenizer.eot) == (50257, 50256)
    for text, _ in some_docs(60):
        assert tokenizer.encode(text).tolist() == gpt2.encode_ordinary(text)


def test_end_of_text_in_a_document_is_ordinary_text(tmp_path, ranks):
    """a document can't inject a separator, and does not stop the run."""
    docs = [("see <|endoftext|> here", "C4"), ("<|endoftext|>", "C4"), ("<|endoftext|>" * 9, "C4"), ("without", "C4")]
    for tokenizer, tokens in (("bytes", TOKENS[:256]), (ranks, TOKENS)):
        prep(shard(tmp_path / "a.jsonl", docs), tmp_path / "out", tokenizer=tokenizer)
        check_bins(tmp_path / "out", docs, tokens)
        ids = np.concatenate([np.fromfile(tmp_path / "out" / f"{name}.bin", "<u2") for name in ("train", "val")])
        assert np.count_nonzero(ids == len(tokens)) == len(docs)


def test_text_equal_to_a_document_counts_twice(tmp_path):
    """Equal documents are all kept; those below val_fraction go to one side together."""
    docs = [(f"document {i // 2}", "C4") for i in range(400)]
    prep(shard(tmp_path / "a.jsonl", docs), tmp_path / "out")
    check_bins(tmp_path / "out", docs)
    train, val = (bag(in_bin(tmp_path / "out" / f"{name}.bin")) for name in ("train", "val"))
    assert not train & val


def test_the_bytes_are_the_same_for_any_number_of_processes(tmp_path, ranks):
    """3 MB, several tasks, every kind of file; meta.json too."""
    docs = some_docs(2400, words=400)
    shard(tmp_path / "in" / "a.jsonl", docs[:800])
    shard(tmp_path / "in" / "b.jsonl.zst", docs[800:1600])
    shard(tmp_path / "in" / "c.jsonl.gz", docs[1600:])
    (tmp_path / "in" / "d.txt").write_text("a line of text\n" * 60000)
    (tmp_path / "in" / "e.jsonl").write_bytes(record("") + b"broken\n" + record("\ud800 half") + record("last"))
    for n in (2, 4):
        done = cli(f"--source={tmp_path / 'in'}", f"--out_dir={tmp_path / 'out'}{n}", f"--tokenizer={ranks}", f"--num_proc={n}")
        assert done.returncode == 0, done.stderr
    prep(tmp_path / "in", tmp_path / "out1", tokenizer=ranks, val_fraction=0.005)
    one = snapshot(tmp_path / "out1")
    assert len(one["train.bin"]) > 1 << 20 and one == snapshot(tmp_path / "out2") == snapshot(tmp_path / "out4")


def test_the_platforms_byte_order_does_not_matter(tmp_path):
    prep(shard(tmp_path / "a.jsonl", [("ab", "C4"), ("ab", "C4")]), tmp_path / "out", val_fraction=1e-9)
    assert (tmp_path / "out" / "train.bin").read_bytes() == b"a\0b\0\0\1"


# ---------------------------------------------------------------------------------------------------------------------
# Splits


def split_of(folder):
    return {text: name for name in ("train", "val") for text in bag(in_bin(folder / f"{name}.bin"))}


def test_split_is_by_hash(tmp_path):
    """Adding documents, another order, other shards or another source name move no document."""
    docs = some_docs(600)
    prep(shard(tmp_path / "a.jsonl", docs), tmp_path / "a")
    first = split_of(tmp_path / "a")
    share = sum(name == "val" for name in first.values()) / len(docs)
    assert 0.14 < share < 0.26  # 0.2 +- 4 sigma
    more = some_docs(600, seed=1)
    mixed = [(text, "Book") for text, _ in docs] + more
    random.Random(0).shuffle(mixed)
    shard(tmp_path / "b" / "x.jsonl.zst", mixed[:500])
    shard(tmp_path / "b" / "y.jsonl.gz", mixed[500:])
    prep(tmp_path / "b", tmp_path / "out")
    second = split_of(tmp_path / "out")
    assert len(second) == 1200 and {text: second[text] for text in first} == first
    prep(shard(tmp_path / "c.jsonl", docs[:100]), tmp_path / "out")
    assert {text: first[text] for text in split_of(tmp_path / "out")} == split_of(tmp_path / "out")


def test_a_larger_fraction_keeps_what_was_held_out(tmp_path):
    path = shard(tmp_path / "a.jsonl", some_docs(300))
    held = []
    for fraction in (0.1, 0.3, 0.9):
        prep(path, tmp_path / "out", val_fraction=fraction)
        held.append({text for text, name in split_of(tmp_path / "out").items() if name == "val"})
    assert held[0] < held[1] < held[2]


@pytest.mark.parametrize("n", [2, 3, 20])
@pytest.mark.parametrize("order", [1, -1])
def test_few_documents_still_give_validation_text(tmp_path, n, order):
    """a split with one document. No hash is below 0.00001; no document may get lost or be doubled."""
    docs = some_docs(n)[::order]
    prep(shard(tmp_path / "a.jsonl", docs), tmp_path / "out", val_fraction=1e-5)
    check_bins(tmp_path / "out", docs)
    assert len(in_bin(tmp_path / "out" / "val.bin")) == 1


def test_one_document_can_not_be_split(tmp_path):
    path = shard(tmp_path / "a.jsonl", [("alone", "C4")])
    with pytest.raises(UserError, match="val_source"):
        prep(path, tmp_path / "out")
    assert snapshot(tmp_path / "out") == {}


@pytest.mark.parametrize("fraction", [0, 0.2])
def test_val_source(tmp_path, capsys, fraction):
    """All of source is for training then, whatever val_fraction; a source only seen in one of them has its file, too."""
    train, val = some_docs(40, ("C4", "Book")), some_docs(5, ("C4", "Github"), seed=1)
    meta = prep(shard(tmp_path / "t.jsonl", train), tmp_path / "out", val_fraction=fraction,
                val_source=shard(tmp_path / "v" / "v.jsonl.zst", val).removesuffix("/v.jsonl.zst"))
    assert f"--val_fraction={fraction} changes nothing" in capsys.readouterr().out
    assert bag(in_bin(tmp_path / "out" / "train.bin")) == bag(train) and bag(in_bin(tmp_path / "out" / "val.bin")) == bag(val)
    check_bins(tmp_path / "out", train + val)
    assert set(meta["sources"]) == {"C4", "Book", "Github"}
    assert (tmp_path / "out" / "val_Book.bin").read_bytes() == b""
    data = prepare.Data(str(tmp_path / "out"))
    assert data.val["Book"].windows(8) == 0 and data.val["Github"].tokens > 0


def test_no_validation_text_asked_for(tmp_path):
    path = shard(tmp_path / "a.jsonl", some_docs())
    with pytest.raises(UserError, match="val"):
        prep(path, tmp_path / "out", val_fraction=0)


@pytest.mark.parametrize("options", [dict(val_fraction=1.0), dict(val_fraction=-0.1), dict(max_tokens=-1), dict(num_proc=-1)])
def test_ranges(tmp_path, options):
    path = shard(tmp_path / "a.jsonl", some_docs())
    with pytest.raises(UserError, match=f"{next(iter(options))}.*{next(iter(options.values()))}"):
        prep(path, tmp_path / "out", **options)
    assert snapshot(tmp_path / "out") == {}


def test_every_source_has_a_file_even_an_empty_one(tmp_path):
    docs = [(f"document {i}", "C4") for i in range(200)] + [(f"alone {i}", f"Only-{i}.x_") for i in range(9)]
    meta = prep(shard(tmp_path / "a.jsonl", docs), tmp_path / "out", val_fraction=0.1)
    check_bins(tmp_path / "out", docs)
    empty = [source for source in meta["sources"] if (tmp_path / "out" / f"val_{source}.bin").stat().st_size == 0]
    assert empty and all(meta["bins"][f"val_{source}"] == 0 for source in empty)


@pytest.mark.parametrize("meta, source", [
    ({"redpajama_set_name": "RedPajamaArXiv"}, "ArXiv"), ({"redpajama_set_name": "RedPajamaGithub", "x": 1}, "Github"),
    ({"source": "arxiv", "language": "en"}, "arxiv"), ({}, None), (None, None), ("text", None), ([1], None),
    ({"redpajama_set_name": None}, None), ({"redpajama_set_name": 7}, None), ({"redpajama_set_name": ""}, None),
    ({"redpajama_set_name": "../../etc/passwd"}, None), ({"redpajama_set_name": "a b/c\0é"}, None),
    ({"redpajama_set_name": "x" * 1000}, None), ({"redpajama_set_name": "RedPajama"}, None),
])
def test_names_of_sources(tmp_path, meta, source):
    """Whatever stands in meta, the documents arrive in val.bin and in one file of the folder."""
    lines = [json.dumps({"text": f"document {i}", "meta": meta}) for i in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    (found,) = prep(tmp_path / "a.jsonl", tmp_path / "out")["sources"]
    assert source in (None, found)
    check_bins(tmp_path / "out", [(f"document {i}", found) for i in range(30)])
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "out"]
    assert prepare.Data(str(tmp_path / "out")).val[found].tokens


@pytest.mark.parametrize("name", ["val", "train"])
def test_a_source_named_like_a_split(tmp_path, name):
    """val of Data stays the whole val.bin."""
    lines = [json.dumps({"text": f"{s} {i}", "meta": {"source": s}}) for i in range(40) for s in (name, "other")]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    prep(tmp_path / "a.jsonl", tmp_path / "out")
    data = prepare.Data(str(tmp_path / "out"))
    assert os.path.basename(data.val["val"].path) == "val.bin" and os.path.basename(data.train.path) == "train.bin"
    assert data.val["val"].tokens == (tmp_path / "out" / "val.bin").stat().st_size // 2


def test_a_thousand_sources(tmp_path):
    """A wrong meta field (a title, a URL) may give each document a source of its own: no thousand open files."""
    docs = [(f"document {i}", f"s{i}") for i in range(1000)]
    path = shard(tmp_path / "a.jsonl", docs)
    done = subprocess.run(["bash", "-c", f'ulimit -n 256; exec "{sys.executable}" "{SCRIPT}" --num_proc=1 --tokenizer=bytes '
                           f'--val_fraction=0.2 "--source={path}" "--out_dir={tmp_path}/out"'], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    train, val = (bag(in_bin(tmp_path / "out" / f"{name}.bin")) for name in ("train", "val"))
    assert train + val == bag(docs)
    files = [p for p in (tmp_path / "out").glob("val_*.bin")]
    assert len(files) < 200 and sum((bag(in_bin(p)) for p in files), collections.Counter()) == val


def test_stale_files_of_an_earlier_preparation_disappear(tmp_path):
    prep(shard(tmp_path / "a.jsonl", some_docs(60, ("C4", "Book"))), tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    docs = some_docs(60, ("Wikipedia",), seed=1)
    prep(shard(tmp_path / "b.jsonl", docs), tmp_path / "out")
    check_bins(tmp_path / "out", docs)
    assert set(snapshot(tmp_path / "out")) == {"train.bin", "val.bin", "val_Wikipedia.bin", "meta.json", "notes.txt"}


# ---------------------------------------------------------------------------------------------------------------------
# max_tokens


@pytest.mark.parametrize("num_proc", [1, 2])
@pytest.mark.parametrize("limit", [3000, 3001, 100_000, 10 ** 9])
def test_max_tokens_cuts_at_a_document(tmp_path, limit, num_proc):
    docs = some_docs(5000) if num_proc == 2 else some_docs(1500)
    val = some_docs(3, seed=1)
    argv = dict(val_source=shard(tmp_path / "v.jsonl", val), max_tokens=limit)
    path = shard(tmp_path / "a.jsonl", docs)
    if num_proc == 1:
        prep(path, tmp_path / "out", **argv)
    elif limit == 100_000:
        done = cli(f"--source={path}", f"--out_dir={tmp_path / 'out'}", "--tokenizer=bytes", "--num_proc=2",
                   *(f"--{k}={v}" for k, v in argv.items()))
        assert done.returncode == 0, done.stderr
    else:
        pytest.skip("once is enough with processes")
    lengths = np.cumsum([len(text.encode()) + 1 for text, _ in docs])
    fit = int(np.searchsorted(lengths, limit, side="right"))
    assert [doc.decode() for doc in in_bin(tmp_path / "out" / "train.bin")] == [text for text, _ in docs[:fit]]
    assert bag(in_bin(tmp_path / "out" / "val.bin")) == bag(val)


def test_max_tokens_exactly_reached(tmp_path):
    docs = [("12345", "C4")] * 10  # six tokens each
    val = shard(tmp_path / "v.jsonl", docs[:1])
    for limit, fit in ((12, 2), (17, 2), (18, 3), (60, 10), (61, 10)):
        meta = prep(shard(tmp_path / "a.jsonl", docs), tmp_path / "out", val_source=val, max_tokens=limit)
        assert len(in_bin(tmp_path / "out" / "train.bin")) == fit
        assert meta["sources"]["C4"]["train"] == dict(documents=fit, bytes=5 * fit, tokens=6 * fit)


@pytest.mark.parametrize("limit", [500, 2000, 20_000])
@pytest.mark.parametrize("fraction", [1e-9, 0.2])
def test_max_tokens_with_a_split(tmp_path, limit, fraction):
    docs = some_docs(400)
    prep(shard(tmp_path / "a.jsonl", docs), tmp_path / "out", max_tokens=limit, val_fraction=fraction)
    train, val = (in_bin(tmp_path / "out" / f"{name}.bin") for name in ("train", "val"))
    assert 0 < (tmp_path / "out" / "train.bin").stat().st_size // 2 <= limit and val
    assert not (bag(train) + bag(val)) - bag(docs)


def test_max_tokens_too_small_for_any_document(tmp_path):
    path, other = (shard(tmp_path / f"{name}.jsonl", some_docs()) for name in "ab")
    with pytest.raises(UserError, match="--max_tokens"):
        prep(path, tmp_path / "out", max_tokens=2, val_source=other)
    assert snapshot(tmp_path / "out") == {}


# ---------------------------------------------------------------------------------------------------------------------
# mix


def test_mix(tmp_path):
    """Each source gets its share of max_tokens, cut at a document; other sources get nothing; the seed orders the shards."""
    docs = some_docs(900, ("C4", "Wikipedia", "Book"))
    for i in range(9):
        shard(tmp_path / "in" / f"{i}.jsonl", docs[i * 100:(i + 1) * 100])
    val = shard(tmp_path / "v.jsonl", some_docs(30, ("C4", "Wikipedia"), seed=1))
    bins = []
    for seed in (1, 1, 2):
        meta = prep(tmp_path / "in", tmp_path / "out", val_source=val, max_tokens=20_000, mix="C4:3, RedPajamaWikipedia:1",
                    seed=seed)
        got = {source: counts["train"]["tokens"] for source, counts in meta["sources"].items() if counts["train"]["tokens"]}
        longest = max(len(text.encode()) + 1 for text, _ in docs)
        assert set(got) == {"C4", "Wikipedia"}
        assert 15_000 - longest < got["C4"] <= 15_000 and 5_000 - longest < got["Wikipedia"] <= 5_000
        train = bag(in_bin(tmp_path / "out" / "train.bin"))
        assert not train - bag(doc for doc in docs if doc[1] != "Book")
        assert sum(len(text.encode()) + 1 for text in train.elements()) == sum(got.values())
        bins.append((tmp_path / "out" / "train.bin").read_bytes())
    assert bins[0] == bins[1] != bins[2]


@pytest.mark.parametrize("own_val", [False, True])
@pytest.mark.parametrize("options", [{}, {"max_tokens": 40_000}, {"max_tokens": 40_000, "mix": "C4:3,Wikipedia:1"}], ids=str)
def test_nothing_depends_on_how_texts_are_batched(tmp_path, monkeypatch, options, own_val):
    """
    Bins, counts and what was skipped, mended or damaged, in meta.json's order, where the end comes in the middle of a task; all
    validation text of the mix's sources is taken.
    """
    docs = some_docs(900, ("C4", "Wikipedia"))
    lines = [record(*doc) + {3: b"{broken\n", 5: record("mended \ud83d")}.get(i % 7, b"") for i, doc in enumerate(docs)]
    for i in range(9):
        shard = b"".join(lines[i * 100:(i + 1) * 100])
        (tmp_path / f"{i}.jsonl").write_bytes(shard + b"{cut" * (i % 2))
    (tmp_path / "4b.jsonl").write_bytes(b"")
    val = tmp_path / "val/v.jsonl"
    val.parent.mkdir()
    val.write_bytes(b"".join(record(*doc) for doc in some_docs(60, ("C4", "Wikipedia"), seed=1)))
    made = []
    for size in (1, 3000, 1 << 20):
        monkeypatch.setattr(prepare, "BATCH", size)
        meta = prep(tmp_path, tmp_path / "out/bins", val_source=str(val) if own_val else "", data_files="*.jsonl",
                    on_error="skip", **options)
        made.append((json.dumps(meta), [(tmp_path / f"out/bins/{name}.bin").read_bytes() for name in ("train", "val")]))
    assert made[0] == made[1] == made[2]
    assert meta["skipped"].keys() == {"not JSON", "lone surrogates (replaced)", "damaged shard"}
    if own_val:
        assert sum(c["val"]["documents"] for c in meta["sources"].values()) == 60


@pytest.mark.parametrize("num_proc", [1, 2])
@pytest.mark.parametrize("options", [{"max_tokens": 2000}, {"max_tokens": 2000, "mix": "C4:1"}], ids=str)
def test_what_is_wrong_behind_the_last_document_does_not_count(tmp_path, options, num_proc):
    """Damage that was read ahead, and what was mended in the first document that is left out."""
    good, mended = record("x" * 99), record("y" * 96 + "\ud83d")  # 100 tokens
    (tmp_path / "a.jsonl").write_bytes(mended + good * 19 + mended + good * 2000 + b"{broken\n{cut")
    val = shard(tmp_path / "val/v.jsonl", some_docs(5, ("C4", "Book")))
    meta = prep(tmp_path, tmp_path / "out", val_source=val, data_files="*.jsonl", num_proc=num_proc, **options)
    assert meta["skipped"] == {"lone surrogates (replaced)": 1}
    assert set(meta["sources"]) == ({"C4"} if "mix" in options else {"C4", "Book"})


def test_a_mix_of_sources_that_are_not_there(tmp_path):
    path = shard(tmp_path / "a.jsonl", some_docs(200, ("C4", "Book")))
    with pytest.raises(UserError, match=r"--mix=c4:1,Book:1: .*a\.jsonl has no text of c4, only of Book, C4: name those"):
        prep(path, tmp_path / "out", max_tokens=5000, mix="c4:1,Book:1")
    assert snapshot(tmp_path / "out") == {}


def test_validation_text_without_the_mixs_sources(tmp_path):
    path, val = (shard(tmp_path / f"{name}.jsonl", some_docs(50, (name,))) for name in ("C4", "Book"))
    with pytest.raises(UserError, match=r"--val_source=.*Book\.jsonl has no text of the sources in --mix=C4:1"):
        prep(path, tmp_path / "out", val_source=val, max_tokens=500, mix="C4:1")


def test_mix_of_a_source_that_runs_dry(tmp_path, capsys):
    """All of its documents, once; the others keep their shares; it is said."""
    docs = some_docs(300, ("C4", "C4", "Wikipedia"))
    val = shard(tmp_path / "v.jsonl", some_docs(30, ("C4", "Wikipedia"), seed=1))
    few = [doc for doc in docs if doc[1] == "Wikipedia"]
    prep(shard(tmp_path / "a.jsonl", docs), tmp_path / "out", val_source=val, max_tokens=6_000_000, mix="C4:1,Wikipedia:99")
    assert bag(in_bin(tmp_path / "out" / "train.bin")) == bag(docs)
    assert f"{sum(len(text.encode()) + 1 for text, _ in few):,}" in capsys.readouterr().out


@pytest.mark.parametrize("mix, max_tokens, words", [
    ("C4:1", 0, "max_tokens"), ("C4", 100, "mix"), ("C4:", 100, "mix"), ("C4:0", 100, "mix"), ("C4:-1,Book:2", 100, "mix"),
    ("C4:nan", 100, "mix"), ("C4:inf", 100, "mix"), ("C4:1:2", 100, "mix"), (",", 100, "mix"),
])
def test_wrong_mix(tmp_path, mix, max_tokens, words):
    path = shard(tmp_path / "a.jsonl", some_docs())
    with pytest.raises(UserError, match=f"--{words}"):
        prep(path, tmp_path / "out", mix=mix, max_tokens=max_tokens)
    assert snapshot(tmp_path / "out") == {}


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers


def test_ids_beyond_65535_survive(tmp_path):
    """a vocabulary of 70,000 makes uint32 bins; nothing wraps around."""
    words = [f" w{i}" .translate(str.maketrans("0123456789", "abcdefghij")).encode() for i in range(70_000 - 256)]
    tokens = TOKENS[:256] + words
    path = ranks_file(tmp_path / "large.tiktoken", tokens)
    docs = [("".join(words[i].decode() for i in range(k, len(words), 997)), "C4") for k in range(12)]
    meta = prep(shard(tmp_path / "a.jsonl", docs), tmp_path / "out", tokenizer=path)
    assert (meta["vocab_size"], meta["eot"], meta["dtype"]) == (70_001, 70_000, "uint32")
    train, val = (in_bin(tmp_path / "out" / f"{name}.bin", tokens, "<u4") for name in ("train", "val"))
    assert bag(train) + bag(val) == bag(docs)
    ids = np.fromfile(tmp_path / "out" / "train.bin", "<u4")
    assert np.count_nonzero((ids >= 1 << 16) & (ids < 70_000)) > 10
    data = prepare.Data(str(tmp_path / "out"))
    assert data.vocab_size == 70_001 and data.train.tokens == len(ids)
    assert data.train.read([0], len(ids) - 1).tolist() == [ids.tolist()]


@pytest.mark.parametrize("n, dtype", [(65_535, "uint16"), (65_536, "uint32")])  # with the end of text 65,536 and 65,537 ids
def test_the_narrowest_type_that_holds_every_id(tmp_path, n, dtype):
    words = ["".join(chr(97 + i // 26 ** k % 26) for k in range(4)).encode() for i in range(n - 256)]
    path = ranks_file(tmp_path / "r.tiktoken", TOKENS[:256] + words)
    meta = prep(shard(tmp_path / "a.jsonl", [(f"{i} {words[-1].decode()}", "C4") for i in range(9)]), tmp_path / "out",
                tokenizer=path)
    assert meta["dtype"] == dtype and meta["eot"] == n
    ids = np.fromfile(tmp_path / "out" / "train.bin", "<u2" if dtype == "uint16" else "<u4")
    assert ids[-1] == n


@pytest.mark.parametrize("damage", ["empty", "cut in a line", "no ranks", "line lost", "binary", "rank twice", "cut early",
                                    "missing", "folder", "negative"])
def test_damaged_ranks_file(tmp_path, damage):
    """One line that names the file; a file that lacks single bytes must not panic at some document later."""
    path = tmp_path / "bad.tiktoken"
    data = (tmp_path / ranks_file(path)).read_bytes()
    lines = data.splitlines(keepends=True)
    if damage in ("missing", "folder"):
        path.unlink()
        if damage == "folder":
            path.mkdir()
    else:
        path.write_bytes({
            "empty": b"", "cut in a line": data[:-3], "no ranks": b"".join(line.split()[0] + b"\n" for line in lines),
            "line lost": b"".join(lines[:100] + lines[101:]), "binary": bytes(range(256)) * 9,
            "rank twice": b"".join(lines[:-1] + [lines[-1].split()[0] + b" 5\n"]), "cut early": b"".join(lines[:100]),
            "negative": data + base64.b64encode(b"neg") + b" -1\n"}[damage])
    source = shard(tmp_path / "a.jsonl", some_docs())
    if damage == "cut early":
        done = cli(f"--source={source}", f"--out_dir={tmp_path / 'out'}", f"--tokenizer={path}", "--num_proc=1")
        assert "bad.tiktoken" in one_line(done)
    else:
        with pytest.raises(UserError, match=r"bad\.tiktoken"):
            prep(source, tmp_path / "out", tokenizer=str(path))
    assert snapshot(tmp_path / "out") == {}


def test_tokenizer_json(tmp_path):
    """A tokenizer.json of the package tokenizers; its special tokens in documents are text."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(["the then in the other"] * 9, tokenizers.trainers.BpeTrainer(
        vocab_size=270, special_tokens=["<|endoftext|>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    docs = some_docs()
    meta = prep(shard(tmp_path / "a.jsonl", docs), tmp_path / "out", tokenizer=str(path))
    assert meta["eot"] == 0 and meta["vocab_size"] == tokenizer.get_vocab_size()
    texts = []
    for name in ("train", "val"):
        ids = np.fromfile(tmp_path / "out" / f"{name}.bin", "<u2")
        texts += [prepare.get_tokenizer(str(path)).decode_bytes(doc[:-1]).decode()
                  for doc in np.split(ids, np.flatnonzero(ids == 0) + 1)[:-1]]
    assert collections.Counter(texts) == bag(docs)
    tokenizer.enable_truncation(8)  # as it may have been saved with
    tokenizer.enable_padding(length=16, pad_id=7)
    tokenizer.save(str(tmp_path / "cut.json"))
    prep(tmp_path / "a.jsonl", tmp_path / "whole", tokenizer=str(tmp_path / "cut.json"))
    for name in ("train.bin", "val.bin"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    content = json.loads(path.read_text())
    content["added_tokens"][0]["id"] = content["model"]["vocab"]["<|endoftext|>"] = 70_000
    (tmp_path / "holes.json").write_text(json.dumps(content))
    meta = prep(tmp_path / "a.jsonl", tmp_path / "holes", tokenizer=str(tmp_path / "holes.json"))
    assert (meta["vocab_size"], meta["eot"], meta["dtype"]) == (70_001, 70_000, "uint32")
    assert max(np.fromfile(tmp_path / "holes/train.bin", "<u4")) == 70_000
    for content in (path.read_bytes()[:-50], b"", b"{}"):
        (tmp_path / "bad.json").write_bytes(content)
        with pytest.raises(UserError, match=r"bad\.json"):
            prepare.get_tokenizer(str(tmp_path / "bad.json"))


def test_a_tokenizer_json_of_sentencepieces_kind(tmp_path):
    """Its words begin with another sign than byte-level BPE's, and it falls back to bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = [f"<0x{i:02X}>" for i in range(256)]
    vocab = {t: i for i, t in enumerate(["<unk>", "</s>", *alphabet, "▁", *"abcdeé", "ab", "▁ab"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("a", "b"), ("▁", "ab")], byte_fallback=True,
                                                           unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(),
                                                      tokenizers.decoders.Fuse()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours, text = prepare.get_tokenizer(str(tmp_path / "tokenizer.json")), "ab cd abé\n<unk> 値 <0x41>"
    ids = ours.encode(text)
    assert ours.decode_bytes(ids).decode() == text and b" ab" in [ours.decode_bytes([i]) for i in ids]


@pytest.mark.parametrize("name", ["gpt3", "", "Bytes", "gpt2.model"])
def test_unknown_tokenizer(tmp_path, name):
    path = shard(tmp_path / "a.jsonl", some_docs())
    with pytest.raises(UserError, match=re.escape(repr(name)) + r"(?s:.*)bytes"):
        prep(path, tmp_path / "out", tokenizer=name)


def test_no_network_and_no_cache(tmp_path, offline, monkeypatch):
    """one line that names the cache's variable, before any work; the bytes tokenizer needs neither."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    path = shard(tmp_path / "a.jsonl", some_docs())
    began = time.time()
    done = cli(f"--source={path}", f"--out_dir={tmp_path / 'out'}", "--num_proc=2")
    assert all(word in one_line(done) for word in ("TIKTOKEN_CACHE_DIR", "gpt2", "--tokenizer=bytes"))
    assert time.time() - began < 10 and not (tmp_path / "out").exists()
    prep(path, tmp_path / "out")


@pytest.mark.parametrize("package, options", [("tiktoken", dict(tokenizer="gpt2")), ("zstandard", {}),
                                              ("tokenizers", dict(tokenizer="tokenizer.json"))])
def test_a_missing_package_is_named(tmp_path, monkeypatch, package, options):
    """what to install, instead of a traceback; what does not need it works."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"pip install {package}"):
        prep(shard(tmp_path / "a.jsonl.zst", some_docs()), tmp_path / "out", **options)
    assert snapshot(tmp_path / "out") == {}
    prep(shard(tmp_path / "b.jsonl.gz", some_docs()), tmp_path / "out")


LONG = {"carets": "^" * 1_000_000, "letters": "a" * 200_000, "digits": "7" * 1_000_000, "one ideograph": "中" * 1_000_000,
        "ideographs": "".join(chr(0x4e00 + i % 20_000) for i in range(1_000_000)),
        "spaces": "a" + " " * 1_200_000 + "b", "lines": "\n" * 1_200_000 + "b"}


@pytest.mark.parametrize("name", LONG)
def test_a_long_run_of_characters_is_fast_and_does_not_kill_the_job(tmp_path, ranks, name):
    """with the test's ranks: under ten seconds; either exact or reported, and the other documents are there."""
    docs = [*some_docs(6), (LONG[name], "C4"), ("last", "C4")]
    began = time.time()
    prep(shard(tmp_path / "a.jsonl", docs), tmp_path / "out", tokenizer=ranks)
    assert time.time() - began < 10
    check_bins(tmp_path / "out", docs, TOKENS)


@pytest.mark.parametrize("name", LONG)
def test_a_long_run_of_characters_with_gpt2(tmp_path, gpt2, name):
    """A million equal characters, or none that break a word, are tokenized in seconds."""
    docs = [*some_docs(6), (LONG[name], "C4"), ("last", "C4")]
    began = time.time()
    prep(shard(tmp_path / "a.jsonl", docs), tmp_path / "out", tokenizer="gpt2")
    assert time.time() - began < 10
    texts = []
    for split in ("train", "val"):
        ids = np.fromfile(tmp_path / "out" / f"{split}.bin", "<u2")
        texts += [gpt2.decode(doc[:-1].tolist()) for doc in np.split(ids, np.flatnonzero(ids == 50256) + 1)[:-1]]
    assert collections.Counter(texts) == bag(docs)


# ---------------------------------------------------------------------------------------------------------------------
# Bad documents


def test_bad_documents_are_counted_and_the_run_goes_on(tmp_path, capsys):
    """Each line is one of several, so that a count per kind can be told from another's."""
    docs = some_docs(40)
    not_json = [b"not json\n"] * 2 + [b'{"text": "cut\n'] + [b"[" * 100_000 + b"\n"]
    no_text = [b'{"no": "text"}\n'] * 4 + [b'{"text": 5}\n'] * 3 + [b'{"text": ["a"]}\n'] + [b'["list"]\n'] * 2 \
        + [b"null\n", b"7\n", b'"text"\n']
    bad = not_json + no_text + [b'{"text": null}\n'] * 5 + [record("")] * 6 + [record(" \n\t\u3000")] \
        + [b'{"text": "\xff\xfe"}\n'] * 8
    good = [record(*doc) for doc in docs]
    lines = good + bad
    random.Random(0).shuffle(lines)
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines) + b"\n  \n\n")  # empty lines are no documents
    meta = prep(tmp_path / "a.jsonl", tmp_path / "out")
    check_bins(tmp_path / "out", docs)
    skipped = meta["skipped"]
    assert sum(skipped.values()) == len(bad)
    for name, n in {"JSON": len(not_json), "null": 5, "empty": 7, "UTF-8": 8, 'no field "text"': len(no_text)}.items():
        assert sum(count for kind, count in skipped.items() if name in kind) == n, name
    out = capsys.readouterr().out
    first = 1 + min(lines.index(line) for line in not_json)
    for name, n in skipped.items():
        assert re.search(rf"{re.escape(name)}: {n}\b", out)
    assert re.search(rf"a\.jsonl line {first}\b", out)  # where the first of a kind is


def test_lone_surrogates(tmp_path):
    """Half a pair, which JSON can spell: the document is kept without it and counted; whole pairs are whole."""
    lines = [b'{"text": "a\\ud800b"}\n', b'{"text": "\\udc00"}\n', b'{"text": "\\ud83d\\ude42"}\n', b'{"text": "plain"}\n']
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    meta = prep(tmp_path / "a.jsonl", tmp_path / "out", val_fraction=1e-9)
    texts = bag(in_bin(tmp_path / "out" / "train.bin") + in_bin(tmp_path / "out" / "val.bin"))
    assert texts["🙂"] == 1 and texts["plain"] == 1 and texts.total() == 4
    assert any(re.fullmatch("a[\ufffd?]b", text) for text in texts)
    assert [n for kind, n in meta["skipped"].items() if "surrogate" in kind] == [2]


def test_a_txt_that_is_not_utf8(tmp_path):
    for i in range(8):
        (tmp_path / f"{i}.txt").write_bytes(f"file {i}".encode())
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    meta = prep(tmp_path, tmp_path / "out")
    assert [n for kind, n in meta["skipped"].items() if "UTF-8" in kind] == [1]
    texts = bag(in_bin(tmp_path / "out" / "train.bin") + in_bin(tmp_path / "out" / "val.bin"))
    assert texts.total() == 9 and texts["caf\ufffd\n"] == 1


def test_a_txt_of_white_space_is_no_document(tmp_path):
    """white space only is skipped and counted, in a text file as in a record."""
    for i in range(8):
        (tmp_path / f"{i}.txt").write_bytes(f"file {i}".encode())
    (tmp_path / "white.txt").write_bytes(b" \n\n\t\n")
    meta = prep(tmp_path, tmp_path / "out")
    assert bag(in_bin(tmp_path / "out" / "train.bin") + in_bin(tmp_path / "out" / "val.bin")).total() == 8
    assert sum(meta["skipped"].values()) == 1


@pytest.mark.parametrize("content", [record("") * 5, b"junk\n" * 5, b'{"content": "other field"}\n' * 5, b"\n\n"],
                         ids=["empty", "junk", "field", "blank"])
def test_all_documents_bad(tmp_path, content):
    (tmp_path / "a.jsonl").write_bytes(content)
    done = cli(f"--source={tmp_path / 'a.jsonl'}", f"--out_dir={tmp_path / 'out'}", "--tokenizer=bytes", "--num_proc=1")
    message = one_line(done)
    assert "a.jsonl" in message and (content == b"\n\n" or re.search(r"\b5\b", message))
    assert snapshot(tmp_path / "out") == {}


# ---------------------------------------------------------------------------------------------------------------------
# Bad shards

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456\n"
BODY = [record(f"document {i} " + str(random.Random(i).random()), "C4") for i in range(60)]


def frames(suffix, parts=3):
    n = len(BODY) // parts
    return [compress(b"".join(BODY[i * n:(i + 1) * n]), suffix) for i in range(parts)]


def flip(data, share=0.5):
    at = int(len(data) * share)
    return data[:at] + bytes(b ^ 0xA5 for b in data[at:at + 40]) + data[at + 40:]


# name -> (file name, content, documents surely before the damage, what the message says besides the file's name)
BAD = {
    "empty": ("b.jsonl", b"", 0, r"empty|0 bytes"),
    "empty zst": ("b.jsonl.zst", b"", 0, r"empty|0 bytes"),
    "empty txt": ("b.txt", b"", 0, r"empty|0 bytes"),
    "cut zst": ("b.jsonl.zst", b"".join(frames(".zst"))[:-50], 40, rf"byte {len(b''.join(frames('.zst'))) - 50}\b"),
    "cut gz": ("b.jsonl.gz", b"".join(frames(".gz"))[:-50], 40, rf"byte {len(b''.join(frames('.gz'))) - 50}\b"),
    "cut gz in its last bytes": ("b.jsonl.gz", compress(b"".join(BODY), ".gz")[:-3], 60, r"byte \d+"),
    "cut zst in its last bytes": ("b.jsonl.zst", compress(b"".join(BODY), ".zst")[:-2], 60, r"byte \d+"),
    "text named zst": ("b.jsonl.zst", b"".join(BODY), 0, r"byte 0\b"),
    "text named gz": ("b.jsonl.gz", b"".join(BODY), 0, r"byte 0\b"),
    "gz named zst": ("b.jsonl.zst", compress(b"".join(BODY), ".gz"), 0, r"byte 0\b"),
    "pointer": ("b.jsonl.zst", POINTER, 0, r"LFS"),
    "plain pointer": ("b.jsonl", POINTER, 0, r"LFS"),
    "damaged zst": ("b.jsonl.zst", frames(".zst")[0] + flip(frames(".zst")[1]) + frames(".zst")[2], 20, r"byte \d+"),
    "damaged gz": ("b.jsonl.gz", frames(".gz")[0] + flip(frames(".gz")[1]) + frames(".gz")[2], 20, r"byte \d+"),
    "junk after zst": ("b.jsonl.zst", frames(".zst")[0] + b"junk that is no frame", 20, rf"byte {len(frames('.zst')[0])}\b"),
    "cut jsonl": ("b.jsonl", b"".join(BODY)[:-30], 59, r"line 60\b"),
    "cut jsonl in zst": ("b.jsonl.zst", compress(b"".join(BODY)[:-30], ".zst"), 59, r"line 60\b"),
    "cut in a character": ("b.jsonl", b"".join(BODY) + '{"text": "é'.encode()[:-1], 60, r"line 61\b"),
    "cut and nested": ("b.jsonl", b"".join(BODY) + b"[" * 100_000, 60, r"line 61\b"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_shard(tmp_path, name):
    """The default stops with the file, the place and exit code 2, and changes nothing; skip goes on without its rest."""
    file, content, before, words = BAD[name]
    first, last = some_docs(10), some_docs(10, seed=1)
    shard(tmp_path / "in" / "a.jsonl.zst", first)
    (tmp_path / "in" / file).write_bytes(content)
    shard(tmp_path / "in" / "c.jsonl", last)
    out = tmp_path / "out"
    prep(shard(tmp_path / "old.jsonl", some_docs(30, ("Old",), seed=2)), out)
    old = snapshot(out)

    with pytest.raises(UserError) as e:
        prep(tmp_path / "in", out)
    message = str(e.value)
    assert os.path.join("in", file) in message and re.search(words, message), message
    assert re.search(r"\b(byte|line) \d+|\d+ bytes", message) and "on_error=skip" in message and "\n" not in message
    assert snapshot(out) == old
    prepare.Data(str(out))

    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        meta = prep(tmp_path / "in", out, on_error="skip")
    assert file in err.getvalue() and re.search(words, err.getvalue())
    assert "b.jsonl" in str(meta["skipped"]) or sum(n for k, n in meta["skipped"].items() if "shard" in k) == 1
    kept = bag(in_bin(out / "train.bin") + in_bin(out / "val.bin"))
    assert not bag(first + last) - kept  # every document of the good shards
    rest, body = kept - bag(first + last), [json.loads(line)["text"] for line in BODY]
    assert not collections.Counter(body[:before]) - rest  # those before the damage
    assert not rest - collections.Counter(body)  # and nothing that is no document
    assert not [name for name in snapshot(out) if name.endswith(".tmp")]


@pytest.mark.parametrize("name", ["empty", "cut zst", "cut jsonl"])
def test_bad_shard_on_the_command_line(tmp_path, name):
    prep(shard(tmp_path / "old.jsonl", some_docs()), tmp_path / "out")
    old = snapshot(tmp_path / "out")
    path = tmp_path / BAD[name][0]
    path.write_bytes(BAD[name][1])
    assert str(path) in one_line(cli(f"--source={path}", f"--out_dir={tmp_path / 'out'}", "--tokenizer=bytes", "--num_proc=1"))
    assert snapshot(tmp_path / "out") == old


@pytest.mark.parametrize("suffix", [".zst", ".gz"])
def test_damage_far_inside_a_large_frame(tmp_path, suffix):
    """1.5 MB in one frame, damaged near its end: the place is told and most of what is before it is kept."""
    texts = [f"{i} {random.Random(i).randbytes(1000).hex()}" for i in range(1500)]
    path = tmp_path / ("a.jsonl" + suffix)
    data = compress(b"".join(map(record, texts)), suffix)
    at = len(data) * 9 // 10
    path.write_bytes(data[:at] + b"\xff" * 2000 + data[at + 2000:])
    with pytest.raises(UserError) as e:
        prep(path, tmp_path / "out")
    place = re.search(r"byte ([\d,]+)", str(e.value))
    assert place and len(data) // 2 < int(place.group(1).replace(",", "")) <= len(data)
    prep(path, tmp_path / "out", on_error="skip")
    kept = bag(in_bin(tmp_path / "out" / "train.bin") + in_bin(tmp_path / "out" / "val.bin"))
    assert not collections.Counter(texts[:900]) - kept  # what follows the damage may be nonsense until it is noticed


def test_all_shards_bad_is_an_error_even_with_skip(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        (tmp_path / "in" / f"{name}.jsonl.zst").write_bytes(b"junk")
    done = cli(f"--source={tmp_path / 'in'}", f"--out_dir={tmp_path / 'out'}", "--tokenizer=bytes", "--on_error=skip")
    assert str(tmp_path / "in") in one_line(done)
    assert snapshot(tmp_path / "out") == {}


def test_a_bad_shard_with_processes(tmp_path):
    """Workers are busy when the reader finds the damage: the run still ends at once, with one line."""
    shard(tmp_path / "in" / "a.jsonl", some_docs(3000, words=400))
    (tmp_path / "in" / "b.jsonl.zst").write_bytes(BAD["damaged zst"][1])
    began = time.time()
    done = cli(f"--source={tmp_path / 'in'}", f"--out_dir={tmp_path / 'out'}", "--tokenizer=bytes", "--num_proc=2")
    assert "b.jsonl.zst" in one_line(done) and time.time() - began < 20
    assert snapshot(tmp_path / "out") == {}


# ---------------------------------------------------------------------------------------------------------------------
# Sources and output folders


@pytest.mark.parametrize("option", ["source", "val_source"])
@pytest.mark.parametrize("what, words", [("missing/folder", "missing/folder"), ("nothing", r"jsonl.*zst.*txt"),
                                         ("notes.md", "notes.md")])
def test_no_source(tmp_path, option, what, words):
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "readme.md").write_text("no shard")
    (tmp_path / "notes.md").write_text("no shard")
    good = shard(tmp_path / "good.jsonl", some_docs())
    options = {"source": good, option: str(tmp_path / what)}
    with pytest.raises(UserError, match=words) as e:
        prep(options.pop("source"), tmp_path / "out", **options)
    assert str(tmp_path / what) in str(e.value) and "\n" not in str(e.value)
    assert snapshot(tmp_path / "out") == {}


def test_data_files(tmp_path):
    docs = some_docs(60)
    for i, name in enumerate(["chunk1/a.jsonl", "chunk1/b.jsonl.zst", "chunk2/a.jsonl"]):
        shard(tmp_path / "in" / name, docs[i * 20:(i + 1) * 20])
    for patterns, want in (("chunk1/*", docs[:40]), ("chunk1/a*,chunk2/*", docs[:20] + docs[40:]), ("*.zst", docs[20:40])):
        prep(tmp_path / "in", tmp_path / "out", data_files=patterns)
        check_bins(tmp_path / "out", want)
    with pytest.raises(UserError, match=r"chunk9/\*"):
        prep(tmp_path / "in", tmp_path / "out", data_files="chunk9/*")


@pytest.mark.parametrize("name", ["validation", "val"])
def test_a_folder_with_its_own_validation_part(tmp_path, name):
    """SlimPajama's layout, train/ and validation/: nothing of train/ is held out, nothing of validation/ is trained on."""
    train, val = some_docs(60), some_docs(20, seed=1)
    shard(tmp_path / "in" / "train" / "chunk1" / "a.jsonl.zst", train)
    shard(tmp_path / "in" / name / "chunk1" / "a.jsonl.zst", val)
    prep(tmp_path / "in", tmp_path / "out")
    check_bins(tmp_path / "out", train + val)
    assert bag(in_bin(tmp_path / "out" / "train.bin")) == bag(train)
    prep(tmp_path / "in", tmp_path / "out", val_source=shard(tmp_path / "v.jsonl", some_docs(9, seed=2)))
    assert bag(in_bin(tmp_path / "out" / "train.bin")) == bag(train)
    assert bag(in_bin(tmp_path / "out" / "val.bin")) == bag(some_docs(9, seed=2))


@pytest.mark.parametrize("train, val, options", [
    ("data.jsonl", "val.jsonl", {}), ("data.jsonl", "validation/v.jsonl", {}),
    ("a/data.jsonl", "b/v.jsonl", {"val_source": "b"}), ("data.jsonl", "held.jsonl", {"val_source": "held.jsonl"}),
    ("data.jsonl", "val.jsonl", {"data_files": "*.jsonl"})])
def test_validation_text_is_never_trained_on(tmp_path, train, val, options):
    """Wherever it lies within the source, and whether the shards have names of parts or not."""
    docs, held = some_docs(40), some_docs(20, seed=1)
    shard(tmp_path / "in" / train, docs)
    shard(tmp_path / "in" / val, held)
    options = {k: v if k == "data_files" else str(tmp_path / "in" / v) for k, v in options.items()}
    prep(tmp_path / "in", tmp_path / "out", **options)
    assert bag(in_bin(tmp_path / "out" / "train.bin")) == bag(docs) and bag(in_bin(tmp_path / "out" / "val.bin")) == bag(held)


def test_nothing_but_validation_text_is_no_source(tmp_path):
    path = shard(tmp_path / "a.jsonl", some_docs())
    with pytest.raises(UserError, match="is not of val_source="):
        prep(path, tmp_path / "out", val_source=path)


@pytest.mark.parametrize("meta", ["struct", "text"])
def test_parquet(tmp_path, meta):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    docs = some_docs(600)
    rows = [dict(text=text, meta={"redpajama_set_name": "RedPajama" + source}, id=i) for i, (text, source) in enumerate(docs)]
    if meta == "text":
        rows = [{**row, "meta": json.dumps(row["meta"])} for row in rows]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=250)
    prep(path, tmp_path / "out")
    check_bins(tmp_path / "out", docs)
    old = snapshot(tmp_path / "out")
    column = pyarrow.array([b"caf\xc3\xa9", b"\xff"] * 20, pyarrow.binary())
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "binary.parquet")
    meta = prep(tmp_path / "binary.parquet", tmp_path / "binary", val_source=shard(tmp_path / "v.jsonl", some_docs()))
    assert set(bag(in_bin(tmp_path / "binary/train.bin"))) == {"café", "\ufffd"}
    assert meta["skipped"] == {"lone surrogates (replaced)": 20}
    (tmp_path / "two").mkdir()
    shutil.copy(path, tmp_path / "two/a.parquet")
    parquet.write_table(pyarrow.table({"content": ["a"] * 3}), tmp_path / "two/index.parquet")  # not read, row by row
    meta = prep(tmp_path / "two", tmp_path / "beside")
    assert meta["skipped"] == {'no field "text"': 1}
    check_bins(tmp_path / "beside", docs)
    latin = pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, pyarrow.py_buffer(b"\0\0\0\0\4\0\0\0"), pyarrow.py_buffer(
        b"caf\xe9")])
    parquet.write_table(pyarrow.table({"text": latin}), tmp_path / "bad.parquet")
    with pytest.raises(UserError, match=r"bad\.parquet: not Parquet, cut or damaged"):
        prep(tmp_path / "bad.parquet", tmp_path / "out")
    for content in (path.read_bytes()[:-100], b"no parquet at all", b""):
        (tmp_path / "bad.parquet").write_bytes(content)
        with pytest.raises(UserError, match=r"bad\.parquet"):
            prep(tmp_path / "bad.parquet", tmp_path / "out")
        assert snapshot(tmp_path / "out") == old


def test_local_files_need_no_datasets_and_a_hub_set_says_so(tmp_path, monkeypatch):
    """the package datasets is for hub names alone; without it the message tells what to install."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.chdir(tmp_path)
    docs = some_docs()
    shard(tmp_path / "owner" / "name" / "a.jsonl", docs)
    prep("owner/name", tmp_path / "out")  # an existing path wins over a hub name
    check_bins(tmp_path / "out", docs)
    old = snapshot(tmp_path / "out")
    with pytest.raises(UserError, match=r"somebody/nothing.*pip install datasets"):
        prep("somebody/nothing", tmp_path / "out")
    assert snapshot(tmp_path / "out") == old


def test_paths_with_spaces_equals_and_unicode(tmp_path):
    docs = some_docs()
    folder = tmp_path / "mes données = α" / "x.y"
    shard(folder / "un fichier=1 ñ.jsonl.zst", docs)
    out = tmp_path / "out = ß" / "deep"
    done = cli(f"--source={folder}", f"--out_dir={out}", "--tokenizer=bytes", "--num_proc=2", "--val_fraction=0.2")
    assert done.returncode == 0, done.stderr
    check_bins(out, docs)


def test_the_default_out_dir_has_the_sources_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    docs = some_docs()
    shard(tmp_path / "in" / "mine.jsonl.zst", docs)
    prep("in/mine.jsonl.zst", "")
    check_bins(tmp_path / "data" / "mine", docs)
    prep("in/", "")
    check_bins(tmp_path / "data" / "in", docs)
    assert prepare.Data("mine").fingerprint == prepare.Data("data/in").fingerprint
    for name in ("corpus.v1", "corpus.v2", ".hidden"):
        shard(tmp_path / name / "a.jsonl", docs)
        prep(name, "")
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == [".hidden", "corpus.v1", "corpus.v2", "in", "mine"]


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def flock(*_):
        raise OSError(38, "Function not implemented")
    monkeypatch.setattr(fcntl, "flock", flock)
    prep(shard(tmp_path / "a.jsonl", docs := some_docs()), tmp_path / "out")
    check_bins(tmp_path / "out", docs)


def test_a_file_with_a_splits_name_hides_no_other_in_silence(tmp_path, capsys):
    docs = some_docs()
    for name in ("a", "b", "train_timetable"):
        shard(tmp_path / "set" / f"{name}.jsonl", docs)
    prep(tmp_path / "set", tmp_path / "out")
    assert "a.jsonl and 1 more are not read, since others are named train_timetable.jsonl" in capsys.readouterr().out
    prep(tmp_path / "set", tmp_path / "both", data_files="a.jsonl,train*")
    assert "a.jsonl and 0 more are not read" in capsys.readouterr().out
    prep(tmp_path / "set", tmp_path / "picked", data_files="a.jsonl")
    check_bins(tmp_path / "picked", docs)
    (tmp_path / "set/a.jsonl").rename(tmp_path / "set/.a.jsonl")
    prep(tmp_path / "set", tmp_path / "held", val_source=str(tmp_path / "set/b.jsonl"))
    assert "not read" not in capsys.readouterr().out


def test_the_out_dir_is_a_file(tmp_path):
    (tmp_path / "out").write_text("a file")
    done = cli(f"--source={shard(tmp_path / 'a.jsonl', some_docs())}", f"--out_dir={tmp_path / 'out'}", "--tokenizer=bytes")
    assert str(tmp_path / "out") in one_line(done) and (tmp_path / "out").read_text() == "a file"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_out_dir(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(0o500)
    done = cli(f"--source={shard(tmp_path / 'a.jsonl', some_docs())}", f"--out_dir={tmp_path / 'out'}", "--tokenizer=bytes")
    assert str(tmp_path / "out") in one_line(done)


@linux
@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_full_disk(tmp_path, num_proc):
    """Files of at most 300 kB: the write fails in the middle. One line, the old bins are whole, nothing is left."""
    prep(shard(tmp_path / "old.jsonl", some_docs()), tmp_path / "out")
    old = snapshot(tmp_path / "out")
    path = shard(tmp_path / "a.jsonl", [(str(i) * 2000, "C4") for i in range(500)])
    done = cli(f"--source={path}", f"--out_dir={tmp_path / 'out'}", "--tokenizer=bytes", f"--num_proc={num_proc}",
               preexec_fn=lambda: __import__("resource").setrlimit(__import__("resource").RLIMIT_FSIZE, (300_000, 300_000)))
    one_line(done)
    assert snapshot(tmp_path / "out") == old


@pytest.mark.parametrize("fail_at", range(5))
def test_a_crash_while_the_files_are_renamed(tmp_path, monkeypatch, fail_at):
    """whichever rename it stops at, Data opens the old set or the new set, or refuses; it never takes a mixture."""
    old_docs, new_docs = some_docs(40, ("C4", "Book")), some_docs(55, ("C4", "Book"), seed=1)
    prep(shard(tmp_path / "a.jsonl", old_docs), tmp_path / "out")
    path = shard(tmp_path / "b.jsonl", new_docs)
    calls, replace = [], os.replace

    def crash(*names):
        if len(calls) == fail_at:
            raise KeyboardInterrupt
        calls.append(names)
        replace(*names)

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        prep(path, tmp_path / "out")
    monkeypatch.undo()
    try:
        prepare.Data(str(tmp_path / "out"))
    except UserError as e:
        assert fail_at > 0 and ".bin" in str(e)
    else:
        check_bins(tmp_path / "out", old_docs)
    prep(path, tmp_path / "out")
    check_bins(tmp_path / "out", new_docs)


# ---------------------------------------------------------------------------------------------------------------------
# Processes


@pytest.fixture(scope="module")
def slow_source(tmp_path_factory):
    """Text that takes a few seconds, with tokens that need many merges."""
    folder = tmp_path_factory.mktemp("slow")
    rng = random.Random(0)
    text = "".join(rng.choices("thein xy", k=20_000))
    lines = [record(f"{i} {text[i % 9000:]}") for i in range(2500)]
    (folder / "slow.jsonl").write_bytes(b"".join(lines))
    return str(folder / "slow.jsonl")


def workers_of(pid):
    """Process ids of a program's tokenizing processes."""
    found = []
    for child in subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split() \
            if shutil.which("ps") else [p for p in os.listdir("/proc") if p.isdigit()]:
        with contextlib.suppress(OSError):
            with open(f"/proc/{child}/stat") as f:
                parent = int(f.read().rsplit(")", 1)[1].split()[1])
            with open(f"/proc/{child}/cmdline") as f:
                line = f.read()
            if parent == pid and "resource_tracker" not in line:
                found.append(int(child))
    return found


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(condition, seconds, what):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, f"{seconds} s and still not: {what}"
        time.sleep(0.01)


@contextlib.contextmanager
def in_the_middle(source, out_dir, ranks):
    """A prepare with two workers that has begun to write. Yields (process, workers); kills what is left."""
    log = out_dir.parent / "log.txt"  # no pipe: a worker left over would keep it open
    with open(log, "w") as f:
        process = subprocess.Popen([sys.executable, SCRIPT, f"--source={source}", f"--out_dir={out_dir}",
                                    f"--tokenizer={ranks}", "--num_proc=2"], stdout=subprocess.DEVNULL, stderr=f)
    process.log, workers = log, []
    try:
        wait_for(lambda: process.poll() is not None or any(p.stat().st_size for p in out_dir.glob("*.tmp")), 20, "writing")
        assert process.poll() is None, log.read_text()
        workers = workers_of(process.pid)
        assert len(workers) == 2
        yield process, workers
    finally:
        for pid in (process.pid, *workers):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGKILL)
        process.wait()


@linux
def test_ctrl_c(tmp_path, slow_source, ranks):
    """It reaches all processes of a terminal: one word, exit code 130; the old bins stay, no worker is left."""
    out = tmp_path / "out"
    prep(shard(tmp_path / "old.jsonl", some_docs()), out)
    old = snapshot(out)
    with in_the_middle(slow_source, out, ranks) as (process, workers):
        for pid in (*workers, process.pid):
            os.kill(pid, signal.SIGINT)
        assert process.wait(timeout=20) == 130
        wait_for(lambda: not any(map(alive, workers)), 20, "the workers' end")
        assert process.log.read_text().endswith("\nstopped\n") and "Traceback" not in process.log.read_text()
    assert snapshot(out) == old


@linux
def test_a_worker_killed_while_it_hands_over_a_result(tmp_path, slow_source, ranks):
    """The pool then waits for the rest of it, and the other workers for the lock: what its own watching does not see."""
    (tmp_path / "sitecustomize.py").write_text('''
import multiprocessing, os, signal, struct
from multiprocessing.connection import Connection
def send(self, content, do=Connection._send_bytes):
    if len(content) > 50_000 and multiprocessing.parent_process():
        os.write(self.fileno(), struct.pack("!i", len(content)) + bytes(content[:1000]))
        os.kill(os.getpid(), signal.SIGKILL)
    do(self, content)
Connection._send_bytes = send
''')
    done = cli(f"--source={slow_source}", f"--out_dir={tmp_path}/out", f"--tokenizer={ranks}", "--num_proc=2",
               env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert "a worker process died" in one_line(done) and snapshot(tmp_path / "out") == {}


@linux
def test_a_killed_worker_ends_the_run(tmp_path, slow_source, ranks):
    """an error and no hang; the old bins stay, nothing is left."""
    out = tmp_path / "out"
    prep(shard(tmp_path / "old.jsonl", some_docs()), out)
    old = snapshot(out)
    with in_the_middle(slow_source, out, ranks) as (process, workers):
        os.kill(workers[0], signal.SIGKILL)
        process.wait(timeout=20)
        message = one_line(subprocess.CompletedProcess([], process.returncode, "", process.log.read_text()))
        assert "process" in message and "num_proc" in message
        wait_for(lambda: not any(map(alive, workers)), 5, "the other worker gone")
    assert snapshot(out) == old
    prepare.Data(str(out))


@linux
def test_a_killed_program_leaves_the_old_bins(tmp_path, slow_source, ranks):
    """kill -9 of the whole program. The old set opens, the lock is free, and the next run leaves no debris."""
    out = tmp_path / "out"
    docs = some_docs(30, ("Old",))
    path = shard(tmp_path / "old.jsonl", docs)
    prep(path, out)
    old, fingerprint = snapshot(out), prepare.Data(str(out)).fingerprint
    with in_the_middle(slow_source, out, ranks) as (process, workers):
        process.kill()
        process.wait()
        assert {name: data for name, data in snapshot(out).items() if not name.endswith(".tmp")} == old
        assert prepare.Data(str(out)).fingerprint == fingerprint
        prep(path, out)
        check_bins(out, docs)  # and no *.tmp of the killed run


@linux
def test_a_killed_program_leaves_no_workers(tmp_path, slow_source, ranks):
    """After kill -9 of the program its processes must not wait for work for ever, holding memory."""
    with in_the_middle(slow_source, tmp_path / "out", ranks) as (process, workers):
        process.kill()
        process.wait()
        wait_for(lambda: not any(map(alive, workers)), 5, "workers gone")


@linux
def test_two_at_once_in_one_folder(tmp_path, slow_source, ranks):
    """The second is refused and harms neither the first nor the old bins."""
    out = tmp_path / "out"
    path = shard(tmp_path / "small.jsonl", some_docs())
    with in_the_middle(slow_source, out, ranks) as (process, _):
        process.send_signal(signal.SIGSTOP)  # it holds the folder for as long as the test likes
        os.waitpid(process.pid, os.WUNTRACED)  # a write may have been under way
        before = snapshot(out)
        done = cli(f"--source={path}", f"--out_dir={out}", "--tokenizer=bytes", "--num_proc=1")
        assert str(out) in one_line(done) and "process" in one_line(done)
        assert snapshot(out) == before
        with pytest.raises(UserError, match="process"):
            prep(path, out)
        prep(path, tmp_path / "elsewhere")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        process.wait(timeout=20)
    prep(path, out)  # the lock went with its holder


def test_the_lock_is_free_after_a_failure(tmp_path):
    (tmp_path / "bad.jsonl").write_bytes(b"junk")
    for _ in range(2):
        with pytest.raises(UserError, match=r"bad\.jsonl"):
            prep(tmp_path / "bad.jsonl", tmp_path / "out")
    prep(shard(tmp_path / "a.jsonl", some_docs()), tmp_path / "out")


def test_spawned_processes_do_not_start_over(tmp_path, ranks):
    """nothing happens at import, so that spawn (Windows, macOS) works, also through runpy."""
    docs = some_docs()
    path = shard(tmp_path / "a.jsonl", docs)
    script = "import multiprocessing as m; m.set_start_method('spawn'); import runpy; " \
             "runpy.run_path('prepare.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", script, f"--source={path}", f"--out_dir={tmp_path / 'out'}", "--num_proc=2",
                           f"--tokenizer={ranks}", "--val_fraction=0.2"], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("num_proc = 2") <= 1 and "bootstrapping" not in done.stderr
    check_bins(tmp_path / "out", docs, TOKENS)


def test_import_does_no_work(tmp_path):
    """What train.py and its reader need is no tokenizer, no zstandard and no torch."""
    script = f"import sys; sys.path.insert(0, {REPO!r}); import prepare, multiprocessing; " \
             "assert not multiprocessing.active_children(); print([m for m in ('torch', 'tiktoken', 'zstandard', 'datasets') " \
             "if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr, os.listdir(tmp_path)) == ("[]\n", "", [])


@linux
@pytest.mark.parametrize("kind, mega, limit", [(".jsonl.zst", 60, 200), (".txt", 150, 150), ("same.jsonl.zst", 200, 280)])
def test_memory_is_bounded(tmp_path, kind, mega, limit):
    """
    with two processes the largest one's memory does not grow with the megabytes of text. A queue without bound takes
    200 MB for the .txt and 380 for the last, whose 200 MB compress to next to nothing.
    """
    rng = random.Random(0)
    block = "".join(rng.choices("etaoin shrdlu", k=200_000))
    texts = (block if "same" in kind else block[k:] + block[:k] for k in rng.choices(range(200_000), k=mega * 5))
    with open(tmp_path / ("in" + kind), "wb") as f, \
            zstandard.ZstdCompressor(level=1).stream_writer(f) if kind.endswith(".zst") else contextlib.nullcontext(f) as w:
        for text in texts:
            w.write(record(text) if "jsonl" in kind else text.encode() + b"\n")
    script = "import resource, subprocess, sys; r = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL); " \
             "print(r.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    argv = [sys.executable, SCRIPT, f"--source={tmp_path / ('in' + kind)}", f"--out_dir={tmp_path / 'out'}", "--num_proc=2"]
    done = subprocess.run([sys.executable, "-c", script, *argv, "--tokenizer=bytes"], capture_output=True, text=True)
    code, kilobytes = map(int, done.stdout.split())
    size = sum(os.path.getsize(tmp_path / "out" / f"{name}.bin") for name in ("train", "val"))
    shutil.rmtree(tmp_path / "out")
    assert code == 0 and size > mega * 1_900_000
    assert kilobytes < limit * 1000, f"{kilobytes // 1000} MB"


# ---------------------------------------------------------------------------------------------------------------------
# Bins and Data: the reader


def a_bin(path, ids, dtype="<u2"):
    np.asarray(ids, dtype).tofile(path)
    return prepare.Bin(str(path), np.dtype(dtype))


@pytest.mark.parametrize("tokens, windows", [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2), (24, 2), (25, 3), (100, 12)])
def test_windows(tmp_path, tokens, windows):
    """T + 1 tokens are one window, T are none; the last token is the target of the last full window."""
    b = a_bin(tmp_path / "x.bin", np.arange(tokens))
    assert b.windows(8) == windows and b.tokens == tokens
    if windows:
        rows = b.read(range(windows), 8)
        assert rows.shape == (windows, 9) and rows.dtype == np.int64
        assert rows.tolist() == [list(range(w * 8, w * 8 + 9)) for w in range(windows)]  # overlap by one token only
        assert rows.max() == windows * 8


def test_read_in_any_order(tmp_path):
    for dtype, offset in (("<u2", 0), ("<u4", 1 << 20)):
        b = a_bin(tmp_path / "x.bin", np.arange(101) + offset, dtype)
        rows = b.read(np.array([9, 0, 9]), 10)
        assert (rows - offset).tolist() == [list(range(90, 101)), list(range(11)), list(range(90, 101))]
        rows[:] = 0  # the caller's own copy
        assert b.read([0], 10)[0, 0] == offset
    assert b.read([99], 1).tolist() == [[99 + offset, 100 + offset]]


def test_read_no_windows(tmp_path):
    """An empty bin or a rank without work: (0, block_size + 1) ids."""
    for ids in ([], range(5)):
        rows = a_bin(tmp_path / "x.bin", ids).read([], 8)
        assert rows.shape == (0, 9) and rows.dtype == np.int64


@linux
def test_reading_does_not_keep_the_pages(tmp_path):
    """pages of a long-lived memmap count as the process's memory; here they go."""
    path = tmp_path / "large.bin"
    with open(path, "wb") as f:
        f.truncate(160 << 20)
    b = prepare.Bin(str(path), np.dtype("<u2"))

    def resident():
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    n, before = b.windows(2048), resident()
    for start in range(0, n, 256):
        b.read(range(start, min(n, start + 256)), 2048)
    assert resident() - before < 60 << 20


@pytest.fixture
def folder(tmp_path):
    prep(shard(tmp_path / "a.jsonl", some_docs(60)), tmp_path / "good")
    return tmp_path / "good"


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "val_C4.bin"])
@pytest.mark.parametrize("change", [-2, -200, 2, "empty"])
def test_data_refuses_a_cut_or_foreign_bin(folder, name, change):
    size = (folder / name).stat().st_size
    new = 0 if change == "empty" else size + change
    os.truncate(folder / name, new)
    with pytest.raises(UserError) as e:
        prepare.Data(str(folder))
    message = str(e.value)
    assert str(folder / name) in message and re.search(rf"\b{new}\b", message) and re.search(rf"\b{size}\b", message)


@pytest.mark.parametrize("with_meta", [True, False])
@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_data_refuses_an_odd_number_of_bytes(folder, name, with_meta):
    if not with_meta:
        (folder / "meta.json").unlink()
    size = (folder / name).stat().st_size
    os.truncate(folder / name, size - 1)
    with pytest.raises(UserError, match=rf"{name}.*\b{size - 1}\b"):
        prepare.Data(str(folder))


@pytest.mark.parametrize("with_meta", [True, False])
@pytest.mark.parametrize("name", ["train.bin", "val.bin", "val_Wikipedia.bin"])
def test_data_refuses_a_missing_bin(folder, name, with_meta):
    (folder / name).unlink()
    if not with_meta:
        (folder / "meta.json").unlink()
        if name.startswith("val_"):
            return  # nothing says that it should be there
    with pytest.raises(UserError, match=rf"{name}.*prepare"):
        prepare.Data(str(folder))


@pytest.mark.parametrize("damage", ["empty", "cut", "[]", "null", "{}", "7", "binary", "no bins", "no train", "no val",
                                    "bins is a list", "no vocab_size", "dtype is junk", "dtype is a float",
                                    "vocab_size is text", "sizes are text"])
def test_data_refuses_a_damaged_meta(folder, damage):
    path = folder / "meta.json"
    text, meta = path.read_text(), json.loads(path.read_text())
    if damage == "binary":
        path.write_bytes(b"\xff\xfe\x00")
    elif damage in ("empty", "cut"):
        path.write_text(text[:len(text) // 2] if damage == "cut" else "")
    elif damage in ("[]", "null", "{}", "7"):
        path.write_text(damage)
    else:
        key, _, value = damage.removeprefix("no ").partition(" is ")
        if damage in ("no train", "no val"):
            del meta["bins"][key]
        elif damage.startswith("no "):
            del meta[key]
        elif damage == "sizes are text":
            meta["bins"] = {name: str(n) for name, n in meta["bins"].items()}
        else:
            meta[key] = {"a list": list(meta["bins"]), "junk": "foo", "a float": "float32", "text": "many"}[value]
        path.write_text(json.dumps(meta))
    with pytest.raises(UserError, match=r"meta\.json" if damage != "dtype is a float" else r"\.(json|bin)"):
        prepare.Data(str(folder))


def test_data_explains_a_pickled_vocabulary(folder):
    """A nanoGPT folder of characters: refused with the reason, never unpickled."""
    (folder / "meta.json").unlink()
    (folder / "meta.pkl").write_bytes(b"cos\nsystem\n(S'touch hacked'\ntR.")
    with pytest.raises(UserError, match=r"meta\.pkl.*prepare"):
        prepare.Data(str(folder))


def test_data_opens_a_nanogpt_folder_as_gpt2(tmp_path):
    ids = np.array([50256, 0, 1, 50255, 7] * 20, "<u2")
    ids.tofile(tmp_path / "train.bin")
    ids[:30].tofile(tmp_path / "val.bin")
    data = prepare.Data(str(tmp_path))
    assert (data.tokenizer, data.vocab_size, data.eot) == ("gpt2", 50257, 50256)
    assert list(data.val) == ["val"] and (data.train.tokens, data.val["val"].tokens) == (100, 30)
    assert data.train.read([0], 99).tolist() == [ids.tolist()]


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "val_C4.bin"])
def test_data_refuses_ids_beyond_the_vocabulary(folder, name):
    """another tokenizer's file of the same size is found before a GPU finds it."""
    ids = np.fromfile(folder / name, "<u2")
    ids[len(ids) // 2] = 257
    ids.tofile(folder / name)
    with pytest.raises(UserError, match=rf"{name}.*\b257\b"):
        prepare.Data(str(folder))


def test_data_refuses_ids_beyond_gpt2s(tmp_path):
    for name, top in (("train.bin", 50256), ("val.bin", 50257)):
        np.array([1, 2, top, 3] * 10, "<u2").tofile(tmp_path / name)
    with pytest.raises(UserError, match=r"val\.bin.*50257"):
        prepare.Data(str(tmp_path))


def test_data_by_name(tmp_path, monkeypatch):
    """An existing path wins; then a bare name means data/NAME."""
    monkeypatch.chdir(tmp_path)
    for n, path in ((40, "data/notes"), (50, "elsewhere/x")):
        prep(shard(tmp_path / "a.jsonl", some_docs(n)), tmp_path / path)
    assert os.path.samefile(prepare.Data("notes").path, "data/notes")
    assert prepare.Data("notes").fingerprint == prepare.Data("data/notes").fingerprint
    assert os.path.samefile(prepare.Data("elsewhere/x").path, "elsewhere/x")
    shutil.copytree("elsewhere/x", "notes")
    assert prepare.Data("notes").fingerprint == prepare.Data("elsewhere/x").fingerprint
    with pytest.raises(UserError, match=r"'nothing'.*data.nothing.*prepare"):
        prepare.Data("nothing")
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match="file"):
        prepare.Data("file")


def test_fingerprint(folder, tmp_path):
    """Stable for the same bytes, wherever they are; another for any token changed in a small bin, or another tokenizer."""
    first = prepare.Data(str(folder)).fingerprint
    assert prepare.Data(str(folder)).fingerprint == first
    assert prepare.Data(shutil.copytree(folder, tmp_path / "copy")).fingerprint == first
    prep(tmp_path / "a.jsonl", tmp_path / "again")
    assert prepare.Data(str(tmp_path / "again")).fingerprint == first
    seen = {first}
    for name in ("train.bin", "val.bin"):
        ids = np.fromfile(folder / name, "<u2")
        for at in (0, len(ids) // 2, -1):
            changed = ids.copy()
            changed[at] = (ids[at] + 1) % 257
            changed.tofile(folder / name)
            seen.add(prepare.Data(str(folder)).fingerprint)
        ids.tofile(folder / name)
    assert len(seen) == 7
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "tokenizer": "gpt2", "vocab_size": 50257}))
    assert prepare.Data(str(folder)).fingerprint not in seen


def test_fingerprint_of_a_longer_bin(tmp_path):
    """the train.bin grew, all old tokens are where they were."""
    ids = np.random.default_rng(0).integers(0, 50257, 3_000_000).astype("<u2")
    ids[:100].tofile(tmp_path / "val.bin")
    found = set()
    for n in (3_000_000, 2_999_999, 2_000_000):
        ids[:n].tofile(tmp_path / "train.bin")
        began = time.time()
        found.add(prepare.Data(str(tmp_path)).fingerprint)
        assert time.time() - began < 1
    assert len(found) == 3


# ---------------------------------------------------------------------------------------------------------------------
# Real text, where there is some


def test_slimpajama(tmp_path):
    """Real shards: the folder SLIMPAJAMA_DIR with train/ and validation/. All of validation, the first 10 MB of train."""
    root = os.environ.get("SLIMPAJAMA_DIR")
    if not root:
        pytest.skip("SLIMPAJAMA_DIR is not set")
    done = cli(f"--source={root}/train", f"--val_source={root}/validation", f"--out_dir={tmp_path}", "--tokenizer=bytes",
               "--num_proc=2", "--max_tokens=10_000_000")
    assert done.returncode == 0, done.stderr
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert not meta["skipped"]
    for name, part in (("train", "train"), ("val", "validation")):
        docs = in_bin(tmp_path / f"{name}.bin")
        i = 0
        for path in sorted(os.path.join(d, f) for d, _, files in os.walk(os.path.join(root, part)) for f in files):
            if i == len(docs) or not path.endswith(".jsonl.zst"):
                continue
            with zstandard.open(path, "rt", encoding="utf-8", newline="\n") as f:
                for line in f:
                    if i == len(docs):
                        break
                    assert json.loads(line)["text"].encode() == docs[i]
                    i += 1
        assert i == len(docs) > 0
        assert sum(c[name]["documents"] for c in meta["sources"].values()) == i
    assert {os.path.basename(p) for p in map(str, tmp_path.glob("val_*.bin"))} == {f"val_{s}.bin" for s in meta["sources"]}


def test_a_local_folder_in_the_hubs_own_layout(tmp_path):
    """data/train-..., data/validation-...: the validation shard is no training text."""
    docs, held = some_docs(40), [(f"held {i}", "C4") for i in range(5)]
    shard(tmp_path / "set" / "data" / "train-00000-of-00001.jsonl", docs)
    shard(tmp_path / "set" / "data" / "validation-00000-of-00001.jsonl", held)
    shard(tmp_path / "set" / "data" / "test-00000-of-00001.jsonl", [("test text", "C4")])
    meta = prep(tmp_path / "set", tmp_path / "out")
    counts = [sum(s[split]["documents"] for s in meta["sources"].values()) for split in ("train", "val")]
    assert counts == [40, 5]


def test_a_long_document_does_not_close_its_source(tmp_path):
    """A mix goes on with shorter documents; only a source without text runs dry."""
    docs = [("x" * 20_000, "C4")] + [(f"short document {i}", s) for i in range(300) for s in ("C4", "Book")]
    shard(tmp_path / "a.jsonl", docs)
    meta = prep(tmp_path / "a.jsonl", tmp_path / "out", mix="C4:50,Book:50", max_tokens=4000, val_fraction=0.01)
    for source in ("C4", "Book"):
        assert 0.98 * 2000 <= meta["sources"][source]["train"]["tokens"] <= 2000


def test_shards_behind_links_are_read_once(tmp_path, monkeypatch):
    """Of a link to a folder elsewhere, one beside it to the same, and one that leads back; an unreadable folder is named."""
    docs = some_docs(90)
    shard(tmp_path / "in/a/x.jsonl", docs[:40])
    shard(tmp_path / "disk/y.jsonl", docs[40:])
    for name, to in (("b", "disk"), ("c", "disk"), ("a/up", "in")):
        (tmp_path / "in" / name).symlink_to(tmp_path / to)
    meta = prep(tmp_path / "in", tmp_path / "out")
    assert sum(x["documents"] for of in meta["sources"].values() for x in of.values()) == 90
    scan = os.scandir

    def protected(path):
        if str(path).endswith("/c"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)
    monkeypatch.setattr(os, "scandir", protected)
    with pytest.raises(UserError, match="in/c: can't be read .Permission denied.; mend that"):
        prepare.find_files(str(tmp_path / "in"))


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_an_out_dir_that_cannot_be_made(tmp_path, place):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UserError, match=rf"^--out_dir=.*{place}: can't be written \(.*\); give another folder"):
        prep(shard(tmp_path / "a.jsonl", some_docs()), tmp_path / place)
    assert (tmp_path / "file").read_text() == "kept"


def test_a_file_of_another_form_is_told_what_was_expected(tmp_path):
    (tmp_path / "a.jsonl").write_text('[{"text": "in a list"}]\n{"content": "in another field"}\n')
    with pytest.raises(UserError, match=r'0 documents.*no field "text": 2 .*; expected an object \{"text": \.\.\.\}'):
        prep(tmp_path / "a.jsonl", tmp_path / "out")
