"""Few long sequences: their scans over pieces that run at once, and the pieces' affine maps chained.

A piece takes the state S to M S + b, with M and b from its tokens alone (`scan.maps`, `scan.ends`): so all pieces are scanned at once
from zero, the states at their starts follow by a short chain, and the ordinary scan over pieces starts from those. Backward it is the same
with M^T:

    S_{j+1} = M_j S_j + b_j ;  dS_j = M_j^T dS_{j+1} + c_j

in fp32 (3xTF32). One program a sequence, head and block of value channels. Cost: a second scan without outputs, and M.
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
def _chain(
    maps, added, start, states, end, pieces, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GIVEN: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """states [P, H, K, V]: what each piece starts from (REVERSE: the gradient of what it ends with); end [S, H, K, V]: after the last."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    block, head, n = tl.program_id(0) % blocks, tl.program_id(0) // blocks % H, tl.program_id(0) // blocks // H
    first, count = tl.load(pieces + 4 * n), tl.load(pieces + 4 * n + 1)
    d, e = tl.arange(0, BK), block * BV + tl.arange(0, BV)
    tile = d[:, None] * V + e[None, :]
    inside = (d < K)[:, None] & (e < V)[None, :]
    own = (n * H + head).to(tl.int64) * (K * V)
    S = tl.zeros((BK, BV), tl.float32)
    if GIVEN:
        S = tl.load(start + own + tile, mask=inside, other=0.0)
    for step in range(count):
        piece = first + step
        if REVERSE:
            piece = first + count - 1 - step
        at = (piece * H + head).to(tl.int64)
        tl.store(states + at * (K * V) + tile, S, mask=inside)
        square = (d < K)[:, None] & (d < K)[None, :]
        if REVERSE:
            M = tl.load(maps + at * (K * K) + d[None, :] * K + d[:, None], mask=square, other=0.0)
        else:
            M = tl.load(maps + at * (K * K) + d[:, None] * K + d[None, :], mask=square, other=0.0)
        S = tl.dot(M, S, tl.load(added + at * (K * V) + tile, mask=inside, other=0.0), input_precision="tf32x3")
    tl.store(end + own + tile, S, mask=inside)


def chain(x: Inputs, layout: Layout, maps: Tensor, added: Tensor, start: Tensor | None, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """What each piece starts from [P, H, K, V] and each sequence ends with [S, H, K, V]; reverse: gradients, from last to first."""
    (H, K), V, (_, S) = x.k.shape[1:], added.shape[-1], layout.counts
    states = torch.empty_like(added)
    end = torch.empty(S, H, K, V, dtype=torch.float32, device=x.k.device)
    launch(
        _chain, S * H * cdiv(V, BLOCK), (x.key, start is None),
        maps, added, start, states, end, layout.pieces, H,
        K=K, V=V, BK=power_of_2(K), BV=BLOCK, GIVEN=start is not None, REVERSE=reverse, num_warps=8,
    )  # fmt: skip
    return states, end


def compose(x: Inputs, layout: Layout, maps: Tensor) -> Tensor:
    """The map of each whole sequence, [S, H, K, K]: the identity through the chain of its pieces."""
    identity = torch.eye(maps.shape[-1], dtype=maps.dtype, device=maps.device).expand(len(layout.sequences), *maps.shape[1:])
    return chain(x, layout, maps, torch.zeros_like(maps), identity.contiguous())[1]
