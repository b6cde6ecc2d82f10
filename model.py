"""
A Llama-like GPT with Value Residual Learning (Zhou et al., arXiv 2410.17897), all of it in this file.

Each layer n projects values V_n = H_{n-1} W_n^V. The paper's two systems change only where a layer's values come from:

    vanilla     U_n = A_n V_n                                (Eq 1)
    ResFormer   U_n = A_n (λ_{n,1} V_1 + λ_{n,2} V_n)        (Eq 7: ½, ½)     value_residual=True
    SVFormer    U_n = A_n V_1                                (Eq 10)          shared_value=True

Read Attention.forward first: it holds both. V_1 is layer 1's raw projection and stays in the graph, so W_1^V
learns from every layer. Everything else in the paper is a different `take` (whose projection a layer uses), a different
row of mixing weights λ, or a term added after attention. Layers are counted from 1, as in the paper.
Shapes: B batch, T tokens, C = n_embd, hd = head_dim, S keys attended to (T without a cache).
"""
import hashlib
import math
import pickle
import warnings
from dataclasses import dataclass, fields
from typing import Literal, get_args, get_origin

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CHECKPOINT_VERSION = 1


@dataclass
class GPTConfig:
    # shape; the defaults are the paper's 82M model (Table 4)
    block_size: int = 2048  # longest context, in tokens
    vocab_size: int = 50304  # rows of the embedding and of the head
    n_layer: int = 8  # blocks, each attention and SwiGLU
    n_head: int = 8  # query heads
    n_kv_head: int = 0  # key/value heads, fewer than n_head is GQA; 0: n_head
    n_embd: int = 512  # width of the residual stream
    n_ffn: int = 0  # hidden width of SwiGLU; 0: 3.5 x n_embd, as in the paper
    dropout: float = 0.0  # the paper uses none
    rope_theta: float = 10000.0  # base of the rotary position embedding
    # the method
    value_residual: bool = False  # ResFormer: mix earlier values into each later layer's (Eq 7)
    shared_value: bool = False  # SVFormer: later layers have no W^V and attend with V_1 (Eq 10)
    value_mix: Literal["identity", "constant", "learnable", "plus", "dense"] = "identity"  # where the weights come from
    value_lambda1: float | None = None  # weight of the source; None: identity, learnable 1/2; constant 2
    value_lambda2: float | None = None  # weight of the layer's own V; None: identity, learnable, plus 1/2; constant 1
    value_layers: str = ""  # layers that mix, as 6-8 or 6,7,8; empty: 2..n_layer
    value_source: str = "first"  # first | previous | all (their mean; identity: all of V_1..V_n alike, Eq 5) | a layer number
    value_anchors: str = "1"  # with shared_value: the layers that compute values, shared until the next (Fig 17)
    plus_init: Literal["zeros", "depth"] = "zeros"  # logits of value_mix=plus: uniform, or n / n_layer (unknown in paper)
    # systems the paper compares with
    neutreno: float = 0.0  # U_n += this x (V_1 - V'_n) after attention, n >= 2 (Eq 8); the paper uses 0.4
    denseformer: bool = False  # after each block, a learned weighted sum of all block outputs and the embedding
    share_k_every: int = 1  # groups of this many layers use the first one's keys
    share_v_every: int = 1  # groups of this many layers use the first one's values
    cla: int = 1  # cross-layer attention: sets both of the above (2 in the paper)
    # ablations
    query_residual: bool = False  # Q'_n = (Q_n + Q_1) / 2
    key_residual: bool = False  # K'_n = (K_n + K_1) / 2
    hidden_residual: bool = False  # the attention's input is averaged with layer 1's: q, k and v at once
    attention_residual: bool = False  # A'_n = (A_n + A_1) / 2 after the softmax; explicit attention, slow
    shared_query: bool = False  # all layers use Q_1
    shared_key: bool = False  # all layers use K_1
    identity_mapping: bool = False  # U_n = A_n V_n + mean of V_1..V_{n-1} (Eq 6)
    cross_layer: bool = False  # attend to layer n's and the source layer's keys and values (Eq 2)
    no_first_skip: bool = False  # block 1's attention output replaces its input instead of being added to it
    # stronger baselines
    qk_norm: bool = False  # RMSNorm, without weights, of every head's queries and keys
    scaled_init: bool = False  # output projections start at 0.02 / sqrt(2 n_layer) instead of 0.02, as GPT-2's

    @property
    def kv_heads(self):
        return self.n_kv_head or self.n_head

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def ffn(self):
        return self.n_ffn or int(3.5 * self.n_embd)

    def take(self, t, n):
        """The layer whose projection layer n uses as its t ('q', 'k' or 'v'): n, unless it is shared."""
        if t == "v" and self.shared_value:
            return max(a for a in self.layers("value_anchors") if a <= n)
        if (t == "q" and self.shared_query) or (t == "k" and self.shared_key):
            return 1
        every = {"q": 1, "k": max(self.cla, self.share_k_every), "v": max(self.cla, self.share_v_every)}[t]
        return n - (n - 1) % every

    def source_layer(self, n):
        """The layer that value_source names, as layer n sees it: n or later ones are no source for it."""
        return int({"first": 1, "previous": n - 1}.get(self.value_source, self.value_source))

    def sources(self, t, n):
        """The earlier layers whose t is mixed into layer n's own; empty: layer n does not mix."""
        if t == "v":
            if not self.value_residual or n not in self.layers("value_layers"):
                return []
            if self.value_mix == "dense" or self.value_source == "all":
                return list(range(1, n))
            return [self.source_layer(n)] if 0 < self.source_layer(n) < n else []
        return [1] if n > 1 and {"q": self.query_residual, "k": self.key_residual, "x": self.hidden_residual}[t] else []

    def slot(self, t, n):
        """The layer whose cache buffer holds layer n's t ('k' or 'v'). A mixed tensor is layer n's own."""
        return n if self.sources(t, n) else self.take(t, n)

    def layers(self, option):
        """value_layers or value_anchors as a list of layers. Raises ValueError when it can't be read."""
        text = getattr(self, option)
        if not text:
            return list(range(2, self.n_layer + 1))
        try:
            ends = [[int(n) for n in part.split("-")] for part in text.split(",")]
        except ValueError:
            ends = [[]]
        if not all(1 <= len(e) <= 2 and 1 <= e[0] <= e[-1] <= self.n_layer for e in ends):
            raise ValueError(f"{option}={text!r}: expected layers from 1 to {self.n_layer}, as 6-8 or 6,7,8")
        return sorted({n for e in ends for n in range(e[0], e[-1] + 1)})

    def check(self):
        """Raises ValueError with the reason when the options make no sense, alone or together."""
        shared_v, shared_k = max(self.cla, self.share_v_every) > 1, max(self.cla, self.share_k_every) > 1
        tunes = (self.value_mix != "identity" or self.value_layers or self.value_lambda1 is not None
                 or self.value_lambda2 is not None)
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "share_k_every", "share_v_every", "cla"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")
        named = self.layers("value_layers") if self.value_layers else []  # readable, or ValueError
        self.layers("value_anchors")
        across = [f.name for f in fields(self) if f.name in (
            "shared_value neutreno query_residual key_residual hidden_residual attention_residual shared_query shared_key "
            "identity_mapping cross_layer").split() and getattr(self, f.name)]
        one_layer = self.value_source in ("first", "previous") or (
            self.value_source.isdecimal() and 1 <= int(self.value_source) < max(self.n_layer, 2))
        for f in fields(self):
            if get_origin(f.type) is Literal and getattr(self, f.name) not in get_args(f.type):
                raise ValueError(f"{f.name}={getattr(self, f.name)!r}: expected one of {', '.join(get_args(f.type))}")
        if not one_layer and self.value_source != "all":
            raise ValueError(f"value_source={self.value_source!r}: expected first, previous, all or a layer before the last")
        if self.shared_value and 1 not in self.layers("value_anchors"):
            raise ValueError(f"value_anchors={self.value_anchors!r}: must hold layer 1, the first that needs values")
        for wrong, reason in [
            (self.n_embd % self.n_head, f"n_embd={self.n_embd} is no multiple of n_head={self.n_head}"),
            (self.n_head % self.kv_heads, f"n_head={self.n_head} is no multiple of n_kv_head={self.n_kv_head}"),
            (self.head_dim % 2, f"n_embd / n_head = {self.head_dim} is odd, and RoPE rotates pairs"),
            (not 0 <= self.dropout < 1, f"dropout={self.dropout}: expected at least 0 and below 1"),
            (self.n_kv_head < 0 or self.n_ffn < 0 or self.rope_theta <= 0, f"n_kv_head={self.n_kv_head}, n_ffn={self.n_ffn}, "
             f"rope_theta={self.rope_theta}: none may be negative, and rope_theta is above 0"),
            (self.value_residual and self.shared_value,
             "value_residual mixes V_1 into each layer's own values, and shared_value removes those: choose one"),
            (tunes and not self.value_residual,
             "value_mix, value_layers, value_lambda1 and value_lambda2 need value_residual=True"),
            (self.value_source != "first" and not (self.value_residual or self.cross_layer),
             "value_source needs value_residual=True or cross_layer=True"),
            (self.value_mix == "dense" and self.value_source != "first", "value_mix=dense uses all sources: leave "
             "value_source out"),
            (self.value_mix == "dense" and (self.value_lambda1 is not None or self.value_lambda2 is not None),
             "value_mix=dense starts at vanilla's weights: leave value_lambda1 and value_lambda2 out"),
            (self.value_mix == "plus" and self.value_lambda1 is not None,
             "value_mix=plus derives λ1 from a softmax over depth: leave value_lambda1 out"),
            (across and self.n_layer == 1, f"{', '.join(across)}: acts from layer 2 on, and n_layer=1"),
            (max(self.cla, self.share_k_every, self.share_v_every) > self.n_layer, f"cla={self.cla}, share_k_every="
             f"{self.share_k_every}, share_v_every={self.share_v_every}: groups of more than n_layer={self.n_layer} layers"),
            (self.value_residual and any(not self.sources("v", n) for n in named), f"value_layers={self.value_layers!r}: "
             f"with value_source={self.value_source}, layers {[n for n in named if not self.sources('v', n)]} have no earlier "
             "source to mix in: leave them out"),
            (self.value_residual and not any(self.sources("v", n) for n in range(1, self.n_layer + 1)),
             f"value_residual has no layer to mix in: n_layer={self.n_layer}, value_layers={self.value_layers!r}, "
             f"value_source={self.value_source}"),
            (self.value_anchors != "1" and not self.shared_value, "value_anchors needs shared_value=True"),
            (self.shared_value and self.share_v_every > 1, "shared_value already shares values: leave share_v_every out"),
            (self.cla > 1 and (self.share_k_every > 1 or self.share_v_every > 1), "cla sets share_k_every and "
             "share_v_every: give one or the other"),
            (self.value_residual and shared_v, "value_residual mixes a layer's own values, and cla / share_v_every "
             "removes every second layer's"),
            (self.shared_query and self.query_residual, "shared_query leaves no own queries for query_residual to mix"),
            (self.key_residual and (self.shared_key or shared_k), "key_residual mixes a layer's own keys, and "
             "shared_key / cla / share_k_every removes them"),
            (self.shared_key and shared_k, "shared_key already shares keys: leave cla and share_k_every out"),
            (any(all(self.take(t, n) != n for t in "qkv") for n in range(1, self.n_layer + 1)),
             "with queries, keys and values all shared, a layer's attention would read nothing of its own input"),
            (self.attention_residual and (self.shared_query and self.shared_key),
             "attention_residual mixes A_1 into A_n, which is A_1 already with shared_query and shared_key"),
            (self.plus_init != "zeros" and self.value_mix != "plus", "plus_init needs value_mix=plus"),
            (not 0 <= self.neutreno < math.inf, f"neutreno={self.neutreno}: expected at least 0"),
            (not all(math.isfinite(x or 0) for x in (self.value_lambda1, self.value_lambda2)),
             f"value_lambda1={self.value_lambda1}, value_lambda2={self.value_lambda2}: expected finite numbers"),
            (self.identity_mapping and (self.value_residual or self.shared_value or shared_v or self.neutreno),
             "identity_mapping (Eq 6) needs every layer's own, unmixed values and no other term beside attention"),
            (self.neutreno and all(self.take("v", n) == 1 for n in range(1, self.n_layer + 1)),
             "neutreno adds V_1 - V_n, which is zero when all layers take V_1"),
            (self.cross_layer and (self.value_residual or self.shared_value or self.shared_key or shared_k or shared_v
                                   or self.key_residual or self.attention_residual or self.value_source == "all"),
             "cross_layer (Eq 2) concatenates the unshared, unmixed keys and values of two layers with one softmax"),
        ]:
            if wrong:
                raise ValueError(reason)


