"""
Does a model guess the last word of a passage? A task like LAMBADA, made from the runs' validation bins: nothing is downloaded.

    python -m analysis.lastword out/vanilla out/resformer                        # 500 passages of every source
    python -m analysis.lastword out/vanilla out/resformer --repeated=False       # any last word, also one that is new

A passage is context + 1 tokens of one document. Its last word is 4 or more of the letters a-z and A-Z, after a space and
before white space or one of . , ; : ! ? " ) ] (so doesn't is none, and no word with a hyphen), and it occurs earlier in the
passage, as a whole word spelled alike: that is what makes LAMBADA's words predictable from their context. The space and the
word are scored together; a word whose space doesn't begin a token, or which ends inside of one, is not used.

accuracy: the share of items where greedy decoding writes exactly the word's tokens, with Wilson's 95 % interval. nats/word: the
mean log-likelihood ln p(space and word | context); perplexity: exp(-that), per word.
Differences are against the first system's run of the same seed (or else the first run), on the same items: 95 % intervals are
a paired bootstrap's over items, with a fixed seed (none where all items differ alike), and say nothing about other training
seeds. won : lost are items that only this run, or only the other, got right. All runs get the items of --data or of the first
run's bins; those of another tokenizer are left out.
"""
import functools
import itertools
import re
import statistics
import sys
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

import train
from analysis import common, evaluate, plot, zeroshot
from configurator import UserError, at_least, command
from prepare import get_tokenizer

LETTERS = 4  # of a last word, at least
WORD = re.compile(rb"[\w\x80-\xff]+")  # bytes of other alphabets belong to a word, which then isn't of a-z alone
AFTER = {bytes([b]) for b in b" \t\r\n.,;:!?\")]"}  # no apostrophe: doesn is no word
RESAMPLES = 2000  # of the bootstrap


@dataclass
class Config(common.ModelOptions):
    bin: str = ""  # only this validation bin: val, or the name of a source; empty: all sources
    sequences: int = 500  # items per bin, drawn at random
    context: int = 256  # tokens that a model is given: all before the word's last one; at most --length
    batch_size: int = 16  # passages at once
    repeated: bool = True  # only last words that occur earlier in the passage
    seed: int = 1337  # which items are drawn


def last_word(pieces, first, context, repeated):
    """
    (start, end) of the first word that can end a passage: pieces[start:end] are its space and letters, and the passage
    pieces[end - context - 1:end] begins at piece first or later. None without one. pieces: the bytes of each token; the one
    before the passage and the one after it show whether words are whole.
    """
    offsets = [*itertools.accumulate(map(len, pieces), initial=0)]
    text, at, seen = b"".join(pieces), {offset: i for i, offset in enumerate(offsets)}, {}
    for m in WORD.finditer(text):
        word, earlier, (begin, stop) = m[0], seen.get(m[0], -1), m.span()
        seen[word] = begin
        start, end = at.get(begin - 1), at.get(stop)  # the word's space belongs to its first token
        whole = word.isalpha() and len(word) >= LETTERS and text[begin - 1:begin] == b" " and text[stop:stop + 1] in AFTER
        if whole and None not in (start, end) and first <= end - context - 1 < start and (
                earlier >= offsets[end - context - 1] or not repeated):
            return start, end


def draw_items(bin_, eot, spell, config):
    """
    [(passage's ids, how many of them are the word's)] of a validation bin, at most config.sequences: documents are cut into
    stretches of context + 1 tokens, and the first word of a stretch that can end a passage does, if it is drawn.
    spell(id): a token's bytes. A function of the bin and the options alone.
    """
    context, begin, places, items = config.context, 0, [], []
    ids = np.memmap(bin_.path, bin_.dtype, mode="r") if bin_.tokens else np.empty(0, bin_.dtype)
    for end in [*np.flatnonzero(ids == eot).tolist(), bin_.tokens]:
        places += [(begin, place, end) for place in range(begin + context, end, context + 1)]
        begin = end + 1
    with tqdm(total=min(config.sequences, len(places)), desc=f"items of {bin_.path}", leave=False, disable=None) as bar:
        for begin, place, end in (places[i] for i in np.random.default_rng(config.seed).permutation(len(places))):
            low = max(begin, place - context - 1)
            part = bin_.read_at([low], min(end, place + context + 2) - low - 1)[0].tolist()
            if found := last_word([spell(i) for i in part], place - context - low, context, config.repeated):
                items.append((part[found[1] - context - 1:found[1]], found[1] - found[0]))
                bar.update()
            if len(items) == config.sequences:
                break
    return items


def all_items(data, tokenizer, config):
    """{bin's name: draw_items of it}, of the bins that have any. Raises UserError when none has, or for an unknown bin."""
    if config.bin and config.bin not in data.val:
        raise UserError(f"--bin={config.bin}: {data.path} has {', '.join(data.val)}")
    spell = functools.cache(lambda i: tokenizer.decode_bytes([i]))
    what = f"no passage of {config.context} + 1 tokens of a document ends in a word of {LETTERS} or more letters" + (
        " that it has before" if config.repeated else "")
    names = [config.bin] if config.bin else [s for s in data.val if s != "val"] or ["val"]
    found = {name: draw_items(data.val[name], data.eot, spell, config) for name in names}
    if not any(found.values()):
        raise UserError(f"{data.path}: {what}; lower --context" + (", or give --repeated=False" if config.repeated else ""))
    for name in names:
        if not found[name]:
            print(f"{data.val[name].path}: left out: {what}", file=sys.stderr, flush=True)
    return {name: items for name, items in found.items() if items}


