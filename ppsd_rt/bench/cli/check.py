"""`ppsd-run check`: plain and speculative decoding side by side over many prompts; every id must be the same."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from ...backend import common_prefix
from ...cli.common import NamedPrompt, as_chat, load_engine, load_one_process, print_json
from ...cli.notes import complain
from ...cli.progress import progress_bar
from ...engine import Engine
from ...errors import PpsdError, UsageError
from ...models.head_file import EAGLE3
from ...pipeline.schedule import PLAIN, Auto, Schedule, parse_schedule
from ...printable import quoted
from ...sampling.params import SamplingParams
from ...statistics import Statistics
from ..generate import total
from ..report import Report, columns
from .bench import interrupted, print_report
from .prompt_files import first_of_each_family, read_prompts

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
)

COLUMNS = columns(
    sampling="sampling", schedule="schedule", answers="answers", tokens="tokens", differences="differences",
    acceptance="acceptance|2", tokens_per_round="tokens per round|2", speed="speed|2"
)  # fmt: skip


@dataclass
class Seen:
    """What was seen of one schedule at one sampling setting."""

    answers: list[Statistics] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


def run(args: argparse.Namespace) -> int:
    samplings = _chosen(args.sampling, SAMPLINGS)
    schedules = {text: parse_schedule(text) for text in (args.schedule or SCHEDULES)}
    default = not args.schedule
    if args.engine is None and all(schedule == PLAIN for schedule in schedules.values()):
        raise UsageError("plain is what schedules are compared with: name others, as in --schedule eesd")
    prompts = first_of_each_family(read_prompts(args.prompts), args.limit)
    engine = load_engine(args)
    if default:
        schedules = {text: schedule for text, schedule in schedules.items() if _fits(engine, schedule)}
    if not schedules:
        raise PpsdError(f"{args.model} has no exit head, so there is nothing to check; give --exit-head")
    plain = engine
    if args.engine is not None:  # over ranks: against plain decoding in one process, and plain is checked too
        plain = load_one_process(args)
        schedules = {"plain over ranks": PLAIN, **schedules}
    seen: dict[tuple[str, str], Seen] = {}
    whole, done, total = True, count(1), len(prompts) * len(samplings) * (1 + len(schedules))
    with progress_bar("checking", transient=True) as advance:
        try:
            for prompt in prompts:
                _check(engine, plain, prompt, samplings, schedules, args, seen, lambda: advance(next(done), total))
        except KeyboardInterrupt:
            if not seen:
                raise
            whole = False
    status = _report(seen, args, whole)
    return status if whole else interrupted()


def _fits(engine: Engine, schedule: Schedule | Auto) -> bool:
    """Can this model and backend run it? (`auto` always can, but has nothing to show without a head and copies.)"""
    if isinstance(schedule, Auto):
        return engine.head is not None or engine.backend.copies
    able = (engine.backend.copies or not schedule.copies) and not (
        schedule.overlap and engine.head is not None and engine.head.kind == EAGLE3
    )
    return able and (engine.head is not None or not schedule.drafts)


def _check(
    engine: Engine,
    reference: Engine,
    prompt: NamedPrompt,
    samplings: dict[str, SamplingParams],
    schedules: dict[str, Schedule | Auto],
    args: argparse.Namespace,
    seen: dict[tuple[str, str], Seen],
    tick: Callable[[], None],
) -> None:
    """All answers to a prompt, each beside the plain one, which `reference` gives. tick: after each of them."""
    ids = engine.encode(as_chat(engine, prompt.prompt, args.raw))
    for sampling, params in samplings.items():
        params = replace(params, max_tokens=args.max_tokens)
        plain = reference.generate(ids, params, PLAIN).run()
        seen.setdefault((sampling, "plain"), Seen()).answers.append(plain.statistics)
        tick()
        for name, schedule in schedules.items():
            completion = engine.generate(ids, params, schedule).run()
            its = seen.setdefault((sampling, name), Seen())
            its.answers.append(completion.statistics)
            tick()
            if plain.ids != completion.ids:
                place, (plain_id, id), (plain_logit, logit) = departure(reference, ids, plain.ids, completion.ids)
                its.differences.append(
                    f"{prompt.id}, {sampling}, {name}: at token {place} plain decoding gives {plain_id} (logit "
                    f"{plain_logit}), this schedule {id} (logit {logit})"
                )
                complain(f"DIFFERENT {its.differences[-1]}")


def departure(
    engine: Engine, prompt: Sequence[int], plain: Sequence[int], ids: Sequence[int]
) -> tuple[int, list[int | None], list[float | None]]:
    """Where an answer departs from the plain one, both ids there, and what plain decoding's logits say of them."""
    place = common_prefix(plain, ids)
    both = [answer[place] if place < len(answer) else None for answer in (plain, ids)]
    logits = engine.backend.logits([*prompt, *plain[:place]])[-1]
    return place, both, [None if id is None else float(logits[id]) for id in both]


def _report(seen: dict[tuple[str, str], Seen], args: argparse.Namespace, whole: bool) -> int:
    differences = [difference for its in seen.values() for difference in its.differences]
    answers = sum(len(its.answers) for (_, schedule), its in seen.items() if schedule != "plain")
    plain = {sampling: its for (sampling, schedule), its in seen.items() if schedule == "plain"}
    rows = []
    for (sampling, schedule), its in seen.items():
        sums, plain_sums = total(its.answers), total(plain[sampling].answers)
        rows.append(
            {
                "sampling": sampling,
                "schedule": schedule,
                "answers": len(its.answers),
                "tokens": sums.tokens,
                "differences": len(its.differences),
                "acceptance": sums.acceptance,
                "tokens_per_round": (sums.tokens - len(its.answers)) / sums.rounds if sums.rounds else None,
                "speed": plain_sums.decode_seconds / sums.decode_seconds if sums.decode_seconds else None,
            }
        )
    if args.json:
        print_json({"answers": answers, "differences": differences, "interrupted": not whole, "rows": rows})
    else:
        print_report(Report("", COLUMNS, rows, {}), "table")
        print(f"{len(differences)} differences from plain decoding in {answers} answers")
    return 1 if differences else 0


def _chosen(names: str | None, known: dict[str, SamplingParams]) -> dict[str, SamplingParams]:
    chosen = names.split(",") if names else list(known)
    for name in chosen:
        if name not in known:
            raise UsageError(f"sampling setting {quoted(name)} is unknown; settings are {', '.join(known)}")
    return {name: known[name] for name in chosen}
