"""Replicas in simulated time, against what can be worked out by hand."""

from random import Random

import pytest

from ppsd_rt.cli import main as cli
from ppsd_rt.lab.cluster import Replica, Request, Shape, accepted, poisson, quantile, run, users
from ppsd_rt.pipeline.schedule import parse_schedule


def requests(*arrivals, prompt=1, answer=10, **more):
    return [Request(number, arrival, prompt, answer, **more) for number, arrival in enumerate(arrivals)]


def test_one_answer_alone_takes_its_prompt_and_a_pass_for_each_token():
    cluster = run([Replica((0.5,))], requests(2.0, answer=4))
    (answered,) = cluster.answered
    assert (answered.first, answered.ended) == (2.5, 4.0)
    assert (answered.wait, answered.pace) == (0.5, 0.5)


def test_a_long_prompt_takes_passes_of_64_rows():
    cluster = run([Replica((1.0,), row_share=0.1)], requests(0.0, prompt=100, answer=1))
    assert cluster.now == pytest.approx(1 + 0.1 * 63 + 1 + 0.1 * 35)


def test_answers_share_passes_up_to_the_batch():
    both = run([Replica((1.0,), row_share=0.5, batch=2)], requests(0.0, 0.0))
    # The first one's prompt is under way when the second one comes: it waits for that pass.
    assert both.now == pytest.approx(1.0 + 9 * 1.5 + 1.0)
    one_by_one = run([Replica((1.0,), row_share=0.5, batch=1)], requests(0.0, 0.0))
    assert one_by_one.now == pytest.approx(20.0)


def test_right_drafts_come_with_their_pass():
    replica = Replica((1.0,), early=0.1, head=0.05, drafts=3, acceptance=1.0)
    cluster = run([replica], requests(0.0, answer=9))
    assert cluster.now == pytest.approx(1.0 + 2 * (3 * 0.15 + 1.0))  # the prompt's token, and twice four


def test_a_request_goes_to_the_replica_with_the_most_room():
    cluster = run([Replica((1.0,)), Replica((1.0,))], requests(0.0, 0.0, 0.0))
    assert sorted(answered.ended for answered in cluster.answered) == [10.0, 10.0, 20.0]


def test_a_beginning_that_is_known_is_not_computed_again():
    replica = Replica((1.0,), row_share=1.0)
    cluster = run([replica], requests(0.0, 100.0, prompt=50, answer=1, shared=40))
    assert [answered.wait for answered in cluster.answered] == [50.0, 10.0]


def test_by_prefix_beginnings_stay_where_they_are_known():
    """Twelve of them, and room for six on each of three replicas."""
    shape = Shape(prompt=60, answer=5, exact=True, prefixes=12, shared=50)
    asked = poisson(0.01, 300, shape, seed=3)
    replicas = [Replica((0.1,), row_share=1.0, batch=8, prefixes=6)] * 3
    waits = [sum(answered.wait for answered in run(replicas, asked, by_prefix=way).answered) for way in (False, True)]
    assert waits[1] < 0.5 * waits[0]


def test_several_stages_are_the_real_schedulers():
    """Plain decoding is in one stage after the other; overlapped, equal stages and right drafts give a token each."""
    plain = Replica((0.25,) * 4, early=0.25, schedule=parse_schedule("plain"))
    assert run([plain], requests(0.0, answer=5)).now == pytest.approx(5.0)
    ppsd = Replica((0.25,) * 4, early=0.25, acceptance=1.0, schedule=parse_schedule("ppsd"))
    assert run([ppsd], requests(0.0, answer=101)).now == pytest.approx(1.0 + 100 * 0.25, rel=0.05)


def test_batches_keep_all_stages_at_work():
    """Each of 4 stages works on a quarter of the answers."""
    replica = Replica((1.0,) * 4, early=1.0, batch=4)
    cluster = run([replica], requests(0.0, 0.0, 0.0, 0.0, answer=50))
    assert cluster.now == pytest.approx(4 * 50 + 3)
    assert cluster.busy() > 0.95


def test_users_ask_again_when_they_have_read():
    shape = Shape(answer=10, exact=True)
    cluster = run([Replica((0.1,), batch=4)], users(3, 5.0, shape), 60, shape)
    assert len(cluster.answered) == 60
    assert max(sum(a.begun <= b.begun < a.ended for a in cluster.answered) for b in cluster.answered) <= 3


def test_arrivals_and_drafts_have_the_means_that_they_are_said_to_have():
    arrivals = poisson(4.0, 20_000, Shape(answer=50), seed=1)
    assert arrivals[-1].arrival == pytest.approx(5000, rel=0.05)
    assert sum(request.answer for request in arrivals) / 20_000 == pytest.approx(50, rel=0.05)
    together = poisson(4.0, 100, Shape(), burst=10)
    assert len({request.arrival for request in together}) == 10
    rng = Random(1)
    found = [accepted(rng, 3, 0.5) for _ in range(20_000)]
    assert sum(found) / 20_000 == pytest.approx(0.5 + 0.25 + 0.125, rel=0.03)
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0


def test_the_command_prints_a_row_for_every_combination(capsys):
    options = ["--replicas", "1,2", "--users", "2,4", "--drafts", "0,2", "--requests", "40", "-o", "json"]
    assert cli.main(["simulate", "--cluster", "--answer-tokens", "20", *options]) == 0
    import json

    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["replicas"], row["users"], row["drafts"]) for row in rows] == [
        (replicas, asking, drafts) for replicas in (1, 2) for asking in (2, 4) for drafts in (0, 2)
    ]
    assert all(row["over_plain"] == 1.0 for row in rows if row["drafts"] == 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--cluster needs --users or --rate"),
        (["--users", "2", "--rate", "1"], "--cluster needs --users or --rate"),
        (["--users", "2", "--prompt-tokens", "20", "--shared-tokens", "20"], "so there must be fewer"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(options, said, capsys):
    assert cli.main(["simulate", "--cluster", *options]) == 2
    assert said in capsys.readouterr().err
