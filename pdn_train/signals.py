"""A wish to stop, from outside. The handlers only set a flag; the training loop asks all ranks for it at each step boundary.

SIGTERM comes from torchrun and from SLURM's cancel, SIGUSR2 is SLURM's warning before a time limit or preemption, where srun starts the
workers (torchrun itself dies of SIGUSR2).
"""

from __future__ import annotations

import signal

REQUEUE = 75  # exit code: a complete checkpoint was written, start me again (EX_TEMPFAIL)


class StopRequest:
    """Installed once, in the main thread, before anything slow; `name` is the signal's, or None."""

    def __init__(self):
        self.name: str | None = None
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.name = signal.Signals(number).name
