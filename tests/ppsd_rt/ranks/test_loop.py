"""Answers over ranks: those of one process, several passes under way, and what the ranks are told."""

from threading import Event

import numpy as np
import pytest
import torch
from rank_support import ids_of
from support import EOS, GRAMMARS, loud_head, slow, write_model

from ppsd_rt import Engine, Oracle, SamplingParams, _native
from ppsd_rt.errors import GrammarFailed
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.ranks.slices import CpuSlices
from ppsd_rt.sampling.grammar import Grammars

LAYERS = 6
SAMPLINGS = [
    {},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 6},
    {"temperature": 0.7, "presence_penalty": 0.4, "frequency_penalty": 0.2, "logit_bias": {7: 2.0}, "seed": 7},
]
SIZES = [(2, 4), (2, 1, 3)]
PROMPT = list(range(3, 80))  # more than a pass takes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("loop") / "model", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def engine(folder):
    return Engine.from_pretrained(folder, exit_head="norm:2", backend="cpu", dtype="int8", threads=1)


def prompts(count, shared=0):
    """Of different lengths; they begin with as many ids that are the same."""
    return [[*range(3, 3 + shared), *(10 + (7 * i + j) % 60 for j in range(3 + 11 * i))] for i in range(count)]


def params(i, tokens=20, **more):
    return SamplingParams(max_tokens=tokens, ignore_eos=True, **SAMPLINGS[i % len(SAMPLINGS)], **more)


OVERLAPPED = [
    "ppsd",
    "elastic",
    "elastic:first_chunk=0,max_chunk=15",
    "elastic:first_chunk=3,lookahead=5,lookup=2,recycle=on",
]


@pytest.mark.parametrize("schedule", OVERLAPPED)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_answers_draft_while_they_are_verified(engine, ranks, sizes, schedule):
    """Alone, and two at a time where that leaves stages idle; with an oracle's drafts, right ones and wrong ones."""
    texts, over = prompts(4, shared=70), ranks(sizes)
    for i in range(4):
        truth = [engine.generate(text, params(i, 60), "plain").run().ids for text in texts[i:]]
        oracles = [Oracle((*text, *ids), 0.7, i) for text, ids in zip(texts[i:], truth, strict=True)]
        assert ids_of(over.add(texts[i], params(i, 60), schedule, oracle=oracles[0])) == truth[0]
        answers = [
            over.add(text, params(i, 60), schedule, oracle=o) for text, o in zip(texts[i:], oracles, strict=True)
        ]
        assert [ids_of(answer) for answer in answers] == truth


def by_hand(ranks, schedule, acceptance, passes):
    """A station that waits to be told, an answer whose prompt it has passed, its ids, and so many passes more."""
    text, asked = prompts(1)[0], params(0, 40)
    truth = ranks((2, 4)).run(text, asked, "plain")
    ids = (*text, *(id for round in truth for id in round.committed))
    over = ranks((2, 4), serves=False)
    answer = over.add(text, asked, schedule, oracle=Oracle((*ids, 0), acceptance))
    over.stations[0].post(over.passes(1)[0])
    over.loop.land(over.verdict())
    return over, answer, ids[len(text) :], over.passes(passes)


def test_a_free_station_takes_all_rows_that_have_come(ranks):
    over, answer, truth, passes = by_hand(ranks, "elastic:first_chunk=0", 1.0, 5)
    for message in passes:
        over.stations[0].post(message)
    before = over.stations[0].passes
    over.loop.land(over.verdict())
    assert over.verdict() is None
    assert over.stations[0].passes == before + 1
    over.passes(1)
    rounds = [next(answer), next(answer)]
    assert tuple(id for round in rounds for id in round.committed) == truth[:6]
    assert rounds[1].rows == 5
    answer.cancel()


def test_a_station_drops_what_a_later_pass_has_made_void(ranks):
    over, answer, truth, passes = by_hand(ranks, "ppsd", 0.0, 4)
    station = over.stations[0]
    for message in passes:
        station.post(message)
    before = station.passes
    over.loop.land(over.verdict())  # on the newest token and the draft after it, which is wrong
    (again,) = over.passes(1)
    station.post(again)
    for _ in range(2):
        over.loop.land(over.verdict())
    assert station.passes == before + 1, "void rows are dropped, and only said to be"
    over.loop.land(over.verdict())
    over.passes(1)
    assert [next(answer).committed for _ in range(3)] == [(id,) for id in truth[:3]]
    answer.cancel()


