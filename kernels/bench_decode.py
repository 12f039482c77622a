"""Time one token of decoding: `python -m kernels.bench_decode [--peer fla] [--shape B,H,D]... [--recurrence NAME]...`. Prints a table.

Medians of single calls, host work included, and of replays of a captured graph, which leave the card's own time. bf16 tokens; gates and
states in fp32. The peer's call is its recurrent one with T = 1, an initial and a final state (two buffers; ours is updated in place). The
floor is the state's bytes, read and written once, at 4.3 TB/s, what a copy reaches on an H200.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.bench import GATES, NAMES, median_ms, operands, title
from kernels.decode import step
from kernels.operands import Preconditioner, State

COPY = 4.3e9  # bytes a millisecond
PEERS = {
    "dn": ("fla.ops.delta_rule", "fused_recurrent_delta_rule"),
    "gdn": ("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "kda": ("fla.ops.kda", "fused_recurrent_kda"),
    "pgdn": ("fla.ops.precond_gated_delta_rule", "fused_recurrent_precond_gated_delta_rule"),
    "pkda": ("fla.ops.precond_kda", "fused_recurrent_precond_kda"),
}


def token(name: str, B: int, H: int, D: int) -> tuple[dict[str, Tensor], State]:
    """One token's operands [B, 1, H, ...] and the state it meets."""
    x = {n: y.detach() for n, y in operands(name, B, 1, H, D).items()}
    a = torch.rand(B, H, D, device="cuda") if "gain" in x else None
    return x, State(torch.randn(B, H, D, D, device="cuda"), a)


def ours(x: dict[str, Tensor], state: State) -> Callable[[], object]:
    one = {n: y if n == "center" else y[:, 0] for n, y in x.items()}
    precond = Preconditioner(one["forget"], one["gain"], one["center"]) if "gain" in one else None
    return lambda: step(state, one["q"], one["k"], one["v"], one["beta"], one.get("decay"), precond)


def peer(name: str, x: dict[str, Tensor], state: State) -> Callable[[], object]:
    module, function = PEERS[name]
    call = getattr(importlib.import_module(module), function)
    given = {GATES.get(n, n): y for n, y in x.items()} | {"initial_state": state.s}
    if state.a is not None:
        given["initial_A_state"] = state.a
    return lambda: call(**given, output_final_state=True, use_qk_l2norm_in_kernel=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer", choices=("fla",))
    parser.add_argument("--shape", action="append", metavar="B,H,D")
    parser.add_argument("--recurrence", action="append", choices=NAMES)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no CUDA device: the Triton kernels are timed on a GPU")
    print(f"{title()}; ms, medians")
    print(
        f"{'recurrence':12}{'B,H,D':14}{'floor':>8}{'graph':>8}{'eager':>8}"
        + (f"{'fla: graph':>12}{'eager':>8}{'ratios':>14}" if options.peer else "")
    )
    for shape in options.shape or ("1,8,128", "64,8,128"):
        B, H, D = (int(n) for n in shape.split(","))
        for name in options.recurrence or NAMES:
            x, state = token(name, B, H, D)
            times = [median_ms(ours(x, state), graph) for graph in (True, False)]
            line = f"{name:12}{shape:14}{8 * B * H * D * D / COPY:8.4f}{times[0]:8.4f}{times[1]:8.4f}"
            if options.peer and name in PEERS:
                theirs = [median_ms(peer(name, x, state), graph) for graph in (True, False)]
                line += f"{theirs[0]:12.4f}{theirs[1]:8.4f}{theirs[0] / times[0]:7.2f}{theirs[1] / times[1]:7.2f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
