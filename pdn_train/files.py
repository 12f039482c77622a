"""Files that appear whole: written aside, flushed to disk, renamed. And those that grow, of which the last piece may not be whole."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import uuid
from pathlib import Path


def parse_line(line: str) -> dict | None:
    """The object in one line of a .jsonl file; None where a kill or a full disk cut it short, or it is still being written."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def to_json(tree: object, indent: int | None = None) -> str:
    """Strict JSON, which has no NaN and no infinity: a number that is not finite becomes null."""
    return json.dumps(_finite(tree), indent=indent, allow_nan=False)


def _finite(tree: object) -> object:
    if isinstance(tree, dict):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


class Growing:
    """A file that one process lengthens piece by piece; of a piece that could not be written whole, no part stays before the next."""

    def __init__(self, path: Path):
        self._path = path
        self._size: int | None = None  # of the whole pieces; None: as large as it is

    def append(self, piece: bytes) -> None:
        """Raises OSError, with the path, where the disk is full."""
        with self._path.open("ab", buffering=0) as file:
            found = file.tell()
            self._size = found if self._size is None else min(self._size, found)
            if found > self._size:  # where the disk said so late, or would not cut
                file.truncate(self._size)
            if file.write(piece) != len(piece):
                with contextlib.suppress(OSError):
                    file.truncate(self._size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._size += len(piece)


def write_whole(path: str | Path, data: bytes) -> None:
    """Put `data` at `path`: a reader, or a run after a crash, finds the old file or the new one, never a part."""
    path = Path(path)
    aside = path.with_name(path.name + ".partial")
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)


def prove_writable(folder: Path) -> None:
    """Make the folder where it is missing; write a file there, rename it, remove it. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".probe-{uuid.uuid4().hex}"
    probe.write_text("")
    probe.rename(probe.with_suffix(".renamed")).unlink()


def sync_contents(folder: Path) -> None:
    """Flush a folder's files and its entries."""
    for path in [*folder.iterdir(), folder]:
        sync(path)


def sync(path: Path) -> None:
    """Flush a file, or a folder's own entries: only then is a rename in it on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
