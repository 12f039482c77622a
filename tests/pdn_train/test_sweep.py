"""A sweep runs what is not done, resumes, says what failed; its table is the arithmetic of `statistics`; the sweeps of yaml/ are fair."""

import contextlib
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from pdn_train import config, estimate, sweep
from pdn_train.compare import compare, table
from pdn_train.config import dump
from pdn_train.signals import REQUEUE
from pdn_train.sweep import Runner

FOLDER = Path(__file__).resolve().parents[2] / "yaml"
BASE = """
run_dir: r
model: {hidden_size: 32, num_layers: 1, num_heads: 1, head_dim: 32, vocab_size: 32, intermediate_size: 32}
data: {mqar_pairs: 2, mqar_examples: 64, seq_len: 16}
optim: {warmup_steps: 0, lr: 1e-2, min_lr: 0.0}
train: {steps: 2, micro_batch: 4, global_batch: 4, precision: fp32, device: cpu}
checkpoint: {every: 2}
eval: {every: 1, samples: 8, tasks: [mqar]}
"""
SWEEP = """
base: {base}
folder: {folder}
seeds: [1, 2, 3]
settings: {{short: [data.seq_len=16], long: [data.seq_len=32]}}
variants: {{gdn: [model.recurrence=gdn], pgdn: [model.recurrence=pgdn]}}
metric: tasks/mqar/accuracy
better: higher
pairs: [[gdn, pgdn]]
"""


