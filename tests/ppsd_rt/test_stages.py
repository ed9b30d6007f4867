"""The stages in a loop of one's own: the engine's drafts and ids, however rows are cut; misuse is one line."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support import VOCAB, drafts_of, loud_head, write_model

from ppsd_rt import Engine, PpsdError, SamplingParams, Stages, UsageError
from ppsd_rt.models.checkpoint import Checkpoint

PROMPT = list(b"the stages of one text, " * 4)  # more rows than share a pass
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 4}
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=40, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=40, ignore_eos=True, **SAMPLED),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("stages") / "model")
    loud_head(Checkpoint(folder).hash).save(folder / "head.safetensors")
    loud_head(Checkpoint(folder).hash, tap=3).save(folder / "tapped.safetensors")
    return folder


@pytest.fixture(scope="module", params=["cpu", "torch"])
def engine(request, folder):
    return Engine.from_pretrained(folder, backend=request.param, exit_head=folder / "head.safetensors", threads=1)


@pytest.fixture(scope="module", params=SAMPLINGS)
def params(request):
    return SAMPLINGS[request.param]


@pytest.fixture
def stages(engine):
    """With four rows."""
    stages = engine.stages()
    stages.prefill([5, 6, 7, 8])
    return stages


@pytest.mark.parametrize("head", ["head", "tapped"])
def test_it_drafts_what_the_engine_drafts(folder, engine, params, head):
    """With a head that receives last hidden states, and one that hears a layer in the middle too: what is learnt, and
    when, matters."""
    engine = Engine.from_pretrained(
        folder, backend=engine.backend.name, exit_head=folder / f"{head}.safetensors", threads=1
    )
    expected = drafts_of(engine, PROMPT, params, "eesd:length=4,stop_rule=fixed")
    stages, drafted = engine.stages(params), []
    answer = [stages.prefill(PROMPT)]
    while len(answer) < params.max_tokens:
        rows = [answer[-1]]
        while len(rows) < min(5, params.max_tokens - len(answer)):
            rows.append(stages.draft(rows[-1:]).token)
            drafted.append((stages.drafted, rows[-1]))
        own = stages.verify(rows)
        count = next((i for i in range(1, len(rows)) if rows[i] != own[i - 1]), len(rows))
        stages.commit(count)
        answer += own[:count]
    assert len(drafted) > 40
    assert drafted == expected


def test_own_ids_do_not_depend_on_how_rows_are_cut(engine, params):
    answer, start = list(engine.generate(PROMPT, params, "plain").run().ids), len(PROMPT)
    stages = engine.stages(params)
    own = [stages.prefill(PROMPT), *stages.verify(answer[:-1])]
    assert own == answer
    end = start + len(answer) - 1
    assert (stages.committed, stages.verified, stages.drafted) == (start, end, end)
    again, at = engine.stages(params), 0
    again.prefill(PROMPT)
    for rows in (1, 17, 3, 2, 1):
        assert again.verify(answer[at : at + rows]) == own[at + 1 : at + 1 + rows]
        at += rows
    again.commit(at)
    again.roll_back(start + 5)
    assert again.committed == start + 5
    assert again.verify([1, 2, 3]) != own[6:9]
    again.roll_back(start + 5)
    assert again.verify(answer[5:-1]) == own[6:]
    assert again.tokens == (*PROMPT, *answer[:-1])


def test_noise_is_that_of_the_prompt(engine):
    """As of the engine's answers: by seed, prompt and number; without a seed one is drawn, and told."""
    params = SamplingParams(temperature=1.0, max_tokens=1, ignore_eos=True)
    stages = engine.stages(params)
    assert stages.params.seed is not None
    for prompt in (PROMPT, [1, 2, 3], [1, 2, 4]):
        expected = engine.generate(prompt, replace(params, seed=stages.params.seed), "plain").run().ids
        assert (stages.prefill(prompt),) == expected


def test_commit_voids_what_comes_after_a_wrong_row_only(stages):
    for id in (1, 2, 3, 4):
        stages.draft([id])
    stages.verify([1, 2])
    stages.commit(2)
    assert (stages.committed, stages.verified, stages.drafted) == (6, 6, 8)
    stages.verify([3, 4])
    stages.commit(1)
    assert (stages.committed, stages.verified, stages.drafted) == (7, 7, 7)
    again = stages.draft()
    assert again == stages.draft()
    assert 0 <= again.confidence <= 1


