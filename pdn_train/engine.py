"""DeepSpeed, and the only file that knows it: one optimizer step over micro-batches, and the ZeRO state on disk.

What DeepSpeed does here: shard weights, gradients and optimizer state (stages 0 to 3), reduce and accumulate gradients in fp32, keep fp32
masters of bf16 weights, write and read its checkpoints. What it does not do: clipping, skipping of non-finite steps, schedules and loss
scaling; those are the same at every stage, so they are ours (`pdn_train.optim`).

The loss of a step is the sum of cross-entropies over all its target tokens divided by their global number; a micro-batch with few targets
weighs little, one with none adds zero.
"""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kernels.maps import Relay
from pdn_train import flat_zero, sequence, zero
from pdn_train.config import Config
from pdn_train.data import Batch
from pdn_train.optim import build_optimizer, guard, set_learning_rate
from pdn_train.outcome import Outcome
from pdn_train.world import World, without_gpu

without_gpu()

import deepspeed  # noqa: E402 - it looks for its accelerator when it is imported
import deepspeed.runtime.engine  # noqa: E402
from deepspeed.accelerator import get_accelerator, set_accelerator  # noqa: E402
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator  # noqa: E402
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine  # noqa: E402
from deepspeed.utils import groups  # noqa: E402
from deepspeed.utils import logger as deepspeed_logger  # noqa: E402
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint  # noqa: E402

# Only DeepSpeed's inference uses this host-memory op, and init would compile it for a minute
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.runtime.engine.BF16_Optimizer = flat_zero.lean(deepspeed.runtime.engine.BF16_Optimizer)
deepspeed_logger.setLevel(logging.WARNING)
# DeepSpeed calls collectives by names that torch is about to change
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


def deepspeed_config(config: Config, world_size: int) -> dict:
    """The JSON that DeepSpeed gets; everything not named here is its default."""
    stage = {"stage": config.parallel.zero, "overlap_comm": True, "contiguous_gradients": True}
    if config.flat_zero:
        stage["stage"] = 1  # for which alone DeepSpeed takes the optimizer that `flat_zero` makes both stages of
    elif config.parallel.zero in (1, 2):
        stage["compute_grad_norm"] = False  # `Engine.step` has it already; stage 3 insists on its own, `flat_zero` has none
    return {
        # DeepSpeed multiplies by all ranks, those of one sequence-parallel group included
        "train_batch_size": config.train.global_batch * config.parallel.sequence,
        "train_micro_batch_size_per_gpu": config.train.micro_batch,
        "gradient_accumulation_steps": config.accumulation(world_size),
        "zero_optimization": stage,
        "bf16": {"enabled": config.train.precision == "bf16", "check_grad_overflow": False},  # `Engine.step` has looked already
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},  # it would make the host wait for the device at every forward pass
    }


