"""How a model's layers are cut into stages."""

from collections.abc import Sequence
from itertools import pairwise

from ..errors import UsageError


def is_split(sizes: Sequence[int], stages: int, layers: int, first: int = 1) -> bool:
    """Are these the numbers of layers of so many stages, at least one each, the first at least `first`?"""
    return len(sizes) == stages > 0 and sizes[0] >= first and min(sizes[1:], default=1) >= 1 and sum(sizes) == layers


def cut_layers(first: int, last: int, stages: int | Sequence[int]) -> list[int]:
    """Where the verification layers [first, last) are cut: as evenly as can be, or at the layers that are given."""
    count = last - first
    if isinstance(stages, int):
        if stages < 1:
            raise UsageError(f"stages must be at least 1, not {stages}")
        if stages > count:
            raise UsageError(
                f"{stages} verification stages are more than the {count} layers that verify; lower --stages"
            )
        return [first + count * stage // stages for stage in range(1, stages)]
    cuts = list(stages)
    if any(low >= high for low, high in pairwise([first, *cuts, last])):
        raise UsageError(f"verification, layers {first} to {last}, cannot be cut at the layers {cuts}")
    return cuts
