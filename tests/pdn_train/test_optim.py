"""Schedules by hand-computed values; the guarded AdamW against torch's own clipping and against a step not taken."""

from __future__ import annotations

import math

import pytest
import torch

from pdn_train.config import ModelConfig, OptimConfig
from pdn_train.model import LanguageModel
from pdn_train.optim import build_optimizer, guard, learning_rate, set_learning_rate


def test_cosine_by_hand():
    """Peak 3e-4, floor 3e-5, warm-up 10, 100 steps: the rates a resumed run must continue with."""
    config = OptimConfig(lr=3e-4, min_lr=3e-5, warmup_steps=10)
    assert learning_rate(50, config, 100) == pytest.approx(1.884e-4, abs=5e-8)
    assert learning_rate(60, config, 100) == pytest.approx(1.416e-4, abs=5e-8)
    assert learning_rate(10, config, 100) == 3e-4
    assert learning_rate(100, config, 100) == pytest.approx(3e-5)
    assert learning_rate(5, config, 100) == pytest.approx(1.5e-4)


def test_warmup_starts_where_it_is_told():
    config = OptimConfig(lr=4e-4, warmup_start=4e-5, warmup_steps=1024)
    assert learning_rate(0, config, 30000) == 4e-5
    assert learning_rate(512, config, 30000) == pytest.approx(2.2e-4)
    assert learning_rate(1024, config, 30000) == 4e-4


def test_wsd_and_constant():
    wsd = OptimConfig(lr=1.0, min_lr=0.0, warmup_steps=10, schedule="wsd", decay_steps=20)
    assert [learning_rate(n, wsd, 100) for n in (10, 80, 90, 100)] == pytest.approx([1.0, 1.0, 0.5, 0.0])
    constant = OptimConfig(lr=1.0, min_lr=0.0, warmup_steps=0, schedule="constant")
    assert {learning_rate(n, constant, 100) for n in (0, 50, 100)} == {1.0}


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def small_model(device: str = "cpu") -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3)).to(device)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model


def norm_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("clip", [0.0, 0.5, 100.0])
def test_guarded_step_equals_torch_clipping_and_adamw(clip, device):
    ours, theirs = small_model(device), small_model(device)
    config = OptimConfig(lr=0.1, min_lr=0.0, clip=clip, weight_decay=0.1, decay_all=True, warmup_steps=0)
    optimizer = build_optimizer(ours.named_parameters(), config)
    assert guard(optimizer, norm_of(ours), clip).item() == 0
    optimizer.step()
    if clip:
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip)
    torch.optim.AdamW(theirs.parameters(), lr=0.1, betas=config.betas, eps=config.eps, weight_decay=0.1).step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nonfinite_step_changes_nothing(bad, device):
    model = small_model(device)
    optimizer = build_optimizer(model.named_parameters(), OptimConfig(lr=0.1, min_lr=0.0, warmup_steps=0))
    guard(optimizer, norm_of(model), 1.0)
    optimizer.step()
    before = [p.clone() for p in model.parameters()] + [t.clone() for s in optimizer.state.values() for t in s.values()]
    model[0].weight.grad[1, 2] = bad
    assert guard(optimizer, norm_of(model), 1.0).item() == 1
    optimizer.step()
    after = [*model.parameters()] + [t for s in optimizer.state.values() for t in s.values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_only_matrices_decay_unless_all_do():
    model = torch.nn.ModuleDict({"conv": torch.nn.Linear(4, 4), "up": torch.nn.Linear(4, 4)})
    groups = build_optimizer(model.named_parameters(), OptimConfig(weight_decay=0.1)).param_groups
    assert [(len(g["params"]), g["weight_decay"]) for g in groups] == [(1, 0.1), (3, 0.0)]
    groups = build_optimizer(model.named_parameters(), OptimConfig(weight_decay=0.1, decay_all=True)).param_groups
    assert [(len(g["params"]), g["weight_decay"]) for g in groups] == [(4, 0.1)]


def test_the_rate_reaches_every_group():
    optimizer = build_optimizer(small_model().named_parameters(), OptimConfig())
    set_learning_rate(optimizer, 0.25)
    assert {g["lr"] for g in optimizer.param_groups} == {0.25}


@pytest.mark.parametrize("decay_all", [True, False])
def test_weights_laid_out_in_order_start_at_whole_16_bytes(decay_all):
    config = ModelConfig(recurrence="pgdn", hidden_size=48, num_layers=2, num_heads=3, head_dim=16, vocab_size=64)
    optimizer = build_optimizer(LanguageModel(config).named_parameters(), OptimConfig(decay_all=decay_all))
    odd = 0
    for group in optimizer.param_groups:
        start = 0
        for parameter in group["params"]:
            whole = parameter.numel() % 8 == 0
            assert start % 8 == 0 or not whole, tuple(parameter.shape)
            odd += not whole
            start += parameter.numel()
    assert odd >= 4  # the gates' rates of 3 heads
