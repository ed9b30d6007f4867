"""The C++ extension, csrc/bindings/. Schedules, limits, events and the like are ppsd_rt's own dataclasses."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .backend import Oracle
from .models.config import LlamaConfig
from .pipeline.rounds import Drafted, Limits, Logprob, Round
from .pipeline.schedule import Schedule
from .sampling.grammar import TokenMask
from .sampling.params import SamplingParams

def isa() -> str: ...
def usable_isas() -> list[str]: ...
def usable_cores(system: str = "/sys/devices") -> list[int]: ...
def best_cores(system: str = "/sys/devices") -> int: ...

PASS_ROWS: int

class MaskFailed(RuntimeError):
    """A grammar gives up."""

class NoThread(RuntimeError):
    """The system starts no more threads."""

def read_bandwidth(threads: int, megabytes: int) -> float: ...
def kernel_names() -> list[str]: ...
def in_callback() -> bool:
    """Is this a thread that decodes, and has called Python for a mask?"""

class Rotary:
    """How far each pair of channels turns per position: frequencies [head_dim / 2]. factor: of cosines and sines.
    original: in longer texts they are long_frequencies or, where there are none, those of a base that grows from
    `theta` on, `growth` times as fast as the text; 0: they are the same in all."""

    def __init__(
        self,
        frequencies: Sequence[float],
        factor: float = ...,
        original: int = ...,
        long_frequencies: Sequence[float] = ...,
        theta: float = ...,
        growth: float = ...,
    ) -> None: ...

class Blocks:
    """A matrix in blocks as GGUF files have them, where it lies: data [rows, bytes of a row], uint8. neighbours:
    head_dim, if the rows are in GGUF's order of the rotary channels; 0: in Hugging Face's."""

    def __init__(self, data: npt.NDArray[Any], type: str, columns: int, neighbours: int = ...) -> None: ...
    def four_bits(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
        """Of matrices of four bits: codes [rows, columns], and scales and minima, float16 bits [rows, columns / 32]: a
        value is scale * code - minimum. Raises RuntimeError, one line, where one of them is not finite."""

def importance(
    shape: LlamaConfig,
    tensors: Mapping[str, npt.NDArray[Any] | Blocks],
    frequencies: Rotary,
    ids: Sequence[int],
    threads: int,
) -> npt.NDArray[np.float32]: ...

class NotPacked(RuntimeError):
    """A file of packed weights is damaged, or of another model."""

class PackedFile:
    """What packing has made, to be mapped; descriptor -1: there is no file."""

    HEADER: Final[int]
    def __init__(self, file: int, checksum: int) -> None: ...

class Model:
    """Packed weights of layers [first, last), LM head and perhaps an exit head: read-only, shared by engines."""

    def __init__(
        self,
        shape: LlamaConfig,
        tensors: Mapping[str, npt.NDArray[Any] | Blocks],
        frequencies: Rotary,
        format: str,
        kv: str,
        threads: int,
        first: int = ...,
        last: int = ...,
        lm_head: bool = ...,
        importance: npt.NDArray[np.float32] | None = ...,
        file: PackedFile = ...,
    ) -> None: ...
    def with_exit_head(
        self,
        exit_layer: int,
        tensors: Mapping[str, npt.NDArray[Any]],
        draft_ids: Sequence[int],
        threads: int,
        file: PackedFile = ...,
        tap: int = ...,
    ) -> Model: ...
    def with_eagle3(
        self,
        *,
        shape: LlamaConfig,
        rotary: Rotary,
        taps: Sequence[int],
        norm_before_residual: bool,
        norm_output: bool,
        tensors: Mapping[str, npt.NDArray[Any]],
        draft_ids: Sequence[int],
        threads: int,
        file: PackedFile = ...,
    ) -> Model: ...
    def write_packed(self, file: int) -> int: ...
    own_bytes: Final[int]
    mapped: Final[bool]
    packed_bytes: Final[int]
    isa: Final[str]

class Notifier:
    """A descriptor that becomes readable when an answer that has it has events."""

    def __init__(self) -> None: ...
    descriptor: Final[int]
    def clear(self) -> None: ...  # before events are looked for

class LoopAnswer:
    """An answer in the making, perhaps among others: iterates over its Drafted and Round events."""

    def __iter__(self) -> Iterator[Drafted | Round]: ...
    def __next__(self) -> Drafted | Round: ...
    def ready(self, milliseconds: int) -> bool: ...  # there is something to iterate over, waiting for so long
    def prompt_rows(self) -> tuple[int, int]: ...  # of the prompt: rows done, rows to do; from any thread
    def take(self) -> tuple[list[Drafted | Round], bool]: ...  # (events that are there, is it over), without waiting
    def tell_by(self, notifier: Notifier) -> None: ...  # it is notified whenever there is something to iterate over
    def kept(self) -> npt.NDArray[np.uint16]: ...  # once it is over: of its rows, [rows * keep * hidden]
    def cancel(self) -> None: ...  # from any thread: the answer ends soon
    def close(self) -> None: ...
    def spans(self) -> list[tuple[str, int, int, float, float]]: ...

class Loop:
    """Decodes many answers at once, their KV caches in blocks of 64 positions out of `kv_bytes`.

    stepped: it has no thread, and works when `step` is called. cuts: where the layers after the exit are cut into
    stages, which overlap where one answer is alone; None: they take turns.
    """

    def __init__(
        self,
        model: Model,
        threads: int,
        kv_bytes: int,
        most_answers: int,
        prompt_rows: int,
        stepped: bool = ...,
        keep: Sequence[int] = ...,  # of every row the hidden states after so many layers: LoopAnswer.kept
        cuts: Sequence[int] | None = ...,
        prior: float = ...,  # how often the exit head's drafts are right, as far as its file says
        learned: Sequence[float] = ...,  # by the policy of a loop before this one
    ) -> None: ...
    def learned(self) -> list[float]:
        """By the policy, until the last answer that has ended: for the next process."""

    def explain(self) -> str:
        """What the policy believed of passes and drafts then."""

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        schedule: Schedule,
        limits: Limits,
        automatic: bool = ...,
        report_drafts: bool = ...,
        masks: tuple[Any, Any] | None = ...,
        ngrams: Ngrams | None = ...,
        oracle: Oracle | None = ...,
        trace: bool = ...,
        grammar: int = ...,
        kept: bool = ...,
    ) -> LoopAnswer:
        """Queue an answer.

        automatic: the loop decides on drafts, of the schedule `lookup` and `recycle` count. masks: of its grammar, for
        drafts and for verification.
        grammar: its number, over ranks; 0: it has none. kept: `write_blocks` writes its blocks too.
        MemoryError: the text may become longer than all blocks.
        """

    block_bytes: Final[int]
    def write_blocks(self, file: int, at: int, most: int) -> int:
        """At most so many blocks that texts share, from a place in a file on; how many."""

    def read_blocks(self, file: int, at: int, count: int) -> int:
        """So many of them into what is free; how many are here now: all but damaged ones, and those after such."""

    def end(self) -> None:
        """No thread works on any answer from now on: it would ask a grammar of a Python that has ended."""

    def step(self) -> bool: ...
    @staticmethod
    def of_passes(passes: object, blocks: int, most_answers: int, prompt_rows: int) -> Loop:
        """passes: what `ppsd_rt.reference.passes.TorchPasses` has. Of KV cache it holds at most so many blocks."""

    @staticmethod
    def over_ranks(
        model: Model, cores: Sequence[int], threads: int, stages: int, blocks: int, most_answers: int, prompt_rows: int
    ) -> Loop:
        """Of rank 0, whose model has the layers before the exit; so many blocks every rank has memory for."""

    def work(self, out: npt.NDArray[np.int32], milliseconds: int) -> int:
        """Over ranks: words of a pass that is to leave, once there is one; 0: none so far."""

    def draft_with(self, model: Model) -> bool:
        """Over ranks: with this model's exit head, of the same sizes; False: some answers have not ended."""

    def land(self, verdict: npt.NDArray[np.int32]) -> None:
        """Over ranks: what came back from the last one. From another thread than `work`."""

    def fail(self, line: str) -> None:
        """End all answers with this line; by the thread that calls `work`."""
    capacity: Final[int]
    counts: Final[dict[str, int]]

