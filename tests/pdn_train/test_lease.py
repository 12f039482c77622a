"""A lease that real processes compete for."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pdn_train import lease as leases
from pdn_train.files import write_whole
from pdn_train.lease import Lease
from pdn_train.rundir import RunDir, RunDirError

HOLD = """
import sys, time
from pathlib import Path
from pdn_train.lease import Lease
from pdn_train.rundir import RunDir
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
    monkeypatch.setattr(leases, "DYING_SECONDS", 0)
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
    dead = leases._read_lease(run_dir.lease)
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


@pytest.mark.parametrize("age, free", [(leases.STALE_SECONDS - 20, False), (leases.STALE_SECONDS + 1, True)])
def test_a_lease_of_another_host_is_free_once_it_is_stale(run_dir, age, free):
    run_dir.lease.write_text(json.dumps({"job": "42", "host": "elsewhere", "pid": 1, "time": time.time() - age, "token": "x"}))
    with contextlib.nullcontext() if free else pytest.raises(RunDirError, match="job 42"):
        Lease(run_dir, "43").acquire()


def test_the_owner_learns_that_its_lease_was_taken(run_dir, monkeypatch):
    monkeypatch.setattr(leases, "HEARTBEAT_SECONDS", 0.02)
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
    monkeypatch.setattr(leases, "HEARTBEAT_SECONDS", 0.01)
    read, failed = leases._read_lease, threading.Event()

    def fail_once(file: Path) -> dict | None:
        if file == run_dir.lease and threading.current_thread().name == "lease" and not failed.is_set():
            failed.set()
            raise OSError(5, "Input/output error")
        return read(file)

    monkeypatch.setattr(leases, "_read_lease", fail_once)
    with Lease(run_dir, None) as lease:
        lease.acquire()
        assert failed.wait(60)
        before, deadline = read(run_dir.lease)["time"], time.monotonic() + 60
        while read(run_dir.lease)["time"] == before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert read(run_dir.lease)["time"] > before and lease.lost is None


def test_a_renewal_under_way_does_not_bring_a_returned_lease_back(run_dir, monkeypatch):
    monkeypatch.setattr(leases, "HEARTBEAT_SECONDS", 0.01)
    begun, go, done = threading.Event(), threading.Event(), threading.Event()

    def slow(path: Path, data: bytes) -> None:
        if path == run_dir.lease:  # threads of other tests still renew theirs
            begun.set()
            go.wait(60)
            write_whole(path, data)
            done.set()

    monkeypatch.setattr(leases, "write_whole", slow)
    with Lease(run_dir, None) as lease:
        lease.acquire()
        assert begun.wait(60)
        threading.Timer(0.2, go.set).start()
    assert done.wait(60) and not run_dir.lease.exists()


@pytest.mark.parametrize("age, free", [(leases.STALE_SECONDS - 20, False), (leases.STALE_SECONDS + 20, True)])
def test_a_lease_from_a_clock_that_is_ahead_is_as_old_as_its_file(run_dir, monkeypatch, age, free):
    monkeypatch.setattr(leases, "DYING_SECONDS", 0)
    run_dir.lease.write_text(json.dumps({"job": "42", "host": "elsewhere", "pid": 1, "time": time.time() + 7200, "token": "x"}))
    os.utime(run_dir.lease, (time.time() - age,) * 2)
    with contextlib.nullcontext() if free else pytest.raises(RunDirError, match="job 42 .*whose clock is 7[12][0-9]{2} s ahead"):
        Lease(run_dir, "43").acquire()


@pytest.mark.parametrize("text", ["{half a li", "null", "[]", "", '{"time": "x"}', '{"machine": "here"}'])
def test_an_unreadable_lease_is_stale(text, run_dir, caplog):
    run_dir.lease.write_text(text.replace("here", leases.machine()))
    Lease(run_dir, None).acquire()
    assert caplog.messages == ["took over the lease of a job whose lease cannot be read"]
