"""
kernels.py against the plain paths of model.py. The Triton kernels run on CUDA, or in Triton's interpreter where the package is
there; without it, plain stand-ins for them test what is around: parts, scaling, gradients, strides, one graph.
"""
import contextlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import kernels
import model
import train
from configurator import REPO, configure

SYSTEMS = configure(train.Config, [os.path.join(REPO, "config", "systems.py")]).runs
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def plain_loss(logits, targets, losses, scale, grads):
    losses.copy_(F.cross_entropy(logits.float(), targets, reduction="none", ignore_index=-100))
    if grads:
        one_hot = F.one_hot(targets.clamp(min=0), logits.size(1))
        logits.copy_((logits.float().softmax(-1) - one_hot) * (targets >= 0)[:, None] * scale)


def plain_turn(source, to, cos, sin, sign):
    to.copy_(model.rotate(source, (cos, sin * sign)) if sign else source)


def plain_swiglu_grad(y, grad, to):
    gate, up = y.chunk(2, dim=-1)
    to[:, :gate.size(1)] = torch.ops.aten.silu_backward(grad * up, gate)
    to[:, gate.size(1):] = grad * F.silu(gate)


def plain_attend_part(q, k, v, keys, values, mask, at, out, weight, keep):
    B, H, parts, hd = out.shape
    n, groups, mask = int(at), H // keys.size(1), mask.expand(B, -1)
    seen_k, seen_v = (torch.cat((x[:, :, :n], new), 2).to(q.dtype).repeat_interleave(groups, 1)
                      for x, new in ((keys, k), (values, v)))
    for t, cached, new in (("k", keys, k), ("v", values, v)):
        if t in keep:
            cached[:, :, n] = new[:, :, 0]
    scores = (q @ seen_k.transpose(2, 3) / hd ** 0.5)[:, :, 0].float()
    scores[..., :n].masked_fill_(~mask[:, None, :n], -torch.inf)
    share = -(-n // parts)
    for part in range(parts):
        which = [*range(part * share, min(n, part * share + share)), *([n] if part == 0 else [])]
        weight[:, :, part] = scores[..., which].logsumexp(-1)
        out[:, :, part] = (scores[..., which].softmax(-1).nan_to_num()[:, :, None] @ seen_v[:, :, which].float())[:, :, 0]


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    if not (CUDA or os.environ.get("TRITON_INTERPRET")):
        monkeypatch.setattr(kernels, "loss_and_grads", plain_loss)
        monkeypatch.setattr(kernels, "turn", plain_turn)
        monkeypatch.setattr(kernels, "swiglu_grad", plain_swiglu_grad)
        monkeypatch.setattr(kernels, "attend_part", plain_attend_part)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def loss_and_gradients(f, x, weight, targets):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = f(x, weight, targets)
    (loss * 3).backward()
    return loss.detach(), x.grad, weight.grad


def near(got, want, tolerance):
    for a, b in zip(got, want):
        assert a.shape == b.shape and (a.double() - b.double()).norm() <= tolerance * b.double().norm()


@pytest.mark.parametrize("rows", [4, 5, 14, 100])
@pytest.mark.parametrize("vocab", [7, 301])
@pytest.mark.parametrize("block", [64, kernels.BLOCK])
def test_loss_equals_cross_entropy(monkeypatch, rows, vocab, block):
    """Any number of parts and blocks, last ones that are not full, ignored targets, and a loss that is scaled afterwards."""
    monkeypatch.setattr(kernels, "ROWS", rows)
    monkeypatch.setattr(kernels, "BLOCK", block)
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 7, 8, generator=g).to(DEVICE), torch.randn(vocab, 8, generator=g).to(DEVICE)
    targets = torch.randint(vocab, (2, 7), generator=g).to(DEVICE)
    targets[0, :3] = -100
    near(loss_and_gradients(kernels.head_loss, x, weight, targets),
         loss_and_gradients(model.head_loss, x, weight, targets), 1e-6)
    with torch.no_grad():
        near([kernels.head_loss(x, weight, targets)], [model.head_loss(x, weight, targets)], 1e-6)


