"""The scan over chunks: the only serial part of the forward pass, and the recomputation of its states for the backward pass.

Per chunk, with the state S [K, V] in fp32 registers and read through its rounding to the input dtype in the products:

    X = beta (V - exp(G) khat S) ;  R = T X
    O = scale [exp(G) qhat S + (qhat w^T * M) R],  M_ij = exp(G_i - G_j),  i >= j
    S' = exp(G_C) S + w^T (exp(G_C - G) R)

One program a span, head and block of value channels, which do not interact. `forward` writes o and the final states; `states` writes the
state that each chunk meets, and neither reads q nor writes o.

Cost, D = 128, 16 bit, a token and head: forward reads q, k, v, t (and w) and writes o, 1.2 (1.4) KB; states reads k, v, t (and w) and
writes 512 B, 1.2 (1.4) KB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layout import CHUNK, Inputs, Layout, Solved
from kernels.tiles import BETA, HIGH, KEY_NORM, LOW, QUERY_NORM, dot_precision, last, load_row, load_tile, spans, store_row, store_tile
from kernels.tuned import setting


@triton.jit
def _scan(
    q, k, v, t, w, rows, s_0,  # inputs
    o, s, h,  # outputs
    table, N, H, q_stride, k_stride, v_stride, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, WRITE: tl.constexpr, NORMALIZE: tl.constexpr, INITIAL: tl.constexpr, STORE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Formulas above. WRITE: w holds the write keys, else they are rk * k. STORE: h instead of o and s."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    block, head, n = tl.program_id(0) % blocks, tl.program_id(0) // blocks % H, tl.program_id(0) // blocks // H
    chunk, chunks = tl.load(table + 4 * n).to(tl.int64), tl.load(table + 4 * n + 1)
    token, stop = tl.load(table + 4 * n + 2), tl.load(table + 4 * n + 2) + tl.load(table + 4 * n + 3)
    d, e = tl.arange(0, BK), block * BV + tl.arange(0, BV)
    inside = (d < K)[:, None] & (e < V)[None, :]
    own = (n * H + head).to(tl.int64) * K * V
    corner = d[:, None] * V + e[None, :]
    S = tl.zeros((BK, BV), tl.float32)
    if INITIAL:
        S = tl.load(s_0 + own + corner, mask=inside, other=0.0)
    for _ in range(chunks):
        count = tl.minimum(stop - token, C)
        key = load_tile(k, token, count, k_stride, head, 0, K, BK, C)
        value = load_tile(v, token, count, v_stride, head, block * BV, V, BV, C)
        T = load_tile(t, token, count, H * C, head, 0, C, C, C)
        beta = load_row(rows, BETA, token, count, H, N, head, C)
        rk = load_row(rows, KEY_NORM, token, count, H, N, head, C)
        state = S.to(key.dtype)
        if STORE:
            tl.store(h + (chunk * H + head) * K * V + corner, state, mask=inside)
        read, keep = rk, rk * 0.0 + 1.0
        if DECAY:
            high = load_row(rows, HIGH, token, count, H, N, head, C)
            low = load_row(rows, LOW, token, count, H, N, head, C)
            end, end_low = last(high, count, C), last(low, count, C)
            grown = tl.exp2(high + low)
            read = rk * grown
            keep = tl.exp2((end - high) + (end_low - low))
        X = beta[:, None] * (value.to(tl.float32) - read[:, None] * tl.dot(key, state, input_precision=PRECISION))
        R = tl.dot(T, X.to(key.dtype), input_precision=PRECISION)
        if WRITE:
            write = load_tile(w, token, count, H * K, head, 0, K, BK, C)
        else:
            write = key
            R *= rk[:, None]
        if not STORE:
            query = load_tile(q, token, count, q_stride, head, 0, K, BK, C)
            rq = tl.full((C,), 1.0, tl.float32)
            if NORMALIZE:
                wide = query.to(tl.float32)
                rq = tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)
            if block == 0:
                store_row(rows, rq, QUERY_NORM, token, count, H, N, head, C)
            rq *= scale
            A = tl.dot(query, tl.trans(write), input_precision=PRECISION) * rq[:, None]
            if DECAY:
                A *= spans(high, low, count, C)
                rq *= grown
            else:
                i = tl.arange(0, C)
                A = tl.where(i[:, None] >= i[None, :], A, 0.0)
            O = tl.dot(query, state, input_precision=PRECISION) * rq[:, None]
            O += tl.dot(A.to(key.dtype), R.to(key.dtype), input_precision=PRECISION)
            store_tile(o, O, token, count, H * V, head, block * BV, V, BV, C)
        if DECAY:
            S *= tl.exp2(end + end_low)
            R *= keep[:, None]
        S += tl.dot(tl.trans(write), R.to(key.dtype), input_precision=PRECISION)
        token += C
        chunk += 1
    if not STORE:
        tl.store(s + own + corner, S, mask=inside)


def forward(x: Inputs, solved: Solved, spans: Tensor, s_0: Tensor | None) -> tuple[Tensor, Tensor]:
    """o [N, H, V] in v's dtype and the final states [S, H, K, V] fp32 of the spans [S, 4]; completes solved.rows with QUERY_NORM."""
    (_, H, K), V = x.k.shape, x.v.shape[-1]
    o = torch.empty(x.v.shape, dtype=x.v.dtype, device=x.v.device)
    s = torch.empty(len(spans), H, K, V, dtype=torch.float32, device=x.v.device)
    _launch(x, solved, spans, s_0, o=o, s=s)
    return o, s


def states(x: Inputs, solved: Solved, layout: Layout, spans: Tensor, s_0: Tensor | None) -> Tensor:
    """h [M, H, K, V] in the input dtype: the state that each chunk meets."""
    h = x.k.new_empty(len(layout.chunks), *x.k.shape[1:], x.v.shape[-1])
    _launch(x, solved, spans, s_0, h=h)
    return h


def _launch(x: Inputs, solved: Solved, spans: Tensor, s_0: Tensor | None, o=None, s=None, h=None) -> None:
    (N, H, K), V = x.k.shape, x.v.shape[-1]
    choice = setting("scan" if h is None else "states", x.k, programs=len(spans) * H)
    block = min(choice.block, triton.next_power_of_2(V))
    _scan[(len(spans) * H * triton.cdiv(V, block),)](
        x.q, x.k, x.v, solved.t, solved.w, solved.rows, s_0, o, s, h,
        spans, N, H, x.q.stride(0), x.k.stride(0), x.v.stride(0), x.scale,
        K=K, V=V, BK=triton.next_power_of_2(K), BV=block, C=CHUNK, DECAY=x.decay is not None, WRITE=solved.w is not None,
        NORMALIZE=x.normalize, INITIAL=s_0 is not None, STORE=h is not None, PRECISION=dot_precision(x.k),
        num_warps=choice.warps, num_stages=choice.stages,
    )  # fmt: skip
