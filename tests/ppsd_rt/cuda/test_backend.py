"""The cuda backend through the engine: every schedule gives plain decoding's answer.

In Triton's interpreter that is what eager torch says too; on a GPU, where bfloat16 rounds otherwise, its own.
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import numpy as np
from kernel_support import unpaged  # and how the interpreter adds up
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
from ppsd_rt.triton_kernels.state import START

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", "bfloat16") if ON_GPU else ("cpu", "float32")
SMALL = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
SAMPLED = SamplingParams(max_tokens=6, temperature=0.8, seed=4, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
LONG = SamplingParams(max_tokens=20, ignore_eos=True)
SHORTER = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPT = [72, 101, 108, 108, 111]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "small", **SMALL)


def engine_of(folder, **options):
    return Engine.from_pretrained(folder, exit_head="norm:1", backend="cuda", device=DEVICE, dtype=DTYPE, **options)


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
def plain(folder, engine):
    if ON_GPU:
        return {params: engine.generate(PROMPT, params, "plain").run().ids for params in (SAMPLED, GREEDY)}
    reference = Engine.from_pretrained(folder, exit_head="norm:1", backend="torch", device="cpu", dtype="float32")
    return {params: reference.generate(PROMPT, params, "plain").run().ids for params in (SAMPLED, GREEDY)}


@pytest.mark.parametrize(
    "schedule",
    [
        slow("plain"),
        "eesd:length=3,stop_rule=fixed",
        slow("eesd:stop_rule=beta"),
        slow("eesd:stop_rule=survival"),
        slow("ppsd"),
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


@pytest.mark.slow
def test_verification_in_two_stages(folder, plain):
    """Draft steps come between the stages of a pass."""
    engine = engine_of(folder, stages=2)
    completion = engine.generate(PROMPT, GREEDY, "elastic:first_chunk=1").run()
    assert completion.ids == plain[GREEDY]


@pytest.mark.parametrize(
    "schedule",
    ["lookup:lookup=1", slow("eesd:length=3,lookup=1"), slow("elastic:lookup=1")],
)
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


def verified_rows(engine):
    """What they have left behind: keys and values of all layers, exit hidden states."""
    buffers = engine.backend._alone.stages.buffers
    end = int(buffers.state[START])
    caches = (part[:, :end].clone() for cache in buffers.cache for part in unpaged(cache))
    return [*caches, buffers.exit_hidden[:end].clone()]


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


@pytest.mark.parametrize("schedule", ["eesd:length=2,stop_rule=fixed", slow("elastic"), slow("plain")])
def test_an_answer_begins_alone_and_goes_on_in_company(engine, plain, schedule, monkeypatch):
    """Its captured stages end at a committed token; prompt's and decoded rows are run again as what they were."""
    penalised, few = replace(GREEDY, max_tokens=2, repetition_penalty=1.3, logprobs=1), replace(GREEDY, max_tokens=2)
    expected = engine.generate(PROMPT[1:], penalised, "plain").run()
    first = engine.generate(PROMPT, SAMPLED, schedule)
    tokens = iter(first)
    said = [next(tokens).id, next(tokens).id]
    assert engine.backend._answer is not None
    asked, decode = [], engine.backend._answers.decode
    monkeypatch.setattr(engine.backend._answers, "decode", lambda *which: (asked.append(which[0]), decode(*which))[1])
    others = [engine.generate(PROMPT, few, schedule), engine.generate(PROMPT[1:], penalised, schedule)]
    begun = [next(iter(other)).id for other in others]
    assert engine.backend._answer is None and len(engine.backend._beside) == 2
    assert (*said, *(token.id for token in tokens)) == first.completion.ids == plain[SAMPLED]
    assert [other.run().ids for other in others] == [plain[GREEDY][:2], expected.ids]
    assert begun == [plain[GREEDY][0], expected.ids[0]]
    assert [each.top[0][0] for each in others[1].completion.logprobs] == [e.top[0][0] for e in expected.logprobs]
    assert not engine.backend._beside
    ((text, own),) = [(text, limits.own) for text, _, _, limits, *_ in asked if len(text) > len(PROMPT)]
    assert own == len(text) - len(PROMPT) >= 2, "rows of its own tokens are no prompt's"


@pytest.mark.slow
def test_each_of_eight_is_what_it_is_alone(engine):
    pytest.importorskip("llguidance")
    check_eight(engine, "eesd:stop_rule=fixed,length=2", tokens=6)


def test_what_needs_the_engine_ends_an_answer_that_is_alone(engine):
    first = engine.generate(PROMPT, GREEDY, "plain")
    tokens = iter(first)
    next(tokens)
    engine.backend.use_head(find_head("norm:1", engine.checkpoint))
    with pytest.raises(PpsdError, match="this generation was ended"):
        list(tokens)


@pytest.mark.skipif(ON_GPU, reason="rounds otherwise")
def test_logits_are_plain_decodings(folder, engine):
    reference = Engine.from_pretrained(folder, exit_head="none", backend="torch", device="cpu", dtype="float32")
    ours, theirs = (e.backend.logits(PROMPT, 3) for e in (engine, reference))
    assert ours.shape == theirs.shape == (3, reference.config.vocab_size)
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()


NO_NUMBER = "^the model's output is not a number"


@pytest.mark.parametrize("overflows", ["all", slow("one")])
@pytest.mark.parametrize(
    "params",
    [GREEDY, slow(SAMPLED), SamplingParams(max_tokens=6, temperature=1.0, top_k=5, top_p=0.9, seed=1)],
    ids=["greedy", "sampled", "filters"],
)
def test_logits_that_are_no_numbers_end_the_answer(tmp_path, overflows, params):
    """All of them are NaN, or that of one id is infinite, of either sign."""
    model = tiny_model(tie_word_embeddings=False, **SMALL)
    if overflows == "all":
        model.model.layers[2].mlp.down_proj.weight.data.fill_(3e38)
    else:
        model.lm_head.weight.data[7] = 3e38
    broken = engine_of(write_model(tmp_path / "model", model, tie_word_embeddings=False, **SMALL))
    for prompt in ([1, 2, 3], [9, 8]):
        with pytest.raises(PpsdError, match=NO_NUMBER):
            broken.generate(prompt, params, "eesd:length=2,stop_rule=fixed").run()


@pytest.mark.parametrize("schedule", [slow("plain"), slow("eesd:length=3,stop_rule=fixed"), "elastic"])
def test_and_where_they_come_in_the_middle_of_an_answer(tmp_path, plain, schedule):
    """Also where passes are under way. The answers after it are as ever."""
    second = plain[GREEDY][1]
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
    assert (backend.name, backend.dtype, backend.threads) == ("cuda", DTYPE, 1)
    row = engine.config.kv_values * (2 if ON_GPU else 4)
    assert backend.bytes_per_token(100) - backend.bytes_per_token(0) == 100 * row
    facts = backend.facts()
    assert facts["launches"] == ("captured" if ON_GPU else "one by one")


def test_refusals(folder, engine):
    with pytest.raises(UsageError, match="dtype 'float16' is unknown to the cuda backend"):
        Engine.from_pretrained(folder, backend="cuda", device=DEVICE, dtype="float16")
    with pytest.raises(UsageError, match="4 verification stages are more than"):
        engine_of(folder, stages=4)
    with pytest.raises(PpsdError, match="no exit head"):
        Engine.from_pretrained(folder, exit_head="none", backend="cuda", device=DEVICE).generate(PROMPT, GREEDY, "eesd")
