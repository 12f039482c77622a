"""Time the whole training step: `[torchrun --nproc-per-node N] python -m pdn_train.bench yaml/X.yaml [section.key=value ...]`.

Builds model, engine, optimizer and loader as `pdn_train.train` does and runs steps of --accumulation micro-batches on every rank
(train.global_batch follows from it), on the run's shards or, where data.path is no folder, on random tokens through the same loader.
Prints as it goes:

    seconds to the model, to the end of step 1, and of the warm-up
    ms a step, the median, and by part (`profiling.Parts`); tokens/s a GPU; MFU with the recurrence's FLOPs
    (`estimate.flops_per_token`); peak memory; how long the host is busy with a step
    on a GPU the places in the code that make the host wait for the device, and of PROFILED more steps the table of `bench_launches`

--variant "section.key=value ..." times the same file with these settings too, in the same process, and may be repeated; the last lines
compare. --peer fla then trains flash-linear-attention's model of the same shape (`bench_peer`).
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from pdn_train import bench_launches, bench_peer, estimate
from pdn_train.compiling import compile_kernels
from pdn_train.config import Config, ConfigError, load
from pdn_train.data import Loader, Samples, open_samples
from pdn_train.engine import Engine
from pdn_train.loop import build_loader
from pdn_train.metrics import memory_gib
from pdn_train.mqar import Examples, open_examples
from pdn_train.optim import learning_rate
from pdn_train.profiling import Moment, Parts
from pdn_train.telling import counted, quietly
from pdn_train.train import EXPECTED, build_model, require_kernel
from pdn_train.world import World, own_rank

PROFILED = 2  # steps


class RandomTokens:
    """Uniform token ids in place of shards, of one vocabulary and sample length, the same at every run."""

    eos_id = 0

    def __init__(self, vocab_size: int, seq_len: int):
        self.vocab_size, self.seq_len = vocab_size, seq_len

    def pair(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, labels), [seq_len] int64 each, as `Samples.pair`."""
        tokens = np.random.default_rng([0, position]).integers(self.vocab_size, size=self.seq_len + 1)
        return tokens[:-1], tokens[1:]


@dataclass(frozen=True)
class Timing:
    """What one configuration came to."""

    title: str
    step: float  # seconds, the median
    parts: dict[str, float]  # of them
    host: float  # seconds the host was busy
    tokens_per_second: float  # a GPU
    mfu: float | None
    memory: float  # GiB
    losses: list[float]

    def __str__(self) -> str:
        rate = f"{self.tokens_per_second:,.0f} tokens/s a GPU" + (f", MFU {self.mfu:.1%}" if self.mfu else "")
        return f"{1e3 * self.step:.1f} ms a step, {rate}, peak {self.memory:.2f} GiB"


class Training:
    """The parts of a run, and its steps."""

    def __init__(self, config: Config, world: World, loader: Loader):
        self.config, self.world = config, world
        compile_kernels(config, world.device)
        self.engine = Engine(build_model(config), config, world)
        self._batches = loader.steps(0)
        self.losses: list[torch.Tensor] = []

    def step(self) -> Parts:
        parts = self.engine.begin = Parts(self.world.device)
        parts("samples")
        batches, _ = next(self._batches)
        targets, *_ = self.world.sum([sum(batch.targets for batch in batches), 0, 0, 0])
        rate = learning_rate(len(self.losses), self.config.optim, self.config.train.steps)
        self.losses.append(self.engine.step(batches, rate, targets).loss)
        return parts

    def close(self) -> None:
        self._batches.close()
        self.engine.close()
        for parameter in self.engine.model.parameters():  # DeepSpeed's methods on them outlive the engine: the weights need not
            parameter.data = parameter.data.new_empty(0)


def tokens(config: Config) -> tuple[Samples | Examples | RandomTokens, str]:
    """What to train on, and a word for it."""
    data, vocab = config.data, config.model.vocab_size
    if data.mqar_pairs:
        return open_examples(config)[0], "mqar examples"
    folders = data.path if isinstance(data.path, dict) else [data.path]
    if all(Path(folder).is_dir() for folder in folders):
        return open_samples(data.path, data.seq_len, data.seed, vocab), "data.path's shards"
    return RandomTokens(vocab, data.seq_len), f"random tokens (data.path={data.path} is not here)"


def configure(file: str, overrides: list[str], accumulation: int, world_size: int) -> Config:
    """The file's configuration with so many micro-batches a step on each rank."""
    config = load(file, overrides)
    batch = config.train.micro_batch * config.data_parallel(world_size) * accumulation
    return load(file, [*overrides, f"train.global_batch={batch}"])


def bench(kind: type[Training], config: Config, world: World, steps: int, warmup: int, title: str) -> Timing:
    """Collective. kind: `Training`, or what takes its place. Prints on rank 0."""
    begun = time.perf_counter()
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
    samples, source = tokens(config)
    say(world, f"\n{title}\n{describe(config, world, source)}")
    training = kind(config, world, build_loader(samples, config.accumulation(world.size), config, world))
    say(world, f"built in {time.perf_counter() - begun:.1f} s, peak {memory_gib(world.device):.2f} GiB")
    for done in range(1, warmup + 1):
        training.step()
        loss = training.losses[-1].item()
        if done in (1, warmup):
            say(world, f"step {done} of the warm-up done after {time.perf_counter() - begun:.1f} s, loss {loss:.4f}")
    timing = timed(training, steps, title)
    say(world, f"\n{timing}\n{parts_table(timing)}")
    if world.device.type == "cuda":
        say(world, f"    the host waits for the device at {host_waits(training)}\n")
        say(world, profiled(training))
    training.close()
    return timing


