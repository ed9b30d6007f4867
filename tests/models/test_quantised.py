"""Quantised folders: every matrix as its own library dequantises it, and one line for the schemes that are not read.

compressed-tensors packs and unpacks by its own code. gptqmodel, which reads GPTQ and AWQ, compiles for minutes on a
CPU: their layouts are written here one value at a time, as their packing code has them (`pack_original` of gptqmodel's
torch kernels, `pack_intweight` of AutoAWQ's `gemm`).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_config, tiny_model, write_model

from ppsd_rt import Engine, PpsdError, _native
from ppsd_rt.cpu.native import packable
from ppsd_rt.models.checkpoint import Checkpoint, as_float32
from ppsd_rt.models.llama import LlamaForCausalLM
from ppsd_rt.models.stored import Uniform

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def dequantised(uniform):
    """[outputs, inputs] float32. Each product is rounded once, then each sum: else exact, by scales of 16 bits."""
    values = uniform.q.reshape(len(uniform.q), -1, uniform.group).astype(np.float32)
    return (values * uniform.scale[:, :, None] + uniform.minimum[:, :, None]).reshape(uniform.q.shape)


def quantised(folder: Path, settings: dict[str, Any], replace: Any, **changes: object) -> Path:
    """A folder whose layers have what `replace(name, weight)` gives in the place of matrices; settings: its config."""
    write_model(folder, tiny_model(**changes), **changes)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(tuple(f"{matrix}.weight" for matrix in MATRICES))]:
        tensors |= {f"{name.removesuffix('weight')}{part}": t for part, t in replace(name, tensors.pop(name)).items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**tiny_config(**changes), "quantization_config": settings}))
    return folder


# -- compressed-tensors ------------------------------------------------------------------------------------------------


def scheme(**weights: Any) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


def scales(weight: torch.Tensor, group: int, block: int, most: float, dtype: torch.dtype) -> torch.Tensor:
    """One for each group of inputs of each `block` outputs; 0: of all."""
    out, inputs = weight.shape
    parts = weight.reshape(out // (block or out), block or out, inputs // (group or inputs), group or inputs)
    return (parts.abs().amax((1, 3)) / most).clamp(min=1e-6).to(dtype)


COMPRESSED = {
    "int4, groups of 32": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}, torch.bfloat16),
    "int4, asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
        torch.float16,
    ),
    "int4, channels": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}, torch.bfloat16),
    "W8A16, packed": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}, torch.bfloat16),
    "int8, channels": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, torch.bfloat16),
    "int8, whole": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}, torch.float32),
    "fp8, channels": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, torch.bfloat16),
    "fp8, whole": ("naive-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, torch.float32),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_are_what_their_library_unpacks(name: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor

    form, weights, dtype = COMPRESSED[name]
    scheme_of, expected = scheme(**weights), {}
    compressor = BaseCompressor.get_value_from_registry(form)
    group, channel = weights.get("group_size", 0), weights["strategy"] != "tensor"
    most = {4: 7.0, 8: 127.0}[weights["num_bits"]] if weights.get("type") != "float" else 448.0

    def compress(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = scales(weight, group, int(channel), most, dtype)
        state = {"weight": weight.to(dtype), "weight_scale": scale if channel else scale.reshape(1)}
        if not weights.get("symmetric", True):
            state["weight_zero_point"] = torch.randint(-3, 4, scale.shape, dtype=torch.int8)
        compressed = compressor.compress(state, scheme_of)
        expected[name] = compressor.decompress(compressed, scheme_of)["weight"]
        return {part: tensor.contiguous() for part, tensor in compressed.items()}

    checkpoint = Checkpoint(quantised(tmp_path / "m", settings_of(form, scheme_of), compress))
    for matrix, values in expected.items():
        ours = torch.from_numpy(as_float32(checkpoint.tensors[matrix]))
        assert torch.equal(ours, values.float()), matrix
        uniform = checkpoint.quantised(matrix)
        assert (uniform is None) == (weights.get("type") == "float")
        if uniform is not None:
            exact = torch.from_numpy(dequantised(uniform))
            torch.testing.assert_close(
                exact.to(dtype).float(), ours, rtol=1e-6 if dtype == torch.float32 else 0, atol=1e-7
            )
            assert uniform.q.max() < 1 << weights["num_bits"]
    assert len(expected) == 4 * 7


def settings_of(form: str, scheme: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


# -- GPTQ and AWQ ------------------------------------------------------------------------------------------------------


def draw(weight: torch.Tensor, bits: int, group: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [outputs, inputs], zero points [outputs, groups] and scales [outputs, groups] of any matrix of this shape."""
    rng, (out, inputs) = np.random.default_rng(seed), weight.shape
    q = rng.integers(0, 1 << bits, (out, inputs))
    zeros = rng.integers(1, 1 << bits, (out, inputs // group))
    return q, zeros, rng.uniform(0.01, 0.03, zeros.shape).astype(np.float16)


def words(values: np.ndarray, bits: int, order: Any = None) -> torch.Tensor:
    """[rows, columns] -> int32 [rows, columns * bits / 32]; order: which of its values lies at each place of a word."""
    each = 32 // bits
    order = range(each) if order is None else order
    packed = np.zeros((values.shape[0], values.shape[1] // each), np.uint64)
    for word in range(packed.shape[1]):
        for place, which in enumerate(order):
            packed[:, word] |= values[:, word * each + which].astype(np.uint64) << np.uint64(bits * place)
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32).copy())


def gptq(weight, bits, group, form, act_order, seed):
    """Random values of a matrix, and as they are stored."""
    q, zeros, scale = draw(weight, bits, group, seed)
    index = np.arange(weight.shape[1]) // group
    if act_order:
        np.random.default_rng(3).shuffle(index)
    exact = (q - zeros[:, index]).astype(np.float32) * scale[:, index].astype(np.float32)
    return exact, {
        "qweight": words(q, bits).T.contiguous(),
        "qzeros": words((zeros - (form == "gptq")).T, bits),
        "scales": torch.from_numpy(scale.T.copy()),
        "g_idx": torch.from_numpy(index.astype(np.int32)),
    }


def gptq_settings(bits: int, form: str) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "checkpoint_format": form}


def awq(weight: torch.Tensor, group: int, seed: int) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """As `gptq`."""
    q, zeros, scale = draw(weight, 4, group, seed)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    exact = (q - zeros.repeat(group, 1)).astype(np.float32) * scale.astype(np.float32).repeat(group, 1)
    return exact, {
        "qweight": words(q.T, 4, order),
        "qzeros": words(zeros.T, 4, order),
        "scales": torch.from_numpy(scale.T.copy()),
    }


AWQ_SETTINGS = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}


