"""Weights back out of a run: what lies at a path, its tensors, and a model that has them. For evaluation, generation, warm starts, exports.

A path names a run folder (its newest whole checkpoint), a checkpoint folder or an export (`pdn_train.export`) of either format, also one
that flash-linear-attention wrote (`pdn_train.interchange`). A checkpoint's files are read against their checksums before anything is
taken from them. A tied head stands under both its names, `embedding.weight` and `head.weight`, so that whoever reads the weights need not
know of the tie.

Costs one copy of the model in host memory, two while a checkpoint's ZeRO files are joined, and a read of the whole checkpoint first.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from kernels.passes import check_backend
from pdn_train import checkpoint, config, interchange
from pdn_train.checkpoint import STATE, VERSION, CheckpointError
from pdn_train.config import ConfigError, ModelConfig
from pdn_train.explain import explain
from pdn_train.interchange import InterchangeError
from pdn_train.model import LanguageModel
from pdn_train.rundir import RunDir
from pdn_train.tokenizer import Tokenizer, TokenizerError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # what a model can be loaded in, by the name on the command line
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # an export's weights: one file, or the index of several
VERSION_KEY = "pdn_train"  # of an export's metadata: `checkpoint.VERSION`
DATA_KINDS = {  # of an export's data section, which may have been written by hand
    "seq_len": (lambda value: type(value) is int and value >= 1, "a whole number above 0"),
    "reset_at_documents": (lambda value: isinstance(value, bool), "true or false"),
    "val_path": (lambda value: isinstance(value, str), "a folder's name"),
}
TIED = ("embedding.weight", "head.weight")


class WeightsError(ValueError):
    """Weights cannot be found, read or used; the message names what and the way out."""


# What finding, reading or loading weights raises of what a user can mend
UNREADABLE = (WeightsError, CheckpointError, ConfigError, TokenizerError)


@dataclass(frozen=True)
class Source:
    """A checkpoint or an export, found by `find`."""

    folder: Path
    format: Literal["checkpoint", "safetensors", "fla"]
    model: ModelConfig
    data: dict  # the data section of its configuration; an export has `interchange.DATA` of it
    tokenizer: Path | None

    def weights(self) -> dict[str, Tensor]:
        """Every parameter and buffer by name, on the CPU: fp32 masters, both names of a tied head. Raises WeightsError."""
        weights = _READ[self.format](self)
        stored = next((name for name in TIED if name in weights), None)
        if self.model.tie_embeddings and stored is not None:
            weights |= {name: weights.get(name, weights[stored]) for name in TIED}
        return weights


def find(path: str | Path) -> Source:
    """What lies at `path`: a run folder, a checkpoint or an export. Raises WeightsError or CheckpointError where none is whole."""
    try:
        return _find(Path(path))
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error}") from error


def _find(path: Path) -> Source:
    if (path / SINGLE).exists() or (path / INDEX).exists():
        if (path / "config.json").exists():
            return _find_fla(path)
        tree = _read_tree(path / "config.yaml", lambda text: config.parse(text, str(path / "config.yaml")))
        data = _data_settings(tree.get("data") or {}, path)
        return Source(path, "safetensors", _model_config(tree, path), data, _if_there(path / "tokenizer.model"))
    if RunDir(path).checkpoints.is_dir():
        os.listdir(RunDir(path).checkpoints)  # a glob finds nothing in a folder that it may not read
        path = checkpoint.newest(RunDir(path).checkpoints)
        tree = _read_tree(path / STATE, json.loads)["config"]
    elif (path / STATE).exists():
        tree = _read_whole(path)["config"]
    else:
        raise WeightsError(
            f"{path} is no run folder (checkpoints/ is missing), no checkpoint ({STATE}) and no export ({SINGLE}); name one of these"
        )
    return Source(path, "checkpoint", _model_config(tree, path), tree["data"], _if_there(RunDir(path.absolute().parent.parent).tokenizer))


def _find_fla(path: Path) -> Source:
    tree = _read_tree(path / "config.json", json.loads)
    try:
        model, data = interchange.from_json(tree)
    except ValueError as error:
        raise WeightsError(f"{path} holds no model that this project has: {_said(error)}") from error
    return Source(path, "fla", model, _data_settings(data, path), _if_there(path / "tokenizer.model"))


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """`Source.weights` of what lies at `path`. Raises WeightsError or CheckpointError where there are none that are whole."""
    return find(path).weights()


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
    path: str | Path | Source, device: torch.device | str, dtype: torch.dtype = torch.float32, kernel: str | None = None
) -> tuple[LanguageModel, Tokenizer | None]:
    """The model at `path` (a run, a checkpoint, an export, or what `find` found) with its weights, and its tokenizer where one lies there.

    kernel: the backend to run it on; None: that of its configuration. Raises WeightsError or CheckpointError.
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise WeightsError(f"device {device}: torch finds no GPU here; use the device cpu")
    source = path if isinstance(path, Source) else find(path)
    settings = source.model if kernel is None else source.model.model_copy(update={"kernel": kernel})
    _require_kernel(settings.kernel, device, source)
    model = LanguageModel(settings)
    load_into(model, source.weights(), source.folder)
    tokenizer = None if source.tokenizer is None else Tokenizer.load(source.tokenizer)
    return model.to(device=device, dtype=dtype).eval(), tokenizer


