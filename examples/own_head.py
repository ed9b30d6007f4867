"""Trains an exit head on a text of your own, for text of its kind, and says how often its drafts are right there.

    python examples/own_head.py notes.txt --out head.safetensors

`ppsd-run distill` samples its text from the model, which suits more kinds of answers; this takes yours. It needs
`pip install ".[torch]"`, and some hundred kilobytes of text. Then: `ppsd-run --exit-head head.safetensors "..."`.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ppsd_rt.distill.run import Distillation, Progress, Settings
from ppsd_rt.distill.shards import STEPS, shard_path
from ppsd_rt.engine import open_model
from ppsd_rt.models.checkpoint import save
from ppsd_rt.reference.backend import TorchBackend

PIECE = 256  # tokens that are one text
HELD_OUT = 10  # of so many pieces one is kept out of the training, to judge by


class OwnText(Distillation):
    """Trains on these ids instead of sampling any."""

    def write(self, ids: list[int]) -> None:
        pieces = [ids[start : start + PIECE] for start in range(0, len(ids) - PIECE + 1, PIECE)]
        for number in range(2):  # the held-out texts, and those to train on
            kept = [piece for place, piece in enumerate(pieces) if (place % HELD_OUT == 0) == (number == 0)]
            facts = {"lengths": [PIECE] * len(kept), "answers": [1] * len(kept), "greedy": [1] * len(kept)}
            columns = {"ids": [id for piece in kept for id in piece], "families": [0] * len(kept), **facts}
            arrays = {name: np.array(values, np.int32) for name, values in columns.items()}
            save(shard_path(self.text, number), arrays, {})

    def sample(self) -> Iterator[Progress]:
        yield from ()


def train(model: str, text: str, out: Path, work: Path, layer: int, vocabulary: int = 4096) -> float | None:
    """-> how often the head's next draft is right on the held-out pieces, given that those before it were."""
    checkpoint, tokenizer = open_model(model, "torch")
    settings = Settings(checkpoint.hash, ("feedback",), (layer,), STEPS, (vocabulary,), slots=1, seed=0)
    frozen = TorchBackend(checkpoint, "auto", "auto", None).model
    job = OwnText(checkpoint, frozen, tokenizer, settings, folder=work, text=work)
    job.prepare(resume=False)
    job.write(tokenizer.encode(text))
    for step in job.train():
        print(f"\rstep {step.done} of {step.total}, loss {step.losses[0]:.3f}", end="", flush=True)
    print()
    job.save(lambda info, size: out)
    return job.acceptance[0][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--exit-layer", type=int, default=3)
    args = parser.parse_args()
    work = args.out.with_name(f"{args.out.stem}-work")
    right = train(args.model, args.text.read_text(encoding="utf-8"), args.out, work, args.exit_layer)
    print(f"{args.out}: right for {right or 0:.0%} of the held-out tokens")


if __name__ == "__main__":
    main()