def test_answers_of_the_engine_go_on_beside_it(engine, params):
    stages = engine.stages(params)
    answer = engine.generate(PROMPT, params, "plain")
    ids = [next(iter(answer)).id]
    assert stages.prefill(PROMPT) == ids[0]
    ids += [token.id for token in answer]
    assert stages.verify(ids[:-1]) == ids[1:]


@pytest.mark.parametrize(
    ("misuse", "what"),
    [
        (lambda stages: stages.prefill([]), "the prompt is empty"),
        (lambda stages: stages.prefill([VOCAB]), "outside the vocabulary"),
        (lambda stages: stages.prefill([0] * 600), "a context of 512"),
        (lambda stages: stages.draft([VOCAB]), f"token ids are 0 to {VOCAB - 1}"),
        (lambda stages: stages.draft(["a"]), "a token id must be a whole number, not 'a'"),
        (lambda stages: stages.verify([]), "verify takes at least one row"),
        (lambda stages: stages.verify([0] * 509), "509 rows from position 4 on reach beyond the context of 512"),
        (lambda stages: (stages.draft([1]), stages.verify([2])), r"row 4 was drafted as id 1, not 2: roll_back\(4\)"),
        (lambda stages: stages.commit(1), "0 verified rows wait to be committed, not 1"),
        (lambda stages: (stages.verify([1, 2]), stages.commit(3)), "2 verified rows wait to be committed, not 3"),
        (lambda stages: stages.roll_back(5), "there are 4 rows; none to roll back to at 5"),
        (lambda stages: (stages.roll_back(0), stages.draft()), "no row to draft after: prefill"),
    ],
)
def test_misuse_is_one_line_and_changes_nothing(stages, misuse, what):
    with pytest.raises(UsageError, match=what):
        misuse(stages)
    first = stages.prefill([5, 6, 7, 8])
    stages.roll_back(3)
    assert stages.verify([8]) == [first]


def test_one_thread_at_a_time(stages, monkeypatch):
    """What another thread would call in the middle of a pass is called from there."""
    inner = stages._stages
    entered = lambda *_: stages.draft([1])  # noqa: E731
    monkeypatch.setattr(stages, "_stages", SimpleNamespace(reserve=inner.reserve, draft=inner.draft, verify=entered))
    with pytest.raises(PpsdError, match="another thread uses these stages"):
        stages.verify([1])
    monkeypatch.undo()
    assert len(stages.verify([1])) == 1


def test_what_cannot_be_had_is_said(folder, engine):
    with pytest.raises(UsageError, match=r"params must be SamplingParams\(...\), not 3"):
        engine.stages(3)
    with pytest.raises(UsageError, match="the gpu backend gives no stages: use --backend cpu or torch"):
        Stages(SimpleNamespace(name="gpu"), engine.config, engine.encode, engine.name, SamplingParams())
    headless = Engine.from_pretrained(folder, backend=engine.backend.name, exit_head="none", threads=1)
    stages = headless.stages()
    first = stages.prefill(PROMPT)
    with pytest.raises(PpsdError, match="no exit head to draft with"):
        stages.draft([first])
    assert len(stages.verify([first])) == 1


@pytest.mark.parametrize("inside", [(True, True), (True, False), (False, True)])
def test_torch_inference_mode(folder, inside):
    """Where caches are made in it, and rows run outside, or the other way round."""
    engine = Engine.from_pretrained(folder, backend="torch", exit_head=folder / "head.safetensors")
    stages, params = engine.stages(), SAMPLINGS["greedy"]
    with torch.inference_mode(inside[0]):
        first = stages.prefill(PROMPT)
        ids = engine.generate(PROMPT, params, "eesd").run().ids
    with torch.inference_mode(inside[1]):
        assert stages.verify([first, stages.draft([first]).token])[0] == ids[1]
        stages.commit(1)
        stages.draft([ids[1]])
        assert engine.generate(PROMPT, params, "plain").run().ids == ids
