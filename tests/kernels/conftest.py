"""What the kernel tests share: one random call of the delta rule, run by any backend in any dtype, and the error measure.

A `Case` holds fp64 tensors. `run` rounds them to a dtype, calls the op and, with weights for the outputs and the final states drawn once a
case, returns every output and every gradient by name. Errors are relative RMS: |x - y| / |y|.
"""

from dataclasses import dataclass, replace

import pytest
import torch

from kernels.chunk import Preconditioner, State, delta_rule
from kernels.recurrence import RECURRENCES

RECURRENCE_NAMES = list(RECURRENCES)


@dataclass(frozen=True)
class Case:
    tensors: dict  # q k v beta [decay p c m] [s a], fp64
    weights: dict  # o s a: what each output is multiplied with before the sum that is differentiated
    cu_seqlens: torch.Tensor | None = None
    options: dict | None = None  # bound, form, interval of the preconditioner
    normalize: bool = True  # q and k, in the op

    @property
    def preconditioned(self):
        return "p" in self.tensors

    def with_(self, **changed):
        return replace(self, tensors=self.tensors | changed)

    def without(self, name):
        return replace(self, tensors={n: x for n, x in self.tensors.items() if n != name})

    def call(self, t, backend, **arguments):
        """The op on tensors named as in `tensors`."""
        precond = Preconditioner(t["p"], t["c"], t["m"], **(self.options or {})) if self.preconditioned else None
        state = State(t["s"], t.get("a")) if "s" in t else None
        arguments = {"cu_seqlens": self.cu_seqlens, "output_final_state": True, "normalize_qk": self.normalize} | arguments
        return delta_rule(t["q"], t["k"], t["v"], t["beta"], t.get("decay"), precond, initial_state=state, backend=backend, **arguments)

    def run(self, backend, dtype=torch.float64, device="cpu", place=torch.clone):
        """{o, s, a, and dNAME for each input}, inputs rounded to dtype (states to fp32 at least); place: how each lies in memory."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        t = {n: place(x.to(device, wide if n in ("s", "a") else dtype)).detach().requires_grad_() for n, x in self.tensors.items()}
        o, (s, a) = self.call(t, backend)
        outputs = {"o": o, "s": s} | ({} if a is None else {"a": a})
        loss = sum((x.double() * self.weights[n].to(device)).sum() for n, x in outputs.items())
        gradients = torch.autograd.grad(loss, list(t.values()))
        return {n: x.detach() for n, x in outputs.items()} | {f"d{n}": g for n, g in zip(t, gradients, strict=True)}

    def rounded(self, dtype):
        """The same case with inputs that dtype holds exactly, so that only the computation's error remains."""
        return replace(self, tensors={n: x if n in ("s", "a") else x.to(dtype).double() for n, x in self.tensors.items()})


def _case(name, T, B=2, H=3, K=40, V=24, bounds=None, state=True, gates=1.0, seed=0, **options):
    """A random call of recurrence `name`; gates: how negative the log decays reach; bounds: cu_seqlens, then B is 1."""
    generator = torch.Generator().manual_seed(seed)
    B, N = (1, len(bounds) - 1) if bounds else (B, B)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def uniform(*shape):
        return torch.rand(*shape, dtype=torch.float64, generator=generator)

    recurrence = RECURRENCES[name]
    t = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V), "beta": uniform(B, T, H)}
    if recurrence.decay != "none":
        t["decay"] = -gates * uniform(B, T, H, *([K] if recurrence.decay == "channel" else []))
    if recurrence.preconditioner != "none":
        t |= {"p": -gates * uniform(B, T, H), "c": uniform(B, T, H), "m": normal(H)}
    weights = {"o": normal(B, T, H, V), "s": normal(N, H, K, V), "a": normal(N, H, K)}
    if state:
        t["s"] = normal(N, H, K, V)
        if "p" in t:
            t["a"] = uniform(N, H, K)
    return Case(t, weights, None if bounds is None else torch.tensor(bounds), options)


def _errors(got, judge):
    """{name: relative RMS error}; the error itself where the judge is zero."""
    return {n: ((got[n].double().cpu() - y).norm() / (y.norm() if y.any() else 1)).item() for n, y in judge.items()}


@pytest.fixture(scope="session")
def case():
    return _case


@pytest.fixture(scope="session")
def errors():
    return _errors


@pytest.fixture(scope="session")
def assert_close():
    def check(got, judge, tolerance, states=None):
        """Every entry within tolerance (states: that of s and a) and finite; the message has all errors."""
        assert got.keys() == judge.keys()
        errors = _errors(got, judge)
        limits = {n: states if states and n in ("s", "a") else tolerance for n in errors}
        assert all(errors[n] <= limits[n] for n in errors), errors  # NaN fails too

    return check


@pytest.fixture(params=RECURRENCE_NAMES)
def name(request):
    return request.param