def weighted(weights, tensors):
    """Σ_i weights[i] · tensors[i], in the weights' order: one line for every residual of the paper."""
    total = None
    for i, w in weights.items():
        term = w * tensors[i]
        total = term if total is None else total + term
    return total


def rotate(x, rope):
    """RoPE on (B, heads, T, hd), in float32; rope = cos, sin, each (T, hd/2) or (B, 1, T, hd/2)."""
    cos, sin = rope
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def split_heads(y, widths, head_dim, rope):
    """{t: (B, width / head_dim, T, head_dim)} of y (B, T, sum of widths), the queries and keys turned by RoPE."""
    heads = {t: part.unflatten(-1, (-1, head_dim)).transpose(1, 2)
             for t, part in zip(widths, y.split(list(widths.values()), dim=-1))}
    return {t: part if t == "v" else rotate(part, rope) for t, part in heads.items()}


class ValueMix(nn.Module):
    """The weights λ_{n,i} of V'_n = Σ_i λ_{n,i} V_i. They are vectors, so weight decay leaves them alone."""

    def __init__(self, config):
        super().__init__()
        self.config, self.kind = config, config.value_mix
        self.rows = [n for n in range(1, config.n_layer + 1) if config.sources("v", n)]
        if self.kind in ("learnable", "plus"):
            self.lambda2 = nn.Parameter(torch.empty(len(self.rows)))
        if self.kind == "learnable":
            self.lambda1 = nn.Parameter(torch.empty(len(self.rows)))
        if self.kind == "plus":
            self.scale, self.logits = nn.Parameter(torch.empty(())), nn.Parameter(torch.empty(len(self.rows)))
        if self.kind == "dense":
            self.triangle = nn.Parameter(torch.empty(sum(self.rows)))

    def init_weights(self):
        c = self.config
        for name, p in self.named_parameters():
            if name == "scale":
                p.fill_(c.n_layer)  # so that the λ1 of all layers sum to n_layer at the start
            elif name == "logits":
                p.copy_(torch.tensor([n / c.n_layer if c.plus_init == "depth" else 0.0 for n in self.rows]))
            elif name == "triangle":
                p.copy_(torch.tensor([float(i == n) for n in self.rows for i in range(1, n + 1)]))  # vanilla
            else:
                given = c.value_lambda1 if name == "lambda1" else c.value_lambda2
                p.fill_(0.5 if given is None else given)

    def forward(self):
        """{layer n: {layer i: λ_{n,i}}} with numbers or 0-d tensors; layers that do not mix are absent."""
        c, table, at = self.config, {}, 0
        share = self.scale * self.logits.softmax(0) if self.kind == "plus" else None
        for j, n in enumerate(self.rows):
            if self.kind == "dense":
                table[n] = {i: self.triangle[at + i - 1] for i in range(1, n + 1)}
                at += n
                continue
            sources = c.sources("v", n)
            if self.kind == "learnable":
                l1, l2 = self.lambda1[j], self.lambda2[j]
            elif self.kind == "plus":
                l1, l2 = share[j], self.lambda2[j]
            else:
                # Eq 5 is the plain mean of V_1..V_n, so with several sources identity weighs each of them equally
                default = (2.0, 1.0) if self.kind == "constant" else (len(sources) / (len(sources) + 1),
                                                                      1 / (len(sources) + 1))
                l1 = default[0] if c.value_lambda1 is None else c.value_lambda1
                l2 = default[1] if c.value_lambda2 is None else c.value_lambda2
            table[n] = {**{i: l1 / len(sources) for i in sources}, n: l2}
        return table


