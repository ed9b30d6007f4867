"""Log-probabilities of a prompt's own tokens."""

import numpy as np
import pytest

from ppsd_rt import Engine, SamplingParams, UsageError

PROMPT = [int(id) for id in np.random.default_rng(3).integers(0, 250, 150)]  # more than a pass takes


@pytest.fixture(scope="module", params=["cpu int8", "cpu float32", "torch float32"])
def engine(request, folder):
    backend, dtype = request.param.split()
    return Engine.from_pretrained(folder, exit_head="norm:2", backend=backend, dtype=dtype, threads=1)


def test_they_are_the_softmax_of_the_logits_before(engine):
    said = engine.prompt_logprobs(PROMPT, top=3)
    logits = engine.backend.logits(PROMPT, len(PROMPT)).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert said[0] is None
    assert len(said) == len(PROMPT)
    for place, one in enumerate(said[1:], 1):
        row = expected[place - 1]
        assert one.logprob == pytest.approx(row[PROMPT[place]], abs=1e-5)
        assert [id for id, _ in one.top] == np.argsort(-row, kind="stable")[:3].tolist()
        assert [logprob for _, logprob in one.top] == pytest.approx(np.sort(row)[::-1][:3].tolist(), abs=1e-5)


def test_an_answer_has_the_same_as_a_prompt(engine):
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=5, logprobs=2, ignore_eos=True)
    completion = engine.generate(PROMPT[:20], params, "elastic").run()
    said = engine.prompt_logprobs([*completion.prompt_ids, *completion.ids], top=2)[20:]
    for one, own in zip(said, completion.logprobs, strict=True):
        assert one.logprob == pytest.approx(own.logprob, abs=1e-5)
        assert [id for id, _ in one.top] == [id for id, _ in own.top]


def test_texts_and_their_bounds(engine):
    assert engine.prompt_logprobs("a") == [None]
    assert [one.top for one in engine.prompt_logprobs("ab")[1:]] == [()]
    context = engine.config.max_position_embeddings
    assert len(engine.prompt_logprobs([7] * context)) == context
    with pytest.raises(UsageError, match="context of 512"):
        engine.prompt_logprobs([7] * (context + 1))
    with pytest.raises(UsageError, match="top must be from 0 to 20"):
        engine.prompt_logprobs("ab", top=21)
    with pytest.raises(UsageError, match="empty"):
        engine.prompt_logprobs("")


def test_answers_go_on_beside_it_on_a_cpu(folder):
    engine = Engine.from_pretrained(folder, exit_head="norm:2", backend="cpu", threads=1)
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    expected = engine.generate(PROMPT, params, "plain").run().ids
    running = [engine.generate(PROMPT, params, "eesd") for _ in range(2)]
    begun = [[next(iter(answer)).id] for answer in running]
    assert len(engine.prompt_logprobs(PROMPT)) == len(PROMPT)
    for answer, ids in zip(running, begun, strict=True):
        assert (*ids, *(token.id for token in answer)) == expected
