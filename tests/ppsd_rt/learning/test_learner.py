"""Learning beside an engine: exact over swaps, out of the way of requests, and never a worse head in use."""

import io
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing, suppress
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rank_support import Pipeline, ids_of
from serve_support import HANG, serving
from support import EOS, drafts_of, slow, tiny_head, tiny_model, write_model

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.backend import RunOptions
from ppsd_rt.cli import learn as command
from ppsd_rt.cli.main import main
from ppsd_rt.engine import open_model
from ppsd_rt.errors import PpsdError
from ppsd_rt.front import work as engine_side
from ppsd_rt.front.backend import FrontBackend
from ppsd_rt.front.engines import Engines
from ppsd_rt.front.learned import Learned
from ppsd_rt.front.wire import head_from, head_text
from ppsd_rt.learning import heads as kept_heads
from ppsd_rt.learning import learner as learning_beside
from ppsd_rt.learning import train
from ppsd_rt.learning.heads import LearnedHeads, Outcome
from ppsd_rt.learning.kept import Record, read_records
from ppsd_rt.learning.learner import (
    AGAIN_AFTER,
    BEGIN_AFTER,
    FRESH,
    GO_ON_AFTER,
    LET_GO_AFTER,
    MOST_WAITING,
    Child,
    Learner,
    on_battery,
)
from ppsd_rt.learning.train import Learning, gain_of
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.head_file import HeadFile, read_info
from ppsd_rt.models.llama import LlamaForCausalLM
from ppsd_rt.models.tokenizer import load_tokenizer
from ppsd_rt.pipeline.rounds import Round
from ppsd_rt.serve.run import listen

BETTER = Outcome(10_000, 0.6, 0.65, 0.01, 0.6, 0.6)
PARAMS = SamplingParams(max_tokens=24)
FIXED = "eesd:length=3,stop_rule=fixed"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("learning") / "model", tiny_model(3))


@pytest.fixture(scope="module")
def checkpoint(folder):
    return Checkpoint(folder)


@pytest.fixture(scope="module")
def heads(folder, checkpoint, tmp_path_factory):
    """Three of one kind, which draft differently, and hear a layer in the middle."""
    paths = []
    for seed in range(3):
        head = tiny_head(tiny_model(3), "feedback", 2, checkpoint.hash, tap=3)
        head.tap.norm.weight.fill_(0.2)
        torch.manual_seed(seed)
        for parameter in head.parameters():
            parameter.data += 0.05 * seed * torch.randn_like(parameter)
        paths.append(tmp_path_factory.mktemp("heads") / f"{seed}.safetensors")
        head.save(paths[-1], torch.float32)
    return paths


@pytest.fixture(autouse=True)
def warns(caplog):
    """Whatever other tests have set for the whole package."""
    caplog.set_level(logging.WARNING, "ppsd_rt.learning")


def load(folder, head="norm:2", **options):
    return Engine.from_pretrained(folder, dtype="float32", threads=1, exit_head=head, **options)


class Trained:
    """A training that the test ends."""

    def __init__(self, folder):
        self.folder, self.told, self.ended = folder, [], None

    def stop(self):
        self.told.append("stop")

    def go_on(self):
        self.told.append("go on")

    def end(self):
        self.told.append("end")

    def status(self):
        return self.ended


class Beside:
    """A learner in the test's thread and time."""

    def __init__(self, engine, folder, head):
        self.now, self.battery, self.begun, self.ids = 0.0, False, [], np.random.default_rng(1)
        self.learner = Learner(
            engine, folder, str(head), self._begin, lambda: self.battery, lambda: self.now, threaded=False
        )
        engine.learner = self.learner

    def _begin(self, folder):
        self.begun.append(Trained(folder))
        return self.begun[-1]

    def after(self, seconds):
        while self.learner.work():
            pass
        self.now += seconds
        self.learner.look()
        return self.begun[-1].told if self.begun else None

    def keeps(self, tokens):
        for _ in range(0, tokens, 200):
            assert self.learner.kept.add([1], self.ids.integers(256, size=200))


@pytest.fixture
def beside(folder, heads, tmp_path):
    engine = load(folder, heads[0])
    yield Beside(engine, tmp_path / "kept", heads[0])
    engine.close()


def use(folder, head, checkpoint, root, outcome=BETTER):
    """As a training does that has found a better head."""
    found = LearnedHeads(folder, str(root), checkpoint)
    path = found.new_path()
    path.write_bytes(Path(head).read_bytes())
    found.trained(0, outcome, path)


def test_answers_are_kept_as_they_were_given(folder, tmp_path):
    engine = load(folder, learn=tmp_path)
    answers = engine.generate_many(["Why?", "How?"], replace(PARAMS, temperature=0.8, seed=1)).run()
    answers.append(
        engine.generate("What?", replace(PARAMS, presence_penalty=1.0), options=RunOptions(owner=None)).run()
    )
    cancelled = engine.generate("Who?", replace(PARAMS, max_tokens=100))
    next(cancelled)
    cancelled.close()
    engine.close()
    found = [record for record, _ in read_records(tmp_path, 259)]
    assert sorted(tuple(one.ids) for one in found) == sorted((*one.prompt_ids, *one.ids) for one in answers)
    assert sorted((one.free, str(one.owner)) for one in found) == [(False, "None"), (True, "0"), (True, "0")]


