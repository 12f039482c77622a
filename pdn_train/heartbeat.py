"""The last word of each rank, in a file of its own, and what the files of one start of a job say together.

    run_dir/heartbeats/ATTEMPT/rank_00000.json    host, process, step, what it does, state; rewritten every few seconds
    run_dir/heartbeats/ATTEMPT/first.json         the rank that went wrong first, and how; written once, by whoever learns of it first

A rank that fails writes first.json before its connections close, so the errors that others then meet come later whatever the clocks say.
Written by pdn_train.watchdog. Standard library only: launchers on machines without torch read these files.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import uuid
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from pdn_train.lease import machine, process_start

KEPT_ATTEMPTS = 5
State = Literal["running", "done", "stopped", "failed"]


@dataclass(frozen=True)
class Word:
    """What a rank said last. final: starting again would meet the same fault; somebody has to mend something."""

    rank: int
    host: str = field(default_factory=socket.gethostname)
    machine: str = field(default_factory=machine)
    pid: int = field(default_factory=os.getpid)
    started: str | None = None  # of the process, as the kernel counts; tells it from a later one with the same number
    state: State = "running"
    step: int = -1  # finished steps; -1: not known yet
    doing: str = "starting"
    beats: int = 0
    time: float = 0.0
    error: str | None = None
    trace: str = ""
    final: bool = False
    told: str | None = None  # the signal that told this rank to stop, of one that stopped

    def write(self, folder: Path) -> None:
        """Whole or not at all, but for a full disk: there a shorter word goes into the blocks of the one before."""
        file = word_file(folder, self.rank)
        aside = file.with_name(f".{file.name}.{self.pid}")
        try:
            aside.write_text(json.dumps(asdict(self)))
            aside.replace(file)  # not flushed to disk: it need not survive the machine
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            aside.unlink(missing_ok=True)
            short = replace(self, error=self.error and self.error[:500], trace=self.trace[-2000:])
            with file.open("r+") as handle:
                handle.write(json.dumps(asdict(short)))
                handle.truncate()

    @property
    def here(self) -> bool:
        """Whether its process can be looked up from this one."""
        return self.machine == machine()

    @property
    def alive(self) -> bool:
        """Its process still exists. False where that cannot be looked up."""
        return self.here and self.started is not None and process_start(self.pid) == self.started

    @property
    def gone(self) -> bool:
        """It ended without saying so. False where that cannot be looked up."""
        return self.state == "running" and self.here and not self.alive

    @property
    def place(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"

    @property
    def at(self) -> str:
        return at_step(self.step)


def at_step(step: int) -> str:
    """step: finished steps, -1 where they are not known yet."""
    return f"at step {step}" if step >= 0 else "before the first step"


def word_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.json"


def read_word(folder: Path, rank: int) -> Word | None:
    """None where it has not said anything yet, or cannot be read."""
    return _read(word_file(folder, rank))


def read_words(folder: Path) -> list[Word]:
    """In rank order."""
    return [word for file in sorted(folder.glob("rank_*.json")) if (word := _read(file)) is not None]


def read_first(folder: Path) -> Word | None:
    return _read(folder / "first.json")


def claim_first(folder: Path, word: Word) -> Word:
    """Say that `word` is the first fault of this attempt; returns the one that is."""
    aside = folder / f".first-{uuid.uuid4().hex}"
    aside.write_text(json.dumps(asdict(word)))
    try:
        os.link(aside, folder / "first.json")  # fails where it exists
    except FileExistsError:
        pass
    finally:
        aside.unlink()
    return read_first(folder) or word


def newest_attempt(heartbeats: Path, owner: dict | None = None) -> Path | None:
    """The folder of the newest start. owner: of the run folder's lease; then the start that holds it, not one that was refused since.

    Nor one that was refused after all had ended, unless there is no other.
    """
    attempts = sorted(_attempts(heartbeats), key=lambda p: p.stat().st_ctime_ns, reverse=True)
    if owner:
        for attempt in attempts:
            if any(all(owner.get(key) == getattr(word, key) for key in ("machine", "pid", "started")) for word in read_words(attempt)):
                return attempt
    return next((attempt for attempt in attempts if refusal(attempt) is None), next(iter(attempts), None))


def newest_refusal(heartbeats: Path) -> str | None:
    """Why the newest start of all was refused; None where it was not."""
    newest = max(_attempts(heartbeats), key=lambda p: p.stat().st_ctime_ns, default=None)
    return None if newest is None else refusal(newest)


def refusal(attempt: Path) -> str | None:
    """The error that refused a start before its first step, which another start would meet again; None for every other start."""
    words = read_words(attempt)
    first = first_fault(attempt, words)
    refused = first is not None and first.final and all(word.step < 0 and word.state != "running" for word in words)
    return first.error if refused else None


def attempt_name(job: str, restart: int | str) -> str:
    """Names one start of a job."""
    return f"{job}.{restart}"


def begin_attempt(heartbeats: Path, name: str) -> Path:
    """Make the folder of one start; every rank may call it. The oldest ones are removed."""
    folder = heartbeats / name
    folder.mkdir(parents=True, exist_ok=True)
    for old in sorted(_attempts(heartbeats), key=lambda p: p.stat().st_ctime_ns, reverse=True)[KEPT_ATTEMPTS:]:
        shutil.rmtree(old, ignore_errors=True)  # another rank may be removing it too
    return folder


def missing(words: list[Word]) -> list[Word]:
    """Those that ended without a word, once the job is over."""
    return [word for word in words if word.state == "running"]


def first_fault(folder: Path, words: list[Word]) -> Word | None:
    """The word of the rank that went wrong first, once the job is over: first.json where it could be written."""
    failed = sorted((word for word in words if word.state == "failed"), key=lambda word: word.time)
    gone = [replace(word, error="ended without a word: killed from outside, or its node was lost") for word in missing(words)]
    return read_first(folder) or next(iter([*gone, *failed]), None)


def obituary(folder: Path) -> str:
    """Who failed first and how, then the last step of every rank: for the log of a job that is over. "" where nobody failed."""
    words = read_words(folder)
    first = first_fault(folder, words)
    if first is None:
        return ""
    lines = [f"First to fail: {first.place} {first.at}, while {first.doing}: {first.error}"]
    lines += [first.trace.rstrip()] if first.trace and not first.final else []  # what a user can mend needs no place in the code
    lines.append("Last words:")
    for word in words:
        state = "no last word" if word.state == "running" else word.state
        lines.append(f"  {word.place}: {state}, {word.at}, {word.doing}" + (f": {_one_line(word.error)}" if word.error else ""))
        if word.rank != first.rank and word.trace:
            lines.append("    " + innermost(word.trace))
    return "\n".join(lines)


def innermost(trace: str) -> str:
    """The innermost frame of a formatted stack or traceback, in one line."""
    at = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    return at[-1] if at else ""


def _attempts(heartbeats: Path) -> list[Path]:
    return [p for p in heartbeats.iterdir() if p.is_dir()] if heartbeats.is_dir() else []


def _one_line(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= 200 else line[:200] + "..."


def _read(file: Path) -> Word | None:
    try:
        return Word(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None
