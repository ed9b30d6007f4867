"""What an answer cost and how speculation did; docs/reference/statistics.md defines what every report prints."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from .pipeline.rounds import Round


@dataclass
class Statistics:
    """Counts and times of one answer; derived figures are properties and appear in `as_dict`."""

    schedule: str = ""
    backend: str = ""
    dtype: str = ""
    threads: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    seconds: float = 0.0
    ttft_seconds: float = 0.0
    rounds: int = 0
    rows: int = 0
    accepted: int = 0
    judged: int = 0
    dropped: int = 0
    copied_judged: int = 0
    copied_accepted: int = 0
    recycled_judged: int = 0  # of those that were copied, those from other texts
    recycled_accepted: int = 0
    accepted_histogram: Counter[int] = field(default_factory=Counter)  # accepted in a round -> rounds
    judged_by_position: Counter[int] = field(default_factory=Counter)  # place in the chunk from 1 -> draft tokens
    accepted_by_position: Counter[int] = field(default_factory=Counter)

    def add(self, round: Round, seconds: float) -> None:
        """Count a round that took `seconds` (from the previous round, the time of the caller not included)."""
        self.tokens += len(round.committed)
        self.seconds += seconds
        if round.prompt:
            self.ttft_seconds = self.seconds
            return
        self.rounds += 1
        self.rows += round.rows
        self.dropped += round.dropped
        self.accepted_histogram[round.accepted] += 1
        for place, draft in enumerate(round.judged, 1):
            right = place <= round.accepted
            if draft.copied:
                self.copied_judged += 1
                self.copied_accepted += right
                self.recycled_judged += draft.recycled
                self.recycled_accepted += draft.recycled and right
            else:
                self.judged += 1
                self.accepted += right
                self.judged_by_position[place] += 1
                self.accepted_by_position[place] += right

    @property
    def acceptance(self) -> float | None:
        """P(the exit head's next draft token is accepted | all before it were); None when none was judged."""
        return self.accepted / self.judged if self.judged else None

    @property
    def copied_acceptance(self) -> float | None:
        """The same of copied draft tokens."""
        return self.copied_accepted / self.copied_judged if self.copied_judged else None

    @property
    def acceptance_by_position(self) -> list[float]:
        return [self.accepted_by_position[p] / n for p, n in sorted(self.judged_by_position.items())]

    @property
    def tokens_per_round(self) -> float | None:
        """Committed tokens per verification pass (the pass over the prompt and its token not counted)."""
        return (self.tokens - 1) / self.rounds if self.rounds else None

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Without the prompt and the first token."""
        return (self.tokens - 1) / self.decode_seconds if self.tokens > 1 and self.decode_seconds > 0 else None

    @property
    def decode_seconds(self) -> float:
        return self.seconds - self.ttft_seconds

    @property
    def ms_per_token(self) -> float | None:
        rate = self.decode_tokens_per_second
        return 1000 / rate if rate else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: every field, every derived figure; counters as lists that begin at 0 (or, by position, at 1)."""
        histogram = [self.accepted_histogram[n] for n in range(max(self.accepted_histogram, default=-1) + 1)]
        raw = asdict(self)
        del raw["judged_by_position"], raw["accepted_by_position"]
        derived = {
            name: getattr(self, name)
            for name in (
                "acceptance",
                "acceptance_by_position",
                "copied_acceptance",
                "tokens_per_round",
                "tokens_per_second",
                "decode_tokens_per_second",
                "ms_per_token",
            )
        }
        return {**raw, **derived, "accepted_histogram": histogram}
