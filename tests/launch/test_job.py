"""A task of the job before it trains: the variables it exports, and where compiled kernels go."""

from __future__ import annotations

import os
import stat

import pytest
from submitit.slurm.slurm import SlurmJobEnvironment

from launch import job
from launch.job import JobError

SLURM = {
    "SLURM_JOB_ID": "42",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "gpu[07,11]",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}


@pytest.fixture
def on_slurm(monkeypatch, tmp_path) -> SlurmJobEnvironment:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *job.CACHES):
        monkeypatch.delenv(name, raising=False)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(job.tempfile, "gettempdir", lambda: str(tmp_path))
    yield SlurmJobEnvironment()
    for name in job.CACHES:  # set by the code under test
        os.environ.pop(name, None)


def test_ranks_come_from_slurm_whatever_the_submitting_shell_left(on_slurm, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("MASTER_ADDR", "old")
    job.export_ranks(on_slurm, "42.0")
    said = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")}
    assert said == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "gpu07"}


def test_the_port_is_agreed_without_a_word_and_changes_with_the_start(on_slurm):
    ports = []
    for attempt in ("42.0", "42.0", "42.1"):
        job.export_ranks(on_slurm, attempt)
        ports.append(int(os.environ["MASTER_PORT"]))
    assert ports[0] == ports[1] != ports[2] and all(job.PORTS[0] <= port <= job.PORTS[1] for port in ports)


def test_caches_are_made_on_the_node_s_own_disk_for_this_job(on_slurm, tmp_path):
    made = job.export_caches("42")
    assert [str(folder) for folder in made] == [os.environ[name] for name in job.CACHES]
    assert all(folder.is_relative_to(tmp_path) and "-42" in folder.parent.name and list(folder.iterdir()) == [] for folder in made)


def test_a_cache_that_somebody_chose_is_kept(on_slurm, tmp_path, monkeypatch):
    """Through a link to another folder too."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "link" / "cache"))
    made = job.export_caches("42")
    assert [folder.name for folder in made] == ["inductor"] and (tmp_path / "disk" / "cache").is_dir()


def test_a_cache_that_cannot_be_written_is_named_with_its_variable(on_slurm, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(JobError, match=f"TRITON_CACHE_DIR={tmp_path}/file/cache cannot be written on .* in launch.setup"):
        job.export_caches("42")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_stranger_s_folder_is_not_trusted(on_slurm, tmp_path):
    folder = tmp_path / f"pdn_train-{os.getuid()}-42" / "triton"
    folder.mkdir(parents=True)
    os.chown(folder, 12345, 12345)
    folder.chmod(stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO)
    with pytest.raises(JobError, match="belongs to another user"):
        job.export_caches("42")


def test_threads(on_slurm):
    assert job.threads(on_slurm, 12) == 12
