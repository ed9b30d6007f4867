"""A GGUF file as a checkpoint of its own: the same numbers as the folder that it can be converted to, bit by bit."""

import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_support import (
    BLOCK_KINDS,
    TABLE_KINDS,
    as_folder,
    gguf_name,
    interleaved,
    metadata,
    random_blocks,
    tiny_state,
    write_gguf,
)

from ppsd_rt import SamplingParams, _native
from ppsd_rt.cpu.backend import CpuBackend
from ppsd_rt.cpu.native import packable
from ppsd_rt.cpu.packing import pack_model
from ppsd_rt.engine import Engine
from ppsd_rt.errors import PpsdError
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.tokenizer import load_tokenizer

WIDE = {"hidden": 256, "inner": 256, "heads": 8, "kv_heads": 2, "head_dim": 32}


def mixed_gguf(path: Path) -> Path:
    """Every type of block in one model, q, k and v of three different ones."""
    state = tiny_state(bias="qkvo", **WIDE)
    kinds = [*BLOCK_KINDS, Kind.F16, Kind.BF16, Kind.F32]
    raw: dict[str, tuple[np.ndarray, Kind]] = {}
    for number, (key, tensor) in enumerate((k, t) for k, t in state.items() if t.dim() == 2):
        kind = kinds[number % len(kinds)]
        if kind in BLOCK_KINDS:
            # Random scales reach 1e9: scaled down, so that sums in the layers stay finite.
            data = random_blocks(kind, len(tensor), tensor.shape[1], number)
            raw[gguf_name(key)] = tamed(data, kind), kind
        else:
            raw[gguf_name(key)] = gguf.quants.quantize(0.05 * tensor.numpy(), kind), kind
    return write_gguf(path, state, metadata(**WIDE), raw=raw)


