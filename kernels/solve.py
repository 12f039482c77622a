"""The chunk-local solve: row norms, cumulative decay, the write key, N and QW. One program a chunk and head, one launch.

    rk = 1 / sqrt(sum k^2 + 1e-6) ;  khat = rk k ;  G = the cumulative log decay
    A = exp(P) a_start + M_p (c khat^2) ;  r = log(A + eps) - m ;  s = r / (1 + |r|) ;  b = exp(-log(x) s) ;  w = b khat
    L_ij = (khat_i . w_j) exp(G_i - G_j), i > j ;  N = (I + L B)^-1 L, B = diag(beta) ;  QW_ij = (qhat_i . w_j) exp(G_i - G_j), i >= j

with M_p the decayed mask of the statistic, P its cumulative log decay; the token's own term enters in fp32. First the inverse D of the
four 16 x 16 diagonal blocks of I + L B, by forward substitution. Then Y = D L, and with E the part of Y B outside the diagonal blocks,
which is nilpotent (E^4 = 0 with four blocks),

    I + L B = D^-1 (I + E) ;  N = (I + E)^-1 Y = (I - E) (I + E^2) Y

all in fp32 (the products in TF32 for 16-bit inputs, 3xTF32 for fp32). Powers of L B itself would lose everything for keys that are alike;
blocks of 16 do not. Stored in the input dtype, N negated: what reads it adds a product to an accumulator.

Cost, D = 128, 16 bit: reads q and k 512 B, writes t and qw 256 B, rows 32 B and with a preconditioner w 256 B a token and head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layout import Inputs, Layout, Solved
from kernels.tiles import (
    BETA,
    HIGH,
    KEY_NORM,
    KEY_READ,
    KINDS,
    LOG2E,
    LOW,
    QUERY_NORM,
    QUERY_READ,
    WRITE,
    cumulate,
    dot_precision,
    last,
    load_gate,
    load_tile,
    spans,
    store_row,
    store_tile,
)
from kernels.tuned import setting

BLOCK = tl.constexpr(16)


@triton.jit
def _solve_chunk(L, beta, C: tl.constexpr, PRECISION: tl.constexpr):
    """N = (I + L diag(beta))^-1 L of a strictly lower triangular L [C, C], fp32."""
    B: tl.constexpr = C // BLOCK
    block, row = tl.arange(0, B), tl.arange(0, BLOCK)
    own = (block[:, None] == block[None, :])[:, None, :, None]
    lower = tl.sum(tl.where(own, tl.reshape(L * beta[None, :], [B, BLOCK, B, BLOCK]), 0.0), 2)  # [B, 16, 16] the diagonal blocks
    inverse = tl.where((row[:, None] == row[None, :])[None], 1.0, 0.0) + lower * 0.0
    for j in tl.static_range(BLOCK - 1):  # rows below j lose their part of row j
        column = tl.sum(tl.where((row == j)[None, None, :], lower, 0.0), 2)
        solved = tl.sum(tl.where((row == j)[None, :, None], inverse, 0.0), 1)
        inverse -= column[:, :, None] * solved[:, None, :]
    D = tl.reshape(tl.where(own, inverse[:, :, None, :], 0.0), [C, C])
    Y = tl.dot(D, L, input_precision=PRECISION)
    i = tl.arange(0, C)
    E = tl.where((i // BLOCK)[:, None] > (i // BLOCK)[None, :], Y * beta[None, :], 0.0)
    if B > 2:
        Y += tl.dot(tl.dot(E, E, input_precision=PRECISION), Y, input_precision=PRECISION)
    if B > 1:
        Y -= tl.dot(E, Y, input_precision=PRECISION)
    return Y


@triton.jit
def write_keys(k, rk, p, c, a_start, center, log_bound, eps, count, C: tl.constexpr, PRECISION: tl.constexpr):
    """w [C, K] fp32 = b * khat from k [C, K] fp32, its norms rk [C], the statistic's gates p, c [C] and its value before the chunk [K]."""
    i = tl.arange(0, C)
    high, low = cumulate(p)
    mask = spans(high, low, count, C)
    gained = (c * rk * rk)[:, None] * k * k
    earlier = tl.dot(tl.where(i[:, None] > i[None, :], mask, 0.0), gained, input_precision=PRECISION)
    a = earlier + gained + tl.exp2(high + low)[:, None] * a_start[None, :]
    r = tl.log(a + eps) - center
    return tl.exp2(-LOG2E * log_bound * (r / (1.0 + tl.abs(r)))) * rk[:, None] * k


@triton.jit
def _norms(x, C: tl.constexpr, NORMALIZE: tl.constexpr):
    """1 / sqrt(sum x^2 + 1e-6) of the rows of x [C, K] fp32, or 1."""
    if NORMALIZE:
        return tl.rsqrt(tl.sum(x * x, 1) + 1e-6)
    return tl.full((C,), 1.0, tl.float32)