@pytest.fixture
def file(tmp_path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    path = tmp_path / "sweep.yaml"
    path.write_text(SWEEP.format(base=tmp_path / "base.yaml", folder=tmp_path / "runs"))
    return path


@pytest.fixture
def trained(monkeypatch) -> list:
    """Training is replaced by writing its last validation; the runs it was called for, in order."""
    called = []

    def train(self, run, slot) -> int:
        called.append(run)
        if run.variant == "pgdn" and run.seed == 3:
            with run.log.open("a") as log:
                log.write("10:00:00 I starting\n10:00:01 E rank 0: NodeError: too little memory\n10:00:02 I the end\n")
            return 1
        run.folder.mkdir(parents=True)
        accuracy = 0.1 * run.seed + (0.05 + 0.01 * run.seed if run.variant == "pgdn" else 0)
        entry = {"step": 2, "loss": 1.0, "tasks": {"mqar": {"accuracy": accuracy}}}
        (run.folder / "validation.jsonl").write_text(json.dumps({"step": 1}) + "\n" + json.dumps(entry) + "\n")
        (run.folder / "checkpoints").mkdir()
        return 0

    monkeypatch.setattr(Runner, "_train", train)
    return called


def test_it_runs_what_is_not_done_and_says_what_failed(file, tmp_path, trained, capsys):
    assert sweep.main([str(file), "--discard-checkpoints"]) == 1
    assert len(trained) == 12 and [run.seed for run in trained] == sorted(run.seed for run in trained)  # a seed of everything first
    said = capsys.readouterr().out
    assert said.count("done after") == 10 and said.count("FAILED (1), see") == 2 and "pgdn/only/seed_3.log" in said
    assert said.count(" s: 10:00:01 E rank 0: NodeError: too little memory\n") == 2
    assert not list((tmp_path / "runs").rglob("checkpoints"))
    trained.clear()
    assert sweep.main([str(file), "--jobs", "2"]) == 1
    assert {(run.variant, run.seed) for run in trained} == {("pgdn", 3)} and "2 of 12 runs to do" in capsys.readouterr().out
    trained.clear()
    assert sweep.main([str(file), "--summary"]) == 0 and trained == []
    made = json.loads((tmp_path / "runs" / "summary.json").read_text())
    pair = made["settings"]["long"]["pairs"]["gdn -> pgdn"]
    assert pair["differences"] == {"1": pytest.approx(0.06), "2": pytest.approx(0.07)} and pair["mean"] == pytest.approx(0.065)
    assert (tmp_path / "runs" / "summary.md").read_text().strip() in capsys.readouterr().out


def test_a_summary_that_cannot_be_written_is_printed(file, tmp_path, trained, capsys):
    (tmp_path / "runs" / "summary.md").mkdir(parents=True)
    assert sweep.main([str(file)]) == 2
    said = capsys.readouterr()
    assert "| gdn -> pgdn |" in said.out
    assert f"error: cannot write the summary to {tmp_path / 'runs'}: Is a directory; --summary makes it again" in said.err


@pytest.mark.parametrize("metric", ["tasks/mqar", "tasks/niah/accuracy", "perplexity"])
def test_a_metric_that_the_runs_do_not_measure(metric, file, trained, capsys):
    file.write_text(file.read_text().replace("tasks/mqar/accuracy", metric))
    assert sweep.main([str(file)]) == 2
    said = capsys.readouterr().err
    assert f"error: metric {metric} is no number" in said and "has step, loss, tasks/mqar/accuracy" in said


def test_a_last_validation_that_a_kill_cut_short_is_none(file):
    """The run resumes from its checkpoint and validates again."""
    made, runs = sweep.load(str(file), None, [])
    runs[0].folder.mkdir(parents=True)
    whole = json.dumps({"step": 2, "tasks": {"mqar": {"accuracy": 0.5}}})
    for text, wanted in ((whole + "\n", 0.5), (whole[:-3], None), ("5\n", None), ("", None)):
        (runs[0].folder / "validation.jsonl").write_text(text)
        assert sweep.value(made, runs[0]) == wanted
    (runs[0].folder / "validation.jsonl").write_bytes(whole.encode() + b"\xff")
    assert sweep.value(made, runs[0]) is None  # a resume cuts that away
    (runs[0].folder / "validation.jsonl").write_text(whole.replace("0.5", "null"))
    assert math.isnan(sweep.value(made, runs[0]))


def test_a_run_whose_value_is_not_finite_is_seen():
    """And is not the best of several choices."""
    values = {"a": {"low": {"1": math.nan, "2": 1.0}, "high": {"1": 0.1, "2": 0.2}}, "b": {"only": {"1": 0.5, "2": math.nan}}}
    found = compare(values, [["a", "b"]], "higher")
    assert found["variants"]["a"]["choice"] == "high" and math.isnan(found["variants"]["b"]["sd"])
    assert "| b | nan ± nan (2) |" in table({"metric": "m", "better": "higher", "settings": {"s": found}})


@pytest.mark.parametrize("line", ["error: model.kernel=triton needs a GPU", "10:00:01 E rank 3: WorldError: no GPU"])
def test_what_a_failed_run_says(tmp_path, line):
    """The last error of this attempt, short; nothing of an attempt before it."""
    log, before = tmp_path / "x.log", "error: of an earlier attempt\n"
    log.write_bytes(before.encode() + f"error: the first\n{line}\nTraceback\n".encode() + b"\xff\n")
    assert sweep.complaint(log, len(before)) == line
    log.write_text(before + "nothing to say\n")
    assert sweep.complaint(log, len(before)) == ""
    log.write_text("error: " + 1000 * "x")
    assert len(sweep.complaint(log, 0)) == 200


@pytest.fixture
def codes(monkeypatch) -> list:
    """Training is replaced by ending with the next of these codes, or 0; writes nothing but the log."""
    left: list = []

    def train(self, run, slot) -> int:
        code = left.pop(0) if left else 0
        with run.log.open("a") as log:
            log.write("error: no GPU\n" if code == 2 else "")
        return code

    monkeypatch.setattr(Runner, "_train", train)
    return left


def test_no_more_runs_where_the_first_to_end_cannot_run(file, codes, capsys):
    codes += [2]
    assert sweep.main([str(file)]) == 1
    said = capsys.readouterr().out
    assert said.count("FAILED (2), see") == 1 and " s: error: no GPU\n" in said and "done after" not in said
    assert said.count("no more runs are started: the first one cannot run here") == 1


def test_an_earlier_attempt_says_nothing_of_this_one(file, codes, capsys):
    codes += [2]
    assert sweep.main([str(file)]) == 1 and "error: no GPU" in capsys.readouterr().out
    codes += [1]
    assert sweep.main([str(file)]) == 1
    said = capsys.readouterr().out
    assert "FAILED (1), see" in said and "no GPU" not in said


@pytest.mark.parametrize("first", [0, 1, 75])
def test_a_later_run_that_cannot_run_stops_nothing(file, codes, capsys, first):
    codes += [first, 2]
    assert sweep.main([str(file)]) == 1
    said = capsys.readouterr().out
    assert said.count(" after ") == 12 and "no more runs" not in said


def test_runs_done_before_count_as_the_first_to_end(file, codes, capsys):
    """Otherwise a variant that cannot run would keep the rest of an interrupted sweep from running for ever."""
    _, runs = sweep.load(file, None, [])
    runs[0].folder.mkdir(parents=True)
    (runs[0].folder / "validation.jsonl").write_text(json.dumps({"step": 2, "tasks": {"mqar": {"accuracy": 1.0}}}) + "\n")
    codes += [2]
    assert sweep.main([str(file)]) == 1
    assert capsys.readouterr().out.count(" after ") == 11


def test_a_deadline_starts_nothing_more(file, trained):
    assert sweep.main([str(file), "--minutes", "0"]) == 0 and trained == []


def test_only_takes_settings_and_variants(file, trained):
    assert sweep.main([str(file), "--only", "long,gdn"]) == 0
    assert {(run.setting, run.variant) for run in trained} == {("long", "gdn")} and len(trained) == 3


def test_a_dry_run_lists_the_runs_and_starts_none(file, tmp_path, recorded, trained, capsys):
    """What stands after a run's folder makes its configuration of the base; the done one is named, others are left out by --only."""
    before = sorted(tmp_path.rglob("*"))
    assert sweep.main([str(file), "--dry-run", "--only", "short", "--set", "data.path=null"]) == 0
    assert trained == [] and sorted(tmp_path.rglob("*")) == before
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"5 of 6 runs to do, each `python -m pdn_train.train {tmp_path / 'base.yaml'}`")
    _, runs = sweep.load(file, None, ["data.path=null"])
    short = [run for run in runs if run.setting == "short"]
    for line, run in zip(lines, short, strict=True):
        state, seed, folder, overrides = line.split("  ")
        assert (state, seed, folder) == ("done" if run.folder == recorded else "to do", f"seed {run.seed}", str(run.folder))
        assert config.load(tmp_path / "base.yaml", shlex.split(overrides)) == run.settings


