"""flash-linear-attention's names for the same model: the table of every tensor, and of every field of its config.json.

Five of its model classes (version 0.6.0) compute what `pdn_train.model` computes, so a model goes there and back with the same bits. What
is one matrix here is several there, cut by rows; a convolution of [channels, 4] is [channels, 1, 4] there. `{l}` is the layer.

| here                                       | there                                                          | which models   |
| ------------------------------------------ | -------------------------------------------------------------- | -------------- |
| embedding.weight                           | model.embeddings.weight                                        | all            |
| norm.weight, head.weight                   | model.norm.weight, lm_head.weight                              | all            |
| blocks.{l}.mixer_norm.weight               | model.layers.{l}.attn_norm.weight                              | all            |
| blocks.{l}.mixer.conv_weight               | model.layers.{l}.attn.{q,k,v}_conv1d.weight                    | all            |
| blocks.{l}.mixer.in_proj.weight            | q, k, v: model.layers.{l}.attn.{q,k,v}_proj.weight             | all            |
|                                            | beta: attn.b_proj.weight                                       | all            |
|                                            | decay: attn.a_proj.weight                                      | gdn pgdn       |
|                                            | decay, gate: attn.f_proj.0.weight, attn.g_proj.0.weight        | kda pkda       |
|                                            | precond_decay: attn.a_atk_proj.weight, of pkda attn.a_proj.weight | pdn pgdn pkda |
|                                            | precond_gain: attn.b_atk_proj.weight                           | pdn pgdn pkda  |
| blocks.{l}.mixer.A_log, dt_bias            | attn.A_log, attn.dt_bias                                       | all but dn pdn |
| blocks.{l}.mixer.decay_up.weight           | attn.f_proj.1.weight                                           | kda pkda       |
| blocks.{l}.mixer.output_up.weight, output_bias | attn.g_proj.1.weight, attn.g_proj.1.bias                   | kda pkda       |
| blocks.{l}.mixer.precond_A_log, precond_dt_bias | attn.A_log_atk, attn.dt_bias_atk                          | pdn pgdn pkda  |
| blocks.{l}.mixer.center                    | attn.log_atk_scale                                             | pdn pgdn pkda  |
| blocks.{l}.mixer.norm.weight, out_proj.weight | attn.o_norm.weight, attn.o_proj.weight                      | all            |
| blocks.{l}.mlp_norm.weight                 | model.layers.{l}.mlp_norm.weight                               | all            |
| blocks.{l}.mlp.gate_up_proj.weight         | mlp.gate_proj.weight, mlp.up_proj.weight                       | all            |
| blocks.{l}.mlp.down_proj.weight            | mlp.down_proj.weight                                           | all            |

Two models have no class there and go exactly as another one, with tensors that are derived from this table:

    pdn                 as PGDN without decay: A_log = NO_DECAY, whose exp is 0 in any float, and a_proj and dt_bias zero, so that
                        g = -exp(A_log) softplus(a_proj x + dt_bias) is -0 and exp(g) is 1
    tie_gates           the preconditioner's gates are the state's own: the same tensors under both names

The key "pdn_train" of config.json says which of these it was, and a reader checks the derived tensors against it. What the classes cannot
compute (the ablations of `model.precond_form` and `model.precond_interval`) is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pdn_train.config import ModelConfig
from pdn_train.model import LanguageModel

DATA = ("seq_len", "reset_at_documents", "val_path")  # keys of the data section that go with a model
NUMBERS = ("hidden_size", "num_heads", "head_dim", "expand_k", "hidden_ratio", "squash_x")  # of config.json, that others are made of
NO_DECAY = -1000.0

MODEL = {"embedding.weight": "model.embeddings.weight", "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight"}
BLOCK = {  # one here -> equal parts there, by rows
    "mixer_norm.weight": ("attn_norm.weight",),
    "mixer.conv_weight": ("attn.q_conv1d.weight", "attn.k_conv1d.weight", "attn.v_conv1d.weight"),
    "mixer.A_log": ("attn.A_log",),
    "mixer.dt_bias": ("attn.dt_bias",),
    "mixer.decay_up.weight": ("attn.f_proj.1.weight",),
    "mixer.output_up.weight": ("attn.g_proj.1.weight",),
    "mixer.output_bias": ("attn.g_proj.1.bias",),
    "mixer.precond_A_log": ("attn.A_log_atk",),
    "mixer.precond_dt_bias": ("attn.dt_bias_atk",),
    "mixer.center": ("attn.log_atk_scale",),
    "mixer.norm.weight": ("attn.o_norm.weight",),
    "mixer.out_proj.weight": ("attn.o_proj.weight",),
    "mlp_norm.weight": ("mlp_norm.weight",),
    "mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.down_proj.weight": ("mlp.down_proj.weight",),
}
INPUTS = "mixer.in_proj.weight"  # cut by `Mixer.input_columns`
COLUMNS = {name: f"attn.{name}_proj.weight" for name in "qkv"}
COLUMNS |= {"beta": "attn.b_proj.weight", "precond_decay": "attn.a_atk_proj.weight", "precond_gain": "attn.b_atk_proj.weight"}
SCALAR = {"decay": "attn.a_proj.weight"}
CHANNEL = {"decay": "attn.f_proj.0.weight", "gate": "attn.g_proj.0.weight", "precond_decay": "attn.a_proj.weight"}
# With tied gates: a name there -> the one it repeats
TIED_DECAY = {"attn.a_atk_proj.weight": "attn.a_proj.weight", "attn.A_log_atk": "attn.A_log", "attn.dt_bias_atk": "attn.dt_bias"}
TIED_GAIN = {"attn.b_atk_proj.weight": "attn.b_proj.weight"}

CLASSES = {  # recurrence -> (model_type, class) there
    "dn": ("delta_net", "DeltaNetForCausalLM"),
    "gdn": ("gated_deltanet", "GatedDeltaNetForCausalLM"),
    "kda": ("kda", "KDAForCausalLM"),
    "pdn": ("precond_gated_deltanet", "PrecondGatedDeltaNetForCausalLM"),
    "pgdn": ("precond_gated_deltanet", "PrecondGatedDeltaNetForCausalLM"),
    "pkda": ("precond_kda", "PrecondKDAForCausalLM"),
}
# What a config.json may leave out, as its classes then take it
DEFAULTS = {"allow_neg_eigval": False, "tie_word_embeddings": False, "safe_gate": False, "lower_bound": None, "attn": None, "conv_size": 4}


class InterchangeError(ValueError):
    """A model has no equal on the other side, or a folder does not hold what its config.json says; the message names what."""


@dataclass(frozen=True)
class Piece:
    """One tensor there, as rows of one here."""

    there: str
    here: str
    start: int
    stop: int
    shape: tuple[int, ...]  # there


def pieces(model: ModelConfig) -> list[Piece]:
    """The table for one model: its pieces cover every row of every tensor here once."""
    with torch.device("meta"):
        built = LanguageModel(model)
    found: list[Piece] = []
    for here, tensor in built.state_dict().items():
        start = 0
        for there, rows in _parts(here, len(tensor), built):
            shape = (rows, *tensor.shape[1:])
            found.append(Piece(there, here, start, start + rows, (rows, 1, *tensor.shape[1:]) if "conv1d" in there else shape))
            start += rows
    return found


def _parts(here: str, rows: int, built: LanguageModel) -> Iterator[tuple[str, int]]:
    """The names there of one tensor here, and the rows of each."""
    if here in MODEL:
        yield MODEL[here], rows
        return
    _, layer, name = here.split(".", 2)
    if name == INPUTS:
        columns = COLUMNS | (CHANNEL if built.config.mixer.decay == "channel" else SCALAR)
        for column, size in built.blocks[int(layer)].mixer.input_columns.items():
            yield f"model.layers.{layer}.{columns[column]}", size
        return
    for there in BLOCK[name]:
        yield f"model.layers.{layer}.{there}", rows // len(BLOCK[name])


def derived(model: ModelConfig, there: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors there that the table does not name, from those it does: PDN's absent decay, and the copies of tied gates."""
    made: dict[str, Tensor] = {}
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}."
        if model.recurrence == "pdn":
            beta = there[f"{prefix}attn.b_proj.weight"]
            made[f"{prefix}attn.a_proj.weight"] = torch.zeros_like(beta)
            made[f"{prefix}attn.A_log"] = beta.new_full((model.num_heads,), NO_DECAY)
            made[f"{prefix}attn.dt_bias"] = beta.new_zeros(model.num_heads)
        if model.tie_gates:
            copies = TIED_GAIN if model.recurrence == "pdn" else TIED_DECAY | TIED_GAIN
            made |= {prefix + copy: there[prefix + original].clone() for copy, original in copies.items()}
    return made


