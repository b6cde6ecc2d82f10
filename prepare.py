"""
Text -> token bins.

    python prepare.py --source=SlimPajama/train --val_source=SlimPajama/validation --out_dir=data/slimpajama
    python prepare.py --source=notes.txt --tokenizer=bytes --out_dir=data/notes
    python prepare.py                        # the built-in corpus: Python's own standard library, as bytes

    python prepare.py --source=DKYoon/SlimPajama-6B --max_tokens=1_000_000_000 --out_dir=data/slimpajama     # from the hub

Reads .jsonl, .jsonl.gz, .jsonl.zst and .parquet shards with records {"text": ..., "meta": {"redpajama_set_name": ...}}, .txt
files, and sets of the Hugging Face hub. All are streamed; nothing is unpacked to disk. Writes to out_dir

    train.bin, val.bin       token ids, raw little-endian uint16 (uint32 where the vocabulary needs it)
    val_SOURCE.bin           val.bin's documents of one source, for every source seen
    meta.json                tokenizer, vocabulary size, end-of-text id, dtype; documents, bytes and tokens per source

with one end-of-text id after each document. The same bytes come out for any number of processes.
This file owns the format: Writer writes it, Data reads it.
"""
import base64
import collections
import concurrent.futures
import contextlib
import dataclasses
import fnmatch
import hashlib
import json
import math
import multiprocessing
import os
import platform
import re
import signal
import sys
import sysconfig
import threading
import time
import zlib
from concurrent.futures.process import BrokenProcessPool
from typing import Literal

import numpy as np
from tqdm import tqdm

from configurator import UserError, at_least, command, configure

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".txt")
BATCH = 1 << 20  # bytes of text per task: large enough to hide the pool's overhead, small enough to bound memory
PIECE = 1 << 16  # a .txt file is read, and split into training and validation text, in pieces of about this many bytes
MAX_SOURCES = 64  # each source has an open file; later ones count as "other"


@dataclasses.dataclass
class Config:
    source: str = "builtin"  # a file or folder of shards, a hub set as owner/name; builtin: Python's standard library
    data_files: str = ""  # only the files of the source that match these patterns, as chunk1/*,chunk2/*
    val_source: str = ""  # validation text, as source; empty: source's own validation part, else split by val_fraction
    out_dir: str = ""  # where the bins go; empty: data/ and the source's name
    tokenizer: str = "auto"  # a tiktoken name, bytes, a path to .tiktoken or tokenizer.json; auto: gpt2 (builtin: bytes)
    num_proc: int = 0  # processes that tokenize; 1: none beside this one; 0: one per core
    val_fraction: float | Literal["auto"] = "auto"  # documents (.txt: pieces) held out by hash; auto: 0.005, builtin: 0.05
    max_tokens: int = 0  # stop before the document (.txt: piece) that would exceed this many training tokens; 0: no limit
    mix: str = ""  # shares of max_tokens by source, as CommonCrawl:50,C4:20 (no others, also in val); empty: all as it comes
    seed: int = 1337  # with mix: the order in which the shards are visited
    on_error: Literal["stop", "skip"] = "stop"  # what a damaged shard does: stop the run, or be reported and skipped


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers: name, n_vocab, eot, encode(text) -> ids, decode_bytes(ids) -> bytes


class Bytes:
    """UTF-8 bytes and an end-of-text id: needs no file, knows every string."""
    name, n_vocab, eot = "bytes", 257, 256

    def encode(self, text):
        return np.frombuffer(text.encode(), np.uint8)

    def decode_bytes(self, ids):
        return b"".join(b"<|endoftext|>" if i == 256 else bytes([i]) for i in ids)


class Tiktoken:
    """A tiktoken encoding. In documents every character is ordinary text, <|endoftext|> too."""

    def __init__(self, name, encoding):
        self.name, self.encoding, self.n_vocab, self.eot = name, encoding, encoding.n_vocab, encoding.eot_token

    def encode(self, text):
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def decode_bytes(self, ids):
        return self.encoding.decode_bytes([int(i) for i in ids])


class Json:
    """A tokenizer.json of Hugging Face's tokenizers, such as GPT-NeoX's, the paper's. Special tokens in documents are text."""

    def __init__(self, path, tokenizer):
        tokenizer.no_truncation()  # a file may have been saved with either, and documents are whole here
        tokenizer.no_padding()
        self.name, self.tokenizer = os.path.abspath(path), tokenizer
        self.n_vocab = max(tokenizer.get_vocab().values(), default=-1) + 1  # its ids may have holes
        self.eot = next((i for t in ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
                         if (i := tokenizer.token_to_id(t)) is not None), None)
        if self.eot is None:
            raise UserError(f"tokenizer {path}: has no end-of-text token (<|endoftext|>, <|end_of_text|>, </s> or <eos>)")
        tokenizer.encode_special_tokens = True
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # byte-level BPE spells other bytes as 256, 257, ...
        hidden = [b for b in range(256) if b not in shown]
        self.byte = {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}
        self.byte_level = "ByteLevel" in str(json.loads(tokenizer.to_str())["decoder"])

    def encode(self, text):
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)

    def decode_bytes(self, ids):
        return b"".join(self.spelled(self.tokenizer.id_to_token(int(i)) or "") for i in ids)

    def spelled(self, token):
        """The bytes that a token stands for."""
        if self.byte_level:
            known = all(c in self.byte for c in token)
            return bytes(self.byte[c] for c in token) if known else token.encode()
        byte = re.fullmatch("<0x([0-9A-F]{2})>", token)  # SentencePiece's way
        return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()


