"""The shard format. Judges: the documents joined by hand, the bytes of an uninterrupted writer, file sizes, sha256."""

import hashlib
import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pdn_train import shards as format_
from pdn_train.shards import ShardError, Shards, ShardWriter, TokenizerInfo, faults, read_manifest

EOS = 2
INFO = TokenizerInfo(file="tokenizer.model", sha256="0", vocab_size=100, bos_id=1, eos_id=EOS)


@pytest.fixture
def documents() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 100, rng.integers(1, 40)) for _ in range(60)]


def _joined(documents) -> np.ndarray:
    return np.concatenate([np.append(ids, EOS) for ids in documents])


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_stream_is_each_document_then_its_end(tmp_path, documents, make_shards):
    shards = Shards.open(make_shards(tmp_path, documents, shard_tokens=100))
    stream = _joined(documents)
    assert shards.tokens == len(stream) and len(shards.manifest.shards) > 5
    np.testing.assert_array_equal(shards.read(0, len(stream)), stream)
    rng = np.random.default_rng(1)
    for start in rng.integers(0, len(stream), 50):
        stop = int(rng.integers(start, len(stream) + 1))
        tokens = shards.read(int(start), stop)
        assert tokens.dtype == np.int64
        np.testing.assert_array_equal(tokens, stream[start:stop])


def test_a_shard_is_whole_documents_and_at_most_its_size(tmp_path, make_shards):
    make_shards(tmp_path, [[5] * 4, [5] * 4, [5] * 5, [5] * 50, [5]], shard_tokens=10)
    assert [(shard.tokens, shard.documents) for shard in read_manifest(tmp_path).shards] == [(10, 2), (6, 1), (51, 1), (2, 1)]


def test_manifest_has_the_documented_keys_and_counts(tmp_path, documents, make_shards):
    tree = json.loads((make_shards(tmp_path, documents, shard_tokens=100) / "manifest.json").read_text())
    assert list(tree) == ["version", "dtype", "tokenizer", "totals", "shards"]
    assert list(tree["tokenizer"]) == ["file", "sha256", "vocab_size", "bos_id", "eos_id"]
    assert tree["totals"] == {"tokens": len(_joined(documents)), "documents": 60, "bytes": sum(map(len, documents))}
    for shard in tree["shards"]:
        assert list(shard) == ["file", "tokens", "documents", "bytes", "sha256"]
        data = (tmp_path / shard["file"]).read_bytes()
        assert len(data) == 2 * shard["tokens"] and hashlib.sha256(data).hexdigest() == shard["sha256"]
        assert (np.frombuffer(data, "<u2") == EOS).sum() == shard["documents"]
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".bin"}


def test_ids_above_16_bits_come_back(tmp_path, make_shards):
    ids = [65535, 65536, 70000]
    shards = Shards.open(make_shards(tmp_path, [ids], vocab_size=70001))
    assert shards.manifest.dtype == "uint32"
    assert shards.read(0, 4).tolist() == [*ids, EOS]
    np.testing.assert_array_equal(np.fromfile(tmp_path / "000000.bin", "<u4"), [*ids, EOS])


@pytest.mark.parametrize(("vocab_size", "dtype"), [(100, "uint16"), (65536, "uint16"), (65537, "uint32"), (2**32, "uint32")])
def test_dtype_is_the_narrowest_that_holds_the_vocabulary(vocab_size, dtype):
    assert format_.dtype_for(vocab_size) == dtype
    assert np.iinfo(format_.DTYPES[dtype]).max >= vocab_size - 1


@pytest.mark.parametrize("token", [100, 65536, -1])
def test_writer_refuses_an_id_that_does_not_fit(tmp_path, token):
    writer = ShardWriter(tmp_path, INFO, 1000)
    with pytest.raises(ShardError, match=f"token id {token} does not fit uint16 shards of a vocabulary of 100"):
        writer.add(np.array([5, token, 6]), 3)


