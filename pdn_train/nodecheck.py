"""Before training: does every node compute, communicate, write and keep time? A node that does not is named, with what is wrong with it.

Takes well under a second a node: two exact matrix products (fp32, bf16) on each rank's device, one all-reduce of 32 KB, a file, the clocks.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from pdn_train.world import World

SKEW_SECONDS = 5.0
SIDE = 256


class NodeError(RuntimeError):
    """A node cannot be trained on; the message names the node, the rank and the fault."""


def check_nodes(world: World, folder: Path, needed_bytes: float) -> None:
    """Collective. folder: one that rank 0 has made, on the shared disk; needed_bytes: what the run will hold on a device.

    Raises NodeError, the same on every rank, listing each fault as "HOST, rank R: FAULT".
    """
    checks = [lambda: product_fault(world.device), lambda: memory_fault(world.device, needed_bytes), lambda: disk_fault(folder)]
    found = [fault for check in checks if (fault := _fault(check)) is not None]
    if world.size > 1 and (fault := _fault(lambda: sum_fault(world))) is not None:
        found.append(fault)
    world.barrier()
    said = world.gather((socket.gethostname(), time.time(), found))
    middle = statistics.median(clock for _, clock, _ in said)
    lines = []
    for rank, (host, clock, faults) in enumerate(said):
        if abs(clock - middle) > SKEW_SECONDS:
            faults = [*faults, f"its clock is {clock - middle:+.0f} s off the others'"]
        lines += [f"{host}, rank {rank}: {fault}" for fault in faults]
    if lines:
        raise NodeError("; ".join(lines) + ". Leave such nodes out (sbatch --exclude), or mend them")


def _fault(check: Callable[[], str | None]) -> str | None:
    try:
        return check()
    except Exception as error:  # a broken device raises what it likes; the other ranks must hear of it
        return f"{type(error).__name__}: {error}"


def product_fault(device: torch.device) -> str | None:
    """Integers below 8 in bf16 and fp32: every product and partial sum is exact, so any order of summation gives the same bits."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-7, 8, (SIDE, SIDE), generator=generator) for _ in range(2))
    right = a @ b
    for dtype in (torch.float32, torch.bfloat16):
        if not torch.equal((a.to(device, dtype) @ b.to(device, dtype)).cpu(), right.to(dtype)):
            return f"a {dtype} matrix product on {device} is wrong"
    return None


def memory_fault(device: torch.device, needed_bytes: float) -> str | None:
    """A run that does not fit an empty device either is not the node's fault."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    if free < needed_bytes < total:
        gib = [f"{size / 2**30:.1f}" for size in (free, total, needed_bytes)]
        return f"{device} has {gib[0]} of {gib[1]} GiB free and the run needs about {gib[2]}: another process holds the rest"
    return None


def disk_fault(folder: Path) -> str | None:
    if not folder.is_dir():
        return f"{folder}, which rank 0 has made, is not there: it must lie on a disk that all nodes share"
    probe = folder / f".probe-{uuid.uuid4().hex}"
    try:
        with probe.open("wb") as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
        probe.unlink()
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror})"
    return None


def sum_fault(world: World) -> str | None:
    numbers = torch.arange(4096, device=world.device)
    mine = numbers * (world.rank + 1)
    dist.all_reduce(mine)
    return None if torch.equal(mine, numbers * (world.size * (world.size + 1) // 2)) else f"an all-reduce over {world.size} ranks is wrong"