class Attention(nn.Module):
    """Causal self-attention of layer n: Q, K and V from its own or an earlier layer's projections."""

    def __init__(self, config, layer):
        super().__init__()
        self.config, self.layer, self.head_dim = config, layer, config.head_dim
        width = {"q": config.n_embd, "k": config.kv_heads * self.head_dim, "v": config.kv_heads * self.head_dim}
        self.take = {t: config.take(t, layer) for t in "qkv"}
        self.own = {t: width[t] for t in "qkv" if self.take[t] == layer}  # SVFormer: no v after layer 1
        self.mixed = {t: bool(config.sources(t, layer)) for t in "xqk"}
        self.c_attn = nn.Linear(config.n_embd, sum(self.own.values()), bias=False) if self.own else None
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        self.split_heads = split_heads  # train.py may set an equal, faster one (kernels.py)
        self.attend_new = None  # so may those who decode, for the cache's update and attention of one new token
        crosses = config.cross_layer and layer > 1 and config.source_layer(layer) < layer
        self.cross = config.source_layer(layer) if crosses else 0  # the other layer of Eq 2; 0: none
        self.probe = None  # analyses may set a function here, called with (layer, {name: tensor}) in each forward pass

    def forward(self, x, seen, mix, rope, cache=None, mask=None):
        """
        x (B, T, C); seen[t][m]: layer m's raw projection t, (B, heads, T, hd); mix: this layer's row of λ or None.
        Returns the output (B, T, C) and this layer's {t: raw projection} for later layers. Queries and keys are raw after
        RoPE: it turns all layers' alike, so they can be shared and averaged as well after it as before.
        """
        B, T, C = x.shape
        if self.mixed["x"]:
            x = (x + seen["x"][1]) / 2
        own = self.split_heads(self.c_attn(x), self.own, self.head_dim, rope) if self.own else {}
        if self.config.qk_norm:  # RoPE leaves norms alone, so it makes no difference that it came first
            own = {t: p if t == "v" else F.rms_norm(p, (self.head_dim,), eps=1e-5) for t, p in own.items()}
        raw = {t: own[t] if t in own else seen[t][self.take[t]] for t in "qkv"}  # SVFormer (Eq 10): v is V_1
        q, k, v = raw["q"], raw["k"], raw["v"]
        if mix:
            v = weighted(mix, {**seen["v"], self.layer: v})  # ResFormer (Eq 7): λ_{n,1} V_1 + λ_{n,2} V_n
        if self.mixed["q"]:
            q = (q + seen["q"][1]) / 2
        if self.mixed["k"]:
            k = (k + seen["k"][1]) / 2
        mixed = v
        fixed = cache is not None and cache.at is not None
        if fixed and self.attend_new:
            y, weights = self.attend_new(q, k, v, cache, self.layer, mask), None
        else:
            if cache is not None:
                k, v = cache.update(self.layer, k, v)  # (B, kv_heads, S, hd)
            if self.cross:  # Eq 2: one softmax over both layers' keys
                k2, v2 = cache.read(self.cross) if cache is not None else (seen["k"][self.cross], seen["v"][self.cross])
                mask = causal(T, k.size(2), x.device) if mask is None else mask
                k, v, mask = torch.cat((k, k2), 2), torch.cat((v, v2), 2), torch.cat((mask, mask), -1)
            # in a CompiledStep the compiler can split and fuse explicit attention over a single row's keys
            y, weights = self.attend(q, k, v, mask, seen["a"].get(1), explicit=fixed)
        if self.config.neutreno and self.layer > 1:  # Eq 8, with the mixed value when there is one
            y = y + self.config.neutreno * self.all_heads(seen["v"][1] - mixed)
        if self.config.identity_mapping and self.layer > 1:  # Eq 6
            y = y + self.all_heads(weighted({i: 1 / (self.layer - 1) for i in range(1, self.layer)}, seen["v"]))
        y = y.transpose(1, 2).reshape(B, T, C)
        if self.probe is not None:
            self.probe(self.layer, {"x": x, "q": q, "k": k, "v": v, "raw_v": raw["v"].transpose(1, 2).flatten(2), "y": y})
        return self.dropout(self.c_proj(y)), {**raw, "x": x, "a": weights}

    def attend(self, q, k, v, mask, first=None, explicit=False):
        """softmax(QKᵀ/√hd) V, causal unless mask says otherwise: (B, n_head, T, hd), and the weights if explicit."""
        gqa, p = k.size(1) != q.size(1), self.dropout.p if self.training else 0.0
        if not self.config.attention_residual and not explicit:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and q.size(2) > 1,
                                                  dropout_p=p, enable_gqa=gqa), None
        if gqa:
            k, v = self.all_heads(k), self.all_heads(v)
        mask = causal(q.size(2), k.size(2), q.device) if mask is None else mask
        own = (q @ k.transpose(2, 3) / math.sqrt(self.head_dim)).masked_fill(~mask, -math.inf).softmax(-1)
        weights = own if first is None else (own + first) / 2
        return F.dropout(weights, p).to(v.dtype) @ v, own

    def all_heads(self, v):
        """Values (B, kv_heads, T, hd) as every query head of its group sees them: (B, n_head, T, hd)."""
        return v.repeat_interleave(self.config.n_head // self.config.kv_heads, dim=1)


def swiglu(y):
    """silu(gate) * up of y (..., 2 F), the gate and up projections side by side: (..., F)."""
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up


class MLP(nn.Module):
    """SwiGLU: W_down (silu(W_gate x) * W_up x)."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 2 * config.ffn, bias=False)  # gate and up in one product
        self.c_proj = nn.Linear(config.ffn, config.n_embd, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        self.swiglu = swiglu  # train.py may set an equal, faster one (kernels.py)

    def forward(self, x):
        return self.dropout(self.c_proj(self.swiglu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = nn.RMSNorm(config.n_embd, eps=1e-5)
        self.attn = Attention(config, layer)
        self.ln_2 = nn.RMSNorm(config.n_embd, eps=1e-5)
        self.mlp = MLP(config)
        self.skip = not (config.no_first_skip and layer == 1)

    def forward(self, x, seen, mix, rope, cache, mask):
        a, raw = self.attn(self.ln_1(x), seen, mix, rope, cache, mask)
        x = x + a if self.skip else a.to(x.dtype)  # the stream keeps its dtype under autocast
        return x + self.mlp(self.ln_2(x)), raw


class KVCache:
    """
    Keys after RoPE and values after mixing, allocated once: one (B, kv_heads, length, hd) buffer for every layer that
    has its own. SVFormer owns one v and n_layer k buffers; ResFormer stores mixed values and needs no more than vanilla.
    """

    def __init__(self, config, batch_size, length, device=None, dtype=torch.float32):
        shape = (batch_size, config.kv_heads, length, config.head_dim)
        self.slots = {(t, n): config.slot(t, n) for t in "kv" for n in range(1, config.n_layer + 1)}
        self.buffers = {(t, n): torch.zeros(shape, device=device, dtype=dtype)
                        for (t, n), slot in self.slots.items() if slot == n}
        self.size = length  # tokens that fit
        self.length = 0  # tokens held; GPT.features advances it once all layers have written
        self.at = None  # a tensor (1,), the column to write next, where shapes must not change with the length (CompiledStep)

    @property
    def nbytes(self):
        """Allocated bytes."""
        return sum(b.nbytes for b in self.buffers.values())

    def update(self, layer, k, v):
        """Store the new tokens' k and v, unless an earlier layer did, and return those of all tokens so far."""
        self.end = self.length + k.size(2) if self.at is None else None
        for t, new in (("k", k), ("v", v)):
            if self.slots[t, layer] != layer:
                continue
            if self.at is None:
                self.buffers[t, layer][:, :, self.length:self.end] = new
            else:
                self.buffers[t, layer].index_copy_(2, self.at, new.to(self.buffers[t, layer].dtype))
        return self.read(layer)

    def read(self, layer):
        """k, v of a layer, with the tokens now being processed; with a fixed shape (at) also the columns not yet written."""
        return [self.buffers[t, self.slots[t, layer]][:, :, :self.end] for t in "kv"]


def causal(T, S, device):
    """(T, S) mask, true where query i, the (S - T + i)th token, may see key j."""
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)


