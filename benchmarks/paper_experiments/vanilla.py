"""A separate draft model, as a user of llama.cpp has it: Qwen2.5-Coder-0.5B drafts for the 1.5B, both as Q4_K_M files.

Teacher-forced: at each token of the large model's greedy answer, is the small one's likeliest token the same? With the
measured seconds of both that gives the speed of the best fixed draft length. Beside it: the head that ships.
"""

from functools import partial
from statistics import median
from typing import Any

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.lab.cli.prompt_files import first_of_each_family, read_prompts

from .experiment import Claim, Experiment, Found, Parts, markdown
from .given import given

TARGET = partial(given, "PAPERS_TARGET", "the Q4_K_M file of Qwen2.5-Coder-1.5B-Instruct")
DRAFT = partial(given, "PAPERS_DRAFT", "the Q4_K_M file of Qwen2.5-Coder-0.5B-Instruct")
LONGEST = 8


def parts(quick: bool) -> Parts:
    return {"answers": partial(measured, 1 if quick else 6, 48 if quick else 128)}


def measured(of_each_family: int, tokens: int) -> dict[str, Any]:
    target = Engine.from_pretrained(TARGET(), backend="cpu", dtype="int4", exit_head="auto")
    draft = Engine.from_pretrained(DRAFT(), backend="cpu", dtype="int4", exit_head="none")
    asked = [
        (prompt.family, target.encode([{"role": "user", "content": prompt.prompt}]))
        for prompt in first_of_each_family(read_prompts(None), of_each_family)
    ]
    if draft.encode([{"role": "user", "content": "Hi"}]) != target.encode([{"role": "user", "content": "Hi"}]):
        raise SystemExit("papers.py: the draft model's ids are other than the target's")
    families: dict[str, list[list[int]]] = {}
    ratios, ours = [], []
    for family, prompt in asked:
        params = SamplingParams(max_tokens=tokens)
        answer = target.generate(prompt, params, "plain").run()
        text = [*prompt, *answer.ids]
        likeliest = draft.prompt_logprobs(text, 1)
        right = [int(likeliest[at].top[0][0] == text[at]) for at in range(len(prompt), len(text))]
        families.setdefault(family, []).append(right)
        small = draft.generate(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), "plain").run()
        fast = target.generate(prompt, params, "auto").run()
        speeds = [each.statistics.decode_tokens_per_second for each in (answer, small, fast)]
        if None not in speeds:
            ratios.append(speeds[0] / speeds[1])
            ours.append(speeds[2] / speeds[0])
    passes = _passes(target)
    return {"right": families, "draft_step": median(ratios), "auto": sorted(ours), "passes": passes}


def _passes(engine: Engine) -> list[float]:
    """Of 1 to LONGEST + 1 rows, in plain steps: what `auto` works with here."""
    costs = engine.backend.costs().turns
    return [(costs.row_step + costs.pass_seconds(rows)) / costs.plain_step for rows in range(1, LONGEST + 2)]


def speed(acceptance: float, draft_step: float, passes: list[float], length: int) -> float:
    """Tokens of a round of so many drafts, over its time in plain steps."""
    return sum(acceptance**k for k in range(length + 1)) / (length * draft_step + passes[length])


def table(found: Found) -> str:
    case = found["answers"]
    rows = []
    every = [right for answers in case["right"].values() for right in answers]
    for family, answers in (*case["right"].items(), ("all", every)):
        acceptance = sum(map(sum, answers)) / sum(map(len, answers))
        best = max(range(1, LONGEST + 1), key=lambda k: speed(acceptance, case["draft_step"], case["passes"], k))
        rows.append((family, f"{len(answers)}", f"{acceptance:.2f}", str(best)))
        rows[-1] += (f"{speed(acceptance, case['draft_step'], case['passes'], best):.2f}",)
    ours = case["auto"]
    after = (
        f"\n\nA draft step of the small model takes {case['draft_step']:.2f} plain steps of the large one. "
        f"On the same prompts `auto` with the head that ships has {median(ours):.2f} of plain decoding's speed in the "
        f"median, {ours[0]:.2f} to {ours[-1]:.2f}."
    )
    head = ("family", "answers", "acceptance, teacher-forced", "best draft length", "speed, predicted")
    return markdown(head, rows) + after


VANILLA = Experiment(
    "vanilla",
    (Claim("EESD, PPSD", "related work", "a separate draft model is the usual way to speculate"),),
    parts,
    table,
)
