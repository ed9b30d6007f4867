"""The stage split against every split there is."""

from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from ppsd_rt.pipeline.split import best_split

units = st.integers(0, 9)  # whole numbers: sums are exact, and ties are ties


@settings(max_examples=200, deadline=None)
@given(data=st.data(), layers=st.integers(2, 10), layer=units, head=units, lm_head=units, fixed=st.booleans())
def test_no_split_is_better(data, layers, layer, head, lm_head, fixed):
    stages = data.draw(st.integers(2, layers))
    first = data.draw(st.integers(0 if fixed else 1, layers - stages + 1))
    slowness = data.draw(st.none() | st.lists(st.integers(1, 4), min_size=stages, max_size=stages)) or [1] * stages

    def cost(sizes):
        ends = [head, *[0] * (stages - 2), lm_head]
        times = [slow * (count * layer + end) for slow, count, end in zip(slowness, sizes, ends, strict=True)]
        return max(times), sum(times), sum(time * time for time in times)

    cuts = combinations(range(first, first + 1 if fixed else layers), 1)
    every = [
        tuple(b - a for a, b in pairwise((0, cut, *others, layers)))
        for (cut,) in cuts
        for others in combinations(range(cut + 1, layers), stages - 2)
    ]
    found = best_split(
        layers, stages, layer=layer, head=head, lm_head=lm_head, first=first, fixed=fixed, slowness=slowness
    )
    assert found in every
    assert cost(found) == min(map(cost, every))


def test_the_default_models():
    assert best_split(30, 4, layer=1.0, head=0.5, lm_head=4.0) == (8, 8, 9, 5)
