"""How a checkpoint appears and disappears: by the acts of one process, rank 0, any of which may be the last before a crash.

step_N.tmp          being written; a later start sweeps it away
step_N.publishing   a mark beside the folder from before the rename to step_N until COMPLETE is there; the next start finishes the
                    publication if every checksum holds
step_N.universal    the same checkpoint in DeepSpeed's universal form, while it is loaded (`pdn_train.resume`)
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path

from pdn_train.checkpoint import COMPLETE, STATE, CheckpointError, damage, folder_name, folders, is_misnamed, read_state, step_of
from pdn_train.config import CheckpointConfig
from pdn_train.files import sync, write_whole

log = logging.getLogger(__name__)


def begin_folder(root: Path, step: int) -> Path:
    """The empty folder, step_N.tmp, in which the ranks write the checkpoint of `step`."""
    for old in root.glob("step_*.tmp"):
        _sweep(old)
    temporary = root / (folder_name(step) + ".tmp")
    temporary.mkdir(parents=True)
    return temporary


def publish(temporary: Path, state: dict, config: CheckpointConfig) -> None:
    """Turn step_N.tmp, written by all ranks, into step_N, in place of an older one of that step, and remove what need not be kept.

    state: of state.json, `files` included. Raises CheckpointError where a file of another rank does not show here, OSError otherwise.
    """
    unseen = [name for name, entry in state["files"].items() if not _has_size(temporary / name, entry["bytes"])]
    if unseen:
        raise CheckpointError(
            f"rank 0 does not see in {temporary}, or not whole, what other ranks have written: {unseen}; "
            "checkpoints need a file system that shows every rank's files to all"
        )
    final = temporary.with_suffix("")
    text = json.dumps(state, indent=1).encode()
    write_whole(temporary / STATE, text)
    if os.path.lexists(final):  # the same step saved again, after a resume from an earlier one
        _sweep(final)
    marker = final.with_name(final.name + ".publishing")
    write_whole(marker, b"")
    temporary.rename(final)
    sync(final.parent)
    complete(final, text)
    marker.unlink()
    try:
        prune(final, config)
    except OSError as error:
        raise CheckpointError(
            f"{final} is whole, but what checkpoint.keep={config.keep} gives up could not be removed: {error}; remove it, or mend the file "
            "system, and start the run again"
        ) from error


def complete(folder: Path, state: bytes) -> None:
    """From here on the folder is a checkpoint. state: the bytes of its state.json."""
    write_whole(folder / COMPLETE, (hashlib.sha256(state).hexdigest() + "\n").encode())


def prune(newest: Path, config: CheckpointConfig) -> None:
    """Keep `keep` checkpoints and the milestones up to the folder `newest`; later ones were passed over as damaged and do not count.

    A copy under another step's name is somebody's own: it does not count and stays. Of a link the link is removed.
    """
    kept = 0
    for folder in (f for f in folders(newest.parent) if step_of(f) <= step_of(newest) and not is_misnamed(f)):
        if not (folder / COMPLETE).exists():
            if kept:  # a removal that was cut short
                _sweep(folder)
            continue
        milestone = config.keep_every and step_of(folder) % config.keep_every == 0
        kept += not milestone
        if not milestone and kept > config.keep:
            if not folder.is_symlink():
                (folder / COMPLETE).unlink()  # a crash halfway through the removal must not leave one that claims to be whole
            _sweep(folder)


def finish_publications(root: Path) -> None:
    """Finish what a crash interrupted where it can be, and sweep the rest away. Before a run resumes."""
    for marker in root.glob("step_*.publishing"):
        folder = marker.with_suffix("")
        if not folder.is_symlink():  # one was put there since; nothing is written behind it
            _finish(folder)
        _sweep(marker)
    for rest in [*root.glob("step_*.tmp"), *root.glob("step_*.universal")]:
        _sweep(rest)


def _finish(folder: Path) -> None:
    state, _ = read_state(folder, published=False)
    if state is not None and damage(folder, state["files"]) is None:
        complete(folder, (folder / STATE).read_bytes())
        log.info("finished the publication of %s", folder.name)
    elif folder.exists() and not (folder / COMPLETE).exists():
        _sweep(folder)


def _sweep(path: Path) -> None:
    """Remove a folder, or a file or link that took a folder's name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _has_size(file: Path, size: int) -> bool:
    return file.exists() and file.stat().st_size == size
