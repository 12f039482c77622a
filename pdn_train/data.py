"""Shards to batches: which sample stands at which position, and the micro-batches of a step.

Sample i of a folder is the tokens [i L, i L + L] of its stream, L = seq_len: L inputs and the same shifted by one as targets. The
training order is a function of (seed, position) alone, where position counts the samples consumed since step 0 over the whole world, so
one integer resumes a run on any number of ranks:

    one folder of n samples    epoch = position // n,  sample = permutation(seed, epoch)(position mod n)
    several, with weights      blocks of BLOCK positions; in every block each folder gets its share exactly (to one sample, over all blocks
                               so far), at places a permutation of the block chooses; each folder counts its own samples and so its own
                               epochs

The permutations are Feistel networks, computed for one index at a time: 20 to 40 microseconds a sample and no memory, where a table for
10^9 samples would take 8 GB a rank. All positions and offsets are Python or 64-bit integers.

With reset_at_documents a micro-batch is one row of micro_batch x L tokens, and `cu_seqlens` starts a sequence at each sample and after
each eos. With sequence parallelism each sample is cut first, and the row is made of the pieces (`Batch.cut`).
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from math import isqrt
from pathlib import Path

import numpy as np
import torch

from kernels.cross_entropy import IGNORED
from kernels.maps import Piece
from pdn_train.shards import MANIFEST, Manifest, ShardError, Shards, tokenizer_fault

BLOCK = 1000  # positions within which a mixture is exact; also the finest share, 1/1000
ROUNDS = 6  # of the Feistel network; 4 give a pseudorandom permutation (Luby and Rackoff, 1988)
AHEAD = 2  # steps that `Loader.steps` prepares in advance


@dataclass(frozen=True)
class Batch:
    """One micro-batch. `targets` counts the labels that are not IGNORED; `cu_seqlens` stays on the host."""

    input_ids: torch.Tensor  # [B, T] int64
    labels: torch.Tensor  # [B, T] int64, already shifted
    cu_seqlens: torch.Tensor | None  # [N + 1] int32, with reset_at_documents
    targets: int
    piece: Piece | None = None  # of samples that are cut over several ranks: what goes on where

    def to(self, device: torch.device | str) -> Batch:
        """The batch with ids and labels on a device; without waiting where they are pinned."""
        return replace(self, input_ids=self.input_ids.to(device, non_blocking=True), labels=self.labels.to(device, non_blocking=True))

    def first_rows(self, count: int, seq_len: int) -> Batch:
        """The batch with the targets of its first `count` samples only."""
        labels = self.labels.clone()
        labels.view(-1)[count * seq_len :] = IGNORED
        return replace(self, labels=labels, targets=int((labels != IGNORED).sum()))

    def cut(self, rows: int, rank: int, ranks: int) -> Batch:
        """Piece `rank` of `ranks` of each of its `rows` samples."""
        length = self.input_ids.numel() // rows
        starts = None if self.cu_seqlens is None else self.cu_seqlens[:-1]
        piece = Piece.cut(length, rows, starts, rank, ranks)
        shape = (rows, -1) if starts is None else (1, -1)
        span = slice(rank * length // ranks, (rank + 1) * length // ranks)
        ids, labels = (x.view(rows, length)[:, span].reshape(shape) for x in (self.input_ids, self.labels))
        cu_seqlens = None if starts is None else torch.tensor(piece.bounds, dtype=torch.int32)
        return Batch(ids, labels, cu_seqlens, int((labels != IGNORED).sum()), piece)

    def pinned(self) -> Batch:
        """The batch with ids and labels in page-locked memory, for a copy to the GPU that does not wait."""
        return replace(self, input_ids=self.input_ids.pin_memory(), labels=self.labels.pin_memory())


class Permutation:
    """A seeded bijection of 0 .. n - 1, evaluated at single indices.

    i = left * side + right with side = ceil(sqrt(n)); each round maps (left, right) to (right, (left + F(right)) mod side), F a keyed
    hash. The square has at most 2 sqrt(n) cells too many; an index that lands on one is mapped again until it is below n (cycle walking).
    """

    def __init__(self, n: int, *key: int | str) -> None:
        self.n = n
        self._side = isqrt(n - 1) + 1
        self._keys = [hashlib.blake2b(repr((key, n, turn)).encode(), digest_size=16).digest() for turn in range(ROUNDS)]

    def __call__(self, index: int) -> int:
        if not 0 <= index < self.n:
            raise IndexError(f"index {index} is outside the permutation of {self.n}")
        index = self._once(index)
        while index >= self.n:
            index = self._once(index)
        return index

    def _once(self, index: int) -> int:
        left, right = divmod(index, self._side)
        for key in self._keys:
            mixed = int.from_bytes(hashlib.blake2b(right.to_bytes(8, "little"), key=key, digest_size=8).digest(), "little")
            left, right = right, (left + mixed) % self._side
        return left * self._side + right


class Mixture:
    """Which folder a position belongs to, and the number of that sample among the folder's own, from weights alone.

    After b blocks folder f has had N_f(b) = round(b BLOCK C_f) - round(b BLOCK C_(f-1)) samples, C the cumulated shares: within one of its
    exact share. In block b it holds the places start .. stop - 1 of the block's permutation.
    """

    def __init__(self, weights: list[float], seed: int) -> None:
        total = sum(map(Fraction, weights))
        self._cumulated = [sum(map(Fraction, weights[:count])) / total for count in range(len(weights) + 1)]
        self._seed = seed

    def __call__(self, position: int) -> tuple[int, int]:
        """(folder, sample number of that folder), for any position >= 0."""
        block, offset = divmod(position, BLOCK)
        place = Permutation(BLOCK, "mixture", self._seed, block)(offset)
        before = [round_half_up(block * BLOCK * share) for share in self._cumulated]
        after = [round_half_up((block + 1) * BLOCK * share) for share in self._cumulated]
        starts = [a - b for a, b in zip(after, before, strict=True)]  # of the folders within this block, [folders + 1]
        folder = next(f for f in range(len(starts) - 1) if place < starts[f + 1])
        return folder, before[folder + 1] - before[folder] + place - starts[folder]


def round_half_up(value: Fraction) -> int:
    """The nearest integer; a half goes up (Python's round would go to the even one)."""
    return (2 * value.numerator + value.denominator) // (2 * value.denominator)


class Samples:
    """The samples of one folder, or of a mixture, by position. Build with `open_samples`."""

    def __init__(self, folders: list[Shards], weights: list[float], seq_len: int, seed: int, vocab_size: int, sequential: bool) -> None:
        self.seq_len, self._folders, self._weights, self._seed = seq_len, folders, weights, seed
        self._vocab_size, self._sequential = vocab_size, sequential
        self._counts = [(shards.tokens - 1) // seq_len for shards in folders]  # samples an epoch of each folder
        self._mixture = Mixture(weights, seed) if len(folders) > 1 else None
        self._permutations: dict[int, tuple[int, Permutation]] = {}  # folder -> (epoch, its permutation)

    def __len__(self) -> int:
        """Samples of all folders together, each counted once."""
        return sum(self._counts)

    @property
    def manifests(self) -> list[Manifest]:
        return [shards.manifest for shards in self._folders]

    @property
    def paths(self) -> list[Path]:
        return [shards.path for shards in self._folders]

    @property
    def tokenizer(self) -> Path:
        """The sentencepiece model that lies beside the first folder's shards."""
        return self._folders[0].path / self._folders[0].manifest.tokenizer.file

    @property
    def eos_id(self) -> int:
        return self._folders[0].manifest.tokenizer.eos_id

    @property
    def fingerprint(self) -> dict:
        """What a resumed run must find unchanged in its folders to see the same samples: neither where they lie, nor seed and seq_len,
        which are keys of the configuration and compared there."""
        return {
            "folders": [
                {"manifest": hashlib.sha256((shards.path / MANIFEST).read_bytes()).hexdigest(), "tokens": shards.tokens, "weight": weight}
                for shards, weight in zip(self._folders, self._weights, strict=True)
            ],
        }

    def sample(self, position: int) -> np.ndarray:
        """The tokens at a position of the training order, [seq_len + 1] int64. Raises ShardError for an id the model has no row for."""
        folder, index = self.find(position)
        shards, start = self._folders[folder], index * self.seq_len
        tokens = shards.read(start, start + self.seq_len + 1)
        worst = int(tokens.argmax())
        if tokens[worst] >= self._vocab_size:
            path, offset = shards.locate(start + worst)
            raise ShardError(
                f"{path}: token id {tokens[worst]} at token {offset} is outside the model's vocabulary of {self._vocab_size} "
                f"(model.vocab_size); check the shards with `python -m data_prep.verify {shards.path}`"
            )
        return tokens

    def pair(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, labels) at a position, [seq_len] int64 each: the tokens, and what follows each of them."""
        tokens = self.sample(position)
        return tokens[:-1], tokens[1:]

    def find(self, position: int) -> tuple[int, int]:
        """(folder, sample of that folder) at a position."""
        folder, number = self._mixture(position) if self._mixture else (0, position)
        epoch, index = divmod(number, self._counts[folder])
        return folder, index if self._sequential else self._permutation(folder, epoch)(index)

    def _permutation(self, folder: int, epoch: int) -> Permutation:
        """The last one used of each folder is kept: an epoch is long."""
        kept = self._permutations.get(folder)
        if kept is None or kept[0] != epoch:
            kept = (epoch, Permutation(self._counts[folder], "epoch", self._seed, epoch))
            self._permutations[folder] = kept
        return kept[1]


def open_samples(path: str | Path | dict[str, float], seq_len: int, seed: int, vocab_size: int, sequential: bool = False) -> Samples:
    """Open a folder of shards, or several as {folder: weight}, and check that this run can use them.

    `sequential` gives the samples in the order of the stream, the same at every call (validation); it is for one folder.
    Raises ShardError for a folder that is missing, damaged or shorter than one sample, for folders of different tokenizers, for a
    vocabulary above the model's `vocab_size`, and for a weight too small to be met.
    """
    weights = path if isinstance(path, dict) else {str(path): 1.0}
    if sequential and len(weights) > 1:
        raise ShardError(f"samples in order come from one folder, not {len(weights)}")
    _check_weights(weights)
    folders = [Shards.open(folder) for folder in weights]
    for shards in folders:
        _check_folder(shards, seq_len, vocab_size)
    samples = Samples(folders, list(weights.values()), seq_len, seed, vocab_size, sequential)
    check_same_tokenizer(samples, samples)
    return samples


def check_same_tokenizer(a: Samples, b: Samples) -> None:
    """Raise ShardError, naming both folders and their hashes, where a folder of `a` or `b` has another tokenizer than the first of `a`."""
    first_path, first = a.paths[0], a.manifests[0].tokenizer
    for path, manifest in zip(a.paths + b.paths, a.manifests + b.manifests, strict=True):
        other = manifest.tokenizer
        if (other.sha256, other.vocab_size, other.eos_id) != (first.sha256, first.vocab_size, first.eos_id):
            raise ShardError(
                f"{first_path} and {path} were made with different tokenizers: sha256 {first.sha256} ({first.vocab_size} pieces, eos "
                f"{first.eos_id}) and {other.sha256} ({other.vocab_size} pieces, eos {other.eos_id}); prepare one of them again"
            )


def check_tokenizer_file(samples: Samples) -> None:
    """Raise ShardError where the tokenizer beside the shards is missing or is not the one their manifest names."""
    fault = tokenizer_fault(samples.paths[0], samples.manifests[0].tokenizer)
    if fault is not None:
        raise ShardError(fault)


def _check_weights(weights: dict[str, float]) -> None:
    if not weights:
        raise ShardError("data.path names no folder: give a folder of shards, or {folder: weight, ...}")
    for folder, weight in weights.items():
        share = weight / sum(weights.values()) if weight > 0 else 0.0
        if share * BLOCK < 1:
            raise ShardError(f"data.path: the weight {weight} of {folder} is a share of {share:g}; the smallest possible is {1 / BLOCK:g}")


def _check_folder(shards: Shards, seq_len: int, vocab_size: int) -> None:
    if shards.tokens < seq_len + 1:
        raise ShardError(
            f"{shards.path} holds {shards.tokens} tokens, one sample of data.seq_len={seq_len} needs {seq_len + 1}; "
            "prepare more text or lower data.seq_len"
        )
    pieces = shards.manifest.tokenizer.vocab_size
    if pieces > vocab_size:
        raise ShardError(
            f"{shards.path} was made with a tokenizer of {pieces} pieces, the model has model.vocab_size={vocab_size}; "
            f"set model.vocab_size to at least {pieces}"
        )


class Loader:
    """The micro-batches of one data-parallel rank.

    Micro-batch m of rank r holds, in slot b, the sample at position + (m data_ranks + r) micro_batch + b: the world's samples of a step
    are the same whatever the number of ranks. Ranks that share a sequence have the same data_rank; of each of its samples, cut after its
    labels are shifted, rank `piece` of `pieces` holds that piece.
    """

    def __init__(
        self,
        samples: Samples,
        micro_batch: int,
        accumulation: int,
        data_rank: int,
        data_ranks: int,
        reset_at_documents: bool,
        piece: int = 0,
        pieces: int = 1,
    ) -> None:
        if not 0 <= data_rank < data_ranks:
            raise ValueError(f"data_rank={data_rank} is outside 0 .. {data_ranks - 1} (data_ranks={data_ranks})")
        self.samples, self.micro_batch, self.accumulation = samples, micro_batch, accumulation
        self.data_rank, self.data_ranks, self.reset_at_documents = data_rank, data_ranks, reset_at_documents
        self.piece, self.pieces = piece, pieces

    @property
    def global_batch(self) -> int:
        """Samples the whole world consumes in a step."""
        return self.micro_batch * self.accumulation * self.data_ranks

    def step(self, position: int) -> list[Batch]:
        """This rank's micro-batches of the step that starts at global sample `position`."""
        first = [position + (m * self.data_ranks + self.data_rank) * self.micro_batch for m in range(self.accumulation)]
        return [self._own(self._batch(position)) for position in first]

    def steps(self, position: int) -> Iterator[tuple[list[Batch], int]]:
        """Endless (micro-batches, position after them), prepared AHEAD steps in advance by one background thread.

        An error there is raised here, at the step it belongs to. Closing the iterator ends the thread. Where this process uses CUDA the
        batches are in pinned memory.
        """
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        # A new thread's current device is 0: pinning from it would make a context on GPU 0 for every rank of the node
        setup = (lambda: None) if device is None else (lambda: torch.cuda.set_device(device))
        pool = ThreadPoolExecutor(1, thread_name_prefix="data", initializer=setup)
        size = self.global_batch
        try:
            waiting = deque(pool.submit(self._prepared, position + n * size, device is not None) for n in range(AHEAD))
            while True:
                waiting.append(pool.submit(self._prepared, position + AHEAD * size, device is not None))
                batches = waiting.popleft().result()
                position += size
                yield batches, position
        finally:
            pool.shutdown(cancel_futures=True)

    def once(self, count: int) -> Iterator[Batch]:
        """The first `count` samples (all of them where there are fewer), each once, shared out over the ranks.

        Every rank gets as many batches, since a sharded model runs on all ranks together; slots past the end have no targets.
        """
        count = min(count, len(self.samples))
        for position in range(0, count, self.micro_batch * self.data_ranks):
            first = position + self.data_rank * self.micro_batch
            yield self._own(self._batch(first).first_rows(max(0, count - first), self.samples.seq_len))

    def _prepared(self, position: int, pin: bool) -> list[Batch]:
        return [batch.pinned() for batch in self.step(position)] if pin else self.step(position)

    def _own(self, batch: Batch) -> Batch:
        return batch if self.pieces == 1 else batch.cut(self.micro_batch, self.piece, self.pieces)

    def _batch(self, position: int) -> Batch:
        pairs = [self.samples.pair(position + slot) for slot in range(self.micro_batch)]
        inputs, labels = (np.stack(rows) for rows in zip(*pairs, strict=True))  # [B, L] each
        if not self.reset_at_documents:
            return Batch(torch.from_numpy(inputs), torch.from_numpy(labels), None, int((labels != IGNORED).sum()))
        ends = inputs == self.samples.eos_id
        labels[ends] = IGNORED  # the first token of the next document is not to be guessed from this one
        flat = (torch.from_numpy(a.reshape(1, -1)) for a in (inputs, labels))  # [1, B L] each
        return Batch(*flat, torch.from_numpy(sequence_starts(ends)), int(labels.size - ends.sum()))


def sequence_starts(ends: np.ndarray) -> np.ndarray:
    """cu_seqlens [N + 1] int32 of rows joined into one, from where documents end in them, [B, L] bool.

    A sequence starts at each row and after each end; the last entry is B L.
    """
    starts = np.zeros(ends.size + 1, dtype=bool)
    starts[:: ends.shape[1]] = True
    starts[1:] |= ends.reshape(-1)
    return np.flatnonzero(starts).astype(np.int32)
