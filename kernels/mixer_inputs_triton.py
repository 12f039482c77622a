"""What the recurrence is told, from one product's columns, in one launch: the convolution's q, k, v, and the gates.

The two have nothing to do with each other but the tensor they read and its gradient, which they write together. So the programs of one
launch are dealt out: the first ones, short, make the gates (`gates_triton`), the others walk over the convolution (`conv_triton`). Backward
the same, and the last programs make the sums of both (`sums`). The convolution alone is the same launch without the first ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.conv_triton import BACKWARD_ROWS, CHANNELS, FORWARD_ROWS, STAGES, conv_rows, conv_rows_backward, row_blocks, row_unit, rows_of
from kernels.gates import GateColumns, GateParameters, HeadGates
from kernels.gates_triton import PARAMETERS, TOKENS, constants, empty_gates, gate_rows, gate_rows_backward, handed_on, handed_on_constants
from kernels.launch import aligned, cdiv, launch
from kernels.sums import Counters, add_rows, clear, group_of, partial_sums, rows_at_once


@triton.jit(do_not_specialize=["count", "gate_programs", "tokens"], do_not_specialize_on_alignment=PARAMETERS)
def _inputs(
    x, weight, initial, blocks, q, k, v, final,
    A_log, dt_bias, forget_A_log, forget_dt_bias, center, beta, decay, forget, gain, wide_center,
    counters, count, gate_programs, tokens, units,
    UNIT: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr, BC: tl.constexpr, ROWS: tl.constexpr,
    INITIAL: tl.constexpr, FINAL: tl.constexpr, STAGES: tl.constexpr,
    H: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr, FORGET: tl.constexpr, GAIN: tl.constexpr, FACTOR: tl.constexpr,
    BH: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """`gate_rows`, then `conv_rows`; H = 0: no gates."""
    clear(counters, count)
    pid, stride = tl.program_id(0), units * UNIT
    if pid >= gate_programs:
        pid -= gate_programs
        conv_rows(x, weight, initial, blocks, q, k, v, final, pid, stride, W, PARTS, BC, ROWS, INITIAL, FINAL, STAGES)
    elif H > 0:
        gate_rows(
            x, A_log, dt_bias, forget_A_log, forget_dt_bias, center, beta, decay, forget, gain, wide_center,
            pid, tokens, stride, H, BETA, DECAY, FORGET, GAIN, FACTOR, BH, BT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["group", "counter_stride", "gate_programs", "tokens"], do_not_specialize_on_alignment=PARAMETERS)
def _inputs_backward(
    x, weight, initial, blocks, dq, dk, dv, dfinal, dx, conv_sums, dweight, dinitial,
    A_log, dt_bias, forget_A_log, forget_dt_bias, dbeta, ddecay, dforget, dgain, dcenter, dlow, doutput, gate_sums, dparameters,
    counters, group, counter_stride, gate_programs, tokens, units, dx_units,
    UNIT: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr, BC: tl.constexpr, ROWS: tl.constexpr,
    INITIAL: tl.constexpr, FINAL: tl.constexpr, STAGES: tl.constexpr,
    H: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr, FORGET: tl.constexpr, GAIN: tl.constexpr, FACTOR: tl.constexpr,
    BH: tl.constexpr, LOW: tl.constexpr, OUTPUT: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, BT: tl.constexpr,
    CONV_SUM: tl.constexpr, GATE_SUM: tl.constexpr,
):  # fmt: skip
    """`gate_rows_backward`, whose sums have the first counters, then `conv_rows_backward`."""
    pid, stride, dx_stride = tl.program_id(0), units * UNIT, dx_units * UNIT
    if pid >= gate_programs:
        pid -= gate_programs
        conv_rows_backward(
            x, weight, initial, blocks, dq, dk, dv, dfinal, dx, conv_sums, dweight, dinitial,
            counters + counter_stride, group, counter_stride, pid, tl.num_programs(0) - gate_programs, stride, dx_stride,
            W, PARTS, BC, ROWS, INITIAL, FINAL, STAGES, CONV_SUM,
        )  # fmt: skip
    elif H > 0:
        gate_rows_backward(
            x, A_log, dt_bias, forget_A_log, forget_dt_bias, dbeta, ddecay, dforget, dgain, dcenter, dlow, doutput, dx, gate_sums,
            pid, tokens, stride, dx_stride, H, BETA, DECAY, FORGET, GAIN, FACTOR, BH, LOW, OUTPUT, R, BR, BT,
        )  # fmt: skip
        if dparameters is not None:
            c = tl.arange(0, 8 * BH)
            add_rows(gate_sums, dparameters, counters, pid, gate_programs, group, c, c < 5 * H, 5 * H, 1, GATE_SUM)


@dataclass(frozen=True)
class Call:
    """What of a call is no tensor."""

    batch: int
    length: int
    bounds: tuple[int, ...] | None
    parts: int  # q, k and v, or the convolution's output alone
    width: int  # W, channels of a part
    columns: GateColumns | None
    final: bool

    def blocks(self, rows: int, device: torch.device) -> Tensor:
        return row_blocks(self.batch, self.length, self.bounds, rows, device)

    @property
    def sequences(self) -> int:
        return self.batch if self.bounds is None else len(self.bounds) - 1

    def conv_constants(self, rows: int, initial: Tensor | None) -> dict:
        return dict(W=self.width, PARTS=self.parts, BC=CHANNELS, ROWS=rows, INITIAL=initial is not None, FINAL=self.final, STAGES=STAGES)


def _programs(call: Call, blocks: Tensor, tokens: int) -> tuple[int, int]:
    """How many make the gates, and how many there are."""
    gates = cdiv(tokens, TOKENS) if call.columns else 0
    return gates, gates + len(blocks) * call.parts * cdiv(call.width, CHANNELS)


def _counters(call: Call, x: Tensor) -> Counters:
    """Of the backward pass's sums: the gates', then each block of channels'. Groups as the convolution wants them, whose rows are wide."""
    blocks = len(call.blocks(BACKWARD_ROWS, x.device))
    gates = cdiv(len(x), TOKENS) if call.columns else 0
    return Counters(max(gates, blocks), group_of(blocks), 1 + call.parts * cdiv(call.width, CHANNELS))