@pytest.mark.parametrize("large, shift", [(3, 0), (30, 0), (3, -2)])
@pytest.mark.parametrize("block", [16, kernels.BLOCK])
def test_large_logits_neither_overflow_nor_lose_the_target(monkeypatch, large, shift, block):
    """One logit of 1200 among zeros, or of -1200 among -2400, in any block."""
    monkeypatch.setattr(kernels, "BLOCK", block)
    args = torch.full((1, 2, 4), 300.0, device=DEVICE), torch.zeros(40, 4, device=DEVICE), torch.tensor([[3, 5]], device=DEVICE)
    args[1][large] = 1.0
    args[1].add_(shift)
    near(loss_and_gradients(kernels.head_loss, *args), loss_and_gradients(model.head_loss, *args), 1e-6)


@pytest.mark.parametrize("heads", [{"q": 4, "k": 4, "v": 4}, {"q": 4, "k": 2, "v": 2}, {"q": 3, "k": 3}, {"v": 2}, {"q": 4}])
@pytest.mark.parametrize("head_dim", [16, 6, 20])
@pytest.mark.parametrize("compiled", [False, True])
def test_split_heads_equals_the_plain_one(heads, head_dim, compiled):
    g, widths = torch.Generator().manual_seed(0), {t: n * head_dim for t, n in heads.items()}
    y = torch.randn(2, 7, sum(widths.values()), generator=g).to(DEVICE)
    angle = torch.rand(7, head_dim // 2, generator=g).to(DEVICE) * 6
    found = []
    for f in (model.split_heads, kernels.split_heads):
        f = torch.compile(f, fullgraph=True, backend="aot_eager") if compiled else f
        one = y.clone().requires_grad_()
        parts = f(one, widths, head_dim, (angle.cos(), angle.sin()))
        assert list(parts) == list(widths)
        # gradients in another memory layout than the parts', as an attention's backward may give them
        sum((p.contiguous() * (i + 1) * torch.linspace(0, 1, p.numel(), device=DEVICE).view(p.shape)).sum()
            for i, p in enumerate(parts.values())).backward()
        found.append([*parts.values(), one.grad])
    near(found[1], found[0], 1e-6)
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_kernel_rounds_once(dtype):
    """Computed in float32 and rounded at the end; sources without unit stride are read right."""
    g = torch.Generator().manual_seed(0)
    source = (torch.randn(2, 16, 7, 3, generator=g) * 4).to(dtype).to(DEVICE).transpose(1, 3)  # (B, heads, T, hd), hd strided
    angle = torch.rand(7, 8, generator=g).to(DEVICE) * 6
    to = torch.empty(2, 3, 7, 16, dtype=dtype, device=DEVICE)
    kernels.turn(source, to, angle.cos(), angle.sin(), 1)
    near([to], [model.rotate(source, (angle.cos(), angle.sin()))], 1e-6 if dtype == torch.float32 else 6e-3)
    logits, targets = (torch.randn(3, 301, generator=g) * 4).to(dtype).to(DEVICE), torch.tensor([5, -100, 300], device=DEVICE)
    found, losses, want = logits.clone(), torch.empty(3, device=DEVICE), logits.double().requires_grad_()
    kernels.loss_and_grads(found, targets, losses, torch.tensor(0.25, device=DEVICE), True)
    each = F.cross_entropy(want, targets, reduction="none")
    (each.sum() * 0.25).backward()
    near([losses, found], [each.detach(), want.grad], 1e-6 if dtype == torch.float32 else 5e-3)
    y, grad = ((torch.randn(3, n, generator=g) * 4).to(dtype).to(DEVICE) for n in (2 * 300, 300))
    found, want = torch.empty_like(y), y.double().requires_grad_()
    kernels.swiglu_grad(y, grad, found)
    model.swiglu(want).backward(grad.double())
    near([found], [want.grad], 1e-6 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("offset", [-3000.0, 0.0, 3000.0])
@pytest.mark.parametrize("block", [64, kernels.BLOCK])
def test_a_common_offset_of_logits_costs_no_digits(monkeypatch, offset, block):
    monkeypatch.setattr(kernels, "BLOCK", block)
    logits = (torch.randn(5, 301, generator=torch.Generator().manual_seed(0)) * 3 + offset).to(DEVICE)
    targets, losses = torch.tensor([0, 5, 63, 64, 300], device=DEVICE), torch.empty(5, device=DEVICE)
    want = logits.double().requires_grad_()
    each = F.cross_entropy(want, targets, reduction="none")
    each.sum().backward()
    kernels.loss_and_grads(logits, targets, losses, torch.ones((), device=DEVICE), True)
    near([losses, logits], [each.detach(), want.grad], 1e-6)


@pytest.mark.skipif(not (CUDA or os.environ.get("TRITON_INTERPRET")), reason="of the kernels themselves")
def test_offsets_beyond_31_bits():
    """Rows that begin more than 2^31 elements behind the first; of the memory only the rows' own pages are used on a CPU."""
    far = torch.empty((1 << 31) + 64, dtype=torch.bfloat16, device=DEVICE)
    logits, targets = far.as_strided((3, 7), (1 << 30, 1)), torch.tensor([1, 2, 6], device=DEVICE)
    logits.copy_(torch.arange(21).view(3, 7))
    losses, want = torch.empty(3, device=DEVICE), F.cross_entropy(logits.float(), targets, reduction="none")
    kernels.loss_and_grads(logits, targets, losses, torch.ones((), device=DEVICE), False)
    near([losses], [want], 1e-6)
    for tokens, batch in ((3, 1), (1, 3)):
        source = far.as_strided((batch, 1, tokens, 4), (1 << 30, 4, 1 << 30, 1))
        source.copy_(torch.arange(12).view(batch, 1, tokens, 4))
        to, angle = torch.zeros(source.shape, dtype=far.dtype, device=DEVICE), torch.zeros(tokens, 2, device=DEVICE)
        kernels.turn(source, to, angle.cos(), angle.sin(), 0)
        assert torch.equal(to, source.contiguous())
    cache = far.view(torch.int8)[:3 << 30].view(3, 1, 1 << 28, 4)
    cache[:, 0, :3] = torch.arange(36).view(3, 3, 4)
    new, want = torch.ones(3, 1, 1, 4, dtype=torch.int8, device=DEVICE), cache[:, :, :4].clone()
    want[:, :, 3] = 1
    seen = torch.ones(1, 4, dtype=torch.bool, device=DEVICE)
    out, weight = torch.empty(3, 1, 1, 4, device=DEVICE), torch.empty(3, 1, 1, device=DEVICE)
    kernels.attend_part(new.float() / 9, new, new, cache, cache, seen, torch.tensor([3], device=DEVICE), out, weight, "k")
    assert torch.equal(cache[:, :, :4], want)
    near([out], [F.scaled_dot_product_attention(new.float() / 9, want.float(), want.float())], 1e-6)


@pytest.mark.parametrize("fast, dtype, used, stream", [
    (True, "bfloat16", True, torch.bfloat16), (True, "float32", True, None), (True, "float16", False, None),
    (False, "bfloat16", False, None)])
def test_which_runs_take_the_fast_paths(monkeypatch, fast, dtype, used, stream):
    monkeypatch.setattr(train.GPT, "to", lambda self, device: self)
    monkeypatch.setattr(kernels, "triton", kernels.triton or sys)
    shape = model.GPTConfig(vocab_size=8, n_layer=2, n_head=2, n_embd=8)
    m = train.build(train.Config(device="cuda", dtype=dtype, fast=fast), shape)
    seams = [m.head_loss is kernels.head_loss, *(b.attn.split_heads is kernels.split_heads for b in m.transformer.h),
             *(b.mlp.swiglu == kernels.swiglu for b in m.transformer.h)]
    assert seams == [used] * 5 and m.stream_dtype == stream


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_bfloat16_stream_costs_hardly_any_precision(system):
    """Loss and gradients under autocast beside float32's, and how far off those with a float32 stream are: on a CPU as well."""
    options = {k: v for k, v in SYSTEMS[system].items() if k not in ("batch_size", "eval_iters")}
    if "n_kv_head" in options:
        options["n_kv_head"] = max(1, options["n_kv_head"] // 2)
    m = model.GPT(model.GPTConfig(vocab_size=64, n_layer=8, n_head=4, n_embd=64, block_size=32, **options))
    ids = torch.randint(64, (4, 33), generator=torch.Generator().manual_seed(0))
    results = []
    for autocast, stream in ((False, None), (True, None), (True, torch.bfloat16)):
        m.stream_dtype = stream
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = m(ids[:, :-1], ids[:, 1:])[1]
        loss.backward()
        results.append((loss.item(), torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None])))
        m.zero_grad()
    (loss, exact), *others = results
    plain, fast = (((grads - exact).norm() / exact.norm()).item() for _, grads in others)
    assert 0 < plain != fast < 2 * plain < 0.1 and abs(others[1][0] - loss) < 2e-3 * loss


@pytest.mark.parametrize("device, fast, asked", [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)])
def test_fast_runs_ask_for_cudnns_attention_first(monkeypatch, device, fast, asked):
    orders = []
    monkeypatch.setattr(train, "sdpa_kernel", lambda order, set_priority: orders.append((order, set_priority)) or
                        contextlib.nullcontext())
    with train.precision(train.Config(device=device, dtype="float32", fast=fast)):
        pass
    assert [order[0].name for order, _ in orders] == ["CUDNN_ATTENTION"] * asked and all(priority for _, priority in orders)


