"""The recurrences token by token: the judge of every other implementation, and the exact forms that the theory speaks of.

`advance` is docs/paper.md, section 1, line by line, and is what decoding runs too. `run` loops over it. Any dtype and device; gradients by
autograd, through the states too. Cost: a few small kernels and one saved state a token, so it is for tests and for reading. In fp64
it is the judge.

`exact_atk` and `exact_atq` are the undiagonalised recurrences: with P_t = (lambda I + sum_{i<=t} k_i k_i^T)^-1 the first puts the
curvature on the write key and the second on the query, and they agree for every t (arXiv:2604.21100, Theorem
3.1). Their diagonal versions, forms "unstable_atk" and "atq" of `preconditioner.py`, do not (its App. C.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.operands import Operands, State, initial
from kernels.preconditioner import read_query, write_key


def run(x: Operands, state: State | None, bounds: tuple[int, ...] | None) -> tuple[Tensor, State]:
    """o [B, T, H, V] and the final states of a checked call.

    bounds: None for B equal sequences, or where the packed ones start and end in the single row: 0 .. T.
    """
    state = initial(x, state, len(x.q) if bounds is None else len(bounds) - 1)
    if bounds is None:
        return _sequence(x, state)
    outputs, finals = [], []
    for n, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        one = State(*(part if part is None else part[n : n + 1] for part in state))
        o, final = _sequence(x.map(lambda t, span=slice(start, stop): t[:, span]), one)
        outputs.append(o)
        finals.append(final)
    a = None if x.precond is None else torch.cat([final.a for final in finals])
    return torch.cat(outputs, 1), State(torch.cat([final.s for final in finals]), a)


def _sequence(x: Operands, state: State) -> tuple[Tensor, State]:
    outputs = []
    for t in range(x.q.shape[1]):
        o, state = advance(x.map(lambda tensor, t=t: tensor[:, t]), state)
        outputs.append(o)
    return (torch.stack(outputs, 1) if outputs else x.v), state


def advance(x: Operands, state: State) -> tuple[Tensor, State]:
    """One token, without a time axis (q [B, H, K], beta [B, H], ...): o [B, H, V] and the next state.

    a' = exp(p) a ;  a = a' + c k^2 ;  w = write key(k, a)
    S' = D S ;  S = S' + w (beta (v - S'^T k))^T ;  o = S^T q
    """
    s, a = state
    q, w = x.q, x.k
    if x.precond is not None:
        prior = x.precond.decay.exp()[..., None] * a
        a = prior + x.precond.gain[..., None] * x.k.square()
        w = write_key(x.k, prior, a, x.beta, x.decay, x.precond)
        q = read_query(q, a, x.precond)
    if x.decay is not None:
        per_channel = x.decay if x.decay.dim() == x.k.dim() else x.decay[..., None]
        s = per_channel.exp()[..., None] * s
    error = x.v if x.offline else x.v - _read(s, x.k)
    s = s + w[..., None] * (x.beta[..., None] * error)[..., None, :]
    return _read(s, q), State(s, a)


def _read(s: Tensor, key: Tensor) -> Tensor:
    """S^T key: [..., K, V], [..., K] -> [..., V]."""
    return (s * key[..., None]).sum(-2)


def exact_atk(q: Tensor, k: Tensor, v: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """The exact write-key form, q, k [T, K], v [T, V]: outputs [T, V] and the state after every token [T, K, V].

    k~ = P_{t-1} k / (1 + k.P_{t-1} k) ;  S_t = S_{t-1} + k~ (v - S_{t-1}^T k)^T ;  P_t = P_{t-1} - k~ (P_{t-1} k)^T ;  o_t = S_t^T q
    """
    inverse = torch.eye(k.shape[1], dtype=k.dtype, device=k.device) / ridge
    s = k.new_zeros(k.shape[1], v.shape[1])
    states = []
    for key, value in zip(k, v, strict=True):
        curved = inverse @ key
        write = curved / (1 + key @ curved)
        s = s + torch.outer(write, value - s.T @ key)
        inverse = inverse - torch.outer(write, curved)  # Sherman-Morrison
        states.append(s)
    states = torch.stack(states)
    return (states * q[:, :, None]).sum(1), states


def exact_atq(q: Tensor, k: Tensor, v: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """The exact query form, same shapes: o_t = C_t^T P_t q with C_t = sum k v^T. Its state is P_t C_t, the ridge regression of v on k."""
    gram = (k[:, :, None] * k[:, None, :]).cumsum(0) + ridge * torch.eye(k.shape[1], dtype=k.dtype, device=k.device)
    states = torch.linalg.solve(gram, (k[:, :, None] * v[:, None, :]).cumsum(0))
    return (states * q[:, :, None]).sum(1), states
