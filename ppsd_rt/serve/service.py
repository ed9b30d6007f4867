"""The engine, its limits, and the requests that it works on."""

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from anyio import CapacityLimiter, to_thread

from ..async_generation import AsyncGeneration
from ..backend import RunOptions
from ..chat.prompt import ChatPrompt
from ..engine import Engine
from ..errors import ContextFull, PpsdError, UsageError
from ..generation import Prompt
from ..models.files import read_json_object
from ..pipeline.rounds import Logprob
from ..printable import printable, shortened
from ..sampling.grammar import Grammar
from ..sampling.params import LEAST_TEMPERATURE, SamplingParams
from .admission import Admission, Slots
from .errors import ApiError, from_engine
from .metrics import Metrics
from .owners import Owners
from .requests import Generate, ignored
from .settings import DEFAULTS, Settings

_MOST_NAMES = 1000  # of ignored fields and unheld keywords: clients may invent them
_LONG = 1 << 16  # characters of a prompt
_NAMES = {field.name: field.name for field in fields(SamplingParams)}


class Service:
    """Raises ApiError for all that it does not take."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.admission = Admission(settings)
        learner = engine.learner
        self.owners = Owners(settings, learner.kept.secret if learner else secrets.token_bytes(16))
        days = (lambda: learner.days) if learner and self.owners.tells_counts else dict
        self.metrics = Metrics(self.admission, self.owners.counts, days)
        self.created = int(settings.now())
        self.context = engine.config.max_position_embeddings
        # As vLLM does: of the model's own, what is neither in the request nor among the server's options; if it can be.
        folder, own = engine.checkpoint.folder, dict[str, Any]()
        if folder.is_dir():
            own = read_json_object(folder / "generation_config.json", missing_ok=True)
        known = {"temperature", *engine.backend.extras}.intersection(DEFAULTS)
        self.sampling = {"temperature": 1.0} | {name: own[name] for name in known if own.get(name) is not None}
        self.sampling |= settings.sampling
        engine.check(SamplingParams(**self.sampling))
        self._live: set[Callable[[ApiError], None]] = set()
        self.prompt = ChatPrompt(engine.tokenizer)
        self._noted: set[tuple[str, str]] = set()
        self._compiling, self._judging = CapacityLimiter(16), CapacityLimiter(1)
        # Tokenizers and chat templates take a thread: long ones hold up neither the event loop nor short ones.
        self._short, self._long = CapacityLimiter(1), CapacityLimiter(1)

    def check_model(self, name: str | None) -> None:
        if name is not None and _stem(name) != _stem(self.engine.name):
            message = f"The model '{name}' does not exist; this server has '{self.engine.name}'"
            raise ApiError(404, message, "model_not_found", "model")

    async def encode(self, prompt: Callable[[], Prompt] | Prompt, param: str, size: int = 0) -> list[int]:
        """Token ids of a prompt, or of what a function makes of so many characters; none too many."""

        def encoded() -> list[int]:
            made = prompt() if callable(prompt) else prompt
            if isinstance(made, str):
                self.check_length(made)
            return self.engine.encode(made)

        try:
            size = len(prompt) if isinstance(prompt, str) else size
            ids = encoded() if isinstance(prompt, list) else await self.aside(encoded, size)
        except PpsdError as error:  # not UsageError alone: a chat template that refuses the messages
            code = error.code if isinstance(error, UsageError) else UsageError.code
            raise ApiError(400, str(error), code, param) from error
        most = self.settings.max_prompt
        if most is not None and len(ids) > most:
            message = f"the prompt has {len(ids)} tokens; this server takes {most} (--max-prompt)"
            raise ApiError(400, message, "context_length_exceeded", param)
        return ids

    def check_length(self, text: str) -> None:
        """ContextFull for a text that is too long whatever its tokens are: tokenizers may take a minute for it."""
        if len(text) > self.context * self._longest:
            least = -(-len(text) // self._longest)
            name, context = self.engine.name, self.context
            raise ContextFull(f"the prompt has at least {least} tokens; {name} has a context of {context}; shorten it")

    def check_count(self, count: int) -> None:
        """ApiError for more tokens than a context holds."""
        if count > self.context:
            message = f"there are {count} ids; {self.engine.name} has a context of {self.context}"
            raise ApiError(400, message, "context_length_exceeded", "tokens")

    @cached_property
    def _longest(self) -> int:
        """Characters of a token, which it spells at least one by one."""
        tokenizer = self.engine.tokenizer
        return max(len(tokenizer.id_to_token(id) or "") for id in range(tokenizer.vocab_size))

    async def aside(self, work: Callable[[], Any], size: int) -> Any:
        """What it returns, in a thread. size: characters or tokens that it works on."""
        return await to_thread.run_sync(work, limiter=self._long if size > _LONG else self._short)

    def tokenizer_info(self) -> dict[str, Any]:
        """As vLLM's and for lm-eval: the special tokens by name, and the chat template."""
        tokenizer, template = self.engine.tokenizer, self.engine.tokenizer.chat_template
        named = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        tokens = {name: tokenizer.id_to_token(id) for name, id in named.items() if id is not None}
        given = template.variables if template else {}
        return {**given, **tokens, "vocab_size": tokenizer.vocab_size, "chat_template": template and template.source}

    def note(self, request: object) -> None:
        """Names in the log, once each, what a request has and nothing here heeds; ApiError under --strict."""
        for name in ignored(request):
            if self.settings.strict:
                raise ApiError(400, f"Unknown parameter: '{name}'", "unknown_parameter", name)
            self._note_once("ignored", name)

    def _note_once(self, event: str, what: str) -> None:
        if (event, what) not in self._noted and len(self._noted) < _MOST_NAMES:
            self._noted.add((event, what))
            self.settings.log(event, field=shortened(printable(what), 200))

    def grammar(self, request: Generate) -> Grammar | None:
        """Of `Generate.format`."""
        wanted = request.format
        if wanted is None:
            return None
        if wanted.get("type") == "choice":
            choice = wanted["choice"]
            if not isinstance(choice, list) or not choice or not all(isinstance(one, str) for one in choice):
                raise ApiError(400, "a choice must be a list of texts", "invalid_value", "structured_outputs")
            return Grammar.lark("start: " + " | ".join(map(json.dumps, choice)))
        try:
            return Grammar.from_response_format(wanted, bounded=not request.unbounded_json)
        except UsageError as error:
            raise ApiError(400, str(error), "invalid_value", "response_format") from error

    def params(self, request: Generate, names: Mapping[str, str], grammar: Grammar | None) -> list[SamplingParams]:
        """Of each of the n answers, which are told apart by their number. Without a seed each of them draws its own.

        names: what the request calls a field of SamplingParams that it has another name for.
        """
        room = self.settings.max_answer or self.context
        same = (*DEFAULTS, "presence_penalty", "frequency_penalty", "stop_token_ids", "ignore_eos")
        given: dict[str, Any] = {
            **{name: getattr(request, name) for name in same},
            "max_tokens": min(request.most_tokens or room, room),
            "logit_bias": {int(id): bias for id, bias in (request.logit_bias or {}).items()},
            "logprobs": request.most_probable,
            "grammar": grammar,
            "stop": request.stops,
            "skip_special_tokens": request.skip_special_tokens,
            "min_tokens": request.min_tokens or None,
            "seed": None if request.seed in (None, -1) else request.seed % 2**64,
        }
        chosen = self.sampling | {name: value for name, value in given.items() if value is not None}
        if chosen["temperature"] < LEAST_TEMPERATURE:
            chosen["temperature"] = 0.0
        try:
            params = SamplingParams(**chosen)
            self.engine.check(params)
            return [params] * (request.n or 1)
        except UsageError as error:
            raise from_engine(error, _NAMES | dict(names)) from error

    async def compile(self, grammar: Grammar, param: str) -> list[dict[str, str]]:
        """So that `begin` finds it. ApiError for one that is none, or hopeless; nobody else waits for it meanwhile.

        Returns what is not held of the answer's schema; what is not of tools' schemas is logged once.
        """
        try:
            unheld = await to_thread.run_sync(
                self.engine.unheld, grammar, limiter=self._compiling, abandon_on_cancel=True
            )
            for place, why in unheld:
                if not place.startswith("/"):
                    self._note_once("unheld", f"{place}: {why}")
            return [{"place": place, "why": why} for place, why in unheld if place.startswith("/")]
        except UsageError as error:
            raise ApiError(400, str(error), "invalid_value", param) from error

    async def prompt_logprobs(self, prompt: Sequence[int], top: int) -> list[Logprob | None]:
        """As `Engine.prompt_logprobs`, one prompt at a time."""
        ask = partial(self.engine.prompt_logprobs, prompt, top)
        return await to_thread.run_sync(ask, limiter=self._judging, abandon_on_cancel=True)

    def begin(self, prompt: list[int], params: SamplingParams, options: RunOptions) -> AsyncGeneration:
        """An answer; nothing is decoded yet."""
        return self.engine.agenerate(prompt, params, self.settings.schedule, options)

    @contextmanager
    def running(self, end: Callable[[ApiError], None], count: int) -> Iterator[Slots]:
        """So many answers, for as long as the block runs. end: ends them with the round at hand, for this reason."""
        slots = self.admission.enter(count)
        self._live.add(end)
        try:
            yield slots
        finally:
            self._live.remove(end)
            slots.leave()

    async def end_after_grace(self) -> None:
        """Of a server that is stopping: what still runs then is ended."""
        await self.settings.sleep(self.settings.grace)
        self.end_all()

    def end_all(self) -> None:
        for end in list(self._live):
            end(ApiError(503, "the server is stopping", "stopping"))


def _stem(name: str) -> str:
    """A model's file by its whole path, its name, or that without its ending; with the tag of Ollama's clients."""
    return Path(name.removesuffix(":latest")).name.removesuffix(".gguf")
