"""The Triton kernels on a GPU: each over all layers of a model, captured, with a cold cache; and what torch takes.

Also whole passes: `pass` (all layers and the LM head over so many rows), `draft_step` and `plain_step` as decoding
launches them. The share is of the bandwidth of a large copy in the same run.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cuda.buffers import rotations_of
from ..cuda.launches import decoder_layer
from ..cuda.stages import DeviceStages
from ..cuda.weights import QUANTISED, DeviceWeights, weight_bytes
from ..errors import UsageError
from ..sampling.params import SamplingParams
from ..triton_kernels.attention import attention
from ..triton_kernels.heads import heads
from ..triton_kernels.linear import Weight, linear
from ..triton_kernels.qkv import qkv
from ..triton_kernels.state import KNOWN, ROWS, START, WORDS
from ..triton_kernels.swiglu import swiglu
from .report import Report, columns, medians
from .spread import Spread, take_turns

KERNELS = (
    "qkv", "attention", "output", "gate_up", "down", "lm_head", "exit_head", "pass", "draft_step", "plain_step"
)  # fmt: skip

FLUSHED = 512 * 2**20  # bytes: several times the largest L2
COPIED = 2 * 2**30

Work = Callable[[], object]

COLUMNS = columns(
    kernel="kernel", dtype="dtype", rows="rows", context="context", microseconds="us|1", gigabytes_per_second="GB/s|0",
    bandwidth_share="of copy|0%", torch_graph_microseconds="torch graph us|1",
    torch_eager_microseconds="torch eager us|1", ratio="x torch graph|2"
)  # fmt: skip


class DeviceClock:
    """CUDA events around a captured sweep, with a cold cache; on a CPU (the interpreter's tests) the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self._waste = torch.empty(FLUSHED if self.on_gpu else 1, dtype=torch.int8, device=device)

    def capture(self, work: Work) -> Work:
        """What launches `work` at once. Runs it some times before, so that all is compiled."""
        if not self.on_gpu:
            return work
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def seconds(self, work: Work, before: Work = lambda: None) -> float:
        """Of one run, after `before` and with a cold cache; what `before` does is not measured."""
        before()
        if not self.on_gpu:
            begun = perf_counter()
            work()
            return perf_counter() - begun
        self._waste.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def copy_bandwidth(self) -> float:
        """Bytes a second, read and written, of a large copy: what the memory gives at most."""
        count = COPIED if self.on_gpu else 2**20
        source, target = torch.ones(2, count, dtype=torch.int8, device=self.device).unbind()
        return 2 * count / min(self.seconds(lambda: target.copy_(source)) for _ in range(5))

    def facts(self) -> dict[str, Any]:
        if not self.on_gpu:
            return {"gpu": "none: Triton's interpreter"}
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "gpu": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        }


@dataclass
class Case:
    """`launch` does `count` of the kernel's work; figures are of one."""

    kernel: str
    rows: int
    bytes: int
    count: int
    launch: Work
    before: Work = lambda: None
    theirs: tuple[Work, Work] | None = None  # the same work by torch: captured, and launched eagerly
    seconds: list[float] = field(default_factory=list)
    graph_seconds: list[float] = field(default_factory=list)
    eager_seconds: list[float] = field(default_factory=list)


