"""The journal: what is written when, what is cut on resume, judged by TensorBoard's own reader."""

from __future__ import annotations

import json
import logging
import math
import resource
import signal

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pdn_train.checkpoint import Progress
from pdn_train.metrics import Journal, NonfiniteError, Pace, cut_back
from pdn_train.outcome import Outcome
from pdn_train.rundir import RunDir, RunDirError
from pdn_train.saving import Published
from pdn_train.world import World


def outcome(loss: float, skipped: bool = False) -> Outcome:
    return Outcome(torch.tensor(loss, dtype=torch.float64), torch.tensor(2.0), torch.tensor(float(skipped)))


@pytest.fixture
def run_dir(tmp_path):
    made = RunDir(tmp_path)
    made.create()
    return made


START = Progress()


def journal(run_dir: RunDir, start: Progress = START, every: int = 1, rank: int = 0, max_nonfinite: int = 3, steps: int = 1000) -> Journal:
    world = World(rank, rank, 2, 1, torch.device("cpu"))
    return Journal(run_dir, world, start, Pace(64, 1e6, 1e12), steps, every, max_nonfinite)


def drive(book: Journal, first: int, last: int, value: float) -> None:
    for step in range(first, last + 1):
        book.add(Progress(step, step * 4, step * 64), 1e-3, outcome(value + step))


def lines(run_dir: RunDir) -> list[dict]:
    return [json.loads(line, parse_constant=pytest.fail) for line in run_dir.metrics.read_text().splitlines()]


def scalars(run_dir: RunDir, tag: str) -> list[tuple[int, float]]:
    reader = EventAccumulator(str(run_dir.tensorboard), size_guidance={"scalars": 0})
    reader.Reload()
    return [(e.step, e.value) for e in reader.Scalars(tag)]


def test_one_object_a_logged_step_with_the_contract_keys(run_dir):
    book = journal(run_dir, every=2)
    drive(book, 1, 5, 0.0)
    book.flush()
    entries = lines(run_dir)
    assert [e["step"] for e in entries] == [2, 4]
    wanted = ["step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second", "mfu", "step_seconds", "memory_gib", "skipped_steps"]
    assert list(entries[0]) == wanted
    assert (entries[1]["loss"], entries[1]["tokens"], entries[1]["lr"], entries[1]["grad_norm"]) == (4.0, 256, 1e-3, 2.0)
    assert entries[1]["mfu"] == pytest.approx(entries[1]["tokens_per_second"] * 1e6 / (1e12 * 2))


def test_the_last_step_is_always_logged(run_dir):
    book = journal(run_dir, every=10, steps=13)
    drive(book, 1, 13, 0.0)
    book.flush()
    assert [e["step"] for e in lines(run_dir)] == [10, 13]


def test_only_rank_0_writes(run_dir):
    book = journal(run_dir, rank=1)
    drive(book, 1, 3, 0.0)
    book.flush()
    assert not run_dir.metrics.exists() and not list(run_dir.tensorboard.iterdir())


def test_skips_are_counted_and_fatal_in_a_row(run_dir):
    book = journal(run_dir, max_nonfinite=2)
    for step, bad in enumerate([True, False, True], 1):
        book.add(Progress(step, step, step), 1e-3, outcome(math.nan if bad else 1.0, bad))
    now = book.flush()
    assert (now.skipped_steps, now.skipped_in_row) == (2, 1)
    book.add(Progress(4, 4, 4), 1e-3, outcome(math.nan, True))
    with pytest.raises(NonfiniteError, match="steps 3 to 4"):
        book.flush()


def test_skips_go_on_from_the_checkpoint(run_dir):
    book = journal(run_dir, start=Progress(10, 40, 640, skipped_steps=5, skipped_in_row=1), max_nonfinite=2)
    book.add(Progress(11, 44, 704), 1e-3, outcome(1.0, True))
    with pytest.raises(NonfiniteError, match="steps 10 to 11"):
        book.flush()


