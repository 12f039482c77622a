"""The configuration of a run: defaults < YAML file < `section.key=value` on the command line.

Every section is a frozen model whose fields are the keys. An unknown key, a wrong type, a duplicate YAML key or an impossible combination
is a `ConfigError` that names the key, the value and the nearest valid name. This module imports neither torch nor DeepSpeed: a login node
that submits a job reads configurations without waiting for them.

YAML is read as version 1.2 reads numbers and booleans: `3e-4` is a float, `012` and `off` are text (and so are refused where a number or a
choice is wanted) instead of 10 and false.
"""

from __future__ import annotations

import re
from functools import reduce
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from kernels.recurrence import RECURRENCES, Recurrence
from pdn_train import yaml12
from pdn_train.explain import absent, explain, suggestion


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the key, the value and the way out."""


def _integral(value: Any) -> Any:
    """`1e4` is meant as 10000; 1.5 stays a float and is refused by the field's type."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


LARGEST = 2**63 - 1  # that a tensor of int64, a seed of torch and a file's offset can have
Count = Annotated[int, BeforeValidator(_integral), Field(ge=0, le=LARGEST)]
Positive = Annotated[int, BeforeValidator(_integral), Field(ge=1, le=LARGEST)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, tree: Any) -> Any:
        """A section without keys, all of them commented out, say, is null to YAML: it has its defaults."""
        return {} if tree is None else tree


class ModelConfig(Section):
    recurrence: Literal["dn", "gdn", "kda", "pdn", "pgdn", "pkda"] = "pgdn"
    hidden_size: Positive = 1024
    num_layers: Positive = 24
    num_heads: Positive = 8
    head_dim: Annotated[Positive, Field(ge=16, le=256)] = 128
    intermediate_size: Positive | None = None  # SwiGLU's width; None: 8/3 of hidden_size, rounded up to 256
    vocab_size: Positive = 32000
    tie_embeddings: bool = True
    norm_eps: Rate = 1e-6
    kernel: Literal["triton", "torch"] = "torch"
    channel_dt: Literal["zero", "log_uniform"] = "zero"  # a decay a channel starts with dt_bias 0, as PKDA's source; or as a scalar decay
    neg_eigval: bool = False  # beta in [0, 2] instead of [0, 1]
    tie_gates: bool = False  # the preconditioner's decay and gain are the state's own
    precond_bound: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.5  # x: the preconditioner lies in [1/x, x]
    precond_form: Literal["squashed", "unstable_atk", "atq", "norm_kbk", "norm_1_kbk", "norm_beta"] = "squashed"
    precond_interval: Literal["both", "up", "down"] = "both"  # [1/x, x] | [1, x] | [1/x, 1]

    @property
    def mixer(self) -> Recurrence:
        return RECURRENCES[self.recurrence]

    @property
    def preconditioned(self) -> bool:
        return self.mixer.preconditioner != "none"

    @property
    def mlp_size(self) -> int:
        return self.intermediate_size or -(-self.hidden_size * 8 // (3 * 256)) * 256

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        if self.neg_eigval and self.preconditioned and 2 * self.precond_bound > 2:
            raise ValueError(
                f"model.neg_eigval=true with model.precond_bound={self.precond_bound}: beta reaches 2, and 2 x precond_bound = "
                f"{2 * self.precond_bound} > 2 lets the write eigenvalue leave the unit disk; use neg_eigval=false or precond_bound=1"
            )
        if self.channel_dt != "zero" and self.mixer.decay != "channel":
            raise ValueError(f"model.channel_dt={self.channel_dt} is for a decay a channel (kda, pkda), not {self.recurrence}")
        if self.tie_gates and self.recurrence not in ("pdn", "pgdn"):
            raise ValueError(f"model.tie_gates=true is for recurrence pgdn (decay and gain) and pdn (gain), not {self.recurrence}")
        special = [f"{k}={getattr(self, k)}" for k, plain in _PRECOND_DEFAULTS.items() if getattr(self, k) != plain]
        if special and not self.preconditioned:
            raise ValueError(f"model.{special[0]}: recurrence {self.recurrence} has no preconditioner; use pdn, pgdn or pkda")
        if self.precond_interval != "both" and self.precond_form in ("unstable_atk", "atq"):
            raise ValueError(f"model.precond_interval={self.precond_interval}: precond_form={self.precond_form} is not bounded; use both")
        if special and self.kernel == "triton":
            raise ValueError(f"model.{special[0]} is an ablation of the torch backend; set model.kernel=torch")
        return self


_PRECOND_DEFAULTS = {"precond_form": "squashed", "precond_interval": "both"}


class DataConfig(Section):
    path: str | dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] | None = None  # a folder of shards, or {folder: weight}
    val_path: str | None = None
    seq_len: Positive = 2048
    seed: Count = 42
    reset_at_documents: bool = False
    mqar_pairs: Count = 0  # > 0: no shards; the synthetic task of `pdn_train.mqar` with so many pairs
    mqar_fewest: Count = 0  # > 0: in its first half training climbs from so many pairs to mqar_pairs, doubling
    mqar_examples: Positive = 100_000  # of it, an epoch

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        if self.path == {}:
            raise ValueError("data.path={} names no folder: give a folder of shards, or {folder: weight, ...}")
        return self


