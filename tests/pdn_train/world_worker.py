"""Run under torchrun by test_world.py: two ranks agree, and rank 1 fails in each of the ways in which ranks act together."""

from __future__ import annotations

from pdn_train.world import World


def fails_on_1(world: World) -> str:
    if world.rank == 1:
        raise ValueError("rank 1 cannot")
    return "fine"


def outcome(act) -> str:
    try:
        return repr(act())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


world = World.detect(device="cpu")
world.start(60)
said = [
    repr(world.sum([world.rank + 1, 10 * world.rank])),
    repr(world.sum_floats([0.1, float(world.rank)])),
    outcome(lambda: world.from_leader(lambda: "from 0")),
    outcome(lambda: world.together(lambda: world.rank * 2)),
    outcome(lambda: world.together(lambda: fails_on_1(world))),
    outcome(lambda: world.each(lambda: fails_on_1(world))),
    outcome(lambda: world.from_leader(lambda: 1 / 0)),
    outcome(lambda: world.each(lambda: world.rank)),
]
for rank in range(world.size):  # one at a time, so that lines do not mix
    if rank == world.rank:
        print("\n".join(f"SAID {rank} {i} {text}" for i, text in enumerate(said)), flush=True)
    world.barrier()
world.stop()
