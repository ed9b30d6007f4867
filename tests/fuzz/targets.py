"""Every target by its name: how its inputs are made, and what is done with one (-> the kind of outcome).

Inputs are bytes, texts, or lists, tuples and dicts of them and of numbers: `ast.literal_eval` reads back their `repr`.
"""

from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from . import combined, command_line, differential, file_targets, rank_targets, text_targets
from .place import Place

Target = tuple[Callable[[Place], st.SearchStrategy[Any]], Callable[[Place, Any], str]]

TARGETS: dict[str, Target] = {
    **file_targets.TARGETS,
    **text_targets.TARGETS,
    **rank_targets.TARGETS,
    **command_line.TARGETS,
    **combined.TARGETS,
    **differential.TARGETS,
}


def examples(place: Place, name: str, count: int, seed: int | None, try_one: Callable[[Any], None]) -> None:
    """Calls `try_one` with made inputs; where it raises, with ever smaller ones, and raises what the smallest raised.

    seed: None: the same inputs every time.
    """
    strategy = TARGETS[name][0](place)
    quiet = settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=seed is None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )

    @quiet
    @given(strategy)
    def trying(value: Any) -> None:
        try_one(value)

    (trying if seed is None else hypothesis.seed(seed)(trying))()
