"""Exit heads: what they compute, how they are saved, and which models they are for."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import VOCAB, loud_head, tiny_head, tiny_model, write_model

from ppsd_rt.errors import PpsdError, UsageError
from ppsd_rt.find_head import find_head
from ppsd_rt.models import head_file
from ppsd_rt.models.checkpoint import Checkpoint, likeness, read_metadata
from ppsd_rt.models.exit_head import ExitHead
from ppsd_rt.models.head_file import DISTANCES, KINDS, HeadFile, HeadInfo, find_shipped, read_info
from ppsd_rt.models.llama import LlamaForCausalLM, causal_attention
from ppsd_rt.models.rope import Rope


def head_hidden(head, x):
    return head.hidden(x, causal_attention(Rope(tiny_model().config, 64)))


@torch.no_grad()
def test_norm_head_at_the_last_layer_would_be_the_model_itself():
    """Norm and LM head are the model's own: on the hidden states of the last layer they give the model's logits."""
    model = tiny_model()
    ids = torch.arange(20)[None]
    hidden, kept = model.forward_batch(ids, Rope(model.config, 64), keep=(4,))
    head = tiny_head(model, "norm")
    torch.testing.assert_close(head.lm_head(head_hidden(head, kept[4])), model.lm_head(hidden))


@torch.no_grad()
def test_fresh_layer_head_before_the_last_layer_is_the_model_itself():
    """A `layer` head starts as the last layer, so after the second to last it completes the model."""
    model = tiny_model()
    ids = torch.arange(20)[None]
    hidden, kept = model.forward_batch(ids, Rope(model.config, 64), keep=(3,))
    head = ExitHead.from_model(model, HeadInfo("layer", 3, "tiny", "0"))
    torch.testing.assert_close(head.lm_head(head_hidden(head, kept[3])), model.lm_head(hidden))


@torch.no_grad()
def test_draft_vocabulary_gives_those_rows_of_the_lm_head():
    model = tiny_model()
    x = torch.randn(1, 5, 64)
    whole = ExitHead.from_model(model, HeadInfo("adapter", 1, "tiny", "0"))
    part = ExitHead.from_model(model, HeadInfo("adapter", 1, "tiny", "0"), [7, 3, 200])
    assert part.draft_ids.tolist() == [3, 7, 200]
    expected = whole.lm_head(head_hidden(whole, x))[..., [3, 7, 200]]
    torch.testing.assert_close(part.lm_head(head_hidden(part, x)), expected)


@pytest.fixture
def checkpoint(tmp_path):
    return Checkpoint(write_model(tmp_path / "model"))


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_head_is_the_same(kind, checkpoint, tmp_path):
    model = LlamaForCausalLM.from_checkpoint(checkpoint, torch.bfloat16)
    info = HeadInfo(kind, 2, "tiny", checkpoint.hash, {"tokens": 5}, {"held_out": 0.5})
    head = ExitHead.from_model(model, info, None if kind == "norm" else [1, 2, 77])
    path = tmp_path / "head.safetensors"
    head.save(path)
    loaded = ExitHead.from_file(HeadFile.load(path, checkpoint), model)
    assert loaded.info == info == read_info(path)
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), loaded.parameters(), strict=True))
    assert (loaded.draft_ids is None) == (kind == "norm")
    x = torch.randn(1, 3, 64).bfloat16()
    with torch.no_grad():
        expected = head.lm_head(head_hidden(head, x))
        assert torch.equal(loaded.lm_head(head_hidden(loaded, x)), expected)
    assert not list(tmp_path.glob("*.unfinished"))


def test_head_of_another_model_is_taken_with_a_line(checkpoint, tmp_path, caplog):
    tiny_head(tiny_model(), hash="abc").save(tmp_path / "head.safetensors")
    with caplog.at_level("INFO"):
        assert HeadFile.load(tmp_path / "head.safetensors", checkpoint).info.model_hash == "abc"
    assert "the exit head of tiny, another model: seldom right" in caplog.text


def noisy(share: float) -> LlamaForCausalLM:
    """The tiny model, and noise of so much of each tensor's deviation."""
    model = tiny_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += (
                share * parameter.std() * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7))
            )
    return model


