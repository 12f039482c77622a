"""DeepSpeed's optimizer for ZeRO-1 in bf16 with fewer passes over the gradients, and none for which the host waits.

A step of DeepSpeed 0.19.8's BF16_Optimizer casts and adds each parameter's gradient to its fp32 sum by itself, copies all sums to one
place, all-reduces and scales them there and copies them back (also on a single rank), takes a norm of each, reads it on the host, and
sets all sums to zero twice: four launches a parameter tensor (1,256 at 24 layers) and 54 bytes a number, counted in its source. Here, with
the same numbers:

    first micro-batch      sums = gradients                              6 B a parameter
    later ones             sums += gradients                             10 B, a launch each
    the last               reduce-scatter of the flat sums in place, on more than one rank; a rank needs only its own partition's
    step                   AdamW and the weights' all-gather as before; `Engine.step` has the norm already
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def lean(original: type) -> type:
    """A subclass of DeepSpeed's BF16_Optimizer, for data-parallel ranks without its pipeline, expert and Muon branches."""

    class LeanBF16Optimizer(original):
        empty = True  # the sums hold nothing of this step yet

        @torch.no_grad()
        def update_hp_grads(self, clear_lp_grads: bool = False) -> None:
            """Take a micro-batch's bf16 gradients, and drop them whatever `clear_lp_grads` says."""
            for weights, sums in zip(self.bf16_groups, self.fp32_groups_gradients, strict=True):
                gradients = [weight.grad.view(-1) for weight in weights]  # each weight has one: the model uses them all
                if self.empty:
                    torch._foreach_copy_(sums, gradients)
                    continue
                for total, gradient in zip(sums, gradients, strict=True):
                    total.add_(gradient)
            self.empty = False
            self.clear_lp_grads(set_to_none=True)

        @torch.no_grad()
        def reduce_gradients(self, pipeline_parallel: bool) -> None:
            """The mean over ranks, of this rank's partition only; DeepSpeed's engine calls it after a step's last micro-batch."""
            flats = self.fp32_groups_gradients_flat, self.fp32_groups_gradient_flat_partition, self.real_dp_process_group
            for whole, own, group in zip(*flats, strict=True):
                ranks = dist.get_world_size(group)
                if ranks > 1:
                    dist.reduce_scatter_tensor(own, whole, group=group)
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
