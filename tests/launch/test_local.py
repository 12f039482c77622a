"""Runs through the launcher on this machine: what fails is heard, ends the job with a code that is not 0, and goes on where it can."""

from __future__ import annotations

import fcntl
import io
import os
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from launch import local
from pdn_train.heartbeat import Word, newest_attempt, read_words

HOOKS = Path(__file__).parent.parent / "faults" / "hooks"


def start(run, *settings: str, faults: tuple[dict, ...] = (), terminal: int | None = None) -> subprocess.Popen:
    """terminal: one that becomes the launcher's own, and takes its output; otherwise that goes to a pipe."""
    environment = {**os.environ, "PYTHONPATH": f"{HOOKS}:{os.environ.get('PYTHONPATH', '')}", "FAULT_PLAN": run.plan(*faults)}
    command = [sys.executable, "-m", "launch.submit", str(run.config), *settings]
    return subprocess.Popen(
        command,
        env=environment,
        stdin=terminal,
        stdout=subprocess.PIPE if terminal is None else terminal,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=None if terminal is None else take_terminal,
    )


def take_terminal() -> None:
    """In a new process: standard input becomes its own terminal, whose end it hears of even where the tests run under nohup."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def finish(process: subprocess.Popen, code: int) -> str:
    said, _ = process.communicate(timeout=400)
    assert process.returncode == code, said
    return said


def test_the_uninterrupted_run_leaves_what_a_run_leaves(uninterrupted):
    assert [entry["step"] for entry in uninterrupted.metrics()] == list(range(1, uninterrupted.STEPS + 1))
    assert [(e["how"], e["step"], e["again"]) for e in uninterrupted.endings()] == [("done", 14, False)]
    assert (uninterrupted.path / "code" / "yaml").is_dir(), "the whole snapshot, not the Python files alone"
    assert not (uninterrupted.path / "lease.json").exists()


def test_a_rank_that_raises_is_tried_once_more_and_then_heard(make_whole_run):
    run = make_whole_run("raises")
    said = finish(start(run, faults=({"rank": 1, "at": "computing", "step": 3, "act": "raise", "again": True},)), 1)
    assert [(e["how"], e["step"], e["again"]) for e in run.endings()] == [("crashed", 3, True), ("crashed", 3, False)]
    assert "First to fail: rank 1" in said and "OSError: [Errno 5] a fault of the test" in said and "Traceback" in said
    assert "it crashed twice at step 3" in said
    assert "OSError: [Errno 5] a fault of the test" in run.said(), "submitit's own log of the task"


def test_sigterm_to_the_launcher_then_the_same_command(make_whole_run, uninterrupted):
    """Rank 1 was killed before: the job has started again by itself. The signal comes in the middle of a save, and twice."""
    run = make_whole_run("term")
    faults = (
        {"rank": 1, "at": "computing", "step": 3, "act": "kill"},
        {"rank": 0, "at": "saving a checkpoint", "step": 8, "act": "signal"},
    )
    process = start(run, faults=faults)
    run.wait(lambda: run.met(1))
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    said = finish(process, 75)
    assert [(e["how"], e["again"]) for e in run.endings()] == [("crashed", True), ("stopped", False)]
    assert run.endings()[0]["error"].startswith("the process is gone without a word") and "rank 1" in said
    assert run.checkpoints() == ["step_0000000004", "step_0000000008"] and not (run.path / "lease.json").exists()
    words = read_words(newest_attempt(run.path / "heartbeats"))
    assert {(word.state, word.told) for word in words} == {("stopped", "SIGTERM")}, "what the launcher reads where it was not told itself"
    finish(start(run), 0)
    assert run.story() == uninterrupted.story()


@pytest.mark.parametrize(
    "signals, stopped_by",
    [((None, None), None), (("SIGUSR2", "SIGUSR2"), None), ((None, "SIGTERM"), "SIGTERM"), (("SIGINT", None), "SIGINT")],
)
def test_a_signal_past_the_launcher_is_a_wish_to_stop_unless_the_time_limit_sent_it(tmp_path, signals, stopped_by):
    for rank, told in enumerate(signals):
        Word(rank, state="stopped", told=told).write(tmp_path)
    assert local.told(tmp_path) == stopped_by


@pytest.mark.long
def test_sigterm_to_the_controller_alone(make_whole_run):
    """It hands the signal on to the ranks, and the launcher hears of it from them only."""
    run = make_whole_run("terminated")
    process = start(run, faults=({"rank": 1, "at": "reading samples", "step": 6, "act": "signal"},))
    controller = int(process.stdout.readline().split()[1])
    run.wait(run.met)
    os.kill(controller, signal.SIGTERM)
    said = finish(process, 75)
    assert [(e["how"], e["step"], e["again"]) for e in run.endings()] == [("stopped", 6, False)]
    assert "stopped at step 6; not started again: SIGTERM; the same command goes on from there" in said


def test_one_rank_in_this_process(make_whole_run):
    run = make_whole_run("debug")
    settings = ["launch.cluster=debug", "launch.gpus_per_node=1", "train.steps=2", "optim.warmup_steps=0"]
    finish(start(run, *settings), 0)
    assert [entry["step"] for entry in run.metrics()] == [1, 2]


def test_ranks_that_cannot_start_are_heard(make_whole_run):
    said = finish(start(run := make_whole_run("nopython"), "launch.python=/no/such/python"), 1)
    assert said.count(f"    python -m launch.status {run.path}\n    Ctrl-C  ") == 2, "once a start"
    assert "/no/such/python: No such file or directory" in said and "it crashed twice before the first step" in said


@pytest.mark.long
def test_a_signal_before_the_ranks_listen(make_whole_run):
    """It waits until they do: sooner it would kill them, or some, for which the others would wait."""
    run = make_whole_run("unborn")
    process = start(run)
    process.stdout.readline()  # the job has started just now
    process.send_signal(signal.SIGTERM)
    said = finish(process, 75)
    assert run.checkpoints() == ["step_0000000000"] and "starting again" not in said


@pytest.mark.long
def test_ranks_end_with_the_process_that_started_them(make_whole_run):
    """submitit's controller is killed: no rank stays behind, and the job goes on."""
    run = make_whole_run("controller")
    process = start(run, faults=({"rank": 1, "at": "computing", "step": 6, "act": "hold"},))
    controller = int(process.stdout.readline().split()[1])
    run.wait(run.met)
    os.kill(controller, signal.SIGKILL)
    finish(process, 0)
    assert [e["how"] for e in run.endings()] == ["crashed", "done"]


