"""The short convolution against a token-by-token sum, with documents shorter than it, histories in and out, and every gradient."""

import itertools

import pytest
import torch

from kernels.conv import short_conv, short_conv_step

D, W = 5, 4
F64 = torch.float64


def normal(*shape, dtype=F64, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def by_hand(x, weight, history):
    """One sequence [T, D] after its history [W-1, D]: the definition, token by token."""
    seen = torch.cat([history, x])
    y = [sum(weight[:, W - 1 - i] * seen[t + W - 1 - i] for i in range(W)) for t in range(len(x))]
    y = torch.stack(y) if y else x
    return y / (1 + torch.exp(-y)), seen[len(seen) - (W - 1) :]


@pytest.mark.parametrize("T", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("with_history", [False, True])
def test_batch(T, with_history):
    x, weight = normal(2, T, D), normal(D, W)
    history = normal(2, W - 1, D) if with_history else None
    y, state = short_conv(x, weight, history, output_final_state=True)
    for b in range(2):
        judge, last = by_hand(x[b], weight, torch.zeros(W - 1, D, dtype=F64) if history is None else history[b])
        torch.testing.assert_close(y[b], judge, rtol=0, atol=1e-14)
        assert torch.equal(state[b], last)


BOUNDS = [0, 0, 1, 3, 6, 6, 13, 14]  # lengths 0, 1, 2, 3, 0, 7, 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_documents_restart_from_their_own_history(dtype):
    x, weight, history = normal(1, BOUNDS[-1], D), normal(D, W), normal(len(BOUNDS) - 1, W - 1, D)
    y, state = short_conv(x, weight, history, True, torch.tensor(BOUNDS, dtype=dtype))
    for n, (start, stop) in enumerate(itertools.pairwise(BOUNDS)):
        judge, last = by_hand(x[0, start:stop], weight, history[n])
        torch.testing.assert_close(y[0, start:stop], judge, rtol=0, atol=1e-14)
        assert torch.equal(state[n], last)


def test_gradcheck_with_history_and_final_history():
    cu_seqlens = torch.tensor(BOUNDS)
    inputs = [t.requires_grad_() for t in (normal(1, BOUNDS[-1], D), normal(D, W), normal(len(BOUNDS) - 1, W - 1, D))]
    assert torch.autograd.gradcheck(lambda x, w, h: short_conv(x, w, h, True, cu_seqlens), inputs)
    assert torch.autograd.gradcheck(lambda x, w: short_conv(x, w)[0], [normal(2, 3, D).requires_grad_(), inputs[1]])


def test_two_runs_from_the_history_are_one_run():
    x, weight = normal(2, 9, D), normal(D, W)
    whole, last = short_conv(x, weight, output_final_state=True)
    head, history = short_conv(x[:, :2], weight, output_final_state=True)
    tail, final = short_conv(x[:, 2:], weight, history, output_final_state=True)
    assert torch.equal(torch.cat([head, tail], 1), whole) and torch.equal(final, last)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 3e-3), (torch.float16, 4e-4)])
def test_precisions(dtype, tolerance):
    """fp32 inside, one rounding at the end; the history is the inputs themselves."""
    x, weight = normal(2, 40, 32, dtype=dtype), normal(32, W, dtype=dtype)
    y, state = short_conv(x, weight, output_final_state=True)
    judge, _ = short_conv(x.double(), weight.double())
    assert y.dtype == dtype and torch.equal(state, x[:, -3:])
    assert ((y.double() - judge).norm() / judge.norm()).item() < tolerance


@pytest.mark.parametrize("dtype", [F64, torch.bfloat16])
def test_step_equals_the_sequence(dtype):
    x, weight, history = (normal(*shape, dtype=dtype) for shape in ((2, 6, D), (D, W), (2, W - 1, D)))
    whole, last = short_conv(x, weight, history, output_final_state=True)
    state = history.clone()
    y = torch.stack([short_conv_step(state, x[:, t], weight) for t in range(6)], 1)
    torch.testing.assert_close(y, whole, rtol=1e-2 if dtype == torch.bfloat16 else 0, atol=1e-14)
    assert torch.equal(state, last) and y.dtype == dtype


def test_poison_in_one_document_stays_there():
    x, weight = normal(1, BOUNDS[-1], D), normal(D, W)
    poisoned = x.index_fill(1, torch.arange(3, 6), torch.nan)
    clean, dirty = (short_conv(t, weight, cu_seqlens=torch.tensor(BOUNDS))[0] for t in (x, poisoned))
    assert dirty[:, 3:6].isnan().all() and torch.equal(dirty[:, :3], clean[:, :3]) and torch.equal(dirty[:, 6:], clean[:, 6:])


X, WEIGHT = torch.zeros(2, 6, D), torch.zeros(D, W)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(x=X[0]), ["x", "[6, 5]"]),
        (dict(x=X.long()), ["x", "int64"]),
        (dict(weight=WEIGHT.T), ["weight", "[4, 5]", "D = 5"]),
        (dict(initial_state=torch.zeros(2, W, D)), ["initial_state", "[2, 4, 5]", "[2, 3, 5]"]),
        (dict(cu_seqlens=torch.tensor([0, 12])), ["cu_seqlens", "B = 1", "B = 2"]),
        (dict(x=X[:1], cu_seqlens=torch.tensor([0, 5])), ["cu_seqlens", "5", "6"]),
        (dict(x=X[:1], cu_seqlens=torch.tensor([0, 2, 6]), initial_state=torch.zeros(1, 3, D)), ["initial_state", "[2, 3, 5]"]),
        (dict(backend="reference"), ["backend", "reference"]),
        (dict(weight=torch.zeros(D, 3), backend="triton"), ["weight", "[5, 3]", "3 taps"]),
    ],
)
def test_wrong_argument(arguments, words):
    with pytest.raises(ValueError) as error:
        short_conv(**({"x": X, "weight": WEIGHT} | arguments))
    assert str(error.value).startswith(words[0]) and all(word in str(error.value) for word in words), error.value


def test_wrong_step():
    with pytest.raises(ValueError, match="^state"):
        short_conv_step(torch.zeros(2, W, D), X[:, 0], WEIGHT)
