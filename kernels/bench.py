"""Time the op: `python -m kernels.bench [--peer fla] [--shape B,T,H,D]... [--recurrence NAME]... [--graph] [--launches]`. Prints a table.

Medians over single calls between CUDA events, host work included as in a training step; with --graph each pass is captured once and the
replays are timed, which leaves the card's own time; with --launches the kernels of one forward and backward pass are listed in order, each
with its own time. bf16, gates fp32, q and k normalised in the op. With --peer fla (that is
flash-linear-attention, installed by you) its op runs in the same process on the same tensors, and the ratio is printed; its first calls
compile for minutes.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.chunk import Preconditioner, delta_rule
from kernels.recurrence import RECURRENCES

SHAPES = ("1,2048,8,128", "1,8192,8,128", "1,32768,8,128", "32,2048,8,128")
NAMES = ("dn", "gdn", "kda", "pdn", "pgdn", "pkda")
REPEATS = 20
GATES = {"decay": "g", "forget": "g_atk", "gain": "beta_atk", "center": "log_atk_scale"}  # the peer's names of ours
PEERS = {  # recurrence -> module and function; the peer has no PDN
    "dn": ("fla.ops.delta_rule", "chunk_delta_rule"),
    "gdn": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "kda": ("fla.ops.kda", "chunk_kda"),
    "pgdn": ("fla.ops.precond_gated_delta_rule", "chunk_precond_gated_delta_rule"),
    "pkda": ("fla.ops.precond_kda", "chunk_precond_kda"),
}


def operands(name: str, B: int, T: int, H: int, D: int) -> dict[str, Tensor]:
    """Random tensors of one call, with gradients."""
    torch.manual_seed(0)
    made = {n: torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16) for n in ("q", "k", "v")}
    gates = {"beta": 1, "decay": -1, "forget": -1, "gain": 1}
    made |= {n: sign * torch.rand(B, T, H, device="cuda") for n, sign in gates.items()} | {"center": torch.zeros(H, device="cuda")}
    match RECURRENCES[name].decay:
        case "none":
            made.pop("decay")
        case "channel":
            made["decay"] = -torch.rand(B, T, H, D, device="cuda")
    if RECURRENCES[name].preconditioner == "none":
        made = {n: x for n, x in made.items() if n not in ("forget", "gain", "center")}
    return {n: x.requires_grad_() for n, x in made.items()}


def ours(x: dict[str, Tensor]) -> Tensor:
    precond = Preconditioner(x["forget"], x["gain"], x["center"]) if "gain" in x else None
    return delta_rule(x["q"], x["k"], x["v"], x["beta"], x.get("decay"), precond)[0]


def peer(name: str) -> Callable[[dict[str, Tensor]], Tensor]:
    module, function = PEERS[name]
    call = getattr(importlib.import_module(module), function)
    return lambda x: call(**{GATES.get(n, n): y for n, y in x.items()}, use_qk_l2norm_in_kernel=True)[0]


def passes(op: Callable[[dict[str, Tensor]], Tensor], x: dict[str, Tensor]) -> tuple[Callable, Callable]:
    """The forward pass alone, without a graph, and forward and backward."""
    leaves, do = list(x.values()), torch.randn_like(x["v"])

    def forward():
        with torch.no_grad():
            op(x)

    def both():
        with torch.autograd.set_multithreading_enabled(False):  # as the trainer does
            torch.autograd.grad(op(x), leaves, do, allow_unused=True)

    return forward, both


def median_ms(run: Callable, graph: bool) -> float:
    for _ in range(3):
        run()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        run = captured.replay
    times = []
    for _ in range(REPEATS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times)[REPEATS // 2]


def launches(run: Callable) -> list[tuple[str, float]]:
    """(kernel, median ms) of what one call launches, in order."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(REPEATS):
            run()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    size = len(events) // REPEATS
    calls = [events[i : i + size] for i in range(0, size * REPEATS, size)]
    return [(same[0].name, sorted(e.device_time for e in same)[REPEATS // 2] / 1e3) for same in zip(*calls, strict=True)]


def title() -> str:
    versions = f"torch {torch.__version__}, triton {importlib.import_module('triton').__version__}"
    return f"{time.strftime('%Y-%m-%d')}, {torch.cuda.get_device_name()}, {versions}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer", choices=("fla",))
    parser.add_argument("--shape", action="append", metavar="B,T,H,D")
    parser.add_argument("--recurrence", action="append", choices=NAMES)
    parser.add_argument("--graph", action="store_true", help="time replays of a captured graph: the card's own time")
    parser.add_argument("--launches", action="store_true", help="list the kernels of one forward and backward pass")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no CUDA device: the Triton kernels are timed on a GPU")
    print(title() + ("; ms, medians of graph replays" if options.graph else "; ms, medians"))
    titles = f"{'recurrence':12}{'B,T,H,D':18}{'forward':>9}{'fwd+bwd':>9}{'ns/token-head':>15}"
    print(titles + (f"{'fla':>16}{'ratio':>8}" if options.peer else ""))
    for shape in options.shape or SHAPES:
        B, T, H, D = (int(n) for n in shape.split(","))
        for name in options.recurrence or NAMES:
            x = operands(name, B, T, H, D)
            forward, both = (median_ms(run, options.graph) for run in passes(ours, x))
            line = f"{name:12}{shape:18}{forward:9.3f}{both:9.3f}{both * 1e6 / (B * T * H):15.2f}"
            if options.peer and name in PEERS:
                theirs = [median_ms(run, options.graph) for run in passes(peer(name), x)]
                line += f"{theirs[0]:8.3f}{theirs[1]:8.3f}{theirs[1] / both:8.2f}"
            print(line, flush=True)
            if options.launches:
                for kernel, ms in launches(passes(ours, x)[1]):
                    print(f"    {kernel[:60]:62}{ms:8.3f}", flush=True)


if __name__ == "__main__":
    main()
