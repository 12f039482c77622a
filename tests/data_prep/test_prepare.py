"""Raw text to shards. Judges: the tokenizer applied document by document, the bytes of an uninterrupted run, what the command prints."""

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sentencepiece
import zstandard

from data_prep import inputs as reading
from data_prep import prepare, verify
from data_prep.encode import Rules, encode_in_order, in_validation
from data_prep.inputs import find_inputs
from pdn_train.shards import Shards, read_manifest
from pdn_train.tokenizer import Tokenizer

EOS = 2


def _lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def _run(output: Path, inputs: list, tokenizer: Path, *more: str) -> int:
    """Shards of 5,000 tokens, one worker."""
    arguments = ["--shard-tokens", "5000", "--workers", "1", *more]
    return prepare.main([*map(str, inputs), "--tokenizer", str(tokenizer), "--output", str(output), *arguments])


def _digests(folder: Path) -> dict[str, str]:
    """Of everything but the journal, which tells of the interruptions."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != prepare.JOURNAL]
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _stream(folder: Path) -> list[int]:
    shards = Shards.open(folder)
    return shards.read(0, shards.tokens).tolist()


@pytest.fixture(scope="module")
def corpus(documents, tmp_path_factory) -> Path:
    """Four inputs: about 100 documents each."""
    folder = tmp_path_factory.mktemp("corpus")
    for n in range(4):
        (folder / f"{n}.jsonl").write_bytes(_lines(documents[n::4]))
    return folder


@pytest.fixture(scope="module")
def prepared(corpus, tiny_tokenizer, tmp_path_factory) -> Path:
    """The corpus, prepared without interruption."""
    folder = tmp_path_factory.mktemp("prepared") / "shards"
    assert _run(folder, [corpus], tiny_tokenizer, "--val-fraction", "0.1") == 0
    return folder


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(reading, "BATCH_RECORDS", 10)


# What is written


def test_shards_are_the_documents_encoded_one_by_one(corpus, documents, tiny_tokenizer, tmp_path):
    assert _run(tmp_path / "out", [corpus], tiny_tokenizer) == 0
    tokenizer = Tokenizer.load(tiny_tokenizer)
    texts = [text for n in range(4) for text in documents[n::4]]
    assert _stream(tmp_path / "out") == [token for text in texts for token in [*tokenizer.encode(text), EOS]]
    manifest = read_manifest(tmp_path / "out")
    assert manifest.totals.documents == len(texts) and manifest.totals.bytes == sum(len(text.encode()) for text in texts)
    assert (manifest.tokenizer.file, manifest.tokenizer.sha256) == ("tokenizer.model", tokenizer.sha256)
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == tiny_tokenizer.read_bytes()
    assert max(shard.tokens for shard in manifest.shards) <= 5000 and len(manifest.shards) > 10
    assert not list((tmp_path / "out").glob("*.partial"))


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_do_not_change_the_bytes(corpus, prepared, tiny_tokenizer, tmp_path, small_batches, workers):
    assert _run(tmp_path / "out", [corpus], tiny_tokenizer, "--val-fraction", "0.1", "--workers", str(workers)) == 0
    assert _digests(tmp_path / "out") == _digests(prepared)


@pytest.mark.parametrize("records", [1, 7, 1000])
def test_the_size_of_what_is_read_at_once_does_not_change_the_bytes(corpus, prepared, tiny_tokenizer, tmp_path, monkeypatch, records):
    monkeypatch.setattr(reading, "BATCH_RECORDS", records)
    assert _run(tmp_path / "out", [corpus], tiny_tokenizer, "--val-fraction", "0.1") == 0
    assert _digests(tmp_path / "out") == _digests(prepared)


def test_a_document_is_never_cut_before_it_is_encoded(documents, tmp_path):
    """With the usual mark before each string, a document encoded in two pieces has other ids than whole."""
    model = io.BytesIO()
    texts = iter(documents)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=texts, model_writer=model, model_type="bpe", vocab_size=400, byte_fallback=True, minloglevel=2
    )
    (tmp_path / "marked.model").write_bytes(model.getvalue())
    tokenizer = Tokenizer.load(tmp_path / "marked.model")
    text = documents[0] * 50
    assert tokenizer.encode(text[:1003]) + tokenizer.encode(text[1003:]) != tokenizer.encode(text)
    (tmp_path / "a.txt").write_text(text)
    assert _run(tmp_path / "out", [tmp_path / "a.txt"], tmp_path / "marked.model") == 0
    assert _stream(tmp_path / "out") == [*tokenizer.encode(text), EOS]


def test_documents_of_1_0_5_and_2050_tokens(tiny_tokenizer, tmp_path, capsys):
    """The empty one is left out and counted; 2 + 6 + 2,051 tokens, three ends, each last in its document."""
    texts = ["\n", "", "\n\t\n\t\n", "\n\t" * 1025]
    lengths = [len(Tokenizer.load(tiny_tokenizer).encode(text)) for text in texts]
    (tmp_path / "a.jsonl").write_bytes(_lines(texts))
    assert _run(tmp_path / "out", [tmp_path / "a.jsonl"], tiny_tokenizer, "--max-bad", "0.25") == 0
    stream = _stream(tmp_path / "out")
    ends = [i for i, token in enumerate(stream) if token == EOS]
    assert lengths == [1, 0, 5, 2050] and len(stream) == 2059 and ends == [1, 7, 2058]
    assert read_manifest(tmp_path / "out").totals.documents == 3
    assert "a.jsonl:2: empty text" in capsys.readouterr().err


def test_the_validation_split_is_apart_and_complete(corpus, documents, prepared, tiny_tokenizer):
    def texts(folder: Path) -> list[str]:
        stream, tokenizer = np.array(_stream(folder)), Tokenizer.load(tiny_tokenizer)
        return [tokenizer.decode(part[:-1]) for part in np.split(stream, np.flatnonzero(stream == EOS) + 1)[:-1]]

    train, val = texts(prepared), texts(prepared / "val")
    assert sorted(train + val) == sorted(documents) and not set(train) & set(val)
    assert 0.05 < len(val) / len(documents) < 0.16
    assert verify.main([str(prepared)]) == 0


def test_equal_texts_fall_on_one_side(tiny_tokenizer, tmp_path):
    for n in range(3):
        (tmp_path / f"{n}.jsonl").write_bytes(_lines([f"text {i}" for i in range(100)]))
    assert _run(tmp_path / "out", [tmp_path], tiny_tokenizer, "--val-fraction", "0.3") == 0
    for folder in (tmp_path / "out", tmp_path / "out" / "val"):
        assert read_manifest(folder).totals.documents % 3 == 0


@pytest.mark.parametrize("streaming", [[], ["--streaming"]])
def test_a_dataset_gives_the_same_shards_as_its_files(corpus, prepared, tiny_tokenizer, tmp_path, monkeypatch, streaming):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = ["--dataset", str(corpus), "--split", "train", *streaming, "--val-fraction", "0.1"]
    assert _run(tmp_path / "out", [], tiny_tokenizer, *arguments) == 0
    assert _digests(tmp_path / "out") == _digests(prepared)


def test_the_summary_has_the_figures(corpus, prepared, tiny_tokenizer, tmp_path, capsys):
    assert _run(tmp_path / "out", [corpus], tiny_tokenizer) == 0
    out, totals = capsys.readouterr().out, read_manifest(tmp_path / "out").totals
    assert f"{totals.documents:,} documents, {totals.tokens:,} tokens, {totals.bytes:,} bytes" in out
    assert f"{totals.tokens / totals.bytes:.4f} tokens per byte" in out and f"bad records: 0 of {totals.documents:,}" in out


# Interruption


class Interrupted(Exception):
    pass


def _broken_off(work, moments: int, before: bool):
    """`work`, raising Interrupted at every `moments`-th call, before or after it is done, for the first 60 calls."""
    calls = []

    def breaking(*arguments):
        calls.append(1)
        due = len(calls) % moments == 0 and len(calls) < 60
        if due and before:
            raise Interrupted
        work(*arguments)
        if due:
            raise Interrupted

    return breaking


@pytest.mark.parametrize("moments", [2, 7])
@pytest.mark.parametrize("commits", ["each", "few"])
@pytest.mark.parametrize("where", ["after a batch", "before the line of a commit", "after the line of a commit", "before a manifest"])
def test_a_run_broken_off_anywhere_goes_on_to_the_same_bytes(
    corpus, prepared, tiny_tokenizer, tmp_path, monkeypatch, small_batches, moments, commits, where
):
    """Again and again, with commits after every batch or only where a shard ends."""
    monkeypatch.setattr(prepare, "COMMIT_SECONDS", 0.0 if commits == "each" else 1e9)
    owner, name = {
        "after a batch": (prepare._Run, "take"),
        "before a manifest": (prepare, "write_manifest"),
    }.get(where, (prepare.Journal, "commit"))
    monkeypatch.setattr(owner, name, _broken_off(getattr(owner, name), moments, before="before" in where))
    runs, status = 0, None
    while status is None:
        runs += 1
        try:
            status = _run(tmp_path / "out", [corpus], tiny_tokenizer, "--val-fraction", "0.1")
        except Interrupted:
            continue
    assert status == 0 and _digests(tmp_path / "out") == _digests(prepared)
    assert runs > 1 or (where == "before a manifest" and moments > 2)


def test_finished_inputs_are_not_read_again(corpus, prepared, tiny_tokenizer, tmp_path, monkeypatch, small_batches):
    monkeypatch.setattr(prepare, "COMMIT_SECONDS", 0.0)
    read, opened = reading.FileInput.read, []
    fails = [True]

    def watched(self, skip):
        opened.append((self.name, skip))
        if self.name == "2.jsonl" and fails[0]:
            raise Interrupted
        return read(self, skip)

    monkeypatch.setattr(reading.FileInput, "read", watched)
    with pytest.raises(Interrupted):
        _run(tmp_path / "out", [corpus], tiny_tokenizer, "--val-fraction", "0.1")
    opened.clear()
    fails[0] = False
    assert _run(tmp_path / "out", [corpus], tiny_tokenizer, "--val-fraction", "0.1") == 0
    assert opened == [("1.jsonl", 94), ("2.jsonl", 0), ("3.jsonl", 0)] and _digests(tmp_path / "out") == _digests(prepared)


def _children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait(condition, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def _start(output: Path, inputs: list[Path], tokenizer: Path, workers: int) -> subprocess.Popen:
    """The command in a process of its own, reading a little at a time."""
    program = "import sys; from data_prep import inputs, prepare; inputs.BATCH_BYTES = 3000; sys.exit(prepare.main())"
    arguments = ["--tokenizer", tokenizer, "--output", output, "--workers", workers, "--shard-tokens", 5000, "--val-fraction", 0.1]
    command = [sys.executable, "-c", program, *inputs, *arguments]
    return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _commits(output: Path) -> int:
    journal = output / prepare.JOURNAL
    return journal.read_bytes().count(b"\n") - 1 if journal.exists() else 0


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_run_goes_on_to_the_same_bytes(corpus, prepared, tiny_tokenizer, tmp_path, workers):
    """kill -9 in the middle, where a pipe among the inputs holds the run up; then the same command with an empty file in its place.

    The workers of the killed run end by themselves.
    """
    inputs, output = tmp_path / "in", tmp_path / "out"
    shutil.copytree(corpus, inputs)
    arguments = [inputs / name for name in ("0.jsonl", "1.jsonl", "1z.jsonl", "2.jsonl", "3.jsonl")]
    os.mkfifo(inputs / "1z.jsonl")
    process = _start(output, arguments, tiny_tokenizer, workers)
    _wait(lambda: _commits(output) >= 3)
    workers_left = _children(process.pid)
    process.kill()
    process.communicate()
    assert not (output / "manifest.json").exists()
    _wait(lambda: not any(map(_alive, workers_left)))
    (inputs / "1z.jsonl").unlink()
    (inputs / "1z.jsonl").touch()
    done = {path.name: path.stat().st_mtime_ns for path in output.glob("*.bin")}
    out, err = _start(output, arguments, tiny_tokenizer, workers).communicate()
    assert "going on after input" in err and "bad records: 0" in out
    assert _digests(output) == _digests(prepared)
    assert done and {name: (output / name).stat().st_mtime_ns for name in done} == done


def test_a_dead_worker_is_an_error_and_no_hang(corpus, tiny_tokenizer, small_batches):
    def killing():
        for count, batch in enumerate(reading.batches(find_inputs([str(corpus)], "text"), reading.Place(0, 0))):
            if count == 8:
                worker = next(pid for pid in _children(os.getpid()) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())
                os.kill(worker, signal.SIGKILL)
            yield batch

    with pytest.raises(reading.InputError, match="one of 2 workers died"):
        list(encode_in_order(Rules(str(tiny_tokenizer), "text", 0.0, False), killing(), 2))


def test_a_second_run_changes_nothing(corpus, prepared, tiny_tokenizer, capsys):
    before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*.bin")}
    digests = _digests(prepared)
    assert _run(prepared, [corpus], tiny_tokenizer, "--val-fraction", "0.1") == 0
    assert {path: path.stat().st_mtime_ns for path in prepared.rglob("*.bin")} == before and _digests(prepared) == digests
    assert "encoded 0 tokens" in capsys.readouterr().out


def test_another_run_into_the_same_folder_names_the_difference(corpus, prepared, tiny_tokenizer, tmp_path, capsys):
    digests = _digests(prepared)
    other = tmp_path / "other.model"
    other.write_bytes(tiny_tokenizer.read_bytes() + b"\x50\x00")  # an unknown field: the same pieces, another file
    for inputs, tokenizer, more, message in (
        (
            [corpus],
            other,
            [],
            f"begun with tokenizer (sha256) {Tokenizer.load(tiny_tokenizer).sha256}, now it is {Tokenizer.load(other).sha256}",
        ),
        ([corpus], tiny_tokenizer, ["--shard-tokens", "6000"], "begun with --shard-tokens 5000, now it is 6000"),
        ([corpus], tiny_tokenizer, ["--val-fraction", "0.2"], "begun with --val-fraction 0.1, now it is 0.2"),
        ([corpus], tiny_tokenizer, ["--text-field", "body"], "begun with --text-field text, now it is body"),
        ([corpus], tiny_tokenizer, ["--lossless"], "begun with --lossless False, now it is True"),
        ([corpus / "0.jsonl"], tiny_tokenizer, [], "begun with 4 inputs, now there are 1"),
        ([corpus / f"{n}.jsonl" for n in (1, 0, 2, 3)], tiny_tokenizer, [], "begun with the input 0.jsonl of"),
    ):
        assert _run(prepared, inputs, tokenizer, "--val-fraction", "0.1", *more) == 1
        assert message in capsys.readouterr().err
    assert _digests(prepared) == digests


def test_an_input_that_changed_since_is_named(corpus, tiny_tokenizer, tmp_path, capsys):
    text = tmp_path / "a.jsonl"
    text.write_bytes((corpus / "0.jsonl").read_bytes())
    assert _run(tmp_path / "out", [text], tiny_tokenizer) == 0
    size = text.stat().st_size
    text.write_bytes(text.read_bytes() + _lines(["more"]))
    assert _run(tmp_path / "out", [text], tiny_tokenizer) == 1
    assert f"begun with the input a.jsonl of {size} bytes, now it is a.jsonl of {size + 17} bytes" in capsys.readouterr().err


def test_a_journal_cut_short_by_a_kill_loses_only_its_last_line(corpus, prepared, tiny_tokenizer, tmp_path, monkeypatch, small_batches):
    monkeypatch.setattr(prepare._Run, "finish", lambda self: (_ for _ in ()).throw(Interrupted))
    with pytest.raises(Interrupted):
        _run(tmp_path / "out", [corpus], tiny_tokenizer, "--val-fraction", "0.1")
    monkeypatch.undo()
    journal = tmp_path / "out" / prepare.JOURNAL
    os.truncate(journal, journal.stat().st_size - 5)
    for path in (tmp_path / "out").glob("*.bin"):  # those of the lost commit had not got their names either
        if path.name not in journal.read_text()[: journal.read_text().rindex("\n")]:
            path.rename(path.with_name(path.name + ".partial"))
    for _ in range(2):  # the second reads what the first wrote after the cut
        assert _run(tmp_path / "out", [corpus], tiny_tokenizer, "--val-fraction", "0.1") == 0
    assert _digests(tmp_path / "out") == _digests(prepared)


def test_two_runs_at_once_are_refused(corpus, tiny_tokenizer, tmp_path, capsys):
    with prepare.Journal(tmp_path / "out", {"inputs": []}):
        assert _run(tmp_path / "out", [corpus], tiny_tokenizer) == 1
    assert "another preparation is writing to" in capsys.readouterr().err


def test_a_folder_of_other_shards_is_left_alone(corpus, tiny_tokenizer, tmp_path, make_shards, capsys):
    make_shards(tmp_path / "out", [[5] * 9])
    assert _run(tmp_path / "out", [corpus], tiny_tokenizer) == 1
    assert "holds shards without a prepare.journal" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("split", "words", "named"), [("train", 280, False), ("train", 310, True), ("val", 340, False), ("val", 380, True), ("val", 3000, True)]
)
def test_a_document_of_more_than_a_tenth_of_its_split_is_named(documents, tiny_tokenizer, tmp_path, capsys, split, words, named):
    """Judge: the tokenizer and the split's total. The same command says it again, though it encodes nothing."""
    text = next(t for n in range(100) if in_validation((t := f"{n} " + "x y " * words).encode(), 0.5) == (split == "val"))
    (tmp_path / "a.jsonl").write_bytes(_lines([*documents[:40], text, *documents[40:80]]))
    length = len(Tokenizer.load(tiny_tokenizer).encode(text)) + 1
    folders = {"train": tmp_path / "out", "val": tmp_path / "out" / "val"}
    for _ in range(2):
        assert _run(tmp_path / "out", [tmp_path / "a.jsonl"], tiny_tokenizer, "--val-fraction", "0.5") == 0
        tokens, said = read_manifest(folders[split]).totals.tokens, capsys.readouterr().err
        wanted = f"warning: {folders[split]}: one document is {length / tokens:.0%} of the split ({length:,} of {tokens:,} tokens)"
        assert said.count("one document is") == said.count(wanted) == (length > 0.1 * tokens) == named
        assert said.count("cut long documents into pieces, or leave it out") == named


