"""Run under torchrun by test_stages.py: trains a tiny model at ZeRO stages, saves, and goes on from those checkpoints at every stage.

stages_worker.py save FOLDER PRECISION STAGE...     five steps at each stage; a checkpoint after the third; prints the losses
stages_worker.py load FOLDER PRECISION STAGE...     steps four and five, from each checkpoint in FOLDER at each stage; prints the losses
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
from pathlib import Path

import torch

from pdn_train import engine as engine_module
from pdn_train import hostcopy, saving
from pdn_train.checkpoint import Progress
from pdn_train.config import Config, build
from pdn_train.data import Batch
from pdn_train.engine import Engine
from pdn_train.model import LanguageModel
from pdn_train.resume import newest_whole, restore
from pdn_train.saving import Checkpoints
from pdn_train.world import World

GLOBAL_BATCH, LENGTH, VOCABULARY = 4, 24, 50
MODEL = {
    "recurrence": "pgdn",
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
}
BAD_STEP = 1  # its gradients are NaN on rank 0: Adam's count must survive the skip


original_config = engine_module.deepspeed_config


def freeing_config(config: Config, world_size: int) -> dict:
    """Stage 3 as for a large model: with DeepSpeed's defaults it would keep parameters this small whole and never fetch one."""
    settings = original_config(config, world_size)
    if config.parallel.zero == 3:
        small = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 2000}
        settings["zero_optimization"] |= small
    return settings


engine_module.deepspeed_config = freeing_config
original_conversion = engine_module.to_universal


def convert_once(checkpoint: Path, output: Path) -> None:
    """The universal form does not depend on the stage that reads it, and DeepSpeed's converter is a process of some seconds each time."""
    kept = checkpoint.parents[2] / "converted" / checkpoint.parent.name
    if kept.exists():
        shutil.copytree(kept, output)
        return
    original_conversion(checkpoint, output)
    shutil.copytree(output, kept)


engine_module.to_universal = convert_once


def config_for(stage: int, precision: str, world: World) -> Config:
    return build(
        {
            "run_dir": "unused",
            "model": MODEL,
            "data": {"path": "unused", "seq_len": LENGTH},
            # eps above the rounding of a gradient: AdamW divides by the gradient's own size and would blow rounding up to a whole step
            "optim": {"lr": 1e-2, "min_lr": 1e-2, "warmup_steps": 0, "eps": 1e-3},
            "train": {"micro_batch": 1, "global_batch": GLOBAL_BATCH, "precision": precision, "device": "cpu"},
            "parallel": {"zero": stage},
        },
        "test",
    )


def batches(step: int, world: World) -> list[Batch]:
    """This rank's share of a global batch that is the same for any world size; rows of 24, 16, 8 and no targets."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, LENGTH + 1), generator=generator)
    mine = []
    for row in range(world.rank, GLOBAL_BATCH, world.size):
        labels = ids[row : row + 1, 1:].clone()
        labels[:, : 8 * row] = -100
        mine.append(Batch(ids[row : row + 1, :-1], labels, None, int((labels != -100).sum())))
    return mine


def take_steps(engine: Engine, world: World, first: int, last: int) -> list[list[float]]:
    told = []
    for step in range(first, last + 1):
        mine = batches(step, world)
        hook = poison(engine) if step == BAD_STEP and world.rank == 0 else None
        outcome = engine.step(mine, 1e-2, world.sum([sum(b.targets for b in mine)])[0])
        if hook is not None:
            hook.remove()
        told.append([outcome.loss.item(), outcome.grad_norm.item(), outcome.skipped.item()])
    return told


def one_batch() -> list[float]:
    """Loss and gradient norm of the first step without DeepSpeed, micro-batches or ranks: one batch, one mean over its targets."""
    alone = World(0, 0, 1, 1, torch.device("cpu"))
    rows = batches(0, alone)
    model = LanguageModel(config_for(0, "fp32", alone).model)
    model.init_weights(0)
    loss = model(torch.cat([b.input_ids for b in rows]), labels=torch.cat([b.labels for b in rows])) / sum(b.targets for b in rows)
    loss.backward()
    return [loss.item(), torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt().item()]


def poison(engine: Engine):
    """A NaN in the gradient of the last norm's output, forward untouched."""
    return engine.model.norm.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * float("nan"), *grad_in[1:]))


def engine_for(config: Config, world: World, seed: int) -> Engine:
    model = LanguageModel(config.model)
    model.init_weights(seed)
    return Engine(model, config, world)


def require_all_reserved(engine: Engine, folder: Path) -> None:
    """The host memory is asked for by other calls than those that find what is saved."""
    folder.mkdir(parents=True, exist_ok=True)
    reserved, saved = (sum(s.nbytes() for s in hostcopy._storages(state).values()) for state in (engine.state(), engine.files(folder)))
    assert reserved == saved, (reserved, saved)


def main(action: str, folder: str, precision: str, *stages: str) -> None:
    world = World.detect(device="cpu")
    world.start(120)
    told = {"one batch": one_batch()} if action == "save" else {}
    for stage in map(int, stages):
        config = config_for(stage, precision, world)
        if action == "save":
            checkpoints = Checkpoints(Path(folder) / str(stage), config.checkpoint, world)
            engine = engine_for(config, world, seed=0)
            checkpoints.reserve(engine)
            require_all_reserved(engine, Path(folder) / str(stage) / "probe")
            before = take_steps(engine, world, 0, 2)
            trained, write = threading.Event(), saving._write
            saving._write = lambda files, go=trained, write=write: (go.wait(60), write(files))[1]
            checkpoints.save(engine, Progress(3, 12, 0, skipped_steps=1), config, {})
            told[stage] = before + take_steps(engine, world, 3, 4)  # what is written afterwards must hold nothing of these
            trained.set()
            checkpoints.finish()
            saving._write = write
            continue
        for source in sorted(Path(folder).iterdir()):
            engine = engine_for(config, world, seed=1)
            restore(newest_whole(source, world), engine, config, world)
            told[f"{source.name} -> {stage}"] = take_steps(engine, world, 3, 4)
    if world.leads:
        print("TOLD " + json.dumps(told))
    world.barrier()
    world.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
