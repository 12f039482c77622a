"""Agreements between two real processes, and what the launcher's variables must say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pdn_train.world import World, WorldError, require_kernel_cache

VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "LOCAL_WORLD_SIZE",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_JOB_ID",
)


@pytest.fixture
def environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch.setenv


def test_two_processes_agree_and_fail_together():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", str(Path(__file__).with_name("world_worker.py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = {}
    for line in done.stdout.splitlines():
        if line.startswith("SAID "):
            _, rank, index, text = line.split(" ", 3)
            said[int(rank), int(index)] = text
    both = ["[3, 10]", "[0.2, 1.0]", "'from 0'", "[0, 2]"]
    for rank in (0, 1):
        assert [said[rank, i] for i in range(4)] == both
    quoted, own = "Disagreement: rank 1 stopped with ValueError: rank 1 cannot", "ValueError: rank 1 cannot"
    assert [said[0, 4], said[1, 4], said[0, 5], said[1, 5]] == [quoted, own, quoted, own]
    assert said[0, 6] == "ZeroDivisionError: division by zero" and said[1, 6].startswith(
        "Disagreement: rank 0 stopped with ZeroDivisionError"
    )
    assert [said[0, 7], said[1, 7]] == ["0", "1"]


def test_without_a_launcher_the_world_is_one_process(environment):
    world = World.detect(device="cpu")
    assert (world.rank, world.size, world.data_ranks, world.leads, world.job) == (0, 1, 1, True, None)
    assert world.sum([3]) == [3] and world.gather("x") == ["x"] and world.together(lambda: 1) == [1]


def test_sequence_ranks_share_a_data_rank(environment):
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "here", "SLURM_JOB_ID": "42"}.items():
        environment(name, value)
    world = World.detect(sequence=2, device="cpu")
    assert (world.data_rank, world.data_ranks, world.sequence_rank, world.local_size, world.job) == (2, 4, 1, 8, "42")
    environment("LOCAL_WORLD_SIZE", "4")
    assert World.detect(sequence=2, device="cpu").local_size == 4


@pytest.mark.parametrize(
    "variables, said",
    [
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "here"}, "RANK=2 is not below WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "srun started 8 tasks"),
        ({"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "here"}, "parallel.sequence=2 does not divide WORLD_SIZE=3"),
    ],
)
def test_contradictions_are_named(environment, variables, said):
    for name, value in variables.items():
        environment(name, value)
    with pytest.raises(ValueError, match=said):
        World.detect(sequence=2, device="cpu")


def test_a_gpu_that_is_not_there_is_named(environment):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match="train.device=cuda"):
        World.detect(device="cuda")


def test_a_kernel_cache_that_cannot_be_written_is_named(environment, tmp_path):
    (tmp_path / "file").write_text("")
    environment("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(WorldError, match=f"TRITON_CACHE_DIR={tmp_path}/file/cache cannot be written on .*own disk"):
        require_kernel_cache()
    environment("TRITON_CACHE_DIR", "")
    environment("TRITON_HOME", str(tmp_path / "file"))  # a home that is read-only
    with pytest.raises(WorldError, match=f"not set: {tmp_path}/file/.triton/cache"):
        require_kernel_cache()
    environment("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    require_kernel_cache()
    assert list((tmp_path / "cache").iterdir()) == []
