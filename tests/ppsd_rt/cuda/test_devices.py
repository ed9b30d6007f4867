"""Stages on several devices: the CPU's memory, parted; kernels that touch another device's part are noticed."""

import random

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if torch.cuda.is_available():
    pytest.skip("the interpreter's devices; real ones are those of test_on_gpu.py", allow_module_level=True)

from device_guard import CPUS, DeviceGuard
from stage_support import PROMPT, VOCAB, model_of, plain_of, records_of, text_of, told, weights_of

from ppsd_rt.backend import Oracle
from ppsd_rt.cuda.stages import DeviceStages
from ppsd_rt.sampling import SamplingParams
from ppsd_rt.triton_kernels.state import RECORD_ACCEPTED, RECORD_JUDGED, START

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.9, seed=2**33 + 7)
PENALISED = SamplingParams(temperature=1.2, repetition_penalty=1.5, seed=5)
DRAFTABLE = [i for i in range(VOCAB) if i % 5]


@pytest.fixture
def guard():
    guard = DeviceGuard()
    uninstall = guard.install()
    yield guard
    uninstall()


def places_of(*numbers):
    return [CPUS[number] for number in numbers]


@pytest.mark.parametrize(
    ("layers", "kind", "draft_ids", "cuts", "params"),
    [
        ((0, 1, 1), "norm", None, (), GREEDY),  # one drafts, the other verifies
        ((0, 0, 1), "feedback", None, (2,), SAMPLED),
        ((0, 1, 2), "layer", DRAFTABLE, (2,), PENALISED),
        ((0, 0, 1, 1), "two-layer", None, (2, 3), GREEDY),  # two stages on the second
        ((0, 1, 0), "two-layer-feedback", None, (2,), PENALISED),
    ],
    ids=["apart", "shared", "three", "two-on-one", "back"],
)
def test_any_order_of_launches_commits_the_references_text(guard, layers, kind, draft_ids, cuts, params):
    model = model_of(num_hidden_layers=len(layers))
    end = len(PROMPT) + 10
    truth = plain_of(model, PROMPT, params, end)
    stages = DeviceStages(weights_of(model, kind, 1, draft_ids, places=places_of(*layers)), 64, cuts)
    assert set(stages.devices) == set(places_of(*layers))
    stages.begin(PROMPT, params, end=end, oracle=Oracle(tuple(truth), 0.65, seed=38))
    dice, launches = random.Random(kind), 0
    stages.plain_step()
    while stages.state[START].item() < end - 1:
        stages.control(most=dice.choice((1, 3, 15)), lookahead=dice.choice((2, 15)))
        for _ in range(dice.choice((2, 3, 4))):
            stages.draft_step()
        window = (stages.state[START].item(), 16)
        for leg in range(len(stages.legs)):
            if leg:
                stages.draft_step()  # while the pass is between two devices
            stages.verification(leg, window)
        launches += 1
        assert launches < 30
    assert text_of(stages) == truth
    records = records_of(stages, 1)
    assert told(records, PROMPT) == truth
    judged, accepted = (sum(record[i] for record in records) for i in (RECORD_JUDGED, RECORD_ACCEPTED))
    assert 0 < accepted < judged, "accepted and rejected draft tokens"
    assert set(guard.launches) == set(stages.devices)
