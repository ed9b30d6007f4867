"""What a front asks of an engine in another process, and what it must know of that engine."""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Protocol

from .. import __version__
from ..backend import Cancellation, RunOptions, kv_dtype_of
from ..engine import Engine
from ..models.head_file import HeadInfo
from ..pipeline.rounds import Drafted, Limits, Logprob, Round
from ..pipeline.schedule import Auto, Schedule
from ..sampling.params import SamplingParams


class EngineLost(Exception):
    """The engine is gone, or as good as gone: what it was asked for has to be asked again."""


@dataclass(frozen=True)
class Ask:
    """An answer, or the rest of one: `Backend.rounds` has the meaning of each. params: as a backend takes them."""

    prompt: list[int]
    params: SamplingParams
    schedule: Schedule | Auto
    limits: Limits
    report_drafts: bool = False
    owner: int | None = 0


def rounds_of(engine: Engine, ask: Ask, cancellation: Cancellation) -> Generator[Round | Drafted, None, None]:
    """On the engine itself."""
    masks = engine.compile(ask.params.grammar) if ask.params.grammar else None
    options = RunOptions(report_drafts=ask.report_drafts, masks=masks, owner=ask.owner)
    return engine.backend.rounds(ask.prompt, ask.params, ask.schedule, ask.limits, options, cancellation)


@dataclass(frozen=True)
class Facts:
    """bits: what decides the bits of an answer. Engines that differ in it cannot continue each other's answers.

    The others are attributes of the engine's backend.
    """

    bits: str
    name: str
    concurrency: int
    longest: int
    device: str
    dtype: str
    threads: int
    copies: bool
    extras: list[str]
    head: HeadInfo | None
    facts: dict[str, object] = field(default_factory=dict)


def facts_of(engine: Engine) -> Facts:
    backend, facts = engine.backend, engine.backend.facts()
    kind = [facts.get(name) for name in ("isa", "gpu", "torch", "cpu_capability")]
    device = backend.device.partition(":")[0]
    bits = (__version__, engine.checkpoint.hash, device, backend.dtype, kv_dtype_of(backend), *kind)
    same = ("name", "concurrency", "longest", "device", "dtype", "threads", "copies", "head")
    attributes: dict[str, Any] = {name: getattr(backend, name) for name in same}
    return Facts(bits=" ".join(map(str, bits)), extras=sorted(backend.extras), facts=facts, **attributes)


class EngineSlot(Protocol):
    """Room for one answer on an engine. Both methods raise EngineLost, and what the engine raises."""

    def events(self, ask: Ask, cancellation: Cancellation) -> Generator[Round | Drafted, None, None]: ...
    def logprobs(self, ids: list[int], top: int) -> list[Logprob]: ...
    def leave(self) -> None:
        """Others may have it."""


class EngineSlots(Protocol):
    def take(self, prompt: list[int], cancellation: Cancellation) -> EngineSlot | None:
        """Waits until an engine has room. None: it was cancelled meanwhile. PpsdError: no engine will come any more."""

    def tell(self, kind: str, **fields: object) -> None:
        """To every engine, those to come too: `recall` (ids, owner), or `head` (hash, head): the last one counts."""
