"""Eight ranks of a node and one kernel in the job's cache, one of them hindered, the others compiling at once (triton-lang/triton#2688)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
WORKER = Path(__file__).parent / "compile_worker.py"


def start(cache, *arguments):
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, WORKER, *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


def release(rank):
    rank.stdin.write("\n")
    rank.stdin.flush()


def test_ranks_that_compile_at_once(tmp_path):
    """The hindered rank ends non-zero with its error, which ends the job (test_local.py); the others, in the cache that it left, have the
    same binary, and so has a rank that finds the cache as they left it. (It goes first: later it might find a finished cache.)"""
    ranks = [start(tmp_path, *(["busy"] if rank == 3 else [])) for rank in range(8)]
    for rank in ranks:
        assert rank.stdout.readline() == "ready\n"
    hindered = ranks.pop(3)
    said = hindered.communicate("\n", timeout=300)[1]
    assert hindered.returncode != 0 and "Device or resource busy" in said
    for rank in ranks:
        release(rank)
    said, stderr, code = zip(*((*rank.communicate(timeout=300), rank.returncode) for rank in ranks), strict=True)
    assert set(code) == {0} and len(set(said)) == 1, stderr
    last = start(tmp_path)
    assert last.stdout.readline() == "ready\n"
    assert last.communicate("\n", timeout=300)[0] == said[0] and last.returncode == 0
