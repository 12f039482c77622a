"""The short causal convolution before q, k and v: depthwise over time, then SiLU (docs/paper.md, section 3), with its history.

    y_t = silu(sum_i weight[:, W - 1 - i] * x_{t - i}),  i = 0 .. W - 1          the last tap is the present token

In plain PyTorch each sequence lies in one buffer behind its own W - 1 rows of history, so no tap reaches into another sequence, a
sequence may be shorter than the convolution, and the last W - 1 rows are the history to hand on. Cost: one fp32 copy of x and W
multiply-adds over it. In Triton: `kernels.conv_triton`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.checks import FLOATS, check_bounds
from kernels.operands import computation_dtype, indices
from kernels.passes import check_backend, on_device

TAPS = 4  # of the Triton kernels


def short_conv(
    x: Tensor,  # [B, T, D]
    weight: Tensor,  # [D, W]
    initial_state: Tensor | None = None,  # [N, W - 1, D], oldest first; None: zeros
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,  # [N + 1]; then B is 1 and the history starts afresh at each entry
    backend: str = "torch",
) -> tuple[Tensor, Tensor | None]:
    """y [B, T, D] in x's dtype, and the last W - 1 inputs of each sequence [N, W - 1, D], history included, or None.

    Computed in fp32 (fp64 for fp64 inputs); gradients to x, weight and initial_state, the same bits on every run. The Triton backend
    takes bf16, fp16 and fp32 and W = 4. Raises ValueError naming the argument.
    """
    check_backend(backend, x, "x")
    bounds = check_conv(x, weight, initial_state, cu_seqlens)
    if backend == "torch":
        return _short_conv(x, weight, initial_state, output_final_state, bounds)
    check_width(weight)
    from kernels import mixer_inputs_triton  # only here: the other backend needs no Triton

    with on_device(x):
        return mixer_inputs_triton.conv(x, weight, initial_state, output_final_state, bounds)


def _short_conv(x: Tensor, weight: Tensor, initial_state: Tensor | None, final: bool, bounds: tuple | None) -> tuple[Tensor, Tensor | None]:
    batch, length, channels = x.shape
    bounds = bounds or tuple(range(0, batch * length + 1, length))
    past, sequences = weight.shape[1] - 1, len(bounds) - 1
    if initial_state is None:
        initial_state = x.new_zeros(sequences, past, channels)
    starts = indices(bounds, x.device)
    heads, rows = _places(starts, length * batch, past)
    buffer = x.new_zeros(len(rows) + sequences * past, channels).index_copy(0, rows, x.flatten(0, 1))
    buffer = buffer.index_copy(0, heads.flatten(), initial_state.to(x.dtype).flatten(0, 1))
    y = _convolve(buffer, weight).index_select(0, rows - past).view_as(x)
    if not final:
        return y, None
    ends = heads + starts.diff()[:, None]
    return y, buffer.index_select(0, ends.flatten()).view(sequences, past, channels)


@torch.no_grad()
def short_conv_step(state: Tensor, x: Tensor, weight: Tensor, backend: str = "torch") -> Tensor:
    """y [B, D] for one token x [B, D]; state [B, W - 1, D] takes x in place of its oldest row. weight [D, W]. No autograd."""
    check_backend(backend, x, "x")
    _check(x, weight, axes=2)
    _check_history("state", state, x, (len(x), weight.shape[1] - 1, x.shape[1]))
    if backend == "triton":
        check_width(weight)
        from kernels import conv_triton  # only here: the other backend needs no Triton

        with on_device(x):
            return conv_triton.step(state, x, weight)
    window = torch.cat([state.to(x.dtype), x[:, None]], 1)
    state.copy_(window[:, 1:])
    dtype = computation_dtype(x)
    return F.silu((window.to(dtype) * weight.to(dtype).T).sum(1)).to(x.dtype)


def _places(starts: Tensor, tokens: int, past: int) -> tuple[Tensor, Tensor]:
    """Rows of the buffer, from where the sequences start [N + 1]: of each one's history [N, W - 1] and of each token [B * T]."""
    number = torch.arange(len(starts) - 1, device=starts.device)
    heads = (starts[:-1] + number * past)[:, None] + torch.arange(past, device=starts.device)
    sequence = torch.repeat_interleave(number, starts.diff(), output_size=tokens)
    return heads, torch.arange(tokens, device=starts.device) + (sequence + 1) * past


def _convolve(buffer: Tensor, weight: Tensor) -> Tensor:
    """[R, D] -> [R - W + 1, D]: row r sees buffer rows r .. r + W - 1."""
    dtype = computation_dtype(buffer)
    rows = len(buffer) - weight.shape[1] + 1
    wide, taps = buffer.to(dtype), weight.to(dtype).unbind(1)
    y = wide[:rows] * taps[0]
    for i, tap in enumerate(taps[1:], start=1):
        y = torch.addcmul(y, wide[i : i + rows], tap)
    return F.silu(y).to(buffer.dtype)


def check_conv(x: Tensor, weight: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[int, ...] | None:
    """The values of cu_seqlens, or None, for a call of `short_conv`; ValueError naming the argument that is wrong."""
    _check(x, weight, axes=3)
    bounds = check_bounds(cu_seqlens, x, name="x")
    if initial_state is not None:
        sequences = len(x) if bounds is None else len(bounds) - 1
        _check_history("initial_state", initial_state, x, (sequences, weight.shape[1] - 1, x.shape[-1]))
    return bounds


def check_width(weight: Tensor) -> None:
    if weight.shape[1] != TAPS:
        raise ValueError(f"weight {list(weight.shape)} has {weight.shape[1]} taps: backend='triton' has {TAPS}; use backend='torch'")


def _check(x, weight, axes: int) -> None:
    if not isinstance(x, Tensor) or x.dim() != axes or x.dtype not in FLOATS or 0 in x.shape:
        raise ValueError(f"x must be a floating tensor {'[B,T,D]' if axes == 3 else '[B,D]'}, got {_describe(x)}")
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.shape[0] != x.shape[-1] or weight.dtype not in FLOATS:
        raise ValueError(f"weight must be a floating tensor [D,W] with D = {x.shape[-1]}, got {_describe(weight)}")
    if weight.device != x.device:
        raise ValueError(f"weight is on {weight.device} and x is on {x.device}")


def _check_history(name: str, state, x: Tensor, shape: tuple[int, ...]) -> None:
    if not isinstance(state, Tensor) or tuple(state.shape) != shape or state.dtype not in FLOATS:
        raise ValueError(f"{name} must be a floating tensor [N,W-1,D] = {list(shape)}, got {_describe(state)}")
    if state.device != x.device:
        raise ValueError(f"{name} is on {state.device} and x is on {x.device}")


def _describe(x) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
