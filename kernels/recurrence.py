"""The six recurrences, by name: data only, no torch.

All are one delta rule (arXiv:2604.21100; docs/paper.md, section 1), in the letters used throughout `kernels`:

    S' = D_t S_{t-1}                                   decay:  none | scalar (one a head) | channel (one a key channel)
    S_t = S' + w_t (beta_t (v_t - S'^T k_t))^T         gain:   beta;  solve: online (the write corrects what the state already says)
    o_t = scale * S_t^T q_t
    w_t = k_t                                          preconditioner: none
    w_t = b_t * k_t,  b_t in [1/x, x] from a_t         preconditioner: atk (the write key is scaled by each channel's history)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Recurrence:
    """What distinguishes one recurrence from another; everything else is shared."""

    name: str
    decay: Literal["none", "scalar", "channel"]
    gain: Literal["beta"]
    preconditioner: Literal["none", "atk"]
    solve: Literal["online"]


RECURRENCES: dict[str, Recurrence] = {
    name: Recurrence(name, decay, "beta", preconditioner, "online")
    for name, decay, preconditioner in (
        ("dn", "none", "none"),
        ("gdn", "scalar", "none"),
        ("kda", "channel", "none"),
        ("pdn", "none", "atk"),
        ("pgdn", "scalar", "atk"),
        ("pkda", "channel", "atk"),
    )
}
