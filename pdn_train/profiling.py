"""Where the time of steps goes: points of the device's time line, a step's parts, and torch.profiler over a few steps of a run.

A part begins where `Engine.step` says its name and lasts until the next one begins. On a GPU that is the device's time, so a part holds
what it made the device wait for: host work before its first launch, and collectives that nothing overlaps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pdn_train.config import ProfileConfig
from pdn_train.world import World

if TYPE_CHECKING:
    from pdn_train.engine import Engine


class Moment:
    """A point of the device's own time line: on a GPU, when its work so far is done."""

    def __init__(self, device: torch.device):
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._time = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, before: Moment) -> float:
        """Waits for this moment on a GPU."""
        if self._event is None:
            return self._time - before._time
        self.wait()
        return before._event.elapsed_time(self._event) / 1000


class Parts:
    """The parts of one step, by calls: parts("forward") ends the one before and begins this one; parts(None) ends the last."""

    def __init__(self, device: torch.device):
        self._device, self._begun = device, []

    def __call__(self, name: str | None) -> None:
        self._begun.append((name, Moment(self._device)))

    def seconds(self) -> dict[str, float]:
        """Seconds by name, in the order in which they first began; a name that came again is added up. Waits for the step on a GPU."""
        found: dict[str, float] = {}
        for (name, begin), (_, end) in pairwise(self._begun):
            if name is not None:
                found[name] = found.get(name, 0.0) + end.seconds_since(begin)
        return found


class Profiler:
    """Records steps start <= step < stop (0-based), on rank 0; with start = stop it does nothing.

    TensorBoard's folder gets the trace of torch.profiler and, of a GPU, what was allocated when (for pytorch.org/memory_viz); the parts of
    each of these steps are the caller's to write.
    """

    def __init__(self, config: ProfileConfig, folder: Path, world: World):
        self._config, self._device = config, world.device
        self._trace = folder / f"steps_{config.start}_{config.stop}.pt.trace.json"
        self._memory = folder / f"steps_{config.start}_{config.stop}.memory.pickle"
        self._wanted = world.leads and config.stop > config.start
        self._profiler: torch.profiler.profile | None = None

    @contextmanager
    def step(self, step: int, engine: Engine) -> Iterator[Parts | None]:
        """Wraps one step of the engine; its parts, where it is recorded."""
        if self._wanted and step == self._config.start:
            self._profiler = torch.profiler.profile(record_shapes=True, profile_memory=True)
            self._profiler.start()
            if self._device.type == "cuda":
                torch.cuda.memory._record_memory_history()
        if self._profiler is None:
            yield None
            return
        before, engine.begin = engine.begin, Parts(self._device)
        yield engine.begin
        engine.begin = before
        if step + 1 >= self._config.stop:
            self.close()

    def close(self) -> None:
        """Write the records of the steps so far, where there are any."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self._trace))
            self._profiler = None
            if self._device.type == "cuda":
                torch.cuda.memory._dump_snapshot(str(self._memory))
                torch.cuda.memory._record_memory_history(enabled=None)
