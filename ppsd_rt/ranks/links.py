"""Messages between two ranks over torch.distributed: int32 words from pooled buffers, receives posted in advance.

A message is a row of an int32 array (csrc/stages/pass.h) or its beginning: only the words that are in use travel.
gloo takes a message that is shorter than the buffer that waits for it (tests/ppsd_rt/ranks/test_links.py).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Lock, Thread
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]

PASSES, VERDICTS, CONTROL = 1, 2, 3  # tags
_FOREVER = timedelta(days=365)  # silence is watched for elsewhere: a user may think for an hour between two prompts


def open_groups(store: Any, rank: int, size: int, address: str | None, limit: timedelta) -> dict[int, Any]:
    """A gloo process group of all ranks for each tag. address: to listen on; None: gloo's choice. limit: to connect in.

    gloo's thread tries, again and again, for a connection's lock; where a thread that sends loses its core while it
    holds that lock, nothing else passes. So what is sent and what comes in share as few connections as can be: with
    one connection for all, one message in ten waited for 10 ms and more where computing kept all cores busy.
    """
    import torch
    from torch.distributed import PrefixStore, ProcessGroupGloo

    torch.set_num_threads(1)  # torch computes nothing here

    def group(tag: int) -> Any:
        prefixed = PrefixStore(f"tag {tag}", store)
        if address is None:
            return ProcessGroupGloo(prefixed, rank, size, limit)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # which its stub leaves out
        options._devices, options._timeout = [ProcessGroupGloo.create_device(hostname=address)], limit
        return ProcessGroupGloo(prefixed, rank, size, options)

    return {tag: group(tag) for tag in (CONTROL, PASSES, VERDICTS)}


class ProtocolError(Exception):
    """A message came that means nothing here, or could not be dealt with."""


class LinkLost(RuntimeError):
    """gloo cannot send to a rank any more. code: as of PpsdError, for programs."""

    code = "link_lost"


@contextmanager
def _told_apart() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gloo has no kind of its own
        raise LinkLost(str(error)) from error


class Sender:
    """Sends to one rank, with one tag, from as many buffers as messages may be on their way."""

    def __init__(self, group: Any, peer: int, tag: int, words: int, count: int = 8) -> None:
        import torch

        self._group, self._peer, self._tag = group, peer, tag
        # Not numpy's, whose pages are huge: the first messages would each wait until 2 MiB have been cleared.
        self._tensors = torch.empty((count, words), dtype=torch.int32)
        self._buffers: Words = self._tensors.numpy()
        self._pending: list[Any] = [None] * count
        self._next = 0
        self.lock = Lock()  # for those who share it: from `buffer` to `send`, and beside `flush`

    def buffer(self) -> Words:
        """The next one, free to be written: what was sent from it before has left."""
        with _told_apart():
            if self._pending[self._next] is not None:
                self._pending[self._next].wait(_FOREVER)
        self._pending[self._next] = None
        return self._buffers[self._next]

    def flush(self, seconds: float) -> None:
        """All has left this process, or so many seconds have passed."""
        for work in filter(None, self._pending):
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=seconds))

    def send(self, words: int) -> None:
        """The beginning, of so many words, of the buffer that buffer() gave."""
        self._send(self._tensors[self._next, :words])

    def send_long(self, words: Words) -> None:
        """A message for which no buffer is long enough; after `buffer`, too. Its array is not to change any more."""
        import torch

        self._send(torch.from_numpy(words))

    def _send(self, message: Any) -> None:
        with _told_apart():
            self._pending[self._next] = self._group.send([message], self._peer, self._tag)
        self._next = (self._next + 1) % len(self._pending)


class Receiver(Thread):
    """A thread that hands every message from one rank to `handle`, in order; `lost` hears why it ends. delay: seconds
    that a message (csrc/stages/pass.h) is taken to have been longer on its way."""

    def __init__(
        self,
        group: Any,
        peer: int,
        tag: int,
        words: int,
        depth: int,
        handle: Callable[[Words], None],
        lost: Callable[[int, Exception], None],
        delay: float = 0.0,
    ) -> None:
        super().__init__(name=f"from-rank-{peer}-{tag}", daemon=True)
        import torch

        self._group, self._peer, self._tag, self._lost = group, peer, tag, lost
        self._handler, self._late = handle, int(1e9 * delay)  # Thread itself has a `_handle`
        self._tensors = torch.empty((depth, words), dtype=torch.int32)  # as of Sender
        self._buffers: Words = self._tensors.numpy()
        self._works = [self._receive(place) for place in range(depth)]

    def _receive(self, place: int) -> Any:
        return self._group.recv([self._tensors[place]], self._peer, self._tag)

    def run(self) -> None:
        from .. import _native

        _native.precise_waits()
        try:
            while True:
                for place in range(len(self._works)):
                    self._works[place].wait(_FOREVER)
                    if self._late:
                        _native.sleep_until(int(self._buffers[place][8:10].view(np.int64)[0]) + self._late)
                    self._take(self._buffers[place])
                    self._works[place] = self._receive(place)
        except Exception as error:
            self._lost(self._peer, error)

    def _take(self, words: Words) -> None:
        try:
            self._handler(words)
        except Exception as error:
            raise ProtocolError(str(error) or type(error).__name__) from error
