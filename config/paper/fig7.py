"""
Figure 7 (ICLR numbering), all systems at 82M: vanilla, NeuTRENO, DenseFormer, ResFormer and ResFormer + NeuTRENO. The
figure's other part, ResFormer at five lengths, is table3.py.

    torchrun --standalone --nproc_per_node=8 train.py config/paper/fig7.py --data=slimpajama
    python train.py config/paper/fig7.py config/small.py --data=slimpajama

Paper: ResFormer is below DenseFormer and NeuTRENO, ResFormer + NeuTRENO lowest (curves only). Validation loss, mean of seven
sources: vanilla 2.7389, ResFormer 2.7117; none is known for the others at 82M.
Our reading: NeuTRENO adds 0.4 (V_1 - V_n) after attention; with ResFormer 0.2 (V_1 - V'_n), V'_n being the mixed value
(authors' code). DenseFormer has dilation 1 and period 1, which the paper does not say, and starts as vanilla.
Cost: 5 runs x 20.97B tokens = 4.1e19 FLOPs, 32 H100-hours at 36 % MFU; small: 2.5e17 FLOPs, 0.2 hours.
"""
out_dir = "out/fig7"

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
    "neutreno": {"neutreno": 0.4},
    "denseformer": {"denseformer": True},
    "resformer": {"value_residual": True},
    "resformer_neutreno": {"value_residual": True, "neutreno": 0.2},
}
