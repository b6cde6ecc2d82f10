"""
Figure 22 (ICLR numbering): NeuTRENO's strength, U_n = A_n V_n + λ (V_1 - V_n) for λ = 0.2, 0.4, 0.6, 0.8; 82M.

    torchrun --standalone --nproc_per_node=8 train.py config/paper/fig22.py --data=slimpajama
    python train.py config/paper/fig22.py config/small.py --data=slimpajama

Paper: 0.4 is best, which the other comparisons then use. Curves only: no numbers.
Our reading: none for the form, which is the authors' code's. The model size is not known to us; 82M here.
Cost: 5 runs x 20.97B tokens = 4.1e19 FLOPs, 32 H100-hours at 36 % MFU; small: 2.5e17 FLOPs, 0.2 hours. vanilla is fig7.py's:
mkdir -p out/fig22 && cp -r out/fig7/vanilla out/fig22 saves that run.
"""
out_dir = "out/fig22"

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
    "lambda_0.2": {"neutreno": 0.2},
    "lambda_0.4": {"neutreno": 0.4},
    "lambda_0.6": {"neutreno": 0.6},
    "lambda_0.8": {"neutreno": 0.8},
}
