"""Runs with seeds, compared: the spread of each variant, and differences paired by seed.

What is the same at a seed (the order of the data, and of the initial weights those drawn before the shapes differ, the embedding first)
cancels in the difference of two runs with that seed, so a pair's interval can be narrower than its members' spreads suggest. Means,
standard deviations (n - 1), and 95 % intervals of a mean difference by Student's t with n - 1 degrees of freedom: with three seeds 4.3
standard errors, and no claim of more than that. A run whose value is NaN makes its variant's numbers and its pairs' NaN.
"""

from __future__ import annotations

import math
import statistics

# Student's t, two-sided 95 %, by degrees of freedom 1 .. 10; beyond, the value for 10, which is a little too wide
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
Values = dict[str, float]  # by seed


def compare(values: dict[str, dict[str, Values]], pairs: list[list[str]], better: str) -> dict:
    """{variants: {name: {choice, values, mean, sd}}, pairs: {"a -> b": {differences, mean, sd, error, low, high}}} of one setting.

    values: variant -> choice -> its runs. Of several choices the one counts that has the most seeds and then the best mean.
    """
    best = {variant: _best(choices, better) for variant, choices in values.items() if choices}
    found = {f"{a} -> {b}": _paired(best[a]["values"], best[b]["values"]) for a, b in pairs if a in best and b in best}
    return {"variants": best, "pairs": {name: pair for name, pair in found.items() if pair is not None}}


def _best(choices: dict[str, Values], better: str) -> dict:
    sign = -1 if better == "lower" else 1

    def merit(choice: str) -> tuple[int, float]:
        mean = statistics.fmean(choices[choice].values())
        return len(choices[choice]), -math.inf if math.isnan(mean) else sign * mean

    choice = max(choices, key=merit)
    return {"choice": choice, "values": choices[choice], **_spread(list(choices[choice].values()))}


def _spread(values: list[float]) -> dict:
    """Both NaN where a value is; `statistics.stdev` fails there."""
    sd = None if len(values) < 2 else statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan
    return {"mean": statistics.fmean(values), "sd": sd}


def _paired(first: dict[str, float], second: dict[str, float]) -> dict | None:
    """Second minus first, seed by seed; error: of the mean; low, high: its 95 % interval. None without a seed in common."""
    differences = {seed: second[seed] - first[seed] for seed in first if seed in second}
    if not differences:
        return None
    found = {"differences": differences, **_spread(list(differences.values())), "error": None, "low": None, "high": None}
    if found["sd"] is not None:
        n = len(differences)
        error = found["sd"] / math.sqrt(n)
        reach = STUDENT[min(n - 1, len(STUDENT)) - 1] * error
        found |= {"error": error, "low": found["mean"] - reach, "high": found["mean"] + reach}
    return found


def table(made: dict) -> str:
    """The summary as Markdown."""
    settings = list(made["settings"])
    variants = list(dict.fromkeys(v for s in settings for v in made["settings"][s]["variants"]))
    lines = [f"{made['metric']}, mean ± standard deviation over seeds (their number)", "", *_head("variant", settings)]
    lines += [_row(v, [_cell(made["settings"][s]["variants"].get(v)) for s in settings]) for v in variants]
    pairs = list(dict.fromkeys(p for s in settings for p in made["settings"][s]["pairs"]))
    if pairs:
        lines += ["", f"difference of {made['metric']} at the same seed, mean and its 95 % interval", "", *_head("pair", settings)]
        lines += [_row(p, [_difference(made["settings"][s]["pairs"].get(p), made["better"]) for s in settings]) for p in pairs]
    return "\n".join(lines) + "\n"


def _head(first: str, settings: list[str]) -> list[str]:
    return [_row(first, settings), _row("---", ["---"] * len(settings))]


def _row(first: str, cells: list[str]) -> str:
    return f"| {' | '.join([first, *cells])} |"


def _cell(variant: dict | None) -> str:
    if variant is None:
        return "-"
    spread = "" if variant["sd"] is None else f" ± {variant['sd']:.4f}"
    choice = "" if variant["choice"] == "only" else f", {variant['choice']}"
    return f"{variant['mean']:.4f}{spread} ({len(variant['values'])}{choice})"


def _difference(pair: dict | None, better: str) -> str:
    """With a word where the interval leaves 0 out."""
    if pair is None:
        return "-"
    if pair["low"] is None:
        return f"{pair['mean']:+.4f} (1 seed)"
    word = ""
    if pair["low"] > 0 or pair["high"] < 0:
        word = " better" if (pair["mean"] > 0) == (better == "higher") else " worse"
    return f"{pair['mean']:+.4f} [{pair['low']:+.4f}, {pair['high']:+.4f}]{word}"
