"""The scan over chunks, backwards: the other serial part of the backward pass.

Per chunk, last to first, with dS' [K, V] the gradient of the state that the chunk hands on (fp32 in registers, read through its rounding
to the input dtype in the products) and dO that of the output; A, M, G, N as in `kernels.chunk_triton`:

    dR = scale (qhat w^T * M)^T dO + exp(G_C - G) w dS'                the gradient of the values written, from later chunks and this one
    dX = dR - N^T (beta dR)                                            the same with what the chunk's later rows take back of them
    dS = exp(G_C) dS' + scale (exp(G) qhat)^T dO - (beta exp(G) khat)^T dX

(dX is (I + L)^-T dR.) One program a span, head and block of value channels, which do not interact. It stores dS' of each chunk and dX,
from which `kernels.gradients` makes every gradient for all chunks at once.

The left operand of a product is here always a tile from memory, at most transposed as it is loaded, or a product as it stands: Triton
before 3.7.1 can go wrong on Hopper where it is the transpose of a product. So (qhat w^T)^T is made outright as w qhat^T.

Cost, D = 128, 16 bit, a token and head: reads q, k, t, do (and w), writes dh 512 B and dx 256 B, 1.7 (1.9) KB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layout import CHUNK, Inputs, Layout, Solved
from kernels.tiles import BETA, HIGH, KEY_NORM, LOW, QUERY_NORM, dot_precision, last, load_row, load_tile, spans_transposed, store_tile
from kernels.tuned import setting


@triton.jit
def _scan(
    q, k, t, w, rows, do, ds,  # inputs
    dh, dx, ds_0,  # outputs
    table, N, H, q_stride, k_stride, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, WRITE: tl.constexpr, FINAL: tl.constexpr, STORE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Formulas above. WRITE: w holds the write keys, else they are rk * k. FINAL: ds is given. STORE: dh and dx are wanted."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    block, head, n = tl.program_id(0) % blocks, tl.program_id(0) // blocks % H, tl.program_id(0) // blocks // H
    first, chunks = tl.load(table + 4 * n), tl.load(table + 4 * n + 1)
    start, tokens = tl.load(table + 4 * n + 2), tl.load(table + 4 * n + 3)
    d, e, i = tl.arange(0, BK), block * BV + tl.arange(0, BV), tl.arange(0, C)
    inside = (d < K)[:, None] & (e < V)[None, :]
    own = (n * H + head).to(tl.int64) * K * V
    corner = d[:, None] * V + e[None, :]
    dS = tl.zeros((BK, BV), tl.float32)
    if FINAL:
        dS = tl.load(ds + own + corner, mask=inside, other=0.0)
    for step in range(chunks):
        place = chunks - 1 - step
        token, count = start + place * C, tl.minimum(tokens - place * C, C)
        query = load_tile(q, token, count, q_stride, head, 0, K, BK, C)
        key = load_tile(k, token, count, k_stride, head, 0, K, BK, C)
        dO = load_tile(do, token, count, H * V, head, block * BV, V, BV, C)
        above = t + (token + i).to(tl.int64)[None, :] * (H * C) + head * C + i[:, None]
        above = tl.load(above, mask=(i < count)[None, :], other=0.0)  # -N^T
        beta = load_row(rows, BETA, token, count, H, N, head, C)
        rk = load_row(rows, KEY_NORM, token, count, H, N, head, C)
        rq = load_row(rows, QUERY_NORM, token, count, H, N, head, C) * scale
        write = key
        if WRITE:
            write = load_tile(w, token, count, H * K, head, 0, K, BK, C)
        state = dS.to(key.dtype)
        if STORE:
            tl.store(dh + ((first + place).to(tl.int64) * H + head) * K * V + corner, state, mask=inside)
        A = tl.dot(write, tl.trans(query), input_precision=PRECISION) * rq[None, :]  # [C, C], row: written, column: read
        dR = tl.dot(write, state, input_precision=PRECISION)
        if DECAY:
            high = load_row(rows, HIGH, token, count, H, N, head, C)
            low = load_row(rows, LOW, token, count, H, N, head, C)
            end, end_low = last(high, count, C), last(low, count, C)
            A *= spans_transposed(high, low, count, C)
            dR *= tl.exp2((end - high) + (end_low - low))[:, None]
            grown = tl.exp2(high + low)
            rq *= grown
            dS *= tl.exp2(end + end_low)
        else:
            A = tl.where(i[:, None] <= i[None, :], A, 0.0)
        if not WRITE:
            A *= rk[:, None]
            dR *= rk[:, None]
        dR = tl.dot(A.to(key.dtype), dO, dR, input_precision=PRECISION)
        dX = tl.dot(above, (beta[:, None] * dR).to(key.dtype), dR, input_precision=PRECISION)
        if STORE:
            store_tile(dx, dX, token, count, H * V, head, block * BV, V, BV, C)
        read = beta * rk
        if DECAY:
            read *= grown
        dS = tl.dot(tl.trans(query), (rq[:, None] * dO.to(tl.float32)).to(key.dtype), dS, input_precision=PRECISION)
        dS = tl.dot(tl.trans(key), (-read[:, None] * dX).to(key.dtype), dS, input_precision=PRECISION)
    tl.store(ds_0 + own + corner, dS, mask=inside)


def backward(
    x: Inputs, solved: Solved, layout: Layout, spans: Tensor, do: Tensor, ds: Tensor | None, store: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """dh [M, H, K, V] and dx [N, H, V] in the input dtype (None without store), and ds_0 [S, H, K, V] fp32, a row a span.

    do [N, H, V] contiguous; ds [S, H, K, V] fp32, the gradient of the state each span ends with, None for zero.
    """
    (N, H, K), V = x.k.shape, x.v.shape[-1]
    dh = x.k.new_empty(len(layout.chunks), H, K, V) if store else None
    dx = x.k.new_empty(N, H, V) if store else None
    ds_0 = torch.empty(len(spans), H, K, V, dtype=torch.float32, device=x.k.device)
    choice = setting("scan_backward", x.k, programs=len(spans) * H)
    block = min(choice.block, triton.next_power_of_2(V))
    _scan[(len(spans) * H * triton.cdiv(V, block),)](
        x.q, x.k, solved.t, solved.w, solved.rows, do, ds, dh, dx, ds_0,
        spans, N, H, x.q.stride(0), x.k.stride(0), x.scale,
        K=K, V=V, BK=triton.next_power_of_2(K), BV=block, C=CHUNK, DECAY=x.decay is not None, WRITE=solved.w is not None,
        FINAL=ds is not None, STORE=store, PRECISION=dot_precision(x.k), num_warps=choice.warps, num_stages=choice.stages,
    )  # fmt: skip
    return dh, dx, ds_0