class Ngrams:
    """What followed 1 to 16 tokens in all texts of an engine, in so many bytes at most: copies come from here."""

    def __init__(self, bytes: int = ..., clock: int = ...) -> None: ...
    def of(self, owner: int | None) -> Ngrams:
        """The same, for texts of this owner, which other owners' never see; None: for one that is found by no other."""

    def know(self, counted: npt.NDArray[np.int32]) -> None:
        """Counted beforehand, for all: (the token before the last, -1 for none; the last; what follows; how often)."""

    def learn(self, tokens: Sequence[int]) -> None:
        """A whole text of an owner, as if it had been read and said here."""

class KernelTime:
    """Of one sweep over all layers: seconds (median, least, most), bytes read, flops."""

    seconds: Final[float]
    least: Final[float]
    most: Final[float]
    bytes: Final[float]
    flops: Final[float]

class Engine:
    """A model with threads and the KV caches of one text: for scores and measurements."""

    def __init__(self, model: Model, threads: int) -> None: ...
    threads: Final[int]
    pin_problem: Final[str]
    def time_kernel(self, name: str, rows: int, context: int, repeats: int) -> KernelTime: ...
    def logits(self, ids: Sequence[int], last: int) -> npt.NDArray[np.float32]: ...
    def logprobs(self, ids: Sequence[int], top: int) -> list[Logprob]: ...

