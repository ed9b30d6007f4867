"""Which layers are on which device: given, or by what was measured; and what is said where that cannot be."""

from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import kernel_support  # noqa: F401  (mends the interpreter)
from support import tiny_config, write_model

from ppsd_rt.backends import make_backend
from ppsd_rt.cuda import backend as cuda_backend
from ppsd_rt.cuda import errors
from ppsd_rt.cuda.buffers import cache_bytes
from ppsd_rt.cuda.placement import Measured, Placement, best_sizes, given_sizes, measure
from ppsd_rt.cuda.stages import DeviceStages
from ppsd_rt.engine import Engine
from ppsd_rt.errors import PpsdError, UsageError
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.config import LlamaConfig
from ppsd_rt.models.head_file import HeadInfo
from ppsd_rt.sampling.params import SamplingParams
from ppsd_rt.serve.service import Service
from ppsd_rt.serve.settings import Settings

CPUS = [torch.device("cpu", number) for number in range(3)]
LAYER = Measured(1.0, 4.0)
SHAPE = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
ON_GPU = torch.cuda.is_available()


def head_of(kind, exit_layer):
    return HeadInfo(kind, exit_layer, "random", "")


def test_the_last_device_has_fewer_layers_by_its_lm_head():
    assert best_sizes(30, [LAYER, LAYER], None, 1.0) == (17, 13)
    assert best_sizes(30, [LAYER, LAYER, LAYER], None, 1.0) == (11, 11, 8)


def test_the_first_device_pays_for_the_exit_head():
    # One layer and a quarter of an LM head: two layers' worth.
    assert best_sizes(30, [LAYER, LAYER], head_of("layer", 6), 0.25) == (16, 14)
    assert best_sizes(30, [LAYER, LAYER], head_of("layer", 0), 0.25) == (16, 14)


def test_a_slower_device_has_fewer_layers():
    assert best_sizes(30, [Measured(1.0, 0.0), Measured(2.0, 0.0)], None, 1.0) == (20, 10)
    assert best_sizes(30, [Measured(2.0, 0.0), Measured(1.0, 0.0)], None, 1.0) == (10, 20)


def test_layers_that_draft_stay_together():
    assert best_sizes(30, [LAYER] * 4, head_of("norm", 12), 1.0) == (12, 7, 7, 4)
    with pytest.raises(UsageError, match="after the exit head come 2 layers, too few for 4 devices: name fewer"):
        best_sizes(30, [LAYER] * 4, head_of("norm", 28), 1.0)


def test_parts_and_cuts():
    placement = Placement((CPUS[0], CPUS[1], CPUS[1]), (2, 1, 2))
    assert placement.places == (CPUS[0], CPUS[0], CPUS[1], CPUS[1], CPUS[1])
    assert placement.cuts(1) == [2, 3]
    assert placement.cuts(2) == [3], "the first device only drafts"
    assert Placement((CPUS[1], CPUS[1]), (2, 3)).places == (), "one device, named twice"
    assert str(placement) == "2 on cpu:0, 1 on cpu:1, 2 on cpu:1"
    with pytest.raises(UsageError, match="after layer 3: cpu:0, which drafts, needs as many layers, not 2; change"):
        placement.cuts(3)


@pytest.mark.parametrize(
    ("devices", "stages", "line"),
    [
        (2, (17, 12), r"--stages 17,12 does not fit: .* add up to the model's 30 layers"),
        (2, (10, 10, 10), r"--stages 10,10,10 does not fit: it takes 2 numbers from 1, one for each device"),
        (2, (0, 30), "does not fit"),
        (2, 3, "2 devices have 2 stages, not 3: --stages A,B,... says how many layers each has"),
        (31, 1, "30 layers cannot be placed on 31 devices: name fewer"),
    ],
)
def test_what_does_not_fit(devices, stages, line):
    with pytest.raises(UsageError, match=line):
        given_sizes(30, devices, stages)


def test_given_and_not_given():
    assert given_sizes(30, 2, (17, 13)) == (17, 13)
    assert given_sizes(30, 2, 1) is given_sizes(30, 2, 2) is None


def test_needed_memory_is_each_devices():
    config = LlamaConfig.from_dict(tiny_config(**SHAPE, num_hidden_layers=4, tie_word_embeddings=True))
    table, one = config.vocab_size * 32 * 2, errors.weight_bytes(config, "bfloat16", 1, first=False, last=False)
    needed = errors.check_memory(config, "bfloat16", [CPUS[0], CPUS[1], CPUS[1]], (1, 1, 2))
    assert needed == {CPUS[0]: one + table, CPUS[1]: 3 * one + table}, "a tied LM head is there once more"


