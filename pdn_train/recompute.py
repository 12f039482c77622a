"""Activation checkpointing: a block keeps less of its forward pass and runs parts of it again in the backward pass.

    none        everything the backward pass needs is kept
    block       the block keeps its input and is run again, but for its last product, which is only added to the stream
    selective   it keeps its input and the products of its Linear layers but the last (`kernels.product`); all else is run again: norms,
                convolution, gates, activation functions, and with model.kernel=torch the recurrence. What the Triton recurrence makes for
                its backward pass is kept too: 0.8 KB a token and head (16 bits, 128 channels, a decay a head), and its stages are most of
                what would be run again. q, k, v and the gates, which it reads, are made again by one launch

The gradients are the same bit for bit, also under ZeRO-3. What each mode keeps, in bytes: `pdn_train.estimate`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels import kept


class _Again(torch.autograd.Function):
    """block(x, *rest), made without a graph; the backward pass makes it again with one, and goes back through that.

    `torch.utils.checkpoint` does it with hooks on every saved tensor, whose calls cost the host about as long as a block's own work.
    `graded` [0] makes the output part of the graph where x is not, but parameters of the block want gradients.

    Neither the random state nor autocast is restored for the second run: a block draws no random numbers and chooses its own dtypes.
    x is the only input that gets a gradient; those of parameters are added to their .grad, as `backward` does, whatever was asked for
    (`torch.autograd.grad` cannot ask for them). One backward pass: the results are let go in it.
    """

    @staticmethod
    def forward(ctx, block: nn.Module, everything: bool, graded: Tensor, x: Tensor, *rest: object) -> Tensor:
        ctx.block, ctx.rest, ctx.results = block, rest, []
        ctx.save_for_backward(x)
        with kept.Keep(ctx.results, everything):
            return block(x, *rest)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.results is None:
            raise RuntimeError("a second backward pass through a block that is run again: use activation_checkpoint='none' for it")
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_(ctx.needs_input_grad[3])
        results, ctx.results = ctx.results, None  # from here on the graph holds what it needs
        with torch.enable_grad(), kept.HandBack(results):
            y = ctx.block(x, *ctx.rest)
        del results
        torch.autograd.backward(y, grad)
        return None, None, None, x.grad, *(None for _ in ctx.rest)


def _plainly(block: nn.Module, x: Tensor, *rest: object) -> Tensor:
    return block(x, *rest)


def _whole(block: nn.Module, x: Tensor, *rest: object) -> Tensor:
    return _again(block, False, x, *rest)


def _between_products(block: nn.Module, x: Tensor, *rest: object) -> Tensor:
    return _again(block, True, x, *rest)


def _again(block: nn.Module, everything: bool, x: Tensor, *rest: object) -> Tensor:
    if not torch.is_grad_enabled():
        return block(x, *rest)
    graded = x.new_empty(0).requires_grad_(any(p.requires_grad for p in block.parameters()))
    return _Again.apply(block, everything, graded, x, *rest)


RUN = {"none": _plainly, "block": _whole, "selective": _between_products}  # mode -> f(block, x, *rest) = block(x, *rest)
