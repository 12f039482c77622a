"""Root-mean-square normalisation, plain and gated. Statistics in fp32 (fp64 for fp64 inputs), output in x's dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.operands import computation_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis; x [..., D], weight [D]."""
    return _normed(x, weight, eps).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = rms_norm(x) * sigmoid(gate), KDA's output gate (docs/paper.md, section 3); x, gate [..., D], weight [D]. Rounded once."""
    if gate.shape != x.shape:
        raise ValueError(f"gate has shape {list(gate.shape)} and x has {list(x.shape)}: they must be equal")
    y = _normed(x, weight, eps)
    return (y * torch.sigmoid(gate.to(y.dtype))).to(x.dtype)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight has shape {list(weight.shape)} and x has {x.shape[-1]} channels: weight must be [{x.shape[-1]}]")
    wide = x.to(computation_dtype(x))
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
