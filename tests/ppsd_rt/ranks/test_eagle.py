"""An EAGLE-3 head over ranks: what stages leave at its taps comes home, so it drafts what it drafts in one process."""

import numpy as np
import pytest
from eagle_support import CASES, write_eagle3, write_knowing
from rank_support import ids_of
from support import slow, write_model

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.ranks.slices import CpuSlices

LAYERS = 4
SIZES = [(0, 4), (0, 2, 2), slow((0, 1, 1, 2)), slow((0, 3, 1))]
PROMPT = [3 + (7 * i) % 60 for i in range(150)]  # more than two passes
TURNS = "eesd:length=3,stop_rule=fixed"
SAMPLINGS = [{}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 6}]


@pytest.fixture(scope="module")
def knowing(tmp_path_factory):
    return write_knowing(tmp_path_factory.mktemp("eagle"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def engine(knowing):
    folder, head = knowing
    return Engine.from_pretrained(folder, exit_head=head, backend="cpu", dtype="float32", threads=1)


def params(i=0, tokens=40, **more):
    return SamplingParams(max_tokens=tokens, ignore_eos=True, **SAMPLINGS[i % len(SAMPLINGS)], **more)


def judged(rounds):
    return [[draft.token for draft in round.judged] for round in rounds]


def here(engine, prompt, asked, schedule):
    return [event.round for event in engine.generate(prompt, asked, schedule).events()]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_it_drafts_what_it_drafts_in_one_process(tmp_path, ranks, case, sizes):
    """Taps after no layer and after all of them too, in any order; drafts that are never right, of random weights."""
    folder = write_model(tmp_path / "model", num_hidden_layers=LAYERS)
    head = write_eagle3(tmp_path / "head", case)
    one = Engine.from_pretrained(folder, exit_head=head, backend="cpu", dtype="float32", threads=1)
    over = ranks(sizes, folder, head, "float32")
    for prompt in (PROMPT, [*PROMPT, 5], [7]):  # the second one shares the first one's rows
        expected, found = here(one, prompt, params(), TURNS), over.run(prompt, params(), TURNS)
        assert ids_of(found) == ids_of(expected)
        assert judged(found) == judged(expected)
    assert any(judged(found))


@pytest.mark.parametrize("schedule", [TURNS, "eesd:lookup=2,stop_rule=fixed"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_head_that_is_often_right(knowing, ranks, sizes, schedule):
    """It goes on from what verification left of right drafts and of wrong ones."""
    folder, head = knowing
    engine = Engine.from_pretrained(
        folder, exit_head=head, backend="cpu", dtype="float32", threads=1
    )  # has seen nothing
    over, accepted = ranks(sizes, *knowing, "float32"), 0
    for i in range(len(SAMPLINGS)):
        asked = params(i, 120)
        expected, found = here(engine, PROMPT[:20], asked, schedule), over.run(PROMPT[:20], asked, schedule)
        assert ids_of(found) == ids_of(expected) == engine.generate(PROMPT[:20], asked, "plain").run().ids
        assert judged(found) == judged(expected)
        accepted += sum(round.accepted for round in found)
    assert accepted > 30


@pytest.mark.parametrize("schedule", ["plain", TURNS, "eesd:length=12,recycle=on,lookup=2", "auto"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_several_answers_at_once(knowing, engine, ranks, sizes, schedule):
    """Beginnings that they share, prompts in pieces, one that is cancelled, and the same ones again."""
    texts = [[*PROMPT[:70], *(10 + (7 * i + j) % 60 for j in range(3 + 11 * i))] for i in range(7)]
    truth = [engine.generate(text, params(i), "plain").run().ids for i, text in enumerate(texts)]
    over = ranks(sizes, *knowing, "float32")
    for _ in range(2):
        endless = over.add(texts[0], params(0, 2000), schedule)
        answers = [over.add(text, params(i), schedule) for i, text in enumerate(texts)]
        next(endless)
        endless.close()
        assert [ids_of(answer) for answer in answers] == truth
    assert schedule != TURNS or over.loop.counts["draft_rows"] > 0
    assert over.loop.counts["shared_rows"] > 64 * len(texts)


def test_it_never_drafts_beside_verification(knowing, engine, ranks):
    """Whoever asks: what it reads has not come home. An engine refuses such a schedule in words."""
    came = []
    over = ranks((0, 2, 2), *knowing, "float32", on_pass=lambda rank, words: came.append(rank))
    found = over.run(PROMPT[:20], params(0, 60), "elastic")
    assert ids_of(found) == engine.generate(PROMPT[:20], params(0, 60), "plain").run().ids
    assert sum(round.accepted for round in found) > 10
    assert [rank for rank in came if rank != 2] == [1, 0] * (len(came) // 3), "a pass leaves when the last one is home"


# -- what comes over the wire ------------------------------------------------------------------------------------------


@pytest.fixture
def messages(knowing, ranks):
    """A prompt's pass to each rank, its verdict, and where they went."""
    sent = {}
    over = ranks((0, 2, 2), *knowing, "float32", on_pass=lambda rank, words: sent.setdefault(rank, words.copy()))
    over.run(PROMPT[:5], params(), "plain")
    return over, sent


def test_rows_bring_along_the_taps_that_they_have_passed(messages):
    """Of five rows: hidden states, and those after 1, 2 and 4 of the layers, where the stages have 2 each."""
    _, sent = messages
    assert [len(sent[rank]) - 16 - int(sent[rank][6]) for rank in (1, 2)] == [5 * 64, 5 * 64 * 3]
    assert len(sent[0]) - 16 - int(sent[0][6]) == 5 * 64 * 3
    assert int(sent[0][16 + int(sent[0][6]) - 1]) == 5 * 64 * 3


def test_taps_that_are_missing_are_refused(knowing, messages):
    """Of a pass, and of a verdict that has others than it says."""
    over, sent = messages
    station = CpuSlices(Checkpoint(knowing[0]), "float32", "auto", 1, []).station(2, LAYERS, (1, 2, 4))
    station.post(sent[2])
    verdicts = [sent[0][:-1]]
    for value in (-1, 1 << 30, 64 * 64 * 3 + 1):
        verdicts.append(sent[0].copy())
        verdicts[-1][16 + int(sent[0][6]) - 1] = value
    passes = [sent[2][:length] for length in (len(sent[2]) - 1, len(sent[1]), len(sent[2]) - 5 * 64)]
    for hear, messages in ((station.post, passes), (over.loop.land, verdicts)):
        for message in messages:
            with pytest.raises(RuntimeError, match="malformed"):
                hear(message)


@pytest.mark.parametrize("rows", [0, 4, 6])
def test_a_verdict_with_the_taps_of_other_rows_is_refused(knowing, ranks, rows):
    over = ranks((0, 4), *knowing, "float32", serves=False)
    answer = over.add(PROMPT[:5], params(), "plain")
    over.stations[0].post(over.passes(1)[0])
    verdict = over.verdict()
    verdict = np.concatenate([verdict, np.zeros(64 * 3, np.int32)])
    verdict[16 + int(verdict[6]) - 1] = rows * 64 * 3
    over.loop.land(verdict)
    with pytest.raises(RuntimeError, match="another pass than was sent"):
        over.passes(1)
    over.loop.fail("the test is over")
    with pytest.raises(RuntimeError, match="the test is over"):
        next(answer)
