"""Draft stage and verification stations wired in one process, without a network: answers, merging, what is refused."""

from collections.abc import Callable
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rank_support import Pipeline, ids_of
from support import loud_head, slow, write_model

from ppsd_rt import Engine, Oracle, SamplingParams, UsageError, _native
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.ranks import stage
from ppsd_rt.ranks.control import Kind
from ppsd_rt.ranks.costs import rank_costs, side_by_side
from ppsd_rt.ranks.links import CHOSEN, ROWS, VERDICTS
from ppsd_rt.ranks.slices import slices_for
from ppsd_rt.ranks.stage import lengths

LAYERS = 6
PROMPT = list(range(3, 80))  # more than a pass takes
SAMPLINGS = [
    {},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 6},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("stations") / "model", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def engine(folder):
    return Engine.from_pretrained(folder, exit_head="norm:2", backend="cpu", dtype="int8", threads=1)


@pytest.fixture
def pipeline(folder):
    made = []

    def make(sizes, **options):
        made.append(Pipeline(folder, sizes, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("sizes", [(2, 4), (2, 1, 3), (0, 6), (0, 2, 4)], ids=str)
def test_verdicts_bring_home_what_a_feedback_head_hears(folder, pipeline, tmp_path, sizes, backend):
    """In turns the drafts are those of one process: the head has received the same."""
    path, params = tmp_path / "head.safetensors", SamplingParams(max_tokens=30, ignore_eos=True)
    schedule = "eesd:length=3,stop_rule=fixed"
    drafts = []
    for strength in (0.5, 0.0):
        head = loud_head(Checkpoint(folder).hash, strength, exit_layer=sizes[0], num_hidden_layers=LAYERS)
        head.save(path, torch.float32)
        engine = Engine.from_pretrained(
            folder, exit_head=path, backend=backend, device="cpu", dtype="float32", threads=1
        )
        one = [event.round for event in engine.generate(PROMPT, params, schedule).events()]
        several = pipeline(sizes, head=path, format="float32", backend=backend).run(PROMPT, params, schedule)
        assert ids_of(several) == ids_of(one)
        judged = [[[draft.token for draft in round.judged] for round in rounds] for rounds in (one, several)]
        assert judged[0] == judged[1]
        drafts.append(judged[0])
    assert drafts[0] != drafts[1]


@pytest.mark.parametrize("sizes", [(2, 4), (2, 1, 3), (2, 1, 1, 2)], ids=str)
def test_every_schedule_gives_the_tokens_of_one_process(engine, pipeline, sizes):
    stages = pipeline(sizes)
    for place, changes in enumerate(SAMPLINGS):
        params = SamplingParams(max_tokens=40, ignore_eos=True, **changes)
        prompt = PROMPT[: 20 + 28 * place]
        plain = engine.generate(prompt, params, "plain").run().ids
        for schedule in ("plain", "eesd", "ppsd", "elastic", "elastic:first_chunk=0,max_chunk=15"):
            assert ids_of(stages.run(prompt, params, schedule)) == plain, (schedule, changes)


SIBLINGS = [
    "eesd:length=4,siblings=0.0001,stop_rule=fixed",
    "ppsd:siblings=0.0001",
    "elastic:siblings=0.0001",
    "elastic:first_chunk=0,max_chunk=15,siblings=0.0000001,lookup=2",
]


@pytest.mark.parametrize("sizes", [(2, 4), (2, 1, 3), (2, 1, 1, 2)], ids=str)
def test_siblings_over_ranks_change_no_answer(engine, pipeline, sizes):
    stages = pipeline(sizes)
    for changes in ({}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 6}):
        params = SamplingParams(max_tokens=80, ignore_eos=True, **changes)
        plain = engine.generate(PROMPT, params, "plain").run().ids
        for schedule in SIBLINGS:
            rounds = stages.run(PROMPT, params, schedule)
            assert ids_of(rounds) == plain, (schedule, changes)
            if schedule == SIBLINGS[0]:  # with overlap it depends on how far drafts have come
                assert sum(round.siblings for round in rounds) > sum(round.rescued for round in rounds) > 0
            # And the next turn, whose beginning every stage has from this one.
            more, again = [*stages.answer.tokens, 7], SamplingParams(max_tokens=5, ignore_eos=True)
            rounds = stages.run(more, again, schedule, keep=stages.answer.rows)
            assert ids_of(rounds) == engine.generate(more, again, "plain").run().ids, (schedule, changes)


def after_the_prompt(pipeline, schedule, acceptance, second=0.0):
    """One station that waits to be told to work, an answer whose prompt it has passed, and the whole text."""
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    whole = pipeline((2, 4))
    whole.run(PROMPT, params, "plain")
    truth = (*whole.answer.tokens, 0)
    stages = pipeline((2, 4), serves=False)
    answer = stages.start(PROMPT, params, schedule, oracle=Oracle(truth, acceptance, second=second))
    out = stages.buffers()
    for _ in range(2):  # the prompt's blocks
        stages.draft_once(answer)
    while not stages.stations[0].work(out, 0):  # the beginning, the prompt
        pass
    stages.land(out[0])
    return stages, answer, truth


def test_a_right_sibling_that_is_under_way_outlives_the_rejection(pipeline):
    """Step by step in one thread: all drafts are wrong and their siblings right."""
    stages, answer, truth = after_the_prompt(pipeline, "ppsd:siblings=0.0001", 0.0, second=1.0)
    station, out, more = stages.stations[0], stages.buffers(), stages.buffers()
    stages.draft_once(answer)  # the committed token's row
    assert station.work(out, 0) == 1
    stages.draft_once(answer)  # the draft's row and its sibling's, which leave before the verdict
    passes = station.counts()
    stages.land(out[0])
    assert answer.spared == len(PROMPT) + 1
    assert tuple(answer.tokens) == truth[: len(PROMPT) + 2]
    assert answer.rows == len(PROMPT) + 1  # the station has not been told that the sibling is the text
    stages.draft_once(answer)  # after the sibling, in the new epoch
    assert station.work(more, 0) == 1
    assert more[0][5] == 2
    assert station.counts().dropped_passes == passes.dropped_passes
    stages.land(more[0])
    assert tuple(answer.tokens) == truth[: len(PROMPT) + 3]
    assert station.work(out, 0) == 1
    stages.land(out[0])
    assert tuple(answer.tokens) == truth[: len(PROMPT) + 4]
    assert answer.rows >= len(PROMPT) + 2
    answer.cancel()


@pytest.mark.parametrize("schedule", ["plain", "elastic"])
def test_stations_record_their_passes_where_an_answer_asks_for_it(pipeline, schedule):
    stages = pipeline((2, 1, 3))
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


@pytest.mark.parametrize(("format", "tied"), [("float32", True), slow("bfloat16", False), slow("float16", True)])
def test_torch_stages_give_the_tokens_of_one_process(tmp_path, tied, format):
    """Every rank has its layers only; norms and biases too."""
    shape = {"num_hidden_layers": LAYERS, "tie_word_embeddings": tied, "attention_bias": True}
    folder = write_model(tmp_path / "model", **shape)
    path = tmp_path / "head.safetensors"
    loud_head(Checkpoint(folder).hash, **shape).save(path)
    engine = Engine.from_pretrained(folder, exit_head=path, backend="torch", device="cpu", dtype=format, threads=1)
    for sizes, head in (((2, 1, 3), path), ((3, 3), "none")):
        stages = Pipeline(folder, sizes, head=head, format=format, backend="torch")
        whole = sum(parameter.nbytes for parameter in engine.backend.model.model.layers[0].parameters())
        try:
            assert stages.slices[1].bytes - whole * sizes[1] in (
                (0,) if len(sizes) == 3 else (stages.choosing(engine),)
            )
            for place, changes in enumerate(SAMPLINGS):
                params = SamplingParams(max_tokens=16, ignore_eos=True, **changes)
                prompt = PROMPT[: 20 + 28 * place]
                plain = engine.generate(prompt, params, "plain").run().ids
                for schedule in ("plain", "elastic") if head == path else ("plain",):
                    assert ids_of(stages.run(prompt, params, schedule)) == plain, (schedule, changes)
        finally:
            stages.close()


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_rows_of_an_earlier_answer_are_kept(folder, pipeline, backend):
    format = "int8" if backend == "cpu" else "float32"
    engine = Engine.from_pretrained(folder, exit_head="none", backend=backend, device="cpu", dtype=format, threads=1)
    stages = pipeline((2, 2, 2), backend=backend, format=format)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    first = ids_of(stages.run(PROMPT, params, "elastic"))
    more = [*PROMPT, *first, 7, 8, 9]
    rounds = stages.run(more, params, "elastic", keep=len(PROMPT) + len(first) - 1)
    assert rounds[0].rows == 4  # the last committed token's row, and the new ones
    assert ids_of(rounds) == engine.generate(more, params, "plain").run().ids


def test_a_free_station_takes_all_rows_that_have_come(pipeline):
    """Step by step in one thread: five rows are drafted, one by one, before the station looks."""
    stages, answer, truth = after_the_prompt(pipeline, "elastic:first_chunk=0", 1.0)
    station, out = stages.stations[0], stages.buffers()
    assert [stages.draft_once(answer) for _ in range(5)] == [1] * 5
    passes = station.counts().passes
    assert station.work(out, 0) == 1
    assert out[0][5] == 5
    stages.land(out[0])
    assert station.counts().passes == passes + 1
    assert tuple(answer.tokens) == truth[: len(PROMPT) + 6]
    answer.cancel()


@pytest.mark.parametrize("acceptance", [0.0, 0.9])
def test_the_planner_chooses_after_every_round(pipeline, acceptance):
    """Whatever the rounds really take: it learns from them, and no token changes."""
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    stages = pipeline((2, 2, 2))
    plain = ids_of(stages.run(PROMPT, params, "plain"))
    table = (1.0,) * 16
    costs = side_by_side(*[rank_costs(1.0, 1.1, (table, table), 0.0)] * 2)
    planner = _native.Planner(costs, 0.5)
    for _ in range(2):
        oracle = Oracle((*PROMPT, *plain), acceptance)
        assert ids_of(stages.run(PROMPT, params, planner, oracle=oracle)) == plain
    assert sum(measured.rounds for measured in planner.measured().values()) > 10
    assert (planner.acceptance > 0.5) == (acceptance > 0)


def test_a_message_that_leaves_a_gap_is_refused(pipeline):
    stages = pipeline((2, 4))
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    answer = stages.start(PROMPT, params, "plain")
    out = stages.buffers()
    written = answer.work(out)
    out[1][4] += 5  # the first rows begin later
    for message, words in zip(out[:written], lengths(out, written, stages.hidden), strict=True):
        stages.stations[0].post(message[:words])
    stages.threads[0].join()
    assert "this stage holds 0" in str(stages.failures[0])
    answer.cancel()


BIASED = {"logit_bias": {7: 3.0, 9: -100.0}, "logprobs": 3, "stop_token_ids": (7, 2**31 - 1), "min_tokens": 20}
EXTRAS = [
    {"presence_penalty": 0.8, "frequency_penalty": -0.3, **BIASED},
    {"temperature": 1.0, "seed": 4, "top_k": 50, "frequency_penalty": 0.5, "repetition_penalty": 1.1, **BIASED},
]


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("options", EXTRAS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("sizes", [(2, 4), (2, 2, 2)], ids=str)
def test_penalties_biases_and_logprobs_are_those_of_one_process(folder, pipeline, sizes, options, backend):
    """The sampler's settings go to the last rank, and what it says of tokens comes back."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, **options)
    format = "int8" if backend == "cpu" else "float32"
    engine = Engine.from_pretrained(folder, exit_head="norm:2", backend=backend, dtype=format, threads=1)
    expected = engine.generate(PROMPT, params, "plain").run()
    stages = pipeline(sizes, backend=backend, format=format)
    for schedule in ("plain", "eesd", "elastic:lookup=1"):
        rounds = stages.run(PROMPT, params, schedule)
        assert ids_of(rounds) == expected.ids
        said = [logprob for round in rounds for logprob in round.logprobs]
        assert len(said) == len(expected.ids) > 20
        for one, own in zip(said, expected.logprobs, strict=True):
            assert one.logprob == pytest.approx(own.logprob, abs=1e-5)
            assert [id for id, _ in one.top] == [id for id, _ in own.top]


def test_siblings_over_ranks_have_logprobs_too(engine, pipeline):
    params = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=1)
    expected = engine.generate(PROMPT, params, "plain").run()
    rounds = pipeline((2, 4)).run(PROMPT, params, "elastic:siblings=0.0001,stop_rule=fixed")
    assert sum(round.rescued for round in rounds) > 0
    assert tuple(logprob for round in rounds for logprob in round.logprobs) == expected.logprobs


def test_more_settings_than_a_message_holds_are_refused(pipeline):
    params = SamplingParams(logit_bias=dict.fromkeys(range(10_000), 1.0))
    with pytest.raises(RuntimeError, match="too many to send"):
        pipeline((2, 4)).start(PROMPT, params, "plain")


@pytest.mark.parametrize(("word", "value"), [(8, -1), (11, 21), (11, -2), (12, -1), (13, 1), (13, -1), (14, 1)])
def test_settings_that_mean_nothing_are_refused(pipeline, word, value):
    stages = pipeline((2, 4), serves=False)
    answer = stages.start(PROMPT, SamplingParams(max_tokens=8), "plain")
    out = stages.buffers()
    answer.work(out)
    out[0][16 + word] = value
    stages.stations[0].post(out[0][: _native.WIRE_WORDS])
    with pytest.raises(RuntimeError, match="settings are malformed"):
        stages.stations[0].work(out, 50)
    answer.cancel()


def test_a_limit_that_is_wrong_fills_no_more_messages_than_there_are(pipeline):
    """Word 6 of a prompt's rows says how many may share a pass; what comes of a pass has to fit into the buffer."""
    stages = pipeline((2, 2, 2), serves=False)
    prompt = [3, 4, 5] * 100
    answer = stages.start(prompt, SamplingParams(max_tokens=8, ignore_eos=True), "plain")
    out, station, sent = stages.buffers(), stages.stations[0], 0
    while sent < len(prompt):
        written = answer.work(out)
        for message, words in zip(out[:written], lengths(out, written, stages.hidden), strict=True):
            sent += message[5]
            message[6] = 10_000
            station.post(message[:words])
    room = np.zeros((len(prompt), out.shape[1]), np.int32)  # more than it is to use
    assert station.work(room, 0) == 1  # the answer's beginning
    assert 1 < station.work(room, 0) <= _native.WIRE_MESSAGES
    answer.cancel()


@pytest.mark.parametrize(
    ("word", "value", "says"),
    [
        (0, 77, "wire version"),
        (1, 9, "malformed"),
        (1, 3, "verdict came to a verification stage"),
        (5, 17, "malformed"),
        (5, 0, "malformed"),
        (4, -1, "malformed"),
        (10, 1, "malformed"),  # one row, and it is a sibling
        (10, 2, "malformed"),
        (11, 5, "malformed"),  # of a row before the first
        (11, -1, "malformed"),
    ],
)
def test_a_station_refuses_what_means_nothing(pipeline, word, value, says):
    stages = pipeline((2, 4))
    message = stages.buffers()[0]
    message[:8] = (0x50535000 + _native.WIRE_VERSION, _native.WIRE_ROWS, 1, 0, 0, 1, 1, 0)
    message[word] = value
    with pytest.raises(RuntimeError, match=says):
        stages.stations[0].post(message)
    with pytest.raises(RuntimeError, match="too short"):
        stages.stations[0].post(message[:8])
    short = stages.buffers()[0]
    short[:8] = (0x50535000 + _native.WIRE_VERSION, _native.WIRE_ROWS, 1, 0, 0, 2, 2, 0)
    with pytest.raises(RuntimeError, match="malformed"):  # two rows, of which one has come
        stages.stations[0].post(short[: _native.WIRE_WORDS + stages.hidden])


def test_a_verdict_on_another_row_is_refused(pipeline):
    stages = pipeline((2, 4))
    answer = stages.start(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True), "plain")
    out = stages.buffers()
    while answer.work(out) < 2:  # the prompt's two blocks
        pass
    answer.work(out)
    verdict = np.zeros(_native.WIRE_WORDS, np.int32)
    verdict[:8] = (0x50535000 + _native.WIRE_VERSION, 3, answer.epoch, 0, 5, 1, 0, 3)
    with pytest.raises(RuntimeError, match=f"row {len(PROMPT) - 1} is next"):
        answer.land(verdict)
    verdict[2] = answer.epoch + 1
    with pytest.raises(RuntimeError, match="came back"):
        answer.land(verdict)
    verdict[2] = 0  # of an earlier answer: void
    assert answer.land(verdict) is False
    answer.cancel()


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_timing_a_stage_leaves_it_fit_for_an_answer(folder, pipeline, backend):
    format = "int8" if backend == "cpu" else "float32"
    engine = Engine.from_pretrained(folder, exit_head="none", backend=backend, device="cpu", dtype=format, threads=1)
    stages = pipeline((2, 4), backend=backend, format=format)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    for _ in range(2):  # after a short answer, and after one that is longer than the timed context
        stages.drafter.time_step(True, 128)
        stages.stations[0].time_pass(16, 128)
        assert ids_of(stages.run(PROMPT, params, "elastic")) == engine.generate(PROMPT, params, "plain").run().ids


def test_a_torch_stage_whose_rows_are_void_ends_at_a_layer(folder):
    """And says so, to whom asked for them: the rows of a later message take their place."""
    from ppsd_rt.ranks.torch_stages import TorchVerify, torch_slice

    model = torch_slice(Checkpoint(folder), (2, 6), False, True, torch.float32, torch.device("cpu"))
    assert model.model.embed_tokens.weight.device.type == "cpu"  # it is tied to the LM head
    assert model.model.layers[1].mlp.up_proj.weight.device.type == "meta"
    verify, asked = TorchVerify(model, 2, 6), []
    verify.begin(0, 64, 5, SamplingParams())
    rows = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)

    def cancelled():
        asked.append(1)
        return len(asked) == 3

    assert verify.run(0, [1, 2, 3, 4, 5], rows, cancelled) is None
    assert len(asked) == 3  # in front of the third of its layers
    verify.run(0, [1, 2, 3, 4, 5], rows, lambda: False)
    fresh = TorchVerify(model, 2, 6)
    fresh.begin(0, 64, 5, SamplingParams())
    fresh.run(0, [1, 2, 3, 4, 5], rows, None)
    assert verify.choose(5) == fresh.choose(5)


