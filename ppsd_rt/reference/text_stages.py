"""The torch stages of one text, as `ppsd_rt.stages.Stages` asks for them; it checks every argument."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from .sampler import Sampler, confidence
from .stage import DraftStage, VerifyStage


class TorchStages:
    """See `ppsd_rt.stages.RowStages`."""

    def __init__(self, draft: DraftStage, verify: VerifyStage, sampler: Sampler) -> None:
        self._draft, self._verify, self._sampler = draft, verify, sampler
        self._ids: list[int] = []  # of the rows that the draft stage holds
        self._kept: dict[int, Tensor] = {}  # verified rows that may be learnt, as the last layer left them [hidden]

    def begin(self, answer: int, key: int) -> None:
        self._sampler = Sampler(replace(self._sampler.params, seed=key), answer)
        self._draft.begin_text(answer)
        self._verify.begin_text(answer)

    def reserve(self, capacity: int) -> None:
        self._draft.reserve(capacity)
        self._verify.reserve(capacity)

    def draft(self, start: int, ids: Sequence[int], draw: bool) -> tuple[int, float] | None:
        del self._ids[start:]
        self._draft.rollback(start)
        if ids:
            self._draft.run_tokens(ids)
            self._ids += ids
        if not draw:
            return None
        self._draft.follow(self._ids)
        draft_ids = self._draft.draft_ids
        logits = self._sampler.edited(self._draft.draft_logits(), self._ids, draft_ids)
        token = self._sampler.pick(logits, len(self._ids), self._ids, draft_ids)
        return token, confidence(logits, token, draft_ids)

    def verify(self, start: int, ids: Sequence[int], last: int) -> list[int]:
        self._verify.rollback(start)
        logits = self._verify.logits(self._draft.exit_hidden(start, len(ids)), last)
        first = start + len(ids) - last
        self._kept.update(enumerate(self._verify.last_hidden(), first))
        rows = enumerate(logits, first + 1)
        return [self._sampler.choose(row, position, self._ids[:position]) for position, row in rows]

    def learn(self, position: int) -> None:
        self._draft.learn(position, self._kept[position])
        self._kept.clear()
