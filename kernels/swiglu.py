"""SwiGLU's middle: silu(gate) * up from one product. The Triton backend computes in fp32 and rounds once, the torch one each operation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kernels.passes import check_backend, on_device
from kernels.product import linear


def swiglu(x: Tensor, backend: str = "torch") -> Tensor:
    """y = silu(x[..., :M]) * x[..., M:] for x [..., 2 M]. One launch each way in Triton. Raises ValueError naming x or the backend."""
    _check(x, backend)
    if backend == "torch":
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up
    from kernels import swiglu_triton  # only here and below: the other backend needs no Triton

    with on_device(x):
        return swiglu_triton.swiglu(x)


def swiglu_linear(x: Tensor, weight: Tensor, backend: str = "torch", read: bool = True) -> Tensor:
    """swiglu(x) weight^T for x [..., 2 M] and weight [D, M], of one dtype: [..., D]. In Triton only x is kept for the backward pass.

    read=False: no backward pass reads the result, so where it is run again it is not computed (`kernels.kept.once`)."""
    _check(x, backend)
    if weight.shape[1] != x.shape[-1] // 2:
        raise ValueError(f"weight has shape {list(weight.shape)}: for x {list(x.shape)} it must be [D, {x.shape[-1] // 2}]")
    if backend == "torch":
        return linear(swiglu(x), weight, read)
    from kernels import swiglu_triton

    with on_device(x):
        return swiglu_triton.swiglu_linear(x, weight, read)


def _check(x: Tensor, backend: str) -> None:
    check_backend(backend, x, "x")
    if not x.numel():
        raise ValueError(f"x is empty: shape {list(x.shape)}")
    if x.shape[-1] % 2:
        raise ValueError(f"x has shape {list(x.shape)}: its last axis must be two halves")
