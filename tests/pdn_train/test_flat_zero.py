"""ZeRO-1 in bf16 without DeepSpeed's extra passes: the same bits, and nothing that the host waits for; ZeRO-2 in bf16 is its equal.

More of both on two ranks: test_stages.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import deepspeed.runtime.bf16_optimizer as theirs
import deepspeed.runtime.engine
import pytest
import torch

from pdn_train import config
from pdn_train.data import Batch
from pdn_train.engine import Engine
from pdn_train.model import LanguageModel
from pdn_train.world import World

TREE = {
    "run_dir": "unused",
    "model": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "head_dim": 16, "intermediate_size": 48, "vocab_size": 50},
    "data": {"path": "unused", "seq_len": 16},
    "train": {"micro_batch": 2, "global_batch": 6, "precision": "bf16", "device": "cpu"},
}
POISONED = 1  # this step's gradients are NaN
WORKER = Path(__file__).with_name("flat_zero_worker.py")


@pytest.fixture
def world():
    world = World.detect(device="cpu")
    world.start(60)
    yield world
    world.stop()


def train(world: World, steps: int) -> tuple[Engine, list[list[float]]]:
    """Three micro-batches a step."""
    run, told = config.build(TREE, "test"), []
    model = LanguageModel(run.model)
    model.init_weights(0)
    engine = Engine(model, run, world)
    for step in range(steps):
        ids = torch.randint(0, 50, (3, 2, 17), generator=torch.Generator().manual_seed(step))
        batches = [Batch(rows[:, :-1], rows[:, 1:].contiguous(), None, 32) for rows in ids]
        hook = engine.model.norm.register_full_backward_hook(lambda module, grad_in, out: (grad_in[0] * float("nan"), *grad_in[1:]))
        if step != POISONED:
            hook.remove()
        outcome = engine.step(batches, 1e-2, 96)
        hook.remove()
        told.append([x.item() for x in (outcome.loss, outcome.grad_norm, outcome.skipped)])
    return engine, told


def test_the_same_bits_as_deepspeeds_own(monkeypatch, world):
    ours, told = train(world, 4)
    monkeypatch.setattr(deepspeed.runtime.engine, "BF16_Optimizer", theirs.BF16_Optimizer)
    plain, expected = train(world, 4)
    assert type(plain._engine.optimizer) is theirs.BF16_Optimizer is not type(ours._engine.optimizer)
    assert [step[2] for step in told] == [0, 1, 0, 0]
    assert str(told) == str(expected)  # NaN is equal to NaN as text
    for a, b in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_no_norm_is_read_and_no_clock_waits(monkeypatch, world):
    for name in ("get_global_norm_of_tensors", "is_invalid_grad_norm"):
        monkeypatch.setattr(theirs, name, None)
    engine, told = train(world, 1)
    assert told[0][2] == 0 and not engine._engine.tput_timer.config.enabled
    assert all(parameter.grad is None for parameter in engine.model.parameters())


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", str(WORKER), str(tmp_path_factory.mktemp("flat"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("TOLD "))[5:])


def test_one_micro_batch_has_the_bits_of_stage_1_at_stage_2(told):
    """On two ranks, of whole samples and of one that is cut in two; a step that is skipped among them. What fills up counts for nothing."""
    assert sum(told["padding"]) > 0
    for case in ("1 1", "1 2"):
        (one, two), same_weights = told["steps"][case]
        assert [step[2] for step in one] == [0, 1, 0, 0, 0] and len({step[0] for step in one}) == 5
        assert str(one) == str(two) and same_weights, case


def test_more_micro_batches_have_the_sums_of_stage_1_at_stage_2(told):
    assert told["sums"]["3 1"] <= 1e-6
    (one, two), _ = told["steps"]["3 1"]
    assert [step[0] for step in two] == pytest.approx([step[0] for step in one], rel=2e-3)
    assert [step[2] for step in two] == [0, 1, 0, 0, 0]


def test_a_rank_keeps_its_part_of_the_sums_at_stage_2(told):
    """In fp32 there are besides the masters and moments, halved at both stages."""
    (one, whole), (two, _) = told["bytes"]["1"], told["bytes"]["2"]
    assert one - two == whole / 2
    assert one == pytest.approx(whole * (3 / 2 + 1), rel=1e-2)


def test_a_checkpoint_of_deepspeeds_own_stage_2_goes_on(told):
    old = told["old"]
    assert old["kind"] == ["DeepSpeedZeroOptimizer"]
    for found, wanted in zip(old["found"], old["told"], strict=True):
        assert found == pytest.approx(wanted, rel=2e-3)
    assert old["found"][0] == pytest.approx(old["told"][0], rel=1e-6)  # the step before which nothing was rounded anew


def test_weights_are_gathered_from_the_files_of_stage_2(told):
    assert told["gathered"]
