"""
An overlay that makes any config fit one GPU in minutes: 131M tokens instead of 21B.

    python train.py config/82M.py config/small.py --data=slimpajama --out_dir=out/small
"""
tokens_per_iter = 128 * 2048
max_iters = 500
eval_interval = 250
warmup_iters = 120
