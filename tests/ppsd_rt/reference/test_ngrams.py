"""Copied drafts: what is counted and proposed, what it is worth in a text, and what it brings in whole answers."""

from dataclasses import replace

import pytest
from support import write_model

from ppsd_rt import Engine, SamplingParams, UsageError
from ppsd_rt.backend import RunOptions
from ppsd_rt.pipeline.rounds import Draft
from ppsd_rt.pipeline.schedule import AUTO, PLAIN, Auto, copying, describe, named, parse_schedule
from ppsd_rt.reference.copies import HEAD, Copies
from ppsd_rt.reference.ngrams import COUNTS, KINDS, MOST, ORDERS, PRIORS, Ngrams, from_own_text

OWN = KINDS // 2


def kind(order, count=0, own=True):
    """Draft.copied of a match of so many tokens."""
    return 1 + own * OWN + ORDERS.index(order) * COUNTS + count


def proposal(committed, drafts=(), shortest=1, others=False):
    ngrams = Ngrams(1 << 16)
    text = ngrams.begin()
    ngrams.learn(committed, 0, 0, text)
    return ngrams.propose([*committed, *drafts], text, shortest, others)


def test_what_followed_the_last_time():
    assert proposal([1, 2, 3, 9, 1, 2]) == Draft(3, PRIORS[OWN + COUNTS], kind(2))
    assert proposal([1, 2, 3, 1, 2, 4, 9, 1, 2]).token == 4, "the newest occurrence counts while none is sure"
    assert proposal([1, 2, 3, 9, 7, 2]).copied == kind(1)
    assert proposal([1, 2, 3, 9, 7, 2], shortest=2) is None
    assert proposal([1]) is None
    assert proposal([]) is None
    assert proposal([1, 2, 1, 2], shortest=0) is None, "nothing is copied"


def test_drafts_count_as_text_but_are_not_searched():
    assert proposal([5, 1, 2, 3], drafts=[5, 1]).copied == kind(2)
    assert proposal([5, 6], drafts=[1, 2, 3, 1, 2]) is None


def test_the_longest_match_counts():
    sentence = list(range(10, 26))
    text = [*sentence, 1, *sentence[-2:], 2, *sentence]
    assert proposal(text) == Draft(1, PRIORS[KINDS - COUNTS], kind(16))
    assert proposal([7] * 60).copied == kind(16, COUNTS - 1)


def test_the_sure_one_stays_and_the_unsure_one_is_replaced():
    ngrams = Ngrams(1 << 16)
    text = ngrams.begin()

    def said(*following):
        for token in following:
            ngrams.learn([2, token], 1, 0, text)
        return ngrams.propose([2], text, 1, False)

    assert said(3, 3, 3, 4) == Draft(3, PRIORS[OWN + 1], kind(1, 1)), "another one halves how often"
    assert said(4, 4) == Draft(4, PRIORS[OWN], kind(1))
    assert said(*[4] * 20).copied == kind(1, COUNTS - 1)
    assert said(*[5] * MOST).token == 5


def test_other_texts_of_the_same_owner():
    ngrams = Ngrams(1 << 16)
    first, second, stranger = ngrams.begin(7), ngrams.begin(7), ngrams.begin(8)
    ngrams.learn([1, 2, 3], 0, 0, first)
    assert ngrams.propose([1, 2], second, 1, True) == Draft(3, PRIORS[COUNTS], kind(2, own=False))
    assert ngrams.propose([1, 2], second, 1, False) is None, "this text has not said it"
    assert ngrams.propose([1, 2], stranger, 1, True) is None
    ngrams.learn([1, 2, 4], 0, 0, second)
    assert ngrams.propose([1, 2], second, 1, True).token == 4, "what this text says replaces what others said"
    ngrams.learn([1, 2, 4, 5], 0, 4, ngrams.begin(7))  # the same conversation goes on: nothing has been said again
    assert ngrams.propose([1, 2], second, 1, True).copied == kind(2, own=False)


def test_verdicts_say_what_a_kind_is_worth():
    ngrams = Ngrams(1 << 16)
    text = ngrams.begin()
    ngrams.learn([1, 2, 3, 9], 0, 0, text)
    pair, single = (ngrams.propose(known, text, 1, False) for known in ([1, 2], [9, 2]))
    for _ in range(200):
        ngrams.observe(pair.copied, True)
    assert ngrams.propose([1, 2], text, 1, False).confidence > 0.8
    assert ngrams.propose([9, 2], text, 1, False) == single


def test_counted_beforehand():
    ngrams = Ngrams(1 << 16)
    text = ngrams.begin()
    ngrams.know([(1, 2, 3, 5), (-1, 2, 4, 99), (-1, 8, 9, 0)])
    assert ngrams.propose([1, 2], text, 0, True).copied == kind(2, COUNTS - 1, own=False)
    assert ngrams.propose([7, 2], text, 0, True).token == 4
    assert ngrams.propose([8], text, 0, True).token == 9
    ngrams.know([(-1, 2, 6, 3)])  # less sure than what is there
    assert ngrams.propose([7, 2], text, 0, True).token == 4


def test_memory_is_bounded_and_what_is_longest_out_of_use_goes_first():
    ngrams = Ngrams(1 << 16)  # 1024 sets of 4 entries; a token has up to 8
    text = ngrams.begin()
    ngrams.learn(list(range(3000)), 0, 0, text)
    assert sum(map(len, ngrams._sets.values())) <= (1 << 16) // 16

    def found(first):
        pairs = ([token - 1, token] for token in range(first, first + 100))
        return sum(ngrams.propose(pair, text, 1, False) is not None for pair in pairs)

    assert found(2890) > 95
    assert found(100) < 5


COPYING = parse_schedule("recycle")


