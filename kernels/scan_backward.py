"""The scan over chunks, backwards: the other serial part of the backward pass.

Per chunk, last to first, with dS' [K, V] the gradient of the state that the chunk hands on (fp32 in registers, read through its rounding
to the input dtype in the products) and dO that of the output; QW and N are `kernels.solve`'s:

    dR = scale QW^T dO + exp(G_C - G) w dS'                            the gradient of the values written, from this chunk and later ones
    dX = dR - N^T (beta dR)                                            the same with what the chunk's later rows take back of them
    dS = exp(G_C) dS' + scale (exp(G) qhat)^T dO - (beta exp(G) khat)^T dX

(dX is (I + L)^-T dR.) One program a span, head and block of value channels, which do not interact. It stores dS' of each chunk and dX,
from which `kernels.gradients` makes every gradient for all chunks at once.

The left operand of a product is here always a tile from memory, at most transposed as it is loaded: Triton before 3.7.1 can go wrong on
Hopper where it is the transpose of a product.

Cost, D = 128, 16 bit, a token and head: reads q, k, t, qw, do (and w), writes dh 512 B and dx 256 B, 1.8 (2.1) KB.
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
def _load_turned(x, token, count, H, head, C: tl.constexpr):
    """[C, C]: the transpose of the rows token .. token + count of x [N, H, C] for one head."""
    i = tl.arange(0, C)
    at = x + (token + i).to(tl.int64)[None, :] * (H * C) + head * C + i[:, None]
    return tl.load(at, mask=(i < count)[None, :], other=0.0)


@triton.jit
def _scan(
    q, k, t, qw, w, rows, do, ds,  # inputs
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
    d, e = tl.arange(0, BK), block * BV + tl.arange(0, BV)
    inside = (d < K)[:, None] & (e < V)[None, :]
    own = (n * H + head).to(tl.int64) * K * V
    corner = d[:, None] * V + e[None, :]
    dS = tl.zeros((BK, BV), tl.float32)
    if FINAL:
        dS = tl.load(ds + own + corner, mask=inside, other=0.0)
    for step in range(chunks):
        place = chunks - 1 - step
        token, count = start + place * C, tl.minimum(tokens - place * C, C)
        key = load_tile(k, token, count, k_stride, head, 0, K, BK, C)
        beta = load_row(rows, BETA, token, count, H, N, head, C)
        rk = load_row(rows, KEY_NORM, token, count, H, N, head, C)
        read_key = beta * rk
        read_query = load_row(rows, QUERY_NORM, token, count, H, N, head, C) * scale
        state = dS.to(key.dtype)
        if STORE:
            tl.store(dh + ((first + place).to(tl.int64) * H + head) * K * V + corner, state, mask=inside)
        if WRITE:
            write = load_tile(w, token, count, H * K, head, 0, K, BK, C)
            dR = tl.dot(write, state, input_precision=PRECISION)
        else:
            dR = tl.dot(key, state, input_precision=PRECISION) * rk[:, None]
        if DECAY:
            high = load_row(rows, HIGH, token, count, H, N, head, C)
            low = load_row(rows, LOW, token, count, H, N, head, C)
            end, end_low = last(high, count, C), last(low, count, C)
            grown = tl.exp2(high + low)
            read_key *= grown
            read_query *= grown
            dR *= tl.exp2((end - high) + (end_low - low))[:, None]
            dS *= tl.exp2(end + end_low)
        dO = load_tile(do, token, count, H * V, head, block * BV, V, BV, C)
        QW = _load_turned(qw, token, count, H, head, C)
        dR += scale * tl.dot(QW, dO, input_precision=PRECISION)
        T = _load_turned(t, token, count, H, head, C)
        dX = tl.dot(T, (beta[:, None] * dR).to(key.dtype), dR, input_precision=PRECISION)
        if STORE:
            store_tile(dx, dX, token, count, H * V, head, block * BV, V, BV, C)
        dS = tl.dot(tl.trans(key), (-read_key[:, None] * dX).to(key.dtype), dS, input_precision=PRECISION)
        query = load_tile(q, token, count, q_stride, head, 0, K, BK, C)
        dS = tl.dot(tl.trans(query), (read_query[:, None] * dO.to(tl.float32)).to(key.dtype), dS, input_precision=PRECISION)
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
        x.q, x.k, solved.t, solved.qw, solved.w, solved.rows, do, ds, dh, dx, ds_0,
        spans, N, H, x.q.stride(0), x.k.stride(0), x.scale,
        K=K, V=V, BK=triton.next_power_of_2(K), BV=block, C=layout.chunk, DECAY=x.decay is not None, WRITE=solved.w is not None,
        FINAL=ds is not None, STORE=store, PRECISION=dot_precision(x.k), num_warps=choice.warps, num_stages=choice.stages,
    )  # fmt: skip
    return dh, dx, ds_0
