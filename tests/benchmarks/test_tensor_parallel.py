"""The tensor-parallel baseline without a network: the shares of two ranks, added up here, give the model's text."""

import importlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from support import write_model

from ppsd_rt import Engine, PpsdError, SamplingParams
from ppsd_rt.models.checkpoint import Checkpoint

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def tensor_parallel(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("tensor_parallel")


@pytest.mark.parametrize("tied", [True, False])
def test_two_shares_make_one_model(tmp_path, tensor_parallel, tied):
    folder = write_model(tmp_path / "model", tie_word_embeddings=tied, intermediate_size=96)
    checkpoint = Checkpoint(folder)
    engine = Engine.from_pretrained(folder, exit_head="none", backend="cpu", dtype="float32", threads=1)
    prompt = list(range(5, 90))
    expected = engine.generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True), "plain").run().ids
    barrier, parts = Barrier(2), {}

    def gather(rank, mine):
        parts[rank] = mine
        barrier.wait()
        everyone = [parts[0], parts[1]]
        barrier.wait()
        return everyone

    def answer(rank):
        def add_up(part):
            part[:] = sum(gather(rank, part.copy()))

        share, first_id, _ = tensor_parallel.pack_share(checkpoint, rank, 2, "float32")
        work = tensor_parallel.Rank(checkpoint, share, first_id, add_up, lambda mine: max(gather(rank, mine)))
        return work.answer(prompt, 12)[0]

    with ThreadPoolExecutor(2) as ranks:
        texts = list(ranks.map(answer, range(2)))
    assert texts == [list(expected)] * 2


def test_parts_are_whole_blocks(tensor_parallel):
    shares = tensor_parallel.shares
    assert shares(1536, 2, 32) == [768, 768]
    assert shares(3, 2, 1) == [1, 2]
    assert sum(shares(1536, 5, 32)) == 1536
    with pytest.raises(PpsdError, match="fewer ranks"):
        shares(3, 4, 1)
    with pytest.raises(PpsdError, match="whole 32s"):
        shares(40, 2, 32)
