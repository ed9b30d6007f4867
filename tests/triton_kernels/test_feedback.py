"""What a feedback head receives: near the twin, from every distance, and nothing from further."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from kernel_support import DEVICE, FORMATS, close, in_format, make, state_of
from kernel_twins import feedback_twin

from ppsd_rt.triton_kernels.feedback import feedback
from ppsd_rt.triton_kernels.linear import Weight

EPS, HIDDEN, DISTANCES = 1e-5, 64, 3


@pytest.mark.parametrize("format", FORMATS)
def test_feedback(format):
    weight = in_format(make(DISTANCES * HIDDEN, HIDDEN, seed=1) / 8, format)
    x, last, norm = make(40, HIDDEN, seed=2), make(40, HIDDEN, seed=3), 1 + 0.1 * make(HIDDEN, seed=4)
    heard = {}
    for rows, start, known in [(1, 9, 9), (1, 10, 9), (3, 9, 9), (4, 9, 9), (2, 0, 0), (5, 20, 22), (16, 3, 18)]:
        clean = last.clone()
        clean[known:] = torch.nan  # rows that no verdict has come to yet
        out = torch.full((16, HIDDEN), 7.0, device=DEVICE)
        feedback(x, clean, norm, EPS, weight, out, state_of(rows, start, known))
        close(out[:rows], feedback_twin(x, last, norm, EPS, weight, start, rows, known))
        assert (out[rows:] == 7.0).all()
        assert torch.equal(out[: rows - 1], x[start : start + rows - 1])
        if known:
            heard[start + rows - known] = not torch.equal(out[rows - 1], x[start + rows - 1])
    assert heard == {1: True, 2: True, 3: True, 4: False}


def test_no_rows():
    out = torch.full((16, HIDDEN), 7.0, device=DEVICE)
    weight = Weight(make(DISTANCES * HIDDEN, HIDDEN))
    feedback(make(40, HIDDEN), make(40, HIDDEN), make(HIDDEN), EPS, weight, out, state_of(0, 9, 9))
    assert (out == 7.0).all()
