"""Launching a Triton kernel with little work on the host.

Triton's own launcher classifies every argument at every call (type, divisibility by 16, equality to 1) and looks the compiled kernel up
by the result: tens of microseconds, which bound the op at small shapes. Here the caller names what that result depends on, `key`; the
compiled kernel is looked up by it, and Triton's launcher runs only for a new one.

A key must hold all that distinguishes the compiled variants but the kernel's constants: dtypes, which tensors are None, integers. The
device is that of the first argument, a tensor. Every tensor must start at a multiple of 16 bytes. In the interpreter there is nothing to
look up.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor
from triton import knobs
from triton.runtime import driver

NUMBERS = (int, float, type(None))
KEPT = 4096  # variants; then all are forgotten, and looked up by Triton again

_compiled: dict = {}


def launch(kernel, programs: int, key: Hashable, *arguments, num_warps: int, num_stages: int = 1, maxnreg=None, **constants) -> None:
    """kernel[(programs,)](*arguments, **constants): arguments in order, then the kernel's constants by name, in its order."""
    if programs == 0:
        return
    device = arguments[0].device
    # the function: a kernel of Triton takes a lock to be hashed
    place = (kernel.fn, key, device, num_warps, num_stages, maxnreg, *constants.values())
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
