"""The examples do what they say, on small models and in this process."""

import asyncio
import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import loud_head, write_model

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.head_file import HeadFile
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
    for prompt in ("own loop", list(range(84))):  # the context of 96 ends the second
        params = SamplingParams(max_tokens=16, ignore_eos=True, **sampling)
        ids, passes = own_loop(engine, prompt, params, least=0.0)
        assert tuple(ids) == engine.generate(prompt, params, "plain").run().ids
        assert 0 < passes < len(ids) - 1  # some drafts were right
        assert own_loop(engine, prompt, params, least=1.1) == (ids, len(ids) - 1)


def test_whole_loop_decodes_the_engines_ids(tmp_path):
    """Whatever the number of drafts, to the bit; some are right, and what is rolled back leaves no trace."""
    folder = write_model(tmp_path / "model", max_position_embeddings=96)
    checkpoint = Checkpoint(folder)
    head = loud_head(checkpoint.hash)
    head.save(tmp_path / "head.safetensors")
    decoder = example("whole_loop").Decoder(checkpoint, HeadFile.load(tmp_path / "head.safetensors", checkpoint))
    prompt = list(range(3, 20))
    plain, *others = (list(decoder.answer(prompt, 40, drafts)) for drafts in (0, 1, 4, 8))
    ids = list(chain(*plain))
    assert all(list(chain(*rounds)) == ids and len(rounds) < len(plain) for rounds in others)
    with Engine.from_pretrained(folder, backend="cpu", dtype="float32", exit_head="none", threads=1) as engine:
        assert tuple(ids) == engine.generate(prompt, SamplingParams(max_tokens=40), "plain").run().ids


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


def test_a_batch_is_answered_line_by_line(folder, tmp_path, monkeypatch):
    prompts, out = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("one\n\ntwo\nthree\n")
    monkeypatch.setattr(sys, "argv", ["batch.py", str(prompts), str(out), "--model", str(folder), "-n", "7"])
    example("batch").main()
    found = {answer["prompt"]: answer for answer in map(json.loads, out.read_text().splitlines())}
    assert set(found) == {"one", "two", "three"}
    engine = Engine.from_pretrained(folder, threads=1)
    for prompt, answer in found.items():
        alone = engine.generate([{"role": "user", "content": prompt}], SamplingParams(max_tokens=7)).run()
        assert (answer["text"], answer["ended"]) == (alone.text, alone.finish_reason)


def test_questions_are_asked_with_asyncio(engine, folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ask_async.py", "one", "two", "--model", str(folder), "-n", "5"])
    example("ask_async").main()
    assert [line for line in capsys.readouterr().out.splitlines() if line in ("one", "two")] == ["one", "two"]
    endless = SamplingParams(ignore_eos=True)
    with pytest.raises(TimeoutError):
        asyncio.run(example("ask_async").ask_all(engine, ["one"], endless, 0.0))
    assert "idle" in repr(engine)


def test_a_service_of_ones_own(engine):
    client = pytest.importorskip("starlette.testclient").TestClient
    app = example("web").make_app(engine, SamplingParams(max_tokens=9))
    alone = engine.generate([{"role": "user", "content": "Why?"}], SamplingParams(max_tokens=9)).run()
    with client(app) as asked:
        assert asked.post("/ask", content="Why?").text == alone.text
        refused = asked.post("/ask", content="x" * 500)
        assert (refused.status_code, "context of 96" in refused.text) == (400, True)


def test_a_head_is_trained_on_ones_own_text(folder, tmp_path):
    """On text that repeats itself it drafts well, on pieces that it has not seen."""
    text = "".join(f"{number % 7} is a number. " for number in range(1500))
    out = tmp_path / "own.safetensors"
    right = example("own_head").train(str(folder), text, out, tmp_path / "work", layer=2, vocabulary=0)
    assert 0 <= right <= 1
    engine = Engine.from_pretrained(folder, exit_head=out, dtype="float32", threads=1)
    assert engine.head.recipe["tokens"] == 1024
    params = SamplingParams(max_tokens=9)
    assert engine.generate("one", params, "eesd").run().ids == engine.generate("one", params, "plain").run().ids
