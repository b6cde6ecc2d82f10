"""
An overlay: what the value residual is not, in the paper's ablations at 0.13B tokens. Its weight λ1 of V_1 (λ2 = 1; 2 is
"constant"), the layers that mix, its source, residuals on other things, and what layers may share.

    python train.py config/82M.py config/ablations.py --data=slimpajama --seeds=1337

Cost on an H200: 29 runs of 2 minutes and half a minute to start (cross_layer 4, attention_residual 5): 1.3 hours.
A smaller batch_size needs as many more eval_iters, as attention_residual's here, so that all see the same validation text.
"""
out_dir = "out/ablations"
tokens_per_iter = 32 * 2048  # small steps: 500 of 262,144 tokens leave the loss to the schedule (results/README.md)
max_iters = 2000
eval_interval = 1000
warmup_iters = 120
eval_iters = 40  # of batch_size windows: our validation bins whole
runs = {
    "vanilla": {},
    "identity": {"value_residual": True},
    # the residual on something else
    "query_residual": {"query_residual": True},
    "key_residual": {"key_residual": True},
    "hidden_residual": {"hidden_residual": True},
    "attention_residual": {"attention_residual": True, "batch_size": 8, "eval_iters": 160},  # holds whole attention maps
    # other sources, and other ways than a layer's own attention
    "source_previous": {"value_residual": True, "value_source": "previous"},
    "source_all": {"value_residual": True, "value_source": "all"},
    "identity_mapping": {"identity_mapping": True},
    "cross_layer": {"cross_layer": True},
    # λ1 V_1 + V_n in all layers
    "lambda_0.5": {"value_residual": True, "value_mix": "constant", "value_lambda1": 0.5},
    "lambda_1": {"value_residual": True, "value_mix": "constant", "value_lambda1": 1.0},
    "constant": {"value_residual": True, "value_mix": "constant"},
    "lambda_3": {"value_residual": True, "value_mix": "constant", "value_lambda1": 3.0},
    "lambda_5": {"value_residual": True, "value_mix": "constant", "value_lambda1": 5.0},
    # V_n alone, as large as the sums of λ1 = 1 and 5 can be: a control that the paper lacks
    "values_x2": {"value_residual": True, "value_mix": "constant", "value_lambda1": 0.0, "value_lambda2": 2.0},
    "values_x6": {"value_residual": True, "value_mix": "constant", "value_lambda1": 0.0, "value_lambda2": 6.0},
    # 5 V_1 + V_n in some layers; lambda_5 is 2-8
    "layers_2-4": {"value_residual": True, "value_mix": "constant", "value_layers": "2-4", "value_lambda1": 5.0},
    "layers_4-5": {"value_residual": True, "value_mix": "constant", "value_layers": "4-5", "value_lambda1": 5.0},
    "layers_5-8": {"value_residual": True, "value_mix": "constant", "value_layers": "5-8", "value_lambda1": 5.0},
    "sparse": {"value_residual": True, "value_mix": "constant", "value_layers": "6-8", "value_lambda1": 5.0},
    "layers_7-8": {"value_residual": True, "value_mix": "constant", "value_layers": "7-8", "value_lambda1": 5.0},
    # sharing between pairs of layers, and of layer 1's by all
    "share_k_every_2": {"share_k_every": 2},
    "share_v_every_2": {"share_v_every": 2},
    "cla2": {"cla": 2},
    "shared_query": {"shared_query": True},
    "shared_key": {"shared_key": True},
    "svformer": {"shared_value": True},
    "svformer_anchors": {"shared_value": True, "value_anchors": "1,5"},
}
