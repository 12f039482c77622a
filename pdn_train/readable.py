"""The data of a run opened and checked, and before a run starts what of them would stop it."""

from __future__ import annotations

import sys
from pathlib import Path

from pdn_train.config import Config
from pdn_train.data import Samples, check_same_tokenizer, check_tokenizer_file, open_samples
from pdn_train.mqar import open_examples
from pdn_train.shards import MANIFEST, ShardError


def open_all(config: Config) -> tuple[Samples, Samples | None]:
    """The training samples of a run, and the validation samples where they are wanted. Raises ShardError for what it could not read."""
    data = config.data
    if data.mqar_pairs:
        return open_examples(config)
    samples = open_samples(data.path, data.seq_len, data.seed, config.model.vocab_size)
    check_tokenizer_file(samples)
    if not config.eval.every:
        return samples, None
    validation = open_samples(data.val_path, data.seq_len, data.seed, config.model.vocab_size, sequential=True)
    check_same_tokenizer(samples, validation)
    return samples, validation


def data_faults(config: Config) -> tuple[list[str], list[str]]:
    """Why the run could not read its data here: (of folders where nothing is prepared yet, of what is there), each fault once."""
    data = config.data
    if data.mqar_pairs:
        return [], []
    folders = [*(data.path if isinstance(data.path, dict) else [data.path]), *([data.val_path] if config.eval.every else [])]
    missing, faults = [], []
    for folder in dict.fromkeys(folders):
        try:
            open_samples(folder, data.seq_len, data.seed, config.model.vocab_size)
        except ShardError as error:
            (missing if _is_missing(Path(folder) / MANIFEST) else faults).append(str(error))
    if not missing and not faults:
        try:
            open_all(config)
        except ShardError as error:
            faults.append(str(error))
    return missing, faults


def _is_missing(file: Path) -> bool:
    """Not one that may not be looked at."""
    try:
        return not file.exists()
    except OSError:
        return False


def tell_faults(missing: list[str], faults: list[str]) -> int:
    """The last lines of a dry run, and its exit code: one plans before one has the data, but what is there must fit."""
    for text in missing:
        print(f"the run would stop here for want of its data: {text}", flush=True)
    for text in faults:
        print(f"error: {text}", file=sys.stderr)
    return 2 if faults else 0
