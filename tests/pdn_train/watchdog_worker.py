"""Run by test_watchdog.py: one rank of two that trains nothing. watchdog_worker.py FOLDER RANK HANG_SECONDS ACT

act: work (until FOLDER/go appears), raise (at step 3), hang, lock (hang while holding Python's lock), wait (for ever, as in a collective)
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path

from pdn_train import watchdog as module
from pdn_train.watchdog import Watchdog

folder, rank, hang_seconds, act = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
module.GRACE_SECONDS = 1.0
dog = Watchdog(folder, rank, 2, hang_seconds).start()


def stuck_here() -> None:
    time.sleep(600)


try:
    dog.beat("computing", 3)
    print("ready", flush=True)
    while act == "work" and not (folder / "go").exists():
        dog.beat("computing")
        time.sleep(0.05)
    if act == "raise":
        raise ValueError(f"rank {rank} has had enough")
    if act in ("hang", "wait"):
        stuck_here()
    if act == "lock":
        ctypes.PyDLL(None).sleep(600)  # a call into C that keeps Python's lock
except ValueError as error:
    dog.end("failed", error)
    sys.exit(1)
dog.end("done")
