"""LM head and exit head: logits near the twin, choices by the same noise, the same bits in any pass."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import noise_twin
import triton
import triton.language as tl
from kernel_support import DEVICE, close, in_format, make, state_of
from kernel_twins import embedding_twin, heads_twin
from support import slow

import ppsd_rt.triton_kernels.heads as heads_module
from ppsd_rt.sampling.params import SamplingParams
from ppsd_rt.triton_kernels.embedding import embedding
from ppsd_rt.triton_kernels.heads import Scratch, heads, sampling_words
from ppsd_rt.triton_kernels.linear import Weight
from ppsd_rt.triton_kernels.noise import gumbel, uniform

EPS = 1e-5
SEED = 0x1234_5678_9ABC_DEF0


@triton.jit
def noise_kernel(uniforms, gumbels, ids, position, low, high, N: tl.constexpr):
    lane = tl.arange(0, N)
    numbers = tl.load(ids + lane)
    where = tl.load(position) + lane * 0
    key = tl.load(low).to(tl.uint32, bitcast=True), tl.load(high).to(tl.uint32, bitcast=True)
    tl.store(uniforms + lane, uniform(key[0], key[1], where, numbers))
    tl.store(gumbels + lane, gumbel(key[0], key[1], where, numbers))


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 5), (SEED, 8191), (2**64 - 1, 2**31 - 1)])
def test_noise_is_the_same_as_on_the_cpu(seed, position):
    ids = torch.cat([torch.arange(4080), torch.arange(128240, 128256)]).to(torch.int32).to(DEVICE)
    words = sampling_words(SamplingParams(seed=seed), DEVICE)
    uniforms, gumbels = torch.zeros(2, len(ids), device=DEVICE)
    place = torch.tensor([position], dtype=torch.int32, device=DEVICE)
    noise_kernel[(1,)](uniforms, gumbels, ids, place, words, words[1:], N=len(ids))
    numbers = ids.cpu().numpy()
    assert np.array_equal(uniforms.cpu().numpy(), noise_twin.uniform(seed, position, numbers)), "to the bit"
    expected = noise_twin.gumbel(seed, position, numbers)
    assert np.abs(gumbels.cpu().numpy() - expected).max() < 4e-6


def sampling_of(temperature, seed=SEED):
    return sampling_words(SamplingParams(temperature=temperature, seed=seed), DEVICE)


def head_of(outputs, hidden, format="fp32"):
    """Logits with a spread of about 2."""
    weight = 0.3 * make(outputs, hidden, seed=1)
    return 1 + 0.1 * make(hidden, seed=2), in_format(weight, format)


def run(x, norm, weight, rows, start, sampling, **more):
    choices = torch.full((16,), -1, dtype=torch.int32, device=DEVICE)
    confidences = torch.full((16,), -1.0, device=DEVICE)
    heads(x, norm, EPS, weight, sampling, Scratch(weight), choices, confidences, state_of(rows, start), **more)
    assert (choices[rows:] == -1).all()
    assert (confidences[rows:] == -1).all()
    return choices[:rows], confidences[:rows]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft", [False, True], ids=["whole", "draft"])
@pytest.mark.parametrize(
    ("outputs", "hidden", "format"),
    [(96, 64, "fp32"), slow(259, 96, "int8"), slow(259, 96, "int4"), slow(259, 96, "fp8")],
)
def test_heads(outputs, hidden, format, temperature, draft):
    norm, weight = head_of(outputs, hidden, format)
    draft_ids = torch.arange(outputs, dtype=torch.int32, device=DEVICE) * 3 + 1 if draft else None
    sampling, x, start = sampling_of(temperature), make(16, hidden, seed=3), 20
    twins = heads_twin(x, norm, EPS, weight, start, seed=SEED, temperature=temperature, draft_ids=draft_ids)
    whole = None
    for rows in (16, 3, 1):
        logits = torch.full((16, outputs), torch.nan, device=DEVICE)
        choices, confidences = run(x, norm, weight, rows, start, sampling, logits=logits, draft_ids=draft_ids)
        close(logits[:rows], twins[3][:rows])
        assert logits[rows:].isnan().all()
        close(confidences, twins[1][:rows])
        assert choices.tolist() == twins[0][:rows].tolist()
        found = (choices, confidences, logits[:rows])
        whole = whole or found
        assert all(torch.equal(part, all_of_it[:rows]) for part, all_of_it in zip(found, whole, strict=True))
    found = run(x, norm, weight, 16, start, sampling, draft_ids=draft_ids)
    assert torch.equal(found[0], whole[0]), "logits need not be stored"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_outputs_without_an_id_are_not_there(temperature):
    """A whole program of them too."""
    norm, weight = head_of(96, 64)
    sampling, x = sampling_of(temperature), make(16, 64, seed=3)
    ids = torch.arange(96, dtype=torch.int32, device=DEVICE) * 3 + 1
    there = [*range(30), 40, 41]
    some = torch.full_like(ids, -1)
    some[there] = ids[there]
    found = run(x, norm, weight, 7, 20, sampling, draft_ids=some)
    few = run(x, norm, weight.rows(torch.tensor(there)), 7, 20, sampling, draft_ids=ids[there])
    assert torch.equal(found[0], few[0])
    close(found[1], few[1])


def test_a_row_chooses_by_its_position_alone():
    """Row 5 of one pass and row 0 of another, at the same position, see the same noise."""
    norm, weight = head_of(96, 64)
    sampling, x = sampling_of(1.5), make(16, 64, seed=3)
    together = run(x, norm, weight, 16, 100, sampling)
    for r in (0, 5, 15):
        alone = run(x[r:], norm, weight, 1, 100 + r, sampling)
        assert alone[0].item() == together[0][r].item()
        assert alone[1].item() == together[1][r].item()
    same = x[:1].expand(16, -1).contiguous()
    assert len(set(run(same, norm, weight, 16, 100, sampling)[0].tolist())) > 4, "positions differ in their noise"


def test_of_equal_logits_the_lowest_id_wins(monkeypatch):
    monkeypatch.setattr(heads_module, "BATCH", 4)
    norm, weight = torch.ones(64, device=DEVICE), Weight(torch.zeros(200, 64, device=DEVICE))
    x = make(16, 64).round().abs()  # small whole numbers: no rounding, so that equal weights do give equal logits
    for winners in ([12, 15, 190], [15, 16], [199], range(200)):  # in one program, in two, in the last
        weight.values.zero_()
        weight.values[list(winners)] = 0.5
        choices, confidences = run(x, norm, weight, 2, 0, sampling_of(0.0))
        assert choices.tolist() == [winners[0]] * 2
        assert (confidences <= 1 / len(winners) + 1e-6).all()


def test_more_programs_than_one_batch_holds(monkeypatch):
    monkeypatch.setattr(heads_module, "BATCH", 4)
    norm, weight = head_of(16 * 9 + 3, 64)
    x, sampling = make(16, 64, seed=3), sampling_of(0.6, seed=7)
    twins = heads_twin(x, norm, EPS, weight, 4, seed=7, temperature=0.6)
    choices, confidences = run(x, norm, weight, 16, 4, sampling)
    assert choices.tolist() == twins[0].tolist()
    assert len(set((choices // 64).tolist())) == 3, "winners in every batch"
    close(confidences, twins[1])


def test_embedding():
    text = torch.tensor([3, 0, 6, 6, 1] * 8, dtype=torch.int32, device=DEVICE)
    table = make(7, 96)
    for start, rows in [(0, 1), (3, 16), (24, 16)]:
        x = torch.full((16, 96), torch.nan, device=DEVICE)
        rounded = torch.full((16, 96), torch.nan, device=DEVICE)
        embedding(text, table, x, rounded, state_of(rows, start))
        for part in (x, rounded):
            assert torch.equal(part[:rows], embedding_twin(text, table, start, rows))
            assert part[rows:].isnan().all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", [False, True], ids=["whole", "draft"])
def test_logits_that_are_no_numbers_choose_nothing(temperature, draft):
    """All of a row, or one: NaN, or infinite of either sign. Other rows choose as ever."""
    norm, weight = head_of(96, 64)
    draft_ids = torch.arange(96, dtype=torch.int32, device=DEVICE) * 3 + 1 if draft else None
    sampling, x = sampling_of(temperature), make(4, 64, seed=3)
    sound = run(x, norm, weight, 4, 20, sampling, draft_ids=draft_ids)
    assert (sound[0] >= 0).all()
    strange = x.clone()
    strange[1] = torch.nan
    choices, confidences = run(strange, norm, weight, 4, 20, sampling, draft_ids=draft_ids)
    assert (choices[1], confidences[1]) == (-1, 0)
    others = [0, 2, 3]
    assert choices[others].tolist() == sound[0][others].tolist()
    assert confidences[others].tolist() == sound[1][others].tolist()
    table = 0.3 * make(96, 64, seed=1)
    table[7] = 3e38
    choices, confidences = run(x, norm, in_format(table, "fp32"), 4, 20, sampling, draft_ids=draft_ids)
    assert choices.tolist() == [-1] * 4
    assert confidences.tolist() == [0] * 4
