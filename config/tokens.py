"""
An overlay: how the differences to vanilla change with the number of tokens, 0.13B to 0.86B. Each budget is a list of its own,
with its own schedule, fully decayed; 2,000 iterations are runs of config/ablations.py.

    for n in 2000 4000 8000 13100; do
        python train.py config/82M.py config/tokens.py --data=slimpajama --seeds=1337 --max_iters=$n --out_dir=out/tokens/$n
    done
"""
out_dir = "out/tokens"
tokens_per_iter = 32 * 2048  # small steps: 500 of 262,144 tokens leave the loss to the schedule (results/README.md)
max_iters = 2000
eval_interval = 1000
warmup_iters = 120
eval_iters = 40  # of batch_size windows: our validation bins whole
runs = {
    "vanilla": {},
    "identity": {"value_residual": True},
    "sparse": {"value_residual": True, "value_mix": "constant", "value_layers": "6-8", "value_lambda1": 5.0},
    "svformer": {"shared_value": True},
}
