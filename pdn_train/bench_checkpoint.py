"""Time checkpoints: `[torchrun --nproc-per-node N] python -m pdn_train.bench_checkpoint yaml/X.yaml --folder F [section.key=value ...]`.

Trains as `pdn_train.bench` does (on random tokens where data.path is no folder), saves twice into a folder that it makes in F and removes
at the end, and trains on while each is written. Prints of each save how long training stood still, on the slowest rank, how long it took
to be published and its bytes, and the median of the --steps steps before it and of those while it was written.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from pdn_train.bench import Training, configure, describe, exit_status, say, tokens
from pdn_train.checkpoint import Progress
from pdn_train.config import load
from pdn_train.loop import build_loader
from pdn_train.profiling import Moment
from pdn_train.saving import Checkpoints, Published
from pdn_train.telling import quietly
from pdn_train.train import require_kernel
from pdn_train.world import World

SAVES = 2


class Saving:
    """Training that can be saved."""

    def __init__(self, training: Training, checkpoints: Checkpoints):
        self.training, self.checkpoints = training, checkpoints
        self.published: list[Published] = []
        checkpoints.tell = self.published.append
        checkpoints.reserve(training.engine)

    def steps(self, more: Callable[[], bool]) -> list[float]:
        """Seconds of each step, taken as long as `more`, with the meeting of the ranks that the training loop has."""
        device, found = self.training.world.device, []
        while more():
            begun = Moment(device)
            if self.training.world.sum([self.checkpoints.own_part_done])[0] == self.training.world.size:
                self.checkpoints.proceed()
            self.training.step()
            if found:
                found[-1][1].wait()  # as the journal, which reads a step's numbers while the next one runs
            found.append((begun, Moment(device)))
        return [ended.seconds_since(begun) for begun, ended in found]

    def some_steps(self, count: int) -> float:
        """The median of their seconds."""
        left = iter(range(count))
        return median(self.steps(lambda: next(left, None) is not None))

    def save(self) -> tuple[Published, list[float]]:
        """What it cost, and the seconds of the steps that were taken while it was written."""
        done, before = Progress(step=len(self.training.losses)), len(self.published)
        self.checkpoints.save(self.training.engine, done, self.training.config, {})
        during = self.steps(lambda: len(self.published) == before)
        return self.published[-1], during


def bench(training: Training, folder: Path, steps: int, warmup: int) -> None:
    """Collective. Prints on rank 0."""
    world = training.world
    with Checkpoints(folder, training.config.checkpoint, world) as checkpoints:
        saving = Saving(training, checkpoints)
        saving.some_steps(warmup)
        for number in range(1, SAVES + 1):
            before = saving.some_steps(steps)
            cost, during = saving.save()
            stall = max(world.gather(cost.stall))
            size = f"{cost.size / 1e9:.2f} GB"
            say(world, f"save {number}: training stood still for {stall:.2f} s; published after {cost.seconds:.1f} s, {size}")
            longest = f"{len(during)} steps, the longest {1e3 * max(during):.1f}"
            say(world, f"    ms a step: {1e3 * before:.1f} before, {1e3 * median(during):.1f} while it was written ({longest})")


def run(options: argparse.Namespace) -> None:
    first = load(options.config, options.overrides)
    world = World.detect(first.parallel.sequence, first.train.device)
    config = configure(options.config, options.overrides, options.accumulation, world.size)
    require_kernel(config, world)
    world.start(config.launch.collective_seconds)
    folder = world.from_leader(lambda: Path(tempfile.mkdtemp(prefix="bench_checkpoint_", dir=options.folder)))
    try:
        samples, source = tokens(config)
        disk = shutil.disk_usage(folder).free / 1e9
        say(world, f"{describe(config, world, source)}\n{folder.parent}, {disk:.0f} GB free")
        begun = time.perf_counter()
        training = Training(config, world, build_loader(samples, config.accumulation(world.size), config, world))
        say(world, f"built in {time.perf_counter() - begun:.1f} s")
        bench(training, folder, options.steps, options.warmup)
        training.close()
        world.barrier()
    finally:
        if world.leads:
            shutil.rmtree(folder)
    world.stop()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pdn_train.bench_checkpoint", description=__doc__.split("\n")[0])
    parser.add_argument("config", help="a file such as yaml/pgdn_1b.yaml")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="settings that replace the file's")
    parser.add_argument("--folder", required=True, help="an existing folder of the file system that is to hold the checkpoints")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step on each rank")
    parser.add_argument("--steps", type=int, default=10, help="before each save")
    parser.add_argument("--warmup", type=int, default=3)
    options = parser.parse_intermixed_args(argv)
    if min(options.steps, options.warmup, options.accumulation) < 1:
        parser.error("--steps, --warmup and --accumulation are at least 1")
    return exit_status(lambda: run(options))


if __name__ == "__main__":
    sys.exit(quietly(main))