def test_every_run_has_its_seed_its_folder_and_its_overrides(file, tmp_path):
    loaded, runs = sweep.load(file, None, ["optim.lr=0.5"])
    settings = [run.settings for run in runs]
    assert len({s.run_dir for s in settings}) == 12 and all(s.optim.lr == 0.5 for s in settings)
    assert all(s.train.seed == s.data.seed == run.seed for s, run in zip(settings, runs, strict=True))
    assert {(run.setting, s.data.seq_len) for s, run in zip(settings, runs, strict=True)} == {("short", 16), ("long", 32)}


def test_a_run_is_trained_for_real(file, tmp_path):
    """One run through the trainer's own command; its result is the accuracy it wrote."""
    file.write_text(file.read_text().replace("[1, 2, 3]", "[1]"))
    assert sweep.main([str(file), "--only", "short,pgdn", "--set", "train.steps=1", "--set", "checkpoint.every=1", "--minutes", "5"]) == 0
    lines = (tmp_path / "runs/short/pgdn/only/seed_1/validation.jsonl").read_text().splitlines()
    made = json.loads((tmp_path / "runs/summary.json").read_text())
    accuracy = json.loads(lines[-1])["tasks"]["mqar"]["accuracy"]
    assert made["settings"]["short"]["variants"]["pgdn"]["values"]["1"] == accuracy


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_its_runs_with_a_checkpoint(file, tmp_path, number):
    """To the sweep alone: its run stops and no other starts. The same command goes on from there."""
    more = ["--set", "train.steps=100000", "--set", "checkpoint.every=100000", "--set", "eval.every=100000", "--set", "log.every=1"]
    command = [sys.executable, "-m", "pdn_train.sweep", str(file), "--only", "short", *more]
    heard = partial(signal.signal, number, signal.SIG_DFL)  # these tests may themselves run in the background of a shell
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heard)
    first = tmp_path / "runs/short/gdn/only/seed_1"
    try:
        wait_for(lambda: (first / "metrics.jsonl").exists() and (first / "metrics.jsonl").read_text().count("\n") > 2)
        process.send_signal(number)
        said, _ = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == REQUEUE and f"{first}: stopped after" in said and said.count(" after ") == 1
    assert list((first / "checkpoints").iterdir()) and not first.with_name("seed_2").exists()


