"""The statistic's backward pass: from the gradient of the write keys to those of the keys, the gains and the statistic's decay.

    prior_t = exp(p_t) a_{t-1} ;  a = prior + c khat^2 ;  r = log(a + eps) - m ;  b = exp(-log(x) r / (1 + |r|)) ;  w = b khat
    dr = dw khat b (-log(x)) / (1 + |r|)^2 ;  dm = -sum dr ;  da = dr / (a + eps)
    dA_t = da_t + exp(p_{t+1}) dA_{t+1}                                     over all later rows of the sequence
    dkhat += b dw + 2 c khat dA ;  dc_t = sum khat^2 dA ;  dp_t = sum dA prior ;  dk = rk (dkhat - khat (khat . dkhat))

Three launches, as forward: `_sums_backward` makes what each chunk's rows give to the statistic that the chunk meets, dstart = sum_t
exp(P_t) da_t with the chunk's inclusive cumulative log decay P. `statistic.chain` carries it from the last chunk, where D is the gradient
of the final statistic, to the first: D_{c-1} = dstart_c + exp(P_C) D_c (run again where a later piece of the sequences hands back a part
of it, `kernels.maps`). `_keys_backward` makes everything else, from the last row of a chunk, with dA = D behind it, to the first.

Both go through a chunk's rows one after the other, a program of one warp for a chunk and head, as `kernels.write_keys` does.
`_sums_backward` stores the statistic before every R rows, and `_keys_backward` makes those between again.

Cost, D = 128, 16 bit, a token and head: reads k and dw twice, dk once, writes dk once, and starts 64 B both ways: 1.7 KB.
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
from kernels.write_keys import LN2, load_decay, log2, rows_at_once


@triton.jit
def _through_bound(a, m, factor, WIDE: tl.constexpr):
    """From a, which has eps in it: b, 1 / (1 + |r|), and -log(x) / ((1 + |r|) a). m: times log2(e); factor: -log(x)."""
    r = log2(a, WIDE) - m
    size = 1.0 + LN2 * tl.abs(r)
    inverse = tl.rsqrt(size * a)  # a division takes several instructions; this one serves both
    inverse *= inverse
    slope = a * inverse
    return tl.exp2(r * factor * slope), slope, inverse * factor


@triton.jit
def _sums_backward(
    k, rows, forget, gain, center, dw, a_start,  # inputs
    starts, dstart, keep, centers,  # outputs
    chunks, factor, eps,
    H: tl.constexpr, K: tl.constexpr, K_STRIDE: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, R: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dstart [M, H, K], keep [M, H] = exp(P_C), centers [M, H] = -sum dr, formulas above, and starts [M, H, C / R, K], the statistic before
    each R rows; first row first."""
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    at = (chunk * H + head).to(tl.int64)
    token, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    m, d = tl.load(center + head) * LOG2E, tl.arange(0, BK)
    gate, norms = token.to(tl.int64) * H + head, rows + (at * KINDS + KEY_NORM) * C
    k += token.to(tl.int64) * K_STRIDE + head * K
    a = tl.load(a_start + at * K + d, mask=d < K, other=0.0)
    given, sum_m, grown, whole = tl.zeros((BK,), tl.float32), tl.zeros((BK,), tl.float32), 1.0, 0.0
    for first in range(0, count, R):
        tl.store(starts + (at * C + first) // R * K + d, a, mask=d < K)
        place = gate + first * H
        for j in tl.static_range(R):
            inside = first + j < count
            there = inside & (d < K)
            khat = tl.load(k + first * K_STRIDE + j * K_STRIDE + d, mask=there, other=0.0).to(tl.float32) * tl.load(norms + first + j)
            grad = tl.load(dw + place * K + j * H * K + d, mask=there, other=0.0).to(tl.float32)
            c, decay = tl.load(gain + place + j * H, mask=inside, other=0.0).to(tl.float32), load_decay(forget + place + j * H, inside)
            a = tl.exp2(decay) * a + c * (khat * khat)
            b, slope, fall = _through_bound(a + eps, m, factor, WIDE)
            part = grad * b * khat * slope  # dr = -log(x) part slope ;  da = part fall
            sum_m += part * slope
            whole += decay
            grown *= tl.exp2(decay)  # a product is well enough inside one chunk
            given += grown * (part * fall)
    tl.store(dstart + at * K + d, given, mask=d < K)
    tl.store(keep + at, tl.exp2(whole))
    tl.store(centers + at, -factor * tl.sum(sum_m, 0))


@triton.jit
def _back_rows(
    k, norms, forget, gain, dw, dk, dforget, dgain,  # of the first of these rows; inputs, and the last three outputs
    remaining, d, a, carry, m, factor, eps,
    H: tl.constexpr, K: tl.constexpr, K_STRIDE: tl.constexpr, J: tl.constexpr, R: tl.constexpr, NORMALIZE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Rows J .. R of those that remain, the last one first. a: the statistic before row J. carry: exp(p) dA of the row after
    them; returns that of row J."""
    inside = remaining > J
    there = inside & (d < K)
    key = tl.load(k + J * K_STRIDE + d, mask=there, other=0.0).to(tl.float32)
    grad = tl.load(dw + J * H * K + d, mask=there, other=0.0).to(tl.float32)
    read = tl.load(dk + J * H * K + d, mask=there, other=0.0).to(tl.float32)
    rk, keep = tl.load(norms + J), tl.exp2(load_decay(forget + J * H, inside))
    c = tl.load(gain + J * H, mask=inside, other=0.0).to(tl.float32)
    khat = key * rk
    prior = keep * a
    a = prior + c * (khat * khat)
    if J + 1 < R:
        carry = _back_rows(
            k, norms, forget, gain, dw, dk, dforget, dgain, remaining, d, a, carry, m, factor, eps,
            H, K, K_STRIDE, J + 1, R, NORMALIZE, WIDE,
        )  # fmt: skip
    b, slope, fall = _through_bound(a + eps, m, factor, WIDE)
    grad *= b
    dA = grad * khat * slope * fall + carry
    moved = khat * dA
    tl.store(dforget + J * H, tl.sum(prior * dA, 0).to(dforget.dtype.element_ty), mask=inside)
    tl.store(dgain + J * H, tl.sum(khat * moved, 0).to(dgain.dtype.element_ty), mask=inside)
    grad = read + rk * (grad + moved * (2 * c))
    if NORMALIZE:
        grad -= tl.sum(grad * khat, 0) * khat
    tl.store(dk + J * H * K + d, grad.to(dk.dtype.element_ty), mask=there)
    return keep * dA


@triton.jit
def _add_up(centers, dcenter, head, M, H):
    """dcenter [H]: the sum of centers [M, H] for one head."""
    total = tl.zeros((256,), tl.float32)
    for first in range(0, M, 256):
        m = first + tl.arange(0, 256)
        total += tl.load(centers + m.to(tl.int64) * H + head, mask=m < M, other=0.0)
    tl.store(dcenter + head, tl.sum(total, 0))


@triton.jit
def _keys_backward(
    k, rows, forget, gain, center, dw, starts, d_end, centers,  # inputs
    dk, dforget, dgain, dcenter,  # outputs; dk holds rk times the gradient of the key that reads; dcenter [H] is the sum of centers [M, H]
    chunks, factor, eps, M,
    H: tl.constexpr, K: tl.constexpr, K_STRIDE: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, R: tl.constexpr, NORMALIZE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Formulas above. One program a chunk and head, and one more a head for dcenter."""
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    if chunk == M:
        _add_up(centers, dcenter, head, M, H)
        return
    at = (chunk * H + head).to(tl.int64)
    token, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    m, d = tl.load(center + head) * LOG2E, tl.arange(0, BK)
    gate, norms = token.to(tl.int64) * H + head, rows + (at * KINDS + KEY_NORM) * C
    k += token.to(tl.int64) * K_STRIDE + head * K
    carry, blocks = tl.load(d_end + at * K + d, mask=d < K, other=0.0), tl.cdiv(count, R)
    for done in range(0, blocks):
        first = (blocks - 1 - done) * R
        place = gate + first * H
        a = tl.load(starts + (at * C + first) // R * K + d, mask=d < K, other=0.0)
        carry = _back_rows(
            k + first * K_STRIDE, norms + first, forget + place, gain + place, dw + place * K, dk + place * K, dforget + place,
            dgain + place, count - first, d, a, carry, m, factor, eps, H, K, K_STRIDE, 0, R, NORMALIZE, WIDE,
        )  # fmt: skip


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

    a_start [M, H, K] fp32: the statistic before each chunk. da [S, H, K] fp32: the gradient of the final one, None for zero. hand_back:
    takes the da_0 that this makes and returns another da, with what the sequences' later pieces give, or da itself (`kernels.maps`).
    """
    (_, H, K), (M, _), C, R = x.k.shape, layout.counts, layout.chunk, rows_at_once(x.k.shape[-1])
    sizes = (M, H, C // R, K), (M, H, K), (M, H), (M, H), (H,)
    starts, dstart, keep, centers, dcenter = (torch.empty(size, dtype=torch.float32, device=x.k.device) for size in sizes)
    constants = {"H": H, "K": K, "K_STRIDE": x.k.stride(0), "BK": power_of_2(K), "C": C, "R": R}
    wide, inputs = x.k.dtype == torch.float32, (x.k, solved.rows, x.forget, x.gain, x.center, gradients.w)
    choice = setting("statistic_sums", x.k)
    launch(
        _sums_backward, M * H, x.key,
        *inputs, a_start, starts, dstart, keep, centers, layout.chunks, -x.log_bound, x.eps,
        **constants, WIDE=wide, num_warps=choice.warps, maxnreg=choice.registers,
    )  # fmt: skip
    d_end, da_0 = chain(x, layout, (dstart, keep), da, reverse=True)
    if hand_back is not None:
        whole = hand_back(da_0)
        if whole is not da:
            d_end, da_0 = chain(x, layout, (dstart, keep), whole, reverse=True)
    dforget, dgain = torch.empty_like(x.forget), torch.empty_like(x.gain)
    choice = setting("statistic_keys", x.k)
    launch(  # M's part of the key: Triton compiles integers that are 1 or multiples of 16 apart
        _keys_backward, (M + 1) * H, (x.key, M == 1, M % 16 == 0),
        *inputs, starts, d_end, centers, gradients.k, dforget, dgain, dcenter, layout.chunks, -x.log_bound, x.eps, M,
        **constants, NORMALIZE=x.normalize, WIDE=wide, num_warps=choice.warps, maxnreg=choice.registers,
    )  # fmt: skip
    return dforget, dgain, dcenter, da_0
