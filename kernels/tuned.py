"""Block sizes of the Triton stages: a dated table, no tuning at run time.

A row is found by stage, by the size of the inputs' elements, by the key channels of a head, which decide what fits into shared memory and
registers, and for the scans by the number of programs that would each have all value channels. The first row that fits is taken; the
last ones of a stage fit everything.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Setting(NamedTuple):
    block: int  # value channels a program handles, at most; of the solve: key channels. 0: the stage has all
    warps: int
    stages: int
    registers: int | None = None  # a thread, at most: fewer, and more programs share a multiprocessor


class Row(NamedTuple):
    itemsize: int  # bytes of an element of q, k, v
    key: int  # channels, at most
    programs: int  # at most
    setting: Setting


ANY = 1 << 40

# 2 bytes, up to 128 channels: measured on one H200, Triton 3.6.0, 2026-11-30, the statistic 2026-12-01 (LOG.md). The others:
# compiled, not timed.
TABLE: dict[str, tuple[Row, ...]] = {
    "solve": (Row(2, ANY, ANY, Setting(64, 4, 1, 168)), Row(4, ANY, ANY, Setting(32, 4, 1))),
    "solve_channel": (Row(2, ANY, ANY, Setting(64, 4, 1)), Row(4, ANY, ANY, Setting(32, 4, 1))),
    "scan": (
        Row(2, 128, ANY, Setting(128, 8, 2)),
        Row(2, ANY, ANY, Setting(32, 8, 1)),
        Row(4, 128, ANY, Setting(16, 4, 1)),
        Row(4, ANY, ANY, Setting(16, 8, 1)),
    ),
    "states": (
        Row(2, 128, ANY, Setting(128, 8, 3)),
        Row(2, ANY, ANY, Setting(32, 8, 1)),
        Row(4, 128, ANY, Setting(16, 4, 1)),
        Row(4, ANY, ANY, Setting(16, 8, 1)),
    ),
    "scan_backward": (
        Row(2, 128, ANY, Setting(128, 8, 2)),
        Row(2, ANY, ANY, Setting(32, 8, 1)),
        Row(4, 128, ANY, Setting(16, 4, 1)),
        Row(4, ANY, ANY, Setting(16, 8, 1)),
    ),
    "pairs": (Row(2, ANY, ANY, Setting(64, 4, 1)), Row(4, ANY, ANY, Setting(32, 4, 1))),
    "gradients": (Row(2, ANY, ANY, Setting(64, 4, 1)), Row(4, ANY, ANY, Setting(32, 4, 1))),
    "gradients_channel": (Row(2, ANY, ANY, Setting(64, 4, 1)), Row(4, ANY, ANY, Setting(16, 4, 1))),
    "statistic_sums": (Row(2, ANY, ANY, Setting(0, 1, 1)), Row(4, ANY, ANY, Setting(0, 1, 1))),
    "statistic_keys": (Row(2, 128, ANY, Setting(0, 1, 1, 144)), Row(2, ANY, ANY, Setting(0, 1, 1)), Row(4, ANY, ANY, Setting(0, 1, 1))),
}


def setting(stage: str, k: Tensor, programs: int = 0) -> Setting:
    """The setting of a stage for keys k [..., K]."""
    itemsize, key = k.element_size(), k.shape[-1]
    for row in TABLE[stage]:
        if itemsize == row.itemsize and key <= row.key and programs <= row.programs:
            return row.setting
    raise KeyError(f"no row of {stage} fits {key} channels of {itemsize} bytes and {programs} programs: the last rows must fit all")
