"""Notes are records of the logger "ppsd_rt": the command prints them, a library's user does with them as he likes."""

import importlib
import logging

import ppsd_rt
from ppsd_rt.cli import main as cli
from ppsd_rt.cli.notes import complain, note, printed, quiet


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


def test_quiet_leaves_the_answer_and_errors(folder, tmp_path, capsys):
    args = ["hi", "-n", "3", "--model", str(folder), "--dtype", "float32", "--trace", str(tmp_path / "trace.json")]
    assert cli.main(args) == 0
    said, err = capsys.readouterr()
    assert len(err.splitlines()) == 3  # no exit head, occupancy, statistics
    assert cli.main([*args, "-q"]) == 0
    assert capsys.readouterr() == (said, "")
    for wrong in (["--explain"], ["--compare"], ["--top-p", "2"]):
        assert cli.main([*args, "-q", *wrong]) == 2
    explain, compare, range = capsys.readouterr().err.splitlines()
    assert explain == "ppsd-run: --quiet does not go with --explain"
    assert compare == "ppsd-run: --quiet does not go with --compare, but for --json"
    assert range.startswith("ppsd-run: top_p")


def test_the_public_api_is_exported():
    assert ppsd_rt.__all__ == sorted(ppsd_rt._HOMES)
    for name, home in ppsd_rt._HOMES.items():
        assert getattr(ppsd_rt, name) is getattr(importlib.import_module(f"ppsd_rt.{home}"), name)
