"""Perplexity and divergence: the formulas against torch, the windows, and `ppsd-run lab eval`."""

import json

import numpy as np
import pytest
import torch
from support import VOCAB

from ppsd_rt import Engine
from ppsd_rt.bench.cli.eval import Quality, evaluate, windows
from ppsd_rt.cli import main as cli


@pytest.mark.parametrize("size", [2, 3, 7, 8, 20, 21, 50])
@pytest.mark.parametrize("length", [2, 7, 8, 9, 20, 33])
def test_every_token_is_a_target_once_and_follows_its_window(length, size):
    ids = list(range(100, 100 + length))
    pieces = windows(ids, size)
    assert [target for piece in pieces for target in piece.targets] == ids[1:]
    for piece in pieces:
        assert len(piece.ids) < size
        assert piece.ids[-1] == piece.targets[-1] - 1
        assert list(piece.ids) == list(range(piece.ids[0], piece.targets[-1]))
        first = piece.targets[0]
        assert first - piece.ids[0] >= min(first - 100, size // 2)


def test_formulas_equal_torch():
    generator = np.random.default_rng(1)
    right, mine = (generator.normal(0, 3, (150, 40)).astype(np.float32) for _ in range(2))
    targets = generator.integers(0, 40, 150).tolist()
    base, quality = Quality(), Quality()
    for rows in (slice(0, 70), slice(70, 150)):
        base.add(right[rows], targets[rows])
        quality.add(mine[rows], targets[rows], right[rows])
    p, q = (torch.from_numpy(x).double().log_softmax(-1) for x in (right, mine))
    figures = quality.as_dict(base)
    loss = torch.nn.functional.nll_loss(q, torch.tensor(targets))
    divergence = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    assert figures["tokens"] == 150
    assert figures["perplexity"] == pytest.approx(loss.exp().item())
    assert figures["perplexity_ratio"] == pytest.approx(figures["perplexity"] / base.perplexity)
    assert figures["divergence"] == pytest.approx(divergence.mean().item())
    assert figures["divergence_most"] == pytest.approx(divergence.max().item())
    assert figures["divergence_error"] == pytest.approx(divergence.std(correction=0).item() / 150**0.5)
    assert figures["top1_agreement"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    assert "divergence" not in base.as_dict()


def test_a_model_is_as_good_as_itself():
    def model(ids, last):
        return np.random.default_rng(list(ids)).normal(size=(last, 50)).astype(np.float32)

    right, found, whole = evaluate(
        {"same": model, "flat": lambda ids, n: np.zeros((n, 50), "f4")}, model, windows([*range(40)], 16)
    )
    assert whole
    assert found["same"].as_dict(right)["perplexity_ratio"] == 1
    assert found["same"].as_dict(right)["divergence"] == 0
    assert found["same"].as_dict(right)["top1_agreement"] == 1
    assert found["flat"].perplexity == pytest.approx(50)
    assert found["flat"].as_dict(right)["divergence"] > 0.1


def test_eval(folder, capsys, tmp_path):
    """The perplexity of the command is that of the model, computed anew from single prefixes."""
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog, and the dog sleeps on.")
    args = ["lab", "eval", "--model", str(folder), "--text", str(path), "--window", "24", "-o", "json"]
    args += ["--threads", "1"]
    assert cli.main([*args, "--dtype", "float32,torch:float32,bfloat16,int8"]) == 0
    result = json.loads(capsys.readouterr().out)
    right, same, torch_twin, bfloat16, int8 = result["rows"]
    assert (right["dtype"], right["backend"], torch_twin["backend"]) == ("float32", "cpu", "torch")
    engine = Engine.from_pretrained(folder, exit_head="none", backend="torch", dtype="float32")
    losses = []
    ids = engine.encode(path.read_text())
    for piece in windows(ids, 24):
        for place, target in enumerate(piece.targets):
            logits = engine.backend.logits(piece.ids[: len(piece.ids) - len(piece.targets) + 1 + place])[0]
            losses.append(-torch.from_numpy(logits).double().log_softmax(-1)[target].item())
    assert len(losses) == len(ids) - 1 == right["tokens"]
    assert right["perplexity"] == pytest.approx(float(np.exp(np.mean(losses))), rel=1e-4)
    assert (same["divergence"], same["top1_agreement"], same["perplexity_ratio"]) == (0, 1, 1)
    assert 0 <= torch_twin["divergence"] < 1e-6
    assert torch_twin["divergence"] < bfloat16["divergence"] < 0.1
    assert torch_twin["divergence"] < int8["divergence"] < 0.1
    assert result["results"] == result["rows"]
    assert VOCAB / 100 < right["perplexity"] < VOCAB * 100


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--window", "513"], "context of 512"),
        (["--window", "1"], "at least 2"),
        (["--text", "/no/such/file"], "/no/such/file"),
    ],
)
def test_wrong_usage_is_one_line(folder, capsys, args, words):
    assert cli.main(["lab", "eval", "--model", str(folder), *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert len(captured.err.splitlines()) == 1
