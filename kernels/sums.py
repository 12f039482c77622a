"""Sums over the programs of a backward pass of what each of them found for the parameters.

    out[c] = sum_p partial[p, c]        in an order of p that is fixed, in fp32, then rounded once to the parameter's dtype

Each program has a row of `partial` of its own, so that nothing is added by atomics and the bits are the same on every run. Two ways:

- `add_rows`: the pass's own programs, where each has few columns. Of a group of about sqrt(P) rows, the program that is done last adds
  them; of these programs, the last adds the groups' sums. Which programs these are differs from run to run, the order of the sum does not.
  They are found by counters that begin at zero: the forward pass's launch writes the zeros (`clear`), and who reads a full counter puts it
  back for another backward pass.
- `column_sums`: one more launch, two sums at once. Where a row is a whole residual stream's, one program would add them for too long.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, launch

ROWS = 128  # partial sums at a time
COLUMNS = 16
ELEMENTS = 4096  # that `add_rows` loads at a time


class Sum(NamedTuple):
    """A sum to be made."""

    partial: Tensor  # [P, C] fp32
    out: Tensor  # C elements in order, any float dtype


@triton.jit
def _columns(partial, out, rows, columns, block, BR: tl.constexpr, BC: tl.constexpr):
    i, c = tl.arange(0, BR), block * BC + tl.arange(0, BC)
    total = tl.zeros((BR, BC), tl.float32)
    for first in range(0, rows, BR):
        at = partial + (first + i).to(tl.int64)[:, None] * columns + c[None, :]
        total += tl.load(at, mask=(first + i < rows)[:, None] & (c < columns)[None, :], other=0.0)
    tl.store(out + c, tl.sum(total, 0).to(out.dtype.element_ty), mask=c < columns)


@triton.jit(do_not_specialize=["a_rows", "b_rows", "a_columns", "b_columns"])
def _column_sums(a, a_out, a_rows, a_columns, b, b_out, b_rows, b_columns, BR: tl.constexpr, BC: tl.constexpr):
    """Formula above, for one block of columns of a or of b."""
    block, blocks = tl.program_id(0), tl.cdiv(a_columns, BC)
    if block < blocks:
        _columns(a, a_out, a_rows, a_columns, block, BR, BC)
    else:
        _columns(b, b_out, b_rows, b_columns, block - blocks, BR, BC)


def column_sums(a: Sum, b: Sum | None = None) -> None:
    """Writes a.out and b.out."""
    b_columns = 0 if b is None else b.partial.shape[1]
    a_columns, b = a.partial.shape[1], b or a
    launch(
        _column_sums, cdiv(a_columns, COLUMNS) + cdiv(b_columns, COLUMNS), (a.out.dtype, b.out.dtype),
        a.partial, a.out, len(a.partial), a_columns, b.partial, b.out, len(b.partial), b_columns,
        BR=ROWS, BC=COLUMNS, num_warps=4,
    )  # fmt: skip


def partial_sums(programs: int, columns: int, like: Tensor, group: int | None = None) -> Tensor:
    """[programs, columns] fp32 on a tensor's device, unwritten; with a group also the rows of the groups' sums, for `add_rows`."""
    rows = programs if group is None else programs + cdiv(programs, group)
    return torch.empty(rows, columns, dtype=torch.float32, device=like.device)


class Counters(NamedTuple):
    """Of `trees` sums by `add_rows`, of up to `rows` rows each: [trees, 1 + groups], the last one's before the groups'."""

    rows: int
    group: int
    trees: int

    @property
    def stride(self) -> int:
        return 1 + cdiv(self.rows, self.group)

    @property
    def count(self) -> int:
        return self.trees * self.stride

    def empty(self, like: Tensor) -> Tensor:
        return torch.empty(self.count, dtype=torch.int32, device=like.device)


def group_of(rows: int) -> int:
    """Rows of a group, so that there are about as many groups: the last program adds one group, then all groups' sums."""
    return math.isqrt(rows - 1) + 1


@triton.jit
def clear(counters, count):
    """The forward pass's part: its first program writes zeros."""
    if tl.program_id(0) == 0:
        for first in range(0, count, 128):
            i = first + tl.arange(0, 128)
            tl.store(counters + i, 0, mask=i < count)


@triton.jit
def _is_last(counter, programs):
    """Whether this is the last of `programs` programs to come here. It then sees what all of them stored before they came.

    One thread counts. It releases what the other threads stored because of the barrier before; and what it acquires, the others' loads
    see because of the barrier after.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == programs - 1
    tl.debug_barrier()
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def _sum_of_rows(partial, rows, there, STRIDE: tl.constexpr, BR: tl.constexpr):
    """[BC]: the sum of `rows` rows from the pointers partial [BC] on."""
    i, total = tl.arange(0, BR), tl.zeros(there.shape, tl.float32)
    for first in range(0, rows, BR):
        at = partial[None, :] + (first + i).to(tl.int64)[:, None] * STRIDE
        # past the L1 cache, which stores of other multiprocessors do not reach
        total += tl.sum(tl.load(at, mask=(first + i < rows)[:, None] & there[None, :], other=0.0, cache_modifier=".cg"), 0)
    return total


@triton.jit
def add_rows(
    partial, out, counters, row, rows, group, c, there,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """After a program's stores to its `row` of partial [rows + groups, TAPS, WIDTH]: the last of the programs that have the columns c [BC],
    where there [BC], writes out [WIDTH, TAPS]. counters: of these columns alone; BR: rows at a time."""
    number = row // group
    members = tl.minimum(group, rows - number * group)
    if _is_last(counters + 1 + number, members):
        first = partial + (number * group).to(tl.int64) * (TAPS * WIDTH) + c
        sums = partial + rows.to(tl.int64) * (TAPS * WIDTH) + c
        for tap in tl.static_range(TAPS):
            total = _sum_of_rows(first + tap * WIDTH, members, there, TAPS * WIDTH, BR)
            tl.store(sums + number.to(tl.int64) * (TAPS * WIDTH) + tap * WIDTH, total, mask=there)
        groups = tl.cdiv(rows, group)
        if _is_last(counters, groups):
            for tap in tl.static_range(TAPS):
                total = _sum_of_rows(sums + tap * WIDTH, groups, there, TAPS * WIDTH, BR)
                tl.store(out + c * TAPS + tap, total.to(out.dtype.element_ty), mask=there)


def rows_at_once(columns: int) -> int:
    """BR of `add_rows` for a block of columns."""
    return max(1, min(64, ELEMENTS // columns))
