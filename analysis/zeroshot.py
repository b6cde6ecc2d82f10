"""
Zero-shot accuracy with EleutherAI's lm-evaluation-harness, on the tasks of the paper's Table 1 and LAMBADA.

    pip install lm-eval
    python -m analysis.zeroshot out/vanilla out/resformer                                 # downloads the tasks' data
    python -m analysis.zeroshot out/resformer --tasks=piqa,arc_easy --limit=200
    python -m analysis.zeroshot out/resformer --tasks=mine --include_path=my_tasks        # a folder with mine.yaml

The paper's Table 1 gives acc (not acc_norm). Models of its smaller sizes score near chance, which the picture draws.
Scorer needs no harness: Scorer(model, tokenizer).score([("The sky is", " blue")]) -> [(log-probability in nats, greedy)].
"""
import contextlib
import difflib
import os
import sys
from dataclasses import dataclass
from typing import Literal

import torch
from tqdm import tqdm

import train
from analysis import common, plot
from configurator import UserError, at_least, command
from prepare import get_tokenizer

CHANCE = {"hellaswag": 0.25, "openbookqa": 0.25, "winogrande": 0.5, "arc_challenge": 0.25, "arc_easy": 0.25, "piqa": 0.5,
          "lambada_openai": 0.0}


@dataclass
class Config(common.Options):
    tasks: str = "hellaswag,openbookqa,winogrande,arc_challenge,arc_easy,piqa,lambada_openai"  # the harness' names
    limit: int = 0  # documents of each task; 0: all
    num_fewshot: int = 0  # solved examples before each question
    include_path: str = ""  # a folder of own tasks as YAML, besides the harness'
    batch_size: int = 16  # sequences at once
    device: str = "auto"  # cuda, mps or cpu; auto: the first of these that is there
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the matrix products


