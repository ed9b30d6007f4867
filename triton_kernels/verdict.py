"""Draft, verification and verdict, on the device: which rows a pass takes, what is committed, where the next one is.

    text [capacity] int32: at positions up to START the committed tokens, after them the draft tokens, up to DRAFTED
    choices [16] int32: the model's own token for position START + r + 1, of each row r of the pass;
        -1: its logits are no numbers

    accepted  = draft tokens at START + 1.. that equal the choices, up to the first that does not
    committed = accepted + 1 where the pass saw a disagreement (corrected) or no draft token was left (bonus),
                else accepted: the text already goes on with draft tokens of the next pass

Afterwards text holds the committed tokens, TOKEN the last of them, START its position: the next pass's first row. A
disagreement raises EPOCH and ends the draft there. A pass that was begun in an older epoch gets no verdict: ACCEPTED
and COMMITTED are 0 and all else stays. Every verdict, void or not, leaves a record in a ring that the host reads
(mapped memory); its sequence number is written last and released to the system.

Each pass has words of its own (state.py): `early` of the draft stage's layers, `head` of the exit head's (which may lag
behind: rows that went through the early layers without it), `late` of each verification stage. One of the `begin`
kernels sets them, and they hold until the pass has ended. early[START] is also how far the early layers have come:
verification takes only rows that have been through them.

Draft and verification may run at the same time, on two streams: the kernels here, one program each, change the
answer's words (`state`), and those of `early` that verification reads, only while they hold the answer's lock. What
they decide is sound in any order:
- the rows of a pass are of one epoch, and a pass of an older epoch changes nothing but its own words;
- draft steps go back (over rows that verification may be reading) only after a rejection, which makes such a pass void;
- a token that is drawn for a position that a verdict has filled meanwhile is thrown away;
- what the host offers to draft (copies: csrc/cuda/plan.h) joins the text where a draft step begins, as far as it goes
  on from what stands there. The host may be writing there: the words are read once, counts are bounded, and half of an
  offer is a wrong draft at worst.

Passes over later rows may begin before the verdict on earlier ones (several verification stages): a stage takes the
rows after those of its last pass, and passes come to their verdicts in order.
"""

import triton
import triton.language as tl
from torch import Tensor

from . import state as words
from .noise import coin_word
from .ptx import gdc_launch_dependents, gdc_wait
from .state import ACCEPTED, COMMITTED, DRAFT_WORDS, DRAFTED, EPOCH, KNOWN, MAX_ROWS, RING_WORDS, ROWS, START, TOKEN

