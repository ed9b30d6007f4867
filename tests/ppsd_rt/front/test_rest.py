"""The rest of an answer, begun with what is committed of it, has the tokens that the whole answer has."""

from contextlib import closing

import pytest
from rank_support import Pipeline, ids_of
from support import EOS, GRAMMARS, PROMPT

from ppsd_rt import Engine, RunOptions, SamplingParams
from ppsd_rt.backend import Cancellation
from ppsd_rt.pipeline.rounds import Limits, Round
from ppsd_rt.pipeline.schedule import parse_schedule

EOS_ALWAYS = {"logit_bias": {EOS: 100.0}, "min_tokens": 14}  # the answer is as long as it must be, and no longer
SAMPLINGS = {
    "greedy": {},
    "sampled": {"temperature": 1.2, "seed": 5, "top_k": 30, "top_p": 0.95},
    "penalties": {"temperature": 0.9, "seed": 6, "presence_penalty": 1.5, "frequency_penalty": 1.0},
    "repetition": {"repetition_penalty": 1.7},
    "min_tokens": EOS_ALWAYS,
    "grammar": {"temperature": 1.0, "seed": 7, "grammar": GRAMMARS["schema"]},
}
SCHEDULES = ("plain", "eesd:length=3,stop_rule=fixed", "auto")


@pytest.fixture(scope="module", params=["cpu", "torch"])
def engine(request, folder):
    return Engine.from_pretrained(folder, exit_head="norm:2", backend=request.param, dtype="float32", threads=1)


def rest(engine, prompt, begun, params, schedule, own):
    """Ids after `begun`."""
    stops = frozenset(engine.config.eos_token_ids)
    limits = Limits(len(prompt) + params.max_tokens, stops, own)
    options = RunOptions(masks=engine.compile(params.grammar) if params.grammar else None)
    text, taken = [*prompt, *begun], params.for_backend(prompt)
    asked = engine.backend.rounds(text, taken, parse_schedule(schedule), limits, options, Cancellation())
    with closing(asked) as events:
        return tuple(id for event in events if isinstance(event, Round) for id in event.committed)


def whole(engine, params):
    prompt = engine.encode(PROMPT)
    return prompt, engine.generate(prompt, params, "plain").run().ids


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_rest_is_that_of_the_whole_answer(engine, sampling, schedule):
    params = SamplingParams(max_tokens=40, **SAMPLINGS[sampling])
    prompt, ids = whole(engine, params)
    for cut in sorted({1, 5, len(ids) // 2, len(ids) - 1} - {0, len(ids)}):
        assert rest(engine, prompt, ids[:cut], params, schedule, cut) == ids[cut:], cut


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_also_among_other_answers(folder, sampling):
    """In the loop, where it is taken up for the second time: the other one was alone before it came."""
    engine = Engine.from_pretrained(folder, exit_head="norm:2", backend="cpu", dtype="float32", threads=1)
    params = SamplingParams(max_tokens=40, **SAMPLINGS[sampling])
    prompt, ids = whole(engine, params)
    with engine.generate("another one", SamplingParams(max_tokens=400, ignore_eos=True), "plain") as other:
        next(other)
        for cut in (1, len(ids) // 2):
            assert rest(engine, prompt, ids[:cut], params, "plain", cut) == ids[cut:]
            assert other.running


@pytest.mark.parametrize("sampling", [name for name in SAMPLINGS if name != "grammar"])
def test_also_over_ranks(folder, sampling):
    """A grammar's masks are made by the same `Sampling::answer`, and by processes in test_faults.py."""
    engine = Engine.from_pretrained(folder, exit_head="norm:2", backend="cpu", dtype="float32", threads=1)
    params = SamplingParams(max_tokens=40, stop_token_ids=engine.config.eos_token_ids, **SAMPLINGS[sampling])
    prompt, ids = whole(engine, params)
    pipeline = Pipeline(folder, (2, 1, 1), format="float32")
    try:
        for cut in (1, len(ids) // 2):
            begun = pipeline.run(prompt, params, "ppsd", begun=ids[:cut])
            assert ids_of(begun) == ids[cut:]
    finally:
        pipeline.close()
