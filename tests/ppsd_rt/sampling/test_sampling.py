"""Penalties, logit_bias and logprobs: the same with every schedule, and what OpenAI means by them."""

import numpy as np
import pytest
from support import VOCAB, slow, write_model

from ppsd_rt import Committed, Engine, SamplingParams, UsageError
from ppsd_rt.pipeline.schedule import AUTO

SCHEDULES = {
    "head": "eesd:length=4,stop_rule=fixed",
    "copies": "eesd:length=4,lookup=1",
    "overlap": "elastic:max_chunk=5,lookahead=8",
    "auto": AUTO,
}
BIAS = dict.fromkeys(range(0, VOCAB, 3), -8.0) | {40: 2.5, 65: 4.0}
SAMPLINGS = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"temperature": 0.9, "frequency_penalty": 0.4, "seed": 3},
    "all penalties": {"presence_penalty": -0.7, "frequency_penalty": 0.6, "repetition_penalty": 1.1},
    "bias": {"logit_bias": BIAS, "temperature": 1.0, "top_p": 0.9, "seed": 4},
    "bias and top-k": {"logit_bias": BIAS, "temperature": 0.8, "top_k": 5, "frequency_penalty": 0.2, "seed": 5},
}
PROMPT = "once upon a time once upon a time"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("sampling") / "model", num_hidden_layers=6)


@pytest.fixture(
    scope="module",
    params=[slow(("torch", "float32", 1, 1)), ("cpu", "float32", 2, 2), ("cpu", "int8", 1, 1)],
    ids=lambda p: "-".join(map(str, p)),
)
def engine(request, folder):
    backend, dtype, threads, stages = request.param
    return Engine.from_pretrained(
        folder, exit_head="norm:3:200", backend=backend, dtype=dtype, threads=threads, stages=stages
    )


def free(count=60, **options):
    return SamplingParams(max_tokens=count, ignore_eos=True, **options)


@pytest.mark.parametrize("options", SAMPLINGS.values(), ids=SAMPLINGS)
def test_no_schedule_changes_the_answer(engine, options):
    params = free(logprobs=3, **options)
    plain = engine.generate(PROMPT, params, "plain").run()
    assert plain.ids != engine.generate(PROMPT, free(), "plain").run().ids
    for name, schedule in SCHEDULES.items():
        answer = engine.generate(PROMPT, params, schedule).run()
        assert (answer.ids, answer.logprobs) == (plain.ids, plain.logprobs), name
        if name != "auto":
            assert answer.statistics.accepted + answer.statistics.copied_accepted > 0, name


def expected(engine, prompt, params, count):
    """Plain decoding, greedy, by the definitions: one token after the other, from the logits alone."""
    text, answer = list(prompt), []
    for _ in range(count):
        scores = engine.backend.logits(text)[0].astype(np.float32)
        seen, penalty = list(set(text)), np.float32(params.repetition_penalty)
        scores[seen] = np.where(scores[seen] < 0, scores[seen] * penalty, scores[seen] / penalty)
        for id, bias in params.logit_bias:
            scores[id] += np.float32(bias)
        for id in set(answer):
            taken = params.frequency_penalty * answer.count(id) + params.presence_penalty
            scores[id] -= np.float32(taken)
        answer.append(int(scores.argmax()))
        text.append(answer[-1])
    return answer


@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": 2.0},
        {"frequency_penalty": 0.3},
        {"presence_penalty": -1, "logit_bias": {70: 6.0}},
        {"repetition_penalty": 1.7},
    ],
    ids=["presence", "frequency", "with bias", "repetition"],
)
def test_penalties_are_their_definitions(engine, options):
    params = free(40, **options)
    answer = engine.generate(PROMPT, params, SCHEDULES["head"]).run()
    assert list(answer.ids) == expected(engine, answer.prompt_ids, params, 40)


def test_an_answer_that_goes_on_from_another_counts_its_own_ids(engine):
    """The rows of the first answer are in the cache, and belong to the prompt now."""
    first = engine.generate(PROMPT, free(20, presence_penalty=2.0), SCHEDULES["head"]).run()
    prompt = [*first.prompt_ids, *first.ids]
    params = free(20, presence_penalty=2.0)
    assert list(engine.generate(prompt, params).run().ids) == expected(engine, prompt, params, 20)


