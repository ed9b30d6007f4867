"""`auto`: what the stages cost on this machine, measured in the first runs and kept; the planner that works with it.

The planner itself is csrc/pipeline/planner.h: after every round it predicts the speed of plain decoding, of drafting K
tokens and then verifying them, and of overlapping both, from these costs and the running acceptance.
"""

import hashlib
import json
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median_low
from typing import Any

from . import _native, cache_file
from .cpu_name import cpu_name
from .models.cache import cache_dir
from .models.head_file import HeadInfo
from .schedule import MAX_ROWS
from .seconds import check_seconds, check_table

SECONDS = 0.35  # that a calibration takes, or a few passes of each kind
MOMENTS = 3  # calibrations that are kept, each of another run
CROWDED = 8  # the same, of those that a better one is waited for
_LARGEST = 1 << 20  # bytes of a file of them: more than there ever are
PATIENCE = 60.0  # seconds until it is tried once more; twice as many with each that was crowded
UNKNOWN_ACCEPTANCE = 0.4  # of a head that does not say how good it is


@dataclass(frozen=True)
class StageCosts:
    """Seconds. row_step: one row through layers [0, E); draft_step: the same and the exit head behind it;
    verify[n - 1]: layers [E, L) and the LM head for n rows, n from 1 to 16, behind drafts.

    A pass displaces the draft stage's weights from the cache, and drafts displace some of the others. first_draft: the
    first draft behind a pass. plain: a row and its pass, again and again. 0: they take what the others say.

    All of it behind a text of 128 rows. step_deeper, verify_deeper[n - 1]: what each further row of it adds to a step,
    and to a pass over n rows.

    Raises ValueError for what cannot have been measured.
    """

    row_step: float
    draft_step: float
    verify: tuple[float, ...]
    first_draft: float = 0.0
    plain: float = 0.0
    step_deeper: float = 0.0
    verify_deeper: tuple[float, ...] = (0.0,) * MAX_ROWS

    def __post_init__(self) -> None:
        check_seconds("row_step", self.row_step)
        check_seconds("draft_step", self.draft_step)
        check_table("verify", self.verify)
        check_seconds("first_draft", self.first_draft, least=0.0)
        check_seconds("plain", self.plain, least=0.0)
        check_seconds("step_deeper", self.step_deeper, least=0.0)
        check_table("verify_deeper", self.verify_deeper, least=0.0)

    @property
    def plain_step(self) -> float:
        return self.plain or self.row_step + self.verify[0]

    def draft_share(self, drafts: int) -> float:
        """A draft of a round of so many, on average, in plain steps."""
        first = self.first_draft or self.draft_step
        return (first + (drafts - 1) * self.draft_step) / drafts / self.plain_step

    def round(self, drafts: int) -> float:
        """At least one draft, the last one's row, and the pass that verifies them."""
        return (
            (self.first_draft or self.draft_step) + (drafts - 1) * self.draft_step + self.row_step + self.verify[drafts]
        )


@dataclass(frozen=True)
class Costs:
    """turns: one stage after the other, each on all threads. overlapped: side by side, each on its own; None: no.

    crowded: others (programs, or the host's other machines) had so much of the cores that fewer threads worked.
    """

    turns: StageCosts
    overlapped: StageCosts | None
    crowded: bool = False

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Costs":
        """As asdict gives it. Raises KeyError, TypeError or ValueError for anything else."""

        def stages(v: dict[str, Any]) -> StageCosts:
            v = {**v, "verify": tuple(v["verify"]), "verify_deeper": tuple(v["verify_deeper"])}
            return StageCosts(**{field.name: v[field.name] for field in fields(StageCosts)})

        overlapped = None if values["overlapped"] is None else stages(values["overlapped"])
        if not isinstance(values["crowded"], bool):
            raise TypeError("crowded is neither true nor false")
        return cls(stages(values["turns"]), overlapped, values["crowded"])

    @property
    def plain_seconds(self) -> float:
        """One token of plain decoding."""
        return self.turns.plain_step


def calibrate(engine: _native.Engine) -> Costs:
    return Costs.from_dict(engine.calibrate(SECONDS))


def costs_here(path: Path, measure: Callable[[], Costs], again: bool = False) -> Costs:
    """What earlier runs have measured, and this one: it measures too while there are fewer than MOMENTS, or `again`.

    One moment may be a bad one (a busy neighbour doubles what costs arithmetic, and leaves what waits for memory), and
    drafts would be judged by it for good. Crowded ones count only where there are no others, which later runs look for,
    at ever longer intervals. `again`: as measured now.
    """
    moments = _known(path)
    if not again and not _wanted(moments):
        return typical([moment.costs for moment in moments])
    now = measure()
    moments = [*moments, Moment(now, time.time())]
    calm = [moment for moment in moments if not moment.costs.crowded][-MOMENTS:]
    crowded = [moment for moment in moments if moment.costs.crowded][-CROWDED:] if len(calm) < MOMENTS else []
    cache_file.write(path, json.dumps([asdict(moment) for moment in (*crowded, *calm)]).encode())
    return now if again else typical([moment.costs for moment in (*crowded, *calm)])


