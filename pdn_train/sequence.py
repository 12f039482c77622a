"""Sequence parallelism: one sequence over several ranks, a piece each (`kernels.maps` has the algebra, docs/sequence.md the costs).

Per layer and direction three small exchanges: the convolution's history, the statistic and the state. The state's can be carried in three
ways, which differ in what is on the wire and in how many steps follow each other; `choose` takes the cheapest by a model of the network:

    gather         every rank's [M | b] to every rank, then a chain of all maps on each
    hierarchical   the same within a node, then the nodes' composed maps between nodes: two short chains
    pipelined      S itself from rank to rank, in blocks of value channels, each rank applying its own map

With two ranks no map is needed: what a rank hands on is what the other one starts from. On the wire everything is fp32 (fp64 for fp64
inputs). In all-gathers over the whole line the first rank forward and the last one backward wait for nobody: they run up to AHEAD exchanges
ahead, and what they give is there when it is asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.maps import Piece, Relay, chain, compose, follow
from pdn_train.world import World

Method = Literal["gather", "hierarchical", "pipelined"]
GATHERED = 8  # ranks up to which a hand-on is an all-gather: 80 us a call against 132 us of a send and a receive, on two GPUs
AHEAD = 6  # exchanges by which a rank that only gives may be before the others: two layers' where each has three


class Wire(Protocol):
    """A line of ranks 0 .. size - 1. All of them make the same calls in the same order."""

    rank: int
    size: int

    def gather(self, x: Tensor, read: bool = True) -> Tensor | None:
        """[size, *x.shape]: every rank's x, in rank order. read false: None; this rank only gives its own, which nobody may write to again,
        and does not wait for the others."""

    def exchange(self, give: Tensor | None, to: int, take: Tensor | None, source: int) -> None:
        """Send `give` to rank `to` and fill `take` with what rank `source` sends. None, or a rank that does not exist: left out."""


class GroupWire:
    """A torch.distributed group: NCCL or gloo."""

    def __init__(self, group: dist.ProcessGroup):
        self._group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self._given: deque[tuple[dist.Work, Tensor, Tensor]] = deque()  # not waited for yet, and what they read and write

    def gather(self, x: Tensor, read: bool = True) -> Tensor | None:
        found = x.new_empty(self.size * x.numel())
        if read:
            self._wait(
                0
            )  # NCCL runs a call that is waited for on the current stream, the others on its own: they must not overtake each other
            dist.all_gather_into_tensor(found, x.contiguous().view(-1), group=self._group)
            return found.view(self.size, *x.shape)
        x = x.contiguous()
        self._given.append((dist.all_gather_into_tensor(found, x.view(-1), group=self._group, async_op=True), x, found))
        self._wait(AHEAD)
        return None

    def _wait(self, left: int) -> None:
        while len(self._given) > left:
            self._given.popleft()[0].wait()

    def exchange(self, give: Tensor | None, to: int, take: Tensor | None, source: int) -> None:
        self._wait(0)
        calls = []
        if give is not None and 0 <= to < self.size:
            calls.append(dist.P2POp(dist.isend, give.contiguous(), group=self._group, group_peer=to))
        if take is not None and 0 <= source < self.size:
            calls.append(dist.P2POp(dist.irecv, take, group=self._group, group_peer=source))
        for work in dist.batch_isend_irecv(calls) if calls else []:
            work.wait()


@dataclass(frozen=True)
class Line:
    """The ranks that share a sequence, in the order of their pieces.

    Where they fill several nodes, `node` has those of this rank's node and `across` those of its place in each node.
    """

    whole: Wire
    per_node: int  # ranks of the line on a node
    node: Wire | None = None
    across: Wire | None = None
    method: Method | None = None  # of carrying states; None: the one that `choose` finds

    def relay(self, piece: Piece, device: torch.device) -> LineRelay:
        """The relay of one micro-batch."""
        return LineRelay(self, piece, device)


def connect(world: World, timeout_seconds: int) -> Line | None:
    """This rank's line; None where a sequence is on one rank. Collective over the whole world."""
    if world.sequence == 1:
        return None
    ranks, per_node = range(world.size), min(world.sequence, world.local_size)

    def group(place: Callable[[int], object]) -> GroupWire:
        """The ranks at the same `place`; every rank makes all groups, in one order."""
        members: dict[object, list[int]] = {}
        for rank in ranks:
            members.setdefault(place(rank), []).append(rank)
        own, _ = dist.new_subgroups_by_enumeration(list(members.values()), timeout=timedelta(seconds=timeout_seconds))
        return GroupWire(own)

    whole = group(lambda rank: rank // world.sequence)
    if not _has_nodes(world.sequence, per_node):
        return Line(whole, per_node)
    return Line(whole, per_node, group(lambda rank: rank // per_node), group(lambda rank: (rank // world.sequence, rank % per_node)))


class LineRelay(Relay):
    """The relay of one micro-batch over a line of ranks."""

    def __init__(self, line: Line, piece: Piece, device: torch.device):
        super().__init__(piece, line.whole.rank, line.whole.size, device)
        self._line = line

    def carry(self, maps: Tensor | None, made: Tensor, reverse: bool = False) -> Tensor:
        if maps is None or self.pieces == 2:
            return shift(self._line.whole, made, reverse)
        if maps.dim() < made.dim():  # the statistic: 4 KB a rank
            return gather(self._line, maps, made, reverse)
        maps = maps.mT if reverse else maps
        return METHODS[self._line.method or self._chosen(made)](self._line, maps, made, reverse)

    def _chosen(self, made: Tensor) -> Method:
        rows, heads, key, value = made.shape
        return choose(self.pieces, self._line.per_node, rows * heads, key, value)


def shift(wire: Wire, x: Tensor, reverse: bool) -> Tensor:
    """x of the rank before (reverse: after) this one; zero on the first (reverse: last)."""
    source = wire.rank + (1 if reverse else -1)
    there = 0 <= source < wire.size
    if wire.size <= GATHERED:
        if not there:
            wire.gather(x.clone(), read=False)  # the caller may write to its own
            return torch.zeros_like(x)
        return wire.gather(x)[source].clone()  # the relay keeps it: not all ranks' with it
    found = (torch.empty_like if there else torch.zeros_like)(x, memory_format=torch.contiguous_format)
    wire.exchange(x, 2 * wire.rank - source, found, source)
    return found


def gather(line: Line, maps: Tensor, made: Tensor, reverse: bool) -> Tensor:
    start, rank = torch.zeros_like(made), line.whole.rank
    found = line.whole.gather(_join(maps, made), read=rank != (line.whole.size - 1 if reverse else 0))
    return start if found is None else _through(_before(found, rank, reverse), maps, start)


def hierarchical(line: Line, maps: Tensor, made: Tensor, reverse: bool) -> Tensor:
    """The chain over the nodes before this one, then over the ranks before this one in its node."""
    here = line.node.gather(_join(maps, made))
    node = compose(*_split(here.flip(0) if reverse else here, maps))
    nodes = line.across.gather(_join(*node))
    start = _through(_before(nodes, line.across.rank, reverse), maps, torch.zeros_like(made))
    return _through(_before(here, line.node.rank, reverse), maps, start)


def pipelined(line: Line, maps: Tensor, made: Tensor, reverse: bool) -> Tensor:
    """Columns of S do not depend on each other: a rank sends one block of them on while it receives the next."""
    wire, step = line.whole, -1 if reverse else 1
    give, arrived = None, []
    for block in made.chunk(blocks_of(made.shape[-1]), -1):
        take = torch.zeros_like(block, memory_format=torch.contiguous_format)
        wire.exchange(give, wire.rank + step, take, wire.rank - step)
        arrived.append(take)
        give = follow(maps, take, block)
    wire.exchange(give, wire.rank + step, None, wire.rank - step)
    return torch.cat(arrived, -1)


METHODS = {"gather": gather, "hierarchical": hierarchical, "pipelined": pipelined}


def _join(maps: Tensor, made: Tensor) -> Tensor:
    return torch.cat([maps if maps.dim() == made.dim() else maps[..., None], made], -1)


def _split(joined: Tensor, maps: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `_join` of several ranks' [P, ...]; maps: one rank's, for its shape."""
    columns = maps.shape[-1] if maps.dim() == joined.dim() - 1 else 1
    found, made = joined.split([columns, joined.shape[-1] - columns], -1)
    return (found if maps.dim() == joined.dim() - 1 else found[..., 0]), made


def _before(found: Tensor, rank: int, reverse: bool) -> Tensor:
    """Of [P, ...] those before `rank`, in the order in which they are passed."""
    return found[rank + 1 :].flip(0) if reverse else found[:rank]


def _through(joined: Tensor, maps: Tensor, start: Tensor) -> Tensor:
    return chain(*_split(joined, maps), start) if len(joined) else start


# ---- which way, by the model of docs/sequence.md ----


@dataclass(frozen=True)
class Network:
    """Seconds a call, bytes a second and rank, seconds a dependent product of maps. The figures and their sources: docs/sequence.md."""

    node_latency: float = 22e-6
    node_bandwidth: float = 295e9
    net_latency: float = 40e-6
    net_bandwidth: float = 50e9
    product: float = 15e-6


def blocks_of(value: int) -> int:
    """Blocks of value channels that are pipelined: 4 of at least 16 channels."""
    return max(1, min(4, value // 16))


def seconds(method: Method, ranks: int, per_node: int, states: int, key: int, value: int, network: Network) -> float:
    """Modelled time of carrying `states` (rows x heads) states [key, value] along a line of ranks."""
    n, message, state = min(ranks, per_node), 4 * states * key * (key + value), 4 * states * key * value
    nodes = -(-ranks // n)
    if method == "gather":
        outside = (ranks - n) / n * message / network.net_bandwidth + network.net_latency * (nodes > 1)
        return outside + network.node_latency + (ranks - 1) * (message / network.node_bandwidth + network.product)
    if method == "hierarchical":
        inside = network.node_latency + (n - 1) * (message / network.node_bandwidth + 3 * network.product)
        return inside + (nodes > 1) * (network.net_latency + (nodes - 1) * (message / network.net_bandwidth + network.product))
    latency, bandwidth = (network.node_latency, network.node_bandwidth) if nodes == 1 else (network.net_latency, network.net_bandwidth)
    blocks = blocks_of(value)
    return (ranks - 2 + blocks) * (latency + state / blocks / bandwidth + network.product)


def choose(ranks: int, per_node: int, states: int, key: int, value: int, network: Network = Network()) -> Method:
    """The fastest way to carry `states` (rows x heads) states [key, value] over `ranks` ranks, `per_node` of them on a node."""
    possible = [m for m in METHODS if m != "hierarchical" or _has_nodes(ranks, per_node)]
    return min(possible, key=lambda m: seconds(m, ranks, per_node, states, key, value, network))


def _has_nodes(ranks: int, per_node: int) -> bool:
    """Whether the ranks fill several nodes with several of them each."""
    return 1 < per_node < ranks and ranks % per_node == 0
