"""The head's loss by the Triton kernels: in the interpreter (fp32, tiny) against fp64, on a GPU in bf16 and at the size of training."""

import os

import pytest
import torch
import torch.nn.functional as F

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from kernels import cross_entropy, cross_entropy_triton  # noqa: E402
from kernels.cross_entropy import IGNORED, summed_cross_entropy  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
on_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA GPU: bf16, and sizes that the interpreter takes minutes for")


def operands(rows, size, vocab, dtype=torch.float32, scale=1.0):
    """hidden, weight, and labels of which every fifth and the last 3 ask for nothing."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = ((scale * torch.randn(n, size, generator=generator)).to(DEVICE, dtype).requires_grad_() for n in (rows, vocab))
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    labels[::5] = labels[-3:] = IGNORED
    return hidden, weight, labels.to(DEVICE)


def judge(hidden, weight, labels, factor):
    """Loss and gradients of factor times it, in fp64 from the same rounded numbers."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    loss = F.cross_entropy(hidden @ weight.T, labels, ignore_index=IGNORED, reduction="sum")
    return loss.detach(), *torch.autograd.grad(loss * factor, (hidden, weight))


def errors(hidden, weight, labels, factor):
    loss = summed_cross_entropy(hidden, weight, labels, "triton")
    assert loss.dtype == torch.float32
    got = (loss.detach(), *torch.autograd.grad(loss * factor, (hidden, weight)))
    return [((x.double() - y).norm() / y.norm()).item() for x, y in zip(got, judge(hidden, weight, labels, factor), strict=True)]


@pytest.mark.parametrize("vocab", [50, 64])
@pytest.mark.parametrize("columns", [64, 16], ids=["at once", "in blocks"])
def test_loss_and_gradients(monkeypatch, vocab, columns):
    """Two pieces of rows; the factor 1/7 goes through the backward pass. Logits reach 30, where fp32's exp would not overflow by itself."""
    monkeypatch.setattr(cross_entropy_triton, "COLUMNS", columns)
    monkeypatch.setattr(cross_entropy, "ROW_TILE", 16)
    monkeypatch.setitem(cross_entropy.CHUNK_LOGITS, "triton", 16 * vocab)
    assert max(errors(*operands(22, 24, vocab), 1 / 7)) < 2e-6


@pytest.mark.parametrize("label", [50, -1])
def test_a_label_outside_the_vocabulary_makes_the_loss_nan(label):
    hidden, weight, labels = operands(6, 24, 50)
    labels[1] = label
    assert summed_cross_entropy(hidden, weight, labels, "triton").isnan()


def test_large_logits_do_not_overflow(monkeypatch):
    """Of 300 and more, the largest in the last block."""
    monkeypatch.setattr(cross_entropy_triton, "COLUMNS", 16)
    hidden, weight, labels = operands(6, 24, 50, scale=8.0)
    with torch.no_grad():
        weight[-1] = hidden[1]  # the logit of the last column is row 1's own square
    assert (hidden[1] @ weight[-1]) > 300
    assert max(errors(hidden, weight, labels, 1.0)) < 2e-6


def test_no_targets_give_zero():
    hidden, weight, labels = operands(6, 24, 50)
    loss = summed_cross_entropy(hidden, weight, torch.full_like(labels, IGNORED), "triton")
    loss.backward()
    assert loss.item() == 0 and not hidden.grad.any() and not weight.grad.any()


def test_without_gradients_the_loss_is_the_same():
    inputs = operands(6, 24, 50)
    with torch.no_grad():
        alone = summed_cross_entropy(*inputs, "triton")
    assert not alone.requires_grad and torch.equal(alone, summed_cross_entropy(*inputs, "triton").detach())


def test_scaling_rounds_once_and_ends_at_the_end(monkeypatch):
    monkeypatch.setattr(cross_entropy_triton, "ELEMENTS", 16)
    x = torch.arange(1.0, 38.0, device=DEVICE)
    assert torch.equal(cross_entropy_triton.scaled(x, torch.tensor(1 / 3, device=DEVICE)), x * torch.tensor(1 / 3, device=DEVICE))


def test_fp64_is_refused():
    hidden, weight, labels = operands(6, 24, 50)
    with pytest.raises(ValueError, match="hidden is torch.float64.*backend='torch'"):
        summed_cross_entropy(hidden.double(), weight.double(), labels, "triton")


@on_gpu
@pytest.mark.parametrize("vocab", [32000, 50257])
def test_in_bf16_at_the_size_of_training(vocab):
    """20,000 rows, three pieces or more. Judged beside the torch backend, whose softmax is fp32 too."""
    hidden, weight, labels = operands(20_000, 256, vocab, torch.bfloat16, scale=0.3)
    ours = errors(hidden, weight, labels, 1e-5)
    assert ours[0] < 1e-4 and max(ours[1:]) < 1e-2, ours
    runs = [torch.autograd.grad(summed_cross_entropy(hidden, weight, labels, "triton"), (hidden, weight)) for _ in range(2)]
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))
