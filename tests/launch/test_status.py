"""What `launch.status` says of runs in every state, from real files."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from launch import status
from launch.requeue import Ending, read_endings
from pdn_train.heartbeat import Word, claim_first
from pdn_train.lease import process_start
from pdn_train.rundir import RunDir

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


def submit(run: Path, folder: str, job: str, cluster: str = "slurm") -> None:
    """What `launch.submit` leaves of a job that it has handed over."""
    where = run / "submissions" / folder
    where.mkdir(parents=True, exist_ok=True)
    (where / "config.yaml").write_text((run / "config.yaml").read_text() + f"launch: {{cluster: {cluster}}}\n")
    (where / f"{job}_submitted.pkl").touch()


def test_a_running_run(run, capsys):
    say(run, ME, ME)
    entry = {"step": 20, "tokens": 2048, "loss": 3.25, "tokens_per_second": 120_000.0, "step_seconds": 2.0}
    (run / "metrics.jsonl").write_text(json.dumps(entry) + "\n" + '{"step": 30, "tok')  # being written
    for name, whole in {"step_0000000010": True, "step_0000000020": True, "step_0000000030": False}.items():
        (run / "checkpoints" / name).mkdir(parents=True)
        if whole:
            (run / "checkpoints" / name / "COMPLETE").touch()
    shutil.copytree(run / "checkpoints" / "step_0000000020", copy := run / "checkpoints" / "step_0000000050")
    (copy / "state.json").write_text('{"progress": {"step": 20}}')
    (run / "checkpoints" / "step_0000000020" / "state.json").write_text("null")
    assert status.main([str(run)]) == 0
    said = capsys.readouterr().out
    for part in ("running", "30/2000", "3.2500 at step 20", "120,000 tok/s", "ETA 1:05:40", "step_0000000020", "restarts    0"):
        assert part in said


@pytest.mark.parametrize(
    "words, step",
    [
        ([replace(ME, step=27, state="stopped")] * 2, 27),
        ([replace(ME, step=29, started="0"), replace(ME, step=30, started="0")], 30),  # killed; it goes on from 27
        ([replace(ME, step=-1)] * 2, 27),  # starts again
        ([], 27),
        ([replace(ME, step=16)] * 2, 20),  # said seconds ago, before the line was written
    ],
    ids=["stopped", "killed", "starting", "no words", "older words"],
)
def test_a_run_stopped_after_its_last_line_in_metrics(run, capsys, words, step):
    """Its checkpoint is of a later step; loss and speed are the line's, and say so, in the table too."""
    say(run, *words)
    entry = {"step": 20, "loss": 3.25, "tokens_per_second": 120_000.0, "step_seconds": 2.0}
    (run / "metrics.jsonl").write_text(json.dumps(entry) + "\n")
    (run / "checkpoints" / "step_0000000027").mkdir(parents=True)
    (run / "checkpoints" / "step_0000000027" / "COMPLETE").touch()
    status.main([str(run)])
    said = capsys.readouterr().out
    assert f"step        {step}/2000\n" in said and "loss        3.2500 at step 20\n" in said and "checkpoint  step_0000000027\n" in said
    status.main([str(run), str(run)])
    said = capsys.readouterr().out.splitlines()[1]
    assert f" {step}/2000 " in said and " 3.2500 at 20 " in said and " step_0000000027 " in said


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


def test_a_loss_that_is_not_finite_is_not_shown(run, capsys):
    entry = {"step": 20, "loss": None, "grad_norm": None, "tokens_per_second": 9.0, "step_seconds": 2.0, "mfu": None}
    (run / "metrics.jsonl").write_text(json.dumps(entry) + "\n")
    assert status.main([str(run)]) == status.main([str(run), str(run)]) == 0
    assert "loss        -\n" in capsys.readouterr().out


def test_a_failed_run_says_how(run, capsys):
    folder = say(run, replace(ME, state="failed", error="ValueError: x"), replace(ME, state="failed"), attempt="7.2")
    claim_first(folder, replace(ME, rank=1, error="OSError: the disk", trace="Traceback ..."))
    submit(run, "0001", "7")
    ending = Ending("0001", "7", 1, 1, "crashed", 29, "OSError: the disk", 0.0)
    (run / "endings.jsonl").write_text(json.dumps(asdict(ending)) + "\n")
    status.main([str(run)])
    said = capsys.readouterr().out
    assert "First to fail: rank 1" in said and "start 1: crashed at step 29: OSError: the disk" in said and "restarts    2" in said


