"""Steps captured as CUDA graphs: a model's stages, for the carrier in csrc/cuda/carrier.h, and those of passes.py.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
Key = tuple[str, int]


class CaptureFailed(PpsdError):
    """Why steps could not be captured; they can be launched one kernel after the other."""


class Graphs:
    """What steps launch, captured with torch, and the streams that it is launched on. It keeps the graphs."""

    def __init__(self, home: torch.device, legs: Sequence[torch.device] = ()) -> None:
        """home: of lane -1, where draft steps are launched if there are legs; these are lanes 0, 1, ..."""
        self.lanes = _native.GraphLanes(home.index or 0, [device.index or 0 for device in legs])
        self.handles: dict[Key, int] = {}  # of executable graphs: each a CUgraphExec
        self._devices = [*legs, home]  # by lane
        self._kept: list[tuple[torch.cuda.CUDAGraph, int | None]] = []  # and what the driver has instantiated of it
        self._pools: dict[int, Any] = {}  # of memory, by lane
        self._fails = False

    def capture(self, steps: Mapping[Key, tuple[Step, int]], *, compiled: bool = False) -> None:
        """Steps and their lanes. compiled: have all their kernels run? Raises CaptureFailed: then no graph is left."""
        with self._capturing():
            if not compiled:
                for step, lane in steps.values():
                    self.warm_up(step, self._devices[lane])
            for key, (step, lane) in steps.items():
                self.handles[key] = self.record(step, lane, self._devices[lane])
                self.lanes.upload(self.handles[key], lane)

    def launch(self, key: Key, step: Step) -> None:
        """On lane -1, after all that torch has begun on the device, captured if it has not been; returns when it has
        ended."""
        if key not in self.handles and not self._fails:
            try:
                self.capture({key: (step, -1)})
            except CaptureFailed as error:
                self._fails = True
                _LOG.warning("ppsd-rt: passes over several texts cannot be captured (%s): kernels go one by one", error)
        if self._fails:
            step()
            return
        if (device := self._devices[-1]).type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        self.lanes.run(-1, [self.handles[key]])

    def close(self) -> None:
        """The memory of their kernels goes, or is elsewhere now."""
        for _, exec in self._kept:
            if exec is not None:
                _native.cuda_destroy_graph(exec)
        self._kept.clear()
        self.handles.clear()

    def warm_up(self, step: Step, device: torch.device) -> None:
        """Compile every kernel: nothing may be compiled or allocated while a graph is captured."""
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step()
            torch.cuda.synchronize()

    def record(self, step: Step, lane: int, device: torch.device) -> int:
        """The handle of an executable graph."""
        with torch.cuda.device(device):
            if lane not in self._pools:
                self._pools[lane] = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            stream = torch.cuda.Stream(priority=_LOW if lane < 0 and len(self._devices) > 1 else _HIGH)
            before = torch.cuda.current_stream()
            try:
                # Other threads may launch and wait for streams meanwhile, but not for a device: see DEVICE_WIDE.
                with torch.cuda.graph(graph, pool=self._pools[lane], stream=stream, capture_error_mode="thread_local"):
                    step()
            finally:
                torch.cuda.set_stream(before)  # torch leaves its own behind where a capture fails
            if hasattr(graph, "raw_cuda_graph_exec"):  # torch 2.8 has not
                graph.instantiate()
                self._kept.append((graph, None))
                return int(graph.raw_cuda_graph_exec())
            exec = _native.cuda_instantiate(int(graph.raw_cuda_graph()))
            self._kept.append((graph, exec))
            return exec

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        # Memory and graphs of an engine that is gone may be freed by the collector at any allocation: the driver
        # forbids that to a thread that captures, and the capture fails.
        collecting = gc.isenabled()
        gc.disable()
        try:
            with DEVICE_WIDE:
                yield
        except (RuntimeError, TritonError) as error:  # of torch (its out-of-memory error too), the driver; the compiler
            self.close()
            raise CaptureFailed(str(error).strip().splitlines()[0]) from None
        finally:
            if collecting:
                gc.enable()


class StageGraphs(Graphs):
    """Those of one DeviceStages."""

    def __init__(self, stages: DeviceStages) -> None:
        """Raises CaptureFailed."""
        super().__init__(stages.home, [leg.device for leg in stages.legs])
        self._stages, self.apart = stages, len(stages.devices) > 1  # are there several devices?
        legs = {("verify", leg): (partial(stages.launch, leg), leg) for leg in range(len(stages.legs))}
        drafts = {("draft", 0): (stages.draft_step, -1)} if stages.weights.head is not None else {}
        self.capture({("row", 0): (stages.early_step, -1), **drafts, **legs})
        self.row, self.verify = self.handles["row", 0], [self.handles[leg] for leg in legs]
        self.draft = self.handles.get(("draft", 0), self.row)  # without a head it is a row's
        self.rounds: dict[int, int] = {}  # by their drafts
        self.prepare_round(0)

    def prepare_round(self, drafts: int) -> None:
        """Capture rounds of so many drafts as one graph, on one device. Raises CaptureFailed."""
        if not self.apart and drafts not in self.rounds:
            self.capture({("round", drafts): (partial(self._stages.round, drafts), 0)}, compiled=True)
            self.rounds[drafts] = self.handles["round", drafts]

    def plain_step(self, window: Window) -> None:
        """A step of plain decoding, and its end."""
        if self.apart:
            self.lanes.run(-1, [self.row])
            for number, leg in enumerate(self.verify):
                self._stages.bring(number, window)
                synchronise(self._stages.devices)
                self.lanes.run(number, [leg])
        else:
            self.lanes.run(0, [self.rounds[0]])

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
