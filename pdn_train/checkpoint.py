"""What a whole checkpoint is, and how one process finds and reads it.

    checkpoints/step_0000001000/   DeepSpeed's ZeRO files, rng_00000.pt a rank, state.json, COMPLETE

state.json says what was saved and lists the other files with their bytes and SHA-256; COMPLETE holds the SHA-256 of state.json and is
written last. A checkpoint is whole where all of that agrees, with the folder's number too, and counts for nothing otherwise.
`pdn_train.saving` writes one, `pdn_train.publication` makes it appear, `pdn_train.resume` goes on from it. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

VERSION = 3  # 1: before Mixer.in_proj; q, k, v and the gates had a matrix each. 2: before `optim.build_optimizer` ordered the weights
STATE, COMPLETE = "state.json", "COMPLETE"
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


class Shape(BaseModel):
    """A part of state.json of which readers may be sure; what else is in it is not looked at."""

    model_config = ConfigDict(strict=True)


class Entry(Shape):
    """Of one file."""

    bytes: int
    sha256: str


class Ranks(Shape):
    """Who wrote the ZeRO files, as far as every version of this program says it."""

    size: int
    zero: int


class Sections(Shape):
    """Of the run's configuration, those that readers look into."""

    model: dict
    data: dict
    optim: dict
    train: dict


class Known(Shape):
    """`Progress`, of which the skipped steps came later."""

    model_config = ConfigDict(extra="forbid")

    step: int
    position: int
    tokens: int
    skipped_steps: int = 0
    skipped_in_row: int = 0


class Fingerprint(Shape):
    """Of the samples; those of `pdn_train.mqar` are compared key by key."""

    mqar: dict = {}


class State(Shape):
    """Of all of it."""

    progress: Known
    world: Ranks
    config: Sections
    data: Fingerprint
    files: dict[str, Entry]


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was found whole: its folder and state.json."""

    folder: Path
    state: dict

    @property
    def progress(self) -> Progress:
        return Progress(**self.state["progress"])


def newest(root: Path) -> Path:
    """The newest whole checkpoint below a run's checkpoints folder.

    Raises CheckpointError where there is none.
    """
    for folder in folders(root):
        try:
            read_whole(folder)
        except CheckpointError as error:
            log.warning("passed over the checkpoint %s", error)
        else:
            return folder
    raise CheckpointError(f"{root} holds no whole checkpoint")


def read_whole(folder: Path) -> dict:
    """The state.json of a checkpoint folder, after reading every file.

    Raises CheckpointError naming the folder and the fault where it is not whole.
    """
    state, fault = read_state(folder)
    fault = fault or damage(folder, state["files"])
    if fault is not None:
        raise CheckpointError(f"{folder}: {fault}")
    return state


def folder_name(step: int) -> str:
    return f"step_{step:010d}"


def step_of(folder: Path) -> int:
    return int(folder.name[5:])


def folders(root: Path) -> list[Path]:
    """Checkpoint folders, whole or not, newest first by number."""
    found = [p for p in root.glob("step_*") if p.is_dir() and p.name[5:].isdecimal()]
    return sorted(found, key=step_of, reverse=True)


def read_state(folder: Path, published: bool = True) -> tuple[dict | None, str | None]:
    """(state.json, None), or (None, what is wrong). published: COMPLETE must vouch for it."""
    try:
        text = (folder / STATE).read_bytes()
        if published and (folder / COMPLETE).read_text().strip() != hashlib.sha256(text).hexdigest():
            return None, f"{COMPLETE} does not match {STATE}"
        state = json.loads(text)
        if not isinstance(state, dict):
            return None, f"{STATE} cannot be read (it holds no object)"
        if state.get("version") != VERSION:
            return None, (
                f"{STATE} is of version {state.get('version')}, this code reads {VERSION}: go on with the code that wrote it, "
                "a copy of which is code/ in its run folder"
            )
        State.model_validate_json(text)
        if _is_misnamed(folder, state):
            return None, f"{STATE} is of step {state['progress']['step']}: a copy under another step's name"
        return state, None
    except FileNotFoundError as error:
        return None, f"{Path(error.filename).name} is missing"
    except ValidationError as error:
        first = error.errors()[0]
        return None, f"{STATE} cannot be read ({'.'.join(map(str, first['loc']))}: {first['msg']})"
    except (OSError, ValueError) as error:
        return None, f"{STATE} cannot be read ({error})"


def is_marked(folder: Path) -> bool:
    """Whether it passes for a checkpoint at a glance, by its mark, and is no copy under another step's name; its files are not read."""
    return (folder / COMPLETE).exists() and not is_misnamed(folder)


def is_misnamed(folder: Path) -> bool:
    """Whether it is a copy under another step's name; of a damaged state.json that is not known, which is told where it is loaded."""
    try:
        return _is_misnamed(folder, json.loads((folder / STATE).read_bytes()))
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _is_misnamed(folder: Path, state: dict) -> bool:
    """Whether the folder's number, where it has one, is another than its state's step."""
    return folder.name.startswith("step_") and folder.name[5:].isdecimal() and step_of(folder) != state["progress"]["step"]


def damage(folder: Path, files: dict[str, dict]) -> str | None:
    """What is wrong with the first of these entries of state.json's `files` that is not as it was written; None where all are."""
    return next((fault for name, entry in files.items() if (fault := _fault(folder / name, entry)) is not None), None)


def entry_of(file: Path) -> dict:
    """What state.json's `files` says of a file: {bytes, sha256}."""
    with file.open("rb") as handle:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(handle, "sha256").hexdigest()}


def _fault(file: Path, entry: dict) -> str | None:
    try:
        size = file.stat().st_size  # it may spare the reading of gigabytes
        if size != entry["bytes"]:
            return f"{file.name} has {size} bytes instead of {entry['bytes']}"
        return None if entry_of(file) == entry else f"{file.name} has another checksum than when it was written"
    except FileNotFoundError:
        return f"{file.name} is missing"
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror})"
