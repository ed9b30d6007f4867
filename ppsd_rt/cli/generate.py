"""`ppsd-run "prompt"`: generate, from an argument, standard input, a file of prompts, or in a conversation."""

import argparse
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

from ..backend import RunOptions
from ..engine import Engine
from ..errors import PpsdError, UsageError
from ..generation import Completion, Generation
from ..pipeline.schedule import PLAIN, Auto, Schedule, parse_schedule
from ..sampling.params import SamplingParams
from ..statistics import Statistics
from ..trace import TraceFile, occupancy
from . import chat, signals
from .common import (
    MOST_BYTES,
    as_chat,
    check_text,
    load_engine,
    not_readable,
    note_plain,
    print_json,
    read_prompts,
    sampling_params,
    statistics_line,
)
from .notes import complain, note
from .prompt_bar import PromptBar

_APART = (
    ("chat", "prompts"),
    ("chat", "json"),
    ("chat", "raw"),
    ("json", "show_drafts"),
    ("quiet", "explain"),
)


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    schedule = parse_schedule(args.schedule)
    _check_combination(args)
    prompts = _prompts(args)
    inputs = args.prompts, args.exit_head, args.model
    with TraceFile(args.trace, inputs) if args.trace else nullcontext() as trace:
        return _run(args, prompts, params, schedule, trace)


def _run(
    args: argparse.Namespace,
    prompts: list[tuple[str | None, str]],
    params: SamplingParams,
    schedule: Schedule | Auto,
    trace: TraceFile | None,
) -> int:
    engine = load_engine(args)
    if args.exit_head in ("auto", "none") and engine.head is None and isinstance(schedule, Auto) and not args.json:
        drafts = engine.backend.copies and schedule.copies
        how = "only repetitions and what usually follows are drafted" if drafts else "decoding plainly"
        note(
            f"{args.model} has no exit head: {how} (`ppsd-run distill` makes one in hours, with --kind ngram a table "
            "of what follows in minutes)"
        )
    if args.chat:
        return _chat(engine, params, schedule, args, trace)
    note_plain(engine, args.raw)
    encoded = [(id, _encode(engine, text, id, args)) for id, text in prompts]  # all, before the first is answered
    answered: Counter[tuple[int, ...]] = Counter()  # prompts that are the same are several answers to one
    for id, ids in encoded:
        same = tuple(ids)
        generation = engine.generate(ids, replace(params, index=answered[same]), schedule, _options(args))
        answered[same] += 1
        if not _answer(engine, generation, args, id, trace):
            return signals.status()
    return 0


def _encode(engine: Engine, text: str, id: str | None, args: argparse.Namespace) -> list[int]:
    try:
        return engine.encode(as_chat(engine, text, args.raw, args.system))
    except UsageError as error:
        raise UsageError(str(error) if id is None else f"prompt {id}: {error}") from None


def _options(args: argparse.Namespace) -> RunOptions:
    shows = not args.quiet and not args.show_drafts and sys.stderr is not None and sys.stderr.isatty()
    bar = PromptBar() if shows else None
    return RunOptions(report_drafts=args.show_drafts, trace=args.trace is not None, prompt_progress=bar)


def _check_combination(args: argparse.Namespace) -> None:
    for first, second in _APART:
        if getattr(args, first) and getattr(args, second):
            raise UsageError(f"--{first} does not go with --{second}".replace("_", "-"))
    if args.prompt is not None and (args.prompts or args.chat):
        raise UsageError("give a prompt, or --prompts, or --chat: not two of them")
    if args.logprobs is not None and not args.json:
        raise UsageError("--logprobs needs --json, which shows them")
    if args.chat and sys.stdin is None:
        raise UsageError("--chat reads standard input, which is closed")
    if args.show_drafts and not (sys.stdout and sys.stdout.isatty()):
        raise UsageError("--show-drafts colours text as it changes: it needs a terminal")


def _prompts(args: argparse.Namespace) -> list[tuple[str | None, str]]:
    """(id, text) of every prompt that was asked for."""
    if args.chat:
        return []
    if args.prompts:
        return [(prompt.id, prompt.prompt) for prompt in read_prompts(args.prompts)]
    return [(None, only_prompt(args.prompt))]


def only_prompt(given: str | None, command: str = "ppsd-run") -> str:
    """The argument; `-` or none: standard input."""
    if given not in (None, "-"):
        return given
    if sys.stdin is None or (given is None and sys.stdin.isatty()):
        raise UsageError(f'no prompt; write {command} "Why is the sky blue?", or see {command} --help')
    return _read_all()


def _read_all() -> str:
    try:
        text = sys.stdin.read(MOST_BYTES + 1)
    except UnicodeDecodeError as error:
        raise not_readable(error) from None
    except OSError as error:
        raise UsageError(f"standard input cannot be read: {error.strerror}") from None
    if len(text) > MOST_BYTES:
        raise UsageError("standard input does not end: no prompt is that long")
    return text


