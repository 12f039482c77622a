"""The short convolution in Triton: the parts of a launch that walk over rows, and the single step of decoding.

    z_t = sum_i w_i x_{t-i},  i = 0 .. 3 ;  y_t = z_t sigmoid(z_t)                       w_i = weight[:, 3 - i]: tap i looks i tokens back
    dz_t = dy_t sigmoid(z_t) (1 + z_t (1 - sigmoid(z_t))) ;  dx_s = sum_i w_i dz_{s+i} ;  dw_i = sum_t dz_t x_{t-i}

A program walks down up to `rows` tokens of one sequence in a block of channels. A row is read once: the three before it, and their dz, stay
in registers. Four rows are loaded before the first is used, 16 bytes a thread each. The history before a sequence is the rows -3 .. -1 of
it, so the gradient of the initial history is what the same sum gives for these rows. z is computed again in the backward pass.

Floor at 16 x 2,048 x 3,072 in bf16: 403 MB forward, 604 MB backward, 0.094 and 0.141 ms at 4.28 TB/s. The launches, which these parts share
with the gates: `kernels.mixer_inputs_triton`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gates_triton import sigmoid
from kernels.launch import aligned, cdiv, launch
from kernels.sums import add_rows
from kernels.tables import Tables

CHANNELS = 256  # a program's: one warp of 16 bytes a thread, in 16 bits
FORWARD_ROWS, BACKWARD_ROWS = 64, 128  # tokens a program walks over; backward, each has its own partial sum of dweight
STAGES = 3  # fours of rows on their way or in use: each warp keeps two on the way

_tables: Tables[Tensor] = Tables()


def row_blocks(batch: int, length: int, bounds: tuple[int, ...] | None, rows: int, device: torch.device) -> Tensor:
    """[P, 4] int32, a row a block of up to `rows` tokens: sequence, first token, and the sequence's first token and end.

    An empty sequence has a block too, which hands its history on. The tables depend on the lengths alone and are kept.
    """

    def make() -> Tensor:
        starts = bounds or tuple(range(0, batch * length + 1, length))
        sequences = enumerate(zip(starts, starts[1:], strict=False))
        blocks = [(n, token, start, stop) for n, (start, stop) in sequences for token in range(start, max(stop, start + 1), rows)]
        return torch.tensor(blocks, dtype=torch.int32).to(device, non_blocking=True)

    return _tables.get((batch, length, bounds, rows, device), device, make)


@triton.jit
def _place(blocks, pid, W: tl.constexpr, PARTS: tl.constexpr, BC: tl.constexpr):
    """Of a program: its row of `blocks`, its part of the channels, the block's first channel in that part."""
    inner: tl.constexpr = (W + BC - 1) // BC
    column = pid % (PARTS * inner)
    return pid // (PARTS * inner), column // inner, column % inner * BC


@triton.jit
def _row(x, row, rows, stride, inside):
    """[BC] fp32: a row of x; zero from `rows` on."""
    return tl.load(x + row * stride, mask=inside & (row < rows), other=0.0).to(tl.float32)


@triton.jit
def _before(x, initial, back, stride, D, at_start, inside, INITIAL: tl.constexpr):
    """[BC] fp32: the row `back` tokens before the block; at the sequence's start one of its history [3, D], or zero."""
    value = tl.load(x - back * stride, mask=inside & (at_start == 0), other=0.0).to(tl.float32)
    if INITIAL:
        value += tl.load(initial + (3 - back) * D, mask=inside & (at_start != 0), other=0.0).to(tl.float32)
    return value


@triton.jit
def _silu_row(y, row, rows, W, inside, w0, w1, w2, w3, x0, x1, x2, x3):
    z = w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
    tl.store(y + row * W, (z * sigmoid(z)).to(y.dtype.element_ty), mask=inside & (row < rows))


@triton.jit
def _of(part, q, k, v, PARTS: tl.constexpr):
    """The tensor of a part of the channels."""
    y = q
    if PARTS > 1:
        if part == 1:
            y = k
        if part == 2:
            y = v
    return y


