"""How runs are doing: `python -m launch.status RUN_DIR...`. One run in full, several as a table.

Reads the run's own files, and asks `squeue` about SLURM jobs. Where several jobs have met one folder, the one that owns it counts. Needs
neither torch nor a GPU.

`step` is where the ranks are, or where they ended; loss and speed are of the last line in metrics.jsonl, which comes every log.every steps,
and so a run that was stopped in between stands at a later step, the one of its checkpoint.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from launch.requeue import read_endings
from launch.snapshot import Submission, submissions
from pdn_train.checkpoint import folders, is_marked, step_of
from pdn_train.config import ConfigError, load
from pdn_train.files import parse_line
from pdn_train.heartbeat import Word, at_step, newest_attempt, newest_refusal, obituary, read_words, refusal
from pdn_train.lease import owner
from pdn_train.rundir import RunDir
from pdn_train.telling import quietly

SHOWN_RUNS = 8
SILENT_SECONDS = 60  # a watchdog writes at least every 5 s


@dataclass(frozen=True)
class Status:
    """One run. Values that are not known are None."""

    run: Path
    job: str | None
    state: str
    step: int | None  # finished
    steps: int | None
    logged: int | None  # the step of tokens_per_second and loss
    tokens_per_second: float | None
    eta_seconds: float | None  # of a run that is training now
    loss: float | None
    checkpoint: str | None  # newest whole one
    restarts: int
    heard_seconds: float | None  # since the last word of any rank
    refused: str | None  # why a later start was, which changed nothing


def status(path: Path) -> Status:
    """Raises ConfigError where the folder is no run's."""
    run_dir = RunDir(path)
    if not run_dir.config.exists():
        if not path.is_dir():
            raise ConfigError(f"{path} is not a folder: name that of a run, its run_dir")
        raise ConfigError(f"{path} is not a run folder: it has no config.yaml" + (_sweep_here(path) or _runs_here(path)))
    steps = load(run_dir.config).train.steps
    attempt = newest_attempt(run_dir.heartbeats, owner(run_dir))
    words = read_words(attempt) if attempt is not None else []
    last, checkpoint = _last_line(run_dir.metrics), _newest_checkpoint(run_dir.checkpoints)
    step = _finished(words, last.get("step"), checkpoint)
    heard = time.time() - max(word.time for word in words) if words else None
    job, now, restarts = job_of(submissions(run_dir), attempt, state(words, heard))
    return Status(
        run=path,
        job=job,
        state=now,
        step=step,
        steps=steps,
        logged=last.get("step"),
        tokens_per_second=last.get("tokens_per_second"),
        eta_seconds=max(0, steps - step) * last["step_seconds"] if last and now == "running" else None,
        loss=last.get("loss"),
        checkpoint=None if checkpoint is None else checkpoint.name,
        restarts=restarts,
        heard_seconds=heard,
        refused=newest_refusal(run_dir.heartbeats) if attempt is not None and refusal(attempt) is None else None,
    )


def _sweep_here(path: Path) -> str:
    """What to ask instead where the folder is that of `pdn_train.sweep`: its runs are FOLDER/SETTING/VARIANT/CHOICE/seed_N."""
    one = next(path.glob("*/*/*/seed_*/config.yaml"), None)
    if one is None and not (path / "summary.json").exists():
        return ""
    runs = "" if one is None else f", or for one of its runs {one.parent}"
    return f"; it is a sweep's, for `python -m pdn_train.sweep SWEEP.yaml --folder {path} --summary`{runs}"


def _runs_here(path: Path) -> str:
    """Which folders to ask about instead: those inside that are runs, or sweeps of runs."""
    runs = sorted(file.parent for file in path.glob("*/config.yaml"))
    sweeps = sorted(folder for folder in path.iterdir() if os.access(folder, os.X_OK) and folder.is_dir() and _sweep_here(folder))
    if not runs and not sweeps:
        return "; name a folder that is some configuration's run_dir"
    shown = ", ".join(map(str, (runs or sweeps)[:SHOWN_RUNS])) + (", ..." if len(runs or sweeps) > SHOWN_RUNS else "")
    return f"; inside it {'are runs' if runs else 'are sweeps'}: {shown}"


def job_of(made: list[Submission], attempt: Path | None, said: str) -> tuple[str | None, str, int]:
    """(job, state, restarts): of the job that made the attempt, or of the newest submission where that one waits or has not spoken yet.

    said: the state by the attempt's words; SLURM's own counts before its ranks have spoken. job is None where torchrun made the attempt.
    """
    name, _, restart = attempt.name.rpartition(".") if attempt is not None else ("", "", "")
    ours = next((one for one in made if name in one.jobs), None)
    queue = in_queue(ours, name) if ours is not None else None
    if queue is None and said != "running" and made and made[-1] != ours and made[-1].jobs:
        newest = made[-1].jobs[-1]
        waits = in_queue(made[-1], newest)
        if waits is not None or attempt is None:
            return newest, said if waits is None else waits.lower(), 0
    if ours is None:
        return None, said, 0
    restarts = max(int(restart), ours.jobs.index(name))  # SLURM keeps a job's number; on this machine each start has its own
    return name, said if queue in (None, "RUNNING") else queue.lower(), restarts


