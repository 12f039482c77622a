"""Checkpoints written while training goes on.

A save copies each rank's state to host memory (`pdn_train.hostcopy`) and lets training go on; a thread writes the copy into step_N.tmp,
flushed and checksummed. When the threads of all ranks are done, which they learn at a step boundary, rank 0's publishes
(`pdn_train.publication`). Costs a copy of this rank's files in host memory, and of the training time the copying alone; with
checkpoint.background=false no memory, and the whole write.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from pdn_train import hostmemory
from pdn_train.checkpoint import COMPLETE, VERSION, CheckpointError, Progress, entry_of, folder_name, folders
from pdn_train.config import CheckpointConfig, Config
from pdn_train.files import sync
from pdn_train.hostcopy import HostCopy, room
from pdn_train.lease import machine
from pdn_train.publication import begin_folder, publish
from pdn_train.rng import rng_file, rng_state
from pdn_train.telling import sized
from pdn_train.world import World

T = TypeVar("T")
log = logging.getLogger(__name__)


class WriteError(CheckpointError):
    """A checkpoint could not be written: a full disk, a file system that failed."""


@dataclass(frozen=True)
class Published:
    """What a published checkpoint cost: seconds that training stood still for it, seconds to its publication, bytes of all ranks."""

    step: int
    stall: float
    seconds: float
    size: int


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that is not published yet. work: this rank's files being written (its result: {file: {bytes, sha256}}), or, once all
    ranks have written theirs and `files` holds them all, the publication, which is rank 0's."""

    temporary: Path
    state: dict
    begun: float
    work: Future
    files: dict | None = None

    @property
    def step(self) -> int:
        return self.state["progress"]["step"]


