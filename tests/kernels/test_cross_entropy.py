"""The summed cross-entropy against torch's own over all logits: loss, both gradients, precision, and what it holds at once."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import cross_entropy
from kernels.cross_entropy import IGNORED, summed_cross_entropy


def operands(rows=300, size=24, vocab=50, dtype=torch.float64):
    """hidden, weight and labels; of these every eleventh and a whole piece of 128 ask for nothing."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, size, dtype=torch.float64, generator=generator).to(dtype).requires_grad_() for n in (rows, vocab))
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    labels[::11] = labels[128:256] = IGNORED
    return hidden, weight, labels


def judge(hidden, weight, labels):
    return F.cross_entropy(hidden.double() @ weight.double().T, labels, ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("pieces", [1, 3])
def test_loss_and_gradients_equal_torchs(monkeypatch, pieces):
    monkeypatch.setitem(cross_entropy.CHUNK_LOGITS, "torch", (512 if pieces == 1 else 255) * 50)  # 255 rows fit: 128 at once, 44 at last
    hidden, weight, labels = operands()
    loss, expected = summed_cross_entropy(hidden, weight, labels), judge(hidden, weight, labels)
    assert loss.dtype == torch.float64 and abs(loss / expected - 1) < 1e-13
    for got, want in zip(torch.autograd.grad(loss / 7, (hidden, weight)), torch.autograd.grad(expected / 7, (hidden, weight)), strict=True):
        assert (got - want).norm() <= 1e-13 * want.norm()


@pytest.mark.parametrize("vocab, rows", [(32_000, 2048), (50_304, 1280), (2**19, 128), (2**21, 128)])
def test_pieces_are_whole_row_tiles(vocab, rows):
    assert cross_entropy._rows_at_once(vocab, "torch") == rows


def test_no_targets_give_zero_and_no_nan():
    hidden, weight, labels = operands()
    loss = summed_cross_entropy(hidden, weight, torch.full_like(labels, IGNORED))
    loss.backward()
    assert loss.item() == 0 and not hidden.grad.any() and not weight.grad.any()


def test_large_logits_do_not_overflow():
    hidden, weight, labels = operands(dtype=torch.float32)
    loss = summed_cross_entropy(hidden * 1000, weight, labels)
    assert torch.isfinite(loss) and abs(loss.double() / judge(hidden * 1000, weight, labels) - 1) < 1e-5


def test_loss_is_fp32_and_the_scale_of_its_gradient_exact_in_bf16():
    """Rounded to bf16, 1/3 would make the whole gradient 0.13 % larger; unbiased rounding of its 7,200 entries leaves far less."""
    hidden, weight, labels = operands(dtype=torch.bfloat16)
    loss = summed_cross_entropy(hidden, weight, labels)
    assert loss.dtype == torch.float32 and abs(loss.double() / judge(hidden, weight, labels) - 1) < 2e-3
    one, third = (
        torch.autograd.grad(summed_cross_entropy(hidden, weight, labels) * f, hidden)[0].double().abs().sum() for f in (1.0, 1 / 3)
    )
    assert abs(3 * third / one - 1) < 4e-4


class Largest(TorchDispatchMode):
    """The largest output of any operator, in elements."""

    elements = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("with_gradients", [True, False])
def test_all_logits_never_exist_at_once(monkeypatch, with_gradients):
    monkeypatch.setitem(cross_entropy.CHUNK_LOGITS, "torch", 130 * 3000)
    hidden, weight, labels = operands(rows=400, vocab=3000)
    with torch.set_grad_enabled(with_gradients), Largest() as largest:
        loss = summed_cross_entropy(hidden, weight, labels)
    assert loss.requires_grad == with_gradients and largest.elements == 128 * 3000
