"""int4: a file's own four bits stay, weights at even distances are kept, and errors go where they matter least."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_support import (
    MATRICES,
    OWN,
    SIZES,
    WIDE,
    as_folder,
    four_bit_model,
    gguf_name,
    metadata,
    own_bits,
    random_blocks,
    tiny_state,
    write_gguf,
)
from support import tiny_model, write_model

from ppsd_rt import Engine, PpsdError, _native
from ppsd_rt.cpu.importance import importance_for
from ppsd_rt.cpu.native import packable
from ppsd_rt.models import checkpoint as checkpoints
from ppsd_rt.models.checkpoint import Checkpoint

IDS = [(7 * i * i + 3 * i) % 250 for i in range(90)]
SHAPE = {"num_hidden_layers": 2, "tie_word_embeddings": False}


def load(folder, dtype):
    return Engine.from_pretrained(folder, exit_head="none", backend="cpu", dtype=dtype, threads=1)


def divergence(folder, dtype, against):
    """KL in nats, of all positions."""
    p, q = (load(f, t).backend.logits(IDS, len(IDS)).astype(np.float64) for f, t in (against, (folder, dtype)))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PPSD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("isa", _native.usable_isas())
@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.name)
def test_a_files_own_four_bits_stay(kind, isa, monkeypatch):
    """Of a number of outputs that fills no panel. Q4_K has scales of scales: their product is rounded to float16."""
    monkeypatch.setenv("PPSD_ISA", isa)
    data = own_bits(kind, 35, 512)
    exact = gguf.quants.dequantize(data, kind)
    packed = _native.testing.packed(_native.Blocks(data, kind.name, 512), "int4")
    if kind == Kind.Q4_K:
        largest = np.abs(exact.reshape(35, -1, 32)).max(-1, keepdims=True)
        assert (np.abs(packed - exact).reshape(35, -1, 32) <= largest * 2**-9).all()
    else:
        assert np.array_equal(packed, exact)


PARTS = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up"}
PARTS |= {"down": "ffn_down", "head": "output"}


@pytest.mark.parametrize("kind", [*OWN, Kind.Q6_K], ids=lambda kind: kind.name)
def test_from_the_file_to_the_logits(tmp_path, kind):
    """What is packed, with activations in float32, against what the `gguf` package makes of the file."""
    path = four_bit_model(tmp_path / "model.gguf", dict.fromkeys(MATRICES, kind))
    checkpoint = Checkpoint(path)
    as_folder(path, tmp_path / "folder")
    exact = load(tmp_path / "folder", "float32").backend.logits(IDS, len(IDS))
    weights = checkpoints.read_file(tmp_path / "folder" / "model.safetensors")
    dtype = "int8" if kind == Kind.Q6_K else "int4"
    for name, tensor in packable(checkpoint, dtype).items():
        if isinstance(tensor, _native.Blocks) and name != "model.embed_tokens.weight":
            weights[name] = _native.testing.packed(tensor, dtype)
    checkpoints.save(tmp_path / "folder" / "model.safetensors", weights, {})
    packed = load(tmp_path / "folder", "float32").backend.logits(IDS, len(IDS))
    assert np.abs(packed - exact).max() <= 1e-3 * np.abs(exact).max()
    assert divergence(path, "auto", (path, "float32")) < 2e-3


SIX = {"ffn_down": Kind.Q6_K, "output": Kind.Q6_K}


@pytest.mark.parametrize("isa", _native.usable_isas())
def test_a_files_own_six_bits_stay(isa, monkeypatch):
    """To the bit, in int8 and wherever int4 leaves int8."""
    monkeypatch.setenv("PPSD_ISA", isa)
    data = random_blocks(Kind.Q6_K, 35, 512, seed=2)
    packed = _native.testing.packed(_native.Blocks(data, "Q6_K", 512), "int8")
    assert np.array_equal(packed, gguf.quants.dequantize(data, Kind.Q6_K))


def only_the_head(path, blocks, embedding):
    """A model whose layers add nothing, so that its logits are the norm of a token's embedding times the LM head."""
    state = tiny_state(tied=False, **WIDE)
    for name in state:
        if "o_proj" in name or "down_proj" in name:
            state[name] *= 0.0
    state["model.norm.weight"][:] = 1.0
    state["model.embed_tokens.weight"] = embedding
    return write_gguf(path, state, metadata(**WIDE), raw={"output.weight": (blocks, Kind.Q6_K)})