class Scorer:
    """
    Log-probabilities of texts under a GPT, batched. n tokens are scored in windows of at most block_size inputs; the
    columns of the vocabulary's padding take no part.
    """

    def __init__(self, model, tokenizer, batch_size=16, autocast=contextlib.nullcontext):
        self.model, self.tokenizer, self.batch_size, self.autocast = model, tokenizer, batch_size, autocast
        self.block, self.n_vocab = model.config.block_size, min(tokenizer.n_vocab, model.config.vocab_size)
        self.device = model.lm_head.weight.device

    def encode(self, text):
        return [int(i) for i in self.tokenizer.encode(text)] if text else []

    def pair(self, context, continuation):
        """
        (context's ids, continuation's ids), split as the harness' own models do: white space that ends the context belongs to
        the continuation's first word, as in training; the continuation is what the whole text's ids have beyond the number of
        the context's. An empty context is one end-of-text token.
        """
        first = self.encode(context.rstrip())
        return first or [self.tokenizer.eot], self.encode(context + continuation)[len(first):]

    def score(self, pairs):
        """[(log p(continuation | context) in nats, greedy decoding would write it)] of (context, continuation) texts."""
        return self.score_tokens([self.pair(*p) for p in pairs])

    def score_text(self, texts):
        """[log p(text)] after an end-of-text token; beyond block_size in windows that follow each other."""
        return [p for p, _ in self.score_tokens([([self.tokenizer.eot], self.encode(t)) for t in texts])]

    @torch.no_grad()
    def score_tokens(self, pairs):
        """score() of (context's ids, continuation's ids); a context is cut on the left to what block_size leaves."""
        jobs, out = [], [[0.0, True] for _ in pairs]
        for owner, (context, continuation) in enumerate(pairs):
            ids, start = context + continuation, len(context)
            while start < len(ids):
                end = min(start + self.block, len(ids))
                jobs.append((ids[max(0, end - self.block - 1):end], end - start, owner))
                start = end
        jobs.sort(key=lambda job: -len(job[0]))  # equal lengths together, and the largest batch first
        for i in tqdm(range(0, len(jobs), self.batch_size), desc="scoring", leave=False, disable=None):
            part = jobs[i:i + self.batch_size]
            width = len(part[0][0]) - 1
            rows = [ids[:-1] + [self.tokenizer.eot] * (width - len(ids) + 1) for ids, _, _ in part]  # causal: padding is unseen
            with self.autocast():
                x = self.model.features(torch.tensor(rows, device=self.device))
                for (ids, n, owner), hidden in zip(part, x):
                    logits = self.model.lm_head(hidden[len(ids) - 1 - n:len(ids) - 1])[:, :self.n_vocab].float()
                    targets = torch.tensor(ids[-n:], device=self.device)
                    picked = logits.log_softmax(-1).gather(1, targets[:, None])
                    out[owner][0] += picked.sum().item()
                    out[owner][1] &= bool((logits.argmax(-1) == targets).all())
        return [tuple(x) for x in out]

    def generate(self, contexts, until=(), max_new_tokens=256, **sampling):
        """Continuations up to the first of the texts in until, or end of text. Left-truncated so that they fit block_size."""
        room = max(self.block - max_new_tokens, self.block // 2, 1)
        prompts = [(self.encode(c) or [self.tokenizer.eot])[-room:] for c in contexts]
        width = max(map(len, prompts))
        idx = torch.tensor([[self.tokenizer.eot] * (width - len(p)) + p for p in prompts], device=self.device)
        rows, texts, done = [[] for _ in prompts], [""] * len(prompts), [False] * len(prompts)
        with self.autocast():
            for tokens in self.model.stream(idx, max_new_tokens, lengths=[len(p) for p in prompts], n_vocab=self.n_vocab,
                                            **sampling):
                for j, token in enumerate(tokens.tolist()):
                    if not done[j] and token != self.tokenizer.eot:
                        rows[j].append(token)
                        texts[j] = self.tokenizer.decode_bytes(rows[j]).decode(errors="replace")
                        ends = [at for stop in until if stop and (at := texts[j].find(stop)) >= 0]
                        texts[j] = texts[j][:min(ends)] if ends else texts[j]
                        done[j] = bool(ends)
                    else:
                        done[j] = True
                if all(done):
                    break
        return texts


def adapter(scorer):
    """The scorer as the harness' language model. Needs lm_eval."""
    from lm_eval.api.model import LM

    class NanoResFormer(LM):
        tokenizer_name = scorer.tokenizer.name

        def loglikelihood(self, requests, disable_tqdm=False):
            return scorer.score([r.args for r in requests])

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            return scorer.score_text([r.args[0] for r in requests])

        def generate_until(self, requests, disable_tqdm=False):
            out, groups = [None] * len(requests), {}
            for i, r in enumerate(requests):  # requests of equal settings go through the model together
                groups.setdefault(repr(r.args[1]), []).append(i)
            for members in groups.values():
                given = requests[members[0]].args[1]
                until = given.get("until") or []
                options = dict(until=[until] if isinstance(until, str) else until, temperature=0.0,
                               max_new_tokens=int(given.get("max_gen_toks") or 256))
                if given.get("do_sample"):
                    options.update({k: given[k] for k in ("top_k", "top_p") if k in given})
                    options["temperature"] = given.get("temperature", 1.0)
                members.sort(key=lambda i: len(requests[i].args[0]))
                for at in range(0, len(members), scorer.batch_size):
                    part = members[at:at + scorer.batch_size]
                    for i, text in zip(part, scorer.generate([requests[i].args[0] for i in part], **options)):
                        out[i] = text
            return out

    return NanoResFormer()


def harness(config):
    """(lm_eval, its TaskManager, the tasks' names). Raises UserError for a missing package and unknown tasks."""
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as e:
        raise UserError(f"this needs EleutherAI's lm-evaluation-harness ({e}): pip install lm-eval") from None
    if config.include_path and not os.path.isdir(config.include_path):
        raise UserError(f"--include_path={config.include_path}: no such folder; give one with a YAML file per task")
    names = [t.strip() for t in config.tasks.split(",") if t.strip()]
    if not names:
        raise UserError("--tasks is empty: give names of the harness' tasks, as piqa,arc_easy")
    manager = TaskManager(include_path=config.include_path or None)  # reads thousands of files, which takes seconds
    for name in names:
        if name not in manager.all_tasks:
            close = difflib.get_close_matches(name, manager.all_tasks, n=3)
            raise UserError(f"--tasks: the harness (lm-eval {lm_eval.__version__}) has no {name!r}"
                            + (f"; did you mean {', '.join(close)}?" if close else "; give its folder with --include_path"))
    return lm_eval, manager, names


def evaluate(run, config, lm_eval, manager, names):
    """{task: {metric: value, metric_stderr: value, "n": documents}} of one run. Raises UserError when data is out of reach."""
    ckpt = run.checkpoint()
    model = run.model(config.device)
    scorer = Scorer(model, get_tokenizer(ckpt["data"]["tokenizer"]), config.batch_size, lambda: train.precision(config))
    try:
        found = lm_eval.simple_evaluate(model=adapter(scorer), tasks=names, num_fewshot=config.num_fewshot,
                                        limit=config.limit or None, task_manager=manager, log_samples=False,
                                        bootstrap_iters=1000)
    except OSError as e:  # what datasets raises without a network, for a missing set or file
        raise UserError(f"the data of {', '.join(names)} could not be loaded ({type(e).__name__}: {e}); where there is a "
                        "network, run this once with HF_HOME=some/folder, bring that folder here and set HF_HOME to it, or "
                        "give own tasks with --include_path") from None
    out = {}
    for task, metrics in found["results"].items():
        clean = {k.removesuffix(",none"): v for k, v in metrics.items() if isinstance(v, (int, float)) and k != "sample_len"}
        out[task] = {k: train.finite(float(v)) for k, v in clean.items()}
        counts = found.get("n-samples", {}).get(task)
        out[task].update(n=counts["effective"] if counts else None, version=found.get("versions", {}).get(task))
    return out


def picture(path, runs, results):
    """Accuracy by task, beside chance, where a task has one."""
    series, chance = {}, {}
    for run in runs:
        points = {t: m["acc"] for t, m in results[run.name].items() if m.get("acc") is not None}
        series.setdefault(run.system, []).append((list(points), list(points.values())))
        chance.update({t: CHANCE[t] for t in points if t in CHANCE})
    if chance:
        series["chance"] = [(list(chance), list(chance.values()))]
    plot.draw(path, [dict(series=series, x="task", y="acc (share of questions)", apart=True)], "Zero-shot accuracy",
              "Higher is better; at the points of chance a model knows nothing.\nOne standard error is in the table: "
              "smaller differences between systems mean nothing.")


def main():
    config, runs = common.arguments(Config, sys.argv[1:])
    at_least(config, 0, "limit", "num_fewshot")
    at_least(config, 1, "batch_size")
    config.device = train.checked_device(config)
    lm_eval, manager, names = harness(config)
    runs = common.trained(runs)
    results = {}
    for run in runs:
        print(f"{run.name} ...", file=sys.stderr, flush=True)
        results[run.name] = evaluate(run, config, lm_eval, manager, names)

    def cell(m, key):
        value, error = m.get(key), m.get(key + "_stderr")
        return "-" if value is None else f"{value:.4g}" + (f" ± {error:.2g}" if error is not None else "")

    shown = ["acc", "acc_norm", "perplexity"]
    others = sorted({k for r in results.values() for m in r.values() for k in m if not k.endswith("_stderr")}
                    - {*shown, "n", "version"})
    shown = [k for k in shown + others if any(k in m for r in results.values() for m in r.values())]
    common.write(config, runs, "zeroshot", ["run", "task", "n", *shown],
                 [[run.name, task, m["n"], *(cell(m, k) for k in shown)]
                  for run in runs for task, m in results[run.name].items()],
                 dict(lm_eval=lm_eval.__version__, num_fewshot=config.num_fewshot, limit=config.limit, dtype=config.dtype,
                      chance=CHANCE, runs=results),
                 lambda path: picture(path, runs, results))


if __name__ == "__main__":
    command(main)
