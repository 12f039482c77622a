"""The scan over chunks, backwards: the other serial part of the backward pass.

Per chunk, last to first, with dS' [K, V] the gradient of the state that the chunk hands on (fp32 in registers, read through its rounding
to the input dtype in the products) and dO that of the output; QW and N are `kernels.solve`'s:

    dR = QW^T dO + exp(G_C - G) w dS'                                  the gradient of the values written, from this chunk and later ones
    dX = dR - N^T (beta dR)                                            the same with what the chunk's later rows take back of them
    dS = exp(G_C) dS' + scale (exp(G) qhat)^T dO - (beta exp(G) khat)^T dX

(dX is (I + L)^-T dR.) One program a span, head and block of value channels, which do not interact. It stores dS' of each chunk and dX,
from which `kernels.gradients` makes every gradient for all chunks at once.

Everything is held transposed, as in `kernels.scan`: the left operand of a product is an accumulator as it stands, or a tile of dO. None is
the transpose of a product, with which Triton before 3.7.1 can go wrong on Hopper.

Cost, D = 128, 16 bit, a token and head: reads q, k, t, qw, do (and w), writes dh 512 B and dx 256 B, 1.8 (2.1) KB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, launch, power_of_2
from kernels.layout import Inputs, Layout, Solved
from kernels.scan import leave, read_by
from kernels.tiles import (
    BETA,
    KEY_READ,
    QUERY_READ,
    WRITE,
    allow_descriptors,
    dot_precision,
    head_tiles,
    row_tiles,
    state_tiles,
)
from kernels.tuned import setting


@triton.jit
def load_state(h, chunk, H, head, d, e, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """[BV, BK]: key channels d .. d + BK and value channels e .. e + BV of one state of h [M, H, V, K]; zero outside."""
    e, d = e + tl.arange(0, BV), d + tl.arange(0, BK)
    at = h + (chunk * H + head).to(tl.int64) * K * V + (e[:, None] * K + d[None, :])
    if K % BK == 0 and V % BV == 0:
        return tl.load(at)
    return tl.load(at, mask=(e < V)[:, None] & (d < K)[None, :], other=0.0)


@triton.jit
def _scan(
    q, k, t, qw, w, rows, whole, do, ds,  # inputs; q, k and w are qr, kr and wd with a decay a channel
    dh, dx, ds_0,  # outputs
    table, H, q_stride, k_stride,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, WRITE_KEYS: tl.constexpr, FINAL: tl.constexpr, STORE: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Formulas above, all transposed: dS [BV, BK]. WRITE_KEYS: w holds them, else they are rk * k. FINAL: ds is given.
    STORE: dh and dx are wanted."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    block, head, n = tl.program_id(0) % blocks, tl.program_id(0) // blocks % H, tl.program_id(0) // blocks // H
    first, chunks = tl.load(table + 4 * n), tl.load(table + 4 * n + 1)
    start, tokens = tl.load(table + 4 * n + 2), tl.load(table + 4 * n + 3)
    column = block * BV
    keys = head_tiles(k, start, tokens, k_stride, head, K, BK, C)
    queries = head_tiles(q, start, tokens, q_stride, head, K, BK, C)
    solves = head_tiles(t, start, tokens, H * C, head, C, C, C)
    reads = head_tiles(qw, start, tokens, H * C, head, C, C, C)
    outputs = head_tiles(do, start, tokens, H * V, head, V, BV, C)
    if WRITE_KEYS:
        writes = head_tiles(w, start, tokens, H * K, head, K, BK, C)
    if STORE:
        states = state_tiles(dh, first, chunks, H, head, V, K, BV, BK)
        errors = head_tiles(dx, start, tokens, H * V, head, V, BV, C)
    d, e = tl.arange(0, BK), column + tl.arange(0, BV)
    inside = (e < V)[:, None] & (d < K)[None, :]
    own = (n * H + head).to(tl.int64) * K * V + d[None, :] * V + e[:, None]
    dS = tl.zeros((BV, BK), tl.float32)
    if FINAL:
        dS = tl.load(ds + own, mask=inside, other=0.0)
    numbers = row_tiles(rows, first, chunks, H, head, C)
    for step in tl.range(chunks, num_stages=STAGES):
        place = chunks - 1 - step
        row = place * C
        beta = tl.reshape(numbers.load([place, BETA * C]), [C])
        read = beta
        if DECAY != "channel":
            read *= tl.reshape(numbers.load([place, KEY_READ * C]), [C])
            query_read = tl.reshape(numbers.load([place, QUERY_READ * C]), [C])
            left = tl.reshape(numbers.load([place, WRITE * C]), [C])
        key = keys.load([row, 0])
        state = dS.to(key.dtype)
        if STORE:
            states.store([place * H, column, 0], tl.reshape(state, [1, BV, BK]))  # state[None] would go through shared memory
        write = key
        if WRITE_KEYS:
            write = writes.load([row, 0])
        dR = tl.dot(state, tl.trans(write), input_precision=PRECISION)
        if DECAY != "channel":
            dR *= left[None, :]
        dO = outputs.load([row, column])
        dR = tl.dot(tl.trans(dO), reads.load([row, 0]), dR, input_precision=PRECISION)
        dX = tl.dot((dR * beta[None, :]).to(key.dtype), solves.load([row, 0]), dR, input_precision=PRECISION)
        if STORE:
            errors.store([row, column], tl.trans(dX.to(key.dtype)))
        dS = leave(dS, whole, first + place, H, head, K, BK, DECAY)
        dS = tl.dot((dX * (-read)[None, :]).to(key.dtype), key, dS, input_precision=PRECISION)
        if DECAY != "channel":
            dO = (dO.to(tl.float32) * query_read[:, None]).to(key.dtype)
        dS = tl.dot(tl.trans(dO), queries.load([row, 0]), dS, input_precision=PRECISION)
    tl.store(ds_0 + own, dS, mask=inside)


def backward(
    x: Inputs, solved: Solved, layout: Layout, spans: Tensor, do: Tensor, ds: Tensor | None, store: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """dh [M, H, V, K] and dx [N, H, V] in the input dtype (None without store), and ds_0 [S, H, K, V] fp32, a row a span.

    do [N, H, V] contiguous; ds [S, H, K, V] fp32, the gradient of the state each span ends with, None for zero.
    """
    (N, H, K), V, S = x.k.shape, x.v.shape[-1], spans.shape[0]
    dh = x.k.new_empty(layout.counts[0], H, V, K) if store else None
    dx = x.k.new_empty(N, H, V) if store else None
    ds_0 = torch.empty(S, H, K, V, dtype=torch.float32, device=x.k.device)
    choice = setting("scan_backward", x.k, programs=S * H)
    block = min(choice.block, power_of_2(V))
    q, k, w = read_by(x, solved)
    allow_descriptors()
    launch(
        _scan, S * H * cdiv(V, block), (x.key, ds is None),
        q, k, solved.t, solved.qw, w, solved.rows, solved.whole, do, ds, dh, dx, ds_0,
        spans, H, q.stride(0), k.stride(0),
        K=K, V=V, BK=power_of_2(K), BV=block, C=layout.chunk, DECAY=x.decay_kind, WRITE_KEYS=w is not None,
        FINAL=ds is not None, STORE=store, PRECISION=dot_precision(x.k), num_warps=choice.warps, STAGES=choice.stages,
    )  # fmt: skip
    return dh, dx, ds_0
