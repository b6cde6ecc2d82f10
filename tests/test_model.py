"""
The model against its equations: vanilla, identity ResFormer, SVFormer, each with and without GQA.
What is expected comes from the paper (Eq 1, 3, 7, 10), from transformers' Llama and from plain references written here;
toy weights are ten times the initial ones, so that attention matters and a wrong mix cannot hide below a tolerance.
"""
import copy
import math
import pickle
import re
import warnings
from collections import Counter
from dataclasses import asdict
from fractions import Fraction

import pytest
import torch
from torch.nn import functional as F

import model as M
from model import GPT, GPTConfig

torch.set_num_threads(1)

SYSTEMS = {"vanilla": {}, "resformer": dict(value_residual=True), "svformer": dict(shared_value=True)}
LAMBDAS = {"vanilla": (0.0, 1.0), "resformer": (0.5, 0.5), "svformer": (1.0, 0.0)}  # V'_n = λ1 V_1 + λ2 V_n
GROUPS = {"mha": 0, "gqa": 2}  # n_kv_head of 4 heads
SIZES = {  # Table 4: n_layer, n_head, n_embd, all parameters, non-embedding parameters
    "2M": (4, 2, 16, 1_623_856, 14_992),
    "82M": (8, 8, 512, 81_901_056, 30_417_408),
    "180M": (12, 12, 768, 179_874_048, 102_648_576),
    "468M": (24, 16, 1024, 467_921_920, 364_954_624),
}
V, BLOCK = 61, 16

system = pytest.mark.parametrize("system", SYSTEMS)
groups = pytest.mark.parametrize("groups", GROUPS)


def config(system="vanilla", groups="mha", **options):
    shape = dict(block_size=BLOCK, vocab_size=V, n_layer=3, n_head=4, n_embd=32, n_ffn=48, n_kv_head=GROUPS[groups])
    return GPTConfig(**{**shape, **SYSTEMS[system], **options})


def toy(system="vanilla", groups="mha", seed=1337, **options):
    """A small model in eval mode with large weights; parameters that two systems share are equal."""
    return enliven(GPT(config(system, groups, **options), seed=seed))


@torch.no_grad()
def enliven(model):
    for name, p in model.named_parameters():
        if p.dim() == 2:
            p.mul_(10)
        elif "ln_" in name:
            p.copy_(1 + 0.3 * torch.sin(torch.arange(p.numel()) + len(name)))
    return model.eval()


def ids(*shape, seed=0, vocab=V):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def close(a, b, tol=1e-5):
    torch.testing.assert_close(a, b, atol=tol, rtol=tol)


def grads(model, x, y):
    model.zero_grad(set_to_none=True)
    loss = model(x, y)[1]
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def size(name, **options):
    n_layer, n_head, n_embd = SIZES[name][:3]
    return GPTConfig(vocab_size=50277, n_layer=n_layer, n_head=n_head, n_embd=n_embd, **options)


def on_meta(c):
    with torch.device("meta"):
        return GPT(c)


# ---- an independent reference, from the equations: one sequence, float64, a loop over layers and heads


def weights_of(model):
    return {n: p.detach().double().clone().requires_grad_() for n, p in model.named_parameters()}


