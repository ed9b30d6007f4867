"""What drafts cost in one process, and the speed that this lets expect: drafting and verifying in turns."""

from collections.abc import Sequence
from statistics import median

from ..engine import Engine
from ..sampling.params import SamplingParams
from ..statistics import Statistics
from .schedule import MAX_CHUNK

_REPEATS, _PROMPT, _TOKENS = 5, 128, 32


def measured_price(engine: Engine, length: int) -> float:
    """What a draft and its row add to a round, in plain steps: by answers to a made-up prompt, plain ones and ones with
    rounds of `length` drafts in turns."""
    longest = engine.config.max_position_embeddings
    prompt = [i % engine.config.vocab_size for i in range(1, min(_PROMPT, longest // 2) + 1)]
    params = SamplingParams(max_tokens=min(_TOKENS, longest // 4), ignore_eos=True)
    schedules = ("plain", f"eesd:length={length},stop_rule=fixed")
    return median(
        price(*(engine.generate(prompt, params, schedule).run().statistics for schedule in schedules))
        for _ in range(_REPEATS)
    )


def price(plain: Statistics, drafted: Statistics) -> float:
    """The same, of two answers; every draft of the second one was drawn."""
    step = plain.decode_seconds / plain.rounds
    return max((drafted.decode_seconds / step - drafted.rounds) / (drafted.judged + drafted.dropped), 0.0)


def best_length(survival: Sequence[float], price: float) -> tuple[float, int]:
    """(times plain decoding, drafts of a round) of the best fixed number of drafts, 0 among them.

    survival[i]: share of the rounds in which the first i + 1 drafts are all right.
    """
    lengths = range(len(survival) + 1)
    return max(((1 + sum(survival[:length])) / (1 + length * price), length) for length in lengths)


def expected_speed(acceptance: float, price: float) -> float:
    """With the same acceptance in every place; 1 at the least: `auto` need not draft."""
    return best_length([acceptance**place for place in range(1, MAX_CHUNK + 1)], price)[0]