def test_a_stage_may_not_drop_what_is_not_void(ranks):
    over, _answer, _, passes = by_hand(ranks, "ppsd", 1.0, 2)
    raised = passes[1].copy()
    raised[_epoch_of(raised)] += 1
    over.stations[0].post(passes[0])
    over.stations[0].post(raised)
    over.loop.land(over.verdict())
    with pytest.raises(RuntimeError, match="not void"):
        over.passes(1)
    over.loop.fail("the test is over")


def _epoch_of(message):
    """Where the only part of a pass without changes has its epoch: after four empty lists and two words."""
    assert list(message[16:20]) == [0, 0, 0, 0]
    assert message[20] == 1
    return 22


@pytest.mark.parametrize("acceptance", [0.0, 0.9])
def test_the_policy_steers_one_that_is_alone_after_every_round(ranks, acceptance):
    """Whatever the rounds really take: it learns from them, and no token changes."""
    text, asked, over = prompts(1)[0], params(0, 150), ranks((2, 2, 2))
    plain = ids_of(over.add(text, asked, "plain"))
    for _ in range(2):
        oracle = Oracle((*text, *plain), acceptance)
        assert ids_of(over.add(text, asked, "auto", oracle=oracle)) == plain
    assert "overlapped" in over.loop.explain()


def test_a_long_prompt_is_on_several_ranks_at_once(engine, ranks):
    """The first piece is held before the last rank until a second one has left rank 0, so that no clock has a say."""
    came, second, together = [], Event(), []

    def on_pass(rank, words):
        came.append(rank)
        if came.count(1) == 2:
            second.set()
        if rank == 2 and not together:
            together.append(second.wait(60))

    over = ranks((2, 2, 2), on_pass=on_pass)
    text = [3 + i % 60 for i in range(64 * 6)]
    assert ids_of(over.add(text, params(0, 5), "plain")) == engine.generate(text, params(0, 5), "plain").run().ids
    assert together == [True], "a second piece leaves before the first one comes back"


