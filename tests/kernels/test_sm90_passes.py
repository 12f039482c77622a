"""The passes round the recurrence compile for sm_90 without spills, on a machine without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent
KERNELS = {"_conv_step", "_gates", "_column_sums", "_cross_entropy", "_scaled"}
KERNELS |= {name + way for name in ("_inputs", "_norm", "_swiglu", "_channel_decay") for way in ("", "_backward")}


def test_no_spills_in_16_bits():
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"} | {"PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, HERE / "sm90_passes.py", "bfloat16"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert {row["kernel"] for row in rows} == KERNELS
    assert not [row for row in rows if row["spilled"]]
    wrong = [row for row in rows if row["unordered"]]
    assert not wrong, wrong
