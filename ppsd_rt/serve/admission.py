"""Who may come in: how many answers may wait for their first token, and none once the server stops."""

from .errors import ApiError
from .settings import Settings


class Admission:
    """waiting, running: answers without and with a first token. last_wait: seconds until the newest first token."""

    def __init__(self, settings: Settings) -> None:
        self._most, self._here = settings.queue, settings.here
        self.waiting = self.running = 0
        self.last_wait = 0.0
        self.stopping = False

    @property
    def away(self) -> bool:
        """Is there no engine now? Answers that have come in wait for the next one; others do not come in."""
        return not self._here()

    def enter(self, count: int) -> "Slots":
        """A slot for each of so many answers. ApiError where there is none."""
        if self.stopping:
            raise ApiError(503, "the server is stopping", "stopping", headers={"Retry-After": "5"})
        if self.away:
            message = "the engine is lost, and another one is on its way; try again in 5 s"
            raise ApiError(503, message, "no_engine", headers={"Retry-After": "5"})
        if count > self._most:
            message = f"the request asks for {count} answers; this server takes {self._most} at a time"
            raise ApiError(400, message, "too_many_answers")
        if self.waiting + count > self._most:
            seconds = max(1, min(60, round(self.last_wait)))
            message = f"{self.waiting} answers are waiting already; try again in {seconds} s"
            raise ApiError(429, message, "queue_full", headers={"Retry-After": str(seconds)})
        self.waiting += count
        return Slots(self, count)


class Slots:
    """What the answers of one request take up."""

    def __init__(self, admission: Admission, count: int) -> None:
        self._admission, self._waiting, self._running = admission, count, 0

    def began(self, seconds: float) -> None:
        """One of them has its first token, after so long."""
        self._waiting, self._running = self._waiting - 1, self._running + 1
        self._admission.waiting -= 1
        self._admission.running += 1
        self._admission.last_wait = seconds

    def leave(self) -> None:
        """All of them have ended."""
        self._admission.waiting -= self._waiting
        self._admission.running -= self._running
