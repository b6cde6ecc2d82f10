"""Several processes (gloo, on the CPU): equal to one, resumed to the bit, and ended together."""
import json
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

import prepare
import train
from configurator import command

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TINY = ["--device=cpu", "--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=16", "--batch_size=2", "--tokens_per_iter=64",
        "--max_iters=12", "--eval_interval=4", "--eval_iters=3", "--log_interval=2", "--warmup_iters=2", "--learning_rate=1e-2",
        "--data=data/tiny", "--value_residual=True", "--lr_decay_iters=12"]
PATCHED = """
import os, sys, time
sys.path.insert(0, {repo!r})
import train
from configurator import command
whole_step, RANK = train.Run.step, int(os.environ["RANK"])
def step(self):
    {body}
    return whole_step(self)
train.Run.step = step
command(train.main)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"document {i} says {i * i} " * 8, "meta": {"redpajama_set_name": s}}) + "\n"
                            for i in range(60) for s in ("RedPajamaC4", "RedPajamaArXiv")))
    prepare.prepare(prepare.Config(source=str(text), out_dir=str(folder / "data" / "tiny"), tokenizer="bytes", num_proc=1,
                                   val_fraction=0.1))
    return folder


def launch(folder, processes, *options, script=None):
    """Start train.py, with torchrun where there are several processes; one thread each, since bits depend on it."""
    head = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    words = (head if processes > 1 else [sys.executable]) + [str(script or os.path.join(REPO, "train.py")), *TINY, *options]
    return subprocess.Popen(words, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            env={**os.environ, "OMP_NUM_THREADS": "1"})


def one_of_several(folder, env, out, words):
    os.environ.update(env)
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    with open(out, "w") as f:
        os.dup2(f.fileno(), 1)
        os.dup2(f.fileno(), 2)
    torch.set_num_threads(1)  # as launch() has them
    sys.argv = ["train.py", *TINY, *words]
    command(train.main)


def fork(folder, processes, *options, code=0, apart=False):
    """
    train.py in processes that torchrun does not start but a fork of one that has imported torch: many seconds less.
    The first that fails ends the others, as with torchrun. apart: each in a folder of its own. Returns what they printed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train", "torch._dynamo"])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        group = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(s.getsockname()[1]), WORLD_SIZE=str(processes))
    outs = [folder / f"rank{rank}.txt" for rank in range(processes)]
    jobs = [context.Process(target=one_of_several, args=(
        folder / f"disk{rank}" if apart else folder,
        dict(group, RANK=str(rank), LOCAL_RANK=str(rank)) if processes > 1 else {}, outs[rank], options))
        for rank in range(processes)]
    for job in jobs:
        job.start()
    left, end = list(jobs), time.time() + 120
    while left and time.time() < end and not any(job.exitcode for job in jobs):
        multiprocessing.connection.wait([job.sentinel for job in left], timeout=1)
        left = [job for job in left if job.is_alive()]
    failed = next((job.exitcode for job in jobs if job.exitcode), 1 if left else 0)
    for job in jobs:
        job.kill()
        job.join()
    out = "".join(path.read_text() for path in outs)
    assert failed == code, out
    return out


def finish(process, code=0):
    out = process.communicate(timeout=120)[0]
    assert process.returncode == code, out
    return out


def losses(folder, name):
    steps, evals = train.read_log(folder / name)
    assert list(steps) == list(range(len(steps)))
    return [x["loss"] for x in steps.values()], {i: (x["val_loss"], x["val_mean"]) for i, x in evals.items()}


def weights(folder, name):
    return torch.load(folder / name / "ckpt.pt", weights_only=True)["model"]


@pytest.fixture(scope="module")
def undisturbed(folder):
    """Two processes, one micro-step each, never disturbed."""
    out = fork(folder, 2, "--out_dir=out/two", "--dropout=0.1")
    assert "2 processes x 1 micro-steps x 2 windows" in out
    return losses(folder, "out/two"), weights(folder, "out/two")


def test_two_processes_equal_one(folder):
    """One process with two micro-steps and two processes: the same losses, training and validation."""
    for n in (1, 2):
        fork(folder, n, f"--out_dir=out/n{n}")
    one, two = losses(folder, "out/n1"), losses(folder, "out/n2")
    assert len(one[0]) == 12 and one[0] == pytest.approx(two[0], abs=1e-5)
    assert set(one[1]) == {0, 4, 8, 12}
    for i in one[1]:
        assert one[1][i] == pytest.approx(two[1][i], abs=1e-5)