def test_nothing_is_kept_unless_it_is_asked_for(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = load(folder)
    engine.generate("Why?", PARAMS).run()
    assert engine.learner is None and not [*tmp_path.iterdir()]


def test_the_memory_of_answers_is_there_again_after_a_restart(folder, tmp_path):
    def copied(owner, **options):
        with load(folder, "none", **options) as engine:
            answer = engine.generate("Tell me.", PARAMS, "recycle", RunOptions(owner=owner)).run()
        return answer.statistics.copied_accepted

    assert copied(7, learn=tmp_path) == copied(7)
    assert copied(7, learn=tmp_path) > copied(7)
    assert copied(8, learn=tmp_path) == copied(7), "another owner's"


def test_answers_are_exact_over_swaps_under_load(folder, heads, checkpoint, tmp_path):
    """Four threads ask while a fifth swaps: between answers, each time that none is in progress."""
    engine = load(folder, heads[0])
    ids = [engine.generate(f"Question {number}", PARAMS, "plain").run().ids for number in range(8)]
    files = [found.load() for path in heads if (found := LearnedHeads(tmp_path, str(path), checkpoint))]
    swapped, refused, wrong, failed, done = 0, 0, [], [], threading.Event()

    def ask(number):
        for turn in range(40):
            which = (number + turn) % 8
            if engine.generate(f"Question {which}", PARAMS, ("auto", "eesd", "ppsd")[turn % 3]).run().ids != ids[which]:
                wrong.append(which)

    def swap():
        nonlocal swapped, refused
        for file in itertools.cycle(files):
            if done.is_set():
                return
            try:
                if engine.swap_head(file):
                    swapped += 1
                else:
                    refused += 1
            except Exception as error:
                failed.append(error)
                return

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    swapper = threading.Thread(target=swap)
    for thread in (*threads, swapper):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    swapper.join()
    for file in files * 17:  # one by one, however the threads fell
        assert engine.swap_head(file)
        assert engine.generate("Question 3", PARAMS).run().ids == ids[3]
        swapped += 1
    assert not wrong and swapped > 50 and refused and not failed


def test_a_learned_head_comes_into_use_between_answers(beside, heads, checkpoint, folder):
    engine, kept = beside.learner._engine(), beside.learner.kept.folder
    engine.generate("Why?", PARAMS).run()
    memory = engine.backend._ngrams
    answer = engine.generate("Why?", PARAMS)
    next(answer)
    use(kept, heads[1], checkpoint, heads[0])
    beside.after(1)
    drafts = engine.head
    assert len(answer.run().ids) == PARAMS.max_tokens
    beside.after(1)
    assert engine.head is not drafts, "the answer has ended"
    now = engine.head
    beside.after(1)
    assert engine.head is now, "once"
    assert engine.backend._ngrams is memory
    LearnedHeads(kept, str(heads[0]), checkpoint).back()
    beside.after(1)
    assert engine.head is not now and beside.learner.heads.state.names == []
    use(kept, heads[2], checkpoint, heads[0])
    engine.close()
    with load(folder, heads[0], learn=kept) as again:
        assert again.learner._names == ["00002.safetensors"]


def test_a_process_that_is_killed_while_swapping_leaves_a_head(heads, checkpoint, tmp_path, monkeypatch):
    use(tmp_path, heads[1], checkpoint, heads[0])
    with monkeypatch.context() as patch:
        patch.setattr("ppsd_rt.learning.kept.os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            use(tmp_path, heads[2], checkpoint, heads[0])
    found = LearnedHeads(tmp_path, str(heads[0]), checkpoint)
    assert found.state.names == ["00001.safetensors"] and found.load() is not None
    use(tmp_path, heads[2], checkpoint, heads[0])
    assert found.state.names == ["00001.safetensors", "00003.safetensors"]
    assert sorted(path.name for path in (tmp_path / "heads").glob("*.safetensors")) == found.state.names


def test_a_damaged_head_gives_way_to_the_one_before(heads, checkpoint, tmp_path, caplog):
    found = LearnedHeads(tmp_path, str(heads[0]), checkpoint)
    for head in heads[1:]:
        use(tmp_path, head, checkpoint, heads[0])
    (tmp_path / "heads" / "00002.safetensors").write_bytes(b"damaged")
    assert found.load().tensors.keys() and "the head before it is used" in caplog.text
    (tmp_path / "heads" / "00001.safetensors").unlink()
    assert found.load().info == read_info(heads[0])
    (tmp_path / "heads" / "state.json").write_text("{")
    assert found.state.names == [] and found.state.learned == 0 and found.state.outcomes == []


def test_heads_that_began_with_another_one_are_not_used(heads, checkpoint, tmp_path):
    use(tmp_path, heads[1], checkpoint, heads[0])
    assert LearnedHeads(tmp_path, str(heads[2]), checkpoint).state.names == []
    for name in ("auto", "none", "norm:2"):
        other = LearnedHeads(tmp_path, name, checkpoint)
        assert other.state.names == [] and other.load() is None, "nothing ships for this model"


def test_a_training_begins_when_there_is_enough_and_the_engine_is_idle(beside, caplog):
    beside.keeps(FRESH - 200)
    assert beside.after(BEGIN_AFTER) is None
    beside.keeps(200)
    beside.battery = True
    assert beside.after(1) is None, "on battery it rests"
    beside.battery = False
    assert beside.after(1) == [] and beside.begun[0].folder == beside.learner.kept.folder
    beside.begun[0].ended = -signal.SIGKILL
    beside.after(1)
    assert caplog.messages == ["learning was ended by signal 9"]
    beside.after(BEGIN_AFTER)
    assert len(beside.begun) == 1, "what failed is tried again when there is more"
    beside.keeps(FRESH)
    beside.after(1)
    assert len(beside.begun) == 2
    beside.begun[1].ended = 0
    beside.learner.heads.trained(0, BETTER, None)
    beside.after(1)
    assert beside.learner.kept.fresh == 0


def test_a_request_stops_the_training_before_anything_else(beside):
    engine = beside.learner._engine()
    beside.keeps(FRESH)
    assert beside.after(BEGIN_AFTER) == []
    answer = engine.generate("Why?", PARAMS)
    assert beside.begun[0].told == [], "nothing is decoded yet"
    next(answer)
    assert beside.begun[0].told == ["stop"]
    engine.generate("How?", PARAMS).run()
    assert beside.after(GO_ON_AFTER) == ["stop"], "one answer has not ended"
    answer.run()
    beside.after(0)
    assert beside.after(GO_ON_AFTER / 2) == ["stop"]
    assert beside.after(GO_ON_AFTER / 2) == ["stop", "go on"]
    beside.battery = True
    assert beside.after(1) == ["stop", "go on", "stop"]
    assert beside.after(LET_GO_AFTER) == ["stop", "go on", "stop", "end"], "its memory is given back"
    beside.battery = False
    beside.after(1)
    assert len(beside.begun) == 2
    engine.close()
    assert beside.begun[1].told == ["end"]


def test_an_exception_ends_no_learner_and_is_said_once(folder, heads, tmp_path, monkeypatch, caplog):
    """Whatever it is: the learner's thread counts the answers in progress, and keeps them."""
    monkeypatch.setattr(learning_beside, "LOOK", 0.0)
    engine, looks = load(folder, heads[0]), threading.Semaphore(0)

    def look(_):
        looks.release()
        raise IndexError("a state that cannot be read")

    monkeypatch.setattr(Learner, "look", look)
    learner = engine.learner = Learner(engine, tmp_path, str(heads[0]))
    for number in range(20):
        engine.generate(f"No {number}", PARAMS).run()
    assert all(looks.acquire(timeout=HANG) for _ in range(40))
    engine.close()
    assert learner._running == 0 and len([*read_records(tmp_path, 259)]) == 20
    assert [record.exc_info is not None for record in caplog.records] == [True], "with a traceback"


def test_a_state_that_cannot_be_read_when_a_training_has_ended_is_no_error(beside):
    beside.keeps(FRESH)
    beside.after(BEGIN_AFTER)
    beside.begun[0].ended = 0
    assert beside.after(1) == [] and beside.learner.heads.state.outcomes == []
    assert beside.learner.kept.fresh == 0


def test_weeks_of_answers_that_cannot_be_kept_take_no_memory(beside):
    """A disk that hangs: what waits to be kept is bounded, and answers in progress are counted all the same."""
    answer = beside.learner._engine().generate("Why?", PARAMS)
    answer.run()
    for _ in range(10 * MOST_WAITING):
        beside.learner.begun()
        beside.learner.ended(answer)
    waiting = [beside.learner._ended.get_nowait() for _ in range(beside.learner._ended.qsize())]
    assert sum(map(bool, waiting)) == MOST_WAITING
    for item in waiting:
        beside.learner._ended.put(item)
    beside.after(0)
    assert beside.learner._running == 0


def test_a_head_that_cannot_come_into_use_waits(beside, heads, checkpoint, monkeypatch):
    """A day of looks, one a second."""
    tried = []

    def refused(file):
        tried.append(file)
        raise PpsdError("not enough memory to pack the exit head")

    engine, kept = beside.learner._engine(), beside.learner.kept.folder
    use(kept, heads[1], checkpoint, heads[0])
    swap = engine.backend.pack_head
    monkeypatch.setattr(engine.backend, "pack_head", refused)
    for _ in range(1440):
        with suppress(PpsdError):
            beside.after(60)
    assert len(tried) == 144, "every ten minutes"
    use(kept, heads[2], checkpoint, heads[0])
    monkeypatch.setattr(engine.backend, "pack_head", swap)
    beside.after(AGAIN_AFTER)
    assert beside.learner._names == ["00001.safetensors", "00002.safetensors"]


def test_an_answer_that_is_dropped_is_no_longer_in_progress(beside):
    beside.keeps(FRESH)
    answer = beside.learner._engine().generate("Why?", PARAMS)
    next(answer)
    beside.after(BEGIN_AFTER)
    del answer
    beside.after(0)
    beside.after(BEGIN_AFTER)
    assert len(beside.begun) == 1


def test_the_child_is_stopped_goes_on_and_ends(tmp_path, monkeypatch):
    """A real process: its state is the kernel's. Beside rank 0 it is no rank."""
    begun = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(
        learning_beside.subprocess,
        "Popen",
        lambda command, **how: begun.append(how["env"]) or popen(["/bin/sleep", "600"], **how),
    )
    child = Child(tmp_path)
    pid = child._process.pid
    assert begun == [{name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}]

    def waits_for(options, status):
        found, how = learning_beside.os.waitpid(pid, options)
        return found == pid and status(how)

    child.stop()
    assert waits_for(learning_beside.os.WUNTRACED, learning_beside.os.WIFSTOPPED)
    child.go_on()
    assert waits_for(learning_beside.os.WCONTINUED, learning_beside.os.WIFCONTINUED)
    child.stop()
    assert child.status() is None
    child.end()
    assert child.status() == -signal.SIGKILL


popen = subprocess.Popen


def test_the_child_recedes_and_knows_its_parent(monkeypatch):
    """What it asks of the system; a process that really recedes would hold the tests up on a busy machine."""
    asked = []
    monkeypatch.setattr(command.os, "nice", lambda by: asked.append(("nice", by)))
    monkeypatch.setattr(command.os, "sched_setscheduler", lambda pid, policy, _: asked.append((pid, policy)))
    monkeypatch.setattr(command.ctypes, "CDLL", lambda _: SimpleNamespace(prctl=lambda *how: asked.append(how)))
    monkeypatch.setattr(command.Path, "write_text", lambda path, text: asked.append((str(path), text)))
    command._recede(command.os.getppid())
    memory = ("/proc/self/oom_score_adj", "1000")
    assert asked == [("nice", 19), (0, command.os.SCHED_IDLE), memory, (1, signal.SIGKILL)]
    with pytest.raises(PpsdError, match="has ended"):
        command._recede(1 << 30)


def test_children_import_nothing_from_the_working_folder(tmp_path, monkeypatch):
    """Such as another user's `numpy.py`: the child that learns begins by itself."""
    started = []
    monkeypatch.setattr(learning_beside.subprocess, "Popen", lambda command, **_: started.append(command))
    Child(tmp_path)
    command = started[0][: started[0].index("learn")]
    (tmp_path / "numpy.py").write_text("raise SystemExit('somebody else runs')")
    done = popen([*command, "learn", "--status", "none"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert "holds no answers" in done.communicate()[1]


def test_a_machine_on_battery(tmp_path):
    def supply(name, **facts):
        (tmp_path / name).mkdir(exist_ok=True)
        for fact, value in facts.items():
            (tmp_path / name / fact).write_text(value + "\n")

    assert not on_battery(tmp_path)
    supply("AC", online="1")
    supply("BAT0", status="Full")
    supply("mouse", status="Discharging", scope="Device")
    assert not on_battery(tmp_path)
    supply("BAT0", status="Discharging")
    assert on_battery(tmp_path)


def test_a_fork_keeps_nothing_and_leaves_the_folder(folder, tmp_path):
    engine = load(folder, learn=tmp_path)
    engine.generate("Why?", PARAMS).run()
    if (pid := learning_beside.os.fork()) == 0:
        with suppress(BaseException):
            engine.close()
            learning_beside.os._exit(0)
        learning_beside.os._exit(1)
    assert learning_beside.os.waitstatus_to_exitcode(learning_beside.os.waitpid(pid, 0)[1]) == 0
    engine.generate("What?", PARAMS).run()
    engine.close()
    assert len([*read_records(tmp_path, 259)]) == 2


def test_where_learning_cannot_be_is_said_in_one_line(folder, tmp_path, capsys):
    given = ["--port", "0", "--learn", str(tmp_path / "kept"), "--backend", "torch"]
    assert main(["serve", "-m", str(folder), *given]) == 2
    assert "--learn" in (said := capsys.readouterr().err) and said.count("\n") == 1
    assert not (tmp_path / "kept").exists()


def test_ranks_draft_with_a_learned_head_from_the_next_answer_on(folder, heads, checkpoint):
    """Also where an answer was cancelled whose passes were under way."""
    sizes = 2, checkpoint.config.num_hidden_layers - 2

    def drafts(pipeline):
        events = pipeline.run([5, 6, 7], PARAMS, FIXED, report_drafts=True)
        return [event for event in events if not isinstance(event, Round)], ids_of(events)

    one, wanted = (Pipeline(folder, sizes, head, "float32") for head in heads[:2])
    with closing(one), closing(wanted):
        learned = one.slices[0].with_head(HeadFile.load(heads[1], checkpoint))
        old, ids = drafts(one)
        answer = one.add([5, 6, 7], replace(PARAMS, max_tokens=100), "ppsd")
        next(iter(answer))
        assert not one.loop.draft_with(learned)
        answer.close()
        while not one.loop.draft_with(learned):
            assert not one.failures
        new, again = drafts(one)
        assert (new, again) == drafts(wanted) and again == ids and new != old


@pytest.mark.slow
def test_rank_0_keeps_and_drafts_with_the_head_of_the_folder(folder, heads, checkpoint, tmp_path):
    kept = tmp_path / "kept"
    load(folder, heads[0], learn=kept).close()
    use(kept, heads[1], checkpoint, heads[0])
    command = [sys.executable, "-m", "ppsd_rt", "--ranks", "2", "-m", str(folder), "--exit-head", str(heads[0])]
    command += ["--dtype", "float32", "-n", "60", "--threads", "1", "--learn", str(kept), "--json", "--schedule", FIXED]
    ranks = subprocess.run([*command, "Why?"], capture_output=True, text=True, timeout=HANG)
    assert ranks.returncode == 0, ranks.stderr
    said, drafts = json.loads(ranks.stdout), []
    ((record, _),) = read_records(kept, 259)
    assert record.ids[record.answer :].tolist() == said["ids"]
    for head in heads[:2]:
        with load(folder, head) as engine:
            asked = [{"role": "user", "content": "Why?"}], replace(PARAMS, max_tokens=60), FIXED
            done = engine.generate(*asked, RunOptions(owner=None)).run()
        assert list(done.ids) == said["ids"]
        drafts.append((done.statistics.judged, done.statistics.accepted))
    assert drafts[0] != drafts[1] == (said["stats"]["judged"], said["stats"]["accepted"])


class Front:
    """A front, and engines in threads that come to it."""

    def __init__(self, folder, port=0):
        self._threads, self.listener = [], listen("127.0.0.1", port)
        self.engines = Engines(self.listener, "key", HANG)
        self._folder = folder

    def come(self, engine):
        address = self.listener.getsockname()[:2]
        self._threads.append(threading.Thread(target=engine_side.work, args=(engine, address, "key", HANG, True)))
        self._threads[-1].start()

    def engine(self):
        return Engine(*open_model(str(self._folder), "cpu"), FrontBackend(self.engines.first(), self.engines), "tiny")

    def close(self):
        self.engines.close()
        for thread in self._threads:
            thread.join(HANG)
            assert not thread.is_alive()


@pytest.fixture
def front(folder):
    front = Front(folder)
    yield front
    front.close()


def drafted(engine):
    return drafts_of(engine, "Once", PARAMS, FIXED)


def swaps_of(backend, monkeypatch):
    """A queue that gets what the backend swaps to."""
    swapped, swap = SimpleQueue(), backend.swap_head
    monkeypatch.setattr(backend, "swap_head", lambda *which: (swap(*which), swapped.put(which))[0])
    return swapped


def test_engines_of_a_front_draft_with_what_it_has_learned(front, folder, heads, checkpoint, tmp_path, monkeypatch):
    """Those that are there, and one that comes later."""
    engines = [load(folder, heads[0]) for _ in range(2)]
    swapped = [swaps_of(engine.backend, monkeypatch) for engine in engines]
    undisturbed = engines[0].generate("Why?", PARAMS, "plain").run().ids
    front.come(engines[0])
    one = front.engine()
    beside = Beside(one, tmp_path, heads[0])
    use(tmp_path, heads[1], checkpoint, heads[0])
    beside.after(1)
    front.come(engines[1])
    for queue in swapped:
        queue.get(timeout=HANG)
    file = HeadFile.load(heads[1], checkpoint)
    assert one.head == file.info and one.generate("Why?", PARAMS).run().ids == undisturbed
    wanted, old = load(folder, heads[0]), drafted(load(folder, heads[0]))
    wanted.swap_head(head_from(head_text(file), checkpoint))
    assert drafted(one) == drafted(engines[0]) == drafted(engines[1]) == drafted(wanted) != old
    one.close()


def test_what_a_front_has_learned_comes_between_answers_and_fits(folder, heads, checkpoint, monkeypatch, caplog):
    engine, text = load(folder, heads[0]), head_text(HeadFile.load(heads[1], checkpoint))
    swapped, learned = swaps_of(engine.backend, monkeypatch), Learned(engine)
    learned.begins()
    learned.use("this one", lambda: text)
    assert swapped.empty(), "an answer that a swap ends would be an error"
    learned.ended()
    swapped.get_nowait()
    learned.use("this one", lambda: pytest.fail("it is there"))
    caplog.set_level(logging.WARNING, "ppsd_rt.front")
    Learned(load(folder)).use("this one", lambda: text)
    assert "it has other sizes than this engine's: give both the same --exit-head" in caplog.text
    never = Learned(SimpleNamespace(backend=SimpleNamespace(head=None)))  # as on `torch`
    never.recall([1], 0)
    never.use("this one", lambda: pytest.fail("of no use"))


def test_an_engine_that_outlives_its_front_goes_back_with_its_user(folder, heads, checkpoint, tmp_path, monkeypatch):
    engine, first = load(folder, heads[0]), Front(folder)
    swapped, old = swaps_of(engine.backend, monkeypatch), drafted(engine)
    address = first.listener.getsockname()[:2]

    def work():
        with suppress(PpsdError):
            engine_side.work(engine, address, "key", HANG)

    thread = threading.Thread(target=work)
    thread.start()
    one, found = first.engine(), LearnedHeads(tmp_path, str(heads[0]), checkpoint)
    beside = Beside(one, tmp_path, heads[0])
    swapped.get(timeout=HANG)
    use(tmp_path, heads[1], checkpoint, heads[0])
    beside.after(1)
    swapped.get(timeout=HANG)
    assert drafted(one) != old
    one.close()
    first.close()
    found.back()
    second = Front(folder, address[1])
    one = second.engine()
    Beside(one, tmp_path, heads[0])
    swapped.get(timeout=HANG)
    assert drafted(one) == old
    one.close()
    second.close()
    engine.backend.failure = "over"  # as of a rank that is lost
    thread.join(HANG)
    assert not thread.is_alive()


def test_an_engine_that_comes_hears_what_the_others_have_heard(front, folder, heads, monkeypatch):
    heard = SimpleQueue()
    monkeypatch.setattr(engine_side._Calls, "take", lambda calls, message: heard.put(message))
    monkeypatch.setattr("ppsd_rt.front.engines.PART", 3)
    told = [("recall", {"ids": [1], "owner": 0}), ("head", {"hash": "1", "head": "older"})]
    told += [("recall", {"ids": [2], "owner": 7}), ("head", {"hash": "2", "head": "newer"})]
    for kind, fields in told:
        front.engines.tell(kind, **fields)
    front.come(load(folder, heads[0]))
    messages = [heard.get(timeout=HANG) for _ in range(5)]
    assert [message.get("ids", message.get("part")) for message in messages] == [[1], [2], "new", "er", ""]
    assert messages[1]["owner"] == 7


def test_engines_of_a_front_remember_what_it_has_kept(front, folder, heads, tmp_path):
    with load(folder, heads[0], learn=tmp_path) as engine:
        engine.generate("Tell me.", PARAMS, options=RunOptions(owner=7)).run()
    front.come(load(folder, heads[0]))
    one = front.engine()
    one.learn(tmp_path, str(heads[0]))
    found = [one.generate("Tell me.", PARAMS, "recycle", RunOptions(owner=owner)).run() for owner in (8, 7)]
    assert found[0].statistics.copied_accepted < found[1].statistics.copied_accepted
    one.close()
    assert [record.owner for record, _ in read_records(tmp_path, 259)] == [7, 8], "each has his own"


def test_owners_are_the_same_after_a_restart(folder, tmp_path):
    numbers = []
    for _ in range(2):
        with load(folder, learn=tmp_path) as engine, serving(engine) as served:
            numbers.append(served.service.owners.options("", "Ann", True, False).owner)
            served.post(user="Ann")
            engine.learner.work()
            metrics = served.http.get("/metrics").text
            ((day, share),) = served.http.get("/health").json()["acceptance_by_day"].items()
    assert numbers[0] == numbers[1] and f'ppsd_draft_acceptance_ratio{{day="{day}"}} {share}' in metrics


def test_what_is_not_to_be_stored_is_not_kept(folder, tmp_path):
    with load(folder, learn=tmp_path) as engine, serving(engine) as served:
        for number, store in enumerate((False, None, True)):
            said = {"store": store, "ignore_eos": True, "max_tokens": 20}
            asked = {"input": f"Question {number}", "max_output_tokens": 20}
            assert served.http.post("/v1/responses", json=asked | said).status_code == 200
            assert served.post(messages=[{"role": "user", "content": f"And {number}?"}], **said).status_code == 200
    found = [record.ids[: record.answer].tolist() for record, _ in read_records(tmp_path, 259)]
    wanted = [f"{word} {number}" for number in (1, 2) for word in ("Question", "And")]
    assert [word in engine.tokenizer.decode(ids) for word, ids in zip(wanted, found, strict=True)] == [True] * 4


# Training itself, on a model whose tiny head has learned nothing yet.


@pytest.fixture
def learning(folder, checkpoint, heads, tmp_path, monkeypatch):
    """Answers of a user, all alike, and what learns from them."""
    monkeypatch.setattr(kept_heads, "LEAST_TOKENS", 1000)
    monkeypatch.setattr(train, "RATE", 2.0)
    kept = tmp_path / "kept"
    with load(folder, heads[0], learn=kept) as engine:
        prompts = [f"Tell me about number {number}." for number in range(60)]
        engine.generate_many(prompts, SamplingParams(max_tokens=60, ignore_eos=True)).run()
    model = LlamaForCausalLM.from_checkpoint(checkpoint, torch.float32)
    found = LearnedHeads(kept, str(heads[0]), checkpoint)
    settings = replace(train.SETTINGS, epochs=6, batch_tokens=512)
    return Learning(kept, found, checkpoint, load_tokenizer(folder), model, "float32", 1, 2, settings)


def ran(learning):
    return [phase for phase, _ in itertools.groupby(phase for phase, _, _ in learning.run())]


def test_a_head_that_is_right_more_often_comes_into_use(learning):
    assert ran(learning) == ["writing text to mix in", "reading answers", "training"]
    outcome = learning.outcome
    assert outcome.after > outcome.before + outcome.error and outcome.better
    assert learning.heads.state.names == ["00001.safetensors"] and learning.heads.state.outcomes == [outcome]
    *_, (_, end) = read_records(learning.folder, 259)
    assert learning.heads.state.learned == end
    with pytest.raises(PpsdError, match="has 0 answer tokens that are new"):
        ran(learning)
    info = read_info(learning.folder / "heads" / "00001.safetensors")
    assert info.recipe["learned_tokens"] == outcome.trained and info.acceptance["kept_answers"] == round(
        outcome.after, 4
    )


def test_what_judges_is_the_newest_and_never_trained_on(learning):
    from ppsd_rt.distill.deduplication import Deduplication

    judged, learned, _ = learning._divide(Deduplication(learning.tokenizer, ()), 100_000)
    prompts = [learning.tokenizer.decode(text.ids[: text.answer].tolist()) for text in (*learned, *judged)]
    order = [learning.tokenizer.decode(one.ids[: one.answer].tolist()) for one, _ in read_records(learning.folder, 259)]
    assert prompts == order and len(judged) == 8


def test_a_head_that_is_no_better_is_dropped(learning, monkeypatch):
    monkeypatch.setattr(train.Trainer, "learn", lambda *_: None)
    ran(learning)
    assert not learning.outcome.better and learning.heads.state.names == []
    assert learning.heads.state.outcomes == [learning.outcome] and "stays" in str(learning.outcome)


def test_a_training_that_is_killed_changes_nothing_and_may_begin_anew(learning):
    for seen in ("writing text to mix in", "reading answers", "training"):
        for phase, _, _ in (run := learning.run()):
            if phase == seen:
                run.close()
                break
        assert learning.heads.state.names == [] and learning.heads.state.learned == 0
    ran(learning)
    assert learning.heads.state.names


def test_answers_to_some_general_prompts_judge_and_those_to_others_are_mixed_in(learning, monkeypatch):
    seen, judge = [], Learning._judge

    def asked(texts):
        return {tuple(text.ids[: text.answer].tolist()) for text in texts}

    def spy(self, before, trainer, judged, fixed, tokens):
        seen.append((asked(fixed), asked(trainer.texts), asked(judged)))
        return judge(self, before, trainer, judged, fixed, tokens)

    monkeypatch.setattr(Learning, "_judge", spy)
    (learning.folder / "own-int8-abc-2-4").mkdir()
    ran(learning)
    ((fixed, mixed, judged),) = seen
    states = learning.heads.load().info.states(learning.checkpoint.config.num_hidden_layers)
    prompts = learning._own_text(states).prompts
    assert fixed and fixed <= set(prompts.held_out) and mixed & set(prompts.learned)
    assert not (mixed & (fixed | judged)), "what judges is not learned from"
    assert len([*learning.folder.glob("own-*")]) == 1, "text of other prompts is gone"


def test_too_little_to_learn_from_is_said_before_torch_is_loaded(learning, monkeypatch, capsys):
    monkeypatch.setattr(kept_heads, "LEAST_TOKENS", 100_000)
    monkeypatch.setattr(command, "need", lambda *_: pytest.fail("torch takes seconds"))
    assert main(["learn", str(learning.folder)]) == 1
    assert capsys.readouterr().err.endswith("has 3,600 answer tokens that are new: 100,000 are the least\n")


def test_without_general_prompts_nothing_is_learned(learning, monkeypatch):
    """Nothing would tell what the head forgets of them."""
    monkeypatch.setattr(train, "encode", lambda *_: [1] * 10_000)
    with pytest.raises(PpsdError, match="no general prompt fits this model's context"):
        ran(learning)


def test_a_prompt_that_was_typed_on_judges_nothing_that_was_learned():
    def record(prompt, answer):
        return Record(np.array([*prompt, *answer], np.int32), len(prompt), True, 0, 0)

    code, answer = [*range(100, 200)], [*range(20)]
    one = record([*code, 7, 8], answer)
    assert train._alike(record([*code, 7, 8], [5] * 20), one), "at a temperature"
    assert train._alike(record([*code, 7], [8, *answer]), one), "a letter less"
    assert not train._alike(record([*code, 7], [5] * 20), one), "answered otherwise"
    assert not train._alike(record([7, 8, 9], answer), record([7, 8, 8], answer)), "short questions"
    assert not train._alike(record(range(300, 402), answer), one)


def test_the_room_for_a_training_counts_what_it_holds(learning, monkeypatch):
    """A head that drafts from a large vocabulary holds several probabilities of each id."""
    head, free = learning.heads.load(), []
    monkeypatch.setattr(train, "spare_memory", lambda: free[-1])
    free.append(train.MOST_STATES + 4 * 5 * train.CHUNK * 259)  # and its optimizer
    with pytest.raises(PpsdError, match="GB memory"):
        learning._check_room(head, 0)
    free.append(2 * train.MOST_STATES)
    learning._check_room(head, 0)
    monkeypatch.setattr(train.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(PpsdError, match="GB of the disk"):
        ran(learning)


@pytest.mark.parametrize(("kind", "owner", "name"), [("safetensors", Path, "write_bytes"), slow("json", os, "replace")])
def test_a_disk_that_fills_while_it_learns_leaves_the_head_in_use(learning, monkeypatch, capsys, kind, owner, name):
    """At the head's own file, and at the one that says that it is in use."""
    little, real = partialmethod(Learning.__init__, slots=2, settings=learning.settings), getattr(owner, name)

    def full(path, *given):
        if Path(path).parent.name == "heads" and f".{kind}" in f"{path} {given[0] if name == 'replace' else ''}":
            raise OSError(28, os.strerror(28))
        return real(path, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Learning, "__init__", little)
        patch.setattr(owner, name, full)
        assert main(["learn", str(learning.folder), "--threads", "1"]) == 1
    said = capsys.readouterr().err
    assert "No space left on device" in said and "Traceback" not in said
    assert learning.heads.state.names == [] and learning.heads.state.learned == 0


def test_a_gain_has_an_error_by_answers():
    gain, error = gain_of([0.5, 0.5], [0.6, 0.6], [10, 30])
    assert gain == pytest.approx(0.1) and error == pytest.approx(0.0)
    gain, error = gain_of([0.5, 0.5], [0.7, 0.5], [10, 10])
    assert gain == pytest.approx(0.1) and error == pytest.approx(0.1)
    assert not Outcome(1, 0.5, 0.5 + error, error, 0.5, 0.5).better
    assert not Outcome(1, 0.5, 0.8, error, 0.5, 0.494).better and Outcome(1, 0.5, 0.8, error, 0.5, 0.496).better


@pytest.mark.parametrize(("forgets", "kept"), [(0.004, 1.0), (0.006, 0.7), (0.009, 0.5), (0.02, 0.35)])
def test_so_much_of_what_was_learned_is_kept_as_general_prompts_allow(forgets, kept):
    """Heads of one weight, 0 before and 1 as trained: it gains by it on answers, and loses `forgets` on others."""
    answers, own = [SimpleNamespace(tokens=6)], []

    def of(weight):
        head = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(head.weight, weight)
        return SimpleNamespace(
            heads=[head], accept=lambda texts: [[0.5 + (0.25 if texts else -forgets) * head.weight.item()]]
        )

    outcome = Learning._judge(None, of(0.0), of(1.0), answers, own, 1)
    assert outcome.after - outcome.before == pytest.approx(0.25 * kept)
    assert outcome.own_before - outcome.own_after == pytest.approx(forgets * kept)


def test_the_command_trains_tells_and_goes_back(learning, capsys, monkeypatch):
    kept = str(learning.folder)
    little = partialmethod(Learning.__init__, slots=2, settings=learning.settings)
    monkeypatch.setattr(Learning, "__init__", little)
    assert main(["learn", kept, "--threads", "1"]) == 0
    assert "in use from the next answer on" in capsys.readouterr().out
    assert main(["learn", "--status", kept]) == 0
    said = capsys.readouterr().out
    assert "kept       60 answers of 3,600 tokens" in said and "head       00001.safetensors" in said
    assert main(["learn", "--back", kept]) == 0
    assert capsys.readouterr().out == "the head in use is now the one that learning began with\n"
    assert main(["learn", "--back", kept]) == 1
    assert main(["learn", "--forget", kept]) == 2, "nobody is there to be asked"
    assert "--yes does so without a question" in capsys.readouterr().err
    monkeypatch.setattr(command.sys, "stdin", stdin := io.StringIO("n\n"))
    stdin.isatty = lambda: True
    assert main(["learn", "--forget", kept]) == 1 and main(["learn", "--status", kept]) == 0
    assert main(["learn", "--forget", "--yes", kept]) == 0
    assert main(["learn", "--status", kept]) == 1
    assert "holds no answers" in capsys.readouterr().err


def test_the_command_learns_for_whoever_asks(folder, heads, tmp_path, capsys):
    """The plain command and a conversation keep too."""
    options = ["-m", str(folder), "--exit-head", str(heads[0]), "--dtype", "float32", "-n", "20", "--threads", "1"]
    assert main([*options, "--learn", str(tmp_path), "--json", "Why?"]) == 0
    ids = json.loads(capsys.readouterr().out)["ids"]
    ((record, _),) = read_records(tmp_path, 259)
    assert record.ids[record.answer :].tolist() == ids and (len(ids) == 20 or ids[-1] == EOS)
