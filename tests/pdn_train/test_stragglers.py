"""Own time: what counts, and who is named."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from pdn_train import stragglers
from pdn_train.stragglers import OwnTime
from pdn_train.world import World


class Clock:
    """Stands still but for what is said to take time."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


CLOCK = Clock()


class Slow(nn.Module):
    def forward(self, seconds: float) -> None:
        CLOCK.now += seconds


@pytest.fixture
def world() -> World:
    return World(0, 0, 1, 1, torch.device("cpu"))


def test_forward_passes_in_training_mode_and_reading_count(world, monkeypatch):
    heard = []
    monkeypatch.setattr(World, "gather", lambda self, said: heard.append(said[1]) or [said])
    monkeypatch.setattr(stragglers, "time", CLOCK)
    model = Slow()
    own = OwnTime(model, world)
    for seconds in (1.0, 2.0):
        model(seconds)
        CLOCK.now += 10
    with own.reading():
        CLOCK.now += 4
    model.eval()
    model(100.0)
    own.report(2)
    own.report(1)
    assert heard == [3.5, 0.0]


@pytest.mark.parametrize(
    "reports, named",
    [
        ([[1.0, 1.0, 1.0, 2.0]] * 2, [3]),
        ([[1.0, 1.0, 1.0, 2.0], [1.0, 2.0, 1.0, 1.0]], []),  # not the same one: noise
        ([[1.0, 1.0, 1.0, 1.2]] * 3, []),
        ([[1.0, 2.0]] * 3, [1, 1]),
    ],
)
def test_who_is_slow_twice_is_named(world, monkeypatch, caplog, reports, named):
    own = OwnTime(Slow(), world)
    with caplog.at_level(logging.WARNING, logger="pdn_train.stragglers"):
        for times in reports:
            monkeypatch.setattr(World, "gather", lambda self, said, times=times: [(f"node{i}", t) for i, t in enumerate(times)])
            own.report(1)
    assert [record.args[0] for record in caplog.records] == named
    for record in caplog.records:
        assert f"rank {record.args[0]} on node{record.args[0]} holds the others up" in record.message
