"""Siblings: the exit head's second choice beside its first, verified in the same pass, and never another answer."""

from dataclasses import replace

import pytest
import torch
from support import loud_head, slow, write_model

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.backend import RunOptions
from ppsd_rt.generation import Committed
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.pipeline.rounds import Drafted, Round
from ppsd_rt.statistics import Statistics

SCHEDULE = "eesd:length=4,stop_rule=fixed,siblings=0.0001"
OVERLAPPED = [
    "elastic:siblings=0.0001,stop_rule=fixed",
    "ppsd:siblings=0.0001,stop_rule=fixed",
    "elastic:first_chunk=0,max_chunk=15,siblings=0.0000001,stop_rule=fixed",
]
SAMPLINGS = {
    "greedy": SamplingParams(),
    "warm": SamplingParams(temperature=0.9, seed=5),
    "top_k": SamplingParams(temperature=1.0, top_k=5, seed=6),
    "filters": SamplingParams(temperature=1.1, top_k=40, top_p=0.9, min_p=0.01, seed=7),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By the width of heads: those of 32 have an int8 KV cache."""
    made = tmp_path_factory.mktemp("siblings")
    wide = {"num_attention_heads": 6, "head_dim": 32}
    return {16: write_model(made / "model"), 32: write_model(made / "wide", **wide)}


@pytest.fixture(scope="module")
def folder(folders):
    return folders[16]


def load(folder, backend="cpu", dtype="float32", threads=1, head="norm:3", **options):
    return Engine.from_pretrained(folder, exit_head=head, backend=backend, dtype=dtype, threads=threads, **options)


@pytest.fixture(
    scope="module",
    params=[
        slow(("torch", "float32", 1)),
        ("cpu", "float32", 2),
        ("cpu", "bfloat16", 1),
        ("cpu", "int8", 2),
        ("cpu", "int8", 2, 32),
        ("cpu", "int4", 2, 32),
    ],
    ids=lambda p: "-".join(map(str, p)),
)
def engine(request, folders):
    backend, dtype, threads, *width = request.param
    made = load(folders[width[0] if width else 16], backend, dtype, threads)
    assert getattr(made.backend, "kv_dtype", dtype) == ("int8" if width else "bfloat16" if dtype == "int8" else dtype)
    return made


def free(params, count):
    return replace(params, max_tokens=count, ignore_eos=True)


@pytest.mark.parametrize("params", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("prompt", ["a", "abcdefgh" * 7 + "xyz", "once upon a time " * 7])  # ends about kSpan's borders
def test_siblings_are_right_at_times_and_change_no_answer(engine, params, prompt):
    params = free(params, 90)
    plain = engine.generate(prompt, params, "plain").run()
    rescued = engine.generate(prompt, params, SCHEDULE).run()
    assert rescued.ids == plain.ids
    assert rescued.text == plain.text
    assert rescued.statistics.siblings > rescued.statistics.rescued > 0
    without = engine.generate(prompt, params, SCHEDULE.replace("siblings=0.0001", "siblings=0")).run()
    assert rescued.statistics.rounds <= without.statistics.rounds


@pytest.mark.parametrize("schedule", OVERLAPPED)
@pytest.mark.parametrize("name", ["greedy", "filters"])
def test_with_overlap(engine, schedule, name):
    """A sibling's row may be under way in a later pass than the verdict that its draft is wrong."""
    params = free(SAMPLINGS[name], 90)
    completion = engine.generate("abc", params, schedule).run()
    assert completion.ids == engine.generate("abc", params, "plain").run().ids


@pytest.mark.parametrize("schedule", [SCHEDULE, OVERLAPPED[0]])
def test_a_turn_that_goes_on_after_a_rescue(engine, schedule):
    """An answer may end with the very token that a sibling's row gave, or before all stages have been told of it."""
    ended = 0
    for count in range(2, 24):
        params = free(SamplingParams(), count)
        generation = engine.generate("abc", params, schedule)
        rounds = [event.round for event in generation.events() if isinstance(event, Committed)]
        ended += rounds[-1].rescued
        longer = [*generation.completion.prompt_ids, *generation.completion.ids, 7]
        again = engine.generate(longer, free(SamplingParams(), 6), schedule).run()
        engine.generate("zzz", free(SamplingParams(), 1), "plain").run()
        assert again.ids == engine.generate(longer, free(SamplingParams(), 6), "plain").run().ids
    assert ended > 0 or schedule != SCHEDULE


@pytest.mark.parametrize("exit_layer", [2, 0])
def test_a_feedback_head_receives_what_became_of_siblings(folder, tmp_path, exit_layer):
    """C++ and torch draft the same after a rescue, from what the last layer made of the sibling's row."""
    path = tmp_path / "head.safetensors"
    loud_head(Checkpoint(folder).hash, exit_layer=exit_layer).save(path, torch.float32)
    told = []
    for backend in ("cpu", "torch"):
        engine = load(folder, backend, head=path)
        generation = engine.generate("a b c", free(SamplingParams(), 50), SCHEDULE, RunOptions(report_drafts=True))
        events = list(generation.events())
        rounds = [event.round for event in events if isinstance(event, Committed)]
        assert any(round.rescued for round in rounds)
        drafts = [(event.position, event.token) for event in events if isinstance(event, Drafted)]
        told.append((drafts, [(r.committed, r.rows, r.siblings, r.rescued, r.dropped) for r in rounds]))
    assert told[0] == told[1]


def test_what_a_repetition_penalty_has_seen_is_one_text(engine):
    """A sibling's row would have seen another token than the rest of its pass, so there are none."""
    params = free(SamplingParams(repetition_penalty=1.3), 60)
    completion = engine.generate("abc", params, SCHEDULE).run()
    assert completion.statistics.siblings == 0
    assert completion.ids == engine.generate("abc", params, "plain").run().ids
    # And afterwards the penalty counts the tokens of adopted rows, not of the drafts that they replace.
    first = engine.generate("abc", free(SamplingParams(), 60), SCHEDULE).run()
    assert first.statistics.rescued > 0
    longer = [*first.prompt_ids, *first.ids]
    again = engine.generate(longer, params, SCHEDULE).run()
    engine.generate("zzz", free(SamplingParams(), 1), "plain").run()
    assert again.ids == engine.generate(longer, params, "plain").run().ids


# -- what users write and read -----------------------------------------------------------------------------------------


def test_in_the_statistics_and_by_origin(engine):
    params = free(SamplingParams(), 100)
    generation = engine.generate("abc", params, SCHEDULE)
    events = [event for event in generation.events() if isinstance(event, Committed)]
    statistics = generation.statistics.as_dict()
    rescued = [event for event in events if event.round.rescued]
    assert statistics["rescued"] == len(rescued) > 0
    assert statistics["siblings"] == sum(event.round.siblings for event in events)
    for event in rescued:
        assert [token.origin for token in event.tokens[-2:]] == ["sibling", "bonus"]
        assert event.round.judged[-1].sibling == event.tokens[-2].id
    summed = Statistics()
    summed.add(Round(0, 5, 4, (1, 2, 3), accepted=1, siblings=2, rescued=True), 0.1)
    assert (summed.siblings, summed.rescued, summed.tokens) == (2, 1, 3)


def test_a_stop_string_between_a_sibling_and_the_token_after_it(engine):
    params = free(SamplingParams(), 100)
    found = (_stop_at_a_sibling(engine, prompt, params) for prompt in ("abc", "xyz", "q", "1"))
    prompt, stop = next(filter(None, found))
    cut = engine.generate(prompt, replace(params, stop=(stop,)), SCHEDULE)
    last = [event.round for event in cut.events() if isinstance(event, Committed)][-1]
    assert cut.completion.finish_reason == "stop"
    assert not last.rescued
    assert len(last.committed) == last.accepted + 1


def _stop_at_a_sibling(engine, prompt, params):
    """The prompt, and a text that stands in its answer for the first time where a sibling was right."""
    before = ""
    for event in engine.generate(prompt, params, SCHEDULE).events():
        for token in event.tokens:
            if token.origin == "sibling" and len(token.text) == 1 and token.text not in before:
                return prompt, token.text
            before += token.text
    return None