class _MixerInputs(torch.autograd.Function):
    """x [N, D], weight [parts W, 4], initial [S, 3, parts W] -> the parts [N, W], the final history, and the gates."""

    @staticmethod
    def forward(ctx, call, x, weight, initial, A_log, dt_bias, forget_A_log, forget_dt_bias, center):
        N, c, parameters = len(x), call.columns, (A_log, dt_bias, forget_A_log, forget_dt_bias, center)
        blocks = call.blocks(FORWARD_ROWS, x.device)
        parts = tuple(torch.empty(N, call.width, dtype=x.dtype, device=x.device) for _ in range(call.parts))
        final = torch.empty(call.sequences, 3, call.parts * call.width, dtype=x.dtype, device=x.device) if call.final else None
        gates = empty_gates(x, c) if c else (None,) * 5
        (gate_programs, programs), unit = _programs(call, blocks, N), row_unit(x)
        counters = _counters(call, x)
        zeros = counters.empty(x)
        launch(
            _inputs, programs, _key(x, weight, initial, *parameters),
            x, weight, initial, blocks, *_three(parts), final, *parameters, *gates,
            zeros, counters.count, gate_programs, N, x.stride(0) // unit, UNIT=unit,
            **call.conv_constants(FORWARD_ROWS, initial), **constants(c), BT=TOKENS, num_warps=1,
        )  # fmt: skip
        ctx.call, ctx.counters = call, counters
        ctx.save_for_backward(x, weight, initial, zeros, *parameters)
        return *parts, final, *gates, *(handed_on(x, c) if c else (None, None))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        call, counters, (x, weight, initial, zeros, *parameters) = ctx.call, ctx.counters, ctx.saved_tensors
        c, N, D = call.columns, len(x), call.parts * call.width
        *dparts, dfinal, dbeta, ddecay, dforget, dgain, dcenter, dlow, doutput = (aligned(grad) for grad in grads)
        blocks = call.blocks(BACKWARD_ROWS, x.device)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if c and c.unused:
            dx[:, -c.unused :] = 0
        unit = row_unit(x, dx)
        dinitial = None if initial is None else torch.empty_like(initial)
        gate_programs, programs = _programs(call, blocks, N)
        conv_sums = partial_sums(len(blocks), 4 * D, x, counters.group)
        gate_sums = partial_sums(gate_programs, 5 * c.heads, x, counters.group) if c else None
        dweight, sums, dparameters = torch.empty_like(weight), None, (None,) * 5
        if any(one is not None for one in parameters):
            dtype = next(one.dtype for one in parameters if one is not None)
            sums = torch.empty(5, c.heads, dtype=dtype, device=x.device)
            dparameters = [None if one is None else row for one, row in zip(parameters, sums, strict=True)]
        launch(
            _inputs_backward, programs, (_key(x, weight, initial, *parameters), dx.stride(0)),
            x, weight, initial, blocks, *_three(dparts), dfinal, dx, conv_sums, dweight, dinitial,
            *parameters[:4], dbeta, ddecay, dforget, dgain, dcenter, dlow, doutput, gate_sums, sums,
            zeros, counters.group, counters.stride, gate_programs, N, x.stride(0) // unit, dx.stride(0) // unit, UNIT=unit,
            **call.conv_constants(BACKWARD_ROWS, initial), **constants(c), **handed_on_constants(c), BT=TOKENS,
            CONV_SUM=rows_at_once(CHANNELS), GATE_SUM=rows_at_once(8 * constants(c)["BH"]), num_warps=1,
        )  # fmt: skip
        return None, dx, dweight, dinitial, *dparameters


