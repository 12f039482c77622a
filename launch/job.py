"""What a task of the job does, one a GPU: takes SLURM's (or submitit's) variables, becomes a rank, trains.

`Job` is what submitit pickles. Its first act is to catch signals: submitit's own handler would save and requeue from rank 0 alone, in the
middle of a step, while the others wait for it in a collective. The exit code is the trainer's: 0 done, 75 stopped with a checkpoint; a rank
that fails raises, so that submitit records the traceback, and ends with 1.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from submitit import JobEnvironment

from launch.snapshot import Submission
from pdn_train.config import Config, ConfigError
from pdn_train.files import prove_writable
from pdn_train.heartbeat import attempt_name, begin_attempt
from pdn_train.signals import StopRequest, leave
from pdn_train.watchdog import Watchdog

CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
PORTS = 20000, 32767  # below Linux's range for outgoing connections


class JobError(RuntimeError):
    """This node cannot run its tasks; the message names what and the way out."""


@dataclass(frozen=True)
class Job:
    folder: str  # of the submission

    def __call__(self) -> None:
        stop = StopRequest()
        here = JobEnvironment()
        in_process = here.cluster == "debug"
        if not in_process:
            atexit.register(leave, 1)  # Python's own way out would abort on the threads of open process groups
        code = self.train(here, stop)
        if code and in_process:
            raise SystemExit(code)
        if code:
            leave(code)
        if not in_process:
            atexit.register(leave, 0)

    def train(self, here: JobEnvironment, stop: StopRequest) -> int:
        """Become rank `here.global_rank` of the job and train. Raises what ended the run, after telling the other ranks."""
        submission = Submission(Path(self.folder))
        launch = submission.config.launch
        attempt = attempt_name(here.job_id, os.environ.get("SLURM_RESTART_COUNT", "0"))
        folder = begin_attempt(submission.run_dir.heartbeats, attempt)
        watchdog = Watchdog(folder, here.global_rank, here.num_tasks, launch.hang_seconds)
        if here.cluster != "debug":  # there a debugger may hold the process as long as its user thinks
            watchdog.start()
        try:
            export_ranks(here, attempt)
            own_caches = export_caches(here.job_id)
            os.environ.setdefault("OMP_NUM_THREADS", str(threads(here, launch.cpus_per_task)))
            watchdog.beat("importing torch")
            from pdn_train import train

            train.log_to(None)
            code = train.start(submission.config, stop, watchdog)
        except BaseException as error:
            watchdog.end("failed", error, final=isinstance(error, JobError))
            raise
        if code == 0 and here.local_rank == 0:
            for cache in own_caches:
                shutil.rmtree(cache, ignore_errors=True)
        return code


def export_ranks(here: JobEnvironment, attempt: str) -> None:
    """What torch.distributed reads, from SLURM's or submitit's variables. Whatever stood there came with the shell that submitted."""
    os.environ.update(
        RANK=str(here.global_rank),
        WORLD_SIZE=str(here.num_tasks),
        LOCAL_RANK=str(here.local_rank),
        LOCAL_WORLD_SIZE=str(here.num_tasks // here.num_nodes),
        MASTER_ADDR=here.hostnames[0] if here.num_nodes > 1 else "127.0.0.1",
        # The same on every rank, another after a requeue: the old one may still be closing
        MASTER_PORT=str(random.Random(attempt).randint(*PORTS)),
    )


def export_caches(job: str) -> list[Path]:
    """Compiled kernels go to the node's own disk: ranks of many nodes that write one cache on a shared disk break each other's files.

    Returns the folders made here. Raises JobError naming variable and folder where one cannot be written.
    """
    made = []
    for variable, name in CACHES.items():
        folder = Path(os.environ.get(variable) or Path(tempfile.gettempdir()) / f"pdn_train-{os.getuid()}-{job}" / name)
        try:
            prove_writable(folder)
            stranger = folder.stat().st_uid != os.getuid() and variable not in os.environ
        except OSError as error:
            raise JobError(
                f"{variable}={folder} cannot be written on {socket.gethostname()} ({error.strerror}); export {variable}, a folder on the "
                "node's own disk, in launch.setup"
            ) from error
        if stranger:
            raise JobError(f"{folder} belongs to another user; export {variable}, a folder of your own, in launch.setup")
        if variable not in os.environ:
            os.environ[variable] = str(folder)
            made.append(folder)
    return made


def threads(here: JobEnvironment, cpus_per_task: int) -> int:
    """OpenMP threads of a rank: SLURM has reserved its cores; on this machine the ranks share what there is."""
    return cpus_per_task if here.cluster == "slurm" else max(1, len(os.sched_getaffinity(0)) // here.num_tasks)


def local_gpus(config: Config) -> list[int]:
    """The GPUs of a job on this machine by number; empty: the first launch.gpus_per_node, or none on CPUs.

    Raises ConfigError where CUDA_VISIBLE_DEVICES leaves fewer to this process than are asked for, or does not name them by number.
    """
    listed, wanted = os.environ.get("CUDA_VISIBLE_DEVICES"), 0 if config.train.device == "cpu" else config.launch.gpus_per_node
    if not wanted or listed is None:
        return []
    visible = [int(number) for number in listed.split(",")] if listed.replace(",", "").isdigit() else []
    if len(visible) < wanted:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={listed} leaves {len(visible)} GPUs by number, launch.gpus_per_node={wanted} are asked for: name GPUs "
            "by number and set launch.gpus_per_node to how many they are, or train.device=cpu"
        )
    return visible
