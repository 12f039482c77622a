"""The Triton passes round the recurrence against plain PyTorch in fp64: outputs, histories and every gradient.

Without a GPU in Triton's interpreter, in fp32 and at small shapes, since a program takes milliseconds there; with one on it. Sizes of
16-bit inputs: `test_mixer_cuda.py`.
"""

import importlib
import os

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from kernels import conv_triton, mixer_inputs_triton, norm_triton, sums, tables  # noqa: E402
from kernels.conv import short_conv, short_conv_step  # noqa: E402
from kernels.gates import GateColumns, GateParameters, channel_decay, log_decay  # noqa: E402
from kernels.mixer_inputs import mixer_inputs, mixer_inputs_step  # noqa: E402
from kernels.norm import gated_rms_norm, residual_rms_norm, rms_norm  # noqa: E402
from kernels.sums import Sum, column_sums  # noqa: E402
from kernels.swiglu import swiglu, swiglu_linear  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
TOLERANCE = 2e-6


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 7 * sum(shape)))


def poisoned(x, poison=float("nan")):
    """x as a view inside a larger buffer that holds poison before, after and beside each row."""
    rows = x.reshape(-1, x.shape[-1])
    buffer = torch.full((len(rows) + 2, 8 * (rows.shape[1] // 8 + 2)), poison, dtype=x.dtype, device=x.device)
    buffer[1:-1, 8 : 8 + rows.shape[1]] = rows
    return buffer[1:-1, 8 : 8 + rows.shape[1]].unflatten(0, x.shape[:-1] or (1,)).view(x.shape)


def run(f, backend, dtype, inputs, place):
    """Outputs of f(backend, *inputs) and their gradients to the inputs, in fp64, for a random weighting of the outputs."""
    leaves = [place(x.to(DEVICE, dtype)).detach().requires_grad_() for x in inputs]
    outputs = f(backend, *leaves)
    outputs = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y is not None]
    loss = sum((y.double() * normal(*y.shape, seed=i).to(DEVICE)).sum() for i, y in enumerate(outputs))
    return [x.detach().double().cpu() for x in (*outputs, *torch.autograd.grad(loss, leaves))]


def assert_equal_to_torch(f, *inputs, place=lambda x: x):
    got, judge = run(f, "triton", torch.float32, inputs, place), run(f, "torch", torch.float64, inputs, lambda x: x)
    errors = [((x - y).norm() / (y.norm() or 1)).item() for x, y in zip(got, judge, strict=True)]
    assert all(error <= TOLERANCE for error in errors), errors  # NaN fails too


# ---- the convolution ----

PACKED = [0, 0, 1, 3, 6, 6, 17, 18]  # lengths 0, 1, 2, 3, 0, 11, 1


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of a few rows and channels, so that small shapes have several."""
    monkeypatch.setattr(mixer_inputs_triton, "FORWARD_ROWS", 4)
    monkeypatch.setattr(mixer_inputs_triton, "BACKWARD_ROWS", 8)
    monkeypatch.setattr(mixer_inputs_triton, "CHANNELS", 16)
    monkeypatch.setattr(mixer_inputs_triton, "TOKENS", 4)
    monkeypatch.setattr(norm_triton, "PROGRAMS", 21)
    monkeypatch.setattr(norm_triton, "SHORT", 64)
    monkeypatch.setattr(norm_triton, "BACKWARD_TILE", 1024)
    monkeypatch.setattr(sums, "ELEMENTS", 32)


@pytest.fixture(autouse=True)
def nan_in_new_tensors():
    """In what `torch.empty` gives, the largest number in tensors of integers: whoever reads what nobody wrote is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("T", [1, 3, 13])
def test_conv_of_a_batch(T):
    assert_equal_to_torch(lambda b, x, w: short_conv(x, w, backend=b)[0], normal(2, T, 20), normal(20, 4), place=poisoned)


@pytest.mark.parametrize("bounds", [PACKED, None])
def test_conv_with_histories_in_and_out(bounds):
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    shape, sequences = ((2, 9, 12), 2) if bounds is None else ((1, bounds[-1], 12), len(bounds) - 1)

    def f(backend, x, w, h):
        return short_conv(x, w, h, True, cu_seqlens, backend)

    assert_equal_to_torch(f, normal(*shape), normal(12, 4), normal(sequences, 3, 12))


def test_conv_of_packed_documents_from_zero():
    """The last history is given out, none comes in."""
    cu_seqlens = torch.tensor(PACKED)
    assert_equal_to_torch(lambda b, x, w: short_conv(x, w, None, True, cu_seqlens, b), normal(1, PACKED[-1], 12), normal(12, 4))


def test_a_document_is_not_touched_by_its_neighbours():
    """NaN in one document, values and gradients, stays there."""
    x, w = normal(1, PACKED[-1], 12).to(DEVICE), normal(12, 4).to(DEVICE)
    x = x.index_fill(1, torch.arange(6, 17, device=DEVICE), torch.nan).requires_grad_()
    y, _ = short_conv(x, w, cu_seqlens=torch.tensor(PACKED), backend="triton")
    (dx,) = torch.autograd.grad(y.sum(), x)
    for one in (y, dx):
        assert one[:, 6:17].isnan().all() and one[:, :6].isfinite().all() and one[:, 17:].isfinite().all()


def test_conv_step():
    """Token by token from a history it is the sequence, and the history goes on in place."""
    x, w, state = normal(2, 5, 20).to(DEVICE), normal(20, 4).to(DEVICE), normal(2, 3, 20).to(DEVICE)
    judge, last = short_conv(x.double(), w.double(), state.double(), True)
    y = torch.stack([short_conv_step(state, poisoned(x)[:, t], w, "triton") for t in range(5)], 1)
    torch.testing.assert_close(y.double(), judge, rtol=0, atol=1e-5)
    assert torch.equal(state.double(), last)


def test_tables_are_kept_and_bounded(monkeypatch):
    monkeypatch.setattr(tables, "KEPT", 2)
    monkeypatch.setattr(conv_triton, "_tables", tables.Tables())
    made = [conv_triton.row_blocks(1, T, None, 4, torch.device(DEVICE)) for T in (5, 6, 7)]
    assert len(conv_triton._tables.kept) == 2
    assert conv_triton.row_blocks(1, 7, None, 4, torch.device(DEVICE)) is made[2]
    assert made[1].tolist() == [[0, 0, 0, 6], [0, 4, 0, 6]]
    packed = conv_triton.row_blocks(1, 5, (0, 0, 5), 4, torch.device(DEVICE))
    assert packed.tolist() == [[0, 0, 0, 0], [1, 0, 0, 5], [1, 4, 0, 5]]


# ---- with the gates ----

H, K = 3, 4
W = 3 * H * K
ALL = ("A_log", "dt_bias", "forget_A_log", "forget_dt_bias", "center")
COLUMNS = {
    "dn": (GateColumns(H, W, factor=2), ()),
    "gdn": (GateColumns(H, W, W + H, unused=2), ALL[:2]),
    "pdn, gain tied": (GateColumns(H, W, None, W + H, W), ALL[2:]),
    "pgdn": (GateColumns(H, W, W + H, W + 2 * H, W + 3 * H), ALL),
    "pgdn, tied": (GateColumns(H, W, W + H, W + H, W, factor=2), ("A_log", "dt_bias", "center")),
    "pkda": (GateColumns(H, W, None, W + H + 2 * K, W + 2 * H + 2 * K, rank=K, low=W + H, output=W + H + K), ALL[2:]),
}


def columns_of(columns):
    ends = [first + H for first in columns[1:5] if first is not None]
    return max(ends + [columns.output + K] if columns.output else ends) + columns.unused


@pytest.mark.parametrize("which", COLUMNS)
def test_mixer_inputs(which):
    columns, names = COLUMNS[which]

    def f(backend, x, weight, *parameters):
        given = GateParameters(**dict(zip(names, parameters, strict=True)))
        m = mixer_inputs(x, weight, columns, given, backend=backend)
        return m.q, m.k, m.v, *m.gates

    inputs = [3 * normal(1, 6, columns_of(columns)), normal(W, 4), *(normal(H, seed=i) - 2 for i in range(len(names)))]
    assert_equal_to_torch(f, *inputs, place=poisoned if which == "pkda" else lambda x: x)


@torch.no_grad()
@pytest.mark.parametrize("which", ["pgdn", "pkda"])
def test_mixer_inputs_step(which):
    columns, names = COLUMNS[which]
    x, weight, history = normal(4, columns_of(columns)).to(DEVICE), normal(W, 4).to(DEVICE), normal(4, 3, W).to(DEVICE)
    parameters = GateParameters(**{name: normal(H, seed=i).to(DEVICE) for i, name in enumerate(names)})
    made = {}
    for backend in ("torch", "triton"):
        state = history.clone()
        m = mixer_inputs_step(state, x, weight, columns, parameters, backend)
        made[backend] = [one for one in (m.q, m.k, m.v, *m.gates, state) if one is not None]
    for got, judge in zip(made["triton"], made["torch"], strict=True):
        torch.testing.assert_close(got, judge, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "columns, parameters, words",
    [
        (COLUMNS["pgdn"][0]._replace(gain=W + 4 * H), {}, ["columns", "starts at 48", "45"]),
        (GateColumns(H, W, W + H, unused=1), {}, ["columns", "end at 43", "48"]),
        (COLUMNS["pgdn"][0], {"A_log": None}, ["parameters.A_log", "[3]", "None"]),
        (COLUMNS["pgdn"][0], {"center": torch.zeros(2)}, ["parameters.center", "[3]", "[2]"]),
        (COLUMNS["pgdn"][0], {"center": torch.zeros(3).half()}, ["parameters", "dtype", "float16"]),
    ],
)
def test_wrong_columns_and_parameters(columns, parameters, words):
    given = GateParameters(**({name: torch.zeros(H) for name in ALL} | parameters))
    with pytest.raises(ValueError) as error:
        mixer_inputs(torch.zeros(1, 2, W + 4 * H), torch.zeros(W, 4), columns, given)
    assert str(error.value).startswith(words[0]) and all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("shift", [-12.0, 0.0, 12.0])
def test_channel_decay(shift):
    """softplus where it is the exponential, where it bends, and where it is x: to the digits of fp32."""
    x = normal(2, 37, 3, 20) + shift
    assert_equal_to_torch(lambda b, x, A, dt: channel_decay(x, A, dt, b), x, normal(3), normal(3, 20), place=poisoned)
    got = channel_decay(x.to(DEVICE), torch.zeros(3, device=DEVICE), torch.zeros(3, 20, device=DEVICE), "triton")
    judge = log_decay(x.double(), torch.zeros(3, 1), torch.zeros(3, 20))
    assert ((got.double().cpu() - judge) / judge).abs().max() < 2e-6


# ---- norms and SwiGLU ----


def test_column_sums():
    """More partial sums than a program takes at once, and than columns; two in a launch."""
    a, b = normal(300, 24).to(DEVICE), normal(1, 5).to(DEVICE)
    a_out, b_out = torch.empty(24, device=DEVICE), torch.empty(5, dtype=torch.float16, device=DEVICE)
    column_sums(Sum(a, a_out), Sum(b, b_out))
    torch.testing.assert_close(a_out, a.double().sum(0).float(), rtol=0, atol=1e-4)
    assert torch.equal(b_out, b[0].half())


def shuffle_programs(monkeypatch):
    """In the interpreter the programs of a launch run one by one: from here on in an order drawn at random."""
    builder = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    place = builder.set_grid_idx

    def shuffled(x, y, z):
        order = torch.randperm(builder.grid_dim[0], generator=torch.Generator().manual_seed(0))
        place(order[x].item(), y, z)

    monkeypatch.setattr(builder, "set_grid_idx", shuffled)


def passes_with_sums():
    """f(backend, *inputs) and inputs of every pass whose programs add up."""
    columns, names = COLUMNS["pgdn"]

    def told(backend, x, weight, *parameters):
        m = mixer_inputs(x, weight, columns, GateParameters(*parameters), backend=backend)
        return m.q, m.k, m.v, *m.gates[:5]

    heads = normal(1, 15, 2, 24), normal(1, 15, 2, 24, seed=1), normal(24), normal(2, 24)
    return {
        "mixer_inputs": (told, (normal(3, 1, columns_of(columns)), normal(W, 4), *(normal(H, seed=i) for i in range(5)))),
        "rms_norm": (lambda b, x, w: rms_norm(x, w, 1e-2, b), heads[::2]),
        "gated_rms_norm": (lambda b, x, g, w, bias: gated_rms_norm(x, g, w, 1e-2, bias, b), heads),
    }


@pytest.mark.parametrize("which", passes_with_sums())
def test_backward_again_through_the_same_graph(which, monkeypatch):
    """The counters are zero again after each backward pass, those of a second forward pass are its own, and whichever program comes last,
    the bits are the same. (How programs see each other's stores, only a card tells: `test_mixer_cuda.py`.)"""
    monkeypatch.setattr(mixer_inputs_triton, "CHANNELS", 64)
    f, inputs = passes_with_sums()[which]
    assert_equal_to_torch(f, *inputs)
    leaves = [x.to(DEVICE).requires_grad_() for x in inputs]

    def graph():
        outputs = f("triton", *leaves)
        return [y.square().sum() for y in (outputs if isinstance(outputs, tuple) else (outputs,))]

    first, second = graph(), graph()
    found = [torch.autograd.grad(losses, leaves, retain_graph=True) for losses in (first, second)]
    if not GPU:
        shuffle_programs(monkeypatch)
    found.append(torch.autograd.grad(first, leaves))
    for again in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], again, strict=True))


