"""Several answers of one engine: from threads, in one thread, with asyncio; each as it is alone."""

import asyncio
import ctypes
import gc
import os
import threading
import time
from concurrent.futures import wait
from types import SimpleNamespace

import pytest
from support import check_eight, write_model

from ppsd_rt import Committed, Engine, PpsdError, RunOptions, SamplingParams, UsageError, async_generation
from ppsd_rt._native import testing
from ppsd_rt.cpu.machine import kv_memory_of
from ppsd_rt.sampling.grammar import words

HANG = 60.0  # seconds after which a test is over; none is about how soon
PROMPTS = ("one", "another one", "a third, longer one")
SCHEDULES = ("plain", "eesd", "elastic")


def params(seed=1, max_tokens=24):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.9, seed=seed)


@pytest.fixture(scope="module", params=["cpu", "torch"])
def engine(request, tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("many") / "model")
    return Engine.from_pretrained(folder, exit_head="norm:2", backend=request.param, dtype="float32", threads=1)


@pytest.fixture(scope="module")
def alone(engine):
    """The ids of each prompt's answer, decoded alone."""
    return {prompt: engine.generate(prompt, params(), "plain").run().ids for prompt in PROMPTS}


def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize("schedule", ["eesd:stop_rule=fixed,length=3", "auto"])
def test_each_of_eight_is_what_it_is_alone(engine, schedule):
    pytest.importorskip("llguidance")
    check_eight(engine, schedule)


# -- threads -------------------------------------------------------------------------------------------------------


# -- asyncio -------------------------------------------------------------------------------------------------------


def test_async_events_and_completion(engine, alone):
    async def work():
        async with engine.agenerate(PROMPTS[0], params(), "eesd") as generation:
            events = [event async for event in generation.events()]
            assert await generation.run() == generation.completion
        return generation.completion, events

    completion, events = asyncio.run(work())
    assert completion.finish_reason == "length"
    assert all(isinstance(event, Committed) for event in events)
    assert tuple(token.id for event in events for token in event.tokens) == alone[PROMPTS[0]]
    assert completion.statistics.tokens == len(completion.ids)


def test_what_has_come_meanwhile_comes_at_once(engine, alone):
    async def work():
        async with engine.agenerate(PROMPTS[0], params(), "plain") as generation:
            token = await anext(generation)
            while generation.completion.finish_reason == "cancelled":  # decoding does not wait for its consumer
                await asyncio.sleep(0.001)
            return token, [burst async for burst in generation.bursts()]

    token, bursts = asyncio.run(work())
    # What came with the first token, what has come since, and a last round that was on its way.
    assert 1 <= len(bursts) <= 3 and all(bursts)
    tokens = [token for burst in bursts for event in burst for token in event.tokens]
    assert tuple(one.id for one in [token, *tokens]) == alone[PROMPTS[0]]


@pytest.mark.parametrize("how", ["aclose", "cancel", "task", "dropped"])
def test_an_async_answer_ends_early(engine, alone, how, monkeypatch):
    """By its consumer, by the task's cancellation, or because nobody holds it; the next one has its turn."""
    gc.collect()
    threads = testing.running_threads()
    decode = engine.backend.rounds

    def until_cancelled(*request):  # a model this small may be done before its consumer has a core
        rounds, cancellation = decode(*request), request[-1]
        try:
            for number, event in enumerate(rounds):
                yield event
                while number == 8 and not cancellation.asked and cancellation.source is None:
                    time.sleep(0.001)
        finally:
            rounds.close()

    async def consume(generation, begun):
        async for _ in generation:
            begun.set()

    async def work():
        with monkeypatch.context() as patch:
            patch.setattr(engine.backend, "rounds", until_cancelled)
            generation = engine.agenerate(PROMPTS[0], params(max_tokens=480), "plain")
        if how == "task":
            begun = asyncio.Event()
            task = asyncio.create_task(consume(generation, begun))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await generation.aclose()
        else:
            await anext(generation)
        if how == "aclose":
            await generation.aclose()
            assert testing.running_threads() == threads
        elif how == "cancel":
            generation.cancel()
            rest = [token async for token in generation]
            assert len(rest) < 479
        if how == "dropped":
            generation = None
        else:
            assert generation.completion.finish_reason == "cancelled"
            assert 1 <= len(generation.completion.ids) < 480
        async with engine.agenerate(PROMPTS[1], params(), "plain") as other:
            return (await other.run()).ids

    assert asyncio.run(work()) == alone[PROMPTS[1]]


def test_async_errors(engine, monkeypatch):
    with pytest.raises(UsageError, match="the prompt is empty"):
        engine.agenerate("")

    def rounds(*_):
        raise PpsdError("out of order")
        yield

    async def work():
        monkeypatch.setattr(engine.backend, "rounds", rounds)
        generation = engine.agenerate("x", params())
        with pytest.raises(PpsdError, match="out of order"):
            await generation.run()
        with pytest.raises(StopAsyncIteration):
            await anext(generation)

    asyncio.run(work())


# -- the cpu backend's own ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cpu(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("cpu") / "model")
    return Engine.from_pretrained(folder, exit_head="norm:2", backend="cpu", dtype="float32", threads=2, kv_memory="8M")


@pytest.mark.parametrize("schedule", ["ppsd", "elastic"])
def test_an_answer_overlaps_while_it_is_alone(cpu, schedule):
    """Before another one comes, and again when that one has left; nothing is computed twice."""
    prompt, sampled = list(range(5, 150)), params(max_tokens=480)
    expected = cpu.generate(prompt, sampled, "plain").run().ids
    loop = cpu.backend._answers.loop
    before = loop.counts

    def passes():
        return loop.counts["overlapped"] - before["overlapped"]

    generation = cpu.generate(prompt, sampled, schedule)
    events = generation.events()
    for _ in range(4):
        next(events)
    with cpu.generate(PROMPTS[0], params(max_tokens=480), schedule) as other:
        next(iter(other))
        for _ in range(80):  # of which the loop has made no more than 64 before
            next(events)
        alone = passes()
        assert alone > 0
        for _ in range(40):
            next(events)
        assert passes() == alone
    for _ in events:
        pass
    assert passes() > alone
    assert generation.completion.ids == expected
    assert loop.counts["preempted"] == before["preempted"]


