"""Block sizes of the Triton stages: a dated table, no tuning at run time.

A row is found by stage, by the bytes of one row of the key, which decide what fits into shared memory and registers, and for the scans by
the number of programs that would each have all value channels. The last row of a stage is its default.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Setting(NamedTuple):
    block: int  # value channels a program handles, at most
    warps: int
    stages: int


class Row(NamedTuple):
    row_bytes: int  # of a key of one head, at most
    programs: int  # at most
    setting: Setting


ANY = 1 << 40

# Guesses, not yet measured
TABLE: dict[str, tuple[Row, ...]] = {
    "statistic": (Row(256, ANY, Setting(64, 4, 1)), Row(ANY, ANY, Setting(32, 8, 1))),
    "solve": (Row(256, ANY, Setting(64, 4, 1)), Row(ANY, ANY, Setting(32, 8, 1))),
    "scan": (Row(256, ANY, Setting(64, 4, 1)), Row(512, ANY, Setting(32, 4, 1)), Row(ANY, ANY, Setting(16, 4, 1))),
    "states": (Row(256, ANY, Setting(64, 4, 1)), Row(512, ANY, Setting(32, 4, 1)), Row(ANY, ANY, Setting(16, 4, 1))),
    "scan_backward": (Row(256, ANY, Setting(64, 4, 1)), Row(512, ANY, Setting(32, 4, 1)), Row(ANY, ANY, Setting(16, 4, 1))),
    "gradients": (Row(256, ANY, Setting(128, 8, 1)), Row(512, ANY, Setting(64, 8, 1)), Row(ANY, ANY, Setting(32, 8, 1))),
    "statistic_backward": (Row(256, ANY, Setting(64, 4, 1)), Row(ANY, ANY, Setting(32, 8, 1))),
}


def setting(stage: str, k: Tensor, programs: int = 0) -> Setting:
    """The setting of a stage for keys k [..., K]."""
    width = k.shape[-1] * k.element_size()
    for row in TABLE[stage]:
        if width <= row.row_bytes and programs <= row.programs:
            return row.setting
    raise KeyError(f"no row of {stage} fits keys of {width} bytes and {programs} programs: the last row of a stage must fit all")
