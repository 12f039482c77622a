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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import maps
from kernels.chunk import Preconditioner, State, delta_rule
from kernels.cross_entropy import summed_cross_entropy
from kernels.decode import step
from kernels.gates import GateColumns, GateParameters, HeadGates, channel_decay
from kernels.maps import Relay
from kernels.mixer_inputs import MixerInputs, mixer_inputs, mixer_inputs_step
from kernels.norm import gated_rms_norm, residual_rms_norm, rms_norm
from kernels.product import linear
from kernels.swiglu import swiglu_linear
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

    def __init__(self, inputs: int, outputs: int, unit: int = 1):
        """unit: what the columns of the product are filled up to a multiple of, with zeros."""
        super().__init__(inputs, outputs, bias=False)
        self.unused = -outputs % unit

    def forward(self, x: Tensor) -> Tensor:  # [..., inputs] -> [..., outputs + unused]
        return linear(x, F.pad(self.weight, (0, 0, 0, self.unused)) if self.unused else self.weight)

    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis; with a gate, y * sigmoid(gate + bias)."""

    def __init__(self, size: int, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.kernel = config.norm_eps, config.kernel

    def forward(self, x: Tensor, gate: Tensor | None = None, bias: Tensor | None = None) -> Tensor:  # [..., H, size] twice, [H, size]
        if gate is None:
            return rms_norm(x, self.weight, self.eps, self.kernel)
        return gated_rms_norm(x, gate, self.weight, self.eps, bias, self.kernel)


class ResidualNorm(RMSNorm):
    """The residual stream, with x [..., size] added where it is given, and its norm.

    What goes on with the stream takes the first output: in Triton its gradient is then added where the norm's is computed.
    """

    def forward(self, stream: Tensor, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return residual_rms_norm(stream, x, self.weight, self.eps, self.kernel)


class Mixer(nn.Module):
    """The token mixer (docs/paper.md, section 3): projections, short convolution, gates, recurrence, head-wise norm, output projection.

        q, k, v = SiLU(conv(x W_qkv))                   the recurrence normalises q and k per head
        beta    = sigmoid(x W_b)                        doubled with neg_eigval
        g       = -exp(A_log) softplus(a + dt_bias)     a = x W_a, one a head (scalar), or x W_down W_up, one a channel (channel)
        p, c    = like scalar g, and like beta          the preconditioner's decay and gain; with tie_gates they are g and beta
        y       = RMSNorm(o) W_o                        with channel decay (RMSNorm(o) * sigmoid(x W_down' W_up' + bias)) W_o

    W_qkv, W_b, W_a, W_down and so on are one matrix, `in_proj`, whose columns `input_columns` names in order: one product reads x for
    all, and x gets one gradient.
    Gates are computed in fp32 (fp64 in an fp64 model); only the channel decay of the Triton kernels is stored in 16 bits (`kernels.gates`
    says at what cost). Their parameters (A_log, dt_bias, center and the preconditioner's) are weights like any other: in a bf16 model
    they are bf16, rounded from the optimizer's fp32 masters, and the gates are computed in fp32 from the rounded values.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.heads, self.head_dim, self.width = config.num_heads, config.head_dim, config.num_heads * config.head_dim
        self.input_columns = _input_columns(config)
        # rows of whole 16 bytes in 16 bits: cuBLAS has no fast products for others
        self.in_proj = Linear(config.hidden_size, sum(self.input_columns.values()), unit=8)
        self.columns = _gate_columns(config, self.in_proj.unused)
        self.conv_weight = nn.Parameter(torch.empty(3 * self.width, CONV_WIDTH))
        self._add_decay(config.mixer.decay)
        self._add_preconditioner()
        self.norm = RMSNorm(self.head_dim, config)
        self.out_proj = Linear(self.width, config.hidden_size)
        self.observer: Callable[[Tensor, Tensor, Tensor, Gates], None] | None = None  # is shown q, k, v and the gates of each forward

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
        if self._own_forget:
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
        m = mixer_inputs_step(cache.history, self.in_proj(x), self.conv_weight, self.columns, self._gate_parameters(), self.config.kernel)
        beta, decay, precond = self._gates(m.gates)
        return self._output(step(cache.state, *self._heads(m), beta, decay, precond, backend=self.config.kernel), m.gates.output)

    def _mix(
        self, x: Tensor, cu_seqlens: Tensor | None, keep: bool, relay: Relay | None = None
    ) -> tuple[Tensor, State | None, Tensor | None]:
        projected, kernel = self.in_proj(x), self.config.kernel
        past = None
        if relay is not None:
            projected, past = maps.history(relay, projected, CONV_WIDTH - 1, 3 * self.width)
        m = mixer_inputs(projected, self.conv_weight, self.columns, self._gate_parameters(), past, keep, cu_seqlens, kernel)
        beta, decay, precond = gates = self._gates(m.gates)
        if self.observer is not None:
            self.observer(*self._heads(m), gates)
        arguments = {"output_final_state": keep, "cu_seqlens": cu_seqlens, "backend": kernel, "relay": relay}
        o, state = delta_rule(*self._heads(m), beta, decay, precond, **arguments)
        return self._output(o, m.gates.output), state, m.history

    def _heads(self, m: MixerInputs) -> Iterator[Tensor]:  # q, k, v [..., H, K]
        return (part.unflatten(-1, (self.heads, self.head_dim)) for part in (m.q, m.k, m.v))

    @property
    def _own_forget(self) -> bool:
        """Whether the preconditioner's decay is none of the state's."""
        return self.columns.forget is not None and self.columns.forget != self.columns.decay

    def _gate_parameters(self) -> GateParameters:
        """Of the gates that come with the convolution."""
        scalar = (None, None) if self.columns.decay is None else (self.A_log, self.dt_bias)
        forget = (self.precond_A_log, self.precond_dt_bias) if self._own_forget else (None, None)
        return GateParameters(*scalar, *forget, self.center if self.config.preconditioned else None)

    def _gates(self, made: HeadGates) -> Gates:
        config, decay, precond = self.config, made.decay, None
        if config.mixer.decay == "channel":
            shape = (self.heads, self.head_dim)
            decay = channel_decay(self.decay_up(made.low).unflatten(-1, shape), self.A_log, self.dt_bias.view(shape), config.kernel)
        if config.preconditioned:
            precond = Preconditioner(
                decay=made.forget,
                gain=made.gain,
                center=made.center,
                bound=config.precond_bound,
                form=config.precond_form,
                interval=config.precond_interval,
            )
        return Gates(made.beta, decay, precond)

    def _output(self, o: Tensor, low: Tensor | None) -> Tensor:  # [..., H, V], the output gate's low-rank columns -> [..., hidden]
        if low is None:
            return self.out_proj(self.norm(o).flatten(-2))
        heads = o.shape[-2:]
        return self.out_proj(self.norm(o, self.output_up(low).unflatten(-1, heads), self.output_bias.view(heads)).flatten(-2))


class DownProjection(Linear):
    """SwiGLU's middle and its last product, which is only added to the stream; a module of its own, whose weight ZeRO-3 gathers for it."""

    def __init__(self, config: ModelConfig):
        super().__init__(config.mlp_size, config.hidden_size)
        self.kernel = config.kernel

    def forward(self, gate_up: Tensor) -> Tensor:  # [..., 2 mlp_size] -> [..., hidden]
        return swiglu_linear(gate_up, self.weight, self.kernel, read=False)


class MLP(nn.Module):
    """SwiGLU: (SiLU(x W_gate) * (x W_up)) W_down, the first two in one product."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.mlp_size)
        self.down_proj = DownProjection(config)

    def forward(self, x: Tensor) -> Tensor:  # [..., hidden] -> [..., hidden]
        return self.down_proj(self.gate_up_proj(x))


class Block(nn.Module):
    """x + Mixer(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.mixer_norm = ResidualNorm(config.hidden_size, config)
        self.mixer = Mixer(config)
        self.mlp_norm = ResidualNorm(config.hidden_size, config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, relay: Relay | None = None) -> Tensor:  # [B, T, hidden], the same
        x, normed = self.mixer_norm(x)
        x, normed = self.mlp_norm(x, self.mixer(normed, cu_seqlens, relay))
        return x + self.mlp(normed)

    def prefill(self, x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, MixerCache]:
        x, normed = self.mixer_norm(x)
        y, cache = self.mixer.prefill(normed, cu_seqlens)
        x, normed = self.mlp_norm(x, y)
        return x + self.mlp(normed), cache

    def step(self, x: Tensor, cache: MixerCache) -> Tensor:  # [N, hidden] -> [N, hidden]
        x, normed = self.mixer_norm(x)
        x, normed = self.mlp_norm(x, self.mixer.step(normed, cache))
        return x + self.mlp(normed)


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
        self.kernel = config.kernel

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is None:
            return F.linear(hidden, self.weight)
        return summed_cross_entropy(hidden.flatten(0, -2), self.weight, labels.flatten(), self.kernel)


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
        self.norm = RMSNorm(config.hidden_size, config)
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
        | dt_bias (channel decay)                    | 0, or with channel_dt: log_uniform like the others                |
        | center                                     | -0.2                                                              |
        """
        generator = torch.Generator().manual_seed(seed)
        zero = self.config.mixer.decay == "channel" and self.config.channel_dt == "zero"
        for name, parameter in self.named_parameters():
            parameter.copy_(_initial(name, parameter.shape, zero, generator))


def _initial(name: str, shape: torch.Size, zero_dt: bool, generator: torch.Generator) -> Tensor:
    """The initial value, fp32 on the CPU, of the parameter with this dotted name; the table is in `LanguageModel.init_weights`."""
    last = name.rpartition(".")[2]
    if last in ("A_log", "precond_A_log"):
        return torch.log(16 * (1 - torch.rand(shape, generator=generator)))  # 1 - [0, 1) is never 0
    if last == "precond_dt_bias" or (last == "dt_bias" and not zero_dt):
        dt = torch.exp(math.log(0.001) + math.log(100) * torch.rand(shape, generator=generator))
        return dt + torch.log(-torch.expm1(-dt))
    if last in ("dt_bias", "output_bias"):
        return torch.zeros(shape)
    if last == "center":
        return torch.full(shape, -0.2)
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    return torch.empty(shape).normal_(0, 0.02, generator=generator)


def _input_columns(config: ModelConfig) -> dict[str, int]:
    """The rows of `Mixer.in_proj`, and so the columns of what it gives: name to number, in order."""
    heads, rank = config.num_heads, config.head_dim
    columns = dict.fromkeys("qkv", heads * rank)
    if config.mixer.decay == "channel":  # before the heads' numbers: products read these, from whole 16 bytes on
        columns |= {"decay": rank, "gate": rank}
    columns["beta"] = heads
    if config.mixer.decay == "scalar":
        columns["decay"] = heads
    if config.preconditioned and not (config.tie_gates and config.mixer.decay == "scalar"):
        columns["precond_decay"] = heads
    if config.preconditioned and not config.tie_gates:
        columns["precond_gain"] = heads
    return columns


def _gate_columns(config: ModelConfig, unused: int) -> GateColumns:
    """Where the gates' columns begin; a tied gate is read from the columns of the state's own. unused: columns at the end."""
    sizes = _input_columns(config)
    first = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    own = {}
    if config.mixer.decay == "scalar":
        own["decay"] = first["decay"]
    if config.mixer.decay == "channel":
        own |= {"rank": config.head_dim, "low": first["decay"], "output": first["gate"]}
    if config.preconditioned:
        own["forget"] = first.get("precond_decay", first.get("decay"))
        own["gain"] = first.get("precond_gain", first["beta"])
    return GateColumns(config.num_heads, first["beta"], **own, factor=2 if config.neg_eigval else 1, unused=unused)
