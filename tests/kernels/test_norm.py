"""RMSNorm, plain and gated, against the formula in fp64, and its gradients numerically."""

import pytest
import torch

from kernels.norm import gated_rms_norm, rms_norm

X = torch.randn(3, 7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
GATE = X.flip(0)
WEIGHT = X[0, 0] + 1


def judge(x, weight, eps):
    return x / (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt() * weight


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 3e-3), (torch.float16, 4e-4)])
def test_values(dtype, tolerance):
    x, gate, weight = X.to(dtype), GATE.to(dtype), WEIGHT.to(dtype)
    plain = judge(x.double(), weight.double(), 1e-6)
    gated = plain / (1 + torch.exp(-gate.double()))
    for y, expected in ((rms_norm(x, weight, 1e-6), plain), (gated_rms_norm(x, gate, weight, 1e-6), gated)):
        assert y.dtype == dtype
        assert ((y.double() - expected).norm() / expected.norm()).item() < tolerance


def test_statistics_are_fp32():
    """Squares of 300 overflow fp16, and a mean of 4,096 of them in bf16 would be wrong."""
    x = torch.full((1, 4096), 300.0, dtype=torch.float16)
    assert torch.equal(rms_norm(x, torch.ones(4096, dtype=torch.float16), 1e-6), torch.ones_like(x))


def test_small_inputs_are_held_by_eps():
    x = torch.full((1, 4), 1e-3, dtype=torch.float64)
    torch.testing.assert_close(rms_norm(x, torch.ones(4, dtype=torch.float64), 1e-6), x / (2e-6) ** 0.5, rtol=1e-14, atol=0)


def test_gradients():
    inputs = [t.clone().requires_grad_() for t in (X[:1, :2], GATE[:1, :2], WEIGHT)]
    assert torch.autograd.gradcheck(lambda x, g, w: gated_rms_norm(x, g, w, 1e-6), inputs)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-6), inputs[::2])


def test_wrong_shapes():
    with pytest.raises(ValueError, match=r"^weight.*\[24\]"):
        rms_norm(X, WEIGHT[:1], 1e-6)
    with pytest.raises(ValueError, match="^gate"):
        gated_rms_norm(X, GATE[:1], WEIGHT, 1e-6)