def get_tokenizer(name, otherwise=""):
    """
    The tokenizer of this name, or of this path to a .tiktoken file of ranks or a tokenizer.json. Raises UserError; otherwise:
    what the caller's user can choose where tiktoken can't be used (most need the tokenizer of a model or of bins).
    """
    if name == "bytes":
        return Bytes()
    if name.endswith(".json"):
        try:
            import tokenizers
        except ImportError:
            raise UserError(f"tokenizer {name!r} needs the package tokenizers: pip install tokenizers") from None
        if not os.path.isfile(name):
            raise UserError(f"tokenizer {name}: no such file")
        try:
            return Json(name, tokenizers.Tokenizer.from_file(name))
        except UserError:
            raise
        except Exception as e:  # tokenizers raises bare Exception
            raise UserError(f"tokenizer {name}: not a tokenizer.json of the tokenizers package ({e})") from None
    try:
        import tiktoken
    except ImportError:
        raise UserError(f"tokenizer {name!r} needs tiktoken: pip install tiktoken{otherwise}") from None
    if name.endswith(".tiktoken"):
        try:
            with open(name, "rb") as f:
                ranks = {base64.b64decode(t): int(r) for t, r in (line.split() for line in f if line.strip())}
        except (ValueError, OSError) as e:
            raise UserError(f"tokenizer {name}: expected lines of a base64 token and its rank: {e}") from None
        if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([b]) not in ranks for b in range(256)):
            raise UserError(f"tokenizer {name}: {len(ranks)} tokens; expected ranks from 0 on without a gap, and each of the "
                            "256 bytes among them; is the file whole?")
        gpt2_words = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
        return Tiktoken(os.path.abspath(name), tiktoken.Encoding(
            name, pat_str=gpt2_words, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks)}))
    if name not in tiktoken.list_encoding_names():
        raise UserError(f"tokenizer {name!r}: expected bytes, a path to a .tiktoken file or tokenizer.json, or one of "
                        f"{', '.join(tiktoken.list_encoding_names())}")
    try:
        return Tiktoken(name, tiktoken.get_encoding(name))
    except Exception as e:  # no network, a proxy, a damaged cache: whatever the HTTP stack raises
        raise UserError(
            f"tokenizer {name}: tiktoken could not load its file ({type(e).__name__}); where there is a network, run "
            f"TIKTOKEN_CACHE_DIR=some/folder python -c \"import tiktoken; tiktoken.get_encoding('{name}')\", bring that "
            f"folder here and set TIKTOKEN_CACHE_DIR to it{otherwise}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Sources: yield items (kind, raw bytes, where, ends) with kind "json" (a line), or a source's name for plain text;
# ends: the document ends here


class BadShard(UserError):
    """A shard that is damaged, or no shard at all."""


SPLIT = re.compile(r"(train|validation|valid|val|test)[-_.0-9]")  # how the hub names the shards of a split


def refuse(e):
    if not isinstance(e, NotADirectoryError):
        raise UserError(f"{e.filename}: can't be read ({e.strerror}); mend that, or give another folder") from None


def walk(folder, unreadable=refuse):
    """
    (path, names of its files) of the folder and all below, through links, sorted; nothing where there is none. unreadable(e)
    hears of what can't be read: the default raises UserError.
    """
    seen = set()
    for path, folders, names in os.walk(
            folder, followlinks=True, onerror=lambda e: None if isinstance(e, FileNotFoundError) else unreadable(e)):
        folders.sort()
        if (real := os.path.realpath(path)) in seen:  # a link led back
            folders.clear()
        else:
            seen.add(real)
            yield path, sorted(names)


def shards(source, patterns=""):
    """The files of a file or folder that may be shards and match patterns, sorted by name."""
    files = [source] if os.path.isfile(source) else sorted(
        os.path.join(folder, name) for folder, names in walk(source) for name in names
        if name.endswith(SUFFIXES) and not name.startswith("."))
    return [p for p in files if not patterns or any(
        fnmatch.fnmatch(os.path.relpath(p, source), pattern.strip()) for pattern in patterns.split(","))]


def find_files(source, patterns="", besides=""):
    """
    The files of a file or folder, sorted by name, those that match patterns, without those of the source `besides`. Where some
    are named train-..., only those are training text; folder:validation are those named validation-.... Raises UserError when
    there are none.
    """
    split = "train"
    if not os.path.exists(source) and os.path.isdir(source.rpartition(":")[0]):
        source, _, split = source.rpartition(":")
    if not os.path.exists(source):
        raise UserError(f"source {source!r}: no such file or folder, and neither 'builtin' nor a hub set as owner/name")
    files = shards(source, patterns)
    if not os.path.isfile(source):
        named = [p for p in files if (m := SPLIT.match(os.path.basename(p))) and m[1] == split]
        files = named if named or split != "train" else files
    if besides and not is_hub(besides):
        others = set(map(os.path.realpath, find_files(besides)))
        files = [p for p in files if os.path.realpath(p) not in others]
    if not files or not files[0].endswith(SUFFIXES):
        raise UserError(f"source {source}: found no file that ends in {', '.join(SUFFIXES)}"
                        + (f" and matches data_files={patterns}" if patterns else "")
                        + (f" and is not of val_source={besides}" if besides else ""))
    return files


def read_items(path, bar):
    """The items of one file. Raises BadShard with the byte or line where it goes wrong."""
    size = os.path.getsize(path)
    with open(path, "rb") as f:
        head = f.read(64)
        f.seek(0)
        if size == 0:
            raise BadShard(f"{path}: the file is empty (0 bytes)")
        if head.startswith(b"version https://git-lfs"):
            raise BadShard(f"{path}: a Git LFS pointer of {size} bytes, not the data: run git lfs pull")
        if path.endswith(".txt"):
            yield from read_text(f, path, bar)
        elif path.endswith(".parquet"):
            yield from read_parquet(f, path, bar)
        else:
            yield from read_lines(path, decompressed(f, path, bar))


def read_text(f, path, bar):
    """A text file is one document, in pieces that end at line ends where there are any."""
    done = 0
    while piece := f.read(PIECE):
        if not piece.endswith(b"\n"):
            piece += f.readline(PIECE)
        while (next_byte := f.peek(1)[:1]) and 0x80 <= next_byte[0] < 0xC0 and len(piece) < 3 * PIECE:
            piece += f.read(1)  # never cut inside a UTF-8 character
        last = not f.peek(1)
        if last and not done and not piece.strip():
            yield "json", b'{"text": ""}', path, True  # white space alone is an empty document
        else:
            yield "text", piece, f"{path} byte {done}", last
        done += len(piece)
        bar.update(len(piece))


def read_lines(path, chunks):
    parts, number = [], 1
    for chunk in chunks:
        if b"\n" not in chunk:
            parts.append(chunk)  # joined once: a long line must not be copied again and again
            continue
        *lines, rest = (b"".join(parts) + chunk).split(b"\n")
        parts = [rest]
        for line in lines:
            if line.strip():
                yield "json", line, f"{path} line {number}", True
            number += 1
    rest = b"".join(parts)
    if rest.strip():
        try:
            json.loads(rest)
        except (ValueError, RecursionError):
            raise BadShard(f"{path}: line {number}, the last, is cut after {len(rest)} bytes; fetch the file again") from None
        yield "json", rest, f"{path} line {number}", True


def decompressed(f, path, bar):
    """The bytes of a .zst, .gz or plain file, in chunks. Raises BadShard where a compressed stream is damaged or cut."""
    if path.endswith(".zst"):
        try:
            import zstandard
        except ImportError:
            raise UserError(f"{path} needs the package zstandard: pip install zstandard") from None
        start, wrong, padding = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj, zstandard.ZstdError, b""
    elif path.endswith(".gz"):
        start, wrong, padding = (lambda: zlib.decompressobj(wbits=31)), zlib.error, b"\0"
    else:
        while chunk := f.read(1 << 20):
            bar.update(len(chunk))
            yield chunk
        return
    stream, size, between = None, 1 << 11, b""
    while chunk := f.read(size):
        bar.update(len(chunk))
        while chunk := chunk if stream else chunk.lstrip(between):
            stream = stream or start()
            try:
                text = stream.decompress(chunk)
            except wrong as e:
                at = f.tell() - len(chunk)
                what = "not " + path.rsplit(".", 1)[1] + " data" if not at else "damaged"
                raise BadShard(f"{path}: {what} near byte {at}: {e}; fetch the file again") from None
            yield text
            size = 1 << 13 if len(text) < 16 * len(chunk) else 1 << 11  # a few bytes may unpack to megabytes
            chunk, stream, between = (stream.unused_data, None, padding) if stream.eof else (b"", stream, b"")
    if stream is not None:
        raise BadShard(f"{path}: cut after byte {f.tell()}, inside a compressed frame; fetch the file again")


def as_line(record):
    """A record of another format as the line of JSON that encode_batch reads, which mends bytes that are no UTF-8."""
    record = {k: v.decode(errors="surrogateescape") if isinstance(v, bytes) else v for k, v in record.items()
              if k in ("text", "meta", "source")}
    return json.dumps(record, default=str).encode()


def read_parquet(f, path, bar):
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path} needs the package pyarrow: pip install pyarrow") from None
    row = 0
    try:
        table = pyarrow.parquet.ParquetFile(f)
        columns = [c for c in table.schema_arrow.names if c in ("text", "meta", "source")]
        if "text" not in columns:
            yield "json", as_line({}), f"{path} (columns {', '.join(table.schema_arrow.names[:8])})", True  # counted once
            return
        for group in range(table.num_row_groups):
            for part in table.iter_batches(batch_size=256, row_groups=[group], columns=columns):
                for record in part.to_pylist():
                    yield "json", as_line(record), f"{path} row {row}", True
                    row += 1
            bar.update(os.path.getsize(path) // table.num_row_groups)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as e:
        raise BadShard(f"{path}: not Parquet, cut or damaged after row {row}: {str(e).splitlines()[0]}; "
                       "fetch the file again") from None


def is_hub(source):
    """owner/name that is no local path, nor one mistyped inside a local folder."""
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+(:\w+)?", source)) and not os.path.exists(source.split("/")[0])


def open_hub(source, patterns=""):
    """
    A streamed split of a hub set, from owner/name or owner/name:split (train by default); a local folder in the hub's
    layout opens the same way. Raises UserError for a set that is missing or out of reach.
    """
    try:
        import datasets
    except ImportError:
        raise UserError(f"source {source!r} is no local path, and a hub set needs the package datasets: "
                        "pip install datasets") from None
    name, _, split = source.partition(":")
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(name, data_files=[p.strip() for p in patterns.split(",")] if patterns else None,
                                     split=split or "train", streaming=True)
    except Exception as e:  # the hub client raises its own kinds for no network, no such set, no permission
        raise UserError(
            f"source {source!r}: no such local path, and the hub set could not be opened ({type(e).__name__}: "
            f"{str(e).strip().splitlines()[0][:160]}); check the name and the network. SlimPajama's original has left the "
            "hub: DKYoon/SlimPajama-6B is a sample of it; shards you have open by their folder") from None


def has_validation(source):
    """The validation part of a hub set or of a folder in the hub's layout, as a source; None when it has none."""
    if is_hub(source) and ":" not in source:
        try:
            import datasets
            splits = datasets.get_dataset_split_names(source)
        except Exception:  # open_hub says what is wrong
            return None
        return next((f"{source}:{s}" for s in ("validation", "valid", "val") if s in splits), None)
    if not os.path.isdir(source):
        return None
    for split in ("validation", "valid", "val"):
        if os.path.isdir(os.path.join(source, split)):
            return os.path.join(source, split)
        with contextlib.suppress(UserError):
            if find_files(f"{source}:{split}"):
                return f"{source}:{split}"
    return None


def with_parts(config):
    """config with the parts of a source in the hub's layout: its train as source and, unless one is given, its val_source."""
    val_source, train = config.val_source or has_validation(config.source) or "", os.path.join(config.source, "train")
    train = train if not is_hub(config.source) and os.path.isdir(train) else config.source
    return dataclasses.replace(config, source=train, val_source=val_source)


def read_hub(source, patterns, bar):
    """The records of a hub set. After a broken connection, continues behind the last record; gives up after five retries."""
    stream = open_hub(source, patterns)
    done, mark, state, failed = 0, 0, stream.state_dict(), 0
    while True:
        try:
            for i, record in enumerate(stream, mark):
                if i < done:
                    continue  # read before the connection broke
                yield "json", as_line(record), f"{source} record {i}", True
                done, failed = i + 1, 0
                if done % 1024 == 0:
                    mark, state = done, stream.state_dict()
            return
        except Exception as e:  # whatever the HTTP stack raises
            failed += 1
            if failed > 5:
                raise UserError(f"source {source!r}: the connection broke at record {done} and did not come back "
                                f"({type(e).__name__}: {str(e).strip()[:120]}); nothing was written, start again") from None
            bar.write(f"{source}: connection lost at record {done} ({type(e).__name__}); trying again", file=sys.stderr)
            time.sleep(min(60, 2 ** failed))
            stream.load_state_dict(state)


def builtin_files():
    """The .py files of the running interpreter's standard library, without its tests and installed packages."""
    root, found = sysconfig.get_paths()["stdlib"], []
    for folder, inside, names in os.walk(root):
        inside[:] = sorted(d for d in inside if d not in ("site-packages", "dist-packages", "test", "tests", "idle_test"))
        found += [os.path.join(folder, name) for name in sorted(names) if name.endswith(".py")]
    if not found:
        raise UserError(f"source 'builtin': {root} holds no .py files (a zipped standard library?); give --source=FOLDER")
    return root, found


def read_builtin(path, bar):
    with open(path, "rb") as f:
        text = f.read()
    bar.update(len(text))
    if text:
        yield "python", text, path, True


def read_source(source, patterns, on_error, desc, seed=None, besides=""):
    """
    Batches (lists of items) of a whole source but what find_files leaves out; their limits depend on nothing but the text
    (and the seed). A damaged shard is an item too, since it only counts when all before it was written and more is wanted.
    """
    if source == "builtin":
        files, read, total = builtin_files()[1], read_builtin, None
    elif is_hub(source):
        files, read, total = [source], lambda path, bar: read_hub(path, patterns, bar), 0
    else:
        files, read, total = find_files(source, patterns, besides), read_items, None
    if seed is not None:
        files = [files[i] for i in np.random.default_rng(seed).permutation(len(files))]
    batch, size = [], 0
    total = sum(map(os.path.getsize, files)) if total is None else None
    with tqdm(total=total, unit="B", unit_scale=True, desc=desc, mininterval=0.5) as bar:
        for path in files:
            try:
                for item in read(path, bar):
                    batch.append(item)
                    size += len(item[1])
                    if size >= BATCH:
                        yield batch, bar
                        batch, size = [], 0
            except BadShard as e:
                batch.append(("damaged shard", b"", str(e), False))
                if on_error == "stop":
                    break
        if batch:
            yield batch, bar


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizing: a task is one batch, in order, with a bounded number of tasks under way

worker = None  # the tokenizer of this process


class WorkerDied(UserError):
    """A worker process is gone. The pool's own threads may then wait for ever, and keep this process from ending."""


def start_worker(name):
    global worker
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()  # do not outlive a killed parent
    worker = get_tokenizer(name)


@contextlib.contextmanager
def workers(tokenizer, num_proc):
    """A pool of num_proc processes that have the tokenizer; None: this process is the only one."""
    if num_proc == 1:
        yield None
        return
    num_proc = min(num_proc, 61) if sys.platform == "win32" else num_proc  # the most that it waits for there
    spawn, given = multiprocessing.get_context("spawn"), os.environ.get("PYTHONWARNINGS", "")
    os.environ["PYTHONWARNINGS"] = f"{given},ignore:resource_tracker"  # which starts here, and tidies up after WorkerDied
    pool = concurrent.futures.ProcessPoolExecutor(num_proc, spawn, start_worker, (tokenizer.name,))
    os.environ["PYTHONWARNINGS"] = given
    ours = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the workers inherit it: after Ctrl-C this process ends them
    try:
        for _ in range(min(num_proc, 2 * (os.cpu_count() or 1))):
            pool.submit(int)  # starts one
        signal.signal(signal.SIGINT, ours)
        yield pool
    finally:
        signal.signal(signal.SIGINT, ours)
        pool.shutdown(wait=False, cancel_futures=True)


def encode_batch(items, hashed=True, tokenizer=None):
    """
    ids of all documents in one array; for each piece (source, hash, bytes, tokens, ends); and the bad ones as
    [(kind, where, at)], at: 2 i + 1 for what was mended in piece i, 2 i for what was skipped before it. A document's
    end-of-text id is part of its tokens. hashed: False leaves the hash 0, and saves 2 % of the time.
    """
    tokenizer, arrays, pieces, bad = tokenizer or worker, [], [], []
    for kind, raw, where, ends in items:
        source, at = kind, 2 * len(pieces)
        if kind == "damaged shard":
            bad.append((kind, where, at))
            continue
        try:
            text = raw.decode() if kind != "json" else None
        except UnicodeDecodeError:
            text = raw.decode(errors="replace")
            bad.append(("not UTF-8 (replaced)", where, at + 1))
        if kind == "json":
            try:
                record = json.loads(raw)
            except (ValueError, RecursionError) as e:
                bad.append(("not UTF-8" if isinstance(e, UnicodeDecodeError) else "not JSON", where, at))
                continue
            text = record.get("text") if isinstance(record, dict) else None
            if not isinstance(text, str) or not text.strip():
                bad.append(("empty text" if isinstance(text, str) else "text is null" if isinstance(record, dict)
                            and "text" in record and text is None else 'no field "text"', where, at))
                continue
            meta = record.get("meta")
            if isinstance(meta, str) and meta.startswith("{"):  # some Parquet sets keep it as text
                with contextlib.suppress(ValueError):
                    meta = json.loads(meta)
            named = [d.get(key) for d, key in ((meta, "redpajama_set_name"), (meta, "source"), (record, "source"))
                     if isinstance(d, dict)]
            source = next((s for s in named if isinstance(s, str) and s), "other").removeprefix("RedPajama")
            source = re.sub(r"[^A-Za-z0-9_.-]", "_", source)[:64] or "other"
            source += "_" * (source == "val")  # that name is taken: all sources together
        try:
            utf8 = text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell and UTF-8 can't
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            utf8 = text.encode()
            bad.append(("lone surrogates (replaced)", where, at + 1))
        try:
            ids = tokenizer.encode(text)
        except BaseException as e:  # tiktoken's regex engine gives up, or panics, on a million spaces
            if not isinstance(e, ValueError) and type(e).__name__ != "PanicException":
                raise
            ids = np.concatenate([tokenizer.encode(text[i:i + 10_000]) for i in range(0, len(text), 10_000)])
            bad.append(("too long a run for the tokenizer (encoded in parts)", where, at + 1))
        arrays += [ids, [tokenizer.eot]] if ends else [ids]
        digest = int.from_bytes(hashlib.blake2b(utf8, digest_size=8).digest(), "little") if hashed else 0
        pieces.append((source, digest, len(utf8), len(ids) + ends, ends))
    dtype = bin_dtype(tokenizer.n_vocab)
    return np.concatenate(arrays, dtype=dtype, casting="unsafe") if arrays else np.empty(0, dtype), pieces, bad


def encode_all(batches, hashed, tokenizer, pool, num_proc):
    """encode_batch over all batches, in order, by a pool of `workers`. Raises WorkerDied when one of them dies."""
    waiting, processes = collections.deque(), set()

    def first():
        """The first task's result. A worker killed while it hands one over would leave the pool waiting for the rest of it."""
        while True:
            processes.update(multiprocessing.active_children())
            if concurrent.futures.wait([waiting[0]], timeout=1).done:
                return waiting.popleft().result()
            if not all(p.is_alive() for p in processes):
                raise BrokenProcessPool

    with contextlib.closing(batches):
        try:
            for batch, bar in batches:
                if pool is None:
                    yield encode_batch(batch, hashed, tokenizer), bar
                    continue
                waiting.append(pool.submit(encode_batch, batch, hashed))
                if len(waiting) > 2 * num_proc + 2:
                    yield first(), bar
            while waiting:
                yield first(), bar
        except BrokenProcessPool:
            raise WorkerDied("a worker process died (out of memory, or killed); nothing was written. Try fewer with "
                            f"--num_proc={max(1, num_proc // 2)}") from None
        finally:
            for task in waiting:
                task.cancel()


# ---------------------------------------------------------------------------------------------------------------------
# The format


def bin_dtype(n_vocab):
    return np.dtype("<u2") if n_vocab <= 1 << 16 else np.dtype("<u4")


@contextlib.contextmanager
def locked(folder, wait=False):
    """Create the folder and hold it for this process. When another process holds it, waits, or raises UserError."""
    try:
        os.makedirs(folder, exist_ok=True)
        f = open(os.path.join(folder, ".lock"), "a")
    except OSError as e:
        raise UserError(f"--out_dir={folder}: can't be written ({e.filename}: {e.strerror}); give another folder") from None
    with f:
        try:
            import fcntl
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    raise
                print(f"waiting for another process that writes to {folder} ...", flush=True)
                fcntl.flock(f, fcntl.LOCK_EX)
        except ImportError:
            pass  # Windows: no lock, one process at a time is up to the user
        except BlockingIOError:
            raise UserError(f"{folder}: another process is writing there; wait for it, or choose another --out_dir") from None
        except OSError:
            pass  # a file system without locks
        yield


class Writer:
    """Bins under temporary names; commit() renames them all, abort() removes them."""

    def __init__(self, folder, dtype):
        self.folder, self.dtype, self.files = folder, dtype, {}
        for name in os.listdir(folder):  # of a preparation that was killed
            if name.endswith(".bin.tmp"):
                os.remove(os.path.join(folder, name))

    def write(self, name, ids):
        if name not in self.files:
            self.files[name] = open(os.path.join(self.folder, name + ".bin.tmp"), "wb", buffering=1 << 20)
        self.files[name].write(np.ascontiguousarray(ids, self.dtype).data)

    def commit(self, meta):
        for f in self.files.values():
            f.flush()
            os.fsync(f.fileno())
            f.close()
        with open(os.path.join(self.folder, "meta.json.tmp"), "w", encoding="utf-8") as f:
            json.dump(meta, f, indent=1)
        for name in self.files:
            os.replace(os.path.join(self.folder, name + ".bin.tmp"), os.path.join(self.folder, name + ".bin"))
        os.replace(f.name, os.path.join(self.folder, "meta.json"))  # last: an old one would refuse the new bins
        for name in os.listdir(self.folder):  # sources of an earlier preparation
            if re.fullmatch(r"val_.*\.bin", name) and name.removesuffix(".bin") not in self.files:
                os.remove(os.path.join(self.folder, name))

    def abort(self):
        for name in [*(n + ".bin" for n in self.files), "meta.json"]:
            with contextlib.suppress(OSError):
                os.remove(os.path.join(self.folder, name + ".tmp"))


def spread(n, count):
    """Numbers of count windows (of all, if there are fewer) spread evenly over n: int64."""
    return np.linspace(0, n - 1, min(n, count)).round().astype(np.int64)


class Bin:
    """A file of token ids, read as windows of block_size + 1 ids that overlap by one: the targets are shifted inputs."""

    def __init__(self, path, dtype, tokens=None, vocab_size=None):
        self.path, self.dtype, self.vocab_size, self.size = path, dtype, vocab_size, os.path.getsize(path)
        if self.size % dtype.itemsize:
            raise UserError(f"{path}: {self.size} bytes are no whole number of {dtype} ids; is the file cut?")
        self.tokens = self.size // dtype.itemsize
        if tokens is not None and tokens != self.tokens:
            raise UserError(f"{path}: {self.size} bytes, but its meta.json says {tokens * dtype.itemsize}; the file is cut or "
                            "foreign: run prepare.py again")

    def windows(self, block_size):
        return max(0, (self.tokens - 1) // block_size)

    def read(self, windows, block_size):
        """int64 ids (len(windows), block_size + 1). Raises UserError for an id beyond the vocabulary."""
        return self.read_at([w * block_size for w in windows], block_size)

    def read_at(self, starts, block_size):
        """The same of windows that start at these ids."""
        # A new memmap each time costs 50 µs; the pages of a long-lived one count as this process's memory.
        if os.path.getsize(self.path) != self.size:
            raise UserError(f"{self.path}: its size changed while it was in use; put the file back, then run the same command "
                            "again to continue")
        out = np.empty((len(starts), block_size + 1), np.int64)
        ids = np.memmap(self.path, self.dtype, mode="r", shape=(self.tokens,)) if len(starts) else None
        for row, start in zip(out, starts):
            row[:] = ids[start:start + block_size + 1]
        if self.vocab_size and out.size and out.max() >= self.vocab_size:  # on a GPU it would be an assertion without a name
            raise UserError(f"{self.path}: holds the id {out.max()}, but the vocabulary has {self.vocab_size}; the file is "
                            "damaged or foreign: run prepare.py again")
        return out

    def sample(self):
        """64 evenly spaced pages of 2,048 ids, for a fingerprint in constant time."""
        if not self.tokens:
            return np.empty(0, self.dtype)
        starts = np.unique(np.linspace(0, max(0, self.tokens - 2048), 64).astype(np.int64))
        n, size = min(2048, self.tokens), np.dtype(self.dtype).itemsize
        # read, not mapped: a page fault may fetch much more than its page
        return np.concatenate([np.fromfile(self.path, self.dtype, n, offset=int(start) * size) for start in starts])


class Data:
    """
    A data folder, opened: train (a Bin), val ({"val": Bin, source: Bin, ...}), tokenizer (its name), vocab_size, eot and
    fingerprint. name is a path, or the name of a folder in data/. A folder without a meta.json is nanoGPT's: gpt2 tokens.
    Raises UserError for a folder or file that is missing, cut, foreign, or of another tokenizer.
    """

    def __init__(self, name):
        self.path = name if os.path.isdir(name) else os.path.join("data", name)
        if not os.path.isdir(self.path):
            raise UserError(f"data {name!r}: no such folder, nor {self.path}; make it with prepare.py --out_dir={self.path}")
        meta_path = os.path.join(self.path, "meta.json")
        if os.path.exists(meta_path):
            try:
                with open(meta_path, encoding="utf-8") as f:
                    self.meta = json.load(f)
                sizes, dtype = self.meta["bins"], np.dtype(self.meta["dtype"])
                self.tokenizer, self.vocab_size, self.eot = (self.meta[k] for k in ("tokenizer", "vocab_size", "eot"))
                if not all(isinstance(n, int) for n in (self.vocab_size, self.eot, sizes["train"], sizes["val"])):
                    raise TypeError("a number is missing")
            except (ValueError, KeyError, TypeError) as e:
                raise UserError(f"{meta_path}: not written by prepare.py, or damaged ({type(e).__name__}: {e})") from None
        elif os.path.exists(os.path.join(self.path, "meta.pkl")):
            raise UserError(f"{self.path}: a nanoGPT folder with meta.pkl, a character vocabulary that is not read here "
                            "(a pickle can run code): prepare its input.txt with prepare.py --tokenizer=bytes")
        else:
            self.meta, self.tokenizer, self.vocab_size, self.eot = {}, "gpt2", 50257, 50256
            sizes, dtype = {"train": None, "val": None}, np.dtype("<u2")
        bins = {}
        for bin_name, tokens in sizes.items():
            path = os.path.join(self.path, bin_name + ".bin")
            if not os.path.exists(path):
                raise UserError(f"{path}: missing; make it with prepare.py --out_dir={self.path}")
            bins[bin_name] = Bin(path, dtype, tokens, self.vocab_size)
        self.train = bins.pop("train")
        self.val = {bin_name.removeprefix("val_"): b for bin_name, b in bins.items()}
        facts = [self.vocab_size, self.train.tokens, self.meta.get("bins"), self.meta.get("sources")]
        digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16)
        for b in (self.train, *self.val.values()):
            ids = b.sample()
            if ids.size and int(ids.max()) >= self.vocab_size:
                raise UserError(f"{b.path}: holds the id {int(ids.max())}, but {self.tokenizer} has {self.vocab_size}; "
                                "the file is foreign: run prepare.py again")
            digest.update(ids.tobytes())
        self.fingerprint = digest.hexdigest()


# ---------------------------------------------------------------------------------------------------------------------


def prepare(config):
    """Tokenize config.source into bins and return meta.json's content. Raises UserError; then no bin is changed."""
    at_least(config, 0, "num_proc", "max_tokens", "seed")
    given = config
    if config.val_fraction == "auto":
        config = dataclasses.replace(config, val_fraction=0.05 if config.source == "builtin" else 0.005)
    if config.source == "builtin" and config.data_files:
        raise UserError(f"--data_files={config.data_files}: the built-in corpus has no shards to pick; give a --source")
    at_least(config, 0, "val_fraction", below=1)
    name = config.tokenizer if config.tokenizer != "auto" else "bytes" if config.source == "builtin" else "gpt2"
    # once and first: a missing file is one message here, not one in each worker
    tokenizer = get_tokenizer(name, "; or use --tokenizer=bytes")
    called = os.path.basename(os.path.abspath(config.source))
    folder = config.out_dir or os.path.join("data", next((called[:-len(s)] for s in SUFFIXES if called.endswith(s)), called))
    num_proc = config.num_proc or os.cpu_count() or 1
    meta = dict(format=1, tokenizer=tokenizer.name, vocab_size=tokenizer.n_vocab, eot=tokenizer.eot,
                dtype=str(bin_dtype(tokenizer.n_vocab)), source=config.source, val_source=config.val_source,
                val_fraction=config.val_fraction, max_tokens=config.max_tokens, mix=config.mix, seed=config.seed)
    quotas = parse_mix(config)
    config = with_parts(config)
    if config.val_source != given.val_source:
        print(f"validation text: {config.val_source}")
    if config.val_source and given.val_fraction != "auto":
        print(f"note: --val_fraction={given.val_fraction} changes nothing, since {config.val_source} is the validation text")
    for source, patterns, besides in ((config.source, config.data_files, config.val_source), (config.val_source, "", "")):
        if is_hub(source):
            open_hub(source, patterns)
        elif source not in ("", "builtin"):
            files = find_files(source, patterns, besides)
            rest = []
            if os.path.isdir(source) and SPLIT.match(os.path.basename(files[0])):
                used = set(map(os.path.realpath, [*files, *(find_files(besides) if besides and not is_hub(besides) else [])]))
                rest = [p for p in shards(source, patterns)
                        if os.path.realpath(p) not in used and not SPLIT.match(os.path.basename(p))]
            if rest:
                print(f"note: {source}: {os.path.basename(rest[0])} and {len(rest) - 1} more are not read, since others are "
                      f"named {os.path.basename(files[0])}, as a split's shards; rename those, or pick some with --data_files")
    if config.source == "builtin":
        root, files = builtin_files()
        digest = hashlib.sha256()
        for path in files:
            with open(path, "rb") as f:
                digest.update(os.path.relpath(path, root).encode() + b"\0" + f.read() + b"\0")
        meta.update(python=platform.python_version(), sha256=digest.hexdigest())

    with locked(folder):
        writer = Writer(folder, bin_dtype(tokenizer.n_vocab))
        try:
            with workers(tokenizer, num_proc) as pool:
                counts, bad, dry = fill(writer, config, tokenizer, pool, num_proc, quotas)
            bins = {n: f.tell() // writer.dtype.itemsize for n, f in writer.files.items()}
            if not bins["train"] or not bins["val"]:
                empty = "train" if not bins["train"] else "val"
                documents = sum(c["documents"] for s in counts.values() for c in s.values())
                raise UserError(
                    f"source {config.source}: {documents} documents, none left for {empty}.bin"
                    + (f"; {sum(n for n, _ in bad.values())} were skipped: {summary(bad)}" if bad else "")
                    + ('; expected an object {"text": ...} on each line' if bad and not documents else
                       f"; --mix={config.mix} names none of them, or --max_tokens is too small"
                       if empty == "train" and config.mix else
                       f"; --max_tokens={config.max_tokens} is below the first one's length"
                       if empty == "train" and config.max_tokens else
                       "; give more text, or --val_source=FILE" if not config.val_source else
                       f"; --val_source={config.val_source} has no text" + (f" of the sources in --mix={config.mix}"
                                                                            if config.mix else "") if empty == "val" else ""))
            meta.update(bins=bins, sources=counts, skipped={kind: n for kind, (n, _) in bad.items()})
            writer.commit(meta)
        except BaseException as e:
            writer.abort()
            if isinstance(e, OSError) and e.filename is None:  # a write that failed does not say where
                raise UserError(f"{folder}: could not be written ({e.strerror or e}); what was there is as it was") from None
            raise
    for source, splits in sorted(counts.items()):
        print(f"  {source:15} " + "   ".join(f"{s}: {c['documents']:,} documents, {c['bytes']:,} bytes, {c['tokens']:,} tokens"
                                          for s, c in splits.items()))
    if bad:
        print(f"skipped or mended: {summary(bad)}")
    for source, quota in quotas.items():
        got = counts.get(source, {"train": {"tokens": 0}})["train"]["tokens"]
        print(f"  mix {source}: {got:,} of {quota:,} tokens" + (": no more of it that fits" if source in dry else ""))
    print(f"wrote {folder}: train {bins['train']:,} tokens, val {bins['val']:,} tokens ({tokenizer.name})")
    return meta


def parse_mix(config):
    """{source: training tokens} of config.mix. Raises UserError."""
    if not config.mix:
        return {}
    try:
        shares = {name.strip().removeprefix("RedPajama"): float(share)
                  for name, share in (part.split(":") for part in config.mix.split(","))}
        if not all(0 < share < 1e9 for share in shares.values()) or "" in shares or len(shares) < config.mix.count(",") + 1:
            raise ValueError
    except ValueError:
        raise UserError(f"--mix={config.mix}: expected source:share,source:share with shares above 0, as "
                        "CommonCrawl:50,C4:20") from None
    if not config.max_tokens:
        raise UserError("--mix needs --max_tokens: the shares are of that many training tokens")
    return {name: int(config.max_tokens * share / sum(shares.values())) for name, share in shares.items()}


def summary(bad):
    """'not JSON: 2 (first: shard line 7), ...'"""
    return ", ".join(f"{kind}: {n} (first: {where})" for kind, (n, where) in bad.items())


def fill(writer, config, tokenizer, pool, num_proc, quotas):
    """
    Write all documents to their bins. Returns {source: {train|val: {documents, bytes, tokens}}}, the bad ones as
    {kind: [count, where the first is]}, and the quotas of the mix that were not filled.
    """
    counts, bad, seen, total, began = {}, {}, set(), 0, time.perf_counter()
    open_quotas = dict(quotas)  # source -> training tokens still wanted; a source leaves when 99 % of its share is there

    def put(split, piece, ids):
        source, _, n_bytes, n_tokens, ends = piece
        for name in ("train",) if split == "train" else ("val", f"val_{source}"):
            writer.write(name, ids)
        count = counts[source][split]
        count["documents"] += int(ends)
        count["bytes"] += n_bytes
        count["tokens"] += n_tokens

    for name in ("train", "val"):
        writer.write(name, np.empty(0, writer.dtype))
    for given in ("source", "val_source") if config.val_source else ("source",):
        split = "val" if given == "val_source" else "train"
        hold = given == "source" and not config.val_source  # hold out a part by hash
        held = None  # the last piece: validation text even if no hash is below val_fraction
        end = math.inf  # encode_batch's `at` behind which nothing counts: there is enough text
        batches = read_source(getattr(config, given), config.data_files if given == "source" else "", config.on_error, split,
                              config.seed if quotas and given == "source" else None,
                              config.val_source if given == "source" else "")
        with contextlib.closing(encode_all(batches, hold, tokenizer, pool, num_proc)) as results:
            for (ids, pieces, wrong), bar in results:
                at = 0
                for i, piece in enumerate(pieces):
                    source, digest, _, n, _ = piece
                    seen.add(source)
                    if quotas and source not in quotas:
                        at += n
                        continue
                    if source not in counts and len(counts) >= MAX_SOURCES:
                        piece = ("other", *piece[1:])
                    counts.setdefault(piece[0], {s: dict(documents=0, bytes=0, tokens=0) for s in ("train", "val")})
                    own, at = ids[at:at + n], at + n
                    if hold and digest < config.val_fraction * 2 ** 64:
                        put("val", piece, own)
                        continue
                    if split == "train" and quotas:
                        if n > open_quotas.get(source, 0):  # a shorter one may still fit
                            continue
                        open_quotas[source] -= n
                        if open_quotas[source] < 0.01 * quotas[source]:
                            del open_quotas[source]
                    elif split == "train" and config.max_tokens:
                        if total + n > config.max_tokens:
                            end = 2 * i
                            break
                        total += n
                    if hold and config.val_fraction:
                        held, (piece, own) = (piece, own), held or (None, None)
                    if piece is not None:
                        put(split, piece, own)
                    if split == "train" and quotas and not open_quotas:
                        end = 2 * i + 1
                        break
                for kind, where, where_at in wrong:
                    if where_at > end:
                        break
                    if kind == "damaged shard":
                        if config.on_error == "stop":
                            raise BadShard(f"{where} (--on_error=skip goes on without the rest of it)")
                        bar.write(f"skipped: {where}", file=sys.stderr)
                    bad.setdefault(kind, [0, where])[0] += 1
                tokens = sum(c["tokens"] for s in counts.values() for c in s.values())
                bar.set_postfix_str(f"{tokens / (time.perf_counter() - began):,.0f} tokens/s", refresh=False)
                if end < math.inf:
                    break
        if missing := ", ".join(sorted(set(quotas) - seen)):
            raise UserError(f"--mix={config.mix}: {getattr(config, given)} has no text of {missing}, only of "
                            f"{', '.join(sorted(seen)) or 'nothing'}: name those")
        if held is not None:
            has_val = any(c["val"]["tokens"] for c in counts.values())
            put("train" if has_val else "val", *held)
    for source in counts:
        writer.write(f"val_{source}", np.empty(0, writer.dtype))
    return counts, bad, open_quotas


def main():
    config = configure(Config, sys.argv[1:])
    print("\n".join(f"{k} = {v!r}" for k, v in dataclasses.asdict(config).items()))
    try:
        prepare(config)
    except WorkerDied as e:
        print(f"error: {e}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(2)


if __name__ == "__main__":
    command(main)
