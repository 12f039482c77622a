"""How the recurrences of a model are doing: what each layer makes of one text, in numbers few enough to log all the time.

    beta, gain                 means of the gates; decay, precond_decay: means of what they leave, exp(g) and exp(p)
    kw                         k.w, which with unit keys lies in [1/x, x]: its least, mean and largest value, and a histogram
    eigenvalue                 1 - beta k.w, the factor by which a write scales the state along its key: least and mean
    negative                   the share of writes in which it is below 0
    a, b                       the statistic and the preconditioner: least and largest value, histograms of log10 a and of b
    center                     the learned m: least, mean and largest over heads
    state                      |S|, the Frobenius norm of the state after the text, root mean square over heads

A dn, gdn or kda has no preconditioner: k.w is 1 up to rounding, and a, b, gain and center are left out. Histograms are counted on the
device, BINS bars over fixed ranges, so that those of different steps and layers can be laid over each other.

Costs one forward of at most TOKENS tokens and, a layer, one product of [TOKENS, TOKENS] with the squared keys. Everything is computed while
the layer runs (as ZeRO-3 has its weights then) and nothing is read back before the end. `log.health` sets the steps between two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.chunk import delta_rule
from kernels.operands import Operands, prepare
from kernels.preconditioner import dot, scaling, write_key
from pdn_train.model import Gates, LanguageModel

TOKENS = 1024
BINS = 60
# kw and b: what x <= 2 allows; log10 a: from eps to more than unit keys can add up to
RANGES = {"kw": (0.0, 2.0), "b": (0.5, 2.0), "log10_a": (-8.0, 4.0)}


@dataclass(frozen=True)
class Layer:
    """One layer's numbers by name, and histograms: BINS counts over RANGES[name], values outside in the first and last bar."""

    numbers: dict[str, float]
    histograms: dict[str, list[float]]


@torch.no_grad()
def measure(model: LanguageModel, input_ids: Tensor) -> list[Layer]:
    """The layers of a model on the first TOKENS tokens of the first row of input_ids [B, T]. All ranks of a sharded model call it."""
    seen: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
    mixers = [block.mixer for block in model.blocks]
    for mixer in mixers:
        mixer.observer = lambda q, k, v, gates, kernel=mixer.config.kernel: seen.append(_layer(q, k, v, gates, kernel))
    try:
        model(input_ids[:1, :TOKENS])
    finally:
        for mixer in mixers:
            mixer.observer = None
    return [Layer(_told(numbers), {name: counts.tolist() for name, counts in bars.items()}) for numbers, bars in seen]


def _told(numbers: dict[str, Tensor]) -> dict[str, float]:
    """In one copy to the host."""
    return dict(zip(numbers, torch.stack([x.double() for x in numbers.values()]).tolist(), strict=True))


def _layer(q: Tensor, k: Tensor, v: Tensor, gates: Gates, kernel: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """q, k, v [1, T, H, K] as they come from the convolution."""
    x = prepare(q, k, v, gates.beta, gates.decay, gates.precond, None, True)
    _, state = delta_rule(q, k, v, gates.beta, gates.decay, gates.precond, output_final_state=True, backend=kernel)
    numbers, bars = {"beta": x.beta.mean(), "state": state.s.square().sum((-2, -1)).mean().sqrt()}, {}
    if x.decay is not None:
        numbers["decay"] = x.decay.exp().mean()
    w = x.k
    if x.precond is not None:
        w = _preconditioner(x, numbers, bars)
    kw = dot(x.k, w)[..., 0]  # [1, T, H]
    eigenvalue = 1 - x.beta * kw
    numbers |= _ends("kw", kw) | {"kw/mean": kw.mean(), "eigenvalue/least": eigenvalue.min(), "eigenvalue/mean": eigenvalue.mean()}
    numbers["negative"] = (eigenvalue < 0).double().mean()
    return numbers, bars | {"kw": _histogram("kw", kw)}


def _preconditioner(x: Operands, numbers: dict[str, Tensor], bars: dict[str, Tensor]) -> Tensor:
    """Adds what concerns the preconditioner; returns the write keys [1, T, H, K]."""
    precond = x.precond
    a, prior = statistic(x)
    numbers |= {"gain": precond.gain.mean(), "precond_decay": precond.decay.exp().mean(), "center/mean": precond.center.mean()}
    numbers |= _ends("center", precond.center) | _ends("a", a)
    bars["log10_a"] = _histogram("log10_a", torch.log10(a + precond.eps))
    if precond.form not in ("unstable_atk", "atq"):
        b = scaling(a, precond)
        numbers |= _ends("b", b)
        bars["b"] = _histogram("b", b)
    return write_key(x.k, prior, a, x.beta, x.decay, precond)


def statistic(x: Operands) -> tuple[Tensor, Tensor]:
    """a_t of one text from a_0 = 0, with and without token t, [1, T, H, K]: row t of exp(P_t - P_i) (c_i k_i^2), P the sums of p."""
    added = x.precond.gain[..., None] * x.k.square()
    sums = x.precond.decay.double().cumsum(1).transpose(1, 2)  # [1, H, T]; fp64: differences of long sums
    spans = (sums[..., :, None] - sums[..., None, :]).tril().to(added.dtype)
    earlier = spans.exp().tril(-1) @ added.transpose(1, 2)  # [1, H, T, K]
    earlier = earlier.transpose(1, 2)
    return earlier + added, earlier


def _ends(name: str, x: Tensor) -> dict[str, Tensor]:
    return {f"{name}/least": x.min(), f"{name}/largest": x.max()}


def _histogram(name: str, x: Tensor) -> Tensor:
    low, high = RANGES[name]
    return torch.histc(x.float().clamp(low, high), BINS, low, high)
