"""The write keys: from the statistic at the chunks' starts to w, row by row. Formulas in docs/paper.md, section 1.

    a_t = exp(p_t) a_{t-1} + c_t khat_t^2 ;  r = log(a_t + eps) - m ;  b_t = exp(-log(x) r / (1 + |r|)) ;  w_t = b_t khat_t

m is the head's centre, x >= 1 the bound: b lies in [1/x, x]. One program a chunk and head, which is one warp: it goes through the chunk's
rows one after the other with all key channels of the statistic in registers, so that a row costs one multiplication and one addition a
channel. (As a product with the decays' triangle, as other sums over a chunk are made, it takes matrix units, changes of layout, and
rounding to 16 bits.) `_write_rows` calls itself, unrolled, for the next row, so that the loads of R rows come before the first store: the
compiler moves no load past a store.

Cost, D = 128, 16 bit, a token and head: reads k 256 B, writes w 256 B.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from kernels.launch import launch, power_of_2
from kernels.layout import Inputs, Layout
from kernels.tiles import LOG2E, NORM_EPS

LN2 = tl.constexpr(0.6931471805599453)


def rows_at_once(key: int) -> int:
    """Rows whose loads are on their way together, of heads of `key` channels: more would not find room in registers."""
    return 8 if key <= 128 else 4


@triton.jit
def log2(x, WIDE: tl.constexpr):
    """log2 of x fp32: one instruction with an error of 2^-22, enough for 16-bit inputs; about a dozen for fp32 ones (WIDE)."""
    if WIDE:
        return tl.log2(x)
    return libdevice.fast_log2f(x)


@triton.jit
def load_decay(gate, inside):
    """A log decay times log2(e), at one token of one head; 0 past the chunk's rows."""
    return tl.load(gate, mask=inside, other=0.0).to(tl.float32) * LOG2E


@triton.jit
def _write_rows(
    k, forget, gain, w,  # of the first of these rows; inputs and output
    remaining, d, a, m, factor, eps,
    H: tl.constexpr, K: tl.constexpr, K_STRIDE: tl.constexpr, J: tl.constexpr, R: tl.constexpr, NORMALIZE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Rows J .. R of those that remain: writes w, returns the statistic after them. a: before row J; m: times log2(e); factor: -log(x)."""
    inside = remaining > J
    there = inside & (d < K)
    key = tl.load(k + J * K_STRIDE + d, mask=there, other=0.0).to(tl.float32)
    if NORMALIZE:
        key *= tl.rsqrt(tl.sum(key * key, 0) + NORM_EPS)
    c = tl.load(gain + J * H, mask=inside, other=0.0).to(tl.float32)
    a = tl.exp2(load_decay(forget + J * H, inside)) * a + c * (key * key)
    r = log2(a + eps, WIDE) - m
    root = tl.rsqrt(1.0 + LN2 * tl.abs(r))  # a division takes several instructions
    write = tl.exp2(r * factor * root * root) * key
    if J + 1 < R:
        a = _write_rows(k, forget, gain, w, remaining, d, a, m, factor, eps, H, K, K_STRIDE, J + 1, R, NORMALIZE, WIDE)
    tl.store(w + J * H * K + d, write.to(w.dtype.element_ty), mask=there)
    return a


@triton.jit
def _write_keys(
    k, forget, gain, center, a_start,  # inputs
    w,  # output
    chunks, factor, eps,
    H: tl.constexpr, K: tl.constexpr, K_STRIDE: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, NORMALIZE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Formulas above. H and the stride are constants so that a row's place is one in the instruction that loads it."""
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    at = (chunk * H + head).to(tl.int64)
    token, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    m, d = tl.load(center + head) * LOG2E, tl.arange(0, BK)
    gate = token.to(tl.int64) * H + head
    k += token.to(tl.int64) * K_STRIDE + head * K
    a = tl.load(a_start + at * K + d, mask=d < K, other=0.0)
    for first in range(0, count, R):
        place = gate + first * H
        a = _write_rows(
            k + first * K_STRIDE, forget + place, gain + place, w + place * K, count - first, d, a, m, factor, eps,
            H, K, K_STRIDE, 0, R, NORMALIZE, WIDE,
        )  # fmt: skip


def forward(x: Inputs, layout: Layout, a_start: Tensor) -> Tensor:
    """w [N, H, K] in the input dtype, from the statistic before each chunk a_start [M, H, K] fp32."""
    (N, H, K), (M, _) = x.k.shape, layout.counts
    w = x.k.new_empty(N, H, K)
    launch(
        _write_keys, M * H, x.key,
        x.k, x.forget, x.gain, x.center, a_start, w, layout.chunks, -x.log_bound, x.eps,
        H=H, K=K, K_STRIDE=x.k.stride(0), BK=power_of_2(K), R=rows_at_once(K), NORMALIZE=x.normalize, WIDE=x.k.dtype == torch.float32,
        num_warps=1,
    )  # fmt: skip
    return w