def wait_for(true, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def recorded(file, tmp_path) -> Path:
    """One done run, with the record that a trainer leaves; the run's folder."""
    _, runs = sweep.load(file, None, [])
    folder = runs[0].folder
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump(runs[0].settings))
    (folder / "validation.jsonl").write_text(json.dumps({"step": 2, "tasks": {"mqar": {"accuracy": 0.5}}}) + "\n")
    return folder


@pytest.mark.parametrize("more", [[], ["--summary"], ["--only", "pgdn"]])
def test_results_under_other_settings_are_neither_counted_nor_trained_over(file, recorded, trained, capsys, more):
    """For a changed base and for --set; nothing is written."""
    base = file.with_name("base.yaml")
    base.write_text(base.read_text().replace("steps: 2", "steps: 4"))
    assert sweep.main([str(file), "--set", "optim.lr=0.5", *more]) == 2 and trained == []
    said = capsys.readouterr().err
    assert f"error: {recorded} holds results under other settings: optim.lr: 0.01 then, 0.5 now; train.steps: 2 then, 4 now. " in said
    assert "another --folder" in said and "'resume.allow=[optim.lr, train.steps]'" in said
    assert sorted(p.name for p in recorded.iterdir()) == ["config.yaml", "validation.jsonl"]
    assert not (file.parent / "runs" / "summary.json").exists()


@pytest.mark.parametrize(
    "extra",
    [
        [],
        ["train.micro_batch=2", "train.device=auto", "checkpoint.every=1", "parallel.zero=2", "eval.every=2"],
        ["train.seed=7"],  # the sweep's own comes after it
        ["optim.lr=0.5", "data.mqar_examples=32", "resume.allow=[optim.lr, data.mqar_examples]"],
    ],
)
def test_what_decides_nothing_or_is_allowed_may_differ(file, recorded, trained, extra):
    arguments = [part for item in extra for part in ("--set", item)]
    assert sweep.main([str(file), *arguments]) == 1 and len(trained) == 11  # all but the done one; pgdn's seed 3 fails


def test_a_record_without_newer_keys_and_with_older_ones(file, recorded, trained, capsys):
    """What the file lacks did what its default does; a key that there no longer is decides nothing."""
    record = recorded / "config.yaml"
    text = record.read_text()
    assert "  decay_all: false\n" in text and "  betas:\n" in text
    record.write_text(text.replace("  decay_all: false\n", "  decay_some: 1\n").replace("init_from: null\n", ""))
    assert sweep.main([str(file), "--summary"]) == 0
    assert sweep.main([str(file), "--summary", "--set", "optim.decay_all=true"]) == 2
    assert "optim.decay_all: False then, True now" in capsys.readouterr().err


