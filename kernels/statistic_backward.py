"""The statistic's backward pass: from the gradient of the write keys to those of the keys, the gains and the statistic's decay.

    prior_t = exp(p_t) a_{t-1} ;  a = prior + c khat^2 ;  r = log(a + eps) - m ;  b = exp(-log(x) r / (1 + |r|)) ;  w = b khat
    dr = dw khat b (-log(x)) / (1 + |r|)^2 ;  dm = -sum dr ;  da = dr / (a + eps)
    dA_t = sum_{i >= t} exp(P_i - P_t) da_i                                 over all later rows of the sequence
    dkhat += b dw + 2 c khat dA ;  dc_t = sum khat^2 dA ;  dp_t = sum dA prior

P is the chunk's inclusive cumulative log decay. Three launches. `_inside` does what stays inside a chunk, with dA summed over the chunk's
own rows, and makes start = exp(P_0) dA_0, the gradient they give to the statistic the chunk meets. `statistic.chain` carries it from the
last chunk, where D is the gradient of the final statistic, to the first: D_{c-1} = start_c + exp(P_C) D_c (twice where a later piece of the
sequences gives a part of it, `kernels.maps`). `_finish` adds what D_c gives,

    dkhat_t += 2 c_t exp(P_C - P_t) khat_t D ;  kappa_t = sum khat_t^2 D ;  dc_t += exp(P_C - P_t) kappa_t
    dp_t    += exp(P_C) a_start . D + sum_{j < t} exp(P_C - P_j) c_j kappa_j

and takes dkhat, then whole, through the normalisation: dk = rk (dkhat - khat (khat . dkhat)).

Cost, D = 128, 16 bit, a token and head: reads k twice, dw once and dk twice, writes dk twice: 1.8 KB.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gradients import Gradients, _around
from kernels.launch import launch, power_of_2
from kernels.layout import Inputs, Layout, Solved
from kernels.solve import _log2
from kernels.statistic import chain
from kernels.tiles import (
    KEY_NORM,
    LOG2E,
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


@triton.jit
def _add_three(a, b, c, x, y, z):
    return a + x, b + y, c + z


@triton.jit
def _inside(
    k, rows, forget, gain, center, a_start, dw,  # inputs
    dk, dforget, dgain, dcenter, dstart, keep,  # outputs, fp32 but for dk, which holds the part of the key that reads
    chunks, H, k_units, log_bound, eps,
    K: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Formulas above. One program a chunk and head, BLOCK channels at a time. k_units: k's token stride in UNITs of 16 bytes."""
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    at = (chunk * H + head).to(tl.int64)
    token, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    i = tl.arange(0, C)
    high, low = cumulate(load_gate(forget, token, count, H, head, C))
    c, m, rk = load_gate(gain, token, count, H, head, C), tl.load(center + head), load_row(rows, KEY_NORM, at, C)
    grown = tl.exp2(high + low)
    own = i[:, None] == i[None, :]
    earlier = tl.where(own, 0.0, spans(high, low, count, C)).to(DOT)
    later = tl.where(own, 0.0, spans_transposed(high, low, count, C)).to(DOT)
    sum_p, sum_c, sum_m = rk * 0.0, rk * 0.0, rk * 0.0
    for first in tl.range(0, K, BLOCK, num_stages=3):
        d = first + tl.arange(0, BLOCK)
        khat = load_tile(k, token, count, k_units * UNIT, head, first, K, BLOCK, C).to(tl.float32) * rk[:, None]
        gained = c[:, None] * khat * khat
        prior = grown[:, None] * tl.load(a_start + at * K + d, mask=d < K, other=0.0)[None, :]
        prior = tl.dot(earlier, gained.to(DOT), prior, input_precision=PRECISION)
        a = prior + gained + eps
        r = _log2(a, DOT) * (1.0 / LOG2E) - m
        slope = tl.rsqrt(1.0 + tl.abs(r))
        slope *= slope
        write = load_tile(dw, token, count, H * K, head, first, K, BLOCK, C).to(tl.float32)
        write *= tl.exp2(r * slope * (-LOG2E * log_bound))
        dr = write * khat * slope * slope * -log_bound
        inverse = tl.rsqrt(a)
        da = dr * inverse * inverse
        da = tl.dot(later, da.to(DOT), da, input_precision=PRECISION)
        moved = khat * da
        # as one reduction: of dr alone it would be made in another layout, after a passage through shared memory
        row_p, row_c, row_m = tl.reduce((prior * da, khat * moved, dr), 1, _add_three)
        sum_p, sum_c, sum_m = sum_p + row_p, sum_c + row_c, sum_m - row_m
        tl.store(dstart + at * K + d, tl.sum(tl.where((i == 0)[:, None], grown[:, None] * da, 0.0), 0), mask=d < K)
        write += moved * (2 * c)[:, None]
        read = load_tile(dk, token, count, H * K, head, first, K, BLOCK, C).to(tl.float32)
        store_tile(dk, read + rk[:, None] * write, token, count, H * K, head, first, K, BLOCK, C)
    place = (token + i).to(tl.int64) * H + head
    tl.store(dforget + place, sum_p, mask=i < count)
    tl.store(dgain + place, sum_c, mask=i < count)
    tl.store(dcenter + at, tl.sum(sum_m))
    tl.store(keep + at, last(grown, C, C))  # gates past the rows are zero: the sums stay


@triton.jit
def _add_up(centers, dcenter, head, M, H):
    """dcenter [H]: the sum of centers [M, H] for one head."""
    total = tl.zeros((256,), tl.float32)
    for first in range(0, M, 256):
        m = first + tl.arange(0, 256)
        total += tl.load(centers + m.to(tl.int64) * H + head, mask=m < M, other=0.0)
    tl.store(dcenter + head, tl.sum(total, 0))