class OptimConfig(Section):
    lr: Rate = 4e-4
    min_lr: Rate = 4e-5
    warmup_start: Rate = 0.0
    warmup_steps: Count = 1024
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    decay_steps: Count = 0  # the last part of a wsd schedule
    betas: Annotated[tuple[Fraction, Fraction], Strict(False)] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-8
    weight_decay: Rate = 0.01
    decay_all: bool = False  # decay every parameter, as the paper's runs do, instead of the matrices only
    clip: Rate = 1.0  # of the global gradient norm; 0: off

    @model_validator(mode="after")
    def _consistent(self) -> OptimConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"optim.min_lr={self.min_lr} is above optim.lr={self.lr}")
        if self.warmup_start > self.lr:
            raise ValueError(f"optim.warmup_start={self.warmup_start} is above optim.lr={self.lr}")
        if self.schedule == "wsd" and not self.decay_steps:
            raise ValueError("optim.schedule=wsd needs optim.decay_steps >= 1, the length of its last part")
        if self.schedule != "wsd" and self.decay_steps:
            raise ValueError(f"optim.decay_steps={self.decay_steps} is for optim.schedule=wsd, not {self.schedule}")
        return self


class TrainConfig(Section):
    steps: Positive = 30000
    micro_batch: Positive = 16  # sequences a rank holds at once
    global_batch: Positive = 256  # sequences a step, over the whole world
    seed: Count = 42
    precision: Literal["bf16", "fp32"] = "bf16"
    activation_checkpoint: Literal["none", "block", "selective"] = "none"
    compile: bool = False
    max_nonfinite: Positive = 10  # non-finite steps in a row that end the run
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPU where there is one


class ParallelConfig(Section):
    sequence: Positive = 1
    zero: Annotated[Count, Field(le=3)] = 1


class CheckpointConfig(Section):
    every: Positive = 1000
    keep: Positive = 3  # newest ones kept
    keep_every: Count = 0  # steps between milestones that are never removed; 0: none
    background: bool = True  # train on while a copy in host memory, as large as this rank's files, is written; false: wait, without a copy


class EvalConfig(Section):
    every: Count = 0  # steps between validations; 0: none
    samples: Positive = 256  # validation samples, the same ones each time; also of each task
    tasks: list[Literal["mqar", "niah", "niah_1", "niah_2", "niah_3"]] = []  # of `pdn_train.evaluate`, run at each validation


class LogConfig(Section):
    every: Positive = 10
    health: Count = 1000  # steps between two looks at the recurrences (`pdn_train.health`); 0: none


