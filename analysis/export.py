"""
A vanilla checkpoint as a Llama of Hugging Face's transformers, and back.

    python -m analysis.export out/vanilla --out_dir=hf/vanilla            # config.json, model.safetensors, README.md
    python -m analysis.export out --out_dir=hf                            # every vanilla run below out, in a folder each
    python -m analysis.export --from_hf=hf/vanilla --out_dir=out/back     # ckpt.pt and config.json: sample.py reads them

    model = transformers.AutoModelForCausalLM.from_pretrained("hf/vanilla")

Weights are copied, in float32, and the logits of both models compared before the command ends. transformers' Llama has no
value residual, shared values or other system of this repository, so only vanilla, with or without GQA, can be exported.
"""
import dataclasses
import os
import sys
from dataclasses import dataclass

import torch

import train
from analysis import common
from configurator import UserError, command
from model import CHECKPOINT_VERSION, GPT, GPTConfig, load_checkpoint
from prepare import get_tokenizer

SHAPE = ("block_size", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "n_ffn", "rope_theta")
TOLERANCE = 1e-4  # of the logits, relative to the largest; float32 sums in another order differ by some 1e-6


@dataclass
class Config(common.Options):
    out_dir: str = ""  # where the model goes; empty: hf/ in the run's folder. Several runs: a folder each
    from_hf: str = ""  # a folder with a Llama in transformers' format, to become a run folder in out_dir
    tokenizer: str = ""  # of the Llama, as prepare.py's option; empty: what export.py noted, else the folder's tokenizer.json


def pairs(config):
    """[(our parameter, Llama's names of its parts, their rows)]: one of ours holds q, k, v, or gate and up."""
    kv, out = config.kv_heads * config.head_dim, []
    for i in range(config.n_layer):
        ours, theirs = f"transformer.h.{i}.", f"model.layers.{i}."
        out += [
            (ours + "ln_1.weight", [theirs + "input_layernorm.weight"], None),
            (ours + "attn.c_attn.weight", [f"{theirs}self_attn.{t}_proj.weight" for t in "qkv"], [config.n_embd, kv, kv]),
            (ours + "attn.c_proj.weight", [theirs + "self_attn.o_proj.weight"], None),
            (ours + "ln_2.weight", [theirs + "post_attention_layernorm.weight"], None),
            (ours + "mlp.c_fc.weight", [f"{theirs}mlp.{t}_proj.weight" for t in ("gate", "up")], [config.ffn, config.ffn]),
            (ours + "mlp.c_proj.weight", [theirs + "mlp.down_proj.weight"], None)]
    return [("transformer.wte.weight", ["model.embed_tokens.weight"], None), *out,
            ("transformer.ln_f.weight", ["model.norm.weight"], None), ("lm_head.weight", ["lm_head.weight"], None)]


def to_llama(state, config):
    """Our state_dict with Llama's names. Both rotate halves (not neighbours) in RoPE, so no row changes its place."""
    out = {}
    for ours, theirs, rows in pairs(config):
        parts = state[ours].split(rows) if rows else [state[ours]]
        out.update({name: part.clone() for name, part in zip(theirs, parts)})  # safetensors takes no views of one storage
    return out


def from_llama(state, config):
    return {ours: torch.cat([state[name].float() for name in theirs]) for ours, theirs, _ in pairs(config)}


def not_vanilla(shape):
    """What Llama has no counterpart of, as text; empty for a vanilla model."""
    default = GPTConfig()
    return ", ".join(f"{f.name}={getattr(shape, f.name)}" for f in dataclasses.fields(GPTConfig)
                     if f.name not in (*SHAPE, "dropout", "scaled_init") and getattr(shape, f.name) != getattr(default, f.name))


def llama_classes():
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
        return LlamaConfig, LlamaForCausalLM
    except ImportError as e:
        raise UserError(f"this needs the package transformers ({e}): pip install transformers") from None