def test_a_bias_forbids_and_forces(engine):
    allowed = {65, 66, 67}
    forbidding = free(30, logit_bias={id: -100 for id in range(VOCAB) if id not in allowed}, temperature=1.0)
    assert set(engine.generate(PROMPT, forbidding).run().ids) <= allowed
    assert set(engine.generate(PROMPT, free(8, logit_bias={77: 100})).run().ids) == {77}


def test_a_forced_token_is_drafted_with_confidence(engine):
    """The head's own probability is of biased logits, or stop rules would not draft what a bias makes sure."""
    generation = engine.generate(PROMPT, free(40, logit_bias={77: 100}), "eesd:length=4,stop_rule=confidence=0.9")
    rounds = [event.round for event in generation.events() if isinstance(event, Committed)]
    assert all(draft.confidence > 0.99 for round in rounds for draft in round.judged)
    assert sum(round.accepted for round in rounds) > 20


def test_logprobs_are_of_the_models_own_distribution(engine):
    """At temperature 1, before bias, penalties and filters: whatever these say."""
    params = free(12, logprobs=5, temperature=0.7, top_k=3, logit_bias={70: 3.0}, frequency_penalty=1.0, seed=1)
    completion = engine.generate(PROMPT, params, SCHEDULES["head"]).run()
    assert len(completion.logprobs) == 12
    for place, reported in enumerate(completion.logprobs):
        raw = engine.backend.logits([*completion.prompt_ids, *completion.ids[:place]])[0].astype(np.float64)
        own = raw - raw.max() - np.log(np.exp(raw - raw.max()).sum())
        best = np.argsort(-own, kind="stable")[:5]
        assert [id for id, _ in reported.top] == best.tolist()
        np.testing.assert_allclose([logprob for _, logprob in reported.top], own[best], atol=1e-5)
        assert reported.logprob == pytest.approx(own[completion.ids[place]], abs=1e-5)


def test_stages_have_penalties_and_bias(engine):
    for options in ({"presence_penalty": 1.5, "logit_bias": BIAS}, {"frequency_penalty": 0.5}):
        params = free(16, **options)
        plain = engine.generate(PROMPT, params, "plain").run()
        stages = engine.stages(params)
        for _ in range(2):  # a second text on the same stages
            answer = [stages.prefill(PROMPT)]
            while len(answer) < 16:
                draft = stages.draft(answer[-1:])
                own = stages.verify([answer[-1], draft.token])
                count = 2 if draft.token == own[0] else 1
                stages.commit(count)
                answer += own[:count]
            assert tuple(answer[:16]) == plain.ids
    with pytest.raises(UsageError, match="stages have no logprobs"):
        engine.stages(free(logprobs=1))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty must be from -2 to 2, not 2.5"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be from -2 to 2, not nan"),
        ({"frequency_penalty": "1"}, "frequency_penalty must be a number"),
        ({"logprobs": 21}, "logprobs must be from 0 to 20, not 21"),
        ({"logprobs": -1}, "logprobs must be from 0 to 20"),
        ({"logprobs": True}, "logprobs must be a whole number"),
        ({"logit_bias": {1: 101}}, "logit_bias must be from -100 to 100, not 101 for id 1"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias must be from -100 to 100, not nan for id 1"),
        ({"logit_bias": {"1": 1}}, "logit_bias: an id must be a whole number"),
        ({"logit_bias": {1: "2"}}, "logit_bias: a bias must be a number"),
        ({"logit_bias": [(1, 2), (1, 3)]}, "logit_bias names an id twice"),
        ({"logit_bias": [1, 2]}, "logit_bias must be a dict of ids and biases"),
        ({"logit_bias": 5}, "logit_bias must be a list"),
    ],
)
def test_bad_values_are_named(options, said):
    with pytest.raises(UsageError, match=said):
        SamplingParams(**options)