def test_writer_refuses_empty_documents_and_ends_inside(tmp_path):
    writer = ShardWriter(tmp_path, INFO, 1000)
    with pytest.raises(ShardError, match="empty document"):
        writer.add(np.array([], dtype=np.int64), 0)
    with pytest.raises(ShardError, match="end id 2 stands inside"):
        writer.add(np.array([5, EOS, 6]), 3)


@pytest.mark.parametrize("committed", [0, 1, 7, 30, 59])
@pytest.mark.parametrize("moment", ["before publish", "after publish", "more written"])
def test_a_writer_resumed_from_a_commit_gives_the_same_bytes(tmp_path, documents, make_shards, committed, moment):
    whole = make_shards(tmp_path / "whole", documents, shard_tokens=100)
    folder, ended = tmp_path / "resumed", []
    killed = ShardWriter(folder, INFO, 100)
    for count, ids in enumerate(documents[:committed]):
        killed.add(ids, len(ids))
        if count % 5 == 0:
            ended += killed.commit()["ended"]
            killed.publish()
    kept = killed.commit()
    if moment != "before publish":
        killed.publish()
    if moment == "more written":
        for ids in documents[committed : committed + 20]:
            killed.add(ids, len(ids))
    killed._file.close()  # what it held in memory reaches the disk: more than a kill would leave there
    resumed = ShardWriter(folder, INFO, 100, ended + kept["ended"], kept["open"])
    for ids in documents[committed:]:
        resumed.add(ids, len(ids))
    format_.write_manifest(folder, resumed.finish())
    assert _digests(folder) == _digests(whole)


def test_a_writer_refuses_to_resume_without_what_was_committed(tmp_path, documents):
    writer = ShardWriter(tmp_path, INFO, 100)
    for ids in documents:
        writer.add(ids, len(ids))
    kept = writer.commit()
    writer.publish()
    os.truncate(tmp_path / f"{len(kept['ended']):06d}.bin.partial", 0)
    with pytest.raises(ShardError, match=r"bin.partial has 0 bytes, \d+ were committed"):
        ShardWriter(tmp_path, INFO, 100, kept["ended"], kept["open"])
    (tmp_path / "000001.bin").unlink()
    with pytest.raises(ShardError, match="000001.bin is missing"):
        ShardWriter(tmp_path, INFO, 100, kept["ended"], kept["open"])


def _damage(path: Path, how: str) -> int:
    """Damage a file; returns the size it has then."""
    size = path.stat().st_size
    if how == "missing":
        path.unlink()
        return 0
    os.truncate(path, size - {"cut by 7": 7, "cut by 4096": 4096}[how])
    return path.stat().st_size


@pytest.mark.parametrize("how", ["cut by 7", "cut by 4096", "missing"])
def test_a_short_or_missing_shard_stops_at_open(tmp_path, make_shards, how):
    make_shards(tmp_path, [[5] * 2999] * 5, shard_tokens=3000)
    found = _damage(tmp_path / "000002.bin", how)
    with pytest.raises(ShardError, match=rf"000002.bin .*expected 6000 bytes.*found {found or 'no file'}"):
        Shards.open(tmp_path)


def test_a_32_bit_shard_is_never_read_as_twice_as_many_tokens(tmp_path, make_shards):
    make_shards(tmp_path, [[70000] * 9], vocab_size=70001)
    manifest = (tmp_path / "manifest.json").read_text().replace("uint32", "uint16")
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(ShardError, match=r"000000.bin has the wrong size: expected 20 bytes \(10 uint16 tokens\), found 40"):
        Shards.open(tmp_path)


