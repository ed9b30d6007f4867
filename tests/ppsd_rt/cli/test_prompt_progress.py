"""How far a long prompt is: what the C++ counts, what a caller hears of it, and the bar that `ppsd-run` shows."""

from contextlib import contextmanager
from threading import Event

import pytest
import torch
from support import tiny_model, write_model

from ppsd_rt import Engine, RunOptions, SamplingParams, _native
from ppsd_rt.cli import progress
from ppsd_rt.cli.progress import DELAY, PromptBar, loading_bar
from ppsd_rt.pipeline.rounds import Limits
from ppsd_rt.pipeline.schedule import parse_schedule

ROWS = _native.PASS_ROWS
ENDS = 7  # an id with which the work ends, as its embedding is read
LONG = [1] * (2 * ROWS) + [ENDS] + [1] * ROWS
PARAMS = SamplingParams(max_tokens=2)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Of four layers; two draft."""
    model = tiny_model(tie_word_embeddings=False)
    model.model.embed_tokens.weight.data[ENDS, 3] = torch.nan
    folder = write_model(tmp_path_factory.mktemp("progress"), model, tie_word_embeddings=False)
    return Engine.from_pretrained(folder, exit_head="norm:2", backend="cpu", dtype="float32", threads=1)


def test_rows_count_pass_by_pass(engine):
    """The work ends in the third pass: the rows of two are done."""
    loop = _native.Loop(engine.backend._model, 1, 1 << 22, 4, 16, stepped=True)
    answer = loop.add(LONG, PARAMS.for_backend(LONG), parse_schedule("plain"), Limits(len(LONG) + 2))
    done = []
    for _ in range(3):
        done.append(answer.prompt_rows())
        assert loop.step()
    assert done == [(rows, len(LONG)) for rows in (0, ROWS, 2 * ROWS)]
    with pytest.raises(RuntimeError, match=f"embedding of token {ENDS} is NaN"):
        next(answer)


@pytest.mark.parametrize(("schedule", "begin"), [("plain", 10), ("elastic", 110)])
def test_the_last_word_is_that_all_is_done(engine, schedule, begin):
    def heard(prompt):
        calls = []
        engine.generate(prompt, PARAMS, schedule, RunOptions(prompt_progress=lambda *rows: calls.append(rows))).run()
        return calls

    prompt = list(range(begin, begin + 100)) * 2
    first, again = heard(prompt), heard([*prompt[:150], 5, 6])
    assert first[-1] == (200, 200)
    assert first == sorted(first)
    assert again[-1] == (2, 2)  # the others are those of the answer before
    assert all(0 <= done <= total for done, total in first + again)


@pytest.fixture
def shown(monkeypatch):
    """What a terminal would see of the bar."""
    seen = []

    @contextmanager
    def bar(title, transient):
        seen.append((title, transient))
        yield lambda done, total: seen.append((done, total))
        seen.append("gone")

    monkeypatch.setattr(progress, "progress_bar", bar)
    return seen


@pytest.mark.parametrize(("size", "title"), [(1_080_000_000, "loading 1.1 GB"), (98_400_000, "loading 98 MB")])
def test_loading_shows_how_much_once_it_takes_a_while(shown, size, title):
    waited = Event()
    with loading_bar(size, over=lambda ended: False):
        while not shown:
            waited.wait(0.001)
    assert shown == [(title, True), "gone"]


def test_loading_that_is_over_at_once_shows_nothing(shown):
    with loading_bar(10**9, over=lambda ended: ended.wait(60)):
        pass
    assert shown == []


def test_the_bar_comes_late_and_goes_before_the_answer(shown):
    now = 100.0
    tell = PromptBar(lambda: now)
    tell(1, 100)
    now += DELAY - 0.01
    tell(10, 100)
    assert shown == []
    now += 0.01
    tell(20, 100)
    tell(30, 100)
    assert shown == [("reading 100 tokens", True), (20, 100), (30, 100)]
    tell(100, 100)
    tell(100, 100)
    assert shown[3:] == ["gone"]
