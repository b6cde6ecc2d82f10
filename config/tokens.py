"""
An overlay: how the differences to vanilla change with the number of tokens. Each budget is a list of its own, with its own
schedule, fully decayed; 1,000 iterations are config/family.py's.

    for n in 500 2000 3300; do
        python train.py config/82M.py config/tokens.py --data=slimpajama --seeds=1337 --max_iters=$n --out_dir=out/tokens/$n
    done
"""
out_dir = "out/tokens"
tokens_per_iter = 128 * 2048
max_iters = 500
eval_interval = 500
warmup_iters = 120
batch_size = 64  # 24 GB; with eval_iters = 20 our validation bins are evaluated whole
runs = {
    "vanilla": {},
    "identity": {"value_residual": True},
    "sparse": {"value_residual": True, "value_mix": "constant", "value_layers": "6-8", "value_lambda1": 5.0},
    "svformer": {"shared_value": True},
}
