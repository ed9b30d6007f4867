"""`ppsd-run cache`: what it lists, what it removes, and what it leaves alone."""

import io

import pytest
from filelock import FileLock
from support import small_gguf

from ppsd_rt.cli import cache as command
from ppsd_rt.cli import main as cli
from ppsd_rt.cli.options import FILES, MODELS
from ppsd_rt.models.cache import kept_gguf

OURS = {  # of every kind but models
    "learned/0123456789abcdef.json": "learned",
    "learned/.ppsd-0123456789abcdef.unfinished": "learned",
    "importance/0123456789abcdef-1.npy": "importance",
    "chat/history.txt": "chat",
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
    path = kept_gguf(folder / "models" / "small", "a test", "small.gguf", lambda work: made.rename(work / "small"))
    return path.parent


def there(folder, names):
    return {name for name in names if (folder / name).exists()}


def found(folder):
    return {(kind, str(path.relative_to(folder))) for kind, paths in command.found(folder).items() for path in paths}


def test_it_lists_kinds_and_sizes(folder, model, capsys):
    assert found(folder) == {(kind, name) for name, kind in OURS.items()} | {(MODELS, f"models/{model.name}")}
    assert cli.main(["cache"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(folder)
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:-1]}
    assert (rows["learned"], rows["importance"]) == (["2", "3.0", "kB"], ["1", "1.5", "kB"])
    assert (rows["models"][0], lines[-1].startswith("6 items, ")) == ("1", True)


def test_it_removes_one_kind(folder, model, capsys):
    for kind in FILES:
        assert cli.main(["cache", "--clean", kind, "--yes"]) == 0
        assert {item for item in OURS if OURS[item] == kind and (folder / item).exists()} == set()
    assert model.exists()
    assert cli.main(["cache", "--clean", MODELS, "--yes"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("removed 1 item, ")
    assert found(folder) == set()
    assert there(folder, NOT_OURS) == set(NOT_OURS)
    assert [path.name for path in (folder / "models").iterdir() if not path.name.endswith(".lock")] == ["mine"]
    assert cli.main(["cache", "--clean"]) == 0  # nothing is left to be asked for


def test_it_asks_before_anything_is_removed(folder, model, monkeypatch, capsys):
    for answer, kind, status in (("\n", "chat", 1), ("", "all", 1), ("n\n", "models", 1), ("y\n", "all", 0)):
        monkeypatch.setattr("sys.stdin", Terminal(answer))
        assert cli.main(["cache", "--clean", kind]) == status
        captured = capsys.readouterr()
        assert "Remove " in captured.err and captured.err.endswith("? [y/N] ")
        assert captured.out.startswith(f"removed {len(OURS) + 1} items") == (status == 0)
        assert (model.exists(), there(folder, OURS) == set(OURS)) == (status == 1, status == 1)
    assert there(folder, NOT_OURS) == set(NOT_OURS)


def test_where_nobody_can_be_asked_nothing_is_removed(folder, model, monkeypatch, capsys):
    """As `rm` does."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert cli.main(["cache", "--clean", "chat"]) == 2
    assert "(chat) would be removed; --yes does so without a question" in capsys.readouterr().err
    assert there(folder, OURS) == set(OURS)


def test_links_lead_to_what_is_not_ours(folder, model, tmp_path):
    outside = tmp_path / "outside"
    for name in ("check", "model"):
        (outside / name).mkdir(parents=True)
    (outside / "check" / "seed-1.jsonl").touch()
    (outside / "model" / "ppsd-rt-stamp.json").touch()
    (outside / "one.json").touch()
    (folder / "models" / "link").symlink_to(outside / "model")
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
    assert cli.main(["cache", "--clean", "models", "--yes"]) == 0
    assert not work.exists()


def test_a_model_that_is_being_made_stays(folder, model, capsys):
    with FileLock(model.with_name(f".{model.name}.lock")):
        assert cli.main(["cache", "--clean", "models", "--yes"]) == 1
    assert "another process is preparing" in capsys.readouterr().err
    assert model.exists()
