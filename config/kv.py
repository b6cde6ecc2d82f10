"""
An overlay: loss against KV cache, of systems near 1/2 (svformer 9/16; gqa2, cla2), between (svformer_cla2 5/16) and near 1/8
(svformer_gqa4 9/64; gqa8, cla2_gqa4), at 0.13B tokens and any length. Every length is a list of its own.

    for n in 2048 8192; do
        python train.py config/82M.py config/kv.py --data=slimpajama --seeds=1337 --block_size=$n --batch_size=$((65536 / n)) \
            --out_dir=out/kv/$n
    done

Cost on an H200: 8 runs of 2 minutes at 2,048 (at 8,192 of 3: 1.4 times the FLOPs) and half a minute to start: 0.8 hours.
"""
out_dir = "out/kv"
tokens_per_iter = 32 * 2048  # small steps: 500 of 262,144 tokens leave the loss to the schedule (results/README.md)
max_iters = 2000
eval_interval = 1000
warmup_iters = 120
eval_iters = 40  # of batch_size windows: our validation bins whole
runs = {
    "vanilla": {},
    "svformer": {"shared_value": True},
    "gqa2": {"n_kv_head": 4},
    "cla2": {"cla": 2},
    "svformer_cla2": {"shared_value": True, "share_k_every": 2},
    "svformer_gqa4": {"shared_value": True, "n_kv_head": 2},
    "gqa8": {"n_kv_head": 1},
    "cla2_gqa4": {"cla": 2, "n_kv_head": 2},
}
