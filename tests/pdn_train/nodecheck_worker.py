"""Run under torchrun by test_nodecheck.py: two ranks check each other, sound, then with each of rank 1's faults."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from pdn_train import nodecheck
from pdn_train.nodecheck import NodeError, check_nodes
from pdn_train.world import World

world = World.detect(device="cpu")
world.start(60)
original = nodecheck.product_fault, dist.all_reduce


def wrong_sum(tensor: torch.Tensor, *arguments: object, **named: object) -> object:
    work = original[1](tensor, *arguments, **named)
    if tensor.numel() == 4096:
        tensor[9] += 1
    return work


def said(name: str) -> str:
    try:
        check_nodes(world, Path(sys.argv[1]), 0.0)
    except NodeError as error:
        return f"SAID {world.rank} {name}: {error}"
    return f"SAID {world.rank} {name}: None"


lines = [said("sound")]
if world.rank == 1:
    nodecheck.product_fault = lambda device: "a torch.float32 matrix product on cpu is wrong"
lines.append(said("product"))
nodecheck.product_fault = original[0]
if world.rank == 1:
    dist.all_reduce = wrong_sum
lines.append(said("sum"))
dist.all_reduce = original[1]
for rank in range(world.size):
    if rank == world.rank:
        print("\n".join(lines), flush=True)
    world.barrier()
world.stop()
