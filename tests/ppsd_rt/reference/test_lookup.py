"""Copied drafts: what is proposed, what is learned from verdicts, and what they bring in whole answers."""

import pytest
from support import write_model

from ppsd_rt import Engine, SamplingParams, UsageError
from ppsd_rt.pipeline.rounds import Draft
from ppsd_rt.pipeline.schedule import AUTO, PLAIN, Auto, copying, describe, named, parse_schedule
from ppsd_rt.reference.lookup import LONG, MOST, PRIORS, Lookup


def proposal(committed, drafts=(), shortest=2):
    lookup = Lookup(shortest)
    lookup.learn(committed)
    return lookup.propose([*committed, *drafts])


def test_what_followed_the_last_time():
    assert proposal([1, 2, 3, 9, 1, 2]) == Draft(3, PRIORS[0], 2)
    assert proposal([1, 2, 3, 1, 2, 4, 9, 1, 2]).token == 4, "the newest occurrence counts"
    assert proposal([1, 2, 3, 9, 7, 2]) is None
    assert proposal([1]) is None
    assert proposal([]) is None


def test_drafts_count_as_text_but_are_not_searched():
    assert proposal([5, 1, 2, 3], drafts=[5, 1]) == Draft(2, PRIORS[0], 2)
    assert proposal([5, 6], drafts=[1, 2, 3, 1, 2]) is None


def test_a_long_match_goes_before_a_newer_one():
    sentence = list(range(10, 10 + LONG))
    text = [*sentence, 1, *sentence[-2:], 2, *sentence]
    found = proposal(text)
    assert (found.token, found.copied) == (1, LONG)


def test_the_match_is_counted_up_to_a_limit():
    text = [7] * 60
    assert proposal(text).copied == MOST
    assert proposal([1, 2, 3, 4, 8, 2, 3, 4], shortest=1).copied == 3


def test_a_match_that_reaches_the_beginning_of_the_text():
    assert proposal([3, 4, 5, 3, 4]) == Draft(5, PRIORS[0], 2)


def test_verdicts_change_the_chance_of_their_length_alone():
    lookup = Lookup(2)
    lookup.learn([1, 2, 3, 9, 1, 2])
    before = lookup.propose([1, 2, 3, 9, 1, 2]).confidence
    lookup.observe([Draft(5, 0.9), Draft(3, 0.5, 30)], 0)  # the head's, and another length
    assert lookup.propose([1, 2, 3, 9, 1, 2]).confidence == before
    lookup.observe([Draft(5, 0.9), Draft(3, before, 2)], 1)  # the head was right, the copy was not
    assert lookup.propose([1, 2, 3, 9, 1, 2]).confidence == pytest.approx(4 * PRIORS[0] / 5)
    for _ in range(100):
        lookup.observe([Draft(3, before, 2)], 1)
    assert lookup.propose([1, 2, 3, 9, 1, 2]).confidence > 0.9


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
def tiny_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("lookup") / "model")


@pytest.fixture(scope="module", params=["cpu", "torch"])
def engine(request, tiny_folder):
    return Engine.from_pretrained(tiny_folder, backend=request.param, dtype="float32", exit_head="none")


@pytest.mark.parametrize("params", [{}, {"temperature": 0.4, "seed": 5}], ids=["greedy", "warm"])
def test_without_an_exit_head(engine, params):
    """`auto` copies: greedy answers of a tiny random model repeat themselves soon."""
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


def test_both_backends_copy_the_same(tiny_folder):
    """The C++ scheduler and its twin propose the same tokens: they accept as many of them in as many passes."""
    figures = []
    for backend in ("cpu", "torch"):
        engine = Engine.from_pretrained(tiny_folder, backend=backend, dtype="float32", exit_head="none")
        answer = engine.generate([5, 6, 7], SamplingParams(max_tokens=120, ignore_eos=True), named("lookup")).run()
        figures.append((answer.ids, answer.statistics.rounds, answer.statistics.copied_judged))
    assert figures[0] == figures[1]