def test_a_start_that_was_refused_leaves_the_run_as_it_was(run, capsys):
    """By a fault that another start would meet, before its first step; not by one in the middle, and the only start is shown."""
    refused = replace(ME, state="failed", step=-1, final=True, error="CheckpointError: optim.lr: 0.002 then, 0.001 now", time=time.time())
    say(run, refused, refused, attempt="1.0")
    assert status.status(run).state == "failed" and status.status(run).refused is None
    done = replace(ME, state="done", step=140)
    say(run, done, done, attempt="2.0")
    say(run, refused, replace(refused, rank=1, final=False, error="Disagreement: rank 0"), attempt="3.0")
    assert status.status(run).state == "done"
    status.main([str(run)])
    said = capsys.readouterr().out
    assert "refused     a later start: CheckpointError: optim.lr: 0.002 then" in said and "First to fail" not in said
    say(run, replace(refused, step=141), attempt="4.0")
    assert status.status(run).state == "failed"


def hold(run: Path, **owner: object) -> None:
    """Rank 0 of this process holds the run folder."""
    words = {"machine": ME.machine, "pid": ME.pid, "started": ME.started, "time": time.time()}
    (run / "lease.json").write_text(json.dumps({**words, **owner}))


@pytest.mark.parametrize("host", [ME.machine, "another"], ids=["here", "elsewhere"])
def test_the_job_is_the_one_that_owns_the_run_not_one_that_was_refused(run, host):
    """The refused one came later, has spoken later, and its number is the higher one."""
    owns = replace(ME, machine=host)
    submit(run, "0001", "41")
    say(run, owns, owns, attempt="41.3")
    submit(run, "0002", "42")
    say(run, replace(ME, pid=2, state="failed"), replace(ME, pid=3, state="failed"), attempt="42.0")
    hold(run, machine=host)
    found = status.status(run)
    assert (found.job, found.state, found.restarts) == ("41", "running", 3)
    assert found.job in status.detail(found) and "First to fail" not in status.detail(found)


@pytest.mark.parametrize("lost", [{"started": "0"}, {"machine": "another", "time": 0.0}])
def test_a_lease_whose_owner_is_gone_names_nobody(run, lost):
    submit(run, "0001", "41")
    say(run, replace(ME, **{key: value for key, value in lost.items() if key != "time"}), attempt="41.0")
    submit(run, "0002", "42")
    say(run, replace(ME, pid=2, started="0"), attempt="42.0")
    hold(run, **lost)
    assert (status.status(run).job, status.status(run).state) == ("42", "killed")


@pytest.mark.parametrize(
    "queue, state, shown",
    [
        ({"41": "RUNNING", "42": "PENDING"}, "running", ("41", "running")),
        ({"41": "PENDING", "42": "PENDING"}, "stopped", ("41", "pending")),  # requeued
        ({"42": "PENDING"}, "stopped", ("42", "pending")),
        ({"42": "RUNNING"}, "done", ("42", "running")),
        ({}, "done", ("41", "done")),  # 42 has been cancelled before it began
        ({"42": "PENDING"}, "running", ("41", "running")),  # squeue no longer knows a job that has just ended
    ],
)
def test_a_submission_that_waits(run, tmp_path, monkeypatch, queue, state, shown):
    """With a program that answers for SLURM."""
    (tmp_path / "squeue").write_text('#!/bin/bash\ncat "${0%/*}/queue_$3" 2>/dev/null\n')
    (tmp_path / "squeue").chmod(0o755)
    for job, said in queue.items():
        (tmp_path / f"queue_{job}").write_text(said + "\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    submit(run, "0001", "41")
    say(run, replace(ME, state=state), attempt="41.0")
    submit(run, "0002", "42")
    assert (status.status(run).job, status.status(run).state) == shown


def test_a_first_submission_that_waits_and_starts_on_this_machine(run):
    submit(run, "0001", "41", cluster="local")
    assert (status.status(run).job, status.status(run).state) == ("41", "not started")
    submit(run, "0001", "43", cluster="local")
    say(run, ME, attempt="43.0")
    assert (status.status(run).job, status.status(run).restarts) == ("43", 1)


def test_what_torchrun_started_is_no_job_whatever_was_submitted_before(run):
    submit(run, "0001", "41", cluster="local")
    say(run, replace(ME, state="done"), attempt="41.0")
    say(run, ME, attempt="1790000000.123-77")
    assert (status.status(run).job, status.status(run).state, status.status(run).restarts) == (None, "running", 0)


@pytest.mark.parametrize("state, eta", [("running", "ETA 1:05:40"), ("stopped", "ETA -"), ("done", "ETA -"), ("failed", "ETA -")])
def test_only_a_run_that_trains_has_a_time_of_arrival(run, state, eta, capsys):
    say(run, replace(ME, state=state))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 20, "step_seconds": 2.0}) + "\n")
    status.main([str(run)])
    assert eta in capsys.readouterr().out
    status.main([str(run), str(run)])
    assert eta.removeprefix("ETA ") in capsys.readouterr().out.splitlines()[1].split()


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
    (run / "metrics.jsonl").write_bytes(json.dumps(entry).encode() + b'\n{"step": 30}\n5\n\x00\xff\xfe\n')
    for odd in ({"step": "30"}, {"step_seconds": None}, {"loss": "low"}, {"tokens_per_second": []}):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(entry | {"step": 30} | odd) + "\n")
    ending = Ending("0001", "7", 0, 75, "stopped", 20, None, 0.0)
    (run / "endings.jsonl").write_bytes(b"null\n{}\n" + json.dumps(asdict(ending)).encode() + b"\n\xff")
    assert status.status(run).step == 20 and read_endings(RunDir(run)) == [ending]