def test_one_process_killed_ends_all_and_resumes_to_the_bit(folder, undisturbed):
    slow = folder / "slow.py"
    slow.write_text(PATCHED.format(repo=REPO, body="time.sleep(0.2)"))
    job = launch(folder, 2, "--out_dir=out/killed", "--dropout=0.1", script=slow)
    path = folder / "out" / "killed" / "log.jsonl"
    deadline = time.time() + 60
    while len(train.read_log(path.parent)[0]) < 6 and time.time() < deadline:
        time.sleep(0.05)
    children = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout.split()
    assert len(children) == 2
    os.kill(int(children[1]), signal.SIGKILL)
    began = time.time()
    out = job.communicate(timeout=60)[0]
    assert job.returncode != 0 and time.time() - began < 20, out
    assert len(train.read_log(path.parent)[0]) < 12
    assert "resuming at iteration" in finish(launch(folder, 2, "--out_dir=out/killed", "--dropout=0.1"))
    assert losses(folder, "out/killed") == undisturbed[0]
    for name, w in weights(folder, "out/killed").items():
        assert torch.equal(w, undisturbed[1][name]), name


def test_sigterm_saves_and_another_number_of_processes_goes_on(folder):
    slow = folder / "slow.py"
    slow.write_text(PATCHED.format(repo=REPO, body="time.sleep(0.2)"))
    job = launch(folder, 2, "--out_dir=out/stopped", script=slow)
    deadline = time.time() + 60
    while not train.read_log(folder / "out" / "stopped")[0] and time.time() < deadline:
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    out = job.communicate(timeout=60)[0]
    assert "stopped by a signal at iteration" in out
    assert 0 < len(train.read_log(folder / "out" / "stopped")[0]) < 12
    fork(folder, 1, "--out_dir=out/stopped")
    fork(folder, 1, "--out_dir=out/n1")
    assert losses(folder, "out/stopped")[0] == pytest.approx(losses(folder, "out/n1")[0], abs=1e-5)


def test_one_process_that_raises_ends_the_job_with_its_error_first(folder):
    bad = folder / "bad.py"
    bad.write_text(PATCHED.format(repo=REPO, body="assert not (RANK == 1 and self.iter == 3), 'the third iteration is cursed'"))
    began = time.time()
    out = finish(launch(folder, 2, "--out_dir=out/raised", script=bad), code=1)
    assert time.time() - began < 40
    errors = [line for line in out.splitlines() if "Error" in line or line.startswith("error:")]
    assert "the third iteration is cursed" in errors[0], out


def test_machines_without_a_common_disk_are_told(folder):
    """Process 1 sees an out_dir of its own, without the checkpoint of the first 4 iterations."""
    options = "--out_dir=out/apart", f"--data={folder}/data/tiny"
    fork(folder, 2, "--max_iters=4", *options, apart=True)
    out = fork(folder, 2, "--max_iters=8", *options, apart=True, code=2)
    errors = [line for line in out.splitlines() if "error: " in line.lower() and "iteration" in line]
    assert "would begin at iteration 0 and process 0 at 4" in errors[0] and "on a disk that all of them see" in errors[0], out


def test_what_does_not_divide_is_said_once(folder):
    out = finish(launch(folder, 3, "--out_dir=out/three"), code=1)
    said = [line for line in out.splitlines() if line.startswith("error:")]
    assert len(said) == 1 and "start 1, 2, 4 of them" in said[0]
    assert not (folder / "out" / "three").exists()


def test_list_of_runs(folder):
    (folder / "runs.py").write_text("runs = {'vanilla': {'value_residual': False}, 'resformer': {}, 'svformer': "
                                    "{'value_residual': False, 'shared_value': True}}\nout_dir = 'out/list'\n")
    out = fork(folder, 2, "runs.py", "--max_iters=4")
    summary = json.loads((folder / "out" / "list" / "summary.json").read_text())
    assert list(summary) == ["vanilla", "resformer", "svformer"] and "val loss - baseline" in out
    assert (folder / "out" / "list" / "relative_loss.png").stat().st_size > 1000


def test_a_slow_evaluation_is_no_timeout(monkeypatch):
    """The group's clock must outlast one process's slow disk or evaluation; the default would be minutes."""
    given = {}
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, timeout: given.update(b=backend, t=timeout))
    for key in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(key, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    world = train.join_group(train.Config(device="cpu"))
    assert world.group and given["b"] == "gloo" and given["t"].total_seconds() >= 3600
