"""Compile every launch of the passes round the recurrence for sm_90 without a GPU, forward and backward; prints rows as `sm90` makes them.

Not a test itself: `test_sm90_passes.py` runs it in a process of its own, since Triton's interpreter must be off here and is on there.
"""

import json
import sys

import torch
from sm90 import Compilations

from kernels import conv_triton, cross_entropy_triton, gates_triton, mixer_inputs_triton, norm_triton, swiglu_triton
from kernels.gates import GateColumns, GateParameters

H, K = 8, 128
W = 3 * H * K


def made(*shape, dtype):
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def back(outputs, *inputs):
    torch.autograd.grad(sum(y.float().sum() for y in outputs if y is not None), inputs)


def mixer_inputs(dtype):
    """PGDN as it trains; PKDA with a history in and out."""
    parameters = [made(H, dtype=dtype) for _ in range(5)]
    weight, initial = made(W, 4, dtype=dtype), made(2, 3, W, dtype=dtype)
    x = made(2, 100, W + 4 * H, dtype=dtype)
    columns = GateColumns(H, W, W + H, W + 2 * H, W + 3 * H)
    parts, gates, _ = mixer_inputs_triton.run(x, weight, columns, GateParameters(*parameters), None, False, None)
    back([*parts, *gates], x, weight)
    x = made(2, 100, W + 3 * H + 2 * K, dtype=dtype)
    columns = GateColumns(H, W, None, W + H + 2 * K, W + 2 * H + 2 * K, rank=K, low=W + H, output=W + H + K)
    parameters = GateParameters(None, None, *parameters[2:])
    parts, gates, history = mixer_inputs_triton.run(x, weight, columns, parameters, initial, True, None)
    back([*parts, *gates, history], x, weight, initial)
    conv_triton.step(initial.detach(), x.detach()[:, 0, :W], weight)
    gates_triton.head_gates(x.detach()[:, 0], columns, parameters)


def passes(dtype):
    x, gate = made(2, 100, H, K, dtype=dtype), made(2, 100, H, K, dtype=dtype)
    weight, bias, rates = made(K, dtype=dtype), made(H, K, dtype=dtype), made(H, dtype=dtype)
    back([norm_triton.rms_norm(x, weight, 1e-6)], x, weight)
    back([norm_triton.gated_rms_norm(x, gate, bias, weight, 1e-6)], x, gate, bias, weight)
    back([gates_triton.channel_decay(x, rates, bias)], x, rates, bias)
    for hidden in (1024, 8192):
        stream, added, weight = made(2, 100, hidden, dtype=dtype), made(2, 100, hidden, dtype=dtype), made(hidden, dtype=dtype)
        back(norm_triton.residual_rms_norm(stream, added, weight, 1e-6), stream, weight)
    x = made(2, 100, 2 * 2816, dtype=dtype)
    back([swiglu_triton.swiglu(x)], x)
    back([swiglu_triton.swiglu_linear(x, made(16, 2816, dtype=dtype), True)], x)
    for gradient in (True, False):
        cross_entropy_triton.cross_entropy(made(8, 32000, dtype=dtype), torch.zeros(8, dtype=torch.int64), -100, gradient)
    cross_entropy_triton.scaled(x, torch.ones(()))


if __name__ == "__main__":
    dtype = getattr(torch, sys.argv[1])
    with Compilations() as compilations:
        mixer_inputs(dtype)
        passes(dtype)
    print(json.dumps([row | {"flags": {n: str(x) for n, x in row["flags"].items()}} for row in compilations.rows]))
