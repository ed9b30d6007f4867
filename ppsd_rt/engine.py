"""The engine: a model, its exit head and a backend, and `chat` and `generate`."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn, Self
from weakref import WeakSet

from .arguments import check_unicode, whole_number
from .backend import Backend, RunOptions
from .backends import check_machine, make_backend
from .chat.prompt import ChatPrompt
from .chat.reader import message_of
from .chat.tools import Tools, functions_of
from .errors import ContextFull, PpsdError, UsageError
from .find_head import find_head
from .generation import Generation, Prompt
from .many import Generations
from .models import random_weights
from .models.checkpoint import Checkpoint
from .models.config import LlamaConfig
from .models.head_file import EAGLE3, HeadFile, HeadInfo
from .models.resolve import resolve_model
from .models.tokenizer import Tokenizer, load_tokenizer
from .pipeline.rounds import Logprob
from .pipeline.schedule import AUTO, PLAIN, Auto, Schedule, copying, describe, parse_schedule
from .printable import quoted
from .processes import not_after_fork
from .sampling.grammar import Grammar, Grammars, Masks
from .sampling.grammar_worker import Unheld
from .sampling.params import MOST_LOGPROBS, SamplingParams
from .stages import Stages

if TYPE_CHECKING:
    from .async_generation import AsyncGeneration
    from .learning.learner import Learner

# Whose messages these are; over HTTP there are no others. A template may have more, which it names.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def with_end(config: LlamaConfig, tokenizer: Tokenizer) -> LlamaConfig:
    """With the tokenizer's end-of-sequence id, where the files of the model name none."""
    if not config.eos_token_ids and (end := tokenizer.eos_id) is not None and end < config.vocab_size:
        return replace(config, eos_token_ids=(end,))
    return config


