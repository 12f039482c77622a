"""Whole runs with real processes: interrupted in every way, they end with the uninterrupted run's metrics, bit for bit.

Each run trains a tiny PGDN on Genesis; what is compared is step, tokens, loss, lr, grad_norm and skipped_steps of every step.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pdn_train import config, train

STEPS, EVERY = 14, 4
SAME = ("step", "tokens", "loss", "lr", "grad_norm", "skipped_steps")
CONFIG = """
run_dir: {run_dir}
model: {{recurrence: pgdn, hidden_size: 32, num_layers: 2, num_heads: 2, head_dim: 16, intermediate_size: 64, vocab_size: 512}}
data: {{path: {shards}, val_path: {shards}/val, seq_len: 64}}
optim: {{lr: 1e-2, min_lr: 1e-3, warmup_steps: 2}}
train: {{steps: {steps}, micro_batch: 2, global_batch: 8, precision: fp32, device: cpu}}
checkpoint: {{every: {every}, keep: 2}}
eval: {{every: 7, samples: 9}}
log: {{every: 1}}
"""


@pytest.fixture(scope="module")
def write(tiny_shards, tmp_path_factory):
    """write(name) -> a configuration file of a run with a folder of its own."""

    def act(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        text = CONFIG.format(run_dir=folder / "run", shards=tiny_shards, steps=STEPS, every=EVERY)
        (folder / "run.yaml").write_text(text)
        return folder / "run.yaml"

    return act


def start(config: Path, *overrides: str, ranks: int = 2, worker: tuple[str, ...] = ("-m", "pdn_train.train")) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", *worker, str(config), *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def start_one(config: Path, *overrides: str) -> subprocess.Popen:
    """One process without torchrun: its exit code is the worker's own."""
    command = [sys.executable, "-m", "pdn_train.train", str(config), *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def finish(process: subprocess.Popen, code: int | None = 0) -> str:
    said, _ = process.communicate(timeout=240)
    assert code is None or process.returncode == code, said
    return said


def kill(process: subprocess.Popen) -> str:
    """SIGKILL to torchrun and all its workers (each a session of its own)."""
    for worker in workers(process):
        os.kill(worker, signal.SIGKILL)
    process.kill()
    return process.communicate()[0]


def workers(process: subprocess.Popen) -> list[int]:
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in listed if "pdn_train.train" in Path(f"/proc/{pid}/cmdline").read_text()]


def run_dir(config: Path) -> Path:
    return config.parent / "run"


def metrics(config: Path) -> list[dict]:
    file = run_dir(config) / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def story(config: Path) -> list[tuple]:
    return [tuple(entry[key] for key in SAME) for entry in metrics(config)]


def wait_for(what, process: subprocess.Popen) -> None:
    deadline = time.time() + 120
    while not what():
        assert time.time() < deadline and process.poll() is None, process.communicate(timeout=30)[0]
        time.sleep(0.002)


def reach(config: Path, process: subprocess.Popen, step: int) -> None:
    def reached() -> bool:
        file = run_dir(config) / "metrics.jsonl"
        return file.exists() and file.read_text().count("\n") >= step

    wait_for(reached, process)


def checkpoints(config: Path) -> list[str]:
    return sorted(p.name for p in (run_dir(config) / "checkpoints").glob("step_*"))


@pytest.fixture(scope="module")
def whole(write):
    """The run that nothing interrupts."""
    config = write("whole")
    said = finish(start(config))
    return config, said


def test_a_run_leaves_what_the_contract_names(whole, tiny_shards):
    config, said = whole
    folder = run_dir(config)
    assert [e["step"] for e in metrics(config)] == list(range(1, STEPS + 1))
    assert metrics(config)[-1]["tokens"] == STEPS * 8 * 64
    assert metrics(config)[-1]["loss"] < metrics(config)[0]["loss"] - 0.5
    assert checkpoints(config) == ["step_0000000012", "step_0000000014"]
    assert (
        (folder / "code/pdn_train/train.py").exists() and (folder / "config.yaml").exists() and len(list((folder / "logs").iterdir())) == 2
    )
    assert (folder / "tokenizer.model").read_bytes() == (tiny_shards / "tokenizer.model").read_bytes()
    assert not (folder / "lease.json").exists()
    for part in ("no checkpoint was published", "loss", "tok/s", "ETA", "validation loss", "done"):
        assert part in said
    assert [json.loads(line)["step"] for line in (folder / "validation.jsonl").read_text().splitlines()] == [7, 14]