class GPT(nn.Module):
    """
    GPT(config): weights are a function of (seed, parameter's name), so two systems start with equal shared parameters.
    Raises ValueError for options that make no sense (GPTConfig.check). Under torch.device("meta") nothing is allocated;
    then call to_empty(device=...) and init_weights(seed).
    """

    def __init__(self, config, seed=1337):
        super().__init__()
        config.check()
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            drop=nn.Dropout(config.dropout),
            h=nn.ModuleList(Block(config, n) for n in range(1, config.n_layer + 1)),
            ln_f=nn.RMSNorm(config.n_embd, eps=1e-5),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)  # untied, as in the paper
        self.value_mix = ValueMix(config) if config.value_residual else None
        # DenseFormer: block n (from 1) has n + 1 weights, for the embedding and the n block outputs
        self.alpha = nn.Parameter(torch.empty(config.n_layer * (config.n_layer + 3) // 2)) if config.denseformer else None
        self.activation_checkpointing = False  # train.py may set it: recompute blocks in the backward pass
        self.head_loss = head_loss  # train.py may set an equal, faster one (kernels.py)
        self.stream_dtype = None  # dtype of the residual stream; None: the embedding's
        L = config.n_layer
        reads = {n: {(t, m) for t in "qkv" for m in [config.take(t, n), *config.sources(t, n)]}
                 | {("x", m) for m in config.sources("x", n)}
                 | ({("v", 1)} if config.neutreno else set()) | ({("a", 1)} if config.attention_residual else set())
                 | ({("v", m) for m in range(1, n)} if config.identity_mapping else set())
                 | {(t, self.transformer.h[n - 1].attn.cross) for t in "kv"}
                 for n in range(1, L + 1)}
        self.keep = {n: [t for t in "xqkva" if any((t, n) in reads[m] for m in range(n + 1, L + 1))]
                     for n in range(1, L + 1)}  # what later layers read of layer n; the rest is freed
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(config.block_size, config.head_dim // 2), persistent=False)
        self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed=1337):
        """Matrices normal(0, 0.02), norms 1, mixing weights as their system says; RoPE's tables. No-op on meta."""
        if self.lm_head.weight.is_meta:
            return
        for name, p in self.named_parameters():
            if p.dim() == 2:
                parts = {name: p}
                if name.endswith("c_attn.weight"):  # each of q, k, v by its own name: SVFormer's q and k are vanilla's
                    own = self.get_submodule(name.removesuffix(".c_attn.weight")).own
                    parts = {f"{name}.{t}": part for t, part in zip(own, p.split(list(own.values())))}
                for key, part in parts.items():
                    digest = hashlib.sha256(f"{seed} {key}".encode()).digest()
                    g = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
                    small = self.config.scaled_init and name.endswith("c_proj.weight")
                    std = 0.02 / math.sqrt(2 * self.config.n_layer) if small else 0.02
                    part.copy_(torch.empty(part.shape, device="cpu").normal_(0.0, std, generator=g))
            elif "ln_" in name:
                p.fill_(1.0)
        if self.value_mix is not None:
            self.value_mix.init_weights()
        if self.alpha is not None:
            self.alpha.copy_(torch.tensor([float(i == n) for n in range(1, self.config.n_layer + 1)
                                           for i in range(n + 1)]))
        self.init_tables()

    @torch.no_grad()
    def init_tables(self):
        """RoPE's tables, which checkpoints do not hold."""
        half = torch.arange(0, self.config.head_dim, 2, device="cpu").float() / self.config.head_dim
        angle = torch.outer(torch.arange(self.config.block_size, device="cpu").float(), self.config.rope_theta ** -half)
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())

    def restore(self, state):
        """Load weights by name. Raises ValueError that names what is missing, unexpected or of another shape."""
        own = self.state_dict()
        wrong = sorted(set(own) ^ set(state)) or [n for n in own if own[n].shape != state[n].shape]
        if wrong:
            raise ValueError(f"the checkpoint's weights are not this model's: {', '.join(wrong[:3])}"
                             + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""))
        self.load_state_dict(state)

    def features(self, idx, cache=None, pad=None):
        """
        The normed hidden states (B, T, C) of token ids idx (B, T). With a cache, idx continues the tokens it holds.
        pad (B,): how many of the columns since the cache's first are left padding. Raises ValueError past block_size.
        """
        T, fixed = idx.size(1), cache is not None and cache.at is not None
        start = cache.length if cache is not None and not fixed else 0
        if start + T > self.config.block_size:
            raise ValueError(f"{start + T} tokens do not fit block_size={self.config.block_size}")
        mask, rope = None, (self.cos[start:start + T], self.sin[start:start + T])
        if start and T > 1 and pad is None:
            mask = causal(T, start + T, idx.device)
        if fixed:
            rope = self.cos[cache.at], self.sin[cache.at]
        if fixed or pad is not None:
            i = cache.at if fixed else torch.arange(start, start + T, device=idx.device)
            j = torch.arange(cache.size if fixed else start + T, device=idx.device)
            mask = i[:, None] >= j
        if pad is not None:
            at = (i - pad[:, None]).clamp(min=0)
            rope = self.cos[at][:, None], self.sin[at][:, None]  # (B, 1, T, hd/2)
            own = i[:, None] == j  # a padded query sees itself, since a softmax over nothing is not a number
            mask = (mask & ((j >= pad[:, None])[:, None] | own))[:, None]  # (B, 1, T, S)
        x = self.transformer.drop(self.transformer.wte(idx)).to(self.stream_dtype or self.transformer.wte.weight.dtype)
        table = self.value_mix() if self.value_mix is not None else {}
        seen, outputs, at = {t: {} for t in "xqkva"}, {0: x}, 0
        for n, block in enumerate(self.transformer.h, 1):
            args = (x, seen, table.get(n), rope, cache, mask)
            if self.activation_checkpointing and self.training:
                x, raw = checkpoint(block, *args, use_reentrant=False)
            else:
                x, raw = block(*args)
            for t in self.keep[n]:
                seen[t][n] = raw[t]
            if self.alpha is not None:
                outputs[n] = x
                x = weighted(dict(enumerate(self.alpha[at:at + n + 1])), outputs)
                at += n + 1
        if cache is not None and not fixed:
            cache.length += T
        return self.transformer.ln_f(x)

    def forward(self, idx, targets=None):
        """
        idx, targets (B, T) token ids. Without targets: logits (B, T, vocab_size) and None. With targets: None and the
        mean cross-entropy in nats over the targets that are not -100 (the logits are withheld to save their memory).
        """
        x = self.features(idx)
        if targets is None:
            return self.lm_head(x), None
        return None, self.head_loss(x, self.lm_head.weight, targets)

    def num_params(self, non_embedding=False):
        """All parameters, or those outside the token embedding and the head."""
        n = sum(p.numel() for p in self.parameters())
        return n - self.transformer.wte.weight.numel() - self.lm_head.weight.numel() if non_embedding else n

    def flops_per_token(self):
        """Training FLOPs: 6 x matmul weights (blocks and head) + 6 x n_layer x n_embd x block_size (causal attention)."""
        c, weights = self.config, sum(p.numel() for p in self.parameters() if p.dim() == 2)
        return 6 * (weights - self.transformer.wte.weight.numel()) + 6 * c.n_layer * c.n_embd * c.block_size

    def configure_optimizers(self, weight_decay, learning_rate, betas, value_lr_scale=1.0):
        """
        Fused AdamW. Matrices (embedding and head too) decay; norms and mixing weights do not. Each group carries
        lr_scale, by which the caller multiplies the schedule's rate: value_lr_scale for the values' mixing weights.
        """
        params = dict(self.named_parameters())
        mix = [p for n, p in params.items() if n.startswith("value_mix.")]
        groups = [
            dict(params=[p for p in params.values() if p.dim() >= 2], weight_decay=weight_decay, lr_scale=1.0),
            dict(params=[p for n, p in params.items() if p.dim() < 2 and not n.startswith("value_mix.")],
                 weight_decay=0.0, lr_scale=1.0),
            dict(params=mix, weight_decay=0.0, lr_scale=value_lr_scale),
        ]
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=learning_rate, betas=betas, eps=1e-8, fused=True)

    def cast_matrices(self, dtype):
        """For decoding: linear layers in the dtype that autocast would cast them to for every token. Returns the model."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.to(dtype)
        return self

    def kv_cache(self, batch_size, length):
        """An empty KVCache for this model, in autocast's dtype where it is on, else the weights'."""
        w = self.lm_head.weight
        dtype = torch.get_autocast_dtype(w.device.type) if torch.is_autocast_enabled(w.device.type) else w.dtype
        return KVCache(self.config, batch_size, length, w.device, dtype)

    def step(self, idx, cache, pad, n_vocab, noise, temperature, top_k, top_p):
        """The next token ids (B,) after idx (B, T), below n_vocab; the other arguments are those of features and sample."""
        logits = self.lm_head(self.features(idx, cache, pad)[:, -1])
        return sample(logits[:, :n_vocab].float(), noise, temperature, top_k, top_p)

    @torch.no_grad()
    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, lengths=None, n_vocab=None, seed=None,
               use_cache=True, compile=False):
        """
        Yields the next token ids (B,) one step at a time. idx (B, T): prompts; rows shorter than T are padded on the left
        and lengths (B,) says how long each is. temperature 0 is greedy; top_k None or 0 and top_p None or 1 are off; ids
        from n_vocab (the tokenizer's size) on are never sampled. Only the last block_size tokens of a prompt are seen
        (a warning says so); when a row's context is full, its last block_size // 2 tokens are processed anew. compile, where
        there is a cache: a CompiledStep makes the tokens, which takes a minute to build and then is many times faster on a GPU.
        Raises ValueError for bad arguments.
        """
        (B, T), c, device = idx.shape, self.config, idx.device
        for wrong, reason in [
            (T < 1, "the prompt is empty: give at least one token"),
            (temperature < 0, f"temperature={temperature}: expected 0 (greedy) or more"),
            (top_k is not None and top_k < 0, f"top_k={top_k}: expected 0 (off) or more"),
            (top_p is not None and not 0 < top_p <= 1, f"top_p={top_p}: expected more than 0 and at most 1"),
            (T and not 0 <= int(idx.min()) <= int(idx.max()) < c.vocab_size, f"a token id is outside 0..{c.vocab_size - 1}"),
        ]:
            if wrong:
                raise ValueError(reason)
        pad = None
        if lengths is not None:
            pad = T - torch.as_tensor(lengths, device=device)
            if pad.shape != (B,) or int(pad.min()) < 0 or int(pad.max()) >= T:
                raise ValueError(f"lengths: expected {B} numbers from 1 to {T}, found {lengths}")
        if T > c.block_size:
            warnings.warn(f"the prompt has {T} tokens; only the last block_size={c.block_size} are seen", stacklevel=2)
        generator = None if seed is None else torch.Generator(device).manual_seed(seed)
        out = torch.cat((idx, idx.new_zeros(B, max_new_tokens)), dim=1)
        # each row's first column of out that is in its context; its context is full when it holds block_size tokens
        starts = [max(p, T - c.block_size) for p in (pad.tolist() if pad is not None else [0] * B)]
        cache = self.kv_cache(B, min(c.block_size, T + max_new_tokens)) if use_cache else None
        n_vocab, step = min(n_vocab or c.vocab_size, c.vocab_size), CompiledStep(self) if compile and use_cache else self.step
        for end in range(T, T + max_new_tokens):
            moved = [end - max(1, c.block_size // 2) if end - s > c.block_size else s for s in starts]
            if moved != starts and cache is not None:
                cache.length = 0
            starts, first = moved, min(moved)
            pad = torch.tensor(starts, device=device) - first if max(starts) > first else None
            context = out[:, first + (cache.length if cache is not None else 0):end]
            noise = torch.empty(B, n_vocab, device=device).exponential_(generator=generator) if temperature else None
            out[:, end] = step(context, cache, pad, n_vocab, noise, temperature, top_k, top_p)
            yield out[:, end]

    def generate(self, idx, max_new_tokens, *args, **kwargs):
        """Prompt and continuation, (B, T + max_new_tokens). Arguments as in stream."""
        return torch.cat([idx, *(t[:, None] for t in self.stream(idx, max_new_tokens, *args, **kwargs))], dim=1)


def usable_device(name):
    """
    name, or for auto the first of cuda, mps and cpu that is there. One with a number, as cuda:1, becomes CUDA's current device,
    which kernels and graphs run on. Raises ValueError for one that can't be used here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        if torch.device(name).type not in ("cuda", "mps", "cpu"):
            raise RuntimeError("expected cuda, mps or cpu")
        torch.empty(1, device=name)
        if name.startswith("cuda:"):
            torch.cuda.set_device(name)
    except (RuntimeError, AssertionError) as e:
        raise ValueError(f"not usable here ({str(e).splitlines()[0]}); try --device=cpu") from None
    return name


def head_loss(x, weight, targets):
    """Mean cross-entropy in nats of logits x @ weight.T; x (B, T, C), weight (vocab_size, C), targets (B, T), -100: ignored."""
    return F.cross_entropy(F.linear(x, weight).flatten(0, 1), targets.reshape(-1))


def load_checkpoint(path):
    """
    The dict that train.py saved, on the CPU. Prefixes that torch.compile or DDP leave in parameter names are accepted.
    Raises ValueError, with the file's name, for a file that is cut, foreign or of a newer version.
    """
    try:
        ckpt = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(ckpt, dict):
            raise TypeError("no dict")
        if ckpt["version"] > CHECKPOINT_VERSION:
            raise ValueError(f"{path}: written by a newer version ({ckpt['version']} > {CHECKPOINT_VERSION}); update this code")
        state = ckpt["model"]
        while any(k.startswith(("_orig_mod.", "module.")) for k in state):
            state = {k.removeprefix("_orig_mod.").removeprefix("module."): v for k, v in state.items()}
        known = {f.name for f in fields(GPTConfig)}
        foreign = sorted(set(ckpt["model_config"]) - known)
        if foreign:
            raise ValueError(f"{path}: has the unknown model options {', '.join(foreign)}; update this code")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such checkpoint; train.py writes it") from None
    except PermissionError as e:
        raise ValueError(f"{path}: can't be read ({e.strerror}); it may be whole: change its permissions") from None
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, AttributeError, pickle.UnpicklingError) as e:
        raise ValueError(f"{path}: cut, damaged, or not written by train.py ({type(e).__name__}); restore it, or remove it "
                         "and train again") from None
    return {**ckpt, "model": state}


