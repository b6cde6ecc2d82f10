"""
Table 3 (ICLR numbering; lengths and their batches) and Figure 7's curves by length: vanilla and ResFormer (Eq 7) at lengths
of 512, 2,048 (the runs without a length in their name), 8,192, 32,000 and 64,000 tokens; 82M.

    torchrun --standalone --nproc_per_node=8 train.py config/paper/table3.py --data=slimpajama
    python train.py config/paper/table3.py config/small.py --data=slimpajama

Paper: 4,096, 1,024, 256, 64 and 32 windows per iteration: 2.10M tokens, 2.05M at 32,000 and 64,000. ResFormer is below
vanilla at every length (curves only). At 2,048 its validation loss is 2.7117, vanilla's 2.7389; none is known for the other
lengths.
Our reading: RoPE's theta stays 10,000 throughout. The model size of these curves is not known to us; 82M here.
Cost: 10 runs x 20.97B tokens (20.48B at 32,000 and 64,000) = 1.8e20 FLOPs, 139 H100-hours at 36 % MFU; small: 1.1e18 FLOPs,
0.9 hours.
"""
out_dir = "out/table3"

# the 82M model and its training, as in config/82M.py
n_layer = 8
n_head = 8
n_embd = 512
n_ffn = 1792
block_size = 2048

batch_size = 32  # windows per process and micro-step: lower it if memory runs out, the batch stays the same
tokens_per_iter = 1024 * 2048
max_iters = 10000
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 120

# the other lengths, with as many tokens per micro-step; the last two set the whole batch (Table 3: 64 and 32 windows)
_512 = {"block_size": 512, "batch_size": 128}
_8192 = {"block_size": 8192, "batch_size": 8}
_32000 = {"block_size": 32000, "batch_size": 2, "tokens_per_iter": 64 * 32000}
_64000 = {"block_size": 64000, "batch_size": 1, "tokens_per_iter": 32 * 64000}

runs = {
    "vanilla": {},
    "resformer": {"value_residual": True},
    "vanilla_512": {**_512},
    "resformer_512": {**_512, "value_residual": True, "baseline": "vanilla_512"},
    "vanilla_8192": {**_8192},
    "resformer_8192": {**_8192, "value_residual": True, "baseline": "vanilla_8192"},
    "vanilla_32000": {**_32000},
    "resformer_32000": {**_32000, "value_residual": True, "baseline": "vanilla_32000"},
    "vanilla_64000": {**_64000},
    "resformer_64000": {**_64000, "value_residual": True, "baseline": "vanilla_64000"},
}
