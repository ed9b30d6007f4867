"""Some layers of a model on one device, for a process that has no others: what a rank runs.

    DraftPart     the embedding, layers [0, E), an exit head or none
    VerifyPart    layers [first, last), and after the last of all the LM head

The kernels are those of stages.py, and so are the bits: a prompt's rows but the last take a prompt pass, all others the
captured launches, sixteen at a time. What differs is who says which rows: texts, epochs and verdicts are the
scheduler's on the host (csrc/pipeline/), whose rows come from other processes and go there. So the host sets the words
of a pass (triton_kernels/state.py) before it launches it, and waits for its end.

Rows of a prompt pass may be kept for a later answer; what decoding made has gone through other kernels, and is made
anew.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from triton.errors import TritonError

from ..backend import NO_NUMBER
from ..errors import PpsdError
from ..sampling.params import SamplingParams
from ..triton_kernels.heads import sampling_words
from ..triton_kernels.state import KNOWN, MAX_ROWS, ROWS, START, WORDS
from . import devices, errors
from .buffers import NEVER, Site, Work, bytes_of_site
from .draft_vocabulary import DraftVocabulary
from .graphs import CaptureFailed, PartGraphs, Recorder, Step
from .launches import decoder_layer, early_layers, exit_head, lm_head
from .prompt import PromptLayers
from .weights import DeviceWeights

_LOG = logging.getLogger(__name__)

LEAST_CAPACITY = 1024  # positions that buffers are made for

Rows = npt.NDArray[np.float32]  # [rows, hidden]
Cancelled = Callable[[], bool] | None


@dataclass(frozen=True)
class How:
    """pdl: programmatic dependent launches. recorder: makes graphs; None: kernels are launched one by one."""

    pdl: bool = False
    recorder: Callable[[], Recorder] | None = None


class Part:
    """What both kinds share: the rows that are held, the words of a pass, buffers that grow, and the captured steps."""

    # Made by the first `begin`, and anew when they have become too small.
    site: Site
    work: Work
    prompt_layers: PromptLayers

    def __init__(self, weights: DeviceWeights, how: How) -> None:
        self.weights, self.how = weights, how
        self.device = weights.device
        self._length = 0  # rows [0, length) have been through
        self._prompt = 0  # of these, the ones that took a prompt pass
        self._text = Text()
        self._capacity = 0
        self._graphs: PartGraphs | None = None

    @property
    def length(self) -> int:
        """Rows that a later answer may keep."""
        return min(self._length, self._prompt)

    def begin(self, keep: int, end: int, prompt: int, params: SamplingParams) -> None:
        """An answer of at most `end` rows, of which `keep` are there already; its prompt has `prompt` tokens.

        Raises PpsdError if the device has no memory for it.
        """
        self._forget(keep)
        with self._on_device():
            self._reserve(end)
            self._prompt = prompt - 1
            self.site.sampling.copy_(sampling_words(params, "cpu"))
            self._text.begin(keep, self.site.first_seen if params.repetition_penalty != 1 else None)

    def _forget(self, length: int) -> None:
        """Rows from `length` on."""
        self._length = min(self._length, length)

    def _goes_on(self, start: int, ids: Sequence[int]) -> None:
        """Rows of these tokens come at positions start.. ."""
        self._forget(start)
        self._text.go_on(start, ids)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        try:
            with devices.on(self.device):
                yield
        except (RuntimeError, TritonError) as error:  # of torch, of the driver; of the compiler
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise PpsdError(f"the GPU, or what was compiled for it, failed: {lines[0]}") from None

    def _set(self, words: Tensor, rows: int, start: int, known: int | None = None) -> None:
        """Of the next pass. known: the newest token that it may take for committed; None: all."""
        host = torch.zeros(WORDS, dtype=torch.int32)
        host[ROWS], host[START], host[KNOWN] = rows, start, start + rows if known is None else known
        words.copy_(host)

    def _prompt_rows(self, start: int, count: int) -> int:
        """Of rows [start, start + count), those that take a prompt pass."""
        return max(0, min(self._prompt - start, count))

    def _launch(self, number: int) -> None:
        if self._graphs is not None:
            self._graphs.launch(number)
        else:
            self._steps()[number]()

    # -- buffers and graphs --------------------------------------------------------------------------------------------

    def _reserve(self, end: int) -> None:
        if end <= self._capacity:
            return
        most = self.weights.config.max_position_embeddings
        capacity = max(end, min(max(LEAST_CAPACITY, 1 << (end - 1).bit_length()), most))
        if self._graphs is not None:
            self._graphs.close()
            self._graphs = None
        old = self.site if self._capacity else None
        head = self.weights.head
        layers = len(self.weights.layers) + (len(head.layers) if head else 0)
        needed = {self.device: bytes_of_site(self.weights, capacity, 2, layers)}
        remedy = f"lower --max-tokens, or {errors.smaller(self.weights.format)}"
        with errors.OutOfMemory(f"a KV cache of {capacity} tokens", needed, remedy):
            self.site = Site(self.weights, capacity, 1, self.device)
            self.prompt_layers = PromptLayers(self.weights, self.site)
            self.work = self._make_work()
            if old is not None:
                self.site.keep(old, self._length)
        self._capacity = capacity
        if self.how.recorder is not None:
            try:
                self._graphs = PartGraphs(self._steps(), self.device, self.how.recorder())
            except CaptureFailed as error:
                self.how = How(self.how.pdl)
                _LOG.warning("ppsd-rt: a rank's layers cannot be captured (%s); they run kernel by kernel", error)

    def _make_work(self) -> Work:
        raise NotImplementedError

    def _steps(self) -> list[Step]:
        """What is captured."""
        raise NotImplementedError


class VerifyPart(Part):
    """Layers [first, last); chooses: after them the LM head. As csrc/bindings/ranks.cpp asks a verification stage."""

    def __init__(self, weights: DeviceWeights, chooses: bool, how: How) -> None:
        self.chooses = chooses
        self._chosen: list[int] = []
        super().__init__(weights, how)

    def run(self, start: int, ids: Sequence[int], hidden: Rows, cancelled: Cancelled) -> Rows | None:
        """hidden [rows, hidden] at positions start.. -> the rows after the last layer; None: they became void."""
        self._goes_on(start, ids)
        count = len(ids)
        site, prompt = self.site, self._prompt_rows(start, count)
        done: list[Tensor] = []
        with self._on_device():
            site.exit_hidden[start : start + count] = torch.from_numpy(hidden).to(self.device)
            if prompt:
                self.prompt_layers.reserve(prompt)
                x = self.prompt_layers.taken(site.exit_hidden[start : start + prompt])
                for number, layer in enumerate(self.weights.layers):
                    if cancelled is not None and cancelled():
                        return None
                    self.prompt_layers.layer(layer, number, x, start)
                done.append(x.to("cpu", copy=True))
                self._length = start + prompt
            for first in range(start + prompt, start + count, MAX_ROWS):
                if cancelled is not None and cancelled():
                    return None
                rows = min(MAX_ROWS, start + count - first)
                self._set(site.late[0], rows, first)
                self._launch(0)
                done.append(self.work.x[:rows].to("cpu", copy=True))
                self._chosen = self.work.choices[:rows].tolist() if self.chooses else []
                if -1 in self._chosen:
                    raise PpsdError(NO_NUMBER)
                self._length = first + rows
        return torch.cat(done).numpy()

    def choose(self, last: int) -> list[int]:
        """The model's own token after each of the last rows that ran: of one launch at most."""
        return self._chosen[-last:]

    def _make_work(self) -> Work:
        weights = self.weights
        return Work(weights, weights.layers, weights.lm_head if self.chooses else None, self.device)

    def _steps(self) -> list[Step]:
        return [self._pass]

    def _pass(self) -> None:
        """From site.exit_hidden, each row at its position, to work.x and work.choices."""
        site, work, weights, x = self.site, self.work, self.weights, self.site.exit_hidden
        for number, layer in enumerate(weights.layers):
            rows = work.rounded if number else None
            decoder_layer(weights, layer, number, x, work.x, site.late[0], work, site, rows=rows, pdl=self.how.pdl)
            x = work.x
        if self.chooses:
            lm_head(weights, site.late[0], work, site, pdl=self.how.pdl)


