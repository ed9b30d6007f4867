"""The loop over passes in Python that have ways of their own: other bits for a prompt's rows, and choices."""

from threading import Event

import pytest
import torch
from sampler_twin import Sampler
from support import tiny_head, tiny_model

from ppsd_rt import SamplingParams, _native
from ppsd_rt.pipeline.rounds import Limits, Round
from ppsd_rt.pipeline.schedule import parse_schedule
from ppsd_rt.reference.passes import TorchPasses

MODEL = tiny_model()
PROMPT = [3 + 7 * place % 250 for place in range(100)]
DRAFTS = "eesd:length=3,stop_rule=fixed"


class Apart(TorchPasses):
    """Whose rows of prompts differ from decoded ones, as where other kernels run them."""

    decoded_rows_differ = True

    def early(self, texts, x, cancelled):
        x, row = x.copy(), 0
        for _, count, _, prompt in texts:
            x[row : row + prompt] += 0.3
            row += count
        return super().early(texts, x, cancelled)


class Sharing(Apart):
    decoded_rows_differ = False


class Choosing(TorchPasses):
    chooses = True

    def __init__(self, *given):
        super().__init__(*given)
        self.chosen = []

    def choose(self, rows):
        """As the sampler does."""
        logits = torch.from_numpy(self.logits([(row, position - 1) for row, position, *_ in rows]))
        self.chosen += [
            Sampler(SamplingParams(temperature=temperature, seed=seed)).choose(each, position, [])
            for each, (_, position, seed, temperature) in zip(logits, rows, strict=True)
        ]
        return self.chosen[-len(rows) :]


class Broken(TorchPasses):
    chooses = True

    def choose(self, rows):
        return [-1 if position == 13 else 5 for _, position, *_ in rows]


def loop_of(kind, pages=64):
    return _native.Loop.of_passes(kind(MODEL, tiny_head(MODEL, "norm")), pages, 48, 16)


def begin(loop, prompt, tokens, params=None, schedule="plain", begun=()):
    params = params or SamplingParams(temperature=1.0, seed=7)
    limits = Limits(len(prompt) + tokens, frozenset(), len(begun))
    return loop.add([*prompt, *begun], params.for_backend(prompt), parse_schedule(schedule), limits)


def ids_of(answer):
    return [id for round in answer if isinstance(round, Round) for id in round.committed]


def alone(kind, *asked, **more):
    return ids_of(begin(loop_of(kind), *asked, **more))


def test_texts_share_rows_of_prompts_alone():
    """Also the next question of a conversation: what was its answer is a prompt's row there."""
    found = {}
    for kind in (Apart, Sharing):
        loop = loop_of(kind)
        answer = ids_of(begin(loop, PROMPT, 30, schedule=DRAFTS))
        assert answer == alone(kind, PROMPT, 30)
        question = [*PROMPT, *answer, 9, 8, 7]
        found[kind] = ids_of(begin(loop, question, 12)), loop.counts["shared_rows"]
    assert found[Apart] == (alone(Apart, question, 12), len(PROMPT) - 1)
    assert found[Sharing][0] != alone(Sharing, question, 12), "or this would prove nothing"


@pytest.mark.parametrize("schedule", ["plain", DRAFTS])
def test_decoded_rows_are_run_again_as_such(schedule):
    """Of answers that made room for others, and of one that goes on from what it has said elsewhere."""
    prompts = [[number, *PROMPT[: 30 + 9 * number]] for number in range(4)]
    expected, all_there = [alone(Apart, prompt, 40) for prompt in prompts], Event()

    class Waiting(Apart):
        def early(self, *given):
            all_there.wait()
            return super().early(*given)

    loop = loop_of(Waiting, pages=3)  # two run, and grow into a second one each
    answers = [begin(loop, prompt, 40, schedule=schedule) for prompt in prompts]
    all_there.set()
    assert [ids_of(answer) for answer in answers] == expected
    assert loop.counts["preempted"] > 0
    for cut in (1, 20):
        begun = expected[3][:cut]
        assert ids_of(begin(loop, prompts[3], 40, schedule=schedule, begun=begun)) == expected[3][cut:]
    assert alone(Apart, [*prompts[3], *begun], 20) != expected[3][20:], "as a prompt's they would say something else"


@pytest.mark.parametrize("schedule", ["plain", DRAFTS])
def test_passes_choose_where_temperature_and_key_are_all_that_matters(schedule):
    asked = [
        SamplingParams(),
        SamplingParams(temperature=0.7, seed=3),
        SamplingParams(temperature=1.0, seed=4, top_k=9),
        SamplingParams(logprobs=2),
        SamplingParams(temperature=1.2, seed=5, min_tokens=12, stop_token_ids=(4,)),
    ]
    expected = [alone(TorchPasses, PROMPT[:20], 16, params) for params in asked]
    passes = Choosing(MODEL, tiny_head(MODEL, "norm"))
    loop = _native.Loop.of_passes(passes, 64, 48, 16)
    answers = [begin(loop, PROMPT[:20], 16, params, schedule) for params in asked]
    assert [ids_of(answer) for answer in answers] == expected
    assert set(passes.chosen) >= {*expected[0], *expected[1]}


def test_a_choice_that_cannot_be_made_ends_its_answer():
    loop = loop_of(Broken)
    with pytest.raises(RuntimeError, match="not a number"):
        ids_of(begin(loop, PROMPT[:10], 9))
    assert ids_of(begin(loop, PROMPT[:20], 9)) == [5] * 9
