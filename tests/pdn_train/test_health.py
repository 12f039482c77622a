"""Each number against the recurrence's own token-by-token run on what the layer saw; the model is left as it was."""

import subprocess
import sys

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kernels.operands import prepare
from kernels.preconditioner import scaling
from kernels.reference import advance, initial
from pdn_train import health

IDS = torch.randint(0, 64, (2, 90), generator=torch.Generator().manual_seed(0))
RECURRENCES = ["dn", "gdn", "kda", "pdn", "pgdn", "pkda"]


def by_token(model) -> list[dict]:
    """Per layer: every k.w, 1 - beta k.w, a, b [T, ...], and the last state, by `kernels.reference.advance`."""
    layers, mixers = [], [block.mixer for block in model.blocks]
    for mixer in mixers:
        mixer.observer = lambda *seen: layers.append(seen)
    with torch.no_grad():
        model(IDS[:1])
    for mixer in mixers:
        mixer.observer = None
    return [_unrolled(*seen) for seen in layers]


def _unrolled(q, k, v, gates) -> dict:
    x = prepare(q, k, v, gates.beta, gates.decay, gates.precond, None, True)
    state, rows = initial(x, None, 1), {"kw": [], "a": [], "b": []}
    for t in range(q.shape[1]):
        one = x.map(lambda tensor, t=t: tensor[:, t])
        _, state = advance(one, state)
        w = one.k
        if x.precond is not None:
            b = scaling(state.a, one.precond)
            w = b * one.k
            rows["a"].append(state.a)
            rows["b"].append(b)
        rows["kw"].append((one.k * w).sum(-1))
    return {name: torch.stack(values, 1) for name, values in rows.items() if values} | {"x": x, "s": state.s}


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_every_number_is_that_of_the_recurrence(make_model, recurrence):
    model = make_model(recurrence=recurrence).double()
    for layer, seen in zip(health.measure(model, IDS), by_token(model), strict=True):
        x, kw, found = seen["x"], seen["kw"], layer.numbers
        eigenvalue = 1 - x.beta * kw
        expected = {"kw/least": kw.min(), "kw/mean": kw.mean(), "kw/largest": kw.max(), "beta": x.beta.mean()}
        expected |= {"eigenvalue/least": eigenvalue.min(), "negative": (eigenvalue < 0).double().mean()}
        expected["state"] = seen["s"].square().sum((-2, -1)).mean().sqrt()
        if "a" in seen:
            expected |= {f"{n}/least": seen[n].min() for n in "ab"} | {f"{n}/largest": seen[n].max() for n in "ab"}
            expected["center/largest"] = x.precond.center.max()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value.item(), rel=1e-9, abs=1e-12), name
        assert ("b/least" in found) == ("a" in seen) == ("log10_a" in layer.histograms)
        assert sum(layer.histograms["kw"]) == kw.numel()
        if "a" in seen:
            counts = torch.histc(torch.log10(seen["a"] + 1e-6).float(), health.BINS, *health.RANGES["log10_a"])
            assert (torch.tensor(layer.histograms["log10_a"]) - counts).abs().sum() <= 2  # values on an edge
            assert sum(layer.histograms["b"]) == seen["b"].numel()


def test_bounds_show(make_model):
    """k.w lies in [1/x, x], and is 1 without a preconditioner; writes past the eigenvalue 0 are counted."""
    numbers = health.measure(make_model(recurrence="pgdn", precond_bound=1.25), IDS)[0].numbers
    assert 1 / 1.25 <= numbers["kw/least"] < numbers["kw/largest"] <= 1.25
    model = make_model(recurrence="gdn", neg_eigval=True)
    numbers = health.measure(model, IDS)[0].numbers
    assert numbers["kw/least"] == pytest.approx(1, abs=0.05) and numbers["eigenvalue/least"] < 0 < numbers["negative"] < 1


def test_the_model_is_left_as_it_was(make_model):
    model = make_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = model(IDS)
    health.measure(model, IDS)
    assert all(block.mixer.observer is None for block in model.blocks) and torch.equal(model(IDS), expected)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(IndexError):
        health.measure(model, torch.full((1, 4), 99))
    assert all(block.mixer.observer is None for block in model.blocks)


def test_a_run_writes_it(tmp_path, tiny_shards):
    """One value a number, layer and step, and histograms whose sums are those of the values."""
    (tmp_path / "run.yaml").write_text(
        f"run_dir: {tmp_path}/run\n"
        "model: {hidden_size: 32, num_layers: 2, num_heads: 2, head_dim: 16, vocab_size: 512, intermediate_size: 32}\n"
        f"data: {{path: '{tiny_shards}', seq_len: 32}}\n"
        "optim: {warmup_steps: 0}\n"
        "train: {steps: 2, micro_batch: 2, global_batch: 2, precision: fp32, device: cpu}\n"
        "log: {every: 1, health: 2}\n"
    )
    command = [sys.executable, "-m", "pdn_train.train", str(tmp_path / "run.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    events = EventAccumulator(str(tmp_path / "run" / "tb")).Reload()
    for layer in (0, 1):
        assert [e.step for e in events.Scalars(f"health/kw/largest/layer_{layer:02d}")] == [2]
    bars = events.Histograms("health/b/layer_01")[0].histogram_value
    assert bars.num == 32 * 2 * 16 and 1 / 1.5 < bars.sum / bars.num < 1.5
