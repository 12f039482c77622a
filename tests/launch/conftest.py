"""A real SLURM cluster for the tests that want one."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("slurm.sh")
HOOKS = Path(__file__).parent.parent / "faults" / "hooks"


@dataclass(frozen=True)
class Slurm:
    """Two nodes of 8 CPUs and 8 GPUs that are all this host, SlurmdTimeout 15 s, KillWait 20 s; partitions main and urgent."""

    folder: Path

    @property
    def environment(self) -> dict:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def submit(self, run, *settings: str, faults: tuple[dict, ...] = ()) -> str:
        """Two ranks on two nodes; returns the job's id."""
        setup = [f"export PYTHONPATH={HOOKS}:$PYTHONPATH", f"export FAULT_PLAN='{run.plan(*faults)}'"]
        command = [
            sys.executable,
            "-m",
            "launch.submit",
            str(run.config),
            "launch.cluster=slurm",
            "launch.nodes=2",
            "launch.gpus_per_node=1",
        ]
        said = self.call(*command, f"launch.setup={yaml_list(setup)}", *settings)
        return re.search(r"job (\d+)", said)[1]

    def lose(self, node: str, job: str) -> None:
        """As when its power fails: the node's daemon, then all of a job that runs there, before any of it can report to the controller."""
        os.kill(int((self.folder / f"slurmd.{node}.pid").read_text()), signal.SIGKILL)
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # ended meanwhile
                title, environment = ((process / name).read_bytes() for name in ("cmdline", "environ"))
                if title.startswith(f"slurmstepd: [{job}.".encode()) or f"SLURM_JOB_ID={job}".encode() in environment.split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)

    def state(self, job: str) -> dict[str, str]:
        return dict(item.split("=", 1) for item in self.call("scontrol", "show", "job", job).split() if "=" in item)

    def ended(self, job: str) -> Callable[[], bool]:
        return lambda: self.state(job)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def yaml_list(items: list[str]) -> str:
    return "[" + ", ".join("'" + item.replace("'", "''") + "'" for item in items) + "]"


@pytest.fixture(scope="session")
def slurm(tmp_path_factory) -> Slurm:
    if os.geteuid() != 0:
        pytest.skip("a SLURM cluster on this machine needs root")
    if shutil.which("slurmctld") is None and shutil.which("apt-get") is None:
        pytest.skip("SLURM is not installed, and without apt-get this test cannot install it")
    folder = tmp_path_factory.mktemp("slurm")
    folder.parent.chmod(0o755)
    started = subprocess.run(["bash", str(SCRIPT), "start", str(folder)], capture_output=True, text=True, timeout=400, check=False)
    if shutil.which("slurmctld") is None:
        pytest.skip(f"SLURM could not be installed here: {(started.stderr or started.stdout).strip()[-300:]}")
    assert started.returncode == 0, started.stdout + started.stderr
    yield Slurm(folder)
    subprocess.run(["bash", str(SCRIPT), "stop", str(folder)], timeout=120, check=True)
