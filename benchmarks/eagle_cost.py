"""What an EAGLE-3 head of published size costs beside a model of a known shape, and the speed that lets expect.

    python benchmarks/eagle_cost.py --shape llama-3.1-8b --dtype int4 --acceptance 0.7 -t 2

All weights are random: they cost what trained ones cost. The layers of the model share one layer's numbers, but each is
packed by itself, so that a pass reads as many bytes as it would. The acceptance is assumed, and what drafts and passes
cost is measured: the prediction is that of `auto`'s planner. The last line is one JSON object.
"""

import argparse
import json
import tempfile
from pathlib import Path
from types import MappingProxyType

import numpy as np

from ppsd_rt._native import Planner
from ppsd_rt.cli.info import machine
from ppsd_rt.cpu import packing
from ppsd_rt.cpu.backend import CpuBackend
from ppsd_rt.models.checkpoint import Array, save
from ppsd_rt.models.eagle3 import Eagle3File
from ppsd_rt.models.random_weights import SHAPES, RandomCheckpoint
from ppsd_rt.models.shapes import layer_shapes, model_shapes


class SharedLayers(RandomCheckpoint):
    """A checkpoint of a known shape in which all layers are one."""

    def __init__(self, shape: str) -> None:
        super().__init__(shape)
        one = {name: drawn(size) for name, size in layer_shapes(self.config, "").items()}
        rest = {name: size for name, size in model_shapes(self.config).items() if ".layers." not in name}
        tensors = {name: drawn(size) for name, size in rest.items()}
        for layer in range(self.config.num_hidden_layers):
            tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in one.items()}
        self.tensors = MappingProxyType(tensors)
        self.stored_as = ["bfloat16"]


def drawn(size: tuple[int, ...]) -> Array:
    """Random numbers of a usual size as bfloat16; norms are ones."""
    if len(size) == 1:
        return np.ones(size, np.float32)
    generator = np.random.default_rng(0)
    pattern = (0.02 * generator.standard_normal(1 << 20, np.float32)).view(np.uint32) >> 16
    return np.resize(pattern.astype(np.uint16), size)


def write_head(folder: Path, checkpoint: SharedLayers, draft_vocabulary: int) -> Path:
    """SafeAILab's layout, with one layer of the model's shape and no embedding."""
    config = checkpoint.config
    raw = {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "max_position_embeddings": 2048,
        "rms_norm_eps": config.rms_norm_eps,
        "draft_vocab_size": draft_vocabulary,
    }
    (folder / "config.json").write_text(json.dumps(raw))
    shapes = layer_shapes(config, "midlayer.")
    for name in ("q_proj", "k_proj", "v_proj"):
        outputs, inputs = shapes[f"midlayer.self_attn.{name}.weight"]
        shapes[f"midlayer.self_attn.{name}.weight"] = (outputs, 2 * inputs)
    hidden = config.hidden_size
    shapes |= {"midlayer.hidden_norm.weight": (hidden,), "fc.weight": (hidden, 3 * hidden), "norm.weight": (hidden,)}
    tensors = {name: drawn(size) for name, size in {**shapes, "lm_head.weight": (draft_vocabulary, hidden)}.items()}
    save(folder / "model.safetensors", {**tensors, "d2t": np.zeros(draft_vocabulary, np.int32)}, {})  # the first ids
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--dtype", default="int4")
    parser.add_argument("--vocabulary", type=int, default=32000, help="of drafts [32000]")
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-r", "--repeats", type=int, default=3)
    args = parser.parse_args()

    packing.importance_for = lambda *_: None  # it takes a text, and random weights have none
    checkpoint = SharedLayers(args.shape)
    with tempfile.TemporaryDirectory() as folder:
        head = Eagle3File.load_folder(write_head(Path(folder), checkpoint, args.vocabulary), checkpoint)
        backend = CpuBackend(checkpoint, args.dtype, "auto", args.threads)
        plain_bytes = backend.bytes_per_token(0)
        backend.use_head(head)
    rows = []
    for _ in range(args.repeats):
        costs = backend.costs(again=True)
        predicted = Planner(costs, args.acceptance, 0, False).predictions()
        plain = next(p.tokens_per_second for p in predicted if p.mode == "plain")
        best = max((p for p in predicted if p.mode == "turns"), key=lambda p: p.tokens_per_second)
        turns = costs.turns
        row = {
            "plain_ms": 1000 * costs.plain_seconds,
            "draft_of_plain": turns.draft_step / costs.plain_seconds,
            "first_draft_of_plain": (turns.first_draft or turns.draft_step) / costs.plain_seconds,
            "pass_of_4_of_1": turns.verify[3] / turns.verify[0],
            "pass_of_8_of_1": turns.verify[7] / turns.verify[0],
            "best_length": best.length,
            "speed_over_plain": best.tokens_per_second / plain,
            "crowded": costs.crowded,
        }
        rows.append(row)
        print(" ".join(f"{name} {value:.3f}" for name, value in row.items()), flush=True)
    facts = {**vars(args), "plain_megabytes": plain_bytes / 1e6, "isa": backend.facts()["isa"]}
    facts["with_head_megabytes"] = backend.facts()["packed_megabytes"]
    print(json.dumps({**facts, "rows": rows, "machine": machine()}))


if __name__ == "__main__":
    main()
