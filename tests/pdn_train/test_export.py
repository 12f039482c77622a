"""Exports hold every tensor bit for bit and give the same loss back; what cannot be used is refused with its name."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from pdn_train import export
from pdn_train.checkpoint import folder_name
from pdn_train.config import ModelConfig
from pdn_train.export import INDEX, SINGLE, WeightsError

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
        loaded, tokenizer = export.load_model(place, "cpu")
        assert tokenizer is None and torch.equal(loss(loaded), loss(model))
        assert loaded.head.weight is loaded.embedding.weight
        assert equal(export.load_weights(place), model.state_dict())


def test_files_respect_the_limit_and_the_index_names_them(run, tmp_path):
    limit = 9_000  # the largest matrix has 12,288 bytes: it gets a file of its own
    export.export(run[0], tmp_path / "out", limit)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in run[1].state_dict().values())
    for file in set(index["weight_map"].values()):
        tensors = load_file(tmp_path / "out" / file)
        assert {n for n, f in index["weight_map"].items() if f == file} == set(tensors)
        assert sum(t.nbytes for t in tensors.values()) <= limit or len(tensors) == 1
    assert not (tmp_path / "out" / SINGLE).exists()


def test_an_export_of_an_export_is_the_same(run, tmp_path):
    export.export(run[0], tmp_path / "a", 10_000)
    export.export(tmp_path / "a", tmp_path / "b")
    export.export(tmp_path / "b", tmp_path / "c")
    assert (tmp_path / "b" / SINGLE).read_bytes() == (tmp_path / "c" / SINGLE).read_bytes()
    assert (tmp_path / "a" / "config.yaml").read_text() == (tmp_path / "c" / "config.yaml").read_text()
    source = export.find(tmp_path / "c")
    assert source.model == ModelConfig(**SMALL) and source.data == {"seq_len": 32, "reset_at_documents": False}


def test_a_checkpoint_that_stores_the_tied_matrix_once_gives_both_names(run, tmp_path):
    folder, model = run
    file = folder / "checkpoints" / folder_name(5) / "mp_rank_00_model_states.pt"
    torch.save({"module": {n: t for n, t in model.state_dict().items() if n != "head.weight"}}, file)
    export.export(folder, tmp_path / "out")
    assert equal(load_file(tmp_path / "out" / SINGLE), model.state_dict())


def test_dtype_and_kernel_can_be_chosen(run):
    model, _ = export.load_model(run[0], "cpu", torch.bfloat16, kernel="torch")
    assert model.embedding.weight.dtype == torch.bfloat16 and model.config.kernel == "torch"


# ---- real ZeRO checkpoints: a buffer and a frozen parameter too ----

ZERO = """
import sys, torch
from pathlib import Path
from pdn_train import config
from pdn_train.data import Batch
from pdn_train.engine import Engine
from pdn_train.model import LanguageModel
from pdn_train.world import World

out, small = Path(sys.argv[1]), eval(sys.argv[2])
world = World.detect(1, "cpu")
world.start(60)
for stage in (1, 2, 3):
    train = {"steps": 1, "micro_batch": 1, "global_batch": 2, "precision": "bf16"}
    optim = {"warmup_steps": 0}
    tree = {"run_dir": "r", "data": {"path": "d"}, "model": small, "train": train, "optim": optim, "parallel": {"zero": stage}}
    model = LanguageModel(config.build(tree, "test").model)
    model.init_weights(stage)
    model.register_buffer("scale", torch.tensor([0.5, 0.25]))
    model.norm.weight.requires_grad_(False)
    engine = Engine(model, config.build(tree, "test"), world)
    ids = torch.randint(0, 64, (1, 17), generator=torch.Generator().manual_seed(world.rank))
    engine.step([Batch(ids[:, :-1], ids[:, 1:], None, 16)], 0.1, 32)
    if world.leads:
        (out / f"stage_{stage}").mkdir()
    world.barrier()
    engine.save(out / f"stage_{stage}")
    masters = {}
    from deepspeed.utils import safe_get_full_fp32_param
    for name, parameter in engine.model.named_parameters():
        if parameter.requires_grad:
            masters[name] = safe_get_full_fp32_param(parameter).clone()
    if world.leads:
        torch.save(masters, out / f"masters_{stage}.pt")
    engine.close()
