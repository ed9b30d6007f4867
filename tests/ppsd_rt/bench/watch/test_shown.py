"""What is shown of a recording: on the terminal at a moment, by a clock of the test, and in an animation."""

import io
from xml.etree import ElementTree

import pytest
from rich.console import Console
from support import write_model

from ppsd_rt.bench.watch.record import DraftToken, Recording, Verdict
from ppsd_rt.bench.watch.svg import draw
from ppsd_rt.bench.watch.terminal import frame, play
from ppsd_rt.cli import main as cli

# One draft of three is rejected while another step is under way.
SMALL = Recording(
    "elastic, cpu int8",
    ("draft: layers 1-3, exit head", "verify: layers 4-30"),
    (
        ("draft", 0, 1, 0.0, 1000.0),
        ("draft", 0, 1, 1000.0, 2000.0),
        ("verify", 1, 2, 1000.0, 3000.0),
        ("draft", 0, 1, 2000.0, 2900.0),
        ("dropped draft", 0, 1, 2900.0, 3100.0),
        ("dropped verify", 1, 1, 3000.0, 3200.0),
        ("verify", 1, 1, 3200.0, 5000.0),
    ),
    (
        DraftToken(6, " sky", 1000.0, 3000.0, "accepted"),
        DraftToken(7, " <red>", 2000.0, 3000.0, "rejected"),
        DraftToken(8, "\x1b[2J", 2900.0, 3000.0, "dropped"),
    ),
    (
        Verdict(0.0, (("The", "plain"),)),
        Verdict(3000.0, ((" sky", "accepted"), (" is", "corrected")), 1, True),
        Verdict(5000.0, (("\nblue", "plain"),)),
    ),
)


def lines(at, width=120):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(frame(SMALL, at, width))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def lane(found, name):
    return next(line.split("|")[1] for line in found if line.startswith(name))


def test_while_a_pass_goes_on_drafts_are_in_flight():
    found = lines(2500.0)
    assert found[0].startswith("    2.50 ms of 5.00 ms  elastic, cpu int8")
    assert lane(found, "draft: layers 1-3, exit head").endswith("1===1===1=")
    assert lane(found, "verify: layers 4-30").endswith("2=====")
    assert "drafts in flight: “ sky” “ <red>”" in found
    assert "newest verdict:   “The” plain" in found
    assert "The" in found
    assert not any("roll back:" in line for line in found)


def test_a_verdict_commits_and_rolls_back():
    found = lines(3200.0)
    assert "drafts in flight:" in found
    assert "newest verdict:   “ sky” accepted, “ is” corrected, roll back: 1 later draft dropped" in found
    assert "2!" in lane(found, "verdicts")
    assert lane(found, "draft").rstrip().endswith("1===x")
    assert "The sky is" in found


def test_control_characters_of_drafts_do_not_reach_the_terminal():
    assert "\x1b[2J" not in "".join(lines(2950.0))
    assert any("\\x1b[2J" in line for line in lines(2950.0))


class Clock:
    """Time passes only while somebody sleeps."""

    def __init__(self):
        self.time, self.slept = 100.0, []

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.time += seconds


def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=80, height=24, color_system=None)


@pytest.mark.parametrize("slow", [100.0, 1000.0])
def test_a_replay_takes_as_many_times_longer_as_is_asked_for(slow):
    clock, console = Clock(), terminal()
    play(SMALL, slow, console, clock)
    assert clock.time - 100.0 == pytest.approx(5000e-6 * slow, abs=1 / 12)
    out = console.file.getvalue()
    assert f"shown {slow:g} times slower" in out
    assert "5.00 ms of 5.00 ms" in out[-2000:]  # the last frame stays on the terminal
    assert "blue" in out[-2000:]


def test_step_by_step_each_moment_waits_for_the_user():
    asked = []

    def step():
        asked.append(1)
        return len(asked) < 3

    clock = Clock()
    play(SMALL, 200.0, terminal(), clock, step)
    assert len(asked) == 3  # the third was the end of the input
    asked.clear()
    play(SMALL, 200.0, terminal(), clock, lambda: asked.append(1) is None)
    assert len(asked) == len(SMALL.moments()) == 6
    assert clock.slept == []


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([], "watch draws on a terminal, and standard output is none; --svg FILE writes an animation"),
        (["--slow", "0.5"], "--slow is from 1 to 1000000, not 0.5"),
        (["--svg", "a.svg", "--step"], "--svg does not go with --step"),
        (["--svg", "nowhere/a.svg"], "cannot write the animation to nowhere/a.svg: No such file or directory"),
    ],
)
def test_what_cannot_be_shown_is_one_line(options, line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["watch", "hello", "--model", "nowhere", *options]) == 2
    assert capsys.readouterr().err.splitlines() == [f"ppsd-run: {line}"]


def test_the_command_shows_a_real_answer(tmp_path, monkeypatch, capsys):
    folder = write_model(tmp_path / "model", num_hidden_layers=8)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    options = ["--model", str(folder), "--exit-head", "norm:4", "--raw", "-n", "6", "--slow", "1"]
    assert cli.main(["watch", "one two three", *options]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "draft: layers 1-4, exit head" in captured.out
    assert "elastic" in captured.out


def test_the_animation_is_one_svg_that_shows_what_was_recorded():
    source = draw(SMALL, "Why <so>?", 1000.0)
    root = ElementTree.fromstring(source)
    svg = "{http://www.w3.org/2000/svg}"
    found = ["".join(text.itertext()) for text in root.iter(f"{svg}text")]
    assert any(
        text.startswith("“Why <so>?”  elastic, cpu int8: recorded, then shown 1000 times slower") for text in found
    )
    assert {*SMALL.stages, " sky", " <red>", "2 tokens", "1 token"} <= set(found)
    assert " sky is ↺ roll back" in found
    assert {"The", " sky", " is", "blue"} <= set(found)
    kinds = [rect.get("class") for rect in root.iter(f"{svg}rect")]
    assert (kinds.count("accepted"), kinds.count("rejected"), kinds.count("dropped")) == (1, 1, 3)
    assert kinds.count("verify") == 2
    assert "\x1b" not in source
