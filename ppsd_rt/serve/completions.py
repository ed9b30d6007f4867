"""/v1/completions: a text in, its continuation out."""

from collections.abc import Sequence
from typing import Any

from ..pipeline.rounds import Logprob
from .answers import Answers
from .logprobs import CompletionLogprobs, Offsets, completion_logprobs
from .replies import FINISH, CompletionChoice, CompletionReply
from .requests import CompletionRequest
from .service import Service
from .shape import Shape, reported


class CompletionShape(Shape):
    prefix, object = "cmpl", "text_completion"

    def __init__(self, service: Service, request: CompletionRequest) -> None:
        super().__init__(service, request)
        self._offsets: dict[int, Offsets] = {}  # of each answer

    def whole(self, answers: Answers) -> CompletionReply:
        choices = [
            CompletionChoice(
                index=index,
                text=completion.text,
                logprobs=self.logprobs(index, reported(completion)) if completion.logprobs else None,
                finish_reason=FINISH[completion.finish_reason],
                seed=completion.seed,
            )
            for index, completion in enumerate(answers.completions)
        ]
        return CompletionReply(
            id=self.id, created=self._created, model=self._model, choices=choices, usage=answers.usage()
        )

    def part(self, text: str | None, first: bool) -> dict[str, Any]:
        return {"text": text or ""}

    def logprobs(self, index: int, chosen: Sequence[tuple[int, Logprob]]) -> CompletionLogprobs:
        if index not in self._offsets:
            self._offsets[index] = Offsets(self._tokenizer, self.prompts[index])
        return completion_logprobs(self._tokenizer, chosen, self._offsets[index])