@pytest.mark.skipif(not CUDA, reason="cuDNN's attention runs on CUDA")
@pytest.mark.parametrize("length", [5, 64, 200])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_fast_runs_attend_with_cudnn_within_bfloat16s_rounding(length, kv_heads):
    """Outputs are cuDNN's bit for bit; they and the gradients miss float64's by at most twice what the plain attention does."""
    g = torch.Generator().manual_seed(0)
    exact = [torch.randn(2, h, length, 64, generator=g).to(DEVICE, torch.bfloat16).double() for h in (4, kv_heads, kv_heads, 4)]
    config = model.GPTConfig(vocab_size=8, n_layer=1, n_head=4, n_kv_head=kv_heads, n_embd=256)
    attention = model.GPT(config).transformer.h[0].attn

    def results(context, dtype=torch.bfloat16):
        q, k, v, grad = (x.to(dtype).requires_grad_() for x in exact)
        with context:
            out = attention.attend(q, k, v, None)[0]
        return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)

    want = results(sdpa_kernel(SDPBackend.MATH), torch.float64)
    fast = results(train.precision(train.Config(device="cuda", dtype="bfloat16")))
    assert torch.equal(fast[0], results(sdpa_kernel(SDPBackend.CUDNN_ATTENTION))[0])
    for got, plain, of in zip(fast, results(train.precision(train.Config(device="cuda", dtype="bfloat16", fast=False))), want):
        near([got], [of], 2 * (plain.double() - of).norm() / of.norm())


