"""A folder of what an engine was asked and has answered, as ids: for the memory of answers, and to learn from.

    answers.sqlite          answers, and drafts judged and accepted by day; beside it files of SQLite's
    model.json              which model's they are, and how it was loaded
    secret                  what the owners' numbers come from
    heads/                  heads that have learned from it: heads.py
    own-*/                  text that the model wrote itself, to judge by and to mix in: train.py
    .lock, .training.lock   held by the process that keeps, and by the one that trains

Only its owner may read the folder, which holds nothing else.
"""

import fcntl
import json
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from logging import getLogger
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import PpsdError, UsageError
from ..files import write_whole
from ..models.files import one_line, parse_json

MOST_BYTES = 64 << 20  # of all answers: some 16 million ids
PARTS = 16  # the oldest of so many goes at a time
PRIVATE = 0o600  # the mode of its files
LEAST_ANSWER = 8  # ids: shorter ones teach nothing
MOST_DAYS = 400
_NAME = "answers.sqlite"
_TABLES = """
    CREATE TABLE IF NOT EXISTS answers (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        digest BLOB UNIQUE,                     -- of the ids and their owner
        ids BLOB, answer INT, free INT, day INT, owner BLOB
    );
    CREATE TABLE IF NOT EXISTS days (date TEXT PRIMARY KEY, judged INT, accepted INT);
"""
_INSERT = "INSERT OR IGNORE INTO answers VALUES (NULL, ?, ?, ?, ?, ?, ?)"
_COUNT = """INSERT INTO days VALUES (?, ?, ?) ON CONFLICT DO UPDATE
    SET judged = judged + excluded.judged, accepted = accepted + excluded.accepted"""
