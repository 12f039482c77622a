"""Launching a Triton kernel with little work on the host.

Triton's own launcher classifies every argument at every call (type, divisibility by 16, equality to 1) and looks the compiled kernel up
by the result: tens of microseconds, which bound the op at small shapes. Here the caller names what that result depends on, `key`; the
compiled kernel is looked up by it, and Triton's launcher runs only for a new one.

A key must hold all that distinguishes the compiled variants but the kernel's constants: dtypes, which tensors are None, integers. The
device is that of the first argument, a tensor. Every tensor must start at a multiple of 16 bytes. In the interpreter there is nothing to
look up.

A kernel takes Triton up to three seconds of one core to compile. Inside `compiling` kernels are compiled side by side and not run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

NUMBERS = (int, float, type(None))
MOST_WORKERS = 32
KEPT = 4096  # variants; then all are forgotten, and looked up by Triton again

_compiled: dict = {}


class _Compiling(threading.local):
    """What `compiling` has begun in this thread; None outside of it."""

    begun: dict[Hashable, Future] | None = None
    pool: ThreadPoolExecutor


_now = _Compiling()


@contextmanager
def compiling(device: torch.device) -> Iterator[None]:
    """Inside, every `launch` of this thread on this GPU has its kernel compiled, where it is not yet, on another core, and runs nothing:
    outputs are left unwritten. At the end all are compiled. Raises what a compilation raised."""
    workers = min(MOST_WORKERS, len(os.sched_getaffinity(0)))  # the cores that this process may use
    with ThreadPoolExecutor(workers, initializer=torch.cuda.set_device, initargs=(device,)) as _now.pool:
        _now.begun = begun = {}
        try:
            yield
        finally:
            _now.begun = None
    for compilation in begun.values():
        compilation.result()


def only_compiling() -> bool:
    """Whether this thread's launches run nothing."""
    return _now.begun is not None


def _begin(place: Hashable, kernel, programs: int, arguments: tuple, options: dict) -> None:
    if place not in _compiled and place not in _now.begun:
        types = [x.dtype if isinstance(x, Tensor) else x for x in arguments]  # not the tensors, which would live on
        _now.begun[place] = _now.pool.submit(_ready, kernel, (programs, 1, 1), types, options)


def _ready(kernel, grid: tuple[int, int, int], types: list, options: dict) -> None:
    """Compiles; and indexing it loads the machine code and has its launcher, which is C, compiled too: 0.4 s of a core."""
    kernel.warmup(*types, grid=grid, **options)[grid]


def launch(kernel, programs: int, key: Hashable, *arguments, num_warps: int, num_stages: int = 1, maxnreg=None, **constants) -> None:
    """kernel[(programs,)](*arguments, **constants): arguments in order, then the kernel's constants by name, in its order."""
    if programs == 0:
        return
    device = arguments[0].device
    # the function: a kernel of Triton takes a lock to be hashed
    place = (kernel.fn, key, device, num_warps, num_stages, maxnreg, *constants.values())
    if only_compiling():
        options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
        return _begin(place, kernel, programs, arguments, constants | options)
    found = _compiled.get(place)
    if found is not None:
        # an address costs less than a tensor, whose address Triton asks the driver about
        plain = [x if x.__class__ in NUMBERS else x.data_ptr() for x in arguments]
        if knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:  # a profiler of Triton's listens
            found[(programs, 1, 1)](*plain, *constants.values())
            return
        stream = driver.active.get_current_stream(device.index)
        found.run(programs, 1, 1, stream, found.function, found.packed_metadata, None, None, None, *plain, *constants.values())
        return
    made = kernel[(programs,)](*arguments, **constants, num_warps=num_warps, num_stages=num_stages, maxnreg=maxnreg)
    if made is not None:
        if len(_compiled) >= KEPT:
            _compiled.clear()
        _compiled[place] = made


def power_of_2(n: int) -> int:
    """The next one. (`triton.next_power_of_2` and `triton.cdiv` cost as much as a launch argument each.)"""
    return 1 << (n - 1).bit_length()


def cdiv(n: int, size: int) -> int:
    return -(-n // size)


def aligned(x: Tensor | None) -> Tensor | None:
    """x contiguous and from a multiple of 16 bytes on: itself, or a copy."""
    if x is None:
        return None
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