def test_after_a_resume_there_is_one_value_per_tag_and_step(run_dir):
    """Steps to 149, killed mid-write; resumed at 100, run to 160: one value a step, from the resumed run past 100."""
    drive(first := journal(run_dir), 1, 149, 0.0)
    first.flush()
    with run_dir.metrics.open("a") as file:
        file.write('{"step": 150, "tok')
    event_file = next(run_dir.tensorboard.iterdir())
    event_file.write_bytes(event_file.read_bytes()[:-7])
    cut_back(run_dir, 100)
    drive(second := journal(run_dir, start=Progress(100)), 101, 160, 1000.0)
    second.flush()
    wanted = [(s, float(s)) for s in range(1, 101)] + [(s, 1000.0 + s) for s in range(101, 161)]
    assert [(e["step"], e["loss"]) for e in lines(run_dir)] == wanted
    assert scalars(run_dir, "train/loss") == wanted
    assert {len(scalars(run_dir, f"train/{key}")) for key in ("lr", "grad_norm", "tokens", "tokens_per_second")} == {160}


def test_every_logged_step_is_on_disk_without_closing(run_dir):
    book = journal(run_dir)
    drive(book, 1, 8, 0.0)  # step 8 waits on the device
    assert [s for s, _ in scalars(run_dir, "train/loss")] == list(range(1, 8))


def test_validation_has_its_own_file_and_is_cut_too(run_dir):
    book = journal(run_dir)
    for step in (10, 20):
        book.validation(Progress(step, step, step), 3.0, 64, {"mqar": {"accuracy": 0.5, "lengths": {"32": 0.25}}})
    cut_back(run_dir, 10)
    assert [json.loads(line)["step"] for line in run_dir.validation.read_text().splitlines()] == [10]
    assert scalars(run_dir, "validation/loss") == [(10, 3.0)]
    assert scalars(run_dir, "validation/mqar/accuracy") == [(10, 0.5)] and scalars(run_dir, "validation/mqar/lengths/32") == [(10, 0.25)]


def test_what_is_no_entry_is_cut_away(run_dir):
    whole = b'{"step": 1, "loss": 2.0}\n'
    run_dir.metrics.write_bytes(whole + b'{"a": 1}\n[1]\n{"step": true}\n{"step": 2, "lo\xff\n')
    (run_dir.tensorboard / "events.out.tfevents.d").mkdir()
    (run_dir.tensorboard / "events.out.tfevents.f").write_bytes(b"\xff" * 30)
    cut_back(run_dir, 10)
    assert run_dir.metrics.read_bytes() == whole


def test_a_folder_in_the_place_of_a_file_is_named(run_dir):
    run_dir.metrics.mkdir()
    with pytest.raises(RunDirError, match=f"run_dir={run_dir.path} cannot be written"):
        cut_back(run_dir, 10)


def test_a_full_disk_costs_entries_and_leaves_no_part_of_one(run_dir, caplog):
    """Python's limit on a file's size stands for the disk's."""
    drive(book := journal(run_dir), 1, 3, 0.0)  # step 3 waits on the device
    size, limit = run_dir.metrics.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    event_size = next(run_dir.tensorboard.iterdir()).stat().st_size
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, limit[1]))
    try:
        drive(book, 4, 6, 0.0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (event_size + 5, limit[1]))
        book.checkpoint(Published(5, 1.0, 2.0, 10**9))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert run_dir.metrics.stat().st_size == size
    with run_dir.metrics.open("a") as file:
        file.write('{"step": 3, "lo')  # of a disk that says so late
    drive(book, 7, 9, 0.0)
    assert [e["step"] for e in lines(run_dir)] == [1, 2, 6, 7, 8]
    assert scalars(run_dir, "train/loss") == [(step, float(step)) for step in (1, 2, 6, 7, 8)]
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 2 and "step 3 could not be written" in said[0] and said[1] == "entries are written again, from step 6 on"


def test_what_is_not_finite_is_null(run_dir):
    """Strict JSON has no word for it; TensorBoard has."""
    book = journal(run_dir, max_nonfinite=9)
    book.add(Progress(1, 1, 1), 1e-3, outcome(math.nan, True))
    book.flush()
    book.validation(Progress(1, 1, 1), math.inf, 64, {"mqar": {"accuracy": math.nan}})
    assert (lines(run_dir)[0]["loss"], lines(run_dir)[0]["grad_norm"]) == (None, 2.0)
    told = json.loads(run_dir.validation.read_text(), parse_constant=pytest.fail)
    assert (told["loss"], told["tasks"]) == (None, {"mqar": {"accuracy": None}})
    assert math.isnan(scalars(run_dir, "train/loss")[0][1])
