"""Reading raw text. Judges: the texts written, the library that wrote the file, the same file read whole."""

import gzip
import io
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from data_prep import inputs as reading
from data_prep.inputs import BadRecord, DatasetInput, FileInput, InputError, Place, Record, batches, find_inputs, parse

TEXTS = ["one", "two\nlines\n", "tab\tand  spaces ", "ﬁ ½ é 漢 🙂", "x" * 5000, "nul\x00 inside", "\u2028 separator"]


def _json_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text, "meta": {"redpajama_set_name": "C4"}}, ensure_ascii=False) + "\n" for text in texts).encode()


def _write(path: Path, texts: list[str]) -> Path:
    data = _json_lines(texts)
    if path.name.endswith(".zst"):
        data = zstandard.ZstdCompressor().compress(data)
    elif path.name.endswith(".gz"):
        data = gzip.compress(data)
    elif path.name.endswith(".parquet"):
        out = io.BytesIO()
        pq.write_table(pa.table({"id": list(range(len(texts))), "text": texts}), out, row_group_size=3)
        data = out.getvalue()
    path.write_bytes(data)
    return path


def _input(path: Path) -> FileInput:
    return FileInput(path, path.name, "text")


def _texts(item) -> list[str]:
    return [parse(record, "text") for record in item.read(0)]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst", ".jsonl.gz", ".parquet"])
def test_every_form_gives_the_texts(tmp_path, suffix):
    item = _input(_write(tmp_path / f"a{suffix}", TEXTS))
    assert _texts(item) == TEXTS
    assert [record.number for record in item.read(0)] == list(range(1, len(TEXTS) + 1))


