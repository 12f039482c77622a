"""The statistic's backward pass: from the gradient of the write keys to those of the keys, the gains and the statistic's decay.

    prior_t = exp(p_t) a_{t-1} ;  a = prior + c khat^2 ;  r = log(a + eps) - m ;  b = exp(-log(x) r / (1 + |r|)) ;  w = b khat
    dr = dw khat b (-log(x)) / (1 + |r|)^2 ;  dm = -sum dr ;  da = dr / (a + eps)
    dA_t = da_t + exp(p_{t+1}) dA_{t+1}                                     over all later rows of the sequence
    dkhat += b dw + 2 c khat dA ;  dc_t = sum khat^2 dA ;  dp_t = sum dA prior

Three launches; P is the chunk's inclusive cumulative log decay. `_inside` does what stays inside a chunk, with dA summed over the chunk's
own rows, and makes start = exp(P_0) dA_0, the gradient they give to the statistic the chunk meets. `statistic.chain` carries it from the
last chunk, where D is the gradient of the final statistic, to the first: D_{c-1} = start_c + exp(P_C) D_c (twice where a later piece of the
sequences gives a part of it, `kernels.maps`). `_finish` adds what D_c gives,

    dkhat_t += 2 c_t left_t khat_t D, left_t = exp(P_C - P_t) ;  kappa_t = left_t sum khat_t^2 D ;  dc_t += kappa_t
    dp_t    += exp(P_C) a_start . D + sum_{j < t} c_j kappa_j

and takes dkhat, then whole, through the normalisation: dk = rk (dkhat - khat (khat . dkhat)).

Both go through a chunk's rows one after the other, a program of one warp for a chunk and head, as `kernels.write_keys` does: from the last
row to the first, `_inside` after the statistic of some rows is made again from the one before them.

Cost, D = 128, 16 bit, a token and head: reads k twice, dw once, dk twice and starts 64 B, writes dk twice: 1.9 KB.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gradients import Gradients
from kernels.launch import launch, power_of_2
from kernels.layout import Inputs, Layout, Solved
from kernels.statistic import chain
from kernels.tiles import KEY_NORM, KINDS, LOG2E
from kernels.tuned import setting
from kernels.write_keys import LN2, load_factor, log2, rows_at_once


@triton.jit
def _inside_rows(
    k, norms, forget, gain, dw, dk, dforget, dgain,  # of the first of these rows; the last three and dk are outputs
    remaining, d, a, carry, sum_m, m, factor, eps,
    H: tl.constexpr, K: tl.constexpr, K_STRIDE: tl.constexpr, J: tl.constexpr, R: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows J .. R of those that remain, the last one first. a: the statistic before row J; m: times log2(e); factor: -log(x). Takes and
    makes exp(p) dA of the row after them and of row J, and the sum of dr / factor."""
    inside = remaining > J
    there = inside & (d < K)
    key = tl.load(k + J * K_STRIDE + d, mask=there, other=0.0).to(tl.float32)
    grad = tl.load(dw + J * H * K + d, mask=there, other=0.0).to(tl.float32)
    read = tl.load(dk + J * H * K + d, mask=there, other=0.0).to(tl.float32)
    rk, keep = tl.load(norms + J), load_factor(forget + J * H, inside)
    c = tl.load(gain + J * H, mask=inside, other=0.0).to(tl.float32)
    khat = key * rk
    prior = keep * a
    a = prior + c * (khat * khat)
    if J + 1 < R:
        carry, sum_m = _inside_rows(
            k, norms, forget, gain, dw, dk, dforget, dgain, remaining, d, a, carry, sum_m, m, factor, eps, H, K, K_STRIDE, J + 1, R, WIDE
        )
    a += eps
    r = log2(a, WIDE) - m
    size = 1.0 + LN2 * tl.abs(r)
    inverse = tl.rsqrt(size * a)
    inverse *= inverse  # of size and of a at once: 1 / size is a inverse, 1 / (size^2 a) is 1 / size times inverse
    slope = a * inverse
    grad *= tl.exp2(r * factor * slope)
    dr = grad * khat * slope
    dA = dr * (inverse * factor) + carry
    moved = khat * dA
    tl.store(dforget + J * H, tl.sum(prior * dA, 0), mask=inside)
    tl.store(dgain + J * H, tl.sum(khat * moved, 0), mask=inside)
    grad += moved * (2 * c)
    tl.store(dk + J * H * K + d, (read + rk * grad).to(dk.dtype.element_ty), mask=there)
    return keep * dA, sum_m + dr * slope


