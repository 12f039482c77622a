"""What the Triton kernels share: loading tiles of a chunk, and the decay between its rows.

`rows` [M, H, 8, C] fp32 holds the numbers of a chunk's tokens, by kind; zero past the chunk's rows:

    BETA                   beta
    KEY_NORM, QUERY_NORM   rk, rq = 1 / sqrt(sum x^2 + NORM_EPS), or 1 where q and k are not normalised
    KEY_READ, QUERY_READ   rk exp(G), scale rq exp(G): what k and q lack when they read the state that the chunk meets
    WRITE                  exp(G_C - G), times rk where the write key is k itself: what it lacks when it writes the state handed on
    HIGH, LOW              G / ln 2, the inclusive cumulative log decay of the chunk, as the unevaluated sum of two floats: a difference
                           G_i - G_j keeps the digits of weak gates that follow strong ones. Not written without a decay.

With a decay a channel only the first two lines are written: there G is no number of a row (`kernels.levels`).
exp(G_i - G_j) is exp2 of the difference; rows past the chunk's end read as zero everywhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import operands

KEY_NORM = tl.constexpr(0)
QUERY_NORM = tl.constexpr(1)
HIGH = tl.constexpr(2)
LOW = tl.constexpr(3)
BETA = tl.constexpr(4)
KEY_READ = tl.constexpr(5)
QUERY_READ = tl.constexpr(6)
WRITE = tl.constexpr(7)
KINDS = tl.constexpr(8)
LOG2E = tl.constexpr(1.4426950408889634)
NORM_EPS = tl.constexpr(operands.NORM_EPS)


def dot_precision(x: Tensor) -> str:
    """How fp32 operands are multiplied: three TF32 products where the inputs are fp32, one where they are 16 bits wide."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


@triton.jit
def load_tile(x, token, count, stride, head, first, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr):
    """[C, BD]: rows token .. token + count of x [N, H, D] for one head, columns first .. first + BD; zero outside."""
    i, d = tl.arange(0, C), first + tl.arange(0, BD)
    at = x + (token + i).to(tl.int64)[:, None] * stride + head * D + d[None, :]
    if D % BD == 0:
        return tl.load(at, mask=(i < count)[:, None], other=0.0)
    return tl.load(at, mask=(i < count)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def store_tile(x, tile, token, count, stride, head, first, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr):
    """The counterpart of `load_tile`, cast to x's dtype."""
    i, d = tl.arange(0, C), first + tl.arange(0, BD)
    at = x + (token + i).to(tl.int64)[:, None] * stride + head * D + d[None, :]
    if D % BD == 0:
        tl.store(at, tile.to(x.dtype.element_ty), mask=(i < count)[:, None])
    else:
        tl.store(at, tile.to(x.dtype.element_ty), mask=(i < count)[:, None] & (d < D)[None, :])


@triton.jit
def through_memory(scratch, tile, token, count, H, head, C: tl.constexpr):
    """tile [C, C] of a chunk and head, zero past its rows, stored to scratch [N, H, C] in its dtype and loaded again. On Hopper a left
    operand that no product made must come from a load where threads have just written the right one (`kernels.levels.sums` says why)."""
    tl.debug_barrier()  # scratch may still be read
    store_tile(scratch, tile, token, count, H * C, head, 0, C, C, C)
    tl.debug_barrier()  # the threads read each other's stores
    return load_tile(scratch, token, count, H * C, head, 0, C, C, C)


def allow_descriptors() -> None:
    """Gives Triton the memory in which a kernel that uses tensor descriptors keeps them. To be called before each such launch: the
    setting is a context variable, and autograd runs backward passes in threads of its own."""
    triton.set_allocator(_allocate)


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


@triton.jit
def head_tiles(x, token, tokens, stride, head, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr):
    """A descriptor of [C, BD] tiles of one sequence and head of x [N, H, D]: the copy engine fills with zeros, and leaves unwritten, what
    lies past the sequence's tokens and past D. It takes no registers for addresses. Rows and D must be multiples of 16 bytes."""
    base = x + (token.to(tl.int64) * stride + head * D)
    return tl.make_tensor_descriptor(base, shape=[tokens, D], strides=[stride, 1], block_shape=[C, BD])


@triton.jit
def state_tiles(h, first, chunks, H, head, R: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """A descriptor of [1, BR, BD] tiles of one sequence and head of states h [M, H, R, D]; chunk c of the sequence is at row c * H."""
    base = h + (first.to(tl.int64) * H + head) * (R * D)
    return tl.make_tensor_descriptor(base, shape=[(chunks - 1) * H + 1, R, D], strides=[R * D, D, 1], block_shape=[1, BR, BD])


@triton.jit
def row_tiles(rows, first, chunks, H, head, C: tl.constexpr):
    """A descriptor of [1, C] tiles of one sequence and head of `rows`: a kind of chunk c of the sequence is at (c, kind * C)."""
    base = rows + (first.to(tl.int64) * H + head) * (KINDS * C)
    return tl.make_tensor_descriptor(base, shape=[chunks, KINDS * C], strides=[H * KINDS * C, 1], block_shape=[1, C])


@triton.jit
def load_gate(x, token, count, H, head, C: tl.constexpr):
    """[C] fp32: a gate x [N, H] of one head; zero past the chunk's rows."""
    i = tl.arange(0, C)
    return tl.load(x + (token.to(tl.int64) * H + head) + i * H, mask=i < count, other=0.0).to(tl.float32)


@triton.jit
def load_row(rows, kind, at, C: tl.constexpr):
    """[C] fp32: one kind of `rows` [M, H, 8, C]; at: chunk * H + head, 64 bits."""
    return tl.load(rows + (at * KINDS + kind) * C + tl.arange(0, C))


@triton.jit
def store_row(rows, values, kind, at, count, C: tl.constexpr):
    i = tl.arange(0, C)
    tl.store(rows + (at * KINDS + kind) * C + i, tl.where(i < count, values, 0.0))


@triton.jit
def _add_two(a_high, a_low, b_high, b_low):
    """(a + b) as high + low; high is the rounded sum and low what it lost."""
    high = a_high + b_high
    part = high - a_high
    lost = (a_high - (high - part)) + (b_high - part)
    return high, a_low + b_low + lost


@triton.jit
def cumulate(g):
    """The inclusive sums of a log decay g [C] over rows / ln 2, as high + low. Below -200 a gate is 0 in fp32: it is held there."""
    g = tl.where(g < -200.0, -200.0, g) * LOG2E  # a comparison with NaN is false: NaN stays
    return tl.associative_scan((g, g * 0.0), 0, _add_two)


@triton.jit
def spans(high, low, count, C: tl.constexpr):
    """[C, C]: exp(G_i - G_j) for i >= j, else 0; 0 past the chunk's rows, where G reads as zero and the difference may be positive."""
    i = tl.arange(0, C)
    exponent = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return tl.exp2(tl.where((i[:, None] >= i[None, :]) & (i < count)[:, None], exponent, -float("inf")))


@triton.jit
def last(x, count, C: tl.constexpr):
    """x[count - 1] of x [C]: a scalar."""
    return tl.sum(tl.where(tl.arange(0, C) == count - 1, x, 0.0), 0)
