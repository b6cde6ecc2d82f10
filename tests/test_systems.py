"""
Every system of the paper against its equations: mixes and sources of values, the baselines, the ablations.
SYSTEMS gives each one's options, the parameters it adds to vanilla's, and its rule as the paper writes it, which an
independent float64 reference follows. Toy weights are ten times the initial ones and learned mixing weights are random,
so that a wrong mix cannot hide below a tolerance. Layers are counted from 1.
"""
import contextlib
import itertools
import math
import os
import warnings
from fractions import Fraction

import pytest
import torch
from torch.nn import functional as F

import prepare
from model import GPT, GPTConfig, KVCache
from train import batch_windows

torch.set_num_threads(1)

V, BLOCK, L, D = 61, 16, 4, 32  # vocabulary, block_size, layers, width
GROUPS = {"mha": 0, "gqa": 2}  # n_kv_head of 4 heads


def mix(f):
    """A rule on values: layer 1 keeps its own, layer n >= 2 attends with f(n, {1: V_1, ..., n: V_n})."""
    return lambda w: dict(value=lambda n, v: f(w, n, v) if n > 1 else v[1])


def half(name):
    """½ (own + layer 1's) of queries, keys, inputs or attention maps, n >= 2."""
    return lambda w: {name: lambda n, t: 0.5 * (t[n] + t[1])}


def shares(**take):
    """Layer n uses layer take(n)'s projection."""
    return lambda w: dict(take={t: f for t, f in take.items()})


def mean(tensors):
    return sum(tensors) / len(tensors)


def pair(n):
    return n if n % 2 else n - 1


def plus(w, n, v):  # λ_scale · softmax(λ')_n over layers 2..L
    share = w["value_mix.logits"].exp() / w["value_mix.logits"].exp().sum()
    return w["value_mix.scale"] * share[n - 2] * v[1] + w["value_mix.lambda2"][n - 2] * v[n]


