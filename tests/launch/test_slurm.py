"""Runs on a real SLURM, interrupted as clusters do it: they end with the metrics of the run that nothing interrupts, or one clear error."""

from __future__ import annotations


def test_requeued_from_outside(slurm, make_whole_run, uninterrupted):
    """`scontrol requeue` calls no hook; the ranks get SIGTERM."""
    run = make_whole_run("requeue")
    job = slurm.submit(run, faults=({"rank": 1, "at": "computing", "step": 5, "act": "hold"},))
    run.wait(run.met)
    slurm.call("scontrol", "requeue", job)
    (run.folder / "go").touch()
    run.wait(slurm.ended(job))
    assert slurm.state(job)["JobState"] == "COMPLETED" and slurm.state(job)["Restarts"] == "1", run.said()
    assert run.story() == uninterrupted.story()
    assert "resumed at step 6" in run.said()
