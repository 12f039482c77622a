"""Files that appear whole: written aside, flushed to disk, renamed. And lines of those that grow, of which the last may not be whole."""

from __future__ import annotations

import json
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
