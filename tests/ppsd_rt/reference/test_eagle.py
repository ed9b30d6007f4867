"""Decoding with an EAGLE-3 head: whatever the schedule, the answer is plain decoding's."""

import pytest
from eagle_support import CASES, write_eagle3
from support import slow, write_model

from ppsd_rt.backend import RunOptions
from ppsd_rt.engine import Engine
from ppsd_rt.errors import UsageError
from ppsd_rt.pipeline.rounds import Drafted
from ppsd_rt.sampling.grammar import Grammar
from ppsd_rt.sampling.params import SamplingParams

HEADS = [slow(case) if case in ("safeailab, all ids", "speculators, llama") else case for case in CASES]
PROMPT = "The quick brown fox"
SCHEDULES = (
    "eesd",
    "eesd:stop_rule=fixed,length=6",
    "eesd:stop_rule=confidence",
    "eesd:stop_rule=calibrated",
    "eesd:length=12,stop_rule=survival",
    "eesd:lookup=1",
    "eesd:length=12,recycle=on,stop_rule=survival",
    "eesd:stop_rule=fixed,siblings=0.005",
    "auto",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("eagle") / "model")


@pytest.fixture(scope="module", params=HEADS)
def engine(request, folder, tmp_path_factory):
    head = write_eagle3(tmp_path_factory.mktemp("eagle") / "head", request.param)
    return Engine.from_pretrained(folder, exit_head=head, backend="torch", dtype="float32", threads=1)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_schedule_gives_the_plain_answer(engine, temperature):
    params = SamplingParams(max_tokens=16, temperature=temperature, seed=3, ignore_eos=True)
    plain = engine.generate(PROMPT, params, "plain").run()
    for schedule in SCHEDULES:
        answer = engine.generate(PROMPT, params, schedule).run()
        assert answer.ids == plain.ids, schedule
        if "fixed" in schedule:
            assert answer.statistics.judged > 0


def test_a_prompt_that_shares_its_beginning(engine):
    """Rows that are kept from the answer before are drafted from as if they had been run anew."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    schedule = "eesd:stop_rule=fixed,length=4"

    def drafts(prompt):
        events = list(engine.generate(prompt, params, schedule, RunOptions(report_drafts=True)).events())
        return [(event.position, event.token) for event in events if isinstance(event, Drafted)]

    engine.generate("Hello", params, schedule).run()
    fresh = drafts(PROMPT + ", who")
    engine.generate(PROMPT + " jumps", params, schedule).run()
    assert drafts(PROMPT + ", who") == fresh


def test_a_grammar(engine):
    params = SamplingParams(max_tokens=20, grammar=Grammar("regex", "[a-z ]{30}"))
    plain = engine.generate(PROMPT, params, "plain").run()
    assert engine.generate(PROMPT, params, "eesd:stop_rule=fixed").run().ids == plain.ids


def test_overlap_is_refused(engine):
    with pytest.raises(UsageError, match="reads what verification leaves: use auto or eesd"):
        engine.generate(PROMPT, SamplingParams(), "elastic")
