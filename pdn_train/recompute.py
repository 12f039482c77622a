"""Activation checkpointing: a module keeps less of its forward pass and runs parts of it again in the backward pass.

    none        everything the backward pass needs is kept
    block       the module keeps its input and is run again, whole
    selective   it keeps its input and the products of its Linear layers (`kernels.product`); all else is run again: norms, convolution,
                gates, activation functions, and with model.kernel=torch the recurrence. What the Triton recurrence makes for its backward
                pass is kept too: 0.8 KB a token and head (16 bits, 128 channels, a decay a head), and its stages are most of what would
                be run again. q, k, v and the gates, which it reads, are made again by one launch

The gradients are the same bit for bit, also under ZeRO-3. What each mode keeps, in bytes: `pdn_train.estimate`.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels import kept


def _plainly(module: nn.Module, *inputs: object) -> Tensor:
    return module(*inputs)


def _again(module: nn.Module, *inputs: object) -> Tensor:
    return checkpoint(module, *inputs, use_reentrant=False, preserve_rng_state=False)  # nothing here draws random numbers


def _between_products(module: nn.Module, *inputs: object) -> Tensor:
    return checkpoint(module, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=_keep_products)


RUN = {"none": _plainly, "block": _again, "selective": _between_products}  # mode -> f(module, *inputs) = module(*inputs)


def _keep_products() -> tuple[kept.Keep, kept.HandBack]:
    """What `checkpoint` enters in the forward pass and when it runs a module again: the first keeps results, the second hands them back."""
    results: list = []
    return kept.Keep(results), kept.HandBack(results)
