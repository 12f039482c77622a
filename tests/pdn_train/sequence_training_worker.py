"""Run under torchrun by test_sequence_training.py, on four ranks.

sequence_training_worker.py SHARDS FOLDER     prints {"one step": ..., "fifty steps": ...}

One step of plain gradient descent, {case: {loss, norm, change: error of the weights' change}}, every error relative to one process without
DeepSpeed; a case is the ZeRO stage, the ranks a sequence, the activation checkpointing, the clipping and the recurrence. Fifty steps of
AdamW on SHARDS, {shapes: [[loss, gradient norm], ...]}: as data-parallel ranks only, and from shape to shape by checkpoints in FOLDER.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

import deepspeed
import torch

from pdn_train import engine
from pdn_train.checkpoint import Progress
from pdn_train.config import Config, build
from pdn_train.data import Batch, open_samples
from pdn_train.loop import build_loader
from pdn_train.model import LanguageModel
from pdn_train.resume import newest_whole, restore
from pdn_train.saving import Checkpoints
from pdn_train.world import World

RANKS, LENGTH, VOCABULARY, GLOBAL_BATCH = 4, 24, 50, 4
CASES = [
    (0, 4, "block", 1.0, "pkda"),
    (1, 4, "none", 0.0, "gdn"),
    (1, 2, "selective", 1.0, "pdn"),
    (2, 2, "block", 0.0, "pgdn"),
    (3, 4, "selective", 0.0, "pgdn"),
    (3, 2, "block", 1.0, "pkda"),
]


# Where each part of the run ends, its ranks a sequence and its activation checkpointing. One ZeRO stage: test_stages.py changes those
MOVES = {"apart": [(50, 1, "none")], "moving": [(17, 2, "none"), (34, 4, "selective"), (40, 1, "none"), (50, 2, "block")]}


def config_for(stage: int, sequence: int, mode: str, clip: float, recurrence: str, rate: float = 1.0, layers: int = 2) -> Config:
    model = {"recurrence": recurrence, "hidden_size": 32, "num_layers": layers, "num_heads": 2, "head_dim": 16, "intermediate_size": 48}
    train = {
        "micro_batch": min(2, sequence),
        "global_batch": GLOBAL_BATCH,
        "precision": "fp32",
        "activation_checkpoint": mode,
        "device": "cpu",
    }
    return build(
        {
            "run_dir": "unused",
            "model": {**model, "vocab_size": VOCABULARY},
            "data": {"path": "unused", "seq_len": LENGTH, "reset_at_documents": True},
            # eps above the rounding of a gradient, which AdamW would blow up to a whole step
            "optim": {"lr": rate, "min_lr": 0.0, "warmup_steps": 0, "clip": clip, "eps": 1e-3},
            "train": train,
            "parallel": {"zero": stage, "sequence": sequence},
        },
        "test",
    )


def whole_batches() -> list[Batch]:
    """Micro-batches of two samples: plain rows with few targets, and documents side by side with many."""
    ids = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    labels[0, :20] = labels[1, 3:] = labels[2, 6] = -100
    starts = torch.tensor([0, 7, 12, 24, 25, 26, 44, 48], dtype=torch.int32)
    plain = Batch(inputs[:2], labels[:2], None, int((labels[:2] != -100).sum()))
    packed = Batch(inputs[2:].view(1, -1), labels[2:].view(1, -1), starts, int((labels[2:] != -100).sum()))
    return [plain, packed]


def gradient_descent(named, config):
    return torch.optim.SGD([p for _, p in named], lr=config.lr, fused=True)


@cache
def alone(recurrence: str) -> tuple[float, float, list[torch.Tensor]]:
    """Loss, gradient norm and gradients in one process."""
    model, batches = fresh(config_for(0, 1, "none", 0.0, recurrence)), whole_batches()
    targets = sum(b.targets for b in batches)
    loss = sum(model(b.input_ids, labels=b.labels, cu_seqlens=b.cu_seqlens) for b in batches) / targets
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
    return loss.item(), norm.item(), gradients


def fresh(config: Config) -> LanguageModel:
    model = LanguageModel(config.model, config.train.activation_checkpoint)
    model.init_weights(0)
    return model


def errors(case: tuple, world: World) -> dict[str, float]:
    config = config_for(*case)
    world.sequence = config.parallel.sequence
    stepper = engine.Engine(fresh(config), config, world)
    batches = whole_batches()
    if world.data_ranks == 2:  # one of them each
        batches = batches[world.data_rank : world.data_rank + 1]
    batches = [b.cut(2, world.sequence_rank, world.sequence) for b in batches]
    targets = world.sum([sum(b.targets for b in batches)])[0]
    outcome = stepper.step(batches, 1.0, targets)
    parameters = list(stepper.model.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=case[0] == 3):
        change = [p.detach().clone() - old for p, old in zip(parameters, fresh(config).parameters(), strict=True)]
    loss, norm, gradients = alone(config.model.recurrence)
    factor = max(1.0, (norm + 1e-6) / config.optim.clip) if config.optim.clip else 1.0
    wanted = [-g / factor for g in gradients]
    square = sum((c - w).square().sum().item() for c, w in zip(change, wanted, strict=True))
    return {
        "loss": abs(outcome.loss.item() / loss - 1),
        "norm": abs(outcome.grad_norm.item() / norm - 1),
        "change": (square / sum(w.square().sum().item() for w in wanted)) ** 0.5,
    }


def fifty_steps(moves: list[tuple], shards: str, folder: Path, world: World) -> list[list[float]]:
    told, progress = [], Progress()
    for until, sequence, mode in moves:
        config = config_for(2, sequence, mode, 1.0, "pgdn", rate=1e-2, layers=1)
        world.sequence = sequence
        samples = open_samples(shards, LENGTH, 0, VOCABULARY)
        checkpoints = Checkpoints(folder, config.checkpoint, world)
        saved = newest_whole(folder, world)
        stepper = engine.Engine(fresh(config), config, world)
        if saved is not None:
            restore(saved, stepper, config, world)
            progress = saved.progress
        loader = build_loader(samples, config.accumulation(world.size), config, world)
        while progress.step < until:
            batches = loader.step(progress.position)
            outcome = stepper.step(batches, 1e-2, world.sum([sum(b.targets for b in batches)])[0])
            told.append([outcome.loss.item(), outcome.grad_norm.item()])
            progress = Progress(progress.step + 1, progress.position + loader.global_batch)
        checkpoints.save(stepper, progress, config, {})
        checkpoints.finish()
    return told


def one_step(world: World) -> dict[str, dict[str, float]]:
    """The largest errors that any rank found."""
    real, engine.build_optimizer = engine.build_optimizer, gradient_descent
    started, engine.zero.start_moments = engine.zero.start_moments, lambda *arguments, **named: None  # there are none
    told = world.gather({" ".join(map(str, case)): errors(case, world) for case in CASES})
    engine.build_optimizer, engine.zero.start_moments = real, started
    return {case: {name: max(one[case][name] for one in told) for name in told[0][case]} for case in told[0]}


def main(shards: str, folder: str) -> None:
    world = World.detect(device="cpu")
    world.start(120)
    told = {"one step": one_step(world)}
    told["fifty steps"] = {name: fifty_steps(moves, shards, Path(folder) / name, world) for name, moves in MOVES.items()}
    if world.leads:
        print("TOLD " + json.dumps(told))
    world.barrier()
    world.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
