"""The acceptance of the same drafts by three denominators, and by the place in a chunk: why PPSD's looks higher.

drafted: all that the head drew. verified: those whose row went through the late layers. judged: those that were
compared, up to the first wrong one of each round. A draft that is dropped with a wrong one before it was never judged.
"""

from typing import Any

from ppsd_rt import SamplingParams
from ppsd_rt.lab.bench.plot import Chart, Line, Panel
from ppsd_rt.lab.cli.prompt_files import read_prompts

from .experiment import Experiment, Found, Parts, markdown
from .recorded import TOKENS, engine

SCHEDULES = (*(f"eesd:length={length},stop_rule=fixed" for length in range(1, 9)), "ppsd")


def parts(quick: bool) -> Parts:
    return {schedule: lambda schedule=schedule: measured(schedule, 6 if quick else 34) for schedule in SCHEDULES}


def measured(schedule: str, prompts: int) -> dict[str, Any]:
    """Counts over the development prompts, greedy. The row of a committed token is no draft's."""
    accepted = judged = dropped = rows = tokens = own = 0
    by_place: dict[int, list[int]] = {}
    for prompt in read_prompts(None)[:prompts]:
        ids = engine().encode([{"role": "user", "content": prompt.prompt}])
        generation = engine().generate(ids, SamplingParams(max_tokens=TOKENS), schedule)
        for event in generation.events():
            round = getattr(event, "round", None)
            if round is None:
                continue
            own += len(round.committed) > round.accepted  # a token of the model's; its row is the next one to enter
            if round.prompt:
                continue
            rows, tokens = rows + round.rows, tokens + len(round.committed)
            accepted, judged = accepted + round.accepted, judged + len(round.judged)
            dropped += round.dropped
            for place in range(1, len(round.judged) + 1):
                counts = by_place.setdefault(place, [0, 0])
                counts[0] += place <= round.accepted
                counts[1] += 1
        own -= len(round.committed) > round.accepted  # the last token has no row
    return {"accepted": accepted, "judged": judged, "verified": rows - own, "drafted": judged + dropped} | {
        "tokens": tokens,
        "by_place": [by_place[place] for place in sorted(by_place)],
    }


def table(found: Found) -> str:
    rows = [
        (
            f"`{name}`",
            *(f"{case['accepted'] / case[by]:.2f}" for by in ("drafted", "verified", "judged")),
            f"{case['tokens'] / case['drafted']:.2f}",
            " ".join(f"{right / count:.2f}" for right, count in case["by_place"][:8]),
        )
        for name, case in found.items()
    ]
    head = ("schedule", "accepted / drafted", "accepted / verified", "accepted / judged", "tokens a draft")
    return markdown((*head, "accepted / judged, by place in the chunk"), rows)


def charts(found: Found) -> dict[str, Chart]:
    eesd = [(float(length), found[name]) for length, name in enumerate(SCHEDULES[:-1], 1) if name in found]
    lines = [Line(by, [(length, c["accepted"] / c[by]) for length, c in eesd]) for by in ("drafted", "judged")]
    if "ppsd" in found:
        ppsd = found["ppsd"]["accepted"] / found["ppsd"]["judged"]
        lines.append(Line("judged, of `ppsd`", [(1.0, ppsd), (8.0, ppsd)], dashed=True))
    return {"denominators": Chart("Accepted drafts by", "draft length", "acceptance", [Panel("", lines)], 1)}


DENOMINATORS = Experiment("denominators", parts, table, charts)
