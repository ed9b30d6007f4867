"""Row invariance: the bits of a row depend neither on the rows that share its pass, nor on where passes are cut."""

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import slow, tiny_head, tiny_model

from ppsd_rt.models.head_file import KINDS
from ppsd_rt.reference.passes import PAGE, SPAN, Piece, TorchPasses, block_rows, in_blocks

MODELS = {dtype: tiny_model().to(dtype) for dtype in (torch.float32, torch.bfloat16)}
# Wide enough for the BLAS to choose other kernels for other numbers of rows.
WIDE = tiny_model(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3)
LENGTH = 70
IDS = torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()


class Text:
    """A text on its way: its rows so far, its pages, and what came of them."""

    def __init__(self, ids, first_page):
        self.ids, self.pages, self.done = ids, [first_page + i for i in range(len(ids) // PAGE + 1)], 0
        self.exits, self.logits, self.drawn = [], [], None

    def rows(self, count):
        return (self.done, min(count, len(self.ids) - self.done), self.pages[: (self.done + count - 1) // PAGE + 1], 0)


def play(passes, texts, counts):
    """A pass: `counts` rows of each of the texts, all of which choose; and a draft of each."""
    rows = [text.rows(count) for text, count in zip(texts, counts, strict=True)]
    ids = [id for text, (start, count, *_) in zip(texts, rows, strict=True) for id in text.ids[start : start + count]]
    exits = passes.early(rows, passes.embed(ids), None)
    ends = list(itertools.accumulate(count for _, count, *_ in rows))
    parts = np.split(exits, ends[:-1])
    drawn = passes.draw([(row, part, 0, part[:1], ()) for row, part in zip(rows, parts, strict=True)], None)
    passes.late(rows, exits, None)
    logits = passes.logits(list(enumerate(start + i for start, count, *_ in rows for i in range(count))))
    for text, part, chosen, draft in zip(texts, parts, np.split(logits, ends[:-1]), drawn, strict=True):
        text.done += len(part)
        text.exits.append(part)
        text.logits.append(chosen)
        text.drawn = draft


def whole(model, cuts, ids=IDS, company=0, threads=1, kind="norm"):
    """Exit states, logits and the last draft of a text whose passes end at `cuts`, among others of random lengths."""
    before, random_ = torch.get_num_threads(), random.Random(company)
    torch.set_num_threads(threads)
    try:
        passes = TorchPasses(model, tiny_head(model, kind))
        passes.reserve(len(ids) + SPAN, 0)
        text, others = Text(ids, 40), [Text(IDS[::-1] * 3, 100 + 10 * number) for number in range(company)]
        for other in others:
            play(passes, [other], [random_.randrange(1, 60)])
        for start, end in itertools.pairwise([0, *cuts, len(ids)]):
            beside = [(other, random_.randrange(1, 4)) for other in others if random_.random() < 0.7]
            parts = [*beside, (text, end - start)]
            random_.shuffle(parts)
            parts = [part for part in parts if part[0].done + part[1] <= len(part[0].ids)]
            play(passes, *zip(*parts, strict=True))
        return np.concatenate(text.exits), np.concatenate(text.logits), text.drawn
    finally:
        torch.set_num_threads(before)


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", MODELS)
def test_one_row_at_a_time_equals_all_at_once(dtype, threads):
    model = MODELS[dtype]
    assert_same(whole(model, [], threads=threads), whole(model, range(1, LENGTH), threads=threads))


@pytest.mark.parametrize("dtype", MODELS)
@settings(max_examples=10, deadline=None)
@given(cuts=st.sets(st.integers(1, LENGTH - 1), max_size=12), company=st.integers(0, 5))
def test_any_cutting_in_any_company_gives_the_same_bits(dtype, cuts, company):
    assert_same(whole(MODELS[dtype], []), whole(MODELS[dtype], sorted(cuts), company=company))


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)])
def test_the_shapes_of_the_default_model(dtype):
    model = WIDE.to(dtype)
    alone = whole(model, [])
    assert_same(alone, whole(model, [3, 4, 9, 17, 33, 34], company=3))
    assert_same(alone, whole(model, range(1, LENGTH)))


def test_the_blas_alone_is_not_row_invariant():
    """Why passes work in blocks. Should this ever fail, they could be simpler."""
    weight, x = torch.randn(576, 576), torch.randn(16, 576)
    whole = x @ weight.t()
    assert any(not torch.equal((x[:rows] @ weight.t()), whole[:rows]) for rows in range(1, 16))


def test_across_a_span_border():
    """Attention's span grows at SPAN; rows on both sides, in one pass and in single ones."""
    model, ids = MODELS[torch.bfloat16], (IDS * 8)[: SPAN + 20]
    cuts = [SPAN - 5, *range(SPAN - 3, SPAN + 9)]
    assert_same(whole(model, [SPAN - 5], ids), whole(model, cuts, ids, company=2))


@pytest.mark.parametrize("kind", KINDS)
def test_head_catches_up_with_rows_it_has_not_seen(kind):
    """Asked after every row, or once at the end: the same draft."""
    model = MODELS[torch.float32]
    assert_same(whole(model, range(1, LENGTH), kind=kind), whole(model, [], kind=kind))


def test_rows_that_are_void_leave_no_trace():
    model = MODELS[torch.bfloat16]
    passes, text = TorchPasses(model, tiny_head(model)), Text(IDS, 0)
    passes.reserve(LENGTH, 0)
    play(passes, [text], [17])
    wrong = Text([*IDS[:17], *(255 - id for id in IDS[17:40])], 0)
    wrong.done = 17
    rows = wrong.rows(20)
    passes.late([rows], passes.early([rows], passes.embed(wrong.ids[17:37]), None), None)
    play(passes, [text], [LENGTH - 17])
    assert_same((np.concatenate(text.exits), np.concatenate(text.logits)), whole(model, [])[:2])


def test_pages_are_copied_and_wiped():
    model = MODELS[torch.float32]
    passes, text = TorchPasses(model, tiny_head(model)), Text(IDS, 0)
    passes.reserve(LENGTH, 0)
    play(passes, [text], [66])
    passes.change([3], [(0, 7), (1, 8)])
    passes.change([0, 1], [])
    text.pages = [7, 8]
    play(passes, [text], [4])
    assert np.concatenate(text.logits).tobytes() == whole(model, [])[1].tobytes()


def test_texts_share_a_block_where_their_slots_are_free():
    blocks = in_blocks(4, [(3, 6, (1,), 0), (1, 2, (2,), 0), (5, 1, (3,), 0)])
    assert blocks == [
        [Piece(0, 3, 4, 0, (1,)), Piece(0, 1, 3, 6, (2,))],
        [Piece(4, 4, 8, 1, (1,))],
        [Piece(8, 8, 9, 5, (1,)), Piece(4, 5, 6, 8, (3,))],
    ]


def test_spans_hold_whole_blocks():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for device in ("cpu", "cuda"):
            assert SPAN % block_rows(dtype, torch.device(device)) == 0
