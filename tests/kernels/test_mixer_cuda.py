"""The passes round the recurrence on a GPU at real shapes, in bf16 and fp32, against plain PyTorch in fp64. Skipped without a GPU."""

import pytest
import torch

from kernels import checks
from kernels.conv import short_conv, short_conv_step
from kernels.gates import GateColumns, GateParameters, channel_decay
from kernels.mixer_inputs import mixer_inputs
from kernels.norm import gated_rms_norm, residual_rms_norm, rms_norm
from kernels.swiglu import swiglu, swiglu_linear

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 6e-4}  # 16 bit: half a digit, once or twice
DTYPES = [torch.bfloat16, torch.float32, torch.float16]
PACKED = [0, 0, 1, 3, 600, 600, 1111, 1113, 2500]


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))).cuda()


def outputs_of(f, backend, inputs):
    made = f(backend, *inputs)
    return [y for y in (made if isinstance(made, tuple) else (made,)) if y is not None]


def errors(f, inputs, dtype):
    """Relative RMS error of each output and each gradient; inputs and output gradients are exact in dtype."""
    rounded = [x.to(dtype) for x in inputs]
    results = []
    for backend, leaves in (("triton", rounded), ("torch", [x.double() for x in rounded])):
        leaves = [x.detach().requires_grad_() for x in leaves]
        outputs = outputs_of(f, backend, leaves)
        grads = [(normal(*y.shape) / 64).to(dtype).to(y.dtype) for y in outputs]  # sums over tokens stay within fp16
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, grads)])
    return [((x.double() - y).norm() / y.norm()).item() for x, y in zip(*results, strict=True)]


