"""The statistic's backward pass: from the gradient of the write keys to those of the keys, the gains and the statistic's decay.

    prior_t = exp(p_t) a_{t-1} ;  a = prior + c khat^2 ;  r = log(a + eps) - m ;  b = exp(-log(x) r / (1 + |r|)) ;  w = b khat
    dr = dw khat b (-log(x)) / (1 + |r|)^2 ;  dm = -sum dr ;  da = dr / (a + eps)
    dA_t = sum_{i >= t} exp(P_i - P_t) da_i                                 over all later rows of the sequence
    dkhat += b dw + 2 c khat dA ;  dc_t = sum khat^2 dA ;  dp_t = sum dA prior

P is the chunk's inclusive cumulative log decay. Three launches: `_starts` makes start_c = sum_t exp(P_t) da_t, the gradient that chunk c's
own rows give to the statistic they meet; `_chain` carries it from the last chunk, where D is the gradient of the final statistic, to the
first, D_{c-1} = start_c + exp(P_C) D_c; `_finish` has dA_t = (the sum over the chunk's own rows) + exp(P_C - P_t) D_c, and then takes
dkhat through the normalisation: dk = rk (dkhat - khat (khat . dkhat)).

Cost, D = 128, 16 bit, a token and head: reads k and dw twice and dk, writes dk twice and reads it again, from the cache: 1.5 KB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gradients import Gradients, through_norm
from kernels.launch import cdiv, launch, power_of_2
from kernels.layout import Inputs, Layout, Solved
from kernels.solve import _log2
from kernels.tiles import KEY_NORM, LOG2E, cumulate, dot_precision, last, load_gate, load_row, load_tile, spans, spans_transposed, store_tile
from kernels.tuned import setting

STEP = 64  # chunks that the chain takes at once, at most
CHANNELS = 16  # of the chain's programs


@triton.jit
def _inside(
    dw, khat, a_start, p_high, p_low, c, m, log_bound, eps, count,
    C: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """prior, b dw, da and dr [C, BD] of some channels, from dw and khat [C, BD] and the statistic before the chunk, a_start [BD]."""
    i = tl.arange(0, C)
    gained = c[:, None] * khat * khat
    decayed = tl.where(i[:, None] == i[None, :], 0.0, spans(p_high, p_low, count, C))
    prior = tl.exp2(p_high + p_low)[:, None] * a_start[None, :]
    prior = tl.dot(decayed.to(DOT), gained.to(DOT), prior, input_precision=PRECISION)
    a = prior + gained + eps
    r = _log2(a, DOT) * (1.0 / LOG2E) - m
    slope = tl.rsqrt(1.0 + tl.abs(r))
    slope *= slope
    through = tl.exp2(r * slope * (-LOG2E * log_bound)) * dw
    dr = through * khat * slope * slope * -log_bound
    inverse = tl.rsqrt(a)
    return prior, through, dr * inverse * inverse, dr


@triton.jit
def _starts(
    k, rows, forget, gain, center, a_start, dw,  # inputs
    dstart, keep, dcenter,  # outputs
    chunks, H, k_stride, log_bound, eps,
    K: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dstart [M, H, K], keep [M, H] = exp(P_C) and dcenter [M, H], a chunk's sum. One program a chunk and head."""
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    at = (chunk * H + head).to(tl.int64)
    token, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    high, low = cumulate(load_gate(forget, token, count, H, head, C))
    c, m, rk = load_gate(gain, token, count, H, head, C), tl.load(center + head), load_row(rows, KEY_NORM, at, C)
    sum_r = rk * 0.0
    for first in tl.range(0, BK, BLOCK, num_stages=1):
        d = first + tl.arange(0, BLOCK)
        khat = load_tile(k, token, count, k_stride, head, first, K, BLOCK, C).to(tl.float32) * rk[:, None]
        grad = load_tile(dw, token, count, H * K, head, first, K, BLOCK, C).to(tl.float32)
        start = tl.load(a_start + at * K + d, mask=d < K, other=0.0)
        _, _, da, dr = _inside(grad, khat, start, high, low, c, m, log_bound, eps, count, C, DOT, PRECISION)
        tl.store(dstart + at * K + d, tl.sum(tl.exp2(high + low)[:, None] * da, 0), mask=d < K)
        sum_r += tl.sum(dr, 1)
    tl.store(dcenter + at, -tl.sum(sum_r))
    tl.store(keep + at, last(tl.exp2(high + low), C, C))  # gates past the rows are zero: the sums stay


@triton.jit
def _follow(a_keep, a_own, b_keep, b_own):
    return a_keep * b_keep, a_own * b_keep + b_own


