"""Stages on several devices: what is launched where, and what goes from one device to another.

The answer's words, the text and the verdict stay on the device that drafts, under its locks; a stage elsewhere computes
on copies. So a pass has legs, each a graph of its own:

    take      on the drafting device, if the first verification stage is elsewhere: the rows of the pass
    verify    a stage: layers, and after the last ones the LM head and the choice of tokens
    verdict   on the drafting device, if the last stage is elsewhere

In front of a leg whose rows come from another device stand copies: the mailbox with the pass's words (and choices), the
rows, and the answer's words, so that a pass of an older epoch is dropped early. Nothing else is shared: no device reads
another one's memory, and no lock is taken from afar. With all stages on one device every leg is a stage without copies.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import RLock

import torch
from torch import Tensor

from .. import _native

Window = tuple[int, int]  # the first row, and how many: those of a pass are among them


def on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, torch captures there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


# One thread at a time warms up, captures, or waits for a whole device: a device-wide wait breaks every capture that is
# under way on the device, whichever thread captures, and warming up and capturing wait so themselves.
DEVICE_WIDE = RLock()


def synchronise(devices: Sequence[torch.device]) -> None:
    with DEVICE_WIDE:
        for device in dict.fromkeys(devices):
            if device.type == "cuda":
                torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Copy:
    """rows: `to` and `source` have a row for each position, of which those of a pass are needed; else all is."""

    to: Tensor
    source: Tensor
    to_device: torch.device
    from_device: torch.device
    rows: bool = False

    def run(self, window: Window | None = None) -> None:
        """In the order of the current streams of both devices. window: None: all rows."""
        first, count = window if self.rows and window is not None else (0, len(self.source))
        self.to[first : first + count].copy_(self.source[first : first + count])

    def native(self) -> _native.GraphCopy:
        """What the C++ carrier takes."""
        return _native.GraphCopy(
            to=self.to.data_ptr(),
            source=self.source.data_ptr(),
            to_device=self.to_device.index or 0,
            source_device=self.from_device.index or 0,
            row_bytes=self.source.nbytes // len(self.source) if self.rows else self.source.nbytes,
            rows=len(self.source) if self.rows else 0,
        )


@dataclass(frozen=True)
class Leg:
    """Of a pass. stage: of verification; the verdict's is the number of stages."""

    name: str  # take, verify, verdict
    stage: int
    device: torch.device


def synonyms(devices: Sequence[torch.device]) -> bool:
    """Is it one device, however often it is named?"""
    return len(set(devices)) == 1
