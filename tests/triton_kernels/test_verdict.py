"""The verdict on the device: as the twin's, token by token; and a draft and verify loop driven by it alone."""

import random

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from kernel_support import DEVICE
from kernel_twins import verdict_twin
from noise_twin import philox

from ppsd_rt.triton_kernels.state import (
    ACCEPTED,
    COMMITTED,
    COPIES,
    DRAFT_POSITION,
    DRAFT_WORDS,
    DRAFTED,
    DRAWN,
    EPOCH,
    LIMIT,
    LOCK,
    LOOKAHEAD,
    MAIL_SLOTS,
    MOST,
    OFFER_CHANCES,
    OFFER_COPIES,
    OFFER_COUNT,
    OFFER_MOST,
    OFFER_POSITION,
    OFFER_TOKENS,
    OFFER_WORDS,
    ORACLE,
    ORACLE_END,
    ORACLE_SEED,
    RECORD_ACCEPTED,
    RECORD_COMMITTED,
    RECORD_CONFIDENCES,
    RECORD_COPIED,
    RECORD_COPIES,
    RECORD_DRAFTED,
    RECORD_DRAFTS,
    RECORD_EPOCH,
    RECORD_IDS,
    RECORD_JUDGED,
    RECORD_POSITION,
    RECORD_ROWS,
    RECORD_SEQUENCE,
    REPORT,
    RING_WORDS,
    ROWS,
    SEQUENCE,
    START,
    TOKEN,
    WORDS,
)
from ppsd_rt.triton_kernels.verdict import (
    arrived,
    begin_draft,
    begin_verification,
    drafted,
    fetch,
    post,
    verdict,
)

USED = (ROWS, START, EPOCH, TOKEN, ACCEPTED, COMMITTED, DRAFTED, LOCK)
SLOTS = 4


def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32, device=DEVICE)


def words(values):
    return torch.tensor([values.get(i, 0) for i in range(WORDS)], dtype=torch.int32, device=DEVICE)


