"""The delta rule on whole sequences: one call for the six recurrences (`kernels.recurrence`), reading as the algorithm.

Check, normalise, run, cast. The algorithms are `chunk_triton` (chunks, on a GPU), `chunk_torch` (chunks, any device) and `reference` (token
by token); none falls back to another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import chunk_torch, reference
from kernels.checks import check_backend, check_bounds, check_operands, check_state, check_triton
from kernels.maps import Relay, check_relay
from kernels.operands import Preconditioner, State, prepare

__all__ = ["Preconditioner", "State", "delta_rule"]


def delta_rule(
    q: Tensor,  # [B, T, H, K] bf16, fp16, fp32 or fp64
    k: Tensor,  # [B, T, H, K]
    v: Tensor,  # [B, T, H, V]
    beta: Tensor,  # [B, T, H] fp32 or q's dtype, as the gates below
    decay: Tensor | None = None,  # log decay <= 0: None | [B, T, H] | [B, T, H, K]
    precond: Preconditioner | None = None,
    scale: float | None = None,  # of the output; None: K ** -0.5
    normalize_qk: bool = True,  # q and k become x / sqrt(sum x^2 + 1e-6), per head
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,  # int32 or int64 [N+1], host or device
    backend: str = "triton",
    relay: Relay | None = None,  # where the sequences are cut into pieces and this is one of them (`kernels.maps`)
) -> tuple[Tensor, State | None]:
    """o [B, T, H, V] in v's dtype, and the final State or None.

        S' = D_t S_{t-1} ;  S_t = S' + w_t (beta_t (v_t - S'^T k_t))^T ;  o_t = scale * S_t^T q_t   (docs/paper.md, section 1)

    D is 1, exp(decay) or diag(exp(decay)); the write key w is k, or with precond the one of `kernels.preconditioner`. With
    cu_seqlens B is 1, it runs 0 .. T without decreasing, and both states start afresh (or from initial_state[n]) at each entry; a
    sequence of length zero hands its initial state, and the gradient, through. Gradients to every floating tensor given, also from
    the final states; the same bits on every run. K and V are 16 to 256, T at least 1. Computation and states are fp32, or fp64 for
    fp64 inputs, under autocast too. The Triton backend takes bf16, fp16 and fp32, a decay a head or none, and the squashed preconditioner.

    With a relay the tokens are one piece of longer sequences: cu_seqlens is the piece's, the states at its start come by the relay, there
    is no initial_state, and gradients too reach the pieces before. All pieces must make the call, and its backward pass, together.

    Raises ValueError naming the argument, before any computation.
    """
    check_backend(backend)
    check_operands(q, k, v, beta, decay, precond, scale)
    bounds = check_bounds(cu_seqlens, q)
    if initial_state is not None:
        check_state(initial_state, q, v, precond, len(q) if bounds is None else len(bounds) - 1)
    if relay is not None:
        check_relay(relay, q, bounds, initial_state is not None, backend)
    with torch.autocast(q.device.type, enabled=False):
        if backend == "triton":
            check_triton(q, precond)
            from kernels import chunk_triton  # only here: the other backends need no Triton

            o, state = chunk_triton.run(q, k, v, beta, decay, precond, scale, normalize_qk, initial_state, bounds, relay)
        else:
            x = prepare(q, k, v, beta, decay, precond, scale, normalize_qk)
            if backend == "torch":
                o, state = chunk_torch.run(x, initial_state, bounds, relay)
            else:
                o, state = reference.run(x, initial_state, bounds)
    return o.to(v.dtype), state if output_final_state else None
