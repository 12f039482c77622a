"""What a run says of itself: metrics.jsonl, TensorBoard and the progress line, all written by rank 0 alone.

A step's numbers are copied to the host when they are ready and read one step later (`Journal.add`), so the host runs one step ahead of
the device and never waits for it.
On resume everything past the checkpoint's step is cut away, from the event files too (`pdn_train.board`): TensorBoard shows one value per
tag and step, whatever was killed when. A number that is not finite is null in the .jsonl files. A full disk costs entries, not the run.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from tensorboard.compat.proto.summary_pb2 import Summary

from pdn_train.board import Board, bars, cut_events, scalar
from pdn_train.checkpoint import Progress
from pdn_train.files import Growing, parse_line, to_json, write_whole
from pdn_train.health import RANGES, Layer
from pdn_train.outcome import Outcome
from pdn_train.profiling import Moment
from pdn_train.rundir import RunDir
from pdn_train.saving import Published
from pdn_train.telling import sized
from pdn_train.world import World

log = logging.getLogger(__name__)


class NonfiniteError(RuntimeError):
    """Too many steps in a row had a loss or gradient that is not finite."""


@dataclass(frozen=True)
class Pace:
    """What turns seconds into rates: tokens a step, model FLOPs a token, the device's peak FLOP/s (None: unknown, mfu is null)."""

    tokens_per_step: int
    flops_per_token: float
    peak_flops: float | None


class _Step:
    """A launched step whose numbers are on their way to the host."""

    def __init__(self, progress: Progress, rate: float, outcome: Outcome):
        self.progress, self.rate = progress, rate  # progress after the step, its own skip not yet counted
        told = torch.stack([outcome.loss.double(), outcome.grad_norm.double(), outcome.skipped.double()])
        self._told = torch.empty(told.shape, dtype=told.dtype, pin_memory=told.is_cuda)
        self._told.copy_(told, non_blocking=True)
        self.end = Moment(told.device)

    def settle(self) -> None:
        """Wait for the numbers; sets loss, grad_norm and skipped."""
        self.end.wait()
        self.loss, self.grad_norm, skipped = self._told.tolist()
        self.skipped = bool(skipped)