class Stages:
    """The stages of one text with KV caches and threads of their own, for `ppsd_rt.stages.Stages`, which checks every
    argument. A call with `start` voids the rows that are held from there on: rolling back writes a length.
    """

    def __init__(self, model: Model, threads: int, sampling: SamplingParams) -> None: ...
    @staticmethod
    def of_passes(passes: object, sampling: SamplingParams) -> Stages: ...
    def begin(self, answer: int, key: int) -> None: ...  # of a text, at this position; key: of its noise
    def reserve(self, capacity: int) -> None: ...  # those that are held stay
    def draft(self, start: int, ids: Sequence[int], draw: bool) -> tuple[int, float] | None:
        """Rows at positions start.. through the early layers; draw: -> what the exit head says after the last one."""

    def verify(self, start: int, ids: Sequence[int], last: int) -> list[int]:
        """Rows that `draft` ran through the other layers -> the model's own id after each of the `last` ones."""
    def learn(self, position: int) -> None: ...  # feedback heads receive this verified row's last hidden state

class CudaError(RuntimeError):
    """What the CUDA driver said, in one line."""

class CudaDevice:
    """A GPU: its name, and its compute capability (major, minor)."""

    name: Final[str]
    major: Final[int]
    minor: Final[int]

def cuda_device(ordinal: int) -> CudaDevice: ...
def cuda_instantiate(graph: int) -> int: ...
def cuda_destroy_graph(exec: int) -> None: ...

class GraphLanes:
    """A CUDA context and stream for the draft stage (-1), and one for each verification stage."""

    def __init__(self, draft_device: int, verify_devices: Sequence[int]) -> None: ...
    def upload(self, exec: int, stage: int) -> None: ...
    def run(self, stage: int, execs: Sequence[int]) -> list[float]: ...  # -> seconds of each, when all have ended

