"""The gradients of q, k and the decay of a chunk, for all chunks at once: from the states it meets and the gradients of those it hands on.

In: h, the state S that the chunk meets; dh, dS'; u, U; dx, dX; dO; and D1, D2 of `kernels.pairs`. G as in `kernels.chunk_triton`,
everything per head:

    dqhat = scale exp(G) dO S^T + D2 w                                  (the query that reads)
    dkhat = -beta exp(G) dX S^T + D1 w                                  (the key that reads)
    dw    = beta exp(G_C - G) U dS'^T + D1^T khat + D2^T qhat           (the key that writes)

The gradient of a scalar log decay g_t is what flows through the spans that contain it, summed as it is and never as a difference of sums
over longer spans, which would lose a strong decay's tiny gradient:

    dg_t = [`kernels.pairs`: spans inside the chunk]
         + sum_{i >= t} [first term of dqhat . qhat + first term of dkhat . khat]_i          from the state to row i
         + sum_{j < t} [first term of dw . w]_j                                              from row j to the next state
         + exp(G_C) <S, dS'>                                                                 from state to state

With a decay a channel `kernels.gradients_channel` takes this one's place. Without a preconditioner w is khat, and dw is added to dkhat.
With one, dw goes on to `kernels.statistic_backward`, which also does the key's normalisation. Norms: khat = rk k, so dk = rk dkhat - rk^2 k
(k . rk dkhat), and q likewise.

One program a chunk and head, BLOCK key channels at a time: channels meet only in sums over them. A loop for each of the three, of which
the first two load their next block while they work (the buffers of all three would leave room for one program a multiprocessor). Loads that
feed products there must be copies of 16 bytes, which is why strides come in such units: other loads go through registers, and Triton 3.6
then leaves out the fence that the product needs (`tests/kernels/sm90.py`).

Cost, D = 128, 16 bit, a token and head: reads q, k, u, do, dx, e1, e2 (and w), h, dh, writes dq, dk (and dw): 3.1 (3.6) KB; h, w, dq and dk
are read again, from the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch, power_of_2
from kernels.layout import Inputs, Layout, Solved
from kernels.pairs import Pairs
from kernels.scan_backward import load_state
from kernels.tiles import BETA, KEY_NORM, KEY_READ, QUERY_NORM, QUERY_READ, WRITE, dot_precision, load_row, load_tile, store_tile
from kernels.tuned import setting


@dataclass(frozen=True)
class Gradients:
    """Of one call."""

    q: Tensor  # [N, H, K] input dtype, as k and w
    k: Tensor  # [N, H, K] with a preconditioner rk times the gradient of the key that reads, else final
    w: Tensor | None  # [N, H, K] dw with a preconditioner
    decay: Tensor | None  # [N, H] decay's dtype


@triton.jit
def _around(later, earlier, C: tl.constexpr):
    """[C]: at t the sum of later [C] over i >= t and of earlier [C] over j < t."""
    i = tl.arange(0, C)
    return tl.sum(tl.where(i[:, None] >= i[None, :], later[:, None], earlier[:, None]), 0)


@triton.jit
def through_norm(
    dx, x, r, along, token, count, x_stride, H, head,
    K: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dx [N, H, K], which holds r dxhat where xhat = r x, becomes the gradient of x; along: x . (r dxhat)."""
    for d in tl.range(0, K, BLOCK, num_stages=1):
        x_block = load_tile(x, token, count, x_stride, head, d, K, BLOCK, C).to(tl.float32)
        grad = load_tile(dx, token, count, H * K, head, d, K, BLOCK, C).to(tl.float32)
        store_tile(dx, grad - x_block * (r * r * along)[:, None], token, count, H * K, head, d, K, BLOCK, C)


