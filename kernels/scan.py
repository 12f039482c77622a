"""The scan over chunks: the only serial part of the forward pass, and the recomputation of its states for the backward pass.

Per chunk, with N and QW from `kernels.solve` and B = diag(beta); the state S [K, V] stays in fp32 registers and is read through its
rounding to the input dtype in the products:

    E = V - exp(G) khat S ;  U = E - N (B E)
    O = scale exp(G) qhat S + QW (B U)
    S' = exp(G_C) S + w^T (exp(G_C - G) B U)

One program a span, head and block of value channels, which do not interact. Everything is held transposed, value channels as rows (S^T,
E^T, U^T, O^T): then each warp owns its rows throughout, every left operand is a value as it stands in registers, and every right one a
tile as it lies in memory. 16 value channels a warp: with fewer, warps would repeat each other's work. The tiles come by tensor
descriptors, which take no registers for addresses and clip at the sequence's end.

`forward` writes o and the final states; `states` writes the state that each chunk meets and U, and neither reads q nor writes o.

Cost, D = 128, 16 bit, a token and head: forward reads q, k, v, t, qw (and w) and writes o, 1.3 (1.5) KB; states reads k, v, t (and w) and
writes h and u, 1.4 (1.7) KB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, launch, power_of_2
from kernels.layout import Inputs, Layout, Solved
from kernels.tiles import (
    BETA,
    KEY_READ,
    QUERY_READ,
    WRITE,
    allow_descriptors,
    dot_precision,
    head_tiles,
    load_tile,
    row_tiles,
    state_tiles,
)
from kernels.tuned import setting


@triton.jit
def leave(S, whole, chunk, H, head, K: tl.constexpr, BK: tl.constexpr, DECAY: tl.constexpr):
    """exp(G_C) S: what a chunk leaves of a state S [BV, BK]."""
    at = chunk.to(tl.int64) * H + head
    if DECAY == "scalar":
        S *= tl.load(whole + at)
    if DECAY == "channel":
        d = tl.arange(0, BK)
        S *= tl.load(whole + at * K + d, mask=d < K, other=0.0)[None, :]
    return S


@triton.jit
def _scan(
    q, k, v, t, qw, w, rows, whole, s_0,  # inputs; q, k and w are qr, kr and wd with a decay a channel
    o, s, h, u,  # outputs
    table, H, q_stride, k_stride, v_stride,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, WRITE_KEYS: tl.constexpr, INITIAL: tl.constexpr, VALUES: tl.constexpr, STORE: tl.constexpr,
    OUTPUT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Formulas above. WRITE_KEYS: w holds them, else they are rk * k. STORE: h and u are written, else s; OUTPUT: o too.
    VALUES false: the values are zero and the initial state is the identity, V = K, so that s is the map from state to state."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    block, head, n = tl.program_id(0) % blocks, tl.program_id(0) // blocks % H, tl.program_id(0) // blocks // H
    first, chunks = tl.load(table + 4 * n), tl.load(table + 4 * n + 1)
    token, tokens = tl.load(table + 4 * n + 2), tl.load(table + 4 * n + 3)
    column = block * BV
    keys = head_tiles(k, token, tokens, k_stride, head, K, BK, C)
    if VALUES:
        values = head_tiles(v, token, tokens, v_stride, head, V, BV, C)
    if WRITE_KEYS:
        writes = head_tiles(w, token, tokens, H * K, head, K, BK, C)
    if STORE:
        states = state_tiles(h, first, chunks, H, head, V, K, BV, BK)
        errors = head_tiles(u, token, tokens, H * V, head, V, BV, C)
    if OUTPUT:
        queries = head_tiles(q, token, tokens, q_stride, head, K, BK, C)
        outputs = head_tiles(o, token, tokens, H * V, head, V, BV, C)
    S = tl.zeros((BV, BK), tl.float32)
    if not VALUES:
        S += tl.where((column + tl.arange(0, BV))[:, None] == tl.arange(0, BK)[None, :], 1.0, 0.0)
    if INITIAL:
        S = tl.trans(tl.reshape(state_tiles(s_0, n, 1, H, head, K, V, BK, BV).load([0, 0, column]), [BK, BV]))
    numbers = row_tiles(rows, first, chunks, H, head, C)
    N = load_tile(t, token, tokens, H * C, head, 0, C, C, C)
    QW = N
    if OUTPUT:
        QW = load_tile(qw, token, tokens, H * C, head, 0, C, C, C)
    for place in tl.range(chunks, num_stages=STAGES):
        row, after = place * C, (place + 1) * C
        next_N = load_tile(t, token + after, tokens - after, H * C, head, 0, C, C, C)
        beta = tl.reshape(numbers.load([place, BETA * C]), [C])
        keep = beta
        if DECAY != "channel":
            read = tl.reshape(numbers.load([place, KEY_READ * C]), [C])
            keep *= tl.reshape(numbers.load([place, WRITE * C]), [C])
        key = keys.load([row, 0])
        state = S.to(key.dtype)
        if STORE:
            states.store([place * H, column, 0], tl.reshape(state, [1, BV, BK]))  # state[None] would go through shared memory
        E = tl.zeros((BV, C), tl.float32)
        if VALUES:
            E = tl.trans(values.load([row, column])).to(tl.float32)
        if DECAY == "channel":
            E -= tl.dot(state, tl.trans(key), input_precision=PRECISION)
        else:
            E -= read[None, :] * tl.dot(state, tl.trans(key), input_precision=PRECISION)
        U = tl.dot((beta[None, :] * E).to(key.dtype), tl.trans(N), E, input_precision=PRECISION)
        if STORE:
            errors.store([row, column], tl.trans(U.to(key.dtype)))
        if OUTPUT:
            O = tl.dot(state, tl.trans(queries.load([row, 0])), input_precision=PRECISION)
            if DECAY != "channel":
                O *= tl.reshape(numbers.load([place, QUERY_READ * C]), [C])[None, :]
            next_QW = load_tile(qw, token + after, tokens - after, H * C, head, 0, C, C, C)
            O = tl.dot((beta[None, :] * U).to(key.dtype), tl.trans(QW), O, input_precision=PRECISION)
            QW = next_QW
            outputs.store([row, column], tl.trans(O.to(key.dtype)))
        N = next_N
        if WRITE_KEYS:
            write = writes.load([row, 0])
        else:
            write = key
        S = leave(S, whole, first + place, H, head, K, BK, DECAY)
        S = tl.dot((keep[None, :] * U).to(key.dtype), write, S, input_precision=PRECISION)
    if not STORE:
        state_tiles(s, n, 1, H, head, K, V, BK, BV).store([0, 0, column], tl.trans(S)[None])


def forward(x: Inputs, solved: Solved, spans: Tensor, s_0: Tensor | None) -> tuple[Tensor, Tensor]:
    """o [N, H, V] in v's dtype and the final states [S, H, K, V] fp32 of the spans [S, 4]."""
    (_, H, K), V = x.k.shape, x.v.shape[-1]
    o = torch.empty(x.v.shape, dtype=x.v.dtype, device=x.v.device)
    s = torch.empty(spans.shape[0], H, K, V, dtype=torch.float32, device=x.v.device)
    _launch(x, solved, spans, s_0, o=o, s=s)
    return o, s


