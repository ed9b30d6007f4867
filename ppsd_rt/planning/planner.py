"""`auto`: what the stages cost on this machine, measured in the first runs and kept; the planner that works with it.

The planner itself is csrc/pipeline/planner.h: after every round it predicts the speed of plain decoding, of drafting K
tokens and then verifying them, and of overlapping both, from these costs and the running acceptance.
"""

import hashlib
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

from .. import _native
from .._native import Costs, Planner, StageCosts
from ..backend import Oracle
from ..cpu.machine import cpu_name
from ..files import cache as cache_file
from ..models.cache import cache_dir
from ..models.head_file import HeadInfo
from ..pipeline.schedule import Auto
from ..sampling.params import SamplingParams

MOMENTS = 3  # calibrations that are kept, each of another run
CROWDED = 8  # the same, of crowded ones, while calm ones are too few
PATIENCE = 60.0  # seconds before a calm moment is looked for again; twice as many after each crowded one
UNKNOWN = 0.5  # acceptance of a head whose file says nothing of it: even odds
_LARGEST = 1 << 20  # bytes of a file of calibrations: more than there ever are


def costs_here(path: Path, measure: Callable[[], Costs], again: bool = False) -> Costs:
    """What earlier runs have measured, and this one: it measures too while there are too few calm ones, or `again`.

    One moment may be a bad one (a busy neighbour doubles what costs arithmetic, and leaves what waits for memory), and
    drafts would be judged by it for good. Crowded ones count only where there are no others, which later runs look for,
    at ever longer intervals. `again`: as measured now.
    """
    moments = _known(path)
    if not again and not _wanted(moments):
        return typical([moment.costs for moment in moments])
    now = measure()
    moments = [*moments, Moment(now, time.time())]
    calm = [moment for moment in moments if not moment.costs.crowded][-MOMENTS:]
    crowded = [moment for moment in moments if moment.costs.crowded][-CROWDED:]
    kept = [*(crowded if len(calm) < MOMENTS else []), *calm]
    cache_file.write(path, json.dumps([{"costs": m.costs.to_dict(), "at": m.at} for m in kept]).encode())
    return now if again else typical([moment.costs for moment in kept])


@dataclass(frozen=True)
class Moment:
    """A calibration, and when it was: seconds since 1970."""

    costs: Costs
    at: float


def _wanted(moments: Sequence[Moment]) -> bool:
    """Whether one more would tell something."""
    crowded = sum(moment.costs.crowded for moment in moments)
    if len(moments) - crowded >= MOMENTS:
        return False
    waited = time.time() - max((moment.at for moment in moments), default=0.0)
    return len(moments) < MOMENTS or not 0 <= waited < PATIENCE * 2**crowded


def typical(moments: Sequence[Costs]) -> Costs:
    """Of every cost, in shares of a plain token of its moment, the lower median; times that of the plain tokens.

    Of crowded moments only where there are no others: and they do not say what overlapping would bring, for what it is
    compared with did not have its threads.
    """
    calm = [costs for costs in moments if not costs.crowded]
    moments = calm or [Costs(costs.turns, None, True) for costs in moments]
    plains = [costs.plain_seconds for costs in moments]
    plain = median_low(plains)
    overlapped = [costs.overlapped.to_dict() for costs in moments if costs.overlapped]
    try:
        return Costs(
            StageCosts(**_between([costs.turns.to_dict() for costs in moments], plains, plain)),
            StageCosts(**_between(overlapped, plains, plain)) if len(overlapped) == len(moments) else None,
            not calm,
        )
    except ValueError:  # they have so little in common that what is between them cannot be: the newest then
        return moments[-1]


def _between(values: Sequence[Any], plains: Sequence[float], plain: float) -> Any:
    """Of each number in values of the same form, the lower median in shares of `plains`; times `plain`."""
    first = values[0]
    if isinstance(first, dict):
        return {
            name: first[name] if name.endswith("interference") else _between([v[name] for v in values], plains, plain)
            for name in first
        }
    if isinstance(first, list | tuple):
        return [_between(places, plains, plain) for places in zip(*values, strict=True)]
    return plain * median_low([value / of for value, of in zip(values, plains, strict=True)])


def _known(path: Path) -> list[Moment]:
    """None of them where the file is not there, is damaged, or holds what no run can have written."""
    try:
        moments = [_moment(values) for values in json.loads(cache_file.read(path, _LARGEST))]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    return moments if len(moments) <= MOMENTS + CROWDED else []