def from_checkpoint(ckpt):
    """The GPT of load_checkpoint's dict, in eval mode. Raises ValueError when weights and options do not match."""
    try:
        with torch.device("meta"):
            model = GPT(GPTConfig(**ckpt["model_config"]))
    except TypeError as e:
        raise ValueError(f"the checkpoint's model options can't be used ({e})") from None
    model.to_empty(device="cpu")
    model.init_tables()
    model.restore(ckpt["model"])
    return model.eval()


def sample(logits, noise, temperature=1.0, top_k=None, top_p=None):
    """
    Token ids (B,) drawn from float32 logits (B, n_vocab); temperature 0 takes the largest. The draw is a race: with noise
    (B, n_vocab), independent and standard exponential, the largest p_i / noise_i is token i's with probability p_i.
    """
    if temperature == 0:
        return logits.argmax(-1)
    ids, nucleus = None, top_p is not None and top_p < 1  # of the candidates, where they are not the whole vocabulary
    if top_k:
        logits, ids = logits.topk(min(top_k, logits.size(-1)), sorted=nucleus)  # exactly k, also where the kth is tied
    elif nucleus:
        logits, ids = logits.sort(-1, descending=True)
    # at most 0, so that no temperature overflows; one too small for float32 is as good as the smallest that is not
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, torch.finfo(torch.float32).tiny)
    probs = logits.softmax(-1)
    if nucleus:
        probs = probs.masked_fill(probs.cumsum(-1) - probs >= top_p, 0)  # keeps the smallest set that reaches top_p
    if ids is None:
        return (probs / noise).argmax(-1)
    return ids.gather(-1, (probs / noise.gather(-1, ids)).argmax(-1, keepdim=True))[:, 0]


