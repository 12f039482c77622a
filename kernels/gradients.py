"""All gradients of a chunk, for all chunks at once: from the states it meets and the gradients of those it hands on.

In: h, the state S that the chunk meets; u, the corrected errors U (R = beta U are the values written); dh, dS'; dx, dX; dO. With
G, M as in `kernels.chunk_triton` and everything per head:

    D1_ij = -beta_i beta_j (dX_i . U_j) exp(G_i - G_j),  i > j          the gradient of khat_i . w_j
    D2_ij = scale beta_j (dO_i . U_j) exp(G_i - G_j),  i >= j           the gradient of qhat_i . w_j
    dqhat = scale exp(G) dO S^T + D2 w
    dkhat = -beta exp(G) dX S^T + D1 w                                  (the key that reads)
    dw    = beta exp(G_C - G) U dS'^T + D1^T khat + D2^T qhat           (the key that writes)
    dv    = beta dX ;  dbeta_i = dX_i . U_i

The gradient of a log decay g_t is what flows through the spans that contain it, summed as it is and never as a difference of sums over
longer spans, which would lose a strong decay's tiny gradient:

    dg_t = sum_{i >= t > j} [D1_ij (khat_i . w_j) + D2_ij (qhat_i . w_j)]                    spans inside the chunk
         + sum_{i >= t} [first term of dqhat . qhat + first term of dkhat . khat]_i          from the state to row i
         + sum_{j < t} [first term of dw . w]_j                                              from row j to the next state
         + exp(G_C) <S, dS'>                                                                 from state to state

Without a preconditioner w is khat, and dw is added to dkhat. With one, w = b khat and b comes of the statistic (`_statistic`): what stays
inside the chunk is done here, and the rest, with the key's normalisation, in `kernels.statistic_backward`. Norms: khat = rk k, so dk =
rk dkhat - rk^2 k (k . rk dkhat), and q likewise.

The products with D1^T and D2^T have these made outright, as U dX^T and U dO^T: Triton before 3.7.1 can go wrong on Hopper where the left
operand is the transpose of a product.

Cost, D = 128, 16 bit, a token and head: reads q, k, u, do, dx (and w), h, dh, writes dq, dk, dv: 3.1 (3.3) KB; q, k, w, h and dk are read
two or three times, mostly from the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch, power_of_2
from kernels.layout import Inputs, Layout, Solved
from kernels.scan_backward import load_state
from kernels.solve import _log2
from kernels.tiles import (
    BETA,
    HIGH,
    KEY_NORM,
    KEY_READ,
    LOG2E,
    LOW,
    QUERY_NORM,
    QUERY_READ,
    WRITE,
    cumulate,
    dot_precision,
    last,
    load_gate,
    load_row,
    load_tile,
    spans,
    spans_transposed,
    store_tile,
)
from kernels.tuned import setting


@dataclass(frozen=True)
class Gradients:
    """Of one call. The first six are final without a preconditioner."""

    q: Tensor  # [N, H, K] input dtype, as k and v
    k: Tensor  # [N, H, K] with a preconditioner it lacks what comes through later chunks' statistics, as forget and gain
    v: Tensor  # [N, H, V]
    beta: Tensor  # [N, H] beta's dtype
    decay: Tensor | None  # [N, H] decay's dtype
    statistic: Statistic | None


@dataclass(frozen=True)
class Statistic:
    """The chunks' own parts of the statistic's gradients, fp32."""

    forget: Tensor  # [N, H]
    gain: Tensor  # [N, H]
    center: Tensor  # [M, H] a chunk's sum
    start: Tensor  # [M, H, K] the gradient of the statistic each chunk meets
    keep: Tensor  # [M, H] exp(P_C): what is left of it at the chunk's end


@triton.jit
def _between(pairs, C: tl.constexpr, TURNED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """[C]: at t the sum of pairs [C, C] over i >= t > j. TURNED: pairs has row j, column i."""
    r, t = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if TURNED:
        summed = tl.dot(pairs.to(DOT), tl.where(r >= t, 1.0, 0.0).to(DOT), input_precision=PRECISION)
        return tl.sum(tl.where(r < t, summed, 0.0), 0)
    summed = tl.dot(pairs.to(DOT), tl.where(r < t, 1.0, 0.0).to(DOT), input_precision=PRECISION)
    return tl.sum(tl.where(r >= t, summed, 0.0), 0)


@triton.jit
def _around(later, earlier, C: tl.constexpr):
    """[C]: at t the sum of later [C] over i >= t and of earlier [C] over j < t."""
    i = tl.arange(0, C)
    return tl.sum(tl.where(i[:, None] >= i[None, :], later[:, None], earlier[:, None]), 0)


@triton.jit
def _span(rows, at, count, C: tl.constexpr, DECAY: tl.constexpr, TURNED: tl.constexpr):
    """exp(G_i - G_j) for i >= j, else 0, at (i, j); TURNED: at (j, i)."""
    i = tl.arange(0, C)
    if DECAY and TURNED:
        return spans_transposed(load_row(rows, HIGH, at, C), load_row(rows, LOW, at, C), count, C)
    if DECAY:
        return spans(load_row(rows, HIGH, at, C), load_row(rows, LOW, at, C), count, C)
    if TURNED:
        return tl.where(i[:, None] <= i[None, :], 1.0, 0.0)
    return tl.where(i[:, None] >= i[None, :], 1.0, 0.0)


@triton.jit
def _written(rows, at, C: tl.constexpr, PRECONDITION: tl.constexpr):
    """[C]: beta, and the norm that the stored key lacks as a write key."""
    beta = load_row(rows, BETA, at, C)
    if not PRECONDITION:
        beta *= load_row(rows, KEY_NORM, at, C)
    return beta


@triton.jit
def _statistic(
    dw, khat, a_start, dstart, at, first, p_high, p_low, c, m, log_bound, eps, count,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dkhat [C, BK], channels first .. first + BK, as it comes through w = b khat, where b is the bounded inverse of the statistic
    (`kernels.preconditioner`); and the sums over these channels of dp [C], dc [C] and dm [C].

        prior_t = exp(p_t) a_{t-1} ;  a = prior + c khat^2 ;  r = log(a + eps) - m ;  s = r / (1 + |r|) ;  b = exp(-log(x) s)
        dr = dw khat b (-log(x)) / (1 + |r|)^2 ;  dm = -sum dr ;  da = dr / (a + eps)
        dA_t = sum_{i >= t} exp(P_i - P_t) da_i                                 over the chunk's own rows
        dkhat = b dw + 2 c khat dA ;  dc_t = sum khat^2 dA ;  dp_t = sum dA prior ;  dstart = exp(P_0) dA_0
    """
    i, d = tl.arange(0, C), first + tl.arange(0, BK)
    start = tl.load(a_start + at * K + d, mask=d < K, other=0.0)
    decayed = tl.where(i[:, None] == i[None, :], 0.0, spans(p_high, p_low, count, C))
    prior = tl.exp2(p_high + p_low)[:, None] * start[None, :]
    prior = tl.dot(decayed.to(DOT), (c[:, None] * khat * khat).to(DOT), prior, input_precision=PRECISION)
    a = prior + c[:, None] * khat * khat + eps
    r = _log2(a, DOT) * (1.0 / LOG2E) - m
    slope = tl.rsqrt(1.0 + tl.abs(r))
    slope *= slope
    scaling = tl.exp2(r * slope * (-LOG2E * log_bound))
    dr = dw * khat * scaling * slope * slope * -log_bound
    dk = scaling * dw
    inverse = tl.rsqrt(a)
    da = dr * inverse * inverse
    later = tl.where(i[:, None] == i[None, :], 0.0, spans_transposed(p_high, p_low, count, C))
    da = tl.dot(later.to(DOT), da.to(DOT), da, input_precision=PRECISION)
    first_row = tl.where(i == 0, tl.exp2(p_high + p_low), 0.0)
    tl.store(dstart + at * K + d, tl.sum(first_row[:, None] * da, 0), mask=d < K)
    dk += 2 * c[:, None] * khat * da
    return dk, tl.sum(prior * da, 1), tl.sum(khat * khat * da, 1), -tl.sum(dr, 1)


