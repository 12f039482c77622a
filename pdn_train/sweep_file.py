"""A sweep file, and the runs it stands for.

A sweep file names a configuration and what varies:

    base: yaml/pgdn_mqar.yaml              the configuration of every run
    folder: runs/mqar                      run folders are FOLDER/SETTING/VARIANT/CHOICE/seed_N
    seeds: [1, 2, 3]                       train.seed and data.seed: within a seed all variants see the same tokens in the same order
    settings: {name: [section.key=value, ...], ...}     each is compared by itself (lengths of a task)
    variants: {name: [...], ...}           what is compared (recurrences, ablations)
    choices: {name: [...], ...}            the variant's best one counts, by its mean over seeds (learning rates); may be left out
    metric: tasks/mqar/accuracy            in the last line of a run's validation.jsonl; better: higher or lower
    pairs: [[gdn, pgdn], ...]              compared seed by seed
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pdn_train import config
from pdn_train.config import Config, ConfigError
from pdn_train.deciding import differences
from pdn_train.explain import absent, explain
from pdn_train.files import parse_line
from pdn_train.rundir import RunDir


class SweepError(ValueError):
    """A sweep cannot run; the message names the key and the way out."""


class Sweep(BaseModel):
    """A sweep file; the keys are in the module docstring."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    base: str
    folder: str
    seeds: list[int] = Field(min_length=1)
    settings: dict[str, list[str]] = {"all": []}
    variants: dict[str, list[str]] = Field(min_length=1)
    choices: dict[str, list[str]] = {"only": []}
    metric: str = "loss"
    better: Literal["lower", "higher"] = "lower"
    pairs: list[list[str]] = []


@dataclass(frozen=True)
class Run:
    """One run of a sweep."""

    setting: str
    variant: str
    choice: str
    seed: int
    folder: Path
    overrides: tuple[str, ...]
    settings: Config

    @property
    def log(self) -> Path:
        return self.folder.with_name(self.folder.name + ".log")


def load(path: str | Path, folder: str | None, extra: list[str]) -> tuple[Sweep, list[Run]]:
    """The sweep and its runs, in order. folder and extra (section.key=value, for every run) replace the file's.

    Raises SweepError, and ConfigError for a run's settings; each run is one rank.
    """
    sweep = _read(path)
    for pair in sweep.pairs:
        if len(pair) != 2 or not set(pair) <= sweep.variants.keys():
            raise SweepError(f"{path}: pairs={pair} is not two of the variants {', '.join(sweep.variants)}")
    _check_names(path, sweep)
    root = Path(folder or sweep.folder)
    runs = []
    for seed in sweep.seeds:
        for setting, first in sweep.settings.items():
            for variant, second in sweep.variants.items():
                for choice, third in sweep.choices.items():
                    where = root / setting / variant / choice / f"seed_{seed}"
                    own = (f"run_dir={where}", f"train.seed={seed}", f"data.seed={seed}")
                    overrides = (*first, *second, *third, *extra, *own)
                    runs.append(Run(setting, variant, choice, seed, where, overrides, config.load(sweep.base, list(overrides))))
    for run in runs:
        steps, every = run.settings.train.steps, run.settings.eval.every
        if not every or steps % every:
            raise SweepError(f"{path}: eval.every={every} must divide train.steps={steps}, so that a run ends with a validation")
        try:
            run.settings.accumulation(1)
        except ConfigError as error:
            raise SweepError(f"{path}: the run {run.folder}: {error}") from None
    return sweep, runs


def _check_names(path: str | Path, sweep: Sweep) -> None:
    """Raise SweepError unless each run has a folder of its own and --only can name each setting and variant."""
    if len(set(sweep.seeds)) < len(sweep.seeds):
        raise SweepError(f"{path}: seeds={sweep.seeds} names one twice")
    for key in ("settings", "variants", "choices"):
        for name in getattr(sweep, key):
            if name in ("", ".", "..") or set(name) & set("/,\0"):
                raise SweepError(f"{path}: {key} has the name {name!r}, which is to be that of a folder: without / and comma")


def _read(path: str | Path) -> Sweep:
    try:
        tree = config.parse(Path(path).read_text(), str(path))
    except FileNotFoundError:
        raise SweepError(f"the sweep {absent(Path(path))}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SweepError(f"cannot read the sweep {path}: {error}") from error
    of_a_run = [key for key in Config.model_fields if key in tree]
    if of_a_run and not tree.keys() & Sweep.model_fields.keys():
        required = [name for name, field in Sweep.model_fields.items() if field.is_required()]
        raise SweepError(
            f"{path} is the configuration of one run, for `python -m pdn_train.train {path}`: it has {', '.join(of_a_run)}, and not the "
            f"{', '.join(required)} of a sweep"
        )
    try:
        return Sweep.model_validate(tree)
    except ValidationError as error:
        raise SweepError(f"{path}: {explain(error, list(Sweep.model_fields))}") from None


def require_same_settings(runs: list[Run]) -> None:
    """Raise SweepError where a run's folder holds validations under other settings than the run's, but for the keys in its resume.allow."""
    others = {run.folder: found for run in runs if (found := _differences(run))}
    if not others:
        return
    folder, found = next(iter(others.items()))
    named = "; ".join(f"{key}: {text}" for key, text in found.items())
    more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
    raise SweepError(
        f"{folder}{more} holds results under other settings: {named}. They are neither counted nor trained over: give the same settings "
        "(and --set) again, take another --folder (or `folder:`), or remove these; if this is meant, "
        f"--set 'resume.allow=[{', '.join(found)}]'"
    )


def _differences(run: Run) -> dict[str, str]:
    run_dir = RunDir(run.folder)
    if not run_dir.config.exists() or not run_dir.validation.exists() or not run_dir.validation.read_bytes().strip():
        return {}
    found = differences(run_dir.config, run.settings)
    return {key: text for key, text in found.items() if key not in run.settings.resume.allow}


def value(sweep: Sweep, run: Run) -> float | None:
    """The metric after a run's last step, NaN where it was not finite; None where the run is not done.

    Raises SweepError where its runs do not measure it.
    """
    file = RunDir(run.folder).validation
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    entry = parse_line(lines[-1]) if lines else None
    if entry is None or entry.get("step") != run.settings.train.steps:
        return None
    found, missing = entry, ""
    for key in sweep.metric.split("/"):
        found = found.get(key, missing) if isinstance(found, dict) else missing
    if found is None:
        return math.nan
    if not isinstance(found, int | float):
        raise SweepError(
            f"metric {sweep.metric} is no number in the last line of {file}, which has {_numbers(entry)}: set it to one of these"
        )
    return float(found)


def _numbers(entry: dict, under: str = "") -> str:
    """The names that `metric` may have."""
    named = [(under + key, x) for key, x in entry.items()]
    return ", ".join(_numbers(x, f"{name}/") if isinstance(x, dict) else name for name, x in named)
