"""The loss of a language model's head, without its logits: the summed cross-entropy and both gradients, a piece of the rows at a time.

    L = sum over rows i with y_i != -100 of  log sum_j exp(z_ij) - z_{i y_i},   z = h w^T,   the softmax in fp32 (fp64 for fp64)

    dL/dh_i = sum_j (softmax_ij - [j = y_i]) w_j        dL/dw_j = sum_i (softmax_ij - [j = y_i]) h_i

The forward pass forms both gradients while it has a piece's logits, and the backward pass scales them by the incoming scalar: the head's
three products are run once each. A piece has at most CHUNK_LOGITS logits, and what is kept from forward to backward is the gradients, of
the size of h and w, instead of any logits.

Backends as in `kernels.passes`. "torch" makes the softmax of a piece in fp32 (256 MiB, and copies of it); "triton" makes the gradient in
the place of the logits, which are in h's dtype (512 MiB in 16 bits): each is written once by a product, read and written once, and read by
two products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.operands import computation_dtype
from kernels.passes import check_backend, on_device

IGNORED = -100  # a label that asks for nothing
CHUNK_LOGITS = {"torch": 2**26, "triton": 2**28}
ROW_TILE = 128  # rows a matrix product works on at once: a piece that is no multiple of it wastes the last tile's share


def summed_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, backend: str = "torch") -> Tensor:
    """hidden [N, D], weight [vocab, D] of one dtype, labels [N] int64 -> L in nats, a scalar in fp32 (fp64 for fp64).

    0 where all labels are IGNORED. Differentiable once, by hidden and weight. Raises ValueError naming the backend, or hidden.
    """
    check_backend(backend, hidden, "hidden")
    with on_device(hidden):
        return _SummedCrossEntropy.apply(hidden, weight, labels, torch.is_grad_enabled(), backend)


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, with_gradients: bool, backend: str) -> Tensor:
        loss = torch.zeros((), dtype=computation_dtype(hidden), device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if with_gradients else None
        grad_weight = torch.zeros_like(weight, dtype=loss.dtype) if with_gradients else None
        rows, piece = _rows_at_once(weight.shape[0], backend), _triton_piece if backend == "triton" else _piece
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            part_loss, grad_logits = piece(hidden[part], weight, labels[part], with_gradients)
            loss += part_loss
            if with_gradients:
                torch.mm(grad_logits, weight, out=grad_hidden[part])
                grad_weight += grad_logits.t() @ hidden[part]
            del grad_logits  # its memory is the next piece's
        if with_gradients:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        ctx.backend = backend
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        # The scalar stays fp32: 1 / targets rounded to bf16 would scale the whole gradient by up to 0.4 %.
        scale = _triton_scaled if ctx.backend == "triton" else _scaled
        return *(scale(saved, grad) for saved in ctx.saved_tensors), None, None, None


def _rows_at_once(vocab: int, backend: str) -> int:
    """Whole row tiles within CHUNK_LOGITS logits, one at least: 2048 of the 2097 rows that a vocabulary of 32,000 leaves torch room for."""
    return max(ROW_TILE, CHUNK_LOGITS[backend] // vocab // ROW_TILE * ROW_TILE)


def _piece(hidden: Tensor, weight: Tensor, labels: Tensor, with_gradients: bool) -> tuple[Tensor, Tensor | None]:
    """The summed loss of some rows and, if asked for, its gradient to their logits [n, vocab] in hidden's dtype."""
    logits = (hidden @ weight.t()).to(computation_dtype(hidden))  # [n, vocab]
    valid = labels != IGNORED
    target = labels.where(valid, 0)[:, None]  # [n, 1]
    total = torch.logsumexp(logits, dim=-1, keepdim=True)  # [n, 1]
    loss = (total - logits.gather(1, target))[:, 0].masked_fill(~valid, 0).sum()
    if not with_gradients:
        return loss, None
    softmax = logits.sub_(total).exp_()
    softmax.scatter_add_(1, target, softmax.new_full(target.shape, -1.0))
    return loss, softmax.mul_(valid[:, None]).to(hidden.dtype)


def _triton_piece(hidden: Tensor, weight: Tensor, labels: Tensor, with_gradients: bool) -> tuple[Tensor, Tensor]:
    """The same; without gradients the second is of no use."""
    from kernels import cross_entropy_triton  # only here and below: the other backend needs no Triton

    logits = hidden @ weight.t()
    return cross_entropy_triton.cross_entropy(logits, labels, IGNORED, with_gradients).sum(), logits


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    return (x.to(factor.dtype) * factor).to(x.dtype)


def _triton_scaled(x: Tensor, factor: Tensor) -> Tensor:
    from kernels import cross_entropy_triton

    return cross_entropy_triton.scaled(x, factor)
