"""Find rows of `kernels.tuned` for this card: `python -m kernels.tune [--shape B,T,H,D] [--recurrence NAME] [--stage NAME]...`.

For each stage the present setting and every candidate are first checked: the whole op runs with it, forward and backward, and must agree
with the torch backend (fp32, on the same bf16 inputs) in every output and gradient; a candidate that is wrong, spills out of shared memory
or fails to compile cannot win. Then the op is timed by graph replays with that stage changed. Prints the rows to put into the table, with
date and card; it changes no file. Some minutes, most of it compilation.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from kernels import tuned
from kernels.bench import NAMES, median_ms, operands, ours, passes
from kernels.chunk import Preconditioner, delta_rule
from kernels.recurrence import RECURRENCES
from kernels.tuned import ANY, Row, Setting

TOLERANCE = 2e-2  # relative RMS; wrong kernels are off by far more
CHECKED = (2, 300, 2)  # B, T, H of the check: a last chunk that is short
SCANS = [Setting(block, block // 16, stages) for block in (64, 128) for stages in (1, 2, 3)]
CANDIDATES = {
    "solve": [Setting(block, 4, 1, registers) for block in (64, 128) for registers in (None, 168)],
    "solve_channel": [Setting(64, 4, 1), Setting(64, 4, 1, 168), Setting(64, 8, 1)],
    "scan": SCANS,
    "states": SCANS,
    "scan_backward": SCANS,
    "pairs": [Setting(64, 4, 1), Setting(64, 4, 1, 168)],
    "gradients": [Setting(block, 4, 1) for block in (64, 128)],
    "gradients_channel": [Setting(64, 4, 1), Setting(64, 4, 1, 168), Setting(64, 8, 1)],
    "statistic_sums": [Setting(0, 1, 1, registers) for registers in (None, 64, 96)],
    "statistic_keys": [Setting(0, 1, 1, registers) for registers in (None, 144, 168)],
}


def results(run: Callable[[dict[str, Tensor]], Tensor], x: dict[str, Tensor]) -> list[Tensor]:
    """The output and every gradient."""
    o = run(x)
    torch.manual_seed(1)
    return [o, *torch.autograd.grad(o, list(x.values()), torch.randn_like(o))]


def by_torch(x: dict[str, Tensor]) -> Tensor:
    precond = Preconditioner(x["forget"], x["gain"], x["center"]) if "gain" in x else None
    return delta_rule(x["q"], x["k"], x["v"], x["beta"], x.get("decay"), precond, backend="torch")[0]


def worst_error(x: dict[str, Tensor], judge: list[Tensor]) -> float:
    """NaN counts as infinite."""
    errors = [((y.double() - z.double()).norm() / z.double().norm()).item() for y, z in zip(results(ours, x), judge, strict=True)]
    return max(e if e == e else float("inf") for e in errors)


def tried(stage: str, settings: Iterable[Setting], small: dict, judge: list[Tensor], timed: Callable) -> list[tuple[float, Setting]]:
    """(milliseconds of the whole op, setting) of the right ones, fastest first; a line for each."""
    rows, before = [], tuned.TABLE[stage]
    for setting in settings:
        tuned.TABLE[stage] = (Row(2, ANY, ANY, setting),)
        try:
            error = worst_error(small, judge)
            ms = median_ms(timed, graph=True) if error < TOLERANCE else float("inf")
        except Exception as failure:  # whatever the compiler says: this candidate is out
            print(f"{stage:20}{tuple(setting)!s:24}fails: {str(failure).splitlines()[0][:70]}", flush=True)
            continue
        finally:
            tuned.TABLE[stage] = before
        print(f"{stage:20}{tuple(setting)!s:24}error {error:.1e}  op {ms:.3f} ms", flush=True)
        rows.append((ms, setting))
    return sorted(row for row in rows if row[0] < float("inf"))


def launched(recurrence: str) -> list[str]:
    """The stages that a recurrence goes through, of those with candidates."""
    one = RECURRENCES[recurrence]
    channel, preconditioned = one.decay == "channel", one.preconditioner != "none"
    solve = ["solve_channel" if channel else "solve"]
    statistic = ["statistic_sums", "statistic_keys"] if preconditioned else []
    return [*statistic, *solve, "scan", "states", "scan_backward", "pairs", "gradients_channel" if channel else "gradients"]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="32,2048,8,128", metavar="B,T,H,D")
    parser.add_argument("--recurrence", default="pgdn", choices=NAMES)
    parser.add_argument("--stage", action="append", choices=tuple(CANDIDATES))
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no CUDA device: candidates are timed on a GPU")
    B, T, H, D = (int(n) for n in options.shape.split(","))
    small = operands(options.recurrence, *CHECKED, D)
    judge = results(by_torch, small)
    _, timed = passes(ours, operands(options.recurrence, B, T, H, D))
    stages = options.stage or launched(options.recurrence)
    for stage in stages:
        candidates = dict.fromkeys((tuned.setting(stage, small["k"]), *CANDIDATES[stage]))  # the present one first, each once
        rows = tried(stage, candidates, small, judge, timed)
        if rows:
            ms, best = rows[0]
            where = f"{options.shape}, {torch.cuda.get_device_name()}, {time.strftime('%Y-%m-%d')}"
            print(f'"{stage}": Row(2, {D}, ANY, {best}),  # op {ms:.3f} ms, {where}', flush=True)


if __name__ == "__main__":
    main()
