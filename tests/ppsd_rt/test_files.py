"""Files that are written at the end: told early, whole or not at all."""

import os
import stat
import threading

import pytest

from ppsd_rt.errors import PpsdError, UsageError
from ppsd_rt.files import OutputFile
from ppsd_rt.pipeline import learned
from ppsd_rt.trace import TraceFile


def test_until_it_is_finished_nothing_changes(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("old")
    files = [OutputFile(path, "trace") for path in (old, new)]
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert old.read_text() == "old"
    for file, content in zip(files, ("text", b"text"), strict=True):
        file.finish(content)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]
    assert old.read_text() == new.read_text() == "text"


def test_a_run_that_fails_leaves_the_trace_that_was_there(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("old")
    for error in (PpsdError, KeyboardInterrupt):
        with pytest.raises(error), TraceFile(path):
            raise error("why")
    assert path.read_text() == "old"
    with TraceFile(path):
        pass
    assert path.read_text().startswith('{"traceEvents"')


def test_a_disk_that_is_full_at_the_end_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "plot.svg"
    path.write_text("old")
    file = OutputFile(path, "plot")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(PpsdError, match="cannot write the plot to .*: No space left on device"):
        file.finish("new")
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["plot.svg"]


def test_where_nothing_can_be_put_beside_it_the_file_itself_is_written(tmp_path, monkeypatch):
    path = tmp_path / "mounted"
    path.write_text("old")
    file = OutputFile(path, "trace")

    def busy(*_):
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(os, "replace", busy)
    file.finish("new")
    assert path.read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["mounted"]


def test_permissions_and_links_stay(tmp_path):
    target, link, fresh = tmp_path / "target", tmp_path / "link", tmp_path / "fresh"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to("target")
    OutputFile(link, "trace").finish("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    before = os.umask(0o027)
    try:
        OutputFile(fresh, "trace").finish("new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o640


def test_pipes_devices_and_standard_output_are_written_to(tmp_path, capfd):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    OutputFile(pipe, "trace").finish("text")
    reader.join()
    OutputFile("/dev/null", "trace").finish("text")
    os.write(1, b"answer ")
    OutputFile("/dev/stdout", "trace").finish("text")
    assert (read, capfd.readouterr().out) == (["text"], "answer text")


@pytest.mark.parametrize("name", ["", "folder", "new/", "none/file", "file/inside", "x" * 300, "a\0b"])
def test_a_bad_path_is_told_at_once(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write the trace to"):
        OutputFile(f"{tmp_path}/{name}", "trace")
    assert len(list(tmp_path.iterdir())) == 2


def test_what_the_command_reads_is_not_overwritten(tmp_path):
    path = tmp_path / "head.safetensors"
    path.write_text("head")
    with pytest.raises(UsageError, match="would overwrite"):
        OutputFile(tmp_path / "." / "head.safetensors", "trace", ["auto", None, path])
    assert path.read_text() == "head"


UNREADABLE = {
    "directory": lambda path: path.mkdir(),
    "fifo": os.mkfifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path),
    "too large": lambda path: path.touch() or os.truncate(path, 1 << 40),
    "no JSON": lambda path: path.write_bytes(bytes(range(128, 256))),
    "cut": lambda path: path.write_bytes(b"[1.5, 0.0"),
}


@pytest.mark.parametrize("damage", UNREADABLE)
def test_a_cache_that_cannot_be_read_counts_for_nothing_and_is_written_anew(tmp_path, damage):
    path, good = tmp_path / "learned", [1.5, 0.0, 3.0]
    UNREADABLE[damage](path)
    assert learned.read(path) == []
    learned.write(path, [])  # nothing has been decoded
    learned.write(path, good)
    assert learned.read(path) == good
    assert [child.name for child in tmp_path.iterdir() if child.name != "nowhere"] == ["learned"]


def test_a_folder_in_the_place_of_a_cache_that_is_not_empty_stays(tmp_path):
    (tmp_path / "learned" / "file").mkdir(parents=True)
    learned.write(tmp_path / "learned", [1.5])
    assert learned.read(tmp_path / "learned") == []
    assert [child.name for child in tmp_path.iterdir()] == ["learned"]
