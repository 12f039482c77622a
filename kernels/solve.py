"""The chunk-local solve: row norms, cumulative decay, N and QW. One program a chunk and head, one launch.

    rk = 1 / sqrt(sum k^2 + 1e-6) ;  khat = rk k ;  G = the cumulative log decay ;  w from `kernels.write_keys`, or khat
    L_ij = (khat_i . w_j) exp(G_i - G_j), i > j ;  N = (I + L B)^-1 L, B = diag(beta) ;  QW_ij = scale (qhat_i . w_j) exp(G_i - G_j), i >= j

First the inverse D of the 16 x 16 diagonal blocks of I + L B (four, or two and one of fp32's lower chunks), from blocks of 2 to 4, 8, 16.
Then Y = D L, and with E the part of Y B outside the diagonal blocks, which is nilpotent (E^4 = 0 with four blocks),

    I + L B = D^-1 (I + E) ;  N = (I + E)^-1 Y = (I - E) (I + E^2) Y

summed in fp32, from operands in 3xTF32 for fp32 inputs, for 16-bit ones in fp16 (as many digits as TF32 and half the bytes) or, where q and
k are not normalised and L may be past fp16's range, in TF32. Powers of L B itself would lose everything for keys that are alike; blocks of
16 do not. Stored in the input dtype, N negated: what reads it adds a product to an accumulator.

A decay a channel has `kernels.solve_channel` instead.

Cost, D = 128, 16 bit: reads q and k 512 B and with a preconditioner w 256 B, writes t and qw 256 B and rows 32 B a token and head; t
(-N) serves as scratch for D first, mostly in the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch, power_of_2
from kernels.layout import Inputs, Layout, Solved
from kernels.tiles import (
    BETA,
    HIGH,
    KEY_NORM,
    KEY_READ,
    KINDS,
    LOW,
    NORM_EPS,
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
    through_memory,
)
from kernels.tuned import setting

BLOCK = tl.constexpr(16)


@triton.jit
def _solve_chunk(L, beta, scratch, token, count, H, head, C: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """N = (I + L diag(beta))^-1 L of a strictly lower triangular L [C, C], fp32; its products are made in DOT. scratch [N, H, C] in DOT,
    None for fp32 inputs."""
    B: tl.constexpr = C // BLOCK
    block, row = tl.arange(0, B), tl.arange(0, BLOCK)
    own = (block[:, None] == block[None, :])[:, None, :, None]
    lower = tl.sum(tl.where(own, tl.reshape(L * beta[None, :], [B, BLOCK, B, BLOCK]), 0.0), 2)  # [B, 16, 16] the diagonal blocks
    r, c = row[None, :, None], row[None, None, :]
    D = tl.where(r == c, 1.0, tl.where((r == c + 1) & (r % 2 == 1), -lower, 0.0))
    for level in tl.static_range(1, 4):  # from blocks of 2, 4, 8 to the next size
        corner = ((r >> level + 1) == (c >> level + 1)) & ((r >> level) > (c >> level))
        half = tl.dot(tl.where(corner, lower, 0.0).to(DOT), D.to(DOT), input_precision=PRECISION)
        D -= tl.dot(D.to(DOT), half.to(DOT), input_precision=PRECISION)
    D = tl.reshape(tl.where(own, D[:, :, None, :], 0.0), [C, C]).to(DOT)
    if scratch is not None:
        D = through_memory(scratch, D, token, count, H, head, C)
    Y = tl.dot(D, L.to(DOT), input_precision=PRECISION)
    i = tl.arange(0, C)
    E = tl.where((i // BLOCK)[:, None] > (i // BLOCK)[None, :], Y * beta[None, :], 0.0).to(DOT)
    if B > 2:
        Y = tl.dot(tl.dot(E, E, input_precision=PRECISION).to(DOT), Y.to(DOT), Y, input_precision=PRECISION)
    if B > 1:
        Y -= tl.dot(E, Y.to(DOT), input_precision=PRECISION)
    return Y


@triton.jit
def _norms(x, token, count, stride, head, K: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, NORMALIZE: tl.constexpr):
    """1 / sqrt(sum x^2 + 1e-6) of the chunk's rows of x [N, H, K], or 1."""
    norms = tl.full((C,), 1.0, tl.float32)
    if NORMALIZE:
        squares = tl.zeros((C,), tl.float32)
        for d in tl.range(0, K, BD, num_stages=3):
            part = load_tile(x, token, count, stride, head, d, K, BD, C).to(tl.float32)
            squares += tl.sum(part * part, 1)
        norms = tl.rsqrt(squares + NORM_EPS)
    return norms


