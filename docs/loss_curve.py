"""Draw a run's training and validation loss: `python docs/loss_curve.py RUN_DIR OUT.png [UNIGRAM_ENTROPY]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402

from pdn_train.files import parse_line  # noqa: E402


def read(file: Path) -> list[dict]:
    """Its whole entries: the last line may be being written, and what is none of a run's is passed over. A loss may be null."""
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    return [entry for line in lines if (entry := parse_line(line)) is not None and {"tokens", "loss"} <= entry.keys()]


def main(run_dir: str, out: str, unigram: float | None = None) -> None:
    """Raises ValueError where the folder has no run's losses."""
    train, validation = read(Path(run_dir) / "metrics.jsonl"), read(Path(run_dir) / "validation.jsonl")
    if not train:
        raise ValueError(f"{run_dir} has no losses: no metrics.jsonl with a line in it; name the run_dir of a run")
    figure, axes = plt.subplots(figsize=(7, 3.2), constrained_layout=True)
    axes.plot([e["tokens"] / 1e6 for e in train], [e["loss"] for e in train], label="training")
    if validation:
        axes.plot([e["tokens"] / 1e6 for e in validation], [e["loss"] for e in validation], "o", label="validation")
    if unigram is not None:
        axes.axhline(unigram, color="grey", linestyle="--", linewidth=1, label="unigram entropy of the text")
    axes.set(xlabel="tokens (millions)", ylabel="loss (nats per token)")
    axes.legend(frameon=False)
    figure.savefig(out, dpi=120)


def command(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="loss_curve.py", description="Draw a run's training and validation loss.")
    parser.add_argument("run_dir", metavar="RUN_DIR")
    parser.add_argument("out", metavar="OUT.png")
    parser.add_argument("unigram", nargs="?", type=float, metavar="UNIGRAM_ENTROPY", help="a line at so many nats")
    a = parser.parse_args(argv)
    try:
        main(a.run_dir, a.out, a.unigram)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(command())
