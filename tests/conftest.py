"""Shared fixtures: real English text (Genesis, King James Version, public domain), a small tokenizer trained on it, and its shards."""

import json
from pathlib import Path

import pytest

from data_prep import prepare
from data_prep import tokenizer as tokenizer_training

TEXT = Path(__file__).parent / "texts" / "genesis.txt"  # a verse a line, an empty line between chapters
VERSES = 4  # a document


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """About 400 documents of four verses."""
    verses = [line for line in TEXT.read_text().splitlines() if line]
    return ["\n".join(verses[start : start + VERSES]) for start in range(0, len(verses), VERSES)]


@pytest.fixture(scope="session")
def tiny_text(documents, tmp_path_factory) -> Path:
    """The documents as a .jsonl file."""
    path = tmp_path_factory.mktemp("text") / "genesis.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_text) -> Path:
    """A sentencepiece model of 512 pieces."""
    path = tiny_text.parent / "tokenizer.model"
    assert tokenizer_training.main([str(tiny_text), "--vocab-size", "512", "--output", str(path)]) == 0
    return path


@pytest.fixture(scope="session")
def tiny_shards(tiny_text, tiny_tokenizer) -> Path:
    """A folder of shards: about 70,000 tokens of training text in several shards, and val/."""
    folder = tiny_text.parent / "shards"
    arguments = ["--tokenizer", str(tiny_tokenizer), "--workers", "1", "--shard-tokens", "20000", "--val-fraction", "0.1"]
    assert prepare.main([str(tiny_text), *arguments, "--output", str(folder)]) == 0
    return folder