def test_a_run_without_validations_is_the_trainer_s_to_judge(file, recorded, trained):
    (recorded / "validation.jsonl").write_text("")
    assert sweep.main([str(file), "--set", "optim.lr=0.5", "--minutes", "0"]) == 0


def test_the_configuration_of_one_run_is_named_as_that(tmp_path, capsys):
    base = tmp_path / "base.yaml"
    base.write_text(BASE)
    assert sweep.main([str(base), "--summary"]) == 2
    assert capsys.readouterr().err == (
        f"error: {base} is the configuration of one run, for `python -m pdn_train.train {base}`: it has run_dir, model, data, optim, "
        "train, checkpoint, eval, and not the base, folder, seeds, variants of a sweep\n"
    )


def test_a_summary_of_nothing_is_refused(file, tmp_path, capsys):
    none = tmp_path / "runs" / "none"
    assert sweep.main([str(file), "--summary", "--folder", str(none)]) == 2 and not none.exists()
    assert capsys.readouterr().err.startswith(f"error: {none} is not a folder: nothing of this sweep has run there")
    none.mkdir(parents=True)
    assert sweep.main([str(file), "--summary", "--folder", str(none)]) == 0


def test_missing_and_unknown_keys_are_one_line(file, capsys):
    """Nothing is like train; a long value is cut."""
    file.write_text(file.read_text().replace("variants:", "variant:").replace("folder:", "train: 5  #"))
    assert sweep.main([str(file), "--summary"]) == 2
    expected = "folder is missing; variants is missing; unknown key 'train' (value 5); unknown key 'variant' (value {'gdn': ['model"
    said = capsys.readouterr().err
    assert said.startswith(f"error: {file}: {expected}") and said.endswith("...); did you mean 'variants'?\n")
    assert sweep.main([str(file.with_name("sweeps.yaml"))]) == 2
    assert capsys.readouterr().err == f"error: the sweep {file.with_name('sweeps.yaml')} does not exist; did you mean {file}?\n"
    file.write_bytes(b"\xff")
    assert sweep.main([str(file), "--summary"]) == 2 and "cannot read the sweep" in capsys.readouterr().err


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("pairs: [[gdn, pgdn]]", "pairs: [[gdn, kda]]", "is not two of the variants gdn, pgdn"),
        ("better: higher", "better: more", "better"),
        ("seeds: [1, 2, 3]", "seeds: []", "seeds"),
        ("seeds: [1, 2, 3]", "seeds: [1, 2, 1]", "seeds=[1, 2, 1] names one twice"),
        ("{gdn:", "{a/b: [], gdn:", "variants has the name 'a/b'"),
        ("{short:", "{..: [], short:", "settings has the name '..'"),
        ("data.seq_len=16", "train.steps=3, eval.every=2", "eval.every=2 must divide train.steps=3"),
        ("data.seq_len=16", "data.seqlen=16", "unknown key 'data.seqlen'"),
        ("data.seq_len=16", "train.micro_batch=3", "short/gdn/only/seed_1: train.global_batch=4 is not a multiple"),
    ],
)
def test_refusals(file, capsys, old, new, message):
    file.write_text(file.read_text().replace(old, new))
    assert sweep.main([str(file), "--summary"]) == 2
    assert message in capsys.readouterr().err
    assert sweep.main([str(file), "--only", "short,nothing"]) == 2


@pytest.mark.parametrize("option", [["--jobs", "0"], ["--gpus", "-1"], ["--minutes", "-1.0"], ["--minutes", "nan"]])
def test_options_out_of_range_are_refused(file, capsys, option):
    assert sweep.main([str(file), *option]) == 2
    assert f"error: {option[0]} {option[1]} is not at least" in capsys.readouterr().err


# ---- the arithmetic ----


