"""
Vanilla, ResFormer and SVFormer on the built-in corpus (Python's standard library as bytes): minutes on two CPU cores.

    python train.py config/quickstart.py
"""
data = "builtin"
out_dir = "out/quickstart"
runs = {
    "vanilla": {},
    "resformer": {"value_residual": True},
    "svformer": {"shared_value": True},
}

n_layer = 6
n_head = 4
n_embd = 128
block_size = 128
batch_size = 16
max_iters = 300  # 0.6M tokens
learning_rate = 1e-3  # vanilla's best of four; ResFormer's and SVFormer's is 2e-3 (README.md)
min_lr = 1e-4
warmup_iters = 30
eval_interval = 100
eval_iters = 20
log_interval = 25
rel_window = 25
sample_tokens = 200
device = "cpu"
