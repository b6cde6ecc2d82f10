"""
v5 (ACL 2025), the table of value residuals: V'_n = λ_{n,1} V_1 + λ_{n,2} V_n with fixed or learned weights, and Dense, which
weighs every V_i; 82M. Sparse is v5_sparse.py.

    torchrun --standalone --nproc_per_node=8 train.py config/paper/v5_value_family.py --data=slimpajama
    python train.py config/paper/v5_value_family.py config/small.py --data=slimpajama

Paper, validation loss, all second-hand: vanilla 2.739, Identity 2.712, Constant (λ = 2) 2.700, Learnable 2.705,
Learnable-Plus 2.681; none is known for Dense.
Our reading: Learnable-Plus is N softmax(λ')_n with a shared, learned scale that starts at N = 8. How λ' starts is not known
and the sources contradict each other: plus_zeros starts uniform, plus_depth gives deeper layers more. Dense starts as
vanilla. Mixing weights have no weight decay and the other weights' learning rate. Warmup is Table 4's 120; summaries of v5
speak of 1,200. The steps between these systems are 0.005 to 0.02, and the difference of two single runs varies by 0.003 to
0.006 (standard deviation): add --seeds=1337,1338,1339 to rank them.
Cost: 7 runs x 20.97B tokens = 5.7e19 FLOPs, 44 H100-hours at 36 % MFU; small: 3.6e17 FLOPs, 0.3 hours. vanilla is fig7.py's:
mkdir -p out/v5_value_family && cp -r out/fig7/vanilla out/v5_value_family saves that run.
"""
out_dir = "out/v5_value_family"

# the 82M model and its training, as in config/82M.py
n_layer = 8
n_head = 8
n_embd = 512
n_ffn = 1792
block_size = 2048

batch_size = 32  # windows per process and micro-step: lower it if memory runs out, the batch stays the same
tokens_per_iter = 1024 * 2048
max_iters = 10000
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 120

runs = {
    "vanilla": {},
    "identity": {"value_residual": True},
    "constant": {"value_residual": True, "value_mix": "constant"},
    "learnable": {"value_residual": True, "value_mix": "learnable"},
    "plus_zeros": {"value_residual": True, "value_mix": "plus"},
    "plus_depth": {"value_residual": True, "value_mix": "plus", "plus_init": "depth"},
    "dense": {"value_residual": True, "value_mix": "dense"},
}
