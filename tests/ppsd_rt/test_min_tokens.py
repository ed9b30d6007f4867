"""An answer that may not end before it has so many tokens."""

import pytest
from support import EOS, write_model

from ppsd_rt import Engine, SamplingParams

SCHEDULES = ["plain", "eesd", "elastic:lookup=1", "auto"]
WILL_END = {"logit_bias": {EOS: 100.0}, "max_tokens": 30}  # as soon as it may
SAMPLINGS = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 3},
    "filtered": {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "seed": 3, "repetition_penalty": 1.1, "logprobs": 1},
}


@pytest.fixture(scope="module", params=["cpu int8", "torch float32"])
def engine(request, tmp_path_factory):
    backend, dtype = request.param.split()
    folder = write_model(tmp_path_factory.mktemp("least") / "model")
    return Engine.from_pretrained(folder, exit_head="norm:2", backend=backend, dtype=dtype, threads=1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_no_end_comes_too_early(engine, schedule, sampling):
    for least in (0, 1, 12):
        params = SamplingParams(min_tokens=least, **WILL_END, **SAMPLINGS[sampling])
        completion = engine.generate("Once", params, schedule).run()
        assert completion.finish_reason == "eos"
        assert len(completion.ids) == least + 1
        assert completion.ids == engine.generate("Once", params, "plain").run().ids


def test_after_them_nothing_is_different(engine):
    """The ids of a free answer, of which one may not come before a place that it comes after anyway."""
    free = SamplingParams(max_tokens=40, temperature=1.0, seed=4, ignore_eos=True)
    ids = engine.generate("Once", free, "elastic").run().ids
    last = max(map(ids.index, ids))
    params = SamplingParams(max_tokens=40, min_tokens=last, temperature=1.0, seed=4, stop_token_ids=(ids[last], EOS))
    assert engine.generate("Once", params, "elastic").run().ids == ids[: last + 1]


def test_stop_ids_and_stop_strings_wait_too(engine):
    free = engine.generate("Once", SamplingParams(max_tokens=30, temperature=1.0, seed=7, ignore_eos=True)).run()
    pieces = [engine.tokenizer.decode([id]) for id in free.ids]
    place = next(i for i, piece in enumerate(pieces) if i > 3 and piece.isascii() and piece.isprintable())
    character = pieces[place]
    cut = SamplingParams(max_tokens=30, temperature=1.0, seed=7, ignore_eos=True, stop=character, min_tokens=place)
    assert len(engine.generate("Once", cut).run().ids) == place + 1
    later = SamplingParams(
        max_tokens=30, temperature=1.0, seed=7, ignore_eos=True, stop=character, min_tokens=place + 1
    )
    completion = engine.generate("Once", later).run()
    assert len(completion.ids) > place + 1
    assert character in completion.text