@triton.jit
def _through_norm(
    dx, x, r, along, token, count, x_stride, H, head,
    K: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dx [N, H, K], which holds r dxhat where xhat = r x, becomes the gradient of x; along: x . (r dxhat)."""
    for d in tl.range(0, BK, BLOCK, num_stages=1):
        x_block = load_tile(x, token, count, x_stride, head, d, K, BLOCK, C).to(tl.float32)
        grad = load_tile(dx, token, count, H * K, head, d, K, BLOCK, C).to(tl.float32)
        store_tile(dx, grad - x_block * (r * r * along)[:, None], token, count, H * K, head, d, K, BLOCK, C)


@triton.jit
def _gradients(
    q, k, w, rows, whole, h, u, dh, dx, do,  # inputs
    dq, dk, dv, dbeta, dg, parts,  # outputs; parts [3, N, H] fp32 is scratch
    a_start, forget, gain, center, dforget, dgain, dcenter, dstart, keep,  # the statistic's inputs and outputs
    chunks, N, H, q_stride, k_stride, scale, log_bound, eps,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, PRECONDITION: tl.constexpr, NORMALIZE: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One program a chunk and head; BLOCK key channels at a time. PRECONDITION: w holds the write keys, else they are rk * k.

    A sum over the accumulator of a product that a later product goes on with came out wrong on Hopper (Triton 3.6, 4 warps): so the
    products that are summed end there, and the rows' factors of the next ones are applied after them.

    Registers are what is scarce: the key that writes comes first and alone, loops are not unrolled, and the chunk's token and rows are
    read again (volatile) between the parts, so that no address or mask of one part is kept for the next.
    """
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    at = (chunk * H + head).to(tl.int64)
    token, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    x = q.dtype.element_ty
    i = tl.arange(0, C)
    diagonal = i[:, None] == i[None, :]
    place = (token + i).to(tl.int64) * H + head
    size = N.to(tl.int64) * H

    # the key that writes: dw, or r dkhat. D1 and D2 turned, with the norms that the stored keys and queries lack
    one = tl.zeros((C, C), tl.float32)
    two = tl.zeros((C, C), tl.float32)
    beta = load_row(rows, BETA, at, C)
    for e in tl.static_range(0, V, BV):
        U = load_tile(u, token, count, H * V, head, e, V, BV, C)
        dX = load_tile(dx, token, count, H * V, head, e, V, BV, C)
        dO = load_tile(do, token, count, H * V, head, e, V, BV, C)
        one = tl.dot(U, tl.trans(dX), one, input_precision=PRECISION)
        two = tl.dot(U, tl.trans(dO), two, input_precision=PRECISION)
        store_tile(dv, beta[:, None] * dX.to(tl.float32), token, count, H * V, head, e, V, BV, C)
    tl.store(dbeta + place, tl.sum(tl.where(diagonal, one, 0.0), 1), mask=i < count)
    span = _span(rows, at, count, C, DECAY, True)
    written = _written(rows, at, C, PRECONDITION)
    one = tl.where(diagonal, 0.0, one * span) * load_row(rows, BETA, at, C)[None, :]
    one = (one * -load_row(rows, KEY_NORM, at, C)[None, :]).to(x)
    two = (two * span * (scale * load_row(rows, QUERY_NORM, at, C))[None, :]).to(x)
    factor = beta * load_row(rows, WRITE, at, C)
    to_state, passed = beta * 0.0, 0.0
    pairs = tl.zeros((C, C), tl.float32)
    for d in tl.range(0, BK, BLOCK, num_stages=1):
        grad = tl.zeros((C, BLOCK), tl.float32)
        for e in tl.static_range(0, V, BV):
            if V > BV:
                U = load_tile(u, token, count, H * V, head, e, V, BV, C)
            dS = load_state(dh, chunk, H, head, d, e, K, V, BLOCK, BV)
            if DECAY:
                passed += tl.sum(load_state(h, chunk, H, head, d, e, K, V, BLOCK, BV).to(tl.float32) * dS.to(tl.float32))
            grad = tl.dot(U, dS, grad, input_precision=PRECISION)
        grad *= factor[:, None]
        Key = load_tile(k, token, count, k_stride, head, d, K, BLOCK, C)
        W = Key
        if PRECONDITION:
            W = load_tile(w, token, count, H * K, head, d, K, BLOCK, C)
        if DECAY:
            to_state += tl.sum(grad * W.to(tl.float32), 1)
            pairs = tl.dot(W, tl.trans(Key), pairs, input_precision=PRECISION)
        Q = load_tile(q, token, count, q_stride, head, d, K, BLOCK, C)
        near = tl.dot(one, Key, input_precision=PRECISION)
        near = tl.dot(two, Q, near, input_precision=PRECISION)
        grad += near * written[:, None]
        store_tile(dk, grad, token, count, H * K, head, d, K, BLOCK, C)
    if DECAY:
        tl.store(parts + place, _between(pairs * one.to(tl.float32) * written[:, None], C, True, DOT, PRECISION), mask=i < count)
    if PRECONDITION:
        tl.debug_barrier()  # the threads read each other's stores
        moved = tl.load(chunks + 2 * chunk, volatile=True) - token  # 0
        token, count, at = token + moved, tl.load(chunks + 2 * chunk + 1, volatile=True), at + moved
        place = (token + i).to(tl.int64) * H + head
        p_high, p_low = cumulate(load_gate(forget, token, count, H, head, C))
        c, m = load_gate(gain, token, count, H, head, C), tl.load(center + head)
        sum_p, sum_c, sum_m = c * 0.0, c * 0.0, c * 0.0
        rk = load_row(rows, KEY_NORM, at, C)
        for d in tl.range(0, BK, BLOCK, num_stages=1):
            khat = load_tile(k, token, count, k_stride, head, d, K, BLOCK, C).to(tl.float32) * rk[:, None]
            grad = load_tile(dk, token, count, H * K, head, d, K, BLOCK, C).to(tl.float32)
            grad, dp, dc, dm = _statistic(
                grad, khat, a_start, dstart, at, d, p_high, p_low, c, m, log_bound, eps, count, K, BLOCK, C, DOT, PRECISION
            )
            sum_p += dp
            sum_c += dc
            sum_m += dm
            store_tile(dk, grad * rk[:, None], token, count, H * K, head, d, K, BLOCK, C)
        tl.store(dforget + place, sum_p, mask=i < count)
        tl.store(dgain + place, sum_c, mask=i < count)
        tl.store(dcenter + at, tl.sum(tl.where(i < count, sum_m, 0.0)))
        tl.store(keep + at, last(tl.exp2(p_high + p_low), count, C))
    tl.debug_barrier()  # the threads read each other's stores

    # the key and the query that read
    moved = tl.load(chunks + 2 * chunk, volatile=True) - token  # 0
    token, count, at, chunk = token + moved, tl.load(chunks + 2 * chunk + 1, volatile=True), at + moved, chunk + moved
    one = tl.zeros((C, C), tl.float32)
    two = tl.zeros((C, C), tl.float32)
    for e in tl.static_range(0, V, BV):
        if V > BV:
            U = load_tile(u, token, count, H * V, head, e, V, BV, C)
            dX = load_tile(dx, token, count, H * V, head, e, V, BV, C)
            dO = load_tile(do, token, count, H * V, head, e, V, BV, C)
        one = tl.dot(dX, tl.trans(U), one, input_precision=PRECISION)
        two = tl.dot(dO, tl.trans(U), two, input_precision=PRECISION)
    beta, rk, rq = load_row(rows, BETA, at, C), load_row(rows, KEY_NORM, at, C), load_row(rows, QUERY_NORM, at, C)
    span = _span(rows, at, count, C, DECAY, False) * _written(rows, at, C, PRECONDITION)[None, :]
    one = tl.where(diagonal, 0.0, one * span).to(x)
    two = (two * span).to(x)
    pairs = tl.zeros((C, C), tl.float32)
    from_state, along_k, along_q = beta * 0.0, beta * 0.0, beta * 0.0
    key_factor, query_factor = -beta * load_row(rows, KEY_READ, at, C), load_row(rows, QUERY_READ, at, C)
    for d in tl.range(0, BK, BLOCK, num_stages=1):
        Key = load_tile(k, token, count, k_stride, head, d, K, BLOCK, C)
        W = Key
        if PRECONDITION:
            W = load_tile(w, token, count, H * K, head, d, K, BLOCK, C)
        Q = load_tile(q, token, count, q_stride, head, d, K, BLOCK, C)
        if DECAY:
            pairs = tl.dot(Q, tl.trans(W), pairs, input_precision=PRECISION)
        grad = tl.zeros((C, BLOCK), tl.float32)
        grad_q = tl.zeros((C, BLOCK), tl.float32)
        for e in tl.static_range(0, V, BV):
            if V > BV:
                dX = load_tile(dx, token, count, H * V, head, e, V, BV, C)
                dO = load_tile(do, token, count, H * V, head, e, V, BV, C)
            S = load_state(h, chunk, H, head, d, e, K, V, BLOCK, BV)
            grad = tl.dot(dX, S, grad, input_precision=PRECISION)
            grad_q = tl.dot(dO, S, grad_q, input_precision=PRECISION)
        grad *= key_factor[:, None]
        if DECAY:
            from_state += tl.sum(grad * Key.to(tl.float32), 1)
        grad += tl.dot(one, W, input_precision=PRECISION) * (-beta * rk)[:, None]
        grad += load_tile(dk, token, count, H * K, head, d, K, BLOCK, C).to(tl.float32)
        if NORMALIZE and not PRECONDITION:
            along_k += tl.sum(grad * Key.to(tl.float32), 1)
        store_tile(dk, grad, token, count, H * K, head, d, K, BLOCK, C)
        grad_q *= query_factor[:, None]
        if DECAY:
            from_state += tl.sum(grad_q * Q.to(tl.float32), 1)
        grad_q += tl.dot(two, W, input_precision=PRECISION) * (scale * rq)[:, None]
        if NORMALIZE:
            along_q += tl.sum(grad_q * Q.to(tl.float32), 1)
        store_tile(dq, grad_q, token, count, H * K, head, d, K, BLOCK, C)
    if DECAY:
        place = (token + i).to(tl.int64) * H + head
        between = _between(pairs * two.to(tl.float32) * (scale * rq)[:, None], C, False, DOT, PRECISION)
        tl.store(parts + size + place, between, mask=i < count)
        around = _around(from_state, to_state, C) + tl.load(whole + at) * passed
        tl.store(parts + 2 * size + place, around, mask=i < count)
    tl.debug_barrier()
    token = token + tl.load(chunks + 2 * chunk, volatile=True) - token
    if DECAY:
        place = (token + i).to(tl.int64) * H + head
        g = tl.load(parts + place, mask=i < count, other=0.0) + tl.load(parts + size + place, mask=i < count, other=0.0)
        tl.store(dg + place, g + tl.load(parts + 2 * size + place, mask=i < count, other=0.0), mask=i < count)
    if NORMALIZE:
        _through_norm(dq, q, rq, along_q, token, count, q_stride, H, head, K, BK, BLOCK, C)
        if not PRECONDITION:
            _through_norm(dk, k, rk, along_k, token, count, k_stride, H, head, K, BK, BLOCK, C)


def backward(
    x: Inputs, solved: Solved, layout: Layout, a_start: Tensor | None, h: Tensor, u: Tensor, dh: Tensor, dx: Tensor, do: Tensor
) -> Gradients:
    """a_start [M, H, K] fp32 with a preconditioner, h and dh [M, H, V, K], u, dx and do [N, H, V] contiguous."""
    (N, H, K), V, M = x.k.shape, x.v.shape[-1], len(layout.chunks)
    dq, dk = x.k.new_empty(2, N, H, K)
    dv = x.v.new_empty(N, H, V)
    dbeta = x.beta.new_empty(N, H)
    dg = None if x.decay is None else x.decay.new_empty(N, H)
    statistic = None if x.forget is None else _statistic_buffers(x, M)
    parts = (None,) * 5 if statistic is None else (statistic.forget, statistic.gain, statistic.center, statistic.start, statistic.keep)
    tokens = max(N, 2)  # Triton makes a constant of an argument that is 1
    scratch = None if dg is None else torch.empty(3, tokens, H, dtype=torch.float32, device=x.k.device)
    choice = setting("gradients" if statistic is None else "gradients_preconditioned", x.k)
    launch(
        _gradients, M * H, (x.key, tokens % 16 == 0, N * H % 4, M * H % 4),
        x.q, x.k, solved.w, solved.rows, solved.whole, h, u, dh, dx, do, dq, dk, dv, dbeta, dg, scratch,
        a_start, x.forget, x.gain, x.center, *parts,
        layout.chunks, tokens, H, x.q.stride(0), x.k.stride(0), x.scale, x.log_bound, x.eps,
        K=K, V=V, BK=power_of_2(K), BV=min(128 if x.k.element_size() == 2 else 32, power_of_2(V)),
        BLOCK=min(choice.block, power_of_2(K)), C=layout.chunk, DECAY=x.decay is not None,
        PRECONDITION=solved.w is not None, NORMALIZE=x.normalize, PRECISION=dot_precision(x.k),
        DOT=tl.float32 if x.k.dtype == torch.float32 else tl.bfloat16,
        num_warps=choice.warps, num_stages=choice.stages, maxnreg=choice.registers,
    )  # fmt: skip
    return Gradients(dq, dk, dv, dbeta, dg, statistic)


def _statistic_buffers(x: Inputs, M: int) -> Statistic:
    """One allocation for all of it."""
    N, H, K = x.k.shape
    sizes = ((N, H), (N, H), (M, H), (M, H, K), (M, H))
    counts = [torch.Size(size).numel() for size in sizes]
    flat = torch.empty(sum(counts), dtype=torch.float32, device=x.k.device)
    return Statistic(*(part.view(size) for part, size in zip(flat.split(counts), sizes, strict=True)))
