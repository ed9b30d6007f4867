"""What is kept of answers: whole after every fault, bounded, one writer's, and gone when it is to be."""

import logging
import shutil
import stat
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest

from ppsd_rt.errors import PpsdError, UsageError
from ppsd_rt.learning.kept import LEAST_ANSWER, Kept, Lock, forget, newest, read_days, read_model, read_records

TOLD = {"hash": "abc", "name": "tiny", "dtype": "int8", "head": "auto"}
VOCABULARY = 1000
DAY = 20_000 * 86400.0


@pytest.fixture(autouse=True)
def warns(caplog):
    """Whatever other tests have set for the whole package."""
    caplog.set_level(logging.WARNING, "ppsd_rt.learning")


def keep(folder, told=TOLD, **options):
    return Kept(folder, told, VOCABULARY, clock=lambda: DAY, **options)


def text(number, tokens=20):
    return [number, 1, 2], [number, *range(3, tokens + 2)]


def read(folder):
    return [record.ids[0] for record, _ in read_records(folder, VOCABULARY)]


def filled(folder, count):
    kept = keep(folder)
    for number in range(count):
        assert kept.add(*text(number))
    kept.close()
    return folder


def test_answers_are_kept_once_for_their_owner_alone(tmp_path):
    folder = tmp_path / "kept"
    kept = keep(folder)
    assert kept.add([7, 8], range(LEAST_ANSWER), free=False, owner=5, judged=10, accepted=6)
    assert kept.add([7, 8], range(LEAST_ANSWER + 1), owner=None, judged=5, accepted=1)
    assert not kept.add([7, 8], range(LEAST_ANSWER), owner=5, judged=3, accepted=3), "it is there"
    assert not kept.add([7, 8], range(LEAST_ANSWER - 1)), "too short"
    kept.close()
    (first, _), (second, _) = read_records(folder, VOCABULARY)
    assert (first.ids.tolist(), first.answer, first.free, first.owner) == ([7, 8, *range(LEAST_ANSWER)], 2, False, 5)
    assert (second.free, second.owner, second.day) == (True, None, 20_000)
    assert read_days(folder) == {"2024-10-04": [18, 10]} and read_model(folder) == TOLD
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    keeping = keep(folder)  # SQLite's own files, too, which go with the last connection
    keeping.add(*text(5, LEAST_ANSWER - 1), judged=1)
    assert len([*folder.iterdir()]) == 6
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    keeping.close()
    again = keep(folder)
    assert not again.add([7, 8], range(LEAST_ANSWER), owner=5) and again.secret == kept.secret
    assert (again.tokens, again.fresh) == (2 * LEAST_ANSWER + 1, 2 * LEAST_ANSWER + 1)


KILLED = """
import os, sys
from pathlib import Path
from ppsd_rt.learning.kept import Kept
kept = Kept(Path(sys.argv[1]), {"hash": "abc", "name": "tiny", "dtype": "int8", "head": "auto"}, 1000)
for number in range(1000):
    if kept.add([number, 1, 2], [number, *range(3, 22)], judged=1):
        print(number, flush=True)
"""


def test_a_writer_that_is_killed_loses_nothing_that_it_has_kept(tmp_path):
    folder = tmp_path / "kept"
    process = subprocess.Popen([sys.executable, "-c", KILLED, folder], stdout=subprocess.PIPE, text=True)
    for _ in range(300):
        last = int(process.stdout.readline())
    process.kill()
    last = max([last, *map(int, process.stdout.read().split("\n")[:-1])])
    process.wait()
    assert (folder / "answers.sqlite-wal").exists(), "it did not end by itself"
    kept = keep(folder)
    found = read(folder)
    assert found == [*range(len(found))] and len(found) in (last + 1, last + 2)
    assert sum(judged for judged, _ in read_days(folder).values()) == len(found)
    assert kept.add(*text(999))
    kept.close()
    assert read(folder) == [*found, 999]


def test_of_a_damaged_file_stays_what_can_be_read(tmp_path, caplog):
    folder = filled(tmp_path / "kept", 500)
    path = folder / "answers.sqlite"
    whole = path.read_bytes()
    for place in range(0, len(whole), 5 * 4096):
        damaged = bytearray(whole)
        damaged[place : place + 4096] = bytes(range(256)) * 16
        path.write_bytes(damaged)
        caplog.clear()
        kept = keep(folder)
        assert "is damaged: what can be read of it stays" in caplog.text
        assert kept.add(*text(999))
        kept.close()
        found = read(folder)
        assert found.pop() == 999 and set(found) <= set(range(500))
        caplog.clear()
        keep(folder).close()
        assert not caplog.records, "it is whole again"
    path.write_bytes(b"")
    assert keep(folder).tokens == 0


