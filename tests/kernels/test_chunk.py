"""The chunk algorithm against the token-by-token reference in fp64: outputs, states and every gradient, at weird shapes and gates.

Tolerances are relative RMS errors. Head sizes above 32 have chunks of 64 rows, smaller ones of 32. Cases that users of such kernels
reported are named by their public threads.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from kernels import chunk_torch
from kernels.chunk import Preconditioner, delta_rule

PACKED = [0, 0, 1, 66, 66, 67, 195, 258, 258]  # empty first, middle and last; one token twice; lengths 65, 128, 63


@pytest.mark.parametrize("T", [1, 63, 64, 65, 127])
def test_outputs_states_and_gradients(name, T, case, assert_close):
    one = case(name, T)
    assert_close(one.run("torch"), one.run("reference"), 1e-12)


def test_packed(name, case, assert_close):
    one = case(name, PACKED[-1], bounds=PACKED, K=24, V=40)
    assert_close(one.run("torch"), one.run("reference"), 1e-12)


@pytest.mark.parametrize("K, V", [(16, 16), (60, 100), (100, 60), (120, 120), (16, 256), (256, 16)])
@pytest.mark.parametrize("recurrence", ["pgdn", "pkda"])
def test_head_sizes(recurrence, K, V, case, assert_close):
    one = case(recurrence, 70, B=1, H=2, K=K, V=V)
    assert_close(one.run("torch"), one.run("reference"), 1e-12)


@pytest.mark.parametrize(
    "dtype, tolerance, states", [(torch.float32, 1e-5, 1e-5), (torch.bfloat16, 1e-2, 5e-3), (torch.float16, 2e-3, 1e-3)]
)
def test_precisions(name, dtype, tolerance, states, case, assert_close):
    one = case(name, 150).rounded(dtype)
    assert_close(one.run("torch", dtype), one.run("reference"), tolerance, states)


def test_no_initial_state_is_zero_state(name, case, assert_close):
    one = case(name, 70, state=False)
    zeros = {n: torch.zeros_like(one.weights[n]) for n in ("s", "a") if n == "s" or "p" in one.tensors}
    with_zeros = one.with_(**zeros).run("reference")
    assert_close(one.run("torch"), {n: x for n, x in with_zeros.items() if n not in ("ds", "da")}, 1e-12)


def test_gradcheck(name, case, monkeypatch):
    """Numerical derivatives of outputs and final states by every input, over several chunks of 4 rows and an empty sequence."""
    monkeypatch.setattr(chunk_torch, "CHUNK", 8)
    one = case(name, 11, H=2, K=16, V=16, bounds=[0, 6, 6, 7, 11])

    def outputs(*tensors):
        o, state = one.call(dict(zip(one.tensors, tensors, strict=True)), "torch")
        return (o, *(x for x in state if x is not None))

    inputs = tuple(x.clone().requires_grad_() for x in one.tensors.values())
    assert torch.autograd.gradcheck(outputs, inputs, fast_mode=True, atol=1e-6)


# ---- the ends of the gates' range (fla-org/flash-linear-attention#389) ----


def over_time(x, like):
    """x [T] along the time axis of a tensor [B, T, ...]."""
    return x.view(1, -1, *[1] * (like.dim() - 2)).expand_as(like)


GATES = {
    "zero": torch.zeros_like,
    "strong": lambda g: torch.full_like(g, -30),
    "alternating": lambda g: over_time(-30.0 * (torch.arange(g.shape[1]) % 2), g).to(g),
}


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("recurrence, gate", [("pgdn", "decay"), ("pkda", "decay"), ("pgdn", "p")])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_extreme_gates(recurrence, gate, gates, dtype, tolerance, case, assert_close):
    one = case(recurrence, 192, B=1, H=2, K=64, V=64)
    one = one.with_(**{gate: GATES[gates](one.tensors[gate])}).rounded(dtype)
    assert_close(one.run("torch", dtype), one.run("reference"), tolerance)


@pytest.mark.parametrize("recurrence", ["pgdn", "pkda"])
def test_weak_gates_after_strong_ones_keep_their_digits(recurrence, case, assert_close):
    """Differences of long cumulative sums would lose the small gates behind a sum of -1,000."""
    one = case(recurrence, 128, B=1)
    strong = torch.arange(128) % 64 < 32
    gates = {n: one.tensors[n] for n in ("decay", "p")}
    one = one.with_(**{n: torch.where(over_time(strong, g), g - 30, g / 100) for n, g in gates.items()}).rounded(torch.float32)
    assert_close(one.run("torch", torch.float32), one.run("reference"), 1e-5)


@pytest.mark.parametrize("recurrence", ["gdn", "kda", "pkda"])
def test_zero_decay_is_the_ungated_recurrence(recurrence, case, assert_close):
    gated = case(recurrence, 130)
    gated = gated.with_(decay=gated.tensors["decay"] * 0)
    judge = gated.without("decay").run("torch", torch.float32)
    got = gated.run("torch", torch.float32)
    got.pop("ddecay")
    assert_close(got, judge, 1e-6)


@pytest.mark.parametrize("recurrence", ["pgdn", "pkda"])
def test_infinite_decay_forgets_without_nan(recurrence, case):
    one = case(recurrence, 70)
    closed = {n: one.tensors[n].clone().index_fill_(1, torch.tensor([20, 64]), -torch.inf) for n in ("decay", "p")}
    got = one.with_(**closed).run("torch", torch.float32)
    assert all(x.isfinite().all() for x in got.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistic_counts_past_256(dtype):
    """1,024 identical unit keys with gain 1: a sum in bf16 would stop at 256."""
    T, K = 1024, 16
    x = torch.zeros(1, T, 1, K, dtype=dtype)
    x[..., 3] = 1
    gates = torch.ones(1, T, 1, dtype=dtype)
    _, state = delta_rule(
        x,
        x,
        x,
        gates,
        precond=Preconditioner(gates * 0, gates, torch.zeros(1)),
        normalize_qk=False,
        output_final_state=True,
        backend="torch",
    )
    assert state.a.dtype == torch.float32 and state.a[0, 0, 3] == 1024 and state.a.sum() == 1024


# ---- what a call may not depend on ----


def test_poison_round_the_inputs(name, case):
    """Views inside buffers full of NaN or 1e4 give the values of plain tensors, bit for bit (fla-org/flash-linear-attention#1142)."""
    for T in (1, 63, 65):
        one = case(name, T, B=3, H=2, K=120, V=120)
        plain = one.run("torch", torch.float32)
        for poison in (torch.nan, 1e4):
            assert same(plain, one.run("torch", torch.float32, place=lambda x, p=poison: inside(x, p)))


def inside(x, poison):
    """x as a view into a larger buffer, with poison before and after along every axis."""
    buffer = torch.full([n + 2 for n in x.shape], poison, dtype=x.dtype)
    return buffer[tuple(slice(1, -1) for _ in x.shape)].copy_(x)


def test_strides_do_not_matter(name, case):
    one = case(name, 65)
    strided = one.run("torch", torch.float32, place=lambda x: x.transpose(0, -1).contiguous().transpose(0, -1))
    assert same(one.run("torch", torch.float32), strided)


def same(x, y):
    return x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x)


