"""A recurrence's first call: all its kernels compiled side by side before any is run.

They are known only by their launches, so the stages of the forward pass, and of the backward pass where there will be one, are gone through
once inside `launch.compiling`, with the call's own tensors, and nothing is run: what the stages hand to each other is unwritten memory,
whose values no Python code reads. Without this each kernel, 15 of them for PKDA, is compiled when first launched, one after the other.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from kernels.kept import Keep
from kernels.launch import compiling, only_compiling

_known: set[Hashable] = set()


class _Context:
    """What stands in for an autograd function's ctx."""

    def save_for_backward(self, *tensors) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        pass


def prepare(function: type[torch.autograd.Function], kind: Hashable, arguments: tuple, backward: bool) -> None:
    """Once a kind: compiles what function.apply(*arguments), and with backward=True the backward pass of its first output, launch on the
    current GPU.

    kind: all of the call that decides about kernels. A difference it lacks costs time, no more: what is missing then is compiled late.
    """
    kind = function, kind, torch.cuda.current_device(), backward
    if kind in _known or only_compiling() or torch.cuda.is_current_stream_capturing() or torch.compiler.is_compiling():
        return
    _known.add(kind)
    ctx = _Context()
    with torch.no_grad(), Keep([], everything=False), compiling(torch.device("cuda", torch.cuda.current_device())):
        first, *others = function.forward(ctx, *arguments)
        if backward:
            function.backward(ctx, torch.empty_like(first), *[None for _ in others])
