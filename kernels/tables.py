"""Index tables of calls' lengths: made on the host, kept on the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
KEPT = 256  # of one kind


class Tables(Generic[T]):
    """The KEPT tables used last. What a CUDA graph has captured lives as long as the process: the graph holds its addresses."""

    def __init__(self):
        self.kept: OrderedDict[tuple, T] = OrderedDict()
        self._captured: list[T] = []

    def get(self, key: tuple, device: torch.device, make: Callable[[], T]) -> T:
        """make() at the first call with this key."""
        found = self.kept.get(key)
        if found is None:
            found = self.kept[key] = make()
            if len(self.kept) > KEPT:
                self.kept.popitem(last=False)
        else:
            self.kept.move_to_end(key)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing() and not any(found is one for one in self._captured):
            self._captured.append(found)
        return found
