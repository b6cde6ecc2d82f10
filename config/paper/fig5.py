"""
Figure 5 (ICLR numbering): every two layers share their keys, their values, or both (CLA2); 82M.

    torchrun --standalone --nproc_per_node=8 train.py config/paper/fig5.py --data=slimpajama
    python train.py config/paper/fig5.py config/small.py --data=slimpajama

Paper: relative loss between -0.03 and 0.06; sharing values hurts least. The curves are an image: no numbers.
Our reading: layers (2k-1, 2k) share, and the second has no projection of its own. The model size is not known to us; 82M
here.
Cost: 4 runs x 20.97B tokens = 3.2e19 FLOPs, 25 H100-hours at 36 % MFU; small: 2.0e17 FLOPs, 0.2 hours. vanilla is fig7.py's:
mkdir -p out/fig5 && cp -r out/fig7/vanilla out/fig5 saves that run.
"""
out_dir = "out/fig5"

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
    "share_k": {"share_k_every": 2},
    "share_v": {"share_v_every": 2},
    "share_kv": {"cla": 2},
}
