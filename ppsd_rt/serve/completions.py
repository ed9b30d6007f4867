"""/v1/completions: a text in, its continuation out."""

from collections.abc import Sequence
from typing import Any

from ..generation import Completion
from ..pipeline.rounds import Logprob
from .answers import Answers
from .chat import whole_text
from .logprobs import CompletionLogprobs, Offsets, completion_logprobs
from .replies import FINISH, CompletionChoice, CompletionReply
from .requests import CompletionRequest
from .service import Service
from .shape import OpenAIShape, reported


class CompletionShape(OpenAIShape):
    prefix, object = "cmpl", "text_completion"

    def __init__(self, service: Service, request: CompletionRequest) -> None:
        super().__init__(service, request)
        self._echo, self._nothing_more = bool(request.echo), request.max_tokens == 0
        self._given = request.prompts
        self._each = request.n or 1
        self._offsets: dict[int, Offsets] = {}  # of each answer

    def whole(self, answers: Answers) -> CompletionReply:
        choices = [
            CompletionChoice(
                index=index,
                text=self._begin(index) + ("" if self._nothing_more else whole_text(completion, self._request)),
                logprobs=self.logprobs(index, reported(completion)) if completion.logprobs else None,
                finish_reason=FINISH[completion.finish_reason],
                seed=completion.seed,
            )
            for index, completion in enumerate(answers.completions)
        ]
        usage = answers.usage()
        if self._nothing_more:
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        return CompletionReply(id=self.id, created=self._created, model=self._model, choices=choices, usage=usage)

    def part(self, index: int, text: str, first: bool) -> dict[str, Any]:
        text = "" if self._nothing_more else text
        return {"text": self._begin(index) + text if first else text}

    def last(self, index: int, completion: Completion, first: bool) -> tuple[dict[str, Any], str]:
        text = (completion.stop or "") if self._request.include_stop_str_in_output else ""
        return {"text": text}, FINISH[completion.finish_reason]

    def logprobs(self, index: int, chosen: Sequence[tuple[int, Logprob]]) -> CompletionLogprobs:
        prompt = self.answers.prompts[index]
        told: list[tuple[int, Logprob | None]] = [*(() if self._nothing_more else chosen)]
        if index not in self._offsets:
            self._offsets[index] = Offsets(self._tokenizer, () if self._echo else prompt)
            if self._echo:
                told = [*zip(prompt, self.answers.echoed[tuple(prompt)], strict=True), *told]
        return completion_logprobs(self._tokenizer, told, self._offsets[index])

    def _begin(self, index: int) -> str:
        """The prompt, where it is echoed."""
        given = self._given[index // self._each] if self._echo else ""
        return given if isinstance(given, str) else self._tokenizer.decode(given, skip_special_tokens=False)
