"""Argument checks: every wrong argument is a ValueError that names it, with the values that disagree, before any computation.

Only shapes, dtypes, devices and cu_seqlens are looked at: the values of the other tensors stay on the device. cu_seqlens on the
host is read at every call. On a GPU it costs one copy to the host, once a tensor: what was read is kept with the tensor's version,
so a change in place is read again, and kept no longer than the tensor lives. `remember` hands over a host copy that is already
there, so that a training step never waits; while a CUDA graph is captured the copy is impossible and an unknown tensor is refused.
"""

from __future__ import annotations

import math
from typing import get_args

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kernels.operands import Form, Interval, Preconditioner, State, computation_dtype

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SIZES = (16, 256)  # of K and V

_read = WeakTensorKeyDictionary()  # cu_seqlens on a device -> (version, its values)


def check_backend(backend: str) -> None:
    if backend not in ("triton", "torch", "reference"):
        raise ValueError(f"backend={backend!r} is not one of 'triton', 'torch', 'reference'")


def check_triton(q: Tensor, precond: Preconditioner | None) -> None:
    """What the Triton backend does not do, after `check_operands`."""
    other = "use backend='torch'"
    if not q.is_cuda and not _interpreted():
        raise ValueError(f"q is on {q.device}: backend='triton' needs a CUDA device; {other}")
    if q.dtype == torch.float64:
        raise ValueError(f"q is {q.dtype}: backend='triton' takes bf16, fp16 and fp32; {other}")
    if precond is not None and (precond.form, precond.interval) != ("squashed", "both"):
        name = "form" if precond.form != "squashed" else "interval"
        raise ValueError(f"precond.{name}={getattr(precond, name)!r}: backend='triton' has form 'squashed', interval 'both'; {other}")


def _interpreted() -> bool:
    try:
        from triton import knobs
    except ImportError:
        raise ValueError("backend='triton' needs Triton, which is not installed; use backend='torch'") from None
    return knobs.runtime.interpret


def check_operands(q, k, v, beta, decay, precond, scale, axes: str = "BTH") -> None:
    """The operands of `delta_rule`, or with axes "BH" those of one token."""
    _check_qkv(q, k, v, axes)
    lead = tuple(q.shape[:-1])
    _check_gate("beta", beta, q, (lead,), f"[{','.join(axes)}]")
    if decay is not None:
        _check_gate("decay", decay, q, (lead, tuple(q.shape)), f"[{','.join(axes)}] or [{','.join(axes)},K]")
    if precond is not None:
        _check_precond(precond, q, axes)
    if scale is not None and not (isinstance(scale, (int, float)) and math.isfinite(scale)):
        raise ValueError(f"scale must be a finite number or None (K ** -0.5), got {scale!r}")


def _check_qkv(q, k, v, axes: str) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, x)
        if x.dim() != len(axes) + 1:
            raise ValueError(f"{name} must be [{','.join(axes)},{'V' if x is v else 'K'}], got shape {list(x.shape)}")
        if x.dtype not in FLOATS or x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype} and q is {q.dtype}: q, k and v must share bf16, fp16, fp32 or fp64")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q is on {q.device}")
        if 0 in x.shape[:-1]:
            raise ValueError(f"{name} is empty: shape {list(x.shape)}")
        if not SIZES[0] <= x.shape[-1] <= SIZES[1]:
            raise ValueError(f"{name} has {x.shape[-1]} channels a head; K and V must be {SIZES[0]} to {SIZES[1]}")
    if k.shape != q.shape:
        raise ValueError(f"k has shape {list(k.shape)} and q has {list(q.shape)}: they must be equal")
    if v.shape[:-1] != q.shape[:-1]:
        raise ValueError(f"v has shape {list(v.shape)} and q has {list(q.shape)}: all but the last axis must be equal")


def _check_tensor(name: str, x) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")


def _check_gate(name: str, x, q: Tensor, shapes: tuple[tuple[int, ...], ...], letters: str) -> None:
    _check_tensor(name, x)
    if tuple(x.shape) not in shapes:
        raise ValueError(f"{name} must be {letters} = {' or '.join(str(list(s)) for s in shapes)}, got {list(x.shape)}")
    if x.dtype not in FLOATS or (x.dtype == torch.float64 and q.dtype != torch.float64):
        raise ValueError(f"{name} is {x.dtype} and q is {q.dtype}: {name} must be fp32 or q's dtype")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device} and q is on {q.device}")


