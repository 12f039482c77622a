"""The run folder: whole files, the code snapshot, and a lease that real processes compete for."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pdn_train import rundir
from pdn_train.files import write_whole
from pdn_train.metrics import cut_back
from pdn_train.rundir import Lease, RunDir, RunDirError, UnwritableError, snapshot_code

HOLD = """
import sys, time
from pathlib import Path
from pdn_train.rundir import Lease, RunDir
Lease(RunDir(Path(sys.argv[1])), sys.argv[2] or None).acquire()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def run_dir(tmp_path):
    made = RunDir(tmp_path / "run")
    made.create()
    return made


def hold(run_dir: RunDir, job: str = "") -> subprocess.Popen:
    """Another process that takes the lease and keeps it."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(run_dir.path), job], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


@pytest.mark.parametrize("job, named", [("42", "job 42 (process {} on {})"), ("", "process {} on {}")], ids=["SLURM", "no SLURM"])
def test_a_second_job_is_refused_and_told_who_holds_the_folder(run_dir, monkeypatch, caplog, job, named):
    """So is one that takes a dead owner's place."""
    monkeypatch.setattr(rundir, "DYING_SECONDS", 0)
    owner = hold(run_dir, job)
    named = named.format(owner.pid, socket.gethostname())
    try:
        with pytest.raises(RunDirError, match=re.escape(f" is in use by {named}, last seen ")):
            Lease(run_dir, "77").acquire()
    finally:
        end(owner)
    with Lease(run_dir, "77") as lease:
        lease.acquire()
    assert caplog.messages == [f"took over the lease of {named}"]


def test_a_killed_owner_on_this_host_is_replaced_at_once(run_dir):
    end(hold(run_dir))
    with Lease(run_dir, None) as lease:
        lease.acquire()
        assert json.loads(run_dir.lease.read_text())["pid"] == os.getpid()
    assert not run_dir.lease.exists()


def test_a_live_owner_on_this_machine_keeps_the_folder_even_from_its_own_job(run_dir):
    """Two steps of one SLURM allocation have one job id."""
    owner = hold(run_dir, job="42")
    try:
        with pytest.raises(RunDirError, match="in use by job 42"):
            Lease(run_dir, "42").acquire()
    finally:
        end(owner)


def test_a_lease_that_changed_hands_meanwhile_is_put_back(run_dir):
    """This job reads a dead lease; before it removes it, another job has removed it and put its own there."""
    run_dir.lease.write_text(json.dumps({"job": "1", "host": "elsewhere", "pid": 1, "time": 0, "token": "dead"}))
    late = Lease(run_dir, "3")
    dead = rundir._read_lease(run_dir.lease)
    winner = Lease(run_dir, "2")
    winner.acquire()
    with pytest.raises(RunDirError, match="taken by another job just now"):
        late._remove(dead)
    assert json.loads(run_dir.lease.read_text())["job"] == "2"
    winner.__exit__()


def test_a_zombie_counts_as_gone(run_dir):
    owner = hold(run_dir)
    owner.kill()  # not waited for: its process number still answers
    time.sleep(0.2)
    Lease(run_dir, None).acquire()
    owner.wait()


def test_a_requeue_of_the_same_job_takes_over(run_dir):
    run_dir.lease.write_text(json.dumps({"job": "42", "host": "elsewhere", "pid": 1, "time": time.time(), "token": "x"}))
    Lease(run_dir, "42").acquire()


@pytest.mark.parametrize("age, free", [(rundir.STALE_SECONDS - 20, False), (rundir.STALE_SECONDS + 1, True)])
def test_a_lease_of_another_host_is_free_once_it_is_stale(run_dir, age, free):
    run_dir.lease.write_text(json.dumps({"job": "42", "host": "elsewhere", "pid": 1, "time": time.time() - age, "token": "x"}))
    with contextlib.nullcontext() if free else pytest.raises(RunDirError, match="job 42"):
        Lease(run_dir, "43").acquire()


def test_the_owner_learns_that_its_lease_was_taken(run_dir, monkeypatch):
    monkeypatch.setattr(rundir, "HEARTBEAT_SECONDS", 0.02)
    lease = Lease(run_dir, "1")
    lease.acquire()
    write_whole(run_dir.lease, json.dumps({"job": "2", "token": "other"}).encode())
    deadline = time.time() + 5
    while lease.lost is None and time.time() < deadline:
        time.sleep(0.02)
    assert "'job': '2'" in lease.lost
    lease.__exit__()
    assert run_dir.lease.exists(), "another job's lease must be left alone"


def test_a_lease_that_cannot_be_read_once_is_renewed_all_the_same(run_dir, monkeypatch):
    """The file system does not answer for a moment; a thread that ended of it would let the lease grow stale under a run that goes on."""
    monkeypatch.setattr(rundir, "HEARTBEAT_SECONDS", 0.01)
    read, failed = rundir._read_lease, threading.Event()

    def fail_once(file: Path) -> dict | None:
        if file == run_dir.lease and threading.current_thread().name == "lease" and not failed.is_set():
            failed.set()
            raise OSError(5, "Input/output error")
        return read(file)

    monkeypatch.setattr(rundir, "_read_lease", fail_once)
    with Lease(run_dir, None) as lease:
        lease.acquire()
        assert failed.wait(60)
        before, deadline = read(run_dir.lease)["time"], time.monotonic() + 60
        while read(run_dir.lease)["time"] == before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert read(run_dir.lease)["time"] > before and lease.lost is None


def test_a_renewal_under_way_does_not_bring_a_returned_lease_back(run_dir, monkeypatch):
    monkeypatch.setattr(rundir, "HEARTBEAT_SECONDS", 0.01)
    begun, go, done = threading.Event(), threading.Event(), threading.Event()

    def slow(path: Path, data: bytes) -> None:
        if path == run_dir.lease:  # threads of other tests still renew theirs
            begun.set()
            go.wait(60)
            write_whole(path, data)
            done.set()

    monkeypatch.setattr(rundir, "write_whole", slow)
    with Lease(run_dir, None) as lease:
        lease.acquire()
        assert begun.wait(60)
        threading.Timer(0.2, go.set).start()
    assert done.wait(60) and not run_dir.lease.exists()


@pytest.mark.parametrize("age, free", [(rundir.STALE_SECONDS - 20, False), (rundir.STALE_SECONDS + 20, True)])
def test_a_lease_from_a_clock_that_is_ahead_is_as_old_as_its_file(run_dir, monkeypatch, age, free):
    monkeypatch.setattr(rundir, "DYING_SECONDS", 0)
    run_dir.lease.write_text(json.dumps({"job": "42", "host": "elsewhere", "pid": 1, "time": time.time() + 7200, "token": "x"}))
    os.utime(run_dir.lease, (time.time() - age,) * 2)
    with contextlib.nullcontext() if free else pytest.raises(RunDirError, match="job 42 .*whose clock is 7[12][0-9]{2} s ahead"):
        Lease(run_dir, "43").acquire()


@pytest.mark.parametrize("text", ["{half a li", "null", "[]", "", '{"time": "x"}', '{"machine": "here"}'])
def test_an_unreadable_lease_is_stale(text, run_dir, caplog):
    run_dir.lease.write_text(text.replace("here", rundir.machine()))
    Lease(run_dir, None).acquire()
    assert caplog.messages == ["took over the lease of a job whose lease cannot be read"]


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
