"""CUDA stages over ranks: what a rank holds when it runs `--backend cuda`, fused kernels captured on a GPU of its own.

The stages are those of ppsd_rt/cuda/parts.py.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..cuda import errors
from ..cuda.graphs import Recorder
from ..cuda.parts import DraftPart, How, Part, VerifyPart
from ..cuda.weights import FORMATS, DeviceWeights, weight_bytes
from ..errors import UsageError
from ..models.checkpoint import Checkpoint
from ..models.head_file import HeadFile
from .python_stages import TEXT_BLOCKS, PythonDrafter, PythonStation


class CudaSlices:
    """On the GPU that has this rank's number among the host's ranks; in Triton's interpreter on a CPU."""

    siblings, extras, blocks, answers = False, False, TEXT_BLOCKS, 1

    def __init__(self, device: str, dtype: str, local_rank: int) -> None:
        """Raises PpsdError where there is no such GPU."""
        count = torch.cuda.device_count()
        if device in ("auto", "cuda") and count:
            device = f"cuda:{local_rank % count}"
        self._device = errors.pick_device(device)
        on_gpu = self._device.type == "cuda"
        self._dtype = ("bfloat16" if on_gpu else "float32") if dtype == "auto" else dtype
        if self._dtype not in FORMATS:
            raise UsageError(f"dtype {dtype!r} is unknown to the cuda backend; dtypes are auto, {', '.join(FORMATS)}")
        errors.check_format(self._dtype, [self._device])
        eager = not on_gpu or errors.switch("PPSD_CUDA_EAGER")
        self._how = How(errors.launches_dependently([self._device]), None if eager else Recorder)
        self._made: Part | None = None
        self.bytes = 0

    @property
    def dtype(self) -> str:
        return self._dtype

    @property
    def kind(self) -> str:
        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "interpreter"

    def drafter(self, checkpoint: Checkpoint, head: HeadFile | None, size: int) -> PythonDrafter:
        weights = self._part(checkpoint, (0, size), embeds=True, chooses=head is not None)
        if head is not None:
            weights = weights.with_head(head)
            if head.draft_ids is not None:
                weights = weights.without_lm_head()
        config, own = weights.config, weights.head
        self.bytes = weights.bytes
        if own is not None:
            self.bytes += sum(layer.bytes for layer in own.layers) + weight_bytes(own.feedback)
            self.bytes += weight_bytes(own.lm_head) if own.draft_ids is not None else 0
        part = self._made = DraftPart(weights, self._how)
        drafter = PythonDrafter(part, config.hidden_size, config.vocab_size, own is not None, weights.hears)
        self.loop = drafter.loop
        return drafter

    def station(
        self, checkpoint: Checkpoint, first: int, last: int, delay: float, taps: Sequence[int] = ()
    ) -> PythonStation:
        chooses = last == checkpoint.config.num_hidden_layers
        weights = self._part(checkpoint, (first, last), embeds=False, chooses=chooses)
        self.bytes = weights.bytes
        part = self._made = VerifyPart(weights, chooses, self._how)
        return PythonStation(part, weights.config.hidden_size, chooses, delay)

    def facts(self) -> dict[str, Any]:
        how = self._made.how if self._made else self._how  # a part that cannot be captured has changed its own
        launches = "one by one" if how.recorder is None else "captured"
        return {"device": str(self._device), "launches": launches, "dependent_launches": how.pdl}

    def _part(self, checkpoint: Checkpoint, layers: tuple[int, int], *, embeds: bool, chooses: bool) -> DeviceWeights:
        config, count = checkpoint.config, layers[1] - layers[0]
        needed = errors.part_bytes(config, self._dtype, count, first=embeds, last=chooses)
        what = f"{count} layers as {self._dtype}"
        errors.check_free(what, needed, self._device, f"change --stages, or {errors.smaller(self._dtype)}")
        with errors.OutOfMemory(what, {self._device: needed}, errors.smaller(self._dtype)):
            return DeviceWeights.part(checkpoint, self._dtype, self._device, layers, embeds=embeds, chooses=chooses)
