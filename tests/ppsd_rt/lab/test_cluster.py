"""Replicas in simulated time, against what can be worked out by hand."""

import json
from pathlib import Path
from statistics import fmean

import pytest

from ppsd_rt.cli import main as cli
from ppsd_rt.lab.cluster import Cluster, Replica, Request, Shape, poisson


def run(replicas, asked, **how):
    return Cluster(replicas, **how).run(asked)


def requests(*arrivals, prompt=1, answer=10, **more):
    return [Request(number, arrival, prompt, answer, **more) for number, arrival in enumerate(arrivals)]


def test_one_answer_alone_takes_its_prompt_and_a_pass_for_each_token():
    cluster = run([Replica((0.5,))], requests(2.0, answer=4))
    (answered,) = cluster.answered
    assert (answered.first, answered.ended) == (2.5, 4.0)
    assert (answered.wait, answered.pace) == (0.5, 0.5)
    assert run([Replica((1.0,), early=0.4, row_share=0.5)], requests(0.0, prompt=3, answer=1)).now == pytest.approx(2.0)


def test_answers_share_passes_up_to_the_batch():
    both = run([Replica((1.0,), row_share=0.5, batch=2)], requests(0.0, 0.0))
    # The first one's prompt is under way when the second one comes: it waits for that pass.
    assert both.now == pytest.approx(1.0 + 9 * 1.5 + 1.0)
    one_by_one = run([Replica((1.0,), row_share=0.5, batch=1)], requests(0.0, 0.0))
    assert one_by_one.now == pytest.approx(20.0)


def test_by_prefix_beginnings_stay_where_they_are_known():
    """Twelve of them, and room for six on each of three replicas."""
    shape = Shape(prompt=60, answer=5, exact=True, prefixes=12, shared=50)
    asked = poisson(0.01, 300, shape, seed=3)
    replicas = [Replica((0.1,), row_share=1.0, batch=8, prefixes=6)] * 3
    waits = [sum(answered.wait for answered in run(replicas, asked, by_prefix=way).answered) for way in (False, True)]
    assert waits[1] < 0.5 * waits[0]


def test_no_pass_takes_more_than_its_share_of_the_answers():
    """However large the batch may be: four answers are four passes, and only a fifth one makes passes of two."""
    replica = Replica((1.0,) * 4, early=1.0, row_share=0.5, batch=64)
    assert run([replica], requests(0.0, 0.0, 0.0, 0.0, answer=50)).now == pytest.approx(4 * 50 + 3)
    five = run([replica], requests(*[0.0] * 5, answer=50)).now
    assert 1.2 * (4 * 50 + 3) < five < 1.6 * (4 * 50 + 3)


SLEEPING = Path(__file__, "../../../../benchmarks/results/2026-11-26-intel-xeon-5-sleeping-loop.json").resolve()


def test_it_predicts_what_ranks_with_many_answers_did():
    """The last column in docs/guide/scale.md. What messages take is from the runs of one answer at a time."""
    said = json.loads(SLEEPING.read_text())
    token, tokens, share = said["options"]["token_ms"] / 1000, said["options"]["tokens"], said["options"]["row_share"]
    plain = [row for row in said["runs"] if row["schedule"] == "plain"]
    over = {}
    for row in plain:
        stages, clients = row["stages"], row["clients"]
        if row["in_turn"]:
            late = (1 / row["tokens_per_second"] - token) / stages
            continue
        replica = Replica((token / stages,) * stages, token / stages, row_share=share, late=late, batch=clients)
        asked = requests(*[0.0] * clients, answer=tokens)
        seconds = fmean(run([replica], asked, seed=seed).now for seed in range(20))
        over[stages, clients] = row["tokens_per_second"] * seconds / (clients * tokens)
    assert sorted(over) == [(stages, clients) for stages in (4, 8) for clients in (1, 2, 4, 8, 16)]
    outside = {case for case, ratio in over.items() if not 0.95 < ratio < 1.05}
    assert outside == {(8, 8)}, over
    assert over[8, 8] == pytest.approx(0.94, abs=0.01)


def test_the_command_prints_a_row_for_every_combination(capsys):
    options = ["--replicas", "1,2", "--users", "2,4", "--drafts", "0,2", "--requests", "40", "-o", "json"]
    assert cli.main(["lab", "simulate", "--cluster", "--answer-tokens", "20", *options]) == 0
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
    assert cli.main(["lab", "simulate", "--cluster", *options]) == 2
    assert said in capsys.readouterr().err