def test_six_bits_give_the_same_bits_everywhere(tmp_path, monkeypatch):
    """On every instruction set that has fused steps, in any company: of few rows, and of many, in tiles."""
    generator = torch.Generator().manual_seed(1)
    embedding = tiny_state(tied=False, **WIDE)["model.embed_tokens.weight"]
    embedding = embedding * (torch.rand(embedding.shape, generator=generator) * 4).exp()
    path = only_the_head(tmp_path / "model.gguf", own_bits(Kind.Q6_K, *embedding.shape), embedding)
    rows = embedding / (embedding.double() ** 2).mean(-1, keepdim=True).sqrt()
    exact = rows[IDS[:64]].double().numpy() @ gguf.quants.dequantize(own_bits(Kind.Q6_K, *embedding.shape), Kind.Q6_K).T
    bits = {}
    for isa in _native.usable_isas():
        monkeypatch.setenv("PPSD_ISA", isa)
        backend = load(path, "int8").backend
        all_rows = backend.logits(IDS[:64], 64)
        assert np.abs(all_rows - exact).max() <= 0.02 * np.abs(exact).max()
        for count in (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 24, 40):
            assert np.array_equal(backend.logits(IDS[:count], count), all_rows[:count]), (isa, count)
        if isa != "portable":
            bits[isa] = all_rows.tobytes()
    assert len(set(bits.values())) <= 1, bits.keys()