def _answer(
    engine: Engine, generation: Generation, args: argparse.Namespace, id: str | None, trace: TraceFile | None
) -> bool:
    """Print one answer and its statistics. False when it was interrupted; what there is by then is printed."""
    try:
        finished = _print_text(engine, generation, args)
    except PpsdError:  # such as a rank that died: what is committed stays
        _print_rest(generation, args, id)
        raise
    if trace:
        spans = engine.backend.spans()
        clocks = _clocks(engine)
        trace.add(spans, id or "", clocks)
        if spans and not args.json:
            note(str(occupancy(spans)))
            if clocks:
                error = max(error for _, error in clocks.values())
                note(f"clocks of the ranks: put on rank 0's, at most {error:.0f} us off")
    completion = generation.completion
    compared: Statistics | None = None
    problem: PpsdError | None = None
    if args.compare and finished:
        try:
            compared = _compare(engine, completion, generation.params)
        except KeyboardInterrupt:
            finished = False
            complain(f"ppsd-run: {signals.said()}; the answer is whole, the comparison is missing")
        except PpsdError as error:
            problem = error  # what has been decoded is printed first
    if args.json:
        print_json(_as_json(completion, id, compared))
    else:
        note(statistics_line(completion.statistics, compared))
    if args.explain:
        nothing = "nothing to explain: --schedule auto plans, and only where there is an exit head"
        for line in (engine.backend.explain() or nothing).splitlines():
            note(line)
    if problem is not None:
        raise problem
    return finished


def _clocks(engine: Engine) -> dict[int, tuple[float, float]]:
    """Of the other ranks, as `TraceFile.add` takes them; of one process there are none."""
    clocks: dict[int, Any] = getattr(engine.backend, "clocks", dict)()
    return {rank: (clock.offset / 1000, clock.error / 1000) for rank, clock in clocks.items()}


def _print_text(engine: Engine, generation: Generation, args: argparse.Namespace) -> bool:
    printed = 0  # characters
    try:
        if args.json:
            generation.run()
        elif args.show_drafts:
            from .drafts import show_drafts  # with rich, which takes longer to import than a small model to answer

            show_drafts(engine, generation)
        else:
            for token in generation:
                print(token.text, end="", flush=True)
                printed += len(token.text)
            print(flush=True)  # before the statistics, which go another way
    except KeyboardInterrupt:
        generation.close()
        if not args.json:  # with what was held back: the statistics, and a chat's history, count it
            print("" if args.show_drafts else generation.completion.text[printed:], flush=True)
        return False
    return True


def _print_rest(generation: Generation, args: argparse.Namespace, id: str | None) -> None:
    """What an answer that cannot go on has committed, and has not been printed yet."""
    generation.close()
    if args.json:
        print_json(_as_json(generation.completion, id, None))
    elif not args.show_drafts:
        print(generation.rest(), flush=True)


def _compare(engine: Engine, completion: Completion, params: SamplingParams) -> Statistics:
    """Decode the same prompt plainly; the ids must be the same, or this project has a bug."""
    plain = engine.generate(completion.prompt_ids, params, PLAIN).run()
    if plain.ids != completion.ids:
        raise PpsdError("the answer differs from plain decoding: this is a bug; `ppsd-run check` shows where")
    return plain.statistics


def _as_json(completion: Completion, id: str | None, compared: Statistics | None) -> dict[str, object]:
    stats = completion.statistics.as_dict()
    if compared is not None:
        stats["plain"] = compared.as_dict()
    logprobs = {"logprobs": [asdict(logprob) for logprob in completion.logprobs]} if completion.logprobs else {}
    return {
        "id": id,
        "prompt_ids": completion.prompt_ids,
        "ids": completion.ids,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        **logprobs,
        "stats": stats,
    }


def _chat(
    engine: Engine,
    params: SamplingParams,
    schedule: Schedule | Auto,
    args: argparse.Namespace,
    trace: TraceFile | None,
) -> int:
    """A conversation: the history is sent with every turn, and the KV cache keeps what has not changed."""
    if engine.tokenizer.chat_template is None:
        raise PpsdError(f"{args.model} has no chat template; --chat needs one")
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages = list(system)
    if args.system is not None:
        check_text(args.system, "--system")
    typed = chat.on_terminal()
    if typed:
        note("/help shows what can be typed; Ctrl-C stops an answer; Ctrl-D ends")
    turn = chat.next_turn(typed)
    whole = True
    while True:
        try:
            text = turn()
            if text is None:
                break
            if text == chat.RESET:
                messages = list(system)
            if text in ("", chat.RESET):
                continue
            check_text(text)
            asked = [*messages, {"role": "user", "content": text}]
            generation = engine.generate(asked, params, schedule, _options(args))
        except PpsdError as error:
            complain(f"ppsd-run: {error} (this turn was dropped; /reset forgets the conversation)")
            whole = False
            continue
        if not _answer(engine, generation, args, None, trace) and not signals.resume():
            return signals.status()
        messages = [*asked, {"role": "assistant", "content": generation.completion.text}]
    return 0 if whole or typed else 2
