"""A model's stages captured as CUDA graphs, for the carrier in csrc/cuda/carrier.h.

What is captured: a draft step, the early layers alone, and each leg of a pass, which on one device are its
verification stages; once each, right after the stages have been made. On one device also a step of plain decoding as
one graph, and, when a schedule first asks for it, a round with a fixed number of drafts. Kernels are compiled before
that, by one launch: no row is live, or the rows are those of an answer that has ended, whose prompt they leave alone.

What is patched: nothing. Which rows a launch takes and where they stand, seed, temperature, the longest chunk and the
end of the text are words in device memory; so a graph serves every answer, chunk and length.

When it is invalid: as soon as the memory goes that its kernels read and write. The graphs belong to one DeviceStages,
of one capacity, one exit head and one set of cuts; whoever makes another one captures again. They are kept alive here,
with the memory pool that each stage has for itself: graphs that may run at the same time must not share one.

Several devices: each leg of a pass (devices.py) is captured on its own; the copies in front of it are the carrier's.

Priorities: kernels keep the priority of the stream that they were captured on. Verification goes first where both
stages want the same multiprocessors: a token is committed by a verdict, and drafts are only guesses.
"""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from triton.errors import TritonError

from .. import _native
from ..errors import PpsdError
from .devices import DEVICE_WIDE, Window, synchronise
from .stages import DeviceStages

_LOG = logging.getLogger(__name__)

_LOW, _HIGH = 0, -1  # a smaller number is a higher priority

Step = Callable[[], None]


class CaptureFailed(PpsdError):
    """Why the stages could not be captured; they can be launched one kernel after the other."""


class Recorder:
    """Makes graphs of what steps launch, with torch; keeps them."""

    def __init__(self) -> None:
        self._kept: list[tuple[torch.cuda.CUDAGraph, int | None]] = []  # and what the driver has instantiated of it
        self._pools: dict[int, Any] = {}

    def warm_up(self, steps: list[tuple[Step, torch.device]]) -> None:
        """Compile every kernel: nothing may be compiled or allocated while a graph is captured."""
        for step, device in steps:
            with torch.cuda.device(device):
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    step()
                torch.cuda.synchronize()

    def record(self, step: Step, priority: int, stage: int, device: torch.device) -> int:
        """The handle of an executable graph: a CUgraphExec. stage: whose memory pool it takes."""
        with torch.cuda.device(device):
            if stage not in self._pools:
                self._pools[stage] = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            stream = torch.cuda.Stream(priority=priority)
            before = torch.cuda.current_stream()
            try:
                # Other threads may launch and wait for streams meanwhile, but not for a device: see DEVICE_WIDE.
                with torch.cuda.graph(graph, pool=self._pools[stage], stream=stream, capture_error_mode="thread_local"):
                    step()
            finally:
                torch.cuda.set_stream(before)  # torch leaves its own behind where a capture fails
            if hasattr(graph, "raw_cuda_graph_exec"):  # torch 2.8 has not
                graph.instantiate()
                self._kept.append((graph, None))
                exec = int(graph.raw_cuda_graph_exec())
            else:
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
        self._recorder, self._stages = recorder, stages
        with _capturing(recorder):
            self.lanes = _native.GraphLanes(stages.home.index or 0, [leg.device.index or 0 for leg in stages.legs])
            # A draft step (without a head it is a row's) and a row; the legs of a pass; whole rounds by their drafts.
            self.draft, self.row, self.verify = self._capture()
        self.rounds: dict[int, int] = {}
        self.prepare_round(0)

    def close(self) -> None:
        self._recorder.close()

    def _capture(self) -> tuple[int, int, list[int]]:
        stages, recorder = self._stages, self._recorder
        early = [stages.early_step, *([stages.draft_step] if stages.weights.head is not None else [])]
        legs = [(partial(stages.launch, number), leg.device) for number, leg in enumerate(stages.legs)]
        recorder.warm_up([*((step, stages.home) for step in early), *legs])
        handles = [recorder.record(step, _LOW, -1, stages.home) for step in early]
        verify = [recorder.record(step, _HIGH, number, device) for number, (step, device) in enumerate(legs)]
        for exec in handles:
            self.lanes.upload(exec, -1)
        for number, exec in enumerate(verify):
            self.lanes.upload(exec, number)
        return handles[-1], handles[0], verify

    def prepare_round(self, drafts: int) -> None:
        """Capture rounds of so many drafts as one graph, on one device. Raises CaptureFailed: then no graph is left."""
        if self.apart or drafts in self.rounds:
            return
        step = partial(self._stages.round, drafts)
        with _capturing(self._recorder):
            self.rounds[drafts] = self._recorder.record(step, _HIGH, 0, self._stages.home)
            self.lanes.upload(self.rounds[drafts], 0)

    def plain_step(self, window: Window) -> None:
        """A step of plain decoding, and its end."""
        if self.apart:
            self.lanes.timeline([(-1, self.row)])
            for number, leg in enumerate(self.verify):
                self._stages.bring(number, window)
                synchronise(self._stages.devices)
                self.lanes.timeline([(number, leg)])
        else:
            self.lanes.timeline([(0, self.rounds[0])])

    @property
    def apart(self) -> bool:
        """Are there several devices?"""
        return len(self._stages.devices) > 1

    def native(self, *, draft_records: bool, sequence: int, drawn: int) -> _native.Graphs:
        """What _native.GraphSession takes. sequence, drawn: the numbers of the last records."""
        stages = self._stages
        return _native.Graphs(
            steps=(self.draft, self.row, self.rounds, self.verify),
            copies=[[copy.native() for copy in stages.copies(number)] for number in range(len(stages.legs))],
            take_apart=stages.legs[0].name == "take",
            verdict_apart=stages.legs[-1].name == "verdict",
            verdicts=(stages.buffers.ring.data_ptr(), len(stages.buffers.ring)),
            drafts=(stages.buffers.drafts.data_ptr(), len(stages.buffers.drafts)),
            offer=stages.buffers.offer.data_ptr(),
            sequence=sequence,
            drawn=drawn,
            draft_records=draft_records,
        )


