"""Sequences cut into pieces: what a piece hands to the one after it, and how what arrives from those before it is made of that.

A piece takes what it meets, x, to M x + b, with M and b from its own tokens alone, so all pieces are worked on at once and only a short
chain of their maps is serial:

    what           x                                M                                       b
    "history"      the convolution's last inputs    0                                       this piece's own last inputs
    "statistic"    a [K]                            exp(sum of p), one number a head        the end from a = 0
    "state"        S [K, V]                         [K, K], the end from S = I, no values   the end from S = 0

The statistic is chained before the state, whose write keys depend on it. Backward, with dx' the gradient of what a piece hands on and e the
gradient of what it met from all it did itself, dx = M^T dx' + e is chained from the last piece to the first: the state's, then the
statistic's, then the history's.

The kernels know no ranks: a `Relay` is handed to them, and something that joins the pieces (`pdn_train.sequence`) fills in `carry`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from kernels.operands import computation_dtype, indices

What = Literal["history", "statistic", "state"]


@dataclass(frozen=True)
class Piece:
    """One cut out of R rows of equal length, in which sequences may begin anywhere: N sequences and parts of sequences side by side.

    In each row the first may go on from the piece before and the last may go on in the piece after; all others lie inside.
    """

    bounds: tuple[int, ...]  # [N + 1] where they start and end in this piece's tokens
    first: tuple[int, ...]  # [R] the number of each row's first one
    continues: tuple[bool, ...]  # [R] whether that one goes on from the piece before

    @staticmethod
    def cut(length: int, rows: int, starts: Tensor | None, rank: int, ranks: int) -> Piece:
        """Piece `rank` of `ranks` of rows of `length` tokens; starts: where sequences start in the rows joined into one, those at the
        rows' starts included (cu_seqlens without its last entry); None: at the rows' starts only."""
        if length % ranks:
            raise ValueError(f"{ranks} pieces do not divide the {length} tokens of a row")
        tokens = length // ranks
        begins = torch.zeros(rows * length, dtype=torch.bool)
        begins[torch.arange(0, rows * length, length) if starts is None else starts.long()] = True
        begins = begins.view(rows, length)[:, rank * tokens : (rank + 1) * tokens]
        continues = tuple((~begins[:, 0]).tolist())
        begins = begins.clone()
        begins[:, 0] = True
        first = (0, *accumulate(begins.sum(1).tolist()))[:-1]
        return Piece((*begins.flatten().nonzero().flatten().tolist(), rows * tokens), first, continues)

    @property
    def rows(self) -> int:
        return len(self.first)

    @property
    def sequences(self) -> int:
        return len(self.bounds) - 1

    @property
    def last(self) -> tuple[int, ...]:
        """[R] the number of each row's last one."""
        return tuple(n - 1 for n in (*self.first[1:], self.sequences))

    @property
    def carries(self) -> tuple[bool, ...]:
        """[R] whether what arrives reaches the piece after: one sequence fills the row and goes on from before."""
        return tuple(on and first == last for on, first, last in zip(self.continues, self.first, self.last, strict=True))

    @property
    def tails(self) -> tuple[int, ...]:
        """[R] tokens of each row's last one."""
        return tuple(self.bounds[n + 1] - self.bounds[n] for n in self.last)


