"""Would second choices of the head pay on a GPU, where a row is nearly free? Rounds in turns, by what steps cost.

A round drafts a chain, and its pass may also hold second choices: beside each draft (siblings), or a small tree, which
has the two best at the first two positions, whichever stands at the first, and the chain after the best of both. The
text says of each position which of the head's choices is right. Every policy takes the draft length that is its best.

What it leaves out: the second step of a tree drafts for two rows, at the price of one; and after a second choice the
head is taken to be right as often as elsewhere.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from made_up_costs import one_machine

from ppsd_rt.pipeline.schedule import MAX_ROWS

from .branches import SECOND, TEXTS, Choices, choices_of
from .experiment import Claim, Experiment, Found, Parts, markdown
from .lengths_replay import made_up

# A draft and a further row, in plain tokens: by the law of ppsd_rt/lab/roofline.py, exits after 3, 3 and 4 layers. The
# law knows a row's bytes, most of which come from the L2 cache: so much it costs at most.
COSTS = {"smollm2-135m": (0.12, 0.045), "llama-3.2-1b": (0.19, 0.025), "llama-3.1-8b": (0.13, 0.017)}
ACCEPTANCE = (0.56, 0.66, 0.8)
POLICIES = ("chain", "siblings", "tree", "tree and siblings")


def rows(policy: str, drafts: int) -> int:
    beside = {"chain": 0, "siblings": drafts, "tree": min(drafts, 2), "tree and siblings": drafts}[policy]
    after_second = 2 if policy.startswith("tree") and drafts > 1 else 0
    return 1 + drafts + beside + after_second


def tokens(policy: str, drafts: int, right: Sequence[int]) -> int:
    """That a round commits. right: of the positions that come, which choice is the text's."""
    chain = next((place for place, choice in enumerate(right[:drafts]) if choice != 0), drafts)
    if chain == drafts or right[chain] != 1:
        return chain + 1
    taken = policy.endswith("siblings") or (policy == "tree" and chain < 2)
    after_second = policy.startswith("tree") and drafts > 1 and chain == 0 and right[1] < 2
    return chain + 1 + taken + after_second


def speed(choices: Choices, policy: str, drafts: int, seconds: float) -> float:
    """Tokens a second of rounds that take so long."""
    place = rounds = 0
    while place + drafts < len(choices.right):
        place += tokens(policy, drafts, choices.right[place : place + drafts])
        rounds += 1
    return place / rounds / seconds


def best(choices: Choices, policy: str, draft: float, row: float) -> tuple[float, int]:
    """Times plain decoding, and with how many drafts."""
    costs = one_machine(draft, row)
    fitting = [drafts for drafts in range(1, MAX_ROWS) if rows(policy, drafts) <= MAX_ROWS]
    seconds = {drafts: costs.round(drafts) + row * (rows(policy, drafts) - drafts - 1) for drafts in fitting}
    return max((speed(choices, policy, drafts, seconds[drafts]), drafts) for drafts in fitting)


def parts(quick: bool) -> Parts:
    return {model: partial(measured, *costs, 20_000 if quick else 50_000) for model, costs in COSTS.items()}


def measured(draft: float, row: float, length: int) -> list[dict[str, Any]]:
    found = []
    for acceptance in ACCEPTANCE:
        choices = choices_of(made_up(length, acceptance, TEXTS["all alike"], seed=1), SECOND)
        for each in (0.0, row):
            speeds = {policy: best(choices, policy, draft, each) for policy in POLICIES}
            found.append({"acceptance": acceptance, "draft": draft, "row": each, "speeds": speeds})
    return found


def table(found: Found) -> str:
    def column(case: Any, policy: str) -> str:
        speed, drafts = case["speeds"][policy]
        by = 1.0 if policy == POLICIES[0] else case["speeds"][POLICIES[0]][0]
        return f"{drafts}: {speed / by:.2f}"

    rows = [
        (model, f"{case['acceptance']:.2f}", f"{case['draft']:g}", f"{case['row']:g}",
         *(column(case, policy) for policy in POLICIES))
        for model, cases in found.items()
        for case in cases
    ]  # fmt: skip
    head = ("shape", "acceptance", "cost of a draft", "cost of a row", f"{POLICIES[0]}: x plain", *POLICIES[1:])
    return markdown(head, rows)


TREES = Experiment(
    "trees",
    (Claim("EESD, PPSD", "abstracts", "drafts are a chain"),),
    parts,
    table,
)
