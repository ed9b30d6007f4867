"""A folder of what an engine was asked and has answered, as ids: for the memory of answers, and to learn from.

    answers-00000.bin ...   records, only ever appended to; the oldest file goes when all are too large
    model.json              which model's they are, and how it was loaded
    days.json               drafts judged and accepted, by day
    secret                  what the owners' numbers come from
    heads/                  heads that have learned from it: heads.py
    own-*/                  text that the model wrote itself, to judge by and to mix in: train.py
    .lock, .training.lock   held by the process that keeps, and by the one that trains

A record that was cut short where its writer was killed ends its file. Only its owner may read the folder.
"""

import fcntl
import json
import os
import secrets
import shutil
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import PpsdError, UsageError
from ..models.files import one_line, parse_json

MOST_BYTES = 64 << 20  # of all records: some 16 million ids
FILES = 16  # that they are in, so that the oldest sixteenth goes at a time
LEAST_ANSWER = 8  # ids: shorter ones teach nothing
MOST_DAYS = 400
DAYS_EVERY = 10.0  # seconds until their counts are written again, which takes longer than to keep an answer
_HEAD = struct.Struct("<IIIIIQ")  # checksum of the rest, ids, of which the prompt's, _FREE | _REMEMBERED, day, owner
_FREE, _REMEMBERED = 1, 2
_LOG = getLogger(__name__)

Place = tuple[int, int]  # number of a file, and bytes of it


@dataclass(frozen=True, eq=False)
class Record:
    """ids[answer:] was answered. free: no grammar, penalty or bias had a say in it. day: since 1970.

    owner: as RunOptions.owner.
    """

    ids: npt.NDArray[np.int32]
    answer: int
    free: bool
    day: int
    owner: int | None

    def pack(self) -> bytes:
        flags = _FREE * self.free | _REMEMBERED * (self.owner is not None)
        rest = _HEAD.pack(0, len(self.ids), self.answer, flags, self.day, self.owner or 0)[4:]
        rest += self.ids.astype("<i4").tobytes()
        return struct.pack("<I", zlib.crc32(rest)) + rest

    @property
    def digest(self) -> bytes:
        return blake2b(self.ids.tobytes(), digest_size=8).digest()

    @property
    def tokens(self) -> int:
        """Of the answer."""
        return len(self.ids) - self.answer


