"""Stage split: after which layers a model is cut into the stages of a pipeline.

    best_split(LayerCosts((1.0,) * 30, head=0.5, lm_head=4.0), stages=4).sizes  # (8, 8, 9, 5)

Stage 1 drafts: the exit head comes after its last layer, so its boundary is the exit layer; at 0 it is the head alone.
The last stage has the LM head. A pipeline moves at the pace of its slowest stage, so that one is made as fast as can
be; among such splits the sum of all stages, which a rejected draft pays, is the least, and then the sum of their
squares: as even as can be. Where all stages run at one speed, that sum is the same for every split. A link's delay
lengthens a rejection by the same time wherever the cuts are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

from ..errors import UsageError

_Sums = tuple[Fraction, Fraction, tuple[int, ...]]  # of the stages' seconds, and of their squares; where they end


@dataclass(frozen=True)
class LayerCosts:
    """Seconds (or any other unit) for one row: each layer, the exit head, the final norm and LM head."""

    layers: tuple[float, ...]
    head: float = 0.0
    lm_head: float = 0.0

    def __post_init__(self) -> None:
        if len(self.layers) < 2:
            raise UsageError(f"a pipeline needs at least 2 layers, not {len(self.layers)}")
        if not all(0 <= cost < float("inf") for cost in (*self.layers, self.head, self.lm_head)):
            raise UsageError("costs of layers and heads are numbers from 0")

    @property
    def plain(self) -> float:
        """One token of plain decoding, without links."""
        return sum(self.layers) + self.lm_head


@dataclass(frozen=True)
class Split:
    """boundaries: the first layer of each stage but the first, rising; the first of them is the exit layer.
    seconds: of each stage for one row, with the head that it ends in; slowness counted."""

    layers: int
    boundaries: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Layers in each stage."""
        return tuple(b - a for a, b in pairwise((0, *self.boundaries, self.layers)))

    @property
    def exit_layer(self) -> int:
        return self.boundaries[0]

    @property
    def slowest(self) -> float:
        return max(self.seconds)


class _Stages:
    """Exact seconds of any stage. In fractions: floats summed in another order differ, and would hide ties."""

    def __init__(self, costs: LayerCosts, stages: int, slowness: Sequence[float]) -> None:
        if slowness and len(slowness) != stages:
            raise UsageError(f"slowness takes {stages} numbers, one for each stage, not {len(slowness)}")
        if any(not 0 <= value < float("inf") for value in slowness):
            raise UsageError("slowness takes numbers from 0")
        self.count, self.layers = stages, len(costs.layers)
        self._before = [Fraction(0), *accumulate(map(Fraction, costs.layers))]
        self._slowness = [Fraction(value) for value in slowness] or [Fraction(1)] * stages
        self._tails = [Fraction(0)] * stages
        self._tails[0] += Fraction(costs.head)
        self._tails[-1] += Fraction(costs.lm_head)

    def seconds(self, stage: int, first: int, end: int) -> Fraction:
        """Of layers [first, end) as stage `stage`, which is counted from 0."""
        work = self._before[end] - self._before[first] + self._tails[stage]
        return work * self._slowness[stage]


def best_split(costs: LayerCosts, stages: int, exit_layer: int | None = None, slowness: Sequence[float] = ()) -> Split:
    """The split into `stages` stages of at least one layer each.

    exit_layer: where stage 1 ends, if an exit head has settled that; at 0 it has no layer.
    slowness:   how many times longer than `costs` each stage's device takes; none: all take as long.
    """
    layers = len(costs.layers)
    if not 2 <= stages <= layers:
        raise UsageError(f"{layers} layers can be cut into 2 to {layers} stages, not {stages}")
    if exit_layer is not None and not 0 <= exit_layer <= layers - (stages - 1):
        raise UsageError(f"with exit layer {exit_layer}, {layers} layers cannot be cut into {stages} stages")
    work = _Stages(costs, stages, slowness)
    limit = _least(work, exit_layer, Fraction(0), lambda slowest, seconds, _: max(slowest, seconds))

    def extended(before: _Sums, seconds: Fraction, end: int) -> _Sums | None:
        total, squares, ends = before
        return (total + seconds, squares + seconds * seconds, (*ends, end)) if seconds <= limit else None

    boundaries = _least(work, exit_layer, (Fraction(0), Fraction(0), ()), extended)[-1][:-1]
    cuts = pairwise((0, *boundaries, layers))
    return Split(layers, boundaries, tuple(float(work.seconds(s, a, b)) for s, (a, b) in enumerate(cuts)))


def _ends(work: _Stages, stage: int, exit_layer: int | None) -> range:
    """Where stage `stage` may end, so that every later stage has a layer."""
    if stage == work.count - 1:
        return range(work.layers, work.layers + 1)
    if stage == 0 and exit_layer is not None:
        return range(exit_layer, exit_layer + 1)
    return range(1, work.layers - (work.count - 1 - stage) + 1)


def _least(work: _Stages, exit_layer: int | None, start: Any, extended: Callable[[Any, Fraction, int], Any]) -> Any:
    """Dynamic programming: of all splits of [0, end) into stages 0 to s, the least.

    start: of no stages. extended: by a stage that takes so long and ends there; None: it takes too long.
    """
    best = {0: start}
    for stage in range(work.count):
        found: dict[int, Any] = {}
        for end in _ends(work, stage, exit_layer):
            for first, before in best.items():
                if first >= end and stage > 0:  # only the first stage can be without layers, where _ends says so
                    continue
                one = extended(before, work.seconds(stage, first, end), end)
                if one is not None:
                    found[end] = min(found.get(end, one), one)
        best = found
    return best[work.layers]


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
