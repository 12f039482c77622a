"""Sequence parallelism: cut over any number of ranks, everything is what one rank computes.

The ranks are real processes that talk through gloo (`sequence_worker.py`), or threads of this one where there would be too many. The judge
is the recurrence token by token, on whole sequences in fp64.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from queue import Queue

import pytest
import torch
import torch.distributed as dist

from kernels.maps import Piece
from kernels.recurrence import RECURRENCES
from pdn_train.sequence import AHEAD, METHODS, GroupWire, Line, Network, choose, seconds, shift

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
    launch(4, WORKER, str(folder))
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


@cache
def judge(recurrence: str, layout: str, loss: str, ranks: int) -> dict[str, torch.Tensor]:
    """Outputs, final states and gradients of the whole, in fp64; `ranks` only says which tokens the loss "last" sees."""
    whole = worker.inputs(recurrence, layout)
    rows, length, starts = worker.layout_of(layout)
    cu_seqlens = None if starts is None else torch.tensor([*starts, rows * length])
    w = worker.seen(whole, loss, length, ranks)
    t = {name: x.requires_grad_() for name, x in whole.items() if not name.startswith("w_")}
    o, s, a = worker.run(t, cu_seqlens, "reference")
    gradients = torch.autograd.grad(worker.weighted(o, s, a, *w), list(t.values()))
    found = {"o": o.detach().reshape(w[0].shape)} | {f"d{name}": g for name, g in zip(t, gradients, strict=True)}
    return found | {f"s{n}": one.detach() for n, one in enumerate(s)}


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative RMS; the RMS itself where the judge is zero."""
    return ((got.double() - wanted).norm() / (wanted.norm() if wanted.any() else 1)).item()


def errors(case, found, key=None) -> dict[str, float]:
    """Of every rank's outputs and gradients; those of parameters that all share, of their sum. key: of the results, if not the case."""
    key = key or case
    *_, loss, ranks = case
    wanted = judge(*case[:3], ranks if loss == "last" else 0)
    told = {}
    for rank in range(ranks):
        for name, x in found[rank][key].items():
            if name[1:] in worker.SHARED:
                told[name] = error(sum(found[r][key][name].double() for r in range(ranks)), wanted[name])
            else:
                whole = wanted[name]
                told[f"{name} of rank {rank}"] = error(x, whole if name.startswith("s") else worker.cut(whole, rank, ranks))
    return told


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("recurrence", list(RECURRENCES))
def test_every_output_and_gradient_on_every_rank(found, recurrence, ranks):
    cases = [case for case in worker.cases() if case[0] == recurrence and case[-1] == ranks]
    told = {(case[1:3], name): e for case in cases for name, e in errors(case, found).items()}
    assert len(cases) == len(worker.LAYOUTS) + (4 if ranks == 3 else 0)
    assert all(e <= 1e-5 for e in told.values()), {name: e for name, e in told.items() if not e <= 1e-5}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("recurrence", ["gdn", "pdn", "pkda"])
def test_long_sequences_against_heads_cut_instead(found, recurrence, ranks):
    """An independent road: all-to-all, then whole sequences of some heads on every rank."""
    cases = [case for case in worker.long_cases() if case[0] == recurrence and case[-1] == ranks]
    assert len(cases) == len(worker.LONG)
    for case in cases:
        for name in found[0][case, "by heads"]:
            ours, theirs = ([found[rank][key][name] for rank in range(ranks)] for key in (case, (case, "by heads")))
            if name[1:] in worker.SHARED:
                ours, theirs = [sum(ours)], [sum(theirs)]
            assert all(error(x, y.double()) <= 1e-5 for x, y in zip(ours, theirs, strict=True)), (case, name)


@pytest.mark.parametrize("method", METHODS)
def test_real_groups_carry_states_in_each_way(found, method):
    """Four processes as on two nodes of two."""
    for case in worker.node_cases():
        told = errors(case, found, (case, method))
        assert all(e <= 1e-5 for e in told.values()), (case, told)


def test_the_first_rank_waits_for_nobody(found):
    """It made its calls before the second rank made any, and changed what it had given: what arrives is as given. (Else the ranks hang.)"""
    assert [x.unique().tolist() for x in found[1]["ahead"]] == [[n] for n in range(AHEAD)]
    assert not any(x.any() for x in found[0]["ahead"])


@pytest.mark.parametrize("call", ["gather", "exchange"])
def test_a_call_that_waits_comes_after_those_that_did_not(call, monkeypatch):
    """In order of their issue; one that only gives waits for those further back than AHEAD. (A group of gloo keeps the order by itself.)"""
    calls = []

    class Work:
        def __init__(self, number):
            self.number = number

        def wait(self):
            calls.append(f"wait {self.number}")

    def all_gather(found, x, group, async_op=False):
        calls.append("gather")
        return Work(len([c for c in calls if c == "gather"]) - 1) if async_op else None

    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_gather_into_tensor", all_gather)
    wire = GroupWire(None)
    for _ in range(AHEAD + 1):
        assert wire.gather(torch.zeros(2), read=False) is None
    assert calls == ["gather"] * (AHEAD + 1) + ["wait 0"]
    calls.clear()
    wire.gather(torch.zeros(2)) if call == "gather" else wire.exchange(None, 1, None, -1)
    assert calls == [f"wait {n}" for n in range(1, AHEAD + 1)] + ["gather"] * (call == "gather")


class ThreadWire:
    """A line of threads: a queue for each pair."""

    def __init__(self, queues: dict, rank: int, size: int):
        self._queues, self.rank, self.size = queues, rank, size

    def gather(self, x, read=True):
        for other in range(self.size):
            self._queues[self.rank, other].put(x.clone())
        found = torch.stack([self._queues[other, self.rank].get(timeout=60) for other in range(self.size)])
        return found if read else None

    def exchange(self, give, to, take, source):
        if give is not None and 0 <= to < self.size:
            self._queues[self.rank, to].put(give.clone())
        if take is not None and 0 <= source < self.size:
            take.copy_(self._queues[source, self.rank].get(timeout=60))


