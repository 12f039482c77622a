"""After the ranks of a job have ended: what happened, and whether the job starts again.

    python -m launch.requeue SUBMISSION EXIT_CODE JOB RESTARTS      called by the batch script; prints "again" or "enough"

The ranks' last words decide (pdn_train.heartbeat), the exit code only where they left none. A job goes on after a stop with a checkpoint,
and after a crash, which may be the machine's fault; not after an error that somebody must mend, not after a crash at the step of the crash
before, not past `launch.max_requeues`. Each ending is a line of run_dir/endings.jsonl; those of one submission count together.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from launch.snapshot import Submission
from pdn_train.config import LaunchConfig
from pdn_train.files import parse_line
from pdn_train.heartbeat import Word, at_step, attempt_name, first_fault, obituary, read_first, read_words
from pdn_train.rundir import RunDir
from pdn_train.signals import REQUEUE

AGAIN, ENOUGH = "again", "enough"
BY_SIGNAL = {128 + 12, 128 + 15}  # SIGUSR2 or SIGTERM met a rank before it could listen
How = Literal["done", "stopped", "crashed", "refused"]


@dataclass(frozen=True)
class Ending:
    """How one start of a job ended. refused: by an error that starting again would meet again."""

    submission: str  # its folder's name
    job: str  # SLURM's number, the same after a requeue; on this machine each start has its own
    restart: int  # 0: the submission's first start
    code: int
    how: How
    step: int  # finished steps; -1: none known
    error: str | None
    time: float


def ending(folder: Path, submission: str, job: str, restart: int, code: int) -> Ending:
    """From the words in an attempt's folder, which need not exist, and the highest exit code of the ranks."""
    words, step = read_words(folder), -1
    if words:
        step = max(word.step for word in words)
    how = _how(words, read_first(folder), code)
    fault = first_fault(folder, words) if how in ("crashed", "refused") else None
    return Ending(submission, job, restart, code, how, step, None if fault is None else fault.error, time.time())


def _how(words: list[Word], first: Word | None, code: int) -> How:
    states = {word.state for word in words}
    if any(word.final for word in words):
        return "refused"
    if first is not None or "failed" in states:
        return "crashed"
    if code == 0 or states == {"done"}:
        return "done"
    if states == {"stopped"} or code in (REQUEUE, *BY_SIGNAL):
        return "stopped"
    return "crashed"


def decide(before: list[Ending], now: Ending, launch: LaunchConfig) -> tuple[bool, str]:
    """(whether to start again, why). before: the earlier endings of the same submission, oldest first."""
    if now.how == "done":
        return False, "done"
    if now.how == "refused":
        return False, "somebody has to mend this; starting again would meet it again"
    if not launch.requeue:
        return False, "launch.requeue=false"
    if now.restart >= launch.max_requeues:
        return False, f"launch.max_requeues={launch.max_requeues} are used up"
    if now.how == "stopped":
        idle = bool(before) and before[-1].how == "stopped" and before[-1].step == now.step
        return True, "stopped with a checkpoint" + (", but without a step since it started: is launch.minutes too short?" if idle else "")
    if before and before[-1].how == "crashed" and before[-1].step == now.step:
        return False, f"it crashed twice {at_step(now.step)}"
    return True, "a crash, and not where the last one was: one more start"


def settle(
    submission: Submission, launch: LaunchConfig, folder: Path, job: str, restart: int, code: int, told: str | None = None
) -> tuple[bool, Ending]:
    """Decide, write the ending down, print the first fault and every rank's last step. The run folder may be gone by now.

    launch: the submission's; folder: of the attempt; told: the signal by which a user stopped the job.
    """
    run_dir, name = submission.run_dir, submission.folder.name
    now = ending(folder, name, job, restart, code)
    again, why = decide([e for e in read_endings(run_dir) if e.submission == name], now, launch)
    if again and told is not None:
        again, why = False, f"{told}; the same command goes on from there"
    try:
        with run_dir.endings.open("a") as file:
            file.write(json.dumps({**asdict(now), "again": again, "why": why}) + "\n")
    except OSError as error:  # a run folder that is gone or full: nothing could go on there
        again, why = False, f"{run_dir.endings} cannot be written ({error.strerror})"
    if now.how in ("crashed", "refused"):
        print(
            obituary(folder) or f"the ranks ended with {code} before they said a word; see the logs in {run_dir.submissions}",
            file=sys.stderr,
        )
    print(f"{now.how} {at_step(now.step)}; {'starting again' if again else 'not started again'}: {why}", file=sys.stderr)
    return again, now


def read_endings(run_dir: RunDir) -> list[Ending]:
    if not run_dir.endings.exists():
        return []
    found = []
    for line in run_dir.endings.read_text(errors="replace").splitlines():
        entry = parse_line(line)
        if entry is not None and Ending.__dataclass_fields__.keys() <= entry.keys():
            found.append(Ending(**{key: entry[key] for key in Ending.__dataclass_fields__}))
    return found


def main(folder: str, code: str, job: str, restart: str) -> None:
    submission = Submission(Path(folder))
    attempt = submission.run_dir.heartbeats / attempt_name(job, restart)
    again, _ = settle(submission, submission.config.launch, attempt, job, int(restart), int(code))
    print(AGAIN if again else ENOUGH)


if __name__ == "__main__":
    main(*sys.argv[1:])
