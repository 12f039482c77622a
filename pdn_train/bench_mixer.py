"""Launches and time of one token mixer, forward and backward: `python -m pdn_train.bench_mixer [--recurrence NAME]... [--shape B,T]`.

One layer of the 340M model in bf16 runs under the profiler; a row a kernel, in the order of first use, with how often it was launched and
how long it ran. Matrix products of the layer's projections (cuBLAS) are counted apart. --block takes the whole block, with norms and MLP.
"""

from __future__ import annotations

import argparse
import re

import torch
from torch.profiler import ProfilerActivity, profile

from kernels.recurrence import RECURRENCES
from pdn_train.config import ModelConfig
from pdn_train.model import Block, LanguageModel, Mixer

PRODUCT = re.compile(r"gemm|nvjet|cutlass|splitK|cublas|memset", re.IGNORECASE)  # cuBLAS clears its own counters; nothing else here does
STEPS = 5


def layer(recurrence: str, kernel: str, block: bool) -> Mixer | Block:
    model = LanguageModel(ModelConfig(recurrence=recurrence, kernel=kernel, num_layers=1))
    model.init_weights(0)
    made = model.blocks[0].to("cuda", torch.bfloat16)
    return made if block else made.mixer


def events(module: torch.nn.Module, batch: int, length: int) -> list[tuple[str, float]]:
    """(kernel, microseconds) of every launch of STEPS passes, forward and backward, in order."""
    hidden = module.in_proj.in_features if isinstance(module, Mixer) else module.mixer.in_proj.in_features
    x = torch.randn(batch, length, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    inputs = [x, *module.parameters()]
    for _ in range(3):
        torch.autograd.grad(module(x), inputs, dy)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            torch.autograd.grad(module(x), inputs, dy)
        torch.cuda.synchronize()
    device = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [(event.name, event.time_range.elapsed_us()) for event in sorted(device, key=lambda event: event.time_range.start)]


def table(found: list[tuple[str, float]]) -> str:
    kernels: dict[str, list[float]] = {}
    for name, microseconds in found:
        kernels.setdefault("matrix products" if PRODUCT.search(name) else name, []).append(microseconds)
    lines = [f"{'kernel':70}{'launches':>9}{'ms':>9}"]
    for name, times in kernels.items():
        lines.append(f"{name[:68]:70}{len(times) / STEPS:9.1f}{sum(times) / STEPS / 1e3:9.3f}")
    others = [microseconds for name, microseconds in found if not PRODUCT.search(name)]
    lines.append(f"{'besides the matrix products':70}{len(others) / STEPS:9.1f}{sum(others) / STEPS / 1e3:9.3f}")
    lines.append(f"{'all':70}{len(found) / STEPS:9.1f}{sum(us for _, us in found) / STEPS / 1e3:9.3f}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recurrence", action="append", choices=tuple(RECURRENCES))
    parser.add_argument("--shape", default="16,2048", metavar="B,T")
    parser.add_argument("--kernel", choices=("triton", "torch"), default="triton")
    parser.add_argument("--block", action="store_true", help="the whole block")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no CUDA device: launches are counted on a GPU")
    for recurrence in options.recurrence or ("pgdn",):
        print(f"{recurrence}, {options.shape} tokens, one {'block' if options.block else 'mixer'}, forward and backward, mean of {STEPS}")
        module = layer(recurrence, options.kernel, options.block)
        print(table(events(module, *(int(n) for n in options.shape.split(",")))), flush=True)


if __name__ == "__main__":
    main()
