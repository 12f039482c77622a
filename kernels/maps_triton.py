"""What a `Relay` is handed and brings between the Triton stages: the maps of this piece of the sequences, made by the stages themselves.

As `kernels.maps` says: the statistic forward, then the state; the state backward, then the statistic. A piece that is cut again, to fill
the card (`kernels.pieces`), has the maps of its own pieces already, and chains them. Cost where it is not: forward a scan without outputs,
on all pieces but the last, and M, on those that something passes through; backward a reverse scan without outputs, on all but the first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import pieces, scan, scan_backward, statistic
from kernels.launch import aligned
from kernels.layout import Inputs, Layout, Solved
from kernels.maps import Relay, kept


def statistic_forward(relay: Relay, x: Inputs, layout: Layout) -> tuple[Tensor, Tensor, Tensor | None]:
    """`statistic.forward` from what arrives, and the factors [R, H] for `statistic_gradient`; None where nothing passes through a piece."""
    own, starts, ends = statistic.sums(x, layout), None, None
    if relay.hands_on:
        starts, ends = statistic.chain(x, layout, own, None)

    def make() -> tuple[Tensor | None, Tensor]:
        kept_here = kept(relay, x.forget) if relay.chains else None
        return kept_here, _zeros(relay, x, None) if ends is None else relay.left(ends)

    arriving, passed = relay.forth("statistic", make)
    if relay.number > 0:
        starts, ends = statistic.chain(x, layout, own, aligned(relay.enter(arriving)))
    return starts, ends, passed


def statistic_gradient(relay: Relay, passed: Tensor | None, da: Tensor | None, da_0: Tensor) -> Tensor | None:
    """The whole gradient of the statistics that the sequences end with, [S, H, K]: da of this piece, and what the later ones give; on the
    last piece da itself. da_0: what this piece gives to the statistics that it meets."""
    given = relay.back(passed, relay.met(da_0))
    return aligned(relay.add_left(da, given)) if relay.hands_on else da


def state_arriving(
    relay: Relay, x: Inputs, solved: Solved, layout: Layout, maps: Tensor | None, ends: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """What the sequences start from [S, H, K, V], and the matrices [R, H, K, K] for `state_gradient`. Of a layout that is cut, maps: those
    of its spans; ends: what this piece's sequences make of zero, where it hands on."""
    arriving, passed = relay.forth("state", lambda: _maps(relay, x, solved, layout, maps, ends))
    return aligned(relay.enter(arriving)), passed


def _maps(
    relay: Relay, x: Inputs, solved: Solved, layout: Layout, maps: Tensor | None, ends: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """The state's map of each row: its matrix (None where none is chained) and what it makes of zero; zeros where nobody asks."""
    rows, K, V = relay.left(layout.sequences), x.k.shape[-1], x.v.shape[-1]
    if not relay.hands_on:
        ends = _zeros(relay, x, V)
    else:
        ends = relay.left(ends) if layout.cut else scan.ends(x, solved, rows)
    if not relay.chains:
        return None, ends
    if not relay.passes_through:
        return _zeros(relay, x, K), ends
    return relay.left(pieces.compose(x, layout, maps)) if layout.cut else scan.maps(x, solved, rows), ends


def state_gradient(
    relay: Relay, x: Inputs, solved: Solved, layout: Layout, met: Tensor | None, passed: Tensor | None, do: Tensor, ds: Tensor | None
) -> Tensor | None:
    """The whole gradient of the states that the sequences end with, [S, H, K, V]: ds of this piece, and what the later ones give; on the
    last piece ds itself. met: of a layout that is cut, what ds and do give to the states that are met; nobody asks the first piece."""
    if relay.number == 0:
        met = _zeros(relay, x, x.v.shape[-1])
    elif layout.cut:
        met = relay.met(met)
    else:
        own = None if ds is None else aligned(relay.met(ds))
        *_, met = scan_backward.backward(x, solved, layout, relay.met(layout.sequences), do, own, store=False)
    given = relay.back(passed, met)
    return aligned(relay.add_left(ds, given)) if relay.hands_on else ds


def _zeros(relay: Relay, x: Inputs, columns: int | None) -> Tensor:
    """[R, H, K] or [R, H, K, columns]."""
    _, H, K = x.k.shape
    size = (relay.piece.rows, H, K) if columns is None else (relay.piece.rows, H, K, columns)
    return torch.zeros(size, dtype=torch.float32, device=x.k.device)
