"""`ppsd-run heads`: what it says of a head is what the engine does with it; the plot's lines follow from it."""

import json
from itertools import pairwise

import pytest
from support import loud_head

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.bench.cli.heads import HeadMeasure, _needed, lines_of, measure_head
from ppsd_rt.cli.common import NamedPrompt
from ppsd_rt.cli.main import main
from ppsd_rt.models.checkpoint import Checkpoint


def measure_of(survival):
    return HeadMeasure("a", "layer", 2, 64, "int8", 0.5, 0.4, [], {}, survival, draft_cost=0.25)


def test_speed_is_tokens_over_seconds_at_the_best_length():
    measure = measure_of([0.8, 0.6, 0.1])
    # 1: 1.8 tokens in 1.25 plain steps; 2: 2.4 in 1.5; 3: 2.5 in 1.75
    assert measure.length == 2
    assert measure.per_pass == pytest.approx(2.4)
    assert measure.speed == pytest.approx(2.4 / 1.5)
    assert (measure_of([0.2, 0.1]).length, measure_of([0.2, 0.1]).speed) == (0, 1), "plain decoding is faster"


def test_lines_of_equal_speed():
    needed = _needed(0.2, 1.5)
    speeds = [sum(needed**place for place in range(length + 1)) / (1 + 0.2 * length) for length in range(16)]
    assert max(speeds) == pytest.approx(1.5, rel=1e-6)
    assert _needed(5.0, 1.5) is None  # no acceptance makes up for such a price
    lines = lines_of([measure_of([0.8])])
    assert [(line.name, line.dashed) for line in lines][1::3] == [("1.5 times plain", True), ("a", False)]


def test_figures_are_those_of_the_answers(folder, tmp_path):
    path = tmp_path / "loud.safetensors"
    loud_head(Checkpoint(folder).hash).save(path)
    engine = Engine.from_pretrained(folder, exit_head=path, backend="cpu", dtype="float32", threads=1)
    prompts = [NamedPrompt("1", "abc", "x"), NamedPrompt("2", "hello", "y")]
    seen, schedule = [], "eesd:length=3,stop_rule=fixed"
    measure, whole = measure_head(engine, "loud", prompts, 40, 3, seen.append)
    assert whole
    answers = [
        engine.generate([{"role": "user", "content": prompt.prompt}], SamplingParams(max_tokens=40), schedule).run()
        for prompt in prompts
    ]
    found = [answer.statistics for answer in answers]
    assert measure.acceptance == sum(one.accepted for one in found) / sum(one.judged for one in found)
    assert measure.by_family == {"x": found[0].acceptance, "y": found[1].acceptance}
    rounds = sum(one.rounds for one in found)
    reached = [rounds, *(sum(one.accepted_by_position[place] for one in found) for place in (1, 2, 3))]
    assert measure.survival == [count / rounds for count in reached[1:]]
    assert measure.by_position == [now / max(before, 1) for before, now in pairwise(reached)]
    assert seen == [0, 1]


def test_command(folder, tmp_path, capsys):
    loud_head(Checkpoint(folder).hash).save(tmp_path / "loud.safetensors")
    plot = tmp_path / "plot.svg"
    options = ["--model", str(folder), "--dtype", "float32", "--threads", "1", "--limit", "1", "-n", "12"]
    heads = [str(tmp_path / "loud.safetensors"), "norm:3"]
    assert main(["heads", *heads, *options, "--plot", str(plot), "-o", "json"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [result["kind"] for result in last["results"]] == ["feedback", "norm"]
    assert last["best"] in ("loud", "norm:3")
    assert "<svg" in plot.read_text()
    assert main(["heads", "none", *options]) == 2
    assert "no exit head" in capsys.readouterr().err
