"""The delta rule by chunks in Triton: the stages in order, and their gradients.

The algebra of one chunk of C rows (`layout.chunk_rows`), per head; G is the inclusive cumulative log decay in the chunk, khat = rk k and
qhat = rq q the normalised rows (rk, rq are row scalars, never applied to a stored tile), w the write key (khat, or b * khat), S the state
that the chunk meets and B = diag(beta):

    M_ij = exp(G_i - G_j), i >= j ;  L = khat w^T * M, strictly below the diagonal ;  N = (I + L B)^-1 L        (solve)
    E = V - exp(G) khat S ;  U = E - N (B E) = (I + L B)^-1 E                                                   the corrected errors
    O = scale exp(G) qhat S + QW (B U), QW = scale (qhat w^T * M) ;  S' = exp(G_C) S + w^T (exp(G_C - G) B U)                (scan)

With a decay a channel G is [C, K]: then exp(G) khat, exp(G) qhat and exp(G_C - G) w are products channel by channel, exp(G_C) S scales the
rows of S, and khat w^T * M stands for the sums over channels of khat_i w_j exp(G_i - G_j) (`kernels.levels`).

So B U are the values written, R in docs/paper.md, section 2; its T is (I + B L)^-1 B = (I - B N) B. N rather than T is stored: the
identity then enters exactly, in fp32, and the gradient of beta needs no division.

Stages and what they hand on (x: the `Inputs`, and as a dtype theirs; N tokens = B * T, M chunks, S sequences or spans):

    statistic.forward(x, layout, a_0)                         -> a_start [M, H, K] fp32, a [S, H, K] fp32
    write_keys.forward(x, layout, a_start)                    -> w [N, H, K] x
    solve.forward(x, layout, w)                               -> Solved: -N, QW, row scalars, decayed keys
    scan.forward(x, solved, spans, s_0)                       -> o [N, H, V] x, s [S, H, K, V] fp32
    -- backward --
    scan.states(x, solved, layout, spans, s_0)                -> h [M, H, V, K] x: S^T of each chunk, u [N, H, V] x: U
    scan_backward.backward(x, solved, layout, spans, do, ds)  -> dh [M, H, V, K] x, dx [N, H, V] x, ds_0 [S, H, K, V] fp32
    pairs.backward(x, solved, layout, o, u, dx, do)           -> Pairs: dv, dbeta, e1, e2
    gradients.backward(x, solved, layout, h, dh, u, dx, do, pairs) -> Gradients: dq, dk, dw, dg
    statistic_backward.backward(x, solved, layout, a_start, gradients, da, hand_back) -> dforget, dgain, dcenter, da_0

Where there are few long sequences the scans run over pieces of them at once (`kernels.pieces`).

Kept for the backward pass, D = 128 and 16 bit: q, k, v 768 B, t and qw 256 B, w 256 B, rows 32 B and a_start 8 B a token and head, gates
aside: 1.3 KB; with a decay a channel kr, qr and wd too, 2.1 KB, and o. The states are computed again: they would be 512 B more.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from kernels import (
    cold,
    gradients,
    gradients_channel,
    maps_triton,
    pairs,
    pieces,
    scan,
    scan_backward,
    solve,
    solve_channel,
    statistic,
    statistic_backward,
    write_keys,
)
from kernels.kept import once
from kernels.launch import aligned
from kernels.layout import Inputs, Layout, Solved, chunk_rows, layout
from kernels.maps import Relay
from kernels.operands import Preconditioner, State

NARROWEST = 64  # key channels in 16 bit: products with fewer columns can go wrong on Hopper (`kernels.gradients_channel`)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor | None,
    precond: Preconditioner | None,
    scale: float | None,
    normalize_qk: bool,
    state: State | None,
    bounds: tuple[int, ...] | None,
    relay: Relay | None = None,
) -> tuple[Tensor, State]:
    """o [B, T, H, V] and the final states of a checked call (arguments as `kernels.chunk.delta_rule`)."""
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):  # Triton launches on the current device
            return run(q, k, v, beta, decay, precond, scale, normalize_qk, state, bounds, relay)
    if relay is not None and relay.pieces == 1:
        relay = None  # nothing arrives and nothing is handed on
    batch, length, _, key = q.shape
    value = v.shape[-1]
    table = layout(batch, length, bounds, chunk_rows(k), q.shape[2], q.device)
    gates = (None,) * 3 if precond is None else (precond.decay, precond.gain, precond.center)
    call = Call(table, key**-0.5 if scale is None else scale, normalize_qk, *_squash(precond), relay)
    tensors = q, k, v, beta, decay, *gates, *(state or (None, None))
    if q.is_cuda:
        kind = *_kind(q, k, v, decay), precond is None, state is None, normalize_qk, table.cut
        alone = Call(table, call.scale, normalize_qk, call.log_bound, call.eps, None)  # nothing is exchanged
        cold.prepare(_DeltaRule, kind, (alone, *tensors), torch.is_grad_enabled() and q.requires_grad)
    o, s, a = _DeltaRule.apply(call, *tensors)
    if s.shape[-2:] != (key, value):
        s = s[..., :key, :value]
    return _unflat(o, v.shape), State(s, None if a is None else _cut(a, key))


class Call:
    """What of a call is no tensor."""

    def __init__(self, table: Layout, scale: float, normalize: bool, log_bound: float, eps: float, relay: Relay | None):
        self.table, self.normalize, self.log_bound, self.relay = table, normalize, log_bound, relay
        self.scale, self.eps = float(scale), float(eps)  # Triton compiles an int in, which no key of a launch holds

    def inputs(self, q, k, v, beta, decay, forget, gain, center) -> Inputs:
        return Inputs(q, k, v, beta, decay, forget, gain, center, self.log_bound, self.eps, self.scale, self.normalize)

    def flat(self, q, k, v, beta, decay, forget, gain, center) -> Inputs:
        """The same of a call's own tensors, with a batch and a time axis and any strides."""
        channel = decay is not None and decay.dim() == q.dim()
        size = _whole(q.shape[-1], decay if channel and decay.element_size() < q.element_size() else q)
        if q.element_size() == 2:
            size = max(size, NARROWEST)
        q, k, v = _rows(_padded(q, size)), _rows(_padded(k, size)), _rows(v)
        decay = _rows(_padded(decay, size)) if channel else _tokens(decay)
        center = None if center is None else aligned(center.float())
        return self.inputs(q, k, v, _tokens(beta), decay, _tokens(forget), _tokens(gain), center)


