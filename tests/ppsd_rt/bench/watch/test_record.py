"""A recording says when each draft token was drawn, what became of it, and what each verdict committed."""

import pytest
from support import write_model

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.bench.watch.record import DraftToken, Verdict, record, told
from ppsd_rt.generation import Committed, Token
from ppsd_rt.pipeline.rounds import Draft, Drafted, Round


def committed(round, *origins):
    tokens = [
        Token(id, round.position + place, f"<{id}>", origin)
        for place, (id, origin) in enumerate(zip(round.committed, origins, strict=True))
    ]
    return Committed(round, tuple(tokens))


PROMPT = committed(Round(0, 5, 5, (10,), prompt=True), "plain")


def test_drafts_are_accepted_rejected_and_dropped():
    judged = (Draft(11, 0.9), Draft(12, 0.8))
    rejecting = Round(0, 6, 3, (11, 99), judged, accepted=1, dropped=1)
    events = [PROMPT, Drafted(6, 11), Drafted(7, 12), Drafted(8, 13), committed(rejecting, "accepted", "corrected")]
    drafts, verdicts = told(events, [1.0, 2.0, 3.0, 4.0, 5.0], str)
    assert drafts == [
        DraftToken(6, "11", 2.0, 5.0, "accepted"),
        DraftToken(7, "12", 3.0, 5.0, "rejected"),
        DraftToken(8, "13", 4.0, 5.0, "dropped"),
    ]
    assert verdicts == [
        Verdict(1.0, (("<10>", "plain"),)),
        Verdict(5.0, (("<11>", "accepted"), ("<99>", "corrected")), 1, True),
    ]


def test_a_draft_that_a_verdict_has_overtaken_waits_for_none():
    events = [PROMPT, Drafted(5, 10), Drafted(6, 11)]
    drafts, _ = told(events, [1.0, 2.0, 3.0], str)
    assert [(draft.drawn, draft.judged, draft.fate) for draft in drafts] == [
        (2.0, 2.0, "dropped"),
        (3.0, 1.0, "dropped"),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("watch") / "model", num_hidden_layers=8)


@pytest.fixture(scope="module", params=["cpu", "torch"])
def engine(request, folder):
    return Engine.from_pretrained(folder, exit_head="norm:4", backend=request.param, dtype="float32", threads=2)


@pytest.mark.parametrize("schedule", ["plain", "eesd", "ppsd", "elastic", "auto"])
def test_a_recording_is_what_happened(engine, schedule):
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=2)
    completion = engine.generate("watch me", params, "plain").run()
    recording = record(engine, "watch me", params, schedule)
    assert "".join(text for verdict in recording.verdicts for text, _ in verdict.tokens) == completion.text
    assert recording.verdicts[0].at == 0.0
    assert recording.end == recording.verdicts[-1].at > 0.0
    assert all(0.0 <= draft.drawn <= draft.judged <= recording.end for draft in recording.drafts)
    tokens = [origin for verdict in recording.verdicts for _, origin in verdict.tokens]
    accepted = sum(draft.fate == "accepted" for draft in recording.drafts)
    assert tokens.count("accepted") + tokens.count("copied") == accepted
    assert {name for name, *_ in recording.spans} <= {"draft", "verify", "dropped draft", "dropped verify"}
    drawing = [span for span in recording.spans if span[0] == "draft"]
    for draft in recording.drafts:  # within a step of the draft stage, or (a copy) before one
        assert any(draft.drawn <= end for *_, end in drawing)
    assert recording.moments() == sorted(recording.moments())
    if schedule == "plain":
        assert recording.drafts == ()
        assert recording.step() > 0.0
