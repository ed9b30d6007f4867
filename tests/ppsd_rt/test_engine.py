"""The engine with a tiny model: prompts in, streams out, endings, and what is refused."""

import numpy as np
import pytest
import torch
from support import EOS, SPECIAL, VOCAB, slow, tiny_head, tiny_model, write_model

from ppsd_rt import Engine, PpsdError, SamplingParams, UsageError
from ppsd_rt.backend import RunOptions
from ppsd_rt.generation import Committed
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.pipeline.rounds import Drafted
from ppsd_rt.pipeline.schedule import parse_schedule

SCHEDULES = [
    "eesd",
    "ppsd",
    "elastic",
    "eesd:stop_rule=confidence=0.02",
    "eesd:stop_rule=calibrated",
    "elastic:stop_rule=beta",
    "eesd:lookup=1,stop_rule=survival=0.01",
    "elastic:lookup=2",
    "eesd:length=3,lookup=1",
]
UNREADABLE = [{"role": "user", "content": "h\udce5"}]
FREE = {"ignore_eos": True, "max_tokens": 60}
SAMPLINGS = [
    SamplingParams(**FREE),
    SamplingParams(temperature=0.9, seed=5, **FREE),
    SamplingParams(temperature=1.1, top_k=30, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=2**63, **FREE),
]


BACKENDS = [
    ("torch", "float32"),
    slow(("torch", "bfloat16")),
    ("cpu", "float32"),
    ("cpu", "bfloat16"),
    ("cpu", "int8"),
    ("cpu", "int4"),
]


@pytest.fixture(scope="module", params=BACKENDS, ids="-".join)
def engine(request, folder):
    backend, dtype = request.param
    return Engine.from_pretrained(folder, exit_head="norm:2", backend=backend, dtype=dtype, threads=1)


@pytest.fixture(scope="module", params=[("torch", "float32"), ("cpu", "int8")], ids="-".join)
def either(request, folder):
    """For what no format decides."""
    backend, dtype = request.param
    return Engine.from_pretrained(folder, exit_head="norm:2", backend=backend, dtype=dtype, threads=1)


@pytest.fixture(scope="module")
def plain_answers(engine):
    return [engine.generate("Hello, world", params, "plain").run() for params in SAMPLINGS]


@pytest.mark.parametrize("number", range(len(SAMPLINGS)), ids=["greedy", "warm", "filtered"])
@pytest.mark.parametrize("text", SCHEDULES)
def test_every_schedule_gives_the_plain_answer(engine, plain_answers, text, number):
    params, plain = SAMPLINGS[number], plain_answers[number]
    completion = engine.generate("Hello, world", params, parse_schedule(text)).run()
    assert completion.ids == plain.ids
    assert completion.text == plain.text
    assert completion.statistics.judged > 0
    assert len(plain.ids) == 60


def test_a_question_gets_the_chat_template_and_a_raw_text_none(either):
    params, asked = SamplingParams(max_tokens=3), [{"role": "user", "content": "Why?"}]
    assert either.chat("Why?", params).run().prompt_ids == tuple(either.encode(asked)) != tuple(either.encode("Why?"))
    assert either.chat(iter(asked), params).run().ids == either.generate(asked, params).run().ids
    assert "raw text" in Engine.generate.__doc__.splitlines()[0]
    for wrong in ([1, 2], ["Why?"], 3, None):
        with pytest.raises(UsageError, match="chat takes a text or a list of messages"):
            either.chat(wrong)


def test_roles_are_those_of_the_server_and_of_the_template(either, monkeypatch):
    for begin in (either.chat, either.generate, either.agenerate):
        with pytest.raises(UsageError, match="message 1 has the role 'robot', and not one of system, developer, user"):
            begin([{"role": "robot", "content": "hi"}])
    template = either.tokenizer.chat_template
    monkeypatch.setitem(template.sources, "default", template.source + "{# robot #}")
    assert either.encode([{"role": "robot", "content": "hi"}])


