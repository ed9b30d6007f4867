"""Captured stages, streams and mapped memory on a real GPU: what the fake driver and the interpreter cannot prove."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from support import write_model

from ppsd_rt.backend import Oracle, RunOptions
from ppsd_rt.engine import Engine
from ppsd_rt.sampling import SamplingParams
from ppsd_rt.trace import occupancy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

SCHEDULES = (
    "eesd", "eesd:stop_rule=fixed", "eesd:stop_rule=confidence=0.3", "eesd:length=12,stop_rule=survival",
    "ppsd", "elastic", "elastic:stop_rule=beta", "elastic:stop_rule=calibrated", "auto",
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=150, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=150, ignore_eos=True, temperature=0.9, top_k=40, top_p=0.95, seed=7)
PROMPT = list(range(40, 90))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}
    return write_model(tmp_path_factory.mktemp("models") / "medium", max_position_embeddings=2048, **shape)


@pytest.fixture(scope="module", params=["bfloat16", "int8"])
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
    costs = engine.backend.costs(again=True)
    assert 0 < costs.turns.row_step <= 1.5 * costs.turns.draft_step
    assert costs.turns.verify[15] < 3 * costs.turns.verify[0], "rows of a pass cost next to nothing"
    assert costs.overlapped is not None


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
