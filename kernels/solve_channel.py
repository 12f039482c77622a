"""The chunk-local solve with a decay a channel: as `kernels.solve`, but L and QW are sums over channels that each decay on their own.

    L_ij = sum_d khat_i w_j exp(G_i - G_j), i > j ;  QW_ij = scale sum_d qhat_i w_j exp(G_i - G_j), i >= j ;  N = (I + L B)^-1 L
    kr = exp(G) khat ;  qr = scale exp(G) qhat ;  wd = exp(G_C - G) w                           the keys as the scans meet a state with them

The sums are made level by level (`kernels.levels`), two products a level and block of channels. One part after the other, each with its own
loop over the channels, so that the second holds nothing of the first: k, q and g are read twice, mostly from the cache.

Cost, D = 128, 16 bit, a token and head: reads k, q and g (fp32) 1,024 B, writes t and qw 256 B, kr, qr and wd 768 B, rows 32 B, `whole` 8 B
and with a preconditioner w 256 B.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch, power_of_2
from kernels.layout import Inputs, Layout, Solved
from kernels.levels import decays, levels, load_decay, since_start, until_end, whole_chunk, within
from kernels.solve import _norms, _solve_chunk, _write_keys
from kernels.tiles import (
    BETA,
    KEY_NORM,
    KINDS,
    QUERY_NORM,
    cumulate,
    dot_precision,
    load_gate,
    load_row,
    load_tile,
    spans,
    store_row,
    store_tile,
)
from kernels.tuned import setting


@triton.jit
def _keys(
    q, k, beta, decay, forget, gain, center, a_start,  # inputs
    w, rows, whole, kr, qr, wd,  # outputs
    chunks, H, q_stride, k_stride, decay_stride, scale, log_bound, eps,
    K: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, PRECONDITION: tl.constexpr, NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """kr, qr, wd, exp(G_C), the rows' numbers and with a preconditioner w. One program a chunk and head, the channels in blocks of BD."""
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    token, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    at, i = chunk.to(tl.int64) * H + head, tl.arange(0, C)
    rk = _norms(k, token, count, k_stride, head, K, BK, BD, C, NORMALIZE)
    rq = _norms(q, token, count, q_stride, head, K, BK, BD, C, NORMALIZE)
    store_row(rows, load_gate(beta, token, count, H, head, C), BETA, at, count, C)
    store_row(rows, rk, KEY_NORM, at, count, C)
    store_row(rows, rq, QUERY_NORM, at, count, C)
    lacks = rk  # what the write key lacks
    if PRECONDITION:
        lacks = tl.full((C,), 1.0, tl.float32)
        high, low = cumulate(load_gate(forget, token, count, H, head, C))
        decayed = tl.where(i[:, None] > i[None, :], spans(high, low, count, C), 0.0)
        grown = tl.exp2(high + low)
        c = load_gate(gain, token, count, H, head, C)
        m = tl.load(center + head)
    for first in tl.range(0, K, BD, num_stages=1):
        d = first + tl.arange(0, BD)
        key = load_tile(k, token, count, k_stride, head, first, K, BD, C)
        write = key
        if PRECONDITION:
            a = grown[:, None] * tl.load(a_start + at * K + d, mask=d < K, other=0.0)[None, :]
            write = _write_keys(key.to(tl.float32), rk, decayed, c, a, m, log_bound, eps, DOT, PRECISION).to(key.dtype)
            store_tile(w, write, token, count, H * K, head, first, K, BD, C)
        query = load_tile(q, token, count, q_stride, head, first, K, BD, C)
        g = load_decay(decay, token, count, decay_stride, head, first, K, BD, C, GATES)
        tl.store(whole + at * K + d, whole_chunk(g), mask=d < K)
        read = since_start(g, C, PRECISION)
        store_tile(kr, read * rk[:, None] * key.to(tl.float32), token, count, H * K, head, first, K, BD, C)
        store_tile(qr, read * (scale * rq)[:, None] * query.to(tl.float32), token, count, H * K, head, first, K, BD, C)
        left = until_end(g, C, PRECISION) * lacks[:, None]
        store_tile(wd, left * write.to(tl.float32), token, count, H * K, head, first, K, BD, C)


@triton.jit
def _products(one, write, g, C: tl.constexpr, PRECISION: tl.constexpr):
    """[C, C]: sum over these channels of one_i write_j exp(G_i - G_j), i > j, else 0. A level's product is right for its own pairs, zero
    inside half blocks and stray outside of the level's blocks: there the next level, whose half blocks they are, clears it first."""
    upper = tl.arange(0, C)[:, None]
    made = tl.zeros((C, C), tl.float32)
    for number in tl.range(levels(C), num_stages=1, disable_licm=True):
        half = 1 << number
        F = decays(g, half, C, PRECISION)
        left = tl.where((upper & half) != 0, F * one.to(tl.float32), 0.0).to(one.dtype)
        right = tl.where((upper & half) == 0, F * write.to(tl.float32), 0.0).to(one.dtype)
        made = tl.where(within(number, C), made, 0.0)
        made = tl.dot(left, tl.trans(right), made, input_precision=PRECISION)
    return made


