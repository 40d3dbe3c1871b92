"""How much memory a pool takes by default: what is free, less what is spoken for."""

import types
from pathlib import Path

import pytest

from levanter_infer.runtime import control_groups, memory

GB = 1 << 30


def on_device(monkeypatch, stats):
    device = types.SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(memory.jax, "local_devices", lambda: [device])


def about(size: float) -> tuple[float, float]:
    """Rounded down by a sixteenth at most."""
    return size * 15 / 16, size


def test_an_accelerator_gives_most_of_what_is_free_less_weights_that_are_yet_to_be_read(monkeypatch):
    on_device(monkeypatch, {"bytes_limit": 80 * GB, "bytes_in_use": 10 * GB})
    low, high = about(0.85 * 70 * GB)
    assert low <= memory.default_pool_bytes() <= high
    low, high = about(0.85 * (70 - 30) * GB)
    assert low <= memory.default_pool_bytes(30 * GB) <= high
    assert memory.default_pool_bytes(71 * GB) == 0


def test_an_accelerator_that_is_elsewhere_has_all_of_its_memory_free_but_for_the_weights():
    low, high = about(0.85 * 16 * GB)
    assert low <= memory.default_pool_bytes(device_bytes=16 * GB) <= high
    low, high = about(0.85 * 4 * GB)
    assert low <= memory.default_pool_bytes(12 * GB, device_bytes=16 * GB) <= high
    assert memory.default_pool_bytes(17 * GB, device_bytes=16 * GB) == 0


def test_a_cpu_gives_a_quarter_of_what_is_left_beside_the_weights_and_2_gib_at_most(monkeypatch):
    on_device(monkeypatch, None)
    monkeypatch.setattr(memory, "available_bytes", lambda: 6 * GB)
    low, high = about(1.5 * GB)
    assert low <= memory.default_pool_bytes() <= high
    low, high = about(0.5 * GB)
    assert low <= memory.default_pool_bytes(4 * GB) <= high
    assert memory.default_pool_bytes(7 * GB) == 0
    monkeypatch.setattr(memory, "available_bytes", lambda: 500 * GB)
    assert memory.default_pool_bytes() == memory.default_pool_bytes(400 * GB) == 2 * GB


def test_nearly_equal_states_choose_equal_pools(monkeypatch):
    sizes = {memory.default_pool_bytes(device_bytes=16 * GB + i * 1000) for i in range(50)}
    assert len(sizes) == 1
    for size in (0, 1, 31, 32, 1000, 12345678):
        steady = memory._steady(size)
        assert steady <= size <= steady * 17 / 16 and steady.bit_length() == size.bit_length()


def test_pages_beside_the_pool_get_a_quarter_of_the_machine(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 8 * GB)
    assert memory.default_host_bytes() == 2 * GB


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Files of /proc and /sys/fs/cgroup, as the module sees them."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/\n")
    (tmp_path / "sys" / "fs" / "cgroup").mkdir(parents=True)
    monkeypatch.setattr(memory, "Path", lambda name: tmp_path / name.lstrip("/"))
    monkeypatch.setattr(control_groups, "_MOUNT", tmp_path / "sys" / "fs" / "cgroup")
    monkeypatch.setattr(control_groups, "_OWN", tmp_path / "proc" / "self" / "cgroup")
    return tmp_path


def test_the_smaller_of_machine_and_control_group_counts(machine):
    (machine / "proc" / "meminfo").write_text("MemTotal: 64 kB\nMemAvailable:   4096 kB\nHugePages_Total: 7\n")
    assert memory.available_bytes() == 4 << 20
    group = machine / "sys" / "fs" / "cgroup"
    (group / "memory.current").write_text(f"{2 << 20}\n")
    for limit, free in (("max\n", 4 << 20), (f"{3 << 20}\n", 1 << 20), (f"{9 << 20}\n", 4 << 20)):
        (group / "memory.max").write_text(limit)
        assert memory.available_bytes() == free


def test_a_system_that_counts_no_free_pages_has_all_of_its_memory(machine, monkeypatch):
    names = {name: number for name, number in memory.os.sysconf_names.items() if name != "SC_AVPHYS_PAGES"}
    monkeypatch.setattr(memory.os, "sysconf_names", names)
    assert memory.available_bytes() == memory.os.sysconf("SC_PHYS_PAGES") * memory.os.sysconf("SC_PAGE_SIZE")


def test_swap_space_counts_before_something_is_refused(machine):
    (machine / "proc" / "meminfo").write_text("MemAvailable:   8192 kB\nSwapFree:   1024 kB\n")
    memory.check_host_memory("it", {"this": 8 << 20, "that": 1 << 20}, "go")
    with pytest.raises(
        ValueError, match=r"^it does not .* 9\.0 MiB \(this 8\.0 MiB, that 1\.0 MiB\), and 9\.0 .*; go$"
    ):
        memory.check_host_memory("it", {"this": 8 << 20, "that": (1 << 20) + 1}, "go")


def test_swap_space_does_not_count_beyond_the_limit_of_a_control_group(machine):
    (machine / "proc" / "meminfo").write_text("MemAvailable:   8192 kB\nSwapFree:   8192 kB\n")
    group = machine / "sys" / "fs" / "cgroup"
    (group / "memory.current").write_text("0\n")
    (group / "memory.max").write_text(f"{4 << 20}\n")
    memory.check_host_memory("it", {"this": 4 << 20}, "go")
    with pytest.raises(ValueError, match=r"and 4\.0 MiB are free"):
        memory.check_host_memory("it", {"this": (4 << 20) + 1}, "go")


def test_memory_of_this_process_is_that_of_the_system(machine):
    assert memory.process_bytes() == (0, 0)  # a system that does not say
    (machine / "proc" / "self" / "status").write_text("Name:\tx\nVmHWM:\t  30 kB\nVmRSS:\t  20 kB\n")
    assert memory.process_bytes() == (20 << 10, 30 << 10)


def test_the_peak_is_the_devices_where_it_counts_and_else_that_of_this_process(monkeypatch):
    on_device(monkeypatch, {"peak_bytes_in_use": 5})
    assert memory.peak_bytes() == 5
    on_device(monkeypatch, None)
    monkeypatch.undo()
    block = bytearray(32 << 20)
    block[::4096] = b"x" * len(block[::4096])
    now, most = memory.process_bytes()
    assert Path("/proc/self/status").exists() and 32 << 20 < now <= most
    on_device(monkeypatch, None)
    assert memory.peak_bytes() >= now


def test_free_memory_is_given_back_without_harm():
    memory.return_free_memory()
