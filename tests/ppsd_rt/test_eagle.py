"""An EAGLE-3 head: C++ drafts what torch drafts, and no draft changes an answer, alone or among others."""

from dataclasses import replace

import numpy as np
import pytest
from eagle_support import CASES, draft_ids, tensors_of, write_eagle3, write_knowing
from safetensors.numpy import load_file, save_file
from support import drafts_of, slow

from ppsd_rt.backend import RunOptions
from ppsd_rt.engine import Engine
from ppsd_rt.errors import PpsdError, UsageError
from ppsd_rt.pipeline.rounds import Drafted
from ppsd_rt.sampling.grammar import Grammar
from ppsd_rt.sampling.params import SamplingParams

HEADS = [slow(case) if case in ("safeailab, all ids", "speculators, llama") else case for case in CASES]
PROMPT = "The quick brown fox"
SCHEDULES = (
    "eesd",
    "eesd:stop_rule=fixed,length=6",
    "eesd:stop_rule=beta",
    "eesd:length=12,recycle=on,lookup=2,stop_rule=survival",
    "eesd:stop_rule=fixed",
    "auto",
)


@pytest.fixture(scope="module", params=HEADS)
def head(request, tmp_path_factory):
    return write_eagle3(tmp_path_factory.mktemp("eagle") / "head", request.param)


def load(folder, head, backend="cpu", dtype="float32", **options):
    return Engine.from_pretrained(folder, exit_head=head, backend=backend, dtype=dtype, threads=2, **options)


def test_it_drafts_what_torch_drafts(folder, head):
    """In float32: after a prompt of several passes, its own drafts, copies; and where rows are shared."""
    engines = [load(folder, head, backend) for backend in ("torch", "cpu")]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    own, beside = "eesd:stop_rule=fixed,length=5", "eesd:lookup=2,stop_rule=fixed"
    for prompt, schedule in (("ab" * 36, own), ("ab" * 36 + "c", beside), ("x", own)):
        expected, found = (drafts_of(engine, prompt, params, schedule) for engine in engines)
        assert found == expected, (prompt, schedule)


@pytest.mark.parametrize("shares", [True, False])
def test_ids_of_the_text_are_drafted_where_the_heads_rows_are_the_models(folder, tmp_path, shares):
    """A head that has trained its LM head has nothing to score other ids with."""
    head = write_eagle3(tmp_path / "head")
    tensors = load_file(head / "model.safetensors")
    rows = load_file(folder / "model.safetensors")["model.embed_tokens.weight"][draft_ids("safeailab")]
    tensors["lm_head.weight"] = rows if shares else rows + 0.1 * tensors["lm_head.weight"]
    save_file(tensors, head / "model.safetensors")
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=2.0, seed=1)
    told = [
        drafts_of(load(folder, head, backend), PROMPT, params, "eesd:stop_rule=fixed") for backend in ("torch", "cpu")
    ]
    assert told[0] == told[1]
    assert bool({token for _, token in told[0]} - set(draft_ids("safeailab").tolist())) == shares


def test_a_head_that_is_often_right(tmp_path):
    """Rounds of which the model keeps some drafts: the head goes on from what verification left of them, as torch's."""
    folder, head = write_knowing(tmp_path)
    engines = [load(folder, head, backend) for backend in ("torch", "cpu")]
    params = SamplingParams(max_tokens=100, temperature=0.8, seed=5, ignore_eos=True)
    few = replace(params, max_tokens=40)
    for schedule in ("eesd:stop_rule=fixed,length=5", "eesd:lookup=2,stop_rule=fixed"):
        expected, found = (drafts_of(engine, PROMPT, few, schedule) for engine in engines)
        assert found == expected, schedule
    statistics = engines[1].generate(PROMPT, params, "eesd:stop_rule=fixed,length=5").run().statistics
    assert 0.3 < statistics.acceptance < 0.95 and len(statistics.accepted_histogram) > 3
    plain = engines[1].generate(PROMPT, params, "plain").run()
    for schedule in SCHEDULES:
        assert engines[1].generate(PROMPT, params, schedule).run().ids == plain.ids, schedule


