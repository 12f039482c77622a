"""Raw text in: files (.jsonl, .jsonl.zst, .jsonl.gz, .parquet, .txt), folders of them, or a Hugging Face dataset, as one ordered stream
of records.

A record is undecoded (a JSON line, a text's bytes), so that the one process that reads does little: 200 to 300 MB of text a second, which
feeds dozens of encoders. `parse` turns a record into a text, where the encoders run. A place in the stream is (input, records consumed),
and reading can start at any. Memory is one batch of records: 1 MiB, or one record where that is longer, up to MAX_RECORD.

A file that breaks off or is damaged inside counts as one bad record and ends there; a file that cannot be opened stops the run. Blank
lines are no records. A byte order mark at the start is no text.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

import zstandard

SUFFIXES = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".parquet", ".txt")
BATCH_BYTES = 1 << 20
BATCH_RECORDS = 4096
MAX_RECORD = 1 << 28  # bytes of one line; a longer one is no document but a broken file


class InputError(ValueError):
    """The inputs cannot be used; the message names the input, the fault and the way out."""


class BadRecord(ValueError):
    """One record is no usable document. `kind` is what the summary counts, `detail` the particulars."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


class Record(NamedTuple):
    number: int  # line, row or example of its input, from 1
    form: str  # "json": a line to parse | "text": the text itself | "bad": the reading failed here
    data: bytes  # of "bad": what went wrong


class Place(NamedTuple):
    """How far a stream has been consumed: inputs before `input` wholly, of that one `records` records."""

    input: int
    records: int


class Batch(NamedTuple):
    records: list[tuple[int, Record]]  # (input, record)
    end: Place


NOT_COMPRESSED = "an empty file is no compressed one, not even of nothing"


@dataclass(frozen=True)
class FileInput:
    """One file. `name` is relative to the argument it came from: moving a corpus does not make it another."""

    path: Path
    name: str
    text_field: str

    @property
    def identity(self) -> list:
        """What tells whether a later run reads the same input. Raises InputError."""
        try:
            return [self.name, self.path.stat().st_size]
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error.strerror}") from error

    def __str__(self) -> str:
        return str(self.path)

    def read(self, skip: int) -> Iterator[Record]:
        """The records after the first `skip`."""
        number = 0
        try:
            for record in self._records():
                number = record.number
                if number > skip:
                    yield record
        except (EOFError, OSError, zlib.error, zstandard.ZstdError, _Damage) as error:
            if getattr(error, "errno", None):  # the disk or the network failed, not the file
                raise InputError(f"cannot read {self.path}: {error}") from error
            if number + 1 > skip:
                yield Record(number + 1, "bad", f"the file breaks off or is damaged here: {error}".encode())

    def _records(self) -> Iterator[Record]:
        if self.path.name.endswith(".gz") and not self.path.stat().st_size:  # Python's own reader takes it for a whole one
            raise EOFError(NOT_COMPRESSED)
        if self.path.name.endswith(".parquet"):
            return _parquet(self.path, self.text_field)
        if self.path.name.endswith(".txt"):
            return _whole(self.path)
        return _lines(self.path)


class _Damage(Exception):
    """A parquet file that breaks off or is damaged inside."""


@dataclass(frozen=True)
class DatasetInput:
    """A Hugging Face dataset: a name on the hub or a local folder, streamed or downloaded first."""

    name: str
    config: str | None
    split: str
    streaming: bool
    text_field: str

    @property
    def identity(self) -> list:
        return [self.name, self.config, self.split]

    def __str__(self) -> str:
        return f"{self.name}[{self.split}]"

    def read(self, skip: int) -> Iterator[Record]:
        """The examples after the first `skip`. Raises InputError for whatever the datasets library raises."""
        import datasets  # two seconds, and only this input needs it

        try:
            examples = datasets.load_dataset(self.name, self.config, split=self.split, streaming=self.streaming)
            for number, example in enumerate(examples.skip(skip), skip + 1):
                yield self._record(number, example)
        except InputError:
            raise
        except Exception as error:  # the library raises anything, from network to file format
            raise InputError(f"dataset {self}: {type(error).__name__}: {error}") from error

    def _record(self, number: int, example: dict) -> Record:
        if self.text_field not in example:
            raise InputError(f"dataset {self} has no field '{self.text_field}' but {', '.join(example)}; name one with --text-field")
        text = example[self.text_field]
        if not isinstance(text, str):
            return Record(number, "bad", f"'{self.text_field}' is {type(text).__name__}, not text".encode())
        return Record(number, "text", text.encode("utf-8", "surrogatepass"))


def find_inputs(arguments: list[str], text_field: str) -> list[FileInput]:
    """The files that arguments name, in order; of a folder, every file with a known suffix at any depth, by its path.

    Raises InputError for a missing path, an unknown suffix, a folder without inputs, and a file named twice.
    """
    found = []
    for argument in map(Path, arguments):
        if argument.is_dir():
            found += _folder(argument, text_field)
        elif not argument.exists():
            raise InputError(f"{argument} does not exist: name a file that ends in {', '.join(SUFFIXES)}, or a folder of them")
        elif not argument.name.endswith(SUFFIXES):
            raise InputError(f"{argument} is of no known kind; inputs end in {', '.join(SUFFIXES)}")
        else:
            found.append(FileInput(argument, argument.name, text_field))
    seen: set[Path] = set()
    for item in found:
        if item.path.resolve() in seen:
            raise InputError(f"{item.path} is named twice")
        seen.add(item.path.resolve())
    return found


