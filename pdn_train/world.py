"""The processes of a run: who this one is, and the small agreements they make.

`World.detect` is the only reader of RANK, WORLD_SIZE and the like; without them the world is one process. Two groups are opened: the one
that carries gradients (NCCL on GPUs, gloo on CPUs) and a gloo group on the host for decisions, so that agreeing on a flag never waits for
the GPU. The world is data-parallel x sequence-parallel: neighbouring ranks share a sample.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

from pdn_train.files import prove_writable

T = TypeVar("T")


class WorldError(ValueError):
    """This process cannot be a rank: the launcher's variables or the devices do not fit; the message names them."""


class Disagreement(RuntimeError):
    """Another rank could not go on; the message carries what it said."""


@dataclass
class World:
    """rank: 0 .. size-1; local_rank: on this node; sequence: ranks that share one sample; device: where this rank computes; local_size:
    ranks on a node."""

    rank: int
    local_rank: int
    size: int
    sequence: int
    device: torch.device
    job: str | None = None  # SLURM's job id, the same after a requeue
    local_size: int = 1
    _control: dist.ProcessGroup | None = field(default=None, repr=False)

    @classmethod
    def detect(cls, sequence: int = 1, device: Literal["auto", "cpu", "cuda"] = "auto") -> World:
        """Read the launcher's variables (torchrun's, or those the SLURM job exports).

        Raises WorldError where they contradict each other, and where `device` is cuda and there is none.
        """
        rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
        if tasks > 1 and "RANK" not in os.environ:
            raise WorldError(
                f"srun started {tasks} tasks here, but RANK is not set: each would be a run of its own; set RANK and WORLD_SIZE"
            )
        if size > 1 and "MASTER_ADDR" not in os.environ:
            raise WorldError(f"WORLD_SIZE={size} but MASTER_ADDR is not set: the ranks cannot find each other; start the run with torchrun")
        if not 0 <= rank < size:
            raise WorldError(f"RANK={rank} is not below WORLD_SIZE={size}; start the run with torchrun")
        if size % sequence:
            raise WorldError(f"parallel.sequence={sequence} does not divide WORLD_SIZE={size}")
        return cls(rank, local_rank, size, sequence, _device(device, local_rank), os.environ.get("SLURM_JOB_ID"), _local_size(size))

    @property
    def data_ranks(self) -> int:
        return self.size // self.sequence

    @property
    def data_rank(self) -> int:
        return self.rank // self.sequence

    @property
    def sequence_rank(self) -> int:
        """Which piece of its samples this rank holds."""
        return self.rank % self.sequence

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def start(self, timeout_seconds: int) -> None:
        """Open the process groups; a collective that waits longer than the timeout ends the process with an error."""
        os.environ.setdefault("RANK", str(self.rank))
        os.environ.setdefault("WORLD_SIZE", str(self.size))
        os.environ.setdefault("LOCAL_RANK", str(self.local_rank))
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        if "MASTER_PORT" not in os.environ:
            os.environ["MASTER_PORT"] = str(_free_port())
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        timeout = timedelta(seconds=timeout_seconds)
        # device_id binds NCCL's communicator to the device at once: a later hang would have no name
        device_id = self.device if self.device.type == "cuda" else None
        dist.init_process_group("nccl" if device_id else "gloo", timeout=timeout, device_id=device_id)
        self._control = dist.new_group(backend="gloo", timeout=timeout)

    def stop(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        self._control = None

    def sum(self, values: list[int]) -> list[int]:
        """The element-wise sum over all ranks of a few host integers (64-bit)."""
        if self._control is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, group=self._control)
        return tensor.tolist()

    def sum_floats(self, values: list[float]) -> list[float]:
        """The element-wise sum over all ranks of a few host numbers (fp64), the same bits on every rank."""
        return [sum(column) for column in zip(*self.gather(values), strict=True)]

    def barrier(self) -> None:
        self.sum([0])

    def gather(self, value: T) -> list[T]:
        """Every rank's value (any small picklable object), in rank order, on every rank."""
        if self._control is None:
            return [value]
        found: list = [None] * self.size
        dist.all_gather_object(found, value, group=self._control)
        return found

    def from_leader(self, act: Callable[[], T]) -> T:
        """Rank 0 acts; every rank gets what it returned, or the error it met."""
        return self.together(lambda: act() if self.leads else None)[0]

    def each(self, act: Callable[[], T]) -> T:
        """`together`, for results that stay on their rank (open files, models)."""
        kept: list[T] = []
        self.together(lambda: kept.append(act()))
        return kept[0]

    def together(self, act: Callable[[], T]) -> list[T]:
        """Every rank acts; where any failed, all of them raise, so that none waits in a later collective. `act` itself holds no collective.

        Returns each rank's result, in rank order. The rank that failed raises its own error, the others a Disagreement that quotes it.
        """
        result, error = None, None
        try:
            result = act()
        except Exception as fault:  # whatever it is, the other ranks must hear of it before this one leaves
            error = fault
        said = self.gather((result, None if error is None else f"{type(error).__name__}: {error}"))
        if error is not None:
            raise error
        for rank, (_, fault) in enumerate(said):
            if fault is not None:
                raise Disagreement(f"rank {rank} stopped with {fault}")
        return [value for value, _ in said]


def own_ranks() -> int | None:
    """The ranks that a launcher started, this one among them; None without a launcher. Before any `World` is."""
    return int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None


def own_rank() -> int:
    """This process's rank, before there is a World to ask."""
    return int(os.environ.get("RANK", 0))


def _local_size(size: int) -> int:
    """Ranks on a node, as torchrun or SLURM says; without either all are on one."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", size)))


def require_kernel_cache() -> None:
    """Raise WorldError where Triton could not keep its compiled kernels: it would find out after the ranks have met, on one of them."""
    chosen = os.environ.get("TRITON_CACHE_DIR")
    folder = Path(chosen or Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache")
    try:
        prove_writable(folder)
    except OSError as error:
        raise WorldError(
            f"TRITON_CACHE_DIR={chosen or f'(not set: {folder})'} cannot be written on {socket.gethostname()} ({error.strerror}); "
            "set it to a folder on this node's own disk"
        ) from error


def without_gpu() -> None:
    """Tell DeepSpeed, which looks when it is imported, that there is no GPU; it would search and warn, in every process."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def _device(wanted: str, local_rank: int) -> torch.device:
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise WorldError("train.device=cuda: torch sees no GPU here; use train.device=cpu, or install a CUDA build of torch")
    if wanted == "cpu" or not there:
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise WorldError(
            f"LOCAL_RANK={local_rank} has no GPU of its own: {torch.cuda.device_count()} visible; start at most that many ranks on a node"
        )
    return torch.device("cuda", local_rank)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
