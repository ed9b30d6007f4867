"""Captured stages, streams and mapped memory on a real GPU: what the fake driver and the interpreter cannot prove."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from support import check_eight, loud_head, write_model

from ppsd_rt.backend import Oracle, RunOptions
from ppsd_rt.engine import Engine
from ppsd_rt.errors import PpsdError
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.sampling.params import SamplingParams
from ppsd_rt.trace import occupancy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

SCHEDULES = (
    "eesd", "eesd:stop_rule=fixed", "eesd:stop_rule=confidence=0.3", "eesd:length=12,stop_rule=survival",
    "eesd:length=7,stop_rule=survival=0.01",
    "ppsd", "elastic", "elastic:stop_rule=beta", "elastic:stop_rule=calibrated", "auto",
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=150, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=150, ignore_eos=True, temperature=0.9, seed=7)  # filters go by the loop
PROMPT = list(range(40, 90))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}
    folder = write_model(tmp_path_factory.mktemp("models") / "medium", max_position_embeddings=2048, **shape)
    loud_head(Checkpoint(folder).hash, exit_layer=2, max_position_embeddings=2048, **shape).save(
        folder / "feedback.safetensors"
    )
    return folder


@pytest.fixture(scope="module", params=["bfloat16", "int8", "int4"])
def engine(request, folder):
    engine = Engine.from_pretrained(folder, exit_head="norm:2", backend="cuda", dtype=request.param)
    engine.generate(PROMPT, GREEDY, "plain").run()
    assert engine.backend.facts()["launches"] == "captured"
    return engine


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_gives_the_plain_answer(engine, schedule, params):
    plain = engine.generate(PROMPT, params, "plain").run()
    for _ in range(3):  # streams race differently every time
        assert engine.generate(PROMPT, params, schedule).run().ids == plain.ids


@pytest.mark.parametrize("schedule", ["plain", "eesd:stop_rule=fixed,length=3", "auto"])
def test_each_of_eight_is_what_it_is_alone(engine, schedule):
    pytest.importorskip("llguidance")
    check_eight(engine, schedule)


@pytest.mark.parametrize("acceptance", [0.0, 0.8, 1.0])
def test_oracles_at_every_acceptance(engine, acceptance):
    plain = engine.generate(PROMPT, GREEDY, "plain").run()
    options = RunOptions(oracle=Oracle((*plain.prompt_ids, *plain.ids), acceptance), report_drafts=True)
    for schedule in ("eesd:length=6,stop_rule=fixed", "ppsd", "elastic"):
        completion = engine.generate(PROMPT, GREEDY, schedule, options).run()
        assert completion.ids == plain.ids
        assert completion.statistics.acceptance == pytest.approx(acceptance, abs=0.15)


def test_stages_of_verification_run_ahead_of_each_other(folder):
    engine = Engine.from_pretrained(folder, exit_head="norm:2", backend="cuda", stages=3)
    plain = engine.generate(PROMPT, GREEDY, "plain").run()
    for schedule in ("ppsd", "elastic", "eesd"):
        assert engine.generate(PROMPT, GREEDY, schedule).run().ids == plain.ids


def test_eager_launches_and_one_stream_give_the_same_bits(folder, engine, monkeypatch):
    ids = engine.generate(PROMPT, GREEDY, "plain").run().ids
    for switch in ("PPSD_CUDA_EAGER", "PPSD_CUDA_SERIAL", "PPSD_NO_PDL"):
        with monkeypatch.context() as patch:
            patch.setenv(switch, "1")
            other = Engine.from_pretrained(folder, exit_head="norm:2", backend="cuda", dtype=engine.backend.dtype)
            assert other.generate(PROMPT, GREEDY, "elastic").run().ids == ids, switch


def test_times_from_the_gpu(engine):
    completion = engine.generate(PROMPT, GREEDY, "elastic", RunOptions(trace=True)).run()
    spans = engine.backend.spans()
    assert {span[1] for span in spans} == {0, 1}
    verified = [rows for name, _, rows, *_ in spans if name == "verify"]
    assert sum(verified) >= completion.statistics.rows
    told = occupancy(spans)
    assert told.worked > 0
    assert told.idle < told.wall


def test_longer_answers_make_room(engine):
    params = SamplingParams(max_tokens=1500, ignore_eos=True)
    ids = engine.generate(PROMPT, params, "elastic").run().ids
    assert len(ids) == 1500
    assert ids == engine.generate(PROMPT, params, "plain").run().ids


def test_an_answer_that_is_left_half_way(engine):
    plain = engine.generate(PROMPT, GREEDY, "plain").run().ids
    for schedule in ("elastic", "eesd"):
        generation = engine.generate(PROMPT, GREEDY, schedule)
        for _ in zip(generation, range(20), strict=False):
            pass
        generation.close()
        assert engine.generate(PROMPT, GREEDY, schedule).run().ids == plain


# As many devices as there are; one that is named twice has two stages, and its own path: no copies.
DEVICES = ["cuda:0,cuda:0", "cuda:0,cuda:1", "cuda:0,cuda:1,cuda:0", "cuda:0,cuda:1,cuda:2"]


def skip_without(devices):
    needed = 1 + max(int(name[5:]) for name in devices.split(","))
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} CUDA GPUs")


@pytest.mark.parametrize("exit_head", ["norm:2", "feedback"])
@pytest.mark.parametrize("devices", DEVICES)
def test_several_devices_give_the_bits_of_one(folder, engine, devices, exit_head):
    """The same random drafts in every schedule; a feedback head receives across devices."""
    skip_without(devices)
    if exit_head == "feedback":
        exit_head = folder / "feedback.safetensors"
    dtype = engine.backend.dtype
    for sizes in {2: [(2, 4), (5, 1)], 3: [(2, 2, 2), (3, 1, 2)]}[devices.count(",") + 1]:
        parted = Engine.from_pretrained(
            folder, exit_head=exit_head, backend="cuda", device=devices, stages=sizes, dtype=dtype
        )
        for params in (GREEDY, SAMPLED):
            plain = engine.generate(PROMPT, params, "plain").run().ids
            for schedule in ("plain", "eesd", "ppsd", "elastic", "auto"):
                assert parted.generate(PROMPT, params, schedule).run().ids == plain, (sizes, schedule)
        assert parted.backend.facts()["launches"] == "captured"


@pytest.mark.parametrize("devices", DEVICES)
def test_the_split_is_measured_where_none_is_given(folder, engine, devices):
    skip_without(devices)
    parted = Engine.from_pretrained(
        folder, exit_head="norm:2", backend="cuda", device=devices, dtype=engine.backend.dtype
    )
    assert all(seconds > 0 for seconds in parted.backend.facts()["measured_layer_us"])
    plain = engine.generate(PROMPT, GREEDY, "plain").run().ids
    assert parted.generate(PROMPT, GREEDY, "elastic").run().ids == plain
    assert parted.generate([*PROMPT, 7] * 5, GREEDY, "ppsd").run().ids == (
        engine.generate([*PROMPT, 7] * 5, GREEDY, "plain").run().ids
    )


def test_a_device_that_is_not_there_is_named(folder):
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(PpsdError, match=rf"there is no GPU {torch.cuda.device_count()}"):
        Engine.from_pretrained(folder, backend="cuda", device=f"cuda:0,{missing}")
