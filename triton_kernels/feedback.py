"""What a feedback head receives: the last layer's hidden state of the newest verified row, by its distance.

    y[r] = x[start + r] (+ W_d norm(h[v]), for the last row r)     v = known - 1, d = start + r - v, from 1 to DISTANCES

    x, h [capacity, hidden] float32: exit hidden states, and what the last layer left; W [DISTANCES * hidden, hidden],
    the matrices one below the other; y [16, hidden] float32

Rows before `known`, where the answer stood when the draft step began, have been verified. Nothing waits for h: a step
takes what there is, and beyond DISTANCES rows it does without.
"""

import triton
import triton.language as tl
from torch import Tensor

from .linear import Weight, below, first_tiles, launch, product, program_outputs, tiling
from .ptx import gdc_launch_dependents, gdc_wait
from .state import KNOWN, MAX_ROWS, ROWS, START

_ROWS, _START, _KNOWN = tl.constexpr(ROWS), tl.constexpr(START), tl.constexpr(KNOWN)
_MAX_ROWS = tl.constexpr(MAX_ROWS)


@triton.jit
def feedback_kernel(
    x, last_hidden, norm, eps, weight, scale, out, state, DISTANCES: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Grid (hidden / W.block). Which matrix it takes is known only when the kernel ahead has ended."""
    if W.pdl:
        gdc_wait()
        gdc_launch_dependents()
    HIDDEN: tl.constexpr = W.inputs
    rows, start = tl.load(state + _ROWS), tl.load(state + _START)
    verified = tl.load(state + _KNOWN) - 1
    distance = start + rows - 1 - verified
    outputs, row = tl.program_id(0) * W.block + tl.arange(0, W.block), tl.arange(0, _MAX_ROWS)[None, :]
    live = outputs < HIDDEN
    mask = live[:, None] & (row < rows)
    y = tl.load(x + (start + row) * HIDDEN + outputs[:, None], mask=mask, other=0)
    if (rows > 0) & (verified >= 0) & (distance >= 1) & (distance <= DISTANCES):
        chosen = tl.program_id(0) * W.block + program_outputs(W)
        here = below(chosen, HIDDEN, W.block)
        chosen += (distance - 1) * HIDDEN
        tiles, words, scales = first_tiles(weight, scale, chosen, here, 0, HIDDEN, W)
        heard = product(
            tiles, words, scales, here, last_hidden + verified * HIDDEN, norm, eps, 1, 0, HIDDEN, W, True
        )  # fmt: skip
        heard = tl.sum(tl.where(row == 0, heard, 0.0), axis=1)  # of the one column that is there
        y += tl.where(row == rows - 1, heard[:, None], 0.0)
    tl.store(out + row * HIDDEN + outputs[:, None], y, mask=mask)


def feedback(
    x: Tensor, last_hidden: Tensor, norm: Tensor, eps: float, weight: Weight, out: Tensor, state: Tensor,
    *, pdl: bool = False,
) -> None:  # fmt: skip
    hidden = x.shape[1]
    one = weight._replace(values=weight.values[:hidden])
    cut = tiling(one)._replace(splits=1)
    how = launch(one, cut, x, pdl=False)  # its weights come after the wait: no longer way ahead
    how |= {"W": how["W"]._replace(pdl=pdl), "launch_pdl": pdl}
    if one.format in ("int8", "fp8"):
        how["maxnreg"] = 168  # as in `launch`
    feedback_kernel[(triton.cdiv(hidden, cut.block),)](
        x, last_hidden, norm, eps, weight.values, weight.scales, out, state,
        DISTANCES=weight.outputs // hidden, **how,
    )  # fmt: skip
