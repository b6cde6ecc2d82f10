"""
Figure 8 (ICLR numbering): how much of V_1 is added, U_n = A_n (V_n + λ V_1) for λ = 0.2, 0.5, 0.8, 1, 2, 5; 82M.

    torchrun --standalone --nproc_per_node=8 train.py config/paper/fig8.py --data=slimpajama
    python train.py config/paper/fig8.py config/small.py --data=slimpajama

Paper: every λ is below vanilla (relative loss between -0.10 and 0); the gain grows up to λ = 2, and 5 is less good. λ = 2 is
v5's Constant, validation loss 2.700 against vanilla's 2.739 (second-hand); no numbers for the others.
Our reading: the weight of V_n is 1, so λ = 1 is the sum, twice Eq 7's mean.
Cost: 7 runs x 20.97B tokens = 5.7e19 FLOPs, 44 H100-hours at 36 % MFU; small: 3.6e17 FLOPs, 0.3 hours. vanilla is fig7.py's:
mkdir -p out/fig8 && cp -r out/fig7/vanilla out/fig8 saves that run.
"""
out_dir = "out/fig8"

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
    "lambda_0.2": {"value_residual": True, "value_mix": "constant", "value_lambda1": 0.2},
    "lambda_0.5": {"value_residual": True, "value_mix": "constant", "value_lambda1": 0.5},
    "lambda_0.8": {"value_residual": True, "value_mix": "constant", "value_lambda1": 0.8},
    "lambda_1": {"value_residual": True, "value_mix": "constant", "value_lambda1": 1.0},
    "lambda_2": {"value_residual": True, "value_mix": "constant", "value_lambda1": 2.0},
    "lambda_5": {"value_residual": True, "value_mix": "constant", "value_lambda1": 5.0},
}
