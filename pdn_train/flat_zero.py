"""DeepSpeed's optimizer for ZeRO-1 in bf16 with fewer passes over the gradients, and none for which the host waits; ZeRO-2 in bf16 too.

A step of DeepSpeed 0.19.8's BF16_Optimizer casts and adds each parameter's gradient to its fp32 sum by itself, copies all sums to one
place, all-reduces and scales them there and copies them back (also on a single rank), takes a norm of each, reads it on the host, and
sets all sums to zero twice: four launches a parameter tensor (1,256 at 24 layers) and 54 bytes a number, counted in its source. DeepSpeed
has it at stage 1 only; its optimizer for stage 2 works in a hook of each parameter, where the host takes longer than the backward pass.
Here, with the same numbers (at stage 2 several micro-batches are added up in another order):

                           stage 1                                      stage 2, on N > 1 ranks
    first micro-batch      sums = gradients                             as the others, but part = what arrives
    later ones             sums += gradients, a launch each             fp32 copy of the gradients, reduce-scatter, part += what arrives
    the last               reduce-scatter of the flat sums in place     nothing more
    fp32 sums              4 B a parameter                              4 / N B a parameter, with 4 B more at the end of each backward pass
    sent                   once a step                                  once a micro-batch
    step                   AdamW and the weights' all-gather as before; `Engine.step` has the norm already

The copy of stage 2 comes when the activations are gone. On one rank the stages are the same.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def lean(original: type) -> type:
    """A subclass of DeepSpeed's BF16_Optimizer, for data-parallel ranks without its pipeline, expert and Muon branches."""

    class LeanBF16Optimizer(original):
        empty = True  # the sums hold nothing of this step yet
        sharded = False  # the sums are this rank's partition of them only

        @torch.no_grad()
        def shard_sums(self) -> None:
            """From now on as at stage 2; before the first step. DeepSpeed has made the whole sums and views of them: all are let go."""
            if dist.get_world_size(self.dp_process_group) == 1:
                return
            self.sharded = True
            self.fp32_groups_gradient_flat_partition = [own.clone() for own in self.fp32_groups_gradient_flat_partition]
            self.fp32_groups_gradient_dict.clear()  # each parameter's _hp_mapping holds this very dictionary
            views = self.fp32_groups_gradients, self.fp32_groups_actual_gradients_flat, self.non_expert_gradients
            for held in (self.fp32_groups_gradients_flat, *views):
                held.clear()

        @torch.no_grad()
        def update_hp_grads(self, clear_lp_grads: bool = False) -> None:
            """Take a micro-batch's bf16 gradients, and drop them whatever `clear_lp_grads` says."""
            for group, weights in enumerate(self.bf16_groups):
                gradients = [weight.grad.view(-1) for weight in weights]  # each weight has one: the model uses them all
                if self.sharded:
                    self._scatter(group, gradients)
                elif self.empty:
                    torch._foreach_copy_(self.fp32_groups_gradients[group], gradients)
                else:
                    for total, gradient in zip(self.fp32_groups_gradients[group], gradients, strict=True):
                        total.add_(gradient)
            self.empty = False
            self.clear_lp_grads(set_to_none=True)

        def _scatter(self, group: int, gradients: list[Tensor]) -> None:
            """Add the sum over ranks of one micro-batch's gradients to this rank's partition."""
            own, ranks = self.fp32_groups_gradient_flat_partition[group], self.real_dp_process_group[group]
            whole = torch.empty_like(self.bf16_groups_flat[group], dtype=own.dtype)
            sizes = [gradient.numel() for gradient in gradients]
            *parts, padding = whole.split([*sizes, whole.numel() - sum(sizes)])
            torch._foreach_copy_(parts, gradients)
            padding.zero_()
            arrived = own if self.empty else whole.split(own.numel())[dist.get_rank(ranks)]
            dist.reduce_scatter_tensor(arrived, whole, group=ranks)
            if not self.empty:
                own.add_(arrived)

        @torch.no_grad()
        def reduce_gradients(self, pipeline_parallel: bool) -> None:
            """The mean over ranks, of this rank's partition only; DeepSpeed's engine calls it after a step's last micro-batch."""
            for i, (own, group) in enumerate(zip(self.fp32_groups_gradient_flat_partition, self.real_dp_process_group, strict=True)):
                ranks = dist.get_world_size(group)
                if ranks > 1:
                    if not self.sharded:
                        dist.reduce_scatter_tensor(own, self.fp32_groups_gradients_flat[i], group=group)
                    own.div_(ranks)

        @torch.no_grad()
        def step(self) -> None:
            for master, gradient in zip(self.fp32_groups_flat_partition, self.fp32_groups_gradient_flat_partition, strict=True):
                master.grad = gradient
            self.optimizer.step()
            self.update_lp_params()
            self.clear_hp_grads()

        def clear_hp_grads(self) -> None:
            self.empty = True

    return LeanBF16Optimizer
