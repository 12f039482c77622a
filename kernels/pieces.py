"""Few long sequences: their scans over pieces that run at once, and the pieces' affine maps chained.

A piece takes the state S to M S + b, with M and b from its tokens alone (`scan.maps`, `scan.ends`): so all pieces are scanned at once
from zero, the states at their starts follow by a short chain, and the ordinary scan over pieces starts from those. Backward it is the same
with M^T:

    S_{j+1} = M_j S_j + b_j ;  dS_j = M_j^T dS_{j+1} + c_j

in fp32 (3xTF32). One program a sequence, head and block of value channels, which are the rows: S^T as a left operand of 16 rows, and (up
to 128 key channels) a piece's M on its way while those before it are passed. Cost: a second scan without outputs, and M.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, launch, power_of_2
from kernels.layout import Inputs, Layout

BLOCK = 16  # value channels of a program


@triton.jit
def _rows(M, first, K: tl.constexpr, BK: tl.constexpr, PART: tl.constexpr, REVERSE: tl.constexpr):
    """Rows first .. first + PART of M^T (REVERSE: of M), [PART, BK], from M [K, K]."""
    c, d = first + tl.arange(0, PART), tl.arange(0, BK)
    if REVERSE:
        return tl.load(M + c[:, None] * K + d[None, :], mask=(c < K)[:, None] & (d < K)[None, :], other=0.0)
    return tl.trans(tl.load(M + d[:, None] * K + c[None, :], mask=(d < K)[:, None] & (c < K)[None, :], other=0.0))


@triton.jit
def _chain(
    maps, added, start, states, end, pieces, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PART: tl.constexpr, GIVEN: tl.constexpr,
    REVERSE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """states [P, H, K, V]: what each piece starts from (REVERSE: the gradient of what it ends with); end [S, H, K, V]: after the last.
    PART: rows of M^T at once; where that is not all of them, S is read again part by part from where it was just written."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    block, head, n = tl.program_id(0) % blocks, tl.program_id(0) // blocks % H, tl.program_id(0) // blocks // H
    first, count = tl.load(pieces + 4 * n), tl.load(pieces + 4 * n + 1)
    d, e = tl.arange(0, BK), block * BV + tl.arange(0, BV)
    tile = d[:, None] * V + e[None, :]
    inside = (d < K)[:, None] & (e < V)[None, :]
    own = (n * H + head).to(tl.int64) * (K * V)
    S = tl.zeros((BV, BK), tl.float32)
    if GIVEN:
        S = tl.trans(tl.load(start + own + tile, mask=inside, other=0.0))
    for step in tl.range(count, num_stages=STAGES):
        piece = first + step
        if REVERSE:
            piece = first + count - 1 - step
        at = (piece * H + head).to(tl.int64)
        b = tl.load(added + at * (K * V) + tile, mask=inside, other=0.0)
        tl.store(states + at * (K * V) + tile, tl.trans(S), mask=inside)
        if PART == BK:
            S = tl.dot(S, _rows(maps + at * (K * K), 0, K, BK, BK, REVERSE), tl.trans(b), input_precision="tf32x3")
        else:
            tl.debug_barrier()
            S = tl.trans(b)
            for part in range(0, K, PART):
                c = part + tl.arange(0, PART)
                met = tl.load(states + at * (K * V) + c[None, :] * V + e[:, None], mask=(e < V)[:, None] & (c < K)[None, :], other=0.0)
                S = tl.dot(met, _rows(maps + at * (K * K), part, K, BK, PART, REVERSE), S, input_precision="tf32x3")
    tl.store(end + own + tile, tl.trans(S), mask=inside)


def chain(x: Inputs, layout: Layout, maps: Tensor, added: Tensor, start: Tensor | None, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """What each piece starts from [P, H, K, V] and each sequence ends with [S, H, K, V]; reverse: gradients, from last to first."""
    (H, K), V, (_, S) = x.k.shape[1:], added.shape[-1], layout.counts
    states = torch.empty_like(added)
    end = torch.empty(S, H, K, V, dtype=torch.float32, device=x.k.device)
    whole = K <= 128  # three such maps fit into shared memory
    launch(
        _chain, S * H * cdiv(V, BLOCK), (x.key, start is None),
        maps, added, start, states, end, layout.pieces, H,
        K=K, V=V, BK=power_of_2(K), BV=BLOCK, PART=power_of_2(K) if whole else 64, GIVEN=start is not None, REVERSE=reverse,
        STAGES=3 if whole else 1, num_warps=8,
    )  # fmt: skip
    return states, end


def compose(x: Inputs, layout: Layout, maps: Tensor) -> Tensor:
    """The map of each whole sequence, [S, H, K, K]: the identity through the chain of its pieces."""
    identity = torch.eye(maps.shape[-1], dtype=maps.dtype, device=maps.device).expand(len(layout.sequences), *maps.shape[1:])
    return chain(x, layout, maps, torch.zeros_like(maps), identity.contiguous())[1]