@pytest.mark.parametrize("isa", _native.usable_isas())
def test_sums_of_six_bits_never_run_over(tmp_path, isa, monkeypatch):
    """Inputs that are all the largest, codes and scales at their ends: AVX2 adds up in 16 bits, where they just fit."""
    monkeypatch.setenv("PPSD_ISA", isa)
    embedding = tiny_state(tied=False, **WIDE)["model.embed_tokens.weight"][:, :1].sign().expand(-1, 256).contiguous()
    rows = len(embedding)
    blocks = np.zeros((rows, 210), np.uint8)  # codes of 0
    blocks[rows // 3 :, :192] = 0xFF  # of 63
    blocks[-rows // 3 :, :192] = np.random.default_rng(5).choice(np.array([0, 0xFF], np.uint8), 192)
    blocks[:, 192:208] = 0x80  # scales of -128
    blocks[::2, 192:208] = 0x7F
    blocks[:, 208:] = np.array([2**-14], np.float16).view(np.uint8)
    path = only_the_head(tmp_path / "model.gguf", blocks, embedding)
    sums = gguf.quants.dequantize(blocks, Kind.Q6_K).sum(-1)
    for ids in ([1], list(range(30))):
        expected = embedding[ids, :1].numpy() * sums
        np.testing.assert_allclose(load(path, "int8").backend.logits(ids, len(ids)), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "wide"),
    [
        ({}, []),
        ({"attn_v": Kind.Q8_0}, ["v"]),
        ({"attn_k": Kind.Q8_0}, ["k", "v"]),
        ({"attn_q": Kind.Q8_0}, ["q", "k", "v"]),
        ({"ffn_up": Kind.Q5_0}, ["gate", "up"]),
        ({"ffn_down": Kind.Q8_0, "output": Kind.Q8_0}, ["down", "head"]),
        ({"attn_output": Kind.F16}, ["o"]),
        (SIX, []),
        (SIX | {"attn_v": Kind.Q6_K, "ffn_up": Kind.Q6_K}, ["v", "gate", "up"]),
        (dict.fromkeys(MATRICES, Kind.Q6_K) | {"attn_output": Kind.Q4_0}, []),
    ],
    ids=str,
)
def test_what_a_file_has_in_more_bits_is_int8(tmp_path, changes, wide):
    """Or six bits, where all of a matrix has them."""
    path = four_bit_model(tmp_path / "model.gguf", dict.fromkeys(MATRICES, Kind.Q4_0) | changes)
    backend = load(path, "auto").backend
    assert backend.dtype == "int4"
    rows, columns = WIDE["hidden"], WIDE["hidden"]
    sizes = {"q": rows, "k": rows // 2, "v": rows // 2, "o": rows, "gate": 512, "up": 512, "down": 512}
    six = [name for name, part in PARTS.items() if changes.get(part) == Kind.Q6_K]
    bits = {name: 8.5 if name in wide else 6.625 if name in six else 5 for name in PARTS}
    expected = SIZES["layers"] * sum(bits[name] * size * columns for name, size in sizes.items())
    expected += bits["head"] * backend.logits(IDS[:1]).shape[-1] * columns
    assert backend.bytes_per_token(0) == pytest.approx(expected / 8, rel=0.06)  # pages, and panels that are not full
    assert divergence(path, "auto", (path, "float32")) < 2e-3


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0, Kind.IQ4_NL, Kind.Q6_K], ids=lambda kind: kind.name)
def test_auto_is_int8_where_there_are_no_four_bits(tmp_path, kind):
    if kind in (Kind.IQ4_NL, Kind.Q6_K):
        state = tiny_state(tied=False, **WIDE)
        raw = {
            gguf_name(key): (random_blocks(kind, *tensor.shape, seed=1), kind)
            for key, tensor in state.items()
            if tensor.dim() == 2
        }
        path = write_gguf(tmp_path / "model.gguf", state, metadata(**WIDE), raw=raw)
    else:
        path = write_gguf(tmp_path / "model.gguf", kinds=lambda _: kind)
    assert load(path, "auto").backend.dtype == "int8"
    assert load(write_model(tmp_path / "folder"), "auto").backend.dtype == "int8"


def test_scales_that_are_no_numbers_are_named(tmp_path):
    path = four_bit_model(tmp_path / "model.gguf", {"attn_v": Kind.Q4_1})
    damaged = own_bits(Kind.Q4_1, 128, 256)
    damaged[127, -17] = 0xFF  # of the last block's minimum
    damaged[127, -18] = 0x00
    state = tiny_state(tied=False, **WIDE)
    write_gguf(path, state, metadata(**WIDE), raw={"blk.1.attn_v.weight": (damaged, Kind.Q4_1)})
    with pytest.raises(PpsdError, match="as int4: layer 1: a weight is NaN or infinite"):
        load(path, "int4")


@pytest.mark.parametrize("isa", _native.usable_isas())
def test_weights_at_even_distances_are_kept(tmp_path, isa, monkeypatch):
    """With scales and minima that float16 holds."""
    monkeypatch.setenv("PPSD_ISA", isa)
    dice = np.random.default_rng(3)
    codes = dice.integers(0, 16, (48, 4, 32))
    codes[:, :, 7], codes[:, :, 20] = 0, 15
    scale, minimum = 2.0 ** dice.integers(-12, -6, (2, 48, 4, 1))
    weights = (scale * codes - minimum * dice.integers(-9, 10, (48, 4, 1))).reshape(48, 128).astype(np.float32)
    weights[5, :32] = 0.0
    weights[6, :32] = -0.25
    assert np.array_equal(_native.testing.packed(weights, "int4"), weights)


