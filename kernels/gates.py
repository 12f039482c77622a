"""The recurrence's gates from raw columns of a product (docs/paper.md, section 3): where they stand, what they are computed with, and how.

    beta, c = sigmoid(x) ;  g, p = -exp(A_log) softplus(x + dt_bias)

The gates of the heads come with the convolution from `kernels.mixer_inputs`; the channel decay, which has a product of its own, from
`channel_decay`. All are computed in fp32 (fp64 for fp64 columns), whatever the dtype of the columns and the parameters.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.checks import FLOATS
from kernels.operands import computation_dtype
from kernels.passes import check_backend, on_device


class GateColumns(NamedTuple):
    """The first column of each gate in [..., D]: `heads` columns a gate, `rank` columns of each of the last two. None: no such gate.

    `forget` may be `decay` and `gain` may be `beta`: the preconditioner's gates are then the state's own ("tied").
    """

    heads: int
    beta: int
    decay: int | None = None  # g, one a head
    forget: int | None = None  # p, the preconditioner's decay
    gain: int | None = None  # c
    factor: int = 1  # beta lies in (0, factor)
    rank: int = 0
    low: int | None = None  # what the channel decay's second product reads
    output: int | None = None  # what the output gate's second product reads
    unused: int = 0  # at the end: nothing reads them, and their gradient is zero


class GateParameters(NamedTuple):
    """What the gates learn, [H] each, of one dtype. None where there is no such gate, or a tied one."""

    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    forget_A_log: Tensor | None = None
    forget_dt_bias: Tensor | None = None
    center: Tensor | None = None  # m


class HeadGates(NamedTuple):
    """[..., H] in fp32 (fp64 for fp64 columns); None where there is no such gate."""

    beta: Tensor
    decay: Tensor | None
    forget: Tensor | None
    gain: Tensor | None
    center: Tensor | None  # [H], likewise fp32
    low: Tensor | None  # [..., rank], a view of the columns
    output: Tensor | None  # [..., rank]


def head_gates(x: Tensor, columns: GateColumns, parameters: GateParameters) -> HeadGates:
    """The gates from x [..., D], in plain PyTorch."""
    heads, factor = columns.heads, columns.factor

    def part(first: int | None, size: int = heads) -> Tensor | None:
        return None if first is None else x[..., first : first + size]

    beta = torch.sigmoid(_wide(part(columns.beta)))
    decay = None if columns.decay is None else log_decay(part(columns.decay), parameters.A_log, parameters.dt_bias)
    forget, gain, center = None, None, None
    if columns.gain is not None:
        own = columns.forget != columns.decay
        forget = log_decay(part(columns.forget), parameters.forget_A_log, parameters.forget_dt_bias) if own else decay
        gain = beta if columns.gain == columns.beta else torch.sigmoid(_wide(part(columns.gain)))
        center = _wide(parameters.center)
    beta = beta if factor == 1 else factor * beta
    return HeadGates(beta, decay, forget, gain, center, part(columns.low, columns.rank), part(columns.output, columns.rank))


def log_decay(x: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """-exp(A_log) softplus(x + dt_bias) <= 0, in fp32 (fp64 for fp64); x [..., H] or [..., H, K], the others broadcast to it."""
    return -torch.exp(_wide(A_log)) * F.softplus(_wide(x) + _wide(dt_bias))


def channel_decay(
    x: Tensor,  # [..., H, K]
    A_log: Tensor,  # [H]
    dt_bias: Tensor,  # [H, K]
    backend: str = "torch",
) -> Tensor:
    """g = -exp(A_log) softplus(x + dt_bias), one log decay a channel [..., H, K]. Gradients to all three.

    fp32 (fp64 for fp64) from the torch backend. The Triton backend rounds g, once, to x's dtype: half the bytes of the largest gate. A
    relative error of 2^-9 in an exponent G <= 0, over any number of tokens, changes exp(G) by |G| exp(G) 2^-9 < 8e-4; in the fp64 chunk
    algorithm, with g and its gradient in bf16, o changed by up to 5e-4 and the parameters' gradients by up to 2.2e-3 (relative RMS, slow
    and fast decays, 512 tokens). Raises ValueError naming the argument.
    """
    check_backend(backend, x, "x")
    if x.dim() < 3 or x.dtype not in FLOATS or 0 in x.shape:
        raise ValueError(f"x must be a floating tensor [..., H, K] with two axes or more before, got {x.dtype} {list(x.shape)}")
    for name, parameter, shape in (("A_log", A_log, x.shape[-2:-1]), ("dt_bias", dt_bias, x.shape[-2:])):
        if parameter.shape != shape or parameter.device != x.device:
            raise ValueError(f"{name} must be {list(shape)} on {x.device}, got {list(parameter.shape)} on {parameter.device}")
    if backend == "torch":
        return log_decay(x, A_log[:, None], dt_bias)
    from kernels import gates_triton  # only here: the other backend needs no Triton

    with on_device(x):
        return gates_triton.channel_decay(x, A_log, dt_bias)


def check_gates(x: Tensor, columns: GateColumns, parameters: GateParameters, first: int) -> None:
    """Raise ValueError unless the columns are those of x [..., D] from `first` on and each gate has what it is computed with."""
    names = ("beta", "decay", "forget", "gain", "low", "output")
    sizes = {getattr(columns, name): columns.rank if name in ("low", "output") else columns.heads for name in names}
    end = first
    for column in sorted(column for column in sizes if column is not None):
        if column != end:
            raise ValueError(f"columns {columns} must follow each other from {first} on: one starts at {column}, and not at {end}")
        end += sizes[column]
    if end + columns.unused != x.shape[-1]:
        raise ValueError(f"columns {columns} end at {end + columns.unused}, and x {list(x.shape)} has {x.shape[-1]}")
    own = columns.forget is not None and columns.forget != columns.decay
    wanted = {"A_log": columns.decay is not None, "dt_bias": columns.decay is not None, "forget_A_log": own, "forget_dt_bias": own}
    wanted["center"] = columns.gain is not None
    if (columns.gain is None) != (columns.forget is None):
        raise ValueError(f"columns.forget={columns.forget} and columns.gain={columns.gain}: a preconditioner has both, or there is none")
    given = {name: getattr(parameters, name) for name in wanted}
    for name, needed in wanted.items():
        parameter = given[name]
        if needed != (parameter is not None) or (needed and parameter.shape != (columns.heads,)):
            shape = None if parameter is None else list(parameter.shape)
            raise ValueError(f"parameters.{name} must be {[columns.heads] if needed else None} for these columns, got {shape}")
        if needed and parameter.device != x.device:
            raise ValueError(f"parameters.{name} is on {parameter.device} and x is on {x.device}")
    if len({parameter.dtype for parameter in given.values() if parameter is not None}) > 1:
        raise ValueError(f"parameters must share a dtype, got { {n: p.dtype for n, p in given.items() if p is not None} }")


def _wide(x: Tensor) -> Tensor:
    return x.to(computation_dtype(x))
