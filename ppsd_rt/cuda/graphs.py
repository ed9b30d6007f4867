"""A model's stages captured as CUDA graphs, for the carrier in csrc/cuda/carrier.h.

What is captured: a draft step, the early layers alone, and each verification stage, once each, right after the stages
have been made. Kernels are compiled before that, by one launch in which no row is live.

What is patched: nothing. Which rows a launch takes and where they stand, seed, temperature, filters, the longest chunk
and the end of the text are words in device memory; so a graph serves every answer, chunk and length.

When it is invalid: as soon as the memory goes that its kernels read and write. The graphs belong to one DeviceStages,
of one capacity, one exit head and one set of cuts; whoever makes another one captures again. They are kept alive here,
with the memory pool that each stage has for itself: graphs that may run at the same time must not share one.

Priorities: kernels keep the priority of the stream that they were captured on. Verification goes first where both
stages want the same multiprocessors: a token is committed by a verdict, and drafts are only guesses.
"""

from collections.abc import Callable
from typing import Any

import torch

from .. import _native
from ..errors import PpsdError
from .stages import DeviceStages

_LOW, _HIGH = 0, -1  # a smaller number is a higher priority

Step = Callable[[], None]


class CaptureFailed(PpsdError):
    """Why the stages could not be captured; they can be launched one kernel after the other."""


class Recorder:
    """Makes graphs of what steps launch, with torch; keeps them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: list[tuple[torch.cuda.CUDAGraph, int | None]] = []  # and what the driver has instantiated of it
        self._pools: dict[int, Any] = {}

    def warm_up(self, steps: list[Step]) -> None:
        """Compile every kernel: nothing may be compiled or allocated while a graph is captured."""
        with torch.cuda.device(self.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for step in steps:
                    step()
            torch.cuda.synchronize()

    def record(self, step: Step, priority: int, stage: int) -> int:
        """The handle of an executable graph: a CUgraphExec."""
        with torch.cuda.device(self.device):
            if stage not in self._pools:
                self._pools[stage] = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            stream = torch.cuda.Stream(priority=priority)
            # Other threads may go on using CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self._pools[stage], stream=stream, capture_error_mode="thread_local"):
                step()
            if hasattr(graph, "raw_cuda_graph_exec"):  # torch 2.8 has not
                graph.instantiate()
                self._kept.append((graph, None))
                return int(graph.raw_cuda_graph_exec())
            exec = _native.cuda_instantiate(int(graph.raw_cuda_graph()))
            self._kept.append((graph, exec))
            return exec

    def close(self) -> None:
        for _, exec in self._kept:
            if exec is not None:
                _native.cuda_destroy_graph(exec)
        self._kept.clear()


class StageGraphs:
    """Handles of the graphs of one DeviceStages, and the streams that they are launched on."""

    def __init__(self, stages: DeviceStages, recorder: Recorder) -> None:
        """Raises CaptureFailed."""
        self._recorder = recorder
        early = [stages.early_step, *([stages.draft_step] if stages.weights.head is not None else [])]
        passes = [_stage(stages, number) for number in range(len(stages.slices))]
        try:
            recorder.warm_up([*early, *passes])
            handles = [recorder.record(step, _LOW, -1) for step in early]
            self.verify = [recorder.record(step, _HIGH, number) for number, step in enumerate(passes)]
            self.row, self.draft = handles[0], handles[-1]  # without a head a draft step is a row's
            ordinal = recorder.device.index or 0
            self.lanes = _native.GraphLanes(ordinal, [ordinal] * len(passes))
            for exec in handles:
                self.lanes.upload(exec, -1)
            for number, exec in enumerate(self.verify):
                self.lanes.upload(exec, number)
        except RuntimeError as error:  # of torch (its out-of-memory error too), Triton and the driver
            recorder.close()
            raise CaptureFailed(str(error).strip().splitlines()[0]) from None

    def close(self) -> None:
        self._recorder.close()

    def plain_step(self) -> None:
        """A step of plain decoding, and its end."""
        self.lanes.timeline([(0, self.row), *((0, exec) for exec in self.verify)])

    def as_dict(self, stages: DeviceStages, *, draft_records: bool, sequence: int, drawn: int) -> dict[str, Any]:
        """What _native.GraphSession takes. sequence, drawn: the numbers of the last records."""
        return {
            "draft": self.draft,
            "row": self.row,
            "verify": self.verify,
            "copies": [[] for _ in self.verify],  # all stages are on one device
            "ring": (stages.ring.data_ptr(), len(stages.ring)),
            "drafts": (stages.drafts.data_ptr(), len(stages.drafts)),
            "sequence": sequence,
            "drawn": drawn,
            "draft_records": draft_records,
        }


def _stage(stages: DeviceStages, number: int) -> Step:
    return lambda: stages.verification(number)