def thread_lines(ranks: int, per_node: int, method: str) -> list[Line]:
    """The lines of `ranks` threads, as if `per_node` of them were on a node."""
    whole, node, across = ([defaultdict(Queue) for _ in range(ranks)] for _ in range(3))
    for queues, size in ((whole[0], ranks), *((q, per_node) for q in node), *((q, ranks // per_node) for q in across)):
        for pair in ((i, j) for i in range(size) for j in range(size)):
            queues[pair]  # made here: a defaultdict is not safe to grow from several threads
    return [
        Line(
            ThreadWire(whole[0], rank, ranks),
            per_node,
            ThreadWire(node[rank // per_node], rank % per_node, per_node),
            ThreadWire(across[rank % per_node], rank // per_node, ranks // per_node),
            method,
        )
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("ranks, per_node", [(2, 2), (3, 3), (4, 2), (8, 4), (24, 8), (24, 4)])
@pytest.mark.parametrize("method", METHODS)
def test_what_arrives_at_every_rank(method, ranks, per_node):
    """Random maps of documents that begin at random ranks, forward and backward, against the products written out."""
    generator = torch.Generator().manual_seed(ranks)
    shape = (ranks, 2, 3, 16)  # ranks, rows, heads, K
    maps = torch.randn(*shape, 16, dtype=torch.float64, generator=generator) / 4
    made, gradient = (torch.randn(*shape, 32, dtype=torch.float64, generator=generator) for _ in range(2))
    starts = torch.tensor([0, 2 * ranks - 2, 2 * ranks, 2 * ranks + 3])  # pieces of two tokens, two rows

    def act(line: Line):
        rank = line.whole.rank
        relay = line.relay(Piece.cut(2 * ranks, 2, starts, rank, ranks), torch.device("cpu")).for_layer()
        arriving, sent = relay.forth("state", lambda: (maps[rank], made[rank]))
        return arriving, relay.back(sent, gradient[rank])

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(act, thread_lines(ranks, per_node, method)))
    for row, begins in enumerate((starts[:2], starts[2:] - 2 * ranks)):
        begins = {start.item() for start in begins}
        x = torch.zeros(3, 16, 32, dtype=torch.float64)
        handed = torch.zeros_like(x)
        for rank in range(ranks):
            x = torch.zeros_like(x) if 2 * rank in begins else x
            assert torch.allclose(found[rank][0][row], x, rtol=1e-12, atol=1e-12)
            x = made[rank, row] if begins & {2 * rank, 2 * rank + 1} else maps[rank, row] @ x + made[rank, row]
        for rank in reversed(range(ranks)):
            assert torch.allclose(found[rank][1][row], handed, rtol=1e-12, atol=1e-12)
            through = maps[rank, row].mT @ handed if not begins & {2 * rank, 2 * rank + 1} else 0
            handed = torch.zeros_like(x) if 2 * rank in begins else through + gradient[rank, row]


@pytest.mark.parametrize("ranks", [2, 8, 9])  # the first two by an all-gather, the last from rank to rank
@pytest.mark.parametrize("reverse", [False, True])
def test_what_is_handed_to_the_next_rank(ranks, reverse):
    with ThreadPoolExecutor(ranks) as pool:
        lines = thread_lines(ranks, ranks, "gather")
        found = list(pool.map(lambda line: shift(line.whole, torch.full((2, 3), float(line.whole.rank)), reverse), lines))
    for rank, x in enumerate(found):
        source = rank + 1 if reverse else rank - 1
        assert torch.equal(x, torch.full((2, 3), float(source) if 0 <= source < ranks else 0.0))


def test_a_layer_that_runs_again_hands_on_nothing():
    (line,) = thread_lines(1, 1, "gather")
    relay = line.relay(Piece.cut(4, 1, None, 0, 1), torch.device("cpu"))
    layer, calls = relay.for_layer(), []
    for _ in range(2):
        layer.forth("history", lambda: calls.append(1) or (None, torch.ones(1, 3)))
    assert len(calls) == 1
    relay.for_layer().forth("history", lambda: calls.append(1) or (None, torch.ones(1, 3)))
    assert len(calls) == 2, "the next layer's own"


FAST, SLOW = Network(net_bandwidth=1e12), Network(net_latency=1e-6, net_bandwidth=1e9)


@pytest.mark.parametrize(
    "ranks, per_node, network, method",
    [
        (2, 8, Network(), "gather"),
        (8, 8, Network(), "gather"),
        (64, 8, Network(), "hierarchical"),
        (64, 8, FAST, "hierarchical"),
        (16, 1, SLOW, "pipelined"),
        (12, 8, SLOW, "gather"),  # no whole nodes
    ],
)
def test_the_way_that_is_chosen(ranks, per_node, network, method):
    assert choose(ranks, per_node, 8, 128, 128, network) == method
    few = choose(4, 8, 8, 128, 128, network)
    assert few == "gather", "within a node, whatever lies between nodes"


def test_the_crossover_is_where_the_modelled_times_cross():
    ways = [choose(8 * nodes, 8, 8, 128, 128) for nodes in range(1, 17)]
    assert ways == sorted(ways), "gather up to some size, then hierarchical"
    for nodes, way in enumerate(ways, start=1):
        times = {m: seconds(m, 8 * nodes, 8, 8, 128, 128, Network()) for m in METHODS}
        assert times[way] == min(t for m, t in times.items() if nodes > 1 or m != "hierarchical")
