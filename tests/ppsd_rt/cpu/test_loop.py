"""Many answers in one loop, stepped by hand: each is the one that is decoded alone. Time is counted in rounds."""

import random

import pytest
import torch
from support import loud_head, tiny_head, tiny_model, write_model

from ppsd_rt import Engine, SamplingParams, _native
from ppsd_rt.backend import Oracle
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.pipeline.rounds import Limits, Round
from ppsd_rt.pipeline.schedule import Auto, copying, parse_schedule

CONTEXT = 448
COUNTED = _native.Ngrams()  # by all answers of `auto`
SCHEDULES = (
    "plain",
    "eesd:length=4,stop_rule=fixed",
    "eesd",
    "elastic",
    "eesd:lookup=3",
    "elastic:lookup=1",
    "auto",
    "auto",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("loop") / "model", head_dim=32, num_attention_heads=4, hidden_size=64)


def load(folder, dtype="int8", **options):
    options = {"exit_head": "norm:2", "backend": "cpu", "threads": 1} | options
    return Engine.from_pretrained(folder, dtype=dtype, **options)


@pytest.fixture(scope="module", params=["int8", "float32", "bfloat16"])
def engine(request, folder):
    return load(folder, request.param)


def loop_of(engine, blocks=400, most_answers=48, prompt_rows=16, threads=1):
    """With room for so many blocks of 64 positions."""
    model = engine.backend._model
    one = _native.Loop(model, threads, 1 << 24, most_answers, prompt_rows, stepped=True)
    block_bytes = (1 << 24) // (one.capacity // 64)
    return _native.Loop(model, threads, block_bytes * blocks, most_answers, prompt_rows, stepped=True)


class Request:
    def __init__(self, prompt, params, schedule="plain", arrives=0, leaves=None):
        self.prompt, self.params, self.schedule = prompt, params, schedule
        self.arrives, self.leaves = arrives, leaves
        self.ids, self.logprobs, self.judged, self.answer, self.over = [], [], [], None, False

    @property
    def end(self):
        return min(len(self.prompt) + self.params.max_tokens, CONTEXT)

    def add_to(self, loop, engine, **more):
        automatic = self.schedule == "auto"
        self.answer = loop.add(
            self.prompt,
            self.params.for_backend(self.prompt),
            copying(Auto(2)) if automatic else parse_schedule(self.schedule),
            Limits(self.end, frozenset(self.params.stop_token_ids)),
            automatic=automatic,
            ngrams=COUNTED if automatic else None,
            **more,
        )

    def take(self):
        events, self.over = self.answer.take()
        for event in events:
            if isinstance(event, Round):
                assert event.position == len(self.prompt) + len(self.ids), "a round commits at its place"
                self.ids += event.committed
                self.logprobs += event.logprobs
                self.judged.append([draft.token for draft in event.judged])

    def alone(self, engine):
        completion = engine.generate(self.prompt, self.params, "plain").run()
        assert tuple(self.logprobs) == completion.logprobs[: len(self.logprobs)]
        return list(completion.ids)


def play(loop, engine, requests):
    """All of them, each at its round; a request leaves when it has so many tokens."""
    todo, running, round = sorted(requests, key=lambda r: r.arrives), [], 0
    while todo or running:
        while todo and todo[0].arrives <= round:
            running.append(todo.pop(0))
            running[-1].add_to(loop, engine)
        worked = loop.step()
        for request in running:
            request.take()
            if request.leaves is not None and len(request.ids) >= request.leaves:
                request.answer.cancel()
        running = [request for request in running if not request.over]
        assert worked or not running or todo, "the loop stands still"
        round += 1


def sampled(generator, vocabulary=256, **fixed):
    options = {"temperature": generator.choice([0.0, 0.7, 1.1]), "seed": generator.getrandbits(32)}
    if generator.random() < 0.5:
        options |= generator.choice(
            [
                {"top_k": 5},
                {"top_p": 0.9},
                {"min_p": 0.05},
                {"repetition_penalty": 1.3},
                {"top_k": 9, "top_p": 0.8},
                {"presence_penalty": 0.5, "frequency_penalty": 0.3},
                {"logit_bias": {7: 2.0}, "logprobs": 2},
            ]
        )
    return SamplingParams(**(options | {"ignore_eos": True} | fixed))


def random_requests(generator, count, prompts, rounds, lengths=(1, 3, 20, 60, 150)):
    requests = []
    for _ in range(count):
        head = generator.choice(prompts)
        tail = [generator.randrange(5, 250) for _ in range(generator.randrange(1, 40))]
        params = sampled(generator, max_tokens=generator.choice(lengths))
        leaves = generator.randrange(1, 40) if generator.random() < 0.15 else None
        arrives = generator.randrange(rounds)
        requests.append(Request(head + tail, params, generator.choice(SCHEDULES), arrives, leaves))
    return requests


