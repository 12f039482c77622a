"""What `launch.submit` hands over, without a cluster: the sbatch script, the refusals, the snapshot, the run in this process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch import submit
from launch.snapshot import ROOT, Submission, submissions
from pdn_train.config import ConfigError, LaunchConfig, load
from pdn_train.rundir import RunDir, snapshot_code


@pytest.fixture
def yaml_file(tmp_path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(f"run_dir: {tmp_path}/run\ndata: {{path: d}}\nlaunch: {{nodes: 2, gpus_per_node: 4}}\n")
    return file


def script(capsys, file: Path, *settings: str) -> str:
    assert submit.main([str(file), *settings, "--dry-run"]) == 0
    return capsys.readouterr().out


def test_neither_torch_nor_deepspeed_is_needed_to_submit():
    code = "import sys, launch.submit, launch.status, launch.job; print([m for m in ('torch', 'deepspeed', 'triton') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_settings_may_be_left_out(capsys):
    with pytest.raises(SystemExit):
        submit.main(["--help"])
    assert capsys.readouterr().out.startswith("usage: launch.submit [-h] [--dry-run] CONFIG [CONFIG ...] [section.key=value ...]\n")


def test_the_script_says_what_the_launch_section_says(yaml_file, capsys):
    keys = ["launch.partition=h100", "launch.account=lab", "launch.constraint=ib", "launch.minutes=90", "launch.warning_seconds=300"]
    said = script(capsys, yaml_file, *keys, "launch.cpus_per_task=12", "launch.sbatch_extra=[--qos=long, --exclusive]")
    for flag in ("nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "cpus-per-task=12", "time=90", "signal=USR2@300", "partition=h100"):
        assert f"#SBATCH --{flag}\n" in said
    for flag in ("account=lab", "constraint=ib", "qos=long", "exclusive", "requeue", "job-name=run"):
        assert f"#SBATCH --{flag}\n" in said
    assert "--cpus-per-task=12 --kill-on-bad-exit=1" in said and "torchrun" not in said
    assert not (yaml_file.parent / "run").exists(), "a dry run writes nothing"
    assert subprocess.run(["bash", "-n"], input=said, text=True, check=True).returncode == 0


@pytest.mark.parametrize(
    "answer, job, requeued",
    [
        ("again", "JobState=RUNNING Reason=None\n   Requeue=1 Restarts=2 BatchFlag=1", True),
        ("again", "JobState=RUNNING Reason=None\n   Requeue=1 Restarts=3 BatchFlag=1", False),  # SLURM runs it elsewhere by now
        ("again", "JobState=CANCELLED Reason=None\n   Requeue=1 Restarts=2 BatchFlag=1", False),
        ("enough", "JobState=RUNNING Reason=None\n   Requeue=1 Restarts=2 BatchFlag=1", False),
    ],
)
def test_the_script_requeues_its_own_start_only(yaml_file, tmp_path, answer, job, requeued):
    """Its last lines, with programs that answer for SLURM and for `launch.requeue`."""
    for name, text in {
        "scontrol": f"[ $1 = show ] && echo '{job}' || echo $* >>{tmp_path}/asked",
        "sleep": "",
        "decides": f"echo {answer}",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    config = load(yaml_file, [f"launch.python={tmp_path}/decides"])
    lines = ["(exit 75)", *submit.after_the_ranks(config.launch, Submission(tmp_path / "submissions" / "0001"))]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}
    assert subprocess.run(["bash", "-c", "\n".join(lines)], env=environment, capture_output=True, check=False).returncode == 75
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == ("requeue 7\n" if requeued else "")


@pytest.mark.parametrize("restarts, code", [("", 0), ("0", 0), ("2", 0), ("3", 1)])
def test_the_script_starts_max_requeues_times_more_and_no_more(yaml_file, tmp_path, restarts, code):
    config = load(yaml_file, ["launch.max_requeues=2"])
    lines = submit.before_the_ranks(config.launch, Submission(tmp_path / "submissions" / "0001"))
    done = subprocess.run(["bash", "-c", lines[0]], env={"SLURM_RESTART_COUNT": restarts}, capture_output=True, text=True, check=False)
    assert done.returncode == code and ("restarted this job 3 times (launch.max_requeues=2)" in done.stderr) == bool(code)


def test_what_has_no_key_of_its_own(yaml_file, capsys):
    said = script(capsys, yaml_file, "launch.sbatch_extra=['--gres=gpu:h100:4']", "launch.requeue=false", "launch.python=python3.12")
    assert "--gres=gpu:h100:4" in said and "gpus-per-node" not in said
    assert "#SBATCH --no-requeue\n" in said and "answer=$(python3.12 -m launch.requeue" in said
    said = script(capsys, yaml_file, "launch.setup=[module load cuda]", "launch.srun_extra=[--container-image=/i.sqsh]")
    assert "\nset -e\n" in said and "\nmodule load cuda\n" in said and said.index("module load cuda") < said.index("srun --unbuffered")
    assert said.count("--container-image=/i.sqsh") == 2, "the ranks, and what decides after them"
    assert "gpus-per-node" not in script(capsys, yaml_file, "train.device=cpu")


@pytest.mark.parametrize(
    "listed, device, given",
    [
        (None, "auto", []),
        ("2,3,5", "auto", [2, 3, 5]),
        ("2", "auto", None),
        ("", "auto", None),
        ("GPU-1f,GPU-2e", "auto", None),
        ("2", "cpu", []),
    ],
)
def test_a_local_job_takes_the_gpus_that_are_left_to_it_and_no_others(yaml_file, monkeypatch, capsys, listed, device, given):
    """given: what submitit is told; None: refused."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    settings = ["launch.cluster=local", "launch.nodes=1", "launch.gpus_per_node=2", f"train.device={device}", "train.global_batch=32"]
    if given is None:
        assert submit.main([str(yaml_file), *settings]) == 2
        assert f"CUDA_VISIBLE_DEVICES={listed} leaves {len(listed) == 1:d} GPUs by number" in capsys.readouterr().err
        assert not (yaml_file.parent / "run").exists()
        return
    submission = Submission(yaml_file.parent / "submissions" / "0001")
    parameters = submit.local_executor(submit.read(str(yaml_file), settings), submission).parameters
    assert list(parameters["visible_gpus"]) == given and parameters["gpus_per_node"] == (0 if device == "cpu" else 2)


