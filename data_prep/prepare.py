"""Raw text to token shards: `python -m data_prep.prepare INPUT... --tokenizer FILE --output DIR`.

Or, in place of INPUT, `--dataset NAME --split S [--streaming]`.

Inputs are .jsonl, .jsonl.zst, .jsonl.gz, .parquet, .txt (one document), and folders of them. One process reads, `--workers` encode, and
this one writes, everything in the order of the inputs: the shards' bytes depend on inputs, tokenizer and options alone, not on workers,
timing or restarts.

A journal, DIR/prepare.journal, starts with the options and gets one line a commit: how far the inputs are consumed, the shards that
ended, the length of the open one, the bad records since. Commits happen every COMMIT_SECONDS and when a shard ends; a killed run, given
the same command, goes on from the last one. The manifest comes last. With other options, inputs or tokenizer the command stops and names
the difference, unless no document was written yet: then it starts anew.

Bad records (unreadable, broken JSON, invalid UTF-8, no or empty text) are left out, counted, named with file and line, and kept in the
journal. More than `--max-bad` of all records end the run with an error: at its end, or, past EARLY records, where
HOPELESS times as many are bad. What is done stays done: the same command with a higher `--max-bad` goes on.

Speed is the tokenizer's, 2 to 5 MB of English a second a worker. `--val-fraction` sends documents, chosen by a hash of their text, to
DIR/val. Whole documents: a long one can be most of a small split, and the last line of the output says where one is.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, TypeAdapter, ValidationError

from data_prep.encode import Encoded, Fault, Rules, encode_in_order
from data_prep.inputs import DatasetInput, FileInput, InputError, Place, batches, find_inputs
from pdn_train.files import write_whole
from pdn_train.shards import (
    EMPTY,
    MANIFEST,
    Manifest,
    Shard,
    ShardError,
    ShardWriter,
    TokenizerInfo,
    Totals,
    longest_document,
    write_manifest,
)
from pdn_train.telling import counted, quietly
from pdn_train.tokenizer import Tokenizer, TokenizerError

JOURNAL = "prepare.journal"
COMMIT_SECONDS = 5.0
REPORT_SECONDS = 10.0
EARLY = 10_000  # records before which the share of bad ones says nothing: they may all stand at the start
HOPELESS = 10  # times max_bad
SHOWN = 20  # bad records printed; the journal has all
LARGE = 0.1  # share of a split's tokens above which one document is named


class PrepareError(ValueError):
    """The preparation cannot start or go on; the message says why and the way out."""


@dataclass(frozen=True)
class Options:
    inputs: list[FileInput] | list[DatasetInput]
    output: Path
    rules: Rules
    shard_tokens: int
    workers: int
    max_bad: float


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status: 2 where what it is given cannot be used at all, 1 for what it meets later."""
    arguments = _parser().parse_args(argv)
    try:
        options = _options(arguments)
    except (PrepareError, InputError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        prepare(options)
    except (PrepareError, InputError, ShardError, TokenizerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, TokenizerError) else 1
    except OSError as error:  # of the inputs it would be an InputError
        print(f"error: cannot write to {options.output}: {error}; mend that, and the same command goes on", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m data_prep.prepare", description="Raw text to token shards.")
    parser.add_argument("inputs", nargs="*", metavar="INPUT", help="files (.jsonl[.zst|.gz], .parquet, .txt) or folders of them")
    parser.add_argument("--dataset", metavar="NAME", help="a Hugging Face dataset or a local folder, instead of INPUT")
    parser.add_argument("--config", help="the dataset's configuration, where it has several")
    parser.add_argument("--split", default="train", help="the dataset's split (default: train)")
    parser.add_argument("--streaming", action="store_true", help="stream the dataset instead of downloading it first")
    parser.add_argument(
        "--tokenizer", required=True, metavar="FILE", help="a sentencepiece model; python -m data_prep.tokenizer trains one"
    )
    parser.add_argument("--output", required=True, metavar="DIR", type=Path)
    parser.add_argument("--text-field", default="text", help="the field or column that holds the text (default: text)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="encoding processes (default: the cores)")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, help="most tokens a shard (default: 100,000,000)")
    parser.add_argument("--val-fraction", type=float, default=0.0, help="share of documents that go to DIR/val (default: 0)")
    parser.add_argument("--max-bad", type=float, default=0.001, help="largest share of bad records (default: 0.001)")
    parser.add_argument(
        "--lossless", action="store_true", help="refuse a tokenizer, and leave out documents, that do not decode to the text"
    )
    return parser


def _options(arguments: argparse.Namespace) -> Options:
    if bool(arguments.inputs) == bool(arguments.dataset):
        raise PrepareError("name either INPUT files and folders or --dataset NAME")
    for name, value, fits in (
        ("--workers", arguments.workers, arguments.workers >= 1),
        ("--shard-tokens", arguments.shard_tokens, arguments.shard_tokens >= 1),
        ("--val-fraction", arguments.val_fraction, 0 <= arguments.val_fraction < 1),
        ("--max-bad", arguments.max_bad, 0 <= arguments.max_bad <= 1),
    ):
        if not fits:
            raise PrepareError(f"{name} {value} is out of range; counts are at least 1, shares lie in 0 .. 1")
    if arguments.dataset:
        inputs = [DatasetInput(arguments.dataset, arguments.config, arguments.split, arguments.streaming, arguments.text_field)]
    else:
        inputs = find_inputs(arguments.inputs, arguments.text_field)
    rules = Rules(arguments.tokenizer, arguments.text_field, arguments.val_fraction, arguments.lossless)
    return Options(inputs, arguments.output, rules, arguments.shard_tokens, arguments.workers, arguments.max_bad)


def prepare(options: Options) -> None:
    """Read, encode and write everything that is not done yet, then the manifests, then print a summary."""
    tokenizer = Tokenizer.load(options.rules.tokenizer_file)
    if options.rules.lossless:
        tokenizer.check_lossless()
    identity = _identity(options, tokenizer)
    with Journal(options.output, identity) as journal:
        run = _Run(options, journal, _writers(options, tokenizer, journal))
        for encoded in encode_in_order(options.rules, batches(options.inputs, journal.place), options.workers):
            run.take(encoded)
        _compare(identity, _identity(options, tokenizer), options.output)  # a file may have been cut, or grown, while it was read
        run.finish()


def _identity(options: Options, tokenizer: Tokenizer) -> dict:
    """Everything the bytes depend on, by the names a user knows."""
    return {
        "tokenizer (sha256)": tokenizer.sha256,
        "--text-field": options.rules.text_field,
        "--shard-tokens": options.shard_tokens,
        "--val-fraction": options.rules.val_fraction,
        "--lossless": options.rules.lossless,
        "inputs": [item.identity for item in options.inputs],
    }


def _writers(options: Options, tokenizer: Tokenizer, journal: Journal) -> dict[str, ShardWriter]:
    """The writer of each split, in the state of the last commit; the tokenizer lies beside its shards."""
    info = TokenizerInfo(
        file="tokenizer.model",
        sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
    )
    folders = {"train": options.output} | ({"val": options.output / "val"} if options.rules.val_fraction else {})
    writers = {}
    for split, folder in folders.items():
        state = journal.writers.get(split, _Writer())
        writers[split] = ShardWriter(folder, info, options.shard_tokens, state.ended, state.open)
        write_whole(folder / info.file, tokenizer.file.read_bytes())
    return writers


class _Writer(BaseModel):
    """A split's part of a commit, as `ShardWriter.commit` returned it, or of all commits."""

    ended: list[Shard] = []
    open: Totals = Totals(**EMPTY)


class _Commit(BaseModel):
    """A line of the journal after the first, as it is read."""

    place: Place
    faults: list[Fault]
    writers: dict[str, _Writer]


class Journal:
    """The record of a preparation: what it is (`identity`) and how far it has come. One process at a time may hold it.

    After opening, `place`, `writers` (by split) and `faults` are those of the last commit.
    """

    def __init__(self, folder: Path, identity: dict) -> None:
        self.path, self.place, self.writers, self.faults = folder / JOURNAL, Place(0, 0), {}, []
        folder.mkdir(parents=True, exist_ok=True)
        if not self.path.exists() and (any(folder.glob("*.bin")) or (folder / MANIFEST).exists()):
            raise PrepareError(f"{folder} holds shards without a {JOURNAL}, so they are not this command's; name another --output")
        self._file = open(self.path, "a+b")  # noqa: SIM115 - closed by __exit__
        self._lock()
        self._read(identity)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def commit(self, place: Place, faults: list[Fault], writers: dict[str, dict]) -> None:
        """Bring one commit to disk; `writers` are what each split's `ShardWriter.commit` returned."""
        self._append({"place": place, "faults": faults, "writers": writers})

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PrepareError(f"another preparation is writing to {self.path.parent}; wait for it or name another --output") from None
        except OSError as error:
            print(f"warning: cannot lock {self.path} ({error.strerror}); run one preparation at a time there", file=sys.stderr)

    def _read(self, identity: dict) -> None:
        """Take up the state; cut off a last line that a kill left incomplete. Before the first document the identity may still change."""
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            self._file.truncate(sum(map(len, lines[:-1])))
            lines.pop()
        try:
            begun, *commits = map(json.loads, lines or [b"{}"])
            begun, commits = TypeAdapter(dict).validate_python(begun), [_Commit.model_validate(commit) for commit in commits]
        except ValueError as error:  # of the JSON, of its UTF-8, or of what it holds
            why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            raise PrepareError(f"{self.path} is damaged ({why}); remove {self.path.parent} and prepare the data again") from None
        if begun != identity and not any(_has_documents(commit) for commit in commits):
            self._file.truncate(0)
            self._append(identity)
            return
        _compare(begun, identity, self.path.parent)
        for commit in commits:
            self._take(commit)

    def _take(self, commit: _Commit) -> None:
        self.place = commit.place
        self.faults += commit.faults
        for split, state in commit.writers.items():
            kept = self.writers.setdefault(split, _Writer())
            kept.ended += state.ended
            kept.open = state.open

    def _append(self, line: dict) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _has_documents(commit: _Commit) -> bool:
    return any(state.ended or state.open.documents for state in commit.writers.values())


def _compare(begun: dict, now: dict, folder: Path) -> None:
    """Raise PrepareError, naming the first difference, where this is not the preparation that was begun."""
    way_out = f"give the same options, or another --output, or remove {folder}"
    for name in now:
        if name != "inputs" and begun.get(name) != now[name]:
            raise PrepareError(f"{folder} was begun with {name} {begun.get(name)}, now it is {now[name]}; {way_out}")
    if len(begun["inputs"]) != len(now["inputs"]):
        raise PrepareError(
            f"{folder} was begun with {counted(len(begun['inputs']), 'input')}, now there are {len(now['inputs'])}; {way_out}"
        )
    for before, after in zip(begun["inputs"], now["inputs"], strict=True):
        if before != after:
            raise PrepareError(f"{folder} was begun with the input {_describe(before)}, now it is {_describe(after)}; {way_out}")


def _describe(identity: list) -> str:
    return f"{identity[0]} of {identity[1]} bytes" if len(identity) == 2 else " ".join(str(part) for part in identity if part)


class _Run:
    """What a preparation does with each encoded batch: write, count, report, commit."""

    def __init__(self, options: Options, journal: Journal, writers: dict[str, ShardWriter]) -> None:
        self.options, self.journal, self.writers = options, journal, writers
        self.place, self.faults, self.new_faults = journal.place, list(journal.faults), []
        self.began = self.committed = self.reported = time.monotonic()
        self.tokens_before, self.shards = self.tokens, self._ended()
        if self.place != Place(0, 0):
            print(f"going on after input {self.place.input}, record {self.place.records}: {self.tokens:,} tokens are done", file=sys.stderr)

    @property
    def documents(self) -> int:
        return sum(writer.totals.documents for writer in self.writers.values())

    @property
    def tokens(self) -> int:
        return sum(writer.totals.tokens for writer in self.writers.values())

    def take(self, encoded: Encoded) -> None:
        for document in encoded.documents:
            self.writers["val" if document.validation else "train"].add(document.ids, document.text_bytes)
        for fault in encoded.faults:
            self._note(fault)
        self.place = encoded.end
        if self._ended() > self.shards or time.monotonic() - self.committed > COMMIT_SECONDS:
            self._commit()
        if time.monotonic() - self.reported > REPORT_SECONDS:
            self._report()
        if self.documents + len(self.faults) >= EARLY:
            self._check_bad(HOPELESS * self.options.max_bad)

    def finish(self) -> None:
        """End the shards, judge the bad records, write the manifests (the training split's last: it says that all is done)."""
        for writer in self.writers.values():
            writer.end_shard()
        self._commit()
        self._check_bad(self.options.max_bad)
        for split, writer in self.writers.items():
            if not writer.totals.documents:
                raise PrepareError(_nothing_went_to(split, self.documents, len(self.faults), self.options))
        manifests = {writer.folder: writer.finish() for writer in self.writers.values()}
        for folder in reversed(manifests):
            write_manifest(folder, manifests[folder])
        self._summarise()
        for folder, manifest in manifests.items():
            _warn_of_a_large_document(folder, manifest)

    def _ended(self) -> int:
        return sum(len(writer.shards) for writer in self.writers.values())

    def _commit(self) -> None:
        self.journal.commit(self.place, self.new_faults, {split: writer.commit() for split, writer in self.writers.items()})
        for writer in self.writers.values():
            writer.publish()
        self.new_faults, self.shards, self.committed = [], self._ended(), time.monotonic()

    def _note(self, fault: Fault) -> None:
        self.faults.append(fault)
        self.new_faults.append(fault)
        if len(self.faults) <= SHOWN:
            detail = f": {fault.detail}" if fault.detail else ""
            print(f"bad: {self.options.inputs[fault.input]}:{fault.number}: {fault.kind}{detail}", file=sys.stderr)
        elif len(self.faults) == SHOWN + 1:
            print(f"bad: more than {SHOWN}; the rest are in {self.journal.path}", file=sys.stderr)

    def _check_bad(self, share: float) -> None:
        bad, seen = len(self.faults), self.documents + len(self.faults)
        if bad > share * seen:
            if self.new_faults:
                self._commit()
            raise PrepareError(
                f"{bad} of {seen} records are bad ({_kinds(self.faults)}), more than --max-bad {self.options.max_bad:g} allows; "
                f"mend the inputs and remove {self.options.output}, or give the same command with a higher --max-bad"
            )

    def _report(self) -> None:
        rate = (self.tokens - self.tokens_before) / (time.monotonic() - self.began)
        where = f"input {min(self.place.input + 1, len(self.options.inputs))} of {len(self.options.inputs)}"
        print(
            f"{where}  {counted(self.documents, 'document')}  {self.tokens:,} tokens  {rate:,.0f} tokens/s  {len(self.faults)} bad",
            file=sys.stderr,
        )
        self.reported = time.monotonic()

    def _summarise(self) -> None:
        seconds = time.monotonic() - self.began
        for split, writer in self.writers.items():
            totals = writer.totals
            print(
                f"{writer.folder}: {counted(totals.documents, 'document')}, {totals.tokens:,} tokens, {totals.bytes:,} bytes of text, "
                f"{totals.tokens / totals.bytes:.4f} tokens per byte, {counted(len(writer.shards), 'shard')} of {writer.dtype} ({split})"
            )
        print(
            f"bad records: {len(self.faults)} of {self.documents + len(self.faults):,}"
            + (f" ({_kinds(self.faults)})" if self.faults else "")
        )
        new = self.tokens - self.tokens_before
        print(f"encoded {new:,} tokens in {seconds:.1f} s: {new / seconds:,.0f} tokens/s with {counted(self.options.workers, 'worker')}")


def _nothing_went_to(split: str, documents: int, bad: int, options: Options) -> str:
    found, again = f"{counted(documents, 'document')}, {counted(bad, 'bad record')}", f"remove {options.output} and give"
    if not documents:
        return f"the inputs hold no document ({found}); {again} some"
    size = "smaller" if split == "train" else "larger"
    fraction = options.rules.val_fraction
    means = f"more documents or a {size} --val-fraction" if documents > 1 else "more documents, or no --val-fraction"
    return (
        f"no document went to the {split} split ({found}, --val-fraction {fraction:g})"
        + (": a split needs at least two documents" if documents == 1 else "")
        + f'; a .txt file is one document, a .jsonl file has one {{"{options.rules.text_field}": ...}} a line; {again} {means}'
    )


def _warn_of_a_large_document(folder: Path, manifest: Manifest) -> None:
    tokens = manifest.totals.tokens
    if manifest.totals.documents < 2:  # a book as a .txt file, say: nobody takes it for many
        return
    longest = longest_document(folder, manifest, at_least=int(LARGE * tokens) + 1)
    if longest:
        print(
            f"warning: {folder}: one document is {longest / tokens:.0%} of the split ({longest:,} of {tokens:,} tokens) and weighs as much "
            "in its loss; cut long documents into pieces, or leave it out",
            file=sys.stderr,
        )


def _kinds(faults: list[Fault]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in Counter(fault.kind for fault in faults).most_common())


if __name__ == "__main__":
    sys.exit(quietly(main))
