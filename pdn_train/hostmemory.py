"""Host memory that is left for this process: of the node, and of the control groups it runs in (a SLURM job's, a container's)."""

from __future__ import annotations

from pathlib import Path


def available(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that may still be taken before the kernel kills something: the least of what the node and each enclosing group have left.

    A group has its limit less its use, in which files that were read or written and lie about (inactive_file) count, as they go first.
    """
    left = [_kilobytes((proc / "meminfo").read_text(), "MemAvailable:")]
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: one tree
            left += _left(groups, path, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):  # version 1: a tree of its own
            left += _left(groups / "memory", path, ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
    return min(left)


def _left(root: Path, path: str, names: tuple[str, str, str]) -> list[int]:
    """Of each group from `path` up to the root that has a limit. In a container the path may be the host's, and not there."""
    limit, used, idle = names
    found, group = [], root / path.lstrip("/")
    for folder in (group, *group.parents):
        if (folder / limit).exists() and (most := (folder / limit).read_text().strip()) != "max":
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            found.append(int(most) - int((folder / used).read_text()) + int(stat.get(idle, 0)))
        if folder == root:
            break
    return found


def _kilobytes(table: str, name: str) -> int:
    return next(int(line.split()[1]) << 10 for line in table.splitlines() if line.startswith(name))
