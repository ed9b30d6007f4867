"""/v1/chat/completions: messages in, the assistant's message out."""

from collections.abc import Sequence
from typing import Any

from ..pipeline.rounds import Logprob
from .answers import Answers
from .logprobs import ChatLogprobs, chat_logprobs
from .replies import FINISH, ChatChoice, ChatMessage, ChatReply
from .shape import Shape, reported


class ChatShape(Shape):
    prefix, object = "chatcmpl", "chat.completion.chunk"

    def whole(self, answers: Answers) -> ChatReply:
        choices = [
            ChatChoice(
                index=index,
                message=ChatMessage(content=completion.text),
                logprobs=self.logprobs(index, reported(completion)) if completion.logprobs else None,
                finish_reason=FINISH[completion.finish_reason],
                seed=completion.seed,
            )
            for index, completion in enumerate(answers.completions)
        ]
        return ChatReply(id=self.id, created=self._created, model=self._model, choices=choices, usage=answers.usage())

    def part(self, text: str | None, first: bool) -> dict[str, Any]:
        said = {} if text is None else {"content": text}
        return {"delta": {"role": "assistant", **said} if first else said}

    def logprobs(self, index: int, chosen: Sequence[tuple[int, Logprob]]) -> ChatLogprobs:
        return chat_logprobs(self._tokenizer, chosen)
