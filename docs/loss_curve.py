"""Draw a run's training and validation loss: `python docs/loss_curve.py RUN_DIR OUT.png [UNIGRAM_ENTROPY]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def main(run_dir: str, out: str, unigram: str | None = None) -> None:
    train, validation = read(Path(run_dir) / "metrics.jsonl"), read(Path(run_dir) / "validation.jsonl")
    figure, axes = plt.subplots(figsize=(7, 3.2), constrained_layout=True)
    axes.plot([e["tokens"] / 1e6 for e in train], [e["loss"] for e in train], label="training")
    if validation:
        axes.plot([e["tokens"] / 1e6 for e in validation], [e["loss"] for e in validation], "o", label="validation")
    if unigram:
        axes.axhline(float(unigram), color="grey", linestyle="--", linewidth=1, label="unigram entropy of the text")
    axes.set(xlabel="tokens (millions)", ylabel="loss (nats per token)")
    axes.legend(frameon=False)
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
