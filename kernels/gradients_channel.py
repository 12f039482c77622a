"""`kernels.gradients` with a decay a channel: the gradients of q, k and the decay of a chunk, for all chunks at once.

In: h, the state S that the chunk meets; dh, dS'; u, U; dx, dX; dO; D1 and D2 of `kernels.pairs`. G_i is now a vector of key channels, and
exp(G_i - G_j) of two rows a factor in each of them (`kernels.levels`). Channel by channel, with span_ij = exp(G_i - G_j):

    dqhat = scale exp(G) (dO S^T) + sum_j D2_ij span_ij w_j                                       (the query that reads)
    dkhat = -beta exp(G) (dX S^T) + sum_j D1_ij span_ij w_j                                       (the key that reads)
    dw    = beta exp(G_C - G) (U dS'^T) + sum_i span_ij (D1_ij khat_i + D2_ij qhat_i)             (the key that writes)

and dg_t is the sum over the spans that hold t, each as it stands and never a difference: of (a term of dqhat) qhat + (a term of dkhat) khat
from the state to rows i >= t, of (a term of dw) w from rows j < t to the next state, of exp(G_C) sum_e S dS' from state to state, and of
the pairs i >= t > j, level by level: a level's span is F_i F_j, F_i holds the gates of i's half block and F_j those of j's, so

    T_q = F (D2 (F w)) ;  T_k = F (D1 (F w)) ;  T_w = F (D1^T (F khat) + D2^T (F qhat))            at the pairs of the level
    dg_t += sum of [T_q qhat + T_k khat + T_w w]_i over the rows i whose factor holds g_t

Where gates are mild (`kernels.levels`) all pairs of a block of 16 rows take one level of factors. Those across its middle give dg as above;
for those inside a half of 8 rows the sum holds on both sides the pairs i > j >= t too, which cancel:

    dg_t += sum over rows i >= t of the half of [T_q qhat + T_k khat]_i - sum over rows j >= t of the half of [T_w w]_j

So few terms cancel that it costs no more than the roundings there are anyway.

Pairs of different blocks take products of whole tiles, zero outside the level's pairs; pairs of one block take products of [16, 16] by
[16, BLOCK], a warp for each block.

Three launches, one program a chunk, head and block of key channels each: `_reads` for the query and for the key, `_writes` completes dk and
dg. The norms (dk = rk dkhat - rk^2 k (khat . dkhat), and q) need sums over channels, which `kernels.pairs` makes from values.

Cost, D = 128, 16 bit, a token and head, a decay in fp32: the query 256 B each of q, w, do, g 512 B, e2 128 B, h and dh 1,024 B, and writes
768 B; the key without dh 512 B less, and dg once more; the write q, k, w, u 1,024 B, g 512 B, e1, e2 256 B, dh 512 B, dg twice, dk or dw:
10 KB.

Right operands have 64 columns or more in 16 bit: with 32 or 16 the ptxas that Triton 3.6 brings makes products that read outside of shared
memory (13.0 does not, nor Triton 3.7.1).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gradients import Gradients, kept, state_term
from kernels.launch import cdiv, launch, power_of_2
from kernels.layout import Inputs, Layout, Solved
from kernels.levels import (
    NEAR,
    each_block,
    far_decays,
    halves,
    levels,
    load_decay,
    load_level,
    load_near,
    load_near_decay,
    load_sums,
    mild,
    near_crossing,
    near_decays,
    near_exponents,
    near_pairs,
    sums,
    whole_chunk,
)
from kernels.pairs import Pairs
from kernels.tiles import BETA, KEY_NORM, QUERY_NORM, dot_precision, load_row, load_tile, store_tile
from kernels.tuned import setting


@triton.jit
def _load_blocks(e, token, count, H, head, C: tl.constexpr):
    """[C / 16, 16, 16]: the diagonal blocks of e [N, H, C]."""
    b, r, s = tl.arange(0, C // NEAR)[:, None, None], tl.arange(0, NEAR)[None, :, None], tl.arange(0, NEAR)[None, None, :]
    i = b * NEAR + r
    return tl.load(e + (token + i).to(tl.int64) * (H * C) + head * C + b * NEAR + s, mask=i < count, other=0.0)


@triton.jit
def _load_own(own, token, count, H, head, C: tl.constexpr):
    """[C]: what a row reads of itself, where nothing decays."""
    i = tl.arange(0, C)
    return tl.load(own + (token + i).to(tl.int64) * H + head, mask=i < count, other=0.0)


@triton.jit
def _near_gathered(grad_g, summed, rows, C: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """grad_g plus, at t, the sum of summed over the rows of its block that rows [16, 16] has, true at (t, row)."""
    return tl.dot(each_block(tl.where(rows, 1.0, 0.0).to(DOT), C), summed.to(DOT), grad_g, input_precision=PRECISION)


@triton.jit
def _half_block(FROM: tl.constexpr):
    """[16, 16], true at (t, i) in one half of a block, of 8 rows: FROM: i >= t, else i < t."""
    t, i = tl.arange(0, NEAR)[:, None], tl.arange(0, NEAR)[None, :]
    same = (t ^ i) < NEAR // 2
    if FROM:
        return same & (i >= t)
    return same & (i < t)


@triton.jit
def _near_read(
    x, w, decay, e, token, count, H, head, first, x_stride, w_stride, decay_stride,
    K: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """The pairs i > j of each block of 16 rows, for one reader x: their parts of r dxhat and dg, [C, BLOCK] each."""
    X = load_near(x, token, count, x_stride, head, first, K, BLOCK, C)
    W = load_near(w, token, count, w_stride, head, first, K, BLOCK, C)
    g = load_near_decay(decay, token, count, decay_stride, head, first, K, BLOCK, C, GATE)
    E = _load_blocks(e, token, count, H, head, C)
    grad = tl.zeros((C // NEAR, NEAR, BLOCK), tl.float32)
    grad_g = tl.zeros((C // NEAR, NEAR, BLOCK), tl.float32)
    exponents = near_exponents(g, C, PRECISION)
    if mild(exponents, W.dtype):
        reads, writes = tl.exp2(exponents), tl.exp2(-exponents)
        flow = reads * tl.dot(tl.where(near_pairs(), E, 0.0), (writes * W.to(tl.float32)).to(W.dtype), input_precision=PRECISION)
        grad = flow
        grad_g = _near_gathered(grad_g, flow * X.to(tl.float32), _half_block(FROM=True), C, DOT, PRECISION)
    else:
        for number in tl.range(0, 4, num_stages=1):
            half = 1 << number
            F = near_decays(g, half, C, PRECISION)
            faded = (F * W.to(tl.float32)).to(W.dtype)
            flow = F * tl.dot(tl.where(near_crossing(half), E, 0.0), faded, input_precision=PRECISION)
            grad += flow
            grad_g = _near_gathered(grad_g, flow * X.to(tl.float32), halves(half, NEAR, TURNED=True), C, DOT, PRECISION)
    return tl.reshape(grad, [C, BLOCK]), tl.reshape(grad_g, [C, BLOCK])


@triton.jit
def _turned_flow(E1, E2, pairs, read_key, read_query, PRECISION: tl.constexpr):
    """[C / 16, 16, BLOCK]: what the reading rows give the written ones at these pairs."""
    flow = tl.dot(tl.trans(tl.where(pairs, E1, 0.0), 0, 2, 1), read_key, input_precision=PRECISION)
    return tl.dot(tl.trans(tl.where(pairs, E2, 0.0), 0, 2, 1), read_query, flow, input_precision=PRECISION)


@triton.jit
def _near_writes(
    q, k, w, decay, e1, e2, token, count, H, head, first, q_stride, k_stride, decay_stride,
    K: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr, PRECONDITION: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    """The pairs i > j of each block of 16 rows: their parts of dw (or r dkhat) and dg, [C, BLOCK] each."""
    Q = load_near(q, token, count, q_stride, head, first, K, BLOCK, C)
    Key = load_near(k, token, count, k_stride, head, first, K, BLOCK, C)
    W = Key
    if PRECONDITION:
        W = load_near(w, token, count, H * K, head, first, K, BLOCK, C)
    g = load_near_decay(decay, token, count, decay_stride, head, first, K, BLOCK, C, GATE)
    E1, E2 = _load_blocks(e1, token, count, H, head, C), _load_blocks(e2, token, count, H, head, C)
    grad_w = tl.zeros((C // NEAR, NEAR, BLOCK), tl.float32)
    grad_g = tl.zeros((C // NEAR, NEAR, BLOCK), tl.float32)
    exponents = near_exponents(g, C, PRECISION)
    if mild(exponents, W.dtype):
        reads, writes = tl.exp2(exponents), tl.exp2(-exponents)
        read_key, read_query = (reads * Key.to(tl.float32)).to(W.dtype), (reads * Q.to(tl.float32)).to(W.dtype)
        crossing = near_crossing(NEAR // 2)
        flow = writes * _turned_flow(E1, E2, crossing, read_key, read_query, PRECISION)
        grad_w = flow
        grad_g = _near_gathered(grad_g, flow * W.to(tl.float32), _half_block(FROM=False), C, DOT, PRECISION)
        flow = writes * _turned_flow(E1, E2, near_pairs() & (crossing == 0), read_key, read_query, PRECISION)
        grad_w += flow
        grad_g = _near_gathered(grad_g, -flow * W.to(tl.float32), _half_block(FROM=True), C, DOT, PRECISION)
    else:
        for number in tl.range(0, 4, num_stages=1):
            half = 1 << number
            F = near_decays(g, half, C, PRECISION)
            read_key, read_query = (F * Key.to(tl.float32)).to(W.dtype), (F * Q.to(tl.float32)).to(W.dtype)
            flow = F * _turned_flow(E1, E2, near_crossing(half), read_key, read_query, PRECISION)
            grad_w += flow
            grad_g = _near_gathered(grad_g, flow * W.to(tl.float32), halves(half, NEAR, TURNED=True), C, DOT, PRECISION)
    return tl.reshape(grad_w, [C, BLOCK]), tl.reshape(grad_g, [C, BLOCK])


@triton.jit
def _gathered(grad_g, summed, turned, number, C: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """grad_g [C, BLOCK] plus, at t, the sum of summed [C, BLOCK] over the rows whose factor holds gate t."""
    return tl.dot(load_sums(turned, number, C), summed.to(DOT), grad_g, input_precision=PRECISION)


@triton.jit
def _far_read(
    grad, grad_g, X, W, g, e, table, turned, number, token, count, H, head,
    C: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Adds the pairs of a level of whole blocks to what `_near_read` made for one reader X, a query or a key."""
    F = far_decays(g, table, number, C, PRECISION)
    E = load_level(e, token, count, H, head, number, C)
    flow = F * tl.dot(E, (F * W.to(tl.float32)).to(W.dtype), input_precision=PRECISION)
    return grad + flow, _gathered(grad_g, flow * X.to(tl.float32), turned, number, C, DOT, PRECISION)


