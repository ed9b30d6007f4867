"""Threads, interrupts, exceptions, memory: whatever ends an answer, nothing stays behind and the next one is right."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from support import write_model

from ppsd_rt import Engine, PpsdError, SamplingParams, _native
from ppsd_rt._native import testing
from ppsd_rt.cpu.answers import _end_answers
from ppsd_rt.models.llama import LlamaForCausalLM

LONG = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0.8, seed=2)
SCHEDULES = ["plain", "eesd", "elastic"]


def load(folder, **options):
    return Engine.from_pretrained(
        folder, **{"exit_head": "norm:2", "backend": "cpu", "dtype": "int8", "threads": 2, **options}
    )


@pytest.fixture(scope="module")
def engine(folder):
    return load(folder)


@pytest.fixture(scope="module")
def expected(folder):
    return load(folder).generate("lifetime", LONG, "plain").run().ids


@pytest.fixture
def before(engine):
    """How many threads there are, the loop's and its stage's included; none of them is that of earlier garbage."""
    engine.generate("lifetime", SamplingParams(max_tokens=40, ignore_eos=True), "elastic").run()
    gc.collect()
    return testing.running_threads()


@pytest.fixture
def no_more_threads():
    """Call it with how many more threads start."""
    yield testing.let_threads_start
    testing.let_threads_start(-1)


def in_child(work):
    """What `work` gives in a forked process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(300)  # a child that hangs ends
        try:
            result = work()
        except BaseException as error:
            result = repr(error)
        os.write(write, json.dumps(result).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, "the child has hung, or crashed"
    return json.loads(text)


def test_dropping_the_iterator_ends_the_threads(engine, expected, before):
    stream = iter(engine.generate("lifetime", LONG, "elastic"))
    assert next(stream).id == expected[0]
    decoded = engine.backend._answers._decoded  # by the loop, which has its threads anyway
    assert len(decoded) == 1
    del stream
    gc.collect()
    assert testing.running_threads() == before
    assert not decoded
    assert engine.generate("lifetime", LONG, "elastic").run().ids == expected


def test_an_engine_that_is_collected_takes_its_threads_along(folder, before):
    engine = load(folder, stages=2, threads=3)
    stream = iter(engine.generate("lifetime", LONG, "elastic"))
    next(stream)
    assert testing.running_threads() > before
    del engine, stream
    gc.collect()
    assert testing.running_threads() == before


def test_two_engines_in_two_threads(folder, expected):
    engines, answers = [load(folder) for _ in range(2)], {}

    def work(name):
        for _ in range(2):
            answers.setdefault(name, set()).add(engines[name].generate("lifetime", LONG, "elastic").run().ids)

    workers = [threading.Thread(target=work, args=(name,)) for name in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert answers == {0: {expected}, 1: {expected}}


def test_the_interpreter_lock_is_free_while_the_stages_work(engine, monkeypatch):
    """Another Python thread has its turn while one waits for the extension: sooner or later, however busy the cores."""
    inside, seen = threading.Event(), threading.Event()
    add = engine.backend._answers.loop.add

    def watched(*arguments, **options):
        answer = add(*arguments, **options)

        class Watched:
            cancel, close = answer.cancel, answer.close

            def __iter__(self):
                return self

            def __next__(self):
                inside.set()
                try:
                    return next(answer)
                finally:
                    inside.clear()

        return Watched()

    monkeypatch.setattr(engine.backend._answers, "_loop", SimpleNamespace(add=watched))

    def look():
        while not inside.is_set():
            time.sleep(0)  # lets go of the lock
        seen.set()

    worker = threading.Thread(target=look, daemon=True)
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # a thread that does not let go keeps the lock
    try:
        worker.start()
        while not seen.is_set():
            engine.generate("lifetime", LONG, "elastic").run()
    finally:
        sys.setswitchinterval(switch)


def test_an_absurd_context_is_a_clear_error_and_the_engine_lives_on(tmp_path):
    engine = load(write_model(tmp_path / "model", max_position_embeddings=2**31 - 1))
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    first = engine.generate("abcdefgh", params, "elastic").run().ids
    for tokens in (2**31 - 100, 2**40):
        absurd = SamplingParams(max_tokens=tokens, ignore_eos=True)
        with pytest.raises(PpsdError, match=r"no memory for a KV cache of \d+ tokens: raise --kv-memory, or lower"):
            engine.generate("abcdXYZ and more than before", absurd, "elastic").run()
    other = engine.generate("abcdXYZ and more than before", params, "elastic").run().ids
    assert other == load(tmp_path / "model").generate("abcdXYZ and more than before", params, "plain").run().ids
    assert engine.generate("abcdefgh", params, "eesd").run().ids == first


def test_more_threads_than_cores(folder, expected):
    """In a process that may use one core only: the system places the threads, and the answer is the same."""
    code = (
        "import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from ppsd_rt import Engine, SamplingParams\n"
        "engine = Engine.from_pretrained(sys.argv[1], exit_head='norm:2', backend='cpu', dtype='int8', threads=3)\n"
        "params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, seed=2)\n"
        "print(*engine.generate('lifetime', params, 'elastic').run().ids)\n"
        "print(engine.backend.facts()['pinning'], engine.backend.facts()['cores'])\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    ids, facts = result.stdout.splitlines()
    assert tuple(map(int, ids.split())) == expected[:40]
    assert facts == f"ok [{min(os.sched_getaffinity(0))}]"


LIMITS = r"\(Resource temporarily unavailable\): lower --threads, or raise its limits \(ulimit -u, ulimit -v\)$"


def test_loading_where_no_more_threads_start(folder, before, no_more_threads):
    refused = 0
    while True:
        no_more_threads(refused)
        try:
            load(folder, stages=2, threads=3)
            break
        except PpsdError as error:
            assert re.search(r"^cannot .* with 3 threads: the system starts no more threads " + LIMITS, str(error))
        gc.collect()
        assert testing.running_threads() == before
        refused += 1
    assert refused >= 4  # a team that packs, and those of an engine
    gc.collect()
    assert testing.running_threads() == before


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_answer_where_no_more_threads_start(engine, expected, schedule, before, no_more_threads):
    overlaps = schedule == "elastic"
    engine.backend._answers.forget_loop()
    gc.collect()
    before = testing.running_threads()
    for count in range(3 if overlaps else 2):  # the loop's, its team's, and that of a stage
        no_more_threads(count)
        with pytest.raises(PpsdError, match="^(cannot .* with 2 threads: )?the system starts no more .*" + LIMITS):
            engine.generate("lifetime", LONG, schedule).run()
        engine.backend._answers.forget_loop()
        gc.collect()
        assert testing.running_threads() == before
    no_more_threads(-1)
    assert engine.generate("lifetime", LONG, schedule).run().ids == expected


def test_memory_that_runs_out_while_loading_is_one_line(folder, monkeypatch):
    def no_memory(*_, **__):
        raise MemoryError("std::bad_alloc")

    for owner, name in ((_native, "Model"), (_native, "Engine"), (LlamaForCausalLM, "from_checkpoint")):
        backend = "torch" if owner is LlamaForCausalLM else "cpu"
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, no_memory)
            with pytest.raises(PpsdError, match=r"^not enough memory to .*--dtype$"):
                load(folder, backend=backend, dtype="float32")


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("schedule", ["plain", "eesd", "auto"])
def test_an_answer_asked_for_before_the_head_was_changed_is_refused(folder, schedule, backend):
    engine = load(folder, backend=backend, dtype="float32")
    generation = engine.generate("lifetime", LONG, schedule)
    engine.use_head("none")
    with pytest.raises(PpsdError, match="the exit head was changed after this answer was asked for: ask again"):
        generation.run()
    assert generation.completion.ids == ()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_fork_ends_with_one_line_where_it_uses_the_engine(folder, expected, schedule):
    """And is over at once, whatever the parent was doing; whose answer goes on."""
    engine, decoding, done = load(folder), threading.Event(), threading.Event()
    generation, stages = engine.generate("lifetime", LONG, schedule), engine.stages()
    ids = [next(generation).id]

    def decode():
        while not done.is_set():
            engine.generate("lifetime", LONG, schedule).run()
            decoding.set()

    def work():
        said = []
        for use in (
            generation.run,
            lambda: stages.draft([1]),
            lambda: engine.generate("?"),
            lambda: engine.use_head("none"),
        ):
            with pytest.raises(PpsdError) as error:
                use()
            said.append(str(error.value))
        generation.close()
        engine.close()
        return said

    def drop():
        nonlocal engine, generation, stages
        del engine, generation, stages
        gc.collect()
        _end_answers()  # as when Python ends
        return "dropped"

    def another():
        return load(folder).generate("lifetime", LONG, schedule).run().ids

    worker = threading.Thread(target=decode)
    worker.start()
    decoding.wait()
    try:
        line = "an engine cannot be used after a fork: start processes by spawn, and load the model in each"
        assert in_child(work) == [line] * 4
        assert in_child(drop) == "dropped"
        assert in_child(another) == list(expected)
    finally:
        done.set()
        worker.join()
    assert tuple(ids + [token.id for token in generation]) == expected


def test_a_loop_cannot_be_stepped_after_a_fork(folder):
    step = load(folder).backend.sampling_loop(1, 8, []).step
    step()
    assert "this loop was made before a fork" in in_child(step)
