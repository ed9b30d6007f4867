"""Messages between a front and an engine: JSON objects, one a line, over TCP. Nothing in them is code.

Both sides say that they live, four times in the time of silence after which the other one takes them for lost.
"""

import base64
import hmac
import json
import socket
import time
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
from .asks import Ask, EngineLost, Facts

Message = dict[str, Any]

_LONGEST = 1 << 28  # bytes of a message
_LONGEST_FIRST = 1 << 16  # of one from somebody who has not shown the key
_PIECE = 1 << 16  # bytes that are sent within the time of silence: then a slow link is not taken for a silent one
PART = 1 << 18  # of a head, in characters: an answer's messages need not wait for the whole
_ERRORS = {kind.__name__: kind for kind in (PpsdError, UsageError, ContextFull, GrammarFailed)}


class Line:
    """One connection. Any thread may send; one reads. Both raise EngineLost, and then it is closed."""

    def __init__(self, connection: socket.socket, silence: float, clock: Callable[[], float] = time.monotonic) -> None:
        connection.settimeout(silence)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._silence, self._clock = connection, silence, clock
        self._incoming = bytearray()
        self._sending, self._closed = Lock(), Event()
        self.silent = False  # is that why it was lost?

    def live(self) -> None:
        """From now on, say so to the other side."""
        start(Thread(target=self._beat, name="alive", daemon=True))

    def send(self, kind: str, **fields: object) -> None:
        raw = json.dumps({"kind": kind, **fields}, default=_plain, separators=(",", ":")).encode() + b"\n"
        try:
            with self._sending:
                for begin in range(0, len(raw), _PIECE):
                    self._connection.sendall(raw[begin : begin + _PIECE])
        except OSError as error:
            self._lose(error)

    def first(self) -> Message:
        """What somebody says who may be anybody: short, and within the time of silence however slowly it comes."""
        return self._message(_LONGEST_FIRST, self._clock() + self._silence)

    def read(self) -> Message:
        """The next one, signs of life left out."""
        while (message := self._message(_LONGEST))["kind"] == "alive":
            pass
        return message

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        """Wakes who reads and sends. The file stays: whoever comes next would get its number, and they wait on that."""
        self._closed.set()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """By who reads, at the end."""
        self.close()
        with self._sending:
            self._connection.close()

    def _message(self, longest: int, end: float | None = None) -> Message:
        searched, place = 0, -1
        try:
            while (place := self._incoming.find(b"\n", searched)) < 0:
                searched = len(self._incoming)
                if searched >= longest:
                    self._lose(ConnectionError("it sent what is no message"))
                self._connection.settimeout(self._silence if end is None else max(1e-3, end - self._clock()))
                if end is not None and self._clock() >= end:
                    raise TimeoutError
                if not (some := self._connection.recv(1 << 16)):
                    raise ConnectionError("its connection closed")
                self._incoming += some
        except OSError as error:
            self._lose(error)
        raw = bytes(self._incoming[:place])
        del self._incoming[: place + 1]
        try:
            message: Message = json.loads(raw)
            message["kind"]
        except (ValueError, KeyError, TypeError, RecursionError):
            self._lose(ConnectionError("it sent what is no message"))
        return message

    def _lose(self, error: Exception) -> Any:
        self.silent = self.silent or isinstance(error, TimeoutError)
        self.close()
        why = f"it has been silent for {self._silence:g} s" if self.silent else printable(str(error))
        raise EngineLost(why) from None

    def _beat(self) -> None:
        while not self._closed.wait(self._silence / 4):
            with suppress(EngineLost):
                self.send("alive")


def proof_of(key: str, nonce: str) -> str:
    """What only somebody knows who has the key; of no use for another nonce."""
    return hmac.new(key.encode(), nonce.encode(errors="replace"), "sha256").hexdigest()


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
