"""The heads of a folder of kept answers: the newest is in use, and those before it stay."""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from logging import getLogger
from pathlib import Path

from ..errors import PpsdError
from ..files import write_whole
from ..models.checkpoint import Checkpoint
from ..models.files import parse_json
from ..models.head_file import EAGLE3, HeadFile, find_shipped
from .kept import PRIVATE, Record, read_records

LEAST_TOKENS = 1024  # of answers that are new since the last time: with fewer even who asks for it learns nothing
MOST = 8  # that stay
MOST_OUTCOMES = 20
WORSE = 0.005  # a new head may be right so much less often on the model's answers to general prompts
_LOG = getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """Acceptance on the newest kept answers, and on answers to general prompts, before and after."""

    trained: int  # tokens of kept answers
    before: float
    after: float
    error: float  # of after - before: one standard deviation
    own_before: float  # on general prompts
    own_after: float
    time: int = 0  # seconds since 1970

    @property
    def better(self) -> bool:
        return self.after - self.before > self.error and self.own_after > self.own_before - WORSE

    def __str__(self) -> str:
        verdict = "in use from the next answer on" if self.better else "no better: the head before stays"
        return (
            f"{self.trained:,} answer tokens: acceptance {self.before:.3f} -> {self.after:.3f} (+-{self.error:.3f}) on "
            f"the newest answers, {self.own_before:.3f} -> {self.own_after:.3f} on general prompts; {verdict}"
        )


@dataclass
class State:
    """names: of the heads that have come into use; none: the one that learning begins with is. learned: the id of the
    last answer that has been learned from. outcomes: of the last trainings."""

    root: str
    names: list[str] = field(default_factory=list)
    learned: int = 0
    outcomes: list[Outcome] = field(default_factory=list)


class LearnedHeads:
    """`heads/state.json` says which have come into use, in order, the last one now; and what trainings have brought.

    root: the head that learning begins with, as --exit-head names it. Heads that began with another one are of no use.
    """

    def __init__(self, folder: Path, exit_head: str, checkpoint: Checkpoint) -> None:
        self._folder, self._checkpoint = folder / "heads", checkpoint
        path = find_shipped(checkpoint) if exit_head == "auto" else Path(exit_head)
        self.root = path if path is not None and path.is_file() else None
        self._hash = hashlib.sha256(self.root.read_bytes()).hexdigest()[:16] if self.root else ""

    @property
    def state(self) -> State:
        with suppress(OSError, ValueError, TypeError, KeyError):
            found = parse_json((self._folder / "state.json").read_text(encoding="utf-8"))
            names = [name for name in found["names"] if isinstance(name, str) and "/" not in name]
            outcomes = [Outcome(**outcome) for outcome in found["outcomes"]]
            return State(self._hash, names if found["root"] == self._hash else [], int(found["learned"]), outcomes)
        return State(self._hash)

    def load(self) -> HeadFile | None:
        """The newest that is whole; else the one that learning begins with. None: that is no head that can learn."""
        for name in reversed(self.state.names):
            try:
                return HeadFile.load(self._folder / name, self._checkpoint)
            except PpsdError as error:
                _LOG.warning("%s; the head before it is used", error)
        try:
            file = HeadFile.load(self.root, self._checkpoint) if self.root else None
        except PpsdError:
            return None  # an EAGLE-3 head, say
        return file if file is not None and file.drafts and file.info.kind not in ("norm", EAGLE3) else None

    def enough(self) -> list[tuple[Record, int]]:
        """The kept answers. PpsdError where there is too little to learn from, or no head to go on from."""
        if self.load() is None:
            raise PpsdError("there is no head to go on from: train one with `ppsd-run distill`, and give --exit-head")
        folder, learned = self._folder.parent, self.state.learned
        records = [*read_records(folder, self._checkpoint.config.vocab_size)]
        if (fresh := sum(record.tokens for record, id in records if id > learned)) < LEAST_TOKENS:
            raise PpsdError(f"{folder} has {fresh:,} answer tokens that are new: {LEAST_TOKENS:,} are the least")
        return records

    def new_path(self) -> Path:
        """Where a head is to be written before it comes into use."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        numbers = [int(path.stem) for path in self._folder.glob("*.safetensors") if path.stem.isdecimal()]
        return self._folder / f"{max(numbers, default=0) + 1:05}.safetensors"

    def trained(self, learned: int, outcome: Outcome, path: Path | None) -> None:
        """A training has ended. path: of the head that comes into use with it: one that was killed leaves the one
        before, or this one."""
        state = self.state
        if path is not None:
            path.chmod(0o600)
            state.names.append(path.name)
        state.learned = learned
        state.outcomes.append(outcome)
        self._write(state)
        for old in self._folder.glob("*.safetensors"):
            if old.name not in state.names[-MOST:]:
                old.unlink(missing_ok=True)

    def back(self) -> str:
        """The head before is in use again -> its name. PpsdError where no learned head is in use."""
        state = self.state
        if not state.names:
            raise PpsdError("no learned head is in use: there is nothing to go back from")
        state.names.pop()
        self._write(state)
        return state.names[-1] if state.names else "the one that learning began with"

    def _write(self, state: State) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        kept = replace(state, names=state.names[-MOST:], outcomes=state.outcomes[-MOST_OUTCOMES:])
        write_whole(self._folder / "state.json", json.dumps(asdict(kept)).encode(), PRIVATE)