class Relay(ABC):
    """What one layer hands on and is handed at the two ends of a piece. Every piece makes the same calls in the same order.

    What has arrived is kept: a layer that is run again for its backward pass (activation checkpointing) finds it, and hands on nothing a
    second time. So each layer of each forward pass has a relay of its own (`for_layer`).
    """

    def __init__(self, piece: Piece, number: int, pieces: int, device: torch.device):
        self.piece, self.number, self.pieces, self.device = piece, number, pieces, device
        self._first, self._last = (indices(x, device) for x in (piece.first, piece.last))
        self._continues, self._carries = (indices(x, device) for x in (piece.continues, piece.carries))
        self._arrived: dict[str, tuple[Tensor, Tensor | None]] = {}

    @abstractmethod
    def carry(self, maps: Tensor | None, made: Tensor, reverse: bool = False) -> Tensor:
        """What arrives, [R, ...] as `made`: zero through x -> maps x + made of every piece before this one, in order; reverse: of every
        piece after it, from the last one, with maps transposed. maps: [R, H], [R, H, K, K], or None for zero."""

    def for_layer(self) -> Relay:
        """The same relay with nothing arrived yet."""
        fresh = copy(self)
        fresh._arrived = {}
        return fresh

    @property
    def hands_on(self) -> bool:
        """Whether there is a piece after this one."""
        return self.number < self.pieces - 1

    @property
    def chains(self) -> bool:
        """Whether anything can pass through a whole piece: there is one with a piece before it and one after it."""
        return self.pieces > 2

    @property
    def passes_through(self) -> bool:
        """Whether anything passes through this one."""
        return 0 < self.number < self.pieces - 1 and any(self.piece.carries)

    def forth(self, what: What, make: Callable[[], tuple[Tensor | None, Tensor]]) -> tuple[Tensor, Tensor | None]:
        """What arrives at each row [R, ...], zero where no sequence goes on, and this piece's maps for `back`. make: (maps, made)."""
        if what not in self._arrived:
            maps, made = make()
            maps = None if maps is None else _rowwise(self._carries, maps) * maps
            arriving = self.carry(maps, made)
            if not all(self.piece.continues):
                arriving = arriving * _rowwise(self._continues, arriving)
            self._arrived[what] = (arriving, maps)
        return self._arrived[what]

    def back(self, maps: Tensor | None, gradient: Tensor) -> Tensor:
        """The gradient of what this piece handed on, [R, ...], from that of what arrived and the maps that `forth` gave back."""
        if not all(self.piece.continues):
            gradient = gradient * _rowwise(self._continues, gradient)
        return self.carry(maps, gradient, reverse=True)

    def enter(self, arriving: Tensor) -> Tensor:
        """[R, ...] -> [N, ...]: what each sequence of the piece starts from, zero where it starts here."""
        if self.piece.sequences == self.piece.rows:
            return arriving
        return arriving.new_zeros(self.piece.sequences, *arriving.shape[1:]).index_copy(0, self._first, arriving)

    def met(self, x: Tensor) -> Tensor:
        """[N, ...] -> [R, ...]: of the sequences that meet what arrives."""
        return x if self.piece.sequences == self.piece.rows else x.index_select(0, self._first)

    def left(self, x: Tensor) -> Tensor:
        """[N, ...] -> [R, ...]: of the sequences that hand on."""
        return x if self.piece.sequences == self.piece.rows else x.index_select(0, self._last)

    def add_left(self, x: Tensor | None, gradient: Tensor) -> Tensor:
        """A gradient of the ends [N, ...], None for zero, with [R, ...] added to those that hand on."""
        if self.piece.sequences == self.piece.rows:
            return gradient if x is None else x + gradient
        x = gradient.new_zeros(self.piece.sequences, *gradient.shape[1:]) if x is None else x
        return x.index_add(0, self._last, gradient)


def _rowwise(mask: Tensor, x: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (x.dim() - 1))


def check_relay(relay: Relay, q: Tensor, bounds: tuple[int, ...] | None, given: bool, backend: str) -> None:
    """What a call of the recurrence on one piece must keep to; given: whether it has an initial state."""
    if backend == "reference":
        raise ValueError("relay is given: backend='reference' takes whole sequences; use backend='torch' or 'triton'")
    if given:
        raise ValueError("relay and initial_state are both given: the states at a piece's start come by the relay")
    batch, length = q.shape[:2]
    bounds = bounds or tuple(range(0, batch * length + 1, length))
    if bounds != relay.piece.bounds:
        raise ValueError(f"relay is for sequences that start at {relay.piece.bounds} and q, cu_seqlens for {bounds}")