def state(words: list[Word], heard_seconds: float | None) -> str:
    """From the ranks' last words: not started | running | silent | killed | done | stopped | failed."""
    if not words:
        return "not started"
    states = {word.state for word in words}
    if "failed" in states:
        return "failed"
    if any(word.gone for word in words):
        return "killed"
    if "running" in states:
        return "running" if heard_seconds < SILENT_SECONDS else "silent"
    return "stopped" if "stopped" in states else "done"


def in_queue(submission: Submission, job: str) -> str | None:
    """SLURM's word for the job's state while it is in the queue; None on other clusters."""
    if submission.config.launch.cluster != "slurm" or shutil.which("squeue") is None:
        return None
    asked = subprocess.run(["squeue", "-h", "-j", job, "-o", "%T"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None


def detail(found: Status) -> str:
    run_dir = RunDir(found.run)
    lines = [
        f"{found.run}: {found.state}" + (f", job {found.job}" if found.job else ""),
        f"  step        {_of(found.step, found.steps)}",
        f"  loss        {_loss(found, 'at step')}",
        f"  speed       {_rate(found.tokens_per_second)}   ETA {_hours(found.eta_seconds)}",
        f"  checkpoint  {found.checkpoint or 'none'}",
        f"  restarts    {found.restarts}",
    ]
    lines += [f"  last heard  {found.heard_seconds:.0f} s ago"] if found.heard_seconds is not None else []
    lines += [f"  refused     a later start: {found.refused}"] if found.refused is not None else []
    for ending in read_endings(run_dir)[-5:]:
        how = f"{ending.how} {at_step(ending.step)}" + _because(ending.error)
        lines.append(f"  ended       job {ending.job}, start {ending.restart}: {how}")
    attempt = newest_attempt(run_dir.heartbeats, owner(run_dir))
    if attempt is not None and found.state in ("failed", "killed", "silent"):
        lines += ["", obituary(attempt)]
    return "\n".join(lines)


def table(found: list[Status]) -> str:
    rows = [("run", "job", "state", "step", "tok/s", "ETA", "loss", "checkpoint", "restarts")]
    for one in found:
        row = (
            str(one.run),
            one.job or "-",
            one.state,
            _of(one.step, one.steps),
            _rate(one.tokens_per_second).removesuffix(" tok/s"),
            _hours(one.eta_seconds),
            _loss(one, "at"),
        )
        rows.append((*row, one.checkpoint or "none", str(one.restarts)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _last_line(file: Path) -> dict:
    """The newest whole entry of metrics.jsonl."""
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    return next((entry for line in reversed(lines) if (entry := parse_line(line)) is not None and _is_ours(entry)), {})


def _is_ours(entry: dict) -> bool:
    """Whether it has what is read of it here; a loss may be null."""
    others = (entry.get("tokens_per_second"), entry.get("loss"))
    known = type(entry.get("step")) is int and isinstance(entry.get("step_seconds"), int | float)
    return known and all(isinstance(x, int | float | None) for x in others)


def _newest_checkpoint(root: Path) -> Path | None:
    """By its mark and name; whether every file is what it was is checked when it is loaded. Raises OSError where root cannot be read."""
    if root.exists():
        os.listdir(root)  # a glob finds nothing in a folder that it may not read
    return next((folder for folder in folders(root) if is_marked(folder)), None)


def _finished(words: list[Word], logged: int | None, checkpoint: Path | None) -> int | None:
    """By the ranks' own words, which may be some seconds older than the last line in metrics.jsonl; before they know it, or without any, by
    what the starts before have left."""
    told = max((word.step for word in words), default=-1)
    known = [logged, told if told >= 0 or checkpoint is None else step_of(checkpoint)]
    return max((step for step in known if step is not None and step >= 0), default=None)


def _of(step: int | None, steps: int | None) -> str:
    beyond = step is not None and steps is not None and step > steps  # train.steps was lowered since
    return f"{step or 0}/{steps}" + (" (beyond train.steps)" if beyond else "")


def _loss(found: Status, at: str) -> str:
    return "-" if found.loss is None else f"{found.loss:.4f} {at} {found.logged}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} tok/s"


def _hours(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _because(error: str | None) -> str:
    return f": {error.splitlines()[0][:200]}" if error else ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch.status", description="How runs are doing.")
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR")
    runs, found = parser.parse_args(argv).runs, []
    for run in runs:
        try:
            found.append(status(Path(run)))
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
        except OSError as error:  # a folder of another user's, or one that is being removed
            print(f"error: cannot read {run}: {error}", file=sys.stderr)
    if found:
        print(detail(found[0]) if len(runs) == 1 else table(found))
    return 0 if len(found) == len(runs) else 2


if __name__ == "__main__":
    sys.exit(quietly(main))
