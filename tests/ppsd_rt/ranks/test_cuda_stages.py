"""CUDA stages over ranks, in Triton's interpreter: the tokens, and the rows, of one process."""

import threading

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from kernel_support import DEVICE
from rank_support import Pipeline, ids_of
from support import loud_head, write_model
from triton.runtime import interpreter

from ppsd_rt import Engine, PpsdError, SamplingParams, UsageError
from ppsd_rt.cuda.buffers import NEVER
from ppsd_rt.cuda.devices import DEVICE_WIDE
from ppsd_rt.cuda.graphs import Recorder
from ppsd_rt.cuda.parts import How, Text, VerifyPart
from ppsd_rt.cuda.weights import DeviceWeights
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.ranks.slices import slices_for

SHAPE = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": False,
}  # fmt: skip
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8]  # more than a launch has rows


@pytest.fixture(autouse=True)
def one_kernel_at_a_time(monkeypatch):
    """Ranks are threads here, and the interpreter is not made for that."""
    lock, launch = threading.Lock(), interpreter.GridExecutor.__call__

    def alone(executor, *arguments, **options):
        with lock:
            return launch(executor, *arguments, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", alone)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("parts") / "model", **SHAPE)


@pytest.fixture(scope="module", params=[1, 0])
def exit_layer(request):
    return request.param


@pytest.fixture(scope="module")
def head(folder, exit_layer, tmp_path_factory):
    path = tmp_path_factory.mktemp("parts") / "head.safetensors"
    loud_head(Checkpoint(folder).hash, 2.0, exit_layer=exit_layer, **SHAPE).save(path, torch.float32)
    return path


@pytest.fixture(scope="module")
def engine(folder, head):
    return Engine.from_pretrained(folder, exit_head=head, backend="cuda", device=DEVICE, dtype="float32")


@pytest.fixture
def stages(folder, exit_layer, head):
    sizes = (exit_layer, 2 - exit_layer, 1)
    stages = Pipeline(folder, sizes, head=head, format="float32", backend="cuda", device=DEVICE)
    yield stages
    stages.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedules", "sampling"),
    [
        (("plain", "elastic"), {}),
        (("ppsd",), {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.4, "seed": 6}),
    ],
    ids=["greedy", "sampled, penalised"],
)
def test_every_schedule_gives_the_tokens_of_one_process(engine, stages, schedules, sampling):
    params = SamplingParams(max_tokens=4, ignore_eos=True, **sampling)
    plain = engine.generate(PROMPT, params, "plain").run().ids
    for schedule in schedules:
        assert ids_of(stages.run(PROMPT, params, schedule)) == plain, schedule


@pytest.mark.slow
def test_drafts_are_those_of_one_process(engine, stages):
    """The exit head has seen the same rows, and received the same."""
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0, seed=3)
    schedule = "eesd:length=3,stop_rule=fixed"
    one = [event.round for event in engine.generate(PROMPT, params, schedule).events()]
    several = stages.run(PROMPT, params, schedule)
    judged = [[[draft.token for draft in round.judged] for round in rounds] for rounds in (one, several)]
    assert judged[0] == judged[1]
    assert len({token for round in judged[0] for token in round}) > 3


@pytest.mark.slow
def test_a_later_answer_keeps_the_rows_of_prompts(engine, stages):
    """And only those: what decoding made has gone through other kernels."""
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    first = ids_of(stages.run(PROMPT, params, "plain"))
    more = [*PROMPT, *first, 7, 8]
    again = stages.run(more, params, "elastic")
    assert again[0].rows == len(more) - len(PROMPT) + 1
    assert ids_of(again) == engine.generate(more, params, "plain").run().ids


def part_of(folder, layers=(1, 3), how=How()):
    chooses = layers[1] == SHAPE["num_hidden_layers"]
    weights = DeviceWeights.part(
        Checkpoint(folder), "float32", torch.device(DEVICE), layers, embeds=False, chooses=chooses
    )
    part = VerifyPart(weights, chooses, how)
    part.begin(0, 32, 5, SamplingParams())
    return part


def rows_of(count, seed=0):
    return np.random.default_rng(seed).standard_normal((count, SHAPE["hidden_size"])).astype(np.float32)


def test_a_part_holds_its_layers_only(folder):
    middle, last = part_of(folder, (1, 2)).weights, part_of(folder).weights
    assert (len(middle.layers), len(last.layers)) == (1, 2)
    assert (len(middle.embedding), middle.lm_head.outputs, middle.norm.numel()) == (0, 0, 0)
    assert (len(last.embedding), last.lm_head.outputs) == (0, last.config.vocab_size)


