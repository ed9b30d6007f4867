"""The hidden states that a pass begins with.

x[r] = E[text[start + r]]          text [capacity] int32, E [vocabulary, hidden], x [capacity or 16, hidden] float32

And where the first layer reads them, [16, hidden] in the type that it multiplies.
"""

import triton
import triton.language as tl
from torch import Tensor

from .linear import at_positions, placed
from .ptx import gdc_launch_dependents, gdc_wait
from .state import MAX_ROWS, ROWS, START

_ROWS, _START = tl.constexpr(ROWS), tl.constexpr(START)


@triton.jit
def embedding_kernel(
    text, table, x, rounded, state, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, AT: tl.constexpr, PDL: tl.constexpr
):
    """Grid (16, hidden / BLOCK)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if row < tl.load(state + _ROWS):
        # Another stream may have written the text since this multiprocessor last read it.
        token = tl.load(text + tl.load(state + _START) + row, volatile=True).to(tl.int64)
        values = tl.load(table + token * HIDDEN + channel, mask=channel < HIDDEN, other=0)
        x = placed(x, state, HIDDEN, AT)
        tl.store(x + row * HIDDEN + channel, values.to(x.dtype.element_ty), mask=channel < HIDDEN)
        tl.store(rounded + row * HIDDEN + channel, values.to(rounded.dtype.element_ty), mask=channel < HIDDEN)


def embedding(text: Tensor, table: Tensor, x: Tensor, rounded: Tensor, state: Tensor, *, pdl: bool = False) -> None:
    hidden = table.shape[1]
    embedding_kernel[(MAX_ROWS, triton.cdiv(hidden, 1024))](
        text, table, x, rounded, state,
        HIDDEN=hidden, BLOCK=1024, AT=at_positions(x), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
