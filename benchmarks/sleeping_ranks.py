"""Pipelines of 2 to 16 processes on a few cores: real ranks and real messages, stages that sleep instead of computing.

    python benchmarks/sleeping_ranks.py --stages 2,4,8,16 --link-ms 0,1,5 > benchmarks/results/...-sleeping-ranks.json

A model whose plain token takes `--token-ms` is cut into equal stages, one to a process. Scheduler, stations, messages
and roll-backs are those of `torchrun ... -m ppsd_rt`; only the arithmetic is made up: a stage is busy until its time is
over, and the text is a hash. So the processes need hardly any CPU, and a pipeline of 16 stages fits on two cores.
Drafts come from an oracle. Its coins are those of the simulator, so both decode the same text with the same mistakes.
Every answer is compared with the text. `simulated` and `closed_form` know the costs that the stages are told to take,
and nothing of this machine.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from ranks import MEASURED, launch

from ppsd_rt._native import StageCosts, pass_words
from ppsd_rt.backend import Cancellation, Oracle, RunOptions
from ppsd_rt.cli.info import machine
from ppsd_rt.errors import PpsdError
from ppsd_rt.lab.cli.bench_options import list_of
from ppsd_rt.lab.simulate import equal_stages, simulate
from ppsd_rt.models.head_file import HeadInfo
from ppsd_rt.pipeline.rounds import Limits, Round
from ppsd_rt.pipeline.schedule import Schedule, parse_schedule
from ppsd_rt.planning.closed_forms import closed_form
from ppsd_rt.ranks.python_stages import TEXT_BLOCKS, Cancelled, PythonDrafter, PythonStation, Rows
from ppsd_rt.ranks.world import World, find_world
from ppsd_rt.sampling.params import SamplingParams

VOCABULARY = 1000
HIDDEN = 4096  # a row's message is as long as that of a 7B model
SCHEDULES = ("plain", "eesd", "ppsd", "elastic", "auto")
_POLL = 0.001  # seconds between two looks whether the work at hand has become void
_SILENCE = 60.0


def text_of(length: int) -> list[int]:
    """The made-up model's answer to the prompt [0], prompt included: each token depends on all before it."""
    text = Text()
    text.go_on(0, [0])
    while len(text.ids) < length:
        text.go_on(len(text.ids), [text.next_after(len(text.ids) - 1)])
    return text.ids


