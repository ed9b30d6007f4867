"""Ctrl-C, SIGTERM and SIGHUP end a command in the same way: what there is by then is kept, and nothing follows it."""

import json
import os
import signal
import subprocess
import sys

import pytest

from ppsd_rt.bench import spread
from ppsd_rt.cli import generate, signals
from ppsd_rt.cli import main as cli
from ppsd_rt.generation import Generation

ENDING = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "interrupted by SIGTERM",
    signal.SIGHUP: "interrupted by SIGHUP",
}


@pytest.fixture
def listening():
    """Afterwards signals mean to this process what they meant before."""
    before, hook = {number: signal.getsignal(number) for number in ENDING}, sys.unraisablehook
    signals.listen()
    yield
    signals.listen()
    for number, handler in before.items():
        signal.signal(number, handler)
    sys.unraisablehook = hook


@pytest.fixture
def run(listening, folder, capsys, monkeypatch):
    """ppsd-run as a process of its own -> (status, standard output, standard error)."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["ppsd-run", *map(str, args), "--model", str(folder)])
        for number in ENDING:
            signal.signal(number, signal.SIG_DFL)
        status = cli.main()
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def send_after(monkeypatch):
    """send_after(owner, name, calls, number): that call of owner.name meets the signal."""

    def send_after(owner, name, calls, number):
        real, left = getattr(owner, name), [calls]

        def counted(*args, **options):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), number)
            return real(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    return send_after


@pytest.mark.parametrize("number", ENDING)
def test_a_file_of_prompts_and_its_trace_are_kept_as_far_as_they_went(run, send_after, tmp_path, number):
    prompts, trace = tmp_path / "prompts.jsonl", tmp_path / "trace.json"
    prompts.write_text("".join(f'{{"id": {i}, "prompt": "{i}"}}\n' for i in range(3)))
    send_after(Generation, "run", 2, number)
    args = ("--prompts", prompts, "--json", "-n", 3, "--dtype", "float32", "--trace", trace)
    status, out, _ = run(*args)
    assert (status, [len(json.loads(line)["ids"]) for line in out.splitlines()]) == (128 + number, [3, 0])
    names = [event["args"]["name"] for event in json.loads(trace.read_text())["traceEvents"] if "name" in event["args"]]
    assert {"0", "1"} <= set(names)


@pytest.mark.parametrize("number", ENDING)
def test_a_measurement_is_reported_as_far_as_it_went(run, send_after, number):
    send_after(spread, "median", 1, number)
    send_after(Generation, "run", 3, number)
    args = ("lab", "bench", "generate", "-p", 4, "-n", 2, "-r", 3, "--dtype", "float32", "-t", 1, "--exit-head", "none")
    status, out, err = run(*args, "-o", "json")
    assert (status, json.loads(out.splitlines()[-1])["interrupted"]) == (128 + number, True)
    assert err.splitlines()[-1] == f"ppsd-run: {ENDING[number]}; this is what had been measured"


@pytest.mark.parametrize("number", ENDING)
def test_where_there_is_nothing_to_keep_it_is_one_line(run, send_after, number):
    send_after(generate, "load_engine", 1, number)
    assert run("abc") == (128 + number, "", f"\nppsd-run: {ENDING[number]}\n")


def test_signals_that_come_while_it_ends_change_nothing(run, send_after, monkeypatch):
    """One meets every step of the ending, and then the rest of the process."""
    send_after(Generation, "_commit", 3, signal.SIGINT)
    for owner, name in ((Generation, "close"), (generate, "print_json"), (signals, "status"), (signals, "close")):
        send_after(owner, name, 1, signal.SIGTERM)
    status, out, err = run("abc", "--raw", "--json", "-n", 9, "--schedule", "plain", "--dtype", "float32")
    assert (status, len(json.loads(out)["ids"]), err) == (130, 2, "")
    for number in ENDING:
        os.kill(os.getpid(), number)
        assert signal.getsignal(number) == signal.SIG_IGN  # as Python leaves it alone on its way out


def test_a_signal_after_the_answer_is_ignored(run, send_after):
    send_after(signals, "close", 1, signal.SIGINT)  # at the last moment: the command has done its work
    status, out, err = run("abc", "--raw", "--json", "-n", 3, "--dtype", "float32")
    assert (status, len(json.loads(out)["ids"])) == (130, 3)
    assert err.splitlines() == ["", "ppsd-run: interrupted"]


def test_what_the_process_was_started_to_ignore_stays_ignored(listening):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    signals.listen()
    os.kill(os.getpid(), signal.SIGHUP)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
    assert signals.status() == 143


def test_a_conversation_goes_on_after_ctrl_c_only(listening):
    for number, goes_on in ((signal.SIGINT, True), (signal.SIGINT, True), (signal.SIGTERM, False)):
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        assert signals.resume() == goes_on


def test_a_signal_in_a_destructor_is_sent_again(listening, monkeypatch):
    class Destroyed:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)

    sent = []

    class Timer:  # at once
        def __init__(self, seconds, function, args):
            sent.append(args)

        def start(self):
            pass

    monkeypatch.setattr(signals.threading, "Timer", Timer)
    value = Destroyed()
    del value
    assert sent == [(os.getpid(), signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt):
        os.kill(*sent[0])
    assert signals.status() == 143


def test_an_interruption_of_generated_code_does_not_kill_the_process_at_its_end(tmp_path):
    """Python remembers a KeyboardInterrupt that leaves `exec`, as dataclasses use it, and `python -m` obeys."""
    code = """
import os, signal, sys
from ppsd_rt.cli import signals
signal.signal(signal.SIGINT, signal.default_int_handler)
signals.listen()
try:
    exec("os.kill(os.getpid(), signal.SIGINT)")
except KeyboardInterrupt:
    signals.close()
sys.exit(signals.status())
"""
    (tmp_path / "ended.py").write_text(code)
    assert subprocess.run([sys.executable, "-m", "ended"], cwd=tmp_path).returncode == 130
