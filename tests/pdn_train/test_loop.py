"""How the loop ends by an error; what it does in whole runs is tested in test_train."""

from __future__ import annotations

import pytest

from pdn_train.loop import finished_at
from pdn_train.metrics import NonfiniteError
from pdn_train.saving import WriteError


class Failing:
    """Checkpoints of which the one that is being written cannot be."""

    def finish(self) -> None:
        raise WriteError("no room")


def test_an_error_that_all_ranks_meet_is_not_hidden_by_a_write_that_failed(caplog):
    with pytest.raises(NonfiniteError, match="in a row"), finished_at(NonfiniteError, Failing()):
        raise NonfiniteError("in a row")
    assert "WriteError: no room" in caplog.text
