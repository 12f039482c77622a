"""Which keys of a configuration decide a run's result, and in which of them a run's record and the configuration of now differ.

Left out is what may change between machines and starts: the kernel, micro-batches and memory, ranks and ZeRO, checkpoints, logs, launching.
"""

from __future__ import annotations

from pathlib import Path

from pdn_train.config import Config, build, keys, parse

SECTIONS = ("model", "data", "optim")
SINGLE = ("init_from", "train.steps", "train.global_batch", "train.seed", "train.precision", "eval.samples", "eval.tasks")
DECIDING = tuple(key for key in keys() if key in SINGLE or (key.partition(".")[0] in SECTIONS and key != "model.kernel"))


def differences(recorded: Path, settings: Config) -> dict[str, str]:
    """{key: "A then, B now"} of a run's config.yaml and the settings of now. A key that the file lacks did what its default does.

    A key that there no longer is is passed over. Raises ConfigError for a file that is not YAML, OSError for one that cannot be read.
    """
    tree = parse(recorded.read_text(), str(recorded))
    defaults = build({"run_dir": "any", "data": {"path": "any"}}, "defaults").model_dump(mode="json")
    defaults["data"]["path"] = None
    now = settings.model_dump(mode="json")
    found = {}
    for key in DECIDING:
        before, after = _get(tree, key, _get(defaults, key, None)), _get(now, key, None)
        if before != after:
            found[key] = f"{before!r} then, {after!r} now"
    return found


def _get(tree: dict, key: str, otherwise: object) -> object:
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return otherwise
        tree = tree[part]
    return tree
