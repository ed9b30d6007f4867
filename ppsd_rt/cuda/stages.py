"""The stages of a model on a device: what a draft step and a verification pass launch, one kernel after the other.

    draft_step    rows that the early layers have not seen, through layers [0, E) and the exit head: one draft token
    early_step    the same without the exit head
    verification  rows that the early layers have seen, through layers [E, L) and the LM head; verdict; report
    plain_step    early_step, then verification: with nothing drafted, a step of plain decoding
    round         draft steps, then a plain_step

They allocate nothing, read nothing on the host and take no argument that changes: captured once, they can be launched
for ever. Which rows a pass takes, where they stand, what is sampled and where it ends is in device memory
(triton_kernels/state.py); the host sets it between answers (`begin`). draft_step (or early_step) may run on one stream
and verification on others: see triton_kernels/verdict.py.

Every row at most passes each layer once in each epoch, through the same kernels whatever the step that takes it: plain
decoding and every schedule compute the same bits.

Verification stages may be on devices of their own: see devices.py.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..backend import Oracle
from ..errors import UsageError
from ..pipeline.split import cut_layers
from ..sampling.params import SamplingParams
from ..triton_kernels.heads import sampling_words
from ..triton_kernels.state import (
    COPIES,
    DRAFTED,
    DRAWN,
    LIMIT,
    LOOKAHEAD,
    MAX_ROWS,
    MOST,
    ORACLE,
    ORACLE_END,
    ORACLE_SEED,
    ROWS,
    SEQUENCE,
    START,
    TOKEN,
    WORDS,
)
from ..triton_kernels.verdict import arrived, begin_draft, begin_verification, drafted, fetch, post, verdict
from . import devices
from .buffers import Buffers, Site, Work
from .devices import Copy, Leg, Window, synonyms
from .launches import decoder_layer, early_layers, exit_head, lm_head
from .prompt import PromptPass
from .weights import DeviceWeights


class DeviceStages:
    """One model, one exit head or none, one answer at a time of at most `capacity` tokens, prompt included."""

    def __init__(self, weights: DeviceWeights, capacity: int, cuts: Sequence[int] = (), *, pdl: bool = False) -> None:
        """cuts: the layers at which verification is cut into stages. pdl: programmatic dependent launches (Hopper).

        A stage runs on the device of its layers.
        """
        first, last = weights.exit_layer, len(weights.layers)
        bounds = [first, *cut_layers(first, last, cuts), last]
        self.weights, self.pdl = weights, pdl
        self.slices = list(pairwise(bounds))  # of the layers, one for each verification stage
        self.home, places = weights.device, weights.places or (weights.device,) * len(weights.layers)
        self._devices = [places[low] for low, _ in self.slices]
        whole = all(synonyms(places[low:high]) for low, high in [(0, max(1, weights.exit_layer)), *self.slices])
        assert whole, "a stage's layers are on one device"
        self._sites = self._make_sites(capacity)
        self.capacity = capacity
        head = weights.head
        early = [*weights.layers[: weights.exit_layer], *(head.layers if head else ())]
        self._draft = Work(weights, early, head.lm_head if head else None, self.home)
        self._late = [
            Work(weights, weights.layers[low:high], weights.lm_head if high == last else None, device)
            for (low, high), device in zip(self.slices, self._devices, strict=True)
        ]
        self.legs = self._make_legs()  # of a pass
        self._prompt = PromptPass(weights, self.buffers, [self._sites[device] for device in places])
        self.prompt_rows = 0  # rows [0, prompt_rows) have been through a prompt pass: an answer may keep them

    def _make_sites(self, capacity: int) -> dict[torch.device, Site]:
        """Of each device what is read and written there."""
        weights, stages = self.weights, len(self.slices)
        if synonyms([self.home, *self._devices]):
            self.buffers = Buffers(weights, capacity, stages, self.home)
            return {self.home: self.buffers}
        heads = len(weights.head.layers) if weights.head else 0
        layers: dict[torch.device, set[int]] = {self.home: set(range(weights.exit_layer))}
        layers[self.home] |= {len(weights.layers) + number for number in range(heads)}
        borders: dict[torch.device, set[int]] = {self.home: {0, stages}}
        for stage, ((low, high), device) in enumerate(zip(self.slices, self._devices, strict=True)):
            layers.setdefault(device, set()).update(range(low, high))
            borders.setdefault(device, set()).update((stage, stage + 1))
        here = layers.pop(self.home), borders.pop(self.home)
        self.buffers = Buffers(weights, capacity, stages, self.home, *here)
        others = {d: Site(weights, capacity, stages, d, layers[d], borders[d]) for d in layers}
        return {self.home: self.buffers, **others}

    def _make_legs(self) -> list[Leg]:
        stages = len(self.slices)
        legs = [Leg("verify", stage, device) for stage, device in enumerate(self._devices)]
        if self._devices[0] != self.home:
            legs.insert(0, Leg("take", 0, self.home))
        if self._devices[-1] != self.home:
            legs.append(Leg("verdict", stages, self.home))
        return legs

    @property
    def devices(self) -> list[torch.device]:
        """Each once, the drafting one first."""
        return list(self._sites)

    # -- host side: between answers ------------------------------------------------------------------------------------

    def begin(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        keep: int = 0,
        *,
        end: int | None = None,
        most: int = 0,
        lookahead: int = 0,
        oracle: Oracle | None = None,
        copies: bool = False,
    ) -> None:
        """The prompt but for its last token through all layers; that one is the first row of the first pass.

        No pass may be under way. The first `keep` rows are taken from the answer before, as far as a prompt pass made
        them. end: the committed text ends before this position. copies: draft steps take what `offer` holds. Records
        count on from answer to answer.
        """
        rows = len(prompt) - 1
        end = self.capacity if end is None else end
        if not 0 < len(prompt) < end <= self.capacity:
            raise UsageError(
                f"a prompt of {len(prompt)} tokens and an end at {end} do not fit {self.capacity} positions"
            )
        b = self.buffers
        b.text[: len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
        if self.weights.head is not None:
            self.weights.head.follow(prompt)
        words = self._words({START: rows})
        for site in self._sites.values():
            site.sampling.copy_(sampling_words(sampling, "cpu"))
            for passes in (site.late, site.mail):
                passes.copy_(words.expand_as(passes))
        b.early.copy_(words)
        b.head.copy_(words)
        changed = {START: rows, TOKEN: prompt[-1], DRAFTED: len(prompt), MOST: most, LOOKAHEAD: lookahead}
        changed |= {LIMIT: end - 1, COPIES: int(copies)}
        b.offer.zero_()
        if oracle is not None:
            changed |= self._ask(oracle)
        state, counts = self._words(changed), slice(SEQUENCE, DRAWN + 1)
        state[counts] = b.state[counts].cpu()
        b.state.copy_(state)
        keep = max(0, min(keep, rows, self.prompt_rows))
        if keep < rows:
            self._prompt.run(keep, rows)
        self.prompt_rows = rows

    # -- device side: what is captured ---------------------------------------------------------------------------------

    def draft_step(self) -> None:
        b, work = self.buffers, self._draft
        with devices.on(self.home):
            self._begin_draft()
            exit_head(self.weights, b.head, work, b, pdl=self.pdl)
            drafted(
                b.text, work.choices, work.chances, b.confidences, b.copied, b.truth, b.early, b.head, b.state,
                b.drafts, vocabulary=self.weights.config.vocab_size, pdl=self.pdl,
            )  # fmt: skip

    def early_step(self) -> None:
        with devices.on(self.home):
            self._begin_draft()
            arrived(self.buffers.early, self.buffers.state, pdl=self.pdl)

    def verification(self, leg: int | None = None, window: Window | None = None) -> None:
        """All legs of a pass, one after the other, or one of them, with the copies in front of each.

        Stages on streams of their own: stage s + 1 begins a pass once s has ended it; s may be up to MAIL_SLOTS passes
        ahead. window: the rows of the pass are among these.
        """
        for each in range(len(self.legs)) if leg is None else (leg,):
            self.bring(each, window)
            self.launch(each)

    def plain_step(self, window: Window | None = None) -> None:
        self.early_step()
        self.verification(window=window)

    def round(self, drafts: int) -> None:
        for _ in range(drafts):
            self.draft_step()
        self.plain_step()

    def launch(self, leg: int) -> None:
        """Without the copies: what is captured."""
        its = self.legs[leg]
        with devices.on(its.device):
            if its.name == "take":
                self._take()
            elif its.name == "verify":
                self._verify(its.stage)
            else:
                self._verdict()

    def bring(self, leg: int, window: Window | None = None) -> None:
        for copy in self.copies(leg):
            copy.run(window)

    def copies(self, leg: int) -> list[Copy]:
        """What a leg of this answer's passes needs of other devices: none, if the one before is on the same device."""
        its, stage = self.legs[leg], self.legs[leg].stage
        before = self.home if stage == 0 else self._devices[stage - 1]
        here, there, home = self._sites[its.device], self._sites[before], self.buffers
        copies: list[Copy] = []
        if its.device != before:
            copies.append(Copy(here.mail[stage], there.mail[stage], its.device, before))
            to, source = (self._border(site, stage) for site in (here, there))
            if len(to):
                copies.append(Copy(to, source, its.device, before, rows=True))
            if its.device != self.home:
                copies.append(Copy(here.state, home.state, its.device, self.home))
        return copies

    def logits(self, ids: Sequence[int], last: int) -> Tensor:
        """The model's, as the passes of plain decoding compute them before they choose a token: float32 [last,
        vocabulary], after each of the `last` ids. Overwrites the answer before."""
        first = len(ids) - last
        self.begin(ids[: first + 1], SamplingParams(), end=len(ids) + 1)
        self.buffers.text[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
        starts = range(first, len(ids), MAX_ROWS)
        return torch.cat([self._logits(start, min(MAX_ROWS, len(ids) - start)) for start in starts])

    def _logits(self, start: int, rows: int) -> Tensor:
        """float32 [rows, vocabulary]: of rows at these positions of the text."""
        words = self._words({ROWS: rows, START: start})
        self.buffers.early.copy_(words)
        with devices.on(self.home):
            self._early_layers()
        for number, leg in enumerate(self.legs):
            if leg.name == "verify":
                self.bring(number, (start, rows))
                at = self._sites[leg.device].late[leg.stage]
                at.copy_(words)
                with devices.on(leg.device):
                    self._late_layers(leg.stage, at)
        last = self._devices[-1]
        logits = torch.zeros(MAX_ROWS, self.weights.config.vocab_size, device=last)
        with devices.on(last):
            self._lm_head(self._sites[last].late[len(self.slices) - 1], logits)
        return logits[:rows]

    def _begin_draft(self) -> None:
        b = self.buffers
        begin_draft(b.text, b.confidences, b.copied, b.offer, b.early, b.head, b.state, pdl=self.pdl)
        self._early_layers()

    def _take(self) -> None:
        b = self.buffers
        begin_verification(b.early, b.late[0], b.state, pdl=self.pdl)
        post(b.late[0], b.mail[0], b.state, pdl=self.pdl)

    def _verify(self, stage: int) -> None:
        b, work, site = self.buffers, self._late[stage], self._sites[self._devices[stage]]
        words, last = site.late[stage], stage == len(self.slices) - 1
        if stage == 0 and site is b:
            begin_verification(b.early, words, b.state, pdl=self.pdl)
        else:
            fetch(site.mail[stage], words, site.state, pdl=self.pdl)
        self._late_layers(stage, words)
        if not last:
            post(words, site.mail[stage + 1], site.state, pdl=self.pdl)
            return
        self._lm_head(words, None)
        if site is b:
            self._judge(work.choices, words)
        else:
            post(words, site.mail[stage + 1], site.state, work.choices, pdl=self.pdl)

    def _verdict(self) -> None:
        b, words, mail = self.buffers, self.buffers.late[len(self.slices)], self.buffers.mail[len(self.slices)]
        fetch(mail, words, b.state, b.choices, pdl=self.pdl)
        self._judge(b.choices, words)

    def _judge(self, choices: Tensor, words: Tensor) -> None:
        b = self.buffers
        verdict(b.text, choices, b.confidences, b.copied, words, b.state, b.ring, pdl=self.pdl)

    def _early_layers(self) -> None:
        early_layers(self.weights, self.buffers.early, self._draft, self.buffers, pdl=self.pdl)

    def _late_layers(self, stage: int, words: Tensor) -> None:
        """From where the rows before stand, each at its position, to work.x or the border to the next stage."""
        work, site, (low, high) = self._late[stage], self._sites[self._devices[stage]], self.slices[stage]
        x = self._border(site, stage)
        for number in range(low, high):
            last = self._leaves(stage) if number == high - 1 else None
            layer = self.weights.layers[number]
            rows = work.rounded if number > low else None
            decoder_layer(self.weights, layer, number, x, work.x, words, work, site, last, rows=rows, pdl=self.pdl)
            x = work.x

    def _border(self, site: Site, stage: int) -> Tensor:
        """The rows in front of a verification stage, or after the last one, each at its position."""
        return [site.exit_hidden, *site.handed, site.last_hidden][stage]

    def _leaves(self, stage: int) -> Tensor | None:
        """Where the stage's last layer leaves the rows, each at its position, if not in work.x."""
        last = stage == len(self.slices) - 1
        return None if last and not self.weights.hears else self._border(self._sites[self._devices[stage]], stage + 1)

    def _lm_head(self, words: Tensor, logits: Tensor | None) -> None:
        site = self._sites[self._devices[-1]]
        lm_head(self.weights, words, self._late[-1], site, logits, pdl=self.pdl)

    def _words(self, values: dict[int, int]) -> Tensor:
        words = torch.zeros(WORDS, dtype=torch.int32)
        for place, value in values.items():
            words[place] = value
        return words

    def _ask(self, oracle: Oracle) -> dict[int, int]:
        count = min(len(oracle.truth), self.capacity)
        self.buffers.truth[:count] = torch.tensor(oracle.truth[:count], dtype=torch.int32)
        low, high = torch.tensor([oracle.seed & 0xFFFFFFFF, oracle.seed >> 32]).to(torch.int32).tolist()
        bits = int(torch.tensor([oracle.acceptance]).view(torch.int32))
        return {ORACLE_END: count, ORACLE: bits, ORACLE_SEED: low, ORACLE_SEED + 1: high}