class LaunchConfig(Section):
    cluster: Literal["slurm", "local", "debug"] = "slurm"
    nodes: Positive = 1
    gpus_per_node: Count = 8  # ranks on a node, each with a GPU of its own (with train.device=cpu: none of them); 0: one rank without
    cpus_per_task: Positive = 8
    minutes: Positive = 1440
    warning_seconds: Positive = 120  # the job is told this long before its time is up; the writing of two checkpoints must fit in it
    partition: str | None = None
    account: str | None = None
    constraint: str | None = None
    requeue: bool = True
    max_requeues: Count = 20
    hang_seconds: Positive = 900  # that a rank may take for one step, one save, ... before the job is ended
    setup: list[str] = []  # shell commands that run on the first node before the ranks start
    sbatch_extra: list[str] = []  # such as --qos=long
    srun_extra: list[str] = []  # such as --container-image=/images/train.sqsh
    python: str | None = None  # the interpreter on the nodes, where it is not the one that submits

    @property
    def ranks_per_node(self) -> int:
        return max(1, self.gpus_per_node)

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def collective_seconds(self) -> int:
        """How long a collective may wait: longer than hang_seconds, after which the watchdog names the rank that the others wait for."""
        return self.hang_seconds + 60

    @property
    def warning(self) -> int:
        """Seconds from the warning to the time limit: warning_seconds, at most half of the limit."""
        return min(self.warning_seconds, 30 * self.minutes)

    @model_validator(mode="after")
    def _consistent(self) -> LaunchConfig:
        if self.cluster != "slurm" and self.nodes > 1:
            raise ValueError(f"launch.nodes={self.nodes} with launch.cluster={self.cluster}: this machine is one node; use cluster=slurm")
        return self


class ResumeConfig(Section):
    allow: list[str] = []  # keys that may differ from the checkpoint's (train.steps always may)


class ProfileConfig(Section):
    start: Count = 0
    stop: Count = 0  # steps start .. stop - 1 are recorded: trace, parts, memory (`pdn_train.profiling`); equal: off


