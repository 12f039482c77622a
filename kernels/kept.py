"""Results that are kept while a computation is run again: `once` computes them, or gives what it gave the first time.

Activation checkpointing runs a module again in the backward pass (`pdn_train.recompute`). What costs too much to be run twice asks
here: the recurrence's stages and the products of Linear layers. By default `once` just computes. (A dispatch mode could hold products
back too, and costs the host a call in Python for every operator, in both passes.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from torch import Tensor

Results = tuple[Tensor | None, ...]

_thread = threading.local()  # autograd runs backward passes, and what is run again in them, in threads of its own


class Keep:
    """with Keep(kept): every `once` computes and adds its results to kept."""

    def __init__(self, kept: list[tuple[Results, list[int]]]):
        self.kept = kept

    def __enter__(self) -> Keep:
        self.outer, _thread.holder = getattr(_thread, "holder", None), self
        return self

    def __exit__(self, *_) -> None:
        _thread.holder = self.outer

    def take(self, compute: Callable[[], Results]) -> Results:
        made = compute()
        self.kept.append((_apart(made), _versions(made)))
        return made


class HandBack(Keep):
    """with HandBack(kept): every `once`, in the same order, gives what was kept, and computes nothing."""

    def __enter__(self) -> HandBack:
        self.next: Iterator[tuple[Results, list[int]]] = iter(self.kept)
        return super().__enter__()

    def take(self, compute: Callable[[], Results]) -> Results:
        results, versions = next(self.next)
        if _versions(results) != versions:
            shapes = [list(x.shape) for x in results if x is not None]
            raise RuntimeError(f"a result that is kept for the backward pass was changed in place: one of {shapes}")
        return _apart(results)


def held() -> bool:
    """Whether results are kept or handed back here."""
    return getattr(_thread, "holder", None) is not None


def once(compute: Callable[[], Results]) -> Results:
    """compute(), or in a `HandBack` what it gave in the `Keep` before. For the forward pass of an autograd function: no gradients."""
    holder = getattr(_thread, "holder", None)
    return compute() if holder is None else holder.take(compute)


def _versions(results: Results) -> list[int]:
    return [x._version for x in results if x is not None]


def _apart(results: Results) -> Results:
    """The same memory as tensors of their own: what an autograd function returns becomes part of a graph."""
    return tuple(x if x is None else x.detach() for x in results)