def test_pairs_are_compared_seed_by_seed():
    """A constant gain under a large common spread: the pair's interval is narrow, and is that of Student's t."""
    first, second = {"1": 1.0, "2": 5.0, "3": 9.0}, {"3": 9.12, "1": 1.10, "2": 5.11, "4": 0.0}
    made = compare({"a": {"only": first}, "b": {"only": second}}, [["a", "b"]], "higher")
    pair, differences = made["pairs"]["a -> b"], [0.10, 0.11, 0.12]
    assert list(pair["differences"]) == ["1", "2", "3"] and pair["mean"] == pytest.approx(0.11)
    assert pair["error"] == pytest.approx(statistics.stdev(differences) / math.sqrt(3))
    assert pair["high"] - pair["mean"] == pytest.approx(4.303 * pair["error"]) and pair["low"] > 0
    assert made["variants"]["a"]["sd"] == pytest.approx(4.0)


def test_the_best_choice_counts_and_seeds_come_first():
    choices = {"low": {"1": 0.5, "2": 0.6}, "high": {"1": 0.7, "2": 0.8}, "lucky": {"1": 0.99}}
    assert compare({"a": {"x": choices["low"], **choices}}, [], "higher")["variants"]["a"]["choice"] == "high"
    assert compare({"a": choices}, [], "lower")["variants"]["a"]["choice"] == "low"


def test_the_table_says_better_only_where_the_interval_leaves_zero_out():
    sure = compare(
        {"a": {"only": {"1": 2.0, "2": 2.1}}, "b": {"only": {"1": 1.0, "2": 1.1}}, "c": {"only": {"1": 2.0}}}, [["a", "b"]], "lower"
    )
    unsure = compare({"a": {"only": {"1": 2.0, "2": 2.1}}, "b": {"only": {"1": 1.0, "2": 2.0}}}, [["a", "b"]], "lower")
    text = table({"metric": "loss", "better": "lower", "settings": {"x": sure, "y": unsure}})
    row = next(line for line in text.splitlines() if line.startswith("| a -> b"))
    assert "better" in row.split("|")[2] and "better" not in row.split("|")[3] and "worse" not in row
    assert "| c | 2.0000 (1) | - |" in text and "| a | 2.0500 ± 0.0707 (2) |" in text


# ---- the sweeps of this project ----


@pytest.mark.parametrize("name", ["sweep_mqar", "sweep_mqar_short", "sweep_small", "sweep_ablations"])
def test_compared_runs_differ_in_the_model_only(name):
    """At one seed and setting: the same data, order, schedule and steps. The first comment has the command."""
    path = FOLDER / f"{name}.yaml"
    assert f"python -m pdn_train.sweep yaml/{name}.yaml" in path.read_text()
    loaded, runs = sweep.load(path, None, [])
    assert len(loaded.seeds) >= 3 and loaded.pairs
    trees: dict = {}
    for run in (run for run in runs if run.seed == loaded.seeds[0]):
        tree = run.settings.model_dump()
        del tree["run_dir"], tree["model"]
        assert trees.setdefault(run.setting, tree) == tree
    models = {run.variant: run.settings.model for run in runs}
    assert len({str(m) for m in models.values()}) == len(models)


def test_mqar_takes_the_lengths_of_both_cuts_at_equal_tokens():
    loaded, runs = sweep.load(FOLDER / "sweep_mqar.yaml", None, [])
    seen = {(s.data.mqar_pairs, s.data.seq_len) for s in (run.settings for run in runs)}
    assert {(64, 256), (64, 512), (64, 1024), (64, 2048), (32, 256), (128, 1024), (256, 2048)} == seen
    assert all(s.train.global_batch * s.data.seq_len == 65_536 for s in (run.settings for run in runs))


def test_small_models_are_of_one_size():
    loaded, runs = sweep.load(FOLDER / "sweep_small.yaml", None, [])
    sizes = {run.variant: estimate.parameters(run.settings.model) for run in runs}
    assert set(sizes) == {"dn", "pdn", "gdn", "pgdn", "kda", "pkda"} and all(20e6 < n < 60e6 for n in sizes.values())
    assert max(sizes.values()) / min(sizes.values()) < 1.04
