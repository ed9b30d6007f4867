"""Which answers teach one planner."""

from dataclasses import replace

from ppsd_rt._native import Costs, StageCosts
from ppsd_rt.backend import Oracle
from ppsd_rt.models.head_file import HeadInfo
from ppsd_rt.pipeline.schedule import MAX_ROWS, Auto
from ppsd_rt.planning.planner import PlannerPool, kind_of
from ppsd_rt.sampling.params import SamplingParams

GREEDY, AUTO = SamplingParams(), Auto()


def test_what_tells_answers_apart():
    kinds = [
        kind_of(AUTO, GREEDY),
        kind_of(AUTO, SamplingParams(temperature=0.7)),
        kind_of(replace(AUTO, lookup=0), GREEDY),
        kind_of(replace(AUTO, recycle=False), GREEDY),
        kind_of(AUTO, GREEDY, siblings=False),
        kind_of(AUTO, GREEDY, Oracle((1, 2), 0.5)),
        kind_of(AUTO, GREEDY, Oracle((1, 2), 0.5, second=0.5)),
        kind_of(AUTO, GREEDY, Oracle((1, 2), 0.8)),
    ]
    assert len(set(kinds)) == len(kinds)
    assert kind_of(AUTO, SamplingParams(seed=3, max_tokens=9)) == kinds[0]


def test_a_backend_that_cannot_is_not_asked_to():
    assert not kind_of(
        AUTO, SamplingParams(repetition_penalty=1.2)
    ).siblings  # a sibling's row would change the penalty
    oracle = kind_of(AUTO, GREEDY, Oracle((1, 2), 0.5))
    assert (oracle.lookup, oracle.recycle, oracle.siblings) == (0, False, False)


def test_a_kind_keeps_its_planner_until_the_costs_change():
    pool, costs = PlannerPool(), Costs(StageCosts(0.001, 0.002, [0.01] * MAX_ROWS))
    head = HeadInfo("layer", 2, "model", "hash")
    greedy = pool.planner(kind_of(AUTO, GREEDY), costs, head)
    sampled = pool.planner(kind_of(AUTO, SamplingParams(temperature=1.0)), costs, head)
    assert greedy is not sampled and pool.used is sampled
    assert pool.planner(kind_of(AUTO, GREEDY), costs, head) is greedy
    pool.clear()
    assert pool.planner(kind_of(AUTO, GREEDY), costs, head) is not greedy