def tokenizer_note(facts):
    """How to get the ids that the model was trained on, as text."""
    name = facts["tokenizer"]
    if name == "bytes":
        how = f"ids are the text's UTF-8 bytes, and {facts['eot']} is end-of-text; transformers has no such tokenizer"
    elif name.endswith((".json", ".tiktoken")):
        how = f"the file {os.path.basename(name)} (a tokenizer.json was copied here)" if name.endswith(".json") else \
            f"tiktoken with the ranks of {os.path.basename(name)}"
    else:
        how = f'tiktoken.get_encoding("{name}")' + (
            ', whose ids are those of transformers.AutoTokenizer.from_pretrained("gpt2")' if name == "gpt2" else "")
    return f"tokenizer: {how}. Ids from {facts['vocab_size']} on are padding of the vocabulary: never sample them."


@torch.no_grad()
def difference(ours, llama):
    """The largest difference of the logits on random ids, relative to the largest logit. Raises UserError beyond TOLERANCE."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(ours.config.vocab_size, (2, min(64, ours.config.block_size)), generator=g)
    mine, theirs = ours(ids)[0], llama(ids).logits.float()
    worst = ((mine - theirs).abs().max() / mine.abs().max()).item()
    if not worst <= TOLERANCE:
        raise UserError(f"the logits of the two models differ by {worst:.1e} of the largest: a bug; please report it")
    return worst


def export(run, folder):
    """Write run's model to a folder; returns the difference of logits after reading it back. Raises UserError."""
    LlamaConfig, LlamaForCausalLM = llama_classes()
    ckpt, shape, model = run.checkpoint(), run.shape, run.model()
    facts = {k: ckpt["data"][k] for k in ("tokenizer", "vocab_size", "eot")}
    config = LlamaConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.n_embd, intermediate_size=shape.ffn, num_hidden_layers=shape.n_layer,
        num_attention_heads=shape.n_head, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, hidden_act="silu",
        max_position_embeddings=shape.block_size, rms_norm_eps=1e-5, rope_theta=shape.rope_theta, attention_bias=False,
        mlp_bias=False, tie_word_embeddings=False, bos_token_id=facts["eot"], eos_token_id=facts["eot"], pad_token_id=None,
        nanoresformer={**facts, "data": run.config.get("data", "")})
    with torch.device("meta"):
        llama = LlamaForCausalLM(config)
    os.makedirs(folder, exist_ok=True)
    llama.save_pretrained(folder, state_dict=to_llama(ckpt["model"], shape))
    if facts["tokenizer"].endswith(".json") and os.path.isfile(facts["tokenizer"]):
        with open(facts["tokenizer"], "rb") as f:
            content = f.read()
        train.write_whole(os.path.join(folder, "tokenizer.json"), lambda f: f.write(content))
    note = (f"# {run.name}\n\nA Llama exported from nanoResFormer, trained for {ckpt['iter']} iterations.\n\n"
            f"{tokenizer_note(facts)}\n")
    train.write_whole(os.path.join(folder, "README.md"), lambda f: f.write(note.encode()))
    print(tokenizer_note(facts))
    return difference(model, LlamaForCausalLM.from_pretrained(folder, local_files_only=True).float().eval())


