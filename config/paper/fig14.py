"""
Figure 14 (ICLR numbering): SVFormer against vanilla at lengths of 512, 2,048 (the runs without a length in their name),
8,192, 32,000 and 64,000 tokens, and the iteration at which its relative loss crosses zero; 82M.

    torchrun --standalone --nproc_per_node=8 train.py config/paper/fig14.py --data=slimpajama
    python train.py config/paper/fig14.py config/small.py --data=slimpajama

Paper: SVFormer is ahead at first and always overtaken, later the longer the length, between 5,000 and 30,000 iterations; for
64,000 the crossing is extrapolated from the last 1,000 iterations. Curves only: no numbers.
Our reading: lengths and batches are Table 3's. Late crossings are beyond these 10,000 iterations too, and to be extrapolated.
The model size is not known to us; 82M here.
Cost: 10 runs x 20.97B tokens (20.48B at 32,000 and 64,000) = 1.8e20 FLOPs, 138 H100-hours at 36 % MFU; small: 1.1e18 FLOPs,
0.9 hours. The runs named vanilla are table3.py's: mkdir -p out/fig14 && cp -r out/table3/vanilla* out/fig14 saves them.
"""
out_dir = "out/fig14"

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
    "svformer": {"shared_value": True},
    "vanilla_512": {**_512},
    "svformer_512": {**_512, "shared_value": True, "baseline": "vanilla_512"},
    "vanilla_8192": {**_8192},
    "svformer_8192": {**_8192, "shared_value": True, "baseline": "vanilla_8192"},
    "vanilla_32000": {**_32000},
    "svformer_32000": {**_32000, "shared_value": True, "baseline": "vanilla_32000"},
    "vanilla_64000": {**_64000},
    "svformer_64000": {**_64000, "shared_value": True, "baseline": "vanilla_64000"},
}