@pytest.mark.parametrize(
    ("share", "alike"), [(0, (0.999, 1.001)), (0.1, (0.98, 0.999)), (0.3, (0.9, 0.98)), (None, (-0.2, 0.2))]
)
def test_relatives_are_alike_and_strangers_are_not(checkpoint, tmp_path, share, alike):
    other = Checkpoint(write_model(tmp_path / "other", tiny_model(seed=1) if share is None else noisy(share)))
    assert alike[0] < likeness(checkpoint.sample, other.sample) < alike[1]
    assert likeness(checkpoint.sample, "") == likeness(checkpoint.sample, other.sample[:-4]) == 0.0


def test_rotation_tells_strangers_apart(checkpoint, tmp_path):
    folder = write_model(tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 777.0}))
    assert likeness(checkpoint.sample, Checkpoint(folder).sample) == 0.0


def test_the_head_that_ships_for_a_relative_is_found(checkpoint, tmp_path, monkeypatch):
    """The nearest relative's; of the model itself, where there is one; none of a stranger."""
    monkeypatch.setattr(head_file, "__file__", str(tmp_path / "head_file.py"))
    (tmp_path / "heads").mkdir()
    stranger = Checkpoint(write_model(tmp_path / "stranger", tiny_model(seed=1)))
    near = Checkpoint(write_model(tmp_path / "near", noisy(0.1)))
    far = Checkpoint(write_model(tmp_path / "far", noisy(0.4)))
    assert find_shipped(checkpoint) is None
    for name, model in (("a", far), ("b", near), ("c", stranger)):
        head = tiny_head(tiny_model(), hash=model.hash)
        head.info = replace(head.info, sample=model.sample)
        head.save(tmp_path / "heads" / f"{name}.safetensors")
    assert find_shipped(checkpoint).stem == "b"
    assert find_shipped(far).stem == "a"
    (tmp_path / "heads" / "a.safetensors").unlink()
    (tmp_path / "heads" / "b.safetensors").unlink()
    assert find_shipped(checkpoint) is None


@pytest.mark.parametrize(
    ("kind", "layer", "words"),
    [("mlp", 2, "mlp"), ("norm", 0, "1 to 3"), ("layer", -1, "0 to 3"), ("layer", 4, "0 to 3")],
)
def test_kind_and_exit_layer_are_checked(kind, layer, words):
    with pytest.raises(PpsdError, match=words):
        tiny_head(tiny_model(), kind, layer)


@torch.no_grad()
def test_a_head_can_begin_as_a_smaller_one(checkpoint, tmp_path):
    """What it lacks adds nothing before it has learned something; what has no place in the new head is refused."""
    model = LlamaForCausalLM.from_checkpoint(checkpoint, torch.float32)
    small = tiny_head(model, "layer", hash=checkpoint.hash, sizes=(64, 0))
    for parameter in small.parameters():
        parameter.data.normal_(0, 0.1)
    small.save(tmp_path / "small.safetensors", torch.float32)
    file = HeadFile.load(tmp_path / "small.safetensors", checkpoint)
    x = torch.randn(1, 5, 64)
    for kind in ("two-layer", "feedback"):
        large = tiny_head(model, kind, hash=checkpoint.hash, sizes=(64, 32 if kind == "feedback" else 0))
        file.check_grows(large.info, model.config)
        large.begin_as(file)
        torch.testing.assert_close(head_hidden(large, x), head_hidden(small, x))
    torch.testing.assert_close(large.feedback(x, x, 2), x)
    large.save(tmp_path / "large.safetensors", torch.float32)
    with pytest.raises(UsageError, match="kind layer cannot begin as this one of kind feedback"):
        HeadFile.load(tmp_path / "large.safetensors", checkpoint).check_grows(small.info, model.config)
    with pytest.raises(UsageError, match=r"no place for layers.0.mlp.down_proj.weight \(64, 64\)"):
        file.check_grows(tiny_head(model, "layer").info, model.config)


@torch.no_grad()
def test_a_narrow_head_is_the_product_of_what_its_file_holds(checkpoint, tmp_path):
    model = LlamaForCausalLM.from_checkpoint(checkpoint, torch.float32)
    head = loud_head(checkpoint.hash, sizes=(32, 32))
    head.save(tmp_path / "head.safetensors", torch.float32)
    file = HeadFile.load(tmp_path / "head.safetensors", checkpoint)
    assert file.tensors["layers.0.mlp.down_proj.weight"].shape == (64, 32)
    assert "feedback.down.weight" not in file.whole
    x, verified = torch.randn(2, 3, 64)
    loaded = ExitHead.from_file(file, model)
    for distance in (1, DISTANCES):
        expected = head.feedback(x, verified, distance)
        assert torch.equal(loaded.feedback(x, verified, distance), expected)
        whole = torch.from_numpy(file.whole[f"feedback.{distance}.weight"])
        torch.testing.assert_close(x + head.feedback.norm(verified) @ whole.t(), expected)