def test_an_event_loop_asks_by_itself_for_all_answers(cpu, monkeypatch):
    """Threads begin them, and are free from the first event on; two event loops do not take each other's news."""
    working, most = [], 480  # more events than wait: an answer is not over before somebody asks
    pool = async_generation._threads(os.getpid())
    watched = SimpleNamespace(submit=lambda work: working.append(pool.submit(work)))
    monkeypatch.setattr(async_generation, "_threads", lambda process: watched)

    async def ids(number):
        tokens = []
        async with cpu.agenerate(PROMPTS[number % 3], params(number, most), "plain") as generation:
            async for token in generation:
                tokens.append(token.id)
                if len(tokens) == 2:
                    assert not wait(list(working), HANG).not_done
                    assert generation.completion.finish_reason == "cancelled", "it is not over yet"
        return tuple(tokens)

    async def work(numbers):
        return await asyncio.gather(*map(ids, numbers))

    found = {}
    thread = in_thread(lambda: found.update(other=asyncio.run(work(range(4)))))
    found["this"] = asyncio.run(work(range(4, 8)))
    thread.join()
    assert len(working) == 8
    expected = [cpu.generate(PROMPTS[number % 3], params(number, most), "plain").run().ids for number in range(8)]
    assert [*found["other"], *found["this"]] == expected


def test_forty_at_once(cpu):
    """More than fit: each is as alone; those that wait need no thread of their own."""
    prompts = [f"prompt {number}" for number in range(40)]
    expected = [cpu.generate(prompt, params(number), "plain").run().ids for number, prompt in enumerate(prompts)]

    async def work():
        answers = [cpu.agenerate(prompt, params(number), "auto") for number, prompt in enumerate(prompts)]
        return [completion.ids for completion in await asyncio.gather(*(answer.run() for answer in answers))]

    assert asyncio.run(work()) == expected


def test_what_needs_the_engine_ends_all(cpu):
    first, second = (cpu.generate(prompt, params(max_tokens=400), "plain") for prompt in PROMPTS[:2])
    next(iter(first)), next(iter(second))
    cpu.backend.logits([1, 2, 3])
    for generation in (first, second):
        with pytest.raises(PpsdError, match="this generation was ended"):
            generation.run()
    assert cpu.generate(PROMPTS[0], params(), "plain").run().finish_reason == "length"


@pytest.mark.filterwarnings("error")  # a thread that joins itself gets an error, which nobody sees
@pytest.mark.parametrize("company", [False, True], ids=["in a stage's thread", "in the loop's"])
def test_garbage_collection_in_the_thread_that_decodes(cpu, company):
    """An answer that nobody holds ends wherever it is found: also in the Python of its own mask."""
    dropped, found = threading.Event(), threading.Event()

    class Mask:
        calls = 0

        def fill(self, start, ids, rows, address):
            ctypes.memset(address, 0xFF, rows * words(cpu.config.vocab_size) * 4)
            self.calls += 1
            if self.calls == 6:
                dropped.wait(HANG)
                gc.collect()
                found.set()

    gc.disable()
    try:
        other = cpu.generate(PROMPTS[1], params(), "plain")
        if company:
            next(iter(other))
        schedule = "plain" if company else "elastic"
        answer = cpu.generate(PROMPTS[0], params(max_tokens=60), schedule, RunOptions(masks=Mask))
        next(iter(answer))
        cycle = [answer]
        cycle.append(cycle)  # only the collector finds it
        del answer, cycle
        dropped.set()
        assert found.wait(HANG)
    finally:
        gc.enable()
    done = []
    in_thread(lambda: done.append(cpu.generate(PROMPTS[0], params(), "plain").run().ids)).join(HANG)
    assert done == [cpu.generate(PROMPTS[0], params(), "plain").run().ids]
    assert len(other.run().ids) == 24


def test_kv_memory(cpu, tmp_path):
    folder = cpu.checkpoint.folder
    for wrong in ("a lot", "0", -1, "4 X", True):
        with pytest.raises(UsageError, match="is no size: write bytes, or a text such as 512M or 4G"):
            Engine.from_pretrained(folder, backend="cpu", kv_memory=wrong)
    assert kv_memory_of("2G") == 2 * 2**30
    assert kv_memory_of(" 512 MiB") == 512 * 2**20
    assert kv_memory_of(1000) == 1000
    for backend in ("cpu", "torch"):
        small = Engine.from_pretrained(folder, exit_head="none", backend=backend, dtype="float32", kv_memory="100K")
        with pytest.raises(PpsdError, match=r"no memory for a KV cache of \d+ tokens: raise --kv-memory, or lower"):
            small.generate("x", params(max_tokens=400)).run()


def test_no_memory_for_a_loop_is_said(cpu, monkeypatch):
    def loop(*_, **__):
        raise MemoryError

    cpu.backend._answers.forget_loop()
    with monkeypatch.context() as patch:
        patch.setattr("ppsd_rt._native.Loop", loop)
        with pytest.raises(PpsdError, match=r"not enough memory to hold 8 MB of KV .*: give a smaller --kv-memory"):
            cpu.generate(PROMPTS[0], params(), "elastic").run()
    assert len(cpu.generate(PROMPTS[0], params(), "elastic").run().ids) == 24