@triton.jit
def _finish(
    k, rows, forget, gain, a_start, d_end, own_forget, own_gain,  # inputs
    centers, dk, dforget, dgain, dcenter,  # outputs; dk holds the chunk's own part; dcenter [H] is the sum of the chunks' centers [M, H]
    chunks, M, H, k_units,
    K: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Formulas above. One program a chunk and head, and one more a head for dcenter. The rows' sums first, then dk, BLOCK channels at a
    time: whole tiles would leave room for few programs."""
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    if chunk == M:
        _add_up(centers, dcenter, head, M, H)
        return
    at = (chunk * H + head).to(tl.int64)
    token, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    i = tl.arange(0, C)
    rk = load_row(rows, KEY_NORM, at, C)
    high, low = cumulate(load_gate(forget, token, count, H, head, C))
    c = load_gate(gain, token, count, H, head, C)
    end, end_low = last(high, C, C), last(low, C, C)  # gates past the rows are zero: the sums stay
    left = tl.exp2((end - high) + (end_low - low))
    kappa, along, met = rk * 0.0, rk * 0.0, 0.0
    for first in tl.range(0, K, BLOCK, num_stages=3):
        d = first + tl.arange(0, BLOCK)
        key = load_tile(k, token, count, k_units * UNIT, head, first, K, BLOCK, C).to(tl.float32)
        grad = load_tile(dk, token, count, H * K, head, first, K, BLOCK, C).to(tl.float32)
        D = tl.load(d_end + at * K + d, mask=d < K, other=0.0)
        met += tl.sum(tl.load(a_start + at * K + d, mask=d < K, other=0.0) * D)
        kappa += tl.sum(key * key * D[None, :], 1)
        along += tl.sum(grad * key, 1)
    given = 2 * c * left * rk * rk
    along = (along + given * kappa) * rk * rk
    kappa *= left * rk * rk
    for first in tl.range(0, K, BLOCK, num_stages=3):
        d = first + tl.arange(0, BLOCK)
        key = load_tile(k, token, count, k_units * UNIT, head, first, K, BLOCK, C).to(tl.float32)
        grad = load_tile(dk, token, count, H * K, head, first, K, BLOCK, C).to(tl.float32)
        grad += given[:, None] * key * tl.load(d_end + at * K + d, mask=d < K, other=0.0)[None, :]
        if NORMALIZE:
            grad -= along[:, None] * key
        store_tile(dk, grad, token, count, H * K, head, first, K, BLOCK, C)
    place = (token + i).to(tl.int64) * H + head
    tl.store(dgain + place, tl.load(own_gain + place, mask=i < count, other=0.0) + kappa, mask=i < count)
    grad_forget = tl.exp2(end + end_low) * met + _around(kappa * 0.0, c * kappa, C)
    tl.store(dforget + place, tl.load(own_forget + place, mask=i < count, other=0.0) + grad_forget, mask=i < count)


def backward(
    x: Inputs,
    solved: Solved,
    layout: Layout,
    a_start: Tensor,
    gradients: Gradients,
    da: Tensor | None,
    hand_back: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dforget, dgain [N, H] in their dtypes, dcenter [H] and da_0 [S, H, K] fp32; completes gradients.k in place.

    da [S, H, K] fp32: the gradient of the final statistic, None for zero. hand_back: takes the da_0 that this makes and returns another da,
    with what the sequences' later pieces give, or da itself (`kernels.maps`).
    """
    (N, H, K), (M, _) = x.k.shape, layout.counts
    sizes = (M, H, K), (M, H), (M, H), (H,), (N, H), (N, H)
    dstart, centers, keep, dcenter, *own = (torch.empty(size, dtype=torch.float32, device=x.k.device) for size in sizes)
    choice, wide, unit = setting("statistic_inside", x.k), x.k.dtype == torch.float32, 16 // x.k.element_size()
    launch(
        _inside, M * H, x.key,
        x.k, solved.rows, x.forget, x.gain, x.center, a_start, gradients.w, gradients.k, *own, centers, dstart, keep,
        layout.chunks, H, x.k.stride(0) // unit, x.log_bound, x.eps,
        K=K, BLOCK=min(choice.block, power_of_2(K)), C=layout.chunk, UNIT=unit, DOT=tl.float32 if wide else tl.bfloat16,
        PRECISION=dot_precision(x.k), num_warps=choice.warps, num_stages=choice.stages, maxnreg=choice.registers,
    )  # fmt: skip
    d_end, da_0 = chain(x, layout, (dstart, keep), da, reverse=True)
    if hand_back is not None:
        whole = hand_back(da_0)
        if whole is not da:
            d_end, da_0 = chain(x, layout, (dstart, keep), whole, reverse=True)
    dforget, dgain = torch.empty_like(x.forget), torch.empty_like(x.gain)
    choice = setting("statistic_finish", x.k)
    launch(
        _finish, (M + 1) * H, (x.key, M == 1, M % 16 == 0),
        x.k, solved.rows, x.forget, x.gain, a_start, d_end, *own, centers, gradients.k, dforget, dgain, dcenter,
        layout.chunks, M, H, x.k.stride(0) // unit,
        K=K, BLOCK=min(choice.block, power_of_2(K)), C=layout.chunk, UNIT=unit, NORMALIZE=x.normalize, num_warps=choice.warps,
        num_stages=choice.stages, maxnreg=choice.registers,
    )  # fmt: skip
    return dforget, dgain, dcenter, da_0