def test_a_narrow_mlp_begins_as_the_neurons_with_the_largest_weights(checkpoint):
    model = LlamaForCausalLM.from_checkpoint(checkpoint, torch.float32)
    last = model.model.layers[-1].mlp
    last.up_proj.weight[5:37] *= 50
    head = tiny_head(model, "layer", sizes=(32, 0))
    assert torch.equal(head.layers[0].mlp.up_proj.weight, last.up_proj.weight[5:37])
    assert torch.equal(head.layers[0].mlp.down_proj.weight, last.down_proj.weight[:, 5:37])


@pytest.mark.parametrize("sizes", [(33, 0), (128, 0), (0, 96), (-32, 0)])
def test_sizes_of_a_narrow_head_are_checked(sizes):
    with pytest.raises(PpsdError, match="multiples of 32 up to (96|64), or 0 for all"):
        tiny_head(tiny_model(), "feedback", sizes=sizes)


@torch.no_grad()
def test_int8_rounds_matrices_as_the_cpu_does(checkpoint, tmp_path):
    """Once rounded, a head stays what it is, on disk and in the CPU's int8; it takes half of bfloat16's bytes."""
    model = LlamaForCausalLM.from_checkpoint(checkpoint, torch.float32)
    head, paths = loud_head(checkpoint.hash), [tmp_path / f"{n}.safetensors" for n in range(3)]
    head.save(paths[0])
    head.save(paths[1], torch.int8)
    assert paths[1].stat().st_size < 0.6 * paths[0].stat().st_size
    once = ExitHead.from_file(HeadFile.load(paths[1], checkpoint), model)
    for exact, rounded in zip(head.parameters(), once.parameters(), strict=True):
        largest = exact.abs().max() if exact.ndim == 2 else 0
        assert (exact - rounded).abs().max() <= largest / 127 * 0.51
    once.save(paths[2], torch.int8)
    again = HeadFile.load(paths[2], checkpoint).tensors
    assert all((again[name] == tensor).all() for name, tensor in HeadFile.load(paths[1], checkpoint).tensors.items())
    tensors = load_file(paths[1])
    del tensors["layers.0.mlp.up_proj.weight.scales"]
    save_file(tensors, paths[2], read_metadata(paths[1]))
    with pytest.raises(PpsdError, match="tensor layers.0.mlp.up_proj.weight.scales is missing"):
        HeadFile.load(paths[2], checkpoint)


@pytest.mark.parametrize("ids", [[], [1, 1], [-1], [VOCAB]])
def test_draft_vocabulary_is_checked(ids):
    with pytest.raises(PpsdError, match="draft vocabulary"):
        ExitHead.from_model(tiny_model(), HeadInfo("layer", 2, "tiny", "0"), ids)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("norm:1:100000000000", "100000000000 ids is out of range: this model has 259"),
        ("norm:1:0", "0 ids is out of range"),
        ("norm:100000000000", "1 to 3"),
        ("norm:" + "9" * 5000, "is not understood"),
        ("x" * 5000, "File name too long"),
        ("a\0b", "null"),
    ],
)
def test_names_of_heads_that_mean_nothing(name, words, checkpoint):
    with pytest.raises(PpsdError, match=words) as caught:
        find_head(name, checkpoint)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{}", None),
        ('{"assistant_early_exit": 2}', 2),
        ('{"assistant_early_exit": null}', None),
        ('{"assistant_early_exit": 4}', "exit layer 4"),
        ('{"assistant_early_exit": "2"}', "must be a layer, not '2'"),
    ],
)
def test_the_exit_that_a_model_was_trained_with(text, found, tmp_path):
    checkpoint = Checkpoint(write_model(tmp_path / "model"))
    assert find_head("auto", checkpoint) is None
    (checkpoint.folder / "generation_config.json").write_text(text)
    if isinstance(found, str):
        with pytest.raises(PpsdError, match=found):
            find_head("auto", checkpoint)
        return
    head = find_head("auto", checkpoint)
    assert (head and (head.info.kind, head.info.exit_layer)) == (found and ("norm", found))
