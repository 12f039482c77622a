"""Two real processes and what their watchdogs do when one of them fails, dies, hangs or stops. No torch: only the watch itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdn_train import watchdog
from pdn_train.heartbeat import (
    KEPT_ATTEMPTS,
    Word,
    begin_attempt,
    claim_first,
    innermost,
    newest_attempt,
    obituary,
    read_first,
    read_words,
)

WORKER = Path(__file__).with_name("watchdog_worker.py")


@pytest.fixture
def start(tmp_path):
    """start(rank, act, hang_seconds) -> a process that has said its first word."""
    started = []

    def act(rank: int, what: str, hang_seconds: float = 60) -> subprocess.Popen:
        command = [sys.executable, str(WORKER), str(tmp_path), str(rank), str(hang_seconds), what]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield act
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ends(process: subprocess.Popen, seconds: float = 30) -> tuple[int, str]:
    said = process.communicate(timeout=seconds)[1]
    return process.returncode, said


@pytest.mark.parametrize(
    "silent, where, claims",
    [
        (9, "pdn_train/model.py", False),
        (11, "pdn_train/model.py", True),
        (11, "site-packages/torch/distributed/distributed_c10d.py", False),  # it waits for the one that hangs, which has the first word
        (14, "site-packages/torch/distributed/distributed_c10d.py", True),
    ],
)
def test_a_rank_that_waits_for_others_lets_them_speak_first(tmp_path, monkeypatch, silent, where, claims):
    """Allowed 10 s, and 3 intervals of a second more where it waits."""
    watch = watchdog.Watchdog(tmp_path, 0, 2, 10)
    watch._interval, watch._since = 1.0, time.monotonic() - silent
    monkeypatch.setattr(watchdog, "main_stack", lambda: f'  File "train.py", line 1, in run\n  File "/x/{where}", line 7, in step\n')
    found = watch._hangs()
    assert (found is not None) == claims
    assert found is None or (found.state == "failed" and found.error == f"no progress for {silent} s (launch.hang_seconds=10)")


def test_both_done(start, tmp_path):
    both = [start(rank, "work") for rank in (0, 1)]
    (tmp_path / "go").touch()
    assert [ends(process)[0] for process in both] == [0, 0]
    assert [word.state for word in read_words(tmp_path)] == ["done", "done"]
    assert read_first(tmp_path) is None and obituary(tmp_path) == ""


def test_a_rank_that_raises_takes_a_waiting_one_down_and_is_the_first(start, tmp_path):
    waiting, failing = start(0, "wait"), start(1, "raise")
    assert ends(failing)[0] == 1
    code, said = ends(waiting)
    assert code == 1 and "rank 1" in said and "has had enough" in said
    assert "stuck_here" in said, "all threads' stacks"
    first = read_first(tmp_path)
    assert (first.rank, first.step, first.error) == (1, 3, "ValueError: rank 1 has had enough") and "Traceback" in first.trace
    told = obituary(tmp_path)
    assert told.startswith(f"First to fail: rank 1 (process {failing.pid}") and "Traceback" in told and "in stuck_here" in told


def test_what_a_user_can_mend_is_said_without_a_traceback(tmp_path):
    for final, shown in ((True, False), (False, True)):
        Word(0, state="failed", error="RunDirError: in use", trace="Traceback\n  File x", final=final).write(tmp_path)
        assert ("Traceback" in obituary(tmp_path)) == shown and "RunDirError: in use" in obituary(tmp_path)


def test_a_killed_rank_is_missed_by_its_neighbour(start, tmp_path):
    waiting, killed = start(0, "wait"), start(1, "work")
    killed.kill()
    killed.communicate()
    assert ends(waiting)[0] == 1
    first = read_first(tmp_path)
    assert first.rank == 1 and "gone without a word" in first.error
    assert [word.state for word in read_words(tmp_path)] == ["failed", "running"]


def test_the_echo_of_a_killed_rank_is_not_taken_for_the_fault(start, tmp_path):
    """Rank 0 raises because rank 1 was killed: its own watchdog's thread has not looked yet."""
    killed = start(1, "work")
    killed.kill()
    killed.communicate()
    echoing = start(0, "raise")
    assert ends(echoing)[0] == 1
    assert read_first(tmp_path).rank == 1


def test_a_rank_that_hangs_ends_the_job_within_the_time(start, tmp_path):
    started = time.monotonic()
    other, hanging = start(0, "work", 2), start(1, "hang", 2)
    code, said = ends(hanging)
    assert code == 1 and time.monotonic() - started < 15
    assert "no progress for" in said and "launch.hang_seconds=2" in said and "stuck_here" in said
    assert ends(other)[0] == 1
    assert read_first(tmp_path).rank == 1


def test_a_stopped_process_is_silent(start, tmp_path):
    """SIGSTOP stops the watchdog's thread too; the neighbour sees that its file no longer changes."""
    other, stopped = start(0, "work", 2), start(1, "work", 2)
    time.sleep(0.5)
    stopped.send_signal(signal.SIGSTOP)
    assert ends(other)[0] == 1
    stopped.send_signal(signal.SIGCONT)
    first = read_first(tmp_path)
    assert first.rank == 1 and "silent for" in first.error


def test_a_rank_that_never_came_is_named(start, tmp_path):
    assert ends(start(0, "work", 2))[0] == 1
    assert read_first(tmp_path).rank == 1 and "not heard of yet" in read_first(tmp_path).doing


def test_a_rank_that_holds_pythons_lock_is_ended_by_the_timer(start):
    locked = start(0, "lock", 1)
    code, said = ends(locked)
    assert code == 1 and "Timeout" in said


def test_a_folder_that_is_gone_hides_no_error(start, tmp_path):
    working = start(0, "work", 60)
    for file in tmp_path.iterdir():
        file.unlink()
    tmp_path.rmdir()
    time.sleep(1)
    assert working.poll() is None
    tmp_path.mkdir()


def test_the_first_claim_stands(tmp_path):
    assert claim_first(tmp_path, Word(3, error="a")).rank == 3
    assert claim_first(tmp_path, Word(4, error="b")).rank == 3 and read_first(tmp_path).error == "a"


def test_a_word_that_cannot_be_read_is_none(tmp_path):
    (tmp_path / "rank_00000.json").write_text('{"rank": 0, "ho')
    (tmp_path / "rank_00001.json").write_text('{"rank": 1, "unknown": 2}')
    assert read_words(tmp_path) == []


def test_old_attempts_are_removed_and_the_newest_is_found(tmp_path):
    for number in range(KEPT_ATTEMPTS + 3):
        begin_attempt(tmp_path, str(number))
        time.sleep(0.01)
    assert len(list(tmp_path.iterdir())) == KEPT_ATTEMPTS
    assert newest_attempt(tmp_path).name == str(KEPT_ATTEMPTS + 2)
    os.rename(tmp_path / str(KEPT_ATTEMPTS), tmp_path / "older")  # something happens in it: it is the newest now
    assert newest_attempt(tmp_path).name == "older" and newest_attempt(tmp_path / "none") is None


def test_the_innermost_frame():
    assert innermost('  File "a", line 1\n    x\n  File "b", line 2, in f\n    y\nError: z') == 'File "b", line 2, in f'
    assert innermost("") == ""
