"""Checking shards. Judge: damage done by hand."""

import json
import os
import shutil

import numpy as np
import pytest

from data_prep import verify


@pytest.fixture
def folder(tiny_shards, tmp_path):
    return shutil.copytree(tiny_shards, tmp_path / "shards")


def test_sound_shards_pass(folder, capsys):
    assert verify.main([str(folder)]) == 0
    assert capsys.readouterr().out.count("all as recorded") == 2  # and val/


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 7), "wrong size"),
        (lambda path: os.truncate(path, path.stat().st_size - 4096), "wrong size"),
        (lambda path: _zero_end(path, 4096), "contents changed"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
@pytest.mark.parametrize("split", [".", "val"])
def test_a_damaged_shard_is_named(folder, capsys, damage, message, split):
    damage(folder / split / "000000.bin")
    assert verify.main([str(folder)]) == 1
    faults = [line for line in capsys.readouterr().err.splitlines() if message in line]
    assert len(faults) == 1 and str(folder / split / "000000.bin") in faults[0]


def _zero_end(path, size: int) -> None:
    """The right length, the last bytes zero: a copy that broke off into a file made beforehand."""
    data = path.read_bytes()
    path.write_bytes(data[:-size] + bytes(size))


def test_every_bad_file_is_named(folder, capsys):
    for name in ("000001.bin", "000003.bin"):
        ids = np.memmap(folder / name, "<u2", "r+")
        ids[10] ^= 1
        ids.flush()
    (folder / "000009.bin").write_bytes(b"")
    assert verify.main([str(folder)]) == 1
    err = capsys.readouterr().err
    assert all(name in err for name in ("000001.bin", "000003.bin", "000009.bin is not in the manifest")) and "000000.bin" not in err


def test_faults_are_counted_in_words(tmp_path, folder, capsys):
    assert verify.main([str(tmp_path / "none")]) == 1 and capsys.readouterr().err.endswith("none: 1 fault\n")
    for name in ("a.bin", "b.bin"):
        (folder / name).touch()
    assert verify.main([str(folder)]) == 1 and capsys.readouterr().err.endswith("shards: 2 faults\n")


def test_wrong_totals_and_tokenizers_are_faults(folder, capsys):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["totals"]["documents"] += 1
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "tokenizer.model").write_bytes(b"another")
    (folder / "val" / "tokenizer.model").unlink()
    assert verify.main([str(folder)]) == 1
    err = capsys.readouterr().err
    assert "totals.documents is" in err and "is not the tokenizer of these shards" in err and "val/tokenizer.model is missing" in err


def test_a_folder_without_a_manifest_fails(tmp_path, capsys):
    assert verify.main([str(tmp_path)]) == 1
    assert "no manifest.json" in capsys.readouterr().err


def test_what_may_not_be_read_is_a_fault(folder, capsys, monkeypatch):
    """Rights are those of the calls: a test may run as root, who has all."""
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert verify.main([str(folder)]) == 1
    assert "000000.bin: Permission denied; mend its rights" in capsys.readouterr().err
    monkeypatch.undo()

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    assert verify.main([str(folder)]) == 1
    assert "tokenizer.model: Permission denied" in capsys.readouterr().err
    monkeypatch.setattr("pathlib.Path.is_dir", refuse)
    monkeypatch.setattr("pathlib.Path.read_text", lambda path: refuse(path))
    assert verify.main([str(folder)]) == 1
    assert "manifest.json: Permission denied" in capsys.readouterr().err
