"""The table of recurrences says of each what the paper's table says (PAPER section 1), and needs no torch."""

import subprocess
import sys

import pytest

from kernels.recurrence import RECURRENCES


@pytest.mark.parametrize(
    "name, decay, preconditioner",
    [
        ("dn", "none", "none"),
        ("gdn", "scalar", "none"),
        ("kda", "channel", "none"),
        ("pdn", "none", "atk"),
        ("pgdn", "scalar", "atk"),
        ("pkda", "channel", "atk"),
    ],
)
def test_table(name, decay, preconditioner):
    recurrence = RECURRENCES[name]
    assert (recurrence.name, recurrence.decay, recurrence.preconditioner) == (name, decay, preconditioner)
    assert (recurrence.gain, recurrence.solve) == ("beta", "online")


def test_six_and_no_more():
    assert len(RECURRENCES) == 6


def test_importing_it_does_not_import_torch():
    code = "import sys, kernels.recurrence; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
