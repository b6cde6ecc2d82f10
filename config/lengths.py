"""
An overlay: differences to vanilla at several lengths, with as many tokens per iteration at each (as in the paper's Table 3),
0.13B in all; and when vanilla overtakes SVFormer. Every length is a list of its own.

    for n in 512 2048 8192; do
        python train.py config/82M.py config/lengths.py --data=slimpajama --seeds=1337,1338 --block_size=$n \
            --batch_size=$((65536 / n)) --out_dir=out/lengths/$n
    done

and with a lower learning rate, which the paper finds to help SVFormer, and another warmup, which it finds not to matter:

    python train.py config/82M.py config/lengths.py --data=slimpajama --seeds=1337 --runs=vanilla,svformer \
        --learning_rate=2e-4 --min_lr=2e-5 --out_dir=out/lengths/2048_2e-4
    python train.py config/82M.py config/lengths.py --data=slimpajama --seeds=1337 --runs=vanilla,svformer --warmup_iters=12 \
        --out_dir=out/lengths/2048_warmup12

Cost on an H200: 22 runs of 2 minutes (at 8,192 of 3: 1.4 times the FLOPs) and half a minute to start: an hour.
"""
out_dir = "out/lengths"
tokens_per_iter = 32 * 2048  # small steps: 500 of 262,144 tokens leave the loss to the schedule (results/README.md)
max_iters = 2000
eval_interval = 1000
warmup_iters = 120
eval_iters = 40  # of batch_size windows: our validation bins whole
runs = {
    "vanilla": {},
    "identity": {"value_residual": True},
    "svformer": {"shared_value": True},
}
