"""Trains an EAGLE-3 head (arXiv 2503.01840) as `ppsd-run distill` trains heads of our own: same text, batches, loss.

    python benchmarks/train_eagle3.py --tokens 262144 --text text --work work --out head --beside feedback.safetensors
    ppsd-run heads head feedback.safetensors auto

It can be cut off at any moment, and goes on when called again. --text: a folder that `distill --text` can share, with
the same --slots and --seed. --beside: judges a head of `distill` on the same held-out answers. The last line is JSON:
how often a head is right in its 1st, 2nd, .. draft after verified text, given the true text.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from eagle3_trainer import STEPS, EagleTrainer, fresh_head

from ppsd_rt.distill.run import HELD_OUT, Distillation, Settings
from ppsd_rt.distill.shards import Text, read_shard
from ppsd_rt.distill.train import CHUNK, Trainer, TrainSettings, chunk_places, in_areas
from ppsd_rt.lab.cli.prompt_files import read_prompts
from ppsd_rt.models.checkpoint import Checkpoint, save
from ppsd_rt.models.eagle3_head import Eagle3Head
from ppsd_rt.models.exit_head import ExitHead
from ppsd_rt.models.head_file import HeadFile
from ppsd_rt.models.llama import LlamaForCausalLM, to_numpy
from ppsd_rt.models.resolve import resolve_model
from ppsd_rt.models.tokenizer import load_tokenizer
from ppsd_rt.reference.backend import TorchBackend


class EagleDistillation(Distillation):
    """A run of `distill` that trains such a head. Its settings' exit layers are the taps: their states are kept."""

    def _begin_training(self, texts: Sequence[Text], steps: int, rate: float) -> None:
        (size,) = self.settings.draft_vocabularies
        ids = sorted(self.frequent[:size])
        head = fresh_head(self.model, self.settings.exit_layers, ids, self.checkpoint.name, self.settings.model_hash)
        self.trainer = EagleTrainer(self.model, [head], texts, self.settings.train, steps, rate)
        self.trial = []


SHAPE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "rms_norm_eps", "rope_theta",
)  # fmt: skip


def write_head(folder: Path, head: Eagle3Head) -> None:
    """In SafeAILab's layout, with a layer as Llama has it."""
    assert head.draft_ids is not None
    ids = head.draft_ids.numpy()
    raw: dict[str, Any] = {name: getattr(head.eagle.layer, name) for name in SHAPE}
    raw |= {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(head.eagle.taps),
        "draft_vocab_size": len(ids),
        "norm_before_residual": head.eagle.norm_before_residual,
        "fc_norm": head.eagle.fc_norm,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n")
    weights = {name: p for name, p in head.named_parameters() if "parametrizations" not in name}
    weights["lm_head.weight"] = head.lm_head.weight
    tensors = {name.replace("layers.0.", "midlayer."): to_numpy(w.detach().bfloat16()) for name, w in weights.items()}
    d2t = (ids - np.arange(len(ids))).astype(np.int32)
    save(folder / "model.safetensors", {**tensors, "d2t": d2t}, {})


@torch.no_grad()
def feedback_by_place(model: LlamaForCausalLM, head: ExitHead, texts: Sequence[Text]) -> list[float]:
    """For drafts so many rows after the newest verified one, as EagleTrainer.accept does for steps."""
    trainer = Trainer(model, [head], texts, TrainSettings(), 1)
    right, judged = torch.zeros(STEPS + 1), torch.zeros(STEPS + 1)
    for part in in_areas(texts, [index for index, text in enumerate(texts) if text.greedy]):
        ids, rows = trainer._pad([texts[index] for index in part])
        rows[:, :STEPS] = False
        exits, last = trainer._teacher([texts[index] for index in part], ids)
        places = chunk_places(ids.shape, part[0])
        hidden, true = trainer._student(head, exits, last, places)[rows], ids.roll(-1, 1)[rows]
        drafts = torch.cat([trainer._ids[trainer._logits(h).argmax(-1)] for h in hidden.split(CHUNK)])
        for place in range(1, STEPS + 1):
            at = places[rows] == place
            right[place] += (drafts == true)[at].sum()
            judged[place] += at.sum()
    return [round(share, 4) for share in (right / judged)[1:].tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=262_144)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--seed", type=int, default=44)
    parser.add_argument("--epochs", type=int, default=TrainSettings.epochs)
    parser.add_argument("--batch-tokens", type=int, default=TrainSettings.batch_tokens)
    parser.add_argument("--taps", type=int, nargs="+", help="after so many layers [2, the middle, 3 from the end]")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--learning-rate", type=float, default=TrainSettings.learning_rate)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--beside", type=Path, nargs="*", default=[], help="files of `distill` to judge on the same answers"
    )
    args = parser.parse_args()

    checkpoint = Checkpoint(resolve_model(args.model))
    config = checkpoint.config
    if config.rope_scaling or config.qk_norm or config.attention_bias or config.mlp_bias or config.layer_attention:
        raise SystemExit(
            "train_eagle3.py: only for layers as plain Llama has them: no biases, no norms of q and k, no windows"
        )
    tokenizer = load_tokenizer(checkpoint.folder, config.vocab_size)
    model = TorchBackend(checkpoint, "auto", "cpu", None).model
    layers = config.num_hidden_layers
    settings = Settings(
        model_hash=checkpoint.hash,
        kinds=("feedback",),  # as far as the run knows
        exit_layers=tuple(args.taps or (2, layers // 2, layers - 3)),
        tokens=args.tokens,
        draft_vocabularies=(args.vocabulary,),
        slots=args.slots,
        seed=args.seed,
        format="int8",
        train=TrainSettings(args.learning_rate, epochs=args.epochs, batch_tokens=args.batch_tokens),
    )
    judges = [prompt.prompt for prompt in read_prompts(None)]
    job = EagleDistillation(checkpoint, model, tokenizer, settings, args.work, args.text, judges, 2, tell=print)
    job.prepare(resume=True)
    for _ in job.sample():
        pass
    for _ in job.train():
        pass
    write_head(args.out, job.trainer.heads[0])
    held_out = read_shard(args.text, HELD_OUT)
    job.trainer.accept(held_out)
    beside = {}
    for file in args.beside:
        head = ExitHead.from_file(HeadFile.load(file, checkpoint), model)
        beside[file.name] = feedback_by_place(model, head, held_out)
    steps = [round(share, 4) for share in job.trainer.by_step]
    print(json.dumps({"steps": job.trainer.step, "eagle3": steps, **beside}))


if __name__ == "__main__":
    main()
