"""The preconditioner's statistic at the chunks' starts: the only part of it that runs over the whole sequence.

    a_t = exp(p_t) a_{t-1} + c_t khat_t^2                                                        (docs/paper.md, section 1)

Forward, two launches: `_sums` makes each chunk's own part (chunk-parallel), `_chain` carries it over the chunks of a sequence; backward
the same `_chain` carries gradients (`statistic_backward`).

    own = sum_t exp(P_C - P_t) c_t khat_t^2 ;  a_start of the next chunk = exp(P_C) a_start + own

with P the chunk's inclusive cumulative log decay, P_C its last. All in fp32, sums of positive terms, no products of matrices. exp(P_C) is
that of a sum: of a weak decay the 64 factors, each rounded near 1, err in one direction, and their product's error grows chunk after chunk.
Cost, D = 128, 16 bit: reads k once, 256 B a token and head, and writes 16 B.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, launch, power_of_2
from kernels.layout import Inputs, Layout
from kernels.tiles import NORM_EPS
from kernels.write_keys import load_decay, rows_at_once

STEP, LONG_STEP = 64, 512  # chunks a step of the chain, at most; LONG_STEP where few long sequences are cut
CHANNELS = 16  # of the chain's programs


@triton.jit
def _sums(
    k, forget, gain,  # inputs
    own, keep,  # outputs
    chunks,
    H: tl.constexpr, K: tl.constexpr, K_STRIDE: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """own [M, H, K] and keep [M, H] = exp(P_C): formula above, row by row as in `kernels.write_keys`."""
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    at = (chunk * H + head).to(tl.int64)
    token, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    d, gate = tl.arange(0, BK), token.to(tl.int64) * H + head
    k += token.to(tl.int64) * K_STRIDE + head * K
    a, whole = tl.zeros((BK,), tl.float32), 0.0
    for first in range(0, count, R):
        for j in tl.static_range(R):
            t = first + j
            key = tl.load(k + first * K_STRIDE + j * K_STRIDE + d, mask=(t < count) & (d < K), other=0.0).to(tl.float32)
            c = tl.load(gain + gate + first * H + j * H, mask=t < count, other=0.0).to(tl.float32)
            if NORMALIZE:
                key *= tl.rsqrt(tl.sum(key * key, 0) + NORM_EPS)
            decay = load_decay(forget + gate + first * H + j * H, t < count)
            a = tl.exp2(decay) * a + c * (key * key)
            whole += decay
    tl.store(own + at * K + d, a, mask=d < K)
    tl.store(keep + at, tl.exp2(whole))


@triton.jit
def _follow(a_keep, a_own, b_keep, b_own):
    return a_keep * b_keep, a_own * b_keep + b_own


@triton.jit
def _chain(
    own, keep, start, states, end, sequences, H,
    K: tl.constexpr, BK: tl.constexpr, STEP: tl.constexpr, GIVEN: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """states [M, H, K], what each chunk meets of x' = keep x + own (REVERSE: from the last chunk to the first), and end [S, H, K], what the
    last one leaves. One program a sequence, head and BK channels."""
    blocks: tl.constexpr = (K + BK - 1) // BK
    block, head, n = tl.program_id(0) % blocks, tl.program_id(0) // blocks % H, tl.program_id(0) // blocks // H
    first, chunks = tl.load(sequences + 4 * n), tl.load(sequences + 4 * n + 1)
    d, j = block * BK + tl.arange(0, BK), tl.arange(0, STEP)
    ahead: tl.constexpr = -1 if REVERSE else 1
    if REVERSE:
        first += chunks - 1
    state = tl.zeros((BK,), tl.float32)
    at = (n * H + head).to(tl.int64) * K + d
    if GIVEN:
        state = tl.load(start + at, mask=d < K, other=0.0)
    for done in range(0, chunks, STEP):
        left = chunks - done
        place = (first + ahead * (done + j)).to(tl.int64) * H + head
        there = (j < left)[:, None] & (d < K)[None, :]
        kept = tl.load(keep + place, mask=j < left, other=1.0)[:, None] + tl.zeros((STEP, BK), tl.float32)
        value = tl.load(own + place[:, None] * K + d[None, :], mask=there, other=0.0)
        value = tl.where((j == 0)[:, None], value + kept * state[None, :], value)
        kept, value = tl.associative_scan((kept, value), 0, _follow)
        tl.store(states + ((first + ahead * done).to(tl.int64) * H + head) * K + d, state, mask=d < K)
        after = there & (j + 1 < left)[:, None] & (j + 1 < STEP)[:, None]
        tl.store(states + (place + ahead * H)[:, None] * K + d[None, :], value, mask=after)
        state = tl.sum(tl.where((j == STEP - 1)[:, None], value, 0.0), 0)
    tl.store(end + at, state, mask=d < K)


def forward(x: Inputs, layout: Layout, a_0: Tensor | None) -> tuple[Tensor, Tensor]:
    """a_start [M, H, K], the statistic before each chunk, and a [S, H, K] after each sequence; both fp32."""
    return chain(x, layout, sums(x, layout), a_0)


def sums(x: Inputs, layout: Layout) -> tuple[Tensor, Tensor]:
    """Each chunk's own part of the statistic [M, H, K], and what it leaves of the one it meets [M, H]; fp32, for `chain`."""
    (_, H, K), (M, _) = x.k.shape, layout.counts
    own, keep = (torch.empty(size, dtype=torch.float32, device=x.k.device) for size in ((M, H, K), (M, H)))
    launch(
        _sums, M * H, x.key,
        x.k, x.forget, x.gain, own, keep, layout.chunks,
        H=H, K=K, K_STRIDE=x.k.stride(0), BK=power_of_2(K), R=rows_at_once(K), NORMALIZE=x.normalize, num_warps=1,
    )  # fmt: skip
    return own, keep


def chain(x: Inputs, layout: Layout, own: tuple[Tensor, Tensor], start: Tensor | None, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """What each chunk meets [M, H, K] and what each sequence ends with [S, H, K], from each chunk's own part [M, H, K] and what it leaves
    of the one it meets [M, H] (`sums`; backward `statistic_backward`), and start [S, H, K], None for zero. reverse: last chunk first."""
    (_, H, K), (M, S) = x.k.shape, layout.counts
    states, end = (torch.empty(n, H, K, dtype=torch.float32, device=x.k.device) for n in (M, S))
    step = max(2, min(LONG_STEP if layout.cut else STEP, power_of_2(layout.longest)))
    launch(
        _chain, S * H * cdiv(K, CHANNELS), (x.key, start is None),
        *own, start, states, end, layout.sequences, H,
        K=K, BK=CHANNELS, STEP=step, GIVEN=start is not None, REVERSE=reverse, num_warps=8 if step > STEP else 4,
    )  # fmt: skip
    return states, end
