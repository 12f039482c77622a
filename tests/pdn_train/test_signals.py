"""Signals that reach a run of one process: while it is starting, from a terminal that closes, under nohup."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from pdn_train.signals import StopRequest


def listens(process: subprocess.Popen, number: int) -> bool:
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())[1]
    return bool(int(caught, 16) >> (number - 1) & 1)


def test_a_signal_while_torch_is_being_imported(make_whole_run):
    run = make_whole_run("early")
    process = subprocess.Popen(
        [sys.executable, "-m", "pdn_train.train", run.config], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    run.wait(lambda: listens(process, signal.SIGTERM))
    assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 75, said
    assert "stopped at step 0 by SIGTERM, nothing is lost" in said.splitlines()[-1]
    assert run.checkpoints() == ["step_0000000000"]


def take_terminal() -> None:
    """In a new process: standard input becomes its own terminal, whose end it hears of even where the tests run under nohup."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_a_terminal_that_closes(make_whole_run):
    """A real one: the kernel sends SIGHUP, and writing fails from then on."""
    run = make_whole_run("hangup")
    ours, terminal = os.openpty()
    command = [sys.executable, "-m", "pdn_train.train", str(run.config), "train.steps=4000"]
    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    process = subprocess.Popen(command, **streams, start_new_session=True, preexec_fn=take_terminal)
    os.close(terminal)
    run.wait(lambda: len(run.metrics()) >= 2)
    os.close(ours)
    assert process.wait(timeout=240) == 75
    assert f"step_{len(run.metrics()):010d}" in run.checkpoints() and not (run.path / "lease.json").exists()
    assert "by SIGHUP" in (run.path / "logs" / "rank_00000.log").read_text().splitlines()[-1]


def test_the_exit_code_is_heard_without_a_reader():
    code = "import sys; from pdn_train.signals import leave; sys.stdin.read(); print('last words'); leave(75)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    process.stdout.close()
    process.stdin.close()
    assert process.wait(timeout=60) == 75


@pytest.fixture
def handlers():
    numbers = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("before, name", [(signal.SIG_DFL, "SIGHUP"), (signal.SIG_IGN, None)], ids=["alone", "nohup"])
def test_what_nohup_ignores_stays_ignored(handlers, before, name):
    signal.signal(signal.SIGHUP, before)
    stop = StopRequest()
    os.kill(os.getpid(), signal.SIGHUP)
    deadline = time.monotonic() + 1
    while stop.name is None and name is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert stop.name == name


def test_the_first_signal_counts(handlers):
    stop = StopRequest()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        os.kill(os.getpid(), number)
    assert stop.name == "SIGTERM"