def test_a_raw_text_that_ends_at_once_warns_once(folder, caplog):
    engine = Engine.from_pretrained(folder, exit_head="none", backend="cpu", dtype="float32", threads=1)
    engine.name = "warned-once"
    nothing = SamplingParams(logit_bias={EOS: 100})
    for begin, prompt in ((engine.chat, "Why?"), (engine.generate, engine.encode("Why?"))):  # meant so
        assert begin(prompt, nothing).run().finish_reason == "eos"
    assert engine.generate("Why?", SamplingParams(max_tokens=1)).run().ids != (EOS,)
    assert caplog.messages == []
    assert [engine.generate("Why?", nothing).run().text for _ in range(2)] == ["", ""]
    [said] = caplog.messages
    assert said.startswith("warned-once answered a raw text with nothing at all: ") and "chat does" in said


@pytest.mark.parametrize("exit_layer", [2, 0])
@pytest.mark.parametrize("kind", ["adapter", "layer", "two-layer", "feedback"])
def test_heads_with_layers_of_their_own(folder, tmp_path, kind, exit_layer):
    engine = Engine.from_pretrained(folder, exit_head="none", dtype="float32")
    head = tiny_head(tiny_model(), kind, exit_layer, Checkpoint(folder).hash)
    head.save(tmp_path / "head.safetensors")
    params = SamplingParams(temperature=0.9, seed=1, **FREE)
    plain = engine.generate("abc", params, "plain").run()
    engine.use_head(tmp_path / "head.safetensors")
    for name in ("eesd", "ppsd", "elastic"):
        completion = engine.generate("abc", params, name).run()
        assert completion.ids == plain.ids
        assert completion.statistics.judged > 0


def test_stream_and_events_tell_the_same_story(either):
    tokens = list(either.generate("abc", SAMPLINGS[0], "elastic"))
    generation = either.generate("abc", SAMPLINGS[0], "elastic", RunOptions(report_drafts=True))
    events = list(generation.events())
    committed = [token for event in events if isinstance(event, Committed) for token in event.tokens]
    assert tokens == committed
    assert any(isinstance(event, Drafted) for event in events)
    assert [token.position for token in tokens] == list(range(3, 63))
    completion = generation.completion
    assert completion.ids == tuple(token.id for token in tokens)
    assert completion.text == "".join(token.text for token in tokens)
    assert completion.text == either.tokenizer.decode(completion.ids)
    origins = {token.origin for token in tokens}
    assert {"accepted", "corrected"} <= origins <= {"accepted", "corrected", "bonus", "plain"}


def test_a_slow_caller_changes_no_figure_of_speed(either, monkeypatch):
    """By a clock on which a round takes a second and the caller takes a thousand for each; the C++ has its own."""
    clock, rounds, events = [0.0], either.backend.rounds, []

    def recorded(*arguments):
        for event in rounds(*arguments):
            clock[0] += 1
            events.append(event)
            yield event

    monkeypatch.setattr("ppsd_rt.generation.perf_counter", lambda: clock[0])
    monkeypatch.setattr(either.backend, "rounds", recorded)
    generation = either.generate("Hello", SamplingParams(max_tokens=40, ignore_eos=True), "plain")
    for _ in generation:
        clock[0] += 1000
    seconds = [number if event.seconds is None else event.seconds for number, event in enumerate(events, 1)]
    assert len(seconds) == 40
    assert seconds == sorted(seconds)
    assert generation.statistics.ttft_seconds == pytest.approx(seconds[0])
    assert generation.statistics.seconds == pytest.approx(seconds[-1])


def test_prompt_as_text_messages_or_ids(either):
    messages = [{"role": "user", "content": "hi"}]
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = either.tokenizer.encode(rendered, add_special_tokens=False)
    assert ids[0] == VOCAB - 2
    assert either.encode(messages) == ids == either.encode(ids)
    assert either.encode("hi") == either.tokenizer.encode("hi")
    assert either.generate(messages, SAMPLINGS[0]).run().ids == either.generate(ids, SAMPLINGS[0]).run().ids


def test_prompts_of_numpy_torch_and_iterators(either):
    ids = either.encode("hello")
    for prompt in (np.array(ids), tuple(np.int32(id) for id in ids), torch.tensor(ids), iter(ids)):
        assert either.encode(prompt) == ids
    messages = [{"role": "user", "content": "hi"}]
    assert either.encode(iter(messages)) == either.encode(messages)


