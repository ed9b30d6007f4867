"""What was measured and kept: a damaged file of it counts for nothing and is written anew, without a word."""

import os

import pytest

from ppsd_rt.files import cache as cache_file
from ppsd_rt.pipeline import learned


def write_bytes(content):
    return lambda path: path.write_bytes(content)


def full_directory(path):
    path.mkdir()
    (path / "file").touch()


NO_FILE = {
    "directory": lambda path: path.mkdir(),
    "fifo": lambda path: os.mkfifo(path),
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path),
    "too large": lambda path: path.touch() or os.truncate(path, 1 << 40),
}
NO_JSON = {
    "empty": b"",
    "zeros": bytes(4096),
    "bytes": bytes(range(128, 256)),
    "cut": b"[1.5, 0.0",
}


GOOD = [1.5, 0.0, 3.0]


def test_good_numbers_are_read_as_they_were_written(tmp_path):
    learned.write(tmp_path / "a" / "learned", GOOD)
    assert learned.read(tmp_path / "a" / "learned") == GOOD
    learned.write(tmp_path / "b" / "learned", [])  # nothing has been decoded
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("damage", [*NO_FILE, *NO_JSON])
def test_numbers_that_cannot_be_read(tmp_path, damage):
    """Count for nothing, and are written anew."""
    path = tmp_path / "learned"
    NO_FILE.get(damage, write_bytes(NO_JSON.get(damage)))(path)
    assert learned.read(path) == []
    learned.write(path, GOOD)
    assert learned.read(path) == GOOD
    assert [child.name for child in tmp_path.iterdir() if child.name != "nowhere"] == ["learned"]


def test_a_folder_that_is_not_empty_stays(tmp_path):
    full_directory(tmp_path / "learned")
    learned.write(tmp_path / "learned", GOOD)
    assert learned.read(tmp_path / "learned") == []
    assert [child.name for child in tmp_path.iterdir()] == ["learned"]


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    cache_file.write(tmp_path / "a" / "b", b"old")

    def fail(*_):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fail)
        cache_file.write(tmp_path / "a" / "b", b"new")
    assert cache_file.read(tmp_path / "a" / "b", 3) == b"old"
    assert cache_file.read(tmp_path / "a" / "b", 2) == b""
    assert len(list((tmp_path / "a").iterdir())) == 1


# -- importance --------------------------------------------------------------------------------------------------------