def check(engine, requests):
    for request in requests:
        expected = request.alone(engine)
        if request.leaves is None:
            assert request.ids == expected, (request.schedule, request.params)
        else:
            assert request.ids == expected[: len(request.ids)]
            assert len(request.ids) >= min(request.leaves, len(expected))


def heads(generator):
    """What prompts begin with: nothing, or long texts that several share."""
    return [[], *([generator.randrange(5, 250) for _ in range(n)] for n in (70, 130, 200))]


@pytest.mark.parametrize(("kind", "exit_layer"), [("layer", 2), ("feedback", 2), ("feedback", 0)])
def test_exit_heads_of_every_kind(folder, tmp_path, kind, exit_layer):
    """With layers of their own, and drawing on verified rows: their drafts are as good as in a session."""
    checkpoint = Checkpoint(folder)
    shape = {"head_dim": 32, "num_attention_heads": 4, "hidden_size": 64}
    if kind == "feedback":
        head = loud_head(checkpoint.hash, exit_layer=exit_layer, **shape)
    else:
        head = tiny_head(tiny_model(**shape), kind, exit_layer, checkpoint.hash)
    head.save(tmp_path / "head.safetensors", torch.float32)
    engine = load(folder, "float32", exit_head=tmp_path / "head.safetensors")
    generator = random.Random(3)
    schedule = "eesd:length=3,stop_rule=fixed"
    requests = [
        Request([generator.randrange(5, 250) for _ in range(80)], sampled(generator, max_tokens=40), schedule, n, None)
        for n in range(6)
    ]
    play(loop_of(engine), engine, requests)
    check(engine, requests)
    for request in requests:
        rounds = engine.generate(request.prompt, request.params, schedule).events()
        judged = [round.round.judged for round in rounds]
        assert [[draft.token for draft in drafts] for drafts in judged] == request.judged


def test_side_by_side(engine):
    generator = random.Random(1)
    loop = loop_of(engine)
    requests = random_requests(generator, 24, heads(generator), 40)
    play(loop, engine, requests)
    check(engine, requests)
    counts = loop.counts
    assert counts["shared_rows"] > 0
    assert counts["draft_rows"] > 0
    assert counts["preempted"] == 0


def test_beginnings_are_shared_and_nothing_else(engine):
    """The same 64 ids after others are another block; rows of a text that has left serve later ones."""
    generator = random.Random(5)
    one, two, three = ([generator.randrange(5, 250) for _ in range(64)] for _ in range(3))
    prompts = [one + two + three, three + two + one, two + two + two, one + two + [9], one + two + three]
    loop = loop_of(engine)
    requests = [Request([*prompt, 7], sampled(generator, max_tokens=6)) for prompt in prompts]
    shared = []
    for request in requests:  # one after the other
        before = loop.counts["shared_rows"]
        play(loop, engine, [request])
        shared.append(loop.counts["shared_rows"] - before)
    check(engine, requests)
    assert shared == [0, 0, 0, 128, 192]


def test_rows_after_another_beginning_are_not_copied(engine):
    """Where the index has nothing that begins so, its neighbour is of another text."""
    loop, generator = loop_of(engine), random.Random(5)
    low, high = [5] * 64, [*range(100, 164)]
    requests = [Request([*prompt, 7], sampled(generator, max_tokens=6)) for prompt in (low + high, high)]
    for request in requests:
        play(loop, engine, [request])
    check(engine, requests)
    assert loop.counts["shared_rows"] == 0


def test_a_text_whose_blocks_others_have_taken_is_computed_again(engine):
    loop, generator = loop_of(engine, blocks=4, most_answers=1), random.Random(6)
    prompts = [[generator.randrange(5, 250) for _ in range(131)] for _ in range(3)]
    for prompt in (*prompts, prompts[0]):  # three blocks each
        request = Request(prompt, sampled(generator, max_tokens=6))
        play(loop, engine, [request])
        check(engine, [request])
    assert loop.counts["shared_rows"] == 0


def test_of_texts_that_become_alike_one_gives_its_blocks_back(engine):
    loop, params = loop_of(engine, blocks=7, most_answers=2), SamplingParams(max_tokens=140, ignore_eos=True)
    for number in range(3):  # three blocks each, of which two are the other's too
        pair = [Request([number, 7], params) for _ in range(2)]
        for request in pair:
            request.add_to(loop, engine)
        for _ in range(200):  # where blocks were lost, they would take turns for ever
            loop.step()
            for request in pair:
                request.take()
        assert all(request.over for request in pair)
        check(engine, pair)
    assert loop.counts["preempted"] == 0