def test_a_source_is_used_for_what_it_has_been_worth_in_this_text():
    """Copies that were wrong, or a head that was right, leave the place to the head."""
    ngrams = Ngrams(1 << 16)
    copies, tokens = Copies(ngrams, 0, 0), [1, 2, 3, 9, 1, 2]
    copies.learn(tokens)
    before = copies.propose(COPYING, tokens)
    assert from_own_text(before.copied)
    assert copies.beats_head(HEAD)
    for _ in range(9):  # 3 is foreseen, and 5 comes: nobody drafted it
        copies.observe(COPYING, [], 0, [*tokens, 5], len(tokens))
    assert copies.propose(COPYING, tokens).confidence < 0.4 * before.confidence
    for _ in range(9):
        copies.observe(COPYING, [Draft(3, 0.5)], 1, tokens, len(tokens))
    assert not copies.beats_head(HEAD)


def test_schedules_name_it():
    assert parse_schedule("auto") is AUTO
    assert parse_schedule("auto:lookup=0") == Auto(0)
    assert describe(Auto(0)) == "auto:lookup=0"
    assert parse_schedule("auto:lookup=0,recycle=off") == Auto(0, recycle=False)
    assert describe(Auto(0, recycle=False)) == "auto:lookup=0,recycle=off"
    recycling = parse_schedule("elastic:recycle=on,lookup=0")
    assert recycling.recycle
    assert parse_schedule(describe(recycling)) == recycling
    assert describe(AUTO) == "auto"
    schedule = parse_schedule("eesd:lookup=4")
    assert schedule.lookup == 4
    assert parse_schedule(describe(schedule)) == schedule
    alone = parse_schedule("lookup:max_chunk=3")
    assert not alone.drafts
    assert parse_schedule(describe(alone)) == alone
    for text, words in (
        ("auto:length=3", "takes lookup=N"),
        ("eesd:lookup=9", "from 0"),
        ("plain:lookup=3", "does not fit"),
        ("lookup:lookup=0", "does not fit"),
    ):
        with pytest.raises(UsageError, match=words):
            parse_schedule(text)


def test_what_auto_is_without_a_head():
    assert copying(AUTO) == named("recycle")
    assert copying(Auto(3, recycle=False)) == named("lookup")
    assert copying(Auto(0, recycle=False)) == PLAIN
    assert copying(Auto(0)) == parse_schedule("recycle:lookup=0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("ngrams") / "model")


def engine_of(folder, backend):
    return Engine.from_pretrained(folder, backend=backend, dtype="float32", exit_head="none")


@pytest.mark.parametrize("params", [{}, {"temperature": 0.4, "seed": 5}], ids=["greedy", "warm"])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_without_an_exit_head(folder, backend, params):
    """`auto` copies: greedy answers of a tiny random model repeat themselves soon."""
    engine = engine_of(folder, backend)
    sampling = SamplingParams(max_tokens=150, ignore_eos=True, **params)
    plain = engine.generate("abc abc abc", sampling, "plain").run()
    copied = engine.generate("abc abc abc", sampling, "auto:recycle=off").run()
    assert copied.ids == plain.ids
    s = copied.statistics
    assert s.schedule == "lookup"
    assert s.judged == 0, "nobody but the text itself was asked"
    assert s.acceptance is None
    assert 1 + s.rounds + s.copied_accepted - s.tokens in (0, 1), "each pass commits one token that nobody foresaw"
    if not params:
        assert s.copied_accepted > 30
        assert s.tokens_per_round > 1.3
    off = engine.generate("abc abc abc", sampling, "auto:lookup=0,recycle=off").run()
    assert off.ids == plain.ids
    assert off.statistics.schedule == "plain"
    assert off.statistics.copied_judged == 0


@pytest.mark.parametrize("schedule", ["lookup", "recycle"])
def test_both_backends_copy_the_same(folder, schedule):
    """The C++ scheduler and its twin propose the same tokens: they accept as many of them in as many passes."""
    figures = []
    for backend in ("cpu", "torch"):
        engine, sampling = engine_of(folder, backend), SamplingParams(max_tokens=120, ignore_eos=True)
        answers = [engine.generate([5, 6, last], sampling, schedule).run() for last in (7, 8, 7)]
        figures.append([(a.ids, a.statistics.rounds, a.statistics.copied_judged) for a in answers])
    assert figures[0] == figures[1]


WARM = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.5, seed=3)  # a text that does not repeat itself


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_one_answer_teaches_the_next_of_the_same_owner(folder, backend):
    """The same prompt again is nearly all foreseen."""
    engine = engine_of(folder, backend)
    plain = engine.generate([5, 6, 7], WARM, "plain").run()

    def right(options=RunOptions()):
        answer = engine.generate([5, 6, 7], WARM, "recycle", options).run()
        assert answer.ids == plain.ids
        assert answer.statistics.judged == 0, "no exit head was asked"
        return answer.statistics.copied_accepted

    first, second = right(), right()
    assert second > first + 20
    assert right(RunOptions(owner=None)) == first, "from this text alone"
    assert right(RunOptions(owner=5)) < second - 15, "a stranger's"
    assert right(RunOptions(owner=5)) > first + 20
    engine.forget()
    assert right() == first


def test_answers_side_by_side_share_it(folder):
    engine = engine_of(folder, "cpu")
    plain = engine.generate([5, 6, 7], WARM, "plain").run()
    engine.generate([5, 6, 7], WARM, "recycle").run()
    both = [engine.generate([5, 6, 7], WARM, replace(named("recycle"), lookup=0)) for _ in range(2)]
    for answer in [generation.run() for generation in both]:
        assert answer.ids == plain.ids
        assert answer.statistics.copied_accepted > 20