def test_a_row_s_bits_do_not_depend_on_its_pass(folder):
    """Nor on whether its buffers have grown since the rows before it came."""
    hidden, ids = rows_of(9), list(range(9))
    at_once = part_of(folder).run(0, ids, hidden, None)
    part = part_of(folder)
    some = part.run(0, ids[:4], hidden[:4], None)  # a prompt's rows but the last
    one = part.run(4, ids[4:5], hidden[4:5], None)
    part._reserve(part._capacity + 1)
    more = part.run(5, ids[5:], hidden[5:], None)
    assert np.array_equal(np.concatenate([some, one, more]), at_once)


def test_a_pass_that_is_void_leaves_the_rows_before_it(folder):
    part, hidden = part_of(folder), rows_of(9)
    part.run(0, [0] * 6, hidden[:6], None)
    assert part.run(6, [0] * 3, hidden[6:], lambda: True) is None
    assert part._length == 6
    fresh = part_of(folder)
    fresh.run(0, [0] * 6, hidden[:6], None)
    assert np.array_equal(part.run(6, [0] * 3, hidden[6:], None), fresh.run(6, [0] * 3, hidden[6:], None))
    assert part.choose(3) == fresh.choose(3)


def test_where_tokens_stand_first():
    """After every change, on the device, what the text says."""
    generator = np.random.default_rng(1)
    text, ids, places = Text(), [], torch.zeros(8, dtype=torch.int32, device=DEVICE)
    for keep in (0, 3, 2):
        del ids[keep:]
        text.begin(keep, places)
        for _ in range(20):
            start = int(generator.integers(len(ids) + 1))
            ids[start:] = generator.integers(0, 8, generator.integers(1, 4)).tolist()
            text.go_on(start, ids[start:])
            assert places.tolist() == [ids.index(token) if token in ids else NEVER for token in range(8)]


class NoRecorder(Recorder):
    def warm_up(self, steps):
        raise RuntimeError("no room for a graph\nand more that nobody reads")


def test_a_part_that_cannot_be_captured_runs_kernel_by_kernel(folder, caplog):
    hidden = rows_of(3)
    part = part_of(folder, how=How(recorder=NoRecorder))
    assert np.array_equal(part.run(0, [0] * 3, hidden, None), part_of(folder).run(0, [0] * 3, hidden, None))
    assert caplog.messages == [
        "ppsd-rt: a rank's layers cannot be captured (no room for a graph); they run kernel by kernel"
    ]


def test_nothing_else_waits_for_the_device_while_a_part_is_captured(folder):
    """Another thread that captured, or waited for the whole device, would break this one's capture."""
    free = []

    class Watched(NoRecorder):
        def warm_up(self, steps):
            other = threading.Thread(target=lambda: free.append(DEVICE_WIDE.acquire(blocking=False)))
            other.start()
            other.join()
            super().warm_up(steps)

    part_of(folder, how=How(recorder=Watched)).run(0, [0] * 3, rows_of(3), None)
    assert free == [False]
    with DEVICE_WIDE:
        pass  # it is given back when capturing fails


def test_a_rank_says_how_its_part_is_launched(folder, caplog):
    slices = slices_for("cuda", DEVICE, ("float32", "auto"), 1, [], 1)
    slices._how = How(recorder=NoRecorder)
    assert slices.facts()["launches"] == "captured", "so far nothing is known against it"
    slices.station(Checkpoint(folder), 1, 2, 0.0).time_pass(1, 1)
    assert "cannot be captured" in caplog.text
    assert slices.facts()["launches"] == "one by one"


def test_what_fails_on_the_device_is_one_line(folder, monkeypatch):
    part = part_of(folder)

    def fail(number):
        raise RuntimeError("an illegal memory access\nand how to compile with debugging")

    monkeypatch.setattr(part, "_launch", fail)
    with pytest.raises(PpsdError, match=r"failed: an illegal memory access$"):
        part.run(0, [0] * 5, rows_of(5), None)


def test_what_ranks_refuse(folder):
    with pytest.raises(UsageError, match="dtype 'float16' is unknown to the cuda backend"):
        slices_for("cuda", DEVICE, ("float16", "auto"), 1, [], 0)
    slices = slices_for("cuda", DEVICE, ("auto", "auto"), 1, [], 1)
    assert slices.dtype == ("bfloat16" if DEVICE == "cuda" else "float32")
    assert slices.facts()["launches"] == ("captured" if DEVICE == "cuda" else "one by one")


@pytest.mark.slow
def test_timing_a_stage_leaves_it_fit_for_an_answer(engine, stages):
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    assert stages.drafter.time_step(True, 20) > 0
    assert stages.stations[-1].time_pass(2, 20) > 0
    stages.loop.forget_rows()
    assert ids_of(stages.run(PROMPT, params, "plain")) == engine.generate(PROMPT, params, "plain").run().ids
