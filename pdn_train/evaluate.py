"""How well a model predicts: the loss per token, shared with the trainer's validation, and the command line.

    python -m pdn_train.evaluate RUN_OR_EXPORT [--tasks ppl] [--data DIR] [--samples N] [--micro-batch N] [--output FILE]

The result is printed as JSON, alone on stdout, then written to RUN_OR_EXPORT/eval.json or FILE. Task ppl reads samples of a shard folder
(by default the run's data.val_path) in the order of the stream, as the model was trained to: same length, same treatment of documents.

    loss             sum of the cross-entropy over all targets / their number, in nats: every target weighs the same, whatever its batch
    perplexity       exp(loss)
    bits_per_byte    loss / ln 2 x (tokens / bytes of the whole folder, from its manifest): comparable across tokenizers

Costs one forward pass; in fp32 unless --precision bf16, so that the same weights give the same bits wherever they were stored.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.maps import Relay
from pdn_train.checkpoint import CheckpointError
from pdn_train.config import ConfigError
from pdn_train.data import Batch, Loader, Samples, open_samples
from pdn_train.files import write_whole
from pdn_train.model import LanguageModel
from pdn_train.shards import ShardError
from pdn_train.tokenizer import Tokenizer, TokenizerError
from pdn_train.weights import DTYPES, Source, WeightsError, find, load_model


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
    samples: int | None = None  # the first ones of it; None: all
    micro_batch: int = 8
    precision: str = "fp32"
    device: str = "cpu"
    kernel: str | None = None  # None: that of the model's configuration


@dataclass(frozen=True)
class Subject:
    """What is evaluated."""

    model: LanguageModel
    tokenizer: Tokenizer | None
    source: Source


def perplexity(subject: Subject, options: Options) -> dict:
    """Task ppl; keys as in the module docstring, and samples, tokens (the targets) and data (the folder)."""
    settings = subject.source.data
    folder = options.data or settings.get("val_path")
    if folder is None:
        raise EvaluationError(f"{subject.source.folder} has no data.val_path; name a folder of shards with --data")
    for key in ("seq_len", "reset_at_documents"):
        if key not in settings:
            raise EvaluationError(f"{subject.source.folder} has no data.{key}, as the model was trained; add it to its config.yaml")
    samples = open_samples(folder, settings["seq_len"], 0, subject.model.config.vocab_size, sequential=True)
    _check_tokenizer(subject.tokenizer, samples, folder)
    count = len(samples) if options.samples is None else options.samples
    if not 1 <= count <= len(samples):
        raise EvaluationError(f"--samples {count}: {folder} holds {len(samples)} samples of {samples.seq_len} tokens")
    batches = _batches(samples, count, options.micro_batch, settings["reset_at_documents"])
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


TASKS: dict[str, Callable[[Subject, Options], dict]] = {"ppl": perplexity}


def _batches(samples: Samples, count: int, micro_batch: int, reset_at_documents: bool) -> Iterator[Batch]:
    """The first `count` samples, `micro_batch` at a time and the rest in a last, smaller batch."""
    for start in range(0, count, micro_batch):
        size = min(micro_batch, count - start)
        yield from Loader(samples, size, 1, 0, 1, reset_at_documents).step(start)


def _check_tokenizer(tokenizer: Tokenizer | None, samples: Samples, folder: str) -> None:
    made_with = samples.manifests[0].tokenizer.sha256
    if tokenizer is not None and tokenizer.sha256 != made_with:
        raise EvaluationError(
            f"{folder} was made with another tokenizer (sha256 {made_with}) than the model's ({tokenizer.sha256}); "
            f"prepare it again with --tokenizer {tokenizer.file}"
        )


def evaluate(path: str | Path, tasks: list[str], options: Options) -> dict:
    """Run `tasks` on the model at `path`: {task: its result}, and what was evaluated. Raises EvaluationError for an unknown task."""
    for task in tasks:
        if task not in TASKS:
            raise EvaluationError(f"--tasks {task}: there is no such task; there are {', '.join(TASKS)}")
    if options.micro_batch < 1:
        raise EvaluationError(f"--micro-batch {options.micro_batch} is below 1")
    source = find(path)
    model, tokenizer = load_model(source, options.device, DTYPES[options.precision], options.kernel)
    subject = Subject(model, tokenizer, source)
    return {"weights": str(source.folder), "precision": options.precision, **{task: TASKS[task](subject, options) for task in tasks}}


def tell(result: str, file: Path) -> int:
    """Print a result, then write it; returns the exit code. What took long to compute is on stdout even where the file cannot be."""
    print(result, flush=True)
    try:
        write_whole(file, (result + "\n").encode())
    except OSError as error:
        print(f"error: the result is printed but not in {file}: {error.strerror}; name another with --output", file=sys.stderr)
        return 1
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pdn_train.evaluate", description="Evaluate a run, a checkpoint or an export.")
    parser.add_argument("model", metavar="RUN_OR_EXPORT")
    parser.add_argument("--tasks", default="ppl", help=f"comma-separated: {', '.join(TASKS)} (default ppl)")
    parser.add_argument("--data", metavar="DIR", help="a folder of shards (default: the run's data.val_path)")
    parser.add_argument("--samples", type=int, metavar="N", help="the first N samples (default: all)")
    parser.add_argument("--micro-batch", type=int, default=8, metavar="N", help="samples at once (default 8)")
    parser.add_argument("--precision", choices=tuple(DTYPES), default="fp32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernel", choices=("torch", "triton"), help="what to run the recurrence on (default: the model's own)")
    parser.add_argument("--output", metavar="FILE", help="where to write the result (default: RUN_OR_EXPORT/eval.json)")
    a = parser.parse_args(argv)
    try:
        options = Options(a.data, a.samples, a.micro_batch, a.precision, a.device, a.kernel)
        result = evaluate(a.model, a.tasks.split(","), options)
    except (EvaluationError, WeightsError, CheckpointError, ConfigError, ShardError, TokenizerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return tell(json.dumps(result, indent=2), Path(a.output or Path(a.model) / "eval.json"))


if __name__ == "__main__":
    sys.exit(main())
