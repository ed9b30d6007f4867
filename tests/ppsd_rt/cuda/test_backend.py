"""The cuda backend through the engine, in Triton's interpreter: every schedule gives the answer of eager torch.
Captured stages: test_captured.py; a GPU: test_on_gpu.py."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if torch.cuda.is_available():
    pytest.skip("the interpreter's rounding; a GPU's answers are those of test_on_gpu.py", allow_module_level=True)

import kernel_support  # noqa: F401  (mends the interpreter)
import numpy as np
from support import check_eight, loud_head, slow, tiny_model, write_model

from ppsd_rt.backend import Oracle, RunOptions
from ppsd_rt.engine import Engine
from ppsd_rt.errors import PpsdError, UsageError
from ppsd_rt.find_head import find_head
from ppsd_rt.generation import Committed
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.head_file import HeadFile
from ppsd_rt.pipeline.rounds import Drafted
from ppsd_rt.pipeline.schedule import parse_schedule
from ppsd_rt.sampling.params import SamplingParams

SMALL = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
SAMPLED = SamplingParams(max_tokens=6, temperature=0.8, seed=4, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
PROMPT = [72, 101, 108, 108, 111]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "small", **SMALL)


def engine_of(folder, **options):
    return Engine.from_pretrained(folder, exit_head="norm:1", backend="cuda", device="cpu", **options)


@pytest.fixture(scope="module")
def engine(folder):
    return engine_of(folder)


@pytest.mark.slow
def test_a_head_that_hears_a_layer_drafts_without_it(folder, tmp_path, caplog):
    caplog.set_level("INFO", "ppsd_rt")
    path = tmp_path / "head.safetensors"
    loud_head(Checkpoint(folder).hash, exit_layer=1, tap=2, **SMALL).save(path, torch.float32)
    told = []
    for tap in (2, 0):
        head = HeadFile.load(path, Checkpoint(folder))
        engine = engine_of(folder)
        if tap == 0:
            own = {name: tensor for name, tensor in head.tensors.items() if not name.startswith("tap.")}
            head = replace(head, tensors=own, info=replace(head.info, tap=0))
        engine.backend.use_head(head)
        events = engine.generate(
            PROMPT, GREEDY, "eesd:length=3,stop_rule=fixed", RunOptions(report_drafts=True)
        ).events()
        told.append([(event.position, event.token) for event in events if isinstance(event, Drafted)])
        assert (f"drafts without what this exit head hears of layer {tap}" in caplog.text) == (tap == 2)
        caplog.clear()
    assert told[0] == told[1]


@pytest.fixture(scope="module")
def plain(folder):
    reference = Engine.from_pretrained(folder, exit_head="norm:1", backend="torch", device="cpu", dtype="float32")
    return {params: reference.generate(PROMPT, params, "plain").run().ids for params in (SAMPLED, GREEDY)}


@pytest.mark.parametrize(
    "schedule",
    [
        slow("plain"),
        "eesd:length=3,stop_rule=fixed",
        slow("eesd:stop_rule=survival"),
        "elastic",
        slow("auto"),
    ],
)
def test_every_schedule_gives_the_plain_answer(engine, plain, schedule):
    params = SAMPLED if schedule in ("plain", "elastic") else GREEDY
    completion = engine.generate(PROMPT, params, schedule).run()
    assert completion.ids == plain[params]
    statistics = completion.statistics
    assert statistics.tokens == 6 and statistics.backend == "cuda"
    if schedule not in ("plain", "auto"):
        assert statistics.judged > 0
    if schedule == "auto":
        assert "a plain token" in engine.backend.explain()


@pytest.mark.parametrize("schedule", ["lookup:lookup=1", slow("elastic:lookup=1")])
def test_copies_are_accepted_where_the_text_repeats_itself(engine, schedule):
    """What the model says of this prompt it says again and again, sooner or later; and so it is plain decoding's."""
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    prompt = [7] * 12
    plain = engine.generate(prompt, params, "plain").run()
    completion = engine.generate(prompt, params, schedule).run()
    assert completion.ids == plain.ids
    statistics = completion.statistics
    assert 0 < statistics.copied_accepted <= statistics.copied_judged
    assert statistics.rounds < plain.statistics.rounds