def test_tensorboard_has_one_value_per_tag_and_step(whole):
    reader = EventAccumulator(str(run_dir(whole[0]) / "tb"), size_guidance={"scalars": 0})
    reader.Reload()
    assert len(list((run_dir(whole[0]) / "tb").iterdir())) == 1, "one writer"
    assert [(e.step, pytest.approx(e.value)) for e in reader.Scalars("train/loss")] == [(e["step"], e["loss"]) for e in metrics(whole[0])]
    stalls, whole_writes = (reader.Scalars(f"checkpoint/{name}") for name in ("stall_seconds", "seconds"))
    assert [e.step for e in stalls] == [e.step for e in whole_writes] == [4, 8, 12, 14]
    assert all(0 < stall.value < write.value for stall, write in zip(stalls, whole_writes, strict=True))
    assert whole[1].count("training stood still for") == 4


def test_killed_at_random_steps_twice(whole, write):
    config = write("killed")
    for step in sorted(random.Random(0).sample(range(2, STEPS - 1), 2)):
        process = start(config)
        reach(config, process, step)
        kill(process)
    said = finish(start(config))
    assert "resumed at step" in said
    assert story(config) == story(whole[0])


def test_killed_during_a_save_twice(whole, write):
    config = write("saving")
    for step in (4, 8):
        process = start(config)
        wait_for((run_dir(config) / "checkpoints" / f"step_{step:010d}.tmp").exists, process)
        kill(process)
    finish(start(config))
    assert story(config) == story(whole[0])
    assert checkpoints(config) == checkpoints(whole[0])


def test_two_one_two_processes(whole, write):
    config = write("worlds")
    for ranks, stop_at in ((2, 5), (1, 9)):
        process = start(config, "train.micro_batch=1", ranks=ranks)
        reach(config, process, stop_at)
        kill(process)
    finish(start(config))
    for ours, theirs in zip(metrics(config), metrics(whole[0]), strict=True):
        assert (ours["step"], ours["tokens"], ours["lr"]) == (theirs["step"], theirs["tokens"], theirs["lr"])
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-3)


def test_two_ranks_share_every_sample_and_then_none(whole, write):
    config = write("sequence")
    process = start(config, "parallel.sequence=2")
    reach(config, process, 9)
    assert "2 x cpu, 2 ranks a sequence" in kill(process)
    assert "resumed at step 8" in finish(start(config))
    for ours, theirs in zip(metrics(config), metrics(whole[0]), strict=True):
        assert [ours[key] for key in ("step", "tokens", "lr")] == [theirs[key] for key in ("step", "tokens", "lr")]
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-3)
    ours, theirs = ([json.loads(line) for line in (run_dir(c) / "validation.jsonl").read_text().splitlines()] for c in (config, whole[0]))
    assert [v["targets"] for v in ours] == [v["targets"] for v in theirs] == [9 * 64] * 2
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], abs=1e-3)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
def test_a_signal_ends_in_one_checkpoint_and_75(write, number):
    config = write("signal")
    process = start_one(config, "train.steps=4000")
    reach(config, process, 2)
    process.send_signal(number)
    process.send_signal(number)
    said = finish(process, 75)
    step = metrics(config)[-1]["step"]
    assert f"step_{step:010d}" in checkpoints(config) and number.name in said
    assert not [name for name in checkpoints(config) if "." in name]
    assert not (run_dir(config) / "lease.json").exists()


def test_sigterm_to_torchrun_checkpoints_and_does_not_look_like_success(whole, write):
    config = write("term")
    process = start(config, "train.steps=4000", "optim.warmup_steps=2")
    reach(config, process, 2)
    process.send_signal(signal.SIGTERM)
    said = finish(process, None)
    assert process.returncode != 0
    step = metrics(config)[-1]["step"]
    assert f"stopped at step {step} by SIGTERM, nothing is lost: the same command goes on from there (torchrun adds a traceback" in said
    assert f"step_{step:010d}" in checkpoints(config)


def test_a_killed_rank_fails_the_run(write):
    config = write("rank")
    process = start(config, "train.steps=4000")
    reach(config, process, 3)
    os.kill(workers(process)[1], signal.SIGKILL)
    said = finish(process, None)
    assert process.returncode != 0 and "SIGKILL" in said


def test_a_rank_that_raises_fails_the_run_and_is_heard(write):
    said = finish(start(write("raises"), worker=(str(Path(__file__).with_name("failing_worker.py")),)), 1)
    assert "rank 1 has had enough" in said and "Traceback" in said


def test_a_second_job_on_the_run_folder_refuses(write):
    config = write("second")
    first = start_one(config, "train.steps=4000")
    reach(config, first, 1)
    said = finish(start_one(config, "train.steps=4000"), 1)
    assert "is in use by" in said
    kill_one(first)


