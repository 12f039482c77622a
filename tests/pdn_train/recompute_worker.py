"""Run under torchrun by test_recompute.py: two ZeRO-3 steps in each activation-checkpointing mode, the second one on packed documents.

Prints {mode: [[loss, gradient norm], ...]}.
"""

from __future__ import annotations

import json

import torch

from pdn_train import engine, recompute
from pdn_train.config import Config, build
from pdn_train.data import Batch
from pdn_train.model import LanguageModel
from pdn_train.world import World

ROWS, LENGTH, VOCABULARY = 2, 24, 50
MODEL = {"recurrence": "pkda", "hidden_size": 32, "num_layers": 4, "num_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY}


def outcomes(mode: str, world: World) -> list[list[float]]:
    train = {"micro_batch": ROWS, "global_batch": 2 * ROWS * world.size, "precision": "fp32", "activation_checkpoint": mode}
    tree = {"run_dir": "unused", "model": MODEL, "data": {"path": "unused", "seq_len": LENGTH}, "optim": {"warmup_steps": 0}}
    config = build({**tree, "train": train, "parallel": {"zero": 3}}, "test")
    model = LanguageModel(config.model, mode)
    model.init_weights(0)
    stepper = engine.Engine(model, config, world)
    targets = 2 * ROWS * LENGTH * world.size
    told = [stepper.step([batch(2 * world.rank + m, packed) for m in range(2)], 1e-2, targets) for packed in (False, True)]
    return [[outcome.loss.item(), outcome.grad_norm.item()] for outcome in told]


def gathering(config: Config, world_size: int) -> dict:
    """DeepSpeed's JSON with limits as tight for this model as its defaults are for a large one: every parameter is freed after its module,
    none is kept for the backward pass, and the next ones are fetched while a block runs, others when it runs again."""
    tree = deepspeed_config(config, world_size)
    tight = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 2000}
    return {**tree, "zero_optimization": {**tree["zero_optimization"], **tight}}


def batch(seed: int, packed: bool) -> Batch:
    """Rows of random tokens, or as the loader lays them out with reset_at_documents: one row, where documents begin."""
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    if not packed:
        return Batch(inputs, labels, None, labels.numel())
    starts = torch.tensor([0, 5 + seed, LENGTH, LENGTH + 1, ROWS * LENGTH], dtype=torch.int32)
    return Batch(inputs.view(1, -1), labels.view(1, -1), starts, labels.numel())


if __name__ == "__main__":
    deepspeed_config, engine.deepspeed_config = engine.deepspeed_config, gathering
    here = World.detect(device="cpu")
    here.start(120)
    found = {mode: outcomes(mode, here) for mode in recompute.RUN}
    if here.leads:
        print("TOLD " + json.dumps(found))
    here.barrier()
    here.stop()
