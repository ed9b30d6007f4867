"""Grammars over ranks: the answers of one process, and what is said where a rank cannot compile one, or it gives up."""

from types import SimpleNamespace

import numpy as np
import pytest
from rank_support import ids_of
from serve_support import HANG
from support import EOS, GRAMMARS, PROMPT, VOCAB, write_model

from ppsd_rt import Engine, Grammar, PpsdError, SamplingParams
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.ranks import stage
from ppsd_rt.ranks.backend import RanksBackend
from ppsd_rt.ranks.control import Kind

SAMPLINGS = {"greedy": {}, "sampled": {"temperature": 1.2, "top_k": 40, "frequency_penalty": 0.3, "seed": 3}}
SCHEDULES = ("plain", "eesd:length=4,stop_rule=fixed", "ppsd", "elastic:lookup=1", "eesd:length=4,lookup=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("grammars") / "model", num_hidden_layers=6)


@pytest.fixture(scope="module")
def engine(folder):
    return Engine.from_pretrained(folder, exit_head="norm:2", backend="cpu", dtype="int8", threads=1)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", GRAMMARS)
def test_answers_are_those_of_one_process(engine, ranks, name, sampling):
    params = SamplingParams(max_tokens=60, grammar=GRAMMARS[name], **SAMPLINGS[sampling])
    expected = engine.generate(PROMPT, params, "plain").run()
    free = SamplingParams(max_tokens=60, **SAMPLINGS[sampling])
    assert engine.generate(PROMPT, free, "plain").run().ids != expected.ids, "the grammar says nothing here"
    masks, prompt, stages = engine.compile(GRAMMARS[name]), engine.encode(PROMPT), ranks((2, 4))
    stages.stations[-1].use_masks(lambda number: masks() if number == 7 else None)
    params = SamplingParams(max_tokens=60, stop_token_ids=(EOS,), **SAMPLINGS[sampling])  # the stop that an engine adds
    kept = judged = 0
    for schedule in SCHEDULES:
        rounds = stages.run(prompt, params, schedule, grammar=7, masks=(masks(), masks()))
        assert ids_of(rounds)[: len(expected.ids)] == expected.ids, schedule
        kept += sum(round.accepted for round in rounds)
        judged += sum(len(round.judged) for round in rounds)
    assert 0 < kept < judged, "drafts are kept, and rejected"


def test_the_last_rank_holds_to_it_whatever_is_drafted(engine, ranks):
    """Drafts that know no grammar: the rank that chooses rejects what it forbids, and the answer is the same."""
    grammar = GRAMMARS["regex"]
    expected = engine.generate(PROMPT, SamplingParams(max_tokens=40, grammar=grammar), "plain").run().ids
    masks, stages = engine.compile(grammar), ranks((2, 4))
    stages.stations[-1].use_masks(lambda number: masks())
    everything = engine.compile(Grammar.regex("(?s:.)*"))
    params = SamplingParams(max_tokens=40, stop_token_ids=(EOS,))
    for schedule in SCHEDULES[1:]:
        rounds = stages.run(engine.encode(PROMPT), params, schedule, grammar=1, masks=(everything(), everything()))
        assert ids_of(rounds)[: len(expected)] == expected, schedule


def test_an_answer_with_a_grammar_wants_a_rank_that_knows_grammars(engine, ranks):
    stages, masks = ranks((2, 4)), engine.compile(GRAMMARS["regex"])
    with pytest.raises(AssertionError, match="knows no grammars"):
        stages.run(engine.encode(PROMPT), SamplingParams(max_tokens=4), "plain", grammar=1, masks=(masks(), masks()))
    stages.failures.clear()


# -- what rank 0 and the last rank tell each other ---------------------------------------------------------------------


class Controls:
    """Two ends of a control link that hands messages on at once, and what went over it."""

    def __init__(self, make):
        self.said, self.failed = [], []
        self.last, self.first = self._end(0), self._end(1)
        self.told = stage.AnswerGrammars(self.last, make)
        slices = SimpleNamespace(dtype="int8", threads=1, blocks=1, bytes=1)
        self.backend = RanksBackend({}, self.first, slices, None, (2, 4), 1, 0.0)

    def _end(self, peer):
        handlers = {}

        def tell(to, kind, value=None):
            assert to == peer
            self.said.append((to, value))
            (self.last if peer else self.first).handlers[kind](value)

        return SimpleNamespace(
            handlers=handlers, on=handlers.__setitem__, tell=tell, fail=self.failed.append,
            wait=lambda queue: queue.get(timeout=HANG), world=SimpleNamespace(last=1, rank=1 - peer),
        )  # fmt: skip


@pytest.fixture
def controls(folder):
    return Controls(lambda: stage.grammars_of(Checkpoint(folder)))


def test_an_answer_begins_when_the_last_rank_has_compiled(folder, controls):
    number = controls.backend._tell(GRAMMARS["schema"])
    assert controls.said[-1] == (0, [number, ""])
    allowed = np.flatnonzero(controls.told.mask(number).allowed(0, []))
    tokenizer = stage.load_tokenizer(folder, VOCAB)
    assert {tokenizer.token_bytes(id)[:1] for id in allowed} == {b"{"}
    assert controls.told.mask(number + 1) is None
    again = controls.backend._tell(GRAMMARS["regex"])
    assert again != number
    assert controls.told.mask(number) is not None, "the answers may go on side by side"
    controls.first.tell(1, Kind.FORGET, number)
    assert controls.told.mask(number) is None, "it has ended"
    assert controls.told.mask(again) is not None


def test_what_the_last_rank_cannot_compile_is_said_there(controls, monkeypatch):
    def refuses(checkpoint):
        raise PpsdError("a grammar needs llguidance")

    controls.told._make = lambda: refuses(None)
    with pytest.raises(PpsdError, match="rank 1: a grammar needs llguidance"):
        controls.backend._tell(GRAMMARS["regex"])