def test_too_little_memory_on_one_device(monkeypatch):
    config = LlamaConfig.from_dict(tiny_config(**SHAPE, num_hidden_layers=4))
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((2 - device.index) * 2**14, 2**30))
    with pytest.raises(
        PpsdError, match=r"3 layers as bfloat16 on cuda:1: .* are free; change --stages, or use --dtype"
    ):
        errors.check_memory(config, "bfloat16", devices, (1, 3))


def test_gpus_of_different_kinds_are_told_what_was_measured(monkeypatch):
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of kind {device.index}")
    with pytest.raises(UsageError, match=r"different kinds \(GPU of kind 0, GPU of kind 1\) .* now --stages 20,10"):
        errors.check_same_kind(devices, (20, 10))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    errors.check_same_kind(devices, (20, 10))


def test_several_devices_are_the_cuda_backends(tmp_path):
    checkpoint = Checkpoint(write_model(tmp_path / "model", **SHAPE, num_hidden_layers=2))
    for name in ("cpu", "torch"):
        with pytest.raises(UsageError, match=f"the {name} backend runs on one device; several need --backend cuda"):
            make_backend(name, checkpoint, "auto", "cuda:0,cuda:1", None)
    for device in ("cuda:0,", "cpu,cuda", "cuda:0;cuda:1"):
        with pytest.raises(UsageError, match="write auto, cpu, cuda, cuda:N or cuda:N,cuda:M"):
            make_backend("cuda", checkpoint, "auto", device, None)


@pytest.mark.skipif(ON_GPU, reason="the interpreter's devices")
def test_the_best_split_is_found_again_for_every_head(tmp_path, monkeypatch):
    """Weights move; the answer stays."""
    folder = write_model(tmp_path / "model", **SHAPE, num_hidden_layers=5)
    monkeypatch.setattr(cuda_backend, "measure", lambda *arguments, **options: Measured(1.0, 1.0))
    engine = Engine.from_pretrained(folder, exit_head="norm:1", backend="cuda", device="cpu:0,cpu:1")
    assert engine.backend.facts()["layers"] == "2 on cpu:0, 3 on cpu:1"
    before = engine.backend.logits([1, 2, 3])
    engine.use_head("norm:4")
    assert engine.backend.facts()["layers"] == "4 on cpu:0, 1 on cpu:1"
    assert (engine.backend.logits([1, 2, 3]) == before).all()
    for name, value in {"top_k": 5, "top_p": 0.0, "min_p": 0.1, "repetition_penalty": 1.1, "logprobs": 0}.items():
        with pytest.raises(UsageError, match=f"temperature, without {name}: leave it out, name one GPU, or .* --ranks"):
            engine.generate([1, 2, 3], SamplingParams(temperature=1.0, **{name: value}))
    greedy = engine.generate([1, 2, 3], SamplingParams(top_k=5, top_p=0.5, max_tokens=1))  # which knows no filters
    with pytest.raises(PpsdError, match="several GPUs need captured stages"):
        greedy.run()
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    assert Service(engine, Settings()).sampling == {"temperature": 0.6}
    with pytest.raises(UsageError, match="without top_k"):
        Service(engine, Settings(sampling={"top_k": 20}))
    weights = engine.backend.weights
    needed, whole = cache_bytes(weights, 100), DeviceStages(weights, 100, []).buffers
    assert list(needed) == CPUS[:2]
    assert needed[CPUS[0]] == sum(cache.nbytes for cache in whole.cache)


@pytest.mark.skipif(ON_GPU, reason="measures on a GPU: test_on_gpu.py")
def test_costs_are_measured(monkeypatch):
    """Where the layer of the first stage takes 2 seconds, and that of the last with the LM head 5."""
    graphs = Mock(row=7, verify=[8, 9])
    graphs.lanes.run.return_value = [1.0, 2.0, 5.0]
    monkeypatch.setattr("ppsd_rt.cuda.placement.StageGraphs", lambda stages: graphs)
    config = LlamaConfig.from_dict(tiny_config(**SHAPE, num_hidden_layers=2))
    assert measure(config, "float32", CPUS[1], pdl=False) == Measured(2.0, 3.0)
    graphs.lanes.run.assert_called_with(0, [7, 8, 9])
