"""The table of recurrences: a preconditioner is all that sets a P variant apart (docs/paper.md, section 1), and it needs no torch."""

import subprocess
import sys
from dataclasses import replace

import pytest

from kernels.recurrence import RECURRENCES

BASELINES = ["dn", "gdn", "kda"]


@pytest.mark.parametrize("name", BASELINES)
def test_each_baseline_has_a_preconditioned_twin(name):
    """P + name is name with a preconditioner on the write key, the decay and all else the same."""
    plain = RECURRENCES[name]
    assert plain.name == name and plain.preconditioner == "none"
    assert RECURRENCES[f"p{name}"] == replace(plain, name=f"p{name}", preconditioner="atk")


def test_the_baselines_differ_in_their_decay_alone():
    assert [RECURRENCES[name].decay for name in BASELINES] == ["none", "scalar", "channel"]
    assert len({replace(RECURRENCES[name], name="", decay="none") for name in BASELINES}) == 1


def test_six_and_no_more():
    assert len(RECURRENCES) == 6


def test_importing_it_does_not_import_torch():
    code = "import sys, kernels.recurrence; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
