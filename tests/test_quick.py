"""One answer on each backend, in each format and schedule family: what `make quick` has of the rest of these tests."""

import pytest
from support import small_gguf

from ppsd_rt import Engine, SamplingParams, _native

SCHEDULES = ["auto", "eesd", "ppsd", "elastic"]
TEXT = "a small model with random weights, of which every schedule gives the same answer"


def answer(engine, schedule, **settings):
    params = SamplingParams(max_tokens=24, ignore_eos=True, **settings)
    return [token.id for token in engine.generate(TEXT, params, schedule=schedule)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_gguf(tmp_path_factory.mktemp("quick") / "model.gguf", layers=4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("isa", _native.usable_isas())
def test_cpu(model, dtype, isa, monkeypatch):
    monkeypatch.setenv("PPSD_ISA", isa)
    engine = Engine.from_pretrained(model, backend="cpu", dtype=dtype, exit_head="norm:2", threads=1)
    for settings in ({}, {"temperature": 0.9, "seed": 5}):
        plain = answer(engine, "plain", **settings)
        assert len(plain) == 24
        for schedule in SCHEDULES:
            assert answer(engine, schedule, **settings) == plain, schedule


def test_torch(model):
    pytest.importorskip("torch")
    engine = Engine.from_pretrained(model, backend="torch", dtype="float32", exit_head="norm:2")
    cpu = Engine.from_pretrained(model, backend="cpu", dtype="float32", exit_head="norm:2", threads=1)
    plain = answer(engine, "plain")
    assert answer(engine, "elastic") == plain == answer(cpu, "plain")


def test_cuda(model):
    """In Triton's interpreter, where there is no GPU."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    import kernel_support  # noqa: F401  how the interpreter adds up

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    engine = Engine.from_pretrained(model, backend="cuda", device=device, dtype=dtype, exit_head="norm:2")
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    plain, drafted = (
        engine.generate("Hi", params, schedule).run().ids for schedule in ("plain", "eesd:length=2,stop_rule=fixed")
    )
    assert drafted == plain and len(plain) == 3
