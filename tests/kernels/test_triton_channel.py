"""A decay a channel (KDA, PKDA) in the Triton backend, against the token-by-token fp64 reference.

In the interpreter without a GPU, in fp32 and at small shapes, as `test_triton.py`.
"""

import os
from itertools import pairwise

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from kernels import decode, layout, scan_backward, solve_channel  # noqa: E402
from kernels.chunk import Preconditioner, State  # noqa: E402
from kernels.chunk_triton import Call  # noqa: E402
from kernels.operands import normalize  # noqa: E402
from kernels.tables import Tables  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
TOLERANCE = 1e-5
NAMES = ["kda", "pkda"]
PACKED = [0, 0, 1, 34, 34, 35, 99, 99]  # empty first, middle and last; one token twice; 33 and 64 tokens


def outputs(one, backend="triton", dtype=torch.float32, place=torch.clone):
    """{o, s, a}: no gradients."""
    device = DEVICE if backend == "triton" else "cpu"
    t = {n: place(x.to(device, dtype)) for n, x in one.tensors.items()}
    with torch.no_grad():
        o, (s, a) = one.call(t, backend)
    return {"o": o, "s": s} | ({} if a is None else {"a": a})


def check(one, assert_close, tolerance=TOLERANCE):
    one = one.rounded(torch.float32)
    got = outputs(one)
    assert_close(got, outputs(one, "reference", torch.float64), tolerance)
    return got