@pytest.mark.parametrize("options", [{}, {"value_residual": True, "value_mix": "plus"}, {"shared_value": True}], ids=str)
def test_cast_matrices_change_no_logit(options):
    m = model.GPT(model.GPTConfig(vocab_size=64, n_layer=3, n_head=2, n_embd=32, block_size=16, **options)).eval()
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = m(ids)[0]
        assert torch.equal(m.cast_matrices(torch.bfloat16)(ids)[0], before)
    assert m.lm_head.weight.dtype == m.transformer.h[0].attn.c_attn.weight.dtype == torch.bfloat16
    assert {m.transformer.wte.weight.dtype, m.transformer.ln_f.weight.dtype} == {torch.float32}


@pytest.mark.parametrize("width", [4, 56, 2100])
@pytest.mark.parametrize("compiled", [False, True])
def test_swiglu_equals_the_plain_one(width, compiled):
    """Widths that are no power of two, one wider than a block; a gradient and an input that are not contiguous."""
    g, found = torch.Generator().manual_seed(0), []
    y, grad = (torch.randn(width * n, 3, 2, generator=g).to(DEVICE) * 4 for n in (2, 1))
    for f in (model.swiglu, kernels.swiglu):
        f = torch.compile(f, fullgraph=True, backend="aot_eager") if compiled else f
        one = y.clone().permute(2, 1, 0).requires_grad_()
        out = f(one)
        out.backward(grad.permute(2, 1, 0))
        found.append([out.detach(), one.grad])
    near(found[1], found[0], 1e-6)
    torch._dynamo.reset()


