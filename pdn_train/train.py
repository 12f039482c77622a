"""One training run: `torchrun --nproc-per-node N -m pdn_train.train yaml/X.yaml [section.key=value ...]`.

Builds each part by name, resumes from the newest whole checkpoint of run_dir, then loops. Exits 0 when done, 75 when it was asked to stop
and wrote a checkpoint, 2 for a configuration that cannot run, 1 for anything else. `--dry-run` prints what would run and starts nothing;
its last lines say what of the data would stop the run, with exit code 0 where a folder is only missing and 2 where it does not fit.
"""

from __future__ import annotations

if __name__ == "__main__":  # before torch is imported, which takes seconds in which a signal would kill
    from pdn_train.signals import StopRequest

    STOP = StopRequest()

import argparse
import json
import logging
import os
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from pdn_train import estimate
from pdn_train.checkpoint import CheckpointError, Progress, Saved
from pdn_train.compiling import compile_kernels
from pdn_train.config import Config, ConfigError, changed, dump, load
from pdn_train.data import Samples
from pdn_train.engine import Engine, deepspeed_config
from pdn_train.heartbeat import begin_attempt
from pdn_train.lease import Lease
from pdn_train.loop import Loop, build_loader, finished_at
from pdn_train.metrics import Journal, NonfiniteError, Pace, cut_back
from pdn_train.model import LanguageModel
from pdn_train.mqar import MqarError
from pdn_train.nodecheck import NodeError, check_nodes
from pdn_train.profiling import Profiler
from pdn_train.readable import data_faults, open_all, tell_faults
from pdn_train.resume import newest_whole, require_same_run, restore
from pdn_train.rundir import RunDir, RunDirError, UnwritableError
from pdn_train.saving import Checkpoints, WriteError, require_space
from pdn_train.shards import ShardError
from pdn_train.signals import REQUEUE, StopRequest, leave
from pdn_train.stragglers import OwnTime
from pdn_train.tasks import EvaluationError
from pdn_train.telling import quietly
from pdn_train.watchdog import Watchdog
from pdn_train.weights import WeightsError, find, load_into, load_weights
from pdn_train.world import Disagreement, World, WorldError, own_rank, own_ranks, require_kernel_cache

log = logging.getLogger("pdn_train")


def run(config: Config, world: World, stop: StopRequest, watchdog: Watchdog, samples: Samples, validation: Samples | None) -> int:
    """Train to config.train.steps or to a stop request; returns the exit code. Collective."""
    run_dir = RunDir(Path(config.run_dir))
    with take(run_dir, world) as lease, Checkpoints(run_dir.checkpoints, config.checkpoint, world) as checkpoints:
        watchdog.beat("checking the nodes")
        check_nodes(world, run_dir.logs, sum(estimate.memory_per_gpu(config, world.size).values()))
        watchdog.beat("checking the checkpoints")
        saved = newest_whole(run_dir.checkpoints, world)
        if saved is not None:
            world.together(lambda: require_same_run(saved, config, samples.fingerprint, world))
        world.from_leader(lambda: require_space(run_dir.checkpoints, estimate.parameters(config.model)))
        engine = build_engine(config, world, watchdog, samples, saved)
        checkpoints.reserve(engine)
        progress = resumed(saved, config) if saved is not None else Progress()
        checkpoints.last_step = progress.step if saved is not None else None
        world.from_leader(lambda: run_dir.record(dump(config), samples.tokenizer))
        world.from_leader(lambda: cut_back(run_dir, progress.step))
        announce(config, world, saved)

        loader = build_loader(samples, config.accumulation(world.size), config, world)
        journal = Journal(run_dir, world, progress, pace(config, world), config.train.steps, config.log.every, config.train.max_nonfinite)
        checkpoints.tell = journal.checkpoint
        profiler = Profiler(config.profile, run_dir.tensorboard, world)
        own_time = OwnTime(engine.model, world)
        parts = (engine, checkpoints, journal, profiler, own_time, samples, validation)
        training = Loop(config, world, stop, watchdog, lease, *parts, progress)
        with finished_at(NonfiniteError, checkpoints):
            with closing(loader.steps(progress.position)) as steps:
                training.go_on(steps)
            profiler.close()
            training.end()
        done = training.progress.step >= config.train.steps
        if world.leads:
            log.info("%s: %s", "done" if done else stopped(training.progress.step, stop), run_dir.checkpoints)
        return 0 if done else REQUEUE


