"""Checkpoints that are whole or absent.

    checkpoints/step_0000001000/   DeepSpeed's ZeRO files, rng_00000.pt a rank, state.json, COMPLETE

A save copies each rank's state to host memory (`pdn_train.hostcopy`) and lets training go on; a thread writes the copy into step_N.tmp,
flushed and checksummed. When the threads of all ranks are done, which they learn at a step boundary, rank 0's publishes: state.json lists
the files, the folder is renamed, and COMPLETE (the checksum of state.json) comes last. A crash between the rename and COMPLETE leaves
step_N.publishing beside the folder, and the next start finishes the publication if every checksum holds. On resume rank 0 walks from the
newest step down and the ranks check the files between them; a damaged checkpoint is passed over with a warning that names the fault. On
another world size or ZeRO stage the ZeRO files are first turned into DeepSpeed's universal form, whole or not at all, in step_N.universal.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from pdn_train import hostcopy
from pdn_train.config import CheckpointConfig, Config
from pdn_train.files import sync_folder, write_whole
from pdn_train.hostcopy import HostCopy
from pdn_train.world import World

VERSION = 3  # 1: before Mixer.in_proj; q, k, v and the gates had a matrix each. 2: before `optim.build_optimizer` ordered the weights
SHAPES = tuple(
    f"model.{key}" for key in ("recurrence", "hidden_size", "num_layers", "num_heads", "head_dim", "intermediate_size", "vocab_size")
)
T = TypeVar("T")
log = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used, or does not fit the run; the message says what differs and the way out."""