def to_fla(weights: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """This model's tensors under the names there. Raises InterchangeError where no class there computes it."""
    if (model.precond_form, model.precond_interval) != ("squashed", "both"):
        key = "precond_form" if model.precond_form != "squashed" else "precond_interval"
        raise InterchangeError(
            f"model.{key}={getattr(model, key)}: flash-linear-attention has the form squashed in the interval both only; "
            "use --format safetensors"
        )
    there = {p.there: weights[p.here][p.start : p.stop].reshape(p.shape) for p in pieces(model)}
    return there | derived(model, there)


def from_fla(there: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """The inverse of `to_fla`. Raises InterchangeError for a tensor that is missing, too many, of another shape, or not the derived one."""
    there = dict(there)
    if model.tie_embeddings:
        there.setdefault(MODEL["head.weight"], there.get(MODEL["embedding.weight"]))
    table = pieces(model)
    for p in table:
        found = None if there.get(p.there) is None else tuple(there[p.there].shape)
        if found != p.shape:
            raise InterchangeError(f"{p.there} is {found} there, its config.json asks for {p.shape}")
    own = {p.there: there[p.there] for p in table}
    expected = derived(model, own)
    for name, tensor in expected.items():
        if name not in there or not torch.equal(there[name], tensor):
            raise InterchangeError(
                f"{name} is not what {_kind(model)} makes of it; remove the key pdn_train from config.json to read a pgdn"
            )
    extra = sorted(there.keys() - own.keys() - expected.keys())
    if extra:
        raise InterchangeError(f"{extra[0]} has no place in a {model.recurrence} model here; {len(extra)} such tensors in all")
    rows: dict[str, list[Tensor]] = {}
    for p in table:
        tensor = there[p.there]
        rows.setdefault(p.here, []).append(tensor.squeeze(1) if "conv1d" in p.there else tensor)
    return {here: torch.cat(parts) for here, parts in rows.items()}


def _kind(model: ModelConfig) -> str:
    return "pdn" + (" with tied gates" if model.tie_gates else "") if model.recurrence == "pdn" else "a pgdn with tied gates"


# ---- config.json ----


def fields(model: ModelConfig) -> dict:
    """What config.json says of the architecture; every value is needed for the same mathematics."""
    channel, width = model.mixer.decay == "channel", model.num_heads * model.head_dim
    model_type, name = CLASSES[model.recurrence]
    said = {
        "model_type": model_type,
        "architectures": [name],
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_heads": model.num_heads,
        "intermediate_size": model.mlp_size,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        "norm_eps": model.norm_eps,
        "allow_neg_eigval": model.neg_eigval,
        "hidden_act": "swish",
        "use_short_conv": True,
        "conv_size": 4,
        "attn": None,
    }
    if model.recurrence == "dn":
        ratio = width / model.hidden_size
        said |= {"expand_k": ratio, "expand_v": ratio, "use_beta": True, "use_gate": False, "qk_norm": "l2", "qk_activation": "silu"}
    else:
        said |= {"head_dim": model.head_dim, "expand_v": 1.0}
        said |= {"safe_gate": False, "lower_bound": None} if channel else {"use_gate": False}
    if model.preconditioned:
        said |= {"squash_x": model.precond_bound, "squash_eps": 1e-6}
    return said


def to_json(model: ModelConfig, data: dict, end: int | None, begin: int | None) -> dict:
    """config.json as a tree. end, begin: the tokenizer's ids; data: of the run, those of DATA that are known."""
    settings = {"recurrence": model.recurrence, "tie_gates": model.tie_gates} | data
    length = {"max_position_embeddings": data["seq_len"]} if "seq_len" in data else {}
    return fields(model) | length | {"bos_token_id": begin, "eos_token_id": end, "dtype": "float32", "pdn_train": settings}


def from_json(tree: dict) -> tuple[ModelConfig, dict]:
    """The model and the data settings of a config.json, ours or another's. Raises InterchangeError where this project has no such model."""
    _check_tree(tree)
    model_type, own = tree.get("model_type"), tree.get("pdn_train", {})
    recurrence = own.get("recurrence") or next((r for r in ("dn", "gdn", "kda", "pgdn", "pkda") if CLASSES[r][0] == model_type), None)
    if recurrence not in CLASSES or CLASSES[recurrence][0] != model_type:
        raise InterchangeError(
            f"model_type={model_type!r}: there are {', '.join(sorted({t for t, _ in CLASSES.values()}))}"
            + (f", and pdn_train.recurrence={recurrence!r} is not one of that type" if own else "")
        )
    tree = DEFAULTS | tree
    missing = [key for key in ("hidden_size", "num_hidden_layers", "num_heads", "vocab_size", "norm_eps") if tree.get(key) is None]
    if missing:
        raise InterchangeError(f"config.json has no {missing[0]}")
    width = round(tree["hidden_size"] * tree.get("expand_k", 1.0)) if recurrence == "dn" else tree["num_heads"] * tree.get("head_dim", 0)
    model = ModelConfig(
        recurrence=recurrence,
        hidden_size=tree["hidden_size"],
        num_layers=tree["num_hidden_layers"],
        num_heads=tree["num_heads"],
        head_dim=width // tree["num_heads"],
        intermediate_size=tree.get("intermediate_size") or _mlp_size(tree),
        vocab_size=tree["vocab_size"],
        tie_embeddings=tree["tie_word_embeddings"],
        norm_eps=tree["norm_eps"],
        neg_eigval=tree["allow_neg_eigval"],
        tie_gates=own.get("tie_gates", False),
        precond_bound=float(tree.get("squash_x", 1.5)),
    )
    tree["intermediate_size"] = model.mlp_size
    for key, value in fields(model).items():
        if key != "architectures" and (key not in tree or tree[key] != value):
            raise InterchangeError(f"{key}={tree.get(key)!r} in config.json: this project's {recurrence} has {value!r}")
    length = {"seq_len": tree["max_position_embeddings"]} if tree.get("max_position_embeddings") is not None else {}
    return model, length | {key: own[key] for key in DATA if key in own}


def _check_tree(tree: object) -> None:
    """Raise InterchangeError where it is no object, or a number that is computed with is none."""
    if not isinstance(tree, dict) or not isinstance(tree.get("pdn_train", {}), dict):
        raise InterchangeError("config.json, or its key pdn_train, is no object")
    for key in NUMBERS:
        value = tree.get(key)
        if value is not None and (type(value) not in (int, float) or not 0 < value < float("inf")):
            raise InterchangeError(f"{key}={value!r} in config.json is no number above 0")


def _mlp_size(tree: dict) -> int:
    """intermediate_size as its classes derive it: 2/3 of hidden_ratio times hidden_size, rounded up to 256."""
    return -(-int(tree["hidden_size"] * (tree.get("hidden_ratio") or 4) * 2 / 3) // 256) * 256
