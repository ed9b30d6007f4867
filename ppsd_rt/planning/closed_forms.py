"""Closed forms: the speed-ups that two papers derive by hand, put beside what the simulator says.

Both take the acceptance to be one number, the same for every draft token whatever came before, and nothing to disturb
the stages. They are given the costs of the stages as they are, uneven or with links, and fall back to the papers' own
formulas where all stages are equal, heads are free and messages take no time.
"""

from .._native import StageCosts
from ..pipeline.schedule import Schedule
from ..pipeline.stop_rules import FixedLength


def closed_form(schedule: Schedule, costs: StageCosts, acceptance: float) -> float | None:
    """How many times faster than plain decoding on the same stages; None: no formula is known for the schedule."""
    if not schedule.drafts:
        return 1.0
    if not isinstance(schedule.stop_rule, FixedLength):
        return None
    if schedule.overlap:
        return published_ppsd(costs, acceptance, schedule.lookahead) if schedule.max_chunk == 1 else None
    if schedule.first_chunk == schedule.max_chunk == schedule.lookahead:
        return draft_then_verify(costs, acceptance, schedule.max_chunk)
    return None


def published_ppsd(costs: StageCosts, acceptance: float, lookahead: int) -> float:
    """Chunks of 1 with overlap: n / (alpha + (1 - alpha) n) for n equal stages (PPSD, arXiv 2509.19368).

    An accepted token comes one slowest stage after the token before it; after a rejection the next one has the whole
    pipeline to pass: stages, exit head and links. Where `lookahead` drafts do not fill the pipeline, every run of
    lookahead + 1 accepted tokens waits for the rest of it.
    What it leaves out: a lone verification stage that is slower than drafting finds the last committed token's row
    waiting, which goes along with the next draft token, so that one pass gives two tokens.
    """
    plain = costs.plain_step
    latency = plain + costs.draft_step - costs.row_step
    slowest = max(costs.draft_step, costs.link_row, *(stage[0] for stage in costs.stages))
    window = lookahead + 1
    wait = max(latency - window * slowest, 0.0) * acceptance**window / sum(acceptance**place for place in range(window))
    return plain / (acceptance * slowest + (1 - acceptance) * latency + wait)


def draft_then_verify(costs: StageCosts, acceptance: float, length: int) -> float:
    """Rounds of `length` = K drafts: (1 - alpha^(K+1)) / (1 - alpha) tokens per K t_draft + t_verify(K + 1).

    t_verify holds the last draft token's row through the draft stage, all verification stages and the links.
    """
    tokens = sum(acceptance**place for place in range(length + 1))
    return costs.plain_step * tokens / costs.round(length)