class Answer:
    """Device memory of an answer, but for its words."""

    def __init__(self, text, vocabulary=100):
        self.text = torch.tensor(text, dtype=torch.int32, device=DEVICE)
        self.choices = ints(16)
        self.confidences = torch.arange(len(text), device=DEVICE) / 128
        self.copied, self.offer = ints(len(text)), ints(OFFER_WORDS)
        self.chances = torch.full((16,), 0.25, device=DEVICE)
        self.truth, self.vocabulary = ints(len(text)), vocabulary
        self.ring, self.drafts = ints(SLOTS, RING_WORDS), ints(SLOTS, DRAFT_WORDS)

    def verdict(self, late, state):
        verdict(self.text, self.choices, self.confidences, self.copied, late, state, self.ring)

    def begin_draft(self, early, head, state):
        begin_draft(self.text, self.confidences, self.copied, self.offer, early, head, state)

    def offers(self, position, tokens, most=15):
        self.offer[OFFER_POSITION], self.offer[OFFER_COUNT], self.offer[OFFER_MOST] = position, len(tokens), most
        self.offer[OFFER_TOKENS : OFFER_TOKENS + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.offer[OFFER_CHANCES : OFFER_CHANCES + 16] = torch.full((16,), 0.5).view(torch.int32)
        self.offer[OFFER_COPIES : OFFER_COPIES + 16] = torch.arange(3, 19)

    def drafted(self, early, head, state):
        drafted(
            self.text, self.choices, self.chances, self.confidences, self.copied, self.truth,
            early, head, state, self.drafts, vocabulary=self.vocabulary,
        )  # fmt: skip


def test_verdict_is_the_twins():
    dice = random.Random(1)
    rejected = bonus = ahead = void = 0
    for number in range(80):
        rows, start, epoch = dice.randint(0, 16), dice.randint(0, 9), dice.randint(0, 3)
        text = [dice.randint(0, 99) for _ in range(48)]
        choices = [text[start + 1 + r] if dice.random() < 0.9 else dice.randint(0, 99) for r in range(16)]
        more = dice.choice((0, 0, 1, 5))  # draft tokens that no row of the pass follows
        state = {START: start, EPOCH: epoch, DRAFTED: start + max(rows, 1) + more, TOKEN: 5, SEQUENCE: number}
        work = {START: start, ROWS: rows, EPOCH: epoch if dice.random() < 0.9 else epoch - 1}
        drafts, end = text[start + 1 : start + 1 + rows], state[DRAFTED]
        answer, ours = Answer(text), words(state)
        answer.copied.copy_(torch.arange(48) % 3)
        answer.choices.copy_(torch.tensor(choices, dtype=torch.int32))
        answer.verdict(words(work), ours)
        verdict_twin(text, choices, work, state)
        assert answer.text.tolist() == text
        assert {i: ours[i].item() for i in USED} == {i: state.get(i, 0) for i in USED}
        record = answer.ring[(number + 1) % SLOTS].tolist()
        assert record[RECORD_SEQUENCE] == ours[SEQUENCE].item() == number + 1
        judged = min(state[ACCEPTED] + (state[EPOCH] > epoch), 16)
        expected = {
            RECORD_EPOCH: work[EPOCH], RECORD_POSITION: start + 1, RECORD_ROWS: rows, RECORD_DRAFTED: end,
            RECORD_ACCEPTED: state[ACCEPTED], RECORD_COMMITTED: state[COMMITTED], RECORD_JUDGED: judged,
        }  # fmt: skip
        assert {i: record[i] for i in expected} == expected
        assert record[RECORD_IDS : RECORD_IDS + state[COMMITTED]] == choices[: state[COMMITTED]]
        assert record[RECORD_DRAFTS : RECORD_DRAFTS + judged] == drafts[:judged]
        bits = torch.tensor(record[RECORD_CONFIDENCES : RECORD_CONFIDENCES + judged], dtype=torch.int32)
        assert bits.view(torch.float32).tolist() == [(start + 1 + i) / 128 for i in range(judged)]
        assert record[RECORD_COPIES : RECORD_COPIES + judged] == [(start + 1 + i) % 3 for i in range(judged)]
        seen_drafts = range(start + 1, min(start + 1 + rows, end)) if state[COMMITTED] else ()
        assert record[RECORD_COPIED] == sum(place % 3 > 0 for place in seen_drafts)
        rejected += state[EPOCH] > epoch
        bonus += state[COMMITTED] > state[ACCEPTED] and state[EPOCH] == epoch
        ahead += 0 < state[COMMITTED] == state[ACCEPTED]
        void += state[COMMITTED] == 0
    assert min(rejected, bonus, ahead, void) > 5, "the dice must show every outcome"


def model(token, position):
    return (7 * token + position) % 50


def draft(token, position):
    return model(token, position) if (token + position) % 4 else 49


class Loop:
    """Draft and verification as table look-ups; the host only launches, and writes nothing but the first token."""

    def __init__(self, set_by_host, stages=1):
        self.answer = Answer([11] + [0] * 95)
        host = {MOST: 15, LOOKAHEAD: 15, LIMIT: 80, **set_by_host}
        self.state, self.early, self.head = words({DRAFTED: 1, TOKEN: 11, **host}), words({}), words({})
        self.late = [words({}) for _ in range(stages)]
        self.mail = [torch.zeros(MAIL_SLOTS, WORDS, dtype=torch.int32, device=DEVICE) for _ in range(stages)]
        self.seen = [None] * 96  # the token at each position when the early layers last ran it

    def run(self, its, rule):
        rows, start = its[ROWS].item(), its[START].item()
        for r in range(rows):
            self.answer.choices[r] = rule(self.answer.text[start + r].item(), start + r)
        return range(start, start + rows)

    def _early_rows(self):
        self.answer.begin_draft(self.early, self.head, self.state)
        for place in range(self.early[START].item(), self.early[START].item() + self.early[ROWS].item()):
            self.seen[place] = self.answer.text[place].item()

    def draft_step(self):
        self._early_rows()
        self.run(self.head, draft)
        self.answer.drafted(self.early, self.head, self.state)

    def early_step(self):
        self._early_rows()
        arrived(self.early, self.state)

    def verify(self, stage=0):
        if stage == 0:
            begin_verification(self.early, self.late[0], self.state)
        else:
            fetch(self.mail[stage], self.late[stage], self.state)
        rows = range(self.late[stage][START].item(), (self.late[stage][START] + self.late[stage][ROWS]).item())
        if self.late[stage][EPOCH] == self.state[EPOCH]:
            text = self.answer.text[rows.start : rows.stop].tolist()
            assert [self.seen[p] for p in rows] == text, "verified what the early layers saw"
        if stage < len(self.late) - 1:
            post(self.late[stage], self.mail[stage + 1], self.state)
        else:
            self.run(self.late[stage], model)
            self.answer.verdict(self.late[stage], self.state)
        return rows

    def check(self):
        assert self.state[LOCK] == 0
        expected = [11]
        for position in range(self.state[START].item()):
            expected.append(model(expected[-1], position))
        assert self.answer.text[: len(expected)].tolist() == expected
        assert self.state[TOKEN].item() == expected[-1]


@pytest.mark.parametrize(("ahead", "most"), [(1, 15), (3, 15), (4, 1), (20, 15)])
def test_a_loop_on_the_device_commits_what_the_model_says(ahead, most):
    loop = Loop({MOST: most})
    passes = committed = 0
    while loop.state[START].item() < 28:
        for _ in range(ahead):
            loop.draft_step()
        rows = loop.verify()
        assert 1 <= len(rows) <= most + 1
        passes, committed = passes + 1, committed + loop.state[COMMITTED].item()
    loop.check()
    assert committed == loop.state[START].item()
    assert loop.state[EPOCH].item() > 3
    assert passes == committed if ahead == 1 else passes < committed, "draft tokens were accepted"


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("stages", [1, 3])
def test_any_order_of_launches_commits_what_the_model_says(stages, copies):
    """Draft steps and stages as the dice will: passes in flight one after the other, and rejections under way.

    copies: the host offers what is right, what is wrong, and what is old, half or nonsense.
    """
    dice, in_flight, most_in_flight, taken = random.Random(stages), [], 0, 0
    loop = Loop({MOST: 2, LOOKAHEAD: 9, LIMIT: 40, COPIES: int(copies)}, stages)
    for _ in range(700):
        if copies and dice.random() < 0.3:
            known = loop.state[START].item()
            text = loop.answer.text[: known + 1].tolist()
            for position in range(known, known + 16):
                text.append(model(text[-1], position) if dice.random() < 0.9 else dice.randrange(50))
            begin = max(0, known + dice.choice((-3, 0, 0, 1, 1, 1, 2, 9)))
            loop.answer.offers(begin, text[begin : begin + dice.choice((1, 5, 15))], 9)
            if dice.random() < 0.3:  # half of it is there, or none of it makes sense
                place = dice.choice((OFFER_COUNT, OFFER_POSITION, OFFER_TOKENS + dice.randrange(16)))
                loop.answer.offer[place] = dice.choice((-7, 0, 3, 40))
        if loop.state[START].item() >= 40:
            break
        launch = dice.choice(["draft", "draft", "early", *range(stages)])
        if launch == "draft":
            loop.draft_step()
        elif launch == "early":
            loop.early_step()
        elif launch == 0:
            if len(in_flight) == 4:
                continue
            loop.verify(0)
            if stages > 1:
                in_flight.append(1)
        elif launch in in_flight:
            loop.verify(launch)
            place = in_flight.index(launch)
            in_flight[place : place + 1] = [launch + 1] if launch + 1 < stages else []
        most_in_flight = max(most_in_flight, len(in_flight))
        ahead = loop.state[DRAFTED].item() - loop.state[START].item() - 1
        assert ahead <= 9
        assert loop.state[DRAFTED].item() <= 41
        taken += (loop.answer.copied > 0).sum().item()
    loop.check()
    assert (taken > 0) == copies
    assert loop.state[START].item() >= 30
    assert most_in_flight == (4 if stages > 1 else 0)
    assert loop.state[EPOCH].item() > 5


def test_nothing_stands_beyond_the_limit():
    loop = Loop({LIMIT: 9})
    for _ in range(30):
        loop.draft_step()
        loop.draft_step()
        loop.verify()
    loop.check()
    assert loop.state[START].item() == 9
    assert loop.answer.text[10:].tolist() == [0] * 86
    assert max(p for p, token in enumerate(loop.seen) if token is not None) == 8
    assert loop.late[0][ROWS].item() == 0


def test_a_pass_of_an_older_epoch_changes_nothing():
    answer = Answer(range(16))
    answer.choices.fill_(1)
    host = {START: 3, EPOCH: 2, DRAFTED: 6, TOKEN: 9, LIMIT: 15, LOOKAHEAD: 15, MOST: 15}
    state, late = words(host), words({START: 3, EPOCH: 1, ROWS: 3})
    early, head = words({START: 4, EPOCH: 1, ROWS: 1}), words({START: 4, EPOCH: 1, ROWS: 1})
    answer.verdict(late, state)
    answer.drafted(early, head, state)
    assert answer.text.tolist() == list(range(16))
    assert state.tolist() == words({**host, SEQUENCE: 1, DRAWN: 1}).tolist()
    assert early[START] == 4
    begin_verification(early, late, state)
    assert late[ROWS].item() == 0, "the early layers have not caught up"
    answer.begin_draft(early, head, state)
    assert (early[START].item(), early[ROWS].item(), early[EPOCH].item()) == (3, 3, 2)


def test_the_exit_head_catches_up():
    """Rows that went through the early layers without it; nothing is drawn before it has seen all of them."""
    loop = Loop({LOOKAHEAD: 0})
    for _ in range(20):
        loop.early_step()
        loop.verify()
    loop.state[LOOKAHEAD] = 3
    loop.draft_step()
    assert (loop.head[START].item(), loop.head[ROWS].item()) == (16, 16)
    assert loop.state[DRAFTED].item() == 21
    loop.draft_step()
    assert (loop.head[START].item(), loop.head[ROWS].item()) == (21, 5)
    assert loop.state[DRAFTED].item() == 22
    loop.check()


def test_what_the_host_offers_is_drafted_as_far_as_it_goes_on_from_the_text():
    loop = Loop({COPIES: 1, LOOKAHEAD: 2, LIMIT: 30})
    right = [11]
    for position in range(20):
        right.append(model(right[-1], position))
    loop.answer.offers(1, right[1:6])
    loop.early_step()
    assert loop.state[DRAFTED].item() == 6
    assert loop.answer.text[:7].tolist() == [*right[:6], 0]
    loop.verify()
    record = loop.answer.ring[1].tolist()
    assert (record[RECORD_ACCEPTED], record[RECORD_COMMITTED], record[RECORD_COPIED]) == (5, 6, 5)
    assert record[RECORD_COPIES : RECORD_COPIES + 5] == [3, 4, 5, 6, 7]
    half = torch.tensor([0.5]).view(torch.int32).item()
    assert record[RECORD_CONFIDENCES : RECORD_CONFIDENCES + 5] == [half] * 5
    # The text stands at position 6 now. An offer is refused if it disagrees with what came, or leaves a gap.
    for position, tokens in ((6, [right[6] + 1, right[7]]), (8, [right[8]]), (3, right[3:7]), (0, right[:8])):
        loop.answer.offers(position, tokens)
        loop.early_step()
        assert loop.state[DRAFTED].item() == 7, position
    loop.answer.offers(6, right[6:10])  # what has come meanwhile agrees: the rest is taken
    loop.draft_step()
    assert loop.answer.text[7:11].tolist() == [*right[7:10], 0], (
        "and the head is not asked: there are more drafts than 2"
    )
    assert loop.state[DRAFTED].item() == 10
    loop.answer.offers(10, right[10:16], most=5)
    loop.early_step()
    assert loop.state[DRAFTED].item() == 12, "no more than may be"
    loop.verify()
    loop.check()
    loop.state[COPIES] = 0
    loop.answer.offers(13, right[13:16])
    loop.early_step()
    assert loop.state[DRAFTED].item() == 13, "this answer copies nothing"


def test_nothing_is_offered_beyond_the_limit():
    loop = Loop({COPIES: 1, LIMIT: 4})
    loop.answer.offers(1, [7] * 15)
    loop.early_step()
    assert loop.state[DRAFTED].item() == 4


def test_draft_steps_report():
    loop = Loop({REPORT: 1, LOOKAHEAD: 2})
    for _ in range(3):
        loop.draft_step()
    records = loop.answer.drafts.tolist()
    token = draft(11, 0)
    quarter = torch.tensor([0.25]).view(torch.int32).item()
    assert records[1][:5] == [1, 0, 1, token, quarter]
    assert records[2][:5] == [2, 0, 2, draft(token, 1), quarter]
    assert (records[3][0], records[3][DRAFT_POSITION]) == (3, -1)
    assert loop.answer.confidences[1:3].tolist() == [0.25, 0.25]


def test_an_oracle_drafts():
    seed, acceptance = 2**40 + 5, 0.6
    low, high = torch.tensor([seed & 0xFFFFFFFF, seed >> 32]).to(torch.int32).tolist()
    bits = torch.tensor([acceptance]).view(torch.int32).item()
    oracle = {ORACLE_END: 30, ORACLE: bits, ORACLE_SEED: low, ORACLE_SEED + 1: high}
    loop = Loop({LOOKAHEAD: 40, LIMIT: 40, **oracle})
    loop.answer.truth.copy_(torch.arange(96) % 100)
    for _ in range(40):
        loop.draft_step()
    words_of = [int(philox((seed & 0xFFFFFFFF, seed >> 32), (0, p, 2, 0))[0]) for p in range(40)]
    right = [word < acceptance * 2**32 for word in words_of]
    text = loop.answer.text.tolist()
    assert text[1:30] == [p if right[p] else p + 1 for p in range(1, 30)]
    assert text[30] == draft(text[29], 29), "beyond its knowledge the head drafts"
    assert 8 < sum(right[1:30]) < 25
    assert np.allclose(loop.answer.confidences[1:30].cpu(), acceptance)
