"""The reference against hand-written matrices, and arXiv:2604.21100's exact statements: Theorem 3.1, App. C.2's counterexample.

Judges, in fp64: dense transition matrices and ridge regression, written here without the package's helpers.
"""

import math
from dataclasses import replace

import pytest
import torch

from kernels.operands import Operands, Preconditioner, State, normalize
from kernels.preconditioner import scaling
from kernels.reference import exact_atk, exact_atq, run

F64 = torch.float64
T, K, V = 7, 5, 3


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def uniform(*shape, seed=0):
    return torch.rand(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def keys(seed=0):
    return normalize(normal(T, K, seed=seed))


def run_head(q, k, v, beta, decay=None, precond=None, s=None):
    """The reference for one head, tensors [T, ...], q and k used as they are: outputs [T, V] and the final state."""

    def lift(x):
        return None if x is None else x[None, :, None]  # [1, T, 1, ...]

    if precond is not None:
        precond = replace(precond, decay=lift(precond.decay), gain=lift(precond.gain))
    o, state = run(Operands(lift(q), lift(k), lift(v), lift(beta), lift(decay), precond), None if s is None else State(s[None, None]), None)
    return o[0, :, 0], state


def dense(q, k, v, beta, alpha, write, s, online=True):
    """The same by matrices: S_t = (I - beta w k^T) diag(alpha) S_{t-1} + beta w v^T, alpha [T, K]; offline without the correction."""
    outputs = []
    for t in range(T):
        correction = beta[t] * torch.outer(write[t], k[t]) if online else 0
        s = (torch.eye(K, dtype=F64) - correction) @ torch.diag(alpha[t]) @ s + beta[t] * torch.outer(write[t], v[t])
        outputs.append(s.T @ q[t])
    return torch.stack(outputs), s


def history(p, c, k):
    """The statistic before and after each token, by the sum it stands for: a_t = sum_{i <= t} exp(p_{i+1} + ... + p_t) c_i k_i^2."""
    rows = [[(p[i + 1 : t + 1].sum().exp() * c[i] * k[i] ** 2) for i in range(t + 1)] for t in range(T)]
    total = torch.stack([sum(row) for row in rows])
    return total - torch.stack([row[-1] for row in rows]), total


@pytest.mark.parametrize("decay", ["none", "scalar", "channel"])
def test_plain_recurrence_is_the_dense_transition(decay):
    q, k, v, beta, s = normal(T, K, seed=1), keys(), normal(T, V), uniform(T), normal(K, V)
    g = {"none": None, "scalar": -uniform(T), "channel": -uniform(T, K)}[decay]
    alpha = torch.ones(T, K, dtype=F64) if g is None else g.view(T, -1).exp().expand(T, K)
    o, final = run_head(q, k, v, beta, g, s=s)
    judge, s = dense(q, k, v, beta, alpha, k, s)
    torch.testing.assert_close(o, judge, rtol=0, atol=1e-13)
    torch.testing.assert_close(final.s[0, 0], s, rtol=0, atol=1e-13)
    assert final.a is None


def write_keys(form, k, prior, a, beta, alpha, m, x=1.5, eps=1e-6):
    """docs/paper.md, sections 1 and 5, token by token in plain arithmetic; alpha [T], one a token."""
    out = []
    for t in range(T):
        if form == "unstable_atk":
            u = k[t] / (prior[t] + math.exp(m))
            out.append(u / (1 + (k[t] * u).sum()))
            continue
        r = (a[t] + eps).log() - m
        bk = x ** -(r / (1 + r.abs())) * k[t]
        kbk = (k[t] * bk).sum()
        divide = {"squashed": 1, "norm_kbk": kbk + eps, "norm_1_kbk": 1 + kbk, "norm_beta": alpha[t] + beta[t] * kbk + eps}[form]
        out.append(bk / divide)
    return torch.stack(out)


@pytest.mark.parametrize("decay", ["none", "scalar", "channel"])
@pytest.mark.parametrize("form", ["squashed", "unstable_atk", "norm_kbk", "norm_1_kbk", "norm_beta"])
def test_write_key_forms(form, decay):
    q, k, v, beta, p, c = normal(T, K, seed=1), keys(), normal(T, V), uniform(T, seed=3), -uniform(T), uniform(T, seed=2)
    g = {"none": None, "scalar": -uniform(T), "channel": -uniform(T, K)}[decay]
    alpha = torch.ones(T, K, dtype=F64) if g is None else g.view(T, -1).exp().expand(T, K)
    along = alpha[:, 0] if decay != "channel" else (k * k * alpha).sum(-1)
    prior, a = history(p, c, k)
    w = write_keys(form, k, prior, a, beta, along, m=-0.2)
    o, final = run_head(q, k, v, beta, g, Preconditioner(p, c, torch.tensor([-0.2], dtype=F64), form=form))
    judge, s = dense(q, k, v, beta, alpha, w, torch.zeros(K, V, dtype=F64))
    torch.testing.assert_close(o, judge, rtol=0, atol=1e-13)
    torch.testing.assert_close(final.a[0, 0], a[-1], rtol=0, atol=1e-14)


def test_atq_form_is_offline_with_the_curvature_on_the_query():
    """PLA, P-Mamba-2, PGLA: S_t = D S + beta k v^T, read by q / (a_t + lambda)."""
    q, k, v, beta, p, c, g = normal(T, K, seed=1), keys(), normal(T, V), uniform(T), -uniform(T), uniform(T, seed=2), -uniform(T)
    _, a = history(p, c, k)
    o, _ = run_head(q, k, v, beta, g, Preconditioner(p, c, torch.tensor([0.3], dtype=F64), form="atq"))
    judge, _ = dense(q / (a + math.exp(0.3)), k, v, beta, g[:, None].exp().expand(T, K), k, torch.zeros(K, V, dtype=F64), online=False)
    torch.testing.assert_close(o, judge, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "interval, low, middle, high", [("both", 1 / 1.5, 1, 1.5), ("up", 1, 1.5**0.5, 1.5), ("down", 1 / 1.5, 1.5**-0.5, 1)]
)
def test_intervals(interval, low, middle, high):
    """b falls from one end of its interval to the other as the statistic grows, and is in the middle at a = exp(m)."""
    a = torch.tensor([0.0, math.exp(-0.2) - 1e-6, 1e30], dtype=F64)
    gates = torch.zeros(1, dtype=F64)
    b = scaling(a, Preconditioner(gates, gates, torch.tensor(-0.2, dtype=F64), interval=interval))
    assert b[1].item() == pytest.approx(middle, abs=1e-12)
    assert high * 0.97 < b[0] < high and low < b[2] < low * 1.03


def test_write_eigenvalue_stays_in_the_unit_disk():
    """I - beta w k^T has the one eigenvalue 1 - beta k.w beside ones; with beta x <= 2 it lies in [-1, 1] (docs/paper.md, section 1)."""
    k = keys()
    prior, a = history(-uniform(T), uniform(T, seed=2), k)
    w = write_keys("squashed", k, prior, a, torch.ones(T), torch.ones(T), m=-0.2, x=2.0)
    for t in range(T):
        eigenvalues = torch.linalg.eigvals(torch.eye(K, dtype=F64) - torch.outer(w[t], k[t])).real.sort().values
        assert eigenvalues[0].item() == pytest.approx(1 - (k[t] @ w[t]).item(), abs=1e-12) and eigenvalues[0] >= -1
        assert 0.5 <= k[t] @ w[t] <= 2


@pytest.mark.parametrize("ridge", [0.3, 1.0, 10.0])
def test_theorem_3_1_exact_atk_equals_exact_atq_at_every_token(ridge):
    q, k, v = normal(40, 6), normal(40, 6, seed=1), normal(40, 4, seed=2)  # more tokens than dimensions, keys of any length
    o_atk, s_atk = exact_atk(q, k, v, ridge)
    o_atq, s_atq = exact_atq(q, k, v, ridge)
    torch.testing.assert_close(s_atk, s_atq, rtol=0, atol=1e-11)
    torch.testing.assert_close(o_atk, o_atq, rtol=0, atol=1e-11)


def test_exact_forms_are_ridge_regression():
    q, k, v = normal(T, K), normal(T, K, seed=1), normal(T, V, seed=2)
    stacked = torch.cat([k, 0.5**0.5 * torch.eye(K, dtype=F64)])  # lambda = 0.5 as K more observations of zero
    judge = torch.linalg.lstsq(stacked, torch.cat([v, torch.zeros(K, V, dtype=F64)])).solution
    torch.testing.assert_close(exact_atq(q, k, v, 0.5)[1][-1], judge, rtol=0, atol=1e-12)


def test_app_c2_diagonal_atk_is_not_diagonal_atq():
    """lambda = 1, k = v = (1, 1): every entry of S is 1/2 for ATQ and 1/3 for ATK."""
    one, zero = torch.ones(1, dtype=F64), torch.zeros(1, dtype=F64)
    k = torch.ones(1, 2, dtype=F64)
    read = {}
    for form in ("unstable_atk", "atq"):
        rows = [run_head(q[None], k, k, one, None, Preconditioner(zero, one, zero, form=form))[0] for q in torch.eye(2, dtype=F64)]
        read[form] = torch.cat(rows)  # unit queries read the rows of S, with ATQ those of P C
    torch.testing.assert_close(read["atq"], torch.full((2, 2), 1 / 2, dtype=F64), rtol=0, atol=1e-15)
    torch.testing.assert_close(read["unstable_atk"], torch.full((2, 2), 1 / 3, dtype=F64), rtol=0, atol=1e-15)


def test_exact_forms_differ_from_the_diagonal_ones():
    """In general (diag G)^-1 is not diag(G^-1); with orthogonal keys along the axes both are exact."""
    q, v, one, zero = normal(K, K), normal(K, V), torch.ones(K, dtype=F64), torch.zeros(K, dtype=F64)
    center = torch.zeros(1, dtype=F64)  # lambda = 1
    for k, equal in ((torch.eye(K, dtype=F64), True), (keys()[:K], False)):
        diagonal, _ = run_head(q, k, v, one, None, Preconditioner(zero, one, center, form="unstable_atk"))
        assert torch.allclose(diagonal, exact_atk(q, k, v, 1.0)[0], atol=1e-12) == equal


def test_normalize_has_its_eps_under_the_root():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-3, 0.0]], dtype=F64)
    judge = torch.stack([x[0] / math.sqrt(25 + 1e-6), x[1], x[2] / math.sqrt(2e-6)])
    torch.testing.assert_close(normalize(x), judge, rtol=0, atol=1e-15)
