"""Passes over several texts: each row has the bits that the stages of one answer give it."""

import random

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from stage_support import PROMPT, VOCAB, model_of, weights_of

from ppsd_rt.cuda.logits import logits_of
from ppsd_rt.cuda.passes import PAGE, CudaPasses
from ppsd_rt.cuda.stages import DeviceStages

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
    """A pass -> the last hidden states [rows, hidden] of each text."""
    wheres, x = zip(*(text.next(count) for text, count in zip(texts, counts, strict=True)), strict=True)
    x = passes.early(wheres, np.concatenate(x), (), None)
    late, _ = passes.late(wheres, x, (), None)
    return np.split(late, np.cumsum([count for _, count, *_ in wheres])[:-1])


@pytest.mark.parametrize(
    ("changes", "format"),
    [
        ({}, "float32"),
        ({"num_key_value_heads": 2, "attention_bias": True}, "int8"),
        ({"model_type": "qwen3", "head_dim": 32}, "int4"),
        ({"model_type": "mistral", "sliding_window": 7}, "fp8"),
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
    found = [dict() for _ in texts]
    for counts in [(5, 3, PAGE - 2), (1, 14, 7), (2, 1, 30), (1, 1, 1)]:
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
        alone = logits_of(stages, text.ids[: text.at], text.at - text.prompt).numpy()
        assert list(rows) == list(range(text.prompt, text.at))
        assert np.array_equal(np.stack(list(rows.values())), alone)
