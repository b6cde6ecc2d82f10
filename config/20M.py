"""
A model below the paper's 82M for config/sizes.py, not one of its Table 4: 82M's depth at 3/8 of its width, 64 per head and
n_ffn 3.5 x n_embd as there, in the same training. 23.6M parameters with gpt2's vocabulary, 4.3M without embeddings and head.

    torchrun --standalone --nproc_per_node=8 train.py config/20M.py --data=slimpajama --out_dir=out/20M
"""
n_layer = 8
n_head = 3
n_embd = 192
n_ffn = 672
block_size = 2048

batch_size = 32  # windows per process and micro-step: lower it if memory runs out, the batch stays the same
tokens_per_iter = 1024 * 2048
max_iters = 10000
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 120
