"""What happened while an answer was decoded: pieces of work, draft tokens and verdicts, each with its time.

The times are those of the backend's timeline. It has a mark for every event that the pipeline reports, in the order of
the events (`trace.MARKS`): so event n happened at mark n.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import median

from ...backend import RunOptions
from ...engine import Engine
from ...errors import PpsdError, UsageError
from ...generation import Committed, Prompt
from ...pipeline.rounds import Drafted
from ...pipeline.schedule import Auto, Schedule
from ...pipeline.split import cut_layers
from ...sampling.params import SamplingParams
from ...trace import MARKS, Span

MARKED = ("cpu", "torch", "ranks")  # backends whose timelines have marks


@dataclass(frozen=True)
class DraftToken:
    """drawn, judged: when (microseconds). fate: `accepted`, `rejected`, or `dropped` before it was judged."""

    position: int
    text: str
    drawn: float
    judged: float
    fate: str


@dataclass(frozen=True)
class Verdict:
    """at: microseconds. tokens: what was committed, as (text, origin); origins are those of `engine.Token`."""

    at: float
    tokens: tuple[tuple[str, str], ...]
    dropped: int = 0
    rolled_back: bool = False


@dataclass(frozen=True)
class Recording:
    """Times are microseconds since the prompt's pass was done. stages: what each track of the spans is."""

    title: str
    stages: tuple[str, ...]
    spans: tuple[Span, ...]
    drafts: tuple[DraftToken, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def end(self) -> float:
        return self.verdicts[-1].at if self.verdicts else 0.0

    def moments(self) -> list[float]:
        """When something was drawn or judged, in order."""
        return sorted({draft.drawn for draft in self.drafts} | {verdict.at for verdict in self.verdicts})

    def step(self) -> float:
        """Microseconds of a usual draft step; of a usual pass where nothing is drafted."""
        lengths: dict[str, list[float]] = {"draft": [], "verify": []}
        for name, _, _, begin, end in self.spans:
            if name in lengths:
                lengths[name].append(end - begin)
        return median(lengths["draft"] or lengths["verify"] or [1000.0])


def record(
    engine: Engine, prompt: Prompt, params: SamplingParams, schedule: Schedule | Auto, stages: int | Sequence[int] = 1
) -> Recording:
    """Decode an answer and keep what happened. stages: the engine's. UsageError: this backend keeps no such record."""
    backend = engine.backend
    if backend.name not in MARKED:
        raise UsageError(f"the {backend.name} backend does not record when drafts and verdicts came: use --backend cpu")
    generation = engine.generate(prompt, params, schedule, RunOptions(report_drafts=True, trace=True))
    events = list(generation.events())
    spans = backend.spans()
    marks = [begin for name, _, _, begin, _ in spans if name in MARKS]
    if len(marks) < len(events):
        raise PpsdError("this answer has no timeline, which a short one has: lower --max-tokens")
    drafts, verdicts = told(events, marks, lambda id: engine.tokenizer.token_bytes(id).decode(errors="replace"))
    begun = verdicts[0].at
    return Recording(
        f"{generation.statistics.schedule}, {backend.name} {backend.dtype}",
        stage_names(engine, 1 + max((track for _, track, *_ in spans), default=1), stages),
        tuple(_since(begun, spans)),
        tuple(replace(draft, drawn=draft.drawn - begun, judged=draft.judged - begun) for draft in drafts),
        tuple(replace(verdict, at=verdict.at - begun) for verdict in verdicts),
    )


def told(
    events: Sequence[Committed | Drafted], times: Sequence[float], text_of: Callable[[int], str]
) -> tuple[list[DraftToken], list[Verdict]]:
    """What became of the draft tokens, in the order in which they were drawn, and what every verdict committed."""
    drafts: list[DraftToken] = []
    verdicts: list[Verdict] = []
    waiting: dict[int, int] = {}  # position -> place in `drafts`
    end = 0  # of the committed text

    def judge(position: int, at: float, fate: str) -> None:
        place = waiting.pop(position)
        drafts[place] = replace(drafts[place], judged=at, fate=fate)

    for event, at in zip(events, times, strict=False):  # a mark more than events: the consumer ended the answer
        if isinstance(event, Drafted):
            drafts.append(DraftToken(event.position, text_of(event.token), at, at, "dropped"))
            if event.position >= end:  # else a verdict has overtaken it
                waiting[event.position] = len(drafts) - 1
            continue
        round = event.round
        for place in range(len(round.judged)):
            if round.position + place in waiting:
                judge(round.position + place, at, "accepted" if place < round.accepted else "rejected")
        if round.corrected:
            for position in list(waiting):
                judge(position, at, "dropped")
        end = round.position + len(round.committed)
        tokens = tuple((token.text, token.origin) for token in event.tokens)
        verdicts.append(Verdict(at, tokens, round.dropped, round.corrected))
    for position in list(waiting):  # at the end of the answer
        judge(position, verdicts[-1].at, "dropped")
    return drafts, verdicts


def stage_names(engine: Engine, tracks: int, stages: int | Sequence[int]) -> tuple[str, ...]:
    """What the draft stage and each track of verification is. Where stages take turns they have one track together."""
    head, layers = engine.head, engine.config.num_hidden_layers
    first = head.exit_layer if head else 0
    sizes = engine.backend.facts().get("layers") if engine.backend.name == "ranks" else None
    if sizes:
        first, cuts = sizes[0], list(accumulate(sizes))[1:-1]
    else:
        cuts = cut_layers(first, layers, stages) if tracks > 2 else []
    early = _layers(0, first) if first else "embedding"
    ends = [first, *cuts, layers]
    return (
        f"draft: {early}{', exit head' * bool(head)}",
        *(f"verify: {_layers(begin, end)}" for begin, end in pairwise(ends)),
    )


def _layers(begin: int, end: int) -> str:
    return f"layers {begin + 1}-{end}" if end - begin > 1 else f"layer {end}"


def _since(begun: float, spans: Sequence[Span]) -> list[Span]:
    """The work after `begun`. What is named a prompt there is the pass that another schedule begins with."""
    kept = []
    for name, track, rows, begin, end in spans:
        if name not in MARKS and name != "wait" and begin >= begun:
            kept.append(
                (name.replace("prompt", "verify" if track else "draft"), track, rows, begin - begun, end - begun)
            )
    return sorted(kept, key=lambda span: (span[3], span[1]))
