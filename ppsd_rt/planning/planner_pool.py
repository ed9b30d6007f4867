"""The planners of a backend: one for each kind of answer, each of which goes on from answer to answer."""

from dataclasses import dataclass

from .._native import Costs
from ..backend import Oracle
from ..models.head_file import HeadInfo
from ..pipeline.schedule import Auto
from ..sampling.params import SamplingParams
from .planner import Planner, prior


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
