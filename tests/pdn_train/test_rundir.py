"""The run folder: whole files, what is in their way, and the code snapshot."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pdn_train import rundir
from pdn_train.files import write_whole
from pdn_train.lease import Lease
from pdn_train.metrics import cut_back
from pdn_train.rundir import RunDir, RunDirError, UnwritableError, snapshot_code


@pytest.fixture
def run_dir(tmp_path):
    made = RunDir(tmp_path / "run")
    made.create()
    return made


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match="file/run"):
        RunDir(tmp_path / "file" / "run").create()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(RunDirError, match="link is a link to .*gone, which is no folder"):
        RunDir(tmp_path / "link").create()
    with pytest.raises(RunDirError, match="file is a file"):
        RunDir(tmp_path / "file").create()


def in_the_way(path: Path) -> None:
    """A folder where a file belongs, which is not empty, or a file where a folder does."""
    if path.suffix:
        (path / "x").mkdir(parents=True)
    else:
        path.touch()


@pytest.mark.parametrize(
    "name, act, said",
    [
        ("config.yaml", lambda run: run.record("a: 1\n", None), "Is a directory: config.yaml"),
        ("tokenizer.model", lambda run: run.record("a: 1\n", run.path / "tok.model"), "Is a directory: tokenizer.model"),
        ("code", lambda run: run.record("a: 1\n", None), "Not a directory: code"),
        ("lease.json", lambda run: Lease(run, None).acquire(), "Is a directory: lease.json"),
        ("metrics.jsonl", lambda run: cut_back(run, 3), "Is a directory: metrics.jsonl"),
        ("tb", lambda run: run.create(), "File exists: tb"),
    ],
)
def test_what_is_in_the_way_of_a_file_is_named(tmp_path, name, act, said):
    """Another start would meet it too."""
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    (run.path / "tok.model").touch()
    in_the_way(run.path / name)
    named = f"run_dir={run.path} cannot be written ({said}); choose another run_dir or move away what is in the way"
    with pytest.raises(RunDirError, match=f"^{re.escape(named)}$") as caught:
        act(run)
    assert not isinstance(caught.value, UnwritableError)


def test_a_file_that_may_not_be_written_is_named(run_dir):
    for file, said in ((run_dir.logs / "a", "logs/a"), (Path("/elsewhere/b"), "/elsewhere/b")):
        named = f"[(]Permission denied: {said}[)]; choose another run_dir or mend its rights"
        with pytest.raises(RunDirError, match=named), run_dir.writing():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))


def test_a_disk_that_is_full_when_the_run_starts(run_dir, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    named = re.escape(f"run_dir={run_dir.path} cannot be written (No space left on device); choose another run_dir or free some space")
    left = sorted(run_dir.path.iterdir())
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UnwritableError, match=named):
        Lease(run_dir, None).acquire()
    assert sorted(run_dir.path.iterdir()) == left
    monkeypatch.setattr(rundir.shutil, "copy2", full)
    with pytest.raises(UnwritableError, match=named):
        run_dir.record("a: 1\n", None)
    assert sorted(run_dir.path.iterdir()) == [*left[:1], run_dir.config, *left[1:]]


def test_write_whole_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    file = tmp_path / "x"
    write_whole(file, b"old")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_whole(file, b"new")
    assert file.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_the_snapshot_holds_what_git_tracks(tmp_path):
    root = tmp_path / "checkout"
    (root / "pkg").mkdir(parents=True)
    (root / "pkg" / "a b.py").write_text("1")
    (root / "untracked.bin").write_text("2")
    for command in (["init", "-q"], ["add", "pkg"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    (root / "pkg" / "a b.py").write_text("changed since")
    for _ in range(2):  # a resume replaces the first snapshot
        snapshot_code(root, tmp_path / "code")
    assert [str(p.relative_to(tmp_path / "code")) for p in (tmp_path / "code").rglob("*") if p.is_file()] == ["pkg/a b.py"]
    assert (tmp_path / "code" / "pkg" / "a b.py").read_text() == "changed since"


def test_the_snapshot_of_another_user_s_checkout(tmp_path, monkeypatch, caplog):
    """git's own switch has it take every checkout for somebody else's, as root meets it in a container."""
    root = tmp_path / "checkout"
    (root / "pkg").mkdir(parents=True)
    (root / "pkg" / "a.yaml").write_text("1")
    for command in (["init", "-q"], ["add", "pkg"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, check=False).returncode, "git does not know the switch"
    snapshot_code(root, tmp_path / "code")
    assert (tmp_path / "code" / "pkg" / "a.yaml").exists()
    (root / ".git" / "index").write_text("garbage")
    caplog.set_level(logging.INFO)
    assert rundir._names(root) == [] and "index file" in caplog.text


def test_a_git_that_takes_no_word_on_the_command_line_for_another_user_s_checkout(tmp_path, monkeypatch):
    """Before 2.38, `-c safe.directory` was passed over. The checkout is a second working tree, whose .git is a file."""
    (first := tmp_path / "first").mkdir()
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    (first / "a.py").touch()
    for command in (["init", "-q"], ["add", "a.py"], [*who, "commit", "-q", "-m", "a"], ["worktree", "add", "-q", tmp_path / "second"]):
        subprocess.run(["git", *command], cwd=first, check=True, capture_output=True)
    (old := tmp_path / "bin" / "git").parent.mkdir()
    old.write_text(f'#!/bin/sh\n[ "$1" = -c ] && shift 2\nexec {shutil.which("git")} "$@"\n')
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{old.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    (tmp_path / "second" / "a.py").write_text("changed")
    for root in (first, tmp_path / "second"):
        assert rundir._names(root) == ["a.py"]
        assert (rundir.git(root, "status", "--porcelain", "-uno") == "") == (root == first)


def test_the_record_can_be_written_twice(run_dir, tmp_path):
    (tmp_path / "tok").write_bytes(b"model")
    for text in ("a: 1\n", "a: 2\n"):
        run_dir.record(text, tmp_path / "tok")
    assert (run_dir.config.read_text(), run_dir.tokenizer.read_bytes()) == ("a: 2\n", b"model")
    assert (run_dir.code / "pdn_train" / "rundir.py").read_text() == Path(rundir.__file__).read_text()