def reference(w, c, idx, lambdas, source=lambda n: 1, detach=False, eq3=False):
    """Logits (T, V) of one sequence (T,): U_n = A_n (λ1 V_source + λ2 V_n) for n >= 2; eq3: [K_n; K_n], [V_n; V_1]."""
    hd, kv, T, raw = c.n_embd // c.n_head, c.n_kv_head or c.n_head, len(idx), []
    angle = torch.arange(T).double()[:, None] * c.rope_theta ** (-torch.arange(0, hd, 2).double() / hd)
    future = torch.ones(T, T, dtype=torch.bool).triu(1)

    def norm(x, gain):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain

    def rope(x):  # Llama's convention: dimension i pairs with i + hd / 2
        z = torch.complex(x[:, :hd // 2], x[:, hd // 2:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag), 1)

    x = w["transformer.wte.weight"][idx]
    for n in range(1, c.n_layer + 1):
        b = f"transformer.h.{n - 1}."
        W, h = w[b + "attn.c_attn.weight"], norm(x, w[b + "ln_1.weight"])
        q, k, v = h @ W[:c.n_embd].T, h @ W[c.n_embd:c.n_embd + kv * hd].T, h @ W[c.n_embd + kv * hd:].T
        raw.append(v if v.shape[1] else raw[0])  # SVFormer projects no values after layer 1
        first = raw[source(n) - 1].detach() if detach else raw[source(n) - 1]
        mixed = lambdas[0] * first + lambdas[1] * raw[-1] if n > 1 else v
        heads = []
        for i in range(c.n_head):
            g = i // (c.n_head // kv)  # GQA: consecutive query heads share a key/value head
            mine, theirs = slice(i * hd, (i + 1) * hd), slice(g * hd, (g + 1) * hd)
            scores = (rope(q[:, mine]) @ rope(k[:, theirs]).T / math.sqrt(hd)).masked_fill(future, -math.inf)
            if eq3 and n > 1:
                heads.append(torch.cat((scores, scores), 1).softmax(-1) @ torch.cat((v, first))[:, theirs])
            else:
                heads.append(scores.softmax(-1) @ mixed[:, theirs])
        x = x + torch.cat(heads, 1) @ w[b + "attn.c_proj.weight"].T
        gate, up = (norm(x, w[b + "ln_2.weight"]) @ w[b + "mlp.c_fc.weight"].T).chunk(2, 1)
        x = x + (gate / (1 + (-gate).exp()) * up) @ w[b + "mlp.c_proj.weight"].T
    return norm(x, w["transformer.ln_f.weight"]) @ w["lm_head.weight"].T


def reference_batch(w, c, idx, *args, **kwargs):
    return torch.stack([reference(w, c, row, *args, **kwargs) for row in idx])


# ---- numbers that must come out


@pytest.mark.parametrize("name", SIZES)
def test_parameter_counts_of_the_papers_sizes(name):
    L, _, d, total, rest = SIZES[name]
    vanilla, res, sv = (on_meta(size(name, **SYSTEMS[s])) for s in SYSTEMS)
    for m in (vanilla, res, sv):
        assert all(p.is_meta for p in m.parameters())
    assert sum(p.numel() for p in vanilla.parameters()) == total
    assert vanilla.num_params() == total and vanilla.num_params(non_embedding=True) == rest
    assert res.num_params() == total  # identity ResFormer adds nothing
    assert sv.num_params() == total - (L - 1) * d * d  # W^V of layers 2..L
    assert sv.num_params(non_embedding=True) == rest - (L - 1) * d * d


def test_defaults_are_the_82m_model():
    assert on_meta(GPTConfig(vocab_size=50277)).num_params() == SIZES["82M"][3]


@system
@groups
def test_flops_per_token(system, groups):
    """6 x (matmul weights of the blocks and the head) + 6 x n_layer x n_embd x block_size."""
    d, L, ffn, kv = 32, 3, 48, (GROUPS[groups] or 4) * 8
    values = {"svformer": 1}.get(system, L)  # layers with a W^V
    matmul = L * (2 * d * d + d * kv + 3 * d * ffn) + values * d * kv + V * d
    assert toy(system, groups).flops_per_token() == 6 * matmul + 6 * L * d * BLOCK


def test_flops_per_token_of_82m():
    expected = 6 * (8 * (4 * 512 * 512 + 3 * 512 * 1792) + 50277 * 512) + 6 * 8 * 512 * 2048
    assert on_meta(size("82M")).flops_per_token() == expected


def initial_loss(c, rows, length):
    x = ids(rows, length + 1, vocab=c.vocab_size)
    with torch.no_grad():
        return GPT(c)(x[:, :-1], x[:, 1:])[1].item()


@system
def test_initial_loss_2m(system):
    loss = initial_loss(size("2M", block_size=256, **SYSTEMS[system]), 2, 256)
    assert loss == pytest.approx(math.log(50277) + 16 * 0.02 ** 2 / 2, abs=0.05)


def test_initial_loss_82m():
    loss = initial_loss(size("82M", block_size=256), 2, 256)
    assert loss == pytest.approx(10.928, abs=0.05)  # ln 50277 + 512 * 0.02^2 / 2


# ---- KV cache


def allocated(cache):
    """Bytes of the cache's distinct storages, however many names they have."""
    storages = {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in cache.buffers.values()}
    return sum(storages.values())


@pytest.mark.parametrize("name, vanilla, svformer", [
    ("82M", 16_384, 9_216), ("180M", 36_864, 19_968), ("468M", 98_304, 51_200)])
def test_cache_bytes_per_token(name, vanilla, svformer):
    for options, expected in (({}, vanilla), (SYSTEMS["resformer"], vanilla), (SYSTEMS["svformer"], svformer)):
        assert M.KVCache(size(name, **options), 3, 5, "meta", torch.bfloat16).nbytes == 3 * 5 * expected
    # the same, really allocated: widths and layers of the size, one token
    assert allocated(M.KVCache(size(name, shared_value=True), 1, 1, "cpu", torch.bfloat16)) == svformer


@groups
@pytest.mark.parametrize("L", [2, 3, 8])
def test_svformers_cache_is_l_plus_1_of_2l(groups, L):
    sizes = {}
    for s in SYSTEMS:
        cache = toy(s, groups, n_layer=L).kv_cache(2, 7)
        assert cache.nbytes == allocated(cache)
        sizes[s] = cache.nbytes
    kv = GROUPS[groups] or 4
    assert sizes["vanilla"] == 2 * L * 2 * 7 * kv * 8 * 4  # k and v, layers, batch, tokens, heads, head_dim, float32
    assert sizes["resformer"] == sizes["vanilla"]
    assert Fraction(sizes["svformer"], sizes["vanilla"]) == Fraction(L + 1, 2 * L)


@system
def test_generation_allocates_no_more_than_it_says(system, monkeypatch):
    m, made = toy(system), []
    make = m.kv_cache
    monkeypatch.setattr(m, "kv_cache", lambda *a, **k: made.append(make(*a, **k)) or made[-1])
    m.generate(ids(2, 5), BLOCK + 3, temperature=0)
    kv_buffers = 4 if system == "svformer" else 6  # of 3 layers
    assert max(map(allocated, made)) == kv_buffers * 2 * BLOCK * 32 * 4


# ---- parity with transformers


@pytest.mark.xdist_group("transformers")  # one process imports it
@pytest.mark.parametrize("kv, theta, length", [(4, 10000.0, BLOCK), (2, 10000.0, 9), (1, 10000.0, BLOCK), (2, 50.0, BLOCK)])
def test_vanilla_is_transformers_llama(kv, theta, length):
    transformers = pytest.importorskip("transformers")
    c = config(n_kv_head=kv, rope_theta=theta)
    ours = enliven(GPT(c))
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=kv, rms_norm_eps=1e-5, rope_theta=theta, tie_word_embeddings=False, attention_bias=False,
        mlp_bias=False, max_position_embeddings=BLOCK, hidden_act="silu", attn_implementation="eager")).eval()

    def pairs(our, their):
        """(ours, theirs) tensor by tensor: c_attn is q, k, v stacked; c_fc is gate, up."""
        yield our["transformer.wte.weight"], their["model.embed_tokens.weight"]
        yield our["transformer.ln_f.weight"], their["model.norm.weight"]
        yield our["lm_head.weight"], their["lm_head.weight"]
        for i in range(3):
            a, b = f"transformer.h.{i}.", f"model.layers.{i}."
            for part, name in zip(our[a + "attn.c_attn.weight"].split([32, 8 * kv, 8 * kv]), "qkv"):
                yield part, their[f"{b}self_attn.{name}_proj.weight"]
            for part, name in zip(our[a + "mlp.c_fc.weight"].split([48, 48]), ("gate", "up")):
                yield part, their[f"{b}mlp.{name}_proj.weight"]
            yield our[a + "attn.c_proj.weight"], their[b + "self_attn.o_proj.weight"]
            yield our[a + "mlp.c_proj.weight"], their[b + "mlp.down_proj.weight"]
            yield our[a + "ln_1.weight"], their[b + "input_layernorm.weight"]
            yield our[a + "ln_2.weight"], their[b + "post_attention_layernorm.weight"]

    assert sum(a.numel() for a, _ in pairs(ours.state_dict(), theirs.state_dict())) == ours.num_params()
    for a, b in pairs(ours.state_dict(), theirs.state_dict()):
        b.copy_(a)
    x = ids(2, length)
    out = theirs(input_ids=x, labels=x)
    out.loss.backward()
    close(ours(x)[0], out.logits)
    loss, ours_grads = grads(ours, x[:, :-1], x[:, 1:])  # transformers shifts the labels itself
    close(loss, out.loss.detach())
    for a, b in pairs(ours_grads, {n: p.grad for n, p in theirs.named_parameters()}):
        close(a, b)


# ---- the method: Eq 1, 7 and 10


@system
@groups
@pytest.mark.parametrize("L", [2, 3])
def test_logits_and_gradients_are_the_equations(system, groups, L):
    m, x = toy(system, groups, n_layer=L), ids(2, 13)
    w = weights_of(m)
    logits = reference_batch(w, m.config, x[:, :-1], LAMBDAS[system])
    close(m(x[:, :-1])[0].double(), logits)
    loss = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
    loss.backward()
    ours, ours_grads = grads(m, x[:, :-1], x[:, 1:])
    close(ours.double(), loss.detach())
    for name, g in ours_grads.items():
        close(g.double(), w[name].grad)
    if system != "svformer":  # which has no values to weigh
        for other in {(0.0, 1.0), (0.5, 0.5), (1.0, 0.0), (1.0, 1.0)} - {LAMBDAS[system]}:  # the toy tells systems apart
            assert (reference_batch(w, m.config, x[:, :-1], other) - logits).abs().max() > 0.05