@pytest.mark.parametrize("options", [
    {}, {"value_residual": True}, {"shared_value": True, "n_kv_head": 2}, {"cross_layer": True}, {"cla": 2},
    {"query_residual": True, "key_residual": True, "neutreno": 0.4}], ids=str)
def test_a_model_with_fast_paths_has_equal_loss_and_gradients(monkeypatch, options):
    monkeypatch.setattr(kernels, "ROWS", 10)
    config = model.GPTConfig(vocab_size=61, n_layer=3, n_head=4, n_embd=32, block_size=16, **options)
    ids, found = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(0)).to(DEVICE), []
    for fast in (False, True):
        m = model.GPT(config).to(DEVICE)
        if fast:
            train.use_kernels(m)
        loss = m(ids[:, :-1], ids[:, 1:])[1]
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in m.parameters())])
    near(found[1], found[0], 1e-5)
    if "TRITON_INTERPRET" not in os.environ:  # where the kernels are the same compiled, and compiling takes ten times as long
        compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
        near([compiled(ids[:, :-1], ids[:, 1:])[1].detach()], found[0][:1], 1e-6)
        torch._dynamo.reset()


@pytest.mark.skipif(not CUDA, reason="needs CUDA")
def test_bfloat16_is_as_exact_as_the_plain_path(monkeypatch):
    """On a shape of real size: both differ from float64 by bfloat16's rounding, and by about as much."""
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 3000, 128, generator=g).cuda(), torch.randn(50304, 128, generator=g).cuda() * 0.3
    targets = torch.randint(50304, (4, 3000), generator=g).cuda()
    want = loss_and_gradients(model.head_loss, x.double(), weight.double(), targets)
    with torch.autocast("cuda", torch.bfloat16):
        for f in (model.head_loss, kernels.head_loss):
            near(loss_and_gradients(f, x, weight, targets), want, 8e-3)
        monkeypatch.setattr(kernels, "ROWS", 2000)  # six parts, the logits of one at a time: 0.2 of 1.2 GB
        near(loss_and_gradients(kernels.head_loss, x, weight, targets), want, 8e-3)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss_and_gradients(kernels.head_loss, x, weight, targets)
        assert torch.cuda.max_memory_allocated() - before < 6e8


@pytest.mark.parametrize("heads, kv_heads, hd, size, at, share", [
    (4, 4, 8, 40, 39, 512), (4, 2, 6, 300, 0, 512), (6, 1, 16, 150, 140, 32), (1, 1, 64, 300, 290, 99),
    (4, 2, 6, 300, 287, 64), (2, 1, 8, 300, 287, 512)])
@pytest.mark.parametrize("keep, padded, dtype", [
    ("", True, torch.bfloat16), ("k", True, torch.float32), ("v", False, torch.bfloat16), ("kv", False, torch.float32)])