def test_torch_ranks_draft_by_an_oracle(pipeline):
    stages, params = pipeline((2, 4), backend="torch", format="float32"), SamplingParams(max_tokens=9, ignore_eos=True)
    stages.run(PROMPT, params, "plain")
    truth = tuple(stages.answer.tokens)
    for acceptance, accepted in ((1.0, 3), (0.0, 0)):
        rounds = stages.run(PROMPT, params, "eesd:length=3,stop_rule=fixed", oracle=Oracle(truth, acceptance))
        assert tuple(stages.answer.tokens) == truth
        assert [round.accepted for round in rounds[1:3]] == [accepted] * 2


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8"])
def test_ranks_keep_keys_and_values_as_they_are_told(tmp_path, kv):
    folder = write_model(tmp_path / "model", num_hidden_layers=LAYERS, head_dim=32)
    engine = Engine.from_pretrained(folder, exit_head="none", backend="cpu", dtype="int8", kv_dtype=kv, threads=1)
    stages = Pipeline(folder, (2, 1, 3), kv=kv)
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=2)
    try:
        assert ids_of(stages.run(PROMPT, params, "elastic")) == engine.generate(PROMPT, params, "plain").run().ids
    finally:
        stages.close()


def test_torch_ranks_say_what_they_cannot_do():
    with pytest.raises(UsageError, match="KV cache in the model's dtype"):
        slices_for("torch", "cpu", ("float32", "int8"), 1, [], 0)
    with pytest.raises(UsageError, match="dtype 'int8' is unknown to the torch backend"):
        slices_for("torch", "cpu", ("int8", "auto"), 1, [], 0)


