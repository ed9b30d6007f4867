"""An engine in a child process of the front, which is started again when it ends."""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from threading import Event, Thread

from ..cli.notes import note
from ..processes import OWN
from ..ranks.threads import start

_GRACE = 5.0  # seconds to end in, after SIGTERM


class Child:
    """given_up: called with a line when it has ended once more than it may be started again."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], restarts: int, given_up: Callable[[str], None]
    ) -> None:
        self._command = [*OWN, *command]
        self._environment = {**os.environ, **environment}
        self._restarts, self._given_up, self._closing = restarts, given_up, Event()
        self._process = self._start()
        start(Thread(target=self._watch, name="child", daemon=True))

    def kill(self) -> None:
        """It hangs."""
        self._process.kill()

    def close(self) -> None:
        self._closing.set()
        self._process.terminate()
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(self._command, stdin=subprocess.DEVNULL, env=self._environment, start_new_session=True)

    def _watch(self) -> None:
        left = self._restarts
        while True:
            status = self._process.wait()
            if self._closing.is_set():
                return
            how = f"status {status}" if status >= 0 else f"signal {-status}"
            if left == 0:
                self._given_up(f"the engine has ended with {how}, and is not started again (--restarts)")
                return
            left -= 1
            note(f"the engine has ended with {how}: it is started again, {left} more times at most")
            self._process = self._start()
            if self._closing.is_set():
                self._process.kill()
