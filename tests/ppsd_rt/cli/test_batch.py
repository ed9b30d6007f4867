"""A file of prompts: answered side by side, printed in its order; and `--compare`, which takes turns."""

import json

import pytest

from ppsd_rt.cli import compare, generate, signals
from ppsd_rt.cli import main as cli
from ppsd_rt.cli.compare import Comparison, said, together
from ppsd_rt.generation import Generation
from ppsd_rt.many import Generations
from ppsd_rt.statistics import Statistics

PROMPTS = ["Hi.", "Why is it so?", "Hi.", "Tell me"]


@pytest.fixture
def run(folder, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))

    def run(*args):
        options = ["--model", str(folder), "--dtype", "float32", "--threads", "1", "--exit-head", "norm:2"]
        status = cli.main(["--prompts", str(path), *options, *map(str, args)])
        return status, *capsys.readouterr()

    return run


def test_side_by_side_is_one_by_one_in_the_order_of_the_file(run, monkeypatch):
    args = ("--json", "-n", 9, "-t", 1, "--seed", 5)
    status, out, _ = run(*args)
    side = [json.loads(line) for line in out.splitlines()]
    monkeypatch.setattr(generate, "answer_all", None)  # one by one, with a comparison
    one = [json.loads(line) for line in run(*args, "--compare")[1].splitlines()]
    assert (status, [answer["id"] for answer in side]) == (0, [1, 2, 3, 4])
    assert [answer["ids"] for answer in side] == [answer["ids"] for answer in one]
    assert side[0]["ids"] != side[2]["ids"]  # the same prompt twice is two answers to it


def test_one_that_is_first_in_the_file_is_printed_first_whenever_it_ends(run, monkeypatch):
    real = Generations.events
    monkeypatch.setattr(Generations, "events", lambda self: iter(sorted(real(self), key=lambda one: -one[0])))
    _, out, err = run("-n", 3)
    assert [line for line in out.splitlines() if line.startswith("==>")] == [f"==> {n} <==" for n in (1, 2, 3, 4)]
    assert err.count("3 tokens, cut by -n | ") == 4


def test_an_interruption_prints_what_there_is_and_says_what_is_left(run, monkeypatch):
    real = Generations.events

    def interrupted(self):
        for number, event in real(self):
            yield number, event
            if self.completion(0).finish_reason == "length":
                raise KeyboardInterrupt

    monkeypatch.setattr(Generations, "events", interrupted)
    monkeypatch.setattr(signals, "status", lambda: 130)
    status, out, err = run("-n", 100, "--json")
    answers = [json.loads(line) for line in out.splitlines()]
    left = 4 - sum(answer["finish_reason"] == "length" for answer in answers)
    assert (status, answers[0]["id"], len(answers[0]["ids"])) == (130, 1, 100)
    assert err.splitlines()[-1] == f"ppsd-run: interrupted; {left} of 4 prompts are left"


def test_compare_takes_turns_and_copies_nothing_from_the_answer_before(run, monkeypatch):
    asked, real, forgotten = [], Generation.__init__, []

    def heard(self, *args):
        asked.append(type(args[5]).__name__ if args[5] is not compare.PLAIN else "plain")
        real(self, *args)

    monkeypatch.setattr(Generation, "__init__", heard)
    monkeypatch.setattr(compare.Engine, "forget", lambda self: forgotten.append(len(asked)))
    assert run("-n", 4, "--compare")[0] == 0
    assert asked == ["Auto", *["Auto", "plain", "plain", "Auto"] * 2] * 4
    assert forgotten[1:] == [9 * number + turn for number in range(4) for turn in range(1, 9)]


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([(1.0, 1.2), (1.0, 1.5), (1.0, 1.3)], "1.30x plain decoding (1.20 to 1.50 in 3 turns)"),
        ([(2.0, 1.8), (2.0, 1.6), (2.0, 1.2)], "0.80x plain decoding (0.60 to 0.90 in 3 turns)"),
        ([(1.0, 0.9), (1.0, 1.5)], "no difference from plain decoding seen here (0.90 to 1.50 in 2 turns)"),
        ([(0.0, 0.0)], ""),
    ],
)
def test_a_ratio_whose_range_crosses_one_is_none(turns, expected):
    assert said(turns) == expected


def test_answers_are_compared_together_by_their_time():
    one, other = (Comparison(turns, Statistics()) for turns in (((1.0, 2.0), (2.0, 2.0)), ((3.0, 4.0), (1.0, 4.0))))
    assert list(together([one, other])) == [(4.0, 6.0), (3.0, 6.0)]