def test_a_full_disk_costs_no_answer_and_one_line(tmp_path, caplog):
    kept = keep(tmp_path / "kept")
    assert kept.add(*text(1))
    (most,) = kept._db.execute("PRAGMA page_count").fetchone()
    kept._db.execute(f"PRAGMA max_page_count = {most}")
    with caplog.at_level(logging.WARNING):
        refused = [kept.add(*text(number, 800), judged=1) for number in range(2, 30)]
    assert not any(refused[1:])
    assert [record.getMessage() for record in caplog.records] == [
        f"answers are not kept in {tmp_path / 'kept'}: database or disk is full"
    ]
    kept._db.execute("PRAGMA max_page_count = 100000")
    assert kept.add(*text(30, 800)), "there is room again"
    assert kept.tokens == sum(record.tokens for record, _ in read_records(tmp_path / "kept", VOCABULARY))


def test_the_oldest_answers_go_where_there_are_too_many_and_leave_no_trace(tmp_path):
    most = 200_000
    kept = keep(tmp_path / "kept", most_bytes=most)
    for number in range(VOCABULARY):
        assert kept.add([number, 1, 2], [number, *range(3, 82)])
    found = read(kept.folder)
    assert found == [*range(VOCABULARY - len(found), VOCABULARY)] and len(found) > 200
    assert kept.tokens == 80 * len(found) == kept.fresh
    kept.close()
    data = (kept.folder / "answers.sqlite").read_bytes()
    assert len(data) <= most + 50_000
    gone, there = (np.array([number, 1, 2, number, 3], "<i4").tobytes() for number in (300, VOCABULARY - 1))
    assert gone not in data and there in data
    kept = keep(kept.folder, most_bytes=most)
    assert kept.add(*text(0, 10)), "what has gone may come again"


def test_a_folder_has_one_writer_and_one_model(tmp_path):
    folder = tmp_path / "kept"
    kept = keep(folder)
    with pytest.raises(PpsdError, match=r"another process keeps answers in .*: end it first, or name another folder$"):
        keep(folder)
    with pytest.raises(PpsdError, match="another process keeps answers in"):
        forget(folder)
    kept.close()
    with pytest.raises(PpsdError, match=r"keeps answers of tiny, another model: name another folder$"):
        keep(folder, TOLD | {"hash": "other"})
    keep(folder).close()  # a refusal has no lock


def test_what_is_no_folder_of_answers_is_refused_in_one_line(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds other files \(thesis.txt\): name a folder that is empty, or new"):
        keep(tmp_path)
    with pytest.raises(PpsdError, match="holds no answers"):
        forget(tmp_path)
    with pytest.raises(PpsdError, match="cannot keep answers in .*: Not a directory"):
        keep(tmp_path / "thesis.txt" / "kept")
    folder = filled(tmp_path / "kept", 1)
    (folder / "model.json").write_text("{}")
    with pytest.raises(PpsdError, match=r"model.json is damaged .*: name another folder$"):
        keep(folder)


@pytest.mark.parametrize("name", [".ssh/id_ed25519", ".unfinished", "own-photos/cat.jpg"])
def test_a_folder_of_dot_files_is_not_taken_for_an_empty_one(tmp_path, name):
    """Such as a home of a container, or a repository of .git alone."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    tmp_path.chmod(0o755)
    with pytest.raises(UsageError, match="holds other files"):
        keep(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755 and (tmp_path / name).read_text() == "mine"


def test_forgetting_leaves_nothing_of_ours_and_all_else(tmp_path):
    folder = filled(tmp_path / "kept", 3)
    ours = [
        "heads/00001.safetensors",
        "heads/state.json",
        "heads/.ppsd-0123456789abcdef.unfinished",
        "own-int8-ab12-2-4/text-00000.safetensors",
    ]
    others = [".ssh/id_ed25519", ".env", "notes.txt", "heads/mine.txt", "own-photos/cat.jpg"]
    for name in (*ours, *others, ".ppsd-0123456789abcdef.unfinished"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"data")
    (folder / "heads" / "00002.safetensors").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text("mine")
    with closing(Lock(folder, ".training.lock")), pytest.raises(PpsdError, match="learns from"):
        forget(folder)
    assert forget(folder) > (3 * 23) * 4
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    assert left == {*others, ".lock", ".training.lock"} and (tmp_path / "elsewhere").exists()
    for name in (".ssh", "heads", "own-photos"):
        shutil.rmtree(folder / name)
    for name in (".env", "notes.txt"):
        (folder / name).unlink()
    assert read(filled(folder, 1)) == [0], "and it may be used again"


def test_ids_outside_of_the_vocabulary_are_left_out(tmp_path):
    folder = filled(tmp_path / "kept", 1)
    assert [record.ids[0] for record, _ in read_records(folder, 10)] == []


def test_the_newest_that_have_so_many_tokens():
    assert [newest([5, 4, 3], most) for most in (0, 3, 6, 7, 12, 50)] == [3, 2, 2, 1, 0, 0]
    assert newest(np.array([]), 5) == 0