@pytest.mark.parametrize("open_files", [1, 128])
@pytest.mark.parametrize("how", ["cut by 4096", "missing"])
def test_a_shard_that_changes_under_a_reader_is_an_error(tmp_path, make_shards, monkeypatch, how, open_files):
    monkeypatch.setattr(format_, "OPEN_FILES", open_files)
    shards = Shards.open(make_shards(tmp_path, [[5] * 2999] * 5, shard_tokens=3000))
    shards.read(8000, 9000)
    _damage(tmp_path / "000002.bin", how)
    if how == "missing" and open_files == 128:  # the file is still open: its tokens are right
        assert (shards.read(8000, 8999) == 5).all()
        return
    shards.read(0, 10)  # with one open file, this closes the damaged one
    with pytest.raises(ShardError, match="000002.bin"):
        shards.read(8000, 9000)


def test_reads_that_come_in_pieces_are_joined(tmp_path, documents, make_shards, monkeypatch):
    """A pread may give fewer bytes than are there, here at most 5: two tokens and a half."""
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, size, at: pread(descriptor, min(size, 5), at))
    shards, stream = Shards.open(make_shards(tmp_path, documents, shard_tokens=100)), _joined(documents)
    np.testing.assert_array_equal(shards.read(0, len(stream)), stream)


def test_reading_outside_the_stream_is_refused(tmp_path, make_shards):
    shards = Shards.open(make_shards(tmp_path, [[5] * 9]))
    for start, stop in ((-1, 2), (0, 11), (5, 4)):
        with pytest.raises(ShardError, match=f"tokens {start} .. {stop} are outside the 10 tokens"):
            shards.read(start, stop)
    assert len(shards.read(10, 10)) == 0


def test_positions_past_31_bits(tmp_path):
    """Sparse files: 6 of 2^29 tokens, so that token and byte offsets pass 2^31 and 2^32; each begins with its number + 3."""
    count, tokens = 6, 2**29
    entries = [{"file": f"{n}.bin", "tokens": tokens, "documents": 1, "bytes": 1, "sha256": "0"} for n in range(count)]
    for n, entry in enumerate(entries):
        (tmp_path / entry["file"]).write_bytes(np.array([n + 3], "<u2").tobytes())
        os.truncate(tmp_path / entry["file"], 2 * tokens)
    totals = {"tokens": count * tokens, "documents": count, "bytes": count}
    manifest = {"version": 1, "dtype": "uint16", "tokenizer": INFO.model_dump(), "totals": totals, "shards": entries}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    shards = Shards.open(tmp_path)
    assert shards.tokens == count * tokens
    for n in range(count):
        assert shards.read(n * tokens, n * tokens + 2).tolist() == [n + 3, 0]
        assert shards.locate(n * tokens + 5) == (tmp_path / f"{n}.bin", 5)


def test_reading_from_many_threads(tmp_path, documents, make_shards, monkeypatch):
    """With two files open at once and slow reads, a file would be closed under another thread's read if nothing forbade it."""
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *arguments: time.sleep(2e-4) or pread(*arguments))
    monkeypatch.setattr(format_, "OPEN_FILES", 2)
    shards, stream = Shards.open(make_shards(tmp_path, documents, shard_tokens=50)), _joined(documents)

    def work(seed: int) -> None:
        for start in map(int, np.random.default_rng(seed).integers(0, len(stream) - 60, 50)):
            np.testing.assert_array_equal(shards.read(start, start + 60), stream[start : start + 60])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    shards.close()
    assert shards.read(0, 1) == stream[:1]