@pytest.mark.parametrize("D", [16, 24, 200])
def test_rms_norm(D):
    assert_equal_to_torch(lambda b, x, w: rms_norm(x, w, 1e-2, b), normal(3, 17, D), normal(D), place=poisoned)


@pytest.mark.parametrize("biased, D", [(False, 24), (True, 24), (True, 72)])
def test_gated_rms_norm(biased, D):
    inputs = [normal(3, 17, 3, D), normal(3, 17, 3, D, seed=1), normal(D), *([normal(3, D)] if biased else [])]
    assert_equal_to_torch(lambda b, x, g, w, bias=None: gated_rms_norm(x, g, w, 1e-2, bias, b), *inputs, place=poisoned)


@pytest.mark.parametrize("D", [40, 72])
def test_residual_rms_norm(D):
    stream, x, w = normal(3, 17, D), normal(3, 17, D, seed=1), normal(D)
    assert_equal_to_torch(lambda b, s, x, w: residual_rms_norm(s, x, w, 1e-2, b), stream, x, w, place=poisoned)
    assert_equal_to_torch(lambda b, s, w: residual_rms_norm(s, None, w, 1e-2, b), stream, w, place=poisoned)


def test_swiglu():
    assert_equal_to_torch(lambda b, x: swiglu(x, b), 3 * normal(3, 7, 2 * 300), place=poisoned)


