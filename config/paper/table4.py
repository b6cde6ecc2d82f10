"""
Table 4 (ICLR numbering; sizes) and Table 5 (their validation losses): vanilla and ResFormer (Eq 7) at 2M, 82M, 180M and 468M.

    torchrun --standalone --nproc_per_node=8 train.py config/paper/table4.py --data=slimpajama
    python train.py config/paper/table4.py config/small.py --data=slimpajama

Paper, validation loss after 20B tokens, mean of seven sources, one seed: 82M 2.7389 -> 2.7117, 180M 2.5015 -> 2.4692, 468M
2.2806 -> 2.2537. For 2M none is known: 99 % of it are embeddings, a check of the machinery only.
Our reading: warmup is Table 4's 120 iterations (the text says 1,200). The sizes are those of config/2M.py to config/468M.py;
the paper's 320M and 1.6B are nowhere described, so they are not here.
Cost: 8 runs x 20.97B tokens = 1.7e20 FLOPs, 136 H100-hours at 36 % MFU; small: 1.1e18 FLOPs, 0.8 hours.
"""
out_dir = "out/table4"
block_size = 2048

tokens_per_iter = 1024 * 2048
max_iters = 10000
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 120

# batch_size: windows per process and micro-step; lower it if memory runs out, the batch stays the same
_2M = {"n_layer": 4, "n_head": 2, "n_embd": 16, "n_ffn": 56, "batch_size": 32}
_82M = {"n_layer": 8, "n_head": 8, "n_embd": 512, "n_ffn": 1792, "batch_size": 32}
_180M = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_ffn": 2688, "batch_size": 32}
_468M = {"n_layer": 24, "n_head": 16, "n_embd": 1024, "n_ffn": 3584, "batch_size": 8}

runs = {
    "vanilla_2M": {**_2M},
    "resformer_2M": {**_2M, "value_residual": True, "baseline": "vanilla_2M"},
    "vanilla_82M": {**_82M},
    "resformer_82M": {**_82M, "value_residual": True, "baseline": "vanilla_82M"},
    "vanilla_180M": {**_180M},
    "resformer_180M": {**_180M, "value_residual": True, "baseline": "vanilla_180M"},
    "vanilla_468M": {**_468M},
    "resformer_468M": {**_468M, "value_residual": True, "baseline": "vanilla_468M"},
}
