"""Results that are kept while a computation is run again: `once` computes them, or gives what it gave the first time.

Activation checkpointing runs a block again in the backward pass (`pdn_train.recompute`). What costs too much to be run twice asks
here: the recurrence's stages and the products of Linear layers. By default `once` just computes. (A dispatch mode could hold products
back too, and costs the host a call in Python for every operator, in both passes.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Results = tuple[Tensor | None, ...]

_thread = threading.local()  # autograd runs backward passes, and what is run again in them, in threads of its own


class Made(NamedTuple):
    """What became of the results of a `once`: kept (results), unread (sizes), or to be computed again (neither)."""

    results: Results | None
    versions: list[int]
    sizes: list[tuple[torch.Size, torch.dtype, torch.device]] | None


class Keep:
    """with Keep(made): every `once` computes and adds to `made` what becomes of its results; with everything=False none are kept."""

    def __init__(self, made: list[Made], everything: bool = True):
        self.made, self.everything = made, everything

    def __enter__(self) -> Keep:
        self.outer, _thread.holder = getattr(_thread, "holder", None), self
        return self

    def __exit__(self, *_) -> None:
        _thread.holder = self.outer

    def take(self, compute: Callable[[], Results], read: bool) -> Results:
        results = compute()
        if not read:
            self.made.append(Made(None, [], [(x.shape, x.dtype, x.device) for x in results]))
        elif self.everything:
            self.made.append(Made(_apart(results), _versions(results), None))
        else:
            self.made.append(Made(None, [], None))
        return results


class HandBack(Keep):
    """with HandBack(made): every `once`, in the same order, gives what was kept, and computes what was not and is read."""

    def __enter__(self) -> HandBack:
        self.at = 0  # an index: torch.compile breaks its graph at next() of a list's iterator
        return super().__enter__()

    def take(self, compute: Callable[[], Results], read: bool) -> Results:
        results, versions, sizes = self.made[self.at]
        self.at += 1
        if sizes is not None:
            return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in sizes)
        if results is None:
            return compute()
        if _versions(results) != versions:
            shapes = [list(x.shape) for x in results if x is not None]
            raise RuntimeError(f"a result that is kept for the backward pass was changed in place: one of {shapes}")
        return _apart(results)


def held() -> bool:
    """Whether results are kept or handed back here."""
    return getattr(_thread, "holder", None) is not None


def once(compute: Callable[[], Results], read: bool = True) -> Results:
    """compute(), or in a `HandBack` what it gave in the `Keep` before. For the forward pass of an autograd function: no gradients.

    read=False: no backward pass reads the results' values, and a HandBack gives tensors of their sizes that hold anything.
    """
    holder = getattr(_thread, "holder", None)
    return compute() if holder is None else holder.take(compute, read)


def _versions(results: Results) -> list[int]:
    return [x._version for x in results if x is not None]


def _apart(results: Results) -> Results:
    """The same memory as tensors of their own: what an autograd function returns becomes part of a graph."""
    return tuple(x if x is None else x.detach() for x in results)