class Journal:
    """Collects each finished step; every rank keeps one, since all must agree on the count of skipped steps; rank 0 writes."""

    def __init__(self, run_dir: RunDir, world: World, start: Progress, pace: Pace, steps: int, every: int, max_nonfinite: int):
        self._world, self._pace = world, pace
        self._steps, self._every, self._max_nonfinite = steps, every, max_nonfinite
        self._waiting: _Step | None = None
        self._progress = start
        self._since, self._since_step, self._paused = Moment(world.device), start.step, 0.0
        self._metrics, self._validation = Growing(run_dir.metrics), Growing(run_dir.validation)
        self._board = Board(run_dir.tensorboard)
        self._full = False  # the last write has failed, and that was said

    def add(self, progress: Progress, rate: float, outcome: Outcome) -> None:
        """Take a step that was just launched; settles the one before. Raises NonfiniteError."""
        before, self._waiting = self._waiting, _Step(progress, rate, outcome)
        if before is not None:
            self._settle(before)

    def flush(self) -> Progress:
        """Settle the last step and return the run's progress with the skipped steps counted."""
        if self._waiting is not None:
            last, self._waiting = self._waiting, None
            self._settle(last)
        return self._progress

    def validation(self, progress: Progress, loss: float, targets: int, tasks: dict) -> None:
        """Write one validation: nats per target token over `targets` tokens, and the results of eval.tasks."""
        if not self._world.leads:
            return
        entry = {"step": progress.step, "tokens": progress.tokens, "loss": loss, "targets": targets}
        values = [scalar("validation/loss", loss), *(scalar(f"validation/{name}", value) for name, value in numbers(tasks))]
        self._keep(progress.step, values, self._validation, entry | ({"tasks": tasks} if tasks else {}))
        said = "".join(f"  {task} {result['accuracy']:.3f}" for task, result in tasks.items())
        log.info("step %d  validation loss %.4f over %d tokens%s", progress.step, loss, targets, said)

    def parts(self, progress: Progress, seconds: dict[str, float]) -> None:
        """Write how long the parts of a profiled step took, in milliseconds."""
        if self._world.leads:
            named = {f"profile/{name.replace(' ', '_')}_ms": 1e3 * value for name, value in seconds.items()}
            self._keep(progress.step, [scalar(name, value) for name, value in named.items()])

    def checkpoint(self, cost: Published) -> None:
        """Say and write what a checkpoint cost."""
        if self._world.leads:
            self._keep(cost.step, [scalar("checkpoint/stall_seconds", cost.stall), scalar("checkpoint/seconds", cost.seconds)])
            said = f"published after {cost.seconds:.1f} s, {sized(cost.size)}"
            log.info("checkpoint of step %d: training stood still for %.2f s; %s", cost.step, cost.stall, said)

    def health(self, progress: Progress, layers: list[Layer]) -> None:
        """Write what `pdn_train.health` measured, by number and layer."""
        if not self._world.leads:
            return
        values = []
        for i, layer in enumerate(layers):
            values += [scalar(f"health/{name}/layer_{i:02d}", value) for name, value in layer.numbers.items()]
            values += [bars(f"health/{name}/layer_{i:02d}", counts, RANGES[name]) for name, counts in layer.histograms.items()]
        self._keep(progress.step, values)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves what happens inside (a save, a validation) out of the rates. Flush first: a step that is still running belongs to them."""
        started = Moment(self._world.device)
        yield
        self._paused += Moment(self._world.device).seconds_since(started)

    def _settle(self, step: _Step) -> None:
        step.settle()
        self._progress = replace(
            step.progress,
            skipped_steps=self._progress.skipped_steps + step.skipped,
            skipped_in_row=self._progress.skipped_in_row + 1 if step.skipped else 0,
        )
        if step.skipped and self._world.leads:
            log.warning("step %d skipped: a gradient was not finite (%d in a row)", self._progress.step, self._progress.skipped_in_row)
        if self._progress.step % self._every == 0 or self._progress.step == self._steps:
            self._write(step)
        if self._progress.skipped_in_row >= self._max_nonfinite:
            last = self._progress.step
            raise NonfiniteError(
                f"steps {last - self._progress.skipped_in_row + 1} to {last} all had gradients that are not finite (train.max_nonfinite="
                f"{self._max_nonfinite}); resume with a lower optim.lr and resume.allow=[optim.lr], or look at the data before "
                f"sample {self._progress.position}"
            )

    def _write(self, step: _Step) -> None:
        steps, seconds = self._progress.step - self._since_step, step.end.seconds_since(self._since) - self._paused
        self._since, self._since_step, self._paused = step.end, self._progress.step, 0.0
        if not self._world.leads:
            return
        entry = self._entry(step, seconds / max(1, steps))
        values = [scalar(f"train/{key}", value) for key, value in entry.items() if key != "step" and value is not None]
        self._keep(entry["step"], values, self._metrics, entry)
        log.info(_progress_line(entry, self._steps))

    def _keep(self, step: int, values: list[Summary.Value], file: Growing | None = None, entry: dict | None = None) -> None:
        """Write what is known of a step, a line of `file` and TensorBoard's values; a run that is well otherwise goes on without them."""
        try:
            if file is not None:
                file.append((to_json(entry) + "\n").encode())
            self._board.add(step, values)
        except OSError as error:
            if not self._full:
                log.warning("step %d could not be written, and the run goes on without such entries until one can be: %s", step, error)
            self._full = True
        else:
            if self._full:
                log.warning("entries are written again, from step %d on", step)
            self._full = False

    def _entry(self, step: _Step, step_seconds: float) -> dict:
        rate = self._pace.tokens_per_step / step_seconds
        peak = self._pace.peak_flops
        return {
            "step": self._progress.step,
            "tokens": self._progress.tokens,
            "loss": step.loss,
            "lr": step.rate,
            "grad_norm": step.grad_norm,
            "tokens_per_second": rate,
            "mfu": rate * self._pace.flops_per_token / (peak * self._world.size) if peak else None,
            "step_seconds": step_seconds,
            "memory_gib": memory_gib(self._world.device),
            "skipped_steps": self._progress.skipped_steps,
        }


def numbers(result: dict, prefix: str = "") -> Iterator[tuple[str, float]]:
    """(path, value) of every number in nested dictionaries, keys joined by "/"."""
    for key, value in result.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield prefix + key, float(value)


def cut_back(run_dir: RunDir, step: int) -> None:
    """One process: remove from metrics.jsonl, validation.jsonl and the event files all that is later than `step`. Raises RunDirError."""
    with run_dir.writing():
        for file in (run_dir.metrics, run_dir.validation):
            if file.exists():
                kept = [line for line in file.read_text(errors="replace").splitlines() if _is_up_to(line, step)]
                write_whole(file, "".join(line + "\n" for line in kept).encode())
        cut_events(run_dir.tensorboard, step)


def _is_up_to(line: str, step: int) -> bool:
    """Whether a line is whole, and of a step that is kept. What is no entry of ours goes."""
    entry = parse_line(line)
    return entry is not None and type(entry.get("step")) is int and entry["step"] <= step


def memory_gib(device: torch.device) -> float:
    """The peak so far: of the GPU's memory that torch has allocated, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _progress_line(entry: dict, steps: int) -> str:
    left = (steps - entry["step"]) * entry["step_seconds"]
    mfu = f"  mfu {entry['mfu']:.1%}" if entry["mfu"] is not None else ""
    skipped = f"  skipped {entry['skipped_steps']}" if entry["skipped_steps"] else ""
    return (
        f"step {entry['step']}/{steps}  loss {entry['loss']:.4f}  grad {entry['grad_norm']:.3f}  lr {entry['lr']:.2e}  "
        f"{entry['tokens_per_second']:,.0f} tok/s{mfu}  {entry['memory_gib']:.1f} GiB{skipped}  ETA {_duration(left)}"
    )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
