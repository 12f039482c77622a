"""Run under torchrun by test_sequence.py: one mixer's convolution and recurrence, cut over 2, 3 and 4 ranks.

sequence_worker.py FOLDER BACKEND     every rank writes what it found, {case: {name: its piece}}, to FOLDER/RANK.pt

A case is its key: recurrence, layout, which outputs the loss sees, ranks. `inputs` makes the same tensors everywhere; the test makes the
judge's from them too.
"""

from __future__ import annotations

import sys
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
from pdn_train.sequence import GroupWire, Line, LineRelay

LENGTH, HEADS, SIZE, PAST = 24, 4, 16, 3  # tokens of a row, heads, channels of each, history of the convolution
# Rows, and where sequences start in the rows joined (None: at the rows). Ranks' boundaries are 12 | 8 16 | 6 12 18
LAYOUTS = {
    "rows": (2, None),
    "on a boundary": (1, (0, 12)),
    "on two boundaries": (1, (0, 8, 16)),
    "before and after": (1, (0, 11, 13)),
    "over three ranks": (1, (0, 2, 22)),
    "short": (1, (0, 5, 6, 7, 9, 10, 17, 18, 19)),
    "rows of documents": (2, (0, 7, 24, 25, 42)),
}
LOSSES = ("all", "last", "states")  # outputs and final states; the last rank's outputs; the final states
Case = tuple[str, str, str, int]


def cases() -> list[Case]:
    few = product(RECURRENCES, ("rows", "over three ranks"), ("last", "states"), (2, 3, 4))
    return [*product(RECURRENCES, LAYOUTS, ("all",), (2, 3, 4)), *few]


def inputs(recurrence: str, layout: str) -> dict[str, Tensor]:
    """fp64 tensors [rows, T, ...] of a whole call, and the weights of its outputs in the loss."""
    rows, starts = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(sum(map(ord, recurrence + layout)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=generator)

    lead, width = (rows, LENGTH), HEADS * SIZE
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
    past = None if relay is None else maps.history(relay, t["x"], PAST)
    mixed, _ = short_conv(t["x"], t["weight"], past, cu_seqlens=cu_seqlens)
    q, k, v = (part.unflatten(-1, (HEADS, SIZE)) for part in mixed.chunk(3, -1))
    precond = Preconditioner(t["p"], t["c"], t["m"]) if "p" in t else None
    arguments = {"output_final_state": True, "cu_seqlens": cu_seqlens, "backend": backend}
    o, state = delta_rule(q, k, v, t["beta"], t.get("decay"), precond, relay=relay, **arguments)
    return o, state.s, state.a


def weighted(o: Tensor, s: Tensor, a: Tensor | None, w_o: Tensor, w_s: Tensor, w_a: Tensor) -> Tensor:
    """The loss: of this piece, or of the whole."""
    loss = (o.reshape(w_o.shape) * w_o).sum() + (s * w_s).sum()
    return loss if a is None else loss + (a * w_a).sum()


def seen(found: dict[str, Tensor], loss: str, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of a whole call's outputs that this loss sees."""
    w_o, w_s, w_a = (found[name].clone() for name in ("w_o", "w_s", "w_a"))
    if loss == "states":
        w_o.zero_()
    if loss == "last":
        w_s.zero_(), w_a.zero_(), w_o[:, : LENGTH - LENGTH // ranks].zero_()
    return w_o, w_s, w_a


def cut(x: Tensor, rank: int, ranks: int) -> Tensor:
    return x[:, rank * LENGTH // ranks : (rank + 1) * LENGTH // ranks]


def ends_here(piece: Piece, layout: str, rank: int, ranks: int) -> list[tuple[int, int]]:
    """(number in the piece, number in the whole) of the sequences that end in it."""
    rows, starts = LAYOUTS[layout]
    starts = tuple(range(0, rows * LENGTH, LENGTH)) if starts is None else starts
    tokens, found = LENGTH // ranks, []
    for number, end in enumerate(piece.bounds[1:]):
        row, place = divmod(end - 1, tokens)
        token = row * LENGTH + rank * tokens + place + 1  # after its last one, in the rows joined
        if token in starts or token % LENGTH == 0:
            found.append((number, max(n for n, start in enumerate(starts) if start < token)))
    return found


def on_one_rank(case: Case, line: Line, backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Outputs and gradients of this rank's piece; those of the shared parameters are its part of a sum."""
    recurrence, layout, loss, ranks = case
    rank, (rows, starts) = line.whole.rank, LAYOUTS[layout]
    whole = inputs(recurrence, layout)
    piece = Piece.cut(LENGTH, rows, None if starts is None else torch.tensor(starts), rank, ranks)
    w_o, w_s, w_a = seen(whole, loss, ranks)
    t = {n: (x if n in SHARED else cut(x, rank, ranks)).to(dtype).clone() for n, x in whole.items() if not n.startswith("w_")}
    t = {name: x.requires_grad_() for name, x in t.items()}
    cu_seqlens = None if starts is None else torch.tensor(piece.bounds)
    relay = LineRelay(line, piece, torch.device("cpu"))
    o, s, a = run(t, cu_seqlens, backend, relay)
    here = ends_here(piece, layout, rank, ranks)
    mine = torch.zeros(piece.sequences, *w_s.shape[1:], dtype=dtype), torch.zeros(piece.sequences, *w_a.shape[1:], dtype=dtype)
    for number, n in here:
        mine[0][number], mine[1][number] = w_s[n], w_a[n]
    gradients = torch.autograd.grad(weighted(o, s, a, cut(w_o, rank, ranks).to(dtype), *mine), list(t.values()))
    found = {"o": o.detach().reshape(cut(w_o, rank, ranks).shape)} | {f"d{n}": g for n, g in zip(t, gradients, strict=True)}
    return found | {f"s{n}": s[number].detach() for number, n in here}


def main(folder: str, backend: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in (2, 3, 4)}
    lines = {ranks: Line(GroupWire(group), ranks) for ranks, group in groups.items() if rank < ranks}
    found = {}
    for case in cases():
        if case[-1] in lines:
            found[case] = on_one_rank(case, lines[case[-1]], backend, torch.float32)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
