"""What a rank says of itself when it is asked."""

from pathlib import Path


def report_of(packed_bytes: int, pieces: int, rows: int, seconds: float) -> list[float]:
    """[megabytes resident, of these pages of files, of packed weights; pieces of work done (passes, or draft steps of
    one row), their rows, their seconds]. Pages of files, such as torch's libraries, a host's ranks have together."""
    return [*resident(), packed_bytes / 2**20, float(pieces), float(rows), seconds]


def resident() -> tuple[float, float]:
    """Megabytes of this process, and how many of them are pages of files; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0, 0.0
    values = {
        line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.startswith(("VmRSS", "RssFile"))
    }
    return values.get("VmRSS", 0.0), values.get("RssFile", 0.0)