@triton.jit
def _inside(
    k, rows, forget, gain, center, starts, dw,  # inputs
    dk, dforget, dgain, dcenter, dstart, keep,  # outputs, fp32 but for dk, which holds the part of the key that reads
    chunks, factor, eps,
    H: tl.constexpr, K: tl.constexpr, K_STRIDE: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, R: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Formulas above."""
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    at = (chunk * H + head).to(tl.int64)
    token, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    m, d, i = tl.load(center + head) * LOG2E, tl.arange(0, BK), tl.arange(0, C)
    gate, norms = token.to(tl.int64) * H + head, rows + (at * KINDS + KEY_NORM) * C
    k += token.to(tl.int64) * K_STRIDE + head * K
    carry, sum_m = tl.zeros((BK,), tl.float32), tl.zeros((BK,), tl.float32)
    blocks = tl.cdiv(count, R)
    for done in range(0, blocks):
        first = (blocks - 1 - done) * R
        place = gate + first * H
        a = tl.load(starts + (at * C + first) // R * K + d, mask=d < K, other=0.0)
        carry, sum_m = _inside_rows(
            k + first * K_STRIDE, norms + first, forget + place, gain + place, dw + place * K, dk + place * K, dforget + place,
            dgain + place, count - first, d, a, carry, sum_m, m, factor, eps, H, K, K_STRIDE, 0, R, WIDE,
        )  # fmt: skip
    tl.store(dstart + at * K + d, carry, mask=d < K)
    tl.store(dcenter + at, -factor * tl.sum(sum_m, 0))
    p = tl.load(forget + gate + i * H, mask=i < count, other=0.0).to(tl.float32)
    tl.store(keep + at, tl.exp2(tl.sum(p, 0) * LOG2E))


@triton.jit
def _add_up(centers, dcenter, head, M, H):
    """dcenter [H]: the sum of centers [M, H] for one head."""
    total = tl.zeros((256,), tl.float32)
    for first in range(0, M, 256):
        m = first + tl.arange(0, 256)
        total += tl.load(centers + m.to(tl.int64) * H + head, mask=m < M, other=0.0)
    tl.store(dcenter + head, tl.sum(total, 0))


@triton.jit
def _finish_rows(
    k, norms, forget, gain, dk, dgain, own_gain,  # of the first of these rows; own_gain becomes c kappa
    remaining, d, D, left,
    H: tl.constexpr, K: tl.constexpr, K_STRIDE: tl.constexpr, J: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Rows J, J - 1 .. 0 of those that remain. left: exp(P_C - P_J), and of the row before the first when done."""
    inside = remaining > J
    there = inside & (d < K)
    key = tl.load(k + J * K_STRIDE + d, mask=there, other=0.0).to(tl.float32)
    grad = tl.load(dk + J * H * K + d, mask=there, other=0.0).to(tl.float32)
    c = tl.load(gain + J * H, mask=inside, other=0.0).to(tl.float32)
    own = tl.load(own_gain + J * H, mask=inside, other=0.0)
    rk = tl.load(norms + J)
    before = left * load_factor(forget + J * H, inside)
    if J > 0:
        before = _finish_rows(k, norms, forget, gain, dk, dgain, own_gain, remaining, d, D, before, H, K, K_STRIDE, J - 1, NORMALIZE)
    given = key * D
    kappa = left * rk * rk * tl.sum(key * given, 0)
    tl.store(dgain + J * H, (own + kappa).to(dgain.dtype.element_ty), mask=inside)
    tl.store(own_gain + J * H, c * kappa, mask=inside)
    if NORMALIZE:
        along = tl.sum(grad * key, 0) + 2 * c * kappa
        grad -= (along * rk * rk) * key
    grad += (2 * c * left * rk * rk) * given
    tl.store(dk + J * H * K + d, grad.to(dk.dtype.element_ty), mask=there)
    return before


@triton.jit
def _finish(
    k, rows, forget, gain, starts, d_end, own_forget, own_gain,  # inputs; own_gain is scratch from then on
    centers, dk, dforget, dgain, dcenter,  # outputs; dk holds the chunk's own part; dcenter [H] is the sum of the chunks' centers [M, H]
    chunks, M,
    H: tl.constexpr, K: tl.constexpr, K_STRIDE: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, R: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Formulas above. One program a chunk and head, and one more a head for dcenter."""
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    if chunk == M:
        _add_up(centers, dcenter, head, M, H)
        return
    at = (chunk * H + head).to(tl.int64)
    token, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    d, i = tl.arange(0, BK), tl.arange(0, C)
    gate, norms = token.to(tl.int64) * H + head, rows + (at * KINDS + KEY_NORM) * C
    k += token.to(tl.int64) * K_STRIDE + head * K
    D = tl.load(d_end + at * K + d, mask=d < K, other=0.0)
    left, blocks = 1.0, tl.cdiv(count, R)
    for done in range(0, blocks):
        first = (blocks - 1 - done) * R
        place = gate + first * H
        left = _finish_rows(
            k + first * K_STRIDE, norms + first, forget + place, gain + place, dk + place * K, dgain + place, own_gain + place,
            count - first, d, D, left, H, K, K_STRIDE, R - 1, NORMALIZE,
        )  # fmt: skip
    met = left * tl.sum(tl.load(starts + at * (C // R * K) + d, mask=d < K, other=0.0) * D, 0)
    tl.debug_barrier()  # the threads read each other's stores
    earlier = tl.load(own_gain + gate + (i - 1) * H, mask=(i > 0) & (i < count), other=0.0)
    own = tl.load(own_forget + gate + i * H, mask=i < count, other=0.0)
    tl.store(dforget + gate + i * H, own + met + tl.cumsum(earlier, 0), mask=i < count)


def backward(
    x: Inputs,
    solved: Solved,
    layout: Layout,
    starts: Tensor,
    gradients: Gradients,
    da: Tensor | None,
    hand_back: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dforget, dgain [N, H] in their dtypes, dcenter [H] and da_0 [S, H, K] fp32; completes gradients.k in place.

    starts [M, H, C / R, K] fp32: `kernels.write_keys`'. da [S, H, K] fp32: the gradient of the final statistic, None for zero. hand_back:
    takes the da_0 that this makes and returns another da, with what the sequences' later pieces give, or da itself (`kernels.maps`).
    """
    (N, H, K), (M, _) = x.k.shape, layout.counts
    sizes = (M, H, K), (M, H), (M, H), (H,), (N, H), (N, H)
    dstart, centers, keep, dcenter, *own = (torch.empty(size, dtype=torch.float32, device=x.k.device) for size in sizes)
    sizes = dict(H=H, K=K, K_STRIDE=x.k.stride(0), BK=power_of_2(K), C=layout.chunk, R=rows_at_once(K))
    choice = setting("statistic_inside", x.k)
    launch(
        _inside, M * H, x.key,
        x.k, solved.rows, x.forget, x.gain, x.center, starts, gradients.w, gradients.k, *own, centers, dstart, keep,
        layout.chunks, -x.log_bound, x.eps, **sizes, WIDE=x.k.dtype == torch.float32, num_warps=choice.warps, maxnreg=choice.registers,
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
        x.k, solved.rows, x.forget, x.gain, starts, d_end, *own, centers, gradients.k, dforget, dgain, dcenter, layout.chunks, M,
        **sizes, NORMALIZE=x.normalize, num_warps=choice.warps, maxnreg=choice.registers,
    )  # fmt: skip
    return dforget, dgain, dcenter, da_0
