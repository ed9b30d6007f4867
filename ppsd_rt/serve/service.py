"""The engine, its limits, and the requests that it works on."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any, Protocol

from anyio import CapacityLimiter, to_thread

from ..async_generation import AsyncGeneration
from ..backend import RunOptions
from ..engine import Engine
from ..errors import PpsdError, UsageError
from ..generation import Prompt
from ..sampling.grammar import Grammar
from ..sampling.params import SamplingParams
from .admission import Admission, Places
from .errors import ApiError, from_engine
from .metrics import Metrics
from .requests import ChatRequest, CompletionRequest
from .settings import Settings

_NAMES = {field.name: field.name for field in fields(SamplingParams)}


class Running(Protocol):
    def end(self, reason: ApiError) -> None:
        """With the round at hand, for this reason."""


class Service:
    """Raises ApiError for all that it does not take."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.admission = Admission(settings)
        self.metrics = Metrics(self.admission)
        self.created = int(settings.now())
        self.context = engine.config.max_position_embeddings
        self._live: set[Running] = set()
        self._one = CapacityLimiter(1)  # tokenizers and chat templates: long ones must not hold up the event loop

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.engine.name):
            message = f"The model '{name}' does not exist; this server has '{self.engine.name}'"
            raise ApiError(404, message, "model_not_found", "model")

    async def encode(self, prompt: Prompt, param: str) -> list[int]:
        """Token ids of a prompt, none too many."""
        try:
            ids = await to_thread.run_sync(partial(self.engine.encode, prompt), limiter=self._one)
        except PpsdError as error:  # not UsageError alone: a chat template that refuses the messages
            code = "context_length_exceeded" if "has a context of" in str(error) else "invalid_value"
            raise ApiError(400, str(error), code, param) from error
        most = self.settings.most_prompt
        if most is not None and len(ids) > most:
            message = f"the prompt has {len(ids)} tokens; this server takes {most} (--max-prompt)"
            raise ApiError(400, message, "context_length_exceeded", param)
        return ids

    async def tokenize(self, prompt: str | list[dict[str, str]], special: bool) -> list[int]:
        """Token ids of a text, of any length, or of messages. special: with what the tokenizer puts around a text."""
        encode = self.engine.encode
        if isinstance(prompt, str):
            encode = partial(self.engine.tokenizer.encode, add_special_tokens=special)
        return await to_thread.run_sync(partial(encode, prompt), limiter=self._one)

    def params(self, request: ChatRequest | CompletionRequest, names: Mapping[str, str]) -> list[SamplingParams]:
        """Of each of the n answers, which are told apart by their number. Without a seed each of them draws its own.

        names: what the request calls a field of SamplingParams that it has another name for.
        """
        room = self.settings.most_answer or self.context
        given: dict[str, Any] = {
            "max_tokens": min(request.most_tokens or room, room),
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "top_p": request.top_p,
            "top_k": None if request.top_k is None else max(0, request.top_k),
            "min_p": request.min_p,
            "repetition_penalty": request.repetition_penalty,
            "presence_penalty": request.presence_penalty,
            "frequency_penalty": request.frequency_penalty,
            "logit_bias": {int(id): bias for id, bias in (request.logit_bias or {}).items()},
            "logprobs": request.most_probable,
            "stop": request.stops,
            "stop_token_ids": request.stop_token_ids,
            "ignore_eos": request.ignore_eos,
            "seed": None if request.seed is None else request.seed % 2**64,
        }
        if request.response_format is not None:
            try:
                given["grammar"] = Grammar.from_response_format(request.response_format)
            except UsageError as error:
                raise ApiError(400, str(error), "invalid_value", "response_format") from error
        chosen = {name: value for name, value in given.items() if value is not None}
        try:
            params = SamplingParams(**chosen)
            self.engine.check(params)
            return [params] * (request.n or 1)
        except UsageError as error:
            raise from_engine(error, _NAMES | dict(names)) from error

    async def begin(self, prompt: list[int], params: SamplingParams, options: RunOptions) -> AsyncGeneration:
        """An answer; nothing is decoded yet. ApiError for a grammar that is none."""
        begin = partial(self.engine.agenerate, prompt, params, self.settings.schedule, options)
        if params.grammar is None:
            return begin()
        try:
            return await to_thread.run_sync(begin, limiter=self._one)  # it may take long to compile
        except UsageError as error:
            raise ApiError(400, str(error), "invalid_value", "response_format") from error

    @contextmanager
    def running(self, answers: Running, count: int) -> Iterator[Places]:
        """While the block runs they are known to `end_after_grace`."""
        places = self.admission.enter(count)
        self._live.add(answers)
        try:
            yield places
        finally:
            self._live.remove(answers)
            places.leave()

    async def end_after_grace(self) -> None:
        """Of a server that is stopping: what still runs then is ended."""
        await self.settings.sleep(self.settings.grace)
        for answers in list(self._live):
            answers.end(ApiError(503, "the server is stopping", "stopping"))
