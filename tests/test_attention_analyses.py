"""
concentration, similarity, spectrum and mapping: closed forms (PAPER's definitions worked by hand), the streamed pass against
explicit attention taken with another code path, a transformers Llama, and each command on trained runs.
"""
import json
import math
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from analysis import attention, common, concentration, mapping, similarity, spectrum
from configurator import UserError, command
from model import GPT, GPTConfig

TINY = dict(n_layer=3, n_head=4, n_embd=32, block_size=24, vocab_size=64)


# ---- closed forms


@pytest.mark.parametrize("length, nats", [(20, 2.623), (100, 4.194), (500, 5.794), (2048, 7.2025)])
def test_entropy_of_uniform_causal_attention(length, nats):
    assert float(concentration.entropy(concentration.uniform(length))) == pytest.approx(nats, abs=5e-4)


def test_received_under_uniform_attention_is_harmonic():
    length = 50
    q, k = torch.zeros(2, 4, length, 8), torch.randn(2, 4, length, 8)
    a = attention.received(q, k)
    assert torch.allclose(a[0].double(), concentration.uniform(length), atol=1e-5)
    assert float(a[1, 0]) == pytest.approx(sum(1 / i for i in range(1, length + 1)), abs=1e-5)
    assert float(a[1, -1]) == pytest.approx(1 / length, abs=1e-6)


def test_all_attention_on_one_token_has_no_entropy():
    q = torch.ones(1, 1, 30, 2)
    k = torch.zeros(1, 1, 30, 2)
    k[:, :, 0] = 100
    a = attention.received(q, k)
    assert float(a[0, 0]) == pytest.approx(30) and float(concentration.entropy(a)) == pytest.approx(0, abs=1e-6)


def test_ranks_fit_the_length():
    assert concentration.ranks(2048) == {"1": 1, "2": 2, "3": 3, "10": 10, "1%": 21}
    assert concentration.ranks(4) == {"1": 1, "2": 2, "3": 3, "1%": 1}


def test_similarity_closed_form():
    assert float(similarity.similarity(torch.randn(1, 16).expand(9, 16))) == pytest.approx(1, abs=1e-6)
    assert float(similarity.similarity(7 * torch.eye(9))) == pytest.approx(0, abs=1e-6)
    assert float(similarity.similarity(torch.tensor([[1.0, 0], [-3, 0]]))) == pytest.approx(-1, abs=1e-6)
    x = torch.randn(2, 12, 5) + 0.5
    cosines = F.cosine_similarity(x[:, :, None], x[:, None], dim=-1)
    brute = torch.stack([c[~torch.eye(12, dtype=torch.bool)].mean() for c in cosines])
    assert torch.allclose(similarity.similarity(x).float(), brute, atol=1e-6)


@pytest.mark.parametrize("tokens, width", [(40, 6), (6, 40)])
def test_spectrum_closed_form(tokens, width):
    v = torch.randn(3, tokens, width) * torch.linspace(0.1, 2, width)
    found = spectrum.spectrum(v)
    assert found.shape == (3, width) and bool((found.diff() <= 0).all())
    assert torch.allclose(found.sum(-1), v.double().square().sum(-1).mean(-1))
    assert ((found > 1e-9 * found[:, :1]).sum(-1) == min(tokens, width)).all()
    assert torch.allclose(found[1, :6], (torch.linalg.svdvals(v[1].double())[:6] ** 2 / tokens))
    rank1 = spectrum.spectrum(torch.randn(1, tokens, 1) * torch.randn(width))
    assert int((rank1 > 1e-9 * rank1.max()).sum()) == 1 and float(spectrum.effective_rank(rank1)) == pytest.approx(1, abs=1e-4)
    equal = torch.tensor([2.0, 2, 2, 0, 0])
    assert float(spectrum.effective_rank(equal)) == pytest.approx(3) == float(spectrum.effective_rank(10 * equal))


def test_cross_layer_attention_to_the_same_keys_is_its_approximation():
    q, k, v, v_m = (torch.randn(2, 4, 10, 8) for _ in range(4))
    half = mapping.attend(q, k, (v + v_m) / 2)
    assert torch.allclose(mapping.cross_layer(q, k, v, k, v_m), half, atol=1e-6)
    assert torch.allclose(mapping.cosine(mapping.cross_layer(q, k, v, k, v), half * 0 + mapping.attend(q, k, v)), torch.ones(2))
    other = mapping.cosine(mapping.cross_layer(q, k, v, 3 * torch.randn_like(k), v_m), half)
    assert bool((other < 0.99).all())


