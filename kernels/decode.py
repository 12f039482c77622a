"""One token of generation: the recurrence's own step, with the state updated in place.

Cost: the state is read and written once, [B, H, K, V] in fp32; the torch backend makes one temporary of its size, the Triton one is a
single launch (`decode_triton`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import check_backend, check_operands, check_state, check_triton
from kernels.operands import Preconditioner, State, prepare
from kernels.reference import advance


@torch.no_grad()
def step(
    state: State,  # s [B, H, K, V], a [B, H, K] with precond; both are overwritten
    q: Tensor,  # [B, H, K]
    k: Tensor,  # [B, H, K]
    v: Tensor,  # [B, H, V]
    beta: Tensor,  # [B, H]
    decay: Tensor | None = None,  # None | [B, H] | [B, H, K]
    precond: Preconditioner | None = None,  # decay and gain [B, H]
    scale: float | None = None,
    normalize_qk: bool = True,
    backend: str = "triton",
) -> Tensor:
    """o [B, H, V] in v's dtype for one token of each sequence, as `kernels.chunk.delta_rule` with T = 1 and the time axis dropped.

    No autograd. Raises ValueError naming the argument, before the state is touched.
    """
    check_backend(backend)
    check_operands(q, k, v, beta, decay, precond, scale, axes="BH")
    check_state(state, q, v, precond, len(q), name="state")
    if precond is not None and state.a is None:
        raise ValueError("state.a is None but precond is given: the statistic is updated in place; start it with zeros [B,H,K]")
    if backend == "triton":
        check_triton(q, precond)
        from kernels import decode_triton  # only here: the other backends need no Triton

        return decode_triton.step(state, q, k, v, beta, decay, precond, scale, normalize_qk)
    with torch.autocast(q.device.type, enabled=False):
        x = prepare(q, k, v, beta, decay, precond, scale, normalize_qk)
        o, new = advance(x, State(*(part if part is None else part.to(x.q.dtype) for part in state)))
    state.s.copy_(new.s)
    if precond is not None:
        state.a.copy_(new.a)
    return o.to(v.dtype)