def build_engine(config: Config, world: World, watchdog: Watchdog, samples: Samples, saved: Saved | None) -> Engine:
    """The model under DeepSpeed, with the weights of the checkpoint, of `init_from`, or of train.seed. Collective."""
    watchdog.beat("compiling the kernels")
    compile_kernels(config, world.device)
    watchdog.beat("building the model")
    model = build_model(config)
    warm = warm_start(config, world, model, samples) if saved is None and config.init_from is not None else None
    engine = Engine(model, config, world)
    if saved is not None:
        watchdog.beat("loading the checkpoint", saved.progress.step)
        restore(saved, engine, config, world)
    elif config.init_from is not None:
        engine.set_masters(warm)
    return engine


def stopped(step: int, stop: StopRequest) -> str:
    """torchrun does not know of exit codes that mean no harm: after our last line it prints where in its own code the signal met it."""
    then = "torchrun adds a traceback of its own" if torch.distributed.is_torchelastic_launched() else f"exit code {REQUEUE}"
    return f"stopped at step {step} by {stop.name or 'another rank'}, nothing is lost: the same command goes on from there ({then})"


def open_data(config: Config, world: World) -> tuple[Samples, Samples | None]:
    """The training samples, and the validation samples where they are wanted. Every rank opens and checks the shards."""
    return world.each(lambda: open_all(config))


def resumed(saved: Saved, config: Config) -> Progress:
    """The checkpoint's progress; with another optimizer setting a streak of skipped steps counts from 0 again."""
    same = saved.state["config"]["optim"] == config.model_dump(mode="json")["optim"]
    return saved.progress if same else replace(saved.progress, skipped_in_row=0)


def take(run_dir: RunDir, world: World) -> Lease:
    """Rank 0 makes the folder and takes its lease; then every rank logs there."""
    lease = Lease(run_dir, world.job)

    def act() -> None:
        run_dir.create()
        lease.acquire()

    world.from_leader(act)
    log_to(run_dir.logs / f"rank_{world.rank:05d}.log")
    return lease


def build_model(config: Config) -> LanguageModel:
    """The model with the initial weights of train.seed."""
    torch.manual_seed(config.train.seed)
    model = LanguageModel(config.model, activation_checkpoint=config.train.activation_checkpoint)
    model.init_weights(config.train.seed)
    if config.train.compile:
        for block in model.blocks:
            block.compile()
    return model


def warm_start(config: Config, world: World, model: LanguageModel, samples: Samples) -> dict[str, Tensor] | None:
    """The weights of `init_from`, read once, by rank 0 (None elsewhere), if they fit the model and the shards' tokenizer."""
    found: list[dict[str, Tensor]] = []

    def act() -> None:
        tokenizer = find(config.init_from).tokenizer
        if tokenizer is not None and tokenizer.read_bytes() != samples.tokenizer.read_bytes():
            raise WeightsError(
                f"init_from={config.init_from} was trained with the tokenizer {tokenizer}, the shards have {samples.tokenizer}"
            )
        found.append(load_weights(config.init_from))
        load_into(model, found[0], config.init_from)

    world.from_leader(act)
    return found[0] if found else None


def pace(config: Config, world: World) -> Pace:
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
    return Pace(config.train.global_batch * config.data.seq_len, estimate.flops_per_token(config), estimate.peak_flops(device))


def announce(config: Config, world: World, saved: Saved | None) -> None:
    if world.leads:
        shared = f", {world.sequence} ranks a sequence" if world.sequence > 1 else ""
        where = f"{world.size} x {world.device.type}{shared}, ZeRO-{config.parallel.zero}, {config.train.precision}"
        log.info("%s, %.1fM parameters, %s, %s", config.model.recurrence, estimate.parameters(config.model) / 1e6, where, config.run_dir)
        if saved is not None:
            at = saved.progress
            log.info("resumed at step %d, sample %d, %d tokens", at.step, at.position, at.tokens)
        else:
            log.info("no checkpoint was published in %s: starting at step 0", RunDir(Path(config.run_dir)).checkpoints)


class _Lossy(logging.Handler):
    """Loses lines that cannot be written, where logging would print a traceback for each: the run goes on."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class LogFile(_Lossy, logging.FileHandler):
    """Of a disk that may be full; the terminal has the lines."""


class LogTerminal(_Lossy, logging.StreamHandler):
    """Of a file on a full disk, or a pipe whose reader has left (`| head`); the log file has the lines."""


def log_to(file: Path | None) -> None:
    """Log to the terminal, or add a file to it."""
    handler = LogTerminal(sys.stdout) if file is None else LogFile(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S" if file is None else "%Y-%m-%d %H:%M:%S"))
    for name in ("pdn_train", "kernels"):
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(logging.INFO)


def dry_run(config: Config, world_size: int, overrides: list[str]) -> str:
    """What would run on `world_size` ranks, as text: estimates, batch arithmetic, settings, DeepSpeed's JSON."""
    ours = ", of which pdn_train/flat_zero.py makes ZeRO-2" if config.flat_zero and config.parallel.zero == 2 else ""
    settings = json.dumps(deepspeed_config(config, world_size), indent=2)
    here = estimate.machine(config, torch.cuda.device_count())
    return f"{estimate.report(config, world_size)}\n{here}\n{chosen(config, overrides)}\n\nDeepSpeed configuration{ours}:\n{settings}"


