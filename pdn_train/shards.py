"""The shard format: a folder with `manifest.json` and `*.bin` files, written whole and read by position.

    manifest.json   version, dtype, tokenizer.{file, sha256, vocab_size, bos_id, eos_id}, totals.{tokens, documents, bytes},
                    shards: [{file, tokens, documents, bytes, sha256}]
    000000.bin ...  the token ids, little-endian uint16 or uint32, no header

Each document is its ids, then eos; no bos; a document never spans two shards. `tokens` counts the eos. `bytes` is the UTF-8 length of the
source text, so that loss x tokens / bytes gives bits per byte; a file's size is tokens x itemsize. The shards joined in manifest order
are one stream of tokens, addressed by 64-bit positions.

Writing: a shard grows as `NAME.bin.partial` and is renamed when it is whole and on disk. `commit` and `resume` let a killed writer go on
from its last commit with the same bytes.

Reading: `os.pread` on a few open files, through the page cache. That costs what a memory map costs (one copy of a sample, 4 KB), but a
file cut short under a running job ends too early, and so is an error that names it; a map would kill the process with SIGBUS and no
message. Opening checks every file's size (one stat each), `faults` its contents.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pdn_train.files import sync, write_whole

VERSION = 1
MANIFEST = "manifest.json"
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
OPEN_FILES = 128  # kept open at once by a reader; common limits are 1024 a process
READ_SIZE = 1 << 24  # bytes, or tokens, read at once
EMPTY = {"tokens": 0, "documents": 0, "bytes": 0}


class ShardError(ValueError):
    """The shards cannot be used or written; the message names the file, the values and the way out."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


FileName = Annotated[str, Field(pattern=r"^[^/\x00]+$")]  # beside the manifest


class TokenizerInfo(_Part):
    """What the shards record of their tokenizer. `file` lies beside the manifest."""

    file: FileName
    sha256: str
    vocab_size: int = Field(ge=1, le=2**32)
    bos_id: int | None
    eos_id: int = Field(ge=0)


class Totals(_Part):
    tokens: int = Field(ge=0)
    documents: int = Field(ge=0)
    bytes: int = Field(ge=0)


class Shard(_Part):
    """One file: its tokens (eos included), documents, bytes of source text, and the sha256 of the file."""

    file: FileName
    tokens: int = Field(ge=0)
    documents: int = Field(ge=0)
    bytes: int = Field(ge=0)
    sha256: str


class Manifest(_Part):
    version: int
    dtype: str
    tokenizer: TokenizerInfo
    totals: Totals
    shards: list[Shard]

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize


