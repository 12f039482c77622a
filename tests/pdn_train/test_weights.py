"""Weights come back from a run, a checkpoint and an export; what is damaged, missing or of another shape is refused with its name."""

import subprocess
import sys

import pytest
import torch

from pdn_train import export, weights
from pdn_train.checkpoint import CheckpointError, folder_name
from pdn_train.weights import INDEX, SINGLE, WeightsError

SMALL = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "head_dim": 16, "intermediate_size": 48, "vocab_size": 64}
STEP = f"checkpoints/{folder_name(5)}"


@pytest.fixture
def run(tmp_path, make_run, make_model):
    """A run folder and the model in it."""
    model = make_model()
    return make_run(tmp_path / "run", model), model


def equal(a: dict, b: dict) -> bool:
    return set(a) == set(b) and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


def test_a_checkpoint_that_stores_the_tied_matrix_once_gives_both_names(tmp_path, make_run, make_model):
    model = make_model()
    once = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    assert equal(weights.load_weights(make_run(tmp_path, model, stored=once)), model.state_dict())


def test_dtype_and_kernel_can_be_chosen(run):
    model, _ = weights.load_model(run[0], "cpu", torch.bfloat16, kernel="torch")
    assert model.embedding.weight.dtype == torch.bfloat16 and model.config.kernel == "torch"


def test_what_was_found_is_loaded_though_a_newer_checkpoint_appears(run, make_run, make_model, tmp_path):
    source = weights.find(run[0])
    newer = make_run(tmp_path / "other", make_model(num_layers=1), step=6) / "checkpoints" / folder_name(6)
    newer.rename(run[0] / "checkpoints" / folder_name(6))
    assert equal(weights.load_model(source, "cpu")[0].state_dict(), run[1].state_dict())
    assert weights.find(run[0]).model.num_layers == 1


def test_a_checkpoint_named_from_beside_it_finds_its_tokenizer(run, monkeypatch):
    (run[0] / "tokenizer.model").write_bytes(b"t")
    monkeypatch.chdir(run[0] / "checkpoints")
    assert weights.find(folder_name(5)).tokenizer.read_bytes() == b"t"


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
    for file, state in engine.files(out / f"stage_{stage}"):
        torch.save(state, file)
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
    tensors, masters = weights._read_checkpoint(zero / f"stage_{stage}"), torch.load(zero / f"masters_{stage}.pt")
    assert not torch.equal(masters["embedding.weight"], masters["embedding.weight"].bfloat16().float())
    for limit in (None, 10_000):
        folder = tmp_path / f"out_{limit}"
        folder.mkdir()
        export.write_weights(folder, tensors, limit)
        stored = weights._read_export(folder)
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
        weights.load_into(other, weights.load_weights(run[0]), "old/run")
    assert torch.equal(other.embedding.weight, before)
    with pytest.raises(WeightsError, match="blocks.0.mixer.output_bias is missing there.*and .* more"):
        weights.load_into(make_model(recurrence="pkda"), weights.load_weights(run[0]), "old/run")
    with pytest.raises(WeightsError, match="blocks.2.mixer_norm.weight is not in this model"):
        weights.load_into(make_model(), make_model(num_layers=3).state_dict(), "old/run")


def test_two_different_heads_do_not_become_one(make_model):
    untied = make_model(tie_embeddings=False)
    with pytest.raises(WeightsError, match="embedding.weight and head.weight differ there and are one tensor here"):
        weights.load_into(make_model(), untied.state_dict(), "x")
    weights.load_into(untied, make_model().state_dict(), "x")  # the other way is possible
    assert torch.equal(untied.head.weight, untied.embedding.weight)


@pytest.mark.parametrize("place", [".", STEP], ids=["run", "checkpoint"])
@pytest.mark.parametrize("damage", ["flipped bit", "cut", "missing"])
def test_a_damaged_checkpoint_is_refused(run, damage, place):
    file = run[0] / STEP / "mp_rank_00_model_states.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data[:-1] if damage == "cut" else data)
    if damage == "missing":
        file.unlink()
    with pytest.raises(
        (WeightsError, CheckpointError), match="no whole checkpoint" if place == "." else r"mp_rank_00_model_states.pt (has|is)"
    ):
        weights.load_weights(run[0] / place)


def test_what_is_no_source_is_said_so(run, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightsError, match=r"empty is no run folder \(checkpoints/ is missing\), no checkpoint"):
        weights.find(tmp_path / "empty")
    (run[0] / "checkpoints" / folder_name(5) / "COMPLETE").unlink()
    with pytest.raises(WeightsError, match="COMPLETE is missing; name the run folder"):
        weights.find(run[0] / "checkpoints" / folder_name(5))


def test_a_cut_file_is_said_so(run, tmp_path):
    export.export(run[0], tmp_path / "out")
    file = tmp_path / "out" / SINGLE
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=rf"cannot read .*{SINGLE}"):
        weights.load_weights(tmp_path / "out")


@pytest.mark.parametrize("read", [lambda folder: {}, lambda folder: (folder / "gone").read_bytes()])
def test_a_checkpoint_that_its_run_removes_meanwhile_is_said_so(run, monkeypatch, read):
    source = weights.find(run[0])
    monkeypatch.setattr("pdn_train.engine.gather_fp32_weights", read)
    (source.folder / "COMPLETE").unlink()
    with pytest.raises(WeightsError, match=f"{folder_name(5)} was removed while it was read: .* give the command again"):
        source.weights()


def test_what_may_not_be_read_is_said_so(run, tmp_path, monkeypatch):
    """Rights are those of the calls: a test may run as root, who has all."""
    export.export(run[0], tmp_path / "out")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", "that file")

    for name, path in (("pathlib.Path.exists", tmp_path / "out"), ("os.listdir", run[0]), ("pathlib.Path.open", tmp_path / "out")):
        with monkeypatch.context() as patch:
            patch.setattr(name, refuse)
            with pytest.raises(WeightsError, match="cannot read .*Permission denied: 'that file'"):
                weights.load_weights(path)


@pytest.mark.parametrize("index", ["null", "{}", '{"weight_map": []}', '{"weight_map": {"norm.weight": 3}}'])
def test_an_index_of_other_things_is_said_so(run, tmp_path, index):
    export.export(run[0], tmp_path / "out", 1000)
    (tmp_path / "out" / INDEX).write_text(index)
    with pytest.raises(WeightsError, match=rf"cannot read .*{INDEX}: it holds no weight_map of names to files"):
        weights.load_weights(tmp_path / "out")


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for the GPU that a machine lacks")
def test_a_gpu_that_is_not_there_is_said_so(run):
    with pytest.raises(WeightsError, match="device cuda: torch finds no GPU here; use the device cpu"):
        weights.load_model(run[0], "cuda")


@pytest.mark.parametrize("own, asked, whose", [("triton", None, "its configuration's"), ("torch", "triton", "the one asked for")])
def test_a_kernel_that_needs_a_gpu_is_said_so(tmp_path, make_run, make_model, monkeypatch, own, asked, whose):
    monkeypatch.setattr("kernels.passes._interpreted", lambda: False)
    folder = make_run(tmp_path / "run", make_model(kernel=own))
    with pytest.raises(WeightsError, match=f"cannot run on the kernel triton, {whose}: .* needs a CUDA device.*--kernel torch"):
        weights.load_model(folder, "cpu", kernel=asked)