_OLDEST_DAYS = "DELETE FROM days WHERE date NOT IN (SELECT date FROM days ORDER BY date DESC LIMIT ?)"
_OLDEST = "DELETE FROM answers WHERE id IN (SELECT id FROM answers ORDER BY id LIMIT ?)"
_TOKENS = "SELECT total(length(ids) / 4 - answer) FROM answers WHERE id > ?"
_UNFINISHED = r"\.ppsd-[0-9a-f]{16}\.unfinished"
_LOCKS = r"\.(training\.)?lock"
# What is written there, by name.
_FILES = r"answers\.sqlite(-wal|-shm|-journal)?|\.answers\.sqlite\.unfinished|model\.json|secret"
_OURS = re.compile(rf"{_FILES}|{_UNFINISHED}|{_LOCKS}|heads|own-\w+-[0-9a-f]*(-\d+)+")
_INSIDE = re.compile(rf"\.?(\d+|(text|states)-\d+)\.safetensors(\.unfinished)?|state\.json|{_UNFINISHED}")
_LOG = getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Record:
    """ids[answer:] was answered. free: no grammar, penalty or bias had a say in it. day: since 1970.

    owner: as RunOptions.copied_by: what was shared is found again where memory is shared, and nowhere else.
    """

    ids: npt.NDArray[np.int32]
    answer: int
    free: bool
    day: int
    owner: int | None

    def row(self) -> tuple[object, ...]:
        ids = self.ids.astype("<i4").tobytes()
        owner = None if self.owner is None else self.owner.to_bytes(8, "little")
        digest = blake2b(ids, digest_size=16, key=owner or b"").digest()
        return digest, ids, self.answer, int(self.free), self.day, owner

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
            fcntl.flock(self._file, fcntl.LOCK_UN)  # a process that was forked may have the file open too
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
        learned: int = 0,
        most_bytes: int = MOST_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """learned: the id of the last answer that has been learned from."""
        self.folder, self._most_bytes, self._clock, self._full = folder, most_bytes, clock, False
        try:
            names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
            if other := [name for name in names if not _OURS.fullmatch(name)]:
                raise UsageError(f"{folder} holds other files ({min(other)}): name a folder that is empty, or new")
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
            self._lock = Lock(folder)
            try:
                self._open(told, vocabulary, learned)
            except BaseException:
                self._lock.close()
                raise
        except (OSError, sqlite3.Error) as error:
            raise PpsdError(f"cannot keep answers in {folder}: {getattr(error, 'strerror', None) or error}") from None

    def _open(self, told: dict[str, str], vocabulary: int, learned: int) -> None:
        if (self.folder / "model.json").exists() and (kept := read_model(self.folder))["hash"] != told["hash"]:
            raise PpsdError(f"{self.folder} keeps answers of {kept['name']}, another model: name another folder")
        with suppress(OSError):  # a full disk keeps nothing new, but what is there is of use
            write_whole(self.folder / "model.json", json.dumps(told).encode(), PRIVATE)
        secret = self.folder / "secret"
        if not secret.exists():
            write_whole(secret, secrets.token_hex(16).encode(), PRIVATE)
        self.secret = secret.read_bytes()
        if not (self.folder / _NAME).exists():
            _write_anew(self.folder, (), {})
        if not _is_whole(self.folder):
            _LOG.warning("%s is damaged: what can be read of it stays", self.folder / _NAME)
            _write_anew(
                self.folder, [record for record, _ in read_records(self.folder, vocabulary)], read_days(self.folder)
            )
        self._db = _connect(self.folder / _NAME)
        self._db.executescript(f"PRAGMA journal_mode = WAL; {_TABLES}")
        self._db.execute("PRAGMA synchronous = NORMAL")  # where the power fails, the last answers may be lost
        self._db.execute("PRAGMA secure_delete = ON")
        self.tokens, self.fresh = self._tokens(0), self._tokens(learned)

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
        added = False
        try:
            with self._db:  # one transaction
                if judged:
                    date = time.strftime("%Y-%m-%d", time.gmtime(86400 * day))
                    self._db.execute(_COUNT, (date, judged, accepted))
                    self._db.execute(_OLDEST_DAYS, (MOST_DAYS,))
                if len(answer) >= LEAST_ANSWER:
                    added = self._db.execute(_INSERT, record.row()).rowcount > 0
            if added:
                self.tokens += record.tokens
                self.fresh += record.tokens
                self._make_room()
        except sqlite3.Error as error:
            if not self._full:
                _LOG.warning("answers are not kept in %s: %s", self.folder, error)
            self._full = True
            return False
        self._full = False
        return added

    def close(self) -> None:
        self._db.close()
        self._lock.close()

    def _make_room(self) -> None:
        asked = "SELECT (page_count - freelist_count) * page_size FROM pragma_page_count, pragma_freelist_count, "
        while self._db.execute(asked + "pragma_page_size").fetchone()[0] > self._most_bytes:
            with self._db:
                (count,) = self._db.execute("SELECT count(*) FROM answers").fetchone()
                if not self._db.execute(_OLDEST, (-(-count // PARTS),)).rowcount:
                    return
            self.tokens = self._tokens(0)
            self.fresh = min(self.fresh, self.tokens)

    def _tokens(self, after: int) -> int:
        return int(self._db.execute(_TOKENS, (after,)).fetchone()[0])


def read_records(folder: Path, vocabulary: int) -> Iterator[tuple[Record, int]]:
    """The oldest first, with their ids; a file that is damaged counts up to there."""
    try:
        with closing(_connect(folder / _NAME)) as db:
            for id, raw, answer, free, day, owner in db.execute(
                "SELECT id, ids, answer, free, day, owner FROM answers ORDER BY id"
            ):
                ids = np.frombuffer(raw[: len(raw) // 4 * 4], "<i4")
                if 0 < answer < len(ids) and ids.min() >= 0 and ids.max() < vocabulary:
                    owned = None if owner is None else int.from_bytes(owner, "little")
                    yield Record(ids, answer, bool(free), day, owned), id
    except sqlite3.OperationalError as error:
        raise PpsdError(f"cannot read the answers in {folder}: {error}") from None
    except (sqlite3.Error, TypeError) as error:
        _LOG.warning("%s is damaged, what follows is left out: %s", folder / _NAME, error)


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
    """Drafts of the exit head that were judged, and those that were right, by date, the oldest first; none where they
    cannot be read. By a connection of its own: another thread may be keeping an answer."""
    try:
        with closing(_connect(folder / _NAME)) as db:
            rows = db.execute("SELECT * FROM days ORDER BY date")
            return {date: [judged, accepted] for date, judged, accepted in rows}
    except sqlite3.Error:
        return {}


def bytes_of(folder: Path) -> int:
    """Of the answers that are kept there."""
    return sum(path.stat().st_size for path in folder.glob(f"{_NAME}*"))


def forget(folder: Path) -> int:
    """Delete all that was kept and learned, by name -> bytes. PpsdError while a process keeps answers there, or
    trains."""
    read_model(folder)  # nobody else's folder is emptied
    with closing(Lock(folder)), closing(Lock(folder, ".training.lock", "learns from")):
        ours = [path for path in folder.iterdir() if _OURS.fullmatch(path.name) and not re.fullmatch(_LOCKS, path.name)]
        # Last, model.json: a process that is killed here leaves what the next one can delete.
        return sum(map(remove, sorted(ours, key=lambda path: path.name == "model.json")))


def remove(path: Path) -> int:
    """A file, or a folder's files that are written here, and the folder where it is empty then -> bytes."""
    if path.is_symlink() or not path.is_dir():
        size = path.lstat().st_size
        path.unlink()
        return size
    size = sum(remove(inside) for inside in path.iterdir() if _INSIDE.fullmatch(inside.name) and not inside.is_dir())
    with suppress(OSError):  # somebody has put something there
        path.rmdir()
    return size


def newest(tokens: Sequence[int], most: int) -> int:
    """Of items with so many tokens, the oldest first: where the newest begin that have at most so many together."""
    return len(tokens) - sum(total <= most for total in accumulate(reversed(tokens)))


def _connect(path: Path) -> sqlite3.Connection:
    """Of a file that is there. Raises sqlite3.Error. One thread at a time uses it."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, check_same_thread=False)


def _is_whole(folder: Path) -> bool:
    try:
        with closing(_connect(folder / _NAME)) as db:
            return bool(db.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")
    except sqlite3.OperationalError:  # not damaged: locked, no room
        raise
    except sqlite3.DatabaseError:
        return False


def _write_anew(folder: Path, records: Iterable[Record], days: dict[str, list[int]]) -> None:
    path = folder / f".{_NAME}.unfinished"
    write_whole(path, b"", PRIVATE)  # a database of no tables, with the mode that SQLite gives its own files too
    with closing(_connect(path)) as db:
        db.execute("PRAGMA journal_mode = OFF")
        db.executescript(_TABLES)
        with db:
            db.executemany(_INSERT, (record.row() for record in records))
            db.executemany(_COUNT, ((date, *counts) for date, counts in days.items()))
    for rest in ("-wal", "-shm"):
        (folder / (_NAME + rest)).unlink(missing_ok=True)
    os.replace(path, folder / _NAME)