def test_a_text_that_parts_within_a_block_copies_it(engine):
    """The next turn of a conversation computes its new rows alone; fewer than eight rows are computed again."""
    generator = random.Random(6)
    said = [generator.randrange(5, 250) for _ in range(90)]
    loop = loop_of(engine)
    first = Request([*said, 7], sampled(generator, max_tokens=10))
    play(loop, engine, [first])
    text = first.prompt + first.ids
    turns = [[*text, 8, 9], [*said[:80], 9], [*said[:70], 11], [*said[:64], 3, 3]]
    shared = []
    for prompt in turns:
        before = loop.counts["shared_rows"]
        request = Request(prompt, sampled(generator, max_tokens=30))
        play(loop, engine, [request])
        check(engine, [request])
        shared.append(loop.counts["shared_rows"] - before)
    assert shared == [len(text) - 1, 80, 64, 64]  # the newest token of an answer has no row


def test_timelines_and_oracles_in_company(engine):
    """Each draft is what its answer's oracle says, and each timeline has its own passes."""
    generator = random.Random(9)
    requests = [
        Request([generator.randrange(5, 250) for _ in range(30)], SamplingParams(max_tokens=40, ignore_eos=True), name)
        for name in ("eesd:length=3,stop_rule=fixed", "eesd:length=1,stop_rule=fixed", "plain")
    ]
    loop = loop_of(engine)
    for request in requests:
        truth = (*request.prompt, *engine.generate(request.prompt, request.params, "plain").run().ids)
        request.add_to(loop, engine, oracle=Oracle(truth, acceptance=1.0), trace=True)
    while loop.step():
        for request in requests:
            request.take()
    check(engine, requests)
    for request in requests:
        names = [name for name, *_ in request.answer.spans()]
        assert names.count("verify") == len(request.judged) - 1  # but for the prompt's round
        judged = [id for drafts in request.judged for id in drafts]
        assert all(len(drafts) == len(request.judged[1]) for drafts in request.judged[1:-2])
        assert set(judged) <= set(request.ids)


def test_a_small_cache(engine):
    """Requests wait, the youngest are interrupted and computed again."""
    generator = random.Random(2)
    loop = loop_of(engine, blocks=8, most_answers=6)
    requests = random_requests(generator, 10, heads(generator), 20, lengths=(150, 200))
    play(loop, engine, requests)
    check(engine, requests)
    assert loop.counts["preempted"] > 2


def test_a_long_prompt_does_not_stop_the_others(engine):
    """Each running answer gets a token in every round, and the prompt its share of rows."""
    generator = random.Random(8)
    loop = loop_of(engine)
    running = [Request([9, number], sampled(generator, max_tokens=400)) for number in range(8)]
    for request in running:
        request.add_to(loop, engine)
    while not all(request.ids for request in running):
        loop.step()
        for request in running:
            request.take()
    rows = 400
    long = Request([generator.randrange(5, 250) for _ in range(rows)], sampled(generator, max_tokens=9))
    long.add_to(loop, engine)
    rounds = 0
    while not long.ids:
        before = [len(request.ids) for request in running]
        loop.step()
        rounds += 1
        for request in [long, *running]:
            request.take()
        assert all(len(request.ids) > count for request, count in zip(running, before, strict=True))
    assert 1 < rounds <= rows // 16 + 2


def test_kept_hidden_states_go_with_shared_blocks(engine):
    """After layers 0, 2 and 4, of all rows: also of shared ones, of those computed again, and of a cancelled text."""

    def loop(blocks):
        size = (1 << 24) // (_native.Loop(engine.backend._base, 1, 1 << 24, 3, 16, True, [0, 2, 4]).capacity // 64)
        return _native.Loop(engine.backend._base, 1, size * blocks, 3, 16, True, [0, 2, 4])

    def states(loop, *requests):
        play(loop, engine, requests)
        return [request.answer.kept().reshape(-1, 3, engine.config.hidden_size) for request in requests]

    prompt, params = list(range(5, 150)), SamplingParams(max_tokens=120, ignore_eos=True)
    (expected,) = states(loop(40), Request(prompt, params))
    assert len(expected) == len(prompt) + 119 and expected.any(axis=(1, 2)).all()
    large, small = loop(40), loop(6)
    late = Request(prompt, params, arrives=40), Request(prompt, params, arrives=50, leaves=20)
    whole, shared, cancelled = states(large, Request(prompt, params), *late)
    assert large.counts["shared_rows"] >= 2 * 128
    assert len(cancelled) >= len(prompt) + 19 and (cancelled == expected[: len(cancelled)]).all()
    _, again = states(small, Request(prompt[::-1], params), Request(prompt, params))  # the younger one gives way
    assert small.counts["preempted"] > 0
    assert (whole == expected).all() and (shared == expected).all() and (again == expected).all()
    with pytest.raises(RuntimeError, match="without an exit head"):
        _native.Loop(engine.backend._model, 1, 1 << 24, 3, 16, True, [2])