def _kind(*tensors: Tensor | None) -> tuple:
    """What of a call's tensors decides about kernels."""
    return tuple([x if x is None else (x.dtype, x.shape[2:], x.stride()[1:]) for x in tensors])


def _squash(precond: Preconditioner | None) -> tuple[float, float]:
    return (0.0, 1.0) if precond is None else (math.log(precond.bound), precond.eps)


def _rows(x: Tensor) -> Tensor:
    """[B, T, H, D] -> [N, H, D] as the kernels' descriptors need it: rows and token strides of whole 16 bytes, the last two axes
    contiguous. A view of a fused projection is taken as it is, anything else copied; odd head sizes are padded with zero channels, which
    change nothing."""
    unit = 16 // x.element_size()
    x = _padded(x, _whole(x.shape[-1], x))
    H, D = x.shape[-2:]
    batch, token, head, channel = x.stride()
    joined = (x.shape[0] == 1 or batch == x.shape[1] * token) and token % unit == 0 and x.data_ptr() % 16 == 0
    if channel != 1 or (H > 1 and head != D) or token < H * D or not joined:
        x = x.contiguous()
        if x.data_ptr() % 16:
            x = x.clone(memory_format=torch.contiguous_format)
    return x.flatten(0, 1)


def _whole(channels: int, x: Tensor) -> int:
    """The next number of channels that is whole 16 bytes in x's dtype."""
    unit = 16 // x.element_size()
    return -(-channels // unit) * unit


def _tokens(x: Tensor | None) -> Tensor | None:
    """[B, T, H] -> [N, H]."""
    return None if x is None else aligned(x.flatten(0, 1))


def _padded(x: Tensor, size: int) -> Tensor:
    return x if x.shape[-1] == size else torch.nn.functional.pad(x, (0, size - x.shape[-1]))


def _cut(x: Tensor, size: int) -> Tensor:
    """Without what `_padded` added."""
    return x if x.shape[-1] == size else x[..., :size]


def _unflat(x: Tensor, shape: torch.Size) -> Tensor:
    """[N, H, D or more] -> [B, T, H, D]; [N, H] -> [B, T, H]."""
    return x.view(shape) if x.shape[-1] == shape[-1] else x[..., : shape[-1]].unflatten(0, shape[:2])


def _stages(x: Inputs, table: Layout, relay: Relay | None, s_0: Tensor | None, a_0: Tensor | None) -> tuple[Tensor | None, ...]:
    """The forward pass: o, s, a, and what the backward pass needs: starts, maps, a_start, what the relay passed on of the statistic and of
    the state, and `Solved`'s tensors."""
    w = a_start = a = maps = made = passed_a = passed_s = None
    if x.forget is not None and relay is None:
        a_start, a = statistic.forward(x, table, a_0)
    elif x.forget is not None:
        a_start, a, passed_a = maps_triton.statistic_forward(relay, x, table)
    if x.forget is not None:
        w = write_keys.forward(x, table, a_start)
    stage = solve_channel if x.decay_kind == "channel" else solve
    solved = stage.forward(x, table, w)
    starts, s = s_0, None
    if table.cut:
        maps, made = scan.maps(x, solved, table.spans), scan.ends(x, solved, table.spans)
        if relay is None or relay.hands_on:  # from zero, with a relay: what this piece hands on
            starts, s = pieces.chain(x, table, maps, made, s_0)
    if relay is not None:
        s_0, passed_s = maps_triton.state_arriving(relay, x, solved, table, maps, s)
        if not table.cut:
            starts = s_0
        elif relay.number > 0:
            starts, s = pieces.chain(x, table, maps, made, s_0)
    o, last = scan.forward(x, solved, table.spans, starts)
    return o, last if s is None else s, a, starts, maps, a_start, passed_a, passed_s, *solved.tensors


class _DeltaRule(torch.autograd.Function):
    """The stages and their gradients. Tokens are flattened and channels padded in here: each view outside would be a node of the graph, and
    cost the host as much as a launch. (But for o: a view that a function returns cannot be changed in place.)"""

    @staticmethod
    def forward(ctx, call, q, k, v, beta, decay, forget, gain, center, s_0, a_0):
        x, table = call.flat(q, k, v, beta, decay, forget, gain, center), call.table
        ctx.call, ctx.shapes, ctx.initial = call, (q.shape, v.shape), (s_0 is not None, a_0 is not None)
        if s_0 is not None:
            s_0 = aligned(_padded(_padded(s_0, x.v.shape[-1]).mT, x.k.shape[-1]).mT)
        if a_0 is not None:
            a_0 = aligned(_padded(a_0, x.k.shape[-1]))
        o, s, a, starts, maps, a_start, passed_a, passed_s, *solved = once(lambda: _stages(x, table, call.relay, s_0, a_0))
        kept = o if x.decay_kind == "channel" else None  # `kernels.pairs`
        inputs = x.q, x.k, x.v, x.beta, x.decay, x.forget, x.gain, x.center
        ctx.save_for_backward(*inputs, starts, maps, a_start, passed_a, passed_s, kept, *solved)
        ctx.set_materialize_grads(False)
        return o, s, a

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, ds, da):
        q, k, v, beta, decay, forget, gain, center, starts, maps, a_start, passed_a, passed_s, o, *solved = ctx.saved_tensors
        x, table, solved = ctx.call.inputs(q, k, v, beta, decay, forget, gain, center), ctx.call.table, Solved(*solved)
        relay, met = ctx.call.relay, None
        do = torch.zeros(x.v.shape, dtype=x.v.dtype, device=x.v.device) if do is None else aligned(do)
        ds, da = aligned(ds), aligned(da)
        h, u = scan.states(x, solved, table, table.spans, starts)
        if table.cut:
            *_, made = scan_backward.backward(x, solved, table, table.spans, do, None, store=False)
            if relay is None or relay.number > 0:
                ends, met = pieces.chain(x, table, maps, made, ds, reverse=True)
        if relay is not None:
            ds = maps_triton.state_gradient(relay, x, solved, table, met, passed_s, do, ds)
            if table.cut and relay.hands_on:
                ends, met = pieces.chain(x, table, maps, made, ds, reverse=True)
        dh, dx, first = scan_backward.backward(x, solved, table, table.spans, do, ends if table.cut else ds)
        ds_0 = met if table.cut else first
        pair = pairs.backward(x, solved, table, o, u, dx, do)
        by = gradients_channel if x.decay_kind == "channel" else gradients
        grad = by.backward(x, solved, table, h, dh, u, dx, do, pair)
        dforget = dgain = dcenter = da_0 = None
        if x.forget is not None:
            hand_back = None if relay is None else partial(maps_triton.statistic_gradient, relay, passed_a, da)
            dforget, dgain, dcenter, da_0 = statistic_backward.backward(x, solved, table, a_start, grad, da, hand_back)
        return None, *_as_given(ctx, grad, pair, dforget, dgain), dcenter, *_initial(ctx, ds_0, da_0)


def _as_given(ctx, grad, pair, dforget: Tensor | None, dgain: Tensor | None) -> list[Tensor | None]:
    """The gradients of q, k, v, beta, decay, forget and gain in their shapes."""
    (batch, length, heads, key), value = ctx.shapes
    gate = (batch, length, heads)
    decay = gate if grad.decay is None or grad.decay.dim() == 2 else (*gate, key)
    made = ((grad.q, ctx.shapes[0]), (grad.k, ctx.shapes[0]), (pair.v, value), (pair.beta, gate), (grad.decay, decay))
    return [None if x is None else _unflat(x, shape) for x, shape in (*made, (dforget, gate), (dgain, gate))]


def _initial(ctx, ds_0: Tensor | None, da_0: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the initial states that were given."""
    (has_s, has_a), key, value = ctx.initial, ctx.shapes[0][-1], ctx.shapes[1][-1]
    return ds_0[..., :key, :value] if has_s else None, _cut(da_0, key) if has_a else None
