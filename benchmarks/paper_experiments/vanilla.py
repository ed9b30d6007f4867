"""A separate draft model, as a user of llama.cpp has it: Qwen2.5-Coder-0.5B drafts for the 1.5B, both as Q4_K_M files.

Teacher-forced: at each token of the large model's greedy answer, is the small one's likeliest token the same? With the
measured seconds of both that gives the speed of the best fixed draft length. Beside it: the head that ships.
"""

from collections.abc import Sequence
from functools import cache, partial
from statistics import median
from typing import Any

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.lab.cli.prompt_files import read_prompts

from .bootstrap import interval
from .experiment import Claim, Experiment, Found, Parts, markdown
from .given import given

LONGEST = 8


@cache
def target() -> Engine:
    path = given("PAPERS_TARGET", "the Q4_K_M file of Qwen2.5-Coder-1.5B-Instruct")
    return Engine.from_pretrained(path, backend="cpu", dtype="int4", exit_head="auto")


@cache
def draft() -> Engine:
    path = given("PAPERS_DRAFT", "the Q4_K_M file of Qwen2.5-Coder-0.5B-Instruct")
    return Engine.from_pretrained(path, backend="cpu", dtype="int4", exit_head="none")


def parts(quick: bool) -> Parts:
    families: dict[str, list[str]] = {}
    for prompt in read_prompts(None):
        families.setdefault(prompt.family, []).append(prompt.prompt)
    most, tokens = (1, 48) if quick else (3, 96)
    measured_ones = {name: partial(measured, asked[:most], tokens) for name, asked in families.items()}
    return {**measured_ones, "passes": passes}


def measured(prompts: Sequence[str], tokens: int) -> list[dict[str, Any]]:
    """One row an answer. right: of each of its tokens, is it the small model's likeliest?"""
    rows = []
    for asked in prompts:
        prompt = target().encode([{"role": "user", "content": asked}])
        if draft().encode([{"role": "user", "content": asked}]) != prompt:
            raise SystemExit("papers.py: the draft model's ids are other than the target's")
        params = SamplingParams(max_tokens=tokens)
        answer = target().generate(prompt, params, "plain").run()
        text = [*prompt, *answer.ids]
        likeliest = draft().prompt_logprobs(text, 1)
        right = [int(likeliest[at].top[0][0] == text[at]) for at in range(len(prompt), len(text))]
        small = draft().generate(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), "plain").run()
        fast = target().generate(prompt, params, "auto").run()
        speeds = [each.statistics.decode_tokens_per_second for each in (answer, small, fast)]
        rows.append({"right": right, "differs": fast.ids != answer.ids})
        if None not in speeds:
            rows[-1] |= {"draft_step": speeds[0] / speeds[1], "auto": speeds[2] / speeds[0]}
    return rows


def passes() -> list[float]:
    """Of 1 to LONGEST + 1 rows, in plain steps: what `auto` works with here."""
    costs = target().backend.costs().turns
    return [(costs.row_step + costs.pass_seconds(rows)) / costs.plain_step for rows in range(1, LONGEST + 2)]


def speed(acceptance: float, draft_step: float, passes: list[float], length: int) -> float:
    """Tokens of a round of so many drafts, over its time in plain steps."""
    return sum(acceptance**k for k in range(length + 1)) / (length * draft_step + passes[length])


def acceptance(rows: Sequence[dict[str, Any]]) -> float:
    return sum(sum(row["right"]) for row in rows) / sum(len(row["right"]) for row in rows)


def table(found: Found) -> str:
    answers = {name: rows for name, rows in found.items() if name != "passes"}
    every = [row for rows in answers.values() for row in rows]
    steps = [row["draft_step"] for row in every if "draft_step" in row]
    lines = []
    for family, rows in (*answers.items(), ("all", every)):
        line = (family, str(len(rows)), interval(rows, acceptance))
        if "passes" not in found:  # measured last; without them a speed is of no use
            lines.append((*line, "-", "-", "-"))
            continue

        def at(length: int, of: Sequence[dict[str, Any]]) -> float:
            return speed(acceptance(of), median(steps), found["passes"], length)

        best = max(range(1, LONGEST + 1), key=lambda length: at(length, rows))
        fast = [row["auto"] for row in rows if "auto" in row]
        lines.append((*line, str(best), interval(rows, partial(at, best)), interval(fast, median) if fast else "-"))
    differing = sum(row["differs"] for row in every)
    after = f"\n\n{differing} of {len(every)} answers of `auto` differ from plain decoding's."
    if "passes" in found:
        after += f" A draft step of the small model takes {interval(steps, median)} plain steps of the large one."
    head = ("family", "answers", "acceptance, teacher-forced", "best draft length", "speed, predicted")
    return markdown((*head, "`auto` with the head that ships"), lines) + after


VANILLA = Experiment(
    "vanilla",
    (Claim("EESD, PPSD", "related work", "a separate draft model is the usual way to speculate"),),
    parts,
    table,
)