def test_one_layer_vanilla():
    m, x = toy(n_layer=1), ids(2, 8)
    close(m(x)[0].double(), reference_batch(weights_of(m), m.config, x, (0, 1)))


@groups
@pytest.mark.parametrize("lambdas", [(2.0, 1.0), (0.2, 0.9), (5.0, 0.0), (0.0, 1.0), (1.0, 0.0)])
def test_given_weights_are_source_then_own(groups, lambdas):
    m = toy("resformer", groups, value_lambda1=lambdas[0], value_lambda2=lambdas[1])
    x = ids(2, 9)
    close(m(x)[0].double(), reference_batch(weights_of(m), m.config, x, lambdas))


@groups
@pytest.mark.parametrize("mix", ["identity", "constant"])
def test_weights_0_1_are_vanilla_bit_for_bit(groups, mix):
    vanilla, x = toy("vanilla", groups), ids(3, BLOCK)
    m = toy("resformer", groups, value_mix=mix, value_lambda1=0.0, value_lambda2=1.0)
    assert torch.equal(m(x)[0], vanilla(x)[0])
    assert torch.equal(m(x, x)[1], vanilla(x, x)[1])


@groups
@pytest.mark.parametrize("seed", [1337, 7])
def test_svformer_is_weights_1_0_on_the_same_seed(groups, seed):
    sv, x = toy("svformer", groups, seed=seed), ids(3, BLOCK)
    m = toy("resformer", groups, seed=seed, value_lambda1=1.0, value_lambda2=0.0)
    close(sv(x)[0], m(x)[0])
    assert (sv(x)[0] - toy("vanilla", groups, seed=seed)(x)[0]).abs().max() > 0.05


@groups
def test_layer_3_uses_v1_and_not_v2(groups):
    """the source is the first layer's value, not the previous layer's, nor the previous layer's mix."""
    m, x = toy("resformer", groups, n_layer=4), ids(1, 10)
    w = weights_of(m)
    got = m(x)[0].double()
    close(got, reference_batch(w, m.config, x, (0.5, 0.5), source=lambda n: 1))
    assert (got - reference_batch(w, m.config, x, (0.5, 0.5), source=lambda n: max(1, n - 1))).abs().max() > 0.05


@groups
def test_probe_shows_the_raw_and_the_mixed_values(groups):
    """V'_3 = (V_1 + V_3) / 2 also when layer 2's W^V is zero, and then V'_2 = V_1 / 2."""
    m, x, seen = toy("resformer", groups), ids(2, 10), {}
    kv = (GROUPS[groups] or 4) * 8
    with torch.no_grad():
        m.transformer.h[1].attn.c_attn.weight[-kv:] = 0
    for block in m.transformer.h:
        block.attn.probe = lambda layer, tensors: seen.update({layer: tensors})
    m(x)
    flat = {n: t["v"].transpose(1, 2).flatten(2) for n, t in seen.items()}
    raw = {n: t["raw_v"] for n, t in seen.items()}
    assert sorted(seen) == [1, 2, 3] and not raw[2].any() and raw[3].any()
    assert torch.equal(flat[1], raw[1])
    close(flat[2], raw[1] / 2, 1e-6)
    close(flat[3], (raw[1] + raw[3]) / 2, 1e-6)


