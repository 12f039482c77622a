"""Parameters, FLOPs and memory of a run, by arithmetic on its configuration: nothing is built, torch is not imported.

FLOPs are model FLOPs, the numerator of MFU. A multiplication and an addition are two. Forward, per token:

    2 x every matrix of the Linear layers and the head                     the embedding is a lookup; convolution, norms, gates and the
                                                                           preconditioner's statistic are elementwise and not counted
    heads x layers x (10 C D + 6 D^2 + 2/3 C^2)                            the recurrence in its chunk form, C = 64, K = V = D = head_dim:
        K W^T and Q W^T 4 C D, inverse 2/3 C^2, U and Z 4 C D, (Q W^T) R 2 C D, and Z S, W^T R, Q S 6 D^2

Training is three times the forward pass: each product has two in its backward, each of its size. What is run again (activation
checkpointing, states recomputed by a kernel) is not counted. The six recurrences have the same count.

Memory is an estimate for a launch decision: what is listed in `memory_per_gpu`, without the CUDA context, fragmentation and temporaries of
single operators (together 1 to 5 GB). The mixer's share is that of the torch kernels, which keep their intermediate tensors in fp32; it was
counted from autograd's saved tensors (head_dim 64 and 128, November 2026).
"""

from __future__ import annotations

from pdn_train.config import Config, ModelConfig

CHUNK = 64
CONV_WIDTH = 4
LOSS_LOGITS = 2**26  # how many logits the loss holds at once
REDUCE_BUCKET = 500_000_000  # DeepSpeed's default, in elements
MIXER_FP32 = {"none": 98, "scalar": 115, "channel": 200}  # bytes a token and mixer channel the torch kernels keep in fp32, by decay
PRECONDITIONER_FP32 = 32

# Dense bf16 FLOP/s of one device, by a part of the name the driver gives; the first that fits counts. Vendor figures, without sparsity.
# None: a device whose name holds another's, but which is a slice of it or has a figure of its own that is not known for certain.
PEAK_FLOPS = {
    " MIG ": None,
    "GH200": None,
    "H200 NVL": None,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
}


def peak_flops(device_name: str) -> float | None:
    """The denominator of MFU, in FLOP/s, for a name such as "NVIDIA H100 80GB HBM3"; None where the table has none for it."""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in device_name), None)


def parameters(model: ModelConfig) -> int:
    """How many numbers the model learns; a tied head counts once."""
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    return embeddings + model.num_layers * (_block_matrices(model) + _block_others(model)) + model.hidden_size


def flops_per_token(config: Config) -> float:
    """Model FLOPs, forward and backward, of one training token (module docstring)."""
    return 3 * (matrix_flops(config.model) + recurrence_flops(config.model))


def matrix_flops(model: ModelConfig) -> float:
    """Forward FLOPs a token of the Linear layers and the head."""
    return 2 * (model.num_layers * _block_matrices(model) + model.vocab_size * model.hidden_size)


def recurrence_flops(model: ModelConfig) -> float:
    """Forward FLOPs a token of the recurrence, over all heads and layers."""
    d = model.head_dim
    return model.num_layers * model.num_heads * (10 * CHUNK * d + 6 * d**2 + 2 / 3 * CHUNK**2)


def _width(model: ModelConfig) -> int:
    return model.num_heads * model.head_dim


def _own_decay(model: ModelConfig) -> bool:
    """Whether the preconditioner's decay has a projection of its own."""
    return model.preconditioned and not (model.tie_gates and model.mixer.decay == "scalar")


def _gate_columns(model: ModelConfig) -> int:
    decay = {"none": 0, "scalar": model.num_heads, "channel": 2 * model.head_dim}[model.mixer.decay]  # channel: the output gate's too
    precond = model.num_heads * (_own_decay(model) + (model.preconditioned and not model.tie_gates))
    return model.num_heads + decay + precond  # beta's first


def _block_matrices(model: ModelConfig) -> int:
    """Elements of one block's Linear layers."""
    hidden, width = model.hidden_size, _width(model)
    low_rank = 2 * model.head_dim * width if model.mixer.decay == "channel" else 0
    return hidden * (3 * width + _gate_columns(model)) + low_rank + width * hidden + 3 * hidden * model.mlp_size


def _block_others(model: ModelConfig) -> int:
    """One block's convolution, norms, gate rates and biases."""
    heads, width = model.num_heads, _width(model)
    decay = {"none": 0, "scalar": 2 * heads, "channel": heads + 2 * width}[model.mixer.decay]
    precond = heads * (model.preconditioned + 2 * _own_decay(model))
    return CONV_WIDTH * 3 * width + decay + precond + model.head_dim + 2 * model.hidden_size


