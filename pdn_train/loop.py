"""The training loop, one optimizer step after the other, with what happens between two: the ranks' meeting, looks, validation, saves."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from pdn_train.checkpoint import CheckpointError, Progress
from pdn_train.config import Config
from pdn_train.data import Batch, Loader, Samples
from pdn_train.engine import Engine
from pdn_train.health import measure
from pdn_train.lease import Lease
from pdn_train.metrics import Journal
from pdn_train.optim import learning_rate
from pdn_train.profiling import Profiler
from pdn_train.rundir import RunDirError
from pdn_train.saving import Checkpoints
from pdn_train.shards import ShardError
from pdn_train.signals import StopRequest
from pdn_train.stragglers import OwnTime
from pdn_train.tasks import Options, Subject, evaluate_loss, run_tasks
from pdn_train.tokenizer import Tokenizer
from pdn_train.watchdog import Watchdog
from pdn_train.world import Disagreement, World, own_rank

log = logging.getLogger(__name__)


@dataclass
class Loop:
    """A run's parts while it trains, and where it stands. Every method is collective."""

    config: Config
    world: World
    stop: StopRequest
    watchdog: Watchdog
    lease: Lease
    engine: Engine
    checkpoints: Checkpoints
    journal: Journal
    profiler: Profiler
    own_time: OwnTime
    samples: Samples
    validation: Samples | None
    progress: Progress

    def go_on(self, steps: Iterator[tuple[list[Batch], int]]) -> None:
        """Train to config.train.steps, or to the step boundary at which the ranks learn that one was told to stop."""
        config = self.config
        while self.progress.step < config.train.steps:
            self.watchdog.beat("reading samples", self.progress.step)
            with self.own_time.reading():
                batches, position, fault = take_batches(steps)
            self.watchdog.beat("meeting the other ranks")
            targets, stopping = self.meet(sum(batch.targets for batch in batches), fault)
            if stopping:
                return
            self.watchdog.beat("computing")
            self.step(batches, position, targets)
            step = self.progress.step
            if step % config.log.every == 0:
                self.own_time.report(config.log.every)
            if config.log.health and step % config.log.health == 0:
                self.measure_recurrences(batches[0])
            if config.eval.every and step % config.eval.every == 0:
                self.validate()
            if step % config.checkpoint.every == 0:
                self.save()

    def meet(self, targets: int, fault: ShardError | None) -> tuple[int, bool]:
        """One small exchange between the hosts a step: (all ranks' targets, whether any was told to stop).

        fault: met in reading this rank's samples. Raises it, Disagreement on the other ranks, RunDirError where the lease is lost, and what
        `Checkpoints.proceed` raises.
        """
        flags = [self.stop.name is not None, self.lease.lost is not None, fault is not None, self.checkpoints.own_part_done]
        targets, stopping, lost, unread, written = self.world.sum([targets, *flags])
        if lost:
            raise RunDirError(self.lease.lost or "rank 0 lost the lease of the run folder to another job")
        if unread:
            finish_before_the_end(self.checkpoints)
            raise fault or Disagreement("another rank cannot read its samples; its own line says why")
        if written == self.world.size:
            self.checkpoints.proceed()
        return targets, stopping > 0

    def step(self, batches: list[Batch], position: int, targets: int) -> None:
        """One optimizer step. position: of the samples after it; targets: of all ranks. Raises NonfiniteError, one step later."""
        config, before = self.config, self.progress
        rate = learning_rate(before.step, config.optim, config.train.steps)
        with self.profiler.step(before.step, self.engine) as parts:
            outcome = self.engine.step(batches, rate, targets)
        tokens = before.tokens + config.train.global_batch * config.data.seq_len
        self.progress = replace(before, step=before.step + 1, position=position, tokens=tokens)
        self.journal.add(self.progress, self.engine.rate, outcome)
        if parts is not None:
            self.journal.parts(self.progress, parts.seconds())

    def measure_recurrences(self, batch: Batch) -> None:
        """batch: of this rank, on which to look at them."""
        settled = self.journal.flush()
        self.watchdog.beat("measuring the recurrences")
        with self.journal.paused():
            self.journal.health(settled, measure(self.engine.model, batch.input_ids.to(self.world.device)))

    def validate(self) -> None:
        settled = self.journal.flush()
        self.watchdog.beat("validating")
        with self.journal.paused():
            loss, targets = validation_loss(self.engine, self.validation, self.config, self.world)
            self.journal.validation(settled, loss, targets, task_results(self.engine, self.samples, self.config, self.world))

    def save(self, in_streak: bool = False) -> None:
        """Begin a checkpoint. in_streak: even amid steps that were skipped."""
        settled = self.journal.flush()
        if settled.skipped_in_row and not in_streak:
            return  # weights are those of an earlier step, and in a long streak its checkpoint must not be pruned away
        self.watchdog.beat("saving a checkpoint", settled.step)
        with self.journal.paused():
            self.checkpoints.save(self.engine, settled, self.config, self.samples.fingerprint)

    def end(self) -> None:
        """Leave a checkpoint of the last step, published, and everything told."""
        if self.checkpoints.last_step != self.progress.step:
            self.save(in_streak=True)
        self.watchdog.beat("finishing the checkpoint", self.progress.step)
        self.checkpoints.finish()


def build_loader(samples: Samples, accumulation: int, config: Config, world: World) -> Loader:
    """This rank's share of the samples, and its piece of each."""
    place = (world.data_rank, world.data_ranks, config.data.reset_at_documents, world.sequence_rank, world.sequence)
    return Loader(samples, config.train.micro_batch, accumulation, *place)


def take_batches(steps: Iterator[tuple[list[Batch], int]]) -> tuple[list[Batch], int, ShardError | None]:
    """The next step's micro-batches and the position after it, or no batches and the fault met in reading them."""
    try:
        return *next(steps), None
    except ShardError as error:
        return [], 0, error


def validation_loss(engine: Engine, samples: Samples, config: Config, world: World) -> tuple[float, int]:
    """(nats per target token, target tokens) over the first eval.samples validation samples, shared out over the ranks."""
    batches = build_loader(samples, 1, config, world).once(config.eval.samples)
    loss, targets = evaluate_loss(engine.model, batches, world.device, engine.relay)
    total = world.sum_floats([loss, float(targets)])
    return total[0] / max(1.0, total[1]), int(total[1])


def task_results(engine: Engine, samples: Samples, config: Config, world: World) -> dict:
    """The results of eval.tasks at the length of training. Every rank computes all: sharded weights run on all ranks together."""
    if not config.eval.tasks:
        return {}
    tokenizer = None if samples.tokenizer is None else Tokenizer.load(samples.tokenizer)
    subject = Subject(engine.model, tokenizer, config.data.model_dump(), config.run_dir)
    lengths = (config.data.seq_len,)
    options = Options(samples=config.eval.samples, micro_batch=config.train.micro_batch, device=world.device, lengths=lengths)
    return run_tasks(subject, config.eval.tasks, options)


@contextmanager
def finished_at(error: type[Exception], checkpoints: Checkpoints) -> Iterator[None]:
    """Where all ranks meet this error at once, `finish_before_the_end`."""
    try:
        yield
    except error:
        finish_before_the_end(checkpoints)
        raise


def finish_before_the_end(checkpoints: Checkpoints) -> None:
    """An error that all ranks have met still lets the checkpoint that is being written be published. Collective.

    A fault of that goes to the log: the error that ends the run is the other one.
    """
    try:
        checkpoints.finish()
    except (CheckpointError, Disagreement) as fault:
        log.error("rank %d: %s: %s", own_rank(), type(fault).__name__, fault)