# Bad input


def _bad_corpus(folder: Path) -> None:
    """1,000 good lines and every kind of bad one."""
    folder.mkdir()
    good = _lines([f"good line {n}" for n in range(1000)])
    bad = [b'{"text": "bro', b'{"text": "\xff"}', b'{"text": ""}', b'{"body": "x"}', b'{"text": 7}']
    (folder / "a.jsonl").write_bytes(good + b"\n".join(bad) + b"\n")
    (folder / "b.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(_lines(["x"] * 50))[:-4])
    (folder / "c.txt").write_bytes(b"\xff\xfe")


def test_bad_input_is_left_out_counted_and_named(tiny_tokenizer, tmp_path, capsys):
    _bad_corpus(tmp_path / "in")
    assert _run(tmp_path / "out", [tmp_path / "in"], tiny_tokenizer, "--max-bad", "0.01") == 0
    out, err = capsys.readouterr()
    for place in (
        "a.jsonl:1001: broken JSON",
        "a.jsonl:1002: invalid UTF-8",
        "a.jsonl:1003: empty text",
        "a.jsonl:1004: no text: no field 'text' but body",
        "a.jsonl:1005: no text: 'text' is int",
        "b.jsonl.zst:1: unreadable: the file breaks off",
        "c.txt:1: invalid UTF-8",
    ):
        assert f"bad: {tmp_path}/in/{place}" in err
    documents = read_manifest(tmp_path / "out").totals.documents
    assert documents == 1000 and f"bad records: 7 of {documents + 7:,}" in out
    assert "2 invalid UTF-8" in out and "2 no text" in out
    assert verify.main([str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("bad", [b'{"text": "bro\n', b'{"text": "\xff"}\n', b'{"text": ""}\n', b'{"text": null}\n'])
def test_more_bad_input_than_allowed_ends_the_run(tiny_tokenizer, tmp_path, capsys, bad):
    """0.1 % unless told otherwise: 1 of 1,000 passes, 2 of 1,001 do not; the same command with a higher limit goes on."""
    for name, lines in (("one", bad), ("two", bad * 2)):
        (tmp_path / f"{name}.jsonl").write_bytes(_lines([f"good line {n}" for n in range(999)]) + lines)
    assert _run(tmp_path / "one", [tmp_path / "one.jsonl"], tiny_tokenizer) == 0
    assert _run(tmp_path / "two", [tmp_path / "two.jsonl"], tiny_tokenizer) == 1
    assert "error: 2 of 1001 records are bad (2 " in capsys.readouterr().err
    assert not (tmp_path / "two" / "manifest.json").exists()
    assert _run(tmp_path / "two", [tmp_path / "two.jsonl"], tiny_tokenizer, "--max-bad", "0.01") == 0
    assert _stream(tmp_path / "two") == _stream(tmp_path / "one")


def test_a_hopeless_input_ends_the_run_early(tiny_tokenizer, tmp_path, monkeypatch, small_batches):
    monkeypatch.setattr(prepare, "EARLY", 1000)
    (tmp_path / "a.jsonl").write_bytes(b"no json\n" * 3000)
    parsed = []
    parse = prepare.encode_in_order
    monkeypatch.setattr(prepare, "encode_in_order", lambda *a: (parsed.append(e) or e for e in parse(*a)))
    assert _run(tmp_path / "out", [tmp_path / "a.jsonl"], tiny_tokenizer, "--max-bad", "0.02") == 1
    assert len(parsed) == 100  # batches of 10


@pytest.mark.parametrize("first", [True, False])
def test_bad_records_count_the_same_wherever_they_stand(first, tiny_tokenizer, tmp_path, monkeypatch, small_batches):
    """15 of 1,015 are more than 1 % of the first hundred, and allowed at 2 %."""
    monkeypatch.setattr(prepare, "EARLY", 100)
    good, bad = _lines(["good"] * 1000), b"no json\n" * 15
    (tmp_path / "a.jsonl").write_bytes(bad + good if first else good + bad)
    assert _run(tmp_path / "out", [tmp_path / "a.jsonl"], tiny_tokenizer, "--max-bad", "0.02") == 0


def test_lossless_refuses_a_tokenizer_that_rewrites_text(documents, corpus, tiny_tokenizer, tmp_path, capsys):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(documents), model_writer=model, vocab_size=400, model_type="bpe", byte_fallback=True, minloglevel=2
    )
    (tmp_path / "default.model").write_bytes(model.getvalue())
    assert _run(tmp_path / "a", [corpus], tmp_path / "default.model", "--lossless") == 2
    assert "default.model rewrites text" in capsys.readouterr().err
    (tmp_path / "b.jsonl").write_bytes(_lines(["good", "lower \u2581 block"]))  # the mark sentencepiece spells spaces with
    assert _run(tmp_path / "b", [tmp_path / "b.jsonl"], tiny_tokenizer, "--lossless", "--max-bad", "0.5") == 0
    assert "b.jsonl:2: not lossless" in capsys.readouterr().err


def test_options_that_make_no_sense_are_named(corpus, tiny_tokenizer, tmp_path, capsys):
    for inputs, more, message in (
        ([], [], "name either INPUT files"),
        ([corpus], ["--dataset", "x"], "name either INPUT files"),
        ([corpus], ["--workers", "0"], "--workers 0"),
        ([corpus], ["--shard-tokens", "0"], "--shard-tokens 0"),
        ([corpus], ["--val-fraction", "1"], "--val-fraction 1.0"),
        ([corpus], ["--max-bad", "-1"], "--max-bad -1.0"),
        ([tmp_path / "gone"], [], "gone does not exist: name a file that ends in .jsonl"),
    ):
        assert _run(tmp_path / "out", inputs, tiny_tokenizer, *more) == 2
        assert message in capsys.readouterr().err
    assert _run(tmp_path / "out2", [corpus], tmp_path / "gone.model") == 2
    err = capsys.readouterr().err
    assert (
        err.startswith(f"error: cannot read the tokenizer {tmp_path / 'gone.model'}: No such file")
        and "python -m data_prep.tokenizer" in err
    )
    assert err.count("\n") == 1 and not (tmp_path / "out2").exists()


@pytest.mark.parametrize(
    ("files", "fraction", "said"),
    [
        (8, "1e-9", "no document went to the val split (8 documents, 0 bad records, --val-fraction 1e-09); a .txt file is one document"),
        (8, "1e-9", "more documents or a larger --val-fraction"),
        (8, "0.999999999", "no document went to the train split (8 documents"),
        (8, "0.999999999", "more documents or a smaller --val-fraction"),
        (1, "0.5", 'split needs at least two documents; a .txt file is one document, a .jsonl file has one {"text": ...} a line'),
        (1, "0.5", "more documents, or no --val-fraction"),
        (0, "0.5", "the inputs hold no document (0 documents, 0 bad records); remove"),
    ],
)
def test_a_split_that_gets_no_document_says_what_would_help(tiny_tokenizer, tmp_path, capsys, files, fraction, said):
    (tmp_path / "in").mkdir()
    for n in range(files):
        (tmp_path / "in" / f"{n}.txt").write_text(f"document {n}")
    (tmp_path / "in" / "empty.jsonl").write_bytes(b"")
    assert _run(tmp_path / "out", [tmp_path / "in"], tiny_tokenizer, "--val-fraction", fraction) == 1
    assert said in capsys.readouterr().err
    assert verify.main([str(tmp_path / "out")]) == 1
    assert "its error says what to change" in capsys.readouterr().err
    assert _run(tmp_path / "out", [tmp_path / "in"], tiny_tokenizer, "--val-fraction", fraction) == 1
    assert said in capsys.readouterr().err, "the same command says it again"


def test_a_wrong_text_field_can_be_put_right(tiny_tokenizer, tmp_path, capsys):
    pq.write_table(pa.table({"content": ["good text"] * 4}), tmp_path / "a.parquet")
    assert _run(tmp_path / "out", [tmp_path / "a.parquet"], tiny_tokenizer) == 1
    assert "name one with --text-field" in capsys.readouterr().err
    assert _run(tmp_path / "out", [tmp_path / "a.parquet"], tiny_tokenizer, "--text-field", "content") == 0


def test_a_wrong_text_field_can_be_put_right_while_every_record_was_bad(tiny_tokenizer, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(b'{"content": "good text"}\n' * 4)
    for _ in range(2):  # the same command judges the same records, once
        assert _run(tmp_path / "out", [tmp_path / "a.jsonl"], tiny_tokenizer) == 1
        assert "4 of 4 records are bad (4 no text)" in capsys.readouterr().err
    assert _run(tmp_path / "out", [tmp_path / "a.jsonl"], tiny_tokenizer, "--text-field", "content") == 0
    assert "4 documents" in (said := capsys.readouterr().out) and "bad records: 0 of 4" in said


@pytest.mark.parametrize("byte", [b"\0", b"\xff"])
def test_a_damaged_journal_is_named(byte, corpus, tiny_tokenizer, tmp_path, capsys):
    assert _run(tmp_path / "out", [corpus], tiny_tokenizer) == 0
    journal = tmp_path / "out" / prepare.JOURNAL
    journal.write_bytes(byte + journal.read_bytes()[1:])
    assert _run(tmp_path / "out", [corpus], tiny_tokenizer) == 1
    error = capsys.readouterr().err
    assert f"error: {journal} is damaged (" in error and f"remove {tmp_path / 'out'} and prepare the data again" in error


@pytest.mark.parametrize(
    "line", ["null", "{}", "[]", '{"place": 3, "faults": [], "writers": {}}', '{"place": [0, 0], "faults": [], "writers": {"train": []}}']
)
@pytest.mark.parametrize("at", [0, 1, -1])
def test_a_journal_of_other_things_is_named(line, at, corpus, tiny_tokenizer, tmp_path, capsys):
    assert _run(tmp_path / "out", [corpus], tiny_tokenizer) == 0
    journal = tmp_path / "out" / prepare.JOURNAL
    lines = journal.read_text().splitlines()
    lines[at] = line
    journal.write_text("\n".join(lines) + "\n")
    assert _run(tmp_path / "out", [corpus], tiny_tokenizer) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and ("is damaged (" in error or "was begun with tokenizer (sha256) None" in error)


@pytest.mark.parametrize("size, said", [(10, "now it is a.jsonl of 10 bytes"), (None, "cannot read")])
def test_an_input_that_changes_while_it_is_read_is_no_silent_loss(size, said, tiny_tokenizer, tmp_path, monkeypatch, capsys):
    (path := tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 20)
    read = prepare.batches

    def change(*given):
        yield from read(*given)
        path.unlink() if size is None else os.truncate(path, size)

    monkeypatch.setattr(prepare, "batches", change)
    assert _run(tmp_path / "out", [path], tiny_tokenizer) == 1
    assert said in capsys.readouterr().err and not (tmp_path / "out" / "manifest.json").exists()


def test_a_name_that_is_no_utf_8_is_gone_on_from(tiny_tokenizer, tmp_path):
    (folder := tmp_path / "in").mkdir()
    (folder / os.fsdecode(b"caf\xe9.jsonl")).write_text('{"text": "a"}\n{"text": "b"}\n')
    for _ in range(2):
        assert _run(tmp_path / "out", [folder], tiny_tokenizer) == 0


@pytest.mark.parametrize("output", ["file", "file/below"])
def test_an_output_that_cannot_be_written_is_named(output, corpus, tiny_tokenizer, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert _run(tmp_path / output, [corpus], tiny_tokenizer) == 1
    error = capsys.readouterr().err
    assert f"error: cannot write to {tmp_path / output}: " in error and "Traceback" not in error
