"""Run under torchrun by test_sequence.py: one mixer's convolution and recurrence, cut over 2, 3 and 4 ranks.

sequence_worker.py FOLDER     every rank writes what it found, {case: {name: its piece}}, to FOLDER/RANK.pt

A case is its key: recurrence, layout, which outputs the loss sees, ranks. `inputs` makes the same tensors everywhere; the test makes the
judge's from them too. For layouts too long for that judge, {(case, "by heads"): ...} is the same by another road: whole sequences on every
rank, heads cut instead, two all-to-alls. {(case, method): ...} has the state carried in each of the three ways.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from kernels import maps
from kernels.chunk import Preconditioner, delta_rule
from kernels.conv import short_conv
from kernels.maps import Piece
from kernels.recurrence import RECURRENCES
from pdn_train.sequence import AHEAD, METHODS, GroupWire, Line, connect, shift
from pdn_train.world import World

HEADS, SIZE, PAST = 4, 16, 3  # heads, channels of each, history of the convolution
# Rows, tokens of each, and where sequences start in the rows joined (None: at the rows). Of 24 tokens boundaries are 12 | 8 16 | 6 12 18
LAYOUTS = {
    "rows": (2, 24, None),
    "boundaries": (1, 24, (0, 8, 11, 13)),
    "over three ranks": (1, 24, (0, 2, 22)),
    "short documents in rows": (2, 24, (0, 5, 6, 7, 9, 10, 17, 24, 25, 42)),
}
LONG = {"long rows": (2, 240, None), "long documents": (2, 240, (0, 100, 240, 241, 420))}
LOSSES = ("all", "last", "states")  # outputs and final states; the last rank's outputs; the final states
Case = tuple[str, str, str, int]


def cases() -> list[Case]:
    few = product(RECURRENCES, ("rows", "over three ranks"), ("last", "states"), (3,))
    return [*product(RECURRENCES, LAYOUTS, ("all",), (2, 3, 4)), *few]


def long_cases() -> list[Case]:
    return list(product(("gdn", "pdn", "pkda"), LONG, ("all",), (2, 4)))


def node_cases() -> list[Case]:
    """As on two nodes of two ranks."""
    return list(product(("gdn", "pkda"), ("rows", "over three ranks"), ("all",), (4,)))


def layout_of(name: str) -> tuple[int, int, tuple[int, ...] | None]:
    return (LAYOUTS | LONG)[name]


def inputs(recurrence: str, layout: str) -> dict[str, Tensor]:
    """fp64 tensors [rows, T, ...] of a whole call, and the weights of its outputs in the loss."""
    rows, length, starts = layout_of(layout)
    generator = torch.Generator().manual_seed(sum(map(ord, recurrence + layout)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=generator)

    lead, width = (rows, length), HEADS * SIZE
    found = {"x": normal(*lead, 3 * width), "weight": normal(3 * width, PAST + 1), "beta": uniform(*lead, HEADS)}
    kind = RECURRENCES[recurrence]
    if kind.decay != "none":
        found["decay"] = -0.3 * uniform(*lead, HEADS, *([SIZE] if kind.decay == "channel" else []))
    if kind.preconditioner != "none":
        found |= {"p": -0.3 * uniform(*lead, HEADS), "c": uniform(*lead, HEADS), "m": normal(HEADS)}
    sequences = rows if starts is None else len(starts)
    return found | {"w_o": normal(*lead, HEADS, SIZE), "w_s": normal(sequences, HEADS, SIZE, SIZE), "w_a": normal(sequences, HEADS, SIZE)}


SHARED = ("weight", "m")  # without a time axis


def run(t: dict[str, Tensor], cu_seqlens: Tensor | None, backend: str, relay=None) -> tuple[Tensor, Tensor, Tensor | None]:
    """o, s, a of the convolution and the recurrence on [rows, T, ...], or with cu_seqlens on the rows joined."""
    if cu_seqlens is not None:
        t = {name: x if name in SHARED else x.flatten(0, 1)[None] for name, x in t.items()}
    x, past = (t["x"], None) if relay is None else maps.history(relay, t["x"].contiguous(), PAST, t["x"].shape[-1])
    mixed, _ = short_conv(x, t["weight"], past, cu_seqlens=cu_seqlens)
    q, k, v = (part.unflatten(-1, (-1, SIZE)) for part in mixed.chunk(3, -1))
    precond = Preconditioner(t["p"], t["c"], t["m"]) if "p" in t else None
    arguments = {"output_final_state": True, "cu_seqlens": cu_seqlens, "backend": backend}
    o, state = delta_rule(q, k, v, t["beta"], t.get("decay"), precond, relay=relay, **arguments)
    return o, state.s, state.a


def weighted(o: Tensor, s: Tensor, a: Tensor | None, w_o: Tensor, w_s: Tensor, w_a: Tensor) -> Tensor:
    """The loss: of this piece, or of the whole."""
    loss = (o.reshape(w_o.shape) * w_o).sum() + (s * w_s).sum()
    return loss if a is None else loss + (a * w_a).sum()


def seen(found: dict[str, Tensor], loss: str, length: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of a whole call's outputs that this loss sees."""
    w_o, w_s, w_a = (found[name].clone() for name in ("w_o", "w_s", "w_a"))
    if loss == "states":
        w_o.zero_()
    if loss == "last":
        w_s.zero_(), w_a.zero_(), w_o[:, : length - length // ranks].zero_()
    return w_o, w_s, w_a


def cut(x: Tensor, rank: int, ranks: int) -> Tensor:
    tokens = x.shape[1] // ranks
    return x[:, rank * tokens : (rank + 1) * tokens]


def ends_here(piece: Piece, layout: str, rank: int, ranks: int) -> list[tuple[int, int]]:
    """(number in the piece, number in the whole) of the sequences that end in it."""
    rows, length, starts = layout_of(layout)
    starts = tuple(range(0, rows * length, length)) if starts is None else starts
    tokens, found = length // ranks, []
    for number, end in enumerate(piece.bounds[1:]):
        row, place = divmod(end - 1, tokens)
        token = row * length + rank * tokens + place + 1  # after its last one, in the rows joined
        if token in starts or token % length == 0:
            found.append((number, max(n for n, start in enumerate(starts) if start < token)))
    return found


def on_one_rank(case: Case, line: Line) -> dict[str, Tensor]:
    """Outputs and gradients of this rank's piece in fp32; those of the shared parameters are its part of a sum."""
    recurrence, layout, loss, ranks = case
    rank, (rows, length, starts) = line.whole.rank, layout_of(layout)
    whole = inputs(recurrence, layout)
    piece = Piece.cut(length, rows, None if starts is None else torch.tensor(starts), rank, ranks)
    w_o, w_s, w_a = seen(whole, loss, length, ranks)
    t = {n: (x if n in SHARED else cut(x, rank, ranks)).float().requires_grad_() for n, x in whole.items() if not n.startswith("w_")}
    o, s, a = run(t, None if starts is None else torch.tensor(piece.bounds), "torch", line.relay(piece, torch.device("cpu")))
    here = ends_here(piece, layout, rank, ranks)
    of_s, of_a = (torch.zeros(piece.sequences, *w.shape[1:]) for w in (w_s, w_a))
    for number, n in here:
        of_s[number], of_a[number] = w_s[n], w_a[n]
    gradients = torch.autograd.grad(weighted(o, s, a, cut(w_o, rank, ranks).float(), of_s, of_a), list(t.values()))
    found = {"o": o.detach().reshape(cut(w_o, rank, ranks).shape)} | {f"d{n}": g for n, g in zip(t, gradients, strict=True)}
    return found | {f"s{n}": s[number].detach() for number, n in here}


class Swap(torch.autograd.Function):
    """All heads of a piece [rows, T / W, H, ...] for some heads of the whole [rows, T, H / W, ...], and back in the backward pass."""

    @staticmethod
    def forward(ctx, x, group, ranks):
        ctx.group, ctx.ranks = group, ranks
        return exchange(x, group, ranks, cut_axis=2, join_axis=1)

    @staticmethod
    def backward(ctx, gradient):
        return exchange(gradient, ctx.group, ctx.ranks, cut_axis=1, join_axis=2), None, None


def exchange(x: Tensor, group, ranks: int, cut_axis: int, join_axis: int) -> Tensor:
    give = torch.stack(x.chunk(ranks, cut_axis)).contiguous()
    take = torch.empty_like(give)
    dist.all_to_all_single(take, give, group=group)
    return torch.cat(take.unbind(), join_axis)


def by_heads(case: Case, group, rank: int) -> dict[str, Tensor]:
    """`on_one_rank` by all-to-all; without final states."""
    recurrence, layout, _, ranks = case
    rows, length, starts = layout_of(layout)
    whole = inputs(recurrence, layout)
    t = {n: (x if n in SHARED else cut(x, rank, ranks)).float().requires_grad_() for n, x in whole.items() if not n.startswith("w_")}
    mine = slice(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
    local = {name: Swap.apply(x, group, ranks) for name, x in t.items() if name not in ("x", *SHARED)}
    x = Swap.apply(t["x"].unflatten(-1, (3, HEADS, SIZE)).transpose(2, 3), group, ranks)  # [rows, T, H / W, 3, SIZE]
    local["x"] = x.transpose(2, 3).flatten(2)
    local["weight"] = t["weight"].unflatten(0, (3, HEADS, SIZE))[:, mine].flatten(0, 2)
    local |= {"m": t["m"][mine]} if "m" in t else {}
    o, s, a = run(local, None if starts is None else torch.tensor([*starts, rows * length]), "torch")
    w_o, w_s, w_a = (w.float() for w in seen(whole, "all", length, ranks))
    w_o, w_s, w_a = w_o[:, :, mine], w_s[:, mine], w_a[:, mine]
    gradients = torch.autograd.grad(weighted(o, s, a, w_o, w_s, w_a), list(t.values()))
    back = exchange(o.detach().reshape(w_o.shape), group, ranks, cut_axis=1, join_axis=2)
    return {"o": back} | {f"d{n}": g for n, g in zip(t, gradients, strict=True)}


def ahead(wire: GroupWire) -> list[Tensor]:
    """What rank 1 is handed after rank 0 has made all its calls and written to its tensor again."""
    x, word = torch.zeros(2, 3), torch.zeros(1)
    if wire.rank == 1:
        dist.recv(word, 0)
    arrived = []
    for n in range(AHEAD):
        x.fill_(n)
        arrived.append(shift(wire, x, reverse=False).clone())
    if wire.rank == 0:
        x.fill_(-1)
        dist.send(word, 1)
    return arrived


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in (2, 3, 4)}
    lines = {ranks: Line(GroupWire(group), ranks) for ranks, group in groups.items() if rank < ranks}
    found = {}
    for case in cases() + long_cases():
        if case[-1] in lines:
            found[case] = on_one_rank(case, lines[case[-1]])
    for case in long_cases():
        if case[-1] in lines:
            found[case, "by heads"] = by_heads(case, groups[case[-1]], rank)
    nodes = connect(World(rank, rank % 2, 4, 4, torch.device("cpu"), local_size=2), 60)
    for case, method in product(node_cases(), METHODS):
        found[case, method] = on_one_rank(case, replace(nodes, method=method))
    if rank < 2:
        found["ahead"] = ahead(lines[2].whole)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
