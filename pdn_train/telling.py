"""What commands tell on a terminal: numbers with their nouns, how far a long task is, and no traceback where nobody reads on."""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import sys
import time
from collections.abc import Callable

EVERY_SECONDS = 10.0
UNREAD = 128 + signal.SIGPIPE  # the exit code that a shell gives a command which such a pipe has ended
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """1 shard, 2 shards, 1,000 shards. plural: None where it only takes an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def sized(size: float) -> str:
    """Bytes as 52.3 MB, or from 10^9 on as 1.0 GB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


class Tally:
    """How far a long task is: a line when it begins, with its size, then at most one every EVERY_SECONDS."""

    def __init__(self, task: str, total: int, noun: str, what: str, tell: Callable[[str], object]) -> None:
        """what: after the noun in the first line, such as "of 512 tokens"."""
        self._task, self._total, self._noun, self._tell = task, total, noun, tell
        self._done, self._began = 0, time.monotonic()
        self._told = self._began
        tell(f"{task}: {counted(total, noun)} {what}")

    def add(self, number: int) -> None:
        """So many more are done."""
        self._done += number
        now = time.monotonic()
        if now - self._told >= EVERY_SECONDS and self._done < self._total:
            self._told = now
            self._tell(f"{self._task}: {self._done:,} of {counted(self._total, self._noun)} after {now - self._began:.0f} s")


def silent(told: object) -> None:
    """In place of what would tell it."""


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def quietly(main: Callable[[], int | None]) -> int | None:
    """A command's exit code; UNREAD where it ended because the reader of its output had left (`| head -1`), 1 where a full disk did not
    take the output. A character that the terminal lacks is written as its escape."""
    _open_streams()
    try:
        return main()
    except BrokenPipeError:
        if not _unread(sys.stdout.fileno()):
            raise  # another pipe's
        return UNREAD
    except OSError as error:
        code = _no_room(error)
        _write_nowhere()  # what Python still holds would fail again
        return code
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # Python would try once more when it ends, and complain
            _write_nowhere()
        except OSError as error:
            _write_nowhere()
            sys.exit(_no_room(error))


def _open_streams() -> None:
    """A process may start with its streams closed (`>&-`), where the next file it opens would take their place."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _no_room(error: OSError) -> int:
    """The exit code, after a line that says why, where the output could not be written; raises what is about a file, which has a name."""
    if error.filename is not None or error.errno not in NO_ROOM:
        raise error
    print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
    return 1


def _write_nowhere() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unread(descriptor: int) -> bool:
    """Whether this is a pipe without a reader."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
