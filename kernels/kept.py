"""Results that are kept while a computation is run again: `once` computes them, or gives what it gave the first time.

Activation checkpointing runs a module again in the backward pass (`pdn_train.recompute`). What is launched by hand is no operator that a
dispatch mode could hold back, so the stages that cost too much to be run twice ask here. By default `once` just computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from torch import Tensor

Results = tuple[Tensor | None, ...]

_thread = threading.local()  # autograd runs backward passes, and what is run again in them, in threads of its own


class Keep:
    """with Keep(kept): every `once` computes and adds its results to kept."""

    def __init__(self, kept: list[Results]):
        self.kept = kept

    def __enter__(self) -> Keep:
        self.outer, _thread.holder = getattr(_thread, "holder", None), self
        return self

    def __exit__(self, *_) -> None:
        _thread.holder = self.outer

    def take(self, compute: Callable[[], Results]) -> Results:
        made = compute()
        self.kept.append(_apart(made))
        return made


class HandBack(Keep):
    """with HandBack(kept): every `once`, in the same order, gives what was kept, and computes nothing."""

    def __enter__(self) -> HandBack:
        self.next: Iterator[Results] = iter(self.kept)
        return super().__enter__()

    def take(self, compute: Callable[[], Results]) -> Results:
        return _apart(next(self.next))


def once(compute: Callable[[], Results]) -> Results:
    """compute(), or in a `HandBack` what it gave in the `Keep` before. For the forward pass of an autograd function: no gradients."""
    holder = getattr(_thread, "holder", None)
    return compute() if holder is None else holder.take(compute)


def _apart(results: Results) -> Results:
    """The same memory as tensors of their own: what an autograd function returns becomes part of a graph."""
    return tuple(x if x is None else x.detach() for x in results)