_ROWS_ONLY, _AND_DRAFT = 0, 1  # steps of a DraftPart


class DraftPart(Part):
    """As csrc/bindings/ranks.cpp asks a draft stage."""

    def __init__(self, weights: DeviceWeights, how: How) -> None:
        self._head_length = 0  # rows that the exit head's own layers have seen
        self._vocabulary = DraftVocabulary(weights.head)
        self._verified = -1  # the newest row of which site.last_hidden knows what the last layer made of it
        super().__init__(weights, how)

    def begin(self, keep: int, end: int, prompt: int, params: SamplingParams) -> None:
        super().begin(keep, end, prompt, params)
        self._vocabulary.begin()

    def learn(self, position: int, hidden: Rows) -> None:
        """What the last layer made of the newest verified row [1, hidden]: for heads of the kind `feedback`."""
        with self._on_device():
            self.site.last_hidden[position] = torch.from_numpy(hidden)[0].to(self.device)
        self._verified = position

    def step(self, start: int, ids: Sequence[int], draw: bool, cancelled: Cancelled) -> tuple[int, float] | None:
        """(draft token, the head's own probability of it), 0s where none is drawn; None: it became void on the way."""
        self._goes_on(start, ids)
        self._vocabulary.roll_back(start)
        end, prompt = start + len(ids), self._prompt_rows(start, len(ids))
        site, early = self.site, self.site.late[0]
        with self._on_device():
            site.text[start:end] = torch.tensor(ids, dtype=torch.int32)
            if draw:
                self._vocabulary.follow(self._text.ids)
            if prompt:
                self.prompt_layers.reserve(prompt)
                self.prompt_layers.early(start, start + prompt, len(self.weights.layers))
                self._length = start + prompt
                self._head_length = max(self._head_length, self._length)
            last = -1  # of the exit head's rows, the one at `end`
            while self._length < end or (draw and last < 0):
                if cancelled is not None and cancelled():
                    return None
                rows = min(MAX_ROWS, end - self._length)
                self._set(early, rows, self._length)
                if draw:
                    last = self._set_head(self._length + rows, end)
                self._launch(_AND_DRAFT if draw else _ROWS_ONLY)
                self._length += rows
            return (max(int(self.work.choices[last]), 0), float(self.work.chances[last])) if draw else (0, 0.0)

    def exported(self, start: int, count: int) -> Rows:
        with self._on_device():
            return self.site.exit_hidden[start : start + count].to("cpu", copy=True).numpy()

    def _set_head(self, arrived: int, end: int) -> int:
        """The exit head catches up with the rows that will have come -> which of its rows is in front of `end`, or -1.

        Last hidden states of verified rows are received there alone. All tokens that came are known to the penalty.
        """
        start = min(self._head_length, arrived - 1)
        rows = min(MAX_ROWS, arrived - start)
        self._head_length = start + rows
        drafts = self._head_length == end
        self._set(self.site.late[1], rows, start, self._verified + 1 if drafts and self._verified >= 0 else None)
        return rows - 1 if drafts else -1

    def _forget(self, length: int) -> None:
        super()._forget(length)
        self._head_length = min(self._head_length, length)
        if self._verified >= length:
            self._verified = -1

    def _make_work(self) -> Work:
        weights, head = self.weights, self.weights.head
        layers = [*weights.layers, *(head.layers if head else ())]
        return Work(weights, layers, head.lm_head if head else None, self.device)

    def _steps(self) -> list[Step]:
        return [self._rows, *([self._draft] if self.weights.head is not None else [])]

    def _rows(self) -> None:
        count = len(self.weights.layers)
        early_layers(self.weights, count, self.site.late[0], self.work, self.site, pdl=self.how.pdl)

    def _draft(self) -> None:
        self._rows()
        exit_head(self.weights, self.site.late[1], self.work, self.site, pdl=self.how.pdl)


class Text:
    """The tokens of the rows that have come, and where each stands first: a repetition penalty asks for that."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._first: dict[int, int] = {}
        self._places: Tensor | None = None  # int32 [vocabulary] on the device; None: nobody asks

    def begin(self, keep: int, places: Tensor | None) -> None:
        self._places = None
        self.go_on(keep, ())
        self._places = places
        if places is not None:
            places.fill_(NEVER)
            self._tell(self._first)

    def go_on(self, start: int, ids: Sequence[int]) -> None:
        changed: dict[int, int] = {}
        for place, token in enumerate(self.ids[start:], start):  # rows that are gone
            if self._first.get(token) == place:
                del self._first[token]
                changed[token] = NEVER
        self.ids[start:] = ids
        for place, token in enumerate(ids, start):
            if token not in self._first:
                self._first[token] = changed[token] = place
        self._tell(changed)

    def _tell(self, changed: Mapping[int, int]) -> None:
        if self._places is not None and changed:
            tokens, places = torch.tensor(list(changed)), torch.tensor(list(changed.values()), dtype=torch.int32)
            self._places[tokens.to(self._places.device)] = places.to(self._places.device)
