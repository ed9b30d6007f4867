"""The tensor-parallel baseline without a network: the shares of two ranks, added up here, give the model's text."""

import numpy as np
import pytest
from support import write_model

from ppsd_rt import Engine, PpsdError, SamplingParams
from ppsd_rt.models.checkpoint import Checkpoint, as_float32
from ppsd_rt.ranks.tensor_parallel import pack_share, shares


@pytest.mark.parametrize("tied", [True, False])
def test_two_shares_make_one_model(tmp_path, tied):
    folder = write_model(tmp_path / "model", tie_word_embeddings=tied, intermediate_size=96)
    checkpoint = Checkpoint(folder)
    config = checkpoint.config
    engine = Engine.from_pretrained(folder, exit_head="none", backend="cpu", dtype="float32", threads=1)
    prompt = list(range(5, 90))
    expected = engine.generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True), "plain").run().ids
    ranks = [pack_share(checkpoint, rank, 2, "float32")[:2] for rank in range(2)]
    embedding = as_float32(checkpoint.tensors["model.embed_tokens.weight"])

    def run(ids, start):
        x = np.ascontiguousarray(embedding[ids])
        parts = [np.zeros_like(x) for _ in ranks]
        for layer in range(config.num_hidden_layers):
            for (share, _), part in zip(ranks, parts, strict=True):
                share.attention(layer, x, start, part)
            x += sum(parts)
            for (share, _), part in zip(ranks, parts, strict=True):
                share.mlp(layer, x, part)
            x += sum(parts)
        best = [share.best(np.ascontiguousarray(x[-1:])) for share, _ in ranks]
        return max((score, -(first + index)) for (score, index), (_, first) in zip(best, ranks, strict=True))[1] * -1

    for share, _ in ranks:
        share.reserve(len(prompt) + 13)
    run(prompt[:64], 0)
    text = [run(prompt[64:], 64)]
    while len(text) < 12:
        text.append(run([text[-1]], len(prompt) + len(text) - 1))
    assert tuple(text) == expected


def test_parts_are_whole_blocks():
    assert shares(1536, 2, 32) == [768, 768]
    assert shares(3, 2, 1) == [1, 2]
    assert sum(shares(1536, 5, 32)) == 1536
    with pytest.raises(PpsdError, match="fewer ranks"):
        shares(3, 4, 1)
    with pytest.raises(PpsdError, match="whole 32s"):
        shares(40, 2, 32)