class Text:
    """The rows that a stage holds."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._states: list[int] = []

    def go_on(self, start: int, ids: Sequence[int]) -> None:
        if start > len(self.ids):
            raise ValueError("a message left a gap")
        del self.ids[start:], self._states[start:]
        for token in ids:
            self._states.append(self._after(len(self.ids), token))
            self.ids.append(token)

    def _after(self, position: int, token: int) -> int:
        return hash((self._states[position - 1] if position else 0, token))

    def next_after(self, row: int) -> int:
        return self._states[row] % VOCABULARY


class Stage:
    """Holds rows and takes its time. What it overslept is taken off the next piece of work: the wake-ups of a machine
    whose cores are busy elsewhere come late, and must not add up to a slower stage."""

    def __init__(self) -> None:
        self.text, self._late = Text(), 0.0

    @property
    def length(self) -> int:
        return len(self.text.ids)

    def begin(self, keep: int, end: int, prompt: int, params: SamplingParams) -> None:
        self.text.go_on(keep, [])

    def spend(self, seconds: float, cancelled: Cancelled) -> bool:
        """False: the work became void on the way."""
        end, self._late = time.perf_counter() + seconds - min(self._late, seconds), 0.0
        while (left := end - time.perf_counter()) > 0:
            time.sleep(min(left, _POLL))
            if cancelled and cancelled():
                return False
        self._late = time.perf_counter() - end
        return True


class SleepingVerify(Stage):
    """seconds: of a pass over 1, 2, ... rows; more rows go through in several passes."""

    def __init__(self, seconds: Sequence[float]) -> None:
        super().__init__()
        self._seconds = seconds

    def run(self, start: int, ids: Sequence[int], hidden: Rows, cancelled: Cancelled) -> Rows | None:
        self.text.go_on(start, ids)
        most, rows = len(self._seconds), len(ids)
        seconds = rows // most * self._seconds[-1] + (self._seconds[rows % most - 1] if rows % most else 0.0)
        return hidden if self.spend(seconds, cancelled) else None

    def choose(self, last: int) -> list[int]:
        return [self.text.next_after(row) for row in range(self.length - last, self.length)]


class SleepingDraft(Stage):
    """Draws token 0: an oracle puts right and wrong ones in its place. confidence: that it says it has."""

    def __init__(self, costs: StageCosts) -> None:
        super().__init__()
        self._costs, self.confidence = costs, 0.0

    def learn(self, position: int, hidden: Rows) -> None:
        raise AssertionError("this head hears nothing")

    def step(self, start: int, ids: Sequence[int], draw: bool, cancelled: Cancelled) -> tuple[int, float] | None:
        self.text.go_on(start, ids)
        seconds = self._costs.step(len(ids), draw)
        return (0, self.confidence) if self.spend(seconds, cancelled) else None

    def exported(self, start: int, count: int) -> Rows:
        return np.zeros((count, HIDDEN), np.float32)


class _NoSlices:
    """What a backend asks of the weights that it does not have."""

    dtype, kind, bytes, answers, siblings, extras, blocks = "none", "sleeping", 0, 1, False, False, TEXT_BLOCKS

    def __init__(self, drafter: PythonDrafter) -> None:
        self.loop = drafter.loop

    def facts(self) -> dict[str, Any]:
        return {}


# -- a rank ------------------------------------------------------------------------------------------------------------


def work(world: World, task: dict[str, Any]) -> None:
    from ppsd_rt.ranks.connect import connect
    from ppsd_rt.ranks.control import Control
    from ppsd_rt.ranks.launch import leave
    from ppsd_rt.ranks.links import CONTROL
    from ppsd_rt.ranks.meeting import Meeting, open_store
    from ppsd_rt.ranks.stage import serve

    sys.setswitchinterval(0.0005)
    costs, delay = StageCosts.from_dict(task["costs"]), task["link_ms"] / 1000
    store = open_store(world)
    meeting = Meeting(store.clone(), world)
    groups = connect(store, meeting)
    control = Control(groups[CONTROL], world, _SILENCE, delay)
    control.start()
    meeting.close()
    try:
        if world.drafts:
            answers(groups, control, costs, task)
        else:
            stage = SleepingVerify(costs.stages[world.rank - 1])
            serve(
                groups,
                control,
                PythonStation(stage, HIDDEN, world.rank == world.last, delay),
                pass_words(HIDDEN),
                0,
                None,
                TEXT_BLOCKS,
            )
    except PpsdError as error:
        control.fail(f"rank {world.rank}: {error}")
        print(error, file=sys.stderr, flush=True)
        leave(None, 1)
    leave(None, 0)


def answers(groups: dict[int, Any], control: Any, costs: StageCosts, task: dict[str, Any]) -> None:
    """Every schedule at every acceptance, in turns; the result is printed after MEASURED."""
    from ppsd_rt.ranks.backend import RanksBackend

    stage = SleepingDraft(costs)
    drafter = PythonDrafter(stage, HIDDEN, VOCABULARY, True, False)
    head, sizes = HeadInfo("norm", 1, "sleeping", ""), (1,) * control.world.size
    words = pass_words(HIDDEN)
    backend = RanksBackend(groups, control, drafter, _NoSlices(drafter), head, sizes, VOCABULARY, words, 1)
    backend.open()
    truth, rows = text_of(2 + task["tokens"]), []
    for repeat in range(task["repeats"]):
        for acceptance in task["acceptance"]:
            stage.confidence = acceptance
            for name in task["schedules"]:
                oracle = None if name == "plain" else Oracle((*truth, 0), acceptance, repeat)
                schedule = parse_schedule(name)
                if not isinstance(schedule, Schedule):
                    backend.costs()  # measured before the clock runs
                before = backend.report()
                rounds = [
                    event
                    for event in backend.rounds(
                        truth[:1],
                        SamplingParams(),
                        schedule,
                        Limits(len(truth)),
                        RunOptions(oracle=oracle),
                        Cancellation(),
                    )
                    if isinstance(event, Round)
                ]
                if [token for round in rounds for token in round.committed] != truth[1:]:
                    raise PpsdError(f"{name} at {acceptance}: the answer differs from plain decoding")
                seconds = rounds[-1].seconds - rounds[0].seconds
                after = backend.report()
                work = [[a[3] - b[3], a[4] - b[4], a[5] - b[5]] for a, b in zip(after, before, strict=True)]
                rows.append(
                    {"schedule": name, "acceptance": acceptance, "seed": repeat, "seconds": seconds}
                    | {"rounds": len(rounds) - 1, "work": work}
                )
    link = backend.costs().turns.links[0] if task["measure"] else None
    backend.close()
    result = {"rows": rows, "measured_link_ms": None if link is None else 1000 * link}
    print(MEASURED, json.dumps(result), flush=True)


# -- the driver --------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, stages: int, link_ms: float) -> dict[str, Any]:
    """One pipeline: a row for each schedule at each acceptance, beside formula and simulator."""
    costs = equal_stages(stages, args.head_ms / 1e3, link_ms / 1e3, args.token_ms / 1e3, args.row_share)
    task = {"costs": costs.to_dict(), "link_ms": link_ms, "tokens": args.tokens, "repeats": args.repeats}
    task |= {"acceptance": args.acceptance, "schedules": args.schedules, "measure": "auto" in args.schedules}
    result = launch(__file__, stages, task)
    rows = [beside(row, args, costs) for row in result["rows"]]
    return {"stages": stages, "link_ms": link_ms, **result, "rows": rows}


def beside(row: dict[str, Any], args: argparse.Namespace, costs: StageCosts) -> dict[str, Any]:
    """The row with its speed, and what simulator and formula say of it."""
    schedule, speed = parse_schedule(row["schedule"]), args.tokens / row["seconds"]
    row = {**row, "tokens_per_second": speed, "speedup": speed * costs.plain_step}
    if isinstance(schedule, Schedule):
        simulation = simulate(schedule, costs, row["acceptance"], args.tokens, seed=row["seed"])
        simulated = simulation.tokens_per_second
        row["simulated"] = simulated * costs.plain_step
        row["over_simulated"] = speed / simulated
        row["closed_form"] = closed_form(schedule, costs, row["acceptance"])
    return row


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=list_of(int), default=[2, 4, 8, 16])
    parser.add_argument("--link-ms", type=list_of(float), default=[0.0, 1.0, 5.0])
    parser.add_argument("--acceptance", type=list_of(float), default=[0.6, 0.8, 0.9])
    parser.add_argument("--schedules", type=list_of(str), default=list(SCHEDULES))
    parser.add_argument("-n", "--tokens", type=int, default=64)
    parser.add_argument("-r", "--repeats", type=int, default=2, help="each with other mistakes of the oracle")
    parser.add_argument("--token-ms", type=float, default=160.0, help="of a plain token, through all stages")
    parser.add_argument("--head-ms", type=float, default=0.5, help="of the exit head")
    parser.add_argument("--row-share", type=float, default=0.02, help="what a further row adds to a pass")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    return parser


def main() -> int:
    args = parser().parse_args()
    if args.worker:
        world = find_world()
        assert world is not None
        work(world, args.worker)
    runs = [measure(args, stages, link_ms) for stages in args.stages for link_ms in args.link_ms]
    options = {name: value for name, value in vars(args).items() if name != "worker"}
    print(json.dumps({"measurement": "sleeping-ranks", "machine": machine(), "options": options, "runs": runs}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
