"""A run's folder: its paths, the record of what was run, and the lease that keeps it to one job.

    config.yaml   the resolved configuration          code/             the files git tracks, as they were at the start
    tokenizer.model                                   tb/               TensorBoard's event files
    metrics.jsonl, validation.jsonl                   logs/             one text file a rank
    checkpoints/  see pdn_train.checkpoint            lease.json        the job that owns the folder now
    heartbeats/   each rank's last word               submissions/      what each `launch.submit` handed over, and the job's own logs
    endings.jsonl how each start of a submitted job ended

The lease is a file with job, host, process and a heartbeat, renewed every HEARTBEAT_SECONDS. Where the owner's process can be looked up
(same boot, same process namespace) that decides: alive, it keeps the folder; gone, the folder is free. Elsewhere a requeue of the same
SLURM job takes over at once, any other job once the heartbeat is STALE_SECONDS old. A heartbeat later than now is of a clock that is wrong;
then the file's own age decides (`_is_old`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pdn_train.files import prove_writable, write_whole

HEARTBEAT_SECONDS = 10
STALE_SECONDS = 120
DYING_SECONDS = 3

log = logging.getLogger(__name__)


_IN_THE_WAY = (FileExistsError, IsADirectoryError, NotADirectoryError)


class RunDirError(RuntimeError):
    """The run folder cannot be used; the message says why and what to do."""


class UnwritableError(RunDirError):
    """The disk of the run folder is full or fails, which may be over at the next start."""


class GitError(RuntimeError):
    """git is missing or refuses; the message is its own."""


@dataclass(frozen=True)
class RunDir:
    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer.model"

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tb"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def validation(self) -> Path:
        return self.path / "validation.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def lease(self) -> Path:
        return self.path / "lease.json"

    @property
    def heartbeats(self) -> Path:
        return self.path / "heartbeats"

    @property
    def submissions(self) -> Path:
        return self.path / "submissions"

    @property
    def endings(self) -> Path:
        return self.path / "endings.jsonl"

    def create(self) -> None:
        """Make the folders and prove that they can be written. Raises RunDirError naming the folder."""
        if not self.path.is_dir() and os.path.lexists(self.path):
            what = f"a link to {os.readlink(self.path)}, which is no folder" if self.path.is_symlink() else "a file"
            raise RunDirError(f"run_dir={self.path} is {what}; choose another run_dir, or remove it")
        with self.writing():
            prove_writable(self.path)
            for folder in (self.tensorboard, self.logs, self.checkpoints):
                folder.mkdir(exist_ok=True)

    def record(self, config: str, tokenizer: Path | None) -> None:
        """Write what the run is made of: the configuration, the code, the tokenizer of its shards. Raises RunDirError on a full disk."""
        with self.writing():
            write_whole(self.config, config.encode())
            if tokenizer is not None:
                write_whole(self.tokenizer, tokenizer.read_bytes())
            snapshot_code(Path(__file__).resolve().parent.parent, self.code)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Makes a fault of the disk inside a RunDirError that names the folder and, where the fault has one, the file.

        It is an UnwritableError where neither rights nor what lies there are amiss.
        """
        try:
            yield
        except OSError as error:
            kind = RunDirError if isinstance(error, (PermissionError, *_IN_THE_WAY)) else UnwritableError
            what = f"run_dir={self.path} cannot be written ({self._fault(error)})"
            raise kind(f"{what}; choose another run_dir or {_way_out(error)}") from error

    def _fault(self, error: OSError) -> str:
        """The system's words, and the file: inside the folder by its name there; of a rename that which was to be replaced."""
        what, file = error.strerror or str(error), error.filename2 or error.filename
        if not isinstance(file, str | Path) or Path(file) == self.path:
            return what
        return f"{what}: {Path(file).relative_to(self.path) if Path(file).is_relative_to(self.path) else file}"


def _way_out(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space"
    return "move away what is in the way" if isinstance(error, _IN_THE_WAY) else "mend its rights"


def snapshot_code(root: Path, target: Path) -> None:
    """Copy the files that git tracks below `root`, as they are now; of a snapshot, all; outside both, the packages' Python files."""
    aside = target.with_name(f".code-{uuid.uuid4().hex}")
    try:
        for name in _names(root):
            if (root / name).is_file():
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, aside / name)
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # where the disk was too full for it


def _names(root: Path) -> list[str]:
    if (root.parent / "submission.json").exists():  # a snapshot that `launch.submit` took, which now runs
        return [str(p.relative_to(root)) for p in root.rglob("*") if "__pycache__" not in p.parts]
    try:
        names = [name for name in git(root, "ls-files", "-z").split("\0") if name]
    except GitError as error:
        log.info("code/ holds the packages' Python files, as git does not list those of %s: %s", root, error)
        names = []
    if names:
        return names
    return [str(p.relative_to(root)) for package in ("pdn_train", "kernels", "launch", "data_prep") for p in (root / package).rglob("*.py")]


def git(root: Path, *command: str) -> str:
    """What git says of the checkout `root`, be it another user's, as in a container: its code runs already. Raises GitError.

    A repository that is named is not asked whose it is; `-c safe.directory` does the same, but not before git 2.38.
    """
    named = [f"--git-dir={root / '.git'}"] if (root / ".git").exists() else []
    try:
        return subprocess.run(["git", *named, "-C", str(root), *command], capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise GitError("there is no git on this machine") from None
    except subprocess.CalledProcessError as error:
        raise GitError((error.stderr.strip().splitlines() or [f"it ended with {error.returncode}"])[0]) from None


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
