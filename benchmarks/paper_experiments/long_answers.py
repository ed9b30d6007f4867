"""Does `auto` come to the best schedule of 16 stages if an answer is long enough? Stages sleep, as in `stages`.

Answers of both have the same wrong drafts. `ppsd` / simulator says what the machine took of the speed.
"""

from functools import partial
from statistics import median

from .bootstrap import interval
from .experiment import Claim, Experiment, Found, Parts, markdown
from .stages import of, part

STAGES, ACCEPTANCE = 16, 0.8
SCHEDULES = ("ppsd", "auto")


def parts(quick: bool) -> Parts:
    repeats = {40: 2, 400: 1} if quick else {40: 8, 400: 3}  # tokens of an answer: answers
    return {
        f"{tokens} tokens, {link} ms": partial(part, options(tokens, many), STAGES, link)
        for tokens, many in repeats.items()
        for link in (0, 5)
    }


def options(tokens: int, repeats: int) -> list[str]:
    return ["--acceptance", f"{ACCEPTANCE}", "--schedules", ",".join(SCHEDULES), "-n", f"{tokens}", "-r", f"{repeats}"]


def table(found: Found) -> str:
    lines = []
    for case in found.values():
        ppsd, auto = (of(case, name, ACCEPTANCE) for name in SCHEDULES)
        ratios = [fast["speedup"] / best["speedup"] for fast, best in zip(auto, ppsd, strict=True)]
        line = (str(case["tokens"]), f"{case['link_ms']:g}", str(len(ratios)), f"{case['load']:.0f}")
        speeds = (f"{median(row['speedup'] for row in rows):.2f}" for rows in (ppsd, auto))
        lines.append((*line, *speeds, interval(ratios, median), f"{median(row['over_simulated'] for row in ppsd):.2f}"))
    head: tuple[str, ...] = ("tokens of an answer", "link, ms", "answers", "load", "`ppsd`, x plain", "`auto`, x plain")
    return markdown((*head, "`auto` / `ppsd`", "`ppsd` / simulator"), lines, left=2)


LONG_ANSWERS = Experiment(
    "long_answers",
    (Claim("PPSD", "abstract", "almost the optimal acceleration"),),
    parts,
    table,
)
