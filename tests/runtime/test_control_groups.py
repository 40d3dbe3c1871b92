"""Limits of control groups, read from files as Linux has them."""

from pathlib import Path

import pytest

from levanter_infer.runtime import control_groups, processor
from levanter_infer.runtime.control_groups import free_bytes, processors


@pytest.fixture
def root(monkeypatch, tmp_path) -> Path:
    """The directory of all groups; `own(root, text)` says in which ones the process is."""
    monkeypatch.setattr(control_groups, "_MOUNT", tmp_path)
    monkeypatch.setattr(control_groups, "_OWN", tmp_path / "own")
    return tmp_path


def own(root: Path, text: str) -> None:
    (root / "own").write_text(text)


def write(group: Path, **files) -> None:
    group.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (group / name.replace("__", ".")).write_text(f"{text}\n")


def limit(group: Path, size: object, used: int, cached: int = 0, version: int = 2) -> None:
    """Memory of a group. In version 1 the unprefixed numbers leave out the groups within."""
    if version == 2:
        write(group, memory__max=size, memory__current=used, memory__stat=f"anon 1\ninactive_file {cached}")
    else:
        write(group, memory__limit_in_bytes=size, memory__usage_in_bytes=used,
              memory__stat=f"active_file 77\ntotal_inactive_file {cached}\ntotal_active_file 1")  # fmt: skip


def test_without_control_groups_there_is_no_limit(root):
    assert list(free_bytes()) == list(processors()) == []


def test_a_system_that_does_not_say_the_group_has_the_limit_of_the_root(root):
    limit(root, 8, 3)
    assert list(free_bytes()) == [5]


def test_lines_that_are_no_groups_are_passed_over(root):
    (root / "own").write_bytes(b"\n7\n8:memory\n0::/a\xc2\x85b\xff\n")
    limit(root, 8, 3)
    (root / "memory.stat").write_text("inactive_file 1\n\nactive_file\tx y\n")
    assert list(free_bytes()) == [6]


def test_controllers_may_be_mounted_together_and_version_2_beside_them(root):
    own(root, "3:cpu,cpuacct:/job\n0::/job\n")
    write(root / "cpu,cpuacct" / "job", cpu__cfs_quota_us=200000, cpu__cfs_period_us=100000)
    limit(root / "unified" / "job", 8, 3)
    assert list(processors()) == [2.0] and list(free_bytes()) == [5]


def test_the_limits_of_all_groups_around_the_process_count(root):
    """A job of a batch system: the limit is the job's, and the process is in a step of it."""
    own(root, "0::/slurm/job_7/step_0\n")
    step = root / "slurm" / "job_7" / "step_0"
    limit(step.parent, 32, 30, cached=4)
    limit(root / "slurm" / "job_8", 2, 2)  # a neighbour
    limit(step, "max", 30)
    assert list(free_bytes()) == [6]
    limit(step, 9, 4)
    limit(root, 4, 1)
    assert list(free_bytes()) == [5, 6, 3]


def test_files_that_were_read_into_the_memory_of_a_group_count_as_free(root):
    own(root, "0::/\n")
    write(root, memory__max=6, memory__current=5, memory__stat="anon 1\ninactive_file 2\nactive_file 1")
    assert list(free_bytes()) == [4]
    (root / "memory.stat").unlink()
    assert list(free_bytes()) == [1]


def test_groups_of_version_1_have_files_of_other_names(root):
    own(root, "5:cpuset:/other\n4:hugetlb,memory:/job/step:1\n3:cpu,cpuacct:/job\n0::/\n")
    limit(root / "memory" / "other", 1, 1, version=1)
    limit(root / "memory" / "job", 40, 12, cached=2, version=1)
    assert list(free_bytes()) == [31]
    limit(root / "memory" / "job" / "step:1", 20, 12, cached=2, version=1)
    assert list(free_bytes()) == [11, 31]
    write(root / "cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    assert list(processors()) == []
    write(root / "cpu" / "job", cpu__cfs_quota_us=150000, cpu__cfs_period_us=100000)
    assert list(processors()) == [1.5]


def test_a_container_that_sees_its_own_group_as_the_root_has_its_limits(root):
    own(root, "4:memory:/docker/0123\n3:cpu:/docker/0123\n")
    limit(root / "memory", 8, 3, version=1)
    write(root / "cpu", cpu__cfs_quota_us=400000, cpu__cfs_period_us=100000)
    assert list(free_bytes()) == [6] and list(processors()) == [4.0]


def test_quotas_are_processors(root):
    own(root, "0::/pod/container\n")
    write(root / "pod", cpu__max="max 100000")
    assert list(processors()) == []
    write(root / "pod" / "container", cpu__max="50000 100000")
    write(root, cpu__max="800000 100000")
    assert list(processors()) == [0.5, 8.0]


@pytest.mark.parametrize("quotas, threads", [([], None), ([1.5, 3.0], 2), ([0.5], 1), ([3.5], None), ([9.0], None)])
def test_xla_gets_as_many_threads_as_processors(monkeypatch, quotas, threads):
    monkeypatch.setattr(control_groups, "processors", lambda: iter(quotas))
    monkeypatch.setattr(processor.os, "sched_getaffinity", lambda _: range(4), raising=False)
    monkeypatch.delenv("NPROC", raising=False)
    monkeypatch.setenv("PJRT_NPROC", "7")
    assert processor.limit_threads() is None and processor.os.environ["PJRT_NPROC"] == "7"
    monkeypatch.delenv("PJRT_NPROC")
    assert processor.limit_threads() == threads
    assert processor.os.environ.get("PJRT_NPROC") == (None if threads is None else str(threads))
