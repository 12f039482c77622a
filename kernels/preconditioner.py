"""From the statistic to the write key: the one step in which a preconditioned recurrence differs from a plain one.

The statistic a_t = exp(p_t) a_{t-1} + c_t k_t^2 is a decayed diagonal of the keys' Gram matrix (docs/paper.md, section 1). The
default, "squashed", is

    r = log(a_t + eps) - m ;  s = r / (1 + |r|) in (-1, 1) ;  b_t = exp(-log(x) s) in [1/x, x] ;  w_t = b_t * k_t

Everything here is elementwise on one token's row, so it reads the same for a token, a chunk and a whole batch: k and a are [...,
K], and what is one a head (beta, m) broadcasts against k.shape[:-1]. The other forms are the paper's ablations
(docs/paper.md, section 5), for comparison only:

    unstable_atk   u = k / (a'_t + lambda) ;  w_t = u / (1 + k.u)
                   a'_t = exp(p_t) a_{t-1}: the statistic without token t (strict mask)
    atq            w_t = k_t, the query becomes q / (a_t + lambda), and the write is offline: S_t = D_t S_{t-1} + k_t (beta_t v_t)^T
    norm_kbk       w_t = b * k / (k.(b * k) + eps)
    norm_1_kbk     w_t = b * k / (1 + k.(b * k))
    norm_beta      w_t = b * k / (alpha + beta k.(b * k) + eps)
                   alpha = what the state's decay leaves: 1, exp(g_t), or k.(exp(g_t) * k) with a decay a channel

lambda = exp(m), one a head and learned, so that m is a parameter of every form (the paper leaves its lambda open). As everywhere, beta
multiplies the write: with norm_beta the gain in front of b * k is beta / (alpha + beta k.(b * k)). The eps keep a zero key at zero. The
narrower intervals squeeze the same s: up, b = x^((1 - s) / 2) in [1, x]; down, b = x^(-(1 + s) / 2) in [1/x, 1].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.operands import Preconditioner


def scaling(a: Tensor, precond: Preconditioner) -> Tensor:
    """b, the bounded inverse of the statistic a [..., K]: large where a channel's history is small. Decreasing in a."""
    r = torch.log(a + precond.eps) - precond.center[..., None]
    s = r / (1 + r.abs())
    if precond.interval == "up":
        s = (s - 1) / 2
    elif precond.interval == "down":
        s = (s + 1) / 2
    return torch.exp(-math.log(precond.bound) * s)


def write_key(k: Tensor, prior: Tensor, a: Tensor, beta: Tensor, decay: Tensor | None, precond: Preconditioner) -> Tensor:
    """w_t [..., K] from the key, the statistic without (prior) and with (a) this token, and the state's gates. Formulas above."""
    form = precond.form
    if form == "atq":
        return k
    if form == "unstable_atk":
        u = k / (prior + ridge(precond))
        return u / (1 + dot(k, u))
    w = scaling(a, precond) * k
    if form == "norm_kbk":
        return w / (dot(k, w) + precond.eps)
    if form == "norm_1_kbk":
        return w / (1 + dot(k, w))
    if form == "norm_beta":
        return w / (_alpha(k, decay) + beta[..., None] * dot(k, w) + precond.eps)
    return w


def read_query(q: Tensor, a: Tensor, precond: Preconditioner) -> Tensor:
    """The query that reads the state: q, or q / (a_t + lambda) with form "atq"."""
    return q / (a + ridge(precond)) if precond.form == "atq" else q


def ridge(precond: Preconditioner) -> Tensor:
    """lambda = exp(m), [..., 1]."""
    return precond.center.exp()[..., None]


def dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, keepdim=True)


def _alpha(k: Tensor, decay: Tensor | None) -> Tensor | float:
    """How much of the state along k survives this token's decay."""
    if decay is None:
        return 1.0
    if decay.dim() == k.dim():
        return dot(k, decay.exp() * k)
    return decay.exp()[..., None]
