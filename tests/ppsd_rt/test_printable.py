"""What others chose, in messages and tables: one line, nothing that a terminal obeys, and of bounded length."""

import pytest

from ppsd_rt.arguments import real_number, whole_number
from ppsd_rt.errors import UsageError
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
