"""All that the recurrence is told at each token, from the columns of one product: q, k, v through the short convolution, and the gates.

q, k, v = silu(conv(x[:, :3 W]))        `kernels.conv`        the gates: from the columns after these        `kernels.gates`
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kernels.conv import check_conv, check_width, short_conv, short_conv_step
from kernels.gates import GateColumns, GateParameters, HeadGates, check_gates, head_gates
from kernels.passes import check_backend, on_device


class MixerInputs(NamedTuple):
    q: Tensor  # [B, T, W] in x's dtype
    k: Tensor  # [B, T, W]
    v: Tensor  # [B, T, W]
    gates: HeadGates
    history: Tensor | None = None  # [N, 3, 3 W], the convolution's last inputs of each sequence


def mixer_inputs(
    x: Tensor,  # [B, T, D], the first 3 W columns for the convolution
    conv_weight: Tensor,  # [3 W, 4]
    columns: GateColumns,
    parameters: GateParameters,
    initial_state: Tensor | None = None,  # [N, 3, 3 W], oldest first; None: zeros
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,  # [N + 1]; then B is 1 and the history starts afresh at each entry
    backend: str = "torch",
) -> MixerInputs:
    """Gradients to x, conv_weight, the parameters and initial_state; the same bits on every run. Raises ValueError naming the argument.

    With backend "triton" one launch, and one backward.
    """
    mixed = _check(x, conv_weight, columns, parameters, backend)
    if backend == "torch":
        y, history = short_conv(mixed, conv_weight, initial_state, output_final_state, cu_seqlens)
        return MixerInputs(*y.chunk(3, -1), head_gates(x, columns, parameters), history)
    check_width(conv_weight)
    bounds = check_conv(mixed, conv_weight, initial_state, cu_seqlens)
    from kernels import mixer_inputs_triton  # only here: the other backend needs no Triton

    with on_device(x):
        parts, gates, history = mixer_inputs_triton.run(x, conv_weight, columns, parameters, initial_state, output_final_state, bounds)
    return MixerInputs(*parts, gates, history)


def mixer_inputs_step(
    state: Tensor,  # [N, 3, 3 W], the history: takes the token in place of its oldest row
    x: Tensor,  # [N, D]
    conv_weight: Tensor,
    columns: GateColumns,
    parameters: GateParameters,
    backend: str = "torch",
) -> MixerInputs:
    """`mixer_inputs` for one more token of N sequences, the time axis dropped everywhere. No autograd."""
    mixed = _check(x, conv_weight, columns, parameters, backend)
    parts = short_conv_step(state, mixed, conv_weight, backend).chunk(3, -1)
    if backend == "torch":
        return MixerInputs(*parts, head_gates(x, columns, parameters))
    from kernels import gates_triton  # only here: the other backend needs no Triton

    with on_device(x):
        return MixerInputs(*parts, gates_triton.head_gates(x, columns, parameters))


def _check(x: Tensor, conv_weight: Tensor, columns: GateColumns, parameters: GateParameters, backend: str) -> Tensor:
    """The columns of the convolution, of an x that has these, those of the gates and as many unused ones as `columns` says."""
    check_backend(backend, x, "x")
    width = conv_weight.shape[0]
    if width % 3 or width > x.shape[-1]:
        raise ValueError(f"conv_weight is for {width} columns: x {list(x.shape)} must have them, and they must be three times W")
    check_gates(x, columns, parameters, first=width)
    return x[..., :width]
