"""The model against a plain transcription of docs/paper.md, section 3, its loss against torch's own, decoding against the full forward."""

import math

import pytest
import torch
import torch.nn.functional as F

from kernels.recurrence import RECURRENCES
from pdn_train import model as model_module
from pdn_train.config import ModelConfig
from pdn_train.model import LanguageModel

SMALL = {"hidden_size": 40, "num_layers": 2, "num_heads": 2, "head_dim": 16, "intermediate_size": 48, "vocab_size": 50}
VARIANTS = [{"recurrence": name} for name in RECURRENCES]
OPTIONS = [
    {"recurrence": "gdn", "neg_eigval": True},
    {"recurrence": "pgdn", "tie_gates": True},
    {"recurrence": "pdn", "tie_gates": True},
    {"recurrence": "pkda", "precond_bound": 2.0},
    {"recurrence": "gdn", "tie_embeddings": False},
]
ABLATIONS = [{"precond_form": form} for form in ("unstable_atk", "atq", "norm_kbk", "norm_1_kbk", "norm_beta")]
ABLATIONS += [{"recurrence": "pkda", "precond_interval": interval} for interval in ("up", "down")]


def build(variant: dict, dtype=torch.float32) -> LanguageModel:
    model = LanguageModel(ModelConfig(**SMALL, **variant))
    model.init_weights(0)
    for i, parameter in enumerate(model.parameters()):  # away from the symmetric initial values, so that every parameter matters
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
    return model.to(dtype)


