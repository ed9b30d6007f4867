"""`ppsd-run check`: plain and speculative decoding side by side over many prompts; every id must be the same."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.progress import Progress

from ...backend import common_prefix
from ...cli.common import as_chat, load_engine, load_one_process, print_json, table
from ...cli.notes import complain
from ...cli.prompts import NamedPrompt
from ...engine import Engine
from ...errors import PpsdError, UsageError
from ...models.head_file import EAGLE3
from ...pipeline.schedule import PLAIN, Auto, Schedule, parse_schedule
from ...printable import printable, quoted
from ...sampling.params import SamplingParams
from .bench import interrupted
from .prompt_files import first_of_each_family, read_prompts

Ids = tuple[int, ...]

SAMPLINGS = {
    "greedy": SamplingParams(),
    "warm": SamplingParams(temperature=0.8, seed=1),
    "nucleus": SamplingParams(temperature=1.0, top_k=40, top_p=0.95, seed=2),
    "penalty": SamplingParams(temperature=0.7, min_p=0.05, repetition_penalty=1.1, seed=3),
}
SCHEDULES = (
    "auto",
    "eesd",
    "eesd:stop_rule=fixed",
    "eesd:stop_rule=confidence",
    "eesd:stop_rule=calibrated",
    "eesd:length=12,stop_rule=survival",
    "ppsd",
    "elastic",
    "elastic:stop_rule=beta",
    "lookup",
    "eesd:lookup=1",
    "elastic:lookup=2,stop_rule=survival",
    "recycle",
    "eesd:length=12,recycle=on,stop_rule=survival",
    "eesd:stop_rule=fixed,siblings=0.005",
    "elastic:siblings=0.005,stop_rule=survival",
)


@dataclass(frozen=True)
class Difference:
    """Where an answer first departs from the plain one, and what plain decoding's logits say of both ids."""

    prompt: str | int
    sampling: str
    schedule: str
    position: int
    plain_id: int | None
    id: int | None
    plain_logit: float | None
    logit: float | None

    def __str__(self) -> str:
        return (
            f"{self.prompt}, {self.sampling}, {self.schedule}: at token {self.position} plain decoding gives "
            f"{self.plain_id} (logit {self.plain_logit}), this schedule {self.id} (logit {self.logit})"
        )


@dataclass
class Tally:
    """The answers of one schedule at one sampling setting."""

    sampling: str
    schedule: str
    answers: int = 0
    tokens: int = 0
    accepted: int = 0
    judged: int = 0
    rounds: int = 0
    seconds: float = 0.0
    differences: list[Difference] = field(default_factory=list)


def run(args: argparse.Namespace) -> int:
    if args.tokens is not None or args.case is not None:
        from .campaign import run_campaign

        return run_campaign(args)
    if args.state is not None or args.seed:
        raise UsageError("--state and --seed are for campaigns: give --tokens N")
    if args.limit is not None and args.limit < 1:
        raise UsageError(f"--limit must be at least 1, not {args.limit}")
    samplings = _chosen(args.sampling, SAMPLINGS)
    schedules = {text: parse_schedule(text) for text in (args.schedules.split("/") if args.schedules else SCHEDULES)}
    default = not args.schedules
    if args.engine is None and all(schedule == PLAIN for schedule in schedules.values()):
        raise UsageError("plain is what schedules are compared with: name others, as in --schedules eesd/elastic")
    prompts = first_of_each_family(read_prompts(args.prompts), args.limit)
    engine = load_engine(args)
    if default:
        schedules = {text: schedule for text, schedule in schedules.items() if _fits(engine, schedule)}
    if not schedules:
        raise PpsdError(f"{args.model} has no exit head, so there is nothing to check; give --exit-head")
    plain = engine
    if (
        args.engine is not None
    ):  # over ranks: against plain decoding in one process, and plain over ranks is checked too
        plain = load_one_process(args)
        schedules = {"plain over ranks": PLAIN, **schedules}
    tallies: dict[tuple[str, str], Tally] = {}
    whole = True
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("checking", total=len(prompts) * len(samplings) * (1 + len(schedules)))
        try:
            for tally, difference in _check(engine, plain, prompts, samplings, schedules, args):
                tallies[tally.sampling, tally.schedule] = tally
                progress.advance(task)
                if difference:
                    complain(f"DIFFERENT {difference}")
        except KeyboardInterrupt:
            if not tallies:
                raise
            whole = False
    status = _report(list(tallies.values()), args, whole)
    return status if whole else interrupted()


