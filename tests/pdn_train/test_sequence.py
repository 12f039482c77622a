"""Sequence parallelism: cut over any number of ranks, everything is what one rank computes.

The ranks are real processes that talk through gloo (`sequence_worker.py`), or threads of this one where there would be too many. The judge
is the recurrence token by token, on whole sequences in fp64.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from kernels.recurrence import RECURRENCES

WORKER = Path(__file__).with_name("sequence_worker.py")
worker = importlib.util.module_from_spec(spec := importlib.util.spec_from_file_location("sequence_worker", WORKER))
spec.loader.exec_module(worker)


def launch(ranks: int, file: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", str(file), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """[what each of four ranks found, {case: {name: tensor}}]."""
    folder = tmp_path_factory.mktemp("ranks")
    launch(4, WORKER, str(folder), "torch")
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


@cache
def judge(recurrence: str, layout: str, loss: str, ranks: int) -> dict[str, torch.Tensor]:
    """Outputs, final states and gradients of the whole, in fp64; `ranks` only says which tokens the loss "last" sees."""
    whole = worker.inputs(recurrence, layout)
    rows, starts = worker.LAYOUTS[layout]
    cu_seqlens = None if starts is None else torch.tensor([*starts, rows * worker.LENGTH])
    w = worker.seen(whole, loss, ranks)
    t = {name: x.requires_grad_() for name, x in whole.items() if not name.startswith("w_")}
    o, s, a = worker.run(t, cu_seqlens, "reference")
    gradients = torch.autograd.grad(worker.weighted(o, s, a, *w), list(t.values()))
    found = {"o": o.detach().reshape(w[0].shape)} | {f"d{name}": g for name, g in zip(t, gradients, strict=True)}
    return found | {f"s{n}": one.detach() for n, one in enumerate(s)}


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative RMS; the RMS itself where the judge is zero."""
    return ((got.double() - wanted).norm() / (wanted.norm() if wanted.any() else 1)).item()


def errors(case, found) -> dict[str, float]:
    """Of every rank's outputs and gradients; those of parameters that all ranks share, of their sum."""
    *_, loss, ranks = case
    wanted = judge(*case[:3], ranks if loss == "last" else 0)
    told = {}
    for rank in range(ranks):
        for name, x in found[rank][case].items():
            if name[1:] in worker.SHARED:
                told[name] = error(sum(found[r][case][name].double() for r in range(ranks)), wanted[name])
            else:
                whole = wanted[name]
                told[f"{name} of rank {rank}"] = error(x, whole if name.startswith("s") else worker.cut(whole, rank, ranks))
    return told


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("recurrence", list(RECURRENCES))
def test_every_output_and_gradient_on_every_rank(found, recurrence, ranks):
    cases = [case for case in worker.cases() if case[0] == recurrence and case[-1] == ranks]
    told = {(case[1:3], name): e for case in cases for name, e in errors(case, found).items()}
    assert len(cases) == len(worker.LAYOUTS) + 4
    assert all(e <= 1e-5 for e in told.values()), {name: e for name, e in told.items() if not e <= 1e-5}
