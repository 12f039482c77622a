"""Writing exports: a run's weights as safetensors, for use elsewhere.

    python -m pdn_train.export RUN OUT [--format safetensors|fla] [--max-shard-size MB]

RUN is a run folder (its newest whole checkpoint), a checkpoint folder or another export. OUT, which must not exist, appears whole. With
--format safetensors:

    model.safetensors     every parameter and buffer by its name in the model; parameters are the fp32 masters. With --max-shard-size:
                          model-00001-of-0000N.safetensors and model.safetensors.index.json, which says what lies where
    config.yaml           the model section, and of the data section what the model is used to, seq_len and reset_at_documents, and
                          val_path as the run names it, which `pdn_train.evaluate` uses where such a folder is
    tokenizer.model       the run's tokenizer, where it has one

With --format fla the weights have flash-linear-attention's names and config.json says which of its classes they are for
(`pdn_train.interchange`), so that where that library is installed

    import fla; model = transformers.AutoModelForCausalLM.from_pretrained(OUT)

computes the same; tokenizer.json and tokenizer_config.json are for transformers' AutoTokenizer (`pdn_train.hf_tokenizer`). Such a folder is
read here like any other export, and `pdn_train.import_fla` makes one of the first kind of it.

A tied head is written under both its names, `embedding.weight` and `head.weight`: vocab x hidden x 4 bytes more. Costs two copies of the
model in host memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import uuid
from pathlib import Path
from typing import Literal

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from pdn_train import hf_tokenizer, interchange
from pdn_train.checkpoint import VERSION
from pdn_train.files import sync, sync_contents
from pdn_train.interchange import InterchangeError
from pdn_train.model import LanguageModel
from pdn_train.telling import quietly
from pdn_train.tokenizer import Tokenizer, TokenizerError
from pdn_train.weights import INDEX, SINGLE, UNREADABLE, VERSION_KEY, Source, WeightsError, find


def export(
    path: str | Path, out: str | Path, max_shard_bytes: int | None = None, format: Literal["safetensors", "fla"] = "safetensors"
) -> None:
    """Write the weights at `path` as an export folder `out`, whole or not at all. Raises WeightsError, also where `out` exists."""
    out = Path(out)
    if out.exists():
        raise WeightsError(f"{out} exists; name a folder that does not")
    source = find(path)
    weights = source.weights()
    _check(weights, source)
    if source.tokenizer is not None:
        Tokenizer.load(source.tokenizer)  # of which nothing may be known before it is copied
    write = {"safetensors": _write_own, "fla": _write_fla}[format]
    aside = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    try:
        aside.mkdir(parents=True)
        write(aside, source, weights, max_shard_bytes)
        if source.tokenizer is not None:
            shutil.copyfile(source.tokenizer, aside / "tokenizer.model")
        sync_contents(aside)
        aside.rename(out)
        sync(out.parent)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"cannot write {out}: {error}; mend that, or name another folder") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_own(folder: Path, source: Source, weights: dict[str, Tensor], max_shard_bytes: int | None) -> None:
    write_weights(folder, weights, max_shard_bytes)
    (folder / "config.yaml").write_text(_config_text(source))


def _write_fla(folder: Path, source: Source, weights: dict[str, Tensor], max_shard_bytes: int | None) -> None:
    """Raises WeightsError where no class of flash-linear-attention computes this model."""
    try:
        write_weights(folder, interchange.to_fla(weights, source.model), max_shard_bytes, {"format": "pt"})
    except InterchangeError as error:
        raise WeightsError(f"{source.folder}: {error}") from error
    tokenizer = None if source.tokenizer is None else Tokenizer.load(source.tokenizer)
    end, begin = (None, None) if tokenizer is None else (tokenizer.eos_id, tokenizer.bos_id)
    tree = interchange.to_json(source.model, _data(source), end, begin)
    (folder / "config.json").write_text(json.dumps(tree, indent=2) + "\n")
    if tokenizer is not None:
        _write_tokenizer(folder, tokenizer)


def _write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    try:
        files = hf_tokenizer.to_json(tokenizer)
    except TokenizerError as error:
        print(f"notice: {error}; no tokenizer.json is written", file=sys.stderr)
        return
    for name, text in files.items():
        (folder / name).write_text(text)


def write_weights(
    folder: Path, weights: dict[str, Tensor], max_shard_bytes: int | None = None, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors as one safetensors file, or as several of at most `max_shard_bytes` (a larger tensor gets a file of its own).

    metadata: the files' own, of one entry, since safetensors writes several in any order; None: the version of this project's names.
    """
    metadata = metadata or {VERSION_KEY: str(VERSION)}
    if max_shard_bytes is None:
        _save(weights, folder / SINGLE, metadata)
        return
    groups = _group(weights, max_shard_bytes)
    files = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    for file, names in zip(files, groups, strict=True):
        _save({name: weights[name] for name in names}, folder / file, metadata)
    places = {name: file for file, names in zip(files, groups, strict=True) for name in names}
    index = {"metadata": {"total_size": sum(t.nbytes for t in weights.values())}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _group(weights: dict[str, Tensor], limit: int) -> list[list[str]]:
    """The names in order, cut wherever the next tensor would take a file past `limit` bytes."""
    groups: list[list[str]] = []
    room = -1
    for name, tensor in weights.items():
        if tensor.nbytes > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= tensor.nbytes
    return groups


def _save(weights: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    save_file(_apart(weights), path, metadata)
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)  # safetensors makes files that only their owner reads


def _apart(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor in memory of its own: safetensors refuses two that share it, as the two names of a tied head may."""
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}


def _check(weights: dict[str, Tensor], source: Source) -> None:
    """Raise WeightsError unless these are the tensors of the configured model and no matrix is all zero, as one that was never read is."""
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in LanguageModel(source.model).state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if expected != found:
        name = next(name for name in {**expected, **found} if expected.get(name) != found.get(name))
        raise WeightsError(f"{source.folder}: {name} is {found.get(name)} there, its configuration asks for {expected.get(name)}")
    empty = [name for name, tensor in weights.items() if tensor.ndim >= 2 and not tensor.any()]
    if empty:
        raise WeightsError(f"{source.folder}: {', '.join(empty)} is all zero: the checkpoint was not read whole")


def _config_text(source: Source) -> str:
    return yaml.safe_dump({"model": source.model.model_dump(mode="json"), "data": _data(source)}, sort_keys=False)


def _data(source: Source) -> dict:
    return {key: source.data[key] for key in interchange.DATA if source.data.get(key) is not None}


def add_shard_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-shard-size", type=float, metavar="MB", help="cut into files of at most this many megabytes (10^6 bytes)")


def max_shard_bytes(arguments: argparse.Namespace) -> int | None:
    """What `add_shard_size` has read. Raises WeightsError where nothing fits into it."""
    if arguments.max_shard_size is None:
        return None
    if not 0 < arguments.max_shard_size < float("inf"):
        raise WeightsError(f"--max-shard-size {arguments.max_shard_size} is no finite number above 0")
    return int(arguments.max_shard_size * 1e6)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pdn_train.export", description="Write a run's weights for use elsewhere.")
    parser.add_argument("run", help="a run folder, a checkpoint or an export")
    parser.add_argument("out", help="the folder to make")
    parser.add_argument("--format", choices=("safetensors", "fla"), default="safetensors")
    add_shard_size(parser)
    arguments = parser.parse_args(argv)
    try:
        export(arguments.run, arguments.out, max_shard_bytes(arguments), arguments.format)
    except UNREADABLE as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(quietly(main))
