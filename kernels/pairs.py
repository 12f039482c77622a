"""What flows between the rows of a chunk in the backward pass: the gradients of its two matrices of products, for all chunks at once.

In: u, the corrected errors U (R = beta U are the values written); dx, dX; dO. Per head, with the span exp(G_i - G_j) of a scalar decay
(1 without one; a decay a channel stays with the keys, `kernels.gradients_channel`):

    D1_ij = -beta_i beta_j (dX_i . U_j) span_ij,  i > j                 the gradient of khat_i . w_j
    D2_ij = scale beta_j (dO_i . U_j) span_ij,  i >= j                  the gradient of qhat_i . w_j
    dv    = beta dX ;  dbeta_i = dX_i . U_i
    dg_t  = sum_{i >= t > j} [D1_ij (khat_i . w_j) + D2_ij (qhat_i . w_j)]      a scalar decay's, from the spans inside the chunk

With a decay a channel, whose gradients are made by blocks of channels, the sums over all channels that the norms need are made here, of
values: o is linear in qhat, v - U in the reading khat and the next states in beta U w^T, so

    qhat . dqhat = dO . O ;  khat . dkhat = beta dX . (2 U - V)                                 the latter without a preconditioner

The last sum of dg is taken over the spans that hold t, as it stands: a difference of sums over longer spans would lose a strong decay's
tiny gradient. e1 and e2 hold D1 and D2 with what the stored tiles lack of khat, qhat and w: rk_i or rq_i, and rk_j without a
preconditioner.

Cost, D = 128, 16 bit, a token and head: reads u, dx, do, writes dv, e1, e2, 1.3 KB; with a scalar decay it reads k, w
and qw too, 1.9 KB, with a decay a channel o, without a preconditioner also v, 1.5 to 1.8 KB.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, launch, power_of_2
from kernels.layout import Inputs, Layout, Solved
from kernels.tiles import BETA, HIGH, KEY_NORM, LOW, QUERY_NORM, dot_precision, load_row, load_tile, spans, store_tile
from kernels.tuned import setting


@dataclass(frozen=True)
class Pairs:
    e1: Tensor  # [N, H, C] input dtype; row: the token that reads, column: the row in its chunk that writes
    e2: Tensor  # [N, H, C]
    v: Tensor  # [N, H, V] dv
    beta: Tensor  # [N, H] dbeta in beta's dtype
    decay: Tensor | None  # [N, H] fp32: a scalar decay's gradient from the spans inside the chunk
    along_q: Tensor | None  # [>= N * H] fp32, with a decay a channel: qhat . dqhat
    along_k: Tensor | None  # and khat . dkhat, which is written without a preconditioner only
    own: Tensor | None  # [>= N * H] fp32 and the diagonal of e2, where nothing decays


@triton.jit
def _between(pairs, C: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """[C]: at t the sum of pairs [C, C] over rows i >= t and columns j < t."""
    r, t = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    summed = tl.dot(pairs.to(DOT), tl.where(r < t, 1.0, 0.0).to(DOT), input_precision=PRECISION)
    return tl.sum(tl.where(r >= t, summed, 0.0), 0)


@triton.jit
def _pairs(
    k, w, qw, rows, u, dx, do, v, o,  # inputs
    e1, e2, dv, dbeta, between, along_q, along_k, own,  # outputs
    chunks, H, k_units, v_stride, scale,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr,
    UNIT: tl.constexpr, SCALAR: tl.constexpr, CHANNEL: tl.constexpr, PRECONDITION: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Formulas above. One program a chunk and head. SCALAR: there is a decay a head; CHANNEL: a decay a channel.
    PRECONDITION: w holds the write keys. k_units: k's token stride in UNITs of 16 bytes."""
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    at = (chunk * H + head).to(tl.int64)
    token, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    i = tl.arange(0, C)
    place = (token + i).to(tl.int64) * H + head
    beta, rk, rq = load_row(rows, BETA, at, C), load_row(rows, KEY_NORM, at, C), load_row(rows, QUERY_NORM, at, C)
    one, two = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    by_q, by_k = beta * 0.0, beta * 0.0
    for e in tl.static_range(0, V, BV):
        U = load_tile(u, token, count, H * V, head, e, V, BV, C)
        dX = load_tile(dx, token, count, H * V, head, e, V, BV, C)
        dO = load_tile(do, token, count, H * V, head, e, V, BV, C)
        if CHANNEL:
            by_q += tl.sum(dO.to(tl.float32) * load_tile(o, token, count, H * V, head, e, V, BV, C).to(tl.float32), 1)
            if not PRECONDITION:
                value = load_tile(v, token, count, v_stride, head, e, V, BV, C).to(tl.float32)
                by_k += tl.sum(dX.to(tl.float32) * (2 * U.to(tl.float32) - value), 1)
        one = tl.dot(dX, tl.trans(U), one, input_precision=PRECISION)
        two = tl.dot(dO, tl.trans(U), two, input_precision=PRECISION)
        store_tile(dv, beta[:, None] * dX.to(tl.float32), token, count, H * V, head, e, V, BV, C)
    tl.store(dbeta + place, tl.sum(tl.where(i[:, None] == i[None, :], one, 0.0), 1), mask=i < count)
    if CHANNEL:
        tl.store(along_q + place, by_q, mask=i < count)
        if not PRECONDITION:
            tl.store(along_k + place, beta * by_k, mask=i < count)
    weight = beta
    if not PRECONDITION:
        weight *= rk
    span = tl.where(i[:, None] >= i[None, :], weight[None, :], 0.0)
    if SCALAR:
        span = spans(load_row(rows, HIGH, at, C), load_row(rows, LOW, at, C), count, C) * weight[None, :]
    one = tl.where(i[:, None] > i[None, :], one * span, 0.0) * (-beta * rk)[:, None]
    store_tile(e1, one, token, count, H * C, head, 0, C, C, C)
    read = two * span * (scale * rq)[:, None]
    if CHANNEL:
        tl.store(own + place, tl.sum(tl.where(i[:, None] == i[None, :], read, 0.0), 1), mask=i < count)
    store_tile(e2, read, token, count, H * C, head, 0, C, C, C)
    if SCALAR:
        products = tl.zeros((C, C), tl.float32)
        for d in tl.range(0, K, BLOCK, num_stages=3):
            Key = load_tile(k, token, count, k_units * UNIT, head, d, K, BLOCK, C)
            W = Key
            if PRECONDITION:
                W = load_tile(w, token, count, H * K, head, d, K, BLOCK, C)
            products = tl.dot(Key, tl.trans(W), products, input_precision=PRECISION)
        solved = load_tile(qw, token, count, H * C, head, 0, C, C, C).to(tl.float32)
        tl.store(between + place, _between(one * products + two * beta[None, :] * solved, C, DOT, PRECISION), mask=i < count)


