"""One sequence in pieces, joined by a relay: outputs, states and gradients are those of the whole. In one process, piece after piece.

Nothing arrives at a piece that is not handed on by an earlier one, nor backward by a later one, so the pieces can take turns.
"""

import pytest
import torch

from kernels import layout, maps
from kernels.conv import short_conv
from kernels.maps import Piece, Relay, follow
from kernels.tables import Tables

CUDA = torch.cuda.is_available()


class InTurn(Relay):
    """What each call hands on lies on a desk, {(reverse, number of the call): {piece: (maps, made)}}."""

    def __init__(self, piece, number, pieces, device, desk):
        super().__init__(piece, number, pieces, device)
        self.desk, self.calls = desk, {False: 0, True: 0}

    def carry(self, maps, made, reverse=False):
        place = self.desk.setdefault((reverse, self.calls[reverse]), {})
        self.calls[reverse] += 1
        place[self.number] = (maps, made)
        x = torch.zeros_like(made)
        for other in reversed(range(self.number + 1, self.pieces)) if reverse else range(self.number):
            m, b = place[other]
            if m is None:
                x = b
            else:
                x = follow(m.mT if reverse and m.dim() == b.dim() else m, x, b)
        return x


def cut(case, pieces):
    """The pieces of a case's rows."""
    rows, length = case.tensors["q"].shape[:2]
    starts = None if case.cu_seqlens is None else case.cu_seqlens[:-1]
    return [Piece.cut(length, rows, starts, number, pieces) for number in range(pieces)]


def in_pieces(case, pieces, backend, dtype=torch.float64, device="cpu"):
    """`Case.run` with every sequence cut into pieces."""
    t = {n: x.to(device, dtype).requires_grad_() for n, x in case.tensors.items()}
    length, desk, outputs, losses = t["q"].shape[1] // pieces, {}, [], []
    states = {
        n: torch.zeros_like(w, device=device, dtype=torch.promote_types(dtype, torch.float32)) for n, w in case.weights.items() if n != "o"
    }
    for number, piece in enumerate(cut(case, pieces)):
        span = slice(number * length, (number + 1) * length)
        mine = {n: x if n == "m" else x[:, span] for n, x in t.items()}
        relay = InTurn(piece, number, pieces, torch.device(device), desk)
        cu_seqlens = None if case.cu_seqlens is None else torch.tensor(piece.bounds)
        o, (s, a) = case.call(mine, backend, cu_seqlens=cu_seqlens, relay=relay)
        ends = torch.arange(len(s)) if cu_seqlens is None else torch.searchsorted(case.cu_seqlens, cu_seqlens[1:] + span.start) - 1
        last = number == pieces - 1 if cu_seqlens is None else torch.isin(cu_seqlens[1:] + span.start, case.cu_seqlens)
        loss = (o.double() * case.weights["o"][:, span].to(device)).sum()
        for name, x in (("s", s), ("a", a)):
            for n, end in enumerate(ends.tolist()):
                if x is not None and (last if isinstance(last, bool) else last[n]):
                    states[name][end] = x[n].detach()
                    loss = loss + (x[n].double() * case.weights[name][end].to(device)).sum()
        outputs.append(o.detach())
        losses.append(loss)
    gradients = {n: torch.zeros_like(x) for n, x in t.items()}
    for loss in reversed(losses):
        for name, g in zip(t, torch.autograd.grad(loss, list(t.values())), strict=True):
            gradients[name] += g
    found = {"o": torch.cat(outputs, 1), "s": states["s"]} | ({"a": states["a"]} if "p" in t else {})
    return found | {f"d{n}": g for n, g in gradients.items()}


BOUNDS = [None, [0, 12, 24], [0, 8, 11, 13, 24], [0, 2, 23, 24], [0, 5, 6, 7, 9, 10, 24]]


@pytest.mark.parametrize("pieces", [2, 4, 6])
@pytest.mark.parametrize("bounds", BOUNDS)
def test_pieces_are_the_whole(name, bounds, pieces, case, assert_close):
    whole = case(name, 24, bounds=bounds, state=False)
    assert_close(in_pieces(whole, pieces, "torch"), whole.run("reference"), 1e-10)


@pytest.mark.parametrize("name, heads, bounds", [("pgdn", 2, [0, 2, 23, 24]), ("kda", 1, None)])
def test_triton_in_pieces(name, heads, bounds, case, assert_close):
    whole = case(name, 24, B=1, H=heads, K=16, V=16, bounds=bounds, state=False).rounded(torch.float32)
    assert_close(in_pieces(whole, 3, "triton", torch.float32, "cuda" if CUDA else "cpu"), whole.run("reference"), 1e-5)


