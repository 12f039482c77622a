"""Exports hold every tensor bit for bit and give the same loss back, appear whole or not at all, and refuse what is not whole."""

import json

import pytest
import torch
from safetensors.torch import load_file

from pdn_train import export, weights
from pdn_train.checkpoint import folder_name
from pdn_train.config import ModelConfig
from pdn_train.weights import INDEX, SINGLE, WeightsError

SMALL = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "head_dim": 16, "intermediate_size": 48, "vocab_size": 64}


def loss(model) -> torch.Tensor:
    ids = torch.randint(0, 64, (2, 33), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(ids[:, :-1], ids[:, 1:])


@pytest.fixture
def run(tmp_path, make_run, make_model):
    """A run folder and the model in it."""
    model = make_model()
    return make_run(tmp_path / "run", model), model


def equal(a: dict, b: dict) -> bool:
    return set(a) == set(b) and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


# ---- round trips ----


@pytest.mark.parametrize("limit", [None, 20_000], ids=["whole", "cut"])
def test_every_tensor_comes_back_and_the_loss_is_the_same_bits(run, tmp_path, limit):
    folder, model = run
    export.export(folder, tmp_path / "out", limit)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert equal(stored, model.state_dict()) and all(tensor.any() for tensor in stored.values())
    assert torch.equal(stored["embedding.weight"], stored["head.weight"])
    assert (len(files) == 1) == (limit is None)
    for place in (folder, folder / "checkpoints" / folder_name(5), tmp_path / "out"):
        loaded, tokenizer = weights.load_model(place, "cpu")
        assert tokenizer is None and torch.equal(loss(loaded), loss(model))
        assert loaded.head.weight is loaded.embedding.weight
        assert equal(weights.load_weights(place), model.state_dict())


def test_files_respect_the_limit_and_the_index_names_them(run, tmp_path):
    limit = 9_000  # the largest matrix has 12,288 bytes: it gets a file of its own
    export.export(run[0], tmp_path / "out", limit)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in run[1].state_dict().values())
    for file in set(index["weight_map"].values()):
        tensors = load_file(tmp_path / "out" / file)
        assert {n for n, f in index["weight_map"].items() if f == file} == set(tensors)
        assert sum(t.nbytes for t in tensors.values()) <= limit or len(tensors) == 1
        assert (tmp_path / "out" / file).stat().st_mode == (tmp_path / "out" / INDEX).stat().st_mode
    assert not (tmp_path / "out" / SINGLE).exists()


def test_an_export_of_an_export_is_the_same(run, tmp_path):
    export.export(run[0], tmp_path / "a", 10_000)
    export.export(tmp_path / "a", tmp_path / "b")
    export.export(tmp_path / "b", tmp_path / "c")
    assert (tmp_path / "b" / SINGLE).read_bytes() == (tmp_path / "c" / SINGLE).read_bytes()
    assert (tmp_path / "a" / "config.yaml").read_text() == (tmp_path / "c" / "config.yaml").read_text()
    source = weights.find(tmp_path / "c")
    assert source.model == ModelConfig(**SMALL) and source.data == {"seq_len": 32, "reset_at_documents": False}


# ---- refusals ----


@pytest.mark.parametrize("limit", [None, 20_000])
def test_one_of_another_version_is_refused_with_the_way_out(run, tmp_path, monkeypatch, limit):
    """Its rows may have another order, which no shape shows."""
    monkeypatch.setattr(export, "VERSION", 2)
    export.export(run[0], tmp_path / "old", limit)
    with pytest.raises(WeightsError, match="is of version 2, this code reads 3: export the run again"):
        weights.load_weights(tmp_path / "old")


def test_an_existing_folder_is_refused_and_left_alone(run, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(WeightsError, match="out exists"):
        export.export(run[0], tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_failed_export_leaves_nothing(run, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(export, "_config_text", fail)
    with pytest.raises(WeightsError, match="cannot write .*/out: disk full"):
        export.export(run[0], tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"run"}


def test_a_zero_matrix_or_a_missing_tensor_is_refused(tmp_path, make_run, make_model):
    model, name = make_model(), "blocks.0.mlp.down_proj.weight"
    tensors = {**model.state_dict(), name: torch.zeros(32, 48)}
    with pytest.raises(WeightsError, match=f"{name} is all zero"):
        export.export(make_run(tmp_path / "zero", model, stored=tensors), tmp_path / "out")
    del tensors[name]
    with pytest.raises(WeightsError, match=rf"{name} is None there, its configuration asks for \(32, 48\)"):
        export.export(make_run(tmp_path / "missing", model, stored=tensors), tmp_path / "out")


def test_command_line(run, tmp_path, capsys):
    assert export.main([str(run[0]), str(tmp_path / "fla"), "--format", "fla"]) == 0
    assert json.loads((tmp_path / "fla" / "config.json").read_text())["model_type"] == "precond_gated_deltanet"
    assert export.main([str(run[0]), str(tmp_path / "out"), "--max-shard-size", "0"]) == 1
    assert "--max-shard-size 0.0 is no finite number above 0" in capsys.readouterr().err
    assert export.main([str(run[0]), str(tmp_path / "out"), "--max-shard-size", "nan"]) == 1
    assert "--max-shard-size nan" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert export.main([str(run[0]), str(tmp_path / "file" / "out")]) == 1
    assert f"error: cannot write {tmp_path / 'file' / 'out'}: " in capsys.readouterr().err
    assert export.main([str(run[0]), str(tmp_path / "out"), "--max-shard-size", "0.01"]) == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert export.main([str(run[0]), str(tmp_path / "out")]) == 1
    assert "out exists" in capsys.readouterr().err
