"""As many threads as have a core of their own, and the time of it; and memory that there is."""

import math
import os

import pytest

from ppsd_rt import _native
from ppsd_rt.cpu import machine
from ppsd_rt.cpu.machine import MOST, cpu_quota, default_threads, spare_memory
from ppsd_rt.ranks.launch import cores_of


def test_one_for_each_physical_core_that_may_be_used():
    assert 1 <= default_threads() <= min(len(_native.usable_cores()), MOST)
    assert 1 <= _native.best_cores() <= len(_native.usable_cores())


@pytest.mark.parametrize(
    ("cores", "quota", "threads"),
    [(8, math.inf, 8), (64, math.inf, MOST), (8, 2.5, 2), (8, 0.5, 1), (2, 4.0, 2), (0, math.inf, 1)],
)
def test_the_least_of_cores_and_quota_counts(monkeypatch, cores, quota, threads):
    monkeypatch.setattr(_native, "best_cores", lambda: cores)
    monkeypatch.setattr("ppsd_rt.cpu.machine.cpu_quota", lambda: quota)
    assert default_threads() == threads


@pytest.mark.parametrize(
    ("cores", "best", "quota", "ranks", "wanted", "threads"),
    [
        (8, 8, math.inf, 2, None, 4),
        (8, 4, math.inf, 2, None, 2),  # siblings share a core
        (64, 64, math.inf, 2, None, MOST),
        (64, 64, 4.0, 2, None, 2),  # a container's share of the time, for both of them
        (64, 64, 1.5, 4, None, 1),
        (8, 8, 2.0, 2, 3, 3),  # as they are told
    ],
)
def test_ranks_of_a_host_share_its_cores_and_quota(monkeypatch, cores, best, quota, ranks, wanted, threads):
    monkeypatch.setattr(_native, "usable_cores", lambda: list(range(cores)))
    monkeypatch.setattr(_native, "best_cores", lambda: best)
    monkeypatch.setattr("ppsd_rt.cpu.machine.cpu_quota", lambda: quota)
    dealt = [cores_of(rank, ranks, wanted) for rank in range(ranks)]
    assert dealt == [(threads, list(range(rank * threads, (rank + 1) * threads))) for rank in range(ranks)]


@pytest.fixture
def two_cores():
    """Two cores, the only ones that this process may use meanwhile."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if len(before) < 2:
        pytest.skip("this process has no two cores")
    two = sorted(before)[:2]
    os.sched_setaffinity(0, two)
    yield two
    os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("files", "order", "best"),
    [
        ({}, "ab", 2),
        ({"cpu_core/cpus": "{b}-{b},4000"}, "ba", 1),  # Intel: these are performance cores
        ({"cpu_core/cpus": "4000-4003"}, "ab", 2),  # and we may use none of them
        ({"system/cpu/cpu{a}/cpu_capacity": "446", "system/cpu/cpu{b}/cpu_capacity": "1024"}, "ba", 1),  # Arm
        ({"system/cpu/cpu{a}/cpu_capacity": "900", "system/cpu/cpu{b}/cpu_capacity": "1024"}, "ab", 2),
        ({f"system/cpu/cpu{{{x}}}/topology/thread_siblings_list": "{a},{b}" for x in "ab"}, "ab", 1),
    ],
)
def test_slow_cores_and_siblings_come_last(tmp_path, two_cores, files, order, best):
    names = dict(zip("ab", two_cores, strict=True))
    for name, text in files.items():
        path = tmp_path / name.format(**names)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(**names) + "\n")
    assert _native.usable_cores(str(tmp_path)) == [names[x] for x in order]
    assert _native.best_cores(str(tmp_path)) == best


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n", "cpu.max": "400000 100000\n"}, 3),
        ("0::/host/path\n", {"cpu.max": "200000 100000\n"}, 2),  # the container's own folder is mounted as the root
        ("4:memory:/\n1:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "50000", "cpu/x/cpu.cfs_period_us": "100000"}, 0.5),
        (
            "3:cpu,cpuacct:/\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            math.inf,
        ),
        ("1:cpu:/\n0::/\n", {"unified/cpu.max": "700000 100000"}, 7),
        ("4:memory:/\n", {"memory/cpu.cfs_quota_us": "1", "memory/cpu.cfs_period_us": "1"}, math.inf),
        ("0::/\n", {"cpu.max": "nonsense"}, math.inf),
        ("0::/\n", {"cpu.max": ""}, math.inf),
    ],
)
def test_quotas_of_control_groups(tmp_path, groups, files, quota):
    (tmp_path / "cgroup").write_text(groups)
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text)
    assert cpu_quota(tmp_path / "cgroup", tmp_path / "fs") == quota


def test_a_system_without_control_groups_has_no_quota(tmp_path):
    assert cpu_quota(tmp_path / "none", tmp_path) == math.inf


def test_spare_memory_within_ulimit(monkeypatch):
    monkeypatch.setattr(machine, "_address_space", lambda: 10**6)
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (10**6 + 5000, 0))
    assert spare_memory() == 5000
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (1, 0))
    assert spare_memory() == 0


def test_spare_memory(tmp_path):
    info = tmp_path / "meminfo"
    info.write_text("MemTotal: 100 kB\nMemAvailable:   64 kB\n")
    assert spare_memory(info, tmp_path) == 64 * 1024
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert spare_memory(info, tmp_path) == 4000
    (tmp_path / "memory.max").write_text("max\n")
    assert spare_memory(info, tmp_path) == 64 * 1024
