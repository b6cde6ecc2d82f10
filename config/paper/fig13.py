"""
Figure 13 (ICLR numbering): systems with about 1/2 and about 1/8 of vanilla's KV cache at lengths of 2,048 (the runs without a
length in their name) and 64,000 tokens; 82M. GQA2 has n_head / 2 key/value heads, GQA4 n_head / 4, GQA8 n_head / 8; CLA2
shares keys and values between pairs of layers.

    torchrun --standalone --nproc_per_node=8 train.py config/paper/fig13.py --data=slimpajama
    python train.py config/paper/fig13.py config/small.py --data=slimpajama

Paper: at 2,048 SVFormer is worse than GQA2, at 64,000 better than CLA2 and GQA2. Curves only: no numbers.
Our reading: cache fractions are SVFormer 0.5625, GQA2 0.5, CLA2 0.5; GQA8 0.125, CLA2+GQA4 0.125, SVFormer+GQA4 0.1406. The
legend of the 1/8 panel is not known to us: these three are the combinations that arithmetic allows. Model size not known
either; 82M here.
Cost: 14 runs x 20.97B tokens (20.48B at 64,000) = 3.3e20 FLOPs, 255 H100-hours at 36 % MFU; small: 2.0e18 FLOPs, 1.6 hours.
vanilla is fig7.py's: mkdir -p out/fig13 && cp -r out/fig7/vanilla out/fig13 saves that run.
"""
out_dir = "out/fig13"

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

# the long runs: Table 3's batch of 32 windows, which is not tokens_per_iter above
_64000 = {"block_size": 64000, "batch_size": 1, "tokens_per_iter": 32 * 64000}

runs = {
    "vanilla": {},
    "svformer": {"shared_value": True},
    "gqa2": {"n_kv_head": 4},
    "cla2": {"cla": 2},
    "gqa8": {"n_kv_head": 1},
    "cla2_gqa4": {"cla": 2, "n_kv_head": 2},
    "svformer_gqa4": {"shared_value": True, "n_kv_head": 2},
    "vanilla_64000": {**_64000},
    "svformer_64000": {**_64000, "shared_value": True, "baseline": "vanilla_64000"},
    "gqa2_64000": {**_64000, "n_kv_head": 4, "baseline": "vanilla_64000"},
    "cla2_64000": {**_64000, "cla": 2, "baseline": "vanilla_64000"},
    "gqa8_64000": {**_64000, "n_kv_head": 1, "baseline": "vanilla_64000"},
    "cla2_gqa4_64000": {**_64000, "cla": 2, "n_kv_head": 2, "baseline": "vanilla_64000"},
    "svformer_gqa4_64000": {**_64000, "shared_value": True, "n_kv_head": 2, "baseline": "vanilla_64000"},
}
