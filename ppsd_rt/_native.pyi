"""The C++ extension, csrc/bindings.cpp."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

def isa() -> str: ...
def usable_isas() -> list[str]: ...
def usable_cores(system: str = "/sys/devices") -> list[int]: ...
def best_cores(system: str = "/sys/devices") -> int: ...

PASS_ROWS: int

class NoThread(RuntimeError):
    """The system starts no more threads."""

def running_threads() -> int: ...  # of the extension
def let_threads_start(count: int) -> None:
    """For tests: so many more threads of the extension start, and then none; below 0: as many as are wanted."""

def read_bandwidth(threads: int, megabytes: int) -> float: ...
def kernel_names() -> list[str]: ...

class ModelShape:
    """The sizes of a Llama model, as the kernels take them; tensors are checked against it."""

    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int,
        intermediate_size: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rms_norm_eps: float,
    ) -> None: ...

def importance(
    shape: ModelShape,
    tensors: Mapping[str, npt.NDArray[Any]],
    frequencies: Sequence[float],
    ids: Sequence[int],
    threads: int,
) -> npt.NDArray[np.float32]: ...

class Model:
    """Packed weights of layers [first, last), LM head and perhaps an exit head: read-only, shared by engines."""

    def __init__(
        self,
        shape: ModelShape,
        tensors: Mapping[str, npt.NDArray[Any]],
        frequencies: Sequence[float],
        format: str,
        kv: str,
        threads: int,
        first: int = ...,
        last: int = ...,
        lm_head: bool = ...,
        importance: npt.NDArray[np.float32] | None = ...,
    ) -> None: ...
    def with_exit_head(
        self,
        exit_layer: int,
        tensors: Mapping[str, npt.NDArray[Any]],
        draft_ids: Sequence[int],
        format: str,
        threads: int,
    ) -> Model: ...
    @property
    def packed_bytes(self) -> int: ...
    @property
    def isa(self) -> str: ...

class Limits:
    """Where the committed text ends: before position `end`, or at one of `stop_ids`."""

    def __init__(self, end: int, stop_ids: Sequence[int]) -> None: ...

class Session:
    """An answer in the making: iterates over drafts and rounds as the tuples that ppsd_rt.protocol names."""

    seconds: float
    def __iter__(self) -> Iterator[tuple[Any, ...]]: ...
    def __next__(self) -> tuple[Any, ...]: ...
    def cancel(self) -> None: ...  # from any thread: the answer ends soon
    def close(self) -> None: ...
    def spans(self) -> list[tuple[str, int, int, float, float]]: ...

class Planner:
    """Chooses the schedule of `auto`, from what steps and passes cost (seconds) and what drafts were accepted."""

    def __init__(self, costs: Mapping[str, Any], prior: float, lookup: int = ..., siblings: bool = ...) -> None: ...
    @property
    def acceptance(self) -> float: ...
    @property
    def credit(self) -> float: ...
    def predictions(self) -> list[tuple[str, int, float]]: ...
    def predict(self, mode: str, length: int, acceptance: float) -> float: ...
    def schedule(self) -> tuple[int, int, int, bool, float, float]: ...
    def after(
        self,
        committed: int,
        judged: int,
        accepted: int,
        seconds: float,
        copied: int = ...,
        siblings: int = ...,
        rescued: bool = ...,
        position: int = ...,
        chance: float = ...,
        dropped: int = ...,
    ) -> None: ...
    def begin(self, context: int) -> None: ...
    @property
    def copy_threshold(self) -> float: ...
    def measured(self) -> dict[str, tuple[int, int, float, float]]: ...

class Crowd:
    """For tests: passes of an engine's teams beside made-up other programs, counted by the members that worked."""

    @property
    def worked(self) -> dict[int, int]: ...

class Engine:
    """A model with threads and the KV caches of one text; start() begins an answer and ends the one before."""

    def __init__(self, model: Model, threads: int, cuts: Sequence[int] = ...) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def pin_problem(self) -> str: ...
    def crowd(self, seconds: float, lost: float, room: Sequence[int]) -> Crowd: ...
    def shared_rows(self, prompt: Sequence[int]) -> int: ...
    def time_kernel(
        self, name: str, rows: int, context: int, repeats: int
    ) -> tuple[float, float, float, float, float]: ...
    def calibrate(self, seconds: float) -> dict[str, Any]: ...
    def logits(self, ids: Sequence[int], last: int) -> npt.NDArray[np.float32]: ...
    def start(
        self,
        prompt: Sequence[int],
        sampling: Mapping[str, Any],
        schedule: Mapping[str, Any] | Planner,
        limits: Limits,
        report_drafts: bool = ...,
        lock_step: bool = ...,
        ticks: tuple[int, int] = ...,
        oracle: tuple[Sequence[int], float, int] | None = ...,
        trace: bool = ...,
    ) -> Session: ...

