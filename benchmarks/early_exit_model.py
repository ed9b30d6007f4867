"""A small Llama that is trained to exit early, for experiments: layer dropout and early-exit loss, as in LayerSkip.

    python benchmarks/early_exit_model.py FOLDER --steps 600     # five minutes on two busy cores

LayerSkip is arXiv 2404.16710: deeper layers are left out more often (layer dropout), and the loss is that of the last
layer and of one earlier layer, another one each step (the rotating curriculum). The text is the source of
Python's own library, byte by byte. FOLDER is then a model like any other; `ppsd-run -m FOLDER` exits early by itself.
"""

import argparse
import json
import math
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor

from ppsd_rt.models.config import LlamaConfig
from ppsd_rt.models.llama import LlamaForCausalLM, causal_attention
from ppsd_rt.models.rope import Rope

LAYERS, EXIT = 8, 2  # EXIT: which of the trained exits drafts, unless another is asked for
CONFIG = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
LENGTH, BATCH = 192, 12  # bytes of a sequence, sequences of a step
DROPOUT = 0.2  # of the last layer; none of the first
EARLY = 0.5  # weight of the early exit's loss, where the last layer's has 1
RATE = 4e-3
HELD_OUT = 12  # files that are not trained on


def sources() -> list[bytes]:
    """Python's library, file by file; the last ones are held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [text for text in (file.read_bytes() for file in files) if len(text) > 4 * LENGTH]
    random.Random(0).shuffle(texts)
    return texts


def train(steps: int, seed: int = 0) -> tuple[LlamaForCausalLM, list[float]]:
    """The model, and the last losses of every exit, in nats per byte, smoothed."""
    torch.manual_seed(seed)
    draws = random.Random(seed)
    model = LlamaForCausalLM(LlamaConfig.from_dict(CONFIG))
    for name, parameter in model.named_parameters():
        torch.nn.init.ones_(parameter) if "norm" in name else torch.nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.1)
    rope, losses = Rope(model.config, LENGTH), [math.log(256)] * LAYERS
    for step, ids in enumerate(batches(steps, draws)):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 30) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        early = 1 + step % (LAYERS - 1)
        total = torch.zeros(())
        for layer, hidden in exits(model, ids, rope, early, draws):
            logits = model.lm_head(model.model.norm(hidden[:, :-1]))
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            losses[layer - 1] += 0.1 * (loss.item() - losses[layer - 1])
            total = total + (loss if layer == LAYERS else EARLY * loss)
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model, losses


def batches(steps: int, draws: random.Random) -> Iterator[Tensor]:
    """[BATCH, LENGTH] bytes, anywhere in the training files."""
    text = torch.frombuffer(bytearray(b"\n".join(sources()[:-HELD_OUT])), dtype=torch.uint8).long()
    for _ in range(steps):
        starts = [draws.randrange(len(text) - LENGTH) for _ in range(BATCH)]
        yield torch.stack([text[start : start + LENGTH] for start in starts])


def exits(
    model: LlamaForCausalLM, ids: Tensor, rope: Rope, early: int, draws: random.Random
) -> Iterator[tuple[int, Tensor]]:
    """(layer, hidden states [batch, length, hidden]), after layer `early` and after the last one; some drop out."""
    attend, x = causal_attention(rope), model.model.embed_tokens(ids)
    for number, layer in enumerate(model.model.layers, start=1):
        dropout = DROPOUT * (2 ** ((number - 1) / (LAYERS - 1)) - 1)
        if draws.random() >= dropout:
            x = layer(x, attend)
        if number in (early, LAYERS):
            yield number, x


def write(folder: Path, model: LlamaForCausalLM) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["LlamaForCausalLM"]}))
    (folder / "generation_config.json").write_text(json.dumps({"assistant_early_exit": EXIT}))
    state = {name: value.bfloat16() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(state, folder / "model.safetensors")
    # The id of a byte is its value. Bytes that print stand for themselves, the others for signs from 256 on.
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    signs = {chr(byte if byte in printing else next(others)): byte for byte in range(256)}
    tokenizer = Tokenizer(BPE(vocab=signs, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    model, losses = train(args.steps)
    write(args.folder, model)
    print("loss after layer 1 to 8, nats per byte:", *(f"{loss:.2f}" for loss in losses))
    return 0


if __name__ == "__main__":
    sys.exit(main())