def test_a_shared_beginning_is_not_computed_again_and_changes_nothing(engine, folder):
    options = {"backend": engine.backend.name, "dtype": engine.backend.dtype, "threads": 1}
    fresh = Engine.from_pretrained(folder, exit_head="norm:2", **options)
    first = engine.generate("abcdefgh" * 8, SAMPLINGS[0], "elastic").run()
    follow_up = [*first.prompt_ids, *first.ids[:20], 7, 8, 9]
    assert (
        engine.generate(follow_up, SAMPLINGS[1], "eesd").run().ids == fresh.generate(follow_up, SAMPLINGS[1]).run().ids
    )
    rows = next(e for e in engine.generate(follow_up, SAMPLINGS[0], "plain").events()).round.rows
    assert rows == 1  # the last row is always run again, for its logits


def test_token_budget(either):
    for budget in (1, 2, 7):
        completion = either.generate("q", SamplingParams(max_tokens=budget, ignore_eos=True), "elastic").run()
        assert (len(completion.ids), completion.finish_reason) == (budget, "length")


def test_context_limit(either):
    prompt = list(range(256)) + list(range(250))
    completion = either.generate(prompt, SamplingParams(max_tokens=100, ignore_eos=True), "elastic").run()
    assert (len(completion.ids), completion.finish_reason) == (512 - 506, "context")
    assert completion.ids == either.generate(prompt, SamplingParams(ignore_eos=True), "plain").run().ids


def test_eos_and_stop_ids(either):
    free = either.generate("stop me", SAMPLINGS[1], "plain").run().ids
    place = next(i for i in range(5, 60) if free[i] not in free[:i])
    params = SamplingParams(temperature=0.9, seed=5, stop_token_ids=(free[place],), ignore_eos=True)
    for schedule in ("plain", "eesd", "ppsd", "elastic"):
        completion = either.generate("stop me", params, schedule).run()
        assert (completion.ids, completion.finish_reason) == (free[: place + 1], "stop")


def test_end_of_sequence_is_not_text(either):
    """Some seed gives an answer that ends by itself."""
    for seed in range(200):
        completion = either.generate("e", SamplingParams(temperature=3.0, seed=seed, max_tokens=40)).run()
        if completion.finish_reason == "eos":
            break
    assert completion.ids[-1] == EOS
    assert SPECIAL[2] not in completion.text
    ignored = either.generate("e", SamplingParams(temperature=3.0, seed=seed, max_tokens=40, ignore_eos=True)).run()
    assert len(ignored.ids) == 40


def test_stop_string_across_a_chunk_border(either):
    """Neighbouring printable characters of the answer as a stop string: some of them lie across two rounds."""
    free = either.generate("borders", SAMPLINGS[0], "plain").run()
    pairs = [(place, either.tokenizer.decode(free.ids[place : place + 2])) for place in range(59)]
    pairs = [(place, text) for place, text in pairs if len(text) == 2 and text.isprintable() and text.isascii()]
    for schedule in map(parse_schedule, ("plain", "eesd:stop_rule=fixed", "elastic")):
        events = list(either.generate("borders", SAMPLINGS[0], schedule).events())
        ends = {event.tokens[-1].position - len("borders") for event in events if isinstance(event, Committed)}
        border = [pair for pair in pairs if pair[0] in ends]
        inside = [pair for pair in pairs if pair[0] not in ends]
        assert border
        for place, stop in border[:3] + inside[:2]:
            completion = either.generate("borders", SamplingParams(stop=(stop,), **FREE), schedule).run()
            assert completion.text == free.text[: free.text.index(stop)]
            assert completion.finish_reason == "stop"
            assert len(completion.ids) <= place + 2
            assert completion.statistics.tokens == len(completion.ids)


