"""
Fast paths of training and decoding on CUDA. Each has an equal plain path in model.py, to which tests hold it; nothing here
changes what is computed, only how often memory is read. (--fast=True also keeps the residual stream in bfloat16: train.build
does that.)
"""
import math

import torch
from torch import Tensor

import model

try:
    import triton
    import triton.language as tl
except ImportError:  # builds of torch without CUDA come without it
    triton = None

BLOCK, WARPS = 8192, 32  # logits at a time and warps of one row's program
ROWS = 8192  # positions whose logits exist at a time: 0.8 GB in bfloat16 with gpt2's vocabulary
SHARE, PROGRAMS = 128, 256  # decoding: a cache is split into parts of at least SHARE columns, up to so many programs in all

if triton:
    @triton.jit
    def loss_kernel(logits, stride, targets, losses, scale, V, GRADS: tl.constexpr, BLOCK: tl.constexpr,
                    LOG2E: tl.constexpr = 1.4426950408889634):
        """
        One row of logits per program: its cross-entropy, and with GRADS scale * (softmax - one-hot) in the logits' place.
        The row is read twice, the second time from the cache, and written once.
        """
        row = tl.program_id(0).to(tl.int64)
        target = tl.load(targets + row)
        logits += row * stride
        at_target = tl.load(logits + tl.maximum(target, 0)).to(tl.float32)  # before the sums, which wait for all threads
        lanes = tl.arange(0, BLOCK)
        if target < 0:  # ignored
            tl.store(losses + row, 0.0)
            if GRADS:
                for start in range(0, V, BLOCK):
                    tl.store(logits + start + lanes, 0.0, mask=start + lanes < V)
            return
        # a running maximum and sum for every 8 neighbours, which one thread loads at once; joined only at the end
        eight = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
        high = tl.full((BLOCK // 8,), -1e30, tl.float32)
        total = tl.zeros((BLOCK // 8,), tl.float32)
        for start in range(0, V, BLOCK):
            x = tl.load(logits + start + eight, mask=start + eight < V, other=-1e30).to(tl.float32)
            higher = tl.maximum(high, tl.max(x, 1))
            total = total * tl.exp2((high - higher) * LOG2E) + tl.sum(tl.exp2((x - higher[:, None]) * LOG2E), 1)
            high = higher
        top = tl.max(high, 0)
        rest = tl.log2(tl.sum(total * tl.exp2((high - top) * LOG2E), 0))  # apart from top, which may be large
        tl.store(losses + row, top - at_target + rest / LOG2E)
        if GRADS:
            factor = tl.load(scale)
            for start in range(0, V, BLOCK):
                at = start + lanes
                x = tl.load(logits + at, mask=at < V, other=0.0).to(tl.float32)
                softmax = tl.exp2((x - top) * LOG2E - rest)
                tl.store(logits + at, (softmax - tl.where(at == target, 1.0, 0.0)) * factor, mask=at < V)

    @triton.jit
    def turn_kernel(source, sb, sh, st, to, tb, th, tt, cos, sin, T, HEADS, SIGN: tl.constexpr, HALF: tl.constexpr,
                    PADDED: tl.constexpr, PADDED_HALF: tl.constexpr, TOKENS: tl.constexpr):
        """
        RoPE from source to `to`, both (B, HEADS, T, 2 HALF) with those strides: by SIGN times the angle, or 0: a copy.
        TOKENS tokens of one sequence per program; PADDED, PADDED_HALF: HEADS and HALF or the next powers of two.
        """
        t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
        h = tl.arange(0, PADDED)[None, :, None]
        j = tl.arange(0, PADDED_HALF)[None, None, :]
        inside = (t < T) & (h < HEADS) & (j < HALF)
        source += tl.program_id(1).to(tl.int64) * sb + t * st + h * sh + j
        to += tl.program_id(1).to(tl.int64) * tb + t * tt + h * th + j
        a = tl.load(source, mask=inside)
        b = tl.load(source + HALF, mask=inside)
        if SIGN != 0:
            c = tl.load(cos + t * HALF + j, mask=(t < T) & (j < HALF))
            s = tl.load(sin + t * HALF + j, mask=(t < T) & (j < HALF)) * SIGN
            a32, b32 = a.to(tl.float32), b.to(tl.float32)
            a, b = (a32 * c - b32 * s).to(a.dtype), (b32 * c + a32 * s).to(b.dtype)
        tl.store(to, a, mask=inside)
        tl.store(to + HALF, b, mask=inside)

    @triton.jit
    def swiglu_grad_kernel(y, grad, to, F, BLOCK: tl.constexpr):
        """A row per program: the gradient `to` (N, 2 F) of y (N, 2 F) from grad (N, F), that of silu(y[:, :F]) * y[:, F:]."""
        row = tl.program_id(0).to(tl.int64)
        y, to, grad = y + row * 2 * F, to + row * 2 * F, grad + row * F
        for start in range(0, F, BLOCK):
            j = start + tl.arange(0, BLOCK)
            gate = tl.load(y + j, mask=j < F).to(tl.float32)
            up = tl.load(y + F + j, mask=j < F).to(tl.float32)
            g = tl.load(grad + j, mask=j < F).to(tl.float32)
            s = 1 / (1 + tl.exp(-gate))
            tl.store(to + j, g * up * s * (1 + gate * (1 - s)), mask=j < F)
            tl.store(to + F + j, g * gate * s, mask=j < F)

    @triton.jit
    def attend_kernel(q, qb, qh, k, kb, kh, v, vb, vh, keys, values, mask, mb, at, out, weight, size, scale, HEADS, GROUP,
                      HD: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr, KEEP_K: tl.constexpr, KEEP_V: tl.constexpr):
        """
        One query's attention to a part of the cached tokens before column `at`, and in part 0 to the new one's k and v, which
        KEEP_K and KEEP_V also write there. A program per (head, part, sequence); out: its mean of values, weight: the
        logarithm of its sum of exponentials. GROUP query heads share a key head; TOKENS columns at a time.
        """
        head, part, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
        parts, own, d = tl.num_programs(1), head // GROUP, tl.arange(0, PADDED)
        new, inside = tl.load(at).to(tl.int32), d < HD
        query = tl.load(q + b * qb + head * qh + d, mask=inside, other=0).to(tl.float32) * scale
        k_new = tl.load(k + b * kb + own * kh + d, mask=inside, other=0)
        v_new = tl.load(v + b * vb + own * vh + d, mask=inside, other=0)
        row = (b * (HEADS // GROUP) + own) * size * HD
        if part == 0 and head % GROUP == 0:
            if KEEP_K:
                tl.store(keys + row + new.to(tl.int64) * HD + d, k_new, mask=inside)
            if KEEP_V:
                tl.store(values + row + new.to(tl.int64) * HD + d, v_new, mask=inside)
        share = tl.cdiv(new, parts)
        end = tl.minimum(part * share + share, new)
        # part 0 begins with the new token, which no program reads from the cache, since another may be writing it
        high = tl.where(part == 0, tl.sum(query * k_new.to(tl.float32), 0), -1e30)
        total = tl.where(part == 0, 1.0, 0.0)
        mean = v_new.to(tl.float32) * total
        for start in range(part * share, end, TOKENS):
            j = start + tl.arange(0, TOKENS)
            seen = tl.load(mask + b * mb + j, mask=j < end, other=0) != 0
            tile = row + j.to(tl.int64)[:, None] * HD + d[None, :]
            held = seen[:, None] & inside[None, :]
            ks = tl.load(keys + tile, mask=held, other=0).to(tl.float32)
            vs = tl.load(values + tile, mask=held, other=0).to(tl.float32)
            scores = tl.where(seen, tl.sum(ks * query[None, :], 1), -1e30)
            higher = tl.maximum(high, tl.max(scores, 0))
            w = tl.where(seen, tl.exp(scores - higher), 0.0)
            shrink = tl.exp(high - higher)
            total = total * shrink + tl.sum(w, 0)
            mean = mean * shrink + tl.sum(w[:, None] * vs, 0)
            high = higher
        to = (b * HEADS + head) * parts + part
        tl.store(out + to * HD + d, mean / tl.maximum(total, 1e-30), mask=inside)
        tl.store(weight + to, high + tl.log(tl.maximum(total, 1e-30)))


def turn(source, to, cos, sin, sign):
    """RoPE of source into `to`, both (B, heads, T, hd), by sign times the angle (0: a copy)."""
    B, heads, T, hd = source.shape
    if source.stride(3) != 1:
        source = source.contiguous()
    turn_kernel[(triton.cdiv(T, 4), B)](
        source, *source.stride()[:3], to, *to.stride()[:3], cos, sin, T, heads, SIGN=sign, HALF=hd // 2,
        PADDED=triton.next_power_of_2(heads), PADDED_HALF=triton.next_power_of_2(hd // 2), TOKENS=4)


@torch.library.custom_op("nanoresformer::turned", mutates_args=())
def turned_op(y: Tensor, cos: Tensor, sin: Tensor, widths: list[int], hd: int) -> list[Tensor]:
    """The parts of y (B, T, W) with these widths, from its left, each (B, width / hd, T, hd) and turned by RoPE."""
    out = []
    for part in y[..., :sum(widths)].split(widths, dim=-1):
        part = part.unflatten(-1, (-1, hd)).transpose(1, 2)
        out.append(empty_turned(part))
        turn(part, out[-1], cos, sin, 1)
    return out


@torch.library.custom_op("nanoresformer::unturned", mutates_args=())
def unturned_op(grads: list[Tensor], cos: Tensor, sin: Tensor, turned: int) -> Tensor:
    """The gradient (B, T, W) of y from those of all its parts, the first `turned` of which were turned."""
    B, _, T, hd = grads[0].shape
    dy = grads[0].new_empty(B, T, sum(g.size(1) for g in grads) * hd)
    for i, (grad, part) in enumerate(zip(grads, dy.split([g.size(1) * hd for g in grads], dim=-1))):
        turn(grad, part.unflatten(-1, (-1, hd)).transpose(1, 2), cos, sin, -1 if i < turned else 0)
    return dy


def empty_turned(part):
    """Like part (B, heads, T, hd), in memory (B, T, heads, hd)."""
    return torch.empty_like(part.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


@turned_op.register_fake
def _(y, cos, sin, widths, hd):
    return [empty_turned(y.new_empty(y.size(0), w // hd, y.size(1), hd)) for w in widths]


@unturned_op.register_fake
def _(grads, cos, sin, turned):
    B, _, T, hd = grads[0].shape
    return grads[0].new_empty(B, T, sum(g.size(1) for g in grads) * hd)


class SplitHeads(torch.autograd.Function):
    """model.split_heads: one pass forward, and one that writes the gradient of all parts at once."""

    @staticmethod
    def forward(ctx, y, cos, sin, widths, hd):
        ctx.save_for_backward(cos, sin)
        ctx.turned = len(widths)
        rest = y[..., sum(widths):].unflatten(-1, (-1, hd)).transpose(1, 2)
        return (*turned_op(y, cos, sin, widths, hd), *([rest] if rest.size(1) else []))

    @staticmethod
    def backward(ctx, *grads):
        return unturned_op(list(grads), *ctx.saved_tensors, ctx.turned), None, None, None, None


def split_heads(y, widths, head_dim, rope):
    """model.split_heads, where all rows of the batch have the same positions."""
    turned = [w for t, w in widths.items() if t != "v"]  # v comes last
    return dict(zip(widths, SplitHeads.apply(y, *rope, turned, head_dim)))


def swiglu_grad(y, grad, to):
    """Into `to` (N, 2 F): the gradient of y (N, 2 F) from that of model.swiglu(y), grad (N, F); all contiguous."""
    width = grad.size(1)
    swiglu_grad_kernel[(len(y),)](y, grad, to, width, BLOCK=min(2048, triton.next_power_of_2(width)), num_warps=8)


@torch.library.custom_op("nanoresformer::unswiglu", mutates_args=())
def unswiglu_op(y: Tensor, grad: Tensor) -> Tensor:
    """
    The gradient (..., 2 F) of y (..., 2 F) from grad (..., F). The compiler's own kernel evaluates both halves everywhere and
    takes twice as long as reading and writing does.
    """
    y, to = y.contiguous(), torch.empty_like(y, memory_format=torch.contiguous_format)
    swiglu_grad(y.flatten(0, -2), grad.contiguous().flatten(0, -2), to.flatten(0, -2))
    return to


@unswiglu_op.register_fake
def _(y, grad):
    return torch.empty_like(y, memory_format=torch.contiguous_format)


class SwiGLU(torch.autograd.Function):
    """model.swiglu, with its gradient in one kernel."""

    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        return model.swiglu(y)

    @staticmethod
    def backward(ctx, grad):
        return unswiglu_op(ctx.saved_tensors[0], grad)


def swiglu(y):
    """model.swiglu, with its gradient in one kernel. A function: torch 2.11 compiles no module that holds an apply."""
    return SwiGLU.apply(y)


def loss_and_grads(logits, targets, losses, scale, grads):
    """losses (N,) of logits (N, V), and with grads the logits' gradients times scale (0-d) in their place."""
    loss_kernel[(logits.size(0),)](logits, logits.stride(0), targets, losses, scale, logits.size(1), grads, BLOCK=BLOCK,
                                   num_warps=WARPS)


def add_product(total, a, b):
    """total += a @ b, with a float32 total of factors of any type."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


@torch.library.custom_op("nanoresformer::head_loss", mutates_args=())
def head_loss_op(x: Tensor, weight: Tensor, targets: Tensor, grads: bool) -> tuple[Tensor, Tensor, Tensor]:
    """
    Mean cross-entropy of x @ weight.T (x (N, C), weight (V, C), targets (N,)) and, with grads, its gradients to x and weight,
    made in the same pass, ROWS positions at a time: the logits are never whole in memory.
    """
    losses = torch.empty(x.size(0), device=x.device)
    scale = 1 / (targets >= 0).sum()
    dx = torch.empty_like(x) if grads else x.new_empty(0)
    dw = torch.zeros(weight.shape, device=x.device) if grads else losses.new_empty(0)  # float32: a sum over the parts
    for start in range(0, x.size(0), ROWS):
        part = slice(start, start + ROWS)
        logits = x[part] @ weight.T
        loss_and_grads(logits, targets[part], losses[part], scale, grads)
        if grads:
            torch.mm(logits, weight, out=dx[part])
            add_product(dw, logits.T, x[part])
    return losses.sum() * scale, dx, dw


@head_loss_op.register_fake
def _(x, weight, targets, grads):
    float32 = dict(dtype=torch.float32)
    return (x.new_empty((), **float32), torch.empty_like(x) if grads else x.new_empty(0),
            torch.empty_like(weight, **float32) if grads else x.new_empty(0, **float32))


def keep_grads(ctx, inputs, output):
    ctx.save_for_backward(output[1], output[2])
    ctx.dtype = inputs[1].dtype
    ctx.set_materialize_grads(False)


def scale_grads(ctx, g, *_):
    dx, dw = ctx.saved_tensors
    return (dx * g).to(dx.dtype), (dw * g).to(ctx.dtype), None, None


head_loss_op.register_autograd(scale_grads, setup_context=keep_grads)


def head_loss(x, weight, targets):
    """
    model.head_loss, for CUDA in float32 or under bfloat16 autocast. Any negative target is ignored; that none reaches V is for
    the caller to see to (prepare.Bin.read does).
    """
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        x, weight = x.to(dtype), weight.to(dtype)
    grads = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return head_loss_op(x.flatten(0, 1), weight, targets.reshape(-1), grads)[0]


def attend_part(q, k, v, keys, values, mask, at, out, weight, keep):
    """
    attend_kernel on q (B, H, 1, hd), k, v (B, KV, 1, hd), a cache's keys and values (B, KV, S, hd), mask (1 or B, S), at (1,),
    into out (B, H, parts, hd) and weight (B, H, parts); keep: of "kv", what to write to the cache. The cache is contiguous, and
    so is a row of the mask.
    """
    B, H, parts, hd = out.shape
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    attend_kernel[(H, parts, B)](
        q, *q.stride()[:2], k, *k.stride()[:2], v, *v.stride()[:2], keys, values, mask, mask.stride(0) if len(mask) > 1 else 0,
        at, out, weight, keys.size(2), 1 / math.sqrt(hd), H, H // keys.size(1), HD=hd, PADDED=triton.next_power_of_2(hd),
        TOKENS=128, KEEP_K="k" in keep, KEEP_V="v" in keep, num_warps=4)


def empty_parts(q, keys):
    """attend_part's out and weight: more parts than one where the cache is long and the heads are few."""
    B, H, _, hd = q.shape
    parts = min(-(-keys.size(2) // SHARE), max(1, PROGRAMS // (B * H)))
    return q.new_empty(B, H, parts, hd), q.new_empty(B, H, parts, dtype=torch.float32)


@torch.library.custom_op("nanoresformer::attend", mutates_args=("keys", "values"))
def attend_op(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, mask: Tensor, at: Tensor,
              keep: str) -> tuple[Tensor, Tensor]:
    out, weight = empty_parts(q, keys)
    attend_part(q, k, v, keys, values, mask, at, out, weight, keep)
    return out, weight


attend_op.register_fake(lambda q, k, v, keys, *_: empty_parts(q, keys))


def attend_new(q, k, v, cache, layer, mask):
    """
    KVCache.update and Attention.attend for one new token, in one pass over the tokens so far: (B, H, 1, hd) of q (B, H, 1, hd),
    k, v (B, KV, 1, hd) and mask (1, S) or (B, 1, 1, S) over the columns of a cache whose `at` is set.
    """
    keys, values = (cache.buffers[t, cache.slots[t, layer]] for t in "kv")
    keep = "".join(t for t in "kv" if cache.slots[t, layer] == layer)
    mask = mask.reshape(-1, mask.size(-1))
    out, weight = attend_op(q, k.to(keys.dtype), v.to(values.dtype), keys, values, mask, cache.at, keep)
    return out if out.size(2) == 1 else (out * weight.softmax(-1)[..., None]).sum(2, keepdim=True).to(out.dtype)


def use_for_decoding(model):
    """Let CompiledStep attend by attend_new, in layers that need no attention map and no second layer's keys."""
    for block in model.transformer.h:
        if not (block.attn.cross or model.config.attention_residual):
            block.attn.attend_new = attend_new
