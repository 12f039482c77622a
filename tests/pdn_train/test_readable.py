"""What a dry run says of the data is what would stop the run, and where that has nothing to read yet."""

import pytest

from pdn_train.config import build
from pdn_train.readable import data_faults, open_all, tell_faults
from pdn_train.shards import ShardError

VOCABULARY = "was made with a tokenizer of 512 pieces, the model has model.vocab_size=300; set model.vocab_size to at least 512"


def faults(shards, vocabulary: int = 512, every: int = 1, **data) -> tuple[list[str], list[str]]:
    data = {"path": str(shards), "val_path": str(shards / "val"), "seq_len": 64, **data}
    config = build({"run_dir": "r", "model": {"vocab_size": vocabulary}, "data": data, "eval": {"every": every}}, "x")
    found = data_faults(config)
    if any(found):
        with pytest.raises(ShardError):
            open_all(config)
    else:
        open_all(config)
    return found


def test_a_run_that_would_start_has_none(tiny_shards):
    assert faults(tiny_shards) == ([], [])
    assert faults(tiny_shards, val_path="nope", every=0) == ([], [])  # never opened
    mqar = {"run_dir": "r", "data": {"mqar_pairs": 2}}
    assert data_faults(build(mqar, "x")) == ([], [])


def test_every_folder_has_its_own_fault(tiny_shards):
    assert faults(tiny_shards, 300) == ([], [f"{tiny_shards} {VOCABULARY}", f"{tiny_shards}/val {VOCABULARY}"])
    missing, wrong = faults(tiny_shards, 300, path={str(tiny_shards): 1.0, "nope": 1.0}, every=0)
    assert wrong == [f"{tiny_shards} {VOCABULARY}"]
    assert missing == ["nope is not a folder: name one made by `python -m data_prep.prepare`"]


def test_what_may_not_be_read_is_no_data_to_come(tiny_shards, monkeypatch):
    def refuse(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.read_text", refuse)
    monkeypatch.setattr("pathlib.Path.exists", refuse)
    missing, (fault, _) = faults(tiny_shards)
    assert missing == [] and fault == f"cannot read {tiny_shards}/manifest.json: Permission denied"


def test_faults_of_all_folders_together(tiny_shards, make_shards, tmp_path):
    other = make_shards(tmp_path / "other", [list(range(3, 100))] * 3)
    missing, (fault,) = faults(tiny_shards, val_path=str(other))
    assert missing == [] and "different tokenizers" in fault
    missing, (fault,) = faults(tiny_shards, path={str(tiny_shards): 1.0, str(tiny_shards / "val"): 1e-9})
    assert missing == [] and "the weight 1e-09" in fault


def test_what_is_missing_may_still_come_and_what_is_there_must_fit(capsys):
    assert tell_faults(["nope is not a folder"], []) == 0
    assert capsys.readouterr() == ("the run would stop here for want of its data: nope is not a folder\n", "")
    assert tell_faults(["nope"], ["x", "y"]) == 2 and capsys.readouterr().err == "error: x\nerror: y\n"
    assert tell_faults([], []) == 0 and capsys.readouterr() == ("", "")