_ROWS, _START, _EPOCH, _TOKEN, _KNOWN = map(tl.constexpr, (ROWS, START, EPOCH, TOKEN, KNOWN))
_ACCEPTED, _COMMITTED, _DRAFTED = map(tl.constexpr, (ACCEPTED, COMMITTED, DRAFTED))
_LOCK, _SEQUENCE, _DRAWN = map(tl.constexpr, (words.LOCK, words.SEQUENCE, words.DRAWN))
_MOST, _LOOKAHEAD, _LIMIT = map(tl.constexpr, (words.MOST, words.LOOKAHEAD, words.LIMIT))
_REPORT, _ORACLE_END = map(tl.constexpr, (words.REPORT, words.ORACLE_END))
_ORACLE, _ORACLE_SEED = map(tl.constexpr, (words.ORACLE, words.ORACLE_SEED))
_MAX_ROWS, _RING_WORDS, _DRAFT_WORDS = map(tl.constexpr, (MAX_ROWS, RING_WORDS, DRAFT_WORDS))
_POSTED, _FETCHED, _TAKEN = map(tl.constexpr, (words.POSTED, words.FETCHED, words.TAKEN))
_MAIL_SLOTS, _WORDS = tl.constexpr(words.MAIL_SLOTS), tl.constexpr(words.WORDS)
_CHOICES = tl.constexpr(words.MAIL_CHOICES)
_OF_EPOCH, _OF_POSITION = tl.constexpr(words.RECORD_EPOCH), tl.constexpr(words.RECORD_POSITION)
_OF_ROWS, _OF_ACCEPTED = tl.constexpr(words.RECORD_ROWS), tl.constexpr(words.RECORD_ACCEPTED)
_OF_COMMITTED, _OF_JUDGED = tl.constexpr(words.RECORD_COMMITTED), tl.constexpr(words.RECORD_JUDGED)
_OF_DRAFTED, _OF_COPIED = tl.constexpr(words.RECORD_DRAFTED), tl.constexpr(words.RECORD_COPIED)
_DRAFT_EPOCH, _DRAFT_POSITION = tl.constexpr(words.DRAFT_EPOCH), tl.constexpr(words.DRAFT_POSITION)
_DRAFT_TOKEN, _DRAFT_CONFIDENCE = tl.constexpr(words.DRAFT_TOKEN), tl.constexpr(words.DRAFT_CONFIDENCE)
_IDS, _DRAFTS = tl.constexpr(words.RECORD_IDS), tl.constexpr(words.RECORD_DRAFTS)
_CONFIDENCES, _COPIES = tl.constexpr(words.RECORD_CONFIDENCES), tl.constexpr(words.RECORD_COPIES)
_TAKES_COPIES = tl.constexpr(words.COPIES)
_OFFER_POSITION, _OFFER_COUNT = tl.constexpr(words.OFFER_POSITION), tl.constexpr(words.OFFER_COUNT)
_OFFER_MOST, _OFFER_TOKENS = tl.constexpr(words.OFFER_MOST), tl.constexpr(words.OFFER_TOKENS)
_OFFER_CHANCES, _OFFER_COPIES = tl.constexpr(words.OFFER_CHANCES), tl.constexpr(words.OFFER_COPIES)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def word(state, place: tl.constexpr):
    """A word as it is in memory now, not in a cache of this multiprocessor."""
    return tl.load(state + place, volatile=True)


@triton.jit
def take(state):
    """The answer's words are ours until `give`: whoever holds the lock is running, so that it is free soon."""
    while tl.atomic_cas(state + _LOCK, 0, 1, sem="acquire", scope="gpu") != 0:
        pass


@triton.jit
def give(state):
    tl.debug_barrier()
    tl.atomic_xchg(state + _LOCK, 0, sem="release", scope="gpu")


