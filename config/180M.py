"""
The paper's 180M model and its training (Table 4; 1,024 sequences of 2,048 tokens, 10,000 iterations, 20.97B tokens).

    torchrun --standalone --nproc_per_node=8 train.py config/180M.py --data=slimpajama --out_dir=out/180M
"""
n_layer = 12
n_head = 12
n_embd = 768
n_ffn = 2688
block_size = 2048

batch_size = 32  # windows per process and micro-step: lower it if memory runs out, the batch stays the same
tokens_per_iter = 1024 * 2048
max_iters = 10000
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 120
