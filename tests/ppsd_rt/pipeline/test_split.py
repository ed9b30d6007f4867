"""The stage split against every split there is."""

from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppsd_rt.errors import UsageError
from ppsd_rt.pipeline.split import LayerCosts, best_split

seconds = st.one_of(st.integers(0, 5).map(float), st.floats(0, 10))


def every_split(costs, stages, exit_layer, slowness):
    """[(slowest, sum, sum of squares, boundaries)], exactly, written out for each of them."""
    count = len(costs.layers)
    found = []
    for cuts in combinations(range(1 if exit_layer else 0, count), stages - 1):
        if cuts[0] != exit_layer if exit_layer is not None else cuts[0] == 0:
            continue
        times = []
        for stage, (first, end) in enumerate(pairwise((0, *cuts, count))):
            work = sum(map(Fraction, costs.layers[first:end]))
            work += Fraction(costs.head) if stage == 0 else 0
            work += Fraction(costs.lm_head) if stage == stages - 1 else 0
            times.append(work * Fraction(slowness[stage]))
        found.append((max(times), sum(times), sum(t * t for t in times), cuts))
    return found


@settings(max_examples=80, deadline=None)
@given(data=st.data(), layers=st.lists(seconds, min_size=2, max_size=9), head=seconds, lm_head=seconds)
def test_no_split_is_better(data, layers, head, lm_head):
    costs = LayerCosts(tuple(layers), head, lm_head)
    stages = data.draw(st.integers(2, len(layers)))
    exit_layer = data.draw(st.none() | st.integers(0, len(layers) - stages + 1))
    slowness = data.draw(st.lists(st.floats(0.5, 4), min_size=stages, max_size=stages))
    got = best_split(costs, stages, exit_layer, slowness)
    slowest, _, _, boundaries = min(every_split(costs, stages, exit_layer, slowness))
    assert got.boundaries == boundaries
    assert got.slowest == float(slowest)


def test_a_large_model_takes_no_time():
    split = best_split(LayerCosts(tuple(0.01 + 1e-5 * i for i in range(80)), 0.02, 0.05), 16)
    assert sum(split.sizes) == 80
    assert len(split.sizes) == 16


def test_bad_values():
    costs = LayerCosts((1.0,) * 5)
    for call in (
        lambda: best_split(costs, 1),
        lambda: best_split(costs, 6),
        lambda: best_split(costs, 3, exit_layer=-1),
        lambda: best_split(costs, 3, exit_layer=4),
        lambda: best_split(costs, 2, slowness=(1.0,)),
        lambda: best_split(costs, 2, slowness=(-1.0, 0.0)),
        lambda: LayerCosts((1.0,)),
        lambda: LayerCosts((1.0, float("nan"))),
        lambda: LayerCosts((1.0, 1.0), head=-1.0),
    ):
        with pytest.raises(UsageError):
            call()
