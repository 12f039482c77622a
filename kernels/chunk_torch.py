"""The recurrences by chunks, in plain PyTorch: any device, fp32 or fp64, gradients by autograd, and the map for the Triton stages.

The algebra is that of docs/paper.md, section 2.

A chunk has C <= 64 rows; all its tokens are handled by matrix products, and only its end state goes to the next
chunk. With W the write keys, g the log decay and G its cumulative sum in the chunk (inclusive), the products between rows i > j
carry exp(G_i - G_j):

    L = tril(diag(beta) K W^T, -1)              the rows' corrections of each other
    U = (I + L)^-1 diag(beta) V                 what the chunk would write into an empty state
    Z = (I + L)^-1 diag(beta) (exp(G) * K)      what it takes back of the state it meets
    R = U - Z S_in                              the values written
    O = (exp(G) * Q) S_in + tril(Q W^T) R       Q already carries the scale
    S_out = exp(G_C) S_in + (exp(G_C - G) * W)^T R

and the statistic, whose decay is p with P its cumulative sum, M_ij = exp(P_i - P_j) below the diagonal:

    A = exp(P) a_in + M (c * K^2) + c * K^2 ;   a_out = the last row of A

The only sequential parts are `_chain`s over chunks: a_out of a_in, then S_out of S_in. Everything else is done for all chunks at once.

Exponents. Each is a sum of log decays over a span of rows and so <= 0; none is formed as a difference of long sums (cancellation)
and none as a ratio exp(G_i) / exp(G_j) (overflow). Scalar decay has the [C, C] spans outright (`_spans`). Diagonal decay would need
[C, C, K], so the rows are halved again and again (`_interact_channels`): for i in the second half of a block and j in the first the
span splits at the middle into exp(from the middle to i) exp(from j to the middle), one factor for each operand of a matrix product,
exact at every level. No entry depends on a gate later than its row.

Layout. Sequences are ranked by their number of chunks, longest first, and the chunks of all sequences are laid out step by step:
chunk 0 of every sequence, chunk 1 of those that have one, and so on. So step j is a contiguous block of the `active[j]` longest
sequences, nothing is padded beyond its last chunk, and B equal sequences are the special case in which all are active throughout.

Cost, forward and backward, bf16 inputs: 16 x 2,048 tokens, 8 heads of 128 on one H200 take 30 ms and 4.4 GiB at the peak (PGDN), 50 ms
and 6.5 GiB (PKDA); 8 x 256 tokens, 4 heads of 32 on two CPU cores about 20 ms and 31 ms. On CUDA the fp32 products follow torch's
matmul precision setting: leave TF32 off where the accuracy of fp32 is wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import maps
from kernels.maps import Relay
from kernels.operands import Operands, State, indices, initial
from kernels.preconditioner import read_query, write_key

CHUNK = 64  # rows at most


def run(x: Operands, state: State | None, bounds: tuple[int, ...] | None, relay: Relay | None = None) -> tuple[Tensor, State]:
    """o [B, T, H, V] and the final states of a checked call; bounds as `kernels.reference.run`. With a relay state is None."""
    batch, length = x.q.shape[:2]
    bounds = bounds or tuple(range(0, batch * length + 1, length))
    layout = Layout.of(bounds, chunk_rows(bounds, max(x.k.shape[-1], x.v.shape[-1])), x.q.device)
    state, tokens = initial(x, state, len(layout.rank)), x
    x = x.map(layout.pack)  # [M, H, C, ...], M chunks
    a = state.a
    if relay is not None and a is not None:
        a = maps.statistic(relay, tokens.precond.decay, _statistic(x, a, layout).final)
    q, w, a = _precondition(x, a, layout)
    kw, qw = _interact(x.k, q, w, x.decay)
    u, z = _solve(x, kw)
    keep, w = None if x.decay is None else _whole(x.decay, w), _decayed(w, x.decay, _to_end).mT
    if relay is None:
        r, s_in, s = _scan(u, z, w, keep, state.s, layout)
    else:
        r, s_in, s = _RelayedScan.apply(relay, layout, u, z, w, keep)
    o = _decayed(q, x.decay, _from_start) @ s_in + qw @ r
    return layout.unpack(o).unflatten(0, (batch, length)), State(s, a)


# ---- layout ----


def chunk_rows(bounds: tuple[int, ...], width: int) -> int:
    """C, a power of two: 64; 32 for heads of up to 32 channels, where [C, C] is most of the work; less if every sequence is shorter."""
    longest = max(stop - start for start, stop in pairwise(bounds))
    return min(CHUNK if width > 32 else CHUNK // 2, 1 << (longest - 1).bit_length())


@dataclass(frozen=True)
class Layout:
    """Where each token lies when chunks are ordered by step, then by rank of their sequence."""

    chunk: int  # C
    active: list[int]  # [steps] sequences that have a chunk j; those of the lowest ranks
    order: Tensor  # [N] the sequences by rank
    rank: Tensor  # [N] the rank of each sequence
    rows: Tensor  # [B * T] the row, chunk * C + place, of each token

    @staticmethod
    def of(bounds: tuple[int, ...], chunk: int, device: torch.device) -> Layout:
        lengths = [stop - start for start, stop in pairwise(bounds)]
        order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
        active = _active([-(-lengths[n] // chunk) for n in order])
        first = indices([0, *accumulate(active)], device)  # [steps + 1] the first chunk of each step
        order = indices(order, device)
        rank = torch.argsort(order)
        sequence = torch.repeat_interleave(indices(lengths, device), output_size=bounds[-1])  # [B * T]
        place = torch.arange(bounds[-1], device=device) - indices(bounds, device)[sequence]
        rows = (first[place // chunk] + rank[sequence]) * chunk + place % chunk
        return Layout(chunk, active, order, rank, rows)

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, H, ...] -> [M, H, C, ...]; rows after a sequence's end are zero: no key, no gain, no decay."""
        rows = x.new_zeros(sum(self.active) * self.chunk, *x.shape[2:]).index_copy(0, self.rows, x.flatten(0, 1))
        return rows.unflatten(0, (-1, self.chunk)).transpose(1, 2).contiguous()

    def unpack(self, x: Tensor) -> Tensor:
        """[M, H, C, V] -> [B * T, H, V]."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.rows)


def _active(chunks: list[int]) -> list[int]:
    """How many of the sequences, given their chunk counts in descending order, have a chunk 0, 1, ..."""
    active, n = [], len(chunks)
    for step in range(chunks[0]):
        while chunks[n - 1] <= step:
            n -= 1
        active.append(n)
    return active


def _chain(advance: Callable[[int, Tensor], Tensor], start: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Carry a state [N, ...] through the steps: the state each chunk meets [M, ...] and the one each sequence ends with [N, ...].

    A sequence leaves the active ones after its last chunk, one of length zero before the first step.
    """
    state, entering, ended = start.index_select(0, layout.order), [], []
    for step, count in enumerate(layout.active):
        state, done = state.split([count, len(state) - count])
        ended.append(done)
        entering.append(state)
        state = advance(step, state)
    final = torch.cat([state, *reversed(ended)])
    return torch.cat(entering), final.index_select(0, layout.rank)