@pytest.mark.parametrize("name, T", [("kda", 1), ("kda", 70), ("pkda", 32), ("pkda", 66)])
def test_outputs_states_and_gradients(name, T, case, assert_close):
    one = case(name, T, B=2, H=1, K=16, V=16).rounded(torch.float32)
    assert_close(one.run("triton", torch.float32, DEVICE), one.run("reference"), TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_packed(name, case, assert_close):
    one = case(name, PACKED[-1], bounds=PACKED, H=2, K=16, V=24)
    got = check(one, assert_close)
    for empty in (0, 3, 6):  # the state is handed through
        assert torch.equal(got["s"][empty].cpu(), one.tensors["s"][empty].float())


@pytest.mark.parametrize("K, V", [(20, 24), (21, 30), (96, 16), (120, 16), (144, 16)])
def test_head_sizes(K, V, case, assert_close):
    check(case("pkda", 20, B=1, H=2, K=K, V=V), assert_close)


def over_time(x, like):
    return x.view(1, -1, 1, 1).expand_as(like)


GATES = {
    "zero": torch.zeros_like,
    "strong": lambda g: torch.full_like(g, -30),
    "alternating": lambda g: over_time(-30.0 * (torch.arange(g.shape[1]) % 2), g).to(g),
    "alternating in half of the channels": lambda g: (
        over_time(-30.0 * (torch.arange(g.shape[1]) % 2), g).to(g) * (torch.arange(g.shape[3]) % 2)
    ),
    "just mild": lambda g: torch.full_like(g, -4.43),  # 15 rows: factors of 2^95.9
    "just not mild": lambda g: torch.full_like(g, -4.45),
    "weak after strong": lambda g: torch.where(over_time(torch.arange(g.shape[1]) % 32 < 16, g), g - 30, g / 100),
}


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("name", NAMES)
def test_extreme_gates(name, gates, case, assert_close):
    """fla-org/flash-linear-attention#389; differences of long sums would lose weak gates behind strong ones."""
    one = case(name, 66, B=1, H=1, K=16, V=16)
    check(one.with_(decay=GATES[gates](one.tensors["decay"])), assert_close)


def test_mild_beside_strong_gates(case, assert_close):
    """Chunks, heads and blocks of channels that take the levels inside their blocks of rows one by one, beside others that do not:
    outputs and all gradients."""
    one = case("pkda", 66, B=1, H=2, K=72, V=16)
    decay = one.tensors["decay"].clone()
    decay[:, 4:8, 0, 40:] -= 30  # a few rows of one head, in some channels
    decay[:, 40, 1, 3] -= 30
    one = one.with_(decay=decay).rounded(torch.float32)
    assert_close(one.run("triton", torch.float32, DEVICE), one.run("reference"), TOLERANCE)


def test_infinite_decay_forgets_without_nan(case):
    one = case("pkda", 40, B=1, H=1, K=16, V=16)
    closed = one.tensors["decay"].clone().index_fill_(1, torch.tensor([20, 32]), -torch.inf)
    assert all(x.isfinite().all() for x in outputs(one.with_(decay=closed)).values())


def test_equal_decays_of_all_channels_are_one_decay_a_head(case, assert_close):
    one = case("pgdn", 40, B=1, H=2, K=16, V=16).rounded(torch.float32)
    assert_close(outputs(one.with_(decay=one.tensors["decay"][..., None].expand_as(one.tensors["k"]))), outputs(one), TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decay_in_16_bits(dtype, case, assert_close):
    """fp32 inputs, the decay alone in another dtype."""
    one = case("kda", 34, B=1, H=1, K=16, V=16, state=False).rounded(dtype)
    t = {n: x.to(DEVICE, dtype if n == "decay" else torch.float32) for n, x in one.tensors.items()}
    assert_close({"o": one.call(t, "triton")[0]}, {"o": outputs(one, "reference", torch.float64)["o"]}, TOLERANCE)


def test_head_sizes_that_are_whole_16_bytes_in_one_dtype_only(case, errors):
    """20 channels are in fp32 and not in 16 bits: q, k and the decay get the same zero channels. (d of a 16-bit decay is rounded to it.)"""
    one = case("pkda", 3, B=1, H=2, K=20, V=16).rounded(torch.float16)
    t = {n: x.to(DEVICE, torch.float16 if n == "decay" else torch.float32).requires_grad_() for n, x in one.tensors.items()}
    o, (s, a) = one.call(t, "triton")
    outputs = {"o": o, "s": s, "a": a}
    loss = sum((x.double() * one.weights[n].to(DEVICE)).sum() for n, x in outputs.items())
    got = outputs | {f"d{n}": g for n, g in zip(t, torch.autograd.grad(loss, list(t.values())), strict=True)}
    found = errors(got, one.run("reference"))
    assert all(error <= (1e-3 if n == "ddecay" else TOLERANCE) for n, error in found.items()), found


def test_chunks_of_64_rows(case, assert_close, monkeypatch):
    """The height that 16-bit inputs have: one level more."""
    monkeypatch.setattr("kernels.chunk_triton.chunk_rows", lambda k: 64)
    check(case("pkda", 70, B=1, H=1, K=16, V=16), assert_close)


@pytest.mark.parametrize("name, bounds", [("pkda", None), ("kda", [0, 0, 70, 71, 130, 130])])
def test_long_sequences_in_pieces(name, bounds, case, assert_close, monkeypatch):
    monkeypatch.setattr(layout, "LONG", 2)
    monkeypatch.setattr(layout, "_tables", Tables())
    check(case(name, 130, B=1, H=1, K=16, V=16, bounds=bounds), assert_close)
    assert next(iter(layout._tables.kept.values())).cut


def inside(x, poison):
    """x as a view into a larger buffer, with poison before and after along every axis."""
    buffer = torch.full([n + 2 for n in x.shape], poison, dtype=x.dtype, device=x.device)
    return buffer[tuple(slice(1, -1) for _ in x.shape)].copy_(x)


@pytest.mark.parametrize("K", [24, 20])
def test_poison_round_the_inputs(K, case):
    """Views inside buffers full of NaN or 1e4 give the values of plain tensors, bit for bit (fla-org/flash-linear-attention#1142)."""
    one = case("pkda", 33, B=1, H=2, K=K, V=24)
    plain = outputs(one)
    for poison in (torch.nan, 1e4):
        views = outputs(one, place=lambda x, p=poison: inside(x, p))
        assert all(torch.equal(plain[n], views[n]) for n in plain)


def test_a_decay_that_is_part_of_a_fused_projection(case):
    """Its rows are taken as they lie."""
    one = case("kda", 40, B=2, H=2, K=16, V=16)

    def place(x):
        if x.shape != one.tensors["decay"].shape:
            return x.clone()
        fused = torch.full((2, 40, 3 * 2 * 16), torch.nan, dtype=x.dtype, device=x.device).view(2, 40, 3, 2, 16)
        fused[:, :, 1] = x
        return fused[:, :, 1]

    plain, views = outputs(one), outputs(one, place=place)
    assert all(torch.equal(plain[n], views[n]) for n in plain)


def test_a_neighbour_full_of_nan_changes_nothing(case):
    one = case("pkda", 50, bounds=[0, 20, 30, 50], H=1, K=16, V=16)
    poisoned = {n: one.tensors[n].index_fill(1, torch.arange(20, 30), torch.nan) for n in ("q", "k", "v", "beta", "decay", "p", "c")}
    whole, got = outputs(one), outputs(one.with_(**poisoned))
    assert got["o"][:, 20:30].isnan().any()
    for part in (slice(0, 20), slice(30, 50)):
        assert torch.equal(got["o"][:, part], whole["o"][:, part])


def test_a_gate_that_is_nan_shows(case):
    """Gates are held at -200, but not a NaN."""
    one = case("kda", 40, B=1, H=1, K=16, V=16)
    assert outputs(one.with_(decay=one.tensors["decay"].index_fill(1, torch.tensor([20]), torch.nan)))["o"][:, 20:].isnan().all()


@pytest.mark.parametrize("name", NAMES)
def test_a_token_of_decoding_is_a_token_of_the_reference(name, case, assert_close):
    one = case(name, 3, B=2, H=2, K=20, V=40).rounded(torch.float32)
    t = {n: x.to(DEVICE, torch.float32) for n, x in one.tensors.items()}
    state = State(t["s"], t.get("a"))
    rows = []
    for i in range(3):
        row = {n: x[:, i] for n, x in t.items() if n not in ("s", "a", "m")}
        precond = Preconditioner(row["p"], row["c"], t["m"]) if "p" in t else None
        rows.append(decode.step(state, row["q"], row["k"], row["v"], row["beta"], row["decay"], precond))
    got = {"o": torch.stack(rows, 1), "s": state.s} | ({} if state.a is None else {"a": state.a})
    assert_close(got, outputs(one, "reference", torch.float64), TOLERANCE)


def chunks_of(case, bounds, C):
    """Every chunk in torch, fp64, and what autograd makes of it: dh [M, H, V, K], dx [N, H, V] and ds_0, the judges of the reverse scan."""
    t = {n: x.clone().requires_grad_() for n, x in case.tensors.items()}
    q, k, v, beta, g = (t[n].flatten(0, 1).transpose(0, 1) for n in ("q", "k", "v", "beta", "decay"))  # [H, N, ...]
    q, k, loss, states, xs = normalize(q) * q.shape[-1] ** -0.5, normalize(k), 0, [], []
    for n, (start, stop) in enumerate(pairwise(bounds)):
        s = t["s"][n]
        for i in range(start, stop, C):
            rows = slice(i, min(i + C, stop))
            G, w = g[:, rows].cumsum(1), k[:, rows]
            span = (G[:, :, None] - G[:, None]).where(torch.ones(G.shape[1], G.shape[1]).tril()[..., None] > 0, -torch.inf).exp()
            kw, qw = (torch.einsum("hid,hjd,hijd->hij", x[:, rows], w, span) for x in (k, q))
            error = v[:, rows] - (G.exp() * k[:, rows]) @ s
            x = beta[:, rows, None] * error
            r = torch.linalg.solve(torch.eye(G.shape[1]) + beta[:, rows, None] * kw.tril(-1), x)
            o = (G.exp() * q[:, rows]) @ s + qw @ r
            s = G[:, -1, :, None].exp() * s + ((G[:, -1:] - G).exp() * w).mT @ r
            states.append(s)
            xs.append(x)
            loss = loss + (o.transpose(0, 1) * case.weights["o"].flatten(0, 1)[rows]).sum()
        loss = loss + (s * case.weights["s"][n]).sum()
    *grads, ds_0 = torch.autograd.grad(loss, [*states, *xs, t["s"]])
    return {"dh": torch.stack(grads[: len(states)]).mT, "dx": torch.cat(grads[len(states) :], 1).transpose(0, 1), "ds_0": ds_0}


@pytest.mark.parametrize("gates, bounds", [("as drawn", PACKED), ("strong", [0, 40]), ("alternating in half of the channels", [0, 40])])
def test_reverse_scan(gates, bounds, case, assert_close):
    """dh, dx and ds_0 against autograd."""
    one = case("kda", bounds[-1], H=2, K=20, V=24, bounds=bounds)
    if gates != "as drawn":
        one = one.with_(decay=GATES[gates](one.tensors["decay"]))
    one = one.rounded(torch.float32)
    t = {n: x.to(DEVICE, torch.float32) for n, x in one.tensors.items()}
    q, k, v, beta, decay = (t[n].flatten(0, 1) for n in ("q", "k", "v", "beta", "decay"))
    table = layout._build(tuple(bounds), layout.chunk_rows(k), 2, torch.device(DEVICE))
    x = Call(table, 20**-0.5, True, 0.0, 1.0, None).inputs(q, k, v, beta, decay, None, None, None)
    solved = solve_channel.forward(x, table, None)
    do, ds = (one.weights[n].to(DEVICE, torch.float32) for n in ("o", "s"))
    got = dict(zip(("dh", "dx", "ds_0"), scan_backward.backward(x, solved, table, table.sequences, do.flatten(0, 1), ds), strict=True))
    assert_close(got, chunks_of(one, bounds, table.chunk), TOLERANCE)
