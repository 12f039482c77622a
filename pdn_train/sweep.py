"""Many runs of one configuration, compared with seeds: `python -m pdn_train.sweep yaml/sweep_X.yaml [--jobs N] [--gpus N] [--minutes M]`.

Runs are `python -m pdn_train.train` with the overrides of a sweep file (`pdn_train.sweep_file` has its keys), N at once (--jobs), on the
GPUs in turn (--gpus; 0: as the configuration says), the first seed of everything first. What is done is not done again, and what was
interrupted goes on from its checkpoint: the same command resumes. Where a run's folder holds validations under other settings
(`pdn_train.deciding`, less resume.allow) the sweep is refused before anything starts: they are neither counted nor trained over. After M
minutes, at SIGTERM and at Ctrl-C no run is started and those that go on are told to stop (they write a checkpoint); after a signal the
exit code is 75, start me again. A run that fails is named with its log and what that says, and the others go on; but where the first run
of the sweep to end cannot run here (exit code 2) no more are started, for they would meet the same. `--dry-run` lists the runs instead.

Then, or alone with --summary, the table: per setting the mean over seeds and its standard deviation, and for each pair the mean difference,
its standard error and 95 % interval by Student's t, printed and written to FOLDER/summary.md and summary.json. Differences are
second minus first, of the runs with the same seed.
"""

from __future__ import annotations

import argparse
import math
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from pdn_train.compare import compare, table
from pdn_train.config import ConfigError
from pdn_train.files import to_json, write_whole
from pdn_train.rundir import RunDir
from pdn_train.signals import REQUEUE
from pdn_train.sweep_file import Run, Sweep, SweepError, load, require_same_settings, value
from pdn_train.telling import counted, quietly

CANNOT_RUN = 2  # a trainer's exit code for a configuration that cannot run: a wrong key, no GPU


def complaint(log: Path, start: int) -> str:
    """What a failed run says for itself: the last line of its log from byte `start` on that a trainer writes of an error; "" for none."""
    lines = log.read_bytes()[start:].decode(errors="replace").splitlines()
    said = next((line for line in reversed(lines) if line.startswith("error:") or " E rank" in line), "")
    return said if len(said) <= 200 else said[:197] + "..."


class Runner:
    """Runs what is not done, several at once, until a deadline. done: runs of the sweep that are."""

    def __init__(self, sweep: Sweep, gpus: int, deadline: float, discard: bool, done: int):
        self._sweep, self._deadline, self._discard = sweep, deadline, discard
        self._ended, self._hopeless, self.stopped = done, False, False
        self._slots: SimpleQueue = SimpleQueue()
        self._gpus = gpus
        self._going: set[subprocess.Popen] = set()
        self._lock = threading.Lock()

    def run(self, runs: list[Run], jobs: int) -> list[Run]:
        """Those that failed. Runs that the deadline kept from starting or ending are neither done nor failed."""
        for job in range(jobs):
            self._slots.put(job)
        timer = threading.Timer(max(0.0, self._deadline - time.monotonic()), self._stop) if math.isfinite(self._deadline) else None
        if timer is not None:
            timer.daemon = True
            timer.start()
        with ThreadPoolExecutor(jobs) as pool:
            codes = list(pool.map(self._one, runs))
        if timer is not None:
            timer.cancel()
        return [run for run, code in zip(runs, codes, strict=True) if code not in (0, REQUEUE)]

    def _one(self, run: Run) -> int:
        if time.monotonic() >= self._deadline or self._hopeless:
            return REQUEUE
        slot = self._slots.get()
        try:
            run.folder.parent.mkdir(parents=True, exist_ok=True)
            started, logged = time.monotonic(), run.log.stat().st_size if run.log.exists() else 0
            code = self._train(run, slot)
            if code in (-signal.SIGTERM, -signal.SIGINT) and time.monotonic() >= self._deadline:
                code = REQUEUE  # told to stop while it was still starting
            word = {0: "done", REQUEUE: "stopped"}.get(code, f"FAILED ({code}), see {run.log}")
            said = complaint(run.log, logged) if code not in (0, REQUEUE) else ""
            print(f"{run.folder}: {word} after {time.monotonic() - started:.0f} s" + (f": {said}" if said else ""), flush=True)
            self._note(code)
            if code == 0 and self._discard:
                shutil.rmtree(RunDir(run.folder).checkpoints, ignore_errors=True)
            return code
        finally:
            self._slots.put(slot)

    def _note(self, code: int) -> None:
        with self._lock:
            self._ended += 1
            if self._ended == 1 and code == CANNOT_RUN:
                self._hopeless = True
                print("no more runs are started: the first one cannot run here, and the others would meet the same", flush=True)

    def _train(self, run: Run, slot: int) -> int:
        command = [sys.executable, "-m", "pdn_train.train", self._sweep.base, *run.overrides]
        if self._gpus:
            command = ["env", f"CUDA_VISIBLE_DEVICES={slot % self._gpus}", *command]
        with run.log.open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            with self._lock:
                self._going.add(process)
                if time.monotonic() >= self._deadline:  # which came while the process was made
                    process.send_signal(signal.SIGTERM)
            code = process.wait()
            with self._lock:
                self._going.discard(process)
        return code

    def stop(self, *_: object) -> None:
        """Start no more runs and tell those that go on to stop. A handler of signals too."""
        self._deadline, self.stopped = -math.inf, True
        self._stop()

    def _stop(self) -> None:
        with self._lock:
            for process in self._going:
                process.send_signal(signal.SIGTERM)