# ---- spans of log decay: sums over rows, <= 0 ----


def _from_start(g: Tensor) -> Tensor:
    """[..., C, X] -> the sum over rows 0 .. i."""
    return g.cumsum(-2)


def _to_end(g: Tensor) -> Tensor:
    """[..., C, X] -> the sum over rows i + 1 .. C - 1."""
    later = torch.cat([g[..., 1:, :], torch.zeros_like(g[..., :1, :])], -2)
    return later.flip(-2).cumsum(-2).flip(-2)


def _spans(g: Tensor) -> Tensor:
    """[..., C] -> exp of the sum over rows j + 1 .. i, [..., C, C]; zero above the diagonal, one on it."""
    below = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).tril(-1)
    terms = torch.where(below, g[..., :, None], torch.zeros((), dtype=g.dtype, device=g.device))  # g_i at (i, j) for i > j
    return terms.cumsum(-2).exp().tril()


def _decayed(x: Tensor, g: Tensor | None, span: Callable[[Tensor], Tensor]) -> Tensor:
    """x [..., C, K] times exp of the span of g: None, [..., C] or [..., C, K]."""
    if g is None:
        return x
    return x * span(g if g.dim() == x.dim() else g[..., None]).exp()


# ---- stages ----


def _precondition(x: Operands, a: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor, Tensor | None]:
    """The query that reads, the key that writes, and the final statistic [N, H, K]."""
    if x.precond is None:
        return x.q, x.k, None
    prior, gained, final = _statistic(x, a, layout)
    a = prior + gained
    precond = replace(x.precond, center=x.precond.center[:, None])  # [H, 1] against [M, H, C]
    return read_query(x.q, a, precond), write_key(x.k, prior, a, x.beta, x.decay, precond), final


