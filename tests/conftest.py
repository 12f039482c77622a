"""Shared fixtures: real English text (Genesis, King James Version, public domain), a small tokenizer trained on it, and its shards.

Packages are imported inside the fixtures: the kernels' tests run where torch and triton alone are installed.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Before anything imports Triton: its own library is made for the interpreter, or not, when it is first imported
    os.environ["TRITON_INTERPRET"] = "1"

TEXT = Path(__file__).parent / "texts" / "genesis.txt"  # a verse a line, an empty line between chapters
VERSES = 4  # a document


@pytest.fixture(autouse=True)
def own_environment():
    """What a test sets in os.environ (a job's ranks, its caches) does not reach the next one."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session", autouse=True)
def interpreter_patches_once():
    """Triton's interpreter patches triton.language at a launch, and over again at each call of a device function: a third of its time."""
    try:
        from triton.runtime import interpreter
        from triton.runtime.interpreter import _LangPatchScope, _patch_lang
    except ImportError:  # no Triton, or a release in which it is done otherwise
        return
    language = interpreter.tl

    def patch_what_is_not(fn):
        modules = [x for x in (language, language.core) if any(y is x for y in fn.__globals__.values())]
        if not modules or any(language.core.is_builtin(module.load) for module in modules):
            return _patch_lang(fn)
        return _LangPatchScope()  # nothing to undo

    interpreter._patch_lang = patch_what_is_not


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """About 400 documents of four verses."""
    verses = [line for line in TEXT.read_text().splitlines() if line]
    return ["\n".join(verses[start : start + VERSES]) for start in range(0, len(verses), VERSES)]


@pytest.fixture(scope="session")
def tiny_text(documents, tmp_path_factory) -> Path:
    """The documents as a .jsonl file."""
    path = tmp_path_factory.mktemp("text") / "genesis.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_text) -> Path:
    """A sentencepiece model of 512 pieces."""
    from data_prep import tokenizer as training

    path = tiny_text.parent / "tokenizer.model"
    assert training.main([str(tiny_text), "--vocab-size", "512", "--output", str(path)]) == 0
    return path


@pytest.fixture(scope="session")
def tiny_shards(tiny_text, tiny_tokenizer) -> Path:
    """A folder of shards: about 80,000 tokens of training text in several shards, and val/."""
    from data_prep import prepare

    folder = tiny_text.parent / "shards"
    arguments = ["--tokenizer", str(tiny_tokenizer), "--workers", "1", "--shard-tokens", "20000", "--val-fraction", "0.1"]
    assert prepare.main([str(tiny_text), *arguments, "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def make_shards():
    """make_shards(folder, documents, vocab_size=100, shard_tokens=1000, sha256="0") -> folder.

    Writes lists of ids as shards, eos 2; no tokenizer file lies beside them.
    """
    import numpy as np

    from pdn_train.shards import ShardWriter, TokenizerInfo, write_manifest

    def make(folder: Path, documents: list, vocab_size: int = 100, shard_tokens: int = 1000, sha256: str = "0") -> Path:
        info = TokenizerInfo(file="tokenizer.model", sha256=sha256, vocab_size=vocab_size, bos_id=1, eos_id=2)
        writer = ShardWriter(folder, info, shard_tokens)
        for ids in documents:
            writer.add(np.asarray(ids), len(ids))
        write_manifest(folder, writer.finish())
        return folder

    return make


@dataclass(frozen=True)
class Run:
    """A tiny PGDN on Genesis in a folder of its own, for whole runs with real processes."""

    folder: Path

    STEPS, EVERY = 14, 4
    SAME = ("step", "tokens", "loss", "lr", "grad_norm", "skipped_steps")  # what an interruption must not change, bit for bit

    @property
    def config(self) -> Path:
        return self.folder / "run.yaml"

    @property
    def path(self) -> Path:
        return self.folder / "run"

    def metrics(self) -> list[dict]:
        file = self.path / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def story(self) -> list[tuple]:
        return [tuple(entry[key] for key in self.SAME) for entry in self.metrics()]

    def checkpoints(self) -> list[str]:
        return sorted(p.name for p in (self.path / "checkpoints").glob("step_*"))

    def endings(self) -> list[dict]:
        file = self.path / "endings.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def plan(self, *faults: dict) -> str:
        """The value of FAULT_PLAN for tests/faults/hooks."""
        return json.dumps({"folder": str(self.folder), "faults": faults})

    def met(self, number: int = 0) -> bool:
        """Whether a planned fault has happened."""
        return (self.folder / f"fault_{number}").exists()

    def wait(self, what: Callable[[], bool], seconds: float = 180) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def said(self) -> str:
        """Everything a submitted job has logged."""
        logs = sorted((self.path / "submissions").glob("*/*_log.*"))
        return "\n".join(f"--- {file.name}\n{file.read_text()}" for file in logs)


HOOKS = Path(__file__).parent / "faults" / "hooks"
RUN = """
run_dir: {folder}/run
model: {{recurrence: pgdn, hidden_size: 32, num_layers: 2, num_heads: 2, head_dim: 16, intermediate_size: 64, vocab_size: 512}}
data: {{path: {shards}, val_path: {shards}/val, seq_len: 64}}
optim: {{lr: 1e-2, min_lr: 1e-3, warmup_steps: 2}}
train: {{steps: {steps}, micro_batch: 2, global_batch: 8, precision: fp32, device: cpu}}
checkpoint: {{every: {every}, keep: 2}}
log: {{every: 1}}
launch: {{cluster: local, gpus_per_node: 2, cpus_per_task: 1, minutes: 10, hang_seconds: 120}}
"""


@pytest.fixture(scope="session")
def make_whole_run(tiny_shards, tmp_path_factory) -> Callable[[str], Run]:
    """make_whole_run(name) -> Run, not started."""

    def make(name: str) -> Run:
        run = Run(tmp_path_factory.mktemp(name))
        run.config.write_text(RUN.format(folder=run.folder, shards=tiny_shards, steps=Run.STEPS, every=Run.EVERY))
        return run

    return make


@pytest.fixture(scope="session")
def uninterrupted(make_whole_run) -> Run:
    """The run that nothing interrupts, on two ranks, through the launcher on this machine."""
    run = make_whole_run("uninterrupted")
    done = subprocess.run(
        [sys.executable, "-m", "launch.submit", str(run.config)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr + run.said()
    return run
