"""Every wrong argument is a ValueError that names it and the values that disagree, on each backend, before any computation."""

import pytest
import torch

from kernels import checks
from kernels.chunk import Preconditioner, State, delta_rule

B, T, H, K, V = 2, 32, 3, 16, 20


def arguments(**changed):
    gates = torch.rand(B, T, H)
    given = {
        "q": torch.randn(B, T, H, K),
        "k": torch.randn(B, T, H, K),
        "v": torch.randn(B, T, H, V),
        "beta": gates,
        "decay": -gates,
        "precond": precond(),
        "backend": "torch",
    }
    return given | changed


def precond(**changed):
    gates = torch.rand(B, T, H)
    return Preconditioner(**({"decay": -gates, "gain": gates, "center": torch.zeros(H)} | changed))


def state(N=B, dtype=torch.float32):
    return State(torch.zeros(N, H, K, V, dtype=dtype), torch.zeros(N, H, K, dtype=dtype))


WRONG = {
    "backend unknown": (dict(backend="cuda"), ["backend", "cuda"]),
    "q not a tensor": (dict(q=[1.0]), ["q", "list"]),
    "q without heads": (dict(q=torch.randn(B, T, K)), ["q", "[2, 32, 16]"]),
    "q of integers": (dict(q=torch.ones(B, T, H, K, dtype=torch.int64)), ["q", "int64"]),
    "q empty": (dict(q=torch.randn(B, 0, H, K)), ["q", "[2, 0, 3, 16]"]),
    "K too small": (dict(q=torch.randn(B, T, H, 8)), ["q", "8", "16"]),
    "V too large": (dict(v=torch.randn(B, T, H, 300)), ["v", "300", "256"]),
    "k of another shape": (dict(k=torch.randn(B, T, H, K + 1)), ["k", "[2, 32, 3, 17]", "[2, 32, 3, 16]"]),
    "k of another dtype": (dict(k=torch.randn(B, T, H, K).bfloat16()), ["k", "bfloat16", "float32"]),
    "k elsewhere": (dict(k=torch.randn(B, T, H, K, device="meta")), ["k", "meta", "cpu"]),
    "v of another length": (dict(v=torch.randn(B, T + 1, H, V)), ["v", "33", "32"]),
    "beta a channel": (dict(beta=torch.rand(B, T, H, K)), ["beta", "[2, 32, 3, 16]"]),
    "beta wider than q": (dict(beta=torch.rand(B, T, H, dtype=torch.float64)), ["beta", "float64"]),
    "decay a value": (dict(decay=-torch.rand(B, T, H, V)), ["decay", "[2, 32, 3, 20]"]),
    "precond a tuple": (dict(precond=(1, 2, 3)), ["precond", "tuple"]),
    "precond.decay a channel": (dict(precond=precond(decay=-torch.rand(B, T, H, K))), ["precond.decay", "[2, 32, 3, 16]"]),
    "precond.gain one a batch": (dict(precond=precond(gain=torch.rand(B, H))), ["precond.gain", "[2, 3]"]),
    "precond.center one": (dict(precond=precond(center=torch.zeros(1))), ["precond.center", "[1]", "[3]"]),
    "precond.bound below one": (dict(precond=precond(bound=0.5)), ["precond.bound", "0.5"]),
    "precond.eps zero": (dict(precond=precond(eps=0.0)), ["precond.eps", "0.0"]),
    "precond.form unknown": (dict(precond=precond(form="atk")), ["precond.form", "atk", "squashed"]),
    "precond.interval unknown": (dict(precond=precond(interval="left")), ["precond.interval", "left", "both"]),
    "precond.interval without bound": (dict(precond=precond(form="atq", interval="up")), ["precond.interval", "up", "atq"]),
    "scale infinite": (dict(scale=float("inf")), ["scale", "inf"]),
    "scale a tensor": (dict(scale=torch.ones(1)), ["scale"]),
    "initial_state a tensor": (dict(initial_state=torch.zeros(B, H, K, V)), ["initial_state", "Tensor"]),
    "initial_state transposed": (dict(initial_state=State(torch.zeros(B, H, V, K))), ["initial_state.s", "[2, 3, 20, 16]"]),
    "initial_state in bf16": (dict(initial_state=state(dtype=torch.bfloat16)), ["initial_state.s", "bfloat16"]),
    "initial_state wider": (dict(initial_state=state(dtype=torch.float64)), ["initial_state.s", "float64"]),
    "initial_state of another batch": (dict(initial_state=state(3)), ["initial_state.s", "3", "2"]),
    "statistic of another head size": (dict(initial_state=State(state().s, torch.zeros(B, H, V))), ["initial_state.a", "[2, 3, 20]"]),
    "statistic unused": (dict(initial_state=state(), precond=None), ["initial_state.a", "precond"]),
    "cu_seqlens of floats": (dict(cu_seqlens=torch.tensor([0.0, 32.0])), ["cu_seqlens", "float32"]),
    "cu_seqlens a list": (dict(cu_seqlens=[0, 32]), ["cu_seqlens", "list"]),
    "cu_seqlens of one entry": (dict(cu_seqlens=torch.tensor([0])), ["cu_seqlens", "[1]"]),
    "cu_seqlens and a batch": (dict(cu_seqlens=torch.tensor([0, 32, 64])), ["cu_seqlens", "B = 1", "B = 2"]),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_wrong_argument(case, backend):
    changed, words = WRONG[case]
    with pytest.raises(ValueError) as error:
        delta_rule(**arguments(**({"backend": backend} | changed)))
    assert str(error.value).startswith(words[0]) and all(word in str(error.value) for word in words), error.value


def packed(T, cu_seqlens, sequences=None, dtype=torch.int32):
    """One row of T tokens with cu_seqlens, and initial states for so many sequences."""
    x, gates = torch.randn(1, T, H, K), torch.rand(1, T, H)
    initial = None if sequences is None else State(torch.zeros(sequences, H, K, K))
    return delta_rule(x, x, x, gates, initial_state=initial, cu_seqlens=torch.tensor(cu_seqlens, dtype=dtype), backend="torch")


@pytest.mark.parametrize(
    "T, cu_seqlens, sequences, words",
    [
        (65, [0, 30, 60], None, ["ends at 60", "65"]),  # (b) of fla-org/flash-linear-attention#955; (a) is in WRONG
        (65, [0, 40, 30, 65], None, ["decrease", "40", "30"]),
        (65, [1, 65], None, ["start at 0", "1"]),
        (65, [0, 20, 40, 65], 2, ["2 states", "3 sequences"]),
        (65, [0, 65, 130], None, ["ends at 130", "65"]),
        (65, [0, -3, 65], None, ["decrease", "0", "-3"]),
    ],
)
def test_wrong_cu_seqlens(T, cu_seqlens, sequences, words):
    with pytest.raises(ValueError, match="cu_seqlens|initial_state") as error:
        packed(T, cu_seqlens, sequences)
    assert all(word in str(error.value) for word in words), error.value


def test_int32_and_int64_agree():
    x, gates = torch.randn(1, 65, H, K), torch.rand(1, 65, H)
    cu_seqlens = torch.tensor([0, 30, 30, 65])
    outputs = [delta_rule(x, x, x, gates, cu_seqlens=cu_seqlens.to(dtype), backend="torch")[0] for dtype in (torch.int32, torch.int64)]
    assert torch.equal(*outputs)


REFUSED = {
    "q on the host": (dict(), ["q", "cpu", "CUDA"]),
    "q of fp64": (dict(q=torch.randn(B, T, H, K).double()), ["q", "float64"]),
    "precond.form": (dict(precond=precond(form="atq")), ["precond.form", "atq"]),
    "precond.interval": (dict(precond=precond(interval="up")), ["precond.interval", "up"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_triton_backend_does_not_do_names_the_one_that_does(name, monkeypatch):
    changed, words = REFUSED[name]
    monkeypatch.setattr(checks, "_interpreted", lambda: bool(changed))  # on the host only the interpreter runs kernels
    given = arguments(**changed)
    given.pop("backend")  # it is the default
    if "q" in changed:
        given |= {n: given[n].double() for n in ("k", "v")}
    with pytest.raises(ValueError, match=f"^{words[0]}") as error:
        delta_rule(**given)
    assert all(word in str(error.value) for word in [*words, "backend='triton'", "use backend='torch'"])


class Device(torch.Tensor):
    """Host memory that says it is elsewhere and counts the copies to the host."""

    copies = 0
    device = torch.device("meta")

    def cpu(self):
        Device.copies += 1
        return self.as_subclass(torch.Tensor).clone()


def test_device_cu_seqlens_is_copied_once_a_tensor():
    Device.copies = 0
    x = torch.empty(1, 65, H, K, device="meta")
    cu_seqlens = torch.tensor([0, 30, 65]).as_subclass(Device)
    for _ in range(3):
        assert checks.check_bounds(cu_seqlens, x) == (0, 30, 65)
    assert Device.copies == 1
    cu_seqlens[1] = 31  # a change in place is seen
    assert checks.check_bounds(cu_seqlens, x) == (0, 31, 65) and Device.copies == 2
    with pytest.raises(ValueError, match="ends at 65 but q has T = 64"):  # what is remembered is still held against each call
        checks.check_bounds(cu_seqlens, x[:, :64])


def test_remembered_cu_seqlens_is_never_copied():
    Device.copies = 0
    host = torch.tensor([0, 30, 65])
    cu_seqlens = checks.remember(host.clone().as_subclass(Device), host)
    assert checks.check_bounds(cu_seqlens, torch.empty(1, 65, H, K, device="meta")) == (0, 30, 65) and Device.copies == 0
    with pytest.raises(ValueError, match="host"):
        checks.remember(cu_seqlens, host[:2])


def test_memory_of_cu_seqlens_ends_with_the_tensor():
    before = len(checks._read)
    cu_seqlens = checks.remember(torch.tensor([0, 65]).as_subclass(Device), torch.tensor([0, 65]))
    assert len(checks._read) == before + 1
    del cu_seqlens
    assert len(checks._read) == before
