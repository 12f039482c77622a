"""What is left of host memory, from tables and control groups as the kernel writes them."""

import pytest

from pdn_train.hostmemory import available

GIB = 1 << 30


@pytest.fixture
def node(tmp_path):
    """node(lines of /proc/self/cgroup, {folder: {file: text}}) -> available() on a node with 100 GiB to spare."""

    def make(lines, groups):
        proc, root = tmp_path / "proc", tmp_path / "cgroup"
        (proc / "self").mkdir(parents=True)
        (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {100 * GIB >> 10} kB\nBuffers: 7 kB\n")
        (proc / "self/cgroup").write_text("\n".join(lines) + "\n")
        root.mkdir()
        for folder, files in groups.items():
            (root / folder).mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (root / folder / name).write_text(f"{text}\n")
        return available(proc, root)

    return make


def group(limit, used, idle, first=("memory.max", "memory.current", "inactive_file")):
    names = dict(zip(("limit", "used", "idle"), first, strict=True))
    return {names["limit"]: limit, names["used"]: used, "memory.stat": f"anon 5\n{names['idle']} {idle}\nactive_file 9"}


def test_without_limits_it_is_what_the_node_has(node):
    assert node(["0::/user.slice"], {"user.slice": group("max", 3, 1)}) == 100 * GIB


def test_the_tightest_enclosing_group_counts_and_idle_files_are_free(node):
    """A SLURM job of 8 GiB with 3 in use, 1 of it idle files, in a slice that has more left; its step has no limit."""
    groups = {
        "system.slice": group(64 * GIB, 10 * GIB, 0),
        "system.slice/job_7": group(8 * GIB, 3 * GIB, GIB),
        "system.slice/job_7/step_0": group("max", 2 * GIB, GIB),
    }
    assert node(["0::/system.slice/job_7/step_0"], groups) == 6 * GIB


def test_a_container_sees_its_limit_at_the_root_whatever_its_path(node):
    """The limit lies at the root of what is mounted; the path is the host's."""
    assert node(["0::/docker/abc"], {".": group(4 * GIB, GIB, 0)}) == 3 * GIB


def test_version_1_has_a_tree_for_memory(node):
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    groups = {
        "memory": group(9223372036854771712, 0, 0, names),
        "memory/slurm/job_7": group(5 * GIB, 2 * GIB, GIB, names),
        "cpuset/slurm/job_7": {},
    }
    assert node(["11:cpuset:/slurm/job_7", "4:blkio,memory:/slurm/job_7", "1:name=systemd:/x"], groups) == 4 * GIB


def test_here():
    assert 0 < available() < 1 << 50
