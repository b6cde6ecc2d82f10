"""
Figure 9 (ICLR numbering): the residual on values, queries or keys, and v5's on hidden states or the attention weights; 82M.

    torchrun --standalone --nproc_per_node=8 train.py config/paper/fig9.py --data=slimpajama
    python train.py config/paper/fig9.py config/small.py --data=slimpajama

Paper: only the value residual helps. Validation loss (v5, second-hand): vanilla 2.739, value 2.712, query 2.742, key 2.746,
attention 2.757, hidden 2.781.
Our reading: all mix half and half with layer 1. Attention weights are mixed after the softmax; hidden averages the normed
input of attention, on top of the usual skip. The exact form of these two is not known to us.
Cost: 6 runs x 20.97B tokens = 4.9e19 FLOPs, 38 H100-hours at 36 % MFU; small: 3.0e17 FLOPs, 0.2 hours. That count misses
attention_residual's explicit maps over the whole square, without fused kernels: expect that run to take several times as
long. vanilla is fig7.py's: mkdir -p out/fig9 && cp -r out/fig7/vanilla out/fig9 saves that run.
"""
out_dir = "out/fig9"

# the 82M model and its training, as in config/82M.py
n_layer = 8
n_head = 8
n_embd = 512
n_ffn = 1792
block_size = 2048

batch_size = 8  # windows per process and micro-step; a quarter of 82M.py's, since attention_residual keeps whole maps
eval_iters = 80  # as many validation windows as elsewhere: 80 x 8 = 20 x 32
tokens_per_iter = 1024 * 2048
max_iters = 10000
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 120

runs = {
    "vanilla": {},
    "value": {"value_residual": True},
    "query": {"query_residual": True},
    "key": {"key_residual": True},
    "hidden": {"hidden_residual": True},
    "attention": {"attention_residual": True},
}
