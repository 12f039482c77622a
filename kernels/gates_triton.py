"""The gates in Triton: those of the heads, a part of a launch (`kernels.mixer_inputs_triton`), and the channel decay, launches of its own.

    beta, c = sigmoid(x) ;  g, p = -exp(A_log) softplus(x + dt_bias)            x: a gate's raw columns, one a head, or one a channel

    dx = dbeta beta (1 - beta) ;  dx = ddt_bias_t = -dg exp(A_log) sigmoid(x + dt_bias) ;  dA_log_t = dg g        summed in `kernels.sums`

All in fp32. softplus is max(x, 0) + log(1 + exp(-|x|)), the logarithm as a series of its own: a rate of 0.001 keeps its digits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gates import GateColumns, GateParameters, HeadGates
from kernels.launch import aligned, cdiv, launch, power_of_2
from kernels.sums import Sum, column_sums, partial_sums

TOKENS, TOKENS_BACK = 32, 8  # of a program, at a time; of a backward pass that adds up over them
# Read a few elements at a time. Where they lie in an optimizer's flat buffer, only H = 8, 16 .. would keep them at multiples of 16 bytes
PARAMETERS = ["weight", "A_log", "dt_bias", "forget_A_log", "forget_dt_bias", "center"]
DECAY_PROGRAMS = 1056  # of the channel decay's backward pass, about: 8 a multiprocessor; each has its own partial sums


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + exp(x)) to 1e-7 of itself: with u = exp(-|x|), log(1 + u) = 2 artanh(u / (2 + u)), and u / (2 + u) <= 1/3."""
    u = tl.exp(-tl.abs(x))
    s = u / (2.0 + u)
    t = s * s
    series = 1.0 / 9 + t * (1.0 / 11 + t * (1.0 / 13 + t * (1.0 / 15)))
    series = 1.0 + t * (1.0 / 3 + t * (1.0 / 5 + t * (1.0 / 7 + t * series)))
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def _raw(columns, at, COLUMN: tl.constexpr, there):
    return tl.load(columns + at + COLUMN, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _decay(columns, at, COLUMN: tl.constexpr, A_log, dt_bias, out, to, h, H, there):
    x = _raw(columns, at, COLUMN, there) + tl.load(dt_bias + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
    rate = tl.exp(tl.load(A_log + h, mask=h < H, other=0.0).to(tl.float32))[None, :]
    tl.store(out + to, -rate * softplus(x), mask=there)


@triton.jit
def gate_rows(
    columns, A_log, dt_bias, forget_A_log, forget_dt_bias, center, beta, decay, forget, gain, wide_center, pid, tokens, stride,
    H: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr, FORGET: tl.constexpr, GAIN: tl.constexpr, FACTOR: tl.constexpr,
    BH: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One program's tokens of the gates [N, H] fp32, from columns [N, ..]; BETA, DECAY and so on: each gate's first column, or None.

    The first program writes the centre [H] in fp32, too.
    """
    t, h = pid * BT + tl.arange(0, BT), tl.arange(0, BH)
    there = (t < tokens)[:, None] & (h < H)[None, :]
    at, to = t.to(tl.int64)[:, None] * stride + h[None, :], t.to(tl.int64)[:, None] * H + h[None, :]
    tl.store(beta + to, FACTOR * sigmoid(_raw(columns, at, BETA, there)), mask=there)
    if DECAY is not None:
        _decay(columns, at, DECAY, A_log, dt_bias, decay, to, h, H, there)
    if FORGET is not None:
        if FORGET == DECAY:
            _decay(columns, at, FORGET, A_log, dt_bias, forget, to, h, H, there)
        else:
            _decay(columns, at, FORGET, forget_A_log, forget_dt_bias, forget, to, h, H, there)
    if GAIN is not None:
        tl.store(gain + to, sigmoid(_raw(columns, at, GAIN, there)), mask=there)
        if pid == 0:
            tl.store(wide_center + h, tl.load(center + h, mask=h < H, other=0.0).to(tl.float32), mask=h < H)


@triton.jit
def _decay_backward(columns, at, COLUMN: tl.constexpr, A_log, dt_bias, grad, dcolumns, dat, sums, h, H, there):
    """grad [BT, BH]: the gate's. Writes the columns' and this program's sums of dA_log and ddt_bias, at sums and sums + H."""
    x = _raw(columns, at, COLUMN, there) + tl.load(dt_bias + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
    rate = tl.exp(tl.load(A_log + h, mask=h < H, other=0.0).to(tl.float32))[None, :]
    dx = -grad * rate * sigmoid(x)
    tl.store(dcolumns + dat + COLUMN, dx.to(dcolumns.dtype.element_ty), mask=there)
    tl.store(sums + h, tl.sum(-grad * rate * softplus(x), 0), mask=h < H)
    tl.store(sums + H + h, tl.sum(dx, 0), mask=h < H)


@triton.jit
def _gradient(grad, to, there):
    return tl.load(grad + to, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _handed_on(dpassed, dcolumns, t, tokens, dstride, COLUMN: tl.constexpr, R: tl.constexpr, BR: tl.constexpr):
    """Copies the gradient [N, R] of columns that another product reads to their place."""
    j = tl.arange(0, BR)
    there = (t < tokens)[:, None] & (j < R)[None, :]
    value = tl.load(dpassed + t.to(tl.int64)[:, None] * R + j[None, :], mask=there, other=0.0)
    tl.store(dcolumns + t.to(tl.int64)[:, None] * dstride + COLUMN + j[None, :], value.to(dcolumns.dtype.element_ty), mask=there)


@triton.jit
def gate_rows_backward(
    columns, A_log, dt_bias, forget_A_log, forget_dt_bias, dbeta, ddecay, dforget, dgain, dcenter, dlow, doutput, dcolumns, sums,
    pid, tokens, stride, dstride,
    H: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr, FORGET: tl.constexpr, GAIN: tl.constexpr, FACTOR: tl.constexpr,
    BH: tl.constexpr, LOW: tl.constexpr, OUTPUT: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """The gradient of one program's rows of all columns, and its row of sums [P, 5, H]: A_log, dt_bias, the statistic's, center."""
    t, h = pid * BT + tl.arange(0, BT), tl.arange(0, BH)
    there = (t < tokens)[:, None] & (h < H)[None, :]
    at, to = t.to(tl.int64)[:, None] * stride + h[None, :], t.to(tl.int64)[:, None] * H + h[None, :]
    dat = t.to(tl.int64)[:, None] * dstride + h[None, :]
    sums += pid.to(tl.int64) * (5 * H)
    s = sigmoid(_raw(columns, at, BETA, there))
    grad = FACTOR * _gradient(dbeta, to, there)
    if GAIN is not None:
        if GAIN == BETA:
            grad += _gradient(dgain, to, there)
        else:
            c = sigmoid(_raw(columns, at, GAIN, there))
            dgain_raw = _gradient(dgain, to, there) * c * (1.0 - c)
            tl.store(dcolumns + dat + GAIN, dgain_raw.to(dcolumns.dtype.element_ty), mask=there)
        first = tl.load(dcenter + h, mask=(h < H) & (pid == 0), other=0.0)
        tl.store(sums + 4 * H + h, first, mask=h < H)
    tl.store(dcolumns + dat + BETA, (grad * s * (1.0 - s)).to(dcolumns.dtype.element_ty), mask=there)
    if DECAY is not None:
        grad = _gradient(ddecay, to, there)
        if FORGET == DECAY:
            grad += _gradient(dforget, to, there)
        _decay_backward(columns, at, DECAY, A_log, dt_bias, grad, dcolumns, dat, sums, h, H, there)
    if FORGET is not None and FORGET != DECAY:
        grad = _gradient(dforget, to, there)
        _decay_backward(columns, at, FORGET, forget_A_log, forget_dt_bias, grad, dcolumns, dat, sums + 2 * H, h, H, there)
    if LOW is not None:
        _handed_on(dlow, dcolumns, t, tokens, dstride, LOW, R, BR)
        _handed_on(doutput, dcolumns, t, tokens, dstride, OUTPUT, R, BR)


def constants(columns: GateColumns | None) -> dict:
    """What `gate_rows` is compiled for; H = 0 without gates."""
    c = columns or GateColumns(0, 0)
    return dict(H=c.heads, BETA=c.beta, DECAY=c.decay, FORGET=c.forget, GAIN=c.gain, FACTOR=c.factor, BH=power_of_2(max(1, c.heads)))


def handed_on_constants(columns: GateColumns | None) -> dict:
    c = columns or GateColumns(0, 0)
    return dict(LOW=c.low, OUTPUT=c.output, R=c.rank, BR=power_of_2(max(1, c.rank)))


def empty_gates(x: Tensor, columns: GateColumns) -> tuple[Tensor | None, ...]:
    """beta, decay, forget, gain [N, H] and center [H], fp32, unwritten; None where there is no such gate."""
    there = (True, columns.decay is not None, columns.forget is not None, columns.gain is not None, columns.gain is not None)
    shapes = ((len(x), columns.heads),) * 4 + ((columns.heads,),)
    made = (torch.empty(shape, dtype=torch.float32, device=x.device) if one else None for one, shape in zip(there, shapes, strict=True))
    return tuple(made)


def handed_on(x: Tensor, columns: GateColumns) -> tuple[Tensor | None, Tensor | None]:
    """The columns [N, rank] that other products read: views of x."""
    low, output = (None if first is None else x[:, first : first + columns.rank] for first in (columns.low, columns.output))
    return low, output


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=PARAMETERS[1:])
def _gates(
    columns, A_log, dt_bias, forget_A_log, forget_dt_bias, center, beta, decay, forget, gain, wide_center, tokens, stride,
    H: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr, FORGET: tl.constexpr, GAIN: tl.constexpr, FACTOR: tl.constexpr,
    BH: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """`gate_rows` alone."""
    gate_rows(
        columns, A_log, dt_bias, forget_A_log, forget_dt_bias, center, beta, decay, forget, gain, wide_center,
        tl.program_id(0), tokens, stride, H, BETA, DECAY, FORGET, GAIN, FACTOR, BH, BT,
    )  # fmt: skip


def head_gates(x: Tensor, columns: GateColumns, parameters: GateParameters) -> HeadGates:
    """The gates from x [N, D] of a checked call, without gradients: one token of each sequence in decoding."""
    x, parameters = aligned(x), tuple(None if one is None else one.contiguous() for one in parameters)
    made = empty_gates(x, columns)
    key = (x.dtype, x.stride(0), *(None if one is None else one.dtype for one in parameters))
    launch(_gates, cdiv(len(x), TOKENS), key, x, *parameters, *made, len(x), x.stride(0), **constants(columns), BT=TOKENS, num_warps=1)
    return HeadGates(*made, *handed_on(x, columns))


@triton.jit(do_not_specialize=["tokens"])
def _channel_decay(x, A_log, dt_bias, decay, tokens, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr):
    """decay [N, H, K] of one head and BT tokens."""
    head = tl.program_id(0) % H
    t, j = tl.program_id(0) // H * BT + tl.arange(0, BT), tl.arange(0, BK)
    there = (t < tokens)[:, None] & (j < K)[None, :]
    at = t.to(tl.int64)[:, None] * (H * K) + head * K + j[None, :]
    bias = tl.load(dt_bias + head * K + j, mask=j < K, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    raw = tl.load(x + at, mask=there, other=0.0).to(tl.float32) + bias[None, :]
    tl.store(decay + at, (-rate * softplus(raw)).to(decay.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["tokens", "rows"])
def _channel_decay_backward(
    x, A_log, dt_bias, grad, dx, rate_sums, bias_sums, tokens, rows,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """dx [N, H, K] of one head and `rows` tokens, and their sums: rate_sums [P, H] of dA_log, bias_sums [P, H, K] of ddt_bias."""
    head, block = tl.program_id(0) % H, tl.program_id(0) // H
    j = tl.arange(0, BK)
    bias = tl.load(dt_bias + head * K + j, mask=j < K, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    rates, biases = tl.zeros((BT, BK), tl.float32), tl.zeros((BT, BK), tl.float32)  # added over rows once, as in `norm_triton`
    for first in range(block * rows, tl.minimum(tokens, (block + 1) * rows), BT):
        t = first + tl.arange(0, BT)
        there = (t < tokens)[:, None] & (j < K)[None, :]
        at = t.to(tl.int64)[:, None] * (H * K) + head * K + j[None, :]
        raw = tl.load(x + at, mask=there, other=0.0).to(tl.float32) + bias[None, :]
        slope = -rate * tl.load(grad + at, mask=there, other=0.0).to(tl.float32)
        rates += slope * softplus(raw)
        slope *= sigmoid(raw)
        biases += slope
        tl.store(dx + at, slope.to(dx.dtype.element_ty), mask=there)
    tl.store(rate_sums + tl.program_id(0), tl.sum(rates))
    tl.store(bias_sums + tl.program_id(0).to(tl.int64) * K + j, tl.sum(biases, 0), mask=j < K)


class _ChannelDecay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, A_log, dt_bias):  # [N, H, K] contiguous, [H], [H, K]
        N, H, K = x.shape
        decay = torch.empty_like(x)
        BK = power_of_2(K)
        key = (x.dtype, A_log.dtype, dt_bias.dtype)
        launch(_channel_decay, H * cdiv(N, TOKENS), key, x, A_log, dt_bias, decay, N, H=H, K=K, BK=BK, BT=TOKENS, num_warps=4)
        ctx.save_for_backward(x, A_log, dt_bias)
        return decay

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, A_log, dt_bias = ctx.saved_tensors
        N, H, K = x.shape
        grad, dx = aligned(grad), torch.empty_like(x)
        rows = cdiv(N, max(1, DECAY_PROGRAMS // H) * TOKENS_BACK) * TOKENS_BACK
        blocks = cdiv(N, rows)
        rate_sums, bias_sums = partial_sums(blocks, H, x), partial_sums(blocks, H * K, x)
        key = (x.dtype, A_log.dtype, dt_bias.dtype, grad.dtype)
        launch(
            _channel_decay_backward, H * blocks, key, x, A_log, dt_bias, grad, dx, rate_sums, bias_sums, N, rows,
            H=H, K=K, BK=power_of_2(K), BT=TOKENS_BACK, num_warps=4,
        )  # fmt: skip
        dA_log, ddt_bias = torch.empty_like(A_log), torch.empty_like(dt_bias)
        column_sums(Sum(rate_sums, dA_log), Sum(bias_sums, ddt_bias))
        return dx, dA_log, ddt_bias


def channel_decay(x: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Of a checked call (arguments as `kernels.gates.channel_decay`)."""
    decay = _ChannelDecay.apply(aligned(x.flatten(0, -3)), aligned(A_log), aligned(dt_bias))
    return decay.view(x.shape)
