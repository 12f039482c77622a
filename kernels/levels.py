"""A decay of its own for each key channel, inside a chunk: exponents that are sums of neighbouring gates, never differences.

With G the inclusive cumulative log decay, the pair of rows i > j needs exp(G_i - G_j) in each channel: no factor of a row times a factor of
a column can be that for all pairs without exponents that overflow. But pairs can be sorted by the highest bit in which i and j differ,
half = 1, 2, 4 .. C / 2: then both lie in one block of 2 half rows, i in its upper and j in its lower half. With b the first row of the
upper half,

    G_i - G_j = sum_{t=b..i} g_t + sum_{t=j+1..b-1} g_t

so one tile of factors serves every pair of a level, F_i F_j = exp(G_i - G_j), and log C levels serve all:

    F_i = exp(sum_{t=b..i} g_t) for rows of upper halves, exp(sum_{t=i+1..b-1} g_t) for rows of lower ones
    sum_d x_i y_j exp(G_i - G_j) = (F x) (F y)^T at the pairs of this level

Gates are <= 0, so all terms of a sum have one sign: an exponent with a relative error e costs exp at most 0.37 e, however strong the
gates, and F lies in [0, 1]. The sums are products of a 0/1 matrix with the gates, in fp16 where inputs are 16 bits wide (e = 2^-12),
3xTF32 where they are fp32. No pair depends on a gate outside j + 1 .. i.

Levels inside blocks of 16 rows (`near_decays`) take products that a warp makes of its own block, with masks of [16, 16]; the others
(`far_decays`) take a product of whole tiles each, zero outside their pairs (`far_pairs`).

Where the gates of all blocks are mild, as they nearly always are, the four levels inside a block are one: with b the block's first row,

    exp(G_i - G_j) = exp(G_i - G_b) exp(G_b - G_j)

for every pair i > j of the block: the factor of the row that reads is at most 1, that of the written row at least 1. `mild` says whether
the latter stay below 2^96 (2^4 where inputs are fp16, whose keys may be large), and then two rounded factors are as exact as those of a
level: both hold the same rounded gates. No factor holds a gate that comes after its row, so past outputs
do not change in any bit with a later gate, but where that gate decides that its chunk is not mild, and then by roundings.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.tiles import LOG2E, load_tile

NEAR = tl.constexpr(16)  # rows of a block whose own pairs are made apart: warps work on blocks alone, with masks of [16, 16] only


@triton.constexpr_function
def levels(C):
    """log2 C: the level `number` has half = 1 << number."""
    return int(C).bit_length() - 1


@triton.jit
def held(g):
    """g / ln 2 of log decays g fp32. Below -200 a gate is 0 in fp32: it is held there."""
    return tl.where(g < -200.0, -200.0, g) * LOG2E  # a comparison with NaN is false: NaN stays


@triton.jit
def load_decay(decay, token, count, stride, head, first, K: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr):
    """g / ln 2 [C, BD] in DOT, fp16 or fp32, of a decay [N, H, K]; zero past the chunk's rows."""
    return held(load_tile(decay, token, count, stride, head, first, K, BD, C).to(tl.float32)).to(DOT)


@triton.jit
def halves(half, C: tl.constexpr, TURNED: tl.constexpr = False):
    """[C, C], true at (i, t) where gate t is in row i's sum: t in i's half block, t <= i in an upper half and t > i in a lower one; TURNED:
    at (t, i)."""
    i, t = tl.arange(0, C), tl.arange(0, C)
    upper = (i & half) != 0
    first = tl.where(upper, i & -half, i + 1)  # numbers of rows, so that a loop over levels keeps no [C, C] between them
    stop = tl.where(upper, i + 1, (i & -half) + half)
    if TURNED:
        return (t[:, None] >= first[None, :]) & (t[:, None] < stop[None, :])
    return (t[None, :] >= first[:, None]) & (t[None, :] < stop[:, None])


@triton.jit
def whole_chunk(g):
    """exp(G_C) [BD] fp32: what a chunk leaves of the state it meets."""
    return tl.exp2(tl.sum(g.to(tl.float32), 0))


