"""Weights out of a run, and back in: safetensors exports, models for evaluation and generation, warm starts.

    python -m pdn_train.export RUN OUT [--format safetensors] [--max-shard-size MB]

RUN is a run folder (its newest whole checkpoint), a checkpoint folder or another export. OUT, which must not exist, appears whole:

    model.safetensors     every parameter and buffer by its name in the model; parameters are the fp32 masters. With --max-shard-size:
                          model-00001-of-0000N.safetensors and model.safetensors.index.json, which says what lies where
    config.yaml           the model section, and of the data section what the model is used to: seq_len and reset_at_documents
    tokenizer.model       the run's tokenizer, where it has one

A tied head is written under both its names, `embedding.weight` and `head.weight`, so that a reader need not know of the tie: vocab x hidden
x 4 bytes more. Costs one copy of the model in host memory, two while a checkpoint's ZeRO files are joined.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdn_train import checkpoint, config
from pdn_train.config import ConfigError, ModelConfig
from pdn_train.model import LanguageModel
from pdn_train.tokenizer import Tokenizer, TokenizerError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TIED = ("embedding.weight", "head.weight")


class WeightsError(ValueError):
    """Weights cannot be found, read or used; the message names what and the way out."""


@dataclass(frozen=True)
class Source:
    """A checkpoint or an export, found by `find`."""

    folder: Path
    exported: bool  # an export, not a checkpoint
    model: ModelConfig
    data: dict  # the data section of its configuration: all of it for a checkpoint, what is said above for an export
    tokenizer: Path | None

    def weights(self) -> dict[str, Tensor]:
        """Every parameter and buffer by name, on the CPU, parameters as fp32 masters."""
        return _read_export(self.folder) if self.exported else _read_checkpoint(self.folder)


def find(path: str | Path) -> Source:
    """What lies at `path`: a run folder, a checkpoint or an export. Raises WeightsError where it is none of them."""
    path = Path(path)
    if (path / SINGLE).exists() or (path / INDEX).exists():
        tree = _read_tree(path / "config.yaml", lambda text: config.parse(text, str(path / "config.yaml")))
        return Source(path, True, _model_config(tree, path), tree.get("data", {}), _if_there(path / "tokenizer.model"))
    if (path / "checkpoints").is_dir():
        path = checkpoint.newest(path / "checkpoints")
    if not (path / "state.json").exists():
        raise WeightsError(
            f"{path} is no run folder (checkpoints/ is missing), no checkpoint (state.json) and no export ({SINGLE}); name one of these"
        )
    if not (path / "COMPLETE").exists():
        raise WeightsError(f"{path} has no COMPLETE file: it was never published; name the run folder to get its newest whole checkpoint")
    tree = _read_tree(path / "state.json", json.loads)["config"]
    return Source(path, False, _model_config(tree, path), tree["data"], _if_there(path.parent.parent / "tokenizer.model"))


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """The weights at `path` (a run, a checkpoint or an export) by name, on the CPU: fp32 masters, both names of a tied head.

    Raises WeightsError or CheckpointError where there are none that are whole.
    """
    source = find(path)
    return _complete(source.weights(), source)


def load_into(model: LanguageModel, weights: dict[str, Tensor], source: str | Path) -> None:
    """Copy `weights` into `model`. Raises WeightsError, changing nothing, where a name or a shape differs; `source` is named in it."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    faults = [f"{name} is missing there" for name in expected if name not in found]
    faults += [f"{name} is not in this model" for name in found if name not in expected]
    faults += [
        f"{name} is {list(found[name])} there and {list(expected[name])} here"
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    if not faults and model.config.tie_embeddings and not torch.equal(weights[TIED[0]], weights[TIED[1]]):
        faults = [f"{TIED[0]} and {TIED[1]} differ there and are one tensor here (model.tie_embeddings)"]
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise WeightsError(f"the weights of {source} do not fit this model: {'; '.join(faults[:3])}{more}; its model section must agree")
    model.load_state_dict(weights)


def load_model(
    path: str | Path, device: torch.device | str, dtype: torch.dtype = torch.float32, kernel: str | None = None
) -> tuple[LanguageModel, Tokenizer | None]:
    """The model at `path` (a run, a checkpoint or an export) with its weights, and its tokenizer where one lies there.

    kernel: the backend to run it on; None: that of its configuration. Raises WeightsError or CheckpointError.
    """
    source = find(path)
    model = LanguageModel(source.model if kernel is None else source.model.model_copy(update={"kernel": kernel}))
    load_into(model, _complete(source.weights(), source), source.folder)
    tokenizer = None if source.tokenizer is None else Tokenizer.load(source.tokenizer)
    return model.to(device=device, dtype=dtype).eval(), tokenizer


def export(path: str | Path, out: str | Path, max_shard_bytes: int | None = None) -> None:
    """Write the weights at `path` as an export folder `out`, whole or not at all. Raises WeightsError, also where `out` exists."""
    out = Path(out)
    if out.exists():
        raise WeightsError(f"{out} exists; name a folder that does not")
    source = find(path)
    weights = _complete(source.weights(), source)
    _check(weights, source)
    aside = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    aside.mkdir(parents=True)
    try:
        write_weights(aside, weights, max_shard_bytes)
        (aside / "config.yaml").write_text(_config_text(source))
        if source.tokenizer is not None:
            shutil.copyfile(source.tokenizer, aside / "tokenizer.model")
        _flush(aside)
        aside.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_weights(folder: Path, weights: dict[str, Tensor], max_shard_bytes: int | None = None) -> None:
    """Write tensors as one safetensors file, or as several of at most `max_shard_bytes` (a larger tensor gets a file of its own)."""
    if max_shard_bytes is None:
        save_file(_apart(weights), folder / SINGLE, {"format": "pt"})
        return
    groups = _group(weights, max_shard_bytes)
    files = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    for file, names in zip(files, groups, strict=True):
        save_file(_apart({name: weights[name] for name in names}), folder / file, {"format": "pt"})
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


def _apart(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor in memory of its own: safetensors refuses two that share it, as the two names of a tied head may."""
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}


def _read_export(folder: Path) -> dict[str, Tensor]:
    if (folder / SINGLE).exists():
        return _read_file(folder / SINGLE)
    places = _read_tree(folder / INDEX, json.loads)["weight_map"]
    files = {file: _read_file(folder / file) for file in sorted(set(places.values()))}
    missing = [f"{name} in {file}" for name, file in places.items() if name not in files[file]]
    if missing:
        raise WeightsError(f"{folder / INDEX} names {missing[0]}, which is not there; export again")
    return {name: files[file][name] for name, file in places.items()}


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"cannot read {file}: {error}; export again") from error


def _read_checkpoint(folder: Path) -> dict[str, Tensor]:
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed tells its progress on stdout, where our own results go
        from pdn_train.engine import gather_fp32_weights  # here, so that reading an export needs no DeepSpeed

        weights = gather_fp32_weights(folder)
    # A frozen parameter has no master
    return {name: tensor.float() if tensor.dtype == torch.bfloat16 else tensor for name, tensor in weights.items()}


def _read_tree(file: Path, parse) -> dict:
    try:
        return parse(file.read_text())
    except (OSError, ValueError) as error:
        raise WeightsError(f"cannot read {file}: {error}") from error


def _model_config(tree: dict, path: Path) -> ModelConfig:
    try:
        return ModelConfig.model_validate(tree["model"])
    except (KeyError, ValueError) as error:
        raise WeightsError(f"{path}: its configuration has no usable model section: {error}") from error


def _if_there(file: Path) -> Path | None:
    return file if file.exists() else None


def _complete(weights: dict[str, Tensor], source: Source) -> dict[str, Tensor]:
    """Both names of a tied head, whichever of them was stored."""
    stored = next((name for name in TIED if name in weights), None)
    if source.model.tie_embeddings and stored is not None:
        return {**weights, **{name: weights.get(name, weights[stored]) for name in TIED}}
    return weights


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
    data = {key: source.data[key] for key in ("seq_len", "reset_at_documents") if key in source.data}
    return yaml.safe_dump({"model": source.model.model_dump(mode="json"), "data": data}, sort_keys=False)


def _flush(folder: Path) -> None:
    """Bring a folder's files and entries to disk."""
    for path in [*folder.iterdir(), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pdn_train.export", description="Write a run's weights for use elsewhere.")
    parser.add_argument("run", help="a run folder, a checkpoint or an export")
    parser.add_argument("out", help="the folder to make")
    parser.add_argument("--format", choices=("safetensors", "fla"), default="safetensors")
    parser.add_argument("--max-shard-size", type=float, metavar="MB", help="cut into files of at most this many megabytes (10^6 bytes)")
    arguments = parser.parse_args(argv)
    try:
        if arguments.format == "fla":
            raise WeightsError("--format fla, weights under flash-linear-attention's names, is not available yet; use --format safetensors")
        if arguments.max_shard_size is not None and arguments.max_shard_size <= 0:
            raise WeightsError(f"--max-shard-size {arguments.max_shard_size} is not above 0")
        export(arguments.run, arguments.out, None if arguments.max_shard_size is None else int(arguments.max_shard_size * 1e6))
    except (WeightsError, checkpoint.CheckpointError, ConfigError, TokenizerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