def test_repeats_are_bit_equal(name, case):
    one = case(name, 130, bounds=[0, 65, 65, 130])
    first = one.run("torch", torch.float32)
    assert all(same(first, one.run("torch", torch.float32)) for _ in range(2))


@pytest.mark.parametrize("t", [0, 17, 63, 64, 100])
def test_causality(name, t, case):
    """Whatever token t holds, gates included, no bit before it changes (fla-org/flash-linear-attention#1240)."""
    one = case(name, 130, B=1)
    changed = {n: x.clone() for n, x in one.tensors.items() if n not in ("s", "a", "m")}
    for x in changed.values():
        x[:, t] = x[:, t] / 2 + x[:, t - 1] / 4
    before, after = (c.run("torch", torch.float32)["o"] for c in (one, one.with_(**changed)))
    assert torch.equal(before[:, :t], after[:, :t]) and not torch.equal(before[:, t:], after[:, t:])


def test_packed_sequences_do_not_see_each_other(name, case):
    """Each one equals itself run alone, and a neighbour full of NaN changes nothing."""
    one = case(name, PACKED[-1], bounds=PACKED)
    whole = one.run("torch")
    for n, (start, stop) in enumerate(itertools.pairwise(PACKED)):
        if stop == start:
            continue
        alone = one.with_(**{x: t[n : n + 1] if x in ("s", "a") else t if x == "m" else t[:, start:stop] for x, t in one.tensors.items()})
        o, _ = alone.call(alone.tensors, "torch", cu_seqlens=None)
        torch.testing.assert_close(o, whole["o"][:, start:stop], rtol=0, atol=1e-12)
    poisoned = one.with_(v=one.tensors["v"].index_fill(1, torch.arange(67, 195), torch.nan))
    o, state = poisoned.call(poisoned.tensors, "torch")
    assert o[:, 67:195].isnan().all() and state.s[5].isnan().all()
    assert torch.equal(o[:, :67], whole["o"][:, :67]) and torch.equal(o[:, 195:], whole["o"][:, 195:])


