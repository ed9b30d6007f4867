"""An exit head drafts from the ids that its file lists and from those that stand in the text, on every backend."""

import numpy as np
import pytest
import torch
from support import drafts_of, loud_head, tiny_model, write_model

from ppsd_rt import Committed, Engine, RunOptions, SamplingParams
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.head_file import MOST_TEXT_IDS as MOST
from ppsd_rt.pipeline.rounds import Drafted

SIZE = 1000
LISTED = range(0, SIZE, 50)
PROMPT = [7, 150, 333, 9, 7]
SCHEDULE = "eesd:length=4,stop_rule=fixed"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and two heads of the same weights: one lists few ids, the other these and the prompt's."""
    folder = tmp_path_factory.mktemp("draft-vocabulary") / "model"
    shape = {"vocab_size": SIZE, "max_position_embeddings": 1024}
    write_model(folder, tiny_model(**shape), **shape)
    hash = Checkpoint(folder).hash
    for name, listed in (("few", LISTED), ("more", sorted({*LISTED, *PROMPT}))):
        head = loud_head(hash, vocab_size=SIZE)
        head.save(folder / f"{name}.safetensors", torch.float32, draft_ids=list(listed))
    return folder


def load(folder, backend="cpu", head="few", **options):
    return Engine.from_pretrained(
        folder, backend=backend, exit_head=folder / f"{head}.safetensors", threads=2, **options
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_a_row_of_the_text_is_as_good_as_a_listed_one(folder, dtype):
    """The first draft token and its probability: of the ids of the prompt, listed or not."""
    told = []
    for head in ("few", "more"):
        stages = load(folder, head=head, dtype=dtype).stages()
        first = stages.prefill(PROMPT)
        told.append([stages.draft([first]), stages.draft([PROMPT[2]])])
    for one, other in zip(*told, strict=True):
        assert one.token == other.token
        assert one.confidence == pytest.approx(other.confidence, rel=1e-6)  # the ids are summed in another order


@pytest.mark.parametrize("params", [{}, {"temperature": 1.3, "seed": 5}, {"repetition_penalty": 1.4, "min_tokens": 20}])
def test_cpu_and_torch_draft_the_same(folder, params):
    params = SamplingParams(max_tokens=30, ignore_eos=True, **params)
    engines = [load(folder, backend, dtype="float32") for backend in ("cpu", "torch")]
    told = [drafts_of(engine, PROMPT, params, SCHEDULE) for engine in engines]
    assert told[0] == told[1]
    assert {token for _, token in told[0]} - set(LISTED)
    assert {token for _, token in told[0]} & set(LISTED)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_only_what_is_listed_or_stands_in_the_text_is_drafted(folder, backend):
    params = SamplingParams(max_tokens=80 if backend == "cpu" else 30, ignore_eos=True, temperature=2.0, seed=3)
    completion = load(folder, backend).generate(PROMPT, params, SCHEDULE, RunOptions(report_drafts=True))
    known, text, own = {*LISTED, *PROMPT}, list(PROMPT), 0
    for event in completion.events():
        if isinstance(event, Drafted):
            assert event.token in known | set(text)
            own += event.token not in known
        elif isinstance(event, Committed):
            text += event.round.committed
    assert own > 0  # of the answer's ids


@pytest.mark.parametrize(("backend", "dtype"), [("cpu", "int8"), ("torch", "bfloat16")])
def test_a_draft_does_not_depend_on_company(folder, backend, dtype):
    engine = load(folder, backend, dtype=dtype)
    params = SamplingParams(max_tokens=40 if backend == "cpu" else 12, ignore_eos=True)
    prompts = [[*PROMPT, 100 + i, 200 + i, 300 + i] for i in range(6 if backend == "cpu" else 3)]
    options = RunOptions(report_drafts=True)

    def drafts(events):
        return [(event.position, event.token) for event in events if isinstance(event, Drafted)]

    alone = [drafts(engine.generate(prompt, params, SCHEDULE, options).events()) for prompt in prompts]
    generations = [engine.generate(prompt, params, SCHEDULE, options) for prompt in prompts]
    events = [[] for _ in prompts]
    running = {number: generation.events() for number, generation in enumerate(generations)}
    while running:
        for number, left in list(running.items()):
            event = next(left, None)
            if event is None:
                del running[number]
            else:
                events[number].append(event)
    assert [drafts(each) for each in events] == alone


def test_a_long_text_leaves_the_newest_ids(folder):
    """More ids than there is room for: torch and C++ keep the same ones, and those that come back."""
    ids = [int(token) for token in np.random.default_rng(1).permutation(SIZE)]
    oldest = [token for token in ids[:600] if token not in LISTED][-MOST:][:60]  # which leave, and come back
    told = []
    for backend in ("cpu", "torch"):
        stages = load(folder, backend, dtype="float32").stages(SamplingParams(temperature=3.0, seed=2))
        row, drafts = stages.prefill(ids[:600]), []
        for rows in ([], ids[600:700], oldest):
            rows = [row, *rows]
            for _ in range(40):
                drafts.append(stages.draft(rows))
                rows = [drafts[-1].token]
            row = rows[0]
        told.append([(draft.token, round(draft.confidence, 4)) for draft in drafts])
    assert told[0] == told[1]
    tokens = [token for token, _ in told[0]]
    assert set(tokens[:40]) & set(oldest)
    assert set(tokens[40:80]) & set(ids[600:700])
    left = set(oldest) - set(tokens[:40])  # a draft is text: it makes its id new
    assert not set(tokens[40:80]) & left
    assert set(tokens[80:]) & left
