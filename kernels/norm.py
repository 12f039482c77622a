"""Root-mean-square normalisation, plain, gated, and of a residual stream. Statistics in fp32 (fp64 for fp64 inputs), output in x's dtype.

Each has the backends of `kernels.passes`; in Triton (`kernels.norm_triton`) one launch, and one backward, or two for rows of more
than 256 channels. Gradients to all tensors; the same bits on every run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.operands import computation_dtype
from kernels.passes import check_backend, on_device

LARGEST = 8192  # channels of the Triton kernels, which hold a row


def rms_norm(x: Tensor, weight: Tensor, eps: float, backend: str = "torch") -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis; x [..., D], weight [D]."""
    _check(x, weight, backend)
    if backend == "torch":
        return _normed(x, weight, eps).to(x.dtype)
    from kernels import norm_triton  # only here and below: the other backend needs no Triton

    with on_device(x):
        return norm_triton.rms_norm(x, weight, eps)


def gated_rms_norm(
    x: Tensor,  # [..., D], or with a bias [..., G, D]
    gate: Tensor,  # like x
    weight: Tensor,  # [D]
    eps: float,
    bias: Tensor | None = None,  # [G, D]
    backend: str = "torch",
) -> Tensor:
    """y = rms_norm(x) * sigmoid(gate + bias), KDA's output gate (docs/paper.md, section 3). Rounded once."""
    _check(x, weight, backend)
    if gate.shape != x.shape:
        raise ValueError(f"gate has shape {list(gate.shape)} and x has {list(x.shape)}: they must be equal")
    if bias is not None and bias.shape != x.shape[-2:]:
        raise ValueError(f"bias has shape {list(bias.shape)} and x has {list(x.shape)}: bias must be [G, D] = {list(x.shape[-2:])}")
    if backend == "torch":
        y = _normed(x, weight, eps)
        gate = gate.to(y.dtype) if bias is None else gate.to(y.dtype) + bias.to(y.dtype)
        return (y * torch.sigmoid(gate)).to(x.dtype)
    from kernels import norm_triton

    with on_device(x):
        return norm_triton.gated_rms_norm(x, gate, bias, weight, eps)


def residual_rms_norm(stream: Tensor, x: Tensor | None, weight: Tensor, eps: float, backend: str = "torch") -> tuple[Tensor, Tensor]:
    """(stream + x, rms_norm(stream + x)), both [..., D]; with x = None (stream, rms_norm(stream)).

    Whoever goes on with the first output reads what was normed, so that in Triton the two gradients meet in the norm's own backward pass.
    """
    _check(stream, weight, backend)
    if x is not None and (x.shape != stream.shape or x.dtype != stream.dtype):
        raise ValueError(f"x is {x.dtype} {list(x.shape)} and stream is {stream.dtype} {list(stream.shape)}: they must be equal")
    if backend == "torch":
        total = stream if x is None else stream + x
        return total, _normed(total, weight, eps).to(total.dtype)
    from kernels import norm_triton

    with on_device(stream):
        return norm_triton.residual_rms_norm(stream, x, weight, eps)


def _check(x: Tensor, weight: Tensor, backend: str) -> None:
    check_backend(backend, x, "x")
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight has shape {list(weight.shape)} and x has {x.shape[-1]} channels: weight must be [{x.shape[-1]}]")
    if backend == "triton" and not x.numel():
        raise ValueError(f"x is empty: shape {list(x.shape)}; backend='triton' norms one row or more; use backend='torch'")
    if backend == "triton" and x.shape[-1] > LARGEST:
        raise ValueError(f"x has {x.shape[-1]} channels: backend='triton' norms at most {LARGEST}; use backend='torch'")


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(computation_dtype(x))
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
