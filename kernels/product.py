"""The product of a Linear layer, whose result can be kept while the layer is run again (`kernels.kept`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.kept import held, once


def linear(x: Tensor, weight: Tensor, read: bool = True) -> Tensor:
    """x weight^T for x [..., K] and weight [D, K]: [..., D], with the gradients of torch's own, bit for bit. read: as for `once`."""
    if not held():
        return F.linear(x, weight)
    return _Linear.apply(x.reshape(-1, x.shape[-1]), weight, read).view(*x.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, read):
        ctx.save_for_backward(x, weight)
        (y,) = once(lambda: (torch.mm(x, weight.t()),), read)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        of_x, of_weight, _ = ctx.needs_input_grad
        return torch.mm(grad, weight) if of_x else None, torch.mm(grad.t(), x) if of_weight else None, None
