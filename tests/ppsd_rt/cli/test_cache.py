"""`ppsd-run cache`: what it lists, what it removes, and what it leaves alone."""

import io
import os
from types import SimpleNamespace

import pytest
from filelock import FileLock
from support import small_gguf

from ppsd_rt.cli import cache as command
from ppsd_rt.cli import main as cli
from ppsd_rt.cli.options import FILES, MODELS
from ppsd_rt.models.cache import kept_gguf

OURS = {  # of every kind but models
    "learned/0123456789abcdef.json": "learned",
    "learned/tmpk3j2h1_x": "learned",
    "importance/0123456789abcdef-1.npy": "importance",
    "check/seed-0-12345678-build.jsonl": "campaigns",
    "chat/history.json": "chat",
    "benchmarks/0123456789abcdef-Q8_0.gguf": "benchmarks",
}
NOT_OURS = ("notes.txt", "models/mine/model.safetensors", "check/report.md", "learned/deeper/one.json")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache with one file of every kind, and others."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("PPSD_CACHE", str(folder))
    for name in (*OURS, *NOT_OURS):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * 1500)
    return folder


@pytest.fixture
def model(folder, tmp_path):
    made = small_gguf(tmp_path / "small.gguf")
    path = kept_gguf(folder / "gguf" / "small", "a test", "small.gguf", lambda work: made.rename(work / "small"))
    return path.parent


def there(folder, names):
    return {name for name in names if (folder / name).exists()}


def found(folder, now=0.0):
    return {(item.kind, str(item.path.relative_to(folder))) for item in command.found(folder, now)}


def test_it_lists_kinds_sizes_and_ages(folder, model, monkeypatch, capsys):
    now = 2**31
    monkeypatch.setattr(command, "time", SimpleNamespace(time=lambda: now))
    for path, at in ((folder / "chat" / "history.json", now - 3 * 86400 - 60), (model, now + 5)):
        os.utime(path, (at, at))
    assert found(folder) == {(kind, name) for name, kind in OURS.items()} | {(MODELS, f"gguf/{model.name}")}
    assert cli.main(["cache"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(folder)
    chat = next(line for line in lines if line.startswith("chat "))
    assert chat.split() == ["chat", "chat/history.json", "1.5", "kB", "3", "days"]
    assert next(line for line in lines if line.startswith("learned ")).split()[1:5] == ["2", "files", "3.0", "kB"]
    assert next(line for line in lines if line.startswith("models ")).endswith("now")
    assert lines[-1].startswith("7 items, ")


def test_it_removes_one_kind(folder, model, capsys):
    for kind in FILES:
        assert cli.main(["cache", "--clean", kind]) == 0
        assert {item for item in OURS if OURS[item] == kind and (folder / item).exists()} == set()
    assert model.exists()
    assert cli.main(["cache", "--clean", MODELS]) == 0  # nobody is there to be asked
    assert capsys.readouterr().out.splitlines()[-1].startswith("removed 1 item, ")
    assert found(folder) == set()
    assert there(folder, NOT_OURS) == set(NOT_OURS)
    assert not [path for path in (folder / "gguf").iterdir() if not path.name.endswith(".lock")]


def test_it_asks_before_models_are_removed(folder, model, monkeypatch, capsys):
    for answer, args, left in (("\n", [], True), ("", [], True), ("n\n", [], True), ("y\n", [], False)):
        monkeypatch.setattr("sys.stdin", Terminal(answer))
        assert cli.main(["cache", "--clean", *args]) == 0
        captured = capsys.readouterr()
        assert f"Remove the models {model.name}?" in captured.err
        assert captured.out.startswith("removed 0 items") == left
        assert (model.exists(), there(folder, OURS) == set(OURS)) == (left, left)
    assert there(folder, NOT_OURS) == set(NOT_OURS)


def test_it_does_not_ask_where_it_need_not(folder, model, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    assert cli.main(["cache", "--clean", "chat"]) == 0
    assert cli.main(["cache", "--clean", "--yes"]) == 0
    assert (capsys.readouterr().err, model.exists(), found(folder)) == ("", False, set())


def test_links_lead_to_what_is_not_ours(folder, model, tmp_path):
    outside = tmp_path / "outside"
    for name in ("check", "model"):
        (outside / name).mkdir(parents=True)
    (outside / "check" / "seed-1.jsonl").touch()
    (outside / "model" / "ppsd-rt-stamp.json").touch()
    (outside / "one.json").touch()
    (folder / "gguf" / "link").symlink_to(outside / "model")
    (folder / "learned" / "link.json").symlink_to(outside / "one.json")
    (folder / "check").rename(folder / "check-before")
    (folder / "check").symlink_to(outside / "check")
    (model / "deeper").symlink_to(outside)
    assert cli.main(["cache", "--clean", "--yes"]) == 0
    left = {str(path.relative_to(outside)) for path in outside.rglob("*")}
    assert left == {"check", "check/seed-1.jsonl", "model", "model/ppsd-rt-stamp.json", "one.json"}
    assert not model.exists()


def test_what_a_killed_process_has_left_of_a_model_is_listed_and_removed(folder):
    work = folder / "models" / ".smollm2-135m.work-0123abcd"
    work.mkdir()
    (work / "model.whl").write_bytes(b"x" * 1000)
    assert (MODELS, "models/smollm2-135m") in found(folder)
    assert cli.main(["cache", "--clean", "models"]) == 0
    assert not work.exists()


def test_a_model_that_is_being_made_stays(folder, model, capsys):
    with FileLock(model.with_name(f".{model.name}.lock")):
        assert cli.main(["cache", "--clean", "models"]) == 1
    assert "another process is preparing" in capsys.readouterr().err
    assert model.exists()
