"""Draft stage and verification stations wired in one process, without a network: answers, merging, what is refused."""

import pytest
import torch
from rank_support import Pipeline, ids_of
from support import loud_head, slow, write_model

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.models.checkpoint import Checkpoint

LAYERS = 6
PROMPT = list(range(3, 80))  # more than a pass takes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("stations") / "model", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def engine(folder):
    return Engine.from_pretrained(folder, exit_head="norm:2", backend="cpu", dtype="int8", threads=1)


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
def test_ranks_keep_keys_and_values_as_they_are_told(tmp_path, kv):
    folder = write_model(tmp_path / "model", num_hidden_layers=LAYERS, head_dim=32)
    engine = Engine.from_pretrained(folder, exit_head="none", backend="cpu", dtype="int8", kv_dtype=kv, threads=1)
    stages = Pipeline(folder, (2, 1, 3), kv=kv)
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=2)
    try:
        assert ids_of(stages.run(PROMPT, params, "elastic")) == engine.generate(PROMPT, params, "plain").run().ids
    finally:
        stages.close()
