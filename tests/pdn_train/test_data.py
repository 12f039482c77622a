"""Samples by position and batches. Judges: the stream cut by hand, counting, brute force over positions, a repeat in another process."""

import gc
import json
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cross_entropy import IGNORED
from pdn_train.data import BLOCK, Loader, Mixture, Permutation, check_same_tokenizer, open_samples, sequence_starts
from pdn_train.shards import ShardError, Shards

EOS = 2
L = 8


def _numbered(count: int) -> list[list[int]]:
    """One document whose sample i starts with token 3 + i."""
    stream = np.full(count * L, 3)
    stream[::L] += np.arange(count)
    return [stream.tolist()]


@pytest.fixture
def numbered(tmp_path, make_shards) -> Path:
    """200 samples that carry their own number."""
    return make_shards(tmp_path / "numbered", _numbered(200), vocab_size=300)


def _numbers(batches: list) -> list[int]:
    return [int(row[0]) - 3 for batch in batches for row in batch.input_ids.reshape(-1, L)]


# Permutation


@given(n=st.integers(1, 2000), seed=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_permutation_is_a_bijection(n, seed):
    permutation = Permutation(n, seed, 0)
    assert sorted(map(permutation, range(n))) == list(range(n))


def test_permutation_of_many_needs_no_memory_and_stays_in_range():
    n = 3 * 10**12 + 1
    permutation = Permutation(n, 0, 0)
    images = {permutation(i) for i in [*range(500), *range(n - 500, n)]}
    assert len(images) == 1000 and min(images) >= 0 and n // 2 < max(images) < n
    with pytest.raises(IndexError, match=f"index {n} is outside"):
        permutation(n)


def test_permutations_of_different_keys_look_independent():
    """Where 0 and its neighbour land, over 2,000 keys: chi-square of 20 cells below 45 (p = 0.0007 of 19 degrees of freedom)."""
    n, keys = 1000, 2000
    landed = [Permutation(n, 7, epoch) for epoch in range(keys)]
    first = np.array([p(0) for p in landed])
    gap = (np.array([p(1) for p in landed]) - first) % n
    for values in (first, gap):
        cells = np.bincount(values * 20 // n, minlength=20)
        assert ((cells - keys / 20) ** 2 / (keys / 20)).sum() < 45


# Samples


def test_samples_are_the_stream_cut_at_multiples_of_seq_len(tiny_shards):
    shards, samples = Shards.open(tiny_shards), open_samples(tiny_shards, 100, 1, 512, sequential=True)
    stream = shards.read(0, shards.tokens)
    assert len(samples) == (len(stream) - 1) // 100
    for i in (0, 1, 198, 199, len(samples) - 1):  # 199: across the first two shards
        tokens = samples.sample(i)
        assert tokens.dtype == np.int64
        np.testing.assert_array_equal(tokens, stream[i * 100 : i * 100 + 101])
    np.testing.assert_array_equal(samples.sample(len(samples)), samples.sample(0))


@pytest.mark.parametrize(("tokens", "count"), [(L + 1, 1), (2 * L, 1), (2 * L + 1, 2)])
def test_the_last_sample_needs_its_last_target(tmp_path, make_shards, tokens, count):
    samples = open_samples(make_shards(tmp_path, [[5] * (tokens - 1)]), L, 1, 100)
    assert len(samples) == count
    assert {len(samples.sample(i)) for i in range(2 * count)} == {L + 1}


def test_each_epoch_has_each_sample_once_in_another_order(numbered):
    samples = open_samples(numbered, L, 1, 300)
    epochs = [[int(samples.sample(e * 200 + i)[0]) - 3 for i in range(200)] for e in range(3)]
    for order in epochs:
        assert sorted(order) == list(range(200)) and order != list(range(200))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert [int(open_samples(numbered, L, 2, 300).sample(i)[0]) - 3 for i in range(200)] != epochs[0]


def test_a_sample_past_31_bits(tmp_path):
    """A sparse shard; sample 1,048,577 of 2,048 starts at token 2,147,485,696 and needs one token more than 2^31 + 4,096 as its target."""
    tokens = 2**31 + 4097
    with open(tmp_path / "000000.bin", "wb") as file:
        file.truncate(2 * tokens)
        file.seek(2 * 2_147_485_696)
        file.write(np.array([7], "<u2").tobytes())
    counts = {"tokens": tokens, "documents": 1, "bytes": 1}
    tokenizer = {"file": "t", "sha256": "0", "vocab_size": 100, "bos_id": 1, "eos_id": 2}
    shard = {"file": "000000.bin", "sha256": "0", **counts}
    tree = {"version": 1, "dtype": "uint16", "tokenizer": tokenizer, "totals": counts, "shards": [shard]}
    (tmp_path / "manifest.json").write_text(json.dumps(tree))
    sample = open_samples(tmp_path, 2048, 1, 100, sequential=True).sample(1_048_577)
    assert sample[0] == 7 and not sample[1:].any()


# Mixtures


@given(weights=st.lists(st.floats(0.01, 10), min_size=2, max_size=5), seed=st.integers(0, 100))
@settings(max_examples=10, deadline=None)
def test_mixture_keeps_its_shares_and_each_folder_counts_on(weights, seed):
    mixture, blocks = Mixture(weights, seed), 2
    placed = [mixture(position) for position in range(blocks * BLOCK)]
    for block in range(1, blocks + 1):
        numbers: dict[int, list] = {f: [] for f in range(len(weights))}
        for folder, number in placed[: block * BLOCK]:
            numbers[folder].append(number)
        for folder, own in numbers.items():
            assert sorted(own) == list(range(len(own)))
            assert abs(len(own) - block * BLOCK * weights[folder] / sum(weights)) <= 1.001


def test_mixture_is_spread_within_a_block_and_stays_exact_far_out():
    mixture = Mixture([0.7, 0.2, 0.1], 0)
    assert Counter(mixture(p)[0] for p in range(BLOCK)) == {0: 700, 1: 200, 2: 100}
    assert 40 < Counter(mixture(p)[0] for p in range(100))[0] < 95
    start = 10**12 * BLOCK
    own = sorted(number for folder, number in map(mixture, range(start, start + BLOCK)) if folder == 2)
    assert own == list(range(10**11 * BLOCK, 10**11 * BLOCK + 100))


def test_folders_of_a_mixture_have_epochs_of_their_own(tmp_path, make_shards):
    a = make_shards(tmp_path / "a", _numbered(40), vocab_size=300)
    b = make_shards(tmp_path / "b", [[token + 100 for token in _numbered(30)[0]]], vocab_size=300)
    samples = open_samples({str(a): 3, str(b): 1}, L, 1, 300)
    assert len(samples) == 40 + 30 and len(samples.manifests) == 2
    seen = Counter(int(samples.sample(p)[0]) - 3 for p in range(BLOCK))
    in_a, in_b = ([seen[base + i] for i in range(n)] for base, n in ((0, 40), (100, 30)))
    assert sum(in_a) == 750 and sum(in_b) == 250
    assert set(in_a) <= {18, 19} and set(in_b) <= {8, 9}  # 750 / 40, 250 / 30: no sample a second time before all the others


# Loader


@pytest.mark.parametrize(("micro", "accumulation", "ranks"), [(1, 16, 1), (1, 4, 4), (1, 8, 2), (4, 1, 4), (2, 2, 4), (16, 1, 1)])
def test_the_world_sees_the_same_samples_whatever_the_layout(numbered, micro, accumulation, ranks):
    """A step's samples are positions 16 k .. 16 k + 15, in this order: micro-batch, rank, slot."""
    samples = open_samples(numbered, L, 1, 300)
    loaders = [Loader(samples, micro, accumulation, rank, ranks, False) for rank in range(ranks)]
    for position in (0, 80, 192):  # 192: the step crosses the end of the epoch
        steps = [loader.step(position) for loader in loaders]
        order = [number for m in range(accumulation) for step in steps for number in _numbers([step[m]])]
        assert order == [int(samples.sample(position + i)[0]) - 3 for i in range(16)]


def test_resume_on_half_the_ranks_goes_on_at_the_next_sample(numbered):
    """Five steps of 4 ranks x 4 micro-batches, then 2 ranks x 8: after ten steps 160 samples, each once, as without the change."""
    samples = open_samples(numbered, L, 1, 300)
    position, seen = 0, []
    for ranks, accumulation in ((4, 4), (2, 8)):
        iterators = [Loader(samples, 1, accumulation, rank, ranks, False).steps(position) for rank in range(ranks)]
        for _ in range(5):
            got = [next(iterator) for iterator in iterators]
            seen += [number for m in range(accumulation) for batches, _ in got for number in _numbers([batches[m]])]
            assert len({after for _, after in got}) == 1
            position = got[0][1]
        for iterator in iterators:
            iterator.close()
    assert position == 160 and len(set(seen)) == 160
    assert seen == [int(samples.sample(i)[0]) - 3 for i in range(160)]


def test_resume_in_a_new_process_joins_the_stream(numbered):
    samples = open_samples(numbered, L, 1, 300)
    whole = [int(samples.sample(i)[0]) for i in range(100)]
    program = (
        "import sys; from pdn_train.data import open_samples; s = open_samples(sys.argv[1], 8, 1, 300); "
        "print([int(s.sample(i)[0]) for i in range(20, 100)])"
    )
    out = subprocess.run([sys.executable, "-c", program, str(numbered)], capture_output=True, text=True, check=True).stdout
    assert whole[:20] + json.loads(out) == whole and len(set(whole)) == 100


def test_labels_are_the_next_inputs(tiny_shards):
    samples = open_samples(tiny_shards, 64, 1, 512)
    (batch,) = Loader(samples, 3, 1, 0, 1, False).step(7)
    assert batch.input_ids.shape == batch.labels.shape == (3, 64) and batch.cu_seqlens is None and batch.targets == 192
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    for slot in range(3):
        tokens = samples.sample(7 + slot)
        assert batch.input_ids[slot].tolist() == tokens[:-1].tolist() and batch.labels[slot].tolist() == tokens[1:].tolist()


def test_windows_of_packed_documents(tmp_path, make_shards):
    """Documents of 1, 5 and 2,050 tokens (an empty one never gets here): 2,059 tokens, 3 ends; the last 11 are no whole window."""
    samples = open_samples(make_shards(tmp_path, [[5], [6] * 5, [7] * 2050], shard_tokens=5000), 1024, 1, 100, sequential=True)
    assert samples.manifests[0].totals.tokens == 2 + 6 + 2051 and len(samples) == 2
    loader = Loader(samples, 1, 1, 0, 1, True)
    (first,), (second,) = loader.step(0), loader.step(1)
    assert first.cu_seqlens.tolist() == [0, 2, 8, 1024] and second.cu_seqlens.tolist() == [0, 1024]
    assert first.cu_seqlens.dtype == torch.int32 and first.input_ids.shape == (1, 1024)
    assert first.labels[0, :9].tolist() == [EOS, IGNORED, 6, 6, 6, 6, EOS, IGNORED, 7]
    assert (first.targets, second.targets) == (1022, 1024)


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_sequences_start_at_rows_and_after_ends(rows):
    flat, length = [end for row in rows for end in row], 6
    starts = [i for i in range(len(flat)) if i % length == 0 or flat[i - 1]]
    found = sequence_starts(np.array(rows))
    assert found.tolist() == [*starts, len(flat)] and found.dtype == np.int32


def test_reset_masks_exactly_the_targets_across_a_boundary(tiny_shards):
    samples = open_samples(tiny_shards, 512, 3, 512)
    (batch,) = Loader(samples, 4, 1, 0, 1, True).step(0)
    assert batch.input_ids.shape == (1, 2048) and (batch.input_ids == EOS).sum() > 4
    plain = torch.tensor(np.stack([samples.sample(p)[1:] for p in range(4)]).reshape(1, -1))
    masked = batch.labels == IGNORED
    assert torch.equal(masked, batch.input_ids == EOS) and batch.targets == 2048 - masked.sum()
    assert torch.equal(batch.labels[~masked], plain[~masked])
    ends = batch.cu_seqlens[1:-1].long() - 1
    assert all(i % 512 == 511 or batch.input_ids[0, i] == EOS for i in ends.tolist())


def test_steps_prefetches_what_step_gives(numbered):
    loader = Loader(open_samples(numbered, L, 1, 300), 2, 3, 1, 2, False)
    iterator, position = loader.steps(36), 36
    for _ in range(6):
        batches, after = next(iterator)
        assert after == position + 12
        assert _numbers(batches) == _numbers(loader.step(position))
        position = after
    iterator.close()


def _data_threads() -> list:
    return [thread for thread in threading.enumerate() if thread.name.startswith("data")]


def test_an_error_in_the_background_reaches_the_step_it_belongs_to(numbered, monkeypatch):
    samples = open_samples(numbered, L, 1, 300)
    sound = samples.sample
    monkeypatch.setattr(samples, "sample", lambda p: sound(p) if p < 6 else (_ for _ in ()).throw(ShardError(f"no {p}")))
    iterator = Loader(samples, 2, 1, 0, 1, False).steps(0)
    assert [next(iterator)[1] for _ in range(3)] == [2, 4, 6]
    with pytest.raises(ShardError, match="no 6"):
        next(iterator)
    assert not _data_threads()


@pytest.mark.parametrize("end", ["close", "forget"])
def test_the_thread_ends_with_the_iterator(numbered, end):
    iterator = Loader(open_samples(numbered, L, 1, 300), 2, 1, 0, 1, False).steps(0)
    next(iterator)
    assert len(_data_threads()) == 1
    if end == "close":
        iterator.close()
    del iterator
    gc.collect()
    assert not _data_threads()


def test_to_moves_ids_and_labels_and_leaves_the_boundaries(numbered):
    (batch,) = Loader(open_samples(numbered, L, 1, 300), 2, 1, 0, 1, True).step(0)
    moved = batch.to("meta")
    assert moved.input_ids.is_meta and moved.labels.is_meta and moved.cu_seqlens.device.type == "cpu" and moved.targets == batch.targets


def test_a_rank_outside_the_world_is_refused(numbered):
    with pytest.raises(ValueError, match=r"data_rank=2 is outside 0 .. 1"):
        Loader(open_samples(numbered, L, 1, 300), 1, 1, 2, 2, False)


# Refusals


def test_fewer_tokens_than_a_sample(tmp_path, make_shards):
    folder = make_shards(tmp_path, [[5] * (L - 1)])
    with pytest.raises(ShardError, match=rf"{folder} holds 8 tokens, one sample of data.seq_len=8 needs 9"):
        open_samples(folder, L, 1, 100)


def test_a_vocabulary_above_the_models(numbered):
    with pytest.raises(ShardError, match=rf"{numbered} was made with a tokenizer of 300 pieces, the model has model.vocab_size=299"):
        open_samples(numbered, L, 1, 299)


def test_an_id_beyond_the_vocabulary_is_found_where_it_stands(tmp_path, make_shards):
    """The manifest promises 100 pieces, the second file holds id 100 at token 5."""
    folder = make_shards(tmp_path, [[5] * 39] * 2, shard_tokens=40)
    ids = np.memmap(folder / "000001.bin", "<u2", "r+")
    ids[5] = 100
    ids.flush()
    samples = open_samples(folder, L, 1, 100, sequential=True)
    samples.sample(4)
    with pytest.raises(ShardError, match=r"000001.bin: token id 100 at token 5 is outside the model's vocabulary of 100"):
        samples.sample(5)


def test_folders_of_different_tokenizers(tmp_path, make_shards):
    a, b = (make_shards(tmp_path / name, [[5] * 99], sha256=name * 4) for name in "ab")
    with pytest.raises(ShardError, match=rf"{a} and {b} were made with different tokenizers: sha256 aaaa .*bbbb"):
        open_samples({str(a): 1, str(b): 1}, L, 1, 100)
    with pytest.raises(ShardError, match=rf"{a} and {b} were made with different tokenizers"):
        check_same_tokenizer(open_samples(a, L, 1, 100), open_samples(b, L, 1, 100))
    check_same_tokenizer(open_samples(a, L, 1, 100), open_samples(a, L, 1, 100))


@pytest.mark.parametrize(
    ("weights", "message"), [((1, 0), "the weight 0 of"), ((1, 1e-4), "the smallest possible is 0.001"), ((), "no folder")]
)
def test_weights_that_cannot_be_met(tmp_path, make_shards, weights, message):
    folders = {str(make_shards(tmp_path / str(n), [[5] * 99])): weight for n, weight in enumerate(weights)}
    with pytest.raises(ShardError, match=message):
        open_samples(folders, L, 1, 100)


def test_a_mixture_has_no_order_of_its_own(tmp_path, make_shards):
    folders = {str(make_shards(tmp_path / name, [[5] * 99])): 1.0 for name in "ab"}
    with pytest.raises(ShardError, match="come from one folder, not 2"):
        open_samples(folders, L, 1, 100, sequential=True)


def test_the_fingerprint_is_of_the_data_not_of_where_it_lies(tmp_path, make_shards):
    def print_of(name: str, seq_len: int = L, seed: int = 1) -> dict:
        return open_samples(tmp_path / name, seq_len, seed, 100).fingerprint

    make_shards(tmp_path / "a", [[5] * 99])
    make_shards(tmp_path / "other", [[5] * 98 + [6]])
    shutil.copytree(tmp_path / "a", tmp_path / "moved")
    assert print_of("a") == print_of("moved") == json.loads(json.dumps(print_of("a")))
    assert print_of("a") == print_of("a", seq_len=L + 1) == print_of("a", seed=2)  # keys of the configuration, compared there
    weighted = {str(tmp_path / "a"): 2.0, str(tmp_path / "moved"): 1.0}
    mixtures = [open_samples({**weighted, str(tmp_path / "moved"): weight}, L, 1, 100).fingerprint for weight in (1.0, 3.0)]
    assert mixtures[0] != mixtures[1]
    for changed in (print_of("other"), *mixtures):
        assert changed != print_of("a")