@dataclass(frozen=True)
class Moment:
    """A calibration, and when it was: seconds since 1970."""

    costs: Costs
    at: float


def _wanted(moments: Sequence[Moment]) -> bool:
    """Whether one more would tell something."""
    crowded = sum(moment.costs.crowded for moment in moments)
    if len(moments) - crowded >= MOMENTS:
        return False
    waited = time.time() - max((moment.at for moment in moments), default=0.0)
    return len(moments) < MOMENTS or not 0 <= waited < PATIENCE * 2**crowded


def typical(moments: Sequence[Costs]) -> Costs:
    """Of every cost, in shares of a plain token of its moment, the lower median; times that of the plain tokens.

    Of crowded moments only where there are no others: and they do not say what overlapping would bring, for what it is
    compared with did not have its threads.
    """
    calm = [costs for costs in moments if not costs.crowded]
    moments = calm or [replace(costs, overlapped=None) for costs in moments]
    plain = median_low([costs.plain_seconds for costs in moments])

    def between(all_stages: Sequence[StageCosts]) -> StageCosts:
        def middle(seconds: Iterable[float]) -> float:
            return plain * median_low([s / costs.plain_seconds for s, costs in zip(seconds, moments, strict=True)])

        return StageCosts(
            middle(stages.row_step for stages in all_stages),
            middle(stages.draft_step for stages in all_stages),
            tuple(middle(rows) for rows in zip(*(stages.verify for stages in all_stages), strict=True)),
            middle(stages.first_draft for stages in all_stages),
            middle(stages.plain for stages in all_stages),
            middle(stages.step_deeper for stages in all_stages),
            tuple(middle(rows) for rows in zip(*(stages.verify_deeper for stages in all_stages), strict=True)),
        )

    overlapped = [costs.overlapped for costs in moments if costs.overlapped]
    try:
        return Costs(
            between([costs.turns for costs in moments]),
            between(overlapped) if len(overlapped) == len(moments) else None,
            not calm,
        )
    except ValueError:  # they have so little in common that what is between them cannot be: the newest then
        return moments[-1]


def _known(path: Path) -> list[Moment]:
    """None of them where the file is not there, is damaged, or holds what no run can have written."""
    try:
        moments = [_moment(values) for values in json.loads(cache_file.read(path, _LARGEST))]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    return moments if len(moments) <= MOMENTS + CROWDED else []


def _moment(values: dict[str, Any]) -> Moment:
    check_seconds("at", values["at"], least=0.0, most=time.time())
    return Moment(Costs.from_dict(values["costs"]), float(values["at"]))


def costs_path(
    model_hash: str, head: HeadInfo, draft_vocabulary: int, dtypes: Sequence[str], threads: int, isa: str
) -> Path:
    """One file for each machine, build, model, kind of head, formats (of both and of the KV cache) and thread count."""
    build = Path(_native.__file__).stat()
    machine = [platform.node(), cpu_name(), _native.usable_cores(), isa]
    what = [build.st_size, build.st_mtime_ns, *machine, model_hash, *dtypes, threads]
    key = json.dumps([*what, head.kind, head.exit_layer, draft_vocabulary])
    return cache_dir() / "calibration" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def prior(head: HeadInfo) -> float:
    """The acceptance to begin with: what the head's file says of held-out text."""
    value = head.acceptance.get("held_out_greedy", UNKNOWN_ACCEPTANCE)
    return float(value) if isinstance(value, (int, float)) and 0 <= value <= 1 else UNKNOWN_ACCEPTANCE


def explain(planner: _native.Planner, costs: Costs) -> str:
    """Predictions at the present acceptance beside what the rounds so far took."""
    plain, *turns = [p for p in planner.predictions() if p[0] != "overlap"]
    best = max(turns, key=lambda p: p[2])
    lines = [
        f"acceptance {planner.acceptance:.2f}; a plain token {1000 * costs.plain_seconds:.2f} ms, "
        f"a draft {1000 * costs.turns.draft_step:.2f} ms "
        f"(the first of a round {1000 * (costs.turns.first_draft or costs.turns.draft_step):.2f}), "
        f"a pass over 1/4/8/16 rows {'/'.join(f'{1000 * costs.turns.verify[n - 1]:.2f}' for n in (1, 4, 8, 16))} ms",
        "predicted now, tokens/s: "
        + f"plain {plain[2]:.0f}; draft then verify "
        + ", ".join(f"{length}: {speed:.0f}" for _, length, speed in turns if length in (1, 2, 3, 4, 6, 8, 12, 15))
        + f" (best {best[1]}: {best[2]:.0f})"
        + "".join(f"; overlapped {p[2]:.0f}" for p in planner.predictions() if p[0] == "overlap"),
    ]
    for mode, (rounds, tokens, seconds, predicted) in planner.measured().items():
        if rounds:
            lines.append(
                f"measured, {mode}: {rounds} rounds, {tokens} tokens, {tokens / seconds:.0f} tokens/s "
                f"(predicted {tokens / predicted:.0f})"
            )
    return "\n".join(lines)
