"""Faults inside real runs, at chosen moments: each ends in the metrics of the run that nothing interrupts, or in one clear error.

Those of the launcher and of SLURM are in tests/launch; a checkpoint with a flipped bit and a stray token id are in tests/pdn_train.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

HOOKS = Path(__file__).with_name("hooks")


def launch(run, *settings: str, faults: tuple[dict, ...] = ()) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": f"{HOOKS}:{os.environ.get('PYTHONPATH', '')}", "FAULT_PLAN": run.plan(*faults)}
    command = [sys.executable, "-m", "launch.submit", str(run.config), *settings]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen, code: int) -> str:
    said, _ = process.communicate(timeout=500)
    assert process.returncode == code, said
    return said


def fault(rank: int, at: str, step: int, act: str) -> dict:
    return {"rank": rank, "at": at, "step": step, "act": act}


@pytest.mark.long
def test_killed_at_a_random_step_in_a_save_in_the_writing_and_in_publication(make_whole_run, uninterrupted):
    """The launcher starts the run again each time; nothing is lost, nothing is done twice."""
    run = make_whole_run("kills")
    draw = random.Random(run.folder.name)
    faults = (
        fault(draw.randrange(2), "computing", draw.randrange(1, 4), "kill"),
        fault(1, "saving a checkpoint", 4, "kill"),
        fault(draw.randrange(2), "writing", 8, "kill"),
        fault(0, "completing", 8, "kill"),
    )
    finish(launch(run, faults=faults), 0)
    assert [ending["how"] for ending in run.endings()] == ["crashed"] * 4 + ["done"]
    assert run.story() == uninterrupted.story(), faults
    assert run.checkpoints() == uninterrupted.checkpoints()
    assert "finished the publication of step_0000000008" in run.said()


@pytest.mark.long
def test_killed_at_stage_2_in_bf16(make_whole_run):
    """In a step and in the writing; the judge is a run with the same settings that nothing interrupts."""
    settings = "parallel.zero=2", "train.precision=bf16", "train.micro_batch=1"
    whole, run = make_whole_run("whole"), make_whole_run("killed")
    finish(launch(whole, *settings), 0)
    finish(launch(run, *settings, faults=(fault(0, "computing", 6, "kill"), fault(1, "writing", 8, "kill"))), 0)
    assert [ending["how"] for ending in run.endings()] == ["crashed"] * 2 + ["done"]
    assert len(run.story()) == run.STEPS and run.story() == whole.story()
    assert run.checkpoints() == whole.checkpoints()


@pytest.mark.long
def test_killed_in_the_conversion_to_another_world_size(make_whole_run, uninterrupted):
    """2 ranks to step 8, then 1 rank, killed between DeepSpeed's conversion and the load."""
    run = make_whole_run("conversion")
    faults = (fault(0, "reading samples", 8, "raise"), {"rank": 0, "at": "converted", "act": "kill"})
    finish(launch(run, "launch.max_requeues=0", faults=faults), 1)
    said = finish(launch(run, "launch.gpus_per_node=1", faults=faults), 0)
    assert run.met(1)
    assert "loading it as" in said and not list((run.path / "checkpoints").glob("*.universal"))
    for ours, theirs in zip(run.metrics(), uninterrupted.metrics(), strict=True):
        assert (ours["step"], ours["tokens"], ours["lr"]) == (theirs["step"], theirs["tokens"], theirs["lr"])
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-3)


@pytest.mark.long
def test_the_disk_fills_up_in_a_save(make_whole_run, uninterrupted):
    """On a disk of its own: the save fails by name, the checkpoint before stays whole, and with space again the run ends as it should."""
    run = make_whole_run("full")
    run.path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(run.path)], capture_output=True, check=False).returncode:
        pytest.skip("this test mounts a small disk, which needs root and the right to mount")
    try:
        process = launch(run, faults=({"rank": 0, "at": "saving a checkpoint", "step": 8, "act": "hold"},))
        run.wait(run.met)
        ballast = run.path / "ballast"
        with ballast.open("wb") as file:
            file.write(b"x" * (shutil.disk_usage(run.path).free - 200_000))
        (run.folder / "go").touch()
        said = finish(process, 1)
        assert "No space left on device" in said or "Errno 28" in said or "WriteError" in said and "0.0 MB free there" in said
        assert run.checkpoints()[0] == "step_0000000004"
        ballast.unlink()
        finish(launch(run), 0)
        assert run.story() == uninterrupted.story()
    finally:
        subprocess.run(["umount", str(run.path)], check=True)


