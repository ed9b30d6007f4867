"""Feedback heads: the same drafts from C++ and torch, and never another answer."""

import pytest
import torch
from support import loud_head, slow, tiny_head, tiny_model

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.backend import RunOptions
from ppsd_rt.generation import Committed
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.exit_head import ExitHead, Feedback
from ppsd_rt.models.head_file import DISTANCES
from ppsd_rt.pipeline.rounds import Drafted


@pytest.fixture(params=[(2, (0, 0)), (2, (32, 32)), slow((0, (0, 0)))])
def shape(request):
    """Exit layer 0: the head reads the embeddings, no layer of the model drafts. sizes: of a narrow head."""
    exit_layer, sizes = request.param
    return {"exit_layer": exit_layer, "sizes": sizes}


def drafts_of(folder, path, backend, schedule, threads=1):
    """[(position, draft token)], and the committed tokens."""
    engine = Engine.from_pretrained(folder, exit_head=path, backend=backend, dtype="float32", threads=threads)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    events = list(engine.generate("Hello, world", params, schedule, RunOptions(report_drafts=True)).events())
    drafted = [(event.position, event.token) for event in events if isinstance(event, Drafted)]
    return drafted, [token.id for event in events if isinstance(event, Committed) for token in event.tokens]


@pytest.mark.parametrize("length", [1, 3, 8])  # 8: beyond the farthest distance
def test_cpp_drafts_what_torch_drafts(folder, tmp_path, length, shape):
    path = tmp_path / "head.safetensors"
    loud_head(Checkpoint(folder).hash, **shape).save(path, torch.float32)
    schedule = f"eesd:length={length},stop_rule=fixed"
    native, answer = drafts_of(folder, path, "cpu", schedule, threads=2)
    twin, same = drafts_of(folder, path, "torch", schedule)
    assert native == twin
    assert answer == same
    loud_head(Checkpoint(folder).hash, strength=0.0, **shape).save(path, torch.float32)
    deaf, answer = drafts_of(folder, path, "cpu", schedule)
    assert answer == same
    assert deaf != native


def test_whole_texts_hear_what_single_rows_hear(folder):
    feedback: Feedback = loud_head(Checkpoint(folder).hash).feedback
    x, last = torch.randn(2, 1, 12, 64, generator=torch.Generator().manual_seed(0))
    distances = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 0, 1, 9, 3, 12]])
    heard = feedback.along(x, last, distances)
    for row, distance in enumerate(distances[0].tolist()):
        within = 1 <= distance <= DISTANCES and distance <= row
        expected = feedback(x[0, row], last[0, row - distance], distance) if within else x[0, row]
        torch.testing.assert_close(heard[0, row], expected)


def test_a_fresh_head_hears_nothing():
    model = tiny_model()
    head = tiny_head(model, "feedback")
    assert isinstance(head, ExitHead)
    x, last = torch.randn(2, 1, 5, 64)
    assert torch.equal(head.feedback.along(x, last, torch.ones(1, 5, dtype=torch.int64)), x)
