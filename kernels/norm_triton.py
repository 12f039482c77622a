"""RMSNorm in Triton: plain, with KDA's output gate, and with the residual stream's addition, one launch forward.

    r = 1 / sqrt(mean(x^2) + eps) ;  y = x r w [sigmoid(z)],  z = gate + bias                    with a residual: x = stream + x first
    u = dy w [sigmoid(z)] ;  dx = r u - x r^3 mean(u x) [+ dstream] ;  dw = sum dy x r [sigmoid(z)]
    dz = dy x r w sigmoid(z) (1 - sigmoid(z))

Rows [N, G, D]: a program has whole rows of one g, G = 1 but where a bias [G, D] is shared by the rows of each g (a head). Statistics are
computed again in the backward pass, whose programs walk over many rows and add up dw and dbias on the way (`kernels.sums`): of rows as
short as a head's in the same launch, of a stream's in one more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import aligned, cdiv, launch, power_of_2
from kernels.sums import Counters, Sum, add_rows, clear, column_sums, group_of, partial_sums, rows_at_once

FORWARD_TILE, BACKWARD_TILE = 4096, 4096  # elements of a forward pass and bytes of a backward pass at a time
PROGRAMS = 1056  # of a backward pass, about: 8 a multiprocessor; each has its own partial sums
SHORT = 256  # channels up to which a backward pass's own programs add up the partial sums, and a program its rows' parts at the end


@triton.jit
def _load(x, at, there):
    return tl.load(x + at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _scale(x, eps, D: tl.constexpr):
    """[BR, 1]: r"""
    return tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]


@triton.jit
def _gate(gate, bias, at, g, d, there, D: tl.constexpr, BIAS: tl.constexpr):
    z = _load(gate, at, there)
    if BIAS:
        z += _load(bias, g * D + d, d < D)[None, :]
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit(do_not_specialize=["count", "rows"])
def _norm(
    x, stream, gate, bias, weight, total, y, counters, count, rows, eps,
    G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """y, and with ADD total = stream + x, for BR rows of one g."""
    if counters is not None:
        clear(counters, count)
    g, d = tl.program_id(0) % G, tl.arange(0, BD)
    i = tl.program_id(0) // G * BR + tl.arange(0, BR)
    there = (i < rows)[:, None] & (d < D)[None, :]
    at = (i.to(tl.int64)[:, None] * G + g) * D + d[None, :]
    tile = _load(x, at, there)
    if ADD:
        tile = (tile + _load(stream, at, there)).to(total.dtype.element_ty)  # the norm is that of the rounded sum
        tl.store(total + at, tile, mask=there)
        tile = tile.to(tl.float32)
    out = tile * _scale(tile, eps, D) * _load(weight, d, d < D)[None, :]
    if GATE:
        out *= _gate(gate, bias, at, g, d, there, D, BIAS)
    tl.store(y + at, out.to(y.dtype.element_ty), mask=there)


@triton.jit
def _over_rows(x, LATER: tl.constexpr):
    return x if LATER else tl.sum(x, 0)[None, :]


@triton.jit(do_not_specialize=["group", "stride", "rows", "part"])
def _norm_backward(
    x, gate, bias, weight, dy, dstream, dx, dgate, weight_sums, bias_sums, dweight, dbias, counters, group, stride, rows, part, eps,
    G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    SHORT_ROWS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """dx and dgate for `part` rows of one g, and the sums over them: weight_sums [P, D], bias_sums [P, D]. With counters, SUM rows of these
    at a time, dweight and dbias too."""
    g, block, d = tl.program_id(0) % G, tl.program_id(0) // G, tl.arange(0, BD)
    w = _load(weight, d, d < D)[None, :]
    # Over rows of few channels, which many threads share, once at the end: it takes a barrier each time. Long rows would take registers
    KEPT: tl.constexpr = BR if SHORT_ROWS else 1
    dw, db = tl.zeros((KEPT, BD), tl.float32), tl.zeros((KEPT, BD), tl.float32)
    for first in range(block * part, tl.minimum(rows, (block + 1) * part), BR):
        i = first + tl.arange(0, BR)
        there = (i < rows)[:, None] & (d < D)[None, :]
        at = (i.to(tl.int64)[:, None] * G + g) * D + d[None, :]
        tile, grad = _load(x, at, there), _load(dy, at, there)
        r = _scale(tile, eps, D)
        normed = tile * r
        if GATE:
            s = _gate(gate, bias, at, g, d, there, D, BIAS)
            dz = grad * normed * w * s * (1.0 - s)
            tl.store(dgate + at, dz.to(dgate.dtype.element_ty), mask=there)
            grad *= s
            if BIAS:
                db += _over_rows(dz, SHORT_ROWS)
        dw += _over_rows(grad * normed, SHORT_ROWS)
        u = grad * w
        out = r * (u - normed * (tl.sum(u * normed, 1) / D)[:, None])
        if ADD:
            out += _load(dstream, at, there)
        tl.store(dx + at, out.to(dx.dtype.element_ty), mask=there)
    to = tl.program_id(0).to(tl.int64) * D + d
    tl.store(weight_sums + to, tl.sum(dw, 0), mask=d < D)
    if BIAS:
        tl.store(bias_sums + to, tl.sum(db, 0), mask=d < D)
    if counters is not None:
        programs = tl.num_programs(0)
        add_rows(weight_sums, dweight, counters, tl.program_id(0), programs, group, d, d < D, D, 1, SUM)
        if BIAS:
            add_rows(bias_sums, dbias, counters + (1 + g) * stride, block, programs // G, group, g * D + d, d < D, G * D, 1, SUM)


def _tile(D: int, elements: int) -> tuple[int, int, int]:
    """Channels and rows of a tile, and its warps."""
    size = power_of_2(D)
    return size, max(1, min(64, elements // size)), 4 if size <= FORWARD_TILE else 8


def _parts(x: Tensor) -> tuple[int, int]:
    """Rows of one g for each program of the backward pass, and into how many parts they divide."""
    N, G, D = x.shape
    _, BR, _ = _tile(D, BACKWARD_TILE // x.element_size())
    part = cdiv(N, max(1, PROGRAMS // G) * BR) * BR
    return part, cdiv(N, part)


def _counters(x: Tensor) -> Counters | None:
    """dweight's, then dbias's for each g; None where a launch adds up."""
    _, G, D = x.shape
    programs = G * _parts(x)[1]
    return Counters(programs, group_of(programs), 1 + G) if D <= SHORT else None


def _launch_forward(x, stream, gate, bias, weight, total, y, eps) -> Tensor | None:  # x [N, G, D], the others as in the kernel
    """The counters that the backward pass needs."""
    N, G, D = x.shape
    BD, BR, warps = _tile(D, FORWARD_TILE)
    counters = _counters(x)
    zeros, count = (None, 0) if counters is None else (counters.empty(x), counters.count)
    key = tuple(None if one is None else one.dtype for one in (x, stream, gate, bias, weight))
    launch(
        _norm, G * cdiv(N, BR), key, x, stream, gate, bias, weight, total, y, zeros, count, N, eps,
        G=G, D=D, BD=BD, BR=BR, ADD=stream is not None, GATE=gate is not None, BIAS=bias is not None, num_warps=warps,
    )  # fmt: skip
    return zeros


def _launch_backward(x, gate, bias, weight, zeros, dy, dstream, eps) -> tuple[Tensor | None, ...]:
    """dx, dgate, dbias, dweight."""
    N, G, D = x.shape
    BD, BR, warps = _tile(D, BACKWARD_TILE // x.element_size())
    (part, blocks), counters = _parts(x), _counters(x)
    group, stride = (None, 0) if counters is None else (counters.group, counters.stride)
    dx, dgate = torch.empty_like(x), None if gate is None else torch.empty_like(gate)
    dweight, dbias = torch.empty_like(weight), None if bias is None else torch.empty_like(bias)
    weight_sums = partial_sums(blocks * G, D, x, group)
    bias_sums = None if bias is None else partial_sums(blocks, G * D, x, group)
    key = tuple(None if one is None else one.dtype for one in (x, gate, bias, weight, dy, dstream))
    launch(
        _norm_backward, G * blocks, key,
        x, gate, bias, weight, dy, dstream, dx, dgate, weight_sums, bias_sums, dweight, dbias, zeros, group, stride, N, part, eps,
        G=G, D=D, BD=BD, BR=BR, ADD=dstream is not None, GATE=gate is not None, BIAS=bias is not None, SHORT_ROWS=D <= SHORT,
        SUM=rows_at_once(BD), num_warps=warps,
    )  # fmt: skip
    if counters is None:
        column_sums(Sum(weight_sums, dweight), None if bias is None else Sum(bias_sums, dbias))
    return dx, dgate, dbias, dweight


class _Norm(torch.autograd.Function):
    """x, gate [N, G, D], weight [D], bias [G, D] -> y."""

    @staticmethod
    def forward(ctx, x, gate, bias, weight, eps):
        y = torch.empty_like(x)
        zeros = _launch_forward(x, None, gate, bias, weight, None, y, eps)
        ctx.save_for_backward(x, gate, bias, weight, zeros)
        ctx.eps = eps
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        dx, dgate, dbias, dweight = _launch_backward(*ctx.saved_tensors, aligned(dy), None, ctx.eps)
        return dx, dgate, dbias, dweight, None


class _ResidualNorm(torch.autograd.Function):
    """stream, x [N, 1, D], weight [D] -> stream + x, its norm. Without x the stream itself, so that its gradient is added in the kernel."""

    @staticmethod
    def forward(ctx, stream, x, weight, eps):
        total, y = stream if x is None else torch.empty_like(stream), torch.empty_like(stream)
        if x is None:
            zeros = _launch_forward(stream, None, None, None, weight, None, y, eps)
        else:
            zeros = _launch_forward(x, stream, None, None, weight, total, y, eps)
        ctx.save_for_backward(total, weight, zeros)
        ctx.eps, ctx.added = eps, x is not None
        return total, y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dtotal, dy):
        total, weight, zeros = ctx.saved_tensors
        dx, _, _, dweight = _launch_backward(total, None, None, weight, zeros, aligned(dy), aligned(dtotal), ctx.eps)
        return dx, dx if ctx.added else None, dweight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Of a checked call (arguments as `kernels.norm.rms_norm`)."""
    return _Norm.apply(_rows(x), None, None, aligned(weight), eps).view(x.shape)


def gated_rms_norm(x: Tensor, gate: Tensor, bias: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Of a checked call (arguments as `kernels.norm.gated_rms_norm`)."""
    if bias is None:
        return _Norm.apply(_rows(x), _rows(gate), None, aligned(weight), eps).view(x.shape)
    shape = (-1, *bias.shape)
    return _Norm.apply(aligned(x).view(shape), aligned(gate).view(shape), aligned(bias), aligned(weight), eps).view(x.shape)


def residual_rms_norm(stream: Tensor, x: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Of a checked call (arguments as `kernels.norm.residual_rms_norm`)."""
    total, y = _ResidualNorm.apply(_rows(stream), None if x is None else _rows(x), aligned(weight), eps)
    return total.view(stream.shape), y.view(stream.shape)


def _rows(x: Tensor) -> Tensor:
    return aligned(x).view(-1, 1, x.shape[-1])