def test_two_runs_from_the_state_are_one_run(name, case, assert_close):
    one = case(name, 130)
    cut = 71
    t = {n: x.clone().requires_grad_() for n, x in one.tensors.items()}
    head = {n: x if n in ("s", "a", "m") else x[:, :cut] for n, x in t.items()}
    tail = {n: x if n in ("s", "a", "m") else x[:, cut:] for n, x in t.items()}
    o1, middle = one.call(head, "torch")
    o2, final = one.call(tail | dict(s=middle.s, a=middle.a), "torch")
    outputs = {"o": torch.cat([o1, o2], 1), "s": final.s} | ({} if final.a is None else {"a": final.a})
    gradients = torch.autograd.grad(sum((x * one.weights[n]).sum() for n, x in outputs.items()), list(t.values()))
    got = outputs | {f"d{n}": g for n, g in zip(t, gradients, strict=True)}
    assert_close({n: x.detach() for n, x in got.items()}, one.run("torch"), 1e-12)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_empty_sequences_hand_state_and_gradient_through(backend, case):
    one = case("pkda", 5, bounds=[0, 0, 5, 5])
    got = one.run(backend)
    for n in ("s", "a"):
        for empty in (0, 2):
            assert torch.equal(got[n][empty], one.tensors[n][empty]) and torch.equal(got[f"d{n}"][empty], one.weights[n][empty])


def test_many_one_token_documents(case):
    """65,600 programs on one axis would be more than a launch takes (fla-org/flash-linear-attention#1077); halves give the same."""
    one = case("pgdn", 4100, H=2, K=16, V=16, bounds=list(range(4101)))
    whole, _ = one.call(one.tensors, "torch")
    halves = []
    for part in (slice(0, 2050), slice(2050, 4100)):
        t = {n: x[part] if n in ("s", "a") else x if n == "m" else x[:, part] for n, x in one.tensors.items()}
        halves.append(one.call(t, "torch", cu_seqlens=torch.arange(2051))[0])
    torch.testing.assert_close(torch.cat(halves, 1), whole, rtol=0, atol=1e-13)


@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=4).filter(any),
    K=st.integers(16, 48),
    V=st.integers(16, 48),
    H=st.integers(1, 3),
    recurrence=st.sampled_from(["dn", "gdn", "kda", "pdn", "pgdn", "pkda"]),
    gates=st.sampled_from([0.0, 0.1, 30.0]),
)
@settings(max_examples=15, deadline=None, derandomize=True)
def test_random_shapes(case, lengths, K, V, H, recurrence, gates):
    bounds = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    one = case(recurrence, bounds[-1], H=H, K=K, V=V, bounds=bounds, gates=gates, seed=len(lengths))
    got, judge = one.run("torch"), one.run("reference")
    for n, y in judge.items():
        torch.testing.assert_close(got[n], y, rtol=1e-9, atol=1e-11, msg=n)


