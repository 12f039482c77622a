"""Check prepared shards against their manifest: `python -m data_prep.verify DIR`.

Every file's size and sha256, every id against the vocabulary, one end id a document and none missing at the end, the totals, the
tokenizer's sha256; DIR/val as well where it is. Prints each fault with the file it is in; the exit status is 1 when there are any. Sound
shards end with their unigram entropy, the loss that a model must beat to have learned anything of context. Reads each byte twice, at the
speed of sha256 or of the disk, 0.5 to 1 GB a second.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from pdn_train.shards import MANIFEST, ShardError, Totals, faults, read_manifest, tokenizer_fault, unigram_entropy
from pdn_train.telling import counted, quietly


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m data_prep.verify", description="Check prepared shards against their manifest.")
    parser.add_argument("folder", metavar="DIR", type=Path)
    folder = parser.parse_args(argv).folder
    folders = [folder] + ([folder / "val"] if os.path.isdir(folder / "val") else [])  # no error where the folder may not be read
    return max(_verify(folder) for folder in folders)


def _verify(folder: Path) -> int:
    count = 0
    for fault in check(folder):
        count += 1
        print(f"fault: {fault}", file=sys.stderr)
    if count:
        print(f"{folder}: {counted(count, 'fault')}", file=sys.stderr)
        return 1
    manifest = read_manifest(folder)
    totals = manifest.totals
    print(
        f"{folder}: {counted(len(manifest.shards), 'shard')}, {counted(totals.documents, 'document')}, {totals.tokens:,} tokens: "
        f"all as recorded; unigram entropy {unigram_entropy(folder, manifest):.3f} nats a token"
    )
    return 0


def check(folder: Path) -> Iterator[str]:
    """Every fault of a folder of shards, as sentences."""
    try:
        manifest = read_manifest(folder)
    except ShardError as error:
        yield str(error)
        return
    fault = tokenizer_fault(folder, manifest.tokenizer)
    if fault is not None:
        yield fault
    for shard in manifest.shards:
        yield from faults(folder, manifest, shard)
    for name in Totals.model_fields:
        total, parts = getattr(manifest.totals, name), sum(getattr(shard, name) for shard in manifest.shards)
        if total != parts:
            yield f"{folder / MANIFEST}: totals.{name} is {total}, the shards' {name} add up to {parts}"
    listed = {shard.file for shard in manifest.shards}
    for path in sorted(folder.glob("*.bin")):
        if path.name not in listed:
            yield f"{path} is not in the manifest"


if __name__ == "__main__":
    sys.exit(quietly(main))