def tokens(batch=2, length=21, seed=0) -> torch.Tensor:
    return torch.randint(0, SMALL["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


# ---- the whole model, token by token, from the formulas ----


def plain_norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def gate_columns(c):
    """The columns after those of q, k and v, in order: name -> number."""
    columns = {"decay": c.head_dim, "gate": c.head_dim} if c.mixer.decay == "channel" else {}
    columns |= {"beta": c.num_heads} | ({"decay": c.num_heads} if c.mixer.decay == "scalar" else {})
    if c.preconditioned and not (c.tie_gates and c.recurrence == "pgdn"):
        columns["precond_decay"] = c.num_heads
    if c.preconditioned and not c.tie_gates:
        columns["precond_gain"] = c.num_heads
    return columns


def plain_mixer(m, x):
    """One sequence x [T, hidden], in the letters of docs/paper.md, sections 1 and 3."""
    c, length, heads, dim = m.config, len(x), m.config.num_heads, m.config.head_dim
    raw = torch.cat([torch.zeros(3, 3 * heads * dim, dtype=x.dtype), x @ m.in_proj.weight[: 3 * heads * dim].T])
    conv = F.silu(sum(raw[i : i + length] * m.conv_weight[:, i] for i in range(4)))
    q, k, v = conv.view(length, 3, heads, dim).unbind(1)
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    columns, start = {}, 3 * heads * dim
    for name, width in gate_columns(c).items():
        columns[name] = x @ m.in_proj.weight[start : start + width].T
        start += width
    assert start == len(m.in_proj.weight)
    beta = torch.sigmoid(columns["beta"]) * (2 if c.neg_eigval else 1)
    g = torch.zeros(length, heads, dim, dtype=x.dtype)
    if c.mixer.decay == "scalar":
        g = g - (m.A_log.exp() * F.softplus(columns["decay"] + m.dt_bias))[..., None]
    if c.mixer.decay == "channel":
        raw_g = (columns["decay"] @ m.decay_up.weight.T + m.dt_bias).view(length, heads, dim)
        g = g - m.A_log.exp()[:, None] * F.softplus(raw_g)
    if c.preconditioned and not c.tie_gates:
        p = -m.precond_A_log.exp() * F.softplus(columns["precond_decay"] + m.precond_dt_bias)
        gain = torch.sigmoid(columns["precond_gain"])
    elif c.preconditioned:
        gain = beta
        p = g[..., 0]
        if c.recurrence == "pdn":
            p = -m.precond_A_log.exp() * F.softplus(columns["precond_decay"] + m.precond_dt_bias)
    o, s, a = [], torch.zeros(heads, dim, dim, dtype=x.dtype), torch.zeros(heads, dim, dtype=x.dtype)
    for t in range(length):
        w = k[t]
        if c.preconditioned:
            a = p[t].exp()[:, None] * a + gain[t][:, None] * k[t] ** 2
            r = torch.log(a + 1e-6) - m.center[:, None]
            w = torch.exp(-math.log(c.precond_bound) * r / (1 + r.abs())) * k[t]
        s = g[t].exp()[..., None] * s
        s = s + w[..., None] * (beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", s, k[t])))[:, None]
        o.append(dim**-0.5 * torch.einsum("hkv,hk->hv", s, q[t]))
    o = plain_norm(torch.stack(o), m.norm.weight)
    if c.mixer.decay == "channel":
        o = o * torch.sigmoid(columns["gate"] @ m.output_up.weight.T + m.output_bias).view(length, heads, dim)
    return o.flatten(1) @ m.out_proj.weight.T


def plain_logits(model, ids):  # [T] -> [T, vocab]
    x = model.embedding.weight[ids]
    for block in model.blocks:
        x = x + plain_mixer(block.mixer, plain_norm(x, block.mixer_norm.weight))
        gate, up = (plain_norm(x, block.mlp_norm.weight) @ block.mlp.gate_up_proj.weight.T).chunk(2, -1)
        x = x + (gate * torch.sigmoid(gate) * up) @ block.mlp.down_proj.weight.T
    return plain_norm(x, model.norm.weight) @ model.head.weight.T


@pytest.mark.parametrize("variant", VARIANTS + OPTIONS, ids=str)
@torch.no_grad()
def test_equals_the_plain_transcription(variant):
    model, ids = build(variant, torch.float64), tokens()
    expected = torch.stack([plain_logits(model, row) for row in ids])
    assert (model(ids) - expected).abs().max() < 1e-10 * expected.abs().max()


@pytest.mark.parametrize(
    "name, parameters",
    [("dn", 341_594_112), ("gdn", 341_791_104), ("pdn", 341_987_904), ("pgdn", 342_184_896), ("kda", 354_226_368), ("pkda", 354_620_160)],
)
def test_parameter_counts_at_340m(name, parameters):
    """Counted by hand from docs/paper.md, section 3; another implementation has 341.8M, 342.2M, 354.2M and 354.6M."""
    with torch.device("meta"):
        model = LanguageModel(ModelConfig(recurrence=name))
    assert sum(p.numel() for p in model.parameters()) == parameters


@torch.no_grad()
def test_ablations_reach_the_recurrence():
    """Each gives logits of its own: the plain ones and the seven variants are eight different models."""
    results = [build(variant, torch.float64)(tokens()) for variant in [{}, *ABLATIONS[:5]]]
    results += [build(variant, torch.float64)(tokens()) for variant in [{"recurrence": "pkda"}, *ABLATIONS[5:]]]
    assert all((a - b).abs().max() > 1e-4 for i, a in enumerate(results) for b in results[:i])


# ---- initial weights ----


def test_initial_weights_follow_the_table():
    model = LanguageModel(ModelConfig(recurrence="pkda", hidden_size=256, num_layers=2, num_heads=64, head_dim=16, vocab_size=500))
    model.init_weights(3)
    mixer = model.blocks[1].mixer
    for matrix in (model.embedding.weight, mixer.in_proj.weight, mixer.conv_weight, model.blocks[0].mlp.down_proj.weight):
        assert abs(matrix.std().item() / 0.02 - 1) < 0.05 and abs(matrix.mean().item()) < 1e-3
    assert torch.equal(mixer.norm.weight, torch.ones(16)) and torch.equal(model.norm.weight, torch.ones(256))
    assert torch.equal(mixer.output_bias, torch.zeros(1024)) and torch.equal(mixer.dt_bias, torch.zeros(1024))
    assert torch.equal(mixer.center, torch.full((64,), -0.2))
    for a_log in (mixer.A_log, mixer.precond_A_log):
        assert a_log.exp().min() > 0 and a_log.exp().max() <= 16 and 6 < a_log.exp().mean() < 10
    dt = F.softplus(mixer.precond_dt_bias)
    assert dt.min() > 0.00099 and dt.max() < 0.101 and 0.006 < dt.log().mean().exp() < 0.016  # log-uniform: the middle is 0.01
    channels = LanguageModel(ModelConfig(**SMALL, recurrence="kda", channel_dt="log_uniform"))
    channels.init_weights(3)
    dt = F.softplus(channels.blocks[0].mixer.dt_bias)
    assert dt.min() > 0.00099 and dt.max() < 0.101 and dt.log().std() > 0.9  # 1.33 over the whole range
    scalar = LanguageModel(ModelConfig(**SMALL, recurrence="pgdn"))
    scalar.init_weights(3)
    assert F.softplus(scalar.blocks[0].mixer.dt_bias).min() > 0.00099


def test_initial_weights_depend_on_the_seed_alone():
    def weights(seed, dtype=torch.float32):
        model = LanguageModel(ModelConfig(**SMALL)).to(dtype)
        torch.manual_seed(dtype.itemsize)  # whatever the global generator holds
        model.init_weights(seed)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert torch.equal(weights(1).bfloat16(), weights(1, torch.bfloat16))
    assert not torch.equal(weights(1), weights(2))


def test_tied_head_is_one_parameter_with_two_names():
    tied = build({})
    assert tied.head.weight is tied.embedding.weight and {"embedding.weight", "head.weight"} <= set(tied.state_dict())
    assert tied.bfloat16().head.weight is tied.embedding.weight
    free = build({"tie_embeddings": False})
    assert free.head.weight is not free.embedding.weight


# ---- the loss ----


def reference_loss(model, ids, labels):
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_gradients_equal_torchs(tied):
    model, ids, labels = build({"tie_embeddings": tied}, torch.float64), tokens(seed=1), tokens(seed=2)
    labels[0, 3:17] = -100
    parameters = list(model.parameters())
    loss, expected = model(ids, labels), reference_loss(model, ids, labels)
    assert loss.dtype == torch.float64 and abs(loss / expected - 1) < 1e-12
    for got, want in zip(torch.autograd.grad(loss / 7, parameters), torch.autograd.grad(expected / 7, parameters), strict=True):
        assert (got - want).norm() <= 1e-9 * want.norm()


def test_no_targets_give_zero_and_no_nan():
    model, ids = build({}), tokens()
    loss = model(ids, torch.full_like(ids, -100))
    loss.backward()
    assert loss.item() == 0 and all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


def test_bf16_gradients_are_near_fp32s():
    """The same weights in both. Single numbers such as A_log gather noise from everywhere, so they get more room than the matrices."""
    narrow, ids, labels = build({}, torch.bfloat16), tokens(4, 40), tokens(4, 40, seed=1)
    wide = build({})
    wide.load_state_dict(narrow.state_dict())
    for model in (wide, narrow):
        model(ids, labels).backward()
    for (name, want), got in zip(wide.named_parameters(), narrow.parameters(), strict=True):
        assert (got.grad.float() - want.grad).norm() < (0.05 if want.ndim == 2 else 0.2) * want.grad.norm(), name


@pytest.mark.parametrize("recurrence", ["pgdn", "pkda"])
@torch.no_grad()
def test_every_module_uses_only_its_own_parameters(recurrence):
    """As under ZeRO-3, which holds a parameter only while the forward of the module that owns it runs."""
    model, ids, labels = build({"recurrence": recurrence}), tokens(), tokens(seed=1)
    expected = model(ids, labels)
    whole = {parameter: parameter.data for parameter in model.parameters()}

    def gather(module, _):
        for parameter in module.parameters(recurse=False):
            parameter.data = whole[parameter]

    def free(module, *_):
        for parameter in module.parameters(recurse=False):
            parameter.data = torch.empty(0)

    for module in model.modules():
        module.register_forward_pre_hook(gather)
        module.register_forward_hook(free)
        free(module)
    assert torch.equal(model(ids, labels), expected)


# ---- precision, documents, generation ----


@pytest.mark.parametrize("recurrence", ["pgdn", "pkda"])
def test_gates_are_fp32_in_a_bf16_model(monkeypatch, recurrence):
    seen = []

    def spy(q, k, v, beta, decay, precond, **others):
        seen.extend([beta.dtype, decay.dtype, precond.decay.dtype, precond.gain.dtype, precond.center.dtype])
        return real(q, k, v, beta, decay, precond, **others)

    real = model_module.delta_rule
    monkeypatch.setattr(model_module, "delta_rule", spy)
    out = build({"recurrence": recurrence}, torch.bfloat16)(tokens())
    assert out.dtype == torch.bfloat16 and set(seen) == {torch.float32}


@pytest.mark.parametrize("variant", VARIANTS, ids=list(RECURRENCES))
@torch.no_grad()
def test_packed_documents_equal_separate_ones(variant):
    model, ids = build(variant, torch.float64), tokens(1, 30)
    starts = [0, 1, 9, 30]
    together = model(ids, cu_seqlens=torch.tensor(starts, dtype=torch.int32))
    apart = torch.cat([model(ids[:, a:b]) for a, b in zip(starts, starts[1:], strict=False)], 1)
    assert (together - apart).abs().max() < 1e-10


@pytest.mark.parametrize("variant", VARIANTS + OPTIONS + ABLATIONS, ids=str)
@torch.no_grad()
def test_prefill_and_steps_equal_the_full_forward(variant):
    """Three prompts of 9, 1 and 2 tokens (shorter than the convolution), then 12 tokens one by one."""
    model = build(variant)
    rows, lengths = tokens(3, 21), [9, 1, 2]
    packed = torch.cat([row[:n] for row, n in zip(rows, lengths, strict=True)])[None]
    full = [model(row[None])[0] for row in rows]  # [21, vocab] each
    logits, cache = model.prefill(packed, torch.tensor([0, 9, 10, 12]))
    for t in range(12):
        for row, n in enumerate(lengths):
            assert (logits[row] - full[row][n - 1 + t]).abs().max() < 1e-5 * full[row].abs().max()
        logits = model.step(torch.stack([row[n + t] for row, n in zip(rows, lengths, strict=True)]), cache)
