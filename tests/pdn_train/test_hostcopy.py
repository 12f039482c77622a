"""Copies of nested state in host memory: equal to what torch.save would have stored of the original, and apart from it."""

from __future__ import annotations

import contextlib
import io
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pdn_train import hostcopy
from pdn_train.hostcopy import HostCopy

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    monkeypatch.setattr(hostcopy, "PIECE", 8192)  # a tensor then lies in several, and shares one with its neighbour
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


def state(device: torch.device) -> dict:
    flat = torch.randn(5000, device=device, generator=torch.Generator(device).manual_seed(0))
    module = OrderedDict(a=flat[:3000].view(50, 60), b=flat[3000:].view(40, 50).t())
    module._metadata = {"": {"version": 1}}
    return {
        "module": module,
        "groups": [nn.Parameter(torch.arange(3333.0, device=device).bfloat16()), (torch.ones(7, device=device, requires_grad=True), 3)],
        "step": torch.tensor(5.0, device=device),
        "empty": torch.empty(0, 4, device=device),
        "shape": torch.Size([2, 3]),
        "said": {"lr": 0.1, "names": ["a", "b"]},
    }


def tensors(tree: dict) -> list[torch.Tensor]:
    return [*tree["module"].values(), tree["groups"][0], tree["groups"][1][0], tree["step"], tree["empty"]]


def test_a_copy_is_what_was_there_and_stays(device):
    host, live, wanted = HostCopy(device), state(device), state(torch.device("cpu"))
    wanted["module"]["a"].copy_(live["module"]["a"])  # a GPU draws other numbers
    wanted["module"]["b"].copy_(live["module"]["b"])
    host.reserve(live)
    copied = host.take(live)
    for tensor in tensors(live):
        tensor.data.zero_()
    for ours, theirs in zip(tensors(copied), tensors(wanted), strict=True):
        assert ours.device.type == "cpu" and ours.stride() == theirs.stride() and ours.requires_grad == theirs.requires_grad
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs) and type(ours) is type(theirs)
    assert copied["module"]._metadata == {"": {"version": 1}} and type(copied["shape"]) is torch.Size
    assert copied["module"]["a"].untyped_storage().data_ptr() == copied["module"]["b"].untyped_storage().data_ptr()
    assert copied["said"] == live["said"] and copied["groups"][1][1] == 3
    host.close()


def test_the_file_is_the_one_that_torch_would_write_of_the_original(device):
    """Shared memory is stored once; no byte of a neighbour comes along."""
    host, live = HostCopy(device), state(device)
    sizes = []
    for tree in (live, host.take(live)):
        file = io.BytesIO()
        torch.save(tree, file)
        sizes.append(file.tell())
    assert abs(sizes[0] - sizes[1]) < 200, "the name of the device"
    host.close()


def test_memory_is_kept_for_the_next_copy_and_grows_with_the_state(device):
    host, live = HostCopy(device), state(device)
    first = host.take(live)["module"]["a"]
    live["module"]["a"].zero_()
    second = host.take(live)["module"]["a"]
    assert second.data_ptr() == first.data_ptr() and not second.any()
    live["more"] = torch.ones(100_000, device=device)
    assert host.take(live)["more"].sum() == 100_000
    host.close()


class Driver:
    """What locks pages, without a GPU."""

    def __init__(self, most: int = 1000):
        self.locked, self.most = {}, most

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        if len(self.locked) == self.most:
            return 2
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0


def test_every_copy_lies_in_memory_that_was_locked_in_one_go(monkeypatch):
    """CUDA refuses a copy that reaches from one locked piece into the next. After `close` none is locked."""
    monkeypatch.setattr(hostcopy, "PIECE", 8192)
    driver, copies, copy = Driver(), [], torch.Tensor.copy_
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))

    def noted(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        copies.append((target.data_ptr(), target.nbytes))
        return copy(target, source)

    live = state(torch.device("cpu"))
    host = HostCopy(torch.device("cuda", 0))
    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    host.take(live)
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    for start, size in copies:
        assert any(piece <= start and start + size <= piece + length for piece, length in driver.locked.items())
    assert len(copies) > 6 and len(driver.locked) > 3
    host.close()
    assert not driver.locked


def test_a_driver_that_locks_no_more_memory_is_told_of_and_the_copy_is_the_same(monkeypatch, caplog):
    driver = Driver(most=1)
    monkeypatch.setattr(hostcopy, "PIECE", 8192)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    live, host = state(torch.device("cpu")), HostCopy(torch.device("cuda", 0))
    copied = host.take(live)
    assert all(torch.equal(x, y) for x, y in zip(tensors(live), tensors(copied), strict=True))
    assert len(driver.locked) == 1 and "cudaHostRegister: error 2" in caplog.text
    host.close()
    assert not driver.locked


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_for_a_gpu_is_page_locked_until_it_is_given_back(monkeypatch):
    monkeypatch.setattr(hostcopy, "PIECE", 8192)
    host = HostCopy(torch.device("cuda", 0))
    copied = host.take(state(torch.device("cuda", 0)))["module"]["a"]
    assert copied.is_pinned()
    host.close()
    assert not copied.is_pinned()


def test_a_state_without_tensors_takes_no_memory(device):
    assert HostCopy(device).take([{"a": 1}]) == [{"a": 1}]
