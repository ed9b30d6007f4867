"""The benchmark of the kernels, run on a small model (in the interpreter, where there is no GPU)."""

import json

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from kernel_support import DEVICE
from support import slow

from ppsd_rt.bench.device_kernels import KERNELS, measure_device_kernels
from ppsd_rt.cuda.weights import QUANTISED, DeviceWeights, weight_bytes
from ppsd_rt.errors import UsageError
from ppsd_rt.models.config import LlamaConfig

CONFIG = LlamaConfig.from_dict(
    {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 48,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128,
    }
)  # fmt: skip


@pytest.mark.parametrize("format", ["float32" if DEVICE == "cpu" else "bfloat16", slow("int4")])
def test_every_kernel_is_measured(format):
    weights = DeviceWeights.random(CONFIG, format, DEVICE).with_random_head("layer", 1, range(32))
    report, whole = measure_device_kernels(weights, (), [3], 40, 1, {"model": "tiny"})
    assert whole
    rows = {row["kernel"]: row for row in report.rows}
    assert list(rows) == list(KERNELS)
    cache = 2 * 40 * 16 * weights.dtype.itemsize
    assert rows["attention"]["bytes"] == cache
    assert rows["qkv"]["bytes"] == weight_bytes(weights.layers[0].qkv) + weight_bytes(weights.layers[0].kv)
    assert rows["pass"]["bytes"] == rows["plain_step"]["bytes"] == weights.bytes + 2 * cache
    assert rows["draft_step"]["bytes"] == weights.draft_bytes + 2 * cache
    assert rows["plain_step"]["rows"] == 1
    assert rows["pass"]["rows"] == 3
    assert all(row["microseconds"].median > 0 for row in report.rows)
    assert ("ratio" in rows["qkv"]) == (format not in QUANTISED), "torch has no weights of blocks"
    last = json.loads(report.lines("json"))
    assert last["copy_gigabytes_per_second"] > 0
    assert len(last["results"]) == len(KERNELS)


def test_an_unknown_kernel_is_refused():
    weights = DeviceWeights.random(CONFIG, "int8", DEVICE)
    with pytest.raises(UsageError, match="kernels are qkv"):
        measure_device_kernels(weights, ["conv"], [1], 16, 1, {})
