"""
An overlay that makes a config fit one GPU in minutes: 131M tokens instead of 21B. Runs of 32,000 tokens and more keep their
own batch (262,144 is no multiple of theirs) and take an hour or more each.

    python train.py config/82M.py config/small.py --data=slimpajama --out_dir=out/small
"""
tokens_per_iter = 128 * 2048
max_iters = 500
eval_interval = 250
warmup_iters = 120