# ---- the streamed pass


class Windows:
    """In place of a bin: random ids."""
    path, tokens = "random", 1000

    def windows(self, length):
        return 3

    def read(self, windows, length):
        return np.random.default_rng(0).integers(0, 64, (3, length + 1))[list(windows)]


DATA = SimpleNamespace(path="random", val={"val": Windows()})
CONFIG = common.ModelOptions(length=24, batch_size=2, sequences=3, device="cpu")


def sharp(config):
    """A GPT whose attention is far from uniform, which random weights would give."""
    model = GPT(config, 1).eval()
    for block in model.transformer.h:
        if block.attn.c_attn is not None:
            block.attn.c_attn.weight.data *= 12
    return model


def explicit(model, n, ids):
    """
    A_n (B, heads, T, T), read out of the model: with one-hot values, the output of its own attend is its weights.
    """
    found, attn = {}, model.transformer.h[n - 1].attn
    attend = attn.attend

    def spy(q, k, v, mask, first=None, **rest):
        B, kv, S = k.shape[:3]
        weights, _ = attend(q, k, torch.eye(S).expand(B, kv, S, S), mask, first)
        found["weights"] = weights[..., :S // 2] + weights[..., S // 2:] if attn.cross else weights
        return attend(q, k, v, mask, first)
    attn.attend = spy
    with torch.no_grad():
        model(ids)
    del attn.attend
    return found["weights"]


@pytest.mark.parametrize("options", [
    {}, {"n_kv_head": 2}, {"cross_layer": True}, {"cross_layer": True, "value_source": "previous", "n_kv_head": 1},
    {"attention_residual": True, "n_kv_head": 2}, {"query_residual": True, "key_residual": True}, {"shared_value": True},
    {"cla": 2}, {"value_residual": True}, {"denseformer": True}, {"hidden_residual": True}])
def test_streamed_importance_is_that_of_explicit_attention(options):
    model, found = sharp(GPTConfig(**TINY, **options)), {}

    def visit(n, t):
        if n:
            found.setdefault(n, []).append(t.importance())

    attention.walk_gpt(CONFIG, model, DATA, visit)
    ids = torch.from_numpy(DATA.val["val"].read([0, 1, 2], 24)[:, :-1])
    for n in (1, 2, 3):
        expected = explicit(model, n, ids).mean(1).sum(1)
        streamed = torch.cat(found[n])
        assert torch.allclose(streamed, expected, atol=1e-5)
        assert torch.allclose(streamed.sum(-1), torch.full((3,), 24.0), atol=1e-4)
        assert not torch.allclose(streamed.double(), concentration.uniform(24), atol=0.5)
    assert all(b.attn.probe is None and not b._forward_pre_hooks for b in model.transformer.h)


@pytest.mark.parametrize("budget", [1, 500, 24 * 24 * 3 * 2 * 4])
def test_importance_does_not_depend_on_the_chunks(budget):
    q, k = torch.randn(3, 4, 24, 8), torch.randn(3, 2, 48, 8)
    assert torch.allclose(attention.received(q, k, budget), attention.received(q, k), atol=1e-5)


def test_what_a_layer_shows():
    """hidden states, raw and mixed values against the model's own modules."""
    model, got = sharp(GPTConfig(**TINY, value_residual=True, n_kv_head=2)), {}
    config = common.ModelOptions(length=24, batch_size=3, sequences=3, device="cpu")
    attention.walk_gpt(config, model, DATA, lambda n, t: got.update({n: t}))
    ids = torch.from_numpy(DATA.val["val"].read([0, 1, 2], 24)[:, :-1])
    h = model.transformer.h
    assert torch.equal(got[0].hidden, model.transformer.wte(ids))
    with torch.no_grad():
        assert torch.equal(model.transformer.ln_f(got[3].hidden), model.features(ids))
        own = h[1].attn.c_attn(h[1].ln_1(got[1].hidden))[..., -16:]
        first = h[0].attn.c_attn(h[0].ln_1(got[0].hidden))[..., -16:]
    assert torch.allclose(got[2].raw_values, own, atol=1e-6)
    assert torch.allclose(got[2].values, (own + first) / 2, atol=1e-6)
    assert torch.equal(got[1].values, got[1].raw_values)


def test_key_similarity_is_of_the_layers_own_keys_by_head():
    model, got = sharp(GPTConfig(**TINY, cross_layer=True, n_kv_head=2)), {}
    config = common.ModelOptions(length=24, batch_size=3, sequences=3, device="cpu")
    attention.walk_gpt(config, model, DATA, lambda n, t: got.update({n: t}))
    count, found = similarity.measure(lambda visit: attention.walk_gpt(CONFIG, model, DATA, visit), "keys")
    k = got[2].k[:, :, :24]  # the second half is layer 1's
    assert got[2].k.shape == (3, 2, 48, 8) and torch.equal(got[2].k[:, :, 24:], got[1].k)
    cosines = F.cosine_similarity(k[:, :, :, None], k[:, :, None], dim=-1)  # (B, heads, T, T)
    assert count == 3 and found[2] == pytest.approx(float(cosines[..., ~torch.eye(24).bool()].mean()), abs=1e-5)


def test_mapping_against_model_of_that_system():
    """Eq 2's output of layer 2 is that of the cross_layer model, and Eq 6's that of the identity_mapping model."""
    plain, got = sharp(GPTConfig(**TINY, n_kv_head=2)), {}
    systems = [GPT(GPTConfig(**TINY, n_kv_head=2, **o)).eval() for o in (
        {"cross_layer": True, "value_source": "previous"}, {"identity_mapping": True})]
    for i, model in enumerate(systems):
        model.load_state_dict(plain.state_dict())
        attention.walk_gpt(CONFIG, model, DATA, lambda n, t, i=i: n == 2 and got.setdefault(i, []).append(t.y))
    expected = F.cosine_similarity(torch.cat(got[0]), torch.cat(got[1]), dim=-1).mean()
    count, found = mapping.measure(lambda visit: attention.walk_gpt(CONFIG, plain, DATA, visit))
    assert count == 3 and found["identity"][2] == pytest.approx(float(expected), abs=1e-5) and abs(expected) < 0.99
    assert found["identity"][2] == found["identity_previous"][2]
    # layer 3, with every sum written out
    at, attn = {}, plain.transformer.h[2].attn
    config = common.ModelOptions(length=24, batch_size=3, sequences=3, device="cpu")
    attention.walk_gpt(config, plain, DATA, lambda n, t: at.update({n: t}))

    def every_head(v):
        return attn.all_heads(v.unflatten(2, (-1, 8)).transpose(1, 2)).transpose(1, 2).flatten(2)
    v1, v2, v3 = (every_head(at[n].raw_values) for n in (1, 2, 3))
    ids = torch.from_numpy(DATA.val["val"].read([0, 1, 2], 24)[:, :-1])
    a3 = explicit(plain, 3, ids)  # (B, heads, T, T)

    def flat(weights, v):
        return (weights @ v.unflatten(2, (4, 8)).transpose(1, 2)).transpose(1, 2).flatten(2)
    both = torch.cat((at[3].k, at[2].k), 2).repeat_interleave(2, 1)
    allowed = torch.ones(24, 24).tril().bool().repeat(1, 2)
    weights = (at[3].q @ both.mT / 8 ** 0.5).masked_fill(~allowed, -math.inf).softmax(-1)
    cross = flat(weights[..., :24], v3) + flat(weights[..., 24:], v2)
    for name, other in (("approximation", flat(a3, v3 + v2) / 2), ("identity", flat(a3, v3) + (v1 + v2) / 2),
                        ("identity_previous", flat(a3, v3) + v2)):
        assert found[name][3] == pytest.approx(float(F.cosine_similarity(cross, other, dim=-1).mean()), abs=1e-5)


# ---- transformers

GROUP = pytest.mark.xdist_group("transformers")  # one process imports it


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tiny random Llama with its tokenizer, and a text."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("hf")
    words = {"<s>": 0, "<unk>": 1, **{f"w{i}": i + 2 for i in range(60)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>").save_pretrained(
        folder / "llama")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=40, initializer_range=0.4))
    model.save_pretrained(folder / "llama")
    (folder / "text.txt").write_text(" ".join(f"w{i * i % 59}" for i in range(200)))
    return folder


