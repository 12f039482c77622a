"""The figures' commands draw something from what the other commands leave."""

import json
import runpy
from pathlib import Path

import pytest

from pdn_train.config import ModelConfig
from pdn_train.export import write_weights
from pdn_train.model import LanguageModel

DOCS = Path(__file__).resolve().parents[2] / "docs"


def draw(script: str, *arguments: str) -> bytes:
    """The picture that a script of docs/ makes; its second argument is the file."""
    runpy.run_path(str(DOCS / script))["main"](*arguments)
    return Path(arguments[1]).read_bytes()


def variants(**means: float) -> dict:
    return {
        name: {"choice": "only", "values": {"1": mean - 0.1, "2": mean + 0.1}, "mean": mean, "sd": 0.14} for name, mean in means.items()
    }


def test_a_sweep_of_one_and_of_several_settings(tmp_path):
    settings = {"64x256": {"variants": variants(gdn=0.5, pgdn=0.9)}, "64x512": {"variants": variants(pgdn=0.8)}}
    (tmp_path / "summary.json").write_text(json.dumps({"metric": "loss", "settings": settings}))
    whole = draw("sweep_plot.py", str(tmp_path), str(tmp_path / "a.png"))
    parts = draw("sweep_plot.py", str(tmp_path), str(tmp_path / "b.png"), "64 pairs=64x256,64x512", "a=b=64x256")
    assert whole.startswith(b"\x89PNG") and parts.startswith(b"\x89PNG") and parts != whole
    settings["64x256"]["variants"]["gdn"] |= {"values": {"1": None, "2": 0.5}, "mean": None, "sd": None}  # a run that diverged
    (tmp_path / "summary.json").write_text(json.dumps({"metric": "loss", "settings": settings}))
    assert draw("sweep_plot.py", str(tmp_path), str(tmp_path / "d.png")).startswith(b"\x89PNG")
    assert draw("sweep_plot.py", str(tmp_path), str(tmp_path / "e.png"), "64x256=64x256").startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="'64 pairs=64x1024' has the setting '64x1024'; there are 64x256, 64x512"):
        draw("sweep_plot.py", str(tmp_path), str(tmp_path / "c.png"), "64 pairs=64x1024")


@pytest.mark.parametrize("recurrence", ["pkda", "dn"])
def test_the_recurrences_of_a_model(tmp_path, tiny_shards, recurrence):
    small = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "head_dim": 16, "intermediate_size": 32, "vocab_size": 512}
    model = LanguageModel(ModelConfig(recurrence=recurrence, **small))
    model.init_weights(0)
    (tmp_path / "out").mkdir()
    write_weights(tmp_path / "out", model.state_dict())
    tree = {"model": model.config.model_dump(), "data": {"val_path": str(tiny_shards / "val")}}
    (tmp_path / "out" / "config.yaml").write_text(json.dumps(tree))
    assert draw("health_figures.py", str(tmp_path / "out"), str(tmp_path / "a.png")).startswith(b"\x89PNG")


def test_the_losses_of_a_run(tmp_path):
    """One may not be finite, the last line may be being written, and a line may be none of the run's."""
    entries = "".join(f'{{"tokens": {n}, "loss": {loss}}}\n' for n, loss in enumerate([9, "null", 7]))
    (tmp_path / "metrics.jsonl").write_bytes(entries.encode() + b'\xff\n{"a": 1}\n{"tokens": 4, "lo')
    assert draw("loss_curve.py", str(tmp_path), str(tmp_path / "a.png")).startswith(b"\x89PNG")
    (tmp_path / "metrics.jsonl").write_text(entries)
    assert draw("loss_curve.py", str(tmp_path), str(tmp_path / "b.png")) == (tmp_path / "a.png").read_bytes()


@pytest.mark.parametrize("script", ["loss_curve.py", "sweep_plot.py", "op_times.py", "health_figures.py"])
def test_usage_without_arguments_and_a_name_for_what_is_missing(tmp_path, capsys, script):
    command = runpy.run_path(str(DOCS / script))["command"]
    with pytest.raises(SystemExit) as ended:
        command([])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith(f"usage: {script} ") and "OUT.png" in said
    none = tmp_path / "none"
    picture = str(tmp_path / "x.png")
    assert command([str(none / "x.png")] if script == "op_times.py" else [str(none), picture]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and str(none) in said.err and said.err.count("\n") == 1
    assert not (tmp_path / "x.png").exists()


def test_a_wrong_setting_or_panel_of_a_sweep_is_named(tmp_path, capsys):
    (tmp_path / "summary.json").write_text(json.dumps({"metric": "loss", "settings": {"64x256": {"variants": variants(gdn=0.5)}}}))
    command = runpy.run_path(str(DOCS / "sweep_plot.py"))["command"]
    for panel, message in (("a=64x256,no", "has the setting 'no'; there are 64x256"), ("64x256", "is not of the form TITLE=")):
        assert command([str(tmp_path), str(tmp_path / "x.png"), panel]) == 2 and message in capsys.readouterr().err
