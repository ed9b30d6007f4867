"""The learning rate: what a run begins with, and what lowers it where nothing is learned.

Rates do not carry over from one width to another. On a hidden size of 576, 5e-3 learns well. On 1536 a run of 30 steps
had an acceptance of 0.02 with 5e-3, 0.04 with 1.5e-3 and 0.19 with 5e-4.

A head that learns does better than a guess by frequency after some 16 steps of 4096 answer tokens; one with ten times
the rate does far worse after 24 (benchmarks/results/2026-11-23-amd-epyc-learning-rates.json). Of several heads the best
one judges: a head on the embeddings was worse than a guess after that, at each of three rates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

KNOWN_WIDTH, KNOWN_RATE = 576, 5e-3
EXPONENT = 2.35  # through both widths above
TRIAL = 25  # steps, or more of smaller batches, after which heads are judged, unless there are not twice as many
TRIAL_TOKENS = TRIAL * 4096  # at least
GOES_ON = 0.6  # of that rate, for a head that has been trained before (docs/history/exit-heads.md)
ENOUGH_STEPS = 300  # fewer teach such a head little, and at that rate undo what it has learned
LOWER = 3.0  # the next rate is so much lower
MOST_TRIALS = 5


def first_rate(hidden_size: int) -> float:
    """For a model of this width; no higher for narrower ones."""
    return float(f"{KNOWN_RATE * min(1.0, (KNOWN_WIDTH / hidden_size) ** EXPONENT):.2g}")


def rate_to_go_on(hidden_size: int, steps: float) -> float:
    """For a head that has been trained before, in a run of so many steps."""
    return float(f"{first_rate(hidden_size) * GOES_ON * min(1.0, (steps / ENOUGH_STEPS) ** 0.5):.2g}")


@dataclass(frozen=True)
class Trial:
    """How the first steps at a rate ended: the loss of the best head, and of who only knows how frequent ids are."""

    rate: float
    loss: float
    guess: float

    @property
    def learns(self) -> bool:
        return self.loss < self.guess  # false for NaN


def trial_steps(steps: int, batch_tokens: int) -> int:
    """Of a run of so many steps; 0: it has no trial."""
    trial = max(TRIAL, -(-TRIAL_TOKENS // batch_tokens))
    return trial if steps >= 2 * trial else 0


def judging(losses: Sequence[float]) -> float:
    """Of a step's losses, one of each head: the best head's; NaN where one of them is."""
    return min(losses, key=lambda loss: (loss == loss, loss))


def ended(rate: float, losses: Sequence[float], guesses: Sequence[float]) -> Trial:
    """By the last quarter of a trial's steps; losses: those that judge each step."""
    last = -max(1, len(losses) // 4)
    return Trial(rate, fmean(losses[last:]), fmean(guesses[last:]))


def next_rate(trials: Sequence[Trial]) -> float | None:
    """After these trials, the last of which did not learn: the rate to begin anew with; None: go on with this one.

    Lower as long as that helps; else that of the best trial.
    """
    *before, last = trials
    best = min(reversed(trials), key=lambda trial: (trial.loss != trial.loss, trial.loss))
    if before and best is not last and last.loss == last.loss:
        return best.rate
    if len(trials) == MOST_TRIALS:
        return None if best is last else best.rate
    return last.rate / LOWER