def score(model, tokenizer, items, config):
    """{bin's name: (items, 2) of log-likelihood in nats and whether greedy decoding writes the word}, and of all bins."""
    scorer = zeroshot.Scorer(model, tokenizer, config.batch_size, lambda: train.precision(config))
    try:
        scores = np.array(scorer.score_tokens([(ids[:-n], ids[-n:]) for some in items.values() for ids, n in some]), float)
    except torch.OutOfMemoryError:
        raise UserError(f"out of memory: lower --batch_size={config.batch_size} or --context={config.context}") from None
    parts = dict(zip(items, np.split(scores, np.cumsum([len(some) for some in items.values()])[:-1])))
    return {**parts, "all sources": scores} if len(parts) > 1 else parts


def wilson(hits, n):
    """(low, high): Wilson's 95 % interval of a share of hits among n."""
    z = statistics.NormalDist().inv_cdf(0.975)
    middle, half = hits + z * z / 2, z * (hits * (n - hits) / n + z * z / 4) ** 0.5
    return max(0.0, (middle - half) / (n + z * z)), min(1.0, (middle + half) / (n + z * z))


def summary(scores):
    """Numbers of one run on one bin, from score's array."""
    nats, accuracy = scores.mean(0).tolist()
    return dict(items=len(scores), accuracy=accuracy, accuracy_interval_95=wilson(scores[:, 1].sum().item(), len(scores)),
                log_likelihood=train.finite(nats), perplexity=evaluate.numbers(-nats, None)["perplexity"])


def difference(scores, others):
    """Means of scores - others over the same items, bootstrap intervals, and how many items only one of them got right."""
    x, rng = scores - others, np.random.default_rng(0)
    means = np.array([x[rng.integers(len(x), size=len(x))].mean(0) for _ in range(RESAMPLES)])
    out = dict(won=int((x[:, 1] > 0).sum()), lost=int((x[:, 1] < 0).sum()))
    for name, column, draws in zip(("log_likelihood", "accuracy"), x.T, means.T):
        out[name] = train.finite(column.mean().item())
        out[name + "_interval_95"] = np.quantile(draws, (0.025, 0.975)).tolist() if np.ptp(column) > 0 else None  # NaN: None
    return out


def cell(numbers, name, form):
    """A number of summary or difference, with its interval where there is one."""
    interval = numbers.get(name + "_interval_95")
    shown = "-" if numbers.get(name) is None else f"{numbers[name]:{form}}"
    return shown + (f" [{interval[0]:{form}}, {interval[1]:{form}}]" if interval else "")


def picture(path, runs, results):
    """Accuracy by source, and the difference to the run that each is compared with."""
    series, differences = {}, {}
    for run in runs:
        bins = results[run.name]["bins"]
        series.setdefault(run.system, []).append((list(bins), [b["accuracy"] for b in bins.values()]))
        differences.setdefault(run.system, []).append((list(bins), [b["difference"]["accuracy"] for b in bins.values()]))
    panels = [dict(series=series, x="validation bin", y="accuracy (share of last words)", apart=True)]
    if len(series) > 1:
        panels.append(dict(panels[0], series=differences, y=f"accuracy - {runs[0].system}'s", zero=True))
    plot.draw(path, panels, "Guessing the last word of a passage",
              "Higher is better; a point per run. The table has 95 % intervals: where one holds 0, a difference shows nothing.")


def main():
    config, runs = common.arguments(Config, sys.argv[1:])
    at_least(config, 0, "seed")
    at_least(config, 1, "context")
    if config.context > config.length:
        raise UserError(f"--context={config.context}: the models' window is {config.length} tokens; give at most that")
    items, facts = {}, {"resamples": RESAMPLES}

    def use(run):
        data = common.open_data(config, run)
        tokenizer = get_tokenizer(data.tokenizer)
        if not items:
            items.update(all_items(data, tokenizer, config))
            config.data = data.path  # the first run's bins are everyone's
            facts.update(fingerprint=data.fingerprint, tokenizer=data.tokenizer)
        return score(run.model(config.device), tokenizer, items, config)

    found = common.usable(runs, use, "none of these runs could be scored")
    runs, scores, results = [run for run, _ in found], {run.name: s for run, s in found}, {}
    for run in runs:
        base = common.partner(run, runs).name
        results[run.name] = dict(against=base, bins={
            name: dict(summary(x), difference=difference(x, scores[base][name])) for name, x in scores[run.name].items()})
    rows = [[run.name, name, b["items"], cell(b, "accuracy", ".3f"), cell(b, "log_likelihood", ".3f"),
             cell(b, "perplexity", ",.1f"), r["against"] if d else "-", cell(d, "accuracy", "+.3f"),
             f"{cell(d, 'won', 'd')} : {cell(d, 'lost', 'd')}", cell(d, "log_likelihood", "+.3f")]
            for run in runs for r in [results[run.name]] for name, b in r["bins"].items()
            for d in [b["difference"] if r["against"] != run.name else {}]]
    head = ["run", "bin", "items", "accuracy", "nats/word", "perplexity", "against", "Δ accuracy", "won : lost", "Δ nats/word"]
    common.write(config, runs, "lastword", head, rows, dict(facts, runs=results), lambda path: picture(path, runs, results))


if __name__ == "__main__":
    command(main)