@pytest.mark.long
def test_a_write_that_fails_in_the_background_ends_every_rank(make_whole_run, uninterrupted):
    """On one rank, while training has gone on: the next meeting names it, the checkpoint before stays, and a new start has all bits."""
    run = make_whole_run("write")
    finish(launch(run, "launch.max_requeues=0", faults=(fault(1, "writing", 8, "raise"),)), 1)
    assert "WriteError" in run.said() and "step_0000000008.tmp" in run.said() and "a fault of the test" in run.said()
    assert "Disagreement: rank 1 stopped with WriteError" in run.said()
    assert "step_0000000004" in run.checkpoints() and "step_0000000008" not in run.checkpoints()
    finish(launch(run), 0)
    assert run.story() == uninterrupted.story() and run.checkpoints() == uninterrupted.checkpoints()


@pytest.mark.long
@pytest.mark.parametrize("change", ["truncated", "changed"])
def test_a_shard_changes_under_the_run(make_whole_run, tiny_shards, change):
    run = make_whole_run(change)
    shards = run.folder / "shards"
    shutil.copytree(tiny_shards, shards)
    process = launch(
        run, f"data.path={shards}", "train.steps=400", faults=({"rank": 0, "at": "reading samples", "step": 3, "act": "hold"},)
    )
    run.wait(run.met)
    for file in shards.glob("*.bin"):
        if change == "truncated":
            os.truncate(file, 2)
        else:
            os.utime(file)
    (run.folder / "go").touch()
    said = finish(process, 1)
    assert "ShardError" in said and ".bin" in said and "First to fail" in said
    assert [(ending["how"], ending["again"]) for ending in run.endings()] == [("refused", False)]


@pytest.mark.long
def test_the_run_folder_disappears(make_whole_run):
    run = make_whole_run("gone")
    process = launch(
        run, "train.steps=4000", "launch.hang_seconds=120", faults=({"rank": 0, "at": "reading samples", "step": 3, "act": "hold"},)
    )
    run.wait(run.met)
    shutil.rmtree(run.path)
    (run.folder / "go").touch()
    said = finish(process, 1)
    assert str(run.path) in said


@pytest.mark.long
def test_a_folder_that_cannot_be_written(make_whole_run):
    run = make_whole_run("readonly")
    run.path.write_text("a file where the folder should be")
    assert f"run_dir={run.path} is a file; choose another run_dir" in finish(launch(run), 2)


@pytest.mark.long
def test_nan_in_one_rank_s_gradient(make_whole_run, uninterrupted):
    """All ranks skip the step; garbage in DeepSpeed's file `latest` is nobody's business."""
    run = make_whole_run("nan")
    (run.path / "checkpoints").mkdir(parents=True)
    (run.path / "checkpoints" / "latest").write_bytes(b"\xff\x00 step_9999999999")
    finish(launch(run, faults=(fault(1, "computing", 5, "nan"),)), 0)
    assert [entry["skipped_steps"] for entry in run.metrics()] == [0] * 5 + [1] * 9
    assert run.story()[:5] == uninterrupted.story()[:5]
    assert run.metrics()[-1]["loss"] == pytest.approx(uninterrupted.metrics()[-1]["loss"], abs=0.2)


@pytest.mark.long
def test_a_slow_rank_is_named_and_a_hanging_one_ends_the_job(make_whole_run):
    run = make_whole_run("hangs")
    faults = (fault(1, "computing", 1, "slow"), fault(1, "computing", 6, "hang"))
    process = launch(run, "launch.hang_seconds=90", "launch.max_requeues=0", faults=faults)
    run.wait(lambda: run.met(1))
    started = time.monotonic()
    said = finish(process, 1)
    assert time.monotonic() - started < 150
    assert "rank 1 on" in said and "holds the others up" in said
    assert "First to fail: rank 1" in said and "no progress for" in said and "at step 6, while computing" in said
    assert "rank 0" in said.split("Last words:")[1], "the one that waited is told of too"
    assert "innermost call first" in run.said() or "most recent call first" in run.said(), "stacks of all threads in the job's log"


@pytest.mark.long
def test_a_stopped_rank_ends_the_job(make_whole_run):
    """SIGSTOP: the process is there and says nothing."""
    run = make_whole_run("stopped")
    process = launch(run, "launch.hang_seconds=90", "launch.max_requeues=0", faults=(fault(1, "computing", 3, "stop"),))
    run.wait(run.met)
    said = finish(process, 1)
    assert "First to fail: rank" in said
