"""Numbers have their nouns; a command whose output nobody reads on ends without a word, one whose output has no room with a line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdn_train.telling import UNREAD, counted, sized

ROOT = Path(__file__).resolve().parents[2]


def test_one_is_singular():
    assert [counted(n, "shard") for n in (0, 1, 2, 1000)] == ["0 shards", "1 shard", "2 shards", "1,000 shards"]
    assert [counted(n, "micro-batch", "micro-batches") for n in (1, 2)] == ["1 micro-batch", "2 micro-batches"]


def test_small_sizes_are_not_0_gb():
    assert [sized(size) for size in (0, 12_345_678, 10**9, 15e9)] == ["0.0 MB", "12.3 MB", "1.0 GB", "15.0 GB"]


PROGRAM = "import sys; from pdn_train.telling import quietly; sys.exit(quietly(lambda: {act}))"


def buffered() -> dict[str, str]:
    """An environment in which Python keeps output back, as it does by itself."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def program(act: str, stdout, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", PROGRAM.format(act=act)]
    return subprocess.run(command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, env=buffered() | (env or {}))


def unread(*arguments: str) -> tuple[int, str]:
    """(exit code, stderr) of a Python whose stdout has no reader."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, env=buffered())
    os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "act, code",
    [
        ("print('x' * 10**6)", UNREAD),  # more than fits in Python's buffer
        ("print('x', flush=True)", UNREAD),
        ("print('x') or 3", 3),  # written when the command is over: its code stands
        ("print('x') or sys.exit(4)", 4),  # as argparse ends --help
    ],
)
def test_no_traceback_without_a_reader(act, code):
    assert unread("-c", PROGRAM.format(act=act)) == (code, "")


@pytest.mark.parametrize("act", ["print('x')", "print('x', flush=True)", "print('x' * 10**6)"])
def test_a_full_disk_is_said_in_a_line(act):
    with open("/dev/full", "w") as full:
        done = program(act, stdout=full)
    assert (done.returncode, done.stderr) == (1, "error: the output cannot be written: No space left on device\n")


def test_closed_streams_are_no_fault():
    command = [sys.executable, "-c", PROGRAM.format(act="print('x') or print('y', file=sys.stderr) or 3")]
    assert subprocess.run(["bash", "-c", 'exec "$@" >&- 2>&-', "bash", *command], cwd=ROOT, check=False).returncode == 3


def test_characters_that_the_terminal_lacks_are_escaped():
    done = program("print('a\u00e9')", stdout=subprocess.PIPE, env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout) == (0, "a\\xe9\n")


def test_an_error_of_a_file_is_raised():
    done = program("open('/dev/full/x')", stdout=subprocess.PIPE)
    assert done.returncode == 1 and "NotADirectoryError" in done.stderr


def test_another_pipe_s_end_is_an_error():
    program = "import sys, os; from pdn_train.telling import quietly\nr, w = os.pipe(); os.close(r); quietly(lambda: os.write(w, b'x'))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "BrokenPipeError" in done.stderr


def test_a_dry_run_of_a_sweep_can_be_cut_short():
    """Which takes an OSError for a fault of its files."""
    assert unread("-m", "pdn_train.sweep", "yaml/sweep_mqar.yaml", "--dry-run") == (UNREAD, "")
