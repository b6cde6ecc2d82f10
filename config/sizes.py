"""
An overlay: loss against parameters at one budget, 0.13B tokens, for the parameters that a system saves. Sparse mixes in the
layers behind the first 5/8, the paper's 6-8 of 8; as they depend on the depth, every command picks the list that fits its size.

    for size in 20M 82M; do
        python train.py config/$size.py config/sizes.py --data=slimpajama --seeds=1337 --runs=vanilla,identity,sparse \
            --out_dir=out/sizes/$size
    done
    python train.py config/180M.py config/sizes.py --data=slimpajama --seeds=1337 --runs=vanilla,identity,sparse_12 \
        --out_dir=out/sizes/180M
    python train.py config/468M.py config/sizes.py --data=slimpajama --seeds=1337 --runs=vanilla,identity,sparse_24 \
        --batch_size=16 --eval_iters=80 --out_dir=out/sizes/468M

On several GPUs `torchrun --standalone --nproc_per_node=2 train.py`, and so on, trains the same batches: 468M on two H200s in 8
minutes.

Cost of one run on an H200: about 1, 2, 5 and 13 minutes by size, and half a minute to start; all 12 take 1.2 hours.
"""
out_dir = "out/sizes"
tokens_per_iter = 32 * 2048  # small steps: 500 of 262,144 tokens leave the loss to the schedule (results/README.md)
max_iters = 2000
eval_interval = 1000
warmup_iters = 120
batch_size = 32
eval_iters = 40  # of batch_size windows: our validation bins whole
runs = {
    "vanilla": {},
    "identity": {"value_residual": True},
    "sparse": {"value_residual": True, "value_mix": "constant", "value_layers": "6-8", "value_lambda1": 5.0},
    "sparse_12": {"value_residual": True, "value_mix": "constant", "value_layers": "8-12", "value_lambda1": 5.0},
    "sparse_24": {"value_residual": True, "value_mix": "constant", "value_layers": "16-24", "value_lambda1": 5.0},
}