@GROUP
def test_llama_is_measured_as_transformers_gives_it(llama, run_command):
    import transformers
    options = [f"--hf={llama}/llama", f"--text={llama}/text.txt", "--device=cpu", "--sequences=5", "--batch_size=2"]
    for module in ("concentration", "similarity"):
        assert run_command(module, *options, f"--out_dir={llama}/out")[0] == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(llama / "llama", attn_implementation="eager").eval()
    ids = [i * i % 59 + 2 for i in range(200)]
    picked = np.linspace(0, 4, 5).round().astype(int)  # (200 - 1) // 39 windows of BOS and 39 tokens
    batch = torch.tensor([[0, *ids[39 * w:39 * w + 39]] for w in picked])
    with torch.no_grad():
        out = model(batch, output_attentions=True, output_hidden_states=True)
        values = model.model.layers[1].self_attn.v_proj(model.model.layers[1].input_layernorm(out.hidden_states[1]))
    result = json.loads((llama / "out/concentration.json").read_text())["models"]["llama"]
    assert result["sequences"] == 5 and [x["layer"] for x in result["layers"]] == [1, 2, 3]
    for layer, weights in zip(result["layers"], out.attentions):
        share = weights.mean(1).sum(1) / 40
        assert layer["first_importance"] == pytest.approx(float(share[:, 0].mean()), rel=1e-4)
        assert layer["entropy"] == pytest.approx(float(-(share * share.log()).sum(-1).mean()), rel=1e-4)
        assert layer["top"]["2"] == pytest.approx(float(share.sort(-1).values[:, -2].mean()), rel=1e-4)
    assert result["layers"][1]["others_value_norm"] == pytest.approx(float(values.norm(dim=-1)[:, 1:].mean()), rel=1e-4)
    hidden = json.loads((llama / "out/similarity.json").read_text())["models"]["llama"]
    assert hidden["layers"] == [0, 1, 2, 3]  # the last of transformers' hidden states is after the norm, and not compared
    for s, h in zip(hidden["similarity"], out.hidden_states[:3]):
        cosines = F.cosine_similarity(h[:, :, None], h[:, None], dim=-1)
        assert s == pytest.approx(float((cosines.sum((1, 2)) - 40).mean() / (40 * 39)), abs=1e-4)


