"""Several answers in one iteration, and an engine's end."""

import gc
import os
import threading

import pytest
from support import write_model

from ppsd_rt import Committed, Engine, Generations, PpsdError, SamplingParams, UsageError
from ppsd_rt._native import testing

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, seed=3)
PROMPTS = ["one", "two", "three", [1, 2, 3], "one"]


def load(folder, backend="cpu", **options):
    return Engine.from_pretrained(
        folder, **{"exit_head": "norm:2", "backend": backend, "dtype": "float32", "threads": 2, **options}
    )


@pytest.fixture(scope="module", params=["cpu", "torch"])
def engine(folder, request):
    return load(folder, request.param)


def alone(engine, prompts, n=1):
    asked, found = [], []
    for prompt in prompts:
        for _ in range(n):
            params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, seed=3, index=asked.count(prompt))
            asked.append(prompt)
            found.append(engine.generate(prompt, params, "plain").run().ids)
    return found


def test_a_list_of_answers_is_that_of_one_by_one(engine):
    completions = engine.generate_many(PROMPTS, PARAMS).run()
    assert [completion.ids for completion in completions] == alone(engine, PROMPTS)
    assert completions[0].ids != completions[4].ids  # the second answer to the same prompt


def test_several_answers_to_each_prompt(engine):
    generations = engine.generate_many(["one", "two"], PARAMS, "eesd", n=3)
    assert isinstance(generations, Generations) and len(generations) == 6
    ids = [completion.ids for completion in generations.run()]
    assert ids == alone(engine, ["one", "two"], n=3)
    assert len(set(ids)) == 6


def test_tokens_and_events_carry_the_number_of_their_answer(engine):
    found = {}
    for number, token in engine.generate_many(PROMPTS, PARAMS):
        found.setdefault(number, []).append(token.id)
    expected = alone(engine, PROMPTS)
    assert {number: tuple(ids) for number, ids in found.items()} == dict(enumerate(expected))
    for number, event in engine.generate_many(PROMPTS[:2], PARAMS).events():
        assert isinstance(event, Committed)
        assert event.tokens[0].id in expected[number]


def test_they_are_decoded_side_by_side(folder):
    """All have begun before one ends: more of them wait for each other's first token than one thread could serve."""
    engine, begun = load(folder), threading.Barrier(5)

    def first(done, total):
        if done >= total:
            begun.wait(60)

    from ppsd_rt import RunOptions

    with engine.generate_many(["a", "b", "c", "d", "e"], PARAMS, options=RunOptions(prompt_progress=first)) as answers:
        assert len(answers.run()) == 5


def test_what_is_wrong_with_one_is_said_before_anything_is_decoded(engine):
    with pytest.raises(UsageError, match="the prompt is empty"):
        engine.generate_many(["one", ""], PARAMS)
    with pytest.raises(UsageError, match="n must be at least 1, not 0"):
        engine.generate_many(["one"], n=0)
    assert engine.generate_many([]).run() == []


def test_an_iteration_that_is_left_ends_all(engine):
    long = SamplingParams(max_tokens=400, ignore_eos=True)
    with engine.generate_many(["a", "b", "c"], long) as generations:
        next(iter(generations))
    assert {completion.finish_reason for completion in generations.completions} <= {"cancelled", "length"}
    assert "cancelled" in {completion.finish_reason for completion in generations.completions}
    assert engine.generate("one", PARAMS, "plain").run().ids == alone(engine, ["one"])[0]


def test_an_error_of_one_ends_all(folder):
    engine = load(folder)
    generations = engine.generate_many(["a", "b"], SamplingParams(max_tokens=400, ignore_eos=True))
    engine.use_head("none")
    with pytest.raises(PpsdError, match="the exit head was changed"):
        generations.run()
    assert all(completion.finish_reason == "cancelled" for completion in generations.completions)


def test_a_closed_engine_ends_its_answers_and_says_so(folder):
    with load(folder) as engine:
        generation = engine.generate("one", SamplingParams(max_tokens=400, ignore_eos=True))
        next(generation)
    assert generation.completion.finish_reason == "cancelled"
    assert "closed" in repr(engine)
    for work in (
        lambda: engine.generate("x"),
        lambda: engine.head,
        lambda: engine.stages(),
        lambda: engine.use_head("none"),
    ):
        with pytest.raises(PpsdError, match="is closed: load the model again"):
            work()
    engine.close()


def weights_of(path):
    """What of this file the process has mapped or open."""
    open_files = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    with open("/proc/self/maps") as maps:
        return sum(str(path) in line for line in maps) + open_files.count(str(path))


def parts():
    """How many objects there are that hold weights."""
    return sum(type(thing).__name__ in ("CpuBackend", "Checkpoint") for thing in gc.get_objects())


@pytest.mark.parametrize("how", ["dropped", "closed"])
def test_threads_memory_and_files_are_given_back_at_once(tmp_path, how):
    """Without the cycle collector; an answer that was kept keeps nothing of the model, a half-iterated one neither."""
    path = write_model(tmp_path / "model")
    gc.collect()
    threads, before = testing.running_threads(), parts()
    gc.disable()
    try:
        engine = load(path)
        kept = engine.generate("one", PARAMS)
        kept.run()
        left = engine.generate("two", SamplingParams(max_tokens=400, ignore_eos=True), "elastic")
        next(left)
        engine.generate_many(["a", "b"], PARAMS).run()
        assert parts() > before
        if how == "dropped":
            del engine, left
        else:
            engine.close()
        assert testing.running_threads() == threads
        assert parts() == before
        assert weights_of(path) == 0
        assert len(kept.completion.ids) == 12
    finally:
        gc.enable()
