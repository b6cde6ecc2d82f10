"""
An overlay: the family of value residuals and the systems the paper compares with, at 0.26B tokens (1,000 iterations of
262,144), in pairs over seeds. One 82M run takes about 4 minutes on an H100 or H200; results/family/ has what we ran of it.

    python train.py config/82M.py config/family.py --data=slimpajama --seeds=1337,1338,1339
    python train.py config/82M.py config/family.py --data=slimpajama --seeds=1337 --runs=vanilla,identity
"""
out_dir = "out/family"
tokens_per_iter = 128 * 2048
max_iters = 1000
eval_interval = 500
warmup_iters = 120
batch_size = 64  # 24 GB; with eval_iters = 20 our validation bins are evaluated whole
runs = {
    "vanilla": {},
    "identity": {"value_residual": True},
    "constant": {"value_residual": True, "value_mix": "constant"},
    "learnable": {"value_residual": True, "value_mix": "learnable"},
    "sparse": {"value_residual": True, "value_mix": "constant", "value_layers": "6-8", "value_lambda1": 5.0},
    "plus": {"value_residual": True, "value_mix": "plus"},
    "svformer": {"shared_value": True},
    "neutreno": {"neutreno": 0.4},
    "denseformer": {"denseformer": True},
}
