"""What the workers of a pipeline did with their time: stalls and wasted work, from a timeline's spans."""

from collections.abc import Iterable
from dataclasses import dataclass

from ..trace import Span


@dataclass(frozen=True)
class StageUse:
    """seconds: that the stage worked, on what was dropped too. rows, passes: that it began to work on."""

    seconds: float = 0.0
    rows: int = 0
    passes: int = 0
    dropped_passes: int = 0  # that a verdict made void while they were under way


@dataclass(frozen=True)
class Utilisation:
    """Of an answer of `tokens` tokens after the prompt's, in `seconds`; one StageUse for each stage, draft first."""

    stages: tuple[StageUse, ...]
    tokens: int
    seconds: float

    @property
    def stall(self) -> float:
        """Share of the time that verification stages wait, all of them taken together."""
        verifying = self.stages[1:]
        return 1 - sum(stage.seconds for stage in verifying) / (len(verifying) * self.seconds)

    @property
    def wasted_verification(self) -> float:
        """Share of the rows in verification stages that no token came from: a token needs one in every stage."""
        verifying = self.stages[1:]
        return 1 - self.tokens * len(verifying) / sum(stage.rows for stage in verifying)

    @property
    def wasted_drafting(self) -> float:
        """Share of the rows in the draft stage that no token came from."""
        return 1 - self.tokens / self.stages[0].rows


def utilisation(spans: Iterable[Span], stages: int, tokens: int, seconds: float) -> Utilisation:
    """From `Simulation.spans`; `stages` counts the draft stage too."""
    uses = [StageUse()] * stages
    for name, track, rows, begin, end in spans:
        use = uses[track]
        dropped = use.dropped_passes + name.startswith("dropped")
        uses[track] = StageUse(use.seconds + (end - begin) / 1e6, use.rows + rows, use.passes + 1, dropped)
    return Utilisation(tuple(uses), tokens, seconds)
