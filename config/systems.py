"""
Every system of the repository at one size, each a small difference from vanilla: for README's table, and to copy from.

    python train.py config/82M.py config/systems.py config/small.py --data=slimpajama --runs=vanilla,learnable
    python -m analysis.bench config/82M.py config/systems.py            # their step time and memory on one GPU
"""
out_dir = "out/systems"
runs = {
    "vanilla": {},
    # ResFormer's family
    "identity": {"value_residual": True},
    "constant": {"value_residual": True, "value_mix": "constant"},
    "learnable": {"value_residual": True, "value_mix": "learnable"},
    "plus": {"value_residual": True, "value_mix": "plus"},
    "plus_depth": {"value_residual": True, "value_mix": "plus", "plus_init": "depth"},
    "dense": {"value_residual": True, "value_mix": "dense"},
    "sparse": {"value_residual": True, "value_mix": "constant", "value_layers": "6-8", "value_lambda1": 5.0},
    "source_previous": {"value_residual": True, "value_source": "previous"},
    "source_all": {"value_residual": True, "value_source": "all"},
    "source_2": {"value_residual": True, "value_source": "2"},
    "source_2_no_first_skip": {"value_residual": True, "value_source": "2", "no_first_skip": True},
    # SVFormer's family
    "svformer": {"shared_value": True},
    "svformer_anchors": {"shared_value": True, "value_anchors": "1,5"},
    "svformer_gqa2": {"shared_value": True, "n_kv_head": 4},
    "svformer_gqa4": {"shared_value": True, "n_kv_head": 2},
    "svformer_cla2": {"shared_value": True, "share_k_every": 2},
    # what the paper compares with
    "gqa2": {"n_kv_head": 4},
    "gqa8": {"n_kv_head": 1},
    "cla2": {"cla": 2},
    "cla2_gqa4": {"cla": 2, "n_kv_head": 2},
    "neutreno": {"neutreno": 0.4},
    "neutreno_resformer": {"neutreno": 0.2, "value_residual": True},
    "denseformer": {"denseformer": True},
    # ablations
    "query_residual": {"query_residual": True},
    "key_residual": {"key_residual": True},
    "hidden_residual": {"hidden_residual": True},
    "attention_residual": {"attention_residual": True, "batch_size": 8, "eval_iters": 80},  # holds whole attention maps
    "shared_query": {"shared_query": True},
    "shared_key": {"shared_key": True},
    "share_k_every_2": {"share_k_every": 2},
    "share_v_every_2": {"share_v_every": 2},
    "identity_mapping": {"identity_mapping": True},
    "cross_layer": {"cross_layer": True},
}
