"""The verdict on the device: as the twin's, token by token; and a draft and verify loop driven by it alone."""

import random

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from kernel_support import DEVICE

from ppsd_rt.triton_kernels.state import ACCEPTED, COMMITTED, DRAFTED, EPOCH, ROWS, START, TOKEN, WORDS
from ppsd_rt.triton_kernels.verdict import begin_draft, begin_verification, drafted, verdict, verdict_twin

USED = (ROWS, START, EPOCH, TOKEN, ACCEPTED, COMMITTED, DRAFTED)


def words(values):
    return torch.tensor([values.get(i, 0) for i in range(WORDS)], dtype=torch.int32, device=DEVICE)


def test_verdict_is_the_twins():
    dice = random.Random(1)
    rejected = bonus = ahead = 0
    for _ in range(150):
        rows, start, epoch = dice.randint(0, 16), dice.randint(0, 9), dice.randint(0, 3)
        text = [dice.randint(0, 99) for _ in range(48)]
        choices = [text[start + 1 + r] if dice.random() < 0.9 else dice.randint(0, 99) for r in range(16)]
        more = dice.choice((0, 0, 1, 5))  # draft tokens that no row of the pass follows
        state = {START: start, EPOCH: epoch, DRAFTED: start + max(rows, 1) + more, TOKEN: 5}
        work = {START: start, ROWS: rows, EPOCH: epoch if dice.random() < 0.9 else epoch - 1}
        ours, our_text = words(state), torch.tensor(text, dtype=torch.int32, device=DEVICE)
        picked = torch.tensor(choices, dtype=torch.int32, device=DEVICE)
        verdict(our_text, picked, words(work), ours)
        verdict_twin(text, choices, work, state)
        assert our_text.tolist() == text
        assert {i: ours[i].item() for i in USED} == {i: state.get(i, 0) for i in USED}
        rejected += state[EPOCH] > epoch
        bonus += state[COMMITTED] > state[ACCEPTED] and state[EPOCH] == epoch
        ahead += 0 < state[COMMITTED] == state[ACCEPTED]
    assert min(rejected, bonus, ahead) > 5, "the dice must show every outcome"


@pytest.mark.parametrize(("lookahead", "most"), [(1, 16), (3, 16), (4, 2), (20, 16)])
def test_a_loop_on_the_device_commits_what_the_model_says(lookahead, most):
    """Draft and verification as table look-ups; the host only launches, and writes nothing but the first token."""

    def model(token, position):
        return (7 * token + position) % 50

    def draft(token, position):
        return model(token, position) if (token + position) % 4 else 49

    end = 40
    text, choices = torch.zeros(96, dtype=torch.int32, device=DEVICE), torch.zeros(16, dtype=torch.int32, device=DEVICE)
    text[0] = 11
    state, early, late = words({DRAFTED: 1, TOKEN: 11}), words({}), words({})
    seen = [None] * 96  # the token at each position when the early layers last ran it

    def run(words, rule):
        rows, start = words[ROWS].item(), words[START].item()
        for r in range(rows):
            choices[r] = rule(text[start + r].item(), start + r)
        return range(start, start + rows)

    passes = committed = 0
    while state[START].item() < end:
        for _ in range(lookahead):
            begin_draft(early, state)
            for place in run(early, draft):
                seen[place] = text[place].item()
            drafted(text, choices, early, state)
        begin_verification(early, late, state, most=most)
        rows = run(late, model)
        assert 1 <= len(rows) <= most
        assert [seen[p] for p in rows] == text[rows.start : rows.stop].tolist(), "verified what the early layers saw"
        verdict(text, choices, late, state)
        passes, committed = passes + 1, committed + state[COMMITTED].item()
    expected = [11]
    for position in range(state[START].item()):
        expected.append(model(expected[-1], position))
    assert text[: len(expected)].tolist() == expected
    assert committed == state[START].item()
    assert state[TOKEN].item() == expected[-1]
    assert state[EPOCH].item() > 3
    assert passes == committed if lookahead == 1 else passes < committed, "draft tokens were accepted"


def test_a_pass_of_an_older_epoch_changes_nothing():
    text, choices = torch.arange(16, dtype=torch.int32, device=DEVICE), torch.ones(16, dtype=torch.int32, device=DEVICE)
    state, late = words({START: 3, EPOCH: 2, DRAFTED: 6, TOKEN: 9}), words({START: 3, EPOCH: 1, ROWS: 3})
    early = words({START: 4, EPOCH: 1, ROWS: 1})
    verdict(text, choices, late, state)
    drafted(text, choices, early, state)
    assert text.tolist() == list(range(16))
    assert state.tolist() == words({START: 3, EPOCH: 2, DRAFTED: 6, TOKEN: 9}).tolist()
    begin_verification(early, late, state)
    assert late[ROWS].item() == 0, "the early layers have not caught up"
    begin_draft(early, state)
    assert (early[START].item(), early[ROWS].item(), early[EPOCH].item()) == (3, 3, 2)