@triton.jit
def state_term(
    x, states, chunk, H, head, d, token, count,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[C, BLOCK] = x S^T for x [N, H, V] and one state of states [M, H, V, K], key channels d .. d + BLOCK."""
    grad = tl.zeros((C, BLOCK), tl.float32)
    for e in tl.static_range(0, V, BV):
        tile = load_tile(x, token, count, H * V, head, e, V, BV, C)
        grad = tl.dot(tile, load_state(states, chunk, H, head, d, e, K, V, BLOCK, BV), grad, input_precision=PRECISION)
    return grad


@triton.jit
def kept(h, dh, chunk, H, head, d, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK]: sum_e S dS' of each key channel d .. d + BLOCK."""
    total = tl.zeros((BLOCK,), tl.float32)
    for e in tl.static_range(0, V, BV):
        S = load_state(h, chunk, H, head, d, e, K, V, BLOCK, BV).to(tl.float32)
        total += tl.sum(S * load_state(dh, chunk, H, head, d, e, K, V, BLOCK, BV).to(tl.float32), 0)
    return total


@triton.jit
def _read(
    x, write_keys, state_grad, h, e, factor, out, chunk, head, token, count, H, x_stride, write_stride,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr, SCALAR: tl.constexpr,
    ALONG: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a reader x, the query or the key, is given: out = factor * (state_grad S^T) + e w. And the sums over channels of the first term
    with x, if SCALAR, and of the whole, if ALONG.

    A sum over the accumulator of a product that a later product goes on with came out wrong on Hopper (Triton 3.6, 4 warps): so the
    products that are summed end there, and the next ones are added to them.
    """
    from_state, along = factor * 0.0, factor * 0.0
    for d in tl.range(0, K, BLOCK, num_stages=2):
        X = load_tile(x, token, count, x_stride, head, d, K, BLOCK, C)
        W = load_tile(write_keys, token, count, write_stride, head, d, K, BLOCK, C)
        grad = state_term(state_grad, h, chunk, H, head, d, token, count, K, V, BV, BLOCK, C, PRECISION) * factor[:, None]
        if SCALAR:
            from_state += tl.sum(grad * X.to(tl.float32), 1)
        grad += tl.dot(load_tile(e, token, count, H * C, head, 0, C, C, C), W, input_precision=PRECISION)
        if ALONG:
            along += tl.sum(grad * X.to(tl.float32), 1)
        store_tile(out, grad, token, count, H * K, head, d, K, BLOCK, C)
    return from_state, along


@triton.jit
def _written(
    q, k, write_keys, u, h, dh, e1, e2, factor, dk, dw, chunk, head, token, count, H, q_stride, k_stride, write_stride,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr, SCALAR: tl.constexpr,
    PRECONDITION: tl.constexpr, NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the key that writes is given: dw with PRECONDITION, else added to dk. The sums over channels of its first term with w and, if
    SCALAR, of S dS'; and without PRECONDITION of the whole dk with k."""
    to_state, along, passed = factor * 0.0, factor * 0.0, 0.0
    for d in tl.range(0, K, BLOCK, num_stages=1):
        Key = load_tile(k, token, count, k_stride, head, d, K, BLOCK, C)
        Q = load_tile(q, token, count, q_stride, head, d, K, BLOCK, C)
        grad = state_term(u, dh, chunk, H, head, d, token, count, K, V, BV, BLOCK, C, PRECISION) * factor[:, None]
        if SCALAR:
            W = load_tile(write_keys, token, count, write_stride, head, d, K, BLOCK, C)
            to_state += tl.sum(grad * W.to(tl.float32), 1)
            passed += tl.sum(kept(h, dh, chunk, H, head, d, K, V, BV, BLOCK))
        near = tl.dot(tl.trans(load_tile(e1, token, count, H * C, head, 0, C, C, C)), Key, input_precision=PRECISION)
        grad += tl.dot(tl.trans(load_tile(e2, token, count, H * C, head, 0, C, C, C)), Q, near, input_precision=PRECISION)
        if PRECONDITION:
            store_tile(dw, grad, token, count, H * K, head, d, K, BLOCK, C)
        else:
            grad += load_tile(dk, token, count, H * K, head, d, K, BLOCK, C).to(tl.float32)
            if NORMALIZE:
                along += tl.sum(grad * Key.to(tl.float32), 1)
            store_tile(dk, grad, token, count, H * K, head, d, K, BLOCK, C)
    return to_state, along, passed


@triton.jit
def _gradients(
    q, k, w, rows, whole, h, dh, u, dx, do, e1, e2, between,  # inputs
    dq, dk, dw, dg,  # outputs
    chunks, H, q_units, k_units,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    SCALAR: tl.constexpr, PRECONDITION: tl.constexpr, NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Formulas above. PRECONDITION: w holds the write keys, else they are rk * k. q_units, k_units: token strides in UNITs of 16 bytes."""
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    at = (chunk * H + head).to(tl.int64)
    token, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    i = tl.arange(0, C)
    beta, rk, rq = load_row(rows, BETA, at, C), load_row(rows, KEY_NORM, at, C), load_row(rows, QUERY_NORM, at, C)
    q_stride, k_stride = q_units * UNIT, k_units * UNIT
    write_keys, write_stride = k, k_stride
    if PRECONDITION:
        write_keys, write_stride = w, H * K
    by_query, along_q = _read(
        q, write_keys, do, h, e2, load_row(rows, QUERY_READ, at, C), dq, chunk, head, token, count, H, q_stride, write_stride,
        K, V, BV, BLOCK, C, SCALAR, NORMALIZE, PRECISION,
    )  # fmt: skip
    by_key, _ = _read(
        k, write_keys, dx, h, e1, -beta * load_row(rows, KEY_READ, at, C), dk, chunk, head, token, count, H, k_stride, write_stride,
        K, V, BV, BLOCK, C, SCALAR, False, PRECISION,
    )  # fmt: skip
    if not PRECONDITION:
        tl.debug_barrier()  # the threads read each other's stores
    to_state, along_k, passed = _written(
        q, k, write_keys, u, h, dh, e1, e2, beta * load_row(rows, WRITE, at, C), dk, dw, chunk, head, token, count, H,
        q_stride, k_stride, write_stride, K, V, BV, BLOCK, C, SCALAR, PRECONDITION, NORMALIZE, PRECISION,
    )  # fmt: skip
    if SCALAR:
        place = (token + i).to(tl.int64) * H + head
        grad_g = _around(by_query + by_key, to_state, C) + tl.load(whole + at) * passed
        tl.store(dg + place, grad_g + tl.load(between + place, mask=i < count, other=0.0), mask=i < count)
    if NORMALIZE:
        tl.debug_barrier()  # the threads read each other's stores
        through_norm(dq, q, rq, along_q, token, count, q_stride, H, head, K, BLOCK, C)
        if not PRECONDITION:
            through_norm(dk, k, rk, along_k, token, count, k_stride, H, head, K, BLOCK, C)


def backward(
    x: Inputs, solved: Solved, layout: Layout, h: Tensor, dh: Tensor, u: Tensor, dx: Tensor, do: Tensor, pairs: Pairs
) -> Gradients:
    """h and dh [M, H, V, K], u, dx and do [N, H, V], all contiguous."""
    (N, H, K), V, (M, _) = x.k.shape, x.v.shape[-1], layout.counts
    preconditioned, wide = solved.w is not None, x.k.dtype == torch.float32
    dq, dk, dw = x.k.new_empty(N, H, K), x.k.new_empty(N, H, K), x.k.new_empty(N, H, K) if preconditioned else None
    dg = None if x.decay is None else x.decay.new_empty(N, H)
    choice, unit = setting("gradients", x.k), 16 // x.k.element_size()
    launch(
        _gradients, M * H, x.key,
        x.q, x.k, solved.w, solved.rows, solved.whole, h, dh, u, dx, do, pairs.e1, pairs.e2, pairs.decay, dq, dk, dw, dg,
        layout.chunks, H, x.q.stride(0) // unit, x.k.stride(0) // unit,
        K=K, V=V, BV=min(32 if wide else 128, power_of_2(V)),
        BLOCK=min(choice.block, power_of_2(K)), C=layout.chunk, UNIT=unit,
        SCALAR=x.decay is not None, PRECONDITION=preconditioned, NORMALIZE=x.normalize, PRECISION=dot_precision(x.k),
        num_warps=choice.warps, num_stages=choice.stages, maxnreg=choice.registers,
    )  # fmt: skip
    return Gradients(dq, dk, dw, dg)
