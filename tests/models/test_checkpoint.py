"""Loading: mapped, complete, and one clear line for every damaged file."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_model, write_model

from ppsd_rt.errors import PpsdError
from ppsd_rt.models.checkpoint import Checkpoint, save
from ppsd_rt.models.llama import LlamaForCausalLM
from ppsd_rt.models.rope import Rope


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path / "model")


def build(checkpoint, dtype=torch.float32):
    return LlamaForCausalLM.from_checkpoint(checkpoint, dtype)


def rewrite(folder, change):
    """Change the dict of tensors in model.safetensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder, parts=3):
    """The same weights in several files with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for part in range(parts):
        file = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        save_file({name: tensors[name] for name in names[part::parts]}, folder / file)
        weight_map.update(dict.fromkeys(names[part::parts], file))
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index, weight_map


def test_one_file_and_shards_give_the_same_model(folder):
    whole = Checkpoint(folder)
    expected = {name: tensor.clone() for name, tensor in build(whole).state_dict().items()}
    shard(folder)
    sharded = Checkpoint(folder)
    state = build(sharded).state_dict()
    assert sharded.hash == whole.hash
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)


def test_weights_stay_mapped_from_the_file(folder):
    """A tensor of the right dtype is the file's memory, not a copy of it."""
    checkpoint = Checkpoint(folder)
    model = build(checkpoint)
    for name, tensor in checkpoint.tensors.items():
        assert model.get_parameter(name).data_ptr() == tensor.ctypes.data
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps if str(folder / "model.safetensors") in line]
    address = next(iter(checkpoint.tensors.values())).ctypes.data
    assert any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


def test_hash_tells_models_apart_but_not_dtypes(folder, tmp_path):
    hash = Checkpoint(folder).hash
    assert Checkpoint(write_model(tmp_path / "other", tiny_model(seed=1))).hash != hash
    rewrite(folder, lambda tensors: tensors.update({name: t.bfloat16() for name, t in tensors.items()}))
    assert Checkpoint(folder).hash == hash


def test_repeated_tied_head_and_old_rotary_buffers_are_ignored(folder):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    hash = Checkpoint(folder).hash
    rewrite(folder, change)
    assert Checkpoint(folder).hash == hash
    build(Checkpoint(folder))


@pytest.fixture
def peer_logits():
    transformers = pytest.importorskip("transformers")
    ids = torch.arange(40)[None]

    def logits(folder):
        with torch.no_grad():
            return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits

    return logits


def own_logits(folder):
    model, ids = build(Checkpoint(folder)), torch.arange(40)[None]
    return model.lm_head(model.forward_batch(ids, Rope(model.config, 40))[0])


def head_alone(tensors):
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")


def no_prefix(tensors):
    for name in [*tensors]:
        tensors[name.removeprefix("model.")] = tensors.pop(name)


@pytest.mark.parametrize("change", ["head_alone", "no_prefix", "other_head", "add"])
def test_weights_that_transformers_finds_are_found(folder, peer_logits, change):
    """A tied model under the name of its LM head; one that was saved without its LM head; a head of its own beside the
    words "tied"; and a tensor that nobody asked for."""
    rewrite(folder, globals()[change])
    torch.testing.assert_close(own_logits(folder), peer_logits(folder), rtol=1e-4, atol=1e-4)


def test_what_is_left_out_is_said(folder, caplog):
    rewrite(folder, add)
    with caplog.at_level("INFO", "ppsd_rt"):
        Checkpoint(folder)
    assert "no use for: tensor model.layers.4.mlp.up_proj.weight" in caplog.text


def test_a_whole_file_wins_over_an_old_index(folder):
    """As in transformers: somebody merged the shards and left their index."""
    data = (folder / "model.safetensors").read_bytes()
    hash = Checkpoint(folder).hash
    shard(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(data)
    assert Checkpoint(folder).hash == hash


def drop(tensors):
    del tensors["model.layers.3.mlp.up_proj.weight"]


def add(tensors):
    tensors["model.layers.4.mlp.up_proj.weight"] = torch.ones(2)


def other_head(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


def reshape(tensors):
    tensors["model.norm.weight"] = torch.ones(63)


def to_integers(tensors):
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)


@pytest.mark.parametrize(
    ("change", "place"),
    [(drop, "model.layers.3.mlp.up_proj.weight"), (reshape, "model.norm.weight"), (to_integers, "model.norm.weight")],
)
def test_wrong_tensors_are_named(folder, change, place):
    rewrite(folder, change)
    with pytest.raises(PpsdError, match=f"{folder}: tensor {place} is "):
        build(Checkpoint(folder))


def test_missing_shard(folder):
    index, _ = shard(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(PpsdError, match=f"{index}: model-00002-of-00003.safetensors is missing"):
        Checkpoint(folder)


def test_index_that_lies(folder):
    """The index and the tensors decide, wherever these are; its shards may have had other names."""
    hash = Checkpoint(folder).hash
    index, weight_map = shard(folder)
    name, other = "model.norm.weight", "model-00003-of-00003.safetensors"
    assert weight_map[name] != other
    whole = index.read_text()
    for changed in ({name: other}, {"model.extra.weight": other}):
        index.write_text(json.dumps({"weight_map": weight_map | changed}))
        assert Checkpoint(folder).hash == hash
    index.write_text(whole.replace("-of-00003", "-of-00030"))
    assert Checkpoint(folder).hash == hash
    older = {name: torch.zeros(64), "extra.bias": torch.ones(4)}
    save_file(load_file(folder / other) | older, folder / other)  # an older shard has both
    index.write_text(whole)
    assert Checkpoint(folder).hash == hash
    outside = {**weight_map, "gone": "../secret.safetensors"}
    for changed, place in ((outside, "../secret.safetensors"), (3, "weight_map")):
        index.write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(PpsdError, match=f"{index}: {place} is "):
            Checkpoint(folder)


def test_a_tensor_that_is_there_twice(folder):
    """Of which the library takes the last."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:end])
    name = "model.norm.weight"
    header = data[8:end].rstrip()[:-1] + f', "{name}": {json.dumps(entries[name])}}}'.encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])
    assert set(load_file(path)) == set(entries) - {"__metadata__"}
    with pytest.raises(PpsdError, match=f"{path}: .*'{name}' is there twice"):
        Checkpoint(folder)


def test_what_is_saved_lies_aligned_and_is_what_the_library_reads(tmp_path):
    path = tmp_path / "some.safetensors"
    floats, bits = np.float32([1.5, -2]), np.uint16([0x3F80])  # bfloat16: 1
    save(path, {"a": np.int8([1, -2, 3]), "b": floats, "c": bits}, {"of": "a test"})
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    begins = {name: end + header[name]["data_offsets"][0] for name in "abc"}
    assert (begins["b"] % 4, begins["c"] % 2, header["__metadata__"]) == (0, 0, {"of": "a test"})
    read = load_file(path)
    assert {name: tensor.tolist() for name, tensor in read.items()} == {"a": [1, -2, 3], "b": [1.5, -2], "c": [1]}
    assert read["c"].dtype == torch.bfloat16