def timed(training: Training, steps: int, title: str) -> Timing:
    config, world = training.config, training.world
    begun, parts, host, last = [], [], [], None
    for _ in range(steps):
        start = time.perf_counter()
        begun.append(Moment(world.device))
        parts.append(training.step())
        host.append(time.perf_counter() - start)
        if last is not None:
            last.wait()  # as the journal, which reads a step's numbers while the next one runs
        last = Moment(world.device)
    seconds = median(b.seconds_since(a) for a, b in pairwise([*begun, last]))
    each = [one.seconds() for one in parts]
    rate = config.train.global_batch * config.data.seq_len / seconds / world.size
    peak = estimate.peak_flops(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None
    return Timing(
        title=title,
        step=seconds,
        parts={name: median(one[name] for one in each) for name in each[0]},
        host=median(host),
        tokens_per_second=rate,
        mfu=rate * estimate.flops_per_token(config) / peak if peak else None,
        memory=max(world.gather(memory_gib(world.device))),
        losses=torch.stack(training.losses).tolist(),
    )


def describe(config: Config, world: World, source: str) -> str:
    model, train = config.model, config.train
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
    options = f"ZeRO-{config.parallel.zero}, {train.precision}, kernel {model.kernel}, checkpointing {train.activation_checkpoint}"
    return (
        f"{model.recurrence}, {estimate.parameters(model) / 1e6:.1f}M parameters; {train.micro_batch} x {config.data.seq_len} tokens x "
        f"{counted(config.accumulation(world.size), 'micro-batch', 'micro-batches')} a rank, {source}\n{world.size} x {device}, {options}; "
        f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    )


def parts_table(timing: Timing) -> str:
    rest = timing.step - sum(timing.parts.values())
    lines = [
        f"    {name:20}{1e3 * seconds:9.2f} ms{seconds / timing.step:8.1%}" for name, seconds in [*timing.parts.items(), ("rest", rest)]
    ]
    return "\n".join(
        [*lines, f"    the host is busy for {1e3 * timing.host:.2f} ms; loss {timing.losses[0]:.4f} .. {timing.losses[-1]:.4f}"]
    )


def host_waits(training: Training) -> str:
    """Runs a step. Where in the code torch knows the host to wait for the device, and how often."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("always")
        training.step()
    torch.cuda.set_sync_debug_mode("default")
    places = Counter(f"{'/'.join(Path(one.filename).parts[-2:])}:{one.lineno}" for one in met if "synchroniz" in str(one.message))
    return ", ".join(f"{place} x {count}" for place, count in places.most_common()) or "none"


def profiled(training: Training) -> str:
    """Runs PROFILED steps."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(PROFILED):
            training.step()
        torch.cuda.synchronize()
    return bench_launches.table(*bench_launches.launches(recorded), PROFILED)


def say(world: World, text: str) -> None:
    if world.leads:
        print(text, flush=True)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pdn_train.bench", description=__doc__.split("\n")[0])
    parser.add_argument("config", help="a file such as yaml/pgdn_340m.yaml")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="settings that replace the file's")
    parser.add_argument("--variant", action="append", default=[], metavar='"section.key=value ..."', help="these settings too; repeatable")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step on each rank")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--peer", choices=("fla",), help="then train flash-linear-attention's model of the same shape")
    options = parser.parse_intermixed_args(argv)
    if min(options.steps, options.warmup, options.accumulation) < 1:
        parser.error("--steps, --warmup and --accumulation are at least 1")
    return options


def run(options: argparse.Namespace) -> None:
    settings = [options.overrides, *([*options.overrides, *variant.split()] for variant in options.variant)]
    first = load(options.config, options.overrides)
    world = World.detect(first.parallel.sequence, first.train.device)
    configs = [configure(options.config, overrides, options.accumulation, world.size) for overrides in settings]
    for config in configs:
        if (config.parallel.sequence, config.train.device) != (first.parallel.sequence, first.train.device):
            raise ConfigError("--variant cannot change parallel.sequence or train.device: the ranks meet once; start the bench again")
        require_kernel(config, world)
        if options.peer:
            bench_peer.require(config, world)
    world.start(first.launch.hang_seconds)
    titles = [" ".join([Path(options.config).stem, *overrides]) for overrides in settings]
    kinds = [(Training, ""), (bench_peer.Peer, ", fla")] if options.peer else [(Training, "")]
    timings = []
    for kind, whose in kinds:
        for config, title in zip(configs, titles, strict=True):
            timings.append(bench(kind, config, world, options.steps, options.warmup, title + whose))
            free(world)
    say(world, "\n" + "\n".join(f"{timing.title}: {timing}" for timing in timings))
    world.barrier()
    world.stop()


def free(world: World) -> None:
    """What the last model held."""
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    return exit_status(lambda: run(options))


def exit_status(act: Callable[[], None]) -> int:
    """Act; 2, after a line that says so, where it met what a user can mend."""
    try:
        act()
    except EXPECTED as error:
        print(f"error: rank {own_rank()}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(quietly(main))
