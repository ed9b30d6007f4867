"""Draft, verification and verdict, on the device: which rows a pass takes, what is committed, where the next one is.

    text [capacity] int32: at positions up to START the committed tokens, behind them the draft tokens, up to DRAFTED
    choices [16] int32: the model's own token for position START + r + 1, of each row r of the pass

    accepted  = draft tokens at START + 1.. that equal the choices, up to the first that does not
    committed = accepted + 1 where the pass saw a disagreement (corrected) or no draft token was left (bonus),
                else accepted: the text already goes on with draft tokens of the next pass

Afterwards text holds the committed tokens, TOKEN the last of them, START its position: the next pass's first row. A
disagreement raises EPOCH and ends the draft there. A pass that was begun in an older epoch gets no verdict: ACCEPTED
and COMMITTED are 0 and all else stays.

Each pass has state words of its own (`early`, `late`), which one of the `begin` kernels sets before it and which hold
until its end; `state` are those of the answer, changed by `drafted` and `verdict` alone. early[START] is also how
far the early layers have come: verification takes only rows that have been through them. Every kernel here is one
program; those that touch `state` must run in an order (one stream, or events). The host keeps drafts within the text's
capacity.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .state import ACCEPTED, COMMITTED, DRAFTED, EPOCH, MAX_ROWS, ROWS, START, TOKEN

_ROWS, _START, _EPOCH, _TOKEN = tl.constexpr(ROWS), tl.constexpr(START), tl.constexpr(EPOCH), tl.constexpr(TOKEN)
_ACCEPTED, _COMMITTED, _DRAFTED = tl.constexpr(ACCEPTED), tl.constexpr(COMMITTED), tl.constexpr(DRAFTED)
_MAX_ROWS = tl.constexpr(MAX_ROWS)


@triton.jit
def verdict_kernel(text, choices, late, state, PDL: tl.constexpr):
    """Grid (1)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rows, start, drafted = tl.load(late + _ROWS), tl.load(late + _START), tl.load(state + _DRAFTED)
    if (rows > 0) & (tl.load(late + _EPOCH) == tl.load(state + _EPOCH)):
        row = tl.arange(0, _MAX_ROWS)
        position = start + 1 + row
        choice = tl.load(choices + row, mask=row < rows, other=-1)
        judged = (row < rows) & (position < drafted)
        draft = tl.load(text + position, mask=judged, other=-1)
        accepted = tl.min(tl.where(judged & (draft == choice), _MAX_ROWS, row), axis=0)  # the first that does not agree
        compared = tl.sum(judged.to(tl.int32), axis=0)
        rejected = accepted < compared
        accepted = tl.minimum(accepted, compared)
        committed = tl.where(rejected | (compared < rows), accepted + 1, accepted)
        tl.store(text + position, choice, mask=row < committed)
        end = start + committed
        drafted = tl.where(rejected, end + 1, tl.maximum(drafted, end + 1))
        tl.store(state + _TOKEN, tl.sum(tl.where(row == committed - 1, choice, 0), axis=0))
        tl.store(state + _START, end)
        tl.store(state + _EPOCH, tl.load(state + _EPOCH) + rejected.to(tl.int32))
        tl.store(state + _ACCEPTED, accepted)
        tl.store(state + _COMMITTED, committed)
        tl.store(state + _DRAFTED, drafted)
    else:
        tl.store(state + _ACCEPTED, 0)
        tl.store(state + _COMMITTED, 0)


@triton.jit
def begin_draft_kernel(early, state, PDL: tl.constexpr):
    """Grid (1): a draft step takes all rows that it has not seen; after a rejection, the corrected one again."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    start, epoch = tl.load(early + _START), tl.load(state + _EPOCH)
    if tl.load(early + _EPOCH) != epoch:
        start = tl.minimum(start, tl.load(state + _START))
    tl.store(early + _START, start)
    tl.store(early + _ROWS, tl.minimum(tl.load(state + _DRAFTED) - start, _MAX_ROWS))
    tl.store(early + _EPOCH, epoch)


@triton.jit
def drafted_kernel(text, choices, early, state, PDL: tl.constexpr):
    """Grid (1): the exit head's choice for the step's last row joins the text, unless that has gone on without it."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rows, drafted = tl.load(early + _ROWS), tl.load(state + _DRAFTED)
    if tl.load(early + _EPOCH) == tl.load(state + _EPOCH):
        end = tl.load(early + _START) + rows
        if (rows > 0) & (end == drafted):
            tl.store(text + drafted, tl.load(choices + rows - 1))
            tl.store(state + _DRAFTED, drafted + 1)
        tl.store(early + _START, end)


@triton.jit
def begin_verification_kernel(early, late, state, most, PDL: tl.constexpr):
    """Grid (1): a pass takes the last committed token and the draft tokens that have been through the early layers."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    start, epoch = tl.load(state + _START), tl.load(state + _EPOCH)
    ready = tl.where(tl.load(early + _EPOCH) == epoch, tl.load(early + _START) - start, 0)
    tl.store(late + _START, start)
    tl.store(late + _ROWS, tl.maximum(tl.minimum(ready, most), 0))
    tl.store(late + _EPOCH, epoch)


def begin_draft(early: Tensor, state: Tensor, *, pdl: bool = False) -> None:
    begin_draft_kernel[(1,)](early, state, PDL=pdl, num_warps=1, launch_pdl=pdl)


def drafted(text: Tensor, choices: Tensor, early: Tensor, state: Tensor, *, pdl: bool = False) -> None:
    drafted_kernel[(1,)](text, choices, early, state, PDL=pdl, num_warps=1, launch_pdl=pdl)


def begin_verification(early: Tensor, late: Tensor, state: Tensor, *, most: int = MAX_ROWS, pdl: bool = False) -> None:
    """most: the longest chunk."""
    begin_verification_kernel[(1,)](early, late, state, most, PDL=pdl, num_warps=1, launch_pdl=pdl)


def verdict(text: Tensor, choices: Tensor, late: Tensor, state: Tensor, *, pdl: bool = False) -> None:
    verdict_kernel[(1,)](text, choices, late, state, PDL=pdl, num_warps=1, launch_pdl=pdl)


def verdict_twin(text: list[int], choices: list[int], late: dict[int, int], state: dict[int, int]) -> None:
    """The rules above, one token after another."""
    state[ACCEPTED] = state[COMMITTED] = 0
    if late[ROWS] == 0 or late[EPOCH] != state[EPOCH]:
        return
    for choice in choices[: late[ROWS]]:
        place = state[START] + 1
        drafted = place < state[DRAFTED]
        agree = drafted and text[place] == choice
        text[place], state[TOKEN], state[START] = choice, choice, place
        state[COMMITTED] += 1
        state[ACCEPTED] += agree
        state[DRAFTED] = max(state[DRAFTED], place + 1)
        if drafted and not agree:
            state[EPOCH] += 1
            state[DRAFTED] = place + 1
        if not agree:
            break
