"""Filters against transformers, the sampled distribution against the softmax, the coupling of draft and truth."""

import numpy as np
import pytest
import torch
from sampler_twin import Sampler, confidence

from ppsd_rt.errors import UsageError
from ppsd_rt.sampling.params import SamplingParams


def logits(n=50, seed=0):
    return 3 * torch.randn(n, generator=torch.Generator().manual_seed(seed))


def test_greedy_is_argmax_and_ties_go_to_the_lowest_id():
    sampler = Sampler(SamplingParams())
    assert sampler.choose(torch.tensor([1.0, 5.0, 5.0, 2.0]), 0, []) == 1
    assert sampler.choose(torch.tensor([1.0, 5.0, 5.0]), 0, [], ids=torch.tensor([2, 30, 99])) == 30


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({"top_k": 7}, ["top_k"]),
        ({"top_p": 0.8}, ["top_p"]),
        ({"min_p": 0.1}, ["min_p"]),
        ({"top_k": 20, "top_p": 0.7, "min_p": 0.05}, ["top_k", "top_p", "min_p"]),
    ],
)
def test_filters_equal_transformers(options, order, seed):
    transformers = pytest.importorskip("transformers")
    temperature, history = 0.7, [3, 4, 4, 17]
    params = SamplingParams(temperature=temperature, repetition_penalty=1.3, **options)
    ours = Sampler(params).filtered(logits(seed=seed), history)

    scores = logits(seed=seed)[None]
    ids = torch.tensor([history])
    scores = transformers.RepetitionPenaltyLogitsProcessor(1.3)(ids, scores)
    scores = transformers.TemperatureLogitsWarper(temperature)(ids, scores)
    warpers = {
        "top_k": transformers.TopKLogitsWarper,
        "top_p": transformers.TopPLogitsWarper,
        "min_p": transformers.MinPLogitsWarper,
    }
    for name in order:
        scores = warpers[name](options[name])(ids, scores)
    assert torch.equal(ours.isinf(), scores[0].isinf())
    torch.testing.assert_close(ours, scores[0])


def test_penalty_through_a_draft_vocabulary():
    sampler = Sampler(SamplingParams(repetition_penalty=2.0))
    whole = sampler.filtered(logits(), [3, 8, 8, 40])
    ids = torch.tensor([3, 4, 40, 41])
    assert torch.equal(sampler.filtered(logits()[ids], [3, 8, 8, 40], ids), whole[ids])
    assert not torch.equal(whole, logits())


def test_confidence_is_the_probability_of_the_choice():
    x = logits()
    ids = torch.arange(100, 150)
    assert confidence(x, 7) == pytest.approx(x.softmax(-1)[7].item())
    assert confidence(x, 107, ids) == pytest.approx(x.softmax(-1)[7].item())


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"max_tokens": "5"},
        {"max_tokens": True},
        {"seed": 1.5},
        {"top_k": None},
        {"temperature": "0"},
        {"temperature": 1e-38},
        {"temperature": -1},
        {"temperature": float("inf")},
        {"temperature": float("nan")},
        {"top_k": -2},
        {"top_p": -0.1},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"repetition_penalty": 0},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 101},
        {"seed": -1},
        {"seed": 2**64},
        {"stop": ("",)},
        {"stop": ""},
        {"stop": b"end"},
        {"stop": 3},
        {"stop_token_ids": ("5",)},
        {"stop_token_ids": 5},
    ],
)
def test_bad_values_are_named(options):
    with pytest.raises(UsageError, match={"stop": "stop strings"}.get(name := next(iter(options)), name)):
        SamplingParams(**options)


def test_a_stop_string_may_stand_alone_and_numbers_may_be_numpys():
    params = SamplingParams(
        max_tokens=np.int32(5),
        temperature=np.float32(0.5),
        top_p=1,
        seed=np.uint64(2**63),
        stop="metropolis",
        stop_token_ids=np.array([1, 2]),
    )
    assert params == SamplingParams(
        max_tokens=5, temperature=0.5, seed=2**63, stop=("metropolis",), stop_token_ids=(1, 2)
    )
    assert all(type(value) is int for value in (params.max_tokens, params.seed, *params.stop_token_ids))
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(temperature=1e-6).temperature == 1e-6
