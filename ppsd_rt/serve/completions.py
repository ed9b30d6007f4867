"""/v1/completions: a text in, its continuation out."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..pipeline.rounds import Logprob
from .answers import Answers
from .logprobs import CompletionLogprobs, completion_logprobs
from .replies import FINISH, CompletionChoice, CompletionReply
from .requests import CompletionRequest
from .service import Service
from .shape import Shape, reported


class CompletionShape(Shape):
    prefix, object = "cmpl", "text_completion"

    def __init__(self, service: Service, request: CompletionRequest) -> None:
        super().__init__(service, request)
        self._offsets: Counter[int] = Counter()  # answer -> characters of the tokens that have been reported

    def whole(self, answers: Answers) -> CompletionReply:
        choices = [
            CompletionChoice(
                index=index,
                text=completion.text,
                logprobs=self.logprobs(index, reported(completion)) if completion.logprobs else None,
                finish_reason=FINISH[completion.finish_reason],
            )
            for index, completion in enumerate(answers.completions)
        ]
        return CompletionReply(
            id=self.id, created=self._created, model=self._model, choices=choices, usage=answers.usage()
        )

    def part(self, text: str | None, first: bool) -> dict[str, Any]:
        return {"text": text or ""}

    def logprobs(self, index: int, chosen: Sequence[tuple[int, Logprob]]) -> CompletionLogprobs:
        found = completion_logprobs(self._tokenizer, chosen, self._offsets[index])
        self._offsets[index] += sum(map(len, found.tokens))
        return found
