"""The examples do what they say, on small models and in this process."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import loud_head, write_model

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.pipeline.rounds import Draft

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3}


def example(name):
    spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("examples") / "model", max_position_embeddings=96)
    loud_head(Checkpoint(folder).hash).save(folder / "head.safetensors")
    return folder


@pytest.fixture(scope="module", params=["cpu", "torch"])
def engine(request, folder):
    return Engine.from_pretrained(folder, backend=request.param, exit_head=folder / "head.safetensors", threads=1)


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_own_loop_decodes_the_ids_of_plain(engine, sampling):
    own_loop = example("own_loop").own_loop
    for prompt in ("own loop", list(range(80))):  # the context of 96 ends the second
        params = SamplingParams(max_tokens=24, ignore_eos=True, **sampling)
        ids, passes = own_loop(engine, prompt, params, least=0.0)
        assert tuple(ids) == engine.generate(prompt, params, "plain").run().ids
        assert 0 < passes < len(ids) - 1  # some drafts were right
        assert own_loop(engine, prompt, params, least=1.1) == (ids, len(ids) - 1)


def test_own_loop_ends_at_a_stop_id():
    """Also where it is a draft token that was right, and more rows were verified after it. The model counts."""
    stages = SimpleNamespace(
        committed=0,
        prefill=lambda prompt: prompt[-1] + 1,
        draft=lambda ids: Draft(ids[-1] + 1, 1.0),
        verify=lambda ids: [id + 1 for id in ids],
        commit=lambda count: None,
    )
    config = SimpleNamespace(max_position_embeddings=100, eos_token_ids=[30])
    engine = SimpleNamespace(stages=lambda params: stages, config=config)
    own_loop = example("own_loop").own_loop
    for stop in (1, 2, 5, 11, 12):
        assert own_loop(engine, [0], SamplingParams(stop_token_ids=[stop]))[0] == list(range(1, stop + 1))
    assert own_loop(engine, [0], SamplingParams(stop_token_ids=[5], max_tokens=3))[0] == [1, 2, 3]
    assert own_loop(engine, [0], SamplingParams())[0] == list(range(1, 31))


def test_own_loop_from_the_command_line(folder, monkeypatch, capsys):
    main = example("own_loop").main
    command = ["own_loop.py", "--model", str(folder), "--backend", "torch", "--max-tokens", "9"]
    monkeypatch.setattr(sys, "argv", [*command, "--exit-head", "norm:2"])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert " per pass" in lines[-2]
    assert lines[-1] == "the ids of plain decoding: yes"
    monkeypatch.setattr(sys, "argv", [*command, "--exit-head", "none"])
    with pytest.raises(SystemExit, match="own_loop: .* no exit head"):
        main()