@triton.jit
def _taps(weight, d, inside):
    w0, w1 = tl.load(weight + 4 * d + 3, mask=inside, other=0.0), tl.load(weight + 4 * d + 2, mask=inside, other=0.0)
    w2, w3 = tl.load(weight + 4 * d + 1, mask=inside, other=0.0), tl.load(weight + 4 * d, mask=inside, other=0.0)
    return w0.to(tl.float32), w1.to(tl.float32), w2.to(tl.float32), w3.to(tl.float32)


@triton.jit
def conv_rows(
    x, weight, initial, blocks, q, k, v, final, pid, stride,
    W: tl.constexpr, PARTS: tl.constexpr, BC: tl.constexpr, ROWS: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program's rows of y, whose parts are q, k and v [N, W], and of the final history [S, 3, PARTS * W]."""
    at, part, first = _place(blocks, pid, W, PARTS, BC)
    D: tl.constexpr = PARTS * W
    n, token = tl.load(blocks + 4 * at).to(tl.int64), tl.load(blocks + 4 * at + 1)
    at_start, left = token == tl.load(blocks + 4 * at + 2), tl.load(blocks + 4 * at + 3) - token
    rows = tl.minimum(left, ROWS)
    e = first + tl.arange(0, BC)
    inside, d = e < W, part * W + e
    x += token.to(tl.int64) * stride + d
    y = _of(part, q, k, v, PARTS) + token.to(tl.int64) * W + e
    if INITIAL:
        initial += n * 3 * D + d
    w0, w1, w2, w3 = _taps(weight, d, inside)
    x1 = _before(x, initial, 1, stride, D, at_start, inside, INITIAL)
    x2 = _before(x, initial, 2, stride, D, at_start, inside, INITIAL)
    x3 = _before(x, initial, 3, stride, D, at_start, inside, INITIAL)
    for r in tl.range(0, rows, 4, num_stages=STAGES):
        y0, y1 = _row(x, r, rows, stride, inside), _row(x, r + 1, rows, stride, inside)
        y2, y3 = _row(x, r + 2, rows, stride, inside), _row(x, r + 3, rows, stride, inside)
        _silu_row(y, r, rows, W, inside, w0, w1, w2, w3, y0, x1, x2, x3)
        _silu_row(y, r + 1, rows, W, inside, w0, w1, w2, w3, y1, y0, x1, x2)
        _silu_row(y, r + 2, rows, W, inside, w0, w1, w2, w3, y2, y1, y0, x1)
        _silu_row(y, r + 3, rows, W, inside, w0, w1, w2, w3, y3, y2, y1, y0)
        x1, x2, x3 = y3, y2, y1
    if FINAL:
        final += n * 3 * D + d
        if rows == left:
            for j in tl.static_range(3):
                r = rows - 3 + j  # where it lies before the block, it is an earlier row of the sequence or of its history
                own = (r >= 0) | (not at_start)
                value = tl.load(x + r * stride, mask=inside & own, other=0.0)
                if INITIAL:
                    past = tl.load(initial + (r + 3) * D, mask=inside & (not own), other=0.0)
                    value = tl.where(own, value, past.to(value.dtype))
                tl.store(final + j * D, value, mask=inside)


@triton.jit
def _slope(dy, row, left, W, inside, w0, w1, w2, w3, x0, x1, x2, x3):
    """[BC] dz of a row; zero from the sequence's end on."""
    z = w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
    s = sigmoid(z)
    return _row(dy, row, left, W, inside) * s * (1.0 + z * (1.0 - s))


@triton.jit
def _store_row(dx, dinitial, dfinal, value, row, rows, left, stride, D, at_start, inside, INITIAL: tl.constexpr, FINAL: tl.constexpr):
    """value [BC], dx of a row; of the rows -3 .. -1 at the sequence's start, dinitial. Adds the gradient of the final history."""
    own, past = (row >= 0) & (row < rows), (row < 0) & at_start
    if FINAL:
        j = row + 3 - left  # of the final history, where that reaches this row
        value += tl.load(dfinal + j * D, mask=inside & (own | past) & (j >= 0) & (j < 3), other=0.0).to(tl.float32)
    tl.store(dx + row * stride, value.to(dx.dtype.element_ty), mask=inside & own)
    if INITIAL:
        tl.store(dinitial + (row + 3) * D, value.to(dinitial.dtype.element_ty), mask=inside & past)


@triton.jit
def conv_rows_backward(
    x, weight, initial, blocks, dq, dk, dv, dfinal, dx, sums, dweight, dinitial, counters, group, counter_stride,
    pid, programs, stride, dx_stride,
    W: tl.constexpr, PARTS: tl.constexpr, BC: tl.constexpr, ROWS: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr,
    STAGES: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """One program's rows of dx [N, PARTS * W] and of dinitial [S, 3, PARTS * W], and its row of sums [P, 4, PARTS * W] fp32, SUM of which
    the last one adds at a time to dweight [PARTS * W, 4]. counters: of each block of channels.

    It walks three rows on, into the next block, for the dz that its last rows need.
    """
    at, part, first = _place(blocks, pid, W, PARTS, BC)
    D: tl.constexpr = PARTS * W
    n, token = tl.load(blocks + 4 * at).to(tl.int64), tl.load(blocks + 4 * at + 1)
    at_start, left = token == tl.load(blocks + 4 * at + 2), tl.load(blocks + 4 * at + 3) - token
    rows = tl.minimum(left, ROWS)
    e = first + tl.arange(0, BC)
    inside, d = e < W, part * W + e
    x += token.to(tl.int64) * stride + d
    dx += token.to(tl.int64) * dx_stride + d
    dy = _of(part, dq, dk, dv, PARTS) + token.to(tl.int64) * W + e
    if INITIAL:
        initial += n * 3 * D + d
        dinitial += n * 3 * D + d
    if FINAL:
        dfinal += n * 3 * D + d
    w0, w1, w2, w3 = _taps(weight, d, inside)
    x1 = _before(x, initial, 1, stride, D, at_start, inside, INITIAL)
    x2 = _before(x, initial, 2, stride, D, at_start, inside, INITIAL)
    x3 = _before(x, initial, 3, stride, D, at_start, inside, INITIAL)
    zero = tl.zeros((BC,), tl.float32)
    z1, z2, z3, dw0, dw1, dw2, dw3 = zero, zero, zero, zero, zero, zero, zero
    for r in tl.range(0, rows + 3, 4, num_stages=STAGES):
        y0, y1 = _row(x, r, left, stride, inside), _row(x, r + 1, left, stride, inside)
        y2, y3 = _row(x, r + 2, left, stride, inside), _row(x, r + 3, left, stride, inside)
        s0 = _slope(dy, r, left, W, inside, w0, w1, w2, w3, y0, x1, x2, x3)
        s1 = _slope(dy, r + 1, left, W, inside, w0, w1, w2, w3, y1, y0, x1, x2)
        s2 = _slope(dy, r + 2, left, W, inside, w0, w1, w2, w3, y2, y1, y0, x1)
        s3 = _slope(dy, r + 3, left, W, inside, w0, w1, w2, w3, y3, y2, y1, y0)
        g0 = w0 * z3 + w1 * z2 + w2 * z1 + w3 * s0
        g1 = w0 * z2 + w1 * z1 + w2 * s0 + w3 * s1
        g2 = w0 * z1 + w1 * s0 + w2 * s1 + w3 * s2
        g3 = w0 * s0 + w1 * s1 + w2 * s2 + w3 * s3
        _store_row(dx, dinitial, dfinal, g0, r - 3, rows, left, dx_stride, D, at_start, inside, INITIAL, FINAL)
        _store_row(dx, dinitial, dfinal, g1, r - 2, rows, left, dx_stride, D, at_start, inside, INITIAL, FINAL)
        _store_row(dx, dinitial, dfinal, g2, r - 1, rows, left, dx_stride, D, at_start, inside, INITIAL, FINAL)
        _store_row(dx, dinitial, dfinal, g3, r, rows, left, dx_stride, D, at_start, inside, INITIAL, FINAL)
        o0, o1 = tl.where(r < rows, s0, 0.0), tl.where(r + 1 < rows, s1, 0.0)
        o2, o3 = tl.where(r + 2 < rows, s2, 0.0), tl.where(r + 3 < rows, s3, 0.0)
        dw0 += o0 * y0 + o1 * y1 + o2 * y2 + o3 * y3
        dw1 += o0 * x1 + o1 * y0 + o2 * y1 + o3 * y2
        dw2 += o0 * x2 + o1 * x1 + o2 * y0 + o3 * y1
        dw3 += o0 * x3 + o1 * x2 + o2 * x1 + o3 * y0
        x1, x2, x3 = y3, y2, y1
        z1, z2, z3 = s3, s2, s1
    to = sums + at.to(tl.int64) * (4 * D) + d
    tl.store(to, dw3, mask=inside)
    tl.store(to + D, dw2, mask=inside)
    tl.store(to + 2 * D, dw1, mask=inside)
    tl.store(to + 3 * D, dw0, mask=inside)
    columns: tl.constexpr = PARTS * ((W + BC - 1) // BC)
    add_rows(sums, dweight, counters + pid % columns * counter_stride, at, programs // columns, group, d, inside, D, 4, SUM)


@triton.jit
def _conv_step(x, state, weight, y, D, units, UNIT: tl.constexpr, BC: tl.constexpr):
    """y [B, D] of one more token x [B, D], and state [B, 3, D], oldest first, one token on."""
    blocks = tl.cdiv(D, BC)
    n, d = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    inside = d < D
    w0, w1, w2, w3 = _taps(weight, d, inside)
    state += n * 3 * D + d
    x0 = tl.load(x + n * (units * UNIT) + d, mask=inside, other=0.0)
    x3, x2 = tl.load(state, mask=inside, other=0.0).to(x0.dtype), tl.load(state + D, mask=inside, other=0.0).to(x0.dtype)
    x1 = tl.load(state + 2 * D, mask=inside, other=0.0).to(x0.dtype)
    z = w0 * x0.to(tl.float32) + w1 * x1.to(tl.float32) + w2 * x2.to(tl.float32) + w3 * x3.to(tl.float32)
    tl.store(y + n * D + d, (z * sigmoid(z)).to(y.dtype.element_ty), mask=inside)
    tl.store(state, x2.to(state.dtype.element_ty), mask=inside)
    tl.store(state + D, x1.to(state.dtype.element_ty), mask=inside)
    tl.store(state + 2 * D, x0.to(state.dtype.element_ty), mask=inside)


def step(state: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """y [B, D] of a checked call (arguments as `kernels.conv.short_conv_step`)."""
    held, x, weight = aligned(state), rows_of(x), aligned(weight)
    (B, D), y = x.shape, torch.empty(x.shape, dtype=x.dtype, device=x.device)
    key, unit = (x.dtype, weight.dtype, held.dtype, D, x.stride(0)), row_unit(x)
    launch(_conv_step, B * cdiv(D, CHANNELS), key, x, held, weight, y, D, x.stride(0) // unit, UNIT=unit, BC=CHANNELS, num_warps=1)
    if held is not state:
        state.copy_(held)
    return y


def rows_of(x: Tensor) -> Tensor:
    """x [N, D] itself where each row is contiguous and the first starts at a multiple of 16 bytes, or a copy."""
    if x.stride(-1) == 1 and x.stride(0) >= x.shape[1] and x.data_ptr() % 16 == 0:
        return x
    return aligned(x)


def row_unit(*tensors: Tensor) -> int:
    """What the row strides of some [N, D] are multiples of, up to 16 bytes: kernels are told it, and load as much at once."""
    return math.gcd(16 // tensors[0].element_size(), *(x.stride(0) for x in tensors))