def _require_kernel(kernel: str, device: torch.device | str, source: Source) -> None:
    try:
        check_backend(kernel, torch.empty(0, device=device), "the model")
    except ValueError as error:
        whose = "its configuration's" if kernel == source.model.kernel else "the one asked for"
        raise WeightsError(f"{source.folder} cannot run on the kernel {kernel}, {whose}: {error}, that is --kernel torch") from None


def _read_fla(source: Source) -> dict[str, Tensor]:
    try:
        return interchange.from_fla({name: tensor.float() for name, tensor in _read_export(source.folder).items()}, source.model)
    except InterchangeError as error:
        raise WeightsError(f"{source.folder}: {error}") from error


def _read_own(folder: Path) -> dict[str, Tensor]:
    """An export in this project's own names, whose rows another version may order otherwise."""
    file = folder / SINGLE if (folder / SINGLE).exists() else next(iter(sorted(folder.glob("*.safetensors"))), None)
    if file is not None:
        _check_version(file)
    return _read_export(folder)


def _check_version(file: Path) -> None:
    try:
        file.open("rb").close()  # whose reason for a refusal is the right one
        with safe_open(file, "pt") as opened:
            found = (opened.metadata() or {}).get(VERSION_KEY)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"cannot read {file}: {error}; export again") from error
    if found != str(VERSION):
        raise WeightsError(f"{file} is of version {found}, this code reads {VERSION}: export the run again, or use the code that wrote it")


def _read_export(folder: Path) -> dict[str, Tensor]:
    if (folder / SINGLE).exists():
        return _read_file(folder / SINGLE)
    places = _read_tree(folder / INDEX, _places)
    files = {file: _read_file(folder / file) for file in sorted(set(places.values()))}
    missing = [f"{name} in {file}" for name, file in places.items() if name not in files[file]]
    if missing:
        raise WeightsError(f"{folder / INDEX} names {missing[0]}, which is not there; export again")
    return {name: files[file][name] for name, file in places.items()}


def _places(text: str) -> dict[str, str]:
    """Tensor -> file, of an index. Raises ValueError."""
    try:
        return TypeAdapter(dict[str, str]).validate_python(json.loads(text)["weight_map"])
    except (LookupError, TypeError, ValidationError):
        raise ValueError("it holds no weight_map of names to files; export again") from None


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        file.open("rb").close()  # whose reason for a refusal is the right one
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"cannot read {file}: {error}; export again") from error


def _read_checkpoint(folder: Path) -> dict[str, Tensor]:
    with contextlib.redirect_stdout(sys.stderr):  # on a CPU the import itself warns on stdout, where our callers print results
        from pdn_train.engine import gather_fp32_weights  # here, so that reading an export needs no DeepSpeed

    # A frozen parameter has no master
    return {name: tensor.float() if tensor.dtype == torch.bfloat16 else tensor for name, tensor in gather_fp32_weights(folder).items()}


def _read_published(folder: Path) -> dict[str, Tensor]:
    """A checkpoint that its run may give up meanwhile."""
    try:
        weights = _read_checkpoint(folder)
    except Exception:  # whatever the files' readers raise where one has gone
        _require_still_there(folder)
        raise
    _require_still_there(folder)
    return weights


def _require_still_there(folder: Path) -> None:
    """Raise WeightsError where a run that trains has given the checkpoint up meanwhile: its mark goes first."""
    if not (folder / checkpoint.COMPLETE).exists():
        raise WeightsError(
            f"{folder} was removed while it was read: its run trains on and keeps the newest only; give the command again, or let the run "
            "keep some (checkpoint.keep, checkpoint.keep_every)"
        )


_READ = {
    "checkpoint": lambda source: _read_published(source.folder),
    "safetensors": lambda source: _read_own(source.folder),
    "fla": _read_fla,
}


def _read_whole(folder: Path) -> dict:
    try:
        return checkpoint.read_whole(folder)
    except CheckpointError as error:
        raise WeightsError(f"{error}; name the run folder to get its newest whole checkpoint") from error


def _read_tree(file: Path, parse) -> dict:
    try:
        return parse(file.read_text())
    except (OSError, ValueError) as error:
        raise WeightsError(f"cannot read {file}: {error}") from error


def _model_config(tree: dict, path: Path) -> ModelConfig:
    try:
        return ModelConfig.model_validate(tree["model"])
    except (KeyError, ValueError) as error:
        raise WeightsError(f"{path}: its configuration has no usable model section: {_said(error)}") from error


def _data_settings(tree: object, path: Path) -> dict:
    """What an export says of its data; a key without a value is none."""
    if not isinstance(tree, dict):
        raise WeightsError(f"{path}: its configuration's data section is {tree!r}, no mapping")
    for key, (fits, kind) in DATA_KINDS.items():
        if tree.get(key) is not None and not fits(tree[key]):
            raise WeightsError(f"{path}: its data.{key}={tree[key]!r} is not {kind}")
    return {key: value for key, value in tree.items() if value is not None}


def _said(error: Exception) -> str:
    return explain(error, list(ModelConfig.model_fields)) if isinstance(error, ValidationError) else str(error)


def _if_there(file: Path) -> Path | None:
    return file if file.exists() else None
