"""Shared fixtures: real English text (Genesis, King James Version, public domain), a small tokenizer trained on it, and its shards.

Packages are imported inside the fixtures: the kernels' tests run where torch and triton alone are installed.
"""

import json
import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Before anything imports Triton: its own library is made for the interpreter, or not, when it is first imported
    os.environ["TRITON_INTERPRET"] = "1"

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
    from data_prep import tokenizer as training

    path = tiny_text.parent / "tokenizer.model"
    assert training.main([str(tiny_text), "--vocab-size", "512", "--output", str(path)]) == 0
    return path


@pytest.fixture(scope="session")
def tiny_shards(tiny_text, tiny_tokenizer) -> Path:
    """A folder of shards: about 80,000 tokens of training text in several shards, and val/."""
    from data_prep import prepare

    folder = tiny_text.parent / "shards"
    arguments = ["--tokenizer", str(tiny_tokenizer), "--workers", "1", "--shard-tokens", "20000", "--val-fraction", "0.1"]
    assert prepare.main([str(tiny_text), *arguments, "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def make_shards():
    """make_shards(folder, documents, vocab_size=100, shard_tokens=1000, sha256="0") -> folder.

    Writes lists of ids as shards, eos 2; no tokenizer file lies beside them.
    """
    import numpy as np

    from pdn_train.shards import ShardWriter, TokenizerInfo, write_manifest

    def make(folder: Path, documents: list, vocab_size: int = 100, shard_tokens: int = 1000, sha256: str = "0") -> Path:
        info = TokenizerInfo(file="tokenizer.model", sha256=sha256, vocab_size=vocab_size, bos_id=1, eos_id=2)
        writer = ShardWriter(folder, info, shard_tokens)
        for ids in documents:
            writer.add(np.asarray(ids), len(ids))
        write_manifest(folder, writer.finish())
        return folder

    return make
