"""Draw the recurrences of a trained model: `python docs/health_figures.py RUN_OR_EXPORT OUT.png [SHARDS]`.

What `pdn_train.health` measures on the first 1,024 tokens of SHARDS (default: the run's data.val_path), layer by layer: the statistic a and
the preconditioner b as histograms, k.w with its range, the write eigenvalue and the share of writes in which it is negative, the learned
centres of the heads, the gates, the norm of the state. Runs on a GPU where there is one; on a CPU a model made for Triton runs on the torch
kernels.
"""

from __future__ import annotations

import argparse
import sys

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402
import torch  # noqa: E402

from pdn_train.health import RANGES, TOKENS, Layer, measure  # noqa: E402
from pdn_train.shards import Shards  # noqa: E402
from pdn_train.weights import UNREADABLE, find, load_model  # noqa: E402


def main(path: str, out: str, shards: str | None = None) -> None:
    """Raises what `pdn_train.weights` and `pdn_train.shards` do, and ValueError where no shards are named."""
    source, device = find(path), "cuda" if torch.cuda.is_available() else "cpu"
    shards = shards or source.data.get("val_path")
    if shards is None:
        raise ValueError(f"{path} has no data.val_path: name a folder of shards after {out}")
    model, _ = load_model(source, device, kernel=None if device == "cuda" else "torch")
    folder = Shards.open(shards)
    ids = torch.from_numpy(folder.read(0, min(TOKENS, folder.tokens)))[None].to(device)
    layers = measure(model, ids)
    figure, axes = plt.subplots(2, 3, figsize=(12, 6.5), constrained_layout=True)
    figure.suptitle(f"{source.model.recurrence}, {source.model.num_layers} layers, {ids.shape[1]} tokens: {source.folder}", fontsize=9)
    bars(axes[0, 0], layers, "log10_a", "statistic, log10(a + eps)")
    bars(axes[0, 1], layers, "b", "preconditioner b")
    bars(axes[0, 2], layers, "kw", "k.w")
    lines(axes[1, 0], layers, ("eigenvalue/least", "eigenvalue/mean", "negative"), "write eigenvalue 1 - beta k.w")
    centers(axes[1, 1], model)
    lines(axes[1, 2], layers, ("beta", "decay", "gain", "precond_decay"), "gates, and |S|")
    norm = axes[1, 2].twinx()
    norm.plot([layer.numbers["state"] for layer in layers], "k:", linewidth=1)
    norm.set_ylabel("|S| (dotted)")
    figure.savefig(out, dpi=120)


def bars(ax, layers: list[Layer], name: str, title: str) -> None:
    """A layer a row, darker where more values lie."""
    ax.set_title(title, fontsize=10)
    if name not in layers[0].histograms:
        ax.text(0.5, 0.5, "no preconditioner", ha="center", transform=ax.transAxes)
        return
    rows = torch.tensor([layer.histograms[name] for layer in layers])
    low, high = RANGES[name]
    ax.imshow(rows / rows.sum(1, keepdim=True), aspect="auto", cmap="Greys", extent=(low, high, len(layers) - 0.5, -0.5))
    ax.set(ylabel="layer")


def lines(ax, layers: list[Layer], names: tuple[str, ...], title: str) -> None:
    for name in names:
        if name in layers[0].numbers:
            ax.plot([layer.numbers[name] for layer in layers], ".-", label=name, linewidth=1)
    ax.set_title(title, fontsize=10)
    ax.set_xlabel("layer")
    ax.legend(frameon=False, fontsize=8)


def centers(ax, model) -> None:
    ax.set_title("centre m, a dot a head (initially -0.2)", fontsize=10)
    for i, block in enumerate(model.blocks):
        if model.config.preconditioned:
            values = block.mixer.center.detach().cpu()
            ax.plot([i] * len(values), values, "C0.", markersize=4)
    ax.axhline(-0.2, color="grey", linewidth=0.5)
    ax.set_xlabel("layer")


def command(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="health_figures.py", description="Draw the recurrences of a trained model.")
    parser.add_argument("model", metavar="RUN_OR_EXPORT")
    parser.add_argument("out", metavar="OUT.png")
    parser.add_argument("shards", nargs="?", metavar="SHARDS", help="default: the run's data.val_path")
    a = parser.parse_args(argv)
    try:
        main(a.model, a.out, a.shards)
    except (OSError, ValueError, *UNREADABLE) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(command())