def tamed(data: np.ndarray, kind: Kind) -> np.ndarray:
    """Blocks whose float16 scales are below 0.01."""
    _, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = data.reshape(-1, size).copy()
    places = {Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q6_K: (208,)}.get(kind, (0, 2))
    with_least = (Kind.Q4_1, Kind.Q5_1, Kind.Q2_K, Kind.Q4_K, Kind.Q5_K)
    for place in places if kind in with_least else places[:1]:
        blocks[:, place + 1] = blocks[:, place + 1] & 0b10000011 | 0b00010000
    return blocks.reshape(data.shape)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A .gguf file, and the folder that it was converted to."""
    place = tmp_path_factory.mktemp("gguf")
    path = mixed_gguf(place / "m.gguf")
    as_folder(path, place / "m")
    return path, place / "m"


def decoded(path: Path, state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """By the `gguf` package, as rows lie in the file."""
    keys = {gguf_name(key): key for key in state}
    tensors = gguf.GGUFReader(path).tensors
    return {keys[each.name]: gguf.quants.dequantize(each.data, each.tensor_type) for each in tensors}


def as_stored(name: str, tensor: np.ndarray) -> np.ndarray:
    turned = name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias"))
    return interleaved(torch.from_numpy(tensor), WIDE["head_dim"]).numpy() if turned else tensor


def test_tensors_configuration_and_hash_are_those_of_the_converted_folder(pair: tuple[Path, Path]) -> None:
    mapped, folder = map(Checkpoint, pair)
    assert mapped.config == folder.config
    assert mapped.tensors.keys() == folder.tensors.keys()
    expected = decoded(pair[0], tiny_state(bias="qkvo", **WIDE))
    for name, tensor in folder.tensors.items():
        assert mapped.tensors[name].dtype == np.float32
        assert mapped.tensors[name].tobytes() == tensor.tobytes()
        assert as_stored(name, tensor).tobytes() == expected[name].tobytes()
    assert mapped.hash == folder.hash
    assert mapped.parameters == folder.parameters == sum(tensor.size for tensor in folder.tensors.values())
    assert mapped.stored_as == sorted({kind.name for kind in (*BLOCK_KINDS, Kind.F16, Kind.BF16, Kind.F32)})
    assert folder.stored_as == ["float32"]


@pytest.mark.parametrize("kind", BLOCK_KINDS, ids=lambda kind: kind.name)
def test_the_extension_decodes_as_the_gguf_package_does(kind: Kind) -> None:
    data = random_blocks(kind, 64, 512, seed=kind.value)
    expected = gguf.quants.dequantize(data, kind)
    blocks = _native.Blocks(data, kind.name, 512)
    assert np.stack([_native.testing.row(blocks, row) for row in range(64)]).tobytes() == expected.tobytes()
    turned = _native.Blocks(data, kind.name, 512, 16)
    order = expected.reshape(4, 8, 2, 512).swapaxes(1, 2).reshape(64, 512)
    assert np.stack([_native.testing.row(turned, row) for row in range(64)]).tobytes() == order.tobytes()


def test_blocks_that_do_not_fit_are_refused() -> None:
    data = random_blocks(Kind.Q8_0, 4, 64, seed=0)
    for arguments in ((data, "Q8_0", 96), (data, "Q8_0", 63), (data, "Q9_9", 64), (data[:, ::2], "Q8_0", 32)):
        with pytest.raises(RuntimeError, match="blocks"):
            _native.Blocks(*arguments)
    with pytest.raises(RuntimeError, match="blocks do not fit"):
        _native.Blocks(data, "Q8_0", 64, 8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])  # int4 takes a file's four bits as they are
def test_packed_weights_and_answers_are_those_of_the_converted_folder(pair: tuple[Path, Path], dtype: str) -> None:
    answers, logits, params = [], [], SamplingParams(max_tokens=12, ignore_eos=True)
    for place in pair:
        checkpoint = Checkpoint(place)
        engine = Engine(checkpoint, load_tokenizer(place), CpuBackend(checkpoint, dtype, "cpu", 2), "m")
        logits.append(engine.backend.logits([3, 5, 7, 9], last=4))
        answers.append(engine.generate("hello the", params, "plain").run().ids)
    assert np.isfinite(logits[0]).all()
    assert logits[0].tobytes() == logits[1].tobytes()
    assert answers[0] == answers[1]


def test_tokenizers_are_the_same(pair: tuple[Path, Path]) -> None:
    mapped, folder = (load_tokenizer(place) for place in pair)
    for text in ("hello the 1234!", "<|im_start|>hell", "é 中"):
        assert mapped.encode(text) == folder.encode(text)
        assert mapped.decode(mapped.encode(text)) == folder.decode(folder.encode(text))
    assert (mapped.bos_id, mapped.eos_id, mapped.special_ids) == (folder.bos_id, folder.eos_id, folder.special_ids)
    assert mapped.chat_template is not None
    assert mapped.chat_template.render([{"role": "user", "content": "hi"}]) == "hi"
    assert mapped.chat_template.origin == str(pair[0])


def test_tool_use_and_added_letters(tmp_path: Path) -> None:
    """llama.cpp's key for a second template; added tokens are text, whatever letters they have."""
    values = metadata()
    values["tokenizer.ggml.tokens"][3] = "đem"  # of the type that is for added tokens
    values["tokenizer.chat_template.tool_use"] = "with tools: {{ messages[0]['content'] }}"
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", values=values))
    said = [{"role": "user", "content": "hi"}]
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render(said) == "hi"
    assert tokenizer.chat_template.render(said, template_variables={"tools": []}) == "with tools: hi"
    ids = tokenizer.encode("xđemx", add_special_tokens=False)
    assert ids[1:-1] == [3]
    assert (tokenizer.decode(ids), tokenizer.token_bytes(3)) == ("xđemx", "đem".encode())


def test_loading_needs_the_memory_of_the_packed_weights(tmp_path: Path) -> None:
    """Beside them numpy holds a vector or a block at a time. test_default_model.py has the peak of a whole process."""
    sizes = {"hidden": 512, "inner": 2048, "heads": 16, "kv_heads": 4, "head_dim": 32, "layers": 12}
    path = random_gguf(tmp_path / "m.gguf", Kind.Q4_K, sizes)
    matrices = 12 * (512 * 512 * 2 + 512 * 128 * 2 + 3 * 512 * 2048)
    packed = matrices * 34 // 32  # a byte a weight, and two of each block's scale
    checkpoint = Checkpoint(path)
    tracemalloc.start()  # numpy reports its allocations to it
    try:
        assert len(checkpoint.hash) == 16
        model = pack_model(checkpoint, "int8", "int8", 1)
        assert tracemalloc.get_traced_memory()[1] < packed // 8
        assert packed < model.packed_bytes < packed * 1.02
        assert sum(tensor.nbytes for tensor in dict(checkpoint.tensors).values()) > packed
        assert tracemalloc.get_traced_memory()[1] > packed  # decoded at once
    finally:
        tracemalloc.stop()


def random_gguf(path: Path, kind: Kind, sizes: dict[str, int]) -> Path:
    """All matrices but the embedding are one block after the other of random bytes, the same in every matrix."""
    blocks = random_blocks(kind, 64, 2048, seed=0)
    state = tiny_state(**sizes)
    raw: dict[str, tuple[np.ndarray, Kind]] = {}
    for key, tensor in state.items():
        if tensor.dim() == 2 and "embed" not in key:
            rows = gguf.quants.quant_shape_to_byte_shape(tuple(tensor.shape), kind)
            raw[gguf_name(key)] = np.resize(blocks, rows), kind
    return write_gguf(path, state, metadata(**sizes), raw=raw)


