"""One token of generation in one launch: the state is read and written once, in place.

    a = exp(p) a + c khat^2 ;  w = b(a) khat ;  S = exp(g) S ;  S += w (beta (v - S^T khat))^T ;  o = scale S^T qhat

with one g a head, or one for each row of S.
One program a sequence and head, the value channels in blocks: the statistic belongs to all of them. fp32 throughout. Cost, K = V = 128:
128 KB of memory traffic a sequence and head.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import aligned, launch, power_of_2
from kernels.operands import Preconditioner, State
from kernels.tiles import LOG2E, NORM_EPS

BLOCK = 32  # value channels at a time


@triton.jit
def _step(
    s, a, q, k, v, beta, decay, forget, gain, center, o, H, scale, log_bound, eps,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, PRECONDITION: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Formulas above."""
    at = tl.program_id(0).to(tl.int64)  # sequence * H + head
    d = tl.arange(0, BK)
    key = tl.load(k + at * K + d, mask=d < K, other=0.0).to(tl.float32)
    query = tl.load(q + at * K + d, mask=d < K, other=0.0).to(tl.float32) * scale
    if NORMALIZE:
        key *= tl.rsqrt(tl.sum(key * key, 0) + NORM_EPS)
        unscaled = tl.load(q + at * K + d, mask=d < K, other=0.0).to(tl.float32)
        query *= tl.rsqrt(tl.sum(unscaled * unscaled, 0) + NORM_EPS)
    write = key
    if PRECONDITION:
        statistic = tl.load(a + at * K + d, mask=d < K, other=0.0)
        statistic = tl.exp(tl.load(forget + at).to(tl.float32)) * statistic + tl.load(gain + at).to(tl.float32) * key * key
        tl.store(a + at * K + d, statistic, mask=d < K)
        r = tl.log(statistic + eps) - tl.load(center + at % H)
        write = tl.exp2(-LOG2E * log_bound * r / (1.0 + tl.abs(r))) * key
    gate = tl.load(beta + at).to(tl.float32)
    left = tl.full((BK,), 1.0, tl.float32)
    if DECAY == "scalar":
        left *= tl.exp(tl.load(decay + at).to(tl.float32))
    if DECAY == "channel":
        left = tl.exp(tl.load(decay + at * K + d, mask=d < K, other=0.0).to(tl.float32))
    for first in range(0, V, BV):
        e = first + tl.arange(0, BV)
        tile = s + at * K * V + d[:, None] * V + e[None, :]
        inside = (d < K)[:, None] & (e < V)[None, :]
        S = tl.load(tile, mask=inside, other=0.0)
        if DECAY != "none":
            S *= left[:, None]
        value = tl.load(v + at * V + e, mask=e < V, other=0.0).to(tl.float32)
        error = gate * (value - tl.sum(S * key[:, None], 0))
        S += write[:, None] * error[None, :]
        tl.store(tile, S, mask=inside)
        tl.store(o + at * V + e, tl.sum(S * query[:, None], 0).to(o.dtype.element_ty), mask=e < V)


def step(
    state: State,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor | None,
    precond: Preconditioner | None,
    scale: float | None,
    normalize_qk: bool,
) -> Tensor:
    """o [B, H, V] of a checked call (arguments as `kernels.decode.step`)."""
    (B, H, K), V = q.shape, v.shape[-1]
    gates = (None,) * 3 if precond is None else (precond.decay, precond.gain, precond.center.float())
    gates = [aligned(x) for x in (beta, decay, *gates)]
    s = aligned(state.s)  # the state itself unless it is an odd view
    a = None if precond is None else aligned(state.a)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    kind = "none" if decay is None else "channel" if decay.dim() == q.dim() else "scalar"
    log_bound, eps = (0.0, 1.0) if precond is None else (math.log(precond.bound), float(precond.eps))
    scale = K**-0.5 if scale is None else float(scale)  # Triton compiles an int in, which the key does not hold
    key = (q.dtype, v.dtype, K, V, H, normalize_qk, *(None if x is None else x.dtype for x in gates))
    launch(
        _step, B * H, key, s, a, aligned(q), aligned(k), aligned(v), *gates, o, H, scale, log_bound, eps,
        K=K, V=V, BK=power_of_2(K), BV=min(BLOCK, power_of_2(V)),
        DECAY=kind, PRECONDITION=precond is not None, NORMALIZE=normalize_qk, num_warps=4,
    )  # fmt: skip
    if s is not state.s:
        state.s.copy_(s)
    if a is not None and a is not state.a:
        state.a.copy_(a)
    return o
