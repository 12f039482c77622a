"""The short way to a compiled kernel, without a GPU: a stand-in for the compiled kernel, and a counter for how it is called."""

import pytest

triton = pytest.importorskip("triton")
import torch  # noqa: E402
from triton import knobs  # noqa: E402

from kernels import launch as module  # noqa: E402
from kernels.launch import launch  # noqa: E402


class Compiled:
    """As Triton's: `run` is its launcher, `[grid]` makes a call that tells the profilers."""

    function, packed_metadata = 17, (4, 1)

    def __init__(self):
        self.calls = []

    def run(self, *arguments):
        self.calls.append(("short", arguments))

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append((grid, arguments))


class Kernel:
    """As a jitted function."""

    def __init__(self):
        self.fn, self.made, self.compiled = object(), 0, Compiled()

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