class CompiledStep:
    """
    GPT.step for one new token of each row, in shapes that never change: compiled, and on CUDA recorded as a graph, so that a
    token costs one launch. Longer inputs (a prompt) go through GPT.step itself.
    """

    def __init__(self, model):
        self.model, self.compiled, self.graph = model, None, None

    def __call__(self, idx, cache, pad, n_vocab, noise, temperature, top_k, top_p):
        if idx.size(1) > 1 or not cache.length:
            cache.at = None
            return self.model.step(idx, cache, pad, n_vocab, noise, temperature, top_k, top_p)
        if self.compiled is None or (pad is None) != (self.pad is None):
            self.graph = None
            self.at, self.idx = torch.zeros(1, dtype=torch.int64, device=idx.device), idx.clone()
            self.pad, self.noise = None if pad is None else pad.clone(), None if noise is None else noise.clone()
            # cuBLAS is slow for a single row, so the compiler may choose its own kernels and tune them
            tune = {"coordinate_descent_tuning": True} if idx.is_cuda else None
            self.compiled = torch.compile(self.model.step, fullgraph=True, dynamic=False, options=tune)
        cache.at = self.at.fill_(cache.length)
        self.idx.copy_(idx)
        for own, given in ((self.pad, pad), (self.noise, noise)):
            if own is not None:
                own.copy_(given)
        cache.length += 1
        args = (self.idx, cache, self.pad, n_vocab, self.noise, temperature, top_k, top_p)
        if not idx.is_cuda:
            with torch._dynamo.config.patch(recompile_limit=64):  # of one process, for all the shapes and models it decodes
                return self.compiled(*args)
        if self.graph is None:
            self.record(args)
        self.graph.replay()
        return self.out

    def record(self, args):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch._dynamo.config.patch(recompile_limit=64):
            for _ in range(3):  # compiles, and settles what must not happen while recording
                self.compiled(*args)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self.compiled(*args)
