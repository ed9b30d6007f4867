"""What the backends have in common whose answers are all in one loop: cpu, torch, cuda, and rank 0 of several."""

from collections.abc import Generator, Sequence

import numpy as np
import numpy.typing as npt

from . import _native
from .backend import Request, logprobs_by_logits
from .cpu.answers import MOST_ANSWERS, Answers, weakly
from .pipeline.rounds import Drafted, Logprob, Round
from .sampling.params import EXTRAS


class LoopBackend:
    copies = True

    def __init__(self) -> None:
        self._answers = Answers(weakly(self._make_loop))
        self._ngrams = _native.Ngrams()  # of all owners

    def _make_loop(self) -> _native.Loop:
        """For all answers, until the exit head changes."""
        raise NotImplementedError

    @property
    def concurrency(self) -> int:
        return MOST_ANSWERS

    @property
    def extras(self) -> frozenset[str]:
        return EXTRAS

    def know(self, successors: npt.NDArray[np.int32] | None) -> None:
        self._ngrams = _native.Ngrams()
        if successors is not None:
            self._ngrams.know(successors)

    def recall(self, ids: Sequence[int], owner: int) -> None:
        """Copy drafts from this text too, as if it had been answered here."""
        self._ngrams.of(owner).learn(ids)

    def rounds(self, *request: *Request) -> Generator[Round | Drafted, None, None]:
        yield from self._answers.decode(request, self._ngrams)

    def logits(self, ids: Sequence[int], last: int = 1) -> npt.NDArray[np.float32]:
        raise NotImplementedError

    def logprobs(self, ids: Sequence[int], top: int) -> list[Logprob]:
        return logprobs_by_logits(self.logits, ids, top)

    def spans(self) -> list[tuple[str, int, int, float, float]]:
        return self._answers.last.spans() if self._answers.last else []

    def explain(self) -> str:
        """What the policy believes of passes and drafts; empty when nothing has been decoded."""
        return self._answers.explain()