def test_one_new_token_attends_as_plainly(monkeypatch, keep, heads, kv_heads, hd, size, at, share, padded, dtype):
    """
    Shared keys, heads of no power of two, several parts, some empty or masked as a whole; what is kept and what not. A cache of
    bfloat16 beside a query of float32.
    """
    monkeypatch.setattr(kernels, "SHARE", share)
    monkeypatch.setattr(kernels, "PROGRAMS", 48)
    g, i = torch.Generator().manual_seed(at), torch.arange(size, device=DEVICE)
    q, k, v = (torch.randn(3, 1, n, hd, generator=g).to(DEVICE).transpose(1, 2) for n in (heads, kv_heads, kv_heads))
    k = k.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)  # of a stride that has to be mended
    shape = model.GPTConfig(n_layer=2, n_head=heads, n_kv_head=kv_heads, n_embd=heads * hd)
    cache = model.KVCache(shape, 3, size, DEVICE, dtype)
    cache.slots = {(t, 2): 2 if t in keep else 1 for t in "kv"}
    keys, values = (cache.buffers[t, cache.slots[t, 2]] for t in "kv")
    for x in (keys, values):
        x.copy_(torch.randn(x.shape, generator=g))
    before, cache.at = {t: x.clone() for t, x in cache.buffers.items()}, torch.tensor([at], device=DEVICE)
    mask = (i <= at)[None]
    if padded:
        pad = torch.tensor([0, at // 2, at], device=DEVICE)
        mask = ((i >= pad[:, None]) & mask)[:, None, None]
    rows = mask.reshape(-1, size)
    parts = kernels.empty_parts(q, keys)[0].size(2)
    assert parts == min(-(-size // share), max(1, 48 // (3 * heads)))
    got = kernels.attend_new(q, k, v, cache, 2, mask)
    full = [torch.cat((before[t, cache.slots[t, 2]][:, :, :at], new.to(dtype)), 2) for t, new in (("k", k), ("v", v))]
    want = F.scaled_dot_product_attention(q.double(), *(x.double() for x in full), rows[:, None, None, :at + 1],
                                          enable_gqa=True)
    assert got.dtype == q.dtype
    near([got], [want], 1e-5)
    for (t, n), was in before.items():
        if (t, n) == (t, 2) and t in keep:
            was[:, :, at] = (k if t == "k" else v)[:, :, 0]
        assert torch.equal(cache.buffers[t, n], was)


def test_the_decoding_operator_says_what_it_changes():
    q, new, mask, at = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 1, 8), torch.ones(1, 9) > 0, torch.tensor([5])
    args = [x.to(DEVICE) for x in (q, new, -new, torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8), mask, at)]
    torch.library.opcheck(kernels.attend_op, (*args, "kv"), test_utils=("test_schema", "test_faketensor"))


def test_many_prompts_are_one_part_each():
    q, keys = torch.empty(64, 8, 1, 64, device="meta"), torch.empty(64, 8, 4096, 64, device="meta")
    assert kernels.empty_parts(q, keys)[0].shape == (64, 8, 1, 64)
    assert kernels.empty_parts(q[:1], keys[:1])[0].shape == (1, 8, 32, 64)


@pytest.mark.parametrize("options", [
    {}, {"value_residual": True, "value_mix": "learnable"}, {"shared_value": True, "n_kv_head": 2}, {"cla": 2},
    {"cross_layer": True}, {"attention_residual": True}, {"shared_key": True, "neutreno": 0.4}, {"identity_mapping": True},
    {"query_residual": True, "key_residual": True, "qk_norm": True}, {"shared_value": True, "value_anchors": "1,3"}], ids=str)
def test_decoding_by_the_kernel_gives_the_plain_tokens(monkeypatch, options):
    """Every kind of sharing and mixing; prompts of unequal length, and past a full context. Compiled only on CUDA."""
    if not CUDA:
        monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    m = model.GPT(model.GPTConfig(vocab_size=256, n_layer=3, n_head=4, n_embd=64, block_size=16, **options)).to(DEVICE).eval()
    with torch.no_grad():
        for p in m.parameters():
            p.mul_(4 if p.dim() == 2 else 1)
    ids = torch.randint(256, (3, 9), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    plain, alike = m.generate(ids, 10, temperature=0, lengths=[1, 4, 9]), m.generate(ids, 5, temperature=0)
    calls = []
    monkeypatch.setattr(kernels, "SHARE", 4)
    monkeypatch.setattr(kernels, "attend_part", lambda *args, do=kernels.attend_part: calls.append(args[-1]) or do(*args))
    kernels.use_for_decoding(m)
    assert torch.equal(m.generate(ids, 10, temperature=0, lengths=[1, 4, 9], compile=True), plain)
    assert torch.equal(m.generate(ids, 5, temperature=0, compile=True), alike)
    assert bool(calls) == ("attention_residual" not in options)


def test_compiled_decoding_writes_into_the_cache_itself(monkeypatch):
    """The compiler may copy what an operator changes; the caches of a model that decodes must not be."""
    m = model.GPT(model.GPTConfig(vocab_size=16, n_layer=3, n_head=2, n_embd=16, block_size=16, shared_value=True))
    m.to(DEVICE).eval()
    seen, do = [], kernels.attend_part
    monkeypatch.setattr(kernels, "attend_part", lambda *args: seen.append([x.data_ptr() for x in args[3:5]]) or do(*args))
    kernels.use_for_decoding(m)
    caches, make = [], m.kv_cache
    monkeypatch.setattr(m, "kv_cache", lambda *args: caches.append(make(*args)) or caches[-1])
    m.generate(torch.zeros(1, 2, dtype=torch.int64, device=DEVICE), 4, temperature=0, compile=True)
    buffers = {name: b.data_ptr() for name, b in caches[0].buffers.items()}
    layers = [[buffers["k", n], buffers["v", 1]] for n in (1, 2, 3)]
    assert seen and seen == layers * (len(seen) // 3)
    torch._dynamo.reset()


@pytest.mark.skipif(not CUDA, reason="needs CUDA")
@pytest.mark.parametrize("options", [
    {}, {"value_residual": True, "value_mix": "learnable"}, {"shared_value": True, "n_kv_head": 2}], ids=str)
def test_compiled_decoding_gives_the_uncompiled_tokens(options):
    """CUDA graph or not, in float32: prompts of unequal length, past a full context, greedy and sampled."""
    m = model.GPT(model.GPTConfig(vocab_size=256, n_layer=4, n_head=4, n_embd=64, block_size=32, **options)).cuda()
    with torch.no_grad():
        for p in m.parameters():
            p.mul_(4 if p.dim() == 2 else 1)
    g, lengths = torch.Generator().manual_seed(0), [1, 4, 9]
    ids = torch.randint(256, (3, 9), generator=g).cuda()
    m.eval()
    for how in (dict(temperature=0), dict(temperature=1.0, top_k=20, top_p=0.9, seed=3)):
        plain, compiled = (m.generate(ids, 60, lengths=lengths, compile=c, **how) for c in (False, True))
        assert torch.equal(plain, compiled)
    assert torch.equal(m.generate(ids[:1], 60, temperature=0), m.generate(ids[:1], 60, temperature=0, compile=True))


@pytest.mark.skipif(CUDA or "TRITON_INTERPRET" in os.environ or not importlib.util.find_spec("triton") or
                    importlib.metadata.version("triton") < "3.7",  # whose interpreter numpy 2.4 stops
                    reason="needs the package triton (its interpreter), and is for machines without CUDA")
def test_kernels_in_the_interpreter():
    slow = "not by_the_kernel and not stream and not cache_itself"  # and say nothing about how a kernel computes
    done = subprocess.run([sys.executable, "-m", "pytest", "-n0", "-q", "-k", slow, __file__], capture_output=True, text=True,
                          env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stdout
