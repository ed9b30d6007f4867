"""/v1/completions: a text in, its continuation out."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..generation import Completion
from ..pipeline.rounds import Logprob
from .answers import Answers
from .chat import whole_text
from .logprobs import CompletionLogprobs, completion_logprobs
from .replies import FINISH, CompletionChoice, CompletionReply
from .requests import CompletionRequest
from .service import Service
from .shape import OpenAIShape, reported


class CompletionShape(OpenAIShape):
    prefix, object = "cmpl", "text_completion"

    def __init__(self, service: Service, request: CompletionRequest) -> None:
        super().__init__(service, request)
        self._offsets: Counter[int] = Counter()  # answer -> characters of the tokens that have been reported

    def whole(self, answers: Answers) -> CompletionReply:
        choices = [
            CompletionChoice(
                index=index,
                text=whole_text(completion, self._request),
                logprobs=self.logprobs(index, reported(completion)) if completion.logprobs else None,
                finish_reason=FINISH[completion.finish_reason],
            )
            for index, completion in enumerate(answers.completions)
        ]
        return CompletionReply(
            id=self.id, created=self._created, model=self._model, choices=choices, usage=answers.usage()
        )

    def part(self, index: int, text: str, first: bool) -> dict[str, Any]:
        return {"text": text}

    def last(self, index: int, completion: Completion, first: bool) -> tuple[dict[str, Any], str]:
        text = (completion.stop or "") if self._request.include_stop_str_in_output else ""
        return {"text": text}, FINISH[completion.finish_reason]

    def logprobs(self, index: int, chosen: Sequence[tuple[int, Logprob]]) -> CompletionLogprobs:
        found = completion_logprobs(self._tokenizer, chosen, self._offsets[index])
        self._offsets[index] += sum(map(len, found.tokens))
        return found
