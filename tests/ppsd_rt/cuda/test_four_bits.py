"""A file's own four bits on the device: the weights are the CPU's, to the bit."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from gguf import GGMLQuantizationType as Kind
from gguf_support import MATRICES, OWN, four_bit_model, own_bits

from ppsd_rt import _native
from ppsd_rt.cuda.weights import DeviceWeights
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.head_file import HeadFile
from ppsd_rt.triton_kernels.linear import quantise


def on_cpu(checkpoint, *names):
    """What the CPU's kernels multiply by, float32."""
    return np.concatenate([_native.testing.packed(_native.Blocks(*checkpoint.blocks[name]), "int4") for name in names])


@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.name)
def test_all_matrices_are_the_cpus(tmp_path, kind):
    checkpoint = Checkpoint(four_bit_model(tmp_path / "model.gguf", dict.fromkeys(MATRICES, kind)))
    weights = DeviceWeights.from_checkpoint(checkpoint, "int4", "cpu")
    for i, layer in enumerate(weights.layers):
        prefix = f"model.layers.{i}."
        for matrix, names in (
            (layer.qkv, [f"self_attn.{name}_proj" for name in "qkv"]),
            (layer.out, ["self_attn.o_proj"]),
            (layer.gate_up, ["mlp.gate_proj", "mlp.up_proj"]),
            (layer.down, ["mlp.down_proj"]),
        ):
            expected = on_cpu(checkpoint, *(f"{prefix}{name}.weight" for name in names))
            assert matrix.format == "int4"
            assert np.array_equal(matrix.wide().numpy(), expected), names
        assert layer.kv is None
    table = on_cpu(checkpoint, "lm_head.weight")
    assert np.array_equal(weights.lm_head.wide().numpy(), table)
    drafted = weights.with_head(HeadFile.norm(1, checkpoint, 40)).head.lm_head
    assert np.array_equal(drafted.wide().numpy()[:40], table[:40]), "rows of the LM head as they are"


STORED_OTHERWISE = [
    ("attn_v", ["kv"], True),
    ("attn_q", ["qkv"], False),
    ("ffn_up", ["gate_up"], False),
    ("ffn_down", ["down"], False),
    ("attn_output", ["out"], False),
    ("output", [], False),
]


def test_what_is_stored_otherwise_is_int8(tmp_path):
    for other, wide, apart in STORED_OTHERWISE:
        kinds = dict.fromkeys(MATRICES, Kind.Q4_1) | {other: Kind.Q8_0}
        checkpoint = Checkpoint(four_bit_model(tmp_path / "model.gguf", kinds))
        weights = DeviceWeights.from_checkpoint(checkpoint, "int4", "cpu")
        for layer in weights.layers:
            parts = {name: getattr(layer, name) for name in ("qkv", "kv", "out", "gate_up", "down")}
            assert [name for name, part in parts.items() if part is not None and part.format == "int8"] == wide
            assert (layer.kv is not None) == apart
        assert weights.lm_head.format == ("int8" if other == "output" else "int4")
        down = torch.from_numpy(checkpoint.tensors["model.layers.1.mlp.down_proj.weight"]).bfloat16()
        if other == "ffn_down":
            assert torch.equal(weights.layers[1].down.wide(), quantise(down).wide())


def test_scales_that_are_no_numbers_are_refused():
    data = own_bits(Kind.Q4_1, 8, 256)
    data[3, 20:22] = np.array([0x7C00], np.uint16).view(np.uint8)
    with pytest.raises(RuntimeError, match="NaN or infinite"):
        _native.Blocks(data, "Q4_1", 256).four_bits()
    with pytest.raises(ValueError, match="not of four bits"):
        _native.Blocks(own_bits(Kind.Q6_K, 8, 256), "Q6_K", 256).four_bits()
