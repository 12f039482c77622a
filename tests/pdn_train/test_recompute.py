"""Activation checkpointing runs again what it says, and changes no bit: in one process, and under ZeRO-3 on two ranks."""

import json
import subprocess
import sys
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import kept as results
from kernels.product import linear
from kernels.recurrence import RECURRENCES
from pdn_train import recompute
from pdn_train.config import ModelConfig
from pdn_train.model import LanguageModel

WORKER = Path(__file__).with_name("recompute_worker.py")


@pytest.fixture
def build(make_model):
    """build(recurrence, mode) -> a tiny model in that mode, with the same weights in each."""

    def make(recurrence: str, mode: str) -> LanguageModel:
        plain = make_model(recurrence=recurrence)
        model = LanguageModel(plain.config, mode)
        model.load_state_dict(plain.state_dict())
        return model

    return make


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(0, 64, (2, 21), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("recurrence", list(RECURRENCES))
def test_it_changes_no_bit(build, recurrence):
    ids, labels = tokens(0), tokens(1)
    starts = torch.tensor([0, 5, 6, 30, 42])
    results = []
    for mode in recompute.RUN:
        model = build(recurrence, mode)
        loss = model(ids, labels) + model(ids.view(1, -1), labels.view(1, -1), starts)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


class Calls(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count[str(op)] += 1
        return op(*args, **(kwargs or {}))


def test_selective_runs_no_product_again_and_block_runs_all(build):
    """Per block and pass the six Linear products of PKDA's block, of which nothing needs the last again; SiLU is run again by both."""
    counts = {}
    for mode in recompute.RUN:
        model = build("pkda", mode)
        with Calls() as calls:
            model(tokens(0), tokens(1)).backward()
        counts[mode] = calls.count
    products = {mode: count["aten.mm.default"] for mode, count in counts.items()}
    assert products["selective"] == products["none"]
    assert products["block"] == products["none"] + 2 * 5
    for mode in ("block", "selective"):
        assert counts[mode]["aten.silu.default"] == 2 * counts["none"]["aten.silu.default"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="in Triton's interpreter")
def test_triton_kernels_change_no_bit_and_their_recurrence_runs_once(monkeypatch):
    """PGDN in Triton's interpreter; the judge is the torch kernels in fp64."""
    solve = pytest.importorskip("kernels.solve")
    forward, solved = solve.forward, Counter()

    def counted(*arguments):
        solved[mode] += 1
        return forward(*arguments)

    monkeypatch.setattr(solve, "forward", counted)
    sizes = {"hidden_size": 24, "num_layers": 1, "num_heads": 1, "head_dim": 16, "intermediate_size": 32, "vocab_size": 64}
    ids, labels = tokens(0)[:1, :4], tokens(1)[:1, :4]
    found = {}
    for mode, kernel in (("none", "torch"), ("none", "triton"), ("selective", "triton")):
        model = LanguageModel(ModelConfig(**sizes, kernel=kernel), mode)
        model.init_weights(0)
        model.to(torch.float64 if kernel == "torch" else torch.float32)
        loss = model(ids, labels)
        loss.backward()
        found[mode, kernel] = [loss.detach(), *(p.grad for p in model.parameters())]
    plain, again = found["none", "triton"], found["selective", "triton"]
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    for got, judge in zip(plain, found["none", "torch"], strict=True):
        assert (got - judge).norm() < 1e-5 * judge.norm()
    assert solved == {"none": 1, "selective": 1}


def test_kept_results_come_back_in_order_and_apart():
    kept = []
    with results.Keep(kept):
        made = [results.once(lambda n=n: (torch.full((2,), n), None)) for n in range(2)]
    with results.HandBack(kept):
        again = [results.once(lambda: pytest.fail("computed again")) for _ in range(2)]
    for (x, _), (y, nothing) in zip(made, again, strict=True):
        assert y is not x and y.data_ptr() == x.data_ptr() and nothing is None
    assert results.once(lambda: (None,)) == (None,)


def test_what_nobody_reads_is_neither_kept_nor_computed_again():
    for everything in (True, False):
        made = []
        with results.Keep(made, everything):
            results.once(lambda: (torch.ones(3),))
            results.once(lambda: (torch.ones(2, 5, dtype=torch.float64),), read=False)
        with results.HandBack(made):
            (read,) = results.once(lambda: (torch.full((3,), 2.0),))
            (unread,) = results.once(lambda: pytest.fail("computed again"), read=False)
        assert read.tolist() == ([1.0] * 3 if everything else [2.0] * 3)
        assert unread.shape == (2, 5) and unread.dtype == torch.float64


def test_compiled_blocks_are_whole_and_change_no_bit(build):
    found = []
    for compiled in (False, True):
        model = build("pgdn", "block")
        for block in model.blocks if compiled else ():
            block.compile(backend="aot_eager", fullgraph=True)
        model(tokens(0), tokens(1)).backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_backward_pass_lets_the_results_go_and_a_second_is_refused(build, monkeypatch):
    held = []

    class Watched(results.Keep):
        def __exit__(self, *error):
            super().__exit__(*error)
            held.extend(weakref.ref(x) for one in self.made for x in one.results or () if x is not None)

    monkeypatch.setattr(results, "Keep", Watched)
    loss = build("pgdn", "selective")(tokens(0), tokens(1))
    assert held and all(one() is not None for one in held)
    loss.backward(retain_graph=True)
    assert all(one() is None for one in held)
    with pytest.raises(RuntimeError, match="second backward pass .* use activation_checkpoint='none'"):
        loss.backward()


@pytest.mark.parametrize("frozen", ["embedding", ("embedding", "blocks.0."), ("embedding", "blocks", "head")], ids=str)
def test_what_is_not_frozen_gets_its_gradients(build, frozen):
    found = []
    for mode in recompute.RUN:
        model = build("pgdn", mode)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        model(tokens(0), tokens(1)).backward()
        found.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_nothing_is_kept_without_gradients(build):
    with torch.no_grad():
        assert torch.equal(build("pgdn", "selective")(tokens(0)), build("pgdn", "none")(tokens(0)))


def test_a_kept_product_changed_in_place_is_an_error():
    made = []
    keep, hand_back = results.Keep(made), results.HandBack(made)
    x, weight = torch.ones(4, 3), torch.ones(2, 3)
    with keep:
        first, second = linear(x, weight), linear(x, weight)
        (first * 2).add_(1)  # another tensor: allowed
        second.add_(1)
    with hand_back:
        assert torch.equal(linear(x, weight), first)
        with pytest.raises(RuntimeError, match=r"kept for the backward pass was changed in place: one of \[\[4, 2\]\]"):
            linear(x, weight)


def test_an_unknown_mode_is_refused(make_model):
    with pytest.raises(ValueError, match="activation_checkpoint='all': choose one of none, block, selective"):
        LanguageModel(make_model().config, "all")


def test_it_changes_no_bit_under_zero_3():
    """Two ranks, ZeRO-3, whole samples and packed documents: every mode has the losses and gradient norms of none."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("TOLD "))[5:])
    whole, packed = told["none"]
    assert abs(whole[0] - packed[0]) > 1e-3 and min(whole[1], packed[1]) > 0.1  # two different steps, with gradients
    assert told["block"] == told["none"] and told["selective"] == told["none"]
