"""Costs of simulated stages, from layers that were measured or made up.

A pass over n rows takes `growth[n - 1]` times as long as a pass over one, in every layer alike: on a memory-bound
device little more than 1, for the weights are read once whatever n is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .._native import Costs, StageCosts
from ..errors import UsageError
from ..pipeline.schedule import MAX_ROWS
from ..planning.split import LayerCosts, Split, best_split
from .simulate import Table, pipeline_costs


def growth(share: float) -> Table:
    """Every row after the first adds this share of the first."""
    return tuple(1 + share * (rows - 1) for rows in range(1, MAX_ROWS + 1))


def costs_of_stages(seconds: Sequence[float], head: float, growth: Table, links: float, link_row: float) -> StageCosts:
    """seconds: of each stage for one row, the draft stage first, without the exit head."""
    if len(seconds) < 2:
        raise UsageError(f"a pipeline has a draft stage and at least one verification stage, not {len(seconds)} stages")
    step, *verify = (tuple(stage * factor for factor in growth) for stage in seconds)
    return pipeline_costs(step, head, verify, links, link_row=link_row)


@dataclass(frozen=True)
class ModelCosts:
    """Layers to be cut; exit_layer: where the draft stage ends, if an exit head has settled that."""

    layers: LayerCosts
    growth: Table
    exit_layer: int | None = None

    def cut(self, stages: int) -> Split:
        """Into so many stages as is best."""
        return best_split(self.layers, stages, self.exit_layer)

    def costs(self, split: Split, links: float, link_row: float) -> StageCosts:
        first, *others = split.seconds
        return costs_of_stages([first - self.layers.head, *others], self.layers.head, self.growth, links, link_row)


def measured(costs: Costs, exit_layer: int, layers: int) -> ModelCosts:
    """From a calibration of this machine: every stage is a machine like this one, with all its threads.

    A calibration times layers [0, E) for one row, and layers [E, L) with the LM head for 1 to 16 rows. A layer is taken
    to cost the same everywhere; the LM head is what is left of a pass. The growth with rows is that of such a pass.
    With exit layer 0 no layer was timed alone: each gets an equal share of a pass, the LM head included.
    """
    one, *_ = verify = costs.turns.verify[:MAX_ROWS]
    early = costs.turns.row_step / exit_layer if exit_layer else one
    late = min(early, one / (layers - exit_layer))
    per_layer = (early,) * exit_layer + (late,) * (layers - exit_layer)
    head = max(costs.turns.draft_step - costs.turns.row_step, 0.0)
    lm_head = max(one - late * (layers - exit_layer), 0.0)
    return ModelCosts(LayerCosts(per_layer, head, lm_head), tuple(seconds / one for seconds in verify), exit_layer)
