"""Campaigns: what is drawn, that it goes on where it stopped, and that it finds what differs."""

import json
from dataclasses import fields, replace

import pytest
from support import write_model

from campaign import draw, run
from campaign.command import CAMPAIGN
from campaign.draw import Material, draw_case
from ppsd_rt import Engine
from ppsd_rt.cli import main as cli
from ppsd_rt.cli.commands import COMMANDS
from ppsd_rt.cpu.backend import CpuBackend
from ppsd_rt.pipeline.rounds import Round
from ppsd_rt.pipeline.schedule import PLAIN, describe, parse_schedule

MATERIAL = Material(
    questions=((1, 2, 3), (4, 5)),
    text=tuple(range(400)),
    vocabulary=500,
    context=8192,
    layers=30,
    isas={"best": 12.0, "other": 1.0, "portable": 1.0},
    dtypes={"int8": 3.0, "int4": 3.0, "bfloat16": 1.0, "float32": 1.0},
    kv_dtypes={"auto": 1.0, "float32": 1.0, "bfloat16": 1.0, "int8": 1.0},
    threads={1: 1.0, 2: 1.0, 3: 1.0},
    stages={1: 1.0, 2: 1.0, 3: 1.0},
    head="auto",
    exit_layer=6,
    most_at_once=48,
    row_bytes=1000,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("campaign") / "model", num_attention_heads=6, head_dim=32)