def _folder(folder: Path, text_field: str) -> list[FileInput]:
    """Hidden files and folders are left out: download caches live there. Links to folders are too, which may lead back, and named."""
    names = []
    for at, folders, files in os.walk(folder, onerror=_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for link in sorted(path for name in folders if (path := Path(at, name)).is_symlink()):
            print(f"notice: {link} is a link to a folder and is left out; name it as an INPUT to have it read", file=sys.stderr)
        visible = [Path(at, name) for name in files if name.endswith(SUFFIXES) and not name.startswith(".")]
        names += [path.relative_to(folder) for path in visible if path.is_file()]
    if not names:
        raise InputError(f"the folder {folder} holds no file that ends in {', '.join(SUFFIXES)}")
    return [FileInput(folder / name, name.as_posix(), text_field) for name in sorted(names, key=lambda name: name.as_posix())]


def _unreadable(error: OSError) -> NoReturn:
    raise InputError(f"cannot read the folder {error.filename}: {error.strerror}; mend its rights, or move it away") from error


def batches(inputs: list[FileInput] | list[DatasetInput], start: Place) -> Iterator[Batch]:
    """The records from a place on, in batches; the last batch (it may be empty) ends past the last input."""
    records, size = [], 0
    for index in range(start.input, len(inputs)):
        for record in inputs[index].read(start.records if index == start.input else 0):
            records.append((index, record))
            size += len(record.data)
            if size >= BATCH_BYTES or len(records) >= BATCH_RECORDS:
                yield Batch(records, Place(index, record.number))
                records, size = [], 0
    yield Batch(records, Place(len(inputs), 0))


def parse(record: Record, text_field: str) -> str:
    """The text of a record. Raises BadRecord where there is none."""
    if record.form == "bad":
        raise BadRecord("unreadable", record.data.decode())
    try:
        content = record.data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadRecord("invalid UTF-8", f"byte {error.start}: {error.reason}") from None
    text = content if record.form == "text" else _field(content, text_field)
    if not text:
        raise BadRecord("empty text")
    return text


def _field(line: str, text_field: str) -> str:
    try:
        tree = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRecord("broken JSON", str(error)) from None
    if not isinstance(tree, dict):
        raise BadRecord("broken JSON", f"the line is a {type(tree).__name__}, not an object")
    if text_field not in tree:
        raise BadRecord("no text", f"no field '{text_field}' but {', '.join(tree) or 'none'}; name one with --text-field")
    text: Any = tree[text_field]
    if not isinstance(text, str):
        raise BadRecord("no text", f"'{text_field}' is {type(text).__name__}, not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRecord("invalid UTF-8", f"character {error.start} is half of a surrogate pair") from None
    return text


def _lines(path: Path) -> Iterator[Record]:
    with _open(path) as file:
        number = 0
        while line := file.readline(MAX_RECORD):
            number += 1
            if len(line) == MAX_RECORD and not line.endswith(b"\n"):
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_RECORD)
                yield Record(number, "bad", f"the line is longer than {MAX_RECORD} bytes".encode())
            elif not line.isspace():
                yield Record(number, "json", line)


def _open(path: Path) -> IO[bytes]:
    try:
        if path.name.endswith(".zst"):
            return io.BufferedReader(_Zstd(open(path, "rb")), buffer_size=1 << 20)  # noqa: SIM115 - closed with the reader
        return gzip.open(path, "rb") if path.name.endswith(".gz") else open(path, "rb")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


class _Zstd(io.RawIOBase):
    """Decompressed zstandard frames. A frame that breaks off is an EOFError: the library's own reader ends in silence there."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._frame, self._ready = file, None, memoryview(b"")
        # 2 GiB, the largest window there is, admits files made with `zstd --long=31`
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._fill():
                return 0
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()

    def _fill(self) -> bool:
        """Decompress the next 16 KiB (a little at once: they may hold 10,000 times as much); False at the end of the file."""
        data = self._frame.unused_data if self._frame and self._frame.eof else b""
        if not data:
            data = self._file.read(1 << 14)
        if not data:
            if self._frame is None:
                raise EOFError(NOT_COMPRESSED)
            if not self._frame.eof:
                raise EOFError("the zstandard frame is not complete")
            return False
        if self._frame is None or self._frame.eof:
            self._frame = self._decompressor.decompressobj()
        self._ready = memoryview(self._frame.decompress(data))
        return True


def _whole(path: Path) -> Iterator[Record]:
    with _open(path) as file:
        data = file.read(MAX_RECORD + 1)
    if len(data) > MAX_RECORD:
        yield Record(1, "bad", f"the document is longer than {MAX_RECORD} bytes".encode())
    else:
        yield Record(1, "text", data)


def _parquet(path: Path, text_field: str) -> Iterator[Record]:
    import pyarrow as pa  # only this kind needs it
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            if text_field not in file.schema_arrow.names:
                columns = ", ".join(file.schema_arrow.names)
                raise InputError(f"{path} has no column '{text_field}' but {columns}; name one with --text-field")
            for rows in file.iter_batches(batch_size=1024, columns=[text_field]):
                for data in _as_bytes(rows.column(0), path):
                    number += 1
                    yield Record(number, "bad", b"the row is null") if data is None else Record(number, "text", data)
    except pa.ArrowException as error:
        raise _Damage(error) from error


def _as_bytes(column: Any, path: Path) -> Iterator[bytes | None]:
    """The values of an arrow column undecoded: the encoders check the UTF-8, as of every other input."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.type not in (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()):
        raise InputError(f"the text column of {path} is {column.type}, not text; name another with --text-field")
    for value in column.cast(pa.large_binary()):
        yield value.as_py()
