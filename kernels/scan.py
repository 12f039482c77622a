"""The scan over chunks: the only serial part of the forward pass, and the recomputation of its states for the backward pass.

Per chunk, with N and QW from `kernels.solve` and B = diag(beta); the state S [K, V] stays in fp32 registers and is read through its
rounding to the input dtype in the products:

    E = V - exp(G) khat S ;  U = E - N (B E)
    O = scale [exp(G) qhat S + QW (B U)]
    S' = exp(G_C) S + w^T (exp(G_C - G) B U)

One program a span, head and block of value channels, which do not interact. `forward` writes o and the final states; `states` writes the
state that each chunk meets and U, and neither reads q nor writes o.

Cost, D = 128, 16 bit, a token and head: forward reads q, k, v, t, qw (and w) and writes o, 1.3 (1.5) KB; states reads k, v, t (and w) and
writes h and u, 1.4 (1.7) KB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layout import Inputs, Layout, Solved
from kernels.tiles import BETA, HIGH, KEY_NORM, LOW, QUERY_NORM, dot_precision, last, load_row, load_tile, store_tile
from kernels.tuned import setting


@triton.jit
def _scan(
    q, k, v, t, qw, w, rows, s_0,  # inputs
    o, s, h, u,  # outputs
    table, N, H, q_stride, k_stride, v_stride, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, WRITE: tl.constexpr, INITIAL: tl.constexpr, STORE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Formulas above. WRITE: w holds the write keys, else they are rk * k. STORE: h and u instead of o and s."""
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
        N_ = load_tile(t, token, count, H * C, head, 0, C, C, C)
        beta = load_row(rows, BETA, token, count, H, N, head, C)
        rk = load_row(rows, KEY_NORM, token, count, H, N, head, C)
        read, keep = rk, beta
        if DECAY:
            high = load_row(rows, HIGH, token, count, H, N, head, C)
            low = load_row(rows, LOW, token, count, H, N, head, C)
            end, end_low = last(high, count, C), last(low, count, C)
            grown = tl.exp2(high + low)
            read = rk * grown
            keep *= tl.exp2((end - high) + (end_low - low))
        state = S.to(key.dtype)
        if STORE:
            tl.store(h + (chunk * H + head) * K * V + corner, state, mask=inside)
        E = value.to(tl.float32) - read[:, None] * tl.dot(key, state, input_precision=PRECISION)
        U = tl.dot(N_, (beta[:, None] * E).to(key.dtype), E, input_precision=PRECISION)
        if STORE:
            store_tile(u, U, token, count, H * V, head, block * BV, V, BV, C)
        else:
            query = load_tile(q, token, count, q_stride, head, 0, K, BK, C)
            QW = load_tile(qw, token, count, H * C, head, 0, C, C, C)
            rq = load_row(rows, QUERY_NORM, token, count, H, N, head, C)
            if DECAY:
                rq *= grown
            O = tl.dot(query, state, input_precision=PRECISION) * rq[:, None]
            O = tl.dot(QW, (beta[:, None] * U).to(key.dtype), O, input_precision=PRECISION)
            store_tile(o, O * scale, token, count, H * V, head, block * BV, V, BV, C)
        if WRITE:
            write = load_tile(w, token, count, H * K, head, 0, K, BK, C)
        else:
            write = key
            keep *= rk
        if DECAY:
            S *= tl.exp2(end + end_low)
        S = tl.dot(tl.trans(write), (keep[:, None] * U).to(key.dtype), S, input_precision=PRECISION)
        token += C
        chunk += 1
    if not STORE:
        tl.store(s + own + corner, S, mask=inside)


def forward(x: Inputs, solved: Solved, layout: Layout, spans: Tensor, s_0: Tensor | None) -> tuple[Tensor, Tensor]:
    """o [N, H, V] in v's dtype and the final states [S, H, K, V] fp32 of the spans [S, 4]."""
    (_, H, K), V = x.k.shape, x.v.shape[-1]
    o = torch.empty(x.v.shape, dtype=x.v.dtype, device=x.v.device)
    s = torch.empty(len(spans), H, K, V, dtype=torch.float32, device=x.v.device)
    _launch(x, solved, spans, s_0, o=o, s=s)
    return o, s


def states(x: Inputs, solved: Solved, layout: Layout, spans: Tensor, s_0: Tensor | None) -> tuple[Tensor, Tensor]:
    """h [M, H, K, V], the state that each chunk meets, and u [N, H, V], the corrected errors U; in the input dtype."""
    h = x.k.new_empty(len(layout.chunks), *x.k.shape[1:], x.v.shape[-1])
    u = x.v.new_empty(x.v.shape)
    _launch(x, solved, spans, s_0, h=h, u=u)
    return h, u


def _launch(x: Inputs, solved: Solved, spans: Tensor, s_0: Tensor | None, o=None, s=None, h=None, u=None) -> None:
    (N, H, K), V = x.k.shape, x.v.shape[-1]
    choice = setting("scan" if h is None else "states", x.k, programs=len(spans) * H)
    block = min(choice.block, triton.next_power_of_2(V))
    _scan[(len(spans) * H * triton.cdiv(V, block),)](
        x.q, x.k, x.v, solved.t, solved.qw, solved.w, solved.rows, s_0, o, s, h, u,
        spans, N, H, x.q.stride(0), x.k.stride(0), x.v.stride(0), x.scale,
        K=K, V=V, BK=triton.next_power_of_2(K), BV=block, C=solved.t.shape[-1], DECAY=x.decay is not None, WRITE=solved.w is not None,
        INITIAL=s_0 is not None, STORE=h is not None, PRECISION=dot_precision(x.k), num_warps=choice.warps, num_stages=choice.stages,
    )  # fmt: skip
