"""Decoding token by token gives what the sequence op gives, for all six recurrences and the ablations, with the state updated in place."""

from dataclasses import replace

import pytest
import torch

from kernels import decode
from kernels.chunk import Preconditioner, State


def decode_all(one, tensors, backend="torch"):
    """All T tokens of a case through `decode.step`: outputs and the state tensors that were updated."""
    t, options = tensors, one.options or {}
    state = State(t["s"].clone(), t["a"].clone() if "a" in t else None)
    outputs = []
    for i in range(t["q"].shape[1]):
        row = {n: x[:, i] for n, x in t.items() if n not in ("s", "a", "m")}
        precond = Preconditioner(row["p"], row["c"], t["m"], **options) if "p" in t else None
        outputs.append(decode.step(state, row["q"], row["k"], row["v"], row["beta"], row.get("decay"), precond, backend=backend))
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_equals_the_sequence_op(name, dtype, tolerance, backend, case, assert_close):
    one = case(name, 40, K=20).rounded(dtype)
    judge = {n: x for n, x in one.run("torch").items() if n in ("o", "s", "a")}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    o, state = decode_all(one, {n: x.to(wide if n in ("s", "a") else dtype) for n, x in one.tensors.items()}, backend)
    assert o.dtype == dtype and state.s.dtype == wide
    got = {"o": o, "s": state.s} | ({} if state.a is None else {"a": state.a})
    assert_close(got, judge, tolerance, states=min(tolerance, 1e-5))


@pytest.mark.parametrize("form", ["unstable_atk", "atq", "norm_kbk", "norm_1_kbk", "norm_beta"])
def test_ablations(form, case, assert_close):
    one = case("pgdn", 40, form=form)
    judge = {n: x for n, x in one.run("torch").items() if n in ("o", "s", "a")}
    o, state = decode_all(one, one.tensors)
    assert_close({"o": o, "s": state.s, "a": state.a}, judge, 1e-11)


def test_fp32_states_serve_fp64_tokens(case):
    one = case("pgdn", 1)
    o, state = decode_all(one, one.tensors | {n: one.tensors[n].float() for n in ("s", "a")})
    assert o.dtype == torch.float64 and state.s.dtype == torch.float32


def row(case, **changed):
    one = case("pgdn", 1)
    t = {n: x if n in ("s", "a", "m") else x[:, 0] for n, x in one.tensors.items()}
    precond = Preconditioner(t["p"], t["c"], t["m"])
    return (
        dict(state=State(t["s"], t["a"]), **{n: t[n] for n in ("q", "k", "v", "beta", "decay")}, precond=precond, backend="torch") | changed
    )


def test_no_graph_is_kept(case):
    given = row(case)
    assert not decode.step(**given | dict(q=given["q"].requires_grad_())).requires_grad


WRONG = {
    "backend": lambda g: dict(backend="cuda"),
    "q is": lambda g: dict(backend="triton"),  # fp64, on the host
    "q": lambda g: dict(q=g["q"][:, None]),
    "beta": lambda g: dict(beta=g["beta"][:1]),
    "precond.gain": lambda g: dict(precond=replace(g["precond"], gain=g["beta"][:, :2])),
    "state.s": lambda g: dict(state=State(g["state"].s[:1], g["state"].a)),
    "state.a": lambda g: dict(state=State(g["state"].s)),
    "state must": lambda g: dict(state=None),
}


@pytest.mark.parametrize("argument", WRONG)
def test_wrong_argument_leaves_the_state_alone(argument, case):
    given = row(case)
    before = given["state"].s.clone()
    with pytest.raises(ValueError, match=f"^{argument}"):
        decode.step(**given | WRONG[argument](given))
    assert torch.equal(given["state"].s, before)
