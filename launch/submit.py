"""Put runs on machines: `python -m launch.submit yaml/X.yaml... [section.key=value ...] [--dry-run]`.

Each YAML becomes a job of its own (several: a sweep), on the cluster that `launch.cluster` names: slurm (one srun task a GPU, returns at
once), local (one subprocess a GPU on this machine, waits for the end) or debug (one rank in this process; a debugger opens where it fails).
All three run the same `launch.job.Job` from a snapshot of the code. Needs submitit and the configuration's packages, neither torch nor a
GPU.

Exits with 0 once jobs are submitted (slurm) or done (local, debug), 75 for a run that was stopped and can go on, 1 for one that failed, 2
for a configuration that cannot run. A signal to this process that stops a local run ends the list: the runs after it are not started.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

import submitit
from submitit.core.utils import FailedJobError

from launch import local
from launch.job import Job, local_gpus
from launch.requeue import AGAIN
from launch.snapshot import Submission
from pdn_train.config import Config, ConfigError, LaunchConfig, load
from pdn_train.rundir import RunDir, RunDirError
from pdn_train.signals import REQUEUE, StopRequest
from pdn_train.telling import counted, quietly

# Set by keys of the launch section, or by submitit itself
OWN_FLAGS = {"nodes", "ntasks-per-node", "cpus-per-task", "time", "partition", "account", "constraint", "job-name", "requeue", "no-requeue"}
OWN_FLAGS |= {"output", "error", "open-mode", "signal", "array"}
GPU_FLAGS = {"gres", "gpus", "gpus-per-node", "gpus-per-task"}  # any of them replaces the one made from launch.gpus_per_node
FLAG = re.compile(r"(?:#SBATCH\s+)?--([a-z][a-z-]*)(?:=(.*))?")


def main(argv: list[str] | None = None) -> int:
    usage = "%(prog)s [-h] [--dry-run] CONFIG [CONFIG ...] [section.key=value ...]"
    parser = argparse.ArgumentParser(prog="launch.submit", usage=usage, description="Submit runs, one job a YAML file.")
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="YAML files; a section.key=value replaces that setting of theirs")
    parser.add_argument("--dry-run", action="store_true", help="print what would be submitted; write and start nothing")
    arguments = parser.parse_intermixed_args(argv)
    files = [item for item in arguments.configs if "=" not in item]
    settings = [item for item in arguments.configs if "=" in item]
    try:
        configs = [read(file, settings) for file in files]
        require_folders_of_their_own(configs)
        if arguments.dry_run:
            print("\n".join(dry_run(config) for config in configs))
            return 0
        return submit_all(configs, sys.argv if argv is None else argv)
    except (ConfigError, RunDirError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def read(file: str, settings: list[str]) -> Config:
    """The resolved configuration, with the checks that need no torch. Raises ConfigError."""
    config = load(file, settings)
    if config.launch.cluster != "debug":
        config.accumulation(config.launch.ranks)
    if config.launch.cluster == "local":
        local_gpus(config)
    sbatch_flags(config.launch)
    return config


def require_folders_of_their_own(configs: list[Config]) -> None:
    folders = [str(Path(config.run_dir).resolve()) for config in configs]
    if not folders:
        raise ConfigError("no configuration: name at least one file such as yaml/pgdn_340m.yaml")
    named = next((folder for folder in folders if "%" in folder), None)
    if named is not None:
        raise ConfigError(f"run_dir={named}: SLURM and submitit replace % and what follows in the names of logs; choose a run_dir without")
    double = next((folder for folder in folders if folders.count(folder) > 1), None)
    if double is not None:
        raise ConfigError(f"run_dir={double} stands in two of the files: each run of a sweep needs a folder of its own")


def submit_all(configs: list[Config], command: list[str]) -> int:
    """In order; on this machine a signal ends the whole list. The code of one that failed, else 75 if one was stopped, else 0."""
    stop = StopRequest() if any(config.launch.cluster == "local" for config in configs) else None
    codes = [submit(config, command, stop) for config in configs]
    return max(codes, key=lambda code: (code not in (0, REQUEUE), code))


def submit(config: Config, command: list[str], stop: StopRequest | None) -> int:
    """stop: of a local job."""
    if config.launch.cluster == "slurm":
        require_slurm()
    submission = Submission.create(config, command)
    if config.launch.cluster == "local":
        return local.run(submission, lambda: local_executor(config, submission), stop)
    if config.launch.cluster == "debug":
        return debug(submission)
    executor = slurm_executor(config, submission)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # submitit prints there what its error holds
            job = executor.submit(Job(str(submission.folder)))
    except FailedJobError as error:
        raise ConfigError(f"sbatch refused the job of {config.run_dir}: {str(error).strip()}") from None
    print(f"job {job.job_id}   run_dir {config.run_dir}")
    print(f"    python -m launch.status {shlex.quote(config.run_dir)}")
    print(f"    tail -F {shlex.quote(str(job.paths.stdout))}")
    print(f"    scancel {job.job_id}        stops it with a checkpoint, if one can be written within SLURM's KillWait")
    return 0


def debug(submission: Submission) -> int:
    """One rank in this process."""
    try:
        submitit.DebugExecutor(submission.folder).submit(Job(str(submission.folder))).results()
    except SystemExit as stopped:
        return int(stopped.code)
    return 0


def local_executor(config: Config, submission: Submission) -> submitit.LocalExecutor:
    launch = config.launch
    lines = ["set -e", *environment(submission), *launch.setup, f'exec {interpreter(launch)} "$0" "$@"']
    executor = submitit.LocalExecutor(submission.folder, python=shlex.join(["bash", "-c", "\n".join(lines)]))
    executor.update_parameters(
        timeout_min=launch.minutes,
        signal_delay_s=launch.warning,
        nodes=1,
        tasks_per_node=launch.ranks_per_node,
        gpus_per_node=0 if config.train.device == "cpu" else launch.gpus_per_node,
        visible_gpus=local_gpus(config),
    )
    return executor


def slurm_executor(config: Config, submission: Submission) -> SlurmScript:
    launch, flags = config.launch, sbatch_flags(config.launch)
    executor = SlurmScript(submission.folder, python=interpreter(launch))
    flags["requeue" if launch.requeue else "no-requeue"] = True
    if config.train.device != "cpu" and launch.gpus_per_node and not GPU_FLAGS & flags.keys():
        flags["gpus-per-node"] = launch.gpus_per_node
    if launch.partition is not None:
        flags["partition"] = launch.partition
    if launch.account is not None:
        flags["account"] = launch.account
    if launch.constraint is not None:
        flags["constraint"] = launch.constraint
    executor.update_parameters(
        job_name=Path(config.run_dir).name,
        time=launch.minutes,
        signal_delay_s=launch.warning,
        nodes=launch.nodes,
        ntasks_per_node=launch.ranks_per_node,
        cpus_per_task=launch.cpus_per_task,
        setup=before_the_ranks(launch, submission),
        # srun takes cpus-per-task from its own flags only, since SLURM 22.05; one rank that fails ends the others
        srun_args=[f"--cpus-per-task={launch.cpus_per_task}", "--kill-on-bad-exit=1", *launch.srun_extra],
        teardown=after_the_ranks(launch, submission),
        additional_parameters=flags,
    )
    return executor


class SlurmScript(submitit.SlurmExecutor):
    """submitit's executor, which can also show its sbatch script on a machine without SLURM."""

    @classmethod
    def affinity(cls) -> int:
        return 2  # `require_slurm` has looked, where it matters

    @property
    def script(self) -> str:
        return self._make_submission_file_text(self._submitit_command_str, "")