def test_a_python_stage_that_fails_ends_its_rank(folder):
    class Wrong:
        def begin(self, keep, end, prompt, params):
            pass

        def run(self, start, ids, hidden, cancelled):
            return hidden[:-1]

    station = _native.PythonStation(Wrong(), 64, False, 0.0)
    out = np.zeros((_native.WIRE_MESSAGES, _native.wire_words(64)), np.int32)
    version = 0x50535000 + _native.WIRE_VERSION
    begin, rows = out[0].copy(), out[0].copy()
    begin[:8] = (version, 1, 1, 0, 0, 0, 9, 0)  # the answer begins: room for 9 rows
    begin[17:21].view(np.float32)[:] = 0.0, 1.0, 0.0, 1.0  # temperature, top_p, min_p, repetition_penalty
    rows[:8] = (version, _native.WIRE_ROWS, 1, 0, 0, 2, 2, 0)
    station.post(begin[: _native.WIRE_WORDS])
    assert station.work(out, 50) == 1
    station.post(rows[: _native.WIRE_WORDS + 2 * 64])
    with pytest.raises(RuntimeError, match="gave other rows than those it was asked for"):
        station.work(out, 50)


def test_rows_may_come_as_soon_as_a_measurement_is_told(monkeypatch):
    """Rank 0 begins an answer when it knows what the others measured; they may not have taken note of the end yet."""
    came: list[str] = []
    receivers: list[Callable[[str], None]] = []
    told: dict[Kind, Callable[..., None]] = {}
    failed = Event()

    def tell(peer, kind, value=0, numbers=()):
        if kind is Kind.READY:
            told[Kind.MEASURE](0, 1, None)
        else:
            assert (kind, numbers) == (Kind.COSTS, [0.5])
            receivers[0]("a row")
            failed.set()

    control = SimpleNamespace(
        world=SimpleNamespace(rank=1, last=1, local_size=2), on=told.__setitem__, tell=tell, failed=failed,
        stopping=Event(), lost=None, check=lambda: None,
    )  # fmt: skip
    station = SimpleNamespace(
        post=came.append, pin=lambda: None, work_with_passes=lambda out, passes, wait: (0, 0), time_pass=None
    )
    monkeypatch.setattr(stage.signal, "signal", lambda *_: None)
    monkeypatch.setattr(stage, "time_passes", lambda *_, **__: [0.5])
    monkeypatch.setattr(stage, "Sender", lambda *_, **__: SimpleNamespace(buffers=lambda: None))
    monkeypatch.setattr(stage, "Receiver", lambda *given: receivers.append(given[5]))
    monkeypatch.setattr(stage, "start", lambda receiver: None)
    stage.serve(dict.fromkeys((VERDICTS, ROWS, CHOSEN)), control, station, 8, 0)
    assert came == ["a row"]
