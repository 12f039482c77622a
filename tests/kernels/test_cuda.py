"""What only a GPU can show: the torch backend there against the fp64 reference, equal bits, no waiting, refusal under graph capture."""

import pytest
import torch

from kernels import checks
from kernels.chunk import delta_rule
from kernels.conv import short_conv

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
BOUNDS = [0, 0, 1, 66, 66, 67, 195, 258, 258]


@pytest.mark.parametrize("dtype, tolerance, states", [(torch.float32, 1e-5, 1e-5), (torch.bfloat16, 1e-2, 5e-3)])
def test_precisions(name, dtype, tolerance, states, case, assert_close):
    one = case(name, BOUNDS[-1], bounds=BOUNDS, K=120, V=100).rounded(dtype)
    assert_close(one.run("torch", dtype, "cuda"), one.run("reference"), tolerance, states)


def test_repeats_are_bit_equal(name, case):
    one = case(name, BOUNDS[-1], bounds=BOUNDS, K=128, V=128)
    first = one.run("torch", torch.bfloat16, "cuda")
    for _ in range(3):
        again = one.run("torch", torch.bfloat16, "cuda")
        assert all(torch.equal(first[n], again[n]) for n in first)


def packed(tokens=130):
    x = torch.randn(1, tokens, 2, 64, device="cuda", requires_grad=True)
    return x, torch.rand(1, tokens, 2, device="cuda")


def test_a_step_with_remembered_boundaries_never_waits_for_the_device():
    x, gates = packed()
    host = torch.tensor([0, 60, 130])
    cu_seqlens = checks.remember(host.cuda(), host)
    weight = torch.randn(64, 4, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        y, _ = short_conv(x.flatten(2)[..., :64], weight, cu_seqlens=cu_seqlens)
        o, _ = delta_rule(x, x, x, gates, -gates, cu_seqlens=cu_seqlens, backend="torch")
        (o.sum() + y.sum()).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_unchecked_boundaries_are_refused_while_a_graph_is_captured():
    x, gates = packed()
    fresh = torch.tensor([0, 60, 130], device="cuda")
    with pytest.raises(ValueError, match="^cu_seqlens.*captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        delta_rule(x, x, x, gates, cu_seqlens=fresh, backend="torch")
    torch.cuda.synchronize()
    assert checks.check_bounds(fresh, x) == (0, 60, 130)  # outside it is read
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert checks.check_bounds(fresh, x) == (0, 60, 130)  # and then known


def test_a_layer_of_340m_fits():
    """Forward and backward of 16 x 2,048 tokens, 8 heads of 128, diagonal decay: the worst of the six, within 10 GiB."""
    shape = (16, 2048, 8, 128)
    q, k, v, g = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(4))
    beta = torch.rand(shape[:3], device="cuda").requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    o, _ = delta_rule(q, k, v, beta, -torch.nn.functional.softplus(g), backend="torch")
    o.sum().backward()
    assert q.grad.isfinite().all()
    assert torch.cuda.max_memory_allocated() < 10 * 2**30
