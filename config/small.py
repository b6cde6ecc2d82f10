"""
An overlay that makes a config fit one GPU in minutes: 131M tokens instead of 21B, in the same schedule.

    python train.py config/82M.py config/small.py --data=slimpajama --out_dir=out/small
"""
max_tokens_per_iter = 128 * 2048  # a limit, so that runs of other lengths keep whole windows of their own
max_iters = 500
eval_interval = 250
warmup_iters = 120