@pytest.mark.parametrize("stages", [1, 2, 3, [3], (4, 5)])
def test_verification_in_several_stages(tmp_path, stages):
    """Chunks of 1 in flight through all of them, as PPSD has it; and every other schedule."""
    folder = write_model(tmp_path / "model", num_hidden_layers=6)
    options = {"exit_head": "norm:2", "backend": "cpu", "dtype": "float32", "threads": 2}
    engine = Engine.from_pretrained(folder, stages=stages, **options)
    plain = Engine.from_pretrained(folder, **options).generate("in stages", SAMPLINGS[1], "plain").run()
    for schedule in ("plain", "eesd", "ppsd", "elastic"):
        completion = engine.generate("in stages", SAMPLINGS[1], schedule, RunOptions(trace=True)).run()
        assert completion.ids == plain.ids
    tracks = {span[1] for span in engine.backend.spans()}
    assert len(tracks) == 1 + (stages if isinstance(stages, int) else 1 + len(stages))


def test_stages_that_cannot_be_cut(folder):
    def load(stages, head="norm:2", backend="cpu"):
        Engine.from_pretrained(folder, exit_head=head, backend=backend, dtype="float32", stages=stages)

    for stages, words in (
        (0, "at least 1"),
        (5, "than the 4 layers"),
        (3, "than the 2 layers"),
        ([2], "at the layers"),
    ):
        with pytest.raises(UsageError, match=words):
            load(stages)
    load(4, head="none")
    with pytest.raises(UsageError, match="one stage"):
        load(2, backend="torch")


def test_logits_are_those_of_plain_decoding(engine):
    answer = engine.generate("logits", SAMPLINGS[0], "plain").run()
    for place in (0, 1, 17):
        text = [*answer.prompt_ids, *answer.ids[:place]]
        engine.backend.logits([text[0], *text[:0:-1]])  # rows that the next text does not begin with
        assert int(engine.backend.logits(text)[-1].argmax()) == answer.ids[place]


def test_refusals_are_one_line(either, folder):
    params = SamplingParams()
    without = Engine.from_pretrained(folder, exit_head="none", dtype="float32")
    cases = [
        (UsageError, "empty", lambda: either.generate("", params)),
        (UsageError, "empty", lambda: either.generate([], params)),
        (UsageError, "outside the vocabulary", lambda: either.generate([VOCAB], params)),
        (UsageError, "context of 512", lambda: either.generate([1] * 512, params)),
        (UsageError, "the prompt must be a text.* not NoneType", lambda: either.generate(None, params)),
        (UsageError, "a prompt id must be a whole number, not True", lambda: either.generate([True, False], params)),
        (UsageError, "message 1 must be an object", lambda: either.generate(["hi"], params)),
        (UsageError, "message 1 is not valid Unicode: character 2", lambda: either.generate(UNREADABLE, params)),
        (UsageError, "the text is not valid Unicode: character 1", lambda: either.generate("\ud800", params)),
        (UsageError, "params must be SamplingParams", lambda: either.generate("a", {"max_tokens": 3})),
        (UsageError, "schedule must be", lambda: either.generate("a", params, None)),
        (UsageError, "threads must be a whole number", lambda: Engine.from_pretrained(folder, threads="2")),
        (UsageError, "fast", lambda: either.generate("a", params, "fast")),
        (PpsdError, "no exit head", lambda: without.generate("a", params, "eesd")),
        (PpsdError, "no exit head", lambda: without.generate("a", params, "eesd:lookup=3")),
        (UsageError, "backend", lambda: Engine.from_pretrained(folder, backend="tpu")),
        (UsageError, "dtype", lambda: Engine.from_pretrained(folder, dtype="int3")),
        (UsageError, "threads", lambda: Engine.from_pretrained(folder, threads=0)),
        (PpsdError, "1 to 3", lambda: Engine.from_pretrained(folder, exit_head="norm:9")),
        (PpsdError, "does not exist", lambda: Engine.from_pretrained(folder, exit_head="nowhere.safetensors")),
    ]
    for kind, words, call in cases:
        with pytest.raises(kind, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(folder):
    with pytest.raises(PpsdError, match="CUDA devices"):
        Engine.from_pretrained(folder, device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("text", SCHEDULES)
def test_every_schedule_gives_the_plain_answer_on_a_gpu(folder, text):
    engine = Engine.from_pretrained(folder, exit_head="norm:2", device="cuda")
    for params in SAMPLINGS:
        plain = engine.generate("Hello, world", params, "plain").run()
        assert engine.generate("Hello, world", params, parse_schedule(text)).run().ids == plain.ids