class DeviceBench:
    """Cases over one set of weights, with `context` rows in the KV cache."""

    def __init__(self, weights: DeviceWeights, context: int, clock: DeviceClock, *, pdl: bool) -> None:
        self.weights, self.context, self.clock = weights, context, clock
        self.stages = DeviceStages(weights, context + 64, pdl=pdl)
        generator = torch.Generator(weights.device).manual_seed(1)
        b = self.stages.buffers
        for cache in b.cache:
            cache.normal_(generator=generator)
        self.prompt = [1 + i % 97 for i in range(context)]
        b.exit_hidden.normal_(generator=generator)

    def cases(self, kernels: Sequence[str], rows: Sequence[int]) -> Iterator[Case]:
        for name in kernels:
            if name not in KERNELS:
                raise UsageError(f"kernel {name!r} is unknown; kernels are {', '.join(KERNELS)}")
            if name in ("exit_head", "draft_step") and self.weights.head is None:
                continue
            for count in (1,) if name in ("draft_step", "plain_step") else rows:
                yield self._case(name, count)

    def _case(self, name: str, rows: int) -> Case:
        clock, weights = self.clock, self.weights
        if name in ("draft_step", "plain_step"):
            return self._step(name)
        words = torch.zeros(WORDS, dtype=torch.int32, device=weights.device)
        words[ROWS], words[START], words[KNOWN] = rows, self.context - rows, self.context - rows
        work, bytes, count, theirs = self._kernel(name, words, rows)
        beside = None if theirs is None or weights.format in QUANTISED else (clock.capture(theirs), theirs)
        return Case(name, rows, bytes, count, clock.capture(work), theirs=beside)

    def _step(self, name: str) -> Case:
        """As decoding launches it, always at the same place: the words are put back before each run."""
        stages, weights = self.stages, self.weights
        stages.prompt_rows = self.context - 1  # as if a prompt pass had made what stands in the cache
        stages.begin(self.prompt, SamplingParams(), self.context, most=15, lookahead=15)
        b = stages.buffers
        kept = [(words, words.clone()) for words in (b.state, b.early, b.head, b.late)]

        def before() -> None:
            for words, values in kept:
                words.copy_(values)

        drafting = name == "draft_step"
        launch = self.clock.capture(stages.draft_step if drafting else stages.plain_step)
        bytes = weights.draft_bytes if drafting else weights.bytes
        layers = weights.exit_layer + len(weights.head.layers) if drafting and weights.head else len(weights.layers)
        return Case(name, 1, bytes + layers * self._cache_bytes(), 1, launch, before)

    def _cache_bytes(self) -> int:
        """Of one layer."""
        config = self.weights.config
        return 2 * self.context * config.num_key_value_heads * config.head_dim * self.weights.dtype.itemsize

    def _kernel(self, name: str, words: Tensor, rows: int) -> tuple[Work, int, int, Work | None]:
        """Its work over all layers, the bytes of one layer, how many layers, and torch's work."""
        stages, weights, layers, pdl = self.stages, self.weights, self.weights.layers, self.stages.pdl
        if name == "attention":
            return self._attention(words, rows)
        if name == "pass":
            return self._pass(words)
        b, work, draft, head = stages.buffers, stages._late[0], stages._draft, weights.head

        def one_qkv(matrix: Weight, number: int) -> None:
            layer = layers[number]
            qkv(
                work.x, layer.norm, 1e-5, matrix, layer.qkv_bias, rotations_of(layer, b), work.queries,
                b.cache[number], words, kv=layer.kv, norms=layer.norms, pdl=pdl,
            )  # fmt: skip

        def added(x: Tensor) -> Callable[[Weight, int], None]:
            return lambda matrix, _: linear(x, matrix, work.x, words, residual=work.x, partial=work.sums, pdl=pdl)

        def one_gate_up(matrix: Weight, number: int) -> None:
            norm = layers[number].post_norm
            assert norm is not None
            swiglu(work.x, norm, 1e-5, matrix, work.inner, words, pdl=pdl)

        def exit_head(matrix: Weight, _: int) -> None:
            assert head is not None
            assert draft.scratch is not None
            heads(
                draft.x, head.norm, 1e-5, matrix, b.sampling, draft.scratch, draft.choices, draft.chances, words,
                draft_ids=head.draft_ids, pdl=pdl,
            )  # fmt: skip

        launches: dict[str, tuple[list[Weight], Callable[[Weight, int], None]]] = {
            "qkv": ([layer.qkv for layer in layers], one_qkv),
            "output": ([layer.out for layer in layers], added(work.mixed)),
            "gate_up": ([layer.gate_up for layer in layers if layer.gate_up], one_gate_up),
            "down": ([layer.down for layer in layers if layer.down], added(work.inner)),
            "lm_head": ([weights.lm_head], lambda *_: stages._lm_head(words, None)),
            "exit_head": ([head.lm_head] if head else [], exit_head),
        }
        matrices, launch = launches[name]
        x = torch.randn(rows, matrices[0].inputs, device=weights.device).to(weights.dtype)

        def ours() -> None:
            for number, matrix in enumerate(matrices):
                launch(matrix, number)

        def theirs() -> None:
            for matrix in matrices:
                F.linear(x, matrix.values)

        bytes = weight_bytes(matrices[0]) + (weight_bytes(layers[0].kv) if name == "qkv" else 0)
        return ours, bytes, len(matrices), theirs

    def _attention(self, words: Tensor, rows: int) -> tuple[Work, int, int, Work]:
        b, stages, count = self.stages.buffers, self.stages, len(self.weights.layers)
        work, context = stages._late[0], self.context

        def ours() -> None:
            for layer, cache in zip(self.weights.layers, b.cache[:count], strict=True):
                out, window = work.mixed.view_as(work.queries), layer.attention.window
                attention(work.queries, cache, work.partials, out, words, window=window, pdl=stages.pdl)

        q = torch.randn(1, work.queries.shape[1], rows, work.queries.shape[2], device=self.weights.device)
        q = q.to(self.weights.dtype)
        mask = torch.ones(rows, context, dtype=torch.bool, device=q.device).tril(context - rows)

        together = [cache.transpose(0, 1).flatten(1, 2)[None, :, :context] for cache in b.cache[:count]]

        def theirs() -> None:
            for k, v in (cache.chunk(2, 1) for cache in together):
                F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

        return ours, self._cache_bytes(), count, theirs

    def _pass(self, words: Tensor) -> tuple[Work, int, int, None]:
        """All layers and the LM head; the embedding's rows stand there already."""
        stages, weights = self.stages, self.weights

        def ours() -> None:
            b, work, x = stages.buffers, stages._late[-1], stages.buffers.exit_hidden
            for number, layer in enumerate(weights.layers):
                x = decoder_layer(weights, layer, number, x, work.x, words, work, b, pdl=stages.pdl)
            assert b.sampling is not None
            stages._lm_head(words, None)

        return ours, weights.bytes + len(weights.layers) * self._cache_bytes(), 1, None


