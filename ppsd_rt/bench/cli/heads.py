"""`ppsd-run heads`: exit heads side by side: how often they are right, what a draft costs, the speed to expect.

The acceptance is that of the real loop; what drafts cost is measured; the speed follows from both.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from ...cli.common import NamedPrompt, as_chat, engine_of
from ...cli.progress import progress_bar
from ...cpu.backend import CpuBackend
from ...engine import Engine
from ...errors import UsageError
from ...pipeline.price import best_length, expected_speed, measured_price
from ...sampling.params import SamplingParams
from ...statistics import Statistics
from ..generate import total
from ..plot import Line, PlotFile
from ..report import Report, columns
from ..spread import take_turns
from .bench import interrupted, print_report, result_file, run_facts
from .prompt_files import first_of_each_family, read_prompts

WARM = 0.8  # the temperature at which shared noise is looked at besides greedy drafting

COLUMNS = columns(
    name="head", kind="kind", exit_layer="exit", vocabulary="vocabulary", dtype="dtype", acceptance="acceptance|3",
    by_position="1st / 2nd / .. draft", warm=f"T = {WARM}|3", draft_cost="draft / plain|3", length="best length",
    per_pass="tokens a pass|2", speed="predicted x plain|2"
)  # fmt: skip


@dataclass
class HeadMeasure:
    """survival[i]: share of the verification passes in which the first i + 1 drafts were all accepted. draft_cost: what
    a draft and its row add to a round, in plain steps."""

    name: str
    kind: str
    exit_layer: int
    vocabulary: int
    dtype: str
    acceptance: float
    warm: float
    by_position: list[float]
    by_family: dict[str, float]
    survival: list[float]
    draft_cost: float

    @property
    def length(self) -> int:
        """The fixed draft length that is predicted to be fastest; 0: plain decoding is."""
        return best_length(self.survival, self.draft_cost)[1]

    @property
    def per_pass(self) -> float:
        return 1 + sum(self.survival[: self.length])

    @property
    def speed(self) -> float:
        """Predicted, against plain decoding, drafting and verifying in turns."""
        return best_length(self.survival, self.draft_cost)[0]

    def as_row(self) -> dict[str, Any]:
        places = " / ".join(f"{share:.2f}" for share in self.by_position)
        return {**self.as_dict(), "by_position": places, "vocabulary": self.vocabulary or "all"}

    def as_dict(self) -> dict[str, Any]:
        figures = asdict(self) | {"length": self.length, "per_pass": self.per_pass, "speed": self.speed}
        del figures["survival"]
        return figures


def measure_head(
    engine: Engine,
    name: str,
    prompts: Sequence[NamedPrompt],
    max_tokens: int,
    length: int,
    progress: Callable[[int], None],
) -> tuple[HeadMeasure | None, bool]:
    """Answer every prompt greedily and warm, in rounds of `length` drafts; then measure what these cost.

    The figures, and whether they are of all prompts: Ctrl-C ends the answers, and that is measured then, unless there
    is no answer yet.
    """
    head, backend = engine.head, engine.backend
    assert head is not None
    assert isinstance(backend, CpuBackend)
    families, warm_answers = dict[str, list[Statistics]](), list[Statistics]()

    def measure_prompt(number: int) -> None:
        prompt = prompts[number]
        progress(number)
        asked = as_chat(engine, prompt.prompt, raw=False)
        for params, answers in (
            (SamplingParams(max_tokens=max_tokens), families.setdefault(prompt.family, [])),
            (SamplingParams(max_tokens=max_tokens, temperature=WARM, seed=number), warm_answers),
        ):
            answers.append(engine.generate(asked, params, f"eesd:length={length},stop_rule=fixed").run().statistics)

    whole = take_turns(range(len(prompts)), 1, measure_prompt)
    greedy, warm = total([*chain.from_iterable(families.values())]), total(warm_answers)
    if not whole and not greedy.rounds:
        return None, False
    # How many rounds got so far: of draft n those whose first n drafts were all accepted.
    reached = [max(greedy.rounds, 1), *(count for _, count in sorted(greedy.accepted_by_position.items()))]
    measure = HeadMeasure(
        name=name,
        kind=head.kind,
        exit_layer=head.exit_layer,
        vocabulary=backend.draft_vocabulary,
        dtype=backend.dtype,
        acceptance=greedy.acceptance or 0.0,
        warm=warm.acceptance or 0.0,
        by_position=[now / max(before, 1) for before, now in pairwise(reached)],
        by_family={family: total(answers).acceptance or 0.0 for family, answers in families.items()},
        survival=[greedy.accepted_by_position[place] / reached[0] for place in range(1, length + 1)],
        draft_cost=measured_price(engine, length),
    )
    return measure, whole


def lines_of(measures: Sequence[HeadMeasure]) -> list[Line]:
    """Acceptance against the cost of a draft, and for some speeds the acceptance that reaches it at that cost."""
    dearest = max(0.2, *(measure.draft_cost for measure in measures)) * 1.1
    costs = [dearest * i / 24 for i in range(25)]
    lines = []
    for speed in (1.2, 1.5, 2.0, 2.5):
        needed = [(cost, _needed(cost, speed)) for cost in costs]
        points = [(cost, acceptance) for cost, acceptance in needed if acceptance is not None]
        if points:
            lines.append(Line(f"{speed:g} times plain", points, dashed=True))
    return lines + [Line(m.name, [(m.draft_cost, m.acceptance)]) for m in measures]


def _needed(draft_cost: float, speed: float) -> float | None:
    """The acceptance, alike in every place, from which drafts of this cost reach `speed` at their best length."""
    low, high = 0.0, 1.0
    if expected_speed(high, draft_cost) < speed:
        return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if expected_speed(middle, draft_cost) >= speed else (middle, high)
    return high


def run(args: argparse.Namespace) -> int:
    file = result_file(args)
    prompts = first_of_each_family(read_prompts(args.prompts), args.limit)
    plot = PlotFile(args.plot, [args.prompts, args.model, *args.heads]) if args.plot else None
    measures: list[HeadMeasure] = []
    whole = True
    engines = {name: engine_of(args, exit_head=name, backend="cpu", device="cpu") for name in args.heads}
    if none := [name for name, engine in engines.items() if engine.head is None]:
        raise UsageError(f"{none[0]} is no exit head: nothing can be drafted")
    with progress_bar("drafting") as advance:
        for number, (name, engine) in enumerate(engines.items()):
            done = number * len(prompts)

            def tick(prompt: int, done: int = done) -> None:
                advance(done + prompt, len(engines) * len(prompts))

            measure, whole = measure_head(engine, _short(name), prompts, args.max_tokens, args.length, tick)
            measures += [measure] if measure else []
            if not whole:
                break
    if not measures:
        raise KeyboardInterrupt
    first = engines[args.heads[0]].backend
    facts = run_facts("heads", args.model) | {"dtype": first.dtype, "threads": first.threads, "prompts": len(prompts)}
    title = f"{len(prompts)} prompts, up to {args.max_tokens} tokens, drafts of {args.length}: {first.dtype}"
    best = max(measures, key=lambda measure: measure.speed)
    summary: dict[str, Any] = {"interrupted": not whole, "best": best.name, "predicted_speed": round(best.speed, 3)}
    summary["results"] = [measure.as_dict() for measure in measures]
    print_report(Report(title, COLUMNS, [m.as_row() for m in measures], facts, summary), args.output, file)
    if plot:
        title = "Exit heads: greedy, drafting and verifying in turns"
        plot.finish(title, "time that a draft adds / time of a plain step", "acceptance", lines_of(measures))
    return 0 if whole else interrupted()


def _short(name: str) -> str:
    """Of a file, a folder or a hub name, what is last in it."""
    return Path(name).name.removesuffix(".safetensors")