def test_swiglu_and_the_product_after_it():
    assert_equal_to_torch(lambda b, x, w: swiglu_linear(x, w, b), 3 * normal(3, 7, 2 * 300), normal(5, 300), place=poisoned)


def test_swiglu_and_its_product_have_the_bits_of_the_two_apart():
    """So what is made again for the weight's gradient is what the forward pass had."""
    inputs = (normal(9, 2 * 300), normal(5, 300))
    apart = run(lambda b, x, w: swiglu(x, b) @ w.T, "triton", torch.float32, inputs, lambda x: x)
    for x, y in zip(run(lambda b, x, w: swiglu_linear(x, w, b), "triton", torch.float32, inputs, lambda x: x), apart, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda x: rms_norm(x, torch.ones(24), 1e-6, "reference"), ["backend='reference'"]),
        (lambda x: rms_norm(x.double(), torch.ones(24), 1e-6, "triton"), ["x is torch.float64", "backend='torch'"]),
        (lambda x: rms_norm(x.expand(2, 24).reshape(1, -1).repeat(1, 200), torch.ones(9600), 1e-6, "triton"), ["x has 9600", "8192"]),
        (lambda x: rms_norm(x[:0], torch.ones(24), 1e-6, "triton"), ["x is empty", "[0, 24]"]),
        (lambda x: gated_rms_norm(x, x, torch.ones(24), 1e-6, torch.zeros(24)), ["bias", "[24]"]),
        (lambda x: residual_rms_norm(x, x[:1, :1], torch.ones(24), 1e-6), ["x is", "[1, 1]"]),
        (lambda x: channel_decay(x[None, None], torch.ones(2), torch.zeros(1, 24)), ["A_log", "[1]", "[2]"]),
        (lambda x: swiglu(x[:, :23]), ["x", "[1, 23]"]),
        (lambda x: swiglu(x[:0]), ["x is empty", "[0, 24]"]),
        (lambda x: swiglu_linear(x, torch.ones(5, 24)), ["weight", "[5, 24]", "[D, 12]"]),
    ],
)
def test_wrong_arguments(call, words):
    with pytest.raises(ValueError) as error:
        call(torch.zeros(1, 24))
    assert str(error.value).startswith(words[0]) and all(word in str(error.value) for word in words), error.value
