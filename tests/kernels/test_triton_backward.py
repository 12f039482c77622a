"""The Triton passes of the backward pass, each against autograd, fed with what torch computes in fp64: in the interpreter without a GPU."""

import os
from itertools import pairwise

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from kernels import gradients, layout, pairs, scan_backward, statistic_backward
from kernels.layout import Inputs, Solved
from kernels.operands import normalize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-5


def chunk(k, q, w, v, beta, g, s):
    """One chunk of all heads [H, C, ...] in torch: o, the next state, and X, -N, QW, U of `kernels.chunk_triton`."""
    G = g.cumsum(-1)
    span = (G[:, :, None] - G[:, None, :]).tril().exp().tril()
    lo, eye = ((k @ w.mT) * span).tril(-1), torch.eye(k.shape[1], dtype=k.dtype)
    negative = -torch.linalg.solve(eye + lo * beta[:, None, :], lo)
    error = v - G.exp()[..., None] * (k @ s)
    x = beta[..., None] * error
    r = torch.linalg.solve(eye + beta[:, :, None] * lo, x)
    o = G.exp()[..., None] * (q @ s) + ((q @ w.mT) * span) @ r
    after = G[:, -1, None, None].exp() * s + w.mT @ ((G[:, -1:] - G).exp()[..., None] * r)
    return o, after, x, negative, (q @ w.mT) * span, error + negative @ x


def write_keys(k, p, c, m, a, bound, eps=1e-6):
    """w [H, C, K] and the statistic after the chunk."""
    rows = []
    for t in range(k.shape[1]):
        a = p[:, t, None].exp() * a + c[:, t, None] * k[:, t].square()
        r = torch.log(a + eps) - m[:, None]
        rows.append(k[:, t] * torch.exp(-torch.tensor(bound).log() * r / (1 + r.abs())))
    return torch.stack(rows, 1), a


def forward(case, bounds, C):
    """Everything the backward passes are fed with, and the judges of the scan: dh, dx, ds_0. All sequences, chunk by chunk, fp64."""
    t = {n: x.clone().requires_grad_() for n, x in case.tensors.items()}
    flat = {n: x.flatten(0, 1).transpose(0, 1) for n, x in t.items() if n not in ("m", "s", "a")}  # [H, N, ...]
    scale, H, K, V = t["q"].shape[-1] ** -0.5, *t["q"].shape[2:], t["v"].shape[-1]
    N = bounds[-1]
    got = {"t": torch.zeros(N, H, C), "qw": torch.zeros(N, H, C), "w": torch.zeros(N, H, K), "u": torch.zeros(N, H, V)}
    got |= {n: [] for n in ("h", "a_start", "whole", "rows")}
    states, xs, loss = [], [], 0
    for n, (start, stop) in enumerate(pairwise(bounds)):
        s = t["s"][n] if "s" in t else torch.zeros(H, K, V, dtype=torch.float64, requires_grad=True)
        a = t["a"][n] if "a" in t else torch.zeros(H, K, dtype=torch.float64)
        for i in range(start, stop, C):
            j = min(i + C, stop)
            q, k, v, beta = (flat[name][:, i:j] for name in ("q", "k", "v", "beta"))
            q, k = normalize(q) * scale, normalize(k)
            g = flat["decay"][:, i:j] if "decay" in t else torch.zeros_like(beta)
            got["h"].append(s)
            got["a_start"].append(a)
            w = k
            if "p" in t:
                w, a = write_keys(k, flat["p"][:, i:j], flat["c"][:, i:j], t["m"], a, (case.options or {}).get("bound", 1.5))
            o, s, x, negative, qw, u = chunk(k, q, w, v, beta, g, s)
            got["t"][i:j, :, : j - i], got["qw"][i:j, :, : j - i] = (y.detach().transpose(0, 1) for y in (negative, qw))
            got["w"][i:j], got["u"][i:j] = w.detach().transpose(0, 1), u.detach().transpose(0, 1)
            G = g.cumsum(-1) / torch.log(torch.tensor(2.0, dtype=torch.float64))
            rk, rq = (flat[name][:, i:j].square().sum(-1).add(1e-6).rsqrt() for name in ("k", "q"))
            lacks = G[:, -1:] - G + (0 if "p" in t else rk.log2())
            numbers = [rk, rq, G, G - G.float().double(), beta, rk * G.exp2(), scale * rq * G.exp2(), lacks.exp2()]
            got["rows"].append(torch.nn.functional.pad(torch.stack(numbers, 1).detach(), (0, C - (j - i))))  # [H, 8, C]
            got["whole"].append(G[:, -1].exp2().detach())
            states.append(s)
            xs.append(x)
            loss = loss + (o.transpose(0, 1) * case.weights["o"].flatten(0, 1)[i:j]).sum()
        loss = loss + (s * case.weights["s"][n]).sum() + (0 if "p" not in t else (a * case.weights["a"][n]).sum())
    got["whole"], got["rows"] = torch.stack(got["whole"]), torch.stack(got["rows"])
    got["h"], got["a_start"] = torch.stack(got["h"]).mT.detach(), torch.stack(got["a_start"]).detach()
    initial = [t["s"]] if "s" in t else []
    grads = torch.autograd.grad(loss, [*states, *xs, *initial])
    judge = {"dh": torch.stack(grads[: len(states)]).mT, "dx": torch.cat(grads[len(states) : 2 * len(states)], 1).transpose(0, 1)}
    return got, judge | ({"ds_0": grads[-1]} if initial else {})


