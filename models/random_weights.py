"""Models that nobody trained: the shapes of well-known ones with random weights, for measurements.

`random:llama-3.1-8b` is a name of a model like any other. The weights are drawn on the device that runs them (see
ppsd_rt/cuda/weights.py); there is no file, and no text worth reading comes out.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..errors import PpsdError
from .checkpoint import Checkpoint
from .config import LlamaConfig
from .tokenizer import Tokenizer

PREFIX = "random:"
_LLAMA3 = {
    "vocab_size": 128256, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
_LLAMA2 = {"vocab_size": 32000, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}


def _shape(base: Mapping[str, object], hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> LlamaConfig:
    return LlamaConfig.from_dict(
        {
            "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "bos_token_id": 1, "eos_token_id": 2, **base,
        }
    )  # fmt: skip


SHAPES = {
    "smollm2-135m": _shape(
        {"vocab_size": 49152, "rope_theta": 100000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
         "tie_word_embeddings": True}, 576, 1536, 30, 9, 3,
    ),
    "llama-3.2-1b": _shape({**_LLAMA3, "tie_word_embeddings": True}, 2048, 8192, 16, 32, 8),
    "llama-3.1-8b": _shape(_LLAMA3, 4096, 14336, 32, 32, 8),
    "llama-2-13b": _shape(_LLAMA2, 5120, 13824, 40, 40, 40),
    "llama-2-70b": _shape(_LLAMA2, 8192, 28672, 80, 64, 8),
}  # fmt: skip


class RandomCheckpoint(Checkpoint):
    """A checkpoint without weights, but for the final norm, which an exit head may share: all ones."""

    def __init__(self, name: str, seed: int = 0) -> None:
        """Raises PpsdError for a shape that has no name here."""
        shape = name.removeprefix(PREFIX)
        if shape not in SHAPES:
            raise PpsdError(f"model {name!r} is unknown; shapes to fill with random weights are {', '.join(SHAPES)}")
        self.folder, self.config, self.seed = Path(name), SHAPES[shape], seed
        self.tensors = {"model.norm.weight": np.ones(self.config.hidden_size, np.float32)}
        self.stored_as = []
        self.hash = f"{shape}-{seed}"


class NumberTokenizer(Tokenizer):
    """The id of a character is its code, of a token its number."""

    def __init__(self, config: LlamaConfig) -> None:
        self.base_size = config.vocab_size
        self.vocab_size, self.bos_id, self.eos_id = config.vocab_size, config.bos_token_id, config.eos_token_ids[0]
        self.special_ids: frozenset[int] = frozenset()
        self.chat_template = None
        self._leading_spaces = 0

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(character) % self.vocab_size for character in text]

    def _piece(self, id: int, first: bool) -> bytes:
        return f" {id}".encode()

    def token_to_id(self, token: str) -> int | None:
        return int(token) if token.isdecimal() and int(token) < self.vocab_size else None

    def id_to_token(self, id: int) -> str | None:
        return str(id) if 0 <= id < self.vocab_size else None


def random_model(name: str) -> tuple[RandomCheckpoint, Tokenizer]:
    checkpoint = RandomCheckpoint(name)
    return checkpoint, NumberTokenizer(checkpoint.config)
