"""
Figure 15 (ICLR numbering), two of its panels: SVFormer against vanilla by learning rate (6e-4, 3e-4, 1e-4) and by warmup (120
and 1,200 iterations); 82M. The runs without a setting in their name have 6e-4 and 120.

    torchrun --standalone --nproc_per_node=8 train.py config/paper/fig15.py --data=slimpajama
    python train.py config/paper/fig15.py config/small.py --data=slimpajama

Paper: a smaller learning rate makes SVFormer's loss smaller relative to vanilla's; warmup does not matter, nor does the
architecture (Llama-82M, GPT2-78M). With the fit over sizes, SVFormer needs 12.2 % more parameters for an equal loss. Curves
only: no other numbers.
Our reading: min_lr stays a tenth of the peak. The panels on the architecture and on the fit over sizes are not here.
Cost: 8 runs x 20.97B tokens = 6.4e19 FLOPs, 50 H100-hours at 36 % MFU; small: 4.0e17 FLOPs, 0.3 hours. vanilla is fig7.py's:
mkdir -p out/fig15 && cp -r out/fig7/vanilla out/fig15 saves that run.

With config/small.py's 500 iterations a warmup of 1,200 never reaches its peak: leave that pair out with
--runs=vanilla,svformer,vanilla_lr3e-4,svformer_lr3e-4,vanilla_lr1e-4,svformer_lr1e-4.
"""
out_dir = "out/fig15"

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

runs = {
    "vanilla": {},
    "svformer": {"shared_value": True},
    "vanilla_lr3e-4": {"learning_rate": 3e-4, "min_lr": 3e-5},
    "svformer_lr3e-4": {"learning_rate": 3e-4, "min_lr": 3e-5, "shared_value": True, "baseline": "vanilla_lr3e-4"},
    "vanilla_lr1e-4": {"learning_rate": 1e-4, "min_lr": 1e-5},
    "svformer_lr1e-4": {"learning_rate": 1e-4, "min_lr": 1e-5, "shared_value": True, "baseline": "vanilla_lr1e-4"},
    "vanilla_warmup1200": {"warmup_iters": 1200},
    "svformer_warmup1200": {"warmup_iters": 1200, "shared_value": True, "baseline": "vanilla_warmup1200"},
}
