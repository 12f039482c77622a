"""The Triton backend on a GPU: every dtype against fp64, bits, graphs, memory, sizes past 2^31 elements. Skipped without a GPU.

Run as a script it prints the worst relative RMS error of each tensor over the matrix: python tests/kernels/test_triton_cuda.py
"""

from unittest import mock

import pytest
import torch

from kernels import chunk_torch
from kernels.chunk import Preconditioner, delta_rule
from kernels.layout import layout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
NAMES = ["dn", "gdn", "kda", "pdn", "pgdn", "pkda"]
PACKED = [0, 0, 1, 66, 66, 67, 195, 258, 258]
SHAPES = [
    dict(T=300, K=128, V=128),
    dict(T=258, bounds=PACKED, K=120, V=104),
    dict(T=130, K=64, V=256, gates=30.0),
    dict(T=70, K=256, V=60),
]
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 3e-3}
ROUNDINGS, DRAWS = 2, 5  # see `tolerances`


def judged(one, dtype):
    """What the backend gives and what fp64 gives, {name: tensor} each."""
    one = one.rounded(dtype)
    return one.run("triton", dtype, "cuda"), {n: x.cpu() for n, x in one.run("torch", torch.float64, "cuda").items()}


class _Rounded(torch.autograd.Function):
    """The write keys, and in the backward pass their gradient, once through dtype. stretch in [1, 2): another draw of the same errors."""

    @staticmethod
    def forward(ctx, w, dtype, stretch):
        ctx.dtype, ctx.stretch = dtype, stretch
        return (w * stretch).to(dtype).to(w.dtype) / stretch

    @staticmethod
    def backward(ctx, grad):
        return (grad * ctx.stretch).to(ctx.dtype).to(grad.dtype) / ctx.stretch, None, None


def tolerances(one, dtype, errors, device="cuda"):
    """{name: limit}. The gradients of gain, forget and center are sums of the write keys' gradient in which terms cancel: rounding that
    once to bf16, with all else in fp64, costs up to 4e-2 (root mean square over DRAWS), more or less from draw to draw. Where ROUNDINGS
    times this is more than LIMITS, it is the limit: as much again comes of the operands that make this gradient. With fp16 inputs too
    these sums are taken over bf16 terms (some are up to 1 / eps = 1e6, past fp16), so bf16's limit is theirs.
    """
    one = one.rounded(dtype)
    exact = {n: x.cpu() for n, x in one.run("torch", torch.float64, device).items()}
    squares = dict.fromkeys(exact, 0.0)
    for draw in range(DRAWS):

        def rounded(*given, write_key=chunk_torch.write_key, stretch=1 + draw / DRAWS):
            return _Rounded.apply(write_key(*given), dtype, stretch)

        with mock.patch.object(chunk_torch, "write_key", rounded):
            off = errors(one.run("torch", torch.float64, device), exact)
        squares = {n: total + off[n] ** 2 / DRAWS for n, total in squares.items()}
    terms = dtype if dtype == torch.float32 else torch.bfloat16
    return {n: max(LIMITS[terms], ROUNDINGS * squares[n] ** 0.5) if n in ("dp", "dc", "dm") else LIMITS[dtype] for n in exact}


MATRIX = [(name, dtype) for dtype in LIMITS for name in NAMES if dtype != torch.float16 or name in ("pgdn", "pkda")]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"T{s['T']}K{s['K']}")
@pytest.mark.parametrize("recurrence, dtype", MATRIX)
def test_matrix(recurrence, dtype, shape, case, errors):
    one = case(recurrence, **({"B": 2, "H": 3} | shape))
    found, limits = errors(*judged(one, dtype)), tolerances(one, dtype, errors)
    if dtype != torch.float32:
        limits |= {n: 5e-3 for n in ("s", "a") if n in found}
    assert all(found[n] <= limits[n] for n in found), (found, limits)  # NaN fails too


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recurrence, K", [("pgdn", 128), ("pgdn", 256), ("pkda", 128), ("dn", 120)])
def test_long_sequences_in_pieces(recurrence, K, dtype, case, errors):
    """Of 128 and of 5 chunks or more: the first is cut."""
    one = case(recurrence, 8500, bounds=[0, 8200, 8500], H=2, K=K, V=K)
    assert layout(1, 8500, (0, 8200, 8500), 64, 2, torch.device("cuda")).cut
    found, limits = errors(*judged(one, dtype)), tolerances(one, dtype, errors)
    assert all(found[n] <= limits[n] for n in found), (found, limits)