world.barrier()
world.stop()
"""


@pytest.fixture(scope="module")
def zero(tmp_path_factory):
    """The folder in which two ranks have saved one step of each ZeRO stage in bf16, and the masters they had."""
    folder = tmp_path_factory.mktemp("zero")
    (folder / "zero.py").write_text(ZERO)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(folder / "zero.py")]
    done = subprocess.run([*command, str(folder), repr(SMALL)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_checkpoints_export_masters_buffer_and_frozen_parameter(zero, tmp_path, stage):
    """Whole and cut: both names of the tied head are there and equal, and nothing is zero (DeepSpeed#1896, #3824, #6791)."""
    weights, masters = export._read_checkpoint(zero / f"stage_{stage}"), torch.load(zero / f"masters_{stage}.pt")
    assert not torch.equal(masters["embedding.weight"], masters["embedding.weight"].bfloat16().float())
    for limit in (None, 10_000):
        folder = tmp_path / f"out_{limit}"
        folder.mkdir()
        export.write_weights(folder, weights, limit)
        stored = export._read_export(folder)
        assert set(stored) == {*masters, "head.weight", "norm.weight", "scale"}
        assert all(torch.equal(stored[name], masters[name]) for name in masters)
        assert torch.equal(stored["head.weight"], stored["embedding.weight"])
        assert stored["scale"].tolist() == [0.5, 0.25] and torch.equal(stored["norm.weight"], torch.ones(32))
        assert all(tensor.any() and tensor.dtype == torch.float32 for tensor in stored.values())


# ---- refusals ----


def test_weights_of_another_shape_name_the_key_and_both_shapes(run, make_model):
    other = make_model(vocab_size=80)
    before = other.embedding.weight.clone()
    with pytest.raises(WeightsError, match=r"old/run do not fit.*embedding.weight is \[64, 32\] there and \[80, 32\] here"):
        export.load_into(other, export.load_weights(run[0]), "old/run")
    assert torch.equal(other.embedding.weight, before)
    with pytest.raises(WeightsError, match="blocks.0.mixer.output_bias is missing there.*and .* more"):
        export.load_into(make_model(recurrence="pkda"), export.load_weights(run[0]), "old/run")
    with pytest.raises(WeightsError, match="blocks.2.mixer_norm.weight is not in this model"):
        export.load_into(make_model(), make_model(num_layers=3).state_dict(), "old/run")


def test_two_different_heads_do_not_become_one(make_model):
    untied = make_model(tie_embeddings=False)
    with pytest.raises(WeightsError, match="embedding.weight and head.weight differ there and are one tensor here"):
        export.load_into(make_model(), untied.state_dict(), "x")
    export.load_into(untied, make_model().state_dict(), "x")  # the other way is possible
    assert torch.equal(untied.head.weight, untied.embedding.weight)


def test_an_existing_folder_is_refused_and_left_alone(run, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(WeightsError, match="out exists"):
        export.export(run[0], tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_failed_export_leaves_nothing(run, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(export, "_config_text", fail)
    with pytest.raises(OSError, match="disk full"):
        export.export(run[0], tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"run"}


def test_a_zero_matrix_or_a_missing_tensor_is_refused(run, tmp_path):
    folder, model = run
    file = folder / "checkpoints" / folder_name(5) / "mp_rank_00_model_states.pt"
    broken = {**model.state_dict(), "blocks.0.mlp.down_proj.weight": torch.zeros(32, 48)}
    torch.save({"module": broken}, file)
    with pytest.raises(WeightsError, match="blocks.0.mlp.down_proj.weight is all zero"):
        export.export(folder, tmp_path / "out")
    del broken["blocks.0.mlp.down_proj.weight"]
    torch.save({"module": broken}, file)
    with pytest.raises(WeightsError, match=r"blocks.0.mlp.down_proj.weight is None there, its configuration asks for \(32, 48\)"):
        export.export(folder, tmp_path / "out")


def test_what_is_no_source_is_said_so(run, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightsError, match=r"empty is no run folder \(checkpoints/ is missing\), no checkpoint"):
        export.find(tmp_path / "empty")
    (run[0] / "checkpoints" / folder_name(5) / "COMPLETE").unlink()
    with pytest.raises(WeightsError, match="has no COMPLETE file"):
        export.find(run[0] / "checkpoints" / folder_name(5))


def test_a_cut_file_is_said_so(run, tmp_path):
    export.export(run[0], tmp_path / "out")
    file = tmp_path / "out" / SINGLE
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=rf"cannot read .*{SINGLE}"):
        export.load_weights(tmp_path / "out")


def test_command_line(run, tmp_path, capsys):
    assert export.main([str(run[0]), str(tmp_path / "fla"), "--format", "fla"]) == 1
    assert "not available yet; use --format safetensors" in capsys.readouterr().err
    assert export.main([str(run[0]), str(tmp_path / "out"), "--max-shard-size", "0"]) == 1
    assert "--max-shard-size 0.0 is not above 0" in capsys.readouterr().err
    assert export.main([str(run[0]), str(tmp_path / "out"), "--max-shard-size", "0.01"]) == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert export.main([str(run[0]), str(tmp_path / "out")]) == 1
    assert "out exists" in capsys.readouterr().err
