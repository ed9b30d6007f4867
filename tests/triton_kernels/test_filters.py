"""Top-k, top-p and min-p on the device choose what the reference sampler chooses."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from kernel_support import DEVICE, make, state_of
from sampler_twin import Sampler
from support import slow

from ppsd_rt.sampling.params import SamplingParams
from ppsd_rt.triton_kernels.heads import Scratch, heads, sampling_words
from ppsd_rt.triton_kernels.linear import Weight

START = 40


def choose(weight, x, params, rows, draft_ids=None, history=()):
    """The choices for positions START + 1.., after a text of which `history` stands before START."""
    vocabulary = weight.outputs if draft_ids is None else int(draft_ids.max()) + 1
    text, first_seen = (torch.full((n,), 2**31 - 1, dtype=torch.int32, device=DEVICE) for n in (64, vocabulary))
    for place in range(START, -1, -1):
        token = history[place % len(history)] if history else 0
        text[place] = token
        first_seen[token] = place
    text[START + 1 : START + 16] = text[1:16]
    choices, confidences = torch.zeros(16, dtype=torch.int32, device=DEVICE), torch.zeros(16, device=DEVICE)
    logits = torch.zeros(16, weight.outputs, device=DEVICE)
    norm = torch.ones(weight.inputs, device=DEVICE)
    heads(
        x, norm, 1e-5, weight, sampling_words(params, DEVICE), Scratch(weight), choices, confidences,
        state_of(rows, START, START), draft_ids=draft_ids, text=text, first_seen=first_seen, logits=logits,
    )  # fmt: skip
    return choices[:rows].tolist(), confidences[:rows], logits[:rows], text.tolist()


CASES = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1000, "top_p": 0.9},
    {"top_k": 40, "top_p": 0.5, "min_p": 0.05},
    {"top_p": 0.05},
    {"top_p": 0.97, "temperature": 3.0},
    {"min_p": 0.3},
    {"top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.6},
    {"top_k": 7, "repetition_penalty": 0.6, "temperature": 0.4},
]


@pytest.mark.parametrize("draft", [slow(False, id="whole"), pytest.param(True, id="draft")])
@pytest.mark.parametrize("number", range(len(CASES)), ids=[" ".join(case) for case in CASES])
def test_choices_are_the_reference_samplers(number, draft):
    """Spread logits, flat ones, and ones of few values: then the order of ids decides what is cut off. Of a draft
    vocabulary two of these a case."""
    case, spreads = CASES[number], [0.5, 0.05, None]
    params = SamplingParams(**{"temperature": 1.0, "seed": 11, **case})
    draft_ids = torch.arange(150, dtype=torch.int32, device=DEVICE) * 2 + 1 if draft else None
    history = [3, 5, 17, 149, 4, 2, 3]
    kept = set()
    for spread in spreads if not draft else [spreads[number % 2], None]:
        weight, x = make(150, 32, seed=1), make(16, 32, seed=2)
        weight = Weight((0.5 * weight).round() if spread is None else spread * weight)
        x = x.round() if spread is None else x
        choices, confidences, logits, text = choose(weight, x, params, 3, draft_ids, history)
        ids = None if draft_ids is None else draft_ids.long().cpu()
        for row, (choice, chance) in enumerate(zip(choices, confidences.tolist(), strict=True)):
            position, its = START + row + 1, logits[row].cpu()
            sampler = Sampler(params)
            assert choice == sampler.choose(its, position, text[:position], ids)
            index = choice if ids is None else ids.tolist().index(choice)
            assert chance == pytest.approx(its.softmax(-1)[index].item(), rel=1e-4)
            kept.add(int((sampler.filtered(its, text[:position], ids) > -1e30).sum()))
    assert max(kept) < 150, "the filters take something away"


def test_a_rows_choice_does_not_depend_on_its_company():
    params = SamplingParams(temperature=1.5, top_k=30, top_p=0.8, seed=3)
    weight, x = Weight(0.2 * make(150, 32, seed=1)), make(16, 32, seed=2)
    together = choose(weight, x, params, 16)[0]
    assert choose(weight, x, params, 1)[0] == together[:1]
    assert choose(weight, x, params, 5)[0] == together[:5]
    assert len(set(together)) > 5


def test_greedy_knows_no_filters():
    weight, x = Weight(0.5 * make(150, 32, seed=1)), make(16, 32, seed=2)
    greedy = choose(weight, x, SamplingParams(), 3)
    filtered = choose(weight, x, SamplingParams(top_k=4, top_p=0.2), 3)
    assert greedy[0] == filtered[0] == greedy[2].argmax(-1).tolist()