@triton.jit
def _solve_channel(
    q, k, w, decay, rows,  # inputs
    t, qw,  # outputs
    chunks, H, q_stride, k_stride, decay_stride, scale,
    K: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, PRECONDITION: tl.constexpr,
    PRECISION: tl.constexpr, SOLVE: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """N or QW: two programs a chunk and head, since the registers do not hold both. The channels in blocks of BD."""
    queries, head, chunk = tl.program_id(0) % 2, tl.program_id(0) // 2 % H, tl.program_id(0) // 2 // H
    token, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    at, i = chunk.to(tl.int64) * H + head, tl.arange(0, C)
    x, stride = k, k_stride
    if queries:
        x, stride = q, q_stride
    made = tl.zeros((C, C), tl.float32)
    same = tl.zeros((C,), tl.float32)  # the diagonal, which does not decay
    for first in tl.range(0, K, BD, num_stages=1):
        one = load_tile(x, token, count, stride, head, first, K, BD, C)
        if PRECONDITION:
            write = load_tile(w, token, count, H * K, head, first, K, BD, C)
        else:
            write = load_tile(k, token, count, k_stride, head, first, K, BD, C)
        same += tl.sum(one.to(tl.float32) * write.to(tl.float32), 1)
        made += _products(one, write, load_decay(decay, token, count, decay_stride, head, first, K, BD, C, GATES), C, PRECISION)
    if not PRECONDITION:
        made *= load_row(rows, KEY_NORM, at, C)[None, :]
        same *= load_row(rows, KEY_NORM, at, C)
    if queries:
        made = tl.where(i[:, None] == i[None, :], same[:, None], made) * (scale * load_row(rows, QUERY_NORM, at, C))[:, None]
        store_tile(qw, made, token, count, H * C, head, 0, C, C, C)
    else:
        L = made * load_row(rows, KEY_NORM, at, C)[:, None]
        store_tile(t, -_solve_chunk(L, load_row(rows, BETA, at, C), C, SOLVE, PRECISION), token, count, H * C, head, 0, C, C, C)


def forward(x: Inputs, layout: Layout, a_start: Tensor | None) -> Solved:
    """All of `Solved` from a_start [M, H, K], the statistic before each chunk (with a preconditioner)."""
    (N, H, K), M, C, kinds = x.k.shape, len(layout.chunks), layout.chunk, KINDS.value
    t, qw = x.k.new_empty(2, N, H, C)
    kr, qr, wd = x.k.new_empty(3, N, H, K)
    w = None if x.forget is None else x.k.new_empty(N, H, K)
    rows, whole = torch.empty(M * H * (kinds * C + K), dtype=torch.float32, device=x.k.device).split([M * H * kinds * C, M * H * K])
    rows, whole = rows.view(M, H, kinds, C), whole.view(M, H, K)
    wide, strides = x.k.dtype == torch.float32, (x.q.stride(0), x.k.stride(0), x.decay_stride)
    gates, precision = tl.float32 if wide else tl.float16, dot_precision(x.k)
    choice = setting("keys", x.k)
    launch(
        _keys, M * H, x.key,
        x.q, x.k, x.beta, x.decay, x.forget, x.gain, x.center, a_start, w, rows, whole, kr, qr, wd,
        layout.chunks, H, *strides, x.scale, x.log_bound, x.eps,
        K=K, BK=power_of_2(K), BD=min(choice.block, power_of_2(K)), C=C, PRECONDITION=x.forget is not None,
        NORMALIZE=x.normalize, PRECISION=precision, DOT=tl.float32 if wide else tl.bfloat16, GATES=gates,
        num_warps=choice.warps, num_stages=choice.stages, maxnreg=choice.registers,
    )  # fmt: skip
    choice = setting("solve_channel", x.k)
    launch(
        _solve_channel, 2 * M * H, x.key,
        x.q, x.k, w, x.decay, rows, t, qw, layout.chunks, H, *strides, x.scale,
        K=K, BK=power_of_2(K), BD=min(choice.block, power_of_2(K)), C=C, PRECONDITION=x.forget is not None,
        PRECISION=precision, SOLVE=tl.float16 if x.normalize and not wide else tl.float32, GATES=gates,
        num_warps=choice.warps, num_stages=choice.stages, maxnreg=choice.registers,
    )  # fmt: skip
    return Solved(t, qw, w, rows, whole, kr, qr, wd)
