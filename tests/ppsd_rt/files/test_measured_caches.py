"""What was measured and kept: a damaged file of it means measuring again and writing it anew, without a word."""

import io
import json
import os
import zipfile

import numpy as np
import pytest

from ppsd_rt._native import Costs, StageCosts
from ppsd_rt.cpu import importance
from ppsd_rt.files import cache as cache_file
from ppsd_rt.pipeline.schedule import MAX_ROWS
from ppsd_rt.planning import planner

NOW = 1_000_000.0
STAGES = StageCosts(0.1, 0.2, tuple(1.0 + 0.1 * rows for rows in range(MAX_ROWS)), 0.25, 1.1, 1e-6)
COSTS = Costs(STAGES, STAGES)
MEASURED = COSTS.replace(turns=STAGES.replace(plain=1.2))


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

LAYERS, INPUTS = 2, (8, 4, 8, 12)
WIDTH = sum(INPUTS)


def npy(array, **header):
    """As numpy writes it, with another header where one is given."""
    file = io.BytesIO()
    if header:
        spec = {"descr": "<f4", "fortran_order": False, "shape": array.shape, **header}
        np.lib.format.write_array_header_1_0(file, spec)
        file.write(array.tobytes())
    else:
        np.save(file, array, allow_pickle=True)
    return file.getvalue()


def array(place=(0, 0), value=1.0):
    weights = np.linspace(0.5, 1.5, LAYERS * WIDTH, dtype=np.float32).reshape(LAYERS, WIDTH)
    weights[place] = value
    return weights


def archive():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as out:
        out.writestr("arr_0.npy", npy(array()))
    return file.getvalue()


GOOD = npy(array())
NO_IMPORTANCE = {
    **NO_JSON,
    "cut": GOOD[:-1],
    "longer": GOOD + b"\0",
    "no magic": b"\0" + GOOD[1:],
    "header alone": GOOD[: GOOD.index(b"\n") + 1],
    "half a zip": archive()[:60],
    "objects": npy(np.array([{}], dtype=object)),
    "of 36 TiB": npy(array(), shape=(10**6, 10**7)),
    "negative shape": npy(array(), shape=(-1, WIDTH)),
    "big-endian": npy(array(), descr=">f4"),
    "nested descr": npy(array()).replace(b"'<f4'", b"((((("),
    "version": GOOD[:6] + b"\x09" + GOOD[7:],
    **{f"{value} last": npy(array((1, WIDTH - 1), value)) for value in (0.0, -1.0, 1e-30, 1e38, np.nan, np.inf)},
    "a layer of 0": npy(array((1, slice(None)), 0.0)),
}  # fmt: skip


@pytest.mark.parametrize("damage", [*NO_FILE, *NO_IMPORTANCE])
def test_importance_that_cannot_be_read(tmp_path, damage):
    path = tmp_path / "importance.npy"
    NO_FILE.get(damage, write_bytes(NO_IMPORTANCE.get(damage)))(path)
    assert importance._known(path, LAYERS, INPUTS) is None
    importance._keep(path, array())
    assert np.array_equal(importance._known(path, LAYERS, INPUTS), array())
    assert np.array_equal(np.load(path), array())
