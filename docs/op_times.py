"""Draws docs/op_times.png: time of one forward and backward pass of the op against the length of one sequence, ours and the peer's.

    python docs/op_times.py docs/op_times.png

The figures are those of the README's tables, milliseconds at B = 1, 8 heads of 128 channels, bf16, one H200. Single calls, which the host
bounds at short lengths, and replayed graphs, which are the card's own time, are compared each with its like. Our graphs are on Triton
3.6.0, the rest on 3.7.1; the peer's graph of PKDA and our calls of PKDA are of earlier runs, the latter of a slower version.
"""

import argparse
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SERIES = {  # tokens: ms
    "PGDN": {
        "this project, graphs": {2048: 0.423, 8192: 0.600, 32768: 1.731},
        "flash-linear-attention 0.6.0, graphs": {2048: 0.50},
        "this project, calls": {2048: 0.67, 8192: 0.89, 32768: 1.90},
        "flash-linear-attention 0.6.0, calls": {2048: 2.44, 8192: 2.49, 32768: 7.79},
    },
    "PKDA": {
        "this project, graphs": {2048: 0.537, 8192: 0.948, 32768: 2.942},
        "flash-linear-attention 0.6.0, graphs": {2048: 0.78},
        "this project, calls": {2048: 0.84, 8192: 1.37, 32768: 3.95},
        "flash-linear-attention 0.6.0, calls": {2048: 2.44, 8192: 3.28, 32768: 11.70},
    },
}
STYLES = ("C0o-", "C1o", "C0s--", "C1s--")


def main(path: str) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(8.5, 3.6), sharey=True, constrained_layout=True)
    for ax, (name, series) in zip(axes, SERIES.items(), strict=True):
        for style, (label, points) in zip(STYLES, series.items(), strict=True):
            ax.loglog(list(points), list(points.values()), style, base=2, label=label)
        ax.set_xticks((2048, 8192, 32768), ("2,048", "8,192", "32,768"))
        ax.set_yticks((0.5, 1, 2, 4, 8), ("0.5", "1", "2", "4", "8"))
        ax.set_title(name, fontsize=10)
        ax.set_xlabel("tokens of one sequence")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("forward + backward, ms")
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=120)


def command(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="op_times.py", description="Draw the time of the op against the length of one sequence.")
    parser.add_argument("out", metavar="OUT.png")
    try:
        main(parser.parse_args(argv).out)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(command())
