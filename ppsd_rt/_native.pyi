"""The C++ extension, csrc/bindings.cpp."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

def isa() -> str: ...
def usable_isas() -> list[str]: ...
def usable_cores() -> list[int]: ...
def read_bandwidth(threads: int, megabytes: int) -> float: ...
def kernel_names() -> list[str]: ...

class ModelShape:
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

class Model:
    def __init__(
        self,
        shape: ModelShape,
        tensors: Mapping[str, npt.NDArray[Any]],
        frequencies: Sequence[float],
        format: str,
        kv: str,
        threads: int,
    ) -> None: ...
    def with_exit_head(
        self, exit_layer: int, tensors: Mapping[str, npt.NDArray[Any]], draft_ids: Sequence[int], threads: int
    ) -> Model: ...
    @property
    def packed_bytes(self) -> int: ...
    @property
    def isa(self) -> str: ...

class Limits:
    def __init__(self, end: int, stop_ids: Sequence[int]) -> None: ...

class Session:
    seconds: float
    def __iter__(self) -> Iterator[tuple[Any, ...]]: ...
    def __next__(self) -> tuple[Any, ...]: ...
    def close(self) -> None: ...
    def spans(self) -> list[tuple[str, int, int, float, float]]: ...

class Planner:
    def __init__(self, costs: Mapping[str, Any], prior: float) -> None: ...
    @property
    def acceptance(self) -> float: ...
    def predictions(self) -> list[tuple[str, int, float]]: ...
    def predict(self, mode: str, length: int, acceptance: float) -> float: ...
    def schedule(self) -> tuple[int, int, int, bool, float]: ...
    def after(self, committed: int, judged: int, accepted: int, seconds: float) -> None: ...
    def measured(self) -> dict[str, tuple[int, int, float, float]]: ...

class Engine:
    def __init__(self, model: Model, threads: int, cuts: Sequence[int] = ...) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def pin_problem(self) -> str: ...
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

class Batch:
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
    draw: Callable[[list[int]], tuple[int, float]],
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
def stop_rule_draws(
    schedule: Mapping[str, Any], seed: int, history: Sequence[float | Sequence[tuple[float, bool]]]
) -> list[bool]: ...
def philox(seed: int, counter: Sequence[int]) -> list[int]: ...
def uniform(seed: int, position: int, id: int, stream: int) -> float: ...
