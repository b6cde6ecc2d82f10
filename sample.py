"""
Text from a checkpoint.

    python sample.py --out_dir=out/quickstart/resformer --start="def " --max_new_tokens=200
    python sample.py --out_dir=out/resformer --start=FILE:prompt.txt --num_samples=3 --temperature=0.7
    python sample.py --out_dir=out/resformer --start=LINES:prompts.txt          # one prompt per line, in one batch

One sample is printed while it is made. <|endoftext|> in a prompt is the end-of-text token; an empty prompt is one of it.
"""
import codecs
import contextlib
import itertools
import os
import pathlib
import sys
import time
import warnings
from dataclasses import dataclass
from typing import Literal

import torch

import kernels
from configurator import UserError, at_least, command, configure
from model import KVCache, from_checkpoint, load_checkpoint, usable_device
from prepare import get_tokenizer


@dataclass
class Config:
    out_dir: str = "out"  # the run whose ckpt.pt is used
    start: str = ""  # the prompt; FILE:path reads it from a file; LINES:path: one prompt per line; empty: end of text
    num_samples: int = 1  # samples of each prompt
    max_new_tokens: int = 200  # tokens to generate after the prompt
    temperature: float = 0.8  # 0: always the likeliest token; 1: the model's own probabilities
    top_k: int = 200  # sample from the k likeliest tokens only; 0: from all
    top_p: float = 1.0  # sample from the smallest set whose probability reaches this; 1: from all
    tokenizer: str = ""  # where the checkpoint's tokenizer is now, if its file moved; empty: where it was
    seed: int = 1337  # the same seed gives the same text
    device: str = "auto"  # cuda, mps or cpu; auto: the first of these that is there
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: bfloat16 on CUDA that has it, else float32
    compile: bool = False  # compile the decoding step (a minute; on CUDA a graph): for long texts and many prompts
    fast: bool = True  # with compile, on CUDA: kernels.py's attention to the cache; False: the plain path


def read_prompts(start):
    """The prompts that --start names. Raises UserError for a file that can't be read."""
    start = start.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # bytes that a terminal sent as no UTF-8
    kind, colon, path = start.partition(":")
    if not (colon and kind in ("FILE", "LINES")):
        return [start]
    try:
        with open(path, encoding="utf-8-sig") as f:
            text = f.read()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"--start={start}: {getattr(e, 'strerror', None) or 'not UTF-8 text'}; expected a text file") from None
    if kind == "FILE":
        return [text]
    if not text.strip():
        raise UserError(f"--start={start}: the file has no line; expected one prompt per line")
    return text.removesuffix("\n").split("\n")


def encode_prompt(tokenizer, text):
    """Token ids of a prompt, where <|endoftext|> is the end-of-text token. An empty prompt is one end-of-text token."""
    ids = []
    for i, part in enumerate(text.split("<|endoftext|>")):
        ids += ([tokenizer.eot] if i else []) + [int(t) for t in (tokenizer.encode(part) if part else [])]
    return ids or [tokenizer.eot]


def main():
    config = configure(Config, sys.argv[1:])
    at_least(config, 1, "num_samples", "max_new_tokens")
    at_least(config, 0, "temperature", "top_k")
    at_least(config, 0, "seed", below=1 << 63)
    warnings.formatwarning = lambda message, *args, **kwargs: f"note: {message}\n"
    if not 0 < config.top_p <= 1:
        raise UserError(f"--top_p={config.top_p}: expected more than 0 and at most 1")
    prompts = read_prompts(config.start)
    try:
        ckpt = load_checkpoint(f"{config.out_dir}/ckpt.pt")
        model = from_checkpoint(ckpt)
    except ValueError as e:
        below = ", ".join(sorted(f.parent.as_posix() for f in pathlib.Path(config.out_dir).glob("*/**/ckpt.pt"))[:9])
        raise UserError(f"--out_dir={config.out_dir}: {e}" + (f"; there are {below}" if below else "")) from None
    if not isinstance(ckpt.get("data"), dict) or not isinstance(ckpt["data"].get("tokenizer"), str):
        raise UserError(f"--out_dir={config.out_dir}: ckpt.pt does not name its tokenizer; damaged, or not written by train.py")
    wanted = config.tokenizer or ckpt["data"]["tokenizer"]
    if wanted.endswith((".json", ".tiktoken")) and not os.path.isfile(wanted):
        raise UserError(f"--tokenizer={wanted}: no such file" if config.tokenizer else
                        f"tokenizer {wanted}: no such file; if it moved, give its path as --tokenizer")
    tokenizer = get_tokenizer(wanted)
    if tokenizer.n_vocab != ckpt["data"].get("vocab_size", tokenizer.n_vocab):
        raise UserError(f"--tokenizer={wanted}: has {tokenizer.n_vocab} ids, but the checkpoint was trained with "
                        f"{ckpt['data']['vocab_size']} of {ckpt['data']['tokenizer']}; give that one")
    try:
        name = usable_device(config.device)
    except ValueError as e:
        raise UserError(f"--device={config.device}: {e}") from None
    model.to(name)
    device = torch.device(name)
    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(False)
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if bf16 else "float32"
    model.cast_matrices(getattr(torch, dtype))
    if config.fast and config.compile and device.type == "cuda" and kernels.triton:
        kernels.use_for_decoding(model)

    ids = [encode_prompt(tokenizer, p) for p in prompts for _ in range(config.num_samples)]
    lengths = [len(row) for row in ids]
    width = max(lengths)
    idx = torch.tensor([[tokenizer.eot] * (width - len(row)) + row for row in ids], device=device)
    autocast = torch.autocast(device.type, getattr(torch, dtype)) if dtype != "float32" else contextlib.nullcontext()
    cache_bytes = KVCache(model.config, len(ids), min(model.config.block_size, width + config.max_new_tokens), "meta",
                          getattr(torch, dtype)).nbytes
    with autocast:
        tokens = model.stream(idx, config.max_new_tokens, config.temperature, config.top_k, config.top_p, lengths,
                              n_vocab=tokenizer.n_vocab, seed=config.seed, compile=config.compile)
        try:  # the prompt's pass, what the device starts up with, and compiling at the second token, are not decoding speed
            first = list(itertools.islice(tokens, 1 + config.compile))
        except Exception as e:  # no C++ compiler, an old GPU, a platform without Triton: all kinds of errors
            if not config.compile:
                raise
            raise UserError(f"--compile=True does not work here ({type(e).__name__}: {str(e).strip().splitlines()[0][:120]}); "
                            "leave it out") from None
        began = time.perf_counter()
        tokens = itertools.chain(first, tokens)
        if len(ids) == 1:
            print(prompts[0], end="", flush=True)
            text = codecs.getincrementaldecoder("utf-8")("replace")  # a character may take several tokens
            for t in tokens:
                print(text.decode(tokenizer.decode_bytes(t.tolist())), end="", flush=True)
            print(text.decode(b"", final=True))
        else:
            rows = torch.stack(list(tokens), dim=1).tolist()
            for prompt, row in zip(itertools.chain.from_iterable([p] * config.num_samples for p in prompts), rows):
                print(prompt + tokenizer.decode_bytes(row).decode(errors="replace") + "\n---------------")
    timed = config.max_new_tokens - len(first)
    rate = f"{len(ids) * timed / (time.perf_counter() - began):,.0f} tokens/s" if timed > 0 else "too short to be timed"
    print(f"[{rate}, KV cache {cache_bytes:,} bytes, {name}, {dtype}]", file=sys.stderr)


if __name__ == "__main__":
    command(main)
