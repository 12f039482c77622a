"""Records to token ids, in parallel and in order: the same stream of documents whatever the number of workers.

Documents are never cut before they are encoded: a sentencepiece model may mark the start of a string, and merges do not cross a cut. A
batch of records goes to a worker process and its ids come back in the order of the batches; at most 2 batches a worker are under way, so
memory is bounded. Workers are fresh processes (spawn), each with its own copy of the tokenizer, and end by themselves when the parent is
killed.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data_prep.inputs import BadRecord, Batch, InputError, Place, Record, parse
from pdn_train.tokenizer import Tokenizer


class Document(NamedTuple):
    ids: np.ndarray  # [n] uint32, without eos
    text_bytes: int
    validation: bool


class Fault(NamedTuple):
    input: int
    number: int  # line, row or example
    kind: str
    detail: str


class Encoded(NamedTuple):
    documents: list[Document]
    faults: list[Fault]
    end: Place


@dataclass(frozen=True)
class Rules:
    """What decides which ids a record becomes. All of it is part of a preparation's identity."""

    tokenizer_file: str
    text_field: str
    val_fraction: float
    lossless: bool


class Encoder:
    """Encodes batches in this process."""

    def __init__(self, rules: Rules) -> None:
        self.rules, self.tokenizer = rules, Tokenizer.load(rules.tokenizer_file)

    def __call__(self, batch: Batch) -> Encoded:
        documents, faults = [], []
        for index, record in batch.records:
            try:
                documents.append(self._document(record))
            except BadRecord as bad:
                faults.append(Fault(index, record.number, bad.kind, bad.detail))
        return Encoded(documents, faults, batch.end)

    def _document(self, record: Record) -> Document:
        text = parse(record, self.rules.text_field)
        data = text.encode()
        ids = self.tokenizer.encode(text)
        if not ids:
            raise BadRecord("empty text", "it has no tokens")
        if self.rules.lossless and self.tokenizer.decode(ids) != text:
            raise BadRecord("not lossless", "decoding its ids gives another text")
        return Document(np.array(ids, dtype=np.uint32), len(data), in_validation(data, self.rules.val_fraction))


def in_validation(data: bytes, fraction: float) -> bool:
    """Whether a text belongs to the validation split: its hash, as a number in [0, 1), is below the fraction. Equal texts go together."""
    digest = hashlib.blake2b(data, digest_size=8, person=b"validation").digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def encode_in_order(rules: Rules, batches: Iterable[Batch], workers: int) -> Iterator[Encoded]:
    """Every batch encoded, in the order of the batches; one worker is this process itself. Raises InputError where a worker dies."""
    if workers == 1:
        yield from map(Encoder(rules), batches)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(rules,))
    under_way: deque = deque()
    try:
        for batch in batches:
            under_way.append(pool.submit(_encode, batch))
            if len(under_way) > 2 * workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BrokenProcessPool:
        raise InputError(f"one of {workers} workers died (out of memory?); give the same command again with fewer --workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: Encoder | None = None  # of a worker process


def _start_worker(rules: Rules) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = Encoder(rules)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _encode(batch: Batch) -> Encoded:
    return _encoder(batch)
