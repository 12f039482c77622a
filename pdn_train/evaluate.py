"""How well a model predicts and recalls: the command.

    python -m pdn_train.evaluate RUN_OR_EXPORT [--tasks ppl,mqar,niah,...] [--data DIR] [--samples N] [--lengths L,L] [--output FILE] ...

    ppl        loss, perplexity and bits per byte on shards, in the order of the stream, as the model was trained to: same length, same
               treatment of documents
    mqar       accuracy of `pdn_train.mqar`'s synthetic recall, on held-out examples, at each length
    niah       accuracy of `pdn_train.niah`'s three needle tasks at each length; also niah_1, niah_2, niah_3 alone
    harness    tasks of lm-evaluation-harness (`pdn_train.harness`, the extra lm-eval); commonsense and recall are the paper's two lists

The result is printed as JSON, alone on stdout, and written to RUN_OR_EXPORT/eval.json or FILE; how far a task is goes to stderr. Of a run
or one of its checkpoints every number also goes to TensorBoard, as its run `evaluation`, at the checkpoint's step. `eval.tasks` of a
configuration runs tasks while a model trains.

    loss             sum of the cross-entropy over all targets / their number, in nats: every target weighs the same, whatever its batch
    perplexity       exp(loss)
    bits_per_byte    loss / ln 2 x (tokens / bytes of the whole folder, from its manifest): comparable across tokenizers

In fp32 unless --precision bf16, so that the same weights give the same bits wherever they were stored.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from pdn_train.board import Board, scalar
from pdn_train.checkpoint import folders, step_of
from pdn_train.files import to_json, write_whole
from pdn_train.metrics import numbers
from pdn_train.rundir import RunDir
from pdn_train.shards import ShardError
from pdn_train.tasks import TASKS, EvaluationError, Options, Subject, check, run_tasks
from pdn_train.telling import quietly, to_stderr
from pdn_train.weights import DTYPES, UNREADABLE, find, load_model


def evaluate(path: str | Path, tasks: list[str], options: Options) -> dict:
    """Run `tasks` on the model at `path`: {task: its result}, and what was evaluated. Raises EvaluationError for an unknown task."""
    check(tasks, options)
    source = find(path)
    model, tokenizer = load_model(source, options.device, DTYPES[options.precision], options.kernel)
    subject = Subject(model, tokenizer, source.data, str(source.folder))
    return {"weights": str(source.folder), "precision": options.precision, **run_tasks(subject, tasks, options)}


def to_tensorboard(result: dict) -> None:
    """Write a result beside the event files of the run whose checkpoint was evaluated; nothing for an export, which has no steps."""
    folder = Path(result["weights"])
    run_dir = RunDir(folder.parent.parent)
    if folder not in folders(run_dir.checkpoints):
        return
    where = run_dir.tensorboard / "evaluation"
    where.mkdir(parents=True, exist_ok=True)
    Board(where).add(step_of(folder), [scalar(f"evaluation/{name}", value) for name, value in numbers(result)])


def tell(result: str, file: Path) -> int:
    """Write a result and print it; returns the exit code. What took long to compute survives a file that cannot be written, on stdout, and
    a reader of stdout who has left, in the file."""
    failed = None
    try:
        write_whole(file, (result + "\n").encode())
    except OSError as error:
        failed = error
    print(result, flush=True)
    if failed is not None:
        print(f"error: the result is printed but not in {file}: {failed.strerror}; name another with --output", file=sys.stderr)
    return 0 if failed is None else 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pdn_train.evaluate", description="Evaluate a run, a checkpoint or an export.")
    parser.add_argument("model", metavar="RUN_OR_EXPORT")
    parser.add_argument("--tasks", default="ppl", help=f"comma-separated: {', '.join(TASKS)} (default ppl)")
    parser.add_argument("--data", metavar="DIR", help="a folder of shards (default: the data.val_path of the run or export)")
    parser.add_argument("--samples", type=int, metavar="N", help="N of each task and length (default: all, of mqar 3000, of niah 500)")
    parser.add_argument("--micro-batch", type=int, default=8, metavar="N", help="samples at once (default 8)")
    parser.add_argument("--precision", choices=tuple(DTYPES), default="fp32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernel", choices=("torch", "triton"), help="what to run the recurrence on (default: the model's own)")
    parser.add_argument("--lengths", default="", metavar="L,L", help="tokens; default: the run's seq_len (mqar), 512 to 8192 (niah)")
    parser.add_argument("--pairs", type=int, metavar="N", help="of mqar (default: the run's data.mqar_pairs, or 64, or as many as fit)")
    parser.add_argument("--prose", metavar="FILE", help="the text of niah_2 and niah_3 (default: that of the shards)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of niah's prompts")
    parser.add_argument("--harness-tasks", default="", metavar="NAME,NAME", help="what --tasks harness runs")
    parser.add_argument("--harness-path", metavar="DIR", help="a folder of lm-evaluation-harness task files of one's own")
    parser.add_argument("--output", metavar="FILE", help="where to write the result (default: RUN_OR_EXPORT/eval.json)")
    a = parser.parse_args(argv)
    try:
        result = evaluate(a.model, a.tasks.split(","), _options(a))
    except (EvaluationError, ShardError, *UNREADABLE) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    code = tell(to_json(result, indent=2), Path(a.output or Path(a.model) / "eval.json"))
    try:
        to_tensorboard(result)
    except OSError as error:
        print(f"error: the result is not in TensorBoard's files: {error}", file=sys.stderr)
        return 1
    return code


def _options(a: argparse.Namespace) -> Options:
    try:
        lengths = tuple(int(length) for length in a.lengths.split(",") if length)
    except ValueError:
        raise EvaluationError(f"--lengths {a.lengths}: not whole numbers with commas between them") from None
    return Options(
        data=a.data,
        samples=a.samples,
        micro_batch=a.micro_batch,
        precision=a.precision,
        device=a.device,
        kernel=a.kernel,
        lengths=lengths,
        pairs=a.pairs,
        prose=a.prose,
        seed=a.seed,
        harness_tasks=tuple(name for name in a.harness_tasks.split(",") if name),
        harness_path=a.harness_path,
        tell=to_stderr,
    )


if __name__ == "__main__":
    sys.exit(quietly(main))
