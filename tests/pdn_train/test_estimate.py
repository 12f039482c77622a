"""Parameters and FLOPs against the model itself and against sums by hand; memory against what autograd really keeps."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from kernels import kept
from kernels.cross_entropy import CHUNK_LOGITS
from kernels.recurrence import RECURRENCES
from pdn_train import config, estimate
from pdn_train.config import ConfigError, ModelConfig
from pdn_train.model import CONV_WIDTH, LanguageModel

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels' own files are imported, by the first call

SHAPES = [
    {"recurrence": name, "hidden_size": 40, "num_heads": 3, "head_dim": 16, "num_layers": 2, "vocab_size": 70} for name in RECURRENCES
]
OPTIONS = [{"recurrence": "pgdn", "tie_gates": True}, {"recurrence": "pdn", "tie_gates": True}, {"tie_embeddings": False}]


def build(world_model: dict, **sections) -> config.Config:
    return config.build({"run_dir": "r", "data": {"path": "d"}, "model": world_model, **sections}, "test")


@pytest.mark.parametrize(
    "gpus, model, sections, said",
    [
        (0, {}, {}, "has no GPU; launch.gpus_per_node=8: training here would run on CPUs over gloo"),
        (0, {}, {"train": {"device": "cuda"}}, ": training here would stop at train.device=cuda, which needs a GPU"),
        (0, {"kernel": "triton"}, {}, "training here would stop at model.kernel=triton, which needs a GPU"),
        (1, {}, {"launch": {"nodes": 2}}, "has 1 GPU; launch.gpus_per_node=8 on each of launch.nodes=2"),
        (4, {}, {"train": {"device": "cpu"}}, "has 4 GPUs; launch.gpus_per_node=8, and train.device=cpu computes on CPUs over gloo"),
    ],
)
def test_a_dry_run_says_what_this_machine_has(gpus, model, sections, said):
    assert estimate.machine(build(model, **sections), gpus).endswith(said)


@pytest.mark.parametrize("shape", SHAPES + [{**SHAPES[0], **option} for option in OPTIONS], ids=str)
def test_parameters_and_matrices_are_the_models(shape):
    with torch.device("meta"):
        model = LanguageModel(ModelConfig(**shape))
    assert estimate.parameters(model.config) == sum(p.numel() for p in model.parameters())
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    assert estimate.matrix_flops(model.config) == 2 * (linear + model.head.weight.numel())


def test_flops_by_hand():
    """GDN at 340M. A block: 1024 (3072 + 16) + 1024^2 + 3 x 1024 x 2816 = 12,861,440 numbers; the head 32,768,000.

    2 (24 x 12,861,440 + 32,768,000) = 682,885,120. A token-head of the recurrence: 10 x 64 x 128 + 6 x 128^2 + 2/3 x 64^2 = 182,954.67;
    24 x 8 of them 35,127,296.
    """
    run = build({"recurrence": "gdn"})
    assert estimate.matrix_flops(run.model) == 682_885_120
    assert estimate.recurrence_flops(run.model) == pytest.approx(35_127_296)
    assert estimate.flops_per_token(run) == pytest.approx(3 * (682_885_120 + 35_127_296))


def test_matrix_flops_are_what_torch_counts():
    """Forward and backward products of the Linear layers and the head (torch counts the recurrence's too: they are taken off, as bmm)."""
    run = build({**SHAPES[2], "recurrence": "pkda", "num_heads": 8})  # so that no columns are filled up
    model, ids = LanguageModel(run.model), torch.zeros(2, 64, dtype=torch.long)
    model.init_weights(0)
    with FlopCounterMode(display=False) as counter:
        model(ids, ids).backward()
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert counted == 3 * estimate.matrix_flops(run.model) * 128


def test_peaks():
    assert estimate.peak_flops("NVIDIA H100 80GB HBM3") == estimate.peak_flops("NVIDIA H200") == 989e12
    assert estimate.peak_flops("NVIDIA H100 PCIe") == 756e12 and estimate.peak_flops("NVIDIA H100 NVL") == 835e12
    for name in ("cpu", "NVIDIA H200 NVL", "NVIDIA GH200 480GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        assert estimate.peak_flops(name) is None


def test_numbers_shared_with_model_and_loss():
    assert estimate.LOSS_LOGITS == CHUNK_LOGITS and estimate.CONV_WIDTH == CONV_WIDTH


# ---- memory ----


@pytest.mark.parametrize(
    "zero, per_parameter",
    [(1, 2 + 2 + 4 + (4 + 8) / 4), (2, 2 + (2 + 4) + (4 + 4 + 8) / 4), (3, (2 + 2 + 4 + 4 + 8) / 4)],
)
def test_states_by_stage(zero, per_parameter):
    """Of a step so short that its activations are less than the gradients, and the two together count as the latter."""
    small = {"data": {"path": "d", "seq_len": 8}, "train": {"micro_batch": 1, "global_batch": 4, "activation_checkpoint": "block"}}
    memory = estimate.memory_per_gpu(build({}, parallel={"zero": zero}, **small), 4)
    assert 0 < memory["activations"] < memory["gradients"]
    states = sum(memory[name] for name in ("weights", "gradients", "gradient sums", "masters", "moments", "activations"))
    assert states == pytest.approx(342_184_896 * per_parameter)
    assert memory["communication buffers"] == (4 * 342_184_896 if zero == 3 else 0)
    assert estimate.memory_per_gpu(build({}), 1)["communication buffers"] == 0
    alone, one = (estimate.memory_per_gpu(build({}, parallel={"zero": stage}, **small), 1) for stage in (1, 2))
    assert alone == one


def test_gradients_take_the_place_of_activations():
    assert estimate.memory_per_gpu(build({}), 4)["gradients"] == 0


def kept_by_autograd(shape: dict, mode: str, dtype: torch.dtype, batch: int, length: int) -> int:
    """Bytes of the tensors, weights apart, that a forward pass leaves for the backward, or that a checkpointed one keeps elsewhere."""
    model = LanguageModel(ModelConfig(**shape), mode)
    model.init_weights(0)
    model.to(dtype)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.zeros(batch, length, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids, ids)
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)


@pytest.mark.parametrize("name", list(RECURRENCES))
def test_activations_are_near_what_autograd_keeps(name):
    """The growth from one layer to two, within 8 %."""
    shape = {"recurrence": name, "hidden_size": 128, "num_heads": 2, "head_dim": 64, "intermediate_size": 256, "vocab_size": 70}
    found = [kept_by_autograd({**shape, "num_layers": n}, "none", torch.bfloat16, 1, 512) for n in (1, 2)]
    train = {"micro_batch": 1, "global_batch": 4}
    said = [
        estimate.memory_per_gpu(build({**shape, "num_layers": n}, data={"path": "d", "seq_len": 512}, train=train), 4)["activations"]
        for n in (1, 2)
    ]
    assert said[1] - said[0] == pytest.approx(found[1] - found[0], rel=0.08)


def test_checkpointing_keeps_what_the_formula_says():
    """block: a block's input. selective: and the outputs of qkv, gates, out and gate_up: 3 x 64 + 8 + 40 + 2 x 96 numbers."""
    shape = {"hidden_size": 40, "num_heads": 2, "head_dim": 32, "intermediate_size": 96, "vocab_size": 70}
    sections = {"data": {"path": "d", "seq_len": 64}}

    def growth(mode):
        train = {"micro_batch": 4, "global_batch": 4, "activation_checkpoint": mode}
        one, two = (estimate.memory_per_gpu(build({**shape, "num_layers": n}, train=train, **sections), 1)["activations"] for n in (1, 2))
        return (two - one) / (4 * 64)

    found = [kept_by_autograd({**shape, "num_layers": n}, "block", torch.bfloat16, 4, 64) for n in (1, 2)]
    assert growth("block") == 2 * 40 == (found[1] - found[0]) / (4 * 64)
    assert growth("selective") == 2 * 40 + 2 * (3 * 64 + 4 * 2 + 40 + 2 * 96)


@pytest.fixture
def idle_kernels(monkeypatch):
    """The interpreter without its work: outputs hold nothing, and have their sizes."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    if GPU:
        pytest.skip("tensors are counted on the CPU")
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda self, *arguments, **constants: None)


@pytest.mark.parametrize("dtype, size", [(torch.bfloat16, 2), (torch.float32, 4)], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", list(RECURRENCES))
def test_triton_activations_are_what_autograd_keeps(name, dtype, size, idle_kernels):
    """The growth from one layer to two; chunks are whole. Within 0.1 %: centres, and alignments, are not counted."""
    shape = {"recurrence": name, "kernel": "triton"}
    shape |= {"hidden_size": 40, "num_heads": 3, "head_dim": 64, "intermediate_size": 56, "vocab_size": 70}
    found = [kept_by_autograd({**shape, "num_layers": n}, "none", dtype, 1, 512) for n in (1, 2)]
    train = {"micro_batch": 1, "global_batch": 1, "precision": "bf16" if size == 2 else "fp32"}
    data = {"path": "d", "seq_len": 512}
    said = [estimate.memory_per_gpu(build({**shape, "num_layers": n}, data=data, train=train), 1)["activations"] for n in (1, 2)]
    assert said[1] - said[0] == pytest.approx(found[1] - found[0], rel=1e-3)


def test_triton_selective_keeps_products_and_stages(monkeypatch, idle_kernels):
    """What is held back from a second run, and the block's input."""
    held = []

    class Listed(kept.Keep):
        def __init__(self, made, everything):
            super().__init__(made, everything)
            held.append(made)

    monkeypatch.setattr(kept, "Keep", Listed)
    shape = {"recurrence": "pkda", "hidden_size": 40, "num_heads": 3, "head_dim": 64, "intermediate_size": 56, "vocab_size": 70}
    model = LanguageModel(ModelConfig(kernel="triton", num_layers=1, **shape), "selective").bfloat16()
    ids = torch.zeros(2, 128, dtype=torch.long)
    loss = model(ids, ids)  # whose graph holds what was made
    tensors = [x for made in held[0] for x in made.results or () if x is not None]
    assert loss.requires_grad
    found = sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())
    train = {"micro_batch": 2, "global_batch": 2, "activation_checkpoint": "selective"}
    one, two = (
        estimate.memory_per_gpu(build({**shape, "kernel": "triton", "num_layers": n}, data={"path": "d", "seq_len": 128}, train=train), 1)
        for n in (1, 2)
    )
    assert two["activations"] - one["activations"] == pytest.approx(found + 2 * 128 * 40 * 2, rel=0.01)


