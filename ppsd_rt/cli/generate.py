"""`ppsd-run "prompt"`: generate, from an argument, files, standard input, or a file of prompts."""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from logging import WARNING, getLogger
from pathlib import Path

from ..backend import RunOptions
from ..engine import Engine
from ..errors import PpsdError, UsageError
from ..generation import Committed, Completion, Generation
from ..many import Generations
from ..pipeline.schedule import Auto, Schedule, parse_schedule
from ..printable import printable
from ..sampling.params import SamplingParams
from ..trace import TraceFile, occupancy
from . import signals
from .commands import prompt_reader
from .common import (
    NamedPrompt,
    as_chat,
    counted,
    kept_prompts,
    load_engine,
    note_plain,
    only_prompt,
    print_json,
    sampling_params,
    statistics_line,
)
from .compare import Comparison, compare, said, together
from .notes import complain, note
from .progress import PromptBar

_APART = (("chat", "prompts"), ("chat", "json"), ("chat", "raw"), ("json", "show_drafts"), ("quiet", "explain"))
_ONE_BY_ONE = ("compare", "explain", "show_drafts", "trace", "learn")  # of a file's prompts


def run(args: argparse.Namespace) -> int:
    if args.completion:
        import argcomplete

        print(argcomplete.shellcode(["ppsd-run"], shell=args.completion), end="")
        return 0
    params = sampling_params(args)
    schedule = parse_schedule(args.schedule)
    _check_combination(args)
    prompts = _prompts(args)
    inputs = args.prompts, args.exit_head, args.model
    with TraceFile(args.trace, inputs) if args.trace else nullcontext() as trace:
        engine = load_engine(args)
        with kept_prompts(engine, Path(args.prompt_cache) if args.prompt_cache else None):
            return _run(_Output(engine, args, schedule, trace), prompts, params)


def _run(output: "_Output", prompts: list[tuple[str | int | None, str | NamedPrompt]], params: SamplingParams) -> int:
    engine, args, schedule = output.engine, output.args, output.schedule
    if args.exit_head in ("auto", "none") and engine.head is None and isinstance(schedule, Auto) and not args.json:
        drafts = engine.backend.copies and schedule.copies
        how = "only repetitions and what usually follows are drafted" if drafts else "decoding plainly"
        mend = "(`ppsd-run distill` makes one in hours, with --kind ngram a table of what follows in minutes)"
        note(f"{args.model} has no exit head: {how} {mend}")
    if args.chat:
        from .conversation import converse

        getLogger("ppsd_rt.learning").setLevel(WARNING)  # its notes would stand in what is typed
        return converse(engine, params, schedule, args, lambda: run_options(args), output.answer)
    note_plain(engine, args.raw)
    encoded = [(id, _encode(engine, text, id, args)) for id, text in prompts]  # all, before the first is answered
    answered: Counter[tuple[int, ...]] = Counter()  # prompts that are the same are several answers to one
    indices: list[int] = []
    for _, ids in encoded:
        indices.append(answered[tuple(ids)])
        answered[tuple(ids)] += 1

    def begin(number: int, options: RunOptions) -> Generation:
        return engine.generate(encoded[number][1], replace(params, index=indices[number]), schedule, options)

    names = [id for id, _ in encoded]
    answers: list[Completion] = []
    if len(encoded) > 1 and engine.backend.name == "cpu" and not any(getattr(args, name) for name in _ONE_BY_ONE):

        def show(number: int, whole: Completion) -> None:
            output.whole(whole, names[number], number)
            answers.append(whole)

        if not answer_all(engine, [begin(number, RunOptions()) for number in range(len(encoded))], show):
            return signals.status()
    else:
        for number, id in enumerate(names):
            generation = begin(number, run_options(args))
            output.name(id, number)
            if not output.answer(generation, id):
                return signals.status()
            answers.append(generation.completion)
        if len(compared := output.comparisons) > 1 and not args.json and (ratio := said([*together(compared)])):
            note(f"{len(compared)} answers: {ratio}")
    _tell_of_cut(engine, answers, params)
    return 0


