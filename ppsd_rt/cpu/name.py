"""What the processor calls itself: for people, and so that figures measured on one are not believed on another."""

import platform
from pathlib import Path


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
