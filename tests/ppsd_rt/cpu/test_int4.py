"""int4: what its sixteen levels can say they say exactly, and errors go where they matter least."""

import numpy as np
import pytest
import torch
from support import loud_head, tiny_model, write_model

from ppsd_rt import Engine, PpsdError, SamplingParams, UsageError, _native
from ppsd_rt.cpu.formats import shape_of
from ppsd_rt.cpu.importance import importance_for
from ppsd_rt.models.checkpoint import Checkpoint

LEVELS = torch.tensor([-127, -99, -79, -63, -48, -35, -22, -9, 2, 14, 26, 40, 55, 70, 86, 110])
IDS = [(7 * i * i + 3 * i) % 250 for i in range(90)]
SHAPE = {"num_hidden_layers": 2, "tie_word_embeddings": False}


def load(folder, dtype, threads=1, head="none", **options):
    return Engine.from_pretrained(folder, exit_head=head, backend="cpu", dtype=dtype, threads=threads, **options)


def linears(model):
    return [(name, p) for name, p in model.named_parameters() if "layers" in name and p.dim() == 2]


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
def test_weights_on_the_levels_are_kept(tmp_path, isa, monkeypatch):
    """Times a power of two, and of either sign: then the scales are exact, and int4 says what int8 says.

    Keys, values and the LM head are int8 in both, whatever they are.
    """
    monkeypatch.setenv("PPSD_ISA", isa)
    model = tiny_model(**SHAPE)
    generator = torch.Generator().manual_seed(3)
    for name, weight in linears(model):
        if "k_proj" in name or "v_proj" in name:
            continue
        blocks = LEVELS[torch.randint(0, 16, (weight.numel() // 32, 32), generator=generator)]
        blocks[:, 7] = -127
        signs = 1 - 2 * torch.randint(0, 2, (len(blocks), 1), generator=generator)
        weight.copy_((blocks * signs * 2.0**-10).reshape(weight.shape))
    folder = write_model(tmp_path / "model", model, **SHAPE)
    assert np.array_equal(load(folder, "int4").backend.logits(IDS, 9), load(folder, "int8").backend.logits(IDS, 9))


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
    frequencies = [10000.0 ** (-i / 8) for i in range(8)]
    measured = [
        _native.importance(shape_of(checkpoint.config), checkpoint.tensors, frequencies, IDS, n) for n in (1, 2, 3)
    ]
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
    file.write_bytes(file.read_bytes()[:-40])  # more of them: test_measured_caches.py
    for _ in range(2):
        assert np.array_equal(importance_for("int4", checkpoint, 2), first)
        assert len(calls) == 1
    with pytest.raises(RuntimeError, match="of another shape"):
        _native.Model(
            shape_of(checkpoint.config), checkpoint.tensors, [1.0] * 8, "int4", "bfloat16", 1, importance=first[:1]
        )
    monkeypatch.setenv("PPSD_CACHE", "/proc/none")  # cannot be written
    assert np.array_equal(importance_for("int4", checkpoint, 1), first)


def test_damaged_weights_are_named(tmp_path):
    model = tiny_model()
    model.model.layers[2].mlp.up_proj.weight[3, 3] = torch.nan
    with pytest.raises(PpsdError, match="as int4: layer 2: a weight is NaN or infinite"):
        load(write_model(tmp_path / "nan", model), "int4")
    model = tiny_model()
    model.model.layers[2].input_layernorm.weight.fill_(3e38)
    with pytest.raises(PpsdError, match="as int4: layer 2: what goes into it is not a number"):
        load(write_model(tmp_path / "huge", model), "int4")


@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=0.9, seed=4)]
)
def test_drafts_in_int4_change_no_answer(tmp_path, params):
    folder = write_model(tmp_path / "model")
    path = tmp_path / "head.safetensors"
    loud_head(Checkpoint(folder).hash).save(path)
    engine = load(folder, "int4", 2, path)
    plain = engine.generate([1, 2, 3], params, "plain").run()
    for schedule in ("eesd", "elastic", "ppsd", "auto", "eesd:siblings=0.05"):
        answer = engine.generate([1, 2, 3], params, schedule).run()
        assert answer.ids == plain.ids
    assert load(folder, "int4", 1).generate([1, 2, 3], params, "plain").run().ids == plain.ids


def test_int4_takes_less(tmp_path):
    folder = write_model(tmp_path / "model", **SHAPE)
    size = {dtype: load(folder, dtype).backend.bytes_per_token(0) for dtype in ("int8", "int4")}
    assert size["int4"] < size["int8"]


def test_other_backends_refuse(tmp_path):
    folder = write_model(tmp_path / "model")
    with pytest.raises(UsageError, match="dtype 'int4' is unknown"):
        Engine.from_pretrained(folder, backend="torch", dtype="int4")
