"""AdamW with parameter groups, the learning-rate schedules, and the guard that skips a step.

The optimizer is torch's fused AdamW. Two tensors steer it from outside, both read on the device: `grad_scale` divides every gradient (the
clip factor) and `found_inf`, when 1, leaves weights, moments and step counts as they were. So both are the same at every ZeRO stage, and
cost one pass over the gradients, for their norm, and no wait of the host. (DeepSpeed itself waits at stages 1 in bf16 and 3, where it
insists on a norm of its own.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pdn_train.config import OptimConfig


def build_optimizer(named: Iterable[tuple[str, nn.Parameter]], config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over two groups: decayed and not.

    Without `decay_all` only matrices (two dimensions or more) decay: norms, biases, gate rates and centres have a scale of their own, and
    convolution filters are few. A group that would be empty is left out.

    Parameters of whole 16 bytes in 16 bits come first: ZeRO lays a group's weights out one after the other in this order, and behind a
    gate's rate of 14 heads no weight would start where the fast matrix products of cuBLAS need it (on an H200 PGDN 1B spent 190 of
    341 ms a step in slow ones).
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in sorted(named, key=lambda one: one[1].numel() % 8 != 0):
        if parameter.requires_grad:
            (decayed if config.decay_all or _is_matrix(name, parameter) else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim >= 2 and "conv" not in name


def learning_rate(finished: int, config: OptimConfig, steps: int) -> float:
    """The rate of the step that follows `finished` steps, a function of nothing else.

    With w = warmup_steps: warmup_start + (lr - warmup_start) finished / w while finished < w, then
      cosine:   min_lr + (lr - min_lr) (1 + cos(pi u)) / 2,  u = (finished - w) / (steps - w)
      wsd:      lr, and over the last decay_steps lr -> min_lr linearly
      constant: lr
    """
    if finished < config.warmup_steps:
        return config.warmup_start + (config.lr - config.warmup_start) * finished / config.warmup_steps
    if config.schedule == "cosine":
        progress = min(1.0, (finished - config.warmup_steps) / max(1, steps - config.warmup_steps))
        return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))
    if config.schedule == "wsd":
        progress = min(1.0, max(0.0, (finished - (steps - config.decay_steps)) / config.decay_steps))
        return config.lr + (config.min_lr - config.lr) * progress
    return config.lr


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def guard(optimizer: torch.optim.Optimizer, norm: Tensor, clip: float) -> Tensor:
    """Arm the next step with the global gradient norm (fp32 scalar, on the device): returns found_inf, 1.0 where the step will be skipped.

    The gradients are divided by max(1, (norm + 1e-6) / clip); clip = 0 leaves them.
    """
    skipped = (~torch.isfinite(norm)).float()
    scale = torch.clamp((norm + 1e-6) / clip, min=1.0) if clip else torch.ones_like(norm)
    optimizer.grad_scale = torch.where(skipped.bool(), torch.ones_like(scale), scale)
    optimizer.found_inf = skipped
    return skipped
