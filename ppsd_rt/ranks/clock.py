"""The clock that limits are watched by; tests have one that they set."""

import time


class Clock:
    """Seconds of a clock that never goes back, and waiting for some of them."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


CLOCK = Clock()