@pytest.mark.parametrize(
    ("backend", "dtype"), [("cpu", "float32"), ("cpu", "int8"), ("cpu", "int4"), ("torch", "bfloat16")]
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_schedule_gives_the_plain_answer(folder, head, backend, dtype, temperature):
    engine = load(folder, head, backend, dtype, **({"kv_dtype": "bfloat16"} if backend == "cpu" else {}))
    params = SamplingParams(max_tokens=60 if backend == "cpu" else 8, temperature=temperature, seed=3, ignore_eos=True)
    plain = engine.generate(PROMPT, params, "plain").run()
    for schedule in SCHEDULES:
        answer = engine.generate(PROMPT, params, schedule).run()
        assert answer.ids == plain.ids, schedule
        if "fixed" in schedule:
            assert answer.statistics.judged > 0


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_many_at_once(folder, head, backend):
    """Prompts that begin alike share blocks; answers of several lengths and schedules, with a grammar among them."""
    engine = load(folder, head, backend)
    beginning = "In the beginning was the word. " * 5
    prompts = [beginning + str(i) * (i % 4 + 1) for i in range(10)] + ["x", "y" * 130]
    prompts = prompts[::2] if backend == "cpu" else prompts[::4]
    params = SamplingParams(max_tokens=70 if backend == "cpu" else 12, temperature=0.7, seed=1, ignore_eos=True)
    alone = [engine.generate(prompt, params, "plain").run().ids for prompt in prompts]
    for schedule in ("eesd:stop_rule=fixed,length=4", "auto"):
        assert [each.ids for each in engine.generate_many(prompts, params, schedule).run()] == alone
    grammar = SamplingParams(max_tokens=20 if backend == "cpu" else 8, grammar=Grammar("regex", "[a-z ]{30}"))
    expected = engine.generate(PROMPT, grammar, "plain").run().ids
    together = engine.generate_many([PROMPT] * 3, grammar, "eesd:stop_rule=fixed").run()
    assert [each.ids for each in together] == [expected] * 3


def test_drafts_among_others_are_those_alone(folder, head):
    """In float32, of prompts that share nothing."""
    engine = load(folder, head)
    params = SamplingParams(max_tokens=70, ignore_eos=True)
    schedule = "eesd:stop_rule=fixed,length=4"
    prompts = ["a" * 30, "b" * 70, "c" * 130, "d"]
    alone = [drafts_of(engine, prompt, params, schedule) for prompt in prompts]
    options = RunOptions(report_drafts=True)
    answers = [engine.generate(prompt, params, schedule, options) for prompt in prompts]
    running = [(answer.events(), []) for answer in answers]
    for events, _ in running:  # the second one makes the loop begin, and the first one goes over to it
        next(events)
    for events, drafts in running:
        drafts += [(event.position, event.token) for event in events if isinstance(event, Drafted)]
    for (_, found), expected in zip(running[1:], alone[1:], strict=True):
        assert found == expected[-len(found) :] and len(found) > 20


def test_overlap_is_refused(folder, head):
    with pytest.raises(UsageError, match="reads what verification leaves: use auto or eesd"):
        load(folder, head, "torch").generate(PROMPT, SamplingParams(), "elastic")


@pytest.mark.parametrize("name", ["fc.weight", "midlayer.mlp.up_proj.weight", "norm.weight", "lm_head.weight"])
def test_a_weight_that_is_not_finite(folder, tmp_path, name):
    head, tensors = write_eagle3(tmp_path / "head"), tensors_of("safeailab")
    tensors[name].reshape(-1)[7] = np.nan
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(PpsdError, match="the exit head.*NaN or infinite"):
        load(folder, head)


def test_an_embedding_that_is_not_finite(folder, tmp_path):
    head, tensors = write_eagle3(tmp_path / "head", "safeailab, all ids"), tensors_of("safeailab, all ids")
    tensors["embed_tokens.weight"][100, 3] = np.inf
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(PpsdError, match="embedding of token 100 is NaN or infinite"):
        load(folder, head)


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_take_turns(folder, head, stages):
    """Nothing overlaps with its drafts, so they are those of one stage."""
    one, several = load(folder, head), load(folder, head, stages=stages)
    params, schedule = SamplingParams(max_tokens=20, ignore_eos=True), "eesd:stop_rule=fixed,length=3"
    assert drafts_of(several, PROMPT, params, schedule) == drafts_of(one, PROMPT, params, schedule)
    for schedule in SCHEDULES:
        assert several.generate(PROMPT, params, schedule).run().ids == one.generate(PROMPT, params, "plain").run().ids
    assert several.backend._answers.loop.counts["overlapped"] == 0
