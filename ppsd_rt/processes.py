"""How this program starts itself, and what a process may not use that was forked."""

import os
import sys

from .errors import PpsdError

# -P: else modules of the working folder, which may be anybody's, would come before Python's and ours.
OWN = (sys.executable, "-P", "-m", "ppsd_rt")


def not_after_fork(process: int) -> None:
    """process: the one that has made what is to be used. A fork leaves its threads behind, and its GPU."""
    if process != os.getpid():
        raise PpsdError("an engine cannot be used after a fork: start processes by spawn, and load the model in each")