def test_a_txt_file_is_one_document_as_it_stands(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfline\r\n\n  end\n")
    assert _texts(_input(tmp_path / "a.txt")) == ["line\r\n\n  end\n"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_columns_of_text(tmp_path, kind):
    texts = [text.encode() for text in TEXTS] if kind == pa.binary() else TEXTS
    pq.write_table(pa.table({"text": pa.array(texts, kind)}), tmp_path / "a.parquet")
    assert _texts(_input(tmp_path / "a.parquet")) == TEXTS


def test_zst_of_several_frames_and_of_a_long_window(tmp_path):
    frames = [zstandard.ZstdCompressor().compress(_json_lines([text])) for text in TEXTS]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    assert _texts(_input(tmp_path / "a.jsonl.zst")) == TEXTS
    settings = zstandard.ZstdCompressionParameters.from_level(3, window_log=30, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    (tmp_path / "b.jsonl.zst").write_bytes(compressor.compress(_json_lines(TEXTS)) + compressor.flush())
    assert _texts(_input(tmp_path / "b.jsonl.zst")) == TEXTS


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset_gives_the_texts_from_any_place(tmp_path, monkeypatch, streaming):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "corpus").mkdir()
    _write(tmp_path / "corpus" / "train.jsonl", TEXTS)
    item = DatasetInput(str(tmp_path / "corpus"), None, "train", streaming, "text")
    assert _texts(item) == TEXTS
    assert [tuple(record) for record in item.read(3)] == [tuple(record) for record in item.read(0)][3:]


def test_a_dataset_that_cannot_be_used_is_an_input_error(tmp_path):
    (tmp_path / "corpus").mkdir()
    _write(tmp_path / "corpus" / "train.jsonl", TEXTS)
    with pytest.raises(InputError, match="has no field 'body' but text, meta"):
        list(DatasetInput(str(tmp_path / "corpus"), None, "train", True, "body").read(0))
    with pytest.raises(InputError, match=r"\[nosplit\]: "):
        list(DatasetInput(str(tmp_path / "corpus"), None, "nosplit", True, "text").read(0))


@pytest.mark.parametrize("suffix", [".jsonl.zst", ".jsonl.gz"])
def test_a_file_cut_anywhere_is_noticed(tmp_path, suffix):
    """Whole lines before the cut come through; then one bad record says where. Never a silent end."""
    texts = [f"{n} {'lorem ipsum ' * (n % 7)}" for n in range(200)]
    whole = _write(tmp_path / f"whole{suffix}", texts).read_bytes()
    for size in [*range(1, 40, 3), *range(40, len(whole), 97), len(whole) - 1]:
        path = tmp_path / f"cut{suffix}"
        path.write_bytes(whole[:size])
        *good, last = _input(path).read(0)
        assert last.form == "bad" and last.number == len(good) + 1 and b"breaks off" in last.data
        assert [parse(record, "text") for record in good] == texts[: len(good)]


def test_damage_inside_a_file_ends_it_there(tmp_path):
    data = bytearray(zstandard.ZstdCompressor().compress(_json_lines([str(n) * 50 for n in range(3000)])))
    data[len(data) // 2 : len(data) // 2 + 50] = bytes(50)
    (tmp_path / "a.jsonl.zst").write_bytes(data)
    *_, last = _input(tmp_path / "a.jsonl.zst").read(0)
    assert last.form == "bad"
    whole = _write(tmp_path / "b.parquet", TEXTS).read_bytes()
    (tmp_path / "b.parquet").write_bytes(whole[: len(whole) // 2])
    (only,) = _input(tmp_path / "b.parquet").read(0)
    assert only.form == "bad" and only.number == 1


def test_blank_lines_are_no_records_and_keep_the_numbers(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n\n  \r\n{"text": "b"}')
    assert [(record.number, parse(record, "text")) for record in _input(tmp_path / "a.jsonl").read(0)] == [(1, "a"), (4, "b")]


def test_a_line_without_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MAX_RECORD", 100)
    (tmp_path / "a.jsonl").write_bytes(_json_lines(["a"]) + b"x" * 950 + b"\n" + _json_lines(["b"]))
    first, second, third = _input(tmp_path / "a.jsonl").read(0)
    assert (second.number, second.form, third.number) == (2, "bad", 3) and b"longer than 100 bytes" in second.data
    assert [parse(first, "text"), parse(third, "text")] == ["a", "b"]
    (tmp_path / "b.txt").write_bytes(b"x" * 101)
    assert [record.form for record in _input(tmp_path / "b.txt").read(0)] == ["bad"]


def test_reading_on_from_any_record(tmp_path):
    whole = _write(tmp_path / "whole.jsonl.zst", TEXTS).read_bytes()
    (tmp_path / "cut.jsonl.zst").write_bytes(whole[:-3])
    for name in ("whole.jsonl.zst", "cut.jsonl.zst"):
        item = _input(tmp_path / name)
        everything = list(item.read(0))
        for skip in range(len(everything) + 1):
            assert list(item.read(skip)) == everything[skip:]


def test_batches_go_on_from_any_of_their_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BATCH_RECORDS", 3)
    items = [_input(_write(tmp_path / f"{n}.jsonl", TEXTS[: n + 2])) for n in range(4)]
    everything = list(batches(items, Place(0, 0)))
    assert [len(batch.records) for batch in everything] == [3, 3, 3, 3, 2] and everything[-1].end == Place(4, 0)
    for done, batch in enumerate(everything):
        later = [record for b in everything[done + 1 :] for record in b.records]
        assert [record for b in batches(items, batch.end) for record in b.records] == later


@pytest.mark.parametrize(
    ("line", "kind", "detail"),
    [
        (b'{"text": "a"', "broken JSON", "Expecting"),
        (b"[1]", "broken JSON", "list, not an object"),
        (b"[" * 100_000, "broken JSON", ""),
        (b'{"text": ' + b"1" * 5000 + b"}", "broken JSON", ""),
        (b'{"body": "a", "id": 1}', "no text", "no field 'text' but body, id"),
        (b'{"text": 5}', "no text", "'text' is int, not text"),
        (b'{"text": null}', "no text", "NoneType"),
        (b'{"text": "a\xff"}', "invalid UTF-8", "byte 11"),
        (b'{"text": "\\ud83d"}', "invalid UTF-8", "character 0"),
        (b'{"text": ""}', "empty text", ""),
    ],
)
def test_bad_lines_say_what_is_wrong(line, kind, detail):
    with pytest.raises(BadRecord) as bad:
        parse(Record(1, "json", line), "text")
    assert bad.value.kind == kind and detail in bad.value.detail


def test_null_rows_and_bad_bytes_of_parquet_are_bad_records(tmp_path):
    pq.write_table(pa.table({"text": pa.array([b"a", None, b"\xff"], pa.binary())}), tmp_path / "a.parquet")
    first, second, third = _input(tmp_path / "a.parquet").read(0)
    assert parse(first, "text") == "a" and second.form == "bad"
    with pytest.raises(BadRecord, match="invalid UTF-8"):
        parse(third, "text")


def test_folders_give_their_files_by_path(tmp_path):
    for name in ("b/2.jsonl", "b/1.jsonl.zst", "a.txt", "c.parquet", ".cache/x.jsonl", "b/.hidden.txt", "README.md"):
        (tmp_path / "corpus" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "corpus" / name).write_bytes(b"")
    found = find_inputs([str(tmp_path / "corpus")], "text")
    assert [item.name for item in found] == ["a.txt", "b/1.jsonl.zst", "b/2.jsonl", "c.parquet"]
    found = find_inputs([str(tmp_path / "corpus" / name) for name in ("c.parquet", "a.txt")], "text")
    assert [item.name for item in found] == ["c.parquet", "a.txt"]


def test_inputs_that_cannot_be_used_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.md").write_text("")
    (tmp_path / "a.txt").write_text("a")
    for arguments, message in (
        (["gone.jsonl"], "gone.jsonl does not exist"),
        (["notes.md"], "notes.md is of no known kind; inputs end in .jsonl"),
        (["empty"], "the folder .*empty holds no file"),
        (["a.txt", "."], "a.txt is named twice"),
    ):
        with pytest.raises(InputError, match=message):
            find_inputs([str(tmp_path / argument) for argument in arguments], "text")
    _write(tmp_path / "a.parquet", TEXTS)
    with pytest.raises(InputError, match="has no column 'body' but id, text"):
        list(FileInput(tmp_path / "a.parquet", "a", "body").read(0))
    with pytest.raises(InputError, match="is int64, not text"):
        list(FileInput(tmp_path / "a.parquet", "a", "id").read(0))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.jsonl"])
def test_an_empty_file_is_a_compressed_one_that_broke_off(name, tmp_path):
    (tmp_path / name).touch()
    records = list(FileInput(tmp_path / name, name, "text").read(0))
    assert [record.form for record in records] == ([] if name == "a.jsonl" else ["bad"])


def test_a_folder_inside_that_cannot_be_read_is_no_silent_loss(tmp_path, monkeypatch):
    (tmp_path / "a.txt").touch()
    (tmp_path / "inside").mkdir()
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("inside"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(InputError, match=f"cannot read the folder {tmp_path / 'inside'}: Permission denied"):
        find_inputs([str(tmp_path)], "text")


def test_a_link_to_a_folder_is_named(tmp_path, capsys):
    for name in ("in", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").touch()
    (tmp_path / "in" / "link").symlink_to(tmp_path / "other")
    assert [item.name for item in find_inputs([str(tmp_path / "in")], "text")] == ["a.txt"]
    assert capsys.readouterr().err.startswith(f"notice: {tmp_path / 'in' / 'link'} is a link to a folder and is left out; name it")
    assert len(find_inputs([str(tmp_path / "in"), str(tmp_path / "in" / "link")], "text")) == 2