@pytest.fixture
def check(folder, capsys, monkeypatch, tmp_path):
    """The command in this process, with the tiny model and small cases -> (status, standard output, error)."""
    monkeypatch.setenv("PPSD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(COMMANDS, "campaign", CAMPAIGN)
    monkeypatch.setattr(draw, "CASE_TOKENS", 400)

    def check(*args):
        status = cli.main(["campaign", "--model", str(folder), *map(str, args)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return check


def changes_one_id(monkeypatch, place=2):
    """Every answer that is not plain has another id there."""
    real = CpuBackend.rounds

    def rounds(self, prompt, params, schedule, *others):
        for event in real(self, prompt, params, schedule, *others):
            if isinstance(event, Round) and schedule != PLAIN:
                at = len(prompt) + place - event.position
                ids = [id ^ 1 if i == at else id for i, id in enumerate(event.committed)]
                event = replace(event, committed=tuple(ids))
            yield event

    monkeypatch.setattr(CpuBackend, "rounds", rounds)


def test_a_case_depends_on_seed_and_number_alone():
    assert draw_case(MATERIAL, 1, 7) == draw_case(MATERIAL, 1, 7)
    assert draw_case(MATERIAL, 1, 7) != draw_case(MATERIAL, 1, 8) != draw_case(MATERIAL, 2, 8)


def test_everything_is_drawn():
    cases = [draw_case(MATERIAL, 0, number) for number in range(150)]
    known = {
        "isa": MATERIAL.isas,
        "dtype": MATERIAL.dtypes,
        "kv_dtype": MATERIAL.kv_dtypes,
        "exit_head": ("auto", "none", "norm"),
        "threads": (1, 2, 3),
        "reference_threads": (1, 2, 3),
        "stages": (1, 2, 3),
    }
    assert {*known, "kv_memory"} == {field.name for field in fields(draw.Setup)}
    for name, values in known.items():
        assert {str(getattr(case.setup, name)).partition(":")[0] for case in cases} == set(map(str, values)), name
    assert {1, 2} < {case.at_once for case in cases} <= set(range(1, 49))
    among_others = [case for case in cases if case.at_once > 1]
    assert {case.setup.kv_memory is None for case in among_others} == {True, False}
    assert all(answer.acceptance is None for case in among_others for answer in case.answers)
    texts = [text for case in cases for text in case.texts]
    assert {text.kind for text in texts} == {
        *("question", "cut", "repeated", "turn", "continued", "edited", "whole context")
    }
    assert {len(text.ids) for text in texts} >= {1, 2, 3}
    answers = [answer for case in cases for answer in case.answers]
    assert {answer.kind for answer in answers} == {"plain", "eesd", "ppsd", "elastic", "lookup", "auto"}
    assert {getattr(answer.schedule, "max_chunk", 1) for answer in answers} == set(range(16))
    assert {answer.closed for answer in answers if answer.events} == {True, False}
    assert {None, 0.0, 1.0} < {answer.acceptance for answer in answers}
    for schedule in {answer.schedule for answer in answers}:  # what a report shows can be run again
        assert parse_schedule(describe(schedule)) == schedule
    names = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "ignore_eos", "stop"]
    extras = ["presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "grammar"]
    for name in names + extras:
        assert len({getattr(text.params, name) for text in texts}) > 1, name


def test_many_at_once_with_little_memory(check, monkeypatch):
    """Answers side by side, which wait for each other and lose their places, are compared as others are."""
    monkeypatch.setattr(draw, "_long", lambda rng, least, most: most)
    case = next(number for number in range(99) if draw_case(MATERIAL, 5, number).at_once > 1)
    assert json.loads(check("--case", case, "--seed", 5, "--json")[1])["tally"]["at once"].keys() == {"17 or more"}
    changes_one_id(monkeypatch)
    status, out, err = check("--case", case, "--seed", 5, "--json")
    found = json.loads(out)["differences"]
    assert status == 1
    assert {d["at_once"] for d in found} == {48}
    assert err.count("  48 at once") == len(found)


def test_it_finds_nothing_and_goes_on_where_it_stopped(check, interrupt, tmp_path):
    args = ("--seed", 3, "--json")
    interrupt(Engine, "generate", after=150)
    status, out, err = check("--tokens", 10**9, *args)
    first = json.loads(out)
    assert (status, first["interrupted"], first["differences"]) == (130, True, [])
    assert first["cases"] >= 1
    interrupt(Engine, "generate", after=10**9)
    (file,) = tmp_path.glob("build/campaign/seed-3-*.jsonl")
    file.write_text(file.read_text() + '{"case": 1, "tok')  # killed while it wrote
    wanted = first["tokens"] + 500
    status, out, err = check("--tokens", wanted, *args)
    assert f"going on after case {first['cases'] - 1}: {first['tokens']:,} of {wanted:,} tokens" in err
    last = json.loads(out)
    assert (status, last["interrupted"], last["differences"]) == (0, False, [])
    assert last["tokens"] >= wanted
    assert last["tokens"] == sum(v["tokens"] for k, v in last["by"]["schedule"].items() if k != "plain")
    assert last["tokens"] == sum(values["tokens"] for values in last["by"]["format"].values())
    assert last["machine"]["cpu"] == last["cpu"]
    assert sum(last["passes"].values()) > 100
    cases = [json.loads(line) for line in file.read_text().splitlines()]
    assert [case["case"] for case in cases] == list(range(last["cases"]))
    once = json.loads(check("--case", cases[-1]["case"], "--seed", 3, "--json")[1])
    for name in ("answers", "plain_tokens"):
        assert once[name] == cases[-1][name]
    assert "0 differences from plain decoding in" in check("--tokens", wanted, "--seed", 3)[1]


def test_it_finds_what_differs_and_one_case_shows_it_again(check, monkeypatch):
    changes_one_id(monkeypatch)
    status, out, err = check("--tokens", 1, "--json")
    differences = json.loads(out)["differences"]
    assert status == 1
    assert {d["position"] for d in differences} == {2}
    assert all(None not in d["logits"] and d["ids"][1] == d["ids"][0] ^ 1 for d in differences)
    assert "DIFFERENT case 0, answer " in err
    again, shown, err = check("--case", 0)
    assert again == 1
    assert err.count("DIFFERENT") == len(differences)
    assert "at token 2 plain decoding gives" in err
    assert f"{len(differences)} differences" in shown
    monkeypatch.undo()


def test_what_abandoned_answers_commit_is_compared_too(check, monkeypatch):
    changes_one_id(monkeypatch, place=0)

    def found(seed):
        differences = json.loads(check("--tokens", 1, "--seed", seed, "--json")[1])["differences"]
        return any(d["abandoned_after"] and d["finish"][1] == "cancelled" for d in differences)

    assert any(map(found, range(9)))


def test_reference_and_tested_engine_share_weights_only(folder):
    engine = Engine.from_pretrained(folder, exit_head="norm:2", backend="cpu", dtype="int8", threads=2, stages=2)
    before = list(engine.generate("abcdefghijkl", schedule="elastic"))  # whose rows the loop keeps
    pair = run.Pair(engine, Engine(engine.checkpoint, engine.tokenizer, engine.backend.beside(1), "beside"))
    assert (pair.reference.backend.threads, pair.reference.head, engine.backend.threads) == (1, None, 2)
    generation = pair.reference.generate("abcdefghijkl", schedule="plain")
    next(iter(generation))
    assert [token.id for token in engine.generate("abcdefghijkl", schedule="eesd")] == [token.id for token in before]
    assert engine.backend._answers.loop.counts["shared_rows"] > 0
    assert pair.reference.backend._answers.loop.counts["shared_rows"] == 0
    assert generation.run().ids == tuple(token.id for token in before)


def test_wrong_usage_is_one_line(check):
    status, out, err = check("--seed", 1)
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert "give --tokens" in err


def test_options_of_the_machine_stay_as_given(check, monkeypatch):
    monkeypatch.setenv("PPSD_ISA", "portable")
    given = ("--dtype", "bfloat16", "--kv-dtype", "int8", "--threads", 1, "--stages", 2, "--exit-head", "norm:1")
    by = json.loads(check("--tokens", 100, *given, "--json")[1])["by"]
    found = {name: [*by[name]] for name in ("isa", "format", "KV format", "threads", "stages", "exit head")}
    assert found == {
        "isa": ["portable"],
        "format": ["bfloat16"],
        "KV format": ["int8"],
        "threads": ["1"],
        "stages": ["2"],
        "exit head": ["norm"],
    }