@lru_cache
def sums(C: int, dtype: torch.dtype, device: torch.device, turned: bool = False) -> Tensor:
    """[log2 C + 2, C, C] of 0 and 1: at (n, i, t), or turned at (n, t, i), whether gate t is in row i's sum: for the levels n in order as
    `halves`, then from the chunk's start to i, and from after i to the chunk's end.

    Kernels read these from memory. Made in registers, a left operand goes through shared memory, and Triton 3.6 then places the fence that
    a product on Hopper needs after the barrier, not before it: it can read a right operand that other warps have not finished writing.
    """
    i, t = torch.arange(C)[:, None], torch.arange(C)[None, :]
    tables = []
    for half in (1 << number for number in range(C.bit_length() - 1)):
        tables.append((i // half == t // half) & torch.where(i // half % 2 == 1, t <= i, t > i))
    table = torch.stack([*tables, t <= i, t > i]).to(dtype)
    return (table.mT if turned else table).contiguous().to(device)


@triton.jit
def load_sums(table, number, C: tl.constexpr):
    """[C, C]: one of `sums`."""
    i, t = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return tl.load(table + number * (C * C) + i * C + t)


@triton.jit
def load_near(x, token, count, stride, head, first, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr):
    """[C / 16, 16, BD]: `load_tile` by blocks of rows."""
    b, r, d = tl.arange(0, C // NEAR), tl.arange(0, NEAR), first + tl.arange(0, BD)
    i = b[:, None, None] * NEAR + r[None, :, None]
    at = x + (token + i).to(tl.int64) * stride + head * D + d[None, None, :]
    return tl.load(at, mask=(i < count) & (d < D)[None, None, :], other=0.0)


@triton.jit
def load_near_decay(decay, token, count, stride, head, first, K: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr):
    """`load_decay` by blocks of rows."""
    return held(load_near(decay, token, count, stride, head, first, K, BD, C).to(tl.float32)).to(DOT)


@triton.jit
def each_block(x, C: tl.constexpr):
    """x [16, 16] for every block: [C / 16, 16, 16]."""
    return tl.broadcast_to(x[None, :, :], [C // NEAR, NEAR, NEAR])


@triton.jit
def near_decays(g, half, C: tl.constexpr, PRECISION: tl.constexpr):
    """F [C / 16, 16, BD] of a level inside the blocks."""
    return tl.exp2(tl.dot(each_block(tl.where(halves(half, NEAR), 1.0, 0.0).to(g.dtype), C), g, input_precision=PRECISION))


@triton.jit
def near_crossing(half):
    """[1, 16, 16], true at the pairs (i, j) of a level inside a block, i > j."""
    i, j = tl.arange(0, NEAR)[:, None], tl.arange(0, NEAR)[None, :]
    return ((((i ^ j) & -half) == half) & (i > j))[None, :, :]  # half is the highest bit in which they differ


@triton.jit
def near_exponents(g, C: tl.constexpr, PRECISION: tl.constexpr):
    """[C / 16, 16, BD] fp32, <= 0: log2 of the decay from the first row of its block to each row, (G_i - G_b) / ln 2."""
    i, t = tl.arange(0, NEAR)[:, None], tl.arange(0, NEAR)[None, :]
    return tl.dot(each_block(tl.where((t <= i) & (t > 0), 1.0, 0.0).to(g.dtype), C), g, input_precision=PRECISION)


@triton.jit
def mild(exponents, DTYPE: tl.constexpr):
    """Whether factors of these exponents keep inputs of DTYPE in its range."""
    reach: tl.constexpr = -4.0 if tl.float16 == DTYPE else -96.0
    return tl.min(exponents) >= reach


@triton.jit
def near_pairs():
    """[1, 16, 16], true at the pairs (i, j) of a block, i > j."""
    return (tl.arange(0, NEAR)[:, None] > tl.arange(0, NEAR)[None, :])[None, :, :]


@triton.jit
def far_decays(g, table, number, C: tl.constexpr, PRECISION: tl.constexpr):
    """exp of the sums [C, BD] that `number` names in `sums`, fp32: F of a level, or of the chunk from its start or to its end."""
    return tl.exp2(tl.dot(load_sums(table, number, C), g, input_precision=PRECISION))


@triton.jit
def far_pairs(number, C: tl.constexpr):
    """[C, C], true at the pairs (i, j) of a level of whole blocks, i > j."""
    block = tl.arange(0, C) // NEAR >> number - 4  # this way round the compiler sees that neighbours share a block, and loads 16 bytes
    i, j = block[:, None], block[None, :]
    return (i == j + 1) & ((i & 1) == 1)


@triton.jit
def load_level(e, token, count, H, head, number, C: tl.constexpr):
    """[C, C]: the pairs of a level of whole blocks in e [N, H, C], zero elsewhere."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return tl.load(e + (token + i).to(tl.int64) * (H * C) + head * C + j, mask=far_pairs(number, C) & (i < count), other=0.0)