@triton.jit
def _chain(
    dstart, keep, da, d_end, da_0, sequences, H,
    K: tl.constexpr, BK: tl.constexpr, STEP: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """d_end [M, H, K]: D of each chunk, and da_0 [S, H, K]: the D before the first. One program a sequence, head and BK channels."""
    blocks: tl.constexpr = (K + BK - 1) // BK
    block, head, n = tl.program_id(0) % blocks, tl.program_id(0) // blocks % H, tl.program_id(0) // blocks // H
    first, chunks = tl.load(sequences + 4 * n), tl.load(sequences + 4 * n + 1)
    d, j = block * BK + tl.arange(0, BK), tl.arange(0, STEP)
    state = tl.zeros((BK,), tl.float32)
    at = (n * H + head).to(tl.int64) * K + d
    if FINAL:
        state = tl.load(da + at, mask=d < K, other=0.0)
    for done in range(0, chunks, STEP):
        left = chunks - done  # row j is the chunk left - 1 - j
        place = (first + left - 1 - j).to(tl.int64) * H + head
        there = (j < left)[:, None] & (d < K)[None, :]
        kept = tl.load(keep + place, mask=j < left, other=1.0)[:, None] + tl.zeros((STEP, BK), tl.float32)
        value = tl.load(dstart + place[:, None] * K + d[None, :], mask=there, other=0.0)
        value = tl.where((j == 0)[:, None], value + kept * state[None, :], value)
        kept, value = tl.associative_scan((kept, value), 0, _follow)
        tl.store(d_end + ((first + left - 1).to(tl.int64) * H + head) * K + d, state, mask=d < K)
        earlier = there & (j + 1 < left)[:, None] & (j + 1 < STEP)[:, None]
        tl.store(d_end + (place - H)[:, None] * K + d[None, :], value, mask=earlier)
        state = tl.sum(tl.where((j == STEP - 1)[:, None], value, 0.0), 0)
    tl.store(da_0 + at, state, mask=d < K)


@triton.jit
def _finish(
    k, rows, forget, gain, center, a_start, d_end, dw,  # inputs
    dk, dforget, dgain,  # outputs; dk holds the part of the key that reads
    chunks, H, k_stride, log_bound, eps,
    K: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr, NORMALIZE: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Formulas above. One program a chunk and head."""
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    at = (chunk * H + head).to(tl.int64)
    token, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    i = tl.arange(0, C)
    high, low = cumulate(load_gate(forget, token, count, H, head, C))
    c, m, rk = load_gate(gain, token, count, H, head, C), tl.load(center + head), load_row(rows, KEY_NORM, at, C)
    left = tl.exp2((last(high, C, C) - high) + (last(low, C, C) - low))  # gates past the rows are zero: the sums stay
    sum_p, sum_c, along = rk * 0.0, rk * 0.0, rk * 0.0
    for first in tl.range(0, BK, BLOCK, num_stages=1):
        d = first + tl.arange(0, BLOCK)
        key = load_tile(k, token, count, k_stride, head, first, K, BLOCK, C).to(tl.float32)
        khat = key * rk[:, None]
        grad = load_tile(dw, token, count, H * K, head, first, K, BLOCK, C).to(tl.float32)
        start = tl.load(a_start + at * K + d, mask=d < K, other=0.0)
        prior, through, da, _ = _inside(grad, khat, start, high, low, c, m, log_bound, eps, count, C, DOT, PRECISION)
        later = tl.where(i[:, None] == i[None, :], 0.0, spans_transposed(high, low, count, C))
        da = tl.dot(later.to(DOT), da.to(DOT), da, input_precision=PRECISION)
        da += left[:, None] * tl.load(d_end + at * K + d, mask=d < K, other=0.0)[None, :]
        sum_p += tl.sum(prior * da, 1)
        sum_c += tl.sum(khat * khat * da, 1)
        read = load_tile(dk, token, count, H * K, head, first, K, BLOCK, C).to(tl.float32)
        grad = read + rk[:, None] * (through + 2 * c[:, None] * khat * da)
        if NORMALIZE:
            along += tl.sum(grad * key, 1)
        store_tile(dk, grad, token, count, H * K, head, first, K, BLOCK, C)
    place = (token + i).to(tl.int64) * H + head
    tl.store(dforget + place, sum_p, mask=i < count)
    tl.store(dgain + place, sum_c, mask=i < count)
    if NORMALIZE:
        tl.debug_barrier()  # the threads read each other's stores
        through_norm(dk, k, rk, along, token, count, k_stride, H, head, K, BK, BLOCK, C)


def backward(
    x: Inputs, solved: Solved, layout: Layout, a_start: Tensor, gradients: Gradients, da: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dforget, dgain [N, H] in their dtypes, dcenter [H] and da_0 [S, H, K] fp32; completes gradients.k in place.

    da [S, H, K] fp32: the gradient of the final statistic, None for zero.
    """
    (_, H, K), M, S = x.k.shape, len(layout.chunks), len(layout.sequences)
    start, d_end, da_0 = torch.empty(2 * M + S, H, K, dtype=torch.float32, device=x.k.device).split([M, M, S])
    keep, center = torch.empty(2, -(-M // 4) * 4, H, dtype=torch.float32, device=x.k.device)[:, :M]
    choice, wide = setting("statistic_backward", x.k), x.k.dtype == torch.float32
    shared = {"K": K, "BK": power_of_2(K), "BLOCK": min(choice.block, power_of_2(K)), "C": layout.chunk}
    dots = {"DOT": tl.float32 if wide else tl.bfloat16, "PRECISION": dot_precision(x.k)}
    options = {"num_warps": choice.warps, "num_stages": choice.stages, "maxnreg": choice.registers}
    gates = x.forget, x.gain, x.center, a_start
    sizes = layout.chunks, H, x.k.stride(0), x.log_bound, x.eps
    launch(_starts, M * H, x.key, x.k, solved.rows, *gates, gradients.w, start, keep, center, *sizes, **shared, **dots, **options)
    step = max(2, min(STEP, power_of_2(layout.longest)))
    launch(
        _chain, S * H * cdiv(K, CHANNELS), (x.key, da is None),
        start, keep, da, d_end, da_0, layout.sequences, H, K=K, BK=CHANNELS, STEP=step, FINAL=da is not None, num_warps=4
    )  # fmt: skip
    dforget, dgain = torch.empty_like(x.forget), torch.empty_like(x.gain)
    launch(
        _finish, M * H, x.key, x.k, solved.rows, *gates, d_end, gradients.w, gradients.k, dforget, dgain, *sizes,
        **shared, NORMALIZE=x.normalize, **dots, **options,
    )  # fmt: skip
    return dforget, dgain, center.sum(0), da_0
