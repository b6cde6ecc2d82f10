"""
Figure 11 (ICLR numbering): which values are mixed in. V_1, V_{n-1} or all earlier ones (Eq 5); from v5 V_2, V_3, and V_2 in a
model whose block 1 has no skip; 82M.

    torchrun --standalone --nproc_per_node=8 train.py config/paper/fig11.py --data=slimpajama
    python train.py config/paper/fig11.py config/small.py --data=slimpajama

Paper: V_1 is best (validation loss 2.7117; vanilla 2.7389). v5, second-hand and without numbers: V_2 and later do not help,
V_2 does once the residual from H_0 to H_1 is removed.
Our reading: half and half, as Eq 7, in the layers after the source; without the skip, block 1's attention output replaces its
input (the skip around its MLP stays), and the baseline is a vanilla model changed in the same way.
Cost: 8 runs x 20.97B tokens = 6.5e19 FLOPs, 51 H100-hours at 36 % MFU; small: 4.1e17 FLOPs, 0.3 hours. vanilla is fig7.py's:
mkdir -p out/fig11 && cp -r out/fig7/vanilla out/fig11 saves that run.
"""
out_dir = "out/fig11"

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
    "first": {"value_residual": True},
    "previous": {"value_residual": True, "value_source": "previous"},
    "all": {"value_residual": True, "value_source": "all"},
    "second": {"value_residual": True, "value_source": "2"},
    "third": {"value_residual": True, "value_source": "3"},
    "vanilla_no_skip": {"no_first_skip": True},
    "second_no_skip": {"value_residual": True, "value_source": "2", "no_first_skip": True, "baseline": "vanilla_no_skip"},
}