def _key(*given: Tensor | None) -> tuple:
    x = given[0]
    return x.shape[1], x.stride(0), *(None if one is None else one.dtype for one in given)


def _three(parts) -> tuple:
    return (*parts, None, None)[:3]


def run(
    x: Tensor,
    weight: Tensor,
    columns: GateColumns,
    parameters: GateParameters,
    initial: Tensor | None,
    final: bool,
    bounds: tuple[int, ...] | None,
) -> tuple[tuple[Tensor, ...], HeadGates, Tensor | None]:
    """q, k, v; the gates; the final history, of a checked call (arguments as `kernels.mixer_inputs.mixer_inputs`)."""
    batch, length = x.shape[:2]
    call = Call(batch, length, bounds, 3, weight.shape[0] // 3, columns, final)
    q, k, v, history, *gates = _apply(call, x, weight, initial, parameters)
    q, k, v = (one.view(batch, length, -1) for one in (q, k, v))
    made = HeadGates(*gates)
    timed = {n: one.unflatten(0, (batch, length)) for n, one in made._asdict().items() if one is not None and n != "center"}
    return (q, k, v), made._replace(**timed), history


def conv(x: Tensor, weight: Tensor, initial: Tensor | None, final: bool, bounds: tuple[int, ...] | None) -> tuple[Tensor, Tensor | None]:
    """y [B, T, D] and the final history of a checked call (arguments as `kernels.conv.short_conv`)."""
    call = Call(*x.shape[:2], bounds, 1, x.shape[-1], None, final)
    y, history, *_ = _apply(call, x, weight, initial, GateParameters())
    return y.view(x.shape), history


def _apply(call: Call, x: Tensor, weight: Tensor, initial: Tensor | None, parameters: GateParameters) -> tuple:
    initial = None if initial is None else aligned(initial.to(x.dtype))
    joined = x.flatten(0, 1)
    parameters = (None if one is None else one.contiguous() for one in parameters)
    return _MixerInputs.apply(call, rows_of(joined), weight.contiguous(), initial, *parameters)
