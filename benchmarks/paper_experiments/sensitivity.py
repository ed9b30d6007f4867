"""How much temperature, prompt length and links change what overlap brings: acceptance measured, time simulated.

Acceptance is the default model's with its head, by the place of a draft, counted over real answers. Prompts are the
beginnings of this repository's own pages, of so many tokens, with a question after them.
"""

from functools import partial
from pathlib import Path
from typing import Any

from made_up_costs import equal_costs

from ppsd_rt import SamplingParams
from ppsd_rt._native import Costs, Planner
from ppsd_rt.lab.simulate import simulate
from ppsd_rt.pipeline.schedule import parse_schedule

from .experiment import Experiment, Found, Parts, markdown
from .recorded import engine

PAGES = sorted((Path(__file__).parents[2] / "docs" / "design").glob("*.md"))
TEMPERATURES = (0.0, 0.6, 1.0)
LENGTHS = (32, 512, 2048)
LINKS = (0.1, 1.0, 5.0, 20.0)  # ms
SCHEDULES = ("eesd", "ppsd", "elastic", "auto")
STAGES, TOKEN_MS, HEAD_MS, ROW_SHARE = 4, 160.0, 0.5, 0.02
PLACES = 6


def parts(quick: bool) -> Parts:
    return {
        f"T = {temperature:g}, {length} tokens": partial(measured, temperature, length, quick)
        for temperature in TEMPERATURES
        for length in LENGTHS
    }


def prompts(length: int, count: int) -> list[list[int]]:
    """Each of `length` tokens before the chat template."""
    tokenizer = engine().tokenizer
    question = "\n\nExplain this in a few sentences." if length > 100 else " Explain this."
    found = []
    for number in range(count):
        text = " ".join(page.read_text(encoding="utf-8") for page in PAGES[number % len(PAGES) :])
        ids = tokenizer.encode(text[(number // len(PAGES)) * 9000 :])
        asked = tokenizer.decode(ids[: length - len(tokenizer.encode(question))]) + question
        found.append(engine().encode([{"role": "user", "content": asked}]))
    return found


def by_place(temperature: float, length: int, quick: bool) -> tuple[list[float], int]:
    """P(right | all before it are), by place; and how many drafts were judged."""
    params = SamplingParams(max_tokens=64 if quick else 128, temperature=temperature, seed=1, ignore_eos=True)
    right, judged = [0] * PLACES, [0] * PLACES
    for prompt in prompts(length, 4 if quick else 16):
        for event in engine().generate(prompt, params, f"eesd:length={PLACES},stop_rule=fixed").events():
            round = getattr(event, "round", None)
            for place in range(len(round.judged) if round else 0):
                judged[place] += 1
                right[place] += place < round.accepted
    total = sum(right) / sum(judged)
    return [r / j if j > 20 else total for r, j in zip(right, judged, strict=True)], sum(judged)


def measured(temperature: float, length: int, quick: bool) -> dict[str, Any]:
    acceptance, drafts = by_place(temperature, length, quick)
    tokens, speeds = 1000 if quick else 5000, {}
    for link in LINKS:
        costs = equal_costs(STAGES, TOKEN_MS, HEAD_MS, ROW_SHARE, link)
        speeds[str(link)] = {}
        for name in SCHEDULES:
            schedule = Planner(Costs(costs, costs), 0.5) if name == "auto" else parse_schedule(name)
            made = simulate(schedule, costs, acceptance, tokens)
            speeds[str(link)][name] = made.tokens_per_second * costs.plain_step
    return {"acceptance": acceptance, "drafts": drafts, "speeds": speeds}


def table(found: Found) -> str:
    rows = [
        (
            part,
            f"{case['acceptance'][0]:.2f}",
            f"{case['drafts']:,}",
            *(" ".join(f"{speeds[name]:.2f}" for name in SCHEDULES) for speeds in case["speeds"].values()),
        )
        for part, case in found.items()
    ]
    links = (f"links of {link:g} ms" for link in LINKS)
    return markdown(("sampling, prompt", "acceptance of the first draft", "drafts judged", *links), rows)


SENSITIVITY = Experiment("sensitivity", parts, table)