def _moment(values: dict[str, Any]) -> Moment:
    at = values["at"]
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at <= time.time():
        raise ValueError(f"no time at which a calibration can have been: {str(at)[:40]}")
    turns, overlapped, crowded = (values["costs"][name] for name in ("turns", "overlapped", "crowded"))
    return Moment(Costs(StageCosts(**turns), overlapped and StageCosts(**overlapped), crowded), float(at))


def costs_path(
    model_hash: str, head: HeadInfo, draft_vocabulary: int, dtypes: Sequence[str], threads: int, isa: str
) -> Path:
    """One file for each machine, build, model, kind of head, formats (of both and of the KV cache) and thread count."""
    build = Path(_native.__file__).stat()
    machine = [platform.node(), cpu_name(), _native.usable_cores(), isa]
    what = [build.st_size, build.st_mtime_ns, *machine, model_hash, *dtypes, threads]
    sizes = head.intermediate_size, head.feedback_rank, draft_vocabulary
    key = json.dumps([*what, head.kind, head.exit_layer, *sizes])
    return cache_dir() / "calibration" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def prior(head: HeadInfo) -> float:
    """The acceptance to begin with: what the head's file says of held-out text."""
    value = head.acceptance.get("held_out_greedy", UNKNOWN)
    return float(value) if isinstance(value, (int, float)) and 0 <= value <= 1 else UNKNOWN


@dataclass(frozen=True)
class AnswerKind:
    """Answers of one kind teach one planner. Sampled ones are harder to foresee; what an oracle feigns stays apart.

    oracle: its acceptance. lookup, recycle: of their schedules. siblings: may drafts have some? overlaps: may stages
    work side by side, where others of the same backend take turns?
    """

    sampled: bool
    oracle: float | None
    lookup: int
    siblings: bool
    recycle: bool
    overlaps: bool = False


def kind_of(
    schedule: Auto,
    params: SamplingParams,
    oracle: Oracle | None = None,
    *,
    siblings: bool = True,
) -> AnswerKind:
    """siblings: can the backend do it? An oracle copies nothing."""
    beside = siblings and schedule.siblings and not params.looks_back
    if oracle is None:
        return AnswerKind(params.temperature > 0, None, schedule.lookup, beside, schedule.recycle)
    return AnswerKind(params.temperature > 0, oracle.acceptance, 0, beside and oracle.second > 0, False)


class PlannerPool:
    """used: the planner of the newest answer."""

    def __init__(self) -> None:
        self._planners: dict[AnswerKind, Planner] = {}
        self.used: Planner | None = None

    def planner(self, kind: AnswerKind, costs: Costs, head: HeadInfo) -> Planner:
        if kind not in self._planners:
            self._planners[kind] = Planner(costs, prior(head), kind.lookup, kind.siblings, recycle=kind.recycle)
        self.used = self._planners[kind]
        return self.used

    def clear(self) -> None:
        """Costs are others now: planners begin anew."""
        self._planners.clear()


def explain(planner: Planner, costs: Costs) -> str:
    """Predictions at the present acceptance beside what the rounds so far took."""
    predictions = planner.predictions()
    plain, *turns = [p for p in predictions if p.mode != "overlap"]
    best = max(turns, key=lambda p: p.tokens_per_second)
    shown = [f"{p.length}: {p.tokens_per_second:.0f}" for p in turns if p.length in (1, 2, 3, 4, 6, 8, 12, 15)]
    lines = [
        f"acceptance {planner.acceptance:.2f}; a plain token {1000 * costs.plain_seconds:.2f} ms, "
        f"a draft {1000 * costs.turns.draft_step:.2f} ms "
        f"(the first of a round {1000 * (costs.turns.first_draft or costs.turns.draft_step):.2f}), "
        f"a pass over 1/4/8/16 rows {'/'.join(f'{1000 * costs.turns.verify[n - 1]:.2f}' for n in (1, 4, 8, 16))} ms",
        "predicted now, tokens/s: "
        + f"plain {plain.tokens_per_second:.0f}; draft then verify {', '.join(shown)}"
        + f" (best {best.length}: {best.tokens_per_second:.0f})"
        + "".join(f"; overlapped {p.tokens_per_second:.0f}" for p in predictions if p.mode == "overlap"),
    ]
    for mode, measured in planner.measured().items():
        if measured.rounds:
            lines.append(
                f"measured, {mode}: {measured.rounds} rounds, {measured.tokens} tokens, "
                f"{measured.tokens / measured.seconds:.0f} tokens/s "
                f"(predicted {measured.tokens / measured.predicted_seconds:.0f})"
            )
    return "\n".join(lines)
