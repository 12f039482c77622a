"""Draw a sweep: `python docs/sweep_plot.py FOLDER OUT.png ["TITLE=SETTING,SETTING,..." ...]`.

FOLDER holds the summary.json of `pdn_train.sweep`. A panel for each TITLE (default: one with all settings): along several settings a line
for each variant, of one setting a point for each variant; means, bars of one standard deviation over seeds, and every run as a dot. The
preconditioned twin of a baseline has its colour and a full line; the baseline's is dashed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402


def main(folder: str, out: str, *panels: str) -> None:
    """Raises OSError without a summary.json, ValueError for a panel that is none or has a setting that is none."""
    made = json.loads((Path(folder) / "summary.json").read_text())
    parts = [_panel(text, list(made["settings"])) for text in panels] or [("", list(made["settings"]))]
    figure, axes = plt.subplots(1, len(parts), figsize=(1 + 4.5 * len(parts), 3.4), constrained_layout=True, sharey=True, squeeze=False)
    for ax, (title, names) in zip(axes[0], parts, strict=True):
        settings = {name: made["settings"][name]["variants"] for name in names}
        (along_settings if len(settings) > 1 else along_variants)(ax, settings)
        ax.set_title(title, fontsize=10)
    axes[0][0].set_ylabel(made["metric"])
    figure.savefig(out, dpi=120)


def _panel(text: str, settings: list[str]) -> tuple[str, list[str]]:
    title, equals, names = text.rpartition("=")
    if not equals:
        raise ValueError(f"the panel '{text}' is not of the form TITLE=SETTING,SETTING,...")
    for name in names.split(","):
        if name not in settings:
            raise ValueError(f"the panel '{text}' has the setting '{name}'; there are {', '.join(settings)}")
    return title, names.split(",")


def along_settings(ax, settings: dict) -> None:
    variants = list(dict.fromkeys(v for found in settings.values() for v in found))
    for n, variant in enumerate(variants):
        places = [(x + 0.06 * (n - len(variants) / 2), found[variant]) for x, found in enumerate(settings.values()) if variant in found]
        xs, colour = [x for x, _ in places], f"C{n // 2}"
        means, spreads = [known(v["mean"]) for _, v in places], [v["sd"] or 0 for _, v in places]
        style = {"color": colour, "linestyle": "-" if variant.startswith("p") else "--", "label": variant}
        ax.errorbar(xs, means, spreads, capsize=2, linewidth=1, **style)
        dots(ax, xs, [v["values"] for _, v in places], colour)
    ax.set_xticks(range(len(settings)), settings)
    ax.legend(frameon=False, fontsize=8, ncols=2)


def along_variants(ax, settings: dict) -> None:
    (found,) = settings.values()
    xs = list(range(len(found)))
    ax.errorbar(xs, [known(v["mean"]) for v in found.values()], [v["sd"] or 0 for v in found.values()], fmt="o", capsize=3, color="C0")
    dots(ax, xs, [v["values"] for v in found.values()], "C1")
    ax.set_xticks(xs, found, rotation=45, ha="right")


def known(mean: float | None) -> float:
    """NaN, of which nothing is drawn, where a run's value was not finite."""
    return math.nan if mean is None else mean


def dots(ax, xs: list[float], values: list[dict], colour: str) -> None:
    for x, by_seed in zip(xs, values, strict=True):
        ax.plot([x] * len(by_seed), list(by_seed.values()), ".", color=colour, alpha=0.5, markersize=4)


def command(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sweep_plot.py", description="Draw a sweep.")
    parser.add_argument("folder", metavar="FOLDER", help="with the summary.json of pdn_train.sweep")
    parser.add_argument("out", metavar="OUT.png")
    parser.add_argument("panels", nargs="*", metavar="TITLE=SETTING,SETTING,...")
    a = parser.parse_args(argv)
    try:
        main(a.folder, a.out, *a.panels)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(command())
