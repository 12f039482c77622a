"""A model of flash-linear-attention into this project: `python -m pdn_train.import_fla FOLDER OUT [--max-shard-size MB]`.

FOLDER is what `--format fla` of `pdn_train.export` or `save_pretrained` of that library wrote: config.json and safetensors, of the classes
DeltaNet, GatedDeltaNet, KDA, PrecondGatedDeltaNet and PrecondKDA (the table: `pdn_train.interchange`). OUT is an ordinary export with the
same weights, bit for bit (16-bit ones widened to fp32): evaluate it, let it generate, or start a run from it (`init_from`). FOLDER itself
can be used so too; importing it saves the check at every start and makes it independent of config.json.

What the model was trained on is not in such a folder unless this project wrote it: add data.reset_at_documents to OUT/config.yaml before
evaluating its perplexity.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pdn_train.export import add_shard_size, export, max_shard_bytes
from pdn_train.telling import quietly
from pdn_train.weights import UNREADABLE, WeightsError, find


def import_fla(folder: str | Path, out: str | Path, max_shard_bytes: int | None = None) -> None:
    """Write what lies at `folder` as an export `out`. Raises WeightsError where it is another kind of folder, or not such a model."""
    if find(folder).format != "fla":
        raise WeightsError(f"{folder} has no config.json: it is not a model of flash-linear-attention; use pdn_train.export")
    export(folder, out, max_shard_bytes)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pdn_train.import_fla", description="Read a model of flash-linear-attention.")
    parser.add_argument("folder", help="a folder with config.json and safetensors")
    parser.add_argument("out", help="the export to make")
    add_shard_size(parser)
    a = parser.parse_args(argv)
    try:
        import_fla(a.folder, a.out, max_shard_bytes(a))
    except UNREADABLE as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {a.out}")
    return 0


if __name__ == "__main__":
    sys.exit(quietly(main))
