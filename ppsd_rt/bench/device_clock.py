"""Time on a GPU: CUDA events around a captured sweep, with a cache that holds nothing of it."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

FLUSHED = 512 * 2**20  # bytes: several times the largest L2
COPIED = 2 * 2**30

Work = Callable[[], object]


class DeviceClock:
    """On a CPU (the interpreter's tests) the same calls, by the host's clock and without a graph."""

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
