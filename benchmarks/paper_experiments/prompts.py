"""The papers' own prompts: acceptance, tokens a pass and speed by benchmark, with intervals over the prompts.

The files are not ours to ship: PAPERS_PROMPTS is a folder with some of FILES, a JSON object a line (`id`, `prompt`,
`family`), as `ppsd-run --prompts` reads them. `prompts`: on the default model with the head that ships, in int8.
`prompts_1.5b`: a fifth of them, on Qwen2.5-Coder-1.5B with its own head, in int4.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from statistics import median
from typing import Any

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.bench.cli.prompt_files import first_of_each_family, read_prompts
from ppsd_rt.bench.closed_forms import Pipeline
from ppsd_rt.bench.simulate import simulate
from ppsd_rt.pipeline.schedule import parse_schedule

from .experiment import Experiment, Found, Parts, given, interval, markdown

FILES = {"SPD's 240": "spd_240.jsonl", "Spec-Bench's 480": "spec_bench_480.jsonl"}
WAYS = {"Beta-TS": "eesd:stop_rule=beta", "paying": "eesd", "auto": "auto"}
TEMPERATURES = (0.0, 1.0)
EVERY, AT_ONCE = 80, 5  # prompts of a family; of these in a part, so that a run that is ended has some of each family
FEW = 30  # judged drafts, of which a share says little
EVERY_LARGE, AT_ONCE_LARGE = 16, 4
TOKENS, LONGEST_PROMPT, STAGES, PLACES = 96, 1500, 4, 6  # of an answer, of a prompt; simulated; drafts a round


def small() -> Engine:
    return Engine.from_pretrained("smollm2-135m", backend="cpu", dtype="int8")


@cache
def large() -> Engine:
    path = given("PAPERS_TARGET", "the Q4_K_M file of Qwen2.5-Coder-1.5B-Instruct")
    return Engine.from_pretrained(path, backend="cpu", dtype="int4", exit_head="auto")


def parts(quick: bool) -> Parts:
    return _parts(small, AT_ONCE if quick else EVERY, AT_ONCE)


def parts_large(quick: bool) -> Parts:
    return _parts(large, 1, 1) if quick else _parts(large, EVERY_LARGE, AT_ONCE_LARGE)


def _parts(engine: Callable[[], Engine], last: int, many: int) -> Parts:
    return {
        f"{name}, T = {t:g}, {first + 1} to {first + many}": partial(measured, engine, file, t, first, many)
        for first in range(0, last, many)
        for name, file in FILES.items()
        for t in TEMPERATURES
    }


def measured(model: Callable[[], Engine], file: str, temperature: float, first: int, many: int) -> list[dict[str, Any]]:
    """One row a prompt: `many` of each family, after its first ones. Ways take turns, and each answer is compared with
    plain decoding's."""
    path = given("PAPERS_PROMPTS", f"a folder with {' and '.join(FILES.values())}") / file
    engine = model()
    rows = []
    prompts = read_prompts(str(path))
    before = first_of_each_family(prompts, first)
    for prompt in first_of_each_family(prompts, first + many):
        if prompt in before:
            continue
        ids = engine.encode([{"role": "user", "content": prompt.prompt}])
        if len(ids) > LONGEST_PROMPT:
            continue
        params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=1)
        plain = engine.generate(ids, params, "plain").run()
        row: dict[str, Any] = {"family": prompt.family, "prompt": len(ids), "tokens": len(plain.ids)}
        for name, schedule in WAYS.items():
            engine.forget()
            made = engine.generate(ids, params, schedule).run()
            speeds = plain.statistics.decode_tokens_per_second, made.statistics.decode_tokens_per_second
            row[name] = {
                "speed": speeds[1] / speeds[0] if None not in speeds else None,
                "accepted": made.statistics.accepted,
                "judged": made.statistics.judged,
                "tokens_per_round": made.statistics.tokens_per_round,
                "differs": made.ids != plain.ids,
            }
        rows.append(row | {"by_place": by_place(engine, ids, params)})
    return rows


def by_place(engine: Engine, ids: Sequence[int], params: SamplingParams) -> list[list[int]]:
    """[right, judged] of drafts by their place in a round."""
    counts = [[0, 0] for _ in range(PLACES)]
    for event in engine.generate(ids, params, f"eesd:length={PLACES},stop_rule=fixed").events():
        round = getattr(event, "round", None)
        for place in range(len(round.judged) if round else 0):
            counts[place][0] += place < round.accepted
            counts[place][1] += 1
    return counts


def over_stages(rows: Sequence[dict[str, Any]]) -> float:
    """`ppsd` over equal stages with the acceptance of these prompts, simulated."""
    sums = [[sum(row["by_place"][place][i] for row in rows) for i in (0, 1)] for place in range(PLACES)]
    known = next((place for place, (_, judged) in enumerate(sums) if judged < FEW), PLACES)
    acceptance = [right / judged for right, judged in sums[: max(known, 1)]]  # later places are like the last one
    pipeline = Pipeline((0.16 / STAGES,) * STAGES, head=0.0005, row_share=0.02, link=0.001)
    return simulate(parse_schedule("ppsd"), pipeline, acceptance, 5000).speedup


def accepted_of_judged(rows: Sequence[dict[str, Any]]) -> float:
    return sum(row["paying"]["accepted"] for row in rows) / sum(row["paying"]["judged"] for row in rows)


def table(found: Found) -> str:
    pooled: dict[str, list[dict[str, Any]]] = {}
    for part, rows in found.items():
        pooled.setdefault(part.rpartition(", ")[0], []).extend(rows)
    lines = []
    for name, every in pooled.items():
        for family in (*dict.fromkeys(row["family"] for row in every), "all"):
            of = [row for row in every if family in (row["family"], "all")]
            tokens = median(row["paying"]["tokens_per_round"] for row in of)
            line = [name, family, str(len(of)), interval(of, accepted_of_judged), f"{tokens:.2f}"]
            speeds = [[row[way]["speed"] for row in of if row[way]["speed"] is not None] for way in WAYS]
            lines.append((*line, *(interval(each, median) for each in speeds), f"{over_stages(of):.2f}"))
    differing = sum(row[way]["differs"] for every in found.values() for row in every for way in WAYS)
    head = ("prompts, sampling", "family", "prompts", "acceptance", "tokens a pass")
    ways = (f"`{schedule}`, times plain" for schedule in WAYS.values())
    answers = sum(len(every) for every in found.values()) * len(WAYS)
    autos = [row["auto"]["speed"] for every in found.values() for row in every if row["auto"]["speed"] is not None]
    slower, slow = (f"{sum(speed < bar for speed in autos) / len(autos):.1%}" for bar in (1.0, 0.9))
    after = f"\n\n{differing} of {answers:,} answers differ from plain decoding's. Of those of `auto`, each timed once,"
    after += f" {slower} are slower than plain decoding, and {slow} have less than 0.9 of its speed."
    return markdown((*head, *ways, f"`ppsd`, {STAGES} stages, simulated"), lines, left=2) + after


PROMPTS = Experiment("prompts", parts, table)

PROMPTS_LARGE = Experiment("prompts_1.5b", parts_large, table)