class Lock:
    """Of a folder, for as long as this process lives or until `close`. PpsdError where another one has it."""

    def __init__(self, folder: Path, name: str = ".lock", what: str = "keeps answers in") -> None:
        self._file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise PpsdError(f"another process {what} {folder}: end it first, or name another folder") from None

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Kept:
    """The folder, open to write.

    told: `hash` of the weights, `name`, `dtype` and `head`: how the model was loaded. PpsdError for the folder of
    another model, one that another process writes to, and one that cannot be written to.
    """

    def __init__(
        self,
        folder: Path,
        told: dict[str, str],
        vocabulary: int,
        learned: Place = (0, 0),
        most_bytes: int = MOST_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """learned: records before this place have been learned from."""
        self.folder, self._most_bytes, self._clock, self._full = folder, most_bytes, clock, False
        try:
            if folder.is_dir() and not (folder / "model.json").exists() and any(folder.glob("[!.]*")):
                raise UsageError(f"{folder} holds other files: name a folder that is empty, or new")
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
            self._lock = Lock(folder)
            try:
                self._open(told, vocabulary, learned)
            except BaseException:
                self._lock.close()
                raise
        except OSError as error:
            raise PpsdError(f"cannot keep answers in {folder}: {error.strerror or error}") from None

    def _open(self, told: dict[str, str], vocabulary: int, learned: Place) -> None:
        if (self.folder / "model.json").exists() and (kept := read_model(self.folder))["hash"] != told["hash"]:
            raise PpsdError(f"{self.folder} keeps answers of {kept['name']}, another model: name another folder")
        with suppress(OSError):  # a full disk keeps nothing new, but what is there is of use
            self._write("model.json", json.dumps(told))
        secret = self.folder / "secret"
        if not secret.exists():
            self._write("secret", secrets.token_hex(16))
        self.secret = secret.read_bytes()
        self._days, self._days_due = read_days(self.folder), 0.0
        self._seen, self.fresh, self.tokens = set[bytes](), 0, 0
        self._vocabulary, last = vocabulary, (0, 0)
        for record, last in read_records(self.folder, vocabulary):
            self._seen.add(record.digest)
            self.tokens += record.tokens
            self.fresh += record.tokens * (last > learned)
        files = _files(self.folder)
        self._path = files[-1] if files else self._numbered(0)
        if files and last != (_number(self._path), self._path.stat().st_size):  # damaged: what follows would be hidden
            self._path = self._numbered(_number(self._path) + 1)

    def add(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        free: bool = True,
        owner: int | None = 0,
        judged: int = 0,
        accepted: int = 0,
    ) -> bool:
        """An answer has ended. Is it kept? A full disk costs this answer its place here, and nothing else.

        judged, accepted: drafts of the exit head.
        """
        day = int(self._clock() // 86400)
        record = Record(np.array([*prompt, *answer], np.int32), len(prompt), free, day, owner)
        try:
            if judged:
                self._count(day, judged, accepted)
            if len(answer) < LEAST_ANSWER or record.digest in self._seen:
                return False
            self._append(record.pack())
        except OSError as error:
            if not self._full:
                _LOG.warning("answers are not kept in %s: %s", self.folder, error.strerror or error)
            self._full = True
            return False
        self._full = False
        self._seen.add(record.digest)
        self.tokens += record.tokens
        self.fresh += record.tokens
        return True

    @property
    def days(self) -> dict[str, list[int]]:
        """Drafts of the exit head that were judged, and those that were right, by date; the oldest first."""
        return dict(self._days)

    def close(self, save: bool = True) -> None:
        """save: else the folder is another process's by now."""
        with suppress(OSError):
            if save and self._days_due > 0:
                self._save_days()
        self._lock.close()

    def _count(self, day: int, judged: int, accepted: int) -> None:
        date = time.strftime("%Y-%m-%d", time.gmtime(86400 * day))
        before = self._days.get(date, [0, 0])
        self._days[date] = [before[0] + judged, before[1] + accepted]
        self._days = dict([*self._days.items()][-MOST_DAYS:])
        if self._clock() >= self._days_due:
            self._save_days()

    def _save_days(self) -> None:
        self._days_due = self._clock() + DAYS_EVERY
        self._write("days.json", json.dumps(self._days))

    def _append(self, packed: bytes) -> None:
        size = self._path.stat().st_size if self._path.exists() else 0
        most = self._most_bytes // FILES
        if size and size + len(packed) > most:
            self._path, size = self._numbered(_number(self._path) + 1), 0
            files = _files(self.folder)
            while files and sum(path.stat().st_size for path in files) + max(most, len(packed)) > self._most_bytes:
                oldest = files.pop(0)
                for record, _ in _read(oldest, self._vocabulary):
                    self._seen.discard(record.digest)
                    self.tokens -= record.tokens
                oldest.unlink()
        with open(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb", buffering=0) as file:
            try:
                if file.write(packed) != len(packed):
                    raise OSError(28, os.strerror(28))
            except OSError:
                with suppress(OSError):
                    file.truncate(size)  # a half record would hide those after it
                raise

    def _numbered(self, number: int) -> Path:
        return self.folder / f"answers-{number:05}.bin"

    def _write(self, name: str, text: str) -> None:
        write_whole(self.folder / name, text.encode())


def read_records(folder: Path, vocabulary: int) -> Iterator[tuple[Record, Place]]:
    """Of all files, the oldest first, with the places where they end; a file that is damaged counts up to there."""
    for path in _files(folder):
        for record, end in _read(path, vocabulary):
            yield record, (_number(path), end)


def read_model(folder: Path) -> dict[str, str]:
    """`hash` of the weights, and how the model was loaded. PpsdError where the folder holds no answers."""
    try:
        found = parse_json((folder / "model.json").read_text(encoding="utf-8"))
        if not (isinstance(found, dict) and {"hash", "name", "dtype", "head"} <= found.keys()):
            raise ValueError("not as it was written")
    except FileNotFoundError:
        raise PpsdError(f"{folder} holds no answers: `ppsd-run serve --learn {folder}` keeps them there") from None
    except (OSError, ValueError) as error:
        raise PpsdError(f"{folder / 'model.json'} is damaged ({one_line(error)}): name another folder") from None
    return found


def read_days(folder: Path) -> dict[str, list[int]]:
    """As `Kept.days`; none where the file is missing or damaged."""
    with suppress(OSError, ValueError):
        found = parse_json((folder / "days.json").read_text())
        if isinstance(found, dict) and all(map(_is_count, found.values())):
            return found
    return {}


def _is_count(value: Any) -> bool:
    return isinstance(value, list) and [*map(type, value)] == [int, int] and value[0] > 0


def forget(folder: Path) -> int:
    """Delete all that was kept and learned -> bytes. PpsdError while a process keeps answers there, or trains."""
    read_model(folder)  # nobody else's folder is emptied
    with closing(Lock(folder)), closing(Lock(folder, ".training.lock", "learns from")):
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        # Last, model.json: a process that is killed here leaves what the next one can delete.
        for path in sorted(folder.iterdir(), key=lambda path: path.name == "model.json"):
            if not path.name.endswith(".lock"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return size


def write_whole(path: Path, content: bytes) -> None:
    """Whole or not at all, readable by its owner alone. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    os.replace(unfinished, path)


def newest(tokens: Sequence[int], most: int) -> int:
    """Of items with so many tokens, the oldest first: where the newest begin that have at most so many together."""
    return len(tokens) - sum(total <= most for total in accumulate(reversed(tokens)))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("answers-*.bin") if path.stem[8:].isdecimal())


def _number(path: Path) -> int:
    return int(path.stem[8:])


def _read(path: Path, vocabulary: int) -> Iterator[tuple[Record, int]]:
    """Each record, and where it ends. PpsdError where the file cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PpsdError(f"cannot read {path}: {error.strerror}") from None
    place = 0
    while place + _HEAD.size <= len(data):
        checksum, length, answer, flags, day, owner = _HEAD.unpack_from(data, place)
        end = place + _HEAD.size + 4 * length
        if end > len(data) or zlib.crc32(data[place + 4 : end]) != checksum:
            break
        ids = np.frombuffer(data, "<i4", length, place + _HEAD.size)
        if 0 < answer < length and ids.min() >= 0 and ids.max() < vocabulary:
            yield Record(ids, answer, bool(flags & _FREE), day, owner if flags & _REMEMBERED else None), end
        place = end
    if place < len(data):
        _LOG.warning("%s is damaged or was cut short: what follows %d bytes is left out", path, place)
