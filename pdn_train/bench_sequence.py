"""One sequence over the ranks against one rank: `torchrun --nproc-per-node W -m pdn_train.bench_sequence [--recurrence NAME]...`

The recurrence forward and backward, on the whole sequence on every rank by itself and in pieces on all of them together: milliseconds a
call of ten in a row, as a model's layers follow each other, the median of the slowest rank, and the largest relative RMS difference of
outputs and gradients over ranks. Then what `choose` reckons with, as measured here: all-gathers of a small and a large tensor, a hand-on to
the next rank, a product of maps. fp32 gates; --dtype for the rest.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kernels.chunk import Preconditioner, delta_rule
from kernels.maps import Piece, Relay, follow
from kernels.recurrence import RECURRENCES
from pdn_train.sequence import Line, connect, shift
from pdn_train.world import World

REPEATS = 20


def operands(name: str, B: int, T: int, H: int, D: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Random tensors of one call, the same on every rank; log decays near zero, so that states reach over the pieces."""
    generator, kind = torch.Generator().manual_seed(0), RECURRENCES[name]
    shapes = dict.fromkeys(("q", "k", "v", "do"), (B, T, H, D)) | {"beta": (B, T, H)}
    if kind.decay != "none":
        shapes["decay"] = (B, T, H, D) if kind.decay == "channel" else (B, T, H)
    if kind.preconditioner != "none":
        shapes |= {"forget": (B, T, H), "gain": (B, T, H)}
    made = {}
    for n, shape in shapes.items():
        if n in ("q", "k", "v", "do"):
            made[n] = torch.randn(shape, generator=generator).to(dtype)
        else:
            made[n] = torch.rand(shape, generator=generator) * (-1e-3 if n in ("decay", "forget") else 1)
    return {n: x.to(device) for n, x in made.items()}


def passes(x: dict[str, Tensor], backend: str, relay: Relay | None = None) -> list[Tensor]:
    """o and the gradients to all inputs but do."""
    leaves = {n: y.detach().requires_grad_() for n, y in x.items() if n != "do"}
    center = torch.zeros(x["q"].shape[2], device=x["q"].device)
    precond = Preconditioner(leaves["forget"], leaves["gain"], center) if "gain" in x else None
    o, _ = delta_rule(*(leaves[n] for n in ("q", "k", "v", "beta")), leaves.get("decay"), precond, backend=backend, relay=relay)
    with torch.autograd.set_multithreading_enabled(False):  # as the trainer does
        return [o.detach(), *torch.autograd.grad(o, list(leaves.values()), x["do"])]


def median_ms(run: Callable[[], object], world: World, repeats: int) -> float:
    """Of the slowest rank in each call."""
    for _ in range(2):
        run()
    times = []
    for _ in range(repeats):
        _wait(world)
        world.barrier()
        start = time.perf_counter()
        run()
        _wait(world)
        times.append(max(world.gather(time.perf_counter() - start)))
    return 1e3 * sorted(times)[repeats // 2]


def _wait(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()


def compare(name: str, shape: tuple[int, ...], dtype: torch.dtype, world: World, line: Line, backend: str, repeats: int) -> str:
    B, T, H, D = shape
    whole = operands(name, B, T, H, D, world.device, dtype)
    tokens = T // world.size
    span = slice(world.rank * tokens, (world.rank + 1) * tokens)
    mine, piece = {n: x[:, span].contiguous() for n, x in whole.items()}, Piece.cut(T, B, None, world.rank, world.size)

    relay = line.relay(piece, world.device)

    def in_pieces() -> list[Tensor]:
        return passes(mine, backend, relay.for_layer())

    alone = median_ms(partial(_ten_times, lambda: passes(whole, backend)), world, repeats) / 10
    together = median_ms(partial(_ten_times, in_pieces), world, repeats) / 10
    errors = [_error(a, b[:, span]) for a, b in zip(in_pieces(), passes(whole, backend), strict=True)]
    worst = max(world.gather(max(errors)))
    return f"{name:8}{','.join(map(str, shape)):18}{alone:10.3f}{together:12.3f}{alone / together:8.2f}x{worst:12.1e}"


def _error(x: Tensor, y: Tensor) -> float:
    return ((x.double() - y.double()).norm() / y.double().norm()).item()


def figures(world: World, line: Line, repeats: int) -> list[str]:
    """What `sequence.Network` holds, in microseconds a call as the host sees it."""
    small, large = (torch.zeros(n, device=world.device) for n in (1024, 2**20))
    maps, states = (torch.zeros(1, 8, 128, 128, device=world.device) for _ in range(2))
    calls = {
        "all-gather of 4 KiB a rank": lambda: line.whole.gather(small),
        "all-gather of 4 MiB a rank": lambda: line.whole.gather(large),
        "hand-on of 4 KiB": lambda: shift(line.whole, small, reverse=False),
        "product of 8 maps [128, 128]": lambda: follow(maps, states, states),
    }
    return [f"{what:32}{1e3 * median_ms(partial(_ten_times, call), world, repeats) / 10:10.1f} us" for what, call in calls.items()]


def _ten_times(call: Callable[[], object]) -> None:
    for _ in range(10):
        call()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recurrence", action="append", choices=tuple(RECURRENCES))
    parser.add_argument("--shape", default="1,65536,8,128", metavar="B,T,H,D")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--backend", choices=("triton", "torch"), default="triton")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    options = parser.parse_args(arguments)
    world = World.detect()
    if world.size == 1:
        parser.error("one rank has nobody to share a sequence with: start it with torchrun")
    world.sequence = world.size
    world.start(600)
    line = connect(world, 600)
    card = torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu"
    lines = [f"{world.size} x {card}, torch {torch.__version__}, {options.dtype}; ms"]
    lines.append(f"{'':8}{'B,T,H,D':18}{'one rank':>10}{'in pieces':>12}{'':9}{'difference':>12}")
    shape, dtype = tuple(int(n) for n in options.shape.split(",")), getattr(torch, options.dtype)
    lines += [compare(name, shape, dtype, world, line, options.backend, options.repeats) for name in options.recurrence or ("pgdn",)]
    lines += figures(world, line, options.repeats)
    if world.leads:
        print("\n".join(lines), flush=True)
    world.barrier()
    world.stop()


if __name__ == "__main__":
    main()