class _Statistic(NamedTuple):
    prior: Tensor  # [M, H, C, K] before each token, decayed
    gained: Tensor  # [M, H, C, K] what each token adds
    final: Tensor  # [N, H, K]


def _statistic(x: Operands, a: Tensor, layout: Layout) -> _Statistic:
    p, gained = x.precond.decay, x.precond.gain[..., None] * x.k.square()
    own = _spans(p).tril(-1) @ gained  # the chunk's own earlier tokens
    whole = p.sum(-1).exp()[..., None].split(layout.active)  # exp(P_C) [n, H, 1]
    added = (own[..., -1, :] + gained[..., -1, :]).split(layout.active)
    a_in, final = _chain(lambda step, a: whole[step] * a + added[step], a, layout)
    return _Statistic(own + p.cumsum(-1).exp()[..., None] * a_in[..., None, :], gained, final)


def _interact(k: Tensor, q: Tensor, w: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor]:
    """K W^T below the diagonal and Q W^T on and below it, both decayed, [M, H, C, C]."""
    if g is not None and g.dim() == k.dim():
        return _interact_channels(k, q, w, g)
    kw, qw = k @ w.mT, q @ w.mT
    if g is None:
        return kw.tril(-1), qw.tril()
    spans = _spans(g)
    return (kw * spans).tril(-1), qw * spans