def require_slurm() -> None:
    if submitit.SlurmExecutor.affinity() < 0:
        raise ConfigError("launch.cluster=slurm: there is no srun on this machine; submit from a login node, or use launch.cluster=local")


def before_the_ranks(launch: LaunchConfig, submission: Submission) -> list[str]:
    """Lines of the batch script, on the first node."""
    restarts = (
        f'echo "not started: SLURM has restarted this job ${{SLURM_RESTART_COUNT}} times (launch.max_requeues={launch.max_requeues})" >&2'
    )
    return [
        f'if [ "${{SLURM_RESTART_COUNT:-0}}" -gt {launch.max_requeues} ]; then {restarts}; exit 1; fi',
        "set -e",
        *environment(submission),
        *launch.setup,
        "set +e",
    ]


def after_the_ranks(launch: LaunchConfig, submission: Submission) -> list[str]:
    """Lines of the batch script: how the ranks ended decides whether the job goes back to the queue.

    A script whose node was taken for lost may still run while SLURM has long restarted the job elsewhere: its restart count tells.
    """
    alone = shlex.join(["srun", "--overlap", "--nodes=1", "--ntasks=1", *launch.srun_extra]) + " " if launch.srun_extra else ""
    return [
        "code=$?",
        f"folder={shlex.quote(str(submission.folder))}",
        f'answer=$({alone}{interpreter(launch)} -m launch.requeue "$folder" "$code" "$SLURM_JOB_ID" "${{SLURM_RESTART_COUNT:-0}}")',
        f'if [ "$answer" = "{AGAIN}" ]; then',
        '    case "$(scontrol show job "$SLURM_JOB_ID")" in',
        '        *JobState=RUNNING*" Restarts=${SLURM_RESTART_COUNT:-0} "*) scontrol requeue "$SLURM_JOB_ID" && sleep 60 ;;',
        '        *) echo "not requeued from here: SLURM has ended or restarted this job already" >&2 ;;',
        "    esac",
        "fi",
        'exit "$code"',
    ]


def environment(submission: Submission) -> list[str]:
    """The snapshot comes before the folder that the job starts in, which may be a checkout that has moved on."""
    return ["export PYTHONSAFEPATH=1", f"export PYTHONPATH={shlex.quote(str(submission.code))}${{PYTHONPATH:+:$PYTHONPATH}}"]


def interpreter(launch: LaunchConfig) -> str:
    return launch.python or shlex.quote(sys.executable)


def sbatch_flags(launch: LaunchConfig) -> dict[str, str | bool]:
    """launch.sbatch_extra as sbatch's long options. Raises ConfigError for what is none, or has a key of its own."""
    flags: dict[str, str | bool] = {}
    for line in launch.sbatch_extra:
        match = FLAG.fullmatch(line.strip())
        if match is None:
            raise ConfigError(f"launch.sbatch_extra: '{line}' is not of the form --option or --option=value")
        name, value = match.groups()
        if name in OWN_FLAGS:
            raise ConfigError(f"launch.sbatch_extra: '{line}' is set by the other keys of the launch section, or by the launcher itself")
        flags[name] = True if value is None else value
    return flags


def dry_run(config: Config) -> str:
    launch = config.launch
    where = f"# {config.run_dir}: {counted(launch.ranks, 'rank')}, {counted(launch.nodes, 'node')}, cluster {launch.cluster}"
    submission = Submission((RunDir(Path(config.run_dir)).submissions / "NNNN").absolute())
    if launch.cluster != "slurm":
        return where
    return f"{where}\n{slurm_executor(config, submission).script}"


if __name__ == "__main__":
    sys.exit(quietly(main))