# ---------------------------------------------------------------------------------------------------------------------
# Split models
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A model of 20 tensors in three files."""
    write_gguf(tmp_path / "m.gguf", tensors_of_a_part=8)
    return sorted(tmp_path.glob("m-0000?-of-00003.gguf"))


def test_any_part_stands_for_the_whole_model(parts: list[Path], tmp_path: Path) -> None:
    whole = Checkpoint(write_gguf(tmp_path / "whole.gguf"))
    assert len(parts) == 3
    for part in parts:
        checkpoint = Checkpoint(part)
        assert (checkpoint.hash, checkpoint.config) == (whole.hash, whole.config)
        assert all(np.array_equal(checkpoint.tensors[name], tensor) for name, tensor in whole.tensors.items())
        assert load_tokenizer(part).encode("hello the") == load_tokenizer(tmp_path / "whole.gguf").encode("hello the")
    assert (checkpoint.name, whole.name) == ("m-00003-of-00003", "whole")
    as_folder(parts[1], tmp_path / "folder")
    assert Checkpoint(tmp_path / "folder").hash == whole.hash


def refusal(path: Path) -> str:
    with pytest.raises(PpsdError) as caught:
        Checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_parts_that_are_no_model_are_refused(parts: list[Path], tmp_path: Path) -> None:
    """Missing, under another name, in the place of another, and of another model as far as its tensors tell that."""
    (tmp_path / "other").mkdir()
    write_gguf(tmp_path / "other" / "m.gguf", tiny_state(seed=1), tensors_of_a_part=9)
    others = sorted((tmp_path / "other").glob("*.gguf"))
    for name in ("m.gguf", "m-1-of-3.gguf", "m-00001-of-00004.gguf"):
        parts[0].rename(tmp_path / name)
        assert "NAME-00001-of-00003.gguf" in refusal(tmp_path / name)
        (tmp_path / name).rename(parts[0])
    good = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    assert refusal(parts[0]).startswith(f"{parts[1]}: split.no is 2, where 1 is needed")
    parts[1].write_bytes(others[1].read_bytes())
    assert refusal(parts[0]).startswith(f"{parts[0]}: split.tensors.count is ")
    parts[1].write_bytes(good)
    parts[2].write_bytes(others[2].read_bytes())
    assert refusal(parts[2]).startswith(f"{parts[0]}: split.tensors.count is ")
    parts[2].unlink()
    for part in parts[:2]:
        assert refusal(part).startswith(f"{part}: the part {parts[2].name} beside it is missing")


# ---------------------------------------------------------------------------------------------------------------------
# What packing makes of blocks
# ---------------------------------------------------------------------------------------------------------------------


def test_q8_0_comes_through_int8_unchanged() -> None:
    """Both are blocks of 32 with a float16 scale; llama.cpp makes the largest weight of a block 127 or -127."""
    values = np.random.default_rng(0).standard_normal((48, 64), np.float32)
    data = gguf.quants.quantize(values, Kind.Q8_0)
    weights = gguf.quants.dequantize(data, Kind.Q8_0)
    assert np.array_equal(_native.testing.packed(weights, "int8"), weights)
    assert not np.array_equal(_native.testing.packed(values, "int8"), values)


def test_types_that_go_by_tables_are_decoded_by_the_package_that_has_them(tmp_path: Path) -> None:
    state = tiny_state(tied=False, **WIDE)
    wide = [key for key, tensor in state.items() if tensor.dim() == 2]
    kinds = dict(zip(wide, TABLE_KINDS * 2, strict=False))
    raw = {
        gguf_name(key): (random_blocks(kind, len(state[key]), 256, number), kind)
        for number, (key, kind) in enumerate(kinds.items())
    }
    path = write_gguf(tmp_path / "m.gguf", state, metadata(**WIDE), raw=raw)
    as_folder(path, tmp_path / "m")
    mapped, folder = Checkpoint(path), Checkpoint(tmp_path / "m")
    assert {kind.name for kind in TABLE_KINDS} <= set(mapped.stored_as)
    assert mapped.hash == folder.hash
    tensors, expected = packable(mapped, "int8"), decoded(path, state)
    for name, tensor in folder.tensors.items():
        assert as_stored(name, tensor).tobytes() == expected[name].tobytes()
        if name in kinds:
            assert tensors[name].tobytes() == tensor.tobytes()
