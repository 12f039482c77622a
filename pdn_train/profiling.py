"""torch.profiler over a few steps of a run, chosen by profile.{start, stop}; rank 0's trace goes to TensorBoard's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from pdn_train.config import ProfileConfig
from pdn_train.world import World


class Profiler:
    """Records steps start <= step < stop (0-based); with start = stop it does nothing."""

    def __init__(self, config: ProfileConfig, folder: Path, world: World):
        self._config, self._folder = config, folder
        self._wanted = world.leads and config.stop > config.start
        self._profiler: torch.profiler.profile | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        if self._wanted and step == self._config.start:
            self._profiler = torch.profiler.profile(record_shapes=True, profile_memory=True)
            self._profiler.start()
        yield
        if step + 1 >= self._config.stop:
            self.close()

    def close(self) -> None:
        """Write the trace of the steps so far, where one is being recorded."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self._folder / f"steps_{self._config.start}_{self._config.stop}.pt.trace.json"))
            self._profiler = None
