"""The chunk-local solve with a decay a channel: as `kernels.solve`, but L and QW are sums over channels that each decay on their own.

    L_ij = sum_d khat_i w_j exp(G_i - G_j), i > j ;  QW_ij = scale sum_d qhat_i w_j exp(G_i - G_j), i >= j ;  N = (I + L B)^-1 L

The sums are made level by level (`kernels.levels`): inside blocks of 16 rows by products of [16, BD] by [BD, 16], a warp for each block,
and between them by products of whole tiles, of which a level keeps its pairs. One part after the other, each with its own loop
over the channels, so that it holds nothing of the others: k, q and g are read four times, mostly from the cache.

Blocks have 64 channels in 16 bit, whatever K is: right operands with fewer columns go wrong (`kernels.gradients_channel`).

The keys as the scans meet a state with them, and the norms that this stage reads, are `kernels.decayed_keys`.

Cost, D = 128, 16 bit, a token and head: reads k, q and g (fp32) 1,024 B and with a preconditioner w 256 B, writes t and qw 256 B.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import decayed_keys
from kernels.launch import launch
from kernels.layout import Inputs, Layout, Solved
from kernels.levels import (
    NEAR,
    far_decays,
    far_pairs,
    levels,
    load_decay,
    load_near,
    load_near_decay,
    mild,
    near_crossing,
    near_decays,
    near_exponents,
    near_pairs,
    sums,
)
from kernels.solve import _solve_chunk, scratch
from kernels.tiles import (
    BETA,
    KEY_NORM,
    QUERY_NORM,
    dot_precision,
    load_row,
    load_tile,
    store_tile,
)
from kernels.tuned import setting


@triton.jit
def _near_level(kw, qw, key, query, write, reads, writes, key_pairs, query_pairs, PRECISION: tl.constexpr):
    """kw and qw plus the products, at these pairs, of reading rows that decay by reads and written rows that decay by writes."""
    faded = tl.trans((writes * write.to(tl.float32)).to(write.dtype), 0, 2, 1)
    kw += tl.where(key_pairs, tl.dot((reads * key.to(tl.float32)).to(key.dtype), faded, input_precision=PRECISION), 0.0)
    qw += tl.where(query_pairs, tl.dot((reads * query.to(tl.float32)).to(key.dtype), faded, input_precision=PRECISION), 0.0)
    return kw, qw


@triton.jit
def _near(
    q, k, w, decay, token, count, head, H, q_stride, k_stride, decay_stride,
    K: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, PRECONDITION: tl.constexpr, PRECISION: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """[C / 16, 16, 16] twice, the pairs inside each block of 16 rows: key_i write_j, i > j, and query_i write_j, i >= j, both decayed."""
    r, s = tl.arange(0, NEAR)[:, None], tl.arange(0, NEAR)[None, :]
    same = (r == s)[None, :, :]  # nothing decays
    kw, qw = tl.zeros((C // NEAR, NEAR, NEAR), tl.float32), tl.zeros((C // NEAR, NEAR, NEAR), tl.float32)
    for first in tl.range(0, K, BD, num_stages=1):
        key = load_near(k, token, count, k_stride, head, first, K, BD, C)
        query = load_near(q, token, count, q_stride, head, first, K, BD, C)
        write = key
        if PRECONDITION:
            write = load_near(w, token, count, H * K, head, first, K, BD, C)
        g = load_near_decay(decay, token, count, decay_stride, head, first, K, BD, C, GATES)
        exponents = near_exponents(g, C, PRECISION)
        if mild(exponents, key.dtype):
            reads, writes = tl.exp2(exponents), tl.exp2(-exponents)
            kw, qw = _near_level(kw, qw, key, query, write, reads, writes, near_pairs(), near_pairs() | same, PRECISION)
        else:
            qw += tl.where(same, tl.sum(query.to(tl.float32) * write.to(tl.float32), 2)[:, :, None], 0.0)
            for number in tl.range(0, 4, num_stages=1):
                F = near_decays(g, 1 << number, C, PRECISION)
                kw, qw = _near_level(kw, qw, key, query, write, F, F, near_crossing(1 << number), near_crossing(1 << number), PRECISION)
    return kw, qw


@triton.jit
def _far(
    x, w, decay, table, token, count, head, x_stride, w_stride, decay_stride,
    K: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """[C, C], the pairs of different blocks of 16 rows: x_i w_j decayed, for a reader x, which is k or q. A product for each
    level, of which its pairs are kept."""
    made = tl.zeros((C, C), tl.float32)
    for first in tl.range(0, K, BD, num_stages=1):
        read = load_tile(x, token, count, x_stride, head, first, K, BD, C)
        write = load_tile(w, token, count, w_stride, head, first, K, BD, C)
        g = load_decay(decay, token, count, decay_stride, head, first, K, BD, C, GATES)
        for number in tl.static_range(4, levels(C)):
            F = far_decays(g, table, number, C, PRECISION)
            upper, lower = (F * read.to(tl.float32)).to(write.dtype), (F * write.to(tl.float32)).to(write.dtype)
            made += tl.where(far_pairs(number, C), tl.dot(upper, tl.trans(lower), input_precision=PRECISION), 0.0)
    return made


@triton.jit
def _joined(far, near, C: tl.constexpr):
    """far [C, C] with near [C / 16, 16, 16] on the block diagonal."""
    b = tl.arange(0, C // NEAR)
    diagonal = (b[:, None] == b[None, :])[:, None, :, None]
    return far + tl.reshape(tl.where(diagonal, near[:, :, None, :], 0.0), [C, C])


@triton.jit
def _solve_channel(
    q, k, w, decay, rows, table,  # inputs
    t, qw, inverses,  # outputs; inverses [N, H, C] is scratch
    chunks, H, q_stride, k_stride, decay_stride, scale,
    K: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, PRECONDITION: tl.constexpr,
    PRECISION: tl.constexpr, SOLVE: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """N and QW. One program a chunk and head, the channels in blocks of BD."""
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    token, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    at = chunk.to(tl.int64) * H + head
    near_k, near_q = _near(
        q, k, w, decay, token, count, head, H, q_stride, k_stride, decay_stride, K, BD, C, PRECONDITION, PRECISION, GATES
    )
    norm = load_row(rows, KEY_NORM, at, C)
    written, w_stride, lacks = k, k_stride, norm  # lacks: what the stored write key does
    if PRECONDITION:
        written, w_stride, lacks = w, H * K, tl.full((C,), 1.0, tl.float32)
    made = _far(q, written, decay, table, token, count, head, q_stride, w_stride, decay_stride, K, BD, C, PRECISION, GATES)
    made = _joined(made, near_q, C) * (scale * load_row(rows, QUERY_NORM, at, C))[:, None] * lacks[None, :]
    store_tile(qw, made, token, count, H * C, head, 0, C, C, C)
    made = _far(k, written, decay, table, token, count, head, k_stride, w_stride, decay_stride, K, BD, C, PRECISION, GATES)
    L = _joined(made, near_k, C) * norm[:, None] * lacks[None, :]
    solved = _solve_chunk(L, load_row(rows, BETA, at, C), inverses, token, count, H, head, C, SOLVE, PRECISION)
    tl.debug_barrier()  # t is scratch until here
    store_tile(t, -solved, token, count, H * C, head, 0, C, C, C)


def forward(x: Inputs, layout: Layout, w: Tensor | None) -> Solved:
    """All of `Solved` from the write keys w [N, H, K], None without a preconditioner."""
    (N, H, K), (M, _), C = x.k.shape, layout.counts, layout.chunk
    t, qw = x.k.new_empty(N, H, C), x.k.new_empty(N, H, C)
    wide, strides = x.k.dtype == torch.float32, (x.q.stride(0), x.k.stride(0), x.decay_stride)
    gates, precision = tl.float32 if wide else tl.float16, dot_precision(x.k)
    table = sums(C, torch.float32 if wide else torch.float16, x.k.device)
    inverses = scratch(x, t)
    keys = decayed_keys.forward(x, layout, w)
    choice = setting("solve_channel", x.k)
    launch(
        _solve_channel, M * H, x.key,
        x.q, x.k, w, x.decay, keys.rows, table, t, qw, inverses, layout.chunks, H, *strides, x.scale,
        K=K, BD=choice.block, C=C, PRECONDITION=w is not None,
        PRECISION=precision, SOLVE=tl.float16 if x.normalize and not wide else tl.float32, GATES=gates,
        num_warps=choice.warps, num_stages=choice.stages, maxnreg=choice.registers,
    )  # fmt: skip
    return Solved(t, qw, w, keys.rows, keys.whole, keys.kr, keys.qr, keys.wd)
