import json
import os
import signal
import sys

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side: threads of several would wait for each other
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job, and what it starts, would ignore Ctrl-C
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """
    A folder with bins of bytes (trained/bins: sources C4 and Book) and a finished list of tiny runs (trained/runs:
    vanilla, resformer, learnable, svformer, gqa; two seeds each), for the analyses. Tests must not change it.
    """
    import prepare
    import train
    folder = tmp_path_factory.mktemp("trained")
    for split, docs in (("train", 60), ("val", 12)):
        with open(folder / f"{split}.jsonl", "w") as f:
            for i in range(docs):
                source = ("C4", "Book")[i % 2]
                text = " ".join(f"{source}{(i * 7 + j * j) % 89} é" for j in range(40))
                f.write(json.dumps({"text": text, "meta": {"redpajama_set_name": f"RedPajama{source}"}}) + "\n")
    prepare.prepare(prepare.Config(source=str(folder / "train.jsonl"), val_source=str(folder / "val.jsonl"),
                                   out_dir=str(folder / "bins"), tokenizer="bytes", num_proc=1))
    config = train.Config(
        n_layer=4, n_head=4, n_embd=32, block_size=32, batch_size=4, max_iters=30, warmup_iters=3, learning_rate=1e-2,
        min_lr=1e-3, eval_interval=10, eval_iters=2, rel_window=5, device="cpu", compile=False, seeds="1,2",
        data=str(folder / "bins"), out_dir=str(folder / "runs"), runs={
            "vanilla": {}, "resformer": {"value_residual": True}, "svformer": {"shared_value": True},
            "learnable": {"value_residual": True, "value_mix": "learnable"}, "gqa": {"n_kv_head": 2}})
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    train.train_list(config, train.World(), train.Signals())
    for s, handler in handlers.items():
        signal.signal(s, handler)
    return folder
