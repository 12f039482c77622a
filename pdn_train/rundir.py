"""A run's folder: its paths, and the record of what was run.

config.yaml   the resolved configuration          code/             the files git tracks, as they were at the start
tokenizer.model                                   tb/               TensorBoard's event files
metrics.jsonl, validation.jsonl                   logs/             one text file a rank
checkpoints/  see pdn_train.checkpoint            lease.json        see pdn_train.lease
heartbeats/   each rank's last word               submissions/      what each `launch.submit` handed over, and the job's own logs
endings.jsonl how each start of a submitted job ended
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pdn_train.files import prove_writable, write_whole

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
