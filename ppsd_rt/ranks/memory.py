"""What a rank's process takes."""

from pathlib import Path


def resident() -> dict[str, float]:
    """Megabytes by the system's count; empty where it does not say. Shared: pages of files, such as torch's libraries,
    that all ranks of a host have together."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    values = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.startswith(("VmRSS", "Rss"))}
    return {"resident": values.get("VmRSS", 0.0), "shared": values.get("RssFile", 0.0)}


def memory_of(packed_bytes: int) -> list[float]:
    """[resident, of it shared, packed weights], megabytes."""
    now = resident()
    return [now.get("resident", 0.0), now.get("shared", 0.0), packed_bytes / 2**20]