@triton.jit
def publish(record, sequence):
    """The host, which looks there with an acquire, sees the record once it sees the number.

    A store and no exchange: across PCIe that would not be atomic for the host anyway.
    """
    tl.debug_barrier()
    if _INTERPRETED:
        tl.atomic_xchg(record, sequence, sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(
            "st.release.sys.global.b32 [$1], $2; mov.b32 $0, $2;", "=r,l,r",
            [record.to(tl.uint64, bitcast=True), sequence], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def verdict_kernel(
    text, choices, confidences, copied, late, state, ring, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (1)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.arange(0, _MAX_ROWS)
    rows, start, its_epoch = tl.load(late + _ROWS), tl.load(late + _START), tl.load(late + _EPOCH)
    position = start + 1 + row
    choice = tl.load(choices + row, mask=row < rows, other=-1)
    take(state)
    drafted, epoch, sequence = word(state, _DRAFTED), word(state, _EPOCH), word(state, _SEQUENCE) + 1
    valid = (rows > 0) & (its_epoch == epoch)
    judged = (row < rows) & (position < drafted) & valid
    draft = tl.load(text + position, mask=judged, other=-1, volatile=True)
    compared = tl.sum(judged.to(tl.int32), axis=0)
    accepted = tl.min(tl.where(judged & (draft == choice), _MAX_ROWS, row), axis=0)  # the first that does not agree
    rejected = accepted < compared
    accepted = tl.minimum(accepted, compared)
    committed = tl.where(valid, tl.where(rejected | (compared < rows), accepted + 1, accepted), 0)
    said = choice
    choice = tl.maximum(choice, 0)  # passes that are under way read its embedding, before the host ends the answer
    if valid:
        end = start + committed
        tl.store(text + position, choice, mask=row < committed)
        tl.store(state + _TOKEN, tl.sum(tl.where(row == committed - 1, choice, 0), axis=0))
        tl.store(state + _START, end)
        tl.store(state + _EPOCH, epoch + rejected.to(tl.int32))
        tl.store(state + _DRAFTED, tl.where(rejected, end + 1, tl.maximum(drafted, end + 1)))
    tl.store(state + _ACCEPTED, accepted)
    tl.store(state + _COMMITTED, committed)
    tl.store(state + _SEQUENCE, sequence)
    give(state)

    judged_too = tl.where(rejected, accepted + 1, accepted)
    confidence = tl.load(confidences + position, mask=row < judged_too, other=0.0)
    copies = tl.load(copied + position, mask=judged, other=0)
    record = ring + (sequence % SLOTS) * _RING_WORDS
    tl.store(record + _OF_EPOCH, its_epoch)
    tl.store(record + _OF_POSITION, start + 1)
    tl.store(record + _OF_ROWS, rows)
    tl.store(record + _OF_ACCEPTED, accepted)
    tl.store(record + _OF_COMMITTED, committed)
    tl.store(record + _OF_JUDGED, judged_too)
    tl.store(record + _OF_DRAFTED, drafted)
    tl.store(record + _OF_COPIED, tl.sum((copies > 0).to(tl.int32), axis=0))
    tl.store(record + _IDS + row, said)
    tl.store(record + _DRAFTS + row, draft)
    tl.store(record + _CONFIDENCES + row, confidence.to(tl.int32, bitcast=True))
    tl.store(record + _COPIES + row, copies)
    publish(record, sequence)


@triton.jit
def begin_draft_kernel(
    text, confidences, copied, offer, early, head, state, PDL: tl.constexpr
):  # fmt: skip
    """Grid (1): a draft step takes all rows that it has not seen; after a rejection, the corrected one again. What the
    host offers comes before."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    start, its_epoch = tl.load(early + _START), tl.load(early + _EPOCH)
    heads, heads_epoch = tl.load(head + _START), tl.load(head + _EPOCH)
    takes, place = tl.load(state + _TAKES_COPIES) != 0, tl.arange(0, _MAX_ROWS)
    offered = tl.load(offer + _OFFER_POSITION, mask=takes, other=0, volatile=True)
    count = tl.load(offer + _OFFER_COUNT, mask=takes, other=0, volatile=True)
    most = tl.load(offer + _OFFER_MOST, mask=takes, other=0, volatile=True)
    token = tl.load(offer + _OFFER_TOKENS + place, mask=takes, other=0, volatile=True)
    chance = tl.load(offer + _OFFER_CHANCES + place, mask=takes, other=0, volatile=True)
    match = tl.load(offer + _OFFER_COPIES + place, mask=takes, other=0, volatile=True)
    offers, place = place < count, offered + place
    take(state)
    epoch, known, drafted = word(state, _EPOCH), word(state, _START), word(state, _DRAFTED)
    follows = (offered > 0) & (offered <= drafted)
    there = tl.load(text + place, mask=offers & follows & (place < drafted), other=-1, volatile=True)
    differs = offers & follows & (place < drafted) & (there != token)
    room = tl.minimum(known + 1 + most, word(state, _LIMIT))
    new = offers & follows & (place >= drafted) & (place < room)
    new = new & (tl.sum(differs.to(tl.int32), axis=0) == 0)
    tl.store(text + place, token, mask=new)
    tl.store(confidences + place, chance.to(tl.float32, bitcast=True), mask=new)
    tl.store(copied + place, match, mask=new)
    drafted += tl.sum(new.to(tl.int32), axis=0)
    tl.store(state + _DRAFTED, drafted)
    end = tl.minimum(drafted, word(state, _LIMIT))
    start = tl.where(its_epoch != epoch, tl.minimum(start, known), start)
    rows = tl.maximum(tl.minimum(end - start, _MAX_ROWS), 0)
    tl.store(early + _START, start)  # verification reads these two
    tl.store(early + _EPOCH, epoch)
    give(state)
    tl.store(early + _ROWS, rows)
    tl.store(early + _KNOWN, known)
    heads = tl.where(heads_epoch != epoch, tl.minimum(heads, known), heads)
    tl.store(head + _START, heads)
    tl.store(head + _ROWS, tl.minimum(start + rows - heads, _MAX_ROWS))
    tl.store(head + _EPOCH, epoch)
    tl.store(head + _KNOWN, known)


@triton.jit
def arrived_kernel(early, state, PDL: tl.constexpr):
    """Grid (1): rows have been through the early layers without the exit head."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    end = tl.load(early + _START) + tl.load(early + _ROWS)
    take(state)
    current = tl.load(early + _EPOCH) == word(state, _EPOCH)
    if current:
        tl.store(early + _START, end)
    give(state)


@triton.jit
def drafted_kernel(
    text, choices, chances, confidences, copied, truth, early, head, state, drafts,
    VOCABULARY: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (1): the exit head's choice for the last row joins the text, unless that has gone on without it."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    end = tl.load(early + _START) + tl.load(early + _ROWS)
    rows = tl.load(head + _ROWS)
    heads_end = tl.load(head + _START) + rows
    epoch = tl.load(early + _EPOCH)
    last = tl.maximum(rows - 1, 0)
    token, chance = tl.maximum(tl.load(choices + last), 0), tl.load(chances + last)  # no number: a wrong draft
    if end < tl.load(state + _ORACLE_END):
        acceptance = tl.load(state + _ORACLE).to(tl.float32, bitcast=True)
        low = tl.load(state + _ORACLE_SEED).to(tl.uint32, bitcast=True)
        high = tl.load(state + _ORACLE_SEED + 1).to(tl.uint32, bitcast=True)
        right = coin_word(low, high, end).to(tl.float32) < acceptance * 4294967296.0
        token = tl.load(truth + end)
        token = tl.where(right, token, (token + 1) % VOCABULARY)
        chance = acceptance
    take(state)
    drafted, now = word(state, _DRAFTED), word(state, _EPOCH)
    room = (drafted < word(state, _LIMIT)) & (drafted - word(state, _START) - 1 < word(state, _LOOKAHEAD))
    drawn = (rows > 0) & (epoch == now) & (end == drafted) & (heads_end == drafted) & room
    sequence = word(state, _DRAWN) + 1
    if epoch == now:
        tl.store(early + _START, end)
        tl.store(head + _START, heads_end)
    if drawn:
        tl.store(text + drafted, token)
        tl.store(confidences + drafted, chance)
        tl.store(copied + drafted, 0)
        tl.store(state + _DRAFTED, drafted + 1)
    tl.store(state + _DRAWN, sequence)
    give(state)
    if tl.load(state + _REPORT) != 0:
        record = drafts + (sequence % SLOTS) * _DRAFT_WORDS
        tl.store(record + _DRAFT_EPOCH, epoch)
        tl.store(record + _DRAFT_POSITION, tl.where(drawn, drafted, -1))
        tl.store(record + _DRAFT_TOKEN, token)
        tl.store(record + _DRAFT_CONFIDENCE, chance.to(tl.int32, bitcast=True))
        publish(record, sequence)


@triton.jit
def begin_verification_kernel(early, late, state, PDL: tl.constexpr):
    """Grid (1): a pass takes the rows that have been through the early layers and are in no pass yet."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    launched, its_epoch = tl.load(late + _TAKEN), tl.load(late + _EPOCH)
    take(state)
    epoch, known = word(state, _EPOCH), word(state, _START)
    arrived = tl.where(word(early, _EPOCH) == epoch, word(early, _START), 0)
    most = word(state, _MOST)
    give(state)
    start = tl.where(its_epoch == epoch, tl.maximum(launched, known), known)
    most = tl.minimum(tl.where(start == known, most + 1, most), _MAX_ROWS)
    rows = tl.maximum(tl.minimum(arrived - start, most), 0)
    tl.store(late + _TAKEN, start + rows)
    tl.store(late + _START, start)
    tl.store(late + _ROWS, rows)
    tl.store(late + _EPOCH, epoch)
    tl.store(late + _KNOWN, known)


@triton.jit
def forward_kernel(late, mail, choices, state, POST: tl.constexpr, CHOICES: tl.constexpr, PDL: tl.constexpr):
    """Grid (1): a pass goes on with these words, by way of the next stage's mail; a void one without rows.

    CHOICES: what the last stage chose goes with them, to a verdict on another device.

    The stages may run side by side: each counts for itself which slot is next.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if POST:
        count = tl.load(late + _POSTED)
        tl.store(late + _POSTED, count + 1)
        source, target = late, mail + (count % _MAIL_SLOTS) * _WORDS
    else:
        count = tl.load(late + _FETCHED)
        tl.store(late + _FETCHED, count + 1)
        source, target = mail + (count % _MAIL_SLOTS) * _WORDS, late
    epoch = tl.load(source + _EPOCH)
    tl.store(target + _START, tl.load(source + _START))
    tl.store(target + _ROWS, tl.where(epoch == word(state, _EPOCH), tl.load(source + _ROWS), 0))
    tl.store(target + _EPOCH, epoch)
    tl.store(target + _KNOWN, tl.load(source + _KNOWN))
    if CHOICES:
        row = tl.arange(0, _MAX_ROWS)
        if POST:
            tl.store(target + _CHOICES + row, tl.load(choices + row))
        else:
            tl.store(choices + row, tl.load(source + _CHOICES + row))


def begin_draft(
    text: Tensor, confidences: Tensor, copied: Tensor, offer: Tensor, early: Tensor, head: Tensor, state: Tensor,
    *, pdl: bool = False,
) -> None:  # fmt: skip
    """confidences, copied int32 [capacity]: of the draft tokens in the text. offer: int32 [OFFER_WORDS]."""
    begin_draft_kernel[(1,)](text, confidences, copied, offer, early, head, state, PDL=pdl, num_warps=1, launch_pdl=pdl)


def arrived(early: Tensor, state: Tensor, *, pdl: bool = False) -> None:
    arrived_kernel[(1,)](early, state, PDL=pdl, num_warps=1, launch_pdl=pdl)


def drafted(
    text: Tensor, choices: Tensor, chances: Tensor, confidences: Tensor, copied: Tensor, truth: Tensor,
    early: Tensor, head: Tensor, state: Tensor, drafts: Tensor, *, vocabulary: int, pdl: bool = False,
) -> None:  # fmt: skip
    """chances [16]: the confidences of the choices; confidences [capacity]: those of the draft tokens in the text.

    truth [capacity] int32: what the oracle knows. drafts [slots, DRAFT_WORDS] int32: the ring of draft tokens.
    """
    drafted_kernel[(1,)](
        text, choices, chances, confidences, copied, truth, early, head, state, drafts,
        VOCABULARY=vocabulary, SLOTS=len(drafts), PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip


def begin_verification(early: Tensor, late: Tensor, state: Tensor, *, pdl: bool = False) -> None:
    begin_verification_kernel[(1,)](early, late, state, PDL=pdl, num_warps=1, launch_pdl=pdl)


def post(late: Tensor, mail: Tensor, state: Tensor, choices: Tensor | None = None, *, pdl: bool = False) -> None:
    """A verification stage's pass to the mail of the next one, int32 [MAIL_SLOTS, WORDS]; with its choices [16]."""
    forward_kernel[(1,)](
        late, mail, choices, state, POST=True, CHOICES=choices is not None, PDL=pdl, num_warps=1, launch_pdl=pdl
    )


def fetch(mail: Tensor, late: Tensor, state: Tensor, choices: Tensor | None = None, *, pdl: bool = False) -> None:
    """The oldest pass in a stage's mail, to that stage."""
    forward_kernel[(1,)](
        late, mail, choices, state, POST=False, CHOICES=choices is not None, PDL=pdl, num_warps=1, launch_pdl=pdl
    )


def verdict(
    text: Tensor, choices: Tensor, confidences: Tensor, copied: Tensor, late: Tensor, state: Tensor, ring: Tensor, *,
    pdl: bool = False,
) -> None:  # fmt: skip
    """ring: int32 [slots, RING_WORDS]."""
    verdict_kernel[(1,)](
        text, choices, confidences, copied, late, state, ring,
        SLOTS=len(ring), PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
