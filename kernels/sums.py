"""The last launch of a backward pass with parameters: sums over the programs of what each of them found.

    out[c] = sum_p partial[p, c]        p in order, in fp32, then rounded once to the parameter's dtype

Each program of the pass before has a row of `partial` of its own, so that nothing is added by atomics and the bits are the same on every
run. Two such sums share a launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, launch

ROWS = 128  # partial sums at a time
COLUMNS = 16


class Sum(NamedTuple):
    """A sum to be made. `taps` > 1 transposes: column i * C + c of partial [P, taps * C] goes to out [C, taps] at [c, i]."""

    partial: Tensor  # [P, taps * C] fp32
    out: Tensor  # taps * C elements in order, any float dtype
    taps: int = 1


@triton.jit
def _columns(partial, out, rows, columns, block, TAPS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    i, c = tl.arange(0, BR), block * BC + tl.arange(0, BC)
    total = tl.zeros((BR, BC), tl.float32)
    for first in range(0, rows, BR):
        at = partial + (first + i).to(tl.int64)[:, None] * columns + c[None, :]
        total += tl.load(at, mask=(first + i < rows)[:, None] & (c < columns)[None, :], other=0.0)
    inner = columns // TAPS
    tl.store(out + c % inner * TAPS + c // inner, tl.sum(total, 0).to(out.dtype.element_ty), mask=c < columns)


@triton.jit(do_not_specialize=["a_rows", "b_rows", "a_columns", "b_columns"])
def _column_sums(
    a, a_out, a_rows, a_columns, b, b_out, b_rows, b_columns,
    A_TAPS: tl.constexpr, B_TAPS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Formula above, for one block of columns of a or of b."""
    block, blocks = tl.program_id(0), tl.cdiv(a_columns, BC)
    if block < blocks:
        _columns(a, a_out, a_rows, a_columns, block, A_TAPS, BR, BC)
    else:
        _columns(b, b_out, b_rows, b_columns, block - blocks, B_TAPS, BR, BC)


def column_sums(a: Sum, b: Sum | None = None) -> None:
    """Writes a.out and b.out."""
    b_columns = 0 if b is None else b.partial.shape[1]
    a_columns, b = a.partial.shape[1], b or a
    launch(
        _column_sums, cdiv(a_columns, COLUMNS) + cdiv(b_columns, COLUMNS), (a.out.dtype, b.out.dtype),
        a.partial, a.out, len(a.partial), a_columns, b.partial, b.out, len(b.partial), b_columns,
        A_TAPS=a.taps, B_TAPS=b.taps, BR=ROWS, BC=COLUMNS, num_warps=4,
    )  # fmt: skip


def partial_sums(programs: int, columns: int, like: Tensor) -> Tensor:
    """[programs, columns] fp32 on a tensor's device, unwritten."""
    return torch.empty(programs, columns, dtype=torch.float32, device=like.device)
