"""Limits of the control groups (cgroups, version 1 and 2) that this process is in: of a container, of a job of a batch
system, and of the groups around them that it can see, whose limits hold too."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}
"""By version: of the limit, of what is used, and the prefix in memory.stat of counts that include inner groups."""


def free_bytes() -> Iterator[int]:
    """Memory that each group with a limit leaves. The page cache counts as free: the kernel drops it when memory is
    needed."""
    for version, group in _groups("memory"):
        limit, used, cached = _MEMORY_FILES[version]
        with contextlib.suppress(OSError, ValueError):  # not there, or no limit: "max"
            free = int((group / limit).read_text()) - int((group / used).read_text())
            yield free + _cached_bytes(group / "memory.stat", cached)


def processors() -> Iterator[float]:
    """Processors whose time each group with a quota gets, such as 1.5."""
    for version, group in _groups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # not there, or no quota: "max"
            if version == 2:
                quota, period = map(int, (group / "cpu.max").read_text().split())
            else:
                quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if quota > 0:  # version 1 has -1 for none
                yield quota / period


def _groups(controller: str) -> Iterator[tuple[int, Path]]:
    """Version and directory of the groups with this controller, the process's own first; none on other systems."""
    try:
        text = _OWN.read_text(errors="surrogateescape")
    except OSError:
        text = "0::/"
    for line in text.split("\n"):
        controllers, colon, path = line.partition(":")[2].partition(":")
        if not colon or (controllers and controller not in controllers.split(",")):
            continue
        version = 1 if controllers else 2
        # Version 1 has a directory for each controller, or for several that are mounted together; beside it, version 2
        # has one, too.
        mounts = (controller, controllers) if controllers else ("unified", "")
        root = next((_MOUNT / name for name in mounts if (_MOUNT / name).is_dir()), _MOUNT)
        group = root / path.lstrip("/")
        # A container may see its own group as the root while the path is that of the host; the walk ends at the root.
        for each in (group, *group.parents):
            if not each.is_relative_to(root):
                break
            yield version, each


def _cached_bytes(path: Path, prefix: str) -> int:
    """Page cache of a group."""
    try:
        lines = (line.partition(" ") for line in path.read_text().splitlines())
        return sum(int(size) for name, _, size in lines if name in (f"{prefix}inactive_file", f"{prefix}active_file"))
    except OSError:
        return 0
