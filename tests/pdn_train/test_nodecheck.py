"""Each fault a node can have, on the real checks; two ranks agree on who has it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pdn_train import nodecheck
from pdn_train.nodecheck import NodeError, check_nodes
from pdn_train.world import World

CPU = torch.device("cpu")
ALONE = World(0, 0, 1, 1, CPU)


def test_a_sound_node_passes(tmp_path):
    check_nodes(ALONE, tmp_path, 0.0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [torch.float32, torch.bfloat16])
def test_a_wrong_product_is_named(wrong, tmp_path, monkeypatch):
    right = torch.Tensor.__matmul__

    def product(a, b):
        found = right(a, b)
        if found.dtype == wrong:
            found[17, 3] += 1 if wrong == torch.float32 else found[17, 3].abs() / 64 + 1
        return found

    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    with pytest.raises(NodeError, match=f"rank 0: a {wrong} matrix product on cpu is wrong"):
        check_nodes(ALONE, tmp_path, 0.0)


def test_a_device_that_raises_is_a_fault_too(tmp_path, monkeypatch):
    monkeypatch.setattr(nodecheck, "product_fault", lambda device: 1 / 0)
    with pytest.raises(NodeError, match="rank 0: ZeroDivisionError"):
        check_nodes(ALONE, tmp_path, 0.0)


@pytest.mark.parametrize(
    "free, needed, said", [(20, 30, "20.0 of 80.0 GiB free and the run needs about 30.0"), (79, 30, None), (20, 90, None)]
)
def test_memory_that_another_process_holds(monkeypatch, free, needed, said):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * 2**30, 80 * 2**30))
    fault = nodecheck.memory_fault(torch.device("cuda", 1), needed * 2**30)
    assert fault is None if said is None else said in fault and "cuda:1" in fault


def test_a_folder_that_is_not_there_or_cannot_be_written(tmp_path):
    assert "must lie on a disk that all nodes share" in nodecheck.disk_fault(tmp_path / "none")
    assert "cannot be written" in nodecheck.disk_fault(Path("/proc/self"))


def test_a_clock_that_is_off_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(World, "gather", lambda self, said: [said, ("late", said[1] - 60, []), ("good", said[1] + 1, [])])
    with pytest.raises(NodeError, match="^late, rank 1: its clock is -60 s off the others'"):
        check_nodes(ALONE, tmp_path, 0.0)


def test_two_ranks_agree_on_the_bad_one(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", str(Path(__file__).with_name("nodecheck_worker.py")), str(tmp_path)]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("SAID")]
    assert len(said) == 6, f"{time.monotonic() - started:.0f} s: {done.stdout}"
    for rank in ("0", "1"):
        assert f"SAID {rank} sound: None" in said
        assert any(line.startswith(f"SAID {rank} product:") and ", rank 1: a torch.float32 matrix product" in line for line in said)
        assert any(line.startswith(f"SAID {rank} sum:") and ", rank 1: an all-reduce over 2 ranks is wrong" in line for line in said)
