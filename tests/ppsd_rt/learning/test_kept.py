"""What is kept of answers: whole after every fault, bounded, one writer's, and gone when it is to be."""

import logging
import os
import stat
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
    assert not kept.add([7, 8], range(LEAST_ANSWER), judged=3, accepted=3), "it is there"
    assert not kept.add([7, 8], range(LEAST_ANSWER - 1)), "too short"
    kept.close()
    (first, _), (second, _) = read_records(folder, VOCABULARY)
    assert (first.ids.tolist(), first.answer, first.free, first.owner) == ([7, 8, *range(LEAST_ANSWER)], 2, False, 5)
    assert (second.free, second.owner, second.day) == (True, None, 20_000)
    assert read_days(folder) == {"2024-10-04": [18, 10]} and read_model(folder) == TOLD
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    again = keep(folder)
    assert not again.add([7, 8], range(LEAST_ANSWER)) and again.secret == kept.secret
    assert (again.tokens, again.fresh, again.days) == (2 * LEAST_ANSWER + 1, 2 * LEAST_ANSWER + 1, kept.days)


def test_a_writer_that_is_killed_loses_the_answer_in_progress_alone(tmp_path, caplog):
    folder = filled(tmp_path / "kept", 3)
    path = folder / "answers-00000.bin"
    whole, (*_, (_, (_, before)), _) = path.read_bytes(), [*read_records(folder, VOCABULARY)]
    for cut in range(before + 1, len(whole)):
        path.write_bytes(whole[:cut])
        caplog.clear()
        kept = keep(folder)
        assert len(caplog.records) == 1 and "cut short" in caplog.text
        assert kept.add(*text(9))
        kept.close()
        assert read(folder) == [0, 1, 9], "what follows a cut record would be lost"
        (folder / "answers-00001.bin").unlink()
    path.write_bytes(whole)
    keep(folder).add(*text(9))
    assert read(folder) == [0, 1, 2, 9] and not (folder / "answers-00001.bin").exists()


def test_a_damaged_file_is_read_up_to_there_and_others_whole(tmp_path, caplog):
    folder = filled(tmp_path / "kept", 3)
    path = folder / "answers-00000.bin"
    data, size = bytearray(path.read_bytes()), path.stat().st_size // 3
    os.link(path, folder / "answers-00001.bin")
    for place in range(size, 2 * size, 7):
        damaged = bytearray(data)
        damaged[place] ^= 0x10
        path.unlink()
        path.write_bytes(damaged)
        caplog.clear()
        assert read(folder) == [0, 0, 1, 2] and len(caplog.records) == 1


@pytest.mark.parametrize("content", ["", "[]", "{", '{"2024-10-04": [0, 0]}', '{"2024-10-04": 3}'])
def test_damaged_counts_of_days_begin_anew(tmp_path, content):
    folder = filled(tmp_path / "kept", 1)
    (folder / "days.json").write_text(content)
    assert keep(folder).days == {}


def test_a_full_disk_costs_no_answer_and_one_line(tmp_path, caplog):
    kept = keep(tmp_path / "kept")
    assert kept.add(*text(1))
    there, kept._path = kept._path, tmp_path / "kept" / "answers-00001.bin"
    kept._path.symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING):
        assert not kept.add(*text(2)) and not kept.add(*text(3))
    assert [record.getMessage() for record in caplog.records] == [
        f"answers are not kept in {tmp_path / 'kept'}: No space left on device"
    ]
    kept._path.unlink()
    kept._path = there
    assert kept.add(*text(2)), "there is room again"
    assert read(tmp_path / "kept") == [1, 2]


def test_half_a_record_on_a_full_disk_is_taken_back(tmp_path, monkeypatch):
    kept = keep(tmp_path / "kept")
    assert kept.add(*text(1))
    real = os.fdopen

    class Full:
        def __init__(self, *args, **options):
            self.file = real(*args, **options)

        def write(self, data):
            self.file.write(data[: len(data) // 2])
            return len(data) // 2

        def truncate(self, size):
            self.file.truncate(size)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

    with monkeypatch.context() as patch:
        patch.setattr("ppsd_rt.learning.kept.open", Full, raising=False)
        assert not kept.add(*text(2))
    assert kept.add(*text(3)) and read(tmp_path / "kept") == [1, 3]


def test_the_oldest_answers_go_where_there_are_too_many(tmp_path):
    most = 40_000
    kept = keep(tmp_path / "kept", most_bytes=most)
    for number in range(VOCABULARY):
        assert kept.add(*text(number, 10))
        assert sum(path.stat().st_size for path in kept.folder.glob("answers-*")) <= most
    found = read(kept.folder)
    assert found == [*range(VOCABULARY - len(found), VOCABULARY)] and len(found) > 400
    assert kept.tokens == 10 * len(found)
    assert kept.add(*text(0, 10)) and not kept.add(*text(VOCABULARY - 1, 10)), "what has gone may come again"


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
    with pytest.raises(UsageError, match="holds other files: name a folder that is empty, or new"):
        keep(tmp_path)
    with pytest.raises(PpsdError, match="holds no answers"):
        forget(tmp_path)
    with pytest.raises(PpsdError, match="cannot keep answers in .*: Not a directory"):
        keep(tmp_path / "thesis.txt" / "kept")
    folder = filled(tmp_path / "kept", 1)
    (folder / "model.json").write_text("{}")
    with pytest.raises(PpsdError, match=r"model.json is damaged .*: name another folder$"):
        keep(folder)


def test_forgetting_leaves_nothing(tmp_path):
    folder = filled(tmp_path / "kept", 3)
    (folder / "heads").mkdir()
    (folder / "heads" / "00001.safetensors").write_bytes(b"head")
    size = (folder / "answers-00000.bin").stat().st_size
    with closing(Lock(folder, ".training.lock")), pytest.raises(PpsdError, match="learns from"):
        forget(folder)
    assert forget(folder) > size
    assert {path.name for path in folder.iterdir()} <= {".lock", ".training.lock"}
    assert read(filled(folder, 1)) == [0], "and it may be used again"


def test_ids_outside_of_the_vocabulary_are_left_out(tmp_path):
    folder = filled(tmp_path / "kept", 1)
    assert [record.ids[0] for record, _ in read_records(folder, 10)] == []


def test_the_newest_that_have_so_many_tokens():
    assert [newest([5, 4, 3], most) for most in (0, 3, 6, 7, 12, 50)] == [3, 2, 2, 1, 0, 0]
    assert newest(np.array([]), 5) == 0