def backward(x: Inputs, solved: Solved, layout: Layout, o: Tensor, u: Tensor, dx: Tensor, do: Tensor) -> Pairs:
    """o, u, dx and do [N, H, V] contiguous."""
    (N, H, K), V, (M, _) = x.k.shape, x.v.shape[-1], layout.counts
    scalar = x.decay_kind == "scalar"
    e1, e2 = x.k.new_empty(N, H, layout.chunk), x.k.new_empty(N, H, layout.chunk)
    dv, dbeta = x.v.new_empty(N, H, V), x.beta.new_empty(N, H)
    between = torch.empty(N, H, dtype=torch.float32, device=x.k.device) if scalar else None
    channel = x.decay_kind == "channel"
    own, along_q, along_k = torch.empty(3, cdiv(N * H, 4) * 4, dtype=torch.float32, device=x.k.device) if channel else (None,) * 3
    choice, wide, unit = setting("pairs", x.k), x.k.dtype == torch.float32, 16 // x.k.element_size()
    launch(
        _pairs, M * H, x.key,
        x.k, solved.w, solved.qw, solved.rows, u, dx, do, x.v, o, e1, e2, dv, dbeta, between, along_q, along_k, own,
        layout.chunks, H, x.k.stride(0) // unit, x.v.stride(0), x.scale,
        K=K, V=V, BV=min(32 if wide else 128, power_of_2(V)),
        BLOCK=min(choice.block, power_of_2(K)), C=layout.chunk, UNIT=unit,
        SCALAR=scalar, CHANNEL=channel, PRECONDITION=solved.w is not None, PRECISION=dot_precision(x.k),
        DOT=tl.float32 if wide else tl.bfloat16,
        num_warps=choice.warps, num_stages=choice.stages, maxnreg=choice.registers,
    )  # fmt: skip
    return Pairs(e1, e2, dv, dbeta, between, along_q, along_k, own)
