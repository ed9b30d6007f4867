"""What others chose, in messages and tables: one line, nothing that a terminal obeys, and of bounded length."""

from xml.etree import ElementTree

import pytest

from ppsd_rt.arguments import real_number, whole_number
from ppsd_rt.cli.common import table
from ppsd_rt.cli.notes import note, printed
from ppsd_rt.errors import UsageError
from ppsd_rt.lab.bench.plot import Chart, Line, Panel, drawn
from ppsd_rt.lab.bench.report import Column, Report
from ppsd_rt.printable import printable, quoted, shortened

NASTY = "a\nb\x1b[31m\0\x9b\u2028\u202e\udc80é"


def test_what_does_not_print_is_escaped():
    assert printable(NASTY) == r"a\nb\x1b[31m\x00\x9b\u2028\u202e\udc80é"
    assert printable("plain text: ä 日本 🙂") == "plain text: ä 日本 🙂"


def test_long_values_are_shortened():
    assert shortened("abcdef", 6) == "abcdef"
    assert shortened("abcdefg", 6) == "abc…fg"
    assert len(quoted("9" * 5000)) == 60
    assert quoted(10**5000) == "a very long int"
    assert quoted("x\n") == r"'x\n'"


def test_numbers_that_python_does_not_write_out_are_refused_in_one_line():
    for refuse in (lambda: real_number("top_p", 10**5000), lambda: whole_number("seed", [10**5000])):
        with pytest.raises(UsageError, match=r"a very long (int|list)"):
            refuse()


def test_notes_are_one_line(capsys):
    with printed():
        note(NASTY)
        note("x" * 10_000)
    captured = capsys.readouterr()
    first, second = captured.err.splitlines()
    assert (first, len(second), captured.out) == (printable(NASTY), 1000, "")


def test_tables_and_charts_show_names_as_text(capsys):
    name = NASTY + "[/red]|"
    report = Report("", [Column("name", "name")], [{"name": name}], {})
    assert report.lines("md").splitlines()[2] == f"| {printable(name)[:-1]}\\| |"
    table("", ["name"], report.cells())
    assert printable(name) in capsys.readouterr().out
    chart = drawn(Chart("title", "x", "y", [Panel(name, [Line("line", [(0, 1), (1, 1)])])]), "svg")
    assert shortened(printable(name), 40) in "".join(ElementTree.fromstring(chart).itertext())
