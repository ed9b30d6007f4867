"""Row invariance: the bits of a row do not depend on how many rows share a pass, nor on where the passes are cut."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import slow, tiny_head, tiny_model

from ppsd_rt.models.head_file import KINDS
from ppsd_rt.reference.stage import SPAN, DraftStage, VerifyStage, block_rows, in_blocks

MODELS = {dtype: tiny_model().to(dtype) for dtype in (torch.float32, torch.bfloat16)}
# Wide enough for the BLAS to choose other kernels for other numbers of rows.
WIDE = tiny_model(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3)
LENGTH = 70
IDS = torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()


def passes(model, cuts, ids=IDS, threads=1):
    """Exit hidden states, head logits and verification logits when the rows are passed in pieces ending at `cuts`."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        draft, verify = DraftStage(model, tiny_head(model)), VerifyStage(model, 2)
        draft.reserve(len(ids))
        verify.reserve(len(ids))
        drafted, logits = [], []
        for start, end in itertools.pairwise([0, *cuts, len(ids)]):
            draft.run_tokens(ids[start:end])
            drafted.append(draft.draft_logits())
            logits.append(verify.logits(draft.exit_hidden(start, end - start), last=end - start))
        return draft.exit_hidden(0, len(ids)).clone(), drafted[-1], torch.cat(logits)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", MODELS)
def test_one_row_at_a_time_equals_all_at_once(dtype, threads):
    for a, b in zip(
        passes(MODELS[dtype], [], threads=threads),
        passes(MODELS[dtype], range(1, LENGTH), threads=threads),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", MODELS)
@settings(max_examples=10, deadline=None)
@given(cuts=st.sets(st.integers(1, LENGTH - 1), max_size=12))
def test_any_cutting_gives_the_same_bits(dtype, cuts):
    for a, b in zip(passes(MODELS[dtype], []), passes(MODELS[dtype], sorted(cuts)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)])
def test_the_shapes_of_the_default_model(dtype):
    model = WIDE.to(dtype)
    whole = passes(model, [])
    for cuts in ([3, 4, 9, 17, 33, 34], range(1, LENGTH)):
        for a, b in zip(whole, passes(model, cuts), strict=True):
            assert torch.equal(a, b)


def test_the_blas_alone_is_not_row_invariant():
    """Why stages work in blocks. Should this ever fail, the stages could be simpler."""
    weight, x = torch.randn(576, 576), torch.randn(16, 576)
    whole = x @ weight.t()
    assert any(not torch.equal((x[:rows] @ weight.t()), whole[:rows]) for rows in range(1, 16))


def test_across_a_span_border():
    """Attention's span grows at SPAN; rows on both sides, in one pass and in single ones."""
    model = MODELS[torch.bfloat16]
    ids = (IDS * 8)[: SPAN + 20]
    for a, b in zip(
        passes(model, [SPAN - 5], ids), passes(model, [SPAN - 5, *range(SPAN - 3, SPAN + 9)], ids), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", MODELS)
def test_rollback_leaves_no_trace(dtype):
    """Right rows up to some place, wrong ones after it, back again: as if the wrong ones had never been."""
    model = MODELS[dtype]
    exit_hidden, drafted, logits = passes(model, [])
    draft, verify = DraftStage(model, tiny_head(model)), VerifyStage(model, 2)
    draft.reserve(LENGTH + 21)
    verify.reserve(LENGTH + 21)

    def advance(ids):
        start = draft.length
        draft.run_tokens(ids)
        return verify.logits(draft.exit_hidden(start, len(ids)), last=len(ids))

    for keep in (1, 15, 16, 17, 40):
        right = advance(IDS[draft.length : keep])
        assert torch.equal(right, logits[keep - len(right) : keep])
        advance([255 - id for id in IDS[keep : keep + 21]])
        draft.draft_logits()
        draft.rollback(keep)
        verify.rollback(keep)
        assert draft.length == verify.length == keep
    assert torch.equal(advance(IDS[40:]), logits[40:])
    assert torch.equal(draft.exit_hidden(0, LENGTH), exit_hidden)
    assert torch.equal(draft.draft_logits(), drafted)


@pytest.mark.parametrize("kind", KINDS)
def test_head_catches_up_with_rows_it_has_not_seen(kind):
    """Asked after every row, or once at the end: the same draft."""
    model = MODELS[torch.float32]
    always, once = (DraftStage(model, tiny_head(model, kind)) for _ in range(2))
    for stage in (always, once):
        stage.reserve(LENGTH)
    for id in IDS:
        always.run_tokens([id])
        every = always.draft_logits()
    once.run_tokens(IDS)
    assert torch.equal(every, once.draft_logits())
    assert torch.equal(every, once.draft_logits())


def test_a_cache_that_grows_keeps_its_rows():
    model = MODELS[torch.float32]
    draft = DraftStage(model, tiny_head(model))
    draft.reserve(10)
    draft.run_tokens(IDS[:10])
    draft.draft_logits()
    draft.reserve(3 * SPAN)
    draft.run_tokens(IDS[10:])
    expected = passes(model, [])
    assert torch.equal(draft.exit_hidden(0, LENGTH), expected[0])
    assert torch.equal(draft.draft_logits(), expected[1])


def test_blocks_are_aligned_and_padded_with_zeros():
    seen = []

    def compute(x, block):
        seen.append((block.first, block.slots.start, block.slots.stop, x.clone()))
        return 2 * x

    x = torch.arange(1.0, 8.0)[:, None]
    assert torch.equal(in_blocks(4, 3, x, compute), 2 * x)
    assert [(first, low, high) for first, low, high, _ in seen] == [(0, 3, 4), (4, 0, 4), (8, 0, 2)]
    assert seen[0][3].flatten().tolist() == [0, 0, 0, 1]
    assert seen[2][3].flatten().tolist() == [6, 7, 0, 0]


def test_spans_hold_whole_blocks():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for device in ("cpu", "cuda"):
            assert SPAN % block_rows(dtype, torch.device(device)) == 0
