"""What this machine has: cores for threads, memory for KV caches, and a name."""

import math
import os
import platform
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from .. import _native
from ..errors import PpsdError, UsageError
from ..printable import quoted

MOST = 16  # threads: memory is the limit long before
SHARE = 0.5  # of the memory that the machine has to spare, for KV caches
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


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


def no_memory(tokens: int) -> PpsdError:
    """To raise where a text of so many has no place."""
    return PpsdError(f"no memory for a KV cache of {tokens} tokens: raise --kv-memory, or lower --max-tokens")


def kv_memory_of(wanted: int | str | None) -> int:
    """Bytes: a number, or a text such as `512M` or `4G`; None: half of what the machine has to spare."""
    if wanted is None:
        return int(spare_memory() * SHARE)
    match = re.fullmatch(r"([0-9]{1,15})\s*([kmgt]?)(i?b)?", str(wanted).strip().lower())
    if isinstance(wanted, bool) or match is None or int(match[1]) == 0:
        raise UsageError(f"kv_memory {quoted(wanted)} is no size: write bytes, or a text such as 512M or 4G")
    return int(match[1]) * _UNITS[match[2]]


def spare_memory(proc: Path = Path("/proc/meminfo"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process can have without swapping; what its control group and `ulimit -v` allow, if less."""
    spare = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = dict(line.split(":", 1) for line in proc.read_text().splitlines())
        spare = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux
        pass
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            allowed = int((groups / limit).read_text()) - int((groups / used).read_text())
        except (OSError, ValueError):  # no such file; "max": no limit
            continue
        spare = min(spare, max(allowed, 0))
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:
        spare = min(spare, max(most - _address_space(), 0))
    return spare


def _address_space() -> int:
    """Bytes of addresses that this process has taken."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return 0


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """x86: the model's name. Arm's Linux names none: the codes of its makers and parts, as "aarch64 0x41/0xd0c"."""
    try:
        lines = [line.partition(":") for line in cpuinfo.read_text(encoding="utf-8").splitlines()]
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    facts = [(key.strip(), value.strip()) for key, _, value in lines]
    names = [value for key, value in facts if key == "model name"]
    if names:
        return names[0]
    makers = [value for key, value in facts if key == "CPU implementer"]
    parts = [value for key, value in facts if key == "CPU part"]
    kinds = sorted({f"{maker}/{part}" for maker, part in zip(makers, parts, strict=False)})
    return " ".join([platform.machine(), *kinds])
