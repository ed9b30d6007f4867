"""The examples do what they say, on small models and in this process."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from support import loud_head, write_model

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.models.checkpoint import Checkpoint

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3}


def example(name):
    spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("examples") / "model")
    loud_head(Checkpoint(folder).hash).save(folder / "head.safetensors")
    return folder


@pytest.fixture(scope="module", params=["cpu", "torch"])
def engine(request, folder):
    return Engine.from_pretrained(folder, backend=request.param, exit_head=folder / "head.safetensors", threads=1)


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_own_loop_decodes_the_ids_of_plain(engine, sampling):
    own_loop = example("own_loop").own_loop
    for prompt, end in (("own loop", {"max_tokens": 40}), ([id % 200 for id in range(500)], {"max_tokens": 64})):
        params = SamplingParams(ignore_eos=True, **end, **sampling)
        ids, passes = own_loop(engine, prompt, params)
        assert tuple(ids) == engine.generate(prompt, params, "plain").run().ids
        assert passes < len(ids)  # the context ends the second


def test_own_loop_ends_at_a_stop_id(engine):
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    ids = engine.generate("own loop", params, "plain").run().ids
    stop = ids[11]
    ends = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True, stop_token_ids=[stop])
    assert tuple(example("own_loop").own_loop(engine, "own loop", ends)[0]) == ids[: ids.index(stop) + 1]


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
