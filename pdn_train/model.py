"""The language model: pre-norm blocks of a recurrent token mixer and a SwiGLU MLP, with tied embeddings (docs/paper.md, section 3).

    ids -> Embedding -> num_layers x [ x + Mixer(norm(x)) ; x + MLP(norm(x)) ] -> norm -> Head -> logits, or the summed cross-entropy

After arXiv:2604.21100. One `Mixer` serves all six recurrences: what differs is which gates exist, and that is read from the table in
`kernels.recurrence`. Shapes are B sequences, T tokens, H heads, K = V = head_dim channels a head, W = H * K the mixer's width, which may
differ from hidden_size.

The model knows no rank, no ZeRO and no optimizer. Two things are shaped by ZeRO-3 all the same, which gathers a parameter only around the
`forward` of the module that owns it: no module reads another one's parameters, and the tied matrix is owned twice, by `Embedding` and by
`Head` (one tensor, two names).

What it costs: `forward` with labels never holds more than _CHUNK_LOGITS logits at once (256 MiB in fp32). From forward to backward it keeps
the gradients of the hidden states and of the head's matrix instead of any logits: the head's three products are run once each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from kernels.chunk import Preconditioner, State, delta_rule
from kernels.conv import short_conv, short_conv_step
from kernels.decode import step
from kernels.norm import gated_rms_norm, rms_norm
from pdn_train.config import ModelConfig

CONV_WIDTH = 4
IGNORED = -100  # a label that asks for nothing
_CHUNK_LOGITS = 2**26  # logits the loss holds at once
_PRODUCT = torch.ops.aten.mm.default  # what a Linear runs; the recurrence's products are batched ones


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
    Gates are computed in fp32 (fp64 in an fp64 model): a log decay near 0, rounded to bf16, would forget a long context wrongly.
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

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:  # [B, T, hidden] -> [B, T, hidden]
        return self._mix(x, cu_seqlens, keep=False)[0]

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

    def _mix(self, x: Tensor, cu_seqlens: Tensor | None, keep: bool) -> tuple[Tensor, State | None, Tensor | None]:
        mixed, columns = self._project(x)
        mixed, history = short_conv(mixed, self.conv_weight, output_final_state=keep, cu_seqlens=cu_seqlens, backend=self.config.kernel)
        q, k, v = self._heads(mixed)  # [B, T, H, K] each
        beta, decay, precond = self._gates(columns)
        o, state = delta_rule(
            q, k, v, beta, decay=decay, precond=precond, output_final_state=keep, cu_seqlens=cu_seqlens, backend=self.config.kernel
        )
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

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:  # [B, T, hidden] -> [B, T, hidden]
        x = x + self.mixer(self.mixer_norm(x), cu_seqlens)
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
        return SummedCrossEntropy.apply(hidden.flatten(0, -2), self.weight, labels.flatten(), torch.is_grad_enabled())


class LanguageModel(nn.Module):
    """The whole model. Its parameters hold nothing meaningful before `init_weights` or `load_state_dict`.

    activation_checkpoint trades time for memory, with the same gradients bit for bit:
        none        everything the backward pass needs is kept
        block       each block keeps its input and is run again, whole, in the backward pass
        selective   a block keeps its input and the products of its Linear layers; norms, convolution, gates, activation functions and the
                    recurrence are run again
    """

    def __init__(self, config: ModelConfig, activation_checkpoint: Literal["none", "block", "selective"] = "none"):
        super().__init__()
        if activation_checkpoint not in _RUN_BLOCK:
            raise ValueError(f"activation_checkpoint={activation_checkpoint!r}: choose one of {', '.join(_RUN_BLOCK)}")
        self.config = config
        self.activation_checkpoint = activation_checkpoint
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = Head(config)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """input_ids [B, T] int64 -> logits [B, T, vocab] in the weights' dtype.

        With labels [B, T] int64: the sum of the cross-entropy over labels != -100, in nats, an fp32 scalar (fp64 for an fp64 model), 0
        when all are -100. Divide it by the targets of the whole step. With cu_seqlens [N + 1], B is 1 and N sequences lie side by side.
        """
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = _RUN_BLOCK[self.activation_checkpoint](block, x, cu_seqlens)
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
    """fp32, or fp64 where it is already."""
    return x if x.dtype == torch.float64 else x.float()


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


def _run_plainly(block: Block, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return block(x, cu_seqlens)


def _run_again(block: Block, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return checkpoint(block, x, cu_seqlens, use_reentrant=False, preserve_rng_state=False)  # nothing here draws random numbers


def _run_between_products(block: Block, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return checkpoint(block, x, cu_seqlens, use_reentrant=False, preserve_rng_state=False, context_fn=_keep_products)


def _keep_products() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """What `checkpoint` enters in the forward pass and when it runs a block again: the first keeps each product, the second hands it back.

    torch's own create_selective_checkpoint_contexts counts every operator and stops at one that the forward pass did not run. ZeRO-3
    gathers and frees parameters at other moments when a block runs again, so only the products may be counted.
    """
    kept: list[Tensor] = []
    return _Keep(kept), _HandBack(kept)


class _Keep(TorchDispatchMode):
    def __init__(self, kept: list[Tensor]):
        super().__init__()
        self.kept, self.places = kept, set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        changed = args[0] if op._schema.is_mutable and args else None
        if isinstance(changed, Tensor) and _place(changed) in self.places:
            raise RuntimeError(f"{op} changes in place a product {list(changed.shape)} that selective checkpointing keeps")
        out = op(*args, **(kwargs or {}))
        if op is _PRODUCT:
            self.kept.append(out.detach())
            self.places.add(_place(out))
        return out


class _HandBack(TorchDispatchMode):
    def __init__(self, kept: list[Tensor]):
        super().__init__()
        self.kept = kept

    def __enter__(self):
        self.next = iter(self.kept)
        return super().__enter__()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return next(self.next).detach() if op is _PRODUCT else op(*args, **(kwargs or {}))


def _place(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


_RUN_BLOCK = {"none": _run_plainly, "block": _run_again, "selective": _run_between_products}


class SummedCrossEntropy(torch.autograd.Function):
    """L = sum over rows i with label y_i != -100 of log sum_j exp(h_i . w_j) - h_i . w_{y_i}, softmax in fp32, a chunk of rows at a time.

        dL/dh_i = sum_j (softmax_ij - [j = y_i]) w_j        dL/dw_j = sum_i (softmax_ij - [j = y_i]) h_i

    The forward pass forms both while it has a chunk's logits, and the backward pass scales them by the incoming scalar: the logits are
    computed once and never kept.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, with_gradients: bool) -> Tensor:
        # hidden [N, D], weight [vocab, D], labels [N]
        loss = torch.zeros((), dtype=_wide(hidden[:0]).dtype, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if with_gradients else None
        grad_weight = torch.zeros_like(weight, dtype=loss.dtype) if with_gradients else None
        rows = max(1, _CHUNK_LOGITS // weight.shape[0])
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            chunk_loss, grad_logits = _chunk_cross_entropy(hidden[part], weight, labels[part], with_gradients)
            loss += chunk_loss
            if with_gradients:
                torch.mm(grad_logits, weight, out=grad_hidden[part])
                grad_weight += grad_logits.t() @ hidden[part]
        if with_gradients:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        # The scalar stays fp32: 1 / targets rounded to bf16 would scale the whole gradient by up to 0.4 %.
        return *((_wide(saved) * grad).to(saved.dtype) for saved in ctx.saved_tensors), None, None


def _chunk_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, with_gradients: bool) -> tuple[Tensor, Tensor | None]:
    """The summed loss of some rows and, if asked for, its gradient to their logits [n, vocab] in hidden's dtype."""
    logits = _wide(hidden @ weight.t())  # [n, vocab]
    valid = labels != IGNORED
    target = labels.where(valid, 0)[:, None]  # [n, 1]
    total = torch.logsumexp(logits, dim=-1, keepdim=True)  # [n, 1]
    loss = (total - logits.gather(1, target))[:, 0].masked_fill(~valid, 0).sum()
    if not with_gradients:
        return loss, None
    softmax = logits.sub_(total).exp_()
    softmax.scatter_add_(1, target, softmax.new_full(target.shape, -1.0))
    return loss, softmax.mul_(valid[:, None]).to(hidden.dtype)