@groups
def test_eq3_with_duplicated_keys_is_identity_resformer(groups):
    """softmax(Q_n [K_n; K_n]ᵀ / √d) [V_n; V_1] = ½ A_n (V_n + V_1): Eq 3 -> 4 -> 7."""
    m, x = toy("resformer", groups), ids(2, 12)
    w = weights_of(m)
    eq3 = reference_batch(w, m.config, x, (0.5, 0.5), eq3=True)
    close(reference_batch(w, m.config, x, (0.5, 0.5)), eq3, 1e-12)
    close(m(x)[0].double(), eq3, 5e-6)  # float32 through the whole network
    # attention alone, on the tensors of the model itself
    seen = {}
    for block in m.transformer.h:
        block.attn.probe = lambda layer, tensors: seen.update({layer: tensors})
    m(x)
    future = torch.ones(12, 12, dtype=torch.bool).triu(1)
    for n in (2, 3):
        q, k = seen[n]["q"], seen[n]["k"]
        v, v1 = (seen[i]["raw_v"].unflatten(-1, (-1, 8)).transpose(1, 2) for i in (n, 1))
        k, v, v1 = (t.repeat_interleave(q.size(1) // t.size(1), 1) for t in (k, v, v1))
        scores = (q @ k.mT / math.sqrt(8)).masked_fill(future, -math.inf)
        y = torch.cat((scores, scores), -1).softmax(-1) @ torch.cat((v, v1), -2)
        close(seen[n]["y"], y.transpose(1, 2).flatten(2), 1e-6)


@groups
@pytest.mark.parametrize("system", ["resformer", "svformer"])
def test_v1_is_not_detached(system, groups):
    """dL/dW_1^V is autograd's of the equations, and differs from that of a version whose V_1 is detached."""
    m, x = toy(system, groups), ids(2, 12)
    name, kv, want = "transformer.h.0.attn.c_attn.weight", (GROUPS[groups] or 4) * 8, {}
    for detach in (False, True):
        w = weights_of(m)
        logits = reference_batch(w, m.config, x[:, :-1], LAMBDAS[system], detach=detach)
        F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()).backward()
        want[detach] = w[name].grad[-kv:]
    got = grads(m, x[:, :-1], x[:, 1:])[1][name][-kv:].double()
    close(got, want[False])
    assert (got - want[True]).norm() > 0.1 * got.norm()


# ---- causality and gradients


@system
@groups
def test_future_tokens_leave_earlier_logits_alone(system, groups):
    m, x = toy(system, groups), ids(2, BLOCK)
    before = m(x)[0]
    for t in (1, 7, BLOCK - 1):
        changed = x.clone()
        changed[:, t] = (changed[:, t] + 1) % V
        after = m(changed)[0]
        close(after[:, :t], before[:, :t], 1e-6)
        assert ((after - before)[:, t:].abs().amax(-1) > 1e-4).all()  # and every later position does look back


@system
@groups
def test_rows_of_a_batch_do_not_touch(system, groups):
    m, x = toy(system, groups), ids(3, 11)
    close(m(x)[0], torch.cat([m(row[None])[0] for row in x]))


@system
@groups
def test_every_parameter_gets_a_gradient(system, groups):
    """no parameter exists without being used, each of q, k and v included."""
    m, x = toy(system, groups, block_size=V), torch.arange(V)[None]
    _, found = grads(m.train(), x, x.roll(-1, 1))
    for name, p in m.named_parameters():
        g = found[name]
        assert torch.isfinite(g).all() and g.shape == p.shape
        rows = g.flatten(1) if g.dim() > 1 else g[:, None]
        assert (rows.abs().amax(1) > 0).all(), name  # each row: q, k and v of each head, each token's embedding


@groups
def test_svformer_projects_values_in_layer_1_only(groups):
    d, kv = 32, (GROUPS[groups] or 4) * 8
    vanilla, sv = toy("vanilla", groups, n_layer=5), toy("svformer", groups, n_layer=5)
    assert sum(p.numel() for p in vanilla.parameters()) - sum(p.numel() for p in sv.parameters()) == 4 * d * kv
    assert list(sv.state_dict()) == list(vanilla.state_dict())
    rows = [sv.state_dict()[f"transformer.h.{i}.attn.c_attn.weight"].size(0) for i in range(5)]
    assert rows == [d + 2 * kv] + 4 * [d + kv]


def test_learnable_weights_get_gradients_and_start_as_identity():
    """two scalars per layer from 2 on, none for layer 1, ½ and ½ at the start."""
    m, x = toy("resformer", value_mix="learnable"), ids(2, 12)
    plain = toy("resformer")
    mix = {n: p for n, p in m.named_parameters() if n not in plain.state_dict()}
    assert sum(p.numel() for p in mix.values()) == 2 * (3 - 1)
    assert all((p == 0.5).all() for p in mix.values())
    assert torch.equal(m(x)[0], plain(x)[0])
    _, found = grads(m, x[:, :-1], x[:, 1:])
    assert all((found[n] != 0).all() for n in mix)


# ---- initial weights


def test_same_seed_same_weights_whatever_the_global_rng():
    torch.manual_seed(1)
    a = GPT(config("resformer"), seed=5).state_dict()
    torch.manual_seed(2)
    torch.rand(17)
    b = GPT(config("resformer"), seed=5).state_dict()
    other = GPT(config("resformer"), seed=6).state_dict()
    assert list(a) == list(b) == list(other)
    for name in a:
        assert torch.equal(a[name], b[name])
        if a[name].dim() == 2:
            assert not (a[name] == other[name]).any(1).all()


def test_init_weights_again_gives_the_same_weights():
    m = GPT(config(), seed=5)
    before = copy.deepcopy(m.state_dict())
    enliven(m).init_weights(5)
    assert all(torch.equal(before[n], p) for n, p in m.state_dict().items())


@groups
def test_systems_share_their_parameters_at_the_start(groups):
    vanilla, res, sv = (GPT(config(s, groups), seed=9).state_dict() for s in SYSTEMS)
    assert list(vanilla) == list(res) == list(sv)
    for name in vanilla:
        assert torch.equal(vanilla[name], res[name])
        rows = len(sv[name])  # q and k rows of c_attn come first; v is gone after layer 1
        assert torch.equal(vanilla[name][:rows], sv[name])


def test_weights_do_not_depend_on_other_layers_or_groups():
    """A parameter's weights are a function of (seed, name): depth and other parameters' shapes play no part."""
    short, deep = (GPT(config(n_layer=n)).state_dict() for n in (2, 4))
    assert all(torch.equal(short[n], deep[n]) for n in short)
    mha, gqa = (GPT(config("vanilla", g)).state_dict() for g in GROUPS)
    for n in mha:
        rows = slice(0, 32) if "c_attn" in n else slice(None)  # queries
        assert torch.equal(mha[n][rows], gqa[n][rows])
    no_keys = GPT(config(shared_key=True)).state_dict()["transformer.h.2.attn.c_attn.weight"]  # q and v of layer 3
    q, _, v = mha["transformer.h.2.attn.c_attn.weight"].split(32)
    assert torch.equal(no_keys, torch.cat((q, v)))


@system
def test_initial_weights_are_normal_with_std_002(system):
    m = GPT(config(system, n_layer=3, n_embd=64, n_ffn=0, vocab_size=256))
    drawn = []
    for name, p in m.named_parameters():
        if p.dim() == 2:
            parts = p.split(64) if "c_attn" in name else [p]
            for part in parts:
                assert part.std().item() == pytest.approx(0.02, rel=0.06), name  # no depth scaling anywhere
                assert abs(part.mean().item()) < 5 * 0.02 / part.numel() ** 0.5, name
                assert part.abs().max() > 0.055  # a uniform's largest would be 0.035
                drawn.append(part.flatten()[:4096])
        else:
            assert (p == 1).all()
    corr = torch.corrcoef(torch.stack(drawn)) - torch.eye(len(drawn))
    assert corr.abs().max() < 0.1  # q, k, v, layers, embedding and head are drawn apart


@system
@groups
def test_meta_build_equals_direct_build(system, groups):
    direct, m = GPT(config(system, groups), seed=3), on_meta(config(system, groups))
    assert all(p.is_meta for p in m.parameters())
    m.to_empty(device="cpu")
    m.init_weights(3)
    assert all(torch.equal(p, m.state_dict()[n]) for n, p in direct.state_dict().items())
    x = ids(2, BLOCK)
    assert torch.equal(m.eval()(x)[0], direct.eval()(x)[0])  # RoPE's tables too


# ---- generation


@torch.no_grad()
def naive(model, prompt, new):
    """
    Greedy continuation of one prompt (list) without a cache, as documented: the last block_size tokens of the prompt are
    seen, and when the context is full the last block_size // 2 tokens are processed anew. Returns tokens and logits.
    """
    size = model.config.block_size
    context, out, logits = prompt[-size:], list(prompt), []
    for _ in range(new):
        if len(context) > size:
            context = context[-(size // 2):]
        logits.append(model(torch.tensor([context]))[0][0, -1])
        token = int(logits[-1].argmax())
        context, out = context + [token], out + [token]
    return out, torch.stack(logits)


def watched(model, *args, **kwargs):
    """generate's tokens and the logits (B, steps, V) it saw."""
    logits = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = model.generate(*args, **kwargs)
    finally:
        hook.remove()
    return out, torch.stack([step.reshape(len(out), -1, V)[:, -1] for step in logits], 1)


@system
@groups
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", [1, 5, BLOCK - 1, BLOCK, BLOCK + 5])
def test_cached_decoding_is_the_full_forward_pass(system, groups, batch, length):
    """every step's logits and tokens, through two changes of the context."""
    m, x, new = toy(system, groups), ids(batch, length, seed=length), BLOCK + 10
    cached, logits = watched(m, x, new, temperature=0)
    plain, plain_logits = watched(m, x, new, temperature=0, use_cache=False)
    assert cached.shape == (batch, length + new) and torch.equal(cached[:, :length], x)
    assert torch.equal(cached, plain)
    close(logits, plain_logits)
    for b in range(batch):
        tokens, naive_logits = naive(m, x[b].tolist(), new)
        assert cached[b].tolist() == tokens
        close(logits[b], naive_logits)
    assert len(set(cached.flatten().tolist())) > 3  # the toy does not just repeat itself


@system
def test_cached_decoding_of_a_deeper_model(system):
    m, x = toy(system, "gqa", n_layer=6), ids(2, 5)
    cached, logits = watched(m, x, BLOCK + 4, temperature=0)
    for b in range(2):
        tokens, naive_logits = naive(m, x[b].tolist(), BLOCK + 4)
        assert cached[b].tolist() == tokens
        close(logits[b], naive_logits)


@pytest.mark.parametrize("block", [1, 2, 7])
def test_odd_and_tiny_contexts(block):
    m, x = toy("resformer", block_size=block), ids(2, 3)
    out, _ = watched(m, x, 12, temperature=0)
    plain, _ = watched(m, x, 12, temperature=0, use_cache=False)
    assert torch.equal(out, plain)
    if block > 1:
        assert out[1].tolist() == naive(m, x[1].tolist(), 12)[0]


@system
@groups
@pytest.mark.parametrize("chunks", [[12], [1] * 12, [5] + [1] * 7, [4, 5, 3]])
def test_features_continue_the_tokens_a_cache_holds(system, groups, chunks):
    m, x = toy(system, groups), ids(2, 12)
    with torch.no_grad():
        full, cache, at, parts = m(x)[0], m.kv_cache(2, 12), 0, []
        for n in chunks:
            parts.append(m.lm_head(m.features(x[:, at:at + n], cache)))
            at += n
    close(torch.cat(parts, 1), full)
    assert cache.length == 12


def padded(prompts, fill=0):
    T = max(map(len, prompts))
    return torch.tensor([[fill] * (T - len(p)) + p for p in prompts]), torch.tensor([len(p) for p in prompts])


PROMPTS = [ids(n, seed=n).tolist() for n in (3, 8, 1, 5)]


@system
@groups
@pytest.mark.parametrize("fill", [0, 7])
def test_left_padded_prompts_equal_each_alone(system, groups, fill):
    """padding neither shifts RoPE nor is attended to, whatever stands there."""
    m = toy(system, groups)
    x, lengths = padded(PROMPTS, fill)
    out, logits = watched(m, x, BLOCK - 8, temperature=0, lengths=lengths)
    assert torch.equal(out[:, :8], x)  # prompt and continuation
    plain, _ = watched(m, x, BLOCK - 8, temperature=0, lengths=lengths.tolist(), use_cache=False)
    assert torch.equal(out, plain)
    for b, p in enumerate(PROMPTS):
        tokens, want = naive(m, p, BLOCK - 8)
        assert out[b, 8 - len(p):].tolist() == tokens
        close(logits[b], want)


@system
@groups
def test_left_padded_prompts_equal_each_alone_beyond_block_size(system, groups):
    m = toy(system, groups)
    x, lengths = padded(PROMPTS)
    out, _ = watched(m, x, 2 * BLOCK, temperature=0, lengths=lengths)
    plain, _ = watched(m, x, 2 * BLOCK, temperature=0, lengths=lengths, use_cache=False)
    assert torch.equal(out, plain)
    wrong = [len(p) for b, p in enumerate(PROMPTS) if out[b, 8 - len(p):].tolist() != naive(m, p, 2 * BLOCK)[0]]
    assert not wrong, f"prompts of these lengths continue otherwise than alone: {wrong}"


@system
def test_left_padded_prompts_wider_than_block_size(system):
    m, prompts = toy(system), [ids(n, seed=n).tolist() for n in (BLOCK + 4, 6, BLOCK, BLOCK + 1)]
    x, lengths = padded(prompts)
    out, logits = watched(m, x, 1, temperature=0, lengths=lengths)
    for b, p in enumerate(prompts):
        tokens, want = naive(m, p, 1)
        assert out[b, x.size(1) - len(p):].tolist() == tokens
        close(logits[b], want)


def test_full_lengths_are_no_padding():
    m, x = toy(), ids(2, 6)
    assert torch.equal(m.generate(x, 5, temperature=0, lengths=[6, 6]), m.generate(x, 5, temperature=0))


@pytest.mark.parametrize("lengths", [[0, 4], [4, 5], [4], [4, 4, 4], [-1, 4]])
def test_bad_lengths_are_refused(lengths):
    with pytest.raises(ValueError, match="lengths"):
        toy().generate(ids(2, 4), 1, lengths=lengths)


def test_too_long_a_prompt_warns():
    m = toy()
    with pytest.warns(UserWarning, match=f"{BLOCK + 1}.*{BLOCK}"):
        m.generate(ids(1, BLOCK + 1), 1, temperature=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        m.generate(ids(1, BLOCK), 3, temperature=0)


def test_temperature_0_and_top_k_1_are_greedy():
    m, x = toy(), ids(3, 4)
    torch.manual_seed(1)
    first = m.generate(x, 20, temperature=0)
    torch.manual_seed(2)
    assert torch.equal(m.generate(x, 20, temperature=0), first)
    assert torch.equal(m.generate(x, 20, temperature=0.0, top_k=5, top_p=0.5), first)
    assert torch.equal(m.generate(x, 20, temperature=1.0, top_k=1), first)
    assert torch.equal(m.generate(x, 20, temperature=1.0, top_p=1e-9), first)
    assert first[0].tolist() == naive(m, x[0].tolist(), 20)[0]


def test_options_that_are_off_change_nothing():
    m, x = toy(), ids(2, 4)
    plain = m.generate(x, 12, seed=3)
    for options in (dict(top_k=0), dict(top_k=None), dict(top_k=10 ** 9), dict(top_k=V), dict(top_p=1.0), dict(top_p=None),
                    dict(n_vocab=V), dict(n_vocab=None), dict(n_vocab=10 ** 6), dict(temperature=1.0)):
        assert torch.equal(m.generate(x, 12, seed=3, **options), plain), options


def drawn(logits, n=4000, **options):
    noise = torch.empty(n, len(logits)).exponential_(generator=torch.Generator().manual_seed(0))
    return Counter(M.sample(torch.tensor([logits]).expand(n, -1).contiguous(), noise, **options).tolist())


def test_top_k_keeps_exactly_k_on_ties():
    assert len(drawn([1.0, 3.0, 3.0, 3.0, 3.0, 0.0], top_k=2)) == 2
    assert set(drawn([1.0, 3.0, 3.0, 3.0, 3.0, 0.0], top_k=2)) < {1, 2, 3, 4}
    assert len(drawn([0.0] * 8, top_k=3)) == 3
    assert set(drawn([0.0, 2.0, 1.0, 3.0], top_k=3)) == {1, 2, 3}
    assert set(drawn([0.0] * 5, top_k=100)) == set(range(5))


@pytest.mark.parametrize("top_p, kept", [(1e-6, {2}), (0.45, {2}), (0.55, {2, 0}), (0.75, {2, 0}), (0.85, {2, 0, 3}),
                                         (0.97, {0, 1, 2, 3}), (1.0, {0, 1, 2, 3}), (None, {0, 1, 2, 3})])
def test_top_p_keeps_the_smallest_set(top_p, kept):
    """Probabilities 0.3, 0.05, 0.5, 0.15: the fewest most probable ids that reach top_p, also in each row of a batch."""
    assert set(drawn([math.log(p) for p in (0.3, 0.05, 0.5, 0.15)], top_p=top_p)) == kept


def test_top_p_keeps_one_of_a_tie_that_suffices():
    assert len(drawn([0.0] * 10, top_p=0.15)) == 2  # 0.1 is not enough, 0.2 is


@pytest.mark.parametrize("options, want", [
    ({}, (0.3, 0.05, 0.5, 0.15)),
    (dict(temperature=0.5), (0.09, 0.0025, 0.25, 0.0225)),  # p^(1/T)
    (dict(temperature=2.0), (0.3 ** 0.5, 0.05 ** 0.5, 0.5 ** 0.5, 0.15 ** 0.5)),
    (dict(top_k=2), (0.3, 0, 0.5, 0)),
    (dict(top_p=0.9), (0.3, 0, 0.5, 0.15)),
])
def test_samples_have_the_right_frequencies(options, want):
    n = 20000
    found = drawn([math.log(p) for p in (0.3, 0.05, 0.5, 0.15)], n, **options)
    for i, p in enumerate(want):
        assert found[i] / n == pytest.approx(p / sum(want), abs=0.015)


@pytest.mark.parametrize("temperature", [1e-5, 1e-8, 1e-30, 1e-45])
def test_tiny_temperature_is_greedy_and_no_nan(temperature):
    m, x = toy(), ids(2, 4)
    assert torch.equal(m.generate(x, 8, temperature=temperature, top_k=5, top_p=0.9), m.generate(x, 8, temperature=0))
    assert set(drawn([-1e4, 3e4, 2.9e4], temperature=temperature)) == {1}


def test_temperature_below_float32_is_greedy_and_no_nan():
    assert set(drawn([1.0, 3.0, 2.0], temperature=1e-300)) == {1}


@pytest.mark.parametrize("options, reason", [
    (dict(temperature=-0.1), "temperature"), (dict(temperature=-1), "temperature"), (dict(top_k=-1), "top_k"),
    (dict(top_p=0), "top_p"), (dict(top_p=0.0), "top_p"), (dict(top_p=-0.5), "top_p"), (dict(top_p=1.01), "top_p"),
    (dict(top_p=float("nan")), "top_p")])
def test_bad_sampling_options_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        toy().generate(ids(1, 4), 2, **options)


def test_bad_prompts_are_refused():
    m = toy()
    with pytest.raises(ValueError, match="empty"):
        m.generate(torch.empty(1, 0, dtype=torch.long), 2)
    for bad in (-1, V, 10 ** 6):
        with pytest.raises(ValueError, match="token id"):
            m.generate(torch.tensor([[1, 2], [3, bad]]), 2)


@pytest.mark.parametrize("options", [dict(temperature=0), dict(), dict(temperature=5.0), dict(top_k=10 ** 9), dict(top_p=0.99)])
def test_padded_vocabulary_is_never_sampled(options):
    m = toy()
    with torch.no_grad():
        m.lm_head.weight[50:] *= 100  # ids from 50 on would win nearly always
    x = ids(4, 4, vocab=50)
    assert (m.generate(x, 20, seed=0, **options)[:, 4:] >= 50).any()
    assert (m.generate(x, 20, seed=0, n_vocab=50, **options) < 50).all()


@system
def test_seeds_make_the_text(system):
    m, x = toy(system), ids(2, 4)
    torch.manual_seed(1)
    first = m.generate(x, 20, seed=3)
    torch.manual_seed(2)
    assert torch.equal(m.generate(x, 20, seed=3), first)
    assert torch.equal(m.generate(x, 20, seed=3, use_cache=False), first)
    other = m.generate(x, 20, seed=4)
    assert not torch.equal(other, first) and torch.equal(other[:, :4], x)


def test_rows_of_a_batch_are_sampled_apart():
    x = ids(1, 4).expand(4, 4)
    assert len({tuple(row) for row in toy().generate(x, 20, seed=0).tolist()}) == 4


@system
def test_two_calls_do_not_interfere(system):
    """no cache survives a call; two streams of one model at a time are independent too."""
    m, a, b = toy(system), ids(1, 5, seed=1), ids(3, 9, seed=2)
    alone_a, alone_b = m.generate(a, 12, temperature=0), m.generate(b, 12, temperature=0)
    assert torch.equal(m.generate(a, 12, temperature=0), alone_a)
    x = ids(2, BLOCK)
    before = m(x)[0]
    both = list(zip(m.stream(a, 12, temperature=0), m.stream(b, 12, temperature=0)))
    assert torch.equal(torch.stack([p for p, _ in both], 1), alone_a[:, 5:])
    assert torch.equal(torch.stack([q for _, q in both], 1), alone_b[:, 9:])
    assert torch.equal(m(x)[0], before)


def test_generate_leaves_its_input_and_makes_nothing_of_zero_tokens():
    m, x = toy(), ids(2, 5)
    before = x.clone()
    assert torch.equal(m.generate(x, 0), x)
    out = m.generate(x[:, 1:4], 3, temperature=0)  # a slice of a larger tensor
    assert torch.equal(x, before) and out.shape == (2, 6) and not out.requires_grad
    assert torch.equal(out, m.generate(x[:, 1:4].contiguous(), 3, temperature=0))


@system
def test_cache_is_bfloat16_under_autocast(system, monkeypatch):
    """the cache has the dtype that attention computes in, not the weights'."""
    m, x, made = toy(system), ids(2, 5), []
    make = m.kv_cache
    monkeypatch.setattr(m, "kv_cache", lambda *a, **k: made.append(make(*a, **k)) or made[-1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, logits = watched(m, x, 8, temperature=0)
        full = m(out[:, :-1])[0][:, 4:].float()
    assert {b.dtype for cache in made for b in cache.buffers.values()} == {torch.bfloat16}
    assert (logits.float() - full).abs().mean() < 0.05
    made.clear()
    watched(m, x, 2)
    assert {b.dtype for cache in made for b in cache.buffers.values()} == {torch.float32}


# ---- forward


@system
def test_forward_gives_logits_or_the_loss(system):
    m, x, y = toy(system), ids(2, 9), ids(2, 9, seed=1)
    logits, none = m(x)
    assert logits.shape == (2, 9, V) and none is None
    withheld, loss = m(x, y)
    assert loss.shape == () and (withheld is None or torch.equal(withheld, logits))
    p = logits.double().log_softmax(-1)
    close(loss.double(), -sum(p[b, t, y[b, t]] for b in range(2) for t in range(9)) / 18)


def test_slices_of_any_stride_are_accepted():
    m, data = toy("resformer"), ids(3, 24)
    x, y = data[:, 2:14], data[:, 3:15]
    assert not x.is_contiguous() and not y.is_contiguous()
    assert torch.equal(m(x)[0], m(x.contiguous())[0])
    assert torch.equal(m(x, y)[1], m(x.contiguous(), y.contiguous())[1])
    x, y = data[:, ::2], data[:, 1::2]
    assert torch.equal(m(x, y)[1], m(x.contiguous(), y.contiguous())[1])
    assert torch.equal(m(data.t()[:9], data.t()[1:10])[1], m(data.t()[:9].contiguous(), data.t()[1:10].contiguous())[1])


def test_targets_of_minus_100_are_ignored():
    m, x, y = toy(), ids(2, 9), ids(2, 9, seed=1)
    masked = y.clone()
    masked[0, 3:] = -100
    masked[1, 0] = -100
    p = m(x)[0].log_softmax(-1)
    kept = [-p[b, t, y[b, t]] for b in range(2) for t in range(9) if masked[b, t] >= 0]
    assert len(kept) == 11
    close(m(x, masked)[1], sum(kept) / 11)


def test_more_than_block_size_tokens_are_refused():
    m = toy()
    m(ids(1, BLOCK))
    for args in ((ids(1, BLOCK + 1),), (ids(1, BLOCK + 1), ids(1, BLOCK + 1))):
        with pytest.raises(ValueError, match=f"block_size.*{BLOCK}"):
            m(*args)


@system
def test_accumulation_gives_equal_gradients(system):
    """1 x 8, 2 x 4 and 8 x 1 windows: the mean of the micro-steps' means."""
    m, data = toy(system, "gqa").double(), ids(8, 13)
    found = []
    for micro in (8, 4, 1):
        m.zero_grad()
        for part in data.split(micro):
            (m(part[:, :-1], part[:, 1:])[1] * micro / 8).backward()
        found.append([p.grad.clone() for p in m.parameters()])
    for other in found[1:]:
        for a, b in zip(found[0], other):
            close(a, b, 1e-6)


@system
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_activation_checkpointing_changes_nothing_but_the_work(system, dropout):
    m, x = toy(system, "gqa", dropout=dropout).train(), ids(2, 13)
    calls = []
    for block in m.transformer.h:
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    found = {}
    for on in (False, True):
        m.activation_checkpointing = on
        torch.manual_seed(0)
        calls.clear()
        found[on] = grads(m, x[:, :-1], x[:, 1:])
        assert len(calls) == (6 if on else 3)  # each of the 3 blocks once more in the backward pass
    assert torch.equal(found[False][0], found[True][0])
    for name, g in found[False][1].items():
        close(found[True][1][name], g, 1e-6)


def test_dropout_acts_in_training_only():
    m, x = toy(dropout=0.3), ids(2, 9)
    assert torch.equal(m(x)[0], m(x)[0]) and torch.equal(m(x)[0], toy()(x)[0])
    m.train()
    assert not torch.equal(m(x)[0], m(x)[0])


# ---- optimizer


@pytest.mark.parametrize("options", [{}, SYSTEMS["resformer"], SYSTEMS["svformer"],
                                     dict(value_residual=True, value_mix="learnable")])
def test_matrices_decay_and_nothing_else(options):
    m = GPT(config(**options))
    o = m.configure_optimizers(weight_decay=0.1, learning_rate=6e-4, betas=(0.9, 0.95), value_lr_scale=3.0)
    assert isinstance(o, torch.optim.AdamW)
    name_of = {id(p): n for n, p in m.named_parameters()}
    listed = [name_of[id(p)] for g in o.param_groups for p in g["params"]]
    assert sorted(listed) == sorted(name_of.values())  # each in exactly one group
    group = {name_of[id(p)]: g for g in o.param_groups for p in g["params"]}
    plain = GPT(config()).state_dict()
    for name, p in m.named_parameters():
        g = group[name]
        assert g["betas"] == (0.9, 0.95) and g["eps"] == 1e-8 and g["lr"] == 6e-4
        assert g["weight_decay"] == (0.1 if p.dim() == 2 else 0.0), name
        assert g["lr_scale"] == (1.0 if name in plain else 3.0), name  # only the mixing weights are not vanilla's
    decayed = {n for n, g in group.items() if g["weight_decay"]}
    assert {"transformer.wte.weight", "lm_head.weight", "transformer.h.0.attn.c_attn.weight"} <= decayed
    assert not any("ln_" in n or "value_mix" in n for n in decayed)
    if options.get("value_mix") == "learnable":
        assert sum(p.numel() for n, p in m.named_parameters() if group[n]["lr_scale"] == 3.0) == 4
    assert all(g["params"] for g in o.param_groups)


def test_value_lr_scale_is_1_by_default_and_a_step_moves_every_parameter():
    m, x = toy("resformer", value_mix="learnable", block_size=V), torch.arange(V)[None]
    o = m.configure_optimizers(0.1, 1e-3, (0.9, 0.95))
    assert {g["lr_scale"] for g in o.param_groups} == {1.0}
    before = copy.deepcopy(m.state_dict())
    grads(m, x, x.roll(-1, 1))
    o.step()
    assert all((before[n] != p).any() for n, p in m.state_dict().items())


# ---- options that make no sense


@pytest.mark.parametrize("options, reason", [
    (dict(value_residual=True, shared_value=True), "value_residual.*shared_value"),
    (dict(n_embd=30), "n_embd=30.*n_head=4"),
    (dict(n_kv_head=3), "n_head=4.*n_kv_head=3"),
    (dict(n_kv_head=8), "n_head=4.*n_kv_head=8"),
    (dict(n_kv_head=-1), "n_kv_head"),
    (dict(n_embd=36), "odd"),  # head_dim 9
    (dict(block_size=0), "block_size"), (dict(vocab_size=0), "vocab_size"), (dict(n_layer=0), "n_layer"),
    (dict(n_head=0), "n_head"), (dict(n_embd=0), "n_embd"), (dict(n_ffn=-1), "n_ffn"), (dict(n_layer=-1), "n_layer"),
    (dict(dropout=1.0), "dropout"), (dict(dropout=-0.1), "dropout"), (dict(rope_theta=0.0), "rope_theta"),
    (dict(value_mix="learnable"), "value_mix.*value_residual"),
    (dict(value_mix="constant"), "value_mix.*value_residual"),
    (dict(shared_value=True, value_mix="learnable"), "value_mix.*value_residual"),
    (dict(value_lambda1=0.5), "value_lambda1.*value_residual"),
    (dict(value_lambda2=0.0), "value_lambda2.*value_residual"),
    (dict(value_layers="2"), "value_layers.*value_residual"),
    (dict(value_source="previous"), "value_source.*value_residual"),
    (dict(value_residual=True, value_source="previous", value_layers="1-2"), r"layers \[1\] have no earlier source"),
    (dict(value_source="second", value_residual=True), "value_source"),
    (dict(value_source="3", value_residual=True), "value_source"),  # the last layer has none after it
    (dict(value_source="0", value_residual=True), "value_source"),
    (dict(value_layers="4", value_residual=True), "value_layers"),
    (dict(value_layers="0-2", value_residual=True), "value_layers"),
    (dict(value_layers="two", value_residual=True), "value_layers"),
    (dict(value_layers="3-2", value_residual=True), "value_layers"),
    (dict(value_layers="1", value_residual=True), "value_layers"),  # layer 1 has no earlier layer
    (dict(n_layer=1, value_residual=True), "n_layer=1"),
    (dict(value_anchors="1,3"), "value_anchors.*shared_value"),
    (dict(value_anchors="2", shared_value=True), "value_anchors.*layer 1"),
    (dict(value_anchors="1,9", shared_value=True), "value_anchors"),
    (dict(value_mix="identitty", value_residual=True), "value_mix"),
    (dict(value_mix="plus", value_residual=True, plus_init="ones"), "plus_init"),
])
def test_options_that_make_no_sense_are_refused_with_a_reason(options, reason):
    c = config(**options)
    with pytest.raises(ValueError, match=reason):
        c.check()
    with pytest.raises(ValueError, match=reason):
        on_meta(c)


@system
@groups
def test_options_that_make_sense_are_accepted(system, groups):
    config(system, groups).check()
    config(system, groups, n_layer=2).check()
    config(system, groups, n_kv_head=1, dropout=0.1).check()


# ---- torch.compile


@system
@pytest.mark.filterwarnings("ignore")
def test_compiles_to_one_graph(system):
    """no graph breaks; the loss and gradients stay the same."""
    torch._dynamo.reset()
    m, x = toy(system, "gqa").train(), ids(2, 13)
    loss, want = grads(m, x[:, :-1], x[:, 1:])
    compiled = torch.compile(m, backend="eager", fullgraph=True)
    m.zero_grad()
    got = compiled(x[:, :-1], x[:, 1:])[1]
    got.backward()
    close(got.detach(), loss, 1e-6)
    for name, p in m.named_parameters():
        close(p.grad, want[name], 1e-6)
    with torch.no_grad():
        close(compiled(x[:, :-1])[0], m(x[:, :-1])[0], 1e-6)
    torch._dynamo.reset()


# ---- checkpoints


def save(path, m, prefix="", **changes):
    state = {prefix + n: p for n, p in m.state_dict().items()}
    torch.save({"version": 1, "model": state, "model_config": asdict(m.config), **changes}, path)
    return path


@system
@groups
def test_checkpoint_round_trip(system, groups, tmp_path):
    m, x = toy(system, groups), ids(2, BLOCK)
    path = save(tmp_path / "ckpt.pt", m, iter=7)
    for name in (path, str(path)):
        ckpt = M.load_checkpoint(name)
        assert ckpt["iter"] == 7 and ckpt["model_config"] == asdict(m.config)
        back = M.from_checkpoint(ckpt)
        assert not back.training and back.config == m.config
        assert list(back.state_dict()) == list(m.state_dict())
        assert all(torch.equal(p, m.state_dict()[n]) for n, p in back.state_dict().items())
        assert torch.equal(back(x)[0], m(x)[0])
        assert torch.equal(back.generate(x[:, :3], 20, temperature=0), m.generate(x[:, :3], 20, temperature=0))


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_prefixes_of_compile_and_ddp_are_accepted(prefix, tmp_path):
    m, x = toy("resformer", value_mix="learnable"), ids(2, 9)
    ckpt = M.load_checkpoint(save(tmp_path / "ckpt.pt", m, prefix))
    assert list(ckpt["model"]) == list(m.state_dict())
    assert torch.equal(M.from_checkpoint(ckpt)(x)[0], m(x)[0])


def test_prefixes_of_a_really_compiled_model(tmp_path):
    m = toy()
    compiled = torch.compile(m, backend="eager")
    path = tmp_path / "ckpt.pt"
    torch.save({"version": 1, "model": compiled.state_dict(), "model_config": asdict(m.config)}, path)
    assert torch.equal(M.from_checkpoint(M.load_checkpoint(path))(ids(1, 9))[0], m(ids(1, 9))[0])


def refused(path, *reasons):
    with pytest.raises(ValueError, match=re.escape(str(path))) as e:
        M.load_checkpoint(path)
    for reason in reasons:
        assert reason in str(e.value)


def test_missing_and_foreign_files_are_refused_by_name(tmp_path):
    refused(tmp_path / "none.pt")
    refused(tmp_path / "no" / "folder" / "none.pt")
    refused(tmp_path)  # a folder
    for i, garbage in enumerate([b"", b"\0", b"hello, world\n" * 99, b"PK\x03\x04" + b"\1" * 500, bytes(range(256)) * 8,
                                 b"\x80\x04.", pickle.dumps({"version": 1})]):
        path = tmp_path / f"garbage{i}.pt"
        path.write_bytes(garbage)
        refused(path)


@pytest.mark.parametrize("keep", [0.01, 0.3, 0.6, 0.9, 0.99, 0.9999])
def test_truncated_files_are_refused_by_name(keep, tmp_path):
    path = save(tmp_path / "ckpt.pt", toy())
    whole = path.read_bytes()
    path.write_bytes(whole[:int(len(whole) * keep)])
    refused(path)


@pytest.mark.parametrize("thing", [
    [1, 2], torch.zeros(3), None, 7, {"version": 1}, {"version": 1, "model": {}},
    {"version": 1, "model": None, "model_config": {}}, {"version": 1, "model": {}, "model_config": None},
    {"model": {}, "model_config": {}}, {"wte": torch.zeros(3)}], ids=str)
def test_other_peoples_files_are_refused_by_name(thing, tmp_path):
    torch.save(thing, tmp_path / "ckpt.pt")
    refused(tmp_path / "ckpt.pt")


def test_newer_checkpoints_and_unknown_options_are_refused_by_name(tmp_path):
    path, m = tmp_path / "ckpt.pt", toy()
    refused(save(path, m, version=2), "newer")
    refused(save(path, m, model_config={**asdict(m.config), "n_experts": 8}), "n_experts")


class Bomb:
    armed = []

    def __reduce__(self):
        return (Bomb.armed.append, ("went off",))


def test_checkpoints_run_no_code(tmp_path):
    path = tmp_path / "ckpt.pt"
    torch.save({"version": 1, "model": {}, "model_config": {}, "extra": Bomb()}, path)
    refused(path)
    assert Bomb.armed == []


def test_weights_of_another_model_are_refused(tmp_path):
    m = toy()
    state = m.state_dict()
    name = "transformer.h.1.mlp.c_fc.weight"
    for model, options, reason in [
        ({n: p for n, p in state.items() if n != name}, {}, name),
        ({**state, "transformer.h.9.extra": torch.ones(1)}, {}, "transformer.h.9.extra"),
        ({**state, name: torch.ones(2, 2)}, {}, name),
        (state, dict(shared_value=True), "c_attn"),
        (state, dict(n_layer=4), "transformer.h.3"),
        (state, dict(n_kv_head=3), "n_kv_head"),
    ]:
        with pytest.raises(ValueError, match=re.escape(reason)):
            M.from_checkpoint(M.load_checkpoint(save(tmp_path / "ckpt.pt", m, model=model,
                                                     model_config={**asdict(m.config), **options})))


def test_a_device_with_a_number_becomes_the_current_one(monkeypatch):
    """Kernels and graphs run on CUDA's current device, which must be the one that holds the tensors."""
    current = []
    monkeypatch.setattr(torch, "empty", lambda *size, device: None)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert [M.usable_device(name) for name in ("cuda", "cuda:1", "cpu")] == ["cuda", "cuda:1", "cpu"]
    assert current == ["cuda:1"]
