"""The preconditioner's statistic at the chunks' starts: the only part of it that runs over the whole sequence.

    a_t = exp(p_t) a_{t-1} + c_t khat_t^2                                                        (docs/paper.md, section 1)

Forward, two launches: `_sums` makes each chunk's own part (chunk-parallel), `_chain` carries it over the chunks of a sequence.

    own = sum_t exp(P_C - P_t) c_t khat_t^2 ;  a_start' = exp(P_C) a_start + own

All in fp32, sums of positive terms, no products of matrices: nothing is lost over long sequences. Cost, D = 128, 16 bit: reads k once,
256 B a token and head, and writes 16 B.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, launch, power_of_2
from kernels.layout import Inputs, Layout
from kernels.tiles import cumulate, last, load_gate, load_tile
from kernels.tuned import setting

STEP = 64  # chunks that the chain takes at once, at most
CHANNELS = 16  # of the chain's programs


@triton.jit
def _sums(
    k, forget, gain, own, decay, chunks, H, k_stride,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """own [M, H, K] = sum_t exp(P_C - P_t) c_t khat_t^2 and decay [M, H] = P_C / ln 2."""
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    token, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    square = load_tile(k, token, count, k_stride, head, 0, K, BK, C).to(tl.float32)
    square *= square
    high, low = cumulate(load_gate(forget, token, count, H, head, C))
    end, end_low = last(high, C, C), last(low, C, C)  # gates past the rows are zero: the sums stay
    weight = tl.exp2((end - high) + (end_low - low)) * load_gate(gain, token, count, H, head, C)
    if NORMALIZE:
        weight /= tl.sum(square, 1) + 1e-6
    at = (chunk * H + head).to(tl.int64)
    d = tl.arange(0, BK)
    tl.store(own + at * K + d, tl.sum(weight[:, None] * square, 0), mask=d < K)
    tl.store(decay + at, end + end_low)


@triton.jit
def _follow(a_keep, a_own, b_keep, b_own):
    return a_keep * b_keep, a_own * b_keep + b_own


@triton.jit
def _chain(
    own, decay, a_0, a_start, a, sequences, H,
    K: tl.constexpr, BK: tl.constexpr, STEP: tl.constexpr, INITIAL: tl.constexpr,
):  # fmt: skip
    """a_start [M, H, K], the statistic before each chunk, and a [S, H, K], the final one. One program a sequence, head and BK channels."""
    blocks: tl.constexpr = (K + BK - 1) // BK
    block, head, n = tl.program_id(0) % blocks, tl.program_id(0) // blocks % H, tl.program_id(0) // blocks // H
    first, chunks = tl.load(sequences + 4 * n), tl.load(sequences + 4 * n + 1)
    d, j = block * BK + tl.arange(0, BK), tl.arange(0, STEP)
    state = tl.zeros((BK,), tl.float32)
    at = (n * H + head).to(tl.int64) * K + d
    if INITIAL:
        state = tl.load(a_0 + at, mask=d < K, other=0.0)
    for start in range(0, chunks, STEP):
        left = chunks - start
        place = (first + start + j).to(tl.int64) * H + head
        there = (j < left)[:, None] & (d < K)[None, :]
        keep = tl.exp2(tl.load(decay + place, mask=j < left, other=0.0))[:, None] + tl.zeros((STEP, BK), tl.float32)
        value = tl.load(own + place[:, None] * K + d[None, :], mask=there, other=0.0)
        value = tl.where((j == 0)[:, None], value + keep * state[None, :], value)
        keep, value = tl.associative_scan((keep, value), 0, _follow)
        tl.store(a_start + ((first + start).to(tl.int64) * H + head) * K + d, state, mask=d < K)
        tl.store(a_start + (place + H)[:, None] * K + d[None, :], value, mask=there & (j + 1 < left)[:, None] & (j + 1 < STEP)[:, None])
        state = tl.sum(tl.where((j == STEP - 1)[:, None], value, 0.0), 0)
    tl.store(a + at, state, mask=d < K)


def forward(x: Inputs, layout: Layout, a_0: Tensor | None) -> tuple[Tensor, Tensor]:
    """a_start [M, H, K], the statistic before each chunk, and a [S, H, K] after each sequence; both fp32."""
    return chain(x, layout, sums(x, layout), a_0)


def sums(x: Inputs, layout: Layout) -> tuple[Tensor, Tensor]:
    """Each chunk's own part of the statistic [M, H, K], and the log2 of what it leaves of the one it meets [M, H]; fp32, for `chain`."""
    (_, H, K), (M, _) = x.k.shape, layout.counts
    own, kept = (torch.empty(size, dtype=torch.float32, device=x.k.device) for size in ((M, H, K), (M, H)))
    choice = setting("statistic", x.k)
    launch(
        _sums, M * H, x.key,
        x.k, x.forget, x.gain, own, kept, layout.chunks, H, x.k.stride(0),
        K=K, BK=power_of_2(K), C=layout.chunk, NORMALIZE=x.normalize, num_warps=choice.warps, num_stages=choice.stages,
    )  # fmt: skip
    return own, kept


def chain(x: Inputs, layout: Layout, own: tuple[Tensor, Tensor], a_0: Tensor | None) -> tuple[Tensor, Tensor]:
    """`forward` from what `sums` made."""
    (_, H, K), (M, S) = x.k.shape, layout.counts
    a_start, a = (torch.empty(n, H, K, dtype=torch.float32, device=x.k.device) for n in (M, S))
    step = max(2, min(STEP, power_of_2(layout.longest)))
    launch(
        _chain, S * H * cdiv(K, CHANNELS), (x.key, a_0 is None),
        *own, a_0, a_start, a, layout.sequences, H, K=K, BK=CHANNELS, STEP=step, INITIAL=a_0 is not None, num_warps=4
    )  # fmt: skip
    return a_start, a