@pytest.mark.parametrize(
    ("bits", "group", "form", "act_order"),
    [
        (4, 32, "gptq", False),
        (8, 32, "gptq", False),
        (2, 16, "gptq", False),
        (4, 32, "gptq_v2", False),
        (4, 16, "gptq", True),
    ],
)
def test_gptq(bits: int, group: int, form: str, act_order: bool, tmp_path: Path) -> None:
    expected: dict[str, np.ndarray] = {}

    def pack(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        expected[name], parts = gptq(weight, bits, group, form, act_order, seed=len(expected))
        return parts

    checkpoint = Checkpoint(quantised(tmp_path / "m", gptq_settings(bits, form), pack))
    for name, exact in expected.items():
        values = exact.astype(np.float16)
        assert checkpoint.tensors[name].tobytes() == values.tobytes()
        uniform = checkpoint.quantised(name)
        assert (uniform is None) == act_order
        if uniform is not None:
            assert (uniform.group, dequantised(uniform).astype(np.float16).tobytes()) == (group, values.tobytes())
    LlamaForCausalLM.from_checkpoint(checkpoint, torch.float32)


def test_awq(tmp_path: Path) -> None:
    expected: dict[str, np.ndarray] = {}

    def pack(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        expected[name], parts = awq(weight, 32, seed=len(expected))
        return parts

    folder = quantised(tmp_path / "m", AWQ_SETTINGS, pack, model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    checkpoint = Checkpoint(folder)
    assert checkpoint.stored_as == ["awq, 4 bits"]
    for name, values in expected.items():
        assert checkpoint.tensors[name].tobytes() == values.astype(np.float16).tobytes()
        uniform = checkpoint.quantised(name)
        assert isinstance(uniform, Uniform)
        assert dequantised(uniform).tobytes() == values.tobytes()  # without the rounding to float16
    name, places = "model.layers.1.mlp.up_proj.weight", np.array([0, 65, 6143])
    assert checkpoint._opened.values_at(name, places).tolist() == checkpoint.tensors[name].reshape(-1)[places].tolist()


# -- four bits, kept ---------------------------------------------------------------------------------------------------

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}


def compressed(weight: torch.Tensor, seed: int, **settings: Any) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """As `gptq`; the library itself packs and unpacks."""
    from compressed_tensors.compressors import BaseCompressor

    scheme_of = scheme(num_bits=4, **settings)
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    scale = scales(weight, settings.get("group_size", 0), 1, 7.0, torch.float32)
    state = {"weight": weight, "weight_scale": scale}
    if not settings.get("symmetric", True):
        dice = torch.Generator().manual_seed(seed)
        state["weight_zero_point"] = torch.randint(-3, 4, scale.shape, dtype=torch.int8, generator=dice)
    parts = compressor.compress(state, scheme_of)
    exact = compressor.decompress(parts, scheme_of)["weight"].numpy()
    return exact, {part: tensor.contiguous() for part, tensor in parts.items()}


GROUPS = {"strategy": "group", "group_size": 64}
FOLDERS: dict[str, tuple[Any, Any]] = {
    "awq, groups of 32": (AWQ_SETTINGS, lambda w, seed: awq(w, 32, seed)),
    "awq, groups of 128": (AWQ_SETTINGS, lambda w, seed: awq(w, 128, seed)),
    "gptq, groups of 64": (gptq_settings(4, "gptq"), lambda w, seed: gptq(w, 4, 64, "gptq", False, seed)),
    "gptq_v2, groups of 128": (gptq_settings(4, "gptq_v2"), lambda w, seed: gptq(w, 4, 128, "gptq_v2", False, seed)),
    "gptq, 2 bits": (gptq_settings(2, "gptq"), lambda w, seed: gptq(w, 2, 32, "gptq", False, seed)),
    "compressed-tensors": (GROUPS, lambda w, seed: compressed(w, seed, **GROUPS)),
    "compressed-tensors, asymmetric": (GROUPS, lambda w, seed: compressed(w, seed, symmetric=False, **GROUPS)),
    "compressed-tensors, channels": (GROUPS, lambda w, seed: compressed(w, seed, strategy="channel")),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folders_own_four_bits_stay(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each matrix as its library has it in float32, but for scales and minima in float16; and so the logits."""
    settings, make = FOLDERS[name]
    if name.startswith("compressed"):
        pytest.importorskip("compressed_tensors")
        settings = settings_of("pack-quantized", scheme(num_bits=4, **settings))
    exact: dict[str, np.ndarray] = {}

    def pack(matrix: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        exact[matrix], parts = make(weight, len(exact))
        return parts

    folder = quantised(tmp_path / "m", settings, pack, **WIDE)
    engine = Engine.from_pretrained(folder, backend="cpu", exit_head="none")
    assert engine.backend.dtype == "int4"
    checkpoint = Checkpoint(folder)
    monkeypatch.setattr(type(checkpoint.tensors), "_rows", None)  # nothing decodes a matrix
    packed = {
        key: _native.testing.packed(matrix, "int4")
        for key, matrix in packable(checkpoint, "int4").items()
        if key in exact
    }
    assert packed.keys() == exact.keys()
    for key, values in exact.items():
        uniform = checkpoint.quantised(key)
        assert uniform is not None
        steps = uniform.scale.repeat(uniform.group, 1)
        assert (np.abs(packed[key] - values) <= steps * 2**-6).all()  # a float16 of 15 steps at most, twice

    plain = load_file(write_model(tmp_path / "plain", tiny_model(**WIDE), **WIDE) / "model.safetensors")
    logits = []
    for weights in (exact, packed):
        save_file(
            {**plain, **{key: torch.from_numpy(each) for key, each in weights.items()}},
            tmp_path / "plain/model.safetensors",
        )
        exactly = Engine.from_pretrained(tmp_path / "plain", backend="cpu", exit_head="none", dtype="float32")
        logits.append(exactly.backend.logits(list(range(40)), 40))
    assert np.abs(logits[0] - logits[1]).max() <= 1e-2 * np.abs(logits[0]).max()  # these weights are large
    found = engine.backend.logits(list(range(40)), 40)
    assert ((found - logits[0]) ** 2).mean() / (logits[0] ** 2).mean() < 1e-2  # activations and the LM head of 8 bits


@pytest.mark.parametrize(
    ("act_order", "group", "dtype", "count"), [("_", 32, "int8", 14), ("down", 32, "int4", 2), (" ", 16, "int8", 14)]
)
def test_four_bits_that_int4_cannot_hold_become_int8(act_order, group, dtype, count, tmp_path, caplog):
    """act_order: in what matrices, by a part of their names."""

    def pack(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return gptq(weight, 4, group, "gptq", act_order in name, seed=1)[1]

    folder = quantised(tmp_path / "m", gptq_settings(4, "gptq"), pack, **WIDE)
    with caplog.at_level("INFO"):
        backend = Engine.from_pretrained(folder, backend="cpu", exit_head="none").backend
    assert backend.dtype == dtype
    [line] = [record.getMessage() for record in caplog.records if "act-order" in record.getMessage()]
    assert f"{count} of 14 four-bit matrices" in line
    exact = Engine.from_pretrained(folder, backend="cpu", exit_head="none", dtype="float32").backend
    found, expected = (each.logits(list(range(40)), 40) for each in (backend, exact))
    assert ((found - expected) ** 2).mean() / (expected**2).mean() < 1e-2


def test_fp8_in_blocks(tmp_path: Path) -> None:
    """As DeepSeek and Qwen publish it: a scale for each block of 128 outputs and inputs; here of 40, some cut off."""
    expected: dict[str, torch.Tensor] = {}

    def pack(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        out, inputs = weight.shape
        scale = torch.rand(-(-out // 40), -(-inputs // 40)) * 0.01
        codes = torch.randn(out, inputs).mul(100).to(torch.float8_e4m3fn)
        spread = scale.repeat_interleave(40, 0)[:out].repeat_interleave(40, 1)[:, :inputs]
        expected[name] = codes.float() * spread
        return {"weight": codes, "weight_scale_inv": scale}

    settings = {"quant_method": "fp8", "weight_block_size": [40, 40], "activation_scheme": "dynamic"}
    checkpoint = Checkpoint(quantised(tmp_path / "m", settings, pack))
    for name, values in expected.items():
        assert torch.equal(torch.from_numpy(checkpoint.tensors[name]), values)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method is 'bitsandbytes'"),
        ({"quant_method": "mxfp4"}, "quant_method is 'mxfp4'"),
        ({}, None),
        ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv'"),
        *(({"quant_method": method, "bits": 3}, "bits is 3") for method in ("awq", "gptq")),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-quantized'"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": {"weights": {}}}},
            "num_bits is None",
        ),
        ([1], "quant_method is "),
    ],
)
def test_other_schemes_are_named(
    settings: Any, named: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_model(tmp_path / "m")
    hash, path = Checkpoint(folder).hash, folder / "model.safetensors"
    (folder / "config.json").write_text(json.dumps({**tiny_config(), "quantization_config": settings}))
    with caplog.at_level("INFO", "ppsd_rt"):
        assert Checkpoint(folder).hash == hash  # the weights are plain, whatever the file says
    assert ("not quantised, so the quantization_config of config.json is left out" in caplog.text) == bool(settings)
    if named is None:
        return
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(4, 1, dtype=torch.uint8)
    save_file(tensors, path)
    with pytest.raises(PpsdError, match=named) as caught:
        Checkpoint(folder)
    assert str(caught.value).startswith(f"{folder / 'config.json'}: quantization_config: ")


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales", "g_idx"])
def test_parts_that_do_not_fit(part: str, tmp_path: Path) -> None:
    def pack(_: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        out, inputs = weight.shape
        parts = {
            "qweight": torch.zeros(inputs // 8, out, dtype=torch.int32),
            "qzeros": torch.zeros(inputs // 32, out // 8, dtype=torch.int32),
            "scales": torch.ones(inputs // 32, out, dtype=torch.float16),
            "g_idx": torch.arange(inputs, dtype=torch.int32) // 32,
        }
        return {**parts, part: parts[part].repeat(3, *[1] * (parts[part].dim() - 1))}

    folder = quantised(tmp_path / "m", {"quant_method": "gptq", "bits": 4, "group_size": 32}, pack)
    with pytest.raises(PpsdError, match=r"layers\.\d\.[a-z_.]*(qweight|qzeros|scales|g_idx) is of shape") as caught:
        Checkpoint(folder)
    assert "\n" not in str(caught.value)
