"""A run folder without a run: what evaluation, generation and export read."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from pdn_train import config
from pdn_train.checkpoint import VERSION, folder_name
from pdn_train.config import ModelConfig
from pdn_train.model import LanguageModel


@pytest.fixture(scope="session")
def make_model():
    """make_model(**changes to the model section) -> a tiny LanguageModel; no parameter of it is zero, as some are initially."""

    def make(**changes) -> LanguageModel:
        small = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "head_dim": 16, "intermediate_size": 48, "vocab_size": 64}
        model = LanguageModel(ModelConfig(**(small | changes)))
        for i, parameter in enumerate(model.parameters()):
            parameter.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(i))
        return model

    return make


@pytest.fixture(scope="session")
def make_run():
    """make_run(folder, model, data={}, tokenizer=None, stored=None, step=5) -> folder.

    A run folder with one published checkpoint, laid out as DeepSpeed's stage 0 leaves it. data: keys of the data section;
    stored: the tensors in the checkpoint, by default the model's.
    """

    def make(
        folder: Path,
        model: LanguageModel,
        data: dict | None = None,
        tokenizer: Path | None = None,
        stored: dict | None = None,
        step: int = 5,
    ) -> Path:
        tree = {"run_dir": str(folder), "data": {"path": "d", "seq_len": 32, **(data or {})}, "model": model.config.model_dump()}
        settings = config.build(tree, "test")
        checkpoint = folder / "checkpoints" / folder_name(step)
        checkpoint.mkdir(parents=True)
        file = checkpoint / "mp_rank_00_model_states.pt"
        torch.save({"module": model.state_dict() if stored is None else stored}, file)
        entry = {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        state = {
            "version": VERSION,
            "progress": {"step": step, "position": 0, "tokens": 0},
            "world": {"size": 1, "zero": 0},
            "config": settings.model_dump(mode="json"),
            "data": {},
            "files": {file.name: entry},
        }
        text = json.dumps(state)
        (checkpoint / "state.json").write_text(text)
        (checkpoint / "COMPLETE").write_text(hashlib.sha256(text.encode()).hexdigest() + "\n")
        (folder / "config.yaml").write_text(config.dump(settings))
        if tokenizer is not None:
            shutil.copyfile(tokenizer, folder / "tokenizer.model")
        return folder

    return make