class Engine:
    """`Engine.from_pretrained("smollm2-135m").chat("Why is the sky blue?").run().text`"""

    def __init__(self, checkpoint: Checkpoint, tokenizer: Tokenizer, backend: Backend, name: str) -> None:
        self.checkpoint, self.tokenizer, self.name = checkpoint, tokenizer, name
        self._backend, self._process = backend, os.getpid()
        self.config = with_end(checkpoint.config, tokenizer)
        self._grammars: Grammars | None = None
        self._one_grammar = Lock()
        self._answers: WeakSet[Generation] = WeakSet()
        self._swapping = Lock()  # taken while an answer is made too
        self.learner: Learner | None = None
        self._exit_head = "auto"

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = "smollm2-135m",
        *,
        exit_head: str | Path | None = "auto",
        backend: str = "auto",
        device: str = "auto",
        dtype: str = "auto",
        threads: int | None = None,
        stages: int | Sequence[int] = 1,
        kv_dtype: str = "auto",
        kv_memory: int | str | None = None,
        learn: str | Path | None = None,
        progress: Callable[[int], AbstractContextManager[object]] = nullcontext,
    ) -> "Engine":
        """Load a model by any of the names that `models.resolve` knows.

        exit_head: a head's file; an EAGLE-3 head's folder or hub name; `auto`, the head that ships for this model, if
        one does; `none`; or `norm:E`, the model's own norm and LM head after layer E (`norm:E:V`: of which it draws the
        first V ids only).
        stages: how many stages the verification layers are cut into (or at which layers), for PPSD on many cores.
        device: also `cuda:0,cuda:1`: some layers on each; `stages` then says how many (1: as is best, as measured).
        kv_dtype: what the cpu backend keeps keys and values as: float32, bfloat16 or int8 (auto: as the weights are, of
        int4 as int8; bfloat16 where head_dim is no multiple of 32). It is part of the format: it may change answers.
        kv_memory: bytes that they are kept in, of all answers, or a text such as `4G`; None: half of what the
        machine has to spare. Where it is full, answers wait for each other.
        learn: a folder where ids of prompts and answers are kept, and from which a better head is learned while nothing
        is asked; on the cpu backend. None: nothing is kept.
        progress: given the bytes of the weights, what is open while they are loaded.
        Raises PpsdError with one line that says what to do.
        """
        check_machine(device, threads)  # before a model is fetched
        try:
            checkpoint, tokenizer = open_model(str(model), backend)
            file = find_head(str(exit_head), checkpoint)  # one that does not fit is refused at once
            with progress(sum(path.stat().st_size for path in checkpoint.files)):
                made = make_backend(backend, checkpoint, dtype, device, threads, stages, kv_dtype, kv_memory)
                engine = cls(checkpoint, tokenizer, made, str(model))
                engine._use_head(file, str(exit_head))
            if learn is not None:
                engine.learn(Path(learn))
        except MemoryError:
            raise PpsdError(f"not enough memory to load {model}: free some, or choose a smaller --dtype") from None
        return engine

    @property
    def backend(self) -> Backend:
        """What runs the model. PpsdError in a process that was forked since it was loaded."""
        not_after_fork(self._process)
        return self._backend

    def __repr__(self) -> str:
        if isinstance(self._backend, _Closed):
            return f"<Engine {self.name}: closed>"
        head = "no exit head" if self.head is None else f"{self.head.kind} head after layer {self.head.exit_layer}"
        running = sum(answer.running for answer in list(self._answers))
        state = f"{running} answer{'s' * (running != 1)} in progress" if running else "idle"
        threads = f"{self.backend.threads} thread{'s' * (self.backend.threads != 1)}"
        return f"<Engine {self.name}: {self.backend.name} {self.backend.dtype}, {threads}, {head}, {state}>"

    def __reduce__(self) -> NoReturn:
        raise PpsdError("an engine cannot be pickled: its weights and threads belong to this process; load one in each")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all answers, and give back memory, threads and files. What is asked of the engine then is a PpsdError."""
        for answer in list(self._answers):
            answer.close()
        if self.learner:
            self.learner.close()
        self._grammars = None
        closed: Any = _Closed(self.name)
        self._backend = self.checkpoint = closed

    @property
    def head(self) -> HeadInfo | None:
        """Kind, exit layer and origin of the exit head that drafts; None: there is none, only copies are drafted."""
        return self.backend.head

    def use_head(self, exit_head: str | Path | None) -> None:
        """Change the exit head; `exit_head` as in `from_pretrained`. Ends the answer in the making, if there is one,
        and learning: what is learned from another head would replace this one.

        Raises UsageError for a name that means nothing, and PpsdError for a file that is missing, damaged or
        does not fit the model.
        """
        self._use_head(find_head(str(exit_head), self.checkpoint), str(exit_head))

    def _use_head(self, file: HeadFile | None, name: str) -> None:
        if self.learner:
            self.learner.close()
        self.learner, self._exit_head = None, name
        self.backend.use_head(file if file is not None and file.drafts else None)
        self._counted = None if file is None else file.successors
        self.forget()

    def learn(self, folder: Path, exit_head: str | None = None) -> None:
        """Keep prompts and answers in this folder from now on, and use the heads that are learned there.

        exit_head: the one to begin with; None: the one in use. Raises UsageError where this backend cannot; PpsdError
        for a folder of another model, one that another process keeps answers in, and a head of other sizes than the
        one in use.
        """
        if self.backend.name not in ("cpu", "ranks"):
            raise UsageError("--learn needs the cpu backend: leave it out with torch and cuda")
        from .learning.learner import Learner

        file = find_head(exit_head, self.checkpoint) if exit_head is not None else None
        if file is not None and file.drafts:
            file.info.check_swap(self.head)
        self.learner = Learner(self, folder, exit_head or self._exit_head)

    def swap_head(self, file: HeadFile) -> bool:
        """Draft with this head, of the same sizes as the one in use, from the next answer on.

        False: some answers have not ended, and nothing has changed. PpsdError: it has other sizes.
        """
        file.info.check_swap(self.head)
        swapping: Any = self.backend  # one that `learn` has not refused
        with self._swapping:
            if not self._idle():
                return False
        packed = swapping.pack_head(file)  # beforehand: it takes longer than a request may wait
        with self._swapping:
            if not self._idle():
                return False
            swapping.swap_head(file, packed)
        return True

    def _idle(self) -> bool:
        """Under the lock: else the set may grow meanwhile."""
        return all(answer.over for answer in list(self._answers))

    def forget(self) -> None:
        """Forget what earlier answers said, from which drafts are copied: for benchmarks that ask the same again."""
        self.backend.know(self._counted)

    def save_prompts(self, file: str | Path, most: int | None = None) -> int:
        """Keep in a file what `load_prompts` of another process need not read again: keys and values of the prompts and
        answers that are in memory now, at most `most` bytes of them. Returns how many blocks those are.

        Raises UsageError on a backend that cannot, and PpsdError for a file of another model or of something else, and
        where it cannot be written.
        """
        return self._prompts_backend.save_prompts(Path(file), most)

    def load_prompts(self, file: str | Path) -> int:
        """What `save_prompts` has kept: prompts that begin like those are read from there on, to the same bits.

        Returns how many blocks of them are of use: none where there is no such file. Raises as `save_prompts` does.
        """
        return self._prompts_backend.load_prompts(Path(file))

    @property
    def _prompts_backend(self) -> Any:
        if not hasattr(self.backend, "save_prompts"):
            raise UsageError("prompts are kept in files by the cpu backend in one process: leave --prompt-cache out")
        return self.backend

    def encode(self, prompt: Prompt, template_variables: Mapping[str, Any] | None = None) -> list[int]:
        """Ids of a text (special tokens as the tokenizer adds them), of chat messages (by the template), or ids.

        template_variables: of a chat template, such as `{"enable_thinking": False}`; see `ChatTemplate.render`.
        Raises UsageError for what is none of these, is empty, holds ids outside the vocabulary or text that is not
        Unicode, or leaves no room for an answer in the model's context; PpsdError where the model has no chat template,
        or one that refuses the messages.
        """
        return self._ids(prompt, template_variables, room=1)

    def _ids(self, prompt: Prompt, variables: Mapping[str, Any] | None = None, room: int = 0) -> list[int]:
        """room: tokens that the context is to have beyond these."""
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, bytes | bytearray | Mapping) or not isinstance(prompt, Iterable):
            kind = type(prompt).__name__
            raise UsageError(f"the prompt must be a text, a list of messages or a list of token ids, not {kind}")
        else:
            items: list[Any] = list(prompt)
            if any(isinstance(item, str | Mapping) for item in items):
                ids = self._encode_messages(items, variables)
            else:
                ids = [whole_number("a prompt id", item) for item in items]
        if not ids:
            raise UsageError("the prompt is empty")
        if not all(0 <= id < self.config.vocab_size for id in ids):
            raise UsageError(f"a prompt id is outside the vocabulary of {self.config.vocab_size}")
        context = self.config.max_position_embeddings
        if len(ids) + room > context:
            raise ContextFull(f"the prompt has {len(ids)} tokens; {self.name} has a context of {context}; shorten it")
        return ids

    def _encode_messages(self, messages: list[Any], variables: Mapping[str, Any] | None) -> list[int]:
        template = self.tokenizer.chat_template
        if template is None:
            raise PpsdError(f"{self.name} has no chat template; give it plain text (--raw)")
        self._check_roles(messages)
        text = template.render(messages, template_variables=variables)
        for number, message in enumerate(messages, 1):
            check_unicode(message.get("content") or "", f"message {number}")
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _check_roles(self, messages: list[Any]) -> None:
        """UsageError for a role that there is not."""
        template = self.tokenizer.chat_template
        for number, message in enumerate(messages, 1):
            role = message.get("role") if isinstance(message, Mapping) else None
            if isinstance(role, str) and role not in ROLES and role not in (template.every_source if template else ""):
                raise UsageError(f"message {number} has the role {quoted(role)}, and not one of {', '.join(ROLES)}")

    def chat(
        self,
        messages: str | Iterable[Mapping[str, Any]],
        params: SamplingParams | None = None,
        schedule: Schedule | Auto | str = AUTO,
        options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
        template_variables: Mapping[str, Any] | None = None,
        tools: Iterable[Any] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
    ) -> Generation:
        """Start an answer to a question (a text), or to the last message of a conversation, by the chat template.

        tools: in OpenAI's form, or pydantic classes; tool_choice: as OpenAI's. Calls are in `Completion.message`, as
        the server reads them. The rest is as of `generate`, template_variables as of `encode`. Raises what they raise.
        """
        given: Any = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        said = list(given) if isinstance(given, Iterable) else [given]
        if not said or not all(isinstance(one, Mapping) for one in said):
            raise UsageError("chat takes a text or a list of messages; generate takes ids, too")
        prompt, offered = ChatPrompt(self.tokenizer), Tools.of(functions_of(tools), tool_choice)
        self._check_roles(said)
        text = prompt.text(said, offered, dict(template_variables or {}), True)
        inside = prompt.inside(text)
        params = prompt.held(params or SamplingParams(), offered, inside)
        answer = self.generate(prompt.ids(text), params, schedule, options)

        def read(text: str) -> Mapping[str, Any]:
            reader = prompt.reader(offered, inside)
            return message_of([*reader.push(text), *reader.end()])

        answer.read = read
        return answer

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        schedule: Schedule | Auto | str = AUTO,
        options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
    ) -> Generation:
        """Start an answer that goes on from a raw text, which gets no chat template (`chat` gives it one), or from ids.

        Messages get the template here too. Iterate over the result for its tokens, or `.run()` it to the end.

        schedule: a text as for `--schedule`. `auto` measures this machine and, where drafts do not pay, decodes
        plainly.
        Any thread may ask, and an answer begins when its first token is asked for.

        Raises, before anything is decoded, what `encode` raises for the prompt; UsageError for arguments of another
        type, a schedule that is not understood, and a schedule or sampling that this backend cannot do; PpsdError for
        a schedule that drafts where there is no exit head.
        """
        if isinstance(schedule, str):
            schedule = parse_schedule(schedule)
        if not isinstance(schedule, Schedule | Auto):
            raise UsageError(f"schedule must be a Schedule or a text such as 'auto', not {quoted(schedule)}")
        params = self.check(params)
        if isinstance(schedule, Auto) and self.head is None:
            schedule = copying(schedule) if self.backend.copies else PLAIN
        if isinstance(schedule, Schedule) and schedule.copies and not self.backend.copies:
            raise UsageError(
                f"the {self.backend.name} backend copies no drafts: leave lookup= and recycle= out of the schedule"
            )
        if params.grammar:
            options = replace(options, masks=self.compile(params.grammar))
        if isinstance(schedule, Schedule) and schedule.drafts and self.head is None:
            raise PpsdError(
                f"schedule {describe(schedule)} drafts, but {self.name} has no exit head: give --exit-head FILE or "
                "--exit-head norm:LAYER, train one with `ppsd-run distill`, or use --schedule plain"
            )
        if isinstance(schedule, Schedule) and schedule.overlap and self.head is not None and self.head.kind == EAGLE3:
            raise UsageError(
                f"schedule {describe(schedule)} drafts while it verifies, and an EAGLE-3 head reads what verification "
                "leaves: use auto or eesd"
            )
        ids = self.encode(prompt)
        with self._swapping:
            answer = Generation(self.backend, self.config, self.tokenizer, ids, params, schedule, options, self.learner)
            self._answers.add(answer)
        if isinstance(prompt, str) and self.tokenizer.chat_template is not None:
            answer.lacks_template = self.name
        return answer

    def generate_many(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        schedule: Schedule | Auto | str = AUTO,
        options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
        n: int = 1,
    ) -> Generations:
        """Start `n` answers to each prompt, the answers to one prompt one after another: iterate over the result for
        (number, token), or `.run()` it for a list. As many as `backend.concurrency` are asked for at once.

        With a seed, several answers to one prompt differ as their `SamplingParams.index` does, which counts on from
        that of `params`, and the answers are the same as one by one. Raises what `generate` raises, for all prompts,
        before anything is decoded.
        """
        if whole_number("n", n) < 1:
            raise UsageError(f"n must be at least 1, not {n}")
        params = params or SamplingParams()
        asked: Counter[tuple[int, ...]] = Counter()  # prompts that are the same are several answers to one
        generations = []
        for prompt in prompts:
            ids = self.encode(prompt)
            for _ in range(n):
                chosen = replace(params, index=params.index + asked[tuple(ids)])
                asked[tuple(ids)] += 1
                generations.append(self.generate(ids, chosen, schedule, options))
        return Generations(generations, self.backend.concurrency)

    def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        schedule: Schedule | Auto | str = AUTO,
        options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
    ) -> "AsyncGeneration":
        """`generate` for asyncio: `async for token in engine.agenerate(...)`. Raises what that raises, at once."""
        from .async_generation import AsyncGeneration  # asyncio takes as long to import as weights to be mapped

        return AsyncGeneration(self.generate(prompt, params, schedule, options))

    def compile(self, grammar: Grammar) -> Masks:
        """What `generate` does for a grammar, which takes up to seconds the first time; kept for the answers to come.

        UsageError for a grammar that is none, or that takes too much time or memory.
        """
        with self._one_grammar:
            if self._grammars is None:
                self._grammars = Grammars(self.tokenizer, self.config.vocab_size, sorted(self.config.eos_token_ids))
        return self._grammars.masks(grammar)

    def unheld(self, grammar: Grammar) -> Unheld:
        """Places in its schema and why what stands there is not held: of one with `strict=False`."""
        self.compile(grammar)
        assert self._grammars is not None
        return self._grammars.unheld(grammar)

    def fulfils(self, grammar: Grammar, ids: Sequence[int]) -> bool:
        """Does the grammar let an answer of these ids end? For one that `max_tokens` or the context has cut."""
        allowed = self.compile(grammar)().allowed(0, ids)
        return any(allowed[end] for end in self.config.eos_token_ids)

    def prompt_logprobs(self, prompt: Prompt, top: int = 0) -> list[Logprob | None]:
        """Of every token of a prompt its log-probability, given those before it, and the `top` most probable ids.

        Of the model's own distribution, as of `Completion.logprobs`; None for the first token, which nothing precedes.
        prompt: as of `encode`, but it may fill the context. Answers go on beside it. Raises what `encode` raises;
        UsageError for a `top` that is not 0 to MOST_LOGPROBS; PpsdError over ranks, where memory is lacking, and where
        the model's output is not a number.
        """
        if not 0 <= whole_number("top", top) <= MOST_LOGPROBS:
            raise UsageError(f"top must be from 0 to {MOST_LOGPROBS}, not {quoted(top)}")
        return [None, *self.backend.logprobs(self._ids(prompt), top)]

    def check(self, params: SamplingParams | None) -> SamplingParams:
        """Those, or the default ones. UsageError for sampling that this backend, or this model, cannot do."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise UsageError(f"params must be SamplingParams(...), not {quoted(params)}")
        if lacking := [name for name in params.extras() if name not in self.backend.extras]:
            raise UsageError(
                f"several GPUs in one process decode greedily or at a temperature, without {lacking[0]}: leave it out, "
                "name one GPU, or give each a process with --ranks"
            )
        wrong = [id for id in dict(params.logit_bias) if not 0 <= id < self.config.vocab_size]
        if wrong:
            raise UsageError(f"logit_bias: id {wrong[0]} is outside the vocabulary of {self.config.vocab_size}")
        return params

    def stages(self, params: SamplingParams | None = None) -> Stages:
        """The stages for a loop of your own. They have KV caches of their own: this engine's answers go on beside it.

        params: how tokens are chosen; where the answer ends is the loop's to say. They keep the exit head of now.
        Raises UsageError on a backend that has none to give, and PpsdError where memory or threads are lacking.
        """
        return Stages(self.backend, self.config, self.encode, self.name, self.check(params))


class _Closed:
    """In the place of what a closed engine had."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, _: str) -> NoReturn:
        raise PpsdError(f"the engine of {self._name} is closed: load the model again")


def open_model(model: str, backend: str) -> tuple[Checkpoint, Tokenizer]:
    """A model by any of its names, for a backend; opened, not read."""
    if model.startswith(random_weights.PREFIX):
        if backend != "cuda":
            raise UsageError(f"{model} has random weights, which are drawn on a GPU: use --backend cuda")
        return random_weights.random_model(model)
    folder = resolve_model(model)
    checkpoint = Checkpoint(folder)
    return checkpoint, load_tokenizer(folder, checkpoint.config.vocab_size, checkpoint.gguf)