def kill_one(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()


def test_a_damaged_checkpoint_is_passed_over_by_all_ranks(whole, write):
    config = write("damaged")
    shutil.copytree(run_dir(whole[0]), run_dir(config))
    file = next((run_dir(config) / "checkpoints/step_0000000014").glob("*rank_1*optim_states.pt"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    said = finish(start(config))
    assert "passed over the checkpoint step_0000000014" in said and "resumed at step 12" in said
    assert story(config) == story(whole[0])


def test_more_steps_on_resume_and_a_change_that_is_refused(whole, write):
    config = write("longer")
    shutil.copytree(run_dir(whole[0]), run_dir(config))
    said = finish(start_one(config, "optim.lr=2e-2"), 1)
    assert "optim.lr: 0.01 then, 0.02 now" in said
    said = finish(start_one(config, "train.steps=16"))
    assert "train.steps goes from 14 to 16" in said
    assert [e["step"] for e in metrics(config)] == list(range(1, 17))
    finish(start_one(config, "train.steps=8"))  # already past its end: done, not a requeue for ever


def test_what_is_allowed_to_change_does_change(whole, write):
    """Weight decay and betas of the configuration, not those that DeepSpeed's files carry; another grouping of the parameters."""
    ends = {}
    for name, change in {"same": "optim.eps=1e-8", "decay": "optim.weight_decay=50", "groups": "optim.decay_all=true"}.items():
        config = write(name)
        shutil.copytree(run_dir(whole[0]), run_dir(config))
        finish(start_one(config, "train.steps=17", change, f"resume.allow=[{change.split('=')[0]}]", "profile.start=14", "profile.stop=16"))
        ends[name] = [e["loss"] for e in metrics(config)[14:]]
        assert list((run_dir(config) / "tb").glob("*.trace.json"))
        parts = EventAccumulator(str(run_dir(config) / "tb")).Reload().Scalars("profile/backward_ms")
        assert [e.step for e in parts] == [15, 16] and all(0 < e.value < 1e5 for e in parts)
    assert ends["decay"][0] == pytest.approx(ends["same"][0], rel=1e-4) and abs(ends["decay"][2] - ends["same"][2]) > 1e-3
    assert ends["groups"] == pytest.approx(ends["same"], rel=1e-3)


def test_a_stray_id_stops_every_rank_with_its_place(write, tiny_shards):
    """One id beyond the vocabulary, met by one rank in the middle of the run: the other does not wait for it in a collective."""
    config = write("stray")
    broken = config.parent / "shards"
    shutil.copytree(tiny_shards, broken)
    file = sorted(broken.glob("*.bin"))[0]
    with file.open("r+b") as shard:
        shard.seek(2 * 1040)  # in a sample of step 14
        shard.write((600).to_bytes(2, "little"))
    said = finish(start(config, f"data.path={broken}", "train.steps=400", "eval.every=0"), 1)
    assert 4 < len(metrics(config)) < 14, "samples are read ahead"
    assert f"{file.name}: token id 600 at token 1040" in said and "Disagreement: another rank cannot read its samples" in said
    assert "gloo" not in said


def test_a_tokenizer_that_is_not_the_shards_is_named(write, tiny_shards):
    config = write("tokenizer")
    broken = config.parent / "shards"
    shutil.copytree(tiny_shards, broken)
    (broken / "tokenizer.model").write_bytes(b"another")
    assert "is not the tokenizer of these shards" in finish(start_one(config, f"data.path={broken}"), 1)
    (broken / "tokenizer.model").unlink()
    assert "tokenizer.model is missing" in finish(start_one(config, f"data.path={broken}"), 1)


def test_a_warm_start_takes_the_weights_only(whole, write):
    config = write("warm")
    finish(start_one(config, f"init_from={run_dir(whole[0])}", "train.steps=3", "optim.warmup_steps=0"))
    assert metrics(config)[0]["step"] == 1
    assert metrics(config)[0]["loss"] < metrics(whole[0])[-1]["loss"] + 0.5 < metrics(whole[0])[0]["loss"]
    said = finish(start_one(write("misfit"), f"init_from={run_dir(whole[0])}", "model.hidden_size=48"), 1)
    assert "WeightsError" in said and "[512, 32] there and [512, 48] here" in said


def test_a_truncated_shard_stops_every_rank_before_training(write, tiny_shards):
    config = write("truncated")
    broken = config.parent / "shards"
    shutil.copytree(tiny_shards, broken)
    file = sorted(broken.glob("*.bin"))[1]
    size = file.stat().st_size
    os.truncate(file, size - 4096)
    said = finish(start(config, f"data.path={broken}"), 1)
    assert said.count("ShardError") >= 2, "each rank says it"
    for part in (file.name, str(size), str(size - 4096)):
        assert part in said
    assert not run_dir(config).exists()


@pytest.mark.parametrize(
    "overrides, code, said",
    [
        (["train.global_batch=7"], 2, "train.global_batch=7 is not a multiple of train.micro_batch=2"),
        (["optim.learning_rate=1"], 2, "unknown key 'optim.learning_rate'"),
        (["model.vocab_size=100"], 1, "model.vocab_size=100"),
        (["data.path={empty}"], 1, "{empty}"),
        (["data.path={empty}/nowhere"], 1, "nowhere"),
        (["data.seq_len=10000000", "eval.every=0"], 1, "data.seq_len=10000000"),
        (["parallel.sequence=2"], 2, "parallel.sequence=2"),
        (["model.kernel=triton"], 2, "model.kernel=triton needs a GPU"),
    ],
)
def test_bad_input_is_named(write, tmp_path, overrides, code, said):
    config = write("bad")
    overrides = [text.format(empty=tmp_path) for text in overrides]
    out = finish(start_one(config, *overrides), code)
    assert said.format(empty=tmp_path) in out and "Traceback" not in out
    assert not run_dir(config).exists()


def test_nonfinite_steps_end_the_run(write):
    config = write("nonfinite")
    said = finish(
        start_one(
            config, "optim.lr=1e30", "optim.min_lr=0", "optim.warmup_steps=0", "optim.clip=0", "train.max_nonfinite=3", "train.steps=40"
        ),
        1,
    )
    assert "all had gradients that are not finite (train.max_nonfinite=3)" in said


def test_dry_run_starts_nothing(write):
    config = write("dry")
    said = finish(start_one(config, "--dry-run", "launch.gpus_per_node=2", "data.path=data/nope"))
    assert "\n          data.path=data/nope (command line)\n" in said and "\nsettings  run_dir=" in said
    for part in (
        "parameters",
        "FLOPs",
        "memory",
        "machine   this one has",
        '"train_micro_batch_size_per_gpu": 2',
        '"gradient_accumulation_steps": 2',
    ):
        assert part in said
    assert said.count("data/nope is not a folder") == 2 and "tokens, validation" in said
    assert said.splitlines()[-1].startswith("the run would stop here for want of its data: data/nope is not a folder")
    assert not run_dir(config).exists()
    said = finish(start_one(config, "--dry-run", "launch.gpus_per_node=2", "model.vocab_size=300"), 2)
    assert said.splitlines()[-1].endswith("set model.vocab_size to at least 512") and said.splitlines()[-1].startswith("error: ")


def test_settings_that_are_not_the_defaults_are_listed():
    """As they are, those of the command line marked; launch.nodes=1 is the default."""
    data = {"path": {"données #1": 2.0}, "seq_len": 64}
    chosen = config.build({"run_dir": "runs/a #b", "data": data, "optim": {"betas": [0.9, 0.99]}, "init_from": "1e3"}, "test")
    said = train.chosen(chosen, ["run_dir=runs/a #b", "data={path: ...}", "launch.nodes=1"])
    assert [line[10:] for line in said.splitlines()] == [
        "run_dir=runs/a #b (command line)",
        "init_from=1e3",
        'data.path={"données #1": 2.0} (command line)',
        "data.seq_len=64 (command line)",
        "optim.betas=[0.9, 0.99]",
    ]


def test_overrides_may_be_left_out(capsys):
    with pytest.raises(SystemExit) as ended:
        train.main([])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "config [section.key=value ...]" in said and said.endswith("arguments are required: config\n")


@pytest.mark.parametrize("rank, said", [("0", "4 data-parallel ranks"), ("3", "")])
def test_dry_run_under_torchrun_is_of_its_ranks(write, monkeypatch, capsys, rank, said):
    """And said once, by the first of them."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert train.main([str(write(f"dry_{rank}")), "--dry-run", "train.global_batch=8", "train.micro_batch=2"]) == 0
    out = capsys.readouterr().out
    assert said in out and bool(out) == bool(said)


@pytest.mark.parametrize("kind", ["file", "terminal"])
def test_a_log_on_a_full_disk_loses_lines_without_a_traceback(kind, capsys):
    stream = open("/dev/full", "w")  # noqa: SIM115 - closing it would fail
    file = train.LogFile("/dev/full") if kind == "file" else train.LogTerminal(stream)
    file.handle(logging.makeLogRecord({"msg": "lost"}))
    assert capsys.readouterr().err == ""
    file.handle(logging.makeLogRecord({"msg": "%d", "args": ("no number",)}))
    assert "Logging error" in capsys.readouterr().err