@triton.jit
def _far_write(
    grad_w, grad_g, Q, Key, W, g, e1, e2, table, turned, number, token, count, H, head,
    C: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Adds the pairs of a level of whole blocks to what `_near_writes` made."""
    F = far_decays(g, table, number, C, PRECISION)
    E1, E2 = load_level(e1, token, count, H, head, number, C), load_level(e2, token, count, H, head, number, C)
    flow = tl.dot(tl.trans(E1), (F * Key.to(tl.float32)).to(W.dtype), input_precision=PRECISION)
    flow = F * tl.dot(tl.trans(E2), (F * Q.to(tl.float32)).to(W.dtype), flow, input_precision=PRECISION)
    return grad_w + flow, _gathered(grad_g, flow * W.to(tl.float32), turned, number, C, DOT, PRECISION)


@triton.jit
def _place(chunks, H, blocks: tl.constexpr):
    """chunk, head, block of channels of this program."""
    program = tl.program_id(0)
    return program // blocks // H, program // blocks % H, program % blocks


@triton.jit
def _reads(
    x, w, decay, rows, h, dh, d, e, own, along, table, turned,  # inputs
    dx, dg,  # outputs
    chunks, H, x_stride, w_stride, decay_stride, scale,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr, QUERY: tl.constexpr,
    NORMALIZE: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """For one reader x: QUERY, from d = dO and e = D2, all of dq, and the part of dg that it makes and that from state to state; else, from
    d = dX and e = D1, the reading key's part of dk, without its norm, and its part added to dg."""
    chunk, head, block = _place(chunks, H, (K + BLOCK - 1) // BLOCK)
    at, first = (chunk * H + head).to(tl.int64), block * BLOCK
    token, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    if QUERY:
        states = kept(h, dh, chunk, H, head, first, K, V, BV, BLOCK)
    grad, grad_g = _near_read(
        x, w, decay, e, token, count, H, head, first, x_stride, w_stride, decay_stride, K, BLOCK, C, PRECISION, DOT, GATE
    )
    X = load_tile(x, token, count, x_stride, head, first, K, BLOCK, C)
    W = load_tile(w, token, count, w_stride, head, first, K, BLOCK, C)
    g = load_decay(decay, token, count, decay_stride, head, first, K, BLOCK, C, GATE)
    if QUERY:
        grad += _load_own(own, token, count, H, head, C)[:, None] * W.to(tl.float32)
    for number in tl.range(4, levels(C), num_stages=1):
        grad, grad_g = _far_read(grad, grad_g, X, W, g, e, table, turned, number, token, count, H, head, C, BLOCK, PRECISION, DOT)
    if QUERY:
        r = load_row(rows, QUERY_NORM, at, C)
        factor = scale * r
    else:
        r = load_row(rows, KEY_NORM, at, C)
        factor = -load_row(rows, BETA, at, C) * r
    from_state = state_term(d, h, chunk, H, head, first, token, count, K, V, BV, BLOCK, C, PRECISION) * factor[:, None]
    from_state *= far_decays(g, table, levels(C), C, PRECISION)
    grad += from_state
    grad_g = _gathered(grad_g, from_state * X.to(tl.float32), turned, levels(C), C, DOT, PRECISION)
    if QUERY:
        grad_g += (whole_chunk(g) * states)[None, :]
        if NORMALIZE:
            i = tl.arange(0, C)
            shrunk = tl.load(along + (token + i).to(tl.int64) * H + head, mask=i < count, other=0.0) * r * r
            grad -= shrunk[:, None] * X.to(tl.float32)
    else:
        grad_g += load_tile(dg, token, count, H * K, head, first, K, BLOCK, C).to(tl.float32)
    store_tile(dx, grad, token, count, H * K, head, first, K, BLOCK, C)
    store_tile(dg, grad_g, token, count, H * K, head, first, K, BLOCK, C)


@triton.jit
def _writes(
    q, k, w, decay, rows, dh, u, e1, e2, own, along, table, turned,  # inputs
    dk, dw, dg,  # outputs; dk and dg hold the parts of `_reads`
    chunks, H, q_stride, k_stride, decay_stride,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr, PRECONDITION: tl.constexpr,
    NORMALIZE: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """dw with a preconditioner, else all of dk; and all of dg."""
    chunk, head, block = _place(chunks, H, (K + BLOCK - 1) // BLOCK)
    at, first = (chunk * H + head).to(tl.int64), block * BLOCK
    token, count = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    grad_w, grad_g = _near_writes(
        q, k, w, decay, e1, e2, token, count, H, head, first, q_stride, k_stride, decay_stride,
        K, BLOCK, C, PRECONDITION, PRECISION, DOT, GATE,
    )  # fmt: skip
    Q = load_tile(q, token, count, q_stride, head, first, K, BLOCK, C)
    Key = load_tile(k, token, count, k_stride, head, first, K, BLOCK, C)
    W = Key
    if PRECONDITION:
        W = load_tile(w, token, count, H * K, head, first, K, BLOCK, C)
    g = load_decay(decay, token, count, decay_stride, head, first, K, BLOCK, C, GATE)
    grad_w += _load_own(own, token, count, H, head, C)[:, None] * Q.to(tl.float32)
    for number in tl.range(4, levels(C), num_stages=1):
        grad_w, grad_g = _far_write(
            grad_w, grad_g, Q, Key, W, g, e1, e2, table, turned, number, token, count, H, head, C, BLOCK, PRECISION, DOT
        )  # fmt: skip
    written, rk = load_row(rows, BETA, at, C), load_row(rows, KEY_NORM, at, C)
    if not PRECONDITION:
        written *= rk
    to_state = state_term(u, dh, chunk, H, head, first, token, count, K, V, BV, BLOCK, C, PRECISION)
    to_state *= far_decays(g, table, levels(C) + 1, C, PRECISION) * written[:, None]
    grad_w += to_state
    grad_g = _gathered(grad_g, to_state * W.to(tl.float32), turned, levels(C) + 1, C, DOT, PRECISION)
    grad_g += load_tile(dg, token, count, H * K, head, first, K, BLOCK, C).to(tl.float32)
    store_tile(dg, grad_g, token, count, H * K, head, first, K, BLOCK, C)
    if PRECONDITION:
        store_tile(dw, grad_w, token, count, H * K, head, first, K, BLOCK, C)
    else:
        grad_w += load_tile(dk, token, count, H * K, head, first, K, BLOCK, C).to(tl.float32)
        if NORMALIZE:
            i = tl.arange(0, C)
            turned = tl.load(along + (token + i).to(tl.int64) * H + head, mask=i < count, other=0.0) * rk * rk
            grad_w -= turned[:, None] * Key.to(tl.float32)
        store_tile(dk, grad_w, token, count, H * K, head, first, K, BLOCK, C)


def backward(
    x: Inputs, solved: Solved, layout: Layout, h: Tensor, dh: Tensor, u: Tensor, dx: Tensor, do: Tensor, pairs: Pairs
) -> Gradients:
    """h and dh [M, H, V, K], u, dx and do [N, H, V], all contiguous; x.decay [N, H, K]."""
    (N, H, K), V, (M, _) = x.k.shape, x.v.shape[-1], layout.counts
    preconditioned, wide = solved.w is not None, x.k.dtype == torch.float32
    dq, dk, dw = x.k.new_empty(N, H, K), x.k.new_empty(N, H, K), x.k.new_empty(N, H, K) if preconditioned else None
    dg = x.decay.new_empty(N, H, K)
    w, w_stride = (x.k, x.k.stride(0)) if solved.w is None else (solved.w, H * K)
    choice = setting("gradients_channel", x.k)
    block = min(choice.block, power_of_2(K))
    gate, dot = (torch.float32, torch.float32) if wide else (torch.float16, torch.bfloat16)
    tables = sums(layout.chunk, gate, x.k.device), sums(layout.chunk, dot, x.k.device, turned=True)
    sizes = {"K": K, "V": V, "BV": min(32 if wide else 128, power_of_2(V)), "BLOCK": block, "C": layout.chunk}
    constants = {
        "NORMALIZE": x.normalize, "PRECISION": dot_precision(x.k),
        "DOT": tl.float32 if wide else tl.bfloat16, "GATE": tl.float32 if wide else tl.float16,
        "num_warps": choice.warps, "num_stages": choice.stages, "maxnreg": choice.registers,
    }  # fmt: skip
    programs = M * H * cdiv(K, block)
    for query, reader, d, e, along, out in ((True, x.q, do, pairs.e2, pairs.along_q, dq), (False, x.k, dx, pairs.e1, None, dk)):
        launch(
            _reads, programs, x.key,
            reader, w, x.decay, solved.rows, h, dh, d, e, pairs.own, along, *tables, out, dg,
            layout.chunks, H, reader.stride(0), w_stride, x.decay_stride, x.scale, **sizes, QUERY=query, **constants,
        )  # fmt: skip
    launch(
        _writes, programs, x.key,
        x.q, x.k, solved.w, x.decay, solved.rows, dh, u, pairs.e1, pairs.e2, pairs.own, pairs.along_k, *tables, dk, dw, dg,
        layout.chunks, H, x.q.stride(0), x.k.stride(0), x.decay_stride, **sizes, PRECONDITION=preconditioned, **constants,
    )  # fmt: skip
    return Gradients(dq, dk, dw, dg)