def test_an_oracles_drafts_and_reports_of_them(engine, plain):
    truth = (*PROMPT, *plain[GREEDY])
    options = RunOptions(report_drafts=True, oracle=Oracle(truth, 1.0))
    generation = engine.generate(PROMPT, GREEDY, parse_schedule("eesd:length=3,stop_rule=fixed"), options)
    events = list(generation.events())
    drafted = {event.position: event.token for event in events if isinstance(event, Drafted)}
    assert drafted
    assert all(truth[position] == token for position, token in drafted.items() if position < len(truth))
    rounds = [event.round for event in events if isinstance(event, Committed)]
    assert generation.completion.ids == plain[GREEDY]
    assert [r.accepted for r in rounds] == [len(r.judged) for r in rounds], "an oracle that is always right"
    assert generation.statistics.rounds == 2, "five tokens in chunks of three drafts and a bonus"


def test_stop_ids_end_the_answer(engine, plain):
    stop = plain[GREEDY][1]
    place = plain[GREEDY].index(stop)
    params = SamplingParams(max_tokens=6, ignore_eos=True, stop_token_ids=(stop,))
    completion = engine.generate(PROMPT, params, "elastic").run()
    assert completion.ids == plain[GREEDY][: place + 1]
    assert completion.finish_reason == "stop"


@pytest.mark.slow
def test_each_of_eight_is_what_it_is_alone(engine):
    pytest.importorskip("llguidance")
    check_eight(engine, "eesd:stop_rule=fixed,length=2", tokens=6)


def test_what_needs_the_engine_ends_an_answer(engine):
    first = engine.generate(PROMPT, GREEDY, "plain")
    tokens = iter(first)
    next(tokens)
    engine.backend.use_head(find_head("norm:1", engine.checkpoint))
    with pytest.raises(PpsdError, match="this generation was ended"):
        list(tokens)


def test_logits_are_plain_decodings(folder, engine):
    reference = Engine.from_pretrained(folder, exit_head="none", backend="torch", device="cpu", dtype="float32")
    ours, theirs = (e.backend.logits(PROMPT, 3) for e in (engine, reference))
    assert ours.shape == theirs.shape == (3, reference.config.vocab_size)
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()


NO_NUMBER = "^the model's output is not a number"


@pytest.mark.parametrize("params", [GREEDY, slow(SamplingParams(max_tokens=6, temperature=1.0, top_k=5, seed=1))])
def test_logits_that_are_no_numbers_end_the_answer(tmp_path, params):
    """That of one id is infinite, of either sign."""
    model = tiny_model(tie_word_embeddings=False, **SMALL)
    model.lm_head.weight.data[7] = 3e38
    broken = engine_of(write_model(tmp_path / "model", model, tie_word_embeddings=False, **SMALL))
    for prompt in ([1, 2, 3], [9, 8]):
        with pytest.raises(PpsdError, match=NO_NUMBER):
            broken.generate(prompt, params, "eesd:length=2,stop_rule=fixed").run()


def test_and_where_they_come_in_the_middle_of_an_answer(tmp_path, plain):
    """Also where passes are under way. The answers after it are as ever."""
    second, schedule = plain[GREEDY][1], "elastic"
    broken = engine_of(write_model(tmp_path / "model", **SMALL))
    embedding = broken.backend._weights.embedding
    kept = embedding[second].clone()
    embedding[second] = torch.nan
    answer, ids = broken.generate(PROMPT, GREEDY, schedule), []
    with pytest.raises(PpsdError, match=NO_NUMBER):
        ids.extend(token.id for token in answer)
    assert ids in (list(plain[GREEDY][:2]), list(plain[GREEDY][:1]), [])
    embedding[second] = kept
    assert broken.generate(PROMPT, replace(GREEDY, max_tokens=3), schedule).run().ids == plain[GREEDY][:3]


def test_what_it_says_of_itself(engine):
    backend = engine.backend
    assert (backend.name, backend.dtype, backend.threads) == ("cuda", "float32", 1)
    assert backend.bytes_per_token(100) - backend.bytes_per_token(0) == 100 * 4 * engine.config.kv_values
    facts = backend.facts()
    assert facts["launches"] == "one by one"


def test_refusals(folder, engine):
    with pytest.raises(UsageError, match="dtype 'float16' is unknown to the cuda backend"):
        Engine.from_pretrained(folder, backend="cuda", device="cpu", dtype="float16")
    with pytest.raises(UsageError, match="4 verification stages are more than"):
        engine_of(folder, stages=4)
    with pytest.raises(PpsdError, match="no exit head"):
        Engine.from_pretrained(folder, exit_head="none", backend="cuda", device="cpu").generate(PROMPT, GREEDY, "eesd")
