"""Faults of a configuration in sentences: the key, the value, and the valid key that may have been meant."""

from __future__ import annotations

import difflib
import fnmatch
from pathlib import Path
from typing import Any

from pydantic import ValidationError

# what others call keys; * stands for the section it was found in, or where that has no such key, for every one that has
MEANT = {
    "batch_size": ("train.micro_batch", "train.global_batch"),
    "context_length": ("data.seq_len",),
    "d_model": ("model.hidden_size",),
    "epochs": ("train.steps",),
    "gpus": ("launch.gpus_per_node",),
    "gradient_clipping": ("optim.clip",),
    "interval": ("*.every",),
    "learning_rate": ("optim.lr",),
    "max_steps": ("train.steps",),
    "n_heads": ("model.num_heads",),
    "n_layers": ("model.num_layers",),
    "output_dir": ("run_dir",),
    "seq_length": ("data.seq_len",),
    "sp": ("parallel.sequence",),
}
ALIKE = 0.6  # likeness (`_likeness`) from which a key of the same section may have been meant
MUCH_ALIKE = 0.8  # ... of another section


def explain(error: ValidationError, every: list[str]) -> str:
    """The faults of a file as one line; every: its valid dotted keys."""
    return "; ".join(_explain(fault, every) for fault in error.errors())


def _explain(fault: dict, every: list[str]) -> str:
    """One pydantic fault as a sentence with the key, the value and the way out."""
    parts = [str(part) for part in fault["loc"]]
    key = ".".join(part for part in parts if part != "str" and not part.startswith(("function-", "dict[", "constrained")))
    if fault["type"] == "extra_forbidden":
        return f"unknown key '{key}' (value {_shown(fault['input'])})" + suggestion(fault["loc"], every)
    if fault["type"] == "missing":
        return f"{key} is missing"
    if fault["type"] == "value_error":
        return str(fault["ctx"]["error"])
    quotes = "; text that reads like null or a number stands in quotes" if _might_be_text(fault) else ""
    return f"{key}={_shown(fault['input'])}: {fault['msg'][0].lower()}{fault['msg'][1:]}{quotes}"


def _might_be_text(fault: dict) -> bool:
    """Whether text was wanted and YAML made something else of what was written."""
    return fault["type"] == "string_type" and not isinstance(fault["input"], dict | list)


def _shown(value: Any) -> str:
    """A value as it is printed, cut to 60 characters: it may be a whole section."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def absent(path: Path) -> str:
    """That a YAML file does not exist, and which one beside it may have been meant."""
    near = difflib.get_close_matches(path.stem, sorted(file.stem for file in path.parent.glob("*.yaml")), n=3)
    meant = "did you mean " + " or ".join(str(path.parent / f"{name}.yaml") for name in near) + "?"
    return f"{path} does not exist; " + (meant if near else "name a YAML file, such as one of the project's folder yaml/")


def suggestion(location: tuple, every: list[str]) -> str:
    near = " or ".join(f"'{key}'" for key in _nearest(location, every))
    return f"; did you mean {near}?" if near else ""


def _nearest(location: tuple, every: list[str]) -> list[str]:
    """The valid keys most like an unknown one: what others mean by its name (MEANT), or by its last part (`_likeness`), or else, in its own
    section, by the whole.

    Of several that are equally like it, its own section's, or the first three. An unknown key of no section may be meant as a section.
    """
    *sections, name = [str(part) for part in location]
    prefix = ".".join(sections) + "." if sections else ""
    for known in difflib.get_close_matches(name, MEANT, n=1, cutoff=0.85):
        return [key for pattern in MEANT[known] for key in _matching(pattern, prefix, every)]
    own = {key for key in every if key.startswith(prefix) and key.count(".") == len(sections)}
    sought = every if sections else [*every, *dict.fromkeys(key.split(".")[0] for key in every if "." in key)]
    scores = {key: (_likeness(name, key), key in own) for key in sought}
    near = {key: score for key, score in scores.items() if score[0] >= (ALIKE if key in own else MUCH_ALIKE)}
    if near:
        return [key for key in near if near[key] == max(near.values())][:3]
    return difflib.get_close_matches(prefix + name, sorted(own), n=1, cutoff=0.5) if sections else []


def _matching(pattern: str, prefix: str, every: list[str]) -> list[str]:
    own = pattern.replace("*.", prefix)
    return [own] if own in every else fnmatch.filter(every, pattern)


def _likeness(name: str, key: str) -> float:
    """2: the key's last part is the name (or the whole, as eval_every); below, difflib's ratio of the two.

    1 more where one has all words of the other: zero_stage is meant as zero, total_steps as steps and not as decay_steps.
    """
    last = key.rpartition(".")[2]
    if name in (last, key.replace(".", "_")):
        return 2
    words, others = set(name.split("_")), set(last.split("_"))
    return difflib.SequenceMatcher(None, name, last).ratio() + (words <= others or others <= words)
