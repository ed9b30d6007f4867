"""Many answers over 2 to 8 ranks on a few cores: real ranks, real messages, real answers; stages that take their time.

    python benchmarks/sleeping_loop.py --stages 4,8 --clients 1,2,4,8,16 > benchmarks/results/...-sleeping-loop.json

The default model is cut into slices, one to a process, and every slice is busy as long as the stage of a model would be
whose plain token takes `--token-ms` (csrc/pipeline/dwell.h). The slices compute too, so answers are real ones, and each
is compared with one process's; they need little of a core. What is measured is the loop (csrc/decoding/loop.h):
`in turn` has the same ranks decode one answer after the other.
"""

import argparse
import json
import sys
import time
from typing import Any

from made_up_costs import equal_costs
from ranks import MEASURED, launch

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.cli.info import machine
from ppsd_rt.engine import Engine as AnyEngine
from ppsd_rt.errors import PpsdError
from ppsd_rt.lab.cli.bench_options import list_of
from ppsd_rt.ranks import slices
from ppsd_rt.ranks.world import find_world

LAYERS, EXIT = 30, 3  # of the default model
QUESTIONS = (
    "Why is the sky blue?", "Tell me about rivers.", "What is a cat?", "Name three colours.", "Describe a tree.",
    "Who was Ada Lovelace?", "How do I boil an egg?", "What is a prime number?", "Why do leaves fall?",
    "What does a baker do?", "Where does rain come from?", "What is a verb?", "How far is the moon?",
    "What is salt made of?", "Why do we sleep?", "What is a bridge?",
)  # fmt: skip


def sizes_of(stages: int) -> tuple[int, ...]:
    """The exit head's layers, and the others in as equal parts as can be."""
    late = LAYERS - EXIT
    return EXIT, *((late * (i + 1)) // (stages - 1) - late * i // (stages - 1) for i in range(stages - 1))


class SleepingSlices(slices.CpuSlices):
    """Stages of the loop that take the time of `seconds`; draw: of a draft of the exit head."""

    seconds: tuple[float, ...] = ()
    draw = 0.0

    def station(self, *given: Any) -> Any:
        station = super().station(*given)
        station.dwell(self.seconds)  # type: ignore[union-attr]
        return station

    def loop(self, stages: int, blocks: int) -> Any:
        loop = super().loop(stages, blocks)
        loop.dwell(self.seconds, self.draw)
        return loop


# -- a rank ------------------------------------------------------------------------------------------------------------


def work(task: dict[str, Any]) -> None:
    from ppsd_rt.ranks import backend
    from ppsd_rt.ranks.launch import join, leave
    from ppsd_rt.ranks.options import RankOptions

    world = find_world()
    assert world is not None
    costs = equal_costs(world.size, task["token_ms"], task["head_ms"], task["row_share"], 0.0)
    SleepingSlices.seconds, SleepingSlices.draw = tuple(costs.stages[0]), task["head_ms"] / 1000
    slices.CpuSlices = SleepingSlices  # type: ignore[misc]
    # What a planner would measure is the slices; what it is to know is how long they take.
    backend.RanksBackend.measure = lambda self: (costs, costs)  # type: ignore[method-assign]
    if task["in_turn"]:
        slices.MOST_ANSWERS = 1  # type: ignore[misc]
    options = RankOptions(
        dtype="int8", sizes=sizes_of(world.size), schedule="", silence=60.0, link_delay=task["link_ms"] / 1000
    )
    engine = join(world, options)
    if engine is not None:
        print(MEASURED, json.dumps(measure(engine, task)), flush=True)
    leave(engine, 0)


def measure(engine: AnyEngine, task: dict[str, Any]) -> list[dict[str, Any]]:
    with Engine.from_pretrained(dtype="int8", threads=1) as alone:
        asked = [[{"role": "user", "content": question}] for question in QUESTIONS[: max(task["clients"])]]
        params = SamplingParams(max_tokens=task["tokens"], ignore_eos=True)
        truth = [alone.generate(each, params, "plain").run().ids for each in asked]
    rows = []
    for clients in task["clients"]:
        for schedule in task["schedules"]:
            engine.generate_many(asked[:clients], SamplingParams(max_tokens=8), schedule).run()
            before, begun = counts(engine), time.perf_counter()
            answers = engine.generate_many(asked[:clients], params, schedule).run()
            seconds = time.perf_counter() - begun
            after = counts(engine)
            if [answer.ids for answer in answers] != truth[:clients]:
                raise PpsdError(f"{schedule} with {clients} clients: an answer differs from plain decoding")
            rows.append(
                {"clients": clients, "schedule": schedule, "tokens_per_second": clients * task["tokens"] / seconds}
                | {name: after[name] - before[name] for name in ("rounds", "rows", "draft_rows")}
            )
    return rows


def counts(engine: AnyEngine) -> dict[str, int]:
    return dict(engine.backend._answers.loop.counts)  # type: ignore[attr-defined]


# -- the driver --------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=list_of(int), default=[4, 8])
    parser.add_argument("--clients", type=list_of(int), default=[1, 2, 4, 8, 16])
    parser.add_argument("--schedules", type=list_of(str), default=["plain", "ppsd", "auto"])
    parser.add_argument("-n", "--tokens", type=int, default=40)
    parser.add_argument("--token-ms", type=float, default=160.0, help="of a plain token, through all stages")
    parser.add_argument("--head-ms", type=float, default=2.0, help="of the exit head")
    parser.add_argument("--row-share", type=float, default=0.02, help="what a further row adds to a pass")
    parser.add_argument("--link-ms", type=float, default=0.0)
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    return parser


def run(args: argparse.Namespace, stages: int) -> list[dict[str, Any]]:
    """First one answer after the other, on the same ranks; then as many at once as there are clients."""
    rows = []
    for in_turn in (True, False):
        task = {name: value for name, value in vars(args).items() if name not in ("worker", "stages")}
        task |= {"in_turn": in_turn}
        if in_turn:
            task |= {"clients": [2], "schedules": ["plain"]}
        for row in launch(__file__, stages, task):
            rows.append({"stages": stages, "in_turn": in_turn, **row})
            rows[-1]["over_in_turn"] = row["tokens_per_second"] / rows[0]["tokens_per_second"]
    return rows


def main() -> int:
    args = parser().parse_args()
    if args.worker:
        work(args.worker)
    runs = [row for stages in args.stages for row in run(args, stages)]
    options = {name: value for name, value in vars(args).items() if name != "worker"}
    print(json.dumps({"measurement": "sleeping-loop", "machine": machine(), "options": options, "runs": runs}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
