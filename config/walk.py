"""
An overlay on the quickstart for docs/walk.md: its three systems and learned weights, then the runs of the exercises.

    python train.py config/quickstart.py config/walk.py --runs=vanilla,resformer,svformer,learnable

Runs that the quickstart has finished are left alone. The exercises add --out_dir=out/exercises and name their own --runs.
"""
runs = {
    "vanilla": {},
    "resformer": {"value_residual": True},
    "svformer": {"shared_value": True},
    "learnable": {"value_residual": True, "value_mix": "learnable"},
    # the exercises
    "query": {"query_residual": True},
    "key": {"key_residual": True},
    "constant": {"value_residual": True, "value_mix": "constant"},
    "previous": {"value_residual": True, "value_source": "previous"},
    "anchors": {"shared_value": True, "value_anchors": "1,4"},
    "svformer_gqa": {"shared_value": True, "n_kv_head": 2},
}
