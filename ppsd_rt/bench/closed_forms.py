"""Closed forms: the speed-ups that two papers derive by hand, put beside what the simulator says.

Both take the acceptance to be one number, the same for every draft token whatever came before, and nothing to disturb
the stages. They take the stages as they are, uneven or with links, and fall back to the papers' own formulas where all
stages are equal, heads are free and messages take no time.
"""

from dataclasses import dataclass

from ..pipeline.schedule import Schedule
from ..pipeline.stop_rules import FixedLength


@dataclass(frozen=True)
class Pipeline:
    """stages: seconds of each one for one row, the draft stage first, without the exit head; the last one's with the LM
    head. head: seconds of a draft token. row_share: of the first row's seconds, what each further row of a pass adds.
    link: seconds that every message takes, and the verdict."""

    stages: tuple[float, ...]
    head: float = 0.0
    row_share: float = 0.0
    link: float = 0.0

    def more(self, rows: int) -> float:
        """How many times longer than one row so many take."""
        return 1 + self.row_share * (rows - 1)

    @property
    def plain_step(self) -> float:
        """Seconds of a token without drafts."""
        return sum(self.stages) + len(self.stages) * self.link


def closed_form(schedule: Schedule, pipeline: Pipeline, acceptance: float) -> float | None:
    """How many times faster than plain decoding on the same stages; None: no formula is known for the schedule."""
    if not schedule.drafts:
        return 1.0
    if not isinstance(schedule.stop_rule, FixedLength):
        return None
    if schedule.overlap:
        return published_ppsd(pipeline, acceptance, schedule.lookahead) if schedule.max_chunk == 1 else None
    if schedule.first_chunk == schedule.max_chunk == schedule.lookahead:
        return draft_then_verify(pipeline, acceptance, schedule.max_chunk)
    return None


def published_ppsd(pipeline: Pipeline, acceptance: float, lookahead: int) -> float:
    """Chunks of 1 with overlap: n / (alpha + (1 - alpha) n) for n equal stages (PPSD, arXiv 2509.19368).

    An accepted token comes one slowest stage after the token before it; after a rejection the next one has the whole
    pipeline to pass: stages, exit head and links. Where `lookahead` drafts do not fill the pipeline, every run of
    lookahead + 1 accepted tokens waits for the rest of it.
    What it leaves out: a lone verification stage that is slower than drafting finds the last committed token's row
    waiting, which goes along with the next draft token, so that one pass gives two tokens.
    """
    latency = pipeline.plain_step + pipeline.head
    slowest = max(pipeline.stages[0] + pipeline.head, *pipeline.stages[1:])
    window = lookahead + 1
    wait = max(latency - window * slowest, 0.0) * acceptance**window / sum(acceptance**place for place in range(window))
    return pipeline.plain_step / (acceptance * slowest + (1 - acceptance) * latency + wait)


def draft_then_verify(pipeline: Pipeline, acceptance: float, length: int) -> float:
    """Rounds of `length` = K drafts: (1 - alpha^(K+1)) / (1 - alpha) tokens per K t_draft + t_verify(K + 1).

    t_verify holds the last draft token's row through the draft stage, all verification stages and the links.
    """
    step, *verify = pipeline.stages
    row = step + sum(verify) * pipeline.more(length + 1) + len(pipeline.stages) * pipeline.link
    tokens = sum(acceptance**place for place in range(length + 1))
    return pipeline.plain_step * tokens / (length * (step + pipeline.head) + row)