def answer_all(engine: Engine, asked: Sequence[Generation], show: Callable[[int, Completion], None]) -> bool:
    """Side by side; printed in their order, each when it is whole. False when it was interrupted; those that had begun
    are printed too."""
    shown = 0

    def show_whole() -> None:
        """Those up to one that has not ended."""
        nonlocal shown
        while shown < len(asked) and asked[shown].completion.finish_reason != "cancelled":  # as it is until then
            show(shown, asked[shown].completion)
            shown += 1

    try:
        with Generations(asked, engine.backend.concurrency) as generations:
            for number, event in generations.events():
                if number == shown and isinstance(event, Committed):
                    show_whole()
    except KeyboardInterrupt:
        for number in range(shown, len(asked)):
            if asked[number].completion.ids:
                show(number, asked[number].completion)
        left = sum(one.completion.finish_reason == "cancelled" for one in asked)
        complain(f"ppsd-run: {signals.said()}; {left} of {len(asked)} prompts are left")
        return False
    except PpsdError:
        show_whole()
        raise
    show_whole()
    return True


def _tell_of_cut(engine: Engine, answers: list[Completion], params: SamplingParams) -> None:
    """PpsdError where a grammar was not at its end: what reads the answers expects whole ones."""
    cut = [one for one in answers if one.finish_reason in ("length", "context")]
    what = "the answer was" if len(answers) == 1 else f"{len(cut)} of {len(answers)} answers were"
    full = any(one.finish_reason == "context" for one in cut)
    where = f"at {counted(params.max_tokens or 0, 'token')} (-n): -n -1 has no limit"
    if full:
        where = f"where the context of {engine.config.max_position_embeddings} tokens, or its memory, was full"
    if params.grammar and any(not engine.fulfils(params.grammar, one.ids) for one in cut):
        raise PpsdError(f"{what} cut {where}; by then the grammar could not end")
    if full:  # who gave -n knows
        note(f"{what} cut {where}")


def _encode(engine: Engine, given: str | NamedPrompt, id: str | int | None, args: argparse.Namespace) -> list[int]:
    try:
        return engine.encode(as_chat(engine, given, args.raw, args.system))
    except UsageError as error:
        raise UsageError(str(error) if id is None else f"prompt {id}: {error}") from None


def run_options(args: argparse.Namespace) -> RunOptions:
    shown = not args.quiet and not args.show_drafts and sys.stderr is not None and sys.stderr.isatty()
    return RunOptions(
        report_drafts=args.show_drafts, trace=args.trace is not None, prompt_progress=PromptBar(shown=shown)
    )


def _check_combination(args: argparse.Namespace) -> None:
    for first, second in _APART:
        if getattr(args, first) and getattr(args, second):
            raise UsageError(f"--{first} does not go with --{second}".replace("_", "-"))
    if (args.prompt is not None or args.file) and (args.prompts or args.chat):
        raise UsageError("give a prompt (with -f its files), or --prompts, or --chat (/file there): not two of them")
    if args.quiet and args.compare and not args.json:
        raise UsageError("--quiet does not go with --compare, but for --json")
    if args.logprobs is not None and not args.json:
        raise UsageError("--logprobs needs --json, which shows them")
    if args.chat and sys.stdin is None:
        raise UsageError("--chat reads standard input, which is closed")
    if args.show_drafts and not (sys.stdout and sys.stdout.isatty()):
        raise UsageError("--show-drafts colours text as it changes: it needs a terminal")


def _prompts(args: argparse.Namespace) -> list[tuple[str | int | None, str | NamedPrompt]]:
    """(id, text) of every prompt that was asked for."""
    if args.chat:
        return []
    if args.prompts:
        return [(prompt.id, prompt) for prompt in prompt_reader()(args.prompts)]
    return [(None, only_prompt(args.prompt, args.file))]


