"""The learning rate: what a run begins with, and what lowers it where nothing is learned.

Rates do not carry over from one width to another. On a hidden size of 576, 5e-3 learns well. On 1536 a run of 30 steps
had an acceptance of 0.02 with 5e-3, 0.04 with 1.5e-3 and 0.19 with 5e-4.

A head that learns does better than a guess by frequency after some 16 steps of 4096 answer tokens; one with ten times
the rate does far worse after 24 (benchmarks/results/2026-11-23-amd-epyc-learning-rates.json). Of several heads the best
one judges: a head on the embeddings was worse than a guess after that, at each of three rates.
"""

from collections.abc import Sequence
from math import inf
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


def trial_steps(steps: int, batch_tokens: int) -> int:
    """Of a run of so many steps; 0: it has no trial."""
    trial = max(TRIAL, -(-TRIAL_TOKENS // batch_tokens))
    return trial if steps >= 2 * trial else 0


def judged(steps: Sequence[Sequence[float]]) -> tuple[float, float]:
    """A trial by the last quarter of its steps: the best head's loss, infinite where one has diverged, and a guess's.

    steps: of each the losses of the heads, and that of who only knows how frequent ids are.
    """
    last = steps[-max(1, len(steps) // 4) :]
    best = (min(losses) if all(loss == loss for loss in losses) else inf for *losses, _ in last)
    return fmean(best), fmean(guess for *_, guess in last)


def next_rate(trials: Sequence[tuple[float, float]]) -> float:
    """What to train with after these trials, which have taught nothing: lower while that helps, else the best one's.

    trials: loss and rate of each.
    """
    best, last = min(trials), trials[-1]
    return best[1] if len(trials) == MOST_TRIALS or best[0] < last[0] < inf else last[1] / LOWER
