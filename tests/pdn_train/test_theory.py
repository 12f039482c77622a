"""Every statement holds, and would not if the recurrence or the formula were another one."""

import pytest
import torch

from pdn_train import theory
from pdn_train.theory import exact_atk, exact_atq, sphere


@pytest.fixture
def draw():
    return torch.Generator().manual_seed(1)


def test_the_report_holds_on_another_seed(monkeypatch, capsys):
    monkeypatch.setattr(theory, "DRAWS", 1000)
    assert all(statement.holds for statement in theory.report(seed=3))
    assert theory.main([]) == 0
    said = capsys.readouterr().out
    assert said.count("holds  ") == 9 and "WRONG" not in said


def test_the_equivalence_needs_the_whole_matrix(monkeypatch, draw):
    """Another ridge on one side, or a diagonal in place of the inverse, and the outputs differ."""
    q, k, v = sphere(draw, 20, 4), sphere(draw, 20, 4), torch.randn(20, 3, dtype=torch.float64, generator=draw)
    assert (exact_atk(q, k, v, 1.0)[0] - exact_atq(q, k, v, 1.0)[0]).abs().max() < 1e-13
    monkeypatch.setattr(theory, "exact_atq", lambda q, k, v, ridge: exact_atq(q, k, v, 1.01 * ridge))
    assert not theory.equivalence(draw).holds


def test_the_exact_state_is_the_ridge_regression(draw):
    """The judge of both forms: argmin_S sum |S^T k - v|^2 + lambda |S|^2, by a solver that knows neither."""
    k, v = sphere(draw, 20, 4), torch.randn(20, 3, dtype=torch.float64, generator=draw)
    design = torch.cat([k, 0.5**0.5 * torch.eye(4, dtype=torch.float64)])
    expected = torch.linalg.lstsq(design, torch.cat([v, torch.zeros(4, 3, dtype=torch.float64)])).solution
    assert (exact_atk(k, k, v, 0.5)[1][-1] - expected).abs().max() < 1e-12


def test_the_curves_tell_a_wrong_formula(draw):
    """Linear attention's is more than five standard errors away from DeltaNet's from t = 6 on."""
    d = 8
    means, errors = theory._error_curve(torch.eye(d, dtype=torch.float64), sphere(draw, 1000, 2 * d, d), sphere(draw, 1000, d), 1.0)
    t = torch.arange(1, 2 * d + 1)
    other = (1 - t / d + t * (t - 1) / d**2) / d
    assert ((means - other).abs() > 5 * errors)[5:].all()
    assert ((means - (1 - 1 / d) ** t / d).abs() < 5 * errors).all()


def test_a_statement_that_fails_is_said_and_costs_the_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(theory, "report", lambda: iter([theory.Statement("a", "1", True), theory.Statement("b", "2", False)]))
    assert theory.main([]) == 1
    assert "WRONG  b" in capsys.readouterr().out


def test_help_computes_nothing(monkeypatch, capsys):
    monkeypatch.setattr(theory, "report", lambda: pytest.fail("computed"))
    with pytest.raises(SystemExit) as ended:
        theory.main(["--help"])
    assert ended.value.code == 0 and "exits 1 where one does not hold" in " ".join(capsys.readouterr().out.split())