class GraphCopy:
    """What a stage hands to one on another device: `rows` rows of `row_bytes`, each at its position, between addresses
    of position 0; rows 0: a block of words, copied as it is.
    """

    def __init__(
        self, *, to: int, source: int, to_device: int, source_device: int, row_bytes: int, rows: int
    ) -> None: ...

class Graphs:
    """Captured stages, and what they write: the handles of steps (a draft step's, a row's, whole rounds' by their
    number of drafts, those of the legs of a pass); copies before each leg, rings of records
    [address, records], the address of what the host offers to draft, and the numbers of the last records.
    """

    def __init__(
        self,
        *,
        steps: tuple[int, int, dict[int, int], Sequence[int]],
        copies: Sequence[Sequence[GraphCopy]],
        take_apart: bool,
        verdict_apart: bool,
        verdicts: tuple[int, int],
        drafts: tuple[int, int],
        offer: int,
        sequence: int,
        drawn: int,
        draft_records: bool,
    ) -> None: ...

class GraphSession:
    """An answer by captured CUDA graphs: iterates over the same events as LoopAnswer.

    before: seconds of the answer's work that have passed already.
    """

    def __init__(
        self,
        *,
        lanes: GraphLanes,
        graphs: Graphs,
        prompt: Sequence[int],
        keep: int,
        first: int,
        schedule: Schedule | AlonePolicy,
        limits: Limits,
        seed: int,
        in_turns: bool,
        report_drafts: bool,
        trace: bool,
        before: float,
        ngrams: Ngrams | None,
    ) -> None: ...
    def __iter__(self) -> Iterator[Drafted | Round]: ...
    def __next__(self) -> Drafted | Round: ...
    def cancel(self) -> None: ...  # from any thread: the answer ends soon
    def end(self) -> None: ...  # and returns when it has; what was committed can still be iterated over
    def close(self) -> None: ...
    def spans(self) -> list[tuple[str, int, int, float, float]]: ...

class AlonePolicy:
    """Steers `auto` for one answer after the other, none of which has company, where whole rounds are timed."""

    def __init__(self, prior: float, overlaps: bool) -> None: ...
    def begin(self, asked: Schedule, pool: int) -> None:
        """Before an answer. asked: `lookup` and `recycle` count. pool: 0 greedy, 1 sampled, -1 learned from alone."""

    def explain(self) -> str: ...

WIRE_VERSION: int

def pass_words(hidden: int, taps: int = 0) -> int: ...  # of the longest message; taps: of an EAGLE-3 head
def precise_waits() -> None: ...  # of the calling thread: the system may otherwise wake it 50 us late
def sleep_until(clock: int) -> None: ...
def drafting_block_bytes(model: Model) -> int: ...  # of rank 0's layers and exit head

class Station:
    """Layers [first, last) of a model on the C++ kernels, as a stage of the loop: passes come, arrays of int32 words,
    and work() writes those for the next stage."""

    def __init__(
        self,
        model: Model,
        first: int,
        last: int,
        cores: Sequence[int],
        threads: int,
        kv_bytes: int = 0,
        taps: Sequence[int] = (),
    ) -> None: ...
    blocks: Final[int]
    def pin(self) -> None: ...
    def time_pass(self, rows: int, context: int) -> float: ...
    def post(self, message: npt.NDArray[np.int32]) -> None: ...
    def work(self, out: npt.NDArray[np.int32], milliseconds: int) -> int:
        """Words of the message for the next stage; 0: no pass came."""

    def use_masks(self, masks: Callable[[int], TokenMask | None]) -> None:
        """masks(number): a new mask of that grammar, or None. Before it works."""

    def close(self) -> None: ...
    def busy_seconds(self) -> float: ...
    passes: Final[int]  # that it has worked on to their end
    def spans(self) -> list[tuple[str, int, int, float, float]]: ...  # by its host's clock

testing: ModuleType  # what only tests and benchmarks call, csrc/tests/bindings.cpp