def dense(w, n, v):  # row n of the triangle holds λ_{n,1}..λ_{n,n}; rows 2..L follow each other
    row = w["value_mix.triangle"][n * (n - 1) // 2 - 1:]
    return sum(row[i - 1] * v[i] for i in range(1, n + 1))


def depth(w, n, x):  # DenseFormer: α_{n,0}..α_{n,n} weigh the embedding and the raw block outputs
    row = w["alpha"][(n - 1) * (n + 2) // 2:]
    return sum(row[i] * x[i] for i in range(n + 1))


RES = dict(value_residual=True)
CONSTANT = dict(RES, value_mix="constant")
LEARN = dict(RES, value_mix="learnable")
PLUS = dict(RES, value_mix="plus")

def normed(n, projections):  # every head of 8 has mean square 1
    heads = projections[n].unflatten(1, (-1, 8))
    return (heads / (heads.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(1)


SYSTEMS = {  # options, parameters beyond vanilla's (of d and d_kv = n_kv_head * head_dim), the rule
    "constant": (CONSTANT, 0, mix(lambda w, n, v: 2 * v[1] + v[n])),
    "learnable": (LEARN, lambda d, kv: 2 * (L - 1), mix(
        lambda w, n, v: w["value_mix.lambda1"][n - 2] * v[1] + w["value_mix.lambda2"][n - 2] * v[n])),
    "plus": (PLUS, lambda d, kv: 1 + 2 * (L - 1), mix(plus)),
    "plus_depth": (dict(PLUS, plus_init="depth"), lambda d, kv: 1 + 2 * (L - 1), mix(plus)),
    "sparse": (dict(CONSTANT, value_lambda1=5.0, value_layers="3-4"), 0, mix(
        lambda w, n, v: 5 * v[1] + v[n] if n in (3, 4) else v[n])),
    "dense": (dict(RES, value_mix="dense"), lambda d, kv: L * (L + 1) // 2 - 1, mix(dense)),
    "previous": (dict(RES, value_source="previous"), 0, mix(lambda w, n, v: 0.5 * (v[n - 1] + v[n]))),
    "all": (dict(RES, value_source="all"), 0, mix(lambda w, n, v: mean(list(v.values())))),  # Eq 5
    "all_constant": (dict(CONSTANT, value_source="all"), 0, mix(
        lambda w, n, v: 2 * mean([v[i] for i in range(1, n)]) + v[n])),
    "source_2": (dict(RES, value_source="2"), 0, mix(lambda w, n, v: 0.5 * (v[2] + v[n]) if n > 2 else v[n])),
    "source_2_no_skip": (dict(RES, value_source="2", no_first_skip=True), 0, lambda w: dict(
        skip_1=False, value=lambda n, v: 0.5 * (v[2] + v[n]) if n > 2 else v[n])),
    "no_first_skip": (dict(no_first_skip=True), 0, lambda w: dict(skip_1=False)),
    "anchors": (dict(shared_value=True, value_anchors="1,4"), lambda d, kv: -(L - 2) * d * kv,  # first and last
                shares(v=lambda n: 4 if n == 4 else 1)),
    "svformer_cla": (dict(shared_value=True, share_k_every=2), lambda d, kv: -(L - 1 + L // 2) * d * kv,
                     shares(k=pair, v=lambda n: 1)),
    "cla": (dict(cla=2), lambda d, kv: -(L // 2) * 2 * d * kv, shares(k=pair, v=pair)),
    "share_k": (dict(share_k_every=2), lambda d, kv: -(L // 2) * d * kv, shares(k=pair)),
    "share_v": (dict(share_v_every=2), lambda d, kv: -(L // 2) * d * kv, shares(v=pair)),
    "neutreno": (dict(neutreno=0.4), 0, lambda w: dict(bypass=lambda n, v: 0.4 * (v[1] - v[n]))),  # Eq 8
    "neutreno_resformer": (dict(RES, neutreno=0.2), 0, lambda w: dict(  # 0.2 (V_1 - V'_n) = 0.1 (V_1 - V_n)
        value=lambda n, v: 0.5 * (v[1] + v[n]), bypass=lambda n, v: 0.1 * (v[1] - v[n]))),
    "denseformer": (dict(denseformer=True), lambda d, kv: L * (L + 3) // 2, lambda w: dict(
        depth=lambda n, x: depth(w, n, x))),
    "query_residual": (dict(query_residual=True), 0, half("query")),
    "key_residual": (dict(key_residual=True), 0, half("key")),
    "hidden_residual": (dict(hidden_residual=True), 0, half("hidden")),
    "attention_residual": (dict(attention_residual=True), 0, half("attention")),
    "shared_query": (dict(shared_query=True), lambda d, kv: -(L - 1) * d * d, shares(q=lambda n: 1)),
    "shared_key": (dict(shared_key=True), lambda d, kv: -(L - 1) * d * kv, shares(k=lambda n: 1)),
    "identity_mapping": (dict(identity_mapping=True), 0, lambda w: dict(  # Eq 6
        bypass=lambda n, v: mean([v[i] for i in range(1, n)]))),
    "qk_norm": (dict(qk_norm=True), 0, lambda w: dict(query=normed, key=normed)),
    "cross_layer": (dict(cross_layer=True), 0, lambda w: dict(cross=lambda n: 1)),  # Eq 2, m = 1
    "cross_previous": (dict(cross_layer=True, value_source="previous"), 0, lambda w: dict(cross=lambda n: n - 1)),
}
LEARNED = {"learnable", "plus", "plus_depth", "dense", "denseformer"}  # the systems with weights of their own

ENOUGH = {"sparse": 4, "anchors": 4, "source_2": 3, "source_2_no_skip": 3, "cross_previous": 3}  # layers to trace; others: 2

system = pytest.mark.parametrize("system", SYSTEMS)
groups = pytest.mark.parametrize("groups", GROUPS)


def config(system=None, groups="mha", **options):
    shape = dict(block_size=BLOCK, vocab_size=V, n_layer=L, n_head=4, n_embd=D, n_ffn=48, n_kv_head=GROUPS[groups])
    return GPTConfig(**{**shape, **(SYSTEMS[system][0] if system else {}), **options})


def mixing(model):
    """The learned weights of the system itself, by name."""
    return {n: p for n, p in model.named_parameters() if n.startswith("value_mix.") or n == "alpha"}


def toy(system=None, groups="mha", shake=True, **options):
    """In eval mode with large weights; shake: mixing weights random instead of initial."""
    m = GPT(config(system, groups, **options)).eval()
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in m.named_parameters():
            if p.dim() == 2:
                p.mul_(10)
            elif "ln_" in name:
                p.copy_(1 + 0.3 * torch.sin(torch.arange(p.numel()) + len(name)))
            elif shake:
                p.add_(torch.randn(p.shape, generator=g).mul(0.3))
    return m


def ids(*shape, seed=0, vocab=V):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def close(a, b, tol=1e-5):
    torch.testing.assert_close(a, b, atol=tol, rtol=tol)


def grads(model, x, y):
    model.zero_grad(set_to_none=True)
    loss = model(x, y)[1]
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


def probed(model, x):
    """{layer: {x, q, k, v (after mixing, by heads), raw_v, y (before W_o)}} of one forward pass."""
    seen = {}
    for block in model.transformer.h:
        block.attn.probe = lambda n, tensors: seen.update({n: tensors})
    with torch.no_grad():
        model(x)
    return seen


def flat(t):
    return t.transpose(1, 2).flatten(2)


def widen(t, model):
    """Flat values at KV width (B, T, d_kv) repeated to all heads, as attention under GQA sees them: (B, T, C)."""
    group = model.config.n_head // model.config.kv_heads
    return t.unflatten(2, (-1, model.config.head_dim)).repeat_interleave(group, 2).flatten(2)


# ---- an independent reference: one sequence, float64. A rule is a function (n, {layer: tensor}) -> tensor


def own(n, tensors):
    return tensors[n]


def reference(w, c, idx, value=own, query=own, key=own, hidden=own, attention=own, depth=own, bypass=None, cross=None,
              take=None, skip_1=True, late=False):
    """Logits (T, V) of token ids (T,); late: mix queries and keys after RoPE instead of before."""
    T, hd, width = len(idx), c.n_embd // c.n_head, dict(q=c.n_embd, k=c.kv_heads * 8, v=c.kv_heads * 8)
    angle = torch.arange(T).double()[:, None] * c.rope_theta ** (-torch.arange(0, hd, 2).double() / hd)
    future = torch.ones(T, T, dtype=torch.bool).triu(1)

    def norm(x, gain):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain

    def heads(x):  # (T, width) -> (n_head, T, hd); under GQA consecutive query heads share a key/value head
        x = x.view(T, -1, hd)
        return torch.stack([x[:, i * x.shape[1] // c.n_head] for i in range(c.n_head)])

    def rope(x):
        z = torch.complex(x[..., :hd // 2], x[..., hd // 2:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag), -1)

    def rotated(rule, n, P):
        return rule(n, {i: rope(heads(p)) for i, p in P.items()}) if late else rope(heads(rule(n, P)))

    def scores(q, k):
        return (q @ k.transpose(1, 2) / math.sqrt(hd)).masked_fill(future, -math.inf)

    x = w["transformer.wte.weight"][idx]
    P, H, A, X = dict(q={}, k={}, v={}), {}, {}, {0: x}  # projections, normed inputs, attention maps, block outputs
    for n in range(1, c.n_layer + 1):
        b, at = f"transformer.h.{n - 1}.", 0
        H[n] = norm(x, w[b + "ln_1.weight"])
        for t in "qkv":
            source = (take or {}).get(t, lambda n: n)(n)
            if source == n:  # only then the layer has a projection of its own
                P[t][n] = hidden(n, H) @ w[b + "attn.c_attn.weight"][at:at + width[t]].T
                at += width[t]
            else:
                P[t][n] = P[t][source]
        q, k, v = rotated(query, n, P["q"]), rotated(key, n, P["k"]), heads(value(n, P["v"]))
        A[n] = scores(q, k).softmax(-1)
        u = attention(n, A) @ v  # Eq 1
        if cross and n > 1:  # Eq 2: softmax(Q_n [K_n; K_m]ᵀ / √d) [V_n; V_m]
            m = cross(n)
            both = torch.cat((scores(q, k), scores(q, rope(heads(P["k"][m])))), -1).softmax(-1)
            close(both.sum(-1), torch.ones(c.n_head, T).double())
            u = both @ torch.cat((v, heads(P["v"][m])), 1)
        if bypass and n > 1:
            u = u + heads(bypass(n, P["v"]))
        a = u.transpose(0, 1).reshape(T, -1) @ w[b + "attn.c_proj.weight"].T
        x = x + a if skip_1 or n > 1 else a
        gate, up = (norm(x, w[b + "ln_2.weight"]) @ w[b + "mlp.c_fc.weight"].T).chunk(2, 1)
        X[n] = x + (gate / (1 + (-gate).exp()) * up) @ w[b + "mlp.c_proj.weight"].T
        x = depth(n, X)
    return norm(x, w["transformer.ln_f.weight"]) @ w["lm_head.weight"].T


def expected(model, x, rule, w=None, **more):
    """The reference's logits of a batch, in the model's weights and the rule (a function of them)."""
    w = w or {n: p.detach().double() for n, p in model.named_parameters()}
    return torch.stack([reference(w, model.config, row, **{**(rule(w) if rule else {}), **more}) for row in x])


@system
@groups
def test_logits_and_gradients_are_the_equations(system, groups):
    m, x, rule = toy(system, groups), ids(2, 11), SYSTEMS[system][2]
    w = {n: p.detach().double().clone().requires_grad_() for n, p in m.named_parameters()}
    logits = expected(m, x[:, :-1], rule, w)
    close(m(x[:, :-1])[0].double(), logits, 3e-5)
    loss = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
    loss.backward()
    ours, ours_grads = grads(m, x[:, :-1], x[:, 1:])
    close(ours.double(), loss.detach())
    for name, g in ours_grads.items():
        close(g.double(), w[name].grad, 3e-5)


@groups
def test_the_toy_tells_all_systems_apart(groups):
    x, found = ids(2, 11), {"vanilla": toy(None, groups)(ids(2, 11))[0]}
    for name in SYSTEMS:
        found[name] = toy(name, groups)(x)[0]
    found.pop("plus_depth")  # plus with other numbers
    for a, b in itertools.combinations(found, 2):
        assert (found[a] - found[b]).abs().max() > 0.05, (a, b)


# ---- for every system


@system
@groups
def test_parameters(system, groups):
    d_kv = (GROUPS[groups] or 4) * 8
    extra = SYSTEMS[system][1]
    extra = extra(D, d_kv) if callable(extra) else extra
    assert GPT(config(system, groups)).num_params() - GPT(config(None, groups)).num_params() == extra
    assert sum(p.numel() for p in mixing(toy(system, groups)).values()) == max(extra, 0)  # negative: a projection less


@system
@groups
def test_shared_parameters_start_as_vanillas(system, groups):
    """Also q, k and v by themselves where a layer lacks one of them."""
    d_kv, c = (GROUPS[groups] or 4) * 8, config(system, groups)
    ours, plain, found = GPT(c), GPT(config(None, groups)).state_dict(), 0
    for name, p in ours.state_dict().items():
        if name in mixing(ours):
            continue
        if "c_attn" in name:
            n = int(name.split(".")[2]) + 1
            take = SYSTEMS[system][2]({}).get("take", {})
            parts = dict(zip("qkv", plain[name].split([D, d_kv, d_kv])))
            want = torch.cat([part for t, part in parts.items() if take.get(t, lambda n: n)(n) == n])
            assert torch.equal(p, want), name
            found += 1
        else:
            assert torch.equal(p, plain[name]), name
    assert found == L


@system
@groups
def test_a_future_token_changes_nothing_earlier(system, groups):
    m, x = toy(system, groups), ids(2, BLOCK)
    y = x.clone()
    y[:, 9] = (y[:, 9] + 1) % V
    a, b = m(x)[0], m(y)[0]
    close(a[:, :9], b[:, :9], 1e-6)
    assert ((a - b)[:, 9:].abs().amax((0, 2)) > 1e-4).all()


@system
@groups
@pytest.mark.parametrize("start", ["shaken", "fresh"])
def test_every_parameter_gets_a_gradient(system, groups, start):
    m = toy(system, groups) if start == "shaken" else GPT(config(system, groups))
    x = ids(4, BLOCK)
    for name, g in grads(m, x[:, :-1], x[:, 1:])[1].items():
        assert g is not None and g.isfinite().all() and g.any(), name
    for name, p in mixing(m).items():
        assert (p.grad != 0).all(), name  # every single mixing weight


@system
def test_v1_is_not_detached(system):
    """W_1^V learns from every layer. With layer 1's own W_o at zero it can only learn from the others."""
    m, x = toy(system), ids(2, 11)
    with torch.no_grad():
        m.transformer.h[0].attn.c_proj.weight.zero_()
    g = grads(m, x[:, :-1], x[:, 1:])[1]["transformer.h.0.attn.c_attn.weight"]
    # rows q, k, v of layer 1, and whether some later layer reads that projection
    reads = {"q": system in ("query_residual", "shared_query"),
             "k": system in ("key_residual", "shared_key", "cla", "share_k", "svformer_cla", "cross_layer",
                             "cross_previous"),
             "v": not (system.startswith("source_2") or system in (
                 "query_residual", "key_residual", "hidden_residual", "attention_residual", "shared_query", "shared_key",
                 "share_k", "denseformer", "no_first_skip", "qk_norm"))}
    if system == "attention_residual":  # the first layer's map is read, hence its q and k
        reads.update(q=True, k=True)
    for t, part in zip("qkv", g.split(D)):
        assert bool(part.any()) == reads[t], t


def watched(model, *args, **kwargs):
    """generate's tokens and the logits (B, steps, V) it saw."""
    logits = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(*args, temperature=0, **kwargs)
    hook.remove()
    return out, torch.stack([step.reshape(len(out), -1, V)[:, -1] for step in logits], 1)


@system
@groups
def test_cached_decoding_is_the_full_forward_pass(system, groups):
    """Beyond block_size too, where the last half is processed anew."""
    m, x, new, block = toy(system, groups, block_size=8), ids(2, 5), 10, 8
    cached, logits = watched(m, x, new)
    plain, plain_logits = watched(m, x, new, use_cache=False)
    assert torch.equal(cached, plain)
    close(logits, plain_logits, 3e-5)
    for end in range(5, block + 1):  # and from scratch, without stream's own loop
        close(logits[:, end - 5], m(cached[:, :end])[0][:, -1], 3e-5)


@system
@groups
def test_left_padded_prompts(system, groups):
    """Each row as if it were alone while the context lasts; cached as uncached also beyond it."""
    m, lengths, block = toy(system, groups, block_size=8), [5, 2, 4], 8
    x = ids(3, 5)
    out, logits = watched(m, x, 10, lengths=lengths)
    plain, plain_logits = watched(m, x, 10, lengths=lengths, use_cache=False)
    assert torch.equal(out, plain)
    close(logits, plain_logits, 3e-5)
    for b, n in enumerate(lengths):
        alone, want = watched(m, x[b:b + 1, 5 - n:], block - 5)
        assert torch.equal(out[b, 5 - n:block], alone[0])
        close(logits[b, :block - 5], want[0], 3e-5)


@pytest.mark.filterwarnings("ignore")
@system
def test_compiled_steps_give_the_uncompiled_tokens(system, monkeypatch):
    """Prompts of unequal length, past a full context, sampled and greedy; one graph for all steps of a kind."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: real(f, fullgraph=True, dynamic=False, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    m, x = toy(system, "gqa", n_layer=ENOUGH.get(system, 3)), ids(3, 6)  # 3: a layer of its own behind one that shares
    plain, compiled = (m.generate(x, 24, 1.0, 20, 0.9, lengths=[1, 4, 6], seed=3, compile=c) for c in (False, True))
    assert torch.equal(plain, compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    # the window moves past the shorter prompt's padding midway: a graph with padding, then one without
    half = m.config.block_size // 2
    x = ids(2, half + 2)
    plain, compiled = (m.generate(x, 3 * half, lengths=[1, half + 2], temperature=0, compile=c) for c in (False, True))
    assert torch.equal(plain, compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
@system
def test_compiles_to_one_graph(system):
    torch._dynamo.reset()
    m, x = toy(system, "gqa", n_layer=ENOUGH.get(system, 2)).train(), ids(2, 11)
    want, want_grads = grads(m, x[:, :-1], x[:, 1:])
    compiled = torch.compile(m, backend="eager", fullgraph=True)
    m.zero_grad(set_to_none=True)
    loss = compiled(x[:, :-1], x[:, 1:])[1]
    loss.backward()
    close(loss.detach(), want, 1e-6)
    for name, p in m.named_parameters():
        close(p.grad, want_grads[name], 1e-5)
    torch._dynamo.reset()


@system
def test_bfloat16_autocast(system):
    m, x = toy(system, "gqa"), ids(2, 11)
    want = m(x[:, :-1], x[:, 1:])[1].item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = m(x[:, :-1], x[:, 1:])[1]
        cached = watched(m, x[:, :5], 6)
        full = m(cached[0][:, :-1])[0][:, 4:]
    loss.backward()
    assert loss.item() == pytest.approx(want, rel=0.03)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in m.parameters())
    assert (cached[1].float() - full.float()).abs().mean() < 0.1  # logits have a standard deviation above 1


@system
def test_activation_checkpointing_gives_equal_gradients(system):
    m, x = toy(system, "gqa").train(), ids(2, 11)
    want, want_grads = grads(m, x[:, :-1], x[:, 1:])
    m.activation_checkpointing = True
    loss, found = grads(m, x[:, :-1], x[:, 1:])
    assert torch.equal(loss, want)
    for name, g in found.items():
        close(g, want_grads[name], 1e-6)


@pytest.fixture(scope="module")
def builtin(tmp_path_factory):
    """The start of the built-in corpus, as prepare.py makes it."""
    folder = str(tmp_path_factory.mktemp("builtin"))
    with open(os.devnull, "w") as f, contextlib.redirect_stdout(f):
        prepare.prepare(prepare.Config(out_dir=folder, max_tokens=2_000_000, val_fraction=0.1, num_proc=1))
    return prepare.Data(folder)


@pytest.mark.parametrize("system", [None, "identity", "svformer", *SYSTEMS])
def test_trains_on_the_builtin_corpus(system, builtin):
    """50 iterations: the loss falls, on held-out windows and far below the start, and the learned weights move."""
    plain = {"identity": RES, "svformer": SV}.get(system, {})
    m = GPT(config(None if plain else system, "gqa", vocab_size=builtin.vocab_size, **plain)).train()
    o = m.configure_optimizers(weight_decay=0.1, learning_rate=1e-2, betas=(0.9, 0.95), value_lr_scale=1.0)
    before = {n: p.detach().clone() for n, p in mixing(m).items()}
    assert bool(before) == (system in LEARNED)
    b = builtin.val["val"]
    held_out = torch.from_numpy(b.read(range(0, b.windows(BLOCK), b.windows(BLOCK) // 100), BLOCK))
    losses, val = [], []
    for i in range(51):
        if i % 25 == 0:
            with torch.no_grad():
                val.append(m(held_out[:, :-1], held_out[:, 1:])[1].item())
        x = torch.from_numpy(builtin.train.read(batch_windows(i, 8, builtin.train.windows(BLOCK), 1), BLOCK))
        loss = grads(m, x[:, :-1], x[:, 1:])[0].item()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        o.step()
        losses.append(loss)
    assert losses[0] == pytest.approx(math.log(builtin.vocab_size), abs=0.1)
    assert val[0] - 1.2 > val[1] > val[2] + 0.02 and all(map(math.isfinite, losses)), val
    for name, p in mixing(m).items():
        assert (p != before[name]).all(), name


# ---- where the weights come from


@groups
def test_constant_1_is_twice_identity_before_w_o(groups):
    x, two = ids(2, 11), toy(None, groups, **CONSTANT, value_lambda1=1.0)
    once = toy(None, groups, **RES)
    close(probed(two, x)[2]["y"], 2 * probed(once, x)[2]["y"], 1e-6)  # layer 2: later layers have other inputs
    with torch.no_grad():
        for block in list(two.transformer.h)[1:]:
            block.attn.c_proj.weight /= 2
    close(two(x)[0], once(x)[0])


@groups
def test_constant_0_is_the_baseline_and_2_1_the_default(groups):
    x = ids(2, 11)
    assert torch.equal(toy(None, groups, **CONSTANT, value_lambda1=0.0)(x)[0], toy(None, groups)(x)[0])
    explicit = toy(None, groups, **CONSTANT, value_lambda1=2.0, value_lambda2=1.0)
    assert torch.equal(toy("constant", groups)(x)[0], explicit(x)[0])


@pytest.mark.parametrize("lambda1, lambda2", [(0.2, 1.0), (5.0, 1.0), (0.8, None), (None, 0.3), (-1.0, 0.7)])
def test_any_pair_of_constants(lambda1, lambda2):
    m, x = toy(None, "gqa", **CONSTANT, value_lambda1=lambda1, value_lambda2=lambda2), ids(2, 9)
    a, b = 2.0 if lambda1 is None else lambda1, 1.0 if lambda2 is None else lambda2
    close(m(x)[0].double(), expected(m, x, mix(lambda w, n, v: a * v[1] + b * v[n])))


@groups
def test_learnable_starts_as_identity_to_the_bit(groups):
    x = ids(2, 11)
    assert torch.equal(toy("learnable", groups, shake=False)(x)[0], toy(None, groups, **RES)(x)[0])
    given = dict(value_lambda1=0.2, value_lambda2=0.9)
    assert torch.equal(toy("learnable", groups, shake=False, **given)(x)[0], toy(None, groups, **RES, **given)(x)[0])


@pytest.mark.parametrize("system", ["learnable", "plus", "plus_depth", "dense", "denseformer"])
@pytest.mark.parametrize("scale", [1.0, 7.0])
def test_mixing_weights_do_not_decay_and_move(system, scale):
    m, x = toy(system, shake=False), ids(4, BLOCK)
    o = m.configure_optimizers(weight_decay=0.1, learning_rate=1e-3, betas=(0.9, 0.95), value_lr_scale=scale)
    group = {id(p): g for g in o.param_groups for p in g["params"]}
    assert len(group) == len(list(m.parameters()))
    before = {n: p.detach().clone() for n, p in mixing(m).items()}
    for g in o.param_groups:
        g["lr"] = 1e-3 * g["lr_scale"]
    grads(m, x[:, :-1], x[:, 1:])
    o.step()
    for name, p in mixing(m).items():
        assert group[id(p)]["weight_decay"] == 0, name
        if name != "alpha":  # Adam's first step is the rate, whatever the gradient
            close((p - before[name]).abs(), torch.full_like(p, 1e-3 * scale), 1e-4)
        assert (p != before[name]).all(), name
    mine = {id(p) for n, p in mixing(m).items() if n != "alpha"}  # value_lr_scale is the value weights' alone
    assert all(g["lr_scale"] == (scale if i in mine else 1.0) for i, g in group.items())


@pytest.mark.parametrize("n_layer", [2, 5, 8])
def test_plus_starts_uniform_with_a_sum_of_n(n_layer):
    """Σ_n λ_{n,1} = N over layers 2..N, so each is N / (N - 1); λ2 = ½; one scalar for the scale."""
    table = GPT(config("plus", n_layer=n_layer)).value_mix()
    assert sorted(table) == list(range(2, n_layer + 1))
    for n, row in table.items():
        assert set(row) == {1, n}
        assert row[1].item() == pytest.approx(n_layer / (n_layer - 1)) and row[n].item() == 0.5
    assert sum(row[1].item() for row in table.values()) == pytest.approx(n_layer)


def test_plus_can_start_with_more_in_deeper_layers():
    table = GPT(config("plus_depth", n_layer=8)).value_mix()
    first = [table[n][1].item() for n in range(2, 9)]
    assert all(a < b for a, b in zip(first, first[1:])) and sum(first) == pytest.approx(8)
    close(torch.tensor(first), 8 * (torch.arange(2, 9) / 8).softmax(0), 1e-6)  # λ'_n = n / N
    assert all(table[n][n].item() == 0.5 for n in table)


def test_plus_has_one_shared_scale():
    m, x = toy("plus", shake=False), ids(2, 9)
    assert [p.numel() for n, p in mixing(m).items() if n.endswith("scale")] == [1]
    with torch.no_grad():
        m.value_mix.scale.fill_(0.0)  # no V_1 at all: ½ V_n everywhere
    close(m(x)[0].double(), expected(m, x, mix(lambda w, n, v: 0.5 * v[n])))


def at_same_input(model, donor, x):
    """The output of each block of model, given what donor's same block got."""
    inputs, outputs = {}, {}
    for i, (theirs, ours) in enumerate(zip(donor.transformer.h, model.transformer.h)):
        theirs.register_forward_pre_hook(lambda module, args, i=i: inputs.update({i: args[0]}))
        ours.register_forward_pre_hook(lambda module, args, i=i: (inputs[i], *args[1:]))
        ours.register_forward_hook(lambda module, args, output, i=i: outputs.update({i + 1: output[0]}))
    with torch.no_grad():
        donor(x)
        model(x)
    return outputs


@groups
@pytest.mark.parametrize("layers, chosen", [("6-8", {6, 7, 8}), ("7", {7}), ("2,5-6,8", {2, 5, 6, 8}), ("", set(range(2, 9)))])
def test_sparse_layers(groups, layers, chosen):
    """Sparse ResFormer: λ = 5, 1 on the chosen layers; the others equal vanilla to the bit at the same input."""
    x, options = ids(2, 9), dict(n_layer=8, value_layers=layers, value_lambda1=5.0)
    m = toy(None, groups, **CONSTANT, **options)
    seen = probed(m, x)
    for n, t in seen.items():
        v, v1 = t["raw_v"], seen[1]["raw_v"]
        if n in chosen:
            close(flat(t["v"]), 5 * v1 + v)
        else:
            assert torch.equal(flat(t["v"]), v)
    for block in m.transformer.h:
        block.attn.probe = None
    outputs = {}
    for n, block in enumerate(m.transformer.h, 1):
        block.register_forward_hook(lambda module, args, output, n=n: outputs.update({n: output[0]}))
    vanilla = at_same_input(toy(None, groups, n_layer=8), m, x)
    for n in range(1, 9):
        assert torch.equal(outputs[n], vanilla[n]) == (n not in chosen), n


@groups
def test_dense_starts_as_vanilla_to_the_bit(groups):
    x = ids(2, 11)
    assert torch.equal(toy("dense", groups, shake=False)(x)[0], toy(None, groups)(x)[0])


@groups
def test_dense_on_column_1_and_the_diagonal_is_learnable(groups):
    dense, learnable, x = toy("dense", groups), toy("learnable", groups), ids(2, 11)
    with torch.no_grad():
        dense.value_mix.triangle.zero_()
        for n in range(2, L + 1):
            at = n * (n - 1) // 2 - 1
            dense.value_mix.triangle[at] = learnable.value_mix.lambda1[n - 2]
            dense.value_mix.triangle[at + n - 1] = learnable.value_mix.lambda2[n - 2]
    close(dense(x)[0], learnable(x)[0])


def test_learnable_on_chosen_layers_learns_those_only():
    m = GPT(config("learnable", n_layer=8, value_layers="6-8"))
    assert sum(p.numel() for p in mixing(m).values()) == 6 and sorted(m.value_mix()) == [6, 7, 8]
    assert {n: sorted(row) for n, row in m.value_mix().items()} == {n: [1, n] for n in (6, 7, 8)}


# ---- sources


@groups
@pytest.mark.parametrize("value_mix", ["identity", "constant"])
def test_with_two_layers_all_sources_are_equal_to_the_bit(groups, value_mix):
    x = ids(2, 11)
    found = [toy(None, groups, n_layer=2, value_residual=True, value_mix=value_mix, value_source=s)(x)[0]
             for s in ("first", "previous", "all", "1")]
    assert all(torch.equal(found[0], f) for f in found[1:])


@groups
def test_source_1_is_first(groups):
    x = ids(2, 11)
    assert torch.equal(toy(None, groups, **RES, value_source="1")(x)[0], toy(None, groups, **RES)(x)[0])


@groups
@pytest.mark.parametrize("source, weights", [  # on V_1..V_4 of layers 2, 3, 4
    ("first", [[1 / 2, 1 / 2], [1 / 2, 0, 1 / 2], [1 / 2, 0, 0, 1 / 2]]),
    ("previous", [[1 / 2, 1 / 2], [0, 1 / 2, 1 / 2], [0, 0, 1 / 2, 1 / 2]]),
    ("all", [[1 / 2, 1 / 2], [1 / 3, 1 / 3, 1 / 3], [1 / 4, 1 / 4, 1 / 4, 1 / 4]]),  # Eq 5
    ("2", [[0, 1], [0, 1 / 2, 1 / 2], [0, 1 / 2, 0, 1 / 2]]),
    ("3", [[0, 1], [0, 0, 1], [0, 0, 1 / 2, 1 / 2]]),
])
def test_sources_are_raw_values(groups, source, weights):
    """Never a layer's mixed value."""
    seen = probed(toy(None, groups, **RES, value_source=source), ids(2, 9))
    assert torch.equal(flat(seen[1]["v"]), seen[1]["raw_v"])
    for n, row in enumerate(weights, 2):
        close(flat(seen[n]["v"]), sum(w * seen[i]["raw_v"] for i, w in enumerate(row, 1)), 2e-6)


def test_learnable_previous_and_all_learn_two_weights_per_layer():
    for source, rows in (("previous", 3), ("all", 3), ("2", 2)):
        m, x = toy("learnable", value_source=source), ids(2, 9)
        assert sum(p.numel() for p in mixing(m).values()) == 2 * rows
        rule = {"previous": lambda n, v: v[n - 1], "all": lambda n, v: mean([v[i] for i in range(1, n)]),
                "2": lambda n, v: v[2]}[source]

        def value(w, n, v, first=L - rows + 1, rule=rule):
            if n < first:
                return v[n]
            return w["value_mix.lambda1"][n - first] * rule(n, v) + w["value_mix.lambda2"][n - first] * v[n]
        close(m(x)[0].double(), expected(m, x, mix(value)), 3e-5)


@pytest.mark.parametrize("options", [{}, dict(RES, value_source="2")])
def test_without_the_first_skip_h1_forgets_the_embedding(options):
    """RMSNorm hides the embedding's scale from attention, so only the skip around it could carry it into H_1."""
    def h1(factor, **options):
        m, out = toy(None, "gqa", **options).double(), []
        with torch.no_grad():
            m.transformer.wte.weight.mul_(100 * factor)  # 100: RMSNorm's eps does not matter
        m.transformer.h[0].register_forward_hook(lambda module, args, output: out.append(output[0].detach()))
        m(ids(2, 9))
        return out[0]
    close(h1(1, no_first_skip=True, **options), h1(3, no_first_skip=True, **options))
    assert (h1(1, **options) - h1(3, **options)).abs().max() > 1


# ---- who shares what


@groups
def test_anchors(groups):
    x = ids(2, 11)
    assert torch.equal(toy(None, groups, shared_value=True, value_anchors="1-4")(x)[0], toy(None, groups)(x)[0])
    first = toy(None, groups, shared_value=True, value_anchors="1")
    close(first(x)[0].double(), expected(first, x, shares(v=lambda n: 1)))
    assert torch.equal(first(x)[0], toy(None, groups, shared_value=True)(x)[0])


@pytest.mark.parametrize("anchors, source", [  # Fig 17: first only; first and last; first, middle, last
    ("1", [1] * 8), ("1,8", [1] * 7 + [8]), ("1,4,8", [1] * 3 + [4] * 4 + [8]), ("1,3,6,8", [1, 1, 3, 3, 3, 6, 6, 8])])
def test_anchors_serve_until_the_next(anchors, source):
    c = config(None, "gqa", n_layer=8, shared_value=True, value_anchors=anchors)
    m, d_kv, k = GPT(c), 16, len(set(source))
    seen = probed(m, ids(2, 7))
    for n, s in enumerate(source, 1):
        assert torch.equal(seen[n]["v"], seen[s]["v"])
    assert len({seen[n]["v"].sum().item() for n in seen}) == k
    assert GPT(config(None, "gqa", n_layer=8)).num_params() - m.num_params() == (8 - k) * D * d_kv


@groups
@pytest.mark.parametrize("system, k, v", [
    ("cla", [1, 1, 3, 3], [1, 1, 3, 3]), ("share_k", [1, 1, 3, 3], [1, 2, 3, 4]), ("share_v", [1, 2, 3, 4], [1, 1, 3, 3]),
    ("svformer_cla", [1, 1, 3, 3], [1, 1, 1, 1]), ("anchors", [1, 2, 3, 4], [1, 1, 1, 4]),
    ("shared_key", [1, 1, 1, 1], [1, 2, 3, 4])])
def test_layers_attend_with_their_groups_first(groups, system, k, v):
    seen = probed(toy(system, groups), ids(2, 9))
    for t, source in (("k", k), ("v", v)):
        for n, m in itertools.combinations(range(1, L + 1), 2):
            assert torch.equal(seen[n][t], seen[m][t]) == (source[n - 1] == source[m - 1]), (t, n, m)


@groups
def test_all_layers_use_the_first_ones_queries(groups):
    seen = probed(toy("shared_query", groups), ids(2, 9))
    for n in range(2, L + 1):
        assert torch.equal(seen[n]["q"], seen[1]["q"]) and not torch.equal(seen[n]["k"], seen[1]["k"])


def test_cla_is_sharing_both_and_every_can_be_more_than_2():
    x = ids(2, 9)
    assert torch.equal(toy("cla", "gqa")(x)[0], toy(None, "gqa", share_k_every=2, share_v_every=2)(x)[0])
    svformer = toy("svformer_cla", "gqa")(x)[0]
    assert torch.equal(svformer, toy(None, "gqa", shared_value=True, cla=2)(x)[0])
    m = toy(None, "gqa", cla=3)  # layers 1-3 and 4
    close(m(x)[0].double(), expected(m, x, shares(k=lambda n: 1 if n < 4 else 4, v=lambda n: 1 if n < 4 else 4)))
    assert GPT(config(None, n_layer=5, cla=2)).num_params() == GPT(config(n_layer=5)).num_params() - 2 * 2 * D * D


SIZES = {8: (8, 512), 12: (12, 768), 24: (16, 1024)}  # Table 4's layers: heads, width


@pytest.mark.parametrize("n_layer", SIZES)
@pytest.mark.parametrize("options, fewer", [  # in d^2 at L layers
    (dict(cla=2), lambda n: n // 2 * 2), (dict(share_k_every=2), lambda n: n // 2), (dict(share_v_every=2), lambda n: n // 2),
    (dict(shared_query=True), lambda n: n - 1), (dict(shared_key=True), lambda n: n - 1)])
def test_parameters_of_sharing_at_the_papers_sizes(n_layer, options, fewer):
    heads, d = SIZES[n_layer]
    shape = dict(vocab_size=50277, n_layer=n_layer, n_head=heads, n_embd=d)
    with torch.device("meta"):
        assert GPT(GPTConfig(**shape)).num_params() - GPT(GPTConfig(**shape, **options)).num_params() == fewer(n_layer) * d * d


# ---- KV cache

SV = dict(shared_value=True)
CACHE = {  # options, formula, the table's decimals at 8, 12 and 24 layers; g: query heads per key/value head
    "vanilla": ({}, lambda n: Fraction(1), (1, 1, 1)),
    "resformer": (RES, lambda n: Fraction(1), (1, 1, 1)),
    "neutreno": (dict(neutreno=0.4), lambda n: Fraction(1), (1, 1, 1)),
    "denseformer": (dict(denseformer=True), lambda n: Fraction(1), (1, 1, 1)),
    "svformer": (SV, lambda n: Fraction(n + 1, 2 * n), (0.5625, 0.5417, 0.5208)),
    "gqa2": (dict(g=2), lambda n: Fraction(1, 2), (0.5, 0.5, 0.5)),
    "cla2": (dict(cla=2), lambda n: Fraction(1, 2), (0.5, 0.5, 0.5)),
    "svformer+gqa2": (dict(SV, g=2), lambda n: Fraction(n + 1, 4 * n), (0.28125, 0.2708, 0.2604)),
    "svformer+cla2": (dict(SV, cla=2), lambda n: Fraction(n // 2 + 1, 2 * n), (0.3125, 0.2917, 0.2708)),
    "svformer+share_k": (dict(SV, share_k_every=2), lambda n: Fraction(n // 2 + 1, 2 * n), (0.3125, 0.2917, 0.2708)),
    "gqa8": (dict(g=8), lambda n: Fraction(1, 8), (0.125, 0.125, 0.125)),
    "cla2+gqa4": (dict(cla=2, g=4), lambda n: Fraction(1, 8), (0.125, 0.125, 0.125)),
    "svformer+gqa4": (dict(SV, g=4), lambda n: Fraction(n + 1, 8 * n), (0.1406, 0.1354, 0.1302)),
    "2 anchors": (dict(SV, value_anchors="1,5"), lambda n: Fraction(n + 2, 2 * n), (0.5 + 2 / 16, 0.5 + 2 / 24, 0.5 + 2 / 48)),
    "3 anchors": (dict(SV, value_anchors="1,4,8"), lambda n: Fraction(n + 3, 2 * n),
                  (0.5 + 3 / 16, 0.5 + 3 / 24, 0.5 + 3 / 48)),
}


def cache_of(options, n_layer, device, heads=16, batch=3, length=5):
    options = dict(options)
    c = GPTConfig(n_layer=n_layer, n_head=heads, n_embd=4 * heads, n_kv_head=heads // options.pop("g", 1), vocab_size=V,
                  block_size=BLOCK, n_ffn=8, **options)
    c.check()
    return KVCache(c, batch, length, device, torch.bfloat16)


def allocated(cache):
    """Bytes of the distinct storages, under however many names."""
    return sum({b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in cache.buffers.values()}.values())


@pytest.mark.parametrize("n_layer", [8, 12, 24])
@pytest.mark.parametrize("row", CACHE)
def test_cache_fractions(row, n_layer):
    options, formula, decimals = CACHE[row]
    mha = n_layer * 2 * 16 * 4 * 2 * 3 * 5  # k and v: heads * head_dim * 2 bytes * batch * tokens
    assert cache_of({}, n_layer, "meta").nbytes == mha
    cache = cache_of(options, n_layer, "meta")
    assert Fraction(cache.nbytes, mha) == formula(n_layer)
    assert float(formula(n_layer)) == pytest.approx(decimals[(8, 12, 24).index(n_layer)], abs=5e-5)
    assert cache.nbytes == sum(b.nbytes for b in cache.buffers.values()) and all(b.is_meta for b in cache.buffers.values())


@pytest.mark.parametrize("row", CACHE)
def test_cache_is_really_allocated(row):
    cache = cache_of(CACHE[row][0], 8, "cpu")
    assert allocated(cache) == cache.nbytes == CACHE[row][1](8) * (8 * 2 * 16 * 4 * 2 * 3 * 5)


@system
@groups
def test_mixes_need_no_more_cache_than_vanilla(system, groups):
    """Mixed values are cached, so no system needs more; sharing needs a buffer per own projection."""
    take = SYSTEMS[system][2]({}).get("take", {})
    buffers = sum(take.get(t, lambda n: n)(n) == n for t in "kv" for n in range(1, L + 1))
    m, made = toy(system, groups, block_size=8), []
    make = m.kv_cache
    m.kv_cache = lambda *a, **k: made.append(make(*a, **k)) or made[-1]  # as generate makes it
    m.generate(ids(2, 3), 9, temperature=0)
    assert max(map(allocated, made)) == buffers * 2 * 8 * (GROUPS[groups] or 4) * 8 * 4  # batch, tokens, heads, hd, bytes


# ---- baselines and ablations


@groups
def test_neutreno_of_one_token_mixes_by_lambda(groups):
    """l = 1: A_n = 1, so the output before W_o is (1 - λ) V_n + λ V_1; layer 1 is unchanged."""
    m, x = toy("neutreno", groups), ids(3, 1)
    seen, plain = probed(m, x), probed(toy(None, groups), x)
    assert torch.equal(seen[1]["y"], plain[1]["y"])
    for n in range(2, L + 1):
        close(seen[n]["y"], widen(0.6 * seen[n]["raw_v"] + 0.4 * seen[1]["raw_v"], m), 2e-6)


@groups
def test_neutreno_0_is_the_baseline_and_layer_1_never_changes(groups):
    x = ids(2, 11)
    assert torch.equal(toy(None, groups, neutreno=0.0)(x)[0], toy(None, groups)(x)[0])
    for name in ("neutreno", "neutreno_resformer", "identity_mapping", "cross_layer", "hidden_residual", "attention_residual"):
        close(probed(toy(name, groups), x)[1]["y"], probed(toy(None, groups), x)[1]["y"], 1e-6)


@groups
def test_neutreno_adds_after_the_heads_and_before_w_o(groups):
    """The authors' code: attn_output (B, T, C) + 0.4 (V_1 - V_n), repeated under GQA, then o_proj."""
    m, x = toy("neutreno", groups), ids(2, 9)
    seen = probed(m, x)
    for n in range(2, L + 1):
        t, group = seen[n], 4 // m.config.kv_heads
        k, v = (t[name].repeat_interleave(group, 1) for name in "kv")
        scores = (t["q"] @ k.transpose(2, 3) / math.sqrt(8)).masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
        out = flat(scores.softmax(-1) @ v)
        close(t["y"], out + 0.4 * widen(seen[1]["raw_v"] - t["raw_v"], m), 5e-6)
        assert torch.equal(flat(t["v"]), t["raw_v"])


@groups
def test_neutreno_with_resformer_corrects_by_the_mixed_value(groups):
    """0.2 (V_1 - V'_n) with V'_n = ½ (V_n + V_1) is 0.1 (V_1 - V_n): at l = 1, 0.6 V_1 + 0.4 V_n."""
    m = toy("neutreno_resformer", groups)
    seen = probed(m, ids(3, 1))
    for n in range(2, L + 1):
        close(seen[n]["y"], widen(0.6 * seen[1]["raw_v"] + 0.4 * seen[n]["raw_v"], m), 2e-6)


@groups
def test_denseformer_starts_as_vanilla_to_the_bit(groups):
    x = ids(2, 11)
    assert torch.equal(GPT(config("denseformer", groups))(x)[0], GPT(config(None, groups))(x)[0])
    assert torch.equal(toy("denseformer", groups, shake=False)(x)[0], toy(None, groups)(x)[0])


def test_denseformer_weighs_raw_block_outputs_and_the_embedding():
    """By hand, 2 layers: block 2 reads α_{1,0} X_0 + α_{1,1} X_1, ln_f reads Σ α_{2,i} X_i."""
    m, x, got = toy("denseformer", n_layer=2), ids(2, 7), {}
    with torch.no_grad():
        m.alpha.copy_(torch.tensor([0.5, 2.0, -1.0, 0.25, 3.0]))
    for i, block in enumerate(m.transformer.h, 1):
        block.register_forward_hook(lambda module, args, output, i=i: got.update({f"in{i}": args[0], i: output[0]}))
    m.transformer.ln_f.register_forward_pre_hook(lambda module, args: got.update(last=args[0]))
    m(x)
    assert torch.equal(got["in1"], m.transformer.wte(x))
    close(got["in2"], 0.5 * got["in1"] + 2 * got[1], 1e-6)
    close(got["last"], -got["in1"] + 0.25 * got[1] + 3 * got[2], 1e-6)


@groups
@pytest.mark.parametrize("system", ["query_residual", "key_residual"])
def test_query_and_key_residuals_are_the_same_before_and_after_rope(system, groups):
    m, x, rule = toy(system, groups), ids(2, 11), SYSTEMS[system][2]
    early, late = expected(m, x, rule), expected(m, x, rule, late=True)
    close(early, late, 1e-9)
    close(m(x)[0].double(), late, 3e-5)
    t = system[0]
    assert torch.equal(probed(m, x)[1][t], probed(toy(None, groups), x)[1][t])  # n = 1 unchanged


@groups
def test_hidden_residual_is_the_residual_on_q_k_and_v_at_once(groups):
    """W ½(h_n + h_1) = ½(W h_n + W h_1): where layers have equal projections, all three residuals together."""
    hidden, three = toy("hidden_residual", groups), toy(None, groups, **RES, query_residual=True, key_residual=True)
    x = ids(2, 11)
    apart = (hidden(x)[0] - three(x)[0]).abs().max()
    for m in (hidden, three):
        with torch.no_grad():
            for block in m.transformer.h:
                block.attn.c_attn.weight.copy_(m.transformer.h[0].attn.c_attn.weight)
    close(hidden(x)[0], three(x)[0], 3e-5)
    assert apart > 0.05


def maps(t, model):
    """softmax(QKᵀ/√hd) of a probed layer, (B, n_head, T, T)."""
    k, T = t["k"].repeat_interleave(4 // model.config.kv_heads, 1), t["q"].size(2)
    scores = t["q"] @ k.transpose(2, 3) / math.sqrt(8)
    return scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)


@groups
def test_attention_residual_is_half_the_first_layers_map(groups):
    m, x = toy("attention_residual", groups), ids(2, 9)
    seen = probed(m, x)
    first = maps(seen[1], m)
    for n in range(1, L + 1):
        A = 0.5 * (maps(seen[n], m) + first)
        close(A.sum(-1), torch.ones(2, 4, 9))
        close(seen[n]["y"], flat(A @ seen[n]["v"].repeat_interleave(4 // m.config.kv_heads, 1)), 5e-6)
        ones = torch.ones_like(seen[n]["v"])  # rows sum to 1: values of one come out as one
        close(m.transformer.h[n - 1].attn.attend(seen[n]["q"], seen[n]["k"], ones, None, first)[0], torch.ones(2, 4, 9, 8))


@groups
def test_identity_mapping_of_one_token_adds_the_mean(groups):
    """Eq 6 at l = 1: V_n + mean of V_1..V_{n-1}."""
    m = toy("identity_mapping", groups)
    seen = probed(m, ids(3, 1))
    assert torch.equal(seen[1]["y"], widen(seen[1]["raw_v"], m))
    for n in range(2, L + 1):
        close(seen[n]["y"], widen(seen[n]["raw_v"] + mean([seen[i]["raw_v"] for i in range(1, n)]), m), 2e-6)


@groups
@pytest.mark.parametrize("seed", [0, 1])
def test_cross_layer_with_equal_keys_is_resformer(groups, seed):
    """Eq 2 with K_m := K_n is Eq 4, ½ A_n (V_n + V_m): block 1 writes nothing and layer 2 has its norm and W^K."""
    d_kv, x, found = (GROUPS[groups] or 4) * 8, ids(2, 11, seed=seed), []
    for options in (SYSTEMS["cross_layer"][0], RES):
        m = toy(None, groups, n_layer=2, **options).double()
        first, second = m.transformer.h
        with torch.no_grad():
            first.attn.c_proj.weight.zero_()
            first.mlp.c_proj.weight.zero_()
            second.ln_1.weight.copy_(first.ln_1.weight)
            second.attn.c_attn.weight[D:D + d_kv].copy_(first.attn.c_attn.weight[D:D + d_kv])
        found.append((m(x)[0], probed(m, x)))
    (logits, seen), (resformer, other) = found
    close(logits, resformer, 1e-6)
    close(seen[2]["y"], other[2]["y"], 1e-6)
    assert seen[2]["y"].abs().max() > 0.1 and maps(other[2], m).std() > 0.1  # attention that is not uniform


# ---- combinations: sensible ones work, the others are refused with a reason

SINGLE = {  # one switch each
    "resformer": RES, "constant": CONSTANT, "learnable": LEARN, "plus": PLUS, "dense": dict(RES, value_mix="dense"),
    "sparse": dict(RES, value_layers="3-4"), "svformer": SV, "anchors": dict(SV, value_anchors="1,3"), "cla": dict(cla=2),
    "share_k": dict(share_k_every=2), "share_v": dict(share_v_every=2), "neutreno": dict(neutreno=0.4),
    **{n: {n: True} for n in ("denseformer", "query_residual", "key_residual", "hidden_residual", "attention_residual",
                              "shared_query", "shared_key", "identity_mapping", "cross_layer", "no_first_skip", "qk_norm")},
}
VALUES = {"resformer", "constant", "learnable", "plus", "dense", "sparse"}


def nonsense(a, b):
    """Pairs that take away what the other needs, or that the paper compares alone."""
    both = {a, b}
    no_own_v, no_own_k = {"svformer", "anchors", "cla", "share_v"}, {"cla", "share_k", "shared_key"}
    return bool(
        both & VALUES and both & no_own_v  # no own value to mix
        or both & {"svformer", "anchors"} and "share_v" in both  # shared already
        or both == {"svformer", "neutreno"}  # V_n is V_1
        or both == {"cla", "share_k"} or both == {"cla", "share_v"}
        or "shared_key" in both and both & {"cla", "share_k"}
        or both == {"shared_query", "query_residual"} or both == {"shared_query", "cla"}  # no projection left to every second
        or "key_residual" in both and both & no_own_k
        or "identity_mapping" in both and both & (VALUES | no_own_v | {"neutreno"})
        or "cross_layer" in both and both & (VALUES | no_own_v | no_own_k | {"key_residual", "attention_residual"}))


PAIRS = [(a, b) for a, b in itertools.combinations(SINGLE, 2)
         if all(SINGLE[b].get(k, v) == v for k, v in SINGLE[a].items())]  # else they are one option's two values


@pytest.mark.parametrize("a", SINGLE)
def test_pairs_of_systems_work_or_are_refused(a):
    wrong = []
    for b in (b for first, b in PAIRS if first == a):
        c, x = config(None, "gqa", **{**SINGLE[a], **SINGLE[b]}), ids(2, 11)
        if nonsense(a, b):
            try:
                c.check()
                wrong.append(f"{a} + {b}: not refused")
            except ValueError as e:
                assert len(str(e)) > 30, (a, b, str(e))
            continue
        try:
            m = toy(None, "gqa", **{**SINGLE[a], **SINGLE[b]})
        except ValueError as e:
            wrong.append(f"{a} + {b}: refused: {e}")
            continue
        wrong += [f"{a} + {b}: no gradient to {n}" for n, g in grads(m, x[:, :-1], x[:, 1:])[1].items()
                  if g is None or not g.any()]
        cache = m.kv_cache(2, 11)
        with torch.no_grad():
            parts = torch.cat([m.features(part, cache) for part in x.split([5, 4, 1, 1], 1)], 1)
            if (parts - m.features(x)).abs().max() > 3e-5:
                wrong.append(f"{a} + {b}: cached and uncached differ")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("options, reason", [
    (dict(RES, **SV), "value_residual.*shared_value"),
    (dict(RES, cla=2), "value_residual.*cla"), (dict(RES, share_v_every=2), "value_residual.*share_v_every"),
    (dict(CONSTANT, cla=3), "value_residual.*cla"),
    (dict(SV, share_v_every=2), "shared_value.*share_v_every"),
    (dict(cla=2, share_k_every=2), "cla.*share_k_every"), (dict(cla=2, share_v_every=2), "cla.*share_v_every"),
    (dict(cla=0), "cla=0"), (dict(share_k_every=0), "share_k_every=0"), (dict(share_v_every=-1), "share_v_every=-1"),
    (dict(RES, value_mix="dense", value_source="previous"), "dense.*value_source"),
    (dict(RES, value_mix="dense", value_lambda1=1.0), "dense.*value_lambda1"),
    (dict(RES, value_mix="dense", value_lambda2=1.0), "dense.*value_lambda2"),
    (dict(PLUS, value_lambda1=1.0), "plus.*value_lambda1"),
    (dict(value_source="2"), "value_source.*value_residual"), (dict(SV, value_source="all"), "value_source"),
    (dict(RES, value_layers="2", value_source="2"), "no earlier"),  # layer 2 has no V_2 before it
    (dict(RES, value_layers="1-3"), r"layers \[1\] have no earlier"),
    (dict(RES, value_layers="2-4", value_source="2"), r"layers \[2\] have no earlier"),
    (dict(RES, value_layers="3-"), "as 6-8"),
    (dict(cla=5), "groups of more than"), (dict(share_v_every=5), "groups of more than"),
    *[(dict({name: 0.4 if name == "neutreno" else True}, n_layer=1), f"{name}.*from layer 2")
      for name in ("shared_value neutreno query_residual key_residual hidden_residual attention_residual shared_query "
                   "shared_key identity_mapping cross_layer").split()],
    (dict(RES, value_layers="1"), "no earlier"), (dict(RES, n_layer=1), "no layer to mix"),
    (dict(value_mix="plus"), "value_residual"), (dict(value_mix="dense"), "value_residual"),
    (dict(value_layers="3"), "value_residual"), (dict(value_lambda1=2.0), "value_residual"),
    (dict(SV, value_lambda1=2.0), "value_residual"),
    (dict(value_anchors="1,2"), "value_anchors.*shared_value"), (dict(SV, value_anchors="2,3"), "layer 1"),
    (dict(SV, value_anchors="1,5"), "value_anchors.*1 to 4"),
    (dict(SV, value_anchors="one"), "value_anchors"), (dict(RES, value_layers="3-9"), "value_layers.*1 to 4"),
    (dict(shared_query=True, query_residual=True), "shared_query.*query_residual"),
    (dict(shared_key=True, key_residual=True), "key_residual.*shared_key"),
    (dict(key_residual=True, cla=2), "key_residual.*cla"), (dict(key_residual=True, share_k_every=2), "key_residual"),
    (dict(shared_key=True, cla=2), "shared_key"), (dict(shared_key=True, share_k_every=2), "shared_key"),
    (dict(SV, shared_query=True, shared_key=True), "queries, keys and values"),
    (dict(RES, identity_mapping=True), "identity_mapping"), (dict(SV, identity_mapping=True), "identity_mapping"),
    (dict(cla=2, identity_mapping=True), "identity_mapping"), (dict(neutreno=0.4, identity_mapping=True), "identity_mapping"),
    (dict(share_v_every=2, identity_mapping=True), "identity_mapping"),
    (dict(SV, neutreno=0.4), "neutreno"), (dict(share_v_every=4, neutreno=0.4), "neutreno"),
    (dict(RES, value_layers="3,4-2"), "as 6-8"),
    (dict(attention_residual=True, shared_query=True, shared_key=True), "A_1"),

    (dict(RES, cross_layer=True), "cross_layer"), (dict(SV, cross_layer=True), "cross_layer"),
    (dict(cla=2, cross_layer=True), "cross_layer"), (dict(shared_key=True, cross_layer=True), "cross_layer"),
    (dict(share_k_every=2, cross_layer=True), "cross_layer"), (dict(share_v_every=2, cross_layer=True), "cross_layer"),
    (dict(key_residual=True, cross_layer=True), "cross_layer"),
    (dict(attention_residual=True, cross_layer=True), "cross_layer"),
    (dict(cross_layer=True, value_source="all"), "cross_layer"),
], ids=str)
def test_meaningless_combinations_are_refused_with_a_reason(options, reason):
    with pytest.raises(ValueError, match=reason):
        config(**options).check()
    with pytest.raises(ValueError, match=reason), torch.device("meta"):
        GPT(config(**options))


@pytest.mark.parametrize("options", [
    dict(SV, shared_query=True, cla=2),  # layer 2 has neither q, k nor v of its own: its ln_1 would get no gradient
    dict(shared_query=True, cla=2), dict(shared_query=True, shared_key=True, share_v_every=2),
], ids=str)
def test_a_layer_without_any_projection_is_refused(options):
    with pytest.raises(ValueError, match="nothing of its own input"):
        config(**options).check()


@groups
@pytest.mark.parametrize("options", [
    dict(PLUS, value_lambda2=0.3), dict(LEARN, value_source="all"), dict(PLUS, value_source="previous"),
    dict(LEARN, value_layers="3-4", value_source="2"), dict(RES, value_mix="dense", value_layers="3-4"),
    dict(RES, neutreno=0.2, denseformer=True), dict(SV, shared_query=True), dict(SV, shared_key=True),
    dict(shared_query=True, shared_key=True), dict(RES, query_residual=True, key_residual=True, attention_residual=True),
    dict(CONSTANT, value_source="3", no_first_skip=True), dict(cross_layer=True, value_source="previous", denseformer=True),
    dict(SV, value_anchors="1,4", cla=2), dict(RES, share_k_every=2), dict(cla=4), dict(RES, dropout=0.1),
    dict(RES, value_layers="2-4"), dict(cross_layer=True, value_source="1"),
], ids=str)
def test_sensible_combinations_are_accepted(options, groups):
    config(None, groups, **options).check()
    m, x = toy(None, groups, **options), ids(2, 11)
    assert all(g is not None and g.any() for g in grads(m, x[:, :-1], x[:, 1:])[1].values())


@system
@pytest.mark.parametrize("n_kv_head", [0, 1, 2, 4])
def test_every_system_takes_any_number_of_key_value_heads(system, n_kv_head):
    config(system, n_kv_head=n_kv_head).check()
    if n_kv_head == 4:  # GQA of one query per head is MHA
        assert torch.equal(toy(system, n_kv_head=4)(ids(2, 5))[0], toy(system)(ids(2, 5))[0])


def test_the_stream_stays_float32_without_the_first_skip():
    """Under autocast block 1's output replaces the stream, in the stream's own type."""
    m, seen = toy(None, no_first_skip=True), []
    m.transformer.h[0].register_forward_hook(lambda module, args, output: seen.append(output[0].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        m(ids(2, 9))
    assert seen == [torch.float32]


def test_dropout_acts_on_explicit_attention():
    m, x = toy(None, attention_residual=True, dropout=0.5), ids(2, 9)
    for block in m.transformer.h:
        block.mlp.dropout.p = 0.0
    m.transformer.drop.p = 0.0
    drops = [d for name, d in m.named_modules() if name.endswith("attn.dropout")]
    assert len(drops) == L and torch.equal(m(x)[0], m(x)[0])
    m.train()
    torch.manual_seed(0)
    attn = m.transformer.h[0].attn
    q, k, v = torch.randn(3, 1, 4, 6, 8)
    assert not torch.equal(attn.attend(q, k, v, None)[0], attn.attend(q, k, v, None)[0])


@pytest.mark.parametrize("options", [{}, RES, SV], ids=str)
def test_scaled_init_shrinks_the_output_projections_alone(options):
    plain, scaled = ({n: p.detach() for n, p in GPT(config(None, n_layer=L, scaled_init=on, **options)).named_parameters()}
                     for on in (False, True))
    for name, p in plain.items():
        factor = math.sqrt(2 * L) if name.endswith("c_proj.weight") else 1
        close(scaled[name] * factor, p, 1e-7)
