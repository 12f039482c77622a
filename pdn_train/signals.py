"""A wish to stop, from outside. The handlers only set a flag; the training loop asks all ranks for it at each step boundary.

SIGTERM comes from torchrun and from SLURM's cancel, SIGUSR2 is SLURM's warning before a time limit or preemption, where srun starts the
workers (torchrun itself dies of SIGUSR2), SIGHUP is a terminal that closes (under nohup it stays ignored), SIGINT is Ctrl-C. A Ctrl-C some
seconds after the first no longer waits for a step boundary. Standard library only: programs listen before they import torch.
"""

from __future__ import annotations

import contextlib
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
        self._terminals = [stream for stream in (1, 2) if os.isatty(stream)]
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            signal.signal(number, self._note)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._note)

    def _note(self, number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            self._let_go_of_the_terminal()
        if self.name is None:
            self.name, self._since = signal.Signals(number).name, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._since > INSIST_SECONDS:
            raise KeyboardInterrupt

    def _let_go_of_the_terminal(self) -> None:
        """Writing to one that is gone fails, and would end the process in the middle of its last save."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in self._terminals:
            os.dup2(nowhere, stream)
        os.close(nowhere)


def leave(code: int) -> NoReturn:
    """End the process. After an error the process groups are still open, and Python's own exit would abort on their threads."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader of a pipe may be gone; the code is still to be heard
            stream.flush()
    os._exit(code)
