"""The Triton backend against the token-by-token fp64 reference: outputs, states, every gradient.

Without a GPU in Triton's interpreter, in fp32 and at small shapes, since a program takes milliseconds there; with one on it. fp32 has
chunks of 32 rows, so the lengths are chosen round 32; 16-bit inputs, with chunks of 64, are tested on the GPU (`test_triton_cuda.py`).
"""

import os
import random
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from kernels import decode, layout, statistic, statistic_backward  # noqa: E402
from kernels.chunk import Preconditioner, State  # noqa: E402
from kernels.chunk_triton import Call  # noqa: E402
from kernels.layout import Inputs  # noqa: E402
from kernels.tables import Tables  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
TOLERANCE = 1e-5
NAMES = ["dn", "gdn", "pdn", "pgdn"]
PACKED = [0, 0, 1, 34, 34, 35, 99, 99]  # empty first, middle and last; one token twice; 33 and 64 tokens


def run(one):
    return one.run("triton", torch.float32, DEVICE)


@pytest.mark.parametrize("name, T", [("dn", 33), ("gdn", 1), ("pdn", 32), ("pgdn", 65)])
def test_outputs_states_and_gradients(name, T, case, assert_close):
    one = case(name, T, B=2, H=1, K=16, V=16).rounded(torch.float32)
    assert_close(run(one), one.run("reference"), TOLERANCE)


@pytest.mark.parametrize("name", ["gdn", "pdn"])
def test_packed(name, case, assert_close):
    one = case(name, PACKED[-1], bounds=PACKED, H=2, K=16, V=24).rounded(torch.float32)
    got = run(one)
    assert_close(got, one.run("reference"), TOLERANCE)
    for empty in (0, 3, 6):  # state and gradient are handed through
        assert torch.equal(got["s"][empty].cpu(), one.tensors["s"][empty].float())
        assert torch.equal(got["ds"][empty].cpu(), one.weights["s"][empty].float())


@pytest.mark.parametrize("K, V", [(30, 21), (96, 16), (120, 16), (16, 100), (144, 16)])
def test_head_sizes(K, V, case, assert_close):
    """Odd ones, padded to whole 16 bytes; ones that are no power of two; more than 128, in chunks of 16 rows."""
    one = case("pgdn", 20, B=1, H=2, K=K, V=V).rounded(torch.float32)
    assert_close(run(one), one.run("reference"), TOLERANCE)


def test_chunks_of_64_rows(case, assert_close, monkeypatch):
    """The height that 16-bit inputs have."""
    monkeypatch.setattr("kernels.chunk_triton.chunk_rows", lambda k: 64)
    one = case("pgdn", 70, B=1, H=1, K=16, V=16).rounded(torch.float32)
    assert_close(run(one), one.run("reference"), TOLERANCE)


@pytest.mark.parametrize("name, bounds", [("pgdn", None), ("dn", [0, 0, 70, 71, 130, 130])])
def test_long_sequences_in_pieces(name, bounds, case, assert_close, monkeypatch):
    """Scans over pieces of one chunk, chained, are the scan of the whole: outputs, states, gradients."""
    monkeypatch.setattr(layout, "LONG", 2)
    monkeypatch.setattr(layout, "_tables", Tables())
    one = case(name, 130, B=1, H=1, K=16, V=16, bounds=bounds).rounded(torch.float32)
    got = run(one)
    assert next(iter(layout._tables.kept.values())).cut
    assert_close(got, one.run("reference"), TOLERANCE)


def test_long_sequences_of_wide_heads(case, assert_close, monkeypatch):
    """More than 128 key channels: the maps of the pieces come in parts."""
    monkeypatch.setattr(layout, "LONG", 2)
    monkeypatch.setattr(layout, "_tables", Tables())
    one = case("pgdn", 40, B=1, H=1, K=144, V=16).rounded(torch.float32)
    got = run(one)
    assert next(iter(layout._tables.kept.values())).cut
    assert_close(got, one.run("reference"), TOLERANCE)


@pytest.mark.parametrize("long", [2, 64], ids=["cut", "whole"])
def test_the_statistic_over_many_chunks(long, case, assert_close, monkeypatch):
    """More than the chain takes at once, forward and backward, from and to given states."""
    monkeypatch.setattr(layout, "LONG", long)
    monkeypatch.setattr(layout, "_tables", Tables())
    for name in ("STEP", "LONG_STEP"):
        monkeypatch.setattr(statistic, name, 2)
    one = case("pdn", 106, bounds=[0, 0, 72, 73, 106], H=1, K=16, V=16).rounded(torch.float32)
    assert_close(run(one), one.run("reference"), TOLERANCE)


