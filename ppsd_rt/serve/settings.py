"""What the server is told when it starts."""

import asyncio
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from ..pipeline.schedule import AUTO, Auto, Schedule

_LOG = logging.getLogger("ppsd_rt.serve")
DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # that generation_config.json may have


def log(event: str, **fields: object) -> None:
    """Fields that are None are left out."""
    said = {key: value for key, value in fields.items() if value is not None}
    _LOG.info("%s", json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **said}))


@dataclass(frozen=True)
class Settings:
    """As the options of `ppsd-run serve` are called. max_prompt, max_answer: tokens; None: what the context holds.

    queue: answers that may wait for their first token. timeout: seconds for a request, from its first byte to its last.
    grace: seconds that running answers have after SIGTERM. keep_alive: seconds that an idle connection stays open.
    strict: unknown fields are refused. plain_contents: special tokens in the contents of messages are text.
    cors: origins of other sites' pages that may ask; `*` is all. memory: whose earlier answers drafts are copied from:
    `own`, of the same owner; `shared`, of all; `off`, of nobody. api_key: one, or several with blanks between. host:
    where it listens, as it was given; None: something else listens. sampling: of requests that say nothing of it. here:
    is there an engine now? clock, now, sleep, log: for the tests to replace.
    """

    api_key: str | None = None
    schedule: Schedule | Auto = AUTO
    max_body: int = 4 << 20  # bytes
    max_prompt: int | None = None
    max_answer: int | None = None
    queue: int = 256
    timeout: float = 600.0
    grace: float = 10.0
    keep_alive: float = 75.0
    strict: bool = False
    plain_contents: bool = False
    cors: Sequence[str] = ()
    memory: str = "own"
    host: str | None = "127.0.0.1"
    sampling: Mapping[str, float] = field(default_factory=dict)
    here: Callable[[], bool] = lambda: True
    clock: Callable[[], float] = time.perf_counter
    now: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    log: Callable[..., None] = log

    @property
    def keys(self) -> list[str]:
        return (self.api_key or "").split()


def default_queue(max_body: int) -> int:
    """Answers that may wait where every one has the largest body, in an eighth of the memory that is free now."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(256, min(4096, free // 8 // max_body))
