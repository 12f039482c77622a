"""What is measured of a model: the loss per token, shared with the trainer's validation, and the tasks by name.

The tasks are described in `pdn_train.evaluate`, the command; `eval.tasks` of a configuration runs them while a model trains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from kernels.maps import Relay
from pdn_train import mqar, niah
from pdn_train.data import Batch, Loader, Samples, open_samples
from pdn_train.model import LanguageModel
from pdn_train.mqar import MqarError
from pdn_train.niah import NiahError
from pdn_train.shards import Shards
from pdn_train.telling import Tally, counted, silent
from pdn_train.tokenizer import Tokenizer

PAIRS = 64  # of mqar, where neither the run nor the command names a number, or as many as fit
PROSE_TOKENS = 200_000  # of the shards, where no text is named


class EvaluationError(ValueError):
    """An evaluation cannot run; the message says why and the way out."""


@torch.no_grad()
def evaluate_loss(
    model: torch.nn.Module,
    batches: Iterable[Batch],
    device: torch.device | str,
    relay: Callable[[Batch], Relay | None] = lambda batch: None,
) -> tuple[float, int]:
    """(summed cross-entropy in nats, number of targets) over `batches`; their quotient is the mean over targets.

    relay: what joins the pieces of a batch's samples, where ranks share them. Over several ranks add up both before dividing: a mean of
    means would let a batch with few targets weigh as much as a full one.
    """
    loss, targets = torch.zeros((), dtype=torch.float64, device=device), 0
    for batch in batches:
        batch = batch.to(device)
        loss += model(batch.input_ids, labels=batch.labels, cu_seqlens=batch.cu_seqlens, relay=relay(batch))
        targets += batch.targets
    return loss.item(), targets


@dataclass(frozen=True)
class Options:
    """How to evaluate; what the command line's options say."""

    data: str | None = None  # a folder of shards; None: the run's data.val_path
    samples: int | None = None  # of each task and length; None: all (ppl), 3,000 (mqar), 500 (niah), all (harness)
    micro_batch: int = 8
    precision: str = "fp32"
    device: str | torch.device = "cpu"
    kernel: str | None = None  # None: that of the model's configuration
    lengths: tuple[int, ...] = ()  # tokens; none: the run's seq_len (mqar), 512 to 8192 (niah)
    pairs: int | None = None  # of mqar; None: the run's data.mqar_pairs, or 64, or as many as fit
    prose: str | None = None  # a text file for niah_2 and niah_3; None: the text of the shards
    seed: int = 0  # of niah's prompts; mqar's examples are those held out from the run
    harness_tasks: tuple[str, ...] = ()
    harness_path: str | None = None  # a folder of task files
    tell: Callable[[str], object] = silent  # takes lines about how far the tasks are


@dataclass(frozen=True)
class Subject:
    """What is evaluated: a model, its tokenizer, the data section of its configuration, and the name to use in errors."""

    model: LanguageModel
    tokenizer: Tokenizer | None
    settings: dict
    name: str


def perplexity(subject: Subject, options: Options) -> dict:
    """Task ppl; keys as in `pdn_train.evaluate`, and samples, tokens (the targets) and data (the folder)."""
    settings = subject.settings
    folder = _shards(subject, options)
    where = "config.json, under pdn_train" if (Path(subject.name) / "config.json").exists() else "config.yaml"
    for key in ("seq_len", "reset_at_documents"):
        if key not in settings:
            raise EvaluationError(f"{subject.name} has no data.{key}, as the model was trained; add it to its {where}")
    samples = open_samples(folder, settings["seq_len"], 0, subject.model.config.vocab_size, sequential=True)
    _check_tokenizer(subject.tokenizer, samples, folder)
    count = len(samples) if options.samples is None else options.samples
    if count > len(samples):
        raise EvaluationError(f"--samples {count}: {folder} holds {counted(len(samples), 'sample')} of {samples.seq_len} tokens")
    tally = Tally("ppl", count, "sample", f"of {samples.seq_len} tokens of {folder}", options.tell)
    batches = _batches(samples, count, options.micro_batch, settings["reset_at_documents"], tally)
    loss, targets = evaluate_loss(subject.model, batches, options.device)
    if not targets:
        raise EvaluationError(f"the first {count} samples of {folder} hold no target: every token follows an end of document")
    mean, totals = loss / targets, samples.manifests[0].totals
    return {
        "loss": mean,
        "perplexity": math.inf if mean > 700 else math.exp(mean),
        "bits_per_byte": mean / math.log(2) * totals.tokens / totals.bytes if totals.bytes else None,
        "tokens": targets,
        "samples": count,
        "data": str(folder),
    }


