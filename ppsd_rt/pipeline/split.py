"""Stage split: after which layers a model is cut into the stages of a pipeline.

    best_split(30, 4, layer=1.0, head=0.5, lm_head=4.0)  # (8, 8, 9, 5)

Stage 1 drafts: the exit head comes after its last layer, so its boundary is the exit layer; at 0 it is the head alone.
The last stage has the LM head. A pipeline moves at the pace of its slowest stage, so that one is made as fast as can
be; among such splits the sum of all stages, which a rejected draft pays, is the least, and then the sum of their
squares: as even as can be. Where all stages run at one speed, that sum is the same for every split. A link's delay
lengthens a rejection by the same time wherever the cuts are.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from ..errors import UsageError


def best_split(
    layers: int,
    stages: int,
    *,
    layer: float,
    head: float = 0.0,
    lm_head: float = 0.0,
    first: int = 1,
    fixed: bool = False,
    slowness: Sequence[float] = (),
) -> tuple[int, ...]:
    """Layers of each of 2 stages or more: the first has `first` or, unless that is `fixed`, more, the others 1 or more.

    layer, head, lm_head: seconds (or any other unit) for one row. slowness: how many times longer each stage's device
    takes; none: all take as long.
    """
    ends, slow = [head, *[0.0] * (stages - 2), lm_head], slowness or [1.0] * stages

    def seconds(stage: int, count: int) -> float:
        return slow[stage] * (count * layer + ends[stage])

    def filled(cost: Callable[[int, int], Any]) -> list[int]:
        """One layer after the other goes where it costs least, of alike ones to the last.

        That is exact: each next one costs a stage more.
        """
        sizes = [first, *[1] * (stages - 1)]
        for _ in range(layers - sum(sizes)):
            stage = min(reversed(range(fixed, stages)), key=lambda stage: cost(stage, sizes[stage] + 1))
            sizes[stage] += 1
        return sizes

    slowest = max(map(seconds, range(stages), filled(seconds)))
    return tuple(filled(lambda stage, count: (seconds(stage, count) > slowest, slow[stage], seconds(stage, count))))


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
