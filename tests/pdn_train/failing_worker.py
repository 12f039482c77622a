"""Run under torchrun by test_train.py: a training run in which rank 1 raises at step 3."""

from __future__ import annotations

import sys

from pdn_train import train
from pdn_train.engine import Engine

original, taken = Engine.step, 0


def step(self: Engine, *arguments: object) -> object:
    global taken
    taken += 1
    if self.world.rank == 1 and taken == 3:
        raise RuntimeError("rank 1 has had enough")
    return original(self, *arguments)


Engine.step = step
sys.exit(train.main())
