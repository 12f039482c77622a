"""Time the passes round the recurrence: `python -m kernels.bench_mixer [--shape B,T,H,D] [--hidden N] [--mlp N] [--dtype bf16|fp32]`.

A row a pass and direction: milliseconds of a replayed CUDA graph (median of 20), the bytes that must be moved, and their share of what an
elementwise negation of 1 GiB reaches in the same process. Each tensor counts once; partial sums and parameters are not counted.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.conv import short_conv
from kernels.gates import GateColumns, GateParameters, channel_decay
from kernels.mixer_inputs import mixer_inputs
from kernels.norm import gated_rms_norm, residual_rms_norm, rms_norm
from kernels.swiglu import swiglu

REPEATS = 20
NEGATED = 2**30  # bytes


class Pass(NamedTuple):
    name: str
    call: Callable[..., tuple[Tensor | None, ...]]  # of the inputs
    inputs: list[Tensor]
    forward: int  # bytes
    backward: int


def passes(B: int, T: int, H: int, D: int, hidden: int, mlp: int, dtype: torch.dtype) -> list[Pass]:
    N, W, item = B * T, H * D, dtype.itemsize

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(dtype).requires_grad_()

    x, heads, gate, stream = made(B, T, 3 * W), made(B, T, H, D), made(B, T, H, D), made(B, T, hidden)
    weight, head_weight, bias, norm_weight = made(3 * W, 4), made(D), made(H, D), made(hidden)
    conv, row, head, gates = 3 * W * N * item, N * hidden * item, N * W * item, 4 * H * N
    both = [made(B, T, 3 * W + 4 * H), weight, *(made(H) for _ in range(5))]
    columns = GateColumns(H, 3 * W, 3 * W + H, 3 * W + 2 * H, 3 * W + 3 * H)

    def inputs(x: Tensor, weight: Tensor, *parameters: Tensor) -> tuple:
        m = mixer_inputs(x, weight, columns, GateParameters(*parameters), backend="triton")
        return m.q, m.k, m.v, *m.gates

    return [
        Pass("conv", lambda x, w: short_conv(x, w, backend="triton"), [x, weight], 2 * conv, 3 * conv),
        Pass("conv and gates", inputs, both, 2 * conv + gates * (item + 4), 3 * conv + gates * (2 * item + 4)),
        Pass("channel decay", lambda *a: (channel_decay(*a, "triton"),), [heads, made(H), bias], 2 * head, 3 * head),
        Pass("norm, heads", lambda x, w: (rms_norm(x, w, 1e-6, "triton"),), [heads, head_weight], 2 * head, 3 * head),
        Pass(
            "norm, heads, gated",
            lambda x, g, w, b: (gated_rms_norm(x, g, w, 1e-6, b, "triton"),), [heads, gate, head_weight, bias], 3 * head, 5 * head,
        ),
        Pass("norm, residual", lambda s, w: residual_rms_norm(s, None, w, 1e-6, "triton"), [stream, norm_weight], 2 * row, 4 * row),
        Pass(
            "norm, residual added",
            lambda s, x, w: residual_rms_norm(s, x, w, 1e-6, "triton"), [stream, made(B, T, hidden), norm_weight], 4 * row, 4 * row,
        ),
        Pass("swiglu", lambda x: (swiglu(x, "triton"),), [made(B, T, 2 * mlp)], 3 * N * mlp * item, 5 * N * mlp * item),
    ]  # fmt: skip


def replays_ms(run: Callable[[], object], stream: torch.cuda.Stream) -> float:
    """The median over replays of what run launches on the stream."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = run()
    times = []
    for _ in range(REPEATS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    del kept
    return sorted(times)[REPEATS // 2]


def measure(one: Pass) -> tuple[float, float]:
    """Milliseconds forward and backward. Autograd runs the backward pass on the stream of the forward pass: one stream for both."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        outputs = [y for y in one.call(*one.inputs) if y is not None]
        grads = [torch.randn_like(y) for y in outputs]

        def backward():
            return torch.autograd.grad(outputs, one.inputs, grads, retain_graph=True)

        def forward():
            with torch.no_grad():
                return one.call(*one.inputs)

        for _ in range(2):
            forward(), backward()
    torch.cuda.synchronize()
    return replays_ms(forward, stream), replays_ms(backward, stream)


def negation_bandwidth() -> float:
    """Bytes a second, read and written, of the negation of 1 GiB. (A copy is no kernel: in a graph it ran at two thirds of that.)"""
    source, target = (torch.zeros(NEGATED // 2, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    torch.cuda.synchronize()
    return 2e3 * NEGATED / replays_ms(lambda: torch.neg(source, out=target), torch.cuda.Stream())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="16,2048,8,128", metavar="B,T,H,D")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--mlp", type=int, default=2816)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no CUDA device: the Triton kernels are timed on a GPU")
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.dtype]
    bandwidth = negation_bandwidth()
    versions = f"torch {torch.__version__}, triton {importlib.import_module('triton').__version__}"
    print(f"{time.strftime('%Y-%m-%d')}, {torch.cuda.get_device_name()}, {versions}, {options.dtype}, {options.shape}")
    print(f"an elementwise negation: {bandwidth / 1e12:.2f} TB/s")
    print(f"{'pass':22}{'direction':>10}{'ms':>9}{'MB':>8}{'share of it':>15}")
    for one in passes(*(int(n) for n in options.shape.split(",")), options.hidden, options.mlp, dtype):
        for direction, size, ms in zip(("forward", "backward"), one[3:], measure(one), strict=True):
            print(f"{one.name:22}{direction:>10}{ms:9.3f}{size / 1e6:8.0f}{size / bandwidth / ms * 1e3:15.2f}", flush=True)


if __name__ == "__main__":
    main()