def test_other_weights_are_near_and_nearer_where_inputs_are_known(tmp_path, monkeypatch):
    """Few inputs are large, as in real models: their weights must not pay for the others'."""
    model = tiny_model(**SHAPE)
    for name, norm in model.named_parameters():
        if "layernorm" in name:
            norm.fill_(0.05)
            norm[3::16] = 3.0
    folder = write_model(tmp_path / "model", model, **SHAPE)
    known = divergence(folder, "int4", (folder, "float32"))
    monkeypatch.setattr("ppsd_rt.cpu.packing.importance_for", lambda *_: None)
    unknown = divergence(folder, "int4", (folder, "float32"))
    assert 10 * divergence(folder, "int8", (folder, "float32")) < known < 0.85 * unknown
    assert unknown < 0.1


def test_importance_is_the_mean_square_of_the_inputs(tmp_path):
    model = tiny_model(**SHAPE)
    model.model.layers[1].input_layernorm.weight[5] = 0.0  # an input that this text does not use
    checkpoint = Checkpoint(write_model(tmp_path / "model", model, **SHAPE))
    frequencies = _native.Rotary([10000.0 ** (-i / 8) for i in range(8)])
    measured = [_native.importance(checkpoint.config, checkpoint.tensors, frequencies, IDS, n) for n in (1, 2, 3)]
    assert all(np.array_equal(measured[0], other) for other in measured)
    assert measured[0].shape == (2, 64 + 64 + 64 + 96)

    backend = Engine.from_pretrained(
        checkpoint.folder, exit_head="none", backend="torch", device="cpu", dtype="float32"
    ).backend
    squares = {}

    def observe(name):
        def hook(_module, arguments, _output):
            squares.setdefault(name, []).append(arguments[0].detach().reshape(-1, arguments[0].shape[-1]) ** 2)

        return hook

    for i, layer in enumerate(backend.model.model.layers):
        layer.input_layernorm.register_forward_hook(
            lambda _m, _a, out, i=i: squares.setdefault((i, 0), []).append(out**2)
        )
        layer.post_attention_layernorm.register_forward_hook(
            lambda _m, _a, out, i=i: squares.setdefault((i, 2), []).append(out**2)
        )
    backend.logits(IDS, 1)
    for i in range(2):
        for part, begin in ((0, 0), (2, 128)):
            expected = torch.cat([each.reshape(-1, 64) for each in squares[i, part]]).mean(0).numpy()
            expected = np.maximum(expected, 1e-3 * expected.mean())
            np.testing.assert_allclose(measured[0][i, begin : begin + 64], expected, rtol=0.1)
    assert measured[0][1, 5] == pytest.approx(1e-3 * measured[0][1, :64].mean(), rel=0.02)
    assert (measured[0] > 0).all()


def test_importance_is_measured_once(tmp_path, cache, monkeypatch):
    checkpoint = Checkpoint(write_model(tmp_path / "model", **SHAPE))
    first = importance_for("int4", checkpoint, 1)
    assert importance_for("int8", checkpoint, 1) is None
    [file] = (cache / "importance").iterdir()
    calls = []
    real = _native.importance
    monkeypatch.setattr(_native, "importance", lambda *args: calls.append(args) or real(*args))
    assert np.array_equal(importance_for("int4", checkpoint, 2), first)
    assert not calls
    file.write_bytes(file.read_bytes()[:-40])  # more of them: tests/ppsd_rt/test_files.py
    for _ in range(2):
        assert np.array_equal(importance_for("int4", checkpoint, 2), first)
        assert len(calls) == 1
    with pytest.raises(RuntimeError, match="of another shape"):
        _native.Model(
            checkpoint.config,
            checkpoint.tensors,
            _native.Rotary([1.0] * 8),
            "int4",
            "bfloat16",
            1,
            importance=first[:1],
        )
    monkeypatch.setenv("PPSD_CACHE", "/proc/none")  # cannot be written
    assert np.array_equal(importance_for("int4", checkpoint, 1), first)
