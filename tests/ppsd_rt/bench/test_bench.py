"""`ppsd-run lab bench` with a tiny model: the arithmetic of what it reports, its formats, and what it refuses."""

import json
import os
import statistics

import pytest
from support import tiny_head, tiny_model

from ppsd_rt import Engine, SamplingParams, _native
from ppsd_rt.bench.generate import Answers, Workload, measure_generation
from ppsd_rt.bench.kernels import PASS, chosen_isa
from ppsd_rt.bench.spread import Spread, take_turns
from ppsd_rt.cli import main as cli
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.pipeline.schedule import named, parse_schedule


@pytest.fixture(scope="module")
def head(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("head") / "head.safetensors"
    tiny_head(tiny_model(), hash=Checkpoint(folder).hash).save(path)
    return path


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    """What the tests look at is not how fast this machine is."""
    monkeypatch.setattr("ppsd_rt.bench.spread.MEGABYTES", 2)


@pytest.fixture
def bench(folder, capsys):
    """ppsd-run lab bench in this process -> (status, lines of standard output, standard error)."""

    def bench(*args):
        status = cli.main(["lab", "bench", *map(str, args), "--model", str(folder)])
        captured = capsys.readouterr()
        return status, captured.out.splitlines(), captured.err

    return bench


NOTE = "--threads 2 on 1 core: they take turns, which is slower than 1\n"


def test_spread():
    spread = Spread((3.0, 1.0, 2.0, 10.0))
    assert (spread.median, spread.least, spread.most, spread.range) == (2.5, 1.0, 10.0, 3.6)
    assert spread.over(Spread((1.0, 2.0, 4.0))).samples == (3.0, 0.5, 0.5)
    assert spread.map(lambda x: x * 2).samples == (6.0, 2.0, 4.0, 20.0)


def test_cases_take_turns_until_interrupted():
    order, progress = [], []
    assert take_turns("ab", 2, order.append, lambda *at: progress.append(at))
    assert order == list("abba")
    assert progress == [(1, 4), (2, 4), (3, 4), (4, 4)]

    def measure(case):
        if len(order) == 7:
            raise KeyboardInterrupt
        order.append(case)

    assert not take_turns("ab", 9, measure)
    assert order == list("abbaabb")


def test_kernels(bench, folder, head):
    args = ("-t", "1,2", "--rows", "1,3", "--dtype", "int8,float32", "-r", 2, "--context", 32)
    status, out, err = bench("kernels", *args, "--exit-head", head, "--output", "json")
    result = json.loads(out[-1])
    assert (status, len(out)) == (0, 1)
    assert err in ("", NOTE)
    kernels = _native.kernel_names()
    assert len(result["rows"]) == (len(kernels) + 1) * 2 * 2 * 2
    assert {row["kernel"] for row in result["rows"]} == {*kernels, "pass"}
    config = Checkpoint(folder).config
    for row in result["rows"]:
        seconds = row["milliseconds"]["median"] / 1e3
        assert len(row["milliseconds"]["samples"]) == 2
        assert row["gigabytes_per_second"] == pytest.approx(row["bytes"] / seconds / 1e9)
        assert row["gigaflops"] == pytest.approx(row["flops"] / seconds / 1e9)
        bandwidth = result["bandwidth"][str(row["threads"])]["median"]
        assert row["bandwidth_share"] == pytest.approx(row["gigabytes_per_second"] / bandwidth)
        if row["kernel"] == "lm_head":
            assert row["flops"] == 2 * row["rows"] * config.vocab_size * config.hidden_size
    setting = {"dtype": "int8", "threads": 2, "rows": 3}
    parts = {row["kernel"]: row for row in result["rows"] if setting.items() <= row.items()}
    assert parts["pass"]["bytes"] == sum(parts[name]["bytes"] for name in PASS)
    sums = [sum(parts[name]["milliseconds"]["samples"][n] for name in PASS) for n in range(2)]
    assert parts["pass"]["milliseconds"]["samples"] == pytest.approx(sums)
    assert len(result["passes"]) == 8


def test_kernels_of_several_instruction_sets(bench, monkeypatch):
    monkeypatch.setenv("PPSD_ISA", "portable")
    status, out, _ = bench("kernels", "--isa", "all", "--rows", 2, "-t", 1, "-r", 1, "--kernels", "qkv", "-o", "jsonl")
    rows = [json.loads(line) for line in out[:-1]]
    assert status == 0
    assert [row["isa"] for row in rows] == _native.usable_isas()
    assert os.environ["PPSD_ISA"] == "portable"
    with chosen_isa(_native.usable_isas()[0]):
        assert _native.isa() == _native.usable_isas()[0]


def test_generation(bench, head):
    args = ("-p", "20,7", "-n", "5,30", "-t", "1,2", "--dtype", "int8,float32", "-r", 3, "--exit-head", head)
    schedules = ("--schedule", "plain", "--schedule", "eesd:length=3,stop_rule=fixed")
    status, out, err = bench("generate", *args, *schedules, "--oracle", "off,0.8", "-o", "json")
    assert (status, len(out)) == (0, 1)
    assert err in ("", NOTE)
    result = json.loads(out[-1])
    rows = result["rows"]
    assert len(rows) == 2 * 2 * 2 * 2 * (1 + 2) == len(result["results"])
    for place, row in enumerate(rows):
        plain = rows[place // 3 * 3]
        assert plain["schedule"] == "plain"
        assert {plain[key] == row[key] for key in ("threads", "dtype", "workload", "max_tokens")} == {True}
        assert (row["prompt_tokens"], row["tokens"]) == (int(row["workload"]), row["max_tokens"])
        speeds, baseline = row["decode_tokens_per_second"]["samples"], plain["decode_tokens_per_second"]["samples"]
        assert row["ratio"]["samples"] == pytest.approx([a / b for a, b in zip(speeds, baseline, strict=True)])
        assert row["ratio"]["median"] == pytest.approx(statistics.median(row["ratio"]["samples"]))
        assert result["results"][place]["ratio"] == row["ratio"]["median"]
    plain = rows[0]
    bandwidth = result["bandwidth"][str(plain["threads"])]["median"] * 1e9
    assert plain["ceiling_tokens_per_second"] == pytest.approx(bandwidth / plain["bytes_per_token"])
    share = plain["decode_tokens_per_second"]["median"] * plain["bytes_per_token"] / bandwidth
    assert plain["bandwidth_share"] == pytest.approx(share)
    assert (plain["tokens_per_round"], plain["acceptance"]) == (1, None)


def test_bytes_per_token(folder):
    """float32, by hand: every weight but the norms (the kernels' own), rows padded or not; and the cache's rows."""
    config = Checkpoint(folder).config
    weights = sum(t.nbytes for name, t in Checkpoint(folder).tensors.items() if "norm" not in name)
    row = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    for backend in ("cpu", "torch"):
        engine = Engine.from_pretrained(folder, exit_head="norm:2", backend=backend, dtype="float32").backend
        assert engine.bytes_per_token(0) == pytest.approx(weights, rel=0.06)
        assert engine.bytes_per_token(0) >= weights
        assert engine.bytes_per_token(10) - engine.bytes_per_token(0) == 10 * row * 4
    half = Engine.from_pretrained(folder, exit_head="none", backend="cpu", dtype="int8").backend
    assert half.bytes_per_token(10) - half.bytes_per_token(0) == 10 * row * 2


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
def test_oracle_accepts_as_often_as_it_should(folder, acceptance):
    engine = Engine.from_pretrained(folder, exit_head="norm:2", backend="cpu", dtype="float32", threads=1)
    schedules = {"fixed": parse_schedule("eesd:length=3,stop_rule=fixed"), "elastic": named("elastic")}
    workload = Workload("w", ((1, 2, 3), (4, 5)), True, ("x", "y"))
    answers = Answers([workload], [200], schedules, [acceptance], repeats=4)
    report, whole = measure_generation([engine], answers, {})
    assert whole
    plain, fixed, elastic, *families = report.rows
    assert [row["workload"] for row in families] == ["x: 1", "y: 1"] * 3
    assert sum(row["tokens"] for row in families[:2]) == plain["tokens"] == 400
    assert {row["ratio"].median for row in families[:2]} == {1.0}
    drafts = 4 * 2 * 200 / (1 + acceptance)  # at least; so three deviations are
    tolerance = 3 * (acceptance * (1 - acceptance) / drafts) ** 0.5
    assert fixed["acceptance"] == pytest.approx(acceptance, abs=tolerance)
    # Which positions are judged here differs from run to run: they are where drafting was when a pass ended.
    assert elastic["acceptance"] == pytest.approx(acceptance, abs=2 * tolerance)
    expected = sum(acceptance**n for n in range(4))  # (1 - a^4) / (1 - a)
    assert fixed["tokens_per_round"] == pytest.approx(expected, rel=0.1)


def test_answers_are_not_helped_by_the_cache_of_the_answer_before(folder, monkeypatch):
    """The pass over the prompt has all of its rows, in every repeat."""
    engine = Engine.from_pretrained(folder, exit_head="norm:2", backend="cpu", dtype="float32", threads=1)
    rounds, rows = engine.backend.rounds, []

    def recorded(*args):
        for event in rounds(*args):
            if event.prompt:
                rows.append(event.rows)
            yield event

    monkeypatch.setattr(engine.backend, "rounds", recorded)
    answers = Answers([Workload("w", ((1, 2, 3, 4, 5),), True)], [3], {"eesd": named("eesd")}, repeats=2)
    measure_generation([engine], answers, {})
    assert rows[0] == 5  # plain, to warm up
    assert rows[2:] == [5] * 4


def test_answers_are_not_helped_by_what_was_counted_in_the_answer_before(folder):
    engine = Engine.from_pretrained(folder, exit_head="none", backend="cpu", dtype="float32", threads=1)
    sampling = SamplingParams(temperature=1.5, seed=3)
    schedules = {name: parse_schedule("recycle:lookup=0") for name in ("one", "another")}
    workload = Workload("w", ((5, 6, 7),), True)
    rows = [
        measure_generation([engine], Answers([workload], [60], schedules, (None,), sampling, repeats), {})[0].rows
        for repeats in (1, 3)
    ]
    shares = [row["copied"] for report in rows for row in report if row["schedule"] != "plain"]
    assert shares == [pytest.approx(shares[0])] * 4


def test_answers_that_differ_fail_the_command_in_the_end(bench, folder, monkeypatch):
    monkeypatch.setattr("ppsd_rt.bench.generate.Setting.agrees", lambda setting, prompt, ids: prompt != 0)
    status, out, err = bench("generate", "-p", 8, "-n", 4, "-t", 1, "-r", 1, "--schedule", "lookup", "-o", "json")
    assert status == 1
    assert json.loads(out[-1])["results"][0]["differing"] > 0
    assert "differ from plain decoding" in err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["generate", "-p", "0"], "'0' is not a number"),
        (["generate", "--schedule", "warp"], "warp"),
        (["generate", "--dtype", "int3"], "int3"),
        (["generate", "-p", "500", "-n", "13"], "context of 512"),
        (["generate", "-p", "5", "--prompts"], "not both"),
        (["generate", "--limit", "5"], "--limit"),
        (["generate", "--prompts", "/no/such/file"], "/no/such/file"),
        (["kernels", "--kernels", "warp"], "warp"),
        (["kernels", "--kernels", "exit_head", "--exit-head", "none"], "no exit head"),
        (["kernels", "--isa", "mmx"], "mmx"),
        (["kernels", "--rows", "-3"], "--rows"),
        (["speed"], "speed"),
    ],
)
def test_wrong_usage_is_one_line(bench, args, words):
    status, out, err = bench(*args)
    assert (status, out) == (2, [])
    assert words in err
    assert len(err.splitlines()) == 1
