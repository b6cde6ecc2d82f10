"""
The runs of docs/walk.md: the quickstart's three and learned weights.

    python train.py config/quickstart.py config/walk.py
"""
out_dir = "out/walk"
sample_tokens = 0
runs = {
    "vanilla": {},
    "resformer": {"value_residual": True},
    "learnable": {"value_residual": True, "value_mix": "learnable", "value_lr_scale": 10.0},  # few iterations: larger steps
    "svformer": {"shared_value": True},
}