class Stages:
    """The stages of one text with KV caches and threads of their own, for `ppsd_rt.stages.Stages`, which checks every
    argument.

    A call with `start` voids the rows that are held from there on.
    """

    def __init__(self, model: Model, threads: int, sampling: Mapping[str, Any]) -> None: ...
    def reserve(self, capacity: int) -> None: ...
    def draft(self, start: int, ids: Sequence[int], draw: bool) -> tuple[int, float] | None: ...
    def verify(self, start: int, ids: Sequence[int], last: int) -> list[int]: ...
    def learn(self, position: int) -> None: ...

class Batch:
    """Many texts side by side for sampling training text: one row [texts] of each a step, one KV cache for each."""

    def __init__(self, model: Model, threads: int, texts: int, capacity: int, keep: Sequence[int]) -> None: ...
    def step(
        self,
        ids: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        inverse_temperatures: npt.NDArray[np.float32],
        seeds: npt.NDArray[np.uint64],
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint16]]: ...

def lock_step_events(
    prompt: Sequence[int],
    draw: Callable[[list[int]], tuple[int, float, int, float]],  # token, confidence, second choice, its confidence
    truth: Callable[[list[int]], int],
    schedule: Mapping[str, Any],
    limits: Limits,
    seed: int,
    stages: int,
    per_stage: int,
) -> list[tuple[Any, ...]]: ...
def simulate(
    *,
    schedule: Mapping[str, Any],
    tokens: int,
    acceptance: Sequence[float],
    seed: int,
    step: Sequence[float],
    drawing_step: Sequence[float],
    verify: Sequence[Sequence[float]],
    links: Sequence[float],
    link_row: float,
    interference: tuple[float, float],
    trace: bool,
) -> tuple[list[tuple[float, tuple[Any, ...]]], list[int], list[tuple[str, int, int, float, float]]]: ...
def lock_step_toy(
    schedule: Mapping[str, Any], tokens: int, acceptance: Sequence[float], seed: int, stages: int, per_stage: int
) -> list[tuple[int, tuple[Any, ...]]]: ...
def toy_answer(seed: int, tokens: int) -> list[int]: ...
def calibrate(bench: Any, threads: int, overlap: bool, step_share: float, seconds: float) -> dict[str, Any]: ...
def roster(size: int, pinnable: bool, seconds: float, lost: float, room: Sequence[int]) -> list[tuple[int, bool]]: ...
def stop_rule_draws(
    schedule: Mapping[str, Any], seed: int, history: Sequence[float | Sequence[tuple[float, bool]]]
) -> list[bool]: ...
def philox(seed: int, counter: Sequence[int]) -> list[int]: ...
def uniform(seed: int, position: int, id: int, stream: int) -> float: ...

class CudaError(RuntimeError):
    """What the CUDA driver said, in one line."""

def cuda_device(ordinal: int) -> tuple[str, int, int, int]: ...
def cuda_instantiate(graph: int) -> int: ...
def cuda_destroy_graph(exec: int) -> None: ...

ROUNDS_A_LAUNCH: int
SET_CONDITION_CODE: str

class GraphLoop:
    """A CUDA graph that repeats its body on the device for as long as the word at an address says so."""

    exec: int
    def __init__(self, *, device: int, body: Sequence[int], open: int, again: int, word: int) -> None: ...

class GraphLanes:
    """A CUDA context and stream for the draft stage, and one for each verification stage."""

    def __init__(self, draft_device: int, verify_devices: Sequence[int]) -> None: ...
    def upload(self, exec: int, stage: int) -> None: ...
    def timeline(self, launches: Sequence[tuple[int, int]]) -> list[tuple[float, float]]: ...

class GraphSession:
    """An answer by captured CUDA graphs: iterates over the same tuples as Session."""

    seconds: float
    def __init__(
        self,
        *,
        lanes: GraphLanes,
        graphs: Mapping[str, Any],
        prompt: Sequence[int],
        keep: int,
        first: int,
        schedule: Mapping[str, Any] | Planner,
        limits: Limits,
        seed: int,
        in_turns: bool,
        report_drafts: bool,
        trace: bool,
    ) -> None: ...
    def __iter__(self) -> Iterator[tuple[Any, ...]]: ...
    def __next__(self) -> tuple[Any, ...]: ...
    def cancel(self) -> None: ...  # from any thread: the answer ends soon
    def close(self) -> None: ...
    def spans(self) -> list[tuple[str, int, int, float, float]]: ...

