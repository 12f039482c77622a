"""Whether a job starts again: the rules on endings, and endings from real files of last words."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest

from launch import requeue
from launch.requeue import Ending, decide, ending, read_endings
from launch.snapshot import Submission
from pdn_train.config import LaunchConfig
from pdn_train.heartbeat import Word, claim_first

CRASH = Ending("0001", "7", 0, 1, "crashed", 12, "OSError: x", 0.0)


@pytest.mark.parametrize(
    "now, before, settings, again, why",
    [
        (replace(CRASH, how="done"), [], {}, False, "done"),
        (replace(CRASH, how="stopped"), [], {}, True, "stopped with a checkpoint"),
        (replace(CRASH, how="stopped"), [replace(CRASH, how="stopped")] * 5, {}, True, "stopped with a checkpoint, but without a step"),
        (
            replace(CRASH, how="stopped"),
            [CRASH],
            {},
            True,
            "stopped with a checkpoint$",
        ),  # it crashed there before
        (replace(CRASH, how="stopped"), [], {"requeue": False}, False, "launch.requeue=false"),
        (replace(CRASH, how="stopped", restart=3), [], {"max_requeues": 3}, False, "launch.max_requeues=3 are used up"),
        (replace(CRASH, how="stopped", restart=2), [], {"max_requeues": 3}, True, "stopped with a checkpoint"),
        (replace(CRASH, how="refused"), [], {}, False, "somebody has to mend this"),
        (CRASH, [], {}, True, "a crash"),
        (CRASH, [replace(CRASH, step=11)], {}, True, "a crash"),
        (CRASH, [CRASH], {}, False, "it crashed twice at step 12"),
        (CRASH, [CRASH, replace(CRASH, how="stopped", step=14)], {}, True, "a crash"),
        (replace(CRASH, step=-1), [replace(CRASH, step=-1)], {}, False, "it crashed twice before the first step"),
    ],
)
def test_the_rules(now, before, settings, again, why):
    decided = decide(before, now, LaunchConfig(**settings))
    assert decided[0] == again and re.match(why, decided[1])


def words(folder, *states: str, final: bool = False) -> None:
    for rank, state in enumerate(states):
        Word(rank, state=state, step=5 + rank, final=final and rank == 1).write(folder)


@pytest.mark.parametrize(
    "states, final, code, how",
    [
        (("done", "done"), False, 0, "done"),
        (("stopped", "stopped"), False, 75, "stopped"),
        (("stopped", "stopped"), False, 137, "stopped"),  # killed while leaving, with everything said
        (("failed", "failed"), True, 137, "refused"),
        (("failed", "failed"), False, 1, "crashed"),
        (("failed", "running"), False, 137, "crashed"),
        (("stopped", "running"), False, 137, "crashed"),
        ((), False, 1, "crashed"),
        ((), False, 140, "stopped"),  # SIGUSR2 before the ranks could listen
        ((), False, 143, "stopped"),
    ],
)
def test_how_it_ended(tmp_path, states, final, code, how):
    words(tmp_path, *states, final=final)
    found = ending(tmp_path, "0001", "7", 0, code)
    assert (found.how, found.step) == (how, max((5 + rank for rank in range(len(states))), default=-1))


def test_the_first_fault_is_the_ending_s_error(tmp_path):
    words(tmp_path, "failed", "failed")
    claim_first(tmp_path, Word(1, state="failed", error="ValueError: x"))
    assert ending(tmp_path, "0001", "7", 0, 1).error == "ValueError: x"


@pytest.fixture
def submission(tmp_path) -> Submission:
    folder = tmp_path / "run" / "submissions" / "0001"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"run_dir: {tmp_path / 'run'}\ndata: {{path: d}}\n")
    return Submission(folder)


def call(submission: Submission, code: int, restart: int, *states: str, job: str = "7") -> None:
    attempt = submission.run_dir.heartbeats / f"{job}.{restart}"
    attempt.mkdir(parents=True, exist_ok=True)
    words(attempt, *states)
    requeue.main(str(submission.folder), str(code), job, str(restart))


def test_the_answers_to_the_batch_script(submission, capsys):
    call(submission, 75, 0, "stopped", "stopped")
    call(submission, 1, 1, "failed", "running")
    assert capsys.readouterr().out == "again\nagain\n"
    call(submission, 1, 2, "failed", "running")
    out, said = capsys.readouterr()
    assert out == "enough\n"
    assert "First to fail: rank 1" in said and "not started again: it crashed twice at step 6" in said
    call(submission, 0, 3, "done", "done")
    assert capsys.readouterr().out == "enough\n"
    assert [(e.job, e.restart, e.how) for e in read_endings(submission.run_dir)] == [
        ("7", 0, "stopped"),
        ("7", 1, "crashed"),
        ("7", 2, "crashed"),
        ("7", 3, "done"),
    ]


def test_another_submission_starts_with_a_clean_sheet(submission, capsys):
    """On this machine another start is another job, and of the same submission all the same."""
    call(submission, 1, 0, "failed", "failed")
    other = Submission(submission.folder.with_name("0002"))
    shutil.copytree(submission.folder, other.folder)
    call(other, 1, 0, "failed", "failed", job="8")
    call(submission, 1, 1, "failed", "failed", job="9")
    assert capsys.readouterr().out == "again\nagain\nenough\n"


def test_a_job_that_never_spoke_names_its_logs(submission, capsys):
    requeue.main(str(submission.folder), "1", "9", "0")
    out, said = capsys.readouterr()
    assert out == "again\n" and str(submission.run_dir.submissions) in said


def test_a_line_cut_short_by_a_full_disk_is_passed_over(submission):
    call(submission, 75, 0, "stopped")
    with submission.run_dir.endings.open("a") as file:
        file.write(json.dumps({"job": "7"})[:5] + "\n" + 'null\n{"job": "7"}\n')
    assert len(read_endings(submission.run_dir)) == 1