def _fits(engine: Engine, schedule: Schedule | Auto) -> bool:
    """Can this model and backend run it? (`auto` always can, but has nothing to show without a head and copies.)"""
    if isinstance(schedule, Auto):
        return engine.head is not None or engine.backend.copies
    able = (engine.backend.copies or not schedule.copies) and (engine.backend.siblings or not schedule.siblings)
    able = able and not (schedule.overlap and engine.head is not None and engine.head.kind == EAGLE3)
    return able and (engine.head is not None or not schedule.drafts)


def _check(
    engine: Engine,
    reference: Engine,
    prompts: list[NamedPrompt],
    samplings: dict[str, SamplingParams],
    schedules: dict[str, Schedule | Auto],
    args: argparse.Namespace,
) -> Iterator[tuple[Tally, Difference | None]]:
    """After every answer: its tally, and where it differs from the plain one, which `reference` gives."""
    tallies = {(a, b): Tally(a, b) for a in samplings for b in ("plain", *schedules)}
    for prompt in prompts:
        ids = engine.encode(as_chat(engine, prompt.prompt, args.raw))
        for sampling, params in samplings.items():
            params = replace(params, max_tokens=args.max_tokens)
            plain: Ids = ()
            for name, schedule in {"plain": PLAIN, **schedules}.items():
                completion = (reference if name == "plain" else engine).generate(ids, params, schedule).run()
                plain = completion.ids if name == "plain" else plain
                difference = _difference(reference, ids, plain, completion.ids, prompt.id, sampling, name)
                tally, stats = tallies[sampling, name], completion.statistics
                tally.answers += 1
                tally.tokens += stats.tokens
                tally.accepted += stats.accepted
                tally.judged += stats.judged
                tally.rounds += stats.rounds
                tally.seconds += stats.decode_seconds
                if difference:
                    tally.differences.append(difference)
                yield tally, difference


def _difference(
    engine: Engine,
    prompt: list[int],
    plain: tuple[int, ...],
    ids: tuple[int, ...],
    id: str | int,
    sampling: str,
    schedule: str,
) -> Difference | None:
    if plain == ids:
        return None
    place = common_prefix(plain, ids)
    a, b = (answer[place] if place < len(answer) else None for answer in (plain, ids))
    logits = engine.backend.logits([*prompt, *plain[:place]])[-1]
    values = [None if token is None else float(logits[token]) for token in (a, b)]
    return Difference(id, sampling, schedule, place, a, b, *values)


def _report(tallies: list[Tally], args: argparse.Namespace, whole: bool) -> int:
    differences = [difference for tally in tallies for difference in tally.differences]
    answers = sum(tally.answers for tally in tallies if tally.schedule != "plain")
    plain = {tally.sampling: tally for tally in tallies if tally.schedule == "plain"}
    rows = [
        {
            "sampling": t.sampling,
            "schedule": t.schedule,
            "answers": t.answers,
            "tokens": t.tokens,
            "differences": len(t.differences),
            "acceptance": t.accepted / t.judged if t.judged else None,
            "tokens_per_round": (t.tokens - t.answers) / t.rounds if t.rounds else None,
            "speed": plain[t.sampling].seconds / t.seconds if t.seconds else None,
        }
        for t in tallies
    ]
    if args.json:
        found = {"answers": answers, "differences": [str(d) for d in differences]}
        print_json({**found, "interrupted": not whole, "rows": rows})
    else:
        columns = list(rows[0])
        table(
            "", [c.replace("_", " ") for c in columns], [[printable(_shown(row[c])) for c in columns] for row in rows]
        )
        print(f"{len(differences)} differences from plain decoding in {answers} answers")
    return 1 if differences else 0


def _shown(value: object) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def _chosen(names: str | None, known: dict[str, SamplingParams]) -> dict[str, SamplingParams]:
    chosen = names.split(",") if names else list(known)
    for name in chosen:
        if name not in known:
            raise UsageError(f"sampling setting {quoted(name)} is unknown; settings are {', '.join(known)}")
    return {name: known[name] for name in chosen}
