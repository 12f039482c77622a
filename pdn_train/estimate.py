"""Parameters, FLOPs and memory of a run, by arithmetic on its configuration: nothing is built, torch is not imported.

FLOPs are model FLOPs, the numerator of MFU. A multiplication and an addition are two. Forward, per token:

    2 x every matrix of the Linear layers and the head                     the embedding is a lookup; convolution, norms, gates and the
                                                                           preconditioner's statistic are elementwise and not counted
    heads x layers x (10 C D + 6 D^2 + 2/3 C^2)                            the recurrence in its chunk form, C = 64, K = V = D = head_dim:
        K W^T and Q W^T 4 C D, inverse 2/3 C^2, U and Z 4 C D, (Q W^T) R 2 C D, and Z S, W^T R, Q S 6 D^2

Training is three times the forward pass: each product has two in its backward, each of its size. What is run again (activation
checkpointing, states recomputed by a kernel) is not counted. The six recurrences have the same count.

Memory is an estimate for a launch decision: what is listed in `memory_per_gpu`, without the CUDA context, fragmentation and temporaries of
single operators (together 1 to 5 GB). What a block keeps was counted from autograd's saved tensors (November 2026): with the Triton
kernels tensor by tensor (`_triton_block`), with the torch ones, which keep their intermediate tensors in fp32, as a sum a channel.

`report` alone reads something, the manifests of the data.
"""

from __future__ import annotations

from pdn_train.config import Config, ModelConfig
from pdn_train.shards import ShardError, Shards
from pdn_train.telling import counted

CHUNK = 64
CONV_WIDTH = 4
LOSS_LOGITS = {"torch": 2**26, "triton": 2**28}  # how many logits the loss holds at once
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


