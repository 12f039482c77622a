"""The bench of checkpoints, on a tiny model on the CPU: what it says of each save, and that it leaves nothing behind."""

import re

import pytest

from pdn_train import bench_checkpoint
from pdn_train.bench import Training
from pdn_train.saving import Checkpoints

FILE = """
run_dir: unused
model: {recurrence: pgdn, hidden_size: 32, num_layers: 1, num_heads: 2, head_dim: 16, intermediate_size: 48, vocab_size: 64}
data: {path: /no/such/folder, seq_len: 32}
train: {micro_batch: 2, global_batch: 256, precision: fp32, device: cpu}
"""


@pytest.fixture
def command(tmp_path):
    (tmp_path / "tiny.yaml").write_text(FILE)
    (tmp_path / "disk").mkdir()
    return [str(tmp_path / "tiny.yaml"), "--folder", str(tmp_path / "disk"), "--steps", "2", "--warmup", "1"]


def test_it_says_what_two_saves_cost_and_removes_them(command, tmp_path, monkeypatch, capsys):
    """The stall is that of the save's own call, and steps are taken between it and the publication."""
    taken, saved = [], []
    step, save = Training.step, Checkpoints.save
    monkeypatch.setattr(Training, "step", lambda self: (taken.append(1), step(self))[1])

    def noted(checkpoints, *arguments):
        saved.append(len(taken))
        save(checkpoints, *arguments)

    monkeypatch.setattr(Checkpoints, "save", noted)
    assert bench_checkpoint.main(command) == 0
    said = capsys.readouterr().out
    found = re.findall(r"save (\d): training stood still for (\S+) s; published after (\S+) s, \S+ GB\n.*\((\d+) steps, the longest", said)
    assert [number for number, *_ in found] == ["1", "2"]
    rounding = 0.05  # seconds: the publication is told to a tenth
    assert all(float(stall) <= float(published) + rounding and int(during) > 0 for _, stall, published, during in found), said
    assert saved == [3, 3 + int(found[0][3]) + 2] and len(taken) == saved[1] + int(found[1][3])
    assert list((tmp_path / "disk").iterdir()) == []


def test_what_cannot_run_is_named_before_anything_is_made(command, tmp_path, capsys):
    assert bench_checkpoint.main([*command, "model.kernel=triton"]) == 2
    assert "model.kernel=triton needs a GPU" in capsys.readouterr().err and list((tmp_path / "disk").iterdir()) == []
