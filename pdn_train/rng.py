"""A rank's random state, in a file of its own in each checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch


def rng_file(folder: Path, rank: int) -> Path:
    return folder / f"rng_{rank:05d}.pt"


def rng_state() -> dict:
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None}


def restore_rng(file: Path) -> None:
    """Put back what `rng_state` gave; a run that moved to a machine without a GPU keeps the CPU's part."""
    state = torch.load(file, weights_only=False)
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
