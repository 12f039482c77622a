"""Run under torchrun by test_flat_zero.py, on two ranks, in bf16: prints {"sums": ..., "steps": ..., "bytes": ..., ...}.

sums, steps: a case is the micro-batches a step and the ranks a sequence; for each stage the first step's sums of gradients are compared
(error of stage 2's relative to stage 1's, both ranks together), and told are all steps' [loss, norm, skipped] and whether the weights and
masters at the end have the same bits. bytes: by stage, of all fp32 tensors alive on this rank after a step, and of a whole one of the
weights' number. padding: numbers that fill up each flat tensor. gathered: whether stage 2's files name it, and their masters round to its
weights. old: the steps of DeepSpeed's own optimizer for stage 2, uninterrupted, and from its checkpoint in FOLDER as it was before
state.json said "flat".
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from pathlib import Path

import torch
from stages_worker import config_for, engine_for, poison, take_steps

from pdn_train import zero
from pdn_train.checkpoint import Progress, newest
from pdn_train.config import Config
from pdn_train.data import Batch
from pdn_train.engine import Engine, gather_fp32_weights
from pdn_train.resume import newest_whole, restore
from pdn_train.saving import Checkpoints
from pdn_train.world import World

CASES = [(1, 1), (3, 1), (1, 2)]
STEPS, BAD_STEP = 5, 1  # its gradients are NaN on rank 0
LENGTH = 24


def small(stage: int, count: int, world: World) -> Config:
    """`count` micro-batches of a row a data-parallel rank; one layer of one head, so that a flat tensor must be filled up."""
    config = config_for(stage, "bf16", world)
    config = config.model_copy(update={"model": config.model.model_copy(update={"num_layers": 1, "num_heads": 1})})
    train = config.train.model_copy(update={"global_batch": count * world.data_ranks})
    return config.model_copy(update={"train": train, "parallel": config.parallel.model_copy(update={"sequence": world.sequence})})


def rows(step: int, count: int, world: World) -> list[Batch]:
    ids = torch.randint(0, 50, (world.data_ranks, count, 1, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    whole = [Batch(x[:, :-1], x[:, 1:].contiguous(), None, LENGTH) for x in ids[world.data_rank]]
    return whole if world.sequence == 1 else [b.cut(1, world.sequence_rank, world.sequence) for b in whole]


def train(stage: int, count: int, world: World) -> tuple[list, list, list]:
    """The first step's sums, all steps, and the weights and masters."""
    engine, told, sums = engine_for(small(stage, count, world), world, seed=0), [], []
    measure = engine._gradient_norm

    def watched():
        if not sums:
            sums.extend(g.clone() for g in zero.gradients(engine._engine.optimizer, engine.model)[0])
        return measure()

    engine._gradient_norm = watched
    for step in range(STEPS):
        hook = poison(engine) if step == BAD_STEP and world.rank == 0 else None
        outcome = engine.step(rows(step, count, world), 1e-2, count * world.data_ranks * LENGTH)
        if hook is not None:
            hook.remove()
        told.append([outcome.loss.item(), outcome.grad_norm.item(), outcome.skipped.item()])
    return sums, told, [*engine.model.parameters(), *engine._engine.optimizer.fp32_groups_flat_partition]


def compare(count: int, sequence: int, world: World) -> tuple[float, list, bool]:
    world.sequence = sequence
    (one, told, ends), (two, also, others) = (train(stage, count, world) for stage in (1, 2))
    square = [sum((a - b).square().sum().item() for a, b in zip(one, two, strict=True)), sum(a.square().sum().item() for a in one)]
    error, size = (sum(x) for x in zip(*world.gather(square), strict=True))
    world.sequence = 1
    same = all(torch.equal(a, b) for a, b in zip(ends, others, strict=True))
    return (error / size) ** 0.5, [told, also], all(world.gather(same))


def alive(stage: int, world: World) -> list[int]:
    engine = engine_for(small(stage, 1, world), world, seed=0)
    engine.step(rows(0, 1, world), 1e-2, world.size * LENGTH)
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and one.dtype == torch.float32]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return [sum(storages.values()), 4 * sum(flat.numel() for flat in engine._engine.optimizer.bf16_groups_flat)]


def gathered(folder: Path, world: World) -> bool:
    config = small(2, 1, world)
    engine = engine_for(config, world, seed=0)
    engine.step(rows(0, 1, world), 1e-2, world.size * LENGTH)
    checkpoints = Checkpoints(folder, config.checkpoint, world)
    checkpoints.save(engine, Progress(1), config, {})
    checkpoints.finish()
    found = gather_fp32_weights(newest(folder))
    files = [torch.load(file, weights_only=False)["optimizer_state_dict"] for file in newest(folder).glob("*_optim_states.pt")]
    named = [file["zero_stage"] for file in files] == [2, 2]
    return named and all(
        found[name].dtype == torch.float32 and torch.equal(found[name].bfloat16(), p) for name, p in engine.model.named_parameters()
    )


def padding(world: World) -> list[int]:
    """Numbers that fill up each flat tensor."""
    optimizer = engine_for(small(2, 1, world), world, seed=0)._engine.optimizer
    return [
        flat.numel() - sum(p.numel() for p in group) for flat, group in zip(optimizer.bf16_groups_flat, optimizer.bf16_groups, strict=True)
    ]


def from_before(folder: Path, world: World) -> dict[str, list]:
    config, ours = small(2, 2, world), Config.flat_zero
    Config.flat_zero = property(lambda self: False)
    engine = engine_for(config, world, seed=0)
    kind = type(engine._engine.optimizer).__name__
    checkpoints = Checkpoints(folder, config.checkpoint, world)
    take_steps(engine, world, 0, 2)
    checkpoints.save(engine, Progress(3, 12, 0, skipped_steps=1), config, {})
    checkpoints.finish()
    told = take_steps(engine, world, 3, 4)
    Config.flat_zero = ours
    world.from_leader(lambda: make_old(folder))
    engine: Engine = engine_for(config, world, seed=1)
    restore(newest_whole(folder, world), engine, config, world)
    return {"kind": [kind], "told": told, "found": take_steps(engine, world, 3, 4)}


def make_old(folder: Path) -> None:
    (state,) = folder.glob("step_*/state.json")
    tree = json.loads(state.read_text())
    del tree["world"]["flat"]
    state.write_text(json.dumps(tree))
    state.with_name("COMPLETE").write_text(hashlib.sha256(state.read_bytes()).hexdigest() + "\n")


def main(folder: str) -> None:
    world = World.detect(device="cpu")
    world.start(120)
    torch.use_deterministic_algorithms(True)  # memory that is not written holds NaN
    found = {" ".join(map(str, case)): compare(*case, world) for case in CASES}
    torch.use_deterministic_algorithms(False)  # DeepSpeed's own optimizer has 4 GB of it
    told = {
        "sums": {case: error for case, (error, _, _) in found.items()},
        "steps": {case: rest for case, (_, *rest) in found.items()},
        "bytes": {stage: alive(stage, world) for stage in (1, 2)},
        "padding": padding(world),
        "gathered": gathered(Path(folder) / "gathered", world),
        "old": from_before(Path(folder) / "old", world),
    }
    if world.leads:
        print("TOLD " + json.dumps(told))
    world.barrier()
    world.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
