"""
Figure 16 (ICLR numbering): all layers use layer 1's queries, keys or values (SVFormer); 82M.

    torchrun --standalone --nproc_per_node=8 train.py config/paper/fig16.py --data=slimpajama
    python train.py config/paper/fig16.py config/small.py --data=slimpajama

Paper: sharing queries or keys is clearly harmful, sharing values least. Curves only: no numbers.
Our reading: later layers have no projection of what is shared. The model size is not known to us; 82M here.
Cost: 4 runs x 20.97B tokens = 3.2e19 FLOPs, 25 H100-hours at 36 % MFU; small: 2.0e17 FLOPs, 0.2 hours. vanilla is fig7.py's:
mkdir -p out/fig16 && cp -r out/fig7/vanilla out/fig16 saves that run.
"""
out_dir = "out/fig16"

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
    "shared_query": {"shared_query": True},
    "shared_key": {"shared_key": True},
    "shared_value": {"shared_value": True},
}