def measure_device_kernels(
    weights: DeviceWeights,
    kernels: Sequence[str],
    rows: Sequence[int],
    context: int,
    repeats: int,
    facts: dict[str, Any],
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Report, bool]:
    """The report, and whether it is whole (Ctrl-C ends the run, not the report)."""
    clock = DeviceClock(weights.device)
    pdl = clock.on_gpu and torch.cuda.get_device_capability(weights.device) >= (9, 0)
    cases = list(DeviceBench(weights, context, clock, pdl=pdl).cases(kernels or KERNELS, rows))
    copy: list[float] = []

    def measure(case: Case | None) -> None:
        if case is None:
            copy.append(clock.copy_bandwidth())
            return
        case.seconds.append(clock.seconds(case.launch, case.before) / case.count)
        if case.theirs is not None:
            captured, eager = case.theirs
            case.graph_seconds.append(clock.seconds(captured) / case.count)
            case.eager_seconds.append(clock.seconds(eager) / case.count)

    whole = take_turns([None, *cases], repeats, measure, advance)
    rows_of = [_row(case, context, weights, Spread(tuple(copy))) for case in cases if case.seconds]
    summary = {
        "copy_gigabytes_per_second": Spread(tuple(copy)).median / 1e9 if copy else None,
        "dependent_launches": pdl,
        "repeats": repeats,
        "interrupted": not whole,
        "results": [medians(row) for row in rows_of],
    }
    return Report("kernels on the device", COLUMNS, rows_of, {**facts, **clock.facts()}, summary), whole


def _row(case: Case, context: int, weights: DeviceWeights, copy: Spread) -> dict[str, Any]:
    seconds = Spread(tuple(case.seconds))
    rate = case.bytes / seconds.median
    row: dict[str, Any] = {
        "kernel": case.kernel,
        "dtype": weights.format,
        "rows": case.rows,
        "context": context,
        "microseconds": seconds.map(lambda s: 1e6 * s),
        "bytes": case.bytes,
        "count": case.count,
        "gigabytes_per_second": rate / 1e9,
        "bandwidth_share": rate / copy.median,
    }
    if case.graph_seconds:
        graph = Spread(tuple(case.graph_seconds))
        row["torch_graph_microseconds"] = graph.map(lambda s: 1e6 * s)
        row["torch_eager_microseconds"] = Spread(tuple(case.eager_seconds)).map(lambda s: 1e6 * s)
        row["ratio"] = graph.over(seconds)
    return row
