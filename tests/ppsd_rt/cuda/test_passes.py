"""Passes over several texts: each row has the bits that the stages of one answer give it."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from eagle_support import write_knowing
from kernel_support import DEVICE
from stage_support import PROMPT, VOCAB, model_of, plain_of, weights_of
from support import slow

from ppsd_rt import _native
from ppsd_rt.cuda.passes import PAGE, CudaPasses, Eagle
from ppsd_rt.cuda.stages import DeviceStages
from ppsd_rt.cuda.weights import DeviceWeights
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.eagle3 import Eagle3File
from ppsd_rt.models.llama import LlamaForCausalLM
from ppsd_rt.pipeline.rounds import Limits, Round
from ppsd_rt.pipeline.schedule import parse_schedule
from ppsd_rt.sampling.params import SamplingParams

LONG = [(7 * i * i + 3 * i) % VOCAB for i in range(PAGE + 40)]


class Text:
    """Rows of a text through all layers, a few at a time."""

    def __init__(self, passes, ids, prompt, pages):
        self.passes, self.ids, self.prompt, self.pages, self.at = passes, ids, prompt, pages, 0

    def next(self, count):
        count = min(count, len(self.ids) - self.at)
        start, self.at = self.at, self.at + count
        where = start, count, self.pages[: -(-self.at // PAGE)], max(0, min(self.prompt - start, count))
        return where, self.passes.embed(self.ids[start : self.at])


def together(passes, texts, counts):
    """A pass over so many rows of each text."""
    wheres, x = zip(*(text.next(count) for text, count in zip(texts, counts, strict=True)), strict=True)
    passes.late(wheres, passes.early(wheres, np.concatenate(x), None), None)


@pytest.mark.parametrize(
    ("changes", "format"),
    [
        ({}, "float32"),
        slow({"num_key_value_heads": 2, "attention_bias": True}, "int8"),
        slow({"model_type": "qwen3", "head_dim": 32}, "int4"),
        slow({"model_type": "mistral", "sliding_window": 7}, "fp8"),
    ],
)
def test_rows_have_the_bits_of_one_answer_alone(changes, format):
    weights = weights_of(model_of(num_hidden_layers=2, **changes), "norm", 1, format=format)
    passes = CudaPasses(weights, 8)
    passes.reserve(3 * PAGE, 0)
    prompts = 5, 15, PAGE + 5
    texts = [
        Text(passes, ids, prompt, pages)
        for ids, prompt, pages in zip((PROMPT[:9], PROMPT, LONG), prompts, ([3], [0], [5, 2]), strict=True)
    ]
    found = [{} for _ in texts]
    for counts in [(5, 3, PAGE - 2), (1, 14, 7), (2, 1, 9), (1, 1, 1)]:
        begins = [text.at for text in texts]
        together(passes, texts, counts)
        ends = [text.at for text in texts]
        rows = [
            (text, at, sum(ends[:text]) - sum(begins[:text]) + at - begins[text])
            for text in range(3)
            for at in range(max(prompts[text], begins[text]), ends[text])
        ]
        logits = passes.logits([(row, at) for _, at, row in rows]) if rows else ()
        for (text, at, _), row in zip(rows, logits, strict=True):
            found[text][at] = row
    stages = DeviceStages(weights, 3 * PAGE)
    for text, rows in zip(texts, found, strict=True):
        alone = stages.logits(text.ids[: text.at], text.at - text.prompt).numpy()
        assert list(rows) == list(range(text.prompt, text.at))
        assert np.array_equal(np.stack(list(rows.values())), alone)


@pytest.mark.parametrize("kind", ["norm", "feedback"])
def test_rows_come_back_from_the_last_layer_where_the_head_receives_them(kind):
    passes = CudaPasses(weights_of(model_of(num_hidden_layers=2), kind, 1), 2)
    where = [(0, 3, [0], 2)]
    rows = passes.early(where, passes.embed(PROMPT[:3]), None)
    last, _ = passes.late(where, rows, None)
    assert (last is not None) == (kind == "feedback")
    assert last is None or (last.shape == rows.shape and not np.array_equal(last, rows))


ASKED = [
    {},
    {"temperature": 0.9, "seed": 2**33 + 7},
    {"temperature": 1.3, "seed": 5},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "seed": 12},
    {"repetition_penalty": 1.5},
    {"temperature": 0.7, "seed": 1, "logit_bias": {7: 2.0}, "logprobs": 2},
]


@pytest.mark.parametrize(
    ("kind", "draft_ids"),
    [("feedback", None), slow("norm", None), slow("two-layer", None), slow("layer", range(0, VOCAB, 3))],
)
def test_answers_side_by_side_are_what_each_is_alone(kind, draft_ids):
    """Some draft, some do not; two begin with the same page."""
    model, asked = model_of(num_hidden_layers=2), ASKED[:4] if kind == "feedback" else ASKED
    weights = weights_of(model, kind, 1, None if draft_ids is None else list(draft_ids))
    loop = _native.Loop.of_passes(CudaPasses(weights, 16), 16, 8, 16)
    prompts = [[*PROMPT[:number], 7 + number] for number in range(3, 1 + len(asked))] + [
        LONG[: PAGE + 3],
        [*LONG[:PAGE], 9],
    ]
    streams = []
    for number, prompt in enumerate(prompts):
        params = SamplingParams(**asked[number])
        schedule = parse_schedule("eesd:length=2,stop_rule=fixed" if number % 3 else "plain")
        streams.append((prompt, params, loop.add(prompt, params, schedule, Limits(len(prompt) + 3))))
    for prompt, params, stream in streams:
        said = [token for event in stream if isinstance(event, Round) for token in event.committed]
        assert [*prompt, *said] == plain_of(model, prompt, params, len(prompt) + 3)
    assert loop.counts["draft_rows"] > 0


def test_copied_pages_have_the_bits_of_rows_of_their_text():
    passes = CudaPasses(weights_of(model_of(num_hidden_layers=2), "norm", 1), 3)
    text, alone = (Text(passes, [*PROMPT[:9], 8, 6], 5, [page]) for page in (0, 1))
    for one in (text, alone):
        together(passes, [one], [10])
    passes.change((), [(0, 2)])
    text.pages = [2]
    together(passes, [text], [1])
    copied = passes.logits([(0, 10)])
    together(passes, [alone], [1])
    assert np.array_equal(copied, passes.logits([(0, 10)]))


def test_what_is_no_number_chooses_nothing():
    passes = CudaPasses(weights_of(model_of(num_hidden_layers=1)), 1)
    passes._last = torch.ones(3, 32)
    passes._last[1, 4] = np.nan
    ids = passes.choose([(2, 5, 1, 0.0), (1, 5, 1, 0.0), (2, 5, 2**40 + 3, 0.8)])
    assert ids[1] == -1
    assert ids[0] == passes.logits([(0, 4)])[0].argmax()
    assert 0 <= ids[2] < VOCAB


def test_rows_of_one_answer_alone_may_stand_in_pages():
    """The next row has the bits that it would have had."""
    weights = weights_of(model_of(num_hidden_layers=2), "layer", 1)
    stages, passes = DeviceStages(weights, PAGE + 30), CudaPasses(weights, 3)
    passes.reserve(2 * PAGE, 0)
    text = [*LONG[: PAGE - 1], 4, 8, 15]
    expected = stages.logits(text, 1).numpy()
    pages, (page, place) = [2, 0], divmod(len(text) - 1, PAGE)
    for mine, theirs in zip(passes.cache, stages.buffers.cache, strict=True):
        theirs[page, :, place:] = torch.nan  # as if it had never run the last row
        mine[pages] = theirs
    where = [(len(text) - 1, 1, pages, 0)]
    passes.late(where, passes.early(where, passes.embed(text[-1:]), None), None)
    assert np.array_equal(passes.logits([(0, len(text) - 1)]), expected)


def test_an_eagle_3_head_drafts_beside_the_passes(tmp_path):
    """One that knows its model: what it drafts is often right, and answers are torch's."""
    folder, head = write_knowing(tmp_path, num_hidden_layers=4)
    checkpoint = Checkpoint(folder)
    weights = DeviceWeights.from_checkpoint(checkpoint, "float32", DEVICE)
    eagle = Eagle(Eagle3File.load_folder(head, checkpoint), weights)
    loop = _native.Loop.of_passes(CudaPasses(weights, 8, eagle), 8, 8, 16)
    drafts, model = (
        parse_schedule("eesd:length=3,stop_rule=fixed"),
        LlamaForCausalLM.from_checkpoint(checkpoint, torch.float32),
    )
    streams = [
        (prompt, params, loop.add(prompt, params, drafts, Limits(len(prompt) + 5)))
        for prompt, params in [(PROMPT, SamplingParams()), (PROMPT[:4], SamplingParams(temperature=0.5, seed=2))]
    ]
    accepted = 0
    for prompt, params, stream in streams:
        rounds = [event for event in stream if isinstance(event, Round)]
        said = [token for round in rounds for token in round.committed]
        accepted += len(said) - len(rounds)
        assert [*prompt, *said] == plain_of(model, prompt, params, len(prompt) + 5)
    assert accepted >= 3