def test_spans_fill_the_card_once():
    """Random lengths: cut where three spans a sequence find room, never into more programs than the card takes, every chunk once."""
    draw = random.Random(0)
    for _ in range(500):
        heads = draw.randint(1, 64)
        bounds = (0, *accumulate(draw.choice((0, 1, 64, 5000, draw.randint(1, 200_000))) for _ in range(draw.randint(1, 9))))
        sequences = [0 if a == b else -(-(b - a) // 64) for a, b in pairwise(bounds)]
        made = layout._build(bounds, 64, heads, torch.device("cpu"))
        few = len(sequences) * heads <= layout.PROGRAMS // 3 and max(sequences) >= layout.LONG
        assert made.cut == few
        if few:
            assert len(made.spans) * heads <= layout.PROGRAMS and made.spans[:, 1].sum() == sum(sequences)
            longest = sequences.index(max(sequences))
            assert made.pieces[longest, 1] >= 3
            assert made.spans[:, 3].sum() == bounds[-1]


def over_time(x, like):
    return x.view(1, -1, 1).expand_as(like)


GATES = {
    "zero": torch.zeros_like,
    "strong": lambda g: torch.full_like(g, -30),
    "alternating": lambda g: over_time(-30.0 * (torch.arange(g.shape[1]) % 2), g).to(g),
    "weak after strong": lambda g: torch.where(over_time(torch.arange(g.shape[1]) % 32 < 16, g), g - 30, g / 100),
}


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("gate", ["decay", "p"])
def test_extreme_gates(gate, gates, case, assert_close):
    """fla-org/flash-linear-attention#389; differences of long sums would lose weak gates behind strong ones."""
    one = case("pgdn", 66, B=1, H=1, K=16, V=16)
    one = one.with_(**{gate: GATES[gates](one.tensors[gate])}).rounded(torch.float32)
    assert_close(run(one), one.run("reference"), TOLERANCE)


def test_infinite_decay_forgets_without_nan(case):
    one = case("pgdn", 40, B=1, H=1, K=16, V=16)
    closed = {n: one.tensors[n].clone().index_fill_(1, torch.tensor([20, 32]), -torch.inf) for n in ("decay", "p")}
    assert all(x.isfinite().all() for x in run(one.with_(**closed)).values())


def inside(x, poison):
    """x as a view into a larger buffer, with poison before and after along every axis."""
    buffer = torch.full([n + 2 for n in x.shape], poison, dtype=x.dtype, device=x.device)
    return buffer[tuple(slice(1, -1) for _ in x.shape)].copy_(x)


def test_poison_round_the_inputs(case):
    """Views inside buffers full of NaN or 1e4 give the values of plain tensors, bit for bit (fla-org/flash-linear-attention#1142)."""
    one = case("pgdn", 33, B=1, H=2, K=24, V=24)
    plain = run(one)
    for poison in (torch.nan, 1e4):
        views = one.run("triton", torch.float32, DEVICE, place=lambda x, p=poison: inside(x, p))
        assert all(torch.equal(plain[n], views[n]) for n in plain)


def test_views_of_a_fused_projection_are_not_copied(case):
    from kernels.chunk_triton import _rows

    fused = torch.randn(2, 5, 3 * 4 * 16, device=DEVICE)
    for part in fused.view(2, 5, 3, 4, 16).unbind(2):
        assert _rows(part).data_ptr() == part.data_ptr() and torch.equal(_rows(part), part.flatten(0, 1))
    assert torch.equal(_rows(fused.view(2, 5, 12, 16).transpose(1, 2)), fused.view(2, 5, 12, 16).transpose(1, 2).flatten(0, 1))


def test_parts_of_a_fused_projection(case):
    """q, k and v as a third each of a buffer that is NaN elsewhere give the values of plain tensors, bit for bit."""

    def third(x):
        if x.dim() != 4:
            return x.clone()
        fused = x.new_full((*x.shape[:2], 3, *x.shape[2:]), torch.nan)
        fused[:, :, 1] = x
        return fused[:, :, 1]

    one = case("pdn", 12, B=2, H=2, K=16, V=16, state=False)
    plain, parts = run(one), one.run("triton", torch.float32, DEVICE, place=third)
    assert all(torch.equal(plain[n], parts[n]) for n in plain)


@pytest.mark.parametrize("size, normalize", [(0.25, False), (1e-3, True)])
def test_size_of_the_keys(size, normalize, case, assert_close):
    """Not normalised; and so small that the norm's epsilon counts."""
    one = replace(case("pdn", 12, B=1, H=1, K=16, V=16), normalize=normalize)
    one = one.with_(k=one.tensors["k"] * size).rounded(torch.float32)
    assert_close(run(one), one.run("reference"), TOLERANCE)


@pytest.mark.parametrize("name", ["pgdn", "pkda"])
@pytest.mark.parametrize("t", [0, 20, 32])
def test_causality(t, name, case):
    """Whatever token t holds, gates included, no bit before it changes."""
    one = case(name, 40, B=1, H=1, K=16, V=16)
    changed = {n: x.clone() for n, x in one.tensors.items() if n not in ("s", "a", "m")}
    for x in changed.values():
        x[:, t] = x[:, t] / 2 + x[:, t - 1] / 4
    before, after = (run(c)["o"] for c in (one, one.with_(**changed)))
    assert torch.equal(after[:, :t], before[:, :t])
    assert not torch.allclose(before[:, t:], after[:, t:], rtol=0, atol=1e-3)


def test_a_neighbour_full_of_nan_changes_nothing(case):
    one = case("pgdn", 50, bounds=[0, 20, 30, 50], H=1, K=16, V=16)
    whole = run(one)
    poisoned = {n: one.tensors[n].index_fill(1, torch.arange(20, 30), torch.nan) for n in ("q", "k", "v", "beta", "decay", "p", "c")}
    got = run(one.with_(**poisoned))
    for n in ("o", "dq", "dk", "dv", "dbeta", "ddecay", "dp", "dc"):
        assert got[n][:, 20:30].isnan().any(), n
        for part in (slice(0, 20), slice(30, 50)):
            assert torch.equal(got[n][:, part], whole[n][:, part]), n
    for n in ("s", "a", "ds", "da"):  # of the sequences beside it
        assert torch.equal(got[n][::2], whole[n][::2]), n


def test_statistic_counts_past_256():
    """400 identical unit keys with gain 1 sum to 400."""
    T, K = 400, 16
    x = torch.zeros(1, T, 1, K, device=DEVICE)
    x[..., 3] = 1
    gates = torch.ones(1, T, 1, device=DEVICE)
    from kernels.chunk import delta_rule

    precond = Preconditioner(gates * 0, gates, torch.zeros(1, device=DEVICE))
    _, state = delta_rule(x, x, x, gates, precond=precond, normalize_qk=False, output_final_state=True)
    assert state.a[0, 0, 3] == T and state.a.sum() == T


def test_statistic_forgets_weakly_over_many_chunks():
    """exp(p) rounds near 1, in one direction for a constant p: as a factor a token it would lose 1e-5 over these 1,024."""
    T, K = 1024, 16
    k, c, p = torch.randn(T, 1, K), torch.rand(T, 1), torch.full((T, 1), -2.9e-8)
    q, k_, v, beta, forget, gain, center = (y.to(DEVICE) for y in (k, k, k, c, p, c, torch.zeros(1)))
    x = Inputs(q, k_, v, beta, None, forget, gain, center, 0.4, 1e-6, 1.0, False)
    _, a = statistic.forward(x, layout._build((0, T), 32, 1, torch.device(DEVICE)), None)
    P = p.double().cumsum(0)
    judge = (((P[-1] - P).exp() * c.double())[..., None] * k.double().square()).sum(0)
    assert (a[0].cpu() - judge).norm() / judge.norm() < 2e-6


def test_centers_of_more_chunks_than_are_added_at_once():
    centers, total = torch.ones(2 * 257, device=DEVICE), torch.full((2,), torch.nan, device=DEVICE)
    for head in range(2):
        statistic_backward._add_up[(1,)](centers, total, head, 257, 2)
    assert total.tolist() == [257, 257]


def test_identical_keys_are_solved_without_loss(case, assert_close):
    """The inverse of I + L with every entry of L near beta: powers of L overflow, blocks do not."""
    one = case("pgdn", 64, B=1, H=1, K=16, V=16, state=False)
    k = one.tensors["k"][:, :1].expand_as(one.tensors["k"]) + 1e-3 * one.tensors["k"]
    one = one.with_(k=k, beta=torch.ones_like(one.tensors["beta"]), decay=one.tensors["decay"] * 0).rounded(torch.float32)
    assert_close(run(one), one.run("reference"), 1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_token_of_decoding_is_a_token_of_the_reference(name, case, assert_close):
    one = case(name, 3, B=2, H=2, K=20, V=40).rounded(torch.float32)
    t = {n: x.to(DEVICE, torch.float32) for n, x in one.tensors.items()}
    state = State(t["s"], t.get("a"))
    outputs = []
    for i in range(3):
        row = {n: x[:, i] for n, x in t.items() if n not in ("s", "a", "m")}
        precond = Preconditioner(row["p"], row["c"], t["m"]) if "p" in t else None
        outputs.append(decode.step(state, row["q"], row["k"], row["v"], row["beta"], row.get("decay"), precond))
    judge = one.run("reference")
    got = {"o": torch.stack(outputs, 1), "s": state.s} | ({} if state.a is None else {"a": state.a})
    assert_close(got, {n: judge[n] for n in got}, TOLERANCE)


def test_tables_of_equal_lengths_are_made_once():
    first = layout.layout(2, 70, None, 64, 2, torch.device("cpu"))
    assert layout.layout(2, 70, None, 64, 2, torch.device("cpu")) is first
    assert first.chunks.tolist() == [[0, 64], [64, 6], [70, 64], [134, 6]]
    assert first.sequences.tolist() == [[0, 2, 0, 70], [2, 2, 70, 70]] and first.longest == 2


def test_whole_numbers_reach_the_kernels_as_floats():
    """Triton compiles an int argument in, and the next call, with another scale, would find that kernel."""
    call = Call(None, 1, True, 0.0, 1, None)
    assert isinstance(call.scale, float) and isinstance(call.eps, float)
