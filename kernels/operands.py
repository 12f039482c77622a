"""The operands of the delta rule: what a call takes, carries and hands back.

`State` and `Preconditioner` are what users build; `Operands` is what the glue in `chunk.py` and `decode.py` makes of a call for the
algorithms: everything in the dtype of computation (fp64 for fp64 inputs, else fp32), q and k normalised, q scaled. Normalisation is
defined here and nowhere else, so that the reference, the chunk algorithm and decoding cannot differ in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

NORM_EPS = 1e-6  # under the root, per head: x / sqrt(sum x^2 + 1e-6)

Form = Literal["squashed", "unstable_atk", "atq", "norm_kbk", "norm_1_kbk", "norm_beta"]
Interval = Literal["both", "up", "down"]


class State(NamedTuple):
    """What a sequence carries from token to token: the matrix s and, with a preconditioner, its statistic a.

    N is the number of sequences: B, or len(cu_seqlens) - 1. As an initial state, a = None starts the statistic at zero.
    """

    s: Tensor  # [N, H, K, V] fp32, or fp64 with fp64 inputs
    a: Tensor | None = None  # [N, H, K], the same dtype; None without a preconditioner


@dataclass(frozen=True)
class Preconditioner:
    """The gates of the statistic a_t = exp(p_t) a_{t-1} + c_t k_t^2 and the map from it to the write key (`preconditioner.py`)."""

    decay: Tensor  # [B, T, H] p, log decay <= 0
    gain: Tensor  # [B, T, H] c, in (0, 1)
    center: Tensor  # [H] m: the log statistic at which a channel is neither raised nor lowered
    bound: float = 1.5  # x >= 1
    eps: float = 1e-6
    form: Form = "squashed"  # the others are the paper's ablations: reference and torch backends only
    interval: Interval = "both"  # [1/x, x] | up: [1, x] | down: [1/x, 1]


@dataclass(frozen=True)
class Operands:
    """One call for the algorithms. Shapes with the time axis; decoding and `at` drop it."""

    q: Tensor  # [B, T, H, K] normalised, times scale
    k: Tensor  # [B, T, H, K] normalised
    v: Tensor  # [B, T, H, V]
    beta: Tensor  # [B, T, H]
    decay: Tensor | None  # [B, T, H] or [B, T, H, K]
    precond: Preconditioner | None

    @property
    def offline(self) -> bool:
        """Whether the write ignores what the state already says: the ATQ ablation (PLA, P-Mamba-2, PGLA) only."""
        return self.precond is not None and self.precond.form == "atq"

    def map(self, f) -> Operands:
        """f on every tensor that has a time axis (all but the centre)."""
        precond = self.precond and replace(self.precond, decay=f(self.precond.decay), gain=f(self.precond.gain))
        decay = None if self.decay is None else f(self.decay)
        return Operands(f(self.q), f(self.k), f(self.v), f(self.beta), decay, precond)


def computation_dtype(x: Tensor) -> torch.dtype:
    """fp64 stays; fp32, bf16 and fp16 are computed in fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def indices(values: Sequence[int], device: torch.device) -> Tensor:
    """int64 indices on a device; unlike torch.tensor(values, device=...) it does not wait for the device."""
    return torch.tensor(values).to(device, non_blocking=True)


def normalize(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last axis; zero stays zero, with a finite gradient."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def prepare(q, k, v, beta, decay, precond, scale, normalize_qk) -> Operands:
    """The operands of a checked call, with or without a time axis (arguments as `kernels.chunk.delta_rule`)."""
    dtype = computation_dtype(q)
    if precond is not None:
        precond = replace(precond, decay=precond.decay.to(dtype), gain=precond.gain.to(dtype), center=precond.center.to(dtype))
    q, k = q.to(dtype).contiguous(), k.to(dtype).contiguous()  # else the strides would set the order of the sums below
    if normalize_qk:
        q, k = normalize(q), normalize(k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return Operands(q * scale, k, v.to(dtype), beta.to(dtype), None if decay is None else decay.to(dtype), precond)


def initial(x: Operands, state: State | None, sequences: int) -> State:
    """The states the sequences start from, in the dtype of computation: zero where none is given."""
    heads, key, value = x.k.shape[-2], x.k.shape[-1], x.v.shape[-1]
    s = x.k.new_zeros(sequences, heads, key, value) if state is None else state.s.to(x.k.dtype)
    if x.precond is None:
        return State(s)
    a = x.k.new_zeros(sequences, heads, key) if state is None or state.a is None else state.a.to(x.k.dtype)
    return State(s, a)
