"""
An overlay: is the gain only a better learning rate, or only there over a weak baseline? Each system at several rates and with
query-key normalisation and GPT-2's smaller initial output projections, at 0.13B tokens; the best of one meets the best of the
other. Every rate is a list of its own, and ends at a tenth of its peak.

    for r in 3e-4,3e-5 6e-4,6e-5 1.2e-3,1.2e-4 2.4e-3,2.4e-4; do
        python train.py config/82M.py config/rates.py --data=slimpajama --seeds=1337 --learning_rate=${r%,*} --min_lr=${r#*,} \
            --out_dir=out/rates/${r%,*}
        python train.py config/82M.py config/rates.py --data=slimpajama --seeds=1337 --learning_rate=${r%,*} --min_lr=${r#*,} \
            --qk_norm=True --scaled_init=True --out_dir=out/rates/${r%,*}_strong
    done

Cost on an H200: 32 runs of 2 minutes and half a minute to start: 80 minutes.
"""
out_dir = "out/rates"
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
