"""The short way to a compiled kernel, without a GPU: a stand-in for the compiled kernel, and a counter for how it is called."""

import threading

import pytest

triton = pytest.importorskip("triton")
import torch  # noqa: E402
from triton import knobs  # noqa: E402

from kernels import cold  # noqa: E402
from kernels import launch as module  # noqa: E402
from kernels.launch import compiling, launch  # noqa: E402


class Compiled:
    """As Triton's: `run` is its launcher, `[grid]` loads it and makes a call that tells the profilers."""

    function, packed_metadata = 17, (4, 1)

    def __init__(self):
        self.calls, self.loaded = [], []

    def run(self, *arguments):
        self.calls.append(("short", arguments))

    def __getitem__(self, grid):
        self.loaded.append(grid)
        return lambda *arguments: self.calls.append((grid, arguments))


class Kernel:
    """As a jitted function."""

    def __init__(self):
        self.fn, self.made, self.compiled, self.warmed = object(), 0, Compiled(), []

    def warmup(self, *arguments, grid, **constants):
        self.warmed.append((arguments, grid, constants))
        if constants["C"] < 0:
            raise ValueError("no such size")
        return self.compiled

    def __getitem__(self, grid):
        def call(*arguments, **constants):
            self.made += 1
            return self.compiled

        return call


@pytest.fixture
def kernel(monkeypatch):
    class Active:
        @staticmethod
        def get_current_stream(device):
            return 23

    class Driver:
        active = Active

    monkeypatch.setattr(module, "driver", Driver)
    monkeypatch.setattr(module, "_compiled", {})
    return Kernel()


def test_a_variant_is_looked_up_once_and_then_launched_the_short_way(kernel):
    x = torch.zeros(4)
    for _ in range(3):
        launch(kernel, 5, "key", x, None, 7, C=64, num_warps=4)
    assert kernel.made == 1
    assert kernel.compiled.calls == [("short", (5, 1, 1, 23, 17, (4, 1), None, None, None, x.data_ptr(), None, 7, 64))] * 2


def test_another_key_constant_or_setting_is_another_variant(kernel):
    x = torch.zeros(4)
    for key, C, warps in (("a", 64, 4), ("b", 64, 4), ("a", 32, 4), ("a", 64, 8), ("a", 64, 4)):
        launch(kernel, 5, key, x, C=C, num_warps=warps)
    assert kernel.made == 4


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_profilers_of_triton_are_told(kernel, hook):
    listener, x = (lambda *_: None), torch.zeros(4)
    launch(kernel, 5, "key", x, C=64, num_warps=4)
    getattr(knobs.runtime, hook).add(listener)
    try:
        launch(kernel, 5, "key", x, C=64, num_warps=4)
    finally:
        getattr(knobs.runtime, hook).remove(listener)
    assert kernel.compiled.calls == [((5, 1, 1), (x.data_ptr(), 64))]


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_compiling_runs_nothing_and_compiles_each_new_variant_once(kernel, no_gpu):
    x = torch.zeros(4)
    launch(kernel, 5, "key", x, C=16, num_warps=4)
    with compiling(torch.device("cuda", 0)):
        for size in (16, 64, 64, 32):
            launch(kernel, 5, "key", x, None, 7, C=size, num_warps=4)
        apart = threading.Thread(target=launch, args=(kernel, 5, "key", x), kwargs={"C": 16, "num_warps": 4})
        apart.start()  # another thread's launches run
        apart.join()
    assert (kernel.made, len(kernel.compiled.calls)) == (1, 1)
    assert [(arguments, grid) for arguments, grid, _ in kernel.warmed] == [((torch.float32, None, 7), (5, 1, 1))] * 2
    assert kernel.compiled.loaded == [(5, 1, 1)] * 2  # the machine code too
    assert sorted(constants["C"] for *_, constants in kernel.warmed) == [32, 64]
    launch(kernel, 5, "key", x, C=16, num_warps=4)
    assert len(kernel.compiled.calls) == 2


def test_compiling_raises_what_a_compilation_raised(kernel, no_gpu):
    with pytest.raises(ValueError, match="no such size"), compiling(torch.device("cuda", 0)):
        launch(kernel, 5, "key", torch.zeros(4), C=-1, num_warps=4)
    launch(kernel, 5, "key", torch.zeros(4), C=16, num_warps=4)  # and is over
    assert kernel.made == 1


class Doubled(torch.autograd.Function):
    """Two launches, one of them in the backward pass."""

    kernel = None

    @staticmethod
    def forward(ctx, size, x):
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        launch(Doubled.kernel, 1, "forward", x, C=size, num_warps=4)
        return torch.empty_like(x), x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, unused):
        assert unused is None
        launch(Doubled.kernel, 1, "backward", *ctx.saved_tensors, C=8, num_warps=4)
        return None, grad


def test_a_first_call_compiles_both_passes_once_a_kind(kernel, no_gpu, monkeypatch):
    monkeypatch.setattr(cold, "_known", set())
    monkeypatch.setattr(Doubled, "kernel", kernel)
    x = torch.zeros(4)
    for kind, backward in (("a", False), ("a", False), ("b", True), ("b", True)):
        cold.prepare(Doubled, kind, (len(kind) * 16, x), backward)
    assert sorted(constants["C"] for *_, constants in kernel.warmed) == [8, 16, 16]  # nothing ran, so "b" asks for the forward pass again
    assert kernel.made == 0
