"""Reading small files: whatever is there instead of one is one line, and costs neither memory nor time."""

import os

import pytest

from ppsd_rt.errors import PpsdError
from ppsd_rt.models.files import parse_json, read_bytes, read_json_object


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda path: os.mkfifo(path), "is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.symlink_to(path), "symbolic link"),
        (lambda path: (path.touch(), os.truncate(path, 1 << 40)), "has more than 16 MiB"),
        (lambda path: path.write_text("[" * 100_000), "nested more than 100 levels deep"),
        (lambda path: path.write_text("[" * 101 + "]" * 101), "nested more than 100 levels deep"),
        (lambda path: path.write_text('{"a": ' + "9" * 5000 + "}"), "not valid JSON"),
        (lambda path: path.write_bytes(b'"\xff"'), "not valid JSON"),
        (lambda path: path.write_text('{"a": "\\ud800"}'), "lone surrogate"),
        (lambda path: path.write_text("[1]"), "must hold a JSON object, not list"),
    ],
)
def test_what_is_no_json_file(tmp_path, make, complaint):
    path = tmp_path / "config.json"
    make(path)
    with pytest.raises(PpsdError, match=complaint) as caught:
        read_json_object(path, missing_ok=True)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file(tmp_path):
    assert read_json_object(tmp_path / "config.json", missing_ok=True) == {}
    with pytest.raises(PpsdError, match="has no config.json"):
        read_json_object(tmp_path / "config.json")


def test_a_pipe_is_read_where_it_may_be_one(tmp_path):
    read, write = os.pipe()
    os.write(write, b"text")
    os.close(write)
    assert read_bytes(f"/dev/fd/{read}", pipe_ok=True) == b"text"
    os.close(read)
    with pytest.raises(PpsdError, match="has more than 1 MiB"):
        read_bytes("/dev/zero", 1 << 20, pipe_ok=True)


def test_a_key_that_is_there_twice():
    assert parse_json('{"a": 1, "a": 2}') == {"a": 2}
    with pytest.raises(ValueError, match="'a' is there twice"):
        parse_json('{"b": [{"a": 1, "a": 1}]}', unique=True)
    assert parse_json('{"b": {"a": 1}, "a": 1}', unique=True) == {"b": {"a": 1}, "a": 1}
