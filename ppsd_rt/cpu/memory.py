"""How much memory the KV caches of all answers may have."""

import os
import re
import resource
from pathlib import Path

from ..errors import UsageError
from ..printable import quoted

SHARE = 0.5  # of what the machine has to spare
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


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