@dataclass
class _Output:
    """Prints answers and their statistics. comparisons: those of --compare so far."""

    engine: Engine
    args: argparse.Namespace
    schedule: Schedule | Auto
    trace: TraceFile | None
    comparisons: list[Comparison] = field(default_factory=list)

    def name(self, id: str | int | None, number: int) -> None:
        if id is not None and not self.args.json:
            print("\n" * (number > 0) + f"==> {printable(str(id))} <==", flush=True)

    def whole(self, completion: Completion, id: str | int | None, number: int) -> None:
        """Prints an answer that nobody saw being made."""
        self.name(id, number)
        if self.args.json:
            print_json(self._as_json(completion, id))
        else:
            print(completion.text, flush=True)
            note(statistics_line(completion))

    def answer(self, generation: Generation, id: str | int | None = None) -> bool:
        """False when it was interrupted; what there is by then is printed."""
        args, engine = self.args, self.engine
        finished = False
        try:
            self._print_text(generation)
            finished = True
        except KeyboardInterrupt:
            generation.close()
        except PpsdError:  # such as a rank that died: what is committed stays
            generation.close()
            if args.json:
                print_json(self._as_json(generation.completion, id))
            raise
        if self.trace:
            spans = engine.backend.spans()
            self.trace.add(spans, "" if id is None else str(id))
            if spans and not args.json:
                note(str(occupancy(spans)))
        completion = generation.completion
        compared: Comparison | None = None
        problem: PpsdError | None = None
        if args.compare and finished:
            try:
                compared = compare(engine, completion, generation.params, self.schedule, printed=not args.json)
                self.comparisons.append(compared)
            except KeyboardInterrupt:
                finished = False
                complain(f"ppsd-run: {signals.said()}; the answer is whole, the comparison is missing")
            except PpsdError as error:
                problem = error  # what has been decoded is printed first
        if args.json:
            print_json(self._as_json(completion, id, compared))
        elif args.chat or finished or completion.ids:
            note(statistics_line(completion, said(compared.turns) if compared else "", short=args.chat))
        if not finished and not completion.ids:
            done, total = getattr(generation.options.prompt_progress, "rows", (0, 0))
            total = total or len(completion.prompt_ids)
            complain(f"ppsd-run: {signals.said()} while reading the prompt ({done} of {total} tokens)")
        if args.explain:
            nothing = "nothing to explain: --schedule auto plans, and only where there is an exit head"
            for line in (engine.backend.explain() or nothing).splitlines():
                note(line)
        if problem is not None:
            raise problem
        return finished

    def _print_text(self, generation: Generation) -> None:
        """Prints the answer. If it ends early, this is all that is committed; but as JSON nothing."""
        args = self.args
        if args.json:
            generation.run()
        elif args.show_drafts:
            from .rendering import show_drafts  # with rich, which takes longer to import than a small model to answer

            show_drafts(self.engine, generation)
        elif sys.stdout and sys.stdout.isatty():
            from .rendering import show

            show(generation, markdown=not args.plain and not args.raw)
        else:
            printed = 0  # characters
            try:
                for token in generation:
                    print(token.text, end="", flush=True)
                    printed += len(token.text)
            finally:  # with what was held back: the statistics, and a chat's history, count it
                generation.close()
                print(generation.completion.text[printed:], flush=True)  # before the statistics, which go another way

    def _as_json(
        self, completion: Completion, id: str | int | None, compared: Comparison | None = None
    ) -> dict[str, object]:
        stats = completion.statistics.as_dict()
        if compared is not None:
            stats["plain"] = compared.plain.as_dict()
            stats["turns"] = [{"seconds": fast, "plain_seconds": plain} for fast, plain in compared.turns]
        same = ("prompt_ids", "ids", "text", "finish_reason", "seed")
        logprobs = {"logprobs": list(self._logprobs(completion))} if completion.logprobs else {}
        return {"id": id, **{name: getattr(completion, name) for name in same}, **logprobs, "stats": stats}

    def _logprobs(self, completion: Completion) -> Iterator[dict[str, object]]:
        """Each token's entry: its text as it stands alone, which may be a part of a character."""

        def one(id: int, logprob: float) -> dict[str, object]:
            text = self.engine.tokenizer.token_bytes(id).decode(errors="replace")
            return {"id": id, "text": text, "logprob": logprob}

        for id, logprob in zip(completion.ids, completion.logprobs, strict=True):
            yield {**one(id, logprob.logprob), "top": [one(*top) for top in logprob.top]}
