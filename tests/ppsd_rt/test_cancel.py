"""An answer is ended by whoever wants: the iterating thread, another one, a signal handler, the garbage collector."""

import gc
import threading
from contextlib import suppress

import pytest
from support import write_model

from ppsd_rt import Engine, SamplingParams
from ppsd_rt._native import testing
from ppsd_rt.backend import Cancellation, RunOptions
from ppsd_rt.pipeline.rounds import Limits
from ppsd_rt.pipeline.schedule import parse_schedule

LONG = SamplingParams(max_tokens=80, ignore_eos=True, temperature=0.8, seed=2)
AT = 3  # the round, counted from 0, in which the tests end an answer


@pytest.fixture(scope="module", params=["cpu", "torch"])
def engine(request, tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("cancel") / "model")
    threads = {"cpu": 2, "torch": 1}[request.param]
    return Engine.from_pretrained(folder, exit_head="norm:2", backend=request.param, dtype="float32", threads=threads)


@pytest.fixture(scope="module")
def expected(engine):
    return engine.generate("cancel", LONG, "plain").run().ids


@pytest.fixture
def before(expected):
    """How many threads there are; none of them is that of an earlier test's garbage."""
    gc.collect()
    return testing.running_threads()


@pytest.fixture
def in_round(engine, monkeypatch):
    """Call it with what is to happen in the middle of a round of the next answer."""

    def set_up(action):
        rounds = engine.backend.rounds

        def with_action(*arguments):
            for number, event in enumerate(rounds(*arguments)):
                if number == AT:
                    action()
                yield event

        monkeypatch.setattr(engine.backend, "rounds", with_action)

    return set_up


def check(engine, generation, tokens, expected):
    """The answer has ended after the rounds before AT, and the engine is fit for the next one."""
    completion = generation.completion
    assert completion.finish_reason == "cancelled"
    assert completion.ids == tuple(token.id for token in tokens) == expected[: len(tokens)]
    assert AT <= len(tokens) < len(expected)
    assert completion.statistics.rounds == AT - 1  # the prompt's is none
    assert completion.text == "".join(token.text for token in tokens) + generation.rest()
    assert list(generation) == []
    assert generation.run() == completion


@pytest.mark.parametrize("schedule", ["plain", "eesd", "elastic"])
def test_another_thread_ends_an_answer(engine, expected, in_round, schedule):
    """In the middle of a round: `close` does not wait for it, and the iteration ends after it."""
    inside, go_on, tokens = threading.Event(), threading.Event(), []
    in_round(lambda: (inside.set(), go_on.wait()))
    generation = engine.generate("cancel", LONG, schedule)
    worker = threading.Thread(target=lambda: tokens.extend(generation))
    worker.start()
    inside.wait()
    generation.close()
    generation.close()
    assert worker.is_alive()
    go_on.set()
    worker.join()
    check(engine, generation, tokens, expected)


@pytest.mark.parametrize("schedule", ["plain", "elastic"])
def test_another_thread_ends_an_answer_whose_consumer_is_busy(engine, expected, schedule, before):
    """Nothing works on the answer any more when `close` returns, and the consumer goes on to an end."""
    has_token, go_on, tokens = threading.Event(), threading.Event(), []
    generation = engine.generate("cancel", LONG, schedule)

    def consume():
        for token in generation:
            tokens.append(token)
            has_token.set()
            go_on.wait()

    worker = threading.Thread(target=consume)
    worker.start()
    has_token.wait()
    generation.close()
    assert testing.running_threads() == before
    ids = generation.completion.ids
    go_on.set()
    worker.join()
    assert tuple(token.id for token in tokens) == generation.completion.ids == ids == expected[: len(ids)]
    assert generation.completion.finish_reason == "cancelled"


def test_the_garbage_collector_ends_an_answer(engine, expected, in_round, before):
    """As a part of what is collected, and by what is collected in the middle of it."""
    dropped = iter(engine.generate("cancel", LONG, "elastic"))
    next(dropped)
    generation = None

    class Owner:
        def __del__(self):
            generation.close()

    def collect():
        owner = Owner()
        owner.itself = owner
        del owner
        gc.collect()

    del dropped
    gc.collect()
    assert testing.running_threads() == before
    in_round(collect)
    generation = engine.generate("cancel", LONG, "elastic")
    check(engine, generation, list(generation), expected)


def test_ending_before_the_first_token_and_after_the_last(engine):
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    generation = engine.generate("cancel", params, "plain")
    generation.close()
    generation.close()
    assert list(generation) == []
    assert (generation.completion.ids, generation.completion.finish_reason) == ((), "cancelled")
    with engine.generate("cancel", params, "plain") as generation:
        whole = generation.run()
    generation.close()
    assert generation.completion == whole
    assert whole.finish_reason == "length"


def test_an_exception_leaves_a_context_with_the_answer_ended(engine, before):
    generation = engine.generate("cancel", LONG, "elastic")
    with suppress(KeyError), generation:
        next(iter(generation))
        raise KeyError
    assert testing.running_threads() == before
    assert generation.completion.finish_reason == "cancelled"


def test_two_threads_iterate_over_one_answer(engine, expected):
    generation, parts = engine.generate("cancel", LONG, "elastic"), [[], []]
    workers = [threading.Thread(target=lambda part=part: part.extend(generation)) for part in parts]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert generation.completion.ids == expected
    assert sorted(token.position for part in parts for token in part) == list(range(6, 6 + len(expected)))


@pytest.mark.parametrize("late", [False, True])
def test_the_stages_are_told(engine, late):
    """What has not been asked for yet is not decoded: the loop is 64 events ahead at most."""
    ids, cancellation = engine.encode("cancel"), Cancellation()
    limits = Limits(len(ids) + 400, frozenset())
    rounds = engine.backend.rounds(ids, LONG, parse_schedule("plain"), limits, RunOptions(), cancellation)
    if late:
        next(rounds)
    cancellation.ask()
    assert len(list(rounds)) <= 66


def test_the_next_answer_begins_after_the_round_of_the_one_before(engine, expected):
    """The threads that ended the last answer, and the one that is still in it, never use the stages at once."""
    for schedule in ("plain", "eesd", "elastic") * 3:
        generation, begun = engine.generate("cancel", LONG, schedule), threading.Event()
        tokens, problems = [], []

        def consume(generation=generation, begun=begun, tokens=tokens, problems=problems):
            try:
                for token in generation:
                    tokens.append(token)
                    begun.set()
            except Exception as error:
                problems.append(error)
            begun.set()

        worker = threading.Thread(target=consume)
        worker.start()
        begun.wait()
        generation.close()
        with engine.generate("cancel", LONG, "elastic") as other:
            ids = [token.id for token, _ in zip(other, range(20), strict=False)]
        worker.join()
        assert not problems
        assert tuple(ids) == expected[:20]
        assert tuple(token.id for token in tokens) == expected[: len(tokens)] == generation.completion.ids
