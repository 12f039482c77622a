"""A thread that bounds how long a rank can be silent, and tells the others of a rank that failed.

The training thread says what it is doing (`beat`: two assignments, no file). The watchdog's thread writes that to this rank's file
(pdn_train.heartbeat) and ends the process, with every thread's stack on standard error, when
    - this rank has not moved for `hang_seconds`;
    - another rank has failed or hangs (first.json), and the training thread does not notice by itself within GRACE seconds;
    - a neighbour's process is gone (same machine), or its file has not changed for `hang_seconds` (another machine).
Each rank watches the next one and the one before: two small reads every few seconds whatever the size of the world. Where even this thread
cannot run, because something holds Python's lock, a timer of faulthandler, which it winds up each time, ends the process instead.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pdn_train.heartbeat import State, Word, claim_first, innermost, read_first, read_word
from pdn_train.lease import process_start
from pdn_train.signals import leave

GRACE_SECONDS = 10.0  # for the training thread to raise an error of its own, which says more than a stack
OTHERS_SECONDS = 1.0  # for the process of a killed rank to vanish after its connections have
LEAVING_SECONDS = 60.0  # from the last word to the end of the process
WAITING = ("torch/distributed/", "torch/cuda/streams.py")  # where a rank that waits for others is found
WAITING_INTERVALS = 3
log = logging.getLogger(__name__)


class Watchdog:
    """Watches one rank of `size`. Until `start`, it only keeps what it is told."""

    def __init__(self, folder: Path, rank: int, size: int, hang_seconds: float):
        """folder: of this start, see pdn_train.heartbeat."""
        self.folder, self.rank, self.size, self.hang_seconds = folder, rank, size, hang_seconds
        self._me = Word(rank, started=process_start(os.getpid()))
        # Written by the training thread, read by the other
        self._step, self._doing, self._since = self._me.step, self._me.doing, time.monotonic()
        self._beats, self._watching = 0, False
        self._interval = min(5.0, max(0.1, hang_seconds / 10))
        self._neighbours = sorted({(rank + 1) % size, (rank - 1) % size} - {rank})
        self._seen: dict[int, tuple[int, float]] = {}  # rank -> its count of beats of the thread, when that last changed
        self._ended = threading.Event()
        self._lock = threading.Lock()  # between a last word and the thread's routine ones

    def start(self) -> Watchdog:
        self._watching = True
        faulthandler.enable()  # a stack on SIGSEGV, SIGBUS and the like
        self._wind_up()
        self._word().write(self.folder)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def beat(self, doing: str, step: int | None = None) -> None:
        """Said by the training thread as it begins something; it must say the next thing within `hang_seconds`."""
        self._doing, self._since = doing, time.monotonic()
        if step is not None:
            self._step = step

    def end(self, state: State, error: BaseException | None = None, final: bool = False, told: str | None = None) -> None:
        """The last word; the first one counts. final, told: see `Word`. After it the process has LEAVING_SECONDS to end."""
        if self._ended.is_set():
            return
        word = replace(self._word(), state=state, final=final, told=told)
        if error is not None:
            trace = "".join(traceback.format_exception(error))
            word = replace(word, error=f"{type(error).__name__}: {error}", trace=trace)
        self._attempt(lambda: self._last(word))
        if self._watching:
            faulthandler.dump_traceback_later(LEAVING_SECONDS, exit=True)

    def _last(self, word: Word) -> None:
        if word.state == "failed":
            with contextlib.suppress(OSError):  # a full disk has room for the word itself, not for another file
                self._wait_for_an_earlier_fault()
                claim_first(self.folder, word)
        with self._lock:
            self._ended.set()
            word.write(self.folder)

    def _word(self) -> Word:
        return replace(self._me, step=self._step, doing=self._doing, beats=self._beats, time=time.time())

    def _wait_for_an_earlier_fault(self) -> None:
        """An error met in a collective is often the echo of another rank's end; the one who can see that end says so first."""
        deadline = time.monotonic() + (OTHERS_SECONDS if self.size > 1 else 0)
        while read_first(self.folder) is None and time.monotonic() < deadline:
            gone = self._gone()
            if gone is not None:
                claim_first(self.folder, gone)
            time.sleep(0.05)

    def _watch(self) -> None:
        while not self._ended.wait(self._interval):
            self._wind_up()
            with self._lock:
                if self._ended.is_set():
                    return
                self._beats += 1
                self._attempt(lambda: self._word().write(self.folder))
            trouble = self._trouble()
            if trouble is not None:
                self._end_process(trouble)

    def _wind_up(self) -> None:
        """The timer that ends the process, with all stacks, where this thread no longer gets to run."""
        faulthandler.dump_traceback_later(self.hang_seconds + 3 * GRACE_SECONDS, exit=True)

    def _trouble(self) -> str | None:
        """What is wrong, in a sentence; the first to see it writes first.json."""
        first = read_first(self.folder)
        if first is None:
            first = self._hangs() or self._gone() or self._silent()
            if first is not None:
                with contextlib.suppress(OSError):  # with the folder gone, each rank still ends itself
                    first = claim_first(self.folder, first)
        if first is None:
            return None
        return first.error if first.rank == self.rank else f"{first.place}, {first.at}, {first.doing}: {first.error}"

    def _hangs(self) -> Word | None:
        silent = time.monotonic() - self._since
        if silent <= self.hang_seconds:
            return None
        stack = main_stack()
        if any(part in innermost(stack) for part in WAITING) and silent <= self.hang_seconds + WAITING_INTERVALS * self._interval:
            return None  # it waits for another rank, which has the first word
        error = f"no progress for {silent:.0f} s (launch.hang_seconds={self.hang_seconds:g})"
        return replace(self._word(), state="failed", error=error, trace=stack)

    def _gone(self) -> Word | None:
        for rank in self._neighbours:
            word = read_word(self.folder, rank)
            if word is not None and word.gone:
                return replace(word, state="failed", error="the process is gone without a word: killed from outside, or out of memory")
        return None

    def _silent(self) -> Word | None:
        """By this machine's clock alone: clocks of two machines differ."""
        for rank in self._neighbours:
            word = read_word(self.folder, rank) or Word(rank, host="a node unknown", machine="", pid=0, doing="starting, not heard of yet")
            if word.state != "running":
                continue
            beats, since = self._seen.get(rank, (-1, 0.0))
            if word.beats != beats:
                self._seen[rank] = word.beats, time.monotonic()
            elif time.monotonic() - since > self.hang_seconds:
                error = f"silent for {self.hang_seconds:g} s (launch.hang_seconds): stopped, or its node is lost"
                return replace(word, state="failed", error=error)
        return None

    def _end_process(self, trouble: str) -> None:
        """Says why, and where each thread is; then the training thread has GRACE_SECONDS to fail by itself, as in a broken collective."""
        word = replace(self._word(), state="failed", error=trouble, trace=main_stack())
        log.error("rank %d: the job is ended: %s", self.rank, trouble)
        faulthandler.dump_traceback(all_threads=True)
        if self._ended.wait(min(GRACE_SECONDS, self.hang_seconds)):
            return
        self._attempt(lambda: word.write(self.folder))
        leave(1)

    def _attempt(self, act: Callable[[], None]) -> None:
        """A full disk or a folder that was removed must not stop the watch itself."""
        try:
            act()
        except OSError as error:
            log.warning("rank %d cannot write its word in %s: %s", self.rank, self.folder, error)


def main_stack() -> str:
    """The training thread's stack, outermost call first."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""