# ---- the paper's ablations ----


@pytest.mark.parametrize("recurrence", ["pdn", "pgdn", "pkda"])
@pytest.mark.parametrize("form", ["squashed", "unstable_atk", "atq", "norm_kbk", "norm_1_kbk", "norm_beta"])
def test_forms(form, recurrence, case, assert_close):
    one = case(recurrence, 130, bounds=[0, 65, 65, 130], form=form)
    got, judge = one.run("torch"), one.run("reference")
    assert_close(got, judge, 1e-11)
    assert got["dm"].all()  # the centre is a parameter of every form


@pytest.mark.parametrize("interval", ["up", "down"])
def test_intervals(interval, case, assert_close):
    one = case("pgdn", 70, interval=interval, bound=2.0)
    assert_close(one.run("torch"), one.run("reference"), 1e-12)


# ---- under PyTorch's machinery ----


def test_autocast_does_not_lower_the_precision(case):
    one = case("pkda", 70)
    outside = one.run("torch", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(one.run("torch", torch.float32)["o"], outside["o"])


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant, case):
    one = case("pgdn", 70)

    def gradients(run):
        t = {n: x.clone().requires_grad_() for n, x in one.tensors.items()}
        o = run(lambda *x: one.call(dict(zip(t, x, strict=True)), "torch")[0], *t.values())
        return torch.autograd.grad(o.square().sum(), list(t.values())) if not reentrant else backward(o, t)

    def backward(o, t):
        o.square().sum().backward()
        return [x.grad for x in t.values()]

    plain = gradients(lambda f, *x: f(*x))
    kept = gradients(lambda f, *x: checkpoint(f, *x, use_reentrant=reentrant))
    assert all(torch.equal(x, y) for x, y in zip(kept, plain, strict=True))


def test_compiles_as_one_graph(case):
    one = case("pgdn", 70)
    compiled = torch.compile(lambda t: one.call(t, "torch"), backend="eager", fullgraph=True)
    assert torch.equal(compiled(one.tensors)[0], one.call(one.tensors, "torch")[0])


def test_outputs_have_the_dtypes_of_the_contract(case):
    for dtype, wide in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        for backend in ("torch", "reference"):
            got = case("pgdn", 3).run(backend, dtype)
            assert (got["o"].dtype, got["s"].dtype, got["a"].dtype, got["dq"].dtype, got["dp"].dtype) == (dtype, wide, wide, dtype, dtype)


def test_fp32_states_serve_fp64_inputs_and_fp32_gates_serve_bf16(case):
    one = case("pgdn", 5)
    t = one.tensors | {n: one.tensors[n].float() for n in ("s", "a")}
    o, state = one.call(t, "torch")
    assert o.dtype == state.s.dtype == state.a.dtype == torch.float64
    t = {n: x.bfloat16() if n in ("q", "k", "v") else x.float() for n, x in one.tensors.items()}
    assert one.call(t, "torch")[0].dtype == torch.bfloat16


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_scale_and_normalisation(backend, case):
    """The default scale is K ** -0.5, the output is linear in it, and q and k may come as unit vectors already."""
    one = case("pgdn", 9, K=20, V=33)
    o, state = one.call(one.tensors, backend)
    scaled, same_state = one.call(one.tensors, backend, scale=0.5)
    torch.testing.assert_close(scaled, o * 0.5 * 20**0.5, rtol=1e-12, atol=0)
    unit = {n: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for n, x in one.tensors.items() if n in ("q", "k")}
    torch.testing.assert_close(one.call(one.tensors | unit, backend, normalize_qk=False)[0], o, rtol=1e-12, atol=1e-14)
    assert torch.equal(state.s, same_state.s)


def test_no_state_unless_asked_for(case):
    one = case("pgdn", 5)
    assert one.call(one.tensors, "torch", output_final_state=False)[1] is None
    assert case("gdn", 5).call(case("gdn", 5).tensors, "torch")[1].a is None
