"""Multi-query associative recall (MQAR): examples made on demand, as a training set and as an evaluation.

The task is Zoology's (arXiv:2312.04927; docs/paper.md, section 5). With a vocabulary of V ids and N pairs, an example of L tokens is

    k_1 v_1 k_2 v_2 ... k_N v_N      keys: N different ids of 1 .. V/2 - 1; values: N different ids of V/2 .. V - 1
    then (L - 2N) / 2 slots of two tokens; each key stands again, once, at the start of a slot; the other tokens are random ids

and the only labels are at those second occurrences: the key's value, which does not follow it. Slot i = 0, 1, ... is drawn without
replacement with weight a (i + 1)^(a - 1), a = 0.01, so most questions come soon after the pairs.

With data.mqar_fewest = n the first half of training climbs from n pairs over 2 n, 4 n ... to N, as many steps at each: a row of L tokens is
then N / n examples of n pairs and L n / N tokens side by side. Held-out examples are whole from the start. That is not the published task:
it is there because recall is learned sooner from few pairs (docs/results.md).

Every example is a function of (seed, split, its number, its pairs) alone. One takes 0.1 to 0.2 ms of a CPU core; those of the training set
are kept, 4 L bytes each, since they come again every epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from kernels.cross_entropy import IGNORED
from pdn_train.config import Config, recall_fault
from pdn_train.data import Permutation
from pdn_train.telling import silent

POWER = 0.01  # a
SPLITS = ("train", "validation")
VALIDATION = 3000  # examples that are held out
LOGITS = 2**28  # at once in `accuracy`: 1 GiB in fp32


class MqarError(ValueError):
    """No such examples exist; the message names the numbers and the way out."""


def example(pairs: int, length: int, vocab: int, seed: int, split: str, number: int) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, labels) [length] int64; labels are IGNORED but at each key's second occurrence."""
    rng = np.random.default_rng([seed, SPLITS.index(split), number])
    keys, values = _different(pairs, 1, vocab // 2, rng), _different(pairs, vocab // 2, vocab, rng)
    places = 2 * pairs + 2 * _slots(pairs, (length - 2 * pairs) // 2, rng)
    inputs = rng.integers(vocab, size=length)
    inputs[0 : 2 * pairs : 2], inputs[1 : 2 * pairs : 2] = keys, values
    labels = np.full(length, IGNORED)
    inputs[places], labels[places] = keys, values
    return inputs, labels


def _different(count: int, low: int, high: int, rng: np.random.Generator) -> np.ndarray:
    """`count` of low .. high - 1 without repeats, in random order: the first ones that differ among draws with repeats."""
    drawn = rng.integers(low, high, size=2 * count)
    while len(first := np.unique(drawn, return_index=True)[1]) < count:
        drawn = np.concatenate([drawn, rng.integers(low, high, size=2 * count)])
    return drawn[np.sort(first)[:count]]


def _slots(count: int, slots: int, rng: np.random.Generator) -> np.ndarray:
    """`count` of 0 .. slots - 1 in the order drawn, each draw with the weights of what is left.

    The smallest of independent exponential times with these rates, one after the other, are such draws.
    """
    times = rng.exponential(size=slots) * np.arange(1, slots + 1) ** (1 - POWER)
    first = np.argpartition(times, count - 1)[:count]
    return first[np.argsort(times[first])]


def check(pairs: int, length: int, vocab: int, *names: str) -> None:
    """Raise MqarError unless N pairs, their questions and V ids go together; names: those of N and L to the user, by default their keys."""
    fault = recall_fault(pairs, length, vocab, *names)
    if fault is not None:
        raise MqarError(fault)


def climb(fewest: int, pairs: int) -> tuple[int, ...]:
    """fewest, 2 fewest, 4 fewest ... pairs, which is one of them (`pdn_train.config` sees to that)."""
    rungs = [fewest]
    while rungs[-1] < pairs:
        rungs.append(2 * rungs[-1])
    return tuple(rungs)


def row(pairs: int, most: int, length: int, vocab: int, seed: int, split: str, number: int) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, labels) [length] int64: most / pairs examples side by side, numbered on from number x most / pairs."""
    parts = most // pairs
    made = [example(pairs, length // parts, vocab, seed, split, number * parts + part) for part in range(parts)]
    inputs, labels = (np.concatenate(one) for one in zip(*made, strict=True))
    rest = np.zeros(length - len(inputs), np.int64)  # of a length that the parts do not divide
    return np.concatenate([inputs, rest]), np.concatenate([labels, rest + IGNORED])


class Examples:
    """A source of samples for `pdn_train.data.Loader`: position -> a row of examples, in a new order each epoch."""

    tokenizer: Path | None = None  # ids stand for themselves

    def __init__(
        self, pairs: int, count: int, length: int, vocab: int, seed: int, split: str, fewest: int | None = None, each: int = 1
    ) -> None:
        """count: rows an epoch. fewest: they are of so many pairs first, twice as many after `each` rows, and so on. Raises MqarError."""
        check(pairs, length, vocab)
        self.seq_len, self._count, self._what = length, count, (length, vocab, seed, split)
        self._climb, self._each = climb(fewest or pairs, pairs), each
        self._inputs = np.empty((count, length), np.min_scalar_type(vocab - 1))
        self._labels = np.empty((count, length), np.int32 if vocab > 2**15 else np.int16)
        self._made = np.zeros(count, np.int32)  # the pairs of what is there
        self._order: tuple[int, Callable[[int], int]] = (-1, lambda number: number)

    def __len__(self) -> int:
        return self._count

    @property
    def fingerprint(self) -> dict:
        """What a resumed run must find unchanged; seed and length are keys of the configuration and compared there."""
        climb = {"climb": list(self._climb), "rows each": self._each} if len(self._climb) > 1 else {}
        return {"mqar": {"pairs": self._climb[-1], "examples": self._count, **climb}}

    def pair(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, labels) at a position of the training order, [length] int64 each."""
        epoch, index = divmod(position, self._count)
        pairs = self._climb[min(position // self._each, len(self._climb) - 1)]
        if self._what[3] == "train":
            if self._order[0] != epoch:
                self._order = (epoch, Permutation(self._count, "mqar", self._what[2], epoch))
            index = self._order[1](index)
        if self._made[index] != pairs:
            self._inputs[index], self._labels[index] = row(pairs, self._climb[-1], *self._what, index)
            self._made[index] = pairs
        return self._inputs[index].astype(np.int64), self._labels[index].astype(np.int64)


def open_examples(config: Config) -> tuple[Examples, Examples]:
    """The training examples of a run, and the held-out ones."""
    data, what = config.data, (config.data.seq_len, config.model.vocab_size, config.data.seed)
    fewest = data.mqar_fewest or data.mqar_pairs
    doublings = len(climb(fewest, data.mqar_pairs)) - 1
    each = config.train.steps // 2 // doublings * config.train.global_batch if doublings else 1
    train = Examples(data.mqar_pairs, data.mqar_examples, *what, "train", fewest, each)
    return train, Examples(data.mqar_pairs, VALIDATION, *what, "validation")


@torch.no_grad()
def accuracy(
    model: torch.nn.Module, examples: Examples, count: int, device: torch.device | str, done: Callable[[int], object] = silent
) -> float:
    """The share of the first `count` examples' questions to which the likeliest of all ids is the answer. done: takes how many more are."""
    vocab, right, asked = model.config.vocab_size, 0, 0
    rows = max(1, LOGITS // (examples.seq_len * vocab))
    for start in range(0, count, rows):
        made = [examples.pair(i) for i in range(start, min(start + rows, count))]
        inputs, labels = (torch.from_numpy(np.stack(part)).to(device) for part in zip(*made, strict=True))
        found = model(inputs).argmax(-1)
        right += int((found == labels).sum())  # no id is IGNORED
        asked += int((labels != IGNORED).sum())
        done(len(made))
    return right / asked