def chosen(config: Config, overrides: list[str]) -> str:
    """The settings that are not the defaults, a line each."""
    said = {item.partition("=")[0] for item in overrides}
    values = {key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for key, value in changed(config).items()}
    lines = [f"{key}={value}{' (command line)' * (key in said or key.partition('.')[0] in said)}" for key, value in values.items()]
    return "settings  " + "\n          ".join(lines)


# What a user can mend: said in one line, without a traceback
EXPECTED = (
    CheckpointError,
    ConfigError,
    Disagreement,
    EvaluationError,
    MqarError,
    NodeError,
    NonfiniteError,
    RunDirError,
    ShardError,
    WeightsError,
    WorldError,
)


# Of these, what another rank says for itself, what another node may not have, and what may work once more
ELSEWHERE = (Disagreement, NodeError, UnwritableError, WriteError)


DRY_RUN = "print size, FLOPs, memory, tokens, settings and DeepSpeed's JSON for launch.nodes x launch.gpus_per_node ranks; start nothing"


def start(config: Config, stop: StopRequest, watchdog: Watchdog | None = None) -> int:
    """Join the world and train; returns the exit code, 0 or REQUEUE. Raises what ended the run: one of EXPECTED, or a fault of the program.

    watchdog: of a launcher that has started one already; otherwise each rank starts its own once the ranks have met.
    """
    try:
        world = World.detect(config.parallel.sequence, config.train.device)
        config.accumulation(world.size)
        require_kernel(config, world)
        if watchdog is not None:
            watchdog.beat("looking for the other ranks")
        world.start(config.launch.collective_seconds)
        data = open_data(config, world)
        if watchdog is None:
            watchdog = watch(config, world)
        code = run(config, world, stop, watchdog, *data)
        told = stop.name  # before a rank can leave, since a launcher may then end the others by a signal
        world.barrier()  # a rank that leaves while another still talks to it takes that one down
    except BaseException as error:
        if watchdog is not None:
            watchdog.end("failed", error, final=isinstance(error, EXPECTED) and not isinstance(error, ELSEWHERE))
        raise
    watchdog.end("done" if code == 0 else "stopped", told=told)
    world.stop()
    return code


def require_kernel(config: Config, world: World) -> None:
    """Raise ConfigError or WorldError where model.kernel cannot run on this rank."""
    if config.model.kernel == "triton" and world.device.type != "cuda":
        raise ConfigError(f"model.kernel=triton needs a GPU, and this rank computes on {world.device}; use model.kernel=torch")
    if config.model.kernel == "triton":
        require_kernel_cache()


def watch(config: Config, world: World) -> Watchdog:
    """A watchdog for each rank of a run that `launch` did not start."""
    run_dir = RunDir(Path(config.run_dir))
    world.from_leader(run_dir.create)
    name = world.from_leader(lambda: f"{time.time():.3f}-{os.getpid()}")

    def begin() -> Path:
        with run_dir.writing():
            return begin_attempt(run_dir.heartbeats, name)

    return Watchdog(world.each(begin), world.rank, world.size, config.launch.hang_seconds).start()


@record
def main(argv: list[str] | None = None, stop: StopRequest | None = None) -> int:
    """stop: of a program that listens already."""
    parser = argparse.ArgumentParser(prog="pdn_train.train", description="Train one model; resumes by itself from run_dir/checkpoints.")
    parser.add_argument("config", help="a file such as yaml/pgdn_tiny.yaml")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="settings that replace the file's")
    parser.add_argument("--dry-run", action="store_true", help=DRY_RUN)
    arguments = parser.parse_intermixed_args(argv)
    log_to(None)
    try:
        config = load(arguments.config, arguments.overrides)
        if arguments.dry_run:
            if own_rank():
                return 0
            print(dry_run(config, own_ranks() or config.launch.ranks, arguments.overrides), flush=True)
            return tell_faults(*data_faults(config))
        return start(config, stop or StopRequest())
    except ConfigError as error:
        if own_rank() == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    except WorldError as error:
        print(f"error: rank {own_rank()}: {error}", file=sys.stderr)
        return 2
    except EXPECTED as error:
        log.error("rank %d: %s: %s", own_rank(), type(error).__name__, error)
        return 1


if __name__ == "__main__":
    leave(quietly(lambda: main(stop=STOP)) or 0)  # None after --help: `record` takes SystemExit(0) for a return
