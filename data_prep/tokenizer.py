"""Train a sentencepiece tokenizer that gives every text back: `python -m data_prep.tokenizer INPUT... --vocab-size N --output FILE`.

BPE without a normaliser, without a mark before the text, with every space, tab and line break kept, bytes for characters outside the
vocabulary, and digits one by one. Ids: 0 unknown, 1 begin, 2 end, then 256 bytes. The text U+2581 alone does not return: sentencepiece
spells the space so.

It trains on a sample of `--sample-bytes` drawn evenly from all inputs by a hash of each document, so that the order of files does not
matter and the same inputs give the same model. Reads every input once; needs the sample and about 20 times its size in memory for the
training itself, which takes about a minute for 50 MB.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import sentencepiece

from data_prep.inputs import BadRecord, FileInput, InputError, find_inputs, parse
from pdn_train.files import write_whole
from pdn_train.telling import counted, quietly
from pdn_train.tokenizer import Tokenizer, TokenizerError

SPACE = "\u2581"  # as sentencepiece spells it
PIECE = 4000  # characters the trainer gets at once; it skips longer ones


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status: 2 where what it is given cannot be used at all, 1 for what it meets later."""
    parser = argparse.ArgumentParser(prog="python -m data_prep.tokenizer", description="Train a lossless sentencepiece BPE tokenizer.")
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="files (.jsonl[.zst|.gz], .parquet, .txt) or folders of them")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--text-field", default="text", help="the field or column that holds the text (default: text)")
    parser.add_argument("--sample-bytes", type=int, default=50_000_000, help="most text to train on (default: 50,000,000)")
    arguments = parser.parse_args(argv)
    try:
        _check(arguments)
        inputs = find_inputs(arguments.inputs, arguments.text_field)
    except (InputError, TokenizerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        _make_room(arguments.output)
        texts = sample(inputs, arguments.text_field, arguments.sample_bytes)
        tokenizer = train(texts, arguments.vocab_size, arguments.output)
    except (InputError, TokenizerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # of the inputs it would be an InputError
        print(f"error: cannot write {arguments.output}: {error}; mend that, or name another file with --output", file=sys.stderr)
        return 1
    text_bytes, tokens = sum(len(text.encode()) for text in texts), sum(len(tokenizer.encode(text)) for text in texts)
    print(
        f"{tokenizer.file}: {tokenizer.vocab_size} pieces from {counted(len(texts), 'document')}, {text_bytes:,} bytes; "
        f"{tokens / text_bytes:.4f} tokens per byte"
    )
    return 0


def _check(arguments: argparse.Namespace) -> None:
    for name, value in (("--vocab-size", arguments.vocab_size), ("--sample-bytes", arguments.sample_bytes)):
        if not 1 <= value < 2**31:
            raise TokenizerError(f"{name} {value} is out of range: it is at least 1 and below 2^31")


def _make_room(output: Path) -> None:
    """The output's folder. Raises OSError where the output cannot be a file: known before a training of minutes."""
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.is_dir():
        raise IsADirectoryError("it is a folder")
    if not os.access(output.parent, os.W_OK):
        raise PermissionError(f"{output.parent} is read-only")


def sample(inputs: list[FileInput], text_field: str, sample_bytes: int) -> list[str]:
    """Documents of at most `sample_bytes` together, those with the smallest hashes; bad records are left out and counted."""
    kept: list[tuple[int, str]] = []  # a heap: the largest hash first
    size = bad = 0
    for item in inputs:
        for record in item.read(0):
            try:
                text = parse(record, text_field)
            except BadRecord:
                bad += 1
                continue
            heapq.heappush(kept, (-int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big"), text))
            size += len(text.encode())
            while size > sample_bytes and len(kept) > 1:
                size -= len(heapq.heappop(kept)[1].encode())
    if bad:
        print(f"left out {counted(bad, 'bad record')}; python -m data_prep.prepare names them", file=sys.stderr)
    if not kept:
        raise InputError("the inputs hold no text to train a tokenizer on")
    return [text for _, text in sorted(kept)]


def train(texts: Iterable[str], vocab_size: int, output: Path) -> Tokenizer:
    """Train on texts and write the model to `output`, whole. Raises TokenizerError where the vocabulary does not fit the text."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_pieces(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            required_chars=SPACE,  # also of a text that has none, or hardly any, as Chinese
            allow_whitespace_only_pieces=True,  # runs of spaces: indented text costs less
            byte_fallback=True,
            split_digits=True,
            max_sentence_length=1 << 24,
            num_threads=1,  # the number is written into the model, which should be the same everywhere
            minloglevel=2,
        )
    except RuntimeError as error:
        raise TokenizerError(
            f"cannot train {vocab_size} pieces on this text: {_sentence(error)}; choose another --vocab-size or more text"
        ) from None
    write_whole(output, model.getvalue())
    tokenizer = Tokenizer.load(output)
    tokenizer.check_lossless()
    return tokenizer


def _sentence(error: RuntimeError) -> str:
    """What sentencepiece says for people, after "INTERNAL: src/FILE.cc(LINE) [(CONDITION)] "; all of it where nothing follows."""
    return re.sub(r"^\w+: \S+\(\d+\) \[.*?\] (?=\S)", "", str(error)).rstrip(". ")


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for start in range(0, len(text), PIECE):
            yield text[start : start + PIECE]


if __name__ == "__main__":
    sys.exit(quietly(main))