def assert_right(f, inputs, dtype):
    found = errors(f, inputs, dtype)
    assert all(error <= LIMITS[dtype] for error in found), found  # NaN fails too


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 1000, 3072), (2, 333, 3 * 1680), (5, 2, 40)])
def test_conv(shape, dtype):
    assert_right(lambda b, x, w: short_conv(x, w, backend=b), [normal(*shape), normal(shape[2], 4)], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_conv_packed_with_histories(dtype):
    cu_seqlens = torch.tensor(PACKED)
    inputs = [normal(1, PACKED[-1], 768), normal(768, 4), normal(len(PACKED) - 1, 3, 768)]
    assert_right(lambda b, x, w, h: short_conv(x, w, h, True, cu_seqlens, b), inputs, dtype)


@torch.no_grad()
def test_conv_step():
    x, w, state = normal(70, 3072).bfloat16(), normal(3072, 4).bfloat16(), normal(70, 3, 3072).bfloat16()
    other = state.clone()
    got, judge = short_conv_step(state, x, w, "triton"), short_conv_step(other, x, w)
    assert torch.equal(state, other)
    torch.testing.assert_close(got, judge, rtol=2**-7, atol=1e-6)


def columns(H, K, channel):
    W = 3 * H * K
    if channel:
        return GateColumns(H, W, None, W + H + 2 * K, W + 2 * H + 2 * K, rank=K, low=W + H, output=W + H + K), 2
    return GateColumns(H, W, W + H, W + 2 * H, W + 3 * H), 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize("H, K", [(8, 128), (14, 120)])
def test_mixer_inputs(H, K, channel, dtype):
    where, absent = columns(H, K, channel)
    size, W = (2 * K + 3 * H if channel else 4 * H), 3 * H * K

    def f(backend, x, w, *parameters):
        m = mixer_inputs(x, w, where, GateParameters(*(None,) * absent, *parameters), backend=backend)
        return m.q, m.k, m.v, *m.gates

    assert_right(f, [normal(2, 1000, W + size), normal(W, 4), *(normal(H) - 3 for _ in range(5 - absent))], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("H, K", [(8, 128), (14, 120), (3, 16), (2, 256)])
def test_heads(H, K, dtype):
    x, gate, weight, bias = normal(2, 1000, H, K), normal(2, 1001, H, K)[:, 1:], normal(K), normal(H, K)
    assert_right(lambda b, x, w: rms_norm(x, w, 1e-6, b), [x, weight], dtype)
    assert_right(lambda b, x, g, w: gated_rms_norm(x, g, w, 1e-6, backend=b), [x, gate, weight], dtype)
    assert_right(lambda b, x, g, w, c: gated_rms_norm(x, g, w, 1e-6, c, b), [x, gate, weight, bias], dtype)
    assert_right(lambda b, x, A, c: channel_decay(x, A, c, b), [x - 3, normal(H), bias], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [1024, 1680, 1792, 8192])
def test_stream(D, dtype):
    stream, x, weight = normal(3, 700, D), normal(3, 701, D)[:, 1:], normal(D)
    assert_right(lambda b, s, w: residual_rms_norm(s, None, w, 1e-6, b), [stream, weight], dtype)
    assert_right(lambda b, s, x, w: residual_rms_norm(s, x, w, 1e-6, b), [stream, x, weight], dtype)
    assert_right(lambda b, x: swiglu(x, b), [stream], dtype)
    assert_right(lambda b, x, w: swiglu_linear(x, w, b), [stream, normal(40, D // 2)], dtype)


def test_repeats_are_bit_equal():
    where, _ = columns(8, 128, False)
    x, w = normal(4, 1000, 3 * 1024 + 32).bfloat16(), normal(3072, 4).bfloat16()
    leaves = [t.requires_grad_() for t in (x, w, *(normal(8).bfloat16() for _ in range(5)), normal(128).bfloat16())]

    def once():
        m = mixer_inputs(leaves[0], leaves[1], where, GateParameters(*leaves[2:7]), backend="triton")
        y = rms_norm(m.v.unflatten(-1, (8, 128)), leaves[7], 1e-6, "triton")
        loss = y.float().square().sum() + sum(g.square().sum() for g in m.gates[:5]) + (m.q * m.k).float().sum()
        return torch.autograd.grad(loss, leaves)

    first = once()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


def inputs_of_a_layer(B, T, dtype):
    """Of `sums_of_a_layer`, for 8 heads of 128 channels."""
    rows = [normal(B, T, 3 * 1024 + 32), *(normal(B, T, 8, 128) / 8 for _ in range(3))]
    parameters = [normal(3072, 4) / 2, *(normal(8) - 3 for _ in range(5)), normal(128), normal(128), normal(8, 128)]
    return [x.to(dtype) for x in (*rows, *parameters)]


def sums_of_a_layer(backend, x, plain, gated, gate, weight, *parameters):
    """Every pass whose last programs add up what all found for the parameters."""
    *gates, norm, gated_norm, bias = parameters
    m = mixer_inputs(x, weight, columns(8, 128, False)[0], GateParameters(*gates), backend=backend)
    return m.q, m.k, m.v, *m.gates[:5], rms_norm(plain, norm, 1e-6, backend), gated_rms_norm(gated, gate, gated_norm, 1e-6, bias, backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_last_programs_see_all_sums(dtype):
    """At a training shape, with programs on all multiprocessors: 50 backward passes of one graph, and plain PyTorch in fp32."""
    inputs = inputs_of_a_layer(16, 2048, dtype)
    leaves, judges = ([x.detach().to(kind).requires_grad_() for x in inputs] for kind in (dtype, torch.float32))
    outputs = sums_of_a_layer("triton", *leaves)
    grads = [(torch.randn_like(y, dtype=torch.float32) / 64).to(dtype).to(y.dtype) for y in outputs]
    first = torch.autograd.grad(outputs, leaves, grads, retain_graph=True)
    for _ in range(50):
        again = torch.autograd.grad(outputs, leaves, grads, retain_graph=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    del outputs, again
    plain = sums_of_a_layer("torch", *judges)
    expected = torch.autograd.grad(plain, judges, [grad.float() for grad in grads])
    found = [((x.float() - y).norm() / y.norm()).item() for x, y in zip(first, expected, strict=True)]
    assert all(error <= LIMITS[dtype] for error in found), found


def test_sums_in_a_graph():
    """Forward and backward captured together, replayed three times: each replay begins with zero counters and ends with the same bits."""
    stream = torch.cuda.Stream()
    leaves = [x.requires_grad_() for x in inputs_of_a_layer(2, 1000, torch.bfloat16)]

    def step():
        outputs = sums_of_a_layer("triton", *leaves)
        return torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs])

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        plain = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    for _ in range(3):
        for x in captured:
            x.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(plain, captured, strict=True))


def test_no_wait_for_the_device_and_none_in_a_graph():
    host = torch.tensor(PACKED)
    cu_seqlens = checks.remember(host.cuda(), host)
    x, w = normal(1, PACKED[-1], 768).bfloat16(), normal(768, 4).bfloat16()
    plain, _ = short_conv(x, w, cu_seqlens=cu_seqlens, backend="triton")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again, _ = short_conv(x, w, cu_seqlens=cu_seqlens, backend="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = short_conv(x, w, cu_seqlens=cu_seqlens, backend="triton")
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(plain, again) and torch.equal(plain, captured)


def test_offsets_past_2_to_the_31():
    """2.2e9 elements: the last rows equal themselves run alone."""
    x = torch.randn(1, 2**21 + 2**16, 1024, device="cuda", dtype=torch.bfloat16)
    w, norm = normal(1024, 4).bfloat16(), normal(1024).bfloat16()
    with torch.no_grad():
        y, _ = short_conv(x, w, backend="triton")
        assert torch.equal(y[:, -100:], short_conv(x[:, -103:], w, backend="triton")[0][:, 3:])
        for f in (lambda x: rms_norm(x, norm, 1e-6, "triton"), lambda x: swiglu(x, "triton")):
            assert torch.equal(f(x)[:, -100:], f(x[:, -100:]))