def _input_columns(model: ModelConfig) -> int:
    """What the mixer's one product gives, filled up to whole 16 bytes in 16 bits."""
    return -(-(3 * _width(model) + _gate_columns(model)) // 8) * 8


def _filled_weight(model: ModelConfig) -> int:
    """Numbers of the copy of its weight with rows of zeros, which the backward pass needs; 0 where nothing is filled up."""
    columns = _input_columns(model)
    return columns * model.hidden_size if columns > 3 * _width(model) + _gate_columns(model) else 0


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
    """Bytes a GPU needs, by what they are for; N = world_size, over which ZeRO shards.

    A backward pass frees activations as it makes gradients: of the two the larger counts.
    """
    states, activations = _state_memory(config, world_size), _activation_memory(config)
    states["gradients"] = max(0.0, states["gradients"] - activations["activations"])
    return {**states, **activations}


def _state_memory(config: Config, world_size: int) -> dict[str, float]:
    """bf16: weights 2, gradients 2, their fp32 sum 4, masters 4, moments 8 bytes a parameter; fp32: 4, 4, none, 4 (ZeRO's copy), 8.

    The stage from which each is divided by N: weights 3, gradients 2, sum 2, masters and moments 1. Stages 1 and 2 in bf16 reduce the sums
    where they are (`flat_zero`), stage 2 from whole gradients and their copy in fp32, 6 together; elsewhere DeepSpeed fills a bucket.
    """
    bf16, stage = config.train.precision == "bf16", config.parallel.zero
    count = parameters(config.model)
    copied = config.flat_zero and stage == 2 and world_size > 1

    def shared_from(first: int, size: int) -> float:
        return count * size / (world_size if stage >= first else 1)

    return {
        "weights": shared_from(3, 2 if bf16 else 4),
        "gradients": 6.0 * count if copied else shared_from(2, 2 if bf16 else 4),
        "gradient sums": shared_from(2, 4 if bf16 else 0),
        "masters": shared_from(1, 4 if stage else 0),
        "moments": shared_from(1, 8),
        "communication buffers": 4.0 * min(count, REDUCE_BUCKET) if world_size > 1 and not config.flat_zero else 0.0,
    }


def _activation_memory(config: Config) -> dict[str, float]:
    """With T tokens a micro-batch on a GPU, e bytes a number, h hidden, w mixer width, m MLP width, per layer and token:

    none         `_triton_block`, or with the torch kernels 2 (8 + e) h + 4 e m + (8 e + MIXER_FP32 + PRECONDITIONER_FP32 if there is one) w
    block        e h, and one block's "none" while it is run again
    selective    e h + e (outputs of the Linear layers but the last), with the Triton kernels what the recurrence made; one block's "none"

    The loss holds LOSS_LOGITS logits in e bytes (torch: e + 4), the sum of the head's gradient in fp32 and one term of it, and of the
    hidden states the last ones, the normed ones and their gradient.
    """
    model, e = config.model, 2 if config.train.precision == "bf16" else 4
    tokens = config.train.micro_batch * config.data.seq_len // config.parallel.sequence
    hidden, mode = model.hidden_size, config.train.activation_checkpoint
    whole = _triton_block(model, e) if model.kernel == "triton" else _torch_block(model, e)
    kept = {"none": whole, "block": e * hidden, "selective": e * hidden + _products(model, e)}[mode]
    if mode == "selective" and model.kernel == "triton":
        # o and what the stages made; the final states, which nothing reads, too
        kept += e * _width(model) + _triton_stages(model, e) + 4 * _width(model) * model.head_dim / config.data.seq_len
    again = 0 if mode == "none" else whole
    weights = e * _filled_weight(model) * (model.num_layers if mode == "none" else 1)
    logits = min(LOSS_LOGITS[model.kernel], tokens * model.vocab_size)
    each = e if model.kernel == "triton" else e + 4
    return {
        "activations": float(tokens * (model.num_layers * kept + again) + weights),
        "loss": float(logits * each + model.vocab_size * hidden * (4 + e) + 3 * tokens * hidden * e),
    }


def _products(model: ModelConfig, e: int) -> int:
    """The outputs of a block's Linear layers but the last, which nothing reads again, bytes a token."""
    up = 2 * _width(model) if model.mixer.decay == "channel" else 0
    return e * (_input_columns(model) + up + model.hidden_size + 2 * model.mlp_size)


def _torch_block(model: ModelConfig, e: int) -> int:
    fp32 = MIXER_FP32[model.mixer.decay] + PRECONDITIONER_FP32 * model.preconditioned
    return 2 * (8 + e) * model.hidden_size + 4 * e * model.mlp_size + (8 * e + fp32) * _width(model)


def _triton_block(model: ModelConfig, e: int) -> float:
    """Bytes a token: the stream and its norm, twice; the MLP's two halves; the mixer's inputs in one product; q, k, v, o
    and o normed; with a decay a channel its product, itself and the output gate's; the gates of a head in fp32; the stages' own."""
    width, channel, heads = _width(model), model.mixer.decay == "channel", model.num_heads
    numbers = 4 * model.hidden_size + 2 * model.mlp_size + _input_columns(model) + (5 + 3 * channel) * width
    gates = 1 + (model.mixer.decay == "scalar") + 2 * model.preconditioned
    return e * numbers + 4 * gates * heads + _triton_stages(model, e)


def _triton_stages(model: ModelConfig, e: int) -> float:
    """What the recurrence makes for its backward pass, bytes a token (`kernels.chunk_triton`): T and QW, write keys, with a decay a channel
    three decayed keys, eight row numbers in fp32, and a chunk's start of the statistic and its decays. (In 16 bits heads of fewer than 64
    channels are filled up, which is not counted.)"""
    width, channel = _width(model), model.mixer.decay == "channel"
    rows = CHUNK if e == 2 else 32 if model.head_dim <= 128 else 16
    whole = {"none": 0, "scalar": model.num_heads, "channel": width}[model.mixer.decay]
    chunk = 4 * (width * model.preconditioned + whole) / rows
    return e * (2 * rows * model.num_heads + (model.preconditioned + 3 * channel) * width) + 32 * model.num_heads + chunk


def reading(config: Config) -> list[str]:
    """The data of a run, a line a folder: its tokens and the epochs that the run makes of them, or why this machine cannot read it."""
    data, samples = config.data, config.train.steps * config.train.global_batch
    if data.mqar_pairs:
        return [
            f"{counted(data.mqar_examples, 'example')} of {counted(data.mqar_pairs, 'pair')}, {samples / data.mqar_examples:.3g} epochs"
        ]
    weights = data.path if isinstance(data.path, dict) else {data.path: 1.0}
    lines = [_folder(folder, data.seq_len, samples * weight / sum(weights.values())) for folder, weight in weights.items()]
    return lines + ([_folder(data.val_path, data.seq_len)] if data.val_path else [])


def _folder(folder: str, seq_len: int, samples: float | None = None) -> str:
    """samples: that a run takes of the folder; None: it validates on it."""
    try:
        tokens = Shards.open(folder).tokens
    except ShardError as error:
        return str(error)
    if tokens <= seq_len:
        return f"{folder}: {tokens:,} tokens, fewer than one sample of data.seq_len={seq_len}, which needs {seq_len + 1:,}"
    return f"{folder}: {tokens:,} tokens, " + ("validation" if samples is None else f"{samples / ((tokens - 1) // seq_len):.3g} epochs")


def machine(config: Config, gpus: int) -> str:
    """What of `gpus`, those of this machine, the run would compute on here; it may be meant for others."""
    launch, device = config.launch, config.train.device
    here = f"machine   this one has {counted(gpus, 'GPU') if gpus else 'no GPU'}; launch.gpus_per_node={launch.gpus_per_node}"
    here += f" on each of launch.nodes={launch.nodes}" if launch.nodes > 1 else ""
    if device == "cpu":
        return f"{here}, and train.device=cpu computes on CPUs over gloo"
    if gpus:
        return here
    if device == "cuda" or config.model.kernel == "triton":
        key = "train.device=cuda" if device == "cuda" else "model.kernel=triton"
        return f"{here}: training here would stop at {key}, which needs a GPU"
    return f"{here}: training here would run on CPUs over gloo"


def report(config: Config, world_size: int) -> str:
    """What `--dry-run` prints of the run on `world_size` GPUs: size, FLOPs, batch arithmetic, tokens, data, memory. Raises ConfigError."""
    model, train, length = config.model, config.train, config.data.seq_len
    accumulation, ranks = config.accumulation(world_size), config.data_parallel(world_size)
    flops, step = flops_per_token(config), train.global_batch * length
    share = recurrence_flops(model) / (recurrence_flops(model) + matrix_flops(model))
    memory = memory_per_gpu(config, world_size)
    parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in memory.items() if size)
    sequence = f", {config.parallel.sequence} ranks a sequence" if config.parallel.sequence > 1 else ""
    layers, heads = counted(model.num_layers, "layer"), counted(model.num_heads, "head")
    shape = f"{layers}, hidden {model.hidden_size}, {heads} x {model.head_dim}, MLP {model.mlp_size}"
    return "\n".join(
        [
            f"model     {model.recurrence}: {shape}, vocabulary {model.vocab_size}",
            f"          {parameters(model):,} parameters ({parameters(model) / 1e6:.1f}M)",
            f"FLOPs     {flops / 1e9:.3f} G a token, forward and backward; the recurrence is {share:.1%} of them",
            f"batch     {counted(train.micro_batch, 'sequence')} x {counted(accumulation, 'micro-batch', 'micro-batches')} x "
            f"{counted(ranks, 'data-parallel rank')} = {counted(train.global_batch, 'sequence')} x {length} tokens = {step:,} tokens a step"
            f"{sequence}",
            f"run       {counted(train.steps, 'step')} = {train.steps * step / 1e9:.3f}B tokens = {train.steps * step * flops:.3g} FLOP",
            "data      " + "\n          ".join(reading(config)),
            f"memory    about {sum(memory.values()) / 1e9:.1f} GB ({sum(memory.values()) / 2**30:.1f} GiB) a GPU of {world_size}, "
            f"ZeRO-{config.parallel.zero}, {train.precision}, kernel {model.kernel}, checkpointing {train.activation_checkpoint}",
            f"          GB: {parts}",
        ]
    )