# ---- the report ----


def test_report_says_the_batch_and_the_tokens():
    text = estimate.report(build({}), 8)
    assert "342,184,896 parameters (342.2M)" in text
    assert "16 sequences x 2 micro-batches x 8 data-parallel ranks = 256 sequences x 2048 tokens = 524,288 tokens a step" in text
    assert "30,000 steps = 15.729B tokens" in text
    assert "ranks a sequence" not in text
    assert "x 4 micro-batches x 4 data-parallel" in estimate.report(build({}, parallel={"sequence": 2}), 8)
    assert "2 ranks a sequence" in estimate.report(build({}, parallel={"sequence": 2}), 8)


def test_report_says_what_data_is_there(tmp_path, make_shards):
    """By hand: 20 documents of 9 ids and an end are 200 tokens, 24 samples of 8; 6 x 4 samples are taken of them all."""
    a, b, short = (str(tmp_path / name) for name in ("a", "b", "short"))
    for folder, count in ((a, 20), (b, 10), (short, 1)):
        make_shards(tmp_path / folder, [[5] * 9] * count)
    gone, train = str(tmp_path / "gone"), {"steps": 6, "global_batch": 4, "micro_batch": 4}

    def said(seq_len: int = 8, **data) -> str:
        run = build({}, data={"seq_len": seq_len, **data}, train=train, optim={"warmup_steps": 0})
        return estimate.report(run, 1).split("\ndata      ")[1].split("\nmemory")[0]

    assert said(path=a) == f"{a}: 200 tokens, 1 epochs"
    assert said(path={a: 1.0, b: 3.0}, val_path=b) == "\n          ".join(
        (f"{a}: 200 tokens, 0.25 epochs", f"{b}: 100 tokens, 1.5 epochs", f"{b}: 100 tokens, validation")
    )
    assert said(path=a, val_path=gone) == f"{a}: 200 tokens, 1 epochs\n          {gone} is not a folder: name one made by " + (
        "`python -m data_prep.prepare`"
    )
    assert f"{short}: 10 tokens, fewer than one sample of data.seq_len=10, which needs 11" == said(10, path=short)
    assert said(path=None, mqar_pairs=2, mqar_examples=16) == "16 examples of 2 pairs, 1.5 epochs"


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match="train.global_batch=256 is not a multiple"):
        estimate.report(build({}), 7)


def test_it_needs_no_torch():
    code = "import sys, pdn_train.estimate; sys.exit('torch' in sys.modules or 'deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
