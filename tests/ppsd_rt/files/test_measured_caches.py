"""What was measured and kept: a damaged file of it means measuring again and writing it anew, without a word."""

import json
import os

import pytest

from ppsd_rt._native import Costs, StageCosts
from ppsd_rt.files import cache as cache_file
from ppsd_rt.pipeline.schedule import MAX_ROWS
from ppsd_rt.planning import planner

NOW = 1_000_000.0
STAGES = StageCosts(
    0.1, 0.2, tuple(1.0 + 0.1 * rows for rows in range(MAX_ROWS)), first_draft=0.25, plain=1.1, step_deeper=1e-6
)
COSTS = Costs(STAGES, STAGES)
MEASURED = Costs(STAGES.replace(plain=1.2), STAGES)


def entry(costs, at):
    """Of a file, as costs_here writes it."""
    return {"costs": costs.to_dict(), "at": at}


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
    "cut": json.dumps([entry(COSTS, NOW)]).encode()[:-100],
}


def good_entry():
    return json.loads(json.dumps(entry(COSTS, NOW - 1)))


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr("time.time", lambda: NOW)


def measured_again(path):
    """Whether the file counts for nothing; if so, that it is whole afterwards."""
    calls = []
    planner.costs_here(path, lambda: calls.append(1) or MEASURED)
    kept = json.loads(path.read_text())
    assert kept[-1] == json.loads(json.dumps(entry(MEASURED, NOW)))
    return len(calls) == 1 and len(kept) == 1


def test_a_good_entry_counts(tmp_path, clock):
    path = tmp_path / "costs"
    path.write_text(json.dumps([good_entry()]))
    assert not measured_again(path)


@pytest.mark.parametrize("damage", [*NO_FILE, *NO_JSON])
def test_calibrations_that_cannot_be_read(tmp_path, clock, damage):
    path = tmp_path / "costs"
    NO_FILE.get(damage, write_bytes(NO_JSON.get(damage)))(path)
    assert measured_again(path)
    assert [child.name for child in tmp_path.iterdir() if child.name != "nowhere"] == ["costs"]


def test_of_moments_with_nothing_in_common_the_newest_counts(tmp_path, clock):
    """Each could be, but not a step that takes a 10^15th of the plain token of the one, in the other."""
    odd = Costs(STAGES.replace(row_step=1e-12, plain=3600.0))
    tiny = Costs(STAGES.replace(row_step=1e-12, plain=1e-12))
    path = tmp_path / "costs"
    path.write_text(json.dumps([entry(odd, NOW)]))
    assert planner.costs_here(path, lambda: tiny) == tiny


def test_a_folder_that_is_not_empty_stays(tmp_path, clock):
    full_directory(tmp_path / "costs")
    for _ in range(2):
        assert planner.costs_here(tmp_path / "costs", lambda: MEASURED).turns.plain == MEASURED.turns.plain
    assert [child.name for child in tmp_path.iterdir()] == ["costs"]


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