@GROUP
@pytest.mark.parametrize("module, changes, words", [
    ("concentration", {"--text": None}, "needs --text"), ("concentration", {"--hf": "nowhere"}, "config.json"),
    ("concentration", {"--length": "41"}, "max_position_embeddings=40"), ("similarity", {"--of": "keys"}, "--of=keys"),
    ("similarity", {"--hf": None}, "run folder"), ("concentration", {"--text": "nothing.txt"}, "nothing.txt")])
def test_bad_options_of_transformers_models(llama, run_command, module, changes, words):
    options = {"--hf": f"{llama}/llama", "--text": f"{llama}/text.txt", "--device": "cpu", **changes}
    code, _, err = run_command(module, *(f"{k}={v}" for k, v in options.items() if v is not None))
    assert code == 2 and words in err and err.count("\n") == 1


@GROUP
def test_without_transformers_it_says_what_to_install(llama, run_command, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = run_command("similarity", f"--hf={llama}/llama", f"--text={llama}/text.txt", "--device=cpu")
    assert code == 2 and "pip install transformers" in err


@GROUP
def test_a_model_unlike_llama_is_refused(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="not built like Llama"):
        attention.load_hf(attention.Options(hf=str(tmp_path), device="cpu"), "AutoModelForCausalLM")


# ---- the commands


MODULES = {"concentration": concentration, "similarity": similarity, "spectrum": spectrum, "mapping": mapping}


@pytest.fixture
def run_command(monkeypatch, capsys):
    """run_command(module's name, *arguments): (exit code, stdout, stderr)."""
    def run(name, *args):
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        code = 0
        try:
            command(MODULES[name].main)
        except SystemExit as e:
            code = e.code
        return (code, *capsys.readouterr())
    return run


def numbers(x):
    if isinstance(x, dict):
        x = list(x.values())
    if isinstance(x, list):
        return [n for y in x for n in numbers(y)]
    return [x] if isinstance(x, (int, float)) else []


FAST = ("--device=cpu", "--sequences=6", "--length=24")
NAMES = [f"{s}/seed{n}" for s in ("vanilla", "resformer", "svformer", "learnable", "gqa") for n in (1, 2)]


def run_on(trained, run_command, tmp_path, name, *options):
    code, out, err = run_command(name, trained / "runs", *FAST, f"--out_dir={tmp_path}", *options)
    assert code == 0
    content = json.loads((tmp_path / f"{name}.json").read_text())
    assert content["length"] == 24 and all(math.isfinite(n) for n in numbers(content)) and len(numbers(content)) > 10
    assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG" and (tmp_path / f"{name}.png").stat().st_size > 10000
    for model in content["models"]:
        assert model in out
    return content["models"], out, err


def test_concentration_command(trained, run_command, tmp_path, monkeypatch):
    drawn, draw = [], concentration.plot.draw
    monkeypatch.setattr("analysis.plot.draw", lambda path, panels, *words: drawn.extend(panels) or draw(path, panels, *words))
    models, out, err = run_on(trained, run_command, tmp_path, "concentration", "--batch_size=3")
    assert list(models) == NAMES and "left out" not in err
    share = [sum(1 / q for q in range(i, 25)) / 24 for i in range(1, 25)]
    uniform = -sum(s * math.log(s) for s in share)
    for name, result in models.items():
        assert result["system"] == name.split("/")[0] and result["sequences"] == 6 and len(result["layers"]) == 4
        for x in result["layers"]:
            assert 0 < x["entropy"] <= math.log(24) and sum(x["positions"]["importance"]) == pytest.approx(1, abs=1e-4)
            assert x["entropy_ratio"] == pytest.approx(x["entropy"] / uniform, abs=1e-4)
            assert x["top"]["1"] >= x["top"]["2"] >= x["top"]["3"] >= x["top"]["10"] > 0
            assert x["first_value_norm"] == x["positions"]["value_norm"][0]
            mixes = name.split("/")[0] in ("resformer", "learnable") and x["layer"] > 1
            assert (x["first_value_norm"] != x["first_raw_value_norm"]) == mixes
    sinks = [max(result["layers"], key=lambda x: x["first_importance"]) for result in models.values()]  # where to look for one
    assert [[ys for of in panel["series"].values() for _, ys in of] for panel in drawn[-2:]] == [
        [layer["positions"][name] for layer in sinks] for name in ("importance", "value_norm")]
    sv = models["svformer/seed1"]["layers"]  # every layer attends with V_1
    assert len({x["first_value_norm"] for x in sv}) == 1 and len({x["first_hidden_norm"] for x in sv}) == 4


def test_similarity_command(trained, run_command, tmp_path):
    models, _, _ = run_on(trained, run_command, tmp_path, "similarity", "--random=True")
    assert list(models) == [n + r for n in NAMES for r in ("", " (random)")]
    assert all(r["layers"] == [0, 1, 2, 3, 4] for r in models.values())
    # the same seed starts vanilla and ResFormer from the same embeddings
    assert models["vanilla/seed1 (random)"]["similarity"][0] == models["resformer/seed1 (random)"]["similarity"][0]
    assert models["vanilla/seed1 (random)"]["similarity"] != models["vanilla/seed1"]["similarity"]
    keys, _, _ = run_on(trained, run_command, tmp_path, "similarity", "--of=keys")
    assert all(r["layers"] == [1, 2, 3, 4] for r in keys.values()) and list(keys) == NAMES


def raw_values(run):
    """{layer: V_n (windows, T, C)} before mixing, over the windows that FAST measures, from the weights themselves."""
    config, runs = common.arguments(spectrum.Config, [str(run), *FAST])
    model, found = runs[0].model(), {}
    ids = torch.cat(list(common.windows(config, common.open_data(config, runs[0]))))
    for n, block in enumerate(model.transformer.h, 1):
        block.attn.register_forward_pre_hook(lambda module, args, n=n: found.update({n: (module, args[0])}))
    with torch.no_grad():
        model(ids)
        return {n: x @ module.c_attn.weight[-x.size(-1):].T for n, (module, x) in found.items()}


def test_spectrum_command(trained, run_command, tmp_path):
    models, out, err = run_on(trained, run_command, tmp_path, "spectrum", "--layer=2")
    assert [m for m in models if m.endswith("mixed")] == [
        f"{s}/seed{n} mixed" for s in ("resformer", "learnable") for n in (1, 2)]
    assert [x["values_of"] for x in models["svformer/seed1"]["layers"]] == [1, 1, 1, 1]
    assert len({x["largest"] for x in models["svformer/seed1"]["layers"]}) == 1
    assert len(models["gqa/seed1"]["spectrum"]["eigenvalues"]) == 16
    assert len(models["vanilla/seed1"]["spectrum"]["normalised"]) == 32
    assert [x["layer"] for x in models["resformer/seed1 mixed"]["layers"]] == [2, 3, 4]
    raw = raw_values(trained / "runs/resformer/seed1")
    for n, x in enumerate(models["resformer/seed1"]["layers"], 1):
        assert x["sum"] == pytest.approx(float(raw[n].square().sum(-1).mean()), rel=1e-3)  # Σ λ = mean |v|²
    for result in models.values():
        assert sum(result["spectrum"]["normalised"]) == pytest.approx(1, abs=1e-4)
        assert sum(result["spectrum"]["eigenvalues"]) == pytest.approx(
            next(x for x in result["layers"] if x["layer"] == 2)["sum"], rel=1e-4)
        assert all(1 <= x["effective_rank"] <= 24 for x in result["layers"])
    code, _, err = run_command("spectrum", trained / "runs", *FAST, "--layer=9")
    assert code == 2 and "vanilla/seed1: left out: it has 4 layers" in err and "none of these runs can be used" in err


def test_mapping_command_leaves_out_what_mixes_or_shares_values(trained, run_command, tmp_path):
    models, _, err = run_on(trained, run_command, tmp_path, "mapping")
    assert list(models) == ["vanilla/seed1", "vanilla/seed2", "gqa/seed1", "gqa/seed2"]
    assert err.count("left out") == 6 and "svformer/seed2: left out: " in err and "shared_value=True" in err
    assert all(r["layers"] == [2, 3, 4] for r in models.values())
    assert not mapping.why_not(GPTConfig(scaled_init=True)) and "qk_norm=True" in mapping.why_not(GPTConfig(qk_norm=True))
    code, out, err = run_command("mapping", trained / "runs/svformer", *FAST, f"--out_dir={tmp_path}/none")
    assert code == 0 and "left out" in err and "nothing to show" in out and not (tmp_path / "none").exists()


def test_a_run_without_a_checkpoint_is_left_out(trained, run_command, tmp_path):
    shutil.copytree(trained / "runs/vanilla", tmp_path / "runs")
    (tmp_path / "runs/seed1/ckpt.pt").unlink()
    code, out, err = run_command("similarity", tmp_path / "runs", *FAST)
    assert code == 0 and "seed1: left out" in err and "ckpt.pt" in err
    assert list(json.loads((tmp_path / "runs/similarity.json").read_text())["models"]) == ["runs/seed2"]


def test_bfloat16_is_close_to_float32(trained, run_command, tmp_path):
    found = []
    for dtype in ("float32", "bfloat16"):
        run_command("concentration", trained / "runs/vanilla/seed1", *FAST, f"--dtype={dtype}", f"--out_dir={tmp_path}")
        found.append(json.loads((tmp_path / "concentration.json").read_text())["models"]["vanilla/seed1"]["layers"])
    for a, b in zip(*found):
        assert a["entropy"] == pytest.approx(b["entropy"], abs=0.02) and a["first_value_norm"] != b["first_value_norm"]


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("option, words", [
    ("--length=1", "at least 2"), ("--length=99", "block_size"), ("--bin=Wiki", "--bin=Wiki"), ("--dtype=int8", "dtype"),
    ("--colour=red", "unknown option")])
def test_bad_options_end_with_one_line(trained, run_command, name, option, words):
    code, _, err = run_command(name, trained / "runs/vanilla/seed1", "--device=cpu", option)
    assert code == 2 and words in err and err.count("\n") == 1
