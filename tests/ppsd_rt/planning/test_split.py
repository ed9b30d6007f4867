"""The stage split against every split there is."""

from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppsd_rt.errors import UsageError
from ppsd_rt.planning.split import LayerCosts, best_split, given_split

seconds = st.one_of(st.integers(0, 5).map(float), st.floats(0, 10))


def every_split(costs, stages, exit_layer, slowness, sends):
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
            times.append(work * Fraction(slowness[stage]) + Fraction(sends[stage]))
        found.append((max(times), sum(times), sum(t * t for t in times), cuts))
    return found


@settings(max_examples=80, deadline=None)
@given(data=st.data(), layers=st.lists(seconds, min_size=2, max_size=9), head=seconds, lm_head=seconds)
def test_no_split_is_better(data, layers, head, lm_head):
    costs = LayerCosts(tuple(layers), head, lm_head)
    stages = data.draw(st.integers(2, len(layers)))
    exit_layer = data.draw(st.none() | st.integers(0, len(layers) - stages + 1))
    slowness = data.draw(st.lists(st.floats(0.5, 4), min_size=stages, max_size=stages))
    sends = data.draw(st.lists(seconds, min_size=stages, max_size=stages))
    got = best_split(costs, stages, exit_layer, slowness, sends)
    slowest, _, _, boundaries = min(every_split(costs, stages, exit_layer, slowness, sends))
    assert got.boundaries == boundaries
    assert got.slowest == float(slowest)
    assert given_split(costs, got.sizes, slowness, sends) == got


def test_equal_layers_are_cut_evenly():
    assert best_split(LayerCosts((1.0,) * 30), 3).sizes == (10, 10, 10)
    assert sorted(best_split(LayerCosts((0.1,) * 30), 4).sizes) == [7, 7, 8, 8]


def test_heads_take_the_place_of_layers():
    split = best_split(LayerCosts((1.0,) * 30, head=2.0, lm_head=4.0), 4)
    assert split.sizes == (7, 9, 9, 5)
    assert split.seconds == (9, 9, 9, 9)
    assert split.exit_layer == 7


def test_what_a_large_lm_head_leaves_free_is_shared_out_evenly():
    """The last stage is the slowest whatever the others do: they are still made even."""
    assert best_split(LayerCosts((1.0,) * 7, lm_head=20.0), 3).sizes == (3, 3, 1)


def test_the_exit_layer_stays_where_the_head_was_trained():
    split = best_split(LayerCosts((1.0,) * 30, head=1.0, lm_head=3.0), 4, exit_layer=3)
    assert split.sizes == (3, 10, 10, 7)
    assert split.seconds == (4, 10, 10, 10)


def test_slow_devices_and_dear_messages_get_fewer_layers():
    assert best_split(LayerCosts((1.0,) * 9), 2, slowness=(1.0, 2.0)).sizes == (6, 3)
    assert best_split(LayerCosts((1.0,) * 9), 2, sends=(3.0, 0.0)).sizes == (3, 6)


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
        lambda: best_split(costs, 2, sends=(-1.0, 0.0)),
        lambda: given_split(costs, (5,)),
        lambda: given_split(costs, (5, 0)),
        lambda: given_split(costs, (-1, 6)),
        lambda: given_split(costs, (0, 0, 5)),
        lambda: given_split(costs, (2, 2)),
        lambda: LayerCosts((1.0,)),
        lambda: LayerCosts((1.0, float("nan"))),
        lambda: LayerCosts((1.0, 1.0), head=-1.0),
    ):
        with pytest.raises(UsageError):
            call()
