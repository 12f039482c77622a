"""The lease that keeps a run's folder to one job.

It is a file, lease.json, with job, host, process and a heartbeat, renewed every HEARTBEAT_SECONDS. Where the owner's process can be
looked up (same boot, same process namespace) that decides: alive, it keeps the folder; gone, the folder is free. Elsewhere a requeue of the
same SLURM job takes over at once, any other job once the heartbeat is STALE_SECONDS old. A heartbeat later than now is of a clock that is
wrong; then the file's own age decides (`_is_old`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from pathlib import Path

from pdn_train.files import write_whole
from pdn_train.rundir import RunDir, RunDirError

HEARTBEAT_SECONDS = 10
STALE_SECONDS = 120
DYING_SECONDS = 3

log = logging.getLogger(__name__)


class Lease:
    """One job's hold on a run folder: `acquire` before anything is written, a thread renews it, leaving the context releases it."""

    def __init__(self, run_dir: RunDir, job: str | None):
        """job: the SLURM job id, the same after a requeue; None outside SLURM."""
        self._file = run_dir.lease
        self._me = {
            "job": job,
            "host": socket.gethostname(),
            "machine": machine(),
            "pid": os.getpid(),
            "started": process_start(os.getpid()),
            "token": uuid.uuid4().hex,
        }
        self._ended = threading.Event()
        self._renewal = threading.Thread(target=self._renew, name="lease", daemon=True)
        self.lost: str | None = None  # set by the thread when another job has taken the folder

    def acquire(self) -> None:
        """Take the folder. Raises RunDirError naming the owner where another job holds it, or what keeps it from being written."""
        with RunDir(self._file.parent).writing():
            self._take()
        self._renewal.start()

    def _take(self) -> None:
        deadline = time.monotonic() + DYING_SECONDS
        while (owner := _read_lease(self._file)) is not None and not self._may_replace(owner) and time.monotonic() < deadline:
            time.sleep(0.1)  # an owner that was just killed may still be writing its last block
        if owner is not None:
            if not self._may_replace(owner):
                silent = time.time() - owner.get("time", 0)
                seen = f"last seen {silent:.0f} s ago" if silent >= 0 else f"whose clock is {-silent:.0f} s ahead of this one's"
                raise RunDirError(
                    f"{self._file.parent} is in use by {_name(owner)}, {seen}; stop it, "
                    f"use another run_dir, or wait until it is {STALE_SECONDS} s silent"
                )
            self._remove(owner)
        self._create()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        """Give the folder back; on a rank that never acquired it this does nothing."""
        self._ended.set()
        if self._renewal.is_alive():
            self._renewal.join()  # a renewal under way would put the file back
        owner = _read_lease(self._file)
        if owner is not None and owner.get("token") == self._me["token"]:
            self._file.unlink(missing_ok=True)

    def _may_replace(self, owner: dict) -> bool:
        requeued = owner.get("job") is not None and owner["job"] == self._me["job"] and owner.get("machine") != self._me["machine"]
        return requeued or not _holds(owner) or (owner.get("time", 0) > time.time() + STALE_SECONDS and _is_old(self._file, owner))

    def _remove(self, owner: dict) -> None:
        """Take a dead lease away; one that another job has put in its place meanwhile is put back, and that job keeps the folder."""
        aside = self._file.with_name(f".lease-{uuid.uuid4().hex}")
        try:
            self._file.rename(aside)
        except FileNotFoundError:
            return
        now = _read_lease(aside) or {}
        if now.get("token") != owner.get("token"):
            with contextlib.suppress(FileExistsError):
                os.link(aside, self._file)
            aside.unlink()
            raise RunDirError(f"{self._file.parent} was taken by another job just now: {now}")
        aside.unlink()
        log.warning("took over the lease of %s", _name(owner))

    def _create(self) -> None:
        aside = self._file.with_name(f".lease-{uuid.uuid4().hex}")
        try:
            aside.write_text(self._text())
            os.link(aside, self._file)  # fails where the file exists: two jobs that start together cannot both get it
        except FileExistsError:
            raise RunDirError(
                f"{self._file.parent} was taken by another job just now; use another run_dir, or wait until it ends"
            ) from None
        finally:
            aside.unlink(missing_ok=True)

    def _text(self) -> str:
        return json.dumps({**self._me, "time": time.time()})

    def _renew(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            try:
                owner = _read_lease(self._file)
                if owner is None or owner.get("token") != self._me["token"]:
                    self.lost = f"the lease {self._file} now belongs to {owner}"
                    return
                write_whole(self._file, self._text().encode())
            except OSError as error:  # a full disk, or one that does not answer once, must not end the run: the lease only grows older
                log.warning("could not renew the lease %s: %s", self._file, error)


def owner(run_dir: RunDir) -> dict | None:
    """What the lease says of the job that owns the folder now (job, host, machine, pid, started); None where nobody does."""
    said = _read_lease(run_dir.lease)
    return said if said is not None and _holds(said) else None


def _name(owner: dict) -> str:
    if "host" not in owner:
        return "a job whose lease cannot be read"
    process = f"process {owner.get('pid')} on {owner.get('host')}"
    return process if owner.get("job") is None else f"job {owner['job']} ({process})"


def _holds(said: dict) -> bool:
    if said.get("machine") == machine():
        started = process_start(said.get("pid"))
        return started is not None and started == said.get("started")
    return time.time() - said.get("time", 0) <= STALE_SECONDS


def _is_old(file: Path, said: dict) -> bool:
    """Whether a lease of another machine, with a heartbeat in the future, was written STALE_SECONDS ago by the file system's clock.

    That clock stamps a living owner's renewals, be its own clock ahead or ours behind; and where a file system takes the stamps from the
    writers' clocks instead, the file looks young: either way no living owner is replaced.
    """
    if said.get("machine") == machine():
        return False
    probe = file.with_name(f".lease-{uuid.uuid4().hex}")
    probe.touch()
    now = probe.stat().st_mtime
    probe.unlink()
    with contextlib.suppress(FileNotFoundError):
        return now - file.stat().st_mtime > STALE_SECONDS
    return False


def _read_lease(file: Path) -> dict | None:
    """What a lease says; {} where it is unreadable, which has no heartbeat and so is stale; None where there is none."""
    try:
        said = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return said if isinstance(said, dict) and isinstance(said.get("time", 0), int | float) else {}


def machine() -> str:
    """Names what a process number is valid in: this boot of this kernel, this namespace of processes."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + ":" + os.readlink("/proc/self/ns/pid")
    except OSError:
        return uuid.uuid4().hex  # no /proc: no process can be looked up, so no two are on one machine


def process_start(pid: int) -> str | None:
    """When the kernel started this process, which tells it from a later one with the same number; None where it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if fields[0] == "Z" else fields[19]
