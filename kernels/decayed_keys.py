"""With a decay a channel: the keys and queries as the scans meet a state with them, row by row, and the rows' numbers.

    kr = exp(G) khat ;  qr = scale exp(G) qhat ;  wd = exp(G_C - G) w ;  whole = exp(G_C)

with G the chunk's inclusive cumulative log decay, a vector of key channels, and G_C its last row. G_C - G is a sum over the rows that
follow, never a difference, so a second pass goes backwards. One program a chunk and head, one warp, as `kernels.write_keys`: the sums are
one addition a row and channel, where products with a triangle take matrix units, changes of layout and roundings to 16 bits.

Cost, D = 128, 16 bit, a token and head: reads k, q and g (fp32) 1,024 B and with a preconditioner w 256 B, writes kr, qr and wd 768 B,
three kinds of rows 12 B and `whole` 8 B; it reads g twice, and without a preconditioner k, mostly from the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch, power_of_2
from kernels.layout import Inputs, Layout
from kernels.levels import held
from kernels.tiles import BETA, KEY_NORM, KINDS, NORM_EPS, QUERY_NORM, load_gate, store_row
from kernels.write_keys import rows_at_once


@dataclass(frozen=True)
class DecayedKeys:
    rows: Tensor  # [M, H, 8, C] fp32: beta and the norms, see `kernels.tiles`
    whole: Tensor  # [M, H, K] fp32
    kr: Tensor  # [N, H, K] in the input dtype, as the next two
    qr: Tensor
    wd: Tensor


@triton.jit
def _norm(x, NORMALIZE: tl.constexpr):
    """1 / sqrt(sum x^2 + 1e-6), or 1."""
    if NORMALIZE:
        return tl.rsqrt(tl.sum(x * x, 0) + NORM_EPS)
    return 1.0


@triton.jit
def _read_rows(
    q, k, decay, kr, qr,  # of the first of these rows; inputs and outputs
    first, remaining, d, i, total, key_norms, query_norms, scale,
    H: tl.constexpr, K: tl.constexpr, Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, DECAY_STRIDE: tl.constexpr,
    J: tl.constexpr, R: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Rows J .. R of those that remain: writes kr and qr. Returns the sum of decays [K] and the norms of the rows so far [C]; it calls
    itself, so that all these rows' loads come before the first store."""
    there = (remaining > J) & (d < K)
    key = tl.load(k + J * K_STRIDE + d, mask=there, other=0.0).to(tl.float32)
    query = tl.load(q + J * Q_STRIDE + d, mask=there, other=0.0).to(tl.float32)
    total += held(tl.load(decay + J * DECAY_STRIDE + d, mask=there, other=0.0).to(tl.float32))
    rk, rq = _norm(key, NORMALIZE), _norm(query, NORMALIZE)
    key_norms, query_norms = tl.where(i == first + J, rk, key_norms), tl.where(i == first + J, rq, query_norms)
    read = tl.exp2(total)
    if J + 1 < R:
        total, key_norms, query_norms = _read_rows(
            q, k, decay, kr, qr, first, remaining, d, i, total, key_norms, query_norms, scale,
            H, K, Q_STRIDE, K_STRIDE, DECAY_STRIDE, J + 1, R, NORMALIZE,
        )  # fmt: skip
    tl.store(kr + J * H * K + d, (read * rk * key).to(kr.dtype.element_ty), mask=there)
    tl.store(qr + J * H * K + d, (read * (scale * rq) * query).to(qr.dtype.element_ty), mask=there)
    return total, key_norms, query_norms


