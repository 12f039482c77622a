"""What `launch.status` says of runs in every state, from real files."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from launch import status
from pdn_train.heartbeat import Word, claim_first
from pdn_train.rundir import process_start

ME = Word(0, started=process_start(os.getpid()), step=30, doing="computing")


@pytest.fixture
def run(tmp_path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(f"run_dir: {folder}\ndata: {{path: d}}\ntrain: {{steps: 2000}}\n")
    return folder


def say(run: Path, *words: Word, attempt: str = "7.0") -> Path:
    folder = run / "heartbeats" / attempt
    folder.mkdir(parents=True, exist_ok=True)
    for rank, word in enumerate(words):
        replace(word, rank=rank, time=word.time or time.time()).write(folder)
    return folder


def test_a_running_run(run, capsys):
    say(run, ME, ME)
    entry = {"step": 20, "tokens": 2048, "loss": 3.25, "tokens_per_second": 120_000.0, "step_seconds": 2.0}
    (run / "metrics.jsonl").write_text(json.dumps(entry) + "\n" + '{"step": 30, "tok')  # being written
    for name, whole in {"step_0000000010": True, "step_0000000020": True, "step_0000000030": False}.items():
        (run / "checkpoints" / name).mkdir(parents=True)
        if whole:
            (run / "checkpoints" / name / "COMPLETE").touch()
    assert status.main([str(run)]) == 0
    said = capsys.readouterr().out
    for part in ("running", "20/2000", "3.2500", "120,000 tok/s", "ETA 1:06:00", "step_0000000020", "restarts    0"):
        assert part in said


@pytest.mark.parametrize(
    "words, state",
    [
        ([], "not started"),
        ([ME, ME], "running"),
        ([ME, replace(ME, pid=1, started="0")], "killed"),
        ([replace(ME, machine="another", time=time.time() - 200)] * 2, "silent"),
        ([replace(ME, state="stopped"), replace(ME, state="done")], "stopped"),
        ([replace(ME, state="done")] * 2, "done"),
        ([replace(ME, state="failed"), ME], "failed"),
    ],
)
def test_states(run, words, state):
    say(run, *words)
    assert status.status(run).state == state


def test_a_failed_run_says_how(run, capsys):
    folder = say(run, replace(ME, state="failed", error="ValueError: x"), replace(ME, state="failed"), attempt="7.2")
    claim_first(folder, replace(ME, rank=1, error="OSError: the disk", trace="Traceback ..."))
    ending = {"job": "7", "restart": 1, "code": 1, "how": "crashed", "step": 29, "error": "OSError: the disk", "time": 0.0, "again": True}
    (run / "endings.jsonl").write_text(json.dumps(ending) + "\n")
    status.main([str(run)])
    said = capsys.readouterr().out
    assert "First to fail: rank 1" in said and "start 1: crashed at step 29: OSError: the disk" in said and "restarts    1" in said


def test_several_runs_are_a_table(run, tmp_path, capsys):
    say(run, replace(ME, state="done"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.yaml").write_text((run / "config.yaml").read_text())
    assert status.main([str(run), str(other)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and "done" in lines[1] and "not started" in lines[2]
    assert lines[0].index("state") == lines[1].index("done") == lines[2].index("not started")


def test_damaged_lines_are_passed_over(run):
    entry = {"step": 20, "loss": 3.25, "tokens_per_second": 1.0, "step_seconds": 2.0}
    (run / "metrics.jsonl").write_bytes(json.dumps(entry).encode() + b'\n{"step": 30}\n5\n\x00\xff\xfe')
    (run / "endings.jsonl").write_bytes(b"null\n{}\n\xff")
    assert status.status(run).step == 20


def test_one_that_is_no_run_does_not_hide_the_others(run, tmp_path, capsys):
    assert status.main([str(tmp_path / "none"), str(run)]) == 2
    said = capsys.readouterr()
    assert "none is not a run folder" in said.err and "not started" in said.out


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert status.main([str(tmp_path)]) == 2 and "is not a run folder" in capsys.readouterr().err
