"""What commands tell on a terminal: numbers with their nouns, and how far a long task is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

EVERY_SECONDS = 10.0


def counted(number: int, noun: str) -> str:
    """1 shard, 2 shards, 1,000 shards. noun: in the singular, of those that take an s."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


class Tally:
    """How far a long task is: a line when it begins, with its size, then at most one every EVERY_SECONDS."""

    def __init__(self, task: str, total: int, noun: str, what: str, tell: Callable[[str], object]) -> None:
        """what: after the noun in the first line, such as "of 512 tokens"."""
        self._task, self._total, self._noun, self._tell = task, total, noun, tell
        self._done, self._began = 0, time.monotonic()
        self._told = self._began
        tell(f"{task}: {counted(total, noun)} {what}")

    def add(self, number: int) -> None:
        """So many more are done."""
        self._done += number
        now = time.monotonic()
        if now - self._told >= EVERY_SECONDS and self._done < self._total:
            self._told = now
            self._tell(f"{self._task}: {self._done:,} of {counted(self._total, self._noun)} after {now - self._began:.0f} s")


def silent(told: object) -> None:
    """In place of what would tell it."""


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