def memory_per_gpu(config: Config, world_size: int) -> dict[str, float]:
    """Bytes a GPU needs, by what they are for; N = world_size, over which ZeRO shards."""
    return {**_state_memory(config, world_size), **_activation_memory(config)}


def _state_memory(config: Config, world_size: int) -> dict[str, float]:
    """bf16: weights 2, gradients 2, their fp32 sum 4, masters 4, moments 8 bytes a parameter; fp32: 4, 4, none, 4 (ZeRO's copy), 8.

    The stage from which each is divided by N: weights 3, gradients 2, sum 2, masters and moments 1.
    """
    bf16, stage = config.train.precision == "bf16", config.parallel.zero
    count = parameters(config.model)

    def shared_from(first: int, size: int) -> float:
        return count * size / (world_size if stage >= first else 1)

    return {
        "weights": shared_from(3, 2 if bf16 else 4),
        "gradients": shared_from(2, 2 if bf16 else 4),
        "gradient sums": shared_from(2, 4 if bf16 else 0),
        "masters": shared_from(1, 4 if stage else 0),
        "moments": shared_from(1, 8),
        "communication buffers": 4.0 * min(count, REDUCE_BUCKET) if world_size > 1 else 0.0,
    }


def _activation_memory(config: Config) -> dict[str, float]:
    """With T tokens a micro-batch on a GPU, e bytes a number, h hidden, w mixer width, m MLP width, per layer and token:

    none         2 (8 + e) h + 4 e m + (8 e + MIXER_FP32 + PRECONDITIONER_FP32 where there is one) w
    block        e h, and one block's "none" while it is run again
    selective    e h + e (outputs of the Linear layers), and one block's "none"

    The loss holds LOSS_LOGITS logits in e + 4 bytes, and the gradients of the head's matrix (4 + e) and of the hidden states (e).
    """
    model, e = config.model, 2 if config.train.precision == "bf16" else 4
    tokens = config.train.micro_batch * config.data.seq_len // config.parallel.sequence
    hidden, width = model.hidden_size, _width(model)
    fp32 = MIXER_FP32[model.mixer.decay] + PRECONDITIONER_FP32 * model.preconditioned
    whole = 2 * (8 + e) * hidden + 4 * e * model.mlp_size + (8 * e + fp32) * width
    up = 2 * width if model.mixer.decay == "channel" else 0
    products = e * (3 * width + _gate_columns(model) + up + 2 * hidden + 2 * model.mlp_size)
    kept = {"none": whole, "block": e * hidden, "selective": e * hidden + products}[config.train.activation_checkpoint]
    again = 0 if config.train.activation_checkpoint == "none" else whole
    logits = min(LOSS_LOGITS, tokens * model.vocab_size)
    return {
        "activations": float(tokens * (model.num_layers * kept + again)),
        "loss": float(logits * (e + 4) + model.vocab_size * hidden * (4 + e) + tokens * hidden * e),
    }


def report(config: Config, world_size: int) -> str:
    """What `--dry-run` prints of the run on `world_size` GPUs: size, FLOPs, batch arithmetic, tokens, memory. Raises ConfigError."""
    model, train, length = config.model, config.train, config.data.seq_len
    accumulation, ranks = config.accumulation(world_size), config.data_parallel(world_size)
    flops, step = flops_per_token(config), train.global_batch * length
    share = recurrence_flops(model) / (recurrence_flops(model) + matrix_flops(model))
    memory = memory_per_gpu(config, world_size)
    parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in memory.items() if size)
    sequence = f", {config.parallel.sequence} ranks a sequence" if config.parallel.sequence > 1 else ""
    shape = f"{model.num_layers} layers, hidden {model.hidden_size}, {model.num_heads} heads x {model.head_dim}, MLP {model.mlp_size}"
    return "\n".join(
        [
            f"model     {model.recurrence}: {shape}, vocabulary {model.vocab_size}",
            f"          {parameters(model):,} parameters ({parameters(model) / 1e6:.1f}M)",
            f"FLOPs     {flops / 1e9:.3f} G a token, forward and backward; the recurrence is {share:.1%} of them",
            f"batch     {train.micro_batch} sequences x {accumulation} micro-batches x {ranks} data-parallel ranks = {train.global_batch} "
            f"sequences x {length} tokens = {step:,} tokens a step{sequence}",
            f"run       {train.steps:,} steps = {train.steps * step / 1e9:.3f}B tokens = {train.steps * step * flops:.3g} FLOP",
            f"memory    about {sum(memory.values()) / 1e9:.1f} GB a GPU of {world_size}, ZeRO-{config.parallel.zero}, {train.precision}, "
            f"activation checkpointing {train.activation_checkpoint}",
            f"          GB: {parts}",
        ]
    )