def test_repeats_are_bit_equal(case):
    one = case("pgdn", 1000, bounds=[0, 500, 1000], K=128, V=128, H=4)
    first = one.run("triton", torch.bfloat16, "cuda")
    for _ in range(20):
        again = one.run("triton", torch.bfloat16, "cuda")
        assert all(torch.equal(first[n], again[n]) for n in first)


def operands(B, T, H, D):
    q, k, v = (torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    g = torch.rand(B, T, H, device="cuda")
    return q, k, v, g, -g, Preconditioner(-g, g, torch.zeros(H, device="cuda"))


def test_a_graph_of_forward_and_backward_gives_the_same_bits():
    given = operands(1, 200, 2, 64)

    def step():
        o, _ = delta_rule(*given)
        return (o.detach(), *torch.autograd.grad(o.float().square().sum(), given[:3]))

    plain = step()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(plain, captured, strict=True))


def test_memory_kept_for_the_backward_pass():
    """1.35 KB a token and head at most at D = 128: inputs 784 B, and what is made."""
    B, T, H, D = 4, 2048, 8, 128
    given = operands(B, T, H, D)
    before = torch.cuda.memory_allocated()
    o, _ = delta_rule(*given)
    kept = torch.cuda.memory_allocated() - before - o.numel() * 2
    assert kept / (B * T * H) + 3 * D * 2 < 1350


def test_offsets_past_2_to_the_31():
    """The states of the chunks are 2.2e9 elements; the last row equals itself run alone (fla-org/flash-linear-attention#1080)."""
    q, k, v, g, decay, precond = operands(16, 16448, 32, 128)
    o, _ = delta_rule(q, k, v, g, decay, precond)
    (dk,) = torch.autograd.grad(o[-1].float().square().sum(), k)
    alone = k[-1:].detach().requires_grad_()
    last = Preconditioner(precond.decay[-1:], precond.gain[-1:], precond.center)
    o1, _ = delta_rule(q[-1:].detach(), alone, v[-1:].detach(), g[-1:], decay[-1:], last)
    (dk1,) = torch.autograd.grad(o1.float().square().sum(), alone)
    assert torch.equal(o[-1:], o1) and torch.equal(dk[-1:], dk1)


def test_many_one_token_documents():
    """65,600 programs (fla-org/flash-linear-attention#1077): halves give the same."""
    q, k, v, g, decay, _ = operands(1, 4100, 16, 16)
    with torch.no_grad():
        whole, _ = delta_rule(q, k, v, g, decay, cu_seqlens=torch.arange(4101))
        half, _ = delta_rule(*(x[:, :2050] for x in (q, k, v, g, decay)), cu_seqlens=torch.arange(2051))
    assert torch.equal(whole[:, :2050], half)


if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parent))
    import conftest

    for dtype in [getattr(torch, name) for name in sys.argv[1:]] or LIMITS:
        worst = {}
        for recurrence in NAMES:
            for shape in SHAPES:
                errors = conftest._errors(*judged(conftest._case(recurrence, **({"B": 2, "H": 3} | shape)), dtype))
                worst = {n: max(worst.get(n, 0), errors.get(n, 0)) for n in worst | errors}
        print(str(dtype).removeprefix("torch."), {n: f"{e:.1e}" for n, e in worst.items()}, flush=True)