class Checkpoints:
    """Writes the checkpoints of one run, one at a time. Methods are collective unless said otherwise."""

    def __init__(self, root: Path, config: CheckpointConfig, world: World):
        self._root, self._config, self._world = root, config, world
        self.last_step: int | None = None  # of the newest checkpoint, be it still being written; whoever resumes from one sets it
        self.tell: Callable[[Published], object] = lambda published: None  # is told of each checkpoint once it is there
        self._host = HostCopy(world.device)
        self._thread = ThreadPoolExecutor(1, "checkpoint")  # it makes no collective call
        self._pending: _Pending | None = None
        self._stall: float | None = None  # seconds that the last save took; None: it still goes on

    def reserve(self, engine) -> None:
        """Begin to get the host memory for a copy of this rank's files; the first save would wait for it.

        Raises CheckpointError where this node has not so much for all its ranks.
        """
        if not self._config.background:
            return
        state, here = engine.state(), machine()
        needs = [need for where, need in self._world.gather((here, room(state))) if where == here]
        self._world.together(lambda: _require_memory(needs))  # on all ranks before the first takes any
        self._host.reserve(state)

    def save(self, engine, progress: Progress, config: Config, data: dict) -> None:
        """Begin one checkpoint, once the one before is published; afterwards training may change the state it was taken from.

        engine: pdn_train.engine.Engine; data: the samples' fingerprint. The checkpoint is there after `finish`, or when the ranks have met
        in `proceed` often enough; with checkpoint.background=false it is there now. Raises as `proceed` does.
        """
        begun = time.perf_counter()
        self.finish()
        self._stall = None
        temporary = self._root / (folder_name(progress.step) + ".tmp")
        self._world.from_leader(lambda: self._writing(temporary, lambda: begin_folder(self._root, progress.step)))
        own = self._writing(temporary, lambda: engine.files(temporary))  # DeepSpeed copies a script of its own there meanwhile
        files = [*own, (rng_file(temporary, self._world.rank), rng_state())]
        if self._config.background:
            files = self._world.each(lambda: self._host.take(files))
        world = {"size": self._world.size, "sequence": self._world.sequence, "zero": config.parallel.zero, "flat": config.flat_zero}
        state = {
            "version": VERSION,
            "progress": asdict(progress),
            "world": world,
            "config": config.model_dump(mode="json"),
            "data": data,
        }
        self._pending = _Pending(temporary, state, begun, self._begin(temporary, lambda: _write(files)))
        self.last_step = progress.step
        if not self._config.background:
            self.finish()
        self._stall = time.perf_counter() - begun

    @property
    def own_part_done(self) -> bool:
        """Whether this rank's thread is done, well or badly; when all ranks' are, all call `proceed`. Not collective."""
        return self._pending is not None and self._pending.work.done()

    def proceed(self) -> None:
        """From files that are written on all ranks to publication by rank 0, and from there to the end.

        Waits for this rank's own work. Where any rank's failed, all raise: that one WriteError or CheckpointError, the others Disagreement.
        """
        pending, self._pending = self._pending, None
        parts = self._world.together(pending.work.result)
        if pending.files is None:
            files = {name: entry for part in parts for name, entry in sorted(part.items())}
            self._pending = replace(pending, work=self._begin(pending.temporary, lambda: self._publish(pending, files)), files=files)
            return
        seconds = time.perf_counter() - pending.begun
        size = sum(entry["bytes"] for entry in pending.files.values())
        self.tell(Published(pending.step, seconds if self._stall is None else self._stall, seconds, size))

    def finish(self) -> None:
        """Wait until what is being written is published; raises as `proceed` does."""
        while self._pending is not None:
            self.proceed()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if error is not None and self._pending is not None:  # said at once: the wait may be long, and may not end
            step = self._pending.step
            log.error("rank %d: %s: %s; waits for its files of step %d", self._world.rank, kind.__name__, error, step)
        self.close()

    def close(self) -> None:
        """Wait for this rank's own work, published or not, as nothing may write here once the run folder's lease is given up.

        Not collective. A fault of that work, of which nobody has heard where another error ended the run first, goes to the log.
        """
        self._thread.shutdown()
        self._host.close()
        fault = None if self._pending is None else self._pending.work.exception()
        if fault is not None:
            log.error("rank %d: %s: %s", self._world.rank, type(fault).__name__, fault)

    def _publish(self, pending: _Pending, files: dict) -> None:
        if self._world.leads:
            publish(pending.temporary, {**pending.state, "files": files}, self._config)

    def _begin(self, temporary: Path, act: Callable[[], T]) -> Future[T]:
        """Act on the thread; a fault of the disk becomes a WriteError, also one that torch.save makes a RuntimeError of its own of."""
        return self._thread.submit(lambda: self._writing(temporary, act, (OSError, RuntimeError)))

    def _writing(self, temporary: Path, act: Callable[[], T], faults: tuple[type[Exception], ...] = (OSError,)) -> T:
        """What act returns. Raises WriteError for a fault of the disk."""
        try:
            return act()
        except CheckpointError:
            raise
        except faults as error:
            older = any((folder / COMPLETE).exists() for folder in folders(self._root))
            left = "the checkpoint before it is as it was" if older else "no checkpoint is there yet"
            raise WriteError(
                f"{temporary} could not be written, with {_free(self._root)} there: {error}; {left}: "
                "free some space, or mend the file system, and start the run again"
            ) from error


def require_space(root: Path, parameters: int) -> None:
    """One process: raise CheckpointError where the disk cannot hold one more checkpoint.

    It takes up to 16 bytes a parameter: weights, masters, moments.
    """
    free, needed = shutil.disk_usage(root).free, 16 * parameters
    if free < needed:
        raise CheckpointError(
            f"{root} has {sized(free)} free, one checkpoint takes about {sized(needed)}; free some space, "
            "lower checkpoint.keep or move run_dir"
        )


def _require_memory(needs: list[int]) -> None:
    """needs: bytes, of each rank of this node. Where they are not there the kernel would kill a process, which says less."""
    left = hostmemory.available()
    if left < sum(needs):
        raise CheckpointError(
            f"a copy of this node's part of a checkpoint ({len(needs)} ranks) takes {sized(sum(needs))} of host memory, "
            f"{sized(left)} are available; with checkpoint.background=false none is taken, and training waits for every save"
        )


def _write(files: list[tuple[Path, dict]]) -> dict:
    """Write files and flush them to disk; {file: {bytes, sha256}}."""
    entries = {}
    for file, state in files:
        torch.save(state, file)
        sync(file)
        entries[file.name] = entry_of(file)
    return entries


def _free(root: Path) -> str:
    try:
        return f"{sized(shutil.disk_usage(root).free)} free"
    except OSError:  # the folder itself may be what is gone
        return "no folder"
