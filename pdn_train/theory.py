"""The paper's exact statements, computed: `python -m pdn_train.theory` prints each with its numbers and exits 1 where one does not hold.

    Theorem 3.1     with the whole inverse Gram matrix, on the write key (ATK) or on the query (ATQ), the outputs are the same for every t
    App. C.2        with its diagonal they are not: after one token k = v = (1, 1), lambda = 1, the state that reads out is 1/2 or 1/3
    Diagonals       (diag G)^-1 is not diag(G^-1)
    Theorem 3.2     how linear attention and DeltaNet approach v = S* k over t random keys: two curves, measured against their formulas
    Eigenvalues     of one PGDN step: alpha K - 1 times and alpha (1 - beta k.w) once; where that bound stops (products of steps)

Statements as in docs/paper.md, section 1 (arXiv:2604.21100); everything in fp64 on the CPU, seeded, a few seconds. Curves are means over
DRAWS draws with their standard error, and must lie within five of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.operands import Operands, Preconditioner, State
from kernels.reference import advance, exact_atk, exact_atq
from pdn_train.telling import quietly

DRAWS = 4000


@dataclass(frozen=True)
class Statement:
    """One line of the report: what is claimed, the numbers, and whether they bear it out."""

    name: str
    numbers: str
    holds: bool


def report(seed: int = 0) -> Iterator[Statement]:
    draw = torch.Generator().manual_seed(seed)
    yield equivalence(draw)
    yield counterexample()
    yield diagonals()
    yield from approach(draw)
    yield eigenvalues(draw)
    yield outside()
    yield products()


def sphere(draw: torch.Generator, *shape: int) -> Tensor:
    """Vectors uniform on the unit sphere of the last axis."""
    x = torch.randn(shape, dtype=torch.float64, generator=draw)
    return x / x.norm(dim=-1, keepdim=True)


# ---- Theorem 3.1 and the diagonal forms ----


def equivalence(draw: torch.Generator) -> Statement:
    """max over t of |ATK - ATQ| for 200 tokens, K = 16, V = 8, three ridges; S_0 = 0 and P_0 = I / lambda."""
    worst = 0.0
    for ridge in (0.1, 1.0, 10.0):
        q, k, v = sphere(draw, 200, 16), sphere(draw, 200, 16), torch.randn(200, 8, dtype=torch.float64, generator=draw)
        worst = max(worst, (exact_atk(q, k, v, ridge)[0] - exact_atq(q, k, v, ridge)[0]).abs().max().item())
    return Statement("Theorem 3.1: exact ATK = exact ATQ at every t", f"largest difference {worst:.1e}", worst < 1e-11)


def counterexample() -> Statement:
    """App. C.2 in the ablations' own code: forms "atq" (reads q / (a_t + lambda)) and "unstable_atk" (writes along k / (a_{t-1} + lambda)).

    Read with the unit vectors: the rows of the matrix that maps a query to an output.
    """
    values = {}
    for form in ("atq", "unstable_atk"):
        one, zero = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
        precond = Preconditioner(decay=zero, gain=one, center=torch.zeros(1, dtype=torch.float64), form=form)  # lambda = exp(0)
        rows = []
        for unit in torch.eye(2, dtype=torch.float64):
            x = Operands(unit.expand(1, 1, 2), torch.ones(1, 1, 2).double(), torch.ones(1, 1, 2).double(), one, None, precond)
            start = State(torch.zeros(1, 1, 2, 2, dtype=torch.float64), torch.zeros(1, 1, 2, dtype=torch.float64))
            rows.append(advance(x, start)[0].flatten())
        values[form] = torch.stack(rows)
    atq, atk = values["atq"], values["unstable_atk"]
    holds = (atq - 1 / 2).abs().max() < 1e-15 and (atk - 1 / 3).abs().max() < 1e-15
    numbers = f"diagonal ATQ {atq.unique().tolist()}, diagonal ATK {[round(x, 6) for x in atk.unique().tolist()]}"
    return Statement("App. C.2: diagonal ATK and ATQ differ (1/3, 1/2)", numbers, bool(holds))


def diagonals() -> Statement:
    k = torch.ones(2, dtype=torch.float64)
    gram = torch.eye(2, dtype=torch.float64) + torch.outer(k, k)
    of_diagonal, of_inverse = (1 / gram.diagonal())[0].item(), torch.linalg.inv(gram).diagonal()[0].item()
    holds = abs(of_diagonal - 1 / 2) < 1e-15 and abs(of_inverse - 2 / 3) < 1e-15
    return Statement("(diag G)^-1 is not diag(G^-1): 1/2, 2/3 for G = I + 11^T", f"{of_diagonal:.6f}, {of_inverse:.6f}", holds)


# ---- Theorem 3.2 ----


def approach(draw: torch.Generator, d: int = 8) -> Iterator[Statement]:
    """E|o - o*|^2 / |S*|_F^2 after t tokens with v = S*^T k, keys and queries uniform on the sphere of R^d.

    Linear attention, S_t = sum k v^T: (1 - t/d + t (t - 1) / d^2) / d. DeltaNet with beta: (1 - beta (2 - beta) / d)^t / d, which is at
    most 1 / d (the theorem's bound) and falls for every beta in (0, 2).
    """
    target = torch.randn(d, d, dtype=torch.float64, generator=draw)
    k, q = sphere(draw, DRAWS, 4 * d, d), sphere(draw, DRAWS, d)
    for name, beta, exact in (
        ("linear attention", None, lambda t: (1 - t / d + t * (t - 1) / d**2) / d),
        ("DeltaNet, beta 1", 1.0, lambda t: (1 - 1 / d) ** t / d),
        ("DeltaNet, beta 0.5", 0.5, lambda t: (1 - 0.75 / d) ** t / d),
    ):
        means, errors = _error_curve(target, k, q, beta)
        times = (1, d // 2, d, 2 * d, 4 * d)
        formula = torch.tensor([exact(t) for t in range(1, 4 * d + 1)], dtype=torch.float64)
        holds = bool(((means - formula).abs() <= 5 * errors).all()) and (beta is None or bool((formula <= 1 / d).all()))
        shown = ", ".join(f"t={t}: {means[t - 1]:.4f} ({formula[t - 1]:.4f})" for t in times)
        yield Statement(f"Theorem 3.2, {name}: measured (formula), bound for DeltaNet 1/d = {1 / d:.4f}", shown, holds)


def _error_curve(target: Tensor, k: Tensor, q: Tensor, beta: float | None) -> tuple[Tensor, Tensor]:
    """Mean and standard error over draws, for every t, of |S_t^T q - S*^T q|^2 / |S*|_F^2; beta None: linear attention."""
    s = torch.zeros(len(k), *target.shape, dtype=torch.float64)
    means, errors = [], []
    for t in range(k.shape[1]):
        key = k[:, t, :, None]  # [draws, d, 1]
        said = 0 if beta is None else s.mT @ key
        s = s + (1.0 if beta is None else beta) * key @ (target.T @ key - said).mT
        error = ((s - target).mT @ q[..., None]).square().sum((1, 2)) / target.square().sum()
        means.append(error.mean())
        errors.append(error.std() / len(error) ** 0.5)
    return torch.stack(means), torch.stack(errors)


# ---- eigenvalues ----


def eigenvalues(draw: torch.Generator, size: int = 12, bound: float = 1.5) -> Statement:
    """Of alpha (I - beta w k^T), w = b * k b anywhere in [1/x, x], against the formula; beta x <= 2 keeps all in the unit disk."""
    worst, largest, lowest, highest = 0.0, 0.0, bound, 1 / bound
    for _ in range(200):
        k, u = sphere(draw, size), torch.rand(size + 2, dtype=torch.float64, generator=draw)
        w = bound ** (2 * u[:size] - 1) * k
        alpha, beta = u[size].item(), u[size + 1].item() * 2 / bound
        found = torch.linalg.eigvals(alpha * (torch.eye(size, dtype=torch.float64) - beta * torch.outer(w, k)))
        expected = torch.full((size,), alpha, dtype=torch.complex128)
        along = alpha * (1 - beta * torch.dot(k, w))
        expected[(found - along).abs().argmin()] = along.item()
        worst = max(worst, (found - expected).abs().max().item())
        largest = max(largest, found.abs().max().item())
        lowest, highest = min(lowest, torch.dot(k, w).item()), max(highest, torch.dot(k, w).item())
    numbers = f"error of the formula {worst:.1e}, largest modulus {largest:.4f}, k.w in [{lowest:.3f}, {highest:.3f}]"
    holds = worst < 1e-7 and largest <= 1 and 1 / bound <= lowest and highest <= bound  # a multiple eigenvalue is found to 1e-8
    return Statement(f"Eigenvalues of one step, x = {bound}, beta <= 2/x: alpha, and alpha (1 - beta k.w)", numbers, holds)


def outside() -> Statement:
    """beta x = 3 > 2: with b = x in every channel k.w = x, and the write eigenvalue is 1 - 3 = -2."""
    k = torch.eye(4, dtype=torch.float64)[0]
    found = torch.linalg.eigvals(torch.eye(4, dtype=torch.float64) - 2.0 * 1.5 * torch.outer(k, k)).real.min().item()
    return Statement(
        "beta = 2 with x = 1.5 leaves the unit disk (so neg_eigval with a preconditioner is refused)", f"{found:.2f}", found == -2
    )


def products() -> Statement:
    """Two steps at the bound, each with spectral radius 1, whose product has a larger one: w is not parallel to k."""
    x, beta = 1.5, 2 / 1.5
    angles, b = torch.deg2rad(torch.tensor([25.0, 115.0], dtype=torch.float64)), torch.tensor([[x, 1 / x], [1 / x, x]], dtype=torch.float64)
    k = torch.stack([angles.cos(), angles.sin()], 1)
    steps = [torch.eye(2, dtype=torch.float64) - beta * torch.outer(w, key) for key, w in zip(k, b * k, strict=True)]
    radii = [torch.linalg.eigvals(m).abs().max().item() for m in (*steps, steps[1] @ steps[0])]
    numbers = f"radii {radii[0]:.4f}, {radii[1]:.4f}; of their product {radii[2]:.4f}"
    return Statement("The bound is for one step: a product of two may grow", numbers, max(radii[:2]) <= 1 + 1e-12 < radii[2])


def main(argv: list[str] | None = None) -> int:
    about = "Compute the paper's exact statements and print each with its numbers; exits 1 where one does not hold."
    argparse.ArgumentParser(prog="pdn_train.theory", description=about).parse_args(argv)
    wrong = 0
    for statement in report():
        wrong += not statement.holds
        print(f"{'holds' if statement.holds else 'WRONG'}  {statement.name}\n       {statement.numbers}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(quietly(main))
