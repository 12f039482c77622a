"""Which rank holds the others up.

All ranks finish a step together, so a rank's own time is what it spends before it meets the others: reading its samples and running
forward, which holds no collective up to ZeRO-2 and with whole samples a rank. At stage 3 the forward pass gathers weights, with
parallel.sequence > 1 it waits for what other pieces hand on: then a rank's own time holds waiting too, and a slow one may go unnamed.
"""

from __future__ import annotations

import logging
import socket
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from pdn_train.world import World

SLOW = 1.25  # times the median
log = logging.getLogger(__name__)


class OwnTime:
    """Seconds a rank spends by itself, summed over the forward passes in training mode and the `reading` blocks since the last `report`."""

    def __init__(self, model: nn.Module, world: World):
        self._world, self._timed = world, world.device.type == "cuda"
        self._reading = 0.0
        self._passes: deque = deque()  # (begin, end): of the device's time line, or of the host's
        self._slowest: int | None = None
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)

    @contextmanager
    def reading(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._reading += time.perf_counter() - started

    def report(self, steps: int) -> None:
        """Collective, after `steps` steps. Names the slowest rank in the log where it was the slowest, beyond SLOW, the last time too."""
        said = self._world.gather((socket.gethostname(), self._take() / max(1, steps)))
        times = [seconds for _, seconds in said]
        middle, slowest = statistics.median_low(times), max(range(len(said)), key=times.__getitem__)
        slow = slowest if times[slowest] > SLOW * middle else None
        if self._world.leads and slow is not None and slow == self._slowest:
            host, seconds = said[slow]
            log.warning(
                "rank %d on %s holds the others up: %.3f s a step for its samples and forward pass, the median rank takes %.3f s",
                slow, host, seconds, middle,
            )  # fmt: skip
        self._slowest = slow

    def _take(self) -> float:
        total, self._reading = self._reading, 0.0
        while self._passes and (not self._timed or self._passes[0][1].query()):
            begin, end = self._passes.popleft()
            total += begin.elapsed_time(end) / 1000 if self._timed else end - begin
        return total

    def _now(self) -> torch.cuda.Event | float:
        if not self._timed:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _begin(self, model: nn.Module, inputs: tuple) -> None:
        if model.training:
            self._passes.append((self._now(), None))

    def _end(self, model: nn.Module, inputs: tuple, output: object) -> None:
        if model.training:
            self._passes[-1] = (self._passes[-1][0], self._now())
