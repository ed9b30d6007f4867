"""The C++ backend: packed weights, kernels for this machine's instruction set, stages on pinned threads."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict
from itertools import pairwise
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _native
from .backend import Cancellation, Oracle, RunOptions, check_ids, hears_of_forks, one_at_a_time
from .default_threads import default_threads
from .errors import PpsdError, UsageError
from .importance import importance_for
from .models.checkpoint import Checkpoint
from .models.config import LlamaConfig
from .models.head_file import HeadFile, HeadInfo
from .models.rotary import inverse_frequencies
from .planner import Costs, calibrate, costs_here, costs_path, explain, prior
from .printable import quoted
from .protocol import Draft, Drafted, Limits, Round
from .sampling import SamplingParams
from .schedule import Auto, Schedule
from .stop_rules import describe_stop_rule

FORMATS = ("float32", "bfloat16", "int8", "int4")
DEFAULT_FORMAT = "int8"
KV_FORMATS = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.125}  # bytes of a value, its part of the scales included
_MOST_ROWS = 2**31 - 64  # that positions can count


def refuses(config: LlamaConfig) -> str | None:
    """Why the kernels cannot run a model of this shape, or None."""
    for name, value, step in (
        ("hidden_size", config.hidden_size, 32),
        ("intermediate_size", config.intermediate_size, 32),
        ("num_attention_heads * head_dim", config.num_attention_heads * config.head_dim, 32),
        ("head_dim", config.head_dim, 16),
    ):
        if value % step:
            return f"{name} {value} is not a multiple of {step}"
    return None


def kv_format(dtype: str, head_dim: int, wanted: str = "auto") -> str:
    """What keys and values are kept as beside weights of `dtype`."""
    if wanted not in ("auto", *KV_FORMATS):
        raise UsageError(f"kv_dtype {quoted(wanted)} is unknown; dtypes are auto, {', '.join(KV_FORMATS)}")
    fits = head_dim % 32 == 0 and head_dim <= 256
    if wanted == "int8" and not fits:
        raise UsageError(f"an int8 KV cache needs a head_dim that is a multiple of 32 up to 256, not {head_dim}")
    if wanted != "auto":
        return wanted
    if dtype in ("float32", "bfloat16"):
        return dtype
    return "int8" if fits else "bfloat16"


def cut_layers(first: int, last: int, stages: int | Sequence[int]) -> list[int]:
    """Where the verification layers [first, last) are cut: as evenly as can be, or at the layers that are given."""
    count = last - first
    if isinstance(stages, int):
        if stages < 1:
            raise UsageError(f"stages must be at least 1, not {stages}")
        if stages > count:
            raise UsageError(
                f"{stages} verification stages are more than the {count} layers that verify; lower --stages"
            )
        return [first + count * stage // stages for stage in range(1, stages)]
    cuts = list(stages)
    if any(low >= high for low, high in pairwise([first, *cuts, last])):
        raise UsageError(f"verification, layers {first} to {last}, cannot be cut at the layers {cuts}")
    return cuts


@contextmanager
def one_line(what: str, threads: int, mend: str = "free some, or choose a smaller --dtype") -> Iterator[None]:
    """PpsdError for what the extension says, or lacks to `what`; mend: what helps against a lack of memory."""
    try:
        yield
    except MemoryError:
        raise PpsdError(f"not enough memory to {what}: {mend}") from None
    except _native.NoThread as error:
        raise PpsdError(f"cannot {what} with {threads} threads: {error}") from None
    except RuntimeError as error:
        raise PpsdError(f"cannot {what}: {error}") from None


class CpuBackend:
    name = "cpu"
    copies = siblings = True
    device = "cpu"

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str,
        device: str,
        threads: int | None,
        stages: int | Sequence[int] = 1,
        head_dtype: str = "auto",
        kv_dtype: str = "auto",
    ) -> None:
        if device not in ("auto", "cpu"):
            raise UsageError(f"the cpu backend runs on a CPU, not on {device!r}; use --backend torch")
        self._dtype = DEFAULT_FORMAT if dtype == "auto" else dtype
        if self._dtype not in FORMATS:
            raise UsageError(
                f"dtype {quoted(dtype)} is unknown to the cpu backend; dtypes are auto, {', '.join(FORMATS)}"
            )
        self._head_dtype = self._dtype if head_dtype == "auto" else head_dtype
        if self._head_dtype not in FORMATS:
            raise UsageError(f"head_dtype {quoted(head_dtype)} is unknown; dtypes are auto, {', '.join(FORMATS)}")
        reason = refuses(checkpoint.config)
        if reason:
            raise PpsdError(f"the cpu backend cannot run this model: {reason}; use --backend torch")
        self._threads = threads or default_threads()
        self._stages = stages
        config = checkpoint.config
        self._vocab_size, self._layers = config.vocab_size, config.num_hidden_layers
        cut_layers(0, self._layers, stages)  # before the weights are packed
        shape = _native.ModelShape(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
        )
        self._kv_dtype = kv = kv_format(self._dtype, config.head_dim, kv_dtype)
        self._kv_bytes = config.kv_values * KV_FORMATS[kv]  # of a row, in all layers
        frequencies = inverse_frequencies(config).tolist()
        with one_line(f"pack {checkpoint.folder} as {self._dtype}", self._threads):
            importance = importance_for(self._dtype, checkpoint, shape, self._threads)
            self._base = _native.Model(
                shape, checkpoint.tensors, frequencies, self._dtype, kv, self._threads, importance=importance
            )
        self._checkpoint = checkpoint
        self._starting = RLock()  # two Python threads may begin answers at the same time; the later one stays
        self._session: _native.Session | None = None
        self._last: _native.Session | None = None
        self.use_head(None)
        hears_of_forks(self)

    @property
    def dtype(self) -> str:
        return self._dtype

    @property
    def head_dtype(self) -> str:
        return self._head_dtype

    @property
    def kv_dtype(self) -> str:
        return self._kv_dtype

    @property
    def threads(self) -> int:
        return self._threads

    @property
    def head(self) -> HeadInfo | None:
        return self._head

    def use_head(self, file: HeadFile | None) -> None:
        cuts = cut_layers(file.info.exit_layer if file else 0, self._layers, self._stages)
        self._end()
        model = self._base
        if file is not None:
            draft_ids = [] if file.draft_ids is None else file.draft_ids.tolist()
            with one_line("pack the exit head", self._threads):
                model = model.with_exit_head(
                    file.info.exit_layer, dict(file.tensors), draft_ids, self._head_dtype, self._threads
                )
        with one_line("make an engine", self._threads):
            self._made: _native.Engine | None = _native.Engine(model, self._threads, cuts)
        self._head = file.info if file else None
        self._draft_vocabulary = 0 if file is None or file.draft_ids is None else len(file.draft_ids)
        self._model, self._cuts = model, cuts
        self._costs: Costs | None = None
        # by whether tokens are sampled, the oracle's acceptance, lookup, and whether drafts may have siblings
        self._planners: dict[tuple[bool, float | None, int, bool], _native.Planner] = {}
        self._planned: _native.Planner | None = None

    @property
    def _engine(self) -> _native.Engine:
        if self._made is None:
            with one_line("make an engine", self._threads):
                self._made = _native.Engine(self._model, self._threads, self._cuts)
        return self._made

    def rounds(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        schedule: Schedule | Auto,
        limits: Limits,
        options: RunOptions,
        cancellation: Cancellation,
    ) -> Generator[Round | Drafted, None, None]:
        oracle = options.oracle
        session = None
        try:
            with self._starting:
                self._end()
                session = self._engine.start(
                    list(prompt),
                    self._sampling(params),
                    self._plan(schedule, oracle, params) if isinstance(schedule, Auto) else native_schedule(schedule),
                    _native.Limits(min(limits.end, _MOST_ROWS), sorted(limits.stop_ids)),
                    report_drafts=options.report_drafts,
                    oracle=(list(oracle.truth), oracle.acceptance, oracle.seed) if oracle else None,
                    trace=options.trace,
                )
                self._session = self._last = session
            cancellation.tells(session.cancel)
            whole = False
            for item in session:
                event = to_event(item, session.seconds)
                if isinstance(event, Round):
                    whole = limits.reached_by(event)
                yield event
                one_at_a_time(whole or self._session is session, cancellation)
            one_at_a_time(whole or self._session is session, cancellation)
        except MemoryError:
            raise PpsdError(f"no memory for a KV cache of {limits.end} tokens; lower --max-tokens") from None
        except _native.NoThread as error:
            raise PpsdError(f"cannot decode with {self._threads} threads: {error}") from None
        except RuntimeError as error:  # of a stage
            raise PpsdError(str(error)) from None
        finally:
            if session is not None:
                session.close()
                with self._starting:
                    if self._session is session:
                        self._session = None

    def logits(self, ids: Sequence[int], last: int = 1) -> npt.NDArray[np.float32]:
        check_ids(ids, last, self._vocab_size)
        self._end()
        with one_line(f"score {len(ids)} ids", self._threads, mend="give fewer"):
            return self._engine.logits(list(ids), last)

    def stages(self, params: SamplingParams) -> _native.Stages:
        with one_line("make stages", self._threads):
            return _native.Stages(self._model, self._threads, self._sampling(params))

    def _sampling(self, params: SamplingParams) -> dict[str, Any]:
        return {**asdict(params), "top_k": min(params.top_k, self._vocab_size)}

    def bytes_per_token(self, context: int) -> int:
        return self._base.packed_bytes + round(self._kv_bytes * context)

    def another_engine(self, threads: int) -> _native.Engine:
        """For measurements: the same packed weights, with `threads` threads."""
        with one_line("make an engine", threads):
            return _native.Engine(self._model, threads)

    def beside(self, threads: int) -> "CpuBackend":
        """Another backend on the same packed weights, with threads and a KV cache of its own, without an exit head."""
        other = copy(self)
        other._threads, other._stages = threads, 1
        other._starting, other._session, other._last = RLock(), None, None
        other.use_head(None)
        hears_of_forks(other)
        return other

    def batch(self, texts: int, capacity: int, keep: Sequence[int]) -> _native.Batch:
        """For sampling training text: `texts` texts of at most `capacity` tokens, side by side."""
        with one_line(f"hold the KV caches of {texts} texts", self._threads, mend="lower --slots"):
            return _native.Batch(self._base, self._threads, texts, capacity, list(keep))

    def spans(self) -> list[tuple[str, int, int, float, float]]:
        return self._last.spans() if self._last else []

    @property
    def draft_vocabulary(self) -> int:
        """Ids that the exit head scores; 0: all."""
        return self._draft_vocabulary

    def costs(self, again: bool = False) -> Costs:
        """What draft steps and verification passes cost here; measured in the first runs, or `again`."""
        self._end()
        if self._head is None:
            raise PpsdError("there is nothing to calibrate without an exit head: give --exit-head")
        if self._costs is None or again:
            dtypes = self._dtype, self._head_dtype, self._kv_dtype
            path = costs_path(
                self._checkpoint.hash, self._head, self._draft_vocabulary, dtypes, self._threads, self._model.isa
            )
            with one_line("measure what drafts cost", self._threads):
                self._costs = costs_here(path, lambda: calibrate(self._engine), again)
            self._planners.clear()
        return self._costs

    def believe(self, costs: Costs) -> None:
        """`auto` begins anew, with these costs in the place of measured ones."""
        self._costs = costs
        self._planners.clear()

    def explain(self) -> str:
        """What `auto` expects of every schedule, and what it has measured; empty when it has not been used."""
        return explain(self._planned, self.costs()) if self._planned else ""

    def _plan(self, schedule: Auto, oracle: Oracle | None, params: SamplingParams) -> _native.Planner:
        """The planner goes on from answer to answer; sampled ones, which are harder to foresee, have their own. What an
        oracle feigns stays apart, without copies and siblings.
        """
        assert self._head is not None
        costs = self.costs()
        siblings = schedule.siblings and params.repetition_penalty == 1.0
        what = (oracle.acceptance, 0, False) if oracle else (None, schedule.lookup, siblings)
        key = (params.temperature > 0, *what)
        if key not in self._planners:
            self._planners[key] = _native.Planner(asdict(costs), prior(self._head), *what[1:])
        self._planned = self._planners[key]
        return self._planned

    def facts(self) -> dict[str, Any]:
        return {
            "isa": self._model.isa,
            "usable_isas": _native.usable_isas(),
            "cores": _native.usable_cores(),
            "kv_dtype": self._kv_dtype,
            "packed_megabytes": round(self._model.packed_bytes / 1e6, 1),
            "pinning": self._engine.pin_problem or "ok",
        }

    def _end(self) -> None:
        """End the answer in progress, if there is one."""
        session, self._session = self._session, None  # first, so that its thread sees why it ends
        if session is not None:
            session.close()

    def forked(self) -> None:
        """The packed weights are shared; the next answer makes an engine of its own, with threads and KV caches."""
        self._starting = RLock()
        self._made = self._session = self._last = self._planned = None
        self._planners = {}


def native_schedule(schedule: Schedule) -> dict[str, Any]:
    """As the extension takes it: plain values."""
    kind = describe_stop_rule(schedule.stop_rule).partition("=")[0]
    rule = {"kind": kind, **asdict(schedule.stop_rule)}
    return {
        "first_chunk": schedule.first_chunk,
        "max_chunk": schedule.max_chunk,
        "lookahead": schedule.lookahead,
        "lookup": schedule.lookup,
        "siblings": schedule.siblings,
        "overlap": schedule.overlap,
        "stop_rule": rule,
    }


def to_event(event: tuple[Any, ...], seconds: float | None = None) -> Round | Drafted:
    """As the extension gives it; seconds: see `Round`."""
    if len(event) == 2:
        return Drafted(*event)
    epoch, position, rows, committed, judged, accepted, dropped, prompt, siblings, rescued = event
    drafts = tuple([Draft(*draft) for draft in judged])
    return Round(epoch, position, rows, committed, drafts, accepted, dropped, prompt, siblings, rescued, seconds)
