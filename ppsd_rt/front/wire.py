"""Messages between a front and an engine: JSON objects, one a line, over TCP. Nothing in them is code.

Both sides say that they live, four times in the time of silence after which the other one takes them for lost.
"""

import base64
import json
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Lock, Thread
from typing import Any

from ..errors import ContextFull, GrammarFailed, PpsdError, UsageError
from ..models.checkpoint import Checkpoint
from ..models.head_file import HeadFile, HeadInfo, save_head
from ..pipeline.rounds import Draft, Drafted, Limits, Logprob, Round
from ..pipeline.schedule import Auto, Schedule, describe, parse_schedule
from ..printable import printable
from ..ranks.threads import start
from ..sampling.grammar import Grammar
from ..sampling.params import SamplingParams
from .asks import Ask, Facts, Lost

Message = dict[str, Any]

_LONGEST = 1 << 28  # bytes of a message
_ERRORS = {kind.__name__: kind for kind in (PpsdError, UsageError, ContextFull, GrammarFailed)}


class Line:
    """One connection. Any thread may send; one reads. Both raise Lost, and then it is closed."""

    def __init__(self, connection: socket.socket, silence: float) -> None:
        connection.settimeout(silence)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._incoming, self._silence = connection, connection.makefile("rb"), silence
        self._sending, self._closed = Lock(), Event()
        self.silent = False  # is that why it was lost?

    def live(self) -> None:
        """From now on, say so to the other side."""
        start(Thread(target=self._beat, name="alive", daemon=True))

    def send(self, kind: str, **fields: object) -> None:
        raw = json.dumps({"kind": kind, **fields}, default=_plain, separators=(",", ":")).encode() + b"\n"
        try:
            with self._sending:
                self._connection.sendall(raw)
        except OSError as error:
            self._lose(error)

    def read(self) -> Message:
        """The next one, signs of life left out."""
        while True:
            try:
                raw = self._incoming.readline(_LONGEST)
            except (OSError, ValueError) as error:  # ValueError: closed by another thread
                self._lose(error)
            if not raw.endswith(b"\n"):
                self._lose(ConnectionError("its connection closed"))
            try:
                message: Message = json.loads(raw)
                kind = message["kind"]
            except (ValueError, KeyError, TypeError, RecursionError):
                self._lose(ConnectionError("it sent what is no message"))
            if kind != "alive":
                return message

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        self._closed.set()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes who reads
        self._connection.close()

    def _lose(self, error: Exception) -> Any:
        self.silent = self.silent or isinstance(error, TimeoutError)
        self.close()
        why = f"it has been silent for {self._silence:g} s" if self.silent else printable(str(error))
        raise Lost(why) from None

    def _beat(self) -> None:
        while not self._closed.wait(self._silence / 4):
            with suppress(Lost):
                self.send("alive")


def _plain(value: Any) -> Any:
    """For JSON, what it does not know."""
    if isinstance(value, Schedule | Auto):
        return describe(value)
    if is_dataclass(value):
        return vars(value)
    if isinstance(value, frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} is no part of a message")


def ask_of(message: Message) -> Ask:
    params, limits = dict(message["params"]), message["limits"]
    if params["grammar"] is not None:
        params["grammar"] = Grammar(**params["grammar"])
    params["logit_bias"] = [tuple(pair) for pair in params["logit_bias"]]
    return Ask(
        message["prompt"],
        SamplingParams(**params),
        parse_schedule(message["schedule"]),
        Limits(limits["end"], frozenset(limits["stop_ids"]), limits["own"]),
        message["report_drafts"],
        message["owner"],
    )


def facts_from(message: Message) -> Facts:
    head = message["head"]
    return Facts(**{**message, "head": HeadInfo(**head) if head else None})


def head_text(file: HeadFile) -> str:
    """The whole file; matrices as int8, which a head that was learned is saved as."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "head.safetensors"
        save_head(path, file.info, file.tensors, file.draft_ids, int8=True, successors=file.successors)
        return base64.b64encode(path.read_bytes()).decode()


def head_from(text: str, checkpoint: Checkpoint) -> HeadFile:
    """PpsdError for one that does not fit this model."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "head.safetensors"
        path.write_bytes(base64.b64decode(text))
        return HeadFile.load(path, checkpoint)


def round_of(event: Message) -> Round:
    return Round(
        **{
            **event,
            "committed": tuple(event["committed"]),
            "judged": tuple(Draft(**draft) for draft in event["judged"]),
            "logprobs": tuple(map(logprob_of, event["logprobs"])),
        }
    )


def logprob_of(said: Message) -> Logprob:
    return Logprob(said["logprob"], tuple((id, logprob) for id, logprob in said["top"]))


def error_of(message: Message) -> PpsdError:
    return _ERRORS.get(message["error"], PpsdError)(message["message"])


EVENTS: dict[str, Callable[[Message], Round | Drafted]] = {"round": round_of, "drafted": lambda event: Drafted(**event)}
