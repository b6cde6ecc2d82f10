"""
Figure 10 (ICLR numbering): how earlier values reach layer n. Through its own attention A_n (Eq 7: V_1, Eq 5: all earlier
values), through cross-layer attention (Eq 2), or past attention altogether (Eq 6, identity mapping); 82M.

    torchrun --standalone --nproc_per_node=8 train.py config/paper/fig10.py --data=slimpajama
    python train.py config/paper/fig10.py config/small.py --data=slimpajama

Paper: relative loss up to 0.5; identity mapping is clearly worse than vanilla, ResFormer ends below cross-layer attention
(the text has a typo there). Curves only: no numbers but ResFormer's validation loss, 2.7117 (vanilla 2.7389).
Our reading: cross-layer attention reads layer 1, as Eq 7 does; which layer the paper took is not known to us
(value_source=previous with cross_layer is the other candidate).
Cost: 5 runs x 20.97B tokens = 4.1e19 FLOPs, 32 H100-hours at 36 % MFU; small: 2.5e17 FLOPs, 0.2 hours. That count misses that
cross_layer attends to twice as many keys, under an explicit mask: its attention costs 2 to 4 times what is counted. vanilla
is fig7.py's: mkdir -p out/fig10 && cp -r out/fig7/vanilla out/fig10 saves that run.
"""
out_dir = "out/fig10"

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
    "resformer": {"value_residual": True},  # Eq 7
    "resformer_all": {"value_residual": True, "value_source": "all"},  # Eq 5
    "cross_layer": {"cross_layer": True},  # Eq 2
    "identity_mapping": {"identity_mapping": True},  # Eq 6
}
