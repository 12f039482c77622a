"""Runs on a real SLURM, interrupted as clusters do it: they end with the metrics of the run that nothing interrupts, or one clear error."""

from __future__ import annotations

import os
import signal
import sys

import pytest


def told(run) -> list[tuple]:
    return [(ending["restart"], ending["how"], ending["again"]) for ending in run.endings()]


def test_killed_requeued_from_outside_and_warned(slurm, make_whole_run, uninterrupted):
    """Rank 1 is killed at step 2; `scontrol requeue` at step 6 calls no hook; at step 10 the warning reaches rank 1 alone, twice."""
    run = make_whole_run("chain")
    at = [{"rank": rank, "at": "reading samples", "step": step} for rank, step in ((1, 2), (0, 6), (1, 10))]
    faults = ({**at[0], "act": "kill"}, {**at[1], "act": "signal"}, {**at[2], "act": "signal"})
    job = slurm.submit(run, faults=faults)
    run.wait(lambda: run.met(1))
    slurm.call("scontrol", "requeue", job)
    run.wait(lambda: run.met(2))
    for _ in range(2):
        os.kill(int((run.folder / "fault_2").read_text()), signal.SIGUSR2)
    run.wait(slurm.ended(job))
    assert slurm.state(job)["JobState"] == "COMPLETED" and slurm.state(job)["Restarts"] == "3", run.said()
    assert run.story() == uninterrupted.story()
    said = run.said()
    assert "First to fail: rank 1" in said, "srun's and the watchdog's word of the killed rank"
    assert "resumed at step 10" in said and "resumed at step 6" in said, "each warning ends in a checkpoint of the step it met"
    assert (0, "crashed", True) in told(run) and (2, "stopped", True) in told(run) and (3, "done", False) in told(run)


def test_cancelled_with_a_checkpoint(slurm, make_whole_run):
    run = make_whole_run("cancel")
    job = slurm.submit(run, faults=({"rank": 0, "at": "reading samples", "step": 5, "act": "signal"},))
    run.wait(run.met)
    assert f"running, job {job}" in slurm.call(sys.executable, "-m", "launch.status", str(run.path))
    slurm.call("scancel", job)
    run.wait(slurm.ended(job))
    run.wait(lambda: not (run.path / "lease.json").exists())
    assert slurm.state(job)["JobState"] == "CANCELLED"
    assert run.checkpoints() == ["step_0000000004", "step_0000000005"]
    assert slurm.call("squeue", "-h", "-j", job, check=False).strip() == "", "a cancelled job does not come back"


@pytest.mark.long
def test_the_time_limit(slurm, make_whole_run, uninterrupted):
    run = make_whole_run("limit")
    settings = ["launch.minutes=3", "launch.warning_seconds=60"]  # two minutes until the warning: a busy machine starts slowly
    job = slurm.submit(run, *settings, faults=({"rank": 0, "at": "reading samples", "step": 6, "act": "signal"},))
    run.wait(slurm.ended(job), 400)
    assert slurm.state(job)["JobState"] == "COMPLETED", run.said()
    assert told(run) == [(0, "stopped", True), (1, "done", False)]
    assert run.story() == uninterrupted.story()


@pytest.mark.long
def test_preempted(slurm, make_whole_run, uninterrupted):
    run = make_whole_run("preempted")
    job = slurm.submit(run, faults=({"rank": 1, "at": "reading samples", "step": 6, "act": "signal"},))
    run.wait(run.met)
    urgent = slurm.call("sbatch", "--parsable", "-p", "urgent", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1").strip()
    run.wait(slurm.ended(urgent))
    run.wait(slurm.ended(job))
    assert slurm.state(job)["JobState"] == "COMPLETED" and slurm.state(job)["Restarts"] == "1", run.said()
    assert run.story() == uninterrupted.story() and "resumed at step 6" in run.said()


@pytest.mark.long
def test_a_node_is_lost(slurm, make_whole_run, uninterrupted):
    """All that runs on it is gone at once; SLURM gives the node up and starts the job again when the node is back."""
    run = make_whole_run("node")
    faults = ({"rank": 1, "at": "reading samples", "step": 6, "act": "hang"},)
    job = slurm.submit(run, "launch.nodes=1", "launch.gpus_per_node=2", "launch.sbatch_extra=[--nodelist=node2]", faults=faults)
    run.wait(run.met)
    slurm.lose("node2", job)
    run.wait(lambda: slurm.state(job)["Restarts"] == "1", 120)
    slurm.call("slurmd", "-N", "node2")
    run.wait(slurm.ended(job), 300)
    assert slurm.state(job)["JobState"] == "COMPLETED", f"{slurm.state(job)}\n{run.said()}"
    assert run.story() == uninterrupted.story() and "resumed at step 4" in run.said()


@pytest.mark.long
def test_a_crash_at_the_same_step_stops_with_its_traceback(slurm, make_whole_run):
    run = make_whole_run("loops")
    job = slurm.submit(run, faults=({"rank": 1, "at": "computing", "step": 3, "act": "raise", "again": True},))
    run.wait(slurm.ended(job))
    assert slurm.state(job)["JobState"] == "FAILED" and told(run) == [(0, "crashed", True), (1, "crashed", False)]
    said = run.said()
    assert "it crashed twice at step 3" in said and said.count("OSError: [Errno 5] a fault of the test") >= 2 and "Traceback" in said


@pytest.mark.long
def test_a_second_job_on_the_folder_is_refused_and_not_requeued(slurm, make_whole_run):
    run = make_whole_run("second")
    first = slurm.submit(run, faults=({"rank": 0, "at": "reading samples", "step": 2, "act": "hold"},))
    run.wait(run.met)
    second = slurm.submit(run)
    run.wait(slurm.ended(second))
    assert slurm.state(second)["JobState"] == "FAILED" and slurm.state(second)["Restarts"] == "0"
    assert "is in use by job " + first in run.said()
    assert f"running, job {first}" in slurm.call(sys.executable, "-m", "launch.status", str(run.path))
    (run.folder / "go").touch()
    run.wait(slurm.ended(first))
    assert slurm.state(first)["JobState"] == "COMPLETED" and [entry["step"] for entry in run.metrics()] == list(range(1, 15))


@pytest.mark.long
def test_no_more_requeues_than_asked_for(slurm, make_whole_run):
    run = make_whole_run("requeues")
    job = slurm.submit(run, "launch.max_requeues=0", faults=({"rank": 0, "at": "reading samples", "step": 5, "act": "signal"},))
    run.wait(run.met)
    slurm.call("scancel", "--signal=USR2", job)
    run.wait(slurm.ended(job))
    assert slurm.state(job)["JobState"] == "FAILED" and slurm.state(job)["ExitCode"] == "75:0"
    assert told(run) == [(0, "stopped", False)] and "step_0000000005" in run.checkpoints()
