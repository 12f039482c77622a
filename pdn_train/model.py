"""The language model: pre-norm blocks of a recurrent token mixer and a SwiGLU MLP, with tied embeddings (docs/paper.md, section 3).

    ids -> Embedding -> num_layers x [ x + Mixer(norm(x)) ; x + MLP(norm(x)) ] -> norm -> Head -> logits, or the summed cross-entropy

After arXiv:2604.21100. One `Mixer` serves all six recurrences: what differs is which gates exist, and that is read from the table in
`kernels.recurrence`. Shapes are B sequences, T tokens, H heads, K = V = head_dim channels a head, W = H * K the mixer's width, which may
differ from hidden_size.

The model knows no rank, no ZeRO and no optimizer. Two things are shaped by ZeRO-3 all the same, which gathers a parameter only around the
`forward` of the module that owns it: no module reads another one's parameters, and the tied matrix is owned twice, by `Embedding` and by
`Head` (one tensor, two names).

What it costs in memory: `kernels.cross_entropy` for the head, `pdn_train.recompute` for the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import maps
from kernels.chunk import Preconditioner, State, delta_rule
from kernels.conv import short_conv, short_conv_step
from kernels.cross_entropy import summed_cross_entropy
from kernels.decode import step
from kernels.maps import Relay
from kernels.norm import gated_rms_norm, rms_norm
from kernels.operands import computation_dtype
from pdn_train import recompute
from pdn_train.config import ModelConfig

CONV_WIDTH = 4


class Gates(NamedTuple):
    """What the recurrence is told at each token besides q, k and v; the time axis is absent while decoding."""

    beta: Tensor  # [B, T, H] in (0, 1), or (0, 2) with neg_eigval
    decay: Tensor | None  # None | [B, T, H] | [B, T, H, K], log decay <= 0
    precond: Preconditioner | None


@dataclass
class MixerCache:
    """What one mixer remembers of N sequences: the recurrence's states and the convolution's last inputs."""

    state: State  # s [N, H, K, V] fp32, a [N, H, K] fp32 or None
    history: Tensor  # [N, CONV_WIDTH - 1, 3 W]


@dataclass
class Cache:
    """What the model remembers of N sequences while it generates. Its size does not grow with their length."""

    layers: list[MixerCache]


class Linear(nn.Linear):
    """nn.Linear without a bias, and without its own initialisation: `LanguageModel.init_weights` sets every parameter.

    The one bias of the model (the output gate's) is added outside: ZeRO-3's Linear adds it in place, into the product that selective
    checkpointing keeps, and so would add it twice.
    """

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis; with a gate, y * sigmoid(gate)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:  # [..., size], [..., size]
        return rms_norm(x, self.weight, self.eps) if gate is None else gated_rms_norm(x, gate, self.weight, self.eps)


class Mixer(nn.Module):
    """The token mixer (docs/paper.md, section 3): projections, short convolution, gates, recurrence, head-wise norm, output projection.

        q, k, v = SiLU(conv(x W_qkv))                   the recurrence normalises q and k per head
        beta    = sigmoid(x W_b)                        doubled with neg_eigval
        g       = -exp(A_log) softplus(a + dt_bias)     a = x W_a, one a head (scalar), or x W_down W_up, one a channel (channel)
        p, c    = like scalar g, and like beta          the preconditioner's decay and gain; with tie_gates they are g and beta
        y       = RMSNorm(o) W_o                        with channel decay (RMSNorm(o) * sigmoid(x W_down' W_up' + bias)) W_o

    W_b, W_a, W_down and so on are one matrix, `gate_proj`, whose columns `gate_columns` names in order: one product reads x for all.
    Gates are computed in fp32 (fp64 in an fp64 model): a log decay near 0, rounded to bf16, would forget a long context wrongly. Their
    parameters (A_log, dt_bias, center and the preconditioner's) are weights like any other: in a bf16 model they are bf16, rounded from
    the optimizer's fp32 masters, and the gates are computed in fp32 from the rounded values.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.heads, self.head_dim, self.width = config.num_heads, config.head_dim, config.num_heads * config.head_dim
        self.gate_columns = _gate_columns(config)
        self.qkv_proj = Linear(config.hidden_size, 3 * self.width)
        self.gate_proj = Linear(config.hidden_size, sum(self.gate_columns.values()))
        self.conv_weight = nn.Parameter(torch.empty(3 * self.width, CONV_WIDTH))
        self._add_decay(config.mixer.decay)
        self._add_preconditioner()
        self.norm = RMSNorm(self.head_dim, config.norm_eps)
        self.out_proj = Linear(self.width, config.hidden_size)

    def _add_decay(self, decay: Literal["none", "scalar", "channel"]) -> None:
        if decay == "none":
            return
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(self.heads if decay == "scalar" else self.width))
        if decay == "channel":
            self.decay_up = Linear(self.head_dim, self.width)
            self.output_up = Linear(self.head_dim, self.width)
            self.output_bias = nn.Parameter(torch.empty(self.width))

    def _add_preconditioner(self) -> None:
        if "precond_decay" in self.gate_columns:
            self.precond_A_log = nn.Parameter(torch.empty(self.heads))
            self.precond_dt_bias = nn.Parameter(torch.empty(self.heads))
        if self.config.preconditioned:
            self.center = nn.Parameter(torch.empty(self.heads))

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, relay: Relay | None = None) -> Tensor:  # [B, T, hidden], the same
        return self._mix(x, cu_seqlens, keep=False, relay=relay)[0]

    def prefill(self, x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, MixerCache]:
        """`forward` of N packed prompts [1, T, hidden], and what must be remembered to go on after each."""
        y, state, history = self._mix(x, cu_seqlens, keep=True)
        return y, MixerCache(state, history)

    def step(self, x: Tensor, cache: MixerCache) -> Tensor:
        """One more token of each sequence: x [N, hidden] -> [N, hidden]; the cache is updated in place."""
        mixed, columns = self._project(x)
        q, k, v = self._heads(short_conv_step(cache.history, mixed, self.conv_weight))  # [N, H, K] each
        beta, decay, precond = self._gates(columns)
        return self._output(step(cache.state, q, k, v, beta, decay, precond, backend=self.config.kernel), columns)

    def _mix(
        self, x: Tensor, cu_seqlens: Tensor | None, keep: bool, relay: Relay | None = None
    ) -> tuple[Tensor, State | None, Tensor | None]:
        mixed, columns = self._project(x)
        past = None if relay is None else maps.history(relay, mixed, CONV_WIDTH - 1)
        mixed, history = short_conv(mixed, self.conv_weight, past, output_final_state=keep, cu_seqlens=cu_seqlens)
        q, k, v = self._heads(mixed)  # [B, T, H, K] each
        beta, decay, precond = self._gates(columns)
        arguments = {"output_final_state": keep, "cu_seqlens": cu_seqlens, "backend": self.config.kernel, "relay": relay}
        o, state = delta_rule(q, k, v, beta, decay, precond, **arguments)
        return self._output(o, columns), state, history

    def _project(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The raw q, k, v, side by side [..., 3 W], and the columns of the gates by name."""
        parts = self.gate_proj(x).split(list(self.gate_columns.values()), dim=-1)
        return self.qkv_proj(x), dict(zip(self.gate_columns, parts, strict=True))

    def _heads(self, mixed: Tensor) -> Iterator[Tensor]:
        return (part.unflatten(-1, (self.heads, self.head_dim)) for part in mixed.chunk(3, dim=-1))

    def _gates(self, columns: dict[str, Tensor]) -> Gates:
        beta = torch.sigmoid(_wide(columns["beta"]))
        decay = self._decay(columns)
        precond = self._precond(columns, beta, decay) if self.config.preconditioned else None
        return Gates(2 * beta if self.config.neg_eigval else beta, decay, precond)

    def _decay(self, columns: dict[str, Tensor]) -> Tensor | None:
        match self.config.mixer.decay:
            case "none":
                return None
            case "scalar":
                return log_decay(columns["decay"], self.A_log, self.dt_bias)
            case "channel":
                shape = (self.heads, self.head_dim)
                return log_decay(self.decay_up(columns["decay"]).unflatten(-1, shape), self.A_log[:, None], self.dt_bias.view(shape))

    def _precond(self, columns: dict[str, Tensor], beta: Tensor, decay: Tensor | None) -> Preconditioner:
        if "precond_decay" in columns:
            decay = log_decay(columns["precond_decay"], self.precond_A_log, self.precond_dt_bias)
        gain = torch.sigmoid(_wide(columns["precond_gain"])) if "precond_gain" in columns else beta
        config = self.config
        return Preconditioner(
            decay=decay,
            gain=gain,
            center=_wide(self.center),
            bound=config.precond_bound,
            form=config.precond_form,
            interval=config.precond_interval,
        )

    def _output(self, o: Tensor, columns: dict[str, Tensor]) -> Tensor:  # [..., H, V] -> [..., hidden]
        gate = None
        if "gate" in columns:
            gate = (self.output_up(columns["gate"]) + self.output_bias).unflatten(-1, o.shape[-2:])  # [..., H, V]
        return self.out_proj(self.norm(o, gate).flatten(-2))


class MLP(nn.Module):
    """SwiGLU: (SiLU(x W_gate) * (x W_up)) W_down, the first two in one product."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.mlp_size)
        self.down_proj = Linear(config.mlp_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:  # [..., hidden] -> [..., hidden]
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    """x + Mixer(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = Mixer(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, relay: Relay | None = None) -> Tensor:  # [B, T, hidden], the same
        x = x + self.mixer(self.mixer_norm(x), cu_seqlens, relay)
        return x + self.mlp(self.mlp_norm(x))

    def prefill(self, x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, MixerCache]:
        y, cache = self.mixer.prefill(self.mixer_norm(x), cu_seqlens)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), cache

    def step(self, x: Tensor, cache: MixerCache) -> Tensor:  # [N, hidden] -> [N, hidden]
        x = x + self.mixer.step(self.mixer_norm(x), cache)
        return x + self.mlp(self.mlp_norm(x))


class Embedding(nn.Module):
    """ids [...] -> rows [..., hidden]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.weight)


class Head(nn.Module):
    """Hidden states [B, T, hidden] to logits [B, T, vocab], or with labels [B, T] to the summed cross-entropy, a scalar."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is None:
            return F.linear(hidden, self.weight)
        return summed_cross_entropy(hidden.flatten(0, -2), self.weight, labels.flatten())


class LanguageModel(nn.Module):
    """The whole model. Its parameters hold nothing meaningful before `init_weights` or `load_state_dict`.

    activation_checkpoint trades time for memory block by block, with the same gradients bit for bit; the modes: `pdn_train.recompute`.
    """

    def __init__(self, config: ModelConfig, activation_checkpoint: Literal["none", "block", "selective"] = "none"):
        super().__init__()
        if activation_checkpoint not in recompute.RUN:
            raise ValueError(f"activation_checkpoint={activation_checkpoint!r}: choose one of {', '.join(recompute.RUN)}")
        self.config = config
        self.activation_checkpoint = activation_checkpoint
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = Head(config)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, cu_seqlens: Tensor | None = None, relay: Relay | None = None
    ) -> Tensor:
        """input_ids [B, T] int64 -> logits [B, T, vocab] in the weights' dtype.

        With labels [B, T] int64: the sum of the cross-entropy over labels != -100, in nats, an fp32 scalar (fp64 for an fp64 model), 0
        when all are -100. Divide it by the targets of the whole step. With cu_seqlens [N + 1], B is 1 and N sequences lie side by side.
        With a relay these are one piece of longer sequences (`kernels.maps`); the sums of all pieces make the whole's, gradients too.
        """
        x, run = self.embedding(input_ids), recompute.RUN[self.activation_checkpoint]
        for block in self.blocks:
            x = run(block, x, cu_seqlens, None if relay is None else relay.for_layer())
        return self.head(self.norm(x), labels)

    def prefill(self, input_ids: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Cache]:
        """N prompts side by side, input_ids [1, T] with boundaries cu_seqlens [N + 1]: the logits [N, vocab] after each one's last token,
        and the cache to go on from. Prompts may differ in length without padding; each has at least one token."""
        x, layers = self.embedding(input_ids), []
        for block in self.blocks:
            x, cache = block.prefill(x, cu_seqlens)
            layers.append(cache)
        last = x[0, cu_seqlens[1:].to(x.device) - 1]  # [N, hidden]
        return self.head(self.norm(last)), Cache(layers)

    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """One more token of each sequence: tokens [N] -> logits [N, vocab] for the next; the cache is updated in place. No gradient."""
        x = self.embedding(tokens)
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            x = block.step(x, layer)
        return self.head(self.norm(x))

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Set every parameter from `seed`, the same on any device, in any dtype (rounded) and for any kernel (docs/paper.md, section 3).

        | parameter                                  | value                                                             |
        | ------------------------------------------ | ----------------------------------------------------------------- |
        | linear, convolution and embedding matrices | normal, mean 0, std 0.02                                          |
        | norm weights                               | 1                                                                 |
        | output_bias, the output gate's             | 0                                                                 |
        | A_log, precond_A_log                       | log A, A uniform in (0, 16]                                       |
        | dt_bias (scalar decay), precond_dt_bias    | softplus^-1(dt), dt log-uniform in [0.001, 0.1]                   |
        | dt_bias (channel decay)                    | 0                                                                 |
        | center                                     | -0.2                                                              |
        """
        generator = torch.Generator().manual_seed(seed)
        channel = self.config.mixer.decay == "channel"
        for name, parameter in self.named_parameters():
            parameter.copy_(_initial(name, parameter.shape, channel, generator))


def _initial(name: str, shape: torch.Size, channel: bool, generator: torch.Generator) -> Tensor:
    """The initial value, fp32 on the CPU, of the parameter with this dotted name; the table is in `LanguageModel.init_weights`."""
    last = name.rpartition(".")[2]
    if last in ("A_log", "precond_A_log"):
        return torch.log(16 * (1 - torch.rand(shape, generator=generator)))  # 1 - [0, 1) is never 0
    if last == "precond_dt_bias" or (last == "dt_bias" and not channel):
        dt = torch.exp(math.log(0.001) + math.log(100) * torch.rand(shape, generator=generator))
        return dt + torch.log(-torch.expm1(-dt))
    if last in ("dt_bias", "output_bias"):
        return torch.zeros(shape)
    if last == "center":
        return torch.full(shape, -0.2)
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    return torch.empty(shape).normal_(0, 0.02, generator=generator)


def log_decay(x: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """-exp(A_log) softplus(x + dt_bias) <= 0, in fp32 (fp64 for fp64); x [..., H] or [..., H, K], the others broadcast to it."""
    return -torch.exp(_wide(A_log)) * F.softplus(_wide(x) + _wide(dt_bias))


def _wide(x: Tensor) -> Tensor:
    return x.to(computation_dtype(x))


def _gate_columns(config: ModelConfig) -> dict[str, int]:
    """The columns of `Mixer.gate_proj`, name to number, in order."""
    heads, rank = config.num_heads, config.head_dim
    columns = {"beta": heads}
    if config.mixer.decay == "scalar":
        columns["decay"] = heads
    if config.mixer.decay == "channel":
        columns |= {"decay": rank, "gate": rank}
    if config.preconditioned and not (config.tie_gates and config.mixer.decay == "scalar"):
        columns["precond_decay"] = heads
    if config.preconditioned and not config.tie_gates:
        columns["precond_gain"] = heads
    return columns
