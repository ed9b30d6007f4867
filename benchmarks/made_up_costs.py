"""Costs of pipelines that are not at hand."""

from ppsd_rt._native import StageCosts
from ppsd_rt.lab.stage_costs import costs_of_stages, growth


def equal_costs(stages: int, token_ms: float, head_ms: float, row_share: float, link_ms: float) -> StageCosts:
    """A model cut into equal stages. row_share: what each further row adds to a pass, of the first one's time."""
    seconds = [token_ms / 1000 / stages] * stages
    return costs_of_stages(seconds, head_ms / 1000, growth(row_share), link_ms / 1000, 0.0)
