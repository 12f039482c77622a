"""The kernels compiled before the first step are all that a step launches; without a GPU, in Triton's interpreter, nothing is compiled."""

import os

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from kernels import launch  # noqa: E402
from pdn_train import compiling  # noqa: E402
from pdn_train.config import build  # noqa: E402
from pdn_train.model import LanguageModel  # noqa: E402

DEVICE = torch.device("cuda", torch.cuda.current_device()) if GPU else torch.device("cpu")
MODEL = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "head_dim": 16, "intermediate_size": 48, "vocab_size": 64, "kernel": "triton"}


def configured(recurrence, data, train):
    tree = {"run_dir": "unused", "model": MODEL | {"recurrence": recurrence}, "data": {"path": "unused", "seq_len": 32} | data}
    return build(tree | {"train": {"micro_batch": 2, "global_batch": 2, "precision": "fp32"} | train}, "test")


def step(config):
    """And what validation runs."""
    model = LanguageModel(config.model, config.train.activation_checkpoint)
    model.init_weights(0)
    ids, cu_seqlens = torch.arange(64, device=DEVICE).view(2, 32), None
    if config.data.reset_at_documents:
        ids, cu_seqlens = ids.view(1, -1), torch.tensor([0, 5, 32, 64], dtype=torch.int32)
    model.to(DEVICE)(ids, ids, cu_seqlens).backward()
    with torch.no_grad():
        model(ids, ids, cu_seqlens)


class Lookups(dict):
    """Compiled kernels, and which were asked for."""

    def __init__(self):
        super().__init__()
        self.asked = set()

    def get(self, place):
        self.asked.add(place)
        return super().get(place)


@pytest.fixture
def begun(monkeypatch):
    """The variants that are begun to be compiled."""
    places, begin = set(), launch._begin

    def on_begin(place, *rest):
        places.add(place)
        if GPU:
            begin(place, *rest)

    monkeypatch.setattr(launch, "_begin", on_begin)
    monkeypatch.setattr(launch, "_compiled", Lookups())
    return places


@pytest.mark.parametrize(
    "recurrence, data, train",
    [
        ("pgdn", {}, {"activation_checkpoint": "selective"}),
        ("pkda", {"reset_at_documents": True}, {}),
    ],
)
def test_they_are_all_that_a_step_launches(recurrence, data, train, begun):
    config = configured(recurrence, data, train)
    compiling.compile_kernels(config, DEVICE)
    assert begun and not launch._compiled.asked
    step(config)
    assert launch._compiled.asked == begun


def test_without_triton_there_are_none(begun):
    config = configured("pgdn", {}, {})
    plain = config.model.model_copy(update={"kernel": "torch"})
    compiling.compile_kernels(config.model_copy(update={"model": plain}), DEVICE)
    assert not begun
