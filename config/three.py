"""
An overlay: vanilla, ResFormer and SVFormer on the same batches, at whatever size and schedule the files before it set.

    python train.py config/82M.py config/small.py config/three.py --data=slimpajama
"""
out_dir = "out/three"
runs = {
    "vanilla": {},
    "resformer": {"value_residual": True},
    "svformer": {"shared_value": True},
}
