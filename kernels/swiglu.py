"""SwiGLU's middle: silu(gate) * up from one product. The Triton backend computes in fp32 and rounds once, the torch one each operation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kernels.passes import check_backend, on_device


def swiglu(x: Tensor, backend: str = "torch") -> Tensor:
    """y = silu(x[..., :M]) * x[..., M:] for x [..., 2 M]. One launch each way in Triton. Raises ValueError naming x or the backend."""
    check_backend(backend, x, "x")
    if x.shape[-1] % 2:
        raise ValueError(f"x has shape {list(x.shape)}: its last axis must be two halves")
    if backend == "torch":
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up
    from kernels import swiglu_triton  # only here: the other backend needs no Triton

    with on_device(x):
        return swiglu_triton.swiglu(x)