@pytest.mark.long
def test_the_time_limit_on_this_machine(make_whole_run, uninterrupted):
    """submitit's controller sends SIGUSR2 a minute before the time is over: a checkpoint, and the job goes on by itself."""
    run = make_whole_run("limit")
    finish(
        start(
            run, "launch.minutes=3", "launch.warning_seconds=60", faults=({"rank": 0, "at": "reading samples", "step": 6, "act": "signal"},)
        ),
        0,
    )
    assert [(e["how"], e["again"]) for e in run.endings()] == [("stopped", True), ("done", False)]
    assert run.story() == uninterrupted.story()


def test_a_reader_that_is_gone_does_not_end_the_launcher(tmp_path, monkeypatch):
    (tmp_path / "log").write_text("step 1\n")
    ours, theirs = os.pipe()
    os.close(ours)
    pipe = io.TextIOWrapper(io.FileIO(theirs, "w"), write_through=True)
    monkeypatch.setattr(sys, "stdout", pipe)
    assert local.show(tmp_path / "log", 0) == 7 and local.show(tmp_path / "log", 7) == 0
    pipe.detach().close()


@pytest.mark.long
def test_the_terminal_closes(make_whole_run, uninterrupted):
    """A real one: writing to it fails, the kernel sends SIGHUP to its first process, and a shell to the whole job."""
    run = make_whole_run("hangup")
    ours, terminal = os.openpty()
    process = start(run, faults=({"rank": 0, "at": "reading samples", "step": 6, "act": "signal"},), terminal=terminal)
    os.close(terminal)
    run.wait(run.met)
    os.close(ours)
    os.killpg(process.pid, signal.SIGHUP)
    assert process.wait(timeout=400) == 75
    assert [(e["how"], e["step"], e["again"]) for e in run.endings()] == [("stopped", 6, False)]
    assert "stopped at step 6 by SIGTERM" in run.said(), "the ranks hear it from the launcher, not on their own"
    finish(start(run), 0)
    assert run.story() == uninterrupted.story()


@pytest.mark.long
def test_a_signal_while_a_rank_starts(make_whole_run):
    """torch is not imported yet, and submitit's own handler would requeue from there."""
    run = make_whole_run("early")
    process = start(run, faults=({"rank": 1, "at": "importing torch", "act": "signal"},))
    run.wait(run.met)
    process.send_signal(signal.SIGTERM)
    finish(process, 75)
    assert run.checkpoints() == ["step_0000000000"] and [e["how"] for e in run.endings()] == ["stopped"]
