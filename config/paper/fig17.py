"""
Figure 17 (ICLR numbering): SVFormer with more layers that compute values (anchors), each shared until the next; 82M.

    torchrun --standalone --nproc_per_node=8 train.py config/paper/fig17.py --data=slimpajama
    python train.py config/paper/fig17.py config/small.py --data=slimpajama

Paper: first layer; first and last; first, one in the middle, last; first, two in the middle, last. More anchors are better.
Curves only: no numbers. The KV cache is (8 + anchors) / 16 of vanilla's: 0.5625, 0.625, 0.6875, 0.75.
Our reading: which middle layers the paper took is not known to us. Evenly spaced here: 5 of 8 (the first of the second half),
and 3 and 6. The model size is not known either; 82M here.
Cost: 5 runs x 20.97B tokens = 4.0e19 FLOPs, 31 H100-hours at 36 % MFU; small: 2.5e17 FLOPs, 0.2 hours. vanilla is fig7.py's:
mkdir -p out/fig17 && cp -r out/fig7/vanilla out/fig17 saves that run.
"""
out_dir = "out/fig17"

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
    "first": {"shared_value": True},
    "first_last": {"shared_value": True, "value_anchors": "1,8"},
    "one_middle": {"shared_value": True, "value_anchors": "1,5,8"},
    "two_middle": {"shared_value": True, "value_anchors": "1,3,6,8"},
}