@pytest.mark.parametrize("bounds", [None, [0, 75, 80, 90, 100, 120, 210]])
def test_triton_in_pieces_of_which_some_are_cut_again(bounds, case, assert_close, monkeypatch):
    """Each piece's scans run over pieces of its own where it is one of few sequences: all three, or the first and the last."""
    monkeypatch.setattr(layout, "LONG", 2)
    monkeypatch.setattr(layout, "PROGRAMS", 9)
    monkeypatch.setattr(layout, "_tables", Tables())
    whole = case("pgdn", 210, B=1, H=1, K=16, V=16, bounds=bounds, state=False, gates=0.05).rounded(torch.float32)
    got = in_pieces(whole, 3, "triton", torch.float32, "cuda" if CUDA else "cpu")
    cut = [table.cut for table in layout._tables.kept.values()]
    assert any(cut) and all(cut) == (bounds is None)
    assert_close(got, whole.run("reference"), 1e-5)


def test_a_line_of_one_piece(case, assert_close):
    """Nothing arrives and nothing is handed on."""
    whole = case("pgdn", 24, B=1, H=1, K=16, V=16, state=False).rounded(torch.float32)
    assert_close(in_pieces(whole, 1, "triton", torch.float32, "cuda" if CUDA else "cpu"), whole.run("reference"), 1e-5)


@pytest.mark.skipif(not CUDA, reason="the sizes of a GPU")
@pytest.mark.parametrize("pieces", [2, 3])
@pytest.mark.parametrize("bounds", [None, [0, 3000, 6145, 6146, 12288]])
def test_triton_in_pieces_that_are_cut_again(name, bounds, pieces, case, assert_close):
    """12,288 tokens: each piece's scans run over pieces of its own."""
    whole = case(name, 12288, B=1, H=3, K=128, V=128, bounds=bounds, state=False, gates=0.05).rounded(torch.float32)
    judge = {n: x.cpu() for n, x in whole.run("torch", device="cuda").items()}
    assert_close(in_pieces(whole, pieces, "triton", torch.float32, "cuda"), judge, 1e-5)


@pytest.mark.skipif(not CUDA, reason="16 bit, which the interpreter does not compute as a GPU does")
@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_triton_in_pieces_in_16_bit(name, case, assert_close):
    whole = case(name, 12288, B=1, H=3, K=128, V=128, state=False, gates=0.05).rounded(torch.bfloat16)
    judge = {n: x.cpu() for n, x in whole.run("torch", device="cuda").items()}
    assert_close(in_pieces(whole, 3, "triton", torch.bfloat16, "cuda"), judge, 1e-2, states=5e-3)


@pytest.mark.parametrize("starts", [None, [0, 12], [0, 11, 13], [0, 7, 8, 9, 23]])
@pytest.mark.parametrize("pieces", [2, 3, 4])
def test_the_convolution_has_its_history(starts, pieces):
    generator = torch.Generator().manual_seed(0)
    x, weight, seen = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((1, 24, 7), (5, 4), (1, 24, 5)))
    x.requires_grad_()
    cu_seqlens = None if starts is None else torch.tensor([*starts, 24])
    wanted = short_conv(x[..., :5], weight, cu_seqlens=cu_seqlens)[0]
    (gradient,) = torch.autograd.grad((wanted * seen).sum(), x)
    desk, found, length = {}, [], 24 // pieces
    for number in range(pieces):
        piece = Piece.cut(24, 1, None if starts is None else torch.tensor(starts), number, pieces)
        mine = x[:, number * length : (number + 1) * length]
        wide, past = maps.history(InTurn(piece, number, pieces, torch.device("cpu"), desk), mine.contiguous(), 3, 5)
        found.append(short_conv(wide[..., :5], weight, past, cu_seqlens=None if starts is None else torch.tensor(piece.bounds))[0])
    assert torch.allclose(torch.cat(found, 1), wanted, atol=1e-12)
    told = sum(torch.autograd.grad((found[n] * seen[:, n * length : (n + 1) * length]).sum(), x)[0] for n in reversed(range(pieces)))
    assert torch.allclose(told, gradient, atol=1e-12)


def relay(pieces=2, number=0, rows=1, length=8, starts=None):
    return InTurn(Piece.cut(length, rows, starts, number, pieces), number, pieces, torch.device("cpu"), {})


def test_what_cannot_be_is_named(case):
    whole = case("gdn", 8, B=1, H=1, K=16, V=16)
    t = {n: x[:, :4] if x.dim() > 1 and n not in ("s", "a") else x for n, x in whole.tensors.items()}
    with pytest.raises(ValueError, match="relay and initial_state are both given"):
        whole.call(t, "torch", relay=relay())
    del t["s"]
    with pytest.raises(ValueError, match="backend='reference' takes whole sequences"):
        whole.call(t, "reference", relay=relay())
    with pytest.raises(ValueError, match=r"sequences that start at \(0, 3, 4\) and q, cu_seqlens for \(0, 4\)"):
        whole.call(t, "torch", relay=relay(starts=torch.tensor([0, 3])))
    with pytest.raises(ValueError, match="3 pieces do not divide the 8 tokens"):
        relay(pieces=3)
    with pytest.raises(ValueError, match="a piece of 2 tokens is shorter than the convolution's history of 3"):
        maps.history(relay(pieces=4), torch.zeros(1, 2, 5), 3, 5)