def import_llama(config):
    """Write a run folder from --from_hf; returns the difference of logits. Raises UserError for what our model can't be."""
    where = f"--from_hf={config.from_hf}"
    _, LlamaForCausalLM = llama_classes()
    from transformers import AutoConfig
    if not os.path.isfile(os.path.join(config.from_hf, "config.json")):
        raise UserError(f"{where}: no folder with a config.json; give one that transformers' save_pretrained wrote")
    if not config.out_dir or os.path.exists(os.path.join(config.out_dir, "ckpt.pt")):
        raise UserError(f"--out_dir={config.out_dir}: expected a folder without a ckpt.pt, for the run to be written")
    try:
        theirs = AutoConfig.from_pretrained(config.from_hf, local_files_only=True)
        rope = dict(getattr(theirs, "rope_parameters", None) or getattr(theirs, "rope_scaling", None) or {})
        for name, found, expected in [
            ("model_type", theirs.model_type, "llama"), ("hidden_act", getattr(theirs, "hidden_act", None), "silu"),
            ("rms_norm_eps", getattr(theirs, "rms_norm_eps", None), 1e-5),
            ("attention_bias", getattr(theirs, "attention_bias", False), False),
            ("mlp_bias", getattr(theirs, "mlp_bias", False), False),
            ("rope_type", rope.get("rope_type", rope.get("type", "default")), "default"),
            ("head_dim", getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads,
             theirs.hidden_size // theirs.num_attention_heads),
        ]:
            if found != expected:
                raise UserError(f"{where}: {name}={found}, and this repository's model has {expected} only")
        llama = LlamaForCausalLM.from_pretrained(config.from_hf, local_files_only=True).float().eval()
    except (OSError, ValueError, RuntimeError, AttributeError) as e:
        raise UserError(f"{where}: transformers can't load it ({type(e).__name__}: {e})") from None
    shape = GPTConfig(block_size=theirs.max_position_embeddings, vocab_size=theirs.vocab_size, n_layer=theirs.num_hidden_layers,
                      n_head=theirs.num_attention_heads, n_kv_head=theirs.num_key_value_heads, n_embd=theirs.hidden_size,
                      n_ffn=theirs.intermediate_size, rope_theta=float(rope.get("rope_theta") or theirs.rope_theta))
    noted, file = getattr(theirs, "nanoresformer", {}), os.path.join(config.from_hf, "tokenizer.json")
    name = config.tokenizer or noted.get("tokenizer") or (file if os.path.exists(file) else "")
    if name.endswith(".json") and not os.path.exists(name) and os.path.exists(file):
        name = file  # exported on another machine
    if not name:
        raise UserError(f"{where}: has no tokenizer.json; name its tokenizer with --tokenizer")
    tokenizer = get_tokenizer(name)
    if tokenizer.n_vocab > shape.vocab_size:
        raise UserError(f"--tokenizer={name}: has {tokenizer.n_vocab} tokens, and the model only {shape.vocab_size} rows; give "
                        "the one it was trained with")
    try:
        model = GPT(shape).eval()
        model.restore(from_llama(llama.state_dict(), shape))
    except ValueError as e:
        raise UserError(f"{where}: {e}") from None
    worst = difference(model, llama)
    os.makedirs(config.out_dir, exist_ok=True)
    content = dict(version=CHECKPOINT_VERSION, model=model.state_dict(), model_config=dataclasses.asdict(shape), iter=0,
                   data=dict(tokenizer=tokenizer.name, vocab_size=tokenizer.n_vocab, eot=tokenizer.eot))
    path = os.path.join(config.out_dir, "ckpt.pt")
    train.write_whole(path, lambda f: torch.save(content, f))
    train.write_json(os.path.join(config.out_dir, "config.json"), {
        **dataclasses.asdict(shape), "seed": 1337, "data": noted.get("data", ""), "tokenizer": tokenizer.name,
        "from_hf": os.path.abspath(config.from_hf)})
    load_checkpoint(path)
    return worst


def main():
    config, runs = common.arguments(Config, sys.argv[1:], needs_runs=False)
    if bool(config.from_hf) == bool(runs):
        raise UserError("give run folders to export, or one Llama with --from_hf=PATH --out_dir=PATH to import")
    if config.from_hf:
        worst = import_llama(config)
        print(f"wrote {config.out_dir}/ckpt.pt; its logits differ from the Llama's by {worst:.1e} of the largest at most")
        return
    runs = common.trained(runs)
    single, some = len(runs) == 1, False
    for run in runs:
        reason = not_vanilla(run.shape)
        reason = reason and f"Llama has no counterpart of {reason}; only vanilla (with or without GQA) can be exported"
        if reason and single:
            raise UserError(f"{run.name}: {reason}")
        if reason:
            common.skip(run, reason)
            continue
        folder = os.path.join(run.path, "hf") if not config.out_dir else \
            config.out_dir if single else os.path.join(config.out_dir, run.name)
        if any(os.path.exists(os.path.join(folder, name)) for name in ("ckpt.pt", "log.jsonl")):
            raise UserError(f"--out_dir={config.out_dir}: {folder} holds a run, whose config.json this would replace; give "
                            "another folder")
        worst, some = export(run, folder), True
        print(f"wrote {folder}; its logits differ from the run's by {worst:.1e} of the largest at most")
    if not some:
        raise UserError("none of these runs is vanilla: nothing was exported")


if __name__ == "__main__":
    command(main)