def place(x, poison=float("nan")):
    """x on the device in fp32, inside a larger buffer that is poisoned before and after it."""
    buffer = torch.full((x.numel() + 512,), poison, device=DEVICE)
    view = buffer[256 : 256 + x.numel()].view(x.shape)
    view.copy_(x)
    return view


def inputs(case, put=place):
    t = {n: put(x.flatten(0, 1)) for n, x in case.tensors.items() if n not in ("m", "s", "a")}
    center = put(case.tensors["m"]) if "m" in case.tensors else None
    bound, scale = (case.options or {}).get("bound", 1.5), t["q"].shape[-1] ** -0.5
    gates = (t.get(n) for n in ("decay", "p", "c"))
    return Inputs(t["q"], t["k"], t["v"], t["beta"], *gates, center, torch.tensor(bound).log().item(), 1e-6, scale, True)


def run(case, put=place):
    """Every backward pass in turn, from forward values made by torch: {name: tensor} and the judges'."""
    B, T = case.tensors["q"].shape[:2]
    bounds = tuple(range(0, B * T + 1, T)) if case.cu_seqlens is None else tuple(case.cu_seqlens.tolist())
    x = inputs(case, put)
    table = layout._build(bounds, layout.chunk_rows(x.k), x.k.shape[1], torch.device(DEVICE))
    got, judge = forward(case, bounds, table.chunk)
    f = {n: put(y) for n, y in got.items()}
    solved = Solved(f["t"], f["qw"], f["w"] if case.preconditioned else None, f["rows"], f["whole"])
    do, ds = (put(case.weights[n]) for n in ("o", "s"))
    dh, dx, ds_0 = scan_backward.backward(x, solved, table, table.sequences, do.flatten(0, 1), ds)
    result = {"dh": dh, "dx": dx} | ({"ds_0": ds_0} if "ds_0" in judge else {})
    pair = pairs.backward(x, solved, table, do.flatten(0, 1), f["u"], dx, do.flatten(0, 1))  # o: read with a decay a channel only
    g = gradients.backward(x, solved, table, f["h"], dh, f["u"], dx, do.flatten(0, 1), pair)
    outputs = {"dq": g.q, "dk": g.k, "dv": pair.v, "dbeta": pair.beta} | ({"ddecay": g.decay} if "decay" in case.tensors else {})
    if case.preconditioned:
        rest = statistic_backward.backward(x, solved, table, f["a_start"], g, put(case.weights["a"]))
        outputs |= dict(zip(("dp", "dc", "dm", "da"), rest, strict=True))
    reference = case.run("reference")
    judge |= {n: reference[n].flatten(0, 1) if n not in ("dm", "da") else reference[n] for n in outputs if n in reference}
    return {n: y for n, y in (result | outputs).items() if n in judge}, judge


NAMES = ("dn", "gdn", "pdn", "pgdn")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("T", [1, 32, 70])
def test_lengths(name, T, case, assert_close):
    assert_close(*run(case(name, T, B=2, H=1, K=20, V=24)), TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_packed_sequences(name, case, assert_close):
    bounds = [0, 0, 1, 34, 34, 35, 100, 100]
    assert_close(*run(case(name, bounds[-1], H=2, K=16, V=20, bounds=bounds)), TOLERANCE)


@pytest.mark.parametrize("name", ["gdn", "pgdn"])
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("gates", ["zero", "strong", "alternating"])
def test_extreme_gates(name, gates, state, case, assert_close):
    one = case(name, 66, B=1, H=1, K=16, V=16, state=state)
    shape = one.tensors["decay"].shape
    g = {"zero": torch.zeros(shape), "strong": torch.full(shape, -30.0), "alternating": torch.arange(66.0).view(1, -1, 1) % 2 * -30}[gates]
    for gate in ("decay", "p") if name == "pgdn" else ("decay",):
        got, judge = run(one.with_(**{gate: g.double().expand(shape)}))
        assert_close(got, judge, TOLERANCE)


@pytest.mark.parametrize("name", ["dn", "pgdn"])
def test_writes_that_are_off_still_have_a_gradient(name, case, assert_close):
    one = case(name, 40, B=1, H=1, K=16, V=16)
    assert_close(*run(one.with_(beta=one.tensors["beta"] * (torch.arange(40) % 3 > 0).view(1, -1, 1))), TOLERANCE)


def test_nothing_outside_is_read(case):
    one = case("pgdn", 40, B=2, H=2, K=20, V=24)
    got = [run(one, lambda x, poison=poison: place(x, poison))[0] for poison in (float("nan"), 1e4)]
    assert all(torch.equal(got[0][n], got[1][n]) for n in got[0])


def test_wide_heads(case, assert_close):
    assert_close(*run(case("pgdn", 34, B=1, H=1, K=136, V=144)), TOLERANCE)