def _interact_channels(k: Tensor, q: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The same for diagonal decay g [M, H, C, K]: blocks of 2, 4, ... C rows, each made of two halves and the product between them."""
    qw = (q * w).sum(-1)[..., None, None]  # [M, H, C, 1, 1] the diagonal
    kw = torch.zeros_like(qw)
    half = 1
    while half < k.shape[-2]:
        halves = (-1, 2, half)
        g_early, g_late = g.unflatten(-2, halves).unbind(-3)  # [M, H, blocks, half, K]
        late = _from_start(g_late).exp()
        w_early = w.unflatten(-2, halves)[..., 0, :, :] * _to_end(g_early).exp()
        kq = torch.cat([x.unflatten(-2, halves)[..., 1, :, :] * late for x in (k, q)], -2)
        k_cross, q_cross = (kq @ w_early.mT).split(half, -2)
        kw, qw = _join(kw, k_cross), _join(qw, q_cross)
        half *= 2
    return kw.squeeze(-3), qw.squeeze(-3)


def _join(diagonal: Tensor, cross: Tensor) -> Tensor:
    """Blocks [..., 2 n, s, s] and the products between their pairs [..., n, s, s] -> lower triangular blocks [..., n, 2 s, 2 s]."""
    upper, lower = diagonal.unflatten(-3, (-1, 2)).unbind(-3)
    return torch.cat([torch.cat([upper, torch.zeros_like(upper)], -1), torch.cat([cross, lower], -1)], -2)


def _solve(x: Operands, kw: Tensor) -> tuple[Tensor, Tensor | None]:
    """U [M, H, C, V] and Z [M, H, C, K]; an offline write has no corrections: U = diag(beta) V and no Z."""
    beta = x.beta[..., None]
    if x.offline:
        return beta * x.v, None
    right = torch.cat([x.v, _decayed(x.k, x.decay, _from_start)], -1)
    solved = torch.linalg.solve_triangular(beta * kw, beta * right, upper=False, unitriangular=True)  # the unit diagonal is implied
    return solved.split([x.v.shape[-1], x.k.shape[-1]], -1)


def _scan(u: Tensor, z: Tensor | None, w: Tensor, keep: Tensor | None, s: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """R [M, H, C, V], the state each chunk meets [M, H, K, V] and the final ones [N, H, K, V].

    w [M, H, K, C]: the write keys decayed to their chunk's end; keep [M, H, 1 or K, 1]: exp(G_C), None without a decay.
    """
    u, w, z, keep = (x if x is None else x.split(layout.active) for x in (u, w, z, keep))
    written = []

    def advance(step: int, s: Tensor) -> Tensor:
        written.append(u[step] if z is None else u[step] - z[step] @ s)
        kept = s if keep is None else keep[step] * s
        return kept + w[step] @ written[step]

    s_in, final = _chain(advance, s, layout)
    return torch.cat(written), s_in, final


class _RelayedScan(torch.autograd.Function):
    """`_scan` of one piece of its sequences, from the states that a relay brings."""

    @staticmethod
    def forward(ctx, relay: Relay, layout: Layout, u, z, w, keep):
        arriving, passed = relay.forth("state", lambda: _ends(relay, u, z, w, keep, layout))
        ctx.relay, ctx.layout = relay, layout
        ctx.save_for_backward(u, z, w, keep, arriving, passed)
        return _scan(u, z, w, keep, relay.enter(arriving), layout)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dr, ds_in, ds):
        *inputs, arriving, passed = ctx.saved_tensors
        inputs = [None if x is None else x.detach().requires_grad_() for x in inputs]
        start = ctx.relay.enter(arriving).requires_grad_()
        with torch.enable_grad(), torch.autocast(start.device.type, enabled=False):
            outputs = _scan(*inputs, start, ctx.layout)
        (met,) = torch.autograd.grad(outputs, start, (dr, ds_in, ds), retain_graph=True)
        ds = ctx.relay.add_left(ds, ctx.relay.back(passed, ctx.relay.met(met)))
        wanted = [x for x in inputs if x is not None]
        found = iter(torch.autograd.grad(outputs, wanted, (dr, ds_in, ds)))
        return None, None, *(None if x is None else next(found) for x in inputs)


def _ends(relay: Relay, u, z, w, keep, layout: Layout) -> tuple[Tensor | None, Tensor]:
    """The state's map [R, H, K, K] of the rows (None where none is chained) and what they make of zero [R, H, K, V]."""
    heads, key, value = u.shape[1], w.shape[-2], u.shape[-1]
    columns = value + key if relay.passes_through else value
    u = torch.nn.functional.pad(u, (0, columns - value))
    start = u.new_zeros(len(layout.rank), heads, key, columns)
    start[..., value:] = torch.eye(key, dtype=u.dtype, device=u.device)[:, : columns - value]
    made, passed = relay.left(_scan(u, z, w, keep, start, layout)[2]).split([value, columns - value], -1)
    if not relay.chains:
        return None, made
    return passed if relay.passes_through else made.new_zeros(*made.shape[:-1], key), made


def _whole(g: Tensor, w: Tensor) -> Tensor:
    """exp(G_C), against a state [M, H, K, V]."""
    return (g.sum(-2) if g.dim() == w.dim() else g.sum(-1, keepdim=True)).exp()[..., None]