class WriteError(CheckpointError):
    """A checkpoint could not be written: a full disk, a file system that failed."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands: finished steps, samples consumed (the data position), tokens seen, steps skipped, the last of them in a row."""

    step: int = 0
    position: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    skipped_in_row: int = 0


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was found whole: its folder and state.json."""

    folder: Path
    state: dict

    @property
    def progress(self) -> Progress:
        return Progress(**self.state["progress"])


@dataclass(frozen=True)
class Written:
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


class Checkpoints:
    """The checkpoints of one run folder. Methods are collective unless said otherwise."""

    def __init__(self, root: Path, config: CheckpointConfig, world: World):
        self.root, self._config, self._world = root, config, world
        self.last_step: int | None = None  # of the newest checkpoint, found whole or saved, be it still being written
        self.tell: Callable[[Written], object] = lambda written: None  # is told of each checkpoint once it is published
        self._host = HostCopy(world.device)
        self._thread = ThreadPoolExecutor(1, "checkpoint")  # it makes no collective call
        self._pending: _Pending | None = None
        self._stall: float | None = None  # seconds that the last save took; None: it still goes on

    def reserve(self, engine) -> None:
        """Begin to get the host memory for a copy of this rank's files; the first save would wait for it.

        Raises CheckpointError where there is not so much.
        """

        def act() -> None:
            state = engine.state()
            _require_memory(hostcopy.room(state))
            self._host.reserve(state)

        if self._config.background:
            self._world.together(act)

    def save(self, engine, progress: Progress, config: Config, data: dict) -> None:
        """Begin one checkpoint, once the one before is published; afterwards training may change the state it was taken from.

        engine: pdn_train.engine.Engine; data: the samples' fingerprint. The checkpoint is there after `finish`, or when the ranks have met
        in `proceed` often enough; with checkpoint.background=false it is there now.
        """
        begun = time.perf_counter()
        self.finish()
        self._stall = None
        temporary = self.root / (folder_name(progress.step) + ".tmp")
        self._world.from_leader(lambda: self._prepare(temporary))
        files = [*engine.files(temporary), (temporary / f"rng_{self._world.rank:05d}.pt", _rng_state())]
        if self._config.background:
            files = self._world.each(lambda: self._host.take(files))
        state = {
            "version": VERSION,
            "progress": asdict(progress),
            "world": {"size": self._world.size, "sequence": self._world.sequence, "zero": config.parallel.zero},
            "config": config.model_dump(mode="json"),
            "data": data,
        }
        self._pending = _Pending(temporary, state, begun, self._begin(temporary, lambda: _write(files)))
        self.last_step = progress.step
        if not self._config.background:
            self.finish()
        self._stall = time.perf_counter() - begun

    @property
    def waits(self) -> bool:
        """Whether this rank has done its part of what is being written, well or badly: when all have, all call `proceed`."""
        return self._pending is not None and self._pending.work.done()

    def proceed(self) -> None:
        """From files that are written on all ranks to publication by rank 0, and from there to the end.

        Waits for this rank's own work. Where any rank's failed, all raise: that one WriteError or CheckpointError, the others Disagreement.
        """
        pending, self._pending = self._pending, None
        parts = self._world.together(pending.work.result)
        if pending.files is None:
            files = {name: entry for part in parts for name, entry in sorted(part.items())}
            state = {**pending.state, "files": files}
            publish = self._begin(pending.temporary, lambda: self._publish(pending.temporary, state) if self._world.leads else None)
            self._pending = replace(pending, work=publish, files=files)
            return
        seconds = time.perf_counter() - pending.begun
        size = sum(entry["bytes"] for entry in pending.files.values())
        self.tell(Written(pending.state["progress"]["step"], seconds if self._stall is None else self._stall, seconds, size))

    def finish(self) -> None:
        """Wait until what is being written is published; raises as `proceed` does."""
        while self._pending is not None:
            self.proceed()

    def close(self) -> None:
        """Wait for this rank's own work, published or not, as nothing may write here once the run folder's lease is given up.

        Not collective.
        """
        self._thread.shutdown()
        self._host.close()

    def newest(self) -> Saved | None:
        """The newest whole checkpoint; None where none was ever published.

        Raises CheckpointError where some were published and none is whole.
        """
        self._world.from_leader(self._finish_publications)
        faults = []
        for folder in self._world.from_leader(lambda: _folders(self.root)):
            state, fault = self._world.from_leader(lambda folder=folder: _read_state(folder))
            fault = fault or next((f for f in self._world.together(lambda f=folder, s=state: self._check_share(f, s)) if f), None)
            if fault is None:
                self.last_step = _step(folder)
                return Saved(folder, state)
            faults.append(fault)
            if self._world.leads:
                log.warning("passed over the checkpoint %s: %s", folder.name, fault)
        if faults:
            raise CheckpointError(
                f"no checkpoint in {self.root} is whole ({'; '.join(faults)}); restore one from a copy, or start afresh in another run_dir"
            )
        return None

    def restore(self, saved: Saved, engine, config: Config) -> None:
        """Load weights, masters, moments and RNG; through the universal form where the world size or the ZeRO stage has changed."""
        here = {"size": self._world.size, "sequence": self._world.sequence, "zero": config.parallel.zero}
        then = saved.state["config"]
        same_layout = all(saved.state["world"][k] == here[k] for k in ("size", "zero"))
        same_groups = then["optim"]["decay_all"] == config.optim.decay_all  # which parameters lie side by side
        if same_layout and same_groups and then["train"]["precision"] == config.train.precision:
            engine.load(saved.folder)
            _set_rng_state(torch.load(saved.folder / f"rng_{self._world.rank:05d}.pt", weights_only=False))
            return
        from pdn_train.engine import to_universal  # here, so that reading a checkpoint's state needs no DeepSpeed

        log.info("%s was written by %s; loading it as %s through the universal form", saved.folder.name, saved.state["world"], here)
        universal = saved.folder.with_name(saved.folder.name + ".universal")
        self._world.from_leader(lambda: to_universal(saved.folder, universal))
        progress = saved.progress
        self._world.together(lambda: engine.put_universal(universal, progress.step - progress.skipped_steps))
        engine.refresh_weights()
        self._world.from_leader(lambda: shutil.rmtree(universal))

    def require_space(self, parameters: int) -> None:
        """Raise CheckpointError where the disk cannot hold one more checkpoint: up to 16 bytes a parameter (weights, masters, moments)."""
        self._world.from_leader(lambda: _require_space(self.root, parameters * 16))

    def _begin(self, temporary: Path, act: Callable[[], T]) -> Future[T]:
        """Act on the thread; a fault of the disk becomes a WriteError."""

        def work() -> T:
            try:
                return act()
            except CheckpointError:
                raise
            except (OSError, RuntimeError) as error:  # torch.save has a RuntimeError of its own for a full disk, and names no file
                raise WriteError(
                    f"{temporary} could not be written, with {shutil.disk_usage(self.root).free / 1e9:.2f} GB free there: {error}; the "
                    "checkpoint before it is as it was: free some space, or mend the file system, and start the run again"
                ) from error

        return self._thread.submit(work)

    def _prepare(self, temporary: Path) -> None:
        for old in self.root.glob("step_*.tmp"):
            shutil.rmtree(old)
        temporary.mkdir(parents=True)

    def _publish(self, temporary: Path, state: dict) -> None:
        unseen = [name for name, entry in state["files"].items() if not _has_size(temporary / name, entry["bytes"])]
        if unseen:
            raise CheckpointError(
                f"rank 0 does not see in {temporary}, or not whole, what other ranks have written: {unseen}; "
                "checkpoints need a file system that shows every rank's files to all"
            )
        final = temporary.with_suffix("")
        text = json.dumps(state, indent=1).encode()
        write_whole(temporary / "state.json", text)
        if final.exists():  # the same step saved again, after a resume from an earlier one
            shutil.rmtree(final)
        marker = final.with_name(final.name + ".publishing")
        write_whole(marker, b"")
        temporary.rename(final)
        sync_folder(self.root)
        _complete(final, text)
        marker.unlink()
        self._prune(_step(final))

    def _finish_publications(self) -> None:
        for marker in self.root.glob("step_*.publishing"):
            folder = marker.with_suffix("")
            state, _ = _read_state(folder, published=False)
            if state is not None and all(_fault(folder, name, entry) is None for name, entry in state["files"].items()):
                _complete(folder, (folder / "state.json").read_bytes())
                log.info("finished the publication of %s", folder.name)
            elif folder.exists() and not (folder / "COMPLETE").exists():
                shutil.rmtree(folder)
            marker.unlink()
        for rest in [*self.root.glob("step_*.tmp"), *self.root.glob("step_*.universal")]:
            shutil.rmtree(rest)

    def _prune(self, newest: int) -> None:
        """Keep `keep` checkpoints and the milestones up to step `newest`; later ones were passed over as damaged and count for nothing."""
        kept = 0
        for folder in (f for f in _folders(self.root) if _step(f) <= newest):
            if kept and not (folder / "COMPLETE").exists():  # a removal that was cut short
                shutil.rmtree(folder)
                continue
            milestone = self._config.keep_every and _step(folder) % self._config.keep_every == 0
            if (folder / "COMPLETE").exists():
                kept += not milestone
                if milestone or kept <= self._config.keep:
                    continue
                (folder / "COMPLETE").unlink()  # a crash halfway through the removal must not leave one that claims to be whole
                shutil.rmtree(folder)

    def _check_share(self, folder: Path, state: dict | None) -> str | None:
        names = sorted(state["files"])[self._world.rank :: self._world.size] if state else []
        return next((fault for name in names if (fault := _fault(folder, name, state["files"][name]))), None)


def newest(root: Path) -> Path:
    """One process: the newest whole checkpoint below a run's checkpoints folder.

    Raises CheckpointError where there is none.
    """
    for folder in _folders(root):
        try:
            read_whole(folder)
        except CheckpointError as error:
            log.warning("passed over the checkpoint %s", error)
        else:
            return folder
    raise CheckpointError(f"{root} holds no whole checkpoint")


def read_whole(folder: Path) -> dict:
    """One process: the state.json of a checkpoint folder, after checking every file.

    Raises CheckpointError naming the folder and the fault where it is not whole.
    """
    state, fault = _read_state(folder)
    fault = fault or next((f for name, entry in state["files"].items() if (f := _fault(folder, name, entry))), None)
    if fault is not None:
        raise CheckpointError(f"{folder}: {fault}")
    return state


def require_same_run(saved: Saved, config: Config, data: dict) -> None:
    """Raise CheckpointError naming every key in which a checkpoint and the run that would resume from it disagree.

    Compared are the model (whatever computes it), the data and their order, the optimizer and its schedule, batch, seed and precision, less
    `resume.allow`; train.steps may always grow or shrink, with the schedule following the new number.
    """
    then, now = saved.state["config"], config.model_dump(mode="json")
    keys = [f"{section}.{key}" for section in ("model", "optim") for key in now[section] if f"{section}.{key}" != "model.kernel"]
    keys += ["data.seq_len", "data.seed", "data.reset_at_documents", "train.global_batch", "train.seed", "train.precision"]
    differing = [f"{key}: {_get(then, key)!r} then, {_get(now, key)!r} now" for key in keys if _get(then, key) != _get(now, key)]
    if saved.state["data"] != data:
        differing.append(f"data.path: {_data_difference(saved.state['data'], data)}")
    allowed = [key for key in config.resume.allow if key not in SHAPES]
    refused = [text for text in differing if text.partition(":")[0] not in allowed]
    if refused:
        raise CheckpointError(
            f"{saved.folder} is of another run: "
            + "; ".join(refused)
            + ". Use another run_dir, or name the keys in resume.allow if this is meant (those of the model's shape cannot be allowed)"
        )
    for text in differing:
        log.warning("resume.allow: %s", text)
    if then["train"]["steps"] != now["train"]["steps"]:
        log.info("train.steps goes from %s to %s: the schedule follows the new number", then["train"]["steps"], now["train"]["steps"])


def folder_name(step: int) -> str:
    return f"step_{step:010d}"


def _folders(root: Path) -> list[Path]:
    """Checkpoint folders, newest first by number."""
    found = [p for p in root.glob("step_*") if p.is_dir() and p.name[5:].isdigit()]
    return sorted(found, key=_step, reverse=True)


def _step(folder: Path) -> int:
    return int(folder.name[5:])


def _complete(folder: Path, state: bytes) -> None:
    write_whole(folder / "COMPLETE", (hashlib.sha256(state).hexdigest() + "\n").encode())


def _read_state(folder: Path, published: bool = True) -> tuple[dict | None, str | None]:
    """(state.json, None), or (None, what is wrong)."""
    try:
        text = (folder / "state.json").read_bytes()
        if published and (folder / "COMPLETE").read_text().strip() != hashlib.sha256(text).hexdigest():
            return None, "COMPLETE does not match state.json"
        state = json.loads(text)
        if state.get("version") != VERSION:
            return None, (
                f"state.json is of version {state.get('version')}, this code reads {VERSION}: go on with the code that wrote it, "
                "a copy of which is code/ in its run folder"
            )
        return state, None
    except FileNotFoundError as error:
        return None, f"{Path(error.filename).name} is missing"
    except (OSError, ValueError) as error:
        return None, f"state.json cannot be read ({error})"


def _write(files: list[tuple[Path, dict]]) -> dict:
    """Write files and flush them to disk; {file: {bytes, sha256}}."""
    entries = {}
    for file, state in files:
        torch.save(state, file)
        entries[file.name] = _checksum(file, flush=True)
    return entries


def _has_size(file: Path, size: int) -> bool:
    return file.exists() and file.stat().st_size == size


def _checksum(file: Path, flush: bool = False) -> dict:
    with file.open("rb") as handle:
        if flush:
            os.fsync(handle.fileno())
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(handle, "sha256").hexdigest()}


def _fault(folder: Path, name: str, entry: dict) -> str | None:
    file = folder / name
    if not file.exists():
        return f"{name} is missing"
    if file.stat().st_size != entry["bytes"]:
        return f"{name} has {file.stat().st_size} bytes instead of {entry['bytes']}"
    return None if _checksum(file) == entry else f"{name} has another checksum than when it was written"


def _require_space(root: Path, needed: int) -> None:
    free = shutil.disk_usage(root).free
    if free < needed:
        raise CheckpointError(
            f"{root} has {free / 1e9:.1f} GB free, one checkpoint takes about {needed / 1e9:.1f} GB; free some space, "
            "lower checkpoint.keep or move run_dir"
        )


def _require_memory(needed: int, table: Path = Path("/proc/meminfo")) -> None:
    """The kernel would kill the process, which says less."""
    available = next(int(line.split()[1]) << 10 for line in table.read_text().splitlines() if line.startswith("MemAvailable:"))
    if available < needed:
        raise CheckpointError(
            f"a copy of this rank's part of a checkpoint takes {needed / 1e9:.1f} GB of host memory, {available / 1e9:.1f} GB are "
            "available; with checkpoint.background=false none is taken, and training waits for every save"
        )


def _rng_state() -> dict:
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None}


def _set_rng_state(state: dict) -> None:
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _get(tree: dict, key: str) -> object:
    section, _, name = key.partition(".")
    return tree[section].get(name, "(not set)")


def _data_difference(then: dict, now: dict) -> str:
    differing = [f"{key} {then.get(key)!r} then, {now.get(key)!r} now" for key in sorted({*then, *now}) if then.get(key) != now.get(key)]
    return ", ".join(differing)
