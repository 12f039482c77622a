"""Where the chunks lie: the tables and the inputs that all Triton stages share.

Tokens are flattened: token n of the call is row b * T + t. A chunk is up to C consecutive tokens of one sequence (`chunk_rows`); the last
one of a sequence may be shorter. Equal and packed sequences take the same road: int32 tables on the device,

    chunks [M, 2]       first token, rows (1 .. C)
    sequences [S, 4]    first chunk, number of chunks, first token, number of tokens; all zero long where a sequence is empty

    spans [P, 4]        the same columns; a sequence is cut into pieces of whole chunks where there are too few of them to fill the card
                        (`kernels.pieces`). Without cuts it is `sequences` itself
    pieces [S, 4]       first span, number of spans; 0, 0

The tables depend on the lengths alone and are kept: a training step builds none and copies nothing to the device.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from kernels.tables import Tables

PROGRAMS = 128  # of a scan, that fill the card: one a multiprocessor
LONG = 64  # chunks: sequences that are worth cutting


@dataclass(frozen=True)
class Layout:
    """The tables of one call."""

    chunk: int  # C, rows of a whole chunk
    chunks: Tensor  # [M, 2] int32
    sequences: Tensor  # [S, 4] int32
    spans: Tensor  # [P, 4] int32
    pieces: Tensor  # [S, 4] int32
    longest: int  # chunks of the longest sequence

    @cached_property
    def counts(self) -> tuple[int, int]:
        """M and S. (The length of a tensor costs the host as much as an allocation.)"""
        return len(self.chunks), len(self.sequences)

    @property
    def cut(self) -> bool:
        return self.spans is not self.sequences


@dataclass(frozen=True)
class Inputs:
    """One call for the Triton stages: N = B * T tokens, H heads. Nothing is normalised, cast or scaled yet.

    q, k, v and a decay [N, H, K] may be views: the last two axes are contiguous, the token stride (`stride(0)`) is free. The other gates
    are contiguous, each in its own dtype. center is [H] fp32.
    """

    q: Tensor  # [N, H, K] bf16, fp16 or fp32
    k: Tensor  # [N, H, K]
    v: Tensor  # [N, H, V]
    beta: Tensor  # [N, H]
    decay: Tensor | None  # [N, H] or [N, H, K] log decay g <= 0
    forget: Tensor | None  # [N, H] p, the statistic's log decay; None without a preconditioner
    gain: Tensor | None  # [N, H] c
    center: Tensor | None  # [H] m
    log_bound: float  # log(x)
    eps: float
    scale: float  # of the output
    normalize: bool  # q and k become x / sqrt(sum x^2 + 1e-6)

    @cached_property
    def key(self) -> Hashable:
        """What of all this decides which variant of a kernel is launched (`kernels.launch`)."""
        gates = (None if x is None else x.dtype for x in (self.beta, self.decay, self.forget, self.gain))
        strides = (x.stride(0) for x in (self.q, self.k, self.v))
        sizes = *self.q.shape[1:], self.v.shape[-1]
        return self.q.dtype, *gates, *sizes, *strides, self.decay_kind, self.decay_stride, self.normalize

    @property
    def decay_kind(self) -> Literal["none", "scalar", "channel"]:
        if self.decay is None:
            return "none"
        return "scalar" if self.decay.dim() == 2 else "channel"

    @property
    def decay_stride(self) -> int:
        """Elements from token to token."""
        return 0 if self.decay is None else self.decay.stride(0)


@dataclass(frozen=True)
class Solved:
    """What the chunk-local solve hands to every later stage, and what is kept for the backward pass."""

    t: Tensor  # [N, H, C] -(I + L diag(beta))^-1 L in the input dtype; row: the token, column: the row in its chunk
    qw: Tensor  # [N, H, C] scale (qhat w^T * M) likewise: zero above the diagonal
    w: Tensor | None  # [N, H, K] the write key in the input dtype; None: it is rk * k (no preconditioner)
    rows: Tensor  # [M, H, 8, C] fp32, numbers of each token and head: see `kernels.tiles`
    whole: Tensor  # [M, H], or [M, H, K] with a decay a channel; fp32, exp(G_C): what a chunk leaves of a state; unset without decay
    # With a decay a channel, which no row's number can hold: the keys as they meet a state, in the input dtype. None otherwise
    kr: Tensor | None = None  # [N, H, K] exp(G) khat
    qr: Tensor | None = None  # [N, H, K] scale exp(G) qhat
    wd: Tensor | None = None  # [N, H, K] exp(G_C - G) w

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order of the fields."""
        return self.t, self.qw, self.w, self.rows, self.whole, self.kr, self.qr, self.wd


_tables: Tables[Layout] = Tables()


def chunk_rows(k: Tensor) -> int:
    """C for keys k [..., K]: 64 where the matrix units take 16-bit operands; fp32 tiles of that height do not fit into the registers."""
    if k.element_size() == 2:
        return 64
    return 32 if k.shape[-1] <= 128 else 16


def layout(batch: int, length: int, bounds: tuple[int, ...] | None, chunk: int, heads: int, device: torch.device) -> Layout:
    """The tables of B sequences of T tokens, or of the packed ones that start and end at bounds, in chunks of `chunk` rows."""

    def make() -> Layout:
        return _build(bounds or tuple(range(0, batch * length + 1, length)), chunk, heads, device)

    return _tables.get((batch, length, bounds, chunk, heads, device), device, make)


def _build(bounds: tuple[int, ...], chunk: int, heads: int, device: torch.device) -> Layout:
    chunks, sequences = [], []
    for start, stop in pairwise(bounds):
        sequences.append((len(chunks), -(-(stop - start) // chunk), start, stop - start))
        chunks += [(token, min(chunk, stop - token)) for token in range(start, stop, chunk)]
    longest = max(row[1] for row in sequences)
    length = _piece(len(chunks), longest, len(sequences), heads)
    spans, pieces = _cut(sequences, length, chunk) if length else ([], [])
    rows = sequences + spans + pieces  # first, so that all tables start at multiples of 16 bytes
    flat = torch.tensor([pair for row in rows for pair in (row[:2], row[2:])] + chunks, dtype=torch.int32)
    flat = flat.to(device, non_blocking=True)  # one copy for all
    made = flat[2 * len(rows) :]
    sequences, spans, pieces = flat[: 2 * len(rows)].view(-1, 4).split([len(sequences), len(spans), len(pieces)])
    return Layout(chunk, made, sequences, spans if length else sequences, pieces, longest)


def _piece(chunks: int, longest: int, sequences: int, heads: int) -> int:
    """Chunks of a span, or 0 where cutting does not pay: what is cut is scanned twice, so three spans a sequence must find room."""
    if sequences * heads > PROGRAMS // 3 or longest < LONG:
        return 0
    spans = PROGRAMS // heads - sequences + 1  # each sequence's last span may be a short one
    return max(LONG // 8, -(-chunks // spans))


def _cut(sequences: list[tuple], length: int, chunk: int) -> tuple[list[tuple], list[tuple]]:
    spans, pieces = [], []
    for first, count, start, tokens in sequences:
        pieces.append((len(spans), -(-count // length), 0, 0))
        for done in range(0, count, length):
            token = done * chunk
            spans.append((first + done, min(length, count - done), start + token, min(length * chunk, tokens - token)))
    return spans, pieces
