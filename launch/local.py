"""A job on this machine: submitit's local executor, followed to its end, started again by the same rules as under SLURM.

SIGTERM, Ctrl-C and the end of the terminal reach the ranks, which write one checkpoint; the launcher then returns 75 and does not start
again. Nor does it where a signal reached submitit's controller or a rank alone, but for SIGUSR2, the warning before the time limit.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import submitit

from launch.job import Job
from launch.requeue import settle
from launch.snapshot import Submission
from pdn_train.heartbeat import attempt_name, read_first, read_words
from pdn_train.signals import REQUEUE, StopRequest

POLL_SECONDS = 0.2
LEAVING_SECONDS = 30.0  # that ranks have after the first fault; srun has its own way of ending them
COMING_SECONDS = 30.0  # that ranks have to listen, before a signal reaches them all the same
SHOWN_LINES = 20


def run(submission: Submission, executor: Callable[[], submitit.LocalExecutor], stop: StopRequest) -> int:
    """Start the job until it is done, stopped from outside or given up; returns 0, 75 or 1."""
    run_dir, launch = submission.run_dir, submission.config.launch
    restart = 0
    while True:
        if stop.name is not None:
            print(f"{run_dir.path}: not started: {stop.name}", file=sys.stderr)
            return REQUEUE
        job = start(executor(), submission)
        print(f"job {job.job_id}   run_dir {run_dir.path}   logs {job.paths.stdout.parent}", flush=True)
        print(f"    python -m launch.status {shlex.quote(str(run_dir.path))}")
        print("    Ctrl-C        stops it with a checkpoint", flush=True)
        attempt = run_dir.heartbeats / attempt_name(job.job_id, 0)
        follow(job, attempt, stop)
        spoken = bool(read_words(attempt))
        code = exit_code(job) if spoken or stop.name is None else 128 + signal.SIGTERM
        again, ending = settle(submission, launch, attempt, job.job_id, restart, code, stop.name or told(attempt))
        if ending.how == "crashed" and not spoken and job.paths.stderr.exists():
            print("\n".join(job.paths.stderr.read_text(errors="replace").splitlines()[-SHOWN_LINES:]), file=sys.stderr)
        if not again or stop.name is not None:
            return {"done": 0, "stopped": REQUEUE}.get(ending.how, 1)
        restart += 1


def start(executor: submitit.LocalExecutor, submission: Submission) -> submitit.LocalJob:
    """submitit's controller survives neither a Ctrl-C nor the terminal's end, which reach it too; what is ignored here is ignored there."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        return executor.submit(Job(str(submission.folder)))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def follow(job: submitit.LocalJob, attempt: Path, stop: StopRequest) -> None:
    """Show rank 0's output until all ranks have ended; pass a signal on, once; end what does not end after a fault.

    A signal waits for ranks that do not listen yet: it would kill some, and the others would wait for those.
    """
    shown, passed_on, deadline, patience = 0, False, None, time.monotonic() + COMING_SECONDS
    while True:
        ended = job.done()
        shown += show(job.paths.stdout, shown)
        if ended:
            end_ranks(attempt)  # where submitit's controller was killed, they are still there
            return
        if stop.name is not None and not passed_on and (len(read_words(attempt)) == job.num_tasks or time.monotonic() > patience):
            passed_on = True
            job._process.send_signal(signal.SIGTERM)  # submitit's controller passes it on to the tasks
        if deadline is None and read_first(attempt) is not None:
            deadline = time.monotonic() + LEAVING_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            end_ranks(attempt)  # a stopped process, for instance
        time.sleep(POLL_SECONDS)


def told(attempt: Path) -> str | None:
    """The signal by which somebody has stopped the ranks, past this process; None for the time limit's."""
    return next((word.told for word in read_words(attempt) if word.told not in (None, "SIGUSR2")), None)


def end_ranks(attempt: Path) -> None:
    for word in read_words(attempt):
        if word.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(word.pid, signal.SIGKILL)


def show(file: Path, position: int) -> int:
    """Copy what was added to a log since `position`; returns how many bytes."""
    if not file.exists():
        return 0
    with file.open("rb") as handle:
        handle.seek(position)
        added = handle.read()
    with contextlib.suppress(OSError):  # a pipe whose reader is gone: the ranks still need somebody to follow them
        sys.stdout.write(added.decode(errors="replace"))
        sys.stdout.flush()
    return len(added)


def exit_code(job: submitit.LocalJob) -> int:
    """0 where every task left submitit's result and none an error, else 1: the tasks' own codes stay with submitit's controller."""
    results = [job.task(rank).paths.result_pickle for rank in range(job.num_tasks)]
    if not all(file.exists() for file in results):
        return 1
    return 0 if job.exception() is None else 1
