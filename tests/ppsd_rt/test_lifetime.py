"""Threads, interrupts, exceptions, memory: whatever ends an answer, nothing stays behind and the next one is right."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from support import write_model

from ppsd_rt import Engine, PpsdError, SamplingParams
from ppsd_rt.backend import RunOptions

LONG = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0.8, seed=2)
SCHEDULES = ["plain", "eesd", "elastic"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("lifetime") / "model")


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


def threads():
    return len(os.listdir("/proc/self/task"))


def wait_for_threads(count):
    """A joined thread may stay in /proc for a moment."""
    for _ in range(200):
        if threads() <= count:
            return
        time.sleep(0.01)
    pytest.fail(f"{threads()} threads, of which {count} were there before")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_dropping_the_iterator_ends_the_threads(engine, expected, schedule):
    before = threads()
    stream = iter(engine.generate("lifetime", LONG, schedule))
    assert next(stream).id == expected[0]
    assert threads() > before
    del stream
    gc.collect()
    wait_for_threads(before)
    assert engine.generate("lifetime", LONG, schedule).run().ids == expected


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_exception_in_the_consumer(engine, expected, schedule):
    before = threads()

    def consume():
        for token in engine.generate("lifetime", LONG, schedule):
            assert token.position < 30, "the consumer has had enough"

    with pytest.raises(AssertionError, match="had enough"):
        consume()
    gc.collect()
    wait_for_threads(before)
    assert engine.generate("lifetime", LONG, schedule).run().ids == expected


def test_an_engine_that_is_collected_takes_its_threads_along(folder):
    before = threads()
    engine = load(folder, stages=2, threads=3)
    stream = iter(engine.generate("lifetime", LONG, "elastic"))
    next(stream)
    assert threads() > before
    del engine, stream
    gc.collect()
    wait_for_threads(before)


def test_garbage_collection_while_running(engine, expected):
    ids = []
    for token in engine.generate("lifetime", LONG, "elastic"):
        ids.append(token.id)
        if len(ids) % 20 == 0:
            cycle = [Engine]
            cycle.append(cycle)
            gc.collect()
    assert tuple(ids) == expected


def test_two_engines_in_two_threads(folder, expected):
    engines, answers = [load(folder) for _ in range(2)], {}

    def work(name):
        for _ in range(3):
            answers.setdefault(name, set()).add(engines[name].generate("lifetime", LONG, "elastic").run().ids)

    workers = [threading.Thread(target=work, args=(name,)) for name in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert answers == {0: {expected}, 1: {expected}}


def test_one_engine_and_two_threads(engine, expected):
    """One answer at a time: the later one ends the earlier one with an error, and neither is ever wrong."""
    outcomes = []

    def work():
        for schedule in SCHEDULES * 4:
            try:
                outcomes.append(engine.generate("lifetime", LONG, schedule).run().ids)
            except PpsdError as error:
                assert "another one has begun" in str(error)
                outcomes.append(None)

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert set(outcomes) <= {expected, None}
    assert outcomes.count(expected) >= 1
    assert len(outcomes) == 24
    assert engine.generate("lifetime", LONG, "elastic").run().ids == expected


def test_the_interpreter_lock_is_free_while_the_stages_work(tmp_path):
    """A pass over a long prompt takes one call into the extension; another Python thread goes on counting meanwhile."""
    model = write_model(tmp_path / "model", num_hidden_layers=12, max_position_embeddings=4096)
    engine = load(model, threads=1, dtype="float32")
    counted, done = 0, threading.Event()

    def count():
        nonlocal counted
        while not done.is_set():
            counted += 1
            time.sleep(0.0005)

    worker = threading.Thread(target=count)
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # a thread that does not let go would keep the lock
    try:
        stream = iter(engine.generate(list(range(250)) * 12, LONG, "plain"))
        worker.start()
        before, begun = counted, time.perf_counter()
        next(stream)
        seconds, during = time.perf_counter() - begun, counted - before
    finally:
        sys.setswitchinterval(switch)
        done.set()
        worker.join()
    assert during >= 3, f"counted to {during} in {seconds:.3f} s"


def test_an_absurd_context_is_a_clear_error_and_the_engine_lives_on(tmp_path):
    engine = load(write_model(tmp_path / "model", max_position_embeddings=2**31 - 1))
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    first = engine.generate("abcdefgh", params, "elastic").run().ids
    for tokens in (2**31 - 100, 2**40):
        absurd = SamplingParams(max_tokens=tokens, ignore_eos=True)
        with pytest.raises(PpsdError, match=r"no memory for a KV cache of \d+ tokens; lower --max-tokens"):
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
    result = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    ids, facts = result.stdout.splitlines()
    assert tuple(map(int, ids.split())) == expected[:40]
    assert facts == f"ok [{min(os.sched_getaffinity(0))}]"


@pytest.mark.parametrize("schedule", ["plain", "elastic"])
def test_interrupt_in_the_middle_of_an_answer(tmp_path, schedule):
    """SIGINT: what there is stays printed, statistics follow, status 130; the process ends, so its threads do too."""
    model = write_model(tmp_path / "model", num_hidden_layers=12, max_position_embeddings=8192)
    trace = tmp_path / "trace.json"
    command = [sys.executable, "-m", "ppsd_rt", "abc", "--raw", "--model", str(model), "--exit-head", "norm:3"]
    command += ["-n", "8000", "--schedule", schedule, "--dtype", "float32", "--trace", str(trace)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert first
    assert b"Traceback" not in err
    assert 1 <= int(re.search(rb"(\d+) tokens \|", err)[1]) < 8000
    assert trace.stat().st_size > 100  # the timeline of what there was


def test_a_trace_outlives_its_answer(engine, expected):
    stream = iter(engine.generate("lifetime", LONG, "elastic", RunOptions(trace=True)))
    next(stream)
    stream.close()
    assert engine.backend.spans()
