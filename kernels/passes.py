"""What the passes round the recurrence share before they compute: the choice of a backend, and its device.

A pass (convolution, gates, norm, SwiGLU) has two backends: "torch", plain PyTorch on any device and in fp64 too, and "triton", one launch
forward and one or two backward. None falls back to the other.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor


def check_backend(backend: str, x: Tensor, name: str) -> None:
    """Raise ValueError unless the backend exists and takes tensors such as x, the argument `name`."""
    if backend not in ("torch", "triton"):
        raise ValueError(f"backend={backend!r} is not one of 'triton', 'torch'")
    if backend == "torch":
        return
    if x.dtype == torch.float64:
        raise ValueError(f"{name} is {x.dtype}: backend='triton' takes bf16, fp16 and fp32; use backend='torch'")
    if not x.is_cuda and not _interpreted():
        raise ValueError(f"{name} is on {x.device}: backend='triton' needs a CUDA device; use backend='torch'")


def _interpreted() -> bool:
    try:
        from triton import knobs
    except ImportError:
        raise ValueError("backend='triton' needs Triton, which is not installed; use backend='torch'") from None
    return knobs.runtime.interpret


def on_device(x: Tensor):
    """A context in which x's device is the current one: Triton launches there."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()
