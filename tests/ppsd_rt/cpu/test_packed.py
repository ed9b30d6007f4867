"""Packed weights that are mapped: the same bits as packing gives, and made anew where a file is of no use."""

import os
import threading
from threading import Event

import numpy as np
import pytest
from support import write_model

from ppsd_rt import Engine, SamplingParams, _native
from ppsd_rt.cpu import packed

BEGIN = 2 << 20  # of the panels in the file
IDS = [(7 * i * i + 3 * i) % 250 for i in range(40)]


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The folder, of a cache of its own. Files of any size are written."""
    monkeypatch.setenv("PPSD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PPSD_PACKED", raising=False)
    monkeypatch.setattr(packed, "LEAST", 0)
    return tmp_path / "cache" / "packed"


def load(folder, dtype="int8"):
    engine = Engine.from_pretrained(folder, exit_head="norm:1", backend="cpu", dtype=dtype, threads=1)
    packed.finish()
    return engine


def is_mapped(folder, dtype="int8"):
    return load(folder, dtype).backend._base.mapped


def bits(engine):
    answer = engine.generate(IDS, SamplingParams(max_tokens=16, logprobs=2), "eesd").run()
    return engine.backend.logits(IDS, len(IDS)).tobytes(), answer.ids, answer.logprobs


@pytest.mark.parametrize("isa", _native.usable_isas())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_the_same_bits(folder, kept, monkeypatch, dtype, isa):
    monkeypatch.setenv("PPSD_ISA", isa)
    monkeypatch.setenv("PPSD_PACKED", "0")
    without = bits(load(folder, dtype))
    assert not kept.exists()
    monkeypatch.delenv("PPSD_PACKED")
    first, second = load(folder, dtype), load(folder, dtype)
    assert not first.backend._base.mapped and second.backend._base.mapped
    assert bits(first) == bits(second) == without
    assert [path.stat().st_mode & 0o777 for path in kept.iterdir()] == [0o600]


def flipped(content):
    return content[:-1] + bytes([content[-1] ^ 1])


DAMAGES = {
    "one bit": flipped,
    "one bit of the first panel": lambda content: (
        content[:BEGIN] + bytes([content[BEGIN] ^ 128]) + content[BEGIN + 1 :]
    ),
    "cut": lambda content: content[:-4096],
    "longer": lambda content: content + bytes(4096),
    "empty": lambda content: b"",
    "header": lambda content: content.replace(b"int8", b"int4", 1),
    "no checksum": lambda content: content[:4079] + b"x" * 17 + content[4096:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_anew(folder, kept, damage):
    good = bits(load(folder))
    (path,) = kept.iterdir()
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(DAMAGES[damage](whole))
    engine = load(folder)
    assert not engine.backend._base.mapped
    assert bits(engine) == good
    assert path.read_bytes() == whole
    assert is_mapped(folder)


def test_other_weights_of_the_same_name_are_packed(tmp_path, kept):
    folder = write_model(tmp_path / "model")
    load(folder)
    before = bits(load(folder))
    (weights,) = folder.glob("*.safetensors")
    data = np.memmap(weights, np.float32, "r+", offset=weights.stat().st_size % 4)
    data[-100:] = 0.25
    data.flush()
    os.utime(weights, ns=(1, 1))
    assert bits(load(folder)) != before
    assert len(list(kept.iterdir())) == 1


def test_nothing_is_written_where_the_disk_is_nearly_full(folder, kept, monkeypatch):
    usage = packed.shutil.disk_usage("/")
    size = load(folder).backend._base.own_bytes
    (path,) = kept.iterdir()
    for free, expected in ((packed.ROOM * size - 1, False), (packed.ROOM * size, True)):
        path.unlink(missing_ok=True)
        monkeypatch.setattr(packed.shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        load(folder)
        assert path.exists() == expected
    assert [child.name for child in kept.iterdir()] == [path.name]


def test_what_somebody_left_unfinished_goes(folder, kept, monkeypatch):
    kept.mkdir(parents=True)
    old, new = kept / "a.unfinished", kept / "b.unfinished"
    for file in (old, new):
        file.touch()
    os.utime(old, (1, 1))
    load(folder)
    assert not old.exists() and new.exists()


def test_ctrl_c_leaves_nothing(folder, kept, monkeypatch):
    """While the end of the process waits for the file."""
    begun = Event()

    def slow(model, handle):
        begun.set()
        raise OSError if not released.wait(60) else RuntimeError

    released = Event()
    monkeypatch.setattr(_native.Model, "write_packed", slow)

    class Interrupted(packed._Writer):
        def join(self, timeout=None):
            if not released.is_set():
                begun.wait(60)
                raise KeyboardInterrupt
            super().join(timeout)

    monkeypatch.setattr(packed, "_Writer", Interrupted)
    Engine.from_pretrained(folder, exit_head="none", backend="cpu", dtype="int8", threads=1)
    packed.finish()
    assert not list(kept.iterdir())
    released.set()
    packed.finish()
    assert not list(kept.iterdir())


def test_two_processes_hold_the_weights_once(folder, kept):
    """The pages are the file's, for whoever maps it."""
    load(folder)
    engine = load(folder)
    (path,) = kept.iterdir()
    with open("/proc/self/maps") as maps:
        lines = [line for line in maps if line.rstrip().endswith(path.name)]
    assert lines and all(" r--s " in line for line in lines)
    assert engine.backend._base.mapped


def test_a_small_model_is_only_packed(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("PPSD_CACHE", str(tmp_path / "cache"))
    load(folder)
    assert not (tmp_path / "cache" / "packed").exists()


def test_the_file_is_written_behind_the_first_answer(folder, kept, monkeypatch):
    asked = []
    monkeypatch.setattr(packed.os, "setpriority", lambda which, who, nice: asked.append((who, nice)))
    load(folder)
    assert {nice for _, nice in asked} == {10}
    assert threading.get_native_id() not in dict(asked)