@pytest.mark.parametrize("schedule", ["plain", "eesd:length=3,stop_rule=fixed", "auto", "ppsd"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_answers_are_those_of_one_process(engine, ranks, sizes, schedule):
    texts = prompts(7, shared=70)  # more than a block
    truth = [engine.generate(text, params(i), "plain").run().ids for i, text in enumerate(texts)]
    over = ranks(sizes)
    answers = [over.add(text, params(i), schedule) for i, text in enumerate(texts)]
    assert [ids_of(answer) for answer in answers] == truth
    counts = over.loop.counts
    if schedule.startswith("eesd"):
        assert counts["draft_rows"] > 0
    again = [over.add(text, params(i), schedule) for i, text in enumerate(texts)]
    assert [ids_of(answer) for answer in again] == truth
    assert over.loop.counts["shared_rows"] > 64 * len(texts), "blocks are there, and rows of begun ones are copied"


def test_an_answer_that_is_over_has_been_counted(ranks):
    over, text = ranks((2, 4)), prompts(1)[0]
    for _ in range(100):  # counts that came later would now and then be missed
        before = over.loop.counts["rows"]
        assert len(ids_of(over.add(text, params(0, 4), "plain"))) == 4
        assert over.loop.counts["rows"] == before + len(text) + 3


def test_as_many_passes_are_under_way_as_there_are_ranks(ranks):
    """Messages to rank 1 and verdicts of the last rank, in the order in which they came."""
    came = []
    over = ranks((2, 2, 2), on_pass=lambda rank, words: came.append(rank))
    for answer in [over.add(text, params(0), "plain") for text in prompts(6)]:
        ids_of(answer)
    flying = most = 0
    for rank in came:
        flying += {1: 1, 0: -1}.get(rank, 0)
        most = max(most, flying)
    assert flying == 0
    assert most == 3


def test_an_answer_has_rows_in_one_pass_at_a_time(ranks):
    """What a pass commits is known before the next one of the same answer leaves."""
    sent = []
    over = ranks((2, 2, 2), on_pass=lambda rank, words: sent.append(words.copy()) if rank == 1 else None)
    ids_of(over.add(prompts(1)[0], params(0), "plain"))
    numbers = [int(words[2]) for words in sent]
    assert numbers == list(range(1, len(sent) + 1))
    assert len(sent) >= 20, "a plain answer alone: one row a pass"


@pytest.mark.parametrize("blocks", [4, 6])
def test_blocks_are_few(engine, ranks, blocks):
    """Answers give way to others, and are computed again to the same bits."""
    texts = prompts(5)
    truth = [engine.generate(text, params(i, 60), "plain").run().ids for i, text in enumerate(texts)]
    over = ranks((2, 2, 2), blocks=blocks)
    answers = [over.add(text, params(i, 60), "auto") for i, text in enumerate(texts)]
    assert [ids_of(answer) for answer in answers] == truth
    assert blocks > 4 or over.loop.counts["preempted"] > 0
    with pytest.raises(MemoryError):
        over.add(texts[0], params(0, 64 * blocks), "plain")


def test_a_grammar_that_gives_up_ends_its_answer_alone(engine, ranks):
    class GivesUp:
        def fill(self, start, ids, rows, address):
            raise GrammarFailed("enough")

    over = ranks((2, 4))
    over.stations[-1].use_masks(lambda number: GivesUp())
    grammars = Grammars(engine.tokenizer, engine.config.vocab_size, [EOS])
    text, masks = prompts(1)[0], grammars.masks(GRAMMARS["regex"])
    other = over.add(text, params(0), "plain")
    one = over.add(text, params(0), "plain", grammar=1, masks=(masks(), masks()))
    with pytest.raises(_native.MaskFailed, match="enough"):
        ids_of(one)
    assert ids_of(other) == engine.generate(text, params(0), "plain").run().ids


@pytest.mark.parametrize("tap", [0, 3, slow(5)])
@pytest.mark.parametrize("sizes", [(2, 4), (2, 1, 3), (0, 6), (0, 2, 4)], ids=str)
def test_verdicts_bring_home_what_a_feedback_head_hears(folder, ranks, tmp_path, sizes, tap):
    """In turns the drafts are those of one process: the head has received the same."""
    path, params = tmp_path / "head.safetensors", SamplingParams(max_tokens=30, ignore_eos=True)
    schedule = "eesd:length=3,stop_rule=fixed"
    drafts = []
    for strength in (0.5, 0.0):
        head = loud_head(Checkpoint(folder).hash, strength, exit_layer=sizes[0], tap=tap, num_hidden_layers=LAYERS)
        head.save(path, torch.float32)
        engine = Engine.from_pretrained(folder, exit_head=path, backend="cpu", dtype="float32", threads=1)
        one = [event.round for event in engine.generate(PROMPT, params, schedule).events()]
        stages = ranks(sizes, head=path, format="float32")
        several = stages.run(PROMPT, params, schedule)
        assert ids_of(several) == ids_of(one) == ids_of(stages.run(PROMPT, params, "elastic"))
        judged = [[[draft.token for draft in round.judged] for round in rounds] for rounds in (one, several)]
        assert judged[0] == judged[1]
        drafts.append(judged[0])
    assert drafts[0] != drafts[1]


@pytest.mark.parametrize("schedule", ["plain", "elastic"])
def test_stations_record_their_passes_where_an_answer_asks_for_it(ranks, schedule):
    stages = ranks((2, 1, 3))
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    rounds = stages.run(PROMPT, params, schedule, trace=True)
    here = stages.answer.spans()
    for station in stages.stations:
        spans = station.spans()
        assert {track for _, track, *_ in spans} == {1}
        assert {name for name, *_ in spans} <= {"prompt", "verify", "dropped verify"}
        assert sum(rows for name, _, rows, *_ in spans if name == "prompt") == len(PROMPT)
        assert sum(rows for name, _, rows, *_ in spans if name == "verify") >= sum(r.rows for r in rounds[1:])
        assert all(begin <= end for *_, begin, end in spans)
        last = spans
    if schedule == "plain":  # else the last station may finish a pass whose verdict comes too late
        assert sum(rows for name, _, rows, *_ in last if name == "verify") == sum(r.rows for r in rounds[1:])
    assert [rows for name, _, rows, *_ in here if name in ("commit", "roll back")] == [len(r.committed) for r in rounds]
    moments = [begin for name, *_, begin, _ in here if name in ("commit", "roll back")]
    ends = [end for name, *_, end in last if name != "dropped verify"]
    assert moments[0] >= ends[0], "one clock: a verdict lands after its pass"
    assert any(name == "draft" for name, *_ in here)
    stages.run(PROMPT, params, schedule)
    assert stages.answer.spans() == []
    assert [station.spans() for station in stages.stations] == [[], []]


BIASED = {"logit_bias": {7: 3.0, 9: -100.0}, "logprobs": 3, "stop_token_ids": (7, 2**31 - 1), "min_tokens": 20}
EXTRAS = [
    {"presence_penalty": 0.8, "frequency_penalty": -0.3, **BIASED},
    {"temperature": 1.0, "seed": 4, "top_k": 50, "frequency_penalty": 0.5, "repetition_penalty": 1.1, **BIASED},
]


@pytest.mark.parametrize("options", EXTRAS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("sizes", [(2, 4), (2, 2, 2)], ids=str)
def test_penalties_biases_and_logprobs_are_those_of_one_process(folder, ranks, sizes, options):
    """The sampler's settings go to the last rank, and what it says of tokens comes back."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, **options)
    engine = Engine.from_pretrained(folder, exit_head="norm:2", backend="cpu", dtype="int8", threads=1)
    expected = engine.generate(PROMPT, params, "plain").run()
    stages = ranks(sizes, format="int8")
    for schedule in ("plain", "eesd", "elastic:lookup=1"):
        rounds = stages.run(PROMPT, params, schedule)
        assert ids_of(rounds) == expected.ids
        said = [logprob for round in rounds for logprob in round.logprobs]
        assert len(said) == len(expected.ids) > 20
        for one, own in zip(said, expected.logprobs, strict=True):
            assert one.logprob == pytest.approx(own.logprob, abs=1e-5)
            assert [id for id, _ in one.top] == [id for id, _ in own.top]
            assert [each for _, each in one.top] == pytest.approx([each for _, each in own.top], abs=1e-5)


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8"])
def test_ranks_keep_keys_and_values_as_they_are_told(tmp_path, ranks, kv):
    folder = write_model(tmp_path / "model", num_hidden_layers=LAYERS, head_dim=32)
    engine = Engine.from_pretrained(folder, exit_head="none", backend="cpu", dtype="int8", kv_dtype=kv, threads=1)
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=2)
    over = ranks((2, 1, 3), folder, kv=kv)
    assert ids_of(over.run(PROMPT, params, "elastic")) == engine.generate(PROMPT, params, "plain").run().ids


# -- what comes over the wire ------------------------------------------------------------------------------------------


@pytest.fixture
def messages(ranks):
    """A pass and its verdict, and where they went."""
    sent = {}
    over = ranks((2, 4), on_pass=lambda rank, words: sent.setdefault(rank, words.copy()))
    ids_of(over.add(prompts(1)[0], params(0), "plain"))
    return over, sent[1], sent[0]


def test_a_damaged_pass_is_refused_or_means_another_answer(folder, messages):
    """One word changed, each in turn: an exception of ours, or rows of numbers; never a crash, never rows elsewhere."""
    over, first, _ = messages
    refused = 0
    tables = 16 + int(first[6])
    rng = np.random.default_rng(5)
    for place in range(tables):
        for value in (-1, 1 << 30, int(rng.integers(0, 200))):
            damaged = first.copy()
            damaged[place] = value
            station = _station(folder)
            try:
                station.post(damaged)
                station.work(np.zeros(over.words, np.int32), 0)
            except RuntimeError as error:
                refused += 1
                assert str(error)
    assert refused > tables


def test_a_verdict_that_nobody_waits_for_is_refused(messages):
    over, _, verdict = messages
    with pytest.raises(RuntimeError, match="out of turn"):
        over.loop.land(verdict)
    for length in (0, 10, len(verdict) - 1):
        with pytest.raises(RuntimeError):
            over.loop.land(verdict[:length])


def test_memory_for_kv_caches_is_each_ranks_own(folder):
    def blocks(kv_memory, local_size=2):
        slices = CpuSlices(Checkpoint(folder), "int8", "auto", 1, [], local_size, kv_memory)
        return slices.station(2, LAYERS).blocks

    assert blocks("8M") == 2 * blocks("4M") > 0
    assert blocks("8M", local_size=1) == blocks("8M"), "what is asked for is not shared"


def _station(folder):
    return CpuSlices(Checkpoint(folder), "int8", "auto", 1, []).station(2, LAYERS)
