"""Does `auto` come to the best schedule of 16 stages if an answer is long enough, or if others came before it?

Once in simulated time, which no machine disturbs, and once in processes whose stages sleep, as in `stages`. Answers of
`auto` and `ppsd` have the same wrong drafts. `ppsd` / simulator says what the machine took of the speed.
"""

from functools import partial
from statistics import median
from typing import Any

from made_up_costs import equal_costs

from ppsd_rt._native import Costs, Planner
from ppsd_rt.lab.simulate import simulate
from ppsd_rt.pipeline.schedule import parse_schedule

from .experiment import Experiment, Found, Parts, interval, markdown
from .stages import of, part

STAGES, ACCEPTANCE, EXPECTED = 16, 0.8, 0.5  # what `auto` expects of drafts before it has seen any
SCHEDULES = ("ppsd", "auto")
LINKS = (0, 5)
AFTER = 4  # answers, in what the table calls an answer after others
TOKEN_MS, HEAD_MS, ROW_SHARE = 160.0, 0.5, 0.02  # as of sleeping_ranks.py


def parts(quick: bool) -> Parts:
    simulated_ones = {
        f"simulated, {tokens} tokens, {link} ms": partial(simulated, tokens, link, 8)
        for tokens in (40, 100, 400)
        for link in LINKS
    }
    repeats = {400: 1} if quick else {40: 8, 400: 3}  # tokens of an answer: answers
    return simulated_ones | {
        f"{tokens} tokens, {link} ms": partial(part, options(tokens, many), STAGES, link)
        for tokens, many in repeats.items()
        for link in LINKS
    }


def simulated(tokens: int, link_ms: float, planners: int) -> dict[str, Any]:
    """By planner, of the first answer that it decodes and of the one after AFTER others: [`ppsd`, `auto`], x plain."""
    costs = equal_costs(STAGES, TOKEN_MS, HEAD_MS, ROW_SHARE, link_ms)
    rows = []
    for number in range(planners):
        planner, speeds = Planner(Costs(costs, costs), EXPECTED), []
        for seed in range(number * 100, number * 100 + AFTER + 1):
            both = (simulate(way, costs, ACCEPTANCE, tokens, seed=seed) for way in (parse_schedule("ppsd"), planner))
            speeds.append([made.tokens_per_second * costs.plain_step for made in both])
        rows.append([speeds[0], speeds[-1]])
    return {"tokens": tokens, "link_ms": link_ms, "planners": rows}


def options(tokens: int, repeats: int) -> list[str]:
    return ["--acceptance", f"{ACCEPTANCE}", "--schedules", ",".join(SCHEDULES), "-n", f"{tokens}", "-r", f"{repeats}"]


def table(found: Found) -> str:
    lines = []
    for case in found.values():
        of_what = str(case["tokens"]), f"{case['link_ms']:g}"
        if "planners" in case:
            for place, name in enumerate(("simulated, the first answer", f"simulated, after {AFTER} others")):
                pairs = [planner[place] for planner in case["planners"]]
                lines.append((name, *of_what, "-", *compared(pairs), "-"))
            continue
        ppsd, auto = (of(case, name, ACCEPTANCE) for name in SCHEDULES)
        pairs = [[a["speedup"], b["speedup"]] for a, b in zip(ppsd, auto, strict=True)]
        over = f"{median(row['over_simulated'] for row in ppsd):.2f}"
        lines.append(("processes", *of_what, f"{case['load']:.0f}", *compared(pairs), over))
    head = ("what", "tokens of an answer", "link, ms", "load", "answers", "`ppsd`, x plain", "`auto`, x plain")
    return markdown((*head, "`auto` / `ppsd`", "`ppsd` / simulator"), lines)


def compared(pairs: list[list[float]]) -> tuple[str, ...]:
    """How many, the median speed of both, and the median of their ratios."""
    speeds = (f"{median(pair[which] for pair in pairs):.2f}" for which in (0, 1))
    return f"{len(pairs)}", *speeds, interval([auto / ppsd for ppsd, auto in pairs], median)


LONG_ANSWERS = Experiment("long_answers", parts, table)
