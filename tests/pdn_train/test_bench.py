"""The bench of the whole step: its numbers against sums by hand, on a tiny model on the CPU; launches by hand too."""

import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pdn_train import bench, bench_launches, bench_peer, config, estimate
from pdn_train.bench_launches import Launch
from pdn_train.config import ConfigError
from pdn_train.profiling import Parts
from pdn_train.world import World

FILE = """
run_dir: unused
model: {recurrence: pgdn, hidden_size: 32, num_layers: 1, num_heads: 2, head_dim: 16, intermediate_size: 48, vocab_size: 64}
data: {path: /no/such/folder, seq_len: 32}
train: {micro_batch: 2, global_batch: 256, precision: fp32, device: cpu}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(FILE)
    return str(path)


def test_it_times_a_file_and_its_variants(file, capsys):
    """Both run, in one process; what is printed says which tokens and which settings."""
    command = [file, "optim.lr=1e-3", "--variant", "model.recurrence=gdn model.num_heads=1", "--steps", "2", "--warmup", "1"]
    assert bench.main([*command, "--accumulation", "2"]) == 0
    said = capsys.readouterr().out
    first, second = (build(run) for run in ({}, {"recurrence": "gdn", "num_heads": 1}))
    for name, run in (("pgdn", first), ("gdn", second)):
        assert f"\n{name}, {estimate.parameters(run.model) / 1e6:.1f}M parameters; 2 x 32 tokens x 2 micro-batches a rank, random" in said
    for part in ("samples", "copy of the batch", "forward", "backward", "gradient norm", "optimizer", "rest"):
        assert said.count(f"    {part:20}") == 2
    last = said.strip().splitlines()[-2:]
    assert last[0].startswith("tiny optim.lr=1e-3: ") and last[1].startswith("tiny optim.lr=1e-3 model.recurrence=gdn model.num_heads=1: ")


def build(model: dict) -> config.Config:
    tree = config.parse(FILE, "test")
    return config.build(tree | {"model": tree["model"] | model}, "test")


class Clock:
    """A device whose moments are set by hand."""

    def __init__(self, monkeypatch, module, times):
        left = iter(times)

        class Moment:
            def __init__(self, device):
                self.at = next(left)

            def wait(self):
                pass

            def seconds_since(self, before):
                return self.at - before.at

        monkeypatch.setattr(module, "Moment", Moment)


def test_parts_add_up_what_comes_again(monkeypatch):
    Clock(monkeypatch, sys.modules["pdn_train.profiling"], [0, 1, 3, 6, 10, 15, 21])
    parts = Parts(torch.device("cpu"))
    for name in ("data", "forward", "backward", "forward", "backward", None, None):
        parts(name)
    assert parts.seconds() == {"data": 1, "forward": 2 + 4, "backward": 3 + 5}


def test_rates_by_hand(monkeypatch):
    """Steps of 1, 4 and 2 seconds: the median 2; a step has 4 x 32 tokens of the two ranks."""
    Clock(monkeypatch, bench, [0, 1, 1, 5, 5, 7])  # begin and end of each step
    run = config.build(config.parse(FILE, "test") | {"train": {"micro_batch": 2, "global_batch": 4, "device": "cpu"}}, "test")
    world = SimpleNamespace(size=2, device=torch.device("cpu"), gather=lambda x: [x, x + 1])
    parts = [{"forward": 0.5}, {"forward": 3.0}, {"forward": 1.5}]
    steps = iter([SimpleNamespace(seconds=lambda one=one: one) for one in parts])
    training = SimpleNamespace(config=run, world=world, losses=[torch.tensor(2.0)])
    training.step = lambda: next(steps)
    timing = bench.timed(training, 3, "t")
    assert (timing.step, timing.parts, timing.tokens_per_second, timing.mfu) == (2, {"forward": 1.5}, 4 * 32 / 2 / 2, None)
    assert "2000.0 ms a step, 32 tokens/s a GPU, peak" in str(timing)
    assert "    rest                   500.00 ms   25.0%" in bench.parts_table(timing)


def test_mfu_is_flops_over_the_devices_peak(monkeypatch):
    Clock(monkeypatch, bench, [0, 2])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(bench, "memory_gib", lambda device: 1.0)
    run = build({})
    world = SimpleNamespace(size=1, device=torch.device("cuda"), gather=lambda x: [x])
    training = SimpleNamespace(config=run, world=world, losses=[torch.tensor(2.0)], step=lambda: Parts(torch.device("cpu")))
    monkeypatch.setattr(Parts, "seconds", lambda self: {})
    timing = bench.timed(training, 1, "t")
    assert timing.mfu == pytest.approx(256 * 32 / 2 * estimate.flops_per_token(run) / 989e12)


def test_tokens_are_random_only_where_there_is_no_folder(tmp_path):
    run = build({})
    samples, source = bench.tokens(run)
    assert "random" in source and "/no/such/folder" in source
    inputs, labels = samples.pair(3)
    assert inputs.shape == labels.shape == (32,) and (inputs[1:] == labels[:-1]).all() and inputs.min() >= 0 and inputs.max() < 64
    assert (samples.pair(3)[0] == inputs).all() and not (samples.pair(4)[0] == inputs).all()
    there = run.model_copy(update={"data": run.data.model_copy(update={"path": str(tmp_path)})})
    with pytest.raises(ValueError, match=str(tmp_path)):  # a folder without shards is a fault, not a reason for random tokens
        bench.tokens(there)


@pytest.mark.parametrize(
    "command, message",
    [
        (["model.kernel=triton"], "model.kernel=triton needs a GPU, and this rank computes on cpu; use model.kernel=torch"),
        (["--variant", "parallel.sequence=2"], "parallel.sequence"),
        (["--peer", "fla"], "flash-linear-attention"),
    ],
)
def test_what_cannot_run_is_said_in_a_line(file, capsys, monkeypatch, command, message):
    monkeypatch.setattr(bench_peer.importlib.util, "find_spec", lambda name: None)
    assert bench.main([file, "--steps", "1", "--warmup", "1", *command]) == 2
    assert message in capsys.readouterr().err


# ---- the peer ----


class Theirs(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(64, 8))

    def forward(self, input_ids, labels):
        assert input_ids is labels
        return SimpleNamespace(loss=(self.table[input_ids] - 1).square().mean())


def test_the_peer_trains_with_our_optimizer_and_batches(monkeypatch):
    monkeypatch.setattr(bench_peer, "build", lambda run: Theirs())
    tree = config.parse(FILE, "test") | {"optim": {"lr": 0.1, "warmup_start": 0.1, "min_lr": 0.1, "warmup_steps": 0, "clip": 0.5}}
    tree["train"] = {"micro_batch": 2, "global_batch": 4, "device": "cpu"}
    run, world = config.build(tree, "test"), World(0, 0, 1, 1, torch.device("cpu"))
    loader = bench.build_loader(bench.RandomTokens(64, 32), 2, run, world)
    peer = bench_peer.Peer(run, world, loader)
    parts = [peer.step() for _ in range(5)][-1]
    peer.close()
    assert peer.losses[0] == 1 and peer.losses[-1] < 0.5  # 1 - 0.1 after a step, and so on
    assert list(parts.seconds()) == ["samples", "copy of the batch", "forward", "backward", "gradient norm", "optimizer"]


def test_what_the_peer_cannot_train():
    with pytest.raises(ConfigError, match="there are 2 ranks"):
        bench_peer.require(build({}), World(0, 0, 2, 1, torch.device("cpu")))
    packed = config.build(config.parse(FILE, "test") | {"data": {"path": "d", "reset_at_documents": True}}, "test")
    with pytest.raises(ConfigError, match="data.reset_at_documents=false"):
        bench_peer.require(packed, World(0, 0, 1, 1, torch.device("cpu")))


# ---- launches ----

LAUNCHES = [
    Launch("nvjet_tst_128x64", 0, 10_000),
    Launch("_swiglu", 11_000, 14_000),
    Launch("ncclDevKernel_AllGather", 12_000, 16_000),  # 2 ms of it by itself
    Launch("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", 20_000, 20_500),
    Launch("something else", 20_500, 21_000),
    Launch("nvjet_tst_128x64", 23_000, 24_000),
]


def test_busy_time_and_gaps_by_hand():
    assert bench_launches.busy(LAUNCHES) == 10_000 + 5_000 + 1_000 + 1_000
    assert [length for length, *_ in bench_launches.gaps(LAUNCHES)] == [1_000, 4_000, 2_000]
    assert bench_launches.gaps(LAUNCHES)[1][1:] == ("ncclDevKernel_AllGather", LAUNCHES[3].name)
    inside = [Launch("long", 0, 100), Launch("short, meanwhile", 10, 20), Launch("later", 110, 120)]
    assert bench_launches.gaps(inside) == [(10, "long", "later")] and bench_launches.busy(inside) == 110


def test_the_table_by_hand():
    """Two steps in 24 ms."""
    lines = bench_launches.table(LAUNCHES, Counter({"cudaStreamSynchronize": 3}), 2).splitlines()
    rows = {line[:90].strip(): line[90:].split() for line in lines[: lines.index("")]}
    assert rows["matrix products"] == ["1.0", "5.50", "45.8%"]
    assert rows["kernels/swiglu_triton.py"] == ["0.5", "1.50", "12.5%"]
    assert rows["communication"] == ["0.5", "2.00", "16.7%"]
    assert rows["copies, casts, fills"] == ["0.5", "0.25", "2.1%"]
    assert rows["torch: the rest"] == ["0.5", "0.25", "2.1%"]
    assert rows["idle"] == ["3.50", "29.2%"] and rows["all"] == ["3.0", "12.00"]
    assert "kernels/ together 1.50 ms" in rows and "communication that nothing overlaps 1.00 ms" in rows
    assert lines[-1] == "the host waited in cudaStreamSynchronize x 1.5"


@pytest.mark.parametrize(
    "name, title",
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", "optimizer: AdamW"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<LpNormFunctor<float, (NormType)1>>",
            "optimizer: gradient norm",
        ),
        ("Memcpy HtoD (Pinned -> Device)", "copies, casts, fills"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(...)>", "copies, casts, fills"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
        ("_solve", "kernels/solve.py"),
    ],
)
def test_groups(name, title):
    assert bench_launches.group(name, bench_launches.own_kernels()) == title