def plan(sweep: Sweep, runs: list[Run], done: list[Run]) -> str:
    """What `--dry-run` prints of the runs: a line each, in the order in which they would start."""
    to_do = f"{len(runs) - len(done)} of {counted(len(runs), 'run')} to do"
    lines = [f"{to_do}, each `python -m pdn_train.train {sweep.base}` with what follows its folder"]
    for run in runs:
        lines.append(f"{'done' if run in done else 'to do'}  seed {run.seed}  {run.folder}  {shlex.join(run.overrides)}")
    return "\n".join(lines)


# ---- comparing ----


def summary(sweep: Sweep, runs: list[Run]) -> dict:
    """settings -> what `pdn_train.compare` makes of the runs that are done, and how they are to be read."""
    values: dict = {setting: {variant: {} for variant in sweep.variants} for setting in sweep.settings}
    for run in runs:
        found = value(sweep, run)
        if found is not None:
            values[run.setting][run.variant].setdefault(run.choice, {})[str(run.seed)] = found
    settings = {setting: compare(by_variant, sweep.pairs, sweep.better) for setting, by_variant in values.items()}
    return {"metric": sweep.metric, "better": sweep.better, "seeds": sweep.seeds, "settings": settings}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pdn_train.sweep", description="Run a sweep, resuming it, and compare its runs.")
    parser.add_argument("sweep", help="a file such as yaml/sweep_mqar.yaml")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at once (default 1)")
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="share the jobs over so many GPUs (default: leave it to each run)")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="M", help="stop after M minutes")
    parser.add_argument("--folder", help="instead of the file's")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", help="for every run")
    parser.add_argument("--only", default="", metavar="NAME,NAME", help="run these settings or variants only")
    parser.add_argument("--discard-checkpoints", action="store_true", help="remove a run's checkpoints once it is done")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--summary", action="store_true", help="run nothing; print and write the table")
    instead.add_argument(
        "--dry-run", action="store_true", help="print the runs, which are done, and their settings; start and write nothing"
    )
    try:
        return _act(parser.parse_args(argv))
    except BrokenPipeError:
        raise  # that of stdout
    except (SweepError, ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _act(a: argparse.Namespace) -> int:
    for name, given, least in (("--jobs", a.jobs, 1), ("--gpus", a.gpus, 0), ("--minutes", a.minutes, 0)):
        if not given >= least:  # nan neither
            raise SweepError(f"{name} {given} is not at least {least}")
    sweep, runs = load(a.sweep, a.folder, a.set)
    only = {name for name in a.only.split(",") if name}
    if unknown := only - sweep.settings.keys() - sweep.variants.keys():
        raise SweepError(f"--only {sorted(unknown)[0]}: there are {', '.join([*sweep.settings, *sweep.variants])}")
    require_same_settings(runs)
    if a.dry_run:
        chosen = [run for run in runs if _chosen(run, only, sweep)]
        print(plan(sweep, chosen, [run for run in chosen if value(sweep, run) is not None]))
        return 0
    root = Path(a.folder or sweep.folder)
    if a.summary and not root.is_dir():
        raise SweepError(f"{root} is not a folder: nothing of this sweep has run there; name the one that has with --folder")
    failed, stopped = [], False
    if not a.summary:
        done = [r for r in runs if value(sweep, r) is not None]
        wanted = [r for r in runs if _chosen(r, only, sweep) and r not in done]
        print(f"{len(wanted)} of {counted(len(runs), 'run')} to do", flush=True)
        runner = Runner(sweep, a.gpus, time.monotonic() + 60 * a.minutes, a.discard_checkpoints, len(done))
        with handled(runner.stop):
            failed = runner.run(wanted, a.jobs)
        stopped = runner.stopped
    made = summary(sweep, runs)
    try:
        _keep(made, root)
    finally:
        print(table(made))  # what runs of hours have given, also where a full disk does not take it
    return 1 if failed else REQUEUE if stopped else 0


def _keep(made: dict, root: Path) -> None:
    """Write FOLDER/summary.md and summary.json. Raises SweepError."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        write_whole(root / "summary.json", (to_json(made, indent=2) + "\n").encode())
        write_whole(root / "summary.md", table(made).encode())
    except OSError as error:
        raise SweepError(f"cannot write the summary to {root}: {error.strerror}; --summary makes it again") from error


@contextmanager
def handled(stop: Callable[[int, object], None]) -> Iterator[None]:
    """SIGTERM and Ctrl-C call stop. A shell that has what it runs in the background ignore Ctrl-C is left that."""
    given = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    taken = {number: before for number, before in given.items() if before != signal.SIG_IGN}
    for number in taken:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, before in taken.items():
            signal.signal(number, before)


def _chosen(run: Run, only: set[str], sweep: Sweep) -> bool:
    """Whether `only` names the run: of settings and variants, each where it names one of that kind."""
    settings, variants = only & sweep.settings.keys(), only & sweep.variants.keys()
    return (not settings or run.setting in settings) and (not variants or run.variant in variants)


if __name__ == "__main__":
    sys.exit(quietly(main))