@pytest.fixture
def local_codes(monkeypatch, tmp_path):
    """local_codes(codes, signal) -> the code of `submit` for runs that end so, and which began; the signal comes in each."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)}

    def make(codes, stopped_by=None):
        began, files = [], []
        for number in range(len(codes)):
            files.append(tmp_path / f"{number}.yaml")
            files[-1].write_text(f"run_dir: {tmp_path}/{number}\ndata: {{path: d}}\nlaunch: {{cluster: local, nodes: 1}}\n")

        class Submitted:
            def __init__(self, config):
                self.config, self.run_dir, self.folder = config, RunDir(config.run_dir), tmp_path

        def start(executor, submission):
            began.append(len(began))
            if stopped_by is not None:
                os.kill(os.getpid(), stopped_by)
            raise Ended(codes[began[-1]])

        def run(submission, executor, stop):
            try:
                return real(submission, executor, stop)
            except Ended as ended:
                return ended.args[0]

        real = submit.local.run
        monkeypatch.setattr(submit.Submission, "create", lambda config, command: Submitted(config))
        monkeypatch.setattr(submit, "local_executor", lambda config, submission: None)
        monkeypatch.setattr(submit.local, "start", start)
        monkeypatch.setattr(submit.local, "run", run)
        return submit.main([str(file) for file in files]), began

    yield make
    for number, handler in handlers.items():
        signal.signal(number, handler)


class Ended(Exception):
    pass


@pytest.mark.parametrize("codes, code", [([0, 0], 0), ([0, 75], 75), ([1, 75, 0], 1), ([75, 1], 1)])
def test_a_list_ends_with_the_code_of_what_failed(local_codes, codes, code):
    assert local_codes(codes) == (code, list(range(len(codes))))


def test_a_signal_ends_the_whole_list(local_codes, capsys, tmp_path):
    assert local_codes([75, 0, 0], signal.SIGTERM) == (75, [0])
    said = capsys.readouterr().err
    assert f"{tmp_path}/1: not started: SIGTERM" in said and f"{tmp_path}/2: not started: SIGTERM" in said


def test_a_time_limit_shorter_than_the_warning(yaml_file, capsys):
    assert "signal=USR2@30\n" in script(capsys, yaml_file, "launch.minutes=1")


@pytest.mark.parametrize(
    "settings, said",
    [
        (["launch.sbatch_extra=[qos=long]"], "'qos=long' is not of the form --option"),
        (["launch.sbatch_extra=['--time=5']"], "'--time=5' is set by the other keys"),
        (["train.global_batch=100"], "train.global_batch=100 is not a multiple of"),
        (["launch.cluster=local"], "launch.nodes=2 with launch.cluster=local"),
        (["launch.nods=3"], "did you mean 'launch.nodes'"),
        (["run_dir=runs/50%j"], "replace % and what follows"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(yaml_file, capsys, settings, said):
    assert submit.main([str(yaml_file), *settings]) == 2
    assert said in capsys.readouterr().err and not (yaml_file.parent / "run").exists()


def test_two_runs_of_a_sweep_need_two_folders(yaml_file, capsys):
    other = yaml_file.with_name("other.yaml")
    other.write_text(yaml_file.read_text())
    assert submit.main([str(yaml_file), str(other)]) == 2
    assert "stands in two of the files" in capsys.readouterr().err
    (yaml_file.parent / "link").symlink_to(yaml_file.parent / "run")
    other.write_text(yaml_file.read_text().replace("/run", "/link"))
    assert submit.main([str(yaml_file), str(other), "--dry-run"]) == 2, "the same folder by another name"
    capsys.readouterr()
    other.write_text(yaml_file.read_text().replace("/run", "/other"))
    assert submit.main([str(yaml_file), str(other), "--dry-run"]) == 0
    assert capsys.readouterr().out.count("#!/bin/bash") == 2


def test_no_slurm_no_submission(yaml_file, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert submit.main([str(yaml_file)]) == 2
    assert "there is no srun on this machine" in capsys.readouterr().err and not (yaml_file.parent / "run").exists()


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """sbatch("echo ..") puts an sbatch that does this, and an srun that does nothing, on the path."""

    def put(does):
        for name, line in (("sbatch", does), ("srun", "")):
            (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return put


def test_what_sbatch_says_is_one_error(yaml_file, sbatch, capsys):
    sbatch("echo 'sbatch: error: invalid partition specified: h100' >&2; exit 1")
    assert submit.main([str(yaml_file), "launch.partition=h100"]) == 2
    run = yaml_file.parent / "run"
    assert capsys.readouterr().err == f"error: sbatch refused the job of {run}: sbatch: error: invalid partition specified: h100\n"


def test_a_submitted_job_says_how_to_watch_and_stop_it(yaml_file, tmp_path, sbatch, capsys):
    sbatch("echo Submitted batch job 7")
    run = f"{tmp_path}/a run"
    assert submit.main([str(yaml_file), f"run_dir={run}"]) == 0
    said = capsys.readouterr().out
    assert f"    python -m launch.status '{run}'\n    tail -F '{run}/submissions/0001/7_0_log.out'\n    scancel 7  " in said


def test_what_lies_among_the_submissions_is_none(yaml_file):
    config = load(yaml_file)
    first = Submission.create(config, ["x"])
    for name in ("0003", "0002.old"):
        (first.folder.parent / name).mkdir()
    assert submissions(RunDir(Path(config.run_dir))) == [first], "0003 is being filled"
    assert Submission.create(config, ["x"]).folder.name == "0004"


def test_a_submission_holds_what_it_will_run(yaml_file):
    config = load(yaml_file, ["optim.lr=3e-4"])
    first, second = (Submission.create(config, ["launch.submit", "x"]) for _ in range(2))
    assert [s.folder.name for s in submissions(RunDir(Path(config.run_dir)))] == ["0001", "0002"]
    assert first.config == config and first.folder.is_absolute()
    assert (first.code / "pdn_train" / "train.py").read_text() == (ROOT / "pdn_train" / "train.py").read_text()
    facts = json.loads((second.folder / "submission.json").read_text())
    assert facts["command"] == ["launch.submit", "x"]
    run_dir = RunDir(Path(config.run_dir))
    assert run_dir.config.exists() and (run_dir.code / "launch" / "submit.py").exists()


def test_the_snapshot_of_a_snapshot_is_all_of_it(tmp_path):
    """The job runs from its snapshot, which is no git checkout."""
    code = tmp_path / "submissions" / "0001" / "code"
    (code / "yaml").mkdir(parents=True)
    (code / "yaml" / "x.yaml").write_text("1")
    (code / "yaml" / "__pycache__").mkdir()
    (code / "yaml" / "__pycache__" / "x.pyc").write_text("2")
    (code.parent / "submission.json").write_text("{}")
    snapshot_code(code, tmp_path / "copy")
    assert [str(p.relative_to(tmp_path / "copy")) for p in (tmp_path / "copy").rglob("*") if p.is_file()] == ["yaml/x.yaml"]


def test_the_warning_fits_in_the_time():
    assert LaunchConfig(minutes=10, warning_seconds=120).warning == 120 and LaunchConfig(minutes=2, warning_seconds=120).warning == 60
    with pytest.raises(ConfigError):
        submit.sbatch_flags(LaunchConfig(sbatch_extra=["-p main"]))