class LaunchPlan:
    """What a GPU launches next, and what its records [int32 words] mean: the host half of GraphSession."""

    def __init__(
        self, *, schedule: Mapping[str, Any] | Planner, limits: Limits, seed: int, stages: int, in_turns: bool
    ) -> None: ...
    def begin(self, prompt: Sequence[int], keep: int, first: int) -> tuple[Any, ...]: ...
    def next(self, drafts_done: int) -> str: ...
    @property
    def window(self) -> tuple[int, int]: ...
    def land(self, record: Sequence[int], drafts_done: int, seconds: float) -> tuple[Any, ...] | None: ...
    def wants_confidence(self) -> int: ...
    def drafted(self, confidence: float | None) -> None: ...
    def cancel(self) -> None: ...
    @property
    def finished(self) -> bool: ...
    @property
    def overlapping(self) -> bool: ...
    @property
    def passes_in_flight(self) -> int: ...
    @property
    def drafts_launched(self) -> int: ...
    @property
    def tokens(self) -> list[int]: ...

WIRE_VERSION: int
WIRE_ROWS: int
WIRE_FEEDBACK: int
WIRE_MESSAGES: int
WIRE_WORDS: int

def wire_words(hidden: int) -> int: ...
def wire_clock() -> int: ...
def precise_waits() -> None: ...
def sleep_until(clock: int) -> None: ...

class RankStation:
    """A verification stage that waits for messages, arrays of int32 words; work() writes those for the next stage."""

    def post(self, message: npt.NDArray[np.int32]) -> None: ...
    def announce(self, epoch: int, sent: int) -> None: ...
    def work(self, out: npt.NDArray[np.int32], milliseconds: int) -> int: ...
    def close(self) -> None: ...
    def busy_seconds(self) -> float: ...
    def counts(self) -> tuple[int, int, int, float]: ...

class Station(RankStation):
    """Layers [first, last) of a model on the C++ kernels, as a verification stage of the ranks."""

    def __init__(
        self, model: Model, first: int, last: int, cores: Sequence[int], threads: int, delay: float
    ) -> None: ...
    def pin(self) -> None: ...
    def time_pass(self, rows: int, context: int) -> float: ...

class PythonStation(RankStation):
    """A verification stage of the ranks whose rows [count, hidden] a Python object computes."""

    def __init__(self, stage: object, hidden: int, last: bool, delay: float) -> None: ...

class Remote:
    """An answer over ranks, seen from the one that drafts: what it sends, and what verdicts make of it."""

    seconds: float
    @property
    def epoch(self) -> int: ...
    @property
    def tokens(self) -> list[int]: ...
    def work(self, out: npt.NDArray[np.int32]) -> int: ...
    def land(self, verdict: npt.NDArray[np.int32]) -> tuple[bool, tuple[int, int] | None]: ...
    def next(self, milliseconds: int) -> tuple[Any, ...] | None: ...
    def set_schedule(self, schedule: Mapping[str, Any]) -> None: ...
    def cancel(self) -> None: ...
    def counts(self) -> tuple[int, float]: ...

class RankDrafter:
    """The draft stage of the ranks; start() gives the answer, seen from here."""

    def pin(self) -> None: ...
    def length(self) -> int: ...
    def start(
        self,
        prompt: Sequence[int],
        keep: int,
        sampling: Mapping[str, Any],
        schedule: Mapping[str, Any],
        limits: Limits,
        epoch: int,
        report_drafts: bool = ...,
        oracle: tuple[Sequence[int], float, int] | None = ...,
    ) -> Remote: ...

class Drafter(RankDrafter):
    """Layers before the exit, and the exit head, on the C++ kernels, as the draft stage of the ranks."""

    def __init__(self, model: Model, cores: Sequence[int], threads: int) -> None: ...
    def time_step(self, draw: bool, context: int) -> float: ...

class PythonDrafter(RankDrafter):
    """A draft stage of the ranks whose rows [count, hidden] a Python object computes."""

    def __init__(self, stage: object, hidden: int, vocab_size: int, hears: bool) -> None: ...

class LayerShares:
    """A tensor-parallel share of every layer: rows [up to 64, hidden] float32 in, this share's part of the sum out."""

    def __init__(self, model: Model) -> None: ...
    def reserve(self, capacity: int) -> None: ...
    def attention(self, layer: int, x: npt.NDArray[np.float32], start: int, part: npt.NDArray[np.float32]) -> None: ...
    def mlp(self, layer: int, x: npt.NDArray[np.float32], part: npt.NDArray[np.float32]) -> None: ...
    def best(self, x: npt.NDArray[np.float32]) -> tuple[float, int]: ...
