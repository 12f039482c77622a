"""What one optimizer step did: made by the engine, read by the journal."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Outcome:
    """Tensors on the device: reading them waits for the step."""

    loss: Tensor  # [] fp64, nats per target token over the whole world
    grad_norm: Tensor  # [] fp32, before clipping
    skipped: Tensor  # [] fp32, 1.0 where the step was not applied
