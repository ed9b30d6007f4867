"""docs/design/overview.md names the files that hand an answer on; these are the ones that are on the stack."""

import re
import sys
from itertools import takewhile
from pathlib import Path

import pytest

from ppsd_rt.backend import Cancellation
from ppsd_rt.cli.main import main

ROOT = Path(__file__).parents[1]


def walk_of(backend):
    """Its column of the table; a cell may name two files of which one is taken."""
    page = (ROOT / "docs/design/overview.md").read_text(encoding="utf-8")
    table = page.split("## The walk")[1].split("\n## ")[0]
    head, _, *rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    column = [cell.strip().strip("`") for cell in head].index(backend)
    cells = [row[1 if "the same" in row[column] else column] for row in rows]
    return [files for cell in cells if (files := re.findall(r"`([\w/]+\.\w+)`", cell))]


def files_of_stack():
    """Those of this project that are at work now, from the outermost call in; each once."""
    frame, files = sys._getframe(1), []
    while frame is not None:
        files.append(Path(frame.f_code.co_filename))
        frame = frame.f_back
    of_project = [str(file.relative_to(ROOT)) for file in reversed(files) if file.is_relative_to(ROOT)]
    return [file for file in dict.fromkeys(of_project) if file.startswith(("ppsd_rt", "models"))]


@pytest.mark.parametrize("backend", ["cpu", "cuda", "torch", "ranks"])
def test_walks_are_of_eight_files_at_most(backend):
    walk = walk_of(backend)
    assert 7 <= len(walk) <= 8
    assert all((ROOT / file).exists() for files in walk for file in files)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_the_python_half_is_what_is_called(folder, monkeypatch, capsys, backend):
    """As far as the loop, whose thread calls torch."""
    seen, real = [], Cancellation.tells

    def spy(self, *args):
        seen.append(files_of_stack())
        return real(self, *args)

    monkeypatch.setattr(Cancellation, "tells", spy)
    options = ["--backend", backend, "--exit-head", "norm:1", "--raw", "-n", "2", "--schedule", "eesd", "-q"]
    assert main(["hello", "-m", str(folder), *options]) == 0
    python = list(takewhile(lambda file: file.endswith(".py"), (file for file, *_ in walk_of(backend))))
    assert python in seen, seen