class Config(Section):
    """A whole run. Build it with `load`; `dump` gives the YAML text that `load` reads back."""

    run_dir: Annotated[str, Field(min_length=1)]
    init_from: str | None = None  # weights only, from a run, a checkpoint or an export
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    launch: LaunchConfig = LaunchConfig()
    resume: ResumeConfig = ResumeConfig()
    profile: ProfileConfig = ProfileConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.data.path is None and not self.data.mqar_pairs:
            raise ValueError("data.path is missing: name a folder made by `python -m data_prep.prepare`, or {folder: weight, ...}")
        if self.eval.tasks and not self.eval.every:
            raise ValueError(f"eval.tasks={self.eval.tasks} run at validations: set eval.every to the steps between them")
        if "mqar" in self.eval.tasks and not self.data.mqar_pairs:
            raise ValueError("eval.tasks with mqar needs data.mqar_pairs, the number of pairs that the model is trained on")
        if self.data.mqar_pairs and any(task.startswith("niah") for task in self.eval.tasks):
            raise ValueError(f"eval.tasks with niah needs a tokenizer, and data.mqar_pairs={self.data.mqar_pairs} trains without one")
        if self.parallel.zero == 3 and any(task.startswith("niah") for task in self.eval.tasks):
            raise ValueError("eval.tasks with niah generates text, which weights sharded by parallel.zero=3 cannot; use parallel.zero=2")
        if self.data.mqar_pairs and (self.data.path is not None or self.data.reset_at_documents):
            raise ValueError(
                f"data.mqar_pairs={self.data.mqar_pairs} makes its own samples, without documents: leave data.path and "
                "data.reset_at_documents out"
            )
        if self.eval.every and not self.data.val_path and not self.data.mqar_pairs:
            raise ValueError(f"eval.every={self.eval.every} needs data.val_path, a folder of validation shards")
        if self.parallel.zero == 0 and self.train.precision == "bf16":
            raise ValueError(
                "parallel.zero=0 with train.precision=bf16: DeepSpeed's stage 0 starts Adam's count at 1 there and so trains differently; "
                "use parallel.zero=1"
            )
        if not self.profile.start <= self.profile.stop <= self.train.steps:
            raise ValueError(
                f"profile.start={self.profile.start}, profile.stop={self.profile.stop}: they must rise and end by "
                f"train.steps={self.train.steps}"
            )
        if self.train.compile and self.train.activation_checkpoint == "selective":
            raise ValueError(
                "train.compile=true with train.activation_checkpoint=selective: compiled blocks would run eagerly; use none or block"
            )
        if self.train.compile and self.data.reset_at_documents:
            raise ValueError(
                "train.compile=true with data.reset_at_documents=true: every batch's new boundaries would compile again; use one of them"
            )
        if self.train.compile and self.parallel.sequence > 1:
            raise ValueError(
                f"train.compile=true with parallel.sequence={self.parallel.sequence}: compiled blocks hand no states on; use one of them"
            )
        unknown = [key for key in self.resume.allow if key not in keys()]
        if unknown:
            raise ValueError(f"resume.allow names the unknown key '{unknown[0]}'" + suggestion(tuple(unknown[0].split(".")), keys()))
        self._check_schedule()
        self._check_recall()
        self._check_climb()
        self._check_sequence()
        return self

    def _check_schedule(self) -> None:
        steps, optim = self.train.steps, self.optim
        if optim.warmup_steps + optim.decay_steps > steps:
            raise ValueError(
                f"optim.warmup_steps={optim.warmup_steps} + optim.decay_steps={optim.decay_steps} do not fit in train.steps={steps}: "
                "lower one of them, or take more steps"
            )

    def _check_recall(self) -> None:
        fault = recall_fault(self.data.mqar_pairs, self.data.seq_len, self.model.vocab_size) if self.data.mqar_pairs else None
        if fault is not None:
            raise ValueError(fault)

    def _check_climb(self) -> None:
        fewest, pairs, steps = self.data.mqar_fewest, self.data.mqar_pairs, self.train.steps
        rungs = [fewest << n for n in range(pairs.bit_length() + 1)]
        if not fewest:
            return
        if pairs not in rungs:
            raise ValueError(
                f"data.mqar_fewest={fewest}, doubled again and again, never is data.mqar_pairs={pairs}: halve {pairs} as often as you "
                "like, or use 0 for no climb"
            )
        if steps // 2 < rungs.index(pairs):
            raise ValueError(
                f"data.mqar_fewest={fewest} doubles {rungs.index(pairs)} times in the first half of train.steps={steps}: take more steps, "
                "or begin with more pairs"
            )

    def _check_sequence(self) -> None:
        ranks, length = self.parallel.sequence, self.data.seq_len
        if length % ranks:
            raise ValueError(f"parallel.sequence={ranks} does not divide data.seq_len={length}")
        if ranks > 1 and length // ranks < 3:
            raise ValueError(
                f"parallel.sequence={ranks} cuts data.seq_len={length} into pieces of {length // ranks} tokens; the convolution needs 3"
            )

    @property
    def flat_zero(self) -> bool:
        """Whether the optimizer is that of `pdn_train.flat_zero`, whose files are the same at both its stages."""
        return self.parallel.zero in (1, 2) and self.train.precision == "bf16"

    def data_parallel(self, world_size: int) -> int:
        """How many ranks see different samples: world_size / parallel.sequence."""
        if world_size % self.parallel.sequence:
            raise ConfigError(f"parallel.sequence={self.parallel.sequence} does not divide the world of {world_size} ranks")
        return world_size // self.parallel.sequence

    def accumulation(self, world_size: int) -> int:
        """Micro-batches a rank runs per step: global_batch / (micro_batch x data-parallel ranks)."""
        ranks = self.data_parallel(world_size)
        at_once = self.train.micro_batch * ranks
        if self.train.global_batch % at_once:
            raise ConfigError(
                f"train.global_batch={self.train.global_batch} is not a multiple of train.micro_batch={self.train.micro_batch} x "
                f"{ranks} data-parallel ranks = {at_once}; the nearest that fit are "
                f"{' and '.join(str(n) for n in _neighbours(self.train.global_batch, at_once))}"
            )
        return self.train.global_batch // at_once


def recall_fault(pairs: int, length: int, vocab: int, pairs_name: str = "data.mqar_pairs", length_name: str = "data.seq_len") -> str | None:
    """Why examples of `pdn_train.mqar` cannot have these pairs, tokens and ids, and the way out by the names given; None: they can."""
    if 4 * pairs > length or length % 2:
        lower = f", or lower {pairs_name} to {length // 4}" if length % 2 == 0 and length >= 4 else ""
        return f"{pairs} pairs need an even length of at least {4 * pairs} tokens, not {length}: set {length_name} so{lower}"
    if pairs > vocab // 2 - 1:
        return f"{pairs} pairs need {pairs} keys, and a vocabulary of {vocab} (model.vocab_size) has {vocab // 2 - 1}: lower {pairs_name}"
    return None