def ends(x: Inputs, solved: Solved, spans: Tensor) -> Tensor:
    """What each span makes of the zero state, [S, H, K, V] fp32: the b of its affine map."""
    s = torch.empty(spans.shape[0], x.k.shape[1], x.k.shape[2], x.v.shape[-1], dtype=torch.float32, device=x.k.device)
    _launch(x, solved, spans, None, s=s)
    return s


def maps(x: Inputs, solved: Solved, spans: Tensor) -> Tensor:
    """The matrix of each span's affine map, [S, H, K, K] fp32."""
    _, H, K = x.k.shape
    s = torch.empty(spans.shape[0], H, K, K, dtype=torch.float32, device=x.k.device)
    _launch(x, solved, spans, None, s=s, values=False)
    return s


def states(x: Inputs, solved: Solved, layout: Layout, spans: Tensor, s_0: Tensor | None) -> tuple[Tensor, Tensor]:
    """h [M, H, V, K], the transposed state that each chunk meets, and u [N, H, V], the corrected errors U; in the input dtype."""
    h = x.k.new_empty(layout.counts[0], *x.v.shape[1:], x.k.shape[-1])
    u = x.v.new_empty(x.v.shape)
    _launch(x, solved, spans, s_0, h=h, u=u)
    return h, u


def read_by(x: Inputs, solved: Solved) -> tuple[Tensor, Tensor, Tensor | None]:
    """The queries, keys and write keys that a scan reads, [N, H, K]."""
    return (x.q, x.k, solved.w) if solved.kr is None else (solved.qr, solved.kr, solved.wd)


def _launch(x: Inputs, solved: Solved, spans: Tensor, s_0: Tensor | None, o=None, s=None, h=None, u=None, values=True) -> None:
    H, K = x.k.shape[1:]
    V, S = x.v.shape[-1] if values else K, spans.shape[0]
    choice = setting("scan" if h is None else "states", x.k, programs=S * H)
    block = min(choice.block, power_of_2(V))
    q, k, w = read_by(x, solved)
    allow_descriptors()
    launch(
        _scan, S * H * cdiv(V, block), (x.key, s_0 is None, o is None),
        q, k, x.v, solved.t, solved.qw, w, solved.rows, solved.whole, s_0, o, s, h, u,
        spans, H, q.stride(0), k.stride(0), x.v.stride(0),
        K=K, V=V, BK=power_of_2(K), BV=block, C=solved.t.shape[-1],
        DECAY=x.decay_kind, WRITE_KEYS=w is not None,
        INITIAL=s_0 is not None, VALUES=values, STORE=h is not None, OUTPUT=o is not None, PRECISION=dot_precision(x.k),
        STAGES=choice.stages, num_warps=choice.warps,
    )  # fmt: skip
