"""`auto` on recorded answers, in simulated time: no source of drafts costs what another one brings.

`recorded_answers.npz` has the 34 development prompts, the default model's greedy answers (int4), and what the exit head
that shipped on 2026-11-27 drafts at each of their tokens: [tokens, 8], after 0 to 7 drafts that were right.
`benchmarks/record_answers.py` has made it. The planner and the scheduler are the real ones; time passes as costs say.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

from ppsd_rt import _native
from ppsd_rt._native import Costs, Ngrams, Planner, StageCosts
from ppsd_rt.pipeline.rounds import Limits
from ppsd_rt.pipeline.schedule import Schedule, parse_schedule

VOCAB = 49152
FIXED = parse_schedule("eesd:length=3,stop_rule=fixed")
PASS = {1: 1.0, 2: 1.03, 3: 1.06, 4: 1.10, 5: 1.18, 6: 1.28, 7: 1.38, 8: 1.48, 12: 1.8, 16: 2.15}


def costs(dearer: float = 1.0, draft: float = 0.067) -> Costs:
    """In plain tokens, as on two cores with AVX-512. dearer: by so much more a pass grows with its rows."""
    rows = StageCosts.between({n: 1 + dearer * (share - 1) for n, share in PASS.items()})
    early, late = (tuple(share * row for row in rows) for share in (0.06, 0.94))
    return Costs(StageCosts(early, draft, late))


@dataclass(frozen=True)
class Recorded:
    prompt: list[int]
    answer: list[int]
    drafts: list[list[tuple[int, float]]]  # [token of the answer][place among the drafts after it]

    def seconds(self, steering: Schedule | Planner, costs: Costs, ngrams: Ngrams | None = None) -> float:
        """That all tokens after the first take."""
        text = self.prompt + self.answer

        def draw(position: int, place: int, right: bool) -> tuple[int, float, int, float]:
            newest = position - len(self.prompt) - 1 - place
            known = right and newest >= 0 and place < len(self.drafts[newest])
            return (*(self.drafts[newest][place] if known else (VOCAB, 0.3)), -1, 0.0)

        events = _native.testing.replay(steering, text, len(self.prompt), draw, Limits(len(text)), costs.turns, ngrams)
        assert [token for _, round in events for token in round.committed] == self.answer
        return events[-1][0]

    def better(self, rng: np.random.Generator, share: float) -> "Recorded":
        """With a head that is right where this one is, and in a share of the other places."""
        drafts = []
        for token, row in enumerate(self.drafts):
            truth = self.answer[token + 1 : token + 1 + len(row)]
            drafts.append(
                [(t, c) if d == t or rng.random() < share else (d, c) for (d, c), t in zip(row, truth, strict=False)]
            )
        return Recorded(self.prompt, self.answer, drafts)


@pytest.fixture(scope="module")
def recorded() -> list[Recorded]:
    with np.load(Path(__file__).with_name("recorded_answers.npz")) as file:
        prompts, answers = (
            [part.tolist() for part in np.split(file[name], np.cumsum(file[lengths])[:-1])]
            for name, lengths in (("prompts", "prompt_lengths"), ("answers", "answer_lengths"))
        )
        cuts = np.cumsum(file["answer_lengths"])[:-1]
        drafts = np.split(file["drafts"], cuts), np.split(file["confidences"] / 255, cuts)
    return [
        Recorded(
            prompt,
            answer,
            [list(zip(ids.tolist(), sure.tolist(), strict=True)) for ids, sure in zip(tokens, chances, strict=True)],
        )
        for prompt, answer, tokens, chances in zip(prompts, answers, *drafts, strict=True)
    ]


def auto(c: Costs, lookup: int = 3, recycle: bool = True) -> Planner:
    return Planner(c, 0.65, lookup=lookup, recycle=recycle)


def spent(recorded: list[Recorded], c: Costs, planner: Planner, ngrams: Callable[[], Ngrams | None]) -> list[float]:
    return [one.seconds(planner, c, ngrams()) for one in recorded]


@pytest.mark.parametrize("dearer", [1.0, 2.0])
def test_auto_is_as_fast_as_the_best_of_its_sources(recorded, dearer):
    """Which of them it is, `auto` must find out in the text; that costs something in short ones."""
    c = costs(dearer)
    ngrams = Ngrams(1 << 22)
    planner = auto(c)
    shares = []
    for one in recorded:
        best = min(one.seconds(schedule, c) for schedule in (FIXED, parse_schedule("lookup"), parse_schedule("plain")))
        shares.append(best / one.seconds(planner, c, ngrams))
    assert mean(shares) >= 1.0
    assert min(shares) >= 0.88
    assert sum(share < 0.98 for share in shares) <= 6


def test_a_table_that_is_nearly_always_wrong_costs_little(recorded):
    rng = np.random.default_rng(0)

    def wrong() -> Ngrams:
        ngrams = Ngrams(1 << 22)
        ids = np.arange(VOCAB)
        ngrams.know(np.stack([np.full(VOCAB, -1), ids, rng.integers(0, VOCAB, VOCAB), rng.integers(0, 8, VOCAB)], 1))
        return ngrams

    c = costs()
    without = spent(recorded, c, auto(c), lambda: Ngrams(1 << 20))
    beside = spent(recorded, c, auto(c), wrong)
    assert sum(beside) <= 1.02 * sum(without)


def test_other_answers_make_the_next_ones_faster(recorded):
    """The same prompts again, which is as good as it gets."""
    c, ngrams = costs(), Ngrams()
    first, again = (sum(spent(recorded, c, auto(c), lambda: ngrams)) for _ in range(2))
    assert again < 0.5 * first