@triton.jit
def _write_rows(
    w, decay, wd,  # of the first of these rows; inputs and output
    remaining, d, total,
    H: tl.constexpr, K: tl.constexpr, W_STRIDE: tl.constexpr, DECAY_STRIDE: tl.constexpr, J: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Rows J .. 0 of those that remain, the last first: writes wd, returns the sum of decays. NORMALIZE: w are keys as they came in."""
    there = (remaining > J) & (d < K)
    write = tl.load(w + J * W_STRIDE + d, mask=there, other=0.0).to(tl.float32)
    left = tl.exp2(total) * _norm(write, NORMALIZE)
    total += held(tl.load(decay + J * DECAY_STRIDE + d, mask=there, other=0.0).to(tl.float32))
    if J > 0:
        total = _write_rows(w, decay, wd, remaining, d, total, H, K, W_STRIDE, DECAY_STRIDE, J - 1, NORMALIZE)
    tl.store(wd + J * H * K + d, (left * write).to(wd.dtype.element_ty), mask=there)
    return total


@triton.jit
def _decayed_keys(
    q, k, w, beta, decay,  # inputs
    rows, whole, kr, qr, wd,  # outputs
    chunks, scale,
    H: tl.constexpr, K: tl.constexpr, Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, W_STRIDE: tl.constexpr,
    DECAY_STRIDE: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, R: tl.constexpr, PRECONDITION: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Formulas above. H and the strides are constants so that a row's place is one in the instruction that loads it."""
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    at = chunk.to(tl.int64) * H + head
    token, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    d, i, start = tl.arange(0, BK), tl.arange(0, C), token.to(tl.int64)
    q += start * Q_STRIDE + head * K
    k += start * K_STRIDE + head * K
    w += start * W_STRIDE + head * K
    decay += start * DECAY_STRIDE + head * K
    out = (start * H + head) * K
    total, key_norms, query_norms = tl.zeros((BK,), tl.float32), tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    for first in range(0, count, R):
        place = out + first * (H * K)
        total, key_norms, query_norms = _read_rows(
            q + first * Q_STRIDE, k + first * K_STRIDE, decay + first * DECAY_STRIDE, kr + place, qr + place,
            first, count - first, d, i, total, key_norms, query_norms, scale,
            H, K, Q_STRIDE, K_STRIDE, DECAY_STRIDE, 0, R, NORMALIZE,
        )  # fmt: skip
    tl.store(whole + at * K + d, tl.exp2(total), mask=d < K)
    store_row(rows, load_gate(beta, token, count, H, head, C), BETA, at, count, C)
    store_row(rows, key_norms, KEY_NORM, at, count, C)
    store_row(rows, query_norms, QUERY_NORM, at, count, C)
    total = tl.zeros((BK,), tl.float32)
    for done in range(0, count, R):
        first = (count - 1) // R * R - done
        total = _write_rows(
            w + first * W_STRIDE, decay + first * DECAY_STRIDE, wd + out + first * (H * K), count - first, d, total,
            H, K, W_STRIDE, DECAY_STRIDE, R - 1, NORMALIZE and not PRECONDITION,
        )  # fmt: skip


def forward(x: Inputs, layout: Layout, w: Tensor | None) -> DecayedKeys:
    """From the write keys w [N, H, K], None without a preconditioner."""
    (N, H, K), (M, _), C = x.k.shape, layout.counts, layout.chunk
    kr, qr, wd = (x.k.new_empty(N, H, K) for _ in range(3))
    rows, whole = (torch.empty(size, dtype=torch.float32, device=x.k.device) for size in ((M, H, KINDS.value, C), (M, H, K)))
    written = x.k if w is None else w
    launch(
        _decayed_keys, M * H, x.key,
        x.q, x.k, written, x.beta, x.decay, rows, whole, kr, qr, wd, layout.chunks, x.scale,
        H=H, K=K, Q_STRIDE=x.q.stride(0), K_STRIDE=x.k.stride(0), W_STRIDE=written.stride(0), DECAY_STRIDE=x.decay_stride,
        BK=power_of_2(K), C=C, R=rows_at_once(K), PRECONDITION=w is not None, NORMALIZE=x.normalize, num_warps=1,
    )  # fmt: skip
    return DecayedKeys(rows, whole, kr, qr, wd)
