"""Checkpoints that are whole or absent.

    checkpoints/step_0000001000/   DeepSpeed's ZeRO files, rng_00000.pt a rank, state.json, COMPLETE

A save is written into step_N.tmp, every file is flushed and checksummed, state.json lists them, the folder is renamed, and COMPLETE (the
checksum of state.json) comes last. A crash between the rename and COMPLETE leaves step_N.publishing beside the folder, and the next start
finishes the publication if every checksum holds. On resume rank 0 walks from the newest step down and the ranks check the files between
them; a damaged checkpoint is passed over with a warning that names the fault. On another world size or ZeRO stage the ZeRO files are first
turned into DeepSpeed's universal form, whole or not at all, in step_N.universal.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from pdn_train.config import CheckpointConfig, Config
from pdn_train.files import sync_folder, write_whole
from pdn_train.world import World

VERSION = 2  # 1: before Mixer.in_proj; q, k, v and the gates had a matrix each
SHAPES = tuple(
    f"model.{key}" for key in ("recurrence", "hidden_size", "num_layers", "num_heads", "head_dim", "intermediate_size", "vocab_size")
)
log = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used, or does not fit the run; the message says what differs and the way out."""


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


class Checkpoints:
    """The checkpoints of one run folder. Methods are collective unless said otherwise."""

    def __init__(self, root: Path, config: CheckpointConfig, world: World):
        self.root, self._config, self._world = root, config, world
        self.last_step: int | None = None  # of the newest whole checkpoint, found or written

    def save(self, engine, progress: Progress, config: Config, data: dict) -> Path:
        """Write, check and publish one checkpoint; returns its folder. engine: pdn_train.engine.Engine; data: the samples' fingerprint."""
        final = self.root / folder_name(progress.step)
        temporary = final.with_name(final.name + ".tmp")
        self._world.from_leader(lambda: self._prepare(temporary))
        engine.save(temporary)
        torch.save(_rng_state(), temporary / f"rng_{self._world.rank:05d}.pt")
        self._world.barrier()
        files = self._checksums(temporary)
        self._require_all(files, config.parallel.zero)
        state = {
            "version": VERSION,
            "progress": asdict(progress),
            "world": {"size": self._world.size, "sequence": self._world.sequence, "zero": config.parallel.zero},
            "config": config.model_dump(mode="json"),
            "data": data,
            "files": files,
        }
        self._world.from_leader(lambda: self._publish(temporary, final, state))
        self.last_step = progress.step
        return final

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

    def _prepare(self, temporary: Path) -> None:
        for old in self.root.glob("step_*.tmp"):
            shutil.rmtree(old)
        temporary.mkdir(parents=True)

    def _checksums(self, folder: Path) -> dict:
        """{file: {bytes, sha256}} of all files, each rank reading its share, flushed to disk."""
        files = self._world.from_leader(lambda: sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()))
        mine = self._world.together(
            lambda: {name: _checksum(folder / name, flush=True) for name in files[self._world.rank :: self._world.size]}
        )
        return {name: entry for share in mine for name, entry in sorted(share.items())}

    def _require_all(self, files: dict, stage: int) -> None:
        """A file system shared by nodes may show rank 0 an old listing; what it does not list would go unchecked for ever."""
        states = sum(name.endswith("_optim_states.pt") for name in files)
        missing = [name for r in range(self._world.size) if (name := f"rng_{r:05d}.pt") not in files]
        if missing or (stage and states != self._world.size):
            raise CheckpointError(
                f"{self.root} shows rank 0 {states} ZeRO files of {self._world.size} ranks, and these are missing: {missing}; "
                "checkpoints need a file system that shows every rank's files to all"
            )

    def _publish(self, temporary: Path, final: Path, state: dict) -> None:
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
