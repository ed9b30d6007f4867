"""What overlap is worth against what engines ship: drafting after the verdict, on the last stage of a pipeline.

vLLM (pull 50514) and SGLang (pull 30775) speculate over pipeline stages so: all drafts of a round come from a head on
the last stage, then one pass over them goes through all stages, then the next round begins. One answer, no batching.
"""

from typing import Any

from made_up_costs import equal_costs

from ppsd_rt.lab.bench.plot import Chart, Line, Panel
from ppsd_rt.lab.simulate import simulate
from ppsd_rt.pipeline.schedule import parse_schedule

from .experiment import Experiment, Found, Parts, markdown

STAGES = (2, 4, 8, 16)
ACCEPTANCE = (0.6, 0.7, 0.8)
LINKS = (0.1, 1.0, 5.0)  # ms
ROUNDS = (0.0, 5.0, 25.0)  # ms that an engine spends on a round beside the passes; 25 were reported at 4 stages
TOKEN_MS, LAYERS, ROW_SHARE, LONGEST = 60.0, 80, 0.02, 8  # a 70 B model on some four GPUs
# Of vLLM: pull 50514 at concurrency 1; issue 44697: 61.2 tokens/s plain, 43.7 with drafts, some 25 ms a round.
REPORTS = {"vLLM pull 50514: 2 stages over sockets": 2.34, "vLLM issue 44697: 4 stages over PCIe": 43.7 / 61.2}


def after_the_verdict(stages: int, acceptance: float, link: float, round_ms: float, drafts: int) -> float:
    """Times plain decoding in the same pipeline: tokens of a round over its time, in expectation.

    A draft costs a layer, and so do the logits of its head. Plain decoding pays no `round_ms`.
    """
    tokens = sum(acceptance**place for place in range(drafts + 1))
    plain = TOKEN_MS + stages * link
    growth = 1 + ROW_SHARE * drafts
    return tokens * plain / (TOKEN_MS * growth + stages * link + drafts * 2 * TOKEN_MS / LAYERS + round_ms)


def best(stages: int, acceptance: float, link: float, round_ms: float) -> tuple[int, float]:
    """(drafts, speed) of the best fixed length; what no controller knows beforehand."""
    speeds = [after_the_verdict(stages, acceptance, link, round_ms, drafts) for drafts in range(1, LONGEST + 1)]
    return 1 + speeds.index(max(speeds)), max(speeds)


def parts(quick: bool) -> Parts:
    return {str(stages): lambda stages=stages: measured(stages, 1000 if quick else 10_000) for stages in STAGES}


def measured(stages: int, tokens: int) -> list[dict[str, Any]]:
    rows = []
    for link in LINKS:
        costs = equal_costs(stages, TOKEN_MS, 2 * TOKEN_MS / LAYERS, ROW_SHARE, link)
        for acceptance in ACCEPTANCE:
            ours = {
                name: simulate(parse_schedule(name), costs, acceptance, tokens).tokens_per_second * costs.plain_step
                for name in ("ppsd", "elastic")
            }
            theirs = {str(round_ms): best(stages, acceptance, link, round_ms) for round_ms in ROUNDS}
            rows.append({"link_ms": link, "acceptance": acceptance, "after": theirs, **ours})
    return rows


def table(found: Found) -> str:
    rows = [
        (
            stages,
            f"{row['link_ms']:g}",
            f"{row['acceptance']:.1f}",
            *("{}: {:.2f}".format(*row["after"][str(round_ms)]) for round_ms in ROUNDS),
            f"{row['ppsd']:.2f}",
            f"{row['elastic']:.2f}",
            f"{max(row['ppsd'], row['elastic']) / row['after']['0.0'][1]:.2f}",
        )
        for stages, rows in found.items()
        for row in rows
    ]
    after = (f"after the verdict, {round_ms:g} ms a round" for round_ms in ROUNDS)
    return markdown(("stages", "link, ms", "acceptance", *after, "`ppsd`", "`elastic`", "overlap / after"), rows)


def charts(found: Found) -> dict[str, Chart]:
    panels = []
    for link in LINKS:
        lines = []
        for name in ("after", "ppsd", "elastic"):
            points = []
            for stages, rows in found.items():
                row = next(each for each in rows if (each["link_ms"], each["acceptance"]) == (link, 0.7))
                points.append((float(stages), row["after"]["0.0"][1] if name == "after" else row[name]))
            lines.append(Line("after the verdict" if name == "after" else name, points))
        lines += [Line(name, [(2.0 if speed > 1 else 4.0, speed)]) for name, speed in REPORTS.items()]
        panels.append(Panel(f"links of {link:g} ms", lines))
    return {"engines": Chart("Acceptance 0.7, one answer", "stages", "speed-up (times plain)", panels, 3)}


ENGINES = Experiment("engines", parts, table, charts)