def _neighbours(value: int, step: int) -> list[int]:
    below = value // step * step
    return [n for n in (below, below + step) if n > 0]


QUOTED = re.compile(r"""'([^']|'')*'|"([^"\\]|\\.)*\"""", re.DOTALL)  # one quoted text of YAML, from end to end
SWEEP = {"base", "seeds", "variants"}  # keys that a file of `pdn_train.sweep` always has, and a run's never


def load(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file and apply `section.key=value` overrides: of a key that takes text, such as run_dir, the value as it stands (without
    quotes round it; null, and a mapping where the key takes one, are YAML), of any other the value read as YAML.

    Raises ConfigError for a file that is missing or not YAML, and for every fault the module docstring names.
    """
    try:
        text = Path(path).read_text()
    except FileNotFoundError:
        raise ConfigError(f"the configuration {absent(Path(path))}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error
    tree = parse(text, str(path))
    if tree.keys() >= SWEEP:
        raise ConfigError(f"{path} is a sweep of many runs (it has {', '.join(sorted(SWEEP))}), for `python -m pdn_train.sweep {path}`")
    for item in overrides or []:
        _override(tree, item)
    return build(tree, str(path))


def build(tree: dict, source: str) -> Config:
    """A Config from nested dictionaries; `source` is named in errors."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{source}: {explain(error, keys())}") from None


def dump(config: Config) -> str:
    """The resolved configuration as YAML; `load` of it gives the same Config."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=yaml12.Dumper, sort_keys=False, width=120)


def parse(text: str, source: str) -> dict:
    """YAML text to nested dictionaries, with 1.2 numbers and no duplicate keys."""
    try:
        tree = yaml.load(text, Loader=yaml12.Loader)  # noqa: S506 - a SafeLoader subclass
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{source}: lists or mappings stand in each other hundreds deep; no key takes such a value") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: the file must be a mapping of sections, not {type(tree).__name__}")
    return tree


def _override(tree: dict, item: str) -> None:
    key, equals, text = item.partition("=")
    if not equals or not key:
        raise ConfigError(f"'{item}' on the command line is not of the form section.key=value")
    try:
        item.encode()
    except UnicodeEncodeError:  # Python keeps bytes of a command line that are none as half surrogates
        raise ConfigError(f"{item!r} on the command line is not UTF-8: give {key} a value that is") from None
    *sections, name = key.split(".")
    for section in sections:
        if tree.get(section) is None:
            tree[section] = {}
        tree = tree[section]
        if not isinstance(tree, dict):
            raise ConfigError(f"'{item}' on the command line: {section} is a value, not a section")
    tree[name] = text if _is_text(key, text) else parse(f"value: {text}", f"'{item}' on the command line")["value"]


def _field(key: str) -> FieldInfo | None:
    """Of a dotted key; None where there is no such key."""
    section, _, name = key.rpartition(".")
    within = Config.model_fields[section].annotation if section in Config.model_fields else Config if not section else None
    return getattr(within, "model_fields", {}).get(name)


def _is_text(key: str, text: str) -> bool:
    """Whether this value of the key is the text as it stands: it may be any, and is neither quoted nor another value that the key takes."""
    field = _field(key)
    kinds = () if field is None else get_args(field.annotation) if isinstance(field.annotation, UnionType) else (field.annotation,)
    mapping = text.startswith("{") and any(get_origin(kind) is dict for kind in kinds)
    null = text in ("null", "~") or (text == "" and NoneType in kinds)
    return str in kinds and not (null or mapping or QUOTED.fullmatch(text))


def default(key: str) -> Any:
    """What a key such as model.hidden_size is where nobody sets it."""
    return _field(key).get_default(call_default_factory=True)


def changed(config: Config) -> dict[str, Any]:
    """The keys whose values are not the defaults, in order."""
    values = {key: reduce(getattr, key.split("."), config) for key in keys()}
    return {key: value for key, value in values.items() if value != default(key)}


def keys() -> list[str]:
    """Every valid dotted key, in order."""
    found = []
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found += [f"{name}.{key}" for key in field.annotation.model_fields]
        else:
            found.append(name)
    return found