@triton.jit
def _solve(
    q, k, beta, decay, forget, gain, center, a_start,  # inputs
    t, qw, w, rows, whole,  # outputs
    chunks, N, H, q_stride, k_stride, log_bound, eps,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, PRECONDITION: tl.constexpr, NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Formulas above."""
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    token, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    i = tl.arange(0, C)
    key = load_tile(k, token, count, k_stride, head, 0, K, BK, C)
    gate = load_gate(beta, token, count, H, head, C)
    wide = key.to(tl.float32)
    rk = _norms(wide, C, NORMALIZE)
    if PRECONDITION:
        p, c = load_gate(forget, token, count, H, head, C), load_gate(gain, token, count, H, head, C)
        d = tl.arange(0, BK)
        before = tl.load(a_start + (chunk * H + head).to(tl.int64) * K + d, mask=d < K, other=0.0)
        write = write_keys(wide, rk, p, c, before, tl.load(center + head), log_bound, eps, count, C, PRECISION).to(key.dtype)
        store_tile(w, write, token, count, H * K, head, 0, K, BK, C)
        lacks = tl.full((C,), 1.0, tl.float32)  # of the stored write key
    else:
        write = key
        lacks = rk
    query = load_tile(q, token, count, q_stride, head, 0, K, BK, C)
    rq = _norms(query.to(tl.float32), C, NORMALIZE)
    store_row(rows, gate, BETA, token, count, H, N, head, C)
    store_row(rows, rk, KEY_NORM, token, count, H, N, head, C)
    store_row(rows, rq, QUERY_NORM, token, count, H, N, head, C)
    if DECAY:
        high, low = cumulate(load_gate(decay, token, count, H, head, C))
        end, end_low = last(high, C, C), last(low, C, C)  # gates past the rows are zero: the sums stay
        grown = tl.exp2(high + low)
        tl.store(whole + chunk.to(tl.int64) * H + head, tl.exp2(end + end_low))
        store_row(rows, high, HIGH, token, count, H, N, head, C)
        store_row(rows, low, LOW, token, count, H, N, head, C)
        store_row(rows, rk * grown, KEY_READ, token, count, H, N, head, C)
        store_row(rows, rq * grown, QUERY_READ, token, count, H, N, head, C)
        store_row(rows, lacks * tl.exp2((end - high) + (end_low - low)), WRITE, token, count, H, N, head, C)
        mask = spans(high, low, count, C) * lacks[None, :]
    else:
        store_row(rows, rk, KEY_READ, token, count, H, N, head, C)
        store_row(rows, rq, QUERY_READ, token, count, H, N, head, C)
        store_row(rows, lacks, WRITE, token, count, H, N, head, C)
        mask = tl.where(i[:, None] >= i[None, :], lacks[None, :], 0.0)
    QW = tl.dot(query, tl.trans(write), input_precision=PRECISION) * mask * rq[:, None]
    store_tile(qw, QW, token, count, H * C, head, 0, C, C, C)
    L = tl.dot(key, tl.trans(write), input_precision=PRECISION) * mask * rk[:, None]
    N_ = _solve_chunk(tl.where(i[:, None] > i[None, :], L, 0.0), gate, C, PRECISION)
    store_tile(t, -N_, token, count, H * C, head, 0, C, C, C)


def forward(x: Inputs, layout: Layout, a_start: Tensor | None) -> Solved:
    """-N, QW, the write keys (with a preconditioner) and the rows, from a_start [M, H, K]: the statistic before each chunk."""
    (N, H, K), C = x.k.shape, layout.chunk
    t, qw = x.k.new_empty(2, N, H, C)
    w = None if x.forget is None else x.k.new_empty(N, H, K)
    numbers = torch.empty(KINDS * H * N + len(layout.chunks) * H, dtype=torch.float32, device=x.k.device)
    rows, whole = numbers[: KINDS * H * N].view(KINDS, H, N), numbers[KINDS * H * N :].view(-1, H)
    choice = setting("solve", x.k)
    _solve[(len(layout.chunks) * H,)](
        x.q, x.k, x.beta, x.decay, x.forget, x.gain, x.center, a_start, t, qw, w, rows, whole,
        layout.chunks, N, H, x.q.stride(0), x.k.stride(0), x.log_bound, x.eps,
        K=K, BK=triton.next_power_of_2(K), C=C, DECAY=x.decay is not None, PRECONDITION=x.forget is not None,
        NORMALIZE=x.normalize, PRECISION=dot_precision(x.k), num_warps=choice.warps, num_stages=choice.stages,
    )  # fmt: skip
    return Solved(t, qw, w, rows, whole)
