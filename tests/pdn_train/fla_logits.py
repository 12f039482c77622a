"""Logits of this project against flash-linear-attention's own classes on a GPU: `python tests/pdn_train/fla_logits.py [FOLDER ...]`.

Without arguments: a small model of each kind, random weights, exported, loaded there by AutoModelForCausalLM, run on the same ids, in fp32
(relative RMS error of the logits at most 1e-4) and bf16 (1e-2, or little more than this project's own), against this project's fp64 model
on the CPU. FOLDER names exports of --format fla instead; `--kinds pgdn,pkda` takes some kinds. Prints a line each and exits 1 where one is
off, 77 where flash-linear-attention, transformers or a GPU is missing. Its kernels run with the first of their configurations (trying them
all out takes minutes, and logits do not depend on it) and multiply fp32 as fp32: left to themselves they take TF32, in GDN's and KDA's
triangular solve even where Triton is asked for fp32. Its DN refuses fp32.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_F32_DEFAULT"] = "ieee"  # before Triton is imported: its own kernels leave the precision open

import torch

from pdn_train import weights
from pdn_train.config import ModelConfig
from pdn_train.export import write_weights
from pdn_train.interchange import to_fla, to_json
from pdn_train.model import LanguageModel

KINDS = ("dn", "gdn", "kda", "pdn", "pgdn", "pkda")
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
NOISE = 1.25  # in bf16 these random weights alone cost 1.2 % (measured on a CPU): theirs may be so many times ours
LENGTH = 200  # more than the 64 tokens up to which those classes go token by token


def make(kind: str, folder: Path) -> None:
    """An fla folder of a model with two layers; the head and the gates are larger than initially, so that logits say something."""
    config = ModelConfig(recurrence=kind, hidden_size=128, num_layers=2, num_heads=2, head_dim=64, vocab_size=512, kernel="torch")
    model = LanguageModel(config)
    model.init_weights(1)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "conv" not in name:
            parameter.data *= 3
    folder.mkdir(parents=True)
    write_weights(folder, to_fla(model.state_dict(), config), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(to_json(config, {"seq_len": 256}, 2, 1)))


@torch.no_grad()
def compare(folder: Path) -> dict[torch.dtype, tuple[float, float]]:
    """Relative RMS error of their logits and of ours on the same GPU, by dtype."""
    import fla  # noqa: F401 - registers its classes
    from transformers import AutoModelForCausalLM

    source = weights.find(folder)
    ids = torch.randint(0, source.model.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    ours, _ = weights.load_model(source, "cpu", torch.float64, "torch")
    expected = ours(ids)
    errors = {}
    for dtype in TOLERANCES:
        if dtype == torch.float32 and source.model.recurrence == "dn":
            continue
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).cuda().eval()
        rounded, _ = weights.load_model(source, "cpu", dtype, "torch")
        judge = expected if dtype == torch.float32 else rounded.double()(ids)  # the same rounded weights, computed exactly
        mine, _ = weights.load_model(source, "cuda", dtype, "torch")
        both = theirs(ids.cuda()).logits, mine(ids.cuda())
        errors[dtype] = tuple(relative(logits.double().cpu(), judge) for logits in both)
    return errors


def without_autotuning() -> None:
    """Triton kernels that would be tried out in several configurations have one from here on."""
    from triton.runtime.autotuner import Autotuner

    initialise = Autotuner.__init__

    def first_only(self, fn, arg_names, configs, *rest, **named):
        initialise(self, fn, arg_names, configs[:1], *rest, **named)

    Autotuner.__init__ = first_only


def without_tf32() -> None:
    """Their solves' products in fp32. Their kernels read these names when they are compiled."""
    import fla  # noqa: F401 - imports the modules
    import triton.language as tl

    for name in ("fla.ops.gated_delta_rule.chunk_fwd", "fla.ops.kda.chunk_intra"):
        module = importlib.import_module(name)
        assert hasattr(module, "SOLVE_TRIL_DOT_PRECISION"), f"{name} has another name for it now"
        module.SOLVE_TRIL_DOT_PRECISION = tl.constexpr("ieee")


def relative(x: torch.Tensor, judge: torch.Tensor) -> float:
    return ((x - judge).square().mean() / judge.square().mean()).sqrt().item()


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare logits with flash-linear-attention on a GPU.")
    parser.add_argument("folders", nargs="*", type=Path, help="exports of --format fla (default: small models of every kind)")
    parser.add_argument("--kinds", default=",".join(KINDS))
    a = parser.parse_args()
    missing = [name for name in ("fla", "transformers") if importlib.util.find_spec(name) is None]
    if missing or not torch.cuda.is_available():
        print(f"skipped: {', '.join(missing) or 'a GPU'} is not here")
        return 77
    without_autotuning()
    without_tf32()
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        folders = a.folders or [Path(scratch) / kind for kind in a.kinds.split(",")]
        for folder in folders:
            if not folder.exists():
                make(folder.name, folder)
            for dtype, (theirs, ours) in compare(folder).items():
                fine = theirs <= max(TOLERANCES[dtype], NOISE * ours if dtype == torch.bfloat16 else 0)
                wrong += not fine
                errors = f"relative RMS: theirs {theirs:.2e}, ours {ours:.2e}"
                print(f"{folder.name:8} {str(dtype):16} {errors}  {'ok' if fine else 'WRONG'}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
