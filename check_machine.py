"""Says in one line what this machine lacks to build ppsd-rt, and how to get it.

`make` runs it before anything else, and setup.py before it compiles. It has to run on any Python 3, so that a Python
that is too old says so itself.
"""

import os
import shutil
import sys
import sysconfig

GIGABYTES = 2  # of free disk: the environment, the build and the default model

# What is lacking: (Debian and Ubuntu, Fedora, Alpine, macOS)
PACKAGES = {
    "compiler": ("apt install g++", "dnf install gcc-c++", "apk add g++", "xcode-select --install"),
    "make": ("apt install make", "dnf install make", "apk add make", "xcode-select --install"),
    "headers": ("apt install python3-dev", "dnf install python3-devel", "apk add python3-dev", "brew install python"),
    "venv": ("apt install python3-venv", "dnf install python3", "apk add python3", "brew install python"),
    "python": ("apt install python3.11", "dnf install python3.11", "apk add python3", "brew install python"),
}


def _line(lacking, package):
    systems = ("Debian or Ubuntu", "Fedora", "Alpine", "macOS")
    ways = ["{}: {}".format(systems[i], PACKAGES[package][i]) for i in range(len(systems))]
    return "{} Install it: {}".format(lacking, "; ".join(ways))


def missing_for_build():
    """One line for the first thing that compiling needs and this machine lacks; None if it has all."""
    if sys.version_info < (3, 11):
        return _line("ppsd-rt needs Python 3.11 or newer; this is {}.{}.".format(*sys.version_info[:2]), "python")
    compilers = os.environ.get("CXX", "").split()[:1] or ["c++", "g++", "clang++"]
    if not any(map(shutil.which, compilers)):
        return _line("No C++ compiler is on the PATH ({}).".format(", ".join(compilers)), "compiler")
    if not (shutil.which("make") or shutil.which("ninja")):
        return _line("Neither make nor ninja is on the PATH.", "make")
    if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
        return _line("The headers of Python {}.{} are missing.".format(*sys.version_info[:2]), "headers")
    return None


def missing_for_environment():
    """The same for a virtual environment in the current folder."""
    lacking = missing_for_build()
    if lacking:
        return lacking
    try:
        import ensurepip  # noqa: F401  Debian leaves it out of python3
        import venv  # noqa: F401
    except ImportError:
        return _line("Python's venv module is missing.", "venv")
    free = shutil.disk_usage(".").free / 1e9
    if free < GIGABYTES:
        return "{:.1f} GB of disk are free here, and ppsd-rt needs {}: make room, or clone to another disk.".format(
            free, GIGABYTES
        )
    return None


if __name__ == "__main__":
    sys.exit(missing_for_environment())
