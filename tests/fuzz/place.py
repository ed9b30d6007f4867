"""Where inputs are tried: a folder with a tiny model, an exit head, a GGUF file and the like; one for a process."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from support import small_gguf, tiny_config, tiny_head, tiny_model, write_model

from ppsd_rt import Engine, PpsdError, SamplingParams, _native
from ppsd_rt.models.checkpoint import Checkpoint, save

from .corpus import PROMPTS
from .mutations import SPECIAL

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
    "max_position_embeddings": 64,
}


class Place:
    """case: everything that an input may reach, and none may change. cache: of the product."""

    def __init__(self, folder: Path) -> None:
        self.case, self.cache = folder / "case", folder / "cache"
        self.model = write_model(self.case / "model", **SHAPE)
        for name in ("home", "tmp", "cwd"):
            (self.case / name).mkdir()
        for name in ("existing", "existing.svg"):
            (self.case / name).write_text("precious")
        (self.case / "prompts.jsonl").write_bytes(PROMPTS)

    @contextmanager
    def entered(self) -> Iterator["Place"]:
        """No network, and every path that the environment gives is inside."""
        environment = {
            "PPSD_CACHE": str(self.cache),
            "HOME": str(self.case / "home"),
            "TMPDIR": str(self.case / "tmp"),
            "MPLCONFIGDIR": str(self.cache / "matplotlib"),
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.cache / "hub"),
        }
        before = os.getcwd()
        with ExitStack() as stack:
            stack.enter_context(patch.dict(os.environ, environment))
            stack.enter_context(patch("tempfile.tempdir", str(self.case / "tmp")))
            stack.enter_context(patch("ppsd_rt.cuda.errors.interpreted", lambda: False))  # as users have it
            stack.enter_context(patch("ppsd_rt.models.default_model._download_wheel", _no_network))
            os.chdir(self.case / "cwd")
            stack.callback(os.chdir, before)
            yield self

    @contextmanager
    def file(self, path: Path, data: bytes) -> Iterator[Path]:
        """`path` holds these bytes, or is what they name (see `mutations.SPECIALS`), and is as before afterwards."""
        good = path.read_bytes() if path.exists() else None
        _put(path, data)
        try:
            yield path
        finally:
            _remove(path)
            if good is not None:
                path.write_bytes(good)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """What was changed below `case` is undone."""
        assert self.head
        assert self.gguf  # made by now, and so not undone
        good = {path: path.read_bytes() for path in self.case.rglob("*") if path.is_file()}
        folders = {path for path in self.case.rglob("*") if path.is_dir()}
        try:
            yield
        finally:
            for path in sorted(self.case.rglob("*"), reverse=True):
                if path not in good and path not in folders:
                    _remove(path)
            for path, data in good.items():
                if not path.is_file() or path.read_bytes() != data:
                    _remove(path)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data)

    def load(self, exit_head: str = "none", **options: Any) -> Engine:
        return Engine.from_pretrained(
            self.model, **{"exit_head": exit_head, "backend": "cpu", "dtype": "float32", "threads": 1, **options}
        )

    def answer(self) -> None:
        """Load the model and answer."""
        self.load().generate([5, 6, 7], SamplingParams(max_tokens=2), "plain").run()

    # -- what inputs are made from; each is made when it is first asked for --------------------------------------------

    @cached_property
    def engine(self) -> Engine:
        return self.load("norm:1", kv_memory="16M")  # its loop is made where memory is bounded

    @cached_property
    def plain(self) -> Engine:
        """For the answers to compare with."""
        return self.load()

    @cached_property
    def configs(self) -> list[dict[str, Any]]:
        small = tiny_config(**SHAPE)
        scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        return [
            small,
            {**small, "rope_scaling": {**scaling, "original_max_position_embeddings": 32}, "head_dim": 16},
            {**small, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
            {**small, "model_type": "mistral", "sliding_window": None, "hidden_act": "silu", "torch_dtype": "bfloat16"},
        ]

    def json(self, name: str) -> Any:
        return json.loads((self.model / name).read_text(encoding="utf-8"))

    @cached_property
    def sharded(self) -> Path:
        """The same model in two shards, with their index."""
        folder = self.case / "sharded"
        shutil.copytree(self.model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        tensors = sorted(Checkpoint(self.model).tensors.items())
        weight_map = {}
        for number, part in enumerate((tensors[:9], tensors[9:])):
            name = f"model-{number}.safetensors"
            save(folder / name, dict(part), {})
            weight_map |= dict.fromkeys(dict(part), name)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return folder

    @cached_property
    def heads(self) -> list[bytes]:
        """Of two kinds."""
        path, model = self.case / "head.safetensors", tiny_model(**SHAPE)
        found = []
        for kind in ("feedback", "layer"):
            tiny_head(model, kind, 1, Checkpoint(self.model).hash).save(path, torch.float32)
            found.append(path.read_bytes())
        return found

    @cached_property
    def head(self) -> Path:
        assert self.heads
        return self.case / "head.safetensors"

    @cached_property
    def gguf(self) -> Path:
        return small_gguf(self.case / "model.gguf")

    @cached_property
    def shards(self) -> Path:
        """A folder with one shard of distillation's text, and its states."""
        folder = self.case / "shards"
        lengths = [7, 5, 9]
        numbers = {"lengths": lengths, "answers": [3, 2, 4], "greedy": [1, 0, 1], "families": [0, 1, 0]}
        tensors = {name: np.array(values, np.int32) for name, values in numbers.items()}
        tensors["ids"] = np.arange(sum(lengths), dtype=np.int32)
        save(folder / "text-00000.safetensors", tensors, {"seed": "0", "slots": "4"})
        save(folder / "states-00000.safetensors", {"1": np.ones((sum(lengths), 4), np.uint16)}, {})
        return folder


def _no_network(work: Path) -> Path:
    raise PpsdError("there is no network here")


def _put(path: Path, data: bytes) -> None:
    _remove(path)  # first: what is mapped from it stays as it is
    kind = data.removeprefix(SPECIAL) if data.startswith(SPECIAL) else None
    if kind == b"folder":
        path.mkdir()
    elif kind == b"pipe":
        os.mkfifo(path)
    elif kind in (b"loop", b"zero", b"null"):
        path.symlink_to({b"loop": path.name, b"zero": "/dev/zero", b"null": "/dev/null"}[kind])
    elif kind != b"missing":
        path.write_bytes(b"" if kind == b"empty" else data)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def learned_of(rounds: int) -> list[float]:
    """What the policy keeps after so many rounds."""
    alone = _native.testing.Alone(0.3, 0.5)
    alone.begin()
    for _ in range(rounds):
        drafts = alone.plan().lookahead
        for kind in ("early", "draft", "late", "choose"):
            alone.took(kind, drafts + 1, 0.001 * (drafts + 10))
        alone.learn(drafts, drafts)
    return alone.learned()
