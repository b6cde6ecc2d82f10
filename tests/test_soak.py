"""
Long tests, off by default:  NANORESFORMER_SOAK=200 pytest -n 0 -s tests/test_soak.py
The number is how often a small run is killed with kill -9 at random moments before its end is compared.
"""
import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import prepare
import train

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
KILLS = int(os.environ.get("NANORESFORMER_SOAK", "0"))
pytestmark = pytest.mark.skipif(not KILLS, reason="set NANORESFORMER_SOAK=200 to run it")
TINY = ["--device=cpu", "--n_layer=2", "--n_head=2", "--n_embd=64", "--block_size=32", "--batch_size=4", "--eval_interval=2",
        "--eval_iters=2", "--log_interval=1", "--dropout=0.1", "--value_residual=True", "--data=data/tiny", "--warmup_iters=10"]


def test_killed_again_and_again_ends_as_if_undisturbed(tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"line {i} and {i * i} " * 9}) + "\n" for i in range(400)))
    prepare.prepare(prepare.Config(source=str(text), out_dir=str(tmp_path / "data/tiny"), tokenizer="bytes", num_proc=1))
    iters = 60 * KILLS  # enough that it is not finished before the last kill

    def start(name):
        return subprocess.Popen([sys.executable, os.path.join(REPO, "train.py"), *TINY, f"--max_iters={iters}",
                                 f"--out_dir=out/{name}"], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                env={**os.environ, "OMP_NUM_THREADS": "1"})

    whole = start("whole")
    kills = early = finished = 0
    chance = random.Random(0)
    log = tmp_path / "out/killed/log.jsonl"
    while kills < KILLS:
        job = start("killed")
        size, deadline = log.stat().st_size if log.exists() else 0, time.time() + 30
        while job.poll() is None and time.time() < deadline and (not log.exists() or log.stat().st_size == size):
            time.sleep(0.01)  # until it has begun to write
        time.sleep(chance.uniform(0, 1.5))
        if job.poll() is not None:
            assert job.returncode == 0, job.stderr.read().decode()
            finished += 1
            break
        early += not (tmp_path / "out/killed/ckpt.pt").exists()
        os.kill(job.pid, signal.SIGKILL)
        job.wait()
        kills += 1
    last = start("killed")
    assert last.wait() == 0, last.stderr.read().decode()
    assert whole.wait() == 0, whole.stderr.read().decode()
    print(f"\n{kills} kills, {early} of them before the first checkpoint; {iters} iterations; "
          f"{'finished before the last kill' if finished else 'never finished by itself'}")
    logs = [train.read_log(tmp_path / "out" / name) for name in ("whole", "killed")]
    for a, b in zip(*logs):
        assert list(a) == list(b)
        for i in a:
            assert all(a[i].get(k) == b[i].get(k) for k in ("loss", "grad_norm", "val_loss", "val", "lr"))
    states = [torch.load(tmp_path / "out" / name / "ckpt.pt", weights_only=True) for name in ("whole", "killed")]
    assert states[0]["iter"] == states[1]["iter"] == iters
    for name, w in states[0]["model"].items():
        assert torch.equal(w, states[1]["model"][name]), name


def test_resident_memory_is_flat_over_a_large_bin(tmp_path):
    """20,000 batches of a 2 GB bin; the pages that were read do not stay counted as this process's."""
    path = tmp_path / "train.bin"
    with open(path, "wb") as f:
        for i in range(16):
            f.write(np.random.default_rng(i).integers(0, 50257, 1 << 26, dtype=np.uint16).tobytes())
    b, config = prepare.Bin(str(path), np.dtype("<u2")), train.Config(block_size=1024, seed=1)
    loader = train.Loader(b, config, train.World(), 32, 1, torch.device("cpu"))

    def resident():
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2 ** 20

    at = []
    for it in range(20_000):
        loader(it, 0)
        if it % 2000 == 1999:
            at.append(resident())
    print("\nresident MiB every 2,000 batches:", [round(x) for x in at])
    assert max(at) - at[0] < 50
