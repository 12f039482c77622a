"""What one `launch.submit` hands over, in a folder of its own: whatever changes while the job waits or is requeued, it runs this.

run_dir/submissions/0001/config.yaml      the resolved configuration        submission.json   command, time, commit
run_dir/submissions/0001/code/            the files git tracks              everything else   submitit's: script, pickle, results, logs
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from pdn_train.config import Config, dump, load
from pdn_train.files import write_whole
from pdn_train.rundir import GitError, RunDir, git, snapshot_code

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Submission:
    folder: Path  # absolute

    @classmethod
    def create(cls, config: Config, command: list[str]) -> Submission:
        """Take the next free number below run_dir and fill its folder. Raises RunDirError where run_dir cannot be written."""
        run_dir = RunDir(Path(config.run_dir).absolute())
        run_dir.create()
        with run_dir.writing():
            run_dir.submissions.mkdir(exist_ok=True)
            submission = cls(_next_folder(run_dir.submissions))
            facts = {"command": command, "time": time.time(), "host": socket.gethostname(), **_commit(ROOT)}
            write_whole(submission.folder / "submission.json", json.dumps(facts, indent=1).encode())
            write_whole(submission.config_file, dump(config).encode())
            snapshot_code(ROOT, submission.code)
        if not run_dir.config.exists():  # so that a run that waits for its turn can be looked at; the job writes both again when it starts
            run_dir.record(dump(config), None)
        return submission

    @property
    def config_file(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def code(self) -> Path:
        return self.folder / "code"

    @property
    def config(self) -> Config:
        return load(self.config_file)

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.folder.parent.parent)

    @property
    def jobs(self) -> list[str]:
        """SLURM's number of its job, once there is one; on this machine submitit's of each start, oldest first."""
        found = sorted(self.folder.glob("*_submitted.pkl"), key=lambda p: p.stat().st_mtime_ns)
        return [file.name.removesuffix("_submitted.pkl") for file in found]


def submissions(run_dir: RunDir) -> list[Submission]:
    """In the order in which they were made."""
    found = [Submission(folder) for folder in _numbered(run_dir.submissions)]
    return [submission for submission in found if submission.config_file.exists()]  # the newest may still be on its way


def _numbered(root: Path) -> list[Path]:
    return sorted((p for p in root.glob("[0-9]*") if p.name.isdecimal()), key=lambda p: int(p.name))


def _next_folder(root: Path) -> Path:
    number = max((int(p.name) for p in _numbered(root)), default=0)
    while True:
        number += 1
        try:
            (root / f"{number:04d}").mkdir()
            return root / f"{number:04d}"
        except FileExistsError:
            continue  # another submission took it just now


def _commit(root: Path) -> dict:
    """The commit that is checked out and whether files differ from it; empty outside a checkout."""
    try:
        return {"commit": git(root, "rev-parse", "HEAD").strip(), "changed": bool(git(root, "status", "--porcelain", "-uno").strip())}
    except GitError:
        return {}
