"""The C++ backend: packed weights, kernels for this machine's instruction set, stages on pinned threads."""

import os
from collections.abc import Generator, Sequence
from copy import copy
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import __version__, _native
from ..backend import Request, check_ids
from ..errors import PpsdError, UsageError
from ..loop_backend import LoopBackend
from ..models.checkpoint import Checkpoint
from ..models.head_file import EAGLE3, HeadFile, HeadInfo
from ..pipeline import learned
from ..pipeline.rounds import Drafted, Logprob, Round
from ..pipeline.split import cut_layers
from ..printable import quoted
from ..sampling.params import SamplingParams
from . import prompts
from .answers import MOST_ANSWERS, PROMPT_ROWS, Answers, weakly
from .formats import FORMATS, KV_FORMATS, format_for, kv_format, refuses
from .machine import default_threads, kv_memory_of, no_memory
from .native import one_line
from .packing import pack_head, pack_model, pack_shipped


class CpuBackend(LoopBackend):
    name = "cpu"
    device = "cpu"

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str,
        device: str,
        threads: int | None,
        stages: int | Sequence[int] = 1,
        kv_dtype: str = "auto",
        kv_memory: int | str | None = None,
    ) -> None:
        super().__init__()
        if device not in ("auto", "cpu"):
            raise UsageError(f"the cpu backend runs on a CPU, not on {device!r}; use --backend torch")
        self.dtype = format_for(checkpoint, dtype)
        if dtype == "fp8":
            raise UsageError("the cpu backend has no fp8: it is for --backend cuda, from sm_89 on; use --dtype int8")
        if self.dtype not in FORMATS:
            raise UsageError(
                f"dtype {quoted(dtype)} is unknown to the cpu backend; dtypes are auto, {', '.join(FORMATS)}"
            )
        reason = refuses(checkpoint.config)
        if reason:
            raise PpsdError(f"the cpu backend cannot run this model: {reason}; use --backend torch")
        self.threads = threads or default_threads()
        self._stages = stages
        config = checkpoint.config
        self._vocab_size, self._layers = config.vocab_size, config.num_hidden_layers
        self.hidden_size = config.hidden_size
        cut_layers(0, self._layers, stages)  # before the weights are packed
        self.kv_dtype = kv_format(self.dtype, config.head_dim, kv_dtype)
        self._kv_bytes = config.kv_values * KV_FORMATS[self.kv_dtype]  # of a row, in all layers
        self._row_bytes = self._kv_bytes + 4 * config.hidden_size + 8 * config.head_dim
        with one_line(f"pack {checkpoint.folder} as {self.dtype}", self.threads):
            self._base = pack_model(checkpoint, self.dtype, self.kv_dtype, self.threads)
        self._checkpoint = checkpoint
        self._kv_memory = kv_memory_of(kv_memory)
        self.use_head(None)

    @property
    def longest(self) -> int:
        return int(self._kv_memory * 0.9 / self._row_bytes)  # 0.9: an exit head may have layers too

    def use_head(self, file: HeadFile | None) -> None:
        cuts = cut_layers(file.info.exit_layer if file else 0, self._layers, self._stages)
        self._answers.forget_loop()
        dtypes = self.dtype, self.kv_dtype
        packed = file and pack_shipped(self._base, file, self._checkpoint, dtypes, self.threads)
        self._use(file, packed or self._base, cuts)
        self.know(None)

    def pack_head(self, file: HeadFile) -> _native.Model:
        """The model with this head. Nothing else changes; half a second for the default one."""
        return pack_head(self._base, file, self.kv_dtype, self.threads)

    def _use(self, file: HeadFile | None, model: _native.Model, cuts: Sequence[int]) -> None:
        self._model, self._cuts = model, cuts
        self._engine = self.another_engine(self.threads)
        self._head = file.info if file else None
        self.draft_vocabulary = 0 if file is None or file.draft_ids is None else len(file.draft_ids)  # 0: all ids

    @property
    def head(self) -> HeadInfo | None:
        return self._head

    def swap_head(self, file: HeadFile, packed: _native.Model) -> None:
        """To a head of the same sizes: what was said stays known."""
        self._answers.forget_loop()
        self._use(file, packed, self._cuts)

    def rounds(self, *request: *Request) -> Generator[Round | Drafted, None, None]:
        if request[3].end * self._row_bytes > self._kv_memory:
            raise no_memory(request[3].end)
        try:
            yield from self._answers.decode(request, self._ngrams)
        except _native.NoThread as error:
            raise PpsdError(f"cannot decode with {self.threads} threads: {error}") from None

    def _make_loop(self) -> _native.Loop:
        with one_line(
            f"hold {self._kv_memory / 1e6:.0f} MB of KV caches", self.threads, mend="give a smaller --kv-memory"
        ):
            # Stages overlap or take turns, and nothing overlaps with what an EAGLE-3 head drafts.
            cuts = None if self.head is not None and self.head.kind == EAGLE3 else self._cuts
            what = (self.draft_vocabulary, self.dtype, self.kv_dtype, self.threads, self._model.isa, cuts)
            path = self._answers.learned_at = learned.learned_path(self._checkpoint.hash, self.head, *what)
            return _native.Loop(
                self._model,
                self.threads,
                self._kv_memory,
                MOST_ANSWERS,
                PROMPT_ROWS,
                cuts=cuts,
                prior=learned.prior(self.head),
                learned=learned.read(path),
            )

    def save_prompts(self, path: Path, most: int | None) -> int:
        """See prompts.save. Answers go on."""
        with self._answers.lock:
            return prompts.save(path, *self._prompts_of(), self._answers.loop, most)

    def load_prompts(self, path: Path) -> int:
        """See prompts.load."""
        with self._answers.lock:
            return prompts.load(path, *self._prompts_of(), self._answers.loop)

    def prompts_name(self) -> str:
        """Of a file for prompts of this model, in these formats and with this head."""
        return _digest(self._prompts_of()[0]) + ".prompts"

    def _prompts_of(self) -> tuple[dict[str, object], dict[str, object]]:
        """What blocks hold, and what gives them their bits."""
        of = {
            "model": self._checkpoint.name,
            "weights": self._checkpoint.hash,
            "configuration": _digest(self._checkpoint.config),  # with its rotation
            "format": [self.dtype, self.kv_dtype],
            "exit head": _digest((self.head, self.draft_vocabulary)),
            "block": self._answers.loop.block_bytes,
        }
        built = os.stat(_native.__file__)
        return of, {"isa": self._model.isa, "version": __version__, "kernels": [built.st_size, built.st_mtime_ns]}

    def logits(self, ids: Sequence[int], last: int = 1) -> npt.NDArray[np.float32]:
        check_ids(ids, last, self._vocab_size)
        self._answers.end_all()
        with one_line(f"score {len(ids)} ids", self.threads, mend="give fewer"):
            return self._engine.logits(list(ids), last)

    def logprobs(self, ids: Sequence[int], top: int) -> list[Logprob]:
        """By threads and a KV cache of its own: answers go on beside it."""
        check_ids(ids, 1, self._vocab_size)
        with one_line(f"score {len(ids)} ids", self.threads, mend="give fewer"):
            return _native.Engine(self._base, self.threads).logprobs(list(ids), top)

    def stages(self, params: SamplingParams) -> _native.Stages:
        with one_line("make stages", self.threads):
            return _native.Stages(self._model, self.threads, params)

    def bytes_per_token(self, context: int) -> int:
        return self._base.packed_bytes + round(self._kv_bytes * context)

    def another_engine(self, threads: int) -> _native.Engine:
        """For measurements: the same packed weights, with `threads` threads."""
        with one_line("make an engine", threads):
            return _native.Engine(self._model, threads)

    def beside(self, threads: int) -> "CpuBackend":
        """Another backend on the same packed weights, with threads and a KV cache of its own, without an exit head."""
        other = copy(self)
        other.threads, other._stages = threads, 1
        other._answers = Answers(weakly(other._make_loop))
        other.use_head(None)
        return other

    def sampling_loop(self, texts: int, capacity: int, keep: Sequence[int]) -> _native.Loop:
        """For sampling training text, stepped by hand: `texts` texts of at most `capacity` tokens side by side.

        keep: after so many layers, the hidden states of all rows are kept.
        """
        size = int(texts * (capacity + 64) * (self._row_bytes + 2 * self.hidden_size * len(keep)))
        with one_line(f"hold the KV caches of {texts} texts", self.threads, mend="lower --slots"):
            return _native.Loop(self._base, self.threads, size, texts, PROMPT_ROWS, True, list(keep))

    def facts(self) -> dict[str, Any]:
        return {
            "isa": self._model.isa,
            "usable_isas": _native.usable_isas(),
            "cores": _native.usable_cores(),
            "kv_dtype": self.kv_dtype,
            "kv_megabytes": round(self._kv_memory / 1e6, 1),
            "packed_megabytes": round(self._model.packed_bytes / 1e6, 1),
            "pinning": self._engine.pin_problem or "ok",
        }


def _digest(value: object) -> str:
    return sha256(repr(value).encode()).hexdigest()[:16]
