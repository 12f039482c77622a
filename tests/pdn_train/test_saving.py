"""Writing while training goes on, in one process; with real ranks it is tested in test_train and in tests/faults."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from pdn_train import publication, saving
from pdn_train.checkpoint import CheckpointError, Progress, folder_name
from pdn_train.config import Config, build
from pdn_train.lease import machine
from pdn_train.resume import newest_whole
from pdn_train.saving import Checkpoints, WriteError, require_space
from pdn_train.world import World

WORLD = World(0, 0, 1, 1, torch.device("cpu"))


def config(**checkpoint: object) -> Config:
    return build({"run_dir": "r", "data": {"path": "d"}, "parallel": {"zero": 1}, "checkpoint": checkpoint}, "test")


def saving_step_1(root: Path) -> Checkpoints:
    """Of which step 1 is being written."""
    checkpoints = Checkpoints(root, config().checkpoint, WORLD)
    checkpoints.save(Live(), Progress(1), config(), {})
    return checkpoints


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


class Live:
    """A state that training changes in place."""

    def __init__(self):
        self.weights = torch.zeros(1000)

    def state(self) -> list[dict]:
        return [{"weights": self.weights}]

    def files(self, folder: Path) -> list[tuple[Path, dict]]:
        return [(folder / "weights.pt", *self.state())]


@pytest.fixture
def gate(monkeypatch):
    """An event without which nothing is written."""
    opened, write = threading.Event(), saving._write
    monkeypatch.setattr(saving, "_write", lambda files: (opened.wait(60), write(files))[1])
    yield opened
    opened.set()


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, gate):
    """Nothing is published before all is written, and it is the state of the save; the next save waits, and then has its own."""
    engine, told = Live(), []
    checkpoints = Checkpoints(tmp_path, config().checkpoint, WORLD)
    checkpoints.tell = told.append
    checkpoints.reserve(engine)
    checkpoints.save(engine, Progress(1), config(), {})
    engine.weights += 1
    assert not checkpoints.own_part_done and names(tmp_path) == ["step_0000000001.tmp"]
    threading.Timer(0.2, gate.set).start()
    checkpoints.save(engine, Progress(2), config(), {})
    assert (tmp_path / folder_name(1) / "COMPLETE").exists() and [written.step for written in told] == [1]
    engine.weights += 1
    checkpoints.finish()
    for step in (1, 2):
        assert torch.load(tmp_path / folder_name(step) / "weights.pt")["weights"].unique().tolist() == [step - 1]
    sizes = [sum(f.stat().st_size for f in (tmp_path / folder_name(step)).glob("*.pt")) for step in (1, 2)]
    assert [(w.step, w.size) for w in told] == [(1, sizes[0]), (2, sizes[1])] and all(0 < w.stall <= w.seconds for w in told[:1])


def test_ranks_that_meet_at_each_step_publish_without_waiting(tmp_path):
    """Once when all have written, once when rank 0 has published."""
    checkpoints, told, meetings = Checkpoints(tmp_path, config().checkpoint, WORLD), [], 0
    checkpoints.tell = told.append
    assert not checkpoints.own_part_done
    checkpoints.save(Live(), Progress(1), config(), {})
    deadline = time.monotonic() + 60
    while not told and time.monotonic() < deadline:
        if checkpoints.own_part_done:
            checkpoints.proceed()
            meetings += 1
    assert meetings == 2 and not checkpoints.own_part_done and newest_whole(tmp_path, WORLD).progress.step == 1


def test_in_the_foreground_nothing_is_copied_and_the_save_returns_when_all_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(saving.HostCopy, "_get", None)
    told, foreground = [], config(background=False).checkpoint
    checkpoints = Checkpoints(tmp_path, foreground, WORLD)
    checkpoints.tell = told.append
    checkpoints.reserve(Live())
    checkpoints.save(Live(), Progress(1), config(), {})
    assert newest_whole(tmp_path, WORLD).progress.step == 1 and told[0].stall == told[0].seconds > 0


@pytest.fixture
def fill_the_disk(monkeypatch):
    """From its call on; torch.save has an error of its own for it."""

    def full(state: object, file: Path) -> None:
        file.write_bytes(b"half")
        raise RuntimeError("file write failed")

    return lambda: monkeypatch.setattr(torch, "save", full)


def test_a_write_that_fails_is_an_error_of_the_next_meeting(tmp_path, fill_the_disk):
    """Not a checkpoint that is missing in silence. The one before stays, and the rest is swept away."""
    checkpoints = saving_step_1(tmp_path)
    checkpoints.finish()
    fill_the_disk()
    checkpoints.save(Live(), Progress(2), config(), {})
    with pytest.raises(
        WriteError,
        match="step_0000000002.tmp could not be written, with .* free there: file write failed; the checkpoint before it is as it was",
    ):
        checkpoints.save(Live(), Progress(3), config(), {})
    checkpoints.close()
    assert newest_whole(tmp_path, WORLD).progress.step == 1
    assert names(tmp_path) == [folder_name(1)]


def test_a_first_one_that_fails_has_none_before_it_and_deepspeed_s_own_writing_is_named_too(tmp_path):
    class Full(Live):
        def files(self, folder: Path) -> list[tuple[Path, dict]]:
            raise OSError(28, "No space left on device", "zero_to_fp32.py")

    with pytest.raises(WriteError, match="step_0000000001.tmp could not be written, .*zero_to_fp32.py'; no checkpoint is there yet: free"):
        Checkpoints(tmp_path, config().checkpoint, WORLD).save(Full(), Progress(1), config(), {})


def test_an_old_checkpoint_that_cannot_be_removed_is_named_and_the_new_one_is_there(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, config(keep=1).checkpoint, WORLD)
    checkpoints.save(Live(), Progress(1), config(), {})
    checkpoints.finish()

    def busy(folder: Path) -> None:
        raise OSError(16, "Device or resource busy", str(folder))

    checkpoints.save(Live(), Progress(2), config(), {})
    monkeypatch.setattr(publication.shutil, "rmtree", busy)
    with pytest.raises(CheckpointError, match=r"step_0000000002 is whole, but what checkpoint.keep=1 gives up .* busy: .*step_0000000001"):
        checkpoints.finish()
    checkpoints.close()
    assert newest_whole(tmp_path, WORLD).progress.step == 2


def test_what_is_being_written_ends_with_the_checkpoints(tmp_path, gate):
    """Nobody may write in a run folder that another job could have taken."""
    checkpoints = saving_step_1(tmp_path)
    threading.Timer(0.2, gate.set).start()
    checkpoints.close()
    assert names(tmp_path / "step_0000000001.tmp") == ["rng_00000.pt", "weights.pt"]


def test_a_disk_without_room_is_named_before_training(tmp_path):
    with pytest.raises(CheckpointError, match="one checkpoint takes about"):
        require_space(tmp_path, 10**15)


def test_host_memory_that_is_not_there_is_named_before_training(monkeypatch):
    monkeypatch.setattr(saving.hostmemory, "available", lambda: 1_024_000_000)
    saving._require_memory([1_000_000_000, 24_000_000])
    with pytest.raises(CheckpointError, match=r"\(2 ranks\) takes 1.0 GB of .*, 1.0 GB are available; with checkpoint.background=false"):
        saving._require_memory([1_000_000_000, 24_000_001])


def test_a_fault_that_no_meeting_has_told_of_goes_to_the_log(tmp_path, fill_the_disk, caplog):
    """The run ends by another error, which is said before the wait."""
    fill_the_disk()
    with pytest.raises(ValueError, match="of the step"), saving_step_1(tmp_path):
        raise ValueError("of the step")
    first, second = caplog.messages
    assert "ValueError: of the step; waits for its files of step 1" in first and "WriteError" in second and "step_0000000001.tmp" in second


def test_a_run_folder_that_is_gone_is_named(tmp_path, gate):
    checkpoints = saving_step_1(tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone")
    gate.set()
    with pytest.raises(WriteError, match="gone/step_0000000001.tmp could not be written, with no folder there"):
        checkpoints.finish()


def test_the_ranks_of_a_node_share_its_memory(tmp_path, monkeypatch):
    """Each alone would find enough."""
    asked = []
    monkeypatch.setattr(World, "gather", lambda world, value: [value, (machine(), 5000)] + [("another node", 7)])
    monkeypatch.setattr(World, "together", lambda world, act: act())
    monkeypatch.setattr(saving, "_require_memory", asked.append)
    Checkpoints(tmp_path, config().checkpoint, WORLD).reserve(Live())
    assert asked == [[4096, 5000]]