def test_folders_without_a_manifest_say_why(tmp_path, make_shards):
    cases = {"gone": "is not a folder", "empty": "is empty", "other": "has no manifest.json", "unfinished": "did not finish"}
    for name in ("empty", "other", "unfinished"):
        (tmp_path / name).mkdir()
    (tmp_path / "other" / "notes.txt").write_text("")
    (tmp_path / "unfinished" / "000000.bin").write_bytes(b"")
    for name, reason in cases.items():
        with pytest.raises(ShardError, match=f"{name} {reason}|{name} .*{reason}"):
            Shards.open(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "has version 2, this program reads version 1"),
        ({"dtype": "int8"}, "dtype 'int8' is none of uint16, uint32"),
        ({"shards": []}, "lists no shards"),
        ({"tokenizer": None}, "manifest.json: tokenizer"),
        ({"extra": 1}, "manifest.json: extra"),
        ({"tokenizer": {}}, "manifest.json: tokenizer.file: Field required; copy or prepare"),
        ({"shards": [{"file": "../a.bin"}]}, r"manifest.json: shards.0.file: .*found '../a.bin'"),
        ({"totals": {"tokens": "many", "documents": 1, "bytes": 1}}, "manifest.json: totals.tokens.*found 'many'"),
    ],
)
def test_a_manifest_that_is_not_ours_is_refused(tmp_path, make_shards, change, message):
    path = make_shards(tmp_path, [[5] * 9]) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ShardError, match=message):
        Shards.open(tmp_path)


@pytest.mark.parametrize("damage", [lambda whole: whole[:50], lambda whole: whole[:5] + b"\xff" + whole[6:]])
def test_a_damaged_manifest_is_refused(tmp_path, make_shards, damage):
    path = make_shards(tmp_path, [[5] * 9]) / "manifest.json"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ShardError, match="manifest.json is not JSON"):
        Shards.open(tmp_path)


def _overwrite(path: Path, offset: int, ids: list[int]) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(np.array(ids, "<u2").tobytes())


@pytest.mark.parametrize(
    ("ids", "at_end", "messages"),
    [
        ([5], False, []),
        ([6], False, ["contents changed"]),
        ([200], False, ["contents changed", "token id 200 is outside the vocabulary of 100"]),
        ([EOS], False, ["contents changed", "3 end ids .id 2., but 2 documents"]),
        ([5], True, ["contents changed", "1 end ids", "the last token is 5"]),
    ],
)
def test_faults_of_the_contents(tmp_path, make_shards, monkeypatch, ids, at_end, messages):
    monkeypatch.setattr(format_, "READ_SIZE", 8)
    make_shards(tmp_path, [[5] * 9] * 2)
    _overwrite(tmp_path / "000000.bin", 38 if at_end else 0, ids)
    manifest = read_manifest(tmp_path)
    found = list(faults(tmp_path, manifest, manifest.shards[0]))
    assert len(found) == len(messages)
    for fault, message in zip(found, messages, strict=True):
        assert "000000.bin" in fault and re.search(message, fault)


def test_unigram_entropy_by_hand(tmp_path, make_shards):
    """Two documents of three 5s and one 6, each with its end: shares 6/10, 2/10, 2/10."""
    make_shards(tmp_path, [[5, 5, 5, 6]] * 2)
    wanted = -(0.6 * np.log(0.6) + 2 * 0.2 * np.log(0.2))
    assert format_.unigram_entropy(tmp_path, read_manifest(tmp_path)) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(("vocab_size", "shard_tokens"), [(100, 12), (100, 1000), (70_000, 1000)])
@pytest.mark.parametrize("lengths", [[4, 30, 7], [40, 3], [2, 9, 9, 60], [1], [25, 1, 1, 1, 26]])
def test_the_longest_document_wherever_blocks_end(tmp_path, make_shards, monkeypatch, vocab_size, shard_tokens, lengths):
    """Judge: the lengths that were written. A shard that holds too few tokens is not read."""
    monkeypatch.setattr(format_, "READ_SIZE", 8)
    make_shards(tmp_path, [[5] * length for length in lengths], vocab_size=vocab_size, shard_tokens=shard_tokens)
    manifest = read_manifest(tmp_path)
    wanted = max(lengths) + 1
    assert format_.longest_document(tmp_path, manifest, at_least=1) == wanted
    assert format_.longest_document(tmp_path, manifest, at_least=wanted + 1) == 0
    for shard in manifest.shards:
        if shard.tokens < wanted:
            (tmp_path / shard.file).unlink()
    assert format_.longest_document(tmp_path, manifest, at_least=wanted) == wanted