def dtype_for(vocab_size: int) -> str:
    """The narrowest dtype that holds the ids 0 .. vocab_size - 1."""
    if vocab_size > 2**32:
        raise ShardError(f"a vocabulary of {vocab_size} pieces does not fit 32-bit ids")
    return "uint16" if vocab_size <= 2**16 else "uint32"


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of a folder. Raises ShardError where it is missing, not JSON, of another version, or lacks a key."""
    path = Path(folder) / MANIFEST
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise ShardError(f"{folder} {_why_no_manifest(Path(folder))}") from None
    except OSError as error:
        raise ShardError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ShardError(f"{path} is not JSON ({error}); copy or prepare the data again") from None
    try:
        tree = json.loads(text)
        if isinstance(tree, dict) and tree.get("version", VERSION) != VERSION:
            raise ShardError(f"{path} has version {tree['version']!r}, this program reads version {VERSION}; prepare the data again")
        manifest = Manifest.model_validate(tree)
    except ValidationError as error:
        raise ShardError(f"{path}: {_first_fault(error)}; copy or prepare the data again") from None
    except json.JSONDecodeError as error:
        raise ShardError(f"{path} is not JSON ({error}); copy or prepare the data again") from None
    if manifest.dtype not in DTYPES:
        raise ShardError(f"{path}: dtype {manifest.dtype!r} is none of {', '.join(DTYPES)}")
    return manifest


def _first_fault(error: ValidationError) -> str:
    fault = error.errors()[0]
    where, found = ".".join(map(str, fault["loc"])), "" if fault["type"] == "missing" else f" (found {fault['input']!r})"
    return f"{where}: {fault['msg']}{found}" if where else f"it holds no object but {fault['input']!r}"


def _why_no_manifest(folder: Path) -> str:
    if not folder.is_dir():
        return "is not a folder: name one made by `python -m data_prep.prepare`"
    if not any(folder.iterdir()):
        return f"is empty (no {MANIFEST}): fill it with `python -m data_prep.prepare INPUT... --tokenizer FILE --output {folder}`"
    if any(folder.glob("*.bin*")):
        return (
            f"has shards but no {MANIFEST}: its preparation did not finish; give the same `python -m data_prep.prepare` command again: "
            "it goes on, or its error says what to change"
        )
    return f"has no {MANIFEST}: name a folder made by `python -m data_prep.prepare`"


def write_manifest(folder: str | Path, manifest: Manifest) -> None:
    """Put `manifest.json` into the folder, whole."""
    write_whole(Path(folder) / MANIFEST, (json.dumps(manifest.model_dump(), indent=2) + "\n").encode())


class ShardWriter:
    """Cuts a stream of documents into shards of at most `shard_tokens` tokens (more only for one longer document).

    Where the cuts lie depends on the stream alone. `add` appends a document; `finish` ends the last shard and returns the manifest. To
    survive a kill, the caller keeps what `commit` returns on disk, then calls `publish`; a writer given the kept commits (`ended`: their
    lists joined, `open_shard`: the last one's) goes on from there: what was written later is cut off, a rename that was lost is done.
    Costs about 15 microseconds a document beside the disk; memory is one document.
    """

    def __init__(
        self, folder: str | Path, tokenizer: TokenizerInfo, shard_tokens: int, ended: Iterable[dict] = (), open_shard: dict | None = None
    ) -> None:
        if shard_tokens < 1:
            raise ShardError(f"shard_tokens={shard_tokens}: a shard holds at least 1 token")
        self.folder, self.tokenizer, self.shard_tokens = Path(folder), tokenizer, shard_tokens
        self.dtype = dtype_for(tokenizer.vocab_size)
        self.shards = [Shard.model_validate(shard) for shard in ended]
        self._committed = len(self.shards)  # of those, told to the caller
        self._published = 0  # of those, known to have their own name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.publish()
        for shard in self.shards:
            check_size(self.folder, shard, self.dtype)
        self._start(Totals.model_validate(open_shard or EMPTY))

    @property
    def totals(self) -> Totals:
        parts = [*self.shards, self._open]
        return Totals(**{name: sum(getattr(part, name) for part in parts) for name in Totals.model_fields})

    def add(self, ids: np.ndarray, text_bytes: int) -> None:
        """Append one document: its ids [n], n >= 1, without eos, which is added here; `text_bytes` is the UTF-8 length of its text."""
        self._check(ids)
        length = len(ids) + 1
        if self._tokens and self._tokens + length > self.shard_tokens:
            self.end_shard()
        data = np.append(ids, self.tokenizer.eos_id).astype(DTYPES[self.dtype]).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._tokens += length
        self._documents += 1
        self._bytes += text_bytes

    def end_shard(self) -> None:
        """End the open shard here, if it holds anything; it gets its own name at the next `publish`."""
        if not self._tokens:
            return
        self._sync()
        self._file.close()
        self.shards.append(Shard(file=_name(len(self.shards)), sha256=self._hash.hexdigest(), **self._open.model_dump()))
        self._start(Totals(**EMPTY))

    def commit(self) -> dict:
        """Bring everything to disk; returns {"ended": shards ended since the last commit, "open": the open shard's counts}."""
        self._sync()
        ended = [shard.model_dump() for shard in self.shards[self._committed :]]
        self._committed = len(self.shards)
        return {"ended": ended, "open": self._open.model_dump()}

    def publish(self) -> None:
        """Give the ended shards their own names. Call it when the commit that lists them is on disk."""
        for shard in self.shards[self._published :]:
            partial = self.folder / (shard.file + ".partial")
            if partial.exists():
                os.replace(partial, self.folder / shard.file)
        if self._published < len(self.shards):
            sync(self.folder)
        self._published = len(self.shards)

    def finish(self) -> Manifest:
        """End the last shard, publish everything and return the manifest (`write_manifest` puts it on disk)."""
        self.end_shard()
        self.publish()
        self._file.close()
        (self.folder / (_name(len(self.shards)) + ".partial")).unlink()
        return Manifest(version=VERSION, dtype=self.dtype, tokenizer=self.tokenizer, totals=self.totals, shards=self.shards)

    @property
    def _open(self) -> Totals:
        return Totals(tokens=self._tokens, documents=self._documents, bytes=self._bytes)

    def _check(self, ids: np.ndarray) -> None:
        if len(ids) == 0:
            raise ShardError("an empty document cannot be told from two ends in a row; leave it out")
        limit = min(self.tokenizer.vocab_size, np.iinfo(DTYPES[self.dtype]).max + 1)
        worst = int(ids.max()) if int(ids.min()) >= 0 else int(ids.min())
        if not 0 <= worst < limit:
            raise ShardError(f"token id {worst} does not fit {self.dtype} shards of a vocabulary of {self.tokenizer.vocab_size} pieces")
        if (ids == self.tokenizer.eos_id).any():
            raise ShardError(f"the end id {self.tokenizer.eos_id} stands inside a document; it may only end one")

    def _start(self, kept: Totals) -> None:
        """Open the next shard's partial file, keeping its first `kept.tokens` tokens."""
        path = self.folder / (_name(len(self.shards)) + ".partial")
        size = kept.tokens * DTYPES[self.dtype].itemsize
        found = path.stat().st_size if path.exists() else 0
        if found < size:
            raise ShardError(f"{path} has {found} bytes, {size} were committed; remove {self.folder} and prepare the data again")
        self._tokens, self._documents, self._bytes = kept.tokens, kept.documents, kept.bytes
        self._hash = hashlib.sha256()
        self._file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115 - closed by end_shard or finish
        self._file.truncate(size)
        for block in iter(lambda: self._file.read(READ_SIZE), b""):
            self._hash.update(block)

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


def _name(index: int) -> str:
    return f"{index:06d}.bin"


class Shards:
    """The tokens of a folder as one stream. Build with `Shards.open`; reading is safe from several threads."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._dtype = DTYPES[manifest.dtype]
        self._starts = np.zeros(len(manifest.shards) + 1, dtype=np.int64)  # [shards + 1], in tokens
        np.cumsum([shard.tokens for shard in manifest.shards], out=self._starts[1:])
        self._files: OrderedDict[int, int] = OrderedDict()  # shard -> descriptor, least recently read first
        self._written = [(path / shard.file).stat().st_mtime_ns for shard in manifest.shards]
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: str | Path) -> Shards:
        """Read the manifest and check that every shard is there with its full size. Raises ShardError naming file and both sizes."""
        manifest = read_manifest(path)
        if not manifest.shards:
            raise ShardError(f"{Path(path) / MANIFEST} lists no shards: the folder holds no tokens; prepare it again from more text")
        for shard in manifest.shards:
            check_size(Path(path), shard, manifest.dtype)
        return cls(Path(path), manifest)

    @property
    def tokens(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start .. stop - 1 of the stream, [stop - start] int64. Raises ShardError where a file is gone or short."""
        if not 0 <= start <= stop <= self.tokens:
            raise ShardError(f"tokens {start} .. {stop} are outside the {self.tokens} tokens of {self.path}")
        out = np.empty(stop - start, dtype=np.int64)
        at = start
        while at < stop:
            index, offset = self._find(at)
            count = min(stop - at, int(self._starts[index + 1]) - at, READ_SIZE)
            out[at - start : at - start + count] = self._read_shard(index, offset, count)
            at += count
        return out

    def locate(self, token: int) -> tuple[Path, int]:
        """The file that holds a token of the stream, and the token's index in it."""
        index, offset = self._find(token)
        return self.path / self.manifest.shards[index].file, offset

    def close(self) -> None:
        """Close the files; the next read opens them again."""
        with self._lock:
            while self._files:
                os.close(self._files.popitem()[1])

    def _find(self, token: int) -> tuple[int, int]:
        index = int(np.searchsorted(self._starts, token, side="right")) - 1
        return index, token - int(self._starts[index])

    def _read_shard(self, index: int, offset: int, count: int) -> np.ndarray:
        size, at = count * self._dtype.itemsize, offset * self._dtype.itemsize
        shard = self.manifest.shards[index]
        try:
            with self._lock:
                data = _pread(self._descriptor(index), size, at)
                written = os.fstat(self._descriptor(index)).st_mtime_ns
        except OSError as error:
            raise ShardError(f"cannot read {self.path / shard.file}: {error.strerror}; it was there when the run opened it") from error
        if len(data) < size:
            check_size(self.path, shard, self.manifest.dtype)
            raise ShardError(
                f"{self.path / shard.file} gave {len(data)} bytes at {at}, not {size}: it changed while the run was reading it"
            )
        if written != self._written[index]:
            raise ShardError(f"{self.path / shard.file} was written to since the run opened it; check it with `data_prep.verify`")
        return np.frombuffer(data, dtype=self._dtype)

    def _descriptor(self, index: int) -> int:
        if index not in self._files:
            if len(self._files) >= OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
            self._files[index] = os.open(self.path / self.manifest.shards[index].file, os.O_RDONLY)
        self._files.move_to_end(index)
        return self._files[index]


def _pread(descriptor: int, size: int, at: int) -> bytes:
    """The `size` bytes at `at`, fewer only where the file ends; one pread may give fewer than are there (network file systems do)."""
    data = b""
    while len(data) < size and (more := os.pread(descriptor, size - len(data), at + len(data))):
        data += more
    return data


def check_size(folder: Path, shard: Shard, dtype: str) -> None:
    """Raise ShardError, naming file and both sizes, where a shard is missing or its size is not tokens x itemsize."""
    path, expected = folder / shard.file, shard.tokens * DTYPES[dtype].itemsize
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise ShardError(f"{path} is missing: expected {expected} bytes, found no file; copy or prepare it again") from None
    except OSError as error:
        raise ShardError(f"cannot read {path}: {error.strerror}") from error
    if not os.access(path, os.R_OK):
        raise ShardError(f"cannot read {path}: {os.strerror(errno.EACCES)}; mend its rights")
    if found != expected:
        raise ShardError(
            f"{path} has the wrong size: expected {expected} bytes ({shard.tokens} {dtype} tokens), found {found}; copy or prepare it again"
        )


def tokenizer_fault(folder: str | Path, tokenizer: TokenizerInfo) -> str | None:
    """What is wrong with the tokenizer beside the shards, in a sentence; None where it is the one that they were made with."""
    path = Path(folder) / tokenizer.file
    if not path.is_file():
        return f"{path} is missing: the tokenizer of these shards (sha256 {tokenizer.sha256}); copy it back or prepare the shards again"
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return f"cannot read {path}: {error.strerror}"
    if found != tokenizer.sha256:
        return f"{path} is not the tokenizer of these shards: expected sha256 {tokenizer.sha256}, found {found}; copy it back"
    return None


def faults(folder: str | Path, manifest: Manifest, shard: Shard) -> Iterator[str]:
    """Everything wrong with one shard, each as a sentence that names the file: size, checksum, ids, ends. Reads the whole file once."""
    path, eos = Path(folder) / shard.file, manifest.tokenizer.eos_id
    try:
        check_size(Path(folder), shard, manifest.dtype)
    except ShardError as error:
        yield str(error)
        return
    digest, ends, highest, last = hashlib.sha256(), 0, -1, eos
    for ids in _blocks(folder, manifest, shard):
        digest.update(ids)
        ends += int((ids == eos).sum())
        highest, last = max(highest, int(ids.max())), int(ids[-1])
    if digest.hexdigest() != shard.sha256:
        yield f"{path}: the contents changed: expected sha256 {shard.sha256}, found {digest.hexdigest()}; copy or prepare it again"
    if highest >= manifest.tokenizer.vocab_size:
        yield f"{path}: token id {highest} is outside the vocabulary of {manifest.tokenizer.vocab_size}"
    if ends != shard.documents:
        yield f"{path}: {ends} end ids (id {eos}), but {shard.documents} documents are recorded"
    if last != eos:
        yield f"{path}: the last token is {last}, not the end id {eos}"


def unigram_entropy(folder: str | Path, manifest: Manifest) -> float:
    """Nats a token of the frequencies of single tokens: the loss of a model that knows these and nothing of the context."""
    counts = np.zeros(manifest.tokenizer.vocab_size, dtype=np.int64)
    for shard in manifest.shards:
        for ids in _blocks(folder, manifest, shard):
            counts += np.bincount(ids, minlength=len(counts))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def longest_document(folder: str | Path, manifest: Manifest, at_least: int) -> int:
    """Tokens (eos included) of the longest document that has `at_least` of them; 0 where none has. Reads the shards that could hold it."""
    longest = 0
    for shard in manifest.shards:
        if shard.tokens < at_least:
            continue
        begin = position = 0  # of the document that goes on, of the block; in tokens of the shard
        for ids in _blocks(folder, manifest, shard):
            after = position + 1 + np.flatnonzero(ids == manifest.tokenizer.eos_id)
            position += len(ids)
            if len(after):
                longest = max(longest, int(np.diff(after, prepend=begin).max()))
                begin = int(after[-1])
    return longest if longest >= at_least else 0


def _blocks(folder: str | Path, manifest: Manifest, shard: Shard) -> Iterator[np.ndarray]:
    """The ids of one shard, READ_SIZE bytes at a time."""
    with open(Path(folder) / shard.file, "rb") as file:
        for block in iter(lambda: file.read(READ_SIZE), b""):
            yield np.frombuffer(block, dtype=DTYPES[manifest.dtype])
