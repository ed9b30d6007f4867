"""Stages on several devices: the CPU's memory, parted; kernels that touch another device's part are noticed."""

import gc
import weakref

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if torch.cuda.is_available():
    pytest.skip("the interpreter's devices; real ones are those of test_on_gpu.py", allow_module_level=True)

from device_guard import CPUS, DeviceGuard
from stage_support import PROMPT, VOCAB, decoded_in_any_order, model_of, records_of, text_of, weights_of
from support import slow

import ppsd_rt.cuda.prompt
from ppsd_rt.cuda.graphs import CaptureFailed, Graphs
from ppsd_rt.cuda.stages import DeviceStages
from ppsd_rt.sampling.params import SamplingParams
from ppsd_rt.triton_kernels.state import (
    EPOCH,
    RECORD_COMMITTED,
    ROWS,
)

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.9, seed=2**33 + 7)
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
        slow((0, 0, 1), "feedback", None, (2,), SAMPLED),
        ((0, 1, 2), "layer", DRAFTABLE, (2,), SAMPLED),
        slow((0, 1, 1), "norm", None, (2,), SAMPLED),  # two stages on the second
        slow((0, 1, 0), "adapter", None, (2,), GREEDY),
    ],
    ids=["apart", "shared", "three", "two-on-one", "back"],
)
def test_any_order_of_launches_commits_the_references_text(guard, layers, kind, draft_ids, cuts, params):
    model = model_of(num_hidden_layers=len(layers))
    stages = DeviceStages(weights_of(model, kind, 1, draft_ids, places=places_of(*layers)), 64, cuts)
    assert set(stages.devices) == set(places_of(*layers))
    decoded_in_any_order(stages, model, params, 8)
    assert set(guard.launches) == set(stages.devices)


@pytest.mark.slow
def test_a_feedback_head_hears_of_rows_that_another_device_verified(guard, monkeypatch):
    """Its drafts are those of one device, and others if what it receives is not copied."""
    model, copies = model_of(), DeviceStages.copies

    def text(places):
        stages = DeviceStages(weights_of(model, "feedback", places=places), 64)
        stages.begin(PROMPT[:6], GREEDY, most=15, lookahead=15)
        stages.plain_step()
        for _ in range(2):
            stages.draft_step()
            stages.draft_step()
            stages.early_step()
            stages.verification()
        stages.draft_step()
        stages.draft_step()
        return stages.buffers.text.tolist()

    assert text(places_of(0, 1, 1)) == text(())
    monkeypatch.setattr(DeviceStages, "copies", lambda stages, leg: [
        copy for copy in copies(stages, leg) if copy.to is not stages.buffers.last_hidden
    ])  # fmt: skip
    assert text(places_of(0, 1, 1)) != text(())


def test_a_pass_of_an_older_epoch_is_dropped_between_devices(guard):
    stages = DeviceStages(weights_of(model_of(), "norm", places=places_of(0, 1, 2)), 64, (2,))
    stages.begin(PROMPT, GREEDY, most=15, lookahead=15)
    stages.early_step()
    take, first, second, end = range(4)
    for leg in (take, first):
        stages.verification(leg)
    assert stages._sites[CPUS[1]].late[0][ROWS] == 1
    stages.buffers.state[EPOCH] += 1
    stages.verification(second)
    assert stages._sites[CPUS[2]].late[1][ROWS] == 0
    stages.verification(end)
    assert records_of(stages, 1)[0][RECORD_COMMITTED] == 0


def test_a_prompt_and_logits_pass_through_all_devices(guard, monkeypatch):
    """In pieces, and again with the rows of an earlier answer."""
    monkeypatch.setattr(ppsd_rt.cuda.prompt, "ROWS", 4)
    model = model_of(num_hidden_layers=3, tie_word_embeddings=False)
    alone = DeviceStages(weights_of(model, "norm"), 64)
    parted = DeviceStages(weights_of(model, "norm", places=places_of(0, 1, 2)), 64, (2,))
    for prompt, keep in ((PROMPT[:7], 0), (PROMPT[:5] + [7, 7], 5)):
        for stages in (alone, parted):
            stages.begin(prompt, SAMPLED, keep, end=len(prompt) + 2)
            stages.plain_step()
        assert text_of(parted) == text_of(alone)
    assert torch.equal(parted.logits(PROMPT[:7], 3), alone.logits(PROMPT[:7], 3))


def test_weights_move_from_device_to_device():
    """As when another exit head changes the best split; in every format, and what stays is not copied."""
    for format in ("float32", "int8", "int4", "fp8"):
        model = model_of(num_hidden_layers=3)
        whole = weights_of(model, "norm", format=format)
        parted = weights_of(model, format=format, places=places_of(0, 0, 1)).placed(places_of(0, 1, 1))
        again = parted.placed(places_of(0, 1, 2))
        assert again.layers[1] is parted.layers[1]
        assert parted.placed(parted.places) is parted
        for ours, theirs in zip(again.layers, whole.layers, strict=True):
            assert torch.equal(ours.qkv.values, theirs.qkv.values)
            assert torch.equal(ours.norm, theirs.norm)
        assert torch.equal(again.lm_head.values, whole.lm_head.values)
        assert (again.bytes, again.device) == (whole.bytes, CPUS[0])


def test_a_stages_layers_are_on_one_device():
    with pytest.raises(AssertionError, match="on one device"):
        DeviceStages(weights_of(model_of(), "norm", places=places_of(0, 1, 2)), 64)


def test_memory_goes_with_the_stages():
    """At once, not when cycles are collected: the next ones need it."""
    for places in ((), places_of(0, 1, 2)):
        stages = DeviceStages(weights_of(model_of(), "norm", places=places), 64, (2,))
        gone = weakref.ref(stages)
        gc.disable()
        del stages
        assert gone() is None
        gc.enable()


def test_nothing_is_collected_while_graphs_are_captured():
    """An older engine's graphs and memory, which a thread that captures must not free."""
    found = []

    class Failing(Graphs):
        def __init__(self):
            pass

        def close(self):
            pass

        def warm_up(self, step, device):
            found.append(gc.isenabled())
            raise RuntimeError("no")

    graphs = Failing()
    graphs._devices = [None]

    for begun in (True, False):
        (gc.enable if begun else gc.disable)()
        try:
            with pytest.raises(CaptureFailed, match="no"):
                graphs.capture({("step", 0): (None, -1)})
            assert gc.isenabled() == begun
        finally:
            gc.enable()
    assert found == [False] * 2