def _check_precond(precond, q: Tensor, axes: str) -> None:
    if not isinstance(precond, Preconditioner):
        raise ValueError(f"precond must be a Preconditioner or None, got {type(precond).__name__}")
    lead = tuple(q.shape[:-1])
    _check_gate("precond.decay", precond.decay, q, (lead,), f"[{','.join(axes)}]")
    _check_gate("precond.gain", precond.gain, q, (lead,), f"[{','.join(axes)}]")
    _check_gate("precond.center", precond.center, q, ((q.shape[-2],),), "[H]")
    if not 1 <= precond.bound < math.inf:
        raise ValueError(f"precond.bound={precond.bound} must be a finite number >= 1: the preconditioner lies in [1/bound, bound]")
    if not 0 < precond.eps < math.inf:
        raise ValueError(f"precond.eps={precond.eps} must be a finite number > 0")
    if precond.form not in get_args(Form):
        raise ValueError(f"precond.form={precond.form!r} is not one of {', '.join(get_args(Form))}")
    if precond.interval not in get_args(Interval):
        raise ValueError(f"precond.interval={precond.interval!r} is not one of {', '.join(get_args(Interval))}")
    if precond.interval != "both" and precond.form in ("unstable_atk", "atq"):
        raise ValueError(f"precond.interval={precond.interval!r}: form {precond.form} is not bounded and has no interval; use 'both'")


def check_state(state, q: Tensor, v: Tensor, precond, sequences: int, name: str = "initial_state") -> None:
    """The states that `sequences` sequences start from, or with decoding the ones that are updated."""
    if not isinstance(state, State):
        raise ValueError(f"{name} must be a State or None, got {type(state).__name__}")
    heads, key = q.shape[-2:]
    _check_state_part(f"{name}.s", state.s, (sequences, heads, key, v.shape[-1]), "[N,H,K,V]", q)
    if state.a is None:
        return
    if precond is None:
        raise ValueError(f"{name}.a is given but precond is None: a recurrence without a preconditioner has no statistic")
    _check_state_part(f"{name}.a", state.a, (sequences, heads, key), "[N,H,K]", q)


def _check_state_part(name: str, x, shape: tuple[int, ...], letters: str, q: Tensor) -> None:
    _check_tensor(name, x)
    if x.dim() == len(shape) and x.shape[0] != shape[0]:
        raise ValueError(f"{name} holds {x.shape[0]} states and there are {shape[0]} sequences")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must be {letters} = {list(shape)}, got {list(x.shape)}")
    if x.dtype not in (torch.float32, computation_dtype(q)):
        raise ValueError(f"{name} is {x.dtype} and q is {q.dtype}: states are fp32 (or fp64 with fp64 inputs)")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device} and q is on {q.device}")


def check_bounds(cu_seqlens, x: Tensor, name: str = "q") -> tuple[int, ...] | None:
    """The values of cu_seqlens [N+1] for packed sequences in x [1, T, ...], or None without it."""
    if cu_seqlens is None:
        return None
    _check_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens must be int32 or int64 [N+1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}")
    if x.shape[0] != 1:
        raise ValueError(f"cu_seqlens describes sequences packed into one row, B = 1, but {name} has B = {x.shape[0]}")
    if not cu_seqlens.device.type == "cpu" and cu_seqlens.device != x.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device} and {name} is on {x.device}: it must be there or on the host")
    bounds = _values(cu_seqlens)
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {bounds[0]}")
    for n, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if stop < start:
            raise ValueError(f"cu_seqlens must not decrease: entry {n} is {start} and entry {n + 1} is {stop}")
    if bounds[-1] != x.shape[1]:
        raise ValueError(f"cu_seqlens ends at {bounds[-1]} but {name} has T = {x.shape[1]} tokens")
    return bounds


def remember(cu_seqlens: Tensor, host: Tensor) -> Tensor:
    """cu_seqlens on a device, marked as holding the values of its host copy, so that the ops need not read it back. Returns cu_seqlens.

    For the code that makes both from the same values; a wrong pair gives wrong sequence boundaries.
    """
    if host.device.type != "cpu" or host.shape != cu_seqlens.shape:
        raise ValueError(f"host is {list(host.shape)} on {host.device}: it must be the host copy of cu_seqlens {list(cu_seqlens.shape)}")
    _read[cu_seqlens] = (cu_seqlens._version, tuple(host.tolist()))
    return cu_seqlens


def _values(cu_seqlens: Tensor) -> tuple[int, ...]:
    if cu_seqlens.device.type == "cpu":
        return tuple(cu_seqlens.tolist())
    version, values = _read.get(cu_seqlens, (None, None))
    if values is not None and version == cu_seqlens._version:
        return values
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "cu_seqlens on a GPU must be checked before a CUDA graph is captured: call the op once before, or `checks.remember`"
        )
    remember(cu_seqlens, cu_seqlens.cpu())
    return _read[cu_seqlens][1]