@triton.jit
def _solve(
    q, k, w, beta, decay,  # inputs
    t, qw, rows, whole, inverses,  # outputs; inverses is scratch: t, in the dtype of the solve's products
    chunks, H, q_units, k_units, scale,
    K: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr, DECAY: tl.constexpr, PRECONDITION: tl.constexpr,
    NORMALIZE: tl.constexpr, PRECISION: tl.constexpr, SOLVE: tl.constexpr,
):  # fmt: skip
    """Formulas above, the channels in blocks of BD. PRECONDITION: w holds the write keys, else they are rk * k. q_units, k_units:
    token strides in UNITs of 16 bytes (`kernels.gradients` says why)."""
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    token, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    i = tl.arange(0, C)
    at, q_stride, k_stride = chunk.to(tl.int64) * H + head, q_units * UNIT, k_units * UNIT
    rk = _norms(k, token, count, k_stride, head, K, BD, C, NORMALIZE)
    kw, qw_ = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    squares = tl.zeros((C,), tl.float32)
    lacks = rk  # what the stored write key lacks
    if PRECONDITION:
        lacks = tl.full((C,), 1.0, tl.float32)
    for first in tl.range(0, K, BD, num_stages=2):  # the loads of a step are all on their way before it waits for the first
        key = load_tile(k, token, count, k_stride, head, first, K, BD, C)
        write = key
        if PRECONDITION:
            write = load_tile(w, token, count, H * K, head, first, K, BD, C)
        kw = tl.dot(key, tl.trans(write), kw, input_precision=PRECISION)
        query = load_tile(q, token, count, q_stride, head, first, K, BD, C)
        qw_ = tl.dot(query, tl.trans(write), qw_, input_precision=PRECISION)
        if NORMALIZE:
            squares += tl.sum(query.to(tl.float32) * query.to(tl.float32), 1)
    rq = tl.full((C,), 1.0, tl.float32)
    if NORMALIZE:
        rq = tl.rsqrt(squares + NORM_EPS)
    gate = load_gate(beta, token, count, H, head, C)
    store_row(rows, gate, BETA, at, count, C)
    store_row(rows, rk, KEY_NORM, at, count, C)
    store_row(rows, rq, QUERY_NORM, at, count, C)
    if DECAY:
        high, low = cumulate(load_gate(decay, token, count, H, head, C))
        end, end_low = last(high, C, C), last(low, C, C)  # gates past the rows are zero: the sums stay
        grown = tl.exp2(high + low)
        tl.store(whole + at, tl.exp2(end + end_low))
        store_row(rows, high, HIGH, at, count, C)
        store_row(rows, low, LOW, at, count, C)
        store_row(rows, rk * grown, KEY_READ, at, count, C)
        store_row(rows, scale * rq * grown, QUERY_READ, at, count, C)
        store_row(rows, lacks * tl.exp2((end - high) + (end_low - low)), WRITE, at, count, C)
        mask = spans(high, low, count, C) * lacks[None, :]
    else:
        store_row(rows, rk, KEY_READ, at, count, C)
        store_row(rows, scale * rq, QUERY_READ, at, count, C)
        store_row(rows, lacks, WRITE, at, count, C)
        mask = tl.where(i[:, None] >= i[None, :], lacks[None, :], 0.0)
    store_tile(qw, qw_ * mask * (scale * rq)[:, None], token, count, H * C, head, 0, C, C, C)
    L = tl.where(i[:, None] > i[None, :], kw * mask * rk[:, None], 0.0)
    solved = _solve_chunk(L, gate, inverses, token, count, H, head, C, SOLVE, PRECISION)
    tl.debug_barrier()  # t is scratch until here
    store_tile(t, -solved, token, count, H * C, head, 0, C, C, C)


def scratch(x: Inputs, t: Tensor) -> Tensor | None:
    """Room for D in the dtype of the solve's products: t [N, H, C], which is written last, but where D is in fp32. None for fp32 inputs,
    whose products of 32 rows take any left operand."""
    if x.k.dtype == torch.float32:
        return None
    return t.view(torch.float16) if x.normalize else torch.empty(t.shape, dtype=torch.float32, device=t.device)


def forward(x: Inputs, layout: Layout, w: Tensor | None) -> Solved:
    """-N, QW and the rows, from the write keys w [N, H, K], None without a preconditioner."""
    (N, H, K), C = x.k.shape, layout.chunk
    t, qw = x.k.new_empty(N, H, C), x.k.new_empty(N, H, C)  # allocations cost the host less than views of one
    M, _ = layout.counts
    rows, whole = (torch.empty(size, dtype=torch.float32, device=x.k.device) for size in ((M, H, KINDS.value, C), (M, H)))
    choice, wide, unit = setting("solve", x.k), x.k.dtype == torch.float32, 16 // x.k.element_size()
    inverses = scratch(x, t)
    launch(
        _solve, M * H, x.key,
        x.q, x.k, w, x.beta, x.decay, t, qw, rows, whole, inverses,
        layout.chunks, H, x.q.stride(0) // unit, x.k.stride(0) // unit, x.scale,
        K=K, BD=min(choice.block, power_of_2(K)), C=C, UNIT=unit,
        DECAY=x.decay is not None, PRECONDITION=w is not None,
        NORMALIZE=x.normalize, PRECISION=dot_precision(x.k),
        SOLVE=tl.float16 if x.normalize and not wide else tl.float32, num_warps=choice.warps,
        num_stages=choice.stages, maxnreg=choice.registers,
    )  # fmt: skip
    return Solved(t, qw, w, rows, whole)
