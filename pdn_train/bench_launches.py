"""What the GPU did in a few steps, out of torch.profiler's events: launches and time by group, the dearest kernels, idle gaps, host waits.

A launch belongs to the first of GROUPS whose pattern its kernel's name fits; the Triton kernels to the file of `kernels/` that defines
them; anything else is torch's.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from torch.autograd import DeviceType
from torch.profiler import profile

import kernels

GROUPS = (
    ("communication", re.compile(r"nccl", re.IGNORECASE)),
    ("matrix products", re.compile(r"gemm|nvjet|cutlass|splitK|cublas|\bdot_kernel", re.IGNORECASE)),
    ("optimizer: AdamW", re.compile(r"FusedAdam|FusedOptimizer")),
    ("optimizer: gradient norm", re.compile(r"LpNorm|lpnorm", re.IGNORECASE)),
    ("embedding", re.compile(r"embedding|indexSelect|index_select|gatherTopK|RadixSort|radix_sort|DeviceScan", re.IGNORECASE)),
    ("copies, casts, fills", re.compile(r"Mem(cpy|set)|copy_kernel|CatArray|FillFunctor", re.IGNORECASE)),
)
WAITS = re.compile(r"Synchronize|^cudaMemcpy$|^cu\w*Memcpy(DtoH|HtoD)\w*$")
DEAREST, GAPS = 20, 6  # lines of the tables


class Launch(NamedTuple):
    name: str
    start: float  # microseconds
    stop: float


def launches(recorded: profile) -> tuple[list[Launch], Counter]:
    """Of a finished profile: what ran on the GPU, in order of its start, and how often the host called what makes it wait."""
    found, waits = [], Counter()
    for event in recorded.events():
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            found.append(Launch(event.name, event.time_range.start, event.time_range.end))
        elif WAITS.search(event.name):
            waits[event.name] += 1
    return sorted(found, key=lambda launch: launch.start), waits


def own_kernels() -> dict[str, str]:
    """The name of every Triton kernel of this project -> the files of `kernels/` that define one so named."""
    table: dict[str, str] = {}
    for info in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"kernels.{info.name}")
        for value in vars(module).values():
            function = getattr(value, "fn", None)  # of triton.jit's result
            if getattr(function, "__module__", None) == module.__name__:
                before = table.get(function.__name__, "kernels/")
                table[function.__name__] = before + (", " if before != "kernels/" else "") + f"{info.name}.py"
    return table


def group(name: str, own: dict[str, str]) -> str:
    return own.get(name) or next((title for title, pattern in GROUPS if pattern.search(name)), "torch: the rest")


def busy(launches: Iterable[Launch]) -> float:
    """Microseconds in which at least one of them ran; they are in order of their start."""
    total, until = 0.0, float("-inf")
    for launch in launches:
        total += max(0.0, launch.stop - max(launch.start, until))
        until = max(until, launch.stop)
    return total


def gaps(launches: list[Launch]) -> list[tuple[float, str, str]]:
    """(microseconds, what ended, what began) of each time between two launches in which nothing ran."""
    found, last = [], launches[0]
    for launch in launches[1:]:
        if launch.start > last.stop:
            found.append((launch.start - last.stop, last.name, launch.name))
        if launch.stop > last.stop:
            last = launch
    return found


def table(found: list[Launch], waits: Counter, steps: int) -> str:
    """`steps` steps as text, every number a step."""
    own = own_kernels()
    whole = max(launch.stop for launch in found) - found[0].start
    lines = [_row("group", "launches", "ms", "share")]
    for title, members in _collect(found, lambda launch: group(launch.name, own)):
        lines.append(
            _row(title, f"{len(members) / steps:.1f}", f"{_ms(members, steps):.2f}", f"{_ms(members, steps) * steps * 1e3 / whole:.1%}")
        )
    idle = whole - busy(found)
    lines.append(_row("idle", "", f"{idle / steps / 1e3:.2f}", f"{idle / whole:.1%}"))
    lines.append(_row("all", f"{len(found) / steps:.1f}", f"{whole / steps / 1e3:.2f}", ""))
    own_time = sum(launch.stop - launch.start for launch in found if launch.name in own)
    lines.append(f"kernels/ together {own_time / steps / 1e3:.2f} ms")
    exposed = busy(found) - busy(launch for launch in found if group(launch.name, own) != "communication")
    if exposed:
        lines.append(f"communication that nothing overlaps {exposed / steps / 1e3:.2f} ms")
    lines += ["", _row("kernel", "launches", "ms", "share")]
    for name, members in _collect(found, lambda launch: launch.name)[:DEAREST]:
        lines.append(
            _row(name, f"{len(members) / steps:.1f}", f"{_ms(members, steps):.2f}", f"{_ms(members, steps) * steps * 1e3 / whole:.1%}")
        )
    lines += ["", f"longest of {len(gaps(found)) / steps:.0f} idle gaps a step, in microseconds, between what and what"]
    lines += [f"{length:9.1f}  {_short(before)} .. {_short(after)}" for length, before, after in sorted(gaps(found), reverse=True)[:GAPS]]
    if waits:
        lines.append("the host waited in " + ", ".join(f"{name} x {count / steps:.1f}" for name, count in waits.most_common()))
    return "\n".join(lines)


def _collect(found: list[Launch], key) -> list[tuple[str, list[Launch]]]:
    """Grouped by key, the one of the most time first."""
    members: dict[str, list[Launch]] = {}
    for launch in found:
        members.setdefault(key(launch), []).append(launch)
    return sorted(members.items(), key=lambda item: -_ms(item[1], 1))


def _ms(members: list[Launch], steps: int) -> float:
    return sum(launch.stop - launch.start for launch in members) / steps / 1e3


def _row(title: str, launches: str, ms: str, share: str) -> str:
    return f"{title[:88]:90}{launches:>9}{ms:>9}{share:>8}"


def _short(name: str) -> str:
    return name if len(name) <= 60 else name[:57] + "..."
