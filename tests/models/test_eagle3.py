"""EAGLE-3 heads of other people: what they draft, and what is refused. The reference: eagle3_golden.py."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from eagle_support import CASES, DRAFT, VOCABULARY, config_of, contexts, draft_ids, embedding, tensors_of
from eagle_support import write_eagle3 as write
from safetensors.numpy import save_file
from support import tiny_model, write_model

from ppsd_rt.errors import PpsdError
from ppsd_rt.find_head import find_head
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.eagle3 import Eagle3File
from ppsd_rt.models.exit_head import Eagle3Head
from ppsd_rt.models.llama import LlamaForCausalLM
from ppsd_rt.reference.passes import TorchPasses

GOLDEN = Path(__file__).parent / "golden" / "eagle3.npz"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a model whose embedding is the one that the reference had."""
    made = tiny_model()
    made.model.embed_tokens.weight.copy_(torch.from_numpy(embedding()))
    return write_model(tmp_path_factory.mktemp("eagle3") / "model", made)


@pytest.fixture(scope="module")
def checkpoint(model):
    return Checkpoint(model)


def passes_of(file, checkpoint):
    made = LlamaForCausalLM.from_checkpoint(checkpoint, torch.float32)
    return TorchPasses(made, Eagle3Head.from_file(file, made.model.embed_tokens.weight))


@pytest.mark.parametrize("case", CASES)
def test_chains_are_those_of_the_reference(case, checkpoint, tmp_path):
    """Six tokens after each of four contexts: the same ids, and logits within 1e-4."""
    number = list(CASES).index(case)
    with np.load(GOLDEN) as golden:
        expected_ids, expected_logits = golden[f"ids{number}"], golden[f"logits{number}"]
    file = find_head(str(write(tmp_path / "head", case)), checkpoint)
    passes = passes_of(file, checkpoint)
    passes.reserve(64, 0)
    ids = draft_ids(case)
    for (context, states), chain, logits in zip(contexts(case, 4), expected_ids, expected_logits, strict=True):
        row, tokens, features = 0, context[1:].tolist(), states  # of rows whose next token and feature are there
        for step in range(6):
            features = features[: len(tokens)].reshape(len(tokens), -1)
            output = passes.eagle([(row, len(tokens), [0], 0)], tokens, features, step == 0)[-1:]
            row += len(tokens)
            (found,) = passes.draw([((row - 1, 1, [0]), output, 0, output, ())], None)
            np.testing.assert_allclose(found, logits[step], atol=1e-4, rtol=0)
            tokens, features = [int(ids[int(found.argmax())])], output
            assert tokens == [chain[step]]


def test_where_the_taps_are(checkpoint, tmp_path):
    """By SafeAILab's rule; by a list of inputs; by a list of outputs, as SGLang writes it."""
    folder = write(tmp_path / "head")

    def taps(**settings):
        (folder / "config.json").write_text(json.dumps({**config_of("safeailab"), **settings}))
        return find_head(str(folder), checkpoint).eagle.taps

    assert taps() == (2, 2, 1)
    assert taps(eagle_aux_hidden_state_layer_ids=[0, 2, 4]) == (0, 2, 4)
    assert taps(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}) == (1, 2, 4)


def test_ids_in_any_order(checkpoint, tmp_path):
    """Draft ids are sorted, and the LM head's rows with them."""
    folder, tensors = write(tmp_path / "head"), tensors_of("safeailab")
    order = np.random.default_rng(0).permutation(DRAFT)
    ids = draft_ids("safeailab")
    tensors |= {"d2t": ids[order] - np.arange(DRAFT), "lm_head.weight": tensors["lm_head.weight"][order]}
    save_file(tensors, folder / "model.safetensors")
    file = find_head(str(folder), checkpoint)
    assert (file.draft_ids == ids).all()
    assert (file.tensors["lm_head.weight"] == tensors_of("safeailab")["lm_head.weight"]).all()


def test_a_file_of_torch(checkpoint, tmp_path):
    """SafeAILab's first heads were published so."""
    folder = write(tmp_path / "head")
    (folder / "model.safetensors").unlink()
    state = {name: torch.from_numpy(tensor) for name, tensor in tensors_of("safeailab").items()}
    state["lm_head.weight"] = state["lm_head.weight"].bfloat16()
    torch.save(state, folder / "pytorch_model.bin")
    file = Eagle3File.load_folder(folder, checkpoint)
    assert (file.tensors["fc.weight"] == tensors_of("safeailab")["fc.weight"]).all()
    (folder / "pytorch_model.bin").write_bytes((folder / "pytorch_model.bin").read_bytes()[:5000])
    with pytest.raises(PpsdError, match="pytorch_model.bin: it is not to be read"):
        Eagle3File.load_folder(folder, checkpoint)


REFUSED = {
    "hidden_size": ({"hidden_size": 128}, {}),
    "vocab_size": ({"vocab_size": 300}, {}),
    "speculators_model_type": ({"speculators_model_type": "dflash"}, {}),
    "use_aux_hidden_state": ({"eagle_config": {"use_aux_hidden_state": False}}, {}),
    "eagle_aux_hidden_state_layer_ids": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, {}),
    "norm_output": ({"norm_output": "yes"}, {}),
    "tensor lm_head.weight": ({"draft_vocab_size": 40}, {}),
    "tensor fc.weight": ({}, {"fc.weight": np.zeros((64, 128), "f4")}),
    "tensor layers.0.hidden_norm.weight": ({}, {"midlayer.hidden_norm.weight": None}),
    "tensor odd.weight": ({}, {"odd.weight": np.zeros(3, "f4")}),
    "tensor d2t": ({}, {"d2t": None}),
    "tensor d2t is damaged": ({}, {"d2t": np.zeros(DRAFT, "i8") - np.arange(DRAFT)}),
    "tensor d2t is damaged (a": ({}, {"d2t": np.full(DRAFT, VOCABULARY, "i8")}),
    "tensor fc.weight is of dtype I8": ({}, {"fc.weight": np.zeros((64, 192), "i1")}),
}


@pytest.mark.parametrize("place", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(place, checkpoint, tmp_path):
    settings, changed = REFUSED[place]
    folder, tensors = write(tmp_path / "head"), tensors_of("safeailab") | changed
    (folder / "config.json").write_text(json.dumps({**config_of("safeailab"), **settings}))
    save_file({name: each for name, each in tensors.items() if each is not None}, folder / "model.safetensors")
    with pytest.raises(PpsdError) as refused:
        find_head(str(folder), checkpoint)
    where = folder if place.startswith("tensor") else folder / "config.json"
    assert str(refused.value).startswith(f"{where}: {place}") and "\n" not in str(refused.value)


def test_a_head_of_another_model_by_name(model, tmp_path):
    """Where the hub's cache says what the model is called."""
    folder = tmp_path / "models--someone--else" / "snapshots" / "0"
    folder.parent.mkdir(parents=True)
    folder.symlink_to(model)
    head = write(tmp_path / "head", "speculators, llama")
    with pytest.raises(PpsdError, match="was trained for someone/tiny, not for someone/else"):
        find_head(str(head), Checkpoint(folder))
    assert find_head(str(head), Checkpoint(model)).drafts


def test_a_weight_that_is_not_finite(checkpoint, tmp_path):
    folder, tensors = write(tmp_path / "head"), tensors_of("safeailab")
    tensors["midlayer.mlp.up_proj.weight"][3, 5] = np.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(PpsdError, match=r"layers\.0\.mlp\.up_proj\.weight has a NaN or an infinite weight"):
        passes_of(find_head(str(folder), checkpoint), checkpoint)