def recall(subject: Subject, options: Options) -> dict:
    """Task mqar: the accuracy at each length, and over all of them."""
    pairs, lengths = recall_lengths(subject, options)
    vocab, seed = subject.model.config.vocab_size, subject.settings.get("seed", 0)
    count = mqar.VALIDATION if options.samples is None else options.samples
    found = {}
    tally = Tally("mqar", count * len(lengths), "example", f"of {pairs} pairs in {_listed(lengths)} tokens", options.tell)
    for length in lengths:
        examples = mqar.Examples(pairs, count, length, vocab, seed, "validation")
        found[str(length)] = mqar.accuracy(subject.model, examples, count, options.device, tally.add)
    return {"pairs": pairs, "samples": count, "accuracy": sum(found.values()) / len(found), "lengths": found}


def recall_lengths(subject: Subject, options: Options) -> tuple[int, tuple[int, ...]]:
    """The pairs and lengths of task mqar. Raises EvaluationError and MqarError where there are none or they do not go together."""
    settings = subject.settings
    lengths = options.lengths or ((settings["seq_len"],) if "seq_len" in settings else ())
    if not lengths:
        raise EvaluationError(f"{subject.name} has no data.seq_len: name the examples' lengths with --lengths")
    vocab = subject.model.config.vocab_size
    pairs = options.pairs or settings.get("mqar_pairs") or max(1, min(PAIRS, min(lengths) // 4, vocab // 2 - 1))
    for length in lengths:
        mqar.check(pairs, length, vocab, "--pairs", "--lengths")
    return pairs, lengths


def needle(variants: tuple[str, ...], subject: Subject, options: Options) -> dict:
    """Task niah: the accuracy of each variant at each length, and over all of them."""
    count, prose, lengths = _needles(variants, subject, options)
    found: dict = {}
    total, what = count * len(variants) * len(lengths), f"of {', '.join(variants)} in {_listed(lengths)} tokens"
    tally = Tally("niah", total, "prompt", what, options.tell)
    for variant in variants:
        for length in lengths:
            asked = niah.prompts(variant, length, count, subject.tokenizer, options.seed, prose)
            share = niah.score(subject.model, subject.tokenizer, asked, options.micro_batch, tally.add)
            found.setdefault(variant, {})[str(length)] = share
    every = [share for by_length in found.values() for share in by_length.values()]
    return {"samples": count, "accuracy": sum(every) / len(every), **found}


def check_needle_lengths(variants: tuple[str, ...], subject: Subject, options: Options) -> None:
    """Raise EvaluationError or NiahError where task niah has no tokenizer or text, or a length no room for its prompts."""
    count, prose, lengths = _needles(variants, subject, options)
    for variant in variants:
        for length in lengths:
            niah.check(variant, length, count, subject.tokenizer, options.seed, prose)


def _needles(variants: tuple[str, ...], subject: Subject, options: Options) -> tuple[int, str, tuple[int, ...]]:
    """The number of prompts, text and lengths of task niah."""
    if subject.tokenizer is None:
        raise EvaluationError(f"{subject.name} has no tokenizer.model: put the one its shards were made with there")
    prose = "" if variants == ("niah_1",) else _prose(subject, options)
    count = 500 if options.samples is None else options.samples
    return count, prose, options.lengths or (512, 1024, 2048, 4096, 8192)


def _listed(lengths: tuple[int, ...]) -> str:
    return ", ".join(map(str, lengths))


def _harness(name: str, tasks: tuple[str, ...] | None, subject: Subject, options: Options) -> dict:
    try:
        from pdn_train import harness  # here: only it needs the extra
    except ImportError as error:
        raise EvaluationError(f"--tasks {name} needs lm-evaluation-harness ({error}): pip install -e '.[lm-eval]'") from error
    if subject.tokenizer is None:
        raise EvaluationError(f"{subject.name} has no tokenizer.model: put the one its shards were made with there")
    names = options.harness_tasks if tasks is None else tasks
    if not names:
        raise EvaluationError("--tasks harness: name the tasks with --harness-tasks")
    return harness.run(subject.model, subject.tokenizer, names, options.micro_batch, options.samples, options.harness_path, options.tell)


COMMONSENSE = ("arc_easy", "arc_challenge", "hellaswag", "lambada_openai", "piqa", "winogrande", "boolq", "sciq", "wikitext")
RECALL = ("fda", "swde", "squad_completion", "triviaqa", "drop")

TASKS: dict[str, Callable[[Subject, Options], dict]] = {
    "ppl": perplexity,
    "mqar": recall,
    "niah": partial(needle, tuple(niah.KINDS)),
    **{variant: partial(needle, (variant,)) for variant in niah.KINDS},
    "commonsense": partial(_harness, "commonsense", COMMONSENSE),
    "recall": partial(_harness, "recall", RECALL),
    "harness": partial(_harness, "harness", None),
}

# task -> what raises where its lengths do not do: asked of all tasks before the first one takes its time
LENGTHS: dict[str, Callable[[Subject, Options], object]] = {
    "mqar": recall_lengths,
    "niah": partial(check_needle_lengths, tuple(niah.KINDS)),
    **{variant: partial(check_needle_lengths, (variant,)) for variant in niah.KINDS},
}


def _shards(subject: Subject, options: Options) -> str:
    folder = options.data or subject.settings.get("val_path")
    if folder is None:
        raise EvaluationError(f"{subject.name} has no data.val_path; name a folder of shards with --data")
    if options.data is None and not Path(folder).is_dir():
        raise EvaluationError(f"{subject.name} has data.val_path={folder}, which is not a folder here; name one of shards with --data")
    return folder


def _prose(subject: Subject, options: Options) -> str:
    """The text of --prose, or of the first tokens of the shards."""
    if options.prose is None:
        source = _shards(subject, options)
        shards = Shards.open(source)
        ids = shards.read(0, min(shards.tokens, PROSE_TOKENS)).tolist()
        text = subject.tokenizer.decode([i for i in ids if i < subject.tokenizer.vocab_size])
    else:
        source = f"--prose {options.prose}"
        try:
            text = Path(options.prose).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise EvaluationError(f"{source}: {error}") from error
    if not text.split():
        raise EvaluationError(f"{source} holds no words: name a text with --prose")
    return text


def _batches(samples: Samples, count: int, micro_batch: int, reset_at_documents: bool, tally: Tally) -> Iterator[Batch]:
    """The first `count` samples, `micro_batch` at a time and the rest in a last, smaller batch."""
    for start in range(0, count, micro_batch):
        size = min(micro_batch, count - start)
        yield from Loader(samples, size, 1, 0, 1, reset_at_documents).step(start)
        tally.add(size)


def _check_tokenizer(tokenizer: Tokenizer | None, samples: Samples, folder: str) -> None:
    made_with = samples.manifests[0].tokenizer.sha256
    if tokenizer is not None and tokenizer.sha256 != made_with:
        raise EvaluationError(
            f"{folder} was made with another tokenizer (sha256 {made_with}) than the model's ({tokenizer.sha256}); "
            f"prepare it again with --tokenizer {tokenizer.file}"
        )


def check(tasks: list[str], options: Options) -> None:
    """Raise EvaluationError for an unknown task or a number below 1."""
    for task in tasks:
        if task not in TASKS:
            raise EvaluationError(f"--tasks {task}: there is no such task; there are {', '.join(TASKS)}")
    for name, value in (("micro-batch", options.micro_batch), ("samples", options.samples), ("pairs", options.pairs)):
        if value is not None and value < 1:
            raise EvaluationError(f"--{name} {value} is below 1")


def run_tasks(subject: Subject, tasks: list[str], options: Options) -> dict:
    """{task: its result}. Raises EvaluationError for what a task cannot do; for lengths before any task runs."""
    try:
        for task in tasks:
            if task in LENGTHS:
                LENGTHS[task](subject, options)
        return {task: TASKS[task](subject, options) for task in tasks}
    except (MqarError, NiahError) as error:
        raise EvaluationError(str(error)) from error
