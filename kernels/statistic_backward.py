"""The statistic's backward pass across chunks; what stays inside a chunk is done in `kernels.gradients`.

With D_c the gradient of the statistic at the end of chunk c (from later chunks and from the final statistic), start_c the gradient that
chunk c's own rows give to the statistic they meet, and P the chunk's inclusive cumulative log decay, `_chain` runs

    D_{c-1} = start_c + exp(P_C) D_c

from the last chunk, where D is the gradient of the final statistic, to the first, and `_finish` adds what D_c gives to the chunk's rows:

    dkhat_t += 2 c_t exp(P_C - P_t) khat_t D ;  kappa_t = sum khat_t^2 D ;  dc_t += exp(P_C - P_t) kappa_t
    dp_t    += exp(P_C) a_start . D + sum_{j < t} exp(P_C - P_j) c_j kappa_j

and dkhat, then whole, goes through the normalisation: dk = rk (dkhat - khat (khat . dkhat)).

Cost, D = 128, 16 bit, a token and head: reads k and dk, writes dk, 0.8 KB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gradients import Gradients, Statistic, _around
from kernels.launch import cdiv, launch, power_of_2
from kernels.layout import Inputs, Layout, Solved
from kernels.tiles import KEY_NORM, cumulate, last, load_gate, load_row, load_tile, store_tile
from kernels.tuned import setting

STEP = 64  # chunks that the chain takes at once, at most
CHANNELS = 16  # of the chain's programs


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
    k, rows, forget, gain, a_start, d_end, forget_part, gain_part,  # inputs
    dk, dforget, dgain,  # outputs; dk holds the chunk's own part
    chunks, H, k_stride,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Formulas above. One program a chunk and head."""
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    at = (chunk * H + head).to(tl.int64)
    token, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    i, d = tl.arange(0, C), tl.arange(0, BK)
    key = load_tile(k, token, count, k_stride, head, 0, K, BK, C).to(tl.float32)
    grad = load_tile(dk, token, count, H * K, head, 0, K, BK, C).to(tl.float32)
    D = tl.load(d_end + at * K + d, mask=d < K, other=0.0)
    met = tl.sum(tl.load(a_start + at * K + d, mask=d < K, other=0.0) * D)
    rk = load_row(rows, KEY_NORM, at, C)
    high, low = cumulate(load_gate(forget, token, count, H, head, C))
    c = load_gate(gain, token, count, H, head, C)
    end, end_low = last(high, C, C), last(low, C, C)  # gates past the rows are zero: the sums stay
    left = tl.exp2((end - high) + (end_low - low))
    kappa = rk * rk * tl.sum(key * key * D[None, :], 1)
    grad += (2 * c * left * rk * rk)[:, None] * key * D[None, :]
    if NORMALIZE:
        grad -= (rk * rk * tl.sum(grad * key, 1))[:, None] * key
    store_tile(dk, grad, token, count, H * K, head, 0, K, BK, C)
    place = (token + i).to(tl.int64) * H + head
    kappa = left * kappa
    tl.store(dgain + place, tl.load(gain_part + place, mask=i < count, other=0.0) + kappa, mask=i < count)
    grad_forget = tl.exp2(end + end_low) * met + _around(kappa * 0.0, c * kappa, C)
    tl.store(dforget + place, tl.load(forget_part + place, mask=i < count, other=0.0) + grad_forget, mask=i < count)


def backward(
    x: Inputs, solved: Solved, layout: Layout, a_start: Tensor, gradients: Gradients, da: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dforget, dgain [N, H] in their dtypes, dcenter [H] and da_0 [S, H, K] fp32; completes gradients.k in place.

    da [S, H, K] fp32: the gradient of the final statistic, None for zero.
    """
    (N, H, K), M, S = x.k.shape, len(layout.chunks), len(layout.sequences)
    part: Statistic = gradients.statistic
    d_end, da_0 = torch.empty(M + S, H, K, dtype=torch.float32, device=x.k.device).split([M, S])
    step = max(2, min(STEP, power_of_2(layout.longest)))
    launch(
        _chain, S * H * cdiv(K, CHANNELS), (x.key, da is None, N * H % 4, M * H % 4),
        part.start, part.keep, da, d_end, da_0, layout.sequences, H, K=K, BK=CHANNELS, STEP=step, FINAL=da is not None, num_warps=4
    )
    dforget, dgain = torch.empty_like(x.forget), torch.empty_like(x.gain)
    choice = setting("statistic_backward", x.k)
    launch(
        _finish, M * H, (x.key, N * H % 4, M * H % 4),
        x.k, solved.rows, x.forget, x.gain, a_start, d_end, part.forget, part.gain, gradients.k, dforget, dgain,
        layout.chunks, H, x.k.stride(0),
        K=K, BK=power_of_2(K), C=layout.chunk, NORMALIZE=x.normalize, num_warps=choice.warps,
        num_stages=choice.stages, maxnreg=choice.registers,
    )  # fmt: skip
    return dforget, dgain, part.center.sum(0), da_0
