"""How many threads decode where nobody says: as many as have a fast core of their own."""

import math
from collections.abc import Iterator
from pathlib import Path

from .. import _native

MOST = 16  # memory is the limit long before


def default_threads(processes: int = 1) -> int:
    """One for each physical core that this process may use and, in a container, has the time of: from 1 to MOST.

    processes: that share those cores, and that time.

    Siblings of a core share what decoding waits for, and all wait for the slowest at every barrier: so the efficiency
    cores of a hybrid are left alone.
    """
    return max(1, math.floor(min(_native.best_cores() / processes, cpu_quota() / processes, MOST)))


def cpu_quota(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """How many cores' time the control groups of this process grant it (`docker run --cpus`); infinity: no limit.

    More threads than that are all stopped for the rest of every period, tens of milliseconds, in the middle of a pass.
    proc: the file that names the groups; root: where they are mounted, version 2 or 1 (its controller `cpu`).
    """
    return min((quota for folder in _groups(proc, root) for quota in _quotas(folder)), default=math.inf)


def _groups(proc: Path, root: Path) -> Iterator[Path]:
    """Every folder whose limit holds for this process: those of its groups, and what they are in."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in (root / controllers, root / "unified", root):
            inner = mount / group.lstrip("/")
            yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(mount))


def _quotas(folder: Path) -> Iterator[float]:
    for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):  # microseconds a period, of so many
        try:
            quota, period = (int(word) for name in names for word in (folder / name).read_text().split())
        except (OSError, ValueError):  # no such file; "max": no limit
            continue
        if quota > 0 and period > 0:  # -1: no limit
            yield quota / period