class Engine:
    """A model under DeepSpeed ZeRO. Every method is collective: all ranks call it, in the same order."""

    def __init__(self, model: nn.Module, config: Config, world: World):
        """Moves `model` to this rank's device, in bf16 or fp32, with fp32 masters and AdamW state sharded by the ZeRO stage."""
        self.world, self.stage, self.clip = world, config.parallel.zero, config.optim.clip
        named = list(model.named_parameters())
        optimizer = build_optimizer(((name, p) for name, p in named), config.optim)
        names = {id(p): name for name, p in named}
        self._order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        self._optimizer = optimizer
        self._line = sequence.connect(world, config.launch.collective_seconds)
        _compute_on(world.device)
        # DeepSpeed would make a world of its own for its collectives, with torch's default timeout
        groups._WORLD_GROUP = dist.new_group(list(range(world.size)), timeout=timedelta(seconds=config.launch.collective_seconds))
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints its memory reports whatever its log level
            self._engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=deepspeed_config(config, world.size))
        if config.flat_zero and self.stage == 2:
            self._engine.optimizer.shard_sums()
        self._files = self._engine.checkpoint_engine = _Files()
        self.model: nn.Module = self._engine.module
        self.begin: Callable[[str | None], object] = lambda part: None  # is told when a part of a step begins (`pdn_train.profiling.Parts`)
        _name_the_stage(self._engine.optimizer, self.stage)
        zero.start_moments(self._engine.optimizer, optimizer, self.model, applied_steps=0)

    def step(self, batches: list[Batch], rate: float, targets: int) -> Outcome:
        """Forward and backward over this rank's micro-batches, then one AdamW step at `rate` unless a gradient is not finite.

        targets: labels that count, over all ranks and micro-batches. No value is read back to the host.
        """
        self.model.train()
        weight = self.world.size / max(1, targets)  # DeepSpeed averages over the world; the loss divides by the global count
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for i, batch in enumerate(batches):
            self._engine.set_gradient_accumulation_boundary(i == len(batches) - 1)
            self.begin("copy of the batch")
            batch = batch.to(self.world.device)
            self.begin("forward")
            loss = self._engine(batch.input_ids, labels=batch.labels, cu_seqlens=batch.cu_seqlens, relay=self.relay(batch))
            self.begin("backward")
            # in this thread: one of autograd's own makes the host's part of a short step about half as long again
            with torch.autograd.set_multithreading_enabled(False):
                self._engine.backward(loss * weight, scale_wrt_gas=False)
            total += loss.detach()
        self.begin("gradient norm")
        dist.all_reduce(total)
        norm = self._gradient_norm()
        skipped = guard(self._optimizer, norm, self.clip)
        self.begin("optimizer")
        set_learning_rate(self._optimizer, rate)
        self._engine.step()
        self.begin(None)
        return Outcome(total / max(1, targets), norm, skipped)

    def relay(self, batch: Batch) -> Relay | None:
        """What joins the pieces of this batch's samples; None where every rank holds whole ones."""
        return None if self._line is None else self._line.relay(batch.piece, self.world.device)

    @property
    def rate(self) -> float:
        """The learning rate in the optimizer's own groups."""
        return self._optimizer.param_groups[0]["lr"]

    @torch.no_grad()
    def _gradient_norm(self) -> Tensor:
        """L2 norm over the whole model of the accumulated, averaged fp32 gradients; NaN or inf where any of them is."""
        gradients, sharded = zero.gradients(self._engine.optimizer, self.model)
        square = torch.stack(torch._foreach_norm([g.float() for g in gradients])).square().sum() if gradients else self._zero()
        if sharded:
            dist.all_reduce(square)
        return square.sqrt()

    def _zero(self) -> Tensor:
        return torch.zeros((), device=self.world.device)

    def files(self, folder: Path) -> list[tuple[Path, dict]]:
        """This rank's ZeRO files in an existing folder, and what torch.save is to put there: the tensors of training itself, not copies."""
        client = {"parameter_order": self._order}
        self._engine.save_checkpoint(str(folder.parent), tag=folder.name, client_state=client, save_latest=False)
        if self.world.leads:  # scripts that DeepSpeed copies beside every checkpoint; `pdn_train.export` does their work
            for script in ("zero_to_fp32.py", "zero_to_torch.py"):
                (folder.parent / script).unlink(missing_ok=True)
        return self._files.take()

    def state(self) -> list[dict]:
        """The tensors that `files` will hold, whenever it is called. Not collective."""
        parts = []
        if self._engine.save_non_zero_checkpoint:
            parts.append(self._engine.module_state_dict())
        if self._engine.save_zero_checkpoint or parts and not self.stage:
            parts.append(self._engine.optimizer.state_dict())
        return parts

    def load(self, folder: Path) -> None:
        """Restore weights, masters and moments written by as many ranks at the same ZeRO stage, or at 1 or 2 in bf16, bit for bit."""
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        with contextlib.redirect_stdout(io.StringIO()):  # the names of what it reads, on every rank
            found, _ = self._engine.load_checkpoint(str(folder.parent), tag=folder.name, load_lr_scheduler_states=False)
        if found is None:
            raise RuntimeError(f"DeepSpeed found nothing to load in {folder}")
        for group, own in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(own)  # the configuration's weight decay and betas, not those of the file
        zero.link_moments(self._engine.optimizer)

    def put_universal(self, folder: Path, applied_steps: int) -> None:
        """This rank's share of a universal folder (see `to_universal`), whatever wrote it; `applied_steps` becomes AdamW's count.

        Not collective; `refresh_weights` must follow on all ranks. Raises FileNotFoundError or ValueError naming the parameter.
        """
        zero.put_full_state(self._engine.optimizer, self._optimizer, self.model, folder, applied_steps)

    def refresh_weights(self) -> None:
        """The weights that forward uses, from the masters."""
        zero.refresh_weights(self._engine.optimizer)

    def set_masters(self, weights: dict[str, Tensor] | None) -> None:
        """Take weights as fp32 masters: rank 0 gives them by name, fp32 on the CPU; the others None. Moments stay as they are."""
        for name, parameter in self.model.named_parameters():
            shape = getattr(parameter, "ds_shape", parameter.shape)
            whole = torch.empty(shape, dtype=torch.float32, device=self.world.device)
            if weights is not None:
                whole.copy_(weights[name])
            dist.broadcast(whole, src=0)
            zero.put(self._engine.optimizer, self._optimizer, parameter, "fp32", whole.flatten())
        self.refresh_weights()

    def close(self) -> None:
        self._engine.destroy()


