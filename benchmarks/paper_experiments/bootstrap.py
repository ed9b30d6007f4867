"""How far a figure would have been another with other prompts."""

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

Each = TypeVar("Each")
DRAWS = 2000


def interval(each: Sequence[Each], figure: Callable[[Sequence[Each]], float]) -> str:
    """The figure of all, and 95 % of the figures of as many drawn with replacement."""
    draw = random.Random(1)
    drawn = sorted(figure(draw.choices(each, k=len(each))) for _ in range(DRAWS))
    return f"{figure(each):.2f} ({drawn[DRAWS // 40]:.2f} to {drawn[-DRAWS // 40 - 1]:.2f})"
