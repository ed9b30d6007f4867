"""What usually follows: what is counted, what is proposed, and what it brings from one answer to the next."""

import pytest
from support import write_model

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.pipeline.rounds import Draft
from ppsd_rt.reference.successors import BITS, COUNTS, FROM_SUCCESSORS, PRIORS, Successors

AFTER_ONE = FROM_SUCCESSORS + COUNTS  # what follows one token, seen once


def test_what_followed_two_tokens_or_one():
    table = Successors()
    table.learn([1, 2, 3], 0)
    assert table.propose([9, 1, 2]) == Draft(3, PRIORS[0], FROM_SUCCESSORS)
    assert table.propose([7, 2]) == Draft(3, PRIORS[COUNTS], AFTER_ONE)
    assert table.propose([2]).token == 3
    assert table.propose([3]) is None
    assert table.propose([]) is None


def test_only_new_tokens_are_counted():
    table = Successors()
    table.learn([1, 2, 3], 0)
    table.learn([1, 2, 3, 4], 3)
    assert table.propose([2]).copied == AFTER_ONE
    assert table.propose([3]).token == 4


def test_the_sure_one_stays_and_the_unsure_one_is_replaced():
    table = Successors()
    for following in (3, 3, 3, 4):  # seen again twice: count 2; another one halves it
        table.learn([2, following], 0)
    assert table.propose([2]) == Draft(3, PRIORS[COUNTS + 1], AFTER_ONE + 1)
    for _ in range(2):
        table.learn([2, 4], 0)
    assert table.propose([2]) == Draft(4, PRIORS[COUNTS], AFTER_ONE)
    for _ in range(20):
        table.learn([2, 4], 0)
    assert table.propose([2]).copied == AFTER_ONE + COUNTS - 1


def test_verdicts_say_what_a_count_is_worth():
    table = Successors()
    table.learn([1, 2, 3], 0)
    pair = table.propose([1, 2])
    table.observe([Draft(5, 0.9), Draft(6, 0.5, 3), pair], 2)  # the head's, a copy, and this one, which is wrong
    assert table.propose([1, 2]).confidence < PRIORS[0]
    for _ in range(9):
        table.observe([pair], 0)
    assert table.propose([1, 2]) == Draft(3, PRIORS[COUNTS], AFTER_ONE), "one token says more by now"
    for _ in range(200):
        table.observe([pair], 1)
    assert table.propose([1, 2]).confidence > 0.95


def test_counted_beforehand():
    table = Successors()
    table.know([(1, 2, 3, 5), (-1, 2, 4, 99), (-1, 8, 9, 0)])
    assert table.propose([1, 2]).copied == FROM_SUCCESSORS + 5
    assert table.propose([7, 2]) == Draft(4, PRIORS[-1], AFTER_ONE + COUNTS - 1)
    assert table.propose([8]).token == 9
    table.know([(-1, 2, 6, 3)])  # less sure than what is there
    assert table.propose([7, 2]).token == 4


def test_memory_is_bounded():
    table = Successors()
    table.learn(list(range(1 << 18)), 0)
    assert all(len(entries) <= 1 << BITS for entries in table._tables)
    found = [table.propose([token]) for token in range(0, 1 << 18, 1000)]
    assert all(draft.token == token + 1 for token, draft in zip(range(0, 1 << 18, 1000), found, strict=True) if draft)
    assert sum(draft is not None for draft in found) > 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("successors") / "model")


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_one_answer_teaches_the_next(folder, backend):
    """The same prompt again is nearly all foreseen, where copies see a text that never repeats itself."""
    engine = Engine.from_pretrained(folder, backend=backend, dtype="float32", exit_head="none")
    sampling = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.5, seed=3)
    plain = engine.generate([5, 6, 7], sampling, "plain").run()
    answers = [engine.generate([5, 6, 7], sampling, "recycle:lookup=0").run() for _ in range(3)]
    assert [answer.ids for answer in answers] == [plain.ids] * 3
    first, *_, last = (answer.statistics for answer in answers)
    assert last.judged == 0, "no exit head was asked"
    assert last.copied_accepted > first.copied_accepted + 20
    engine.forget()
    anew = engine.generate([5, 6, 7], sampling, "recycle:lookup=0").run().statistics
    assert anew.copied_accepted == first.copied_accepted


def test_both_backends_draft_the_same(folder):
    figures = []
    for backend in ("cpu", "torch"):
        engine = Engine.from_pretrained(folder, backend=backend, dtype="float32", exit_head="none")
        sampling = SamplingParams(max_tokens=80, ignore_eos=True)
        answers = [engine.generate([5, 6, last], sampling, "recycle").run() for last in (7, 8, 7)]
        figures.append([(a.ids, a.statistics.rounds, a.statistics.copied_judged) for a in answers])
    assert figures[0] == figures[1]


def test_answers_side_by_side_share_it(folder):
    engine = Engine.from_pretrained(folder, backend="cpu", dtype="float32", exit_head="none")
    sampling = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.5, seed=3)
    plain = engine.generate([5, 6, 7], sampling, "plain").run()
    engine.generate([5, 6, 7], sampling, "recycle:lookup=0").run()
    both = [engine.generate([5, 6, 7], sampling, "recycle:lookup=0") for _ in range(2)]
    for answer in [generation.run() for generation in both]:
        assert answer.ids == plain.ids
        assert answer.statistics.copied_accepted > 20