class _Files(TorchCheckpointEngine):
    """Reads files as DeepSpeed's own does; what DeepSpeed would write is kept for `pdn_train.saving`, which writes it later.

    DeepSpeed's decoupled writer hands the GPU's own memory to a process and makes the next update of the weights wait for the whole write.
    """

    def __init__(self):
        super().__init__()
        self._found: list[tuple[Path, dict]] = []

    def save(self, state_dict: dict, path: str) -> None:
        self._found.append((Path(path), state_dict))

    def take(self) -> list[tuple[Path, dict]]:
        found, self._found = self._found, []
        return found


def _compute_on(device: torch.device) -> None:
    """DeepSpeed takes the first accelerator it sees; train.device=cpu on a machine with GPUs must reach it too."""
    if get_accelerator().device_name() != device.type:
        if device.type != "cpu":
            raise RuntimeError(
                f"the model is to be on {device}, but DeepSpeed was told to use {get_accelerator().device_name()} (DS_ACCELERATOR)"
            )
        set_accelerator(CPU_Accelerator())


def _name_the_stage(wrapped: object, stage: int) -> None:
    """The optimizer of `flat_zero` leaves its stage out of its files, and then DeepSpeed's own reader refuses them."""
    if stage and hasattr(wrapped, "fp32_groups_flat_partition"):
        original = wrapped.state_dict
        wrapped.state_dict = lambda: {**original(), "zero_stage": stage}


# SLURM's warning goes to every process of a job step, whatever its session; its default is to kill
_CONVERTER = """
import runpy, signal
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
runpy.run_module("deepspeed.checkpoint.ds_to_universal", run_name="__main__")
"""


def to_universal(checkpoint: Path, output: Path) -> None:
    """One process: turn the ZeRO files of any stage and world size into `output`/zero/NAME/{fp32,exp_avg,exp_avg_sq}.pt, whole tensors.

    Stages 1 to 3 go through DeepSpeed's universal converter; stage 0 holds whole tensors already and is only laid out.
    Raises RuntimeError with the converter's own words.
    """
    shutil.rmtree(output, ignore_errors=True)
    if not list(checkpoint.glob("*_optim_states.pt")):
        _lay_out_stage_0(checkpoint, output)
        return
    command = [sys.executable, "-c", _CONVERTER, "--input_folder", str(checkpoint)]
    command += ["--output_folder", str(output), "--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
    # In a session of its own: a signal to all of the job's processes must not end the conversion, which the job then waits for
    done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    (output.parent / "latest_universal").unlink(missing_ok=True)  # it would name a folder that is gone after loading
    if done.returncode:
        raise RuntimeError(f"DeepSpeed's universal conversion of {checkpoint} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def _lay_out_stage_0(checkpoint: Path, output: Path) -> None:
    saved = _model_states(checkpoint)
    states = saved["optimizer"]["state"]
    for i, name in enumerate(saved["parameter_order"]):
        folder = output / "zero" / name
        folder.mkdir(parents=True)
        torch.save(saved["module"][name], folder / "fp32.pt")
        for key in zero.MOMENTS:
            torch.save(states[i][key], folder / f"{key}.pt")


def gather_fp32_weights(checkpoint: Path) -> dict[str, Tensor]:
    """One process: every parameter and buffer by name, on the CPU, parameters as their fp32 masters, from the files of any stage."""
    whole = checkpoint / "mp_rank_00_model_states.pt"  # absent at stage 3, whose weights are in pieces
    weights = _model_states(checkpoint)["module"] if whole.exists() else {}
    if list(checkpoint.glob("*_optim_states.pt")):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # its progress bars and reports
            weights |= get_fp32_state_dict_from_zero_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def _model_states(checkpoint: Path) -> dict:
    return torch.load(checkpoint / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=False)
