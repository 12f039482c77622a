"""A wish to stop, from outside. The handlers only set a flag; the training loop asks all ranks for it at each step boundary.

SIGTERM comes from torchrun and from SLURM's cancel, SIGUSR2 is SLURM's warning before a time limit or preemption, where srun starts the
workers (torchrun itself dies of SIGUSR2), SIGINT is Ctrl-C. A Ctrl-C some seconds after the first no longer waits for a step boundary.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from typing import NoReturn

REQUEUE = 75  # exit code: a complete checkpoint was written, start me again (EX_TEMPFAIL)
INSIST_SECONDS = 2  # torchrun passes a Ctrl-C on that the terminal has sent to the workers already: one key press, two signals


class StopRequest:
    """Installed once, in the main thread, before anything slow; `name` is the signal's, or None."""

    def __init__(self):
        self.name: str | None = None
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        if self.name is None:
            self.name, self._since = signal.Signals(number).name, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._since > INSIST_SECONDS:
            raise KeyboardInterrupt


def leave(code: int) -> NoReturn:
    """End the process. After an error the process groups are still open, and Python's own exit would abort on their threads."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