def history(relay: Relay, x: Tensor, past: int, width: int) -> tuple[Tensor, Tensor]:
    """x [B, T, D] itself, for a convolution of its first `width` columns, and the `past` rows before each sequence of the piece, [N, past,
    width] in fp32 (fp64 for fp64).

    The convolution must be all that reads the x that is returned: the gradient of the rows handed on is added to that of x in place.
    """
    tokens = x.shape[0] * x.shape[1] // relay.piece.rows
    if tokens < past:
        raise ValueError(f"a piece of {tokens} tokens is shorter than the convolution's history of {past}: use fewer pieces")
    own = None
    if min(relay.piece.tails) < past:  # a sequence that started less than `past` tokens ago
        own = indices([[past - i <= tail for i in range(past)] for tail in relay.piece.tails], x.device)[..., None]
    x, arriving = _History.apply(relay, x, past, width, own)
    return x, relay.enter(arriving)


class _History(torch.autograd.Function):
    """x, and the rows that arrive [R, past, width]. own [R, past, 1]: which of a row's last tokens are of its last sequence; None: all."""

    @staticmethod
    def forward(ctx, relay: Relay, x: Tensor, past: int, width: int, own: Tensor | None):
        ctx.relay, ctx.own, ctx.shape = relay, own, (relay.piece.rows, -1, x.shape[-1])
        ctx.tail = (slice(None), slice(-past, None), slice(width))
        tail = x.view(ctx.shape)[ctx.tail].to(computation_dtype(x))
        arriving, _ = relay.forth("history", lambda: (None, tail if own is None else tail * own))
        return x.view_as(x), arriving.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dx, gradient):
        handed = ctx.relay.back(None, gradient)
        dx = dx.contiguous()
        dx.view(ctx.shape)[ctx.tail] += handed if ctx.own is None else handed * ctx.own
        return None, dx, None, None, None


def statistic(relay: Relay, p: Tensor, made: Tensor) -> Tensor:
    """What the statistic of each sequence starts from, [N, H, K], from its log decay p [B, T, H] and its ends from zero [N, H, K]."""
    return relay.enter(_Statistic.apply(relay, kept(relay, p), relay.left(made)))


def kept(relay: Relay, p: Tensor) -> Tensor:
    """exp(sum of p [B, T, H]) over each row, [R, H]: what a sequence that fills it keeps of a statistic."""
    return p.reshape(relay.piece.rows, -1, p.shape[-1]).to(computation_dtype(p)).sum(1).exp()


class _Statistic(torch.autograd.Function):
    """What arrives [R, H, K], where maps [R, H] and made [R, H, K] have gradients of their own."""

    @staticmethod
    def forward(ctx, relay: Relay, maps: Tensor, made: Tensor):
        arriving, maps = relay.forth("statistic", lambda: (maps, made))
        ctx.relay = relay
        ctx.save_for_backward(maps, arriving)
        return arriving.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        maps, arriving = ctx.saved_tensors
        handed = ctx.relay.back(maps, gradient)
        return None, (arriving * handed).sum(-1) * _rowwise(ctx.relay._carries, maps), handed


def follow(maps: Tensor, x: Tensor, made: Tensor) -> Tensor:
    """maps x + made; maps [R, H] for x [R, H, K], or [R, H, K, K] for x [R, H, K, V]."""
    if maps.dim() < x.dim():
        return torch.addcmul(made, maps[..., None], x)
    return torch.baddbmm(*(part.flatten(0, 1) for part in (made, maps, x))).view_as(x)


def chain(maps: Tensor, made: Tensor, start: Tensor | None = None) -> Tensor:
    """start (None: zero) through the maps of P pieces in order, maps [P, ...], made [P, ...]."""
    x = made[0] if start is None else follow(maps[0], start, made[0])
    for m, b in zip(maps[1:], made[1:], strict=True):
        x = follow(m, x, b)
    return x


def compose(maps: Tensor, made: Tensor) -> tuple[Tensor, Tensor]:
    """P pieces in order as one: its map [...] and what it makes of zero."""
    whole = maps[0]
    for m in maps[1:]:
        whole = m @ whole if m.dim() == made[0].dim() else m * whole
    return whole, chain(maps, made)
