"""Time a cold start: `python -m kernels.bench_cold [--peer fla] [--recurrence NAME]...`. Prints a table.

Each recurrence in a fresh process with an empty compile cache: seconds until one forward and backward pass at 1 x 2,048 x 8 x 128 in bf16
has ended, imports and the CUDA context included, and the part of it after `import torch`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time

import torch

from kernels.bench import NAMES, PEERS, operands, ours, passes, peer, title

SHAPE = (1, 2048, 8, 128)


def first(name: str, whose: str) -> None:
    """In the child: the first pass; prints its seconds."""
    start = time.perf_counter()
    _, both = passes(peer(name) if whose == "fla" else ours, operands(name, *SHAPE))
    both()
    torch.cuda.synchronize()
    print(time.perf_counter() - start)


def cold(name: str, whose: str) -> tuple[float, float]:
    """(seconds of the process, seconds after its imports)."""
    with tempfile.TemporaryDirectory() as cache:
        start = time.perf_counter()
        command = ["env", f"TRITON_CACHE_DIR={cache}", sys.executable, "-c"]
        child = subprocess.run(
            [*command, f"from kernels.bench_cold import first; first({name!r}, {whose!r})"], stdout=subprocess.PIPE, check=True
        )
        return time.perf_counter() - start, float(child.stdout.split()[-1])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer", choices=("fla",))
    parser.add_argument("--recurrence", action="append", choices=NAMES)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no CUDA device: the Triton kernels are compiled for the GPU they run on")
    print(title())
    print(f"{'recurrence':12}{'whose':8}{'process, s':>12}{'after imports':>15}")
    for name in options.recurrence or NAMES:
        for whose in ("ours", "fla") if options.peer and name in PEERS else ("ours",):
            whole, part = cold(name, whose)
            print(f"{name:12}{whose:8}{whole:12.1f}{part:15.1f}", flush=True)


if __name__ == "__main__":
    main()
