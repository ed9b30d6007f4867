"""The loop over toys: whatever the schedules, company and room, each answer is what the readable sampler says."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_twin import Sampler
from toys import VOCAB, ToyPasses, blurred, hashed_logits, schedules

from ppsd_rt import _native
from ppsd_rt.pipeline.rounds import Limits, Round
from ppsd_rt.sampling.params import SamplingParams

SAMPLINGS = (
    {},
    {"temperature": 1.0},
    {"temperature": 1.3, "repetition_penalty": 1.4},
    {"presence_penalty": 0.9, "frequency_penalty": -0.3},
    {"temperature": 0.7, "top_k": 4, "logprobs": 3},
    {"temperature": 1.0, "top_p": 0.7, "min_p": 0.05, "frequency_penalty": 0.2},
    {"logit_bias": {3: 2.0, 5: -100.0}, "logprobs": 0},
    {"temperature": 2.0, "min_tokens": 9, "top_k": 9, "top_p": 0.9},
)


def expected(truth, prompt, params, limits):
    """Plain decoding by the twin: ids, and what is said of them."""
    sampler, text, said = Sampler(params, len(prompt), None, limits.stop_ids), list(prompt), []
    while len(text) < limits.end and not (len(text) > len(prompt) and text[-1] in limits.stop_ids):
        logits = truth(text)
        text.append(sampler.choose(logits, len(text), text))
        said.append(sampler.logprob(logits, text[-1]))
    return text[len(prompt) :], [each for each in said if each is not None]


@settings(max_examples=40, deadline=None)
@given(
    asked=st.lists(st.tuples(schedules, st.sampled_from(SAMPLINGS), st.booleans()), min_size=1, max_size=8),
    noise=st.sampled_from([0.0, 0.5, 2.0, 1000.0]),
    seed=st.integers(0, 1000),
    blocks=st.integers(3, 12),
    at_once=st.integers(1, 8),
)
def test_every_answer_is_the_twins(asked, noise, seed, blocks, at_once):
    truth, source = hashed_logits(seed), random.Random(seed)
    loop = _native.Loop.of_passes(ToyPasses(truth, blurred(truth, noise)), blocks, at_once, source.randrange(1, 17))
    beginning = [source.randrange(VOCAB) for _ in range(source.randrange(80))]
    answers = []
    for number, (schedule, options, automatic) in enumerate(asked):
        params = SamplingParams(**options, seed=seed + number)
        prompt = [*beginning, *(source.randrange(VOCAB) for _ in range(source.randrange(1, 30)))]
        limits = Limits(len(prompt) + source.randrange(1, 60), frozenset(source.sample(range(VOCAB), number % 2)))
        answers.append((prompt, params, limits, loop.add(prompt, params, schedule, limits, automatic=automatic)))
    for prompt, params, limits, stream in answers:
        rounds = [event for event in stream if isinstance(event, Round)]
        ids, said = expected(truth, prompt, params, limits)
        assert [token for round in rounds for token in round.committed] == ids
        for own, other in zip([one for round in rounds for one in round.logprobs], said, strict=True):
            assert own.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [id for id, _ in own.top] == [id for id, _ in other.top]
