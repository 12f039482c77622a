"""Draws docs/op_times.png: time of one forward and backward pass of the op against the length of one sequence, ours and the peer's.

    python docs/op_times.py docs/op_times.png

The figures are those of the README's table and its sources, milliseconds at B = 1, 8 heads of 128 channels, bf16, one H200.
"""

import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LENGTHS = (2048, 8192, 32768)
OURS = {"PGDN": (0.410, 0.670, 2.179), "PKDA": (0.524, 1.169, 3.971)}  # replayed graphs
PEER = {"PGDN": (4.19, 2.80, 6.44), "PKDA": (4.21, 2.94, 10.23)}  # flash-linear-attention 0.6.0, single calls


def main(path: str) -> None:
    _, axes = plt.subplots(figsize=(6, 3.6))
    for number, name in enumerate(OURS):
        axes.loglog(LENGTHS, OURS[name], "o-", base=2, color=f"C{number}", label=f"{name}, this project, graph")
        axes.loglog(LENGTHS, PEER[name], "s--", base=2, color=f"C{number}", label=f"{name}, flash-linear-attention 0.6.0, calls")
    axes.set_xticks(LENGTHS, [f"{n:,}" for n in LENGTHS])
    axes.set_yticks((0.5, 1, 2, 4, 8), ("0.5", "1", "2", "4", "8"))
    axes.set_xlabel("tokens of one sequence")
    axes.set_ylabel("forward + backward, ms")
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    plt.tight_layout()
    plt.savefig(path, dpi=120)


if __name__ == "__main__":
    main(sys.argv[1])
