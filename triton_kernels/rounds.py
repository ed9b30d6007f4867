"""May a loop of rounds on the device go on? What the condition of its graph's WHILE node is set to (csrc/cuda/loop.h).

    ended = START >= LIMIT, or one of the last COMMITTED tokens is one of stops [16]
    open:   LEFT = ROUNDS           again: LEFT = LEFT - 1
    AGAIN = LEFT > 0 and not ended

A verdict comes before each of them; the host ends the text by the same two rules, so it waits for no round that a loop
has not run. stops: int32, -1 where there are fewer.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .state import AGAIN, COMMITTED, LEFT, LIMIT, MAX_ROWS, MAX_STOPS, START
from .verdict import word

_START, _LIMIT, _COMMITTED = map(tl.constexpr, (START, LIMIT, COMMITTED))
_LEFT, _AGAIN = map(tl.constexpr, (LEFT, AGAIN))
_MAX_ROWS, _MAX_STOPS = map(tl.constexpr, (MAX_ROWS, MAX_STOPS))


@triton.jit
def rounds_kernel(text, stops, state, ROUNDS: tl.constexpr, OPEN: tl.constexpr, PDL: tl.constexpr):
    """Grid (1)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    start, committed = word(state, _START), word(state, _COMMITTED)
    row = tl.arange(0, _MAX_ROWS)
    # Not from a cache: a kernel before this one has written it.
    ids = tl.load(text + start - committed + 1 + row, mask=row < committed, other=-2, volatile=True)
    stop = tl.load(stops + tl.arange(0, _MAX_STOPS))
    stopped = tl.sum(tl.sum((ids[:, None] == stop[None, :]).to(tl.int32), axis=1), axis=0) > 0
    left = ROUNDS
    if not OPEN:
        left = word(state, _LEFT) - 1
    again = (left > 0) & (start < word(state, _LIMIT)) & (stopped == 0)
    tl.store(state + _LEFT, left)
    tl.store(state + _AGAIN, again.to(tl.int32))


def open_rounds(text: Tensor, stops: Tensor, state: Tensor, *, rounds: int, pdl: bool = False) -> None:
    """At the beginning of a launch, which runs so many rounds at most."""
    _launch(text, stops, state, rounds, True, pdl)


def round_ended(text: Tensor, stops: Tensor, state: Tensor, *, pdl: bool = False) -> None:
    _launch(text, stops, state, 0, False, pdl)


def _launch(text: Tensor, stops: Tensor, state: Tensor, rounds: int, opens: bool, pdl: bool) -> None:
    rounds_kernel[(1,)](text, stops, state, ROUNDS=rounds, OPEN=opens, PDL=pdl, num_warps=1, launch_pdl=pdl)


def rounds_twin(text: list[int], stops: list[int], state: dict[int, int], rounds: int | None) -> None:
    """rounds: at the beginning of a launch; None: behind a round."""
    state[LEFT] = state[LEFT] - 1 if rounds is None else rounds
    ended = state[START] >= state[LIMIT]
    for token in text[state[START] - state[COMMITTED] + 1 : state[START] + 1]:
        ended = ended or token in stops
    state[AGAIN] = int(state[LEFT] > 0 and not ended)
