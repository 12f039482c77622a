"""The state inside DeepSpeed's optimizers, stage by stage: gradients for the norm, and a whole state put in from named tensors.

DeepSpeed has three optimizers for our settings, each with its own layout:
  stage 0           torch's AdamW over the parameters themselves
  stages 1 and 2    in bf16 BF16_Optimizer, as `flat_zero` has it; in fp32 DeepSpeedZeroOptimizer. Both: flat fp32 partitions
  stage 3           DeepSpeedZeroOptimizer_Stage3: parameters partitioned one by one
Its own universal loader covers some stage changes and fails in others (2 -> 3, 3 -> 1); writing each parameter's piece where its layout
keeps it covers all sixteen, and any world size.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")


def gradients(wrapped: object, model: nn.Module) -> tuple[list[Tensor], bool]:
    """The accumulated gradients this rank holds before a step, and whether they are its shard only (else every rank holds them all)."""
    if isinstance(wrapped, torch.optim.Optimizer):
        return [p.grad for p in model.parameters() if p.grad is not None], False
    if hasattr(wrapped, "fp32_groups_gradient_flat_partition"):
        return list(wrapped.fp32_groups_gradient_flat_partition), True
    held = [group for group in wrapped.averaged_gradients.values() if group is not None]
    return [g for group in held for g in group if g is not None], True


def start_moments(wrapped: object, optimizer: torch.optim.Optimizer, model: nn.Module, applied_steps: int) -> None:
    """AdamW's state with zero moments, now rather than in the first step, so that every checkpoint holds them."""
    for parameter in _masters(wrapped, model):
        optimizer.state[parameter] = {
            "step": torch.tensor(float(applied_steps), device=parameter.device),
            **{key: torch.zeros_like(parameter, memory_format=torch.preserve_format) for key in MOMENTS},
        }
    link_moments(wrapped)


def link_moments(wrapped: object) -> None:
    """Tell stages 1 and 2 where each parameter's moments lie, after AdamW's state has been made or replaced."""
    if hasattr(wrapped, "_lazy_init_hp_params_optimizer_state"):
        wrapped._hp_optimizer_states_linked = False
        wrapped._lazy_init_hp_params_optimizer_state()


def put_full_state(wrapped: object, optimizer: torch.optim.Optimizer, model: nn.Module, folder: Path, applied_steps: int) -> None:
    """Set masters, moments and AdamW's count from `folder`/zero/NAME/{fp32,exp_avg,exp_avg_sq}.pt; `refresh_weights` must follow.

    Not collective. Raises FileNotFoundError or ValueError naming the parameter that is missing or has another size.
    """
    start_moments(wrapped, optimizer, model, applied_steps)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            for key in ("fp32", *MOMENTS):
                put(wrapped, optimizer, parameter, key, _read(folder / "zero" / name / f"{key}.pt", parameter))


def _masters(wrapped: object, model: nn.Module) -> list[Tensor]:
    for attribute in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(wrapped, attribute):
            return list(getattr(wrapped, attribute))
    return [p for p in model.parameters() if p.requires_grad]


def _read(file: Path, parameter: Tensor) -> Tensor:
    """The whole tensor of one parameter, flat; DeepSpeed's converter wraps it in a dictionary with its layout."""
    if not file.exists():
        raise FileNotFoundError(f"{file} is missing: the checkpoint holds no such parameter; is it of another model?")
    saved = torch.load(file, map_location="cpu", weights_only=False)
    flat = (saved["param"] if isinstance(saved, dict) else saved).flatten()
    wanted = getattr(parameter, "ds_numel", parameter.numel())
    if flat.numel() != wanted:
        raise ValueError(f"{file} holds {flat.numel()} values, the model's parameter {wanted}")
    return flat


@torch.no_grad()
def put(wrapped: object, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, key: str, flat: Tensor) -> None:
    """Set one whole tensor, flat, where this rank keeps its piece of it: key fp32 (the master), exp_avg or exp_avg_sq."""
    state_key = None if key == "fp32" else key
    if hasattr(parameter, "ds_id"):  # stage 3: an equal piece a rank, the last one padded
        size, rank = parameter.ds_tensor.numel(), wrapped._get_param_partition_rank(parameter)
        piece = flat[size * rank : size * (rank + 1)]
        piece = torch.cat([piece, piece.new_zeros(size - piece.numel())])
        wrapped.set_local_hp_param(piece.to(parameter.ds_tensor.device), parameter, state_key)
    elif hasattr(parameter, "_hp_mapping"):  # stages 1 and 2: the slice of it that this rank's flat partition covers, if any
        parameter.set_full_hp_param(flat, state_key)
    else:
        target = parameter if state_key is None else optimizer.state[parameter][state_key]
        target.copy_(flat.view_as(target))


def refresh_weights(wrapped: object) -> None:
    """Collective. Weights from masters: stages 1 and 2 gather the partitions, stage 3 casts its own and gathers the small whole ones."""
    if hasattr(wrapped, "update_lp_params"):
        wrapped.update_lp_params()
    elif hasattr(wrapped, "fp16_partitioned_groups_flat"):
        for i, flat in enumerate(wrapped.fp16_partitioned_groups_flat):
            flat.data.copy_(wrapped.fp32_partitioned_groups_flat[i].data)
            wrapped._unflatten_partitioned_parameters(i)
        if wrapped.persistent_parameters:
            wrapped.persistent_parameters[0].all_gather(wrapped.persistent_parameters)
