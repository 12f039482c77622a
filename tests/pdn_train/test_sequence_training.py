"""Training on samples that are cut over the ranks of a line: the weights, losses and norms of whole samples, at every ZeRO stage."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.cross_entropy import IGNORED
from kernels.maps import Piece
from pdn_train.data import Loader, open_samples

WORKER = Path(__file__).with_name("sequence_training_worker.py")


@pytest.fixture(scope="module")
def told(make_shards, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sequence")
    lengths = random.Random(0)
    documents = [np.arange(start, start + lengths.choice([1, 2, 5, 20, 70])) * 3 % 47 + 3 for start in range(60)]
    make_shards(folder / "shards", documents, vocab_size=50)
    (folder / "runs").mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", str(WORKER), str(folder / "shards"), str(folder / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("TOLD "))[5:])


def test_one_step_of_gradient_descent_moves_the_weights_alike(told):
    """Stages 0 to 3, two and four ranks a sequence, with and without clipping, in every mode of activation checkpointing."""
    assert len(told["one step"]) == 6
    for case, errors in told["one step"].items():
        assert errors["loss"] <= 1e-6 and errors["norm"] <= 1e-6 and errors["change"] <= 1e-5, (case, errors)


def test_fifty_steps_whatever_the_shape(told):
    """Over four ranks: whole samples, and two, four, one and two ranks a sequence in turn, from checkpoint to checkpoint."""
    apart, moving = (torch.tensor(steps) for steps in told["fifty steps"].values())
    assert apart.shape == moving.shape == (50, 2)
    assert apart[-1, 0] < apart[0, 0] - 1
    assert torch.allclose(moving, apart, rtol=1e-4), (moving / apart - 1).abs().max(0)


def pieces(make_shards, tmp_path, documents, pieces, **changes):
    folder = make_shards(tmp_path / "shards", documents)
    samples = open_samples(folder, changes.get("seq_len", 16), 0, 100, sequential=True)
    return [Loader(samples, changes.get("rows", 1), 1, 0, 1, True, piece, pieces).step(0)[0] for piece in range(pieces)]


@pytest.mark.parametrize(
    "documents, labels, targets",
    [
        ([range(11, 26), [9]], [[12, 13, 14, 15], [16, 17, 18, 19], [20, 21, 22, 23], [24, 25, 2, IGNORED]], 15),
        (
            [range(11, 18), range(21, 28), [9]],
            [[12, 13, 14, 15], [16, 17, 2, IGNORED], [22, 23, 24, 25], [26, 27, 2, IGNORED]],
            14,
        ),
    ],
)
def test_labels_are_shifted_before_the_cut(make_shards, tmp_path, documents, labels, targets):
    """Sixteen tokens over four ranks: the end of a piece has its target, which lies in the next one; the end of a document has none."""
    found = pieces(make_shards, tmp_path, [list(d) for d in documents], 4)
    assert [batch.labels[0].tolist() for batch in found] == labels
    assert sum(batch.targets for batch in found) == targets
    whole = torch.cat([batch.input_ids[0] for batch in found]).tolist()
    assert whole[:4] == [11, 12, 13, 14] and len(whole) == 16


def test_rows_are_cut_before_they_are_joined(make_shards, tmp_path):
    """Two samples of eight tokens over two ranks, documents of 3, 6 and 9 tokens: 0 3 | 1 at its start, 10 18 in the stream."""
    documents = [[10, 11], [20, 21, 22, 23, 24], [30, 31, 32, 33, 34, 35, 36, 37]]
    first, second = pieces(make_shards, tmp_path, documents, 2, seq_len=8, rows=2)
    assert first.input_ids.tolist() == [[10, 11, 2, 20, 2, 30, 31, 32]]
    assert second.input_ids.tolist() == [[21, 22, 23, 24, 33, 34, 35, 36]]
    assert first.cu_seqlens.tolist() == [0, 3, 4, 5, 8] and second.cu_seqlens.tolist() == [0, 4, 8]
    assert first.piece == Piece((0, 3, 4, 5, 8), (0, 2), (False, False))
    assert second.piece == Piece((0, 4, 8), (0, 1), (True, True)) and second.piece.carries == (True, True)
    assert first.piece.last == (1, 3) and first.piece.tails == (1, 3)