class StepGraphs:
    """Steps, each captured when it is first launched, and the stream that they are launched on."""

    def __init__(self, device: torch.device, recorder: Recorder) -> None:
        self._device, self._recorder, self._fails = device, recorder, False
        self._lanes = _native.GraphLanes(device.index or 0, [])
        self._handles: dict[tuple[str, int], int] = {}

    def launch(self, key: tuple[str, int], step: Step) -> None:
        """After all that torch has begun on the device; returns when it has ended."""
        if key not in self._handles and not self._fails:
            try:
                with _capturing(self._recorder):
                    self._recorder.warm_up([(step, self._device)])
                    self._handles[key] = self._recorder.record(step, _HIGH, -1, self._device)
                    self._lanes.upload(self._handles[key], -1)
            except CaptureFailed as error:
                self._fails, self._handles = True, {}
                _LOG.warning("ppsd-rt: passes over several texts cannot be captured (%s): kernels go one by one", error)
        if self._fails:
            step()
            return
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._lanes.timeline([(-1, self._handles[key])])

    def forget(self) -> None:
        """The memory of their kernels is elsewhere now."""
        self._recorder.close()
        self._handles = {}


@contextmanager
def _capturing(recorder: Recorder) -> Iterator[None]:
    # Memory and graphs of an engine that is gone may be freed by the collector at any allocation: the driver forbids
    # that to a thread that captures, and the capture fails.
    collecting = gc.isenabled()
    gc.disable()
    try:
        with DEVICE_WIDE:
            yield
    except (RuntimeError, TritonError) as error:  # of torch (its out-of-memory error too), the driver; the compiler
        recorder.close()
        raise CaptureFailed(str(error).strip().splitlines()[0]) from None
    finally:
        if collecting:
            gc.enable()