def test_one_that_is_no_run_does_not_hide_the_others(run, tmp_path, capsys):
    assert status.main([str(tmp_path / "none"), str(run)]) == 2
    said = capsys.readouterr()
    assert said.err == f"error: {tmp_path / 'none'} is not a folder: name that of a run, its run_dir\n"
    assert "not started" in said.out


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert status.main([str(tmp_path)]) == 2
    nothing = "is not a run folder: it has no config.yaml; name a folder that is some configuration's run_dir"
    assert capsys.readouterr().err == f"error: {tmp_path} {nothing}\n"


def test_a_folder_of_runs_names_them(tmp_path, capsys):
    """The first few of them; or the sweeps, where it has no runs."""
    (tmp_path / "mqar" / "64x256" / "gdn" / "only" / "seed_1").mkdir(parents=True)
    (tmp_path / "mqar" / "64x256" / "gdn" / "only" / "seed_1" / "config.yaml").touch()
    assert status.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith(f"it has no config.yaml; inside it are sweeps: {tmp_path / 'mqar'}\n")
    names = [f"run_{n}" for n in range(10)]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").touch()
    assert status.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("; inside it are runs: " + ", ".join(str(tmp_path / name) for name in names[:8]) + ", ...\n")


def test_a_sweep_s_folder_is_named_as_that(tmp_path, capsys):
    seed = tmp_path / "64x256" / "gdn" / "only" / "seed_1"
    seed.mkdir(parents=True)
    assert status.main([str(tmp_path)]) == 2 and "it has no config.yaml; name a" in capsys.readouterr().err
    (seed / "config.yaml").touch()
    assert status.main([str(tmp_path)]) == 2
    command = f"`python -m pdn_train.sweep SWEEP.yaml --folder {tmp_path} --summary`"
    assert capsys.readouterr().err.endswith(f"it has no config.yaml; it is a sweep's, for {command}, or for one of its runs {seed}\n")
    (seed / "config.yaml").unlink()
    (tmp_path / "summary.json").touch()
    assert status.main([str(tmp_path)]) == 2 and capsys.readouterr().err.endswith(command + "\n")


def test_a_run_beyond_its_last_step_says_so(run, capsys):
    """A resume with fewer train.steps than it has behind it writes these down, and ends; while it starts, nothing is left to wait for."""
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("2000", "20") + "optim: {warmup_steps: 1}\n")
    say(run, ME)
    (run / "metrics.jsonl").write_text(json.dumps({"step": 30, "step_seconds": 2.0}) + "\n")
    status.main([str(run)])
    said = capsys.readouterr().out
    assert "step        30/20 (beyond train.steps)\n" in said and "ETA 0:00:00" in said
    status.main([str(run), str(run)])
    assert " 30/20 (beyond train.steps) " in capsys.readouterr().out.splitlines()[1]


def test_checkpoints_that_cannot_be_read_are_named(run, capsys):
    (run / "checkpoints").touch()  # as much of a folder as one without the right to list it
    assert status.main([str(run)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: cannot read {run}: ") and "checkpoints" in error


def test_files_that_cannot_be_read_are_named(run, capsys):
    (run / "metrics.jsonl").mkdir()
    assert status.main([str(run)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: cannot read {run}: ") and "metrics.jsonl" in error
